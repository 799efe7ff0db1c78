//! Debezium Server with its outbox event router and its RabbitMQ sink, as a process beside the publishers.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use lapin::uri::AMQPUri;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgConnectOptions, PgPool};
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::at;
use super::driver::Config;
use super::ours::{Peer, begin};

/// Until it has connected to the database.
const START: Duration = Duration::from_secs(120);

/// The columns that the outbox event router expects, the payload as text.
const TABLE: &str = "\
CREATE TABLE outboxevent (
    id uuid PRIMARY KEY,
    aggregatetype varchar(255) NOT NULL,
    aggregateid varchar(255) NOT NULL,
    type varchar(255) NOT NULL,
    payload text
);
CREATE PUBLICATION bench_outbox FOR TABLE outboxevent WITH (publish = 'insert')";

/// As Debezium's own outbox extension does by default (`remove-after-insert`): the log is what is read, the table stays empty.
const INSERT: &str = "\
INSERT INTO outboxevent (id, aggregatetype, aggregateid, type, payload)
VALUES (gen_random_uuid(), 'order', $1, 'order.placed', $2) RETURNING id::text";
const DELETE: &str = "DELETE FROM outboxevent WHERE id = $1::uuid";

pub(super) struct Debezium {
    config: Config,
    pool: PgPool,
    /// Of the distribution.
    home: PathBuf,
    java: PathBuf,
    /// Its working directory, with configuration and offsets.
    place: PathBuf,
    server: Mutex<Option<Child>>,
}

impl Debezium {
    pub(super) fn new(config: &Config, pool: PgPool, home: &Path, java: &Path) -> Result<Self, String> {
        let place = std::env::temp_dir().join(&config.queue);
        at("directory", std::fs::create_dir_all(place.join("config")))?;
        let (home, java) = (home.to_owned(), java.to_owned());
        Ok(Self { config: config.clone(), pool, home, java, place, server: Mutex::default() })
    }

    fn slot(&self) -> &str {
        &self.config.queue
    }

    fn properties(&self) -> Result<String, String> {
        let database: PgConnectOptions = at("URL", self.config.database.parse())?;
        let amqp: AMQPUri = self.config.amqp.parse().map_err(|e| format!("URL: {e}"))?;
        let authority = &amqp.authority;
        let properties = [
            ("debezium.sink.type", "rabbitmq".to_owned()),
            ("debezium.sink.rabbitmq.connection.host", authority.host.clone()),
            ("debezium.sink.rabbitmq.connection.port", authority.port.to_string()),
            ("debezium.sink.rabbitmq.connection.username", authority.userinfo.username.clone()),
            ("debezium.sink.rabbitmq.connection.password", authority.userinfo.password.clone()),
            ("debezium.sink.rabbitmq.connection.virtual.host", amqp.vhost.clone()),
            ("debezium.sink.rabbitmq.exchange", self.config.queue.clone()),
            ("debezium.sink.rabbitmq.routingKey", self.config.queue.clone()),
            // It waits for the confirms of a whole batch, so a big one is good; these are the defaults.
            ("debezium.source.max.batch.size", "2048".to_owned()),
            ("debezium.source.max.queue.size", "8192".to_owned()),
            // How long it waits for a batch to fill; 500 by default.
            ("debezium.source.poll.interval.ms", "5".to_owned()),
            ("debezium.source.connector.class", "io.debezium.connector.postgresql.PostgresConnector".to_owned()),
            ("debezium.source.plugin.name", "pgoutput".to_owned()),
            ("debezium.source.slot.name", self.slot().to_owned()),
            ("debezium.source.publication.name", "bench_outbox".to_owned()),
            ("debezium.source.publication.autocreate.mode", "disabled".to_owned()),
            ("debezium.source.snapshot.mode", "no_data".to_owned()),
            ("debezium.source.table.include.list", "public.outboxevent".to_owned()),
            ("debezium.source.tombstones.on.delete", "false".to_owned()),
            ("debezium.source.topic.prefix", "bench".to_owned()),
            ("debezium.source.database.hostname", database.get_host().to_owned()),
            ("debezium.source.database.port", database.get_port().to_string()),
            ("debezium.source.database.user", database.get_username().to_owned()),
            ("debezium.source.database.dbname", database.get_database().unwrap_or_default().to_owned()),
            // The server refuses an empty one; whether it is asked for is the database's business.
            ("debezium.source.database.password", std::env::var("PGPASSWORD").unwrap_or_else(|_| "posthouse".to_owned())),
            ("debezium.source.offset.storage", "org.apache.kafka.connect.storage.FileOffsetBackingStore".to_owned()),
            ("debezium.source.offset.storage.file.filename", self.place.join("offsets").display().to_string()),
            // What is sent again after a crash; the default is a minute.
            ("debezium.source.offset.flush.interval.ms", "1000".to_owned()),
            ("debezium.transforms", "outbox".to_owned()),
            ("debezium.transforms.outbox.type", "io.debezium.transforms.outbox.EventRouter".to_owned()),
            ("debezium.format.value", "simplestring".to_owned()),
            ("debezium.format.key", "simplestring".to_owned()),
            ("quarkus.http.port", "0".to_owned()),
            ("quarkus.log.level", "WARN".to_owned()),
        ];
        Ok(properties.iter().map(|(name, value)| format!("{name}={value}\n")).collect())
    }
}

impl Peer for Debezium {
    async fn prepare(&self) -> Result<String, String> {
        at("table", sqlx::raw_sql(TABLE).execute(&self.pool).await)?;
        // From here on the log is kept for it.
        let slot = format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", self.slot());
        at("slot", sqlx::query(AssertSqlSafe(slot)).execute(&self.pool).await)?;
        let name = self.home.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(name.trim_start_matches("debezium-server-").to_owned())
    }

    async fn transaction(&self, order: i64, body: Option<String>) -> Result<(), String> {
        let mut tx = begin(&self.pool, order).await?;
        if let Some(body) = body {
            let insert = sqlx::query_scalar::<_, String>(INSERT).bind(order.to_string()).bind(body);
            let id = at("outbox", insert.fetch_one(&mut *tx).await)?;
            at("outbox", sqlx::query(DELETE).bind(id).execute(&mut *tx).await)?;
        }
        at("commit", tx.commit().await)
    }

    async fn run(&self) -> Result<(), String> {
        at("configuration", std::fs::write(self.place.join("config/application.properties"), self.properties()?))?;
        let distribution = self.home.join("debezium-server");
        let mut runner = at("distribution", std::fs::read_dir(&distribution))?.flatten().map(|entry| entry.path());
        let runner =
            runner.find(|path| path.to_string_lossy().ends_with("-runner.jar")).ok_or("no runner in the distribution")?;
        let mut command = Command::new(&self.java);
        let classes = format!("{}:{}/lib/*", runner.display(), distribution.display());
        command.args(["-Xmx512m", "-cp", &classes, "io.debezium.server.Main"]).current_dir(&self.place);
        // stdout is the protocol's.
        command.stdin(Stdio::null()).stdout(std::io::stderr()).kill_on_drop(true);
        let mut server = at("java", command.spawn())?;
        let until = Instant::now() + START;
        let active = "SELECT active FROM pg_replication_slots WHERE slot_name = $1";
        while !at("slot", sqlx::query_scalar::<_, bool>(active).bind(self.slot()).fetch_one(&self.pool).await)? {
            if let Ok(Some(status)) = server.try_wait() {
                return Err(format!("the server ended: {status}"));
            }
            if Instant::now() > until {
                return Err(format!("the server doesn't read the log within {START:?}"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        *self.server.lock().await = Some(server);
        Ok(())
    }

    async fn stop(&self) -> Result<(), String> {
        if let Some(mut server) = self.server.lock().await.take() {
            at("kill", server.kill().await)?;
        }
        let _ = std::fs::remove_dir_all(&self.place);
        Ok(())
    }

    /// Whether the server has yet to confirm what is in the log: it reports that with its offsets.
    async fn pending(&self) -> Result<i64, String> {
        // Nothing else is written while this is asked, so the log has an end; its own bookkeeping is behind the last message.
        let behind = "SELECT (confirmed_flush_lsn < (SELECT pg_current_wal_insert_lsn()) - 65536)::int::bigint \
             FROM pg_replication_slots WHERE slot_name = $1";
        at("slot", sqlx::query_scalar(behind).bind(self.slot()).fetch_one(&self.pool).await)
    }

    fn confirmed(&self) -> Option<u64> {
        None
    }
}
