//! What came of claimed rows, written back: only where the row is still as it was claimed, and the claim still ours.

use std::collections::HashMap;
use std::time::Duration;

use super::claim::{Cells, cell, flag, number, of_t};
use super::sql::{Dialect, Sql, Value};
use super::{Row, Source};
use crate::store::Tables;

/// What came of one row.
#[derive(Debug, Clone)]
pub(crate) struct Settle {
    pub(crate) row: Row,
    pub(crate) what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum What {
    /// The receiver confirmed.
    Sent,
    /// A failed attempt; the next one after this wait.
    Retry { wait: Duration, error: String },
    /// It is given up, after a failed attempt or, not `counted`, because too many processes died.
    Failed { error: String, counted: bool },
    /// It was not sent: it may go after this wait, as if it had not been claimed.
    Release { wait: Duration },
    /// What came of it can't be written into the owner's row. It is left as it is, and found again after this wait.
    SetAside { wait: Duration, error: String },
}

/// What became of one write-back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Settled {
    Written,
    /// Somebody else has changed the row, or claimed it: nothing was written.
    Stale,
    /// Somebody else has a lock on it.
    Locked,
}

/// When a row is due by Posthouse's own table.
#[derive(Debug, Clone, Copy)]
enum Due {
    /// As far as Posthouse's own table is concerned.
    Now,
    After(Duration),
    Never,
}

/// The updates that a batch needs.
#[derive(Debug, Default)]
pub(super) struct Writes {
    pub(super) statements: Vec<Sql>,
    pub(super) settled: Vec<Settled>,
}

impl Source {
    /// Locks the rows, and tells whether each is as it was claimed.
    // Plan: the index over the id alone.
    pub(super) fn lock_claimed(&self, dialect: Dialect, ids: &[String], patient: bool) -> Sql {
        let mut sql = Sql::new(dialect, "");
        let version = self.version.as_ref().map_or_else(|| "NULL".to_owned(), |v| dialect.text(&v.of("t")));
        sql.push(&format!("SELECT {}, {}, {version}", self.id.written(dialect, "t"), dialect.text(&self.state.of("t"))));
        for code in [self.codes.sending.as_deref(), Some(self.codes.sent.as_str())] {
            match code {
                Some(code) => {
                    sql.push(&format!(", CASE WHEN {} = ", self.state.of("t"))).of(&self.state, code);
                    sql.push(" THEN '1' ELSE '0' END");
                }
                None => {
                    sql.push(", '0'");
                }
            }
        }
        // Without a version, the content tells whether the row is the one that was sent.
        if self.version.is_none() {
            for column in &self.message {
                sql.push(&format!(", {}", column.value(dialect, "t")));
            }
        }
        sql.push(&format!(" FROM {} t", self.table));
        if dialect == Dialect::MySql {
            sql.push(&format!(" FORCE INDEX ({})", self.id_index));
        }
        sql.push(" WHERE ").among(&self.id, "t", ids);
        let wait = if patient { "" } else { " SKIP LOCKED" };
        sql.push(&format!(" ORDER BY {} FOR UPDATE{}{wait}", self.id.of("t"), of_t(dialect)));
        sql
    }

    pub(super) fn present(&self, dialect: Dialect, ids: &[String]) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("SELECT {} FROM {} t WHERE ", self.id.written(dialect, "t"), self.table));
        sql.among(&self.id, "t", ids);
        sql
    }

    /// Whether a locked row is as it was claimed.
    fn is_as_claimed(&self, row: &Row, cells: &Cells) -> bool {
        let state = if self.codes.sending.is_some() { flag(cells, 3) } else { cell(cells, 1) == row.state };
        let same = match &self.version {
            Some(_) => number::<i64>(cells, 2) == row.version,
            None => cells.get(5..).is_some_and(|now| now == row.values.as_slice()),
        };
        state && same
    }

    /// Decides by the locked rows what is written. `present`: rows that are there, locked by us or not.
    pub(super) fn writes(
        &self,
        dialect: Dialect,
        tables: &Tables,
        (owner, lease): (&str, Duration),
        rows: &[Settle],
        (locked, own, present): (&[Cells], &[Cells], &[String]),
    ) -> Writes {
        let by_id = |cells: &'_ [Cells]| -> HashMap<String, Cells> {
            cells.iter().filter_map(|c| Some((cell(c, 0)?, c.clone()))).collect()
        };
        let (locked, own) = (by_id(locked), by_id(own));
        let mut out = Writes::default();
        let (mut sent, mut gone) = (Vec::new(), Vec::new());
        let mut released: HashMap<Option<String>, Vec<String>> = HashMap::new();
        let mut parked: HashMap<u128, Vec<String>> = HashMap::new();
        for Settle { row, what } in rows {
            let ours = own
                .get(&row.id)
                .is_some_and(|side| cell(side, 7).as_deref() == Some(owner) && number::<i32>(side, 3) == Some(row.side));
            let Some(cells) = locked.get(&row.id) else {
                if present.contains(&row.id) {
                    out.settled.push(Settled::Locked);
                } else {
                    // Its owner has removed it.
                    gone.extend(ours.then(|| row.id.clone()));
                    out.settled.push(Settled::Stale);
                }
                continue;
            };
            if !ours {
                // An earlier commit whose answer was lost.
                let done = *what == What::Sent && !own.contains_key(&row.id) && flag(cells, 4);
                out.settled.push(if done { Settled::Written } else { Settled::Stale });
                continue;
            }
            if !self.is_as_claimed(row, cells) {
                out.settled.push(Settled::Stale);
                let sending = self.codes.sending.is_some() && flag(cells, 3);
                if sending && self.stuck_after.is_none() {
                    // Changed, and still in the sending state: by this claim, or by its owner, who sends it then. If nobody has
                    // finished it in the time of a lease, it is sent again.
                    let due = format!("{} + {}", dialect.now(), dialect.interval(lease));
                    out.statements.push(self.left(dialect, tables, row, &due, None));
                } else {
                    gone.push(row.id.clone());
                }
                continue;
            }
            out.settled.push(Settled::Written);
            match what {
                What::Sent => {
                    sent.push(row.id.clone());
                    gone.push(row.id.clone());
                }
                What::Release { wait } => {
                    if self.codes.sending.is_some() {
                        released.entry(self.state_before(row)).or_default().push(row.id.clone());
                    }
                    if wait.is_zero() && row.claims <= 1 && row.own_attempts(self) == 0 {
                        gone.push(row.id.clone());
                    } else {
                        // In steps, so that those that wait for one destination are written together.
                        parked.entry(wait.as_millis().div_ceil(100)).or_default().push(row.id.clone());
                    }
                }
                What::SetAside { wait, error } => {
                    let due = format!("{} + {}", dialect.now(), dialect.interval(*wait));
                    out.statements.push(self.left(dialect, tables, row, &due, Some(error)));
                }
                What::Retry { wait, error } => {
                    out.statements.extend(self.failed_attempt(dialect, row, Some(*wait), error, true));
                    let due = if self.next_attempt.is_some() { Due::Now } else { Due::After(*wait) };
                    let in_full = self.attempts.is_some() && self.next_attempt.is_some() && self.error.is_some();
                    if in_full && row.claims <= 1 {
                        gone.push(row.id.clone());
                    } else {
                        let attempts = if self.attempts.is_some() { 0 } else { row.attempts + 1 };
                        out.statements.push(self.own_update(dialect, tables, row, attempts, due, error, true));
                    }
                }
                What::Failed { error, counted } => {
                    out.statements.extend(self.failed_attempt(dialect, row, None, error, *counted));
                    let attempts = if self.attempts.is_some() { 0 } else { row.attempts + u32::from(*counted) };
                    out.statements.push(self.own_update(dialect, tables, row, attempts, Due::Never, error, *counted));
                }
            }
        }
        if !sent.is_empty() {
            let mut sql = Sql::new(dialect, "");
            sql.push(&format!("UPDATE {} AS t SET {} = ", self.table, self.state.name)).of(&self.state, &self.codes.sent);
            self.touch(&mut sql);
            sql.push(" WHERE ").among(&self.id, "t", &sent);
            out.statements.push(sql);
        }
        for (state, ids) in released {
            let mut sql = Sql::new(dialect, "");
            sql.push(&format!("UPDATE {} AS t SET {} = ", self.table, self.state.name));
            self.state_value(&mut sql, state.as_deref());
            self.touch(&mut sql);
            sql.push(" WHERE ").among(&self.id, "t", &ids);
            out.statements.push(sql);
        }
        for (steps, ids) in parked {
            let wait = Duration::from_millis(u64::try_from(steps * 100).unwrap_or(u64::MAX));
            let mut sql = Sql::new(dialect, "");
            sql.push(&format!(
                "UPDATE {} SET owner = NULL, claims = claims - 1, version = version + 1, updated_at = {now}, next_attempt_at = {now} + ",
                tables.name("adopted"),
                now = dialect.now()
            ));
            sql.interval(wait).push(" WHERE source = ").bind_text(&self.name).push(" AND ").text_among("row_id", &ids);
            out.statements.push(sql);
        }
        if !gone.is_empty() {
            let mut sql = self.forget(dialect, tables, &gone, " AND owner = ");
            sql.bind_text(owner);
            out.statements.push(sql);
        }
        out
    }

    /// Posthouse's own row, by which the owner's is found again when nobody has finished it by then.
    fn left(&self, dialect: Dialect, tables: &Tables, row: &Row, due: &str, error: Option<&str>) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!(
            "UPDATE {} SET claims = {}, version = version + 1, next_attempt_at = {due}",
            tables.name("adopted"),
            row.claims - 1
        ));
        if let Some(error) = error {
            sql.push(", last_error = ").bind(Value::Text(crate::error::storable(error, 2_000)));
        }
        sql.push(" WHERE source = ").bind_text(&self.name).push(" AND row_id = ").bind_text(&row.id);
        sql
    }

    /// The state to which a row goes back that is not sent.
    fn state_before(&self, row: &Row) -> Option<String> {
        match (row.was_sending, self.codes.pending.first()) {
            (true, Some(pending)) => Some(pending.clone()),
            (true, None) => None,
            (false, _) => row.state.clone(),
        }
    }

    fn state_value(&self, sql: &mut Sql, state: Option<&str>) {
        match state {
            Some(state) => sql.of(&self.state, state),
            None => sql.push("NULL"),
        };
    }

    /// The owner's row after a failed attempt; None where it has no columns for that. `wait` None: it is given up.
    fn failed_attempt(&self, dialect: Dialect, row: &Row, wait: Option<Duration>, error: &str, counted: bool) -> Option<Sql> {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("UPDATE {} AS t SET ", self.table));
        let state = match (wait, &self.codes.failed) {
            (None, Some(failed)) => Some(Some(failed.clone())),
            _ if self.codes.sending.is_some() => Some(self.state_before(row)),
            _ => None,
        };
        let mut any = false;
        let mut comma = |sql: &mut Sql| {
            sql.push(if any { ", " } else { "" });
            any = true;
        };
        if let Some(state) = state {
            comma(&mut sql);
            sql.push(&format!("{} = ", self.state.name));
            self.state_value(&mut sql, state.as_deref());
        }
        if let (Some(attempts), true) = (&self.attempts, counted) {
            comma(&mut sql);
            sql.push(&format!("{0} = COALESCE({0}, 0) + 1", attempts.name));
        }
        if let (Some(next), Some(wait)) = (&self.next_attempt, wait) {
            comma(&mut sql);
            // Later by a fraction of a second is better than at once, where the column holds whole ones.
            match dialect {
                Dialect::MySql => sql.push(&format!("{} = NOW(6) + ", next.name)).interval(wait),
                Dialect::Postgres => sql
                    .push(&format!("{} = CAST(statement_timestamp() + ", next.name))
                    .interval(wait)
                    .push(&format!(" AS {})", next.sql_type)),
            };
        }
        if let Some(column) = &self.error {
            comma(&mut sql);
            sql.push(&format!("{} = ", column.name)).bind(Value::Text(column.fitting(error)));
        }
        if !any {
            return None;
        }
        self.touch(&mut sql);
        sql.push(" WHERE t.").push(&self.id.name).push(" = ").of(&self.id, &row.id);
        Some(sql)
    }

    /// Posthouse's own row, no longer claimed. `answered`: this claim gave a result, and counts no more.
    #[expect(clippy::too_many_arguments, reason = "one for each column")]
    fn own_update(
        &self,
        dialect: Dialect,
        tables: &Tables,
        row: &Row,
        attempts: u32,
        due: Due,
        error: &str,
        answered: bool,
    ) -> Sql {
        let mut sql = Sql::new(dialect, "");
        let claims = row.claims - u32::from(answered);
        sql.push(&format!(
            "UPDATE {} SET owner = NULL, version = version + 1, updated_at = {}, attempts = ",
            tables.name("adopted"),
            dialect.now()
        ));
        sql.bind(Value::Int(attempts.into())).push(", claims = ").bind(Value::Int(claims.into()));
        sql.push(", last_error = ").bind(Value::Text(crate::error::storable(error, 2_000))).push(", next_attempt_at = ");
        match due {
            Due::Now => sql.push("NULL"),
            Due::After(wait) => sql.push(&format!("{} + ", dialect.now())).interval(wait),
            Due::Never => sql.push(&dialect.given_up()),
        };
        sql.push(" WHERE source = ").bind_text(&self.name).push(" AND row_id = ").bind_text(&row.id);
        sql
    }
}
