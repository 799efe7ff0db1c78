//! `#[posthouse::transactional]`: opens or joins, publishes what is returned, and leaves nothing of what failed.

use std::time::Duration;

use posthouse::inbox::{Handled, Handler, HandlerError, Inbox};
use posthouse::store::{Backend, InboxStatus};
use posthouse::testing::{self, Published};
use posthouse::{Error, ErrorKind, Event, Message, Outbox, Relay, Route, Tx};
use serde::Serialize;

use crate::inbox::{Fixture, order, quick};
use crate::relay::{Log, Recorder, quick as quick_relay};
use crate::support::{SOON, TestDb, on_all_databases, wait_for};

on_all_databases!(
    with_an_outbox_it_opens_and_commits,
    with_a_transaction_it_joins,
    an_error_rolls_back_what_was_opened,
    a_joined_error_that_is_dropped_refuses_the_commit,
    a_joined_call_that_is_cut_off_refuses_the_commit,
    a_message_that_is_refused_leaves_nothing,
    a_panic_leaves_nothing,
    one_inside_another,
    what_can_be_returned,
    methods_and_generics,
    in_spawned_tasks,
    a_handler_consumes_and_publishes_once,
    a_handler_that_drops_a_joined_error_has_failed,
    the_relay_is_woken,
);

#[derive(Debug, PartialEq)]
enum Refused {
    SoldOut,
    Library(String),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SoldOut => f.write_str("sold out"),
            Self::Library(e) => f.write_str(e),
        }
    }
}

impl std::error::Error for Refused {}

impl From<Error> for Refused {
    fn from(e: Error) -> Self {
        Self::Library(e.to_string())
    }
}

/// Inserts an order; after `left` of them there are no more.
#[posthouse::transactional]
async fn place<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str, id: i64, left: i64) -> Result<(i64, Message), Refused> {
    T::execute_in(tx, format!("INSERT INTO {orders} (id) VALUES ({id})")).await;
    if id > left {
        return Err(Refused::SoldOut);
    }
    Ok((id * 10, Message::to("orders").key(id)))
}

async fn tables<T: TestDb>() -> (Outbox<T::Db>, String) {
    let outbox = T::fresh().await;
    let orders = outbox.tables().name("orders");
    T::execute(outbox.pool(), format!("CREATE TABLE {orders} (id INTEGER PRIMARY KEY)")).await;
    (outbox, orders)
}

async fn published<DB: Backend>(outbox: &Outbox<DB>) -> Vec<Published> {
    let mut conn = outbox.pool().acquire().await.unwrap();
    testing::published_in(outbox, &mut conn).await.unwrap()
}

async fn keys<DB: Backend>(outbox: &Outbox<DB>) -> Vec<String> {
    published(outbox).await.into_iter().map(|m| m.key.unwrap_or_default()).collect()
}

async fn count<T: TestDb>(outbox: &Outbox<T::Db>, orders: &str) -> i64 {
    T::number(outbox.pool(), format!("SELECT count(*) FROM {orders}")).await
}

async fn with_an_outbox_it_opens_and_commits<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    assert_eq!(place::<T>(&outbox, &orders, 1, 9).await, Ok(10));
    assert_eq!((count::<T>(&outbox, &orders).await, keys(&outbox).await), (1, vec!["1".into()]));
}

async fn with_a_transaction_it_joins<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    let mut tx = outbox.begin().await.unwrap();
    assert_eq!(place::<T>(&mut tx, &orders, 1, 9).await, Ok(10));
    assert_eq!(place::<T>(&mut tx, &orders, 2, 9).await, Ok(20));
    assert_eq!(testing::published_in(&outbox, &mut tx).await.unwrap().len(), 2);
    tx.rollback().await.unwrap();
    assert_eq!((count::<T>(&outbox, &orders).await, keys(&outbox).await), (0, vec![]), "the caller decides");

    let mut tx = outbox.begin().await.unwrap();
    place::<T>(&mut tx, &orders, 3, 9).await.unwrap();
    outbox.commit(tx).await.unwrap();
    outbox.transaction(async |tx: &mut Tx<T::Db>| place::<T>(tx, &orders, 4, 9).await).await.unwrap();
    assert_eq!((count::<T>(&outbox, &orders).await, keys(&outbox).await), (2, vec!["3".into(), "4".into()]));
}

async fn an_error_rolls_back_what_was_opened<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    assert_eq!(place::<T>(&outbox, &orders, 1, 0).await, Err(Refused::SoldOut));
    assert_eq!((count::<T>(&outbox, &orders).await, keys(&outbox).await), (0, vec![]));
}

fn refused(result: Result<(), Error>, why: &str) {
    let e = result.expect_err("the commit is refused");
    assert!(matches!(e, Error::RollbackOnly(_)), "{e:?}");
    assert_eq!(e.kind(), ErrorKind::RolledBack);
    let text = e.to_string();
    assert!(text.contains("transactional::place, which had joined this transaction,") && text.contains(why), "{text}");
}

async fn a_joined_error_that_is_dropped_refuses_the_commit<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    for way in 0..4 {
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(Message::to("before")).await.unwrap();
        place::<T>(&mut tx, &orders, 1, 9).await.unwrap();
        assert_eq!(place::<T>(&mut tx, &orders, 2, 0).await, Err(Refused::SoldOut));
        // Nothing that comes after makes it good again, and the first reason is told.
        place::<T>(&mut tx, &orders, 3, 9).await.unwrap();
        let result = match way {
            0 => tx.commit().await,
            1 => outbox.commit(tx).await,
            2 => sqlx::Transaction::try_from(tx).map(|_| unreachable!("it can't be committed around the mark")),
            _ => {
                tx.rollback().await.unwrap();
                outbox
                    .transaction(async |tx: &mut Tx<T::Db>| {
                        let _ = place::<T>(tx, &orders, 2, 0).await;
                        Ok(())
                    })
                    .await
            }
        };
        refused(result, "failed: sold out");
        // A transaction that is dropped rolls back in its own time.
        wait_for("the roll back", SOON, async || count::<T>(&outbox, &orders).await == 0).await;
        assert_eq!(published(&outbox).await.len(), 0, "way {way}");
    }
    assert_eq!(place::<T>(&outbox, &orders, 4, 9).await, Ok(40), "the connections are fit for the next transaction");
}

/// What a call did before its future was dropped must not be committed without its message.
async fn a_joined_call_that_is_cut_off_refuses_the_commit<T: TestDb>() {
    #[posthouse::transactional]
    async fn place<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str) -> Result<Message, Error> {
        T::execute_in(tx, format!("INSERT INTO {orders} (id) VALUES (1)")).await;
        stall::<T>(tx, 20).await;
        Ok(Message::to("orders"))
    }
    let (outbox, orders) = tables::<T>().await;
    let mut tx = outbox.begin().await.unwrap();
    let waited = {
        let mut call = std::pin::pin!(place::<T>(&mut tx, &orders));
        tokio::time::timeout(Duration::from_millis(300), &mut call).await
    };
    assert!(waited.is_err());
    // The statement that is on its way for 20 s is not waited for.
    let answer = tokio::time::timeout(Duration::from_secs(10), tx.commit()).await.expect("an answer at once");
    refused(answer, "was dropped before it ended");
    // A transaction that is dropped rolls back in its own time.
    wait_for("the connections to be free", SOON, async || count::<T>(&outbox, &orders).await == 0).await;
    outbox.publish_alone(Message::to("after")).await.unwrap();
    assert_eq!((count::<T>(&outbox, &orders).await, published(&outbox).await.len()), (0, 1));
}

async fn a_message_that_is_refused_leaves_nothing<T: TestDb>() {
    #[posthouse::transactional]
    async fn place<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str) -> Result<[Message; 2], Error> {
        T::execute_in(tx, format!("INSERT INTO {orders} (id) VALUES (1)")).await;
        Ok([Message::to("orders"), Message::to("")])
    }
    let (outbox, orders) = tables::<T>().await;
    let failed = place::<T>(&outbox, &orders).await;
    assert!(matches!(failed, Err(Error::Invalid { field: "destination", .. })), "{failed:?}");
    let mut tx = outbox.begin().await.unwrap();
    let failed = place::<T>(&mut tx, &orders).await;
    assert!(matches!(failed, Err(Error::Invalid { field: "destination", .. })), "{failed:?}");
    refused(tx.commit().await, "failed: destination: ");
    assert_eq!((count::<T>(&outbox, &orders).await, published(&outbox).await.len()), (0, 0));
}

async fn a_panic_leaves_nothing<T: TestDb>() {
    #[posthouse::transactional]
    async fn place<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str) -> Result<Message, Error> {
        T::execute_in(tx, format!("INSERT INTO {orders} (id) VALUES (1)")).await;
        assert!(orders.is_empty(), "as the test wants it");
        Ok(Message::to("orders"))
    }
    use futures_util::FutureExt as _;
    use std::panic::AssertUnwindSafe;
    let (outbox, orders) = tables::<T>().await;
    assert!(AssertUnwindSafe(place::<T>(&outbox, &orders)).catch_unwind().await.is_err());
    wait_for("the roll back", SOON, async || count::<T>(&outbox, &orders).await == 0).await;
    let mut tx = outbox.begin().await.unwrap();
    assert!(AssertUnwindSafe(place::<T>(&mut tx, &orders)).catch_unwind().await.is_err());
    refused(tx.commit().await, "panicked");
    outbox.publish_alone(Message::to("after")).await.unwrap();
    assert_eq!((count::<T>(&outbox, &orders).await, published(&outbox).await.len()), (0, 1));
}

/// The inner one joins what the outer one opened or joined.
async fn one_inside_another<T: TestDb>() {
    #[posthouse::transactional]
    async fn two<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str, left: i64, pass_on: bool) -> Result<Message, Refused> {
        place::<T>(&mut *tx, orders, 1, left).await?;
        let second = place::<T>(tx, orders, 2, left).await;
        if pass_on {
            second?;
        }
        Ok(Message::to("orders").key("both"))
    }
    let (outbox, orders) = tables::<T>().await;
    assert_eq!(two::<T>(&outbox, &orders, 1, true).await, Err(Refused::SoldOut));
    let Err(Refused::Library(why)) = two::<T>(&outbox, &orders, 1, false).await else { panic!("it was committed") };
    assert!(why.contains("rolled back instead of committed") && why.contains("sold out"), "{why}");
    let mut tx = outbox.begin().await.unwrap();
    two::<T>(&mut tx, &orders, 1, false).await.unwrap();
    refused(tx.commit().await, "sold out");
    assert_eq!((count::<T>(&outbox, &orders).await, published(&outbox).await.len()), (0, 0));
    two::<T>(&outbox, &orders, 2, true).await.unwrap();
    assert_eq!((count::<T>(&outbox, &orders).await, keys(&outbox).await), (2, vec!["1".into(), "2".into(), "both".into()]));
}

#[derive(Serialize)]
struct Placed {
    order: i64,
}

impl Event for Placed {
    const TYPE: &'static str = "order.placed";
    const DESTINATION: &'static str = "orders";
    fn key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

async fn what_can_be_returned<T: TestDb>() {
    type Answer<X> = std::result::Result<X, Error>;
    type Pair = (&'static str, Placed);

    #[posthouse::transactional]
    async fn event<DB: Backend>(_: &mut Tx<DB>) -> Result<Placed, Error> {
        Ok(Placed { order: 1 })
    }
    #[posthouse::transactional]
    async fn events<DB: Backend>(_tx: &mut Tx<DB>, orders: std::ops::Range<i64>) -> Result<(usize, Vec<Placed>), Error> {
        let events: Vec<_> = orders.map(|order| Placed { order }).collect();
        Ok((events.len(), events))
    }
    #[posthouse::transactional]
    async fn maybe<DB: Backend>(_tx: &mut Tx<DB>, order: Option<i64>) -> posthouse_result::Result<Option<Placed>> {
        Ok(order.map(|order| Placed { order }))
    }
    #[posthouse::transactional]
    async fn named<DB: Backend>(_tx: &mut Tx<DB>) -> Answer<Pair> {
        Ok(("named", Placed { order: 6 }))
    }
    mod posthouse_result {
        pub(super) type Result<T, E = posthouse::Error> = std::result::Result<T, E>;
    }

    let outbox = T::fresh().await;
    let () = event(&outbox).await.unwrap();
    assert_eq!(events(&outbox, 2..5).await.unwrap(), 3);
    assert_eq!(events(&outbox, 2..2).await.unwrap(), 0, "a batch of none is no news");
    let () = maybe(&outbox, Some(5)).await.unwrap();
    let () = maybe(&outbox, None).await.unwrap();
    assert_eq!(named(&outbox).await.unwrap(), "named");
    assert_eq!(keys(&outbox).await, ["1", "2", "3", "4", "5", "6"]);
}

async fn methods_and_generics<T: TestDb>() {
    struct Shop<'s> {
        orders: &'s str,
        placed: u32,
    }
    impl<'s> Shop<'s> {
        /// Documented and with attributes.
        #[posthouse::transactional]
        #[must_use = "it says what was ordered"]
        pub(crate) async fn place<'a, 'b: 'a, T: TestDb, const N: usize>(
            &mut self,
            tx: &'a mut Tx<T::Db>,
            (first, mut names): (i64, [&'b str; N]),
            name: impl Into<String> + Send,
        ) -> Result<(String, Message), Error>
        where
            &'b str: Into<String>,
        {
            T::execute_in(tx, format!("INSERT INTO {} (id) VALUES ({first})", self.orders)).await;
            self.placed += 1;
            names.sort_unstable();
            Ok((names.join("+"), Message::to(name)))
        }

        #[posthouse::transactional]
        async fn close<T: TestDb>(self, tx: &mut Tx<T::Db>) -> Result<(u32, Message), Error> {
            tx.publish(Message::to("closing")).await?;
            Ok((self.placed, Message::to("closed")))
        }
    }
    let (outbox, orders) = tables::<T>().await;
    let mut shop = Shop { orders: &orders, placed: 0 };
    assert_eq!(shop.place::<T, 2>(&outbox, (1, ["b", "a"]), "two").await.unwrap(), "a+b");
    let mut tx = outbox.begin().await.unwrap();
    assert_eq!(shop.place::<T, 1>(&mut tx, (2, ["c"]), String::from("one")).await.unwrap(), "c");
    assert_eq!(shop.close::<T>(&mut tx).await.unwrap(), 2);
    tx.commit().await.unwrap();
    let to: Vec<_> = published(&outbox).await.into_iter().map(|m| m.destination).collect();
    assert_eq!((to, count::<T>(&outbox, &orders).await), (["two", "one", "closing", "closed"].map(String::from).into(), 2));
}

async fn in_spawned_tasks<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    let task = tokio::spawn({
        let (outbox, orders) = (outbox.clone(), orders.clone());
        async move {
            place::<T>(&outbox, &orders, 1, 9).await?;
            let mut tx = outbox.begin().await?;
            place::<T>(&mut tx, &orders, 2, 9).await?;
            outbox.commit(tx).await?;
            outbox.transaction(async |tx: &mut Tx<T::Db>| place::<T>(tx, &orders, 3, 9).await).await
        }
    });
    assert_eq!(task.await.unwrap(), Ok(30));
    assert_eq!(keys(&outbox).await, ["1", "2", "3"]);
}

/// A service's function that both kinds of handlers call.
#[posthouse::transactional]
async fn deduct<T: TestDb>(tx: &mut Tx<T::Db>, effects: &str, stock: bool) -> Result<Message, Refused> {
    T::execute_in(tx, format!("INSERT INTO {effects} (message) VALUES ('deducted')")).await;
    if stock { Ok(Message::to("deducted").key("7")) } else { Err(Refused::SoldOut) }
}

struct Deduct<T> {
    effects: String,
    stock: bool,
    swallow: bool,
    database: std::marker::PhantomData<fn() -> T>,
}

impl<T: TestDb> Handler<T::Db> for Deduct<T> {
    type Message = serde_json::Value;
    async fn handle(&self, tx: &mut Tx<T::Db>, _: serde_json::Value) -> Result<(), HandlerError> {
        let done = deduct::<T>(tx, &self.effects, self.stock).await;
        if !self.swallow {
            done?;
        }
        Ok(())
    }
}

fn handling<T: TestDb>(f: &Fixture<T>, stock: bool, swallow: bool) -> Inbox<T::Db> {
    let handler = Deduct::<T> { effects: f.effects.clone(), stock, swallow, database: std::marker::PhantomData };
    f.inbox.clone().on("order.placed", handler)
}

/// T10: what a duplicate's first copy emitted is not emitted again.
async fn a_handler_consumes_and_publishes_once<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let inbox = handling(&f, true, false);
    assert_eq!(inbox.handle(&order("m1")).await.unwrap(), Handled::Processed);
    for redelivered in [false, true] {
        assert_eq!(inbox.handle(&order("m1").redelivered(redelivered)).await.unwrap(), Handled::Duplicate);
    }
    let inline = async || {
        let handler = async |tx: &mut Tx<T::Db>| deduct::<T>(tx, &f.effects, true).await;
        f.inbox.process(&order("m2"), handler).await.unwrap()
    };
    assert_eq!((inline().await, inline().await), (Handled::Processed, Handled::Duplicate));
    assert_eq!((f.effects().await, keys(f.inbox.outbox()).await), (2, vec!["7".into(), "7".into()]));
}

async fn a_handler_that_drops_a_joined_error_has_failed<T: TestDb>() {
    let f = Fixture::<T>::with(quick()).await;
    let inbox = handling(&f, false, true);
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = inbox.handle(&order(id).redelivered(redelivered)).await.unwrap();
        assert!(matches!(handled, Handled::WillRetry(_)), "{handled:?}");
        let shown = f.shown(id).await;
        assert_eq!((shown.row.status, shown.row.attempts), (InboxStatus::PendingRetry, 1));
        let why = shown.row.last_error.unwrap_or_default();
        assert!(why.contains("transactional::deduct, which had joined this transaction, failed: sold out"), "{why}");
        assert!(shown.payload.is_some(), "its copy is kept for the retry");
    }
    let handled = f
        .inbox
        .process(&order("m3"), async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
            deduct::<T>(tx, &f.effects, false).await.ok();
            Ok(())
        })
        .await;
    assert!(matches!(handled, Ok(Handled::WillRetry(_))), "{handled:?}");
    // Cut off by a timeout inside the handler, whose error is dropped as well.
    let handled = f
        .inbox
        .process(&order("m4"), async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
            let slow = hang::<T>(tx, &f.effects);
            tokio::time::timeout(Duration::from_millis(200), slow).await.ok();
            Ok(())
        })
        .await;
    assert!(matches!(handled, Ok(Handled::WillRetry(_))), "{handled:?}");
    let why = f.shown("m4").await.row.last_error.unwrap_or_default();
    assert!(why.contains("transactional::hang, which had joined this transaction, was dropped before it ended"), "{why}");
    assert_eq!((f.effects().await, keys(f.inbox.outbox()).await.len()), (0, 0));

    // With stock again, the retry has its effect.
    f.all_due().await;
    let inbox = handling(&f, true, true);
    for id in ["m1", "m2", "m3", "m4"] {
        assert_eq!(inbox.handle(&order(id)).await.unwrap(), Handled::Processed);
    }
    assert_eq!((f.effects().await, keys(f.inbox.outbox()).await.len()), (4, 4));
}

#[posthouse::transactional]
async fn hang<T: TestDb>(tx: &mut Tx<T::Db>, effects: &str) -> Result<Message, Refused> {
    T::execute_in(tx, format!("INSERT INTO {effects} (message) VALUES ('half')")).await;
    stall::<T>(tx, 1).await;
    Ok(Message::to("orders"))
}

/// Is in the middle of a statement for so many seconds, where the database has one for that, and for ever else.
async fn stall<T: TestDb>(tx: &mut Tx<T::Db>, seconds: u32) {
    match T::NAME {
        "postgres" => T::execute_in(tx, format!("SELECT pg_sleep({seconds})")).await,
        "mysql" => T::execute_in(tx, format!("SELECT sleep({seconds})")).await,
        _ => std::future::pending().await,
    }
}

async fn the_relay_is_woken<T: TestDb>() {
    let (outbox, orders) = tables::<T>().await;
    let log = Log::default();
    let mut settings = quick_relay();
    // Nothing else finds it soon.
    settings.idle_poll = Duration::from_secs(60);
    settings.near_sweep = Duration::from_secs(60);
    let relay = Relay::builder(&outbox)
        .settings(settings)
        .route("orders", Route::to("test:orders"))
        .transport("test", Recorder(log.clone()))
        .start()
        .await
        .unwrap();
    relay.drain_once().await;
    place::<T>(&outbox, &orders, 1, 9).await.unwrap();
    log.wait_len(1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}
