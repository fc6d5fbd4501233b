//! Labels whose events arrive late, from the log to training: the labels of an earlier time are those of the events
//! that there were by then.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, RecordBatch, TimestampMicrosecondArray};
use onefold_ikjt::{Reader, ReaderOptions, Workers};
use onefold_tests::Dir;
use parquet::arrow::ArrowWriter;

use crate::ranks::losses;

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const HOUR: i64 = 3_600_000_000;
/// The number of requests, one in each hour.
const REQUESTS: i64 = 72;

const DATASET: &str = r#"format_version = 1
keep = ["request"]
[sources]
log = "log.parquet"
events = "events.parquet"
[samples]
source = "log"
key = ["request"]
[join]
source = "events"
on = { request = "of" }
time = "at"
window = "10d"
[join.labels]
clicked = { when = "kind = 1", delay = true }
[session]
user = "user"
gap = "30m"
time = "time"
[partition]
by = "day"
[features]
clicked = { kind = "label" }
clicked_delay = { kind = "label" }
age = { kind = "dense" }
item = { kind = "sparse" }
user = { kind = "sparse" }
"#;

const TRAIN: &str = r#"format_version = 1
[data]
label = "clicked"
train = "date<=2024-05-02"
[train]
batch_size = 8
[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[embedding]
rows = 50
ids = "hashed"
"#;

/// An event: the request to which it belongs, the time in hours after the start, and whether it is a click.
type Event = (i64, i64, bool);

fn random(number: i64, of: i64) -> i64 {
    ((number + 11).wrapping_mul(0x5851_f42d_4c95_7f2d) >> 33).rem_euclid(of)
}

/// Returns up to two events of each request, at most 50 hours after it.
fn events() -> Vec<Event> {
    let of_request = |number: i64| (number / 2, number / 2 + random(number, 50), random(number + 500, 3) > 0);
    (0..2 * REQUESTS).filter(|number| random(number + 900, 4) > 0).map(of_request).collect()
}

fn write(dir: &Dir, name: &str, columns: Vec<(&str, ArrayRef)>) {
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    dir.write(name, writer.into_inner().unwrap());
}

fn numbers(values: impl Iterator<Item = i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(values))
}

fn times(hours: impl Iterator<Item = i64>) -> ArrayRef {
    Arc::new(TimestampMicrosecondArray::from_iter_values(hours.map(|hour| DAY + hour * HOUR)))
}

fn write_log(dir: &Dir) {
    let ages = (0..REQUESTS).map(|request| random(request + 300, 60) as f32);
    write(
        dir,
        "log.parquet",
        vec![
            ("request", numbers(0..REQUESTS)),
            ("user", numbers((0..REQUESTS).map(|request| request % 5))),
            ("item", numbers((0..REQUESTS).map(|request| random(request, 20)))),
            ("age", Arc::new(Float32Array::from_iter_values(ages))),
            ("time", times(0..REQUESTS)),
        ],
    );
}

/// Writes the events up to an hour.
fn write_events(dir: &Dir, until: i64) {
    let events: Vec<Event> = events().into_iter().filter(|(_, at, _)| *at <= until).collect();
    write(
        dir,
        "events.parquet",
        vec![
            ("of", numbers(events.iter().map(|(of, ..)| *of))),
            ("at", times(events.iter().map(|(_, at, _)| *at))),
            ("kind", numbers(events.iter().map(|(.., click)| i64::from(*click)))),
        ],
    );
}

/// Returns the label and its delay in seconds of each request, as read as of an hour.
fn labels(dir: &Dir, hour: i64) -> BTreeMap<i64, [f32; 2]> {
    let options = ReaderOptions {
        kept: vec!["request".to_owned()],
        labels_as_of: Some(DAY + hour * HOUR),
        ..ReaderOptions::new(16)
    };
    let reader = Reader::open(&dir.path("dataset"), options, &Workers::new(2, 1 << 30).unwrap()).unwrap();
    assert_eq!(reader.schema().labels, ["clicked", "clicked_delay"]);
    let mut labels = BTreeMap::new();
    for step in reader.batches().unwrap() {
        let batch = step.unwrap().batch;
        for (sample, of_sample) in batch.labels().as_chunks::<2>().0.iter().enumerate() {
            let request = batch.kept()[0].shown(sample).unwrap().parse().unwrap();
            labels.insert(request, *of_sample);
        }
    }
    labels
}

#[test]
fn labels_of_an_earlier_time_are_those_of_the_events_by_then() {
    let dir = Dir::new();
    write_log(&dir);
    dir.write("dataset.toml", DATASET);
    write_events(&dir, 30);
    dir.command("onefold-ingest build dataset.toml --out dataset --threads 2").works();
    for until in [50, 200] {
        write_events(&dir, until);
        dir.command("onefold-ingest relabel dataset.toml --out dataset --threads 2").works();
    }
    dir.command("onefold-ingest compact dataset").works();
    let now = labels(&dir, 200);
    for hour in 0..80 {
        let expected = (0..REQUESTS).map(|request| {
            let clicks =
                events().into_iter().filter(|(of, at, click)| *of == request && *click && *at <= hour);
            let first = clicks.map(|(_, at, _)| at - request).min();
            (request, first.map_or([0.0, -1.0], |hours| [1.0, (hours * 3600) as f32]))
        });
        assert!(labels(&dir, hour).into_iter().eq(expected), "{hour}");
    }
    // Labels change throughout these hours.
    assert!([10, 40, 60].iter().all(|hour| labels(&dir, *hour) != now));

    // Training on the labels of a time is training on a dataset that was built from the events by then.
    write_events(&dir, 48);
    dir.command("onefold-ingest build dataset.toml --out then --threads 2").works();
    let digest =
        |arguments: &str| dir.command(&format!("onefold-read digest {arguments}")).json()["digest"].clone();
    let expected = digest("then");
    assert_eq!(digest("dataset --labels-as-of 2024-05-03T01:00:00+01:00"), expected);
    assert_ne!(digest("dataset"), expected);
    dir.write("now.toml", TRAIN);
    let as_of = "[data]\nlabels_as_of = \"2024-05-03T01:00:00+01:00\"\n";
    dir.write("as-of.toml", TRAIN.replace("[data]\n", as_of).replace("train = \"date<=2024-05-02\"\n", ""));
    let train = |config: &str, dataset: &str, out: &str| {
        let run = format!("onefold-train run {config} --data {dataset} --out {out} --threads 1");
        losses(&dir.command(&run).json())
    };
    let expected = train("now.toml", "then", "first");
    assert_eq!(train("as-of.toml", "dataset", "second"), expected);
    assert_ne!(train("now.toml", "dataset", "third"), expected);

    // The delay of the label must be a label.
    let dataset = dir.text("dataset.toml").replace("clicked_delay = { kind = \"label\" }\n", "");
    dir.write("without.toml", dataset);
    dir.command("onefold-ingest build without.toml --out without --threads 2").works();
    dir.command("onefold-read digest without --labels-as-of 2024-05-03T00:00:00Z")
        .fails(&["has no delays of labels", "`delay = true`"]);
    dir.command("onefold-train run as-of.toml --data without --out other").fails(&[
        "`[data].labels_as_of` is given",
        "the delay of `clicked`",
        "`clicked_delay` as a label",
    ]);
}
