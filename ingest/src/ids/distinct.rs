//! Estimates of the number of distinct ids that were hashed, and of the collisions among them.

use std::sync::atomic::{AtomicU8, Ordering};

use serde::Serialize;

/// Bits of a hash that choose a register: 2^14 registers have a standard error of 0.8 %.
const REGISTER_BITS: u32 = 14;

/// Estimates the number of distinct hashes that threads add, in 16 KiB: HyperLogLog (Flajolet, Fusy, Gandouet and
/// Meunier 2007) over 63-bit hashes, which are uniform already.
#[derive(Debug)]
pub(crate) struct DistinctIds {
    /// For each register, the largest number of leading zeros after the register's bits among its hashes, plus one.
    registers: Vec<AtomicU8>,
}

/// The hashed ids of a feature in a build's summary.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HashedIds {
    /// An estimate of the distinct ids, with a standard error of 0.8 %.
    pub distinct_ids: u64,
    /// The pairs of distinct ids that are expected to have the same hash.
    pub expected_collisions: f64,
}

impl DistinctIds {
    pub(crate) fn new() -> Self {
        Self { registers: (0..1 << REGISTER_BITS).map(|_| AtomicU8::new(0)).collect() }
    }

    /// Adds a 63-bit hash.
    #[inline]
    pub(crate) fn add(&self, hash: i64) {
        let hash = (hash as u64) << 1;
        let register = &self.registers[(hash >> (u64::BITS - REGISTER_BITS)) as usize];
        let rest = hash << REGISTER_BITS;
        let zeros = rest.leading_zeros().min(63 - REGISTER_BITS) as u8 + 1;
        // Most ids are known, and then nothing is written.
        if register.load(Ordering::Relaxed) < zeros {
            register.fetch_max(zeros, Ordering::Relaxed);
        }
    }

    /// The estimate, and the number of collisions expected among so many ids.
    pub(crate) fn summary(&self) -> HashedIds {
        let distinct = self.estimate().round();
        // n (n - 1) / 2 pairs, each of which collides with probability 2^-63.
        let expected_collisions = distinct * (distinct - 1.0).max(0.0) / 2_f64.powi(64);
        HashedIds { distinct_ids: distinct as u64, expected_collisions }
    }

    fn estimate(&self) -> f64 {
        let registers = self.registers.len() as f64;
        let (mut sum, mut empty) = (0.0, 0);
        for register in &self.registers {
            let most = register.load(Ordering::Relaxed);
            sum += 2_f64.powi(-i32::from(most));
            empty += usize::from(most == 0);
        }
        let raw = 0.7213 / (1.0 + 1.079 / registers) * registers * registers / sum;
        // Few ids are counted by the registers that none of them has reached (linear counting).
        if raw <= 2.5 * registers && empty > 0 { registers * (registers / empty as f64).ln() } else { raw }
    }
}

#[cfg(test)]
mod tests {
    use onefold_datasets::hash_id;

    use super::*;

    #[test]
    fn distinct_ids_are_estimated_within_five_standard_errors() {
        for distinct in [0_u64, 1, 2, 100, 30_000, 1_000_000] {
            let ids = DistinctIds::new();
            for i in 0..distinct {
                (0..1 + i % 3).for_each(|_| ids.add(hash_id(format!("item {i}").as_bytes())));
            }
            let summary = ids.summary();
            let error = summary.distinct_ids.abs_diff(distinct) as f64;
            assert!(error <= 0.04 * distinct as f64, "{distinct}: {summary:?}");
            let exact = distinct as f64 * distinct.saturating_sub(1) as f64 / 2_f64.powi(64);
            assert!((summary.expected_collisions - exact).abs() <= 0.1 * exact, "{distinct}: {summary:?}");
        }
    }
}
