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
//! range                  of a bucket: its number divided by the length of ranges, rounded down
//! ```
//!
//! So the sessions of one user lie in one bucket, the bucket follows from the session's id, and ids ascend with
//! buckets. A file holds buckets of one range, in their order: readers divide a dataset by its buckets, writers by its
//! ranges, so that a small dataset has many buckets and few files. Two of n sessions of a dataset have the same id with
//! a probability of about n² / 2^64: 1 in 18 for 10^9 sessions.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// The character between the parts of an identity.
pub const IDENTITY_SEPARATOR: char = '\u{1f}';
/// A dataset has at most so many buckets.
pub const MOST_BUCKETS: u32 = 1 << IDENTITY_BITS;

/// High bits of a session's id that come from its identity alone.
const IDENTITY_BITS: u32 = 16;
/// The other bits.
const INSTANCE_BITS: u32 = 63 - IDENTITY_BITS;
/// The approximate number of samples in a range of buckets, if the number of ranges is not given.
const SAMPLES_OF_A_RANGE: u64 = 50_000_000;
/// The default number of ranges is at most this.
const MOST_DEFAULT_RANGES: u64 = 256;
/// The least number of buckets by default. A dataset can be read by as many ranks as it has buckets.
const LEAST_BUCKETS: u32 = 64;

/// The id of the session with this identity and instance: never negative.
pub fn session_id(identity: &str, instance: &str) -> i64 {
    let identity = identity_bits(identity);
    let instance = xxh3_64(instance.as_bytes()) >> (64 - INSTANCE_BITS);
    // 63 bits fit.
    (identity << INSTANCE_BITS | instance) as i64
}

/// The bucket of the session with this id. A dataset of one bucket may have any ids.
pub fn bucket_of_session(session_id: i64, buckets: u32) -> u32 {
    if buckets <= 1 { 0 } else { divide(identity_bits_of_session(session_id), buckets) }
}

/// The bucket of all sessions with this identity.
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
    // Less than `buckets`, because the identity has 16 bits; but not for a damaged, negative id.
    ((identity * u64::from(buckets)) >> IDENTITY_BITS).min(u64::from(buckets.saturating_sub(1))) as u32
}

/// The division of a dataset's sessions into buckets, and of these into ranges of equally many consecutive ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buckets {
    /// The number of buckets: a multiple of the length of ranges.
    pub number: u32,
    /// The number of consecutive buckets in a range. The samples of a range and a partition share files.
    pub in_range: u32,
}

impl Buckets {
    /// Divides into `number` buckets, each of which has files of its own.
    pub const fn with_own_files(number: u32) -> Self {
        Self { number, in_range: 1 }
    }

    /// Divides into `ranges` ranges, at least 1, with at least 64 buckets together.
    pub fn of_ranges(ranges: u32) -> Self {
        let ranges = ranges.clamp(1, MOST_BUCKETS);
        let in_range = LEAST_BUCKETS.div_ceil(ranges);
        Self { number: ranges * in_range, in_range }
    }

    /// The default division of a dataset of about `samples` samples: one range of 64 buckets for up to 50 million
    /// samples. For more samples, the number of ranges is a power of two, at most 256, that leaves at most 50 million
    /// samples in each.
    pub fn of_samples(samples: u64) -> Self {
        let ranges = samples.div_ceil(SAMPLES_OF_A_RANGE).max(1).next_power_of_two().min(MOST_DEFAULT_RANGES);
        Self::of_ranges(ranges as u32)
    }

    /// Whether a dataset can be divided so.
    pub fn is_valid(self) -> bool {
        (1..=MOST_BUCKETS).contains(&self.number)
            && self.in_range > 0
            && self.number.is_multiple_of(self.in_range)
    }

    /// The number of ranges.
    pub fn ranges(self) -> u32 {
        self.number / self.in_range.max(1)
    }

    /// The bucket of the session with this id.
    pub fn bucket_of(self, session_id: i64) -> u32 {
        bucket_of_session(session_id, self.number)
    }

    /// The range of a bucket.
    pub fn range_of(self, bucket: u32) -> u32 {
        bucket / self.in_range.max(1)
    }

    /// The buckets of a range.
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

    // By the C library's XXH3, through Python's `xxhash`.
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
        /// A log that is divided into n parts by the hash of the session is divided as by n ranges.
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
