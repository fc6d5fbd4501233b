//! Tests of late samples: a dataset of one part of a log must equal the dataset of the whole log after the rest is
//! merged.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, ListArray, StringArray, TimestampMicrosecondArray};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Int64Type, TimestampMicrosecondType};
use onefold_base::progress::{Reporter, Silent};
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::verify::{VerifyOptions, verify};
use onefold_datasets::{
    Commit, FileSet, Layout, Order, OriginalKind, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Snapshot, TIME_COLUMN,
    Vocabulary,
};
use onefold_ingest::{BuildOptions, BuildSummary, Config, EngineOptions, Groups, build};
use onefold_storage::Storage;
use proptest::prelude::*;

use crate::logs::{Dir, parquet};

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const MINUTE: i64 = 60_000_000;

/// A row of the log: its request, user and time in minutes. All other columns are computed from these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Row {
    pub(crate) request: i64,
    pub(crate) user: i64,
    pub(crate) minute: i64,
}

impl Row {
    fn time(self) -> i64 {
        DAY + self.minute * MINUTE
    }

    /// Returns a session key. Some of its sessions continue after midnight.
    fn visit(self) -> String {
        format!("{}/{}", self.user, self.minute / 400)
    }

    /// Returns a country, which two users share, so that their sessions lie in two partitions of an hour.
    fn country(self) -> &'static str {
        if self.user % 2 == 0 { "dk" } else { "de" }
    }

    fn item(self) -> i64 {
        self.request * 7 % 5 - 2
    }

    /// Returns a window that slides with the time.
    fn history(self) -> Vec<i64> {
        (self.minute / 10 - self.minute / 50 % 3..self.minute / 10)
            .map(|item| item + 1000 * self.user)
            .collect()
    }
}

/// The configuration of a dataset.
#[derive(Debug, Clone)]
pub(crate) struct Setup {
    pub(crate) gap: bool,
    pub(crate) keyed: bool,
    /// Whether the request orders samples with equal times.
    pub(crate) ordered: bool,
    pub(crate) partition: &'static str,
    /// The options of the features with ids.
    pub(crate) ids: &'static str,
    pub(crate) timeline: bool,
    /// Whether the dataset keeps a text column and an integer column.
    pub(crate) keep: bool,
    pub(crate) layout: Layout,
    pub(crate) order: Order,
    pub(crate) buckets: u32,
}

pub(crate) const SETUP: Setup = Setup {
    gap: true,
    keyed: true,
    ordered: false,
    partition: "by = \"day\"",
    ids: "",
    timeline: false,
    keep: false,
    layout: Layout::Folded,
    order: Order::Session,
    buckets: 1,
};

impl Setup {
    pub(crate) fn text(&self, log: &str) -> String {
        let (session, key) = (
            if self.gap { "user = \"user\"\ngap = \"30m\"" } else { "key = [\"visit\"]" },
            if self.keyed { "key = [\"request\"]\n" } else { "" },
        );
        let order = if self.ordered { "order = [\"request\"]\n" } else { "" };
        let (section, feature) = match self.timeline {
            true => (
                "[[timelines]]\nsource = \"events\"\non = { user = \"who\" }\ntime = \"at\"\nlength = 3\ncolumns = { clicks = \"what\" }\n",
                "clicks = { kind = \"sequence\", group = \"clicks\"{ids} }\n",
            ),
            false => ("", ""),
        };
        let features = format!(
            "clicked = {{ kind = \"label\" }}\nweight = {{ kind = \"weight\" }}\nage = {{ kind = \"dense\" }}\n\
             item = {{ kind = \"sparse\"{{ids}} }}\nhistory = {{ kind = \"sequence\", group = \"history\"{{ids}} }}\n{feature}"
        );
        format!(
            "format_version = 1\n{}[sources]\nlog = \"{log}\"\nevents = \"events.parquet\"\n[samples]\nsource = \"log\"\n{key}\
             [session]\n{session}\ntime = \"time\"\n{order}[partition]\n{}\n{section}[features]\n{}",
            if self.keep { "keep = [\"note\", \"request\"]\n" } else { "" },
            self.partition,
            features.replace("{ids}", self.ids)
        )
    }

    fn columns(&self, rows: &[Row]) -> Vec<(&'static str, ArrayRef)> {
        let is_text = !self.ids.is_empty();
        let numbers = |of: fn(Row) -> i64| -> ArrayRef {
            Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| of(*row))))
        };
        let texts = |of: &dyn Fn(Row) -> String| -> ArrayRef {
            Arc::new(StringArray::from_iter_values(rows.iter().map(|row| of(*row))))
        };
        let histories = rows.iter().map(|row| Some(row.history().into_iter().map(Some)));
        let histories: ArrayRef = match is_text {
            false => Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(histories)),
            true => {
                let mut lists = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
                for row in rows {
                    lists.append_value(row.history().iter().map(|id| Some(format!("h{id}"))));
                }
                Arc::new(lists.finish())
            }
        };
        let time = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|row| row.time()));
        vec![
            ("request", numbers(|row| row.request)),
            ("user", texts(&|row| format!("user {}", row.user))),
            ("visit", texts(&|row| row.visit())),
            ("country", texts(&|row| row.country().to_owned())),
            ("time", Arc::new(time)),
            (
                "note",
                Arc::new(StringArray::from_iter(
                    rows.iter()
                        .map(|row| (row.request % 3 != 0).then(|| format!("note {}", row.request % 4))),
                )),
            ),
            ("clicked", numbers(|row| i64::from(row.request % 3 == 0))),
            ("weight", numbers(|row| 1 + row.request % 4)),
            ("age", numbers(|row| row.request)),
            ("item", if is_text { texts(&|row| format!("i{}", row.item())) } else { numbers(Row::item) }),
            ("history", histories),
        ]
    }

    /// Writes a log and its configuration `name`.
    pub(crate) fn write(&self, dir: &Dir, name: &str, rows: &[Row]) {
        dir.write(format!("{name}.parquet"), parquet(self.columns(rows)));
        dir.write(format!("{name}.toml"), self.text(&format!("{name}.parquet")));
        let minutes: Vec<i64> = (0..60).map(|i| i * 97 % 4000).collect();
        let what: ArrayRef = match self.ids.is_empty() {
            true => Arc::new(Int64Array::from_iter_values(minutes.iter().map(|minute| minute % 7))),
            false => Arc::new(StringArray::from_iter_values(
                minutes.iter().map(|minute| format!("h{}", minute % 7)),
            )),
        };
        let events = vec![
            (
                "who",
                Arc::new(StringArray::from_iter_values((0..60).map(|i| format!("user {}", i % 4))))
                    as ArrayRef,
            ),
            (
                "at",
                Arc::new(TimestampMicrosecondArray::from_iter_values(
                    minutes.iter().map(|m| DAY + m * MINUTE),
                )),
            ),
            ("what", what),
        ];
        dir.write("events.parquet", parquet(events));
    }

    pub(crate) fn options(&self, commit: Commit, partitions: &str) -> BuildOptions {
        BuildOptions {
            layout: Some(self.layout),
            order: Some(self.order),
            groups: Groups::Given,
            column_order: Vec::new(),
            engine: EngineOptions {
                memory_limit: 1 << 28,
                threads: 2,
                spill_directory: None,
                spill_limit: None,
                cluster: None,
            },
            commit,
            about_samples: None,
            buckets: Some(self.buckets),
            partitions: partitions.parse().unwrap(),
        }
    }

    /// Runs the configuration `name` on the dataset `out`.
    fn run(
        &self,
        dir: &Dir,
        name: &str,
        out: &str,
        commit: Commit,
        partitions: &str,
    ) -> onefold_ingest::Result<BuildSummary> {
        self.run_with(dir, (name, out), (commit, partitions), &Silent)
    }

    fn run_with(
        &self,
        dir: &Dir,
        (name, out): (&str, &str),
        (commit, partitions): (Commit, &str),
        reporter: &dyn Reporter,
    ) -> onefold_ingest::Result<BuildSummary> {
        let config = Config::load(&dir.path(format!("{name}.toml"))).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(build(&config, &dir.path(out), &self.options(commit, partitions), reporter))
    }

    pub(crate) fn works(&self, dir: &Dir, name: &str, out: &str, commit: Commit) -> BuildSummary {
        self.run(dir, name, out, commit, "").unwrap()
    }
}

/// A sample of a dataset: session, time, hash of the key, floats, kept values, and the originals of the lists.
pub(crate) type Sample = (i64, i64, Option<i64>, Vec<u32>, Vec<Option<String>>, Vec<Vec<String>>);
/// The samples of a dataset in order, by partition and range of buckets.
pub(crate) type Content = BTreeMap<(String, u32), Vec<Sample>>;

pub(crate) fn content(dataset: &Path) -> Content {
    let (storage, snapshot) = (Storage::open(dataset).unwrap(), Snapshot::load(dataset).unwrap());
    let mut content = Content::new();
    for partition in &snapshot.partitions {
        for file in &partition.files {
            let range = snapshot.division().range_of(file.bucket);
            let samples = content.entry((partition.key.to_string(), range)).or_default();
            read_file(dataset, &storage, &snapshot, file, samples);
        }
    }
    content
}

fn read_file(
    dataset: &Path,
    storage: &Storage,
    snapshot: &Snapshot,
    set: &FileSet,
    samples: &mut Vec<Sample>,
) {
    let open = OpenFiles::open(storage, snapshot, set).unwrap();
    for group in 0..open.row_groups() {
        let sessions = open.numbers::<Int64Type>(group, SESSION_COLUMN).unwrap();
        let times = open.numbers::<TimestampMicrosecondType>(group, TIME_COLUMN).unwrap();
        let keys = snapshot.sample_keys.then(|| open.numbers::<Int64Type>(group, SAMPLE_KEY_COLUMN).unwrap());
        let floats: Vec<_> = snapshot
            .schema
            .float_columns()
            .map(|name| open.numbers::<Float32Type>(group, name).unwrap())
            .collect();
        let kept = snapshot.schema.kept.iter().map(|column| open.kept(group, column).unwrap());
        let kept: Vec<_> = kept.map(|values| cast(&values, &DataType::Utf8).unwrap()).collect();
        let mut lists = Vec::new();
        for in_group in &snapshot.schema.groups {
            for feature in &in_group.features {
                let vocabulary = feature.vocabulary.as_ref();
                let vocabulary = vocabulary.map(|name| Vocabulary::load(dataset, snapshot, name).unwrap());
                lists.push((open.lists(group, snapshot.layout, in_group, feature).unwrap(), vocabulary));
            }
        }
        for row in 0..times.len() {
            let floats = floats.iter().map(|floats| floats[row].to_bits()).collect();
            let lists = lists.iter().map(|(lists, vocabulary)| {
                lists.list(row).iter().map(|id| original(*id, vocabulary.as_ref())).collect()
            });
            let key = keys.as_ref().map(|keys| keys[row]);
            let kept = kept
                .iter()
                .map(|values| values.is_valid(row).then(|| values.as_string::<i32>().value(row).to_owned()));
            samples.push((sessions[row], times[row], key, floats, kept.collect(), lists.collect()));
        }
    }
}

fn original(id: i64, vocabulary: Option<&Vocabulary>) -> String {
    match vocabulary {
        None => id.to_string(),
        Some(vocabulary) if vocabulary.kind() == OriginalKind::Text => {
            vocabulary.original_text(id).unwrap_or("unknown").to_owned()
        }
        Some(vocabulary) => vocabulary.original(id).map_or("unknown".to_owned(), |id| id.to_string()),
    }
}

/// Returns the file sets of each range of buckets of each partition.
fn files(dataset: &Path) -> BTreeMap<(String, u32), Vec<FileSet>> {
    let mut files: BTreeMap<_, Vec<FileSet>> = BTreeMap::new();
    let snapshot = Snapshot::load(dataset).unwrap();
    let division = snapshot.division();
    for partition in snapshot.partitions {
        for file in partition.files {
            let range = division.range_of(file.bucket);
            files.entry((partition.key.to_string(), range)).or_default().push(file);
        }
    }
    files
}

#[track_caller]
pub(crate) fn assert_sound(dataset: &Path) {
    let verified = verify(dataset, &VerifyOptions::new(2), &Silent).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.problems);
}

/// Generates rows of a log that is split in two, each with the parts that contain it: the first, the second, or both.
pub(crate) fn rows() -> impl Strategy<Value = Vec<(Row, u8)>> {
    let row = (
        0..4_i64,
        prop_oneof![1380..1500_i64, 0..2900_i64],
        prop_oneof![4 => Just(0_u8), 3 => Just(1), 1 => Just(2)],
    );
    prop::collection::vec(row, 2..60).prop_map(|rows| {
        let row = |(request, (user, minute, part))| (Row { request, user, minute }, part);
        (0..).zip(rows).map(row).collect()
    })
}

pub(crate) fn setups() -> impl Strategy<Value = Setup> {
    let partition = prop_oneof![
        Just(""),
        Just("by = \"day\""),
        Just("by = \"hour\""),
        Just("columns = [\"country\"]\nby = \"day\"")
    ];
    let ids = prop_oneof![Just(""), Just(", ids = \"hash\""), Just(", vocabulary = \"frequency\"")];
    let order = prop_oneof![Just(Order::Session), Just(Order::SessionHash), Just(Order::Arrival)];
    let layout = prop_oneof![Just(Layout::Folded), Just(Layout::Rows)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (flags, partition, ids, order, layout, prop_oneof![Just(1_u32), Just(5)]).prop_map(
        |((gap, keyed, ordered, timeline, keep), partition, ids, order, layout, buckets)| Setup {
            gap,
            keyed,
            ordered,
            partition,
            ids,
            timeline,
            keep,
            layout,
            order,
            buckets,
        },
    )
}

/// Builds the first part, merges the second, and compares the dataset with a build of all rows. Returns the number of
/// sessions; `None` if one of the parts has no rows.
fn check(setup: &Setup, rows: &[(Row, u8)]) -> Option<u64> {
    let dir = Dir::new();
    // A merge cannot order samples with equal times by columns that the dataset does not have, so the times are made to
    // differ.
    let mut rows = rows.to_vec();
    if setup.ordered {
        rows.iter_mut().for_each(|(row, _)| row.minute = row.minute / 60 * 60 + row.request);
    }
    let part = |wanted: &[u8]| -> Vec<Row> {
        rows.iter().filter(|(_, part)| wanted.contains(part)).map(|(row, _)| *row).collect()
    };
    for (name, parts) in [("all", &[0, 1, 2][..]), ("first", &[0, 2][..]), ("second", &[1, 2][..])] {
        setup.write(&dir, name, &part(parts));
    }
    let (first, second) = (part(&[0, 2]), part(&[1, 2]));
    if first.is_empty() || second.is_empty() {
        return None;
    }
    let sessions = setup.works(&dir, "all", "whole", Commit::Create).sessions;
    setup.works(&dir, "first", "merged", Commit::Create);
    let (before, files_before) = (content(&dir.path("merged")), files(&dir.path("merged")));
    let summary = setup.works(&dir, "second", "merged", Commit::Merge);
    assert_eq!(content(&dir.path("merged")), content(&dir.path("whole")));
    assert_sound(&dir.path("merged"));

    let merged = summary.merged.unwrap();
    assert_eq!(merged.samples_added, part(&[1]).len() as u64);
    assert_eq!(merged.samples_skipped, part(&[2]).len() as u64);
    let digests = |name: &str| -> Vec<_> {
        Snapshot::load(&dir.path(name))
            .unwrap()
            .partitions
            .into_iter()
            .map(|p| (p.key, p.samples, p.sessions, p.digest))
            .collect()
    };
    if !setup.ids.contains("vocabulary") {
        assert_eq!(digests("merged"), digests("whole"));
    }
    // Ranges without changes keep their files.
    let (after, files_after) = (content(&dir.path("merged")), files(&dir.path("merged")));
    let mut rewritten = 0;
    for (place, samples) in &after {
        match before.get(place) == Some(samples) {
            true => assert_eq!(files_after[place], files_before[place], "{place:?}"),
            false => rewritten += 1,
        }
    }
    rewritten += before.keys().filter(|place| !after.contains_key(*place)).count();
    assert_eq!(merged.ranges_rewritten, rewritten as u64);

    let again = setup.works(&dir, "second", "merged", Commit::Merge);
    assert_eq!(
        (again.changed, again.snapshot, again.merged.unwrap().samples_added),
        (false, summary.snapshot, 0)
    );
    assert_eq!(files(&dir.path("merged")), files_after);
    Some(sessions)
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 60, ..onefold_property::cases(9) })]

    #[test]
    fn a_merge_gives_the_dataset_of_the_whole_log(setup in setups(), rows in rows()) {
        check(&setup, &rows);
    }
}

fn row(request: i64, user: i64, minute: i64) -> Row {
    Row { request, user, minute }
}

#[test]
fn late_samples_lengthen_and_unite_sessions() {
    // Sessions of user 1 begin at minutes 100 and 200. 70 is before them, 110 is within the first one, and 150 and 175
    // unite them.
    let old = [row(0, 1, 100), row(1, 1, 120), row(2, 1, 200), row(3, 2, 100)];
    let setups = [SETUP, Setup { keyed: false, buckets: 3, ..SETUP }, Setup { timeline: true, ..SETUP }];
    // The sessions that are united are tried with every setup.
    for (late, sessions, setups) in [
        (vec![70], 3, &setups[..1]),
        (vec![110], 3, &setups[2..]),
        (vec![130, 225], 3, &setups[..2]),
        (vec![150, 175], 2, &setups[..]),
        (vec![300], 4, &setups[1..2]),
    ] {
        let late = (10..).zip(&late).map(|(request, minute)| (row(request, 1, *minute), 1));
        let rows: Vec<_> = old.iter().map(|row| (*row, 0)).chain(late).collect();
        for setup in setups {
            assert_eq!(check(setup, &rows), Some(sessions), "{setup:?}");
        }
    }
}

#[test]
fn buckets_without_samples_get_their_first() {
    let rows: Vec<_> = (0..8).map(|user| (row(user, user, 100), u8::from(user > 0))).collect();
    for keyed in [true, false] {
        check(&Setup { keyed, buckets: 64, ..SETUP }, &rows);
    }
}

#[test]
fn samples_after_midnight_are_brought_into_the_day_of_their_session() {
    for keyed in [true, false] {
        let setup = Setup { keyed, ..SETUP };
        let dir = Dir::new();
        let first = [row(0, 1, 1420), row(1, 1, 1435), row(2, 2, 700)];
        let second = [row(3, 1, 1445), row(4, 1, 1450), row(5, 3, 1500)];
        setup.write(&dir, "day1", &first);
        setup.write(&dir, "both", &[first, second].concat());
        setup.works(&dir, "day1", "dataset", Commit::Append);
        let day2 = setup.run(&dir, "both", "dataset", Commit::Append, "date=2024-05-02").unwrap();
        let tails = BTreeMap::from([("date=2024-05-01".to_owned(), 2)]);
        let merged = if keyed {
            // The append has already merged these samples.
            assert!(day2.changed && day2.samples_of_earlier_sessions.is_empty());
            assert_eq!((day2.rows.read, day2.rows.written, day2.samples_of_other_partitions), (6, 3, 3));
            day2
        } else {
            assert_eq!((day2.samples_of_earlier_sessions, day2.samples), (tails, 4));
            setup.run(&dir, "both", "dataset", Commit::Merge, "date=2024-05-01").unwrap()
        };
        let summary = merged.merged.unwrap();
        assert_eq!((summary.samples_added, summary.ranges_rewritten, merged.samples), (2, 1, 6));
        assert_eq!(summary.samples_skipped, if keyed { 4 } else { 3 });
        setup.works(&dir, "both", "whole", Commit::Create);
        assert_eq!(content(&dir.path("dataset")), content(&dir.path("whole")));
        for (commit, partition) in [
            (Commit::Merge, "date=2024-05-01"),
            (Commit::Merge, "date=2024-05-02"),
            (Commit::Append, "date=2024-05-02"),
            (Commit::Append, "date=2024-05-01"),
        ] {
            let again = setup.run(&dir, "both", "dataset", commit, partition).unwrap();
            assert_eq!((again.changed, again.snapshot), (false, merged.snapshot), "{commit:?} {partition}");
        }
    }
}

#[test]
fn an_append_leaves_partitions_that_are_not_there_alone() {
    let dir = Dir::new();
    SETUP.write(&dir, "both", &[row(1, 1, 1435), row(3, 1, 1445), row(5, 3, 1500)]);
    let day2 = SETUP.run(&dir, "both", "dataset", Commit::Append, "date=2024-05-02").unwrap();
    let tails = BTreeMap::from([("date=2024-05-01".to_owned(), 1)]);
    assert_eq!((day2.samples_of_earlier_sessions, day2.samples, day2.merged), (tails, 1, None));
}

#[test]
fn a_session_moves_only_between_partitions_that_may_change() {
    let setup = SETUP;
    let dir = Dir::new();
    // The session of user 1 begins after midnight, until a sample before midnight arrives.
    setup.write(&dir, "first", &[row(0, 1, 1450), row(1, 2, 100)]);
    setup.write(&dir, "late", &[row(2, 1, 1430)]);
    setup.works(&dir, "first", "dataset", Commit::Create);
    let before = files(&dir.path("dataset"));
    let error = setup.run(&dir, "late", "dataset", Commit::Merge, "date=2024-05-01").unwrap_err().to_string();
    for part in ["partition `date=2024-05-02`", "start in `date=2024-05-01`", "hint: merge into both"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(files(&dir.path("dataset")), before);
    let merged = setup.works(&dir, "late", "dataset", Commit::Merge);
    assert_eq!((merged.merged.unwrap().ranges_rewritten, merged.partitions), (2, 1));
    assert_sound(&dir.path("dataset"));
}

#[test]
fn equal_samples_without_keys_count_as_often_as_one_log_has_them() {
    let setup = Setup { keyed: false, ..SETUP };
    let dir = Dir::new();
    let (a, b) = (row(0, 1, 100), row(1, 1, 110));
    setup.write(&dir, "first", &[a, a, b]);
    setup.works(&dir, "first", "dataset", Commit::Create);
    for (log, added, skipped) in
        [(vec![a], 0, 1), (vec![a, b, b], 1, 2), (vec![a, a, a, b, b], 1, 4), (vec![a, a], 0, 2)]
    {
        setup.write(&dir, "late", &log);
        let summary = setup.works(&dir, "late", "dataset", Commit::Merge);
        let merged = summary.merged.unwrap();
        assert_eq!(
            (merged.samples_added, merged.samples_skipped, summary.changed),
            (added, skipped, added > 0),
            "{log:?}"
        );
    }
    assert_eq!(content(&dir.path("dataset")).values().map(Vec::len).sum::<usize>(), 5);
}

#[test]
fn samples_with_an_existing_key_are_skipped_whatever_their_other_columns() {
    let dir = Dir::new();
    SETUP.write(&dir, "first", &[row(0, 1, 100), row(1, 1, 110)]);
    SETUP.works(&dir, "first", "dataset", Commit::Create);
    let before = content(&dir.path("dataset"));
    // Request 1 arrives again with another time, which would begin a session earlier.
    SETUP.write(&dir, "late", &[row(1, 1, 90)]);
    let summary = SETUP.works(&dir, "late", "dataset", Commit::Merge);
    let merged = summary.merged.unwrap();
    assert_eq!((merged.samples_added, merged.samples_skipped, summary.changed), (0, 1, false));
    assert_eq!(content(&dir.path("dataset")), before);
}

#[test]
fn merging_creates_missing_datasets_and_partitions() {
    let dir = Dir::new();
    SETUP.write(&dir, "first", &[row(0, 1, 100)]);
    let created = SETUP.works(&dir, "first", "dataset", Commit::Merge);
    assert_eq!((created.snapshot, created.merged.unwrap().samples_added), (1, 1));
    SETUP.write(&dir, "late", &[row(1, 1, 2000)]);
    let files_before = files(&dir.path("dataset"));
    let merged = SETUP.works(&dir, "late", "dataset", Commit::Merge);
    assert_eq!((merged.partitions, merged.merged.unwrap().ranges_rewritten), (2, 1));
    for (place, before) in files_before {
        assert_eq!(files(&dir.path("dataset"))[&place], before);
    }
}

/// Removes the snapshots and the data files of a dataset when a stage begins, as a purge after another commit does.
struct Purging<'a>(&'a Path);

impl Reporter for Purging<'_> {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {
        for folder in ["snapshots", "data"] {
            let _ = fs_err::remove_dir_all(self.0.join(folder));
        }
    }

    fn advance(&self, _: u64) {}

    fn note(&self, _: &str) {}

    fn end(&self) {}
}

#[test]
fn a_merge_into_a_snapshot_that_is_purged_does_not_call_the_dataset_damaged() {
    let dir = Dir::new();
    SETUP.write(&dir, "first", &[row(0, 1, 100)]);
    SETUP.works(&dir, "first", "dataset", Commit::Merge);
    SETUP.write(&dir, "late", &[row(1, 1, 110)]);
    let dataset = dir.path("dataset");
    let merged = SETUP.run_with(&dir, ("late", "dataset"), (Commit::Merge, ""), &Purging(&dataset));
    let error = merged.unwrap_err().to_string();
    assert!(error.contains("removed snapshot 1 while it was used"), "{error}");
}

#[test]
fn late_samples_follow_existing_samples_of_the_same_time() {
    let setup = Setup { ordered: true, ..SETUP };
    let dir = Dir::new();
    setup.write(&dir, "first", &[row(5, 1, 100), row(3, 1, 100), row(9, 1, 101)]);
    setup.write(&dir, "late", &[row(8, 1, 100), row(4, 1, 100)]);
    setup.works(&dir, "first", "dataset", Commit::Create);
    setup.works(&dir, "late", "dataset", Commit::Merge);
    let key = |request: i64| Some(onefold_datasets::hash_id(request.to_string().as_bytes()));
    let keys: Vec<_> = content(&dir.path("dataset")).into_values().flatten().map(|sample| sample.2).collect();
    assert_eq!(keys, [3, 5, 4, 8, 9].map(key));
    assert_sound(&dir.path("dataset"));
}

#[test]
fn merges_with_missing_requirements_are_refused() {
    let dir = Dir::new();
    let rows = [row(0, 1, 100), row(1, 2, 2000)];
    let unkeyed = Setup { keyed: false, ..SETUP };
    unkeyed.write(&dir, "first", &rows);
    unkeyed.works(&dir, "first", "unkeyed", Commit::Create);
    let refused = |setup: &Setup, out: &str, commit: Commit, parts: &[&str]| {
        setup.write(&dir, "late", &rows);
        let error = setup.run(&dir, "late", out, commit, "").unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part) && error.contains("hint: "), "{error}");
        }
    };
    refused(&SETUP, "unkeyed", Commit::Merge, &["the dataset was built without it and has no keys"]);
    // An append to a dataset without keys writes no keys.
    SETUP.write(&dir, "late", &rows);
    assert!(!SETUP.works(&dir, "late", "unkeyed", Commit::Append).changed);
    SETUP.works(&dir, "late", "keyed", Commit::Create);
    refused(&unkeyed, "keyed", Commit::Append, &["have keys, but `[samples].key` is not declared"]);
    refused(&Setup { gap: false, ..SETUP }, "keyed", Commit::Merge, &["has another `[session]`"]);
    let other = Setup { partition: "by = \"hour\"", ..SETUP };
    let columns = ["partitioned by `date` (date), but", "partitioned by `date` (date), `hour` (integer)"];
    refused(&other, "keyed", Commit::Merge, &columns);
    let cut = Setup { ids: ", vocabulary = \"frequency\", min_count = 2", ..unkeyed.clone() };
    cut.write(&dir, "first", &rows);
    cut.works(&dir, "first", "cut", Commit::Create);
    refused(&cut, "cut", Commit::Merge, &["has a `min_count`", "`[samples].key`"]);
}

#[test]
fn ids_below_a_minimum_stay_unknown() {
    let setup = Setup { ids: ", vocabulary = \"frequency\", min_count = 2", ..SETUP };
    let dir = Dir::new();
    setup.write(&dir, "first", &[row(0, 1, 100), row(5, 1, 105), row(1, 1, 110)]);
    setup.works(&dir, "first", "dataset", Commit::Create);
    let before = content(&dir.path("dataset"));
    setup.write(&dir, "late", &[row(2, 1, 120), row(7, 1, 125)]);
    let summary = setup.works(&dir, "late", "dataset", Commit::Merge);
    assert_eq!(summary.merged.unwrap().samples_added, 2);
    let after = content(&dir.path("dataset"));
    let (before, after) = (before.values().flatten(), after.values().flatten());
    let after: Vec<_> = after.collect();
    for (before, after) in before.zip(&after) {
        assert_eq!((before.1, &before.3, &before.4, &before.5), (after.1, &after.3, &after.4, &after.5));
    }
    assert_eq!(after[3].5[0], after[4].5[0]);
    assert_sound(&dir.path("dataset"));
}

#[test]
fn the_command_reports_what_it_merged() {
    let dir = Dir::new();
    SETUP.write(&dir, "first", &[row(0, 1, 100), row(1, 2, 2000)]);
    SETUP.works(&dir, "first", "dataset", Commit::Create);
    SETUP.write(&dir, "late", &[row(1, 2, 2000), row(2, 1, 110), row(3, 3, 1500)]);
    let run = |more: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
        command.args(["append", "late.toml", "--out", "dataset", "--merge"]).args(more);
        command.current_dir(dir.path("")).output().unwrap()
    };
    let text = |output: std::process::Output| String::from_utf8(output.stdout).unwrap();
    let refused = run(&["--replace"]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && error.contains("cannot be used with"), "{error}");
    let shown = text(run(&["--partition", "date=2024-05-01"]));
    for part in ["merged into dataset", "added 1 sample, skipped 1 that were there already; rewrote 1 range"]
    {
        assert!(shown.contains(part), "{shown}");
    }
    let rows = "3 rows read: 1 written, left out 1 of other partitions, 1 that were there already";
    assert!(shown.contains(rows), "{shown}");
    let output = text(run(&["--json"]));
    let summary: serde_json::Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    let figures =
        ["samples_added", "samples_skipped", "ranges_rewritten", "samples"].map(|key| summary[key].as_u64());
    assert_eq!(figures, [1, 2, 1, 4].map(Some));
    let again = text(run(&[]));
    assert!(
        again.contains("nothing to merge into dataset") && again.contains("added 0 samples, skipped 3"),
        "{again}"
    );
}
