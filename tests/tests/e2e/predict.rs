//! Predictions are joined to the logs by the columns that a dataset keeps.

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt as _;
use std::process::Command;

use arrow::array::{Array as _, AsArray as _};
use arrow::datatypes::{Float32Type, Int64Type};
use onefold_tests::Dir;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;

use crate::logs::{EVENTS, REQUESTS, write_logs};

const PREDICT: &str = "onefold-train predict run --data dataset --out predictions.parquet --overwrite";

/// Returns a directory with logs whose dataset keeps the number of the request, and the visit to which it belongs.
fn with_run() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.edit("logs/dataset.toml", "SELECT f.*,", "SELECT f.*, f.request AS sample,");
    dir.edit(
        "logs/dataset.toml",
        "format_version = 1\n",
        "format_version = 1\nkeep = [\"sample\", \"visit\"]\n",
    );
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --buckets 6").works();
    let config = dir
        .text("logs/train.toml")
        .replace("split=holdout", "split=train")
        .replace("split=train\"\neval", "split=holdout\"\neval");
    dir.write("logs/train.toml", config + "\n[evaluation]\ngroup = \"visit\"\ntop = [1, 2]\n");
    dir.set("logs/train.toml", "batch_size", "3");
    dir.command("onefold-train run logs/train.toml --data dataset --threads 2 --out run").works();
    dir
}

/// Returns logit, prediction and visit by the number of the request.
fn predictions(dir: &Dir) -> BTreeMap<i64, (f32, f32, String)> {
    let file = fs_err::File::open(dir.path("predictions.parquet")).unwrap().into_parts().0;
    let batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let mut all = BTreeMap::new();
    for batch in batches {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap();
        let (samples, visits) =
            (column("sample").as_primitive::<Int64Type>(), column("visit").as_string::<i32>());
        let [logits, predictions] =
            ["logit", "prediction"].map(|name| column(name).as_primitive::<Float32Type>());
        for row in 0..batch.num_rows() {
            let of = (logits.value(row), predictions.value(row), visits.value(row).to_owned());
            assert!(all.insert(samples.value(row), of).is_none() && samples.is_valid(row));
        }
    }
    all
}

/// Computes loss, NE, AUC and the AUC within visits by their definitions, from predictions that are joined to the
/// event log.
fn figures(predictions: &BTreeMap<i64, (f32, f32, String)>) -> [f64; 4] {
    let label = |request: i64| EVENTS.iter().find(|event| event.request == request).unwrap().clicked;
    let visit = |request: i64| REQUESTS.iter().find(|row| row.request == request).unwrap().visit;
    assert!(predictions.iter().all(|(request, (_, _, kept))| visit(*request) == kept));
    let samples: Vec<(f64, bool, &str)> = predictions
        .iter()
        .map(|(request, (logit, ..))| (f64::from(*logit), label(*request), visit(*request)))
        .collect();
    let count = samples.len() as f64;
    let loss = |(logit, clicked, _): &(f64, bool, &str)| {
        let probability = 1.0 / (1.0 + (-logit).exp());
        -(if *clicked { probability } else { 1.0 - probability }).ln()
    };
    let loss = samples.iter().map(loss).sum::<f64>() / count;
    let rate = samples.iter().filter(|sample| sample.1).count() as f64 / count;
    let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
    let auc = |samples: &[&(f64, bool, &str)]| {
        let pairs = samples
            .iter()
            .filter(|a| a.1)
            .flat_map(|a| samples.iter().filter(|b| !b.1).map(move |b| (a.0, b.0)));
        let won: Vec<f64> = pairs
            .map(|(a, b)| {
                if a > b {
                    1.0
                } else if a == b {
                    0.5
                } else {
                    0.0
                }
            })
            .collect();
        (!won.is_empty()).then(|| won.iter().sum::<f64>() / won.len() as f64)
    };
    let mut groups: BTreeMap<&str, Vec<&(f64, bool, &str)>> = BTreeMap::new();
    samples.iter().for_each(|sample| groups.entry(sample.2).or_default().push(sample));
    let weighted = groups.values().filter_map(|group| Some((group.len() as f64, auc(group)?)));
    let (weights, sums) =
        weighted.fold((0.0, 0.0), |(weights, sums), (w, auc)| (weights + w, sums + w * auc));
    [loss, loss / entropy, auc(&samples.iter().collect::<Vec<_>>()).unwrap(), sums / weights]
}

#[test]
fn predictions_joined_by_key_have_the_figures_of_the_evaluation() {
    let dir = with_run();
    let mut first: Option<BTreeMap<i64, (f32, f32, String)>> = None;
    // The run's batches of three samples cannot be divided evenly between two ranks.
    let forms = [(1, "off"), (3, "window"), (2, "exact")];
    for (ranks, dedupe) in forms {
        let of_ranks = |command: &str| match ranks {
            1 => format!("{command} --threads 2 --dedupe {dedupe}"),
            _ => {
                command.replace("onefold-train ", &format!("onefold-train launch --ranks {ranks} -- "))
                    + &format!(" --dedupe {dedupe} --timeout 300")
            }
        };
        let summary = dir.command(&of_ranks(PREDICT)).json();
        assert_eq!(summary["samples"], 9, "{summary}");
        assert_eq!(summary["columns"], serde_json::json!(["sample", "visit", "prediction", "logit"]));
        let found = predictions(&dir);
        let eval = dir.command(&of_ranks("onefold-train eval run --data dataset")).json();
        let of_eval =
            [&eval["loss"], &eval["ne"], &eval["auc"], &eval["ranking"]["gauc"]].map(|f| f.as_f64().unwrap());
        let joined = figures(&found);
        assert!(joined.iter().zip(of_eval).all(|(a, b)| (a - b).abs() < 1e-9), "{joined:?} {of_eval:?}");
        for (logit, prediction, _) in found.values() {
            assert!((f64::from(*prediction) - 1.0 / (1.0 + (-f64::from(*logit)).exp())).abs() < 1e-7);
        }
        // The samples are the same, and the logits differ only by the order of sums.
        let first = first.get_or_insert_with(|| found.clone());
        assert_eq!(found.keys().collect::<Vec<_>>(), first.keys().collect::<Vec<_>>());
        assert!(found.iter().all(|(sample, of)| (of.0 - first[sample].0).abs() < 1e-5), "{ranks} {dedupe}");
    }
}

#[test]
fn predictions_that_cannot_be_made_are_refused() {
    let dir = with_run();
    let predict = "onefold-train predict run --data dataset --out predictions.parquet";
    dir.command(&format!("{predict} --keep visits")).fails(&["`visits`", "`visit`"]);
    assert!(!dir.path("predictions.parquet").exists());
    let sessions =
        dir.command(&format!("{predict} --partitions split=holdout --keep session_id,visit")).json();
    assert_eq!((&sessions["samples"], &sessions["columns"][0]), (&3.into(), &"session_id".into()));
    dir.command(predict).fails(&["`predictions.parquet` already exists", "`--overwrite`"]);
    // A device is not replaced.
    assert!(Command::new("mkfifo").arg(dir.path("pipe")).status().unwrap().success());
    dir.command(&format!("{} --overwrite", predict.replace("predictions.parquet", "pipe")))
        .fails(&["pipe`: this is a folder, a device or a pipe"]);
    assert!(fs_err::symlink_metadata(dir.path("pipe")).unwrap().file_type().is_fifo());
    dir.command(&format!("{predict} --checkpoint 7 --overwrite")).fails(&["no checkpoint of step 7"]);
    // Without kept keys, predictions cannot be joined.
    dir.edit("logs/dataset.toml", "keep = [\"sample\", \"visit\"]\n", "");
    dir.command("onefold-ingest build logs/dataset.toml --out plain").works();
    let plain = predict.replace("--data dataset", "--data plain");
    dir.command(&format!("{plain} --overwrite")).fails(&["keeps no column", "keep = [\"request_id\"]"]);
    // Without them, samples cannot be grouped either.
    dir.command("onefold-train eval run --data plain").fails(&["`visit`"]);
    let unknown = dir.text("logs/train.toml").replace("group = \"visit\"", "group = \"visits\"");
    dir.write("logs/train.toml", unknown);
    dir.command("onefold-train run logs/train.toml --data dataset --threads 2 --out other")
        .fails(&["`[evaluation].group` is `visits`", "did you mean `visit`?"]);
}

#[test]
fn pages_that_cannot_be_written_are_refused_before_their_input_is_read() {
    let dir = Dir::new();
    for command in
        ["onefold-train report", "onefold-train trace", "onefold-ingest report", "onefold-shard show"]
    {
        dir.command(&format!("{command} missing --html none/page.html"))
            .fails(&["`none`: there is no such directory to write into", "create it"]);
    }
}

#[test]
fn a_report_shows_runs_side_by_side() {
    let dir = with_run();
    dir.command("onefold-train run logs/train.toml --data dataset --threads 2 --out other --max-steps 1")
        .works();
    let summary: Value = dir.command("onefold-train report run other --html report.html").json();
    assert_eq!(
        (&summary["runs"][1]["run"], &summary["runs"][1]["evaluations"]),
        (&"other".into(), &1.into())
    );
    let page = dir.text("report.html");
    for part in
        ["2 runs side by side", "Held-out samples", "gauc", "Calibration", "ndcg_at_2", "<svg", "<polyline"]
    {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<script") && !page.contains("NaN") && !page.contains("http"), "{page}");
    dir.command("onefold-train report run dataset --html report.html")
        .fails(&["`dataset/run.json`: not a run"]);
    let lines = dir.text("run/metrics.jsonl");
    dir.write("run/metrics.jsonl", format!("{}\nnonsense\n{}", lines.lines().next().unwrap(), lines));
    dir.command("onefold-train report run --html report.html").fails(&["`run/metrics.jsonl`: line 2: "]);
}
