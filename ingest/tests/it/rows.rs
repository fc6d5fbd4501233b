//! Tests columns with the position of a row in a log (its file, and its number in the file), and logs in which only
//! this position gives the order of rows.

use std::fmt::Write as _;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{Float32Type, Int64Type};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use serde_json::Value;

use crate::logs::{Dir, compressed, statistics_of};
use crate::samples::read;

/// The numbers of rows in the three files of a log. Several threads read the first two, if the format allows it.
const FILES: [i64; 3] = [150_000, 150_000, 7];

/// Returns a number that no encoding compresses.
fn noise(row: i64) -> i64 {
    row.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ row.wrapping_mul(0x1656_67b1_9e37_79f9).rotate_left(31)
}

/// Returns the rows of file number `part`: the file, the row, and columns of noise, in small row groups.
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

/// Returns the same rows as text, with some empty lines between them.
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

/// Writes a configuration of samples whose label is whether the columns give the positions of their rows.
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
    // Row 3 is the only one that the query selects.
    assert_eq!((&summary["samples"], &summary["ragged_rows_skipped"]), (&1.into(), &2.into()));
    assert_eq!(statistics_of(&summary, "found")["min"], 1.0);
}

#[test]
fn files_are_chosen_by_their_name_and_number() {
    let dir = Dir::new();
    for (part, rows) in [(0, 20), (1, 30)] {
        dir.write(format!("log/part-{part}.parquet"), parquet_rows(part, rows));
    }
    // The pages of this file are damaged, but it is not read.
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

/// The number of rows in each file of [`write_order`].
const ROWS: usize = 300;

/// Writes a log of three files with lines of a user and an item, and returns the users and items in order.
fn write_order(dir: &Dir) -> Vec<(i64, i64)> {
    let rows: Vec<(i64, i64)> =
        (0..3 * ROWS as i64).map(|row| (noise(row).rem_euclid(17), noise(-row).rem_euclid(1000))).collect();
    for (file, rows) in rows.chunks(ROWS).enumerate() {
        let lines: String = rows.iter().map(|(user, item)| format!("{user} {item}\n")).collect();
        dir.write(format!("log/part-{file}.txt"), lines);
    }
    rows
}

/// Returns a configuration for these files. The label of a sample is the number of its row in the whole log.
fn ordered(source: &str, sections: &str) -> String {
    format!(
        "format_version = 1\n[sources]\nlog = {{ path = \"log\", format = \"csv\", delimiter = \" \", header = false, \
         schema = {{ user = \"BIGINT\", item = \"BIGINT\" }}, {source} }}\n[samples]\norder = \"rows\"\n\
         query = \"SELECT *, 300 * part + place AS number FROM log\"\n{sections}\n\
         [features]\nnumber = {{ kind = \"label\" }}\nitem = {{ kind = \"sparse\" }}\n"
    )
}

const PLACE: &str = "row_number = \"place\", file_number = \"part\"";
const HISTORY: &str = "[session]\nkey = [\"user\"]\n[[timelines]]\nsource = \"log\"\non = [\"user\"]\nlength = 5\n\
     columns = { history = \"item\" }";

#[test]
fn an_order_of_rows_is_enough() {
    let dir = Dir::new();
    let rows = write_order(&dir);
    let history = "history = { kind = \"sequence\", group = \"history\" }\n";
    dir.write("dataset.toml", ordered(PLACE, HISTORY) + history);
    for threads in ["1", "4"] {
        let out = format!("dataset-{threads}");
        let arguments = [
            "build",
            "dataset.toml",
            "--out",
            out.as_str(),
            "--threads",
            threads,
            "--layout",
            "rows",
            "--json",
        ];
        let (summary, _) = dir.works(dir.command(&arguments), &out);
        assert_eq!(summary["samples"], rows.len());
        assert!(summary["statistics"]["first_time"].is_null(), "{summary}");
        let samples = read(&dir.path(&out));
        let places = samples.column_by_name("number").unwrap().as_primitive::<Float32Type>();
        let places: Vec<usize> = places.values().iter().map(|place| *place as usize).collect();
        let histories = samples.column_by_name("history").unwrap().as_list::<i32>();
        let (mut seen, mut last) = (vec![false; rows.len()], [None; 17]);
        for (sample, place) in places.into_iter().enumerate() {
            let user = rows[place].0;
            assert!(
                last[user as usize].replace(place) < Some(place),
                "the samples of a user are not in order"
            );
            seen[place] = true;
            let before: Vec<i64> =
                rows[..place].iter().filter(|row| row.0 == user).map(|row| row.1).collect();
            let before = &before[before.len().saturating_sub(5)..];
            let history = histories.value(sample);
            assert_eq!(&history.as_primitive::<Int64Type>().values()[..], before, "row {place}");
        }
        assert!(seen.into_iter().all(|seen| seen));
        dir.works(dir.command(&["verify", out.as_str(), "--against", "dataset.toml", "--json"]), &out);
    }
}

#[test]
fn without_a_session_each_row_is_one() {
    let dir = Dir::new();
    let rows = write_order(&dir);
    dir.write("dataset.toml", ordered(PLACE, ""));
    let summary = built(&dir, "dataset", "2");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&rows.len().into(), &rows.len().into()));
    let append = ["append", "dataset.toml", "--out", "dataset", "--merge"];
    dir.fails_as(dir.command(&append), &["samples without times cannot be merged"]);
    // A single file needs no file number.
    dir.write("dataset.toml", ordered("row_number = \"place\"", "").replace("300 * part + place", "place"));
    dir.fails(&[
        "log/part-1.txt",
        "it is not the only file",
        "add `file_number = \"part\"` to `[sources].log`",
    ]);
    for file in ["log/part-1.txt", "log/part-2.txt"] {
        fs_err::remove_file(dir.path(file)).unwrap();
    }
    assert_eq!(built(&dir, "one", "2")["sessions"], ROWS);
}

#[test]
fn what_needs_times_is_refused_where_there_are_none() {
    let dir = Dir::new();
    write_order(&dir);
    let join = "[join]\nsource = \"log\"\non = [\"user\"]\ntime = \"place\"\nwindow = \"1h\"\n\
                [join.labels]\nnext = { when = \"item > 3\" }";
    let attributes =
        "[[attributes]]\nsource = \"log\"\non = [\"user\"]\ntime = \"place\"\ncolumns = { known = \"item\" }";
    for (sections, key) in [
        ("[session]\nkey = [\"user\"]\ntime = \"place\"", "`[session].time`"),
        ("[session]\nuser = \"user\"\ngap = \"30m\"", "`[session].gap`"),
        ("[partition]\nby = \"day\"", "`[partition].by`"),
        ("[checks]\nnot_before = 2024-01-01", "`[checks].not_before`"),
        (join, "`[join]`"),
        (attributes, "the `time` of `[[attributes]]`"),
    ] {
        dir.write("dataset.toml", ordered(PLACE, sections));
        dir.fails(&[key, "needs times, but `[samples].order` is \"rows\""]);
    }
    let history = "history = { kind = \"sequence\", group = \"history\" }\n";
    for key in ["time = \"place\"", "delay = \"1h\"", "max_age = \"1h\""] {
        let timeline = HISTORY.replace("length = 5", &format!("length = 5\n{key}"));
        dir.write("dataset.toml", ordered(PLACE, &timeline) + history);
        dir.fails(&["`[[timelines]]` 1: `", "needs times"]);
    }
    dir.write("dataset.toml", ordered("file_number = \"part\"", ""));
    dir.fails(&["does not number its rows", "row_number = \"place\""]);
    // A query that does not select the row numbers.
    dir.write(
        "dataset.toml",
        ordered(PLACE, "").replace("SELECT *, 300 * part + place AS", "SELECT user, item, item AS"),
    );
    dir.fails(&["`[samples].order` names the column `part`"]);
    dir.write(
        "dataset.toml",
        ordered(PLACE, "").replace("order = \"rows\"\n", "") + "[session]\nkey = [\"user\"]\n",
    );
    dir.fails(&["`[session]` has no `time`", "order = \"rows\""]);
}
