//! The configuration: `posthouse.toml`, or one database from the command line or the environment.

mod alerts;
mod channels;
pub(crate) mod check;
mod expand;
mod groups;
mod keys;
mod masks;
mod problem;
mod redact;
pub(crate) mod reference;
mod secret;
mod server;
mod shape;
mod show;
#[cfg(feature = "otlp")]
mod telemetry;
mod transport;
mod watch;
#[cfg(feature = "xxl-job")]
mod xxl_job;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use posthouse::{Adopted, Group, RelaySettings, RetentionSettings, Route};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

pub(crate) use self::alerts::ALL as ALL_ALERTS;
pub(crate) use self::channels::{ChannelConfig, ChannelKind, PostKind, PostSettings, SmtpSettings, SmtpTls};
#[cfg(feature = "xxl-job")]
pub(crate) use self::groups::database_of;
pub(crate) use self::groups::{among, trigger_text};
use self::masks::MaskConfig;
pub(crate) use self::problem::Problem;
use self::problem::join;
pub(crate) use self::redact::url as redact_url;
pub(crate) use self::secret::Secret;
pub(crate) use self::server::ServerConfig;
pub(crate) use self::shape::suggest;
use self::shape::{Shape, Walk};
#[cfg(feature = "otlp")]
pub(crate) use self::telemetry::TelemetryConfig;
pub(crate) use self::transport::TransportConfig;
pub(crate) use self::watch::Watched;
use self::watch::Watches;
#[cfg(feature = "xxl-job")]
pub(crate) use self::xxl_job::XxlJobConfig;
use crate::alerts::rules::Rule;
use crate::failure::Failure;
use crate::mask::Masks;
use crate::output::count;

/// Read when no file is named.
const DEFAULT_FILE: &str = "posthouse.toml";

/// The variable that names a database when there is no file.
const DATABASE_VARIABLE: &str = "POSTHOUSE_DATABASE_URL";

/// The name of a database that has none.
const ONLY: &str = "default";

/// Everything that was configured, checked.
#[derive(Debug)]
pub(crate) struct Config {
    /// None: no file, one database from the command line or the environment.
    pub(crate) file: Option<PathBuf>,
    pub(crate) databases: BTreeMap<String, DatabaseConfig>,
    /// By scheme.
    pub(crate) transports: BTreeMap<String, TransportConfig>,
    /// What of their brokers is looked at, by transport.
    pub(crate) watch: Watches,
    pub(crate) routes: BTreeMap<String, Route>,
    pub(crate) groups: Vec<Group>,
    /// Tables of other applications, by the name of their mapping.
    pub(crate) adopted: BTreeMap<String, Adopted>,
    /// The rules about which people are told, those that are turned off included.
    pub(crate) alerts: Vec<Rule>,
    /// Ways to tell them. There is always one: the log.
    pub(crate) channels: BTreeMap<String, ChannelConfig>,
    /// How long the history of alerts is kept.
    pub(crate) alerts_retention: Duration,
    pub(crate) relay: RelaySettings,
    /// For databases that have none of their own. None: nothing is removed.
    pub(crate) retention: Option<RetentionSettings>,
    pub(crate) server: ServerConfig,
    /// As they are written.
    written_masks: Vec<MaskConfig>,
    /// What people must not see.
    pub(crate) masks: Masks,
    /// None: metrics go to no collector.
    #[cfg(feature = "otlp")]
    pub(crate) telemetry: Option<TelemetryConfig>,
    /// None: no executor for an XXL-JOB admin.
    #[cfg(feature = "xxl-job")]
    pub(crate) xxl_job: Option<XxlJobConfig>,
}

impl Config {
    /// Where each route leads, without secrets.
    pub(crate) fn leads(&self) -> BTreeMap<String, String> {
        let to = |name: &String, route: &Route| redact_url(if route.to.is_empty() { name } else { &route.to });
        self.routes.iter().map(|(name, route)| (name.clone(), to(name, route))).collect()
    }

    /// Every set of tables, by name: a database that has one goes by its own name, of others each is `database/prefix`.
    pub(crate) fn sources(&self) -> Vec<(String, DatabaseConfig)> {
        self.databases.iter().flat_map(|(name, database)| database.sources(name)).collect()
    }

    /// Whether a transport goes through a broker.
    pub(crate) fn has_brokers(&self) -> bool {
        self.transports.values().any(TransportConfig::is_broker)
    }
}

/// `[databases.NAME]`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct DatabaseConfig {
    pub(crate) url: String,
    #[serde(default = "prefix")]
    pub(crate) prefix: String,
    /// The prefixes of several sets of tables. None: there is one, `prefix`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tables: Option<Vec<String>>,
    pub(crate) schema: Option<String>,
    pub(crate) houses: Option<u16>,
    /// What stands under `retention` in the file, with what stands under `[retention]` where it says nothing.
    #[serde(skip)]
    pub(crate) retention: Option<RetentionSettings>,
}

fn prefix() -> String {
    "posthouse_".into()
}

impl std::fmt::Debug for DatabaseConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DatabaseConfig")
            .field("url", &redact_url(&self.url))
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl DatabaseConfig {
    fn of_url(url: String) -> Self {
        Self { url, prefix: prefix(), tables: None, schema: None, houses: None, retention: None }
    }

    /// The prefix of each set of tables.
    pub(crate) fn prefixes(&self) -> &[String] {
        self.tables.as_deref().unwrap_or(std::slice::from_ref(&self.prefix))
    }

    fn sources(&self, name: &str) -> Vec<(String, Self)> {
        let Some(tables) = &self.tables else { return vec![(name.to_owned(), self.clone())] };
        let one = |prefix: &String| (format!("{name}/{prefix}"), Self { prefix: prefix.clone(), tables: None, ..self.clone() });
        tables.iter().map(one).collect()
    }
}

/// Reads and checks the configuration. `database` is the command line's `--database`: a name or a URL.
pub(crate) fn load(file: Option<&Path>, database: Option<&str>) -> Result<Config, Failure> {
    let file = match file {
        Some(file) => Some(file.to_owned()),
        None => Some(PathBuf::from(DEFAULT_FILE)).filter(|f| f.exists()),
    };
    let text = match &file {
        Some(file) => {
            std::fs::read_to_string(file).map_err(|e| Failure::usage(format!("{} can't be read: {e}", file.display())))?
        }
        None => String::new(),
    };
    // Only what isn't Unicode can't be told from what isn't set; no setting can hold it anyway.
    let env = |name: &str| std::env::var(name).ok();
    let told = |mut problems: Vec<Problem>| {
        problems.sort_by(|a, b| a.path.cmp(&b.path));
        let place = file.as_ref().map_or_else(|| "the configuration".into(), |f| f.display().to_string());
        let text = format!("{place} has {}", count(problems.len(), "problem"));
        Failure { problems, ..Failure::usage(text) }
    };
    let table: Table = text.parse().map_err(|e| told(vec![syntax(&text, &e)]))?;
    let mut config = parse(table, &env).map_err(&told)?;
    config.file.clone_from(&file);

    let given = database.filter(|d| d.contains(':')).map(str::to_owned);
    let given = given.or_else(|| env(DATABASE_VARIABLE).filter(|url| !url.is_empty() && config.databases.is_empty()));
    if let Some(url) = given {
        let only = DatabaseConfig { retention: config.retention.clone(), ..DatabaseConfig::of_url(url) };
        let mut problems = Vec::new();
        check::database("--database", &only, &BTreeMap::new(), &mut problems);
        if !problems.is_empty() {
            return Err(told(problems));
        }
        config.databases = BTreeMap::from([(ONLY.to_owned(), only)]);
    } else if let Some(name) = database {
        let sources = config.sources().into_iter().find(|(source, _)| source == name);
        let Some((name, chosen)) = config.databases.remove_entry(name).or(sources) else {
            let known: Vec<String> = config.sources().into_iter().map(|(source, _)| source).collect();
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            return Err(Failure::usage(no_database(name, &known, file.as_deref())));
        };
        config.databases = BTreeMap::from([(name, chosen)]);
    }
    if config.databases.is_empty() {
        let place = match &file {
            Some(file) => format!("{} configures no database", file.display()),
            None => format!("no database is configured and there is no {DEFAULT_FILE} here"),
        };
        return Err(Failure::usage(format!(
            "{place}.\nDo one of these:\n  \
             write a posthouse.toml with a [databases.NAME] and its url, and name it with -c unless it is in this directory\n  \
             set {DATABASE_VARIABLE}, for example postgres://user:password@host/database\n  \
             give --database URL"
        )));
    }
    Ok(config)
}

fn no_database(name: &str, known: &[&str], file: Option<&Path>) -> String {
    if known.is_empty() {
        let place =
            file.map_or_else(|| format!("there is no {DEFAULT_FILE} here"), |f| format!("{} configures none", f.display()));
        return format!("no database {name:?}: {place}; give a URL, such as postgres://user:password@host/database");
    }
    match suggest(name, known.iter().copied()) {
        Some(meant) => format!("no database {name:?} is configured; did you mean {meant:?}?"),
        None => format!("no database {name:?} is configured; there are {}", known.join(", ")),
    }
}

/// The parser's own report quotes the line, which may hold a secret; so only the place and the reason are told.
fn syntax(text: &str, e: &toml::de::Error) -> Problem {
    let place = match e.span() {
        Some(span) => {
            let before = &text[..span.start.min(text.len())];
            let line = before.matches('\n').count() + 1;
            let column = before.rsplit('\n').next().map_or(0, |l| l.chars().count()) + 1;
            format!("line {line}, column {column}")
        }
        None => "the file".into(),
    };
    Problem::new(place, None, format!("is not TOML: {}", e.message())).fix("strings stand in quotes, tables are [like.this]")
}

pub(crate) fn parse(mut table: Table, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, Vec<Problem>> {
    let mut walk = Walk::new(env);
    walk.table("", &Shape::Table(keys::FILE), &mut table);
    let transports = transports(&mut walk, table.remove("transports"));
    let named: Vec<String> =
        table.get("databases").and_then(Value::as_table).map(|t| t.keys().cloned().collect()).unwrap_or_default();
    let general = table.remove("retention");
    let own = own_retention(table.get_mut("databases"));
    let mut databases: BTreeMap<String, DatabaseConfig> =
        sections(&mut walk, "databases", table.remove("databases"), |walk, at, t| {
            // Without a URL the rest can't be judged; if there was a wrong one, that has been told.
            let url = t.contains_key("url");
            let below = format!("{at}.");
            let told = |p: &Problem| p.path == join(at, "url") || p.path.starts_with(&below) && p.reason.contains("\"url\"");
            if !url && !walk.problems.iter().any(told) {
                walk.problems
                    .push(Problem::new(join(at, "url"), None, "is missing").fix("url = \"postgres://user@host/database\""));
            }
            url
        });
    walk.broken_databases = named.into_iter().filter(|name| !databases.contains_key(name)).collect();
    let written = groups::read(&mut walk, table.remove("groups"));
    let retention = retention(&mut walk, "retention", general.as_ref(), None);
    for (name, database) in &mut databases {
        database.retention = match own.get(name) {
            Some(own) => self::retention(&mut walk, &join(&join("databases", name), "retention"), general.as_ref(), Some(own)),
            None => retention.clone(),
        };
    }
    let groups = written.iter().filter_map(|w| w.group.clone()).collect();
    let routes: BTreeMap<String, Route> = sections(&mut walk, "routes", table.remove("routes"), |_, _, _| true);
    let adopted: BTreeMap<String, Adopted> = sections(&mut walk, "adopted", table.remove("adopted"), |_, _, _| true);
    let relay: RelaySettings = section(&mut walk, "relay", table.remove("relay"));
    let (mut channels, broken) = channels::section(&mut walk, table.remove("channels"));
    let alerts = alerts::section(&mut walk, table.remove("alerts"), &mut channels, &broken, &databases);
    let alerts_retention = alerts::retention(&mut walk, &table);
    let server = server::section(&mut walk, table.remove("server"));
    let (written_masks, masks) = masks::read(&mut walk, table.remove("masks"));
    #[cfg(feature = "otlp")]
    let telemetry = telemetry::section(&mut walk, table.remove("telemetry"));
    #[cfg(not(feature = "otlp"))]
    if table.contains_key("telemetry") {
        let problem = Problem::new("telemetry", None, "this posthouse was built without otlp");
        walk.problems.push(problem.fix("use one that was built with it (cargo feature \"otlp\"), or remove this section"));
    }
    #[cfg(feature = "xxl-job")]
    let xxl_job = xxl_job::section(&mut walk, table.remove("xxl_job"));
    #[cfg(not(feature = "xxl-job"))]
    if table.contains_key("xxl_job") {
        let problem = Problem::new("xxl_job", None, "this posthouse was built without xxl-job");
        walk.problems.push(problem.fix("use one that was built with it (cargo feature \"xxl-job\"), or remove this section"));
    }
    let mut config = Config {
        file: None,
        databases,
        transports,
        watch: std::mem::take(&mut walk.watch),
        routes,
        groups,
        adopted,
        alerts,
        channels,
        alerts_retention,
        relay,
        retention,
        server,
        written_masks,
        masks,
        #[cfg(feature = "otlp")]
        telemetry,
        #[cfg(feature = "xxl-job")]
        xxl_job,
    };
    let mut found = Vec::new();
    groups::relations(&config, &written, &walk, &mut found);
    walk.problems.extend(found);
    fit_connect_timeouts(&mut config, &walk);
    check::relations(&config, &mut walk);
    #[cfg(feature = "rabbitmq")]
    watch::of_routes(&mut config);
    if walk.problems.is_empty() { Ok(config) } else { Err(walk.problems) }
}

/// Nobody has to mend a connect timeout that they haven't written: the default gives way to a short send timeout.
fn fit_connect_timeouts(config: &mut Config, walk: &Walk<'_>) {
    let send_timeout = config.relay.send_timeout;
    for (name, transport) in &mut config.transports {
        let written = walk.shown.contains_key(&join(&join("transports", name), "connect_timeout"));
        if let Some(connect_timeout) = transport.connect_timeout_mut().filter(|timeout| !written && **timeout >= send_timeout) {
            *connect_timeout = send_timeout / 2;
        }
    }
}

/// What databases say about retention themselves, taken out of them.
fn own_retention(databases: Option<&mut Value>) -> BTreeMap<String, Value> {
    let databases = databases.and_then(Value::as_table_mut).into_iter().flatten();
    databases.filter_map(|(name, database)| Some((name.clone(), database.as_table_mut()?.remove("retention")?))).collect()
}

/// What is said for one database goes before what is said for all, key by key.
fn retention(walk: &mut Walk<'_>, at: &str, general: Option<&Value>, own: Option<&Value>) -> Option<RetentionSettings> {
    let mut both = Table::new();
    for value in [general, own].into_iter().flatten().filter_map(Value::as_table) {
        both.extend(value.clone());
    }
    if general.or(own).is_none() { None } else { typed(walk, at, Value::Table(both)) }
}

/// A table as the type it stands for. The walk has taken out what doesn't fit, so an error here is rare.
fn section<T: DeserializeOwned + Default>(walk: &mut Walk<'_>, at: &str, value: Option<Value>) -> T {
    let Some(value) = value else { return T::default() };
    typed(walk, at, value).unwrap_or_default()
}

fn typed<T: DeserializeOwned>(walk: &mut Walk<'_>, at: &str, value: Value) -> Option<T> {
    match serde_path_to_error::deserialize(value) {
        Ok(typed) => Some(typed),
        Err(e) => {
            let inner = e.path().to_string();
            let path = if inner == "." { at.to_owned() } else { format!("{at}.{inner}") };
            let shown = walk.shown.get(&path).cloned();
            // The message of serde may quote the value.
            let reason = match &shown {
                Some(value) if value.contains(redact::REDACTED) => "doesn't fit here".into(),
                _ => e.into_inner().message().to_owned(),
            };
            walk.problems.push(Problem::new(path, shown, reason));
            None
        }
    }
}

fn sections<T: DeserializeOwned>(
    walk: &mut Walk<'_>,
    at: &str,
    value: Option<Value>,
    wanted: impl Fn(&mut Walk<'_>, &str, &Table) -> bool,
) -> BTreeMap<String, T> {
    let mut out = BTreeMap::new();
    let Some(Value::Table(tables)) = value else { return out };
    for (name, value) in tables {
        let at = join(at, &name);
        let Value::Table(table) = value else { continue };
        if wanted(walk, &at, &table)
            && let Some(typed) = typed(walk, &at, Value::Table(table))
        {
            out.insert(name, typed);
        }
    }
    out
}

fn transports(walk: &mut Walk<'_>, value: Option<Value>) -> BTreeMap<String, TransportConfig> {
    let mut out = BTreeMap::new();
    if let Some(Value::Table(tables)) = value {
        for (name, value) in tables {
            match one_transport(walk, &name, value) {
                Some(settings) => {
                    out.insert(name, settings);
                }
                None => {
                    walk.broken.insert(name);
                }
            }
        }
    }
    out.entry("http".into()).or_insert_with(|| TransportConfig::Http(Default::default()));
    out
}

/// One `[transports.NAME]`; None when what is wrong with it has been told.
fn one_transport(walk: &mut Walk<'_>, name: &str, value: Value) -> Option<TransportConfig> {
    let at = join("transports", name);
    let Value::Table(mut table) = value else {
        walk.problems.push(Problem::new(at, None, "must be a table").fix(format!("write [transports.{name}]")));
        return None;
    };
    let valid = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+.-_".contains(&b));
    if !valid || name == "https" || name == "local" {
        let reason = match name {
            "https" => "the transport \"http\" serves https:// addresses too",
            "local" => "local handlers exist only inside a service with an embedded relay",
            _ => "is the scheme of addresses: must be a-z, 0-9, +, ., - and _, starting with a letter",
        };
        walk.problems.push(Problem::new(&at, None, reason).fix("give it another name, such as [transports.http]"));
        return None;
    }
    let kind_at = join(&at, "kind");
    let example = || format!("kind = {:?}", transport::likely_kind(name));
    let kind = match table.remove("kind") {
        Some(Value::String(kind)) => kind,
        Some(_) => {
            walk.problems.push(Problem::new(&kind_at, None, "must be text in quotes").fix(example()));
            return None;
        }
        None if name == "http" => "http".into(),
        None => {
            walk.problems.push(Problem::new(&kind_at, None, "is missing").fix(example()));
            return None;
        }
    };
    let shown = Some(format!("{kind:?}"));
    // The other keys belong to a kind that isn't here.
    let kind = transport::kind(&kind)
        .map_err(|(reason, fix)| walk.problems.push(Problem::new(&kind_at, shown.clone(), reason).fix(fix)))
        .ok()?;
    if name == "http" && kind.name() != "http" {
        let reason = "the transport \"http\" serves http:// and https:// addresses, so it must be of kind \"http\"";
        walk.problems.push(Problem::new(&kind_at, shown, reason).fix(format!("name the table [transports.{}]", kind.name())));
        return None;
    }
    let before = walk.problems.len();
    walk.table(&at, &Shape::Table(kind.keys), &mut table);
    let watched = watch::take(walk, &at, kind.name(), &mut table);
    if !watched.is_empty() {
        walk.watch.insert(name.to_owned(), watched);
    }
    if let Some((key, example)) = kind.needed
        && !table.contains_key(key)
    {
        // A wrong or mistyped one has been told.
        let told = |p: &Problem| p.path == join(&at, key) || p.reason.contains(&format!("{key:?}"));
        if !walk.problems[before..].iter().any(told) {
            walk.problems.push(Problem::new(join(&at, key), None, "is missing").fix(example));
        }
        return None;
    }
    TransportConfig::of(&kind, walk, &at, table)
}
