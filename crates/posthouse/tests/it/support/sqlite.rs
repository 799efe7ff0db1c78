//! SQLite: a file per test.

use std::path::PathBuf;

use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};

use super::{Connection, DEADLINE, Fresh, TestDb, statements, unique};

#[derive(Debug)]
pub(crate) struct Sqlite {
    pool: SqlitePool,
    folder: PathBuf,
}

impl TestDb for Sqlite {
    type Db = sqlx::Sqlite;

    const HOUSES: usize = 1;
    const PAST: &'static str = "946684800000";
    const HOUSE_OF: &'static str = "0";

    async fn empty() -> Self {
        let folder = std::env::temp_dir().join(unique("posthouse"));
        std::fs::create_dir(&folder).expect("a folder for the database file");
        let options =
            SqliteConnectOptions::new().filename(folder.join("test.sqlite")).create_if_missing(true).busy_timeout(DEADLINE);
        let pool = SqlitePoolOptions::new().max_connections(12).acquire_timeout(DEADLINE).connect_with(options);
        Self { pool: pool.await.expect("a database file"), folder }
    }

    fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    async fn remove(self) {
        self.pool.close().await;
        std::fs::remove_dir_all(&self.folder).expect("remove the database file");
    }

    statements!();

    async fn next_id(fresh: &Fresh<Self>, id: i64) {
        // The row is only there after a first insert.
        fresh.publish_one(posthouse::Message::to("first")).await;
        let name = fresh.outbox.tables().name("message").replace('"', "");
        fresh.run(&format!("UPDATE sqlite_sequence SET seq = {} WHERE name = '{name}'", id - 1)).await;
        fresh.run("DELETE FROM {pending}").await;
        fresh.run("DELETE FROM {message}").await;
    }
}
