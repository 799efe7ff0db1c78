//! Alerts: how they stand, what happened, and whom to tell.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};

use super::relay::{PostgresStore, micros};
use crate::Error;
use crate::store::{
    ALERTS, AlertChange, AlertEvent, AlertFilter, AlertKind, AlertNotice, AlertReport, AlertRow, AlertSilence, AlertStore,
    AlertWatch, Bisect, InboxWaiting, NOTICES, NoticeOutcome, OLD_EVENTS, OpenNotice, OutboxWaiting, RETRIED_OFTEN, Record,
    Reply, RetryShare, SHARE_CONSUMERS, SHARE_ROWS, Tables, checked_name, checked_subject, on, silence_detail, stored_detail,
};

macro_rules! us {
    ($time:literal) => {
        concat!("(extract(epoch FROM ", $time, ") * 1000000)::bigint")
    };
}

macro_rules! at {
    ($us:literal) => {
        concat!("'epoch'::timestamptz + ", $us, " * interval '1 microsecond'")
    };
}

// Plan: whole tables, all of them small.
const WATCH: &str = concat!(
    "SELECT 0 AS what, (SELECT owner FROM {duty} WHERE duty_name = $1 AND lease_until > clock_timestamp()) AS a, \
        NULL::text AS b, NULL::text AS c, NULL::text AS d, NULL::boolean AS firing, NULL::float8 AS value, NULL::float8 AS threshold, ",
    us!("clock_timestamp()"),
    " AS x, NULL::bigint AS y, NULL::bigint AS z \
     UNION ALL SELECT 1, rule, subject, detail, NULL, firing, value, threshold, ",
    us!("since"),
    ", ",
    us!("seen_at"),
    ", ",
    us!("told_at"),
    " FROM {alert} UNION ALL SELECT 2, rule, subject, actor, reason, NULL, NULL, NULL, ",
    us!("since"),
    ", ",
    us!("ends_at"),
    ", NULL FROM {alert_silence} WHERE ends_at > clock_timestamp() \
     UNION ALL SELECT 3, rule, subject, detail, instance, NULL, value, NULL, ",
    us!("clock_timestamp() - at"),
    ", NULL, NULL FROM {alert_report} ORDER BY 1, 2, 3"
);

/// Keeps the duty with its holder until the transaction ends.
const HOLDS: &str = "SELECT true FROM {duty} WHERE duty_name = $1 AND owner = $2 AND lease_until > clock_timestamp() FOR UPDATE";

const STANDS: &str = concat!(
    "INSERT INTO {alert} (rule, subject, firing, since, value, threshold, detail, told_at, seen_at) VALUES ($1, $2, $3, ",
    at!("$4"),
    ", $5, $6, $7, ",
    at!("$8"),
    ", clock_timestamp()) ON CONFLICT (rule, subject) DO UPDATE SET firing = EXCLUDED.firing, since = EXCLUDED.since, \
        value = EXCLUDED.value, threshold = EXCLUDED.threshold, detail = EXCLUDED.detail, told_at = EXCLUDED.told_at, \
        seen_at = EXCLUDED.seen_at"
);

const FINE: &str = "DELETE FROM {alert} WHERE rule = $1 AND subject = $2";

const HAPPENED: &str = concat!(
    "INSERT INTO {alert_event} (rule, subject, kind, since, value, threshold, detail, instance, silenced) VALUES ($1, $2, $3, ",
    at!("$4"),
    ", $5, $6, $7, $8, $9) RETURNING id"
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

// Plan: the partial index alert_notice_open, each event by its primary key.
const OPEN: &str = concat!(
    "SELECT ",
    event!(),
    ", n.channel, n.attempts, n.due_at <= clock_timestamp(), ",
    us!("clock_timestamp() - e.at"),
    " FROM {alert_notice} n JOIN {alert_event} e ON e.id = n.event WHERE n.due_at IS NOT NULL ORDER BY n.event, n.channel LIMIT $1"
);

const SENDING: &str = "UPDATE {alert_notice} SET attempts = attempts + 1, due_at = clock_timestamp() + $3 * interval '1 microsecond' \
     WHERE channel = $1 AND event = ANY($2) AND due_at IS NOT NULL";

const SENT: &str = "UPDATE {alert_notice} SET due_at = NULL, sent_at = clock_timestamp(), error = NULL \
     WHERE channel = $1 AND event = ANY($2) AND due_at IS NOT NULL";

const NOT_SENT: &str = "UPDATE {alert_notice} SET due_at = clock_timestamp() + $3 * interval '1 microsecond', error = $4 \
     WHERE channel = $1 AND event = ANY($2) AND due_at IS NOT NULL";

// Plan: one read of the pending set; per destination one lookup of the log by its primary key.
const OUTBOX_WAITING: &str = concat!(
    "SELECT w.destination, w.waiting, w.failed, ",
    us!("clock_timestamp() - coalesce((SELECT greatest(m.created_at, m.deliver_at) FROM {message} m WHERE m.id = w.low), \
         (SELECT greatest(k.created_at, k.deliver_at) FROM {kept} k WHERE k.id = w.low))"),
    " FROM (SELECT p.destination, count(*) FILTER (WHERE p.status <> 'FAILED' AND p.here) AS waiting, \
               count(*) FILTER (WHERE p.status = 'FAILED') AS failed, min(p.id) FILTER (WHERE p.status <> 'FAILED' AND p.here) AS low \
          FROM (SELECT id, destination, status, attempts > 0 OR claims > 0 OR due_at IS NULL OR due_at <= clock_timestamp() AS here \
                  FROM {pending}) p GROUP BY 1) w"
);

// Plan: the partial index of what isn't done (its rows are few).
const INBOX_WAITING: &str = concat!(
    "SELECT consumer, count(*) FILTER (WHERE status <> 'FAILED'), count(*) FILTER (WHERE status = 'FAILED'), ",
    us!("clock_timestamp() - min(first_at) FILTER (WHERE status <> 'FAILED')"),
    " FROM {inbox} WHERE next_attempt_at IS NOT NULL GROUP BY 1"
);

// Plan: the ends of primary keys; then one lookup of a primary key after another.
const MESSAGES: [&str; 2] = [
    "SELECT min(id), max(id) FROM {message}",
    "SELECT id, created_at >= clock_timestamp() - $2 * interval '1 microsecond' FROM {message} WHERE id >= $1 ORDER BY id LIMIT 1",
];
const ATTEMPTS: [&str; 2] = [
    "SELECT min(id), max(id) FROM {attempt}",
    "SELECT id, at >= clock_timestamp() - $2 * interval '1 microsecond' FROM {attempt} WHERE id >= $1 ORDER BY id LIMIT 1",
];

// Plan: a range at the end of the primary key.
const PUBLISHED: &str = "SELECT count(*) FROM {message} WHERE id >= $1";

// Plan: a range at the end of the primary key, from behind.
const RETRIES: &str = "SELECT count(DISTINCT row_id) FILTER (WHERE attempt >= $3), count(DISTINCT row_id) FILTER (WHERE row_id < $4) \
     FROM (SELECT row_id, attempt FROM {attempt} WHERE id >= $1 ORDER BY id DESC LIMIT $2) a";

// Plan: one lookup of the primary key.
const CONSUMER: &str = "SELECT min(consumer) FROM {inbox} WHERE consumer > $1";

// Plan: a range of (consumer, success_at), from behind; the partial index of what isn't done. With a clock that moves within the
// statement the time would be no bound of a range, and all that the consumer ever did would be read.
const INBOX_RETRIES: &str = "SELECT count(*), count(*) FILTER (WHERE attempts >= $4) FROM ( \
     (SELECT attempts FROM {inbox} WHERE consumer = $1 AND success_at >= statement_timestamp() - $2 * interval '1 microsecond' \
       ORDER BY success_at DESC LIMIT $3) \
     UNION ALL (SELECT o.attempts FROM (SELECT attempts, last_at FROM {inbox} WHERE consumer = $1 AND next_attempt_at IS NOT NULL LIMIT $3) o \
       WHERE o.last_at >= statement_timestamp() - $2 * interval '1 microsecond')) r";

// Plan: the primary key backwards.
const EVENTS: &str = concat!(
    "SELECT ",
    event!(),
    " FROM {alert_event} e WHERE e.id < $1 AND ($2::text IS NULL OR e.rule = $2) ORDER BY e.id DESC LIMIT $3"
);

// Plan: a range of the primary key.
const NOTICES_OF: &str = concat!(
    "SELECT event, channel, attempts, ",
    us!("sent_at"),
    ", ",
    us!("due_at"),
    ", error FROM {alert_notice} WHERE event >= $1 AND event <= $2 ORDER BY event, channel"
);

const SILENCE: &str = "INSERT INTO {alert_silence} (rule, subject, ends_at, actor, reason) \
     VALUES ($1, $2, clock_timestamp() + $3 * interval '1 microsecond', $4, $5) \
     ON CONFLICT (rule, subject) DO UPDATE SET since = clock_timestamp(), ends_at = EXCLUDED.ends_at, actor = EXCLUDED.actor, \
        reason = EXCLUDED.reason";

// Plan: the first rows of the primary key, however many are old.
const OLD: &str = "WITH old AS (DELETE FROM {alert_event} WHERE id IN (SELECT id FROM (SELECT id, at FROM {alert_event} ORDER BY id LIMIT $2) first \
        WHERE first.at < clock_timestamp() - $1 * interval '1 microsecond') RETURNING id), \
     told AS (DELETE FROM {alert_notice} n USING old WHERE n.event = old.id) SELECT count(*) FROM old";

const GONE: [&str; 2] = [
    "DELETE FROM {alert_silence} WHERE ends_at <= clock_timestamp()",
    "DELETE FROM {alert_report} WHERE at < clock_timestamp() - interval '1 day'",
];

fn span(us: Option<i64>) -> Option<Duration> {
    us.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0)))
}

fn event(r: &PgRow) -> Result<AlertEvent, sqlx::Error> {
    Ok(AlertEvent {
        id: r.try_get(0)?,
        at_us: r.try_get(1)?,
        rule: r.try_get(2)?,
        subject: r.try_get(3)?,
        kind: AlertKind::parse(r.try_get(4)?),
        since_us: r.try_get(5)?,
        value: r.try_get(6)?,
        threshold: r.try_get(7)?,
        detail: r.try_get(8)?,
        instance: r.try_get(9)?,
        silenced: r.try_get(10)?,
        notices: Vec::new(),
    })
}

async fn holds(conn: &mut PgConnection, tables: &Tables, judge: &str) -> Result<bool, Error> {
    let held: Option<bool> = sqlx::query_scalar(tables.sql(HOLDS)).bind(ALERTS).bind(judge).fetch_optional(conn).await?;
    Ok(held.is_some())
}

/// The first row within this time; None where there is none.
async fn first_within(
    conn: &mut PgConnection,
    tables: &Tables,
    log: [&'static str; 2],
    within: Duration,
) -> Result<Option<i64>, Error> {
    let (Some(low), Some(high)) = sqlx::query_as(tables.sql(log[0])).fetch_one(&mut *conn).await? else { return Ok(None) };
    let mut bisect = Bisect::new(low, high);
    while let Some(probe) = bisect.probe() {
        let row: Option<(i64, bool)> =
            sqlx::query_as(tables.sql(log[1])).bind(probe).bind(micros(within)).fetch_optional(&mut *conn).await?;
        bisect.saw(probe, row);
    }
    Ok(bisect.found())
}

impl AlertStore for PostgresStore {
    fn watch(&self) -> Reply<'_, AlertWatch> {
        on!(self.work, self.deadline, "looking at alerts", |c| {
            let mut out = AlertWatch::default();
            for r in &sqlx::query(self.tables.sql(WATCH)).bind(ALERTS).fetch_all(&mut *c).await? {
                match r.try_get::<i32, _>(0)? {
                    0 => {
                        out.judge = r.try_get(1)?;
                        out.now_us = r.try_get(8)?;
                    }
                    1 => out.alerts.push(AlertRow {
                        rule: r.try_get(1)?,
                        subject: r.try_get(2)?,
                        detail: r.try_get(3)?,
                        firing: r.try_get(5)?,
                        value: r.try_get(6)?,
                        threshold: r.try_get(7)?,
                        since_us: r.try_get(8)?,
                        seen_us: r.try_get(9)?,
                        told_us: r.try_get(10)?,
                    }),
                    2 => out.silences.push(AlertSilence {
                        rule: r.try_get(1)?,
                        subject: r.try_get(2)?,
                        actor: r.try_get(3)?,
                        reason: r.try_get(4)?,
                        since_us: r.try_get(8)?,
                        until_us: r.try_get(9)?,
                    }),
                    _ => out.reports.push((
                        r.try_get(4)?,
                        span(r.try_get(8)?).unwrap_or_default(),
                        AlertReport { rule: r.try_get(1)?, subject: r.try_get(2)?, detail: r.try_get(3)?, value: r.try_get(6)? },
                    )),
                }
            }
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
                            .bind(rule)
                            .bind(subject)
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
                        sqlx::query(self.tables.sql(FINE)).bind(rule).bind(subject).execute(&mut *tx).await?;
                    }
                }
                let Some(news) = &change.news else { continue };
                let id: i64 = sqlx::query_scalar(self.tables.sql(HAPPENED))
                    .bind(rule)
                    .bind(subject)
                    .bind(news.kind.as_str())
                    .bind(news.since_us)
                    .bind(news.value)
                    .bind(news.threshold)
                    .bind(stored_detail(news.detail.as_deref()))
                    .bind(judge)
                    .bind(news.silenced)
                    .fetch_one(&mut *tx)
                    .await?;
                for channel in &news.channels {
                    let notice = "INSERT INTO {alert_notice} (event, channel) VALUES ($1, $2)";
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
            let mut tx = c.begin().await?;
            let old = "DELETE FROM {alert_report} WHERE instance = $1";
            sqlx::query(self.tables.sql(old)).bind(instance).execute(&mut *tx).await?;
            for report in reports {
                let new = "INSERT INTO {alert_report} (instance, rule, subject, value, detail) VALUES ($1, $2, $3, $4, $5) \
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
            let notice = |r: &PgRow| {
                Ok(OpenNotice {
                    event: event(r)?,
                    channel: r.try_get(11)?,
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
            let query = sqlx::query(self.tables.sql(SENDING)).bind(channel).bind(events).bind(micros(lease));
            query.execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(true)
        })
    }

    fn sent<'a>(&'a self, channel: &'a str, events: &'a [i64], outcome: NoticeOutcome<'a>) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "recording notices", |c| {
            let (wait, error) = match outcome {
                NoticeOutcome::Sent => {
                    sqlx::query(self.tables.sql(SENT)).bind(channel).bind(events).execute(&mut *c).await?;
                    return Ok(());
                }
                NoticeOutcome::Retry(error, wait) => (Some(micros(wait)), error),
                NoticeOutcome::GivenUp(error) => (None, error),
            };
            sqlx::query(self.tables.sql(NOT_SENT))
                .bind(channel)
                .bind(events)
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
            let line = |r: &PgRow| {
                Ok(OutboxWaiting {
                    destination: r.try_get(0)?,
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
            let line = |r: &PgRow| {
                Ok(InboxWaiting {
                    consumer: r.try_get(0)?,
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
                    .bind(micros(within))
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
                    channel: r.try_get(1)?,
                    attempts: r.try_get(2)?,
                    sent_us: r.try_get(3)?,
                    due_us: r.try_get(4)?,
                    error: r.try_get(5)?,
                });
            }
            Ok(events)
        })
    }

    fn silence<'a>(&'a self, rule: &'a str, subject: &'a str, time: Duration, actor: &'a str, reason: &'a str) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "silencing an alert", |c| {
            let mut tx = c.begin().await?;
            sqlx::query(self.tables.sql(SILENCE))
                .bind(checked_name("rule", rule, 0)?)
                .bind(checked_subject(subject)?)
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
        const END: &str = "DELETE FROM {alert_silence} WHERE rule = $1 AND subject = $2 AND ends_at > clock_timestamp()";
        on!(self.work, self.deadline, "ending a silence", |c| {
            let mut tx = c.begin().await?;
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
            let removed: i64 =
                sqlx::query_scalar(self.tables.sql(OLD)).bind(micros(older)).bind(OLD_EVENTS).fetch_one(&mut *c).await?;
            Ok(removed as u64)
        })
    }
}
