//! Checks one row group, column by column.

use arrow::array::AsArray;
use arrow::datatypes::{Float32Type, Int64Type, TimestampMicrosecondType};

use super::order::{Span, check_row_group};
use super::problem_of;
use super::totals::{DenseRange, differences};
use crate::digest::{ColumnSeed, Digest, SampleDigest};
use crate::scan::{OpenFiles, SampleLists};
use crate::snapshot::RowGroupStatistics;
use crate::writer::count_lists;
use crate::{
    FeatureGroup, FeatureStatistics, KeptColumn, MISSING_DENSE, Problem, Result, RowGroup, SAMPLE_KEY_COLUMN,
    SESSION_COLUMN, Snapshot, SparseFeature, TIME_COLUMN,
};

/// A row group to check.
pub(super) struct RowGroupCheck<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) files: &'a OpenFiles,
    pub(super) index: usize,
    /// The description of the row group in the snapshot.
    pub(super) described: &'a RowGroup,
    /// The statistics of its samples in the manifest.
    pub(super) statistics: &'a RowGroupStatistics,
}

/// The findings in a row group.
#[derive(Debug, Default)]
pub(super) struct CheckedRowGroup {
    pub(super) problems: Vec<Problem>,
    /// The start and end of the row group; `None` if its sessions or times could not be read.
    pub(super) span: Option<Span>,
    /// Whether all columns could be read.
    pub(super) counted: bool,
    /// The digest of the samples, if all columns could be read.
    pub(super) digest: Digest,
}

impl RowGroupCheck<'_> {
    /// Checks all columns that can be read.
    pub(super) fn run(&self) -> Result<CheckedRowGroup> {
        let mut problems = Vec::new();
        let _fetched = self.files.fetch(self.index)?;
        let (mut span, mut described, mut samples) = match problem_of(self.read_order(&mut problems))? {
            Ok(read) => read,
            Err(problem) => {
                return Ok(CheckedRowGroup { problems: vec![problem], ..CheckedRowGroup::default() });
            }
        };
        let mut counted = true;
        let mut unreadable = |problem: Problem| {
            counted = false;
            problem
        };
        let schema = &self.snapshot.schema;
        // The dataset's digest includes the missing values of columns that the files lack. The manifest's
        // digest does not.
        let mut missing = SampleDigest::default();
        for name in schema.float_columns() {
            if self.files.lacks(name) {
                missing.add(ColumnSeed::new(name).float(MISSING_DENSE));
                continue;
            }
            match problem_of(self.add_floats(name, &mut samples))? {
                Ok(problem) => problems.extend(problem),
                Err(problem) => problems.push(unreadable(problem)),
            }
        }
        let mut text_bytes = 0;
        for column in &schema.kept {
            match problem_of(self.add_kept(column, &mut samples))? {
                Ok(bytes) => text_bytes += bytes,
                Err(problem) => problems.push(unreadable(problem)),
            }
        }
        let mut ids = 0;
        for ((group, feature), expected) in schema.grouped_features().zip(&self.statistics.features) {
            if self.files.lacks(&feature.name) {
                missing.add(ColumnSeed::new(&feature.name).list(&[]));
                continue;
            }
            match problem_of(self.add_lists(group, feature, &mut samples))? {
                Ok((found, problem)) => {
                    ids += found.values;
                    let differences = differences(expected, &found);
                    problems.extend(differences.map(|message| self.problem(&feature.name, None, message)));
                    problems.extend(problem);
                }
                Err(problem) => problems.push(unreadable(problem)),
            }
        }
        if self.snapshot.sample_keys {
            problems
                .extend(problem_of(self.files.numbers::<Int64Type>(self.index, SAMPLE_KEY_COLUMN))?.err());
        }
        let sample_bytes = schema.sample_bytes(self.snapshot.sample_keys);
        span.decoded_bytes = 8 * ids + span.rows as u64 * sample_bytes + text_bytes;
        let mut digest = Digest::default();
        if counted {
            described.values = ids;
            for mut sample in samples {
                described.digest.add(sample);
                sample.merge(missing);
                digest.add(sample);
            }
            problems.extend(self.misdescribed(&described));
        }
        Ok(CheckedRowGroup { problems, span: Some(span), counted, digest })
    }

    /// Checks the order of the samples and starts their digests.
    fn read_order(&self, problems: &mut Vec<Problem>) -> Result<(Span, RowGroup, Vec<SampleDigest>)> {
        let sessions = self.files.numbers::<Int64Type>(self.index, SESSION_COLUMN)?;
        let times = self.files.numbers::<TimestampMicrosecondType>(self.index, TIME_COLUMN)?;
        let (order, buckets) = (self.snapshot.order, self.snapshot.division());
        let (span, found) = check_row_group(order, buckets, &sessions, &times);
        problems.extend(found.into_iter().map(|(column, row, message)| self.problem(column, row, message)));
        let seed = ColumnSeed::new(TIME_COLUMN);
        let mut samples = vec![SampleDigest::default(); times.len()];
        for (sample, time) in samples.iter_mut().zip(times.iter()) {
            sample.add(seed.integer(*time));
        }
        let mut described = RowGroup::default();
        described.add(buckets, &sessions, &times);
        Ok((span, described, samples))
    }

    /// Returns the first difference between the row group and its description in the snapshot. Bytes and
    /// samples have been checked against the footers, and the number of sessions is checked per range of
    /// buckets.
    fn misdescribed(&self, found: &RowGroup) -> Option<Problem> {
        let expected = self.described;
        // The digest covers the columns that were written, but features may have been dropped or renamed
        // since.
        let is_digested = self.files.are_as_digested();
        let session = |of: &RowGroup| [of.first_session, of.last_session];
        let time = |of: &RowGroup| [of.first_time, of.last_time];
        let division = |of: &RowGroup| (of.bucket, of.bucket_starts.clone());
        let message = if found.runs != expected.runs {
            format!(
                "it has {} runs of samples of one session, the snapshot says {}",
                found.runs, expected.runs
            )
        } else if session(found) != session(expected) {
            let ([first, last], expected) = (session(found), session(expected));
            format!("its first and last session are {first} and {last}, the snapshot says {expected:?}")
        } else if division(found) != division(expected) {
            let (found, expected) = (division(found), division(expected));
            format!(
                "its first bucket and the rows of further ones are {found:?}, the snapshot says {expected:?}"
            )
        } else if time(found) != time(expected) {
            let ([first, last], expected) = (time(found), time(expected));
            format!("its times are {first} to {last}, the snapshot says {expected:?}")
        } else if is_digested && found.values != expected.values {
            format!("it has {} ids, the snapshot says {}", found.values, expected.values)
        } else if is_digested && found.digest != expected.digest {
            format!(
                "the samples are not those that were written: their digest is {}, the snapshot says {}",
                found.digest, expected.digest
            )
        } else {
            return None;
        };
        Some(Problem::new(&self.files.path, message).in_row_group(self.index))
    }

    /// Reads a float column and returns a problem if its statistics differ.
    fn add_floats(&self, name: &str, samples: &mut [SampleDigest]) -> Result<Option<Problem>> {
        let floats = self.files.numbers::<Float32Type>(self.index, name)?;
        let seed = ColumnSeed::new(name);
        for (sample, float) in samples.iter_mut().zip(floats.iter()) {
            sample.add(seed.float(*float));
        }
        let dense = self.snapshot.schema.dense.iter().position(|dense| dense == name);
        let expected = dense.and_then(|dense| self.statistics.dense.get(dense)).map(DenseRange::of);
        let found = DenseRange::of_values(&floats);
        Ok(expected.filter(|expected| *expected != found).map(|expected| {
            let message = format!("it has {}, the snapshot says {}", found.shown(), expected.shown());
            self.problem(name, None, message)
        }))
    }

    /// Reads a kept column and returns the size of its texts in bytes.
    fn add_kept(&self, column: &KeptColumn, samples: &mut [SampleDigest]) -> Result<u64> {
        let values = self.files.kept(self.index, column)?;
        ColumnSeed::new(&column.name).add_kept(&values, samples);
        Ok(values.as_string_opt::<i32>().map_or(0, |texts| texts.value_data().len() as u64))
    }

    /// Reads a sparse feature and returns its statistics, and a problem if an id is not in its vocabulary.
    fn add_lists(
        &self,
        group: &FeatureGroup,
        feature: &SparseFeature,
        samples: &mut [SampleDigest],
    ) -> Result<(FeatureStatistics, Option<Problem>)> {
        let lists = self.files.lists(self.index, self.snapshot.layout, group, feature)?;
        let seed = ColumnSeed::new(&feature.name);
        let statistics = count_lists(lists.views(), 0..lists.len(), seed, samples);
        Ok((statistics, self.unknown_id(feature, &lists, &statistics)))
    }

    /// Returns a problem for the first id that the feature's vocabulary does not have.
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

    fn problem(&self, column: &str, row: impl Into<Option<usize>>, message: String) -> Problem {
        Problem::new(&self.files.path, message).in_row_group(self.index).in_column(column).in_row(row)
    }
}
