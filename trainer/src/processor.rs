//! Decisions of training that depend on the processor.

use onefold_kernels::processor::{has_amx_bf16, has_avx512_bf16, is_intel};

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

/// Returns whether libtorch's 32-bit matrix products, which use MKL, are fast. On Intel processors, MKL reaches
/// at least 90 % of the peak; on other processors it only uses AVX2. Unit tests always use the project's own
/// kernels.
pub(crate) fn has_fast_mkl() -> bool {
    !cfg!(test) && is_intel()
}
