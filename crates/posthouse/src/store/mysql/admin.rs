//! What people look at and change.

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row, SqlSafeStr};

use super::relay::{int, text, text_or_null};
use crate::Error;
use crate::store::{
    Action, AttemptRow, Backlog, Candidate, Chunk, Hit, HouseRow, MessageDetail, MessageFilter, MessageRow, Search, Tables,
    Which, each_house,
};

/// The house of the log row `l`: an expression that the primary key of pending can be looked up by, which a function that
/// reads the number of houses could not.
macro_rules! house {
    () => {
        "CAST({hash}(l.destination, l.message_key, l.message_id) % t.houses AS SIGNED)"
    };
}

macro_rules! columns {
    () => {
        concat!(
            "l.id, l.message_id, l.type, COALESCE(p.destination, l.destination) AS destination, l.message_key, \
             COALESCE(p.status, 'SENT') AS status, ",
            house!(),
            " AS house, COALESCE(p.attempts, 0) AS attempts, COALESCE(p.claims, 0) AS claims, p.last_error, \
             TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.created_at) DIV 1000 AS created_at_ms, \
             CASE WHEN p.status <> 'FAILED' THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.due_at) DIV 1000 END AS next_attempt_ms, \
             COALESCE(p.size, LENGTH(l.payload) + COALESCE(LENGTH(l.headers), 0)) AS size"
        )
    };
}

// Plan: the log by a range of its primary key, pending looked up by its primary key.
const RANGE: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM {meta} t STRAIGHT_JOIN {%LOG%} l FORCE INDEX (PRIMARY) LEFT JOIN {pending} p ON p.house = ",
    house!(),
    " AND p.id = l.id WHERE t.one = 1 AND l.id >= ? AND l.id < ?"
);

// Plan: pending and the log by their primary keys.
const PENDING: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM {meta} t STRAIGHT_JOIN JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', id BIGINT PATH '$[1]')) c \
       STRAIGHT_JOIN {pending} p FORCE INDEX (PRIMARY) ON p.house = c.house AND p.id = c.id STRAIGHT_JOIN {%LOG%} l ON l.id = p.id \
      WHERE t.one = 1"
);

// Plan: the log by the index of its message ids (by id alone it would be walked to its start), pending by its primary key.
const MESSAGE_ID: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM {meta} t STRAIGHT_JOIN {%LOG%} l FORCE INDEX (message_message_id, PRIMARY) LEFT JOIN {pending} p ON p.house = ",
    house!(),
    " AND p.id = l.id WHERE t.one = 1 AND l.message_id = ? AND l.id < ?"
);

// Plan: the primary key downwards, as far as the limit, in both.
const LOG_STEP: &str = "SELECT MIN(id), COUNT(*) FROM ((SELECT id FROM {message} WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?) \
         UNION ALL (SELECT id FROM {kept} WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?) ORDER BY id DESC LIMIT ?) l";

// As in the relay's reads, each house has an arm of its own.

// Plan: the primary key downwards, as far as the limit.
const PENDING_ARM: &str = "(SELECT p.house, p.id, p.status, p.destination FROM {pending} p FORCE INDEX (PRIMARY) \
      WHERE p.house = ? AND p.id >= ? AND p.id < ? ORDER BY p.id DESC LIMIT ?)";

// Plan: FAILED rows lie together in (house, due_at, id); downwards, as far as the limit.
const FAILED_ARM: &str = "(SELECT p.house, p.id, p.status, p.destination FROM {pending} p FORCE INDEX (pending_due) \
      WHERE p.house = ? AND p.due_at = '9999-12-31' AND p.id >= ? AND p.id < ? ORDER BY p.id DESC LIMIT ?)";

/// Arms of one statement.
const ARMS: usize = 128;

const SHOW: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.content_type, l.headers, l.payload, l.destination FROM {meta} t STRAIGHT_JOIN {%LOG%} l LEFT JOIN {pending} p ON p.house = ",
    house!(),
    " AND p.id = l.id WHERE t.one = 1 AND l.id = ?"
);

/// Where messages lie.
const LOGS: [&str; 2] = ["message", "kept"];

fn row(r: &MySqlRow) -> Result<MessageRow, sqlx::Error> {
    Ok(MessageRow {
        id: int(r, 0)?,
        message_id: text(r, 1)?,
        kind: text(r, 2)?,
        destination: text(r, 3)?,
        key: text_or_null(r, 4)?,
        status: text(r, 5)?,
        house: r.try_get(6)?,
        attempts: r.try_get(7)?,
        claims: r.try_get(8)?,
        last_error: text_or_null(r, 9)?,
        created_at_ms: int(r, 10)?,
        next_attempt_ms: r.try_get(11)?,
        size: int(r, 12)?,
    })
}

/// The steps of a search, on a connection.
pub(super) struct Steps<'c>(pub(super) &'c mut MySqlConnection, pub(super) &'c Tables);

impl Search for Steps<'_> {
    async fn log_step(&mut self, from: i64, below: i64, n: u32) -> Result<Option<i64>, Error> {
        let (low, rows): (Option<i64>, i64) = sqlx::query_as(self.1.sql(LOG_STEP))
            .bind(from)
            .bind(below)
            .bind(n)
            .bind(from)
            .bind(below)
            .bind(n)
            .bind(n)
            .fetch_one(&mut *self.0)
            .await?;
        Ok(low.filter(|_| rows >= i64::from(n)))
    }

    async fn pending_step(&mut self, failed: bool, from: i64, below: i64, n: u32) -> Result<Chunk, Error> {
        // Rows may lie in houses that don't exist (any more).
        let last: i32 = sqlx::query_scalar(self.1.sql(
            "SELECT CAST(GREATEST(COALESCE((SELECT MAX(house) FROM {pending}), 0), COALESCE((SELECT MAX(house) FROM {house}), 0)) AS SIGNED)",
        ))
        .fetch_one(&mut *self.0)
        .await?;
        let each = each_house(n);
        let arm = self.1.text(if failed { FAILED_ARM } else { PENDING_ARM });
        let houses: Vec<i32> = (0..=last).collect();
        let mut rows = Vec::new();
        for houses in houses.chunks(ARMS) {
            let sql = AssertSqlSafe(vec![arm.as_str(); houses.len()].join(" UNION ALL ")).into_sql_str();
            let mut query = sqlx::query(sql);
            for house in houses {
                query = query.bind(*house).bind(from).bind(below).bind(each);
            }
            for r in &query.fetch_all(&mut *self.0).await? {
                rows.push(Candidate { house: r.try_get(0)?, id: r.try_get(1)?, status: text(r, 2)?, destination: text(r, 3)? });
            }
        }
        Ok(Chunk::of_houses(rows, each))
    }

    async fn rows(&mut self, which: Which<'_>, filter: &MessageFilter, limit: u32) -> Result<Vec<Hit>, Error> {
        let mut template = match which {
            Which::Range(..) => RANGE,
            Which::MessageId(..) => MESSAGE_ID,
            Which::Pending(_) => PENDING,
        }
        .to_owned();
        let status = filter.status.map(|s| s.as_str().to_owned());
        let compared = [
            (&status, " AND COALESCE(p.status, 'SENT') = ?"),
            (&filter.destination, " AND COALESCE(p.destination, l.destination) = ?"),
            (&filter.key, " AND l.message_key = ?"),
        ];
        let times = [(filter.created_after_ms, ">="), (filter.created_before_ms, "<")];
        let columns = [
            "l.message_id",
            "l.message_key",
            "l.type",
            "COALESCE(p.destination, l.destination)",
            "CAST(p.last_error AS BINARY)",
            "l.payload",
        ];
        for (_, condition) in compared.iter().filter(|(value, _)| value.is_some()) {
            template.push_str(condition);
        }
        for (_, compared) in times.iter().filter(|(at, _)| at.is_some()) {
            template.push_str(&format!(" AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.created_at) DIV 1000 {compared} ?"));
        }
        if filter.text.is_some() {
            template.push_str(&format!(" AND ({})", columns.map(|column| format!("LOCATE(?, {column}) > 0")).join(" OR ")));
        }
        template.push_str(" ORDER BY l.id DESC LIMIT ?");
        let mut out = Vec::new();
        for log in LOGS {
            let mut query = sqlx::query(self.1.sql(&template.replace("%LOG%", log)));
            query = match which {
                Which::Range(from, below) => query.bind(from).bind(below),
                Which::MessageId(message_id, below) => query.bind(message_id.as_bytes().to_owned()).bind(below),
                Which::Pending(rows) => {
                    let rows: Vec<(i32, i64)> = rows.iter().map(|r| (r.house, r.id)).collect();
                    query.bind(serde_json::to_string(&rows)?)
                }
            };
            for (value, _) in compared {
                if let Some(value) = value {
                    query = query.bind(value.as_bytes());
                }
            }
            for at in times.iter().filter_map(|(at, _)| *at) {
                query = query.bind(at);
            }
            if let Some(text) = &filter.text {
                for _ in columns {
                    query = query.bind(text.as_bytes());
                }
            }
            for r in &query.bind(limit).fetch_all(&mut *self.0).await? {
                out.push(Hit { row: row(r)?, published_to: text(r, 13)? });
            }
        }
        out.sort_unstable_by_key(|hit| std::cmp::Reverse(hit.row.id));
        // What is kept before its partition leaves the log is in both for a while.
        out.dedup_by_key(|hit| hit.row.id);
        out.truncate(limit as usize);
        Ok(out)
    }

    async fn ends(&mut self) -> Result<Option<(i64, i64)>, Error> {
        let (first, last): (Option<i64>, Option<i64>) =
            sqlx::query_as(self.1.sql("SELECT MIN(id), MAX(id) FROM {message}")).fetch_one(&mut *self.0).await?;
        Ok(first.zip(last))
    }

    async fn created(&mut self, id: i64) -> Result<Option<(i64, i64)>, Error> {
        const CREATED: &str = "SELECT id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at) DIV 1000 FROM {message} \
              WHERE id >= ? ORDER BY id LIMIT 1";
        Ok(sqlx::query_as(self.1.sql(CREATED)).bind(id).fetch_optional(&mut *self.0).await?)
    }
}

pub(super) async fn show(conn: &mut MySqlConnection, tables: &Tables, id: i64) -> Result<Option<MessageDetail>, Error> {
    let mut found = None;
    for log in LOGS {
        if found.is_none() {
            found = sqlx::query(tables.sql(&SHOW.replace("%LOG%", log))).bind(id).fetch_optional(&mut *conn).await?;
        }
    }
    let Some(found) = found else { return Ok(None) };
    let message = row(&found)?;
    let history = sqlx::query(tables.sql(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, attempt, outcome, error, response, took_ms, instance \
           FROM {attempt} WHERE row_id = ? ORDER BY id",
    ))
    .bind(id)
    .fetch_all(&mut *conn)
    .await?;
    let attempt = |r: &MySqlRow| {
        Ok(AttemptRow {
            at_ms: int(r, 0)?,
            attempt: r.try_get(1)?,
            outcome: text(r, 2)?,
            error: text(r, 3)?,
            response: text_or_null(r, 4)?,
            took_ms: r.try_get(5)?,
            instance: text(r, 6)?,
        })
    };
    // Where its house is now, or was before a resize: the index (low, house) serves both.
    let mut delivered = None;
    for house in ["house = ?", "house <> ?"] {
        if delivered.is_none() {
            delivered = sqlx::query(tables.sql(&format!(
                "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, instance FROM {{receipt}} FORCE INDEX (receipt_low) \
                  WHERE low <= ? AND low > ? AND {house} AND JSON_CONTAINS(ids, ?) ORDER BY low DESC LIMIT 1"
            )))
            .bind(id)
            .bind(id - 1_000_000)
            .bind(message.house)
            .bind(id.to_string())
            .fetch_optional(&mut *conn)
            .await?;
        }
    }
    Ok(Some(MessageDetail {
        row: message,
        published_to: text(&found, 16)?,
        content_type: text(&found, 13)?,
        headers: text_or_null(&found, 14)?,
        payload: found.try_get(15)?,
        history: history.iter().map(attempt).collect::<Result<_, sqlx::Error>>()?,
        delivered: delivered.map(|r| Ok::<_, sqlx::Error>((int(&r, 0)?, text(&r, 1)?))).transpose()?,
    }))
}

/// The change counter is raised first: its row lock puts actions in one order, so a relay that saw number n has seen all up to
/// n. Resizing raises it first too, so the number of houses holds until the end.
pub(super) async fn act(
    conn: &mut MySqlConnection,
    tables: &Tables,
    ids: &[i64],
    action: &Action,
    actor: &str,
) -> Result<Vec<i64>, Error> {
    let (which, set) = match action {
        Action::Requeue => (
            " AND (p.status = 'FAILED' OR p.status = 'PENDING' AND p.due_at > UTC_TIMESTAMP(6))",
            "p.status = 'PENDING', p.due_at = UTC_TIMESTAMP(6), p.attempts = 0, p.claims = 0, p.key_hash = d.key_hash",
        ),
        Action::Skip => (
            "",
            "p.status = 'FAILED', p.due_at = TIMESTAMP'9999-12-31 00:00:00.000000', p.key_hash = NULL, \
             p.last_error = CONCAT(COALESCE(CONCAT(p.last_error, '; '), ''), 'skipped by ', ?)",
        ),
        Action::Edit { .. } => (
            "",
            "p.status = 'PENDING', p.due_at = UTC_TIMESTAMP(6), p.attempts = 0, p.claims = 0, p.destination = CAST(? AS BINARY)",
        ),
    };
    let detail = match action {
        Action::Edit { destination } => Some(destination.as_str()),
        _ => None,
    };
    let mut tx = conn.begin().await?;
    sqlx::raw_sql(tables.sql("UPDATE {changes} SET changes = changes + 1")).execute(&mut *tx).await?;
    let change: i64 = sqlx::query_scalar(tables.sql("SELECT changes FROM {changes}")).fetch_one(&mut *tx).await?;
    // Where the rows are, by the log; then those of them that the action applies to, locked in the order all batches use.
    let mut rows: Vec<(i32, i64, Option<i64>)> = Vec::new();
    let list = serde_json::to_string(ids)?;
    for log in LOGS {
        let sql = concat!(
            "SELECT l.id, ",
            house!(),
            ", CASE WHEN l.message_key IS NOT NULL THEN {hash}(l.destination, l.message_key, l.message_id) END \
             FROM {meta} t STRAIGHT_JOIN JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$')) d STRAIGHT_JOIN {%LOG%} l ON l.id = d.id \
             WHERE t.one = 1"
        );
        for r in sqlx::query(tables.sql(&sql.replace("%LOG%", log))).bind(&list).fetch_all(&mut *tx).await? {
            rows.push((r.try_get(1)?, r.try_get(0)?, r.try_get(2)?));
        }
    }
    rows.sort_unstable();
    rows.dedup();
    let batch = "JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', id BIGINT PATH '$[1]', key_hash BIGINT PATH '$[2]')) d \
         STRAIGHT_JOIN {pending} p FORCE INDEX (PRIMARY) ON p.house = d.house AND p.id = d.id";
    let held = sqlx::query(tables.sql(&format!("SELECT p.id FROM {batch} WHERE 1 = 1{which} FOR UPDATE")))
        .bind(serde_json::to_string(&rows)?)
        .fetch_all(&mut *tx)
        .await?;
    let held = held.iter().map(|r| int(r, 0)).collect::<Result<std::collections::HashSet<_>, _>>()?;
    rows.retain(|r| held.contains(&r.1));
    if !rows.is_empty() {
        let list = serde_json::to_string(&rows)?;
        let update =
            format!("UPDATE {batch} SET {set}, p.owner = NULL, p.version = p.version + 1, p.updated_at = UTC_TIMESTAMP(6)");
        let mut query = sqlx::query(tables.sql(&update)).bind(&list);
        query = match action {
            Action::Requeue => query,
            Action::Skip => query.bind(actor),
            Action::Edit { destination } => query.bind(destination.as_bytes()),
        };
        query.execute(&mut *tx).await?;
        sqlx::query(tables.sql(
            "INSERT INTO {audit} (`change`, actor, action, row_id, house, key_hash, detail) \
             SELECT ?, ?, ?, d.id, d.house, d.key_hash, ? FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', \
                 id BIGINT PATH '$[1]', key_hash BIGINT PATH '$[2]')) d",
        ))
        .bind(change)
        .bind(actor)
        .bind(action.name().as_bytes())
        .bind(detail)
        .bind(&list)
        .execute(&mut *tx)
        .await?;
    }
    tx.commit().await?;
    Ok(rows.into_iter().map(|r| r.1).collect())
}

pub(super) async fn backlog(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<Backlog>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT b.destination, b.status, b.messages, TIMESTAMPDIFF(MICROSECOND, COALESCE(m.created_at, k.created_at), UTC_TIMESTAMP(6)) DIV 1000 \
           FROM (SELECT p.destination, p.status, COUNT(*) AS messages, MIN(p.id) AS low FROM {pending} p GROUP BY p.destination, p.status) b \
           LEFT JOIN {message} m ON m.id = b.low LEFT JOIN {kept} k ON k.id = b.low ORDER BY b.destination, b.status",
    ))
    .fetch_all(conn)
    .await?;
    let line = |r: &MySqlRow| {
        Ok(Backlog {
            destination: text(r, 0)?,
            status: text(r, 1)?,
            messages: int(r, 2)?,
            oldest_ms: r.try_get::<Option<i64>, _>(3)?.unwrap_or(0).max(0),
        })
    };
    Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
}

pub(super) async fn houses(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<HouseRow>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT h.house, h.owner, CAST(COALESCE(i.lease_until > UTC_TIMESTAMP(6), 0) AS SIGNED), h.epoch, \
                (SELECT COUNT(*) FROM {pending} p WHERE p.house = h.house) \
           FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner ORDER BY h.house",
    ))
    .fetch_all(conn)
    .await?;
    let house = |r: &MySqlRow| {
        Ok(HouseRow {
            house: r.try_get(0)?,
            owner: text_or_null(r, 1)?,
            alive: int(r, 2)? == 1,
            epoch: int(r, 3)?,
            pending: int(r, 4)?,
        })
    };
    Ok(rows.iter().map(house).collect::<Result<_, sqlx::Error>>()?)
}
