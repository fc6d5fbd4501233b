//! Writes small datasets, and generates their samples.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::Int64Type;
use onefold_datasets::digest::Digest;
use onefold_datasets::{
    Buckets, DatasetWriter, FeatureGroup, KeptColumn, KeptKind, Layout, Order, PartitionColumn, PartitionKey,
    PartitionType, Schema, Snapshot, SparseFeature, SparseKind, WriterOptions, bucket_of_session,
};
use onefold_ikjt::{Batch, Batches, Error, ReadRequest, Reader, Step, Workers, digest};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A sample, as it was written or read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) clicked: f32,
    pub(crate) dense: Vec<f32>,
    /// The lists of `city`, `tags`, `history`, `views` and `item`.
    pub(crate) lists: Vec<Vec<i64>>,
}

/// The parameters of a random log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log {
    pub(crate) sessions: usize,
    /// The mean number of samples per session.
    pub(crate) session_size: f64,
    /// The probability that `city` and `tags` repeat.
    pub(crate) repeat: f64,
    pub(crate) seed: u64,
}

pub(crate) const FEATURES: [&str; 5] = ["city", "tags", "history", "views", "item"];

/// Returns a schema with the groups `user` (two sparse features), `past` (two windows) and `item` (not deduplicated).
pub(crate) fn schema() -> Schema {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let group =
        |name: &str, deduplicated, features| FeatureGroup { name: name.to_owned(), deduplicated, features };
    let (sparse, sequence) = (SparseKind::Sparse, SparseKind::Sequence);
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec!["age".to_owned(), "number".to_owned()],
        kept: vec![
            KeptColumn { name: "request".to_owned(), kind: KeptKind::Integer },
            KeptColumn { name: "country".to_owned(), kind: KeptKind::Text },
        ],
        groups: vec![
            group("user", true, vec![feature("city", sparse), feature("tags", sparse)]),
            group("past", true, vec![feature("history", sequence), feature("views", sequence)]),
            group("item", false, vec![feature("item", sparse)]),
        ],
    }
}

/// Returns the value of the kept column `request` for a sample with this number.
pub(crate) fn request(number: i64) -> Option<i64> {
    (number % 7 != 3).then_some(number * 1_000_003 - 5)
}

/// Returns the value of the kept column `country` for a sample with this number.
pub(crate) fn country(number: i64) -> Option<String> {
    (number % 5 != 0).then(|| "ü".repeat((number % 4) as usize) + &number.to_string())
}

impl Log {
    /// Generates the samples by session. The dense feature `number` counts them; the last id of `item` is the number
    /// of the session.
    pub(crate) fn samples(self) -> Vec<Vec<Sample>> {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        let mut number = 0;
        let mut session = |session: usize| {
            let mut lists = vec![Vec::new(); 5];
            let mut samples = Vec::new();
            loop {
                let first = samples.is_empty();
                if first || !random.random_bool(self.repeat) {
                    lists[0] = vec![random.random_range(0..5)];
                    let length = random.random_range(0..6);
                    lists[1] = (0..length).map(|_| random.random_range(-3..100)).collect();
                }
                for window in &mut lists[2..4] {
                    if first {
                        let length = random.random_range(0..12);
                        *window = (0..length).map(|_| random.random_range(0..1000)).collect();
                    } else if random.random_bool(0.3) {
                        window.push(random.random_range(0..1000));
                        if window.len() > 12 {
                            window.remove(0);
                        }
                    }
                }
                lists[4] = vec![random.random_range(0..50), session as i64];
                let dense = vec![random.random_range(0.0..1.0), number as f32];
                let clicked = f32::from(u8::from(random.random_bool(0.3)));
                samples.push(Sample { clicked, dense, lists: lists.clone() });
                number += 1;
                if random.random_bool(1.0 / self.session_size) {
                    return samples;
                }
            }
        };
        (0..self.sessions).map(&mut session).collect()
    }

    /// Does the same as [`write`](Self::write) with `buckets` buckets that have separate files. Sessions are assigned
    /// to buckets by their numbers.
    pub(crate) fn write_buckets(self, directory: &Path, layout: Layout, buckets: u32) -> Vec<Sample> {
        self.write_divided(directory, layout, Buckets::with_own_files(buckets))
    }

    /// Does the same as [`write`](Self::write) with these buckets and ranges.
    pub(crate) fn write_divided(self, directory: &Path, layout: Layout, buckets: Buckets) -> Vec<Sample> {
        self.write_as(directory, WriterOptions { buckets, ..options(layout) })
    }

    /// Writes the samples to `directory`, in two partitions, with row groups and files of a few KiB. Returns the
    /// samples in the dataset's order.
    pub(crate) fn write(self, directory: &Path, layout: Layout) -> Vec<Sample> {
        self.write_in_order(directory, layout, &[])
    }

    /// Does the same as [`write`](Self::write) with the columns `first` at the beginning of the files.
    pub(crate) fn write_in_order(self, directory: &Path, layout: Layout, first: &[&str]) -> Vec<Sample> {
        let column_order = first.iter().map(|name| (*name).to_owned()).collect();
        self.write_as(directory, WriterOptions { column_order, ..options(layout) })
    }

    fn write_as(self, directory: &Path, options: WriterOptions) -> Vec<Sample> {
        write_sessions(&self.samples(), directory, options)
    }
}

/// Writes sessions to `directory`, in two partitions. Returns their samples in the dataset's order.
pub(crate) fn write_sessions(
    sessions: &[Vec<Sample>],
    directory: &Path,
    options: WriterOptions,
) -> Vec<Sample> {
    let buckets = options.buckets.number;
    let mut writer = DatasetWriter::create(directory, schema(), options).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("split", PartitionType::Text)]).unwrap();
    let (first, second) = sessions.split_at(sessions.len() / 2);
    let mut written = Vec::new();
    for (split, sessions) in [("a", first), ("b", second)] {
        let key = PartitionKey::new(vec![("split".to_owned(), split.to_owned())]);
        let samples = in_buckets(sessions, buckets);
        // Batches end anywhere, including within sessions.
        for part in samples.chunks(37) {
            writer.write(&key, &columns(part)).unwrap();
        }
        written.extend(samples.into_iter().map(|(_, sample)| sample.clone()));
    }
    writer.finish().unwrap();
    written
}

/// Returns the samples of a partition with their session ids, in the order of a dataset with `buckets` buckets.
/// Sessions are assigned to buckets by their numbers.
pub(crate) fn in_buckets(sessions: &[Vec<Sample>], buckets: u32) -> Vec<(i64, &Sample)> {
    let count = i64::from(buckets);
    // The upper 16 of 63 bits determine the bucket.
    let id = |number: usize| ((number as i64 % count * 65_536 + 65_535) / count) << 47 | number as i64;
    let mut numbered: Vec<_> = sessions.iter().enumerate().map(|(i, session)| (id(i), session)).collect();
    numbered.sort_by_key(|(id, _)| bucket_of_session(*id, buckets));
    numbered.into_iter().flat_map(|(id, session)| session.iter().map(move |sample| (id, sample))).collect()
}

/// Returns options for row groups and files of a few KiB.
pub(crate) fn options(layout: Layout) -> WriterOptions {
    WriterOptions {
        layout,
        row_group_bytes: 4 << 10,
        file_bytes: 12 << 10,
        ..WriterOptions::new(Order::Session)
    }
}

pub(crate) fn columns(samples: &[(i64, &Sample)]) -> RecordBatch {
    let floats = |value: &dyn Fn(&Sample) -> f32| -> ArrayRef {
        Arc::new(Float32Array::from_iter_values(samples.iter().map(|(_, sample)| value(sample))))
    };
    let lists = |feature: usize| -> ArrayRef {
        let lists = samples.iter().map(|(_, sample)| Some(sample.lists[feature].iter().copied().map(Some)));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let sessions = samples.iter().map(|(session, _)| *session);
    let times = samples.iter().map(|(_, sample)| sample.dense[1] as i64 * 1_000_000);
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        ("session_id", Arc::new(Int64Array::from_iter_values(sessions))),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
        ("clicked", floats(&|sample| sample.clicked)),
        ("age", floats(&|sample| sample.dense[0])),
        ("number", floats(&|sample| sample.dense[1])),
    ];
    let numbers = || samples.iter().map(|(_, sample)| sample.dense[1] as i64);
    columns.push(("request", Arc::new(Int64Array::from_iter(numbers().map(request)))));
    columns.push(("country", Arc::new(StringArray::from_iter(numbers().map(country)))));
    columns.extend(FEATURES.iter().enumerate().map(|(i, name)| (*name, lists(i))));
    RecordBatch::try_from_iter(columns).unwrap()
}

/// Returns the samples of a batch.
pub(crate) fn samples_of(batch: &Batch) -> Vec<Sample> {
    let width = batch.dense_width();
    let sample = |i: usize| Sample {
        clicked: batch.labels()[i],
        dense: batch.dense()[i * width..][..width].to_vec(),
        lists: (batch.groups().iter())
            .flat_map(|group| group.features().iter().map(move |feature| (group.row_of(i), feature)))
            .map(|(row, feature)| feature.row(row).to_vec())
            .collect(),
    };
    (0..batch.size()).map(sample).collect()
}

/// Opens a reader with the given number of threads and memory limit in bytes.
pub(crate) fn open_with(
    directory: &Path,
    request: impl Into<ReadRequest>,
    (threads, memory_limit): (usize, u64),
) -> Result<Reader, Error> {
    Reader::open(directory, request, &Workers::new(threads, memory_limit)?)
}

/// Opens a reader with two threads and enough memory.
pub(crate) fn open(directory: &Path, request: impl Into<ReadRequest>) -> Result<Reader, Error> {
    open_with(directory, request, (2, 1 << 30))
}

/// Returns the batches of an epoch.
pub(crate) fn collect(batches: Batches) -> Vec<Batch> {
    batches.map(|step| step.unwrap().batch).collect()
}

/// Returns the batches of the first epoch.
pub(crate) fn read(directory: &Path, request: impl Into<ReadRequest>) -> Vec<Batch> {
    collect(open(directory, request).unwrap().batches().unwrap())
}

/// Returns the paths of a dataset's data files.
pub(crate) fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    Snapshot::load(directory).unwrap().file_paths().map(|path| directory.join(path)).collect()
}

/// Returns the digest of each global batch, from the steps of each rank.
pub(crate) fn step_digests(steps: &[Vec<Step>], reader: &Reader) -> Vec<Digest> {
    assert!(steps.iter().all(|of_rank| of_rank.len() == steps[0].len()), "all ranks take equally many steps");
    let of_step = |step: usize| {
        let mut sum = Digest::default();
        steps.iter().for_each(|of_rank| sum.merge(digest(&of_rank[step].batch, reader.schema())));
        sum
    };
    (0..steps[0].len()).map(of_step).collect()
}
