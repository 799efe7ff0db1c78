//! Groups: named sets of houses with a trigger and limits of their own.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::store::MAX_HOUSES;

/// A set of houses, written `"0-31,40"`; `"all"` (the default) stands for whatever houses a database has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Houses(
    /// Ranges, both ends included, in ascending order and with gaps between them. None: all.
    Option<Vec<(u16, u16)>>,
);

impl Houses {
    /// All houses, however many there are.
    pub const ALL: Self = Self(None);

    /// Exactly these.
    pub fn of(houses: impl IntoIterator<Item = u16>) -> Self {
        Self::merged(houses.into_iter().map(|h| (h, h)).collect())
    }

    fn merged(mut ranges: Vec<(u16, u16)>) -> Self {
        ranges.sort_unstable();
        let mut out: Vec<(u16, u16)> = Vec::new();
        for (low, high) in ranges {
            match out.last_mut() {
                Some(last) if u32::from(low) <= u32::from(last.1) + 1 => last.1 = last.1.max(high),
                _ => out.push((low, high)),
            }
        }
        Self(Some(out))
    }

    /// Whether `house` is one of them. A negative one never is, not even of "all".
    pub fn contains(&self, house: i32) -> bool {
        let Ok(house) = u16::try_from(house) else { return false };
        self.0.as_ref().is_none_or(|ranges| ranges.iter().any(|(low, high)| (*low..=*high).contains(&house)))
    }

    /// Whether it stands for whatever houses there are.
    pub fn is_all(&self) -> bool {
        self.0.is_none()
    }

    /// Those that are in both.
    pub fn common(&self, other: &Self) -> Self {
        match (&self.0, &other.0) {
            (None, _) => other.clone(),
            (_, None) => self.clone(),
            (Some(a), Some(b)) => {
                let both = a.iter().flat_map(|(low, high)| b.iter().map(move |(l, h)| (*low.max(l), *high.min(h))));
                Self::merged(both.filter(|(low, high)| low <= high).collect())
            }
        }
    }

    /// Those that are in one of them.
    pub fn union(&self, other: &Self) -> Self {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) => Self::merged(a.iter().chain(b).copied().collect()),
            _ => Self::ALL,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_some_and(Vec::is_empty)
    }

    /// How many there are; None for "all".
    pub fn count(&self) -> Option<u32> {
        Some(self.0.as_ref()?.iter().map(|(low, high)| u32::from(high - low) + 1).sum())
    }

    /// The highest one that is named; None for "all" and for none.
    pub fn highest(&self) -> Option<u16> {
        self.0.as_ref().and_then(|ranges| ranges.last()).map(|(_, high)| *high)
    }
}

impl fmt::Display for Houses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(ranges) = &self.0 else { return f.write_str("all") };
        for (i, (low, high)) in ranges.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if low == high { write!(f, "{comma}{low}")? } else { write!(f, "{comma}{low}-{high}")? }
        }
        Ok(())
    }
}

impl FromStr for Houses {
    type Err = String;

    /// # Errors
    /// What is wrong with the text, and what it should look like.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == "all" {
            return Ok(Self::ALL);
        }
        let highest = MAX_HOUSES - 1;
        let number = |part: &str| match part.trim().parse::<u16>() {
            Ok(n) if n <= highest => Ok(n),
            _ => Err(format!("{:?} is no house: houses are 0 to {highest}, written like \"0-31,40\", or \"all\"", part.trim())),
        };
        let mut ranges = Vec::new();
        for part in text.split(',') {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            let (low, high) = (number(low)?, number(high)?);
            if low > high {
                return Err(format!("{:?} goes down; write \"{high}-{low}\"", part.trim()));
            }
            ranges.push((low, high));
        }
        let count: u32 = ranges.iter().map(|(low, high)| u32::from(high - low) + 1).sum();
        let merged = Self::merged(ranges);
        let distinct: u32 = merged.0.iter().flatten().map(|(low, high)| u32::from(high - low) + 1).sum();
        if distinct < count { Err(format!("{text:?} names a house twice")) } else { Ok(merged) }
    }
}

impl Serialize for Houses {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Houses {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// When a group's messages are sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Trigger {
    /// As soon as they are committed.
    #[default]
    Continuous,
    /// When somebody asks for a run.
    Manual,
    /// When a scheduler outside asks for a run: the group's houses belong to nobody in between.
    External,
    /// This long after the end of the run before.
    Every(#[serde(with = "humantime_serde")] Duration),
    /// This often, counted from start to start.
    Rate(#[serde(with = "humantime_serde")] Duration),
    /// At times given by a cron expression with seconds.
    #[serde(untagged)]
    Cron {
        /// Six fields: second, minute, hour, day of the month, month, day of the week.
        cron: String,
        /// The time zone that it is meant in, such as `Asia/Shanghai`. `UTC` by default.
        #[serde(default = "utc")]
        tz: String,
    },
}

fn utc() -> String {
    "UTC".into()
}

/// What happens when a group's trigger is due while its last run is still going.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum WhenBusy {
    /// The new run waits for the end of the other. At most one waits: what it would find, one run finds.
    #[default]
    Serial,
    /// The new run does not take place, and is recorded as DISCARDED.
    Discard,
    /// The run that is going is stopped, and the new one begins.
    Cover,
}

/// What happens to times at which a group's trigger was due while no instance was there to see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Misfire {
    /// They are left out.
    #[default]
    Skip,
    /// One run makes up for all of them.
    Once,
}

/// A named set of houses with a trigger and limits of its own. Without groups there is one, `default`, with all houses, continuous.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Group {
    /// Its name: 1 to 64 bytes.
    pub name: String,
    /// The databases it works on, by their names in the configuration file. Empty: all.
    pub databases: Vec<String>,
    /// The tables it works on: prefixes of Posthouse's own, names of adopted ones. Empty: all of Posthouse's own. Adopted tables that
    /// no group names are scanned all the time.
    pub tables: Vec<String>,
    /// Its houses.
    pub houses: Houses,
    /// When its messages are sent.
    pub trigger: Trigger,
    /// At most this many messages are taken up in one run. Unlimited when absent; at least 1. Not for continuous groups.
    pub limit: Option<u64>,
    /// How many messages of the group may be in flight from one instance. Unlimited when absent (routes have limits of their own);
    /// 1 to 10 000.
    pub concurrency: Option<u32>,
    /// How long a run may take; then it takes up no more messages, finishes those in flight, and is recorded as TIMEOUT.
    /// Unlimited when absent; at least 100 ms. Not for continuous groups.
    #[serde(with = "humantime_serde")]
    pub budget: Option<Duration>,
    /// What happens when the trigger is due while a run is going.
    pub when_busy: WhenBusy,
    /// What happens to times that were missed.
    pub misfire: Misfire,
    /// How often a run that ended with an error is tried again, one second after its end, then two, then four. 0 by default; up to 10.
    pub retries: u32,
    /// The group that runs after each run of this one that is DONE.
    pub then: Option<String>,
}

impl Default for Group {
    fn default() -> Self {
        Self {
            name: "default".into(),
            databases: Vec::new(),
            tables: Vec::new(),
            houses: Houses::ALL,
            trigger: Trigger::Continuous,
            limit: None,
            concurrency: None,
            budget: None,
            when_busy: WhenBusy::Serial,
            misfire: Misfire::Skip,
            retries: 0,
            then: None,
        }
    }
}

impl Group {
    /// A continuous group of all houses with this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Its houses, `"0-31,40"`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn houses(mut self, houses: &str) -> Result<Self, String> {
        self.houses = houses.parse()?;
        Ok(self)
    }

    /// When its messages are sent.
    #[must_use]
    pub fn trigger(mut self, trigger: Trigger) -> Self {
        self.trigger = trigger;
        self
    }

    /// At most this many messages in one run.
    #[must_use]
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// At most this many messages of it in flight from one instance.
    #[must_use]
    pub fn concurrency(mut self, messages: u32) -> Self {
        self.concurrency = Some(messages);
        self
    }

    /// Whether it is sent from all the time.
    pub fn is_continuous(&self) -> bool {
        self.trigger == Trigger::Continuous
    }

    /// What is wrong with this group by itself, each with its field.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out: Vec<(&str, String)> = Vec::new();
        if !(1..=NAME).contains(&self.name.len()) {
            out.push(("name", format!("{:?} has {} bytes, must have 1 to {NAME}", self.name, self.name.len())));
        }
        if self.houses.is_empty() {
            out.push(("houses", "are none; write them like \"0-31,40\", or \"all\"".into()));
        }
        if self.limit == Some(0) {
            out.push(("limit", "0, must be at least 1".into()));
        }
        if let Some(n) = self.concurrency
            && !(1..=MOST_IN_FLIGHT).contains(&n)
        {
            out.push(("concurrency", format!("{n}, must be 1 to {MOST_IN_FLIGHT}")));
        }
        if let Some(budget) = self.budget
            && budget < LEAST_BUDGET
        {
            out.push(("budget", format!("{budget:?}, must be at least {LEAST_BUDGET:?}")));
        }
        if self.retries > MOST_RETRIES {
            out.push(("retries", format!("{}, must be at most {MOST_RETRIES}", self.retries)));
        }
        if self.is_continuous() {
            let set = [
                ("limit", self.limit.is_some()),
                ("budget", self.budget.is_some()),
                ("retries", self.retries > 0),
                ("then", self.then.is_some()),
            ];
            for (field, _) in set.into_iter().filter(|(_, set)| *set) {
                out.push((
                    field,
                    "is for runs, and a continuous group has none; remove it, or give the group another trigger".into(),
                ));
            }
        }
        // Ours would take all houses, and not the part that the scheduler asked for.
        if self.is_external() && self.retries > 0 {
            out.push(("retries", "are left to the scheduler that asks for the runs; remove it".into()));
        }
        #[cfg_attr(not(feature = "relay"), allow(unused_mut, reason = "nothing is added"))]
        let mut out: Vec<(String, String)> = out.into_iter().map(|(field, why)| (field.to_owned(), why)).collect();
        #[cfg(feature = "relay")]
        out.extend(crate::schedule::problems(&self.trigger));
        out
    }

    /// What is wrong with several groups, each by itself and all of them together, with the field's path.
    pub fn problems_of(groups: &[Self]) -> Vec<(String, String)> {
        let mut out = Vec::new();
        for (place, group) in groups.iter().enumerate() {
            let path = |field: &str| format!("groups.{:?}.{field}", group.name);
            out.extend(group.problems().into_iter().map(|(field, why)| (path(&field), why)));
            let before = &groups[..place];
            if before.iter().any(|other| other.name == group.name) {
                out.push((path("name"), "two groups have this name; give one of them another".into()));
            }
            for other in before {
                let common = group.houses.common(&other.houses);
                if !common.is_empty() && meet(&group.databases, &other.databases) && meet(&group.tables, &other.tables) {
                    let why = format!("{common} also belong to group {:?}; give each house to one of the two", other.name);
                    out.push((path("houses"), why));
                }
            }
            let Some(then) = &group.then else { continue };
            match groups.iter().find(|other| other.name == *then) {
                None => {
                    let known: Vec<&str> = groups.iter().map(|g| g.name.as_str()).collect();
                    out.push((path("then"), format!("names no group {then:?}; there are {}", known.join(", "))));
                }
                Some(next) if next.is_continuous() => {
                    out.push((
                        path("then"),
                        format!("group {then:?} is continuous, and has no runs; name another, or remove it"),
                    ));
                }
                Some(next) if next.is_external() => {
                    out.push((path("then"), format!("group {then:?} is run by a scheduler outside; name another, or remove it")));
                }
                Some(_) => {}
            }
            // The first of a cycle tells of it.
            let mut chain = vec![group.name.as_str()];
            let mut next = Some(then.as_str());
            while let Some(name) = next.filter(|name| !chain.contains(name)) {
                chain.push(name);
                next = groups.iter().find(|g| g.name == name).and_then(|g| g.then.as_deref());
            }
            let first = || chain.iter().all(|name| groups[..place].iter().all(|g| g.name != *name));
            if next == Some(group.name.as_str()) && first() {
                chain.push(&group.name);
                out.push((path("then"), format!("goes round in a circle: {}; leave one of them out", chain.join(", "))));
            }
        }
        out
    }

    /// Whether its houses belong to an instance only for a run.
    pub(crate) fn is_external(&self) -> bool {
        self.trigger == Trigger::External
    }
}

/// Bytes of a name.
const NAME: usize = 64;

const MOST_IN_FLIGHT: u32 = 10_000;

const LEAST_BUDGET: Duration = Duration::from_millis(100);

const MOST_RETRIES: u32 = 10;

/// Whether two lists of databases or tables have one in common; an empty list stands for all.
fn meet(one: &[String], other: &[String]) -> bool {
    one.is_empty() || other.is_empty() || one.iter().any(|name| other.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn houses_are_written_as_ranges() {
        for (text, same) in [("0-31,40", "0-31,40"), ("all", "all"), (" 3 , 1-2", "1-3"), ("7", "7"), ("0-4095", "0-4095")] {
            assert_eq!(text.parse::<Houses>().unwrap().to_string(), same);
        }
        for (text, why) in [
            ("", "is no house"),
            ("-1", "is no house"),
            ("1-", "is no house"),
            ("4096", "0 to 4095"),
            ("a", "is no house"),
            ("5-3", "write \"3-5\""),
            ("1-3,2", "twice"),
            ("1,,2", "is no house"),
        ] {
            let error = text.parse::<Houses>().unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn houses_are_a_set() {
        let set: Houses = "0-3,8".parse().unwrap();
        for house in -9..12 {
            assert_eq!(set.contains(house), [0, 1, 2, 3, 8].contains(&house), "{house}");
            assert_eq!(Houses::ALL.contains(house), house >= 0);
        }
        let other: Houses = "3-8".parse().unwrap();
        assert_eq!(set.common(&other).to_string(), "3,8");
        assert_eq!(set.union(&other).to_string(), "0-8");
        assert!(set.common(&"4-7".parse().unwrap()).is_empty());
        assert_eq!((set.common(&Houses::ALL), set.union(&Houses::ALL)), (set.clone(), Houses::ALL));
        assert_eq!((set.highest(), Houses::ALL.highest()), (Some(8), None));
        assert_eq!((set.count(), Houses::of([]).count(), Houses::ALL.count()), (Some(5), Some(0), None));
        assert_eq!(Houses::of([5, 4, 9]).to_string(), "4-5,9");
    }

    fn told(groups: &[Group]) -> String {
        let lines: Vec<String> = Group::problems_of(groups).into_iter().map(|(field, why)| format!("{field}: {why}")).collect();
        lines.join("\n")
    }

    #[test]
    fn a_group_says_what_is_wrong_with_it() {
        let manual = |name: &str| Group::new(name).trigger(Trigger::Manual);
        assert_eq!(told(&[manual("a").limit(1).concurrency(10_000), Group::new("b").concurrency(1)][..1]), "");
        for (wrong, why) in [
            (manual(""), "name: \"\" has 0 bytes"),
            (manual(&"x".repeat(65)), "has 65 bytes, must have 1 to 64"),
            (Group { houses: Houses::of([]), ..manual("a") }, "houses: are none"),
            (manual("a").limit(0), "limit: 0, must be at least 1"),
            (manual("a").concurrency(0), "concurrency: 0, must be 1 to 10000"),
            (manual("a").concurrency(10_001), "concurrency: 10001, must be 1 to 10000"),
            (Group { budget: Some(Duration::from_millis(99)), ..manual("a") }, "budget: 99ms, must be at least 100ms"),
            (Group { retries: 11, ..manual("a") }, "retries: 11, must be at most 10"),
            (Group { retries: 1, ..manual("a").trigger(Trigger::External) }, "retries: are left to the scheduler"),
            (Group::new("a").limit(5), "limit: is for runs"),
            (Group { budget: Some(Duration::from_secs(1)), ..Group::new("a") }, "budget: is for runs"),
            (Group { then: Some("b".into()), ..manual("a") }, "then: names no group \"b\"; there are a"),
            (Group { then: Some("a".into()), ..manual("a") }, "goes round in a circle: a, a"),
        ] {
            let told = told(std::slice::from_ref(&wrong));
            assert!(told.contains(why) && told.lines().count() == 1, "{why}: {told}");
        }
        assert_eq!(told(&[manual(&"x".repeat(64))]), "");
    }

    #[test]
    fn groups_say_what_is_wrong_between_them() {
        let group = |name: &str, houses: &str| Group::new(name).trigger(Trigger::Manual).houses(houses).unwrap();
        let then = |name: &str, houses: &str, then: &str| Group { then: Some(then.into()), ..group(name, houses) };
        assert_eq!(told(&[group("a", "0-3"), group("b", "4-7"), then("c", "8", "a")]), "");
        let overlap = told(&[group("a", "0-3"), group("b", "2-7"), group("c", "all")]);
        for line in [
            "groups.\"b\".houses: 2-3 also belong to group \"a\"; give each house to one of the two",
            "groups.\"c\".houses: 0-3 also belong to group \"a\"; give each house to one of the two",
            "groups.\"c\".houses: 2-7 also belong to group \"b\"; give each house to one of the two",
        ] {
            assert!(overlap.contains(line), "{overlap}");
        }
        let of = |name: &str, database: &str, table: &str| Group {
            databases: vec![database.into()],
            tables: vec![table.into()],
            ..group(name, "all")
        };
        assert_eq!(told(&[of("a", "x", "t"), of("b", "y", "t"), of("c", "x", "u")]), "");
        assert!(told(&[of("a", "x", "t"), Group { tables: vec![], ..of("b", "x", "t") }]).contains("all also belong"));
        assert!(told(&[group("a", "0"), group("a", "1")]).contains("two groups have this name"));
        let circle = told(&[then("a", "0", "b"), then("b", "1", "c"), then("c", "2", "b"), then("d", "3", "a")]);
        assert_eq!(circle, "groups.\"b\".then: goes round in a circle: b, c, b; leave one of them out");
        assert!(told(&[then("a", "0", "b"), Group::new("b").houses("1").unwrap()]).contains("\"b\" is continuous"));
        let outside = group("b", "1").trigger(Trigger::External);
        assert!(told(&[then("a", "0", "b"), outside]).contains("\"b\" is run by a scheduler outside"));
    }

    #[test]
    fn triggers_are_written_as_in_the_configuration_file() {
        let cron = |cron: &str, tz: &str| Trigger::Cron { cron: cron.into(), tz: tz.into() };
        for (json, trigger) in [
            (r#""continuous""#, Trigger::Continuous),
            (r#""manual""#, Trigger::Manual),
            (r#""external""#, Trigger::External),
            (r#"{"every":"5s"}"#, Trigger::Every(Duration::from_secs(5))),
            (r#"{"rate":"5s"}"#, Trigger::Rate(Duration::from_secs(5))),
            (r#"{"cron":"0 */5 * * * *","tz":"Asia/Shanghai"}"#, cron("0 */5 * * * *", "Asia/Shanghai")),
        ] {
            assert_eq!(serde_json::from_str::<Trigger>(json).unwrap(), trigger);
            assert_eq!(serde_json::to_string(&trigger).unwrap(), json);
        }
        assert_eq!(serde_json::from_str::<Trigger>(r#"{"cron":"0 0 4 * * *"}"#).unwrap(), cron("0 0 4 * * *", "UTC"));
    }
}
