//! Tests of results that workers compute once for several jobs and epochs, and of the places where they are kept.

use std::collections::BTreeMap;
use std::path::Path;

use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::service::protocol::{CountSamples, Define, Job};
use onefold_ikjt::service::{Failure, Network, Security};
use onefold_ikjt::{Checks, Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Within};
use onefold_tests::{BUCKET, Dir, S3Server};
use serde_json::Value;

use crate::fleet::Fleet;
use crate::reading::{PIPELINE, bytes_of, dataset, number, workers};

/// Reads an epoch from `url` and from `local`, and compares every byte.
fn compare(url: &str, local: &Path, options: &ReaderOptions, epoch: u64) {
    let read =
        |location: &Path| bytes_of(&Reader::open(location, options.clone(), &workers()).unwrap(), epoch, 0);
    assert!(read(Path::new(url)) == read(local), "epoch {epoch}");
}

/// Returns the sum of a figure over the workers in the master's status. Workers report twice a second, and the status
/// omits a worker that gets no processor time for seconds, so tests wait for lower bounds.
fn sum(status: &Value, figure: &str) -> u64 {
    let workers = status["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker[figure].as_u64().unwrap()).sum()
}

#[test]
fn jobs_of_other_features_share_what_was_decoded() {
    let dir = dataset();
    let features = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    let jobs = [
        ReaderOptions { features: features(&["user_00", "user_01", "item_00"]), ..ReaderOptions::new(64) },
        ReaderOptions { features: features(&["user_01", "item_00", "item_01"]), ..ReaderOptions::new(64) },
        ReaderOptions { dedupe: Dedupe::Off, features: features(&["user_01"]), ..ReaderOptions::new(128) },
        ReaderOptions { dedupe: Dedupe::Exact, ..ReaderOptions::new(96) },
    ];
    let steps = |job: &ReaderOptions| {
        Reader::open(&dir.path("data"), job.clone(), &workers()).unwrap().steps(0).unwrap()
    };
    let batches = 2 * jobs.iter().map(steps).sum::<u64>();
    for workers in [1, 3] {
        let fleet = Fleet::new(&dir, workers);
        fleet.wait_for_workers(workers);
        let url = fleet.url("data");
        std::thread::scope(|scope| {
            for job in &jobs {
                scope.spawn(|| (0..2).for_each(|epoch| compare(&url, &dir.path("data"), job, epoch)));
            }
        });
        let status = fleet.wait_for("all batches are counted, and columns that jobs share", |status| {
            sum(status, "batches_sent") >= batches
                && sum(status, "decoded_hits") > 0
                && sum(status, "bytes_verified") > 0
        });
        // Each job verifies a column at most once per epoch. One of the jobs verifies the columns that they share.
        let bytes: u64 = onefold_tests::files_below(&dir.path("data/data"))
            .into_values()
            .map(|bytes| bytes.len() as u64)
            .sum();
        let verified = sum(&status, "bytes_verified");
        let most = 2 * jobs.len() as u64 * bytes;
        assert!(verified < most, "{verified} bytes of {bytes} by {workers} workers");
    }
}

#[test]
fn an_epoch_that_repeats_is_computed_once() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    for epoch in 0..3 {
        compare(&fleet.url("data"), &dir.path("data"), &ReaderOptions::new(64), epoch);
    }
    let status = fleet.wait_for("all batches are counted, and blocks that were kept", |status| {
        sum(status, "block_hits") > 0 && sum(status, "batches_sent") >= 3 * 94
    });
    let (computed, sent) = (sum(&status, "batches_computed"), sum(&status, "batches_sent"));
    assert!((1..2 * 94).contains(&computed), "{computed} batches computed for {sent} sent");
}

#[test]
fn jobs_with_different_checks_share_batches() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    let (url, options) = (fleet.url("data"), ReaderOptions::new(64));
    compare(&url, &dir.path("data"), &options, 0);
    let table_rows = BTreeMap::from([("user_00".to_owned(), 1)]);
    let checks = Checks { table_rows, ..Checks::default() };
    let request = ReadRequest { checks, ..options.into() };
    let reader = Reader::open(Path::new(&url), request, &workers()).unwrap();
    let error = reader.batches().unwrap().find_map(Result::err).expect("an id is outside its table");
    let text = error.to_string();
    assert!(text.contains("column `user_00`") && text.contains("outside the table's 1 rows"), "{text}");
    fleet.wait_for("the batches that were there already", |status| sum(status, "block_hits") > 0);
}

/// Checks that jobs of a sweep, whose equal pipelines are in different folders, share their batches.
#[test]
fn batches_of_a_sweep_are_computed_once() {
    let (jobs, processes) = (number("ONEFOLD_TEST_JOBS", 8), number("ONEFOLD_TEST_WORKERS", 1));
    let dir = dataset();
    let fleet = Fleet::new(&dir, processes);
    fleet.wait_for_workers(processes);
    let (url, workers) = (fleet.url("data"), workers());
    let open = |location: &Path, job: usize| {
        let folder = format!("sweep/{job}");
        dir.write(format!("{folder}/table.txt"), dir.read("table.txt"));
        dir.write(format!("{folder}/steps.toml"), format!("# Run {job} of the sweep.\n{PIPELINE}"));
        let preprocess = Some(PreprocessConfig::load(&dir.path(format!("{folder}/steps.toml"))).unwrap());
        Reader::open(location, ReaderOptions { preprocess, ..ReaderOptions::new(64) }, &workers).unwrap()
    };
    let expected = bytes_of(&open(&dir.path("data"), jobs), 0, 0);
    std::thread::scope(|scope| {
        for job in 0..jobs {
            let (url, open, expected) = (&url, &open, &expected);
            scope.spawn(move || {
                let reader = open(Path::new(url), job);
                let steps = reader.resume_packed_every(1, &reader.position(0)).unwrap().map(Result::unwrap);
                let found = steps.map(|step| step.batch.memory().to_vec());
                assert!(found.eq(expected.iter().map(|(bytes, _)| bytes.as_slice())), "job {job}");
            });
        }
    });
    let steps = expected.len() as u64;
    let status = fleet.wait_for("the batches of all jobs are counted", |status| {
        sum(status, "batches_sent") >= jobs as u64 * steps
    });
    let computed = sum(&status, "batches_computed");
    assert!(computed * 10 <= steps * 11, "{computed} batches were computed for {steps} steps of {jobs} jobs");
}

/// Checks that several workers fetch a dataset about once. Small datasets have too many footers and too few row groups
/// in a block for this.
#[test]
#[ignore = "make test-failures"]
fn workers_fetch_a_dataset_once() {
    let (samples, processes) = (number("ONEFOLD_TEST_SAMPLES", 60_000), number("ONEFOLD_TEST_WORKERS", 4));
    let dir = Dir::new();
    dir.command(&format!("onefold-data generate --workload rm1 --samples {samples} --seed 5 --out logs"))
        .works();
    dir.command("onefold-ingest build logs/dataset.toml --layout folded --buckets 128 --out data").works();
    let (server, mut bytes) = (S3Server::start(), 0);
    for (name, file) in onefold_tests::files_below(&dir.path("data")) {
        bytes += file.len() as u64;
        server.put(BUCKET, &format!("data/{}", name.display()), file);
    }
    let fleet = Fleet::with(&dir, processes, Some(&server), "", "");
    fleet.wait_for_workers(processes);
    server.reset_counters();
    let url = format!("grpc://{}/s3://{BUCKET}/data", fleet.address());
    let reader = Reader::open(Path::new(&url), ReaderOptions::new(256), &workers()).unwrap();
    let found: usize = reader.batches().unwrap().map(|step| step.unwrap().batch.size()).sum();
    assert_eq!(found, samples);
    let fetched = server.counters().bytes_sent;
    assert!(fetched * 10 <= bytes * 11, "{processes} workers fetched {fetched} bytes of {bytes}");
}

/// Checks that clients that name a dataset differently have equal jobs.
#[test]
fn jobs_share_batches_wherever_their_dataset_is() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    compare(&fleet.url("data"), &dir.path("data"), &ReaderOptions::new(64), 0);
    fs_err::os::unix::fs::symlink(dir.path("data"), dir.path("linked")).unwrap();
    for location in ["logs/../data", "linked"] {
        compare(&fleet.url(location), &dir.path("data"), &ReaderOptions::new(64), 0);
    }
    let status = fleet.wait_for("the batches of all clients", |status| sum(status, "batches_sent") >= 3 * 94);
    let computed = sum(&status, "batches_computed");
    assert!(computed < 2 * 94, "{computed} batches were computed");
}

/// Checks that cached data of a dataset is not used for a new dataset at the same location.
#[test]
fn a_dataset_that_is_built_anew_is_another_one() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    let options = ReaderOptions::new(64);
    let before = Reader::open(Path::new(&fleet.url("data")), options.clone(), &workers()).unwrap();
    compare(&fleet.url("data"), &dir.path("data"), &options, 0);
    fs_err::remove_dir_all(dir.path("data")).unwrap();
    dir.command("onefold-data generate --workload rm1 --samples 6000 --seed 4 --out other").works();
    dir.command("onefold-ingest build other/dataset.toml --layout folded --buckets 64 --out data").works();
    compare(&fleet.url("data"), &dir.path("data"), &options, 0);
    // A job of the earlier dataset, which a new worker has to open.
    let late = Fleet::new(&dir, 1);
    let job = Job {
        dataset: dir.path("data").display().to_string(),
        identity: before.identity(),
        options: ReaderOptions { snapshot: Some(before.snapshot().snapshot), ..options },
        rank: Rank::default(),
    };
    let worker = late.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
    let network = Network::new(&Security::default(), false).unwrap();
    let asked = async {
        network.ask(&worker, &Define::of(&job)).await.unwrap();
        network.ask(&worker, &CountSamples { job: job.key(), epoch: 0 }).await
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    match runtime.block_on(asked) {
        Err(Failure::Final(error)) => assert!(error.to_string().contains("built anew"), "{error}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn batches_are_compressed_on_request() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    let url = format!("{}?compression=zstd", fleet.url("data"));
    let options = ReaderOptions { dedupe: Dedupe::Window, ..ReaderOptions::new(64) };
    (0..2).for_each(|epoch| compare(&url, &dir.path("data"), &options, epoch));
}

#[test]
fn evicted_items_are_read_from_the_disk_cache() {
    let dir = dataset();
    let mut fleet = Fleet::new(&dir, 0);
    fleet.of_workers = format!("--memory-limit 4MiB --cache-dir {}", dir.path("cache").display());
    fleet.start_worker();
    fleet.wait_for_workers(1);
    let shuffle = Some(Shuffle { seed: 5, row_groups: 2, within: Within::Epoch });
    for epoch in 0..3 {
        let options = ReaderOptions { shuffle, ..ReaderOptions::new(64) };
        compare(&fleet.url("data"), &dir.path("data"), &options, epoch);
        compare(&fleet.url("data"), &dir.path("data"), &ReaderOptions::new(64), epoch);
    }
    fleet.wait_for("something came from disk", |status| sum(status, "disk_hits") > 0);
    let folder = dir.path("cache/cache-0");
    let items = || {
        fs_err::read_dir(&folder).unwrap().filter(|entry| {
            entry
                .as_ref()
                .is_ok_and(|entry| entry.path().extension().is_some_and(|extension| extension == "item"))
        })
    };
    assert!(items().count() > 0);
    fleet.signal(0, "TERM");
    fleet.wait_for_end();
    assert_eq!(items().count(), 0, "nothing is left of a worker that ended");
}

#[test]
fn columns_from_an_object_store_are_cached_encoded() {
    let dir = dataset();
    let server = S3Server::start();
    for (name, bytes) in onefold_tests::files_below(&dir.path("data")) {
        server.put(BUCKET, &format!("data/{}", name.display()), bytes);
    }
    let mut fleet = Fleet::with(&dir, 0, Some(&server), "", "");
    fleet.of_workers = "--memory-limit 6MiB".to_owned();
    fleet.start_worker();
    fleet.wait_for_workers(1);
    let shuffle = Some(Shuffle { seed: 5, row_groups: 2, within: Within::Epoch });
    let options = ReaderOptions { shuffle, ..ReaderOptions::new(64) };
    let url = format!("grpc://{}/s3://{BUCKET}/data", fleet.address());
    for epoch in 0..3 {
        compare(&url, &dir.path("data"), &options, epoch);
    }
    fleet.wait_for("what came from the store was kept", |status| sum(status, "encoded_hits") > 0);
}
