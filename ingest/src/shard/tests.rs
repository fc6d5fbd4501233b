use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, DictionaryArray, Float32Array, Int16Array, Int32Array,
    Int64Array, LargeStringArray, ListArray, RecordBatch, StringArray, StringViewArray, StructArray,
    UInt64Array,
};
use arrow::compute::{cast, concat_batches, take_record_batch};
use arrow::datatypes::{DataType, Field, Int32Type, Int64Type};
use arrow::row::{RowConverter, SortField};
use onefold_base::progress::Silent;
use onefold_datasets::bucket_of_identity;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tempfile::TempDir;

use super::*;
use crate::sources::SEGMENTS_FILE;

fn options(segments: usize) -> ShardOptions {
    ShardOptions {
        by: vec!["key".into()],
        segments,
        memory_limit: 1 << 30,
        threads: 2,
        page_bytes: 4 << 20,
        overwrite: false,
    }
}

/// Writes `rows` with row groups of 100 rows.
fn write(path: &Path, rows: &RecordBatch) {
    let file = fs_err::File::create(path).unwrap();
    let properties =
        parquet::file::properties::WriterProperties::builder().set_max_row_group_row_count(Some(100)).build();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(properties)).unwrap();
    writer.write(rows).unwrap();
    writer.finish().unwrap();
}

fn read(path: &Path) -> RecordBatch {
    let file = fs_err::File::open(path).unwrap().into_file();
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let schema = builder.schema().clone();
    let batches: Vec<RecordBatch> = builder.build().unwrap().map(Result::unwrap).collect();
    concat_batches(&schema, &batches).unwrap()
}

/// Returns a log with columns of all types. `number` counts the rows; `key` has 40 values and is sometimes null.
fn log(rows: std::ops::Range<i64>) -> RecordBatch {
    let keys: Int64Array = rows.clone().map(|i| (i % 41 != 0).then_some(7 * i % 40)).collect();
    let ids = |i: i64| Some((0..i % 5).map(move |at| (at != 3).then_some(i % 7 + at)).collect::<Vec<_>>());
    let lists = rows.clone().map(|i| if i % 11 == 0 { None } else { ids(i) });
    let texts: Vec<String> =
        rows.clone().map(|i| format!("a text that is too long for a view: {}", i % 9)).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let names = ListArray::from_iter_primitive::<Int32Type, _, _>(
        rows.clone().map(|i| Some((0..i % 3).map(|at| Some(at as i32)))),
    );
    let price: Float32Array = rows.clone().map(|i| (i % 6 != 0).then_some(i as f32 / 3.0)).collect();
    let inner: ArrayRef = Arc::new(names.clone());
    let nested =
        StructArray::from(vec![(Arc::new(Field::new("names", inner.data_type().clone(), true)), inner)]);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("number", Arc::new(Int64Array::from_iter_values(rows))),
        ("key", Arc::new(keys)),
        ("ids", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
        ("names", Arc::new(names)),
        ("price", Arc::new(price)),
        ("view", Arc::new(StringViewArray::from(texts.clone()))),
        ("category", Arc::new(texts.into_iter().collect::<DictionaryArray<Int32Type>>())),
        ("nested", Arc::new(nested)),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn numbers(rows: &RecordBatch) -> Vec<i64> {
    rows.column_by_name("number").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

/// Converts the rows to bytes that are equal if and only if the rows are equal.
fn row_bytes(rows: &RecordBatch) -> Vec<Vec<u8>> {
    let fields = rows.schema().fields().iter().map(|f| SortField::new(f.data_type().clone())).collect();
    let converter = RowConverter::new(fields).unwrap();
    let bytes = converter.convert_columns(rows.columns()).unwrap();
    bytes.iter().map(|row| row.as_ref().to_vec()).collect()
}

fn segment_files(directory: &Path) -> Vec<PathBuf> {
    let files = fs_err::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "parquet")).collect();
    files.sort();
    files
}

/// Shards the files that `pattern` matches in a folder.
fn shard_in(directory: &Path, pattern: &str, out: &Path, options: &ShardOptions) -> Result<ShardSummary> {
    shard(&[directory.join(pattern).to_str().unwrap().to_owned()], out, options, &Silent)
}

/// Returns the log with the types of segments: texts are views.
fn as_segment(rows: &RecordBatch) -> RecordBatch {
    let schema = rows.schema();
    let columns = schema.fields().iter().zip(rows.columns()).map(|(field, column)| {
        let is_text = matches!(field.data_type(), DataType::Dictionary(..));
        let column = if is_text { cast(column, &DataType::Utf8View).unwrap() } else { Arc::clone(column) };
        (field.name().clone(), column, field.is_nullable())
    });
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// Writes a log of two files with 700 and 300 rows.
fn two_files() -> (TempDir, RecordBatch) {
    let directory = tempfile::tempdir().unwrap();
    write(&directory.path().join("part-1.parquet"), &log(0..700));
    write(&directory.path().join("part-2.parquet"), &log(700..1_000));
    (directory, log(0..1_000))
}

#[test]
fn segments_hold_the_rows_of_the_log_in_order_each_key_in_one() {
    let (directory, whole) = two_files();
    let whole = as_segment(&whole);
    for (segments, memory_limit) in [(1, 1 << 30), (7, 1 << 30), (7, 100 << 10), (64, 4 << 10)] {
        let out = directory.path().join(format!("out-{segments}-{memory_limit}"));
        let options = ShardOptions { memory_limit, ..options(segments) };
        let summary = shard_in(directory.path(), "part-*.parquet", &out, &options).unwrap();
        let files = segment_files(&out);
        assert_eq!((files.len(), summary.segments, summary.rows), (segments, segments, 1_000));
        assert_eq!((summary.null_key_rows, summary.log_files), (25, 2));

        let parts: Vec<RecordBatch> = files.iter().map(|file| read(file)).collect();
        let sizes = parts.iter().map(|part| part.num_rows() as u64);
        assert_eq!(summary.largest_segment_rows, sizes.clone().max().unwrap());
        assert_eq!(summary.smallest_segment_rows, sizes.min().unwrap());
        let mut segment_of: BTreeMap<Option<i64>, usize> = BTreeMap::new();
        for (number, part) in parts.iter().enumerate() {
            assert_eq!(part.schema().fields(), whole.schema().fields());
            assert!(numbers(part).is_sorted());
            for key in part.column(1).as_primitive::<Int64Type>() {
                assert_eq!(*segment_of.entry(key).or_insert(number), number, "{key:?} is in two segments");
            }
        }
        let union = concat_batches(&whole.schema(), &parts).unwrap();
        let (mut found, mut expected) = (row_bytes(&union), row_bytes(&whole));
        found.sort();
        expected.sort();
        assert!(found == expected, "the rows are others");
        let used = parts.iter().filter(|part| part.num_rows() > 0).count();
        assert!(segments == 1 || used > segments / 4, "{used} of {segments} segments have rows");
    }
}

#[test]
fn several_columns_make_one_key() {
    let (directory, whole) = two_files();
    let out = directory.path().join("out");
    let by = ["key", "view"].map(str::to_owned).to_vec();
    shard_in(directory.path(), "part-*.parquet", &out, &ShardOptions { by, ..options(7) }).unwrap();
    let (mut segment_of, mut segments_of_key) = (BTreeMap::new(), BTreeMap::<_, BTreeSet<usize>>::new());
    let mut rows = 0;
    for (number, file) in segment_files(&out).iter().enumerate() {
        let part = read(file);
        rows += part.num_rows();
        let texts = part.column_by_name("view").unwrap().as_string_view();
        for (key, text) in part.column(1).as_primitive::<Int64Type>().iter().zip(texts) {
            let pair = (key, text.map(str::to_owned));
            assert_eq!(
                *segment_of.entry(pair.clone()).or_insert(number),
                number,
                "{pair:?} is in two segments"
            );
            segments_of_key.entry(key).or_default().insert(number);
        }
    }
    assert_eq!(rows, whole.num_rows());
    let apart = segments_of_key.iter().filter(|(key, segments)| key.is_some() && segments.len() > 1).count();
    assert!(apart > 30, "of 40 keys the rows of {apart} are apart by their other column");
    assert_eq!(segments_of_key[&None].len(), 1, "a key with a null in it is no key");
}

#[test]
fn little_memory_makes_many_row_groups_and_the_same_rows() {
    let (directory, _) = two_files();
    let row_groups = |name: &str, memory_limit| {
        let out = directory.path().join(name);
        let options = ShardOptions { memory_limit, ..options(2) };
        shard_in(directory.path(), "part-?.parquet", &out, &options).unwrap();
        let file = fs_err::File::open(&segment_files(&out)[0]).unwrap().into_file();
        ParquetRecordBatchReaderBuilder::try_new(file).unwrap().metadata().num_row_groups()
    };
    assert_eq!(row_groups("much", 1 << 30), 1);
    assert!(row_groups("little", 64 << 10) > 1);
}

#[test]
fn equal_input_gives_equal_bytes() {
    let (directory, _) = two_files();
    let bytes = |name: &str| {
        let out = directory.path().join(name);
        let options = ShardOptions { memory_limit: 200 << 10, ..options(5) };
        shard_in(directory.path(), "part-?.parquet", &out, &options).unwrap();
        segment_files(&out).iter().map(|file| fs_err::read(file).unwrap()).collect::<Vec<_>>()
    };
    assert!(bytes("first") == bytes("second"));
}

/// Returns the segment of each row of a log with this key column.
fn segments_of(key: ArrayRef) -> Vec<usize> {
    let rows = RecordBatch::try_from_iter([("key", key)]).unwrap();
    let router = Router::new(&rows.schema(), Path::new("log.parquet"), &["key".to_owned()], 16).unwrap();
    let routes = router.route(&rows).unwrap();
    let mut segments = vec![0; rows.num_rows()];
    for (segment, rows) in routes.rows_by_segment.iter().enumerate() {
        rows.values().iter().for_each(|row| segments[*row as usize] = segment);
    }
    segments
}

#[test]
fn equal_keys_of_other_types_go_to_the_same_segment() {
    let numbers = [5_i64, -3, 0, 5, 32_000];
    let expected = segments_of(Arc::new(Int64Array::from(numbers.to_vec())));
    assert_eq!(expected, segments_of(Arc::new(Int32Array::from(numbers.map(|i| i as i32).to_vec()))));
    assert_eq!(expected, segments_of(Arc::new(Int16Array::from(numbers.map(|i| i as i16).to_vec()))));
    let magnitudes = segments_of(Arc::new(UInt64Array::from(numbers.map(i64::unsigned_abs).to_vec())));
    assert!((0..numbers.len()).all(|row| row == 1 || magnitudes[row] == expected[row]));
    assert_eq!(expected[0], expected[3]);
    let decimal = numbers.map(|i| i.to_string());
    assert_eq!(expected, segments_of(Arc::new(StringArray::from_iter_values(decimal))));
    let texts = vec!["anna", "bo", "", "anna", "a name that is longer than a view has room for"];
    let expected = segments_of(Arc::new(StringArray::from(texts.clone())));
    assert_eq!(expected, segments_of(Arc::new(LargeStringArray::from(texts.clone()))));
    assert_eq!(expected, segments_of(Arc::new(StringViewArray::from(texts.clone()))));
    let dictionary: DictionaryArray<Int32Type> = texts.into_iter().collect();
    assert_eq!(expected, segments_of(Arc::new(dictionary)));
}

#[test]
fn a_segment_is_the_bucket_of_the_key() {
    let bucket = |identity: String| bucket_of_identity(&identity, 16) as usize;
    let numbers = segments_of(Arc::new(Int64Array::from_iter_values(-20..20)));
    assert!(numbers.iter().copied().eq((-20..20).map(|i| bucket(i.to_string()))));
    let texts = || (0..40).map(|i| format!("Zoë {i}"));
    assert!(
        segments_of(Arc::new(StringArray::from_iter_values(texts()))).into_iter().eq(texts().map(bucket))
    );
    let booleans = segments_of(Arc::new(BooleanArray::from(vec![true, false])));
    assert_eq!(booleans, ["true", "false"].map(|text| bucket(text.to_owned())));
    let none = segments_of(Arc::new(Int64Array::from(vec![None])));
    assert_eq!(none, [bucket(String::new())]);
}

#[test]
fn segments_have_about_as_many_keys_each() {
    let many = segments_of(Arc::new(Int64Array::from_iter_values(0..16_000)));
    let sizes = (0..16).map(|segment| many.iter().filter(|of_row| **of_row == segment).count());
    // Six standard deviations of a binomial count.
    assert!(sizes.clone().all(|size| size.abs_diff(1_000) < 190), "{:?}", sizes.collect::<Vec<_>>());
}

/// Returns the error of sharding `patterns` of a folder.
fn refused(directory: &Path, patterns: &[&str], options: &ShardOptions) -> String {
    let patterns = patterns.iter().map(|pattern| directory.join(pattern).to_str().unwrap().to_owned());
    let patterns: Vec<String> = patterns.collect();
    let out = directory.join("refused");
    let error = shard(&patterns, &out, options, &Silent).unwrap_err().to_string();
    assert!(!out.exists(), "something was left");
    let entries = fs_err::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(
        !entries.into_iter().any(|name| name.to_string_lossy().contains("partial")),
        "something was left"
    );
    error
}

#[test]
fn logs_that_cannot_be_sharded_are_refused_with_a_hint() {
    let (directory, whole) = two_files();
    let at = directory.path();
    let text = refused(at, &["part-3*.parquet"], &options(2));
    assert!(text.contains("part-3*.parquet`: there is no such file\n  hint: give files"), "{text}");
    let text = refused(at, &["part-1.parquet"], &ShardOptions { by: vec!["keys".into()], ..options(2) });
    assert!(
        text.contains("part-1.parquet`: there is no column `keys` to shard by\n  hint: did you mean `key`?"),
        "{text}"
    );
    let text = refused(at, &["part-1.parquet"], &ShardOptions { by: vec!["price".into()], ..options(2) });
    assert!(text.contains("the column `price` is Float32, and a key is an integer or a text"), "{text}");
    write(&at.join("other-1.parquet"), &whole.project(&[0, 1, 2]).unwrap());
    let text = refused(at, &["part-1.parquet", "other-1.parquet"], &options(2));
    assert!(text.contains("other-1.parquet`: the column `names` is missing, which `"), "{text}");
    assert!(text.contains("hint: give files with the same columns"), "{text}");
    let mut columns = whole.columns().to_vec();
    columns[0] = Arc::new(Float32Array::from(vec![0.0; whole.num_rows()]));
    let schema = RecordBatch::try_from_iter([("number", columns[0].clone())]).unwrap().schema();
    let mut fields = whole.schema().fields().to_vec();
    fields[0] = Arc::new(schema.field(0).clone());
    let other = RecordBatch::try_new(Arc::new(arrow::datatypes::Schema::new(fields)), columns).unwrap();
    write(&at.join("other-2.parquet"), &other);
    let text = refused(at, &["part-1.parquet", "other-2.parquet"], &options(2));
    assert!(text.contains("part-1.parquet`: the column `number` is Int64 here and Float32 in `"), "{text}");
}

#[test]
fn damaged_files_are_named() {
    let (directory, _) = two_files();
    let at = directory.path();
    let whole = fs_err::read(at.join("part-2.parquet")).unwrap();
    fs_err::write(at.join("half.parquet"), &whole[..whole.len() / 2]).unwrap();
    let text = refused(at, &["part-1.parquet", "half.parquet"], &options(2));
    assert!(text.contains("half.parquet`: not a whole Parquet file: "), "{text}");
    let mut bytes = whole;
    bytes[4..600].fill(0xff);
    fs_err::write(at.join("bent.parquet"), &bytes).unwrap();
    let text = refused(at, &["part-1.parquet", "bent.parquet"], &options(2));
    assert!(text.contains("bent.parquet`: it cannot be decoded: "), "{text}");
}

#[test]
fn files_with_columns_in_another_order_and_nullability_are_merged() {
    let (directory, whole) = two_files();
    let order = [7, 1, 0, 2, 3, 4, 5, 6];
    write(&directory.path().join("part-3.parquet"), &log(1_000..1_200).project(&order).unwrap());
    let out = directory.path().join("out");
    let summary = shard_in(directory.path(), "*.parquet", &out, &options(3)).unwrap();
    assert_eq!((summary.rows, summary.log_files), (1_200, 3));
    assert_eq!(read(&segment_files(&out)[0]).schema().fields(), as_segment(&whole).schema().fields());
    let keys = read(&directory.path().join("part-1.parquet"));
    let nullable = keys.schema().field_with_name("key").unwrap().is_nullable();
    assert!(nullable && keys.schema().field(1).data_type() == &DataType::Int64);
}

#[test]
fn only_segments_are_replaced_and_only_with_overwrite() {
    let (directory, _) = two_files();
    let out = directory.path().join("out");
    let shard = |options| shard_in(directory.path(), "part-1.parquet", &out, &options);
    shard(options(2)).unwrap();
    let error = shard(options(3)).unwrap_err().to_string();
    assert!(error.contains("the option `overwrite`"), "{error}");
    shard(ShardOptions { overwrite: true, ..options(3) }).unwrap();
    assert_eq!(segment_files(&out).len(), 3);
    let list: serde_json::Value =
        serde_json::from_slice(&fs_err::read(out.join(SEGMENTS_FILE)).unwrap()).unwrap();
    assert_eq!(
        (list["rows"].as_u64(), list["segments"][2]["path"].as_str()),
        (Some(700), Some("segment-00002-of-00003.parquet"))
    );
    fs_err::remove_file(out.join(SEGMENTS_FILE)).unwrap();
    let error = shard(ShardOptions { overwrite: true, ..options(3) }).unwrap_err();
    assert!(error.to_string().contains("it holds no `_segments.json`"), "{error}");
}

#[test]
fn a_lost_row_and_a_misplaced_one_are_found() {
    let (directory, _) = two_files();
    let log = as_segment(&read(&directory.path().join("part-1.parquet")));
    let router = Router::new(&log.schema(), Path::new("log"), &["key".to_owned()], 2).unwrap();
    let digest = RowDigester::new(&log.schema()).unwrap().digest(&log).unwrap();
    let split = Split { rows: 700, null_key_rows: 0, digest };
    let output = Output::create(&directory.path().join("out"), &options(2)).unwrap();
    let [first, second] = [0, 1].map(|number| PathBuf::from(output.path(&output.names[number])));
    let routes = router.route(&log).unwrap().rows_by_segment;
    let [rows, others] = [0, 1].map(|number| take_record_batch(&log, &routes[number]).unwrap());
    write(&second, &others);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let checked = |rows: &RecordBatch| {
        write(&first, rows);
        let verified = verify(&output, &log.schema(), &split, &router, runtime.handle(), &Silent);
        verified.map_err(|error| error.to_string())
    };
    checked(&rows).unwrap();
    let lost = checked(&rows.slice(1, rows.num_rows() - 1)).unwrap_err();
    assert!(lost.contains("what was written is not what was read"), "{lost}");
    // Two rows have swapped segments, so the multiset of rows is unchanged.
    let swap = |a: &RecordBatch, b: &RecordBatch| {
        concat_batches(&a.schema(), [&a.slice(1, a.num_rows() - 1), &b.slice(0, 1)]).unwrap()
    };
    write(&second, &swap(&others, &rows));
    let misplaced = checked(&swap(&rows, &others)).unwrap_err();
    assert!(misplaced.contains("segment-0000"), "{misplaced}");
}
