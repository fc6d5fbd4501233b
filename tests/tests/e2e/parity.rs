//! Deduplication, threads and batch sizes do not change the input of the training.

use onefold_datasets::Snapshot;
use onefold_ikjt::{Batch, Dedupe};
use onefold_tests::Dir;
use serde_json::Value;

use crate::row_groups::write_many_row_groups;
use crate::samples::{read_batches, samples_of};
use crate::training::OPTIMIZERS;

/// Generates rm1, builds its dataset, and makes its model small. The structure remains (sum pooling, and six
/// sequences with the shared attention block), but the widths are smaller.
fn small_rm1(samples: u32) -> Dir {
    let dir = Dir::new();
    dir.command(&format!("onefold-data generate --workload rm1 --samples {samples} --seed 3 --out logs"))
        .works();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    for (key, value) in [
        ("batch_size", "32"),
        ("bottom_mlp", "[32, 16]"),
        ("top_mlp", "[32, 1]"),
        ("dim", "16"),
        ("rows", "2000"),
        ("ids", "\"hashed\""),
    ] {
        dir.set("logs/train.toml", key, value);
    }
    dir.append("logs/train.toml", OPTIMIZERS);
    // Adagrad's first step along a coordinate has the same length for a gradient that consists only of rounding
    // errors.
    dir.set("logs/train.toml", "eps", "1e-2");
    assert_eq!(dir.text("logs/train.toml").matches("pooling = \"attention\"").count(), 6);
    dir
}

fn losses(summary: &Value) -> Vec<f64> {
    summary["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

#[test]
fn training_is_the_same_with_deduplication_off_and_exact() {
    let dir = small_rm1(6_400);
    let run = |name: &str, dedupe: &str| {
        dir.command(&format!(
            "onefold-train run logs/train.toml --data dataset --out {name} --dedupe {dedupe}"
        ))
        .json()
    };
    let (off, exact) = (run("off", "off"), run("exact", "exact"));
    let (plain, folded) = (losses(&off), losses(&exact));
    assert_eq!((plain.len(), folded.len()), (200, 200));
    for (step, (a, b)) in plain.iter().zip(&folded).enumerate() {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(b.abs()), "step {}: {a} off, {b} exact", step + 1);
    }
    // The comparison is only meaningful if the model changed and rows were shared. Single batches of whole sessions
    // may be easy.
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&plain[150..]) < 0.98 * mean(&plain[..50]), "the loss did not fall: {plain:?}");
    let factors = |summary: &Value| summary["dedupe_factor"].as_object().unwrap().clone();
    assert!(factors(&off).values().all(|factor| factor.as_f64() == Some(1.0)));
    for (group, factor) in factors(&exact) {
        let folds = factor.as_f64().unwrap() > 1.5;
        assert_eq!(folds, group != "ungrouped", "{group}: {factor}");
    }
}

/// Generates rm1 with a second label, and makes a small version of the model in the shipped configuration: three
/// sequences are pooled by target attention, three by the encoder block, and there are two tasks.
fn small_sequences_and_tasks(samples: u32) -> Dir {
    let dir = Dir::new();
    dir.command(&format!("onefold-data generate --workload rm1 --samples {samples} --seed 5 --out logs"))
        .works();
    // This query is the one in the comment at the top of the configuration.
    let liked =
        "SELECT f.*, e.label, CASE WHEN e.label > 0 AND f.dense_00 > 0 THEN 1.0 ELSE 0.0 END AS liked";
    dir.edit("logs/dataset.toml", "SELECT f.*, e.label", liked);
    dir.edit("logs/dataset.toml", "[features]\n", "[features]\nliked = { kind = \"label\" }\n");
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../trainer/configs/rm1-sequences-tasks.toml");
    let text = fs_err::read_to_string(shipped).unwrap();
    assert!(text.contains(liked));
    dir.write("logs/train.toml", text);
    for (key, value) in [
        ("batch_size", "32"),
        ("bottom_mlp", "[32, 16]"),
        ("top_mlp", "[32, 2]"),
        ("din_hidden", "[12, 6]"),
        ("encoder_hidden", "24"),
        ("dim", "16"),
        ("rows", "2000"),
        ("ids", "\"hashed\""),
    ] {
        dir.set("logs/train.toml", key, value);
    }
    dir.append("logs/train.toml", OPTIMIZERS);
    // The learning rate is low, so that rounding errors remain small.
    dir.set("logs/train.toml", "learning_rate", "0.01");
    dir.set("logs/train.toml", "eps", "1e-2");
    dir.edit("logs/train.toml", "[data]\n", "[data]\neval = \"\"\nallow_overlap = true\n");
    // All labels of a single batch may be equal.
    dir.edit("logs/train.toml", "[train]\n", "[train]\nlog_every_steps = 20\n");
    let evaluation = "[evaluation]\nevery_steps = 30\nsegments = [\"item_00\"]\nmax_segments = 2\n";
    let stopping = "[early_stopping]\nmetric = \"auc\"\ntask = \"liked\"\npatience = 9\n";
    dir.append("logs/train.toml", &format!("\n{evaluation}\n{stopping}"));
    dir
}

#[test]
fn target_attention_encoder_and_tasks_are_the_same_in_every_form() {
    let dir = small_sequences_and_tasks(1_920);
    let run = |dedupe: &str| {
        dir.command(&format!(
            "onefold-train run logs/train.toml --data dataset --out {dedupe} --dedupe {dedupe}"
        ))
        .json()
    };
    let off = run("off");
    let plain = losses(&off);
    assert_eq!(plain.len(), 60);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&plain[40..]) < 0.98 * mean(&plain[..10]), "the loss did not fall: {plain:?}");
    for dedupe in ["exact", "window"] {
        let summary = run(dedupe);
        for (step, (a, b)) in plain.iter().zip(&losses(&summary)).enumerate() {
            let near = (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
            assert!(near, "step {}: {a} off, {b} {dedupe}", step + 1);
        }
        for task in ["label", "liked"] {
            for key in ["ne", "auc", "calibration"] {
                let figure = |summary: &Value| summary["eval"]["tasks"][task][key].as_f64().unwrap();
                let (a, b) = (figure(&off), figure(&summary));
                assert!((a - b).abs() <= 1e-3 * a.abs(), "{task} {key}: {a} off, {b} {dedupe}");
            }
        }
    }
    // The total loss is the weighted sum of the tasks' losses, and the metrics of the first task are those of the
    // model.
    let tasks = &off["tasks"];
    let loss = |task: &str| tasks[task]["loss"].as_f64().unwrap();
    assert!((off["loss"].as_f64().unwrap() - (loss("label") + 0.5 * loss("liked"))).abs() < 1e-5, "{off}");
    assert_eq!(off["ne"], tasks["label"]["ne"]);
    let lines = dir.text("off/metrics.jsonl");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for part in ["train", "eval"] {
        let found: Vec<_> = lines.iter().filter_map(|line| line.get(part)).collect();
        assert!(found.len() >= 2 && found.iter().all(|figures| figures["tasks"]["liked"]["ne"].is_f64()));
    }
    let segments = off["eval"]["segments"]["item_00"].as_object().unwrap();
    assert!(segments.values().all(|tasks| tasks["liked"]["samples"] == tasks["label"]["samples"]));
    let tags = dir
        .files()
        .into_iter()
        .find(|(name, _)| name.starts_with("off") && name.to_string_lossy().contains("tfevents"));
    let (_, events) = tags.unwrap();
    let text = String::from_utf8_lossy(&events);
    for tag in ["train/ne", "train/liked/ne", "train/label/auc", "eval/auc_error", "eval/liked/calibration"] {
        assert!(text.contains(tag), "{tag}");
    }
    let shown = dir.command("onefold-train eval off --data dataset").works();
    assert!(shown.contains("\n  liked: loss ") && shown.contains("\n  label: loss "), "{shown}");
    dir.command("onefold-train export off --out exported").works();
    let export: Value = serde_json::from_str(&dir.text("exported/export.json")).unwrap();
    assert_eq!(export["labels"], serde_json::json!(["label", "liked"]));
}

#[test]
fn equal_runs_give_equal_bytes() {
    let dir = small_rm1(1_600);
    for name in ["first", "second"] {
        dir.command(&format!("onefold-train run logs/train.toml --data dataset --out {name} --threads 2"))
            .works();
    }
    // There are 50 steps. Windows contain one step up to step 20, two steps up to step 40, and five steps afterwards.
    assert_eq!(dir.text("first/metrics.jsonl").lines().count(), 50 + 20 + 10 + 2);
    for file in ["metrics.jsonl", "model.safetensors", "run.json"] {
        assert!(dir.read(format!("first/{file}")) == dir.read(format!("second/{file}")), "{file} differs");
    }
}

#[test]
fn batches_depend_on_neither_deduplication_nor_threads() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm1 --samples 3000 --seed 4 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let dataset = dir.path("dataset");
    let off = read_batches(&dataset, 256, Dedupe::Off, 2);
    let exact = read_batches(&dataset, 256, Dedupe::Exact, 2);
    let expanded: Vec<Batch> = exact.iter().map(Batch::expand).collect();
    assert!(off == expanded, "deduplicated batches do not expand to plain ones");
    assert!(off != exact, "nothing was deduplicated");
    for threads in [1, 5] {
        assert!(
            read_batches(&dataset, 256, Dedupe::Exact, threads) == exact,
            "{threads} threads: other batches"
        );
    }
}

#[test]
fn batches_are_full_across_row_groups_files_and_partitions() {
    let dir = Dir::new();
    let (dataset, requests) = write_many_row_groups(&dir);
    let snapshot = Snapshot::load(&dataset).unwrap();
    let files: Vec<_> = snapshot.partitions.iter().flat_map(|partition| &partition.files).collect();
    assert!(
        snapshot.partitions.len() == 2
            && files.len() > 6
            && files.iter().any(|file| file.row_groups.len() > 2),
        "{files:?}"
    );
    for (batch_size, threads) in [(1, 1), (64, 1), (64, 3), (333, 2), (requests.len(), 2)] {
        let batches = read_batches(&dataset, batch_size, Dedupe::Exact, threads);
        let (last, full) = batches.split_last().unwrap();
        assert!(full.iter().all(|batch| batch.size() == batch_size), "batches of {batch_size}");
        assert_eq!(full.len(), (requests.len() - 1) / batch_size);
        assert_eq!(last.size(), requests.len() - full.len() * batch_size);
        let read: Vec<i64> =
            batches.iter().flat_map(samples_of).map(|sample| sample.sparse[0].1[0]).collect();
        assert!(read == requests, "batches of {batch_size}: samples are lost or out of order");
    }
}
