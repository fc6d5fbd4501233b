//! Groups as TorchRec's KeyedJaggedTensors.
//!
//! A KeyedJaggedTensor lays lists out key by key: the lists of key 0 for every row, then those of key 1, one after the
//! other in one buffer of values. In the plain form every key has a row per sample. In the **variable-batch** form
//! keys differ in their number of rows, their stride, and *inverse indices* lead from sample to row, by key:
//!
//! ```text
//!           samples          plain                        variable batch
//! user    [7] [7] [8]   ─▶   values   [7, 7, 8, 1, 2, 3]  values   [7, 8, 1, 2, 3]
//! item    [1] [2] [3]        lengths  [1, 1, 1, 1, 1, 1]  lengths  [1, 1, 1, 1, 1]
//!                            stride   3                   strides  [[2], [3]]   inverse [[0, 0, 1], [0, 1, 2]]
//! ```
//!
//! These are the fields of `torchrec.sparse.jagged_tensor.KeyedJaggedTensor`, whose `EmbeddingBagCollection` selects
//! key k's pooled row `inverse[k][i]` for sample i. TorchRec knows neither groups nor overlapping rows.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use crate::builder::{FeatureBuilder, check_values};
use crate::{Error, Feature, Group, Result};

/// A KeyedJaggedTensor as TorchRec has it: F features of B samples, whose lists are laid out key by key. Cloning shares
/// the buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyedJaggedTensor {
    /// The names of the features, `[F]`.
    pub keys: Vec<Arc<str>>,
    /// The ids of all lists, key by key, `[nnz]`.
    pub values: ScalarBuffer<i64>,
    /// One weight per id, `[nnz]`, if the features have weights.
    pub weights: Option<ScalarBuffer<f32>>,
    /// Ids per list, key by key, `[sum of the strides]`.
    pub lengths: ScalarBuffer<i32>,
    /// Lists by key, `[F]`: B for each key of the plain form.
    pub strides: Vec<usize>,
    /// In the variable-batch form, the row of every sample by key: `[F, B]` row-major.
    pub inverse_indices: Option<ScalarBuffer<i64>>,
}

impl KeyedJaggedTensor {
    /// The plain form of groups: every sample carries its lists.
    ///
    /// The buffers of a single feature whose rows are its samples' lists, one after the other, are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the groups differ in their number of samples, two features have the same name, some
    /// features have weights and others have none, or there are more ids than `i32` counts.
    pub fn expanded(groups: &[Group]) -> Result<Self> {
        Self::lay_out(groups, Group::inverse, None)
    }

    /// The variable-batch form of groups: every distinct row once, and inverse indices. Rows that overlap are laid out
    /// one after the other.
    ///
    /// The buffers of a single feature whose rows stand so are shared.
    ///
    /// # Errors
    ///
    /// As [`expanded`](Self::expanded).
    pub fn variable(groups: &[Group]) -> Result<Self> {
        let samples = groups.first().map_or(0, Group::samples);
        let features: usize = groups.iter().map(|group| group.features().len()).sum();
        let mut indices = Vec::with_capacity(samples * features);
        for group in groups {
            for _ in group.features() {
                match group.inverse() {
                    None => indices.extend((0..group.rows()).map(|row| row as i64)),
                    Some(inverse) => indices.extend(inverse.iter().map(|&row| i64::from(row))),
                }
            }
        }
        Self::lay_out(groups, |_| None, Some(indices.into()))
    }

    /// The rows `rows_of` of every feature, all of them if that is `None`, key by key.
    fn lay_out(
        groups: &[Group],
        rows_of: fn(&Group) -> Option<&ScalarBuffer<i32>>,
        inverse_indices: Option<ScalarBuffer<i64>>,
    ) -> Result<Self> {
        let samples = groups.first().map_or(0, Group::samples);
        if let Some(group) = groups.iter().find(|group| group.samples() != samples) {
            let (first, name) = (groups[0].name(), group.name());
            let message = format!("group `{first}` has {samples} samples, `{name}` has {}", group.samples());
            return wrong(message);
        }
        let features = || groups.iter().flat_map(Group::features);
        let keys: Vec<_> = features().map(Feature::shared_name).collect();
        let mut seen = HashSet::new();
        if let Some(twice) = keys.iter().find(|key| !seen.insert(*key)) {
            return wrong(format!("two features have the name `{twice}`"));
        }
        let of_group = |group: &Group| {
            let lists = rows_of(group).map_or(group.rows(), |rows| rows.len());
            std::iter::repeat_n(lists, group.features().len())
        };
        let strides = groups.iter().flat_map(of_group).collect();
        let feature = match groups {
            // Nothing to lay out.
            [group] if keys.len() == 1 && rows_of(group).is_none() => group.features()[0].compact()?,
            _ => concat_keys(groups, rows_of)?,
        };
        let (_, values, weights, _, lengths) = feature.into_parts();
        Ok(Self { keys, values, weights, lengths, strides, inverse_indices })
    }
}

fn wrong<T>(message: String) -> Result<T> {
    Err(Error::invariant("KeyedJaggedTensor", message))
}

/// All features' rows in one, key by key.
fn concat_keys(groups: &[Group], rows_of: fn(&Group) -> Option<&ScalarBuffer<i32>>) -> Result<Feature> {
    let features = || {
        let of_group = |group| (rows_of(group), Group::features(group));
        groups.iter().map(of_group).flat_map(|(rows, features)| features.iter().map(move |f| (f, rows)))
    };
    let weighted = features().next().is_some_and(|(feature, _)| feature.weights().is_some());
    if let Some((other, _)) = features().find(|(feature, _)| feature.weights().is_some() != weighted) {
        let message = format!(
            "some features have weights, but not all: see `{}`\n  hint: select those with weights, and those without, \
             and convert each",
            other.name()
        );
        return wrong(message);
    }
    let ids = |(feature, rows): (&Feature, Option<&ScalarBuffer<i32>>)| match rows {
        None => feature.total_size(),
        Some(rows) => rows.iter().map(|&row| feature.sizes()[row as usize] as u64).sum(),
    };
    let total = check_values("KeyedJaggedTensor", features().map(ids).sum())?;
    let lists = features().map(|(feature, rows)| rows.map_or(feature.rows(), |rows| rows.len())).sum();
    let mut builder = FeatureBuilder::with_capacity(weighted, total, lists);
    for (feature, rows) in features() {
        match rows {
            Some(rows) => builder.append_copies(feature, rows.iter().map(|&row| row as usize)),
            None if feature.is_compact() => {
                let span = 0..feature.values().len();
                builder.append_span(feature, feature.offsets().iter(), feature.sizes().iter(), span);
            }
            None => builder.append_copies(feature, 0..feature.rows()),
        }
    }
    Ok(builder.finish("all keys".into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{Item, batches, lists};

    /// The lists of a key, one per row, by the definition of the layout.
    fn naive(kjt: &KeyedJaggedTensor, key: usize) -> Vec<Vec<Item>> {
        let first: usize = kjt.strides[..key].iter().sum();
        let list = |i: usize| {
            let start: usize = kjt.lengths[..i].iter().map(|&length| length as usize).sum();
            let places = start..start + kjt.lengths[i] as usize;
            let weight = |p: usize| kjt.weights.as_ref().map(|weights| weights[p].to_bits());
            places.map(|p| (kjt.values[p], weight(p))).collect()
        };
        (first..first + kjt.strides[key]).map(list).collect()
    }

    /// The groups whose features all have weights, or all have none.
    fn alike(groups: &[Group], weighted: bool) -> Vec<Group> {
        let keep = |group: &Group| {
            let keep = group.features().iter().filter(|feature| feature.weights().is_some() == weighted);
            let keep: Vec<_> = keep.cloned().collect();
            (!keep.is_empty()).then(|| Group::try_new(group.name(), group.inverse().cloned(), keep).unwrap())
        };
        groups.iter().filter_map(keep).collect()
    }

    proptest! {
        #[test]
        fn the_plain_form_has_every_sample(batch in batches(), weighted in any::<bool>()) {
            let groups = alike(batch.groups(), weighted);
            let kjt = KeyedJaggedTensor::expanded(&groups).unwrap();
            let mut key = 0;
            for group in &groups {
                for feature in 0..group.features().len() {
                    let expected: Vec<_> = lists(group).into_iter().map(|sample| sample[feature].clone()).collect();
                    prop_assert_eq!(naive(&kjt, key), expected);
                    key += 1;
                }
            }
            prop_assert_eq!(key, kjt.keys.len());
            let expanded: Vec<_> = groups.iter().map(Group::expand).collect();
            prop_assert_eq!(&KeyedJaggedTensor::expanded(&expanded).unwrap(), &kjt);
        }

        #[test]
        fn the_variable_form_has_every_row_once(batch in batches(), weighted in any::<bool>()) {
            let groups = alike(batch.groups(), weighted);
            let kjt = KeyedJaggedTensor::variable(&groups).unwrap();
            let indices = kjt.inverse_indices.as_ref().unwrap();
            let mut key = 0;
            for group in &groups {
                let whole = lists(group);
                for feature in 0..group.features().len() {
                    let rows = naive(&kjt, key);
                    prop_assert_eq!(rows.len(), group.rows());
                    for (sample, lists) in whole.iter().enumerate() {
                        let row = indices[key * batch.size() + sample] as usize;
                        prop_assert_eq!(&rows[row], &lists[feature]);
                    }
                    key += 1;
                }
            }
        }
    }

    #[test]
    fn a_single_feature_is_shared() {
        let feature = Feature::from_rows("x", &[[1, 2], [3, 4]]).unwrap();
        let plain = Group::try_new("g", None, vec![feature.clone()]).unwrap();
        let kjt = KeyedJaggedTensor::expanded(&[plain]).unwrap();
        assert_eq!(kjt.values.as_ptr(), feature.values().as_ptr());
        assert_eq!(kjt.lengths.as_ptr(), feature.sizes().as_ptr());
        let folded = Group::try_new("g", Some(vec![0, 0, 1].into()), vec![feature.clone()]).unwrap();
        let kjt = KeyedJaggedTensor::variable(&[folded]).unwrap();
        assert_eq!(kjt.values.as_ptr(), feature.values().as_ptr());
        assert_eq!(kjt.inverse_indices.unwrap()[..], [0, 0, 1]);
    }

    /// The example at the head of this file.
    #[test]
    fn keys_of_different_strides_stand_key_by_key() {
        let group = |name: &str, inverse: Option<Vec<i32>>, rows: &[[i64; 1]]| {
            let feature = Feature::from_rows(name, rows).unwrap();
            Group::try_new(name, inverse.map(Into::into), vec![feature]).unwrap()
        };
        let groups = [group("user", Some(vec![0, 0, 1]), &[[7], [8]]), group("item", None, &[[1], [2], [3]])];
        let plain = KeyedJaggedTensor::expanded(&groups).unwrap();
        assert_eq!(plain.values[..], [7, 7, 8, 1, 2, 3]);
        assert_eq!(plain.strides, [3, 3]);
        let variable = KeyedJaggedTensor::variable(&groups).unwrap();
        assert_eq!(variable.values[..], [7, 8, 1, 2, 3]);
        assert_eq!(variable.strides, [2, 3]);
        assert_eq!(variable.inverse_indices.unwrap()[..], [0, 0, 1, 0, 1, 2]);
    }

    #[test]
    fn groups_that_do_not_fit_together_are_refused() {
        let group = |name: &str, rows: &[[i64; 1]]| {
            Group::try_new(name, None, vec![Feature::from_rows("x", rows).unwrap()]).unwrap()
        };
        let refused = |groups: &[Group]| KeyedJaggedTensor::expanded(groups).unwrap_err().to_string();
        assert_eq!(
            refused(&[group("a", &[[1]]), group("b", &[[1]])]),
            "KeyedJaggedTensor: two features have the name `x`"
        );
        assert_eq!(
            refused(&[group("a", &[[1]]), group("b", &[])]),
            "KeyedJaggedTensor: group `a` has 1 samples, `b` has 0"
        );
    }

    #[test]
    fn features_with_and_without_weights_do_not_mix() {
        let x = Feature::from_rows("x", &[[1]]).unwrap();
        let y = Feature::try_new("y", vec![1_i64], Some(vec![1.0_f32].into()), vec![0], vec![1]).unwrap();
        let group = Group::try_new("g", None, vec![x, y]).unwrap();
        let refused = KeyedJaggedTensor::expanded(&[group]).unwrap_err().to_string();
        assert!(refused.contains("some features have weights, but not all: see `y`"), "{refused}");
    }
}
