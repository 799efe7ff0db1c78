//! What is particular to MySQL and MariaDB: hashes equal to PostgreSQL's, sessions in any mode, time zone and character set.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use posthouse::store::{Action, Backend, Done, House, Mark, MessageFilter, MessageStatus, SCHEMA_VERSION, Setback, Store};
use posthouse::{Error, Message, Outbox};
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, MySql, MySqlConnection, MySqlPool};

const DEADLINE: Duration = Duration::from_secs(30);

/// A database of its own, dropped when the test ends well.
struct Db {
    server: MySqlConnectOptions,
    name: String,
    pool: MySqlPool,
}

impl Db {
    async fn new(charset: &str) -> Self {
        Self::with(charset, "").await
    }

    /// With a statement that every connection of the pool runs first.
    async fn with(charset: &str, session: &'static str) -> Self {
        let url = std::env::var("POSTHOUSE_TEST_MYSQL_URL").expect("POSTHOUSE_TEST_MYSQL_URL; see scripts/services");
        let server: MySqlConnectOptions = url.parse().unwrap();
        let name = format!("ph_{:016x}", fastrand::u64(..));
        let mut root = MySqlConnection::connect_with(&server).await.unwrap();
        sql(&mut root, &format!("CREATE DATABASE {name} CHARACTER SET {charset}")).await;
        let pool = MySqlPoolOptions::new()
            .max_connections(12)
            .after_connect(move |c, _| {
                Box::pin(async move {
                    if !session.is_empty() {
                        c.execute(session).await?;
                    }
                    Ok(())
                })
            })
            .connect_with(server.clone().database(&name))
            .await
            .unwrap();
        Self { server, name, pool }
    }

    async fn migrated(charset: &str) -> (Self, Outbox<MySql>, Arc<dyn Store>) {
        Self::new(charset).await.ready().await
    }

    async fn ready(self) -> (Self, Outbox<MySql>, Arc<dyn Store>) {
        let outbox = Outbox::new(self.pool.clone());
        outbox.migrate().await.unwrap();
        let store = MySql::store(&self.pool, outbox.tables(), DEADLINE, None);
        (self, outbox, store)
    }

    async fn done(self) {
        self.pool.close().await;
        let mut root = MySqlConnection::connect_with(&self.server).await.unwrap();
        sql(&mut root, &format!("DROP DATABASE {}", self.name)).await;
    }
}

async fn sql(conn: &mut MySqlConnection, text: &str) {
    conn.execute(sqlx::raw_sql(AssertSqlSafe(text.to_owned()))).await.unwrap();
}

fn marks() -> Vec<Mark> {
    (0..64).map(|h| Mark { house: House(h), after: 0, upto: i64::MAX }).collect()
}

#[tokio::test]
async fn the_hash_is_the_one_of_postgresql() {
    let (db, _, _) = Db::migrated("utf8mb4").await;
    // As PostgreSQL's posthouse_hash and posthouse_house_of (64 houses) answer.
    for (destination, key, id, hash, house) in VECTORS {
        let got: (i64, i32) = sqlx::query_as("SELECT posthouse_hash(?, ?, ?), posthouse_house_of(?, ?, ?)")
            .bind(destination)
            .bind(key)
            .bind(id)
            .bind(destination)
            .bind(key)
            .bind(id)
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert_eq!(got, (hash, house), "{destination:?} {key:?} {id:?}");
        // The trigger writes the expression out; it has to agree.
        sqlx::query("INSERT INTO posthouse_message (destination, message_key, message_id) VALUES (?, ?, ?)")
            .bind(destination.as_bytes())
            .bind(key.map(str::as_bytes))
            .bind(id.as_bytes())
            .execute(&db.pool)
            .await
            .unwrap();
        let row: (i32, Option<i64>) = sqlx::query_as("SELECT house, key_hash FROM posthouse_pending ORDER BY id DESC LIMIT 1")
            .fetch_one(&db.pool)
            .await
            .unwrap();
        assert_eq!(row, (house, key.map(|_| hash)), "{destination:?} {key:?} {id:?}");
        sqlx::query("DELETE FROM posthouse_pending").execute(&db.pool).await.unwrap();
    }
    db.done().await;
}

const VECTORS: [(&str, Option<&str>, &str, i64, i32); 6] = [
    ("orders", Some("7"), "x", 542807992280805633, 1),
    ("orders", Some("A"), "x", 593137296148280925, 29),
    ("orders", Some("a"), "x", 65645428690122185, 9),
    ("orders", Some("a "), "x", 318597705701259780, 4),
    ("a", None, "0190", 544265511486185716, 52),
    ("queue 😀", Some("键"), "x", 499085902497332032, 0),
];

/// Publishes on sessions that are set up badly, and expects the same rows from each.
#[tokio::test]
async fn sessions_in_any_mode_publish_the_same() {
    let text = "Ünï 😀 \u{202e}rtl 键";
    for (charset, session) in [
        ("latin1", "SET sql_mode = ''"),
        ("utf8mb4", "SET sql_mode = 'ANSI,TRADITIONAL,NO_BACKSLASH_ESCAPES'"),
        ("utf8mb4", "SET time_zone = '+08:00'"),
        ("latin1", "SET NAMES latin1"),
        ("latin1", "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"),
    ] {
        let (db, outbox, store) = Db::with(charset, session).await.ready().await;
        let due = SystemTime::now() + Duration::from_secs(3600);
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(Message::to(text).key(text).typed(text).id(text).header(text, text).payload(vec![0, 255, 1])).await.unwrap();
        tx.publish(Message::to("later").deliver_at(due)).await.unwrap();
        tx.publish(Message::to("later").deliver_in(Duration::from_secs(3600))).await.unwrap();
        tx.publish(Message::to("once").dedup_key(text)).await.unwrap();
        tx.publish(Message::to("once").dedup_key(text)).await.unwrap();
        tx.commit().await.unwrap();

        let poll = store.poll(&marks(), 10, &[]).await.unwrap();
        assert_eq!(poll.rows.len(), 2, "{session}: the delayed ones aren't due");
        let thin = poll.rows.iter().find(|t| t.destination == text).unwrap();
        let next: Vec<i64> = poll.houses.iter().filter_map(|h| h.next_due).collect();
        assert!(next.iter().all(|n| (3_500_000_000..=3_600_000_000).contains(n)), "{session}: {next:?}");
        let loaded = store.load(&[thin.id]).await.unwrap();
        let envelope = loaded[0].1.as_ref().unwrap();
        assert_eq!(envelope.destination, text);
        assert_eq!(envelope.key.as_deref(), Some(text));
        assert_eq!(envelope.kind, text);
        assert_eq!(envelope.message_id.as_str(), text);
        assert_eq!(envelope.headers.get(text), Some(text));
        assert_eq!(envelope.payload, [0, 255, 1]);
        assert!(envelope.created_at.elapsed().is_ok_and(|age| age < Duration::from_secs(60)), "{session}: UTC");

        let row = Done { house: thin.house, id: thin.id, version: thin.version };
        let setback = Setback {
            row,
            attempts: 1,
            claims: 0,
            wait: None,
            leave_key: false,
            error: text.into(),
            attempt: Some(posthouse::store::Attempt {
                outcome: "rejected",
                response: Some(text.into()),
                took: Duration::from_millis(5),
            }),
        };
        assert_eq!(store.setback("me", &[setback]).await.unwrap(), [thin.id]);
        let shown = store.show(thin.id).await.unwrap().unwrap();
        assert_eq!(shown.row.status, "FAILED");
        assert_eq!(shown.row.last_error.as_deref(), Some(text));
        assert_eq!(shown.history[0].response.as_deref(), Some(text));
        let failed = MessageFilter { status: Some(MessageStatus::Failed), limit: 10, ..Default::default() };
        assert_eq!(store.list(&failed).await.unwrap().rows.len(), 1);
        assert_eq!(store.act(&[thin.id], &Action::Edit { destination: text.into() }, text).await.unwrap(), [thin.id]);
        let all = store.list(&MessageFilter { limit: 10, ..Default::default() }).await.unwrap().rows;
        assert_eq!(all.len(), 4);
        assert_eq!(all.iter().filter(|m| m.status == "PENDING").count(), 4);
        db.done().await;
    }
}

#[tokio::test]
async fn a_text_that_is_too_long_is_refused_without_strict_mode_too() {
    let (db, _, _) = Db::with("latin1", "SET sql_mode = ''").await.ready().await;
    for long in [256, 300, 10_000] {
        for column in ["destination", "message_key", "message_id", "type", "content_type"] {
            let text = format!("INSERT INTO posthouse_message (destination, {column}) VALUES ('a', REPEAT('x', {long}))")
                .replace("(destination, destination) VALUES ('a', ", "(destination) VALUES (");
            assert!(db.pool.execute(sqlx::raw_sql(AssertSqlSafe(text))).await.is_err(), "{column} {long}");
        }
    }
    db.done().await;
}

#[tokio::test]
async fn a_row_that_is_not_utf8_fails_alone() {
    let (db, _, store) = Db::migrated("utf8mb4").await;
    db.pool
        .execute("INSERT INTO posthouse_message (destination, message_key) VALUES ('good', NULL), (x'ff', NULL), ('a', x'ff')")
        .await
        .unwrap();
    db.pool.execute("INSERT INTO posthouse_message (destination, headers) VALUES ('a', '[1]')").await.unwrap();
    let poll = store.poll(&marks(), 10, &[]).await.unwrap();
    assert_eq!(poll.rows.len(), 4);
    let mut loaded = store.load(&[1, 2, 3, 4]).await.unwrap();
    loaded.sort_by_key(|l| l.0);
    assert!(loaded[0].1.is_ok());
    assert!(loaded[1].1.as_ref().unwrap_err().contains("destination"));
    assert!(loaded[2].1.as_ref().unwrap_err().contains("message_key"));
    assert!(loaded[3].1.as_ref().unwrap_err().contains("headers"));
    db.done().await;
}

#[tokio::test]
async fn dedup_keys_within_a_batch_keep_order_and_the_transaction_usable() {
    let (db, outbox, store) = Db::migrated("utf8mb4").await;
    outbox.publish_alone(Message::to("a").dedup_key("k7")).await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let batch: Vec<Message> = (0..1203).map(|n| Message::to("a").id(format!("m{n}")).dedup_key(format!("k{n}"))).collect();
    outbox.publish_many(&mut tx, batch).await.unwrap();
    tx.publish(Message::to("a").id("last")).await.unwrap();
    tx.commit().await.unwrap();
    let ids: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT id, message_id FROM posthouse_message ORDER BY id").fetch_all(&db.pool).await.unwrap();
    let names: Vec<String> = ids.into_iter().map(|(_, m)| String::from_utf8(m).unwrap()).collect();
    let mut expected = vec!["k7".to_owned()];
    expected.extend((0..1203).filter(|n| *n != 7).map(|n| format!("m{n}")));
    expected.push("last".into());
    assert_eq!(names, expected);
    assert_eq!(store.backlog().await.unwrap()[0].messages, 1204);
    let refused = outbox.insert_statement(Message::to("a").dedup_key("k")).unwrap_err();
    assert!(matches!(refused, Error::Invalid { field: "dedup_key", .. }));
    db.done().await;
}

#[tokio::test]
async fn a_dedup_key_is_not_claimed_by_a_publish_that_fails() {
    let (db, outbox, _) = Db::migrated("utf8mb4").await;
    db.pool.execute("DROP TABLE posthouse_pending").await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(Message::to("a").dedup_key("k")).await.unwrap_err();
    tx.commit().await.unwrap();
    let claimed: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM posthouse_dedup").fetch_one(&db.pool).await.unwrap();
    assert_eq!(claimed, 0);
    db.done().await;
}

#[tokio::test]
async fn an_interrupted_migration_goes_on_and_ten_at_once_are_safe() {
    let db = Db::new("latin1").await;
    let outbox = Outbox::builder(db.pool.clone()).houses(8).build().unwrap();
    let text = Outbox::<MySql>::builder(db.pool.clone()).houses(16).build().unwrap().migration_sql();
    // As if another process, configured for 16 houses, had died after each of its statements.
    let statements: Vec<&str> = text.split(";\n\n").filter(|s| !s.trim().is_empty()).collect();
    // The houses are settled by the row that names them; what comes after it is an upgrade.
    let settled = statements.iter().position(|s| s.contains("INTO `posthouse_meta`")).unwrap();
    for done in [1, 5, settled] {
        for statement in &statements[..done] {
            let _ = db.pool.execute(sqlx::raw_sql(AssertSqlSafe((*statement).to_owned()))).await;
        }
    }
    let all: Vec<_> = (0..10)
        .map(|_| {
            let outbox = outbox.clone();
            tokio::spawn(async move { outbox.migrate().await })
        })
        .collect();
    for one in all {
        one.await.unwrap().unwrap();
    }
    let store = MySql::store(&db.pool, outbox.tables(), DEADLINE, None);
    assert_eq!(store.check().await.unwrap(), (SCHEMA_VERSION, 8));
    assert_eq!(store.houses().await.unwrap().len(), 8);
    assert_eq!(store.upkeep().await.unwrap().ahead, Some(40));
    outbox.publish_alone(Message::to("a")).await.unwrap();
    db.done().await;
}

#[tokio::test]
async fn the_printed_migration_works_statement_by_statement() {
    let db = Db::new("utf8mb4").await;
    let outbox = Outbox::new(db.pool.clone());
    sql(&mut db.pool.acquire().await.unwrap(), &outbox.migration_sql()).await;
    outbox.migrate().await.unwrap();
    outbox.publish_alone(Message::to("a")).await.unwrap();
    let store = MySql::store(&db.pool, outbox.tables(), DEADLINE, None);
    assert_eq!(store.poll(&marks(), 1, &[]).await.unwrap().rows.len(), 1);
    db.done().await;
}

#[tokio::test]
async fn upkeep_makes_partitions_for_ids_that_ran_ahead_and_steps_back_from_a_busy_table() {
    let (db, outbox, store) = Db::migrated("utf8mb4").await;
    db.pool.execute("ALTER TABLE posthouse_message AUTO_INCREMENT = 40000001").await.unwrap();
    outbox.publish_alone(Message::to("a")).await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(Message::to("a")).await.unwrap();
    let busy = store.upkeep().await.unwrap();
    assert_eq!((busy.created, busy.ahead), (0, Some(30)));
    tx.commit().await.unwrap();
    let free = store.upkeep().await.unwrap();
    assert_eq!((free.created, free.ahead), (10, Some(40)));
    assert_eq!(store.upkeep().await.unwrap().created, 0);
    // Far beyond the last partition: upkeep sees the next id before a row has it.
    db.pool.execute("ALTER TABLE posthouse_message AUTO_INCREMENT = 9007199254740993").await.unwrap();
    assert!(outbox.publish_alone(Message::to("a")).await.is_err(), "no partition for it yet");
    let jumped = store.upkeep().await.unwrap();
    assert_eq!((jumped.created, jumped.ahead), (41, Some(40)));
    outbox.publish_alone(Message::to("a")).await.unwrap();
    db.done().await;
}

#[tokio::test]
async fn resizing_waits_for_publishers_and_operators_do_not() {
    let (db, outbox, store) = Db::migrated("utf8mb4").await;
    for n in 0..50 {
        outbox.publish_alone(Message::to("a").key(n)).await.unwrap();
    }
    let mut open = outbox.begin().await.unwrap();
    open.publish(Message::to("a").key("late")).await.unwrap();
    // An action doesn't wait for a publishing transaction.
    assert_eq!(store.act(&[1], &Action::Skip, "me").await.unwrap(), [1]);
    let resizing = {
        let store = store.clone();
        tokio::spawn(async move { store.resize(7).await })
    };
    // It raises the change counter first, and holds that row while it waits.
    while db.pool.execute("SELECT changes FROM posthouse_changes FOR UPDATE NOWAIT").await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!resizing.is_finished());
    open.commit().await.unwrap();
    assert_eq!(resizing.await.unwrap().unwrap(), 51);
    outbox.publish_alone(Message::to("a").key("after")).await.unwrap();
    let wrong: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM posthouse_pending p JOIN posthouse_message m ON m.id = p.id \
          WHERE p.house <> posthouse_house_of(m.destination, m.message_key, m.message_id) OR p.house > 6",
    )
    .fetch_one(&db.pool)
    .await
    .unwrap();
    assert_eq!(wrong, 0);
    assert_eq!(store.check().await.unwrap(), (SCHEMA_VERSION, 7));
    assert!(store.houses().await.unwrap().iter().all(|h| h.epoch == 1));
    store.resize(9).await.unwrap();
    assert!(store.houses().await.unwrap().iter().all(|h| h.epoch == 2));
    db.done().await;
}

#[tokio::test]
async fn the_view_shows_every_status_and_finds_failed_ones_without_the_log() {
    let (db, outbox, store) = Db::migrated("latin1").await;
    for n in 0..4 {
        outbox.publish_alone(Message::to("a").id(format!("m{n}"))).await.unwrap();
    }
    let poll = store.poll(&marks(), 10, &[]).await.unwrap();
    let row = |id: i64| {
        let t = poll.rows.iter().find(|t| t.id == id).unwrap();
        Done { house: t.house, id, version: t.version }
    };
    store.act(&[1], &Action::Skip, "me").await.unwrap();
    assert_eq!(store.claim("me", &[row(2)], DEADLINE).await.unwrap(), [2]);
    // Row 2 has another version by now, so only row 3 goes.
    assert_eq!(store.delivered("me", &[row(3), row(2)]).await.unwrap(), [3]);
    let seen: Vec<(i64, String)> =
        sqlx::query_as("SELECT id, status FROM posthouse_outbox ORDER BY id").fetch_all(&db.pool).await.unwrap();
    let seen: Vec<(i64, &str)> = seen.iter().map(|(id, s)| (*id, s.as_str())).collect();
    assert_eq!(seen, [(1, "FAILED"), (2, "SENDING"), (3, "SENT"), (4, "PENDING")]);
    assert_eq!(store.show(3).await.unwrap().unwrap().delivered.unwrap().1, "me");
    let sent = MessageFilter { status: Some(MessageStatus::Sent), limit: 10, ..Default::default() };
    assert_eq!(store.list(&sent).await.unwrap().rows.len(), 1);
    let by_id = MessageFilter { message_id: Some("m3".into()), limit: 10, ..Default::default() };
    assert_eq!(store.list(&by_id).await.unwrap().rows[0].id, 4);
    db.done().await;
}
