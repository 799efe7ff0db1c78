//! Archives as Parquet files.

use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::data_type::{ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::reader::SerializedFileReader;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::record::reader::RowIter;
use ::parquet::record::{Field, RowAccessor};
use ::parquet::schema::parser::parse_message_type;
use bytes::Bytes;

use super::encode::{Rows, unreadable, unwritable};
use crate::Error;
use crate::store::LogRow;

const SCHEMA: &str = "message posthouse_message {
    required int64 id;
    required binary message_id (UTF8);
    required binary type (UTF8);
    required binary destination (UTF8);
    optional binary key (UTF8);
    required binary payload;
    required binary content_type (UTF8);
    optional binary headers (JSON);
    required int64 created_at (TIMESTAMP(MICROS, true));
    optional int64 deliver_at (TIMESTAMP(MICROS, true));
    optional int32 max_attempts;
}";

/// A file in the making, in memory: each push is a row group.
pub(super) struct Encoder(SerializedFileWriter<Vec<u8>>);

impl Encoder {
    pub(super) fn new() -> Result<Self, Error> {
        let schema = Arc::new(parse_message_type(SCHEMA).map_err(unwritable)?);
        let properties = Arc::new(WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build());
        Ok(Self(SerializedFileWriter::new(Vec::new(), schema, properties).map_err(unwritable)?))
    }

    pub(super) fn push(&mut self, rows: &[LogRow]) -> Result<(), Error> {
        let mut group = self.0.next_row_group().map_err(unwritable)?;
        let text = |of: fn(&LogRow) -> &[u8]| rows.iter().map(|row| ByteArray::from(of(row).to_vec())).collect::<Vec<_>>();
        let texts = |of: fn(&LogRow) -> Option<&str>| {
            rows.iter().map(|row| of(row).map(|text| ByteArray::from(text.as_bytes().to_vec()))).collect::<Vec<_>>()
        };
        required::<Int64Type>(&mut group, &rows.iter().map(|row| row.id).collect::<Vec<_>>())?;
        required::<ByteArrayType>(&mut group, &text(|row| row.message_id.as_bytes()))?;
        required::<ByteArrayType>(&mut group, &text(|row| row.kind.as_bytes()))?;
        required::<ByteArrayType>(&mut group, &text(|row| row.destination.as_bytes()))?;
        optional::<ByteArrayType>(&mut group, texts(|row| row.key.as_deref()))?;
        required::<ByteArrayType>(&mut group, &text(|row| &row.payload))?;
        required::<ByteArrayType>(&mut group, &text(|row| row.content_type.as_bytes()))?;
        optional::<ByteArrayType>(&mut group, texts(|row| row.headers.as_deref()))?;
        required::<Int64Type>(&mut group, &rows.iter().map(|row| row.created_us).collect::<Vec<_>>())?;
        optional::<Int64Type>(&mut group, rows.iter().map(|row| row.deliver_us).collect())?;
        optional::<Int32Type>(&mut group, rows.iter().map(|row| row.max_attempts).collect())?;
        group.close().map_err(unwritable)?;
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.0.bytes_written()
    }

    pub(super) fn finish(self) -> Result<Vec<u8>, Error> {
        self.0.into_inner().map_err(unwritable)
    }
}

type Group<'w> = SerializedRowGroupWriter<'w, Vec<u8>>;

fn column<T: DataType>(group: &mut Group<'_>, values: &[T::T], present: Option<&[i16]>) -> Result<(), Error> {
    let column = group.next_column().map_err(unwritable)?;
    let mut column = column.ok_or_else(|| unwritable("the schema has fewer columns"))?;
    column.typed::<T>().write_batch(values, present, None).map_err(unwritable)?;
    column.close().map_err(unwritable)
}

fn required<T: DataType>(group: &mut Group<'_>, values: &[T::T]) -> Result<(), Error> {
    column::<T>(group, values, None)
}

fn optional<T: DataType>(group: &mut Group<'_>, values: Vec<Option<T::T>>) -> Result<(), Error> {
    let present: Vec<i16> = values.iter().map(|value| i16::from(value.is_some())).collect();
    column::<T>(group, &values.into_iter().flatten().collect::<Vec<_>>(), Some(&present))
}

pub(super) fn read(bytes: &[u8]) -> Result<Rows<'_>, Error> {
    let reader = SerializedFileReader::new(Bytes::copy_from_slice(bytes)).map_err(unreadable)?;
    Ok(Box::new(RowIter::from_file_into(Box::new(reader)).map(|row| {
        let row = row.map_err(unreadable)?;
        let message = || -> Result<LogRow, ::parquet::errors::ParquetError> {
            let there = |column| !matches!(row.get_column_iter().nth(column), Some((_, Field::Null)) | None);
            Ok(LogRow {
                id: row.get_long(0)?,
                message_id: row.get_string(1)?.clone(),
                kind: row.get_string(2)?.clone(),
                destination: row.get_string(3)?.clone(),
                key: there(4).then(|| row.get_string(4).cloned()).transpose()?,
                payload: row.get_bytes(5)?.data().to_vec(),
                content_type: row.get_string(6)?.clone(),
                headers: there(7).then(|| row.get_string(7).cloned()).transpose()?,
                created_us: row.get_timestamp_micros(8)?,
                deliver_us: there(9).then(|| row.get_timestamp_micros(9)).transpose()?,
                max_attempts: there(10).then(|| row.get_int(10)).transpose()?,
            })
        };
        message().map_err(unreadable)
    })))
}
