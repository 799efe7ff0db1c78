//! Doing something to all that a filter finds: it says how many there are, asks, and shows how far it is.

use askama::Template;
use axum::Form;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use posthouse::store::Action;
use serde::Deserialize;

use super::view::{number, page, shown};
use super::{Shared, asked, first_of, inbox, messages};
use crate::api::status;
use crate::http::{ServedRelay, Who};
use crate::ops::bulk::{Bulk, Progress};
use crate::ops::{self, Counted, Refused};

/// What is done, beside the filter.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct What {
    action: String,
    destination_to: String,
    /// How many there were when the person agreed.
    counted: u64,
    more: bool,
}

/// What a form of ours sends: the filter, and what is to be done. (Flattened texts can't be numbers, so both read all of it.)
#[derive(Template)]
#[template(path = "bulk_ask.html")]
struct Ask {
    title: String,
    /// Where it is sent to.
    post: &'static str,
    database: String,
    count: String,
    counted: Counted,
    words: Vec<(&'static str, String)>,
    /// The filter, field by field.
    fields: Vec<(String, String)>,
    action: String,
    verb: &'static str,
    edit: bool,
    warning: &'static str,
}

#[derive(Template)]
#[template(path = "bulk_progress.html")]
struct Going {
    id: u64,
    title: String,
    done: String,
    changed: String,
    total: String,
    value: u64,
    max: u64,
    finished: bool,
    /// What came of it, when it has ended.
    said: Option<String>,
    good: bool,
    operator: bool,
}

fn fields(filter: &impl serde::Serialize) -> Vec<(String, String)> {
    let Ok(serde_json::Value::Object(map)) = serde_json::to_value(filter) else { return Vec::new() };
    map.into_iter().filter_map(|(name, value)| Some((name, value.as_str()?.to_owned()))).filter(|(_, v)| !v.is_empty()).collect()
}

fn titled(verb: &str, counted: Counted) -> String {
    format!("{verb} {}?", counted.text())
}

fn database_of<'s>(served: &'s Shared, db: &str) -> Result<&'s std::sync::Arc<ServedRelay>, Refused> {
    first_of(served, db).map_err(|_| Refused::missing(format!("there is no database {db:?}")))
}

/// Says how many messages there are, and asks.
pub(super) async fn ask(
    State(served): State<Shared>,
    who: Who,
    Query(filter): Query<messages::Asked>,
    Query(what): Query<What>,
) -> Response {
    let made = async {
        ops::operator(&who)?;
        let database = database_of(&served, &filter.db)?;
        let wanted = filter.filter()?;
        let edit = what.action == "edit";
        // Where to is asked for in the dialog.
        let action = if edit { Action::Edit { destination: String::new() } } else { messages::action(&what.action, "")? };
        ops::messages::can_act(&wanted, &action)?;
        let counted = ops::messages::count(&served.config, database.people.as_ref(), &wanted);
        let counted = asked(database, counted).await.map_err(|e| Refused::new(ops::Refusal::Unavailable, e))?;
        let (verb, warning) = match action {
            Action::Requeue => ("Requeue", "Each is tried again from the start, in its key's place."),
            Action::Skip => {
                ("Skip", "They are given up and never sent, unless they are requeued. Later ones of their keys go on.")
            }
            Action::Edit { .. } => ("Send elsewhere", "Each is sent to the destination below, now, with all its attempts."),
        };
        Ok::<_, Refused>(Ask {
            title: titled(verb, counted),
            post: "/messages/bulk",
            database: shown(&database.name),
            count: counted.text(),
            counted,
            words: filter.words(),
            fields: fields(&filter),
            action: what.action,
            verb,
            edit,
            warning,
        })
    };
    match made.await {
        Ok(ask) => page(&ask),
        Err(refused) => refusal(&refused),
    }
}

/// The same for received messages.
pub(super) async fn ask_inbox(
    State(served): State<Shared>,
    who: Who,
    Query(filter): Query<inbox::Asked>,
    Query(what): Query<What>,
) -> Response {
    let made = async {
        ops::operator(&who)?;
        let database = database_of(&served, &filter.db)?;
        let (wanted, action) = (filter.filter()?, inbox::action(&what.action)?);
        ops::inbox::can_act(&wanted, action)?;
        let store = database.inbox()?;
        let counted = asked(database, ops::inbox::count(&served.config, store.as_ref(), &wanted));
        let counted = counted.await.map_err(|e| Refused::new(ops::Refusal::Unavailable, e))?;
        let (verb, warning) = match action {
            posthouse::store::InboxAction::Requeue => ("Requeue", "Each is run again from the start."),
            posthouse::store::InboxAction::Skip => ("Skip", "They are given up and never run, unless they are requeued."),
        };
        Ok::<_, Refused>(Ask {
            title: titled(verb, counted),
            post: "/inbox/bulk",
            database: shown(&database.name),
            count: counted.text(),
            counted,
            words: filter.words(),
            fields: fields(&filter),
            action: what.action,
            verb,
            edit: false,
            warning,
        })
    };
    match made.await {
        Ok(ask) => page(&ask),
        Err(refused) => refusal(&refused),
    }
}

/// Begins it, as it was agreed to.
pub(super) async fn begin(State(served): State<Shared>, who: Who, Form(form): Form<Vec<(String, String)>>) -> Response {
    let begun = async {
        let (filter, what) = (read::<messages::Asked>(&form)?, read_what(&form));
        let database = database_of(&served, &filter.db)?;
        let action = messages::action(&what.action, &what.destination_to)?;
        let bulk = Bulk::Messages { filter: filter.filter()?, action };
        served.bulks.start(&served.config, database, &who, bulk, Counted { messages: what.counted, more: what.more })
    };
    match begun.await {
        Ok(progress) => going(&who, &progress),
        Err(refused) => refusal(&refused),
    }
}

/// The same for received messages.
pub(super) async fn begin_inbox(State(served): State<Shared>, who: Who, Form(form): Form<Vec<(String, String)>>) -> Response {
    let begun = async {
        let (filter, what) = (read::<inbox::Asked>(&form)?, read_what(&form));
        let database = database_of(&served, &filter.db)?;
        let bulk = Bulk::Inbox { filter: filter.filter()?, action: inbox::action(&what.action)? };
        served.bulks.start(&served.config, database, &who, bulk, Counted { messages: what.counted, more: what.more })
    };
    match begun.await {
        Ok(progress) => going(&who, &progress),
        Err(refused) => refusal(&refused),
    }
}

/// A form's fields as what they are.
fn read<T: serde::de::DeserializeOwned>(form: &[(String, String)]) -> Result<T, Refused> {
    let map: serde_json::Map<_, _> = form.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
    serde_json::from_value(map.into()).map_err(|e| Refused::new(ops::Refusal::Invalid, e.to_string()))
}

fn read_what(form: &[(String, String)]) -> What {
    let field = |name: &str| form.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()).unwrap_or_default();
    What {
        action: field("action"),
        destination_to: field("destination_to"),
        counted: field("counted").parse().unwrap_or(0),
        more: field("more") == "true",
    }
}

/// How far one is.
pub(super) async fn progress(State(served): State<Shared>, who: Who, Path(id): Path<u64>) -> Response {
    match served.bulks.get(id) {
        Some(progress) => going(&who, &progress),
        None => refusal(&Refused::missing(format!("there is no bulk action number {id} (any more)"))),
    }
}

pub(super) async fn stop(State(served): State<Shared>, who: Who, Path(id): Path<u64>) -> Response {
    match served.bulks.stop(&who, id) {
        Ok(progress) => going(&who, &progress),
        Err(refused) => refusal(&refused),
    }
}

/// Inside the dialog.
#[derive(Template)]
#[template(path = "bulk_refused.html")]
struct RefusedInside {
    text: String,
}

fn refusal(refused: &Refused) -> Response {
    let inside = page(&RefusedInside { text: shown(&refused.text) });
    (status(refused.kind), inside).into_response()
}

fn going(who: &Who, progress: &Progress) -> Response {
    let (done, changed) = (number(progress.done as i64), number(progress.changed as i64));
    let left = progress.done - progress.changed;
    let said = progress.finished().then(|| {
        let others =
            if left > 0 { format!("; {} had changed meanwhile and were left", number(left as i64)) } else { String::new() };
        match &progress.error {
            Some(error) => format!("ended early after {changed}: {}", shown(error)),
            None if progress.stopped => format!("stopped; {changed} were changed{others}"),
            None => format!("done: {changed} changed{others}"),
        }
    });
    let template = Going {
        id: progress.id,
        title: shown(&format!("{} in {}", progress.action, progress.database)),
        done,
        changed,
        total: Counted { messages: progress.total, more: progress.more }.text(),
        value: progress.done.min(progress.total),
        max: progress.total.max(1),
        finished: progress.finished(),
        said,
        good: progress.error.is_none(),
        operator: who.role == crate::http::Role::Operator,
    };
    let inside = page(&template);
    if progress.finished() { ([("hx-trigger", "tick")], inside).into_response() } else { inside }
}
