//! Tests of reports on samples with known figures.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::Int64Type;

use super::*;
use onefold_base::progress::{Reporter, Silent};
use onefold_datasets::{
    DatasetWriter, Error, FeatureGroup, PartitionKey, SESSION_COLUMN, Schema, SparseFeature, TIME_COLUMN,
    WriterOptions,
};

/// The number of samples of every session.
const SIZE: i64 = 8;
/// The number of sessions whose samples are interleaved.
const BESIDE: i64 = 640;
const SESSIONS: i64 = 4 * BESIDE;

/// `a` and `b` change together at every fourth sample, `window` gets an id at every second sample, and `item` is new
/// in each sample.
fn schema(name: &str) -> Schema {
    let feature = |name: &str, kind| SparseFeature::new(name, kind);
    let user = vec![feature(name, SparseKind::Sparse), feature("b", SparseKind::Sparse)];
    let group =
        |name: &str, deduplicated, features| FeatureGroup { name: name.into(), deduplicated, features };
    let groups = vec![
        group("user", true, user),
        group("past", true, vec![feature("window", SparseKind::Sequence)]),
        group("item", false, vec![feature("item", SparseKind::Sparse)]),
    ];
    Schema {
        labels: vec!["clicked".into()],
        weight: None,
        dense: vec!["age".into()],
        kept: Vec::new(),
        groups,
    }
}

fn lists(session: i64, i: i64) -> [Vec<i64>; 4] {
    // Different numbers become different 63-bit ids, like hashes, whose bytes cannot be compressed. Wellons's
    // `lowbias32` is a bijection.
    let mixed = |number: u32| {
        [(16, 0x7FEB_352D), (15, 0x846C_A68B), (16, 1)]
            .into_iter()
            .fold(number, |x, (shift, odd): (u32, u32)| (x ^ (x >> shift)).wrapping_mul(odd))
    };
    let id = |number: i64| {
        let low = mixed(number as u32);
        i64::from(mixed(!low) >> 1) << 32 | i64::from(low)
    };
    let (user, past) = (id(session * 100 + i / 4), session * 1_000 + i / 2);
    [vec![user; 2], vec![user], (past..past + 10).map(id).collect(), vec![id(session * 10 + i)]]
}

/// Writes the dataset in one partition. `name` is the name of its first sparse feature.
fn dataset(directory: &Path, name: &str, layout: Layout, order: Order) {
    let mut places: Vec<(i64, i64, i64)> = Vec::new();
    for session in 0..SESSIONS {
        let start = (session / BESIDE) * BESIDE * SIZE + session % BESIDE;
        places.extend((0..SIZE).map(|i| (session, start + i * BESIDE, i)));
    }
    if order == Order::Arrival {
        places.sort_by_key(|(_, time, _)| *time);
    }
    let options = WriterOptions {
        layout,
        row_group_bytes: 200_000,
        file_bytes: 1_000_000,
        ..WriterOptions::new(order)
    };
    let mut writer = DatasetWriter::create(directory, schema(name), options).unwrap();
    for places in places.chunks(1_000) {
        let floats = || Arc::new(Float32Array::from(vec![0.5; places.len()])) as ArrayRef;
        let mut columns: Vec<(&str, ArrayRef)> = vec![
            (SESSION_COLUMN, Arc::new(places.iter().map(|p| p.0).collect::<Int64Array>())),
            (TIME_COLUMN, Arc::new(TimestampMicrosecondArray::from_iter_values(places.iter().map(|p| p.1)))),
            ("clicked", floats()),
            ("age", floats()),
        ];
        for (feature, name) in [name, "b", "window", "item"].into_iter().enumerate() {
            let lists = places.iter().map(|(session, _, i)| {
                Some(lists(*session, *i)[feature].iter().copied().map(Some).collect::<Vec<_>>())
            });
            columns.push((name, Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))));
        }
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        writer.write(&PartitionKey::default(), &batch).unwrap();
    }
    writer.finish().unwrap();
}

fn reported(layout: Layout, order: Order, options: ReportOptions) -> Report {
    let directory = tempfile::tempdir().unwrap();
    dataset(directory.path(), "a", layout, order);
    gather(directory.path(), &options, &Silent).unwrap()
}

#[track_caller]
fn close(found: f64, expected: f64, tolerance: f64) {
    assert!((found / expected - 1.0).abs() <= tolerance, "{found} is not {expected}");
}

/// Checks the figures that do not depend on which samples were sorted into another order.
fn check_clustered(report: &Report) {
    let sizes = &report.samples_per_session;
    assert_eq!((sizes.mean, sizes.median, sizes.p99, sizes.max), (8.0, 8, 8, 8));
    let [user, past, item] = &report.groups[..] else { panic!("{:?}", report.groups) };
    assert_eq!((user.figures.ids_per_sample, past.figures.ids_per_sample), (3.0, 10.0));
    // Among seven samples that have a previous sample, one changes the user and three change the window.
    close(user.figures.repeat_probability.unwrap(), 6.0 / 7.0, 1e-9);
    close(past.figures.repeat_probability.unwrap(), 4.0 / 7.0, 1e-9);
    assert_eq!(item.figures.repeat_probability, Some(0.0));
    close(user.figures.predicted_dedupe_factor, 4.0, 1e-9);
    for batch in 0..BATCH_SIZES.len() {
        // Batches contain whole sessions. Eight samples have two rows of the user and four windows with thirteen
        // distinct ids.
        let of = |group: &GroupReport| group.figures.batches[batch].clone();
        assert_eq!((of(user).dedupe_factor, of(user).rows_per_sample), (4.0, 0.25));
        assert_eq!((of(past).dedupe_factor, of(item).dedupe_factor), (2.0, 1.0));
        close(of(past).partial_dedupe_factor, 80.0 / 13.0, 1e-9);
        close(report.all[batch].dedupe_factor, 8.0 * 14.0 / (6.0 + 40.0 + 8.0), 1e-9);
        close(report.all[batch].partial_dedupe_factor, 8.0 * 14.0 / (6.0 + 13.0 + 8.0), 1e-9);
        let training = &report.training[batch];
        close(training.window.lookups_per_sample, (6.0 + 13.0 + 8.0) / 8.0, 1e-9);
        // The dataset has two floats per sample: a label and a dense feature.
        close(training.off.bytes_to_device_per_sample, 8.0 * 14.0 + 8.0 * 4.0 + 8.0, 1e-9);
        let exact = 8.0 * 54.0 / 8.0 + 8.0 * (2.0 * 2.0 + 4.0 + 8.0) / 8.0 + 4.0 * 2.0 + 8.0;
        close(training.exact.bytes_to_device_per_sample, exact, 1e-9);
    }
    assert_eq!(
        report.dedupe_factor,
        BTreeMap::from([("user".into(), 4.0), ("past".into(), 2.0), ("item".into(), 1.0)])
    );
    let share = &report.co_change.share;
    assert_eq!((share[0][1], share[1][0]), (Some(1.0), Some(1.0)));
    // The window changes at samples 2, 4 and 6, and the user at sample 4.
    assert_eq!((share[0][2], share[2][3]), (Some(1.0), Some(1.0)));
    close(share[2][0].unwrap(), 1.0 / 3.0, 1e-9);
}

#[test]
fn figures_are_those_of_the_samples_in_any_layout_and_order() {
    for layout in [Layout::Rows, Layout::Folded] {
        for order in [Order::Session, Order::Arrival] {
            let report = reported(layout, order, ReportOptions::new(2));
            check_clustered(&report);
            let samples = (SESSIONS * SIZE) as u64;
            assert_eq!((report.samples, report.sessions), (samples, SESSIONS as u64));
            assert_eq!(
                (report.storage.arrival_samples, report.storage.clustered_samples),
                (samples, samples)
            );
            // In arrival order, nothing repeats within 640 samples, but everything repeats within four times as many.
            let arrival =
                |batch: usize| report.groups[0].figures.batches[batch].arrival_dedupe_factor.unwrap();
            assert_eq!(arrival(0), 1.0);
            close(arrival(2), 3.2, 0.1);
            let storage = &report.storage;
            assert!(storage.folded_bytes_per_sample < storage.rows_bytes_per_sample);
            assert!(storage.rows_bytes_per_sample < storage.arrival_bytes_per_sample);
        }
    }
}

#[test]
fn stored_ids_and_bytes_are_reported_by_column() {
    let report = reported(Layout::Rows, Order::Session, ReportOptions::new(1));
    let columns = &report.storage.columns;
    let names: std::collections::BTreeSet<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    assert_eq!(names, ["a", "age", "b", "clicked", "item", SESSION_COLUMN, TIME_COLUMN, "window"].into());
    let column = |name: &str| columns.iter().find(|column| column.name == name).unwrap();
    assert_eq!(column("age").ids, None);
    let window = column("window").ids.unwrap();
    close(window.stored_ids_per_sample, 13.0 / 8.0, 1e-3);
    assert_eq!(window.distinct_ids, (SESSIONS * 13) as u64);
    // Every id is stored once.
    close(window.entropy_bytes_per_stored_id, ((SESSIONS * 13) as f64).log2() / 8.0, 1e-9);
    let sum: f64 = columns.iter().map(|column| column.folded_bytes_per_sample).sum();
    close(sum, report.storage.folded_bytes_per_sample, 1e-9);
}

#[test]
fn figures_of_a_part_of_the_samples_estimate_those_of_all() {
    let all = reported(Layout::Folded, Order::Session, ReportOptions::new(2));
    let few = ReportOptions { memory: 900_000, encode_samples: 4_000, ..ReportOptions::new(2) };
    for order in [Order::Session, Order::SessionHash, Order::Arrival] {
        let some = reported(Layout::Folded, order, few.clone());
        check_clustered(&some);
        let (arrival, clustered) = (some.storage.arrival_samples, some.storage.clustered_samples);
        assert!(
            (2_000..8_000).contains(&arrival) && (2_000..8_000).contains(&clustered),
            "{arrival} {clustered}"
        );
        close(some.storage.folded_bytes_per_sample, all.storage.folded_bytes_per_sample, 0.1);
        assert!(some.storage.arrival_bytes_per_sample > some.storage.rows_bytes_per_sample);
        let factor =
            |report: &Report| report.groups[0].figures.batches[MIDDLE].arrival_dedupe_factor.unwrap();
        close(factor(&some), factor(&all), 0.1);
        if order != Order::Arrival {
            assert_eq!(
                some.groups[0].figures.batches[2].arrival_dedupe_factor, None,
                "no stretch is that long"
            );
        }
    }
}

#[test]
fn batches_of_a_sample_of_sessions_span_the_same_time() {
    let options = ReportOptions { sampled: Some(0.25), ..ReportOptions::new(1) };
    let report = reported(Layout::Folded, Order::Session, options);
    let arrival = |batch: usize| report.groups[0].figures.batches[batch].arrival_dedupe_factor.unwrap();
    // Batches of 128, 512 and 2,048 samples.
    assert_eq!((arrival(0), arrival(1)), (1.0, 1.0));
    let whole = reported(Layout::Folded, Order::Session, ReportOptions::new(1));
    assert_eq!(Some(arrival(2)), whole.groups[0].figures.batches[1].arrival_dedupe_factor);
    assert!(html(&report).contains("Estimated from 1 in 4 sessions"));
    let few = ReportOptions { sampled: Some(0.001), ..ReportOptions::new(1) };
    let few = reported(Layout::Folded, Order::Session, few);
    assert_eq!(few.groups[0].figures.batches[2].arrival_dedupe_factor, None);
}

/// The number of samples that were read.
#[derive(Debug, Default)]
struct Read(AtomicU64);

impl Reporter for Read {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {}
    fn advance(&self, samples: u64) {
        self.0.fetch_add(samples, Ordering::Relaxed);
    }
    fn note(&self, _: &str) {}
    fn end(&self) {}
}

#[test]
fn datasets_that_cannot_be_reported_on_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    dataset(directory.path(), "a", Layout::Folded, Order::Session);
    let refused = |options: ReportOptions| gather(directory.path(), &options, &Silent).unwrap_err();
    let error = refused(ReportOptions { sampled: Some(0.0), ..ReportOptions::new(1) }).to_string();
    assert!(error.contains("0 is not a share of the sessions\n  hint: "), "{error}");
    let snapshot = onefold_datasets::Snapshot::load(directory.path()).unwrap();
    let file = snapshot.file_paths().last().unwrap();
    fs_err::remove_file(directory.path().join(file)).unwrap();
    let (read, options) = (Read::default(), ReportOptions::new(1));
    let error = gather(directory.path(), &options, &read).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)), "{error}");
    assert!(error.to_string().contains(&format!("`{file}`: it is missing")), "{error}");
    // The files before it are read before it is opened.
    assert!(read.0.into_inner() > 0);
}

#[test]
fn names_cannot_become_markup_and_every_tag_is_closed() {
    let name = "</style></title><script>alert('1')</script>\"&";
    let directory = tempfile::tempdir().unwrap();
    dataset(directory.path(), name, Layout::Folded, Order::Session);
    let mut report = gather(directory.path(), &ReportOptions::new(1), &Silent).unwrap();
    report.dataset = name.to_owned();
    report.groups[0].name = name.to_owned();
    for sampled in [None, Some(0.5)] {
        report.sampled = sampled;
        let page = html(&report);
        assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)") && !page.contains("<script"), "{page}");
        assert!(!page.contains("http:") && !page.contains("https:") && !page.contains("url("), "{page}");
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        check_tags(&page);
    }
}

/// Checks that tags are nested correctly.
fn check_tags(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    for part in page.split('<').skip(1) {
        let (tag, _) = part.split_once('>').unwrap_or_else(|| panic!("`<{part}` does not end"));
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "`<{tag}>` closes another tag");
        } else if !tag.ends_with('/') && !["!DOCTYPE", "meta", "br"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?} are not closed");
}

#[test]
fn a_figure_is_a_number_with_its_name_in_json() {
    let report = reported(Layout::Folded, Order::Session, ReportOptions::new(1));
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["groups"][0]["repeat_probability"].as_f64().unwrap(), 1.0 - 1.0 / 7.0);
    assert_eq!(json["dedupe_factor"]["user"], 4.0);
    assert_eq!(json["groups"][1]["features"][0]["batches"][1]["dedupe_factor"], 2.0);
    assert!(json["storage"]["columns"][0]["bytes_per_stored_id"].is_f64());
    assert!(json.get("sampled").is_none() && json["samples_per_session"]["mean"] == 8.0);
}
