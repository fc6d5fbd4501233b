//! Tests the names and the selection of partitions, and columns with names that the ETL uses.

use std::process::Command;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, StringArray, TimestampMicrosecondArray};
use onefold_datasets::Snapshot;

use crate::logs::{Dir, parquet};

/// 2024-06-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_717_200_000_000_000;
const MINUTE: i64 = 60_000_000;

/// Writes a log of 13 weeks with ten samples per week, one per hour. Its columns have names that the ETL might use.
/// `partition` is the section `[partition]`.
fn with_log(partition: &str) -> Dir {
    let dir = Dir::new();
    let rows = || 0..130_i64;
    let numbers =
        |number: fn(i64) -> i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(rows().map(number))) };
    let days: Vec<String> = rows().map(|row| format!("2024-06-{:02}", 1 + row / 10)).collect();
    let columns = vec![
        ("request", numbers(|row| row)),
        ("before", numbers(|row| row % 3)),
        ("block", numbers(|row| row % 2)),
        ("wk", numbers(|row| row / 10)),
        ("day", Arc::new(StringArray::from(days)) as ArrayRef),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from_iter_values(rows().map(|row| DAY + row * 60 * MINUTE))),
        ),
    ];
    dir.write("log.parquet", parquet(columns));
    let text = format!(
        "format_version = 1\n[sources]\nlog = \"log.parquet\"\n[samples]\nsource = \"log\"\n\
         [session]\nuser = \"before\"\ngap = \"30m\"\ntime = \"time\"\n[partition]\n{partition}\n\
         [[timelines]]\nsource = \"log\"\non = [\"before\"]\ntime = \"time\"\nlength = 3\ncolumns = {{ past = \"request\" }}\n\
         [features]\nlabel = {{ kind = \"label\" }}\nrequest = {{ kind = \"sparse\" }}\n\
         past = {{ kind = \"sequence\", group = \"past\" }}\n"
    );
    dir.write("dataset.toml", text.replace("label = {", "block = {"));
    dir
}

fn with_partition(dir: &Dir, out: &str, filter: &str) -> Command {
    let mut command = dir.program(out);
    command.args(["--partition", filter]);
    command
}

/// Returns the partitions that a build with the filter writes.
fn built(dir: &Dir, filter: &str) -> Vec<String> {
    let out = format!("out{}", filter.replace(|c: char| !c.is_alphanumeric(), "_"));
    dir.works(with_partition(dir, &out, filter), &out);
    let partitions = Snapshot::load(&dir.path(&out)).unwrap().partitions;
    partitions.iter().map(|partition| partition.key.to_string()).collect()
}

#[test]
fn a_build_compares_numbers_and_dates() {
    let dir = with_log("columns = [\"wk\"]");
    assert_eq!(built(&dir, "wk<=12").len(), 13);
    assert_eq!(built(&dir, "wk<2"), ["wk=0", "wk=1"]);
    dir.fails_as(with_partition(&dir, "failed", "wk<two"), &["`two` is not a number", "`wk` are numbers"]);
    let dir = with_log("by = \"hour\"");
    let early = built(&dir, "hour<9,date<=2024-06-02");
    assert_eq!(
        (early.len(), early[0].as_str(), early[17].as_str()),
        (18, "date=2024-06-01/hour=00", "date=2024-06-02/hour=08")
    );
    let mistake = ["`2024-6-3` is not a date", "write `date<2024-06-03`"];
    dir.fails_as(with_partition(&dir, "failed", "date<2024-6-3"), &mistake);
    assert!(!dir.path("failed").exists());
    let dir = with_log("columns = [\"day\"]");
    assert_eq!(built(&dir, "day<2024-06-03"), ["day=2024-06-01", "day=2024-06-02"]);
    let mistake = ["`2024-6-3` is not written as dates are", "write `day<2024-06-03`"];
    dir.fails_as(with_partition(&dir, "failed", "day<2024-6-3"), &mistake);
    dir.fails_as(with_partition(&dir, "failed", "day<2"), &["the values of `day` are texts", "`day<\"2\"`"]);
    assert!(!dir.path("failed").exists());
}

#[test]
fn filters_of_a_dataset_compare_numbers_and_dates() {
    let dir = with_log("columns = [\"wk\"]");
    dir.build("dataset");
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let samples = |filter: &str| snapshot.chosen_samples(&filter.parse().unwrap());
    assert_eq!(samples("wk<=12").unwrap(), 130);
    assert_eq!(samples("wk<9,wk!=3").unwrap(), 80);
    assert!(samples("wk<nine").unwrap_err().to_string().contains("`nine` is not a number"));
    assert!(samples("wk>12").unwrap_err().to_string().contains("no partition matches"));
}

/// Replaces the source of the samples by a query.
fn with_query(dir: &Dir, query: &str) {
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("dataset.toml", text.replacen("source = \"log\"", &format!("query = '''{query}'''"), 1));
}

#[test]
fn values_of_another_type_are_not_appended() {
    let dir = with_log("columns = [\"wk\"]");
    dir.build("dataset");
    let columns = || Snapshot::load(&dir.path("dataset")).unwrap().partition_columns;
    let types = || columns().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(types(), ["`wk` (integer)"]);
    with_query(
        &dir,
        "SELECT * EXCLUDE (wk), CASE WHEN wk = 7 THEN 'unknown' ELSE CAST(wk AS VARCHAR) END AS wk FROM log",
    );
    let append = ["append", "dataset.toml", "--out", "dataset"];
    let merge = [&append[..], &["--merge"]].concat();
    let part = ["write", "dataset.toml", "--bucket", "0/1", "--dataset", "dataset", "--out", "part.json"];
    for command in [&append[..], &merge[..], &part[..]] {
        let parts =
            ["partitioned by `wk` (integer), but", "to append are partitioned by `wk` (text)", "`CAST`"];
        dir.fails_as(dir.command(command), &parts);
    }
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let samples = snapshot.chosen_samples(&"wk<9".parse().unwrap()).unwrap();
    assert_eq!((snapshot.snapshot, types(), samples), (1, vec!["`wk` (integer)".to_owned()], 90));
}

#[test]
fn values_that_are_too_long_for_folders_are_refused() {
    let dir = with_log("columns = [\"name\"]");
    with_query(&dir, "SELECT *, repeat('é', CASE WHEN wk = 7 THEN 42 ELSE 41 END) AS name FROM log");
    let told = ["column `name`: 10 samples have a value that is too long", "ééé` takes 257 bytes of 255"];
    let check = dir.command(&["check", "dataset.toml", "--json"]).output().unwrap();
    let text = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(told.iter().all(|part| text.contains(part)), "{text}");
    dir.fails_as(dir.program("failed"), &["samples have a value that is too long", told[1]]);
    assert!(!dir.path("failed").exists());
}

#[test]
fn the_types_of_partition_columns_are_those_of_the_query() {
    let dir = with_log("columns = [\"d\", \"half\", \"flag\"]\nby = \"hour\"");
    let query = "SELECT *, CAST(day AS DATE) AS d, wk / 2.0 AS half, wk > 3 AS flag FROM log";
    with_query(&dir, query);
    dir.build("dataset");
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let types: Vec<String> = snapshot.partition_columns.iter().map(ToString::to_string).collect();
    let expected = ["`d` (date)", "`half` (number)", "`flag` (text)", "`date` (date)", "`hour` (integer)"];
    assert_eq!(types, expected);
    let samples = |filter: &str| snapshot.chosen_samples(&filter.parse().unwrap()).unwrap();
    assert_eq!(samples("d<2024-06-03,half<=0.5"), 20);
    assert_eq!(samples("half<1,flag=false"), 20);
    assert_eq!(samples("flag=true"), 90);
}

#[test]
fn values_with_commas_and_operators_are_chosen_in_quotes() {
    let dir = with_log("columns = [\"city\"]");
    let city = "CASE WHEN wk < 5 THEN 'Paris, \"TX\"' WHEN wk < 9 THEN 'a<=b' ELSE '' END";
    with_query(&dir, &format!("SELECT *, {city} AS city FROM log"));
    for (filter, key) in [
        (r#"city="Paris, ""TX""""#, "city=Paris,%20%22TX%22"),
        (r#"city="a<=b""#, "city=a%3C%3Db"),
        (r#"city="""#, "city="),
    ] {
        assert_eq!(built(&dir, filter), [key]);
    }
    assert_eq!(built(&dir, r#"city!="a<=b",city!="""#), ["city=Paris,%20%22TX%22"]);
    let none = r#"no sample is of a partition that `city="Paris, FR"` chooses"#;
    dir.fails_as(with_partition(&dir, "failed", r#"city="Paris, FR""#), &[none]);
}

#[test]
fn column_names_do_not_collide_with_names_of_the_etl() {
    // The session key is named `before`, and the partition column `block`.
    let dir = with_log("columns = [\"block\"]");
    let (summary, _) = dir.build("dataset");
    assert_eq!((summary["samples"].as_i64(), summary["partitions"].as_i64()), (Some(130), Some(2)));
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    let steps = text.find("[[timelines]]").unwrap()..text.find("[features]").unwrap();
    let free =
        text.replace(&text[steps], "").replace("past = { kind = \"sequence\", group = \"past\" }\n", "");
    let query = "query = \"SELECT *, 1 AS __onefold_seen FROM log\"";
    dir.write("dataset.toml", free.replace("source = \"log\"", query));
    dir.fails(&["`__onefold_seen`", "names that begin with `__onefold_` are reserved", "rename"]);
    dir.write("dataset.toml", text.replacen("source = \"log\"", query, 1));
    dir.fails(&["`__onefold_seen`", "names that begin with `__onefold_` are reserved", "rename"]);
    let dir = with_log("by = \"day\"\ncolumns = [\"date\"]");
    dir.fails(&["`[partition].columns` has `date`", "remove `by`"]);
}

#[test]
fn lengths_of_lists_are_integers_in_queries() {
    let dir = with_log("");
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    let query = |list: &str| {
        format!("query = \"SELECT *, {list} AS places FROM (SELECT *, [request, block] AS x FROM log)\"")
    };
    let with = |list: &str| {
        let text = text.replacen("source = \"log\"", &query(list), 1);
        dir.write("dataset.toml", text + "places = { kind = \"sequence\", group = \"places\" }\n");
    };
    with("range(1, cardinality(x) + 1)");
    dir.build("dataset");
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    let places = &snapshot.statistics.features["places"];
    assert_eq!((places.min_id, places.max_id, places.values), (Some(1), Some(2), 260));
    with("range(1, x)");
    let output = dir.program("failed").output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("`[samples].query`") && error.contains("range") && error.contains("CAST("),
        "{error}"
    );
    assert!(!error.contains("bug") && !error.contains("Internal error"), "{error}");
}

#[test]
fn a_comparison_that_fails_does_not_call_the_dataset_sound() {
    let dir = with_log("columns = [\"wk\"]");
    dir.build("dataset");
    let verify = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
        command.args(["verify", "dataset", "--against", "dataset.toml"]).current_dir(dir.path(""));
        command.output().unwrap()
    };
    let output = verify();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && text.contains(": sound\n") && text.contains("the same 130 samples"),
        "{text}"
    );
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("dataset.toml", text.replacen("[samples]\n", "[samples]\nwhere = \"request <> 7\"\n", 1));
    let output = verify();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(!text.contains("sound"), "{text}");
    for part in ["its files are undamaged", "the sources have 129 samples, and", "differ"] {
        assert!(text.contains(part), "{text}\nlacks {part}");
    }
}
