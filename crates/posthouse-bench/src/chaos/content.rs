//! What is booked and told: made anew from its facts by whoever wants to compare.

use serde::{Deserialize, Serialize};

/// The type of all messages.
pub(super) const TYPE: &str = "account.booked.v1";

/// A business row of the sender, and what the message about it says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Booking {
    /// Also the message's id.
    pub(super) id: String,
    pub(super) account: String,
    /// Its number among the keyed bookings of the account, from 1. 0: the message has no key.
    pub(super) seq: i64,
    pub(super) amount: i64,
}

impl Booking {
    /// The message's key.
    pub(super) fn key(&self) -> Option<&str> {
        (self.seq > 0).then_some(self.account.as_str())
    }

    /// The facts in a line, then bytes of all values that follow from the id.
    pub(super) fn payload(&self) -> Vec<u8> {
        let mut payload = serde_json::to_vec(self).unwrap_or_default();
        payload.push(b'\n');
        // FNV-1a
        let seed = self.id.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let mut random = fastrand::Rng::with_seed(seed);
        payload.extend((0..random.usize(0..800)).map(|_| 0u8));
        let start = payload.iter().position(|b| *b == b'\n').map_or(0, |at| at + 1);
        random.fill(&mut payload[start..]);
        payload
    }

    /// The facts of a payload.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let line = payload.split(|b| *b == b'\n').next()?;
        serde_json::from_slice(line).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_tells_its_booking() {
        let booking = Booking { id: "a-1".into(), account: "账户 1".into(), seq: 3, amount: -5 };
        assert_eq!(Booking::read(&booking.payload()), Some(booking.clone()));
        let other = Booking { id: "a-2".into(), ..booking.clone() };
        assert_ne!(booking.payload(), other.payload());
        assert_eq!(booking.payload(), booking.clone().payload());
    }
}
