//! How fast the dashboard and the API answer on a large database, and whether the relay's statements stay fast beside it.

use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use posthouse::retention::Retention;
use posthouse::{Message, Outbox, Relay, RetentionSettings, Route};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::PagesArgs;
use crate::database::{Rig, must, url};
use crate::drain::Null;
use crate::program;
use crate::report::{Compared, Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
Fills a log with N delivered messages of the last week, their receipts, and a tenth as many rows of an inbox; beside them \
50 000 pending and 5 000 FAILED messages with their attempts. Then starts `posthouse dashboard` on it and asks for each page \
and each list of the API, 11 times one after the other. At last a relay sends what is pending, and retention takes the oldest \
partition out while four tasks publish, each one message after the other.

A row of a page has the median answer in milliseconds as ours, 300 ms as the limit, and the slowest of the answers. That of the \
relay has the rows that sequential scans have read meanwhile: a statement that isn't indexed would read the whole log. Those of \
retention have the slowest of the messages published beside it, and beside nothing for as long. PostgreSQL only. The program is the one beside this one, unless --posthouse names another: build it with `cargo build --release -p posthouse-server`.";

/// An answer should take no longer, in milliseconds.
const LIMIT: f64 = 300.0;

/// How often each page is asked for.
const ANSWERS: usize = 11;

/// Rows per statement while the tables are filled.
const CHUNK: i64 = 500_000;

const PENDING: i64 = 50_000;
const FAILED: i64 = 5_000;

pub(crate) async fn run(args: &PagesArgs, report: &mut Report) {
    let server = url("POSTHOUSE_TEST_POSTGRES_URL");
    let program = program::posthouse(args.posthouse.as_deref());
    let outbox = Postgres::fresh(2).await;
    let mut conn = must("connect", PgConnection::connect(&server).await);
    let facts = fill(&mut conn, &outbox, i64::from(args.n)).await;
    let place = std::env::temp_dir().join(crate::database::fresh_name());
    must("make a directory", std::fs::create_dir_all(&place));
    let (mut child, address) = serve(&program, &place, &server, &outbox).await;
    let client = must("HTTP client", reqwest::Client::builder().timeout(Duration::from_secs(120)).build());
    for (what, path) in paths(&facts) {
        row(&client, &address, &what, &path, report).await;
    }
    must("stop the dashboard", child.kill().await);
    must("remove the directory", std::fs::remove_dir_all(&place));
    relayed(&mut conn, &outbox, report).await;
    retired(&outbox, report).await;
    Postgres::remove(outbox).await;
}

/// Sends what is pending, and counts what is read without an index meanwhile.
async fn relayed(conn: &mut PgConnection, outbox: &Outbox<Postgres>, report: &mut Report) {
    let scans = format!(
        "SELECT coalesce(sum(seq_tup_read), 0)::bigint FROM pg_stat_user_tables WHERE schemaname = '{}' \
            AND relname ~ '^posthouse_(message|kept|receipt|attempt|audit)'",
        outbox.tables().schema().unwrap_or_default()
    );
    let before: i64 = must("statistics", sqlx::query_scalar(AssertSqlSafe(scans.clone())).fetch_one(&mut *conn).await);
    let mut relay = Relay::builder(outbox).transport("null", Null);
    for n in 0..20 {
        relay = relay.route(format!("destination-{n}"), Route::to("null:").concurrency(1_000));
    }
    let started = Instant::now();
    let relay = must("relay", relay.start().await);
    relay.drain_once().await;
    let seconds = started.elapsed().as_secs_f64();
    let delivered = relay.stats().delivered as f64;
    relay.shutdown(Duration::from_secs(10)).await;
    // Those that the relay's connections have counted are told when they are closed.
    let after: i64 = must("statistics", sqlx::query_scalar(AssertSqlSafe(scans)).fetch_one(&mut *conn).await);
    report.add(Row {
        database: "postgres",
        what: "relay of what is pending".into(),
        unit: "messages/s",
        compared: None,
        figures: vec![
            Figure { name: "messages", title: "messages", value: delivered },
            Figure { name: "messages_per_second", title: "messages/s", value: delivered / seconds },
            Figure { name: "scanned_rows", title: "rows scanned", value: (after - before) as f64 },
        ],
    });
}

/// Takes the oldest partition out while there are publishers.
async fn retired(outbox: &Outbox<Postgres>, report: &mut Report) {
    let store = outbox.store(Duration::from_secs(60));
    let partitions = must("partitions", store.retention().partitions().await).unwrap_or_default();
    let Some(oldest) = partitions.first().filter(|p| !p.current) else {
        report.skip("retention: all messages are in one partition; it takes more than 4 000 000".into());
        return;
    };
    let age = Duration::from_millis(oldest.newest_age_ms.and_then(|ms| u64::try_from(ms).ok()).unwrap_or_default());
    let retention = must("retention", Retention::new(store, "bench", RetentionSettings::after(Some(age - age / 100))));
    let started = Instant::now();
    let (gone, beside) = slowest(outbox, async {
        must("retention", retention.run(&mut |_| std::ops::ControlFlow::Continue(())).await).partitions
    })
    .await;
    let took = started.elapsed();
    let ((), alone) = slowest(outbox, tokio::time::sleep(took.min(Duration::from_secs(30)))).await;
    let amount: i64 = gone.iter().map(|p| p.amount).sum();
    for (what, (published, slowest)) in [("publishing while a partition goes", beside), ("publishing, nothing beside it", alone)]
    {
        report.add(Row {
            database: "postgres",
            what: what.into(),
            unit: "ms",
            compared: None,
            figures: vec![
                Figure { name: "published", title: "published", value: published as f64 },
                Figure { name: "slowest_ms", title: "slowest ms", value: slowest.as_secs_f64() * 1000.0 },
                Figure { name: "removed", title: "", value: amount as f64 },
                Figure { name: "seconds", title: "", value: took.as_secs_f64() },
            ],
        });
    }
    eprintln!("{amount} messages went with {} partition(s) in {:.1} s", gone.len(), took.as_secs_f64());
}

/// Publishes from four tasks until `work` is done; how much, and how long the slowest took.
async fn slowest<T>(outbox: &Outbox<Postgres>, work: impl Future<Output = T>) -> (T, (u64, Duration)) {
    let stop = AtomicBool::new(false);
    let publisher = async || {
        let (mut published, mut slowest) = (0, Duration::ZERO);
        let mut conn = must("connect", PgConnection::connect(&url("POSTHOUSE_TEST_POSTGRES_URL")).await);
        while !stop.load(Ordering::Relaxed) {
            let began = Instant::now();
            let mut tx = must("begin", conn.begin().await);
            must("publish", outbox.publish(&mut tx, Message::to("destination-0").payload("x")).await);
            must("commit", tx.commit().await);
            slowest = slowest.max(began.elapsed());
            published += 1;
        }
        (published, slowest)
    };
    let work = async {
        let done = work.await;
        stop.store(true, Ordering::Relaxed);
        done
    };
    let (done, all) = tokio::join!(work, futures_util::future::join_all((0..4).map(|_| publisher())));
    (done, (all.iter().map(|a: &(u64, Duration)| a.0).sum(), all.iter().map(|a| a.1).max().unwrap_or_default()))
}

/// What pages are asked for.
struct Facts {
    highest: i64,
    middle: i64,
    failed: i64,
    message_id: String,
}

async fn execute(conn: &mut PgConnection, what: &str, sql: String) {
    must(what, sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await);
}

/// The triggers don't fire for what is delivered already, so that no pending row has to be deleted again.
async fn fill(conn: &mut PgConnection, outbox: &Outbox<Postgres>, n: i64) -> Facts {
    let name = |table: &str| outbox.tables().name(table);
    let (message, pending, receipt, attempt, inbox, house_of) =
        (name("message"), name("pending"), name("receipt"), name("attempt"), name("inbox"), name("house_of"));
    let columns = "message_id, type, destination, message_key, payload, created_at";
    let values = |from: i64, to: i64| {
        format!(
            "SELECT 'm' || lpad(g::text, 12, '0'), 'order.placed.v1', 'destination-' || g % 20, 'customer-' || g % 100003, \
                    convert_to(format('{{\"order\":%s,\"customer\":%s,\"note\":\"%s\"}}', g, g % 100003, repeat('x', 150)), 'UTF8'), \
                    clock_timestamp() - interval '7 days' * ({n} - least(g, {n})) / {n} FROM generate_series({from}, {to}) g"
        )
    };
    let started = Instant::now();
    for from in (1..=n).step_by(CHUNK as usize) {
        let to = (from + CHUNK - 1).min(n);
        let insert = format!(
            "SET session_replication_role = replica; INSERT INTO {message} ({columns}) {}; SET session_replication_role = origin",
            values(from, to)
        );
        execute(conn, "fill the log (this needs a superuser)", insert).await;
        let receipts = format!(
            "INSERT INTO {receipt} (house, at, instance, low, ids, versions) \
             SELECT house, max(created_at) + interval '20 ms', 'bench', min(id), array_agg(id ORDER BY id), array_fill(0, ARRAY[count(*)::int]) \
               FROM (SELECT id, created_at, {house_of}(destination, message_key, message_id) AS house, id / 32000 AS part \
                       FROM {message} WHERE id BETWEEN {from} AND {to}) r GROUP BY part, house ORDER BY part, house"
        );
        execute(conn, "fill the receipts", receipts).await;
        let received = format!(
            "INSERT INTO {inbox} (consumer, message_id, type, success_at) \
             SELECT 'consumer-' || g % 5, 'm' || lpad(g::text, 12, '0'), 'order.placed.v1', clock_timestamp() FROM generate_series({from}, {to}, 10) g"
        );
        execute(conn, "fill the inbox", received).await;
        eprintln!("{to} of {n} delivered messages, {:.0} s", started.elapsed().as_secs_f64());
    }
    execute(conn, "add pending messages", format!("INSERT INTO {message} ({columns}) {}", values(n + 1, n + PENDING + FAILED)))
        .await;
    execute(
        conn,
        "let some fail",
        format!(
            "UPDATE {pending} SET status = 'FAILED', attempts = 3, due_at = '9999-12-31', last_error = 'HTTP 422: no such article' WHERE id % 11 = 0; \
             INSERT INTO {attempt} (row_id, attempt, instance, outcome, error, took_ms) \
             SELECT id, a, 'bench', 'retry', 'HTTP 422: no such article', 12 FROM {pending} CROSS JOIN generate_series(1, 3) a WHERE status = 'FAILED'; \
             INSERT INTO {inbox} (consumer, message_id, status, attempts, next_attempt_at, last_error, payload) \
             SELECT 'consumer-' || g % 5, 'f' || g, CASE WHEN g % 2 = 0 THEN 'FAILED' ELSE 'PENDING_RETRY' END, 3, \
                    CASE WHEN g % 2 = 0 THEN timestamptz '9999-12-31' ELSE clock_timestamp() + interval '1 hour' END, 'no such article', '{{}}' \
               FROM generate_series(1, 10000) g"
        ),
    )
    .await;
    execute(conn, "analyze", format!("VACUUM ANALYZE {message}, {pending}, {receipt}, {inbox}, {attempt}")).await;
    let facts = format!(
        "SELECT max(id), (SELECT max(id) FROM {pending} WHERE status = 'FAILED'), (SELECT message_id FROM {message} WHERE id = max(m.id) / 3) \
           FROM {message} m"
    );
    let (highest, failed, message_id): (i64, i64, String) =
        must("look at it", sqlx::query_as(AssertSqlSafe(facts)).fetch_one(conn).await);
    eprintln!("filled in {:.0} s", started.elapsed().as_secs_f64());
    Facts { highest, middle: highest / 2, failed, message_id }
}

async fn serve(program: &Path, place: &Path, server: &str, outbox: &Outbox<Postgres>) -> (Child, String) {
    let tables = outbox.tables();
    let schema = tables.schema().map(|s| format!("schema = {s:?}\n")).unwrap_or_default();
    let config = format!(
        "[databases.main]\nurl = {server:?}\nprefix = {:?}\n{schema}[server]\nlisten = \"127.0.0.1:0\"\n\
         [transports.http]\nallow = [\"127.0.0.1\"]\n",
        tables.prefix()
    );
    must("write a configuration", std::fs::write(place.join("posthouse.toml"), config));
    let mut command = Command::new(program);
    command
        .arg("dashboard")
        .current_dir(place)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .env("NO_COLOR", "1")
        .kill_on_drop(true);
    let mut child = must("start the dashboard", command.spawn());
    let Some(stderr) = child.stderr.take() else { must("read its log", Err("there is none")) };
    let mut lines = BufReader::new(stderr).lines();
    while let Some(line) = must("read its log", lines.next_line().await) {
        if let Some(rest) = line.split("http://").nth(1) {
            let address = rest.split([';', ' ', '/']).next().unwrap_or(rest).to_owned();
            // Nobody reads on: what it says from here on must not block it.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return (child, address);
        }
    }
    must("start the dashboard", Err("it ended without telling its address"))
}

/// Each page, and each list of the API.
fn paths(facts: &Facts) -> Vec<(String, String)> {
    let Facts { highest, middle, failed, message_id } = facts;
    let api = "/api/v1/databases/main";
    let pages = [
        ("overview", "/".to_owned()),
        ("messages", "/messages".to_owned()),
        ("messages, in the middle", format!("/messages?before={middle}")),
        ("messages FAILED", "/messages?status=FAILED".to_owned()),
        ("messages PENDING", "/messages?status=PENDING".to_owned()),
        ("messages PENDING, in the middle", format!("/messages?status=PENDING&before={}", highest - PENDING / 2)),
        ("messages SENT", "/messages?status=SENT".to_owned()),
        ("messages of a destination", "/messages?destination=destination-7".to_owned()),
        ("messages of a destination that has none", "/messages?destination=nobody".to_owned()),
        ("messages of a key", "/messages?key=customer-77".to_owned()),
        ("message", format!("/messages/{failed}")),
        ("message delivered long ago", format!("/messages/{middle}")),
        ("inbox", "/inbox".to_owned()),
        ("inbox FAILED", "/inbox?status=FAILED".to_owned()),
        ("houses", "/houses".to_owned()),
        ("groups", "/groups".to_owned()),
        ("runs", "/runs".to_owned()),
        ("alerts", "/alerts".to_owned()),
        ("audit", "/audit".to_owned()),
        ("retention", "/retention".to_owned()),
        ("metrics", "/metrics".to_owned()),
        ("API: overview", format!("{api}/overview")),
        ("API: messages", format!("{api}/messages")),
        ("API: messages FAILED", format!("{api}/messages?status=FAILED")),
        ("API: one message id", format!("{api}/messages?message_id={message_id}")),
        ("API: inbox", format!("{api}/inbox")),
        ("API: retention", format!("{api}/retention")),
        ("search for text (stops by itself)", "/messages?text=nowhere-to-be-found".to_owned()),
    ];
    pages.map(|(what, path)| (what.to_owned(), path)).into()
}

async fn row(client: &reqwest::Client, address: &str, what: &str, path: &str, report: &mut Report) {
    let mut times = Vec::with_capacity(ANSWERS);
    let mut bytes = 0;
    for _ in 0..ANSWERS {
        let started = Instant::now();
        let answer = must(what, client.get(format!("http://{address}{path}")).send().await);
        let status = answer.status();
        let body = must(what, answer.bytes().await);
        times.push(started.elapsed().as_secs_f64() * 1000.0);
        bytes = body.len();
        if !status.is_success() {
            report.skip(format!("{what} ({path}): {status}"));
            return;
        }
    }
    let slowest = times.iter().copied().fold(0.0, f64::max);
    report.add(Row {
        database: "postgres",
        what: what.to_owned(),
        unit: "ms",
        compared: Some(Compared::new(&times, &[LIMIT; ANSWERS])),
        figures: vec![
            Figure { name: "slowest_ms", title: "slowest ms", value: slowest },
            Figure { name: "kilobytes", title: "kB", value: bytes as f64 / 1000.0 },
        ],
    });
}
