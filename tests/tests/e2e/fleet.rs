//! Two writers and a reader at once, and the writers are killed at random: no commit is lost, no reader is disturbed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use onefold_datasets::Snapshot;
use onefold_ikjt::{Reader, ReaderOptions};
use onefold_tests::Dir;
use serde_json::Value;

use crate::crash::{file_names, kill_at};
use crate::logs::{Request, feature_columns, write_table};
use crate::samples::{
    Sample, assert_only_named_files, read_samples_at, samples_of, snapshot_numbers, unnamed_files,
};

/// Days that each writer appends.
const DAYS: i64 = 5;
const WRITERS: [&str; 2] = ["a", "b"];
/// Samples of a day of a writer.
const SAMPLES: i64 = 400;

const CONFIG: &str = r#"format_version = 1

[sources]
features = "features.parquet"

[samples]
query = "SELECT request, user, city AS items, time, request % 3 = 0 AS clicked, 'WRITER' AS writer FROM features"

[session]
user = "user"
gap = "1h"
time = "time"
order = ["request"]

[partition]
columns = ["writer"]
by = "day"

[features]
clicked = { kind = "label" }
request = { kind = "sparse" }
items = { kind = "sparse", group = "user" }
"#;

/// The name of a writer's log of a day, and the partition that it becomes.
fn log_and_partition(writer: &str, day: i64) -> (String, String) {
    (format!("{writer}-{day}"), format!("writer={writer}/date=2024-05-{:02}", day + 1))
}

/// The number of the first request of a day of writer number `writer`; requests tell samples apart.
fn first_request(writer: usize, day: i64) -> i64 {
    (writer as i64 * DAYS + day) * SAMPLES
}

/// Writes the log of a day of a writer.
fn write_log(dir: &Dir, writer: usize, day: i64) {
    let (log, _) = log_and_partition(WRITERS[writer], day);
    // A sample a minute; a user comes back after 37 minutes.
    let row = |i: i64| Request {
        request: first_request(writer, day) + i,
        user: i % 37,
        visit: "",
        minute: day * 24 * 60 + i,
        age: 30.0,
        city: Some(i % 37 + 100 * day),
        history: None,
    };
    let rows: Vec<Request> = (0..SAMPLES).map(row).collect();
    write_table(&dir.path(format!("{log}/features.parquet")), feature_columns(&rows));
    dir.write(format!("{log}/dataset.toml"), CONFIG.replace("WRITER", WRITERS[writer]));
}

/// Random numbers that do not depend on the machine (SplitMix64, Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        onefold_datasets::digest::scramble(self.0)
    }

    /// A random part of `duration`.
    fn part_of(&mut self, duration: Duration) -> Duration {
        duration * (self.next() % 1000) as u32 / 1000
    }
}

/// What a writer did.
#[derive(Debug, Default)]
struct Written {
    /// The snapshot that was acknowledged for each partition.
    acknowledged: BTreeMap<String, u64>,
    /// Appends that were killed before their end.
    killed: usize,
}

/// Appends all days of a writer. Each append is killed twice first: at a random moment, and when its first file appears.
fn append_days(dir: &Dir, writer: usize, duration: Duration) -> Written {
    let mut random = Random(writer as u64);
    let mut written = Written::default();
    for day in 0..DAYS {
        let (log, partition) = log_and_partition(WRITERS[writer], day);
        let append = format!("onefold-ingest append {log}/dataset.toml --out dataset --threads 1");
        let (started, delay) = (Instant::now(), random.part_of(duration));
        written.killed += usize::from(kill_at(dir, &append, || started.elapsed() >= delay));
        let folder = dir.path(format!("dataset/data/{partition}"));
        let before = file_names(&folder);
        let writes = || !file_names(&folder).is_subset(&before);
        written.killed += usize::from(kill_at(dir, &append, writes));
        // Other partitions are written all the time, but never this one: it must succeed.
        let summary = dir.command(&append).json();
        written.acknowledged.insert(partition, summary["snapshot"].as_u64().unwrap());
    }
    written
}

/// Reads epochs by a process of its own, again and again until `done`; gives the samples of each.
fn read_epochs(dir: &Dir, done: &AtomicBool) -> Vec<u64> {
    let mut epochs = Vec::new();
    while !done.load(Ordering::Relaxed) {
        let epoch = dir.command("onefold-read bench dataset --batch-size 64 --threads 1").json();
        epochs.push(epoch["samples"].as_u64().unwrap());
    }
    epochs
}

/// Reads one snapshot again and again until `done`, and each time as at first.
fn read_pinned(dataset: &Path, done: &AtomicBool) -> usize {
    let reader = Reader::open(dataset, ReaderOptions { threads: 1, ..ReaderOptions::new(64) }).unwrap();
    let read = || -> Vec<Sample> {
        reader.batches().unwrap().map(Result::unwrap).flat_map(|batch| samples_of(&batch)).collect()
    };
    let (first, mut epochs) = (read(), 1);
    while !done.load(Ordering::Relaxed) {
        assert!(read() == first, "a commit has changed what an open reader reads");
        epochs += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    epochs
}

/// The requests of a snapshot, of which each sample has its own.
fn requests(dataset: &Path, snapshot: u64) -> BTreeSet<i64> {
    let samples = read_samples_at(dataset, snapshot);
    let requests: BTreeSet<i64> = samples
        .iter()
        .flat_map(|sample| sample.sparse.iter().filter(|(name, _)| name == "request").map(|(_, ids)| ids[0]))
        .collect();
    assert_eq!(requests.len(), samples.len(), "a sample is there twice");
    requests
}

/// Every commit is in the history, in which each snapshot has the samples of the one before and those that it gained.
fn check_history(dir: &Dir, acknowledged: &BTreeMap<String, u64>) {
    let history = dir.command("onefold-ingest history dataset").json();
    let history = history["snapshots"].as_array().unwrap();
    let dataset = dir.path("dataset");
    let numbers: Vec<u64> = history.iter().map(|entry| entry["snapshot"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=history.len() as u64).collect::<Vec<_>>());
    let mut committed: BTreeMap<String, u64> = BTreeMap::new();
    let mut before = BTreeSet::new();
    for (entry, number) in history.iter().zip(numbers) {
        let partitions = entry["partitions_written"].as_array().unwrap();
        let [Value::String(partition)] = partitions.as_slice() else { panic!("{partitions:?}") };
        assert_eq!(committed.insert(partition.clone(), number), None, "`{partition}` was committed twice");
        let verified = dir.command(&format!("onefold-ingest verify dataset --at {number}")).json();
        assert_eq!(verified["samples"], entry["samples"]);
        let now = requests(&dataset, number);
        assert!(now.is_superset(&before), "snapshot {number} has lost samples");
        assert_eq!((now.len() - before.len()) as i64, SAMPLES);
        assert_eq!(entry["samples_gained"].as_i64(), Some(SAMPLES));
        before = now;
    }
    let partitions = |of: &BTreeMap<String, u64>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(partitions(&committed), partitions(acknowledged));
    // A killed append may have committed; what was told by the next one is then at least that.
    let lost = acknowledged.iter().find(|(partition, told)| committed[*partition] > **told);
    assert_eq!(lost, None, "told before it was committed");
    assert!(before.into_iter().eq(0..2 * DAYS * SAMPLES), "samples are lost");
}

#[test]
fn writers_that_are_killed_lose_no_commit_and_disturb_no_reader() {
    let dir = Dir::new();
    for (writer, day) in (0..WRITERS.len()).flat_map(|writer| (0..DAYS).map(move |day| (writer, day))) {
        write_log(&dir, writer, day);
    }
    // The readers need something to read, and the kills a duration.
    let started = Instant::now();
    let (log, first) = log_and_partition(WRITERS[0], 0);
    dir.command(&format!("onefold-ingest append {log}/dataset.toml --out dataset --threads 1")).works();
    let duration = started.elapsed();
    let (dataset, done) = (dir.path("dataset"), AtomicBool::new(false));
    let (written, epochs, pinned) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_epochs(&dir, &done));
        let pinned = scope.spawn(|| read_pinned(&dataset, &done));
        let append = |writer| {
            let dir = &dir;
            scope.spawn(move || append_days(dir, writer, duration))
        };
        let writers = [append(0), append(1)];
        let written: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        // The readers must end, also if a writer has failed.
        done.store(true, Ordering::Relaxed);
        (written, reader.join().unwrap(), pinned.join().unwrap())
    });
    let written: Vec<Written> = written.into_iter().map(Result::unwrap).collect();
    let killed: usize = written.iter().map(|written| written.killed).sum();
    assert!(killed >= 5, "hardly an append was killed: {written:?}");
    assert!(epochs.len() >= 2 && pinned >= 2, "hardly anything was read meanwhile");
    assert!(epochs.is_sorted(), "a commit was lost for a while: {epochs:?}");
    assert!(epochs.iter().all(|samples| samples % SAMPLES as u64 == 0), "half a commit was read: {epochs:?}");

    let acknowledged: BTreeMap<String, u64> =
        written.into_iter().flat_map(|written| written.acknowledged).collect();
    assert!(acknowledged.contains_key(&first));
    check_history(&dir, &acknowledged);
    let newest = Snapshot::load(&dataset).unwrap();
    assert_eq!(newest.snapshot, 2 * DAYS as u64);
    assert!(!unnamed_files(&dataset).is_empty(), "no append was killed while it wrote");

    dir.command("onefold-ingest vacuum dataset --keep 3 --older-than 0s").works();
    assert_only_named_files(&dataset);
    assert_eq!(snapshot_numbers(&dataset), (newest.snapshot - 2..=newest.snapshot).collect::<Vec<_>>());
    for number in snapshot_numbers(&dataset) {
        let verified = dir.command(&format!("onefold-ingest verify dataset --at {number}")).json();
        assert_eq!(verified["warnings"], serde_json::json!([]));
    }
    assert_eq!(requests(&dataset, newest.snapshot).len() as i64, 2 * DAYS * SAMPLES);
}
