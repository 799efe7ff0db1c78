//! Statements out of quoted names and bound values. Nothing else gets into one: names come from the catalogue, values are bound,
//! and numbers are numbers.

use std::time::Duration;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    #[cfg_attr(not(feature = "mysql"), allow(dead_code, reason = "made where there is a MySQL"))]
    MySql,
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "made where there is a PostgreSQL"))]
    Postgres,
}

/// The year of rows that are given up.
const GIVEN_UP: &str = "9999-12-31 00:00:00";

impl Dialect {
    pub(super) fn quote(self, name: &str) -> String {
        match self {
            Self::MySql => format!("`{}`", name.replace('`', "``")),
            Self::Postgres => format!("\"{}\"", name.replace('"', "\"\"")),
        }
    }

    /// The time by which Posthouse's own rows are due.
    pub(super) fn now(self) -> &'static str {
        match self {
            Self::MySql => "UTC_TIMESTAMP(6)",
            Self::Postgres => "statement_timestamp()",
        }
    }

    pub(super) fn given_up(self) -> String {
        match self {
            Self::MySql => format!("TIMESTAMP'{GIVEN_UP}.000000'"),
            Self::Postgres => format!("timestamptz '{GIVEN_UP}+00'"),
        }
    }

    pub(super) fn interval(self, d: Duration) -> String {
        let micros = i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
        match self {
            Self::MySql => format!("INTERVAL {micros} MICROSECOND"),
            Self::Postgres => format!("interval '{micros} microseconds'"),
        }
    }

    /// An expression of any type as text.
    pub(super) fn text(self, expression: &str) -> String {
        match self {
            Self::MySql => format!("CAST({expression} AS CHAR)"),
            Self::Postgres => format!("({expression})::text"),
        }
    }

    /// A condition as '1' or '0'.
    pub(super) fn flag(self, condition: &str) -> String {
        format!("CASE WHEN {condition} THEN '1' ELSE '0' END")
    }
}

/// What kind of values a column holds.
#[cfg_attr(not(all(feature = "mysql", feature = "postgres")), allow(dead_code, reason = "each database has its own"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Int,
    UnsignedInt,
    Number,
    Bool,
    Text,
    Json,
    Binary,
    Time,
    Other,
}

/// A column of an adopted table.
#[derive(Debug, Clone)]
pub(crate) struct Column {
    pub(crate) plain: String,
    pub(crate) kind: Kind,
    /// Quoted.
    pub(super) name: String,
    /// Its type, as the catalogue writes it.
    pub(super) sql_type: String,
    /// How many characters it holds, if that is limited.
    pub(super) characters: Option<usize>,
    /// The highest character that it can hold.
    pub(super) highest: char,
}

impl Column {
    /// The column of row `t`, qualified.
    pub(super) fn of(&self, t: &str) -> String {
        format!("{t}.{}", self.name)
    }

    /// Its value as text, or as bytes where it holds bytes.
    pub(super) fn value(&self, dialect: Dialect, t: &str) -> String {
        if self.kind == Kind::Binary { self.of(t) } else { dialect.text(&self.of(t)) }
    }

    /// Its value as text in any case: as ids are written in Posthouse's own table.
    pub(super) fn written(&self, dialect: Dialect, t: &str) -> String {
        match (self.kind, dialect) {
            (Kind::Binary, Dialect::MySql) => format!("HEX({})", self.of(t)),
            (Kind::Binary, Dialect::Postgres) => format!("encode({}, 'hex')", self.of(t)),
            _ => dialect.text(&self.of(t)),
        }
    }

    /// The same, comparable with a column of Posthouse's own.
    pub(super) fn row_id(&self, dialect: Dialect, t: &str) -> String {
        let written = self.written(dialect, t);
        match dialect {
            Dialect::MySql => format!("CAST({written} AS BINARY)"),
            Dialect::Postgres => format!("({written} COLLATE \"C\")"),
        }
    }

    /// The present time, as this column holds it.
    pub(super) fn now(&self, dialect: Dialect) -> String {
        match dialect {
            Dialect::MySql => "NOW(6)".into(),
            Dialect::Postgres => format!("CAST(statement_timestamp() AS {})", self.sql_type),
        }
    }

    /// Text that fits into it: recording an error must not fail.
    pub(super) fn fitting(&self, text: &str) -> String {
        let most = self.characters.unwrap_or(usize::MAX).min(2_000);
        text.chars()
            .take(most)
            .map(|c| match c {
                '\0' => '?',
                c if c > self.highest => '?',
                c => c,
            })
            .collect()
    }
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    Int(i64),
    Unsigned(u64),
    Text(String),
    /// An array; PostgreSQL alone.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "MySQL has no arrays"))]
    Texts(Vec<String>),
}

/// A statement that grows.
#[derive(Debug)]
pub(super) struct Sql {
    pub(super) dialect: Dialect,
    text: String,
    pub(super) values: Vec<Value>,
}

impl Sql {
    pub(super) fn new(dialect: Dialect, text: &str) -> Self {
        Self { dialect, text: text.into(), values: Vec::new() }
    }

    pub(super) fn push(&mut self, text: &str) -> &mut Self {
        self.text.push_str(text);
        self
    }

    /// A bound value.
    pub(super) fn bind(&mut self, value: Value) -> &mut Self {
        let null_or_number = matches!(value, Value::Int(_) | Value::Unsigned(_));
        self.values.push(value);
        match self.dialect {
            Dialect::MySql => self.text.push('?'),
            Dialect::Postgres if null_or_number => self.text.push_str(&format!("${}::bigint", self.values.len())),
            Dialect::Postgres => self.text.push_str(&format!("${}::text", self.values.len())),
        }
        self
    }

    pub(super) fn bind_text(&mut self, text: &str) -> &mut Self {
        self.bind(Value::Text(text.into()))
    }

    /// A length of time as a bound value, so that statements stay the same.
    pub(super) fn interval(&mut self, d: Duration) -> &mut Self {
        let micros = Value::Int(i64::try_from(d.as_micros()).unwrap_or(i64::MAX));
        match self.dialect {
            Dialect::MySql => self.push("INTERVAL ").bind(micros).push(" MICROSECOND"),
            Dialect::Postgres => self.push("(").bind(micros).push(" * interval '1 microsecond')"),
        }
    }

    /// A value of a column, as it is written in text.
    pub(super) fn of(&mut self, column: &Column, text: &str) -> &mut Self {
        match self.dialect {
            Dialect::MySql => {
                let value = match column.kind {
                    Kind::Int => text.parse().ok().map(Value::Int),
                    Kind::UnsignedInt => text.parse().ok().map(Value::Unsigned),
                    _ => None,
                };
                let binary = column.kind == Kind::Binary;
                self.push(if binary { "UNHEX(" } else { "" });
                self.bind(value.unwrap_or_else(|| Value::Text(text.into())));
                self.push(if binary { ")" } else { "" });
            }
            Dialect::Postgres => {
                let binary = column.kind == Kind::Binary;
                self.push(if binary { "decode(" } else { "CAST(" });
                self.bind(Value::Text(text.into()));
                if binary {
                    self.push(", 'hex')");
                } else {
                    self.push(&format!(" AS {})", column.sql_type));
                }
            }
        }
        self
    }

    /// `column IN (…)`, for at least one value.
    pub(super) fn among(&mut self, column: &Column, t: &str, values: &[String]) -> &mut Self {
        self.push(&column.of(t));
        if self.dialect == Dialect::Postgres && column.kind != Kind::Binary {
            self.values.push(Value::Texts(values.to_vec()));
            let n = self.values.len();
            return self.push(&format!(" = ANY (CAST(${n}::text[] AS {}[]))", column.sql_type));
        }
        self.push(" IN (");
        for (i, value) in padded(values).enumerate() {
            self.push(if i == 0 { "" } else { ", " });
            self.of(column, value);
        }
        self.push(")")
    }

    /// `expression IN (…)` for a text, for at least one value.
    pub(super) fn text_among(&mut self, expression: &str, values: &[String]) -> &mut Self {
        self.push(expression);
        if self.dialect == Dialect::Postgres {
            self.values.push(Value::Texts(values.to_vec()));
            let n = self.values.len();
            return self.push(&format!(" = ANY (${n}::text[])"));
        }
        self.push(" IN (");
        for (i, value) in padded(values).enumerate() {
            self.push(if i == 0 { "" } else { ", " });
            self.bind_text(value);
        }
        self.push(")")
    }

    pub(super) fn text(&self) -> SqlStr {
        AssertSqlSafe(self.text.clone()).into_sql_str()
    }
}

/// The values, the last one repeated up to a power of two: so few different statements are prepared.
fn padded(values: &[String]) -> impl Iterator<Item = &String> {
    let more = values.len().next_power_of_two() - values.len();
    values.iter().chain(values.last().into_iter().cycle().take(more))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(kind: Kind) -> Column {
        let (characters, highest) = (Some(5), '\u{7f}');
        Column { plain: "a\"`b".into(), kind, name: "x".into(), sql_type: "bigint".into(), characters, highest }
    }

    #[test]
    fn names_are_quoted_and_values_bound() {
        assert_eq!(Dialect::MySql.quote("a`; DROP TABLE b"), "`a``; DROP TABLE b`");
        assert_eq!(Dialect::Postgres.quote("a\"; DROP TABLE b"), "\"a\"\"; DROP TABLE b\"");
        let values = ["1".to_owned(), "2".to_owned(), "3'; DROP".to_owned()];
        let mut sql = Sql::new(Dialect::MySql, "SELECT 1 WHERE ");
        sql.among(&column(Kind::Text), "t", &values);
        assert_eq!(sql.text().as_str(), "SELECT 1 WHERE t.x IN (?, ?, ?, ?)");
        let mut sql = Sql::new(Dialect::Postgres, "SELECT 1 WHERE ");
        sql.among(&column(Kind::Int), "t", &values).push(" AND t.y = ").of(&column(Kind::Int), "7");
        assert_eq!(
            sql.text().as_str(),
            "SELECT 1 WHERE t.x = ANY (CAST($1::text[] AS bigint[])) AND t.y = CAST($2::text AS bigint)"
        );
    }

    #[test]
    fn errors_fit_into_their_column() {
        assert_eq!(column(Kind::Text).fitting("a\0bß😀cdef"), "a?b??");
    }
}
