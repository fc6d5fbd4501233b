//! SigridHash, the id hash of Meta's preprocessing, as TorchArrow publishes it, and a fast exact modulus.

const K: u64 = 0x9ddf_ea08_eb38_2d69;

/// The number of ids per block in [`SigridHash::hash_all`]: 4 KiB of ids.
const BLOCK: usize = 512;

/// Computes SigridHash without the final modulus: Thomas Wang's 64-bit mix of the id, combined with the salt as in
/// CityHash's `Hash128to64`.
#[inline]
pub fn mix(id: i64, salt: u64) -> u64 {
    combine(wang(id), salt)
}

#[inline]
fn wang(id: i64) -> u64 {
    let mut k = id as u64;
    k = (!k).wrapping_add(k << 21);
    k ^= k >> 24;
    k = k.wrapping_add(k << 3).wrapping_add(k << 8);
    k ^= k >> 14;
    k = k.wrapping_add(k << 2).wrapping_add(k << 4);
    k ^= k >> 28;
    k.wrapping_add(k << 31)
}

#[inline]
fn combine(k: u64, salt: u64) -> u64 {
    let mut a = (k ^ salt).wrapping_mul(K);
    a ^= a >> 47;
    let mut b = (salt ^ a).wrapping_mul(K);
    b ^= b >> 47;
    b.wrapping_mul(K)
}

/// Maps an id to `0..max` with [`mix`] and a floored modulus, as TorchArrow's `sigrid_hash` does. For many ids with
/// one `max`, [`SigridHash`] is faster.
///
/// # Panics
///
/// If `max` is not positive.
#[inline]
pub fn sigrid_hash(id: i64, salt: u64, max: i64) -> i64 {
    assert!(max > 0, "sigrid_hash: max is {max}");
    (mix(id, salt) as i64).rem_euclid(max)
}

/// [`sigrid_hash`] with one salt and one maximum, without a division per id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SigridHash {
    salt: u64,
    modulus: Modulus,
}

impl SigridHash {
    /// Creates the hash function onto `0..max`.
    ///
    /// # Panics
    ///
    /// If `max` is not positive.
    pub fn new(salt: u64, max: i64) -> Self {
        Self { salt, modulus: Modulus::new(max) }
    }

    /// Returns the same hash function with another salt.
    #[must_use]
    pub fn with_salt(self, salt: u64) -> Self {
        Self { salt, ..self }
    }

    /// Returns the salt.
    pub fn salt(&self) -> u64 {
        self.salt
    }

    /// Returns `sigrid_hash(id, salt, max)`.
    #[inline]
    pub fn hash(&self, id: i64) -> i64 {
        self.modulus.of(mix(id, self.salt) as i64)
    }

    /// Replaces every id by its hash.
    ///
    /// The hash is split into three short loops, because its steps depend on each other: a processor overlaps more
    /// ids if each iteration has few instructions. The compiler also vectorizes the first loop.
    pub fn hash_all(&self, ids: &mut [i64]) {
        for block in ids.chunks_mut(BLOCK) {
            block.iter_mut().for_each(|id| *id = wang(*id) as i64);
            block.iter_mut().for_each(|id| *id = combine(*id as u64, self.salt) as i64);
            self.modulus.of_all(block);
        }
    }
}

/// The floored modulus (`i64::rem_euclid`) by a fixed divisor, computed by a multiplication with the reciprocal
/// instead of a division.
///
/// The method is from Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994),
/// theorem 4.2 with N = 63: with `l = ceil(log2 divisor)` and `m = floor(2^(63+l) / divisor) + 1`, the quotient of
/// any `x < 2^63` is `floor(m x / 2^(63+l))`. `m` fits into 64 bits, since numerators have only 63.
/// A negative value `-(x + 1)` has the floored modulus `divisor - 1 - x mod divisor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modulus {
    divisor: i64,
    multiplier: u64,
    /// `l - 1`: the upper half of a 128-bit product is already shifted by 64.
    shift: u32,
}

impl Modulus {
    /// Creates the modulus by `divisor`.
    ///
    /// # Panics
    ///
    /// If `divisor` is not positive.
    pub fn new(divisor: i64) -> Self {
        assert!(divisor > 0, "Modulus: the divisor is {divisor}");
        // `of` handles divisor 1 separately, because its shift would be -1. Any valid shift can be stored for it
        // here.
        let log = (64 - (divisor - 1).leading_zeros()).max(1);
        let multiplier = ((1_u128 << (63 + log)) / divisor as u128 + 1) as u64;
        Self { divisor, multiplier, shift: log - 1 }
    }

    /// Returns `value.rem_euclid(divisor)`.
    #[inline]
    pub fn of(&self, value: i64) -> i64 {
        if self.divisor == 1 {
            return 0;
        }
        let sign = value >> 63;
        let x = (value ^ sign) as u64;
        let quotient = ((u128::from(self.multiplier) * u128::from(x)) >> 64) as u64 >> self.shift;
        let remainder = x.wrapping_sub(quotient.wrapping_mul(self.divisor as u64)) as i64;
        (remainder ^ sign) + (self.divisor & sign)
    }

    /// Replaces every value by its modulus.
    pub fn of_all(&self, values: &mut [i64]) {
        for value in values {
            *value = self.of(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn agrees_with_torcharrow() {
        let expected = [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2];
        let found: Vec<i64> = (1..=16).map(|id| sigrid_hash(id, 0, 100)).collect();
        assert_eq!(found, expected);
        let mut ids: Vec<i64> = (1..=16).collect();
        SigridHash::new(0, 100).hash_all(&mut ids);
        assert_eq!(ids, expected);
    }

    #[test]
    fn stays_in_range_for_every_id() {
        for id in [i64::MIN, -1, 0, i64::MAX] {
            assert!((0..7).contains(&sigrid_hash(id, 3, 7)));
            assert_eq!(sigrid_hash(id, 3, 1), 0);
        }
    }

    /// Tests divisors close to powers of two, where a reciprocal is least exact, and values close to their multiples.
    #[test]
    fn modulus_is_exact_at_the_edges() {
        let near = |center: i64| (-2..=2).filter_map(move |step: i64| center.checked_add(step));
        let divisors = (0..63).flat_map(|log| near(1 << log)).chain(near(i64::MAX)).filter(|d| *d > 0);
        for divisor in divisors {
            let modulus = Modulus::new(divisor);
            let most = i64::MAX / divisor * divisor;
            let values = [0, i64::MIN, i64::MAX, divisor, -divisor, most, -most, most / 2, -most / 2];
            for value in values.into_iter().flat_map(near) {
                assert_eq!(modulus.of(value), value.rem_euclid(divisor), "{value} mod {divisor}");
            }
        }
    }

    /// Generates numbers of every magnitude, not only of 63 bits.
    fn any_magnitude() -> impl Strategy<Value = i64> {
        (any::<i64>(), 0_u32..64).prop_map(|(value, shift)| value >> shift)
    }

    proptest! {
        #![proptest_config(onefold_property::cases(20_000))]
        #[test]
        fn modulus_equals_rem_euclid(
            values in prop::collection::vec(any_magnitude(), 8),
            divisor in any_magnitude(),
        ) {
            let divisor = (divisor & i64::MAX).max(1);
            let expected: Vec<i64> = values.iter().map(|value| value.rem_euclid(divisor)).collect();
            let mut found = values;
            Modulus::new(divisor).of_all(&mut found);
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn the_fast_hash_equals_the_plain_one(
            id in any_magnitude(),
            salt in any::<u64>(),
            max in any_magnitude(),
        ) {
            let max = (max & i64::MAX).max(1);
            let hash = SigridHash::new(salt, max);
            prop_assert_eq!(hash.hash(id), sigrid_hash(id, salt, max));
            let mut ids: Vec<i64> = (0..BLOCK as i64 + 3).map(|step| id.wrapping_add(step)).collect();
            let expected: Vec<i64> = ids.iter().map(|id| sigrid_hash(*id, salt, max)).collect();
            hash.hash_all(&mut ids);
            prop_assert_eq!(ids, expected);
            prop_assert_eq!(SigridHash::new(0, max).with_salt(salt).hash(id), sigrid_hash(id, salt, max));
        }
    }
}
