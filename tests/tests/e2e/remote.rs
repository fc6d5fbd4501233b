//! A dataset in an object store, from the first build to a resumed training. The results equal those on a local disk,
//! however often the store and the network fail, or there is one clear error.

use onefold_datasets::Snapshot;
use onefold_tests::{BUCKET, Counters, Dir, Fault, S3Server, TestCommand, When};
use serde_json::{Value, json};

use crate::samples::{assert_only_named_files, without_random_names};
use crate::training::make_small;

const REMOTE: &str = "s3://data/some/ds";

/// The number of seconds within which a command fails if it does not retry for three minutes, as it does for temporary
/// failures of a store. A busy machine needs a large part of them.
pub(crate) const SOON: u64 = 150;

/// Returns a directory with two generated logs, `logs` and `more`, and a small model for them.
pub(crate) fn with_logs(samples: u32) -> Dir {
    Dir::made_once(&samples.to_string(), |dir| {
        for (name, samples, seed) in [("logs", samples, 1), ("more", samples + 500, 2)] {
            let generate = "onefold-data generate --workload rm3";
            dir.command(&format!("{generate} --samples {samples} --seed {seed} --out {name}")).works();
        }
        make_small(dir, "logs/train.toml");
    })
}

/// Runs all commands that a person uses with a dataset at `location`. Returns the results that must not depend on the
/// location. Training runs are written to directories whose names begin with `run`. `command` creates a command with
/// the environment of the store.
pub(crate) fn whole_path(location: &str, run: &str, command: &dyn Fn(&str) -> TestCommand) -> Value {
    let ingest = |what: &str| command(&format!("onefold-ingest {what}")).json();
    let verified = |at: &str| {
        let verified = ingest(&format!("verify {location}{at} --threads 2"));
        assert_eq!(verified["problems"], json!([]));
        ["snapshot", "samples", "sessions", "bytes_on_disk", "digest"].map(|key| verified[key].clone())
    };
    let read = |more: &str| {
        let read = command(&format!("onefold-read bench {location} --threads 2{more}")).json();
        ["samples", "batches", "values", "dedupe_factor"].map(|key| read[key].clone())
    };
    let train = |steps: u32, more: &str| {
        let train = "onefold-train run logs/train.toml --threads 2 --data";
        let trained = command(&format!("{train} {location} --out {run} --max-steps {steps}{more}")).json();
        ["samples", "losses"].map(|key| trained[key].clone())
    };

    let built = ingest(&format!("build logs/dataset.toml --out {location} --threads 2"));
    let first = verified("");
    let trained = train(4, "");
    let appended = ingest(&format!("append more/dataset.toml --out {location} --threads 2"));
    let again = ingest(&format!("append more/dataset.toml --out {location} --threads 2"));
    assert_eq!([&appended["changed"], &again["changed"]], [&json!(true), &json!(false)]);
    let second = verified("");
    assert_eq!(verified(" --at 1"), first);
    let overwritten = ingest(&format!("build more/dataset.toml --out {location} --threads 2 --overwrite"));
    let snapshots = [&built, &appended, &overwritten].map(|summary| summary["snapshot"].clone());
    let pinned = read(" --at 1 --shuffle 3");
    let newest = read(" --dedupe exact");
    // The training continues with its original snapshot.
    let resumed = train(8, " --resume");
    let vacuumed = ingest(&format!("vacuum {location} --keep 2 --older-than 0s"));
    assert_eq!(vacuumed["snapshots_kept"], json!([2, 3]));
    command(&format!("onefold-read head {location} --at 1")).fails(&["has no snapshot 1"]);
    let history = ingest(&format!("history {location}"));
    let entry = |entry: &Value| ["snapshot", "operation", "samples"].map(|key| entry[key].clone());
    let history: Vec<_> = history["snapshots"].as_array().unwrap().iter().map(entry).collect();
    json!([
        snapshots,
        first,
        second,
        trained,
        pinned,
        newest,
        resumed,
        vacuumed["bytes_removed"].is_u64(),
        history,
        verified(" --at 2"),
        verified(""),
    ])
}

/// Returns the directory with the objects of a server's dataset.
fn folder_of(server: &S3Server) -> std::path::PathBuf {
    server.file(BUCKET, "some/ds")
}

#[test]
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn faults_of_store_and_network_change_nothing() {
    let dir = with_logs(3000);
    let local = whole_path("dataset", "run-local", &|line| dir.command(line));
    let snapshot = without_random_names(&Snapshot::load(&dir.path("dataset")).unwrap());
    let slow = Fault::Slow { bytes_per_second: 2_000_000 };
    let kinds =
        [Fault::SlowDown, Fault::InternalError, Fault::Reset, Fault::LoseAnswer, Fault::Truncate, slow];
    let each = |probability: f64, kinds: &[Fault]| -> Vec<(Fault, f64, u64)> {
        kinds.iter().zip(1..).map(|(kind, seed)| (*kind, probability, seed)).collect()
    };
    let mut cases = vec![vec![]];
    cases.extend(kinds.chunks(3).map(|three| each(0.06, three)));
    // A failing command must not change its directory, so each case uses a separate directory.
    let check = |faults: &[(Fault, f64, u64)]| {
        let (dir, server) = (with_logs(3000), S3Server::start());
        for (fault, probability, seed) in faults {
            server.inject("", *fault, When::Chance { probability: *probability, seed: *seed });
        }
        let remote = whole_path(REMOTE, "run", &|line| dir.command(line).with_s3(&server));
        assert_eq!(remote, local, "{faults:?}");
        let Counters { requests, faults: injected, .. } = server.counters();
        assert!(faults.is_empty() || injected > 10, "{faults:?}: {injected} faults in {requests} requests");
        let there = Snapshot::load(&folder_of(&server)).unwrap();
        assert!(without_random_names(&there) == snapshot, "{faults:?}");
        assert_only_named_files(&folder_of(&server));
        let described: Value = serde_json::from_str(&dir.text("run/run.json")).unwrap();
        assert_eq!(
            (described["dataset"].as_str(), &described["snapshot"]),
            (Some(&*there.dataset), &json!(1))
        );
        println!("{faults:?}: {injected} faults in {requests} requests");
    };
    // The cases run at the same time, because clients wait before they retry.
    std::thread::scope(|scope| {
        for faults in &cases {
            let check = &check;
            scope.spawn(move || check(faults));
        }
    });
}

/// The store executes a request, but the connection breaks before the answer arrives. The operation must neither be
/// executed twice nor be mistaken for the work of another writer.
#[test]
fn work_whose_answer_was_lost_is_done_once() {
    let dir = with_logs(1000);
    let ingest =
        |server: &S3Server, what: &str| dir.command(&format!("onefold-ingest {what}")).with_s3(server);
    for (request, nth, fault) in [
        ("PUT /data/some/ds/snapshots/00000001.json", 1, Fault::LoseAnswer),
        ("PUT /data/some/ds/snapshots/00000002.json", 1, Fault::LoseAnswer),
        ("PUT /data/some/ds/snapshots/00000002.json", 1, Fault::Conflict),
        ("POST /data?delete", 1, Fault::LoseAnswer),
        ("POST /data?delete", 2, Fault::Truncate),
        ("GET /data?list-type", 1, Fault::Truncate),
    ] {
        let server = S3Server::start();
        server.inject(request, fault, When::Nth(nth));
        let built = ingest(&server, &format!("build logs/dataset.toml --out {REMOTE}")).json();
        let appended = ingest(&server, &format!("append more/dataset.toml --out {REMOTE}")).json();
        assert_eq!(
            [&built["snapshot"], &appended["snapshot"]],
            [&json!(1), &json!(2)],
            "{request} {fault:?}"
        );
        let history = ingest(&server, &format!("history {REMOTE}")).json();
        assert_eq!(history["snapshots"].as_array().map(Vec::len), Some(2), "{request} {fault:?}");
        ingest(&server, &format!("vacuum {REMOTE} --keep 1 --older-than 0s")).works();
        assert_eq!(server.counters().faults, 1, "{request} {fault:?}");
        assert_only_named_files(&folder_of(&server));
        ingest(&server, &format!("verify {REMOTE}")).works();
    }
}

/// A store accepts a request but does not answer, or its answer stops halfway. The request is sent again, whatever
/// its kind. The timeout of a single try is short in this test.
#[test]
fn requests_that_stall_are_sent_again() {
    let dir = with_logs(1000);
    let cases = [
        ("", Fault::Stall),
        ("GET /data?list-type", Fault::Stall),
        ("GET /data?list-type", Fault::StallHalfway),
        ("PUT /data/some/ds/data/", Fault::Stall),
        ("PUT /data/some/ds/snapshots/00000001.json", Fault::Stall),
        ("GET /data/some/ds/snapshots/00000001.json", Fault::StallHalfway),
        ("GET /data/some/ds/data/", Fault::Stall),
        ("GET /data/some/ds/data/", Fault::StallHalfway),
    ];
    let check = |(request, fault): (&str, Fault)| {
        let server = S3Server::start();
        server.inject(request, fault, When::Nth(1));
        let command = |line: &str| {
            let command = dir.command(line).with_s3(&server).with_variable("AWS_TIMEOUT", "2 seconds");
            command.with_time_limit(SOON)
        };
        command(&format!("onefold-ingest build logs/dataset.toml --out {REMOTE}")).works();
        command(&format!("onefold-ingest verify {REMOTE}")).works();
        command(&format!("onefold-read bench {REMOTE}")).works();
        assert_eq!(server.counters().faults, 1, "{request} {fault:?}");
        assert_only_named_files(&folder_of(&server));
    };
    let check = &check;
    std::thread::scope(|scope| {
        let running: Vec<_> = cases.into_iter().map(|case| scope.spawn(move || check(case))).collect();
        running.into_iter().for_each(|case| case.join().unwrap());
    });
}

/// A store answers `503 SlowDown` to several requests in a row. The requests are sent again until the store has
/// recovered, for more than a minute if necessary.
#[test]
fn a_store_that_is_busy_for_a_while_is_waited_for() {
    const FAULTS: u64 = 6;
    let dir = with_logs(1000);
    let digest = |dataset: &str, command: &dyn Fn(&str) -> TestCommand| {
        command(&format!("onefold-ingest build logs/dataset.toml --out {dataset}")).works();
        command(&format!("onefold-ingest verify {dataset}")).json()["digest"].clone()
    };
    let local = digest("dataset", &|line| dir.command(line));
    let check = |request: &str| {
        let server = S3Server::start();
        server.inject(request, Fault::SlowDown, When::First(FAULTS));
        assert_eq!(digest(REMOTE, &|line| dir.command(line).with_s3(&server)), local, "{request}");
        assert_eq!(server.counters().faults, FAULTS, "{request}");
        assert_only_named_files(&folder_of(&server));
    };
    let check = &check;
    let requests = ["", "PUT /data/some/ds/data/", "PUT /data/some/ds/snapshots/", "GET /data/some/ds/data/"];
    std::thread::scope(|scope| {
        let running: Vec<_> =
            requests.into_iter().map(|request| scope.spawn(move || check(request))).collect();
        running.into_iter().for_each(|case| case.join().unwrap());
    });
}

/// No dataset is created among other objects, and a vacuum keeps other objects that are later written to its
/// directories.
#[test]
fn foreign_objects_are_kept() {
    let dir = with_logs(1000);
    let server = S3Server::start();
    let command = |line: &str| dir.command(line).with_s3(&server);
    let build = |location: &str| format!("onefold-ingest build logs/dataset.toml --out {location}");
    for (place, object, shown) in [
        ("one", "data/log.csv", "`data/log.csv`"),
        ("two", "data/events/part-0.parquet", "`data/events/part-0.parquet`"),
        ("three", "letters/dear.txt", "`letters/dear.txt`"),
        ("four", "dear.txt", "`dear.txt`"),
    ] {
        server.put(BUCKET, &format!("{place}/{object}"), "dear");
        let location = format!("s3://{BUCKET}/{place}");
        command(&build(&location)).fails(&[&format!("`{location}` already exists"), "not a dataset", shown]);
    }
    command(&build(REMOTE)).works();
    server.put(BUCKET, "some/ds/data/log.csv", "dear");
    let vacuumed = command(&format!("onefold-ingest vacuum {REMOTE} --older-than 0s")).json();
    assert_eq!([&vacuumed["files_removed"], &vacuumed["foreign_files_kept"]], [&json!(0), &json!(1)]);
    assert!(server.file(BUCKET, "some/ds/data/log.csv").exists());
}

/// Checks that `#` and `?` are parts of names: a build that replaces a dataset does not change the others.
#[test]
fn every_character_of_a_url_counts() {
    let dir = with_logs(1000);
    let server = S3Server::start();
    let run = |line: &str, place: &str| {
        dir.command(line).arg(format!("s3://{BUCKET}/{place}")).with_s3(&server).works();
    };
    let places = ["exp", "exp#1", "exp#2", "exp?v=1"];
    for place in places {
        run("onefold-ingest build logs/dataset.toml --out", place);
        assert!(server.file(BUCKET, &format!("{place}/snapshots/00000001.json")).exists(), "{place}");
    }
    let objects = |place: &str| onefold_tests::files_below(&server.file(BUCKET, place));
    let others = || [places[0], places[1], places[3]].map(objects);
    let before = others();
    run("onefold-ingest build more/dataset.toml --overwrite --out", "exp#2");
    assert!(others() == before);
    assert!(server.file(BUCKET, "exp#2/snapshots/00000002.json").exists());
    run("onefold-ingest verify", "exp%231");
    run("onefold-read bench", "exp?v=1");
}

/// A permanent failure causes one error, which names the object. If a retry is pointless, the error occurs within
/// seconds.
#[test]
fn failures_that_stay_are_told_at_once() {
    let dir = with_logs(1000);
    let server = S3Server::start();
    let command = |line: &str| dir.command(line).with_s3(&server);
    let build = format!("onefold-ingest build logs/dataset.toml --out {REMOTE}");
    let read = format!("onefold-read bench {REMOTE}");
    let quick = |command: TestCommand, parts: &[&str]| {
        command.with_time_limit(SOON).fails(parts);
    };
    // A request that is refused is not sent again.
    for (fault, message, variable) in [
        (Fault::Denied, "denied the request", "AWS_SECRET_ACCESS_KEY"),
        (Fault::OtherRegion, "the bucket is in another region", "AWS_REGION"),
    ] {
        server.inject("", fault, When::Always);
        for line in [&build, &read, &format!("onefold-ingest verify {REMOTE}")] {
            server.reset_counters();
            quick(command(line), &[REMOTE, message, variable]);
            let requests = server.counters().requests;
            assert!(requests <= 3, "{line}: {requests} requests");
        }
        server.heal();
    }
    // A server that accepts requests and never answers is not waited for as long as a busy store.
    server.inject("", Fault::Stall, When::Always);
    for line in [&build, &read] {
        let command = command(line).with_variable("AWS_TIMEOUT", "2 seconds");
        quick(command, &[REMOTE, "does not answer as it should"]);
    }
    server.heal();
    // A write that is denied leaves no files behind.
    for object in ["some/ds/data/", "some/ds/snapshots/00000001.json"] {
        server.inject(&format!(" /{BUCKET}/{object}"), Fault::Denied, When::Always);
        quick(
            command(&build),
            &[&format!("s3://{BUCKET}/{object}"), "denied the request", "AWS_SECRET_ACCESS_KEY"],
        );
        server.heal();
        quick(command(&read), &[&format!("`{REMOTE}` is not a dataset")]);
    }
    command(&build).works();
    let snapshot = Snapshot::load(&folder_of(&server)).unwrap();
    let (dataset, file) = (snapshot.dataset.clone(), snapshot.partitions[0].files[0].path().to_owned());
    let key = format!("some/ds/{file}");
    let url = format!("s3://{BUCKET}/{key}");

    let other_key = command(&read).with_variable("AWS_SECRET_ACCESS_KEY", "another");
    quick(other_key, &[REMOTE, "denied the request", "AWS_SECRET_ACCESS_KEY"]);
    quick(command("onefold-read bench s3://dtaa/some/ds"), &["s3://dtaa/some/ds", "no such bucket"]);
    quick(command("onefold-read bench s3://data/other"), &["`s3://data/other` is not a dataset"]);
    let gets = format!("GET /{BUCKET}/some/ds/data/");
    server.inject(&gets, Fault::Denied, When::Always);
    quick(command(&read), &[&url, "denied the request"]);
    // A file that cannot be read is not reported as damaged.
    let verify = || command(&format!("onefold-ingest verify {REMOTE}"));
    quick(verify(), &[&format!("`{url}` cannot be read"), "denied the request", "AWS_SECRET_ACCESS_KEY"]);
    server.heal();
    verify().works();

    // The file is replaced by another object of the same size after its first ranges were read.
    let bytes = fs_err::read(server.file(BUCKET, &key)).unwrap();
    let mut other = bytes.clone();
    other[bytes.len() / 2] ^= 1;
    let (writer, changed) = (server.writer(), key.clone());
    server.before(&gets, 2, move || writer.put(BUCKET, &changed, other));
    quick(command(&read), &[&url, "was changed while it was read"]);
    server.heal();
    quick(command(&read), &[&url, "checksum"]);
    server.put(BUCKET, &key, &bytes);
    command(&read).works();
    let gone = server.file(BUCKET, &key);
    let removed = gone.clone();
    server.before(&gets, 2, move || fs_err::remove_file(removed).unwrap());
    quick(command(&read), &[&url]);
    server.heal();
    quick(command(&read), &[&url, "it is missing, the snapshot names it"]);
    fs_err::write(&gone, &bytes).unwrap();
    assert_eq!(Snapshot::load(&folder_of(&server)).unwrap().dataset, dataset);
    command(&read).works();
}
