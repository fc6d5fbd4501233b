//! Benchmark of opening a dataset that has grown by one append per day: time, memory, and the bytes that one more
//! append writes. Run `cargo bench -p onefold-ikjt --bench open -- --days 365 --buckets 64 --sparse 500 --dense 200`.
//!
//! Without options the dataset is small. Separate processes open it, with its files in the page cache. Neither
//! opening nor appending reads data files, so the days between the first and the last one refer to the data files of
//! the first day. `--written-days 365` writes all files, which takes several gigabytes of temporary files.
#![expect(clippy::print_stdout, reason = "what was measured")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use clap::Parser;
use onefold_base::process::{available_threads, peak_rss_bytes};
use onefold_base::units::format_bytes;
use onefold_datasets::{
    BucketWriters, Buckets, Commit, DatasetWriter, Encoders, FeatureGroup, Layout, Order, PartitionColumn,
    PartitionKey, PartitionType, SESSION_COLUMN, Schema, Snapshot, SparseFeature, SparseKind, TIME_COLUMN,
    WriterOptions, WrittenBucket, bucket_of_session,
};
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{Reader, ReaderOptions, Workers};
use onefold_storage::Storage;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

// Uses the same allocator as `onefold-read`.
onefold_allocator::use_jemalloc!(onefold_allocator::ONE_ARENA);

/// The number of sparse features per group.
const GROUP: usize = 50;
/// The approximate size of a decoded sample in bytes. A row group contains all samples of a bucket and a day.
const SAMPLE_BYTES: usize = 1000;
const DAY_MICROS: i64 = 86_400_000_000;

/// Measure how a dataset of many partitions opens
#[derive(Debug, Parser)]
struct Arguments {
    /// Days before the append that is measured, each of which is an append
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    days: u32,
    /// Days that have data files of their own, the first one included
    #[arg(long, default_value_t = 1)]
    written_days: u32,
    /// Buckets of the dataset
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    buckets: u32,
    /// Sparse features
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    sparse: u32,
    /// Dense features
    #[arg(long, default_value_t = 20)]
    dense: u32,
    /// Samples of a day and bucket
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// Load the snapshot of this dataset, and do nothing else
    #[arg(long, hide = true)]
    snapshot_of: Option<PathBuf>,
    /// Open a reader of this dataset, and do nothing else
    #[arg(long, hide = true)]
    reader_of: Option<PathBuf>,
    /// A flag that `cargo bench` gives to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let arguments = Arguments::parse();
    if let Some(dataset) = &arguments.snapshot_of {
        return measure("Snapshot::load", || Snapshot::load(dataset).unwrap());
    }
    if let Some(dataset) = &arguments.reader_of {
        let workers = Workers::new(available_threads(), DEFAULT_MEMORY_LIMIT).unwrap();
        let options = ReaderOptions::new(1);
        return measure("Reader::open", || Reader::open(dataset, options, &workers).unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let dataset = Dataset::new(folder.path(), &arguments);
    let started = Instant::now();
    let first = dataset.write(0);
    for day in 0..arguments.days {
        let is_written = (1..arguments.written_days).contains(&day);
        dataset.commit(day, if is_written { dataset.write(day) } else { first.clone() });
    }
    let Arguments { days, buckets, sparse, dense, .. } = arguments;
    let seconds = started.elapsed().as_secs_f64();
    println!("{days} days of {buckets} buckets, {sparse} + {dense} features: built in {seconds:.1} s");

    let written = ["snapshots", "manifests"].map(|name| (name, folder.path().join(name)));
    let before = written.each_ref().map(|(_, folder)| files(folder));
    dataset.commit(days, dataset.write(days));
    for ((name, folder), before) in written.iter().zip(before) {
        let new = files(folder).into_iter().filter(|(path, _)| !before.contains_key(path));
        let bytes: u64 = new.map(|(_, bytes)| bytes).sum();
        println!("one more append, bytes written to {name}: {bytes} ({})", format_bytes(bytes));
    }
    for option in ["--snapshot-of", "--reader-of"] {
        let mut process = Command::new(std::env::current_exe().unwrap());
        assert!(process.arg(option).arg(folder.path()).status().unwrap().success());
    }
}

/// Prints the time to open a dataset, and the largest resident set of the process afterwards.
fn measure<T>(what: &str, open: impl FnOnce() -> T) {
    let started = Instant::now();
    let opened = open();
    let seconds = started.elapsed().as_secs_f64();
    let peak = format_bytes(peak_rss_bytes().unwrap_or(0));
    drop(opened);
    println!("{what}, seconds: {seconds:.3}");
    println!("{what}, peak memory of the process: {peak}");
}

/// Returns the files in a folder, and their sizes in bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let paths = fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs_err::metadata(path).unwrap().len())).collect()
}

/// A dataset that is being written.
struct Dataset<'a> {
    root: &'a Path,
    arguments: &'a Arguments,
    schema: Schema,
    options: WriterOptions,
    /// The label and the features of a day, bucket by bucket. They are the same on all days.
    features: RecordBatch,
}

impl<'a> Dataset<'a> {
    fn new(root: &'a Path, arguments: &'a Arguments) -> Self {
        let names = |letter: char, count: u32| (0..count).map(move |number| format!("{letter}{number:04}"));
        let sparse: Vec<String> = names('s', arguments.sparse).collect();
        let groups = sparse.chunks(GROUP).enumerate().map(|(number, names)| FeatureGroup {
            name: format!("g{number}"),
            deduplicated: true,
            features: names.iter().map(|name| SparseFeature::new(name, SparseKind::Sparse)).collect(),
        });
        let schema = Schema {
            labels: vec!["label".to_owned()],
            weight: None,
            dense: names('d', arguments.dense).collect(),
            kept: Vec::new(),
            groups: groups.collect(),
        };
        let options = WriterOptions {
            layout: Layout::Folded,
            commit: Commit::Append,
            buckets: Buckets::with_own_files(arguments.buckets),
            ..WriterOptions::new(Order::Session)
        };
        let features = features(&schema, (arguments.buckets * arguments.samples) as usize);
        Self { root, arguments, schema, options, features }
    }

    fn key(day: u32) -> PartitionKey {
        PartitionKey::new(vec![("day".to_owned(), day.to_string())])
    }

    /// Returns the samples of a bucket: one session, in time order.
    fn rows(&self, day: u32, bucket: u32) -> (i64, Vec<i64>, RecordBatch) {
        let (buckets, samples) = (i64::from(self.arguments.buckets), self.arguments.samples as usize);
        // The upper 16 of 63 bits determine the bucket.
        let session = ((i64::from(bucket) * 65_536 + 65_535) / buckets) << 47 | i64::from(day);
        assert_eq!(bucket_of_session(session, self.arguments.buckets), bucket);
        let times: Vec<i64> =
            (0..samples as i64).map(|sample| i64::from(day) * DAY_MICROS + sample).collect();
        let features = self.features.slice(bucket as usize * samples, samples);
        let schema = features.schema();
        let mut columns: Vec<(&str, ArrayRef)> = vec![
            (SESSION_COLUMN, Arc::new(Int64Array::from(vec![session; samples]))),
            (TIME_COLUMN, Arc::new(TimestampMicrosecondArray::from(times.clone()))),
        ];
        let named = schema.fields().iter().zip(features.columns());
        columns.extend(named.map(|(field, column)| (field.name().as_str(), Arc::clone(column))));
        (session, times, RecordBatch::try_from_iter(columns).unwrap())
    }

    /// Writes the data files of a day, several buckets in parallel.
    fn write(&self, day: u32) -> Vec<WrittenBucket> {
        let (storage, threads) = (Storage::open(self.root).unwrap(), available_threads());
        let encoders = Encoders::new(threads, threads).unwrap();
        let writers =
            BucketWriters::new(storage, self.schema.clone(), self.options.clone(), encoders).unwrap();
        let write = |bucket: u32| {
            let mut writer = writers.range(&Self::key(day), bucket);
            let (session, times, rows) = self.rows(day, bucket);
            for time in times {
                assert!(!writer.push(session, time, SAMPLE_BYTES).unwrap(), "it is one row group");
            }
            writer.write_row_group(Box::new(move || Ok(vec![rows]))).unwrap();
            writer.finish().unwrap()
        };
        (0..self.arguments.buckets).into_par_iter().map(write).collect()
    }

    /// Commits data files as the files of a day.
    fn commit(&self, day: u32, buckets: Vec<WrittenBucket>) {
        let mut writer = DatasetWriter::create(self.root, self.schema.clone(), self.options.clone()).unwrap();
        writer.set_partition_columns(vec![PartitionColumn::new("day", PartitionType::Integer)]).unwrap();
        for mut bucket in buckets {
            bucket.key = Self::key(day);
            writer.add_part(bucket).unwrap();
        }
        assert!(writer.finish().unwrap().changed);
    }
}

/// Returns random values of the label and all features for `samples` samples, in the order of the schema.
fn features(schema: &Schema, samples: usize) -> RecordBatch {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut columns: Vec<(&str, ArrayRef)> = Vec::new();
    for name in schema.float_columns() {
        let values = (0..samples).map(|_| random.random_range(0.0_f32..1.0));
        let values: ArrayRef = Arc::new(Float32Array::from_iter_values(values));
        columns.push((name, values));
    }
    for feature in schema.sparse_features() {
        let lists = (0..samples).map(|_| {
            let length = random.random_range(0..4);
            Some((0..length).map(|_| Some(random.random_range(0..1_000_000_i64))).collect::<Vec<_>>())
        });
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists));
        columns.push((feature.name.as_str(), lists));
    }
    RecordBatch::try_from_iter(columns).unwrap()
}
