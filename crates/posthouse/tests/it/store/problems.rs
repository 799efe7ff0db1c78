//! D21: upkeep finds what somebody changed about the tables before publishers or receivers do.

use crate::store::tables::{Fresh, StoreDb, on_all_stores};

on_all_stores!(a_missing_trigger_is_a_problem);

async fn problems<T: StoreDb>(db: &Fresh<T>) -> Vec<String> {
    db.store.upkeep().await.unwrap().problems
}

async fn one_problem<T: StoreDb>(db: &Fresh<T>, about: &[&str]) {
    let found = problems(db).await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(about.iter().all(|words| found[0].contains(words)), "{found:?}");
}

async fn a_missing_trigger_is_a_problem<T: StoreDb>(db: &Fresh<T>) {
    assert_eq!(problems(db).await, [""; 0]);
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 0, "looking leaves nothing behind");
    assert_eq!(db.int("SELECT count(*) FROM {pending}").await, 0, "looking leaves nothing behind");
    let on = if T::NAME == "postgres" { " ON {message}" } else { "" };
    let trigger = if T::NAME == "postgres" { "posthouse_enqueue" } else { "{enqueue}" };
    db.run(&format!("DROP TRIGGER {trigger}{on}")).await;
    one_problem(db, &["posthouse_enqueue", "is missing", "migrate --print"]).await;
}

mod postgres_only {
    use super::*;
    use crate::support::Postgres;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_disabled_trigger_and_changed_defaults_are_problems() {
        let db = &Fresh::<Postgres>::new().await;
        for table in ["message", "message_p0000003"] {
            db.run(&format!("ALTER TABLE {{{table}}} DISABLE TRIGGER posthouse_enqueue")).await;
            one_problem(db, &["is disabled", "ENABLE TRIGGER"]).await;
            // What it says to do helps.
            db.run("ALTER TABLE {message} ENABLE TRIGGER \"posthouse_enqueue\"").await;
            assert_eq!(problems(db).await, [""; 0]);
        }
        for change in ["DROP DEFAULT", "SET DEFAULT now()"] {
            db.run(&format!("ALTER TABLE {{message}} ALTER created_at {change}")).await;
            one_problem(db, &["created_at", "SET DEFAULT statement_timestamp()"]).await;
        }
        db.run("ALTER TABLE {message} ALTER message_id DROP DEFAULT").await;
        assert_eq!(problems(db).await.len(), 2);
    }
}

mod mysql_only {
    use posthouse::Message;
    use posthouse::store::Backend;

    use super::*;
    use crate::store::tables::DEADLINE;
    use crate::support::{MySql, TestDb};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_trigger_without_its_account_is_a_problem() {
        let db = &Fresh::<MySql>::new().await;
        let (_, database) = db.place.url.rsplit_once('/').unwrap();
        let account = format!("'{}'@'localhost'", database);
        let statement =
            db.texts("SELECT ACTION_STATEMENT FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA = DATABASE()").await;
        let statement = statement[0].clone().unwrap();
        db.run("DROP TRIGGER {enqueue}").await;
        db.run(&format!("CREATE USER {account}")).await;
        db.run(&format!("GRANT ALL ON {database}.* TO {account}")).await;
        db.run(&format!(
            "CREATE DEFINER = {account} TRIGGER posthouse_enqueue AFTER INSERT ON {{message}} FOR EACH ROW {statement}"
        ))
        .await;
        db.outbox.publish_alone(Message::to("works")).await.unwrap();
        assert_eq!(problems(db).await, [""; 0]);
        db.run(&format!("DROP USER {account}")).await;
        assert!(db.outbox.publish_alone(Message::to("fails")).await.unwrap_err().to_string().contains("definer"));
        one_problem(db, &["account", "posthouse_enqueue", "every publish fails", "definer"]).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lost_default_is_a_problem_and_want_of_privilege_is_none() {
        let db = &Fresh::<MySql>::new().await;
        let (_, database) = db.place.url.rsplit_once('/').unwrap();
        let name = database;
        db.run(&format!("CREATE USER '{name}'@'%' IDENTIFIED BY 'secret'")).await;
        db.run(&format!("GRANT SELECT, UPDATE, DELETE, ALTER, EXECUTE ON {database}.* TO '{name}'@'%'")).await;
        let pool =
            sqlx::MySqlPool::connect_lazy_with((*db.place.pool.connect_options()).clone().username(name).password("secret"));
        let limited = <MySql as TestDb>::Db::store(&pool, db.outbox.tables(), DEADLINE, None);
        db.run("ALTER TABLE {message} MODIFY created_at DATETIME(6) NOT NULL").await;
        assert_eq!(limited.upkeep().await.unwrap().problems, [""; 0]);
        one_problem(db, &["can't be published", "created_at"]).await;
        db.run(&format!("DROP USER '{name}'@'%'")).await;
    }
}
