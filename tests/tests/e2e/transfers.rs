//! How files get into a store, short ones in one request and long ones in parts, what becomes of either when it fails,
//! and how often a reader transfers them.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use onefold_datasets::Snapshot;
use onefold_datasets::digest::scramble;
use onefold_tests::{BUCKET, Counters, Dir, Fault, S3Server, TestCommand, When};
use serde_json::{Value, json};

use crate::logs::write_table;
use crate::row_groups::SESSION_CONFIG;
use crate::samples::assert_only_named_files;

/// Samples whose file is longer than two parts of 8 MiB: nothing compresses their ids.
const LONG: i64 = 2_400_000;
const SHORT: i64 = 100;

/// Writes a log of one partition, `NAME`, and the configuration `NAME.toml` of its dataset.
fn write_log(dir: &Dir, name: &str, samples: i64) {
    let numbers = |of: &dyn Fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..samples).map(of)))
    };
    let times = TimestampMicrosecondArray::from_iter_values((0..samples).map(|i| 1_714_521_600_000_000 + i));
    let columns = vec![
        ("session", numbers(&|i| i / 100)),
        ("time", Arc::new(times) as ArrayRef),
        ("label", numbers(&|i| i % 2)),
        ("request", numbers(&scattered)),
        ("part", Arc::new(StringArray::from(vec![name; samples as usize])) as ArrayRef),
    ];
    write_table(&dir.path(format!("{name}.parquet")), columns);
    dir.write(format!("{name}.toml"), SESSION_CONFIG.replace("log.parquet", &format!("{name}.parquet")));
}

/// A number that says nothing of those beside it (SplitMix64, Steele, Lea and Flood 2014).
fn scattered(number: i64) -> i64 {
    scramble((number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) as i64
}

fn ingest(dir: &Dir, server: &S3Server, what: &str) -> TestCommand {
    dir.command(&format!("onefold-ingest {what}")).with_s3(server)
}

#[test]
fn short_files_take_one_request_and_long_ones_parts() {
    let (dir, server) = (Dir::new(), S3Server::start());
    write_log(&dir, "short", SHORT);
    write_log(&dir, "long", LONG);
    let put = |name: &str| -> (Counters, Value) {
        server.reset_counters();
        let built = ingest(&dir, &server, &format!("build {name}.toml --out s3://data/{name}")).json();
        (server.counters(), built)
    };
    let (short, built) = put("short");
    assert_eq!(built["files"], json!(1));
    // The file, the snapshot, and the hint at the newest snapshot.
    assert_eq!((short.puts, short.posts, short.deletes), (3, 0, 0), "{short:?}");
    let (long, built) = put("long");
    assert_eq!(built["files"], json!(1));
    let parts = built["bytes_on_disk"].as_u64().unwrap().div_ceil(8 << 20);
    assert!(parts > 2, "{built}");
    // Parts instead of the file; the upload begins and ends.
    assert_eq!((long.puts, long.posts, long.deletes), (parts + 2, 2, 0), "{long:?}");
    for name in ["short", "long"] {
        ingest(&dir, &server, &format!("verify s3://data/{name}")).works();
        assert_only_named_files(&server.file(BUCKET, name));
    }
}

/// A store executes a request of an upload, and the connection breaks before its answer comes.
#[test]
fn uploads_whose_answers_are_lost_are_done_once() {
    let dir = Dir::new();
    write_log(&dir, "short", SHORT);
    write_log(&dir, "long", LONG);
    let (begin_or_end, part) = ("POST /data/ds/data/", "PUT /data/ds/data/");
    for (log, request, nth, fault) in [
        ("short", part, 1, Fault::LoseAnswer),
        ("short", part, 1, Fault::Reset),
        ("long", begin_or_end, 1, Fault::LoseAnswer),
        ("long", part, 1, Fault::LoseAnswer),
        ("long", part, 3, Fault::Reset),
        ("long", begin_or_end, 2, Fault::LoseAnswer),
        ("long", begin_or_end, 2, Fault::Truncate),
    ] {
        let server = S3Server::start();
        server.inject(request, fault, When::Nth(nth));
        let built = ingest(&dir, &server, &format!("build {log}.toml --out s3://data/ds")).json();
        assert_eq!(built["snapshot"], json!(1), "{log} {request} {fault:?}");
        assert_eq!(server.counters().faults, 1, "{log} {request} {fault:?}");
        assert_only_named_files(&server.file(BUCKET, "ds"));
        ingest(&dir, &server, "verify s3://data/ds").works();
    }
}

/// A store refuses a request of an upload: nothing of the file appears, and what was committed before stays as it was.
#[test]
fn uploads_that_are_refused_leave_nothing() {
    let dir = Dir::new();
    write_log(&dir, "first", SHORT);
    write_log(&dir, "short", SHORT);
    write_log(&dir, "long", LONG);
    let server = S3Server::start();
    ingest(&dir, &server, "build first.toml --out s3://data/ds").works();
    let before = Snapshot::load(&server.file(BUCKET, "ds")).unwrap();
    for (log, request, nth) in [
        ("short", "PUT /data/ds/data/", 1),
        ("short", "PUT /data/ds/snapshots/", 1),
        ("long", "POST /data/ds/data/", 1),
        ("long", "PUT /data/ds/data/", 2),
        ("long", "POST /data/ds/data/", 2),
        ("long", "PUT /data/ds/snapshots/", 1),
    ] {
        server.inject(request, Fault::Denied, When::Nth(nth));
        let append = ingest(&dir, &server, &format!("append {log}.toml --out s3://data/ds"));
        append.fails(&["s3://data/ds/", "cannot be written", "denied the request"]);
        server.heal();
        assert_only_named_files(&server.file(BUCKET, "ds"));
        assert!(Snapshot::load(&server.file(BUCKET, "ds")).unwrap() == before, "{log} {request}");
    }
    ingest(&dir, &server, "append long.toml --out s3://data/ds").works();
    ingest(&dir, &server, "verify s3://data/ds").works();
}

/// The first epoch decodes the bytes that it has verified, as far as there is memory for them; the samples are the
/// same.
#[test]
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn a_file_is_transferred_once_if_memory_allows() {
    let (dir, server) = (Dir::new(), S3Server::start());
    write_log(&dir, "long", LONG);
    let built = ingest(&dir, &server, "build long.toml --out s3://data/long").json();
    let bytes = built["bytes_on_disk"].as_u64().unwrap();
    let read = |more: &str| {
        server.reset_counters();
        let line = format!("onefold-read bench s3://data/long --threads 2{more}");
        let read = dir.command(&line).with_s3(&server).json();
        let sent = server.counters().bytes_sent;
        println!("{more}: {sent} bytes sent of a file of {bytes}");
        (["samples", "batches", "values"].map(|key| read[key].clone()), sent)
    };
    let (samples, once) = read("");
    assert!(once > bytes && once < bytes + bytes / 10, "{once} bytes of {bytes}");
    // A shuffle that does not leave the file in between.
    let (same, shuffled) = read(" --shuffle 2");
    assert_eq!(same[0], samples[0]);
    assert!(shuffled < bytes + bytes / 10, "{shuffled} bytes of {bytes}");
    // The limit has room for the decoding of a row group, but not for the file beside it.
    let (same, twice) = read(" --memory-limit 180MiB");
    assert_eq!(same[0], samples[0]);
    assert!(twice > bytes * 19 / 10 && twice < bytes * 21 / 10, "{twice} bytes of {bytes}");
    let (same, unverified) = read(" --no-verify");
    assert_eq!(same, samples);
    assert!(unverified < bytes + bytes / 10, "{unverified} bytes of {bytes}");
}
