//! An order-independent digest of samples. A build computes it from the query's result, from the written
//! data, and from the data as it is read again.
//!
//! The digest hashes each value of a column together with the column's name, adds the hashes of a sample and
//! mixes the sum, and adds the results of all samples. It therefore does not depend on the order of columns
//! or samples, but on each sample and on how often it occurs. XXH3 (Collet) with 128 bits detects accidental
//! errors; it does not protect against an attacker.

use std::fmt;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{DataType, Int64Type};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

use crate::TIME_COLUMN;

/// The digest of a multiset of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digest(u128);

/// The digest of one sample while its columns are added in any order.
#[derive(Debug, Clone, Copy, Default)]
pub struct SampleDigest(u128);

/// A hash seed per column, so that equal values of different columns have different hashes.
#[derive(Debug, Clone, Copy)]
pub struct ColumnSeed(u64);

impl ColumnSeed {
    /// Creates the seed of the column `name`.
    pub fn new(name: &str) -> Self {
        Self(xxh3_128(name.as_bytes()) as u64)
    }

    /// Hashes a list of ids. Callers may keep the hash of a repeated list and add it again.
    pub fn list(self, ids: &[i64]) -> u128 {
        // The hash depends on the length, so lists need no separator.
        self.bytes(bytemuck::cast_slice(ids))
    }

    /// Hashes bytes: a text, or values of one other type. Callers skip nulls.
    pub fn bytes(self, bytes: &[u8]) -> u128 {
        xxh3_128_with_seed(bytes, self.0)
    }

    /// Hashes the bits of a float, so -0.0 and 0.0 differ.
    pub fn float(self, value: f32) -> u128 {
        self.number(u64::from(value.to_bits()))
    }

    /// Hashes a time in microseconds since 1970, or an integer of a kept column. Callers skip nulls.
    pub fn integer(self, value: i64) -> u128 {
        self.number(value as u64)
    }

    /// Adds the values of a kept column to `samples`: row i belongs to sample i.
    ///
    /// # Panics
    ///
    /// Panics if the column has fewer values than there are samples, or is neither `Int64` nor `Utf8`.
    pub fn add_kept(self, column: &dyn Array, samples: &mut [SampleDigest]) {
        let present = |row: &usize| column.is_valid(*row);
        let rows = (0..samples.len()).filter(present);
        match column.data_type() {
            DataType::Utf8 => {
                let texts = column.as_string::<i32>();
                rows.for_each(|row| samples[row].add(self.bytes(texts.value(row).as_bytes())));
            }
            _ => {
                let integers = column.as_primitive::<Int64Type>().values();
                rows.for_each(|row| samples[row].add(self.integer(integers[row])));
            }
        }
    }

    /// Hashes another number by its bits.
    pub fn number(self, number: u64) -> u128 {
        mix(u128::from(number) << 64 | u128::from(self.0))
    }
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection in which every input bit affects
/// every output bit.
pub fn scramble(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The seeds of all digested columns of a sample: time, floats, kept values and lists. A digest excludes the
/// session id, which the build assigns.
#[derive(Debug, Clone)]
pub struct SampleSeeds {
    time: ColumnSeed,
    floats: Vec<ColumnSeed>,
    lists: Vec<ColumnSeed>,
    kept: Vec<ColumnSeed>,
}

impl SampleSeeds {
    /// Creates the seeds of samples with these float, list and kept columns.
    pub fn new<'n>(
        floats: impl IntoIterator<Item = &'n str>,
        lists: impl IntoIterator<Item = &'n str>,
        kept: impl IntoIterator<Item = &'n str>,
    ) -> Self {
        Self {
            time: ColumnSeed::new(TIME_COLUMN),
            floats: floats.into_iter().map(ColumnSeed::new).collect(),
            lists: lists.into_iter().map(ColumnSeed::new).collect(),
            kept: kept.into_iter().map(ColumnSeed::new).collect(),
        }
    }

    /// Returns the seed of kept column number `column`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such column.
    pub fn kept(&self, column: usize) -> ColumnSeed {
        self.kept[column]
    }

    /// Returns the digest of a sample's time, in microseconds, and floats, one per float column. The caller
    /// adds the lists.
    pub fn numbers(&self, time: i64, floats: impl IntoIterator<Item = f32>) -> SampleDigest {
        let mut digest = SampleDigest::default();
        digest.add(self.time.integer(time));
        self.floats.iter().zip(floats).for_each(|(seed, float)| digest.add(seed.float(float)));
        digest
    }

    /// Hashes a list of list column number `column`.
    ///
    /// # Panics
    ///
    /// Panics if there is no such column.
    pub fn list(&self, column: usize, ids: &[i64]) -> u128 {
        self.lists[column].list(ids)
    }
}

impl SampleDigest {
    /// Adds the hash of one column.
    pub fn add(&mut self, part: u128) {
        self.0 = self.0.wrapping_add(part);
    }

    /// Adds the hashes of other columns of the same sample.
    pub fn merge(&mut self, others: Self) {
        self.add(others.0);
    }

    /// Returns the number that the sample contributes to a [`Digest`] once all its columns are added. It also
    /// serves to tell samples apart.
    pub fn number(self) -> u128 {
        mix(self.0)
    }
}

impl Digest {
    /// Parses the output of [`Display`](fmt::Display); `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let bits = Some(text).filter(|text| text.len() == 32);
        bits.and_then(|text| u128::from_str_radix(text, 16).ok()).map(Self)
    }

    /// Adds one sample.
    pub fn add(&mut self, sample: SampleDigest) {
        self.add_number(sample.number());
    }

    /// Adds one sample by its [number](SampleDigest::number).
    pub fn add_number(&mut self, number: u128) {
        self.0 = self.0.wrapping_add(number);
    }

    /// Adds the samples of another digest.
    pub fn merge(&mut self, other: Self) {
        self.0 = self.0.wrapping_add(other.0);
    }
}

/// A bijection of 128 bits: two rounds that multiply by an odd constant (from PCG, by L'Ecuyer) and fold the
/// high half into the low half.
fn mix(mut bits: u128) -> u128 {
    const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
    for _ in 0..2 {
        bits ^= bits >> 64;
        bits = bits.wrapping_mul(MULTIPLIER);
    }
    bits ^ (bits >> 67)
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a digest")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the digest of samples with a number and a list each.
    fn digest(samples: &[(u64, &[i64])]) -> Digest {
        let mut digest = Digest::default();
        for (number, list) in samples {
            let mut sample = SampleDigest::default();
            sample.add(ColumnSeed::new("list").list(list));
            sample.add(ColumnSeed::new("number").number(*number));
            digest.add(sample);
        }
        digest
    }

    #[test]
    fn digests_depend_on_everything_but_the_order_of_samples() {
        let whole = digest(&[(1, &[5]), (2, &[5, 6]), (2, &[])]);
        assert_eq!(whole, digest(&[(2, &[]), (1, &[5]), (2, &[5, 6])]));
        let mut halves = digest(&[(2, &[])]);
        halves.merge(digest(&[(1, &[5]), (2, &[5, 6])]));
        assert_eq!(whole, halves);
        let others: [&[(u64, &[i64])]; 7] = [
            &[(1, &[5]), (2, &[5, 6])],
            &[(1, &[5]), (2, &[5, 6]), (2, &[]), (2, &[])],
            &[(2, &[5]), (1, &[5, 6]), (2, &[])],
            &[(1, &[5]), (2, &[6, 5]), (2, &[])],
            &[(1, &[5]), (2, &[5, 6]), (2, &[0])],
            &[(1, &[]), (2, &[5, 6]), (2, &[5])],
            &[],
        ];
        for other in others {
            assert_ne!(whole, digest(other), "{other:?}");
        }
    }

    #[test]
    fn a_sample_is_the_sum_of_its_columns() {
        let seeds = SampleSeeds::new(["x", "y"], ["a"], []);
        let mut sample = seeds.numbers(7, [1.5, -0.0]);
        sample.add(seeds.list(0, &[3, 4]));
        let mut expected = SampleDigest::default();
        for part in [
            ColumnSeed::new("a").list(&[3, 4]),
            ColumnSeed::new("y").number(u64::from((-0.0_f32).to_bits())),
            ColumnSeed::new("x").number(u64::from(1.5_f32.to_bits())),
            ColumnSeed::new(TIME_COLUMN).number(7),
        ] {
            expected.add(part);
        }
        assert_eq!(sample.number(), expected.number());
    }

    #[test]
    fn columns_are_told_apart_by_name() {
        let (a, b) = (ColumnSeed::new("a"), ColumnSeed::new("b"));
        assert_ne!(a.list(&[]), b.list(&[]));
        assert_ne!(a.number(0), b.number(0));
    }

    #[test]
    fn parsing_restores_written_digests() {
        let digest = digest(&[(1, &[5])]);
        let text = serde_json::to_string(&digest).unwrap();
        assert_eq!(text.len(), 34);
        assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), digest);
        assert!(serde_json::from_str::<Digest>("\"5\"").is_err());
    }
}
