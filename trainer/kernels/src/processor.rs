//! The instructions that the processor has for products.

use super::simd::{self, WIDTH};

/// Returns whether kernels use the processor's vectors: where they do not, libtorch's products are faster.
pub fn has_vectors() -> bool {
    simd::has_vectors()
}

/// Returns whether `VDPBF16PS` does more products in a cycle than a multiply-add. It has twice as many in an
/// instruction, and AMD's processors begin as many of either in a cycle; Intel's begin one in every other cycle, and two
/// multiply-adds in each.
pub fn has_fast_pairs() -> bool {
    has_avx512_bf16() && !is_intel()
}

/// Returns whether CPUID names Intel as the processor's vendor.
pub fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        // Three registers contain the vendor's name, in this order.
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

/// Returns whether the processor has AVX-512's products of bfloat16 numbers.
#[cfg(target_arch = "x86_64")]
pub fn has_avx512_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Returns whether the processor has Intel's matrix unit for bfloat16, and the operating system lets programs use it.
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

/// The parts of a processor's state that the operating system saves, as bits: XCR0.
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

/// Returns whether the processor has AVX-512's products of bfloat16 numbers.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_avx512_bf16() -> bool {
    false
}

/// Returns whether the processor has Intel's matrix unit for bfloat16.
#[cfg(not(target_arch = "x86_64"))]
pub fn has_amx_bf16() -> bool {
    false
}
