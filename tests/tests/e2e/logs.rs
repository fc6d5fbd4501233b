//! A small hand-made raw log with known results: the samples of the join, and their sessions, partitions and order.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Builder, Int64Array, ListBuilder, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use onefold_tests::Dir;
use parquet::arrow::ArrowWriter;

use crate::samples::Sample;

/// A row of the feature log.
pub(crate) struct Request {
    pub(crate) request: i64,
    pub(crate) user: i64,
    pub(crate) visit: &'static str,
    /// Minutes since 2024-05-01T00:00Z.
    pub(crate) minute: i64,
    pub(crate) age: f64,
    pub(crate) city: Option<i64>,
    pub(crate) history: Option<&'static [i32]>,
}

/// A row of the event log.
pub(crate) struct Event {
    pub(crate) request: i64,
    pub(crate) clicked: bool,
    pub(crate) split: &'static str,
}

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
/// A minute in microseconds.
const MINUTE: i64 = 60_000_000;

/// The feature log, in arrival order except for requests 6 and 5, which have the same time, and request 10, which is
/// logged too early. Request 13 has no event.
pub(crate) const REQUESTS: &[Request] = &[
    request(7, 2, "c", 10 * 60 + 5, Some(20), Some(&[5, 6])),
    request(11, 4, "e", 10 * 60 + 10, Some(10), None),
    request(12, 4, "e", 10 * 60 + 12, Some(10), Some(&[])),
    request(10, 3, "d", 24 * 60 + 10, None, Some(&[8, 9])),
    request(6, 2, "c", 10 * 60 + 35, Some(20), Some(&[5, 6, 7])),
    request(5, 2, "c", 10 * 60 + 35, Some(20), Some(&[5, 6, 7])),
    request(1, 1, "a", 10 * 60 + 50, Some(10), Some(&[1, 2, 3])),
    request(13, 5, "f", 10 * 60 + 55, Some(30), Some(&[4])),
    request(2, 1, "a", 10 * 60 + 59, Some(10), Some(&[1, 2, 3])),
    request(8, 2, "c", 11 * 60 + 6, Some(21), Some(&[5, 6, 7])),
    request(3, 1, "b", 11 * 60 + 10, Some(10), Some(&[2, 3, 4])),
    request(4, 1, "b", 12 * 60, Some(10), Some(&[2, 3, 4])),
    request(9, 3, "d", 23 * 60 + 50, None, Some(&[8])),
];

/// The event log. Request 99 is not in the feature log.
pub(crate) const EVENTS: &[Event] = &[
    event(1, true, "train"),
    event(2, false, "train"),
    event(3, true, "train"),
    event(4, false, "train"),
    event(5, false, "train"),
    event(6, true, "train"),
    event(7, false, "train"),
    event(8, false, "train"),
    event(9, true, "holdout"),
    event(10, false, "holdout"),
    event(11, false, "train"),
    event(12, true, "holdout"),
    event(99, true, "train"),
];

const fn request(
    request: i64,
    user: i64,
    visit: &'static str,
    minute: i64,
    city: Option<i64>,
    history: Option<&'static [i32]>,
) -> Request {
    Request { request, user, visit, minute, age: 30.0 + user as f64 / 2.0, city, history }
}

const fn event(request: i64, clicked: bool, split: &'static str) -> Event {
    Event { request, clicked, split }
}

/// The configuration of the dataset. With `[session]`, a pause of more than 30 minutes ends a session.
pub(crate) const DATASET_CONFIG: &str = r#"format_version = 1

[sources]
features = "features/*.parquet"
events = "events.parquet"

[samples]
query = """
SELECT f.*, e.clicked, e.split
FROM features f JOIN events e ON f.request = e.request
"""

[session]
user = "user"
gap = "30m"
time = "time"
order = ["request"]

[partition]
columns = ["split"]
by = "hour"

[features]
clicked = { kind = "label" }
age = { kind = "dense" }
user = { kind = "sparse", group = "user" }
city = { kind = "sparse", group = "user" }
history = { kind = "sequence", group = "history" }
request = { kind = "sparse" }
"#;

/// The configuration of a small model.
pub(crate) const TRAIN_CONFIG: &str = r#"format_version = 1

[data]
train = "split=train"
eval = "split=holdout"
label = "clicked"

[train]
batch_size = 4
epochs = 2
seed = 1

[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]
interaction = "dot"
attention_heads = 2

[embedding]
dim = 4
rows = 100
pooling = "sum"
ids = "checked"

[tables.history]
rows = 10
pooling = "attention"

[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.02
eps = 1e-8

[optimizer.dense]
kind = "adagrad"
learning_rate = 0.02
eps = 1e-8
"#;

/// Writes the log and its configuration into `logs`, with the feature log in two files.
pub(crate) fn write_logs(dir: &Dir) {
    let (early, late) = REQUESTS.split_at(5);
    write_table(&dir.path("logs/features/part-0.parquet"), feature_columns(early));
    write_table(&dir.path("logs/features/part-1.parquet"), feature_columns(late));
    write_table(&dir.path("logs/events.parquet"), event_columns(EVENTS));
    dir.write("logs/dataset.toml", DATASET_CONFIG);
    dir.write("logs/train.toml", TRAIN_CONFIG);
}

/// Returns the columns of the feature log.
pub(crate) fn feature_columns(rows: &[Request]) -> Vec<(&'static str, ArrayRef)> {
    let mut history = ListBuilder::new(Int32Builder::new());
    for row in rows {
        history.values().append_slice(row.history.unwrap_or_default());
        history.append(row.history.is_some());
    }
    let times = rows.iter().map(|row| DAY + row.minute * MINUTE);
    vec![
        ("request", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.request)))),
        ("user", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.user)))),
        ("visit", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| row.visit)))),
        ("time", Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
        ("age", Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.age)))),
        ("city", Arc::new(Int64Array::from_iter(rows.iter().map(|row| row.city)))),
        ("history", Arc::new(history.finish())),
    ]
}

/// Returns the columns of the event log.
pub(crate) fn event_columns(rows: &[Event]) -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("request", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.request)))),
        ("clicked", Arc::new(BooleanArray::from_iter(rows.iter().map(|row| Some(row.clicked))))),
        ("split", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| row.split)))),
    ]
}

/// Returns `columns` with the column `name` replaced.
pub(crate) fn with_column(
    mut columns: Vec<(&'static str, ArrayRef)>,
    name: &str,
    values: ArrayRef,
) -> Vec<(&'static str, ArrayRef)> {
    let place = columns.iter().position(|(column, _)| *column == name).unwrap();
    columns[place].1 = values;
    columns
}

/// Writes a Parquet file, and creates its parent directories.
pub(crate) fn write_table(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let rows = RecordBatch::try_from_iter_with_nullable(
        columns.into_iter().map(|(name, values)| (name, values, true)),
    );
    let rows = rows.unwrap();
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    let mut writer = ArrowWriter::try_new(fs_err::File::create(path).unwrap(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
}

/// Returns the samples of the query, computed by a naive join.
pub(crate) fn expected_samples() -> Vec<Sample> {
    let joined = EVENTS.iter().flat_map(|event| {
        let requests = REQUESTS.iter().filter(|request| request.request == event.request);
        requests.map(move |request| expected_sample(request, event))
    });
    joined.collect()
}

fn expected_sample(request: &Request, event: &Event) -> Sample {
    let history = request.history.unwrap_or_default();
    Sample {
        labels: vec![if event.clicked { 1.0 } else { 0.0 }],
        dense: vec![request.age as f32],
        sparse: vec![
            ("user".to_owned(), vec![request.user]),
            ("city".to_owned(), request.city.into_iter().collect()),
            ("history".to_owned(), history.iter().map(|id| i64::from(*id)).collect()),
            ("request".to_owned(), vec![request.request]),
        ],
    }
}
