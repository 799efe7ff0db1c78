//! What `posthouse doctor` asks.

use sqlx::SqliteConnection;

use super::migrate::{in_memory, templates, version};
use super::now;
use crate::Error;
use crate::store::{Examination, Finding, LogFacts, Tables, expected_indexes, expected_tables};

/// Of a larger file than this (in bytes) at least half should be in use.
const LARGE: i64 = 100 << 20;

pub(super) async fn examine(conn: &mut SqliteConnection, tables: &Tables) -> Result<Examination, Error> {
    let (server, number, now_ms): (String, i64, i64) = sqlx::query_as(concat!(
        "SELECT 'SQLite ' || sqlite_version(), \
           CAST(substr(sqlite_version(), 3, instr(substr(sqlite_version(), 3), '.') - 1) AS INTEGER), ",
        now!()
    ))
    .fetch_one(&mut *conn)
    .await?;
    let mut out = Examination::new(server, now_ms);
    out.supported(number >= 40, "SQLite 3.40");
    let Some(schema_version) = version(conn, tables).await? else { return Ok(out) };
    let houses: i64 = sqlx::query_scalar(tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *conn).await?;
    out.schema = Some((schema_version, u16::try_from(houses).unwrap_or(0)));
    let there: Vec<String> =
        sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE type IN ('table', 'index')").fetch_all(&mut *conn).await?;
    let missing: Vec<String> = expected_tables(&templates())
        .into_iter()
        .map(|t| format!("{}{t}", tables.prefix()))
        .filter(|t| !there.contains(t))
        .collect();
    if !missing.is_empty() {
        out.findings.push(Finding::error("tables", format!("missing: {}", missing.join(", ")), "run `posthouse migrate`"));
    }
    match sqlx::raw_sql(super::WRITE).execute(&mut *conn).await {
        Ok(_) => {
            sqlx::raw_sql("ROLLBACK").execute(&mut *conn).await?;
            out.findings.push(Finding::ok("privileges", "the file can be written"));
        }
        Err(e) => out.findings.push(Finding::error(
            "privileges",
            format!("the file can't be written: {e}"),
            "let this user write the file and its directory (SQLite puts a journal beside it), and end a process that holds it",
        )),
    }
    let wanted = expected_indexes(&templates()).into_iter();
    let statements: Vec<String> =
        wanted.filter(|i| !there.contains(&tables.text(&i.name))).map(|i| tables.text(&i.make)).collect();
    out.indexes(&statements);
    let problems = super::relay::problems(conn, tables).await?;
    out.publishing(problems);
    file(conn, &mut out).await?;
    out.log = log(conn, tables).await?;
    Ok(out)
}

async fn file(conn: &mut SqliteConnection, out: &mut Examination) -> Result<(), Error> {
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await?;
    if mode != "wal" && !in_memory(conn).await? {
        out.findings.push(Finding::warning(
            "file",
            format!("its journal mode is {mode}, so publishers and the relay wait for each other"),
            "run `posthouse migrate` while nothing else has the file open, or PRAGMA journal_mode = WAL",
        ));
        return Ok(());
    }
    let (pages, free, size): (i64, i64, i64) = sqlx::query_as(
        "SELECT page_count, freelist_count, page_size FROM pragma_page_count(), pragma_freelist_count(), pragma_page_size()",
    )
    .fetch_one(conn)
    .await?;
    out.findings.push(if pages * size > LARGE && free > pages / 2 {
        let text = format!(
            "{} of {} MiB of the file are free; they are used again, but not given back",
            (free * size) >> 20,
            (pages * size) >> 20
        );
        Finding::warning("file", text, "VACUUM, in a quiet hour: it needs as much room again, and publishers wait")
    } else {
        Finding::ok("file", format!("journal mode {mode}, {} MiB", (pages * size) >> 20))
    });
    Ok(())
}

async fn log(conn: &mut SqliteConnection, tables: &Tables) -> Result<Option<LogFacts>, Error> {
    // Plan: both ends of the primary key.
    let found: Option<(i64, i64, i64, i64, i64)> = sqlx::query_as(tables.sql(
        "SELECT a.id, b.id, a.created_at, b.created_at, (SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()) \
           FROM (SELECT id, created_at FROM {message} ORDER BY id LIMIT 1) a, (SELECT id, created_at FROM {message} ORDER BY id DESC LIMIT 1) b",
    ))
    .fetch_optional(conn)
    .await?;
    Ok(found.map(|(first, last, first_ms, last_ms, bytes)| LogFacts { first, last, first_ms, last_ms, bytes }))
}
