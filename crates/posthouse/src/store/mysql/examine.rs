//! What `posthouse doctor` asks.

use sqlx::{AssertSqlSafe, Connection, MySqlConnection};

use super::migrate::{templates, version};
use super::number;
use super::upkeep::{COLUMN_DENIED, ROUTINE_DENIED, TABLE_DENIED, ahead};
use crate::Error;
use crate::store::{Examination, Finding, LogFacts, Tables, expected_indexes, expected_tables};

/// Undo records that purge has not removed yet, above which every read of the pending set pays for them.
const HISTORY: i64 = 1_000_000;

pub(super) async fn examine(conn: &mut MySqlConnection, tables: &Tables) -> Result<Examination, Error> {
    let (text, now_ms): (String, i64) =
        sqlx::query_as("SELECT VERSION(), CAST(UNIX_TIMESTAMP(NOW(6)) * 1000 AS SIGNED)").fetch_one(&mut *conn).await?;
    let maria = text.to_lowercase().contains("mariadb");
    let mut out = Examination::new(format!("{} {text}", if maria { "MariaDB" } else { "MySQL" }), now_ms);
    out.supported(numbers(&text) >= if maria { [10, 6, 0] } else { [8, 0, 16] }, "MySQL 8.0.16 or MariaDB 10.6");
    let Some(schema_version) = version(conn, tables).await? else { return Ok(out) };
    let houses: i32 = sqlx::query_scalar(tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *conn).await?;
    out.schema = Some((schema_version, u16::try_from(houses).unwrap_or(0)));
    let columns = first_columns(conn, tables).await?;
    let expected = expected_tables(&templates());
    let missing: Vec<String> =
        expected.iter().filter(|t| !columns.iter().any(|(n, _)| n == *t)).map(|t| tables.name(t)).collect();
    if !missing.is_empty() {
        let text = format!("missing, or not to be seen by this account: {}", missing.join(", "));
        out.findings.push(Finding::error("tables", text, "run `posthouse migrate`"));
    }
    privileges(conn, tables, &columns, &mut out).await?;
    indexes(conn, tables, &columns, &mut out).await?;
    let (current, parts) = ahead(conn, tables).await?;
    out.partitions_ahead = Some(parts.last().map_or(0, |last| u32::try_from(last - current).unwrap_or(0)));
    let problems = super::upkeep::problems(conn, tables).await?;
    out.publishing(problems);
    purge(conn, &mut out).await;
    out.log = log(conn, tables).await?;
    Ok(out)
}

fn numbers(version: &str) -> [u32; 3] {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    std::array::from_fn(|_| parts.next().unwrap_or(0))
}

/// Each table of migration that is there, with the name of its first column.
async fn first_columns(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<(String, String)>, Error> {
    let found: Vec<(Vec<u8>, Vec<u8>)> = sqlx::query_as(
        "SELECT CAST(TABLE_NAME AS BINARY), CAST(COLUMN_NAME AS BINARY) FROM information_schema.COLUMNS \
          WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND ORDINAL_POSITION = 1",
    )
    .bind(tables.schema())
    .fetch_all(conn)
    .await?;
    let expected = expected_tables(&templates());
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let found = found.iter().map(|(table, column)| (text(table), text(column)));
    let ours = found.filter_map(|(table, column)| {
        let name = table.strip_prefix(tables.prefix())?;
        expected.iter().find(|e| *e == name).map(|name| (name.clone(), column))
    });
    Ok(ours.collect())
}

/// Nothing but a trial tells: grants can come through roles, patterns and databases. None of the trials finds a row.
async fn privileges(
    conn: &mut MySqlConnection,
    tables: &Tables,
    columns: &[(String, String)],
    out: &mut Examination,
) -> Result<(), Error> {
    let mut missing = Vec::new();
    let mut tx = conn.begin().await?;
    for (table, column) in columns {
        for (privilege, statement) in [
            ("SELECT", format!("SELECT 1 FROM {{{table}}} WHERE 1 = 0")),
            ("INSERT", format!("INSERT INTO {{{table}}} SELECT * FROM {{{table}}} WHERE 1 = 0")),
            ("UPDATE", format!("UPDATE {{{table}}} SET `{column}` = `{column}` WHERE 1 = 0")),
            ("DELETE", format!("DELETE FROM {{{table}}} WHERE 1 = 0")),
        ] {
            // The log is never updated.
            if table == "message" && privilege == "UPDATE" {
                continue;
            }
            match sqlx::raw_sql(AssertSqlSafe(tables.text(&statement))).execute(&mut *tx).await {
                Err(e) if matches!(number(&e), Some(TABLE_DENIED | COLUMN_DENIED | ROUTINE_DENIED)) => {
                    missing.push(format!("{privilege} on {}", tables.name(table)));
                }
                other => {
                    other?;
                }
            }
        }
    }
    tx.rollback().await?;
    let grants: Vec<String> = sqlx::query_scalar("SHOW GRANTS").fetch_all(&mut *conn).await?;
    // Those of a role that isn't looked into may hold it.
    if !grants.iter().any(|g| g.contains("ALL PRIVILEGES") || g.contains("ALTER") || !g.contains(" ON ")) {
        missing.push(format!("ALTER on {} (to make and remove partitions)", tables.name("message")));
    }
    out.privileges(&missing, "relay with the account that migrated, or GRANT it the same");
    Ok(())
}

async fn indexes(
    conn: &mut MySqlConnection,
    tables: &Tables,
    columns: &[(String, String)],
    out: &mut Examination,
) -> Result<(), Error> {
    let there: Vec<(Vec<u8>, Vec<u8>)> = sqlx::query_as(
        "SELECT DISTINCT CAST(TABLE_NAME AS BINARY), CAST(INDEX_NAME AS BINARY) FROM information_schema.STATISTICS \
          WHERE TABLE_SCHEMA = COALESCE(?, DATABASE())",
    )
    .bind(tables.schema())
    .fetch_all(conn)
    .await?;
    let is_there = |table: &str, index: &str| {
        let table = format!("{}{table}", tables.prefix());
        there.iter().any(|(t, i)| *t == table.as_bytes() && *i == index.as_bytes())
    };
    let wanted = expected_indexes(&templates()).into_iter().filter(|i| columns.iter().any(|(table, _)| *table == i.table));
    let missing = wanted.filter(|i| !is_there(&i.table, &tables.text(&i.name)));
    let statements: Vec<String> = missing.map(|i| tables.text(&i.make)).collect();
    out.indexes(&statements);
    Ok(())
}

/// What only an account with PROCESS can see; without it nothing is said.
async fn purge(conn: &mut MySqlConnection, out: &mut Examination) {
    let history = "SELECT CAST(COUNT AS SIGNED) FROM information_schema.INNODB_METRICS WHERE NAME = 'trx_rseg_history_len'";
    if let Ok(history) = sqlx::query_scalar::<_, i64>(history).fetch_one(&mut *conn).await {
        out.findings.push(if history > HISTORY {
            Finding::warning(
                "vacuum",
                format!("purge lags: {history} undo records wait, and every read of the pending set pays for them"),
                "look for old transactions in information_schema.INNODB_TRX and end them with KILL; more innodb_purge_threads help",
            )
        } else {
            Finding::ok("vacuum", format!("{history} undo records wait for purge"))
        });
    }
    let oldest = "SELECT CONCAT('thread ', trx_mysql_thread_id), TIMESTAMPDIFF(MINUTE, trx_started, NOW()) \
                    FROM information_schema.INNODB_TRX ORDER BY trx_started LIMIT 1";
    if let Ok(oldest) = sqlx::query_as::<_, (String, i64)>(oldest).fetch_optional(conn).await {
        out.transactions(oldest, "end it: KILL THREAD");
    }
}

async fn log(conn: &mut MySqlConnection, tables: &Tables) -> Result<Option<LogFacts>, Error> {
    // Plan: both ends of the primary key, over the partitions; sizes from the catalogue, which are estimates.
    let found: Option<(i64, i64, i64, i64)> = sqlx::query_as(tables.sql(
        "SELECT a.id, b.id, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', a.created_at) DIV 1000 AS SIGNED), \
                CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', b.created_at) DIV 1000 AS SIGNED) \
           FROM (SELECT id, created_at FROM {message} ORDER BY id LIMIT 1) a, (SELECT id, created_at FROM {message} ORDER BY id DESC LIMIT 1) b",
    ))
    .fetch_optional(&mut *conn)
    .await?;
    let Some((first, last, first_ms, last_ms)) = found else { return Ok(None) };
    let bytes: Option<i64> = sqlx::query_scalar(
        "SELECT CAST(DATA_LENGTH + INDEX_LENGTH AS SIGNED) FROM information_schema.TABLES \
          WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ?",
    )
    .bind(tables.schema())
    .bind(format!("{}message", tables.prefix()))
    .fetch_one(conn)
    .await?;
    Ok(Some(LogFacts { first, last, first_ms, last_ms, bytes: bytes.unwrap_or(0) }))
}

#[cfg(test)]
mod tests {
    use super::numbers;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(numbers("10.11.6-MariaDB-0+deb12u1"), [10, 11, 6]);
        assert_eq!(numbers("8.0.36"), [8, 0, 36]);
        assert!(numbers("8.0.9") < [8, 0, 16]);
    }
}
