//! Files of one source that different programs wrote.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, DictionaryArray, Float64Array, Int64Array, LargeListArray, ListArray, NullArray, StringArray,
    TimestampMicrosecondArray, TimestampNanosecondArray,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Int8Type, Int64Type};
use parquet::data_type::{Int96, Int96Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::logs::{Dir, ROWS, SELECT, columns, expected, parquet, rows, statistics_of, with};

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;

#[test]
fn categories_of_several_files_are_more_than_one_file_has() {
    let dir = Dir::new();
    for file in 0..3 {
        let users: DictionaryArray<Int8Type> = (0..100)
            .map(|user| format!("user-{file}-{user}"))
            .collect::<Vec<_>>()
            .iter()
            .map(String::as_str)
            .collect();
        dir.write(
            format!("log/{file}.parquet"),
            parquet(vec![
                ("request", Arc::new(Int64Array::from_iter_values(100 * file..100 * file + 100))),
                ("user", Arc::new(users)),
                (
                    "time",
                    Arc::new(TimestampMicrosecondArray::from_iter_values((0..100).map(|row| DAY + row))),
                ),
            ]),
        );
    }
    let configure = |log: &str, key: &str| {
        dir.write(
            "dataset.toml",
            format!(
                "format_version = 1\nkeep = [\"shown\"]\n[sources]\nlog = \"{log}\"\n[samples]\n\
                 query = \"SELECT request, user, user AS shown, time, 1 AS clicked FROM log\"\n{key}[session]\nkey = [\"user\"]\n\
                 time = \"time\"\n[features]\nclicked = {{ kind = \"label\" }}\n\
                 user = {{ kind = \"sparse\", ids = \"hash\" }}\n"
            ),
        );
    };
    let sharded = ["shard", "log", "--by", "user", "--segments", "2", "--out", "segments"];
    let sharded = dir.command(&sharded).output().unwrap();
    assert!(sharded.status.success(), "{}", String::from_utf8_lossy(&sharded.stderr));
    for (case, (log, key)) in
        [("log", ""), ("log", "key = [\"request\"]\n"), ("segments", "")].into_iter().enumerate()
    {
        configure(log, key);
        let (summary, _) = dir.build(&format!("dataset-{case}"));
        assert_eq!((&summary["samples"], &summary["sessions"]), (&300.into(), &300.into()), "{log} {key}");
        let verify = ["verify", &format!("dataset-{case}"), "--against", "dataset.toml"];
        assert!(dir.command(&verify).output().unwrap().status.success());
    }
}

#[test]
fn lists_nulls_and_times_of_every_writer_go_together() {
    let dir = Dir::new();
    let rows = rows();
    // The first row has no age, and no item in its history.
    let nothing = ListArray::new(
        Arc::new(Field::new("element", DataType::Null, true)),
        OffsetBuffer::from_lengths([0]),
        Arc::new(NullArray::new(0)),
        None,
    );
    let nothing: [(&str, ArrayRef); 2] =
        [("history", Arc::new(nothing)), ("age", Arc::new(NullArray::new(1)))];
    dir.write("log/a.parquet", parquet(with(columns(&rows[..1]), &nothing)));
    let other = &rows[1..20];
    let lists = other.iter().map(|row| Some(row.history.iter().copied().map(Some)));
    let times = other.iter().map(|row| 1000 * row.time);
    let pages: Vec<&str> = other.iter().map(|row| row.page.as_str()).collect();
    let changed: [(&str, ArrayRef); 3] = [
        ("history", Arc::new(LargeListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
        ("time", Arc::new(TimestampNanosecondArray::from_iter_values(times))),
        ("page", Arc::new(pages.into_iter().collect::<DictionaryArray<Int8Type>>())),
    ];
    let mut reversed = with(columns(other), &changed);
    reversed.reverse();
    dir.write("log/b.parquet", parquet(reversed));
    dir.write("log/c.parquet", parquet(columns(&rows[20..])));
    dir.write("log/d.parquet", parquet(columns(&[])));
    dir.configure("[sources]\nlog = \"log\"", SELECT);
    let (summary, files) = dir.build("dataset");
    assert_eq!(summary["samples"], ROWS);
    assert!(files == expected());
}

#[test]
fn a_column_that_nothing_reads_may_have_any_type() {
    let dir = Dir::new();
    let rows = rows();
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["x"; 20]));
    let mut first = columns(&rows[..20]);
    first.push(("other", Arc::new(Float64Array::from(vec![0.5; 20]))));
    first.push(("only_here", Arc::clone(&texts)));
    dir.write("log/a.parquet", parquet(first));
    let mut second = columns(&rows[20..]);
    second.push(("other", texts));
    dir.write("log/b.parquet", parquet(second));
    dir.configure("[sources]\nlog = \"log\"", SELECT);
    assert!(dir.build("dataset").1 == expected());
    let reads = |column: &str| SELECT.replace("SELECT request", &format!("SELECT {column}, request"));
    dir.configure(
        "[sources]\nlog = \"log\"",
        &format!("SELECT * FROM ({}) WHERE other IS NOT NULL", reads("other")),
    );
    dir.fails(&["source `log`", "log/b.parquet`: the column `other` is Utf8 here and Float64 in `", "CAST"]);
    let missing = format!("SELECT * FROM ({}) WHERE only_here IS NOT NULL", reads("only_here"));
    dir.configure("[sources]\nlog = \"log\"", &missing);
    dir.fails(&["source `log`", "log/b.parquet`: the column `only_here` is missing", "missing_columns"]);
}

/// Returns a file of rows `n` with a time `until` of type INT96: midnight of these days since 1970.
fn int96(days: &[i64]) -> Vec<u8> {
    let schema = parse_message_type("message log { required int64 n; required int96 until; }").unwrap();
    let properties = Arc::new(WriterProperties::default());
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let numbers: Vec<i64> = (1..=days.len() as i64).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<parquet::data_type::Int64Type>().write_batch(&numbers, None, None).unwrap();
    column.close().unwrap();
    let julian = |day: &i64| {
        let mut value = Int96::new();
        value.set_data(0, 0, (day + 2_440_588) as u32);
        value
    };
    let times: Vec<Int96> = days.iter().map(julian).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int96Type>().write_batch(&times, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn int96_has_the_years_that_nanoseconds_do_not_have() {
    let dir = Dir::new();
    // 0001-01-01, 2024-12-30 and 9999-12-31.
    dir.write("log.parquet", int96(&[-719_162, 20_087, 2_932_896]));
    let sharded = ["shard", "log.parquet", "--by", "n", "--segments", "2", "--out", "segments"];
    assert!(dir.command(&sharded).output().unwrap().status.success());
    let later = "until > arrow_cast('2000-06-01', 'Timestamp(Microsecond, None)')";
    let cases = [
        ("log.parquet", "TRUE", (1, 9999, 3)),
        ("log.parquet", later, (2024, 9999, 2)),
        ("segments", "TRUE", (1, 9999, 3)),
    ];
    for (case, (log, condition, years)) in cases.into_iter().enumerate() {
        dir.write(
            "dataset.toml",
            format!(
                "format_version = 1\n[sources]\nlog = \"{log}\"\n[samples]\nquery = \"SELECT n, date_part('year', until) AS year, \
                 1 AS clicked, to_timestamp_seconds(1700000000) AS at FROM log WHERE {condition}\"\n\
                 [session]\nkey = [\"n\"]\ntime = \"at\"\n[features]\nclicked = {{ kind = \"label\" }}\n\
                 year = {{ kind = \"sparse\" }}\n"
            ),
        );
        let summary = dir.build(&format!("dataset-{case}")).0;
        let year = statistics_of(&summary, "year");
        let found = (year["min_id"].as_i64(), year["max_id"].as_i64(), summary["samples"].as_i64());
        assert_eq!(found, (Some(years.0), Some(years.1), Some(years.2)), "{log} {condition}");
    }
}
