//! Tests of invalid files and options: each gives a typed error that names the place.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, ListArray, RecordBatch};
use arrow::buffer::NullBuffer;
use arrow::datatypes::Schema as ArrowSchema;
use onefold_base::fault::{Explain, Kind};
use onefold_datasets::{Layout, Snapshot};
use onefold_ikjt::{Checks, Dedupe, Error, Rank, ReadRequest, ReaderOptions, Shuffle, Within, Workers};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::by_hand::{commit_again, row_groups, write_file};
use crate::dataset::{Log, files, open, open_with, read};

const LOG: Log = Log { sessions: 30, session_size: 8.0, repeat: 0.7, seed: 11 };

fn first_error(directory: &Path, request: impl Into<ReadRequest>) -> Error {
    match open(directory, request).and_then(|reader| reader.batches()) {
        Err(error) => error,
        Ok(mut steps) => steps.find_map(Result::err).expect("an error"),
    }
}

/// Replaces each row group of a data file by the result of `change`, and commits it as if it had been written like
/// this.
fn rewrite(directory: &Path, file: usize, change: impl Fn(RecordBatch) -> RecordBatch) {
    let path = files(directory)[file].clone();
    let rows = row_groups(&path).into_iter().map(change).collect::<Vec<_>>();
    commit_again(directory, |set| {
        if directory.join(set.path()) == path {
            let name = set.path().to_owned();
            set.files = vec![write_file(directory, &name, &rows)];
            for (index, row_group) in set.row_groups.iter_mut().enumerate() {
                row_group.bytes_on_disk = set.files[0].row_group_bytes[index];
            }
        }
    });
}

fn with_column(rows: &RecordBatch, name: &str, column: ArrayRef) -> RecordBatch {
    let index = rows.schema().index_of(name).unwrap();
    let mut columns = rows.columns().to_vec();
    columns[index] = column;
    RecordBatch::try_new(rows.schema(), columns).unwrap()
}

fn unverified(dedupe: Dedupe) -> ReadRequest {
    let checks = Checks { verify: false, ..Checks::default() };
    ReadRequest { checks, ..ReaderOptions { dedupe, ..ReaderOptions::new(40) }.into() }
}

/// Breaks the folded layout of a valid file in every possible way. The error names file, row group, column and row.
#[test]
fn broken_folded_columns_are_placed() {
    let null_at = |column: &dyn Array, row: usize| {
        let valid = (0..column.len()).map(|i| i != row && column.is_valid(i));
        NullBuffer::from_iter(valid)
    };
    let break_lists = |rows: &RecordBatch| {
        let lists = rows["city"].as_list::<i32>();
        let (item, offsets, ids, _) = lists.clone().into_parts();
        with_column(rows, "city", Arc::new(ListArray::new(item, offsets, ids, Some(null_at(lists, 0)))))
    };
    let break_length = |value: Option<i32>, row: usize| {
        move |rows: &RecordBatch| {
            let lengths = rows["history.length"].as_primitive::<arrow::datatypes::Int32Type>();
            let changed = lengths.iter().enumerate().map(|(i, length)| if i == row { value } else { length });
            with_column(rows, "history.length", Arc::new(Int32Array::from_iter(changed)))
        }
    };
    type Break<'a> = Box<dyn Fn(&RecordBatch) -> RecordBatch + 'a>;
    let cases: Vec<(Break, &str, &str)> = vec![
        (Box::new(break_lists), "column `city`, row 0", "null"),
        (Box::new(break_length(None, 0)), "column `history.length`, row 0", "null"),
        (Box::new(break_length(Some(-1), 0)), "column `history.length`, row 0", "-1"),
        (Box::new(break_length(Some(-7), 5)), "column `history.length`, row 5", "-7"),
        (Box::new(break_length(Some(10_000), 2)), "column `history.length`, row 2", "10000"),
    ];
    for (change, place, message) in &cases {
        let directory = tempfile::tempdir().unwrap();
        LOG.write(directory.path(), Layout::Folded);
        rewrite(directory.path(), 1, |rows| change(&rows));
        for dedupe in [Dedupe::Off, Dedupe::Exact, Dedupe::Window] {
            let error = first_error(directory.path(), unverified(dedupe));
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            let text = error.to_string();
            let file = &files(directory.path())[1].display().to_string();
            for part in [file.as_str(), ", row group 0, ", place, message, "hint: "] {
                assert!(text.contains(part), "`{part}` is not in: {text}");
            }
        }
    }
}

#[test]
fn a_file_with_another_schema_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    rewrite(directory.path(), 1, |rows| {
        let schema = rows.schema();
        let fields = schema.fields().iter().map(|field| match field.name().as_str() {
            "tags" => Arc::new(field.as_ref().clone().with_name("labels")),
            _ => Arc::clone(field),
        });
        let schema = ArrowSchema::new(fields.collect::<Vec<_>>());
        RecordBatch::try_new(Arc::new(schema), rows.columns().to_vec()).unwrap()
    });
    let error = first_error(directory.path(), unverified(Dedupe::Exact));
    assert_eq!(error.fault().kind, Kind::Data);
    assert!(error.to_string().contains("the file was replaced or removed after the build"), "{error}");
    let text = error.to_string();
    assert!(text.contains("part-00001") && text.contains("tags") && text.contains("labels"), "{text}");
}

/// Overwrites the bytes of one column's pages. The error names that column, although a row group is decoded as a
/// whole.
#[test]
fn damaged_pages_are_placed() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        LOG.write(directory.path(), layout);
        let path = &files(directory.path())[0];
        let open = fs_err::File::open(path).unwrap().into_file();
        let metadata = ParquetRecordBatchReaderBuilder::try_new(open).unwrap().metadata().clone();
        let column =
            metadata.row_group(1).columns().iter().find(|column| column.column_path().parts()[0] == "tags");
        let (start, length) = column.unwrap().byte_range();
        let mut bytes = fs_err::read(path).unwrap();
        bytes[start as usize..(start + length) as usize].fill(0xee);
        fs_err::write(path, bytes).unwrap();
        let text = first_error(directory.path(), unverified(Dedupe::Exact)).to_string();
        assert!(text.contains(", row group 1, column `tags`: "), "{text}");
        // A reader that does not need the column does not notice the damage.
        let features = Some(vec!["city".to_owned()]);
        let request = unverified(Dedupe::Exact).with(|options| ReaderOptions { features, ..options });
        assert!(!read(directory.path(), request).is_empty());
    }
}

#[test]
fn truncated_and_empty_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Folded);
    let path = &files(directory.path())[1];
    let whole = fs_err::read(path).unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        fs_err::write(path, &whole[..length]).unwrap();
        for verify in [false, true] {
            let checks = Checks { verify, ..Checks::default() };
            let request = ReadRequest { checks, ..ReaderOptions::new(40).into() };
            let error = first_error(directory.path(), request);
            assert_eq!(error.fault().kind, Kind::Data);
            assert!(
                error.to_string().contains("the file was replaced or removed after the build"),
                "{error}"
            );
            assert!(error.to_string().contains("part-00001"), "{error}");
        }
    }
    fs_err::remove_file(path).unwrap();
    assert!(first_error(directory.path(), ReaderOptions::new(40)).to_string().contains("it is missing"));
    // If a purge removed the snapshot in the meantime, the dataset is not damaged.
    let reader = open(directory.path(), ReaderOptions::new(40)).unwrap();
    fs_err::remove_file(directory.path().join("snapshots/00000001.json")).unwrap();
    let error = reader.batches().unwrap().find_map(Result::err).unwrap();
    assert!(error.to_string().contains("a purge removed snapshot 1 while it was used"), "{error}");
}

/// A damaged file ends the epoch after all batches that precede it, independent of how far the threads have read
/// ahead.
#[test]
fn errors_come_after_the_batches_before_them() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let snapshot = Snapshot::load(directory.path()).unwrap();
    let sizes: Vec<u64> =
        snapshot.partitions.iter().flat_map(|partition| &partition.files).map(|set| set.samples).collect();
    fs_err::remove_file(&files(directory.path())[2]).unwrap();
    for threads in [1, 2, 8] {
        let reader = open_with(directory.path(), ReaderOptions::new(10), (threads, 1 << 30)).unwrap();
        let batches = reader.batches().unwrap();
        let (whole, wrong): (Vec<_>, Vec<_>) = batches.partition(Result::is_ok);
        assert_eq!(whole.len() as u64, (sizes[0] + sizes[1]) / 10, "{threads} threads");
        assert_eq!(wrong.len(), 1);
    }
}

/// Returns the number of the sample in this row of a dataset's file.
fn number_of(dataset: &Path, path: &Path, row_group: usize, row: usize) -> usize {
    let snapshot = Snapshot::load(dataset).unwrap();
    let file = snapshot.file_paths().position(|file| dataset.join(file) == path).unwrap();
    let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
    let before: u64 = files.take(file).map(|set| set.samples).sum();
    let open = fs_err::File::open(path).unwrap().into_file();
    let metadata = ParquetRecordBatchReaderBuilder::try_new(open).unwrap().metadata().clone();
    let earlier: i64 = metadata.row_groups()[..row_group].iter().map(|group| group.num_rows()).sum();
    before as usize + earlier as usize + row
}

/// Returns the file, row group and row that an error about a value names.
fn place_in(text: &str) -> (&Path, usize, usize) {
    let parts: Vec<&str> = text.splitn(3, "`, row ").collect();
    let number = |part: &str, end: char| part.split(end).next().unwrap().parse::<usize>().unwrap();
    (Path::new(&parts[0][1..]), number(parts[1].strip_prefix("group ").unwrap(), ','), number(parts[2], ':'))
}

#[test]
fn labels_outside_their_range_are_placed() {
    for layout in [Layout::Rows, Layout::Folded] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        let ranges = |name: &str, most: f32| {
            let label_ranges = BTreeMap::from([(name.to_owned(), 0.0..=most)]);
            let checks = Checks { label_ranges, ..Checks::default() };
            ReadRequest { checks, ..ReaderOptions::new(40).into() }
        };
        assert_eq!(read(directory.path(), ranges("clicked", 1.0)).len(), written.len().div_ceil(40));
        let text = first_error(directory.path(), ranges("clicked", 0.5)).to_string();
        let sample = written.iter().position(|sample| sample.clicked > 0.5).unwrap();
        let (path, row_group, row) = place_in(&text);
        assert_eq!(number_of(directory.path(), path, row_group, row), sample);
        assert!(
            text.contains("column `clicked`") && text.contains("the label is 1, which is not from 0 to 0.5"),
            "{text}"
        );
        let text = first_error(directory.path(), ranges("clickt", 1.0)).to_string();
        assert!(text.contains("`clickt`") && text.contains("`clicked`"), "{text}");
    }
}

#[test]
fn ids_outside_their_table_are_placed() {
    for (layout, dedupe) in [(Layout::Rows, Dedupe::Off), (Layout::Folded, Dedupe::Window)] {
        let directory = tempfile::tempdir().unwrap();
        let written = LOG.write(directory.path(), layout);
        let table = |name: &str, rows: u64| {
            let table_rows = BTreeMap::from([(name.to_owned(), rows)]);
            let checks = Checks { table_rows, ..Checks::default() };
            ReadRequest { checks, ..ReaderOptions { dedupe, ..ReaderOptions::new(40) }.into() }
        };
        assert_eq!(read(directory.path(), table("city", 5)).len(), written.len().div_ceil(40));
        let text = first_error(directory.path(), table("city", 4)).to_string();
        assert!(
            text.contains("column `city`") && text.contains("id 4 is outside the table's 4 rows"),
            "{text}"
        );
        // The error names the first sample of the dataset that has the id.
        let sample = written.iter().position(|sample| sample.lists[0] == [4]).unwrap();
        let (path, row_group, row) = place_in(&text);
        assert_eq!(number_of(directory.path(), path, row_group, row), sample);
        // Negative ids are outside every table.
        let text = first_error(directory.path(), table("tags", 1000)).to_string();
        assert!(text.contains("column `tags`") && text.contains("id -"), "{text}");
        let text = first_error(directory.path(), table("citi", 4)).to_string();
        assert!(text.contains("`citi`") && text.contains("`city`"), "{text}");
    }
}

#[test]
fn options_that_cannot_work_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    LOG.write(directory.path(), Layout::Rows);
    let refused = |request: ReadRequest, parts: &[&str]| {
        let error = open(directory.path(), request).unwrap_err();
        assert_eq!(error.fault().kind, Kind::Options);
        let text = error.to_string();
        assert!(text.contains("hint: ") && parts.iter().all(|part| text.contains(part)), "{text}");
    };
    refused(ReaderOptions::new(0).into(), &["batches of 0"]);
    let rank = Rank { rank: 2, world_size: 2 };
    refused(ReadRequest { rank, ..ReaderOptions::new(1).into() }, &["no rank 2 of 2"]);
    let rank = Rank { rank: 0, world_size: 2 };
    let streams = |streams| {
        let options = ReaderOptions { streams: Some(streams), ..ReaderOptions::new(8) };
        ReadRequest { rank, ..options.into() }
    };
    refused(streams(0), &["0 streams"]);
    refused(streams(2), &["the dataset's 1 buckets cannot be divided into 2 streams", "must be 1 to 1;"]);
    let ranks =
        ["a global batch of 1 samples cannot be divided among 2 ranks", "at least 2: each gives a sample"];
    refused(ReadRequest { rank, ..ReaderOptions::new(1).into() }, &ranks);
    let shuffle = Some(Shuffle { seed: 1, row_groups: 0, within: Within::Epoch });
    refused(ReaderOptions { shuffle, ..ReaderOptions::new(1) }.into(), &["0 row groups"]);
    assert!(Workers::new(0, 1).unwrap_err().to_string().contains("0 threads"));
    let buckets = tempfile::tempdir().unwrap();
    LOG.write_buckets(buckets.path(), Layout::Rows, 2);
    let error =
        open(buckets.path(), ReaderOptions { streams: Some(2), ..ReaderOptions::new(1) }).unwrap_err();
    assert!(
        error.to_string().contains("a global batch of 1 samples cannot be divided among 2 streams"),
        "{error}"
    );
    let features = Some(vec!["histroy".to_owned()]);
    refused(ReaderOptions { features, ..ReaderOptions::new(1) }.into(), &["`histroy`", "`history`"]);
}
