//! One row group, read column by column.

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Float32Type, Int64Type, TimestampMicrosecondType};

use super::order::{Span, check_row_group};
use super::problem_of;
use super::totals::{PartitionTotals, count_lists};
use crate::digest::{ColumnSeed, Digest, SampleDigest};
use crate::scan::{OpenFile, SampleLists};
use crate::{
    DataFile, FeatureGroup, FeatureStatistics, KeptColumn, Problem, Result, RowGroup, SAMPLE_KEY_COLUMN,
    SESSION_COLUMN, Snapshot, SparseFeature, TIME_COLUMN,
};

/// A row group to check.
pub(super) struct RowGroupCheck<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) file: &'a OpenFile,
    /// What the snapshot says of the file.
    pub(super) named: &'a DataFile,
    pub(super) index: usize,
    /// Where its samples are counted.
    pub(super) totals: &'a PartitionTotals,
}

/// What was found in a row group.
#[derive(Debug, Default)]
pub(super) struct CheckedRowGroup {
    pub(super) problems: Vec<Problem>,
    /// Where it begins and ends; `None` if its sessions or times could not be read.
    pub(super) span: Option<Span>,
    /// Whether all columns could be read, and the samples are in the partition's totals.
    pub(super) counted: bool,
}

impl RowGroupCheck<'_> {
    /// Reads all columns, as many as are not damaged.
    ///
    /// # Errors
    ///
    /// As [`Storage::read_ranges`](onefold_storage::Storage::read_ranges).
    pub(super) fn run(&self) -> Result<CheckedRowGroup> {
        let mut problems = Vec::new();
        let _fetched = self.file.fetch(self.index)?;
        let (mut span, mut described, mut samples) = match problem_of(self.read_order(&mut problems))? {
            Ok(read) => read,
            Err(problem) => {
                return Ok(CheckedRowGroup { problems: vec![problem], span: None, counted: false });
            }
        };
        let mut counted = true;
        let mut unreadable = |problem: Problem| {
            counted = false;
            problem
        };
        let schema = &self.snapshot.schema;
        for name in schema.float_columns() {
            problems.extend(problem_of(self.add_floats(name, &mut samples))?.err().map(&mut unreadable));
        }
        let mut kept_bytes = 0;
        for column in &schema.kept {
            match problem_of(self.add_kept(column, &mut samples))? {
                Ok(bytes) => kept_bytes += bytes,
                Err(problem) => problems.push(unreadable(problem)),
            }
        }
        let mut features = Vec::new();
        for (group, feature) in schema.groups.iter().flat_map(|g| g.features.iter().map(move |f| (g, f))) {
            match problem_of(self.add_lists(group, feature, &mut samples))? {
                Ok((statistics, problem)) => {
                    features.push(statistics);
                    problems.extend(problem);
                }
                Err(problem) => problems.push(unreadable(problem)),
            }
        }
        let ids: u64 = features.iter().map(|feature| feature.values).sum();
        let mut sample_bytes = 16 + 4 * schema.float_columns().count() as u64;
        if self.snapshot.sample_keys {
            sample_bytes += 8;
            problems.extend(problem_of(self.file.numbers::<Int64Type>(self.index, SAMPLE_KEY_COLUMN))?.err());
        }
        span.decoded_bytes = 8 * ids + span.rows as u64 * sample_bytes + kept_bytes;
        described.values = ids;
        if counted {
            problems.extend(self.misdescribed(described));
            let mut digest = Digest::default();
            samples.into_iter().for_each(|sample| digest.add(sample));
            self.totals.add(&features, digest);
        }
        Ok(CheckedRowGroup { problems, span: Some(span), counted })
    }

    /// Checks the order of the samples, and starts their digests.
    fn read_order(&self, problems: &mut Vec<Problem>) -> Result<(Span, RowGroup, Vec<SampleDigest>)> {
        let sessions = self.file.numbers::<Int64Type>(self.index, SESSION_COLUMN)?;
        let times = self.file.numbers::<TimestampMicrosecondType>(self.index, TIME_COLUMN)?;
        let (span, found) = check_row_group(self.snapshot.order, &sessions, &times);
        problems.extend(found.into_iter().map(|(column, row, message)| self.problem(column, row, message)));
        self.totals.see_sessions(&sessions);
        self.totals.see_times(&times);
        let seed = ColumnSeed::new(TIME_COLUMN);
        let mut samples = vec![SampleDigest::default(); times.len()];
        for (sample, time) in samples.iter_mut().zip(times.iter()) {
            sample.add(seed.time(*time));
        }
        let mut described = RowGroup::default();
        described.add(&sessions, &times);
        Ok((span, described, samples))
    }

    /// What of the snapshot's description of the row group is wrong. Bytes and samples were checked with the footer.
    fn misdescribed(&self, found: RowGroup) -> Option<Problem> {
        let expected = self.named.row_groups.get(self.index)?;
        let session = |of: &RowGroup| [of.first_session, of.last_session];
        let time = |of: &RowGroup| [of.first_time, of.last_time];
        let message = if found.sessions != expected.sessions {
            format!("it has {} sessions, the snapshot says {}", found.sessions, expected.sessions)
        } else if session(&found) != session(expected) {
            let ([first, last], expected) = (session(&found), session(expected));
            format!("its first and last session are {first} and {last}, the snapshot says {expected:?}")
        } else if time(&found) != time(expected) {
            let ([first, last], expected) = (time(&found), time(expected));
            format!("its times are {first} to {last}, the snapshot says {expected:?}")
        } else if found.values != expected.values {
            format!("it has {} ids, the snapshot says {}", found.values, expected.values)
        } else {
            return None;
        };
        Some(Problem::new(&self.file.path, message).in_row_group(self.index))
    }

    fn add_floats(&self, name: &str, samples: &mut [SampleDigest]) -> Result<()> {
        let floats = self.file.numbers::<Float32Type>(self.index, name)?;
        if let Some(dense) = self.snapshot.schema.dense.iter().position(|dense| dense == name) {
            self.totals.see_dense(dense, &floats);
        }
        let seed = ColumnSeed::new(name);
        for (sample, float) in samples.iter_mut().zip(floats.iter()) {
            sample.add(seed.float(*float));
        }
        Ok(())
    }

    /// Reads a kept column; gives its decoded bytes.
    fn add_kept(&self, column: &KeptColumn, samples: &mut [SampleDigest]) -> Result<u64> {
        let values = self.file.kept(self.index, column)?;
        ColumnSeed::new(&column.name).add_kept(&values, samples);
        let texts = values.as_string_opt::<i32>().map_or(0, |texts| texts.value_data().len());
        Ok(8 * values.len() as u64 + texts as u64)
    }

    /// Reads a sparse feature: its statistics, and an id that is not in its vocabulary.
    fn add_lists(
        &self,
        group: &FeatureGroup,
        feature: &SparseFeature,
        samples: &mut [SampleDigest],
    ) -> Result<(FeatureStatistics, Option<Problem>)> {
        let lists = self.file.lists(self.index, self.snapshot.layout, group, feature)?;
        let seed = ColumnSeed::new(&feature.name);
        let mut part = 0;
        for (i, sample) in samples.iter_mut().enumerate() {
            if !lists.repeats(i) {
                part = seed.list(lists.list(i));
            }
            sample.add(part);
        }
        let statistics = count_lists(&lists);
        Ok((statistics, self.unknown_id(feature, &lists, &statistics)))
    }

    /// The first id of a feature that its vocabulary does not have.
    fn unknown_id(
        &self,
        feature: &SparseFeature,
        lists: &SampleLists,
        statistics: &FeatureStatistics,
    ) -> Option<Problem> {
        let name = feature.vocabulary.as_ref()?;
        let largest = i64::try_from(self.snapshot.vocabularies.get(name)?.entries).unwrap_or(i64::MAX);
        let known = |id: i64| (0..=largest).contains(&id);
        if statistics.min_id.is_none_or(known) && statistics.max_id.is_none_or(known) {
            return None;
        }
        let unknown = |row: usize| Some((row, *lists.list(row).iter().find(|id| !known(**id))?));
        let (row, id) = (0..lists.len()).find_map(unknown)?;
        let message = format!("the id {id} is not one of the vocabulary `{name}`, which has 0 to {largest}");
        Some(self.problem(&feature.name, row, message))
    }

    fn problem(&self, column: &str, row: usize, message: String) -> Problem {
        Problem::new(&self.file.path, message).in_row_group(self.index).in_column(column).in_row(row)
    }
}
