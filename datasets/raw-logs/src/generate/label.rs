//! The hidden model from which labels are drawn, so that a trained model has something to learn.

use std::mem::discriminant;

use super::features::{IdSpace, mix, name_hash, rank_probabilities};
use super::workload::GroupSpec;

/// The weights of the first dense features.
const DENSE_WEIGHTS: [f64; 4] = [0.5, -0.5, 0.35, -0.35];
/// The weight of each sparse term.
const SPARSE_WEIGHT: f64 = 0.5;
/// The number of features of each kind that have a term. These are the first features of the kind.
const FEATURES_PER_KIND: usize = 2;
/// The bias. About one label in four is positive, because the logit has a standard deviation of about 1.4.
const BIAS: f64 = -1.43;

/// A logistic model of the first four dense features and the first two user, sequence and item features.
///
/// Every id of such a feature has a hidden effect, which is uniform with mean 0 (over the distribution of ids) and
/// variance 1. A list contributes the sum of its ids' effects divided by the square root of the feature's mean
/// length. This is linear in the one-hot ids, so a model with sum pooling can express it. The effects depend only on
/// the feature's name: logs with different seeds have the same effects, so a model trained on one log can be tested
/// on another.
#[derive(Debug)]
pub(super) struct HiddenModel {
    terms: Vec<Term>,
}

#[derive(Debug)]
struct Term {
    /// The index of the feature among the sparse columns.
    column: usize,
    salt: u64,
    /// The expectation of an id's raw effect.
    mean: f64,
    scale: f64,
}

impl HiddenModel {
    pub(super) fn new(groups: &[GroupSpec]) -> Self {
        let probabilities = rank_probabilities();
        let mut terms = Vec::new();
        let mut column = 0;
        for (index, group) in groups.iter().enumerate() {
            let same_kind = |other: &GroupSpec| discriminant(&other.change) == discriminant(&group.change);
            let first_of_kind = groups.iter().take(index).all(|other| !same_kind(other));
            let taken = if first_of_kind { FEATURES_PER_KIND } else { 0 };
            for (offset, name) in group.features.iter().enumerate().take(taken) {
                terms.push(Term::new(column + offset, name, group.length, &probabilities));
            }
            column += group.features.len();
        }
        Self { terms }
    }

    /// Returns the probability that the label of a row is 1, given its dense values and its list in each sparse
    /// column.
    pub(super) fn probability<'a>(&self, dense: &[f32], list: impl Fn(usize) -> &'a [i64]) -> f64 {
        let dense: f64 =
            dense.iter().zip(DENSE_WEIGHTS).map(|(value, weight)| f64::from(*value) * weight).sum();
        let sparse: f64 = self.terms.iter().map(|term| term.value(list(term.column))).sum();
        1.0 / (1.0 + (-BIAS - dense - sparse).exp())
    }
}

impl Term {
    fn new(column: usize, name: &str, length: usize, probabilities: &[f64]) -> Self {
        let (ids, salt) = (IdSpace::of(name), name_hash(name));
        let effects = (0u32..).zip(probabilities).map(|(rank, p)| p * effect(salt, i64::from(ids.id(rank))));
        let mean = effects.sum();
        Self { column, salt, mean, scale: SPARSE_WEIGHT / (length.max(1) as f64).sqrt() }
    }

    fn value(&self, list: &[i64]) -> f64 {
        self.scale * list.iter().map(|id| effect(self.salt, *id) - self.mean).sum::<f64>()
    }
}

/// Returns the raw effect of an id, which is uniform between -√3 and √3 and thus has variance 1.
fn effect(salt: u64, id: i64) -> f64 {
    let uniform = (mix(salt ^ id as u64) >> 11) as f64 / (1u64 << 53) as f64;
    (2.0 * uniform - 1.0) * 3f64.sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::workload::Workload;
    use super::*;

    #[test]
    fn the_first_two_features_of_each_kind_have_an_effect() {
        let columns = |workload: Workload| -> Vec<usize> {
            HiddenModel::new(&workload.groups()).terms.iter().map(|term| term.column).collect()
        };
        assert_eq!(columns(Workload::Rm1), [0, 1, 24, 25, 30, 31]);
        assert_eq!(columns(Workload::Rm3), [0, 1, 13, 14]);
    }

    #[test]
    fn every_input_moves_the_probability() {
        let model = HiddenModel::new(&Workload::Rm1.groups());
        let base = model.probability(&[0.0; 13], |_| &[]);
        assert!((base - 1.0 / (1.0 + 1.43f64.exp())).abs() < 1e-12);
        assert!(model.probability(&[1.0, 0.0, 0.0, 0.0], |_| &[]) > base);
        for term in &model.terms {
            let moved =
                model.probability(&[0.0; 13], |column| if column == term.column { &[5] } else { &[] });
            assert_ne!(moved, base);
        }
    }
}
