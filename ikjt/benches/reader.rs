//! Benchmark of reading a dataset, in samples per second (one thread), for layouts, kinds of deduplication and
//! probabilities d that a list repeats.
//!
//! Run `cargo bench -p onefold-ikjt --bench reader`. The dataset has 20,000 samples in sessions of 16, with a group
//! of eight features of 20 ids, a group of two windows of 50, and one item feature. Files are not verified. The cost
//! of a sample should be proportional to the ids that are stored for it: with `folded`, it falls as d rises; with
//! `rows`, it does not.
//!
//! `read visits` compares `exact` and `window` on data in which rows recur: 40 users with sessions of 4 samples, so
//! that a batch has a dozen sessions of each user. In this case `window` should be at least as fast as `exact`.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use onefold_datasets::{
    Commit, DatasetWriter, FeatureGroup, Layout, Order, PartitionKey, Schema, SparseFeature, SparseKind,
    WriterOptions,
};
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{Checks, Dedupe, ReadRequest, Reader, ReaderOptions, Workers};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const SAMPLES: usize = 20_000;
/// Each session belongs to a different user.
const SESSIONS: Sessions = Sessions { samples: 16, users: SAMPLES };
/// Each user has a dozen sessions in a batch.
const VISITS: Sessions = Sessions { samples: 4, users: 40 };
const USER: [&str; 8] = ["u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7"];
const WINDOWS: [&str; 2] = ["w0", "w1"];

/// The sessions of a dataset: `samples` samples each, assigned to `users` users in turns.
#[derive(Clone, Copy)]
struct Sessions {
    samples: usize,
    users: usize,
}

fn schema() -> Schema {
    let group = |name: &str, deduplicated, kind, features: &[&str]| FeatureGroup {
        name: name.to_owned(),
        deduplicated,
        features: features.iter().map(|name| SparseFeature::new(*name, kind)).collect(),
    };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: vec!["age".to_owned()],
        kept: Vec::new(),
        groups: vec![
            group("user", true, SparseKind::Sparse, &USER),
            group("past", true, SparseKind::Sequence, &WINDOWS),
            group("item", false, SparseKind::Sparse, &["item"]),
        ],
    }
}

/// The lists of one feature, one after the other.
#[derive(Default)]
struct Lists {
    ids: Vec<i64>,
    lengths: Vec<usize>,
}

impl Lists {
    fn push(&mut self, list: &[i64]) {
        self.ids.extend_from_slice(list);
        self.lengths.push(list.len());
    }

    fn into_array(self) -> ArrayRef {
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        let offsets = OffsetBuffer::from_lengths(self.lengths);
        Arc::new(ListArray::new(item, offsets, Arc::new(Int64Array::from(self.ids)), None))
    }
}

fn rows(d: f64, sessions: Sessions) -> RecordBatch {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut ids =
        |count: usize| -> Vec<i64> { (0..count).map(|_| random.random_range(0..200_000)).collect() };
    let mut coin = ChaCha8Rng::seed_from_u64(2);
    let mut user: Vec<Lists> = USER.iter().map(|_| Lists::default()).collect();
    let mut windows: Vec<Lists> = WINDOWS.iter().map(|_| Lists::default()).collect();
    let mut item = Lists::default();
    // The lists of the previous sample of each user. The user's next session begins with them.
    let mut users: Vec<Vec<Vec<i64>>> = vec![Vec::new(); sessions.users];
    for sample in 0..SAMPLES {
        let current = &mut users[sample / sessions.samples % sessions.users];
        if current.is_empty() {
            *current = (0..10).map(|i| ids(if i < 8 { 20 } else { 50 })).collect();
        } else if sample % sessions.samples != 0 && !coin.random_bool(d) {
            for list in &mut current[..8] {
                *list = ids(20);
            }
            for list in &mut current[8..] {
                list.remove(0);
                list.extend(ids(1));
            }
        }
        for (lists, list) in user.iter_mut().chain(&mut windows).zip(current.iter()) {
            lists.push(list);
        }
        item.push(&ids(2));
    }
    let count = SAMPLES as i64;
    let floats =
        || -> ArrayRef { Arc::new(Float32Array::from_iter_values((0..count).map(|i| (i % 7) as f32))) };
    let mut columns: Vec<(&str, ArrayRef)> = vec![
        (
            "session_id",
            Arc::new(Int64Array::from_iter_values((0..count).map(|i| i / sessions.samples as i64))),
        ),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from_iter_values(0..count))),
        ("clicked", floats()),
        ("age", floats()),
    ];
    columns.extend(USER.iter().zip(user).map(|(name, lists)| (*name, lists.into_array())));
    columns.extend(WINDOWS.iter().zip(windows).map(|(name, lists)| (*name, lists.into_array())));
    columns.push(("item", item.into_array()));
    RecordBatch::try_from_iter(columns).unwrap()
}

fn write(directory: &Path, layout: Layout, rows: &RecordBatch) {
    let options = WriterOptions { layout, commit: Commit::Overwrite, ..WriterOptions::new(Order::Session) };
    let mut writer = DatasetWriter::create(directory, schema(), options).unwrap();
    writer.write(&PartitionKey::default(), rows).unwrap();
    writer.finish().unwrap();
}

fn read(directory: &Path, dedupe: Dedupe, workers: &Workers) -> usize {
    let options = ReaderOptions { dedupe, ..ReaderOptions::new(2048) };
    let checks = Checks { verify: false, ..Checks::default() };
    let reader = Reader::open(directory, ReadRequest { checks, ..options.into() }, workers).unwrap();
    reader.batches().unwrap().map(|step| step.unwrap().batch.size()).sum()
}

fn benches(criterion: &mut Criterion) {
    let workers = Workers::new(1, DEFAULT_MEMORY_LIMIT).unwrap();
    let mut benches = criterion.benchmark_group("read");
    benches.throughput(Throughput::Elements(SAMPLES as u64)).sample_size(10);
    for d in [0.0, 0.5, 0.8, 0.9, 0.95] {
        let rows = rows(d, SESSIONS);
        for (layout, dedupe) in
            [(Layout::Rows, Dedupe::Off), (Layout::Rows, Dedupe::Exact), (Layout::Folded, Dedupe::Window)]
        {
            let directory = tempfile::tempdir().unwrap();
            write(directory.path(), layout, &rows);
            let name = format!("{layout:?} {dedupe:?}").to_lowercase();
            benches.bench_function(BenchmarkId::new(name, format!("d={d}")), |bencher| {
                bencher.iter(|| assert_eq!(read(directory.path(), dedupe, &workers), SAMPLES));
            });
        }
    }
    benches.finish();
    let mut benches = criterion.benchmark_group("read visits");
    benches.throughput(Throughput::Elements(SAMPLES as u64)).sample_size(10);
    for d in [0.5, 0.95] {
        let rows = rows(d, VISITS);
        for layout in [Layout::Rows, Layout::Folded] {
            let directory = tempfile::tempdir().unwrap();
            write(directory.path(), layout, &rows);
            for dedupe in [Dedupe::Exact, Dedupe::Window] {
                let name = format!("{layout:?} {dedupe:?}").to_lowercase();
                benches.bench_function(BenchmarkId::new(name, format!("d={d}")), |bencher| {
                    bencher.iter(|| assert_eq!(read(directory.path(), dedupe, &workers), SAMPLES));
                });
            }
        }
    }
    benches.finish();
}

criterion_group!(reading, benches);
criterion_main!(reading);
