//! Work that one instance does for all.

use std::time::Duration;

use sqlx::MySqlConnection;

use super::relay::micros;
use crate::Error;
use crate::store::Tables;

pub(super) async fn take(
    conn: &mut MySqlConnection,
    tables: &Tables,
    duty: &str,
    owner: &str,
    lease: Duration,
) -> Result<bool, Error> {
    const KNOWN: &str = "INSERT IGNORE INTO {duty} (duty_name, owner, lease_until) VALUES (?, ?, UTC_TIMESTAMP(6))";
    const TAKE: &str = "UPDATE {duty} SET lease_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, owner = ? \
         WHERE duty_name = ? AND (owner = ? OR lease_until <= UTC_TIMESTAMP(6))";
    sqlx::query(tables.sql(KNOWN)).bind(duty.as_bytes()).bind(owner.as_bytes()).execute(&mut *conn).await?;
    let done = sqlx::query(tables.sql(TAKE))
        .bind(micros(lease))
        .bind(owner.as_bytes())
        .bind(duty.as_bytes())
        .bind(owner.as_bytes())
        .execute(conn)
        .await?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn lay_down(conn: &mut MySqlConnection, tables: &Tables, duty: &str, owner: &str) -> Result<(), Error> {
    const LAY_DOWN: &str = "UPDATE {duty} SET lease_until = UTC_TIMESTAMP(6) WHERE duty_name = ? AND owner = ?";
    sqlx::query(tables.sql(LAY_DOWN)).bind(duty.as_bytes()).bind(owner.as_bytes()).execute(conn).await?;
    Ok(())
}
