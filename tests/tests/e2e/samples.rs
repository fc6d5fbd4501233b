//! Datasets in a form that tests compare: their samples, and the positions of samples in their files.

use std::collections::BTreeSet;
use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use onefold_datasets::{FileSet, Partition, SESSION_COLUMN, Snapshot, TIME_COLUMN};
use onefold_ikjt::{Batch, Dedupe, Reader, ReaderOptions, Workers};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// One sample.
#[derive(Debug, Clone, PartialEq, PartialOrd)]
pub(crate) struct Sample {
    pub(crate) labels: Vec<f32>,
    pub(crate) dense: Vec<f32>,
    /// Names and lists of the sparse features, in the schema's order.
    pub(crate) sparse: Vec<(String, Vec<i64>)>,
}

/// Returns the samples of a batch, by the inverse indices of its groups.
pub(crate) fn samples_of(batch: &Batch) -> Vec<Sample> {
    let (labels, dense) = (batch.label_width(), batch.dense_width());
    let sample = |i: usize| Sample {
        labels: batch.labels()[i * labels..][..labels].to_vec(),
        dense: batch.dense()[i * dense..][..dense].to_vec(),
        sparse: (batch.groups().iter())
            .flat_map(|group| group.features().iter().map(move |feature| (group.row_of(i), feature)))
            .map(|(row, feature)| (feature.name().to_owned(), feature.row(row).to_vec()))
            .collect(),
    };
    (0..batch.size()).map(sample).collect()
}

/// Returns the numbers of a dataset's snapshots, in ascending order.
pub(crate) fn snapshot_numbers(dataset: &Path) -> Vec<u64> {
    let Ok(entries) = fs_err::read_dir(dataset.join("snapshots")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let mut numbers: Vec<u64> = names.filter_map(|name| name.strip_suffix(".json")?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// Returns the data files, vocabularies and manifests of a snapshot.
fn named_files(snapshot: &Snapshot) -> impl Iterator<Item = &str> {
    snapshot.file_paths().chain(snapshot.manifests.iter().map(|entry| entry.path.as_str()))
}

/// Returns the files in a dataset's directory that none of its snapshots names, by relative path.
pub(crate) fn unnamed_files(dataset: &Path) -> BTreeSet<String> {
    let files = onefold_tests::files_below(dataset).into_keys();
    let mut unnamed: BTreeSet<String> = files.map(|path| path.to_string_lossy().into_owned()).collect();
    unnamed.remove("snapshots/latest");
    for number in snapshot_numbers(dataset) {
        unnamed.remove(&format!("snapshots/{number:08}.json"));
        let snapshot = Snapshot::load_at(dataset, Some(number)).unwrap();
        unnamed.retain(|path| !named_files(&snapshot).any(|named| named == path));
    }
    unnamed
}

/// Checks that a dataset's directory contains its snapshots and all files that they name, and no other files.
#[track_caller]
pub(crate) fn assert_only_named_files(dataset: &Path) {
    assert_eq!(unnamed_files(dataset), BTreeSet::new(), "files that no snapshot names");
    for number in snapshot_numbers(dataset) {
        let snapshot = Snapshot::load_at(dataset, Some(number)).unwrap();
        let missing: Vec<_> = named_files(&snapshot).filter(|path| !dataset.join(path).is_file()).collect();
        assert!(missing.is_empty(), "snapshot {number} lacks {missing:?}");
    }
}

/// Returns the partitions of a dataset, without the random part of their files' names.
pub(crate) fn partitions(dataset: &Path) -> Vec<Partition> {
    without_random_names(&Snapshot::load(dataset).unwrap()).partitions
}

/// Returns a snapshot without the values that differ between two builds of the same dataset: its identity, its time,
/// the random part of its files' names, and the bytes of manifests, which contain these names.
pub(crate) fn without_random_names(snapshot: &Snapshot) -> Snapshot {
    let mut snapshot = snapshot.clone();
    snapshot.dataset.clear();
    snapshot.committed.clear();
    for entry in &mut snapshot.manifests {
        (entry.path, entry.checksum, entry.bytes) = (String::new(), String::new(), 0);
    }
    let data = snapshot.partitions.iter_mut().flat_map(|partition| &mut partition.files);
    let data = data.flat_map(|set| &mut set.files);
    let vocabularies = snapshot.vocabularies.values_mut().map(|file| &mut file.path);
    for path in data.map(|file| &mut file.path).chain(vocabularies) {
        let (start, random) = path.rsplit_once('-').unwrap();
        let random = random.strip_suffix(".parquet").unwrap();
        let is_random = random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert!(is_random, "`{path}` ends with no random name");
        *path = format!("{start}-*.parquet");
    }
    snapshot
}

/// Returns `threads` threads of a reader, with enough memory.
pub(crate) fn workers(threads: usize) -> Workers {
    Workers::new(threads, 1 << 30).unwrap()
}

/// Returns all batches of a dataset, of `batch_size` samples each, or of all samples if there are fewer.
pub(crate) fn read_batches(dataset: &Path, batch_size: usize, dedupe: Dedupe, threads: usize) -> Vec<Batch> {
    read_snapshot(dataset, None, ReaderOptions { dedupe, ..ReaderOptions::new(batch_size) }, threads)
}

/// Returns all batches of a snapshot of a dataset, by default of the newest one.
fn read_snapshot(
    dataset: &Path,
    snapshot: Option<u64>,
    options: ReaderOptions,
    threads: usize,
) -> Vec<Batch> {
    let samples = Snapshot::load_at(dataset, snapshot).unwrap().statistics.samples as usize;
    let global_batch_size = options.global_batch_size.min(samples.max(1));
    let options = ReaderOptions { snapshot, global_batch_size, ..options };
    let reader = Reader::open(dataset, options, &workers(threads)).unwrap();
    reader.batches().unwrap().map(|step| step.unwrap().batch).collect()
}

/// Returns all samples of a dataset, in order.
pub(crate) fn read_samples(dataset: &Path) -> Vec<Sample> {
    read_batches(dataset, 100, Dedupe::Exact, 2).iter().flat_map(samples_of).collect()
}

/// Returns all samples of a snapshot of a dataset, in order.
pub(crate) fn read_samples_at(dataset: &Path, snapshot: u64) -> Vec<Sample> {
    read_snapshot(dataset, Some(snapshot), ReaderOptions::new(100), 2).iter().flat_map(samples_of).collect()
}

/// Sorts samples, for comparisons of multisets.
pub(crate) fn sorted(mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.sort_by(|a, b| a.partial_cmp(b).expect("finite numbers"));
    samples
}

/// The position of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) session: i64,
    pub(crate) time: i64,
    /// The first id of the feature `request`, which identifies the sample.
    pub(crate) request: i64,
}

/// Returns the samples of each partition in file order, read with Parquet only.
pub(crate) fn places(dataset: &Path) -> Vec<(String, Vec<Place>)> {
    let snapshot = Snapshot::load(dataset).unwrap();
    let partition = |partition: &Partition| {
        let files = partition.files.iter().flat_map(|file| row_groups(dataset, file));
        (partition.key.to_string(), files.flatten().collect())
    };
    snapshot.partitions.iter().map(partition).collect()
}

/// Returns the samples of each row group in the only file of a set.
pub(crate) fn row_groups(dataset: &Path, file: &FileSet) -> Vec<Vec<Place>> {
    let open = || fs_err::File::open(dataset.join(file.path())).unwrap().into_file();
    let groups = ParquetRecordBatchReaderBuilder::try_new(open()).unwrap().metadata().num_row_groups();
    assert_eq!(groups, file.row_groups.len(), "{}", file.path());
    let read = |group: usize| {
        let builder = ParquetRecordBatchReaderBuilder::try_new(open()).unwrap().with_row_groups(vec![group]);
        builder.build().unwrap().flat_map(|rows| places_of(&rows.unwrap())).collect()
    };
    (0..groups).map(read).collect()
}

fn places_of(rows: &RecordBatch) -> Vec<Place> {
    let column = |name: &str| rows.column_by_name(name).unwrap();
    let sessions = column(SESSION_COLUMN).as_primitive::<Int64Type>();
    let times = column(TIME_COLUMN).as_primitive::<TimestampMicrosecondType>();
    let requests = column("request").as_list::<i32>();
    let place = |row| Place {
        session: sessions.value(row),
        time: times.value(row),
        request: requests.value(row).as_primitive::<Int64Type>().value(0),
    };
    (0..rows.num_rows()).map(place).collect()
}
