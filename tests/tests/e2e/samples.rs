//! Datasets as tests compare them: their samples, and what stands where in their files.

use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use onefold_datasets::{DataFile, Manifest, SESSION_COLUMN, TIME_COLUMN};
use onefold_ikjt::{Batch, Dedupe, Reader, ReaderOptions};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// One sample.
#[derive(Debug, Clone, PartialEq, PartialOrd)]
pub(crate) struct Sample {
    pub(crate) labels: Vec<f32>,
    pub(crate) dense: Vec<f32>,
    /// Names and lists, in the schema's order.
    pub(crate) sparse: Vec<(String, Vec<i64>)>,
}

/// The samples of a batch, by way of its groups' inverse indices.
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

/// Every batch of a dataset, of `batch_size` samples, or of all if they are fewer.
pub(crate) fn read_batches(dataset: &Path, batch_size: usize, dedupe: Dedupe, threads: usize) -> Vec<Batch> {
    let samples = Manifest::load(dataset).unwrap().statistics.samples as usize;
    let batch_size = batch_size.min(samples.max(1));
    let options = ReaderOptions { dedupe, threads, ..ReaderOptions::new(batch_size) };
    let reader = Reader::open(dataset, options).unwrap();
    reader.batches().unwrap().map(Result::unwrap).collect()
}

/// Every sample of a dataset, in its order.
pub(crate) fn read_samples(dataset: &Path) -> Vec<Sample> {
    read_batches(dataset, 100, Dedupe::Exact, 2).iter().flat_map(samples_of).collect()
}

/// Samples as a multiset: equal if sorted they are equal.
pub(crate) fn sorted(mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.sort_by(|a, b| a.partial_cmp(b).expect("finite numbers"));
    samples
}

/// Where a sample stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) session: i64,
    pub(crate) time: i64,
    /// The first id of the feature `request`, which identifies the sample.
    pub(crate) request: i64,
}

/// The samples of each partition in file order, read with nothing but Parquet.
pub(crate) fn places(dataset: &Path) -> Vec<(String, Vec<Place>)> {
    let manifest = Manifest::load(dataset).unwrap();
    let partition = |partition: &onefold_datasets::Partition| {
        let files = partition.files.iter().flat_map(|file| row_groups(dataset, file));
        (partition.key.to_string(), files.flatten().collect())
    };
    manifest.partitions.iter().map(partition).collect()
}

/// The samples of each row group of a file.
pub(crate) fn row_groups(dataset: &Path, file: &DataFile) -> Vec<Vec<Place>> {
    let open = || fs_err::File::open(dataset.join(&file.path)).unwrap().into_file();
    let groups = ParquetRecordBatchReaderBuilder::try_new(open()).unwrap().metadata().num_row_groups();
    assert_eq!(groups as u64, file.row_groups, "{}", file.path);
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
