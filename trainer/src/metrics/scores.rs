//! A histogram of the scores of positive and negative samples, with buckets of nearly equal scores.

/// The number of combinations of sign and exponent of a float.
const PAGES: usize = 512;

/// The weights of negative and positive samples by score. Ranges without scores take no memory.
#[derive(Debug, Clone)]
pub(super) struct Scores {
    /// The number of mantissa bits that distinguish buckets.
    pub(super) bits: u32,
    /// The buckets by sign and exponent, in the order of the scores.
    pages: Vec<Option<Box<[[f64; 2]]>>>,
}

impl Scores {
    /// Creates an empty histogram. Scores with a relative difference of less than `2^-bits` may share a bucket.
    /// The memory is `2^bits` × 16 bytes for every power of two that occurs.
    pub(super) fn new(bits: u32) -> Self {
        Self { bits, pages: vec![None; PAGES] }
    }

    /// Adds a sample.
    pub(super) fn add(&mut self, score: f32, negative: f64, positive: f64) {
        self.add_to(self.bucket(score), [negative, positive]);
    }

    fn add_to(&mut self, bucket: u32, weights: [f64; 2]) {
        let size = 1 << self.bits;
        let page = self.pages[(bucket >> self.bits) as usize]
            .get_or_insert_with(|| vec![[0.0; 2]; size].into_boxed_slice());
        let slot = &mut page[bucket as usize & (size - 1)];
        slot[0] += weights[0];
        slot[1] += weights[1];
    }

    /// Adds the counts of `other`, which must have the same number of bits.
    pub(super) fn merge(&mut self, other: &Self) {
        for (bucket, weights) in other.buckets() {
            self.add_to(bucket, weights);
        }
    }

    /// Returns the bucket of a score: the float's bits, mapped to an order-preserving integer and truncated.
    pub(super) fn bucket(&self, score: f32) -> u32 {
        let bits = score.to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        ordered >> (23 - self.bits)
    }

    /// Returns the score in the middle of a bucket.
    pub(super) fn middle(&self, bucket: u32) -> f32 {
        let shift = 23 - self.bits;
        let ordered = (bucket << shift) | (1 << shift >> 1);
        f32::from_bits(if ordered >> 31 == 1 { ordered ^ 1 << 31 } else { !ordered })
    }

    /// Returns the weights of all non-empty buckets, in the order of the scores.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (u32, [f64; 2])> {
        let bits = self.bits;
        self.pages.iter().enumerate().flat_map(move |(page, weights)| {
            let weights = weights.iter().flat_map(|weights| weights.iter().enumerate());
            weights
                .filter(|(_, weights)| **weights != [0.0; 2])
                .map(move |(slot, weights)| ((page << bits) as u32 | slot as u32, *weights))
        })
    }

    /// Creates a histogram with the same number of bits from the result of [`buckets`](Self::buckets); `None`
    /// if a bucket is invalid.
    pub(super) fn like(&self, buckets: &[u32], weights: &[f64]) -> Option<Self> {
        let bits = self.bits;
        let fits = |bucket: &u32| ((*bucket >> bits) as usize) < PAGES;
        if weights.len() != 2 * buckets.len() || !buckets.iter().all(fits) {
            return None;
        }
        let mut scores = Self::new(bits);
        for (bucket, weights) in buckets.iter().zip(weights.chunks_exact(2)) {
            scores.add_to(*bucket, [weights[0], weights[1]]);
        }
        Some(scores)
    }
}
