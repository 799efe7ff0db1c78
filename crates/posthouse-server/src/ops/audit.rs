//! The audit log: who did what.

use posthouse::store::{AuditFilter, AuditRow, Listed, Record};

use super::Refused;
use crate::http::{ServedRelay, Who};

/// A page of the audit log, newest first.
pub(crate) async fn list(relay: &ServedRelay, filter: &AuditFilter) -> Result<Listed<AuditRow>, Refused> {
    Ok(relay.people.audits(filter).await?)
}

/// Writes a line about something else than one message. `action` has at most 20 bytes.
pub(crate) async fn record(
    relay: &ServedRelay,
    who: &Who,
    action: &str,
    detail: &str,
    amount: Option<i64>,
) -> Result<(), posthouse::Error> {
    relay.people.record(&Record { actor: &who.name, action, detail, amount }).await
}
