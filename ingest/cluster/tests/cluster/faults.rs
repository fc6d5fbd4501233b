//! Processes that are killed in the middle of a build.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::time::{Duration, Instant};

use onefold_tests::Dir;

use crate::fleet::{Fleet, contents};

/// Writes logs.
fn logs(samples: usize) -> Dir {
    Dir::made_once(&samples.to_string(), |dir| {
        dir.command(&format!("onefold-data generate --workload rm1 --samples {samples} --seed 4 --out logs"))
            .works();
    })
}

/// Writes logs, and the dataset that one process builds from them.
fn built_here(samples: usize) -> Dir {
    let dir = logs(samples);
    build_here(&dir);
    dir
}

fn build_here(dir: &Dir) {
    dir.command("onefold-ingest build logs/dataset.toml --buckets 4 --out here --threads 2").works();
}

fn build(out: &str) -> String {
    format!("build logs/dataset.toml --buckets 4 --out {out}")
}

/// Waits until a build ends, and returns whether it succeeded.
fn ended(mut build: Child) -> bool {
    build.wait().unwrap().success()
}

/// Checks that a dataset is complete, or that nothing of it is visible and the same command then builds it.
fn is_whole_or_can_be_built_again(dir: &Dir, fleet: &Fleet<'_>, out: &str, succeeded: bool) {
    assert_eq!(succeeded, dir.path(format!("{out}/snapshots")).exists(), "a failed build is not visible");
    if !succeeded {
        fleet.command(&build(out)).json();
    }
    assert_eq!(contents(&dir.path(out)), contents(&dir.path("here")));
    // A task of the failed build may still write there for a moment.
    let started = Instant::now();
    loop {
        dir.command(&format!("onefold-ingest vacuum {out} --older-than 0s")).works();
        if !dir.path(format!("{out}/work")).exists() {
            break;
        }
        assert!(started.elapsed().as_secs() < 600, "a vacuum leaves rows in the work folder");
        std::thread::sleep(Duration::from_millis(100));
    }
    dir.command(&format!("onefold-ingest verify {out}")).works();
}

/// Kills an executor after each of these fifths of the duration of a build.
fn executors_are_killed(dir: &Dir, fifths: &[u32]) {
    let mut fleet = Fleet::impatient(dir, 2);
    let started = Instant::now();
    fleet.command(&build("whole")).json();
    let whole = started.elapsed();
    for part in fifths {
        // Each round has its own folder, because a task of the previous build may still write into that one.
        let out = format!("there-{part}");
        let running = fleet.command(&build(&out)).spawn();
        std::thread::sleep(whole * *part / 5);
        fleet.kill_executor();
        fleet.start_executor();
        let succeeded = ended(running);
        is_whole_or_can_be_built_again(dir, &fleet, &out, succeeded);
    }
}

#[test]
fn executors_may_be_killed_at_any_moment() {
    executors_are_killed(&built_here(6000), &[1, 2, 3, 4]);
}

/// A build with vocabularies runs two jobs. The first one writes records to the work folder.
#[test]
fn executors_may_be_killed_while_vocabularies_are_made() {
    let dir = logs(6000);
    let (plain, numbered) = ("item_00 = {", "item_00 = { vocabulary = \"frequency\",");
    dir.edit("logs/dataset.toml", plain, numbered);
    build_here(&dir);
    // One kill during each job.
    executors_are_killed(&dir, &[1, 4]);
}

#[test]
fn a_build_fails_when_its_scheduler_is_killed_and_can_be_run_again() {
    let dir = built_here(6000);
    let mut fleet = Fleet::new(&dir, 1);
    let running = fleet.command(&build("there")).spawn_with_stderr();
    fleet.wait_for_jobs();
    fleet.kill_scheduler();
    let output = running.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("the scheduler") && error.contains("hint"), "{error}");
    assert!(!dir.path("there/snapshots").exists());
    fleet.restart_scheduler();
    // An executor registers again when it learns of the new scheduler.
    fleet.kill_executor();
    fleet.start_executor();
    is_whole_or_can_be_built_again(&dir, &fleet, "there", false);
}

/// Two clients build the same dataset at once: one of them commits, and the other one reports that the dataset exists.
#[test]
fn one_of_two_builds_of_one_dataset_commits() {
    let dir = built_here(3000);
    let fleet = Fleet::new(&dir, 2);
    let builds = [(); 2].map(|()| fleet.command(&build("there")).spawn_with_stderr());
    let outputs = builds.map(|running| running.wait_with_output().unwrap());
    let failed: Vec<String> = outputs
        .iter()
        .filter(|output| !output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stderr).into_owned())
        .collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed[0].contains("there"), "{failed:?}");
    is_whole_or_can_be_built_again(&dir, &fleet, "there", true);
}

#[test]
fn errors_of_executors_name_the_file() {
    let dir = built_here(500);
    let log = dir
        .files()
        .into_keys()
        .find(|name| name.starts_with("logs") && name.extension().is_some_and(|e| e == "parquet"));
    let log = log.unwrap();
    let mut bytes = dir.read(&log);
    // This overwrites the first data page, but not the footer.
    bytes[40..2000].fill(0xff);
    dir.write(&log, bytes);
    let fleet = Fleet::new(&dir, 1);
    let output = fleet.command(&build("there")).output();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let name = log.file_name().unwrap().to_string_lossy().into_owned();
    assert!(!output.status.success() && error.contains(&name) && error.contains("cannot be"), "{error}");
    assert!(!dir.path("there/snapshots").exists());
}

#[test]
fn a_scheduler_that_is_not_there_is_named() {
    let dir = built_here(500);
    let command = "onefold-cluster build logs/dataset.toml --out there --scheduler 127.0.0.1:1";
    let output = dir.command(command).output();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("127.0.0.1:1 cannot be reached") && error.contains("onefold-cluster scheduler"),
        "{error}"
    );
}

#[test]
fn a_build_reports_that_it_waits_for_executors() {
    let dir = built_here(500);
    dir.certificate("ours", "ours", 2);
    let tls = "--tls-certificate ours.pem --tls-key ours.key --tls-authority ours-ca.pem";
    let waits = |out: &str, options: &str| {
        let mut fleet = Fleet::with(&dir, 0, None, options);
        let mut running = fleet.command(&build(out)).spawn_with_stderr();
        let mut stderr = BufReader::new(running.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("no executor is connected to the scheduler 127.0.0.1:") {
            assert!(stderr.read_line(&mut said).unwrap() > 0, "the build ended: {said}");
        }
        fleet.start_executor();
        std::io::copy(&mut stderr, &mut std::io::sink()).unwrap();
        let succeeded = ended(running);
        assert!(succeeded);
        is_whole_or_can_be_built_again(&dir, &fleet, out, succeeded);
    };
    // In parallel, because both wait for seconds.
    std::thread::scope(|scope| {
        scope.spawn(|| waits("plain", ""));
        scope.spawn(|| waits("secure", tls));
    });
}

/// A client that receives a signal to end cancels its job, so that executors are free for other jobs.
#[test]
fn a_client_that_receives_a_signal_ends_its_job() {
    let dir = built_here(6000);
    let fleet = Fleet::new(&dir, 1);
    let running = fleet.command(&build("there")).spawn();
    fleet.wait_for_jobs();
    // The build is started by a program that ends it after a time limit and forwards the signal.
    let told =
        std::process::Command::new("kill").args(["-TERM", &running.id().to_string()]).status().unwrap();
    assert!(told.success() && !ended(running));
    let started = Instant::now();
    while fleet.get("/api/jobs").contains("\"Running\"") {
        assert!(started.elapsed().as_secs() < 600, "the job goes on");
        std::thread::sleep(Duration::from_millis(50));
    }
    is_whole_or_can_be_built_again(&dir, &fleet, "there", false);
}
