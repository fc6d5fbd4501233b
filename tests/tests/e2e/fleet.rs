//! Two writers, whose processes are killed at random, and readers run at the same time. No commit is lost, and no
//! reader is disturbed.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onefold_datasets::Snapshot;
use onefold_ikjt::{Reader, ReaderOptions};
use onefold_tests::{BUCKET, Dir, S3Server, TestCommand};
use serde_json::Value;

use crate::crash::{file_names, kill_command_at};
use crate::logs::{Request, feature_columns, write_table};
use crate::samples::{
    Sample, assert_only_named_files, read_samples_at, samples_of, snapshot_numbers, unnamed_files, workers,
};

/// The number of days that each writer appends, in 20 appends by both.
const DAYS: i64 = 8;
/// The number of days of a third part of the dataset, which both writers append with the same samples.
const SHARED_DAYS: i64 = 2;
const PARTS: [&str; 3] = ["a", "b", "shared"];
/// The index of the part that both writers append.
const SHARED: usize = 2;
/// The number of samples of a day in one part.
const SAMPLES: i64 = 200;
/// The number of appends, out of ten, that are killed at a random time.
const KILLED_OF_TEN: u64 = 7;
/// The pause of a reader between two epochs and between two trainings, so that most of the processor time is the
/// writers'.
const PAUSE: Duration = Duration::from_millis(700);

const CONFIG: &str = r#"format_version = 1

[sources]
features = "features.parquet"

[samples]
query = """
SELECT request, user, age, city AS items, time, request % 3 = 0 AS clicked, 'PART' AS part FROM features
"""

[session]
user = "user"
gap = "1h"
time = "time"
order = ["request"]

[partition]
columns = ["part"]
by = "day"

[features]
clicked = { kind = "label" }
age = { kind = "dense" }
request = { kind = "sparse" }
items = { kind = "sparse", group = "user" }
"#;

/// The configuration of a model that is trained for ten epochs.
const TRAIN_CONFIG: &str = r#"format_version = 1

[data]
label = "clicked"

[train]
batch_size = 50
epochs = 10
seed = 1

[model]
bottom_mlp = [4]
top_mlp = [4, 1]
interaction = "dot"

[embedding]
dim = 4
rows = 100
pooling = "sum"
ids = "hashed"

[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.02
eps = 1e-8

[optimizer.dense]
kind = "adagrad"
learning_rate = 0.02
eps = 1e-8
"#;

/// A day in one part of the dataset, which is a partition.
#[derive(Debug, Clone, Copy)]
struct Day {
    part: usize,
    day: i64,
}

impl Day {
    /// Returns all days of a writer, in the order in which it appends them.
    fn of_writer(writer: usize) -> Vec<Self> {
        let own = (0..DAYS).map(|day| Self { part: writer, day });
        let shared = |own: Self| {
            let step = DAYS / SHARED_DAYS;
            let is_shared = own.day % step == step - 1 && own.day / step < SHARED_DAYS;
            std::iter::once(own).chain(is_shared.then_some(Self { part: SHARED, day: own.day / step }))
        };
        own.flat_map(shared).collect()
    }

    /// Returns all days of the dataset.
    fn all() -> impl Iterator<Item = Self> {
        let days = |part| if part == SHARED { SHARED_DAYS } else { DAYS };
        (0..PARTS.len()).flat_map(move |part| (0..days(part)).map(move |day| Self { part, day }))
    }

    /// Returns the name of the directory with the day's log.
    fn log(self) -> String {
        format!("{}-{}", PARTS[self.part], self.day)
    }

    fn partition(self) -> String {
        format!("part={}/date=2024-05-{:02}", PARTS[self.part], self.day + 1)
    }

    /// Returns the requests of the day. A request identifies a sample.
    fn requests(self) -> std::ops::Range<i64> {
        let first = (self.part as i64 * DAYS + self.day) * SAMPLES;
        first..first + SAMPLES
    }

    fn write_log(self, dir: &Dir) {
        // There is one sample per minute, and a user returns after 37 minutes.
        let row = |i: i64| Request {
            request: self.requests().start + i,
            user: i % 37,
            visit: "",
            minute: self.day * 24 * 60 + i,
            age: (i % 37) as f64,
            city: Some(i % 37 + 100 * self.day),
            history: None,
        };
        let rows: Vec<Request> = (0..SAMPLES).map(row).collect();
        write_table(&dir.path(format!("{}/features.parquet", self.log())), feature_columns(&rows));
        dir.write(format!("{}/dataset.toml", self.log()), CONFIG.replace("PART", PARTS[self.part]));
    }
}

/// The location of the dataset: on the local disk, or on a server that stores it in a directory of files.
struct Place<'a> {
    dir: &'a Dir,
    location: &'static str,
    folder: PathBuf,
    server: Option<&'a S3Server>,
}

impl Place<'_> {
    fn command(&self, line: &str) -> TestCommand {
        let command = self.dir.command(&line.replace("DATASET", self.location));
        match self.server {
            Some(server) => command.with_s3(server),
            None => command,
        }
    }
}

/// Random numbers that do not depend on the machine (SplitMix64, Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        onefold_datasets::digest::scramble(self.0)
    }
}

/// The results of a writer.
#[derive(Debug, Default)]
struct Written {
    /// The acknowledged snapshot of each partition.
    acknowledged: BTreeMap<String, u64>,
    /// The number of appends that were to be killed.
    kills: usize,
    /// The number of appends that were killed before they ended.
    killed: usize,
    /// The number of appends that were rejected because the other writer had changed the same partition.
    conflicts: usize,
}

/// Appends all days of a writer. Most appends are first killed: when their first file appears, or at a random check
/// among the first `looks` checks, which is the number of checks during a whole append.
fn append_days(place: &Place<'_>, writer: usize, looks: u64) -> Written {
    let mut random = Random(writer as u64 + 1);
    let mut written = Written::default();
    for day in Day::of_writer(writer) {
        let append = || {
            place.command(&format!(
                "onefold-ingest append {}/dataset.toml --out DATASET --threads 1",
                day.log()
            ))
        };
        if random.next() % 10 < KILLED_OF_TEN {
            let (look, looked) = (random.next() % looks, Cell::new(0));
            let folder = place.folder.join("data").join(day.partition());
            let before = file_names(&folder);
            let at_file = random.next().is_multiple_of(3);
            let moment = || match at_file {
                true => !file_names(&folder).is_subset(&before),
                false => looked.replace(looked.get() + 1) >= look,
            };
            written.kills += 1;
            written.killed += usize::from(kill_command_at(append(), moment));
        }
        let mut output = append().arg("--json").output();
        while !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            // Only the other writer can have been faster. It has then succeeded, so the next try does not have to
            // wait.
            assert!(day.part == SHARED && stderr.contains("another writer"), "{day:?}: {stderr}");
            written.conflicts += 1;
            output = append().arg("--json").output();
        }
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        written.acknowledged.insert(day.partition(), summary["snapshot"].as_u64().unwrap());
    }
    written
}

/// Reads the newest snapshot repeatedly in a separate process until `done`. Returns the number of samples of each
/// epoch.
fn read_newest(place: &Place<'_>, done: &AtomicBool) -> Vec<u64> {
    let mut epochs = Vec::new();
    while !done.load(Ordering::Relaxed) {
        let epoch = place.command("onefold-read bench DATASET --batch-size 64 --threads 1").json();
        epochs.push(epoch["samples"].as_u64().unwrap());
        std::thread::sleep(PAUSE);
    }
    epochs
}

/// Trains ten epochs on the first snapshot repeatedly until `done`. Returns the number of runs.
fn train_pinned(place: &Place<'_>, done: &AtomicBool) -> usize {
    let mut first = None;
    let mut runs = 0;
    while runs == 0 || !done.load(Ordering::Relaxed) {
        let run = format!("run-{runs}");
        let line = format!("onefold-train run train.toml --data DATASET --at 1 --out {run} --threads 1");
        let trained = place.command(&line).json();
        assert_eq!(trained["samples"].as_i64(), Some(10 * SAMPLES));
        let losses = trained["losses"].clone();
        assert_eq!(
            first.get_or_insert_with(|| losses.clone()),
            &losses,
            "a commit has changed what a run reads"
        );
        runs += 1;
        std::thread::sleep(PAUSE);
    }
    runs
}

/// Reads one snapshot repeatedly until `done`, and checks that the samples never change. Returns the number of
/// epochs.
fn read_pinned(dataset: &Path, done: &AtomicBool) -> usize {
    let reader = Reader::open(dataset, ReaderOptions::new(64), &workers(1)).unwrap();
    let read = || -> Vec<Sample> {
        reader.batches().unwrap().flat_map(|step| samples_of(&step.unwrap().batch)).collect()
    };
    let (first, mut epochs) = (read(), 1);
    while epochs < 10 || !done.load(Ordering::Relaxed) {
        assert!(read() == first, "a commit has changed what an open reader reads");
        epochs += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    epochs
}

/// Returns the requests in a snapshot, and checks that each sample has a different one.
fn requests(dataset: &Path, snapshot: u64) -> BTreeSet<i64> {
    let samples = read_samples_at(dataset, snapshot);
    let requests: BTreeSet<i64> = samples
        .iter()
        .flat_map(|sample| sample.sparse.iter().filter(|(name, _)| name == "request").map(|(_, ids)| ids[0]))
        .collect();
    assert_eq!(requests.len(), samples.len(), "a sample is there twice");
    requests
}

/// Checks that the history contains every commit, and that each snapshot has the samples of the previous one and
/// those that it added.
fn check_history(place: &Place<'_>, acknowledged: &BTreeMap<String, u64>) {
    let history = place.command("onefold-ingest history DATASET").json();
    let history = history["snapshots"].as_array().unwrap();
    let numbers: Vec<u64> = history.iter().map(|entry| entry["snapshot"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=Day::all().count() as u64).collect::<Vec<_>>());
    let mut committed: BTreeMap<String, u64> = BTreeMap::new();
    let mut before = BTreeSet::new();
    let newest = numbers.len() as u64;
    for (entry, number) in history.iter().zip(numbers) {
        let partitions = entry["partitions_written"].as_array().unwrap();
        let [Value::String(partition)] = partitions.as_slice() else { panic!("{partitions:?}") };
        assert_eq!(committed.insert(partition.clone(), number), None, "`{partition}` was committed twice");
        // Verifying each snapshot in a separate process would take longer than the rest of the test.
        if number.is_multiple_of(5) || number == newest {
            let verified = place.command(&format!("onefold-ingest verify DATASET --at {number}")).json();
            assert_eq!(verified["samples"], entry["samples"]);
        }
        let now = requests(&place.folder, number);
        assert_eq!(entry["samples"].as_u64(), Some(now.len() as u64));
        assert!(now.is_superset(&before), "snapshot {number} has lost samples");
        assert_eq!((now.len() - before.len()) as i64, SAMPLES);
        assert_eq!(entry["samples_gained"].as_i64(), Some(SAMPLES));
        before = now;
    }
    let partitions = |of: &BTreeMap<String, u64>| of.keys().cloned().collect::<Vec<_>>();
    assert_eq!(partitions(&committed), partitions(acknowledged));
    // A killed append may have committed. In this case the next append acknowledges that snapshot or a later one.
    let lost = acknowledged.iter().find(|(partition, told)| committed[*partition] > **told);
    assert_eq!(lost, None, "told before it was committed");
    let all: BTreeSet<i64> = Day::all().flat_map(Day::requests).collect();
    assert!(before == all, "samples are lost");
}

/// Runs two writers, whose processes are killed, together with readers of the newest and of the first snapshot.
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn check_fleet(place: &Place<'_>) {
    Day::all().for_each(|day| day.write_log(place.dir));
    place.dir.write("train.toml", TRAIN_CONFIG);
    // The readers need a dataset, and the kills need the number of checks during an append.
    let first = Day { part: 0, day: 0 };
    let append = format!("onefold-ingest append {}/dataset.toml --out DATASET --threads 1", first.log());
    let looks = Cell::new(0);
    kill_command_at(place.command(&append), || {
        looks.set(looks.get() + 1);
        false
    });
    assert_eq!(snapshot_numbers(&place.folder), [1], "the first append has ended");
    let (looks, done) = (looks.get(), AtomicBool::new(false));
    let (written, epochs, pinned, runs) = std::thread::scope(|scope| {
        let newest = scope.spawn(|| read_newest(place, &done));
        let pinned = scope.spawn(|| read_pinned(&place.folder, &done));
        let trained = scope.spawn(|| train_pinned(place, &done));
        let writers = [0, 1].map(|writer| scope.spawn(move || append_days(place, writer, looks)));
        let written = writers.map(std::thread::ScopedJoinHandle::join);
        // The readers must end even if a writer fails.
        done.store(true, Ordering::Relaxed);
        (written, newest.join().unwrap(), pinned.join().unwrap(), trained.join().unwrap())
    });
    let written = written.map(Result::unwrap);
    let sum = |of: fn(&Written) -> usize| written.iter().map(of).sum::<usize>();
    let (kills, killed) = (sum(|written| written.kills), sum(|written| written.killed));
    println!(
        "{}: {kills} kills tried, {killed} of them in time, {} conflicts; meanwhile {} epochs of the newest snapshot, \
         {pinned} of the first, and {runs} trainings of ten epochs",
        place.location,
        sum(|written| written.conflicts),
        epochs.len(),
    );
    assert!(killed >= 5, "hardly an append was killed: {written:?}");
    assert!(epochs.len() >= 2, "hardly anything was read meanwhile");
    assert!(epochs.is_sorted(), "a commit was lost for a while: {epochs:?}");
    assert!(epochs.iter().all(|samples| samples % SAMPLES as u64 == 0), "half a commit was read: {epochs:?}");

    let [a, b] = written.map(|written| written.acknowledged);
    let mut acknowledged = a;
    for (partition, told) in b {
        let told = acknowledged.get(&partition).map_or(told, |other| told.min(*other));
        acknowledged.insert(partition, told);
    }
    check_history(place, &acknowledged);
    check_vacuum(place);
}

/// A vacuum removes the files of killed writers, while a reader of a kept snapshot continues.
fn check_vacuum(place: &Place<'_>) {
    let dataset = &place.folder;
    let newest = Snapshot::load(dataset).unwrap();
    assert!(!unnamed_files(dataset).is_empty(), "no append was killed while it wrote");
    let samples = requests(dataset, newest.snapshot);
    let (done, kept) = (AtomicBool::new(false), newest.snapshot - 2);
    std::thread::scope(|scope| {
        let reader = scope.spawn({
            let done = &done;
            move || {
                let read = format!("onefold-read bench DATASET --batch-size 64 --threads 1 --at {kept}");
                let mut epochs = 0;
                while epochs < 3 || !done.load(Ordering::Relaxed) {
                    place.command(&read).works();
                    epochs += 1;
                }
            }
        });
        let vacuumed = place.command("onefold-ingest vacuum DATASET --keep 3 --older-than 0s").json();
        assert_eq!(vacuumed["snapshots_removed"].as_array().map(Vec::len), Some(kept as usize - 1));
        assert!(vacuumed["files_removed"].as_u64() > Some(0));
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_only_named_files(dataset);
    assert_eq!(snapshot_numbers(dataset), (newest.snapshot - 2..=newest.snapshot).collect::<Vec<_>>());
    for number in snapshot_numbers(dataset) {
        let verified = place.command(&format!("onefold-ingest verify DATASET --at {number}")).json();
        assert_eq!(verified["warnings"], serde_json::json!([]));
    }
    let history = place.command("onefold-ingest history DATASET").json();
    assert_eq!(history["snapshots"].as_array().map(Vec::len), Some(3));
    assert!(requests(dataset, newest.snapshot) == samples);
}

#[test]
fn killed_writers_lose_no_commit_and_disturb_no_reader() {
    let dir = Dir::new();
    check_fleet(&Place { dir: &dir, location: "dataset", folder: dir.path("dataset"), server: None });
}

#[test]
fn killed_writers_lose_no_commit_in_a_store() {
    let (dir, server) = (Dir::new(), S3Server::start());
    let folder = server.file(BUCKET, "ds");
    check_fleet(&Place { dir: &dir, location: "s3://data/ds", folder, server: Some(&server) });
}
