//! What waits in databases and brokers, whoever works on it.

use std::time::Duration;

use posthouse::store::InboxStatus;

use super::page::Page;
use super::{DATABASE, OTHER, longest, named};
use crate::config::redact_url;
use crate::http::Served;

pub(super) async fn add(page: &Page, served: &Served) -> prometheus::Result<()> {
    adopted(page, served)?;
    // Asked for side by side, so that a scrape waits once.
    let (outbox, inbox) = tokio::join!(backlog(page, served), inbox(page, served));
    outbox.and(inbox)?;
    brokers(page, served)
}

/// Tables of other applications.
fn adopted(page: &Page, served: &Served) -> prometheus::Result<()> {
    if served.adopted.is_empty() {
        return Ok(());
    }
    let labels = &["database", "source", "table"];
    let pending = page.gauge("adopted_pending", "Rows of an adopted table that are to be sent.", labels)?;
    let flight = page.gauge("adopted_in_flight", "Rows of an adopted table in flight.", labels)?;
    let scan = page.gauge("adopted_last_scan_age_seconds", "Time since the last scan that went well.", labels)?;
    let sent = page.counter("adopted_sent_total", "Rows confirmed by their receivers.", labels)?;
    let retried = page.counter("adopted_retried_total", "Attempts that failed and are tried again.", labels)?;
    let failed = page.counter("adopted_failed_total", "Rows that were given up.", labels)?;
    let stale = page.counter("adopted_stale_total", "Outcomes that met a row which its owner had changed.", labels)?;
    let errors = page.counter("adopted_database_errors_total", "Database calls that failed.", &["database", "source"])?;
    for one in &served.adopted {
        let Some(stats) = one.stats() else { continue };
        errors.with_label_values(&[&one.database, &one.name]).inc_by(stats.database_errors);
        for (table, of) in &stats.tables {
            let label = &[&one.database, &one.name, table];
            if let Some(rows) = of.pending {
                pending.with_label_values(label).set(rows as f64);
            }
            flight.with_label_values(label).set(of.in_flight as f64);
            if let Some(at) = of.last_scan {
                scan.with_label_values(label).set(at.elapsed().as_secs_f64());
            }
            sent.with_label_values(label).inc_by(of.sent);
            retried.with_label_values(label).inc_by(of.retried);
            failed.with_label_values(label).inc_by(of.failed);
            stale.with_label_values(label).inc_by(of.stale);
        }
    }
    Ok(())
}

async fn backlog(page: &Page, served: &Served) -> prometheus::Result<()> {
    let labels = &["database", "destination", "status"];
    let messages = page.gauge("backlog_messages", "Unfinished messages in the database.", labels)?;
    let oldest = page.gauge("backlog_oldest_seconds", "Age of the oldest of them.", labels)?;
    let age = page.gauge("backlog_age_seconds", "How long ago the backlog was counted.", DATABASE)?;
    let counted = futures_util::future::join_all(served.databases.iter().map(|d| d.backlog())).await;
    for (database, counted) in served.databases.iter().zip(counted) {
        let Some((rows, since)) = counted else { continue };
        age.with_label_values(&[&database.name]).set(since.as_secs_f64());
        let named = named(rows.iter().map(|r| (redact_url(&r.destination), r.status == "FAILED", r.messages)));
        for row in rows {
            let name = redact_url(&row.destination);
            let label = &[database.name.as_str(), if named.contains(&name) { &name } else { OTHER }, &row.status];
            messages.with_label_values(label).add(row.messages as f64);
            let old = Duration::from_millis(u64::try_from(row.oldest_ms).unwrap_or(0)).as_secs_f64();
            longest(&oldest.with_label_values(label), old);
        }
    }
    Ok(())
}

async fn inbox(page: &Page, served: &Served) -> prometheus::Result<()> {
    let labels = &["database", "consumer", "status"];
    let messages = page.gauge("inbox_backlog_messages", "Received messages in the database that are not done.", labels)?;
    let oldest = page.gauge("inbox_backlog_oldest_seconds", "Time since the oldest of them was first received.", labels)?;
    let age = page.gauge("inbox_backlog_age_seconds", "How long ago the backlog of the inbox was counted.", DATABASE)?;
    let counted = futures_util::future::join_all(served.databases.iter().map(|d| d.inbox_backlog())).await;
    for (database, counted) in served.databases.iter().zip(counted) {
        let Some((rows, since)) = counted else { continue };
        age.with_label_values(&[&database.name]).set(since.as_secs_f64());
        let named = named(rows.iter().map(|r| (r.consumer.clone(), r.status == InboxStatus::Failed, r.messages)));
        for row in rows {
            let name = if named.contains(&row.consumer) { &row.consumer } else { OTHER };
            let label = &[database.name.as_str(), name, row.status.as_str()];
            messages.with_label_values(label).add(row.messages as f64);
            let old = Duration::from_micros(u64::try_from(row.age_us).unwrap_or(0)).as_secs_f64();
            longest(&oldest.with_label_values(label), old);
        }
    }
    Ok(())
}

/// What waits in brokers. Its names are those of the configuration.
fn brokers(page: &Page, served: &Served) -> prometheus::Result<()> {
    let depths = served.depths.all();
    if depths.is_empty() {
        return Ok(());
    }
    let labels = &["transport", "kind", "name", "group"];
    let up = page.gauge("broker_watch_up", "1 while the broker tells what waits there, 0 while it doesn't.", labels)?;
    let messages = page.gauge(
        "broker_messages",
        "Messages that wait: ready in a RabbitMQ queue, the lag of a Kafka group in a topic, not yet given to a NATS consumer.",
        labels,
    )?;
    let consumers = page.gauge("broker_consumers", "Who receives from it, where the broker says so.", labels)?;
    for d in depths.iter().filter(|d| d.at.is_some()) {
        let label = &[d.transport.as_str(), d.kind, &d.name, d.group.as_deref().unwrap_or_default()];
        up.with_label_values(label).set(f64::from(u8::from(d.messages.is_some())));
        if let Some(n) = d.messages {
            messages.with_label_values(label).set(n as f64);
        }
        if let Some(n) = d.consumers {
            consumers.with_label_values(label).set(n as f64);
        }
    }
    Ok(())
}
