//! `posthouse config`.

use std::fmt::Write as _;

use serde_json::json;

use crate::cli::{ConfigArgs, Global};
use crate::config::reference::{Entry, Section, meant, sections};
use crate::config::suggest;
use crate::failure::Failure;
use crate::output;

/// What stands above the tables of the page in the documentation.
const INTRODUCTION: &str = "\
# Configuration reference

<!-- Written by `posthouse config --markdown`; a test compares it. Change `crates/posthouse-server/src/config/keys.rs` instead. -->

Every key of `posthouse.toml`, written by the program itself; `posthouse config KEY` explains one in a terminal.
[configuration.md](configuration.md) says what they are for, with examples.

| type | written |
|---|---|
| time | text with a number and a unit: `\"500ms\"`, `\"10s\"`, `\"5m\"`, `\"1h 30m\"`, `\"7d\"` |
| secret | text that is never shown, neither by `--print-config` nor in errors |
| text, list of texts | `\"a\"`, `[\"a\", \"b\"]`; in text `${NAME}` is a variable and `${file:/path}` a file |
| number | `2.5`; in a whole number digits alone |

*needed*: without it the file is refused. Keys of tables within a table are written with a dot: `retry.base` of `[routes.orders]` is
`retry = { base = \"1s\" }` there, or `base = \"1s\"` under `[routes.orders.retry]`.
";

pub(crate) fn run(global: &Global, args: &ConfigArgs) -> Result<(), Failure> {
    let mut sections = sections();
    if let Some(asked) = &args.key {
        let known: Vec<String> = sections.iter().flat_map(|s| &s.entries).map(|entry| entry.path.clone()).collect();
        for section in &mut sections {
            section.entries.retain(|entry| meant(&entry.path, asked));
        }
        sections.retain(|section| !section.entries.is_empty());
        if sections.is_empty() {
            let like = suggest(asked, known.iter().map(String::as_str)).map(|like| format!("; did you mean {like:?}?"));
            return Err(Failure::not_so(format!("there is no key {asked:?}{}", like.unwrap_or_default())));
        }
    }
    if global.json {
        output::json(&json!({ "tables": sections }));
    } else if args.markdown {
        output::say(markdown(&sections).trim_end());
    } else {
        output::say(text(&sections).trim_end());
    }
    Ok(())
}

fn facts<'e>(entry: &'e Entry, mark: &str) -> Vec<std::borrow::Cow<'e, str>> {
    let mut facts = vec![entry.kind.as_str().into()];
    if entry.needed {
        facts.push("needed".into());
    }
    facts.extend(entry.default.iter().map(|default| format!("default {mark}{default}{mark}").into()));
    if !entry.limits.is_empty() {
        facts.push(entry.limits.into());
    }
    facts
}

fn text(sections: &[Section]) -> String {
    let mut out = String::new();
    for section in sections {
        let _ = writeln!(out, "{}  {}\n", section.heading, section.about);
        for entry in &section.entries {
            let _ = writeln!(out, "  {}\n      {}\n      {}", entry.key, facts(entry, "").join("; "), entry.about);
        }
        out.push('\n');
    }
    // Marks of Markdown help nobody here.
    out.replace('`', "")
}

fn markdown(sections: &[Section]) -> String {
    let mut out = INTRODUCTION.to_owned();
    for section in sections {
        let _ = write!(out, "\n## `{}`\n\n{}", section.heading, section.about);
        if !section.limits.is_empty() {
            let _ = write!(out, " Names: {}.", section.limits);
        }
        out.push_str("\n\n| key | type | default | limits | meaning |\n|---|---|---|---|---|\n");
        for entry in &section.entries {
            let default = match &entry.default {
                _ if entry.needed => "*needed*".to_owned(),
                Some(default) => format!("`{default}`"),
                None => String::new(),
            };
            let _ = writeln!(out, "| `{}` | {} | {default} | {} | {} |", entry.key, entry.kind, entry.limits, entry.about);
        }
    }
    out
}
