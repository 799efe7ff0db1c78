//! Removing what a test made in the servers when it is over: PostgreSQL's DDL gets slower with every table in the catalogue, to many
//! times over in the course of all tests.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{LazyLock, mpsc};

use sqlx::{AssertSqlSafe, Connection, MySqlConnection, PgConnection};

/// Something to remove.
pub(super) enum Waste {
    Schema { url: String, name: String },
    Database { server: String, name: String },
    File(PathBuf),
}

/// What this thread's test made. A test has a thread of its own, which ends with it.
#[derive(Default)]
struct Made(Vec<Waste>);

impl Drop for Made {
    fn drop(&mut self) {
        for waste in self.0.drain(..) {
            // The one who takes it away lives as long as the process.
            let _ = REMOVER.send(waste);
        }
    }
}

thread_local! {
    static MADE: RefCell<Made> = RefCell::default();
}

static REMOVER: LazyLock<mpsc::Sender<Waste>> = LazyLock::new(|| {
    let (send, receive) = mpsc::channel::<Waste>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        for waste in receive {
            // What can't be removed (a child process of the test still holds it) stays: its name is never used again.
            let _ = runtime.block_on(remove(waste));
        }
    });
    send
});

async fn remove(waste: Waste) -> Result<(), sqlx::Error> {
    match waste {
        Waste::Schema { url, name } => {
            let mut conn = PgConnection::connect(&url).await?;
            let sql = format!("SET lock_timeout = '5s'; DROP SCHEMA IF EXISTS {name} CASCADE");
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await?;
            conn.close().await
        }
        Waste::Database { server, name } => {
            let mut conn = MySqlConnection::connect(&server).await?;
            let sql = format!("SET SESSION lock_wait_timeout = 5; DROP DATABASE IF EXISTS {name}");
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await?;
            conn.close().await
        }
        Waste::File(path) => {
            for end in ["", "-wal", "-shm"] {
                let mut name = path.clone().into_os_string();
                name.push(end);
                // Not every file has all three.
                let _ = std::fs::remove_file(name);
            }
            Ok(())
        }
    }
}

/// Removes this when the test is over.
pub(super) fn later(waste: Waste) {
    MADE.with_borrow_mut(|made| made.0.push(waste));
}
