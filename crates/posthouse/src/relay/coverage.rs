//! Which houses somebody sees to, judged over all live instances, and messages in houses that nobody sees to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::stats::Uncovered;
use crate::store::{Coverage, House, Membership, ORPHAN_HOUSES, ORPHAN_ROWS};
use crate::{Group, Houses};

/// Houses that nobody covers for this long are an alert.
pub(super) const ALERT: Duration = Duration::from_secs(60);

/// How often messages in houses that nobody covers are looked for, beside whenever the coverage changes.
const PERIOD: Duration = Duration::from_secs(60);

/// The same while there are some, or when they couldn't be looked for.
const SOON: Duration = Duration::from_secs(5);

/// The houses of an instance with these groups.
pub(super) fn of(groups: &[Group]) -> Coverage {
    if groups.is_empty() {
        return Coverage::default();
    }
    let union = |external: bool| {
        let houses = groups.iter().filter(|g| g.is_external() == external).map(|g| &g.houses);
        houses.fold(Houses::of([]), |all, houses| all.union(houses))
    };
    Coverage { takes: union(false), for_runs: union(true) }
}

/// The houses that live instances see to, out of how many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Covered {
    houses: u16,
    covered: Houses,
}

/// Judges the coverage by what a renewal told.
pub(super) fn judge(shared: &Shared, members: &Membership) {
    let all = members.houses.iter().filter_map(|h| u16::try_from(h.0.0).ok());
    let (covered, uncovered): (Vec<u16>, Vec<u16>) =
        all.partition(|h| members.live.iter().any(|live| live.coverage.covers(House((*h).into()))));
    let seen = Covered { houses: members.houses.len() as u16, covered: Houses::of(covered) };
    let first = shared.covered.borrow().is_none();
    let uncovered = Houses::of(uncovered);
    let mut stats = shared.stats();
    let known = stats.uncovered.as_ref().map(|u| &u.houses);
    if uncovered.is_empty() {
        if known.is_some() {
            tracing::info!("every house is covered again");
        }
        stats.uncovered = None;
    } else if known != Some(&uncovered) {
        // Since when any is uncovered: instances that come and go meanwhile don't put off the alert.
        let since = stats.uncovered.as_ref().map_or_else(Instant::now, |u| u.since);
        let alerted = stats.uncovered.as_ref().is_some_and(|u| u.alerted);
        let found = Uncovered { houses: uncovered, since, alerted };
        tracing::warn!("{found}");
        stats.uncovered = Some(found);
    }
    if let Some(found) = stats.uncovered.as_mut().filter(|u| !u.alerted && u.since.elapsed() >= ALERT) {
        tracing::error!("{found}");
        found.alerted = true;
    }
    drop(stats);
    if first {
        // What could not be checked at the start, as the database wasn't there.
        for problem in super::houses_missing(&shared.groups, seen.houses) {
            tracing::error!("{problem}");
        }
    }
    shared.covered.send_if_modified(|known| {
        let changed = known.as_ref() != Some(&seen);
        *known = Some(seen);
        changed
    });
}

/// Numbers that are no house somebody covers, as ranges with both ends included.
fn gaps(seen: &Covered) -> Vec<(i32, i32)> {
    let mut out = vec![(i32::MIN, -1)];
    let mut open: Option<i32> = None;
    for house in 0..i32::from(seen.houses) {
        match (seen.covered.contains(house), open) {
            (false, None) => open = Some(house),
            (true, Some(low)) => {
                out.push((low, house - 1));
                open = None;
            }
            _ => {}
        }
    }
    out.push((open.unwrap_or(i32::from(seen.houses)), i32::MAX));
    out
}

/// Looks for messages in houses that nobody covers, or that don't exist.
pub(super) async fn orphans(shared: Arc<Shared>) -> &'static str {
    let mut covered = shared.covered.subscribe();
    loop {
        let seen = covered.borrow_and_update().clone();
        let mut wait = PERIOD;
        if let Some(seen) = seen {
            match shared.store.rows_in(&gaps(&seen)).await {
                Ok(found) => {
                    let mut stats = shared.stats();
                    if !found.is_empty() && stats.orphaned != found {
                        tracing::error!("{}", told(&found));
                    }
                    if !found.is_empty() {
                        wait = SOON;
                    }
                    stats.orphaned = found;
                    stats.pass("orphans");
                }
                Err(e) => {
                    tracing::warn!(error = %e, "could not look for orphaned messages, will be tried again");
                    wait = SOON;
                }
            }
        }
        // The sender lives as long as this loop.
        let _ = tokio::time::timeout(wait, covered.changed()).await;
    }
}

/// One sentence about messages in houses that nobody covers, with what to do.
pub(super) fn told(found: &[(House, u64)]) -> String {
    let houses: Vec<String> = found
        .iter()
        .map(|(house, rows)| {
            let more = if *rows >= ORPHAN_ROWS { "at least " } else { "" };
            let s = if *rows == 1 { "" } else { "s" };
            format!("house {house} ({more}{rows} message{s})")
        })
        .collect();
    let more = if found.len() >= ORPHAN_HOUSES { " and perhaps more" } else { "" };
    format!(
        "messages lie in houses that no live instance covers, and are not sent: {}{more}; start an instance with a group that has these \
         houses, or, where there is no such house, give the messages their houses anew with `posthouse houses resize` and the \
         number of houses there is",
        houses.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Trigger;

    #[test]
    fn the_coverage_is_that_of_all_groups() {
        let group = |name: &str, houses: &str| Group::new(name).houses(houses).unwrap();
        assert_eq!(of(&[]), Coverage::default());
        let groups = [group("a", "0-3"), group("b", "8").trigger(Trigger::Manual), group("c", "9").trigger(Trigger::External)];
        assert_eq!(of(&groups), Coverage { takes: "0-3,8".parse().unwrap(), for_runs: "9".parse().unwrap() });
    }

    #[test]
    fn every_number_is_covered_or_in_a_gap() {
        for (covered, expected) in [
            ("0-7", &[(i32::MIN, -1), (8, i32::MAX)][..]),
            ("0-3", &[(i32::MIN, -1), (4, i32::MAX)]),
            ("4-7", &[(i32::MIN, -1), (0, 3), (8, i32::MAX)]),
            ("1,3-5", &[(i32::MIN, -1), (0, 0), (2, 2), (6, i32::MAX)]),
        ] {
            assert_eq!(gaps(&Covered { houses: 8, covered: covered.parse().unwrap() }), expected, "{covered}");
        }
        assert_eq!(gaps(&Covered { houses: 8, covered: Houses::of([]) }), [(i32::MIN, -1), (0, i32::MAX)]);
    }

    #[test]
    fn orphans_are_told_with_what_to_do() {
        let text = told(&[(House(-3), 1), (House(9), ORPHAN_ROWS)]);
        assert!(text.contains("house -3 (1 message), house 9 (at least 10000 messages)"), "{text}");
    }
}
