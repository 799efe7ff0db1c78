//! The trace context of whoever publishes reaches the receiver.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use posthouse::transport::{Http, HttpSettings};
use posthouse::{Message, Outbox, Relay};

use super::published;
use crate::http::{Server, status};
use crate::relay::quick;
use crate::support::{TestDb, on_all_databases};

on_all_databases!(the_trace_context_reaches_the_receiver);

async fn the_trace_context_reaches_the_receiver<T: TestDb>() {
    let place = T::place().await;
    let calls = Arc::new(AtomicU32::new(0));
    let builder = Outbox::builder(place.pool.clone()).trace_context({
        let calls = calls.clone();
        move |headers| {
            let span = calls.fetch_add(1, Ordering::SeqCst);
            headers.insert("traceparent", format!("00-0af7651916cd43dd8448eb211c80319c-{span:016x}-01"));
            headers.insert("tracestate", "vendor=1");
        }
    });
    let builder = match &place.schema {
        Some(schema) => builder.schema(schema),
        None => builder,
    };
    let outbox = builder.build().unwrap();
    outbox.migrate().await.unwrap();

    let server = Server::new(status("204 No Content", "", "")).await;
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(Message::to(server.url("/")).key("k").payload("0").header("tenant", "acme")).await.unwrap();
    outbox.publish_many(&mut tx, [Message::to(server.url("/")).key("k").payload("1")]).await.unwrap();
    tx.commit().await.unwrap();
    let stored = published::<T>(&outbox).await;
    assert!(stored.iter().all(|m| m.headers.get("tracestate") == Some("vendor=1")), "{stored:?}");
    assert_eq!(stored[0].headers.get("tenant"), Some("acme"));

    let mut settings = HttpSettings::default();
    settings.allow = vec!["127.0.0.0/8".into()];
    let relay = Relay::builder(&outbox).settings(quick()).transport("http", Http::new(settings).unwrap()).start().await.unwrap();
    relay.drain_once().await;
    let seen = server.seen();
    assert_eq!(seen.len(), 2);
    for (n, request) in seen.iter().enumerate() {
        assert_eq!(request.body, n.to_string().as_bytes());
        let expected = format!("00-0af7651916cd43dd8448eb211c80319c-{n:016x}-01");
        assert_eq!(request.header("traceparent"), Some(&*expected));
        assert_eq!(request.header("tracestate"), Some("vendor=1"));
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2, "once per message, at its publishing");
    relay.shutdown(Duration::from_secs(5)).await;
}
