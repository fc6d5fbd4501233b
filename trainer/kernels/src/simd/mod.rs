//! SIMD vectors of eight floats: AVX2 with FMA and F16C if the processor has them, otherwise plain arrays.
//! Compute-bound kernels use vectors of sixteen floats if the processor has AVX-512.
//!
//! Kernels are written once, generic over [`Lanes`]. [`dispatched!`] turns a generic kernel into a function that
//! detects the processor's instructions and calls the matching copy. Sums of the copies differ in their last bits,
//! because FMA rounds once and wider vectors add in another order.
//!
//! The vector types of AVX2 and AVX-512 are private. Only [`run`] passes them to a kernel, and only if the
//! processor has the instructions.

#[cfg(target_arch = "x86_64")]
mod x86;

/// The number of 32-bit floats in a vector.
pub const WIDTH: usize = 8;
/// The number of 32-bit floats in a vector of AVX-512.
pub(crate) const WIDE: usize = 16;

/// A vector of `N` 32-bit floats, eight or sixteen.
pub trait Lanes<const N: usize = WIDTH>: Copy {
    /// The vector of eight floats, which kernels use for remainders.
    type Narrow: Lanes;

    /// Returns a vector with `value` in all lanes.
    fn splat(value: f32) -> Self;
    /// Loads a vector of floats.
    fn load(values: &[f32; N]) -> Self;
    /// Loads bfloat16 values, which are the upper halves of floats, and converts them to floats.
    fn load_bf16(values: &[u16; N]) -> Self;
    /// Loads 16-bit floats of IEEE 754 and converts them to 32-bit floats.
    fn load_fp16(values: &[u16; N]) -> Self;
    /// Stores the lanes.
    fn store(self, values: &mut [f32; N]);
    /// `self + a * b`.
    fn fma(self, a: Self, b: Self) -> Self;
    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// Returns the larger value of each pair of lanes.
    fn max(self, other: Self) -> Self;
    /// Returns 2 to the power of each lane, for lanes up to 127; zero for lanes below -126, and NaN for NaN.
    fn exp2(self) -> Self;

    /// Transposes a matrix of eight rows and eight columns.
    #[inline(always)]
    fn transpose(rows: [Self; WIDTH]) -> [Self; WIDTH]
    where
        Self: Lanes,
    {
        let rows = rows.map(|row| Lanes::<WIDTH>::to_array(row));
        std::array::from_fn(|column| <Self as Lanes>::load(&rows.map(|row| row[column])))
    }

    /// Returns the lanes as an array.
    #[inline(always)]
    fn to_array(self) -> [f32; N] {
        let mut values = [0.0; N];
        self.store(&mut values);
        values
    }

    /// Returns the sum of the lanes. Adds the upper half of the lanes to the lower half, until one lane is left.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut values = self.to_array();
        let mut half = N / 2;
        while half > 0 {
            for i in 0..half {
                values[i] += values[i + half];
            }
            half /= 2;
        }
        values[0]
    }

    /// Returns the largest lane.
    #[inline(always)]
    fn largest(self) -> f32 {
        self.to_array().into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// Converts a 16-bit float to a 32-bit float. The exponent and the mantissa are moved to their new positions, and
/// the value is scaled by the difference of the exponent biases, which is exact for subnormal numbers too.
#[inline(always)]
pub(crate) fn widen_fp16(stored: u16) -> f32 {
    let (sign, magnitude) = (u32::from(stored & 0x8000) << 16, u32::from(stored & 0x7fff));
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | sign)
}

/// A vector for any processor.
#[derive(Clone, Copy)]
struct Portable([f32; WIDTH]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    type Narrow = Self;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; WIDTH])
    }
    #[inline(always)]
    fn load(values: &[f32; WIDTH]) -> Self {
        Self(*values)
    }
    #[inline(always)]
    fn store(self, values: &mut [f32; WIDTH]) {
        *values = self.0;
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        self.add(a.mul(b))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    fn load_bf16(values: &[u16; WIDTH]) -> Self {
        Self(values.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    fn load_fp16(values: &[u16; WIDTH]) -> Self {
        Self(values.map(widen_fp16))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, f32::max)
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        Self(self.0.map(|x| if x < -126.0 { 0.0 } else { x.exp2() }))
    }
}

/// A kernel and its arguments.
pub trait Kernel: Sized {
    /// The type of the kernel's result.
    type Output;
    /// Whether the kernel has a copy for AVX-512; otherwise processors with AVX-512 run the AVX2 copy.
    const WIDE: bool;

    /// Runs the kernel with the vector type `L` of `N` floats.
    fn run<L: Lanes<N>, const N: usize>(self) -> Self::Output;
}

/// Runs the copy of a kernel that fits the processor, and returns its result.
#[inline]
pub fn run<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if K::WIDE && may_use(WIDE) && x86::has_avx512() {
            // SAFETY: the processor has all instruction sets that the function enables.
            return unsafe { x86::with_avx512(kernel) };
        }
        if may_use(WIDTH) && x86::has_avx2() {
            // SAFETY: as above.
            return unsafe { x86::with_avx2(kernel) };
        }
    }
    kernel.run::<Portable, WIDTH>()
}

/// Returns whether kernels of this thread may use vectors of `_width` elements: always, except within `each_copy`
/// in tests.
#[inline(always)]
fn may_use(_width: usize) -> bool {
    #[cfg(test)]
    return _width <= WIDEST.get();
    #[cfg(not(test))]
    true
}

#[cfg(test)]
thread_local! {
    static WIDEST: std::cell::Cell<usize> = const { std::cell::Cell::new(WIDE) };
}

/// Calls `work` once per copy of the kernels that the processor can run. `work` must call kernels on this thread.
#[cfg(test)]
pub(crate) fn each_copy(mut work: impl FnMut()) {
    for width in [0, WIDTH, WIDE] {
        WIDEST.set(width);
        work();
    }
}

/// Turns a kernel that is generic over `Lanes` into a function that runs the copy for this processor. `wide` before
/// the kernel's name means that the kernel is also generic over the number of lanes.
#[macro_export]
macro_rules! dispatched {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? = wide $generic:ident) => {
        $crate::dispatched! {
            @ true, [$generic::<L, N>], $(#[$doc])* $vis fn $name($($arg: $type),*) $(-> $ret)?
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? = $generic:ident) => {
        $crate::dispatched! {
            @ false, [$generic::<L::Narrow>], $(#[$doc])* $vis fn $name($($arg: $type),*) $(-> $ret)?
        }
    };
    (
        @ $wide:literal, [$($kernel:tt)*],
        $(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?
    ) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
        $vis fn $name($($arg: $type),*) $(-> $ret)? {
            struct Call<T>(T);
            impl $crate::simd::Kernel for Call<($($type,)*)> {
                #[allow(unused_parens, reason = "without a type it is the unit type")]
                type Output = ($($ret)?);
                const WIDE: bool = $wide;

                #[inline(always)]
                fn run<L: $crate::simd::Lanes<N>, const N: usize>(self) -> Self::Output {
                    let Self(($($arg,)*)) = self;
                    $($kernel)*($($arg),*)
                }
            }
            $crate::simd::run(Call(($($arg,)*)))
        }
    };
}
pub use dispatched;

/// The number of independent sums, so that an addition need not wait for the previous one.
const CHAINS: usize = 4;

/// Returns `Σ a[i] b[i]`; the slices have the same length.
#[inline(always)]
pub(crate) fn dot<L: Lanes<N>, const N: usize>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<N>(), b.as_chunks::<N>());
    let mut sums = [L::splat(0.0); CHAINS];
    let ((a, a_last), (b, b_last)) = (a.as_chunks::<CHAINS>(), b.as_chunks::<CHAINS>());
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum = sum.fma(L::load(a), L::load(b));
        }
    }
    for ((sum, a), b) in sums.iter_mut().zip(a_last).zip(b_last) {
        *sum = sum.fma(L::load(a), L::load(b));
    }
    a_rest.iter().zip(b_rest).fold(add_chains(sums).sum(), |sum, (a, b)| sum + a * b)
}

/// Returns `Σ values[i]`.
#[inline(always)]
pub(crate) fn sum<L: Lanes<N>, const N: usize>(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<N>();
    let mut sums = [L::splat(0.0); CHAINS];
    let (blocks, last) = chunks.as_chunks::<CHAINS>();
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(sum, chunk)| *sum = sum.add(L::load(chunk)));
    }
    sums.iter_mut().zip(last).for_each(|(sum, chunk)| *sum = sum.add(L::load(chunk)));
    add_chains(sums).sum() + rest.iter().sum::<f32>()
}

#[inline(always)]
fn add_chains<L: Lanes<N>, const N: usize>([a, b, c, d]: [L; CHAINS]) -> L {
    a.add(b).add(c.add(d))
}

/// Computes `y[i] += a x[i]`; the slices have the same length.
#[inline(always)]
pub(crate) fn axpy<L: Lanes<N>, const N: usize>(y: &mut [f32], a: f32, x: &[f32]) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<N>(), x.as_chunks::<N>());
    let factor = L::splat(a);
    for (y, x) in y.iter_mut().zip(x) {
        L::load(y).fma(factor, L::load(x)).store(y);
    }
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y += a * x);
}

/// Prefetches the cache lines of `values`.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, which is only a hint and accesses no memory that a
        // program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn powers_with<L: Lanes<N>, const N: usize>(from: f32, worst: &mut f64) {
        let exponents: [f32; N] = std::array::from_fn(|i| from + i as f32 * 0.013);
        for (power, exponent) in L::load(&exponents).exp2().to_array().iter().zip(exponents) {
            let expected = f64::from(exponent).exp2();
            if exponent < -126.0 {
                assert_eq!(*power, 0.0);
            } else {
                *worst = worst.max((f64::from(*power) / expected - 1.0).abs());
            }
        }
    }
    dispatched! { fn powers(from: f32, worst: &mut f64) = wide powers_with }

    #[test]
    fn powers_of_two_are_exact_to_a_rounding() {
        let mut worst = 0.0;
        for step in 0..20_000 {
            each_copy(|| powers(-130.0 + step as f32 * 0.0128, &mut worst));
        }
        assert!(worst < 2.5e-7, "{worst}");
    }

    fn powers_of_all_with<L: Lanes<N>, const N: usize>(exponents: &[f32; WIDE]) -> Vec<f32> {
        exponents.as_chunks::<N>().0.iter().flat_map(|chunk| L::load(chunk).exp2().to_array()).collect()
    }
    dispatched! { fn powers_of_all(exponents: &[f32; WIDE]) -> Vec<f32> = wide powers_of_all_with }

    #[test]
    fn the_power_of_nan_is_nan() {
        each_copy(|| {
            for lane in 0..WIDE {
                let mut exponents = [-f32::INFINITY; WIDE];
                exponents[lane] = f32::NAN;
                let powers = powers_of_all(&exponents);
                assert_eq!(powers.len(), WIDE);
                for (i, power) in powers.into_iter().enumerate() {
                    assert!(if i == lane { power.is_nan() } else { power == 0.0 }, "{lane} {i}: {power}");
                }
            }
        });
    }

    fn sums_with<L: Lanes<N>, const N: usize>(a: &[f32], b: &[f32]) -> (f32, f32, Vec<f32>) {
        let mut y = a.to_vec();
        axpy::<L, N>(&mut y, 2.0, b);
        (dot::<L, N>(a, b), sum::<L, N>(a), y)
    }
    dispatched! { fn sums(a: &[f32], b: &[f32]) -> (f32, f32, Vec<f32>) = wide sums_with }

    #[test]
    fn whole_and_partial_vectors_are_summed() {
        for length in 0..80 {
            let a: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let b: Vec<f32> = (0..length).map(|i| (i % 5) as f32 - 2.0).collect();
            let dot: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
            let y: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + 2.0 * b).collect();
            let expected = (dot, a.iter().sum(), y);
            each_copy(|| assert_eq!(sums(&a, &b), expected));
        }
    }

    fn assert_widens<L: Lanes<N>, const N: usize>() {
        for first in (0..=u16::MAX - N as u16).step_by(N) {
            let bits: [u16; N] = std::array::from_fn(|i| first + i as u16);
            let same =
                |(found, expected): (f32, f32)| found == expected || found.is_nan() && expected.is_nan();
            let bf16 = bits.map(|bits| half::bf16::from_bits(bits).to_f32());
            let fp16 = bits.map(|bits| half::f16::from_bits(bits).to_f32());
            assert!(L::load_bf16(&bits).to_array().into_iter().zip(bf16).all(same), "{first}");
            assert!(L::load_fp16(&bits).to_array().into_iter().zip(fp16).all(same), "{first}");
        }
    }

    dispatched! { fn widens() = wide assert_widens }

    #[test]
    fn halves_are_widened_exactly() {
        each_copy(widens);
    }

    fn width_with<L: Lanes<N>, const N: usize>() -> usize {
        N
    }
    dispatched! { fn width() -> usize = wide width_with }

    #[test]
    fn every_instruction_set_is_run() {
        let mut widths = Vec::new();
        each_copy(|| widths.push(width()));
        #[cfg(target_arch = "x86_64")]
        let widest = if x86::has_avx512() { WIDE } else { WIDTH };
        #[cfg(not(target_arch = "x86_64"))]
        let widest = WIDTH;
        assert_eq!(widths, [WIDTH, WIDTH, widest]);
    }
}
