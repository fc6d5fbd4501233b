//! The whole path: raw logs → dataset → batches → model → figures.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use arrow::array::{ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{Float32Type, Int64Type, TimestampMicrosecondType};
use onefold_datasets::{FileSet, Order, Schema, Snapshot, bucket_of_session, session_id};
use onefold_tests::Dir;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::logs::{expected_samples, write_logs};
use crate::samples::{Place, Sample, assert_only_named_files, partitions, places, read_samples, sorted};

/// The expected contents of a dataset: the key, the number of sessions and the requests, in order, of each partition.
type Expected<'a> = [(&'a str, u64, &'a [i64])];

/// Checks a dataset of the hand-made log: its partitions, their order and counts, and the values of all samples.
#[track_caller]
fn check_hand_made(dataset: &Path, expected: &Expected) {
    let snapshot = Snapshot::load(dataset).unwrap();
    let found = snapshot.partitions.iter().map(|p| (p.key.to_string(), p.sessions, p.samples));
    let wanted = expected
        .iter()
        .map(|(key, sessions, requests)| ((*key).to_owned(), *sessions, requests.len() as u64));
    assert_eq!(found.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
    let requests = |places: &[Place]| places.iter().map(|place| place.request).collect::<Vec<_>>();
    let found: Vec<_> = places(dataset).iter().map(|(key, places)| (key.clone(), requests(places))).collect();
    let wanted: Vec<_> =
        expected.iter().map(|(key, _, requests)| ((*key).to_owned(), requests.to_vec())).collect();
    assert_eq!(found, wanted);
    assert_eq!(sorted(read_samples(dataset)), sorted(expected_samples()));
}

/// The expected partitions with a gap and hours. Request 3 at 11:10 stays with its session of 10:50, and request 10
/// of the next day with its session of 23:50. A pause of 30 minutes (7 to 5) does not end a session, but one of 31
/// minutes (6 to 8) does. Users 1, 3, 4 and 2 are in buckets 25, 28, 56 and 62 of 64.
const BY_GAP_AND_HOUR: &Expected = &[
    ("split=holdout/date=2024-05-01/hour=10", 1, &[12]),
    ("split=holdout/date=2024-05-01/hour=23", 1, &[9, 10]),
    ("split=train/date=2024-05-01/hour=10", 3, &[1, 2, 3, 11, 7, 5, 6]),
    ("split=train/date=2024-05-01/hour=11", 1, &[8]),
    ("split=train/date=2024-05-01/hour=12", 1, &[4]),
];

#[test]
fn a_gap_makes_sessions_and_their_start_the_partition() {
    let dir = Dir::new();
    write_logs(&dir);
    let summary = dir.command("onefold-ingest build logs/dataset.toml --out dataset").json();
    check_hand_made(&dir.path("dataset"), BY_GAP_AND_HOUR);
    let counts =
        ["samples", "sessions", "partitions", "files", "source_rows"].map(|key| summary[key].as_u64());
    assert_eq!(counts, [12, 7, 5, 5, 26].map(Some));
    assert_eq!(summary["samples_per_session"].as_f64(), Some(12.0 / 7.0));
    assert_eq!(summary["order"], "session");
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let statistics = &snapshot.statistics;
    assert_eq!((statistics.samples, statistics.sessions), (12, 7));
    let history = statistics.features["history"];
    let values: usize = expected_samples().iter().map(|sample| sample.sparse[2].1.len()).sum();
    assert_eq!((history.values, history.max_length), (values as u64, 3));
    assert_eq!((history.min_id, history.max_id), (Some(1), Some(9)));
    assert_eq!(summary["bytes_on_disk"].as_u64(), Some(statistics.bytes_on_disk));
    let sets = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    for file in sets.flat_map(|set| &set.files) {
        assert_eq!(dir.read(Path::new("dataset").join(&file.path)).len() as u64, file.bytes_on_disk);
    }
}

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;

/// Returns the id of the session of a user that begins `minute` minutes after [`DAY`] in the partition `split`, as
/// defined in `datasets/src/identity.rs`.
fn id_of(split: &str, user: i64, minute: i64) -> i64 {
    let start = DAY + minute * 60_000_000;
    session_id(&user.to_string(), &format!("{split}\u{1f}{user}\u{1f}{start}"))
}

#[test]
fn sessions_are_identified_and_timed_by_their_samples() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let places = places(&dir.path("dataset"));
    let ids = |place: usize| places[place].1.iter().map(|place| place.session).collect::<Vec<_>>();
    let (first, second, third) = (id_of("train", 2, 605), id_of("train", 4, 610), id_of("train", 1, 650));
    assert_eq!(ids(2), [third, third, third, second, first, first, first]);
    // One user is in two partitions.
    assert_eq!(ids(0), [id_of("holdout", 4, 612)]);
    assert_eq!(ids(1), [id_of("holdout", 3, 1430); 2]);
    let minutes: Vec<_> = places[2].1.iter().map(|place| (place.time - DAY) / 60_000_000).collect();
    assert_eq!(minutes, [650, 659, 670, 610, 605, 635, 635]);
    check_session_order(&places, Order::Session);
}

#[test]
fn sessions_have_the_same_ids_in_every_order() {
    let dir = Dir::new();
    write_logs(&dir);
    let build = |order: &str| {
        let line = format!("onefold-ingest build logs/dataset.toml --out {order} --order {order}");
        dir.command(&line).works();
        assert_eq!(sorted(read_samples(&dir.path(order))), sorted(expected_samples()));
        places(&dir.path(order))
    };
    let (by_start, by_hash, arrival) = (build("session"), build("session-hash"), build("arrival"));
    check_session_order(&by_hash, Order::SessionHash);
    let sorted = |places: &[(String, Vec<Place>)]| {
        let mut all: Vec<(String, Place)> = Vec::new();
        places.iter().for_each(|(key, of)| all.extend(of.iter().map(|place| (key.clone(), *place))));
        all.sort();
        all
    };
    assert_eq!(sorted(&by_hash), sorted(&by_start));
    assert_eq!(sorted(&arrival), sorted(&by_start));
}

#[test]
fn a_key_makes_sessions_however_long_the_pause() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.edit("logs/dataset.toml", "user = \"user\"\ngap = \"30m\"", "key = [\"visit\"]");
    dir.edit("logs/dataset.toml", "by = \"hour\"", "by = \"day\"");
    let summary = dir.command("onefold-ingest build logs/dataset.toml --out dataset").json();
    assert_eq!((summary["samples"].as_u64(), summary["sessions"].as_u64()), (Some(12), Some(6)));
    // Visits d, b and c are in buckets 17, 21 and 35, and visits e and a in bucket 57.
    check_hand_made(
        &dir.path("dataset"),
        &[
            ("split=holdout/date=2024-05-01", 2, &[9, 10, 12]),
            ("split=train/date=2024-05-01", 4, &[3, 4, 7, 5, 6, 8, 11, 1, 2]),
        ],
    );
}

#[test]
fn without_partitions_a_dataset_is_one_file() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.edit("logs/dataset.toml", "[partition]\ncolumns = [\"split\"]\nby = \"hour\"\n", "");
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    // Requests 11 and 12 are now in one session.
    check_hand_made(&dir.path("dataset"), &[("", 6, &[1, 2, 3, 4, 9, 10, 11, 12, 7, 5, 6, 8])]);
    let files: Vec<_> = partitions(&dir.path("dataset")).into_iter().flat_map(|p| p.files).collect();
    assert_eq!(files.iter().map(FileSet::path).collect::<Vec<_>>(), ["data/part-00000-*.parquet"]);
    assert_only_named_files(&dir.path("dataset"));
}

#[test]
fn arrival_order_has_the_same_samples_and_sessions() {
    let dir = Dir::new();
    write_logs(&dir);
    let summary = dir.command("onefold-ingest build logs/dataset.toml --out dataset --order arrival").json();
    assert_eq!((summary["sessions"].as_u64(), summary["order"].as_str()), (Some(7), Some("arrival")));
    let mut expected = BY_GAP_AND_HOUR.to_vec();
    expected[2].2 = &[7, 11, 5, 6, 1, 2, 3];
    check_hand_made(&dir.path("dataset"), &expected);
    let sessions: Vec<_> = places(&dir.path("dataset"))[2].1.iter().map(|place| place.session).collect();
    let (first, second, third) = (id_of("train", 2, 605), id_of("train", 4, 610), id_of("train", 1, 650));
    assert_eq!(sessions, [first, second, first, first, third, third, third]);
}

#[test]
fn the_hand_made_log_trains_and_evaluates() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let run = dir.command("onefold-train run logs/train.toml --data dataset --out run").json();
    // Nine training samples in batches of 4, in two epochs.
    assert_eq!((run["samples"].as_u64(), run["steps"].as_u64()), (Some(18), Some(6)));
    assert_eq!(run["losses"].as_array().map(Vec::len), Some(6));
    assert_eq!(run["eval"]["samples"], 3);
    assert_eq!(run["eval"]["base_rate"].as_f64(), Some(2.0 / 3.0));
    for partitions in ["", " --partitions split=holdout"] {
        let eval = dir.command(&format!("onefold-train eval run --data dataset{partitions}")).json();
        assert_eq!(eval["loss"], run["eval"]["loss"], "what is stored is not what was trained");
    }
    let hour = dir.command("onefold-train eval run --data dataset --partitions split=train,hour>=11").json();
    assert_eq!((hour["samples"].as_u64(), hour["base_rate"].as_f64()), (Some(2), Some(0.0)));
    let off = dir.command("onefold-train eval run --data dataset --dedupe off").json();
    let difference = off["loss"].as_f64().unwrap() - run["eval"]["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5, "{difference}");
}

#[test]
fn a_generated_log_survives_the_path() {
    let dir = Dir::new();
    let log = dir.command("onefold-data generate --workload rm3 --samples 20000 --seed 5 --out logs").json();
    dir.edit(
        "logs/dataset.toml",
        "label = { kind = \"label\" }",
        "label = { kind = \"label\" }\nrequest = { kind = \"sparse\" }",
    );
    dir.edit("logs/dataset.toml", "SELECT f.*,", "SELECT f.*, f.request_id AS request,");
    let summary = dir.command("onefold-ingest build logs/dataset.toml --out dataset").json();
    assert_eq!(summary["samples"], 20_000);
    assert_eq!(summary["sessions"], log["sessions"]);
    // 20,000 requests at intervals of 2 ms from midnight remain within an hour.
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let keys: Vec<_> = snapshot.partitions.iter().map(|partition| partition.key.to_string()).collect();
    assert_eq!(keys, ["date=2026-01-01/hour=00"]);
    check_session_order(&places(&dir.path("dataset")), Order::Session);
    let joined = naive_join(&dir.path("logs"), &snapshot.schema);
    assert_eq!(joined.len(), 20_000);
    let expected = sorted(joined);
    assert!(sorted(read_samples(&dir.path("dataset"))) == expected, "the samples differ");

    dir.command("onefold-ingest build logs/dataset.toml --out arrival --order arrival").works();
    let arrived = read_samples(&dir.path("arrival"));
    let place = arrived[0].sparse.iter().position(|(name, _)| name == "request").unwrap();
    let requests = arrived.iter().map(|sample| sample.sparse[place].1[0]);
    assert!(requests.eq(0..20_000), "arrival order is the order of the requests");
    assert!(sorted(arrived) == expected, "the samples differ in arrival order");
}

#[test]
fn a_folded_dataset_holds_the_samples_of_a_plain_one() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm1 --samples 2000 --seed 8 --out logs").works();
    let build = |layout: &str| {
        dir.command(&format!("onefold-ingest build logs/dataset.toml --out {layout} --layout {layout}"))
            .json()
    };
    let (rows, folded) = (build("rows"), build("folded"));
    assert_eq!(rows["layout"], "rows");
    assert_eq!(folded["layout"], "folded");
    assert!(folded["bytes_on_disk"].as_u64() < rows["bytes_on_disk"].as_u64(), "{folded}, {rows}");
    let samples = |name: &str| read_samples(&dir.path(name));
    assert!(samples("folded") == samples("rows"), "the samples differ in the folded layout");
}

#[test]
fn a_generated_log_is_cut_at_its_pauses() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm3 --samples 20000 --seed 6 --out logs").works();
    let gap_micros = 300_000;
    dir.edit("logs/dataset.toml", "key = [\"session_id\"]", "user = \"user_id\"\ngap = \"300ms\"");
    let summary = dir.command("onefold-ingest build logs/dataset.toml --out dataset").json();
    let mut times: HashMap<i64, Vec<i64>> = HashMap::new();
    for rows in tables(&dir.path("logs/features")) {
        let users = rows.column_by_name("user_id").unwrap().as_primitive::<Int64Type>();
        let stamps = rows.column_by_name("timestamp").unwrap().as_primitive::<TimestampMicrosecondType>();
        users
            .values()
            .iter()
            .zip(stamps.values())
            .for_each(|(user, time)| times.entry(*user).or_default().push(*time));
    }
    let pauses = |times: &Vec<i64>| times.windows(2).filter(|pair| pair[1] - pair[0] > gap_micros).count();
    let sessions = times.len() + times.values().map(pauses).sum::<usize>();
    assert!(sessions > times.len() + 100, "the log has too few pauses to test with");
    assert_eq!(summary["sessions"].as_u64(), Some(sessions as u64));
}

#[test]
fn a_model_learns_from_one_log_what_holds_in_another() {
    let dir = Dir::new();
    for (seed, name) in [(1, "train"), (2, "test")] {
        let logs =
            format!("onefold-data generate --workload rm3 --samples 20000 --seed {seed} --out logs-{name}");
        dir.command(&logs).works();
        dir.command(&format!("onefold-ingest build logs-{name}/dataset.toml --out {name}")).works();
    }
    let light = [("batch_size", "128"), ("bottom_mlp", "[32, 8]"), ("top_mlp", "[32, 1]"), ("dim", "8")];
    for (key, value) in light {
        dir.set("logs-train/train.toml", key, value);
    }
    let run = dir.command("onefold-train run logs-train/train.toml --data train --out run").json();
    assert_eq!(run["steps"].as_u64(), Some(20_000_u64.div_ceil(128)));
    let eval = dir.command("onefold-train eval run --data test").json();
    let (auc, ne) = (eval["auc"].as_f64().unwrap(), eval["ne"].as_f64().unwrap());
    assert_eq!(eval["samples"], 20_000);
    assert!(auc > 0.65 && ne < 1.0, "AUC {auc}, NE {ne}");
}

/// Checks that the samples of a session are contiguous and in time order, that sessions are in the order `order`, and
/// that no two sessions have the same id.
#[track_caller]
fn check_session_order(partitions: &[(String, Vec<Place>)], order: Order) {
    let mut seen = HashSet::new();
    for (key, places) in partitions {
        let mut last = None;
        for session in places.chunk_by(|a, b| a.session == b.session) {
            let Place { session: id, time: start, .. } = session[0];
            assert!(seen.insert(id) && id >= 0, "{key}: session {id} comes back");
            assert!(session.is_sorted_by_key(|place| place.time), "{key}: session {id} is not in time order");
            let place = match order {
                Order::Session => (bucket_of_session(id, 64), start, id),
                _ => (0, id, start),
            };
            assert!(last < Some(place), "{key}: session {id} comes too late");
            last = Some(place);
        }
    }
}

/// Returns the rows of a directory of Parquet files.
fn tables(folder: &Path) -> Vec<RecordBatch> {
    let mut paths: Vec<_> = fs_err::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let read = |path| {
        let file = fs_err::File::open(path).unwrap().into_file();
        ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().map(Result::unwrap)
    };
    paths.into_iter().flat_map(read).collect()
}

/// Returns the samples of a generated log, joined by request in memory.
fn naive_join(logs: &Path, schema: &Schema) -> Vec<Sample> {
    let mut labels = BTreeMap::new();
    for rows in tables(&logs.join("events")) {
        let requests = rows.column_by_name("request_id").unwrap().as_primitive::<Int64Type>();
        let values = rows.column_by_name("label").unwrap().as_primitive::<Float32Type>();
        labels.extend(requests.values().iter().copied().zip(values.values().iter().copied()));
    }
    let mut samples = Vec::new();
    for rows in tables(&logs.join("features")) {
        let requests = rows.column_by_name("request_id").unwrap().as_primitive::<Int64Type>();
        let dense: Vec<_> = schema.dense.iter().map(|name| rows.column_by_name(name).unwrap()).collect();
        let lists: Vec<_> = schema
            .sparse_features()
            .map(|feature| (&feature.name, rows.column_by_name(&feature.name)))
            .collect();
        for row in 0..rows.num_rows() {
            let request = requests.value(row);
            let ids = |column: Option<&ArrayRef>| match column {
                Some(column) => {
                    column.as_list::<i32>().value(row).as_primitive::<Int64Type>().values().to_vec()
                }
                None => vec![request],
            };
            samples.push(Sample {
                labels: vec![labels[&request]],
                dense: dense.iter().map(|column| column.as_primitive::<Float32Type>().value(row)).collect(),
                sparse: lists.iter().map(|(name, column)| ((*name).clone(), ids(*column))).collect(),
            });
        }
    }
    samples
}
