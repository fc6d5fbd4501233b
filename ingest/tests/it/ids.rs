//! Builds logs with ids that are texts, unsigned integers, booleans or bytes, without a query. The vocabularies can be
//! undone.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, BooleanArray, FixedSizeBinaryArray, Int64Array, ListArray, ListBuilder, StringArray,
    StringBuilder, TimestampMicrosecondArray, UInt64Array,
};
use arrow::compute::{cast, concat_batches};
use arrow::datatypes::{DataType, Int64Type};
use onefold_datasets::{OriginalKind, Snapshot, Vocabulary, hash_id};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::logs::{Dir, parquet, statistics_of};

/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;
const MINUTE: i64 = 60_000_000;
/// The number of requests in the log of a day.
const REQUESTS: i64 = 60;

const HEAD: &str = "format_version = 1\n[partition]\nby = \"day\"\n[session]\nkey = [\"visit\"]\ntime = \"time\"\norder = [\"request\"]\n";

fn texts(values: impl IntoIterator<Item = Option<String>>) -> ArrayRef {
    Arc::new(values.into_iter().collect::<StringArray>())
}

fn lists(values: impl IntoIterator<Item = Option<Vec<String>>>) -> ArrayRef {
    let mut lists = ListBuilder::new(StringBuilder::new());
    for list in values {
        match list {
            Some(list) => lists.append_value(list.into_iter().map(Some)),
            None => lists.append_null(),
        }
    }
    Arc::new(lists.finish())
}

/// Returns the item of a request; none for every seventh request. Day 1 has rare items that day 0 does not have.
fn item(day: i64, request: i64) -> Option<String> {
    (request % 7 != 0).then(|| format!("N{}", request * request % 11 + 8 * day))
}

/// Returns the history of a request: null for every fifth request, empty for every sixth.
fn history(day: i64, request: i64) -> Option<Vec<String>> {
    let items = |length| (0..length).map(|i| format!("N{}", (request / 4 + i) % 9 + 6 * day)).collect();
    (request % 5 != 0).then(|| items(if request % 6 == 0 { 0 } else { request % 4 + 2 }))
}

fn user(request: i64) -> String {
    format!("user-{}", request % 7)
}

/// Returns the columns of the log of a day.
fn columns(day: i64) -> Vec<(&'static str, ArrayRef)> {
    let all = || 0..REQUESTS;
    let dictionary = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
    let large = |request: i64| u64::MAX - (request % 13) as u64;
    let large_lists = all().map(|request| vec![large(request), request as u64]);
    let large_list = ListArray::from_iter_primitive::<arrow::datatypes::UInt64Type, _, _>(
        large_lists.map(|list| Some(list.into_iter().map(Some))),
    );
    vec![
        ("request", Arc::new(Int64Array::from_iter_values(all().map(|request| request + REQUESTS * day)))),
        (
            "time",
            Arc::new(TimestampMicrosecondArray::from_iter_values(
                all().map(|request| DAY + day * 24 * 60 * MINUTE + request * MINUTE),
            )),
        ),
        ("visit", texts(all().map(|request| Some(format!("{}/{}", user(request), day))))),
        ("user", texts(all().map(|request| Some(user(request))))),
        ("item", texts(all().map(|request| item(day, request)))),
        ("history", lists(all().map(|request| history(day, request)))),
        (
            "country",
            cast(&texts(all().map(|r| Some(["DK", "SE"][r as usize % 2].into()))), &dictionary).unwrap(),
        ),
        ("large", Arc::new(UInt64Array::from_iter_values(all().map(large)))),
        ("large_list", Arc::new(large_list)),
        ("flag", Arc::new(BooleanArray::from_iter(all().map(|request| Some(request % 3 == 0))))),
        (
            "uuid",
            Arc::new(
                FixedSizeBinaryArray::try_from_iter(all().map(|request| [0xf0 | (request as u8 % 3), 0x07]))
                    .unwrap(),
            ),
        ),
        ("number", Arc::new(Int64Array::from_iter_values(all().map(|request| request % 10 - 5)))),
        ("clicked", Arc::new(BooleanArray::from_iter(all().map(|request| Some(request % 4 == 0))))),
    ]
}

fn write_day(dir: &Dir, day: i64) {
    dir.write(format!("log-{day}.parquet"), parquet(columns(day)));
}

fn configure(dir: &Dir, rest: &str) {
    dir.write("dataset.toml", format!("{HEAD}{rest}"));
}

#[track_caller]
fn run(dir: &Dir, command: &str, out: &str) -> Value {
    let mut program = dir.program(out);
    if command == "append" {
        program = std::process::Command::new(program.get_program());
        program.current_dir(dir.path("")).args([
            "append",
            "dataset.toml",
            "--out",
            out,
            "--threads",
            "2",
            "--json",
        ]);
    }
    program.args(["--layout", "rows"]);
    dir.works(program, out).0
}

/// Reads a column of all samples: lists of ids by the number of the request.
fn read(dataset: &Path, column: &str) -> BTreeMap<i64, Vec<i64>> {
    let snapshot = Snapshot::load(dataset).unwrap();
    let mut all = BTreeMap::new();
    for file in snapshot.partitions.iter().flat_map(|partition| &partition.files) {
        let file = fs_err::File::open(dataset.join(file.path())).unwrap().into_file();
        let rows = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
        let batches = rows.collect::<Result<Vec<_>, _>>().unwrap();
        let batch = concat_batches(&batches[0].schema(), &batches).unwrap();
        let of = |name: &str, row: usize| -> Vec<i64> {
            let lists = batch.column_by_name(name).unwrap().as_list::<i32>();
            lists.value(row).as_primitive::<Int64Type>().values().to_vec()
        };
        all.extend((0..batch.num_rows()).map(|row| (of("request", row)[0], of(column, row))));
    }
    all
}

fn vocabulary(dataset: &Path, name: &str) -> Vocabulary {
    Vocabulary::load(dataset, &Snapshot::load(dataset).unwrap(), name).unwrap()
}

/// Reads a column, and replaces its ids by the texts in the vocabulary `name`.
fn undone(dataset: &Path, column: &str, name: &str) -> BTreeMap<i64, Vec<String>> {
    let vocabulary = vocabulary(dataset, name);
    assert_eq!(vocabulary.kind(), OriginalKind::Text);
    let text = |id: i64| vocabulary.original_text(id).unwrap_or("(rare)").to_owned();
    read(dataset, column).into_iter().map(|(r, ids)| (r, ids.into_iter().map(text).collect())).collect()
}

fn by_request<T>(of: impl Fn(i64) -> Vec<T>) -> BTreeMap<i64, Vec<T>> {
    (0..REQUESTS).map(|request| (request, of(request))).collect()
}

const FEATURES: [&str; 8] = ["item", "history", "country", "large", "large_list", "flag", "uuid", "number"];

/// Returns the texts that correspond to the ids of a feature; the bytes of `uuid` as Latin-1.
fn texts_of(feature: &str, request: i64) -> Vec<String> {
    let large = (u64::MAX - (request % 13) as u64).to_string();
    match feature {
        "item" => item(0, request).into_iter().collect(),
        "history" => history(0, request).unwrap_or_default(),
        "country" => vec![["DK", "SE"][request as usize % 2].to_owned()],
        "large" => vec![large],
        "large_list" => vec![large, request.to_string()],
        "flag" => vec![(request % 3 == 0).to_string()],
        "number" => vec![(request % 10 - 5).to_string()],
        other => panic!("{other}"),
    }
}

#[test]
fn hashed_ids_of_every_type_are_the_hashes_of_their_texts() {
    let dir = Dir::new();
    write_day(&dir, 0);
    let features: Vec<String> = FEATURES
        .iter()
        .map(|name| {
            let kind = if name.ends_with("list") || *name == "history" { "sequence" } else { "sparse" };
            format!("{name} = {{ kind = \"{kind}\", group = \"{name}\", ids = \"hash\" }}\n")
        })
        .collect();
    let rest = format!(
        "[sources]\nlog = \"log-0.parquet\"\n[samples]\nsource = \"log\"\n[features]\nclicked = {{ kind = \"label\" }}\n\
         request = {{ kind = \"sparse\" }}\n{}",
        features.concat()
    );
    configure(&dir, &rest);
    let summary = run(&dir, "build", "out");
    let dataset = dir.path("out");
    for feature in FEATURES.into_iter().filter(|feature| *feature != "uuid") {
        let expected = by_request(|request| {
            texts_of(feature, request).iter().map(|text| hash_id(text.as_bytes())).collect()
        });
        assert_eq!(read(&dataset, feature), expected, "{feature}");
    }
    let expected = by_request(|request| vec![hash_id(&[0xf0 | (request as u8 % 3), 0x07])]);
    assert_eq!(read(&dataset, "uuid"), expected);
    let hashed = |feature: &str| statistics_of(&summary, feature);
    assert_eq!(hashed("uuid")["distinct_ids"], 3);
    assert_eq!(hashed("large")["distinct_ids"], 13);
    let collisions = hashed("large")["expected_collisions"].as_f64().unwrap();
    assert!((collisions / (13.0 * 12.0 / 2_f64.powi(64)) - 1.0).abs() < 0.01, "{collisions}");

    // The SQL function makes the same ids.
    let ids: Vec<String> = FEATURES.iter().map(|name| format!("hash_id({name}) AS {name}")).collect();
    let rest = rest.replace(", ids = \"hash\"", "").replace(
        "source = \"log\"",
        &format!("query = \"SELECT request, time, visit, clicked, {} FROM log\"", ids.join(", ")),
    );
    configure(&dir, &rest);
    run(&dir, "build", "sql");
    for feature in FEATURES {
        assert_eq!(read(&dir.path("sql"), feature), read(&dataset, feature), "{feature}");
    }
}

/// A configuration with vocabularies.
const NUMBERED: &str = "[sources]\nlog = \"log-*.parquet\"\n[samples]\nsource = \"log\"\n[features]\nclicked = { kind = \"label\" }\n\
    request = { kind = \"sparse\" }\nitem = { kind = \"sparse\", vocabulary = \"items\" }\n\
    history = { kind = \"sequence\", group = \"history\", vocabulary = \"items\" }\n\
    country = { kind = \"sparse\", vocabulary = \"frequency\" }\nlarge = { kind = \"sparse\", vocabulary = \"large\" }\n\
    large_list = { kind = \"sparse\", vocabulary = \"large\" }\nflag = { kind = \"sparse\", vocabulary = \"frequency\" }\n\
    number = { kind = \"sparse\", vocabulary = \"frequency\" }\n[vocabularies.items]\n[vocabularies.large]\n";

#[test]
fn vocabularies_keep_the_texts_and_can_be_undone() {
    let dir = Dir::new();
    write_day(&dir, 0);
    configure(&dir, NUMBERED);
    let summary = run(&dir, "build", "out");
    let dataset = dir.path("out");
    for (feature, name) in [
        ("item", "items"),
        ("history", "items"),
        ("country", "country"),
        ("large", "large"),
        ("large_list", "large"),
        ("flag", "flag"),
    ] {
        let expected = by_request(|request| texts_of(feature, request));
        assert_eq!(undone(&dataset, feature, name), expected, "{feature}");
    }
    // In a vocabulary of integers, the originals are integers.
    let numbers = vocabulary(&dataset, "number");
    assert_eq!(numbers.kind(), OriginalKind::Integer);
    let values = read(&dataset, "number").into_values().flatten().map(|id| numbers.original(id).unwrap());
    assert!(values.eq((0..REQUESTS).map(|request| request % 10 - 5)));

    // The numbers are ranks: by descending count, then by text.
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for request in 0..REQUESTS {
        for text in texts_of("item", request).into_iter().chain(texts_of("history", request)) {
            *counts.entry(text).or_default() += 1;
        }
    }
    let mut ranked: Vec<(String, u64)> = counts.into_iter().collect();
    ranked.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let items = vocabulary(&dataset, "items");
    assert_eq!(summary["vocabularies"]["items"], ranked.len());
    for (id, (text, count)) in (1..).zip(&ranked) {
        assert_eq!((items.original_text(id), items.count(id)), (Some(text.as_str()), Some(*count)));
    }
}

#[test]
fn rare_texts_become_0_and_count_bounds_are_kept() {
    let dir = Dir::new();
    write_day(&dir, 0);
    configure(&dir, &NUMBERED.replace("[vocabularies.items]\n", "[vocabularies.items]\nmin_count = 24\n"));
    run(&dir, "build", "out");
    let items = vocabulary(&dir.path("out"), "items");
    assert!((1..=items.len() as i64).all(|id| items.count(id).unwrap() >= 24));
    let expected = by_request(|request| {
        let known = |text: String| if items.id_of_text(&text) == 0 { "(rare)".into() } else { text };
        texts_of("item", request).into_iter().map(known).collect()
    });
    assert!(expected.values().flatten().any(|text| text == "(rare)"));
    assert_eq!(undone(&dir.path("out"), "item", "items"), expected);
}

#[test]
fn an_append_counts_ids_in_all_samples_that_it_reads() {
    let dir = Dir::new();
    write_day(&dir, 0);
    configure(&dir, &NUMBERED.replace("[vocabularies.items]\n", "[vocabularies.items]\nmin_count = 20\n"));
    run(&dir, "build", "out");
    let dataset = dir.path("out");
    let append = |day: &str| {
        let append = ["append", "dataset.toml", "--out", "out", "--json", "--layout", "rows", "--partition"];
        let mut command = dir.command(&append);
        command.arg(format!("date={day}"));
        let summary = dir.works(command, "out").0;
        let mut warnings = summary["warnings"].as_array().unwrap().iter();
        warnings.any(|warning| warning.as_str().unwrap().contains("vocabulary `items`: `min_count`"))
    };
    // `N6` and `N7` occur less than 20 times on each of the first two days.
    let rare = ["N6", "N7"];
    let ids = || rare.map(|text| vocabulary(&dataset, "items").id_of_text(text));
    assert_eq!(ids(), [0, 0]);
    let first = read(&dataset, "history");
    write_day(&dir, 1);
    assert!(!append("2024-05-02"), "all logs of the dataset were read");
    assert!(ids().iter().all(|id| *id > 0));
    let after = read(&dataset, "history");
    assert!(first.iter().all(|(request, ids)| after[request] == *ids), "the first day is as it was");
    assert!(undone(&dataset, "history", "items").values().flatten().any(|text| text == "N7"));
    // With the log of a day alone, ids are counted in that day alone.
    for day in 0..2 {
        fs_err::remove_file(dir.path(format!("log-{day}.parquet"))).unwrap();
    }
    write_day(&dir, 2);
    assert!(append("2024-05-03"), "the earlier logs were not read");
}

#[test]
fn an_append_extends_a_vocabulary_of_texts_and_renumbers_nothing() {
    let dir = Dir::new();
    write_day(&dir, 0);
    configure(&dir, NUMBERED);
    run(&dir, "build", "out");
    let dataset = dir.path("out");
    let before = vocabulary(&dataset, "items");
    fs_err::remove_file(dir.path("log-0.parquet")).unwrap();
    write_day(&dir, 1);
    for _ in 0..2 {
        run(&dir, "append", "out");
        let after = vocabulary(&dataset, "items");
        assert!(after.len() > before.len());
        for id in 1..=before.len() as i64 {
            assert_eq!(
                (after.original_text(id), after.count(id)),
                (before.original_text(id), before.count(id))
            );
        }
        let mut expected = by_request(|request| texts_of("history", request));
        expected.extend(
            (0..REQUESTS).map(|request| (request + REQUESTS, history(1, request).unwrap_or_default())),
        );
        assert_eq!(undone(&dataset, "history", "items"), expected);
    }
    let mut verify = std::process::Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    verify.current_dir(dir.path("")).args([
        "verify",
        "out",
        "--against",
        "dataset.toml",
        "--partition",
        "date=2024-05-02",
    ]);
    let output = verify.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    // Hashes instead of the numbers would be read as other ids, so the append is refused.
    configure(
        &dir,
        &NUMBERED.replace("vocabulary = \"large\"", "ids = \"hash\"").replace("[vocabularies.large]\n", ""),
    );
    let mut append = std::process::Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    append.current_dir(dir.path("")).args(["append", "dataset.toml", "--out", "out", "--layout", "rows"]);
    dir.fails_as(append, &["`out` has another schema than the samples to append"]);
}

#[test]
fn texts_do_not_extend_a_vocabulary_of_integers() {
    let dir = Dir::new();
    let with_item = |item: ArrayRef| {
        let mut all = columns(0);
        all.iter_mut()
            .filter(|(name, _)| *name == "item")
            .for_each(|(_, column)| *column = Arc::clone(&item));
        parquet(all)
    };
    let number = Int64Array::from_iter_values(0..REQUESTS);
    dir.write("log-0.parquet", with_item(Arc::new(number)));
    let config = "[sources]\nlog = \"log-*.parquet\"\n[samples]\nsource = \"log\"\n[features]\nclicked = { kind = \"label\" }\n\
        request = { kind = \"sparse\" }\nitem = { kind = \"sparse\", vocabulary = \"frequency\" }\n";
    configure(&dir, config);
    run(&dir, "build", "out");
    write_day(&dir, 0);
    let mut append = std::process::Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
    append.current_dir(dir.path("")).args(["append", "dataset.toml", "--out", "out", "--layout", "rows"]);
    dir.fails_as(append, &["column `item`", "vocabulary `item` are integers", "CAST(item AS BIGINT)"]);
    // In a vocabulary of texts, an integer is its decimal text.
    run(&dir, "build", "texts");
    dir.write(
        "log-0.parquet",
        with_item(Arc::new(Int64Array::from_iter_values((0..REQUESTS).map(|r| r % 5)))),
    );
    run(&dir, "append", "texts");
    let expected = by_request(|request| vec![(request % 5).to_string()]);
    assert_eq!(undone(&dir.path("texts"), "item", "item"), expected);
}

#[test]
fn timelines_of_texts_are_hashed_or_numbered() {
    let dir = Dir::new();
    write_day(&dir, 0);
    let events: Vec<i64> = (0..200).collect();
    dir.write(
        "events.parquet",
        parquet(vec![
            ("who", texts(events.iter().map(|i| Some(user(*i))))),
            (
                "at",
                Arc::new(TimestampMicrosecondArray::from_iter_values(
                    events.iter().map(|i| DAY + i * MINUTE / 4),
                )),
            ),
            ("item", texts(events.iter().map(|i| Some(format!("N{}", i % 12))))),
            (
                "shop",
                Arc::new(UInt64Array::from_iter_values(events.iter().map(|i| u64::MAX - *i as u64 % 3))),
            ),
            ("bought", Arc::new(BooleanArray::from_iter(events.iter().map(|i| Some(i % 2 == 0))))),
        ]),
    );
    configure(
        &dir,
        "[sources]\nlog = \"log-0.parquet\"\nevents = \"events.parquet\"\n[samples]\nsource = \"log\"\nkey = [\"request\"]\n\
         [[timelines]]\nsource = \"events\"\non = { user = \"who\" }\ntime = \"at\"\nlength = 4\n\
         columns = { seen = \"item\", seen_hash = \"item\", shops = \"shop\", bought = \"bought\" }\n[features]\n\
         clicked = { kind = \"label\" }\nrequest = { kind = \"sparse\" }\nitem = { kind = \"sparse\", vocabulary = \"items\" }\n\
         seen = { kind = \"sequence\", group = \"seen\", vocabulary = \"items\" }\n\
         seen_hash = { kind = \"sequence\", group = \"seen\", ids = \"hash\" }\n\
         shops = { kind = \"sequence\", group = \"seen\", vocabulary = \"frequency\" }\nbought = { kind = \"sequence\", group = \"seen\" }\n\
         [vocabularies.items]\n",
    );
    let summary = run(&dir, "build", "out");
    assert_eq!(statistics_of(&summary, "seen_hash")["distinct_ids"], 12);
    let seen = |request: i64| -> Vec<i64> {
        let before =
            events.iter().filter(|i| user(**i) == user(request) && *i * MINUTE / 4 < request * MINUTE);
        let before: Vec<i64> = before.copied().collect();
        before[before.len().saturating_sub(4)..].to_vec()
    };
    let dataset = dir.path("out");
    let items =
        |request: i64| -> Vec<String> { seen(request).iter().map(|i| format!("N{}", i % 12)).collect() };
    assert!((0..REQUESTS).any(|request| items(request).is_empty()));
    assert_eq!(undone(&dataset, "seen", "items"), by_request(items));
    assert_eq!(undone(&dataset, "item", "items"), by_request(|request| texts_of("item", request)));
    let hashes = by_request(|request| items(request).iter().map(|text| hash_id(text.as_bytes())).collect());
    assert_eq!(read(&dataset, "seen_hash"), hashes);
    let shops = by_request(|r| seen(r).iter().map(|i| (u64::MAX - *i as u64 % 3).to_string()).collect());
    assert_eq!(undone(&dataset, "shops", "shops"), shops);
    assert_eq!(
        read(&dataset, "bought"),
        by_request(|r| seen(r).iter().map(|i| i64::from(i % 2 == 0)).collect())
    );
}

#[test]
fn keys_of_all_kinds_may_be_text() {
    let dir = Dir::new();
    write_day(&dir, 0);
    let requests = || (0..REQUESTS).map(|request| Some(format!("r{request}")));
    let mut log = columns(0);
    log.push(("id", texts(requests())));
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    for (name, column) in log.iter_mut().filter(|(name, _)| *name == "visit" || *name == "user") {
        *column = if *name == "visit" { cast(column, &dictionary).unwrap() } else { Arc::clone(column) };
    }
    dir.write("log.parquet", parquet(log));
    // Every second request has a click, and every third user an age. The files are CSV, so the engine's type of texts
    // differs.
    let clicks: Vec<String> =
        (0..REQUESTS).step_by(2).map(|r| format!("r{r},2024-05-01T{:02}:{:02}:30", r / 60, r % 60)).collect();
    dir.write("clicks.csv", format!("of,at\n{}\n", clicks.join("\n")));
    dir.write("users.csv", "who,age\nuser-0,30\nuser-3,40\nuser-6,50\n");
    let rest = "[sources]\nlog = \"log.parquet\"\nclicks = \"clicks.csv\"\nusers = \"users.csv\"\n[samples]\nsource = \"log\"\nkey = [\"id\"]\n\
        [join]\nsource = \"clicks\"\non = { id = \"of\" }\ntime = \"at\"\nwindow = \"1m\"\n[join.labels]\nlabel = { when = \"true\" }\n\
        [[attributes]]\nsource = \"users\"\non = { user = \"who\" }\ncolumns = [\"age\"]\ndefault = { age = 0 }\n[features]\n\
        label = { kind = \"label\" }\nage = { kind = \"sparse\" }\nrequest = { kind = \"sparse\" }\nid = { kind = \"sparse\", ids = \"hash\" }\n";
    configure(&dir, rest);
    let summary = run(&dir, "build", "out");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&REQUESTS.into(), &7.into()));
    let ages = by_request(|r| {
        vec![match r % 7 {
            0 => 30,
            3 => 40,
            6 => 50,
            _ => 0,
        }]
    });
    assert_eq!(read(&dir.path("out"), "age"), ages);
    assert_eq!(summary["skipped"]["samples_without_events"], REQUESTS / 2);

    // An integer never equals a text.
    dir.write("users.csv", "who,age\n0,30\n3,40\n");
    dir.fails(&[
        "`[[attributes]]` 1: `on`: `user` of the samples is Utf8",
        "`who` of `users` is Int64",
        "CAST(user AS VARCHAR)",
    ]);
}

#[test]
fn ids_without_an_option_are_refused_with_both() {
    let dir = Dir::new();
    write_day(&dir, 0);
    let feature = |name: &str, kind: &str| {
        format!(
            "[sources]\nlog = \"log-0.parquet\"\n[samples]\nsource = \"log\"\n[features]\nclicked = {{ kind = \"label\" }}\n\
             {name} = {{ kind = \"{kind}\" }}\n"
        )
    };
    let options = ["`ids = \"hash\"`", "`vocabulary = \"frequency\"`"];
    for (name, kind, parts) in [
        ("item", "sparse", ["Utf8", "CAST(item AS BIGINT)"]),
        ("history", "sequence", ["List(", "CAST(history AS BIGINT[])"]),
        ("country", "sparse", ["Utf8", "makes it a sparse feature"]),
        ("uuid", "sparse", ["FixedSizeBinary(2)", "column `uuid`"]),
        ("item", "sequence", ["Utf8", "split_ids(item, '|')"]),
        ("large", "sparse", ["18446744073709551", "does not fit into 63 bits"]),
    ] {
        configure(&dir, &feature(name, kind));
        dir.fails(&[&options[..], &parts[..]].concat());
    }
    configure(&dir, &feature("item", "dense"));
    dir.fails(&["`[features]` makes it a dense feature", "Utf8", "CAST(item AS DOUBLE)", "vocabulary"]);
    configure(&dir, &feature("time", "sparse"));
    dir.fails(&["Timestamp", "date_part('hour', time)"]);
    configure(&dir, &feature("nothing", "sparse"));
    dir.fails(&["`[features]` names the column `nothing`"]);
}

#[test]
fn hints_of_errors_are_sql_that_works() {
    let dir = Dir::new();
    let items = [Some("1"), None, Some("3")].map(|text| text.map(str::to_owned));
    let mut with_null = ListBuilder::new(StringBuilder::new());
    (0..3).for_each(|_| with_null.append_value([Some("7"), None]));
    dir.write(
        "log.parquet",
        parquet(vec![
            ("request", Arc::new(Int64Array::from(vec![1, 2, 3]))),
            ("time", Arc::new(TimestampMicrosecondArray::from(vec![DAY, DAY, DAY]))),
            ("visit", texts(items.clone().map(|text| Some(text.unwrap_or_default())))),
            ("item", texts(items)),
            ("list", Arc::new(with_null.finish())),
            ("clicked", Arc::new(Int64Array::from(vec![1, 0, 1]))),
        ]),
    );
    let with = |item: &str, list: &str, options: &str| {
        configure(
            &dir,
            &format!(
                "[sources]\nlog = \"log.parquet\"\n[samples]\nquery = \"SELECT request, time, visit, clicked, {item} AS item, {list} AS list FROM \
                 log\"\n[features]\nclicked = {{ kind = \"label\" }}\nrequest = {{ kind = \"sparse\" }}\nitem = {{ kind = \"sparse\" }}\n\
                 list = {{ kind = \"sequence\"{options} }}\n"
            ),
        );
    };
    with("CAST(item AS BIGINT)", "CAST(list AS BIGINT[])", "");
    dir.fails(&["column `list`: 3 items of its lists are null", "`array_compact(list)`"]);
    with("CAST(item AS BIGINT)", "CAST(array_compact(list) AS BIGINT[])", "");
    run(&dir, "build", "out");
    let ids = |column: &str| read(&dir.path("out"), column).into_values().collect::<Vec<_>>();
    // A null id becomes an empty list.
    assert_eq!(ids("item"), [vec![1], vec![], vec![3]]);
    assert_eq!(ids("list"), [[7], [7], [7]]);
    with("CAST(item AS BIGINT)", "array_compact(list)", ", ids = \"hash\"");
    run(&dir, "build", "hashed");
    assert_eq!(read(&dir.path("hashed"), "list")[&1], [hash_id(b"7")]);
}

#[test]
fn texts_of_ids_in_csv_become_sequences_and_samples() {
    let dir = Dir::new();
    // A log as a news service writes it: the history of the user, then the articles shown with their clicks.
    dir.write(
        "news.tsv",
        "1\tU13\t2024-05-01T10:00:00\tN1 N2 N3\tN7-1 N8-0\n2\tU13\t2024-05-01T10:05:00\tN1 N2 N3 N7\tN9-0\n3\tU7\t2024-05-01T11:00:00\t\tN8-1\n",
    );
    let source = "[sources]\nlog = { path = \"news.tsv\", header = false, schema = { request = \"BIGINT\", visit = \"VARCHAR\", \
                  time = \"TIMESTAMP\", history = \"VARCHAR\", shown = \"VARCHAR\" } }\n";
    configure(
        &dir,
        &format!(
            "{source}[samples]\nquery = '''\nSELECT request, visit, time, split_ids(history, ' ') AS history,\n\
             split_part_each(split_ids(shown, ' '), '-', 1) AS shown,\n\
             CAST(split_part_each(split_ids(shown, ' '), '-', -1) AS BIGINT[]) AS clicks, shown LIKE '%-1%' AS clicked FROM log\n'''\n\
             [features]\nclicked = {{ kind = \"label\" }}\nrequest = {{ kind = \"sparse\" }}\n\
             history = {{ kind = \"sequence\", group = \"history\", vocabulary = \"items\" }}\n\
             shown = {{ kind = \"sequence\", group = \"shown\", vocabulary = \"items\" }}\nclicks = {{ kind = \"sequence\", group = \"shown\" }}\n\
             [vocabularies.items]\n"
        ),
    );
    run(&dir, "build", "out");
    let dataset = dir.path("out");
    let expected = |lists: [&[&str]; 3]| -> BTreeMap<i64, Vec<String>> {
        (1..).zip(lists).map(|(r, list)| (r, list.iter().map(|text| (*text).to_owned()).collect())).collect()
    };
    let history = expected([&["N1", "N2", "N3"], &["N1", "N2", "N3", "N7"], &[]]);
    assert_eq!(undone(&dataset, "history", "items"), history);
    assert_eq!(undone(&dataset, "shown", "items"), expected([&["N7", "N8"], &["N9"], &["N8"]]));
    assert_eq!(read(&dataset, "clicks"), BTreeMap::from([(1, vec![1, 0]), (2, vec![0]), (3, vec![1])]));

    // One sample for each pair.
    configure(
        &dir,
        &format!(
            "{source}[samples]\nquery = '''\nSELECT request, visit, time, split_ids(history, ' ') AS history, split_part(pair, '-', 1) AS item, \
             split_part(pair, '-', 2) = '1' AS clicked\n\
             FROM (SELECT request, visit, time, history, unnest(split_ids(shown, ' ')) AS pair FROM log)\n'''\n\
             [features]\nclicked = {{ kind = \"label\" }}\nitem = {{ kind = \"sparse\", ids = \"hash\" }}\n\
             history = {{ kind = \"sequence\", group = \"history\", ids = \"hash\" }}\nrequest = {{ kind = \"sparse\" }}\n"
        ),
    );
    let summary = run(&dir, "build", "pairs");
    assert_eq!((&summary["samples"], &summary["sessions"]), (&4.into(), &2.into()));
}

#[test]
fn texts_that_do_not_fit_into_memory_are_an_error() {
    let dir = Dir::new();
    let rows = 40_000;
    let long = |i: i64| Some(format!("{i:0>4000}"));
    dir.write(
        "log.parquet",
        parquet(vec![
            ("request", Arc::new(Int64Array::from_iter_values(0..rows))),
            ("time", Arc::new(TimestampMicrosecondArray::from_iter_values((0..rows).map(|i| DAY + i)))),
            ("visit", texts((0..rows).map(|i| Some((i % 100).to_string())))),
            ("item", texts((0..rows).map(long))),
            ("clicked", Arc::new(Int64Array::from_iter_values((0..rows).map(|i| i % 2)))),
        ]),
    );
    configure(
        &dir,
        "[sources]\nlog = \"log.parquet\"\n[samples]\nsource = \"log\"\n[features]\nclicked = { kind = \"label\" }\n\
         item = { kind = \"sparse\", vocabulary = \"frequency\" }\n",
    );
    let mut build = dir.program("failed");
    build.args(["--memory-limit", "256MiB"]);
    dir.fails_as(build, &["feature `item`", "to count its ids for a vocabulary"]);
}
