//! Histograms of floats that add up exactly: all of them have the same boundaries.
//!
//! A bin holds the floats that have their high bits in common: sign, exponent, and at the finest resolution 7 bits of
//! the mantissa, which divide an octave into 128 bins of equal width. DDSketch (Masson, Rim and Lee, PVLDB 2019)
//! divides octaves in this way, too. If more than [`MOST_BINS`] bins have values, each pair of neighbours is united,
//! until few enough are left, as in UDDSketch (Epicoco, Melle, Cafaro, Pulimeno and Morleo, IEEE Access 2020).
//!
//! # Merging
//!
//! A histogram depends on its values alone, and not on their order or on the histograms that were merged. Its resolution
//! is the finest one at which at most [`MOST_BINS`] bins have values. A part of the values has no more bins than all of
//! them, so its resolution is at least as fine, and its bins can be united to those of the whole. A bin is a single
//! value, however often it comes, or runs from boundary to boundary; only the first one begins at the smallest value,
//! and the last one ends at the largest.
//!
//! # Errors of quantiles
//!
//! The value of a rank is found in the bin that holds the value of this rank. With b bits of the mantissa, a bin of the
//! octave `[2^e, 2^(e+1))` is `2^(e-b)` wide, so the value found differs from the true one by less than `2^-b` of its
//! size: by less than 1/128 (0.8 %) with 7 bits. [`MOST_BINS`] bins are 8 whole octaves with 7 bits, 16 with 6 and 32
//! with 5. Single values are exact. Where many values have a smooth density `f`, a straight line within a bin of the
//! relative width `w` is off by about `w²/8 * |x f'(x) / f(x)|` of the size: for a lognormal distribution with σ = 2,
//! whose bins have 5 bits, by less than 0.1 % between the quantiles 1/16 and 15/16.

use onefold_base::varint::{read_varint, write_varint};

/// The number of low bits that values of one bin may differ in, at the finest resolution.
const FINEST: u32 = 16;
/// The largest number of bins of a histogram.
const MOST_BINS: usize = 1 << 10;
/// The same bits as [`FINEST`] at the coarsest resolution: all floats together have [`MOST_BINS`] bins.
const COARSEST: u32 = u32::BITS - MOST_BINS.ilog2();
/// The largest count of a bin. Two bits are left for flags.
const MOST_VALUES: u64 = u64::MAX >> 2;
/// Bins of a page, and the pages of all floats.
const PAGE: usize = 1 << 8;

/// The number of the values between two floats, both of which are given by their [`key`].
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

/// Counts values at the finest resolution. Pages of 256 bins, which are two octaves, are made when they are needed: the
/// values of a feature take some 40 KiB, and at most 1 MiB.
#[derive(Debug)]
pub(super) struct Pages(Vec<Option<Box<[Bin; PAGE]>>>);

impl Pages {
    pub(super) fn new() -> Self {
        Self(vec![None; PAGE])
    }

    /// Counts the finite `x`, `times` times.
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

/// The bins that have values, ascending, each within its boundaries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Histogram {
    /// The number of low bits that values of one bin may differ in.
    pub(super) shift: u32,
    bins: Vec<Bin>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { shift: FINEST, bins: Vec::new() }
    }
}

impl Histogram {
    /// Unites ascending `bins` at the finest resolution, from `shift` on, that leaves few enough.
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

    /// The number of values.
    pub(super) fn count(&self) -> u64 {
        self.bins.iter().fold(0, |sum, bin| sum.saturating_add(bin.count))
    }

    pub(super) fn min(&self) -> Option<f32> {
        self.bins.first().map(|bin| value_of(bin.low))
    }

    pub(super) fn max(&self) -> Option<f32> {
        self.bins.last().map(|bin| value_of(bin.high))
    }

    /// The quantile `share`, from 0 to 1, on a straight line between the values of the two ranks around it; 0 without
    /// values.
    pub(super) fn quantile(&self, share: f64) -> f64 {
        let rank = share.clamp(0.0, 1.0) * self.count().saturating_sub(1) as f64;
        let (low, high) = (self.value_at(rank.floor() as u64), self.value_at(rank.ceil() as u64));
        (low + rank.fract() * (high - low)).min(high)
    }

    /// The number of values up to `x`: those of the bin that `x` lies in are spread evenly.
    pub(super) fn count_to(&self, x: f64) -> f64 {
        let up_to_x = |bin: &Bin| {
            let [low, high] = [bin.low, bin.high].map(|key| f64::from(value_of(key)));
            let share = if high <= x { 1.0 } else { ((x - low) / (high - low)).max(0.0) };
            share * bin.count as f64
        };
        self.bins.iter().map(up_to_x).sum()
    }

    /// The value of a rank, from 0: the values of a bin are spread evenly from its beginning to its end.
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

    /// Writes the resolution, the number of bins, and the bins. These are a count with two flags: whether the bin is a
    /// single value, and whether bins are left out before it; then their number, and the low bits of the ends that are
    /// not boundaries.
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

    /// Takes an encoded histogram from the start of `from`; `None` if the bytes there do not encode one.
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
            // Two values at least if they differ. Bins hold only finite values or only others.
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

/// Writes the low bits of a key's float in reverse, so that those of round numbers are small.
fn write_key(to: &mut Vec<u8>, key: u32, shift: u32) {
    let bits = if key >> 31 == 1 { key } else { !key };
    write_varint(to, (bits.reverse_bits() >> (u32::BITS - shift)).into());
}

/// The key in the bin that begins at the key `edge` whose low bits come next.
fn read_key(from: &mut &[u8], edge: u32, shift: u32) -> Option<u32> {
    let reversed = u32::try_from(read_varint(from)?).ok().filter(|bits| bits >> shift == 0)?;
    let bits = (reversed << (u32::BITS - shift)).reverse_bits();
    Some(edge | if edge >> 31 == 1 { bits } else { bits ^ low_bits(shift) })
}

/// The bits of a float in an order that is that of the floats; both zeros have one.
fn key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}
