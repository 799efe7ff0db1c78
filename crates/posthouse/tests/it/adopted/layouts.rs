//! The layouts that are known, as their applications have them.

use std::time::Duration;

use posthouse::{Adopted, AdoptedPreset, AdoptedRelay, RunEnd};

use super::{account, count, once, own, relay, scanned};
use crate::relay::{Log, Recorder, quick};
use crate::support::{MySql, TestDb};

fn quick_lease(preset: AdoptedPreset) -> Adopted {
    let mut it = Adopted::preset(preset);
    it.lease = Some(Duration::from_secs(3));
    it
}

pub(super) const PRODUCER_MESSAGE: &str = "CREATE TABLE producer_message (id BIGINT NOT NULL PRIMARY KEY, message_id VARCHAR(64) NOT NULL, \
    exchange VARCHAR(100), routing_key VARCHAR(100), content TEXT, status VARCHAR(20) NOT NULL, retry_count INT NOT NULL DEFAULT 0, \
    max_retry_count INT NOT NULL DEFAULT 5, next_retry_time DATETIME, error_msg TEXT, create_time DATETIME NOT NULL, \
    update_time DATETIME NOT NULL, version INT NOT NULL DEFAULT 0, KEY idx_status (status, next_retry_time))";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn producer_message() {
    let outbox = MySql::fresh().await;
    let rows = "INSERT INTO producer_message (id, message_id, exchange, routing_key, content, status, retry_count, next_retry_time, \
            create_time, update_time, version) VALUES \
        (9000000000000000001, 'm1', 'shop', 'a.b', '{\"n\":1}', 'PENDING', 0, NULL, NOW(), NOW(), 3), \
        (9000000000000000002, 'm2', 'shop', 'a.c', '{\"n\":2}', 'PENDING', 2, NOW() - INTERVAL 1 SECOND, NOW(), NOW(), 4), \
        (9000000000000000003, 'm3', 'shop', 'a.b', '{}', 'PENDING', 1, NOW() + INTERVAL 1 HOUR, NOW(), NOW(), 0), \
        (9000000000000000004, 'm4', 'shop', 'a.b', '{}', 'SENDING', 0, NULL, NOW(), NOW(), 0), \
        (9000000000000000005, 'm5', 'shop', 'a.b', '{\"n\":5}', 'SENDING', 0, NULL, NOW() - INTERVAL 1 HOUR, NOW() - INTERVAL 6 MINUTE, 7), \
        (9000000000000000006, 'm6', 'shop', 'a.b', '{}', 'SENT', 0, NULL, NOW(), NOW(), 1), \
        (9000000000000000007, 'm7', 'shop', 'a.b', '{}', 'FAILED', 5, NULL, NOW(), NOW(), 1), \
        (9000000000000000008, 'm8', NULL, 'a.b', '{}', 'PENDING', 0, NULL, NOW(), NOW(), 0)";
    MySql::execute(outbox.pool(), format!("{PRODUCER_MESSAGE}; {rows}")).await;
    // No more than this is needed, and nothing else is there to change a table with.
    let pool =
        account(&outbox, &[("SELECT, UPDATE", "producer_message"), ("SELECT, INSERT, UPDATE, DELETE", "posthouse_adopted")])
            .await;
    let limited = posthouse::Outbox::new(pool);
    let log = Log::default();
    let relay = AdoptedRelay::builder(&limited, "messages", quick_lease(AdoptedPreset::ProducerMessage))
        .settings(quick())
        .transport("amqp", Recorder(log.clone()))
        .continuous(false)
        .start()
        .await
        .expect("start");
    let outcome = once(&relay).await;
    assert_eq!(outcome.end, RunEnd::Done);
    assert_eq!((outcome.counts.messages, outcome.counts.delivered, outcome.counts.failed), (4, 3, 1), "{outcome:?}");
    let mut seen = log.seen();
    seen.sort_by_key(|s| s.id);
    let seen: Vec<_> = seen.iter().map(|s| (s.message_id.as_str(), s.destination.as_str(), s.attempt)).collect();
    assert_eq!(seen, [("m1", "amqp:shop/a.b", 1), ("m2", "amqp:shop/a.c", 3), ("m5", "amqp:shop/a.b", 1)]);
    assert_eq!(log.count("{\"n\":2}"), 1);
    // Claimed and written back: two writes, each raising the version.
    for (id, status, version) in
        [(1, "SENT", 5), (2, "SENT", 6), (3, "PENDING", 0), (4, "SENDING", 0), (5, "SENT", 9), (7, "FAILED", 1)]
    {
        let condition = format!("id = 900000000000000000{id} AND status = '{status}' AND version = {version}");
        assert_eq!(count::<MySql>(&outbox, "producer_message", &condition).await, 1, "{condition}");
    }
    let failed = "id = 9000000000000000008 AND status = 'FAILED' AND retry_count = 1 AND error_msg LIKE '%exchange is NULL%'";
    assert_eq!(count::<MySql>(&outbox, "producer_message", failed).await, 1);
    assert_eq!(own::<MySql>(&outbox, "owner IS NOT NULL").await, 0);
}

const LOCAL_TASK_MESSAGE: &str = "CREATE TABLE local_task_message (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, \
    task_id VARCHAR(64) NOT NULL UNIQUE, task_name VARCHAR(64), notify_type VARCHAR(16) NOT NULL, notify_config TEXT NOT NULL, \
    status TINYINT NOT NULL DEFAULT 0, parameter_json JSON, house_number INT NOT NULL DEFAULT 1, create_time DATETIME NOT NULL, \
    update_time DATETIME NOT NULL, KEY idx_status (status))";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_task_message() {
    let outbox = MySql::fresh().await;
    let mq = r#"{"mq":{"topic":"order.paid","exchange":"shop"}}"#;
    let http = r#"{"http":{"url":"http://127.0.0.1:9/hook","method":"put","contentType":"application/json","authorization":"Bearer x"}}"#;
    let row = |task: &str, kind: &str, config: &str, status: i32, house: i32| {
        format!("('{task}', 'notify', '{kind}', '{config}', {status}, '{{\"t\": \"{task}\"}}', {house}, NOW(), NOW())")
    };
    let rows = [
        row("t1", "rabbit_mq", mq, 0, 1),
        row("t2", "http", http, 3, -8),
        row("t3", "http", "{}", 0, 9),
        row("t4", "http", "no json", 0, 5),
        row("t5", "rabbit_mq", mq, 1, 1),
        row("t6", "rabbit_mq", mq, 2, 1),
    ];
    let columns =
        "task_id, task_name, notify_type, notify_config, status, parameter_json, house_number, create_time, update_time";
    let insert = format!("INSERT INTO local_task_message ({columns}) VALUES {}", rows.join(", "));
    MySql::execute(outbox.pool(), format!("{LOCAL_TASK_MESSAGE}; {insert}")).await;
    let methods = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let answers = {
        let methods = methods.clone();
        super::Answers(move |d: posthouse::transport::Delivery| {
            let (m, http) = (d.message(), &d.route().http);
            methods.lock().unwrap().push(format!(
                "{} {} {} {} {} {}",
                m.message_id,
                m.kind,
                m.destination,
                d.address(),
                http.method,
                http.authorization.as_deref().unwrap_or("-")
            ));
            async move { d.delivered() }
        })
    };
    let relay =
        relay::<MySql>(&outbox, &quick_lease(AdoptedPreset::LocalTaskMessage), answers).continuous(false).start().await.unwrap();
    let outcome = once(&relay).await;
    assert_eq!((outcome.counts.delivered, outcome.counts.failed), (2, 2), "{outcome:?}");
    let mut seen = methods.lock().unwrap().clone();
    seen.sort();
    let expected = [
        "t1 notify amqp:shop/order.paid shop/order.paid POST -",
        "t2 notify http://127.0.0.1:9/hook http://127.0.0.1:9/hook PUT Bearer x",
    ];
    assert_eq!(seen, expected);
    for (task, status) in [("t1", 2), ("t2", 2), ("t3", 3), ("t4", 3), ("t5", 1), ("t6", 2)] {
        let condition = format!("task_id = '{task}' AND status = {status}");
        assert_eq!(count::<MySql>(&outbox, "local_task_message", &condition).await, 1, "{condition}");
    }
    // A state that means "send again" is no reason to try for ever what was given up.
    assert_eq!(once(&relay).await.counts.messages, 0);
    assert_eq!(own::<MySql>(&outbox, "next_attempt_at > '9999-01-01' AND last_error LIKE 'notify:%'").await, 2);
    // Its owner sets it back: it begins anew.
    MySql::execute(
        outbox.pool(),
        format!(
            "UPDATE local_task_message SET status = 0, notify_type = 'rabbit_mq', notify_config = '{mq}' WHERE task_id = 't3'"
        ),
    )
    .await;
    assert_eq!(once(&relay).await.counts.delivered, 1);
    assert_eq!(count::<MySql>(&outbox, "local_task_message", "task_id = 't3' AND status = 2").await, 1);
    relay.shutdown(Duration::from_secs(5)).await;
}

pub(super) fn user_strategy_export(table: &str) -> String {
    format!(
        "CREATE TABLE {table} (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, u_id VARCHAR(32), activity_id BIGINT, order_id BIGINT, \
         strategy_id BIGINT, strategy_mode INT, grant_type INT, grant_date DATETIME, grant_state INT, award_id VARCHAR(64), award_type INT, \
         award_name VARCHAR(64), award_content VARCHAR(128), uuid VARCHAR(128) NOT NULL UNIQUE, mq_state TINYINT, create_time DATETIME, \
         update_time DATETIME, KEY idx_mq_state (mq_state, uuid)); "
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mq_state() {
    let outbox = MySql::fresh().await;
    let table = "user_strategy_export_001";
    let row = |uuid: &str, state: &str, age: i32| {
        format!("('u1', 100001, 42, 'prize \"1\"', '{uuid}', {state}, NOW() - INTERVAL {age} SECOND, NOW() - INTERVAL 1 DAY)")
    };
    let rows = [
        row("old-null", "NULL", 120),
        row("old-zero", "0", 120),
        row("young-null", "NULL", 1),
        row("young-zero", "0", 1),
        row("young-failed", "2", 1),
        row("sent", "1", 120),
    ];
    let columns = "u_id, activity_id, order_id, award_name, uuid, mq_state, create_time, update_time";
    let insert = format!("INSERT INTO {table} ({columns}) VALUES {}", rows.join(", "));
    MySql::execute(outbox.pool(), user_strategy_export(table) + &insert).await;
    let (log, outcome) = scanned::<MySql>(&outbox, &quick_lease(AdoptedPreset::MqState)).await;
    assert_eq!((outcome.counts.messages, outcome.counts.delivered), (3, 3), "{outcome:?}");
    let mut seen = log.seen();
    seen.sort_by(|a, b| a.message_id.cmp(&b.message_id));
    let ids: Vec<_> = seen.iter().map(|s| (s.message_id.as_str(), s.key.as_deref(), s.destination.as_str())).collect();
    let to = "kafka:lottery_invoice";
    let expected = ["old-null", "old-zero", "young-failed"].map(|id| (id, Some(id), to));
    assert_eq!(ids, expected);
    let payload = String::from_utf8(seen[0].payload.clone()).unwrap();
    let expected = r#"{"u_id":"u1","activity_id":100001,"order_id":42,"strategy_id":null,"award_id":null,"award_type":null,"award_name":"prize \"1\"","award_content":null,"uuid":"old-null"}"#;
    assert_eq!(payload, expected);
    assert_eq!(count::<MySql>(&outbox, table, "mq_state = 1 AND update_time > NOW() - INTERVAL 1 HOUR").await, 3);
    assert_eq!(count::<MySql>(&outbox, table, "uuid LIKE 'young%' AND (mq_state IS NULL OR mq_state = 0)").await, 2);
    assert_eq!(own::<MySql>(&outbox, "1 = 1").await, 0);
}
