//! Statistics of deduplication.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::ser::{SerializeMap as _, Serializer};

use crate::batch::{Batch, Feature, Group};

/// Counts of one or several batches, by group and by feature.
///
/// ```
/// use onefold_ikjt::{Batch, BatchParts, Feature, Group, Statistics, deduplicate};
///
/// let user = Feature::from_rows("user", &[[7], [7], [8], [8]])?;
/// let batch = Batch::try_new(BatchParts {
///     size: 4,
///     dense: vec![].into(),
///     labels: vec![].into(),
///     weights: None,
///     timestamps: None,
///     kept: Vec::new(),
///     groups: vec![deduplicate(&Group::try_new("user", None, vec![user])?)],
/// })?;
/// let mut statistics = Statistics::default();
/// statistics.add(&batch);
/// assert_eq!(statistics.groups()["user"].figures.dedupe_factor(), 2.0);
/// # Ok::<(), onefold_ikjt::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Statistics {
    groups: BTreeMap<String, GroupStatistics>,
}

/// Counts of one group (all features together) and of each of its features.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GroupStatistics {
    /// The counts of all features together.
    #[serde(flatten)]
    pub figures: Figures,
    /// The counts of each feature, by name.
    pub features: BTreeMap<String, Figures>,
}

/// Counts over batches. The dedupe factors are derived from them and serialized with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Figures {
    /// The number of samples.
    pub samples: u64,
    /// The number of distinct rows, or of samples in groups that are not deduplicated.
    pub rows: u64,
    /// The total number of ids over all samples, as if every sample stored its own lists.
    pub sample_values: u64,
    /// The total number of ids over all rows, as if every row stored its own lists.
    pub row_values: u64,
    /// The number of ids that are stored. Ids that a window shares with the previous row count once.
    pub stored_values: u64,
}

impl Figures {
    /// Returns `sample_values / row_values`, the saving of exact deduplication, or 1 if there are no ids.
    pub fn dedupe_factor(&self) -> f64 {
        ratio(self.sample_values, self.row_values)
    }

    /// Returns `sample_values / stored_values`, the saving of exact deduplication and windows together, or 1 if there
    /// are no ids.
    pub fn partial_dedupe_factor(&self) -> f64 {
        ratio(self.sample_values, self.stored_values)
    }

    fn add(&mut self, other: &Self) {
        self.samples += other.samples;
        self.rows += other.rows;
        self.sample_values += other.sample_values;
        self.row_values += other.row_values;
        self.stored_values += other.stored_values;
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b > 0 { a as f64 / b as f64 } else { 1.0 }
}

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { samples, rows, sample_values, row_values, stored_values } = self;
        let mut map = serializer.serialize_map(Some(7))?;
        map.serialize_entry("samples", samples)?;
        map.serialize_entry("rows", rows)?;
        map.serialize_entry("sample_values", sample_values)?;
        map.serialize_entry("row_values", row_values)?;
        map.serialize_entry("stored_values", stored_values)?;
        map.serialize_entry("dedupe_factor", &self.dedupe_factor())?;
        map.serialize_entry("partial_dedupe_factor", &self.partial_dedupe_factor())?;
        map.end()
    }
}

impl Statistics {
    /// Adds the counts of a batch.
    pub fn add(&mut self, batch: &Batch) {
        for group in batch.groups() {
            self.groups.entry(group.name().to_owned()).or_default().add(group);
        }
    }

    /// Returns the counts of each group, by name.
    pub fn groups(&self) -> &BTreeMap<String, GroupStatistics> {
        &self.groups
    }
}

impl GroupStatistics {
    fn add(&mut self, group: &Group) {
        let counted =
            Figures { samples: group.samples() as u64, rows: group.rows() as u64, ..Figures::default() };
        let mut together = counted;
        for feature in group.features() {
            let figures = Figures {
                sample_values: group.sample_values_of(feature),
                row_values: feature.total_size(),
                stored_values: stored_values(feature),
                ..counted
            };
            self.features.entry(feature.name().to_owned()).or_default().add(&figures);
            together.sample_values += figures.sample_values;
            together.row_values += figures.row_values;
            together.stored_values += figures.stored_values;
        }
        self.figures.add(&together);
    }
}

/// Counts the values that are stored for the rows if each row shares values only with the row before it.
fn stored_values(feature: &Feature) -> u64 {
    let (mut segment, mut stored) = (0..0, 0);
    for span in (0..feature.rows()).map(|row| feature.span(row)).filter(|span| !span.is_empty()) {
        if span.start < segment.start || span.start > segment.end {
            segment = span.start..span.start;
        }
        stored += span.end.saturating_sub(segment.end) as u64;
        segment.end = segment.end.max(span.end);
    }
    // This sum counts values more than once if a row shares them with a row that is not adjacent.
    stored.min(feature.values().len() as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::{List, batches, lists};
    use crate::batch::{BatchParts, deduplicate, fold_windows};

    fn statistics(batch: &Batch) -> Statistics {
        let mut statistics = Statistics::default();
        statistics.add(batch);
        statistics
    }

    fn batch(groups: Vec<Group>) -> Batch {
        let (dense, labels) = (vec![].into(), vec![].into());
        let size = groups[0].samples();
        Batch::try_new(BatchParts {
            size,
            dense,
            labels,
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups,
        })
        .unwrap()
    }

    proptest! {
        #[test]
        fn counts_equal_those_of_the_samples(found in batches()) {
            let found = batch(found.groups().iter().map(deduplicate).collect());
            let counted = statistics(&found);
            for group in found.groups() {
                let samples: Vec<Vec<List>> = lists(group);
                let figures = counted.groups()[group.name()].figures;
                let ids = |samples: &mut dyn Iterator<Item = &Vec<List>>| -> u64 {
                    samples.flatten().map(|list| list.len() as u64).sum()
                };
                let distinct: BTreeSet<_> = samples.iter().collect();
                prop_assert_eq!(figures.rows, distinct.len() as u64);
                prop_assert_eq!(figures.sample_values, ids(&mut samples.iter()));
                prop_assert_eq!(figures.row_values, ids(&mut distinct.into_iter()));
                for feature in group.features() {
                    let figures = counted.groups()[group.name()].features[feature.name()];
                    prop_assert_eq!(figures.row_values, feature.total_size());
                }
            }
        }

        #[test]
        fn batches_add_up(found in batches()) {
            let mut twice = statistics(&found);
            twice.add(&found);
            for (name, once) in statistics(&found).groups() {
                let (once, twice) = (once.figures, twice.groups()[name].figures);
                prop_assert_eq!(twice.stored_values, 2 * once.stored_values);
                prop_assert_eq!(twice.rows, 2 * once.rows);
                prop_assert_eq!(twice.dedupe_factor(), once.dedupe_factor());
            }
        }
    }

    #[test]
    fn windows_raise_the_partial_factor_only() {
        let rows: Vec<Vec<i64>> = (0..10).map(|i| (i / 2..i / 2 + 8).collect()).collect();
        let group = Group::try_new("g", None, vec![Feature::from_rows("w", &rows).unwrap()]).unwrap();
        let exact = deduplicate(&group);
        let partial = fold_windows(&exact);
        let figures = |group: &Group| statistics(&batch(vec![group.clone()])).groups()["g"].figures;
        assert_eq!((figures(&group).dedupe_factor(), figures(&group).partial_dedupe_factor()), (1.0, 1.0));
        assert_eq!((figures(&exact).dedupe_factor(), figures(&exact).partial_dedupe_factor()), (2.0, 2.0));
        assert_eq!(figures(&partial).dedupe_factor(), 2.0);
        assert_eq!(figures(&partial).partial_dedupe_factor(), 80.0 / 12.0);
    }

    #[test]
    fn stored_values_are_those_that_rows_use() {
        // Seven of the twenty values are used: five by a window and a row within it, and two by the last row.
        let (offsets, sizes) = (vec![0, 1, 2, 10], vec![4, 1, 3, 2]);
        let feature = Feature::try_new("x", vec![0; 20], offsets, sizes).unwrap();
        assert_eq!(stored_values(&feature), 5 + 2);
    }

    #[test]
    fn factors_are_beside_the_counts() {
        let ids = [1, 1, 1, 2, 2, 3, 3, 3, 3, 4].map(|id| [id]);
        let group = Group::try_new("g", None, vec![Feature::from_rows("x", &ids).unwrap()]).unwrap();
        let json = serde_json::to_value(statistics(&batch(vec![deduplicate(&group)]))).unwrap();
        assert_eq!(json["g"]["dedupe_factor"], 2.5);
        assert_eq!(json["g"]["features"]["x"]["rows"], 4);
    }
}
