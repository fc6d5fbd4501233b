//! The cost of a commit to a store, after few commits and after many.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use onefold_datasets::{Commit, DatasetWriter, PartitionKey, Snapshot, WriterOptions};
use onefold_tests::{BUCKET, Counters, Dir, S3Server};

use crate::logs::write_table;
use crate::row_groups::{SESSION_CONFIG, session_rows};

/// An upper limit for the size of a snapshot's references to manifests, in bytes: 40 references of 800 bytes.
const MANIFESTS_BYTES: u64 = 40 * 800;
/// A commit that merges manifests: the first one does so when there are 33 from before, and then every 32nd.
const MERGING: u64 = 194;

/// Returns the partition that commit `number` adds.
fn part(number: u64) -> String {
    format!("{number:05}")
}

/// Appends partitions to the dataset in `folder`, which contains the objects of a server, until it has `snapshots`
/// snapshots.
fn commit_until(folder: &Path, snapshots: u64) {
    let head = Snapshot::load_head(folder).unwrap();
    let (schema, rows) = session_rows(&[3]);
    for number in head.snapshot + 1..=snapshots {
        let options =
            WriterOptions { commit: Commit::Append, layout: head.layout, ..WriterOptions::new(head.order) };
        let mut writer = DatasetWriter::create(folder, schema.clone(), options).unwrap();
        writer.write(&PartitionKey::new(vec![("part".to_owned(), part(number))]), &rows).unwrap();
        let written = writer.finish().unwrap();
        assert_eq!(written.snapshot.snapshot, number);
        assert_eq!(written.snapshot.statistics.partitions, number);
    }
}

/// Appends one partition to the dataset on a server, as a person does, with the number `number`. Returns the number
/// of requests.
fn append(dir: &Dir, server: &S3Server, number: u64) -> Counters {
    let part: ArrayRef = Arc::new(StringArray::from(vec![part(number); 3]));
    let numbers = || -> ArrayRef { Arc::new(Int64Array::from(vec![0, 1, 2])) };
    let times =
        Arc::new(TimestampMicrosecondArray::from_iter_values((0..3).map(|i| 1_714_521_600_000_000 + i)));
    let session: ArrayRef = Arc::new(Int64Array::from(vec![1; 3]));
    let columns = vec![
        ("session", session),
        ("time", times as ArrayRef),
        ("label", Arc::new(Int64Array::from(vec![0, 1, 0])) as ArrayRef),
        ("request", numbers()),
        ("part", part),
    ];
    write_table(&dir.path("log.parquet"), columns);
    dir.write("dataset.toml", SESSION_CONFIG);
    server.reset_counters();
    let append = "onefold-ingest append dataset.toml --out s3://data/ds --threads 1";
    let written = dir.command(append).with_s3(server).json();
    assert_eq!(written["snapshot"].as_u64(), Some(number));
    assert_eq!((written["partitions"].as_u64(), written["files"].as_u64()), (Some(number), Some(number)));
    server.counters()
}

#[test]
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn a_commit_costs_as_much_after_many_commits_as_after_few() {
    let (dir, server) = (Dir::new(), S3Server::start());
    let folder = server.file(BUCKET, "ds");
    append(&dir, &server, 1);
    let costs = [10, 100, MERGING, 200, 400].map(|number| {
        commit_until(&folder, number - 1);
        let cost = append(&dir, &server, number);
        println!("commit {number}: {cost:?}");
        (number, cost)
    });
    let [(first, few), many @ ..] = costs;
    for (number, cost) in many {
        if number == MERGING {
            assert!(cost.requests > few.requests && cost.bytes_received < 2_000_000, "{cost:?}");
            continue;
        }
        // The number of requests does not depend on the number of commits. On a slow machine, one request may be
        // repeated.
        let requests = few.requests..=few.requests + 1;
        assert!(requests.contains(&cost.requests), "{cost:?} {few:?}");
        for (now, then) in [(cost.bytes_sent, few.bytes_sent), (cost.bytes_received, few.bytes_received)] {
            assert!(now < then + then / 8 + MANIFESTS_BYTES, "{now} bytes, {then} after {first} commits");
        }
    }
    let verified = dir.command("onefold-ingest verify s3://data/ds --at 200").with_s3(&server).json();
    assert_eq!(verified["samples"].as_u64(), Some(600));
    check_opening(&dir, &server);
}

/// Opening a dataset reads the newest snapshot and the lists of row groups in its manifests, but no statistics and no
/// data files, however many partitions there are. A command that opens the dataset twice, and finds nothing to do,
/// shows this.
fn check_opening(dir: &Dir, server: &S3Server) {
    let folder = server.file(BUCKET, "ds");
    let Snapshot { snapshot, manifests, .. } = Snapshot::load_head(&folder).unwrap();
    let lists: u64 = manifests.iter().map(|entry| entry.bytes - entry.statistics_bytes).sum();
    let head = fs_err::metadata(folder.join(format!("snapshots/{snapshot:08}.json"))).unwrap().len();
    server.reset_counters();
    let opened =
        dir.command("onefold-ingest compact s3://data/ds --partition part=00200").with_s3(server).json();
    assert_eq!((opened["changed"].as_bool(), opened["snapshot"].as_u64()), (Some(false), Some(snapshot)));
    let Counters { gets, lists: listings, bytes_sent, .. } = server.counters();
    // The snapshot is read twice, and found three times: by its hint and a listing. On a slow machine, one request may
    // be repeated.
    assert!(gets <= manifests.len() as u64 + 6 && listings <= 4, "{gets} and {listings} requests");
    assert!(
        bytes_sent < lists + 3 * head + 10_000,
        "{bytes_sent} bytes, {lists} of lists and {head} of the snapshot"
    );
}
