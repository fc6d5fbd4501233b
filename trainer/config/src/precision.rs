//! The setting `precision` in `[train]`.

use onefold_base::fault::{Text, option, text};
use serde::{Deserialize, Serialize};

/// The number format of the matrix products of the dense part: linear layers, interaction and attention.
/// Parameters, gradients, optimizer, normalizations, softmax, loss and metrics always use 32-bit floats, and so
/// do stored models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    Fp32,
    /// On a GPU, products with the 10-bit mantissa of TF32; on the processor, 32-bit floats.
    Tf32,
    /// bfloat16 operands, accumulated in 32-bit floats.
    Bf16,
}

impl Precision {
    /// Returns the name of the precision in configuration files.
    pub fn name(self) -> String {
        crate::name_of(&self)
    }

    /// Rejects a precision that brings no benefit on this processor. `has_bf16` says whether the processor has
    /// bfloat16 instructions.
    ///
    /// # Errors
    ///
    /// A message that says why, and a hint.
    pub fn check_on_processor(self, has_bf16: bool) -> Result<(), (String, Text)> {
        match self {
            Self::Tf32 => Err((
                "`[train].precision` is `tf32`, which processors do not have".to_owned(),
                text!["train on a GPU with ", option("device"), ", or set `precision` to `fp32` or `bf16`"],
            )),
            Self::Bf16 if !has_bf16 => Err((
                "`[train].precision` is `bf16`, and this processor has neither AMX nor AVX-512 BF16"
                    .to_owned(),
                "set `precision` to `fp32`, which is as fast here, or train on another machine".into(),
            )),
            _ => Ok(()),
        }
    }
}
