//! Sums of floats without rounding: the bits of the result do not depend on the order or grouping of the
//! terms.
//!
//! A sum is a fixed-point number that is wide enough for all bits of all terms (Kulisch and Miranker, "The
//! arithmetic of the digital computer: a new approach", SIAM Review 1986). Its lowest bit has the value
//! 2^-350: this is the lowest bit of a term with 53 bits whose highest bit is 2^-298, the square of the
//! smallest `f32`. The squares of the largest `f32`s are below 2^256. This leaves 64 bits for the number of
//! terms, and one for the sign.

const LIMBS: usize = 11;
const BYTES: usize = 8 * LIMBS;
/// The exponent field of doubles with 53 bits whose lowest bit is 2^-350.
const LOWEST_EXPONENT: usize = 1075 - 350;
/// The numbers 2^-350 and 2^64.
const LOWEST: f64 = f64::from_bits((1023 - 350) << 52);
const LIMB: f64 = f64::from_bits((1023 + 64) << 52);
/// The largest number of times that a term can be added at once, so that products fit into 128 bits.
pub(super) const MOST_TIMES: usize = 1 << 10;

/// An exact sum in two's complement, lowest limb first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Sum([u64; LIMBS]);

impl Sum {
    /// Adds `term`, a multiple of 2^-350, `times` times. Terms below 2^-298 count as 0.
    fn add(&mut self, term: f64, times: usize) {
        let bits = term.to_bits();
        let exponent = (bits >> 52) as usize & 0x7FF;
        let Some(shift) = exponent.checked_sub(LOWEST_EXPONENT) else { return };
        let mantissa = (bits & ((1 << 52) - 1)) | (1 << 52);
        let mut carry = (i128::from(mantissa) * times as i128) << (shift % 64);
        if term.is_sign_negative() {
            carry = -carry;
        }
        for limb in &mut self.0[shift / 64..] {
            carry += i128::from(*limb);
            *limb = carry as u64;
            carry >>= 64;
            if carry == 0 {
                break;
            }
        }
    }

    fn merge(&mut self, other: &Self) {
        let mut carry = 0_u128;
        for (limb, other) in self.0.iter_mut().zip(other.0) {
            carry += u128::from(*limb) + u128::from(other);
            *limb = carry as u64;
            carry >>= 64;
        }
    }

    /// Returns the sum as a float, with an error of a few units in the last place.
    fn value(&self) -> f64 {
        let negative = self.0[LIMBS - 1] >> 63 == 1;
        let mut carry = negative;
        let magnitude = self.0.map(|limb| {
            let flipped = if negative { !limb } else { limb };
            let (limb, over) = flipped.overflowing_add(u64::from(carry));
            carry = over;
            limb
        });
        let magnitude =
            magnitude.iter().rev().fold(0.0_f64, |above, limb| above * LIMB + *limb as f64) * LOWEST;
        if negative { -magnitude } else { magnitude }
    }

    /// Returns the sum as two floats: [`value`](Self::value), and the remainder.
    fn parts(&self) -> [f64; 2] {
        let value = self.value();
        let mut rest = self.clone();
        rest.add(-value, 1);
        [value, rest.value()]
    }

    /// Writes the index of the first byte that is not 0, the number of bytes from there up to the sign
    /// extension, and these bytes.
    fn encode(&self, to: &mut Vec<u8>) {
        let bytes: Vec<u8> = self.0.iter().flat_map(|limb| limb.to_le_bytes()).collect();
        let mut end = BYTES;
        // The highest bit of the last byte is the sign of all omitted bytes.
        while end > 1 && bytes[end - 1] == ((bytes[end - 2] as i8) >> 7) as u8 {
            end -= 1;
        }
        let start = bytes[..end].iter().position(|byte| *byte != 0).unwrap_or(end);
        to.extend([start as u8, (end - start) as u8]);
        to.extend(&bytes[start..end]);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (&[start, length], rest) = from.split_first_chunk::<2>()?;
        let (start, length) = (usize::from(start), usize::from(length));
        let (found, rest) = rest.split_at_checked(length)?;
        *from = rest;
        let negative = found.last().is_some_and(|last| last >> 7 == 1);
        let mut bytes = [if negative { 0xFF } else { 0 }; BYTES];
        bytes.get_mut(..start)?.fill(0);
        bytes.get_mut(start..start + length)?.copy_from_slice(found);
        let (limbs, _) = bytes.as_chunks::<8>();
        Some(Self(std::array::from_fn(|i| u64::from_le_bytes(limbs[i]))))
    }
}

/// The sums of numbers and of their squares.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Moments {
    sum: Sum,
    squares: Sum,
}

impl Moments {
    /// Adds `x` up to [`MOST_TIMES`] times. `x` is an `f32`, or `ln(1 + |y|)` of an `f32` `y` with the sign
    /// of `y`. Their squares are multiples of 2^-298, because an `f32` is a multiple of 2^-149, and a
    /// logarithm below 2^-54 equals `y`.
    pub(super) fn add(&mut self, x: f64, times: usize) {
        let square = x * x;
        self.sum.add(x, times);
        self.squares.add(square, times);
        // The rounding error of the square.
        self.squares.add(x.mul_add(x, -square), times);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.sum.merge(&other.sum);
        self.squares.merge(&other.squares);
    }

    /// Returns the mean of `count` numbers; 0 if `count` is 0.
    pub(super) fn mean(&self, count: u64) -> f64 {
        self.sum.value() / count.max(1) as f64
    }

    /// Returns the population variance of `count` numbers; 0 if they are equal.
    ///
    /// The formula is `(count * squares - sum²) / count²`. If the mean is large, its two terms are nearly
    /// equal. They are therefore computed as pairs of floats (Dekker, "A floating-point technique for
    /// extending the available precision", 1971) with relative errors below 2^-101. Results below the error
    /// count as 0. The variance of different `f32`s is above it for up to 2^50 numbers.
    pub(super) fn variance(&self, count: u64) -> f64 {
        const NOISE: f64 = 16.0 * f64::EPSILON * f64::EPSILON;
        let count = count.max(1) as f64;
        let ([sum, sum_rest], [squares, squares_rest]) = (self.sum.parts(), self.squares.parts());
        let (scaled, square) = (count * squares, sum * sum);
        let lost = count.mul_add(squares, -scaled) - sum.mul_add(sum, -square);
        let rest = lost + count * squares_rest - (2.0 * sum + sum_rest) * sum_rest;
        let difference = scaled - square + rest;
        if difference > scaled.abs() * NOISE { difference / count / count } else { 0.0 }
    }

    pub(super) fn encode(&self, to: &mut Vec<u8>) {
        self.sum.encode(to);
        self.squares.encode(to);
    }

    pub(super) fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(Self { sum: Sum::decode(from)?, squares: Sum::decode(from)? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(numbers: impl IntoIterator<Item = f64>) -> Moments {
        let mut moments = Moments::default();
        numbers.into_iter().for_each(|x| moments.add(x, 1));
        moments
    }

    proptest! {
        /// The numbers are 40-bit integers at all scales, for which `i128` gives the exact mean and variance.
        #[test]
        fn moments_are_exact(
            numbers in prop::collection::vec(-1_000_000_000_000..1_000_000_000_000_i64, 1..50),
            scale in -100..80_i32,
        ) {
            let unit = 2.0_f64.powi(scale);
            let found = of(numbers.iter().map(|x| *x as f64 * unit));
            let count = numbers.len() as i128;
            let sum: i128 = numbers.iter().map(|x| i128::from(*x)).sum();
            let squares: i128 = numbers.iter().map(|x| i128::from(*x) * i128::from(*x)).sum();
            let mean = sum as f64 / count as f64 * unit;
            let variance = (count * squares - sum * sum) as f64 / (count * count) as f64 * unit * unit;
            prop_assert!((found.mean(count as u64) - mean).abs() <= 2e-15 * mean.abs());
            let error = (found.variance(count as u64) - variance).abs();
            prop_assert!(error <= 1e-14 * variance + 1e-30 * mean * mean);
        }

        #[test]
        fn adding_a_value_n_times_equals_n_additions_and_opposites_cancel(x in any::<f32>(), times in 0..=MOST_TIMES) {
            let x = f64::from(x);
            let mut found = Moments::default();
            found.add(x, times);
            prop_assert!(found == of(std::iter::repeat_n(x, times)));
            found.add(-x, times);
            prop_assert_eq!(found.sum, Sum::default());
        }

        #[test]
        fn equal_values_have_a_variance_of_zero(x in any::<f32>(), count in 1..3000_u64) {
            for x in [f64::from(x), f64::from(x).abs().ln_1p()] {
                let found = of(std::iter::repeat_n(x, count as usize));
                prop_assert_eq!(found.variance(count), 0.0);
                prop_assert!((found.mean(count) - x).abs() <= 2e-15 * x.abs());
            }
        }

        #[test]
        fn decoding_restores_encoded_moments(numbers in prop::collection::vec(any::<f32>(), 0..4)) {
            let moments = of(numbers.into_iter().map(f64::from));
            let mut bytes = Vec::new();
            moments.encode(&mut bytes);
            prop_assert!(bytes.len() <= 4 + 2 * BYTES);
            let mut from = &bytes[..];
            prop_assert_eq!(Moments::decode(&mut from), Some(moments));
            prop_assert!(from.is_empty());
        }
    }

    /// The smallest possible difference at a large mean gives a variance above 0.
    #[test]
    fn small_differences_at_a_large_mean_have_a_variance() {
        let (low, high) = (16_777_214.0, 16_777_215.0);
        let found = of(std::iter::repeat_n(low, 999).chain([high]));
        assert!((found.variance(1000) - 0.000_999).abs() < 1e-12);
    }
}
