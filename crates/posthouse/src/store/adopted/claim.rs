//! Finding rows, claiming them, renewing claims.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use super::sql::{Column, Dialect, Sql, Value};
use super::{Ask, Claim, LONGEST_ID, Row, Source, Taken};
use crate::settings::Part;
use crate::store::Tables;

/// Values of one row, as text or bytes.
pub(super) type Cells = Vec<Option<Vec<u8>>>;

pub(super) fn cell(cells: &Cells, n: usize) -> Option<String> {
    cells.get(n)?.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

pub(super) fn number<T: std::str::FromStr>(cells: &Cells, n: usize) -> Option<T> {
    cell(cells, n)?.parse().ok()
}

pub(super) fn flag(cells: &Cells, n: usize) -> bool {
    cells.get(n).is_some_and(|c| c.as_deref() == Some(b"1"))
}

/// What makes rows of one state eligible, but for Posthouse's own table.
struct Arm<'s> {
    /// None: NULL.
    code: Option<&'s str>,
    /// Only those made longer ago than the threshold.
    aged: bool,
    /// Only those whose next attempt is due, where the owner has a column for it.
    waits: bool,
    /// Only those unchanged for so long.
    stuck: bool,
}

impl Source {
    fn arms(&self) -> Vec<Arm<'_>> {
        let codes = &self.codes;
        let aged = self.unsent_after.is_some();
        let pending = codes.pending.iter().map(|code| Some(code.as_str())).chain(codes.null.then_some(None));
        let mut arms: Vec<Arm<'_>> = pending.map(|code| Arm { code, aged, waits: true, stuck: false }).collect();
        if codes.resend_failed && codes.failed.is_some() {
            arms.push(Arm { code: codes.failed.as_deref(), aged: false, waits: true, stuck: false });
        }
        if self.stuck_after.is_some() && codes.sending.is_some() {
            arms.push(Arm { code: codes.sending.as_deref(), aged: false, waits: false, stuck: true });
        }
        arms
    }

    fn is_state(&self, sql: &mut Sql, t: &str, code: Option<&str>) {
        sql.push(&self.state.of(t));
        match code {
            None => sql.push(" IS NULL"),
            Some(code) => sql.push(" = ").of(&self.state, code),
        };
    }

    fn ago(&self, sql: &mut Sql, column: &Column, t: &str, d: Duration) {
        let (d, now) = (sql.dialect.interval(d), column.now(sql.dialect));
        sql.push(&format!("{} < {now} - {d}", column.of(t)));
    }

    fn arm(&self, sql: &mut Sql, t: &str, arm: &Arm<'_>) {
        self.is_state(sql, t, arm.code);
        if let (true, Some(created), Some(after)) = (arm.aged, &self.created, self.unsent_after) {
            sql.push(" AND ");
            self.ago(sql, created, t, after);
        }
        if let (true, Some(next)) = (arm.waits, &self.next_attempt) {
            let (column, now) = (next.of(t), next.now(sql.dialect));
            sql.push(&format!(" AND ({column} IS NULL OR {column} <= {now})"));
        }
        if let (true, Some(updated), Some(after)) = (arm.stuck, &self.updated, self.stuck_after) {
            sql.push(" AND ");
            self.ago(sql, updated, t, after);
        }
    }

    /// Rows of any state that isn't finished: they hold later ones of their key up.
    fn unfinished(&self, sql: &mut Sql, tables: &Tables, t: &str) {
        let codes = &self.codes;
        sql.push("(");
        let mut states: Vec<Option<&str>> = codes.pending.iter().map(|code| Some(code.as_str())).collect();
        states.extend(codes.null.then_some(None));
        states.extend(codes.sending.iter().map(|code| Some(code.as_str())));
        // One that is given up blocks, unless told otherwise.
        if codes.resend_failed || !self.skip_failed {
            states.extend(codes.failed.iter().map(|code| Some(code.as_str())));
        }
        for (i, code) in states.into_iter().enumerate() {
            sql.push(if i == 0 { "" } else { " OR " });
            self.is_state(sql, t, code);
        }
        sql.push(")");
        if self.skip_failed {
            sql.push(" AND NOT ");
            self.given_up(sql, tables, t);
        }
    }

    /// Posthouse has given the row up, and nobody has taken it up again since.
    fn given_up(&self, sql: &mut Sql, tables: &Tables, t: &str) {
        let dialect = sql.dialect;
        sql.push(&format!("(EXISTS (SELECT 1 FROM {} g WHERE g.source = ", tables.name("adopted")));
        sql.bind_text(&self.name);
        sql.push(&format!(" AND g.row_id = {} AND g.next_attempt_at = {})", self.id.row_id(dialect, t), dialect.given_up()));
        if let Some(failed) = &self.codes.failed {
            sql.push(" AND ");
            self.is_state(sql, t, Some(failed));
        }
        sql.push(")");
    }

    /// No lower row of its key is unfinished.
    // Plan: (key, id), one range per row.
    fn head(&self, sql: &mut Sql, tables: &Tables, t: &str) {
        let Some(key) = self.key.as_ref().filter(|_| self.is_ordered()) else { return };
        sql.push(&format!(
            " AND NOT EXISTS (SELECT 1 FROM {} b WHERE {} = {} AND {} < {} AND ",
            self.table,
            key.of("b"),
            key.of(t),
            self.id.of("b"),
            self.id.of(t)
        ));
        self.unfinished(sql, tables, "b");
        sql.push(")");
    }

    /// Posthouse's own table says that the row waits, is being sent, or is given up.
    // Plan: primary key of the table, or a range of (source, next_attempt_at) once.
    fn held_back(&self, sql: &mut Sql, tables: &Tables, t: &str) {
        let dialect = sql.dialect;
        sql.push(&format!("EXISTS (SELECT 1 FROM {} a WHERE a.source = ", tables.name("adopted")));
        sql.bind_text(&self.name);
        sql.push(&format!(" AND a.row_id = {} AND a.next_attempt_at > {}", self.id.row_id(dialect, t), dialect.now()));
        if let Some(failed) = &self.codes.failed {
            sql.push(&format!(" AND (a.next_attempt_at < {} OR ", dialect.given_up()));
            self.is_state(sql, t, Some(failed));
            sql.push(")");
        }
        sql.push(")");
    }

    /// The destination as text, where it is made of columns.
    fn destination_of(&self, sql: &mut Sql, t: &str) {
        let dialect = sql.dialect;
        let parts = self.destination.iter().flat_map(|d| &d.0);
        sql.push("COALESCE(CONCAT(");
        for (i, part) in parts.enumerate() {
            sql.push(if i == 0 { "" } else { ", " });
            match part {
                Part::Text(text) => sql.bind_text(text),
                Part::Column(name) => match self.position(name) {
                    Some(n) => sql.push(&self.message[n].value(dialect, t)),
                    None => sql.push("NULL"),
                },
            };
        }
        sql.push("), '')");
    }

    /// Ids that may be claimed.
    // Plan: per state one range of an index that begins with the state; with (state, id) nothing is sorted.
    pub(super) fn candidates(&self, dialect: Dialect, tables: &Tables, ask: &Ask) -> Sql {
        let id = self.id.name.clone();
        let mut sql = Sql::new(dialect, "SELECT x FROM (");
        let arms = self.arms();
        // Around a single one MySQL takes no further parentheses.
        let (open, close) = if arms.len() > 1 { ("(", ")") } else { ("", "") };
        for (i, arm) in arms.iter().enumerate() {
            sql.push(if i == 0 { open } else { " UNION ALL (" });
            sql.push(&format!("SELECT {} AS x, t.{id} AS o FROM {} t", self.id.written(dialect, "t"), self.table));
            if let (Dialect::MySql, Some(index)) = (dialect, &self.state_index) {
                sql.push(&format!(" FORCE INDEX ({index})"));
            }
            sql.push(" WHERE ");
            self.arm(&mut sql, "t", arm);
            if let Some(after) = &ask.after {
                sql.push(&format!(" AND t.{id} > ")).of(&self.id, after);
            }
            if let (Some(house), Some((first, from))) = (&self.house, ask.houses) {
                sql.push(&format!(" AND {} {} ", house.of("t"), if from { ">=" } else { "<" })).bind(Value::Int(first));
            }
            if !ask.without.is_empty() && self.excludes() {
                sql.push(" AND NOT ");
                let mut destination = Sql::new(dialect, "");
                destination.values = std::mem::take(&mut sql.values);
                self.destination_of(&mut destination, "t");
                sql.values = std::mem::take(&mut destination.values);
                sql.text_among(destination.text().as_str(), &ask.without);
            }
            sql.push(" AND NOT ");
            self.held_back(&mut sql, tables, "t");
            self.head(&mut sql, tables, "t");
            sql.push(&format!(" ORDER BY t.{id} LIMIT {}{close}", ask.limit));
        }
        sql.push(&format!(") c ORDER BY o LIMIT {}", ask.limit));
        sql
    }

    /// Rows whose claim has run out.
    // Plan: a range of (source, next_attempt_at).
    pub(super) fn expired(&self, dialect: Dialect, tables: &Tables) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("SELECT row_id FROM {} WHERE source = ", tables.name("adopted"))).bind_text(&self.name);
        sql.push(&format!(" AND next_attempt_at <= {} AND owner IS NOT NULL ORDER BY next_attempt_at LIMIT 1000", dialect.now()));
        sql
    }

    /// Locks those of the rows that may be claimed and that nobody holds.
    // Plan: the index over the id alone. A lock is taken on no other row.
    pub(super) fn lock(&self, dialect: Dialect, tables: &Tables, ids: &[String]) -> Sql {
        let null = || "NULL".to_owned();
        let text = |column: &Option<Column>| column.as_ref().map_or_else(null, |c| dialect.text(&c.of("t")));
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!(
            "SELECT {}, {}, {}, {}, {}, {}, {}",
            self.id.written(dialect, "t"),
            dialect.text(&self.state.of("t")),
            text(&self.version),
            text(&self.attempts),
            text(&self.max_attempts),
            self.key.as_ref().map_or_else(null, |c| c.written(dialect, "t")),
            self.created_micros(dialect),
        ));
        let conditions: [Option<&str>; 2] = [self.codes.sending.as_deref(), self.codes.failed.as_deref()];
        for code in conditions {
            match code {
                Some(code) => {
                    sql.push(", CASE WHEN ");
                    self.is_state(&mut sql, "t", Some(code));
                    sql.push(" THEN '1' ELSE '0' END");
                }
                None => {
                    sql.push(", '0'");
                }
            }
        }
        match (&self.updated, self.stuck_after) {
            (Some(updated), Some(after)) => {
                sql.push(", CASE WHEN ");
                self.ago(&mut sql, updated, "t", after);
                sql.push(" THEN '1' ELSE '0' END");
            }
            _ => {
                sql.push(", '0'");
            }
        }
        for column in &self.message {
            sql.push(&format!(", {}", column.value(dialect, "t")));
        }
        sql.push(&format!(" FROM {} t", self.table));
        if dialect == Dialect::MySql {
            sql.push(&format!(" FORCE INDEX ({})", self.id_index));
        }
        sql.push(" WHERE ").among(&self.id, "t", ids);
        sql.push(" AND (");
        for (i, arm) in self.arms().iter().enumerate() {
            sql.push(if i == 0 { "(" } else { " OR (" });
            self.arm(&mut sql, "t", arm);
            sql.push(")");
        }
        if let Some(sending) = &self.codes.sending {
            sql.push(" OR ");
            self.is_state(&mut sql, "t", Some(sending));
        }
        sql.push(")");
        self.head(&mut sql, tables, "t");
        sql.push(&format!(" ORDER BY {} FOR UPDATE{} SKIP LOCKED", self.id.of("t"), of_t(dialect)));
        sql
    }

    fn created_micros(&self, dialect: Dialect) -> String {
        let (time, now) = match &self.created {
            Some(created) => (created.of("t"), created.now(dialect)),
            None => ("NULL".into(), dialect.now().into()),
        };
        match dialect {
            // In the session's time zone, which is the server's own.
            Dialect::MySql => format!("CAST(UNIX_TIMESTAMP(COALESCE({time}, NOW(6))) * 1000000 AS CHAR)"),
            Dialect::Postgres => format!("(extract(epoch FROM COALESCE({time}, {now})) * 1000000)::bigint::text"),
        }
    }

    /// Those of the rows that aren't finished.
    pub(super) fn still_open(&self, dialect: Dialect, tables: &Tables, ids: &[String]) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("SELECT {} FROM {} t WHERE ", self.id.written(dialect, "t"), self.table));
        sql.among(&self.id, "t", ids).push(" AND ");
        self.unfinished(&mut sql, tables, "t");
        sql
    }

    /// Posthouse's own rows about these, locked.
    // Plan: primary key.
    pub(super) fn own_rows(&self, dialect: Dialect, tables: &Tables, ids: &[String]) -> Sql {
        let mut sql = Sql::new(dialect, "SELECT row_id, ");
        let numbers = ["attempts", "claims", "version"].map(|c| dialect.text(c)).join(", ");
        let owned = dialect.flag("owner IS NOT NULL");
        let waits = dialect.flag(&format!("next_attempt_at > {}", dialect.now()));
        let given_up = dialect.flag(&format!("next_attempt_at = {}", dialect.given_up()));
        sql.push(&format!("{numbers}, {owned}, {waits}, {given_up}, owner FROM {}", tables.name("adopted")));
        // In a small table it would read, and wait for, all rows.
        sql.push(if dialect == Dialect::MySql { " FORCE INDEX (PRIMARY)" } else { "" });
        sql.push(" WHERE source = ").bind_text(&self.name).push(" AND ").text_among("row_id", ids);
        sql.push(" ORDER BY row_id FOR UPDATE");
        sql
    }

    /// Owner's rows that are being sent now.
    pub(super) fn mark_sending(&self, dialect: Dialect, ids: &[String]) -> Option<Sql> {
        let sending = self.codes.sending.as_ref()?;
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("UPDATE {} AS t SET {} = ", self.table, self.state.name)).of(&self.state, sending);
        self.touch(&mut sql);
        sql.push(" WHERE ").among(&self.id, "t", ids);
        Some(sql)
    }

    /// `, version = version + 1, updated = now`
    pub(super) fn touch(&self, sql: &mut Sql) {
        if let Some(version) = &self.version {
            sql.push(&format!(", {0} = {0} + 1", version.name));
        }
        if let Some(updated) = &self.updated {
            let now = updated.now(sql.dialect);
            sql.push(&format!(", {} = {now}", updated.name));
        }
    }

    /// Claims in Posthouse's own table.
    pub(super) fn own_claims(&self, dialect: Dialect, tables: &Tables, rows: &[Row], claim: &Claim) -> Sql {
        let mut sql = Sql::new(dialect, "");
        let until = format!("{} + {}", dialect.now(), dialect.interval(claim.lease));
        let columns = "source, row_id, owner, attempts, claims, version, next_attempt_at, updated_at";
        sql.push(&format!("INSERT INTO {} ({columns}) ", tables.name("adopted")));
        match dialect {
            Dialect::MySql => {
                sql.push("VALUES ");
                for (i, row) in rows.iter().enumerate() {
                    sql.push(if i == 0 { "(" } else { ", (" });
                    sql.bind_text(&self.name).push(", ").bind_text(&row.id).push(", ").bind_text(&claim.owner);
                    for n in [i64::from(row.own_attempts(self)), i64::from(row.claims), i64::from(row.side)] {
                        sql.push(", ").bind(Value::Int(n));
                    }
                    sql.push(&format!(", {until}, {})", dialect.now()));
                }
                sql.push(
                    " ON DUPLICATE KEY UPDATE owner = VALUES(owner), attempts = VALUES(attempts), claims = VALUES(claims), \
                     version = VALUES(version), next_attempt_at = VALUES(next_attempt_at), updated_at = VALUES(updated_at)",
                );
            }
            Dialect::Postgres => {
                sql.push("SELECT ").bind_text(&self.name).push(", n.id, ").bind_text(&claim.owner);
                sql.push(&format!(", n.attempts, n.claims, n.version, {until}, {} FROM unnest(", dialect.now()));
                let numbers = |of: &dyn Fn(&Row) -> i64| rows.iter().map(|r| of(r).to_string()).collect();
                let lists: [Vec<String>; 4] = [
                    rows.iter().map(|r| r.id.clone()).collect(),
                    numbers(&|r| i64::from(r.own_attempts(self))),
                    numbers(&|r| i64::from(r.claims)),
                    numbers(&|r| i64::from(r.side)),
                ];
                for (i, list) in lists.into_iter().enumerate() {
                    sql.values.push(Value::Texts(list));
                    let n = sql.values.len();
                    sql.push(&if i == 0 { format!("${n}::text[]") } else { format!(", ${n}::text[]::int[]") });
                }
                sql.push(
                    ") AS n (id, attempts, claims, version) ON CONFLICT (source, row_id) DO UPDATE SET owner = excluded.owner, \
                     attempts = excluded.attempts, claims = excluded.claims, version = excluded.version, \
                     next_attempt_at = excluded.next_attempt_at, updated_at = excluded.updated_at",
                );
            }
        }
        sql
    }

    // Plan: primary key.
    pub(super) fn renew(&self, dialect: Dialect, tables: &Tables, owner: &str, ids: &[String], lease: Duration) -> Sql {
        let until = format!("{} + {}", dialect.now(), dialect.interval(lease));
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("UPDATE {} SET next_attempt_at = {until} WHERE source = ", tables.name("adopted")));
        sql.bind_text(&self.name).push(" AND owner = ").bind_text(owner).push(" AND ").text_among("row_id", ids);
        sql
    }

    // Plan: primary key.
    pub(super) fn owned(&self, dialect: Dialect, tables: &Tables, owner: &str, ids: &[String]) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("SELECT row_id FROM {} WHERE source = ", tables.name("adopted"))).bind_text(&self.name);
        sql.push(" AND owner = ").bind_text(owner).push(" AND ").text_among("row_id", ids);
        sql
    }

    // Plan: primary key.
    pub(super) fn forget(&self, dialect: Dialect, tables: &Tables, ids: &[String], and: &str) -> Sql {
        let mut sql = Sql::new(dialect, "");
        sql.push(&format!("DELETE FROM {} WHERE source = ", tables.name("adopted"))).bind_text(&self.name);
        sql.push(" AND ").text_among("row_id", ids).push(and);
        sql
    }

    /// Counts rows by state, up to a limit, and those that are given up.
    // Plan: per state a range of an index that begins with the state.
    pub(super) fn count(&self, dialect: Dialect, tables: &Tables) -> Sql {
        const MOST: u32 = 100_000;
        let mut sql = Sql::new(dialect, "SELECT ");
        for (i, arm) in self.arms().iter().filter(|arm| !arm.stuck).enumerate() {
            sql.push(if i == 0 { "" } else { ", " });
            let mut one = Sql::new(dialect, "");
            one.values = std::mem::take(&mut sql.values);
            one.push(&format!("(SELECT COUNT(*) FROM (SELECT 1 AS one FROM {} t", self.table));
            if let (Dialect::MySql, Some(index)) = (dialect, &self.state_index) {
                one.push(&format!(" FORCE INDEX ({index})"));
            }
            one.push(" WHERE ");
            self.is_state(&mut one, "t", arm.code);
            one.push(" AND NOT ");
            self.given_up(&mut one, tables, "t");
            one.push(&format!(" LIMIT {MOST}) c)"));
            sql.values = std::mem::take(&mut one.values);
            sql.push(&dialect.text(one.text().as_str()));
        }
        sql
    }

    /// What a locked row is, beside what Posthouse's own table says about it.
    fn row(&self, cells: &Cells) -> Row {
        let micros: f64 = number(cells, 6).unwrap_or(0.0);
        let version: Option<i64> = number(cells, 2);
        let was_sending = flag(cells, 7);
        let writes = self.codes.sending.is_some();
        Row {
            id: cell(cells, 0).unwrap_or_default(),
            state: cell(cells, 1),
            was_sending,
            version: version.map(|v| if writes { v + 1 } else { v }),
            attempts: number::<i64>(cells, 3).map_or(0, |n| u32::try_from(n).unwrap_or(0)),
            max_attempts: number::<i64>(cells, 4).and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0),
            claims: 1,
            side: 1,
            key: cell(cells, 5),
            created_at: SystemTime::UNIX_EPOCH + Duration::from_micros(micros.max(0.0) as u64),
            values: cells.get(10..).map(<[_]>::to_vec).unwrap_or_default(),
        }
    }

    /// Which of the locked rows are claimed, by what Posthouse's own table says about them.
    pub(super) fn choose(&self, locked: Vec<Cells>, own: Vec<Cells>, claim: &Claim) -> Taken {
        let own: HashMap<String, Cells> = own.into_iter().filter_map(|cells| Some((cell(&cells, 0)?, cells))).collect();
        let mut taken = Taken::default();
        for cells in locked {
            let mut row = self.row(&cells);
            if row.id.len() > LONGEST_ID {
                taken.too_long += 1;
                continue;
            }
            let (is_failed, stuck) = (flag(&cells, 8), flag(&cells, 9));
            let Some(side) = own.get(&row.id) else {
                // Being sent by its owner.
                if !row.was_sending || stuck {
                    taken.rows.push(row);
                }
                continue;
            };
            let (owned, waits, given_up) = (flag(side, 4), flag(side, 5), flag(side, 6));
            row.side = number::<i32>(side, 3).unwrap_or(0) + 1;
            if given_up {
                // Set back by its owner: it begins anew.
                if self.codes.failed.is_some() && !is_failed && (!row.was_sending || stuck) {
                    taken.rows.push(row);
                }
                continue;
            }
            if waits || (row.was_sending && !owned && !stuck) {
                continue;
            }
            let claims: u32 = number(side, 2).unwrap_or(0);
            if claims > 0 && !claim.suspects {
                taken.suspects.push(row.id);
                continue;
            }
            row.claims = claims + 1;
            if self.attempts.is_none() {
                row.attempts = number(side, 1).unwrap_or(0);
            }
            taken.rows.push(row);
        }
        taken
    }

    /// Those of `ids` that were not locked.
    pub(super) fn not_locked(ids: &[String], locked: &[Cells]) -> Vec<String> {
        let locked: HashSet<String> = locked.iter().filter_map(|cells| cell(cells, 0)).collect();
        ids.iter().filter(|id| !locked.contains(*id)).cloned().collect()
    }
}

pub(super) fn of_t(dialect: Dialect) -> &'static str {
    // MariaDB has no such clause, and no other table is in the statement.
    if dialect == Dialect::Postgres { " OF t" } else { "" }
}

impl Row {
    /// Attempts that are counted in Posthouse's own table.
    pub(super) fn own_attempts(&self, source: &Source) -> u32 {
        if source.attempts.is_some() { 0 } else { self.attempts }
    }
}
