//! A store answers `503 SlowDown` to all requests, or permanently to some of them. Every command ends by itself, with
//! one error that says so.

use onefold_datasets::Snapshot;
use onefold_tests::{BUCKET, Dir, Fault, S3Server, TestCommand, When};

use crate::remote::with_logs;
use crate::samples::assert_only_named_files;

/// The time limit of a command in seconds. A command retries for about three minutes.
const KILLED_AFTER: u64 = 1200;

/// Runs commands at the same time, because they mostly wait. Each must fail with all of its parts in its error.
fn all_fail(dir: &Dir, commands: Vec<(TestCommand, Vec<String>)>) -> Vec<String> {
    let before = dir.files();
    let errors = std::thread::scope(|scope| {
        let start = |(command, parts): (TestCommand, Vec<String>)| {
            scope.spawn(move || {
                let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                command.with_time_limit(KILLED_AFTER).fails(&parts)
            })
        };
        let running: Vec<_> = commands.into_iter().map(start).collect();
        running.into_iter().map(|command| command.join().unwrap()).collect()
    });
    assert!(dir.files() == before);
    errors
}

/// Tests both stores at the same time, because commands retry for three minutes at each of them.
#[test]
fn every_command_reports_a_store_that_fails_or_stalls() {
    std::thread::scope(|scope| {
        scope.spawn(a_store_that_answers_nothing_but_503);
        scope.spawn(a_store_that_stops_answering);
    });
}

fn a_store_that_answers_nothing_but_503() {
    let dir = with_logs(500);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.command("onefold-train run logs/train.toml --data dataset --out run --max-steps 1").works();
    let server = S3Server::start();
    server.inject("", Fault::SlowDown, When::Always);
    dir.write("remote.toml", dir.text("logs/dataset.toml"));
    for folder in ["features", "events"] {
        dir.edit("remote.toml", &format!("\"{folder}/"), &format!("\"s3://data/logs/{folder}/"));
    }
    let busy = |line: &str| {
        let parts = ["s3://data/", "does not answer as it should: SlowDown"];
        (dir.command(line).with_s3(&server), parts.map(str::to_owned).to_vec())
    };
    let commands = [
        "onefold-ingest build remote.toml --out other",
        "onefold-ingest build logs/dataset.toml --out s3://data/ds",
        "onefold-ingest append logs/dataset.toml --out s3://data/ds",
        "onefold-ingest verify s3://data/ds",
        "onefold-ingest history s3://data/ds",
        "onefold-ingest vacuum s3://data/ds",
        "onefold-ingest report s3://data/ds",
        "onefold-read head s3://data/ds",
        "onefold-read bench s3://data/ds",
        "onefold-train run logs/train.toml --data s3://data/ds --out other",
        "onefold-train eval run --data s3://data/ds",
        "onefold-shard tables logs/train.toml --data s3://data/ds --out tables.json",
    ];
    let errors = all_fail(&dir, commands.map(busy).into());
    assert!(errors.iter().all(|error| !error.contains("problem")), "{errors:?}");
}

/// The store returns snapshots but no data, or it rejects data, or snapshots, or even the deletion of data.
fn a_store_that_stops_answering() {
    let (dir, runs) = (with_logs(500), Dir::new());
    // A training that has begun leaves its directory.
    let run = runs.path("run");
    let server = S3Server::start();
    let build = |name: &str| {
        let build = format!("onefold-ingest build logs/dataset.toml --out s3://data/{name}");
        dir.command(&build).with_s3(&server).works();
        let folder = server.file(BUCKET, name);
        let file = Snapshot::load(&folder).unwrap().partitions[0].files[0].path().to_owned();
        (folder, format!("s3://data/{name}/{file}"))
    };
    let names = ["read", "written", "committed"];
    let [(_, file), (written, _), (committed, _)] = names.map(build);
    for request in [
        "GET /data/read/data/",
        "PUT /data/written/data/",
        "PUT /data/committed/snapshots/",
        "PUT /data/stuck/snapshots/",
        "POST /data?delete",
    ] {
        server.inject(request, Fault::SlowDown, When::Always);
    }
    let fails = |line: &str, parts: &[&str]| {
        let busy = ["does not answer as it should: SlowDown"];
        let parts = parts.iter().chain(&busy).map(|part| (*part).to_owned()).collect();
        (dir.command(line).with_s3(&server), parts)
    };
    let read = |line: &str| fails(line, &[&file, "cannot be read"]);
    let append = |name: &str, object: &str| {
        let append = format!("onefold-ingest append more/dataset.toml --out s3://data/{name}");
        fails(&append, &[&format!("s3://data/{name}/{object}"), "cannot be written"])
    };
    let errors = all_fail(
        &dir,
        vec![
            read("onefold-ingest verify s3://data/read"),
            read("onefold-ingest report s3://data/read"),
            read("onefold-read bench s3://data/read"),
            read(&format!("onefold-train run logs/train.toml --data s3://data/read --out {}", run.display())),
            append("written", "data/"),
            append("committed", "snapshots/"),
            fails(
                "onefold-ingest build more/dataset.toml --out s3://data/stuck",
                &["s3://data/stuck/snapshots/", "cannot be written"],
            ),
        ],
    );
    // The error concerns the store and not the dataset, so `verify` reports no problem of the dataset.
    assert!(!errors[0].contains("problem") && !errors[0].contains("build the dataset"), "{}", errors[0]);
    server.heal();
    for (name, folder) in [("written", &written), ("committed", &committed)] {
        assert_eq!(Snapshot::load(folder).unwrap().snapshot, 1);
        let line = format!("onefold-ingest vacuum s3://data/{name} --older-than 0s");
        dir.command(&line).with_s3(&server).works();
        assert_only_named_files(folder);
    }
    dir.command("onefold-ingest verify s3://data/read").with_s3(&server).works();
    dir.command("onefold-read bench s3://data/stuck").with_s3(&server).fails(&["is not a dataset"]);
    dir.command("onefold-ingest build more/dataset.toml --out s3://data/stuck").with_s3(&server).works();
}
