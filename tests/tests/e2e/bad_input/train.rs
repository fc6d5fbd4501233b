//! Configurations, plans and runs that cannot be trained or evaluated.

use std::sync::Arc;

use arrow::array::Int64Array;
use onefold_tests::Dir;

use super::{BUILD, EVAL, TRAIN, replaced, with_dataset, with_run};
use crate::logs::{
    DATASET_CONFIG, REQUESTS, TRAIN_CONFIG, feature_columns, with_column, write_logs, write_table,
};

#[test]
fn training_configurations_that_do_not_fit() {
    let dir = with_dataset();
    let config = "`logs/train.toml`: ";
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "[tables.history]",
            "[tables.histroy]",
            &["`[tables.histroy]`", "no sparse feature `histroy`", "did you mean `history`?"],
        ),
        (
            "label = \"clicked\"",
            "label = \"click\"",
            &[config, "`[data].label` is `click`", "did you mean `clicked`?"],
        ),
        ("label = \"clicked\"", "label = \"age\"", &[config, "`[data].label` is `age`, which is no label"]),
        (
            "train = \"split=train\"",
            "train = \"split=trian\"",
            &["`split=trian`", "no partition matches", "split=train"],
        ),
        ("train = \"split=train\"", "train = \"train\"", &["`train` is not a condition", "split=train"]),
        (
            "eval = \"split=holdout\"",
            "eval = \"splitt=holdout\"",
            &["no partition column `splitt`", "`split`"],
        ),
        ("batch_size = 4", "batch_size = 0", &[config, "`[train]`", "at least 1"]),
        ("epochs = 2", "epoch = 2", &[config, "line", "unknown field `epoch`"]),
        (
            "bottom_mlp = [8, 4]",
            "bottom_mlp = [8, 5]",
            &[config, "`[model].bottom_mlp` is [8, 5]", "the embedding dimension"],
        ),
        ("top_mlp = [8, 1]", "top_mlp = [8, 2]", &[config, "`[model].top_mlp`", "the last must be 1"]),
        ("interaction = \"dot\"", "interaction = \"cross\"", &[config, "line", "`cross`"]),
        (
            "attention_heads = 2",
            "attention_heads = 3",
            &[config, "`[model].attention_heads` is 3", "multiple"],
        ),
        (
            "rows = 10\n",
            "rows = 3\n",
            &["`[tables.history]`", "the id 9, its table has 3 rows", "rows = 10", "hashed"],
        ),
        ("rows = 10\n", "rows = 0\n", &["`[tables.history]`", "0 rows", "at least 1"]),
        (
            "[tables.history]",
            "[tables.city]",
            &["`[tables.city]`", "pools by attention but is not a sequence", "`[tables.city]`"],
        ),
        (
            "pooling = \"attention\"",
            "pooling = \"din\"",
            &["`logs/train.toml`", "`[tables.history]`", "pools by din but has no target", "`target`"],
        ),
        (
            "pooling = \"attention\"",
            "pooling = \"din\"\ntarget = \"histroy\"",
            &["`[tables.history]`", "the target of `history` is `histroy`, which is no sparse feature"],
        ),
        (
            "label = \"clicked\"",
            "[[tasks]]\nlabel = \"click\"",
            &[config, "`[[tasks]]` has the label `click`", "did you mean `clicked`?"],
        ),
        (
            "label = \"clicked\"",
            "[[tasks]]\nlabel = \"clicked\"\n[[tasks]]\nlabel = \"age\"",
            &[config, "`[model].top_mlp` is [8, 1], but there are 2 tasks", "the number of tasks"],
        ),
        ("label = \"clicked\"", "", &[config, "`[data].label` is missing", "`[[tasks]]`"]),
        ("kind = \"adagrad\"", "kind = \"lamb\"", &[config, "line", "`lamb`"]),
        (
            "learning_rate = 0.02\neps = 1e-8\n\n[optimizer.dense]",
            "learning_rate = -0.02\n\n[optimizer.dense]",
            &[config, "`[optimizer.tables]`", "negative"],
        ),
        (
            "format_version = 1",
            "format_version = 3",
            &[config, "`format_version` is 3, this program reads 1"],
        ),
    ];
    for (from, to, parts) in cases {
        dir.write("logs/train.toml", replaced(TRAIN_CONFIG, from, to));
        dir.command(TRAIN).fails(parts);
    }
    dir.write("logs/train.toml", TRAIN_CONFIG);
    dir.command("onefold-train run logs/nothing.toml --data dataset --out run")
        .fails(&["logs/nothing.toml", "check the path"]);
    dir.command("onefold-train run logs/train.toml --data logs --out run")
        .fails(&["`logs` is not a dataset"]);
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

/// Training either works, or the error says which setting is missing.
#[test]
fn datasets_of_few_features() {
    let dir = Dir::new();
    write_logs(&dir);
    let build = |features: &[&str]| {
        let is_kept = |line: &&str| {
            !line.contains("{ kind = ")
                || line.contains("\"label\"")
                || features.iter().any(|feature| line.starts_with(feature))
        };
        let config: Vec<_> = DATASET_CONFIG.lines().filter(is_kept).collect();
        dir.write("logs/dataset.toml", config.join("\n"));
        dir.command(&format!("{BUILD} --overwrite")).works();
    };
    let history = "[tables.history]\nrows = 10\npooling = \"attention\"\n";
    dir.write("logs/train.toml", replaced(TRAIN_CONFIG, history, ""));
    build(&["user"]);
    let hint = "set `interaction = \"dcn\"`";
    dir.command(TRAIN).fails(&[
        "`[model].interaction` is `dot`",
        "one sparse feature and no dense one",
        hint,
    ]);
    dir.edit("logs/train.toml", "interaction = \"dot\"", "interaction = \"dcn\"");
    dir.command(TRAIN).works();
    dir.edit("logs/train.toml", "interaction = \"dcn\"", "interaction = \"dot\"");
    for features in [&["user", "age"], &["user", "city"]] {
        build(features);
        dir.command(&format!("{TRAIN} --overwrite")).works();
        dir.command(EVAL).works();
    }
    // A batch may be larger than the number of all samples.
    dir.edit("logs/train.toml", "batch_size = 4", "batch_size = 4096");
    let run = dir.command(&format!("{TRAIN} --overwrite")).json();
    assert_eq!((&run["samples"], &run["steps"]), (&18.into(), &2.into()));
}

/// With sampling, no samples may remain for training, but all samples are still predicted.
#[test]
fn sampling_is_for_training() {
    let dir = with_dataset();
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    let steps = |keep: &str| {
        let step = format!("[[step]]\nop = \"sampling\"\nlabel = \"clicked\"\nkeep = {keep}\n");
        dir.write("logs/steps.toml", format!("format_version = 1\n{step}"));
    };
    // With a probability of 10^-12, none of the twelve samples is kept.
    steps("{ \"0\" = 1e-12, \"1\" = 1e-12 }");
    dir.command(TRAIN).fails(&["there was no sample to train on", "`sampling`"]);
    steps("{ \"0\" = 1e-12 }");
    let run = dir.command(TRAIN).json();
    assert_eq!((&run["samples"], &run["eval"]["samples"]), (&6.into(), &3.into()));
    let predict = "onefold-train predict run --data dataset --keep session_id --threads 2 --out";
    assert_eq!(dir.command(&format!("{predict} all.parquet")).json()["samples"], 3);
    let all = dir.command(&format!("{predict} more.parquet --partitions split=train")).json();
    assert_eq!(all["samples"], 9);
    let ranks = predict.replace("onefold-train ", "onefold-train launch --ranks 1 -- ");
    assert_eq!(dir.command(&format!("{ranks} ranks.parquet")).json()["samples"], 3);
    assert_eq!(dir.command(EVAL).json()["samples"], 3);
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
        dir.command(&format!(
            "onefold-shard topology --ranks {ranks} --memory 1GiB --out topology.json --overwrite"
        ))
        .works();
        dir.command(
            "onefold-shard plan --tables tables.json --topology topology.json --out plan.json --overwrite",
        )
        .works();
        dir.text("plan.json")
    };
    plan(2);
    let planned = format!("{TRAIN} --plan plan.json");
    dir.command(&planned)
        .fails(&["for 2 ranks, and the job has 1 rank", "`onefold-shard topology --ranks 1 --memory SIZE"]);
    let one = plan(1);
    let cases: &[(String, &[&str])] = &[
        (
            replaced(&one, "\"format_version\": 2", "\"format_version\": 3"),
            &["plan.json", "format version 3", "onefold-shard plan"],
        ),
        (one[..one.len() / 2].to_owned(), &["plan.json", "EOF", "onefold-shard plan"]),
        (
            replaced(&one, "\"name\": \"history\"", "\"name\": \"histroy\""),
            &["it lacks table `history`", "`histroy`", "onefold-shard tables"],
        ),
        (
            replaced(&one, "\"table_wise\"", "\"diagonal\""),
            &["plan.json", "`diagonal`", "onefold-shard plan"],
        ),
    ];
    for (text, parts) in cases {
        dir.write("plan.json", text);
        dir.command(&planned).fails(parts);
    }
    dir.write("plan.json", one);
    dir.edit("logs/train.toml", "rows = 10\n", "rows = 12\n");
    dir.command(&planned).fails(&[
        "table `history` is 10 rows × 4 columns in the plan and should be 12 × 4",
        "onefold-shard tables",
    ]);
    dir.command(&format!("{TRAIN} --plan nothing.json")).fails(&["nothing.json", "onefold-shard plan"]);
    assert!(!dir.path("run").exists());
    // The hint is followed: tables and plan are made again, with this configuration.
    dir.command("onefold-shard tables logs/train.toml --data dataset --out tables.json --overwrite").works();
    plan(1);
    dir.command(&planned).works();
}

#[test]
fn runs_that_cannot_be_evaluated() {
    let dir = with_run();
    dir.command("onefold-train eval logs --data dataset").fails(&[
        "logs/run.json",
        "not a run",
        "onefold-train run --out",
    ]);
    dir.command("onefold-train eval run --data logs").fails(&["`logs` is not a dataset"]);
    dir.command(&format!("{EVAL} --partitions split=test")).fails(&["no partition matches", "split=holdout"]);
    let damage = |name: &str, bytes: &[u8], parts: &[&str]| {
        let whole = dir.read(name);
        dir.write(name, bytes);
        dir.command(EVAL).fails(parts);
        dir.write(name, whole);
    };
    let run = dir.text("run/run.json");
    for version in [1, 9] {
        let other = replaced(&run, "\"format_version\": 2", &format!("\"format_version\": {version}"));
        let message = format!("format version {version}, this program reads 2");
        damage("run/run.json", other.as_bytes(), &["run/run.json", &message, "train again"]);
    }
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
    let column =
        with_column(feature_columns(REQUESTS), "city", Arc::new(Int64Array::from(vec![500; REQUESTS.len()])));
    fs_err::remove_file(dir.path("logs/features/part-0.parquet")).unwrap();
    write_table(&dir.path("logs/features/part-1.parquet"), column);
    dir.command(&format!("{BUILD} --overwrite")).works();
    dir.command(EVAL).fails(&[
        "split=holdout",
        "row group 0, column `city`, row 0: id 500",
        "the table's 100 rows",
        "hash or clamp",
    ]);
}
