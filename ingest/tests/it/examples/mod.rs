//! Builds the configurations in `ingest/examples`, unchanged, over generated logs of the same form. Each sample of the
//! datasets is compared with a sample that plain loops over the rows of the log make.

mod news;
mod retail;
mod travel;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;
use std::process::Command;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, Float32Type, Int64Type, TimestampMicrosecondType};
use chrono::DateTime;
use onefold_datasets::{
    Buckets, OriginalKind, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Snapshot, TIME_COLUMN, Vocabulary, hash_id,
};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::logs::Dir;

/// The text of an id that a vocabulary leaves out, because it is too rare.
const RARE: &str = "(rare)";

/// A sample of a dataset, or an expected sample. Ids are texts: the originals of vocabularies, and the decimal digits
/// of hashes and integers.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    /// The hash of the sample's key.
    key: i64,
    partition: String,
    /// A text that is equal for samples of one session.
    session: String,
    /// The time in microseconds since 1970.
    time: i64,
    floats: BTreeMap<String, f32>,
    lists: BTreeMap<String, Vec<String>>,
}

impl Sample {
    /// Returns a sample with the values of its key, without floats and lists.
    fn new(key: &[&dyn Display], session: String, time: i64) -> Self {
        let key: Vec<String> = key.iter().map(ToString::to_string).collect();
        let key = hash_id(key.join("\u{1f}").as_bytes());
        Self { key, partition: String::new(), session, time, floats: BTreeMap::new(), lists: BTreeMap::new() }
    }

    fn float(mut self, name: &str, value: impl Into<f64>) -> Self {
        self.floats.insert(name.to_owned(), value.into() as f32);
        self
    }

    fn ids<T: ToString>(mut self, name: &str, ids: impl IntoIterator<Item = T>) -> Self {
        self.lists.insert(name.to_owned(), ids.into_iter().map(|id| id.to_string()).collect());
        self
    }

    fn hashes<T: ToString>(self, name: &str, ids: impl IntoIterator<Item = T>) -> Self {
        self.ids(name, ids.into_iter().map(|id| hash_id(id.to_string().as_bytes())))
    }
}

/// Divides the sessions of the samples, which are users so far, where the user pauses for more than half an hour.
fn divide_by_pauses(samples: &mut [Sample]) {
    samples.sort_by(|a, b| (&a.session, a.time).cmp(&(&b.session, b.time)));
    let mut last: Option<(String, i64)> = None;
    let mut number = 0;
    for sample in samples {
        let goes_on = |(user, time): &(String, i64)| {
            *user == sample.session && sample.time - *time <= 30 * 60 * 1_000_000
        };
        number += i32::from(!last.as_ref().is_some_and(goes_on));
        last = Some((sample.session.clone(), sample.time));
        sample.session = number.to_string();
    }
}

/// Adds the day on which the session of each sample starts to its partition.
fn add_days(samples: &mut [Sample]) {
    let mut starts: BTreeMap<String, i64> = BTreeMap::new();
    for sample in &*samples {
        let start = starts.entry(sample.session.clone()).or_insert(sample.time);
        *start = sample.time.min(*start);
    }
    for sample in samples {
        let start = DateTime::from_timestamp_micros(starts[&sample.session]).unwrap();
        sample.partition += &start.format("date=%Y-%m-%d").to_string();
    }
}

/// A vocabulary: the features of the log and of timelines that use it, and the ids of all rows of these timelines.
struct Numbers<'a> {
    name: &'a str,
    logged: &'a [&'a str],
    windows: &'a [&'a str],
    rows: Vec<String>,
    min_count: u64,
}

impl Numbers<'_> {
    /// Checks that the dataset has the vocabulary of the samples, and replaces ids in `samples` that are too rare.
    fn check(&self, dataset: &Path, samples: &mut [Sample]) {
        let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
        let in_samples =
            samples.iter().flat_map(|sample| self.logged.iter().flat_map(|name| &sample.lists[*name]));
        in_samples.chain(&self.rows).for_each(|id| *counts.entry(id).or_default() += 1);
        let all = counts.len();
        let known = counts.into_iter().filter(|(_, count)| *count >= self.min_count);
        let mut known: Vec<(String, u64)> = known.map(|(id, count)| (id.to_owned(), count)).collect();
        assert_eq!(self.min_count > 1, known.len() < all, "of {all} ids of {} some must be rare", self.name);

        let vocabulary = Vocabulary::load(dataset, &Snapshot::load(dataset).unwrap(), self.name).unwrap();
        match vocabulary.kind() {
            OriginalKind::Text => known.sort_by_key(|(id, count)| (Reverse(*count), id.clone())),
            OriginalKind::Integer => {
                known.sort_by_key(|(id, count)| (Reverse(*count), id.parse::<i64>().unwrap()));
            }
        }
        let numbered = |id: i64| (original(&vocabulary, id), vocabulary.count(id).unwrap());
        let built: Vec<(String, u64)> = (1..=vocabulary.len() as i64).map(numbered).collect();
        assert_eq!(built, known, "vocabulary {}", self.name);

        let known: BTreeSet<String> = known.into_iter().map(|(id, _)| id).collect();
        for name in self.logged.iter().chain(self.windows) {
            let ids = samples.iter_mut().flat_map(|sample| sample.lists.get_mut(*name).unwrap());
            ids.filter(|id| !known.contains(*id)).for_each(|id| *id = RARE.to_owned());
        }
    }
}

fn original(vocabulary: &Vocabulary, id: i64) -> String {
    let text = match vocabulary.kind() {
        OriginalKind::Text => vocabulary.original_text(id).map(str::to_owned),
        OriginalKind::Integer => vocabulary.original(id).map(|id| id.to_string()),
    };
    assert_eq!(text.is_none(), id == 0, "id {id} is not in the vocabulary");
    text.unwrap_or_else(|| RARE.to_owned())
}

/// Reads the samples of a dataset in the layout `rows`, in order.
fn read(dataset: &Path) -> Vec<Sample> {
    let snapshot = Snapshot::load(dataset).unwrap();
    let features =
        snapshot.schema.sparse_features().filter_map(|feature| Some((feature, feature.vocabulary.as_ref()?)));
    let vocabularies: BTreeMap<&str, Vocabulary> = features
        .map(|(feature, name)| (&*feature.name, Vocabulary::load(dataset, &snapshot, name).unwrap()))
        .collect();
    let mut samples = Vec::new();
    for partition in &snapshot.partitions {
        for file in &partition.files {
            let file = fs_err::File::open(dataset.join(file.path())).unwrap().into_file();
            let batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
            for batch in batches {
                read_batch(&batch.unwrap(), &partition.key.to_string(), &vocabularies, &mut samples);
            }
        }
    }
    samples
}

fn read_batch(
    batch: &RecordBatch,
    partition: &str,
    vocabularies: &BTreeMap<&str, Vocabulary>,
    samples: &mut Vec<Sample>,
) {
    let column = |name: &str| batch.column_by_name(name).unwrap();
    let integers = |name: &str| column(name).as_primitive::<Int64Type>().values();
    let (keys, sessions) = (integers(SAMPLE_KEY_COLUMN), integers(SESSION_COLUMN));
    let times = column(TIME_COLUMN).as_primitive::<TimestampMicrosecondType>().values();
    let first = samples.len();
    samples.extend((0..batch.num_rows()).map(|row| Sample {
        key: keys[row],
        partition: partition.to_owned(),
        session: sessions[row].to_string(),
        time: times[row],
        floats: BTreeMap::new(),
        lists: BTreeMap::new(),
    }));
    let schema = batch.schema();
    for (field, values) in schema.fields().iter().zip(batch.columns()) {
        let name = field.name();
        for (row, sample) in samples[first..].iter_mut().enumerate() {
            match field.data_type() {
                DataType::Float32 => {
                    sample.floats.insert(name.clone(), values.as_primitive::<Float32Type>().value(row));
                }
                DataType::List(_) => {
                    let ids = values.as_list::<i32>().value(row);
                    let text = |id: &i64| {
                        vocabularies.get(&**name).map_or(id.to_string(), |numbers| original(numbers, *id))
                    };
                    let ids = ids.as_primitive::<Int64Type>().values().iter().map(text).collect();
                    sample.lists.insert(name.clone(), ids);
                }
                _ => assert!([SAMPLE_KEY_COLUMN, SESSION_COLUMN, TIME_COLUMN].contains(&&**name), "{name}"),
            }
        }
    }
}

/// Checks that a dataset has the expected samples, in the same sessions, and in the order that a dataset promises.
fn check(dataset: &Path, expected: Vec<Sample>) {
    let built = read(dataset);
    check_order(&built, Snapshot::load(dataset).unwrap().division());
    let all = expected.len();
    let mut expected: BTreeMap<i64, Sample> =
        expected.into_iter().map(|sample| (sample.key, sample)).collect();
    assert_eq!((expected.len(), built.len()), (all, all));
    let (mut theirs, mut ours) = (BTreeMap::new(), BTreeMap::new());
    for sample in built {
        let mut expected = expected.remove(&sample.key).expect("a sample of the log, once");
        let (known, name) = (
            theirs.entry(sample.session.clone()).or_insert_with(|| expected.session.clone()),
            ours.entry(expected.session.clone()).or_insert_with(|| sample.session.clone()),
        );
        assert_eq!((&*known, &*name), (&expected.session, &sample.session), "session of {sample:?}");
        expected.session.clone_from(&sample.session);
        assert_eq!(sample, expected);
    }
}

/// Checks that sessions are contiguous and ordered by bucket and start, and that their samples are ordered by time.
fn check_order(samples: &[Sample], buckets: Buckets) {
    let mut sessions = BTreeSet::new();
    for session in samples.chunk_by(|a, b| a.session == b.session) {
        assert!(sessions.insert(&session[0].session), "a session is cut: {:?}", session[0]);
        assert!(session.is_sorted_by_key(|sample| sample.time), "{:?}", session[0]);
        assert!(session.iter().all(|sample| sample.partition == session[0].partition), "{:?}", session[0]);
    }
    for partition in samples.chunk_by(|a, b| a.partition == b.partition) {
        let bucket = |session: &str| buckets.bucket_of(session.parse().unwrap());
        let starts = partition
            .chunk_by(|a, b| a.session == b.session)
            .map(|session| (bucket(&session[0].session), session[0].time));
        assert!(starts.is_sorted(), "the sessions of {} are not in order", partition[0].partition);
    }
}

/// Builds the dataset `out` with the configuration `text`, and returns the summary.
#[track_caller]
fn build(dir: &Dir, text: &str, out: &str) -> Value {
    dir.write("dataset.toml", text);
    let mut program = dir.program(out);
    program.args(["--layout", "rows"]);
    let summary = dir.works(program, out).0;
    let mut verify = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    let output =
        verify.current_dir(dir.path("")).args(["verify", out, "--against", "dataset.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    summary
}

/// Replaces `from` by `to` in a configuration that must contain it, and checks that the build fails with a message that
/// contains `parts`.
#[track_caller]
fn fails(dir: &Dir, text: &str, from: &str, to: &str, parts: &[&str]) {
    assert!(text.contains(from), "the example does not contain {from:?}");
    dir.write("dataset.toml", text.replace(from, to));
    dir.fails(parts);
}

/// Pseudorandom numbers, which are the same in each run.
struct Random(u64);

impl Random {
    /// Returns a number from 0 to `end` (exclusive).
    fn below(&mut self, end: u64) -> i64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end) as i64
    }

    fn percent(&mut self, chance: i64) -> bool {
        self.below(100) < chance
    }
}
