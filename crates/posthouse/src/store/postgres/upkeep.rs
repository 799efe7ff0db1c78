//! Partitions ahead, what is wrong with the tables, and resizing.

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::migrate::{HOUSE_OF, LOCK_TIMEOUT, PARTITION_SIZE, PARTITIONS_AHEAD, ahead, partitions_ahead, ready};
use crate::Error;
use crate::store::{Tables, no_trigger};

/// One round of making partitions; a lock that isn't free within the lock timeout is left for the next round.
pub(super) async fn upkeep(conn: &mut PgConnection, tables: &Tables) -> Result<(u32, u32), Error> {
    let (last, parts) = ahead(conn, tables).await?;
    let current = last / PARTITION_SIZE;
    let mut ready = ready(current, &parts);
    let mut created = 0;
    if ready < PARTITIONS_AHEAD || !parts.contains(&current) {
        let mut tx = conn.begin().await?;
        sqlx::raw_sql(AssertSqlSafe(format!("SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))).execute(&mut *tx).await?;
        let lock = format!("posthouse partitions {}", tables.name("message"));
        if sqlx::query_scalar("SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))").bind(lock).fetch_one(&mut *tx).await? {
            let made = partitions_ahead(&mut tx, tables).await?;
            tx.commit().await?;
            (created, ready) = (made.0, i64::from(made.1));
        }
    }
    Ok((created, ready as u32))
}

/// What somebody changed about the tables that keeps messages from being published or sent. Reads the catalogue, nothing else.
pub(super) async fn problems(conn: &mut PgConnection, tables: &Tables) -> Result<Vec<String>, Error> {
    // Of the log and of each of its partitions: R fires on replicas only, D not at all.
    let enabled: Vec<bool> = sqlx::query_scalar(
        "SELECT t.tgenabled IN ('O', 'A') FROM pg_trigger t LEFT JOIN pg_trigger parent ON parent.oid = t.tgparentid \
          WHERE coalesce(parent.tgrelid, t.tgrelid) = to_regclass($1) AND coalesce(parent.tgname, t.tgname) = $2",
    )
    .bind(tables.name("message"))
    .bind(tables.text("{=enqueue}"))
    .fetch_all(&mut *conn)
    .await?;
    let mut problems = Vec::new();
    if enabled.is_empty() {
        problems.push(no_trigger(tables, "is missing"));
    } else if enabled.contains(&false) {
        problems.push(format!(
            "the trigger {} on {} or one of its partitions is disabled, so messages are published but never sent; \
             run ALTER TABLE {} ENABLE TRIGGER {}",
            tables.text("{=enqueue}"),
            tables.name("message"),
            tables.name("message"),
            tables.text("{-enqueue}"),
        ));
    }
    let defaults: Vec<(String, String)> = sqlx::query_as(
        "SELECT w.name, w.expected FROM unnest($2::text[], $3::text[]) AS w(name, expected) \
           LEFT JOIN pg_attribute a ON a.attrelid = to_regclass($1) AND a.attname = w.name AND NOT a.attisdropped \
           LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum \
          WHERE pg_get_expr(d.adbin, d.adrelid) IS DISTINCT FROM w.expected",
    )
    .bind(tables.name("message"))
    .bind(["message_id", "created_at"])
    .bind(["(gen_random_uuid())::text", "statement_timestamp()"])
    .fetch_all(conn)
    .await?;
    problems.extend(defaults.into_iter().map(|(column, expected)| {
        format!(
            "the default of {}.{column} was changed; run ALTER TABLE {} ALTER {column} SET DEFAULT {expected}",
            tables.name("message"),
            tables.name("message"),
        )
    }));
    Ok(problems)
}

/// Changes the number of houses under one lock that waits for every publishing transaction and blocks new ones.
pub(super) async fn resize(conn: &mut PgConnection, tables: &Tables, houses: u16) -> Result<u64, Error> {
    let mut tx = conn.begin().await?;
    sqlx::raw_sql("SET LOCAL lock_timeout = '30s'").execute(&mut *tx).await?;
    sqlx::raw_sql(tables.sql("LOCK TABLE {pending}, {house}, {meta} IN EXCLUSIVE MODE")).execute(&mut *tx).await?;
    sqlx::raw_sql(tables.sql(&HOUSE_OF.replace("%HOUSES%", &houses.to_string()))).execute(&mut *tx).await?;
    let moved = sqlx::query(tables.sql(
        "UPDATE {pending} p SET house = {house_of}(m.destination, m.message_key, m.message_id), version = p.version + 1 \
           FROM (SELECT id, destination, message_key, message_id FROM {message} \
                 UNION ALL SELECT id, destination, message_key, message_id FROM {kept}) m \
          WHERE m.id = p.id",
    ))
    .execute(&mut *tx)
    .await?
    .rows_affected();
    // Rows without a log row keep their place modulo the new number, so that they stay visible to their owner's alarm.
    sqlx::query(tables.sql("UPDATE {pending} SET house = ((house % $1) + $1) % $1 WHERE house >= $1 OR house < 0"))
        .bind(i32::from(houses))
        .execute(&mut *tx)
        .await?;
    // Epochs never restart, even when a house goes and comes back: all move above the highest there was.
    sqlx::query(tables.sql("UPDATE {house} SET owner = NULL, epoch = (SELECT max(epoch) + 1 FROM {house})"))
        .execute(&mut *tx)
        .await?;
    sqlx::query(tables.sql("DELETE FROM {house} WHERE house >= $1")).bind(i32::from(houses)).execute(&mut *tx).await?;
    sqlx::query(tables.sql(
        "INSERT INTO {house} (house, epoch) SELECT n, (SELECT max(epoch) FROM {house}) FROM generate_series(0, $1 - 1) n ON CONFLICT DO NOTHING",
    ))
    .bind(i32::from(houses))
    .execute(&mut *tx)
    .await?;
    sqlx::query(tables.sql("UPDATE {meta} SET houses = $1, changes = changes + 1"))
        .bind(i32::from(houses))
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(moved)
}
