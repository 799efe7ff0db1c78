//! A stream of its own, in files, with one subject.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Config, StorageType};
use async_nats::jetstream::{self, Context};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use posthouse::transport;

use super::{CONTENT_TYPE, Load, Receiver};
use crate::database::{fresh_name, must, url};
use crate::meter::Spent;

pub(super) const VARIABLE: &str = "POSTHOUSE_TEST_NATS_URL";

/// The messages of a stream that an interrupted run left go away by themselves.
const LEFT_BEHIND: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(crate) struct Nats {
    /// Of the stream and of its subject.
    name: String,
    context: Context,
}

async fn connect() -> Context {
    jetstream::new(must("NATS", async_nats::connect(url(VARIABLE)).await))
}

impl Nats {
    fn message(load: &Load, n: usize) -> PublishMessage {
        let mut headers = HeaderMap::new();
        headers.insert("Content-Type", CONTENT_TYPE);
        headers.insert(NATS_MESSAGE_ID, load.id(n));
        headers.insert("posthouse-attempt", "1");
        if let Some(key) = load.key(n) {
            headers.insert("posthouse-key", key);
        }
        PublishMessage::build().headers(headers).payload(load.payload.clone().into())
    }
}

impl Receiver for Nats {
    const NAME: &'static str = "nats";
    const SCHEME: &'static str = "nats";
    type Transport = transport::Nats;

    async fn prepare() -> Self {
        let (name, context) = (fresh_name(), connect().await);
        let config = Config {
            name: name.clone(),
            subjects: vec![name.clone()],
            storage: StorageType::File,
            max_age: LEFT_BEHIND,
            ..Default::default()
        };
        must("stream", context.create_stream(config).await);
        Self { name, context }
    }

    fn to(&self) -> String {
        format!("nats:{}", self.name)
    }

    fn transport(&self) -> Self::Transport {
        must("transport", transport::Nats::new(&*url(VARIABLE)))
    }

    async fn publish(&self, load: &Load) -> Spent {
        let context = connect().await;
        let publish = |n: usize| context.send_publish(self.name.clone(), Self::message(load, n));
        must("acknowledgement", must("publish", publish(load.n).await).await);

        let meter = self.meter();
        let mut acks = FuturesUnordered::new();
        for n in 0..load.n {
            if acks.len() >= load.in_flight
                && let Some(ack) = acks.next().await
            {
                must("acknowledgement", ack);
            }
            acks.push(must("publish", publish(n).await).into_future());
        }
        while let Some(ack) = acks.next().await {
            must("acknowledgement", ack);
        }
        meter.stop()
    }

    async fn arrived(&self) -> usize {
        let stream = must("stream", self.context.get_stream(&self.name).await);
        stream.cached_info().state.messages as usize
    }

    async fn clear(&mut self) {
        must("purge", must("stream", self.context.get_stream(&self.name).await).purge().await);
    }

    async fn remove(self) {
        must("delete", self.context.delete_stream(&self.name).await);
    }
}
