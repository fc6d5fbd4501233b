use std::collections::BTreeSet;
use std::path::Path;

use onefold_property::cases;
use proptest::prelude::*;

use super::columns::{Column, Type};
use super::logs::Log;
use super::{file, roles};
use crate::config::{Config, FeatureKind, Format, SourceConfig};

fn column(name: &str, kind: Type, values: &[&str]) -> Column {
    Column {
        name: name.to_owned(),
        kind,
        is_list: false,
        is_folder: false,
        is_unnamed: false,
        values: values.iter().map(|value| (!value.is_empty()).then(|| (*value).to_owned())).collect(),
        lists: Vec::new(),
        has_null_items: false,
    }
}

fn list(name: &str, kind: Type, values: &[&[&str]]) -> Column {
    let items = |items: &&[&str]| {
        let owned: Vec<String> = items.iter().map(|item| (*item).to_owned()).collect();
        Some((owned, items.len()))
    };
    Column { is_list: true, lists: values.iter().map(items).collect(), ..column(name, kind, &[]) }
}

fn log(columns: Vec<Column>) -> Log {
    let rows = columns.first().map_or(0, |column| column.values.len().max(column.lists.len()));
    let source = SourceConfig::new("log.csv");
    let (name, fields, unread) = ("log".to_owned(), Vec::new(), Vec::new());
    Log { name, source, format: Format::Csv, files: 1, columns, fields, unread, rows }
}

/// Returns the text of the configuration of a log, and the parsed configuration.
fn written(log: Log) -> (String, Config) {
    let logs = [log];
    let (main, plan) = roles::decide(&logs);
    let text = file::written(&logs, main, &plan, Path::new("dataset.toml"));
    let config =
        Config::parse(Path::new("dataset.toml"), &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    (text, config)
}

fn kinds(config: &Config) -> Vec<(String, FeatureKind)> {
    config.feature_columns().map(|(name, kind)| (name.to_owned(), kind)).collect()
}

#[test]
fn times_users_and_labels_are_found_with_their_evidence() {
    let (text, config) = written(log(vec![
        column("timestamp", Type::Integer, &["1541599523", "1541599599", "1541600000"]),
        column("userId", Type::Integer, &["7", "7", "8"]),
        column("clicked", Type::Boolean, &["true", "false", "true"]),
        column("price", Type::Number, &["0.5", "NaN", ""]),
    ]));
    assert!(text.contains("# Csv, 1 file; 3 rows seen"), "{text}");
    assert!(text.contains("# 1541599523: seconds, 2018-11-07T14:05:23Z to 2018-11-07T14:13:20Z"), "{text}");
    assert_eq!(config.time.column, "timestamp");
    assert_eq!(config.session_columns(), ["userId"]);
    let expected =
        [("clicked", FeatureKind::Label), ("price", FeatureKind::Dense), ("userId", FeatureKind::Sparse)];
    assert_eq!(kinds(&config), expected.map(|(name, kind)| (name.to_owned(), kind)));
    assert!(!text.contains("# CHECK") && text.contains("nanvl"), "{text}");
}

#[test]
fn unknown_roles_are_marked_to_be_checked() {
    let (text, config) = written(log(vec![column("weather", Type::Text, &["sun", "rain"])]));
    for part in ["no column is a time", "no column names a session", "no column is a label"] {
        assert!(text.contains(&format!("# CHECK: {part}")), "{text}");
    }
    assert!(!text.contains("\n[session]\n"), "{text}");
    assert_eq!(config.session_columns(), ["row_number"]);
}

#[test]
fn items_that_were_shown_become_samples() {
    let (text, _) = written(log(vec![
        column("time", Type::Time, &["2024-05-01T10:00:00", "2024-05-01T10:00:01"]),
        column("session_id", Type::Integer, &["1", "1"]),
        list("inview", Type::Integer, &[&["1", "2", "3"], &["4", "5"]]),
        list("clicked", Type::Integer, &[&["2"], &["4"]]),
        list("prices", Type::Number, &[&["0.5", "1.5", "2.5"], &["1.0", "2.0"]]),
    ]));
    for part in ["unnest(\"inview\")", "array_has(\"clicked\"", "unnest(\"prices\") AS \"price\""] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
    let (text, _) = written(log(vec![
        column("time", Type::Text, &["11/15/2019 8:55:22 AM", "11/15/2019 8:56:22 PM"]),
        column("user", Type::Text, &["U13", "U13"]),
        column("shown", Type::Text, &["N123-1 N456-0", "N9-0"]),
        column("history", Type::Text, &["N55 N3", ""]),
    ]));
    for part in ["%m/%d/%Y %I:%M:%S %p", "split_ids(\"shown\", ' ')", "LIKE '%-1'", "kind = \"sequence\""] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
}

#[test]
fn a_retail_log_of_another_country_is_read_as_numbers_dates_and_users() {
    let mut log = log(vec![
        column("InvoiceDate", Type::Text, &["01/12/2010 08:26", "02/12/2010 09:00", "03/12/2010 10:00"]),
        column("CustomerID", Type::Number, &["17850.0", "", "17851.0"]),
        column("UnitPrice", Type::Text, &["7,58", "1.234,00", "12"]),
        column("Total", Type::Text, &["1,234.50", "7", "12"]),
        column("tags", Type::Text, &["12,34", "5", "6,7"]),
    ]);
    let (text, config) = written(log.clone());
    // Within a few days in December, and not on the 12th of several months.
    assert!(text.contains("format = \"%d/%m/%Y %H:%M\"") && text.contains("as `%m/%d/%Y`"), "{text}");
    assert_eq!(config.session_columns(), ["CustomerID"]);
    for part in [
        "whole_id(\"CustomerID\") AS \"CustomerID\"",
        "null_keys = \"skip\"",
        "CAST(replace(replace(\"UnitPrice\", '.', ''), ',', '.') AS DOUBLE)",
        "CAST(replace(\"Total\", ',', '') AS DOUBLE)",
        "# CHECK: the texts of `UnitPrice` are read as numbers, with a comma before the fraction",
        "split_ids(\"tags\", ',')",
    ] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
    // Where semicolons separate values, commas are in numbers.
    log.source.delimiter = Some(b';');
    assert!(written(log).0.contains("replace(\"tags\""));
}

#[test]
fn unknown_times_and_blanks_are_named() {
    let times = ["1717200000", "-1", "1717200001", "1717200002"];
    let (text, config) = written(log(vec![
        column("ts", Type::Integer, &times),
        column("item", Type::Text, &[" 1", " 2", " 3", ""]),
    ]));
    assert_eq!(config.time.column, "ts");
    assert!(text.contains("past = \"skip\"") && text.contains("unit = \"s\""), "{text}");
    assert!(text.contains("# CHECK: all values of `item` begin with a blank"), "{text}");
    // Without the name of a time, all values must be times.
    let (_, config) = written(log(vec![column("price", Type::Integer, &times)]));
    assert_ne!(config.time.column, "price");
}

#[test]
fn local_times_of_several_zones_are_to_be_checked() {
    let zones = column("where", Type::Text, &["Europe/Madrid", "Asia/Tokyo"]);
    let check = "# CHECK: the times are read as UTC, but `where` names the zone of each row";
    for (times, is_local) in [
        (["2024-10-26T22:00:00", "2024-10-27T05:00:01"], true),
        (["2024-10-26T22:00:00Z", "2024-10-27T05:00:01Z"], false),
        (["2024-10-26T22:00:00+02:00", "2024-10-27T05:00:01+09:00"], false),
    ] {
        for kind in [Type::Time, Type::Text] {
            let (text, _) = written(log(vec![column("searched_at", kind, &times), zones.clone()]));
            assert_eq!(text.contains(check), is_local, "{text}");
        }
    }
}

#[test]
fn a_log_without_names_may_have_a_label() {
    let unnamed =
        |name: &str, values: &[&str]| Column { is_unnamed: true, ..column(name, Type::Integer, values) };
    let (text, config) =
        written(log(vec![unnamed("column_1", &["0", "1", "0"]), unnamed("column_2", &["5", "6", "7"])]));
    assert!(text.contains("coalesce(\"column_1\", 0) AS \"column_1\""), "{text}");
    assert!(
        text.contains("# CHECK: the log has no header, and this column of 0 and 1 may be another one"),
        "{text}"
    );
    assert!(kinds(&config).contains(&("column_1".to_owned(), FeatureKind::Label)), "{text}");
}

const NAMES: [&str; 23] = [
    "session_id",
    "timestamp",
    "sample_key",
    "date",
    "hour",
    "user_id",
    "label",
    "labels",
    "time",
    "session",
    "clicked",
    "request_id",
    "history",
    "history.length",
    "event",
    "rating",
    "ungrouped",
    "__onefold_time",
    "constant",
    "ts",
    "inview",
    "prices",
    "select",
];
const VALUES: [&str; 16] = [
    "",
    "0",
    "1",
    "7",
    "1541599523",
    "20240601",
    "2024-06-01T10:00:00",
    "06/01/2024",
    "a|b",
    "N1-1 N2-0",
    "[1, 2]",
    "view",
    "click",
    "it's \"it\"\\\n\u{7f}",
    "NaN",
    "0.5",
];
const TYPES: [Type; 8] = [
    Type::Integer,
    Type::Unsigned,
    Type::Number,
    Type::Float32,
    Type::Boolean,
    Type::Text,
    Type::Time,
    Type::Other,
];

fn columns() -> impl Strategy<Value = Vec<Column>> {
    let name = prop_oneof![
        prop::sample::select(NAMES.to_vec()).prop_map(str::to_owned),
        "[a-zA-Z_\"\\\\'. \n\r#=\u{e9}-]{0,8}",
    ];
    let rows = prop::collection::vec(prop::sample::select(VALUES.to_vec()), 3);
    let column =
        (name, prop::sample::select(TYPES.to_vec()), rows, 0..4_u8).prop_map(|(name, kind, values, form)| {
            let single = column(&name, kind, &values);
            match form {
                0 => {
                    let items: Vec<&[&str]> = values.chunks(1).collect();
                    list(&name, kind, &items)
                }
                1 => Column { is_folder: true, kind: Type::Text, ..single },
                2 => Column { is_unnamed: true, ..single },
                _ => single,
            }
        });
    prop::collection::vec(column, 1..8)
}

proptest! {
    #![proptest_config(cases(512))]

    /// The configuration is valid for all columns.
    #[test]
    fn every_configuration_parses(columns in columns()) {
        let mut names = BTreeSet::new();
        let columns: Vec<Column> = columns.into_iter().filter(|column| names.insert(column.name.clone())).collect();
        let (text, config) = written(log(columns));
        prop_assert!(text.starts_with("# Written by"));
        prop_assert!(config.feature_columns().any(|(_, kind)| kind == FeatureKind::Label));
    }
}
