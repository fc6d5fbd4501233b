//! Pooling of sequences: each feature's block computes a vector per row, and the gradients of the elements.

use std::ops::Range;

use onefold_ikjt::Batch;
use onefold_sharding::{FeatureConfig, Pooling};
use tch::{Kind, Tensor, nn};

use super::attention::SelfAttention;
use super::block::{Block, Features, Pooled, Read};
use super::compute::Compute;
use super::din::TargetAttention;
use super::encoder::Encoder;
use crate::config::ModelConfig;
use crate::tensors;

/// The blocks that pool the sequence features of a model.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) blocks: Vec<(Pooling, Box<dyn Block>)>,
    /// For each feature that is pooled by `din`, the index of its target.
    targets: Vec<Option<usize>>,
}

/// The vectors of a batch's sequence features.
#[derive(Debug)]
pub(super) struct Sequences {
    /// The positions of the features' vectors, in the order of the lookups.
    features: Vec<Place>,
    /// The results of the blocks.
    pooled: Vec<Box<dyn Pooled>>,
}

/// The position of the vectors of one feature.
#[derive(Debug)]
struct Place {
    /// The index of its block.
    block: usize,
    /// Its rows of the block's result.
    rows: Range<usize>,
    by_sample: bool,
}

impl Blocks {
    /// Creates the blocks that `configs` need, with new parameters below `root`.
    pub(super) fn new(
        root: &nn::Path<'_>,
        model: &ModelConfig,
        configs: &[FeatureConfig],
        dim: i64,
        compute: &Compute,
    ) -> Self {
        let by = |pooling| configs.iter().any(|config| config.pooling == pooling);
        let target = |config: &FeatureConfig| {
            let target = config.target.as_ref().filter(|_| config.pooling == Pooling::Din)?;
            configs.iter().position(|other| other.feature == *target)
        };
        let (heads, hidden) = (model.encoder_heads, model.encoder_hidden_width(dim));
        let block = |pooling| -> (Pooling, Box<dyn Block>) {
            let block: Box<dyn Block> = match pooling {
                Pooling::Encoder => Box::new(Encoder::new(&(root / "encoder"), dim, heads, hidden, compute)),
                Pooling::Din => {
                    Box::new(TargetAttention::new(&(root / "din"), dim, &model.din_hidden, compute))
                }
                _ => Box::new(SelfAttention::new(&(root / "attention"), dim, model.attention_heads, compute)),
            };
            (pooling, block)
        };
        let poolings =
            [Pooling::Attention, Pooling::Encoder, Pooling::Din].into_iter().filter(|own| by(*own));
        Self { blocks: poolings.map(block).collect(), targets: configs.iter().map(target).collect() }
    }

    /// Returns the index of the block with this pooling.
    pub(super) fn place(&self, pooling: Pooling) -> usize {
        let place = self.blocks.iter().position(|(own, _)| *own == pooling);
        place.expect("a block is there if a table pools by it")
    }

    /// Computes the vectors of all sequence features of a batch.
    pub(super) fn forward(&self, batch: &Batch, read: Read<'_>) -> Sequences {
        let (lookups, embeddings) = read;
        let configs = embeddings.all.features();
        let mut by_block = vec![Vec::new(); self.blocks.len()];
        let (mut features, mut ends) = (Vec::new(), vec![0; self.blocks.len()]);
        for (group, lookup) in batch.groups().iter().zip(lookups) {
            for feature in &lookup.sequences {
                let block = self.place(configs[feature.feature].pooling);
                let by_sample = self.blocks[block].1.by_sample();
                let start = ends[block];
                ends[block] += if by_sample { batch.size() } else { feature.rows.sizes.len() };
                features.push(Place { block, rows: start..ends[block], by_sample });
                by_block[block].push((group, feature));
            }
        }
        let blocks = self.blocks.iter().zip(by_block);
        let pooled = blocks
            .map(|((_, block), own)| block.pool(&Features { own, batch, read, targets: &self.targets }));
        Sequences { features, pooled: pooled.collect() }
    }
}

impl Sequences {
    /// Computes the gradients of every feature's elements, `[T, D]` each, given the gradients of its vectors. Adds
    /// the gradients of targets to `pooled`, the gradients of every lookup's pooled vectors.
    pub(super) fn backward(
        &self,
        read: Read<'_>,
        gradients: &[Vec<f32>],
        pooled: &mut [Vec<f32>],
    ) -> Vec<Vec<f32>> {
        let parts = self.pooled.iter().enumerate().map(|(block, result)| {
            let features = self.features.iter().zip(gradients);
            let own = features.filter(|(feature, _)| feature.block == block);
            let gradient: Vec<f32> = own.flat_map(|(_, gradient)| gradient).copied().collect();
            let rows = result.rows();
            let gradient = tensors::from_f32(&gradient, &rows.size()).to_device(rows.device());
            (rows * gradient).sum(Kind::Float)
        });
        let Some(total) = parts.reduce(|a, b| a + b) else { return Vec::new() };
        total.backward();
        let results = self.pooled.iter();
        let mut by_block: Vec<_> = results.map(|result| result.gradients(read, pooled).into_iter()).collect();
        let gradient = |feature: &Place| by_block[feature.block].next().unwrap_or_default();
        self.features.iter().map(gradient).collect()
    }

    /// Returns for every feature, in the order of the lookups, its vectors, detached from the graph, and whether
    /// they are per sample.
    pub(super) fn vectors(&self) -> Vec<(Tensor, bool)> {
        let detached: Vec<_> = self.pooled.iter().map(|result| result.rows().detach().contiguous()).collect();
        let vectors = |Place { block, rows, by_sample }: &Place| {
            (detached[*block].narrow(0, rows.start as i64, rows.len() as i64), *by_sample)
        };
        self.features.iter().map(vectors).collect()
    }
}
