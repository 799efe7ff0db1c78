//! Failures: attempts, back-off, FAILED, and what people do then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::store::{Action, MessageRow, Store};
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Relay};

use super::{Log, Recorder, quick, quick_route};
use crate::support::{SOON, TestDb, messages, on_all_databases, pending, wait_for};

on_all_databases!(
    failing_message_ends_failed_and_requeue_brings_it_back,
    rejected_message_fails_at_once,
    own_limit_of_attempts_counts,
    unknown_destination_fails_with_advice,
    hanging_handler_times_out_and_shutdown_completes,
    panicking_handler_touches_only_its_message,
    undecodable_row_fails_alone,
    edited_message_goes_to_its_new_destination,
    error_text_of_any_kind_is_recorded,
);

async fn row(store: &dyn Store) -> MessageRow {
    messages(store).await.remove(0)
}

async fn wait_status(store: &dyn Store, status: &str) -> MessageRow {
    wait_for(status, SOON, async || row(store).await.status == status).await;
    row(store).await
}

async fn failing_message_ends_failed_and_requeue_brings_it_back<T: TestDb>() {
    let outbox = T::fresh().await;
    let (log, healthy) = (Log::default(), Arc::new(AtomicBool::new(false)));
    let (l, h) = (log.clone(), healthy.clone());
    let flaky = from_fn(move |d: Delivery| {
        l.add(&d);
        let healthy = h.load(Ordering::SeqCst);
        async move { if healthy { d.delivered() } else { d.retry("kaput", None) } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", flaky).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    let failed = wait_status(&**relay.store(), "FAILED").await;
    assert_eq!(failed.attempts, 3);
    assert_eq!(failed.last_error.as_deref(), Some("kaput"));
    assert_eq!(failed.next_attempt_ms, None);
    let seen = log.seen();
    assert_eq!(seen.iter().map(|s| s.attempt).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(seen.iter().all(|s| s.message_id == seen[0].message_id), "2.13: the same id on every resend");
    let detail = relay.store().show(failed.id).await.unwrap().unwrap();
    assert_eq!(detail.history.len(), 3);
    assert_eq!(detail.history[0].outcome, "retry");

    healthy.store(true, Ordering::SeqCst);
    relay.drain_once().await;
    assert_eq!(log.len(), 3, "FAILED stays for a person to see");
    assert_eq!(relay.store().act(&[failed.id], &Action::Requeue, "ann").await.unwrap(), [failed.id]);
    wait_status(&**relay.store(), "SENT").await;
    assert_eq!(pending::<T>(&outbox).await, 0);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn rejected_message_fails_at_once<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport(
            "test",
            from_fn(move |d: Delivery| {
                l.add(&d);
                async move { d.rejected("too large") }
            }),
        )
        .start()
        .await
        .unwrap();
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    let failed = wait_status(&**relay.store(), "FAILED").await;
    assert_eq!((failed.attempts, log.len()), (1, 1));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn own_limit_of_attempts_counts<T: TestDb>() {
    let outbox = T::fresh().await;
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport("test", from_fn(|d: Delivery| async move { d.retry("no", None) }))
        .start()
        .await
        .unwrap();
    outbox.publish_alone(Message::to("test:a").max_attempts(2)).await.unwrap();
    assert_eq!(wait_status(&**relay.store(), "FAILED").await.attempts, 2);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// L12.
async fn unknown_destination_fails_with_advice<T: TestDb>() {
    let outbox = T::fresh().await;
    let relay = Relay::builder(&outbox).settings(quick()).start().await.unwrap();
    outbox.publish_alone(Message::to("renamed")).await.unwrap();
    let failed = wait_status(&**relay.store(), "FAILED").await;
    assert!(failed.last_error.as_deref().unwrap_or_default().contains("renamed"), "{:?}", failed.last_error);
    relay.shutdown(Duration::from_secs(5)).await;
    // The rename is undone; requeue works.
    let log = Log::default();
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport("test", Recorder(log.clone()))
        .route("renamed", quick_route("test:a"))
        .start()
        .await
        .unwrap();
    relay.store().act(&[failed.id], &Action::Requeue, "ann").await.unwrap();
    log.wait_len(1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// P5.
async fn hanging_handler_times_out_and_shutdown_completes<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    // This transport never answers and never ends: only the relay's own deadline is left.
    let hang = from_fn(move |d: Delivery| {
        l.add(&d);
        async move {
            if d.message().payload == b"hang" {
                std::future::pending::<()>().await;
            }
            d.delivered();
        }
    });
    let mut settings = quick();
    settings.send_timeout = Duration::from_millis(300);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", hang).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("k").payload("hang").max_attempts(2)).await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("other").payload("fine")).await.unwrap();
    wait_for("the other key", SOON, async || log.count("fine") == 1).await;
    let hung = wait_for("FAILED", SOON, async || messages(&**relay.store()).await.iter().any(|m| m.status == "FAILED"));
    hung.await;
    assert_eq!(log.count("hang"), 2);
    outbox.publish_alone(Message::to("test:a").payload("hang")).await.unwrap();
    wait_for("in flight", SOON, async || log.count("hang") == 3).await;
    tokio::time::timeout(SOON, relay.shutdown(Duration::from_secs(10))).await.expect("shutdown completes");
}

async fn panicking_handler_touches_only_its_message<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .local("work", move |n: i32| {
            assert!(n != 13, "unlucky");
            let log = l.clone();
            async move {
                log.0.lock().unwrap().push(super::Seen {
                    id: i64::from(n),
                    message_id: n.to_string(),
                    key: None,
                    payload: vec![],
                    destination: String::new(),
                    attempt: 1,
                });
                Ok::<_, std::io::Error>(())
            }
        })
        .start()
        .await
        .unwrap();
    for n in [1, 13, 2] {
        outbox.publish_alone(Message::to("local:work").json(&n)).await.unwrap();
    }
    wait_for("FAILED", SOON, async || messages(&**relay.store()).await.iter().any(|m| m.status == "FAILED")).await;
    relay.drain_once().await;
    assert_eq!(log.distinct(), 2);
    assert_eq!(relay.stats().restarts, 0, "a handler's panic stops no loop");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// P2, L15.
async fn undecodable_row_fails_alone<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let table = outbox.tables().name("message");
    T::execute(outbox.pool(), format!("INSERT INTO {table} (destination, payload, headers) VALUES ('test:a', 'bad', '[1]')"))
        .await;
    outbox.publish_alone(Message::to("test:a").payload("good")).await.unwrap();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    log.wait_len(1).await;
    wait_for("FAILED", SOON, async || messages(&**relay.store()).await.iter().any(|m| m.status == "FAILED")).await;
    assert_eq!(log.payloads(), ["good"]);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn edited_message_goes_to_its_new_destination<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    outbox.publish_alone(Message::to("nowhere").key("k").payload("x")).await.unwrap();
    let failed = wait_status(&**relay.store(), "FAILED").await;
    let edit = Action::Edit { destination: "test:b".into() };
    assert_eq!(relay.store().act(&[failed.id], &edit, "ann").await.unwrap(), [failed.id]);
    log.wait_len(1).await;
    assert_eq!(log.seen()[0].destination, "test:b");
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// D7, D8: recording an error never fails.
async fn error_text_of_any_kind_is_recorded<T: TestDb>() {
    let outbox = T::fresh().await;
    let text = format!("a\0b {} {}", "🐎".repeat(3_000), "\u{202e}");
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport(
            "test",
            from_fn(move |d: Delivery| {
                let text = text.clone();
                async move { d.rejected(text) }
            }),
        )
        .start()
        .await
        .unwrap();
    outbox.publish_alone(Message::to("test:a")).await.unwrap();
    let failed = wait_status(&**relay.store(), "FAILED").await;
    let error = failed.last_error.unwrap();
    assert!(error.starts_with("a\u{fffd}b 🐎") && error.len() <= 2_000, "{}", error.len());
    relay.shutdown(Duration::from_secs(5)).await;
}
