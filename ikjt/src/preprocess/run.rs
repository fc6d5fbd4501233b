//! A batch on its way through the steps.

use std::sync::Arc;

use arrow::buffer::ScalarBuffer;
use arrow::datatypes::ArrowNativeType;

use super::columns::Columns;
use super::layout::{GroupLayout, Layout, Origin, SparseAt};
use super::local_hour::local_hours;
use super::pairs::{RowPair, distinct_pairs, intersection, product, scores};
use super::plan::{Action, ListOfPair};
use super::problem::Checked;
use super::sampling::{Draws, Sampling};
use crate::{Batch, BatchParts, Feature, Group, Result};

/// A batch between two steps.
#[derive(Debug)]
pub(super) struct Running {
    /// Samples that are left.
    size: usize,
    /// Their places in the batch that came in; `None` while all are left.
    samples: Option<Vec<u32>>,
    dense: Columns,
    labels: ScalarBuffer<f32>,
    label_width: usize,
    weights: Option<ScalarBuffer<f32>>,
    timestamps: Option<ScalarBuffer<i64>>,
    /// As in the layout.
    groups: Vec<RunningGroup>,
}

#[derive(Debug)]
struct RunningGroup {
    name: Arc<str>,
    origin: Origin,
    inverse: Option<ScalarBuffer<i32>>,
    features: Vec<Feature>,
    /// Of a group of pairs, once a step has asked for them: the rows of the two groups that each row stands for.
    pairs: Option<Arc<[RowPair]>>,
}

impl RunningGroup {
    fn row_of(&self, sample: usize) -> usize {
        self.inverse.as_ref().map_or(sample, |inverse| inverse[sample] as usize)
    }
}

impl Running {
    /// `batch`, which has the features with which `layout` began.
    pub(super) fn new(batch: Batch, layout: &Layout, dense_width: usize) -> Self {
        let label_width = batch.label_width();
        let BatchParts { size, dense, labels, weights, timestamps, groups } = batch.into_parts();
        let mut input = groups.into_iter().map(Group::into_parts);
        let group = |layout: &GroupLayout| {
            let parts = if layout.origin == Origin::Input { input.next() } else { None };
            let (name, inverse, features) = match parts {
                Some((name, inverse, _, features)) => (name, inverse, features),
                None => (layout.name.as_str().into(), None, Vec::new()),
            };
            RunningGroup { name, origin: layout.origin, inverse, features, pairs: None }
        };
        let groups = layout.groups().iter().map(group).collect();
        let dense = Columns::new(dense, dense_width);
        Self { size, samples: None, dense, labels, label_width, weights, timestamps, groups }
    }

    /// The batch as it is now.
    pub(super) fn finish(self) -> Result<Batch> {
        let groups = self.groups.into_iter().filter(|group| !group.features.is_empty());
        let groups = groups.map(|group| Group::try_new(group.name, group.inverse, group.features));
        Batch::try_new(BatchParts {
            size: self.size,
            dense: self.dense.into_matrix(self.samples.as_deref(), self.size),
            labels: self.labels,
            weights: self.weights,
            timestamps: self.timestamps,
            groups: groups.collect::<Result<_>>()?,
        })
    }

    /// `start` is the place of the batch's first sample in the epoch.
    pub(super) fn apply(&mut self, action: &Action, start: u64) -> Checked<()> {
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
                let timestamps = self.timestamps.as_deref().unwrap_or_default();
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
                let column = (0..self.size).map(|sample| scores[group.row_of(sample)]).collect();
                self.dense.set(*to, column);
            }
            Action::Sampling { sampling, label, draws } => self.sample(sampling, *label, *draws, start),
        }
        Ok(())
    }

    fn feature(&self, at: SparseAt) -> &Feature {
        &self.groups[at.group].features[at.feature]
    }

    /// Hands the feature itself over, so that its buffers can be changed in place.
    fn replace(&mut self, at: SparseAt, op: impl FnOnce(Feature) -> Checked<Feature>) -> Checked<()> {
        let features = &mut self.groups[at.group].features;
        let feature = op(features.remove(at.feature))?;
        features.insert(at.feature, feature);
        Ok(())
    }

    /// The place in the batch that came in.
    fn origin(&self, sample: usize) -> usize {
        self.samples.as_ref().map_or(sample, |samples| samples[sample] as usize)
    }

    fn column(&self, feature: usize) -> Vec<f32> {
        self.dense.copy(feature, (0..self.size).map(|sample| self.origin(sample)))
    }

    /// A new feature with one id per sample.
    fn push_ids(&mut self, group: usize, name: &Arc<str>, ids: Vec<i64>) -> Checked<()> {
        let feature = Feature::from_lengths(Arc::clone(name), ids, std::iter::repeat_n(1, self.size))?;
        self.groups[group].features.push(feature);
        Ok(())
    }

    /// The pairs of rows that the rows of `group` stand for, as the inputs are ordered; found when first asked for.
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

    /// The pair of every sample.
    fn sample_pairs(&self, left: usize, right: usize) -> Arc<[RowPair]> {
        let (left, right) = (&self.groups[left], &self.groups[right]);
        (0..self.size).map(|sample| (left.row_of(sample), right.row_of(sample))).collect()
    }

    fn sample(&mut self, sampling: &Sampling, label: Option<usize>, draws: Draws, start: u64) {
        let mut kept: Vec<u32> = Vec::with_capacity(self.size);
        let mut weights: Vec<f32> = Vec::with_capacity(self.size);
        for sample in 0..self.size {
            let rate = sampling.rates.of(label.map(|label| self.labels[sample * self.label_width + label]));
            if draws.draw(start.wrapping_add(self.origin(sample) as u64)) < rate {
                let weight = self.weights.as_ref().map_or(1.0, |weights| weights[sample]);
                let rate = if sampling.correct_weights { rate } else { 1.0 };
                weights.push((f64::from(weight) / rate) as f32);
                // A batch has fewer than 2^31 samples.
                kept.push(sample as u32);
            }
        }
        if sampling.correct_weights || self.weights.is_some() {
            self.weights = Some(weights.into());
        }
        if kept.len() < self.size {
            self.keep(&kept);
        }
    }

    /// Keeps the samples `kept` of everything but the weights. Rows stay, whether samples are left for them or not;
    /// only generated groups that have a row per sample lose rows.
    fn keep(&mut self, kept: &[u32]) {
        self.size = kept.len();
        self.samples = Some(kept.iter().map(|sample| self.origin(*sample as usize) as u32).collect());
        self.dense.keep(kept);
        let width = self.label_width;
        let labels = kept.iter().flat_map(|sample| &self.labels[*sample as usize * width..][..width]);
        self.labels = labels.copied().collect();
        self.timestamps = self.timestamps.take().map(|times| gather(&times, kept));
        for group in &mut self.groups {
            match &group.inverse {
                Some(inverse) => group.inverse = Some(gather(inverse, kept)),
                None if group.origin == Origin::Input => {
                    group.inverse = Some(kept.iter().map(|sample| *sample as i32).collect());
                }
                None => {
                    let rows = kept.iter().map(|sample| *sample as usize);
                    group.features.iter_mut().for_each(|feature| *feature = feature.gather(rows.clone()));
                }
            }
        }
        for group in 0..self.groups.len() {
            let RunningGroup { inverse, pairs, origin, .. } = &self.groups[group];
            if let (Origin::Pair(left, right), None, Some(_)) = (*origin, inverse, pairs) {
                self.groups[group].pairs = Some(self.sample_pairs(left, right));
            }
        }
    }
}

fn gather<T: ArrowNativeType>(values: &ScalarBuffer<T>, places: &[u32]) -> ScalarBuffer<T> {
    places.iter().map(|place| values[*place as usize]).collect()
}
