//! Histograms of floats that can be added exactly, because they all have the same boundaries.
//!
//! A bin holds the floats with the same high bits: sign, exponent and, at the finest resolution, 7 bits of
//! the mantissa, which divide an octave into 128 bins of equal width. DDSketch (Masson, Rim and Lee, PVLDB
//! 2019) uses the same division. If more than [`MOST_BINS`] bins have values, neighbouring bins are united
//! in pairs until at most [`MOST_BINS`] are left, as in UDDSketch (Epicoco, Melle, Cafaro, Pulimeno and
//! Morleo, IEEE Access 2020).
//!
//! # Merging
//!
//! A histogram depends only on its values, not on their order or on the histograms that were merged. Its
//! resolution is the finest at which at most [`MOST_BINS`] bins have values. A subset of the values needs no
//! more bins than all values, so its resolution is at least as fine, and its bins can be united into the bins
//! of the whole. A bin either has a single distinct value, or extends from boundary to boundary. Only the
//! first bin begins at the smallest value instead, and only the last bin ends at the largest value.
//!
//! # Errors of quantiles
//!
//! The value of a rank is computed from the bin that contains this rank. With b bits of the mantissa, a bin
//! in the octave `[2^e, 2^(e+1))` has the width `2^(e-b)`, so the relative error is less than `2^-b`: less
//! than 1/128 (0.8 %) with 7 bits. [`MOST_BINS`] bins cover 8 full octaves with 7 bits, 16 with 6 bits and 32
//! with 5 bits. Single values are exact. If many values have a smooth density `f`, linear interpolation
//! within a bin of the relative width `w` has a relative error of about `w²/8 * |x f'(x) / f(x)|`. For a
//! lognormal distribution with σ = 2, whose bins have 5 bits, this is less than 0.1 % between the quantiles
//! 1/16 and 15/16.

use onefold_base::varint::{read_varint, write_varint};

/// The number of low bits in which values of a bin may differ, at the finest resolution.
const FINEST: u32 = 16;
/// The largest number of bins of a histogram.
const MOST_BINS: usize = 1 << 10;
/// The number of these bits at the coarsest resolution, at which all floats together have [`MOST_BINS`] bins.
const COARSEST: u32 = u32::BITS - MOST_BINS.ilog2();
/// The largest count of a bin. It leaves two bits for flags.
const MOST_VALUES: u64 = u64::MAX >> 2;
/// The number of bins in a page, and the number of pages for all floats.
const PAGE: usize = 1 << 8;

/// The number of values between two floats, which are given by their [`key`]s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bin {
    low: u32,
    high: u32,
    count: u64,
}

impl Bin {
    const EMPTY: Self = Self { low: u32::MAX, high: 0, count: 0 };

    fn add(&mut self, other: &Self) {
        self.low = self.low.min(other.low);
        self.high = self.high.max(other.high);
        self.count = self.count.saturating_add(other.count).min(MOST_VALUES);
    }
}

/// Counts values at the finest resolution. Pages of 256 bins, which cover two octaves, are allocated on
/// demand. A feature usually takes about 40 KiB, and at most 1 MiB.
#[derive(Debug)]
pub(super) struct Pages(Vec<Option<Box<[Bin; PAGE]>>>);

impl Pages {
    pub(super) fn new() -> Self {
        Self(vec![None; PAGE])
    }

    /// Counts the finite value `x`, `times` times.
    pub(super) fn add(&mut self, x: f32, times: usize) {
        let key = key(x);
        let page = self.0[(key >> 24) as usize].get_or_insert_with(|| Box::new([Bin::EMPTY; PAGE]));
        page[(key >> 16) as usize % PAGE].add(&Bin { low: key, high: key, count: times as u64 });
    }

    pub(super) fn histogram(self) -> Histogram {
        let bins = self.0.into_iter().flatten().flat_map(|page| *page).filter(|bin| bin.count > 0);
        Histogram::new(bins.collect(), FINEST)
    }
}

/// The bins that have values, in ascending order, each within its boundaries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Histogram {
    /// The number of low bits in which values of a bin may differ.
    pub(super) shift: u32,
    bins: Vec<Bin>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { shift: FINEST, bins: Vec::new() }
    }
}

impl Histogram {
    /// Unites ascending `bins` until at most [`MOST_BINS`] are left, at the finest possible resolution that
    /// is not finer than `shift`.
    fn new(mut bins: Vec<Bin>, mut shift: u32) -> Self {
        loop {
            bins.dedup_by(|next, bin| {
                let same = next.low >> shift == bin.low >> shift;
                if same {
                    bin.add(next);
                }
                same
            });
            if bins.len() <= MOST_BINS {
                break;
            }
            shift += 1;
        }
        let last = bins.len().saturating_sub(1);
        for (i, bin) in bins.iter_mut().enumerate().filter(|(_, bin)| bin.low < bin.high) {
            if i > 0 {
                bin.low &= !low_bits(shift);
            }
            if i < last {
                bin.high |= low_bits(shift);
            }
        }
        bins.shrink_to_fit();
        Self { shift, bins }
    }

    /// Adds the values of another histogram.
    pub(super) fn merge(&mut self, other: &Self) {
        let mut bins = std::mem::take(&mut self.bins);
        bins.extend(&other.bins);
        bins.sort_by_key(|bin| bin.low);
        *self = Self::new(bins, self.shift.max(other.shift));
    }

    /// Returns the number of values.
    pub(super) fn count(&self) -> u64 {
        self.bins.iter().fold(0, |sum, bin| sum.saturating_add(bin.count))
    }

    pub(super) fn min(&self) -> Option<f32> {
        self.bins.first().map(|bin| value_of(bin.low))
    }

    pub(super) fn max(&self) -> Option<f32> {
        self.bins.last().map(|bin| value_of(bin.high))
    }

    /// Returns the quantile `share`, from 0 to 1, by linear interpolation between the values of the two
    /// nearest ranks; 0 if there are no values.
    pub(super) fn quantile(&self, share: f64) -> f64 {
        let rank = share.clamp(0.0, 1.0) * self.count().saturating_sub(1) as f64;
        let (low, high) = (self.value_at(rank.floor() as u64), self.value_at(rank.ceil() as u64));
        (low + rank.fract() * (high - low)).min(high)
    }

    /// Returns the estimated number of values up to `x`. The values of the bin that contains `x` are
    /// assumed to be evenly spread.
    pub(super) fn count_to(&self, x: f64) -> f64 {
        let up_to_x = |bin: &Bin| {
            let [low, high] = [bin.low, bin.high].map(|key| f64::from(value_of(key)));
            let share = if high <= x { 1.0 } else { ((x - low) / (high - low)).max(0.0) };
            share * bin.count as f64
        };
        self.bins.iter().map(up_to_x).sum()
    }

    /// Returns the value of a rank, counted from 0. The values of a bin are assumed to be evenly spaced
    /// between its ends.
    fn value_at(&self, mut rank: u64) -> f64 {
        for bin in &self.bins {
            if rank < bin.count {
                let [low, high] = [bin.low, bin.high].map(|key| f64::from(value_of(key)));
                let along = rank as f64 / (bin.count - 1).max(1) as f64;
                return (low + along * (high - low)).min(high);
            }
            rank -= bin.count;
        }
        self.max().map_or(0.0, f64::from)
    }

    /// Writes the resolution, the number of bins, and the bins. A bin is its count with two flags (whether it
    /// has a single distinct value, and whether empty bins come before it), the number of these empty bins if
    /// there are any, and the low bits of the ends that are not boundaries.
    pub(super) fn encode(&self, to: &mut Vec<u8>) {
        to.push((self.shift - FINEST) as u8);
        write_varint(to, self.bins.len() as u64);
        let mut next = 0;
        for (i, bin) in self.bins.iter().enumerate() {
            let (index, single) = (bin.low >> self.shift, bin.low == bin.high);
            let left_out = index - next;
            write_varint(to, (bin.count << 2) | (u64::from(single) << 1) | u64::from(left_out > 0));
            if left_out > 0 {
                write_varint(to, left_out.into());
            }
            if single || i == 0 {
                write_key(to, bin.low, self.shift);
            }
            if !single && i + 1 == self.bins.len() {
                write_key(to, bin.high, self.shift);
            }
            next = index + 1;
        }
    }

    /// Removes an encoded histogram from the start of `from`; returns `None` if the bytes do not encode one.
    pub(super) fn decode(from: &mut &[u8]) -> Option<Self> {
        let (coarser, rest) = from.split_first()?;
        *from = rest;
        let shift = Some(FINEST + u32::from(*coarser)).filter(|shift| *shift <= COARSEST)?;
        let length = usize::try_from(read_varint(from)?).ok().filter(|length| *length <= MOST_BINS)?;
        let mut bins = Vec::with_capacity(length);
        let mut next = 0_u64;
        for i in 0..length {
            let flagged = read_varint(from)?;
            let (count, single) = (flagged >> 2, flagged & 2 != 0);
            let left_out = if flagged & 1 == 0 { 0 } else { read_varint(from)? };
            let index = next.checked_add(left_out).filter(|index| *index < 1 << (u32::BITS - shift))?;
            let edge = (index as u32) << shift;
            let low = if single || i == 0 { read_key(from, edge, shift)? } else { edge };
            let high = if single {
                low
            } else if i + 1 == length {
                read_key(from, edge, shift)?
            } else {
                edge | low_bits(shift)
            };
            // A bin with two ends has at least two values. A bin has either only finite or only non-finite
            // values.
            let is_bin = count > u64::from(!single) && (single || low < high) && value_of(edge).is_finite();
            bins.push(is_bin.then_some(Bin { low, high, count })?);
            next = index + 1;
        }
        Some(Self { shift, bins })
    }
}

fn low_bits(shift: u32) -> u32 {
    (1 << shift) - 1
}

/// Writes the low bits of a key's float in reverse order, so that round numbers give small numbers.
fn write_key(to: &mut Vec<u8>, key: u32, shift: u32) {
    let bits = if key >> 31 == 1 { key } else { !key };
    write_varint(to, (bits.reverse_bits() >> (u32::BITS - shift)).into());
}

/// Reads the low bits and returns the key, which is in the bin that begins at the key `edge`.
fn read_key(from: &mut &[u8], edge: u32, shift: u32) -> Option<u32> {
    let reversed = u32::try_from(read_varint(from)?).ok().filter(|bits| bits >> shift == 0)?;
    let bits = (reversed << (u32::BITS - shift)).reverse_bits();
    Some(edge | if edge >> 31 == 1 { bits } else { bits ^ low_bits(shift) })
}

/// Maps the bits of a float to a number with the same order as the floats. Both zeros have the same key.
fn key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}
