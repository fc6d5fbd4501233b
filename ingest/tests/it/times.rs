//! Logs with times in all forms: the dataset is the same, or the error shows the possible meanings of the values.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, StringArray, TimestampMicrosecondArray, UInt32Array,
};
use chrono::DateTime;
use onefold_datasets::{Partition, Snapshot};
use serde_json::Value;

use crate::logs::{Dir, parquet};

/// 2024-05-01T00:00Z in seconds since 1970.
const DAY: i64 = 1_714_521_600;
const REQUESTS: i64 = 630;
const USERS: i64 = 7;

/// A function that makes a time column from seconds since 1970.
type MakeColumn = fn(Vec<i64>) -> ArrayRef;

/// The four time columns of [`CONFIG`]: the place in messages, the column, and the placeholder in the text.
const PLACES: [(&str, &str, &str); 4] = [
    ("`[session].time`", "time", "{session}"),
    ("`[join].time`", "at", "{join}"),
    ("`[[attributes]]` 1: `time`", "since", "{attributes}"),
    ("`[[timelines]]` 1: `time`", "at", "{timelines}"),
];

const CONFIG: &str = r#"format_version = 1
[sources]
features = "features.parquet"
events = "events.parquet"
users = "users.parquet"
[samples]
source = "features"
key = ["request"]
[session]
user = "user"
gap = "30m"
time = {session}
order = ["request"]
[partition]
by = "hour"
[join]
source = "events"
on = { request = "of" }
time = {join}
window = "10m"
key = ["id"]
[join.labels]
clicked = { when = "is_click" }
[[attributes]]
source = "users"
on = ["user"]
time = {attributes}
columns = ["age"]
[[timelines]]
source = "events"
on = { user = "who" }
time = {timelines}
length = 5
columns = { clicks = "of" }
[features]
clicked = { kind = "label" }
age = { kind = "dense" }
request = { kind = "sparse" }
clicks = { kind = "sequence", group = "clicks" }
"#;

fn timestamps(seconds: Vec<i64>) -> ArrayRef {
    Arc::new(TimestampMicrosecondArray::from_iter_values(seconds.into_iter().map(|time| time * 1_000_000)))
}

fn seconds(seconds: Vec<i64>) -> ArrayRef {
    Arc::new(Int64Array::from(seconds))
}

fn milliseconds(seconds: Vec<i64>) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(seconds.into_iter().map(|time| time * 1000)))
}

fn texts(seconds: Vec<i64>, format: &str) -> ArrayRef {
    let text = |time| DateTime::from_timestamp(time, 0).unwrap().format(format).to_string();
    Arc::new(StringArray::from_iter_values(seconds.into_iter().map(text)))
}

/// Returns the time of a request. Users return every two hours and see ten items per visit.
fn time(request: i64) -> i64 {
    DAY + request / 70 * 7200 + request % 70 * 20
}

/// Writes the three logs. `make` makes the time columns of the feature log, the events and the attributes.
fn write_logs(dir: &Dir, make: [MakeColumn; 3]) {
    let numbers = |number: fn(i64) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..REQUESTS).map(number)))
    };
    let times = |number: fn(i64) -> i64| (0..REQUESTS).map(number).collect::<Vec<i64>>();
    let features = vec![
        ("request", numbers(|request| request)),
        ("user", numbers(|request| request % USERS)),
        ("time", make[0](times(time))),
    ];
    dir.write("features.parquet", parquet(features));
    let is_click = BooleanArray::from_iter((0..REQUESTS).map(|id| Some(id % 3 == 0)));
    let events = vec![
        ("id", numbers(|id| id)),
        ("of", numbers(|id| id)),
        ("who", numbers(|id| id % USERS)),
        ("at", make[1](times(|id| time(id) + 30))),
        ("is_click", Arc::new(is_click) as ArrayRef),
    ];
    dir.write("events.parquet", parquet(events));
    let changes = (0..USERS).flat_map(|user| (0..4).map(move |change| (user, change)));
    let changes: Vec<(i64, i64)> = changes.collect();
    let column = |value: fn(&(i64, i64)) -> i64| changes.iter().map(value).collect::<Vec<i64>>();
    let users = vec![
        ("user", Arc::new(Int64Array::from(column(|(user, _)| *user))) as ArrayRef),
        ("since", make[2](column(|(_, change)| DAY + (change - 1) * 5 * 3600))),
        ("age", Arc::new(Int64Array::from(column(|(user, change)| 20 + user + 10 * change)))),
    ];
    dir.write("users.parquet", parquet(users));
}

/// Writes `dataset.toml` with the time settings of the four places in the order of [`PLACES`]; an empty setting is only
/// the column.
fn configure(dir: &Dir, keys: [&str; 4]) {
    let mut text = CONFIG.to_owned();
    for ((_, column, place), keys) in PLACES.iter().zip(keys) {
        let time = match keys {
            "" => format!("\"{column}\""),
            keys => format!("{{ column = \"{column}\", {keys} }}"),
        };
        text = text.replace(place, &time);
    }
    dir.write("dataset.toml", text);
}

/// Returns the partitions of a dataset, without file names, which are unique to each writer.
fn partitions(dataset: &Path) -> Vec<Partition> {
    let mut partitions = Snapshot::load(dataset).unwrap().partitions;
    let sets = partitions.iter_mut().flat_map(|partition| &mut partition.files);
    sets.flat_map(|set| &mut set.files).for_each(|file| file.path.clear());
    partitions
}

/// Returns the dataset for timestamp columns: its summary and partitions, with the digests of all samples.
fn expected() -> (Value, Vec<Partition>) {
    let dir = Dir::new();
    write_logs(&dir, [timestamps; 3]);
    configure(&dir, [""; 4]);
    let (summary, _) = dir.build("dataset");
    (summary, partitions(&dir.path("dataset")))
}

#[test]
fn times_of_every_form_make_one_dataset() {
    let (summary, expected) = expected();
    assert_eq!(
        (summary["samples"].as_i64(), summary["sessions"].as_i64()),
        (Some(REQUESTS), Some(USERS * 9))
    );
    assert_eq!(summary["skipped"]["samples_without_events"], 0);
    let forms: [(&str, MakeColumn); 6] = [
        ("unit = \"s\"", seconds),
        ("unit = \"s\"", |seconds| {
            Arc::new(UInt32Array::from_iter_values(seconds.into_iter().map(|time| time as u32)))
        }),
        ("unit = \"ms\"", milliseconds),
        ("unit = \"s\"", |seconds| {
            Arc::new(Float64Array::from_iter_values(seconds.into_iter().map(|time| time as f64)))
        }),
        ("", |seconds| texts(seconds, "%Y-%m-%dT%H:%M:%S")),
        ("format = \"%m/%d/%Y %I:%M:%S %p\", time_zone = \"America/New_York\"", |seconds| {
            let local = seconds.into_iter().map(|time| time - 4 * 3600);
            texts(local.collect(), "%m/%d/%Y %I:%M:%S %p")
        }),
    ];
    for (keys, make) in forms {
        let dir = Dir::new();
        write_logs(&dir, [make; 3]);
        configure(&dir, [keys; 4]);
        dir.build("dataset");
        assert_eq!(partitions(&dir.path("dataset")), expected, "{keys}");
    }
}

#[test]
fn numbers_without_a_unit_are_refused_wherever_they_are() {
    let expected = expected().1;
    let logs: [[MakeColumn; 3]; 4] = [
        [seconds, timestamps, timestamps],
        [timestamps, milliseconds, timestamps],
        [timestamps, timestamps, seconds],
        [timestamps, milliseconds, timestamps],
    ];
    for (number, (make, (place, column, _))) in logs.into_iter().zip(PLACES).enumerate() {
        let dir = Dir::new();
        write_logs(&dir, make);
        let mut keys = [""; 4];
        let unit = if number % 2 == 1 { "unit = \"ms\"" } else { "unit = \"s\"" };
        // The join and the timeline read the same column.
        if number == 1 {
            keys[3] = unit;
        } else if number == 3 {
            keys[1] = unit;
        }
        configure(&dir, keys);
        let write = format!("write `time = {{ column = \"{column}\", {unit} }}`");
        dir.fails(&[place, &format!("`{column}` is Int64"), "2024-0", "1970-01-", "plausible", &write]);
        keys[number] = unit;
        configure(&dir, keys);
        dir.build("dataset");
        assert_eq!(partitions(&dir.path("dataset")), expected, "{place}");
        // With a wrong unit, all times are in 1970 or in the future.
        keys[number] = if unit.contains("ms") { "unit = \"s\"" } else { "unit = \"ms\"" };
        configure(&dir, keys);
        let check = if unit.contains("ms") { "`[checks].future`" } else { "`[checks].past`" };
        dir.fails(&[check, place, "allow them with `time = {"]);
    }
}

#[test]
fn a_free_query_checks_its_times_too() {
    let dir = Dir::new();
    let configure = |time: &str, checks: &str| {
        let text = format!(
            "format_version = 1\n[sources]\nlog = \"features.parquet\"\n[samples]\nquery = \"SELECT *, 1 AS label FROM log\"\n\
             [session]\nuser = \"user\"\ngap = \"30m\"\ntime = {time}\n[partition]\nby = \"day\"\n{checks}[features]\n\
             label = {{ kind = \"label\" }}\nrequest = {{ kind = \"sparse\" }}\n"
        );
        dir.write("dataset.toml", text);
    };
    write_logs(&dir, [seconds; 3]);
    configure("\"time\"", "");
    dir.fails(&["`[session].time`: `time` is Int64", "1714521600 to 1714580", "only `s` is plausible"]);
    configure("{ column = \"time\", unit = \"ms\" }", "");
    dir.fails(&["column `time`", "before 1990-01-01T00:00:00Z", "1970-01-20", "`past = \"skip\"`"]);
    configure("{ column = \"time\", unit = \"ms\" }", "[checks]\npast = \"skip\"\n");
    dir.fails(&["gives no samples"]);
    configure("{ column = \"time\", unit = \"s\" }", "");
    let (summary, _) = dir.build("dataset");
    assert_eq!((summary["sessions"].as_i64(), summary["partitions"].as_i64()), (Some(USERS * 9), Some(1)));
    configure("{ column = \"time\", unit = \"ms\", not_before = 1970-01-01 }", "");
    let (summary, _) = dir.build("allowed");
    assert_eq!(summary["sessions"].as_i64(), Some(USERS), "no pause is longer than eight seconds");
}

#[test]
fn an_append_in_seconds_adds_its_day() {
    let dir = Dir::new();
    write_logs(&dir, [timestamps; 3]);
    let day = |keys: [&str; 4]| {
        configure(&dir, keys);
        let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
        dir.write("dataset.toml", text.replace("by = \"hour\"", "by = \"day\""));
    };
    day([""; 4]);
    dir.build("dataset");
    let before = Snapshot::load(&dir.path("dataset")).unwrap();
    let append = || {
        let mut command = dir.program("dataset");
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = std::process::Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
        command.arg("append").args(&arguments[1..]).current_dir(dir.path("")).env_remove("ONEFOLD_LOG");
        command
    };
    write_logs(
        &dir,
        [|times| seconds(times.into_iter().map(|time| time + 86_400).collect()), timestamps, timestamps],
    );
    day([""; 4]);
    dir.fails_as(append(), &["`[session].time`", "unit = \"s\""]);
    day(["unit = \"us\"", "", "", ""]);
    dir.fails_as(append(), &["`[checks].past`: 630 rows", "1990-01-01"]);
    assert_eq!(Snapshot::load(&dir.path("dataset")).unwrap(), before);
    day(["unit = \"s\"", "", "", ""]);
    dir.works(append(), "dataset");
    let keys: Vec<String> =
        partitions(&dir.path("dataset")).iter().map(|partition| partition.key.to_string()).collect();
    assert_eq!(keys, ["date=2024-05-01", "date=2024-05-02"]);
}

#[test]
fn times_outside_of_the_limits_are_refused_or_counted() {
    let dir = Dir::new();
    // The first version of each user is valid since 1900.
    let since: MakeColumn = |times| {
        timestamps(times.into_iter().map(|time| if time < DAY { -2_208_988_800 } else { time }).collect())
    };
    write_logs(&dir, [timestamps, timestamps, since]);
    configure(&dir, [""; 4]);
    dir.fails(&[
        "`[checks].past`: 7 rows of `users` have a time (`[[attributes]]` 1: `time`) before 1990-01-01T00:00:00Z",
        "user = 0, since = 1900-01-01T00:00:00",
        "`time = { column = \"since\", not_before = \"…\" }`",
    ]);
    configure(&dir, ["", "", "not_before = \"1900-01-01\"", ""]);
    let (summary, _) = dir.build("dataset");
    assert_eq!(summary["skipped"]["samples_without_attributes"], 0);
    assert_eq!(partitions(&dir.path("dataset")), expected().1);
    configure(&dir, [""; 4]);
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("dataset.toml", format!("{text}[checks]\npast = \"skip\"\n"));
    let (summary, _) = dir.build("skipped");
    assert_eq!(summary["skipped"]["past_rows"], 7);
    // Events of the last visit come after the limit, and may be left out.
    write_logs(&dir, [timestamps; 3]);
    dir.write("dataset.toml", format!("{text}[checks]\nnot_after = 2024-05-01T16:22:50Z\n"));
    dir.fails(&["`[checks].future`: 1 rows have", "`[session].time`", "2024-05-01T16:22:50Z"]);
    dir.write(
        "dataset.toml",
        format!("{text}[checks]\nnot_after = 2024-05-01T16:22:50Z\nfuture = \"skip\"\n"),
    );
    let (summary, _) = dir.build("limited");
    assert_eq!(
        (summary["skipped"]["future_rows"].as_i64(), summary["skipped"]["future_samples"].as_i64()),
        (Some(4), Some(1))
    );
}

#[test]
fn texts_that_are_not_times_are_named() {
    let dir = Dir::new();
    let broken: MakeColumn = |seconds| {
        let mut times = vec!["2024-05-01 00:00:00"; seconds.len()];
        times[300] = "yesterday";
        Arc::new(StringArray::from(times))
    };
    write_logs(&dir, [broken, timestamps, timestamps]);
    configure(&dir, [""; 4]);
    dir.fails(&["column `time`: `[session].time`: `yesterday` is not a time", "format = "]);
    write_logs(&dir, [timestamps, broken, timestamps]);
    dir.fails(&["column `at`: `[join].time`: `yesterday` is not a time"]);
    configure(&dir, ["", "format = \"%d.%m.%Y\"", "", ""]);
    dir.fails(&["`2024-05-01 00:00:00` is not a time in the format `%d.%m.%Y`"]);
    configure(&dir, ["time_zone = \"UTC\"", "", "", "unit = \"s\""]);
    write_logs(&dir, [timestamps; 3]);
    dir.fails(&["`[[timelines]]` 1: `time`", "`at` is Timestamp", "`unit` does not apply"]);
}

#[test]
fn times_at_which_clocks_are_changed_are_counted_and_left_out_if_wanted() {
    let dir = Dir::new();
    // Summer time ends at 03:00 on 2023-10-29, and begins at 02:00 on 2024-03-31.
    let rows = [
        "1,2023-10-29 02:10:00",
        "2,2023-10-29 02:50:00",
        "3,2023-10-29 03:01:00",
        "4,2024-03-31 02:30:00",
        "5,2024-03-31 03:00:00",
    ];
    let rows: String = rows.iter().map(|row| format!("{row},{}\n", row.len() % 2)).collect();
    dir.write("log.csv", format!("n,at,clicked\n{rows}"));
    let configure = |rest: &str| {
        dir.write(
            "dataset.toml",
            format!(
                "format_version = 1\n[sources]\nlog = \"log.csv\"\n[samples]\nquery = \"SELECT * FROM log\"\n{rest}\
                 [session]\nkey = [\"n\"]\ntime = {{ column = \"at\", time_zone = \"Europe/Copenhagen\" }}\n\
                 [features]\nclicked = {{ kind = \"label\" }}\nn = {{ kind = \"sparse\" }}\n"
            ),
        );
    };
    configure("");
    let (summary, _) = dir.build("kept");
    let skipped = |summary: &Value| {
        ["repeated_times", "skipped_times"].map(|key| summary["skipped"][key].as_i64().unwrap())
    };
    assert_eq!((summary["samples"].as_i64(), skipped(&summary)), (Some(5), [2, 1]));
    assert_eq!(summary["statistics"]["first_time"], "2023-10-29T00:10:00Z");
    assert_eq!(summary["statistics"]["last_time"], "2024-03-31T01:30:00Z");
    configure("[checks]\nclock_changes = \"skip\"\n");
    let (summary, _) = dir.build("left-out");
    assert_eq!((summary["samples"].as_i64(), skipped(&summary)), (Some(2), [2, 1]));
    assert_eq!(summary["rows"]["left_out"].to_string(), r#"{"clock_change":3}"#);
    assert_eq!(summary["statistics"]["last_time"], "2024-03-31T01:00:00Z");
    configure("[checks]\nclock_changes = \"error\"\n");
    let error = "`[checks].clock_changes`: 3 rows have a local time that occurs twice or not at all";
    dir.fails(&[error, "clock_changes = \"skip\""]);
    // Times in columns that are not used may be of any year.
    dir.write(
        "log.csv",
        format!(
            "n,at,clicked,until\n{}",
            rows.replace(",0\n", ",0,9999-12-31\n").replace(",1\n", ",1,0001-01-01\n")
        ),
    );
    configure("");
    assert_eq!(dir.build("years").0["samples"], 5);
}
