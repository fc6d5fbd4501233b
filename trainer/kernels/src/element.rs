//! The storage types of table weights: `fp32`, `bf16` and `fp16`. The 16-bit types are converted to `f32` for
//! computations and rounded stochastically when they are stored.
//!
//! Stochastic rounding chooses one of the two neighbours, the nearer one with the higher probability, so that the
//! expected value is the exact value. Therefore updates smaller than half a step of the type are not lost (Gupta et
//! al. 2015). The random bits are a hash of the seed, step, table, row and column. They depend neither on threads
//! nor on shards, and a resumed run draws the same bits. A value that the type represents exactly is never changed.
//! Finite values beyond the type's largest value become the largest value (65,504 for `fp16`); infinities and NaN
//! are preserved.

use std::borrow::Cow;

use bytemuck::Pod;

use super::simd::{Lanes, WIDTH, dispatched, widen_fp16};

/// A type in which a table stores its weights.
pub trait Element: Copy + Send + Sync + 'static {
    /// One weight in memory.
    type Stored: Pod + Send + Sync;

    /// Loads eight weights as a vector of 32-bit floats.
    fn load<L: Lanes>(stored: &[Self::Stored; WIDTH]) -> L;

    /// Converts one weight to a 32-bit float, exactly.
    fn widen(stored: Self::Stored) -> f32;

    /// Returns a row as mutable 32-bit floats: its conversion in `buffer`, which has the same length, or the row
    /// itself.
    #[inline(always)]
    fn widened<'a, L: Lanes>(row: &'a mut [Self::Stored], buffer: &'a mut [f32]) -> &'a mut [f32] {
        widen_row::<L, Self>(row, buffer);
        buffer
    }

    /// Rounds `buffer` stochastically and stores it in `row`, which has the same length. Does nothing for 32-bit
    /// floats, because [`widened`](Self::widened) returned the row itself.
    fn store(row: &mut [Self::Stored], buffer: &[f32], noise: RowNoise);
}

/// 32-bit floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fp32;

/// The type `bf16`: the upper half of a 32-bit float.
#[derive(Debug, Clone, Copy)]
pub struct Bf16;

/// The type `fp16`: a 16-bit float of IEEE 754.
#[derive(Debug, Clone, Copy)]
pub struct Fp16;

impl Element for Fp32 {
    type Stored = f32;

    #[inline(always)]
    fn load<L: Lanes>(stored: &[f32; WIDTH]) -> L {
        L::load(stored)
    }

    #[inline(always)]
    fn widen(stored: f32) -> f32 {
        stored
    }

    #[inline(always)]
    fn widened<'a, L: Lanes>(row: &'a mut [f32], _: &'a mut [f32]) -> &'a mut [f32] {
        row
    }

    #[inline(always)]
    fn store(_: &mut [f32], _: &[f32], _: RowNoise) {}
}

impl Element for Bf16 {
    type Stored = u16;

    #[inline(always)]
    fn load<L: Lanes>(stored: &[u16; WIDTH]) -> L {
        L::load_bf16(stored)
    }

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        f32::from_bits(u32::from(stored) << 16)
    }

    #[inline(always)]
    fn store(row: &mut [u16], buffer: &[f32], noise: RowNoise) {
        for (column, (stored, value)) in row.iter_mut().zip(buffer).enumerate() {
            *stored = narrow_bf16(*value, noise.of(column) >> 16);
        }
    }
}

impl Element for Fp16 {
    type Stored = u16;

    #[inline(always)]
    fn load<L: Lanes>(stored: &[u16; WIDTH]) -> L {
        L::load_fp16(stored)
    }

    #[inline(always)]
    fn widen(stored: u16) -> f32 {
        widen_fp16(stored)
    }

    #[inline(always)]
    fn store(row: &mut [u16], buffer: &[f32], noise: RowNoise) {
        for (column, (stored, value)) in row.iter_mut().zip(buffer).enumerate() {
            *stored = narrow_fp16(*value, noise.of(column) >> 19);
        }
    }
}

/// Rounds to `bf16`, up with a probability equal to the truncated fraction: `noise` is uniform in `0..1 << 16`.
#[inline(always)]
fn narrow_bf16(value: f32, noise: u32) -> u16 {
    let bits = value.to_bits();
    let (sign, magnitude) = (bits & 0x8000_0000, bits & 0x7fff_ffff);
    let rounded = (magnitude + noise).min(0x7f7f_ffff);
    // The quiet bit keeps a NaN from becoming infinity when its lower bits are cut off.
    let special = magnitude | if magnitude > 0x7f80_0000 { 0x0040_0000 } else { 0 };
    let kept = if magnitude >= 0x7f80_0000 { special } else { rounded };
    ((sign | kept) >> 16) as u16
}

/// The smallest normal number of `fp16`.
const LEAST_NORMAL: f32 = f32::from_bits(113 << 23);

/// Rounds to `fp16`, up with a probability equal to the truncated fraction: `noise` is uniform in `0..1 << 13`.
///
/// Subnormal values of `fp16` all have the same step. The smallest normal number is added to a smaller value, so
/// that this step becomes a step of the float's mantissa. The addition itself rounds to 2^-13 of a step.
#[inline(always)]
fn narrow_fp16(value: f32, noise: u32) -> u16 {
    let (sign, magnitude) = ((value.to_bits() >> 16) & 0x8000, value.abs());
    let normal = magnitude >= LEAST_NORMAL;
    let (shifted, base) = if normal { (magnitude, 112 << 23) } else { (magnitude + LEAST_NORMAL, 113 << 23) };
    let rounded = ((shifted.to_bits() + noise - base) >> 13).min(0x7bff);
    // Compares bits, because every comparison with NaN is false.
    let bits = magnitude.to_bits();
    let special = if bits > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    (sign | if bits >= 0x7f80_0000 { special } else { rounded }) as u16
}

/// Rounds to the nearest `bf16`, ties to even. Finite values beyond the largest `bf16` become the largest.
#[inline]
pub fn nearest_bf16(value: f32) -> u16 {
    narrow_bf16(value, 0x7fff + ((value.to_bits() >> 16) & 1))
}

/// Rounds to the nearest `fp16`, ties to even. Finite values beyond the largest `fp16` become the largest.
#[inline]
pub fn nearest_fp16(value: f32) -> u16 {
    let magnitude = value.abs();
    if magnitude < LEAST_NORMAL {
        // The step of subnormal `fp16` values is the last place of 0.5, so the addition does the only rounding.
        let steps = (magnitude + 0.5).to_bits() - 0.5_f32.to_bits();
        return ((value.to_bits() >> 16) & 0x8000) as u16 | steps as u16;
    }
    narrow_fp16(value, 0xfff + ((value.to_bits() >> 13) & 1))
}

/// A counter-based source of random bits for the rounding of a table's update.
#[derive(Debug, Clone, Copy)]
pub struct Noise {
    key: u64,
    first_row: u64,
    first_column: u32,
}

/// A source of random bits for the rounding of one row's columns.
#[derive(Debug, Clone, Copy)]
pub struct RowNoise {
    key: u32,
    first_column: u32,
}

impl Noise {
    /// Returns the noise of a table in a step.
    pub fn new(seed: u64, step: u64, table: u64) -> Self {
        Self { key: mixed(step_key(seed, step) ^ table), first_row: 0, first_column: 0 }
    }

    /// Returns the noise of the table's shard that begins at this row and column. A weight has the same noise in
    /// every shard.
    #[must_use]
    pub fn of_shard(self, first_row: u64, first_column: u64) -> Self {
        Self { first_row, first_column: first_column as u32, ..self }
    }

    /// Returns the noise of a row, given its index within the shard.
    #[inline(always)]
    pub fn row(self, row: usize) -> RowNoise {
        let key = (mixed(self.key ^ (self.first_row + row as u64)) >> 32) as u32;
        RowNoise { key, first_column: self.first_column }
    }
}

impl RowNoise {
    /// Returns 32 random bits for a column. The hash is `lowbias32`, which Chris Wellons found by a search for
    /// multipliers of least bias.
    #[inline(always)]
    fn of(self, column: usize) -> u32 {
        let counter = self.first_column.wrapping_add(column as u32);
        let mut bits = self.key.wrapping_add(counter.wrapping_mul(0x9e37_79b9));
        bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
        bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
        bits ^ (bits >> 16)
    }
}

/// Returns the hash of the seed and the step, which is part of the noise of every table in that step.
#[inline]
pub fn step_key(seed: u64, step: u64) -> u64 {
    mixed(mixed(seed) ^ step)
}

/// Advances SplitMix64 by one step and applies its finalizer (Steele, Lea and Flood 2014).
#[inline(always)]
fn mixed(value: u64) -> u64 {
    let mut bits = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[inline(always)]
pub(crate) fn widen_row<L: Lanes, E: Element>(stored: &[E::Stored], values: &mut [f32]) {
    let ((stored, stored_rest), (values, rest)) =
        (stored.as_chunks::<WIDTH>(), values.as_chunks_mut::<WIDTH>());
    values.iter_mut().zip(stored).for_each(|(values, stored)| E::load::<L>(stored).store(values));
    rest.iter_mut().zip(stored_rest).for_each(|(value, stored)| *value = E::widen(*stored));
}

/// Stored weights, row-major.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weights<F, H> {
    /// 32-bit floats.
    Fp32(F),
    /// The upper halves of 32-bit floats.
    Bf16(H),
    /// IEEE 754's 16-bit floats, by their bits.
    Fp16(H),
}

/// Borrowed weights.
pub type Elements<'a> = Weights<&'a [f32], &'a [u16]>;

/// Borrowed weights that can be changed.
pub type ElementsMut<'a> = Weights<&'a mut [f32], &'a mut [u16]>;

impl<F: AsRef<[f32]>, H: AsRef<[u16]>> Weights<F, H> {
    /// Returns the number of weights.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Fp32(values) => values.as_ref().len(),
            Self::Bf16(values) | Self::Fp16(values) => values.as_ref().len(),
        }
    }

    /// Returns whether there are no weights.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows the weights.
    #[inline]
    pub fn elements(&self) -> Elements<'_> {
        match self {
            Self::Fp32(values) => Weights::Fp32(values.as_ref()),
            Self::Bf16(values) => Weights::Bf16(values.as_ref()),
            Self::Fp16(values) => Weights::Fp16(values.as_ref()),
        }
    }
}

impl<F: AsMut<[f32]>, H: AsMut<[u16]>> Weights<F, H> {
    /// Borrows the weights to change them.
    #[inline]
    pub fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Self::Fp32(values) => Weights::Fp32(values.as_mut()),
            Self::Bf16(values) => Weights::Bf16(values.as_mut()),
            Self::Fp16(values) => Weights::Fp16(values.as_mut()),
        }
    }
}

impl<'a> Elements<'a> {
    /// Returns `length` weights, from `start` on.
    ///
    /// # Panics
    ///
    /// If there are fewer weights.
    #[inline]
    pub fn slice(&self, start: usize, length: usize) -> Elements<'a> {
        match self {
            Self::Fp32(values) => Self::Fp32(&values[start..][..length]),
            Self::Bf16(values) => Self::Bf16(&values[start..][..length]),
            Self::Fp16(values) => Self::Fp16(&values[start..][..length]),
        }
    }

    /// Converts the weights to 32-bit floats, exactly, and writes them to `values`.
    ///
    /// # Panics
    ///
    /// If `values` has another length.
    #[inline]
    pub fn widen(&self, values: &mut [f32]) {
        assert_eq!(self.len(), values.len(), "as many values are written as there are");
        widen(*self, values);
    }

    /// Returns a copy of the weights as 32-bit floats.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.len()];
        self.widen(&mut values);
        values
    }

    /// Returns the weights as 32-bit floats, borrowed if they are stored as such.
    pub fn floats(&self) -> Cow<'a, [f32]> {
        match self {
            Self::Fp32(values) => Cow::Borrowed(values),
            narrow => Cow::Owned(narrow.to_f32()),
        }
    }

    /// Returns the bytes of the weights.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Fp32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) | Self::Fp16(values) => bytemuck::cast_slice(values),
        }
    }

    /// Prefetches the cache lines of the weights.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        super::simd::prefetch(self.bytes());
    }
}

dispatched! {
    fn widen(stored: Elements<'_>, values: &mut [f32]) = widen_with
}

#[inline(always)]
fn widen_with<L: Lanes>(stored: Elements<'_>, values: &mut [f32]) {
    match stored {
        Elements::Fp32(stored) => values.copy_from_slice(stored),
        Elements::Bf16(stored) => widen_row::<L, Bf16>(stored, values),
        Elements::Fp16(stored) => widen_row::<L, Fp16>(stored, values),
    }
}

impl<'a> ElementsMut<'a> {
    /// Returns the bytes of the weights.
    pub fn bytes_mut(self) -> &'a mut [u8] {
        match self {
            Self::Fp32(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) | Self::Fp16(values) => bytemuck::cast_slice_mut(values),
        }
    }

    /// Returns the first `length` weights, and the rest.
    ///
    /// # Panics
    ///
    /// If there are fewer weights.
    pub fn split_at(self, length: usize) -> (Self, Self) {
        match self {
            Self::Fp32(values) => {
                let (first, rest) = values.split_at_mut(length);
                (Self::Fp32(first), Self::Fp32(rest))
            }
            Self::Bf16(values) => {
                let (first, rest) = values.split_at_mut(length);
                (Self::Bf16(first), Self::Bf16(rest))
            }
            Self::Fp16(values) => {
                let (first, rest) = values.split_at_mut(length);
                (Self::Fp16(first), Self::Fp16(rest))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    /// Numbers of all magnitudes, including special values.
    fn numbers() -> impl Strategy<Value = f32> {
        let special =
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65_504.0, 65_519.9, 5.9e-8, 3e-8];
        prop_oneof![
            any::<u32>().prop_map(f32::from_bits),
            (-1.0_f32..1.0, -30_i32..20).prop_map(|(value, exponent)| value * (exponent as f32).exp2()),
            prop::sample::select(special.to_vec()),
        ]
    }

    #[test]
    fn all_stored_numbers_are_widened_and_narrowed_back() {
        for bits in 0..=u16::MAX {
            let (b, h) = (Bf16::widen(bits), Fp16::widen(bits));
            assert!(b == bf16::from_bits(bits).to_f32() || b.is_nan() && bf16::from_bits(bits).is_nan());
            assert!(h == f16::from_bits(bits).to_f32() || h.is_nan() && f16::from_bits(bits).is_nan());
            for noise in [0, 1, 0x800, 0x1fff] {
                assert!(narrow_fp16(h, noise) == bits || h.is_nan(), "{bits:x}");
                assert!(narrow_bf16(b, noise << 3) == bits || b.is_nan(), "{bits:x}");
            }
            assert!(nearest_bf16(b) == bits || b.is_nan() && Bf16::widen(nearest_bf16(b)).is_nan());
            assert!(nearest_fp16(h) == bits || h.is_nan() && Fp16::widen(nearest_fp16(h)).is_nan());
            let stored = [bits; 11];
            let wide = |elements: Elements<'_>| elements.to_f32();
            assert!(wide(Elements::Bf16(&stored)).iter().all(|w| w.to_bits() == b.to_bits()));
            // The processor's instruction makes NaN quiet.
            assert!(wide(Elements::Fp16(&stored)).iter().all(|w| *w == h || w.is_nan() && h.is_nan()));
        }
    }

    proptest! {
        #[test]
        fn the_nearest_number_is_that_of_ieee(value in numbers()) {
            let (b, h) = (bf16::from_f32(value), f16::from_f32(value));
            let same = |found: u16, expected: u16, infinite: bool, largest: u16| {
                // Finite values stay finite.
                let expected = if infinite && value.is_finite() { largest | (expected & 0x8000) } else { expected };
                found == expected
            };
            if value.is_nan() {
                prop_assert!(Bf16::widen(nearest_bf16(value)).is_nan() && Fp16::widen(nearest_fp16(value)).is_nan());
            } else {
                prop_assert!(same(nearest_bf16(value), b.to_bits(), b.is_infinite(), 0x7f7f), "{value}");
                prop_assert!(same(nearest_fp16(value), h.to_bits(), h.is_infinite(), 0x7bff), "{value}");
            }
        }

        #[test]
        fn rounding_takes_a_neighbour(value in numbers(), noise in 0_u32..1 << 16) {
            let wide = [Bf16::widen(narrow_bf16(value, noise)), Fp16::widen(narrow_fp16(value, noise >> 3))];
            if !value.is_finite() {
                prop_assert!(wide.iter().all(|w| w.to_bits() == value.to_bits() || w.is_nan() && value.is_nan()));
                return Ok(());
            }
            for (found, largest, least, digits) in [(wide[0], bf16::MAX.to_f32(), f32::from_bits(1 << 16), 7), (wide[1], 65_504.0, 2_f32.powi(-24), 10)] {
                prop_assert!(found.is_finite());
                let step = (value.abs() * 2_f32.powi(-digits)).max(least);
                prop_assert!((found - value.clamp(-largest, largest)).abs() <= step, "{value} {found}");
            }
        }
    }

    /// The mean over all noise values is the exact value.
    #[test]
    fn rounding_is_unbiased() {
        for value in [1.0_f32, 1.003, -1.003, 0.1, 3.1e-5, 1e-6, -4.4e-7, 6e-8, 1e-8, 1000.5, 60_000.7] {
            let exact = f64::from(value);
            let fp16 = (0..1 << 13).map(|noise| f64::from(Fp16::widen(narrow_fp16(value, noise))));
            let mean = fp16.sum::<f64>() / f64::from(1 << 13);
            let step = (exact.abs() * 2_f64.powi(-10)).max(2_f64.powi(-24));
            // The sum with the smallest normal number is rounded to 2^-13 of a step.
            assert!((mean - exact).abs() <= step * 2_f64.powi(-13), "fp16 {value}: {mean}");
            let bf16 = (0..1 << 16).map(|noise| f64::from(Bf16::widen(narrow_bf16(value, noise))));
            assert_eq!(bf16.sum::<f64>() / f64::from(1 << 16), exact, "bf16 {value}");
        }
    }

    /// The noise is uniform, and differs between seeds, steps, tables, rows and columns.
    #[test]
    fn noise_is_uniform_and_independent() {
        let draws = |noise: Noise, row: usize, count: usize| -> Vec<u32> {
            (0..count).map(|column| noise.row(row).of(column)).collect()
        };
        let noise = Noise::new(1, 2, 3);
        // Pearson's chi-squared test of 256 bins: 255 ± 6 standard deviations of 22.6.
        for shift in [24, 16, 8, 0] {
            let mut bins = [0_u32; 256];
            for row in 0..1000 {
                draws(noise, row, 64).iter().for_each(|bits| bins[(bits >> shift) as usize & 255] += 1);
            }
            let chi: f64 = bins.iter().map(|&n| (f64::from(n) - 250.0).powi(2) / 250.0).sum();
            assert!((120.0..390.0).contains(&chi), "{chi}");
        }
        let first = draws(noise, 5, 64);
        for (other, row) in
            [(Noise::new(2, 2, 3), 5), (Noise::new(1, 3, 3), 5), (Noise::new(1, 2, 4), 5), (noise, 6)]
        {
            let equal_bits: u32 =
                first.iter().zip(draws(other, row, 64)).map(|(a, b)| (!(a ^ b)).count_ones()).sum();
            // 1,024 of 2,048 bits ± 5 standard deviations.
            assert!((911..1137).contains(&equal_bits), "{equal_bits}");
        }
        // A shard draws the same bits as the whole table at the same rows and columns.
        assert_eq!(draws(noise.of_shard(3, 16), 2, 48), first[16..]);
    }
}
