//! PostgreSQL.

use std::time::Duration;

use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool, Postgres, Row as _};

use super::Engine;
use super::catalogue::{Index, Table, means, stem};
use super::claim::{Cells, cell, flag, number};
use super::sql::{Column, Dialect, Kind, Sql, Value};
use crate::store::Tables;
use crate::{Adopted, Error};

/// Claims, write-backs, renewals.
const CONNECTIONS: u32 = 3;

#[derive(Debug)]
pub(crate) struct PostgresAdopted {
    pool: PgPool,
    tables: Tables,
    deadline: Duration,
}

impl PostgresAdopted {
    pub(crate) fn new(pool: &PgPool, tables: &Tables, deadline: Duration) -> Self {
        let options = (*pool.connect_options()).clone();
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(deadline)
            .test_before_acquire(false)
            .idle_timeout(None)
            .connect_lazy_with(options);
        Self { pool, tables: tables.clone(), deadline }
    }
}

impl Engine for PostgresAdopted {
    type Db = Postgres;
    const DIALECT: Dialect = Dialect::Postgres;
    const CONNECTIONS: u32 = CONNECTIONS;

    fn pool(&self) -> &PgPool {
        &self.pool
    }

    fn tables(&self) -> &Tables {
        &self.tables
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    async fn fetch(conn: &mut PgConnection, sql: Sql) -> Result<Vec<Cells>, sqlx::Error> {
        let mut query = sqlx::query(sql.text());
        for value in sql.values {
            query = match value {
                Value::Int(n) => query.bind(n),
                Value::Unsigned(n) => query.bind(i64::try_from(n).unwrap_or(i64::MAX)),
                Value::Text(text) => query.bind(text),
                Value::Texts(texts) => query.bind(texts),
            };
        }
        let rows = query.fetch_all(conn).await?;
        rows.iter().map(|row| (0..row.len()).map(|n| row.try_get_unchecked::<Option<Vec<u8>>, _>(n)).collect()).collect()
    }

    async fn execute(conn: &mut PgConnection, sql: Sql) -> Result<u64, sqlx::Error> {
        let mut query = sqlx::query(sql.text());
        for value in sql.values {
            query = match value {
                Value::Int(n) => query.bind(n),
                Value::Unsigned(n) => query.bind(i64::try_from(n).unwrap_or(i64::MAX)),
                Value::Text(text) => query.bind(text),
                Value::Texts(texts) => query.bind(texts),
            };
        }
        Ok(query.execute(conn).await?.rows_affected())
    }

    async fn catalogue(conn: &mut PgConnection, tables: &Tables, mapping: &Adopted) -> Result<(String, Vec<Table>), Error> {
        let ask = |text: &str| Sql::new(Dialect::Postgres, text);
        let own = tables.schema().unwrap_or("public").to_owned();
        let schema = mapping.schema.clone().unwrap_or_else(|| own.clone());
        let mut sql = ask("SELECT c.relname::text, c.oid::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.relkind IN ('r', 'p') AND n.nspname = ");
        sql.bind_text(&schema);
        match stem(&mapping.table) {
            Some(stem) => {
                let escaped = stem.replace('|', "||").replace('%', "|%").replace('_', "|_");
                sql.push(" AND c.relname LIKE ").bind(Value::Text(format!("{escaped}%"))).push(" ESCAPE '|'")
            }
            None => sql.push(" AND c.relname = ").bind_text(&mapping.table),
        };
        let mut found: Vec<(String, i64)> =
            Self::fetch(conn, sql).await?.iter().filter_map(|r| Some((cell(r, 0)?, number(r, 1)?))).collect();
        found.retain(|(name, _)| means(&mapping.table, name));
        found.sort();
        let mut out = Vec::new();
        for (name, oid) in found {
            // With -1 the name of the type is one that nothing is cut to.
            let mut sql = ask("SELECT a.attname::text, format_type(a.atttypid, -1), t.typtype::text, \
                    CASE WHEN a.atttypid IN ('varchar'::regtype, 'bpchar'::regtype) AND a.atttypmod > 4 THEN (a.atttypmod - 4)::text END \
                 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid \
                 WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attrelid = ");
            sql.bind(Value::Int(oid)).push("::oid ORDER BY a.attnum");
            let columns = Self::fetch(conn, sql).await?.iter().map(column).collect();
            let mut sql = ask("SELECT c.relname::text, CASE WHEN i.indisunique THEN '1' ELSE '0' END, a.attname::text, \
                    pg_get_expr(i.indpred, i.indrelid), CASE WHEN i.indisprimary THEN '1' ELSE '0' END \
                 FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid \
                    CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY k (attnum, place) \
                    LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum AND k.attnum > 0 \
                 WHERE i.indisvalid AND k.place <= i.indnkeyatts AND i.indrelid = ");
            sql.bind(Value::Int(oid)).push("::oid ORDER BY c.relname, k.place");
            let mut indexes: Vec<Index> = Vec::new();
            for part in Self::fetch(conn, sql).await? {
                let (name, column) = (cell(&part, 0).unwrap_or_default(), cell(&part, 2).unwrap_or_default());
                match indexes.last_mut().filter(|last| last.name == name) {
                    Some(last) => last.columns.push(column),
                    None => indexes.push(Index {
                        name,
                        unique: flag(&part, 1),
                        primary: flag(&part, 4),
                        columns: vec![column],
                        only: cell(&part, 3),
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
    let (plain, sql_type) = (text(0), text(1));
    let kind = match (sql_type.as_str(), text(2).as_str()) {
        ("smallint" | "integer" | "bigint", _) => Kind::Int,
        ("numeric" | "real" | "double precision", _) => Kind::Number,
        ("boolean", _) => Kind::Bool,
        ("text" | "character varying" | "bpchar" | "uuid", _) | (_, "e") => Kind::Text,
        ("json" | "jsonb", _) => Kind::Json,
        ("bytea", _) => Kind::Binary,
        ("timestamp without time zone" | "timestamp with time zone", _) => Kind::Time,
        _ => Kind::Other,
    };
    let name = Dialect::Postgres.quote(&plain);
    Column { plain, kind, name, sql_type, characters: number(cells, 3), highest: char::MAX }
}
