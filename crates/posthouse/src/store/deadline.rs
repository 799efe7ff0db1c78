//! Database calls that end: each within a deadline, on a connection that isn't reused when it went wrong.

use std::time::Duration;

use crate::Error;

/// A connection that is closed instead of reused unless its work came to a good end: after an error, a deadline or a
/// cancelled future, nobody knows what is still on its way through it.
#[derive(Debug)]
pub(crate) struct Leased<DB: sqlx::Database> {
    conn: sqlx::pool::PoolConnection<DB>,
    sound: bool,
}

impl<DB: sqlx::Database> Leased<DB> {
    pub(crate) async fn acquire(pool: &sqlx::Pool<DB>) -> Result<Self, Error> {
        Ok(Self { conn: pool.acquire().await?, sound: false })
    }

    pub(crate) fn conn(&mut self) -> &mut DB::Connection {
        &mut self.conn
    }

    pub(crate) fn sound(mut self) {
        self.sound = true;
    }
}

impl<DB: sqlx::Database> Drop for Leased<DB> {
    fn drop(&mut self) {
        if !self.sound {
            self.conn.close_on_drop();
        }
    }
}

/// Gives up after `deadline` with an error that names the call.
pub(crate) async fn timed<T>(
    deadline: Duration,
    what: &'static str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(deadline, work).await {
        Ok(result) => result,
        Err(_) => Err(Error::Timeout { what, after: deadline }),
    }
}

/// `on!(pool, deadline, "what", |c| { … })` runs the body with a connection `c` of the pool, within the deadline.
macro_rules! on {
    ($pool:expr, $deadline:expr, $what:literal, |$c:ident| $body:block) => {
        Box::pin(crate::store::timed($deadline, $what, async move {
            let mut leased = crate::store::Leased::acquire(&$pool).await?;
            let $c = leased.conn();
            let result: Result<_, crate::Error> = async { $body }.await;
            if result.is_ok() {
                leased.sound();
            }
            result
        }))
    };
}
pub(crate) use on;
