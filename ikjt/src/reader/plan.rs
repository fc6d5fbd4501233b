//! An epoch as data: its steps, its streams, and the row groups that each of them reads, in order.

use std::collections::HashMap;
use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::decode::RowGroup;
use super::files::{Chosen, Files};
use crate::Result;
use crate::preprocess::Sampler;

/// The row groups that an epoch reads, for all ranks.
///
/// It comes from the snapshot alone, without a look at data files, but for one exception: a `sampling` step whose rates
/// depend on labels needs these columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The steps that every rank takes.
    pub steps: u64,
    /// The streams, by number. Rank r of W reads the streams r, r + W, r + 2 W and so on.
    pub streams: Vec<PlannedStream>,
}

/// The row groups that a stream reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedStream {
    /// All samples of the stream, less those that `sampling` drops. With [`Tail::Drop`](super::Tail::Drop) the last
    /// ones may be in no step.
    pub samples: u64,
    /// In the order in which they are read. A shuffle also moves sessions between neighbours.
    pub splits: Vec<Split>,
}

/// A range of rows of one row group.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Split {
    /// The data file, relative to the dataset's folder; the first one if several files have the columns.
    pub path: String,
    /// The row group of the file, from 0.
    pub row_group: usize,
    /// Parquet rows of the row group, from 0.
    pub rows: Range<u64>,
}

/// Samples by row group, of some of the chosen files.
pub(super) type Counts = HashMap<usize, Vec<u64>>;

/// The rows of the row groups of the files `wanted`, as the snapshot describes them.
pub(super) fn row_counts(chosen: &[Chosen], wanted: impl IntoIterator<Item = usize>) -> Counts {
    let of_file = |file: usize| {
        let row_groups = chosen[file].set.row_groups.iter();
        (file, row_groups.map(|row_group| row_group.samples).collect())
    };
    wanted.into_iter().map(of_file).collect()
}

/// The number of samples of every row group of `counts` after sampling in an epoch. `labels` are the schema's.
pub(super) fn sampled_counts(
    files: &Files,
    counts: &Counts,
    sampler: &Sampler,
    labels: &[String],
    epoch: u64,
    pool: &rayon::ThreadPool,
) -> Result<Counts> {
    let names: Vec<&str> = sampler.labels().map(|label| labels[label].as_str()).collect();
    let row_group = |file: usize, index: usize, first: u64, rows: u64| {
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        if names.is_empty() {
            return Ok(sampler.keep(epoch, first, rows, |_, _| 0.0).len() as u64);
        }
        let columns =
            RowGroup { files: files.open(file)?, index, first }.read_floats(&names, files.verify)?;
        let column = |label: usize| sampler.labels().position(|i| i == label).unwrap_or(0);
        Ok(sampler.keep(epoch, first, rows, |label, sample| columns[column(label)][sample]).len() as u64)
    };
    let of_file = |(file, rows): (&usize, &Vec<u64>)| {
        let starts = rows.iter().scan(files.files[*file].first, |first, rows| {
            *first += rows;
            Some(*first - rows)
        });
        let row_groups: Vec<_> = starts.zip(rows).enumerate().collect();
        let sampled =
            row_groups.into_par_iter().map(|(index, (first, rows))| row_group(*file, index, first, *rows));
        Ok((*file, sampled.collect::<Result<_>>()?))
    };
    pool.install(|| counts.par_iter().map(of_file).collect())
}

/// The chosen files of every stream: bucket by bucket within a partition, partition by partition.
pub(super) fn stream_files(chosen: &[Chosen], streams: usize) -> Vec<Vec<usize>> {
    let mut of_streams = vec![Vec::new(); streams];
    let mut ordered: Vec<usize> = (0..chosen.len()).collect();
    ordered.sort_by_key(|file| (chosen[*file].partition, chosen[*file].set.bucket));
    for file in ordered {
        of_streams[chosen[file].set.bucket as usize % streams].push(file);
    }
    of_streams
}
