//! The execution of a plan's actions on a batch.

use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use super::columns::DenseColumns;
use super::layout::{FeatureLayout, Origin, SparseAt};
use super::local_hour::local_hours;
use super::pairs::{RowPair, distinct_pairs, intersection, product, scores};
use super::plan::{Action, ListOfPair};
use super::problem::Checked;
use crate::batch::{Batch, BatchParts, Feature, Group};
use crate::error::Result;

/// A batch between two actions.
#[derive(Debug)]
pub(super) struct Running {
    /// The input without its groups.
    input: BatchParts,
    dense: DenseColumns,
    /// The groups, in the order of the layout.
    groups: Vec<RunningGroup>,
}

#[derive(Debug)]
struct RunningGroup {
    name: Arc<str>,
    origin: Origin,
    inverse: Option<ScalarBuffer<i32>>,
    features: Vec<Feature>,
    /// For a group of pairs: the rows of the two groups that each row combines. `None` until a step needs them.
    pairs: Option<Arc<[RowPair]>>,
}

impl RunningGroup {
    fn row_of(&self, sample: usize) -> usize {
        self.inverse.as_ref().map_or(sample, |inverse| inverse[sample] as usize)
    }
}

impl Running {
    /// Starts with `batch`, which has the input features of `layout`.
    pub(super) fn new(batch: Batch, layout: &FeatureLayout, dense_width: usize) -> Self {
        let mut input = batch.into_parts();
        let mut inputs = std::mem::take(&mut input.groups).into_iter().map(Group::into_parts);
        let group = |(name, origin): (&str, Origin)| {
            let parts = if origin == Origin::Input { inputs.next() } else { None };
            let (name, inverse, features) = match parts {
                Some((name, inverse, _, features)) => (name, inverse, features),
                None => (name.into(), None, Vec::new()),
            };
            RunningGroup { name, origin, inverse, features, pairs: None }
        };
        let groups = layout.groups().map(group).collect();
        let dense = DenseColumns::new(input.dense.clone(), dense_width);
        Self { input, dense, groups }
    }

    /// Returns the batch in its current state.
    pub(super) fn finish(self) -> Result<Batch> {
        let groups = self.groups.into_iter().filter(|group| !group.features.is_empty());
        let groups = groups
            .map(|group| Group::try_new(group.name, group.inverse, group.features).map(|group| group.trim()));
        let (dense, groups) = (self.dense.into_matrix(self.input.size), groups.collect::<Result<_>>()?);
        Batch::try_new(BatchParts { dense, groups, ..self.input })
    }

    pub(super) fn apply(&mut self, action: &Action) -> Checked<()> {
        match action {
            Action::Copy { from, name } => {
                let copy = self.feature(*from).clone().with_name(Arc::clone(name));
                self.groups[from.group].features.push(copy);
            }
            Action::Chain { at, chain } => self.replace(*at, |feature| chain.run(feature))?,
            Action::PerRow { at, op } => self.replace(*at, |feature| op.run(feature))?,
            Action::CopyDense { from, to } => self.dense.set(*to, self.column(*from)),
            Action::Dense { at, op } => {
                let mut column = self.column(*at);
                op.apply(&mut column);
                self.dense.set(*at, column);
            }
            Action::ToId { from, group, name, op } => {
                let ids = self.column(*from).into_iter().map(|x| op.id(x)).collect();
                self.push_ids(*group, name, ids)?;
            }
            Action::LocalHour { zone, group, name } => {
                let timestamps = self.input.timestamps.as_deref().unwrap_or_default();
                self.push_ids(*group, name, local_hours(*zone, timestamps)?)?;
            }
            Action::List { inputs, group, name, op } => {
                let pairs = self.pairs(*group, *inputs);
                let (name, features) = (Arc::clone(name), (self.feature(inputs.0), self.feature(inputs.1)));
                let feature = match op {
                    ListOfPair::Product(hash) => product(name, features, &pairs, *hash)?,
                    ListOfPair::Intersection => intersection(name, features, &pairs)?,
                };
                self.groups[*group].features.push(feature);
            }
            Action::Score { inputs, group, to, score } => {
                let pairs = self.pairs(*group, *inputs);
                let scores = scores((self.feature(inputs.0), self.feature(inputs.1)), &pairs, *score);
                let group = &self.groups[*group];
                let column = (0..self.input.size).map(|sample| scores[group.row_of(sample)]).collect();
                self.dense.set(*to, column);
            }
        }
        Ok(())
    }

    fn feature(&self, at: SparseAt) -> &Feature {
        &self.groups[at.group].features[at.feature]
    }

    /// Replaces a feature by the result of `op`. `op` receives the feature by value, so that it can change buffers in
    /// place.
    fn replace(&mut self, at: SparseAt, op: impl FnOnce(Feature) -> Checked<Feature>) -> Checked<()> {
        let features = &mut self.groups[at.group].features;
        let feature = op(features.remove(at.feature))?;
        features.insert(at.feature, feature);
        Ok(())
    }

    fn column(&self, feature: usize) -> Vec<f32> {
        self.dense.copy(feature, self.input.size)
    }

    /// Adds a feature with one id per sample.
    fn push_ids(&mut self, group: usize, name: &Arc<str>, ids: Vec<i64>) -> Checked<()> {
        let feature = Feature::from_lengths(Arc::clone(name), ids, std::iter::repeat_n(1, self.input.size))?;
        self.groups[group].features.push(feature);
        Ok(())
    }

    /// Returns the pairs of rows that the rows of `group` combine, ordered like `inputs`. Computes them at the first
    /// call.
    fn pairs(&mut self, group: usize, inputs: (SparseAt, SparseAt)) -> Arc<[RowPair]> {
        let (first, second) = (inputs.0.group, inputs.1.group);
        if first == second {
            return (0..self.feature(inputs.0).rows()).map(|row| (row, row)).collect();
        }
        let pairs = match &self.groups[group].pairs {
            Some(pairs) => Arc::clone(pairs),
            None => self.find_pairs(group),
        };
        match self.groups[group].origin {
            Origin::Pair(left, _) if left != first => pairs.iter().map(|&(l, r)| (r, l)).collect(),
            _ => pairs,
        }
    }

    fn find_pairs(&mut self, group: usize) -> Arc<[RowPair]> {
        let Origin::Pair(left, right) = self.groups[group].origin else { return Arc::default() };
        let (inverse, pairs) = match (&self.groups[left].inverse, &self.groups[right].inverse) {
            (Some(left), Some(right)) => {
                let (inverse, pairs) = distinct_pairs(left, right);
                (Some(inverse.into()), pairs)
            }
            _ => (None, self.sample_pairs(left, right)),
        };
        let group = &mut self.groups[group];
        (group.inverse, group.pairs) = (inverse, Some(Arc::clone(&pairs)));
        pairs
    }

    /// Returns the pair of rows of every sample.
    fn sample_pairs(&self, left: usize, right: usize) -> Arc<[RowPair]> {
        let (left, right) = (&self.groups[left], &self.groups[right]);
        (0..self.input.size).map(|sample| (left.row_of(sample), right.row_of(sample))).collect()
    }
}
