//! Decisions of training that depend on the processor.

use crate::config::TrainConfig;
use crate::{Error, Result};

/// Rejects a precision that brings no benefit for training on `device`. Evaluation accepts models trained with
/// any precision.
///
/// # Errors
///
/// [`Error::Fault`] for such a precision.
pub fn check_precision(config: &TrainConfig, device: tch::Device) -> Result<()> {
    if device != tch::Device::Cpu {
        return Ok(());
    }
    let checked = config.train.precision.check_on_processor(has_amx_bf16() || has_avx512_bf16());
    checked.map_err(|(message, hint)| Error::config(config.path(), message, hint))
}

/// Returns whether libtorch's products of bfloat16 are faster than those of 32-bit floats: oneDNN uses AMX, and
/// elsewhere `VDPBF16PS`, which does as many products as two multiply-adds. AMD's processors start as many
/// `VDPBF16PS` as multiply-adds per cycle; Intel's start one `VDPBF16PS` every other cycle, but two multiply-adds per
/// cycle.
pub(crate) fn multiplies_bf16_fast() -> bool {
    has_amx_bf16() || has_avx512_bf16() && !is_intel()
}

/// Returns whether CPUID names Intel as the processor's vendor.
fn is_intel() -> bool {
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

/// Returns whether the processor has AVX-512 BF16, the dot products of bfloat16 pairs.
fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Returns whether the processor has AMX-BF16, Intel's matrix unit for bfloat16, and the operating system enables
/// it.
fn has_amx_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const TILES_SAVED: u64 = 0b11 << 17;
        let has_leaf = __cpuid(0).eax >= 7;
        let features = if has_leaf { __cpuid_count(7, 0).edx } else { 0 };
        features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && saved_state() & TILES_SAVED == TILES_SAVED
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
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
