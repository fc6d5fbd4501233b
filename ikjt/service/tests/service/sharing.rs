//! What workers compute once for several jobs and epochs, and where they keep it.

use std::path::Path;

use onefold_ikjt::{Dedupe, Reader, ReaderOptions, Shuffle, Within};
use onefold_tests::{BUCKET, S3Server};

use crate::fleet::Fleet;
use crate::reading::{bytes_of, dataset, workers};

/// Reads an epoch by `url` and from `local`, and compares every byte.
fn compare(url: &str, local: &Path, options: &ReaderOptions, epoch: u64) {
    let read =
        |location: &Path| bytes_of(&Reader::open(location, options.clone(), &workers()).unwrap(), epoch, 0);
    assert!(read(Path::new(url)) == read(local), "epoch {epoch}");
}

/// The sum of a figure over the workers.
fn sum(fleet: &Fleet<'_>, figure: &str) -> u64 {
    // Workers tell their figures twice a second.
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let status = fleet.status();
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
        ReaderOptions { dedupe: Dedupe::Window, ..ReaderOptions::new(96) },
    ];
    for workers in [1, 3] {
        let fleet = Fleet::new(&dir, workers);
        fleet.wait_for_workers(workers);
        let url = fleet.url("data");
        std::thread::scope(|scope| {
            for job in &jobs {
                scope.spawn(|| (0..2).for_each(|epoch| compare(&url, &dir.path("data"), job, epoch)));
            }
        });
        assert!(sum(&fleet, "decoded_hits") > 0, "{workers} workers: {}", fleet.status());
        // Whoever comes first verifies a file for all.
        let bytes: u64 = onefold_tests::files_below(&dir.path("data/data"))
            .into_values()
            .map(|bytes| bytes.len() as u64)
            .sum();
        let verified = sum(&fleet, "bytes_verified");
        assert!(verified <= workers as u64 * bytes, "{verified} bytes of {bytes} by {workers} workers");
    }
}

#[test]
fn an_epoch_that_repeats_is_computed_once() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    for epoch in 0..3 {
        compare(&fleet.url("data"), &dir.path("data"), &ReaderOptions::new(64), epoch);
    }
    let (computed, sent) = (sum(&fleet, "batches_computed"), sum(&fleet, "batches_sent"));
    assert!(sum(&fleet, "block_hits") > 0 && sent >= 3 * 94, "{}", fleet.status());
    assert!(computed < 2 * 94, "{computed} batches computed for {sent} sent");
}

#[test]
fn what_does_not_fit_into_memory_comes_from_disk() {
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
    assert!(sum(&fleet, "disk_hits") > 0, "{}", fleet.status());
    let folder = dir.path("cache/cache-0");
    let items = || {
        std::fs::read_dir(&folder).unwrap().filter(|entry| {
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
fn what_came_from_an_object_store_is_kept_encoded() {
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
    assert!(sum(&fleet, "encoded_hits") > 0, "{}", fleet.status());
}
