//! The hash that identifies sessions and divides them into buckets. It never changes.
//!
//! ```text
//! identity  what identifies a session apart from its start: its key, or the user where sessions end with a pause; the
//!           texts of the values, joined by U+001F
//! instance  the identity, the partition columns' values and the start in microseconds, joined likewise
//! h, s      XXH3 with 64 bits and seed 0 (Collet) of the UTF-8 bytes of the identity and of the instance
//!
//! session_id (63 bits)   the 16 high bits of h, then the 47 high bits of s
//! bucket                 the 16 high bits of h, times the number of buckets, divided by 2^16 and rounded down
//! ```
//!
//! So the sessions of one user lie in one bucket, the bucket follows from the session's id, and ids ascend with
//! buckets. Two of n sessions of a dataset have the same id with a probability of about n² / 2^64: 1 in 18 for 10^9
//! sessions.

use xxhash_rust::xxh3::xxh3_64;

/// The character between the parts of an identity.
pub const IDENTITY_SEPARATOR: char = '\u{1f}';
/// A dataset has at most so many buckets.
pub const MOST_BUCKETS: u32 = 1 << IDENTITY_BITS;

/// High bits of a session's id that come from its identity alone.
const IDENTITY_BITS: u32 = 16;
/// The other bits.
const INSTANCE_BITS: u32 = 63 - IDENTITY_BITS;
/// Samples that a bucket of a dataset has about, if nobody says how many buckets there are.
const SAMPLES_OF_A_BUCKET: u64 = 50_000_000;
/// The default number of buckets is at most this.
const MOST_DEFAULT_BUCKETS: u64 = 256;

/// The id of the session with this identity and instance: never negative.
pub fn session_id(identity: &str, instance: &str) -> i64 {
    let identity = xxh3_64(identity.as_bytes()) >> (64 - IDENTITY_BITS);
    let instance = xxh3_64(instance.as_bytes()) >> (64 - INSTANCE_BITS);
    // 63 bits fit.
    (identity << INSTANCE_BITS | instance) as i64
}

/// The bucket of the session with this id. A dataset of one bucket may have any ids.
pub fn bucket_of_session(session_id: i64, buckets: u32) -> u32 {
    if buckets <= 1 { 0 } else { divide(session_id as u64 >> INSTANCE_BITS, buckets) }
}

/// The bucket of all sessions with this identity.
pub fn bucket_of_identity(identity: &str, buckets: u32) -> u32 {
    divide(xxh3_64(identity.as_bytes()) >> (64 - IDENTITY_BITS), buckets)
}

fn divide(identity: u64, buckets: u32) -> u32 {
    // Less than `buckets`, because the identity has 16 bits; but not for a damaged, negative id.
    ((identity * u64::from(buckets)) >> IDENTITY_BITS).min(u64::from(buckets.saturating_sub(1))) as u32
}

/// The number of buckets of a dataset of about so many samples, where nobody says it: 1 for up to 50 million, and then
/// as many as leave that many samples in each, rounded up to a power of two, at most 256.
pub fn default_buckets(samples: u64) -> u32 {
    samples.div_ceil(SAMPLES_OF_A_BUCKET).max(1).next_power_of_two().min(MOST_DEFAULT_BUCKETS) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_and_buckets_never_change() {
        assert_eq!(session_id("u1", "u1\u{1f}0"), GOLDEN_ID);
        let of = |identity: &str| {
            [1, 2, 16, 1000, MOST_BUCKETS].map(|buckets| bucket_of_identity(identity, buckets))
        };
        assert_eq!([of("u1"), of("17"), of("")], GOLDEN_BUCKETS);
    }

    // By the C library's XXH3, through Python's `xxhash`.
    const GOLDEN_ID: i64 = 5683561926764605572;
    const GOLDEN_BUCKETS: [[u32; 5]; 3] =
        [[0, 1, 9, 616, 40384], [0, 1, 10, 633, 41547], [0, 0, 2, 175, 11526]];

    proptest! {
        #[test]
        fn the_id_of_a_session_tells_its_bucket(identity: String, instance: String, buckets in 1..=MOST_BUCKETS) {
            let id = session_id(&identity, &instance);
            prop_assert!(id >= 0);
            prop_assert_eq!(bucket_of_session(id, buckets), bucket_of_identity(&identity, buckets));
        }

        #[test]
        fn buckets_ascend_with_ids(a in 0..=i64::MAX, b in 0..=i64::MAX, buckets in 1..=MOST_BUCKETS) {
            let (low, high) = (a.min(b), a.max(b));
            prop_assert!(bucket_of_session(low, buckets) <= bucket_of_session(high, buckets));
            prop_assert!(bucket_of_session(high, buckets) < buckets);
        }
    }

    #[test]
    fn small_datasets_have_one_bucket() {
        for (samples, buckets) in
            [(0, 1), (50_000_000, 1), (50_000_001, 2), (300_000_000, 8), (u64::MAX, 256)]
        {
            assert_eq!(default_buckets(samples), buckets, "{samples}");
        }
    }
}
