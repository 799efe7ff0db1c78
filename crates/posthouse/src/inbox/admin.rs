//! What people look at and change.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::Inbox;
use super::process::step;
use crate::Error;
use crate::store::{
    Backend, InboxAction, InboxBacklog, InboxDetail, InboxFilter, InboxRow, InboxStore, Listed, on, search_received,
};

pub(super) struct Admin<DB: Backend>(pub(super) Inbox<DB>);

impl<DB: Backend> fmt::Debug for Admin<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Admin").field(&self.0.tables()).finish()
    }
}

impl<DB: Backend> InboxStore for Admin<DB> {
    fn list<'a>(&'a self, filter: &'a InboxFilter) -> BoxFuture<'a, Result<Listed<InboxRow, (String, String)>, Error>> {
        let inbox = &self.0;
        on!(inbox.outbox.pool(), inbox.deadline(), "listing received messages", |c| {
            search_received::<DB>(c, inbox.tables(), filter).await
        })
    }

    fn show<'a>(&'a self, consumer: &'a str, message_id: &'a str) -> BoxFuture<'a, Result<Option<InboxDetail>, Error>> {
        let inbox = &self.0;
        on!(inbox.outbox.pool(), inbox.deadline(), "showing a received message", |c| {
            DB::inbox_read(c, inbox.tables(), consumer, message_id).await
        })
    }

    /// One transaction for all of them, in the order of their ids, so that two operators wait for each other.
    fn act<'a>(
        &'a self,
        consumer: &'a str,
        message_ids: &'a [String],
        action: InboxAction,
        actor: &'a str,
    ) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        let inbox = &self.0;
        Box::pin(async move {
            let mut ids = message_ids.to_vec();
            ids.sort_unstable();
            ids.dedup();
            let done = step!(inbox, "acting on received messages", |tx| {
                let mut done = Vec::new();
                for id in &ids {
                    if DB::inbox_act(tx, inbox.tables(), consumer, id, action, actor).await? {
                        done.push(id.clone());
                    }
                }
                Ok(done)
            })?;
            if action == InboxAction::Requeue && consumer == inbox.consumer() && !done.is_empty() {
                inbox.shared.alarm.set(Duration::ZERO);
            }
            Ok(done)
        })
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<InboxBacklog>, Error>> {
        let inbox = &self.0;
        on!(inbox.outbox.pool(), inbox.deadline(), "counting received messages", |c| {
            DB::inbox_backlog(c, inbox.tables()).await
        })
    }
}
