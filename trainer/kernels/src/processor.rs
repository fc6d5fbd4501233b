//! Detection of the processor's instruction sets.

use super::simd::{self, WIDTH};

/// Returns whether kernels use SIMD instructions of the processor. Without them, libtorch's matrix products are
/// faster.
pub fn has_vectors() -> bool {
    simd::has_vectors()
}

/// Returns whether `VDPBF16PS` computes more products per cycle than a fused multiply-add (FMA). One `VDPBF16PS`
/// computes twice as many products as one FMA. AMD processors start as many `VDPBF16PS` as FMA per cycle; Intel
/// processors start one `VDPBF16PS` every other cycle, but two FMA per cycle.
pub fn has_fast_pairs() -> bool {
    has_avx512_bf16() && !is_intel()
}

/// Returns whether CPUID names Intel as the processor's vendor.
pub fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        // The vendor's name is in three registers, in this order.
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        name.as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns the name of the kernels' instructions for logs: `avx512`, `avx2` or `portable`.
pub fn vectors() -> &'static str {
    match (has_vectors(), simd::widest()) {
        (false, _) => "portable",
        (true, WIDTH) => "avx2",
        (true, _) => "avx512",
    }
}

/// Returns whether the processor has AVX-512 BF16, the dot products of bfloat16 pairs.
#[cfg(target_arch = "x86_64")]
pub fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Returns whether the processor has AMX-BF16, Intel's matrix unit for bfloat16, and the operating system enables
/// it.
#[cfg(target_arch = "x86_64")]
pub fn has_amx_bf16() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const TILES_SAVED: u64 = 0b11 << 17;
    let has_leaf = __cpuid(0).eax >= 7;
    let features = if has_leaf { __cpuid_count(7, 0).edx } else { 0 };
    features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && saved_state() & TILES_SAVED == TILES_SAVED
}

/// Returns XCR0: the parts of the processor's state that the operating system saves, as bits.
#[cfg(target_arch = "x86_64")]
fn saved_state() -> u64 {
    if !is_x86_feature_detected!("xsave") {
        return 0;
    }
    #[target_feature(enable = "xsave")]
    fn read() -> u64 {
        // SAFETY: the processor has `xsave`, and `is_x86_feature_detected` reports it only where the operating
        // system has enabled the XCR0 register.
        unsafe { std::arch::x86_64::_xgetbv(0) }
    }
    // SAFETY: the processor has the instruction.
    unsafe { read() }
}

/// Returns whether the processor has AVX-512 BF16, the dot products of bfloat16 pairs.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_avx512_bf16() -> bool {
    false
}

/// Returns whether the processor has AMX-BF16, Intel's matrix unit for bfloat16.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_amx_bf16() -> bool {
    false
}
