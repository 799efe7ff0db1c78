//! What `posthouse doctor` learns from a database: facts, and what is wrong with what to do about it. Nothing is changed.

use serde::Serialize;

/// How much a [`Finding`] matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// It works, and somebody should look at it.
    Warning,
    /// Messages are not published, not sent or not removed because of it.
    Error,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at: `version`, `tables`, `privileges`, `indexes`, `publishing`, `vacuum`, `transactions`, `file`.
    pub check: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was found, a sentence.
    pub text: String,
    /// What to do about it.
    pub fix: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self { check, severity: Severity::Ok, text: text.into(), fix: None }
    }

    /// Somebody should look at it.
    pub fn warning(check: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, severity: Severity::Warning, text: text.into(), fix: Some(fix.into()) }
    }

    /// It keeps messages from being published, sent or removed.
    pub fn error(check: &'static str, text: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { check, severity: Severity::Error, text: text.into(), fix: Some(fix.into()) }
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Examination {
    /// Name and version of the server.
    pub server: String,
    /// Its clock, milliseconds since 1970 UTC.
    pub now_ms: i64,
    /// Schema version and number of houses; None where there are no tables.
    pub schema: Option<(i32, u16)>,
    /// Partitions of the log that are ready ahead; None where it has none.
    pub partitions_ahead: Option<u32>,
    /// The log; None while it is empty.
    pub log: Option<LogFacts>,
    /// What was looked at.
    pub findings: Vec<Finding>,
}

/// How much there is in the log, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LogFacts {
    /// Lowest row id.
    pub first: i64,
    /// Highest row id.
    pub last: i64,
    /// When the lowest was published, milliseconds since 1970 UTC.
    pub first_ms: i64,
    /// When the highest was.
    pub last_ms: i64,
    /// What its tables and indexes take, in bytes. In SQLite the whole file.
    pub bytes: i64,
}

impl LogFacts {
    /// Ids and times of the lowest and the highest row, and the bytes.
    pub fn new(first: i64, last: i64, first_ms: i64, last_ms: i64, bytes: i64) -> Self {
        Self { first, last, first_ms, last_ms, bytes }
    }
}

impl Examination {
    pub(crate) fn new(server: String, now_ms: i64) -> Self {
        Self { server, now_ms, schema: None, partitions_ahead: None, log: None, findings: Vec::new() }
    }

    pub(crate) fn supported(&mut self, is: bool, least: &str) {
        let server = &self.server;
        self.findings.push(if is {
            Finding::ok("version", server.clone())
        } else {
            Finding::error("version", format!("{server} is older than anything that is tested"), format!("use {least} or newer"))
        });
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    /// Privileges as `SELECT on posthouse_meta`, of the account that this is asked as.
    pub(crate) fn privileges(&mut self, missing: &[String], fix: &str) {
        self.findings.push(if missing.is_empty() {
            Finding::ok("privileges", "the account may do all that a relay does")
        } else {
            Finding::error("privileges", format!("the account lacks {}", missing.join(", ")), fix)
        });
    }

    /// The statements that make the indexes which are missing.
    pub(crate) fn indexes(&mut self, statements: &[String]) {
        self.findings.push(if statements.is_empty() {
            Finding::ok("indexes", "all are there")
        } else {
            let text = format!("{} missing or not valid", if statements.len() == 1 { "an index is" } else { "indexes are" });
            Finding::error("indexes", text, format!("run {}", statements.join("; ")))
        });
    }

    /// What [`Upkeep`](super::Upkeep) calls problems: each says what to do itself.
    pub(crate) fn publishing(&mut self, problems: Vec<String>) {
        if problems.is_empty() {
            self.findings.push(Finding::ok("publishing", "the trigger that adds pending rows is there and works"));
        }
        for problem in problems {
            let (text, fix) = problem.split_once("; ").unwrap_or((&problem, "run `posthouse migrate --print` and compare"));
            self.findings.push(Finding::error("publishing", text, fix));
        }
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    /// A transaction that has been open for long keeps what was deleted since from being cleaned up.
    pub(crate) fn transactions(&mut self, oldest: Option<(String, i64)>, fix: &str) {
        self.findings.push(match oldest {
            Some((who, minutes)) if minutes >= 60 => Finding::warning(
                "transactions",
                format!("{who} has been open for {minutes} minutes; rows deleted since then can't be cleaned up"),
                fix,
            ),
            _ => Finding::ok("transactions", "none has been open for an hour"),
        });
    }
}

/// An index that migration makes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpectedIndex {
    /// Its table, without prefix.
    pub(crate) table: String,
    /// Its name: a template in PostgreSQL and SQLite, plain in MySQL.
    pub(crate) name: String,
    /// The template of the statement that makes it.
    pub(crate) make: String,
}

/// The names of the tables that these templates of migration make.
pub(crate) fn expected_tables(templates: &str) -> Vec<String> {
    let made = templates.split("CREATE TABLE ").skip(1);
    let name = |rest: &str| Some(rest.trim_start_matches("IF NOT EXISTS ").strip_prefix('{')?.split_once('}')?.0.to_owned());
    made.filter_map(name).collect()
}

/// The indexes that these templates of migration make: `CREATE INDEX {-name} ON {table} …;` and, within tables, `KEY name (…)`.
pub(crate) fn expected_indexes(templates: &str) -> Vec<ExpectedIndex> {
    let mut out = Vec::new();
    let mut table = String::new();
    for line in templates.lines().map(str::trim) {
        if let Some(made) = expected_tables(line).pop() {
            table = made;
        } else if let Some((altered, _)) = line.strip_prefix("ALTER TABLE {").and_then(|rest| rest.split_once('}')) {
            table = altered.to_owned();
        }
        let key = line.strip_prefix("KEY ").or_else(|| line.split_once("ADD KEY ").map(|(_, rest)| rest));
        if let Some((name, columns)) = key.and_then(|rest| rest.trim_end_matches(',').split_once(' ')) {
            let make = format!("ALTER TABLE {{{table}}} ADD KEY {name} {columns}");
            // A later version may have made it anew.
            out.retain(|other: &ExpectedIndex| (&*other.table, &*other.name) != (&*table, name));
            out.push(ExpectedIndex { table: table.clone(), name: name.to_owned(), make });
        }
    }
    for rest in templates.split("CREATE INDEX ").skip(1) {
        let statement = rest.split(';').next().unwrap_or(rest).split("\n--").next().unwrap_or(rest).trim();
        let Some((name, on)) = statement.split_once(" ON ") else { continue };
        let on = on.trim_start_matches('{').split_once('}').map(|(table, _)| table.to_owned());
        let Some(table) = on else { continue };
        let make = format!("CREATE INDEX {}", statement.split_whitespace().collect::<Vec<_>>().join(" "));
        out.push(ExpectedIndex { table, name: name.replace("{-", "{="), make });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_indexes_are_read_out_of_migration() {
        let text = "CREATE TABLE IF NOT EXISTS {a} (\n  id INT,\n  PRIMARY KEY (id),\n  KEY a_x (x, `y`),\n  KEY a_z (z)\n)\n-- ;;\n\
                    ALTER TABLE {a} DROP KEY a_z, ADD KEY a_z (z, y)\n-- ;;\nCREATE TABLE {b} (LIKE {a});\nCREATE INDEX {-b_x} ON {b} (x)\n  WHERE x IS NOT NULL;\n";
        assert_eq!(expected_tables(text), ["a", "b"]);
        let found = expected_indexes(text);
        let found: Vec<_> = found.iter().map(|i| (i.table.as_str(), i.name.as_str(), i.make.as_str())).collect();
        assert_eq!(
            found,
            [
                ("a", "a_x", "ALTER TABLE {a} ADD KEY a_x (x, `y`)"),
                ("a", "a_z", "ALTER TABLE {a} ADD KEY a_z (z, y)"),
                ("b", "{=b_x}", "CREATE INDEX {-b_x} ON {b} (x) WHERE x IS NOT NULL"),
            ]
        );
    }
}
