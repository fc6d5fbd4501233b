//! Dense features are normalized with the statistics of the training samples, wherever the model is used.

use onefold_tests::Dir;
use serde_json::Value;

use crate::logs::write_logs;

const RUN: &str = "onefold-train run logs/train.toml --threads 2 --data dataset";

fn with_dataset(dense: &str) -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --buckets 2").works();
    dir.append("logs/train.toml", dense);
    dir
}

fn json(dir: &Dir, file: &str) -> Value {
    serde_json::from_str(&dir.text(file)).unwrap()
}

/// Returns the normalization of `age` in a run.
fn normalizer(dir: &Dir, run: &str) -> Value {
    json(dir, &format!("{run}/run.json"))["normalizers"]["age"].clone()
}

/// The ages in the training samples, which are requests 1 to 8 and 11.
const AGES: [f64; 9] = [30.5, 30.5, 30.5, 30.5, 31.0, 31.0, 31.0, 31.0, 32.0];

#[track_caller]
fn assert_close(found: &Value, expected: f64) {
    let found = found.as_f64().unwrap();
    assert!((found - expected).abs() < 1e-6 * expected.abs(), "{found}, not {expected}");
}

fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    (mean, (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count).sqrt())
}

#[test]
fn the_statistics_are_those_of_the_training_partitions() {
    let dir = with_dataset("");
    let trained = dir.command(&format!("{RUN} --out run")).json();
    let age = normalizer(&dir, "run");
    let quantiles = age["quantiles"].as_array().unwrap();
    assert_eq!(age["normalize"], "quantile");
    assert_eq!((quantiles.len(), &quantiles[0], &quantiles[16]), (17, &30.5.into(), &32.0.into()));
    // Evaluation and export use the same statistics.
    let evaluated = dir.command("onefold-train eval run --data dataset").json();
    assert_eq!(evaluated["loss"], trained["eval"]["loss"]);
    dir.command("onefold-train export run --out exported").works();
    assert_eq!(json(&dir, "exported/export.json")["normalizers"]["age"], age);
    // The feature without normalization gives a different model.
    dir.append("logs/train.toml", "\n[dense.features]\nage = \"none\"\n");
    let raw = dir.command(&format!("{RUN} --out raw")).json();
    assert_eq!(normalizer(&dir, "raw"), Value::Null);
    assert_ne!(raw["eval"]["loss"], trained["eval"]["loss"]);
    dir.set("logs/train.toml", "age", "\"log1p\"");
    dir.command(&format!("{RUN} --out logarithms")).works();
    let (mean, deviation) = moments(&AGES.map(|age| f64::from(age as f32).ln_1p()));
    assert_close(&normalizer(&dir, "logarithms")["mean"], mean);
    assert_close(&normalizer(&dir, "logarithms")["deviation"], deviation);
    dir.set("logs/train.toml", "age", "\"standard\"");
    dir.command(&format!("{RUN} --out standard")).works();
    let (mean, deviation) = moments(&AGES);
    assert_close(&normalizer(&dir, "standard")["mean"], mean);
    assert_close(&normalizer(&dir, "standard")["deviation"], deviation);
    // A run cannot be resumed with a different normalization.
    dir.command(&format!("{RUN} --out raw --resume")).fails(&["another `[dense]`"]);
}

#[test]
fn a_model_that_is_trained_further_keeps_its_numbers() {
    let dir = with_dataset("\n[dense]\nnormalize = \"log1p\"\n");
    dir.edit("logs/train.toml", "eval = \"split=holdout\"\n", "");
    dir.set("logs/train.toml", "batch_size", "2");
    dir.set("logs/train.toml", "train", "\"split=train,hour<11\"");
    dir.command(&format!("{RUN} --out monday")).works();
    dir.set("logs/train.toml", "train", "\"split=train,hour>=11\"");
    let warm = format!("{RUN} --warm-start monday --out");
    dir.command(&format!("{warm} tuesday")).works();
    assert_ne!(normalizer(&dir, "monday"), Value::Null);
    assert_eq!(normalizer(&dir, "tuesday"), normalizer(&dir, "monday"));
    dir.edit("logs/train.toml", "[dense]\nnormalize = \"log1p\"\n", "");
    dir.command(&format!("{warm} same")).works();
    assert_eq!(normalizer(&dir, "same"), normalizer(&dir, "monday"));
    dir.append("logs/train.toml", "\n[dense]\nnormalize = \"standard\"\n");
    dir.command(&format!("{warm} other")).fails(&[
        "its model normalizes `age` by `log1p`",
        "asks for `standard`",
        "leave out `normalize`",
    ]);
    // A progressive run, which evaluates on later partitions, uses only the statistics of the first partition.
    dir.set("logs/train.toml", "train", "\"split=train\"");
    dir.command(&format!("{RUN} --out days --progressive")).works();
    // Requests 1, 2, 3, 5, 6, 7 and 11: their sessions begin in the first hour.
    assert_close(&normalizer(&dir, "days")["mean"], moments(&[30.5, 30.5, 30.5, 31.0, 31.0, 31.0, 32.0]).0);
}

#[test]
fn what_cannot_be_normalized_is_an_error() {
    let dir = with_dataset("\n[dense.features]\nagee = \"log1p\"\n");
    dir.command(&format!("{RUN} --out run"))
        .fails(&["`[dense.features]` has `agee`, which is no dense feature", "`age`"]);
    dir.edit("logs/train.toml", "agee = \"log1p\"", "age = \"z-score\"");
    dir.command(&format!("{RUN} --out run")).fails(&["unknown variant `z-score`", "standard", "log1p"]);
    dir.edit("logs/train.toml", "age = \"z-score\"", "age = \"quantile\"");
    // The statistics of a feature that a preprocessing step changes are unknown.
    dir.write("logs/steps.toml", "format_version = 1\n[[step]]\nop = \"log1p\"\ninputs = [\"age\"]\n");
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    dir.command(&format!("{RUN} --out run")).fails(&[
        "`age` cannot be normalized by `quantile`, because a step of the preprocessing makes or changes it",
        "`age = \"none\"`",
    ]);
    dir.edit("logs/train.toml", "[dense.features]\nage = \"quantile\"\n", "");
    dir.command(&format!("{RUN} --out run")).works();
    assert_eq!(normalizer(&dir, "run"), Value::Null);
    // A step that writes a changed copy does not affect the feature itself.
    dir.append("logs/steps.toml", "output = \"log_age\"\n");
    dir.command(&format!("{RUN} --out copied")).works();
    assert_eq!(normalizer(&dir, "copied")["normalize"], "quantile");
    assert_eq!(json(&dir, "copied/run.json")["normalizers"].as_object().unwrap().len(), 1);
}
