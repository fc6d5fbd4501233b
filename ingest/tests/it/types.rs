//! Column types of text files: inference never loses a digit, a fraction or an offset, and unused columns do not cause
//! errors.

use serde_json::Value;

use crate::logs::{Dir, statistics_of};

/// Writes a configuration of samples `n` with sessions by `n`, followed by `rest`.
fn configure(dir: &Dir, source: &str, rest: &str) {
    // A feature cannot be kept under its own name.
    let keep = if rest.contains("\nn = ") { "" } else { "keep = [\"n\"]\n" };
    dir.write(
        "dataset.toml",
        format!(
            "format_version = 1\n{keep}[sources]\nlog = {source}\n[session]\nkey = [\"n\"]\n{rest}\
             clicked = {{ kind = \"label\" }}\n"
        ),
    );
}

/// The rest of a configuration of samples with a key and with texts as ids.
const ZIPS: &str = "time = \"at\"\n[samples]\nsource = \"log\"\nkey = [\"zip\"]\n[features]\nzip = { kind = \"sparse\", ids = \"hash\" }\n";

fn distinct(summary: &Value, feature: &str) -> Value {
    statistics_of(summary, feature)["distinct_ids"].clone()
}

#[test]
fn zeros_in_front_are_part_of_an_id() {
    let dir = Dir::new();
    let row = |n: usize, zip: &str| format!("{n},{zip},2024-06-01T12:00:00Z,0\n");
    let rows: String = ["007", "7", "0010", "10"].iter().enumerate().map(|(n, zip)| row(n, zip)).collect();
    dir.write("log.csv", format!("n,zip,at,clicked\n{rows}"));
    configure(&dir, "\"log.csv\"", ZIPS);
    let (summary, _) = dir.build("first");
    assert_eq!((&summary["samples"], distinct(&summary, "zip")), (&4.into(), 4.into()));
    assert_eq!(summary["skipped"]["duplicate_samples"], 0);

    // The value comes after the rows from which types are inferred, or in a second file.
    let many: String = (0..1500).map(|n| row(n, &(n + 1).to_string())).collect();
    dir.write("late.csv", format!("n,zip,at,clicked\n{many}{}", row(1500, "007")));
    configure(&dir, "\"late.csv\"", ZIPS);
    let hint = "`[sources].log`, as `schema = { zip = \"VARCHAR\" }`";
    dir.fails(&["late.csv", "column `zip`: 1 rows have a value", "the first is `007` in line 1502 of", hint]);
    configure(&dir, "{ path = \"late.csv\", schema = { zip = \"VARCHAR\" } }", ZIPS);
    assert_eq!(dir.build("late").0["samples"], 1501);
    dir.write("files/a.csv", format!("n,zip,at,clicked\n{many}"));
    dir.write("files/b.csv", format!("n,zip,at,clicked\n{}", row(1500, "007")));
    configure(&dir, "\"files\"", ZIPS);
    assert_eq!(dir.build("both").0["samples"], 1501);
    // A declared integer type is used.
    configure(&dir, "{ path = \"log.csv\", schema = { zip = \"BIGINT\" } }", ZIPS);
    assert_eq!(dir.build("numbers").0["skipped"]["duplicate_samples"], 2);
}

#[test]
fn json_numbers_are_not_cut_to_integers() {
    let dir = Dir::new();
    let row = |n: usize, price: &str, ids: &str| {
        format!(
            "{{\"n\":{n},\"at\":\"2024-06-01T12:00:00Z\",\"clicked\":0,\"price\":{price},\"ids\":{ids},\"other\":{n}}}\n"
        )
    };
    let many: String = (0..1000).map(|n| row(n, "5", "[1]")).collect();
    let rest = "time = \"at\"\n[samples]\nsource = \"log\"\n[features]\nprice = { kind = \"dense\" }\n\
                ids = { kind = \"sequence\", group = \"g\" }\n";
    for (price, ids, parts) in [
        (
            "0.99",
            "[1]",
            ["column `price`", "the first is `0.99` in line 1001 of", "schema = { price = \"DOUBLE\" }"],
        ),
        (
            "5",
            "[1.9, 2.2]",
            ["column `ids`", "the first is `1.9` in line 1001 of", "schema = { ids = \"VARCHAR[]\" }"],
        ),
    ] {
        dir.write("log.jsonl", format!("{many}{}", row(1000, price, ids)));
        configure(&dir, "\"log.jsonl\"", rest);
        dir.fails(&[&["log.jsonl"][..], &parts[..]].concat());
    }
    dir.write("log.jsonl", format!("{many}{}", row(1000, "0.99", "[1]")));
    configure(&dir, "{ path = \"log.jsonl\", schema = { price = \"DOUBLE\" } }", rest);
    let price = statistics_of(&dir.build("dataset").0, "price");
    assert!((price["min"].as_f64().unwrap() - 0.99).abs() < 1e-6, "{price}");
    // A declared integer may not have a fraction in any row.
    configure(&dir, "{ path = \"log.jsonl\", schema = { price = \"BIGINT\" } }", rest);
    dir.fails(&["column `price`: 1 rows have a value that does not fit its type in `schema`, Int64"]);
    // Wrong values in an unused column do not matter.
    dir.write(
        "log.jsonl",
        format!("{many}{}", row(1000, "5", "[1]").replace("\"other\":1000", "\"other\":\"x\"")),
    );
    configure(&dir, "\"log.jsonl\"", rest);
    assert_eq!(dir.build("unused").0["samples"], 1001);
    // More digits than any numeric type holds.
    dir.write("log.jsonl", row(0, "5", "[1]").replace("\"other\":0", "\"other\":20000000000000000001"));
    let other = rest.replace("price = { kind = \"dense\" }", "other = { kind = \"sparse\", ids = \"hash\" }");
    configure(&dir, "\"log.jsonl\"", &other);
    assert_eq!(distinct(&dir.build("digits").0, "other"), 1);
}

#[test]
fn errors_in_unread_columns_are_ignored() {
    let dir = Dir::new();
    let rows: String = (0..1500).map(|n| format!("{n},2024-06-01T12:00:00,0,{n},2024-06-01\n")).collect();
    let wrong = "1500,2024-06-01T12:00:00,0,007,never\n";
    dir.write("log/a.csv", format!("n,at,clicked,other,valid_to\n{rows}{wrong}"));
    dir.write("log/b.csv", "n,at,clicked,other,valid_to\n1501,2024-06-01T12:00:00,0,text,9999-12-31\n");
    let rest = "time = \"at\"\n[samples]\nsource = \"log\"\n[features]\nn = { kind = \"sparse\" }\n";
    configure(&dir, "\"log\"", rest);
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("dataset.toml", text.replace("keep = [\"n\"]\n", ""));
    assert_eq!(dir.build("dataset").0["samples"], 1502);
}

#[test]
fn floating_point_numbers_are_no_keys() {
    let dir = Dir::new();
    let (a, b) = ("4873214862074861313", "4873214862074861317");
    let line = |n: usize, user: &str| format!("{n},{user},2024-06-01T12:00:0{n},0\n");
    dir.write("log.csv", format!("n,user,at,clicked\n{}{}{}", line(1, a), line(2, b), line(3, "7.5")));
    let samples = |query: &str| {
        format!(
            "time = \"at\"\n[samples]\nquery = \"{query}\"\nkey = [\"user\"]\n[features]\nitem = {{ kind = \"sparse\" }}\n"
        )
    };
    // The column is read as text, so no two users are equal.
    configure(&dir, "\"log.csv\"", &samples("SELECT *, n AS item FROM log"));
    assert_eq!(dir.build("text").0["samples"], 3);
    let doubles = "{ path = \"log.csv\", schema = { user = \"DOUBLE\" } }";
    configure(&dir, doubles, &samples("SELECT *, n AS item FROM log"));
    dir.fails(&["`[samples].key` names the column `user`, whose type is Float64", "whole_id(user)"]);
    let whole = samples("SELECT * EXCLUDE (user), whole_id(user) AS user, n AS item FROM log");
    configure(&dir, doubles, &whole);
    dir.fails(&["`whole_id`", "is not a whole number that its type Float64 holds exactly"]);
    dir.write("log.csv", format!("n,user,at,clicked\n{}{}", line(1, "7.0"), line(2, "8.0")));
    configure(&dir, doubles, &whole);
    assert_eq!(dir.build("whole").0["samples"], 2);
    let session = "time = \"at\"\n[samples]\nquery = \"SELECT *, 1 AS item FROM log\"\n[features]\nitem = { kind = \"sparse\" }\n";
    configure(&dir, doubles, session);
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    dir.write("dataset.toml", text.replace("key = [\"n\"]", "key = [\"user\"]"));
    dir.fails(&["column `user`", "a session column cannot be a Float64", "whole_id(user)"]);
    // A feature with such numbers.
    configure(&dir, doubles, &session.replace("item", "user").replace("1 AS user", "1 AS one"));
    dir.fails(&["Float64", "`whole_id(user)`"]);
}

#[test]
fn all_problems_are_listed_at_once() {
    let dir = Dir::new();
    let row = |n: usize| format!("{n},{},2024-06-01T12:00:{:02}Z,0,30,{n}\n", n % 7, n % 60);
    let many: String = (0..1500).map(row).collect();
    let wrong = "1500,x,2024-06-01T12:00:00Z,0,30,1\n1501,1,2024-06-01T12:00:00Z,0,,1\n1502,1,2024-06-01T12:00:00Z,0,,1\n\
                 1503,1,1984-06-01T12:00:00Z,0,30,1\n1504,1,2024-06-01T12:00:00Z,0,30,0.5\n7,1,2024-06-01T12:00:00Z,0,30,1\n";
    dir.write("log.csv", format!("n,shop,at,clicked,age,price\n{many}{wrong}"));
    dir.write("shops.csv", "shop,size\n0,1\n1,2\n2,3\n3,4\n4,5\n5,6\n5,7\n");
    let rest = "time = \"at\"\n[samples]\nsource = \"log\"\nkey = [\"n\"]\nduplicates = \"error\"\n\
                [[attributes]]\nsource = \"shops\"\non = [\"shop\"]\ncolumns = [\"size\"]\nmissing = \"error\"\n[features]\n\
                age = { kind = \"dense\" }\nprice = { kind = \"dense\" }\nsize = { kind = \"sparse\" }\n";
    configure(&dir, "\"log.csv\"\nshops = \"shops.csv\"", rest);
    let problems = [
        "source `log`: column `shop`: 1 rows have a value",
        "the first is `x` in line 1502 of",
        "source `log`: column `price`: 1 rows have a value",
        "the first is `0.5` in line 1506 of",
        "`[checks].past`: 1 rows have a time",
        "`[samples].duplicates`: 1 rows have the key of an earlier row, the first with n = 7",
        "`[[attributes]]` 1: `shops` has several rows of one key that differ",
        "samples have no row of `shops`",
        "column `age`: 2 samples have no value",
        "fix: ",
    ];
    dir.fails(&problems);
    let output = dir.command(&["check", "dataset.toml", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let found: Value =
        serde_json::from_str(String::from_utf8(output.stdout).unwrap().lines().last().unwrap()).unwrap();
    let found: Vec<String> = found["problems"].as_array().unwrap().iter().map(Value::to_string).collect();
    for problem in &problems[..9] {
        assert!(found.iter().any(|found| found.contains(problem)), "no {problem:?} in {found:#?}");
    }

    // The fixes that the problems suggest are applied.
    dir.write("shops.csv", "shop,size\n0,1\n1,2\n2,3\n3,4\n4,5\n5,6\n");
    let rest = rest
        .replace("duplicates = \"error\"", "duplicates = \"skip\"")
        .replace("missing = \"error\"", "missing = \"null\"")
        .replace("source = \"log\"", "query = \"SELECT * REPLACE (COALESCE(age, 0) AS age) FROM log\"")
        .replace("[features]", "[checks]\npast = \"skip\"\n[features]");
    let log = "{ path = \"log.csv\", schema = { shop = \"VARCHAR\", price = \"DOUBLE\" } }";
    let shops = "{ path = \"shops.csv\", schema = { shop = \"VARCHAR\" } }";
    configure(&dir, &format!("{log}\nshops = {shops}"), &rest);
    let output = dir.command(&["check", "dataset.toml", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (summary, _) = dir.build("dataset");
    assert_eq!((&summary["rows"]["read"], &summary["samples"]), (&1506.into(), &1504.into()));
    assert_eq!(summary["rows"]["left_out"].to_string(), r#"{"past":1,"duplicate":1}"#);
}

#[test]
fn samples_without_a_session_or_a_possible_time_are_counted_in_all_files() {
    let dir = Dir::new();
    for (file, first) in [("log/a.csv", 0), ("log/b.csv", 10)] {
        let rows = format!(
            "n,at,clicked\n{first},2024-06-01T12:00:00Z,0\n,2024-06-01T12:00:00Z,0\n{},,0\n{},1984-06-01T12:00:00Z,0\n",
            first + 1,
            first + 2
        );
        dir.write(file, rows);
    }
    let rest = "time = \"at\"\n[samples]\nquery = \"SELECT *, 1 AS item FROM log\"\n[features]\nitem = { kind = \"sparse\" }\n";
    configure(&dir, "\"log\"", rest);
    dir.fails(&[
        "column `n`: 2 samples have no value, and a session needs one",
        "column `at`: 2 samples have no value, and a session needs one",
        "column `at`: 2 samples have a time before 1990-01-01",
        "the first 1984-06-01",
    ]);
}

#[test]
fn problems_of_several_files_and_sections_are_listed_together() {
    let dir = Dir::new();
    dir.write("log/a.csv", "");
    dir.write("log/b.csv", "n,at\n1,2,3\n");
    let rest =
        "time = \"at\"\n[samples]\nsource = \"log\"\nkey = [\"nn\"]\n[features]\nn = { kind = \"sparse\" }\n";
    let configure = |sources: &str, rest: &str| {
        configure(&dir, sources, rest);
        let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
        dir.write("dataset.toml", text.replace("keep = [\"n\"]\n", ""));
    };
    configure("\"log\"\nnothing = \"nowhere.csv\"", rest);
    dir.fails(&[
        "log/a.csv`: the file is empty",
        "log/b.csv`: line 2: the row has 3 values",
        "nowhere.csv`: there is no such file",
    ]);
    fs_err::remove_file(dir.path("log/a.csv")).unwrap();
    dir.write("log/b.csv", "n,at,clicked\n1,2024-06-01T12:00:00Z,0\n");
    let attributes =
        "[[attributes]]\nsource = \"log\"\non = [\"n\"]\ncolumns = { size = \"sizee\" }\n[features]";
    configure("\"log\"", &rest.replace("[features]", attributes));
    dir.fails(&["`[samples].key` names", "`nn`", "`[[attributes]]` 1: `columns`", "`sizee`"]);
}

#[test]
fn nondeterministic_queries_are_refused() {
    let dir = Dir::new();
    dir.write("log.csv", "n,at,clicked\n1,2024-06-01T12:00:00Z,0\n2,2024-06-01T12:00:01Z,1\n");
    let with = |query: &str, sources: &str| {
        let rest = "time = \"at\"\n[samples]\nsource = \"log\"\n[features]\nn = { kind = \"sparse\" }\n";
        configure(&dir, &format!("\"log.csv\"\n{sources}"), rest);
        let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
        let text = text.replace("keep = [\"n\"]\n", "").replace("source = \"log\"", query);
        dir.write("dataset.toml", text);
    };
    for (query, message, instead) in [
        (
            "query = \"SELECT * FROM log WHERE random() < 0.5\"",
            "`[samples].query`: `random()`",
            "`[sampling]`",
        ),
        (
            "query = \"SELECT * FROM log LIMIT 1\"",
            "`[samples].query`: `LIMIT` without `ORDER BY`",
            "hash_id(request)",
        ),
        (
            "query = \"SELECT *, row_number() OVER () AS place FROM log\"",
            "`[samples].query`: `row_number` without `ORDER BY`",
            "`row_number(…) OVER (ORDER BY …)`",
        ),
        ("source = \"log\"\nwhere = \"random() < 0.5\"", "`[samples].where`: `random()`", "`[sampling]`"),
    ] {
        with(query, "");
        dir.fails(&[message, instead]);
    }
    with("source = \"some\"", "some = { query = \"SELECT * FROM log LIMIT 1\" }");
    dir.fails(&["`[sources].some.query`: `LIMIT` without `ORDER BY`"]);
    // The queries that the hints suggest work.
    for query in [
        "SELECT * FROM log ORDER BY n LIMIT 2",
        "SELECT * FROM log WHERE hash_id(n) % 100 < 100",
        "SELECT *, row_number() OVER (ORDER BY n) AS place FROM log",
    ] {
        with(&format!("query = \"{query}\""), "");
        let name = format!("dataset-{}", query.len());
        assert_eq!(dir.build(&name).0["samples"], 2, "{query}");
    }
}

#[test]
fn offsets_of_times_count() {
    let dir = Dir::new();
    let rest = |time: &str| {
        format!(
            "time = {time}\n[samples]\nquery = \"SELECT *, n AS item FROM log\"\n[features]\nitem = {{ kind = \"sparse\" }}\n"
        )
    };
    let first = |summary: &Value| summary["statistics"]["first_time"].clone();
    dir.write("log.csv", "n,at,clicked\n1,2024-06-01T14:00:00+02:00,0\n2,2024-06-01T13:00:00Z,0\n");
    configure(&dir, "\"log.csv\"", &rest("\"at\""));
    assert_eq!(first(&dir.build("instants").0), "2024-06-01T12:00:00Z");
    configure(&dir, "\"log.csv\"", &rest("{ column = \"at\", time_zone = \"America/New_York\" }"));
    dir.fails(&["`time_zone` does not apply", "remove `time_zone`"]);
    // Only some times have an offset; the others are local.
    dir.write("log.csv", "n,at,clicked\n1,2024-06-01T14:00:00+02:00,0\n2,2024-06-01T13:00:00,0\n");
    let summary = dir.build("mixed").0;
    assert_eq!(first(&summary), "2024-06-01T12:00:00Z");
    assert_eq!(summary["statistics"]["last_time"], "2024-06-01T17:00:00Z");
    // A time with an offset comes after the rows from which the type is inferred.
    let local: String = (0..1500).map(|n| format!("{n},2024-06-01 13:00:00,0\n")).collect();
    dir.write("log.csv", format!("n,at,clicked\n{local}1500,2024-06-01T14:00:00+02:00,0\n"));
    dir.fails(&[
        "log.csv",
        "column `at`",
        "the first is `2024-06-01T14:00:00+02:00` in line 1502 of",
        "schema = { at = \"VARCHAR\" }",
    ]);
}

#[test]
fn a_file_with_only_a_header_has_no_types() {
    let dir = Dir::new();
    dir.write("none.csv", "n,at,clicked\n");
    let rest = "time = \"at\"\n[samples]\nsource = \"log\"\n[features]\nn = { kind = \"sparse\" }\n";
    configure(&dir, "\"none.csv\"", rest);
    let hint = "under `[sources].log`, as `schema = { n = \"BIGINT\" }`";
    dir.fails(&[
        "there are 3 problems",
        "none.csv",
        "has rows, so the types of its columns are not known",
        hint,
    ]);
    let typed =
        "{ path = \"none.csv\", schema = { n = \"BIGINT\", at = \"TIMESTAMP\", clicked = \"BIGINT\" } }";
    configure(&dir, typed, rest);
    dir.fails(&["gives no samples"]);

    // A day without events.
    dir.write("log.csv", "n,at,clicked\n1,2024-06-01T12:00:00,0\n");
    let join = "[join]\nsource = \"events\"\non = [\"n\"]\ntime = \"at\"\nwindow = \"1h\"\n[join.labels]\n\
                bought = { when = \"TRUE\" }\n";
    let rest = rest
        .replace("[features]", &format!("key = [\"n\"]\n{join}[features]\nbought = {{ kind = \"label\" }}"));
    configure(&dir, "\"log.csv\"\nevents = \"none.csv\"", &rest);
    dir.fails(&["`[join].on`", "none.csv", "`[sources].events`, as `schema = { n = \"BIGINT\" }`"]);
    configure(&dir, "\"log.csv\"\nevents = { path = \"none.csv\", schema = { n = \"BIGINT\" } }", &rest);
    assert_eq!(dir.build("dataset").0["samples"], 1);
}

#[test]
fn hints_for_wrong_values_lead_to_a_dataset() {
    let dir = Dir::new();
    let header = "n,at,clicked,seconds\n";
    let rows: String = (0..1500).map(|n| format!("{n},2024-06-01T12:00:00Z,0,{n}\n")).collect();
    // The header of a file that was joined to another, and a marker for a missing number.
    dir.write("log.csv", format!("{header}{rows}{header}1500,2024-06-01T12:00:00Z,0,n/a\n"));
    let query = |seconds: &str, rows: &str| {
        format!(
            "time = \"at\"\n[samples]\nquery = \"\"\"SELECT n, at, clicked, {seconds} AS seconds FROM log{rows}\"\"\"\n\
             [features]\nn = {{ kind = \"sparse\" }}\nseconds = {{ kind = \"dense\" }}\n"
        )
    };
    configure(&dir, "\"log.csv\"", &query("seconds", ""));
    dir.fails(&[
        "column `seconds`: 2 rows have a value that does not fit the type of the first rows, Int64; the first is `seconds` in \
         line 1502",
        "remove the row, which repeats the header, or give the column's type under `[sources].log`, as `schema = { seconds = \
         \"VARCHAR\" }`; then `TRY_CAST(\"seconds\" AS BIGINT)` in the query is null for such texts",
        "then leave such rows out in the query, `WHERE TRY_CAST(\"at\" AS TIMESTAMP) IS NOT NULL`",
    ]);
    // Fractions alone fit a double. An id with too many digits does not, whichever comes first.
    for (others, hint) in [
        ("1e3\n1501,2024-06-01T12:00:00Z,0,0.5", "schema = { seconds = \"DOUBLE\" }`"),
        ("1e3\n1501,2024-06-01T12:00:00Z,0,99999999999999999999", "schema = { seconds = \"VARCHAR\" }`"),
    ] {
        dir.write("log.csv", format!("{header}{rows}1500,2024-06-01T12:00:00Z,0,{others}\n"));
        dir.fails(&["column `seconds`: 2 rows have a value", "the first is `1e3` in line 1502", hint]);
    }
    dir.write("log.csv", format!("{header}{rows}1500,2024-06-01T12:00:00Z,0,n/a\n"));
    let texts = "{ path = \"log.csv\", schema = { seconds = \"VARCHAR\" } }";
    configure(&dir, texts, &query("seconds", ""));
    dir.fails(&[
        "column `seconds`",
        "Utf8",
        "write `TRY_CAST(seconds AS DOUBLE)` in the query, which is null for other texts",
    ]);
    configure(&dir, texts, &query("CAST(seconds AS DOUBLE)", ""));
    dir.fails(&["n/a", "`TRY_CAST` in place of `CAST` is null for it"]);
    configure(&dir, texts, &query("TRY_CAST(seconds AS DOUBLE)", ""));
    dir.fails(&["column `seconds`: 1 samples have no value", "COALESCE(seconds, 0)"]);
    configure(
        &dir,
        texts,
        &query("COALESCE(TRY_CAST(seconds AS DOUBLE), 0)", " WHERE TRY_CAST(at AS TIMESTAMP) IS NOT NULL"),
    );
    assert_eq!(dir.build("dataset").0["samples"], 1501);
}

#[test]
fn bytes_of_another_encoding_are_named() {
    let dir = Dir::new();
    let rest = "time = \"at\"\n[samples]\nsource = \"log\"\n[features]\nn = { kind = \"sparse\" }\n";
    let rows = |format: &dyn Fn(usize, &str) -> String| -> Vec<u8> {
        let rows: String = (0..1500).map(|n| format(n, if n == 1400 { "caf\u{1}" } else { "tea" })).collect();
        rows.bytes().map(|byte| if byte == 1 { 0xe9 } else { byte }).collect()
    };
    let csv = rows(&|n, name| format!("{n},2024-06-01T12:00:00Z,0,{name}\n"));
    dir.write("log.csv", [&b"n,at,clicked,name\n"[..], &csv].concat());
    dir.write(
        "log.jsonl",
        rows(&|n, name| {
            format!("{{\"n\":{n},\"at\":\"2024-06-01T12:00:00Z\",\"clicked\":0,\"name\":\"{name}\"}}\n")
        }),
    );
    for (file, line) in [("log.csv", 1402), ("log.jsonl", 1401)] {
        configure(&dir, &format!("\"{file}\""), rest);
        let place = format!("{file}`: line {line}: it has bytes that are not a text in UTF-8");
        dir.fails(&[&place, "iconv -f ISO-8859-1 -t UTF-8"]);
    }
}
