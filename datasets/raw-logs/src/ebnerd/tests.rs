//! Tests on tiny files of the published schema.

use std::path::{Path, PathBuf};

use arrow::array::{
    BooleanArray, Float32Array, Int8Array, Int32Array, Int32Builder, LargeListBuilder, UInt32Array,
};
use arrow::datatypes::Float32Type;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::*;
use onefold_base::progress::Silent;

/// An impression: id, time in seconds, session, user, page, shown articles, clicked articles.
type Row = (u32, i64, u32, u32, Option<i32>, &'static [i32], &'static [i32]);

fn lists(rows: impl Iterator<Item = Vec<i32>>) -> ArrayRef {
    let mut lists = LargeListBuilder::new(Int32Builder::new());
    for row in rows {
        lists.values().append_slice(&row);
        lists.append(true);
    }
    Arc::new(lists.finish())
}

fn behaviors(rows: &[Row]) -> Vec<(&'static str, ArrayRef)> {
    let unsigned = |values: Vec<u32>| -> ArrayRef { Arc::new(UInt32Array::from(values)) };
    let times = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|row| row.1 * 1_000_000));
    vec![
        ("impression_id", unsigned(rows.iter().map(|row| row.0).collect())),
        ("article_id", Arc::new(rows.iter().map(|row| row.4).collect::<Int32Array>())),
        ("impression_time", Arc::new(times)),
        ("read_time", Arc::new(Float32Array::from(vec![9.0; rows.len()]))),
        ("device_type", Arc::new(Int8Array::from(vec![2; rows.len()]))),
        ("article_ids_inview", lists(rows.iter().map(|row| row.5.to_vec()))),
        ("article_ids_clicked", lists(rows.iter().map(|row| row.6.to_vec()))),
        ("user_id", unsigned(rows.iter().map(|row| row.3).collect())),
        ("is_sso_user", Arc::new(BooleanArray::from(vec![true; rows.len()]))),
        ("gender", Arc::new(Int8Array::from(vec![None; rows.len()]))),
        ("postcode", Arc::new(Int8Array::from(vec![4; rows.len()]))),
        ("age", Arc::new(Int8Array::from(vec![60; rows.len()]))),
        ("is_subscriber", Arc::new(BooleanArray::from(vec![false; rows.len()]))),
        ("session_id", unsigned(rows.iter().map(|row| row.2).collect())),
    ]
}

fn history(users: &[(u32, &[i32])]) -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("user_id", Arc::new(UInt32Array::from_iter_values(users.iter().map(|user| user.0)))),
        ("article_id_fixed", lists(users.iter().map(|user| user.1.to_vec()))),
    ]
}

fn write(path: &Path, columns: Vec<(&'static str, ArrayRef)>) {
    let rows = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs_err::File::create(path).unwrap(), rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
}

/// Train rows are out of order, and two of them have the same time. Session 1 is in both splits. 302 is a click on an
/// article that was not shown. One click is logged twice.
const TRAIN: &[Row] = &[
    (12, 7200, 1, 7, Some(50), &[101, 102], &[102, 102]),
    (11, 60, 1, 7, None, &[100, 101, 102], &[101]),
    (13, 7200, 1, 7, None, &[103], &[]),
    (14, 7201, 2, 8, None, &[102, 103], &[103, 302]),
];
const VALIDATION: &[Row] = &[(21, 90000, 1, 7, None, &[103, 104], &[104]), (22, 90001, 1, 7, None, &[], &[])];

struct Source {
    folder: tempfile::TempDir,
}

impl Source {
    fn new() -> Self {
        let source = Self { folder: tempfile::tempdir().unwrap() };
        write(&source.path("train_behaviors.parquet"), behaviors(TRAIN));
        write(&source.path("validation_behaviors.parquet"), behaviors(VALIDATION));
        write(&source.path("train_history.parquet"), history(&[(7, &[1, 2]), (8, &[3])]));
        write(&source.path("validation_history.parquet"), history(&[(7, &[4])]));
        source
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn import(&self, chunk: u32) -> Result<ImportSummary> {
        import_in_chunks(self.folder.path(), &self.path("out"), true, chunk, &Silent)
    }

    /// Checks that the import fails with `message` and a hint, and leaves no files.
    fn fails(&self, message: &str) {
        let before = fs_err::read_dir(self.folder.path()).unwrap().count();
        let error = self.import(CHUNK_IMPRESSIONS).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("\n  hint: "), "{error}");
        assert_eq!(fs_err::read_dir(self.folder.path()).unwrap().count(), before);
    }

    fn output(&self, table: &str) -> RecordBatch {
        let file = fs_err::File::open(self.path("out").join(table)).unwrap().into_parts().0;
        ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().next().unwrap().unwrap()
    }
}

fn integers<'a>(rows: &'a RecordBatch, name: &str) -> &'a [i64] {
    rows.column_by_name(name).unwrap().as_primitive::<Int64Type>().values()
}

fn integer_lists(rows: &RecordBatch, name: &str) -> Vec<Vec<i64>> {
    let lists = rows.column_by_name(name).unwrap().as_list::<i32>();
    (0..rows.num_rows()).map(|row| list_row(lists, row).to_vec()).collect()
}

#[test]
fn impressions_are_logged_in_order_of_arrival_with_what_was_known() {
    let source = Source::new();
    source.import(CHUNK_IMPRESSIONS).unwrap();
    let features = source.output("features.parquet");
    assert_eq!(integers(&features, "request_id"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(integers(&features, "impression_id"), [11, 12, 13, 14, 21, 22]);
    assert_eq!(integers(&features, "session_id"), [1, 1, 1, 2, 1, 1]);
    assert_eq!(integers(&features, "page_article_id"), [0, 50, 0, 0, 0, 0]);
    assert_eq!(integers(&features, "hour"), [0, 2, 2, 2, 1, 1]);
    assert_eq!(integers(&features, "inview_count"), [3, 2, 1, 2, 2, 0]);
    let splits = features.column_by_name("split").unwrap().as_string::<i32>();
    assert_eq!((splits.value(3), splits.value(4)), ("train", "validation"));
    let history = integer_lists(&features, "history");
    // Clicks of impressions of the same time are known only later, and the splits have separate histories.
    let expected: [&[i64]; 6] = [&[1, 2], &[1, 2, 101], &[1, 2, 101], &[3], &[4], &[4, 104]];
    assert_eq!(history, expected);
    assert_eq!(integer_lists(&features, "inview")[0], [100, 101, 102]);
}

#[test]
fn attributes_are_ids_with_0_for_unknown() {
    let source = Source::new();
    source.import(CHUNK_IMPRESSIONS).unwrap();
    let features = source.output("features.parquet");
    let first = |name| integers(&features, name)[0];
    let names = ["device_type", "is_sso_user", "gender", "postcode", "age", "is_subscriber"];
    assert_eq!(names.map(first), [3, 2, 0, 5, 61, 1]);
}

#[test]
fn clicks_are_logged_once_and_label_leaks_are_not_logged() {
    let source = Source::new();
    source.import(CHUNK_IMPRESSIONS).unwrap();
    let events = source.output("events.parquet");
    assert_eq!(integers(&events, "request_id"), [0, 1, 3, 3, 4]);
    assert_eq!(integers(&events, "article_id"), [101, 102, 103, 302, 104]);
    let features = source.output("features.parquet");
    assert!(features.column_by_name("read_time").is_none());
}

#[test]
fn click_rates_and_ages_are_those_of_earlier_moments() {
    let source = Source::new();
    source.import(CHUNK_IMPRESSIONS).unwrap();
    let features = source.output("features.parquet");
    let floats = |name: &str, row| {
        let list = features.column_by_name(name).unwrap().as_list::<i32>().value(row);
        list.as_primitive::<Float32Type>().values().to_vec()
    };
    assert_eq!(floats("inview_click_rate", 0), [0.1, 0.1, 0.1]);
    // There is one click in three views so far, which gives a prior of 2 in 13.
    let rates = [(1.0, 1.0), (0.0, 1.0)]
        .map(|(clicks, views)| ((clicks + 20.0 * 2.0 / 13.0) / (views + 20.0)) as f32);
    assert_eq!(floats("inview_click_rate", 1), rates);
    assert_eq!(floats("inview_log_age_hours", 1), [(7140.0f64 / 3600.0).ln_1p() as f32; 2]);
    assert_eq!(floats("inview_log_age_hours", 2), [0.0]);
}

#[test]
fn the_summary_counts_and_chunks_do_not_matter() {
    let source = Source::new();
    let summary = source.import(CHUNK_IMPRESSIONS).unwrap();
    let expected = ImportSummary {
        samples: 10,
        impressions: 6,
        sessions: 3,
        users: 2,
        articles: 5,
        positive_share: 0.4,
        mean_history_length: 12.0 / 6.0,
        empty_impressions: 1,
        clicks_not_shown: 1,
    };
    assert_eq!(summary, expected);
    let whole = (source.output("features.parquet"), source.output("events.parquet"));
    for chunk in [1, 2, 5] {
        assert_eq!(source.import(chunk).unwrap(), expected);
        assert_eq!((source.output("features.parquet"), source.output("events.parquet")), whole);
    }
}

#[test]
fn the_published_layout_is_found() {
    let source = Source::new();
    for split in SPLITS {
        fs_err::create_dir(source.path(split)).unwrap();
        for name in ["behaviors.parquet", "history.parquet"] {
            fs_err::rename(source.path(&format!("{split}_{name}")), source.path(split).join(name)).unwrap();
        }
    }
    assert_eq!(source.import(CHUNK_IMPRESSIONS).unwrap().impressions, 6);
}

#[test]
fn a_missing_truncated_or_empty_file_is_named() {
    let source = Source::new();
    let path = source.path("validation_behaviors.parquet");
    let bytes = fs_err::read(&path).unwrap();
    fs_err::write(&path, &bytes[..bytes.len() - 100]).unwrap();
    source.fails("validation_behaviors.parquet");
    fs_err::write(&path, b"").unwrap();
    source.fails("validation_behaviors.parquet");
    write(&path, behaviors(&[]));
    source.fails("validation_behaviors.parquet`: it holds no impressions");
    fs_err::remove_file(&path).unwrap();
    source.fails("it holds neither `validation/behaviors.parquet` nor `validation_behaviors.parquet`");
}

#[test]
fn a_wrong_column_is_named() {
    let source = Source::new();
    let path = source.path("train_behaviors.parquet");
    let with = |name: &str, column: Option<ArrayRef>| {
        let mut columns = behaviors(TRAIN);
        let at = columns.iter().position(|(found, _)| *found == name).unwrap();
        match column {
            Some(column) => columns[at].1 = column,
            None => drop(columns.remove(at)),
        }
        write(&path, columns);
    };
    with("impression_time", Some(Arc::new(StringArray::from(vec!["now"; 4]))));
    source.fails("train_behaviors.parquet`: column `impression_time` is of type Utf8, not a timestamp");
    with("article_ids_inview", Some(Arc::new(Int32Array::from(vec![1; 4]))));
    source.fails("column `article_ids_inview` is of type Int32, not a list of integers");
    with("session_id", None);
    source.fails("it has no column `session_id`");
    with("user_id", Some(Arc::new(Int32Array::from(vec![7, 7, -7, 7]))));
    source.fails("row 3, column `user_id`: -7 is negative");
    with("session_id", Some(Arc::new(Int32Array::from(vec![Some(7), None, Some(7), Some(7)]))));
    source.fails("row 2, column `session_id`: it is null");
    with("age", Some(Arc::new(Int32Array::from(vec![7, 7, 7, 128]))));
    source.fails("row 4, column `age`: 128 is not below 128");
    with("article_ids_inview", Some(lists([vec![], vec![1], vec![], vec![2, -3]].into_iter())));
    source.fails("row 4, column `article_ids_inview`: -3 is negative");
}

#[test]
fn a_user_with_two_histories_is_an_error() {
    let source = Source::new();
    write(&source.path("train_history.parquet"), history(&[(7, &[1]), (7, &[2])]));
    source.fails("train_history.parquet`: user 7 has two rows");
}

#[test]
fn every_table_of_train_toml_is_a_feature_of_dataset_toml() {
    let dataset: toml::Table = include_str!("dataset.toml").parse().unwrap();
    let train: toml::Table = include_str!("train.toml").parse().unwrap();
    let features = dataset["features"].as_table().unwrap();
    assert!(train["tables"].as_table().unwrap().keys().all(|name| features.contains_key(name)));
}
