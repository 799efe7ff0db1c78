//! MySQL and MariaDB.

use std::time::Duration;

use sqlx::mysql::MySqlPoolOptions;
use sqlx::{Executor as _, MySql, MySqlConnection, MySqlPool, Row as _};

use super::Engine;
use super::catalogue::{Index, Table, means, stem};
use super::claim::{Cells, cell, flag, number};
use super::sql::{Column, Dialect, Kind, Sql, Value};
use crate::store::Tables;
use crate::{Adopted, Error};

/// Claims, write-backs, renewals.
const CONNECTIONS: u32 = 3;

/// A connection that was idle this long is closed by the server.
const IDLE: u64 = 300;

#[derive(Debug)]
pub(crate) struct MySqlAdopted {
    pool: MySqlPool,
    tables: Tables,
    deadline: Duration,
}

impl MySqlAdopted {
    pub(crate) fn new(pool: &MySqlPool, tables: &Tables, deadline: Duration) -> Self {
        // The server's own time zone: its NOW() is what the owner's columns are compared with.
        let options = (*pool.connect_options()).clone().charset("utf8mb4").timezone(None::<String>);
        // Nothing is waited for longer than a moment: the rows belong to others.
        let session = format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
             SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, innodb_lock_wait_timeout = {}, \
             wait_timeout = {IDLE}",
            deadline.as_secs().clamp(1, 5)
        );
        let pool = MySqlPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(deadline)
            .test_before_acquire(false)
            .idle_timeout(Duration::from_secs(IDLE / 2))
            .after_connect(move |conn, _| {
                let session = sqlx::SqlSafeStr::into_sql_str(sqlx::AssertSqlSafe(session.clone()));
                Box::pin(async move {
                    conn.execute(sqlx::raw_sql(session)).await?;
                    Ok(())
                })
            })
            .connect_lazy_with(options);
        Self { pool, tables: tables.clone(), deadline }
    }
}

impl Engine for MySqlAdopted {
    type Db = MySql;
    const DIALECT: Dialect = Dialect::MySql;
    const CONNECTIONS: u32 = CONNECTIONS;

    fn pool(&self) -> &MySqlPool {
        &self.pool
    }

    fn tables(&self) -> &Tables {
        &self.tables
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    async fn fetch(conn: &mut MySqlConnection, sql: Sql) -> Result<Vec<Cells>, sqlx::Error> {
        let mut query = sqlx::query(sql.text());
        for value in sql.values {
            query = match value {
                Value::Int(n) => query.bind(n),
                Value::Unsigned(n) => query.bind(n),
                Value::Text(text) => query.bind(text),
                // There are no arrays.
                Value::Texts(_) => query.bind(None::<String>),
            };
        }
        let rows = query.fetch_all(conn).await?;
        rows.iter().map(|row| (0..row.len()).map(|n| row.try_get_unchecked::<Option<Vec<u8>>, _>(n)).collect()).collect()
    }

    async fn execute(conn: &mut MySqlConnection, sql: Sql) -> Result<u64, sqlx::Error> {
        let mut query = sqlx::query(sql.text());
        for value in sql.values {
            query = match value {
                Value::Int(n) => query.bind(n),
                Value::Unsigned(n) => query.bind(n),
                Value::Text(text) => query.bind(text),
                // There are no arrays.
                Value::Texts(_) => query.bind(None::<String>),
            };
        }
        Ok(query.execute(conn).await?.rows_affected())
    }

    async fn catalogue(conn: &mut MySqlConnection, tables: &Tables, mapping: &Adopted) -> Result<(String, Vec<Table>), Error> {
        let ask = |text: &str| Sql::new(Dialect::MySql, text);
        let own = match tables.schema() {
            Some(schema) => schema.to_owned(),
            None => {
                let rows = Self::fetch(conn, ask("SELECT CAST(DATABASE() AS CHAR)")).await?;
                rows.first().and_then(|r| cell(r, 0)).unwrap_or_default()
            }
        };
        let schema = mapping.schema.clone().unwrap_or_else(|| own.clone());
        let mut sql = ask(
            "SELECT CAST(TABLE_NAME AS CHAR) FROM information_schema.TABLES WHERE TABLE_TYPE = 'BASE TABLE' AND TABLE_SCHEMA = ",
        );
        sql.bind_text(&schema);
        match stem(&mapping.table) {
            Some(stem) => {
                let escaped = stem.replace('|', "||").replace('%', "|%").replace('_', "|_");
                sql.push(" AND TABLE_NAME LIKE ").bind(Value::Text(format!("{escaped}%"))).push(" ESCAPE '|'")
            }
            None => sql.push(" AND TABLE_NAME = ").bind_text(&mapping.table),
        };
        let mut names: Vec<String> = Self::fetch(conn, sql).await?.iter().filter_map(|r| cell(r, 0)).collect();
        names.retain(|name| means(&mapping.table, name));
        names.sort();
        let mut out = Vec::new();
        for name in names {
            let mut sql = ask("SELECT CAST(COLUMN_NAME AS CHAR), CAST(DATA_TYPE AS CHAR), CAST(COLUMN_TYPE AS CHAR), \
                    CAST(CHARACTER_MAXIMUM_LENGTH AS CHAR), CAST(CHARACTER_SET_NAME AS CHAR) \
                 FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = ");
            sql.bind_text(&schema).push(" AND TABLE_NAME = ").bind_text(&name).push(" ORDER BY ORDINAL_POSITION");
            let columns = Self::fetch(conn, sql).await?.iter().map(column).collect();
            let mut sql = ask("SELECT CAST(INDEX_NAME AS CHAR), CASE WHEN NON_UNIQUE = 0 THEN '1' ELSE '0' END, \
                    CAST(CASE WHEN SUB_PART IS NULL THEN COLUMN_NAME END AS CHAR) \
                 FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = ");
            sql.bind_text(&schema).push(" AND TABLE_NAME = ").bind_text(&name).push(" ORDER BY INDEX_NAME, SEQ_IN_INDEX");
            let mut indexes: Vec<Index> = Vec::new();
            for part in Self::fetch(conn, sql).await? {
                let (name, column) = (cell(&part, 0).unwrap_or_default(), cell(&part, 2).unwrap_or_default());
                match indexes.last_mut().filter(|last| last.name == name) {
                    Some(last) => last.columns.push(column),
                    None => indexes.push(Index {
                        unique: flag(&part, 1),
                        primary: name == "PRIMARY",
                        name,
                        columns: vec![column],
                        only: None,
                    }),
                }
            }
            out.push(Table { schema: schema.clone(), name, columns, indexes });
        }
        Ok((own, out))
    }
}

fn column(cells: &Cells) -> Column {
    let text = |n: usize| cell(cells, n).unwrap_or_default();
    let (plain, data_type, sql_type, charset) = (text(0), text(1).to_lowercase(), text(2), text(4));
    let kind = match data_type.as_str() {
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" if sql_type.contains("unsigned") => Kind::UnsignedInt,
        "tinyint" | "smallint" | "mediumint" | "int" | "bigint" => Kind::Int,
        "decimal" | "float" | "double" => Kind::Number,
        // MariaDB's is a text to the catalogue too.
        "json" => Kind::Json,
        "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" | "enum" | "uuid" => Kind::Text,
        "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => Kind::Binary,
        "datetime" | "timestamp" => Kind::Time,
        _ => Kind::Other,
    };
    let highest = match charset.as_str() {
        "utf8" | "utf8mb3" | "ucs2" => '\u{ffff}',
        "" | "utf8mb4" | "utf16" | "utf16le" | "utf32" => char::MAX,
        _ => '\u{7f}',
    };
    let name = Dialect::MySql.quote(&plain);
    Column { plain, kind, name, sql_type, characters: number(cells, 3), highest }
}
