//! Sequences to rows: every feature through the block that it pools by, and the gradients back.

use std::ops::Range;

use onefold_ikjt::{Batch, Group};
use onefold_sharding::{FeatureConfig, Pooling};
use rayon::prelude::*;
use tch::{Kind, Tensor, nn};

use super::attention::{Attended, SelfAttention};
use super::din::TargetAttention;
use super::encoder::Encoder;
use super::lists::Lists;
use crate::config::ModelConfig;
use crate::embedding::{FeatureLookup, HostEmbeddings, Lookup};
use crate::tensors;

/// The blocks that pool sequences; each is there if a feature pools by it.
#[derive(Debug)]
pub(super) struct Blocks {
    pub(super) attention: Option<SelfAttention>,
    pub(super) encoder: Option<Encoder>,
    pub(super) din: Option<TargetAttention>,
    /// By feature, if it pools by `din`: its target.
    targets: Vec<Option<usize>>,
}

/// The vectors of a batch's sequence features.
#[derive(Debug)]
pub(super) struct Sequences {
    /// In the order of the lookups.
    features: Vec<Pooled>,
    attended: Option<Attended>,
    encoded: Option<Encoded>,
    targeted: Option<Targeted>,
}

/// Where the vectors of one feature are.
#[derive(Debug)]
struct Pooled {
    pooling: Pooling,
    /// Rows of the block's result.
    rows: Range<usize>,
    /// Whether they are samples, however the group is deduplicated.
    by_sample: bool,
}

/// What the encoder block gave.
#[derive(Debug)]
struct Encoded {
    timeline: Timeline,
    /// `[ΣU, D]`.
    rows: Tensor,
}

/// What target attention gave.
#[derive(Debug)]
struct Targeted {
    timeline: Timeline,
    queries: Queries,
    /// `[F B, D]`.
    rows: Tensor,
}

/// The vectors of several features, one feature's after the other.
#[derive(Debug)]
struct Timeline {
    /// `[ΣT, D]`, the leaf.
    vectors: Tensor,
    /// The elements of each feature.
    ranges: Vec<Range<usize>>,
}

/// The pooled vectors of the features that others attend with.
#[derive(Debug)]
struct Queries {
    /// `[ΣU, D]`, the leaf.
    vectors: Tensor,
    parts: Vec<QueryPart>,
}

/// The vectors of one feature among them.
#[derive(Debug)]
struct QueryPart {
    target: usize,
    lookup: usize,
    /// Its number among the lookup's pooled features.
    feature: usize,
    rows: Range<usize>,
}

/// A sequence feature of a batch.
#[derive(Clone, Copy)]
struct Found<'a> {
    group: &'a Group,
    feature: &'a FeatureLookup,
    pooling: Pooling,
}

fn all<'a>(batch: &'a Batch, lookups: &'a [Lookup], embeddings: HostEmbeddings<'a>) -> Vec<Found<'a>> {
    let found = |(group, lookup): (&'a Group, &'a Lookup)| {
        lookup.sequences.iter().map(move |feature| {
            let pooling = embeddings.all.features()[feature.feature].pooling;
            Found { group, feature, pooling }
        })
    };
    batch.groups().iter().zip(lookups).flat_map(found).collect()
}

impl Blocks {
    /// The blocks that `configs` need, with new parameters below `root`.
    pub(super) fn new(root: &nn::Path<'_>, model: &ModelConfig, configs: &[FeatureConfig], dim: i64) -> Self {
        let by = |pooling| configs.iter().any(|config| config.pooling == pooling);
        let target = |config: &FeatureConfig| {
            let target = config.target.as_ref().filter(|_| config.pooling == Pooling::Din)?;
            configs.iter().position(|other| other.feature == *target)
        };
        Self {
            attention: by(Pooling::Attention)
                .then(|| SelfAttention::new(&(root / "attention"), dim, model.attention_heads)),
            encoder: by(Pooling::Encoder).then(|| {
                Encoder::new(&(root / "encoder"), dim, model.encoder_heads, model.encoder_hidden_width(dim))
            }),
            din: by(Pooling::Din).then(|| TargetAttention::new(&(root / "din"), dim, &model.din_hidden)),
            targets: configs.iter().map(target).collect(),
        }
    }

    /// The vectors of all sequence features of a batch.
    pub(super) fn forward(
        &self,
        batch: &Batch,
        lookups: &[Lookup],
        embeddings: HostEmbeddings<'_>,
    ) -> Sequences {
        let all = all(batch, lookups, embeddings);
        let by = |pooling| all.iter().copied().filter(|found| found.pooling == pooling).collect::<Vec<_>>();
        let attended = self.attention.as_ref().map(|block| block.forward(lookups, embeddings));
        let encoded = self.encoder.as_ref().map(|block| {
            let features = by(Pooling::Encoder);
            let timeline = Timeline::new(&features, embeddings);
            let mut lists = Lists::default();
            for (found, range) in features.iter().zip(&timeline.ranges) {
                lists.extend(found.lists(), range.start);
            }
            Encoded { rows: block.forward(&timeline.vectors, &lists), timeline }
        });
        let targeted = self.din.as_ref().map(|block| {
            let features = by(Pooling::Din);
            let timeline = Timeline::new(&features, embeddings);
            let queries = Queries::new(&features, lookups, &self.targets, embeddings);
            let (lists, targets) = self.pairs(batch, &features, &timeline, &queries);
            let rows = block.forward(&timeline.vectors, &queries.vectors, &lists, &targets);
            Targeted { rows, timeline, queries }
        });
        let mut next = [0_usize; 3];
        let features = all.iter().map(|found| {
            let by_sample = found.pooling == Pooling::Din;
            let count = if by_sample { batch.size() } else { found.feature.rows.sizes.len() };
            let next = &mut next[place(found.pooling)];
            let rows = *next..*next + count;
            *next = rows.end;
            Pooled { pooling: found.pooling, rows, by_sample }
        });
        Sequences { features: features.collect(), attended, encoded, targeted }
    }

    /// Every sample's list of every `din` feature, and the query that it attends with.
    fn pairs(
        &self,
        batch: &Batch,
        features: &[Found<'_>],
        timeline: &Timeline,
        queries: &Queries,
    ) -> (Lists, Vec<i64>) {
        let (mut lists, mut targets) = (Lists::default(), Vec::new());
        for (found, range) in features.iter().zip(&timeline.ranges) {
            let rows = &found.feature.rows;
            let own = (0..batch.size()).map(|sample| {
                let row = found.group.row_of(sample);
                (rows.offsets[row], rows.sizes[row])
            });
            lists.extend(own, range.start);
            let target = self.targets[found.feature.feature];
            let Some(part) = queries.parts.iter().find(|part| Some(part.target) == target) else { continue };
            let group = &batch.groups()[part.lookup];
            targets.extend((0..batch.size()).map(|sample| (part.rows.start + group.row_of(sample)) as i64));
        }
        (lists, targets)
    }

    /// From the gradients of every feature's rows to those of its timeline's vectors, `[T, D]` each; those of targets are
    /// added to `pooled`, the gradients of every lookup's pooled vectors.
    pub(super) fn backward(
        &self,
        sequences: &Sequences,
        lookups: &[Lookup],
        embeddings: HostEmbeddings<'_>,
        gradients: &[Vec<f32>],
        pooled: &mut [Vec<f32>],
    ) -> Vec<Vec<f32>> {
        let parts = sequences.results().map(|(pooling, rows)| {
            let features = sequences.features.iter().zip(gradients);
            let own = features.filter(|(feature, _)| feature.pooling == pooling);
            let gradient: Vec<f32> = own.flat_map(|(_, gradient)| gradient).copied().collect();
            let gradient = tensors::from_f32(&gradient, &rows.size()).to_device(rows.device());
            (rows * gradient).sum(Kind::Float)
        });
        let Some(total) = parts.reduce(|a, b| a + b) else { return Vec::new() };
        total.backward();
        let mut by_pooling = [Vec::new().into_iter(), Vec::new().into_iter(), Vec::new().into_iter()];
        if let (Some(block), Some(attended)) = (&self.attention, &sequences.attended) {
            by_pooling[0] = block.backward(attended, lookups, embeddings).into_iter();
        }
        if let Some(encoded) = &sequences.encoded {
            by_pooling[1] = encoded.timeline.gradients().into_iter();
        }
        if let Some(targeted) = &sequences.targeted {
            by_pooling[2] = targeted.timeline.gradients().into_iter();
            targeted.queries.add_gradients(lookups, pooled);
        }
        let gradient = |feature: &Pooled| by_pooling[place(feature.pooling)].next().unwrap_or_default();
        sequences.features.iter().map(gradient).collect()
    }
}

/// The number of the block that pools so.
fn place(pooling: Pooling) -> usize {
    match pooling {
        Pooling::Encoder => 1,
        Pooling::Din => 2,
        _ => 0,
    }
}

impl Sequences {
    /// The blocks' results, `[N, D]`.
    fn results(&self) -> impl Iterator<Item = (Pooling, &Tensor)> {
        let attended = self.attended.iter().map(|attended| (Pooling::Attention, &attended.rows));
        let encoded = self.encoded.iter().map(|encoded| (Pooling::Encoder, &encoded.rows));
        let targeted = self.targeted.iter().map(|targeted| (Pooling::Din, &targeted.rows));
        attended.chain(encoded).chain(targeted)
    }

    /// Of every feature, in the order of the lookups: its vectors, outside the graph, and whether they are of samples.
    pub(super) fn vectors(&self) -> Vec<(Tensor, bool)> {
        let detached: Vec<_> =
            self.results().map(|(pooling, rows)| (pooling, rows.detach().contiguous())).collect();
        let vectors = |feature: &Pooled| {
            let (_, rows) = detached.iter().find(|(pooling, _)| *pooling == feature.pooling)?;
            let (start, length) = (feature.rows.start as i64, feature.rows.len() as i64);
            Some((rows.narrow(0, start, length), feature.by_sample))
        };
        self.features.iter().filter_map(vectors).collect()
    }
}

impl Found<'_> {
    /// Offset and size of every row.
    fn lists(&self) -> impl Iterator<Item = (i32, i32)> {
        let rows = &self.feature.rows;
        rows.offsets.iter().copied().zip(rows.sizes.iter().copied())
    }
}

impl Timeline {
    /// Looks up the elements of all of `features`.
    fn new(features: &[Found<'_>], embeddings: HostEmbeddings<'_>) -> Self {
        let dim = embeddings.all.dim();
        let mut end = 0;
        let range = |found: &Found<'_>| {
            let start = end;
            end += found.feature.table_rows.len();
            start..end
        };
        let ranges: Vec<_> = features.iter().map(range).collect();
        let vectors = tensors::filled(&[end as i64, dim as i64], |mut values| {
            for (found, range) in features.iter().zip(&ranges) {
                let (own, rest) = values.split_at_mut(range.len() * dim);
                values = rest;
                let source = embeddings.sequence(found.feature);
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

    /// What `backward` left at the leaf, by feature.
    fn gradients(&self) -> Vec<Vec<f32>> {
        let gradient = host(&self.vectors.grad());
        let dim = self.vectors.size()[1] as usize;
        let values = tensors::as_slice(&gradient);
        self.ranges.iter().map(|range| values[range.start * dim..range.end * dim].to_vec()).collect()
    }
}

impl Queries {
    fn new(
        features: &[Found<'_>],
        lookups: &[Lookup],
        targets: &[Option<usize>],
        embeddings: HostEmbeddings<'_>,
    ) -> Self {
        let dim = embeddings.all.dim();
        let mut parts: Vec<QueryPart> = Vec::new();
        let mut vectors: Vec<f32> = Vec::new();
        for target in features.iter().filter_map(|found| targets[found.feature.feature]) {
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

    /// Adds what `backward` left at the leaf to the gradients of the lookups' pooled vectors.
    fn add_gradients(&self, lookups: &[Lookup], pooled: &mut [Vec<f32>]) {
        let gradient = host(&self.vectors.grad());
        let dim = self.vectors.size()[1] as usize;
        let values = tensors::as_slice(&gradient);
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

/// The same values, contiguous and on the CPU.
fn host(tensor: &Tensor) -> Tensor {
    tensor.to_device(tch::Device::Cpu).contiguous()
}
