//! Drives a transport without a relay or a database.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::transport::{Delivery, Outcome, Token, Transport};
use crate::{Envelope, Route};

/// Sends one message through a transport, without a relay or a database, and waits for its outcome, for `timeout` at most.
pub async fn deliver(transport: &dyn Transport, envelope: Envelope, route: Route, timeout: Duration) -> Outcome {
    let mut answers = deliver_batch(transport, vec![(envelope, route)], timeout).await;
    // One delivery was sent, and deliver_batch returns an outcome for each.
    answers.remove(0).1
}

/// Sends messages in one batch and returns `(position in the batch, outcome)` in the order in which the answers came.
///
/// Like a relay, it gives up on what is unanswered after `timeout`: those come last, as [`Outcome::Retry`] with the error
/// `no answer by the deadline`.
pub async fn deliver_batch(transport: &dyn Transport, batch: Vec<(Envelope, Route)>, timeout: Duration) -> Vec<(usize, Outcome)> {
    let batch = batch.into_iter().map(|(envelope, route)| (envelope, route, false)).collect();
    deliver_pipelined(transport, batch, timeout).await
}

/// Like [`deliver_batch`], with what [`Delivery::follows`] says of each: true where an earlier message of its key is still
/// in flight, in this batch or from another call. For transports that [pipeline](Transport::pipelines).
pub async fn deliver_pipelined(
    transport: &dyn Transport,
    batch: Vec<(Envelope, Route, bool)>,
    timeout: Duration,
) -> Vec<(usize, Outcome)> {
    let deadline = Instant::now() + timeout;
    let (sender, mut answers) = mpsc::unbounded_channel();
    let mut waiting: Vec<usize> = (0..batch.len()).collect();
    let batch = (0..)
        .zip(batch)
        .map(|(id, (envelope, route, follows))| {
            let token = Token { id, try_number: 1, answers: Some(sender.clone()), span: None };
            Delivery::new(envelope, Arc::new(route), deadline, follows, token)
        })
        .collect();
    drop(sender);

    let mut out = Vec::with_capacity(waiting.len());
    let collect = async {
        // Ends by itself: each token answers, at the latest when it is dropped.
        while let Some(answer) = answers.recv().await {
            let position = answer.id as usize;
            waiting.retain(|&w| w != position);
            out.push((position, answer.outcome));
        }
    };
    let both = async { tokio::join!(transport.send(batch), collect) };
    // What timed out is in `waiting`.
    let _ = tokio::time::timeout_at(deadline.into(), both).await;
    let late = Outcome::Retry { after: None, error: "no answer by the deadline".into() };
    out.extend(waiting.into_iter().map(|position| (position, late.clone())));
    out
}
