//! Columns that say where a row of a log is: its file, and its number in the file.

use std::fmt::Write as _;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::Value;

use crate::logs::{Dir, compressed, statistics_of};

/// Rows of the three files of a log. The first two are read by several threads where their format allows that.
const FILES: [i64; 3] = [150_000, 150_000, 7];

/// A number that no encoding makes small.
fn noise(row: i64) -> i64 {
    row.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ row.wrapping_mul(0x1656_67b1_9e37_79f9).rotate_left(31)
}

/// Rows of file number `part`: the file, the row, and columns of noise, in row groups that are small.
fn parquet_rows(part: i64, rows: i64) -> Vec<u8> {
    let numbers = |number: &dyn Fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..rows).map(number)))
    };
    let mut columns = vec![("part", numbers(&|_| part)), ("line", numbers(&|row| row))];
    columns.extend(["a", "b", "c", "d"].map(|name| (name, numbers(&|row| noise(row + part)))));
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(10_000)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// The same rows as text, with a line between them that is none.
fn text_rows(part: i64, rows: i64, format: &str) -> String {
    let mut text = if format == "csv" { "part,line,a\n".to_owned() } else { String::new() };
    for row in 0..rows {
        let noise = noise(row + part);
        match format {
            "csv" => writeln!(text, "{part},{row},\"{noise}\""),
            _ => writeln!(text, "{{\"part\":{part},\"line\":{row},\"a\":{noise}}}"),
        }
        .unwrap();
        if row % 1000 == 5 {
            text.push('\n');
        }
    }
    text
}

/// Some samples, whose label is whether the columns say where their rows are.
fn configure(dir: &Dir, path: &str, ending: &str) {
    dir.write(
        "dataset.toml",
        format!(
            "format_version = 1\n[sources]\n\
             log = {{ path = \"{path}\", row_number = \"n\", file_name = \"f\", file_number = \"k\" }}\n[samples]\n\
             query = \"\"\"SELECT part * 1000000 + n AS request, to_timestamp_seconds(1714521600 + n) AS at,\n\
             CASE WHEN n = line AND k = part AND f = concat('log/part-', CAST(part AS VARCHAR), '.{ending}')\n\
             THEN 1 ELSE 0 END AS found, k AS part FROM log WHERE line % 499 = 3 OR line >= 149990\"\"\"\n\
             [session]\nkey = [\"request\"]\ntime = \"at\"\n\
             [features]\nfound = {{ kind = \"label\" }}\nrequest = {{ kind = \"sparse\" }}\npart = {{ kind = \"sparse\" }}\n"
        ),
    );
}

fn built(dir: &Dir, out: &str, threads: &str) -> Value {
    let arguments = ["build", "dataset.toml", "--out", out, "--threads", threads, "--json"];
    dir.works(dir.command(&arguments), out).0
}

#[test]
fn rows_and_files_are_numbered_for_any_number_of_threads() {
    let chosen = |rows: i64| (0..rows).filter(|row| row % 499 == 3 || *row >= 149_990).count();
    let samples: usize = FILES.map(chosen).iter().sum();
    for ending in ["parquet", "json", "csv", "csv.gz"] {
        let dir = Dir::new();
        for (part, rows) in (0..).zip(FILES) {
            let bytes = match ending {
                "parquet" => parquet_rows(part, rows),
                "csv.gz" => compressed(text_rows(part, rows, "csv"), "gz"),
                format => text_rows(part, rows, format).into_bytes(),
            };
            dir.write(format!("log/part-{part}.{ending}"), bytes);
        }
        configure(&dir, "log", ending);
        for threads in ["1", "5"] {
            let summary = built(&dir, &format!("dataset-{threads}"), threads);
            assert_eq!(summary["samples"], samples, "{ending}");
            let found = statistics_of(&summary, "found");
            assert_eq!(
                (&found["min"], &found["max"]),
                (&1.0.into(), &1.0.into()),
                "{ending}, {threads}: {found}"
            );
            assert_eq!(statistics_of(&summary, "part")["distinct_ids"], 3);
        }
        let digests = ["dataset-1", "dataset-5"].map(|dataset| {
            let partitions = onefold_datasets::Snapshot::load(&dir.path(dataset)).unwrap().partitions;
            partitions.iter().map(|partition| partition.digest).collect::<Vec<_>>()
        });
        assert_eq!(digests[0], digests[1], "{ending}");
    }
}

#[test]
fn rows_of_csv_that_are_left_out_have_no_number() {
    let dir = Dir::new();
    dir.write("log/part-0.csv", "part,line\n0,0\n0,0,0\n0,1\n\n0,2\n0\n0,3\n");
    configure(&dir, "log\", ragged = \"skip", "csv");
    let summary = built(&dir, "dataset", "2");
    // Row 3 is the only one that the query takes.
    assert_eq!((&summary["samples"], &summary["ragged_rows_skipped"]), (&1.into(), &2.into()));
    assert_eq!(statistics_of(&summary, "found")["min"], 1.0);
}

#[test]
fn files_are_chosen_by_their_name_and_number() {
    let dir = Dir::new();
    for (part, rows) in [(0, 20), (1, 30)] {
        dir.write(format!("log/part-{part}.parquet"), parquet_rows(part, rows));
    }
    // Its pages are damaged, but nothing reads it.
    let mut holed = parquet_rows(2, 40);
    holed[4..200].fill(0xff);
    dir.write("log/part-2.parquet", holed);
    configure(&dir, "log", "parquet");
    let all = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    for condition in ["f = 'log/part-1.parquet'", "k = 1", "k > 0 AND f < 'log/part-2'"] {
        dir.write("dataset.toml", all.replace("line % 499 = 3 OR line >= 149990", condition));
        assert_eq!(built(&dir, "dataset", "2")["samples"], 30, "{condition}");
        fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    }
}

#[test]
fn columns_that_files_have_are_not_replaced() {
    let dir = Dir::new();
    dir.write("log/part-0.parquet", parquet_rows(0, 10));
    dir.write("log/day=1/part-1.csv", text_rows(0, 10, "csv"));
    configure(&dir, "log/part-0.parquet", "parquet");
    let whole = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    for (from, to, key) in [
        ("row_number = \"n\"", "row_number = \"line\"", "row_number"),
        ("file_name = \"f\"", "file_name = \"part\"", "file_name"),
    ] {
        dir.write("dataset.toml", whole.replace(from, to));
        dir.fails(&["part-0.parquet", "of its own", &format!("give `{key}` under `[sources].log`")]);
    }
    let folders = whole.replace("log/part-0.parquet", "log/day=1").replace("\"k\" }", "\"day\" }");
    dir.write("dataset.toml", folders);
    dir.fails(&["day=1/part-1.csv", "a column `day` of its own", "give `file_number`"]);
}
