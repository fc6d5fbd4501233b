//! Bad input: one error that names the place and the remedy, exit status 1, and every file as it was.
//!
//! [`TestCommand::fails`](onefold_tests::TestCommand::fails) checks all of this but the words.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, StringArray, TimestampMicrosecondArray, UInt64Array,
};
use arrow::datatypes::Int64Type;
use onefold_datasets::Manifest;
use onefold_ikjt::{Reader, ReaderOptions};
use onefold_tests::Dir;

use crate::logs::{
    DATASET_CONFIG, EVENTS, REQUESTS, TRAIN_CONFIG, event_columns, expected_samples, feature_columns, with_column,
    write_logs, write_table,
};
use crate::samples::{Sample, read_samples, samples_of, sorted};

const BUILD: &str = "onefold-ingest build logs/dataset.toml --out dataset --threads 2";
const READ: &str = "onefold-read bench dataset --batch-size 4 --threads 2";
const TRAIN: &str = "onefold-train run logs/train.toml --data dataset --out run --threads 2";
const EVAL: &str = "onefold-train eval run --data dataset --threads 2";

/// A folder with the hand-made log in `logs` and its dataset in `dataset`.
fn with_dataset() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command(BUILD).works();
    dir
}

/// The same with a trained model in `run`.
fn with_run() -> Dir {
    let dir = with_dataset();
    dir.command(TRAIN).works();
    dir
}

/// A build that must fail with `parts` in its error, both where nothing is and over a dataset, which it leaves whole.
#[track_caller]
fn build_fails(dir: &Dir, parts: &[&str]) {
    dir.command("onefold-ingest build logs/dataset.toml --out other --threads 2").fails(parts);
    dir.command(&format!("{BUILD} --overwrite")).fails(parts);
    assert!(!dir.path("other").exists());
}

#[track_caller]
fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "no `{from}` in:\n{text}");
    text.replacen(from, to, 1)
}

#[test]
fn dataset_configurations_that_do_not_fit() {
    let dir = with_dataset();
    let config = "`logs/dataset.toml`: ";
    let gap = "user = \"user\"\ngap = \"30m\"";
    let cases: &[(&str, &str, &[&str])] = &[
        ("e.clicked,", "e.clickd AS clicked,", &[config, "`[samples].query`", "clickd", "write one `SELECT`", "`events`, `features`"]),
        ("JOIN events e", "JOIN event e", &[config, "`[samples].query`", "event", "`events`, `features`"]),
        ("SELECT f.*", "SELEKT f.*", &[config, "`[samples].query`", "SELEKT"]),
        ("age = { kind", "agee = { kind", &[config, "`[features]` names the column `agee`", "did you mean `age`?"]),
        (gap, "user = \"usr\"\ngap = \"30m\"", &[config, "`[session]` names the column `usr`", "did you mean `user`?"]),
        (gap, "key = [\"visits\"]", &[config, "`[session]` names the column `visits`", "did you mean `visit`?"]),
        (gap, "user = \"user\"", &[config, "`[session]` has one of `user` and `gap`", "gap = \"30m\""]),
        ("gap = \"30m\"", "gap = \"30 parsecs\"", &[config, "`[session].gap`", "30 parsecs"]),
        ("time = \"time\"", "time = \"tim\"", &[config, "`[session].time` names the column `tim`", "did you mean `time`?"]),
        ("time = \"time\"", "time = \"visit\"", &["column `visit`", "`[session].time` must be a timestamp", "to_timestamp"]),
        ("order = [\"request\"]", "order = [\"rank\"]", &[config, "`[session].order` names the column `rank`", "`request`"]),
        ("columns = [\"split\"]", "columns = [\"spilt\"]", &[config, "`[partition].columns` names the column `spilt`", "did you mean `split`?"]),
        ("columns = [\"split\"]", "columns = [\"history\"]", &["column `history`", "partition", "text"]),
        ("by = \"hour\"", "by = \"minute\"", &[config, "line", "minute", "`day` or `hour`"]),
        ("by = \"hour\"", "buy = \"hour\"", &[config, "line", "unknown field `buy`"]),
        ("age = { kind = \"dense\" }", "age = { kind = \"dens\" }", &[config, "`[features].age`", "`dens`", "kinds are"]),
        ("group = \"history\"", "groop = \"history\"", &[config, "`[features].history`", "unknown field `groop`"]),
        ("age = { kind = \"dense\" }", "visit = { kind = \"dense\" }", &["column `visit`", "a number or boolean", "Utf8", "CAST"]),
        ("age = { kind = \"dense\" }", "age = { kind = \"sparse\" }", &["column `age`", "an integer or a list of integers", "Float64", "CAST"]),
        ("age = { kind = \"dense\" }", "history = { kind = \"dense\" }", &[config, "duplicate key"]),
        ("kind = \"sequence\"", "kind = \"dense\"", &[config, "`[features].history`", "only sparse and sequence features have a `group`"]),
        ("city = { kind = \"sparse\"", "city = { kind = \"sequence\"", &["column `city`", "a list of integers", "Int64", "correct its `kind`"]),
        ("clicked = { kind = \"label\" }", "", &[config, "no label"]),
        ("clicked = { kind = \"label\" }", "time = { kind = \"label\" }", &["column `time`", "a number or boolean", "Timestamp"]),
        ("format_version = 1", "format_version = 2", &[config, "`format_version` is 2, this program reads 1"]),
        ("format_version = 1", "format_version = ", &[config, "line 1"]),
        ("features/*.parquet", "feature/*.parquet", &["source `features`", "feature/*.parquet", "there is no such file", "`[sources]`"]),
        ("features/*.parquet", "features/[*.parquet", &["source `features`", "bad pattern", "`[sources]`"]),
        ("features/*.parquet", "dataset.toml", &["source `features`", "logs/dataset.toml", "not a whole Parquet file"]),
    ];
    for (from, to, parts) in cases {
        dir.write("logs/dataset.toml", replaced(DATASET_CONFIG, from, to));
        build_fails(&dir, parts);
    }
    let select = DATASET_CONFIG.split("\"\"\"").nth(1).unwrap();
    dir.write("logs/dataset.toml", replaced(DATASET_CONFIG, select, "DROP TABLE events"));
    build_fails(&dir, &[config, "`[samples].query`", "write one `SELECT`"]);
    dir.command("onefold-ingest build logs/nothing.toml --out other").fails(&["logs/nothing.toml", "dataset.toml"]);
    assert_eq!(sorted(read_samples(&dir.path("dataset"))), sorted(expected_samples()));
}

#[test]
fn sources_that_are_damaged_or_disagree() {
    let dir = with_dataset();
    let late = "logs/features/part-1.parquet";
    let whole = dir.read(late);
    for (bytes, what) in [(&whole[..whole.len() / 2], "truncated"), (&[][..], "empty"), (b"{\"json\": true}\n", "text")] {
        dir.write(late, bytes);
        build_fails(&dir, &["source `features`", "part-1.parquet", "not a whole Parquet file", "write it again"]);
        assert!(!what.is_empty());
    }
    let mut holed = whole.clone();
    holed[4..300].fill(0xff);
    dir.write(late, holed);
    build_fails(&dir, &["part-1.parquet", "a source file is damaged"]);

    let columns = feature_columns(REQUESTS);
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["x"; REQUESTS.len()]));
    write_table(&dir.path(late), with_column(columns, "age", texts));
    build_fails(&dir, &["age", "Utf8", "Float64"]);
    dir.write(late, &whole);
    dir.command(&format!("{BUILD} --overwrite")).works();
}

#[test]
fn logs_without_samples() {
    let dir = with_dataset();
    let nothing = ["gives no samples", "`logs/dataset.toml`", "check that the logs are not empty"];
    write_table(&dir.path("logs/events.parquet"), event_columns(&[]));
    build_fails(&dir, &nothing);
    let strangers = Arc::new(Int64Array::from_iter_values((0..EVENTS.len() as i64).map(|i| 1000 + i)));
    write_table(&dir.path("logs/events.parquet"), with_column(event_columns(EVENTS), "request", strangers));
    build_fails(&dir, &nothing);
}

#[test]
fn values_that_cannot_be_trained_on() {
    let dir = with_dataset();
    let floats = |bad: f64| Arc::new(Float64Array::from_iter_values((0..REQUESTS.len()).map(|i| if i == 1 { bad } else { 1.0 })));
    let ids = |bad: Option<i64>| Int64Array::from_iter((0..REQUESTS.len()).map(|i| if i == 1 { bad } else { Some(1) }));
    let lists = (0..REQUESTS.len()).map(|i| Some(vec![Some(1), (i != 1).then_some(2)]));
    let times = (0..REQUESTS.len()).map(|i| (i != 1).then_some(1_714_521_600_000_000));
    let huge = (0..REQUESTS.len()).map(|i| if i == 1 { u64::MAX } else { 1 });
    let features: Vec<(&str, ArrayRef, &[&str])> = vec![
        ("age", floats(f64::NAN), &["column `age`", "1 of 12 samples", "not a finite", "COALESCE(age, 0)"]),
        ("age", floats(1e300), &["column `age`", "1 of 12 samples", "not a finite"]),
        ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists)), &["column `history`", "1 nulls", "array_remove_all"]),
        ("time", Arc::new(TimestampMicrosecondArray::from_iter(times)), &["column `time`", "no value", "IS NOT NULL"]),
        ("time", Arc::new(ids(Some(i64::MAX))), &["column `time`", "is not a date", "unit of the time column"]),
        ("user", Arc::new(ids(None)), &["column `user`", "no value", "IS NOT NULL"]),
        ("city", Arc::new(UInt64Array::from_iter_values(huge)), &["column `city`", "does not fit Int64", "CAST"]),
    ];
    for (name, values, parts) in features {
        fs_err::remove_file(dir.path("logs/features/part-0.parquet")).ok();
        write_table(&dir.path("logs/features/part-1.parquet"), with_column(feature_columns(REQUESTS), name, values));
        build_fails(&dir, parts);
    }
    write_logs(&dir);
    let clicked = Arc::new(BooleanArray::from_iter((0..EVENTS.len()).map(|i| (i != 1).then_some(true))));
    let split = Arc::new(StringArray::from_iter((0..EVENTS.len()).map(|i| (i != 1).then_some("train"))));
    let events: Vec<(&str, ArrayRef, &[&str])> = vec![
        ("clicked", clicked, &["column `clicked`", "1 of 12 samples have no value", "COALESCE(clicked, 0)"]),
        ("split", split, &["column `split`", "no value", "IS NOT NULL"]),
    ];
    for (name, values, parts) in events {
        write_table(&dir.path("logs/events.parquet"), with_column(event_columns(EVENTS), name, values));
        build_fails(&dir, parts);
    }
}

#[test]
fn places_where_no_dataset_may_go() {
    let dir = with_dataset();
    dir.command(BUILD).fails(&["`dataset` already exists", "`--overwrite`"]);
    dir.write("letters/dear.txt", "dear");
    for overwrite in ["", " --overwrite"] {
        let line = "onefold-ingest build logs/dataset.toml --out letters";
        dir.command(&format!("{line}{overwrite}")).fails(&["`letters` already exists", "not a dataset", "another directory"]);
    }
    dir.command("onefold-ingest build logs/dataset.toml --out letters/dear.txt").fails(&["letters/dear.txt"]);
    dir.command("onefold-ingest build logs/dataset.toml --out letters/dear.txt/deeper").fails(&["letters/dear.txt"]);
    let limit = ["the memory limit does not suffice", "raise `--memory-limit`"];
    dir.command("onefold-ingest build logs/dataset.toml --out other --memory-limit 1KiB").fails(&limit);
}

#[test]
fn datasets_that_cannot_be_read() {
    let dir = with_dataset();
    let bench = |rest: &str| dir.command(&format!("{READ} {rest}"));
    bench("--partitions train").is_misused(&["partition filter `train`", "not a condition", "split=train"]);
    bench("--partitions day=1").fails(&["no partition column `day`", "`split`, `date`, `hour`"]);
    bench("--partitions split=test").fails(&["`split=test`: no partition matches", "split=train/date=2024-05-01/hour=10"]);
    bench("--features user,histroy").fails(&["no sparse feature `histroy`", "did you mean `history`?"]);
    dir.command("onefold-read head dataset --batch-size 0").fails(&["batches of 0", "at least 1"]);
    dir.command("onefold-read head nowhere").fails(&["`nowhere` is not a dataset", "onefold-ingest build"]);
    dir.command("onefold-read head logs").fails(&["`logs` is not a dataset", "onefold-ingest build"]);

    let manifest = dir.text("dataset/manifest.json");
    let version = replaced(&manifest, "\"format_version\": 1", "\"format_version\": 2");
    let cases: &[(String, &[&str])] = &[
        (version, &["manifest.json", "format version 2, this program reads 1", "build it again"]),
        (manifest[..manifest.len() / 2].to_owned(), &["manifest.json", "EOF", "build it again"]),
        (String::new(), &["manifest.json", "EOF", "build it again"]),
        (replaced(&manifest, "\"layout\": \"rows\"", "\"layout\": \"woven\""), &["manifest.json", "`woven`", "build it again"]),
        (replaced(&manifest, "\"samples\": 7", "\"samples\": 8"), &["manifest.json", "samples", "build it again"]),
        (replaced(&manifest, "split=train/date=2024-05-01/hour=10/part", "../logs/part"), &["leaves the dataset"]),
    ];
    for (text, parts) in cases {
        dir.write("dataset/manifest.json", text);
        bench("").fails(parts);
        dir.command(TRAIN).fails(parts);
    }
    fs_err::remove_file(dir.path("dataset/manifest.json")).unwrap();
    bench("").fails(&["`dataset` is not a dataset: it has no `manifest.json`", "run it again"]);
}

/// The paths of the data files of `dataset`, relative to the folder.
fn data_files(dir: &Dir) -> Vec<String> {
    let manifest = Manifest::load(&dir.path("dataset")).unwrap();
    manifest.file_paths().map(|path| format!("dataset/{}", path.display())).collect()
}

#[test]
fn data_files_that_are_damaged() {
    let dir = with_dataset();
    let file = &data_files(&dir)[2];
    let whole = dir.read(file);
    let mut footless = whole.clone();
    let end = footless.len() - 200;
    footless[end..].fill(0xff);
    let mut holed = whole.clone();
    holed[4..whole.len() / 2].fill(0xff);
    let other = dir.read(&data_files(&dir)[0]);
    for (bytes, parts) in [
        (&whole[..whole.len() - 1], &["bytes, the manifest says", "build the dataset again"][..]),
        (&other, &["bytes, the manifest says", "build the dataset again"]),
        (&footless, &["SHA-256", "the file is damaged", "build the dataset again"]),
        (&holed, &["SHA-256", "the file is damaged", "build the dataset again"]),
    ] {
        dir.write(file, bytes);
        for command in [READ, TRAIN] {
            dir.command(command).fails(&[&[file.as_str()], parts].concat());
        }
        assert!(!dir.path("run").exists());
    }
    fs_err::remove_file(dir.path(file)).unwrap();
    dir.command(READ).fails(&[file, "it is missing", "build the dataset again"]);
}

/// Every byte of a data file, flipped one at a time: an error or the same samples, never others, never a panic.
#[test]
fn flipped_bytes_change_no_sample() {
    let dir = with_dataset();
    let file = &data_files(&dir)[2];
    let whole = dir.read(file);
    let expected = read_samples(&dir.path("dataset"));
    let read = || -> Result<Vec<Sample>, onefold_ikjt::Error> {
        let options = ReaderOptions { threads: 1, ..ReaderOptions::new(100) };
        let batches = Reader::open(&dir.path("dataset"), options)?.batches()?;
        Ok(batches.collect::<Result<Vec<_>, _>>()?.iter().flat_map(samples_of).collect())
    };
    let (mut errors, mut silent) = (0, Vec::new());
    for place in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[place] ^= 0x10;
        dir.write(file, flipped);
        match read() {
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(file.as_str()) && text.contains("hint: "), "byte {place}: {text}");
                errors += 1;
            }
            Ok(samples) if samples == expected => {}
            Ok(_) => silent.push(place),
        }
    }
    assert!(silent.is_empty(), "{} of {} flips changed samples without an error: {silent:?}", silent.len(), whole.len());
    assert!(errors > whole.len() / 10, "{errors} errors");
}

#[test]
fn training_configurations_that_do_not_fit() {
    let dir = with_dataset();
    let config = "`logs/train.toml`: ";
    let cases: &[(&str, &str, &[&str])] = &[
        ("[tables.history]", "[tables.histroy]", &["`[tables.histroy]`", "no sparse feature `histroy`", "did you mean `history`?"]),
        ("label = \"clicked\"", "label = \"click\"", &[config, "`[data].label` is `click`", "did you mean `clicked`?"]),
        ("label = \"clicked\"", "label = \"age\"", &[config, "`[data].label` is `age`, which is no label"]),
        ("train = \"split=train\"", "train = \"split=trian\"", &["`split=trian`", "no partition matches", "split=train"]),
        ("train = \"split=train\"", "train = \"train\"", &["`train` is not a condition", "split=train"]),
        ("eval = \"split=holdout\"", "eval = \"splitt=holdout\"", &["no partition column `splitt`", "`split`"]),
        ("batch_size = 4", "batch_size = 0", &[config, "`[train]`", "at least 1"]),
        ("epochs = 2", "epoch = 2", &[config, "line", "unknown field `epoch`"]),
        ("bottom_mlp = [8, 4]", "bottom_mlp = [8, 5]", &[config, "`[model].bottom_mlp` is [8, 5]", "the embedding dimension"]),
        ("top_mlp = [8, 1]", "top_mlp = [8, 2]", &[config, "`[model].top_mlp`", "the last must be 1"]),
        ("interaction = \"dot\"", "interaction = \"cross\"", &[config, "line", "`cross`"]),
        ("attention_heads = 2", "attention_heads = 3", &[config, "`[model].attention_heads` is 3", "multiple"]),
        ("rows = 10\n", "rows = 3\n", &["`[tables.history]`", "the id 9, its table has 3 rows", "rows = 10", "hashed"]),
        ("rows = 10\n", "rows = 0\n", &["`[tables.history]`", "0 rows", "at least 1"]),
        ("[tables.history]", "[tables.city]", &["`[tables.city]`", "pools by attention but is not a sequence", "`[tables.city]`"]),
        ("kind = \"adagrad\"", "kind = \"adam\"", &[config, "line", "`adam`"]),
        ("learning_rate = 0.02\neps = 1e-8\n\n[optimizer.dense]", "learning_rate = -0.02\n\n[optimizer.dense]", &[config, "`[optimizer]`", "negative"]),
        ("kind = \"adagrad\"\nlearning_rate = 0.02", "kind = \"sgd\"\nlearning_rate = 1e38", &["the loss is", "at step", "lower the learning rates"]),
        ("format_version = 1", "format_version = 3", &[config, "`format_version` is 3, this program reads 1"]),
    ];
    for (from, to, parts) in cases {
        dir.write("logs/train.toml", replaced(TRAIN_CONFIG, from, to));
        dir.command(TRAIN).fails(parts);
    }
    dir.write("logs/train.toml", TRAIN_CONFIG);
    dir.command("onefold-train run logs/nothing.toml --data dataset --out run").fails(&["logs/nothing.toml", "train.toml"]);
    dir.command("onefold-train run logs/train.toml --data logs --out run").fails(&["`logs` is not a dataset"]);
    assert!(!dir.path("run").exists());
}

#[test]
fn a_dataset_without_sparse_features_is_not_for_this_trainer() {
    let dir = Dir::new();
    write_logs(&dir);
    let config = DATASET_CONFIG.lines().filter(|line| !line.contains("sparse") && !line.contains("sequence"));
    dir.write("logs/dataset.toml", config.collect::<Vec<_>>().join("\n"));
    dir.command(BUILD).works();
    dir.command(TRAIN).fails(&["logs/train.toml", "no sparse feature", "build the dataset again"]);
}

#[test]
fn places_where_no_run_may_go() {
    let dir = with_run();
    dir.command(TRAIN).fails(&["`run` already exists", "`--overwrite`"]);
    dir.write("letters/dear.txt", "dear");
    for overwrite in ["", " --overwrite"] {
        let line = "onefold-train run logs/train.toml --data dataset --out letters";
        dir.command(&format!("{line}{overwrite}")).fails(&["`letters` already exists", "`run.json`"]);
    }
    dir.write("logs/train.toml", replaced(TRAIN_CONFIG, "[tables.history]", "[tables.histroy]"));
    dir.command(&format!("{TRAIN} --overwrite")).fails(&["histroy"]);
    dir.command(EVAL).works();
}

#[test]
fn plans_that_cannot_be_run() {
    let dir = with_dataset();
    dir.command("onefold-shard tables logs/train.toml --data dataset --out tables.json").works();
    let plan = |ranks: u32| {
        dir.command(&format!("onefold-shard topology --ranks {ranks} --memory 1GiB --out topology.json --overwrite")).works();
        dir.command("onefold-shard plan --tables tables.json --topology topology.json --out plan.json --overwrite").works();
        dir.text("plan.json")
    };
    plan(2);
    let planned = format!("{TRAIN} --plan plan.json");
    dir.command(&planned).fails(&["for 2 ranks, and this trains on one", "`onefold-shard topology --ranks 1`"]);
    let one = plan(1);
    let cases: &[(String, &[&str])] = &[
        (replaced(&one, "\"format_version\": 1", "\"format_version\": 2"), &["plan.json", "format version 2", "onefold-shard plan"]),
        (one[..one.len() / 2].to_owned(), &["plan.json", "EOF", "onefold-shard plan"]),
        (replaced(&one, "\"name\": \"history\"", "\"name\": \"histroy\""), &["it lacks table `history`", "`histroy`", "onefold-shard tables"]),
        (replaced(&one, "\"table_wise\"", "\"diagonal\""), &["plan.json", "`diagonal`", "onefold-shard plan"]),
    ];
    for (text, parts) in cases {
        dir.write("plan.json", text);
        dir.command(&planned).fails(parts);
    }
    dir.write("plan.json", one);
    dir.edit("logs/train.toml", "rows = 10\n", "rows = 12\n");
    dir.command(&planned).fails(&["table `history` is 10 rows × 4 columns in the plan and should be 12 × 4", "onefold-shard tables"]);
    dir.command(&format!("{TRAIN} --plan nothing.json")).fails(&["nothing.json", "onefold-shard plan"]);
    assert!(!dir.path("run").exists());
}

#[test]
fn runs_that_cannot_be_evaluated() {
    let dir = with_run();
    dir.command("onefold-train eval logs --data dataset").fails(&["logs/run.json", "not a run", "onefold-train run --out"]);
    dir.command("onefold-train eval run --data logs").fails(&["`logs` is not a dataset"]);
    dir.command(&format!("{EVAL} --partitions split=test")).fails(&["no partition matches", "split=holdout"]);
    let damage = |name: &str, bytes: &[u8], parts: &[&str]| {
        let whole = dir.read(name);
        dir.write(name, bytes);
        dir.command(EVAL).fails(parts);
        dir.write(name, whole);
    };
    let run = dir.text("run/run.json");
    let newer = replaced(&run, "\"format_version\": 1", "\"format_version\": 9");
    damage("run/run.json", newer.as_bytes(), &["run/run.json", "format version 9, this program reads 1", "train again"]);
    damage("run/run.json", &run.as_bytes()[..run.len() / 2], &["run/run.json", "EOF", "train again"]);
    let model = dir.read("run/model.safetensors");
    let damaged = ["run/model.safetensors", "the run is damaged"];
    damage("run/model.safetensors", &model[..model.len() / 2], &damaged);
    damage("run/model.safetensors", b"", &damaged);
    let (head, tables) = run.split_at(run.rfind("\"tables\"").unwrap());
    let larger = format!("{head}{}", replaced(tables, "\"rows\": 10,", "\"rows\": 11,"));
    damage("run/run.json", larger.as_bytes(), &["model.safetensors", "tables.history", "the run is damaged"]);
    fs_err::remove_file(dir.path("run/model.safetensors")).unwrap();
    dir.command(EVAL).fails(&["run/model.safetensors", "hint"]);
    dir.write("run/model.safetensors", model);

    for (from, to, what) in [
        ("age = { kind = \"dense\" }", "visit_age = { kind = \"dense\" }", "dense features"),
        ("city = { kind = \"sparse\", group = \"user\" }", "", "feature groups"),
        ("clicked = { kind = \"label\" }", "liked = { kind = \"label\" }", "labels"),
    ] {
        let config = replaced(DATASET_CONFIG, from, to);
        let query = "SELECT f.*, f.age AS visit_age, e.clicked AS liked,";
        dir.write("logs/dataset.toml", replaced(&config, "SELECT f.*,", query));
        dir.command(&format!("{BUILD} --overwrite")).works();
        dir.command(EVAL).fails(&["`run`", &format!("trained on other {what}"), "the same `[features]`"]);
    }
}

#[test]
fn ids_that_no_table_has_are_found_at_evaluation() {
    let dir = with_run();
    let column = with_column(feature_columns(REQUESTS), "city", Arc::new(Int64Array::from(vec![500; REQUESTS.len()])));
    fs_err::remove_file(dir.path("logs/features/part-0.parquet")).unwrap();
    write_table(&dir.path("logs/features/part-1.parquet"), column);
    dir.command(&format!("{BUILD} --overwrite")).works();
    dir.command(EVAL).fails(&["feature `city`: id 500", "0..100", "`[tables.city]`", "hashed"]);
    assert!(Path::new(&dir.path("run/run.json")).is_file());
}
