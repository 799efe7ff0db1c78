//! Alerts: how they stand, what happened, and whom to tell. Times are milliseconds here, and microseconds outside.

use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row, SqliteConnection};

use super::now;
use super::relay::{SqliteStore, json, millis, text, text_or_null};
use crate::Error;
use crate::store::{
    ALERTS, AlertChange, AlertEvent, AlertFilter, AlertKind, AlertNotice, AlertReport, AlertRow, AlertSilence, AlertStore,
    AlertWatch, Bisect, InboxWaiting, NOTICES, NoticeOutcome, OLD_EVENTS, OpenNotice, OutboxWaiting, RETRIED_OFTEN, Record,
    Reply, RetryShare, SHARE_CONSUMERS, SHARE_ROWS, Tables, checked_name, checked_subject, on, silence_detail, stored_detail,
};

// Plan: whole tables, all of them small.
const NOW: &str = concat!("SELECT ", now!(), ", (SELECT owner FROM {duty} WHERE duty_name = ?1 AND lease_until > ", now!(), ")");
const ALERT_ROWS: &str = "SELECT rule, subject, detail, firing, value, threshold, since * 1000, seen_at * 1000, told_at * 1000 \
     FROM {alert} ORDER BY rule, subject";
const SILENCES: &str = concat!(
    "SELECT rule, subject, actor, reason, since * 1000, ends_at * 1000 FROM {alert_silence} WHERE ends_at > ",
    now!(),
    " ORDER BY rule, subject"
);
const REPORTS: &str = concat!(
    "SELECT rule, subject, detail, instance, value, (",
    now!(),
    " - at) * 1000 FROM {alert_report} ORDER BY rule, subject, instance"
);

const HOLDS: &str = concat!("SELECT 1 FROM {duty} WHERE duty_name = ?1 AND owner = ?2 AND lease_until > ", now!());

const STANDS: &str = concat!(
    "INSERT INTO {alert} (rule, subject, firing, since, value, threshold, detail, told_at, seen_at) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ",
    now!(),
    ") ON CONFLICT (rule, subject) DO UPDATE SET firing = excluded.firing, since = excluded.since, value = excluded.value, \
        threshold = excluded.threshold, detail = excluded.detail, told_at = excluded.told_at, seen_at = excluded.seen_at"
);

const FINE: &str = "DELETE FROM {alert} WHERE rule = ?1 AND subject = ?2";

const HAPPENED: &str = "INSERT INTO {alert_event} (rule, subject, kind, since, value, threshold, detail, instance, silenced) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";

macro_rules! event {
    () => {
        "e.id, e.at * 1000, e.rule, e.subject, e.kind, e.since * 1000, e.value, e.threshold, e.detail, e.instance, e.silenced"
    };
}

// Plan: the partial index alert_notice_open, each event by its primary key.
const OPEN: &str = concat!(
    "SELECT ",
    event!(),
    ", n.channel, n.attempts, n.due_at <= ",
    now!(),
    ", (",
    now!(),
    " - e.at) * 1000 FROM {alert_notice} n INDEXED BY {-alert_notice_open} JOIN {alert_event} e ON e.id = n.event \
     WHERE n.due_at IS NOT NULL ORDER BY n.event, n.channel LIMIT ?1"
);

/// The notices of a statement that are still open: a channel, and events as a JSON array.
macro_rules! open {
    () => {
        " WHERE channel = ?1 AND event IN (SELECT value FROM json_each(?2)) AND due_at IS NOT NULL"
    };
}

const SENDING: &str = concat!("UPDATE {alert_notice} SET attempts = attempts + 1, due_at = ", now!(), " + ?3", open!());

const SENT: &str = concat!("UPDATE {alert_notice} SET due_at = NULL, sent_at = ", now!(), ", error = NULL", open!());

const NOT_SENT: &str = concat!("UPDATE {alert_notice} SET due_at = ", now!(), " + ?3, error = ?4", open!());

// Plan: one read of the pending set; per destination one lookup of the log by its primary key.
const OUTBOX_WAITING: &str = concat!(
    "SELECT w.destination, w.waiting, w.failed, (",
    now!(),
    " - (SELECT max(m.created_at, coalesce(m.deliver_at, m.created_at)) FROM {message} m WHERE m.id = w.low)) * 1000 \
     FROM (SELECT p.destination, count(*) FILTER (WHERE p.status <> 'FAILED' AND p.here) AS waiting, \
               count(*) FILTER (WHERE p.status = 'FAILED') AS failed, min(p.id) FILTER (WHERE p.status <> 'FAILED' AND p.here) AS low \
          FROM (SELECT id, destination, status, attempts > 0 OR claims > 0 OR due_at IS NULL OR due_at <= ",
    now!(),
    " AS here FROM {pending}) p GROUP BY 1) w"
);

// Plan: the partial index of what isn't done (its rows are few).
const INBOX_WAITING: &str = concat!(
    "SELECT consumer, count(*) FILTER (WHERE status <> 'FAILED'), count(*) FILTER (WHERE status = 'FAILED'), (",
    now!(),
    " - min(first_at) FILTER (WHERE status <> 'FAILED')) * 1000 \
     FROM {inbox} INDEXED BY {-inbox_due} WHERE next_attempt_at IS NOT NULL GROUP BY 1"
);

// Plan: the ends of primary keys; then one lookup of a primary key after another.
const MESSAGES: [&str; 2] = [
    "SELECT (SELECT min(id) FROM {message}), (SELECT max(id) FROM {message})",
    concat!("SELECT id, created_at >= ", now!(), " - ?2 FROM {message} WHERE id >= ?1 ORDER BY id LIMIT 1"),
];
const ATTEMPTS: [&str; 2] = [
    "SELECT (SELECT min(id) FROM {attempt}), (SELECT max(id) FROM {attempt})",
    concat!("SELECT id, at >= ", now!(), " - ?2 FROM {attempt} WHERE id >= ?1 ORDER BY id LIMIT 1"),
];

// Plan: a range at the end of the primary key.
const PUBLISHED: &str = "SELECT count(*) FROM {message} WHERE id >= ?1";

// Plan: a range at the end of the primary key, from behind.
const RETRIES: &str = "SELECT count(DISTINCT CASE WHEN attempt >= ?3 THEN row_id END), count(DISTINCT CASE WHEN row_id < ?4 THEN row_id END) \
     FROM (SELECT row_id, attempt FROM {attempt} WHERE id >= ?1 ORDER BY id DESC LIMIT ?2)";

// Plan: one lookup of the primary key.
const CONSUMER: &str = "SELECT min(consumer) FROM {inbox} WHERE consumer > ?1";

// Plan: a range of (consumer, success_at), from behind; the partial index of what isn't done.
const INBOX_RETRIES: &str = concat!(
    "SELECT count(*), count(*) FILTER (WHERE attempts >= ?4) FROM ( \
       SELECT * FROM (SELECT attempts FROM {inbox} INDEXED BY {-inbox_done} WHERE consumer = ?1 AND success_at >= ",
    now!(),
    " - ?2 ORDER BY success_at DESC LIMIT ?3) UNION ALL SELECT o.attempts FROM (SELECT attempts, last_at \
         FROM {inbox} INDEXED BY {-inbox_due} WHERE consumer = ?1 AND next_attempt_at IS NOT NULL LIMIT ?3) o WHERE o.last_at >= ",
    now!(),
    " - ?2)"
);

// Plan: the primary key backwards.
const EVENTS: &str = concat!(
    "SELECT ",
    event!(),
    " FROM {alert_event} e WHERE e.id < ?1 AND (?2 IS NULL OR e.rule = ?2) ORDER BY e.id DESC LIMIT ?3"
);

// Plan: a range of the primary key.
const NOTICES_OF: &str = "SELECT event, channel, attempts, sent_at * 1000, due_at * 1000, error FROM {alert_notice} \
     WHERE event >= ?1 AND event <= ?2 ORDER BY event, channel";

const SILENCE: &str = concat!(
    "INSERT INTO {alert_silence} (rule, subject, ends_at, actor, reason) VALUES (?1, ?2, ",
    now!(),
    " + ?3, ?4, ?5) ON CONFLICT (rule, subject) DO UPDATE SET since = ",
    now!(),
    ", ends_at = excluded.ends_at, actor = excluded.actor, reason = excluded.reason"
);

// Plan: the first rows of the primary key, however many are old.
const OLD: &str =
    concat!("SELECT max(id), count(*) FROM (SELECT id, at FROM {alert_event} ORDER BY id LIMIT ?1) WHERE at < ", now!(), " - ?2");

const GONE: [&str; 2] = [
    concat!("DELETE FROM {alert_silence} WHERE ends_at <= ", now!()),
    concat!("DELETE FROM {alert_report} WHERE at < ", now!(), " - 86400000"),
];

fn span(us: Option<i64>) -> Option<Duration> {
    us.map(|us| Duration::from_millis(u64::try_from(us).unwrap_or(0)))
}

fn event(r: &SqliteRow) -> Result<AlertEvent, sqlx::Error> {
    Ok(AlertEvent {
        id: r.try_get(0)?,
        at_us: r.try_get(1)?,
        rule: text(r, 2)?,
        subject: text(r, 3)?,
        kind: AlertKind::parse(&text(r, 4)?),
        since_us: r.try_get(5)?,
        value: r.try_get(6)?,
        threshold: r.try_get(7)?,
        detail: text_or_null(r, 8)?,
        instance: text(r, 9)?,
        silenced: r.try_get(10)?,
        notices: Vec::new(),
    })
}

fn ms(us: i64) -> i64 {
    us.div_euclid(1_000)
}

async fn holds(conn: &mut SqliteConnection, tables: &Tables, judge: &str) -> Result<bool, Error> {
    let query = sqlx::query(tables.sql(HOLDS)).bind(ALERTS).bind(judge);
    Ok(query.fetch_optional(conn).await?.is_some())
}

/// The first row within this time; None where there is none.
async fn first_within(
    conn: &mut SqliteConnection,
    tables: &Tables,
    log: [&'static str; 2],
    within: Duration,
) -> Result<Option<i64>, Error> {
    let (Some(low), Some(high)) = sqlx::query_as(tables.sql(log[0])).fetch_one(&mut *conn).await? else { return Ok(None) };
    let mut bisect = Bisect::new(low, high);
    while let Some(probe) = bisect.probe() {
        let row: Option<(i64, bool)> =
            sqlx::query_as(tables.sql(log[1])).bind(probe).bind(millis(within)).fetch_optional(&mut *conn).await?;
        bisect.saw(probe, row);
    }
    Ok(bisect.found())
}

impl AlertStore for SqliteStore {
    fn watch(&self) -> Reply<'_, AlertWatch> {
        on!(self.work, self.deadline, "looking at alerts", |c| {
            let mut out = AlertWatch::default();
            for r in &sqlx::query(self.tables.sql(ALERT_ROWS)).fetch_all(&mut *c).await? {
                out.alerts.push(AlertRow {
                    rule: text(r, 0)?,
                    subject: text(r, 1)?,
                    detail: text_or_null(r, 2)?,
                    firing: r.try_get(3)?,
                    value: r.try_get(4)?,
                    threshold: r.try_get(5)?,
                    since_us: r.try_get(6)?,
                    seen_us: r.try_get(7)?,
                    told_us: r.try_get(8)?,
                });
            }
            for r in &sqlx::query(self.tables.sql(SILENCES)).fetch_all(&mut *c).await? {
                out.silences.push(AlertSilence {
                    rule: text(r, 0)?,
                    subject: text(r, 1)?,
                    actor: text(r, 2)?,
                    reason: text(r, 3)?,
                    since_us: r.try_get(4)?,
                    until_us: r.try_get(5)?,
                });
            }
            for r in &sqlx::query(self.tables.sql(REPORTS)).fetch_all(&mut *c).await? {
                out.reports.push((
                    text(r, 3)?,
                    span(r.try_get(5)?).unwrap_or_default(),
                    AlertReport { rule: text(r, 0)?, subject: text(r, 1)?, detail: text_or_null(r, 2)?, value: r.try_get(4)? },
                ));
            }
            // The clock comes last: nothing that was read is newer.
            let now = sqlx::query(self.tables.sql(NOW)).bind(ALERTS).fetch_one(&mut *c).await?;
            (out.now_us, out.judge) = (now.try_get::<i64, _>(0)?.saturating_mul(1_000), text_or_null(&now, 1)?);
            Ok(out)
        })
    }

    fn judged<'a>(&'a self, judge: &'a str, changes: &'a [AlertChange]) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "writing alerts", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            if !holds(&mut tx, &self.tables, judge).await? {
                tx.rollback().await?;
                return Ok(false);
            }
            for change in changes {
                let (rule, subject) = (checked_name("rule", &change.rule, 1)?, checked_subject(&change.subject)?);
                match &change.standing {
                    Some(s) => {
                        sqlx::query(self.tables.sql(STANDS))
                            .bind(rule)
                            .bind(subject)
                            .bind(s.firing)
                            .bind(ms(s.since_us))
                            .bind(s.value)
                            .bind(s.threshold)
                            .bind(stored_detail(s.detail.as_deref()))
                            .bind(s.told_us.map(ms))
                            .execute(&mut *tx)
                            .await?;
                    }
                    None => {
                        let query = sqlx::query(self.tables.sql(FINE)).bind(rule).bind(subject);
                        query.execute(&mut *tx).await?;
                    }
                }
                let Some(news) = &change.news else { continue };
                let id = sqlx::query(self.tables.sql(HAPPENED))
                    .bind(rule)
                    .bind(subject)
                    .bind(news.kind.as_str())
                    .bind(ms(news.since_us))
                    .bind(news.value)
                    .bind(news.threshold)
                    .bind(stored_detail(news.detail.as_deref()))
                    .bind(judge)
                    .bind(news.silenced)
                    .execute(&mut *tx)
                    .await?
                    .last_insert_rowid();
                for channel in &news.channels {
                    let notice = "INSERT INTO {alert_notice} (event, channel) VALUES (?1, ?2)";
                    let channel = checked_name("channel", channel, 1)?;
                    sqlx::query(self.tables.sql(notice)).bind(id).bind(channel).execute(&mut *tx).await?;
                }
            }
            tx.commit().await?;
            Ok(true)
        })
    }

    fn report<'a>(&'a self, instance: &'a str, reports: &'a [AlertReport]) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "reporting for alerts", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let old = "DELETE FROM {alert_report} WHERE instance = ?1";
            sqlx::query(self.tables.sql(old)).bind(instance).execute(&mut *tx).await?;
            for report in reports {
                let new = "INSERT INTO {alert_report} (instance, rule, subject, value, detail) VALUES (?1, ?2, ?3, ?4, ?5) \
                           ON CONFLICT (instance, rule, subject) DO NOTHING";
                sqlx::query(self.tables.sql(new))
                    .bind(instance)
                    .bind(checked_name("rule", &report.rule, 1)?)
                    .bind(checked_subject(&report.subject)?)
                    .bind(report.value)
                    .bind(stored_detail(report.detail.as_deref()))
                    .execute(&mut *tx)
                    .await?;
            }
            tx.commit().await?;
            Ok(())
        })
    }

    fn open_notices(&self) -> Reply<'_, Vec<OpenNotice>> {
        on!(self.work, self.deadline, "looking for notices", |c| {
            let rows = sqlx::query(self.tables.sql(OPEN)).bind(NOTICES).fetch_all(&mut *c).await?;
            let notice = |r: &SqliteRow| {
                Ok(OpenNotice {
                    event: event(r)?,
                    channel: text(r, 11)?,
                    attempts: r.try_get(12)?,
                    due: r.try_get(13)?,
                    age: span(r.try_get(14)?).unwrap_or_default(),
                })
            };
            Ok(rows.iter().map(notice).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn sending<'a>(&'a self, judge: &'a str, channel: &'a str, events: &'a [i64], lease: Duration) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "sending notices", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            if !holds(&mut tx, &self.tables, judge).await? {
                tx.rollback().await?;
                return Ok(false);
            }
            let query = sqlx::query(self.tables.sql(SENDING)).bind(channel).bind(json(events)?).bind(millis(lease));
            query.execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(true)
        })
    }

    fn sent<'a>(&'a self, channel: &'a str, events: &'a [i64], outcome: NoticeOutcome<'a>) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "recording notices", |c| {
            let (wait, error) = match outcome {
                NoticeOutcome::Sent => {
                    sqlx::query(self.tables.sql(SENT)).bind(channel).bind(json(events)?).execute(&mut *c).await?;
                    return Ok(());
                }
                NoticeOutcome::Retry(error, wait) => (Some(millis(wait)), error),
                NoticeOutcome::GivenUp(error) => (None, error),
            };
            sqlx::query(self.tables.sql(NOT_SENT))
                .bind(channel)
                .bind(json(events)?)
                .bind(wait)
                .bind(stored_detail(Some(error)))
                .execute(&mut *c)
                .await?;
            Ok(())
        })
    }

    fn outbox_waiting(&self) -> Reply<'_, Vec<OutboxWaiting>> {
        on!(self.work, self.deadline, "counting what waits", |c| {
            let rows = sqlx::query(self.tables.sql(OUTBOX_WAITING)).fetch_all(&mut *c).await?;
            let line = |r: &SqliteRow| {
                Ok(OutboxWaiting {
                    destination: text(r, 0)?,
                    waiting: r.try_get(1)?,
                    failed: r.try_get(2)?,
                    oldest: span(r.try_get(3)?),
                })
            };
            Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn inbox_waiting(&self) -> Reply<'_, Vec<InboxWaiting>> {
        on!(self.work, self.deadline, "counting what consumers wait with", |c| {
            let rows = sqlx::query(self.tables.sql(INBOX_WAITING)).fetch_all(&mut *c).await?;
            let line = |r: &SqliteRow| {
                Ok(InboxWaiting {
                    consumer: text(r, 0)?,
                    waiting: r.try_get(1)?,
                    failed: r.try_get(2)?,
                    oldest: span(r.try_get(3)?),
                })
            };
            Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn outbox_retries(&self, within: Duration) -> Reply<'_, RetryShare> {
        on!(self.work, self.deadline, "counting retries", |c| {
            let published = first_within(&mut *c, &self.tables, MESSAGES, within).await?;
            let tried = first_within(&mut *c, &self.tables, ATTEMPTS, within).await?;
            let mut share = RetryShare::default();
            if let Some(first) = published {
                let most: i64 = sqlx::query_scalar(self.tables.sql("SELECT max(id) FROM {message}")).fetch_one(&mut *c).await?;
                share.messages = most - first + 1;
                // Ids have gaps, which matter where there are few.
                if share.messages <= SHARE_ROWS {
                    share.messages = sqlx::query_scalar(self.tables.sql(PUBLISHED)).bind(first).fetch_one(&mut *c).await?;
                }
            }
            if let Some(first) = tried {
                let (retried, older): (i64, i64) = sqlx::query_as(self.tables.sql(RETRIES))
                    .bind(first)
                    .bind(SHARE_ROWS)
                    .bind(RETRIED_OFTEN)
                    .bind(published.unwrap_or(i64::MAX))
                    .fetch_one(&mut *c)
                    .await?;
                share.retried = retried;
                share.messages += older;
            }
            Ok(share)
        })
    }

    fn inbox_retries(&self, within: Duration) -> Reply<'_, Vec<(String, RetryShare)>> {
        on!(self.work, self.deadline, "counting retries of consumers", |c| {
            let mut out: Vec<(String, RetryShare)> = Vec::new();
            while out.len() < SHARE_CONSUMERS {
                let after = out.last().map_or("", |(consumer, _)| consumer.as_str());
                let next: Option<String> = sqlx::query_scalar(self.tables.sql(CONSUMER)).bind(after).fetch_one(&mut *c).await?;
                let Some(consumer) = next else { break };
                let (messages, retried) = sqlx::query_as(self.tables.sql(INBOX_RETRIES))
                    .bind(&consumer)
                    .bind(millis(within))
                    .bind(SHARE_ROWS)
                    .bind(RETRIED_OFTEN)
                    .fetch_one(&mut *c)
                    .await?;
                out.push((consumer, RetryShare { messages, retried }));
            }
            Ok(out)
        })
    }

    fn events<'a>(&'a self, filter: &'a AlertFilter) -> Reply<'a, Vec<AlertEvent>> {
        on!(self.work, self.deadline, "history of alerts", |c| {
            let rows = sqlx::query(self.tables.sql(EVENTS))
                .bind(filter.before.unwrap_or(i64::MAX))
                .bind(filter.rule.as_deref())
                .bind(i64::from(filter.limit))
                .fetch_all(&mut *c)
                .await?;
            let mut events: Vec<AlertEvent> = rows.iter().map(event).collect::<Result<_, _>>()?;
            let (Some(high), Some(low)) = (events.first().map(|e| e.id), events.last().map(|e| e.id)) else { return Ok(events) };
            for r in &sqlx::query(self.tables.sql(NOTICES_OF)).bind(low).bind(high).fetch_all(&mut *c).await? {
                let id: i64 = r.try_get(0)?;
                let Some(event) = events.iter_mut().find(|e| e.id == id) else { continue };
                event.notices.push(AlertNotice {
                    channel: text(r, 1)?,
                    attempts: r.try_get(2)?,
                    sent_us: r.try_get(3)?,
                    due_us: r.try_get(4)?,
                    error: text_or_null(r, 5)?,
                });
            }
            Ok(events)
        })
    }

    fn silence<'a>(&'a self, rule: &'a str, subject: &'a str, time: Duration, actor: &'a str, reason: &'a str) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "silencing an alert", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            sqlx::query(self.tables.sql(SILENCE))
                .bind(checked_name("rule", rule, 0)?)
                .bind(checked_subject(subject)?)
                .bind(millis(time))
                .bind(actor)
                .bind(stored_detail(Some(reason)))
                .execute(&mut *tx)
                .await?;
            let detail = silence_detail(rule, subject, &format!(" for {time:?}: {reason}"));
            let record = Record { actor, action: "alert silence", detail: &detail, amount: None };
            super::audit::record(&mut tx, &self.tables, &record).await?;
            tx.commit().await?;
            Ok(())
        })
    }

    fn unsilence<'a>(&'a self, rule: &'a str, subject: &'a str, actor: &'a str) -> Reply<'a, bool> {
        const END: &str = concat!("DELETE FROM {alert_silence} WHERE rule = ?1 AND subject = ?2 AND ends_at > ", now!());
        on!(self.work, self.deadline, "ending a silence", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let done = sqlx::query(self.tables.sql(END)).bind(rule).bind(subject).execute(&mut *tx).await?;
            if done.rows_affected() == 0 {
                tx.rollback().await?;
                return Ok(false);
            }
            let detail = silence_detail(rule, subject, "");
            let record = Record { actor, action: "alert unsilence", detail: &detail, amount: None };
            super::audit::record(&mut tx, &self.tables, &record).await?;
            tx.commit().await?;
            Ok(true)
        })
    }

    fn tidy_alerts(&self, older: Duration) -> Reply<'_, u64> {
        on!(self.work, self.deadline, "removing old alerts", |c| {
            for gone in GONE {
                sqlx::query(self.tables.sql(gone)).execute(&mut *c).await?;
            }
            let (last, old): (Option<i64>, i64) =
                sqlx::query_as(self.tables.sql(OLD)).bind(OLD_EVENTS).bind(millis(older)).fetch_one(&mut *c).await?;
            if let Some(last) = last {
                // Notices first: without its event nobody finds one.
                for sql in ["DELETE FROM {alert_notice} WHERE event <= ?1", "DELETE FROM {alert_event} WHERE id <= ?1"] {
                    sqlx::query(self.tables.sql(sql)).bind(last).execute(&mut *c).await?;
                }
            }
            Ok(old as u64)
        })
    }
}
