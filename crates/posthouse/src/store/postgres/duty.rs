//! Work that one instance does for all.

use std::time::Duration;

use sqlx::PgConnection;

use super::relay::micros;
use crate::Error;
use crate::store::Tables;

pub(super) async fn take(
    conn: &mut PgConnection,
    tables: &Tables,
    duty: &str,
    owner: &str,
    lease: Duration,
) -> Result<bool, Error> {
    const TAKE: &str = "INSERT INTO {duty} AS d (duty_name, owner, lease_until) \
         VALUES ($1, $2, clock_timestamp() + $3 * interval '1 microsecond') \
         ON CONFLICT (duty_name) DO UPDATE SET owner = EXCLUDED.owner, lease_until = EXCLUDED.lease_until \
         WHERE d.owner = EXCLUDED.owner OR d.lease_until <= clock_timestamp()";
    let done = sqlx::query(tables.sql(TAKE)).bind(duty).bind(owner).bind(micros(lease)).execute(conn).await?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn lay_down(conn: &mut PgConnection, tables: &Tables, duty: &str, owner: &str) -> Result<(), Error> {
    const LAY_DOWN: &str = "UPDATE {duty} SET lease_until = clock_timestamp() WHERE duty_name = $1 AND owner = $2";
    sqlx::query(tables.sql(LAY_DOWN)).bind(duty).bind(owner).execute(conn).await?;
    Ok(())
}
