//! Collects samples in the order of a dataset, and sorts them into another order.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float32Array, Int64Array, RecordBatch, TimestampMicrosecondArray};
use arrow::buffer::ScalarBuffer;
use arrow::compute::interleave_record_batch;
use arrow::datatypes::{Int64Type, SchemaRef};
use xxhash_rust::xxh3::xxh3_64;

use onefold_datasets::scan::SampleLists;
use onefold_datasets::{Result, SESSION_COLUMN, Schema};

/// The number of samples of a batch between reading and writing. It limits how many lists of a column are copied at a
/// time.
pub(super) const BATCH_SAMPLES: usize = 1024;

/// The columns of consecutive samples.
#[derive(Debug)]
pub(super) struct Samples {
    pub(super) sessions: ScalarBuffer<i64>,
    pub(super) times: ScalarBuffer<i64>,
    /// The float columns in the order of [`Schema::float_columns`]; empty if they were not read.
    pub(super) floats: Vec<ScalarBuffer<f32>>,
    /// The lists in the order of [`Schema::sparse_features`].
    pub(super) lists: Vec<SampleLists>,
}

impl Samples {
    /// Returns the samples with these indices as a batch with the columns of [`Schema::to_arrow`]. The lists are
    /// copied.
    pub(super) fn to_batch(&self, schema: &SchemaRef, rows: &[usize]) -> Result<RecordBatch> {
        let lists = self.lists.iter().map(|lists| lists.to_array(rows.iter().copied()));
        Ok(RecordBatch::try_new(Arc::clone(schema), self.columns(rows, lists))?)
    }

    /// Returns consecutive samples. Their lists are views of the lists of these samples.
    pub(super) fn to_views(&self, schema: &SchemaRef, rows: Range<usize>) -> Result<RecordBatch> {
        let lists = self.lists.iter().map(|lists| lists.to_views(rows.clone()));
        let columns = self.columns(&rows.clone().collect::<Vec<_>>(), lists);
        let names = schema.fields().iter().map(|field| field.name());
        Ok(RecordBatch::try_from_iter(names.zip(columns))?)
    }

    fn columns(&self, rows: &[usize], lists: impl Iterator<Item = ArrayRef>) -> Vec<ArrayRef> {
        let rows = || rows.iter().copied();
        let numbers = |of: &[i64]| rows().map(|row| of[row]).collect::<Vec<_>>();
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from(numbers(&self.sessions))),
            Arc::new(TimestampMicrosecondArray::from(numbers(&self.times))),
        ];
        for floats in &self.floats {
            columns.push(Arc::new(rows().map(|row| Some(floats[row])).collect::<Float32Array>()));
        }
        columns.extend(lists);
        columns
    }
}

/// Returns the sessions and lists of a batch with the columns of [`Schema::to_arrow`].
pub(super) fn sessions_and_lists(
    schema: &Schema,
    batch: &RecordBatch,
) -> (ScalarBuffer<i64>, Vec<SampleLists>) {
    let of = |name: &str| batch.column_by_name(name);
    let sessions = of(SESSION_COLUMN).and_then(|column| column.as_primitive_opt::<Int64Type>());
    let lists = |name: &str| of(name).and_then(|column| SampleLists::new(column.as_list_opt()?));
    let features = schema.sparse_features().filter_map(|feature| lists(&feature.name));
    (sessions.map_or_else(|| vec![].into(), |s| s.values().clone()), features.collect())
}

/// A selection of samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Choice {
    Everything,
    /// Intervals of time, each in one partition.
    Stretches(Vec<Stretch>),
    /// Whole sessions: the share of all sessions, in units of 2^-64.
    Sessions(u64),
}

/// The samples of a partition in an interval of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) partition: usize,
    pub(super) from: i64,
    /// The exclusive end; `None` if there is no end.
    pub(super) until: Option<i64>,
}

impl Choice {
    /// Returns the part to which a selected sample belongs, or `None` if the sample is not selected. Parts are
    /// written in order.
    fn part(&self, partition: usize, session: i64, time: i64) -> Option<usize> {
        match self {
            Self::Everything => Some(partition),
            Self::Stretches(stretches) => stretches.iter().position(|stretch| {
                let begun = stretch.partition == partition && time >= stretch.from;
                begun && stretch.until.is_none_or(|until| time < until)
            }),
            Self::Sessions(share) => {
                let mut name = [0; 16];
                name[..8].copy_from_slice(&(partition as u64).to_le_bytes());
                name[8..].copy_from_slice(&session.to_le_bytes());
                (xxh3_64(&name) <= *share).then_some(partition)
            }
        }
    }
}

/// The selected samples with all their lists.
#[derive(Debug)]
pub(super) struct Gathered {
    choice: Choice,
    /// Whether samples are sorted by session and then time, or only by time.
    by_session: bool,
    schema: SchemaRef,
    pieces: Vec<RecordBatch>,
    places: Vec<SortKey>,
}

/// The sort key of a sample, and the place where the sample is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SortKey {
    part: usize,
    /// The session, or 0 if samples are sorted only by time.
    session: i64,
    time: i64,
    piece: usize,
    row: usize,
}

impl Gathered {
    /// Starts without samples. They will be sorted by session and then time if `by_session`, or else only by time.
    pub(super) fn new(schema: &Schema, choice: Choice, by_session: bool) -> Self {
        Self { choice, by_session, schema: schema.to_arrow(), pieces: Vec::new(), places: Vec::new() }
    }

    /// Returns the indices of the given samples that are selected.
    pub(super) fn wanted(&self, partition: usize, sessions: &[i64], times: &[i64]) -> Vec<usize> {
        let wanted = |row: &usize| self.choice.part(partition, sessions[*row], times[*row]).is_some();
        (0..times.len()).filter(wanted).collect()
    }

    /// Adds samples, whose floats must have been read.
    pub(super) fn take(&mut self, partition: usize, samples: &Samples, wanted: &[usize]) -> Result<()> {
        for rows in wanted.chunks(BATCH_SAMPLES) {
            let piece = self.pieces.len();
            self.pieces.push(samples.to_batch(&self.schema, rows)?);
            for (row, sample) in rows.iter().enumerate() {
                let (session, time) = (samples.sessions[*sample], samples.times[*sample]);
                let Some(part) = self.choice.part(partition, session, time) else { continue };
                let session = if self.by_session { session } else { 0 };
                self.places.push(SortKey { part, session, time, piece, row });
            }
        }
        Ok(())
    }

    /// Returns the number of samples.
    pub(super) fn samples(&self) -> u64 {
        self.places.len() as u64
    }

    /// Returns whether samples of one part do not follow those of the previous part.
    pub(super) fn is_in_stretches(&self) -> bool {
        matches!(self.choice, Choice::Stretches(_))
    }

    /// Calls `each` with the samples in their order, part by part and in batches, and with the number and the size of
    /// the part.
    pub(super) fn for_each(
        mut self,
        mut each: impl FnMut(usize, usize, &RecordBatch) -> Result<()>,
    ) -> Result<()> {
        self.places.sort_unstable();
        let pieces: Vec<&RecordBatch> = self.pieces.iter().collect();
        for part in self.places.chunk_by(|a, b| a.part == b.part) {
            for places in part.chunks(BATCH_SAMPLES) {
                let rows: Vec<(usize, usize)> = places.iter().map(|place| (place.piece, place.row)).collect();
                each(part[0].part, part.len(), &interleave_record_batch(&pieces, &rows)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::TimestampMicrosecondType;

    use super::*;
    use crate::samples::{rows, schema};

    /// Returns part, part size, session and time of the samples that are selected from two partitions of ten samples.
    fn gathered(choice: Choice, by_session: bool) -> Vec<(usize, usize, i64, i64)> {
        let all = rows(&(0..10).map(|i| [vec![i], vec![], vec![i; 2], vec![i]]).collect::<Vec<_>>());
        let (_, lists) = sessions_and_lists(&schema(), &all);
        let samples = Samples {
            sessions: (0..10).map(|i| i / 4).collect(),
            times: (0..10).map(|i| (i * 7) % 10).collect(),
            floats: vec![vec![0.0; 10].into()],
            lists,
        };
        let mut gathered = Gathered::new(&schema(), choice, by_session);
        for partition in 0..2 {
            let wanted = gathered.wanted(partition, &samples.sessions, &samples.times);
            gathered.take(partition, &samples, &wanted).unwrap();
        }
        let mut found = Vec::new();
        let each = |part, size, batch: &RecordBatch| {
            let (sessions, lists) = sessions_and_lists(&schema(), batch);
            let times = batch.column(1).as_primitive::<TimestampMicrosecondType>().values();
            for (row, (session, time)) in sessions.iter().zip(times).enumerate() {
                // The lists belong to the sample.
                assert_eq!((lists[0].list(row)[0] * 7) % 10, *time);
                found.push((part, size, *session, *time));
            }
            Ok(())
        };
        gathered.for_each(each).unwrap();
        found
    }

    #[test]
    fn samples_come_by_time_or_by_session() {
        let by_time = gathered(Choice::Everything, false);
        assert_eq!(
            by_time.iter().map(|s| s.3).collect::<Vec<_>>(),
            [0..10, 0..10].map(Vec::from_iter).concat()
        );
        let by_session = gathered(Choice::Everything, true);
        let first: Vec<_> = by_session[..5].iter().map(|(_, _, session, time)| (*session, *time)).collect();
        assert_eq!(first, [(0, 0), (0, 1), (0, 4), (0, 7), (1, 2)]);
        assert_eq!((by_session.len(), by_session[9].0, by_session[10].0), (20, 0, 1));
    }

    #[test]
    fn stretches_are_cut_by_time_and_sessions_are_whole() {
        let stretches = vec![
            Stretch { partition: 1, from: 3, until: Some(5) },
            Stretch { partition: 0, from: 8, until: None },
        ];
        let found = gathered(Choice::Stretches(stretches), false);
        let places: Vec<_> = found.iter().map(|(part, size, _, time)| (*part, *size, *time)).collect();
        assert_eq!(places, [(0, 2, 3), (0, 2, 4), (1, 2, 8), (1, 2, 9)]);
        let found = gathered(Choice::Sessions(u64::MAX / 2), true);
        assert!(!found.is_empty() && found.len() < 20);
        for (partition, size) in
            [(0, 4), (1, 4), (2, 2)].into_iter().flat_map(|s| [(0, s), (1, s)]).map(|(p, (s, n))| ((p, s), n))
        {
            let of = found.iter().filter(|(part, _, session, _)| (*part, *session) == partition).count();
            assert!(of == 0 || of == size, "{found:?}");
        }
    }
}
