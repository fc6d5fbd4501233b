//! Small datasets, and the samples they were made of.

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

/// One sample as it was written, or as it was read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) clicked: f32,
    pub(crate) dense: Vec<f32>,
    /// `city`, `tags`, `history`, `views`, `item`.
    pub(crate) lists: Vec<Vec<i64>>,
}

/// How a log is drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Log {
    pub(crate) sessions: usize,
    /// Mean samples per session.
    pub(crate) session_size: f64,
    /// Probability that `city` and `tags` repeat.
    pub(crate) repeat: f64,
    pub(crate) seed: u64,
}

pub(crate) const FEATURES: [&str; 5] = ["city", "tags", "history", "views", "item"];

/// `user` (two sparse features), `past` (two windows) and `item`, which is not deduplicated.
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

/// What is kept of the sample of this number.
pub(crate) fn request(number: i64) -> Option<i64> {
    (number % 7 != 3).then_some(number * 1_000_003 - 5)
}

/// What is kept of the sample of this number, too.
pub(crate) fn country(number: i64) -> Option<String> {
    (number % 5 != 0).then(|| "ü".repeat((number % 4) as usize) + &number.to_string())
}

impl Log {
    /// The samples, session by session. Dense feature `number` counts them; the last id of `item` is the session.
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

    /// The same in `buckets` buckets, each of which has files of its own. A session is in the bucket of its number.
    pub(crate) fn write_buckets(self, directory: &Path, layout: Layout, buckets: u32) -> Vec<Sample> {
        self.write_divided(directory, layout, Buckets::with_own_files(buckets))
    }

    /// The same in these buckets and ranges.
    pub(crate) fn write_divided(self, directory: &Path, layout: Layout, buckets: Buckets) -> Vec<Sample> {
        self.write_as(directory, WriterOptions { buckets, ..options(layout) })
    }

    /// Writes the samples to `directory`, in two partitions, with row groups and files of a few KiB; gives them in the
    /// dataset's order.
    pub(crate) fn write(self, directory: &Path, layout: Layout) -> Vec<Sample> {
        self.write_in_order(directory, layout, &[])
    }

    /// The same with these columns first in the files.
    pub(crate) fn write_in_order(self, directory: &Path, layout: Layout, first: &[&str]) -> Vec<Sample> {
        let column_order = first.iter().map(|name| (*name).to_owned()).collect();
        self.write_as(directory, WriterOptions { column_order, ..options(layout) })
    }

    fn write_as(self, directory: &Path, options: WriterOptions) -> Vec<Sample> {
        write_sessions(&self.samples(), directory, options)
    }
}

/// Writes sessions to `directory`, in two partitions; gives their samples in the dataset's order.
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
        // Batches that end anywhere, also within sessions.
        for part in samples.chunks(37) {
            writer.write(&key, &columns(part)).unwrap();
        }
        written.extend(samples.into_iter().map(|(_, sample)| sample.clone()));
    }
    writer.finish().unwrap();
    written
}

/// The samples of a partition with their sessions, in the order of a dataset of so many buckets. A session is in the
/// bucket of its number.
pub(crate) fn in_buckets(sessions: &[Vec<Sample>], buckets: u32) -> Vec<(i64, &Sample)> {
    let count = i64::from(buckets);
    // The bucket follows from the 16 high bits of 63.
    let id = |number: usize| ((number as i64 % count * 65_536 + 65_535) / count) << 47 | number as i64;
    let mut numbered: Vec<_> = sessions.iter().enumerate().map(|(i, session)| (id(i), session)).collect();
    numbered.sort_by_key(|(id, _)| bucket_of_session(*id, buckets));
    numbered.into_iter().flat_map(|(id, session)| session.iter().map(move |sample| (id, sample))).collect()
}

/// Row groups and files of a few KiB.
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

/// The samples of a batch.
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

/// A reader with so many threads and bytes.
pub(crate) fn open_with(
    directory: &Path,
    request: impl Into<ReadRequest>,
    (threads, memory_limit): (usize, u64),
) -> Result<Reader, Error> {
    Reader::open(directory, request, &Workers::new(threads, memory_limit)?)
}

/// A reader with two threads and enough memory.
pub(crate) fn open(directory: &Path, request: impl Into<ReadRequest>) -> Result<Reader, Error> {
    open_with(directory, request, (2, 1 << 30))
}

/// The batches of an epoch.
pub(crate) fn collect(batches: Batches) -> Vec<Batch> {
    batches.map(|step| step.unwrap().batch).collect()
}

/// The batches of the first epoch.
pub(crate) fn read(directory: &Path, request: impl Into<ReadRequest>) -> Vec<Batch> {
    collect(open(directory, request).unwrap().batches().unwrap())
}

/// A dataset's data files.
pub(crate) fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    Snapshot::load(directory).unwrap().file_paths().map(|path| directory.join(path)).collect()
}

/// The digests of the global batches, from the steps of each rank.
pub(crate) fn step_digests(steps: &[Vec<Step>], reader: &Reader) -> Vec<Digest> {
    assert!(steps.iter().all(|of_rank| of_rank.len() == steps[0].len()), "all ranks take equally many steps");
    let of_step = |step: usize| {
        let mut sum = Digest::default();
        steps.iter().for_each(|of_rank| sum.merge(digest(&of_rank[step].batch, reader.schema())));
        sum
    };
    (0..steps[0].len()).map(of_step).collect()
}
