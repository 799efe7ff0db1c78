//! The audit log.

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use crate::Error;
use crate::store::{AUDIT_SCAN, AuditFilter, AuditRow, Listed, Record, Tables};

/// Writes a line about something else than one message.
pub(super) async fn record(conn: &mut PgConnection, tables: &Tables, record: &Record<'_>) -> Result<(), Error> {
    const RECORD: &str =
        "INSERT INTO {audit} (change, actor, action, row_id, house, detail, amount) VALUES (0, $1, $2, 0, -1, $3, $4)";
    sqlx::query(tables.sql(RECORD))
        .bind(record.actor)
        .bind(record.action)
        .bind(record.detail)
        .bind(record.amount)
        .execute(conn)
        .await?;
    Ok(())
}

// Plan: the primary key downwards, as far as the inner limit.
const LIST: &str = "SELECT id, (extract(epoch FROM at) * 1000)::bigint, actor, action, nullif(row_id, 0), detail, amount \
       FROM (SELECT * FROM {audit} WHERE id < $1 ORDER BY id DESC LIMIT $2) a \
      WHERE ($3::text IS NULL OR actor = $3) AND ($4::text IS NULL OR action = $4) ORDER BY id DESC LIMIT $5";

// Plan: the lines of one message by the index of its row id.
const OF_ROW: &str = "SELECT id, (extract(epoch FROM at) * 1000)::bigint, actor, action, nullif(row_id, 0), detail, amount \
       FROM (SELECT * FROM {audit} WHERE row_id = $6 AND id < $1 ORDER BY id DESC LIMIT $2) a \
      WHERE ($3::text IS NULL OR actor = $3) AND ($4::text IS NULL OR action = $4) ORDER BY id DESC LIMIT $5";

const REACHED: &str =
    "SELECT min(id) FROM (SELECT id FROM {audit} WHERE id < $1 ORDER BY id DESC LIMIT $2) a HAVING count(*) = $2";

pub(super) async fn list(conn: &mut PgConnection, tables: &Tables, filter: &AuditFilter) -> Result<Listed<AuditRow>, Error> {
    let before = filter.before.unwrap_or(i64::MAX);
    let searching = filter.actor.is_some() || filter.action.is_some();
    let scan = if searching { AUDIT_SCAN } else { filter.limit };
    let template = if filter.row_id.is_some() { OF_ROW } else { LIST };
    let mut query = sqlx::query(tables.sql(template))
        .bind(before)
        .bind(i64::from(scan))
        .bind(&filter.actor)
        .bind(&filter.action)
        .bind(i64::from(filter.limit));
    if let Some(row_id) = filter.row_id {
        query = query.bind(row_id);
    }
    let rows = query.fetch_all(&mut *conn).await?;
    let row = |r: &PgRow| {
        Ok(AuditRow {
            id: r.try_get(0)?,
            at_ms: r.try_get(1)?,
            actor: r.try_get(2)?,
            action: r.try_get(3)?,
            row_id: r.try_get(4)?,
            detail: r.try_get(5)?,
            amount: r.try_get(6)?,
        })
    };
    let mut page = Listed::page(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?, filter.limit, |r: &AuditRow| r.id);
    if page.next.is_none() && searching && filter.row_id.is_none() {
        let reached =
            sqlx::query_scalar(tables.sql(REACHED)).bind(before).bind(i64::from(AUDIT_SCAN)).fetch_optional(conn).await?;
        page.stop_at(reached);
    }
    Ok(page)
}
