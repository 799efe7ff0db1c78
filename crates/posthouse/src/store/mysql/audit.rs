//! The audit log.

use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use super::relay::{int, text, text_or_null};
use crate::Error;
use crate::store::{AUDIT_SCAN, AuditFilter, AuditRow, Listed, Record, Tables};

/// Writes a line about something else than one message.
pub(super) async fn record(conn: &mut MySqlConnection, tables: &Tables, record: &Record<'_>) -> Result<(), Error> {
    const RECORD: &str =
        "INSERT INTO {audit} (`change`, actor, action, row_id, house, detail, amount) VALUES (0, ?, ?, 0, -1, ?, ?)";
    sqlx::query(tables.sql(RECORD))
        .bind(record.actor)
        .bind(record.action.as_bytes())
        .bind(record.detail)
        .bind(record.amount)
        .execute(conn)
        .await?;
    Ok(())
}

// Plan: the primary key downwards, as far as the inner limit; for one message, the index of its row id.
const LIST: &str = "SELECT id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, actor, action, row_id, detail, amount \
       FROM (SELECT * FROM {audit} WHERE id < ?%ROW% ORDER BY id DESC LIMIT ?) a WHERE 1 = 1";

const REACHED: &str = "SELECT MIN(id), COUNT(*) FROM (SELECT id FROM {audit} WHERE id < ? ORDER BY id DESC LIMIT ?) a";

pub(super) async fn list(conn: &mut MySqlConnection, tables: &Tables, filter: &AuditFilter) -> Result<Listed<AuditRow>, Error> {
    let before = filter.before.unwrap_or(i64::MAX);
    let searching = filter.actor.is_some() || filter.action.is_some();
    let scan = if searching { AUDIT_SCAN } else { filter.limit };
    let mut sql = LIST.replace("%ROW%", if filter.row_id.is_some() { " AND row_id = ?" } else { "" });
    let compared = [(&filter.actor, " AND CAST(actor AS BINARY) = ?"), (&filter.action, " AND action = ?")];
    for (value, condition) in compared {
        if value.is_some() {
            sql.push_str(condition);
        }
    }
    sql.push_str(" ORDER BY id DESC LIMIT ?");
    let mut query = sqlx::query(tables.sql(&sql)).bind(before);
    if let Some(row_id) = filter.row_id {
        query = query.bind(row_id);
    }
    query = query.bind(scan);
    for (value, _) in compared {
        if let Some(value) = value {
            query = query.bind(value.as_bytes());
        }
    }
    let rows = query.bind(filter.limit).fetch_all(&mut *conn).await?;
    let row = |r: &MySqlRow| {
        Ok(AuditRow {
            id: int(r, 0)?,
            at_ms: int(r, 1)?,
            actor: text(r, 2)?,
            action: text(r, 3)?,
            row_id: Some(int(r, 4)?).filter(|id| *id != 0),
            detail: text_or_null(r, 5)?,
            amount: r.try_get(6)?,
        })
    };
    let mut page = Listed::page(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?, filter.limit, |r: &AuditRow| r.id);
    if page.next.is_none() && searching && filter.row_id.is_none() {
        let (lowest, lines): (Option<i64>, i64) =
            sqlx::query_as(tables.sql(REACHED)).bind(before).bind(AUDIT_SCAN).fetch_one(conn).await?;
        page.stop_at(lowest.filter(|_| lines == i64::from(AUDIT_SCAN)));
    }
    Ok(page)
}
