//! Alerts: how they stand, what happened, and whom to tell.

use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{Connection, MySqlConnection, Row};

use super::relay::{MySqlStore, int, micros, text, text_or_null};
use crate::Error;
use crate::store::{
    ALERTS, AlertChange, AlertEvent, AlertFilter, AlertKind, AlertNotice, AlertReport, AlertRow, AlertSilence, AlertStore,
    AlertWatch, Bisect, InboxWaiting, NOTICES, NoticeOutcome, OLD_EVENTS, OpenNotice, OutboxWaiting, RETRIED_OFTEN, Record,
    Reply, RetryShare, SHARE_CONSUMERS, SHARE_ROWS, Tables, checked_name, checked_subject, on, silence_detail, stored_detail,
};

macro_rules! us {
    ($time:literal) => {
        concat!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', ", $time, ")")
    };
}

macro_rules! ago {
    ($time:literal) => {
        concat!("TIMESTAMPDIFF(MICROSECOND, ", $time, ", UTC_TIMESTAMP(6))")
    };
}

/// A moment that is given in microseconds; NULL stays NULL.
macro_rules! at {
    () => {
        "TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL ? MICROSECOND"
    };
}

// Plan: whole tables, all of them small. One statement each: a union would make one type of columns that have several.
const NOW: &str = concat!(
    "SELECT ",
    us!("UTC_TIMESTAMP(6)"),
    ", (SELECT owner FROM {duty} WHERE duty_name = ? AND lease_until > UTC_TIMESTAMP(6))"
);
const ALERT_ROWS: &str = concat!(
    "SELECT rule, subject, detail, firing, value, threshold, ",
    us!("since"),
    ", ",
    us!("seen_at"),
    ", ",
    us!("told_at"),
    " FROM {alert} ORDER BY rule, subject"
);
const SILENCES: &str = concat!(
    "SELECT rule, subject, actor, reason, ",
    us!("since"),
    ", ",
    us!("ends_at"),
    " FROM {alert_silence} WHERE ends_at > UTC_TIMESTAMP(6) ORDER BY rule, subject"
);
const REPORTS: &str = concat!(
    "SELECT rule, subject, detail, instance, value, ",
    ago!("at"),
    " FROM {alert_report} ORDER BY rule, subject, instance"
);

/// Keeps the duty with its holder until the transaction ends.
const HOLDS: &str = "SELECT 1 FROM {duty} WHERE duty_name = ? AND owner = ? AND lease_until > UTC_TIMESTAMP(6) FOR UPDATE";

const STANDS: &str = concat!(
    "INSERT INTO {alert} (rule, subject, firing, since, value, threshold, detail, told_at, seen_at) VALUES (?, ?, ?, ",
    at!(),
    ", ?, ?, ?, ",
    at!(),
    ", UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE firing = VALUES(firing), since = VALUES(since), value = VALUES(value), \
        threshold = VALUES(threshold), detail = VALUES(detail), told_at = VALUES(told_at), seen_at = VALUES(seen_at)"
);

const FINE: &str = "DELETE FROM {alert} WHERE rule = ? AND subject = ?";

const HAPPENED: &str = concat!(
    "INSERT INTO {alert_event} (rule, subject, kind, since, value, threshold, detail, instance, silenced) VALUES (?, ?, ?, ",
    at!(),
    ", ?, ?, ?, ?, ?)"
);

macro_rules! event {
    () => {
        concat!(
            "e.id, ",
            us!("e.at"),
            ", e.rule, e.subject, e.kind, ",
            us!("e.since"),
            ", e.value, e.threshold, e.detail, e.instance, e.silenced"
        )
    };
}

// Plan: the index of what is open, each event by its primary key.
const OPEN: &str = concat!(
    "SELECT ",
    event!(),
    ", n.channel, n.attempts, n.due_at <= UTC_TIMESTAMP(6), ",
    ago!("e.at"),
    " FROM {alert_notice} n JOIN {alert_event} e ON e.id = n.event WHERE n.due_at > '1000-01-01' ORDER BY n.event, n.channel LIMIT ?"
);

/// The events of a statement, as a table: one text for every number of them.
macro_rules! events {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$')) d STRAIGHT_JOIN {alert_notice} n FORCE INDEX (PRIMARY) \
         ON n.event = d.id AND n.channel = ?"
    };
}

const SENDING: &str = concat!(
    "UPDATE ",
    events!(),
    " SET n.attempts = n.attempts + 1, n.due_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND WHERE n.due_at IS NOT NULL"
);

const SENT: &str = concat!(
    "UPDATE ",
    events!(),
    " SET n.due_at = NULL, n.sent_at = UTC_TIMESTAMP(6), n.error = NULL WHERE n.due_at IS NOT NULL"
);

const NOT_SENT: &str = concat!(
    "UPDATE ",
    events!(),
    " SET n.due_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, n.error = ? WHERE n.due_at IS NOT NULL"
);

// Plan: one read of the pending set; per destination one lookup of the log by its primary key.
const OUTBOX_WAITING: &str = concat!(
    "SELECT w.destination, w.waiting, w.failed, COALESCE((SELECT ",
    ago!("GREATEST(m.created_at, COALESCE(m.deliver_at, m.created_at))"),
    " FROM {message} m WHERE m.id = w.low), (SELECT ",
    ago!("GREATEST(k.created_at, COALESCE(k.deliver_at, k.created_at))"),
    " FROM {kept} k WHERE k.id = w.low)) \
     FROM (SELECT p.destination, COUNT(CASE WHEN p.status <> 'FAILED' AND p.here THEN 1 END) AS waiting, \
               COUNT(CASE WHEN p.status = 'FAILED' THEN 1 END) AS failed, MIN(CASE WHEN p.status <> 'FAILED' AND p.here THEN p.id END) AS low \
          FROM (SELECT id, destination, status, attempts > 0 OR claims > 0 OR due_at IS NULL OR due_at <= UTC_TIMESTAMP(6) AS here \
                  FROM {pending}) p GROUP BY p.destination) w"
);

// Plan: per consumer the end of (consumer, next_attempt_at, success_at); what isn't done is few.
const INBOX_WAITING: &str = concat!(
    "SELECT COUNT(CASE WHEN status <> 'FAILED' THEN 1 END), COUNT(CASE WHEN status = 'FAILED' THEN 1 END), ",
    ago!("MIN(CASE WHEN status <> 'FAILED' THEN first_at END)"),
    " FROM {inbox} WHERE consumer = ? AND next_attempt_at > '1000-01-01'"
);

// Plan: the ends of primary keys; then one lookup of a primary key after another.
const MESSAGES: [&str; 2] = [
    "SELECT MIN(id), MAX(id) FROM {message}",
    "SELECT id, created_at >= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND FROM {message} WHERE id >= ? ORDER BY id LIMIT 1",
];
const ATTEMPTS: [&str; 2] = [
    "SELECT MIN(id), MAX(id) FROM {attempt}",
    "SELECT id, at >= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND FROM {attempt} WHERE id >= ? ORDER BY id LIMIT 1",
];

// Plan: a range at the end of the primary key.
const PUBLISHED: &str = "SELECT COUNT(*) FROM {message} WHERE id >= ?";

// Plan: a range at the end of the primary key, from behind.
const RETRIES: &str = "SELECT COUNT(DISTINCT CASE WHEN attempt >= ? THEN row_id END), COUNT(DISTINCT CASE WHEN row_id < ? THEN row_id END) \
     FROM (SELECT row_id, attempt FROM {attempt} WHERE id >= ? ORDER BY id DESC LIMIT ?) a";

// Plan: one lookup of the primary key.
const CONSUMER: &str = "SELECT MIN(consumer) FROM {inbox} WHERE consumer > ?";

// Plan: two ranges of (consumer, next_attempt_at, success_at): what is done lies under NULL, by the time of its success.
const INBOX_RETRIES: &str = "SELECT COUNT(*), COUNT(CASE WHEN attempts >= ? THEN 1 END) FROM ( \
     (SELECT attempts FROM {inbox} WHERE consumer = ? AND next_attempt_at IS NULL \
         AND success_at >= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND ORDER BY success_at DESC LIMIT ?) \
     UNION ALL (SELECT o.attempts FROM (SELECT attempts, last_at FROM {inbox} WHERE consumer = ? AND next_attempt_at > '1000-01-01' LIMIT ?) o \
       WHERE o.last_at >= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND)) r";

// Plan: the primary key backwards.
const EVENTS: &str =
    concat!("SELECT ", event!(), " FROM {alert_event} e WHERE e.id < ? AND (? IS NULL OR e.rule = ?) ORDER BY e.id DESC LIMIT ?");

// Plan: a range of the primary key.
const NOTICES_OF: &str = concat!(
    "SELECT event, channel, attempts, ",
    us!("sent_at"),
    ", ",
    us!("due_at"),
    ", error FROM {alert_notice} WHERE event >= ? AND event <= ? ORDER BY event, channel"
);

const SILENCE: &str = "INSERT INTO {alert_silence} (rule, subject, ends_at, actor, reason) \
     VALUES (?, ?, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, ?, ?) \
     ON DUPLICATE KEY UPDATE since = UTC_TIMESTAMP(6), ends_at = VALUES(ends_at), actor = VALUES(actor), reason = VALUES(reason)";

// Plan: the first rows of the primary key, however many are old.
const OLD: &str = "SELECT MAX(first.id), COUNT(*) FROM (SELECT id, at FROM {alert_event} ORDER BY id LIMIT ?) first \
     WHERE first.at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND";

const GONE: [&str; 2] = [
    "DELETE FROM {alert_silence} WHERE ends_at <= UTC_TIMESTAMP(6)",
    "DELETE FROM {alert_report} WHERE at < UTC_TIMESTAMP(6) - INTERVAL 1 DAY",
];

/// Ids as the parameter of a statement.
fn listed(ids: &[i64]) -> String {
    format!("{ids:?}")
}

fn span(us: Option<i64>) -> Option<Duration> {
    us.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0)))
}

fn event(r: &MySqlRow) -> Result<AlertEvent, sqlx::Error> {
    Ok(AlertEvent {
        id: int(r, 0)?,
        at_us: int(r, 1)?,
        rule: text(r, 2)?,
        subject: text(r, 3)?,
        kind: AlertKind::parse(&text(r, 4)?),
        since_us: int(r, 5)?,
        value: r.try_get(6)?,
        threshold: r.try_get(7)?,
        detail: text_or_null(r, 8)?,
        instance: text(r, 9)?,
        silenced: r.try_get(10)?,
        notices: Vec::new(),
    })
}

async fn holds(conn: &mut MySqlConnection, tables: &Tables, judge: &str) -> Result<bool, Error> {
    let query = sqlx::query(tables.sql(HOLDS)).bind(ALERTS.as_bytes()).bind(judge.as_bytes());
    Ok(query.fetch_optional(conn).await?.is_some())
}

/// The first row within this time; None where there is none.
async fn first_within(
    conn: &mut MySqlConnection,
    tables: &Tables,
    log: [&'static str; 2],
    within: Duration,
) -> Result<Option<i64>, Error> {
    let (Some(low), Some(high)) = sqlx::query_as(tables.sql(log[0])).fetch_one(&mut *conn).await? else { return Ok(None) };
    let mut bisect = Bisect::new(low, high);
    while let Some(probe) = bisect.probe() {
        let row: Option<(i64, bool)> =
            sqlx::query_as(tables.sql(log[1])).bind(micros(within)).bind(probe).fetch_optional(&mut *conn).await?;
        bisect.saw(probe, row);
    }
    Ok(bisect.found())
}

/// The consumer after this one, by name.
async fn consumer_after(conn: &mut MySqlConnection, tables: &Tables, after: &str) -> Result<Option<String>, Error> {
    let row = sqlx::query(tables.sql(CONSUMER)).bind(after.as_bytes()).fetch_one(conn).await?;
    Ok(text_or_null(&row, 0)?)
}

impl AlertStore for MySqlStore {
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
                    since_us: int(r, 6)?,
                    seen_us: int(r, 7)?,
                    told_us: r.try_get(8)?,
                });
            }
            for r in &sqlx::query(self.tables.sql(SILENCES)).fetch_all(&mut *c).await? {
                out.silences.push(AlertSilence {
                    rule: text(r, 0)?,
                    subject: text(r, 1)?,
                    actor: text(r, 2)?,
                    reason: text(r, 3)?,
                    since_us: int(r, 4)?,
                    until_us: int(r, 5)?,
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
            let now = sqlx::query(self.tables.sql(NOW)).bind(ALERTS.as_bytes()).fetch_one(&mut *c).await?;
            (out.now_us, out.judge) = (int(&now, 0)?, text_or_null(&now, 1)?);
            Ok(out)
        })
    }

    fn judged<'a>(&'a self, judge: &'a str, changes: &'a [AlertChange]) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "writing alerts", |c| {
            let mut tx = c.begin().await?;
            if !holds(&mut tx, &self.tables, judge).await? {
                tx.rollback().await?;
                return Ok(false);
            }
            for change in changes {
                let (rule, subject) = (checked_name("rule", &change.rule, 1)?, checked_subject(&change.subject)?);
                match &change.standing {
                    Some(s) => {
                        sqlx::query(self.tables.sql(STANDS))
                            .bind(rule.as_bytes())
                            .bind(subject.as_bytes())
                            .bind(s.firing)
                            .bind(s.since_us)
                            .bind(s.value)
                            .bind(s.threshold)
                            .bind(stored_detail(s.detail.as_deref()))
                            .bind(s.told_us)
                            .execute(&mut *tx)
                            .await?;
                    }
                    None => {
                        let query = sqlx::query(self.tables.sql(FINE)).bind(rule.as_bytes()).bind(subject.as_bytes());
                        query.execute(&mut *tx).await?;
                    }
                }
                let Some(news) = &change.news else { continue };
                let id = sqlx::query(self.tables.sql(HAPPENED))
                    .bind(rule.as_bytes())
                    .bind(subject.as_bytes())
                    .bind(news.kind.as_str().as_bytes())
                    .bind(news.since_us)
                    .bind(news.value)
                    .bind(news.threshold)
                    .bind(stored_detail(news.detail.as_deref()))
                    .bind(judge.as_bytes())
                    .bind(news.silenced)
                    .execute(&mut *tx)
                    .await?
                    .last_insert_id();
                for channel in &news.channels {
                    let notice = "INSERT INTO {alert_notice} (event, channel) VALUES (?, ?)";
                    let channel = checked_name("channel", channel, 1)?;
                    sqlx::query(self.tables.sql(notice)).bind(id as i64).bind(channel.as_bytes()).execute(&mut *tx).await?;
                }
            }
            tx.commit().await?;
            Ok(true)
        })
    }

    fn report<'a>(&'a self, instance: &'a str, reports: &'a [AlertReport]) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "reporting for alerts", |c| {
            let mut tx = c.begin().await?;
            let old = "DELETE FROM {alert_report} WHERE instance = ?";
            sqlx::query(self.tables.sql(old)).bind(instance.as_bytes()).execute(&mut *tx).await?;
            for report in reports {
                let new = "INSERT IGNORE INTO {alert_report} (instance, rule, subject, value, detail) VALUES (?, ?, ?, ?, ?)";
                sqlx::query(self.tables.sql(new))
                    .bind(instance.as_bytes())
                    .bind(checked_name("rule", &report.rule, 1)?.as_bytes())
                    .bind(checked_subject(&report.subject)?.as_bytes())
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
            let notice = |r: &MySqlRow| {
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
            let mut tx = c.begin().await?;
            if !holds(&mut tx, &self.tables, judge).await? {
                tx.rollback().await?;
                return Ok(false);
            }
            sqlx::query(self.tables.sql(SENDING))
                .bind(listed(events))
                .bind(channel.as_bytes())
                .bind(micros(lease))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(true)
        })
    }

    fn sent<'a>(&'a self, channel: &'a str, events: &'a [i64], outcome: NoticeOutcome<'a>) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "recording notices", |c| {
            let (wait, error) = match outcome {
                NoticeOutcome::Sent => {
                    let query = sqlx::query(self.tables.sql(SENT)).bind(listed(events)).bind(channel.as_bytes());
                    query.execute(&mut *c).await?;
                    return Ok(());
                }
                NoticeOutcome::Retry(error, wait) => (Some(micros(wait)), error),
                NoticeOutcome::GivenUp(error) => (None, error),
            };
            sqlx::query(self.tables.sql(NOT_SENT))
                .bind(listed(events))
                .bind(channel.as_bytes())
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
            let line = |r: &MySqlRow| {
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
            let mut out: Vec<InboxWaiting> = Vec::new();
            let mut after = String::new();
            while let Some(consumer) = consumer_after(&mut *c, &self.tables, &after).await? {
                after.clone_from(&consumer);
                let r = sqlx::query(self.tables.sql(INBOX_WAITING)).bind(consumer.as_bytes()).fetch_one(&mut *c).await?;
                let line = InboxWaiting { consumer, waiting: int(&r, 0)?, failed: int(&r, 1)?, oldest: span(r.try_get(2)?) };
                if line.waiting + line.failed > 0 {
                    out.push(line);
                }
            }
            Ok(out)
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
                    .bind(RETRIED_OFTEN)
                    .bind(published.unwrap_or(i64::MAX))
                    .bind(first)
                    .bind(SHARE_ROWS)
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
                let Some(consumer) = consumer_after(&mut *c, &self.tables, after).await? else { break };
                let (messages, retried) = sqlx::query_as(self.tables.sql(INBOX_RETRIES))
                    .bind(RETRIED_OFTEN)
                    .bind(consumer.as_bytes())
                    .bind(micros(within))
                    .bind(SHARE_ROWS)
                    .bind(consumer.as_bytes())
                    .bind(SHARE_ROWS)
                    .bind(micros(within))
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
                .bind(filter.rule.as_deref().map(str::as_bytes))
                .bind(filter.rule.as_deref().map(str::as_bytes))
                .bind(filter.limit)
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
            let mut tx = c.begin().await?;
            sqlx::query(self.tables.sql(SILENCE))
                .bind(checked_name("rule", rule, 0)?.as_bytes())
                .bind(checked_subject(subject)?.as_bytes())
                .bind(micros(time))
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
        const END: &str = "DELETE FROM {alert_silence} WHERE rule = ? AND subject = ? AND ends_at > UTC_TIMESTAMP(6)";
        on!(self.work, self.deadline, "ending a silence", |c| {
            let mut tx = c.begin().await?;
            let done = sqlx::query(self.tables.sql(END)).bind(rule.as_bytes()).bind(subject.as_bytes()).execute(&mut *tx).await?;
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
                sqlx::query_as(self.tables.sql(OLD)).bind(OLD_EVENTS).bind(micros(older)).fetch_one(&mut *c).await?;
            if let Some(last) = last {
                // Notices first: without its event nobody finds one.
                for sql in ["DELETE FROM {alert_notice} WHERE event <= ?", "DELETE FROM {alert_event} WHERE id <= ?"] {
                    sqlx::query(self.tables.sql(sql)).bind(last).execute(&mut *c).await?;
                }
            }
            Ok(old as u64)
        })
    }
}
