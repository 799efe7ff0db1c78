//! Making the tables.

use futures_util::future::join_all;
use posthouse::store::{Backend, SCHEMA_VERSION};
use posthouse::{Error, ErrorKind, Message, Outbox};

use crate::store::tables::{DEADLINE, Fresh, StoreDb, on_all_stores, outbox_in};

on_all_stores!(
    ten_migrations_at_once_make_one_set_of_tables,
    a_newer_schema_is_left_alone,
    version_1_gets_what_is_new,
    version_2_gets_what_is_new,
    names_are_checked,
    two_sets_of_tables_live_side_by_side,
    missing_tables_are_told_apart,
);

async fn ten_migrations_at_once_make_one_set_of_tables<T: StoreDb>(_: &Fresh<T>) {
    let place = T::place().await;
    let mut outboxes: Vec<_> = (0..10).map(|_| outbox_in::<T>(&place)).collect();
    // And another set of tables in the same place, which isn't there yet either.
    let other = Outbox::builder(place.pool.clone()).prefix("other_").houses(2);
    outboxes.push(place.schema.iter().fold(other, |other, schema| other.schema(schema)).build().unwrap());
    for result in join_all(outboxes.iter().map(Outbox::migrate)).await {
        result.unwrap();
    }
    outboxes[0].migrate().await.unwrap();
    let store = T::Db::store(&place.pool, outboxes[0].tables(), DEADLINE, None);
    assert_eq!(store.check().await.unwrap(), (SCHEMA_VERSION, T::HOUSES as u16));
    assert_eq!(store.houses().await.unwrap().len(), T::HOUSES);
    outboxes[3].publish_alone(Message::to("d")).await.unwrap();
    assert_eq!(store.backlog().await.unwrap()[0].messages, 1);
    drop(store);
    T::remove(&place).await;
}

async fn a_newer_schema_is_left_alone<T: StoreDb>(db: &Fresh<T>) {
    let id = db.publish_one(Message::to("before")).await;
    db.run("UPDATE {meta} SET schema_version = 99").await;
    db.outbox.migrate().await.unwrap();
    assert_eq!(db.store.check().await.unwrap(), (99, T::HOUSES as u16));
    let second = db.publish_one(Message::to("after")).await;
    assert!(second > id);
    assert_eq!(db.eligible().await.len(), 2);
}

/// Takes away what versions 4 and 5 added.
async fn without_groups<T: StoreDb>(db: &Fresh<T>) {
    // SQLite looks a column that is to be dropped up in what the connection knew of the tables; reading brings it up to date.
    db.run("SELECT 1 FROM {meta}; ALTER TABLE {audit} DROP COLUMN amount").await;
    for table in ["alert", "alert_event", "alert_notice", "alert_silence", "alert_report"] {
        db.run(&format!("DROP TABLE {{{table}}}")).await;
    }
    let not_in_sqlite = ["adopted", "retired"].iter().filter(|_| T::NAME != "sqlite");
    for table in ["group", "run", "duty", "archive"].iter().chain(not_in_sqlite) {
        db.run(&format!("DROP TABLE {{{table}}}")).await;
    }
    for column in ["houses", "run_houses"] {
        db.run(&format!("SELECT 1 FROM {{meta}}; ALTER TABLE {{instance}} DROP COLUMN {column}")).await;
    }
}

/// The tables of version 1 with messages in them, and ten processes of this version.
async fn version_1_gets_what_is_new<T: StoreDb>(db: &Fresh<T>) {
    let upgrade = db.outbox.migration_sql_from(1);
    assert!(upgrade.contains("inbox") && !upgrade.contains("TRIGGER"), "{upgrade}");
    assert!(db.outbox.migration_sql().ends_with(&upgrade));
    assert_eq!(db.outbox.migration_sql_from(SCHEMA_VERSION), "");
    assert_eq!(db.outbox.migration_sql_from(99), "");
    let id = db.publish_one(Message::to("before")).await;
    let back = async || {
        without_groups(db).await;
        db.run("DROP TABLE {inbox}").await;
        db.run("UPDATE {meta} SET schema_version = 1").await;
    };
    back().await;
    for result in join_all((0..10).map(|_| db.outbox.migrate())).await {
        result.unwrap();
    }
    assert_eq!(db.store.check().await.unwrap(), (SCHEMA_VERSION, T::HOUSES as u16));
    assert_eq!(db.int("SELECT count(*) FROM {inbox}").await, 0);
    assert!(db.publish_one(Message::to("after")).await > id);
    assert_eq!(db.eligible().await.len(), 2);
    // With a tool of one's own.
    back().await;
    db.run_text(&upgrade).await;
    assert_eq!(db.store.check().await.unwrap().0, SCHEMA_VERSION);
    db.outbox.migrate().await.unwrap();
    assert_eq!(db.int("SELECT count(*) FROM {inbox}").await, 0);
}

/// An inbox of version 2 with a message in it, and ten processes of this version.
async fn version_2_gets_what_is_new<T: StoreDb>(db: &Fresh<T>) {
    let (from_1, upgrade) = (db.outbox.migration_sql_from(1), db.outbox.migration_sql_from(2));
    assert!(upgrade.contains("success_at") && !upgrade.contains("last_at"), "{upgrade}");
    let version_2 = from_1.strip_suffix(&upgrade).expect("it ends with the later steps");
    let back = async || {
        without_groups(db).await;
        db.run("DROP TABLE {inbox}").await;
        db.run("UPDATE {meta} SET schema_version = 1").await;
        db.run_text(version_2).await;
        assert_eq!(db.int("SELECT count(*) FROM {meta} WHERE schema_version = 2").await, 1);
        db.run("INSERT INTO {inbox} (consumer, message_id) VALUES ('c', 'before')").await;
    };
    // With a tool of one's own.
    back().await;
    db.run_text(&upgrade).await;
    assert_eq!(db.store.check().await.unwrap().0, SCHEMA_VERSION);
    assert_eq!(db.int("SELECT count(*) FROM {inbox}").await, 1);
    back().await;
    for result in join_all((0..10).map(|_| db.outbox.migrate())).await {
        result.unwrap();
    }
    assert_eq!(db.store.check().await.unwrap().0, SCHEMA_VERSION);
    assert_eq!(db.int("SELECT count(*) FROM {inbox}").await, 1);
}

async fn names_are_checked<T: StoreDb>(db: &Fresh<T>) {
    for bad in ["", "Ph_", "1a", "a-b", "a\"b", "a`b", "a;b", "ä_", &"x".repeat(33)] {
        let refused = Outbox::builder(db.place.pool.clone()).prefix(bad).build();
        assert!(matches!(refused, Err(Error::Config(_))), "prefix {bad:?}");
        let refused = Outbox::builder(db.place.pool.clone()).schema(format!("{bad}\"")).build();
        assert!(matches!(refused, Err(Error::Config(_))), "schema {bad:?}");
    }
    for bad in [0, 4097] {
        let refused = Outbox::builder(db.place.pool.clone()).houses(bad).build();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Config, "houses {bad}");
    }
}

async fn two_sets_of_tables_live_side_by_side<T: StoreDb>(db: &Fresh<T>) {
    // The longest prefix there may be.
    let prefix = format!("{}_", "o".repeat(31));
    let mut builder = Outbox::builder(db.place.pool.clone()).prefix(&prefix).houses(2);
    if let Some(schema) = &db.place.schema {
        builder = builder.schema(schema);
    }
    let other = builder.build().unwrap();
    other.migrate().await.unwrap();
    other.publish_alone(Message::to("other").dedup_key("k")).await.unwrap();
    db.outbox.publish_alone(Message::to("first").dedup_key("k")).await.unwrap();
    let store = T::Db::store(&db.place.pool, other.tables(), DEADLINE, None);
    assert_eq!(store.backlog().await.unwrap()[0].destination, "other");
    assert_eq!(db.store.backlog().await.unwrap()[0].destination, "first");
    assert_eq!(store.check().await.unwrap().1 as usize, T::HOUSES.min(2));
    store.upkeep().await.unwrap();
}

async fn missing_tables_are_told_apart<T: StoreDb>(db: &Fresh<T>) {
    let mut builder = Outbox::builder(db.place.pool.clone()).prefix("nowhere_");
    if let Some(schema) = &db.place.schema {
        builder = builder.schema(schema);
    }
    let nowhere = builder.build().unwrap();
    let missing = T::Db::store(&db.place.pool, nowhere.tables(), DEADLINE, None).check().await.unwrap_err();
    assert!(matches!(missing, Error::Schema(_)), "{missing:?}");
    assert!(missing.to_string().contains("posthouse migrate"), "{missing}");
    assert!(nowhere.publish_alone(Message::to("d")).await.is_err());
}

mod sqlite_only {
    use posthouse::store::Backend;
    use posthouse::{Error, Message, Outbox};
    use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

    use crate::store::tables::{DEADLINE, Fresh};
    use crate::support::Sqlite;

    #[tokio::test]
    async fn a_schema_is_refused() {
        let db = Fresh::<Sqlite>::new().await;
        let refused = Outbox::builder(db.place.pool.clone()).schema("app").build().unwrap_err();
        assert!(matches!(refused, Error::Config(_)) && refused.to_string().contains("SQLite"), "{refused}");
        db.remove().await;
    }

    #[tokio::test]
    async fn a_database_in_memory_can_publish_but_has_no_relay() {
        for url in ["sqlite::memory:", "sqlite://"] {
            let options: SqliteConnectOptions = url.parse().unwrap();
            let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options.in_memory(true)).await.unwrap();
            let outbox = Outbox::new(pool.clone());
            outbox.migrate().await.unwrap();
            outbox.publish_alone(Message::to("d")).await.unwrap();
            let refused = sqlx::Sqlite::store(&pool, outbox.tables(), DEADLINE, None).check().await.unwrap_err();
            assert!(matches!(refused, Error::Config(_)) && refused.to_string().contains("in memory"), "{url}: {refused}");
        }
    }

    #[tokio::test]
    async fn migration_turns_on_wal_mode() {
        let db = Fresh::<Sqlite>::new().await;
        assert_eq!(db.texts("SELECT journal_mode FROM pragma_journal_mode").await, [Some("wal".to_owned())]);
        db.remove().await;
    }

    #[tokio::test]
    async fn text_that_is_not_utf8_stops_nothing_else() {
        let db = Fresh::<Sqlite>::new().await;
        db.run("INSERT INTO {message} (destination, message_key) VALUES (CAST(x'64ff' AS TEXT), CAST(x'fe' AS TEXT))").await;
        let good = db.publish_one(Message::to("d").key("k")).await;
        let rows = db.eligible().await;
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0].destination, "d\u{fffd}");
        let mut loaded = db.store.load(&[rows[0].id, good]).await.unwrap();
        loaded.sort_by_key(|l| l.0);
        assert!(loaded[0].1.as_ref().unwrap_err().contains("destination"));
        assert!(loaded[1].1.is_ok());
        assert_eq!(
            db.store.list(&posthouse::store::MessageFilter { limit: 9, ..Default::default() }).await.unwrap().rows.len(),
            2
        );
        db.remove().await;
    }

    #[tokio::test]
    async fn nul_in_text_and_payloads_that_are_neither_text_nor_bytes_are_refused() {
        let db = Fresh::<Sqlite>::new().await;
        for bad in [
            "destination) VALUES ('a' || char(0))",
            "destination, message_key) VALUES ('a', char(0))",
            "destination, payload) VALUES ('a', 5)",
        ] {
            assert!(db.try_run(&format!("INSERT INTO {{message}} ({bad}")).await.is_err(), "{bad}");
        }
        db.remove().await;
    }
}
