//! What a peer costs the machine and the database.

use std::collections::HashMap;

use sqlx::postgres::PgPool;
use sqlx::{AssertSqlSafe, Row};

use super::at;
use crate::meter::{TICKS, fields};

/// CPU time of a process, all its descendants, and those of its children that have ended, in seconds.
pub(super) fn cpu(root: Option<u32>) -> f64 {
    let Some(root) = root else { return f64::NAN };
    let all = processes();
    let Some(own) = all.get(&root) else { return f64::NAN };
    let ticks: f64 = all.iter().filter(|(pid, _)| descends(&all, **pid, root)).map(|(_, process)| process.ticks).sum();
    (ticks + own.reaped) / TICKS
}

#[derive(Debug, Clone, Copy)]
struct Process {
    parent: u32,
    ticks: f64,
    /// Of its children that have ended.
    reaped: f64,
}

fn processes() -> HashMap<u32, Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, process(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))).collect()
}

fn process(stat: &str) -> Option<Process> {
    let fields = fields(stat);
    let ticks = |i: usize| fields.get(i)?.parse::<f64>().ok();
    Some(Process { parent: fields.get(1)?.parse().ok()?, ticks: ticks(11)? + ticks(12)?, reaped: ticks(13)? + ticks(14)? })
}

fn descends(all: &HashMap<u32, Process>, pid: u32, root: u32) -> bool {
    let mut at = pid;
    while at != root {
        match all.get(&at) {
            Some(process) if process.parent != at && process.parent != 0 => at = process.parent,
            _ => return false,
        }
    }
    true
}

/// The server, seen from a database that no peer uses.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pool: PgPool,
    /// Its first process, if it runs on this machine.
    pub(super) postmaster: Option<u32>,
    /// `pg_stat_statements` is loaded.
    statements: bool,
}

/// Counts that only grow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    pub(super) transactions: f64,
    /// NaN without `pg_stat_statements`.
    pub(super) statements: f64,
    /// Of all other databases of the server.
    pub(super) others: f64,
}

impl Server {
    pub(super) async fn connect(url: &str) -> Result<Self, String> {
        let options = sqlx::postgres::PgPoolOptions::new().max_connections(2);
        let pool = at("PostgreSQL", options.connect(url).await)?;
        let backend: i32 = at("backend", sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&pool).await)?;
        let stat = std::fs::read_to_string(format!("/proc/{backend}/stat")).unwrap_or_default();
        let postmaster = process(&stat).filter(|_| stat.contains("(postgres)")).map(|process| process.parent);
        // Only where the server has loaded it; else the count of transactions has to do.
        let loaded: bool = at(
            "shared_preload_libraries",
            sqlx::query_scalar("SELECT current_setting('shared_preload_libraries') LIKE '%pg_stat_statements%'")
                .fetch_one(&pool)
                .await,
        )?;
        let create = "CREATE EXTENSION IF NOT EXISTS pg_stat_statements";
        let statements = loaded && sqlx::query(create).execute(&pool).await.is_ok();
        Ok(Self { pool, postmaster, statements })
    }

    pub(super) async fn create(&self, database: &str) -> Result<(), String> {
        self.execute(format!("CREATE DATABASE {database}")).await
    }

    /// Also what an interrupted replication has left.
    pub(super) async fn drop(&self, database: &str) -> Result<(), String> {
        let slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = $1 AND NOT active";
        at("slots", sqlx::query(slots).bind(database).execute(&self.pool).await)?;
        self.execute(format!("DROP DATABASE {database} WITH (FORCE)")).await
    }

    async fn execute(&self, sql: String) -> Result<(), String> {
        at(&sql.clone(), sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await)?;
        Ok(())
    }

    /// So that a checkpoint and the full pages after it fall into every delivery alike, and into none by chance.
    pub(super) async fn settle(&self) {
        // Only a superuser may.
        let _ = sqlx::query("CHECKPOINT").execute(&self.pool).await;
    }

    pub(super) async fn wal_level(&self) -> Result<String, String> {
        at("wal_level", sqlx::query_scalar("SHOW wal_level").fetch_one(&self.pool).await)
    }

    /// Position in the write-ahead log, in bytes.
    pub(super) async fn wal(&self) -> Result<f64, String> {
        let position: i64 =
            at("wal", sqlx::query_scalar("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetch_one(&self.pool).await)?;
        Ok(position as f64)
    }

    pub(super) async fn counts(&self, database: &str) -> Result<Counts, String> {
        let transactions = "SELECT coalesce(sum(xact_commit + xact_rollback) FILTER (WHERE datname = $1), 0)::float8, \
             coalesce(sum(xact_commit + xact_rollback) FILTER (WHERE datname NOT IN ($1, current_database())), 0)::float8 \
             FROM pg_stat_database";
        let row = at("pg_stat_database", sqlx::query(transactions).bind(database).fetch_one(&self.pool).await)?;
        let statements = if self.statements {
            let calls = "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid \
                 WHERE d.datname = $1";
            at("pg_stat_statements", sqlx::query_scalar(calls).bind(database).fetch_one(&self.pool).await)?
        } else {
            f64::NAN
        };
        Ok(Counts { transactions: row.get(0), others: row.get(1), statements })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_counted_with_its_descendants_and_no_others() {
        let stat = |parent| format!("1 (a) b) S {parent} 0 0 0 0 0 0 0 0 0 100 20 3 4 0 0");
        let of = |parent| process(&stat(parent)).expect("a process");
        let all = HashMap::from([(1, of(0)), (5, of(1)), (6, of(5)), (7, of(6)), (8, of(1))]);
        assert_eq!((all[&5].ticks, all[&5].reaped), (120.0, 7.0));
        assert_eq!([5, 6, 7, 8, 1].map(|pid| descends(&all, pid, 5)), [true, true, true, false, false]);
    }

    #[test]
    fn the_cpu_time_of_this_process_grows() {
        let own = Some(std::process::id());
        let before = cpu(own);
        while cpu(own) < before + 0.05 {}
        assert!(cpu(None).is_nan());
    }
}
