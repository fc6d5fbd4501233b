//! SigridHash, the id hash of Meta's preprocessing, as TorchArrow publishes it.

const K: u64 = 0x9ddf_ea08_eb38_2d69;

/// Maps an id to `0..max` (0 if `max` is 1): Thomas Wang's 64-bit mix of the id, combined with the salt as in
/// CityHash's `Hash128to64`, and a floored modulus. Agrees with TorchArrow's `sigrid_hash`.
///
/// # Panics
///
/// If `max` is not positive.
pub fn sigrid_hash(id: i64, salt: u64, max: i64) -> i64 {
    assert!(max > 0, "sigrid_hash: max is {max}");
    let mut k = id as u64;
    k = (!k).wrapping_add(k << 21);
    k ^= k >> 24;
    k = k.wrapping_add(k << 3).wrapping_add(k << 8);
    k ^= k >> 14;
    k = k.wrapping_add(k << 2).wrapping_add(k << 4);
    k ^= k >> 28;
    k = k.wrapping_add(k << 31);
    let mut a = (k ^ salt).wrapping_mul(K);
    a ^= a >> 47;
    let mut b = (salt ^ a).wrapping_mul(K);
    b ^= b >> 47;
    (b.wrapping_mul(K) as i64).rem_euclid(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_torcharrow() {
        let expected = [60, 54, 54, 9, 4, 91, 11, 67, 79, 2, 25, 92, 98, 83, 66, 2];
        let found: Vec<i64> = (1..=16).map(|id| sigrid_hash(id, 0, 100)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn stays_in_range_for_every_id() {
        for id in [i64::MIN, -1, 0, i64::MAX] {
            assert!((0..7).contains(&sigrid_hash(id, 3, 7)));
            assert_eq!(sigrid_hash(id, 3, 1), 0);
        }
    }
}
