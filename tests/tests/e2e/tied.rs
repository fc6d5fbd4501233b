//! The connection between a model and its data: labels, the partitions for training and evaluation, and the meaning
//! of ids.

use onefold_tests::Dir;

use crate::logs::write_logs;

const RUN: &str = "onefold-train run logs/train.toml --threads 2 --out run --data";

fn with_logs() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir
}

#[test]
fn labels_outside_0_to_1_are_refused() {
    let dir = with_logs();
    for (label, shown) in [("2 * e.clicked::int", "2"), ("e.clicked::int - 0.5", "-0.5")] {
        dir.edit("logs/dataset.toml", "e.clicked,", &format!("{label} AS clicked,"));
        dir.command("onefold-ingest build logs/dataset.toml --out dataset --overwrite").works();
        let place = ["split=holdout/", ".parquet`", "column `clicked`", "row group 0", "row "];
        let message = format!("the label is {shown}, which is not from 0 to 1");
        for ranks in ["", "launch --ranks 1 -- "] {
            let run = RUN.replace("onefold-train ", &format!("onefold-train {ranks}"));
            dir.command(&format!("{run} dataset")).fails(&[&place[..], &[&message, "hint: "]].concat());
        }
        assert!(!dir.path("run").exists());
        dir.edit("logs/dataset.toml", &format!("{label} AS clicked,"), "e.clicked,");
    }
    // The model was trained with other labels.
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --overwrite").works();
    dir.command(&format!("{RUN} dataset")).works();
    dir.edit("logs/dataset.toml", "e.clicked,", "3 * e.clicked::int AS clicked,");
    dir.command("onefold-ingest build logs/dataset.toml --out counts").works();
    dir.command("onefold-train eval run --data counts").fails(&["column `clicked`", "the label is 3"]);
}

/// One of the samples for the final evaluation has a label that the loss does not accept.
#[test]
fn labels_of_the_final_evaluation_are_checked_before_training() {
    let dir = with_logs();
    let label = "CASE WHEN f.request = 12 THEN 2.0 ELSE e.clicked::int END AS clicked,";
    dir.edit("logs/dataset.toml", "e.clicked,", label);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    let parts = ["split=holdout", "column `clicked`", "the label is 2, which is not from 0 to 1"];
    dir.command(&format!("{RUN} dataset")).fails(&parts);
    let launch = RUN.replace("onefold-train ", "onefold-train launch --ranks 1 -- ");
    dir.command(&format!("{launch} dataset")).fails(&parts);
    dir.edit("logs/train.toml", "eval = \"split=holdout\"\n", "");
    dir.command(&format!("{RUN} dataset")).works();
}

#[test]
fn what_is_trained_on_is_not_evaluated_on() {
    let dir = with_logs();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    for (train, eval) in [("split=train", "hour>=10"), ("hour>=10", "split=holdout")] {
        dir.edit("logs/train.toml", "train = \"split=train\"", &format!("train = \"{train}\""));
        dir.edit("logs/train.toml", "eval = \"split=holdout\"", &format!("eval = \"{eval}\""));
        dir.command(&format!("{RUN} dataset")).fails(&[
            "`logs/train.toml`: the partition `split=",
            "is both trained and evaluated on",
            "`allow_overlap = true`",
        ]);
        assert!(!dir.path("run").exists());
        dir.edit("logs/train.toml", &format!("train = \"{train}\""), "train = \"split=train\"");
        dir.edit("logs/train.toml", &format!("eval = \"{eval}\""), "eval = \"split=holdout\"");
    }
    // Without its own choice, the training uses the remaining partitions.
    let chosen = dir.command(&format!("{RUN} dataset")).json();
    dir.edit("logs/train.toml", "train = \"split=train\"\n", "");
    let left = dir.command(&format!("{RUN} dataset --overwrite")).json();
    assert_eq!((&left["samples"], &left["eval"]["samples"]), (&18.into(), &3.into()));
    assert_eq!(left["losses"], chosen["losses"]);
    dir.command("onefold-shard tables logs/train.toml --data dataset --out tables.json").works();
    dir.edit("logs/train.toml", "[data]\n", "[data]\ntrain = \"split=train\"\n");
    fs_err::remove_dir_all(dir.path("run")).unwrap();
    dir.edit("logs/train.toml", "eval = \"split=holdout\"", "eval = \"\"\nallow_overlap = true");
    assert_eq!(dir.command(&format!("{RUN} dataset")).json()["eval"]["samples"], 12);
    dir.edit("logs/dataset.toml", "[partition]\ncolumns = [\"split\"]\nby = \"hour\"\n", "");
    dir.command("onefold-ingest build logs/dataset.toml --out one").works();
    dir.edit("logs/train.toml", "train = \"split=train\"", "train = \"\"");
    dir.edit("logs/train.toml", "allow_overlap = true", "allow_overlap = false");
    dir.command(&format!("{RUN} one --overwrite"))
        .fails(&["the whole dataset is both trained and evaluated on"]);
}

#[test]
fn an_evaluation_refuses_another_vocabulary() {
    let dir = with_logs();
    dir.command("onefold-ingest build logs/dataset.toml --out plain").works();
    dir.edit("logs/dataset.toml", "group = \"history\" }", "group = \"history\", vocabulary = \"items\" }");
    let config = dir.text("logs/dataset.toml");
    dir.write("logs/dataset.toml", config + "\n[vocabularies.items]\norder = \"frequency\"\n");
    dir.edit(
        "logs/train.toml",
        "train = \"split=train\"\neval = \"split=holdout\"",
        "train = \"split=holdout\"",
    );
    dir.edit("logs/train.toml", "batch_size = 4", "batch_size = 3");
    let append = "onefold-ingest append logs/dataset.toml --out days --partition";
    // The log of the first day knows only its own ids.
    let (all, first) = ("ON f.request = e.request", "ON f.request = e.request WHERE e.split = 'holdout'");
    dir.edit("logs/dataset.toml", all, first);
    dir.command(&format!("{append} split=holdout")).works();
    dir.edit("logs/dataset.toml", first, all);
    dir.command(&format!("{RUN} days")).works();
    let eval = "onefold-train eval run --partitions split=holdout --data";
    let before = dir.command(&format!("{eval} days")).json();
    // New ids get new numbers, and existing ids keep theirs.
    dir.command(&format!("{append} split=train")).works();
    let after = dir.command(&format!("{eval} days")).json();
    assert_eq!(after["loss"], before["loss"]);
    // In a single build, the same ids have other numbers.
    dir.command("onefold-ingest build logs/dataset.toml --out whole").works();
    for ranks in ["", "launch --ranks 2 -- "] {
        let eval = eval.replace("onefold-train ", &format!("onefold-train {ranks}"));
        dir.command(&format!("{eval} whole --timeout 300")).fails(&[
            "error: `run`: the model was trained with another vocabulary `items`",
            "the same ids mean other things",
            "`onefold-ingest append`",
        ]);
    }
    dir.command(&format!("{eval} plain")).fails(&[
        "the model was trained on other ids of `history`: those of the vocabulary `items`, the dataset has those of the logs",
    ]);
    let run: serde_json::Value = serde_json::from_str(&dir.text("run/run.json")).unwrap();
    assert_eq!(run["vocabularies"]["items"]["entries"], 2);
}

#[test]
fn a_model_that_is_worse_than_the_mean_label_is_pointed_out() {
    let dir = with_logs();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.set("logs/train.toml", "epochs", "20");
    // The model memorises nine samples, and knows nothing about the others.
    for (eval, worse) in [("split=holdout", true), ("split=train", false)] {
        let allowed = format!("eval = \"{eval}\"\nallow_overlap = true");
        dir.edit("logs/train.toml", "eval = \"split=holdout\"", &allowed);
        let text = dir.command(&format!("{RUN} dataset --overwrite")).works();
        assert_eq!(text.contains("warning: NE is 1."), worse, "{text}");
        dir.edit("logs/train.toml", &allowed, "eval = \"split=holdout\"");
    }
}
