//! Groups split over ranks, as the tables that their ids look up are sharded.

use std::ops::Range;

use super::used::{UsedRows, UsedValues};
use crate::builder::{FeatureBuilder, check_values};
use crate::{Batch, Error, Feature, Group, Result};

impl Batch {
    /// The groups of each of `ranks` ranks, for tables that are sharded whole or by column: `ranks_of` names the ranks
    /// that hold a feature's table, one or several. All buffers are shared, the inverse indices too; a group
    /// of which a rank holds no feature is left out there.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if a feature has no rank, or one that is not below `ranks`.
    pub fn split_table_wise(
        &self,
        ranks: usize,
        ranks_of: impl Fn(&str) -> Vec<usize>,
    ) -> Result<Vec<Vec<Group>>> {
        let mut split = vec![Vec::new(); ranks];
        for group in self.groups() {
            let mut held = vec![Vec::new(); ranks];
            for (i, feature) in group.features().iter().enumerate() {
                let wrong =
                    |message: String| Err(Error::invariant(format!("feature `{}`", feature.name()), message));
                let of_feature = ranks_of(feature.name());
                if of_feature.is_empty() {
                    return wrong("no rank holds its table".to_owned());
                }
                for rank in of_feature {
                    match held.get_mut(rank) {
                        Some(held) => held.push(i),
                        None => return wrong(format!("its table is on rank {rank} of {ranks}")),
                    }
                }
            }
            for (split, held) in split.iter_mut().zip(held).filter(|(_, held)| !held.is_empty()) {
                split.push(group.with_features(held));
            }
        }
        Ok(split)
    }
}

impl Group {
    /// For tables that are sharded by row: one group per rank with the same rows and the same inverse
    /// index, shared, and of every feature the ids of that rank. `ends[i]` are feature `i`'s, as in
    /// [`Feature::split_row_wise`].
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there are not as many `ends` as features, they differ in their number of ranks, or
    /// [`Feature::split_row_wise`] refuses a feature.
    pub fn split_row_wise(&self, ends: &[&[i64]]) -> Result<Vec<Self>> {
        let wrong = |message: String| Err(Error::invariant(format!("group `{}`", self.name()), message));
        if ends.len() != self.features().len() {
            return wrong(format!("{} lists of ends for {} features", ends.len(), self.features().len()));
        }
        let ranks = ends[0].len();
        if let Some(other) = ends.iter().find(|ends| ends.len() != ranks) {
            return wrong(format!("one feature is split over {ranks} ranks, another over {}", other.len()));
        }
        let mut split = vec![Vec::with_capacity(ends.len()); ranks];
        for (feature, ends) in self.features().iter().zip(ends) {
            for (split, part) in split.iter_mut().zip(feature.split_row_wise(ends)?) {
                split.push(part);
            }
        }
        let group =
            |features| Self::trusted(self.shared_name(), self.inverse().cloned(), self.rows(), features);
        Ok(split.into_iter().map(group).collect())
    }
}

impl Feature {
    /// For a table that is sharded by row: one feature per rank, with the same rows, that holds only the ids of that
    /// rank, in order, counted from the shard's first row. Rank r has the ids from `ends[r - 1]` (0 for the first rank)
    /// below `ends[r]`, so the last end is the table's number of rows.
    ///
    /// These are the semantics of FBGEMM's `block_bucketize_sparse_features`, which TorchRec shards by row with, except
    /// that an id that the table does not have is refused, and that sliding windows stay windows: an id that
    /// several rows share is sent once. The order of a row's ids over all ranks is found again by walking the
    /// ids of the whole feature and taking the next one of the rank that holds it.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there are no `ends`, one is negative or below the one before, a row has an id
    /// that is negative or not below the last end, or there are more ids than `i32` counts.
    pub fn split_row_wise(&self, ends: &[i64]) -> Result<Vec<Self>> {
        check_ends(self, ends)?;
        // Rows that move back and forth among the values are copied, which makes them stand in order.
        let source = if slides(self) { self.clone() } else { self.compact()? };
        let used = UsedValues::new(&source, &UsedRows::Range(0..source.rows()));
        let values =
            check_values(format_args!("feature `{}`", self.name()), used.total.min(used.span.len() as u64))?;
        let builder =
            || FeatureBuilder::with_capacity(self.weights().is_some(), values / ends.len(), self.rows());
        let mut split = RowWise {
            source: &source,
            ends,
            parts: ends.iter().map(|_| builder()).collect(),
            starts: vec![0; ends.len()],
            segment: 0..0,
        };
        (0..source.rows()).try_for_each(|row| split.append(row))?;
        Ok(split.parts.into_iter().map(|part| part.finish(self.shared_name())).collect())
    }
}

fn check_ends(feature: &Feature, ends: &[i64]) -> Result<()> {
    let wrong = |message: String| {
        Err(Error::invariant(format!("the shards of feature `{}`", feature.name()), message))
    };
    if ends.is_empty() {
        return wrong("no rank has any".to_owned());
    }
    let mut start = 0;
    for (rank, &end) in ends.iter().enumerate() {
        if end < start {
            return wrong(format!("rank {rank} has rows {start}..{end}"));
        }
        start = end;
    }
    Ok(())
}

/// Whether neither the first nor the last value of a row is before the previous row's; empty rows do not count.
fn slides(feature: &Feature) -> bool {
    let mut previous = 0..0;
    (0..feature.rows()).map(|row| feature.span(row)).filter(|span| !span.is_empty()).all(|span| {
        let slides = span.start >= previous.start && span.end >= previous.end;
        previous = span;
        slides
    })
}

/// Splits rows that slide over their values, visiting every value once.
///
/// The ids of one rank among some consecutive values are consecutive values of that rank, so a row is a slice there too:
/// it starts after as many of the rank's values as there are before the row's first value.
struct RowWise<'a> {
    source: &'a Feature,
    ends: &'a [i64],
    parts: Vec<FeatureBuilder>,
    /// By rank: where the current row starts.
    starts: Vec<usize>,
    /// The source's values from the first one of the current row to the last one that was appended.
    segment: Range<usize>,
}

impl RowWise<'_> {
    fn append(&mut self, row: usize) -> Result<()> {
        let span = self.source.span(row);
        if !span.is_empty() {
            if span.start >= self.segment.end {
                self.segment = span.start..span.start;
                self.starts.iter_mut().zip(&self.parts).for_each(|(start, part)| *start = part.end());
            }
            for &id in &self.source.values()[self.segment.start..span.start] {
                let rank = self.rank(id);
                self.starts[rank] += 1;
            }
            for value in self.segment.end..span.end {
                self.append_value(row, value)?;
            }
            self.segment = span.clone();
        }
        for (part, &start) in self.parts.iter_mut().zip(&self.starts) {
            let size = if span.is_empty() { 0 } else { part.end() - start };
            part.append_row(part.end() - size, size);
        }
        Ok(())
    }

    fn append_value(&mut self, row: usize, value: usize) -> Result<()> {
        let id = self.source.values()[value];
        let rank = self.rank(id);
        if id < 0 || rank == self.ends.len() {
            let rows = self.ends.last().copied().unwrap_or(0);
            let message = format!(
                "row {row} has id {id}, but the table has {rows} rows\n  hint: hash ids to the table's size"
            );
            return Err(Error::invariant(format!("feature `{}`", self.source.name()), message));
        }
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.parts[rank].append_value(id - start, self.source.weights().map(|weights| weights[value]));
        Ok(())
    }

    fn rank(&self, id: i64) -> usize {
        self.ends.partition_point(|&end| end <= id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{Item, List, batches, groups, list, lists};

    /// The ids of rank `rank`, made local.
    fn naive(list: &List, ends: &[i64], rank: usize) -> List {
        let start = if rank == 0 { 0 } else { ends[rank - 1] };
        let local = |&(id, weight): &Item| (start..ends[rank]).contains(&id).then_some((id - start, weight));
        list.iter().filter_map(local).collect()
    }

    proptest! {
        #[test]
        fn row_wise_shards_hold_their_ids_in_order(
            group in groups(),
            steps in prop::collection::vec(0_i64..3, 1..5),
        ) {
            // The groups' ids are -1 to 2: 0 to 3 once shifted.
            let shift = |feature: &Feature| {
                let ids: Vec<i64> = feature.values().iter().map(|id| if *id == 7 { 3 } else { id + 1 }).collect();
                let (offsets, sizes) = (feature.offsets().clone(), feature.sizes().clone());
                Feature::try_new(feature.name(), ids, feature.weights().cloned(), offsets, sizes).unwrap()
            };
            let features: Vec<_> = group.features().iter().map(shift).collect();
            let group = Group::try_new(group.name(), group.inverse().cloned(), features).unwrap();
            let mut ends: Vec<i64> = steps.iter().scan(0, |end, step| { *end += step; Some(*end) }).collect();
            *ends.last_mut().unwrap() = 4.max(*ends.last().unwrap());
            let split = group.split_row_wise(&vec![&ends[..]; group.features().len()]).unwrap();
            prop_assert_eq!(split.len(), ends.len());
            let whole = lists(&group);
            for (rank, part) in split.iter().enumerate() {
                let expected: Vec<Vec<List>> = whole.iter()
                    .map(|sample| sample.iter().map(|list| naive(list, &ends, rank)).collect())
                    .collect();
                prop_assert_eq!(lists(part), expected);
                prop_assert_eq!(part.rows(), group.rows());
                if let (Some(part), Some(whole)) = (part.inverse(), group.inverse()) {
                    prop_assert_eq!(part.as_ptr(), whole.as_ptr());
                }
            }
            for (i, feature) in group.features().iter().enumerate().filter(|(_, feature)| slides(feature)) {
                let stored: usize = split.iter().map(|part| part.features()[i].values().len()).sum();
                prop_assert!(stored <= feature.values().len());
            }
        }

        #[test]
        fn table_wise_shards_have_every_feature_where_its_table_is(batch in batches(), bits in any::<u64>()) {
            let ranks_of = |name: &str| {
                let number = name.bytes().fold(0_u32, |sum, byte| sum * 3 + u32::from(byte)) % 60;
                let first = (bits >> number & 3) as usize;
                if number % 2 == 0 { vec![first] } else { vec![first, (first + 1) % 4] }
            };
            let split = batch.split_table_wise(4, ranks_of).unwrap();
            for (rank, groups) in split.iter().enumerate() {
                let expected: Vec<_> = batch.groups().iter().filter_map(|group| {
                    let held: Vec<_> = group.features().iter()
                        .filter(|feature| ranks_of(feature.name()).contains(&rank)).cloned().collect();
                    Some(held).filter(|held| !held.is_empty())
                        .map(|held| Group::try_new(group.name(), group.inverse().cloned(), held).unwrap())
                }).collect();
                prop_assert_eq!(groups, &expected);
            }
        }
    }

    #[test]
    fn windows_stay_windows() {
        let window = Feature::try_new(
            "w",
            (0..100).collect::<Vec<i64>>(),
            None,
            (0..91).collect::<Vec<_>>(),
            vec![10; 91],
        );
        let parts = window.unwrap().split_row_wise(&[30, 60, 100]).unwrap();
        assert_eq!(parts.iter().map(|part| part.values().len()).collect::<Vec<_>>(), [30, 30, 40]);
        assert_eq!(list(&parts[1], 25), (0..5).map(|id| (id, None)).collect::<List>());
    }

    #[test]
    fn ids_and_shards_out_of_range_are_refused() {
        let feature = Feature::from_rows("x", &[vec![1, 2], vec![9]]).unwrap();
        assert_eq!(
            feature.split_row_wise(&[4, 9]).unwrap_err().to_string(),
            "feature `x`: row 1 has id 9, but the table has 9 rows\n  hint: hash ids to the table's size"
        );
        assert!(Feature::from_rows("x", &[[-1]]).unwrap().split_row_wise(&[4]).is_err());
        assert_eq!(
            feature.split_row_wise(&[4, 3]).unwrap_err().to_string(),
            "the shards of feature `x`: rank 1 has rows 4..3"
        );
        assert!(feature.split_row_wise(&[]).is_err());
        let group = Group::try_new("g", None, vec![feature]).unwrap();
        assert!(group.split_row_wise(&[]).is_err());
        let batch = Batch::try_new(crate::BatchParts {
            size: 2,
            dense: vec![].into(),
            labels: vec![].into(),
            weights: None,
            timestamps: None,
            groups: vec![group],
        });
        let refused = |ranks: &[usize]| {
            batch.as_ref().unwrap().split_table_wise(2, |_| ranks.to_vec()).unwrap_err().to_string()
        };
        assert_eq!(refused(&[2]), "feature `x`: its table is on rank 2 of 2");
        assert_eq!(refused(&[]), "feature `x`: no rank holds its table");
    }
}
