//! The sender's database: accounts and bookings beside the outbox.

use std::collections::BTreeMap;

use posthouse::Tx;
use posthouse::store::Backend;
use posthouse_faults::Kind as Server;
use sqlx::{AssertSqlSafe, MySql, Pool, Postgres, Row};

use super::ACCOUNTS;
use super::check::Balance;
use super::content::Booking;
use crate::database::Kind;

/// A database that can be the sender's.
pub(super) trait Source: Backend {
    const KIND: Kind;
    const SERVER: Server;

    /// The statement with this database's marks for values instead of `?`.
    fn marked(sql: &str) -> String;

    /// Ends some sessions of others, as an administrator does; answers how many.
    fn end_sessions(pool: &Pool<Self>, count: i64) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// Makes the tables of the sender.
    fn prepare(pool: &Pool<Self>) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Books on an account, and answers the number of its last keyed booking. Whoever books on the same account next waits for
    /// the end of this transaction: so its messages are published in the order of these numbers.
    fn draw(tx: &mut Tx<Self>, account: &str, keyed: i64, amount: i64) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;

    /// Writes the business row.
    fn book(tx: &mut Tx<Self>, booking: &Booking) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// All business rows.
    fn booked(pool: &Pool<Self>) -> impl Future<Output = Result<Vec<Booking>, sqlx::Error>> + Send;

    /// Where the accounts stand.
    fn balances(pool: &Pool<Self>) -> impl Future<Output = Result<BTreeMap<String, Balance>, sqlx::Error>> + Send;

    /// How many business rows there are, rows of the outbox that aren't delivered, and those of them that are FAILED.
    fn progress(pool: &Pool<Self>) -> impl Future<Output = Result<(i64, i64, i64), sqlx::Error>> + Send;

    /// Runs one statement.
    fn execute(pool: &Pool<Self>, sql: &'static str) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
}

macro_rules! common {
    () => {
        async fn prepare(pool: &Pool<Self>) -> Result<(), sqlx::Error> {
            Self::execute(
                pool,
                "CREATE TABLE account (name varchar(40) PRIMARY KEY, seq bigint NOT NULL, amount bigint NOT NULL)",
            )
            .await?;
            Self::execute(
                pool,
                "CREATE TABLE booking (id varchar(64) PRIMARY KEY, account varchar(40) NOT NULL, seq bigint NOT NULL, \
                 amount bigint NOT NULL)",
            )
            .await?;
            for name in ACCOUNTS {
                let sql = Self::marked("INSERT INTO account (name, seq, amount) VALUES (?, 0, 0)");
                sqlx::query(AssertSqlSafe(sql)).bind(name).execute(pool).await?;
            }
            Ok(())
        }

        async fn draw(tx: &mut Tx<Self>, account: &str, keyed: i64, amount: i64) -> Result<i64, sqlx::Error> {
            let sql = Self::marked("UPDATE account SET seq = seq + ?, amount = amount + ? WHERE name = ?");
            sqlx::query(AssertSqlSafe(sql)).bind(keyed).bind(amount).bind(account).execute(&mut **tx).await?;
            let sql = Self::marked("SELECT seq FROM account WHERE name = ?");
            sqlx::query_scalar(AssertSqlSafe(sql)).bind(account).fetch_one(&mut **tx).await
        }

        async fn book(tx: &mut Tx<Self>, booking: &Booking) -> Result<(), sqlx::Error> {
            let sql = Self::marked("INSERT INTO booking (id, account, seq, amount) VALUES (?, ?, ?, ?)");
            let Booking { id, account, seq, amount } = booking;
            sqlx::query(AssertSqlSafe(sql)).bind(id).bind(account).bind(seq).bind(amount).execute(&mut **tx).await?;
            Ok(())
        }

        async fn booked(pool: &Pool<Self>) -> Result<Vec<Booking>, sqlx::Error> {
            let rows = sqlx::query("SELECT id, account, seq, amount FROM booking").fetch_all(pool).await?;
            let booking = |row: &<Self as sqlx::Database>::Row| {
                Ok(Booking { id: row.try_get(0)?, account: row.try_get(1)?, seq: row.try_get(2)?, amount: row.try_get(3)? })
            };
            rows.iter().map(booking).collect()
        }

        async fn balances(pool: &Pool<Self>) -> Result<BTreeMap<String, Balance>, sqlx::Error> {
            let rows = sqlx::query("SELECT name, seq, amount FROM account").fetch_all(pool).await?;
            let balance = |row: &<Self as sqlx::Database>::Row| {
                Ok((row.try_get(0)?, Balance { seq: row.try_get(1)?, amount: row.try_get(2)? }))
            };
            rows.iter().map(balance).collect()
        }

        async fn progress(pool: &Pool<Self>) -> Result<(i64, i64, i64), sqlx::Error> {
            sqlx::query_as(
                "SELECT (SELECT count(*) FROM booking), count(*), count(CASE WHEN status = 'FAILED' THEN 1 END) \
                 FROM posthouse_pending",
            )
            .fetch_one(pool)
            .await
        }

        async fn execute(pool: &Pool<Self>, sql: &'static str) -> Result<(), sqlx::Error> {
            sqlx::raw_sql(sql).execute(pool).await?;
            Ok(())
        }
    };
}

impl Source for Postgres {
    const KIND: Kind = Kind::Postgres;
    const SERVER: Server = Server::Postgres;

    fn marked(sql: &str) -> String {
        let mut parts = sql.split('?');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.enumerate().fold(first, |sql, (n, part)| format!("{sql}${}{part}", n + 1))
    }

    async fn end_sessions(pool: &Pool<Self>, count: i64) -> Result<u64, sqlx::Error> {
        let ended: i64 = sqlx::query_scalar(
            "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT $1) sessions",
        )
        .bind(count)
        .fetch_one(pool)
        .await?;
        Ok(ended as u64)
    }

    common!();
}

impl Source for MySql {
    const KIND: Kind = Kind::Mysql;
    const SERVER: Server = Server::MariaDb;

    fn marked(sql: &str) -> String {
        sql.to_owned()
    }

    async fn end_sessions(pool: &Pool<Self>, count: i64) -> Result<u64, sqlx::Error> {
        let sessions: Vec<i64> = sqlx::query_scalar(
            "SELECT CAST(id AS SIGNED) FROM information_schema.processlist \
             WHERE user = 'posthouse' AND id <> connection_id() ORDER BY rand() LIMIT ?",
        )
        .bind(count)
        .fetch_all(pool)
        .await?;
        let mut ended = 0;
        for session in sessions {
            // One that has just ended by itself is no error.
            ended += u64::from(sqlx::raw_sql(AssertSqlSafe(format!("KILL {session}"))).execute(pool).await.is_ok());
        }
        Ok(ended)
    }

    common!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postgres_numbers_its_marks() {
        assert_eq!(Postgres::marked("UPDATE t SET a = ?, b = ? WHERE c"), "UPDATE t SET a = $1, b = $2 WHERE c");
    }
}
