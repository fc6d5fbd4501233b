//! Checkpoints and models in an object store have the same contents as on a local disk, despite failures and killed
//! processes.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use onefold_tests::{BUCKET, Dir, Fault, S3Server, TestCommand, When, files_below};
use serde_json::Value;

use crate::ranks::{RUN, losses, ranks_of, with_dataset, write_plan};
use crate::training::{self, PREPROCESS, checkpoints};

const REMOTE: &str = "s3://data/runs/1";

/// Returns a function that creates commands which access the server.
fn on<'a>(dir: &'a Dir, server: &'a S3Server) -> impl Fn(&str) -> TestCommand + 'a {
    |line| dir.command(line).with_s3(server)
}

/// Runs a command that must fail. Only one rank may print an error.
#[track_caller]
fn refused(command: TestCommand, parts: &[&str]) {
    let message = command.fails(parts);
    assert_eq!(message.matches("error:").count(), 1, "{message}");
}

/// Returns the lines of a run's metrics without times.
fn metrics(dir: &Dir, run: &str) -> Vec<Value> {
    let text = dir.text(format!("{run}/metrics.jsonl"));
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("ranks");
        line
    };
    text.lines().map(line).collect()
}

/// Checks that every file below a directory of checkpoints is a `checkpoint.json`, or is named by one. The server may
/// leave empty directories.
fn assert_only_named_files(run: &Path) {
    let files = files_below(&run.join("checkpoints"));
    let mut named = 0;
    for (path, text) in files.iter().filter(|(path, _)| path.ends_with("checkpoint.json")) {
        let description: Value = serde_json::from_slice(text).unwrap();
        let folder = path.parent().unwrap().join(description["attempt"].as_str().unwrap());
        for (name, figures) in description["files"].as_object().unwrap() {
            assert_eq!(files[&folder.join(name)].len() as u64, figures["bytes"].as_u64().unwrap());
            named += 1;
        }
        named += 1;
    }
    assert_eq!(files.len(), named, "{:?}", files.keys());
}

/// A job whose machine is lost continues on another machine from the URL alone, with the same bits as a job that was
/// not interrupted.
#[test]
fn a_job_goes_on_elsewhere_from_its_store() {
    let (dir, server) = (with_dataset(), S3Server::start());
    write_plan(&dir);
    let command = on(&dir, &server);
    let launch =
        |ranks: u32, more: &str| command(&format!("onefold-train launch --ranks {ranks} -- {RUN} {more}"));
    let whole = launch(3, "--plan plan.json --out whole --max-steps 28").json();
    let faults = [Fault::SlowDown, Fault::InternalError, Fault::Reset, Fault::LoseAnswer, Fault::Truncate];
    for (fault, seed) in faults.into_iter().zip(1..) {
        server.inject("", fault, When::Chance { probability: 0.01, seed });
    }
    let there = format!("--plan plan.json --checkpoints {REMOTE}");
    launch(3, &format!("{there} --out here --max-steps 17")).works();
    let folder = server.file(BUCKET, "runs/1");
    // Every third checkpoint has all rows. Three checkpoints are kept, and those on which they build.
    assert_eq!(checkpoints(&folder), [5, 10, 15, 17]);
    assert_only_named_files(&folder);
    for file in ["checkpoints", "model.safetensors"] {
        assert!(!dir.path("here").join(file).exists(), "{file} is not in the store alone");
    }
    fs_err::remove_dir_all(dir.path("here")).unwrap();

    let resumed = launch(3, &format!("{there} --out elsewhere --max-steps 28 --resume")).json();
    assert_eq!((resumed["resumed_from_step"].as_u64(), losses(&resumed)), (Some(17), losses(&whole)));
    assert!(fs_err::read(folder.join("model.safetensors")).unwrap() == dir.read("whole/model.safetensors"));
    assert!(metrics(&dir, "elsewhere") == metrics(&dir, "whole"), "the metrics did not come along");
    assert_only_named_files(&folder);
    let mut rest: Vec<_> =
        files_below(&folder).into_keys().filter(|path| !path.starts_with("checkpoints")).collect();
    rest.sort();
    assert_eq!(rest, [Path::new("model.safetensors"), Path::new("run.json")]);
    server.heal();

    // The directory of the run says where its model is, and the store has all that is needed.
    let figures = |line: &str| {
        let eval = command(line).json();
        (eval["loss"].clone(), eval["steps"].clone())
    };
    let expected = figures("onefold-train eval whole --data dataset");
    for run in ["elsewhere", REMOTE] {
        assert_eq!(figures(&format!("onefold-train eval {run} --data dataset")), expected);
        assert_eq!(
            figures(&format!("onefold-train eval {run} --data dataset --checkpoint latest")),
            expected
        );
    }
    let eval = format!("eval {REMOTE} --data dataset --timeout 300 --checkpoint 28");
    let loss = figures(&format!("onefold-train launch --ranks 2 -- {eval}")).0.as_f64().unwrap();
    assert!((loss - expected.0.as_f64().unwrap()).abs() < 1e-6, "{loss}");
    command("onefold-train export whole --out a").works();
    command(&format!("onefold-train export {REMOTE} --out b")).works();
    command("onefold-train export elsewhere --checkpoint latest --out c").works();
    for other in ["b", "c"] {
        assert!(dir.read("a/model.safetensors") == dir.read(format!("{other}/model.safetensors")), "{other}");
    }
    // The run continues on a different number of ranks, and from the directory alone.
    let moved = launch(2, "--out elsewhere --max-steps 32 --resume").json();
    assert_eq!(moved["resumed_from_step"].as_u64(), Some(28));
    launch(2, &format!("--out elsewhere --checkpoints {REMOTE}/ --max-steps 33 --resume")).works();
}

/// The store also contains the preprocessing. A local directory, given as a path or a URL, works as well.
#[test]
fn a_run_in_a_store_stands_on_its_own() {
    let (dir, server) = (Dir::new(), S3Server::start());
    let command = on(&dir, &server);
    crate::logs::write_logs(&dir);
    command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    dir.edit("logs/train.toml", "[tables.history]", "[tables.age_group]\nrows = 3\n[tables.history]");
    dir.write("logs/steps.toml", PREPROCESS);
    dir.write("logs/cities.txt", "3\n1\n2\n");
    let url = format!("file://{}", dir.path("by-url").display());
    let places = [("a", REMOTE), ("b", "by-path"), ("c", &*url)];
    let train = |out: &str, place: &str| format!("{} {out} --checkpoints {place}", training::RUN);
    for (out, place) in places {
        command(&format!("{} --max-steps 1", train(out, place))).works();
        fs_err::remove_dir_all(dir.path(out)).unwrap();
    }
    let cities = dir.text("logs/cities.txt");
    dir.write("logs/cities.txt", cities.replace('3', "4"));
    for (out, place) in places {
        command(&format!("{} --resume", train(out, place))).fails(&[place, "other preprocessing"]);
    }
    dir.write("logs/cities.txt", cities);
    let run = command(&format!("{} whole", training::RUN)).json();
    for (out, place) in places {
        command(&format!("{} --resume", train(out, place))).works();
    }
    fs_err::remove_dir_all(dir.path("logs")).unwrap();
    command("onefold-train export whole --out exported").works();
    for (out, place) in places {
        for run_of in [out, place] {
            let eval = command(&format!("onefold-train eval {run_of} --data dataset --threads 2")).json();
            assert_eq!(eval["loss"], run["eval"]["loss"], "{run_of}");
        }
        command(&format!("onefold-train export {place} --out exported-{out}")).works();
        for file in ["model.safetensors", "preprocess/preprocess.toml", "preprocess/table-0.txt"] {
            let exported = dir.read(format!("exported-{out}/{file}"));
            assert!(exported == dir.read(format!("exported/{file}")), "{place}: {file}");
        }
    }
}

#[test]
fn places_of_checkpoints_that_cannot_be_used() {
    let (dir, server) = (with_dataset(), S3Server::start());
    let command = on(&dir, &server);
    let run = |more: &str| command(&format!("onefold-train {RUN} --threads 1 --max-steps 5 {more}"));
    let there = format!("--checkpoints {REMOTE}");
    run(&format!("{there} --out run")).works();
    let launch =
        |more: &str| command(&format!("onefold-train launch --ranks 2 -- {RUN} --max-steps 5 {more}"));
    refused(launch(&format!("{there} --out new")), &[REMOTE, "already exists", "--checkpoints", "--resume"]);
    refused(run(&format!("{there} --out run --overwrite")), &[REMOTE, "already exists", "--checkpoints"]);
    refused(run("--out run --resume --checkpoints s3://data/runs/2"), &["`run`", REMOTE]);
    refused(run("--out s3://data/runs/3"), &["on a local disk", "--out", "--checkpoints"]);
    refused(run("--out new --checkpoints s3://dtaa/runs"), &["s3://dtaa/runs", "no such bucket"]);
    refused(
        command("onefold-train eval s3://data/runs/2 --data dataset"),
        &["s3://data/runs/2", "not a run"],
    );
    refused(
        command(&format!("onefold-train eval {REMOTE} --data dataset --checkpoint 7")),
        &["no checkpoint of step 7", "choose one of step 5"],
    );
    dir.set("logs/train.toml", "seed", "2");
    refused(launch(&format!("{there} --out new --resume")), &[REMOTE, "another `[train].seed`"]);
    dir.set("logs/train.toml", "seed", "1");
    // A run whose checkpoint cannot be written remains and can continue.
    server.inject("PUT /data/runs/4/checkpoints/", Fault::Denied, When::Always);
    let there = "--checkpoints s3://data/runs/4 --out new";
    let denied = ["s3://data/runs/4/checkpoints/", "denied the request", "AWS_SECRET_ACCESS_KEY"];
    launch(there).fails_late(&denied);
    server.heal();
    assert!(server.file(BUCKET, "runs/4/run.json").is_file() && dir.path("new/metrics.jsonl").is_file());
    launch(&format!("{there} --resume")).works();
}

/// Kills a job of two ranks before a request to the store. Returns whether it was killed.
fn killed_before(dir: &Dir, server: &S3Server, line: &str, request: &str, nth: u64) -> bool {
    let launcher = Arc::new(OnceLock::new());
    let id = Arc::clone(&launcher);
    server.before(request, nth, move || {
        let ranks = ranks_of(*id.wait());
        // Killing one of the two ranks is enough, because the other one then ends.
        let victim = ranks[nth as usize % ranks.len()].to_string();
        assert!(Command::new("kill").args(["-9", &victim]).status().unwrap().success());
    });
    let child = dir.command(line).with_s3(server).spawn_with_stderr();
    launcher.set(child.id()).unwrap();
    let output = child.wait_with_output().unwrap();
    server.heal();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return false;
    }
    assert_eq!(message.matches("error:").count(), 1, "one rank speaks: {message}");
    assert!(message.contains(" was lost at step "), "{message}");
    true
}

/// Whatever a job does with its store when a rank is killed, the next job continues from a complete checkpoint.
#[test]
fn ranks_killed_while_they_write_to_a_store_lose_nothing() {
    let (dir, server) = (with_dataset(), S3Server::start());
    let command = on(&dir, &server);
    let launch = "onefold-train launch --ranks 2 --";
    let whole = command(&format!("{launch} {RUN} --out whole --max-steps 45")).json();
    let line = format!("{launch} {RUN} --out run --checkpoints {REMOTE} --max-steps 45 --resume");
    let folder = server.file(BUCKET, "runs/1");
    let mut killed = 0;
    // Requests for shards, for the dense part, for `checkpoint.json` itself, and for deletions.
    for (request, nth) in [
        ("/checkpoints/step-000000000005/", 1),
        ("/checkpoint.json", 1),
        ("/checkpoints/step-000000000015/", 6),
        ("POST /data?delete", 1),
        ("/tables-00001-of-00002", 3),
        ("PUT /data/runs/1/.shards/", 2),
        ("PUT /data/runs/1/model.safetensors", 1),
    ] {
        killed += usize::from(killed_before(&dir, &server, &line, request, nth));
    }
    assert!(killed >= 5, "{killed} jobs were killed");
    let resumed = command(&line).json();
    assert_eq!(losses(&resumed), losses(&whole));
    assert!(fs_err::read(folder.join("model.safetensors")).unwrap() == dir.read("whole/model.safetensors"));
    assert_only_named_files(&folder);
    assert!(files_below(&folder).keys().all(|path| !path.starts_with(".shards")));
}

/// If two jobs train one run at the same time, the one that is behind ends with an error, and the checkpoints of the
/// other one remain.
#[test]
fn two_jobs_on_one_store_are_told() {
    let (dir, server) = (with_dataset(), S3Server::start());
    let command = on(&dir, &server);
    let launch = "onefold-train launch --ranks 2 --";
    let line = |out: &str, steps: u32| {
        format!("{launch} {RUN} --out {out} --checkpoints {REMOTE} --max-steps {steps} --resume")
    };
    command(&line("first", 5)).works();
    let (other, second) = (Arc::new(OnceLock::new()), line("second", 12));
    // The first job is about to write its next checkpoint when the second one runs to its end. The request of the
    // first job waits for that.
    let (run, result) = (dir.command(&second).with_s3(&server), Arc::clone(&other));
    server.before("PUT /data/runs/1/checkpoints/step-000000000010/", 1, move || {
        result.set(run.json()["steps"].as_u64()).unwrap();
    });
    let output = command(&line("first", 20)).output();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.matches("error:").count(), 1, "one rank speaks: {message}");
    assert!(message.contains("another job has written the checkpoint `step-000000000012`"), "{message}");
    assert_eq!(other.get(), Some(&Some(12)));
    // The next job continues from there.
    let third = command(&line("third", 25)).json();
    assert_eq!(third["resumed_from_step"].as_u64(), Some(12));
    assert_only_named_files(&server.file(BUCKET, "runs/1"));
}
