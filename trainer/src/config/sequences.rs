//! The part of `[model]` that pools sequences.

use onefold_sharding::{FeatureConfig, Pooling};

use super::{ModelConfig, TrainConfig, mlp_parameters};

/// The authors' attention unit (Zhou et al. 2018).
const DIN_HIDDEN: [i64; 2] = [80, 40];

pub(super) fn din_hidden() -> Vec<i64> {
    DIN_HIDDEN.to_vec()
}

pub(super) fn is_din_hidden(widths: &[i64]) -> bool {
    widths == DIN_HIDDEN
}

pub(super) fn encoder_heads() -> i64 {
    2
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
pub(super) fn is_encoder_heads(heads: &i64) -> bool {
    *heads == encoder_heads()
}

impl ModelConfig {
    /// Width of the encoder block's hidden layer.
    pub(crate) fn encoder_hidden_width(&self, dim: i64) -> i64 {
        self.encoder_hidden.unwrap_or(4 * dim)
    }

    /// Parameters of the blocks that these features need.
    pub(super) fn block_parameters(&self, features: &[FeatureConfig], dim: i64) -> i64 {
        let by = |pooling| features.iter().any(|feature| feature.pooling == pooling);
        let projections = mlp_parameters(dim, &[3 * dim]) + mlp_parameters(dim, &[dim]);
        let mut parameters = 0;
        if by(Pooling::Attention) {
            parameters += projections;
        }
        if by(Pooling::Encoder) {
            let norms = 2 * 2 * dim;
            parameters += norms + projections + mlp_parameters(dim, &[self.encoder_hidden_width(dim), dim]);
        }
        if by(Pooling::Din) {
            let widths: Vec<i64> = self.din_hidden.iter().copied().chain(std::iter::once(1)).collect();
            parameters += mlp_parameters(4 * dim, &widths);
        }
        parameters
    }
}

/// Refuses blocks that cannot be.
pub(super) fn check(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let (model, dim) = (&config.model, config.embedding.dim);
    for (key, heads) in [("attention_heads", model.attention_heads), ("encoder_heads", model.encoder_heads)] {
        if dim.checked_rem(u64::try_from(heads).unwrap_or(0)) != Some(0) {
            let message = format!("`[model].{key}` is {heads}, `[embedding].dim` is {dim}");
            return Err((message, "the dimension must be a multiple of the heads"));
        }
    }
    if let Some(width) = model.encoder_hidden.filter(|width| *width < 1) {
        let message = format!("`[model].encoder_hidden` is {width}");
        return Err((message, "give a positive width, or leave it out for four times the dimension"));
    }
    if model.din_hidden.is_empty() || model.din_hidden.iter().any(|width| *width < 1) {
        let message = format!("`[model].din_hidden` is {:?}", model.din_hidden);
        return Err((message, "give at least one layer, of positive width; a layer of width 1 follows"));
    }
    Ok(())
}
