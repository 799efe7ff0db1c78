//! One message, once: its id, the effect, and what is written when it fails.
//!
//! There are two kinds of run. A *first run* inserts the id, calls the handler and commits, all in one transaction, and costs
//! nothing more; a process that dies in it leaves nothing. A *claimed run* was written down before it begins: that of a
//! redelivered message, and of one that is known and due. The handler's transaction ends with a change of that row under the
//! version of the claim, so whoever lost the claim meanwhile rolls back.

use std::time::{Duration, Instant, SystemTime};

use tracing::{Instrument as _, Span};

use super::handler::Verdict;
use super::incoming::{Admitted, Stored};
use super::{Handled, HandlerError, Inbox, Incoming};
use crate::error::storable;
use crate::outbox::Commit as _;
use crate::settings::MissingId;
use crate::store::{Backend, InboxStatus, NewRow, RowKey, RunFailed, Standing, on, timed};
use crate::{Error, ErrorKind, Tx};

/// Error text kept per message, in bytes; as much as the outbox keeps per attempt.
pub(super) const ERROR_TEXT: usize = 2_000;

/// The longest wait a handler may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(366 * 86_400);

/// How often a transaction that another one was in the way of is run again at once. Each try but the last few of a crowd
/// settles somebody's, so it has to be more than a handful.
const TRIES: u32 = 20;

/// The longest pause between such tries.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// What is run: the caller's closure, or a registered handler.
pub(super) trait Run<DB: Backend> {
    /// The message.
    fn incoming(&self) -> &Incoming;
    async fn run(&mut self, tx: &mut Tx<DB>) -> Result<(), HandlerError>;
}

/// The caller's closure, cloned for each call: one that is called by reference (`AsyncFnMut`) makes futures that borrow from it,
/// and the compiler can't see that such a one may be sent to another thread.
pub(super) struct Inline<'a, F>(pub(super) &'a Incoming, pub(super) F);

impl<DB, E, F> Run<DB> for Inline<'_, F>
where
    DB: Backend,
    E: Into<HandlerError>,
    F: AsyncFnOnce(&mut Tx<DB>) -> Result<(), E> + Clone,
{
    fn incoming(&self) -> &Incoming {
        self.0
    }

    async fn run(&mut self, tx: &mut Tx<DB>) -> Result<(), HandlerError> {
        self.1.clone()(tx).await.map_err(Into::into)
    }
}

/// Counts the tries of a transaction that another one was in the way of.
#[derive(Debug, Default)]
pub(super) struct Tries(u32);

impl Tries {
    /// Waits a moment; false when there were enough.
    pub(super) async fn again(&mut self) -> bool {
        self.0 += 1;
        if self.0 >= TRIES {
            return false;
        }
        let longest = (Duration::from_millis(2) * 2u32.saturating_pow(self.0)).min(LONGEST_PAUSE);
        tokio::time::sleep(longest.mul_f64(fastrand::f64())).await;
        true
    }
}

/// `step!(inbox, "what", |tx| { … })` runs the body in a transaction of its own, within the deadline, again where another
/// transaction was in the way. It has no handler in it.
macro_rules! step {
    ($inbox:expr, $what:literal, |$tx:ident| $body:block) => {{
        let mut tries = crate::inbox::process::Tries::default();
        loop {
            let once = crate::store::timed($inbox.deadline(), $what, async {
                let mut begun = $inbox.outbox.begin().await?;
                let $tx = &mut begun;
                let result: Result<_, crate::Error> = async { $body }.await;
                let ended = match result {
                    Ok(_) => crate::outbox::Commit::end(begun).await,
                    Err(_) => {
                        // The error that counts is the one before.
                        let _ = begun.rollback().await;
                        Ok(())
                    }
                };
                result.and_then(|value| ended.map(|()| value))
            });
            match once.await {
                Err(e) if e.kind() == crate::ErrorKind::Conflict && tries.again().await => {}
                other => break other,
            }
        }
    }};
}
pub(super) use step;

/// A message on its way through its inbox.
#[derive(Debug)]
pub(super) struct Arrival<'a> {
    pub(super) id: &'a str,
    pub(super) stored: Stored<'a>,
}

/// A run that is written down.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim {
    pub(super) version: i32,
    pub(super) attempts: i32,
    /// With this run.
    pub(super) claims: i32,
}

/// How a run of the handler's transaction ended.
enum Ended {
    /// Committed.
    Done,
    /// The message is known, so it wasn't run; or it was, and another process had taken it over, so it was rolled back.
    Known(Option<Standing>),
    /// Rolled back: another transaction was in the way.
    InTheWay(InTheWay),
    /// Rolled back: the handler failed.
    Failed(HandlerError),
    /// The connection was lost under the handler: not the message's fault.
    Lost(Error),
}

enum InTheWay {
    OfHandler(HandlerError),
    OfInbox(Error),
}

impl<DB: Backend> Inbox<DB> {
    pub(super) async fn run<R: Run<DB>>(&self, incoming: &Incoming, run: &mut R) -> Result<Handled, Error> {
        let result = self.run_or_answer(incoming, run).await;
        match &result {
            Ok(Handled::Duplicate) => self.count(|stats| stats.duplicates += 1),
            // A message that is refused was none of the database's doing.
            Err(e) if e.kind() != ErrorKind::Invalid => self.count(|stats| stats.errors += 1),
            // What came of a run is counted where it is written down.
            _ => {}
        }
        result
    }

    async fn run_or_answer<R: Run<DB>>(&self, incoming: &Incoming, run: &mut R) -> Result<Handled, Error> {
        let id = match self.admit(incoming)? {
            Admitted::Handle(id) => id,
            Admitted::Quarantine { id, why } => return self.quarantine(&id, incoming, &why).await,
        };
        let arrival = Arrival { id: &id, stored: incoming.stored() };
        let mut redelivered = incoming.redelivered;
        loop {
            let known = if redelivered {
                match self.claim_new(&arrival).await? {
                    Ok(claim) => return self.claimed(arrival.id, claim, run).await,
                    Err(known) => known,
                }
            } else {
                match self.first(&arrival, run).await? {
                    Ok(handled) => return Ok(handled),
                    Err(known) => known,
                }
            };
            // Gone again: removed between two statements.
            let Some(known) = known else { continue };
            // A copy that came back from the consumer's own queue was sent when it was due.
            if !known.due && incoming.retry_of() != Some(known.version) {
                return Ok(answer(known));
            }
            match self.claim_known(arrival.id, known).await? {
                Some(Ok(claim)) => return self.claimed(arrival.id, claim, run).await,
                Some(Err(handled)) => return Ok(handled),
                // Somebody else was quicker; see what they made of it, and don't run it as new in any case.
                None => redelivered = true,
            }
        }
    }

    fn admit<'a>(&self, incoming: &'a Incoming) -> Result<Admitted<'a>, Error> {
        if let Some(why) = &incoming.malformed {
            return Ok(Admitted::quarantine(incoming, format!("it can't be handled as it came: {why}")));
        }
        if let Some(id) = incoming.usable_id() {
            return Ok(Admitted::Handle(id.into()));
        }
        let why = match &incoming.message_id {
            None => "it came without a message id".to_owned(),
            Some(id) if id.is_empty() => "its message id is empty".to_owned(),
            Some(id) if id.contains('\0') => "its message id contains NUL, which text columns can't hold".to_owned(),
            Some(id) => format!("its message id has {} bytes, the limit is {}", id.len(), crate::message::MAX_NAME),
        };
        match self.settings().missing_id {
            MissingId::Hash => Ok(Admitted::Handle(incoming.hashed_id().into())),
            MissingId::Quarantine => Ok(Admitted::quarantine(incoming, why)),
            MissingId::Reject => Err(Error::invalid("message_id", why)),
        }
    }

    /// The id that `first_time` goes by.
    pub(super) fn id_of<'a>(&self, incoming: &'a Incoming) -> Result<std::borrow::Cow<'a, str>, Error> {
        match self.admit(incoming)? {
            Admitted::Handle(id) => Ok(id),
            Admitted::Quarantine { why, .. } => Err(Error::invalid("message_id", why)),
        }
    }

    pub(super) fn new_row<'a>(&'a self, id: &'a str, stored: &'a Stored<'a>, status: InboxStatus) -> NewRow<'a> {
        NewRow {
            consumer: self.consumer(),
            id,
            status,
            kind: &stored.kind,
            source: stored.source.as_deref(),
            copy: (status != InboxStatus::Success).then_some(&stored.copy),
            attempts: 0,
            claims: 0,
            wait: Duration::ZERO,
            owner: None,
            error: None,
        }
    }

    fn key<'a>(&'a self, id: &'a str, version: i32) -> RowKey<'a> {
        RowKey { consumer: self.consumer(), id, version }
    }

    async fn quarantine(&self, id: &str, incoming: &Incoming, why: &str) -> Result<Handled, Error> {
        let (stored, why) = (incoming.stored(), storable(why, ERROR_TEXT));
        let row = NewRow { error: Some(&why), ..self.new_row(id, &stored, InboxStatus::Failed) };
        let (new, known) = step!(self, "keeping a malformed message", |tx| {
            let new = DB::inbox_insert(tx, self.tables(), &row).await?;
            Ok((new, DB::inbox_standing(tx, self.tables(), self.consumer(), id).await?))
        })?;
        tracing::warn!(consumer = self.consumer(), message_id = id, why, "a message was set aside");
        self.count(|stats| stats.failed += u64::from(new));
        Ok(known.map_or(Handled::Failed, answer))
    }

    /// Inserts the id of a message that may have killed its process before; the standing of one that is known.
    async fn claim_new(&self, arrival: &Arrival<'_>) -> Result<Result<Claim, Option<Standing>>, Error> {
        let row = NewRow {
            claims: 1,
            wait: self.settings().run_lease(),
            owner: Some(self.owner()),
            ..self.new_row(arrival.id, &arrival.stored, InboxStatus::Retrying)
        };
        step!(self, "writing a redelivered message down", |tx| {
            if DB::inbox_insert(tx, self.tables(), &row).await? {
                return Ok(Ok(Claim { version: 0, attempts: 0, claims: 1 }));
            }
            Ok(Err(DB::inbox_standing(tx, self.tables(), self.consumer(), arrival.id).await?))
        })
    }

    /// Claims a message that is known and due; None when somebody else was quicker, an answer when it has killed enough.
    async fn claim_known(&self, id: &str, known: Standing) -> Result<Option<Result<Claim, Handled>>, Error> {
        let claim = Claim { version: known.version, attempts: known.attempts, claims: known.claims };
        if self.killed_enough(claim.claims) {
            return Ok(self.give_up(id, claim).await?.then_some(Err(Handled::Failed)));
        }
        Ok(self.claim(id, claim, self.owner(), self.settings().run_lease()).await?.map(Ok))
    }

    pub(super) fn killed_enough(&self, claims: i32) -> bool {
        u32::try_from(claims).unwrap_or(0) >= self.settings().max_claims
    }

    /// Writes down that a run begins; None when the row has another version by now.
    pub(super) async fn claim(&self, id: &str, last: Claim, owner: &str, lease: Duration) -> Result<Option<Claim>, Error> {
        let claimed = step!(self, "claiming a message", |tx| {
            DB::inbox_claim(tx, self.tables(), self.key(id, last.version), owner, lease).await
        })?;
        Ok(claimed.then_some(Claim { version: last.version + 1, claims: last.claims + 1, ..last }))
    }

    /// FAILED, because it kills processes; false when the row has another version by now.
    pub(super) async fn give_up(&self, id: &str, claim: Claim) -> Result<bool, Error> {
        let error = format!("{} processes died while they ran it (max_claims); find out why, then requeue it", claim.claims);
        let failed = RunFailed { attempts: claim.attempts, claims: claim.claims, wait: None, error: Some(&error) };
        let given_up = self.fail(id, claim.version, &failed).await?;
        self.count(|stats| stats.failed += u64::from(given_up));
        Ok(given_up)
    }

    /// Writes down what a claimed run came to; false when the row has another version by now.
    pub(super) async fn fail(&self, id: &str, version: i32, failed: &RunFailed<'_>) -> Result<bool, Error> {
        let written =
            step!(self, "recording a failure", |tx| { DB::inbox_fail(tx, self.tables(), self.key(id, version), failed).await })?;
        if let Some(wait) = failed.wait.filter(|_| written) {
            self.shared.alarm.set(wait);
        }
        Ok(written)
    }

    async fn standing(&self, id: &str) -> Result<Option<Standing>, Error> {
        on!(self.outbox.pool(), self.deadline(), "looking up a message", |c| {
            DB::inbox_standing(c, self.tables(), self.consumer(), id).await
        })
        .await
    }

    /// A first run, or the standing of a message that is known.
    async fn first<R: Run<DB>>(&self, arrival: &Arrival<'_>, run: &mut R) -> Result<Result<Handled, Option<Standing>>, Error> {
        let mut tries = Tries::default();
        let failed = loop {
            match self.first_once(arrival, run).await? {
                Ended::Done => return Ok(Ok(Handled::Processed)),
                Ended::Known(standing) => return Ok(Err(standing)),
                Ended::Failed(failed) => break failed,
                // Nothing is written: the one who sent it sends it again.
                Ended::Lost(e) => return Err(e),
                Ended::InTheWay(_) if tries.again().await => {}
                Ended::InTheWay(InTheWay::OfHandler(failed)) => break failed,
                Ended::InTheWay(InTheWay::OfInbox(e)) => return Err(e),
            }
        };
        let (attempts, wait) = self.sentence(&failed, 0);
        let error = error_text(&failed);
        let row = NewRow {
            attempts,
            wait: wait.unwrap_or_default(),
            error: error.as_deref(),
            ..self.new_row(
                arrival.id,
                &arrival.stored,
                if wait.is_some() { InboxStatus::PendingRetry } else { InboxStatus::Failed },
            )
        };
        // Where somebody else has written about it meanwhile, that stands.
        let standing = step!(self, "recording a failure", |tx| {
            DB::inbox_insert(tx, self.tables(), &row).await?;
            DB::inbox_standing(tx, self.tables(), self.consumer(), arrival.id).await
        })?;
        if let Some(wait) = wait {
            self.shared.alarm.set(wait);
        }
        self.say_failed(arrival.id, &failed, attempts, wait);
        Ok(Ok(standing.map_or(Handled::Failed, answer)))
    }

    async fn first_once<R: Run<DB>>(&self, arrival: &Arrival<'_>, run: &mut R) -> Result<Ended, Error> {
        let (deadline, tables) = (self.deadline(), self.tables());
        let row = self.new_row(arrival.id, &arrival.stored, InboxStatus::Success);
        let mut tx = match timed(deadline, "begin", self.outbox.begin_by(DB::INBOX_BEGIN)).await {
            Ok(tx) => tx,
            Err(e) => return in_the_way(e),
        };
        // Dropped after a timeout, whose statement may still be on its way; rolled back after any other error.
        match timed(deadline, "inserting the message id", DB::inbox_insert(&mut tx, tables, &row)).await {
            Ok(true) => {}
            Ok(false) => {
                let standing = DB::inbox_standing(&mut tx, tables, self.consumer(), arrival.id);
                let standing = match timed(deadline, "looking up a message", standing).await {
                    Ok(standing) => standing,
                    Err(e) => return in_the_way(self.undo(tx, e).await),
                };
                self.roll_back(tx).await.ok();
                return Ok(Ended::Known(standing));
            }
            Err(e) => return in_the_way(self.undo(tx, e).await),
        }
        let published = self.outbox.published();
        if let Err(ended) = self.call(&mut tx, run).await {
            return Ok(self.ended(tx, ended).await);
        }
        // A handler that went on after an error of the database believes that it had its effect; it had not.
        let whole = DB::inbox_marked(&mut tx, tables);
        match timed(deadline, "looking whether the transaction is whole", whole).await {
            Ok(true) => self.commit(tx, published).await,
            Ok(false) => Ok(self.ended(tx, Some(went_on(None))).await),
            Err(e) if e.kind() == ErrorKind::Database => Ok(self.ended(tx, Some(went_on(Some(e)))).await),
            Err(e) => in_the_way(self.undo(tx, e).await),
        }
    }

    /// A run that is written down: runs it, and writes down what came of it.
    pub(super) async fn claimed<R: Run<DB>>(&self, id: &str, claim: Claim, run: &mut R) -> Result<Handled, Error> {
        let mut tries = Tries::default();
        let failed = loop {
            match self.claimed_once(id, claim, run).await? {
                Ended::Done => return Ok(Handled::Processed),
                Ended::Known(standing) => return Ok(standing.map_or(Handled::Duplicate, answer)),
                Ended::Failed(failed) => break failed,
                Ended::Lost(e) => {
                    // No attempt; but the claim stays, because a message can kill the database's process too.
                    let error = storable(&format!("the connection was lost during the run: {e}"), ERROR_TEXT);
                    let wait = Some(self.settings().retry.wait(1, fastrand::f64()));
                    let lost = RunFailed { attempts: claim.attempts, claims: claim.claims, wait, error: Some(&error) };
                    self.fail(id, claim.version, &lost).await?;
                    return Err(e);
                }
                Ended::InTheWay(_) if tries.again().await => {}
                Ended::InTheWay(InTheWay::OfHandler(failed)) => break failed,
                Ended::InTheWay(InTheWay::OfInbox(e)) => return Err(e),
            }
        };
        let (attempts, wait) = self.sentence(&failed, claim.attempts);
        let error = error_text(&failed);
        self.fail(id, claim.version, &RunFailed { attempts, claims: 0, wait, error: error.as_deref() }).await?;
        self.say_failed(id, &failed, attempts, wait);
        Ok(self.standing(id).await?.map_or(Handled::Failed, answer))
    }

    async fn claimed_once<R: Run<DB>>(&self, id: &str, claim: Claim, run: &mut R) -> Result<Ended, Error> {
        let (deadline, tables) = (self.deadline(), self.tables());
        let mut tx = match timed(deadline, "begin", self.outbox.begin_by(DB::INBOX_BEGIN)).await {
            Ok(tx) => tx,
            Err(e) => return in_the_way(e),
        };
        let published = self.outbox.published();
        if let Err(ended) = self.call(&mut tx, run).await {
            return Ok(self.ended(tx, ended).await);
        }
        let finish = async {
            if !DB::inbox_marked(&mut tx, tables).await? {
                return Ok(None);
            }
            // Last, so that the row is free while the handler runs and its lease can be renewed.
            DB::inbox_succeed(&mut tx, tables, self.key(id, claim.version)).await.map(Some)
        };
        match timed(deadline, "recording a success", finish).await {
            Ok(Some(true)) => self.commit(tx, published).await,
            Ok(Some(false)) => {
                tracing::warn!(
                    consumer = self.consumer(),
                    message_id = id,
                    "another process took this message over; rolled back"
                );
                self.roll_back(tx).await.ok();
                Ok(Ended::Known(self.standing(id).await?))
            }
            Ok(None) => Ok(self.ended(tx, Some(went_on(None))).await),
            Err(e) if e.kind() == ErrorKind::Database => Ok(self.ended(tx, Some(went_on(Some(e)))).await),
            Err(e) => in_the_way(self.undo(tx, e).await),
        }
    }

    /// Calls the handler; its error, or None when its time is over.
    async fn call<R: Run<DB>>(&self, tx: &mut Tx<DB>, run: &mut R) -> Result<(), Option<HandlerError>> {
        let span = self.span(run.incoming());
        tx.continue_trace(&run.incoming().headers);
        let started = Instant::now();
        let called = tokio::time::timeout(self.settings().handler_timeout, run.run(tx).instrument(span)).await;
        self.count(|stats| stats.handler_time.record(started.elapsed()));
        match called {
            Ok(result) => result.map_err(Some)?,
            Err(_) => return Err(None),
        }
        // A handler that dropped the error of a call that had joined its transaction has failed all the same.
        tx.refusal().map_or(Ok(()), |refused| Err(Some(refused.into())))
    }

    /// The span that the handler runs in.
    fn span(&self, incoming: &Incoming) -> Span {
        if let Some(make) = &self.trace {
            return make(&incoming.headers);
        }
        tracing::info_span!(
            "posthouse.handle",
            consumer = self.consumer(),
            message_id = incoming.message_id.as_deref().unwrap_or_default(),
            "type" = incoming.kind
        )
    }

    /// Ends the transaction of a handler that failed.
    async fn ended(&self, tx: Tx<DB>, error: Option<HandlerError>) -> Ended {
        let Some(error) = error else {
            // Dropped, not rolled back: a statement of it may be on its way.
            drop(tx);
            let after = self.settings().handler_timeout;
            return Ended::Failed(HandlerError::retry(format!("the handler did not finish within {after:?} (handler_timeout)")));
        };
        if tx.cut_off() {
            drop(tx);
            return Ended::Failed(error);
        }
        match self.roll_back(tx).await {
            Err(e) if e.kind() == ErrorKind::Unavailable => Ended::Lost(e),
            _ if error.conflict => Ended::InTheWay(InTheWay::OfHandler(error)),
            _ => Ended::Failed(error),
        }
    }

    async fn roll_back(&self, mut tx: Tx<DB>) -> Result<(), Error> {
        let rollback = async {
            DB::inbox_resume(&mut tx, self.tables()).await?;
            tx.rollback().await
        };
        timed(self.deadline(), "rollback", rollback).await
    }

    /// Rolls back after an error of the inbox's own statements, and hands the error on.
    async fn undo(&self, tx: Tx<DB>, e: Error) -> Error {
        if !matches!(e, Error::Timeout { .. }) {
            self.roll_back(tx).await.ok();
        }
        e
    }

    async fn commit(&self, tx: Tx<DB>, published: u64) -> Result<Ended, Error> {
        let result = timed(self.deadline(), "commit", tx.end()).await;
        if self.outbox.published() != published {
            self.outbox.committed();
        }
        match result {
            Ok(()) => {
                self.count(|stats| stats.processed += 1);
                Ok(Ended::Done)
            }
            // By a deferred constraint, say: what the handler did can't be kept. If it was committed all the same, the row that
            // says so stands, whatever is recorded.
            Err(e) if e.kind() == ErrorKind::Database => {
                Ok(Ended::Failed(HandlerError::retry(format!("the database refused the commit: {e}"))))
            }
            Err(e) => in_the_way(e),
        }
    }

    /// What a failure comes to: attempts now, and the wait; None: FAILED.
    fn sentence(&self, failed: &HandlerError, attempts: i32) -> (i32, Option<Duration>) {
        let retry = &self.settings().retry;
        let counted = attempts.saturating_add(1);
        let wait = match failed.verdict {
            Verdict::Snooze(after) => return (attempts, Some(after.min(LONGEST_WAIT))),
            Verdict::Reject => None,
            Verdict::Retry(_) if u32::try_from(counted).unwrap_or(u32::MAX) >= retry.max_attempts => None,
            Verdict::Retry(Some(after)) => Some(after.min(LONGEST_WAIT)),
            Verdict::Retry(None) => Some(retry.wait(counted.unsigned_abs(), fastrand::f64())),
        };
        (counted, wait)
    }

    fn say_failed(&self, id: &str, failed: &HandlerError, attempts: i32, wait: Option<Duration>) {
        self.count(|stats| *(if wait.is_some() { &mut stats.retried } else { &mut stats.failed }) += 1);
        let consumer = self.consumer();
        match wait {
            Some(again_in) => {
                tracing::debug!(consumer, message_id = id, error = %failed, attempts, ?again_in, "will be run again")
            }
            None => tracing::warn!(consumer, message_id = id, error = %failed, attempts, "FAILED"),
        }
    }
}

fn error_text(failed: &HandlerError) -> Option<String> {
    (!matches!(failed.verdict, Verdict::Snooze(_))).then(|| storable(&failed.text, ERROR_TEXT))
}

fn went_on(e: Option<Error>) -> HandlerError {
    let said = e.map(|e| format!(" ({e})")).unwrap_or_default();
    HandlerError::retry(format!(
        "the handler returned Ok after an error of the database had ended its transaction, so nothing was committed{said}; \
         return such errors from the handler"
    ))
}

fn in_the_way(e: Error) -> Result<Ended, Error> {
    if e.kind() == ErrorKind::Conflict { Ok(Ended::InTheWay(InTheWay::OfInbox(e))) } else { Err(e) }
}

/// What is said about a message that stands so.
fn answer(standing: Standing) -> Handled {
    match standing.status {
        InboxStatus::Success => Handled::Duplicate,
        InboxStatus::Failed => Handled::Failed,
        InboxStatus::PendingRetry | InboxStatus::Retrying => {
            let us = u64::try_from(standing.next_us.unwrap_or(0)).unwrap_or(0);
            Handled::WillRetry(SystemTime::UNIX_EPOCH + Duration::from_micros(us))
        }
    }
}
