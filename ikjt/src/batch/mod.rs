//! Batches and the operations on them.

#[cfg(test)]
pub(crate) mod arbitrary;
mod batch_digest;
mod builder;
mod dedupe;
mod feature;
mod group;
mod kept;
mod operations;
mod packed;
mod record_batch;
mod statistics;
mod window;

use arrow::buffer::ScalarBuffer;
use onefold_datasets::Schema;

pub use self::batch_digest::digest;
pub(crate) use self::builder::rebased;
pub use self::dedupe::deduplicate;
pub(crate) use self::dedupe::{deduplicate_shared, deduplicate_windows};
pub use self::feature::Feature;
pub(crate) use self::feature::starts;
pub use self::group::Group;
pub use self::kept::KeptValues;
pub(crate) use self::operations::{UsedRows, UsedValues};
pub use self::packed::{FeaturePlaces, GroupPlaces, KeptPlaces, PackedBatch, Places, SentBatch};
pub use self::record_batch::{GROUP_KEY, KEPT_KEY};
pub use self::statistics::{Figures, GroupStatistics, Statistics};
pub use self::window::fold_windows;
use crate::error::{Error, Result};

/// The parts of a [`Batch`].
#[derive(Debug, Clone, PartialEq)]
pub struct BatchParts {
    /// The number of samples, B.
    pub size: usize,
    /// Dense features, `[B, D]` row-major.
    pub dense: ScalarBuffer<f32>,
    /// Labels, `[B, L]` row-major.
    pub labels: ScalarBuffer<f32>,
    /// Sample weights, `[B]`.
    pub weights: Option<ScalarBuffer<f32>>,
    /// Sample times in microseconds since 1970, UTC, `[B]`. Present only if the reader requests them.
    pub timestamps: Option<ScalarBuffer<i64>>,
    /// Kept columns, `[B]` each. Only the requested ones are present.
    pub kept: Vec<KeptValues>,
    /// Sparse features by group.
    pub groups: Vec<Group>,
}

/// A batch of B samples: dense features, labels, weights, and sparse features by group.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch(BatchParts);

impl Batch {
    /// Creates a batch from its parts.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the length of the dense features or labels is not a multiple of the batch size, if a
    /// group, the weights, the timestamps or a kept column have another number of samples, or if a kept column has an
    /// unsupported type.
    pub fn try_new(parts: BatchParts) -> Result<Self> {
        let BatchParts { size, dense, labels, weights, timestamps, kept, groups } = &parts;
        let size = *size;
        for (place, length) in [("dense features", dense.len()), ("labels", labels.len())] {
            if length.checked_rem(size).unwrap_or(length) != 0 {
                return Err(Error::invariant(place, format!("{length} values for {size} samples")));
            }
        }
        let lengths = [
            ("weights", weights.as_ref().map(|weights| weights.len())),
            ("timestamps", timestamps.as_ref().map(|timestamps| timestamps.len())),
        ];
        for (place, length) in lengths {
            if let Some(length) = length.filter(|length| *length != size) {
                return Err(Error::invariant(place, format!("{length} values for {size} samples")));
            }
        }
        kept.iter().try_for_each(|column| column.check(size))?;
        if let Some(group) = groups.iter().find(|group| group.samples() != size) {
            let message = format!("{} samples in a batch of {size}", group.samples());
            return Err(Error::invariant(format!("group `{}`", group.name()), message));
        }
        Ok(Self(parts))
    }

    /// Creates a batch from parts whose invariants the caller guarantees. Only unit tests check them.
    pub(crate) fn trusted(parts: BatchParts) -> Self {
        #[cfg(test)]
        Self::try_new(parts.clone()).unwrap();
        Self(parts)
    }

    /// Returns the batch's parts.
    pub fn into_parts(self) -> BatchParts {
        self.0
    }

    /// Returns the number of samples, B.
    pub fn size(&self) -> usize {
        self.0.size
    }

    /// Returns the dense features, `[B, D]` row-major.
    pub fn dense(&self) -> &ScalarBuffer<f32> {
        &self.0.dense
    }

    /// Returns D, the number of dense features.
    pub fn dense_width(&self) -> usize {
        self.0.dense.len().checked_div(self.0.size).unwrap_or(0)
    }

    /// Returns the labels, `[B, L]` row-major.
    pub fn labels(&self) -> &ScalarBuffer<f32> {
        &self.0.labels
    }

    /// Returns L, the number of labels.
    pub fn label_width(&self) -> usize {
        self.0.labels.len().checked_div(self.0.size).unwrap_or(0)
    }

    /// Returns the sample weights, `[B]`, if there are any.
    pub fn weights(&self) -> Option<&ScalarBuffer<f32>> {
        self.0.weights.as_ref()
    }

    /// Returns the sample times in microseconds since 1970, UTC, `[B]`, if they were requested.
    pub fn timestamps(&self) -> Option<&ScalarBuffer<i64>> {
        self.0.timestamps.as_ref()
    }

    /// Returns the kept columns that were requested.
    pub fn kept(&self) -> &[KeptValues] {
        &self.0.kept
    }

    /// Returns the sparse features by group.
    pub fn groups(&self) -> &[Group] {
        &self.0.groups
    }

    /// Returns the size of the batch's buffers in bytes: 8 per id, timestamp, kept value and row of a feature, 4 per
    /// float and entry of an inverse index, plus the bytes of kept texts. Buffers that are shared with other batches
    /// count in full.
    pub fn bytes(&self) -> u64 {
        let BatchParts { size, dense, labels, weights, timestamps, kept, groups } = &self.0;
        let floats = dense.len() + labels.len() + weights.as_ref().map_or(0, |weights| weights.len());
        let times = timestamps.as_ref().map_or(0, |times| times.len());
        let kept = kept.iter().map(|column| column.bytes(0, *size)).sum::<u64>();
        4 * floats as u64 + 8 * times as u64 + kept + groups.iter().map(Group::bytes).sum::<u64>()
    }

    /// Checks that the batch has the features, labels and groups of `schema`, and has weights exactly if
    /// `has_weights`.
    pub(crate) fn check_schema(&self, schema: &Schema, has_weights: bool) -> Result<()> {
        let expect = |place: &str, expected: usize, found: usize| match expected == found {
            true => Ok(()),
            false => Err(Error::invariant(place, format!("the schema has {expected}, the batch {found}"))),
        };
        if self.size() > 0 {
            expect("dense features", schema.dense.len(), self.dense_width())?;
            expect("labels", schema.labels.len(), self.label_width())?;
        }
        expect("sample weights", usize::from(has_weights), usize::from(self.weights().is_some()))?;
        expect("groups", schema.groups.len(), self.groups().len())?;
        for (expected, group) in schema.groups.iter().zip(self.groups()) {
            let names = expected.features.iter().map(|feature| feature.name.as_str());
            if expected.name != group.name() || !names.eq(group.features().iter().map(Feature::name)) {
                let message = format!("the batch has `{}`, or other features than the schema", group.name());
                return Err(Error::invariant(format!("group `{}`", expected.name), message));
            }
        }
        Ok(())
    }

    /// Returns the batch with every group expanded to a plain KJT.
    pub fn expand(&self) -> Self {
        let groups = self.groups().iter().map(Group::expand).collect();
        Self(BatchParts { groups, ..self.0.clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Float32Array, Int64Array};

    use super::*;

    #[test]
    fn every_broken_invariant_is_named() {
        let group = Group::try_new("g", None, vec![Feature::from_rows("x", &[[1], [2]]).unwrap()]).unwrap();
        let parts = BatchParts {
            size: 2,
            dense: vec![0.0; 6].into(),
            labels: vec![0.0; 2].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![group],
        };
        let batch = Batch::try_new(parts.clone()).unwrap();
        assert_eq!((batch.dense_width(), batch.label_width()), (3, 1));
        let refused = |parts: BatchParts| Batch::try_new(parts).unwrap_err().to_string();
        assert_eq!(
            refused(BatchParts { dense: vec![0.0; 5].into(), ..parts.clone() }),
            "dense features: 5 values for 2 samples"
        );
        assert_eq!(
            refused(BatchParts { labels: vec![0.0].into(), ..parts.clone() }),
            "labels: 1 values for 2 samples"
        );
        assert_eq!(
            refused(BatchParts { weights: Some(vec![1.0].into()), ..parts.clone() }),
            "weights: 1 values for 2 samples"
        );
        assert_eq!(
            refused(BatchParts { timestamps: Some(vec![1].into()), ..parts.clone() }),
            "timestamps: 1 values for 2 samples"
        );
        let kept = |values: ArrayRef| vec![KeptValues::new("k", values)];
        let short: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        let float: ArrayRef = Arc::new(Float32Array::from(vec![1.0; 2]));
        assert_eq!(
            refused(BatchParts { kept: kept(short), ..parts.clone() }),
            "kept column `k`: 1 values for 2 samples"
        );
        assert_eq!(
            refused(BatchParts { kept: kept(float), ..parts.clone() }),
            "kept column `k`: its type is Float32, expected Int64 or Utf8"
        );
        let three = BatchParts { size: 3, labels: vec![0.0; 3].into(), ..parts };
        assert_eq!(refused(three), "group `g`: 2 samples in a batch of 3");
    }
}
