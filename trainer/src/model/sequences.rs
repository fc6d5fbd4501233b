//! Pooling of sequences: each feature's block computes a vector per row, and the gradients of the elements.

use std::ops::Range;

use onefold_ikjt::{Batch, Group};
use onefold_sharding::{FeatureConfig, Pooling};
use rayon::prelude::*;
use tch::{Kind, Tensor, nn};

use super::attention::SelfAttention;
use super::compute::Compute;
use super::din::TargetAttention;
use super::encoder::Encoder;
use super::lists::Lists;
use crate::config::ModelConfig;
use crate::embedding::{FeatureLookup, HostEmbeddings, Lookup};
use crate::{Result, tensors};

/// A block that pools sequences. In host memory, it reads lists over a timeline; on a device, padded lists.
pub(super) trait Block: std::fmt::Debug + Send {
    /// Returns whether the block computes a vector per sample, even if the group is deduplicated.
    fn by_sample(&self) -> bool {
        false
    }

    /// In host memory: pools all features of a batch that use this block.
    fn pool(&self, features: &Features<'_>) -> Box<dyn Pooled>;

    /// On a device: computes the part that runs once per element, `[T, W]` from `[T, D]`.
    fn of_elements(&self, elements: &Tensor) -> Tensor;

    /// On a device: computes the vector of every list, `[N, D]`. `lists`, `[N, longest, W]`, contains the results
    /// of [`of_elements`](Self::of_elements), with zeros after the ends of lists; `sizes` is `[N]`. `queries`
    /// computes the targets' part for a block that attends with targets.
    fn of_rows(&self, lists: &Tensor, sizes: &Tensor, queries: &mut OfQueries<'_>) -> Result<Tensor>;
}

/// A function that returns every list's row of [`with_queries`](TargetAttention::with_queries), `[N, W]`.
pub(super) type OfQueries<'a> = dyn FnMut(&TargetAttention) -> Result<Tensor> + 'a;

/// A batch's lookups, and the tables.
pub(super) type Read<'a> = (&'a [Lookup], HostEmbeddings<'a>);

/// The result of a block in host memory.
pub(super) trait Pooled: std::fmt::Debug {
    /// Returns the vectors of all features that use the block, `[N, D]`, one feature after the other.
    fn rows(&self) -> &Tensor;

    /// Returns the gradients of each feature's elements, `[T, D]`, after `backward` has reached the leaves. Adds
    /// the gradients of targets to `pooled`, the gradients of every lookup's pooled vectors.
    fn gradients(&self, read: Read<'_>, pooled: &mut [Vec<f32>]) -> Vec<Vec<f32>>;
}

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

/// The features of a batch that use one block.
pub(super) struct Features<'a> {
    own: Vec<(&'a Group, &'a FeatureLookup)>,
    batch: &'a Batch,
    pub(super) read: Read<'a>,
    /// The targets, as in [`Blocks`].
    targets: &'a [Option<usize>],
}

/// The result of a block that reads the elements through autograd.
#[derive(Debug)]
struct OfTimeline {
    timeline: Timeline,
    queries: Option<Queries>,
    rows: Tensor,
}

/// The vectors of several features, one feature after the other.
#[derive(Debug)]
struct Timeline {
    /// The vectors, `[ΣT, D]`, a leaf of autograd.
    vectors: Tensor,
    /// The range of elements of each feature.
    ranges: Vec<Range<usize>>,
}

/// The pooled vectors of the target features.
#[derive(Debug)]
struct Queries {
    /// The vectors, `[ΣU, D]`, a leaf of autograd.
    vectors: Tensor,
    parts: Vec<QueryPart>,
}

/// The vectors of one target feature.
#[derive(Debug)]
struct QueryPart {
    target: usize,
    lookup: usize,
    /// Its index among the lookup's pooled features.
    feature: usize,
    rows: Range<usize>,
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

impl Features<'_> {
    /// Calls `block` with all elements, `[T, D]`, and the lists of rows over them.
    pub(super) fn pool_rows(&self, block: impl FnOnce(&Tensor, &Lists) -> Tensor) -> Box<dyn Pooled> {
        let timeline = Timeline::new(self);
        let mut lists = Lists::default();
        for ((_, feature), range) in self.own.iter().zip(&timeline.ranges) {
            let rows = &feature.rows;
            lists.extend(rows.offsets.iter().copied().zip(rows.sizes.iter().copied()), range.start);
        }
        let rows = block(&timeline.vectors, &lists);
        Box::new(OfTimeline { timeline, queries: None, rows })
    }

    /// Calls `block` with all elements, `[T, D]`, all queries, `[U, D]`, the lists of samples, and the index of
    /// each list's query.
    pub(super) fn pool_pairs(
        &self,
        block: impl FnOnce(&Tensor, &Tensor, &Lists, &[i64]) -> Tensor,
    ) -> Box<dyn Pooled> {
        let timeline = Timeline::new(self);
        let queries = Queries::new(self);
        let (mut lists, mut targets) = (Lists::default(), Vec::new());
        let samples = || 0..self.batch.size();
        for ((group, feature), range) in self.own.iter().zip(&timeline.ranges) {
            let own = samples().map(|sample| group.row_of(sample));
            lists.extend(own.map(|row| (feature.rows.offsets[row], feature.rows.sizes[row])), range.start);
            let target = self.targets[feature.feature];
            let Some(part) = queries.parts.iter().find(|part| Some(part.target) == target) else { continue };
            let group = &self.batch.groups()[part.lookup];
            targets.extend(samples().map(|sample| (part.rows.start + group.row_of(sample)) as i64));
        }
        let rows = block(&timeline.vectors, &queries.vectors, &lists, &targets);
        Box::new(OfTimeline { timeline, queries: Some(queries), rows })
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

impl Pooled for OfTimeline {
    fn rows(&self) -> &Tensor {
        &self.rows
    }

    fn gradients(&self, (lookups, _): Read<'_>, pooled: &mut [Vec<f32>]) -> Vec<Vec<f32>> {
        if let Some(queries) = &self.queries {
            queries.add_gradients(lookups, pooled);
        }
        self.timeline.gradients()
    }
}

impl Timeline {
    /// Looks up the elements of all of these features.
    fn new(Features { own: features, read: (_, embeddings), .. }: &Features<'_>) -> Self {
        let dim = embeddings.all.dim();
        let mut end = 0;
        let mut range = |feature: &FeatureLookup| {
            let start = end;
            end += feature.table_rows.len();
            start..end
        };
        let ranges: Vec<_> = features.iter().map(|(_, feature)| range(feature)).collect();
        let vectors = tensors::filled(&[end as i64, dim as i64], |mut values| {
            for ((_, feature), range) in features.iter().zip(&ranges) {
                let (own, rest) = values.split_at_mut(range.len() * dim);
                values = rest;
                let source = embeddings.sequence(feature);
                let vectors = own.par_chunks_mut(dim.max(1)).zip(source.rows).with_min_len(256);
                embeddings.all.install(|| {
                    vectors.for_each(|(vector, &row)| {
                        source.table.slice(row as usize * dim, dim).widen(vector);
                    });
                });
            }
        });
        Self { vectors: vectors.set_requires_grad(true), ranges }
    }

    /// Returns the gradients of the leaf, by feature.
    fn gradients(&self) -> Vec<Vec<f32>> {
        let values = tensors::to_vec(&self.vectors.grad());
        let dim = self.vectors.size()[1] as usize;
        self.ranges.iter().map(|range| values[range.start * dim..range.end * dim].to_vec()).collect()
    }
}

impl Queries {
    fn new(Features { own, read: (lookups, embeddings), targets, .. }: &Features<'_>) -> Self {
        let dim = embeddings.all.dim();
        let mut parts: Vec<QueryPart> = Vec::new();
        let mut vectors: Vec<f32> = Vec::new();
        for target in own.iter().filter_map(|(_, feature)| targets[feature.feature]) {
            if parts.iter().any(|part| part.target == target) {
                continue;
            }
            let found = lookups.iter().enumerate().find_map(|(lookup, own)| {
                Some((lookup, own.pooled_features.iter().position(|feature| feature.feature == target)?))
            });
            let Some((lookup, feature)) = found else { continue };
            let stride = lookups[lookup].pooled_features.len() * dim;
            let start = vectors.len() / dim.max(1);
            let rows = lookups[lookup].pooled.chunks_exact(stride.max(1));
            vectors.extend(rows.flat_map(|row| &row[feature * dim..(feature + 1) * dim]));
            parts.push(QueryPart { target, lookup, feature, rows: start..vectors.len() / dim.max(1) });
        }
        let vectors = tensors::from_f32(&vectors, &[-1, dim as i64]).set_requires_grad(true);
        Self { vectors, parts }
    }

    /// Adds the gradients of the leaf to the gradients of the lookups' pooled vectors.
    fn add_gradients(&self, lookups: &[Lookup], pooled: &mut [Vec<f32>]) {
        let values = tensors::to_vec(&self.vectors.grad());
        let dim = self.vectors.size()[1] as usize;
        for part in &self.parts {
            let stride = lookups[part.lookup].pooled_features.len() * dim;
            let own = values[part.rows.start * dim..part.rows.end * dim].chunks_exact(dim);
            for (row, gradient) in pooled[part.lookup].chunks_exact_mut(stride).zip(own) {
                let place = &mut row[part.feature * dim..(part.feature + 1) * dim];
                place.iter_mut().zip(gradient).for_each(|(total, value)| *total += value);
            }
        }
    }
}
