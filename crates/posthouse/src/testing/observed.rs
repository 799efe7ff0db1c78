//! Watches the answers of a transport.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::transport::{Delivery, Outcome, Token, Transport};
use crate::{MessageId, Route};

/// A transport that calls `seen` with each message's outcome when `transport` answers, then passes the answer on. For
/// measuring and counting; everything else is as with `transport` alone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// use posthouse::testing::{Script, deliver, observed};
/// use posthouse::transport::Outcome;
/// use posthouse::{Envelope, Route};
///
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let notes = seen.clone();
/// let script = Script::new().then(Outcome::HeldBack);
/// let transport = observed(script, move |id, outcome| notes.lock().unwrap().push((id.clone(), outcome.clone())));
///
/// let message = Envelope::for_test("orders", "7");
/// let id = message.message_id.clone();
/// let outcome = deliver(&transport, message, Route::to("amqp:orders"), Duration::from_secs(1)).await;
/// assert_eq!(outcome, Outcome::HeldBack);
/// assert_eq!(*seen.lock().unwrap(), [(id, Outcome::HeldBack)]);
/// # }
/// ```
pub fn observed<T, F>(transport: T, seen: F) -> impl Transport
where
    T: Transport,
    F: Fn(&MessageId, &Outcome) + Send + Sync + 'static,
{
    Observed { transport, seen: Arc::new(seen), batches: Mutex::default() }
}

struct Observed<T, F> {
    transport: T,
    seen: Arc<F>,
    /// One for each batch that is not answered completely.
    batches: Mutex<JoinSet<()>>,
}

impl<T: Transport, F> fmt::Debug for Observed<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Observed").field(&self.transport).finish()
    }
}

impl<T: Transport, F> Observed<T, F> {
    fn batches(&self) -> std::sync::MutexGuard<'_, JoinSet<()>> {
        // A set of tasks is whole whenever it is seen.
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T, F> Transport for Observed<T, F>
where
    T: Transport,
    F: Fn(&MessageId, &Outcome) + Send + Sync + 'static,
{
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        let (sender, mut answers) = mpsc::unbounded_channel();
        let mut waiting = Vec::with_capacity(batch.len());
        let mut watched = Vec::with_capacity(batch.len());
        for (id, Delivery { envelope, route, deadline, follows, token }) in (0..).zip(batch) {
            waiting.push((envelope.message_id.clone(), token));
            let token = Token { id, try_number: 1, answers: Some(sender.clone()), span: None };
            watched.push(Delivery::new(envelope, route, deadline, follows, token));
        }
        drop(sender);
        let seen = self.seen.clone();
        let mut batches = self.batches();
        while batches.try_join_next().is_some() {}
        batches.spawn(async move {
            // Ends by itself: each token answers, at the latest when it is dropped.
            while let Some(answer) = answers.recv().await {
                let (message, token) = &mut waiting[answer.id as usize];
                seen(message, &answer.outcome);
                token.answer(answer.outcome);
            }
        });
        drop(batches);
        self.transport.send(watched)
    }

    fn check(&self, route: &Route) -> Result<(), String> {
        self.transport.check(route)
    }

    fn concurrency(&self) -> u32 {
        self.transport.concurrency()
    }

    fn pipelines(&self) -> bool {
        self.transport.pipelines()
    }

    fn blocked(&self) -> Option<String> {
        self.transport.blocked()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.transport.close().await;
            let mut batches = std::mem::take(&mut *self.batches());
            while batches.join_next().await.is_some() {}
        })
    }
}
