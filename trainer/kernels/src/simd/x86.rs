//! The vector types of AVX2 and AVX-512. They are private: only the functions `with_…` pass them to a kernel.

use std::arch::x86_64::*;

use super::{Kernel, Lanes, WIDE, WIDTH};

const LN2: f64 = std::f64::consts::LN_2;

/// The coefficients of the Taylor series of `2^f`, from the seventh power down.
const SERIES: [f32; 8] = [
    (LN2 * LN2 * LN2 * LN2 * LN2 * LN2 * LN2 / 5040.0) as f32,
    (LN2 * LN2 * LN2 * LN2 * LN2 * LN2 / 720.0) as f32,
    (LN2 * LN2 * LN2 * LN2 * LN2 / 120.0) as f32,
    (LN2 * LN2 * LN2 * LN2 / 24.0) as f32,
    (LN2 * LN2 * LN2 / 6.0) as f32,
    (LN2 * LN2 / 2.0) as f32,
    LN2 as f32,
    1.0,
];

/// Returns whether the processor has AVX2, FMA and F16C, which were introduced together. The answer is cached.
#[inline]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Returns whether the processor has AVX-512F too. The answer is cached.
#[inline]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f") && has_avx2()
}

/// Runs the kernel's copy for AVX-512.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512, WIDE>()
}

/// Runs the kernel's copy for AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2, WIDTH>()
}

/// Implements operations on the lanes of two vectors, each by one instruction.
macro_rules! by_lane {
    ($($name:ident = $instruction:ident),*) => {
        $(
            #[inline(always)]
            fn $name(self, other: Self) -> Self {
                // SAFETY: as for the blocks of the implementation.
                Self(unsafe { $instruction(self.0, other.0) })
            }
        )*
    };
}

/// A vector of AVX-512F (server processors since 2017).
#[derive(Clone, Copy)]
struct Avx512(__m512);

// SAFETY: for every block below: the type is private, and only `with_avx512` passes it to a kernel, which may only be
// called if the processor has AVX-512F. Loads and stores use references to sixteen floats.
impl Lanes<WIDE> for Avx512 {
    type Narrow = Avx2;

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
    by_lane!(add = _mm512_add_ps, sub = _mm512_sub_ps, mul = _mm512_mul_ps, max = _mm512_max_ps);
    #[inline(always)]
    fn load_bf16(values: &[u16; WIDE]) -> Self {
        // SAFETY: as above; the sixteen halves are 32 bytes.
        unsafe {
            let halves = _mm256_loadu_si256(values.as_ptr().cast());
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))))
        }
    }
    #[inline(always)]
    fn load_fp16(values: &[u16; WIDE]) -> Self {
        // SAFETY: as above; the sixteen halves are 32 bytes.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(values.as_ptr().cast())) })
    }
    /// Computes the same as [`Avx2`]'s `exp2`, lane by lane.
    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            let f = _mm512_sub_ps(self.0, n);
            let mut series = _mm512_set1_ps(SERIES[0]);
            for coefficient in &SERIES[1..] {
                series = _mm512_fmadd_ps(series, f, _mm512_set1_ps(*coefficient));
            }
            // "Not less" is true for NaN, so NaN is preserved.
            let enough = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-126.0));
            Self(_mm512_maskz_scalef_ps(enough, series, n))
        }
    }
}

/// A vector of AVX2 (x86-64 processors since 2013).
#[derive(Clone, Copy)]
struct Avx2(__m256);

// SAFETY: for every block below: the type is private, and only `with_avx2` and, as [`Lanes::Narrow`], `with_avx512`
// pass it to a kernel. They may only be called if the processor has AVX2, FMA and F16C. Loads and
// stores use references to eight floats.
impl Lanes for Avx2 {
    type Narrow = Self;

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
    by_lane!(add = _mm256_add_ps, sub = _mm256_sub_ps, mul = _mm256_mul_ps, max = _mm256_max_ps);
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
    fn transpose(rows: [Self; WIDTH]) -> [Self; WIDTH] {
        let [Self(a), Self(b), Self(c), Self(d), Self(e), Self(f), Self(g), Self(h)] = rows;
        // SAFETY: as above. Swaps neighbouring lanes first, then neighbouring pairs of lanes, then halves.
        unsafe {
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            let (ef, gh) = (_mm256_unpacklo_ps(e, f), _mm256_unpacklo_ps(g, h));
            let (upper_ab, upper_cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            let (upper_ef, upper_gh) = (_mm256_unpackhi_ps(e, f), _mm256_unpackhi_ps(g, h));
            let quarters = [
                (_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0x44>(ef, gh)),
                (_mm256_shuffle_ps::<0xee>(ab, cd), _mm256_shuffle_ps::<0xee>(ef, gh)),
                (
                    _mm256_shuffle_ps::<0x44>(upper_ab, upper_cd),
                    _mm256_shuffle_ps::<0x44>(upper_ef, upper_gh),
                ),
                (
                    _mm256_shuffle_ps::<0xee>(upper_ab, upper_cd),
                    _mm256_shuffle_ps::<0xee>(upper_ef, upper_gh),
                ),
            ];
            let mut columns = rows;
            for (i, (first, last)) in quarters.into_iter().enumerate() {
                columns[i] = Self(_mm256_permute2f128_ps::<0x20>(first, last));
                columns[i + 4] = Self(_mm256_permute2f128_ps::<0x31>(first, last));
            }
            columns
        }
    }
    /// Returns `2^n · 2^f`, where n is the nearest integer. `2^f` is its Taylor series up to the seventh power,
    /// which is exact to a float's rounding for |f| ≤ 1/2; n is added to the exponent bits.
    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            let f = _mm256_sub_ps(self.0, n);
            let mut series = _mm256_set1_ps(SERIES[0]);
            for coefficient in &SERIES[1..] {
                series = _mm256_fmadd_ps(series, f, _mm256_set1_ps(*coefficient));
            }
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            let power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(series), exponent));
            // "Not less" is true for NaN, so NaN is preserved.
            let enough = _mm256_cmp_ps::<_CMP_NLT_UQ>(self.0, _mm256_set1_ps(-126.0));
            Self(_mm256_and_ps(power, enough))
        }
    }
}
