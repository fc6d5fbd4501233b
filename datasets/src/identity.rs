//! The hashes that identify sessions and divide them into buckets. Their definition never changes.
//!
//! ```text
//! identity  identifies a session apart from its start: the session's key, or the user if sessions end with a pause;
//!           the texts of the values, joined by U+001F
//! instance  the identity, the values of the partition columns and the start in microseconds, joined by U+001F
//! h, s      XXH3 (Collet, 64 bits, seed 0) of the UTF-8 bytes of the identity (h) and of the instance (s)
//!
//! session_id (63 bits)   the 16 high bits of h, followed by the 47 high bits of s
//! bucket                 floor((the 16 high bits of h) * (number of buckets) / 2^16)
//! range of a bucket      floor(bucket / (number of buckets in a range))
//! ```
//!
//! Therefore all sessions of one user are in one bucket, the session id determines the bucket, and buckets
//! ascend with ids. A file holds, in order, buckets of one range. Readers divide a dataset by buckets and
//! writers divide it by ranges, so a small dataset has many buckets but few files. The probability that any
//! two of n sessions have the same id is about n² / 2^64: 1 in 18 for 10^9 sessions.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The separator between the parts of an identity.
pub const IDENTITY_SEPARATOR: char = '\u{1f}';
/// The largest number of buckets of a dataset.
pub const MOST_BUCKETS: u32 = 1 << IDENTITY_BITS;

/// The number of high bits of a session id that depend only on the identity.
const IDENTITY_BITS: u32 = 16;
/// The number of low bits of a session id, which depend on the instance.
const INSTANCE_BITS: u32 = 63 - IDENTITY_BITS;
/// The approximate number of samples in a range of buckets if the number of ranges is not given.
const SAMPLES_OF_A_RANGE: u64 = 50_000_000;
/// The largest default number of ranges.
const MOST_DEFAULT_RANGES: u64 = 256;
/// The smallest default number of buckets. The number of buckets limits the number of ranks that can read a
/// dataset.
const LEAST_BUCKETS: u32 = 64;

/// Returns the id of the session with this identity and instance. It is never negative.
pub fn session_id(identity: &str, instance: &str) -> i64 {
    let identity = identity_bits(identity);
    let instance = xxh3_64(instance.as_bytes()) >> (64 - INSTANCE_BITS);
    // The value has 63 bits.
    (identity << INSTANCE_BITS | instance) as i64
}

/// Returns the bucket of a session. With one bucket, any id is valid.
pub fn bucket_of_session(session_id: i64, buckets: u32) -> u32 {
    if buckets <= 1 { 0 } else { divide(identity_bits_of_session(session_id), buckets) }
}

/// Returns the bucket of all sessions with this identity.
pub fn bucket_of_identity(identity: &str, buckets: u32) -> u32 {
    divide(identity_bits(identity), buckets)
}

/// The high bits that the ids of all sessions with this identity have.
pub(crate) fn identity_bits(identity: &str) -> u64 {
    xxh3_64(identity.as_bytes()) >> (64 - IDENTITY_BITS)
}

/// The high bits of a session's id that come from its identity.
pub(crate) fn identity_bits_of_session(session_id: i64) -> u64 {
    session_id as u64 >> INSTANCE_BITS
}

fn divide(identity: u64, buckets: u32) -> u32 {
    // The result is less than `buckets` because the identity has 16 bits. Only a damaged, negative id needs
    // the limit.
    ((identity * u64::from(buckets)) >> IDENTITY_BITS).min(u64::from(buckets.saturating_sub(1))) as u32
}

/// The division of a dataset's sessions into buckets, and of the buckets into ranges of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buckets {
    /// The number of buckets: a multiple of `in_range`.
    pub number: u32,
    /// The number of consecutive buckets in a range. The samples of one range and one partition share files.
    pub in_range: u32,
}

impl Buckets {
    /// Creates a division into `number` buckets, each with its own files.
    pub const fn with_own_files(number: u32) -> Self {
        Self { number, in_range: 1 }
    }

    /// Creates a division into `ranges` ranges (at least 1), with at least 64 buckets in total.
    pub fn of_ranges(ranges: u32) -> Self {
        let ranges = ranges.clamp(1, MOST_BUCKETS);
        let in_range = LEAST_BUCKETS.div_ceil(ranges);
        Self { number: ranges * in_range, in_range }
    }

    /// Returns the default division of a dataset of about `samples` samples: one range of 64 buckets for up
    /// to 50 million samples. For more samples, the number of ranges is the smallest power of two that leaves
    /// at most 50 million samples in each, but at most 256.
    pub fn of_samples(samples: u64) -> Self {
        let ranges = samples.div_ceil(SAMPLES_OF_A_RANGE).max(1).next_power_of_two().min(MOST_DEFAULT_RANGES);
        Self::of_ranges(ranges as u32)
    }

    /// Returns whether the numbers are a possible division.
    pub fn is_valid(self) -> bool {
        (1..=MOST_BUCKETS).contains(&self.number)
            && self.in_range > 0
            && self.number.is_multiple_of(self.in_range)
    }

    /// Returns the number of ranges.
    pub fn ranges(self) -> u32 {
        self.number / self.in_range.max(1)
    }

    /// Returns the bucket of the session with this id.
    pub fn bucket_of(self, session_id: i64) -> u32 {
        bucket_of_session(session_id, self.number)
    }

    /// Returns the range of a bucket.
    pub fn range_of(self, bucket: u32) -> u32 {
        bucket / self.in_range.max(1)
    }

    /// Returns the buckets of a range.
    pub fn of_range(self, range: u32) -> Range<u32> {
        let first = range.saturating_mul(self.in_range);
        first..first.saturating_add(self.in_range)
    }
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

    // Computed with XXH3's C library through Python's `xxhash`.
    const GOLDEN_ID: i64 = 5683561926764605572;
    const GOLDEN_BUCKETS: [[u32; 5]; 3] =
        [[0, 1, 9, 616, 40384], [0, 1, 10, 633, 41547], [0, 0, 2, 175, 11526]];

    proptest! {
        #[test]
        fn the_id_of_a_session_tells_its_bucket(identity: String, instance: String, buckets in 1..=MOST_BUCKETS) {
            let id = session_id(&identity, &instance);
            prop_assert!(id >= 0);
            prop_assert_eq!(identity_bits_of_session(id), identity_bits(&identity));
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
    fn every_dataset_has_64_buckets_and_large_ones_have_more_ranges() {
        for (samples, ranges, number) in [
            (0, 1, 64),
            (50_000_000, 1, 64),
            (50_000_001, 2, 64),
            (300_000_000, 8, 64),
            (3_300_000_000, 128, 128),
            (u64::MAX, 256, 256),
        ] {
            let buckets = Buckets::of_samples(samples);
            assert_eq!((buckets.ranges(), buckets.number), (ranges, number), "{samples}");
            assert!(buckets.is_valid());
        }
        assert!(!Buckets { number: 64, in_range: 3 }.is_valid());
        assert!(!Buckets { number: 0, in_range: 1 }.is_valid());
    }

    proptest! {
        /// Dividing a log into n parts by the hash of the session gives the same parts as n ranges.
        #[test]
        fn ranges_are_buckets_of_a_coarser_division(session_id in 0..=i64::MAX, ranges in 1_u32..300) {
            let buckets = Buckets::of_ranges(ranges);
            prop_assert!(buckets.is_valid() && buckets.number >= 64);
            prop_assert_eq!(buckets.ranges(), ranges);
            let bucket = buckets.bucket_of(session_id);
            prop_assert_eq!(buckets.range_of(bucket), divide(session_id as u64 >> INSTANCE_BITS, ranges));
            prop_assert!(buckets.of_range(buckets.range_of(bucket)).contains(&bucket));
        }
    }
}
