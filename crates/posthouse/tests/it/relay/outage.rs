//! The database goes away, in several ways, and comes back.

use std::time::{Duration, Instant};

use posthouse::{Message, Relay};

use super::{Log, Recorder, quick};
use crate::support::{MySql, Place, Postgres, SOON, TestDb, outbox_at, pending, wait_for};
use posthouse_faults::{Mode, Proxy};

/// Relay through a proxy, publisher beside it.
async fn outage<T: TestDb>(mode: Mode) {
    let place = T::place().await;
    let direct = place.outbox();
    direct.migrate().await.unwrap();
    let address = place.url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
    let proxy = Proxy::start(address.clone()).await;
    let through = T::connect(&place.url.replace(&address, &proxy.address.to_string())).await;
    let outbox = outbox_at(through, place.schema.as_deref());
    let log = Log::default();
    let mut settings = quick();
    settings.database_timeout = Duration::from_millis(800);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", Recorder(log.clone())).start().await.unwrap();
    direct.publish_alone(Message::to("test:a").payload("before")).await.unwrap();
    log.wait_len(1).await;
    wait_for("completion", SOON, async || pending::<T>(&direct).await == 0).await;

    proxy.set(mode);
    for i in 0..20 {
        direct.publish_alone(Message::to("test:a").key(i % 3).payload(i.to_string())).await.unwrap();
    }
    wait_for("errors are noticed", SOON, async || relay.stats().database_errors > 0 || relay.stats().leases_lost > 0).await;
    let errors = relay.stats().database_errors;
    proxy.set(Mode::Open);
    let opened = Instant::now();
    wait_for("everything is delivered", SOON, async || log.distinct() >= 21).await;
    wait_for("completion", SOON, async || pending::<T>(&direct).await == 0).await;
    // P4: it waited between tries. Eight loops at no more than 20 errors a second would be a spin.
    assert!(errors < 500, "{errors} errors");
    assert!(opened.elapsed() < SOON);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// P10: the peer vanished without a word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_falls_silent() {
    outage::<Postgres>(Mode::Silent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_falls_silent() {
    outage::<MySql>(Mode::Silent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_cuts_connections() {
    outage::<Postgres>(Mode::Cut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_cuts_connections() {
    outage::<MySql>(Mode::Cut).await;
}

/// P4, T9: the server ends every session of the relay, again and again, under load.
async fn sessions_killed<T: TestDb>(place: Place<T::Db>, own_url: &str, kill: impl AsyncFn(&sqlx::Pool<T::Db>)) {
    let direct = place.outbox();
    direct.migrate().await.unwrap();
    let outbox = outbox_at(T::connect(own_url).await, place.schema.as_deref());
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    for i in 0..200 {
        direct.publish_alone(Message::to("test:a").key(i % 7).payload(i.to_string())).await.unwrap();
        if i % 40 == 20 {
            kill(&place.pool).await;
        }
    }
    wait_for("everything is delivered", SOON, async || log.distinct() >= 200).await;
    wait_for("completion", SOON, async || pending::<T>(&direct).await == 0).await;
    assert_eq!(log.order_violations(), 0);
    relay.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_kills_sessions() {
    let place = Postgres::place().await;
    let name = format!("relay{:08x}", fastrand::u32(..));
    let url = format!("{}?application_name={name}", place.url);
    let kill = format!("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{name}'");
    sessions_killed::<Postgres>(place, &url, async |pool| {
        Postgres::number(pool, kill.clone()).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_kills_sessions() {
    let place = MySql::place().await;
    // A user of its own tells its sessions from those of other tests.
    let name = format!("relay{:08x}", fastrand::u32(..));
    MySql::execute(&place.pool, format!("CREATE USER '{name}'@'127.0.0.1' IDENTIFIED BY 'x'")).await;
    MySql::execute(&place.pool, format!("GRANT ALL ON *.* TO '{name}'@'127.0.0.1'")).await;
    let (_, server) = place.url.split_once('@').expect("user@host");
    let url = format!("mysql://{name}:x@{server}");
    sessions_killed::<MySql>(place, &url, async |pool| {
        let ids: Vec<i64> = sqlx::query_scalar("SELECT CAST(id AS signed) FROM information_schema.processlist WHERE user = ?")
            .bind(&name)
            .fetch_all(pool)
            .await
            .unwrap();
        for id in ids {
            // It may be gone already.
            let _ = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("KILL {id}"))).execute(pool).await;
        }
    })
    .await;
}

/// The database is down when the relay starts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_down_at_start() {
    let place = Postgres::place().await;
    let direct = place.outbox();
    direct.migrate().await.unwrap();
    let address = place.url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
    let proxy = Proxy::start(address.clone()).await;
    proxy.set(Mode::Cut);
    let outbox =
        outbox_at(Postgres::connect(&place.url.replace(&address, &proxy.address.to_string())).await, place.schema.as_deref());
    let log = Log::default();
    let mut settings = quick();
    settings.database_timeout = Duration::from_millis(800);
    let relay = Relay::builder(&outbox)
        .settings(settings)
        .transport("test", Recorder(log.clone()))
        .start()
        .await
        .expect("starts all the same");
    direct.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    proxy.set(Mode::Open);
    log.wait_len(1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}
