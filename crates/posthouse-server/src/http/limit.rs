//! How often somebody may try a wrong token.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Wrong tokens that an address may send at once.
const BURST: f64 = 10.0;

/// Time after which it may send one more.
const REFILL: Duration = Duration::from_secs(6);

/// Addresses that are remembered.
const MOST: usize = 10_000;

/// Counts wrong tokens by address.
#[derive(Debug, Default)]
pub(super) struct Limiter(Mutex<HashMap<IpAddr, (f64, Instant)>>);

impl Limiter {
    /// Whether this address must wait before it may try (again).
    pub(super) fn limited(&self, peer: IpAddr) -> bool {
        self.left(peer, 0.0) < 1.0
    }

    /// Notes a wrong token; true when this address has sent too many.
    pub(super) fn failed(&self, peer: IpAddr) -> bool {
        self.left(peer, 1.0) < 1.0
    }

    /// How many it has left before this, which costs as much.
    fn left(&self, peer: IpAddr, costs: f64) -> f64 {
        let now = Instant::now();
        let full = |(left, at): &(f64, Instant)| (left + now.duration_since(*at).as_secs_f64() / REFILL.as_secs_f64()).min(BURST);
        // Nothing panics while it is held.
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MOST && !all.contains_key(&group(peer)) {
            all.retain(|_, kept| full(kept) < BURST);
            if all.len() >= MOST {
                // So many strangers at once are one attack: nobody new is let in until it is over.
                return 0.0;
            }
        }
        let left = all.get(&group(peer)).map_or(BURST, full);
        if costs > 0.0 {
            all.insert(group(peer), ((left - costs).max(0.0), now));
        }
        left
    }
}

/// Who has an IPv6 address has a network of them.
fn group(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(six) => IpAddr::V6((u128::from(six) >> 64 << 64).into()),
        four => four,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_tries_too_often_has_to_wait_and_others_have_not() {
        let limiter = Limiter::default();
        let (one, other): (IpAddr, IpAddr) = ("2001:db8::1".parse().unwrap(), "2001:db8:0:1::1".parse().unwrap());
        for _ in 0..10 {
            assert!(!limiter.limited(one) && !limiter.failed(one));
        }
        assert!(limiter.limited(one) && limiter.failed(one));
        assert!(limiter.limited("2001:db8::2".parse().unwrap()), "the same network");
        assert!(!limiter.limited(other));
    }
}
