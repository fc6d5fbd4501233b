//! Estimates of the number of distinct ids.

use onefold_datasets::digest::scramble;
use serde::{Deserialize, Serialize};

/// The number of hash bits that choose a register: 2^12 registers have a standard error of 1.6 %.
const REGISTER_BITS: u32 = 12;

/// Estimates the number of distinct ids, in 4 KiB: HyperLogLog (Flajolet, Fusy, Gandouet and Meunier 2007).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct DistinctIds {
    /// For each register, the maximum over its hashes of the number of trailing zeros plus one.
    registers: Box<[u8; 1 << REGISTER_BITS]>,
}

/// Formats the registers as text, one character per register; `0` is the character of the value 0.
impl From<DistinctIds> for String {
    fn from(ids: DistinctIds) -> Self {
        ids.registers.iter().map(|register| char::from(b'0' + register)).collect()
    }
}

impl TryFrom<String> for DistinctIds {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let registers = text.bytes().map(|byte| byte.checked_sub(b'0')).collect::<Option<Box<[u8]>>>();
        let registers = registers.and_then(|registers| registers.try_into().ok());
        registers.map(|registers| Self { registers }).ok_or("registers of distinct ids are malformed")
    }
}

impl DistinctIds {
    pub(super) fn new() -> Self {
        Self { registers: Box::new([0; 1 << REGISTER_BITS]) }
    }

    #[inline]
    pub(super) fn add(&mut self, id: i64) {
        let hash = scramble(id as u64);
        let register = &mut self.registers[(hash >> (u64::BITS - REGISTER_BITS)) as usize];
        // The first bits select the register, so they do not count as zeros.
        let rest = hash | 1 << (u64::BITS - REGISTER_BITS);
        let zeros = rest.trailing_zeros() as u8 + 1;
        // Few ids raise a register: the branch is predictable, and the next load need not wait for a store.
        if zeros > *register {
            *register = zeros;
        }
    }

    /// Merges another estimate into this one.
    pub(super) fn merge(&mut self, other: &Self) {
        for (register, other) in self.registers.iter_mut().zip(other.registers.iter()) {
            *register = (*register).max(*other);
        }
    }

    /// Returns the estimated number of distinct ids.
    pub(super) fn estimate(&self) -> u64 {
        let registers = self.registers.len() as f64;
        let (mut sum, mut empty) = (0.0, 0);
        for register in self.registers.iter() {
            sum += 2_f64.powi(-i32::from(*register));
            empty += usize::from(*register == 0);
        }
        let raw = 0.7213 / (1.0 + 1.079 / registers) * registers * registers / sum;
        // A small number of ids is estimated from the number of registers that are still 0 (linear counting).
        let few = raw <= 2.5 * registers && empty > 0;
        (if few { registers * (registers / empty as f64).ln() } else { raw }).round() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distinct_ids_are_estimated_within_five_standard_errors() {
        for distinct in [0_u64, 1, 2, 100, 30_000, 1_000_000] {
            let mut halves = [DistinctIds::new(), DistinctIds::new()];
            for i in 0..distinct {
                // Consecutive ids, some in both halves and some added twice.
                halves[i as usize % 2].add(i as i64 - 500);
                halves[i as usize % 3 / 2].add(i as i64 - 500);
            }
            let [mut all, other] = halves;
            all.merge(&other);
            let sent: DistinctIds = serde_json::from_str(&serde_json::to_string(&all).unwrap()).unwrap();
            assert_eq!(sent.registers, all.registers);
            let estimate = all.estimate();
            assert!(estimate.abs_diff(distinct) as f64 <= 0.08 * distinct as f64, "{distinct}: {estimate}");
        }
    }
}
