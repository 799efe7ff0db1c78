//! The handler `posthouseScan`: which groups a run scans, and which part of them.

use std::fmt;
use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use serde::Deserialize;
use tokio::sync::watch;

use super::log::RunLog;
use crate::output::count;

/// The name under which jobs ask for it.
pub(super) const HANDLER: &str = "posthouseScan";

/// What can be scanned: the relays of this process, seen from here.
pub(crate) trait Scans: Send + Sync + 'static {
    /// The databases of a group, or those of `only`: what the configuration says, without asking anybody.
    ///
    /// # Errors
    /// There is no such group, an outside scheduler has no say in it, or one of `only` is not among its databases.
    fn databases(&self, group: &str, only: &[String]) -> Result<Vec<String>, String>;

    /// What there is to scan in one of them. Every instance must give the same answer.
    fn units<'s>(&'s self, group: &'s str, database: &'s str) -> BoxFuture<'s, Result<Vec<Unit>, String>>;

    /// Takes exactly these units, sends what is due in them, and gives them back. When `stop` is told, it takes up nothing new,
    /// finishes what is in flight, and returns. If the future is dropped, the units come free by themselves after a while.
    ///
    /// The counts tell what was done, and the result whether something went wrong, in a sentence for people: somebody else has one
    /// of the units, the database can't be reached.
    fn run<'s>(
        &'s self,
        group: &'s str,
        database: &'s str,
        units: Vec<Unit>,
        stop: Stop,
        log: RunLog,
    ) -> BoxFuture<'s, (Counts, Result<(), String>)>;
}

/// What one instance scans at a time: a house of a table of ours, or a whole adopted table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Unit {
    /// The prefix of our tables, or the name of an adopted one.
    pub(crate) table: String,
    /// None: the whole table.
    pub(crate) house: Option<u16>,
}

/// What became of messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Confirmed by their receivers.
    pub(crate) sent: u64,
    /// Attempts that failed and are tried again.
    pub(crate) retried: u64,
    /// Messages that failed for good.
    pub(crate) failed: u64,
    /// Those whose destination was found to be down: they wait.
    pub(crate) waiting: u64,
}

impl Counts {
    fn add(&mut self, other: Self) {
        self.sent += other.sent;
        self.retried += other.retried;
        self.failed += other.failed;
        self.waiting += other.waiting;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sent, {} to be tried again, {} FAILED", self.sent, self.retried, self.failed)?;
        if self.waiting > 0 {
            write!(f, ", {} wait for destinations that are down", self.waiting)?;
        }
        Ok(())
    }
}

/// Why a run is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Why {
    /// The admin said so.
    Killed,
    /// A later run of its job takes its place.
    Covered,
    /// It had so many seconds.
    Timeout(u64),
    /// The process ends.
    Ending,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed => f.write_str("stopped by the admin"),
            Self::Covered => f.write_str("stopped: a later run of this job takes its place (COVER_EARLY)"),
            Self::Timeout(s) => write!(f, "stopped after its timeout of {s} s"),
            Self::Ending => f.write_str("stopped: posthouse ends"),
        }
    }
}

/// Tells a run to stop.
#[derive(Debug, Clone)]
pub(crate) struct Stop(watch::Receiver<Option<Why>>);

impl Stop {
    /// One half to tell with, one to be told by.
    pub(super) fn new() -> (watch::Sender<Option<Why>>, Self) {
        let (tell, told) = watch::channel(None);
        (tell, Self(told))
    }

    /// Waits until the run is to stop.
    pub(crate) async fn told(&mut self) {
        // Who could tell is gone: nobody wants the run any more.
        let _ = self.0.wait_for(Option::is_some).await;
    }

    /// Why the run is to stop, if it is.
    pub(super) fn why(&self) -> Option<Why> {
        self.0.borrow().clone()
    }

    /// Whether the run is to stop.
    pub(crate) fn is_told(&self) -> bool {
        self.0.borrow().is_some()
    }
}

/// What a job's parameter asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) groups: Vec<String>,
    /// Empty: all of a group's.
    pub(super) databases: Vec<String>,
}

/// How a parameter is written.
const FORM: &str = "write the names of groups with commas between them, or {\"group\": \"name\", \"databases\": [\"name\"]}";

impl Asked {
    pub(super) fn parse(params: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Json {
            group: Names,
            #[serde(default)]
            databases: Vec<String>,
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Names {
            One(String),
            Several(Vec<String>),
        }
        let params = params.trim();
        let (groups, databases) = if params.starts_with('{') {
            let json: Json =
                serde_json::from_str(params).map_err(|e| format!("the job's parameter can't be read: {e}; {FORM}"))?;
            let groups = match json.group {
                Names::One(name) => names(name.split(',')),
                Names::Several(names) => self::names(names.iter().map(String::as_str)),
            };
            (groups, names(json.databases.iter().map(String::as_str)))
        } else {
            (names(params.split(',')), Vec::new())
        };
        if groups.is_empty() {
            return Err(format!("the job's parameter names no group; {FORM}"));
        }
        Ok(Self { groups, databases })
    }
}

/// Each once, in the order in which they were written.
fn names<'n>(all: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for name in all.map(str::trim).filter(|name| !name.is_empty()) {
        if !out.iter().any(|other| other == name) {
            out.push(name.to_owned());
        }
    }
    out
}

/// What one run does: its groups, the databases of each, and the part of them that is its own.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    groups: Vec<(String, Vec<String>)>,
    /// Index and number of parts.
    shard: (usize, usize),
}

impl Plan {
    pub(super) fn new(scans: &dyn Scans, params: &str, shard: (usize, usize)) -> Result<Self, String> {
        let asked = Asked::parse(params)?;
        let databases = |group: &String| {
            let mut all = scans.databases(group, &asked.databases)?;
            all.sort_unstable();
            all.dedup();
            Ok((group.clone(), all))
        };
        let groups = asked.groups.iter().map(databases).collect::<Result<Vec<_>, String>>()?;
        Ok(Self { groups, shard })
    }

    /// Scans group after group, the databases of each side by side. Errors of one database don't keep the others from theirs.
    pub(super) async fn run(self, scans: Arc<dyn Scans>, stop: Stop, log: RunLog) -> (Counts, Vec<String>) {
        let (mut counts, mut errors) = (Counts::default(), Vec::new());
        let plan = &self;
        for (number, (group, databases)) in plan.groups.iter().enumerate() {
            if stop.is_told() {
                break;
            }
            let each = databases.iter().enumerate().map(|(place, database)| {
                let (scans, stop, log) = (&scans, stop.clone(), log.clone());
                async move {
                    let (counts, ended) = plan.one(scans.as_ref(), (group, database), number + place, stop, &log).await;
                    log.line(&format!("group {group}, database {database}: {counts}"));
                    let ended = ended.map_err(|why| format!("group {group}, database {database}: {why}"));
                    if let Err(why) = &ended {
                        log.line(&format!("error: {why}"));
                    }
                    (counts, ended.err())
                }
            });
            for (more, error) in join_all(each).await {
                counts.add(more);
                errors.extend(error);
            }
        }
        (counts, errors)
    }

    async fn one(
        &self,
        scans: &dyn Scans,
        (group, database): (&str, &str),
        place: usize,
        stop: Stop,
        log: &RunLog,
    ) -> (Counts, Result<(), String>) {
        let mut all = match scans.units(group, database).await {
            Ok(all) => all,
            Err(why) => return (Counts::default(), Err(why)),
        };
        all.sort_unstable();
        all.dedup();
        let total = all.len();
        let units = part(all, place, self.shard);
        log.line(&format!(
            "group {group}, database {database}: {} of {total}: {}",
            count(units.len(), "unit"),
            if units.is_empty() { "nothing".into() } else { listed(&units) }
        ));
        if units.is_empty() {
            return (Counts::default(), Ok(()));
        }
        scans.run(group, database, units, stop, log.clone()).await
    }
}

/// The units of one part. Parts take turns, and where the turns begin depends on the database's `place`: so single tables in
/// many databases are spread over the parts too, and a database that can't be reached changes nothing for the others.
fn part(all: Vec<Unit>, place: usize, (index, total): (usize, usize)) -> Vec<Unit> {
    all.into_iter().enumerate().filter(|(n, _)| (n + place) % total == index).map(|(_, unit)| unit).collect()
}

/// `posthouse_ houses 0-3,8; lottery_1`
fn listed(units: &[Unit]) -> String {
    let mut out: Vec<(String, Option<Vec<u16>>)> = Vec::new();
    for unit in units {
        match (out.last_mut(), unit.house) {
            (Some((table, Some(houses))), Some(house)) if *table == unit.table => houses.push(house),
            (_, house) => out.push((unit.table.clone(), house.map(|h| vec![h]))),
        }
    }
    let each = out.into_iter().map(|(table, houses)| match houses {
        Some(houses) => format!("{table} houses {}", posthouse::Houses::of(houses)),
        None => table,
    });
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn parameters_name_groups_and_databases() {
        let asked = |groups: &[&str], databases: &[&str]| Asked {
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            databases: databases.iter().map(|d| (*d).to_owned()).collect(),
        };
        for (params, expected) in [
            ("lottery", asked(&["lottery"], &[])),
            (" a , b,a,", asked(&["a", "b"], &[])),
            (r#"{"group":"a"}"#, asked(&["a"], &[])),
            (r#" {"group":"a, b","databases":["x","y","x"]}"#, asked(&["a", "b"], &["x", "y"])),
            (r#"{"group":["a","b"],"databases":[]}"#, asked(&["a", "b"], &[])),
        ] {
            assert_eq!(Asked::parse(params), Ok(expected), "{params}");
        }
        for params in ["", " , ", "{}", r#"{"group":""}"#, r#"{"group":"a","database":"x"}"#, r#"{"group":1}"#, "{"] {
            let why = Asked::parse(params).unwrap_err();
            assert!(why.contains("write the names of groups"), "{params}: {why}");
        }
    }

    #[test]
    fn all_parts_together_are_everything_exactly_once() {
        for _ in 0..300 {
            let (parts, places) = (fastrand::usize(1..9), fastrand::usize(1..6));
            let tables: Vec<(String, Option<u16>)> =
                (0..fastrand::usize(0..6)).map(|t| (format!("t{t}"), fastrand::bool().then(|| fastrand::u16(1..70)))).collect();
            let units: Vec<Unit> = tables
                .iter()
                .flat_map(|(table, houses)| match houses {
                    Some(houses) => (0..*houses).map(|h| Unit { table: table.clone(), house: Some(h) }).collect(),
                    None => vec![Unit { table: table.clone(), house: None }],
                })
                .collect();
            let mut taken: BTreeMap<(usize, Unit), usize> = BTreeMap::new();
            let mut most = vec![0; parts];
            for place in 0..places {
                for (index, most) in most.iter_mut().enumerate() {
                    for unit in part(units.clone(), place, (index, parts)) {
                        *most += 1;
                        *taken.entry((place, unit)).or_default() += 1;
                    }
                }
            }
            assert_eq!(taken.len(), units.len() * places);
            assert!(taken.values().all(|n| *n == 1), "{taken:?}");
            // No part has much more than another.
            let (low, high) = (most.iter().min().unwrap(), most.iter().max().unwrap());
            assert!(high - low <= places, "{most:?}");
        }
    }

    #[test]
    fn one_table_in_each_of_many_databases_is_spread_over_the_parts() {
        let one = vec![Unit { table: "t".into(), house: None }];
        let taken: Vec<usize> =
            (0..3).map(|index| (0..9).map(|place| part(one.clone(), place, (index, 3)).len()).sum()).collect();
        assert_eq!(taken, [3, 3, 3]);
    }

    #[test]
    fn units_are_listed_for_people() {
        let unit = |table: &str, house| Unit { table: table.into(), house };
        let units = [unit("a_", Some(0)), unit("a_", Some(1)), unit("a_", Some(5)), unit("b", None), unit("c_", Some(2))];
        assert_eq!(listed(&units), "a_ houses 0-1,5; b; c_ houses 2");
    }
}
