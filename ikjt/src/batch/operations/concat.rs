//! Slices of batches, and concatenations of slices.
//!
//! Both drop rows that no sample uses and values that no row uses, and keep overlaps of rows. The cost of a batch
//! that is cut from decoded row groups therefore depends on its distinct values, not on its samples' values.
//! Trimming drops only the values.

use std::ops::Range;

use arrow::buffer::ScalarBuffer;
use arrow::datatypes::ArrowNativeType;

use super::used::{Renumbering, UsedRows, UsedValues, listed};
use crate::batch::builder::{FeatureBuilder, check_values, rebased};
use crate::batch::{Batch, BatchParts, Feature, Group, KeptValues};
use crate::error::Result;

impl Batch {
    /// Returns the given range of samples. Dense features, labels and, where rows are contiguous, ids share this
    /// batch's buffers.
    ///
    /// # Panics
    ///
    /// If the range is out of bounds.
    pub fn slice(&self, samples: Range<usize>) -> Self {
        self.slice_with(samples, &mut Renumbering::default())
    }

    fn slice_with(&self, samples: Range<usize>, renumbering: &mut Renumbering) -> Self {
        let (dense, labels) = (self.dense_width(), self.label_width());
        let groups = self.groups().iter();
        Self::trusted(BatchParts {
            size: samples.len(),
            dense: slice_rows(self.dense(), &samples, dense),
            labels: slice_rows(self.labels(), &samples, labels),
            weights: self.weights().map(|weights| slice_rows(weights, &samples, 1)),
            timestamps: self.timestamps().map(|timestamps| slice_rows(timestamps, &samples, 1)),
            kept: self.kept().iter().map(|column| column.slice(samples.start, samples.len())).collect(),
            groups: groups.map(|group| group.slice_with(samples.clone(), renumbering)).collect(),
        })
    }

    /// Concatenates the samples of all pieces. For a single piece the result equals its [`slice`](Self::slice). The
    /// batches must have the same columns, as all batches of a reader have.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if a feature or a kept column has more values than 32-bit offsets
    /// address.
    ///
    /// # Panics
    ///
    /// If there is no piece, or a range is out of bounds.
    pub fn concat(pieces: &[(&Self, Range<usize>)]) -> Result<Self> {
        let mut renumbering = Renumbering::default();
        if let [(batch, samples)] = pieces {
            return Ok(batch.slice_with(samples.clone(), &mut renumbering));
        }
        let mut of_group = Vec::with_capacity(pieces.len());
        let groups = (0..pieces[0].0.groups().len()).map(|i| {
            of_group.clear();
            of_group.extend(pieces.iter().map(|(batch, samples)| (&batch.groups()[i], samples.clone())));
            concat_groups(&of_group, &mut renumbering)
        });
        let groups = groups.collect::<Result<_>>()?;
        Ok(Self::trusted(BatchParts {
            size: pieces.iter().map(|(_, samples)| samples.len()).sum(),
            dense: concat_matrices(pieces, Self::dense),
            labels: concat_matrices(pieces, Self::labels),
            weights: concat_optional(pieces, Self::weights),
            timestamps: concat_optional(pieces, Self::timestamps),
            kept: concat_kept(pieces)?,
            groups,
        }))
    }
}

impl Group {
    /// Returns the given range of samples, which is in bounds, with the rows that they use.
    ///
    /// The values are shared and trimmed to the part that the rows use. If the group has an inverse index, the result
    /// has one too, with rows numbered in the order of first use.
    fn slice_with(&self, samples: Range<usize>, renumbering: &mut Renumbering) -> Self {
        let mut inverse = self.inverse().map(|_| Vec::with_capacity(samples.len()));
        let rows = renumbering.used_rows(self, samples, 0, inverse.as_mut());
        self.with_rows(inverse.map(Into::into), &rows)
    }

    /// Returns a group of the given rows with another inverse index, without the values that these rows do not use.
    /// Rows that share values keep sharing them.
    pub(crate) fn with_rows(&self, inverse: Option<ScalarBuffer<i32>>, rows: &UsedRows) -> Self {
        let features = self.features().iter().map(|feature| slice_feature(feature, rows)).collect();
        Self::trusted(self.shared_name(), inverse, rows.len(), features)
    }

    /// Returns the same rows without unused values. Copies values only if unused values lie between used ones.
    pub fn trim(&self) -> Self {
        self.with_rows(self.inverse().cloned(), &UsedRows::Range(0..self.rows()))
    }
}

/// Returns the given rows with the values that they use. Values are shared, unless unused values lie between them.
fn slice_feature(feature: &Feature, rows: &UsedRows) -> Feature {
    let used = UsedValues::new(feature, rows);
    let name = feature.shared_name();
    let UsedValues::One(span) = &used else {
        let mut builder = FeatureBuilder::with_capacity(used.len(), rows.len());
        builder.append(feature, rows, &used);
        return builder.finish(name);
    };
    let (offsets, sizes): (ScalarBuffer<i32>, ScalarBuffer<i32>) = match rows {
        UsedRows::Range(rows) => {
            let offsets = feature.offsets().slice(rows.start, rows.len());
            let all = *span == (0..feature.values().len());
            let offsets = if all { offsets } else { rebased(offsets.iter(), span, 0).collect() };
            (offsets, feature.sizes().slice(rows.start, rows.len()))
        }
        UsedRows::Listed(list) => {
            let offsets = rebased(listed(feature.offsets(), list), span, 0).collect();
            (offsets, listed(feature.sizes(), list).copied().collect())
        }
    };
    Feature::trusted(name, feature.values().slice(span.start, span.len()), offsets, sizes)
}

/// One piece of a group, with the rows that its samples use.
struct Piece<'a> {
    features: &'a [Feature],
    rows: UsedRows,
}

/// Concatenates pieces, of which there is at least one. The result has an inverse index if any piece has one. Rows are
/// not compared: a row that occurs in two pieces is stored twice until the group is
/// [deduplicated](crate::deduplicate).
fn concat_groups(pieces: &[(&Group, Range<usize>)], renumbering: &mut Renumbering) -> Result<Group> {
    let (first, _) = &pieces[0];
    let samples: usize = pieces.iter().map(|(_, samples)| samples.len()).sum();
    let plain = pieces.iter().all(|(group, _)| group.inverse().is_none());
    let mut inverse = (!plain).then(|| Vec::with_capacity(samples));
    let mut rows = 0;
    let pieces: Vec<Piece<'_>> = pieces
        .iter()
        .map(|(group, samples)| {
            let used = renumbering.used_rows(group, samples.clone(), rows, inverse.as_mut());
            rows += used.len();
            Piece { features: group.features(), rows: used }
        })
        .collect();
    let mut used = Vec::with_capacity(pieces.len());
    let features = (0..first.features().len()).map(|i| concat_feature(&pieces, i, rows, &mut used));
    let features = features.collect::<Result<_>>()?;
    Ok(Group::trusted(first.shared_name(), inverse.map(Into::into), rows, features))
}

fn concat_feature(
    pieces: &[Piece<'_>],
    index: usize,
    rows: usize,
    used: &mut Vec<UsedValues>,
) -> Result<Feature> {
    let first = &pieces[0].features[index];
    used.clear();
    used.extend(pieces.iter().map(|piece| UsedValues::new(&piece.features[index], &piece.rows)));
    let total = used.iter().map(|used| used.len() as u64).sum();
    let total = check_values(format_args!("feature `{}`", first.name()), total)?;
    let mut builder = FeatureBuilder::with_capacity(total, rows);
    for (piece, used) in pieces.iter().zip(used) {
        builder.append(&piece.features[index], &piece.rows, used);
    }
    Ok(builder.finish(first.shared_name()))
}

/// Returns rows of a `[B, width]` matrix. The result shares the buffer.
fn slice_rows<T: ArrowNativeType>(
    matrix: &ScalarBuffer<T>,
    rows: &Range<usize>,
    width: usize,
) -> ScalarBuffer<T> {
    matrix.slice(rows.start * width, rows.len() * width)
}

/// Concatenates rows of several `[B, width]` matrices of equal width. A matrix without rows matches any width.
fn concat_matrices(
    pieces: &[(&Batch, Range<usize>)],
    matrix: impl Fn(&Batch) -> &ScalarBuffer<f32>,
) -> ScalarBuffer<f32> {
    let rows = pieces.iter().map(|(batch, samples)| {
        let width = matrix(batch).len().checked_div(batch.size()).unwrap_or(0);
        &matrix(batch)[samples.start * width..samples.end * width]
    });
    concat_slices(rows)
}

/// Concatenates the kept columns of all pieces.
fn concat_kept(pieces: &[(&Batch, Range<usize>)]) -> Result<Vec<KeptValues>> {
    let column = |(i, column): (usize, &KeptValues)| {
        let parts = pieces.iter().map(|(batch, samples)| {
            let values = &batch.kept()[i].values;
            values.slice(samples.start, samples.len())
        });
        KeptValues::concat(&column.name, &parts.collect::<Vec<_>>())
    };
    pieces[0].0.kept().iter().enumerate().map(column).collect()
}

fn concat_optional<'a, T: ArrowNativeType>(
    pieces: &[(&'a Batch, Range<usize>)],
    column: impl Fn(&'a Batch) -> Option<&'a ScalarBuffer<T>>,
) -> Option<ScalarBuffer<T>> {
    let slices = pieces.iter().map(|(batch, samples)| column(batch).map(|all| &all[samples.clone()]));
    column(pieces[0].0).map(|_| concat_slices(slices.flatten()))
}

fn concat_slices<'a, T: ArrowNativeType>(slices: impl Iterator<Item = &'a [T]> + Clone) -> ScalarBuffer<T> {
    let mut all = Vec::with_capacity(slices.clone().map(<[T]>::len).sum());
    slices.for_each(|slice| all.extend_from_slice(slice));
    all.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::{batches, batches_of, groups, lists, samples, shapes};

    impl Group {
        /// Does for a group what [`Batch::slice`] does.
        pub(crate) fn slice(&self, samples: Range<usize>) -> Self {
            self.slice_with(samples, &mut Renumbering::default())
        }

        /// Does for groups what [`Batch::concat`] does.
        fn concat(pieces: &[(&Self, Range<usize>)]) -> Result<Self> {
            concat_groups(pieces, &mut Renumbering::default())
        }
    }

    /// Returns a range within `0..size`, made from two random numbers.
    fn range(size: usize, (a, b): (usize, usize)) -> Range<usize> {
        let (a, b) = (a % (size + 1), b % (size + 1));
        a.min(b)..a.max(b)
    }

    fn stored(feature: &Feature) -> u64 {
        feature.values().len() as u64
    }

    proptest! {
        #[test]
        fn a_slice_has_the_samples_of_its_range(batch in batches(), ends in any::<(usize, usize)>()) {
            let range = range(batch.size(), ends);
            let slice = batch.slice(range.clone());
            prop_assert_eq!(samples(&slice), &samples(&batch)[range.clone()]);
            prop_assert_eq!(slice.expand(), batch.expand().slice(range));
        }

        #[test]
        fn a_slice_keeps_what_it_uses_and_no_more(group in groups(), ends in any::<(usize, usize)>()) {
            let range = range(group.samples(), ends);
            let slice = group.slice(range.clone());
            prop_assert_eq!(slice.inverse().is_some(), group.inverse().is_some());
            // Rows are numbered in the order of first use, and each one is used.
            let mut next = 0;
            for sample in 0..slice.samples() {
                prop_assert!(slice.row_of(sample) <= next);
                next = next.max(slice.row_of(sample) + 1);
            }
            prop_assert_eq!(next, slice.rows());
            for (kept, all) in slice.features().iter().zip(group.features()) {
                prop_assert!(kept.values().len() <= all.values().len());
            }
        }

        #[test]
        fn trimming_changes_no_row_and_leaves_no_unused_value(group in groups()) {
            let trimmed = group.trim();
            prop_assert_eq!(&trimmed, &group);
            for feature in trimmed.features() {
                let mut used = vec![false; feature.values().len()];
                (0..feature.rows()).for_each(|row| used[feature.span(row)].fill(true));
                prop_assert!(used.into_iter().all(|used| used));
            }
        }

        #[test]
        fn concatenation_is_that_of_the_samples(
            (sources, ends) in shapes().prop_flat_map(|shape| (
                prop::collection::vec(batches_of(shape), 1..4),
                prop::collection::vec(any::<(usize, usize, usize)>(), 1..6),
            )),
        ) {
            let pieces: Vec<_> = ends.iter().map(|&(source, a, b)| {
                let batch = &sources[source % sources.len()];
                (batch, range(batch.size(), (a, b)))
            }).collect();
            // Batches without samples have no known width.
            prop_assume!(sources.iter().all(|batch| batch.size() > 0));
            let whole = Batch::concat(&pieces).unwrap();
            let expected: Vec<_> = pieces.iter()
                .flat_map(|(batch, range)| samples(batch)[range.clone()].to_vec())
                .collect();
            prop_assert_eq!(samples(&whole), expected);
            for (i, group) in whole.groups().iter().enumerate() {
                let plain = pieces.iter().all(|(batch, _)| batch.groups()[i].inverse().is_none());
                prop_assert_eq!(group.inverse().is_none(), plain);
                for feature in group.features().iter().filter(|_| pieces.len() > 1) {
                    prop_assert!(stored(feature) <= feature.total_size());
                }
            }
        }

        #[test]
        fn cutting_and_concatenating_restores_a_group(group in groups(), cut in any::<usize>()) {
            let cut = cut % (group.samples() + 1);
            let whole = Group::concat(&[(&group, 0..cut), (&group, cut..group.samples())]).unwrap();
            prop_assert_eq!(lists(&whole), lists(&group));
        }
    }

    fn feature(name: &str, values: Vec<i64>, offsets: Vec<i32>, sizes: Vec<i32>) -> Feature {
        Feature::try_new(name, values, offsets, sizes).unwrap()
    }

    #[test]
    fn a_slice_shares_and_trims() {
        let window = feature("w", (0..10).collect(), vec![0, 2, 3, 5, 7], vec![4, 3, 4, 0, 3]);
        let group = Group::try_new("g", None, vec![window]).unwrap();
        let slice = group.slice(1..4);
        let (part, whole) = (&slice.features()[0], &group.features()[0]);
        assert_eq!(part.values()[..], [2, 3, 4, 5, 6]);
        assert_eq!(part.values().as_ptr(), whole.values()[2..].as_ptr());
        assert_eq!(part.sizes().as_ptr(), whole.sizes()[1..].as_ptr());
        assert_eq!(part.offsets()[..], [0, 1, 3]);
        assert_eq!(group.slice(0..5).features()[0].offsets().as_ptr(), whole.offsets().as_ptr());
    }

    #[test]
    fn trimming_copies_no_values() {
        let group =
            Group::try_new("g", None, vec![feature("x", vec![9, 1, 2, 3, 9], vec![1, 2], vec![2, 2])]);
        let group = group.unwrap();
        let trimmed = group.trim();
        let feature = &trimmed.features()[0];
        assert_eq!(feature.values().as_ptr(), group.features()[0].values()[1..].as_ptr());
        assert_eq!(feature.offsets()[..], [0, 1]);
        assert_eq!(trimmed.trim().features()[0].offsets().as_ptr(), feature.offsets().as_ptr());
    }

    #[test]
    fn windows_stay_windows_across_pieces() {
        let window = feature("w", (0..100).collect(), (0..91).collect(), vec![10; 91]);
        let group = Group::try_new("g", None, vec![window]).unwrap();
        let whole = Group::concat(&[(&group, 0..20), (&group, 50..60)]).unwrap();
        assert_eq!(whole.features()[0].values().len(), 29 + 19);
        assert_eq!(whole.features()[0].row(20), (50..60).collect::<Vec<_>>());
    }

    #[test]
    fn values_that_no_row_uses_are_left_behind() {
        // Two rows at the ends of a long value buffer, as when a session returns to an earlier row.
        let far = feature("x", (0..1000).collect(), vec![0, 500, 998], vec![2, 400, 2]);
        let group = Group::try_new("g", Some(vec![2, 0, 2].into()), vec![far]).unwrap();
        for part in [group.slice(0..3), Group::concat(&[(&group, 0..2), (&group, 2..3)]).unwrap()] {
            assert!(part.features()[0].values().len() <= 6);
            assert_eq!(lists(&part), lists(&group));
        }
    }

    #[test]
    fn more_values_than_offsets_address_are_refused() {
        // 2^24 zeros; no page of them is ever written.
        let rows = feature("x", vec![0; 1 << 24], vec![0], vec![1 << 24]);
        let group = Group::try_new("g", None, vec![rows]).unwrap();
        let pieces = vec![(&group, 0..1); 128];
        assert_eq!(
            Group::concat(&pieces).unwrap_err().to_string(),
            "feature `x`: 2147483648 ids are more than 32-bit offsets address\n  hint: make batches of fewer samples"
        );
    }
}
