//! Uploads of files to a store, short ones in one request and long ones in parts; the state after failed uploads; and
//! the bytes that readers fetch.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use onefold_datasets::Snapshot;
use onefold_datasets::digest::scramble;
use onefold_tests::{BUCKET, Counters, Dir, Fault, S3Server, TestCommand, When};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use crate::logs::write_table;
use crate::row_groups::SESSION_CONFIG;
use crate::samples::assert_only_named_files;

/// The number of samples whose file is longer than two parts of 8 MiB, with [`FEATURES`].
const LONG: i64 = 90_000;
const SHORT: i64 = 100;
/// The number of features of logs that are uploaded.
const FEATURES: i64 = 24;

/// Writes a log of one partition, `NAME`, and the configuration of its dataset, `NAME.toml`. The ids of the features,
/// one per sample, cannot be compressed.
fn write_log(dir: &Dir, name: &str, samples: i64, features: i64) {
    let numbers = |of: &dyn Fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..samples).map(of)))
    };
    let times = TimestampMicrosecondArray::from_iter_values((0..samples).map(|i| 1_714_521_600_000_000 + i));
    let names: Vec<String> = (0..features).map(|feature| format!("f{feature:02}")).collect();
    let mut columns = vec![
        ("session", numbers(&|i| i / 100)),
        ("time", Arc::new(times) as ArrayRef),
        ("label", numbers(&|i| i % 2)),
        ("part", Arc::new(StringArray::from(vec![name; samples as usize])) as ArrayRef),
    ];
    let ids = |feature: i64| numbers(&|i| scattered(i * features + feature));
    columns.extend((0..).zip(&names).map(|(feature, name)| (name.as_str(), ids(feature))));
    write_table(&dir.path(format!("{name}.parquet")), columns);
    let features: String = names.iter().map(|name| format!("{name} = {{ kind = \"sparse\" }}\n")).collect();
    let config = SESSION_CONFIG.replace("log.parquet", &format!("{name}.parquet"));
    dir.write(format!("{name}.toml"), config.replace("request = { kind = \"sparse\" }\n", &features));
}

/// Returns a number that is unrelated to its neighbours (SplitMix64, Steele, Lea and Flood 2014).
fn scattered(number: i64) -> i64 {
    scramble((number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)) as i64
}

fn ingest(dir: &Dir, server: &S3Server, what: &str) -> TestCommand {
    dir.command(&format!("onefold-ingest {what}")).with_s3(server)
}

#[test]
fn short_files_take_one_request_and_long_ones_parts() {
    let (dir, server) = (Dir::new(), S3Server::start());
    write_log(&dir, "short", SHORT, FEATURES);
    write_log(&dir, "long", LONG, FEATURES);
    let put = |name: &str| -> (Counters, Value) {
        server.reset_counters();
        let built = ingest(&dir, &server, &format!("build {name}.toml --out s3://data/{name}")).json();
        (server.counters(), built)
    };
    let (short, built) = put("short");
    assert_eq!(built["files"], json!(1));
    // The file, the manifest, the snapshot, and the file with the number of the newest snapshot.
    assert_eq!((short.puts, short.posts, short.deletes), (4, 0, 0), "{short:?}");
    let (long, built) = put("long");
    assert_eq!(built["files"], json!(1));
    let parts = built["bytes_on_disk"].as_u64().unwrap().div_ceil(8 << 20);
    assert!(parts > 2, "{built}");
    // The file is uploaded in parts; two further requests start and end the upload.
    assert_eq!((long.puts, long.posts, long.deletes), (parts + 3, 2, 0), "{long:?}");
    for name in ["short", "long"] {
        ingest(&dir, &server, &format!("verify s3://data/{name}")).works();
        assert_only_named_files(&server.file(BUCKET, name));
    }
}

/// A store executes a request of an upload, but the connection breaks before its answer arrives.
#[test]
fn uploads_whose_answers_are_lost_are_done_once() {
    let dir = Dir::new();
    write_log(&dir, "short", SHORT, FEATURES);
    write_log(&dir, "long", LONG, FEATURES);
    let (begin_or_end, part) = ("POST /data/ds/data/", "PUT /data/ds/data/");
    let every_request = [
        (begin_or_end, 1, Fault::LoseAnswer),
        (part, 1, Fault::LoseAnswer),
        (part, 3, Fault::Reset),
        // The second of these requests begins the upload again.
        (begin_or_end, 3, Fault::LoseAnswer),
    ];
    for (log, faults) in [
        ("short", &[(part, 1, Fault::LoseAnswer)][..]),
        ("short", &[(part, 1, Fault::Reset)][..]),
        ("long", &every_request[..]),
        ("long", &[(begin_or_end, 2, Fault::Truncate)][..]),
    ] {
        let server = S3Server::start();
        for (request, nth, fault) in faults {
            server.inject(request, *fault, When::Nth(*nth));
        }
        let built = ingest(&dir, &server, &format!("build {log}.toml --out s3://data/ds")).json();
        assert_eq!(built["snapshot"], json!(1), "{log} {faults:?}");
        assert_eq!(server.counters().faults, faults.len() as u64, "{log} {faults:?}");
        assert_only_named_files(&server.file(BUCKET, "ds"));
        ingest(&dir, &server, "verify s3://data/ds").works();
    }
}

/// A store rejects a request of an upload: the file does not appear, and earlier commits remain unchanged.
#[test]
fn uploads_that_are_refused_leave_nothing() {
    let dir = Dir::new();
    write_log(&dir, "first", SHORT, FEATURES);
    write_log(&dir, "short", SHORT, FEATURES);
    write_log(&dir, "long", LONG, FEATURES);
    let server = S3Server::start();
    ingest(&dir, &server, "build first.toml --out s3://data/ds").works();
    let before = Snapshot::load(&server.file(BUCKET, "ds")).unwrap();
    for (log, request, nth) in [
        ("short", "PUT /data/ds/data/", 1),
        ("short", "PUT /data/ds/manifests/", 1),
        ("short", "PUT /data/ds/snapshots/", 1),
        ("long", "POST /data/ds/data/", 1),
        ("long", "PUT /data/ds/data/", 2),
        ("long", "POST /data/ds/data/", 2),
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

/// The number of samples of a log with as many sparse features as rm1 has, [`WIDE_FEATURES`]. Two features take 3 MB.
const WIDE: i64 = 200_000;
const WIDE_FEATURES: i64 = 42;

/// Returns the size of all column chunks of some columns of a dataset, according to the footers.
pub(crate) fn chunk_bytes(dataset: &Path, is_wanted: impl Fn(&str) -> bool) -> u64 {
    let bytes_of = |path: &str| -> u64 {
        let file = fs_err::File::open(dataset.join(path)).unwrap().into_file();
        let metadata = Arc::clone(ParquetRecordBatchReaderBuilder::try_new(file).unwrap().metadata());
        let chunks = metadata.row_groups().iter().flat_map(|row_group| row_group.columns());
        let wanted = chunks.filter(|chunk| is_wanted(&chunk.column_path().parts()[0]));
        wanted.map(|chunk| chunk.compressed_size() as u64).sum()
    };
    Snapshot::load(dataset).unwrap().file_paths().map(bytes_of).sum()
}

/// Readers verify the bytes that they read, and fetch no other bytes for the verification. In addition to the column
/// chunks, they fetch the snapshot and its manifest, whose sizes do not depend on the number of samples, and the
/// footers of the files, which describe all columns.
#[test]
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn readers_fetch_little_but_the_columns_that_they_read() {
    let (dir, server) = (Dir::new(), S3Server::start());
    write_log(&dir, "wide", WIDE, WIDE_FEATURES);
    let built = ingest(&dir, &server, "build wide.toml --out s3://data/wide --buckets 3").json();
    let bytes_on_disk = built["bytes_on_disk"].as_u64().unwrap();
    let dataset = server.file(BUCKET, "wide");
    // Returns the bytes sent, the bytes verified, and the number of samples.
    let read = |more: &str| -> [u64; 3] {
        server.reset_counters();
        let line = format!("onefold-read bench s3://data/wide --batch-size 3000 --threads 2 {more}");
        let read = dir.command(&line).with_s3(&server).json();
        [Some(server.counters().bytes_sent), read["bytes_verified"].as_u64(), read["samples"].as_u64()]
            .map(Option::unwrap)
    };
    let check = |what: &str, sent: u64, chunks: u64| {
        println!("{what}: {sent} bytes sent for column chunks of {chunks}");
        assert!((chunks..=chunks + chunks / 20).contains(&sent), "{what}: {sent} bytes for {chunks}");
    };
    let two = ["label", "f03", "f30"];
    let chunks = chunk_bytes(&dataset, |name| two.contains(&name));
    assert!(chunks < bytes_on_disk / 15, "{chunks} bytes of {bytes_on_disk}");
    let [sent, verified, samples] = read("--features f03,f30");
    assert_eq!((verified, samples), (chunks, WIDE as u64));
    check("two features", sent, chunks);
    let [sent, verified, _] = read("--features f03,f30 --no-verify");
    assert_eq!(verified, 0);
    check("two features, unverified", sent, chunks);
    // A shuffle also reads the sessions.
    let with_sessions = chunks + chunk_bytes(&dataset, |name| name == "session_id");
    let [sent, verified, samples] = read("--features f03,f30 --shuffle 2");
    assert_eq!((verified, samples), (with_sessions, WIDE as u64));
    check("two features, shuffled", sent, with_sessions);

    // Three processes each read one bucket, and together fetch every chunk once.
    let all = chunk_bytes(&dataset, |name| !["session_id", "timestamp"].contains(&name));
    let ranks = [0, 1, 2].map(|rank| read(&format!("--rank {rank}/3")));
    let sum = |figure: usize| ranks.iter().map(|figures| figures[figure]).sum::<u64>();
    assert_eq!((sum(1), sum(2)), (all, WIDE as u64));
    assert!(ranks.iter().all(|figures| figures[2] > 0), "{ranks:?}");
    check("three processes", sum(0), all);
}
