//! Command lines and configuration files in the documentation are those of this program. What else stands there is tried by the
//! integration tests, in `tests/it/book`.

#[path = "../tests/it/book/markdown.rs"]
mod markdown;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory};
use toml::{Table, Value};

use self::markdown::{blocks, pages, posthouse_lines, root, spans};
use crate::cli::Cli;

#[test]
fn every_command_line_is_understood() {
    let (mut wrong, mut tried) = (Vec::new(), 0);
    let mut cli = Cli::command();
    for page in pages() {
        for block in blocks(&page) {
            for words in posthouse_lines(&block) {
                tried += 1;
                match cli.try_get_matches_from_mut(&words) {
                    Err(e) if !matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
                        wrong.push(format!("{}: {}: {e}", block.place(), words.join(" ")));
                    }
                    _ => {}
                }
            }
        }
        for (line, span) in spans(&page).into_iter().filter(|(_, span)| span.starts_with("posthouse ")) {
            // `posthouse messages list|show|skip` are several.
            let choice = span.split_whitespace().find(|word| word.contains('|')).unwrap_or_default();
            let alternatives = choice.split('|');
            for one in alternatives {
                tried += 1;
                let words = span.split_whitespace().map(|word| if word.contains('|') { one } else { word });
                if let Err(why) = mentioned(&mut cli, &words.collect::<Vec<_>>()) {
                    wrong.push(format!("{}:{line}: {span}: {why}", page.path));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried > 100, "only {tried} command lines were found");
}

/// What a sentence says about a command: perhaps without its arguments, or with names in their place.
fn mentioned(cli: &mut Command, words: &[&str]) -> Result<(), String> {
    let example = |word: &str| match word.trim_matches(['[', ']', '…', '.']) {
        "N" | "ID" | "IDS" | "ROW" => "1".to_owned(),
        "TIME" => "1h".to_owned(),
        "SHELL" => "bash".to_owned(),
        other => other.to_owned(),
    };
    let given = cli.try_get_matches_from_mut(words).map(drop);
    let with_examples = cli.try_get_matches_from_mut(words.iter().map(|word| example(word))).map(drop);
    let short = [
        ErrorKind::DisplayHelp,
        ErrorKind::MissingRequiredArgument,
        ErrorKind::MissingSubcommand,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
    ];
    match given.or(with_examples) {
        Err(e) if !short.contains(&e.kind()) => Err(e.to_string()),
        _ => Ok(()),
    }
}

#[test]
#[cfg(all(
    feature = "rabbitmq",
    feature = "kafka",
    feature = "nats",
    feature = "xxl-job",
    feature = "otlp",
    feature = "archive"
))]
fn every_configuration_is_valid() {
    let (mut wrong, mut tried) = (Vec::new(), 0);
    for page in pages() {
        for block in blocks(&page).iter().filter(|block| block.info == "toml") {
            tried += 1;
            if let Err(why) = configuration(&block.text) {
                wrong.push(format!("{}: {why}", block.place()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(tried > 20, "only {tried} configurations were found");
}

fn configuration(text: &str) -> Result<(), String> {
    let mut text = text.to_owned();
    // Files that this machine doesn't have.
    while let Some(at) = text.find("${file:") {
        let end = at + text[at..].find('}').ok_or("no closing }")?;
        text.replace_range(at..=end, "${FILE}");
    }
    let mut table: Table = text.parse().map_err(|e: toml::de::Error| e.to_string())?;
    if table.contains_key("dependencies") {
        return manifest(&table);
    }
    complete(&mut table);
    let problems = crate::config::parse(table, &variable).err().unwrap_or_default();
    let told = problems.iter().map(|p| format!("{} {:?} {}", p.path, p.value, p.reason)).collect::<Vec<_>>();
    if told.is_empty() { Ok(()) } else { Err(told.join("; ")) }
}

/// A variable of the environment, with what its name lets expect.
fn variable(name: &str) -> Option<String> {
    Some(match name {
        name if name.contains("DATABASE") || name == "ORDERS_URL" => "postgres://user@localhost/db".into(),
        name if name.ends_with("_URL") => "https://host.example/path".into(),
        name if name.ends_with("WEBHOOK_KEY") => "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into(),
        name => format!("{name}-0123456789abcdef"),
    })
}

fn section<'t>(table: &'t mut Table, name: &str) -> &'t mut Table {
    match table.entry(name).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(inner) => inner,
        _ => unreachable!("{name} is a table in all pages"),
    }
}

/// The parts of a file that a page leaves out because it has shown them before, or because they aren't the point.
fn complete(table: &mut Table) {
    let named = |table: &Table, key: &str| {
        let sections = ["groups", "adopted", "alerts"].iter().filter_map(|section| table.get(*section));
        let items = sections.flat_map(|section| match section {
            Value::Array(items) => items.iter().collect::<Vec<_>>(),
            Value::Table(named) => named.values().collect(),
            _ => Vec::new(),
        });
        let lists = items.filter_map(|item| item.get(key)?.as_array()).flatten();
        lists.filter_map(Value::as_str).map(str::to_owned).collect::<Vec<String>>()
    };
    let (databases, channels) = (named(table, "databases"), named(table, "channels"));
    let fill = |inner: &mut Table, name: &str, rest: &str| {
        let rest: Table = rest.parse().unwrap();
        let Value::Table(one) = inner.entry(name).or_insert_with(|| Value::Table(Table::new())) else { return };
        for (key, value) in rest {
            one.entry(key).or_insert(value);
        }
    };
    let inner = section(table, "databases");
    let mut names: Vec<String> = inner.keys().cloned().chain(databases).collect();
    if names.is_empty() {
        names.push("shop".into());
    }
    for name in names {
        fill(inner, &name, &format!("url = \"postgres://user@localhost/{name}\""));
    }
    let inner = section(table, "transports");
    fill(inner, "amqp", "kind = \"rabbitmq\"\nurl = \"amqp://host\"");
    fill(inner, "kafka", "kind = \"kafka\"\nbrokers = \"host:9092\"");
    fill(inner, "nats", "kind = \"nats\"\nurl = \"nats://host\"");
    if !channels.is_empty() {
        let inner = section(table, "channels");
        channels.iter().for_each(|name| fill(inner, name, "kind = \"log\""));
    }
    let routes = table.get("routes").and_then(Value::as_table).cloned().unwrap_or_default();
    for name in routes.keys().filter(|name| !name.contains(':')) {
        fill(section(table, "routes"), name, "to = \"https://host.example/path\"");
    }
}

/// Features of our packages that there are.
fn manifest(table: &Table) -> Result<(), String> {
    let packages = table.get("dependencies").and_then(Value::as_table).into_iter().flatten();
    for (name, wanted) in packages.filter(|(name, _)| name.starts_with("posthouse")) {
        let file = root().join("crates").join(name).join("Cargo.toml");
        let own: Table = std::fs::read_to_string(&file).map_err(|e| format!("{name}: {e}"))?.parse().unwrap();
        for feature in wanted.get("features").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            own.get("features").and_then(|f| f.get(feature)).ok_or_else(|| format!("{name} has no feature {feature:?}"))?;
        }
    }
    Ok(())
}
