//! A hash for states, which are hundreds of single bytes: others spend most of the time of a search on these.

use std::hash::{Hash, Hasher};

const FACTORS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f];

/// Gathers small numbers into words, and folds these into 128 bits.
#[derive(Debug, Default)]
struct Fold {
    lanes: [u64; 2],
    word: u64,
    bits: u32,
}

impl Fold {
    fn flush(&mut self) {
        let word = std::mem::take(&mut self.word);
        self.bits = 0;
        for (lane, factor) in self.lanes.iter_mut().zip(FACTORS) {
            let product = u128::from(*lane ^ word ^ factor) * u128::from(factor);
            *lane = (product as u64 ^ (product >> 64) as u64).rotate_left(29);
        }
    }
}

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.lanes[0]
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, byte: u8) {
        self.word = self.word << 8 | u64::from(byte);
        self.bits += 8;
        if self.bits == 64 {
            self.flush();
        }
    }

    /// Lengths, all below 256.
    fn write_usize(&mut self, n: usize) {
        self.write_u8(n as u8);
    }

    /// Numbers of variants, all below 256.
    fn write_isize(&mut self, n: isize) {
        self.write_u8(n as u8);
    }
}

/// Two states with the same one are the same, but for one chance in 2^128 for each pair.
pub(crate) fn digest(of: &impl Hash) -> u128 {
    let mut fold = Fold::default();
    of.hash(&mut fold);
    fold.flush();
    fold.flush();
    u128::from(fold.lanes[0]) << 64 | u128::from(fold.lanes[1])
}

/// Takes a digest as it is.
#[derive(Debug, Default)]
pub(crate) struct Digested(u64);

impl Hasher for Digested {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u128(&mut self, n: u128) {
        self.0 = n as u64;
    }
}
