//! Partitions ahead, what is wrong with the tables, and resizing.

use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};

use super::migrate::{PARTITION_SIZE, PARTITIONS_AHEAD, PARTITIONS_SPARE, partition};
use super::number;
use crate::store::{Tables, no_trigger};
use crate::{Error, ErrorKind};

// Error numbers.
pub(super) const TABLE_DENIED: u16 = 1142;
pub(super) const COLUMN_DENIED: u16 = 1143;
const LOCK_WAIT_TIMEOUT: u16 = 1205;
pub(super) const ROUTINE_DENIED: u16 = 1370;
const NO_SUCH_USER: u16 = 1449;
const PARTITION_EXISTS: u16 = 1517;

/// The number of the newest id's partition, and the numbers of all partitions, ascending.
pub(super) async fn ahead(conn: &mut MySqlConnection, tables: &Tables) -> Result<(i64, Vec<i64>), Error> {
    // MySQL keeps this number for a day unless told otherwise; MariaDB skips the comment, as it knows no such variable.
    sqlx::raw_sql("SET @posthouse = 1 /*!80000 , SESSION information_schema_stats_expiry = 0 */").execute(&mut *conn).await?;
    let next: Option<i64> = sqlx::query_scalar(
        "SELECT CAST(AUTO_INCREMENT AS SIGNED) FROM information_schema.TABLES \
          WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ?",
    )
    .bind(tables.schema())
    .bind(format!("{}message", tables.prefix()))
    .fetch_one(&mut *conn)
    .await?;
    let last: Option<i64> = sqlx::query_scalar(tables.sql("SELECT MAX(id) FROM {message}")).fetch_one(&mut *conn).await?;
    let last = last.max(next.map(|n| n - 1)).unwrap_or(0);
    let names: Vec<Option<Vec<u8>>> = sqlx::query_scalar(
        "SELECT CAST(PARTITION_NAME AS BINARY) FROM information_schema.PARTITIONS \
          WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ? ORDER BY PARTITION_ORDINAL_POSITION",
    )
    .bind(tables.schema())
    .bind(format!("{}message", tables.prefix()))
    .fetch_all(conn)
    .await?;
    let parts: Vec<i64> =
        names.into_iter().flatten().filter_map(|n| std::str::from_utf8(&n).ok()?.strip_prefix('p')?.parse().ok()).collect();
    Ok((last / PARTITION_SIZE, parts))
}

/// One round of making partitions at the end; a lock that isn't free within a second is left for the next round.
pub(super) async fn upkeep(conn: &mut MySqlConnection, tables: &Tables) -> Result<(u32, u32), Error> {
    let (current, parts) = ahead(conn, tables).await?;
    let last = parts.last().copied().unwrap_or(current - 1);
    let ready = u32::try_from(last - current).unwrap_or(0);
    if i64::from(ready) >= PARTITIONS_AHEAD {
        return Ok((0, ready));
    }
    // Where the ids jumped ahead, the first of them takes in the gap.
    let wanted: Vec<String> = (current.max(last + 1)..=current + PARTITIONS_AHEAD + PARTITIONS_SPARE).map(partition).collect();
    // Waiting for the table's lock holds up publishers, so for no longer than the shortest time MySQL knows.
    sqlx::raw_sql("SET SESSION lock_wait_timeout = 1").execute(&mut *conn).await?;
    let alter = tables.sql(&format!("ALTER TABLE {{message}} ADD PARTITION ({})", wanted.join(", ")));
    let result = conn.execute(sqlx::raw_sql(alter)).await;
    sqlx::raw_sql("SET SESSION lock_wait_timeout = DEFAULT").execute(&mut *conn).await?;
    match result {
        Ok(_) => Ok((wanted.len() as u32, (PARTITIONS_AHEAD + PARTITIONS_SPARE) as u32)),
        // Somebody holds the table, or another instance has just made them.
        Err(e) if matches!(number(&e), Some(LOCK_WAIT_TIMEOUT | PARTITION_EXISTS)) => Ok((0, ready)),
        Err(e) => Err(e.into()),
    }
}

/// What keeps messages from being published or sent. Only a trial tells whether the trigger's account is still there: an account
/// may not see others. It is rolled back, and costs an id.
pub(super) async fn problems(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<String>, Error> {
    let mut tx = conn.begin().await?;
    let trial = async {
        // With all the defaults of a plain INSERT but one, to know the house.
        sqlx::raw_sql(tables.sql("INSERT INTO {message} (destination, message_id) VALUES ('posthouse', 'trial')"))
            .execute(&mut *tx)
            .await?;
        sqlx::query_scalar(tables.sql(
            "SELECT CAST(EXISTS (SELECT 1 FROM {pending} WHERE house = {house_of}('posthouse', NULL, 'trial') AND id = LAST_INSERT_ID()) AS SIGNED)",
        ))
        .fetch_one(&mut *tx)
        .await
    };
    let found: Result<i64, sqlx::Error> = trial.await;
    tx.rollback().await?;
    let problem = match found {
        Ok(0) => no_trigger(tables, "is missing"),
        Ok(_) => return Ok(Vec::new()),
        Err(e) => match number(&e) {
            // May not publish: it is another account's matter, which this one can't tell.
            Some(TABLE_DENIED | COLUMN_DENIED | ROUTINE_DENIED) => return Ok(Vec::new()),
            Some(NO_SUCH_USER) => format!(
                "the account as which the trigger {} runs is gone, so every publish fails ({e}); create that account again with its \
                 grants, or drop the trigger and make it again with its statement in `posthouse migrate --print`",
                tables.text("{=enqueue}"),
            ),
            _ => {
                let e = Error::from(e);
                if matches!(e.kind(), ErrorKind::Conflict | ErrorKind::Unavailable) {
                    return Err(e);
                }
                format!("a message can't be published into {}: {e}", tables.name("message"))
            }
        },
    };
    Ok(vec![problem])
}

/// Changes the number of houses under one lock that waits for every publishing transaction and blocks new ones.
pub(super) async fn resize(conn: &mut MySqlConnection, tables: &Tables, houses: u16, lock_wait: u64) -> Result<u64, Error> {
    sqlx::raw_sql("SET SESSION innodb_lock_wait_timeout = 30").execute(&mut *conn).await?;
    let mut tx = conn.begin().await?;
    let houses = i32::from(houses);
    // In the same order as operator actions, so that the two wait for each other instead of deadlocking.
    sqlx::raw_sql(tables.sql("UPDATE {changes} SET changes = changes + 1")).execute(&mut *tx).await?;
    sqlx::query(tables.sql("UPDATE {meta} SET houses = ?")).bind(houses).execute(&mut *tx).await?;
    let mut moved = 0;
    for log in ["message", "kept"] {
        moved += sqlx::query(tables.sql(&format!(
            "UPDATE {{pending}} p STRAIGHT_JOIN {{{log}}} l ON l.id = p.id \
                SET p.house = {{hash}}(l.destination, l.message_key, l.message_id) % ?, p.version = p.version + 1"
        )))
        .bind(houses)
        .execute(&mut *tx)
        .await?
        .rows_affected();
    }
    // Rows without a log row keep their place modulo the new number, so that they stay visible to their owner's alarm.
    sqlx::query(tables.sql("UPDATE {pending} SET house = ((house % ?) + ?) % ? WHERE house >= ? OR house < 0"))
        .bind(houses)
        .bind(houses)
        .bind(houses)
        .bind(houses)
        .execute(&mut *tx)
        .await?;
    // Epochs never restart, even when a house goes and comes back: all move above the highest there was.
    let epoch: i64 =
        sqlx::query_scalar(tables.sql("SELECT COALESCE(MAX(epoch), 0) + 1 FROM {house}")).fetch_one(&mut *tx).await?;
    sqlx::query(tables.sql("UPDATE {house} SET owner = NULL, epoch = ?")).bind(epoch).execute(&mut *tx).await?;
    sqlx::query(tables.sql("DELETE FROM {house} WHERE house >= ?")).bind(houses).execute(&mut *tx).await?;
    let rows: Vec<String> = (0..houses).map(|house| format!("({house}, {epoch})")).collect();
    sqlx::raw_sql(tables.sql(&format!("INSERT IGNORE INTO {{house}} (house, epoch) VALUES {}", rows.join(", "))))
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    sqlx::raw_sql(AssertSqlSafe(format!("SET SESSION innodb_lock_wait_timeout = {lock_wait}"))).execute(conn).await?;
    Ok(moved)
}
