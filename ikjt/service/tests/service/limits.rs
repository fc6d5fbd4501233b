//! Tests of sharing between jobs, and of the memory of workers.

use std::path::Path;

use onefold_ikjt::{Batches, Dedupe, PackedBatch, Reader, ReaderOptions, Shuffle, Within, Workers};
use onefold_tests::Dir;

use crate::fleet::Fleet;
use crate::reading::{bytes_of, dataset, workers};

/// Checks that a paused job keeps its share, and does not block other jobs.
#[test]
fn a_paused_job_does_not_block_others() {
    let dir = dataset();
    let mut fleet = Fleet::new(&dir, 0);
    // This is less memory than the jobs would use for reading ahead.
    fleet.of_workers = "--memory-limit 6MiB".to_owned();
    fleet.start_worker();
    fleet.wait_for_workers(1);
    let shuffled = |seed: u64| {
        let shuffle = Some(Shuffle { seed, row_groups: 2, within: Within::Epoch });
        ReaderOptions { dedupe: Dedupe::Off, shuffle, ..ReaderOptions::new(64) }
    };
    let open = |location: &Path, seed: u64| Reader::open(location, shuffled(seed), &workers()).unwrap();
    let url = fleet.url("data");
    let slow: Vec<Reader> = (0..3).map(|seed| open(Path::new(&url), seed)).collect();
    let mut standing: Vec<_> = slow
        .iter()
        .map(|reader| {
            let mut batches = reader.resume_packed_every(1, &reader.position(0)).unwrap();
            let first = batches.next().unwrap().unwrap().batch.memory().to_vec();
            (batches, vec![first])
        })
        .collect();
    for epoch in 0..2 {
        let (served, local) = (open(Path::new(&url), 9), open(&dir.path("data"), 9));
        assert!(bytes_of(&served, epoch, 0) == bytes_of(&local, epoch, 0), "epoch {epoch}");
    }
    for (seed, (batches, read)) in standing.iter_mut().enumerate() {
        read.extend(batches.map(|step| step.unwrap().batch.memory().to_vec()));
        let expected = bytes_of(&open(&dir.path("data"), seed as u64), 0, 0);
        assert!(read.iter().eq(expected.iter().map(|(bytes, _)| bytes)), "the job {seed} that stood still");
    }
}

/// The memory limit in bytes of a worker that reads [`more`].
const LIMIT: u64 = 256 << 20;

/// Builds a dataset that is larger than a worker's memory.
fn more(dir: &Dir) {
    dir.command("onefold-data generate --workload rm1 --samples 120000 --seed 5 --out more-logs").works();
    dir.command("onefold-ingest build more-logs/dataset.toml --layout folded --out more").works();
}

/// Checks that the peak memory of a worker exceeds its limit by at most 10 %.
#[track_caller]
fn check_peak(fleet: &Fleet, what: &str) {
    let peak = fleet.peak_memory(0);
    assert!(peak <= LIMIT / 10 * 11, "{what}: {} MiB", peak >> 20);
}

/// Measures the memory of a worker with paused jobs, with an additional running job, and without jobs.
#[test]
fn the_memory_of_a_worker_does_not_grow_with_jobs() {
    let dir = dataset();
    more(&dir);
    // The clients in this process use little memory.
    let few = Workers::new(2, 8 << 20).unwrap();
    for jobs in [1, 8, 64] {
        let mut fleet = Fleet::new(&dir, 0);
        fleet.of_workers = format!("--memory-limit {LIMIT}");
        fleet.start_worker();
        fleet.wait_for_workers(1);
        let url = fleet.url("more");
        let open = |seed: u64| {
            let shuffle = Some(Shuffle { seed, row_groups: 1, within: Within::Epoch });
            let options = ReaderOptions { dedupe: Dedupe::Off, shuffle, ..ReaderOptions::new(64) };
            Reader::open(Path::new(&url), options, &few).unwrap()
        };
        let stand_still = |seed: u64| -> Batches<PackedBatch> {
            let reader = open(seed);
            let mut batches = reader.resume_packed_every(1, &reader.position(0)).unwrap();
            batches.next().unwrap().unwrap();
            batches
        };
        let standing: Vec<_> = (0..jobs).map(stand_still).collect();
        check_peak(&fleet, &format!("{jobs} jobs stand still"));
        let samples = open(jobs).epoch(0).unwrap().map(|step| step.unwrap().batch.size());
        assert_eq!(samples.sum::<usize>(), 120_000);
        check_peak(&fleet, &format!("one job runs beside {jobs}"));
        drop(standing);
        fleet.wait_for("nobody reads a block", |status| {
            let workers = status["workers"].as_array().unwrap();
            workers.iter().all(|worker| worker["blocks"] == 0)
        });
        check_peak(&fleet, &format!("{jobs} jobs were dropped"));
    }
}

/// Checks the peak memory of a worker process with several jobs, and with caches in memory and on disk.
#[test]
fn a_worker_stays_within_its_memory_limit() {
    let dir = dataset();
    more(&dir);
    let mut fleet = Fleet::new(&dir, 0);
    fleet.of_workers = format!("--memory-limit {LIMIT} --cache-dir {}", dir.path("cache").display());
    fleet.start_worker();
    fleet.wait_for_workers(1);
    let url = fleet.url("more");
    std::thread::scope(|scope| {
        for job in 0..3 {
            let url = &url;
            scope.spawn(move || {
                let shuffle = Some(Shuffle { seed: job, row_groups: 1, within: Within::Epoch });
                let options = ReaderOptions { dedupe: Dedupe::Window, shuffle, ..ReaderOptions::new(512) };
                let reader = Reader::open(Path::new(url), options, &workers()).unwrap();
                let samples = |epoch: u64| {
                    let batches = reader.epoch(epoch).unwrap();
                    batches.map(|step| step.unwrap().batch.size()).sum::<usize>()
                };
                (0..2).for_each(|epoch| assert_eq!(samples(epoch), 120_000));
            });
        }
    });
    check_peak(&fleet, "three jobs run");
    let peak = fleet.peak_memory(0);
    assert!(peak > LIMIT / 4, "it did not come near its limit: {} MiB", peak >> 20);
}
