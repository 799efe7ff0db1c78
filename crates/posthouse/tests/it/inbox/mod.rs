//! The inbox on real databases, one behaviour per file.

mod admin;
mod crash;
mod failure;
mod handlers;
mod identity;
mod once;
mod race;
mod republish;
mod retention;
mod shared;
mod stats;
mod worker;

use std::time::{Duration, SystemTime};

use posthouse::inbox::{Handled, HandlerError, Inbox, Incoming, Source};
use posthouse::store::{InboxDetail, InboxStatus};
use posthouse::{InboxSettings, Retry, Tx};

use crate::support::{Place, SOON, TestDb, outbox_at, wait_for};

/// Quick retries and a short lease.
pub(crate) fn quick() -> InboxSettings {
    let mut s = InboxSettings::default();
    s.retry = Retry::new(3, Duration::from_millis(40), Duration::from_millis(100));
    s.handler_timeout = Duration::from_secs(10);
    s.interval = Duration::from_millis(20);
    s.lease = Duration::from_secs(5);
    s
}

/// Fresh tables, an inbox in them, and a table of the service's own that shows how often a message had its effect.
pub(crate) struct Fixture<T: TestDb> {
    pub(crate) place: Place<T::Db>,
    pub(crate) inbox: Inbox<T::Db>,
    pub(crate) effects: String,
}

impl<T: TestDb> Fixture<T> {
    pub(crate) async fn new() -> Self {
        Self::with(quick()).await
    }

    pub(crate) async fn with(settings: InboxSettings) -> Self {
        let place = T::place().await;
        let outbox = place.outbox();
        outbox.migrate().await.expect("migrate");
        let effects = outbox.tables().name("effects");
        T::execute(&place.pool, format!("CREATE TABLE {effects} (message VARCHAR(300))")).await;
        let inbox = Inbox::of(&outbox, "inventory", settings).expect("inbox");
        Self { place, inbox, effects }
    }

    /// The inbox of another consumer, or with other settings, or through another pool.
    pub(crate) fn beside(&self, pool: sqlx::Pool<T::Db>, consumer: &str, settings: InboxSettings) -> Inbox<T::Db> {
        Inbox::of(&outbox_at(pool, self.place.schema.as_deref()), consumer, settings).expect("inbox")
    }

    /// The name of the inbox's table.
    pub(crate) fn table(&self) -> String {
        self.inbox.outbox().tables().name("inbox")
    }

    pub(crate) async fn effects(&self) -> i64 {
        T::number(&self.place.pool, format!("SELECT count(*) FROM {}", self.effects)).await
    }

    pub(crate) async fn effects_of(&self, id: &str) -> i64 {
        T::number(&self.place.pool, format!("SELECT count(*) FROM {} WHERE message = '{id}'", self.effects)).await
    }

    /// How many received messages stand so.
    pub(crate) async fn count(&self, status: InboxStatus) -> i64 {
        let sql = format!("SELECT count(*) FROM {} WHERE status = '{}'", self.table(), status.as_str());
        T::number(&self.place.pool, sql).await
    }

    pub(crate) async fn found(&self, id: &str) -> Option<InboxDetail> {
        self.inbox.store().show(self.inbox.consumer(), id).await.expect("show")
    }

    pub(crate) async fn shown(&self, id: &str) -> InboxDetail {
        self.found(id).await.unwrap_or_else(|| panic!("{id} isn't known"))
    }

    pub(crate) async fn status(&self, id: &str) -> InboxStatus {
        self.shown(id).await.row.status
    }

    /// Handles it inline with the plain effect.
    pub(crate) async fn process(&self, incoming: &Incoming) -> Handled {
        process::<T>(&self.inbox, &self.effects, incoming).await.expect("process")
    }

    /// Handles it inline with a handler that has its effect and then fails.
    pub(crate) async fn fail(&self, incoming: &Incoming, error: impl Fn() -> HandlerError) -> Handled {
        self.inbox
            .process(incoming, async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
                effect::<T>(tx, &self.effects, incoming.message_id.as_deref().unwrap_or("none")).await;
                Err(error())
            })
            .await
            .expect("process")
    }

    pub(crate) async fn wait_status(&self, id: &str, status: InboxStatus) {
        let what = format!("{id} to be {status:?}");
        wait_for(&what, SOON, async || self.found(id).await.is_some_and(|d| d.row.status == status)).await;
    }

    /// Makes every message that waits due now, as if all that time had passed.
    pub(crate) async fn all_due(&self) {
        let past = match T::NAME {
            "sqlite" => "1000",
            _ => "'2000-01-01 00:00:00'",
        };
        let table = self.table();
        let sql = format!("UPDATE {table} SET next_attempt_at = {past} WHERE status IN ('PENDING_RETRY', 'RETRYING')");
        T::execute(&self.place.pool, sql).await;
    }
}

pub(crate) async fn process<T: TestDb>(
    inbox: &Inbox<T::Db>,
    effects: &str,
    incoming: &Incoming,
) -> Result<Handled, posthouse::Error> {
    inbox
        .process(incoming, async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
            try_effect::<T>(tx, effects, incoming.message_id.as_deref().unwrap_or("none")).await?;
            Ok(())
        })
        .await
}

pub(crate) async fn try_effect<T: TestDb>(tx: &mut Tx<T::Db>, effects: &str, id: &str) -> Result<(), sqlx::Error> {
    T::try_execute_in(tx, format!("INSERT INTO {effects} (message) VALUES ('{id}')")).await
}

pub(crate) async fn effect<T: TestDb>(tx: &mut Tx<T::Db>, effects: &str, id: &str) {
    try_effect::<T>(tx, effects, id).await.expect("the effect");
}

pub(crate) fn order(id: &str) -> Incoming {
    Incoming::new(id, r#"{"order":7}"#)
        .typed("order.placed")
        .source(Source::RabbitMq { exchange: "orders".into(), routing_key: "order.placed".into() })
}

pub(crate) fn at(handled: Handled) -> SystemTime {
    match handled {
        Handled::WillRetry(at) => at,
        other => panic!("expected WillRetry, got {other:?}"),
    }
}

/// Waits until the database, whose clock is this machine's, says that it is past this time.
pub(crate) async fn until(at: SystemTime) {
    let left = at.duration_since(SystemTime::now()).unwrap_or_default();
    tokio::time::sleep(left + Duration::from_millis(5)).await;
}
