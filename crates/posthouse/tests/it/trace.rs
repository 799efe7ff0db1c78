//! One trace, from the order to its effect in another service.

use std::collections::HashMap;

use lapin::options::QueueDeclareOptions;
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::{SpanId, TracerProvider as _};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use posthouse::consumer::RabbitMqConsumer;
use posthouse::inbox::{HandlerError, Inbox, Incoming};
use posthouse::transport::RabbitMq;
use posthouse::{Headers, Message, Outbox, Relay, Tx};
use tracing::{Instrument as _, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::inbox::quick;
use crate::support::broker::{Kind, test_url};
use crate::support::{SOON, Sqlite, TestDb, bounded, wait_for};

/// Headers as OpenTelemetry reads them.
struct Carrier<'a>(&'a Headers);

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)
    }
    fn keys(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name).collect()
    }
}

/// And as it writes them.
struct CarrierMut<'a>(&'a mut Headers);

impl Injector for CarrierMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        if !value.is_empty() {
            self.0.insert(key, value);
        }
    }
}

fn inject(span: &Span, headers: &mut Headers) {
    TraceContextPropagator::new().inject_context(&span.context(), &mut CarrierMut(headers));
}

fn below(span: Span, headers: &Headers) -> Span {
    span.set_parent(TraceContextPropagator::new().extract(&Carrier(headers))).unwrap();
    span
}

async fn deduct(tx: &mut Tx<sqlx::Sqlite>, order: i64) -> Result<(), HandlerError> {
    tx.publish(Message::to("deducted").key(order).json(&order)).await?;
    Ok(())
}

/// On one thread, so that the subscriber is this test's alone.
#[tokio::test]
async fn one_trace_shows_order_relay_broker_and_effect() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder().with_simple_exporter(exporter.clone()).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
    bounded(traced(&exporter)).await;
}

async fn traced(exporter: &InMemorySpanExporter) {
    let queue = format!("trace-{:016x}", fastrand::u64(..));
    let connection = lapin::Connection::connect(&test_url(Kind::RabbitMq), Default::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let declare = QueueDeclareOptions { auto_delete: true, ..Default::default() };
    channel.queue_declare(queue.as_str().into(), declare, Default::default()).await.unwrap();

    // The order service.
    let orders = Sqlite::place().await;
    let outbox = Outbox::builder(orders.pool.clone()).trace_context(|headers| inject(&Span::current(), headers)).build().unwrap();
    outbox.migrate().await.unwrap();
    let relay = Relay::builder(&outbox)
        .transport("amqp", RabbitMq::new(&*test_url(Kind::RabbitMq)).unwrap())
        .trace_context(|headers| {
            let span = below(info_span!("send"), headers);
            inject(&span, headers);
            span
        })
        .start()
        .await
        .unwrap();
    // The inventory.
    let stock = Sqlite::place().await;
    let inbox = Inbox::of(&stock.outbox(), "inventory", quick()).unwrap();
    inbox.outbox().migrate().await.unwrap();
    let inbox = inbox.on_fn("deduct", deduct).trace_context(|headers| below(info_span!("deduct"), headers));
    let consumer = RabbitMqConsumer::new(&*test_url(Kind::RabbitMq), &*queue).unwrap().start(&inbox).await.unwrap();

    let order = info_span!("order");
    async {
        let mut tx = outbox.begin().await.unwrap();
        tx.publish(Message::to(format!("amqp:/{queue}")).typed("deduct").key(7).json(&7)).await.unwrap();
        tx.commit().await.unwrap();
    }
    .instrument(order)
    .await;
    wait_for("the effect", SOON, async || consumer.status().processed == 1).await;
    relay.drain_once().await;
    relay.shutdown(SOON).await;
    consumer.shutdown(SOON).await;

    let spans: HashMap<String, SpanData> =
        exporter.get_finished_spans().unwrap().into_iter().map(|s| (s.name.to_string(), s)).collect();
    let (order, send, deduct) = (&spans["order"], &spans["send"], &spans["deduct"]);
    assert_eq!(order.parent_span_id, SpanId::INVALID);
    assert_eq!(send.parent_span_id, order.span_context.span_id());
    assert_eq!(deduct.parent_span_id, send.span_context.span_id());
    let trace = order.span_context.trace_id();
    assert_eq!((send.span_context.trace_id(), deduct.span_context.trace_id()), (trace, trace));
    // What the handler emitted goes on in the same trace, without a hook of its own.
    let emitted = crate::publish_api::published::<Sqlite>(inbox.outbox()).await;
    assert!(emitted[0].headers.get("traceparent").is_some_and(|t| t.contains(&trace.to_string())), "{emitted:?}");
}

async fn plain(tx: &mut Tx<sqlx::Sqlite>, _: Incoming) -> Result<(), HandlerError> {
    tx.publish(Message::to("deducted")).await?;
    tx.publish(Message::to("deducted").header("traceparent", "own")).await?;
    Ok(())
}

#[tokio::test]
async fn what_a_handler_emits_continues_the_trace_of_its_message() {
    let place = Sqlite::place().await;
    let inbox = Inbox::of(&place.outbox(), "inventory", quick()).unwrap();
    inbox.outbox().migrate().await.unwrap();
    for (id, parent) in [("1", Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")), ("2", None)] {
        let mut incoming = Incoming::new(id, "{}");
        if let Some(parent) = parent {
            incoming = incoming.header("traceparent", parent).header("tracestate", "a=b");
        }
        let copy = incoming.clone();
        let handled = inbox.process(&incoming, async |tx: &mut Tx<sqlx::Sqlite>| plain(tx, copy.clone()).await).await.unwrap();
        assert_eq!(handled, posthouse::inbox::Handled::Processed);
        let emitted = crate::publish_api::published::<Sqlite>(inbox.outbox()).await;
        let [.., first, second] = &emitted[..] else { panic!("{emitted:?}") };
        assert_eq!((first.headers.get("traceparent"), first.headers.get("tracestate")), (parent, parent.map(|_| "a=b")));
        assert_eq!(second.headers.get("traceparent"), Some("own"));
    }
}
