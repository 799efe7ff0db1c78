//! Which tables a mapping means, and whether it fits them.

use std::collections::BTreeSet;

use super::sql::{Column, Dialect, Kind};
use super::{Codes, Source};
use crate::settings::Template;
use crate::{Adopted, OnExhausted, StateCode};

/// A table as the catalogue describes it.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) schema: String,
    pub(super) name: String,
    pub(super) columns: Vec<Column>,
    pub(super) indexes: Vec<Index>,
}

#[derive(Debug)]
pub(super) struct Index {
    pub(super) name: String,
    pub(super) unique: bool,
    /// What rows of a table are kept by.
    pub(super) primary: bool,
    /// In order; an empty name is an expression, or a part of a column.
    pub(super) columns: Vec<String>,
    /// The condition of a partial index.
    pub(super) only: Option<String>,
}

/// What was found for a mapping.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The tables it fits, by name.
    pub(crate) sources: Vec<Source>,
    /// All tables it means, by name.
    pub(crate) tables: Vec<String>,
    /// What keeps it from holding.
    pub(crate) problems: Vec<String>,
    /// Names that are missing in the numbering.
    pub(crate) gaps: Vec<String>,
    /// Tables whose columns differ from the first one's.
    pub(crate) differences: Vec<String>,
    /// Statements that would make indexes that reads need.
    pub(crate) indexes: Vec<String>,
}

/// The part of a pattern before its digits; None for a plain name.
pub(super) fn stem(table: &str) -> Option<&str> {
    table.strip_suffix('*')
}

/// Whether a mapping means a table.
pub(super) fn means(pattern: &str, name: &str) -> bool {
    match stem(pattern) {
        None => pattern == name,
        Some(stem) => {
            name.strip_prefix(stem).is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        }
    }
}

/// `own`: the schema of Posthouse's own tables.
pub(super) fn found(dialect: Dialect, mapping: &Adopted, own: &str, tables: Vec<Table>) -> Found {
    let mut out = Found::default();
    if tables.is_empty() {
        let place = mapping.schema.as_deref().unwrap_or(own);
        out.problems.push(format!(
            "table: {:?} means no table in {place:?} that this account may read; its name is written as the catalogue has it",
            mapping.table
        ));
        return out;
    }
    out.gaps = gaps(mapping, &tables);
    let described = |t: &Table| -> BTreeSet<String> { t.columns.iter().map(|c| format!("{} {}", c.plain, c.sql_type)).collect() };
    let first = described(&tables[0]);
    for table in &tables {
        let it = described(table);
        let differs: Vec<String> = first
            .difference(&it)
            .map(|c| format!("without {c}"))
            .chain(it.difference(&first).map(|c| format!("with {c}")))
            .collect();
        if !differs.is_empty() {
            out.differences.push(format!("{} differs from {}: {}", table.name, tables[0].name, differs.join(", ")));
        }
    }
    for table in &tables {
        out.tables.push(table.name.clone());
        let mut problems = Vec::new();
        let source = source(dialect, mapping, own, table, &mut problems);
        out.problems.extend(problems.into_iter().map(|(field, why)| format!("{field}: {why} (table {})", table.name)));
        let Some(source) = source else { continue };
        let name = |what: &str| dialect.quote(&format!("posthouse_{what}"));
        if source.state_index.is_none() {
            let columns = if source.state.plain == source.id.plain {
                source.id.name.clone()
            } else {
                format!("{}, {}", source.state.name, source.id.name)
            };
            out.indexes.push(format!("CREATE INDEX {} ON {} ({columns})", name("state"), source.table));
        }
        if let Some(key) = &source.key
            && source.is_ordered()
            && !table.indexes.iter().any(|i| i.only.is_none() && i.columns.first() == Some(&key.plain))
        {
            out.indexes.push(format!("CREATE INDEX {} ON {} ({}, {})", name("key"), source.table, key.name, source.id.name));
        }
        out.sources.push(source);
    }
    out
}

/// Names missing between the lowest and the highest number.
fn gaps(mapping: &Adopted, tables: &[Table]) -> Vec<String> {
    let Some(stem) = stem(&mapping.table) else { return Vec::new() };
    let digits: Vec<&str> = tables.iter().filter_map(|t| t.name.strip_prefix(stem)).collect();
    let numbers: BTreeSet<u64> = digits.iter().filter_map(|d| d.parse().ok()).collect();
    let (Some(low), Some(high)) = (numbers.first(), numbers.last()) else { return Vec::new() };
    let width = digits.first().map_or(0, |d| d.len());
    // Numbers such as dates leave more out than anybody wants to read.
    (*low..*high).filter(|n| !numbers.contains(n)).take(100).map(|n| format!("{stem}{n:0width$}")).collect()
}

/// The mapping on one table; None with problems.
fn source(dialect: Dialect, mapping: &Adopted, own: &str, table: &Table, problems: &mut Vec<(String, String)>) -> Option<Source> {
    let find = |name: &str| table.columns.iter().find(|c| c.plain == name);
    for (field, column) in mapping.columns() {
        if find(&column).is_none() {
            let names: Vec<&str> = table.columns.iter().map(|c| c.plain.as_str()).collect();
            problems.push((field, format!("there is no column {column:?}; there are {}", names.join(", "))));
        }
    }
    let mut role = |field: &str, name: &Option<String>, kinds: &[Kind], what: &str| -> Option<Column> {
        let column = find(name.as_deref()?)?;
        if !kinds.contains(&column.kind) {
            problems.push((field.into(), format!("{} is of type {}, and must be {what}", column.plain, column.sql_type)));
            return None;
        }
        Some(column.clone())
    };
    let (int, text) = ([Kind::Int, Kind::UnsignedInt], [Kind::Text]);
    let mut comparable = vec![Kind::Int, Kind::UnsignedInt, Kind::Text, Kind::Binary];
    if dialect == Dialect::Postgres {
        comparable.extend([Kind::Number, Kind::Time]);
    }
    let id = role("id", &mapping.id, &comparable, "whole numbers, text or bytes");
    let state_kinds = [Kind::Int, Kind::UnsignedInt, Kind::Text, Kind::Bool];
    let state = role("state.column", &mapping.state.column, &state_kinds, "whole numbers, text or boolean");
    let key = role("key", &mapping.key, &comparable, "whole numbers, text or bytes");
    let attempts = role("attempts", &mapping.attempts, &int, "whole numbers");
    let max_attempts = role("max_attempts", &mapping.max_attempts, &int, "whole numbers");
    let version = role("version", &mapping.version, &int, "whole numbers");
    let house = role("house", &mapping.house, &int, "whole numbers");
    let error = role("error", &mapping.error, &text, "text");
    let next_attempt = role("next_attempt", &mapping.next_attempt, &[Kind::Time], "a date with time");
    let created = role("created", &mapping.created, &[Kind::Time], "a date with time");
    let updated = role("updated", &mapping.updated, &[Kind::Time], "a date with time");
    let alone = |column: &Column| {
        let mut unique = table.indexes.iter().filter(|i| i.unique && i.only.is_none() && i.columns == [column.plain.clone()]);
        unique.next()
    };
    let id_index = id.as_ref().and_then(alone);
    if let (Some(id), None) = (&id, id_index) {
        let why = format!("{} has no primary key or unique index on it alone, so that a write could meet several rows", id.plain);
        problems.push(("id".into(), why));
    }
    let codes = state.as_ref().map(|state| codes(mapping, state, problems));
    let (id, state, id_index) = (id?, state?, id_index?);
    if !problems.is_empty() {
        return None;
    }
    let names: BTreeSet<String> = message_columns(mapping);
    let message = table.columns.iter().filter(|c| names.contains(&c.plain)).cloned().collect();
    let mut fitting: Vec<(bool, &Index)> = Vec::new();
    for index in &table.indexes {
        let second = index.columns.get(1);
        let sorted = second == Some(&id.plain) || (second.is_none() && id_index.primary && dialect == Dialect::MySql);
        match &index.only {
            None if index.columns.first() == Some(&state.plain) => fitting.push((!sorted, index)),
            // Made for the rows that aren't finished.
            Some(only) if only.contains(&state.plain) => fitting.push((false, index)),
            _ => {}
        }
    }
    fitting.sort_by_key(|(unsorted, _)| *unsorted);
    let state_index = fitting.first().map(|(_, index)| dialect.quote(&index.name));
    Some(Source {
        name: if table.schema == own { table.name.clone() } else { format!("{}.{}", table.schema, table.name) },
        table: format!("{}.{}", dialect.quote(&table.schema), dialect.quote(&table.name)),
        unique_key: key.as_ref().is_some_and(|key| key.plain == id.plain || alone(key).is_some()),
        id_index: dialect.quote(&id_index.name),
        state_index,
        id,
        state,
        key,
        attempts,
        max_attempts,
        next_attempt,
        error,
        version,
        created,
        updated,
        house,
        message,
        destination: mapping.destination.as_deref().and_then(|text| Template::parse(text).ok()),
        codes: codes?,
        unsent_after: mapping.unsent_after,
        stuck_after: mapping.stuck_after,
        skip_failed: mapping.on_exhausted == OnExhausted::Skip,
        dialect,
    })
}

/// Columns whose values go into the message.
fn message_columns(mapping: &Adopted) -> BTreeSet<String> {
    const OWN: [&str; 10] =
        ["id", "state.column", "attempts", "max_attempts", "next_attempt", "error", "version", "created", "updated", "house"];
    mapping.columns().into_iter().filter(|(field, _)| !OWN.contains(&field.as_str())).map(|(_, column)| column).collect()
}

/// The codes as the state column writes them.
fn codes(mapping: &Adopted, state: &Column, problems: &mut Vec<(String, String)>) -> Codes {
    let mut written = |field: &str, code: &StateCode| -> String {
        let text = match (state.kind, code) {
            (Kind::Int | Kind::UnsignedInt, StateCode::Bool(b)) => u8::from(*b).to_string(),
            (Kind::Bool, StateCode::Number(n @ (0 | 1))) => (*n == 1).to_string(),
            (_, code) => code.to_string(),
        };
        let fits = match state.kind {
            Kind::Int => text.parse::<i64>().is_ok(),
            Kind::UnsignedInt => text.parse::<u64>().is_ok(),
            Kind::Bool => text.parse::<bool>().is_ok(),
            _ => state.characters.is_none_or(|most| text.chars().count() <= most),
        };
        if !fits {
            problems.push((field.into(), format!("{code} does not fit into {} of type {}", state.plain, state.sql_type)));
        }
        text
    };
    let of = &mapping.state;
    Codes {
        pending: of.pending.iter().flatten().map(|code| written("state.pending", code)).collect(),
        null: of.null == Some(true),
        sending: of.sending.as_ref().map(|code| written("state.sending", code)),
        sent: of.sent.as_ref().map(|code| written("state.sent", code)).unwrap_or_default(),
        failed: of.failed.as_ref().map(|code| written("state.failed", code)),
        resend_failed: of.resend_failed == Some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_names_with_digits() {
        for (pattern, name, meant) in [
            ("user_strategy_export_*", "user_strategy_export_001", true),
            ("user_strategy_export_*", "user_strategy_export_", false),
            ("user_strategy_export_*", "user_strategy_export_001_bak", false),
            ("user_strategy_export_*", "user_strategy_export_x", false),
            ("t", "t", true),
            ("t", "t1", false),
        ] {
            assert_eq!(means(pattern, name), meant, "{pattern} {name}");
        }
    }

    #[test]
    fn gaps_in_the_numbering_are_named() {
        let table = |name: &str| Table { schema: "s".into(), name: name.into(), columns: Vec::new(), indexes: Vec::new() };
        let tables = ["t_001", "t_002", "t_004"].map(table);
        assert_eq!(gaps(&Adopted::table("t_*"), &tables), ["t_003"]);
        assert!(gaps(&Adopted::table("t_001"), &tables[..1]).is_empty());
    }
}
