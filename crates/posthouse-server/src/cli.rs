//! The command line.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, Subcommand, ValueEnum};
use posthouse::store::{InboxStatus, MessageStatus};

use crate::demo::DemoArgs;
use crate::output::now_ms;

const AFTER: &str = "\
Configuration: the file given with -c, else ./posthouse.toml, else one database from --database or \
POSTHOUSE_DATABASE_URL. Prefer the variable: other users of this machine can see a command line.

Exit codes: 0 done; 1 the thing asked for is not so; 2 usage or configuration; 3 a needed service can't be reached.

Results go to stdout, logs to stderr (RUST_LOG or -v say how much).";

const DESTINATIONS: &str = "\
What waits comes from the databases. State, messages in flight, the last confirmation and the last error come from the relay \
that answers at server.listen; they are that instance's own, and are left out when none answers.

States: ok; blocked (connected, but the broker asks to be sent nothing); down (one message at a time is tried).

Exit codes: 0 shown, also without a relay, whatever the states are; 2 configuration; 3 a database can't be reached.";

const DOCTOR: &str = "\
Looks at connections, privileges, versions, migration, indexes, the clock, partitions ahead, houses that nobody covers, \
destinations that lead nowhere, FAILED messages, the log's growth, autovacuum or purge, and old transactions.

Exit codes: 0 all is well, or there are warnings only; 1 something is wrong; 2 configuration; 3 a database or broker can't be \
reached.";

const HEALTH: &str = "\
For health checks where there is no other program to ask with, such as in a container. It asks what answers at server.listen, \
for 2 s at most, and connects to nothing else.

Exit codes: 0 it is ready (with --live: it answers); 1 it isn't ready; 2 configuration; 3 nothing answers.";

const COMPLETIONS: &str = "\
bash: posthouse completions bash > ~/.local/share/bash-completion/completions/posthouse
zsh:  posthouse completions zsh > a directory of your $fpath, as _posthouse
fish: posthouse completions fish > ~/.config/fish/completions/posthouse.fish";

/// The transactional outbox: relay, messages, houses
#[derive(Debug, Parser)]
#[command(name = "posthouse", version, after_help = AFTER, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
pub(crate) struct Global {
    /// Configuration file [default: posthouse.toml, if there is one]
    #[arg(short, long, global = true, value_name = "FILE", env = "POSTHOUSE_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// Name of a configured database, or the URL of one
    #[arg(long, global = true, value_name = "NAME|URL")]
    pub(crate) database: Option<String>,
    /// One JSON document on stdout instead of text for people
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// More on stderr; twice for even more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create or upgrade the tables
    Migrate {
        /// Print the SQL of a first migration and do nothing
        #[arg(long)]
        print: bool,
    },
    /// Run the relay, with dashboard, API, health and metrics over HTTP, until it is told to stop
    Relay(RelayArgs),
    /// Serve the dashboard and the API without relaying, until it is told to stop
    Dashboard,
    /// Ask the relay or the dashboard that runs here whether it is ready
    #[command(after_help = HEALTH)]
    Health {
        /// Only ask whether it answers, as /healthz does
        #[arg(long)]
        live: bool,
    },
    /// Write one message, in a transaction of its own
    Publish(PublishArgs),
    /// Look at messages and decide about failed ones
    #[command(subcommand)]
    Messages(Messages),
    /// Look at received messages and decide about failed ones
    #[command(subcommand)]
    Inbox(Inbox),
    /// Look at houses: the units that relay instances share out
    #[command(subcommand)]
    Houses(Houses),
    /// Look at groups of houses, run them now, stop or pause them
    #[command(subcommand)]
    Groups(Groups),
    /// Take old messages out of the databases, and look at what went
    #[command(subcommand)]
    Retention(RetentionCommand),
    /// Look at runs of groups
    #[command(subcommand)]
    Runs(Runs),
    /// Look at alerts and their history, silence them, try the channels
    #[command(subcommand)]
    Alerts(Alerts),
    /// Show how every destination stands: what waits for it, whether it is down, the last confirmation
    #[command(after_help = DESTINATIONS)]
    Destinations,
    /// Look at databases, brokers and the relay, and say what is wrong and what to do about it; changes nothing
    #[command(after_help = DOCTOR)]
    Doctor,
    /// Explain the keys of the configuration file: type, default, limits, meaning
    Config(ConfigArgs),
    /// Print a script that completes commands and options, for a shell to read
    #[command(after_help = COMPLETIONS)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Play through crashes and outages with a small order service, and count that nothing was lost
    Demo(DemoArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// Validate everything, connect, say what would run, and stop
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the configuration in effect, defaults included, secrets redacted, and stop
    #[arg(long, conflicts_with = "check")]
    pub(crate) print_config: bool,
    /// When told to stop: how long messages in flight may take to finish
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration, value_name = "TIME")]
    pub(crate) drain: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Only this key, or those below it, such as relay.lease or routes.orders.retry
    pub(crate) key: Option<String>,
    /// As the page of the documentation
    #[arg(long, conflicts_with = "key")]
    pub(crate) markdown: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PublishArgs {
    /// A route's name, or an address such as https://host/path
    pub(crate) destination: String,
    /// The payload; "-" reads it from stdin
    #[arg(default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    pub(crate) payload: String,
    /// Ordering key: messages of one destination and key are delivered one after the other
    #[arg(long)]
    pub(crate) key: Option<String>,
    /// Type of the message, as receivers know it
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    /// A header; may be given several times
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// Media type of the payload [default: application/json if the payload is JSON, else application/octet-stream]
    #[arg(long, value_name = "TYPE")]
    pub(crate) content_type: Option<String>,
    /// The message's id [default: a new one]
    #[arg(long)]
    pub(crate) id: Option<String>,
    /// Write nothing if this was used before
    #[arg(long, value_name = "KEY")]
    pub(crate) dedup_key: Option<String>,
    /// FAILED after this many failed attempts, whatever the route says
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,
    /// Send it no earlier than this from now
    #[arg(long = "in", value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(crate) after: Option<Duration>,
    /// Accept a destination that this configuration doesn't know
    #[arg(long)]
    pub(crate) any_destination: bool,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// A moment, in milliseconds since 1970 UTC.
fn time(text: &str) -> Result<i64, String> {
    let far = || "lies too far away".to_owned();
    if let Ok(ago) = humantime::parse_duration(text) {
        return i64::try_from(ago.as_millis()).ok().and_then(|ms| now_ms().checked_sub(ms)).ok_or_else(far);
    }
    let day = if text.contains(['T', ' ']) { text.to_owned() } else { format!("{text}T00:00:00Z") };
    let at = humantime::parse_rfc3339_weak(&day)
        .map_err(|_| "is no time; write 2026-03-01, 2026-03-01T08:00:00Z (UTC), or how long ago, such as 2h".to_owned())?;
    let since = at.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| far())?;
    i64::try_from(since.as_millis()).map_err(|_| far())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Messages {
    /// List messages, newest first
    List {
        #[command(flatten)]
        filter: Filter,
        /// Only this key
        #[arg(long)]
        key: Option<String>,
        /// Only this message id
        #[arg(long)]
        id: Option<String>,
        /// Only those created at this time or later: "2026-03-01", "2026-03-01T08:00:00Z", or how long ago, such as "2h"
        #[arg(long, value_name = "TIME", value_parser = time)]
        since: Option<i64>,
        /// Only those created before this time, written in the same ways
        #[arg(long, value_name = "TIME", value_parser = time)]
        until: Option<i64>,
        /// Only those with this text in id, key, type, destination, last error or payload
        #[arg(long)]
        text: Option<String>,
        /// How long to search for what no index leads to
        #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
        within: Duration,
        /// At most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
        limit: u32,
        /// Only those with a row id below this one: the next page
        #[arg(long, value_name = "ROW")]
        before: Option<i64>,
    },
    /// Show one message: payload, headers, attempts
    Show {
        /// Row id or message id
        id: String,
        /// The whole payload, however long
        #[arg(long)]
        full: bool,
    },
    /// Send FAILED messages (and ones that wait for a retry) again, now, with all their attempts
    Requeue {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        by: By,
    },
    /// Give messages up: FAILED, and later ones of their key go on
    Skip {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        by: By,
    },
    /// Send messages that aren't delivered yet to another destination
    Edit {
        /// Row ids or message ids
        #[arg(required = true)]
        ids: Vec<String>,
        /// The new destination: a route's name or an address
        #[arg(long)]
        destination: String,
        /// Accept a destination that this configuration doesn't know
        #[arg(long)]
        any_destination: bool,
        #[command(flatten)]
        by: By,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// Only this status
    #[arg(long, ignore_case = true)]
    pub(crate) status: Option<Status>,
    /// Only this destination
    #[arg(long)]
    pub(crate) destination: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Row ids or message ids
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) ids: Vec<String>,
    /// All messages with --status, and with --destination if it is given
    #[arg(long, requires = "status")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) filter: Filter,
}

#[derive(Debug, Args)]
pub(crate) struct By {
    /// Who does it, for the audit log [default: the name of the user]
    #[arg(long, value_name = "NAME")]
    pub(crate) actor: Option<String>,
    /// Don't ask
    #[arg(short, long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "UPPER")]
pub(crate) enum Status {
    Pending,
    Sending,
    Sent,
    Failed,
}

impl From<Status> for MessageStatus {
    fn from(status: Status) -> Self {
        match status {
            Status::Pending => Self::Pending,
            Status::Sending => Self::Sending,
            Status::Sent => Self::Sent,
            Status::Failed => Self::Failed,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Inbox {
    /// List received messages, by consumer and message id
    List {
        #[command(flatten)]
        filter: Received,
        /// Only this consumer
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// Only those first seen at this time or later: "2026-03-01", "2026-03-01T08:00:00Z", or how long ago, such as "2h"
        #[arg(long, value_name = "TIME", value_parser = time)]
        since: Option<i64>,
        /// Only those first seen before this time, written in the same ways
        #[arg(long, value_name = "TIME", value_parser = time)]
        until: Option<i64>,
        /// Only those with this text in id, key, type, source, last error or payload
        #[arg(long)]
        text: Option<String>,
        /// How long to search for what no index leads to
        #[arg(long, value_name = "TIME", default_value = "5s", value_parser = humantime::parse_duration)]
        within: Duration,
        /// At most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
        limit: u32,
        /// Only those after this one: the next page
        #[arg(long, num_args = 2, value_names = ["CONSUMER", "ID"], allow_hyphen_values = true)]
        after: Vec<String>,
    },
    /// Show one received message: source, error, headers, payload
    Show {
        /// Message id
        id: String,
        /// The consumer that received it; needed where several have
        #[arg(long, value_name = "NAME")]
        consumer: Option<String>,
        /// The whole payload, however long
        #[arg(long)]
        full: bool,
    },
    /// Run FAILED messages (and ones that wait for a retry) again, now, with all their attempts
    Requeue {
        #[command(flatten)]
        which: WhichReceived,
        #[command(flatten)]
        by: By,
    },
    /// Give messages up: FAILED, and not run again
    Skip {
        #[command(flatten)]
        which: WhichReceived,
        #[command(flatten)]
        by: By,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Received {
    /// Only this status
    #[arg(long, ignore_case = true)]
    pub(crate) status: Option<ReceivedStatus>,
    /// Only this type
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct WhichReceived {
    /// Message ids
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) ids: Vec<String>,
    /// All messages with --status, and with --consumer and --type if they are given
    #[arg(long, requires = "status")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) filter: Received,
    /// Only this consumer; needed for ids that several have received
    #[arg(long, value_name = "NAME")]
    pub(crate) consumer: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum ReceivedStatus {
    Success,
    PendingRetry,
    Retrying,
    Failed,
}

impl From<ReceivedStatus> for InboxStatus {
    fn from(status: ReceivedStatus) -> Self {
        match status {
            ReceivedStatus::Success => Self::Success,
            ReceivedStatus::PendingRetry => Self::PendingRetry,
            ReceivedStatus::Retrying => Self::Retrying,
            ReceivedStatus::Failed => Self::Failed,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Houses {
    /// Show who owns which houses, and what waits in them
    List,
    /// Change the number of houses; publishers wait while it runs
    Resize {
        /// 1 to 4096
        #[arg(value_parser = clap::value_parser!(u16).range(1..=4096))]
        houses: u16,
        /// Don't ask
        #[arg(short, long)]
        yes: bool,
    },
}

const RUN: &str = "\
Every live instance runs the group once, over the houses of it that it owns. Ctrl-C ends the wait, not the run.

Exit codes: 0 every instance's run is DONE (or asked for, with --no-wait); 1 a run is not DONE, or no instance with this group \
is alive; 2 configuration; 3 a database can't be reached.";

#[derive(Debug, Subcommand)]
pub(crate) enum Groups {
    /// Show groups: houses, trigger, when they are due, what their last run came to
    List,
    /// Run a group now, on all instances, and wait for the end
    #[command(after_help = RUN)]
    Run {
        /// The group
        name: String,
        /// Ask for it and don't wait
        #[arg(long)]
        no_wait: bool,
        /// Withdraw it when no instance has taken it within this time
        #[arg(long, value_name = "TIME", default_value = "15s", value_parser = humantime::parse_duration, conflicts_with = "no_wait")]
        within: Duration,
    },
    /// Stop the runs of a group that are going; its trigger goes on
    Stop {
        /// The group
        name: String,
    },
    /// Pause a group: its trigger does nothing until it is resumed
    Pause {
        /// The group
        name: String,
    },
    /// Let a paused group go on
    Resume {
        /// The group
        name: String,
    },
}

const RETENTION_RUN: &str = "\
Messages that aren't delivered never go. The relay does the same by itself, as often as retention.every says; only one process \
does it at a time.

Exit codes: 0 all that is over its term is gone, or would be; 1 something could not go yet, or another process is at it; \
2 configuration; 3 a database can't be reached.";

#[derive(Debug, Subcommand)]
pub(crate) enum RetentionCommand {
    /// Take out what is over its term, now
    #[command(after_help = RETENTION_RUN)]
    Run {
        /// Say what would go, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show the log's partitions, what went, and the files of the archive
    Status {
        /// At most this many of those that went, and of files
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
        limit: u32,
    },
    /// Read files of the archive back and compare them with what was written
    Verify {
        /// At most this many, the newest first
        #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
        limit: u32,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Runs {
    /// List runs, newest first
    List {
        /// Only this group
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// At most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N")]
        limit: u32,
        /// Only those below this one: the next page
        #[arg(long, value_name = "ID")]
        before: Option<i64>,
    },
}

const SILENCE: &str = "\
A silenced alert is judged and stands in the history, and nobody is told. When the silence ends and it still fires, people are \
told then. That an alert is over is told to those who were told that it fires, silence or not.

Without --database it is silenced in every configured database. Exit codes: 0 done; 1 it was silenced nowhere (unsilence); \
2 configuration, or no such rule; 3 a database can't be reached.";

#[derive(Debug, Subcommand)]
pub(crate) enum Alerts {
    /// Show what fires, and what is silenced
    List {
        /// What happened, newest first, and who was told
        #[arg(long)]
        history: bool,
        /// Only this rule
        #[arg(long, value_name = "RULE")]
        rule: Option<String>,
        /// With --history: at most this many
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000), value_name = "N", requires = "history")]
        limit: u32,
        /// With --history: only those with an id below this one: the next page
        #[arg(long, value_name = "ID", requires = "history")]
        before: Option<i64>,
    },
    /// Send a test notice through channels and say what came of it
    #[command(after_help = "Exit codes: 0 all took it; 1 one did not; 2 configuration, or no such channel.")]
    Test {
        /// Only these channels
        channels: Vec<String>,
    },
    /// Keep quiet about an alert for a while
    #[command(after_help = SILENCE)]
    Silence {
        #[command(flatten)]
        silence: WhichAlert,
        /// How long
        #[arg(long = "for", value_name = "TIME", value_parser = humantime::parse_duration)]
        time: Duration,
        /// Why, for the others
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// End a silence
    #[command(after_help = SILENCE)]
    Unsilence {
        #[command(flatten)]
        silence: WhichAlert,
    },
}

#[derive(Debug, Args)]
pub(crate) struct WhichAlert {
    /// The name of the rule; "all" for all rules
    pub(crate) rule: String,
    /// Only what is about this: a destination, a consumer, a queue, as `alerts list` shows it
    pub(crate) subject: Option<String>,
    /// Who does it, for the audit log [default: the name of the user]
    #[arg(long, value_name = "NAME")]
    pub(crate) actor: Option<String>,
}
