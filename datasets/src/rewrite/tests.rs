//! Compares the results of `forget` and `compact` with a dataset that is built from the remaining samples.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use onefold_base::progress::Silent;
use onefold_storage::Storage;
use proptest::prelude::*;

use super::RewriteOptions;
use crate::compact::compact;
use crate::forget::{ForgetOptions, Forgotten, UserKeys, forget};
use crate::scan::OpenFiles;
use crate::verify::{VerifyOptions, absent, verify};
use crate::{
    Buckets, Commit, DatasetWriter, FeatureGroup, KeptColumn, KeptKind, Layout, Order, PartitionColumn,
    PartitionFilter, PartitionKey, PartitionType, SESSION_COLUMN, Schema, Sessions, Snapshot, SparseFeature,
    SparseKind, TIME_COLUMN, Vocabulary, WriterOptions, missing_column, rename_feature, session_id,
};

const COUNTRIES: [&str; 2] = ["DK", "NO"];
const HOUR: i64 = 3_600_000_000;

/// A sample, with the values from which its session id is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sample {
    pub(crate) country: usize,
    pub(crate) user: i64,
    /// The hour at which the session starts.
    pub(crate) start: i64,
    /// The index of the sample in its session.
    pub(crate) number: i64,
}

impl Sample {
    fn session(&self) -> i64 {
        let (user, country) = (self.user.to_string(), COUNTRIES[self.country]);
        session_id(&user, &format!("{country}\u{1f}{user}\u{1f}{}", self.start * HOUR))
    }

    fn time(&self) -> i64 {
        self.start * HOUR + self.number
    }

    fn partition(&self) -> PartitionKey {
        let date = format!("2024-05-{:02}", 1 + self.start / 24);
        PartitionKey::new(vec![
            ("country".to_owned(), COUNTRIES[self.country].to_owned()),
            ("date".to_owned(), date),
        ])
    }
}

pub(crate) fn schema() -> Schema {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let group =
        |name: &str, deduplicated, features| FeatureGroup { name: name.to_owned(), deduplicated, features };
    Schema {
        labels: vec!["clicked".to_owned()],
        weight: None,
        dense: Vec::new(),
        groups: vec![
            group(
                "user",
                true,
                vec![feature("user", SparseKind::Sparse), feature("history", SparseKind::Sequence)],
            ),
            group("item", false, vec![feature("item", SparseKind::Sparse)]),
        ],
        kept: vec![KeptColumn { name: "who".to_owned(), kind: KeptKind::Text }],
    }
}

/// Returns the columns of samples.
pub(crate) fn columns(samples: &[Sample]) -> RecordBatch {
    let integers = |of: &dyn Fn(&Sample) -> i64| samples.iter().map(of).collect::<Vec<i64>>();
    let lists = |of: &dyn Fn(&Sample) -> Vec<i64>| -> ArrayRef {
        let lists = samples.iter().map(|sample| Some(of(sample).into_iter().map(Some)));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let history =
        |s: &Sample| -> Vec<i64> { (s.number / 2..s.number / 2 + 3).map(|i| 1000 * s.user + i).collect() };
    let who = samples.iter().map(|sample| format!("u{}", sample.user));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("session_id", Arc::new(Int64Array::from(integers(&Sample::session)))),
        ("timestamp", Arc::new(TimestampMicrosecondArray::from(integers(&Sample::time)))),
        ("clicked", Arc::new(Float32Array::from_iter_values(samples.iter().map(|s| (s.number % 2) as f32)))),
        ("who", Arc::new(StringArray::from_iter_values(who))),
        ("user", lists(&|sample| vec![sample.user])),
        ("history", lists(&history)),
        ("item", lists(&|sample| vec![sample.number, 7])),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

pub(crate) fn options(layout: Layout, order: Order, buckets: Buckets, bytes: usize) -> WriterOptions {
    WriterOptions {
        layout,
        buckets,
        sessions: Some(Sessions::Gap { user: "user".to_owned(), gap_micros: HOUR / 2 }),
        threads: 2,
        row_group_bytes: bytes,
        file_bytes: 3 * bytes,
        ..WriterOptions::new(order)
    }
}

/// Writes samples in the order of the options.
pub(crate) fn write(root: &Path, options: &WriterOptions, samples: &[Sample]) -> Snapshot {
    write_as(root, schema(), None, options, samples)
}

/// Works like `write`, with the given schema and vocabulary `user`.
pub(crate) fn write_as(
    root: &Path,
    schema: Schema,
    users: Option<&Vocabulary>,
    options: &WriterOptions,
    samples: &[Sample],
) -> Snapshot {
    let within = |sample: &Sample| match options.order {
        Order::Session => (sample.start * HOUR, sample.session(), sample.time()),
        Order::SessionHash => (sample.session(), sample.time(), 0),
        Order::Arrival => (sample.time(), sample.session(), 0),
    };
    let mut samples = samples.to_vec();
    samples.sort_by_cached_key(|sample| {
        (sample.partition(), options.buckets.bucket_of(sample.session()), within(sample))
    });
    let mut writer = DatasetWriter::create(root, schema, options.clone()).unwrap();
    let columns_of_partitions = [("country", PartitionType::Text), ("date", PartitionType::Date)];
    let partition_columns = columns_of_partitions.map(|(name, kind)| PartitionColumn::new(name, kind));
    writer.set_partition_columns(partition_columns.to_vec()).unwrap();
    for of_partition in samples.chunk_by(|a, b| a.partition() == b.partition()) {
        writer.write(&of_partition[0].partition(), &columns(of_partition)).unwrap();
    }
    if let Some(users) = users {
        writer.add_vocabulary("user", users).unwrap();
    }
    writer.finish().unwrap();
    Snapshot::load(root).unwrap()
}

/// The paths and bytes of the data files, by partition and range of buckets.
type Content = BTreeMap<(String, u32), Vec<(String, Vec<u8>)>>;

/// Reads the partition, session and time of each sample, in dataset order.
fn read(root: &Path) -> Vec<(String, i64, i64)> {
    let (storage, snapshot) = (Storage::open(root).unwrap(), Snapshot::load(root).unwrap());
    let mut all = Vec::new();
    for partition in &snapshot.partitions {
        for set in &partition.files {
            let files = OpenFiles::open(&storage, &snapshot, set).unwrap();
            for row_group in 0..files.row_groups() {
                let sessions = files.numbers::<Int64Type>(row_group, SESSION_COLUMN).unwrap();
                let times = files.numbers::<TimestampMicrosecondType>(row_group, TIME_COLUMN).unwrap();
                let samples = sessions.iter().zip(times.iter());
                all.extend(samples.map(|(session, time)| (partition.key.to_string(), *session, *time)));
            }
        }
    }
    all
}

/// Verifies a dataset, which must have no problems, and returns its digest.
#[track_caller]
fn sound(root: &Path) -> String {
    let verified = verify(root, &VerifyOptions::new(2), &Silent).unwrap();
    assert!(verified.is_sound(), "{:?}", verified.problems);
    verified.digest.unwrap().to_string()
}

pub(crate) fn keys(users: impl IntoIterator<Item = i64>) -> UserKeys {
    UserKeys { columns: None, rows: users.into_iter().map(|user| vec![Some(user.to_string())]).collect() }
}

pub(crate) fn how(bytes: usize) -> RewriteOptions {
    RewriteOptions { threads: 2, row_group_bytes: bytes, file_bytes: 3 * bytes }
}

fn forgotten(root: &Path, keys: &UserKeys, bytes: usize, purge: bool) -> Forgotten {
    let options = ForgetOptions { column: None, how: how(bytes), dry_run: false, purge };
    forget(&Storage::open(root).unwrap(), keys, &options, &Silent).unwrap()
}

/// Generates sessions of up to 12 users, each with up to 8 samples.
fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let sessions = prop::collection::btree_map((0..2_usize, 0..12_i64, 0..48_i64), 1..9_i64, 1..60);
    sessions.prop_map(|sessions| {
        let all = sessions.into_iter().flat_map(|((country, user, start), samples)| {
            (0..samples).map(move |number| Sample { country, user, start, number })
        });
        all.collect()
    })
}

fn written_so() -> impl Strategy<Value = WriterOptions> {
    let layouts = prop_oneof![Just(Layout::Rows), Just(Layout::Folded)];
    let orders = prop_oneof![Just(Order::Session), Just(Order::SessionHash), Just(Order::Arrival)];
    let buckets = prop_oneof![
        Just(Buckets { number: 1, in_range: 1 }),
        Just(Buckets { number: 8, in_range: 8 }),
        Just(Buckets { number: 8, in_range: 2 }),
    ];
    // The size of a row group ranges from less than one session to several sessions.
    let bytes = prop_oneof![Just(150_usize), Just(700), Just(4000)];
    (layouts, orders, buckets, bytes)
        .prop_map(|(layout, order, buckets, bytes)| options(layout, order, buckets, bytes))
}

proptest! {
    #![proptest_config(onefold_property::cases(24))]

    #[test]
    fn forgetting_users_gives_what_a_build_without_them_gives(
        samples in samples(),
        options in written_so(),
        users in prop::collection::btree_set(0..14_i64, 1..5),
        renamed: bool,
    ) {
        let (directory, anew) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (root, bytes) = (directory.path(), options.row_group_bytes);
        // The columns of the files then differ from the columns of the schema.
        let written = |root: &Path, samples: &[Sample]| {
            let snapshot = write(root, &options, samples);
            if renamed {
                rename_feature(&Storage::open(root).unwrap(), "item", "thing").unwrap();
                return Snapshot::load(root).unwrap();
            }
            snapshot
        };
        let before = written(root, &samples);
        let left: Vec<Sample> = samples.iter().filter(|s| !users.contains(&s.user)).copied().collect();
        let gone: BTreeSet<i64> = samples.iter().map(|s| s.user).filter(|user| users.contains(user)).collect();
        let removed = forgotten(root, &keys(users.iter().copied()), bytes, false);
        prop_assert_eq!(removed.samples_removed, (samples.len() - left.len()) as u64);
        prop_assert_eq!((removed.users, removed.users_found), (users.len(), gone.len()));
        prop_assert_eq!(removed.changed, !gone.is_empty());
        let now = Snapshot::load(root).unwrap();
        if !left.is_empty() {
            let expected = written(anew.path(), &left);
            prop_assert_eq!(sound(root), sound(anew.path()));
            prop_assert_eq!(read(root), read(anew.path()));
            prop_assert_eq!(&now.statistics.features, &expected.statistics.features);
            prop_assert_eq!(now.statistics.sessions, expected.statistics.sessions);
            prop_assert_eq!(now.statistics.partitions, expected.statistics.partitions);
        }
        prop_assert_eq!(now.statistics.samples, left.len() as u64);
        // The previous snapshot contains the users. After it is purged, no snapshot does.
        let storage = Storage::open(root).unwrap();
        let users = keys(users);
        let look = |at| absent(&storage, &users, None, at, &Silent).unwrap();
        let found = look(Some(now.snapshot));
        prop_assert!(found.places.is_empty(), "{:?}", found);
        prop_assert_eq!(look(None).places_found > 0, !gone.is_empty());
        let purged = forgotten(root, &users, bytes, true);
        prop_assert_eq!(purged.samples_removed, 0);
        let snapshots: Vec<u64> = if gone.is_empty() { vec![] } else { (1..=before.snapshot).collect() };
        prop_assert_eq!(purged.snapshots_with_users, Some(snapshots));
        let nothing = look(None);
        prop_assert!(nothing.places.is_empty() && nothing.files_not_read.is_empty(), "{:?}", nothing);
        prop_assert_eq!(Snapshot::load(root).unwrap(), now);
    }

    #[test]
    fn compacting_gives_the_files_of_a_new_dataset(samples in samples(), options in written_so()) {
        let (directory, anew) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (root, bytes) = (directory.path(), 5 * options.row_group_bytes);
        let before = write(root, &options, &samples);
        let (digest, storage) = (sound(root), Storage::open(root).unwrap());
        let compacted = compact(&storage, &PartitionFilter::default(), &how(bytes), &Silent).unwrap();
        let now = Snapshot::load(root).unwrap();
        prop_assert_eq!(sound(root), digest);
        prop_assert_eq!((now.statistics.files, now.statistics.bytes_on_disk), (compacted.files, compacted.bytes_on_disk));
        prop_assert_eq!(now.statistics.sessions, before.statistics.sessions);
        prop_assert_eq!(&now.statistics.features, &before.statistics.features);
        let new = WriterOptions { row_group_bytes: bytes, file_bytes: 3 * bytes, ..options };
        let expected = write(anew.path(), &new, &samples);
        let division = now.division();
        let content = |root: &Path, snapshot: &Snapshot| -> Content {
            let sets = snapshot.partitions.iter().flat_map(|p| p.files.iter().map(move |set| (&p.key, set)));
            let mut content: BTreeMap<_, Vec<_>> = BTreeMap::new();
            for (key, set) in sets {
                let place = (key.to_string(), division.range_of(set.bucket));
                let bytes = fs_err::read(root.join(set.path())).unwrap();
                content.entry(place).or_default().push((set.path().to_owned(), bytes));
            }
            content
        };
        let (old, new) = (content(root, &before), content(anew.path(), &expected));
        let mut rewritten = 0;
        for (place, files) in content(root, &now) {
            if files == old[&place] {
                continue;
            }
            rewritten += 1;
            let bytes = |files: &[(String, Vec<u8>)]| files.iter().map(|(_, bytes)| bytes.clone()).collect::<Vec<_>>();
            prop_assert!(files.len() <= old[&place].len());
            prop_assert_eq!(bytes(&files), bytes(&new[&place]));
        }
        prop_assert_eq!(compacted.ranges_rewritten, rewritten);
        prop_assert_eq!(compacted.changed, rewritten > 0);
        let again = compact(&storage, &PartitionFilter::default(), &how(bytes), &Silent).unwrap();
        prop_assert!(!again.changed, "{:?}", again);
    }
}

#[test]
fn files_still_lack_features_after_they_were_rewritten() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let of_day = |day: i64| {
        let all = (0..60_i64).flat_map(move |session| {
            let start = 24 * day + session / 12;
            (0..4).map(move |number| Sample { country: 0, user: session % 12, start, number })
        });
        all.collect::<Vec<_>>()
    };
    for order in [Order::Session, Order::SessionHash] {
        let options = WriterOptions {
            commit: Commit::Overwrite,
            ..options(Layout::Folded, order, Buckets { number: 8, in_range: 8 }, 700)
        };
        write(root, &options, &of_day(0));
        // The samples of the second day have two further features.
        let mut further = schema();
        further.dense.push("weight".to_owned());
        let features = vec![SparseFeature::new("past", SparseKind::Sequence)];
        further.groups.push(FeatureGroup { name: "past".to_owned(), deduplicated: true, features });
        let append = WriterOptions { commit: Commit::Append, ..options };
        let mut writer = DatasetWriter::create(root, further.clone(), append.clone()).unwrap();
        writer.set_partition_columns(Snapshot::load(root).unwrap().partition_columns).unwrap();
        let mut samples = of_day(1);
        samples.sort_by_cached_key(|sample| match order {
            Order::Session => {
                (append.buckets.bucket_of(sample.session()), sample.start * HOUR, sample.session())
            }
            _ => (append.buckets.bucket_of(sample.session()), sample.session(), 0),
        });
        let rows = columns(&samples);
        let fields = further.to_arrow();
        let values = fields.fields().iter().map(|field| {
            let known = rows.column_by_name(field.name()).cloned();
            (field.name().clone(), known.unwrap_or_else(|| missing_column(field, rows.num_rows())))
        });
        let rows = RecordBatch::try_from_iter(values.collect::<Vec<_>>()).unwrap();
        writer.write(&samples[0].partition(), &rows).unwrap();
        writer.finish().unwrap();
        let lacking = || -> Vec<BTreeSet<Vec<String>>> {
            let snapshot = Snapshot::load(root).unwrap();
            let of = |set: &crate::FileSet| set.changes.lacks.clone();
            snapshot.partitions.iter().map(|partition| partition.files.iter().map(of).collect()).collect()
        };
        let expected = lacking();
        assert_eq!((expected[0].first().unwrap().len(), &expected[1]), (2, &BTreeSet::from([vec![]])));
        assert!(forgotten(root, &keys([3, 8]), 700, false).changed);
        assert_eq!(lacking(), expected);
        let digest = sound(root);
        let storage = Storage::open(root).unwrap();
        let compacted = compact(&storage, &PartitionFilter::default(), &how(20_000), &Silent).unwrap();
        assert!(compacted.files < compacted.files_before, "{compacted:?}");
        assert_eq!((lacking(), sound(root)), (expected, digest));
    }
}

#[test]
fn only_the_files_of_the_users_are_written_again() {
    let directory = tempfile::tempdir().unwrap();
    let all = (0..400_i64).flat_map(|session| {
        (0..4).map(move |number| Sample { country: 0, user: session % 40, start: session / 20, number })
    });
    let options = options(Layout::Folded, Order::Session, Buckets { number: 64, in_range: 64 }, 1000);
    let before = write(directory.path(), &options, &all.collect::<Vec<_>>());
    let removed = forgotten(directory.path(), &keys([7]), 1000, false);
    assert_eq!((removed.samples_removed, removed.sessions_removed, removed.partitions), (40, 10, 1));
    let now = Snapshot::load(directory.path()).unwrap();
    let paths =
        |snapshot: &Snapshot| -> BTreeSet<String> { snapshot.file_paths().map(str::to_owned).collect() };
    let (old, new) = (paths(&before), paths(&now));
    assert_eq!(old.difference(&new).count() as u64, removed.files_rewritten);
    assert_eq!(new.difference(&old).count() as u64, removed.files_written);
    assert!(removed.files_rewritten < 10 && old.len() > 20, "{removed:?}, {} files", old.len());
    assert_eq!((now.operation.kind, now.operation.samples_gained), (Commit::Forget, -40));
    sound(directory.path());
}
