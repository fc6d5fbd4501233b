//! Random sequences of the commands that change a dataset, with writers that are killed. After each command, the dataset
//! has the digest of one that is built anew from the logs as they are then, and older snapshots have theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{
    ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::Int64Type;
use onefold_base::progress::Silent;
use onefold_datasets::Snapshot;
use onefold_datasets::verify::{VerifyOptions, verify};
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;

use crate::logs::Dir;

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const MINUTE: i64 = 60_000_000;
const REQUESTS_OF_DAY: i64 = 10;
const USERS: i64 = 6;

/// The features that come and go: the line of each in the configuration, after its name.
const FEATURES: [&str; 4] = [
    "{ kind = \"sparse\", group = \"user\" }",
    "{ kind = \"sparse\" }",
    "{ kind = \"sequence\", group = \"past\" }",
    "{ kind = \"dense\" }",
];

/// A command that changes the dataset, with numbers that choose what it changes.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// The next day is appended, with a further feature if there is one.
    Append { with_feature: bool },
    /// Features are computed for a day or for all days, among them a new one if there is one.
    AddFeatures { with_feature: bool, day: Option<i64> },
    /// A feature is dropped.
    Drop(usize),
    /// A feature is renamed.
    Rename(usize),
    /// Events of some requests have arrived.
    Relabel(i64),
    /// A user is forgotten.
    Forget(i64),
    /// Files are merged.
    Compact,
    /// Older snapshots are removed.
    Vacuum,
}

fn changes() -> impl Strategy<Value = Vec<(Change, Option<usize>)>> {
    let change = prop_oneof![
        2 => any::<bool>().prop_map(|with_feature| Change::Append { with_feature }),
        3 => (any::<bool>(), prop::option::of(0_i64..4))
            .prop_map(|(with_feature, day)| Change::AddFeatures { with_feature, day }),
        1 => (0_usize..4).prop_map(Change::Drop),
        1 => (0_usize..4).prop_map(Change::Rename),
        2 => (0_i64..100).prop_map(Change::Relabel),
        1 => (0..USERS).prop_map(Change::Forget),
        2 => Just(Change::Compact),
        1 => Just(Change::Vacuum),
    ];
    // A killed writer has changed the files this number of times.
    prop::collection::vec((change, prop::option::of(1_usize..6)), 5..10)
}

/// The logs and the configuration as they are, and the history of the dataset.
struct Model {
    dir: Dir,
    days: i64,
    /// The features in the order in which they were added: index in [`FEATURES`], and name.
    features: Vec<(usize, String)>,
    /// The days whose samples have missing values of a feature, by name.
    lacking: BTreeMap<String, BTreeSet<i64>>,
    /// The minutes from a request to its click.
    clicks: BTreeMap<i64, i64>,
    forgotten: BTreeSet<i64>,
    /// The number of names that were given.
    names: usize,
    /// The digests of the existing snapshots.
    snapshots: BTreeMap<u64, String>,
}

fn user(request: i64) -> i64 {
    (request / REQUESTS_OF_DAY + request % REQUESTS_OF_DAY / 2) % USERS
}

/// Returns the list of a sparse feature in a request. Lists repeat within a session.
fn list(feature: usize, request: i64) -> Vec<i64> {
    let length = request / 2 % 4;
    (0..length).map(|place| place + feature as i64 + request / 2 % 7).collect()
}

impl Model {
    fn new() -> Self {
        let model = Self {
            dir: Dir::new(),
            days: 1,
            features: Vec::new(),
            lacking: BTreeMap::new(),
            clicks: (0..REQUESTS_OF_DAY).step_by(3).map(|request| (request, 5)).collect(),
            forgotten: BTreeSet::new(),
            names: 0,
            snapshots: BTreeMap::new(),
        };
        model.write();
        model.works(&["append", "config.toml", "--out", "dataset"]);
        model
    }

    /// Writes the configurations, the logs, and the log of a new build, which has missing values where the dataset has
    /// some.
    fn write(&self) {
        for (name, log) in [("config.toml", "log"), ("anew.toml", "anew")] {
            let declared = self.features.iter();
            let declared = declared.map(|(feature, name)| format!("{name} = {}\n", FEATURES[*feature]));
            let text = format!(
                "format_version = 1\n[sources]\nlog = \"{log}.parquet\"\nevents = \"events.parquet\"\n\
                 [samples]\nsource = \"log\"\nkey = [\"request\"]\n\
                 [join]\nsource = \"events\"\non = {{ request = \"of\" }}\ntime = \"at\"\nwindow = \"10d\"\n\
                 [join.labels]\nclicked = {{ when = \"kind = 'click'\", delay = true }}\n\
                 [session]\nuser = \"user\"\ngap = \"30m\"\ntime = \"time\"\n[partition]\nby = \"day\"\n\
                 [features]\nclicked = {{ kind = \"label\" }}\nclicked_delay = {{ kind = \"label\" }}\n\
                 item = {{ kind = \"sparse\" }}\n{}",
                declared.collect::<String>()
            );
            self.dir.write(name, text);
        }
        let requests: Vec<i64> = (0..self.days * REQUESTS_OF_DAY)
            .filter(|request| !self.forgotten.contains(&user(*request)))
            .collect();
        self.write_log("log.parquet", &requests, |_, _| false);
        self.write_log("anew.parquet", &requests, |name, request| {
            self.lacking.get(name).is_some_and(|days| days.contains(&(request / REQUESTS_OF_DAY)))
        });
        let clicks: Vec<(i64, i64)> = self.clicks.iter().map(|(of, minutes)| (*of, *minutes)).collect();
        let times = clicks.iter().map(|(of, minutes)| time(*of) + minutes * MINUTE);
        self.write_rows(
            "events.parquet",
            vec![
                ("of".to_owned(), Arc::new(Int64Array::from_iter_values(clicks.iter().map(|(of, _)| *of)))),
                ("at".to_owned(), Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
                ("kind".to_owned(), Arc::new(StringArray::from(vec!["click"; clicks.len()]))),
            ],
        );
    }

    /// Writes the log of these requests. `is_missing` says whether a feature has a missing value in a request.
    fn write_log(&self, file: &str, requests: &[i64], is_missing: impl Fn(&str, i64) -> bool) {
        let numbers = |value: &dyn Fn(i64) -> i64| -> ArrayRef {
            Arc::new(Int64Array::from_iter_values(requests.iter().map(|request| value(*request))))
        };
        let times = requests.iter().map(|request| time(*request));
        let mut columns = vec![
            ("request".to_owned(), numbers(&|request| request)),
            ("user".to_owned(), numbers(&user)),
            ("item".to_owned(), numbers(&|request| request % 5)),
            ("time".to_owned(), Arc::new(TimestampMicrosecondArray::from_iter_values(times)) as ArrayRef),
        ];
        for (feature, name) in &self.features {
            let missing = |request: &i64| is_missing(name, *request);
            let values: ArrayRef = if FEATURES[*feature].contains("dense") {
                let value = |request: &i64| if missing(request) { 0.0 } else { *request as f32 + 0.5 };
                Arc::new(Float32Array::from_iter_values(requests.iter().map(value)))
            } else {
                let value = |request: &i64| {
                    let list = if missing(request) { Vec::new() } else { list(*feature, *request) };
                    Some(list.into_iter().map(Some).collect::<Vec<_>>())
                };
                Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(requests.iter().map(value)))
            };
            columns.push((name.clone(), values));
        }
        self.write_rows(file, columns);
    }

    fn write_rows(&self, file: &str, columns: Vec<(String, ArrayRef)>) {
        let rows = RecordBatch::try_from_iter(columns).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), None).unwrap();
        writer.write(&rows).unwrap();
        self.dir.write(file, writer.into_inner().unwrap());
    }

    #[track_caller]
    fn works(&self, arguments: &[&str]) {
        let output = self.dir.command(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn newest(&self) -> u64 {
        Snapshot::load_head(&self.dir.path("dataset")).unwrap().snapshot
    }

    /// Verifies a dataset, and returns its digest.
    #[track_caller]
    fn digest(&self, dataset: &str, snapshot: Option<u64>) -> String {
        let options = VerifyOptions { snapshot, ..VerifyOptions::new(2) };
        let verified = verify(&self.dir.path(dataset), &options, &Silent).unwrap();
        assert!(verified.is_sound(), "{verified:?}");
        verified.digest.unwrap().to_string()
    }

    /// Adds the first feature that the dataset does not have to the configuration, if there is one. Earlier days lack it.
    fn add_feature(&mut self) {
        let has = |feature: usize| self.features.iter().any(|(known, _)| *known == feature);
        let Some(feature) = (0..FEATURES.len()).find(|feature| !has(*feature)) else { return };
        let name = self.new_name(feature);
        self.lacking.insert(name.clone(), (0..self.days).collect());
        self.features.push((feature, name));
    }

    fn new_name(&mut self, feature: usize) -> String {
        self.names += 1;
        // Names of dropped features are used again.
        format!("feature{feature}_{}", self.names % 3)
    }

    /// Changes the logs and the configuration, and returns the command for the dataset; `None` if there is nothing to
    /// change.
    fn prepare(&mut self, change: Change) -> Option<Vec<String>> {
        let words = |text: String| Some(text.split(' ').map(str::to_owned).collect());
        let date = |day: i64| format!("date=2024-05-{:02}", day + 1);
        match change {
            Change::Append { with_feature } => {
                if with_feature {
                    self.add_feature();
                }
                let first = self.days * REQUESTS_OF_DAY;
                self.clicks.extend((first..first + REQUESTS_OF_DAY).step_by(4).map(|request| (request, 7)));
                self.days += 1;
                words(format!("append config.toml --out dataset --partition {}", date(self.days - 1)))
            }
            Change::AddFeatures { with_feature, day } => {
                if with_feature {
                    self.add_feature();
                }
                let day = day.map(|day| day % self.days);
                let filled = |lacking: &i64| day.is_none_or(|day| day == *lacking);
                self.lacking.values_mut().for_each(|days| days.retain(|day| !filled(day)));
                let partition = day.map(|day| format!(" --partition {}", date(day))).unwrap_or_default();
                words(format!("add-features config.toml --out dataset{partition}"))
            }
            Change::Drop(number) => {
                let number = number.checked_rem(self.features.len())?;
                let (_, name) = self.features.remove(number);
                self.lacking.remove(&name);
                words(format!("drop-features dataset {name}"))
            }
            Change::Rename(number) => {
                let number = number.checked_rem(self.features.len())?;
                let name = self.new_name(self.features[number].0);
                let old = std::mem::replace(&mut self.features[number].1, name.clone());
                if old == name {
                    return None;
                }
                if let Some(days) = self.lacking.remove(&old) {
                    self.lacking.insert(name.clone(), days);
                }
                words(format!("rename-feature dataset {old} {name}"))
            }
            Change::Relabel(seed) => {
                for request in (0..self.days * REQUESTS_OF_DAY).filter(|request| (request + seed) % 6 == 0) {
                    self.clicks.insert(request, 60 * (seed % 50) + 1);
                }
                words("relabel config.toml --out dataset".to_owned())
            }
            Change::Forget(user) => {
                // At most two of the users are forgotten.
                if self.forgotten.len() == 2 && !self.forgotten.contains(&user) {
                    return None;
                }
                self.forgotten.insert(user);
                self.dir.write("users.txt", format!("{user}\n"));
                words("forget dataset --users users.txt".to_owned())
            }
            Change::Compact => words("compact dataset".to_owned()),
            Change::Vacuum => words("vacuum dataset --keep 1 --older-than 0s".to_owned()),
        }
    }

    /// Runs a command, and kills it when the files of the dataset have changed this number of times.
    fn kill(&self, arguments: &[&str], times: usize) {
        let (stdout, stderr) = (Stdio::null(), Stdio::null());
        let mut child = self.dir.command(arguments).stdout(stdout).stderr(stderr).spawn().unwrap();
        let dataset = self.dir.path("dataset");
        let (mut known, mut changed, started) = (file_names(&dataset), 0, Instant::now());
        while changed < times && child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < Duration::from_secs(600), "nothing happened within ten minutes");
            let now = file_names(&dataset);
            changed += usize::from(now != known);
            known = now;
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Makes a change, and checks the dataset and its older snapshots.
    fn change(&mut self, change: Change, kill: Option<usize>) {
        let Some(command) = self.prepare(change) else { return };
        self.write();
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let before = self.newest();
        if let Some(times) = kill {
            self.kill(&command, times);
        }
        let is_done = matches!(change, Change::Drop(_) | Change::Rename(_)) && self.newest() > before;
        if !is_done {
            // The command may have committed before it was killed.
            self.works(&command);
        }
        if matches!(change, Change::Vacuum) {
            let newest = self.newest();
            self.snapshots.retain(|snapshot, _| *snapshot == newest);
        }
        self.check();
    }

    fn check(&mut self) {
        self.works(&["build", "anew.toml", "--out", "anew", "--overwrite"]);
        let digest = self.digest("dataset", None);
        assert_eq!(digest, self.digest("anew", None));
        self.snapshots.insert(self.newest(), digest);
        for (snapshot, digest) in &self.snapshots {
            assert_eq!(self.digest("dataset", Some(*snapshot)), *digest, "{snapshot}");
        }
    }
}

/// Returns the time of a request, in microseconds since 1970. The two requests of a session are five minutes apart.
fn time(request: i64) -> i64 {
    let (day, number) = (request / REQUESTS_OF_DAY, request % REQUESTS_OF_DAY);
    DAY + (day * 24 * 60 + number / 2 * 120 + number % 2 * 5) * MINUTE
}

/// Returns the paths of all files below a directory whose contents may change at the same time.
fn file_names(folder: &Path) -> BTreeSet<PathBuf> {
    let Ok(entries) = fs_err::read_dir(folder) else { return BTreeSet::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    paths.flat_map(|path| if path.is_dir() { file_names(&path) } else { BTreeSet::from([path]) }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 10, ..onefold_property::cases(3) })]

    #[test]
    fn a_changed_dataset_is_one_that_is_built_anew(sequence in changes()) {
        let mut model = Model::new();
        model.check();
        for (change, kill) in sequence {
            model.change(change, kill);
        }
    }
}
