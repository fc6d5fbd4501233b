//! Tests `keep`: columns that the dataset keeps besides the features.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Float64Array, Int64Array, UInt64Array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type};
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{KeptKind, Snapshot};
use onefold_storage::Storage;

use crate::logs::{Dir, columns, csv, parquet, rows};

const CONFIG: &str = r#"format_version = 1
keep = ["country", "request"]
[sources]
log = "log.parquet"
[samples]
query = "SELECT *, CASE WHEN request % 4 > 0 THEN 'c' || (request % 3) END AS country, request AS x FROM log"
[session]
user = "user"
gap = "30m"
time = "time"
[features]
clicked = { kind = "label" }
x = { kind = "dense" }
"#;

fn log() -> Dir {
    let dir = Dir::new();
    dir.write("log.parquet", parquet(columns(&rows())));
    dir.write("log.csv", csv(&rows(), ',', true));
    dir.write("dataset.toml", CONFIG);
    dir
}

#[track_caller]
fn works(dir: &Dir, arguments: &[&str]) {
    let output = dir.command(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the kept values of a dataset as texts, by `x`, which numbers the rows of the log.
fn kept(dir: &Dir, dataset: &str) -> BTreeMap<i64, Vec<Option<String>>> {
    let path = dir.path(dataset);
    let (storage, snapshot) = (Storage::open(&path).unwrap(), Snapshot::load(&path).unwrap());
    let mut all = BTreeMap::new();
    for file in snapshot.partitions.iter().flat_map(|partition| &partition.files) {
        let open = OpenFiles::open(&storage, &snapshot, file).unwrap();
        for group in 0..open.row_groups() {
            let x = open.numbers::<Float32Type>(group, "x").unwrap();
            let columns = snapshot.schema.kept.iter().map(|column| open.kept(group, column).unwrap());
            let columns: Vec<_> = columns.map(|values| cast(&values, &DataType::Utf8).unwrap()).collect();
            for (row, x) in x.iter().enumerate() {
                let text = |values: &ArrayRef| {
                    values.is_valid(row).then(|| values.as_string::<i32>().value(row).to_owned())
                };
                all.insert(*x as i64, columns.iter().map(text).collect());
            }
        }
    }
    all
}

#[test]
fn texts_and_integers_are_kept_with_their_samples() {
    let dir = log();
    let expected: BTreeMap<i64, Vec<Option<String>>> = (0..40)
        .map(|request| {
            let country = (request % 4 > 0).then(|| format!("c{}", request % 3));
            (request, vec![country, Some(request.to_string())])
        })
        .collect();
    for layout in ["rows", "folded"] {
        works(&dir, &["build", "dataset.toml", "--out", layout, "--layout", layout]);
        assert_eq!(kept(&dir, layout), expected);
        works(&dir, &["verify", layout]);
        works(&dir, &["verify", layout, "--against", "dataset.toml"]);
        let schema = Snapshot::load(&dir.path(layout)).unwrap().schema;
        assert_eq!(
            schema.kept.iter().map(|column| column.kind).collect::<Vec<_>>(),
            [KeptKind::Text, KeptKind::Integer]
        );
    }
    // The source is a CSV file, and other columns come first in the data files.
    dir.write("dataset.toml", CONFIG.replace("log.parquet", "log.csv"));
    dir.write("popular.csv", "country,9\nclicked,3\n");
    works(&dir, &["build", "dataset.toml", "--out", "csv", "--popularity", "popular.csv"]);
    assert_eq!(kept(&dir, "csv"), expected);
    works(&dir, &["report", "csv", "--html", "report.html"]);
    // The command line sets the files of the source.
    works(&dir, &["build", "dataset.toml", "--out", "other", "--sources", "log=log.parquet"]);
    assert_eq!(kept(&dir, "other"), expected);
    let command =
        dir.command(&["build", "dataset.toml", "--out", "none", "--sources", "log=nowhere.parquet"]);
    dir.fails_as(command, &["nowhere.parquet", "there is no such file", "relative to the working directory"]);
    let command = dir.command(&["build", "dataset.toml", "--out", "none", "--sources", "logs=log.parquet"]);
    dir.fails_as(command, &["`[sources]` names no files `logs`", "did you mean `log`?"]);
}

#[test]
fn the_digest_and_the_comparison_cover_kept_columns() {
    let dir = log();
    works(&dir, &["build", "dataset.toml", "--out", "dataset"]);
    let digest = |name: &str| Snapshot::load(&dir.path(name)).unwrap().partitions[0].digest;
    let other = CONFIG.replace("request % 3)", "request % 3 + 1)");
    dir.write("other.toml", &other);
    works(&dir, &["build", "other.toml", "--out", "other"]);
    assert_ne!(digest("other"), digest("dataset"));
    dir.fails_as(
        dir.command(&["verify", "dataset", "--against", "other.toml"]),
        &["`dataset` has a problem"],
    );
    dir.write("none.toml", CONFIG.replace("keep = [\"country\", \"request\"]\n", ""));
    dir.fails_as(
        dir.command(&["verify", "dataset", "--against", "none.toml"]),
        &["`keep`", "not the columns"],
    );
}

#[test]
fn appending_needs_the_columns_that_the_dataset_keeps() {
    let dir = log();
    works(&dir, &["build", "dataset.toml", "--out", "dataset"]);
    works(&dir, &["append", "dataset.toml", "--out", "dataset"]);
    let refused = |keep: &str, country: &str| {
        let text =
            CONFIG.replace("[\"country\", \"request\"]", keep).replace("'c' || (request % 3)", country);
        dir.write("other.toml", text);
        for command in ["append", "merge"] {
            let wanted = ["has another schema than the samples to append", "build the dataset anew"];
            let arguments: &[&str] = match command {
                "append" => &["append", "other.toml", "--out", "dataset"],
                _ => &["append", "other.toml", "--out", "dataset", "--merge"],
            };
            dir.fails_as(dir.command(arguments), &wanted);
        }
    };
    refused("[\"country\"]", "'c' || (request % 3)");
    refused("[\"request\", \"country\"]", "'c' || (request % 3)");
    refused("[]", "'c' || (request % 3)");
    // The column is an integer, but the dataset has texts.
    refused("[\"country\", \"request\"]", "request % 3");
}

#[test]
fn columns_that_cannot_be_kept_are_refused() {
    let dir = log();
    let refused = |keep: &str, wanted: &[&str]| {
        let query = "SELECT *, request AS x, arrow_cast(request, 'UInt64') AS large, ";
        let query = format!("{query}18446744073709551615 AS huge, 1 AS session_id, 'a' AS split FROM log");
        let text = CONFIG.replace("[\"country\", \"request\"]", keep);
        let text = text.replace("[features]", "[partition]\ncolumns = [\"split\"]\nby = \"day\"\n[features]");
        let start = text.find("query = ").unwrap();
        let end = start + text[start..].find('\n').unwrap();
        dir.write("bad.toml", format!("{}query = \"{query}\"{}", &text[..start], &text[end..]));
        if wanted.is_empty() {
            works(&dir, &["build", "bad.toml", "--out", "good"]);
        } else {
            dir.fails_as(dir.command(&["build", "bad.toml", "--out", "bad"]), wanted);
        }
    };
    refused("[\"large\"]", &[]);
    refused(
        "[\"huge\"]",
        &["column `huge`", "18446744073709551615 does not fit into 63 bits", "AS VARCHAR)"],
    );
    refused("[\"age\"]", &["column `age`", "its type is Float64", "CAST(age AS VARCHAR)"]);
    refused("[\"history\"]", &["column `history`", "only integers and texts"]);
    refused("[\"time\"]", &["column `time`", "its type is Timestamp"]);
    refused("[\"requests\"]", &["`keep` names the column `requests`", "did you mean `request`"]);
    refused("[\"request\", \"request\"]", &["`keep` has `request` twice"]);
    refused("[\"x\"]", &["`keep` has `x`", "a dense feature of `[features]`", "AS kept_x"]);
    refused("[\"clicked\"]", &["a label of `[features]`"]);
    refused("[\"session_id\"]", &["a column that the dataset has in any case"]);
    refused("[\"sample_key\"]", &["a column that the dataset has in any case"]);
    refused("[\"split\"]", &["a partition column"]);
    refused("[\"date\"]", &["a partition column"]);
}

#[test]
fn columns_of_declared_steps_are_kept() {
    let dir = log();
    let users: ArrayRef = Arc::new(Int64Array::from_iter_values(0..6));
    let since: ArrayRef =
        Arc::new(arrow::array::TimestampMicrosecondArray::from(vec![946_684_800_000_000; 6]));
    let level: ArrayRef =
        Arc::new(UInt64Array::from_iter((0..6).map(|user| (user != 2).then_some(user * 10))));
    dir.write("users.parquet", parquet(vec![("user", users), ("since", since), ("level", level)]));
    let x: ArrayRef = Arc::new(Float64Array::from_iter_values((0..40).map(f64::from)));
    let more: ArrayRef = Arc::new(BooleanArray::from(vec![true; 40]));
    let all = columns(&rows()).into_iter().chain([("x", x), ("unused", more)]).collect();
    dir.write("log.parquet", parquet(all));
    let steps = "[samples]\nsource = \"log\"\nkey = [\"request\"]\n[[attributes]]\nsource = \"users\"\non = [\"user\"]\n\
                 time = \"since\"\ncolumns = [\"level\"]\nmissing = \"null\"\n";
    let start = CONFIG.find("[samples]").unwrap();
    let end = CONFIG.find("[session]").unwrap();
    let text = format!("{}{steps}{}", &CONFIG[..start], &CONFIG[end..]);
    let text = text.replace("[\"country\", \"request\"]", "[\"level\", \"page\"]");
    dir.write(
        "dataset.toml",
        text.replace("log = \"log.parquet\"", "log = \"log.parquet\"\nusers = \"users.parquet\""),
    );
    works(&dir, &["build", "dataset.toml", "--out", "dataset"]);
    for (request, values) in kept(&dir, "dataset") {
        let user = request / 7;
        let level = (user != 2).then(|| (user * 10).to_string());
        assert_eq!(values, [level, Some(rows()[request as usize].page.clone())]);
    }
}
