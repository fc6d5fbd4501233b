//! What statistics of a dense feature are made of while its values are seen.
//!
//! Quantiles come from a histogram of the 16 high bits of the values: sign, exponent and 7 bits of the mantissa. A bin
//! knows its count, smallest and largest value, so bins of one value are exact. Pages of 256 bins, of two octaves each,
//! are made when they are needed: a feature takes some ten KiB, and at most 768.
//!
//! Counts and bins add up in any order. Means and variances are sums of floats, whose order matters: values are added
//! in blocks that begin at every [`BLOCK`]-th value of a row group, wherever its batches end, and row groups in their
//! order.

use super::{DENSE_QUANTILES, DenseStatistics, short_quantiles};

/// Values whose mean and variance are found at once.
const BLOCK: usize = 1 << 10;
/// Bins of a page, and the pages of a histogram.
const PAGE: usize = 1 << 8;

/// Number, mean, and sum of the squared differences from it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Moments {
    pub(super) count: u64,
    pub(super) mean: f64,
    pub(super) squares: f64,
}

impl Moments {
    fn of(values: &[f64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let squares = values.iter().map(|x| (x - mean) * (x - mean)).sum();
        Self { count: values.len() as u64, mean, squares }
    }

    pub(super) fn merge(&mut self, other: Self) {
        let count = self.count + other.count;
        if count == 0 {
            return;
        }
        let (own, others, all) = (self.count as f64, other.count as f64, count as f64);
        let difference = other.mean - self.mean;
        self.mean += difference * (others / all);
        self.squares += other.squares + difference * difference * (own * others / all);
        self.count = count;
    }

    pub(super) fn variance(self) -> f64 {
        if self.count == 0 { 0.0 } else { self.squares / self.count as f64 }
    }
}

/// The values of a dense feature, as far as its statistics need them.
#[derive(Debug, Clone)]
pub(crate) struct DenseSketch {
    not_finite: u64,
    values: Moments,
    logs: Moments,
    pages: Vec<Option<Box<Page>>>,
}

/// Bins that follow each other.
#[derive(Debug, Clone)]
struct Page {
    counts: [u64; PAGE],
    /// The 16 low bits of the smallest and of the largest value.
    low: [u16; PAGE],
    high: [u16; PAGE],
}

/// A bin with values in it.
struct Bin {
    count: u64,
    low: f64,
    high: f64,
}

impl Default for DenseSketch {
    fn default() -> Self {
        let (values, logs) = (Moments::default(), Moments::default());
        Self { not_finite: 0, values, logs, pages: vec![None; PAGE] }
    }
}

impl Page {
    fn new() -> Self {
        Self { counts: [0; PAGE], low: [u16::MAX; PAGE], high: [0; PAGE] }
    }

    fn merge(&mut self, other: &Self) {
        for bin in 0..PAGE {
            self.counts[bin] += other.counts[bin];
            self.low[bin] = self.low[bin].min(other.low[bin]);
            self.high[bin] = self.high[bin].max(other.high[bin]);
        }
    }
}

impl DenseSketch {
    /// Of the values of a row group, which come in any parts.
    pub(crate) fn of(parts: &[&[f32]]) -> Self {
        let mut sketch = Self::default();
        let mut block = Vec::with_capacity(BLOCK);
        for part in parts {
            let mut rest = *part;
            while !rest.is_empty() {
                let (now, later) = rest.split_at((BLOCK - block.len()).min(rest.len()));
                block.extend_from_slice(now);
                rest = later;
                if block.len() == BLOCK {
                    sketch.add(&block);
                    block.clear();
                }
            }
        }
        sketch.add(&block);
        sketch
    }

    /// Adds the values of the next row group.
    pub(crate) fn merge(&mut self, next: &Self) {
        self.not_finite += next.not_finite;
        self.values.merge(next.values);
        self.logs.merge(next.logs);
        for (own, other) in self.pages.iter_mut().zip(&next.pages) {
            match (own, other) {
                (_, None) => {}
                (Some(own), Some(other)) => own.merge(other),
                (own, other) => own.clone_from(other),
            }
        }
    }

    fn add(&mut self, block: &[f32]) {
        let mut finite = Vec::with_capacity(block.len());
        let mut logs = Vec::with_capacity(block.len());
        // Values repeat within a session, and a logarithm costs as much as all else.
        let mut last = (0.0, 0.0);
        for x in block.iter().filter(|x| x.is_finite()) {
            let value = f64::from(*x);
            if value != last.0 {
                last = (value, value.abs().ln_1p().copysign(value));
            }
            finite.push(value);
            logs.push(last.1);
            let key = key(*x);
            let page = self.pages[(key >> 24) as usize].get_or_insert_with(|| Box::new(Page::new()));
            let (bin, rest) = ((key >> 16) as usize % PAGE, key as u16);
            page.counts[bin] += 1;
            page.low[bin] = page.low[bin].min(rest);
            page.high[bin] = page.high[bin].max(rest);
        }
        self.not_finite += (block.len() - finite.len()) as u64;
        self.values.merge(Moments::of(&finite));
        self.logs.merge(Moments::of(&logs));
    }

    /// The statistics of the values so far.
    pub(crate) fn statistics(&self) -> DenseStatistics {
        let bins = self.bins();
        let (Some(first), Some(last)) = (bins.first(), bins.last()) else {
            return DenseStatistics::without_values(self.not_finite);
        };
        let ends = [first.low as f32, last.high as f32];
        let all = self.values.count;
        let quantile = |share: f64| {
            // Exact: the share is a multiple of 1/16.
            let rank = share * (all - 1) as f64;
            let low = value_at(&bins, rank.floor() as u64);
            let high = value_at(&bins, rank.ceil() as u64);
            low + rank.fract() * (high - low)
        };
        let quantiles: [f32; DENSE_QUANTILES] = short_quantiles(ends, quantile);
        DenseStatistics::new(self.not_finite, self.values, self.logs, quantiles)
    }

    /// The bins with values in them, ascending.
    fn bins(&self) -> Vec<Bin> {
        let mut bins = Vec::new();
        for (number, page) in self.pages.iter().enumerate() {
            let Some(page) = page else { continue };
            for bin in (0..PAGE).filter(|bin| page.counts[*bin] > 0) {
                let high_bits = ((number * PAGE + bin) as u32) << 16;
                let value = |rest: u16| f64::from(value_of(high_bits | u32::from(rest)));
                let (low, high) = (value(page.low[bin]), value(page.high[bin]));
                bins.push(Bin { count: page.counts[bin], low, high });
            }
        }
        bins
    }
}

/// The value of this rank, from 0: the values of a bin are spread evenly from its smallest to its largest.
fn value_at(bins: &[Bin], rank: u64) -> f64 {
    let mut before = 0;
    for bin in bins {
        if rank < before + bin.count {
            let along = (rank - before) as f64 / (bin.count - 1).max(1) as f64;
            return bin.low + along * (bin.high - bin.low);
        }
        before += bin.count;
    }
    bins.last().map_or(0.0, |bin| bin.high)
}

/// The bits of a float in an order that is that of the floats; both zeros have one.
fn key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}
