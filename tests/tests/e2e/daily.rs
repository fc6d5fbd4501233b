//! Daily training: warm starts, new partitions, and an evaluation of each partition before training on it.

use onefold_tests::Dir;
use serde_json::Value;

use crate::logs::write_logs;

const RUN: &str = "onefold-train run logs/train.toml --threads 2 --data dataset";

fn with_dataset() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --buckets 2").works();
    // Adam counts its steps over all runs.
    dir.edit("logs/train.toml", "kind = \"adagrad\"", "kind = \"adam\"");
    dir.edit("logs/train.toml", "eval = \"split=holdout\"\n", "");
    dir.set("logs/train.toml", "batch_size", "2");
    // The set of rows in use is passed on from run to run.
    dir.edit("logs/train.toml", "[embedding]\n", "[embedding]\nevict_after = 3\n");
    dir
}

fn trained_on(dir: &Dir, filter: &str) {
    dir.set("logs/train.toml", "train", &format!("\"{filter}\""));
}

/// Returns the weights of a run's model.
fn weights(dir: &Dir, run: &str) -> Vec<u8> {
    dir.command(&format!("onefold-train export {run} --out exported --overwrite")).works();
    dir.read("exported/model.safetensors")
}

fn partitions(summary: &Value) -> Vec<(String, f64)> {
    let all = summary["progressive"]["partitions"].as_array().unwrap().iter();
    all.map(|of| (of["partition"].as_str().unwrap().to_owned(), of["loss"].as_f64().unwrap())).collect()
}

#[test]
fn a_warm_start_goes_on_as_if_training_had_not_ended() {
    let dir = with_dataset();
    trained_on(&dir, "split=train");
    let whole = dir.command(&format!("{RUN} --out whole --progressive")).json();
    // The partitions are the hours 10, 11 and 12. Before the first one there is no model to evaluate.
    let of_whole = partitions(&whole);
    assert_eq!(of_whole.len(), 2);
    assert!(of_whole[0].0.ends_with("hour=11") && of_whole[1].0.ends_with("hour=12"), "{of_whole:?}");
    trained_on(&dir, "split=train,hour<11");
    dir.command(&format!("{RUN} --out first --progressive")).works();
    trained_on(&dir, "split=train,hour>=11");
    let warm = format!("{RUN} --warm-start first --progressive");
    let second = dir.command(&format!("{warm} --out second")).json();
    assert_eq!(partitions(&second), of_whole);
    assert!(weights(&dir, "second") == weights(&dir, "whole"));
    assert_ne!(weights(&dir, "first"), weights(&dir, "second"));
    let samples = |summary: &Value, part: &str| summary[part]["samples"].as_u64().unwrap();
    assert_eq!(samples(&second, "lifetime"), whole["samples"].as_u64().unwrap());
    assert_eq!(samples(&second, "progressive"), samples(&whole, "progressive"));
    assert_eq!(whole["lifetime"], Value::Null);
    // The lines of the log contain the evaluations of the next partition.
    let lines = dir.text("second/metrics.jsonl");
    let ahead = lines.lines().filter(|line| line.contains("\"progressive\"")).count();
    assert_eq!(ahead, 2, "{lines}");
    // The earlier training has an effect: a cold start has other figures.
    let cold = dir.command(&format!("{RUN} --out cold --progressive")).json();
    assert_eq!(partitions(&cold).len(), 1);
    // A run on several ranks can also continue it.
    let ranks =
        warm.replace("onefold-train ", "onefold-train launch --ranks 2 -- ").replace("--threads 2", "");
    let on_ranks = dir.command(&format!("{ranks} --timeout 300 --out ranks")).json();
    assert_eq!(
        (samples(&on_ranks, "lifetime"), &on_ranks["ranks"]),
        (samples(&second, "lifetime"), &2.into())
    );
}

#[test]
fn rows_that_are_not_looked_up_are_evicted() {
    let dir = with_dataset();
    trained_on(&dir, "split=train");
    let rows = |summary: &Value, what: &str| summary["rows"][what].as_u64().unwrap();
    dir.edit("logs/train.toml", "evict_after = 3\n", "");
    let monday = dir.command(&format!("{RUN} --out monday")).json();
    assert_eq!((&monday["rows"], monday["steps"].as_u64()), (&Value::Null, Some(10)));
    // In a model without evictions, all rows may be in use: 3 tables of 100 rows, and one of 10. Steps 11 and 12 look
    // up the rows of three samples.
    dir.edit("logs/train.toml", "[embedding]\n", "[embedding]\nevict_after = 3\n");
    trained_on(&dir, "split=holdout");
    let tuesday = dir.command(&format!("{RUN} --warm-start monday --out tuesday")).json();
    assert_eq!(
        (tuesday["steps"].as_u64(), rows(&tuesday, "in_use") + rows(&tuesday, "evicted")),
        (Some(4), 310)
    );
    assert!((6..20).contains(&rows(&tuesday, "in_use")), "{tuesday}");
    let told = dir.command(&format!("{RUN} --warm-start tuesday --out told")).works();
    assert!(told.contains(" in use, "), "{told}");
    dir.edit("logs/train.toml", "evict_after = 3\n", "");
    dir.command(&format!("{RUN} --warm-start monday --out all")).works();
    assert_ne!(weights(&dir, "all"), weights(&dir, "tuesday"));
    dir.command(&format!("{RUN} --warm-start tuesday --out wednesday")).works();
    dir.edit("logs/train.toml", "[embedding]\n", "[embedding]\nevict_after = 0\n");
    dir.command(&format!("{RUN} --out none")).fails(&["`[embedding].evict_after` is 0"]);
}

#[test]
fn a_progressive_run_is_resumed_wherever_it_ended() {
    let dir = with_dataset();
    trained_on(&dir, "split=train");
    let config = dir.text("logs/train.toml");
    dir.write("logs/train.toml", config + "\n[checkpoint]\nevery_steps = 1\nkeep = 100\n");
    let whole = dir.command(&format!("{RUN} --out whole --progressive")).json();
    let steps = whole["steps"].as_u64().unwrap();
    assert!(steps >= 8, "{whole}");
    // One run ends after every step and is resumed. A difference after any of them would remain.
    dir.command(&format!("{RUN} --out run --progressive --max-steps 1")).works();
    for step in 2..steps {
        // A resumed run does not need its original options again.
        let resumed = dir.command(&format!("{RUN} --out run --resume --max-steps {step}")).json();
        assert_eq!(resumed["resumed_from_step"].as_u64(), Some(step - 1));
    }
    let resumed = dir.command(&format!("{RUN} --out run --resume")).json();
    assert_eq!(resumed["progressive"], whole["progressive"]);
    for file in ["metrics.jsonl", "model.safetensors"] {
        assert!(dir.read(format!("run/{file}")) == dir.read(format!("whole/{file}")), "{file}");
    }
    // A warm start can use a checkpoint instead of a model.
    trained_on(&dir, "split=holdout");
    let warm = format!("{RUN} --warm-start whole --out");
    dir.command(&format!("{warm} from-model")).works();
    dir.command(&format!("{warm} from-checkpoint --warm-start-checkpoint latest")).works();
    assert!(weights(&dir, "from-model") == weights(&dir, "from-checkpoint"));
    dir.command(&format!("{warm} from-early --warm-start-checkpoint 1")).works();
    assert_ne!(weights(&dir, "from-early"), weights(&dir, "from-model"));
    dir.command(&format!("{warm} none --warm-start-checkpoint 999")).fails(&["no checkpoint of step 999"]);
}

#[test]
fn new_partitions_and_new_ids_are_learned_day_by_day() {
    let dir = Dir::new();
    write_logs(&dir);
    dir.edit("logs/dataset.toml", "group = \"history\" }", "group = \"history\", vocabulary = \"items\" }");
    let config = dir.text("logs/dataset.toml");
    dir.write("logs/dataset.toml", config + "\n[vocabularies.items]\norder = \"frequency\"\n");
    let data = "[data]\ntrain = \"\"\nlabel = \"clicked\"\n";
    let model = "[model]\nbottom_mlp = [8, 4]\ntop_mlp = [8, 1]\n";
    dir.write(
        "logs/train.toml",
        format!("format_version = 1\n{data}{model}[train]\nbatch_size = 3\n[embedding]\nheadroom = 0\n"),
    );
    let append = |split: &str| {
        // The log of the first day knows only its own ids.
        let all = "ON f.request = e.request";
        dir.edit("logs/dataset.toml", all, &format!("{all} WHERE e.split = '{split}'"));
        dir.command(&format!(
            "onefold-ingest append logs/dataset.toml --out dataset --partition split={split}"
        ))
        .works();
        dir.edit("logs/dataset.toml", &format!("{all} WHERE e.split = '{split}'"), all);
    };
    append("holdout");
    dir.command(&format!("{RUN} --out monday")).works();
    let tables = |run: &str| -> Vec<(String, u64)> {
        let run: Value = serde_json::from_slice(&dir.read(format!("{run}/run.json"))).unwrap();
        let tables = run["tables"].as_array().unwrap().iter();
        tables.map(|t| (t["feature"].as_str().unwrap().to_owned(), t["rows"].as_u64().unwrap())).collect()
    };
    let rows =
        |run: &str, feature: &str| tables(run).into_iter().find(|(name, _)| name == feature).unwrap().1;
    // Ids 8 and 9, and one row for unknown ids.
    assert_eq!(rows("monday", "history"), 3);
    append("train");
    dir.command("onefold-train eval monday --data dataset --partitions split=train").fails(&[
        "column `history`",
        "id 8 is outside the table's 3 rows",
        "`onefold-train run --warm-start`",
    ]);
    let warm = format!("{RUN} --warm-start monday --new-partitions --out");
    let tuesday = dir.command(&format!("{warm} tuesday")).json();
    assert_eq!(tuesday["samples"], 9);
    assert_eq!((tuesday["lifetime"]["samples"].clone(), rows("tuesday", "history")), (12.into(), 10));
    let grown = tuesday["grown_tables"].as_array().unwrap();
    let history = grown.iter().find(|table| table["table"] == "history").unwrap();
    assert_eq!((&history["rows_before"], &history["rows"]), (&3.into(), &10.into()));
    dir.command("onefold-train eval tuesday --data dataset --partitions split=holdout").works();
    let none = ["no partition for training was committed after its snapshot 2", "`onefold-ingest append`"];
    dir.command(&format!("{RUN} --warm-start tuesday --new-partitions --out wednesday")).fails(&none);
    assert!(!dir.path("wednesday").exists());
    // Partitions whose samples have changed count as new as well; here, the labels change.
    dir.edit("logs/dataset.toml", "e.clicked,", "NOT e.clicked AS clicked,");
    let replace = "onefold-ingest append logs/dataset.toml --out dataset --replace --partition split=holdout";
    dir.command(replace).works();
    let wednesday = format!("{RUN} --warm-start tuesday --new-partitions --out wednesday");
    assert_eq!(dir.command(&wednesday).json()["samples"], 3);
}

/// The planner and the trainer take the tables of a model that is trained further from its run. New ids get rows that
/// already exist, or tables grow.
#[test]
fn a_model_goes_on_by_a_plan_of_its_tables() {
    for headroom in [0, 10] {
        let dir = Dir::new();
        write_logs(&dir);
        let group = "group = \"history\" }";
        dir.edit("logs/dataset.toml", group, "group = \"history\", vocabulary = \"items\" }");
        let config = dir.text("logs/dataset.toml");
        dir.write("logs/dataset.toml", config + "\n[vocabularies.items]\norder = \"frequency\"\n");
        let data = "[data]\ntrain = \"\"\nlabel = \"clicked\"\n";
        let model = "[model]\nbottom_mlp = [8, 4]\ntop_mlp = [8, 1]\n";
        let checkpoint = "[checkpoint]\nevery_steps = 1\n";
        let embedding = format!("[embedding]\nheadroom = {headroom}\n");
        dir.write(
            "logs/train.toml",
            format!("format_version = 1\n{data}{model}[train]\nbatch_size = 2\n{checkpoint}{embedding}"),
        );
        let all = "ON f.request = e.request";
        let day = |split: &str, command: &str| {
            dir.edit("logs/dataset.toml", all, &format!("{all} WHERE e.split = '{split}'"));
            dir.command(&format!("onefold-ingest {command} logs/dataset.toml --out dataset")).works();
            dir.edit("logs/dataset.toml", &format!("{all} WHERE e.split = '{split}'"), all);
        };
        day("holdout", "build --buckets 2");
        let tables = "onefold-shard tables logs/train.toml --data dataset";
        dir.command(&format!("{tables} --out monday.json")).works();
        dir.command("onefold-shard topology --ranks 2 --memory 1GiB --out topology.json").works();
        let plan = "onefold-shard plan --topology topology.json";
        dir.command(&format!("{plan} --tables monday.json --out monday-plan.json")).works();
        dir.command(&format!("{RUN} --out monday")).works();

        day("train", "append");
        let replan = "onefold-shard replan --plan monday-plan.json --budget 1MiB";
        let ranks = "onefold-train launch --ranks 2 -- run logs/train.toml --data dataset --timeout 300";
        dir.command(&format!("{tables} --warm-start monday --out tuesday.json")).works();
        dir.command(&format!("{replan} --tables tuesday.json --out tuesday-plan.json")).works();
        let warm = format!("{ranks} --warm-start monday --new-partitions --plan tuesday-plan.json");
        dir.command(&format!("{warm} --out tuesday --max-steps 2")).works();

        // The first run continues from a checkpoint, with the dataset in its original state.
        dir.command(&format!("{RUN} --out begun --at 1 --max-steps 1")).works();
        dir.command(&format!("{tables} --resume begun --out begun.json")).works();
        assert_eq!(dir.text("begun.json"), dir.text("monday.json"));
        dir.command(&format!("{tables} --warm-start nothing --out none.json")).fails(&[
            "nothing/run.json",
            "not a run: it is missing",
            "onefold-train run --out",
        ]);
        dir.command(&format!("{tables} --at 9 --out none.json")).fails(&["9"]);
        // Without the run, the planner takes as many rows as there are ids now. The trainer then says what to do.
        dir.command(&format!("{tables} --out without.json")).works();
        if headroom > 0 {
            assert_ne!(dir.text("without.json"), dir.text("tuesday.json"));
            dir.command(&format!("{plan} --tables without.json --out without-plan.json")).works();
            let wrong = warm.replace("tuesday-plan", "without-plan");
            dir.command(&format!("{wrong} --out wrong"))
                .fails(&["the plan is not valid", "--warm-start RUN"]);
        }
    }
}

#[test]
fn warm_starts_with_an_incompatible_model_or_dataset_are_refused() {
    let dir = with_dataset();
    trained_on(&dir, "split=train");
    dir.command(&format!("{RUN} --out first")).works();
    let refused = |from: &str, to: &str, parts: &[&str]| {
        dir.edit("logs/train.toml", from, to);
        let text = dir.command(&format!("{RUN} --warm-start first --out second")).fails(parts);
        assert!(!dir.path("second").exists(), "{text}");
        dir.edit("logs/train.toml", to, from);
    };
    refused(
        "top_mlp = [8, 1]",
        "top_mlp = [6, 1]",
        &["its model has another `[model]` than `logs/train.toml`"],
    );
    refused("kind = \"adam\"", "kind = \"sgd\"", &["another `kind` in `[optimizer.tables]`"]);
    refused(
        "label = \"clicked\"",
        "label = \"clicked\"\nloss = \"mse\"",
        &["another `[data].label`, `[data].loss` or `[[tasks]]`"],
    );
    refused("rows = 100", "rows = 90", &["`user` has 100 rows of 4 values, checked ids", "asks for 90 rows"]);
    refused("rows = 10\n", "rows = 10\nids = \"hashed\"\n", &["asks for 10 rows of 4 values, hashed ids"]);
    dir.edit(
        "logs/train.toml",
        "learning_rate = 0.02\neps = 1e-8\n\n[optimizer.dense]",
        "learning_rate = 0.01\n\n[optimizer.dense]",
    );
    dir.set("logs/train.toml", "batch_size", "4");
    dir.command(&format!("{RUN} --warm-start first --out second")).works();
    dir.command(&format!("{RUN} --warm-start nowhere --out third")).fails(&["`nowhere/run.json`: not a run"]);
    // Another dataset has different partitions.
    dir.command("onefold-ingest build logs/dataset.toml --out other").works();
    let other = RUN.replace("--data dataset", "--data other");
    dir.command(&format!("{other} --warm-start first --new-partitions --out third"))
        .fails(&["another dataset"]);
    dir.command(&format!("{other} --warm-start first --out third")).works();
}
