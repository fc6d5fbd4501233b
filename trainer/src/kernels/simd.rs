//! Eight floats at a time: AVX2 with FMA and F16C where the processor has them, plain arrays elsewhere. Matrix products take
//! [sixteen](Wide), with AVX-512 where it is.
//!
//! Kernels are written once, generic over [`Lanes`] or [`Wide`]; [`dispatched!`] makes of one a function that asks the
//! processor and calls the copy that fits it. Sums of the copies differ in their last bits, as FMA rounds once.

/// Floats in a vector.
pub(crate) const WIDTH: usize = 8;
/// Floats in a wide one.
pub(crate) const WIDE: usize = 2 * WIDTH;

/// A vector of eight floats.
///
/// An implementation may need instructions that not every processor has; it is named only by [`dispatched!`], inside a
/// function that is compiled for them and called only where the processor has them.
pub(crate) trait Lanes: Floats<WIDTH> {
    /// The eight floats whose upper halves these are.
    fn load_bf16(values: &[u16; WIDTH]) -> Self;
    /// The eight floats of these bits of 16-bit floats.
    fn load_fp16(values: &[u16; WIDTH]) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// The larger of each lane.
    fn max(self, other: Self) -> Self;
    /// 2 to the power of each lane, for lanes up to 127; zero below -126.
    fn exp2(self) -> Self;

    /// The lanes as an array.
    #[inline(always)]
    fn to_array(self) -> [f32; WIDTH] {
        let mut values = [0.0; WIDTH];
        self.store(&mut values);
        values
    }

    /// The sum of the lanes, pairwise.
    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.to_array();
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    /// The largest lane.
    #[inline(always)]
    fn largest(self) -> f32 {
        self.to_array().into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// What a matrix product does with vectors of `N` floats; implementations are named as those of [`Lanes`] are.
pub(crate) trait Floats<const N: usize>: Copy {
    /// All lanes `value`.
    fn splat(value: f32) -> Self;
    /// The floats.
    fn load(values: &[f32; N]) -> Self;
    /// Writes the lanes.
    fn store(self, values: &mut [f32; N]);
    /// `self + a * b`.
    fn fma(self, a: Self, b: Self) -> Self;
    /// `self + other`.
    fn add(self, other: Self) -> Self;
}

/// Sixteen floats, and the shape of a matrix product's tiles of them.
pub(crate) trait Wide: Floats<WIDE> {
    /// For what is left when sixteen are too many.
    type Narrow: Lanes;
    /// Whether the registers hold 12 rows of two vectors; otherwise 6 rows of one.
    const MANY_REGISTERS: bool;
}

/// Two vectors of eight.
#[derive(Clone, Copy)]
pub(crate) struct Pair<L>([L; 2]);

#[inline(always)]
fn halves(values: &[f32; WIDE]) -> [&[f32; WIDTH]; 2] {
    let (halves, _) = values.as_chunks::<WIDTH>();
    [&halves[0], &halves[1]]
}

impl<L: Lanes> Floats<WIDE> for Pair<L> {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([L::splat(value); 2])
    }
    #[inline(always)]
    fn load(values: &[f32; WIDE]) -> Self {
        let [low, high] = halves(values);
        Self([L::load(low), L::load(high)])
    }
    #[inline(always)]
    fn store(self, values: &mut [f32; WIDE]) {
        let (halves, _) = values.as_chunks_mut::<WIDTH>();
        self.0[0].store(&mut halves[0]);
        self.0[1].store(&mut halves[1]);
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        Self([self.0[0].fma(a.0[0], b.0[0]), self.0[1].fma(a.0[1], b.0[1])])
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self([self.0[0].add(other.0[0]), self.0[1].add(other.0[1])])
    }
}

impl<L: Lanes> Wide for Pair<L> {
    type Narrow = L;
    const MANY_REGISTERS: bool = false;
}

/// Any processor.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; WIDTH]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Floats<WIDTH> for Portable {
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
}

impl Lanes for Portable {
    #[inline(always)]
    fn load_bf16(values: &[u16; WIDTH]) -> Self {
        Self(values.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    fn load_fp16(values: &[u16; WIDTH]) -> Self {
        Self(values.map(super::element::widen_fp16))
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

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Floats, Lanes, WIDE, WIDTH, Wide};

    /// Whether the processor has AVX2, FMA and F16C, which came together; the answer is remembered.
    #[inline]
    pub(crate) fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    /// Whether the processor has AVX-512's foundation too; the answer is remembered.
    #[inline]
    pub(crate) fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f") && has_avx2()
    }

    /// Processors of servers since 2017.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    // SAFETY: for every block below: only `dispatched!` names this type, in a function that runs after `has_avx512` said
    // yes, so the processor has the instruction. Loads and stores go through references to sixteen floats.
    impl Floats<WIDE> for Avx512 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm512_set1_ps(value) })
        }
        #[inline(always)]
        fn load(values: &[f32; WIDE]) -> Self {
            // SAFETY: as above; unaligned loads are allowed.
            Self(unsafe { _mm512_loadu_ps(values.as_ptr()) })
        }
        #[inline(always)]
        fn store(self, values: &mut [f32; WIDE]) {
            // SAFETY: as above; unaligned stores are allowed.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }
    }

    impl Wide for Avx512 {
        type Narrow = Avx2;
        const MANY_REGISTERS: bool = true;
    }

    /// x86-64 processors since 2013.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    // SAFETY: for every block below: only `dispatched!` names this type, in a function that runs after `has_avx2` said
    // yes, so the processor has the instruction. Loads and stores go through references to eight floats.
    impl Floats<WIDTH> for Avx2 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        fn load(values: &[f32; WIDTH]) -> Self {
            // SAFETY: as above; unaligned loads are allowed.
            Self(unsafe { _mm256_loadu_ps(values.as_ptr()) })
        }
        #[inline(always)]
        fn store(self, values: &mut [f32; WIDTH]) {
            // SAFETY: as above; unaligned stores are allowed.
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn fma(self, a: Self, b: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_fmadd_ps(a.0, b.0, self.0) })
        }
        #[inline(always)]
        fn add(self, other: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }
    }

    impl Lanes for Avx2 {
        #[inline(always)]
        fn load_bf16(values: &[u16; WIDTH]) -> Self {
            // SAFETY: as above; the eight halves are 16 bytes.
            unsafe {
                let halves = _mm_loadu_si128(values.as_ptr().cast());
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves))))
            }
        }
        #[inline(always)]
        fn load_fp16(values: &[u16; WIDTH]) -> Self {
            // SAFETY: as above; the eight halves are 16 bytes.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(values.as_ptr().cast())) })
        }
        #[inline(always)]
        fn sub(self, other: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn mul(self, other: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_mul_ps(self.0, other.0) })
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            // SAFETY: as above.
            Self(unsafe { _mm256_max_ps(self.0, other.0) })
        }
        /// `2^n · 2^f` with n the nearest integer: the Taylor series of `2^f` to the seventh power, whose error for
        /// |f| ≤ 1/2 is below a float's rounding, and n put into the exponent.
        #[inline(always)]
        fn exp2(self) -> Self {
            const LN2: f64 = std::f64::consts::LN_2;
            const COEFFICIENTS: [f32; 6] = [
                (LN2 * LN2 * LN2 * LN2 * LN2 * LN2 / 720.0) as f32,
                (LN2 * LN2 * LN2 * LN2 * LN2 / 120.0) as f32,
                (LN2 * LN2 * LN2 * LN2 / 24.0) as f32,
                (LN2 * LN2 * LN2 / 6.0) as f32,
                (LN2 * LN2 / 2.0) as f32,
                LN2 as f32,
            ];
            // SAFETY: as above.
            unsafe {
                let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
                let f = _mm256_sub_ps(self.0, n);
                let mut series = _mm256_set1_ps((LN2 * LN2 * LN2 * LN2 * LN2 * LN2 * LN2 / 5040.0) as f32);
                for coefficient in COEFFICIENTS {
                    series = _mm256_fmadd_ps(series, f, _mm256_set1_ps(coefficient));
                }
                series = _mm256_fmadd_ps(series, f, _mm256_set1_ps(1.0));
                let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
                let power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(series), exponent));
                let enough = _mm256_cmp_ps::<_CMP_GE_OQ>(self.0, _mm256_set1_ps(-126.0));
                Self(_mm256_and_ps(power, enough))
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{has_avx2, has_avx512};

/// Makes of a kernel that is generic over [`Lanes`] a function that runs the copy for this processor; `= wide` before its name
/// if it is generic over [`Wide`].
macro_rules! dispatched {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? = wide $generic:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
        $vis fn $name($($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::kernels::simd::{Avx2, Avx512, Pair, has_avx2, has_avx512};
                #[target_feature(enable = "avx512f,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as the function around it")]
                fn with_avx512($($arg: $type),*) $(-> $ret)? {
                    $generic::<Avx512>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as the function around it")]
                fn with_avx2($($arg: $type),*) $(-> $ret)? {
                    $generic::<Pair<Avx2>>($($arg),*)
                }
                if has_avx512() {
                    // SAFETY: the processor has all that the function is compiled for.
                    return unsafe { with_avx512($($arg),*) };
                }
                if has_avx2() {
                    // SAFETY: as above.
                    return unsafe { with_avx2($($arg),*) };
                }
            }
            $generic::<$crate::kernels::simd::Pair<$crate::kernels::simd::Portable>>($($arg),*)
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? = $generic:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "matrices come with their strides")]
        $vis fn $name($($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments, reason = "as the function around it")]
                fn with_avx2($($arg: $type),*) $(-> $ret)? {
                    $generic::<$crate::kernels::simd::Avx2>($($arg),*)
                }
                if $crate::kernels::simd::has_avx2() {
                    // SAFETY: the processor has AVX2, FMA and F16C, which is all that the function is compiled for.
                    return unsafe { with_avx2($($arg),*) };
                }
            }
            $generic::<$crate::kernels::simd::Portable>($($arg),*)
        }
    };
}
pub(crate) use dispatched;

/// Sums that are carried side by side, so that an addition need not wait for the one before.
const CHAINS: usize = 4;

/// `Σ a[i] b[i]`; the slices are of one length.
#[inline(always)]
pub(crate) fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<WIDTH>(), b.as_chunks::<WIDTH>());
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

/// `Σ values[i]`.
#[inline(always)]
pub(crate) fn sum<L: Lanes>(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<WIDTH>();
    let mut sums = [L::splat(0.0); CHAINS];
    let (blocks, last) = chunks.as_chunks::<CHAINS>();
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(sum, chunk)| *sum = sum.add(L::load(chunk)));
    }
    sums.iter_mut().zip(last).for_each(|(sum, chunk)| *sum = sum.add(L::load(chunk)));
    add_chains(sums).sum() + rest.iter().sum::<f32>()
}

#[inline(always)]
fn add_chains<L: Lanes>([a, b, c, d]: [L; CHAINS]) -> L {
    a.add(b).add(c.add(d))
}

/// `y[i] += a x[i]`; the slices are of one length.
#[inline(always)]
pub(crate) fn axpy<L: Lanes>(y: &mut [f32], a: f32, x: &[f32]) {
    let ((y, y_rest), (x, x_rest)) = (y.as_chunks_mut::<WIDTH>(), x.as_chunks::<WIDTH>());
    let factor = L::splat(a);
    for (y, x) in y.iter_mut().zip(x) {
        L::load(y).fma(factor, L::load(x)).store(y);
    }
    y_rest.iter_mut().zip(x_rest).for_each(|(y, x)| *y += a * x);
}

/// Asks the processor for the cache lines of `values`, which are read soon.
#[inline(always)]
pub(crate) fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in values.chunks(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, and it reads nothing that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn powers_with<L: Lanes>(from: f32, worst: &mut f64) {
        let exponents: [f32; WIDTH] = std::array::from_fn(|i| from + i as f32 * 0.013);
        for (power, exponent) in L::load(&exponents).exp2().to_array().iter().zip(exponents) {
            let expected = f64::from(exponent).exp2();
            if exponent < -126.0 {
                assert_eq!(*power, 0.0);
            } else {
                *worst = worst.max((f64::from(*power) / expected - 1.0).abs());
            }
        }
    }
    dispatched! { fn powers(from: f32, worst: &mut f64) = powers_with }

    #[test]
    fn powers_of_two_are_exact_to_a_rounding() {
        let mut worst = 0.0;
        for step in 0..20_000 {
            powers(-130.0 + step as f32 * 0.0128, &mut worst);
            powers_with::<Portable>(-130.0 + step as f32 * 0.0128, &mut worst);
        }
        assert!(worst < 2.5e-7, "{worst}");
    }

    fn sums_with<L: Lanes>(a: &[f32], b: &[f32]) -> (f32, f32, Vec<f32>) {
        let mut y = a.to_vec();
        axpy::<L>(&mut y, 2.0, b);
        (dot::<L>(a, b), sum::<L>(a), y)
    }
    dispatched! { fn sums(a: &[f32], b: &[f32]) -> (f32, f32, Vec<f32>) = sums_with }

    #[test]
    fn whole_and_partial_vectors_are_summed() {
        for length in 0..80 {
            let a: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let b: Vec<f32> = (0..length).map(|i| (i % 5) as f32 - 2.0).collect();
            let dot: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
            let y: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + 2.0 * b).collect();
            let expected = (dot, a.iter().sum(), y);
            assert_eq!(sums(&a, &b), expected);
            assert_eq!(sums_with::<Portable>(&a, &b), expected);
        }
    }
}
