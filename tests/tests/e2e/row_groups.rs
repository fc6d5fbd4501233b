//! The ends of row groups and files, tested with a writer whose limits are small.

use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;
use onefold_datasets::{
    DatasetWriter, FeatureGroup, Order, PartitionColumn, PartitionKey, PartitionType, SESSION_COLUMN, Schema,
    Snapshot, SparseFeature, SparseKind, TIME_COLUMN, WriterOptions,
};
use onefold_tests::Dir;

use crate::samples::{Place, row_groups};

/// The decoded bytes of a sample of [`session_rows`]: session, time, label and one id.
const SAMPLE_BYTES: usize = 8 + 8 + 4 + 8;
/// The number of samples that fill a row group.
const GROUP_SAMPLES: usize = 20;

/// The configuration for a log with the columns of [`session_rows`].
pub(crate) const SESSION_CONFIG: &str = r#"format_version = 1

[sources]
log = "log.parquet"

[samples]
query = "SELECT * FROM log"

[session]
key = ["session"]
time = "time"

[partition]
columns = ["part"]

[features]
label = { kind = "label" }
request = { kind = "sparse" }
"#;

/// Returns samples in sessions of these sizes, as the writer takes them. Requests are counted from 0.
pub(crate) fn session_rows(sizes: &[usize]) -> (Schema, RecordBatch) {
    let feature = SparseFeature::new("request", SparseKind::Sparse);
    let group = FeatureGroup { name: "ungrouped".to_owned(), deduplicated: false, features: vec![feature] };
    let schema = Schema {
        labels: vec!["label".to_owned()],
        weight: None,
        dense: vec![],
        kept: Vec::new(),
        groups: vec![group],
    };
    let sessions = (0_i64..).zip(sizes).flat_map(|(session, size)| vec![session; *size]);
    let sessions = Int64Array::from_iter_values(sessions);
    let count = sessions.len();
    let requests = (0..count as i64).map(|request| Some(vec![Some(request)]));
    let columns: Vec<(&str, ArrayRef)> = vec![
        (SESSION_COLUMN, Arc::new(sessions)),
        (TIME_COLUMN, Arc::new(TimestampMicrosecondArray::from_iter_values(0..count as i64))),
        ("label", Arc::new(Float32Array::from(vec![1.0; count]))),
        ("request", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(requests))),
    ];
    (schema, RecordBatch::try_from_iter(columns).unwrap())
}

/// Returns sessions of 1 to 20 samples. Some of them fill a row group exactly, and session 40 is larger than a row
/// group.
fn session_sizes() -> Vec<usize> {
    (0..80).map(|i| if i == 40 { 5 * GROUP_SAMPLES } else { 1 + i * 7 % GROUP_SAMPLES }).collect()
}

fn small_limits() -> WriterOptions {
    let target = GROUP_SAMPLES * SAMPLE_BYTES;
    WriterOptions { row_group_bytes: target, file_bytes: 5 * target, ..WriterOptions::new(Order::Session) }
}

/// Writes a dataset with many row groups and files, and two partitions. Returns the dataset and its requests in
/// order.
pub(crate) fn write_many_row_groups(dir: &Dir) -> (PathBuf, Vec<i64>) {
    let dataset = dir.path("many");
    let (schema, rows) = session_rows(&session_sizes());
    let mut writer = DatasetWriter::create(&dataset, schema, small_limits()).unwrap();
    writer.set_partition_columns(vec![PartitionColumn::new("part", PartitionType::Text)]).unwrap();
    let key = |part: &str| PartitionKey::new(vec![("part".to_owned(), part.to_owned())]);
    writer.write(&key("a"), &rows).unwrap();
    writer.write(&key("b"), &rows).unwrap();
    writer.finish().unwrap();
    let requests = 0..rows.num_rows() as i64;
    (dataset, requests.clone().chain(requests).collect())
}

/// Returns the row groups of [`session_rows`], written `batch` rows at a time.
fn written_row_groups(schema: &Schema, rows: &RecordBatch, batch: usize) -> (Snapshot, Vec<Vec<Place>>) {
    let dir = Dir::new();
    let mut writer = DatasetWriter::create(dir.root(), schema.clone(), small_limits()).unwrap();
    for start in (0..rows.num_rows()).step_by(batch) {
        let rows = rows.slice(start, batch.min(rows.num_rows() - start));
        writer.write(&PartitionKey::default(), &rows).unwrap();
    }
    writer.finish().unwrap();
    let snapshot = Snapshot::load(dir.root()).unwrap();
    let files = snapshot.partitions[0].files.clone();
    (snapshot, files.iter().flat_map(|file| row_groups(dir.root(), file)).collect())
}

#[test]
fn row_groups_start_at_session_boundaries() {
    let (schema, rows) = session_rows(&session_sizes());
    let mut layouts = Vec::new();
    for batch in [1, 7, 20, rows.num_rows()] {
        let (snapshot, groups) = written_row_groups(&schema, &rows, batch);
        assert!(snapshot.partitions[0].files.len() > 3, "{:?}", snapshot.partitions);
        assert_eq!(snapshot.partitions[0].sessions, 80);
        let requests = groups.iter().flatten().map(|place| place.request);
        assert!(
            requests.eq(0..rows.num_rows() as i64),
            "batches of {batch}: samples are lost or out of order"
        );
        for (i, pair) in groups.windows(2).enumerate() {
            let place = format!("batches of {batch}, row group {i}");
            let (last, next) = (pair[0].last().unwrap().session, pair[1][0].session);
            assert!(last != next || last == 40, "{place} ends within session {last}");
            let samples = GROUP_SAMPLES..=2 * GROUP_SAMPLES;
            assert!(samples.contains(&pair[0].len()), "{place} has {} samples", pair[0].len());
        }
        layouts.push(groups.iter().map(Vec::len).collect::<Vec<_>>());
    }
    assert!(
        layouts.windows(2).all(|pair| pair[0] == pair[1]),
        "the layout depends on how it is written: {layouts:?}"
    );
}

#[test]
fn arrival_order_fills_row_groups_evenly() {
    let dir = Dir::new();
    let (schema, rows) = session_rows(&session_sizes());
    let options = WriterOptions { order: Order::Arrival, ..small_limits() };
    let mut writer = DatasetWriter::create(dir.root(), schema, options).unwrap();
    writer.write(&PartitionKey::default(), &rows).unwrap();
    writer.finish().unwrap();
    let snapshot = Snapshot::load(dir.root()).unwrap();
    let files = &snapshot.partitions[0].files;
    let groups: Vec<_> = files.iter().flat_map(|file| row_groups(dir.root(), file)).collect();
    let (_, full) = groups.split_last().unwrap();
    assert!(full.iter().all(|group| group.len() == GROUP_SAMPLES), "{groups:?}");
    let (_, full) = files.split_last().unwrap();
    assert!(
        full.iter().all(|file| file.row_groups.len() == 5 && file.samples == 5 * GROUP_SAMPLES as u64),
        "{files:?}"
    );
}
