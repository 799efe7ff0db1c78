//! Signatures of webhooks as [Standard Webhooks](https://www.standardwebhooks.com/) describes them: the `http` transport signs
//! with them ([`HttpRoute::signing_keys`](crate::HttpRoute::signing_keys)), and a receiver verifies. Features `http`, `axum`.
//!
//! ```
//! use posthouse::webhook::{Key, Verifier};
//! use std::time::SystemTime;
//!
//! # fn main() -> Result<(), posthouse::Error> {
//! let body = br#"{"test": 2432232314}"#;
//! // What the sender does; the relay does it by itself.
//! let key = Key::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")?;
//! let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
//! let signature = key.sign("msg_1", now, body);
//!
//! // What the receiver does with the headers `webhook-id`, `webhook-timestamp`, `webhook-signature` and the unchanged body.
//! let verifier = Verifier::new(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])?;
//! verifier.verify("msg_1", &now.to_string(), &signature, body).expect("it is ours");
//! assert!(verifier.verify("msg_2", &now.to_string(), &signature, body).is_err());
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::alphabet;
use base64::engine::general_purpose::{GeneralPurpose, PAD, STANDARD as BASE64};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::Error;

/// Keys made by hand may have bits in their last digit that stand for nothing.
const KEY_BASE64: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, PAD.with_decode_allow_trailing_bits(true));

/// What the specification puts before the Base64 of a symmetric key.
const PREFIX: &str = "whsec_";

/// Sizes of a key that the specification asks for, in bytes.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// How old, or how far in the future, a webhook may be.
const TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// A key that signs and verifies. Never shown.
#[derive(Clone)]
pub struct Key(Vec<u8>);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key([redacted])")
    }
}

impl Key {
    /// Reads `whsec_` and the Base64 of 24 to 64 bytes.
    ///
    /// # Errors
    /// [`Error::Config`] says what is wrong with the text, without showing it.
    pub fn new(text: &str) -> Result<Self, Error> {
        let Some(encoded) = text.strip_prefix(PREFIX) else {
            return Err(Error::Config(format!("a signing key must start with {PREFIX}")));
        };
        let Ok(bytes) = KEY_BASE64.decode(encoded) else {
            return Err(Error::Config(format!("what follows {PREFIX} in a signing key must be standard Base64 with padding")));
        };
        if !KEY_BYTES.contains(&bytes.len()) {
            return Err(Error::Config(format!("a signing key must be 24 to 64 bytes, this one has {}", bytes.len())));
        }
        Ok(Self(bytes))
    }

    /// The signature `v1,…` of a body that is sent with this id at this time (seconds since 1970).
    ///
    /// The id must be the text of the header `webhook-id` and hold no full stop, which is what separates the parts.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        let mac = self.mac(id, &timestamp.to_string(), body);
        format!("v1,{}", BASE64.encode(mac.finalize().into_bytes()))
    }

    fn mac(&self, id: &str, timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.chain_update(id).chain_update(".").chain_update(timestamp).chain_update(".").chain_update(body)
    }
}

/// Why a webhook is not believed. Answer it with 401; the sender tries again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// `webhook-id` is empty or holds a full stop, or `webhook-timestamp` is no number of seconds.
    #[error("the header {0} is missing or malformed")]
    Malformed(&'static str),
    /// It was sent too long ago (or recorded and sent again), or one of the two clocks is wrong.
    #[error("the webhook is older than {0:?}, or this clock is wrong")]
    TooOld(Duration),
    /// It comes from the future: one of the two clocks is wrong.
    #[error("the webhook is from more than {0:?} in the future; one of the two clocks is wrong")]
    TooNew(Duration),
    /// No signature was made with one of the keys for this id, time and body.
    #[error("no signature of the webhook was made with a key known here")]
    NoMatch,
}

/// Verifies webhooks. Several keys are tried, so that a sender can change from one to the other.
#[derive(Debug, Clone)]
pub struct Verifier {
    keys: Vec<Key>,
    tolerance: Duration,
}

impl Verifier {
    /// Believes webhooks that one of these keys signed.
    ///
    /// # Errors
    /// [`Error::Config`] if a key is malformed or there is none.
    pub fn new<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Result<Self, Error> {
        let keys = keys.into_iter().map(|key| Key::new(key.as_ref())).collect::<Result<Vec<_>, _>>()?;
        if keys.is_empty() {
            return Err(Error::Config("a verifier of webhooks needs a signing key".into()));
        }
        Ok(Self { keys, tolerance: TOLERANCE })
    }

    /// Sets how far the time of sending may lie from now, in both directions. 5 minutes by default.
    pub fn tolerance(mut self, tolerance: Duration) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Checks the values of the headers `webhook-id`, `webhook-timestamp`, `webhook-signature` and the body as it came.
    ///
    /// # Errors
    /// Why it is not believed; nothing of it may be used then.
    #[expect(clippy::disallowed_methods, reason = "the sender's wall clock is compared with this one")]
    pub fn verify(&self, id: &str, timestamp: &str, signatures: &str, body: &[u8]) -> Result<(), Refused> {
        self.verify_at(SystemTime::now(), id, timestamp, signatures, body)
    }

    fn verify_at(&self, now: SystemTime, id: &str, timestamp: &str, signatures: &str, body: &[u8]) -> Result<(), Refused> {
        if id.is_empty() || id.contains('.') {
            return Err(Refused::Malformed("webhook-id"));
        }
        // Only digits: what is signed is this text, so it must have one form.
        let seconds = timestamp.bytes().all(|b| b.is_ascii_digit()).then(|| timestamp.parse().ok()).flatten();
        let sent = seconds.and_then(|s| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(s)));
        let sent = sent.ok_or(Refused::Malformed("webhook-timestamp"))?;
        match now.duration_since(sent) {
            Ok(age) if age > self.tolerance => return Err(Refused::TooOld(self.tolerance)),
            Err(ahead) if ahead.duration() > self.tolerance => return Err(Refused::TooNew(self.tolerance)),
            _ => {}
        }
        // Other versions (v1a is an asymmetric signature) are not for these keys.
        let signatures = signatures.split(' ').filter_map(|s| s.strip_prefix("v1,")).filter_map(|s| BASE64.decode(s).ok());
        for signature in signatures {
            for key in &self.keys {
                // Compares in constant time.
                if key.mac(id, timestamp, body).verify_slice(&signature).is_ok() {
                    return Ok(());
                }
            }
        }
        Err(Refused::NoMatch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const SENT: u64 = 1_614_265_330;
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn verify(keys: &[&str], now: u64, id: &str, timestamp: &str, signatures: &str, body: &[u8]) -> Result<(), Refused> {
        Verifier::new(keys).unwrap().verify_at(at(now), id, timestamp, signatures, body)
    }

    #[test]
    fn the_published_example_is_signed_and_verified() {
        assert_eq!(Key::new(KEY).unwrap().sign(ID, SENT, BODY), SIGNATURE);
        assert_eq!(verify(&[KEY], SENT, ID, "1614265330", SIGNATURE, BODY), Ok(()));
    }

    #[test]
    fn whatever_is_changed_breaks_it() {
        let time = SENT.to_string();
        let no = Err(Refused::NoMatch);
        assert_eq!(verify(&[KEY], SENT, "msg_other", &time, SIGNATURE, BODY), no);
        assert_eq!(verify(&[KEY], SENT, ID, "1614265331", SIGNATURE, BODY), no);
        assert_eq!(verify(&[KEY], SENT, ID, "01614265330", SIGNATURE, BODY), no);
        assert_eq!(verify(&[KEY], SENT, ID, &time, SIGNATURE, br#"{"test": 2432232315}"#), no);
        assert_eq!(verify(&[OTHER], SENT, ID, &time, SIGNATURE, BODY), no);
        for signatures in [
            "",
            "v1,",
            "v1",
            "v1,AA==",
            "v1,!",
            "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            &SIGNATURE[3..],
            &SIGNATURE[..30],
        ] {
            assert_eq!(verify(&[KEY], SENT, ID, &time, signatures, BODY), no, "{signatures}");
        }
        for id in ["", "a.b"] {
            assert_eq!(verify(&[KEY], SENT, id, &time, SIGNATURE, BODY), Err(Refused::Malformed("webhook-id")));
        }
        for time in ["", "+1614265330", "-1", "1614265330.0", " 1614265330", "99999999999999999999", "18446744073709551615"] {
            assert_eq!(verify(&[KEY], SENT, ID, time, SIGNATURE, BODY), Err(Refused::Malformed("webhook-timestamp")), "{time}");
        }
    }

    #[test]
    fn the_time_may_differ_by_the_tolerance_and_no_more() {
        let check = |now| verify(&[KEY], now, ID, "1614265330", SIGNATURE, BODY);
        assert_eq!(check(SENT + 300), Ok(()));
        assert_eq!(check(SENT + 301), Err(Refused::TooOld(TOLERANCE)));
        assert_eq!(check(SENT - 300), Ok(()));
        assert_eq!(check(SENT - 301), Err(Refused::TooNew(TOLERANCE)));
        let strict = Verifier::new([KEY]).unwrap().tolerance(Duration::from_secs(1));
        assert_eq!(
            strict.verify_at(at(SENT + 2), ID, "1614265330", SIGNATURE, BODY),
            Err(Refused::TooOld(Duration::from_secs(1)))
        );
        // With the real clock the example is long past.
        let verifier = Verifier::new([KEY]).unwrap();
        assert_eq!(verifier.verify(ID, "1614265330", SIGNATURE, BODY), Err(Refused::TooOld(TOLERANCE)));
    }

    #[test]
    fn one_good_signature_or_key_among_several_is_enough() {
        let time = SENT.to_string();
        let other = Key::new(OTHER).unwrap().sign(ID, SENT, BODY);
        assert_ne!(other, SIGNATURE);
        let both = format!("v2,x v1,bad {other} {SIGNATURE}");
        assert_eq!(verify(&[KEY], SENT, ID, &time, &both, BODY), Ok(()));
        assert_eq!(verify(&[OTHER], SENT, ID, &time, &both, BODY), Ok(()));
        assert_eq!(verify(&[OTHER, KEY], SENT, ID, &time, SIGNATURE, BODY), Ok(()));
    }

    #[test]
    fn keys_are_checked_and_never_shown() {
        let key = |n: usize| format!("whsec_{}", BASE64.encode(vec![7; n]));
        let route = |key: &str| {
            let mut route = crate::Route::to("https://example.com/");
            route.http.signing_keys = vec![key.to_owned()];
            route
        };
        for good in [&key(24), &key(32), &key(64), &format!("whsec_{}==", "B".repeat(86))] {
            Key::new(good).unwrap();
            assert_eq!(route(good).problems(), []);
        }
        for bad in [&key(23), &key(65), "whsec_", "", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_s3cret!", "whsec_s3cr"] {
            let error = Key::new(bad).unwrap_err().to_string();
            assert_eq!(route(bad).problems().len(), 1, "{bad}: what is refused here is refused when a relay starts");
            assert!(!error.contains("s3cr") && !error.contains("BwcH"), "{error}");
        }
        assert_eq!(format!("{:?}", Key::new(KEY).unwrap()), "Key([redacted])");
        assert!(!format!("{:?}", Verifier::new([KEY]).unwrap()).contains("MfKQ"));
        assert!(Verifier::new::<&str>([]).is_err());
    }
}
