//! The databases: one type for the three kinds, so that the commands need not know which one it is.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use posthouse::inbox::Inbox;
use posthouse::retention::Retention;
use posthouse::store::{Backend, InboxStore, Store};
use posthouse::{
    Adopted, AdoptedRelay, AdoptedRelayBuilder, Error, InboxSettings, Message, MessageId, Outbox, Relay, RelayBuilder,
    RetentionSettings,
};
use sqlx::Connection;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::pool::PoolOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;

use crate::config::{DatabaseConfig, redact_url};
use crate::failure::{Exit, Failure};

/// How long a command waits for its first connection.
const REACH: Duration = Duration::from_secs(5);

/// How long a command waits for one answer. Longer than a relay does: a person waits for it and can stop it.
const ANSWER: Duration = Duration::from_secs(60);

/// How long a page waits for one answer.
const PAGE_ANSWER: Duration = Duration::from_secs(15);

/// Connections that pages and the API use at a time, per set of tables.
const PAGE_CONNECTIONS: u32 = 2;

/// Connections of retention: for its work, and for the lease that it renews meanwhile.
const RETENTION_CONNECTIONS: u32 = 2;

/// Where a URL leads.
#[derive(Debug)]
pub(crate) enum Target {
    Postgres(Box<PgConnectOptions>),
    MySql(Box<MySqlConnectOptions>),
    Sqlite(Box<SqliteConnectOptions>),
}

impl Target {
    /// Takes a URL apart; the reason and the fix if it can't be. Neither quotes the URL.
    pub(crate) fn parse(url: &str) -> Result<Self, (String, String)> {
        let example =
            || "postgres://user@host:5432/database, mysql://user@host:3306/database or sqlite:///path/file.db".to_owned();
        let options = |e: sqlx::Error| {
            let why = match e {
                sqlx::Error::Configuration(e) => e.to_string(),
                _ => "it can't be taken apart".into(),
            };
            (
                format!("is no valid database URL: {why}"),
                format!("{}; characters such as @ : / # in a password are written as %40 %3A %2F %23", example()),
            )
        };
        match url.split_once(':').map_or("", |(scheme, _)| scheme) {
            "postgres" | "postgresql" => Ok(Self::Postgres(Box::new(PgConnectOptions::from_str(url).map_err(options)?))),
            "mysql" | "mariadb" => Ok(Self::MySql(Box::new(MySqlConnectOptions::from_str(url).map_err(options)?))),
            "sqlite" => Ok(Self::Sqlite(Box::new(SqliteConnectOptions::from_str(url).map_err(options)?))),
            "" => Err(("is no database URL".into(), example())),
            _ => Err(("names no kind of database that is supported".into(), example())),
        }
    }

    /// The same for two URLs that lead to one database, whoever logs in.
    pub(crate) fn identity(&self) -> String {
        match self {
            Self::Postgres(o) => {
                let place = o.get_socket().map_or_else(|| o.get_host().to_owned(), |s| s.display().to_string());
                format!("postgres {place} {} {}", o.get_port(), o.get_database().unwrap_or(o.get_username()))
            }
            Self::MySql(o) => {
                let place = o.get_socket().map_or_else(|| o.get_host().to_owned(), |s| s.display().to_string());
                format!("mysql {place} {} {}", o.get_port(), o.get_database().unwrap_or_default())
            }
            Self::Sqlite(o) => {
                let file = o.get_filename();
                format!("sqlite {}", std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned()).display())
            }
        }
    }

    /// The schema in which the tables are when none is named.
    pub(crate) fn default_schema(&self) -> Option<String> {
        match self {
            Self::Postgres(_) => Some("public".into()),
            Self::MySql(o) => o.get_database().map(str::to_owned),
            Self::Sqlite(_) => None,
        }
    }
}

/// What the commands ask of an outbox, whichever database it is in.
trait AnyOutbox: fmt::Debug + Send + Sync {
    fn connect(&self) -> BoxFuture<'_, Result<(), sqlx::Error>>;
    fn migrate(&self) -> BoxFuture<'_, Result<(), Error>>;
    fn migration_sql(&self) -> String;
    fn publish(&self, message: Message) -> BoxFuture<'_, Result<MessageId, Error>>;
    fn relay(&self) -> RelayBuilder;
    fn adopted(&self, name: &str, mapping: &Adopted) -> AdoptedRelayBuilder;
    fn store(&self, deadline: Duration) -> Arc<dyn Store>;
    fn store_for_people(&self, deadline: Duration, connections: u32) -> Arc<dyn Store>;
    fn inbox(&self, deadline: Duration) -> Result<Arc<dyn InboxStore>, Error>;
}

impl<DB: Backend> AnyOutbox for Outbox<DB> {
    fn connect(&self) -> BoxFuture<'_, Result<(), sqlx::Error>> {
        Box::pin(async move {
            let options = self.pool().connect_options();
            let conn = <DB::Connection as Connection>::connect_with(&options).await?;
            // It was made to see whether it can be made.
            let _ = conn.close().await;
            Ok(())
        })
    }

    fn migrate(&self) -> BoxFuture<'_, Result<(), Error>> {
        Box::pin(Outbox::migrate(self))
    }

    fn migration_sql(&self) -> String {
        Outbox::migration_sql(self)
    }

    fn publish(&self, message: Message) -> BoxFuture<'_, Result<MessageId, Error>> {
        Box::pin(self.publish_alone(message))
    }

    fn relay(&self) -> RelayBuilder {
        Relay::builder(self)
    }

    fn adopted(&self, name: &str, mapping: &Adopted) -> AdoptedRelayBuilder {
        AdoptedRelay::builder(self, name, mapping.clone())
    }

    fn store(&self, deadline: Duration) -> Arc<dyn Store> {
        Outbox::store(self, deadline)
    }

    fn store_for_people(&self, deadline: Duration, connections: u32) -> Arc<dyn Store> {
        Outbox::store_for_people(self, deadline, connections)
    }

    fn inbox(&self, deadline: Duration) -> Result<Arc<dyn InboxStore>, Error> {
        let mut settings = InboxSettings::default();
        settings.database_timeout = deadline;
        // The store is the one of all consumers; this one receives nothing.
        Ok(Inbox::of(self, "posthouse", settings)?.store())
    }
}

/// One configured database. Nothing connects before it is asked to.
#[derive(Debug)]
pub(crate) struct Database {
    pub(crate) name: String,
    /// Its URL without secrets.
    pub(crate) shown: String,
    expected_houses: Option<u16>,
    retention: Option<RetentionSettings>,
    outbox: Box<dyn AnyOutbox>,
}

impl Database {
    pub(crate) fn open(name: &str, config: &DatabaseConfig) -> Result<Self, Failure> {
        Self::open_for(name, config, false)
    }

    /// For migration: a SQLite file that isn't there is made.
    pub(crate) fn open_or_create(name: &str, config: &DatabaseConfig) -> Result<Self, Failure> {
        Self::open_for(name, config, true)
    }

    fn open_for(name: &str, config: &DatabaseConfig, create: bool) -> Result<Self, Failure> {
        let target =
            Target::parse(&config.url).map_err(|(reason, _)| Failure::usage(format!("database {name:?}: its URL {reason}")))?;
        let made = match target {
            Target::Postgres(options) => {
                let options =
                    if options.get_application_name().is_none() { options.application_name("posthouse") } else { *options };
                outbox::<sqlx::Postgres>(options, config)
            }
            Target::MySql(options) => outbox::<sqlx::MySql>(*options, config),
            Target::Sqlite(options) => sqlite(*options, create, config),
        };
        let outbox = made.map_err(|e| Failure { text: format!("database {name:?}: {}", e.text), ..e })?;
        Ok(Self {
            name: name.to_owned(),
            shown: redact_url(&config.url),
            expected_houses: config.houses,
            retention: config.retention.clone(),
            outbox,
        })
    }

    /// Connects once, so that what is wrong is told exactly and at once; a pool would keep trying.
    pub(crate) async fn reach(&self) -> Result<(), Failure> {
        let what = format!("database {:?} ({})", self.name, self.shown);
        match tokio::time::timeout(REACH, self.outbox.connect()).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(connect_failure(&what, &e)),
            Err(_) => {
                Err(Failure::unreachable(format!("{what} can't be reached: no answer within {}", crate::output::span(REACH))))
            }
        }
    }

    pub(crate) async fn migrate(&self) -> Result<(), Failure> {
        self.outbox.migrate().await.map_err(|e| self.failure(&e))
    }

    pub(crate) fn migration_sql(&self) -> String {
        self.outbox.migration_sql()
    }

    pub(crate) async fn publish(&self, message: Message) -> Result<MessageId, Error> {
        self.outbox.publish(message).await
    }

    /// A relay of this database, still without transports and routes.
    pub(crate) fn relay(&self) -> RelayBuilder {
        let builder = self.outbox.relay();
        match self.expected_houses {
            Some(houses) => builder.expect_houses(houses),
            None => builder,
        }
    }

    /// Scans of tables of other applications in this database, still without transports and routes.
    pub(crate) fn adopted(&self, name: &str, mapping: &Adopted) -> AdoptedRelayBuilder {
        self.outbox.adopted(name, mapping)
    }

    /// A store for one command.
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        self.outbox.store(ANSWER)
    }

    /// A store for the pages and the API: few connections, closed when nobody looks.
    pub(crate) fn store_for_people(&self) -> Arc<dyn Store> {
        self.outbox.store_for_people(PAGE_ANSWER, PAGE_CONNECTIONS)
    }

    /// What takes old rows out of it, with connections of its own that are closed when it rests; None where nothing is to be
    /// removed.
    pub(crate) fn retention(&self) -> Result<Option<Retention>, Failure> {
        let Some(settings) = &self.retention else { return Ok(None) };
        self.retention_with(settings.clone()).map(Some)
    }

    pub(crate) fn retention_with(&self, settings: RetentionSettings) -> Result<Retention, Failure> {
        Retention::new(self.outbox.store_for_people(ANSWER, RETENTION_CONNECTIONS), &self.name, settings)
            .map_err(|e| self.failure(&e))
    }

    /// How long what is done with stays in it; None: all of it, for ever.
    pub(crate) fn retention_settings(&self) -> Option<&RetentionSettings> {
        self.retention.as_ref()
    }

    /// The most connections that a relay, the judging of alerts, the pages, the API and retention keep open together.
    pub(crate) fn connections(&self) -> u32 {
        let retention = if self.retention.is_some() { RETENTION_CONNECTIONS } else { 0 };
        self.store().connections() + PAGE_CONNECTIONS + retention
    }

    /// What consumers received, for one command.
    pub(crate) fn inbox(&self) -> Result<Arc<dyn InboxStore>, Failure> {
        self.outbox.inbox(ANSWER).map_err(|e| self.failure(&e))
    }

    /// A reachable store whose tables are there, with schema version and number of houses.
    pub(crate) async fn ready(&self) -> Result<(Arc<dyn Store>, i32, u16), Failure> {
        self.reach().await?;
        let store = self.store();
        let (version, houses) = store.check().await.map_err(|e| self.failure(&e))?;
        if let Some(expected) = self.expected_houses
            && expected != houses
        {
            return Err(Failure::usage(format!(
                "database {:?}: the configuration says houses = {expected}, the database has {houses}; \
                 change the configuration, or run `posthouse houses resize`",
                self.name
            )));
        }
        Ok((store, version, houses))
    }

    /// The number of houses that the configuration asks for.
    pub(crate) fn expected_houses(&self) -> Option<u16> {
        self.expected_houses
    }

    /// An error of the library, with this database's name.
    pub(crate) fn failure(&self, e: &Error) -> Failure {
        Failure::of(&format!("database {:?}", self.name), e)
    }
}

fn outbox<DB: Backend>(
    options: <DB::Connection as Connection>::Options,
    config: &DatabaseConfig,
) -> Result<Box<dyn AnyOutbox>, Failure> {
    // For migration and publishing; a store makes its own.
    let pool = PoolOptions::<DB>::new().max_connections(2).acquire_timeout(ANSWER).connect_lazy_with(options);
    let mut builder = Outbox::builder(pool).prefix(&config.prefix);
    if let Some(schema) = &config.schema {
        builder = builder.schema(schema);
    }
    if let Some(houses) = config.houses {
        builder = builder.houses(houses);
    }
    Ok(Box::new(builder.build().map_err(|e| Failure::of("", &e))?))
}

/// The file must be there, unless it is to be made: a mistyped path would otherwise look like an empty database.
fn sqlite(options: SqliteConnectOptions, create: bool, config: &DatabaseConfig) -> Result<Box<dyn AnyOutbox>, Failure> {
    let file = options.get_filename().to_owned();
    let in_memory =
        file.as_os_str().is_empty() || file.to_string_lossy().contains(":memory:") || config.url.contains("mode=memory");
    if in_memory {
        return Err(Failure::usage("a SQLite database in memory ends with the process; name a file"));
    }
    if !create && !file.exists() {
        return Err(Failure::usage(format!("there is no file {}; run `posthouse migrate` to make it", file.display())));
    }
    outbox::<sqlx::Sqlite>(options.create_if_missing(create), config)
}

fn connect_failure(what: &str, e: &sqlx::Error) -> Failure {
    let exit = if is_configuration(e) { Exit::Usage } else { Exit::Unreachable };
    match e {
        sqlx::Error::Io(io) => Failure::new(exit, format!("{what} can't be reached: {io}")),
        _ => Failure::new(exit, format!("{what} can't be reached: {e}")),
    }
}

/// Wrong credentials and missing databases are for the configuration to mend; everything else may pass by itself.
pub(crate) fn is_configuration(e: &sqlx::Error) -> bool {
    let code = e.as_database_error().and_then(|d| d.code()).unwrap_or_default();
    // SQLSTATE 28xxx: not let in; 3D000 (PostgreSQL) and 42000 with error 1049 or 1044 (MySQL): no such database, or not for this user.
    let mysql = e.as_database_error().and_then(|d| d.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>()).map(|d| d.number());
    code.starts_with("28")
        || code == "3D000"
        || matches!(mysql, Some(1044 | 1045 | 1049))
        || matches!(e, sqlx::Error::Configuration(_))
}
