//! Splits logs into segments, and builds datasets from them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, StringArray, TimestampMicrosecondArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use bytes::Bytes;
use onefold_tests::S3Server;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::logs::{Dir, ROWS, SELECT, columns, expected, json_lines, parquet, rows};

/// Writes the log into two files in the folder `log`.
fn two_files() -> Dir {
    let dir = Dir::new();
    for (part, rows) in rows().chunks(25).enumerate() {
        dir.write(format!("log/part-{part}.parquet"), parquet(columns(rows)));
    }
    dir
}

/// Returns the command `onefold-ingest shard log --by COLUMN --segments 3 --out segments --json`.
fn program(dir: &Dir, by: &str) -> Command {
    shard(dir, by, 3, "segments")
}

/// Returns the command `onefold-ingest shard log` with these options.
fn shard(dir: &Dir, by: &str, segments: u32, out: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    command.args(["shard", "log", "--by", by, "--segments", &segments.to_string(), "--out", out, "--json"]);
    command.current_dir(dir.path("")).env_remove("ONEFOLD_LOG").env("RUST_BACKTRACE", "0");
    command
}

#[test]
fn a_dataset_made_of_segments_is_the_one_made_of_the_log() {
    let dir = two_files();
    let (summary, files): (Value, _) = dir.works(program(&dir, "user"), "segments");
    assert_eq!((&summary["rows"], &summary["segments"], files.len()), (&ROWS.into(), &3.into(), 3));
    assert_eq!((&summary["log_files"], &summary["null_key_rows"]), (&2.into(), &0.into()));
    let bytes: usize = files.values().map(Vec::len).sum();
    assert_eq!(summary["bytes_on_disk"], bytes);
    dir.configure("[sources]\nlog = \"segments\"", SELECT);
    assert!(dir.build("dataset").1 == expected(), "the samples are others");
}

/// Returns a log of 2,000 requests of 90 users in arrival order. `user`, `name` and `device` can be keys.
fn log_of_users() -> Vec<(&'static str, ArrayRef)> {
    let requests = 0..2_000_i64;
    let user = |request: i64| request * 7919 % 90 - 30;
    let of_users = |name: fn(i64) -> String| -> ArrayRef {
        Arc::new(StringArray::from_iter_values((0..2_000).map(|request| name(user(request)))))
    };
    vec![
        ("request", Arc::new(Int64Array::from_iter_values(requests.clone()))),
        ("user", Arc::new(Int64Array::from_iter_values(requests.clone().map(user)))),
        ("name", of_users(|user| format!("Zoë {user}"))),
        ("device", of_users(|user| format!("device {}", user % 7))),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from_iter_values(
                requests.map(|i| 1_714_521_600_000_000 + i * 60_000_000),
            )),
        ),
    ]
}

/// Returns the values of the column `request`, single integers or lists, of a Parquet file.
fn requests(bytes: Vec<u8>) -> BTreeSet<i64> {
    let batches = ParquetRecordBatchReaderBuilder::try_new(Bytes::from(bytes)).unwrap().build().unwrap();
    let batches: Vec<_> = batches.map(Result::unwrap).collect();
    let columns = batches.iter().map(|batch| batch.column_by_name("request").unwrap());
    let values = columns.map(|column| column.as_list_opt::<i32>().map_or(column, |lists| lists.values()));
    values.flat_map(|values| values.as_primitive::<Int64Type>().values().to_vec()).collect()
}

#[test]
fn a_segment_holds_the_sessions_of_a_range_of_buckets() {
    let dir = Dir::new();
    dir.write("log/part-0.parquet", parquet(log_of_users()));
    for (case, (by, session)) in [
        ("user", "user = \"user\"\ngap = \"30m\""),
        ("name", "user = \"name\"\ngap = \"30m\""),
        ("name,device,user", "key = [\"name\", \"device\", \"user\"]"),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("segments-{case}");
        let (_, files) = dir.works(shard(&dir, by, 5, &out), &out);
        let segments: BTreeMap<String, BTreeSet<i64>> = files
            .into_iter()
            .map(|(name, bytes)| {
                (name.to_string_lossy()["segment-00".len()..][..3].to_owned(), requests(bytes))
            })
            .collect();

        dir.write(
            "dataset.toml",
            format!(
                "format_version = 1\n[sources]\nlog = \"log\"\n[samples]\nquery = \"SELECT *, 1 AS clicked FROM log\"\n\
                 [session]\n{session}\ntime = \"time\"\n[features]\nclicked = {{ kind = \"label\" }}\n\
                 request = {{ kind = \"sparse\" }}\n"
            ),
        );
        let out = format!("dataset-{case}");
        let mut build = dir.program(&out);
        build.args(["--buckets", "5", "--layout", "rows"]);
        let (_, files) = dir.works(build, &out);
        let mut buckets: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
        for (path, bytes) in files {
            let path = path.to_string_lossy().into_owned();
            let bucket: u32 = path.split_once("bucket=").unwrap().1[..3].parse().unwrap();
            // A range has 13 buckets.
            let range = format!("{:03}", bucket / 13);
            buckets.entry(range).or_default().extend(requests(bytes));
        }
        assert_eq!(buckets.values().map(BTreeSet::len).sum::<usize>(), 2_000);
        assert!(buckets.len() == 5 && segments == buckets, "{by}: {segments:?} instead of {buckets:?}");
    }
}

/// Returns the rows of all segments as `user`, `date` and `zone`, sorted.
fn rows_with_folders(files: BTreeMap<PathBuf, Vec<u8>>) -> Vec<(i64, Option<String>, String)> {
    let mut rows = Vec::new();
    for bytes in files.into_values() {
        let batches = ParquetRecordBatchReaderBuilder::try_new(Bytes::from(bytes)).unwrap().build().unwrap();
        for batch in batches.map(Result::unwrap) {
            let text = |name: &str| {
                cast(batch.column_by_name(name).unwrap(), &DataType::Utf8).unwrap().as_string::<i32>().clone()
            };
            let (dates, zones) = (text("date"), text("zone"));
            let users = batch.column_by_name("user").unwrap().as_primitive::<Int64Type>();
            rows.extend(users.values().iter().enumerate().map(|(row, user)| {
                (*user, dates.is_valid(row).then(|| dates.value(row).to_owned()), zones.value(row).to_owned())
            }));
        }
    }
    rows.sort();
    rows
}

#[test]
fn folders_become_columns_of_the_segments() {
    let dir = Dir::new();
    let users = |users: std::ops::Range<i64>| -> (&'static str, ArrayRef) {
        ("user", Arc::new(Int64Array::from_iter_values(users)))
    };
    let zones = |zone: &str, count| -> (&'static str, ArrayRef) {
        ("zone", Arc::new(StringArray::from_iter_values(std::iter::repeat_n(zone, count))))
    };
    // The files have a column `zone`, so the folder with that name does not become a column.
    dir.write("log/zone=x/date=2024-06-01/a.parquet", parquet(vec![users(0..30), zones("a b", 30)]));
    dir.write("log/zone=x/date=2024%2F06/b.parquet", parquet(vec![users(30..50), zones("c", 20)]));
    let nulls = "log/zone=x/date=__HIVE_DEFAULT_PARTITION__/c.parquet";
    dir.write(nulls, parquet(vec![users(50..60), zones("d", 10)]));
    let (summary, files): (Value, _) = dir.works(shard(&dir, "user,date", 3, "segments"), "segments");
    assert_eq!((&summary["rows"], &summary["null_key_rows"]), (&60.into(), &10.into()));
    let expected = (0..60).map(|user| match user {
        0..30 => (user, Some("2024-06-01".to_owned()), "a b".to_owned()),
        30..50 => (user, Some("2024/06".to_owned()), "c".to_owned()),
        _ => (user, None, "d".to_owned()),
    });
    assert_eq!(rows_with_folders(files), expected.collect::<Vec<_>>());

    dir.write("log/late.parquet", parquet(vec![users(60..61), zones("e", 1)]));
    dir.fails_as(
        shard(&dir, "user", 3, "others"),
        &[
            "its folders make other columns (`zone=`, `date=`) than those of `log/late.parquet` (none)",
            "give all files folders",
        ],
    );
}

#[test]
fn a_failed_shard_leaves_nothing() {
    let dir = two_files();
    dir.fails_as(
        program(&dir, "users"),
        &["log/part-0.parquet", "no column `users`", "did you mean `user`?"],
    );
    dir.fails_as(program(&dir, "age"), &["the column `age` is Float64", "a key is an integer or a text"]);
    dir.write("log/part-2.parquet", "half");
    dir.fails_as(program(&dir, "user"), &["log/part-2.parquet", "not a whole Parquet file"]);
    let entries = fs_err::read_dir(dir.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(entries.collect::<Vec<_>>(), ["log"]);
    fs_err::remove_file(dir.path("log/part-2.parquet")).unwrap();
    dir.write("segments/thesis.txt", "years of work");
    dir.fails_as(program(&dir, "user"), &["segments` already exists", "it holds no `_segments.json`"]);
    assert_eq!(fs_err::read(dir.path("segments/thesis.txt")).unwrap(), b"years of work");
}

/// Segments of a log of texts and of objects in a store, in a folder of a store, give the same dataset.
#[test]
fn logs_and_segments_may_be_in_a_store_and_of_any_format() {
    let dir = Dir::new();
    let server = S3Server::start();
    for (part, rows) in rows().chunks(25).enumerate() {
        server.put("logs", &format!("log/part-{part}.parquet"), parquet(columns(rows)));
        dir.write(format!("log/part-{part}.json"), json_lines(rows));
    }
    let shard = |log: &str, out: &str, options: &[&str]| {
        let mut command =
            dir.command(&["shard", log, "--by", "user", "--segments", "3", "--out", out, "--json"]);
        command.args(options).envs(server.environment());
        command
    };
    let run = |mut command: Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    run(shard("s3://logs/log", "s3://logs/segments", &[]));
    dir.fails_as(shard("s3://logs/log", "s3://logs/segments", &[]), &["s3://logs/segments", "--overwrite"]);
    run(shard("s3://logs/log", "s3://logs/segments", &["--overwrite"]));
    dir.fails_as(shard("s3://logs/log", "s3://logs/log", &["--overwrite"]), &["holds no `_segments.json`"]);
    // A failure leaves nothing in the store.
    dir.fails_as(shard("s3://logs/log", "s3://logs/others", &["--by", "nobody"]), &["no column `nobody`"]);
    assert!(!server.file("logs", "others").exists());
    let list: Value =
        serde_json::from_slice(&fs_err::read(server.file("logs", "segments/_segments.json")).unwrap())
            .unwrap();
    assert_eq!((&list["rows"], list["segments"].as_array().unwrap().len()), (&ROWS.into(), 3));

    let store = format!("endpoint = \"{}\"\nallow_http = true\nregion = \"us-east-1\"", server.url());
    dir.configure(&format!("[sources]\nlog = \"s3://logs/segments\"\n[object_stores.s3]\n{store}"), SELECT);
    let mut build = dir.program("dataset");
    build.envs(server.environment());
    assert!(dir.works(build, "dataset").1 == expected(), "the samples are others");

    run(shard("log/*.json", "segments", &[]));
    let segments = (0..3).map(|number| format!("segments/segment-{number:05}-of-00003.parquet"));
    let read: BTreeSet<i64> =
        segments.flat_map(|name| requests(fs_err::read(dir.path(name)).unwrap())).collect();
    assert_eq!(read, (0..ROWS).collect::<BTreeSet<_>>());
}
