//! Training on several ranks, each of which is a process: ranks are launched, use a plan, are killed, and are resumed
//! by other ranks.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use onefold_tests::Dir;
use serde_json::Value;

use crate::training::{checkpoints, make_small};

/// The timeout is longer than an operation takes on a busy machine.
pub(crate) const RUN: &str = "run logs/train.toml --data dataset --timeout 300";

/// Returns a directory with a small dataset like rm3 in 12 buckets, which is read in 12 streams, and a small model
/// with a low learning rate.
pub(crate) fn with_dataset() -> Dir {
    Dir::made_once("", make_dataset)
}

fn make_dataset(dir: &Dir) {
    dir.command("onefold-data generate --workload rm3 --samples 1536 --seed 7 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --buckets 12").works();
    make_small(dir, "logs/train.toml");
    for (key, value) in [("batch_size", "48"), ("eps", "1e-1"), ("learning_rate", "0.01")] {
        dir.set("logs/train.toml", key, value);
    }
    dir.edit(
        "logs/train.toml",
        "label = \"label\"",
        "label = \"label\"\neval = \"\"\nallow_overlap = true\nstreams = 12",
    );
    // With one accumulator per weight, the result does not depend on the division of columns.
    dir.edit("logs/train.toml", "kind = \"row_wise_adagrad\"", "kind = \"adagrad\"");
    dir.append("logs/train.toml", "\n[checkpoint]\nevery_steps = 5\nkeep = 3\nfull_every = 3\n");
}

/// Writes a plan for three ranks that divides tables in every way.
pub(crate) fn write_plan(dir: &Dir) {
    dir.command("onefold-shard tables logs/train.toml --data dataset --out tables.json").works();
    dir.command("onefold-shard topology --ranks 3 --memory 1GiB --out topology.json").works();
    dir.command("onefold-shard plan --tables tables.json --topology topology.json --out plan.json").works();
    let mut plan: Value = serde_json::from_str(&dir.text("plan.json")).unwrap();
    let shard = |rank: u64, rows: [u64; 2], columns: [u64; 2]| {
        let range = |[start, end]: [u64; 2]| serde_json::json!({ "start": start, "end": end });
        serde_json::json!({ "rank": rank, "rows": range(rows), "columns": range(columns) })
    };
    let divided = [
        ("row_wise", vec![shard(0, [0, 100], [0, 16]), shard(2, [100, 500], [0, 16])]),
        ("column_wise", vec![shard(1, [0, 500], [0, 4]), shard(2, [0, 500], [4, 16])]),
        ("data_parallel", (0..3).map(|rank| shard(rank, [0, 500], [0, 16])).collect()),
    ];
    for (table, (kind, shards)) in plan["tables"].as_array_mut().unwrap().iter_mut().zip(divided) {
        (table["sharding_type"], table["shards"]) = (kind.into(), shards.into());
    }
    dir.write("plan.json", plan.to_string());
}

pub(crate) fn losses(run: &Value) -> Vec<f64> {
    run["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
}

pub(crate) fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}, step {step}: {a} {b}");
    }
}

/// A run has as many streams as ranks when it begins, and keeps them when more ranks resume it.
#[test]
fn more_ranks_than_streams_resume_a_run() {
    let dir = with_dataset();
    dir.edit("logs/train.toml", "streams = 12", "");
    let launch = |ranks: u32, more: &str| {
        dir.command(&format!("onefold-train launch --ranks {ranks} -- {RUN} {more}")).json()
    };
    let whole = launch(2, "--out whole --max-steps 12");
    launch(2, "--out moved --max-steps 5");
    let moved = launch(3, "--out moved --max-steps 12 --resume");
    assert_near("moved", &losses(&moved), &losses(&whole));
}

#[test]
fn launched_ranks_train_the_same_model() {
    let dir = with_dataset();
    write_plan(&dir);
    let launch = |ranks: u32, more: &str| {
        dir.command(&format!("onefold-train launch --ranks {ranks} -- {RUN} {more}")).json()
    };
    let local = dir.command(&format!("onefold-train {RUN} --out local --max-steps 24 --threads 1")).json();
    let whole = launch(3, "--plan plan.json --out whole --max-steps 24");
    assert_near("planned", &losses(&whole), &losses(&local));
    assert_eq!(whole["ranks"].as_u64(), Some(3));
    for kind in ["requests", "answers", "gradients"] {
        assert!(whole["sent_bytes"][kind].as_u64().unwrap() > 0, "{kind}");
    }
    launch(3, "--plan plan.json --out parts --max-steps 17");
    let same = launch(3, "--plan plan.json --out parts --max-steps 24 --resume");
    assert_eq!((same["resumed_from_step"].as_u64(), losses(&same)), (Some(17), losses(&whole)));
    assert!(dir.read("parts/model.safetensors") == dir.read("whole/model.safetensors"));
    // Another number of ranks continues halfway, without the plan.
    launch(3, "--plan plan.json --out moved --max-steps 17");
    let moved = launch(2, "--out moved --max-steps 24 --resume");
    assert_near("moved", &losses(&moved), &losses(&whole));

    let expected = whole["eval"]["loss"].as_f64().unwrap();
    for command in [
        "onefold-train eval whole --data dataset",
        "onefold-train eval whole --data dataset --checkpoint latest",
        "onefold-train launch --ranks 4 -- eval whole --data dataset --timeout 300",
    ] {
        let loss = dir.command(command).json()["loss"].as_f64().unwrap();
        assert!((loss - expected).abs() < 1e-6, "{command}: {loss} {expected}");
    }
    // The options of the launcher's output are those of the command, too.
    let eval = "eval whole --data dataset --timeout 300 --checkpoint latest";
    let line = format!("onefold-train launch --ranks 2 --json --quiet -- {eval}");
    let evaluated: Value = serde_json::from_str(&dir.command(&line).works()).unwrap();
    assert!((evaluated["loss"].as_f64().unwrap() - expected).abs() < 1e-6, "{evaluated}");
    dir.command("onefold-train export whole --out a").works();
    dir.command("onefold-train export whole --checkpoint latest --out b").works();
    assert!(dir.read("a/model.safetensors") == dir.read("b/model.safetensors"));

    let refused = |command: &str, parts: &[&str]| {
        let message = dir.command(command).fails(parts);
        assert_eq!(message.matches("error:").count(), 1, "one rank speaks: {message}");
    };
    refused(
        &format!("onefold-train {RUN} --out other --plan plan.json"),
        &["for 3 ranks", "the job has 1 rank"],
    );
    dir.edit("logs/train.toml", "streams = 12", "streams = 1000");
    refused(
        &format!("onefold-train {RUN} --out other"),
        &["buckets cannot be divided into 1000 streams", "set `streams` under `[data]` to at most"],
    );
    dir.edit("logs/train.toml", "streams = 1000", "streams = 12");
    refused(&format!("onefold-train launch --ranks 2 -- {RUN} --out whole"), &["`whole` already exists"]);
    refused(
        "onefold-train launch --ranks 2 -- run nothing.toml --data dataset --timeout 300 --out other",
        &["`nothing.toml`"],
    );
    refused(
        "onefold-train launch --ranks 2 -- export whole --out other",
        &["only `run`, `follow`, `eval` and `predict` work on several ranks"],
    );
    let misused = dir.command("onefold-train launch --ranks 2 -- run --nonsense").output();
    let message = String::from_utf8_lossy(&misused.stderr).into_owned();
    assert_eq!((misused.status.code(), message.matches("error:").count()), (Some(2), 1), "{message}");
    dir.edit("plan.json", "\"end\":100", "\"end\":99");
    refused(
        &format!("onefold-train launch --ranks 3 -- {RUN} --out other --plan plan.json"),
        &["plan.json", "the plan is not valid", "onefold-shard"],
    );
    assert!(!dir.path("other").exists());
}

/// A table that features of several groups share works from the configuration to the plan, on several ranks, and in
/// the export.
#[test]
fn features_share_a_table() {
    let dir = with_dataset();
    let shared = "[tables.user_00]\ntable = \"things\"\n\n[tables.item_00]\ntable = \"things\"\nrows = 400\n\n[tables.item_01]\ntable = \"things\"\n";
    let text = format!("{}\n{shared}", dir.text("logs/train.toml"));
    dir.write("logs/train.toml", &text);
    dir.command("onefold-shard tables logs/train.toml --data dataset --out tables.json").works();
    let tables: Value = serde_json::from_str(&dir.text("tables.json")).unwrap();
    let tables = tables["tables"].as_array().unwrap();
    let things = tables.iter().find(|table| table["name"] == "things").unwrap();
    assert_eq!((&things["feature"], &things["rows"]), (&"user_00".into(), &400.into()));
    let further: Vec<_> = things["further_features"].as_array().unwrap().iter().collect();
    assert_eq!((&further[0]["feature"], &further[1]["feature"]), (&"item_00".into(), &"item_01".into()));
    assert!(things["dedupe_factor"].as_f64() > Some(1.0) && further[0]["dedupe_factor"] == 1.0, "{things}");
    assert!(tables.iter().all(|table| table["name"] != "user_00" && table["name"] != "item_01"));
    dir.command("onefold-shard topology --ranks 2 --memory 4MiB --out topology.json").works();
    dir.command("onefold-shard plan --tables tables.json --topology topology.json --out plan.json").works();
    let checked = "onefold-shard check plan.json --tables tables.json --topology topology.json";
    assert_eq!(dir.command(checked).json()["valid"], true);
    dir.command("onefold-shard export plan.json --torchrec --module ebc --out torchrec.json").works();
    let torchrec: Value = serde_json::from_str(&dir.text("torchrec.json")).unwrap();
    assert!(torchrec["plan"]["ebc"]["t_things"].is_object(), "{torchrec}");

    let local = dir.command(&format!("onefold-train {RUN} --out local --max-steps 24 --threads 1")).json();
    let launch = format!("onefold-train launch --ranks 2 -- {RUN} --out run --plan plan.json");
    dir.command(&format!("{launch} --max-steps 17")).works();
    let resumed = dir.command(&format!("{launch} --max-steps 24 --resume")).json();
    assert_near("shared", &losses(&resumed), &losses(&local));
    assert_eq!(
        resumed["parameters"]["embedding"].as_u64(),
        Some(16 * (400 + 500 * (tables.len() as u64 - 1)))
    );
    let evaluated = dir.command("onefold-train eval run --data dataset --checkpoint latest").json();
    let (found, expected) = (evaluated["loss"].as_f64().unwrap(), resumed["eval"]["loss"].as_f64().unwrap());
    assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    dir.command("onefold-train export run --out exported").works();
    let export: Value = serde_json::from_str(&dir.text("exported/export.json")).unwrap();
    let exported =
        export["tables"].as_array().unwrap().iter().find(|table| table["name"] == "t_things").unwrap();
    let names: Vec<_> = exported["features"].as_array().unwrap().iter().map(|own| &own["feature"]).collect();
    assert_eq!(names, ["user_00", "item_00", "item_01"]);

    // A plan for separate tables does not fit.
    dir.write("logs/own.toml", text.replace("table = \"things\"\n", ""));
    dir.command(
        "onefold-train launch --ranks 2 -- run logs/own.toml --data dataset --timeout 300 --out other --plan plan.json",
    )
    .fails(&[
        "it lacks tables `user_00`, `item_00`, `item_01`",
        "it places table `things`, which should not be there",
    ]);
    dir.write("logs/train.toml", text.replace("[tables.item_01]\n", "[tables.item_01]\nrows = 500\n"));
    dir.command(&format!("onefold-train {RUN} --out other")).fails(&[
        "`[tables.item_01]`: `rows` is 500, but 400 under `[tables.item_00]`, whose table `things` is the same",
    ]);
}

/// Returns the process ids of the ranks that a launcher has started, ordered by rank.
pub(crate) fn ranks_of(launcher: u32) -> Vec<u32> {
    let children = fs_err::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
    let mut ranks: Vec<u32> =
        children.unwrap_or_default().split_whitespace().map(|id| id.parse().unwrap()).collect();
    ranks.sort_unstable();
    ranks
}

fn steps(folder: &Path) -> usize {
    fs_err::read_to_string(folder.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}

/// If any rank is killed at any time, the other ranks end with one error that names it, and another number of ranks
/// can continue.
#[test]
fn a_job_whose_rank_is_killed_is_resumed_by_other_ranks() {
    let dir = with_dataset();
    // The training is long enough to be killed before its end.
    dir.set("logs/train.toml", "epochs", "8");
    let whole = dir.command(&format!("onefold-train {RUN} --out whole --threads 1")).json();
    let turns = [(2, 1), (3, 0), (4, 2), (3, 2)];
    for (turn, (ranks, victim)) in turns.into_iter().enumerate() {
        let command = format!("onefold-train launch --ranks {ranks} -- {RUN} --out run --resume");
        let mut child = dir.command(&command).spawn_with_stderr();
        let (begun, started) = (steps(&dir.path("run")), Instant::now());
        // The rank is killed after a few more steps, whose number differs in each turn.
        while steps(&dir.path("run")) <= begun + 9 * turn % 13 && child.try_wait().unwrap().is_none() {
            assert!(started.elapsed() < Duration::from_secs(600), "nothing happened within ten minutes");
            std::thread::sleep(Duration::from_millis(3));
        }
        let victims = ranks_of(child.id());
        assert_eq!(victims.len(), ranks as usize, "turn {turn}: the job is under way");
        let victim_id = victims[victim].to_string();
        assert!(Command::new("kill").args(["-9", &victim_id]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(&format!("rank {victim} was lost at step ")), "turn {turn}: {message}");
        assert_eq!(message.matches("error:").count(), 1, "one rank speaks: {message}");
    }
    let last = format!("onefold-train launch --ranks 3 -- {RUN} --out run --resume");
    let resumed = dir.command(&last).json();
    assert!(resumed["resumed_from_step"].as_u64().unwrap() > 0);
    assert_near("resumed", &losses(&resumed), &losses(&whole));
}

/// Two signals end a job at once. Its newest checkpoint remains, and other ranks continue from there.
#[test]
fn two_signals_end_all_ranks_and_leave_the_checkpoints() {
    let dir = with_dataset();
    // The training is long enough to be ended before its end.
    dir.set("logs/train.toml", "epochs", "6");
    let whole = dir.command(&format!("onefold-train {RUN} --out whole --threads 1")).json();
    let run = dir.path("run");
    let mut child =
        dir.command(&format!("onefold-train launch --ranks 3 -- {RUN} --out run")).spawn_with_stderr();
    let started = Instant::now();
    while checkpoints(&run).is_empty() && child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < Duration::from_secs(600), "there is no checkpoint after ten minutes");
        std::thread::sleep(Duration::from_millis(3));
    }
    let ranks = ranks_of(child.id());
    assert_eq!(ranks.len(), 3, "the job is under way");
    let script = format!("kill -TERM {0}; kill -INT {0}", child.id());
    assert!(Command::new("bash").args(["-c", &script]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("error: the ranks were killed, because a second signal came"), "{message}");
    assert!(ranks.iter().all(|rank| !Path::new(&format!("/proc/{rank}")).exists()), "a rank still runs");
    let newest = checkpoints(&run).last().copied();
    let resumed = dir.command(&format!("onefold-train launch --ranks 2 -- {RUN} --out run --resume")).json();
    assert_eq!(resumed["resumed_from_step"].as_u64(), newest);
    assert_near("resumed", &losses(&resumed), &losses(&whole));
}
