//! Groups to TorchRec's KeyedJaggedTensors and back.
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
//! These are the fields of `torchrec.sparse.jagged_tensor.KeyedJaggedTensor`, whose `EmbeddingBagCollection` selects key
//! k's pooled row `inverse[k][i]` for sample i. TorchRec knows neither groups nor overlapping rows.

use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use super::layout::{complete, first_repeated, lists_of_keys, places_of_keys, wrong};
use crate::builder::{FeatureBuilder, check_values};
use crate::{Feature, Group, Result};

/// What a [`KeyedJaggedTensor`] is made of.
#[derive(Debug, Clone, Default)]
pub struct KjtParts {
    /// The names of the features, F.
    pub keys: Vec<Arc<str>>,
    /// The ids of all lists, key by key, `[nnz]`.
    pub values: ScalarBuffer<i64>,
    /// One weight per id, `[nnz]`.
    pub weights: Option<ScalarBuffer<f32>>,
    /// Ids per list, key by key. Lengths, offsets or both must be given.
    pub lengths: Option<ScalarBuffer<i32>>,
    /// Where each list starts, key by key, and where the last one ends: one more than there are lists.
    pub offsets: Option<ScalarBuffer<i32>>,
    /// Lists per key and rank, if keys differ in it (a variable batch); `[F][ranks]`.
    pub stride_per_key_per_rank: Option<Vec<Vec<i64>>>,
    /// The names of all keys, in any order, and for each the row of every sample: `[F, B]` row-major.
    pub inverse_indices: Option<(Vec<Arc<str>>, ScalarBuffer<i64>)>,
}

/// A KeyedJaggedTensor as TorchRec has it: lists laid out key by key. Cloning shares the buffers.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyedJaggedTensor {
    keys: Vec<Arc<str>>,
    values: ScalarBuffer<i64>,
    weights: Option<ScalarBuffer<f32>>,
    lengths: ScalarBuffer<i32>,
    offsets: ScalarBuffer<i32>,
    /// By key: its lists among `lengths`.
    lists: Vec<Range<usize>>,
    /// By key: its place in the inverse indices, if there are any.
    places: Vec<usize>,
    stride_per_key_per_rank: Option<Vec<Vec<i64>>>,
    inverse_indices: Option<(Vec<Arc<str>>, ScalarBuffer<i64>)>,
}

impl KeyedJaggedTensor {
    /// A tensor of these parts.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if
    /// - a key is there twice,
    /// - neither lengths nor offsets are given, or they contradict each other,
    /// - a length is negative, offsets do not start at 0 or fall, or the lists do not end with the last value,
    /// - weights are not as many as values,
    /// - strides are negative, are not given for every key and the same number of ranks, or do not sum to the number of
    ///   lists; without strides, the lists are no multiple of the keys,
    /// - inverse indices do not name every key once, are no multiple of the keys, lead to no row of their key, or stand
    ///   beside strides of several ranks.
    pub fn try_new(parts: KjtParts) -> Result<Self> {
        let KjtParts { keys, values, weights, lengths, offsets, stride_per_key_per_rank, inverse_indices } =
            parts;
        if let Some(weights) = weights.as_ref().filter(|weights| weights.len() != values.len()) {
            return wrong(format!("{} weights for {} values", weights.len(), values.len()));
        }
        if let Some(twice) = first_repeated(&keys) {
            return wrong(format!("key `{twice}` is there twice"));
        }
        let (lengths, offsets) = complete(lengths, offsets, values.len())?;
        let lists = lists_of_keys(&keys, stride_per_key_per_rank.as_deref(), lengths.len())?;
        let mut places = vec![];
        if let Some((names, indices)) = &inverse_indices {
            if stride_per_key_per_rank.iter().flatten().any(|strides| strides.len() != 1) {
                return wrong("inverse indices beside strides of several ranks");
            }
            places = places_of_keys(&keys, &lists, names, indices)?;
        }
        Ok(Self {
            places,
            keys,
            values,
            weights,
            lengths,
            offsets,
            lists,
            stride_per_key_per_rank,
            inverse_indices,
        })
    }

    /// The plain form of groups: every sample carries its lists.
    ///
    /// The buffers of a single feature whose rows are its samples' lists, one after the other, are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the groups differ in their number of samples, two features have the same name, some
    /// features have weights and others have none, or there are more ids than `i32` counts.
    pub fn expanded(groups: &[Group]) -> Result<Self> {
        Self::lay_out(groups, Group::inverse, None, None)
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
        let of_groups = |group: &Group| std::iter::repeat_n(group.rows() as i64, group.features().len());
        let strides = groups.iter().flat_map(of_groups).map(|rows| vec![rows]).collect();
        let samples = groups.first().map_or(0, Group::samples);
        let mut indices =
            Vec::with_capacity(samples * groups.iter().map(|group| group.features().len()).sum::<usize>());
        for group in groups {
            for _ in group.features() {
                match group.inverse() {
                    None => indices.extend((0..group.rows()).map(|row| row as i64)),
                    Some(inverse) => indices.extend(inverse.iter().map(|&row| i64::from(row))),
                }
            }
        }
        Self::lay_out(groups, |_| None, Some(strides), Some(indices.into()))
    }

    /// The rows `rows_of` of every feature, all of them if that is none, key by key.
    fn lay_out(
        groups: &[Group],
        rows_of: fn(&Group) -> Option<&ScalarBuffer<i32>>,
        strides: Option<Vec<Vec<i64>>>,
        indices: Option<ScalarBuffer<i64>>,
    ) -> Result<Self> {
        let samples = groups.first().map_or(0, Group::samples);
        if let Some(group) = groups.iter().find(|group| group.samples() != samples) {
            let (first, name) = (groups[0].name(), group.name());
            let message = format!("group `{first}` has {samples} samples, `{name}` has {}", group.samples());
            return wrong(message);
        }
        let features = || groups.iter().flat_map(Group::features);
        let keys: Vec<_> = features().map(Feature::shared_name).collect();
        let feature = match groups {
            // Nothing to lay out.
            [group] if keys.len() == 1 && rows_of(group).is_none() => group.features()[0].compact()?,
            _ => concat_keys(groups, rows_of)?,
        };
        Self::try_new(KjtParts {
            inverse_indices: indices.map(|indices| (keys.clone(), indices)),
            keys,
            values: feature.values().clone(),
            weights: feature.weights().cloned(),
            lengths: Some(feature.sizes().clone()),
            offsets: None,
            stride_per_key_per_rank: strides,
        })
    }

    /// The groups that the tensor holds; `group_of` gives a key's group. Groups stand in the order of their first keys,
    /// and have an inverse index if the tensor has one. Values, weights and lengths are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if two keys of a group differ in their number of rows or their inverse indices.
    pub fn to_groups(&self, group_of: impl Fn(&str) -> String) -> Result<Vec<Group>> {
        let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
        for (i, key) in self.keys.iter().enumerate() {
            let group = group_of(key);
            match groups.iter_mut().find(|(known, _)| *known == group) {
                None => groups.push((group, vec![i])),
                Some((_, keys)) => keys.push(i),
            }
        }
        let build = |(name, keys): (String, Vec<usize>)| {
            let inverse = self.inverse(keys[0]);
            if let Some(&other) = keys.iter().find(|&&key| self.inverse(key) != inverse) {
                let (first, other) = (&self.keys[keys[0]], &self.keys[other]);
                return wrong(format!(
                    "keys `{first}` and `{other}` of group `{name}` differ in their inverse indices"
                ));
            }
            // Rows are counted by `i32`: lengths are, which `Feature` checks.
            let inverse = inverse.map(|rows| rows.iter().map(|&row| row as i32).collect());
            Group::try_new(name, inverse, keys.iter().map(|&key| self.feature(key)).collect::<Result<_>>()?)
        };
        groups.into_iter().map(build).collect()
    }

    /// The lists of a key.
    fn feature(&self, key: usize) -> Result<Feature> {
        let lists = self.lists[key].clone();
        let offsets = self.offsets.slice(lists.start, lists.len());
        let start = self.offsets.get(lists.start).map_or(0, |&offset| offset as usize);
        let end = self.offsets.get(lists.end).map_or(0, |&offset| offset as usize);
        let offsets =
            if start == 0 { offsets } else { offsets.iter().map(|offset| offset - start as i32).collect() };
        let weights = self.weights.as_ref().map(|weights| weights.slice(start, end - start));
        let values = self.values.slice(start, end - start);
        Feature::try_new(
            Arc::clone(&self.keys[key]),
            values,
            weights,
            offsets,
            self.lengths.slice(lists.start, lists.len()),
        )
    }

    /// The inverse indices of a key.
    fn inverse(&self, key: usize) -> Option<&[i64]> {
        let (names, indices) = self.inverse_indices.as_ref()?;
        let (place, samples) = (self.places[key], indices.len() / names.len());
        Some(&indices[place * samples..(place + 1) * samples])
    }

    /// The names of the features, F.
    pub fn keys(&self) -> &[Arc<str>] {
        &self.keys
    }

    /// The ids of all lists, key by key, `[nnz]`.
    pub fn values(&self) -> &ScalarBuffer<i64> {
        &self.values
    }

    /// One weight per id, `[nnz]`.
    pub fn weights(&self) -> Option<&ScalarBuffer<f32>> {
        self.weights.as_ref()
    }

    /// Ids per list, key by key.
    pub fn lengths(&self) -> &ScalarBuffer<i32> {
        &self.lengths
    }

    /// Where each list starts, key by key, and where the last one ends.
    pub fn offsets(&self) -> &ScalarBuffer<i32> {
        &self.offsets
    }

    /// How many lists each key has.
    pub fn stride_per_key(&self) -> impl ExactSizeIterator<Item = usize> {
        self.lists.iter().map(ExactSizeIterator::len)
    }

    /// Lists per key and rank, `[F][ranks]`, if this is a variable batch.
    pub fn stride_per_key_per_rank(&self) -> Option<&[Vec<i64>]> {
        self.stride_per_key_per_rank.as_deref()
    }

    /// Key names, and for each the row of every sample, `[F, B]` row-major.
    pub fn inverse_indices(&self) -> Option<(&[Arc<str>], &ScalarBuffer<i64>)> {
        self.inverse_indices.as_ref().map(|(names, indices)| (&names[..], indices))
    }
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
        let strides: Vec<usize> = kjt.stride_per_key().collect();
        let first: usize = strides[..key].iter().sum();
        let list = |i: usize| {
            let start: usize = kjt.lengths()[..i].iter().map(|&length| length as usize).sum();
            let places = start..start + kjt.lengths()[i] as usize;
            places.map(|p| (kjt.values()[p], kjt.weights().map(|weights| weights[p].to_bits()))).collect()
        };
        (first..first + strides[key]).map(list).collect()
    }

    /// The groups whose features all have weights, or all have none.
    fn alike(groups: &[Group], weighted: bool) -> Vec<Group> {
        let keep = |group: &Group| {
            let keep =
                (0..group.features().len()).filter(|&i| group.features()[i].weights().is_some() == weighted);
            let keep: Vec<_> = keep.collect();
            (!keep.is_empty()).then(|| group.with_features(keep))
        };
        groups.iter().filter_map(keep).collect()
    }

    fn group_of(key: &str) -> String {
        format!("g{}", &key[1..2])
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
            prop_assert_eq!(key, kjt.keys().len());
            let expanded: Vec<_> = groups.iter().map(Group::expand).collect();
            prop_assert_eq!(&KeyedJaggedTensor::expanded(&expanded).unwrap(), &kjt);
            prop_assert_eq!(kjt.to_groups(group_of).unwrap(), expanded);
        }

        #[test]
        fn the_variable_form_has_every_row_and_comes_back(batch in batches(), weighted in any::<bool>()) {
            let groups = alike(batch.groups(), weighted);
            let kjt = KeyedJaggedTensor::variable(&groups).unwrap();
            let (_, indices) = kjt.inverse_indices().unwrap();
            let mut key = 0;
            for group in &groups {
                let whole = lists(group);
                for feature in 0..group.features().len() {
                    let rows = naive(&kjt, key);
                    for (sample, lists) in whole.iter().enumerate() {
                        let row = indices[key * batch.size() + sample] as usize;
                        prop_assert_eq!(&rows[row], &lists[feature]);
                    }
                    key += 1;
                }
            }
            let back = kjt.to_groups(group_of).unwrap();
            prop_assert_eq!(back.len(), groups.len());
            for (back, group) in back.iter().zip(&groups) {
                prop_assert_eq!(back.features(), group.features());
                prop_assert_eq!(lists(back), lists(group));
                prop_assert_eq!(back.features()[0].values().len() as u64, back.features()[0].total_size());
            }
        }

        #[test]
        fn lengths_and_offsets_are_the_same_tensor(batch in batches(), weighted in any::<bool>()) {
            let kjt = KeyedJaggedTensor::expanded(&alike(batch.groups(), weighted)).unwrap();
            let parts = |lengths, offsets| KjtParts {
                keys: kjt.keys().to_vec(),
                values: kjt.values().clone(),
                weights: kjt.weights().cloned(),
                lengths,
                offsets,
                ..KjtParts::default()
            };
            let (lengths, offsets) = (Some(kjt.lengths().clone()), Some(kjt.offsets().clone()));
            prop_assert_eq!(&KeyedJaggedTensor::try_new(parts(None, offsets.clone())).unwrap(), &kjt);
            prop_assert_eq!(&KeyedJaggedTensor::try_new(parts(lengths, offsets)).unwrap(), &kjt);
        }
    }

    #[test]
    fn a_single_feature_is_shared() {
        let feature = Feature::from_rows("x", &[[1, 2], [3, 4]]).unwrap();
        let plain = Group::try_new("g", None, vec![feature.clone()]).unwrap();
        let kjt = KeyedJaggedTensor::expanded(&[plain]).unwrap();
        assert_eq!(kjt.values().as_ptr(), feature.values().as_ptr());
        assert_eq!(kjt.lengths().as_ptr(), feature.sizes().as_ptr());
        let folded = Group::try_new("g", Some(vec![0, 0, 1].into()), vec![feature.clone()]).unwrap();
        let kjt = KeyedJaggedTensor::variable(&[folded]).unwrap();
        assert_eq!(kjt.values().as_ptr(), feature.values().as_ptr());
        let back = &kjt.to_groups(str::to_owned).unwrap()[0];
        assert_eq!(back.features()[0].values().as_ptr(), feature.values().as_ptr());
        assert_eq!(back.inverse().unwrap()[..], [0, 0, 1]);
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
        assert_eq!(plain.values()[..], [7, 7, 8, 1, 2, 3]);
        assert_eq!(plain.stride_per_key().collect::<Vec<_>>(), [3, 3]);
        let variable = KeyedJaggedTensor::variable(&groups).unwrap();
        assert_eq!(variable.values()[..], [7, 8, 1, 2, 3]);
        assert_eq!(variable.stride_per_key_per_rank().unwrap(), [[2], [3]]);
        assert_eq!(variable.inverse_indices().unwrap().1[..], [0, 0, 1, 0, 1, 2]);
        let together = variable.to_groups(|_| "all".to_owned()).unwrap_err().to_string();
        assert_eq!(
            together,
            "KeyedJaggedTensor: keys `user` and `item` of group `all` differ in their inverse indices"
        );
    }

    #[test]
    fn every_broken_invariant_is_named() {
        let parts = KjtParts {
            keys: vec!["a".into(), "b".into()],
            values: vec![1_i64, 2, 3].into(),
            lengths: Some(vec![1, 0, 2].into()),
            stride_per_key_per_rank: Some(vec![vec![1], vec![2]]),
            inverse_indices: Some((vec!["b".into(), "a".into()], vec![1_i64, 0, 0, 0].into())),
            ..KjtParts::default()
        };
        let kjt = KeyedJaggedTensor::try_new(parts.clone()).unwrap();
        assert_eq!(kjt.inverse(1).unwrap(), [1, 0]);
        let refused = |change: &dyn Fn(&mut KjtParts)| {
            let mut parts = parts.clone();
            change(&mut parts);
            let message = KeyedJaggedTensor::try_new(parts).unwrap_err().to_string();
            message.strip_prefix("KeyedJaggedTensor: ").unwrap().to_owned()
        };
        let lengths = |lengths: [i32; 3]| Some(lengths.to_vec().into());
        assert_eq!(refused(&|p| p.lengths = None), "neither lengths nor offsets are given");
        assert_eq!(refused(&|p| p.lengths = lengths([1, -1, 3])), "list 1 has length -1");
        assert_eq!(
            refused(&|p| p.lengths = lengths([1, 1, 2])),
            "the lists end at 4, but there are 3 values"
        );
        assert_eq!(
            refused(&|p| p.lengths = lengths([1, i32::MAX, 2])),
            "list 1 ends beyond what 32-bit offsets address"
        );
        assert_eq!(
            refused(&|p| p.offsets = Some(vec![0, 1, 2, 3].into())),
            "the offsets are not the sums of the lengths"
        );
        assert_eq!(refused(&|p| p.offsets = Some(vec![1].into())), "the offsets start at Some(1), not at 0");
        assert_eq!(refused(&|p| p.offsets = Some(vec![0, 2, 1].into())), "list 1 has offsets 2..1");
        assert_eq!(refused(&|p| p.weights = Some(vec![1.0].into())), "1 weights for 3 values");
        assert_eq!(refused(&|p| p.keys[1] = "a".into()), "key `a` is there twice");
        assert_eq!(refused(&|p| p.stride_per_key_per_rank = None), "3 lists for 2 keys");
        let strides = |strides: Vec<Vec<i64>>| {
            move |p: &mut KjtParts| p.stride_per_key_per_rank = Some(strides.clone())
        };
        assert_eq!(refused(&strides(vec![vec![3]])), "strides of 1 keys for 2 keys");
        assert_eq!(refused(&strides(vec![vec![4], vec![-1]])), "key `b` has stride -1");
        assert_eq!(refused(&strides(vec![vec![1], vec![1]])), "the strides sum to 2, but there are 3 lists");
        assert_eq!(
            refused(&strides(vec![vec![1], vec![1, 1]])),
            "key `b` has strides of 2 ranks, the first key of 1"
        );
        assert_eq!(
            refused(&strides(vec![vec![1, 0], vec![1, 1]])),
            "inverse indices beside strides of several ranks"
        );
        let inverse = |names: [&str; 2], indices: Vec<i64>| {
            let names: Vec<Arc<str>> = names.into_iter().map(Arc::from).collect();
            move |p: &mut KjtParts| p.inverse_indices = Some((names.clone(), indices.clone().into()))
        };
        assert!(refused(&inverse(["a", "a"], vec![0, 0])).starts_with("inverse indices of"));
        assert_eq!(refused(&inverse(["a", "b"], vec![0; 3])), "3 inverse indices for 2 keys");
        assert_eq!(
            refused(&inverse(["a", "b"], vec![0, 2])),
            "the inverse indices of key `b` lead sample 0 to row 2 of 2"
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
