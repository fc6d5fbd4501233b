//! The training loop: resuming, being killed and stopped, evaluation, preprocessing, and the files of a run that
//! diverges.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use arrow::array::AsArray;
use arrow::datatypes::Float32Type;
use arrow::ipc::reader::FileReader;
use onefold_datasets::Snapshot;
use onefold_tests::Dir;
use serde_json::Value;

pub(crate) const RUN: &str = "onefold-train run logs/train.toml --data dataset --threads 2 --out";
/// All settings that make a step depend on earlier ones: moments, schedules, a shuffle per epoch, evaluation between
/// steps.
const SETTINGS: &str = "
[evaluation]
every_steps = 30
segments = [\"item_00\"]
max_segments = 3

[checkpoint]
every_steps = 10
keep = 2
full_every = 3

[schedule.dense]
kind = \"cosine\"
warmup_steps = 5
decay_steps = 150

[schedule.tables]
kind = \"linear\"
decay_steps = 200
final_factor = 0.1
";

/// Returns a directory with a small dataset like rm3, a small model, and `settings` at the end of `train.toml`.
pub(crate) fn with_dataset(settings: &str) -> Dir {
    let dir = Dir::made_once("", |dir| {
        dir.command("onefold-data generate --workload rm3 --samples 1024 --seed 7 --out logs").works();
        dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
        make_small(dir, "logs/train.toml");
    });
    dir.edit(
        "logs/train.toml",
        "kind = \"adagrad\"",
        "kind = \"adamw\"\nweight_decay = 0.01\nmax_grad_norm = 1.0",
    );
    let data = "label = \"label\"\neval = \"\"\nallow_overlap = true\nshuffle = { seed = 5, row_groups = 2 }";
    dir.edit("logs/train.toml", "label = \"label\"", data);
    dir.append("logs/train.toml", settings);
    dir
}

/// Makes the reference model of a generated workload small.
pub(crate) fn make_small(dir: &Dir, config: &str) {
    for (key, value) in [
        ("batch_size", "32"),
        ("epochs", "2"),
        ("bottom_mlp", "[32, 16]"),
        ("top_mlp", "[32, 1]"),
        ("dim", "16"),
        ("rows", "500"),
        ("ids", "\"hashed\""),
    ] {
        dir.set(config, key, value);
    }
    dir.append(config, OPTIMIZERS);
}

/// Adagrad without clipping, which tests modify.
pub(crate) const OPTIMIZERS: &str = "
[optimizer.tables]
kind = \"row_wise_adagrad\"
learning_rate = 0.02
eps = 1e-8

[optimizer.dense]
kind = \"adagrad\"
learning_rate = 0.02
eps = 1e-8
";

/// The number of steps of the whole training: 32 batches in two epochs.
const STEPS: u64 = 64;

/// Checks the files that must be the same in equal runs.
#[track_caller]
fn assert_equal_runs(dir: &Dir, a: &str, b: &str) {
    for file in ["metrics.jsonl", "model.safetensors", "run.json"] {
        assert!(
            dir.read(format!("{a}/{file}")) == dir.read(format!("{b}/{file}")),
            "{file} of {a} and {b} differ"
        );
    }
}

/// Returns the directories of a run's checkpoints: the step of each, and whether it is a complete checkpoint or the
/// remains of a killed process.
fn checkpoint_folders(run: &Path) -> Vec<(u64, bool)> {
    let Ok(entries) = fs_err::read_dir(run.join("checkpoints")) else { return Vec::new() };
    let folder = |entry: std::io::Result<fs_err::DirEntry>| {
        let entry = entry.unwrap();
        let step = entry.file_name().to_string_lossy().strip_prefix("step-").unwrap().parse().unwrap();
        (step, entry.path().join("checkpoint.json").is_file())
    };
    let mut folders: Vec<_> = entries.map(folder).collect();
    folders.sort_unstable();
    folders
}

/// Returns the steps of a run's checkpoints.
pub(crate) fn checkpoints(run: &Path) -> Vec<u64> {
    checkpoint_folders(run).into_iter().filter_map(|(step, whole)| whole.then_some(step)).collect()
}

/// Returns the directory with the files of a checkpoint.
fn files_of(dir: &Dir, checkpoint: &str) -> String {
    let description: Value =
        serde_json::from_str(&dir.text(format!("{checkpoint}/checkpoint.json"))).unwrap();
    format!("{checkpoint}/{}", description["attempt"].as_str().unwrap())
}

#[test]
fn a_resumed_run_is_bit_for_bit_the_uninterrupted_one() {
    let dir = with_dataset(SETTINGS);
    let whole = dir.command(&format!("{RUN} whole")).json();
    assert_eq!((whole["steps"].as_u64(), whole["ended"].as_str()), (Some(STEPS), Some("completed")));
    let lines = dir.text("whole/metrics.jsonl");
    let has = |key: &str| lines.lines().filter(|line| line.contains(key)).count() as u64;
    // 64 steps, windows of 1, 2 and 5 steps, and evaluations after steps 30, 60 and 64.
    assert_eq!((has("grad_norm"), has("\"train\""), has("\"eval\"")), (STEPS, 20 + 10 + 4, 3));
    // Every tenth step has a checkpoint, and every third checkpoint has all tables. Two checkpoints are kept, and
    // those on which they build.
    assert_eq!(checkpoints(&dir.path("whole")), [40, 60, 64]);
    // The steps are in the middle of an epoch, at an evaluation, and at the end of an epoch.
    for steps in [17, 30, 32] {
        let name = format!("parts-{steps}");
        let part = dir.command(&format!("{RUN} {name} --max-steps {steps}")).json();
        assert_eq!((part["steps"].as_u64(), part["ended"].as_str()), (Some(steps), Some("max_steps")));
        let rest = dir.command(&format!("{RUN} {name} --resume")).json();
        assert_eq!(rest["resumed_from_step"].as_u64(), Some(steps));
        assert_equal_runs(&dir, "whole", &name);
        for key in ["samples", "loss", "ne", "auc", "auc_error", "calibration", "losses", "dedupe_factor"] {
            assert_eq!(whole[key], rest[key], "{key}");
        }
        assert_eq!(whole["eval"]["ne"], rest["eval"]["ne"]);
    }
    // All steps are done, and another run changes nothing.
    let again = dir.command(&format!("{RUN} whole --resume")).json();
    assert_eq!(
        (again["steps"].as_u64(), again["eval"]["ne"].clone()),
        (Some(STEPS), whole["eval"]["ne"].clone())
    );
    assert_equal_runs(&dir, "whole", "parts-17");
}

/// Waits until `moment` returns true or the process ends. Returns whether `moment` returned true.
fn wait_for(child: &mut Child, moment: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if moment() {
            return true;
        }
        assert!(started.elapsed() < Duration::from_secs(600), "nothing happened within ten minutes");
        std::thread::sleep(Duration::from_micros(500));
    }
    false
}

/// A size that is smaller than all tables in a checkpoint, and larger than the changes of one step.
const LIMIT_KIB: u64 = 300;
/// The signal for a file that is too large.
const SIGXFSZ: i32 = 25;

#[test]
fn a_run_killed_while_it_writes_checkpoints_goes_on_from_the_one_before() {
    let dir = with_dataset("\n[checkpoint]\nevery_steps = 1\nkeep = 1\nfull_every = 2\n");
    dir.command(&format!("{RUN} whole")).works();
    let run = dir.path("killed");
    let half_written = || checkpoint_folders(&run).iter().any(|(_, whole)| !whole);
    let newest = || checkpoints(&run).last().copied().unwrap_or(0);
    let mut last = 0;
    // The steps are in the middle of an epoch, before its last step, and at its end. The changes of one step are
    // smaller than the limit, and all tables are larger, so the process is killed while it writes its first or second
    // checkpoint.
    for steps in [1, 15, 31, 32, 50] {
        dir.command(&format!("{RUN} killed --resume --max-steps {steps}")).works();
        assert_eq!(newest(), steps);
        let status = dir.command(&format!("{RUN} killed --resume")).killed_beyond(LIMIT_KIB).output().status;
        assert_eq!(status.signal(), Some(SIGXFSZ), "{status}");
        last = newest();
        assert!(half_written() && (steps..steps + 2).contains(&last), "{steps} {last}");
    }
    let rest = dir.command(&format!("{RUN} killed --resume")).json();
    assert_eq!(rest["resumed_from_step"].as_u64(), Some(last));
    assert_equal_runs(&dir, "whole", "killed");
    assert!(!half_written(), "{:?}", checkpoint_folders(&run));
}

#[test]
fn a_signal_ends_training_with_a_checkpoint_and_success() {
    let dir = with_dataset("");
    dir.edit("logs/train.toml", "epochs = 2", "epochs = 40");
    dir.command(&format!("{RUN} whole --max-steps 300")).works();
    let run = dir.path("run");
    let metrics = || fs_err::metadata(run.join("metrics.jsonl")).map_or(0, |file| file.len());
    let mut last = 0;
    // One run gets both signals, the second one after it is resumed.
    for (signal, resume) in [("TERM", ""), ("INT", "--resume")] {
        let begun = metrics();
        let mut child = dir.command(&format!("{RUN} run --max-steps 300 {resume}")).spawn();
        // The process waits for a line. Starting a process at the right time could take longer than the training.
        let script = format!("read -r && kill -{signal} {}", child.id());
        let mut sender = Command::new("bash").args(["-c", &script]).stdin(Stdio::piped()).spawn().unwrap();
        assert!(wait_for(&mut child, || metrics() > begun), "the run ended too early");
        writeln!(sender.stdin.take().unwrap()).unwrap();
        assert!(sender.wait().unwrap().success());
        assert!(child.wait().unwrap().success(), "SIG{signal} must end the run with success");
        let newest = checkpoints(&run).last().copied().unwrap_or(0);
        assert!((last + 1..300).contains(&newest), "{last} {newest}");
        last = newest;
        assert!(!run.join("model.safetensors").exists());
    }
    dir.command("onefold-train eval run --data dataset").fails(&["training is not complete", "--resume"]);
    let rest = dir.command(&format!("{RUN} run --max-steps 300 --resume")).json();
    assert_eq!(rest["resumed_from_step"].as_u64(), Some(last));
    assert_equal_runs(&dir, "whole", "run");
}

#[test]
fn checkpoints_that_cannot_be_resumed_from() {
    let dir = with_dataset("\n[checkpoint]\nevery_steps = 4\nfull_every = 3\n");
    let resume = format!("{RUN} run --resume --max-steps 12");
    dir.command(&format!("{RUN} run --max-steps 8")).works();
    let newest = "run/checkpoints/step-000000000008";
    let damage = |name: &str, bytes: &[u8], parts: &[&str]| {
        let whole = dir.read(name);
        dir.write(name, bytes);
        dir.command(&resume).fails(parts);
        dir.write(name, whole);
    };
    for file in ["dense.safetensors", "tables.safetensors", "state.safetensors"] {
        let name = format!("{}/{file}", files_of(&dir, newest));
        let mut bytes = dir.read(&name);
        damage(&name, &bytes[..bytes.len() / 2], &[&name, "were written", "resume from the one before"]);
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        damage(&name, &bytes, &[&name, "checksum", "resume from the one before"]);
    }
    let description = format!("{newest}/checkpoint.json");
    let text = dir.text(&description);
    damage(&description, &text.as_bytes()[..text.len() / 2], &[&description, "EOF", "damaged"]);
    for version in [2, 9] {
        let other = text.replacen("\"format_version\": 3", &format!("\"format_version\": {version}"), 1);
        let message = format!("format version {version}, this program reads 3");
        damage(&description, other.as_bytes(), &[&message, "the program that wrote it"]);
    }
    let foreign = text.replacen("\"run\": \"", "\"run\": \"0", 1);
    damage(&description, foreign.as_bytes(), &[newest, "the checkpoint of another run"]);
    // The newest checkpoint contains only the rows that changed since this one.
    let base = dir.path("run/checkpoints/step-000000000004");
    fs_err::rename(&base, dir.path("aside")).unwrap();
    dir.command(&resume).fails(&["lacks the checkpoint `step-000000000004`"]);
    fs_err::rename(dir.path("aside"), &base).unwrap();
    damage("run/metrics.jsonl", b"", &["run/metrics.jsonl", "0 bytes", "begin a new run"]);

    for (from, to, part) in [
        ("seed = 1", "seed = 2", "`[train].seed`"),
        ("weight_decay = 0.01", "weight_decay = 0.02", "`[optimizer]`"),
        ("rows = 500", "rows = 501", "`[embedding]` or `[tables]`"),
        ("top_mlp = [32, 1]", "top_mlp = [16, 1]", "`[model]`"),
    ] {
        let text = dir.text("logs/train.toml");
        dir.edit("logs/train.toml", from, to);
        dir.command(&resume).fails(&[
            "`run`",
            &format!("another {part}"),
            "in another directory, with `--out`",
        ]);
        dir.write("logs/train.toml", text);
    }
    // The dataset has the same samples, but the next batches may differ.
    dir.command("onefold-ingest build logs/dataset.toml --out other").works();
    dir.command(&resume.replace("--data dataset", "--data other"))
        .fails(&["the run was begun on snapshot", "continue with the run's own dataset"]);
    // Without the newest checkpoint, the run continues from the previous one.
    dir.command(&format!("{RUN} run --overwrite --max-steps 8")).works();
    fs_err::remove_dir_all(dir.path(newest)).unwrap();
    let rest = dir.command(&resume).json();
    assert_eq!((rest["resumed_from_step"].as_u64(), rest["steps"].as_u64()), (Some(4), Some(12)));
}

/// A run continues with its original snapshot, whatever is committed in the meantime, as long as a vacuum keeps it.
#[test]
fn a_resumed_run_reads_its_own_snapshot() {
    let dir = with_dataset("\n[checkpoint]\nevery_steps = 4\n");
    let run = |name: &str, more: &str| format!("{RUN} {name} {more}");
    let whole = dir.command(&run("whole", "--max-steps 12")).json();
    dir.command(&run("part", "--max-steps 8")).works();
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    dir.command("onefold-data generate --workload rm3 --samples 1024 --seed 8 --out late").works();
    let appended = dir.command("onefold-ingest append late/dataset.toml --out dataset").json();
    assert_eq!((appended["changed"].as_bool(), appended["snapshot"].as_u64()), (Some(true), Some(2)));

    let rest = dir.command(&run("part", "--max-steps 12 --resume")).json();
    assert_eq!(rest["resumed_from_step"].as_u64(), Some(8));
    assert_eq!(rest["losses"], whole["losses"]);
    assert_equal_runs(&dir, "whole", "part");
    let described: Value = serde_json::from_str(&dir.text("part/run.json")).unwrap();
    assert_eq!(described["dataset"].as_str(), Some(snapshot.dataset.as_str()));
    assert_eq!(described["snapshot"].as_u64(), Some(snapshot.snapshot));
    dir.command(&run("part", "--max-steps 16 --resume --at 2"))
        .fails(&["the run was begun on snapshot 1", "continue with the run's own dataset and snapshot"]);

    // A new run reads the newest snapshot, or the requested one.
    dir.command(&run("first", "--max-steps 12 --at 1")).works();
    assert_equal_runs(&dir, "whole", "first");
    let newest = dir.command(&run("newest", "--max-steps 12")).json();
    assert_ne!(newest["losses"], whole["losses"]);
    let eval = |more: &str| {
        let line = format!("onefold-train eval whole --data dataset --threads 2 --checkpoint latest{more}");
        dir.command(&line).json()["loss"].clone()
    };
    assert_ne!(eval(" --at 1"), eval(""));
    assert_eq!(eval(" --at 2"), eval(""));

    dir.command("onefold-ingest vacuum dataset --keep 1 --older-than 0s").works();
    dir.command(&run("part", "--max-steps 16 --resume"))
        .fails(&["`dataset` has no snapshot 1", "snapshot 2"]);
    dir.command(&run("newest", "--max-steps 16 --resume")).works();
}

#[test]
fn training_stops_when_held_out_figures_get_no_better() {
    let settings = "
[evaluation]
every_steps = 4

[early_stopping]
metric = \"auc\"
patience = 2
";
    let dir = with_dataset(settings);
    // The model does not learn, so the first evaluation is the best one.
    dir.set("logs/train.toml", "learning_rate", "0.0");
    dir.edit("logs/train.toml", "weight_decay = 0.01\n", "");
    let run = dir.command(&format!("{RUN} run")).json();
    assert_eq!((run["steps"].as_u64(), run["ended"].as_str()), (Some(12), Some("early_stopping")));
    let evaluations: Vec<Value> = (dir.text("run/metrics.jsonl").lines())
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line.get("eval").is_some())
        .collect();
    let steps: Vec<_> = evaluations.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [4, 8, 12]);
    assert!(evaluations.iter().all(|line| line["eval"]["auc"] == run["eval"]["auc"]));
    assert_eq!(run["model_step"].as_u64(), Some(4));
}

#[test]
fn segments_tell_samples_apart() {
    let dir = Dir::new();
    crate::logs::write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.append("logs/train.toml", "\n[evaluation]\nsegments = [\"city\", \"history\"]\n");
    let run = dir.command(&format!("{RUN} run")).json();
    let samples = |feature: &str| -> u64 {
        let segments = run["eval"]["segments"][feature].as_object().unwrap();
        assert!(segments.len() > 1, "{segments:?}");
        segments.values().map(|segment| segment["clicked"]["samples"].as_u64().unwrap()).sum()
    };
    assert_eq!((samples("city"), samples("history")), (3, 3));
    let eval = dir.command("onefold-train eval run --data dataset --threads 2").json();
    assert_eq!(eval["segments"], run["eval"]["segments"]);
    dir.edit("logs/train.toml", "\"city\", ", "\"town\", ");
    dir.command(&format!("{RUN} other")).fails(&["`[evaluation].segments` has `town`", "hint"]);
}

pub(crate) const PREPROCESS: &str = "format_version = 1
[[step]]
op = \"bucketize\"
inputs = [\"age\"]
output = \"age_group\"
borders = [20, 40]
[[step]]
op = \"map_id\"
inputs = [\"city\"]
table_file = \"cities.txt\"
";

#[test]
fn a_run_preprocesses_in_training_and_evaluation() {
    let dir = Dir::new();
    crate::logs::write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    dir.edit("logs/train.toml", "[tables.history]", "[tables.age_group]\nrows = 3\n[tables.history]");
    dir.write("logs/steps.toml", PREPROCESS);
    dir.write("logs/cities.txt", "3\n1\n2\n");
    let run = dir.command(&format!("{RUN} run")).json();
    let groups: Vec<_> = run["dedupe_factor"].as_object().unwrap().keys().cloned().collect();
    assert!(groups.contains(&"per_sample".to_owned()), "{groups:?}");
    let other = dir.text("logs/cities.txt").replace('3', "4");
    dir.write("logs/cities.txt", other);
    dir.command(&format!("{RUN} run --resume")).fails(&["other preprocessing", "--out"]);
    // The run does not need the original files.
    fs_err::remove_dir_all(dir.path("logs")).unwrap();
    let eval = dir.command("onefold-train eval run --data dataset --threads 2").json();
    assert_eq!(eval["loss"], run["eval"]["loss"]);
}

#[test]
fn a_run_that_diverges_leaves_the_batch() {
    let dir = Dir::new();
    crate::logs::write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.command(&format!("{RUN} run")).works();
    let before = dir.files();
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    // ln(1 + x) of an age below -1 is NaN.
    let steps = "format_version = 1\n[[step]]\nop = \"clamp\"\ninputs = [\"age\"]\nmax = -2\n[[step]]\nop = \"log1p\"\ninputs = [\"age\"]\n";
    dir.write("logs/steps.toml", steps);
    let failed = dir.command(&format!("{RUN} run --overwrite")).output();
    let stderr = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{stderr}");
    for part in [
        "the loss is NaN at step 1",
        "`age` is NaN in sample 0",
        "run/diverged/batch.arrow",
        "lower the learning",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    let file = fs_err::File::open(dir.path("run/diverged/batch.arrow")).unwrap();
    let rows = FileReader::try_new(file, None).unwrap().next().unwrap().unwrap();
    assert_eq!(rows.num_rows(), 4);
    assert!(rows["age"].as_primitive::<Float32Type>().value(0).is_nan());
    // The previous run is kept in a directory beside the new one until a run is complete.
    assert_eq!(dir.read(".run.replaced/model.safetensors"), before[Path::new("run/model.safetensors")]);
    dir.edit("logs/train.toml", "\npreprocess = \"steps.toml\"", "");
    dir.command(&format!("{RUN} run --overwrite")).works();
    assert!(!dir.path(".run.replaced").exists());
    assert_eq!(dir.read("run/model.safetensors"), before[Path::new("run/model.safetensors")]);

    // If the learning rate is too high, the inputs are valid.
    dir.edit(
        "logs/train.toml",
        "kind = \"adagrad\"\nlearning_rate = 0.02",
        "kind = \"sgd\"\nlearning_rate = 1e38",
    );
    let failed = dir.command(&format!("{RUN} other")).output();
    let stderr = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(stderr.contains("all inputs are finite") || stderr.contains("the gradient is not"), "{stderr}");
}

#[test]
fn a_model_beyond_the_memory_limit_is_refused() {
    let dir = Dir::new();
    crate::logs::write_logs(&dir);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.command(&format!("{RUN} run --memory-limit 4KiB")).fails(&[
        "the model takes",
        "4.0 KiB",
        "--memory-limit",
    ]);
    assert!(!dir.path("run").exists());
    dir.command(&format!("{RUN} run --memory-limit 256MiB")).works();
    // No machine has a tebibyte of memory.
    for (from, to) in
        [("rows = 100\n", "rows = 4000000000\n"), ("dim = 4\n", "dim = 1024\n"), ("[8, 4]", "[8, 1024]")]
    {
        dir.edit("logs/train.toml", from, to);
    }
    dir.command(&format!("{RUN} large")).fails(&[
        "the model takes",
        "on this machine",
        "TiB",
        "--memory-limit",
    ]);
    assert!(!dir.path("large").exists());
}

#[test]
fn a_checkpoint_that_does_not_fit_leaves_the_one_before() {
    let dir = with_dataset("\n[checkpoint]\nevery_steps = 16\n");
    dir.command(&format!("{RUN} whole")).works();
    dir.command(&format!("{RUN} run --max-steps 16")).works();
    // The tables have more than 800 KiB, and everything else less than 200 KiB.
    let failed = dir.command(&format!("{RUN} run --resume")).with_file_limit(400).output();
    let stderr = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("step-000000000032") && stderr.contains("hint: "), "{stderr}");
    assert_eq!(checkpoints(&dir.path("run")), [16]);
    let rest = dir.command(&format!("{RUN} run --resume")).json();
    assert_eq!(rest["resumed_from_step"].as_u64(), Some(16));
    assert_equal_runs(&dir, "whole", "run");
    // A run without a checkpoint also remains, and starts from the beginning.
    dir.command(&format!("{RUN} none")).with_file_limit(400).fails_late(&["tables.safetensors"]);
    assert!(checkpoints(&dir.path("none")).is_empty());
    dir.command(&format!("{RUN} none --resume")).works();
    assert_equal_runs(&dir, "whole", "none");
}

/// Only the held-out samples have a dense feature from which the model computes NaN.
#[test]
fn a_model_whose_evaluation_fails_is_kept() {
    let dir = Dir::new();
    crate::logs::write_logs(&dir);
    let years = "SELECT f.*, CASE WHEN e.split = 'holdout' THEN -5.0 ELSE f.age END AS years,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", years);
    dir.edit("logs/dataset.toml", "age = { kind = \"dense\" }", "years = { kind = \"dense\" }");
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.edit("logs/train.toml", "label = \"clicked\"", "label = \"clicked\"\npreprocess = \"steps.toml\"");
    // ln(1 + x) of a number below -1 is NaN.
    dir.write("logs/steps.toml", "format_version = 1\n[[step]]\nop = \"log1p\"\ninputs = [\"years\"]\n");
    dir.command(&format!("{RUN} run"))
        .fails_late(&["the logit of `clicked` is NaN", "hint: clean the dense"]);
    let summary: Value = serde_json::from_str(&dir.text("run/summary.json")).unwrap();
    assert!(summary["eval"].is_null() && summary["ended"] == "completed", "{summary}");
    let eval = "onefold-train eval run --data dataset --threads 2 --partitions split=train";
    assert_eq!(dir.command(eval).json()["samples"], 9);
}

/// The model of any checkpoint equals the model of a run that ended at that step.
#[test]
fn a_checkpoint_is_evaluated_and_exported_by_itself() {
    let dir = with_dataset("\n[checkpoint]\nevery_steps = 4\nkeep = 3\nfull_every = 3\n");
    let run = dir.command(&format!("{RUN} run --max-steps 14")).json();
    assert_eq!(checkpoints(&dir.path("run")), [4, 8, 12, 14]);
    let eval = |run: &str, more: &str| {
        dir.command(&format!("onefold-train eval {run} --data dataset --threads 2{more}")).json()
    };
    let figures = |eval: &Value| (eval["loss"].clone(), eval["ne"].clone(), eval["auc"].clone());
    assert_eq!(figures(&eval("run", "")), figures(&run["eval"]));
    assert_eq!(eval("run", "")["steps"].as_u64(), Some(14));
    assert_eq!(figures(&eval("run", " --checkpoint latest")), figures(&run["eval"]));
    let earlier = dir.command(&format!("{RUN} earlier --max-steps 8")).json();
    for name in ["8", "step-000000000008"] {
        let of_checkpoint = eval("run", &format!(" --checkpoint {name}"));
        assert_eq!(figures(&of_checkpoint), figures(&earlier["eval"]));
        assert_eq!(of_checkpoint["steps"].as_u64(), Some(8));
    }
    let exported = dir.command("onefold-train export run --checkpoint 8 --out a").json();
    assert_eq!(exported["steps"].as_u64(), Some(8));
    dir.command("onefold-train export earlier --out b").works();
    for file in ["model.safetensors", "export.json"] {
        assert!(dir.read(format!("a/{file}")) == dir.read(format!("b/{file}")), "{file} differs");
    }

    let parts = ["the run has no checkpoint of step 9", "choose one of step 4, 8, 12, 14"];
    dir.command("onefold-train eval run --data dataset --checkpoint 9").fails(&parts);
    dir.command("onefold-train export run --checkpoint 9 --out c").fails(&parts);
    dir.command("onefold-train eval run --data dataset --checkpoint soon")
        .is_misused(&["soon", "give `latest`, a step, or the name of a checkpoint"]);
    let newest = format!("{}/tables.safetensors", files_of(&dir, "run/checkpoints/step-000000000014"));
    let mut bytes = dir.read(&newest);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    dir.write(&newest, bytes);
    dir.command("onefold-train eval run --data dataset --checkpoint latest").fails(&[&newest, "checksum"]);
    // The other checkpoints do not build on it, and the model of the run is a separate file.
    assert_eq!(eval("run", " --checkpoint 12")["steps"].as_u64(), Some(12));
    assert_eq!(figures(&eval("run", "")), figures(&run["eval"]));
    fs_err::remove_dir_all(dir.path("run/checkpoints")).unwrap();
    dir.command("onefold-train eval run --data dataset --checkpoint latest")
        .fails(&["the run has no checkpoints", "[checkpoint].every_steps"]);
}

/// Tables with 16-bit weights take half the bytes, are resumed bit for bit, and train as well.
#[test]
fn narrow_tables_train_resume_and_export() {
    let settings = "\n[checkpoint]\nevery_steps = 10\nkeep = 2\nfull_every = 3\n\n[tables.item_01]\ndtype = \"fp16\"\n\n[tables.item_02]\ndtype = \"fp32\"\n";
    let dir = with_dataset(settings);
    let wide = dir.command(&format!("{RUN} wide")).json();
    dir.set("logs/train.toml", "dim", "16\ndtype = \"bf16\"");
    let whole = dir.command(&format!("{RUN} whole")).json();
    for steps in [17, 32] {
        let name = format!("parts-{steps}");
        dir.command(&format!("{RUN} {name} --max-steps {steps}")).works();
        let rest = dir.command(&format!("{RUN} {name} --resume")).json();
        assert_eq!(rest["resumed_from_step"].as_u64(), Some(steps));
        assert_equal_runs(&dir, "whole", &name);
    }
    let number = |run: &Value, key: &str| run[key].as_f64().unwrap();
    // 24 of the 26 tables, with 500 rows of 16 weights, change from 4 to 2 bytes per weight. The other two have their
    // own data types.
    let (before, after) = (number(&wide, "parameter_bytes"), number(&whole, "parameter_bytes"));
    assert_eq!(before - after, 24.0 * 500.0 * 16.0 * 2.0);
    // Rounding noise is far smaller than the improvement by training. In the second epoch the model memorises
    // samples, and a loss close to zero is not meaningful, so the loss of the first epoch is compared.
    let first_epoch = |run: &Value| -> f64 {
        let losses = run["losses"].as_array().unwrap()[..32].iter();
        losses.map(|loss| loss.as_f64().unwrap()).sum::<f64>() / 32.0
    };
    let (a, b) = (first_epoch(&wide), first_epoch(&whole));
    assert!((a - b).abs() < 0.01 * a, "{a} {b}");
    let eval = dir.command("onefold-train eval whole --data dataset --threads 2").json();
    assert_eq!(eval["loss"], whole["eval"]["loss"]);
    dir.command("onefold-train export whole --out exported").works();
    let bytes = dir.read("exported/model.safetensors");
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    for (feature, dtype) in [("item_00", "BF16"), ("item_01", "F16"), ("item_02", "F32")] {
        let name = format!("sparse_arch.embedding_bag_collection.embedding_bags.t_{feature}.weight");
        assert_eq!(header[&name]["dtype"].as_str(), Some(dtype), "{name}");
    }
    // Other data types are another model.
    dir.edit("logs/train.toml", "dtype = \"bf16\"", "dtype = \"fp16\"");
    dir.command(&format!("{RUN} whole --resume")).fails(&["another `[embedding]` or `[tables]`"]);
    dir.edit("logs/train.toml", "dim = 16\ndtype = \"fp16\"", "dim = 16\ndtype = \"fp8\"");
    dir.command(&format!("{RUN} other")).fails(&["unknown variant `fp8`", "fp32"]);
}

#[test]
fn gradients_of_table_rows_are_clipped() {
    let dir = with_dataset("");
    let tables = "[optimizer.tables]\n";
    let run = |name: &str| dir.command(&format!("{RUN} {name} --max-steps 8")).json();
    let free = run("free");
    dir.edit("logs/train.toml", tables, "[optimizer.tables]\nmax_row_grad_norm = 1e6\n");
    // No gradient reaches this norm, so nothing changes.
    assert_eq!(run("loose")["losses"], free["losses"]);
    dir.edit("logs/train.toml", "max_row_grad_norm = 1e6", "max_row_grad_norm = 1e-9");
    let clipped = run("clipped")["losses"].clone();
    assert!(clipped[0] == free["losses"][0] && clipped[7] != free["losses"][7], "{clipped}");
    dir.edit("logs/train.toml", "max_row_grad_norm = 1e-9", "max_row_grad_norm = -1.0");
    dir.command(&format!("{RUN} other"))
        .fails(&["`[optimizer.tables].max_row_grad_norm` is -1", "give a positive norm"]);
}
