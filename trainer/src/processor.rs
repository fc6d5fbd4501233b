//! The decisions of training that depend on the processor.

use onefold_kernels::processor::{has_amx_bf16, has_avx512_bf16, is_intel};

use crate::config::TrainConfig;
use crate::{Error, Result};

/// Refuses a precision by which training on `device` would gain nothing. Whatever a model was trained with, it can be
/// evaluated anywhere.
///
/// # Errors
///
/// [`Error::Fault`].
pub(crate) fn check_precision(config: &TrainConfig, device: tch::Device) -> Result<()> {
    if device != tch::Device::Cpu {
        return Ok(());
    }
    let checked = config.train.precision.check_on_processor(has_amx_bf16() || has_avx512_bf16());
    checked.map_err(|(message, hint)| Error::config(config.path(), message, hint))
}

/// Whether MKL, with which libtorch multiplies 32-bit floats, is at its best: on Intel's processors it reaches nine tenths of
/// the peak and more, elsewhere it keeps to AVX2. Unit tests are of our kernels on any processor.
pub(crate) fn has_fast_mkl() -> bool {
    !cfg!(test) && is_intel()
}
