//! The plan of an epoch: its steps, its streams, and the row groups that each stream reads, in order.

use std::collections::BTreeMap;
use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::files::{Chosen, Files};
use super::known_labels::KnownLabels;
use super::order::{Part, buckets_of_stream};
use super::row_group::RowGroup;
use crate::error::Result;
use crate::preprocess::Sampler;

/// The row groups that an epoch reads, for all ranks.
///
/// A plan is made from the snapshot alone, without reading data files. The only exception is a `sampling` step whose
/// rates depend on labels: it needs the columns of these labels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of steps that every rank takes.
    pub steps: u64,
    /// The streams, by number. Rank r of W reads the streams r, r + W, r + 2 W and so on, or shares the stream r mod S
    /// with other ranks if there are only S < W streams.
    pub streams: Vec<PlannedStream>,
}

/// The row groups that a stream reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedStream {
    /// The number of samples of the stream, without the samples that `sampling` drops. With
    /// [`Tail::Drop`](super::Tail::Drop) the last ones may be in no step.
    pub samples: u64,
    /// The splits in the order in which they are read. A shuffle additionally moves sessions between neighbouring
    /// splits. If buckets of several streams are in one row group, the streams read different rows of it.
    pub splits: Vec<Split>,
}

/// A range of rows of one row group.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Split {
    /// The data file, relative to the dataset's folder. If several files contain the columns, it is the first one.
    pub path: String,
    /// The number of the row group in the file, from 0.
    pub row_group: usize,
    /// The Parquet rows of the row group, from 0.
    pub rows: Range<u64>,
}

/// The number of samples of each part that sampling keeps, `[streams][parts]`.
pub(super) type Counts = Vec<Vec<u64>>;

/// Counts the samples of every part that sampling keeps in an epoch. `labels` are the names of the schema's labels, and
/// the labels of an earlier time, if these are read.
pub(super) fn sampled_counts(
    files: &Files,
    streams: &[Vec<Part>],
    sampler: &Sampler,
    labels: (&[String], Option<&KnownLabels>),
    epoch: u64,
    pool: &rayon::ThreadPool,
) -> Result<Counts> {
    let (names, known) = labels;
    // Returns the rows of a row group that are kept, in ascending order.
    let left = |file: usize, index: usize, first: u64| -> Result<Vec<u32>> {
        let rows = files.files[file].set.row_groups[index].samples;
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        if sampler.labels().next().is_none() {
            return Ok(sampler.keep(epoch, first, rows, |_, _| 0.0));
        }
        let row_group = RowGroup { files: files.open(file)?, index, first };
        let labels = row_group.read_labels(names, known, files.verify)?;
        Ok(sampler.keep(epoch, first, rows, |label, sample| labels[sample * names.len() + label]))
    };
    // Streams that share a row group read its labels once.
    let mut row_groups: BTreeMap<(usize, usize, u64), Vec<(usize, usize)>> = BTreeMap::new();
    for (stream, parts) in streams.iter().enumerate() {
        for (number, part) in parts.iter().enumerate() {
            let row_group = (part.file, part.row_group, part.first);
            row_groups.entry(row_group).or_default().push((stream, number));
        }
    }
    let counted = row_groups.par_iter().map(|(&(file, index, first), parts)| {
        let left = left(file, index, first)?;
        let before = |end: u64| left.partition_point(|row| u64::from(*row) < end) as u64;
        let counts = parts.iter().map(|&(stream, number)| {
            let Range { start, end } = streams[stream][number].rows;
            ((stream, number), before(end) - before(start))
        });
        Ok(counts.collect::<Vec<_>>())
    });
    let counted: Result<Vec<_>> = pool.install(|| counted.collect());
    let mut counts: Counts = streams.iter().map(|parts| vec![0; parts.len()]).collect();
    for ((stream, number), samples) in counted?.into_iter().flatten() {
        counts[stream][number] = samples;
    }
    Ok(counts)
}

/// Returns the parts of every stream, in the order partition, file, row group. The dataset divides its sessions into
/// `buckets` buckets.
pub(super) fn stream_parts(chosen: &[Chosen], buckets: u32, streams: usize) -> Vec<Vec<Part>> {
    let of_streams: Vec<_> = (0..streams).map(|stream| buckets_of_stream(stream, streams, buckets)).collect();
    let mut ordered: Vec<usize> = (0..chosen.len()).collect();
    ordered.sort_by_key(|file| (chosen[*file].partition, chosen[*file].set.bucket));
    let mut parts = vec![Vec::new(); streams];
    for file in ordered {
        let Chosen { set, partition, first, .. } = &chosen[file];
        let mut next = *first;
        for (row_group, described) in set.row_groups.iter().enumerate() {
            let first = next;
            next += described.samples;
            let before = of_streams.partition_point(|buckets| buckets.end <= described.bucket);
            let streams = parts.iter_mut().zip(&of_streams).skip(before);
            for (parts, buckets) in streams.take_while(|(_, of)| of.start <= described.last_bucket()) {
                let rows = described.rows_of(buckets);
                if !rows.is_empty() {
                    parts.push(Part { file, row_group, partition: *partition, first, rows });
                }
            }
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use onefold_datasets::{FileSet, RowGroup};
    use proptest::prelude::*;

    use super::*;

    /// Generates row groups from the numbers of samples of consecutive buckets; the first bucket is not empty.
    fn row_groups() -> impl Strategy<Value = Vec<RowGroup>> {
        let row_group = (0_u32..9, prop::collection::vec(0_u32..4, 0..12)).prop_map(|(bucket, mut sizes)| {
            sizes.insert(0, 1);
            sizes.push(1);
            let starts = sizes.iter().scan(0, |rows, size| {
                *rows += size;
                Some(*rows)
            });
            let mut bucket_starts: Vec<u32> = starts.collect();
            let samples = bucket_starts.pop().map_or(0, u64::from);
            RowGroup { bucket, bucket_starts, samples, ..RowGroup::default() }
        });
        prop::collection::vec(row_group, 1..5)
    }

    proptest! {
        #[test]
        fn every_row_is_in_the_stream_of_its_bucket(row_groups in row_groups(), streams in 1_usize..=64) {
            const BUCKETS: u32 = 64;
            let samples = row_groups.iter().map(|row_group| row_group.samples).sum();
            let (files, changes) = (Vec::new(), Default::default());
            let set = FileSet { bucket: 0, samples, row_groups: row_groups.clone(), files, changes };
            let chosen = [Chosen { set, lacking: Vec::new(), partition: 0, first: 100 }];
            let parts = stream_parts(&chosen, BUCKETS, streams);
            let mut found = vec![Vec::new(); row_groups.len()];
            for (stream, parts) in parts.iter().enumerate() {
                prop_assert!(parts.windows(2).all(|pair| pair[0].row_group < pair[1].row_group));
                for part in parts {
                    found[part.row_group].extend(part.rows.clone().map(|row| (row, stream)));
                }
            }
            for (row_group, found) in row_groups.iter().zip(found) {
                // The naive computation: the bucket of each row, and the stream that has this bucket.
                let bucket = |row: u64| {
                    let after = row_group.bucket_starts.iter().filter(|start| u64::from(**start) <= row).count();
                    row_group.bucket + after as u32
                };
                let stream = |bucket: u32| {
                    (0..streams).find(|of| buckets_of_stream(*of, streams, BUCKETS).contains(&bucket)).unwrap()
                };
                let expected: Vec<_> = (0..row_group.samples).map(|row| (row, stream(bucket(row)))).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
