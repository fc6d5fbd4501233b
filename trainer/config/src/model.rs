//! The `[model]` section of `train.toml`.

use serde::{Deserialize, Serialize};

use super::parameters::mlp_parameters;
use super::{FeatureConfig, Pooling, TrainConfig};

/// The `[model]` section: the architecture of a DLRM.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Layer widths of the MLP for dense features; the last width is the embedding dimension.
    pub bottom_mlp: Vec<i64>,
    /// Layer widths of the MLP after the interaction; the last width is the number of tasks.
    pub top_mlp: Vec<i64>,
    /// The interaction of the feature vectors.
    #[serde(default)]
    pub interaction: Interaction,
    /// The number of cross layers of the `dcn` interaction.
    #[serde(default = "three")]
    pub dcn_num_layers: i64,
    /// The rank of the cross layers' weight matrices.
    #[serde(default = "rank")]
    pub dcn_low_rank_dim: i64,
    /// The number of heads of the self-attention block that pools `attention` tables.
    #[serde(default = "heads")]
    pub attention_heads: i64,
    /// The number of heads of the encoder block that pools `encoder` tables.
    #[serde(default = "heads", skip_serializing_if = "is_heads")]
    pub encoder_heads: i64,
    /// The width of the encoder block's hidden layer; four times the embedding dimension if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoder_hidden: Option<i64>,
    /// The widths of the hidden layers of the attention unit that pools `din` tables.
    #[serde(default = "din_hidden", skip_serializing_if = "is_din_hidden")]
    pub din_hidden: Vec<i64>,
    /// The initial bias of the output layer of a new model.
    #[serde(default, skip_serializing_if = "crate::is_default")]
    pub output_bias_init: BiasInit,
}

/// The initial bias of the output layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BiasInit {
    /// The bias that predicts the mean of the training labels: for binary labels, the log-odds of the mean.
    #[default]
    Prior,
    /// A uniform random bias, as `torch.nn.Linear` draws it.
    Uniform,
}

fn heads() -> i64 {
    2
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_heads(number: &i64) -> bool {
    *number == heads()
}

fn three() -> i64 {
    3
}

fn rank() -> i64 {
    512
}

/// The interaction of the bottom MLP's output and the pooled vectors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interaction {
    /// Dot products of all pairs (the strict lower triangle), concatenated with the bottom MLP's output.
    #[default]
    Dot,
    /// Low-rank cross layers (DCN-V2, Wang et al. 2021) on the concatenation of all vectors.
    Dcn,
}

impl Interaction {
    /// Returns the input width of the top MLP for samples of `vectors` vectors of dimension `dim`.
    pub fn width(self, vectors: i64, dim: i64, has_bottom: bool) -> i64 {
        match self {
            Self::Dot => vectors * (vectors - 1) / 2 + if has_bottom { dim } else { 0 },
            Self::Dcn => vectors * dim,
        }
    }
}

/// The hidden layers of the attention unit in the DIN paper (Zhou et al. 2018).
const DIN_HIDDEN: [i64; 2] = [80, 40];

fn din_hidden() -> Vec<i64> {
    DIN_HIDDEN.to_vec()
}

fn is_din_hidden(widths: &[i64]) -> bool {
    widths == DIN_HIDDEN
}

impl ModelConfig {
    /// Returns the width of the encoder block's hidden layer.
    pub fn encoder_hidden_width(&self, dim: i64) -> i64 {
        self.encoder_hidden.unwrap_or(4 * dim)
    }

    /// Returns the number of parameters of the sequence-pooling blocks that these features need.
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

/// The maximum of every size below. It keeps parameter counts within `i64`.
const MOST: i64 = 1 << 24;

/// Rejects invalid model settings.
pub(super) fn check(config: &TrainConfig) -> Result<(), (String, &'static str)> {
    let (model, dim) = (&config.model, config.embedding.dim);
    let numbers: [(&str, &[i64]); 6] = [
        ("bottom_mlp", &model.bottom_mlp),
        ("top_mlp", &model.top_mlp),
        ("din_hidden", &model.din_hidden),
        ("encoder_hidden", model.encoder_hidden.as_slice()),
        ("dcn_num_layers", &[model.dcn_num_layers]),
        ("dcn_low_rank_dim", &[model.dcn_low_rank_dim]),
    ];
    for (key, numbers) in numbers {
        if let Some(number) = numbers.iter().find(|number| **number > MOST) {
            return Err((format!("`[model].{key}` has {number}"), "give at most 16777216"));
        }
    }
    let positive = |widths: &[i64]| !widths.is_empty() && widths.iter().all(|width| *width > 0);
    if !positive(&model.bottom_mlp)
        || model.bottom_mlp.last().and_then(|w| u64::try_from(*w).ok()) != Some(dim)
    {
        let message =
            format!("`[model].bottom_mlp` is {:?}, but `[embedding].dim` is {dim}", model.bottom_mlp);
        return Err((message, "all widths must be positive, and the last must be the embedding dimension"));
    }
    let heads = [
        ("attention_heads", model.attention_heads, Pooling::Attention),
        ("encoder_heads", model.encoder_heads, Pooling::Encoder),
    ];
    for (key, heads, pooling) in heads {
        // The default does not divide every dimension, which matters only if a table pools in this way.
        let others = config.tables.values().filter_map(|table| table.pooling);
        let is_used = others.chain([config.embedding.pooling]).any(|used| used == pooling);
        let divides = dim.checked_rem(u64::try_from(heads).unwrap_or(0)) == Some(0);
        if heads < 1 || is_used && !divides {
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
    if model.interaction == Interaction::Dcn && (model.dcn_num_layers < 1 || model.dcn_low_rank_dim < 1) {
        let message = format!(
            "`[model].dcn_num_layers` is {}, `dcn_low_rank_dim` is {}",
            model.dcn_num_layers, model.dcn_low_rank_dim
        );
        return Err((message, "both must be at least 1"));
    }
    Ok(())
}
