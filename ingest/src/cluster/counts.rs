//! Counts per column that are collected while samples are read. The statistics are computed from them.

use serde::{Deserialize, Serialize};

use super::distinct::DistinctIds;

/// Counts of the columns of a query, accumulated over whole batches.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ColumnCounts {
    pub(crate) samples: u64,
    /// The minimum and maximum time.
    pub(crate) times: Option<(i64, i64)>,
    /// Labels, weight and dense features, in the order of the schema.
    pub(crate) numbers: Vec<NumberCounts>,
    /// The lists of the log.
    pub(crate) lists: Vec<ListCounts>,
}

/// Counts of a numeric column.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct NumberCounts {
    pub(crate) min: f32,
    pub(crate) max: f32,
    /// The number of samples with a value above 0.
    pub(crate) positive: u64,
}

/// Counts of a list column.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct ListCounts {
    /// The number of samples with a null list, or with a null in a column of single ids.
    pub(crate) null: u64,
    /// The number of samples with an empty list.
    pub(crate) empty: u64,
}

/// The range and the approximate number of the distinct ids of a feature.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IdCounts {
    /// The smallest and the largest id.
    pub(crate) range: Option<(i64, i64)>,
    distinct: DistinctIds,
}

impl ColumnCounts {
    /// Adds the counts of other samples with the same columns.
    pub(crate) fn merge(&mut self, other: &Self) {
        if self.samples == 0 {
            self.clone_from(other);
            return;
        }
        self.samples += other.samples;
        self.times = union(self.times, other.times);
        for (counts, other) in self.numbers.iter_mut().zip(&other.numbers) {
            counts.min = counts.min.min(other.min);
            counts.max = counts.max.max(other.max);
            counts.positive += other.positive;
        }
        for (counts, other) in self.lists.iter_mut().zip(&other.lists) {
            counts.null += other.null;
            counts.empty += other.empty;
        }
    }
}

impl NumberCounts {
    /// Computes the counts of `values`.
    pub(crate) fn of(values: &[f32]) -> Self {
        let none = Self { min: f32::INFINITY, max: f32::NEG_INFINITY, positive: 0 };
        values.iter().fold(none, |counts, value| Self {
            min: counts.min.min(*value),
            max: counts.max.max(*value),
            positive: counts.positive + u64::from(*value > 0.0),
        })
    }
}

impl ListCounts {
    /// Computes the counts of a list column from its number of nulls and its `offsets`, in which a null is an empty
    /// list.
    pub(crate) fn of(nulls: usize, offsets: &[i32]) -> Self {
        let without_ids = offsets.windows(2).filter(|bounds| bounds[0] == bounds[1]).count();
        Self { null: nulls as u64, empty: without_ids.saturating_sub(nulls) as u64 }
    }
}

impl IdCounts {
    pub(crate) fn new() -> Self {
        Self { range: None, distinct: DistinctIds::new() }
    }

    /// Adds ids. Ids that were added before do not change the counts.
    pub(crate) fn add(&mut self, ids: &[i64]) {
        let Some(first) = ids.first() else { return };
        let (mut min, mut max) = self.range.unwrap_or((*first, *first));
        // One loop for both, so that the comparisons run while the registers of distinct ids are loaded.
        for id in ids {
            (min, max) = (min.min(*id), max.max(*id));
            self.distinct.add(*id);
        }
        self.range = Some((min, max));
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.range = union(self.range, other.range);
        self.distinct.merge(&other.distinct);
    }

    /// The approximate number of distinct ids.
    pub(crate) fn distinct(&self) -> u64 {
        self.distinct.estimate()
    }
}

/// Returns the smallest range that contains both ranges.
#[inline]
pub(crate) fn union(one: Option<(i64, i64)>, other: Option<(i64, i64)>) -> Option<(i64, i64)> {
    match (one, other) {
        (Some(one), Some(other)) => Some((one.0.min(other.0), one.1.max(other.1))),
        (one, other) => one.or(other),
    }
}
