//! Work that one instance does for all.

use std::time::Duration;

use sqlx::SqliteConnection;

use super::now;
use super::relay::millis;
use crate::Error;
use crate::store::Tables;

pub(super) async fn take(
    conn: &mut SqliteConnection,
    tables: &Tables,
    duty: &str,
    owner: &str,
    lease: Duration,
) -> Result<bool, Error> {
    const TAKE: &str = concat!(
        "INSERT INTO {duty} AS d (duty_name, owner, lease_until) VALUES (?1, ?2, ",
        now!(),
        " + ?3) ON CONFLICT (duty_name) DO UPDATE SET owner = excluded.owner, lease_until = excluded.lease_until \
          WHERE d.owner = excluded.owner OR d.lease_until <= ",
        now!()
    );
    let done = sqlx::query(tables.sql(TAKE)).bind(duty).bind(owner).bind(millis(lease)).execute(conn).await?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn lay_down(conn: &mut SqliteConnection, tables: &Tables, duty: &str, owner: &str) -> Result<(), Error> {
    const LAY_DOWN: &str = concat!("UPDATE {duty} SET lease_until = ", now!(), " WHERE duty_name = ?1 AND owner = ?2");
    sqlx::query(tables.sql(LAY_DOWN)).bind(duty).bind(owner).execute(conn).await?;
    Ok(())
}
