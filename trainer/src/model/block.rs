//! The interface of the blocks that pool sequences, and the elements and targets that they read in host memory.

use std::ops::Range;

use onefold_ikjt::{Batch, Group};
use rayon::prelude::*;
use tch::Tensor;

use super::lists::Lists;
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

/// A function that returns every list's row of the targets' part, `[N, W]`, which its argument computes from the
/// targets' vectors: `[U, W]` from `[U, D]`.
pub(super) type OfQueries<'a> = dyn FnMut(&dyn Fn(&Tensor) -> Tensor) -> Result<Tensor> + 'a;

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

/// The features of a batch that use one block.
pub(super) struct Features<'a> {
    pub(super) own: Vec<(&'a Group, &'a FeatureLookup)>,
    pub(super) batch: &'a Batch,
    pub(super) read: Read<'a>,
    /// For each feature that is pooled by `din`, the index of its target.
    pub(super) targets: &'a [Option<usize>],
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
            let (stride, columns) = (lookups[lookup].width(), &lookups[lookup].columns[feature]);
            let start = vectors.len() / dim.max(1);
            let rows = lookups[lookup].pooled.chunks_exact(stride.max(1));
            vectors.extend(rows.flat_map(|row| &row[columns.clone()]));
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
            let lookup = &lookups[part.lookup];
            let own = values[part.rows.start * dim..part.rows.end * dim].chunks_exact(dim);
            for (row, gradient) in pooled[part.lookup].chunks_exact_mut(lookup.width()).zip(own) {
                let place = &mut row[lookup.columns[part.feature].clone()];
                place.iter_mut().zip(gradient).for_each(|(total, value)| *total += value);
            }
        }
    }
}
