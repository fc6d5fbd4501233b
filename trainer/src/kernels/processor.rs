//! What the processor can multiply with.

use super::simd::{self, WIDTH};

/// Whether vectors of the processor are used at all: where they are not, libtorch's products are faster.
pub(crate) fn has_vectors() -> bool {
    simd::has_vectors()
}

/// The instructions of our kernels, as they are called in logs.
pub(crate) fn vectors() -> &'static str {
    match (has_vectors(), simd::widest()) {
        (false, _) => "portable",
        (true, WIDTH) => "avx2",
        (true, _) => "avx512",
    }
}

/// Whether the processor has AVX-512's products of bfloat16 numbers.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Whether the processor has Intel's matrix unit for bfloat16, and the operating system lets programs use it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_amx_bf16() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const TILES_SAVED: u64 = 0b11 << 17;
    let has_leaf = __cpuid(0).eax >= 7;
    let features = if has_leaf { __cpuid_count(7, 0).edx } else { 0 };
    features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && saved_state() & TILES_SAVED == TILES_SAVED
}

/// What of a processor's state the operating system saves: XCR0.
#[cfg(target_arch = "x86_64")]
fn saved_state() -> u64 {
    if !is_x86_feature_detected!("xsave") {
        return 0;
    }
    #[target_feature(enable = "xsave")]
    fn read() -> u64 {
        // SAFETY: the processor has the instruction, and the register is there wherever the operating system uses it,
        // which is what `is_x86_feature_detected` asks for.
        unsafe { std::arch::x86_64::_xgetbv(0) }
    }
    // SAFETY: the processor has the instruction.
    unsafe { read() }
}

/// Whether the processor has AVX-512's products of bfloat16 numbers.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn has_avx512_bf16() -> bool {
    false
}

/// Whether the processor has Intel's matrix unit for bfloat16.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn has_amx_bf16() -> bool {
    false
}
