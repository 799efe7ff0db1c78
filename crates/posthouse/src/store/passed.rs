//! How far the keys of a relay are done, so that its reads needn't walk over what it delivered.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{House, KeyHash};

/// Keys in one generation; two are kept. Only keys with many messages matter, and those come up all the time.
const KEYS: usize = 4_096;

/// The last delivered id of recent keys: what lies at or below it needn't be asked for.
///
/// Deleted rows stay in the indexes while some transaction can still see them, and a probe for a key's rows walks over all of
/// them: after an hour with an open snapshot, over hundreds of thousands for a busy key.
///
/// Why it keeps the order. A row is delivered after every lower one that its snapshot saw. A lower one that is seen later was
/// committed later, by a writer that was not serialised with the row's own: outside the rule. Only an operator can put a row
/// back below. So a key that an operator touched is left out from then on, because rows of it that were read before may still
/// be on their way; and nothing here counts for a statement that saw more operator actions than the relay has dealt with.
#[derive(Debug, Default)]
pub struct Passed(Mutex<Keys>);

#[derive(Debug, Default)]
struct Keys {
    /// Number of the last operator action that was dealt with.
    changes: Option<i64>,
    recent: HashMap<(House, KeyHash), i64>,
    older: HashMap<(House, KeyHash), i64>,
    /// Keys that are left out.
    touched: HashSet<(House, KeyHash)>,
    /// Too many of those: all are left out.
    off: bool,
}

impl Passed {
    fn keys(&self) -> MutexGuard<'_, Keys> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A row was delivered in its turn.
    pub(crate) fn delivered(&self, key: &(House, KeyHash), id: i64) {
        let mut keys = self.keys();
        if keys.off || keys.touched.contains(key) {
            return;
        }
        if let Some(known) = keys.recent.get_mut(key) {
            *known = id.max(*known);
            return;
        }
        if keys.recent.len() >= KEYS {
            keys.older = std::mem::take(&mut keys.recent);
        }
        let known = keys.older.remove(key).unwrap_or(0);
        keys.recent.insert(key.clone(), id.max(known));
    }

    /// A row of the key may be pending again.
    pub(crate) fn leave_out(&self, key: &(House, KeyHash)) {
        let keys = &mut *self.keys();
        keys.recent.remove(key);
        keys.older.remove(key);
        keys.touched.insert(key.clone());
        if keys.touched.len() > KEYS {
            *keys = Keys { off: true, changes: keys.changes, ..Keys::default() };
        }
    }

    /// Begins anew.
    pub(crate) fn clear(&self) {
        *self.keys() = Keys::default();
    }

    /// All operator actions up to this number have been dealt with.
    pub(crate) fn caught_up(&self, changes: i64) {
        self.keys().changes = Some(changes);
    }

    /// Knows nothing of houses that are gone.
    pub(crate) fn forget_houses(&self, gone: impl Fn(House) -> bool) {
        let keys = &mut *self.keys();
        keys.recent.retain(|key, _| !gone(key.0));
        keys.older.retain(|key, _| !gone(key.0));
    }

    /// Whether it counts for a statement that saw this number of operator actions.
    pub(crate) fn counts(&self, changes: i64) -> bool {
        self.keys().changes == Some(changes)
    }

    /// Rows of the key that lie above the answer must be looked at; `below` is the row for which it is asked.
    pub(crate) fn after(&self, key: &(House, KeyHash), below: i64) -> i64 {
        let keys = self.keys();
        let known = keys.recent.get(key).or_else(|| keys.older.get(key)).copied().unwrap_or(0);
        if known < below { known } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: i64) -> (House, KeyHash) {
        (House(n as i32 % 4), KeyHash::number(n))
    }

    #[test]
    fn busy_keys_stay_known_and_the_others_take_no_room() {
        let passed = Passed::default();
        for n in 0..100_000 {
            passed.delivered(&key(n), n + 1);
            passed.delivered(&key(0), n + 1);
        }
        assert_eq!(passed.after(&key(0), i64::MAX), 100_000);
        assert_eq!(passed.after(&key(99_999), i64::MAX), 100_000);
        assert_eq!(passed.after(&key(5), i64::MAX), 0, "forgotten");
        let keys = passed.keys();
        assert!(keys.recent.len() <= KEYS && keys.older.len() <= KEYS);
    }

    #[test]
    fn it_never_hides_what_lies_below_or_came_back() {
        let passed = Passed::default();
        passed.delivered(&key(1), 20);
        passed.delivered(&key(1), 10);
        assert_eq!((passed.after(&key(1), 21), passed.after(&key(1), 20), passed.after(&key(1), 15)), (20, 0, 0));
        assert!(!passed.counts(0), "nothing is known of operator actions yet");
        passed.caught_up(3);
        assert!(passed.counts(3) && !passed.counts(4));
        passed.leave_out(&key(1));
        assert_eq!(passed.after(&key(1), i64::MAX), 0);
        passed.delivered(&key(1), 30);
        assert_eq!(passed.after(&key(1), i64::MAX), 0, "it was on its way before the key was touched");
        passed.delivered(&key(2), 20);
        passed.forget_houses(|house| house == House(2));
        assert_eq!(passed.after(&key(2), i64::MAX), 0);
        passed.delivered(&key(7), 20);
        (1_000..1_000 + KEYS as i64).for_each(|n| passed.leave_out(&key(n)));
        assert_eq!(passed.after(&key(7), i64::MAX), 0, "too many to remember");
        passed.delivered(&key(1), 30);
        assert_eq!(passed.after(&key(1), i64::MAX), 0, "nor is it forgotten which they were");
        passed.clear();
        passed.delivered(&key(1), 30);
        assert_eq!(passed.after(&key(1), i64::MAX), 30);
    }
}
