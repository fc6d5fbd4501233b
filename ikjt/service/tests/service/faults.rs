//! Tests that every batch arrives exactly once and with the same bytes, even if workers and the master fail.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Within};
use onefold_tests::{BUCKET, Dir, Fault, S3Server, When, free_port};
use serde_json::Value;

use crate::fleet::{Fleet, is_another_client};
use crate::reading::{SetAtEnd, bytes_of, dataset, number, workers};

/// The number of epochs that are read repeatedly during the faults.
const EPOCHS: u64 = 3;

/// Returns a job whose epochs have different orders.
fn shuffled() -> ReadRequest {
    let shuffle = Some(Shuffle { seed: 5, row_groups: 2, within: Within::Epoch });
    ReaderOptions { shuffle, ..ReaderOptions::new(64) }.into()
}

/// Returns a shuffled job, a job with a pipeline, and the two ranks of a third job.
fn mixed(dir: &Dir) -> Vec<ReadRequest> {
    let preprocess = Some(PreprocessConfig::load(&dir.path("steps.toml")).unwrap());
    let with_pipeline = ReaderOptions { dedupe: Dedupe::Off, preprocess, ..ReaderOptions::new(64) };
    let of_rank = |rank| ReadRequest { rank: Rank { rank, world_size: 2 }, ..ReaderOptions::new(64).into() };
    vec![shuffled(), with_pipeline.into(), of_rank(0), of_rank(1)]
}

/// Reads epochs of all jobs at the same time from `url` until `faults` returns, and compares every byte with the result
/// of a local reader of `local`.
fn read_during(url: &str, local: &Path, jobs: &[ReadRequest], faults: impl FnOnce()) {
    let read_all = |job: &ReadRequest| -> Vec<_> {
        let reader = Reader::open(local, job.clone(), &workers()).unwrap();
        (0..EPOCHS).map(|epoch| bytes_of(&reader, epoch, 0)).collect()
    };
    let expected: Vec<_> = jobs.iter().map(read_all).collect();
    let over = AtomicBool::new(false);
    let read = |job: &ReadRequest, expected: &[Vec<(Vec<u8>, u64)>]| {
        let served = Reader::open(Path::new(url), job.clone(), &workers()).unwrap();
        let mut epochs = 0;
        while !over.load(Relaxed) || epochs < EPOCHS {
            let epoch = epochs % EPOCHS;
            assert!(
                bytes_of(&served, epoch, 0) == expected[epoch as usize],
                "epoch {epoch} after {epochs} others of {job:?}"
            );
            epochs += 1;
        }
    };
    std::thread::scope(|scope| {
        let read = &read;
        let reading: Vec<_> = jobs
            .iter()
            .zip(&expected)
            .map(|(job, expected)| scope.spawn(move || read(job, expected)))
            .collect();
        let end = SetAtEnd(&over);
        faults();
        drop(end);
        reading.into_iter().for_each(|reading| reading.join().unwrap());
    });
}

/// Generates pseudo-random pauses, so that kills happen at arbitrary times.
fn pauses() -> impl Iterator<Item = Duration> {
    let step = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some(Duration::from_millis((*state >> 33) % 150))
    };
    std::iter::successors(Some(9_u64), |state| Some(*state)).scan(9_u64, move |state, _| step(state))
}

/// Kills and stops workers while several jobs read, and kills the master after every fourth of these faults.
#[test]
fn killed_and_stopped_processes_change_nothing() {
    let (kills, stops) = (number("ONEFOLD_TEST_KILLS", 12), number("ONEFOLD_TEST_STOPS", 2));
    let faults = kills + stops;
    let dir = dataset();
    let mut fleet = Fleet::new(&dir, 2);
    fleet.wait_for_workers(2);
    read_during(&fleet.url("data"), &dir.path("data"), &mixed(&dir), || {
        for (fault, pause) in pauses().take(faults).enumerate() {
            std::thread::sleep(pause);
            // The stops are distributed evenly among the kills.
            if (fault + 1) * stops / faults > fault * stops / faults {
                fleet.signal(0, "STOP");
                std::thread::sleep(8 * pause);
                fleet.signal(0, "CONT");
            } else {
                fleet.kill_worker();
                fleet.start_worker();
            }
            if fault % 4 == 3 {
                fleet.kill_master();
                std::thread::sleep(pause);
                fleet.restart_master();
            }
        }
    });
}

#[test]
fn clients_continue_without_a_stopped_worker() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 2);
    fleet.wait_for_workers(2);
    read_during(&fleet.url("data"), &dir.path("data"), &[shuffled()], || {
        fleet.wait_for_progress();
        fleet.signal(0, "STOP");
        fleet.wait_for_workers(1);
        fleet.wait_for_progress();
        fleet.signal(0, "CONT");
        fleet.wait_for_workers(2);
        fleet.wait_for_progress();
    });
}

#[test]
fn a_drained_worker_ends_without_disturbing_its_clients() {
    let dir = dataset();
    let mut fleet = Fleet::new(&dir, 2);
    fleet.wait_for_workers(2);
    read_during(&fleet.url("data"), &dir.path("data"), &[shuffled()], || {
        fleet.signal(0, "TERM");
        fleet.wait_for_end();
        let last = fleet.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
        fleet.start_worker();
        fleet.wait_for_workers(2);
        let drain = format!("onefold-serve drain {last} --master {}", fleet.address());
        assert_eq!(fleet.command(&drain).json()["address"], last);
        fleet.wait_for_end();
    });
}

/// Draining applies to a process, not to a later process at the same address.
#[test]
fn another_process_takes_the_address_of_a_drained_one() {
    let dir = dataset();
    let mut fleet = Fleet::new(&dir, 0);
    let address = format!("127.0.0.1:{}", free_port());
    fleet.of_workers = format!("--memory-limit 256MiB --listen {address}");
    let mut processes = BTreeSet::new();
    for _ in 0..3 {
        fleet.start_worker();
        let names = |status: &Value| -> BTreeSet<String> {
            let workers = status["workers"].as_array().unwrap().iter();
            workers.map(|worker| worker["process"].as_str().unwrap().to_owned()).collect()
        };
        let status =
            fleet.wait_for("another process is there", |status| !names(status).is_subset(&processes));
        processes.extend(names(&status));
        fleet.command(&format!("onefold-read digest {}", fleet.url("data"))).works();
        fleet.command(&format!("onefold-serve drain {address} --master {}", fleet.address())).works();
        fleet.wait_for_end();
    }
    assert_eq!(processes.len(), 3);
}

#[test]
fn a_failing_object_store_changes_nothing() {
    let dir = dataset();
    let server = S3Server::start();
    for (name, bytes) in onefold_tests::files_below(&dir.path("data")) {
        server.put(BUCKET, &format!("data/{}", name.display()), bytes);
    }
    let fleet = Fleet::with(&dir, 2, Some(&server), "", "");
    fleet.wait_for_workers(2);
    let url = format!("grpc://{}/s3://{BUCKET}/data", fleet.address());
    // Injects faults from the first request on, because workers cache the data that they have read.
    server.inject("", Fault::SlowDown, When::Always);
    read_during(&url, &dir.path("data"), &[shuffled()], || {
        let kinds = [Fault::SlowDown, Fault::InternalError, Fault::Reset, Fault::Truncate];
        for (number, fault) in kinds.into_iter().enumerate() {
            // Later the workers may have cached all data of the store, so that clients make progress without it. At
            // first the dataset is not even open.
            let client = (number > 0).then(|| fleet.client());
            server.reset_counters();
            server.inject("", fault, When::Always);
            fleet.wait_for("the workers meet faults", |status| {
                let is_cached = client.as_ref().is_some_and(|client| is_another_client(client, status));
                server.counters().faults >= 3 || is_cached
            });
            server.heal();
            fleet.wait_for_progress();
        }
    });
}
