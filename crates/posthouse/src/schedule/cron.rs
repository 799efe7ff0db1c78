//! Cron expressions with seconds, in a named time zone.

use std::fmt;

use croner::parser::{CronParser, Seconds, Year};
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Timestamp, Unit, Zoned};

/// The fields of an expression, in their order, and what each may hold.
const FIELDS: [(&str, &str); 6] = [
    ("second", "0-59"),
    ("minute", "0-59"),
    ("hour", "0-23"),
    ("day of the month", "1-31, L (the last), 15W (the working day nearest to the 15th)"),
    ("month", "1-12, JAN-DEC"),
    ("day of the week", "0-7 (0 and 7 are Sunday), SUN-SAT, FRI#2 (the second Friday), FRI#L (the last)"),
];

/// A cron expression of six fields in a named time zone.
///
/// | field | values |
/// |---|---|
/// | second | `0-59` |
/// | minute | `0-59` |
/// | hour | `0-23` |
/// | day of the month | `1-31`, `L` (the last), `15W` (the working day nearest to the 15th) |
/// | month | `1-12`, `JAN-DEC` |
/// | day of the week | `0-7` (0 and 7 are Sunday), `SUN-SAT`, `FRI#2` (the second Friday), `FRI#L` (the last) |
///
/// Each field may be `*`, a list (`1,15`), a range (`MON-FRI`) or have a step (`*/5`, `0/5`, `10-40/10`). If both days are
/// given, either is enough; with a `+` before the day of the week both must hold. `?` is the same as `*` in them.
///
/// # When clocks change
///
/// What counts is the hour field.
///
/// - **Particular hours** (`0 30 2 * * *`, `0 0 2,14 * * *`, `0 0 */6 * * *`): the expression names times of the day, and each of
///   them comes **once**. A time that the clock skips comes at the end of the gap: 02:30 becomes 03:00 when the clock goes from
///   02:00 to 03:00. Several skipped times come once together. A time that the clock repeats comes the first time only.
/// - **Every hour** (`0 */5 * * * *`, `0 30 * * * *`): it goes on as time does. Nothing comes for times that are skipped, which
///   are no time at all, and what is repeated comes both times, an hour apart.
///
/// Rules of zones are those of the system's database where there is one, else the one that was built in; so is UTC.
#[derive(Debug, Clone)]
pub struct Cron {
    expression: croner::Cron,
    zone: TimeZone,
    /// It fires in every hour of the day.
    every_hour: bool,
}

/// Why a cron expression or its time zone can't be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CronError {
    /// `cron` or `tz`.
    pub field: &'static str,
    /// What is wrong, and what is allowed.
    pub reason: String,
}

impl fmt::Display for CronError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.reason)
    }
}

impl std::error::Error for CronError {}

impl Cron {
    /// Takes an expression apart.
    ///
    /// # Errors
    /// The field that is wrong and what it may hold; an expression that never comes; an unknown time zone.
    pub fn parse(expression: &str, zone: &str) -> Result<Self, CronError> {
        let wrong = |reason: String| CronError { field: "cron", reason };
        let zone = TimeZone::get(zone).map_err(|_| CronError {
            field: "tz",
            reason: format!("{zone:?} is no time zone; write a name such as \"UTC\", \"Europe/Berlin\", \"Asia/Shanghai\""),
        })?;
        let parts: Vec<&str> = expression.split_whitespace().collect();
        if parts.len() != FIELDS.len() {
            let names: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
            return Err(wrong(format!(
                "{expression:?} has {} fields, must have six: {}; \"0 */5 * * * *\" is every five minutes",
                parts.len(),
                names.join(", ")
            )));
        }
        let parser = CronParser::builder().seconds(Seconds::Required).year(Year::Disallowed).sloppy_ranges(true).build();
        // One field at a time, so that the one that is wrong can be named.
        for (place, (name, allowed)) in FIELDS.iter().enumerate() {
            let mut alone = ["0", "0", "0", "*", "*", "*"];
            alone[place] = parts[place];
            if parser.parse(&alone.join(" ")).is_err() {
                return Err(wrong(format!(
                    "{:?} can't be the {name}; allowed are {allowed}, *, and lists, ranges and steps of these",
                    parts[place]
                )));
            }
        }
        let expression = parser.parse(&parts.join(" ")).map_err(|e| wrong(e.to_string()))?;
        let every_hour = (0..24).all(|hour| expression.pattern.hour_match(hour).unwrap_or(false));
        let cron = Self { expression, zone, every_hour };
        // The calendar repeats itself every 400 years.
        let start = DateTime::constant(2000, 1, 1, 0, 0, 0, 0);
        match cron.expression.find_next_occurrence(&start, true) {
            Ok(first) if first.year() < 2400 => Ok(cron),
            _ => Err(wrong(format!("{:?} never comes: there is no such day", parts.join(" ")))),
        }
    }

    /// The first time after a moment, both in microseconds since 1970 UTC. None behind the end of the calendar.
    pub fn next_after(&self, after_us: i64) -> Option<i64> {
        // Whole seconds before the moment lead to the same answer, and fit all that follows.
        let after = Timestamp::from_second(after_us.div_euclid(1_000_000)).ok()?.to_zoned(self.zone.clone());
        let next = if self.every_hour {
            self.expression.find_next_occurrence(&after, false).ok()?.timestamp()
        } else {
            self.next_time_of_day(&after)?
        };
        Some(next.as_microsecond())
    }

    /// The first time of the day, by the calendar, whose moment comes after this one. Later times never have earlier moments.
    fn next_time_of_day(&self, after: &Zoned) -> Option<Timestamp> {
        let mut time = after.datetime();
        loop {
            time = self.expression.find_next_occurrence(&time, false).ok()?;
            let moment = self.moment(time)?;
            if moment > after.timestamp() {
                return Some(moment);
            }
        }
    }

    /// When a time on the wall is: the first time if it comes twice, the end of the gap if it doesn't come.
    fn moment(&self, time: DateTime) -> Option<Timestamp> {
        let zoned = self.zone.to_ambiguous_zoned(time);
        match zoned.offset() {
            AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => Some(zoned.earlier().ok()?.timestamp()),
            AmbiguousOffset::Gap { .. } => {
                let before = zoned.earlier().ok()?.timestamp();
                Some(self.zone.following(before).next()?.timestamp())
            }
        }
    }

    /// A moment as its time zone writes it, to the second.
    pub fn show(&self, at_us: i64) -> String {
        let Ok(at) = Timestamp::from_microsecond(at_us) else { return at_us.to_string() };
        let at = at.to_zoned(self.zone.clone());
        at.round(Unit::Second).unwrap_or(at).strftime("%Y-%m-%d %H:%M:%S %:z").to_string()
    }
}

/// The names of all time zones that are known here.
pub fn time_zones() -> Vec<String> {
    jiff::tz::db().available().map(|name| name.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BERLIN: &str = "Europe/Berlin";
    const NEW_YORK: &str = "America/New_York";
    const LORD_HOWE: &str = "Australia/Lord_Howe";

    fn us(text: &str) -> i64 {
        text.parse::<Timestamp>().unwrap().as_microsecond()
    }

    /// The times after a moment up to another, as the zone's clock shows them.
    fn between(expression: &str, zone: &str, from: &str, until: &str) -> Vec<String> {
        let cron = Cron::parse(expression, zone).unwrap();
        let mut out = Vec::new();
        let mut at = us(from);
        while let Some(next) = cron.next_after(at).filter(|next| *next <= us(until)) {
            assert!(next > at, "{expression} in {zone} stands still at {at}");
            assert_eq!(
                cron.next_after(next - 1),
                Some(next),
                "{expression} in {zone}: the moment itself is the next one before it"
            );
            out.push(cron.show(next)[5..].to_owned());
            at = next;
        }
        out
    }

    #[test]
    fn an_ordinary_day() {
        let day = |expression: &str, zone: &str| between(expression, zone, "2026-06-01T00:00:00Z", "2026-06-02T00:00:00Z");
        assert_eq!(day("0 0 4 * * *", "Asia/Shanghai"), ["06-02 04:00:00 +08:00"]);
        assert_eq!(day("0 0 4 * * *", "UTC"), ["06-01 04:00:00 +00:00"]);
        assert_eq!(day("0 0 0/12 * * ?", "UTC"), ["06-01 12:00:00 +00:00", "06-02 00:00:00 +00:00"]);
        assert_eq!(day("* * * * * *", "UTC").len(), 86_400);
        assert_eq!(day("0 */5 * * * *", "Asia/Shanghai").len(), 288);
        assert_eq!(day("0 0 9 * * MON-FRI", BERLIN), ["06-01 09:00:00 +02:00"]);
        assert_eq!(day("0 0 9 * * SAT,SUN", BERLIN), [""; 0]);
        assert_eq!(day("0 0 9 2 6 ?", "Asia/Shanghai"), [""; 0], "09:00 of the 2nd is 01:00 in UTC, an hour too late");
        let year = |expression: &str| between(expression, "UTC", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z");
        assert_eq!(year("0 0 0 L 2 *"), ["02-28 00:00:00 +00:00"]);
        assert_eq!(year("0 0 0 ? * FRI#2").len(), 12);
        assert_eq!(year("0 0 0 13 * +FRI").len(), 3);
        let leap = Cron::parse("0 0 0 29 2 *", "UTC").unwrap();
        assert_eq!(leap.next_after(us("2026-01-01T00:00:00Z")), Some(us("2028-02-29T00:00:00Z")));
    }

    #[test]
    fn the_next_time_is_strictly_later() {
        let cron = Cron::parse("* * * * * *", "UTC").unwrap();
        for (after, next) in [(0, 1), (1, 1), (999_999, 1), (1_000_000, 2), (-1, 0), (-1_000_000, 0), (-1_000_001, -1)] {
            assert_eq!(cron.next_after(after), Some(next * 1_000_000), "{after}");
        }
    }

    #[test]
    fn a_skipped_time_of_the_day_comes_once_at_the_end_of_the_gap() {
        let gap = |expression: &str| between(expression, BERLIN, "2026-03-28T12:00:00Z", "2026-03-30T12:00:00Z");
        assert_eq!(gap("0 30 2 * * *"), ["03-29 03:00:00 +02:00", "03-30 02:30:00 +02:00"]);
        assert_eq!(gap("0 0 2 * * *"), ["03-29 03:00:00 +02:00", "03-30 02:00:00 +02:00"]);
        assert_eq!(gap("59 59 2 29 * *"), ["03-29 03:00:00 +02:00"]);
        assert_eq!(gap("0 0 3 29 * *"), ["03-29 03:00:00 +02:00"]);
        assert_eq!(gap("0 0 1,2,3 29 * *"), ["03-29 01:00:00 +01:00", "03-29 03:00:00 +02:00"], "02:00 and 03:00 are one");
        assert_eq!(gap("0 */15 2 29 * *"), ["03-29 03:00:00 +02:00"], "four skipped times are one");
        assert_eq!(
            between("0 30 2 * * *", NEW_YORK, "2026-03-07T12:00:00Z", "2026-03-09T12:00:00Z"),
            ["03-08 03:00:00 -04:00", "03-09 02:30:00 -04:00"]
        );
        assert_eq!(
            between("0 15 2 * * *", LORD_HOWE, "2026-10-02T15:00:00Z", "2026-10-04T15:00:00Z"),
            ["10-03 02:15:00 +10:30", "10-04 02:30:00 +11:00"],
            "half an hour is skipped there"
        );
        assert_eq!(
            between("0 30 2 * * *", "Asia/Shanghai", "2026-03-28T12:00:00Z", "2026-03-30T12:00:00Z").len(),
            2,
            "no change there"
        );
        // A gap at midnight.
        assert_eq!(
            between("0 0 0 * * *", "Asia/Beirut", "2026-03-28T12:00:00Z", "2026-03-29T12:00:00Z"),
            ["03-29 01:00:00 +03:00"]
        );
        // A whole day was left out.
        assert_eq!(
            between("0 0 12 30 12 *", "Pacific/Apia", "2011-12-01T00:00:00Z", "2012-01-31T00:00:00Z"),
            ["12-31 00:00:00 +14:00"]
        );
    }

    #[test]
    fn a_repeated_time_of_the_day_comes_the_first_time_only() {
        let fold = |expression: &str| between(expression, BERLIN, "2026-10-24T12:00:00Z", "2026-10-26T12:00:00Z");
        assert_eq!(fold("0 30 2 * * *"), ["10-25 02:30:00 +02:00", "10-26 02:30:00 +01:00"]);
        assert_eq!(fold("0 30 2,14 25 * *"), ["10-25 02:30:00 +02:00", "10-25 14:30:00 +01:00"]);
        assert_eq!(fold("0 0 2 25 * *"), ["10-25 02:00:00 +02:00"]);
        assert_eq!(fold("0 0 3 25 * *"), ["10-25 03:00:00 +01:00"]);
        assert_eq!(fold("0 0,30 2 25 * *"), ["10-25 02:00:00 +02:00", "10-25 02:30:00 +02:00"]);
        assert_eq!(
            between("0 30 1 * * *", NEW_YORK, "2026-10-31T12:00:00Z", "2026-11-02T12:00:00Z"),
            ["11-01 01:30:00 -04:00", "11-02 01:30:00 -05:00"]
        );
        assert_eq!(
            between("0 45 1 * * *", LORD_HOWE, "2026-04-04T12:00:00Z", "2026-04-06T12:00:00Z"),
            ["04-05 01:45:00 +11:00", "04-06 01:45:00 +10:30"],
            "half an hour is repeated there"
        );
        // Begun in the repeated hour, the second time: what came the first time is over.
        let cron = Cron::parse("0 30 2 * * *", BERLIN).unwrap();
        assert_eq!(cron.next_after(us("2026-10-25T01:10:00Z")), Some(us("2026-10-26T01:30:00Z")));
        assert_eq!(cron.next_after(us("2026-10-25T00:10:00Z")), Some(us("2026-10-25T00:30:00Z")));
    }

    #[test]
    fn what_comes_every_hour_goes_on_as_time_does() {
        let gap = |expression: &str| between(expression, BERLIN, "2026-03-28T23:59:00Z", "2026-03-29T03:00:00Z");
        assert_eq!(
            gap("0 0 * * * *"),
            ["03-29 01:00:00 +01:00", "03-29 03:00:00 +02:00", "03-29 04:00:00 +02:00", "03-29 05:00:00 +02:00"]
        );
        let fold = |expression: &str| between(expression, BERLIN, "2026-10-24T23:59:00Z", "2026-10-25T02:00:00Z");
        assert_eq!(fold("0 0 * * * *"), ["10-25 02:00:00 +02:00", "10-25 02:00:00 +01:00", "10-25 03:00:00 +01:00"]);
        // By real time nothing changes: twelve an hour, whatever the clock shows.
        for (zone, from, until) in [
            (BERLIN, "2026-03-28T12:00:00Z", "2026-03-29T12:00:00Z"),
            (BERLIN, "2026-10-24T12:00:00Z", "2026-10-25T12:00:00Z"),
            (NEW_YORK, "2026-03-08T00:00:00Z", "2026-03-09T00:00:00Z"),
            (NEW_YORK, "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"),
            (LORD_HOWE, "2026-10-03T12:00:00Z", "2026-10-04T12:00:00Z"),
            (LORD_HOWE, "2026-04-04T12:00:00Z", "2026-04-05T12:00:00Z"),
        ] {
            assert_eq!(between("0 */5 * * * *", zone, from, until).len(), 288, "{zone} from {from}");
        }
        assert_eq!(
            between("0 15 * * * *", LORD_HOWE, "2026-10-03T14:00:00Z", "2026-10-03T16:30:00Z"),
            ["10-04 01:15:00 +10:30", "10-04 03:15:00 +11:00"],
            "there is no 02:15 on that day"
        );
    }

    /// The answers of the search, compared with a walk over every second of the hours around a change of the clock.
    #[test]
    fn no_time_is_left_out_and_none_is_made_up() {
        const HOURS: i64 = 4;
        for (zone, from) in [
            (BERLIN, "2026-03-28T23:30:00Z"),
            (BERLIN, "2026-10-24T23:00:00Z"),
            (NEW_YORK, "2026-03-08T05:00:00Z"),
            (NEW_YORK, "2026-11-01T04:00:00Z"),
            (LORD_HOWE, "2026-10-03T14:00:00Z"),
            (LORD_HOWE, "2026-04-04T13:00:00Z"),
        ] {
            let tz = TimeZone::get(zone).unwrap();
            let start = us(from) / 1_000_000;
            let shown = |second| Timestamp::from_second(second).unwrap().to_zoned(tz.clone()).datetime();
            // For each second what the clock shows, and what it has left out just before.
            let mut walk: Vec<(i64, Vec<DateTime>)> = Vec::new();
            let mut before = shown(start);
            for second in start + 1..=start + HOURS * 3600 {
                let now = shown(second);
                let mut passed = Vec::new();
                let mut next = before.checked_add(jiff::ToSpan::seconds(1)).unwrap();
                while next < now {
                    passed.push(next);
                    next = next.checked_add(jiff::ToSpan::seconds(1)).unwrap();
                }
                passed.push(now);
                walk.push((second * 1_000_000, passed));
                before = now;
            }
            for (minute, hour) in [("0", "*"), ("*/7", "*"), ("30", "1,2"), ("*/20", "1-3"), ("0,59", "2"), ("15,45", "*/2")] {
                let cron = Cron::parse(&format!("0 {minute} {hour} * * *"), zone).unwrap();
                let mut found = Vec::new();
                let mut at = us(from);
                while let Some(next) = cron.next_after(at).filter(|n| *n <= us(from) + HOURS * 3_600_000_000) {
                    found.push(next);
                    at = next;
                }
                let matches = |time: &DateTime| time.second() == 0 && cron.expression.is_time_matching(time).unwrap();
                let mut seen = std::collections::HashSet::new();
                let mut comes = |passed: &[DateTime]| match cron.every_hour {
                    true => passed.last().is_some_and(matches),
                    false => passed.iter().filter(|t| matches(t)).filter(|t| seen.insert(**t)).count() > 0,
                };
                let expected: Vec<i64> = walk.iter().filter(|(_, passed)| comes(passed)).map(|(at, _)| *at).collect();
                assert!(!expected.is_empty());
                assert_eq!(found, expected, "0 {minute} {hour} * * * in {zone} from {from}");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_allowed() {
        for (expression, zone, field, why) in [
            ("0 */5 * * *", "UTC", "cron", "has 5 fields, must have six: second, minute, hour"),
            ("", "UTC", "cron", "has 0 fields"),
            ("@daily", "UTC", "cron", "has 1 fields"),
            ("0 0 0 1 1 * 2027", "UTC", "cron", "has 7 fields"),
            ("60 * * * * *", "UTC", "cron", "\"60\" can't be the second; allowed are 0-59"),
            ("0 x * * * *", "UTC", "cron", "\"x\" can't be the minute"),
            ("0 0 24 * * *", "UTC", "cron", "\"24\" can't be the hour; allowed are 0-23"),
            ("0 0 0 32 * *", "UTC", "cron", "\"32\" can't be the day of the month; allowed are 1-31"),
            ("0 0 0 0 * *", "UTC", "cron", "\"0\" can't be the day of the month"),
            ("0 0 0 * 13 *", "UTC", "cron", "\"13\" can't be the month; allowed are 1-12, JAN-DEC"),
            ("0 0 0 * * FUN", "UTC", "cron", "\"FUN\" can't be the day of the week; allowed are 0-7"),
            ("0 0 0 * * 8", "UTC", "cron", "\"8\" can't be the day of the week"),
            ("0 */0 * * * *", "UTC", "cron", "can't be the minute"),
            ("0 0 0 30 2 *", "UTC", "cron", "never comes"),
            ("0 0 0 31 4,6 ?", "UTC", "cron", "never comes"),
            ("0 0 0 * * *", "Europe/Berln", "tz", "\"Europe/Berln\" is no time zone; write a name such as \"UTC\""),
            ("0 0 0 * * *", "", "tz", "is no time zone"),
        ] {
            let error = Cron::parse(expression, zone).expect_err(expression);
            assert_eq!(error.field, field, "{expression:?}: {error}");
            assert!(error.reason.contains(why), "{expression:?}: {error}");
        }
        assert!(Cron::parse("0 0 0 * * *", "asia/shanghai").is_ok(), "names are found whatever their case");
    }
}
