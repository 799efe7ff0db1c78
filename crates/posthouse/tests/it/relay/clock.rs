//! C1: the wall clocks of instances and the time zones of their sessions decide nothing; the database's clock does.

use std::collections::HashMap;
use std::process::Child;
use std::time::{Duration, Instant, SystemTime};

use posthouse::store::{Backend, Coverage, Store};
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Relay};
use posthouse_faults::{SKEW, skewing_library};

use super::crash::{CHILD_LEASE, lines, spawn_with};
use super::quick;
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, messages, outbox_at, wait_for};

const MINUTES: i64 = 300;
const HOUR: Duration = Duration::from_secs(3600);

macro_rules! on_servers {
    ($($name:ident => $test:expr),+ $(,)?) => {
        mod postgres { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::bounded($test(std::marker::PhantomData::<super::Postgres>)).await } )+ }
        mod mysql { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::bounded($test(std::marker::PhantomData::<super::MySql>)).await } )+ }
    };
}

on_servers!(
    an_instance_five_minutes_ahead_shares_like_any_other => |db| super::shares_like_any_other(db, super::MINUTES),
    an_instance_five_minutes_behind_shares_like_any_other => |db| super::shares_like_any_other(db, -super::MINUTES),
    the_time_zone_of_a_session_changes_nothing => super::time_zone_changes_nothing,
);

/// Seconds until the next try of each message, by its id, as this machine (and so the database on it) tells the time.
async fn waits(store: &dyn Store) -> HashMap<String, i64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64;
    let rows = messages(store).await;
    for m in &rows {
        assert!((now - m.created_at_ms).abs() < 60_000, "{} was created {} ms ago", m.message_id, now - m.created_at_ms);
    }
    rows.into_iter().filter_map(|m| Some((m.message_id, (m.next_attempt_ms? - now) / 1000))).collect()
}

fn about_an_hour(seconds: Option<&i64>) -> bool {
    seconds.is_some_and(|s| (3_540..=3_600).contains(s))
}

/// Owners whose leases are valid, and how many houses each has.
async fn shares(store: &dyn Store) -> HashMap<String, usize> {
    let mut shares = HashMap::new();
    for house in store.houses().await.unwrap() {
        if let (Some(owner), true) = (house.owner, house.alive) {
            *shares.entry(owner).or_insert(0) += 1;
        }
    }
    shares
}

/// Doesn't outlive the test, however that ends.
struct Mortal(Child);

impl Drop for Mortal {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).expect("kill");
    }
}

async fn shares_like_any_other<T: TestDb>(_: std::marker::PhantomData<T>, skew: i64) {
    let place = T::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    let store = T::Db::store(outbox.pool(), outbox.tables(), Duration::from_secs(5), None);
    let directory = std::env::temp_dir().join(format!("posthouse-clock-{:016x}", fastrand::u64(..)));
    std::fs::create_dir(&directory).unwrap();
    let library = skewing_library(&directory).unwrap();
    let environment = [("LD_PRELOAD", library.to_str().unwrap().to_owned()), (SKEW, skew.to_string())];
    let mut child = Mortal(spawn_with::<T>("clock", &place.url, place.schema.as_deref(), 0, &environment));
    let told = lines(&mut child.0);
    let clock: i64 = told.recv_timeout(SOON).expect("its clock").strip_prefix("clock ").expect("its clock").parse().unwrap();
    let ours = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64;
    assert!((clock - ours - skew).abs() < 60, "the child's clock is off by {} s", clock - ours);

    // What it writes: when a message was made, and when it is due, by delay and after a failure.
    wait_for("its messages", SOON, async || {
        let waits = waits(&*store).await;
        about_an_hour(waits.get("later")) && about_an_hour(waits.get("retry"))
    })
    .await;

    // It takes nothing from the living, and loses nothing to them.
    let mut relay = Relay::builder(&outbox).settings(quick()).start().await.unwrap();
    let even = async || shares(&*store).await.into_values().eq([32, 32]);
    wait_for("even shares", SOON, even).await;
    let epochs = async || store.houses().await.unwrap().iter().map(|h| h.epoch).sum::<i64>();
    let settled = epochs().await;
    let until = Instant::now() + quick().lease.max(CHILD_LEASE) * 2;
    while Instant::now() < until {
        assert!(even().await, "{:?}", shares(&*store).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((epochs().await, relay.stats().leases_lost), (settled, 0), "a house changed hands");

    // From the dead it takes when their lease ends, and no sooner.
    let lease_until = relay.stats().lease_until.unwrap();
    drop(relay);
    let died = Instant::now();
    wait_for("the skewed one to have all houses", SOON, async || shares(&*store).await.into_values().eq([64])).await;
    let moved = Instant::now();
    assert!(moved >= lease_until, "{:?} before the lease ended", lease_until - moved);
    assert!(moved - died < quick().lease + Duration::from_secs(2), "{:?}", moved - died);

    // Its own end when their lease ends, and no later.
    relay = Relay::builder(&outbox).settings(quick()).start().await.unwrap();
    wait_for("even shares again", SOON, even).await;
    let killed = Instant::now();
    drop(child);
    wait_for("the others to have all houses", SOON, async || relay.stats().houses == 64).await;
    let took = killed.elapsed();
    assert!(took > CHILD_LEASE / 2 && took < CHILD_LEASE + Duration::from_secs(2), "{took:?}");
    relay.shutdown(Duration::from_secs(5)).await;
    std::fs::remove_dir_all(&directory).unwrap();
}

/// A pool whose sessions live far from UTC.
trait Zoned: TestDb {
    fn zoned(pool: &sqlx::Pool<Self::Db>) -> sqlx::Pool<Self::Db>;
}

impl Zoned for Postgres {
    fn zoned(pool: &sqlx::PgPool) -> sqlx::PgPool {
        sqlx::PgPool::connect_lazy_with((*pool.connect_options()).clone().options([("TimeZone", "Pacific/Kiritimati")]))
    }
}

impl Zoned for MySql {
    fn zoned(pool: &sqlx::MySqlPool) -> sqlx::MySqlPool {
        sqlx::MySqlPool::connect_lazy_with((*pool.connect_options()).clone().timezone(Some("+13:00".to_owned())))
    }
}

async fn time_zone_changes_nothing<T: Zoned>(_: std::marker::PhantomData<T>) {
    let place = T::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    let here = T::Db::store(outbox.pool(), outbox.tables(), Duration::from_secs(5), None);
    // The relay's own connections are made like those of the pool.
    let there = outbox_at::<T::Db>(T::zoned(outbox.pool()), place.schema.as_deref());
    let transport = from_fn(|d: Delivery| async move {
        match d.message().message_id.as_str() {
            "retry" => d.retry("not now", Some(HOUR)),
            _ => d.delivered(),
        }
    });
    let relay = Relay::builder(&there).settings(quick()).transport("test", transport).start().await.unwrap();
    for message in [
        Message::to("test:a").id("retry"),
        Message::to("test:a").id("later").deliver_in(HOUR),
        Message::to("test:a").id("at").deliver_at(SystemTime::now() + HOUR),
        Message::to("test:a").id("soon").deliver_in(Duration::from_millis(300)),
    ] {
        there.publish_alone(message).await.unwrap();
    }
    wait_for("the one that is due soon", SOON, async || relay.stats().delivered == 1).await;
    for store in [&here, relay.store()] {
        wait_for("the others in an hour", SOON, async || {
            let waits = waits(&**store).await;
            waits.len() == 3 && waits.values().all(|s| about_an_hour(Some(s)))
        })
        .await;
    }
    // Alive, and only for as long as its lease.
    here.join("other", &Coverage::default(), HOUR).await.unwrap();
    let live = here.renew("other", HOUR).await.unwrap().unwrap().live;
    let left = live.iter().find(|live| Some(&live.name) == relay.stats().instance.as_ref()).map(|live| live.left);
    assert!(left.is_some_and(|left| left <= quick().lease), "{live:?}");
    relay.shutdown(Duration::from_secs(5)).await;
}
