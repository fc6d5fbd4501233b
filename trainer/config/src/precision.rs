//! `precision` under `[train]`.

use onefold_base::fault::{Text, option, text};
use serde::{Deserialize, Serialize};

/// What the dense part's products are computed with: those of linear layers, of the interaction and of attention.
/// Parameters, their gradients, the optimizer, normalizations, softmax, the loss and metrics are of 32-bit floats whichever
/// it is, and so is what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    Fp32,
    /// On a GPU, 32-bit floats whose products have the 10 bits of mantissa of TF32; on the processor as `fp32`.
    Tf32,
    /// Operands of bfloat16, sums of 32-bit floats.
    Bf16,
}

impl Precision {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
        }
    }

    /// Whether it is that of a configuration without one.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses a precision by which nothing would be gained on a processor that has instructions for bfloat16, or has not:
    /// why, and what to do.
    ///
    /// # Errors
    ///
    /// A message and a hint.
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
