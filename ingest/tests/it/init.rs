//! Runs `init` on small logs of many kinds, and builds the configurations that it writes.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Int32Array, LargeListArray, TimestampMicrosecondArray, UInt32Array,
};
use arrow::datatypes::Int32Type;
use serde_json::Value;

use crate::logs::{Dir, parquet, statistics_of};

/// Runs `init` on `paths`, and returns its summary and the text of the configuration.
#[track_caller]
fn init(dir: &Dir, paths: &[&str]) -> (Value, String) {
    let arguments = [&["init"][..], paths, &["--out", "dataset.toml", "--overwrite", "--json"]].concat();
    let output = dir.command(&arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    let summary = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    (summary, fs_err::read_to_string(dir.path("dataset.toml")).unwrap())
}

/// Runs `init`, and builds the unchanged configuration. Returns its text and the summary of the build.
#[track_caller]
fn init_and_build(dir: &Dir, paths: &[&str]) -> (String, Value) {
    let (_, text) = init(dir, paths);
    let output = dir.program("dataset").output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8(output.stdout).unwrap();
    (text, serde_json::from_str(stdout.lines().last().unwrap()).unwrap())
}

/// Checks that `feature` has `length` ids per sample on average.
#[track_caller]
fn has_length(summary: &Value, feature: &str, length: f64) {
    let found = statistics_of(summary, feature)["mean_length"].as_f64().unwrap();
    assert!((found - length).abs() < 1e-6, "{feature}: {found}");
}

#[test]
fn a_travel_log_of_searches() {
    let dir = Dir::new();
    let row = |row: i64| {
        let hotels = (0..2 + row % 2).map(|i| format!("h-{}", row + i)).collect::<Vec<_>>().join("|");
        let prices = (0..2 + row % 2).map(|i| format!("{}.5", 60 + i)).collect::<Vec<_>>().join("|");
        let clicked = if row % 4 == 0 { format!("h-{}", row + 1) } else { String::new() };
        let time = 1_709_629_200 + 60 * row;
        format!(
            "q-{row},u-{},s-{},{time},web,\"Porto, Portugal\",pool|wifi,{hotels},{prices},{clicked}\n",
            row / 8,
            row / 4
        )
    };
    let header =
        "search_id,user_id,session_id,searched_at,platform,destination,filters,hotels,prices,clicked_hotel\n";
    for (part, rows) in [(0, 0..20), (1, 20..40)] {
        dir.write(format!("searches/{part}.csv"), header.to_owned() + &rows.map(row).collect::<String>());
    }
    let (text, summary) = init_and_build(&dir, &["searches/*.csv"]);
    assert!(text.contains("searches = \"searches/*.csv\"") && !text.contains("# CHECK"), "{text}");
    assert!(text.contains("# 1709629200: seconds, 2024-03-05T09:00:00Z"), "{text}");
    // 20 searches have 2 hotels, 20 have 3, and every fourth has a click.
    assert_eq!(summary["samples"], 100);
    assert_eq!(summary["sessions"], 10);
    has_length(&summary, "filters", 2.0);
    let verified = dir.command(&["verify", "dataset", "--against", "dataset.toml"]).output().unwrap();
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
}

#[test]
fn a_news_log_of_parquet_lists() {
    let dir = Dir::new();
    let rows = 0..30;
    let lists = |list: fn(i32) -> Vec<i32>| -> ArrayRef {
        let lists = rows.clone().map(|row| Some(list(row).into_iter().map(Some)));
        Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists))
    };
    let times = rows.clone().map(|row| 1_684_700_000_000_000 + i64::from(row) * 60_000_000);
    let columns: Vec<(&'static str, ArrayRef)> = vec![
        ("impression_id", Arc::new(UInt32Array::from_iter_values(rows.clone().map(|row| row as u32)))),
        (
            "article_id",
            Arc::new(Int32Array::from_iter(rows.clone().map(|row| (row % 3 == 0).then_some(row)))),
        ),
        ("impression_time", Arc::new(TimestampMicrosecondArray::from_iter_values(times))),
        (
            "read_time",
            Arc::new(Float32Array::from_iter(rows.clone().map(|row| (row % 2 == 0).then_some(1.5)))),
        ),
        ("article_ids_inview", lists(|row| (0..2 + row % 3).map(|i| 100 * row + i).collect())),
        ("article_ids_clicked", lists(|row| vec![100 * row])),
        ("history", lists(|row| (0..row % 4).collect())),
        ("user_id", Arc::new(UInt32Array::from_iter_values(rows.clone().map(|row| (row / 10) as u32)))),
        ("session_id", Arc::new(UInt32Array::from_iter_values(rows.clone().map(|row| (row / 5) as u32)))),
    ];
    let users = columns.iter().filter(|(name, _)| *name == "user_id").cloned().collect();
    dir.write("logs/behaviors.parquet", parquet(columns));
    dir.write("logs/history.parquet", parquet(users));
    // Files with other columns become another source.
    let (text, summary) = init_and_build(&dir, &["logs"]);
    assert!(
        text.contains("behaviors = \"logs/behaviors.parquet\"") && text.contains("# [[attributes]]"),
        "{text}"
    );
    assert!(!text.contains("# CHECK"), "{text}");
    assert_eq!(summary["samples"], 90);
    assert_eq!(summary["sessions"], 6);
    let label = statistics_of(&summary, "label");
    assert!((label["positive_share"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-6, "{label}");
    assert_eq!(statistics_of(&summary, "history")["kind"], "sequence");
}

#[test]
fn a_retail_log_of_events() {
    let dir = Dir::new();
    let row = |row: i64| {
        let (event, order) = match row % 5 {
            0 => ("addtocart", String::new()),
            1 => ("transaction", format!("T{row}")),
            _ => ("view", String::new()),
        };
        format!("{},{},{event},{},{order}\n", 1_433_221_332 + row, row / 6, 500 + row % 7)
    };
    let text =
        "timestamp,visitorid,event,itemid,transactionid\n".to_owned() + &(0..60).map(row).collect::<String>();
    dir.write("events.csv", text);
    let (text, summary) = init_and_build(&dir, &["events.csv"]);
    assert!(
        text.contains("IN ('addtocart', 'transaction')") && text.contains("user = \"visitorid\""),
        "{text}"
    );
    assert!(text.contains("time = { column = \"timestamp\", unit = \"s\" }"), "{text}");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&60.into(), &10.into()));
    assert!((statistics_of(&summary, "label")["positive_share"].as_f64().unwrap() - 0.4).abs() < 1e-6);
}

#[test]
fn a_music_log_of_json_lines() {
    let dir = Dir::new();
    let row = |row: i64| {
        let genre = if row % 2 == 0 { ",\"genres\": [\"rock\", \"pop\"]" } else { "" };
        format!(
            "{{\"played_at\": \"2024-05-01T10:{:02}:00Z\", \"userId\": \"u{}\", \"trackId\": {row}, \"skipped\": {}{genre}}}\n",
            row % 60,
            row / 10,
            row % 4 == 0
        )
    };
    dir.write("plays/a.jsonl", (0..40).map(row).collect::<String>());
    let (text, summary) = init_and_build(&dir, &["plays/a.jsonl"]);
    assert!(text.contains("user = \"userId\"") && text.contains("skipped = { kind = \"label\" }"), "{text}");
    assert_eq!(summary["samples"], 40);
    has_length(&summary, "genres", 1.0);
}

#[test]
fn fields_of_json_objects_are_columns() {
    let dir = Dir::new();
    let row = |row: i64| {
        format!(
            "{{\"ts\": {}, \"user\": {{\"id\": \"u{}\", \"age\": {}}}, \"user_age\": 1, \
             \"track\": {{\"id\": {}, \"artist\": {{\"id\": {}, \"o'name\": \"x\"}}}}, \"skipped\": {}}}\n",
            1_717_200_000 + 30 * row,
            row / 10,
            if row % 2 == 0 { "null".to_owned() } else { (20 + row).to_string() },
            row % 7,
            row % 3,
            row % 4 == 0
        )
    };
    dir.write("plays.jsonl", (0..40).map(row).collect::<String>());
    let (text, summary) = init_and_build(&dir, &["plays.jsonl"]);
    for part in [
        "\"user\"['id'] AS \"user_id\"",
        "user = \"user_id\"",
        "coalesce(\"user\"['age'], 0) AS \"user_age_\"",
        "\"track\"['artist']['o''name'] AS \"track_artist_o'name\"",
    ] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
    assert!(!text.contains("# CHECK"), "{text}");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&40.into(), &4.into()));
    assert_eq!(statistics_of(&summary, "track_id")["distinct_ids"], 7);
    assert_eq!(statistics_of(&summary, "track_artist_id")["distinct_ids"], 3);
    assert_eq!(statistics_of(&summary, "user_age_")["max"], 59.0);
}

#[test]
fn a_log_that_got_a_column_is_one_log() {
    let dir = Dir::new();
    let names = ["user_id", "ts", "clicked", "item", "price", "page"];
    let file = |name: &str, header: &[&str]| {
        let row = |row: i64| {
            let values =
                (2..header.len()).map(|place| (row % (place as i64)).to_string()).collect::<Vec<_>>();
            format!("{},{},{}\n", row / 5, 1_717_200_000 + row, values.join(","))
        };
        let rows: String = (0..20).map(row).collect();
        dir.write(name, format!("{}\n{rows}", header.join(",")));
    };
    file("log/1.csv", &names[..5]);
    file("log/2.csv", &names);
    let (text, summary) = init_and_build(&dir, &["log"]);
    assert!(text.contains("log = { path = \"log\", missing_columns = \"null\" }"), "{text}");
    assert!(text.contains("# CHECK: some files lack columns"), "{text}");
    assert_eq!(
        (&summary["samples"], statistics_of(&summary, "page")["null_share"].clone()),
        (&40.into(), 0.5.into())
    );
    // A part without labels is another log.
    file("log/2.csv", &["user_id", "ts", "kind", "item", "price", "page"]);
    file("log/1.csv", &["user_id", "ts", "kind", "item", "price", "page", "clicked"]);
    let (summary, _) = init(&dir, &["log"]);
    assert_eq!(summary["sources"].as_array().unwrap().len(), 2, "{summary}");
}

#[test]
fn values_of_several_types_and_names_that_repeat() {
    let dir = Dir::new();
    let row = |row: i64| {
        let tags = if row % 2 == 0 { "\"a\"" } else { "[\"a\"]" };
        let time = 1_717_200_000 + row;
        format!("{{\"user_id\": {}, \"ts\": {time}, \"tags\": {tags}, \"clicked\": {}}}\n", row / 5, row % 2)
    };
    dir.write("log.jsonl", (0..20).map(row).collect::<String>());
    let (text, summary) = init_and_build(&dir, &["log.jsonl"]);
    assert!(text.contains("# Not used: `tags`: values of several types"), "{text}");
    assert_eq!(summary["samples"], 20);
    // The header is not taken for a row.
    dir.write("twice.csv", "user_id,ts,item,ts\n1,1717200000,5,5\n1,1717200001,6,6\n");
    let command = dir.command(&["init", "twice.csv", "--out", "new.toml"]);
    dir.fails_as(command, &["twice.csv", "it has two columns `ts`"]);
    assert!(!dir.path("new.toml").exists());
}

#[test]
fn events_of_another_log_can_be_a_label() {
    let dir = Dir::new();
    let shown = |row: i64| format!("{row},{},{}\n", row / 5, 1_717_200_000 + 60 * row);
    let bought = |row: i64| format!("{row},{}\n", 1_717_200_000 + 60 * row + 86_400);
    dir.write("shown.csv", "impression_id,user_id,ts\n".to_owned() + &(0..20).map(shown).collect::<String>());
    dir.write(
        "purchases.csv",
        "impression_id,bought_at\n".to_owned() + &(0..20).step_by(4).map(bought).collect::<String>(),
    );
    let (_, text) = init(&dir, &["shown.csv", "purchases.csv"]);
    // Uncomment the section, and use its label.
    let (before, rest) = text.split_once("# [join]\n").expect(&text);
    let (join, after) = rest.split_once("\n\n").unwrap();
    let join = join.replace("# ", "").replace("    and under", "    # and under");
    let after = after.replace("[features]\n", "[features]\nhas_purchases = { kind = \"label\" }\n");
    dir.write("dataset.toml", format!("{before}[join]\n{join}\n\n{after}"));
    let (summary, _) = dir.build("dataset");
    let label = statistics_of(&summary, "has_purchases");
    assert!((label["positive_share"].as_f64().unwrap() - 0.25).abs() < 1e-6, "{label}");
}

#[test]
fn labels_of_rows_and_positions_of_columns_that_pandas_writes() {
    let dir = Dir::new();
    let columns = |names: &[&'static str]| -> Vec<(&'static str, ArrayRef)> {
        let values = |place: usize| -> ArrayRef {
            Arc::new(Int32Array::from_iter_values((0..20).map(|row| match place {
                0 => row / 5,
                1 => 1_717_200_000 + row,
                2 => row % 2,
                _ => row,
            })))
        };
        names.iter().enumerate().map(|(place, name)| (*name, values(place))).collect()
    };
    dir.write("log/a.parquet", parquet(columns(&["user_id", "ts", "clicked", "item"])));
    dir.write("log/b.parquet", parquet(columns(&["user_id", "ts", "clicked", "item", "__index_level_0__"])));
    let (text, summary) = init_and_build(&dir, &["log"]);
    assert!(text.contains("log = \"log\"") && text.contains("# Not used: `__index_level_0__`"), "{text}");
    assert_eq!(summary["samples"], 40);
    fs_err::remove_dir_all(dir.path("dataset")).unwrap();

    // `to_csv` of a table without names, with and without the labels of rows.
    let row = |row: i64| format!("{},{},{},{}\n", row / 5, 1_717_200_000 + row, row % 2, row);
    dir.write("plain.csv", "0,1,2,3\n".to_owned() + &(0..20).map(row).collect::<String>());
    let labelled = (0..20).map(|number| format!("{number},{}", row(number))).collect::<String>();
    dir.write("labelled.csv", ",0,1,2,3\n".to_owned() + &labelled);
    for file in ["plain.csv", "labelled.csv"] {
        let (text, summary) = init_and_build(&dir, &[file]);
        assert!(!text.contains("header = false"), "{text}");
        assert_eq!(summary["samples"], 20, "{file}");
        fs_err::remove_dir_all(dir.path("dataset")).unwrap();
    }
    // In a narrow file, these are more likely values.
    dir.write("pairs.txt", "0 1\n0 2\n1 1\n1 3\n");
    assert_eq!(init_and_build(&dir, &["pairs.txt"]).1["samples"], 4);
}

#[test]
fn a_log_of_tabs_without_a_header() {
    let dir = Dir::new();
    let row = |row: i64| {
        format!(
            "{row}\tU{}\t11/{}/2019 8:55:22 AM\tN55 N{row}\tN{row}-1 N456-0 N9-0\n",
            row / 4,
            14 + row % 8
        )
    };
    dir.write("requests.tsv", (0..24).map(row).collect::<String>());
    let (text, summary) = init_and_build(&dir, &["requests.tsv"]);
    assert!(text.contains("header = false") && text.contains("%m/%d/%Y %I:%M:%S %p"), "{text}");
    assert!(text.contains("user = \"column_2\""), "{text}");
    assert_eq!(summary["samples"], 72);
    has_length(&summary, "column_4", 2.0);
    let label = statistics_of(&summary, "label");
    assert!((label["positive_share"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-6, "{label}");
}

#[test]
fn a_log_of_users_and_items_without_times() {
    let dir = Dir::new();
    let rows = |users: std::ops::Range<i64>| -> String {
        let row =
            |place: i64| format!("{} {}\n", users.start + place % (users.end - users.start), 900 - place);
        (0..30).map(row).collect()
    };
    dir.write("log/a.txt", rows(1..4));
    dir.write("log/b.txt", rows(4..7));
    let (text, summary) = init_and_build(&dir, &["log"]);
    for part in ["delimiter = \" \"", "row_number = \"row_number\"", "file_number", "order = \"rows\""] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
    assert!(text.contains("key = [\"column_1\"]") && !text.contains("gap = "), "{text}");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&60.into(), &6.into()), "{summary}");
}

#[test]
fn a_log_without_recognizable_columns_builds_too() {
    let dir = Dir::new();
    dir.write("weather.txt", "place;sky\nPorto;sun\nLisbon;rain\n");
    let (summary, text) = init(&dir, &["weather.txt"]);
    assert_eq!(summary["to_check"].as_array().unwrap().len(), 3, "{summary}");
    assert_eq!(text.matches("# CHECK: ").count(), 3, "{text}");
    let (text, summary) = init_and_build(&dir, &["weather.txt"]);
    assert!(text.contains("format = \"csv\", delimiter = \";\""), "{text}");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&2.into(), &2.into()), "{summary}");
}

#[test]
fn paths_are_relative_to_the_configuration() {
    let dir = Dir::new();
    let log = "time,user,clicked,item\n2024-05-01T10:00:00,1,1,5\n2024-05-01T10:00:01,1,0,6\n";
    dir.write("logs/day=1/a.csv", log);
    dir.write("config/README", "");
    let command = |out: &str| dir.command(&["init", "logs", "--out", out]);
    let output = command("config/dataset.toml").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(stdout.contains("onefold-ingest check config/dataset.toml"), "{stdout}");
    let text = fs_err::read_to_string(dir.path("config/dataset.toml")).unwrap();
    assert!(text.contains("logs = \"../logs\"") && text.contains("columns = [\"day\"]"), "{text}");
    let output = dir.command(&["build", "config/dataset.toml", "--out", "dataset"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The file is replaced only with `--overwrite`.
    dir.fails_as(command("config/dataset.toml"), &["config/dataset.toml", "it exists", "--overwrite"]);
    assert_eq!(fs_err::read_to_string(dir.path("config/dataset.toml")).unwrap(), text);
    dir.fails_as(command("config"), &["this is a directory", "give the name of a file"]);
    dir.fails_as(command("none/dataset.toml"), &["`none`: there is no such directory to write into"]);
}

#[test]
fn logs_that_cannot_be_read_are_named() {
    let dir = Dir::new();
    dir.write("empty.csv", "");
    dir.write("header.csv", "time,user\n");
    dir.write("damaged.parquet", "PAR1");
    for (path, parts) in [
        ("nowhere/*.csv", &["nowhere/*.csv", "there is no such file"]),
        ("empty.csv", &["empty.csv", "the file is empty"]),
        ("header.csv", &["header.csv", "no rows"]),
        ("damaged.parquet", &["damaged.parquet", "not a whole Parquet file"]),
    ] {
        dir.fails_as(dir.command(&["init", path, "--out", "new.toml"]), parts);
        assert!(!dir.path("new.toml").exists());
    }
}
