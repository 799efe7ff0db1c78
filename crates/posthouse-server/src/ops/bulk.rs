//! Actions on everything that a filter finds. They run in the background, page by page, and tell how far they are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use posthouse::store::{Action, InboxAction, InboxFilter, MessageFilter};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::{CHUNK, Counted, Refusal, Refused, audit, inbox, messages, operator};
use crate::config::{Config, redact_url};
use crate::http::{ServedRelay, Who};
use crate::output;

/// How long one that has ended is remembered.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// How many that have ended are remembered.
const MOST: usize = 100;

/// How long the ones that are going may take to stop with the server.
const END: Duration = Duration::from_secs(5);

/// What is to be done to what.
#[derive(Debug, Clone)]
pub(crate) enum Bulk {
    Messages { filter: MessageFilter, action: Action },
    Inbox { filter: InboxFilter, action: InboxAction },
}

impl Bulk {
    /// As the audit log names it: at most 20 bytes.
    fn name(&self) -> &'static str {
        match self {
            Self::Messages { action: Action::Requeue, .. } => "bulk requeue",
            Self::Messages { action: Action::Skip, .. } => "bulk skip",
            Self::Messages { action: Action::Edit { .. }, .. } => "bulk edit",
            Self::Inbox { action: InboxAction::Requeue, .. } => "inbox bulk requeue",
            Self::Inbox { action: InboxAction::Skip, .. } => "inbox bulk skip",
        }
    }

    fn inbox(&self) -> bool {
        matches!(self, Self::Inbox { .. })
    }

    /// What it works on, for the audit log and for people.
    fn what(&self) -> Value {
        let mut what = match self {
            Self::Messages { filter, action } => json!({
                "status": filter.status, "destination": filter.destination.as_deref().map(redact_url), "key": filter.key, "message_id": filter.message_id,
                "created_after_ms": filter.created_after_ms, "created_before_ms": filter.created_before_ms, "text": filter.text,
                "to": if let Action::Edit { destination } = action { Some(redact_url(destination)) } else { None },
            }),
            Self::Inbox { filter, .. } => json!({
                "status": filter.status, "consumer": filter.consumer, "type": filter.kind,
                "first_after_us": filter.first_after_us, "first_before_us": filter.first_before_us, "text": filter.text,
            }),
        };
        if let Some(fields) = what.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
        what
    }

    /// Refuses what the action can't apply to.
    fn check(&self, config: &Config) -> Result<(), Refused> {
        match self {
            Self::Messages { filter, action } => {
                if let Action::Edit { destination } = action {
                    messages::known_destination(config, destination)?;
                }
                messages::can_act(filter, action)
            }
            Self::Inbox { filter, action } => inbox::can_act(filter, *action),
        }
    }
}

/// How far one is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Progress {
    pub(crate) id: u64,
    pub(crate) database: String,
    /// `bulk requeue`, …: as the audit log names it.
    pub(crate) action: &'static str,
    /// About received messages.
    pub(crate) inbox: bool,
    /// The filter, and where an edit sends to.
    pub(crate) what: Value,
    /// Who started it.
    pub(crate) actor: String,
    /// Milliseconds since 1970 UTC.
    pub(crate) started_ms: i64,
    /// Milliseconds since 1970 UTC; None while it is going.
    pub(crate) ended_ms: Option<i64>,
    /// Messages there were when it was confirmed.
    pub(crate) total: u64,
    /// There were more than that.
    pub(crate) more: bool,
    /// Messages it has come past.
    pub(crate) done: u64,
    /// Messages that it changed; the others had changed meanwhile.
    pub(crate) changed: u64,
    /// Somebody stopped it, or the server ended.
    pub(crate) stopped: bool,
    /// Why it ended early.
    pub(crate) error: Option<String>,
}

impl Progress {
    pub(crate) fn finished(&self) -> bool {
        self.ended_ms.is_some()
    }
}

#[derive(Debug)]
struct Entry {
    progress: Progress,
    stop: Arc<AtomicBool>,
    ended: Option<Instant>,
    task: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Inner {
    last: u64,
    all: BTreeMap<u64, Entry>,
    closed: bool,
}

/// Those that are going, and those that have ended lately.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bulks(Arc<Mutex<Inner>>);

impl Bulks {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one. `confirmed` is what the person saw and agreed to; one runs in a database at a time, so that pages stay quick.
    pub(crate) fn start(
        &self,
        config: &Arc<Config>,
        relay: &Arc<ServedRelay>,
        who: &Who,
        bulk: Bulk,
        confirmed: Counted,
    ) -> Result<Progress, Refused> {
        operator(who)?;
        bulk.check(config)?;
        let mut inner = self.lock();
        if inner.closed {
            return Err(Refused::new(Refusal::Unavailable, "the server is stopping"));
        }
        inner.forget();
        if let Some(other) =
            inner.all.values().find(|e| e.task.is_some() && !e.progress.finished() && e.progress.database == relay.name)
        {
            let (id, action) = (other.progress.id, other.progress.action);
            let text = format!("{action} number {id} is going in database {:?}; wait for its end, or stop it", relay.name);
            return Err(Refused::new(Refusal::Busy, text).limit(1));
        }
        inner.last += 1;
        let progress = Progress {
            id: inner.last,
            database: relay.name.clone(),
            action: bulk.name(),
            inbox: bulk.inbox(),
            what: bulk.what(),
            actor: who.name.clone(),
            started_ms: output::now_ms(),
            ended_ms: None,
            total: confirmed.messages,
            more: confirmed.more,
            done: 0,
            changed: 0,
            stopped: false,
            error: None,
        };
        tracing::info!(
            database = relay.name,
            action = progress.action,
            actor = who.name,
            found = confirmed.text(),
            "a bulk action begins"
        );
        let stop = Arc::new(AtomicBool::new(false));
        let run = Run {
            id: progress.id,
            bulks: self.clone(),
            config: config.clone(),
            relay: relay.clone(),
            who: who.clone(),
            stop: stop.clone(),
        };
        let task = tokio::spawn(run.work(bulk));
        inner.all.insert(progress.id, Entry { progress: progress.clone(), stop, ended: None, task: Some(task) });
        Ok(progress)
    }

    pub(crate) fn get(&self, id: u64) -> Option<Progress> {
        self.lock().all.get(&id).map(|e| e.progress.clone())
    }

    /// Newest first.
    pub(crate) fn list(&self) -> Vec<Progress> {
        let mut inner = self.lock();
        inner.forget();
        inner.all.values().rev().map(|e| e.progress.clone()).collect()
    }

    /// Tells one to stop; what it has changed stays changed.
    pub(crate) fn stop(&self, who: &Who, id: u64) -> Result<Progress, Refused> {
        operator(who)?;
        let inner = self.lock();
        let entry =
            inner.all.get(&id).ok_or_else(|| Refused::missing(format!("there is no bulk action number {id} (any more)")))?;
        entry.stop.store(true, Ordering::Relaxed);
        Ok(entry.progress.clone())
    }

    /// Stops all of them, with the server.
    pub(crate) async fn close(&self) {
        let tasks: Vec<JoinHandle<()>> = {
            let mut inner = self.lock();
            inner.closed = true;
            let stopped = |e: &mut Entry| {
                e.stop.store(true, Ordering::Relaxed);
                e.task.take()
            };
            inner.all.values_mut().filter_map(stopped).collect()
        };
        let aborts: Vec<_> = tasks.iter().map(JoinHandle::abort_handle).collect();
        if tokio::time::timeout(END, futures_util::future::join_all(tasks)).await.is_err() {
            aborts.iter().for_each(tokio::task::AbortHandle::abort);
        }
    }

    fn update(&self, id: u64, change: impl FnOnce(&mut Progress)) {
        if let Some(entry) = self.lock().all.get_mut(&id) {
            change(&mut entry.progress);
            if entry.progress.finished() {
                entry.ended.get_or_insert_with(Instant::now);
                entry.task = None;
            }
        }
    }
}

impl Inner {
    /// Forgets those that ended long ago, and the oldest of too many.
    fn forget(&mut self) {
        self.all.retain(|_, e| e.ended.is_none_or(|at| at.elapsed() < REMEMBERED));
        while self.all.len() > MOST {
            let Some(oldest) = self.all.iter().find(|(_, e)| e.ended.is_some()).map(|(id, _)| *id) else { break };
            self.all.remove(&oldest);
        }
    }
}

struct Run {
    id: u64,
    bulks: Bulks,
    config: Arc<Config>,
    relay: Arc<ServedRelay>,
    who: Who,
    stop: Arc<AtomicBool>,
}

impl Run {
    async fn work(self, bulk: Bulk) {
        let result = match &bulk {
            Bulk::Messages { filter, action } => self.messages(filter, action).await,
            Bulk::Inbox { filter, action } => self.inbox(filter, *action).await,
        };
        let Some(progress) = self.bulks.get(self.id) else { return };
        let stopped = self.stop.load(Ordering::Relaxed) && result.is_ok();
        let mut error = result.err().map(|e| e.text);
        let mut detail = bulk.what();
        if stopped {
            detail["stopped"] = true.into();
        }
        if let Some(error) = &error {
            detail["error"] = error.clone().into();
        }
        let amount = i64::try_from(progress.changed).ok();
        // One line that sums it up, beside the line of each message.
        if let Err(e) = audit::record(&self.relay, &self.who, bulk.name(), &detail.to_string(), amount).await {
            let text = format!("the line in the audit log that sums it up could not be written: {e}");
            error = Some(error.map_or_else(|| text.clone(), |first| format!("{first}; {text}")));
        }
        self.bulks.update(self.id, |p| {
            p.stopped = stopped;
            p.error = error;
            p.ended_ms = Some(output::now_ms());
        });
    }

    fn progress(&self, done: usize, changed: usize) {
        self.bulks.update(self.id, |p| {
            p.done += done as u64;
            p.changed += changed as u64;
        });
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// From the newest down: later ones are left alone, and none is met twice.
    async fn messages(&self, filter: &MessageFilter, action: &Action) -> Result<(), Refused> {
        let mut page = MessageFilter { limit: CHUNK, before: None, within: None, ..messages::sealed(&self.config, filter) };
        while !self.stopped() {
            let listed = self.relay.people.list(&page).await?;
            let ids: Vec<i64> = listed.rows.iter().map(|r| r.id).collect();
            if !ids.is_empty() {
                let changed = self.relay.people.act(&ids, action, &self.who.name).await?;
                self.progress(ids.len(), changed.len());
            }
            page.before = listed.next;
            if page.before.is_none() {
                break;
            }
        }
        Ok(())
    }

    async fn inbox(&self, filter: &InboxFilter, action: InboxAction) -> Result<(), Refused> {
        let store = self.relay.inbox()?;
        let mut page = InboxFilter { limit: CHUNK, after: None, within: None, ..inbox::sealed(&self.config, filter) };
        while !self.stopped() {
            let listed = store.list(&page).await?;
            for of_one in listed.rows.chunk_by(|a, b| a.consumer == b.consumer) {
                let ids: Vec<String> = of_one.iter().map(|r| r.message_id.clone()).collect();
                let changed = store.act(&of_one[0].consumer, &ids, action, &self.who.name).await?;
                self.progress(ids.len(), changed.len());
            }
            page.after = listed.next;
            if page.after.is_none() {
                break;
            }
        }
        Ok(())
    }
}
