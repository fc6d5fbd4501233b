//! `make demo`: from the ratings of MovieLens-100K to a trained model, with the commands that a person would type.
//!
//! The program runs the workspace's binaries, reads the JSON that they print at the end, and prints the figures. It
//! can be interrupted at any time and run again.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use onefold_base::fault::{Explainer, Fault, Kind};
use onefold_base::units::{format_bytes, format_count};
use onefold_storage::commit::write_atomically;
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use serde_json::{Value, json};

/// The number of training runs with and without deduplication, which alternate. The median of their rates is printed.
const RUNS: usize = 3;

/// Run the whole path on MovieLens-100K and show the figures
#[derive(Debug, Parser)]
#[command(name = "onefold-demo", version)]
struct Cli {
    /// Directory of everything the demo makes
    #[arg(long, default_value = "target/demo")]
    out: PathBuf,
}

fn main() -> ExitCode {
    Program::of::<Cli>().main(std::env::args_os())
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[];

    fn output(&self) -> OutputOptions {
        OutputOptions::default()
    }

    fn run(&self, _: &Printer) -> anyhow::Result<()> {
        demo(&self.out)
    }
}

fn demo(out: &Path) -> anyhow::Result<()> {
    let started = Instant::now();
    fs_err::create_dir_all(out)?;
    let path = |name: &str| out.join(name).to_string_lossy().into_owned();
    let (logs, dataset, arrival, run) = (path("logs"), path("dataset"), path("arrival"), path("run"));
    let (dataset_config, train_config) = (format!("{logs}/dataset.toml"), format!("{logs}/train.toml"));
    let (tables, topology, plan) = (path("tables.json"), path("topology.json"), path("plan.json"));

    let log = call("onefold-data", &["fetch", "movielens-100k", "--out", &logs, "--overwrite"])?;
    let build = ["build", &dataset_config, "--overwrite"];
    let unclustered =
        call("onefold-ingest", &[&build[..], &["--order", "arrival", "--out", &arrival]].concat())?;
    let clustered =
        call("onefold-ingest", &[&build[..], &["--order", "session", "--out", &dataset]].concat())?;
    call("onefold-shard", &["tables", &train_config, "--data", &dataset, "--out", &tables, "--overwrite"])?;
    let one_rank = ["topology", "--ranks", "1", "--memory", "4GiB", "--out", &topology, "--overwrite"];
    call("onefold-shard", &one_rank)?;
    let planned = ["plan", "--tables", &tables, "--topology", &topology, "--out", &plan, "--overwrite"];
    call("onefold-shard", &planned)?;

    let mut rates = [Vec::new(), Vec::new()];
    let mut trained = Value::Null;
    for _ in 0..RUNS {
        for (dedupe, rates) in ["off", "exact"].iter().zip(&mut rates) {
            let arguments = ["run", &train_config, "--data", &dataset, "--out", &run, "--plan", &plan];
            trained =
                call("onefold-train", &[&arguments[..], &["--dedupe", dedupe, "--overwrite"]].concat())?;
            rates.push(number(&trained, "samples_per_second")?);
        }
    }
    let held_out = call("onefold-train", &["eval", &run, "--data", &dataset])?;

    let [off, exact] = rates.map(median);
    let summary = json!({
        "samples": clustered["samples"],
        "sessions": clustered["sessions"],
        "samples_per_session": clustered["samples_per_session"],
        "bytes_on_disk": { "raw_logs": log["bytes_on_disk"], "arrival": unclustered["bytes_on_disk"],
            "session": clustered["bytes_on_disk"] },
        "dedupe_factor": trained["dedupe_factor"],
        "samples_per_second": { "off": off, "exact": exact, "ratio": exact / off },
        "loss": held_out["loss"],
        "ne": held_out["ne"],
        "auc": held_out["auc"],
        "auc_error": held_out["auc_error"],
        "held_out_samples": held_out["samples"],
        "wall_seconds": started.elapsed().as_secs_f64(),
    });
    let text = serde_json::to_string_pretty(&summary)? + "\n";
    let file = out.join("summary.json");
    write_atomically(&file, text.as_bytes())?;
    let table = describe(&summary)?;
    writeln!(std::io::stdout().lock(), "\n{table}\nfigures: {}", file.display())?;
    Ok(())
}

/// Runs one of the workspace's binaries, which are in the same directory as this one, and returns the JSON that it
/// prints.
fn call(program: &str, arguments: &[&str]) -> anyhow::Result<Value> {
    let beside = std::env::current_exe()?.with_file_name(program);
    if !beside.is_file() {
        let message = format!("`{}` is missing", beside.display());
        bail!(Fault::new(Kind::Failed, message).hint("build everything with `make build`"));
    }
    writeln!(std::io::stderr().lock(), "$ {program} {}", arguments.join(" "))?;
    let output = Command::new(&beside)
        .args(arguments)
        .arg("--json")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not run `{}`", beside.display()))?;
    if !output.status.success() {
        bail!("`{program} {}` ended with {}; its error is above", arguments.join(" "), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    serde_json::from_str(last).with_context(|| format!("`{program}` ended with `{last}`, which is not JSON"))
}

fn number(value: &Value, key: &str) -> anyhow::Result<f64> {
    value[key].as_f64().with_context(|| format!("a summary lacks the number `{key}`"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the figures as a table for people.
fn describe(summary: &Value) -> anyhow::Result<String> {
    let count = |value: f64| format_count(value as u64);
    let bytes =
        |key: &str| Ok::<_, anyhow::Error>(format_bytes(number(&summary["bytes_on_disk"], key)? as u64));
    let rate = |key: &str| number(&summary["samples_per_second"], key);
    let mut rows = vec![
        ("samples".to_owned(), count(number(summary, "samples")?)),
        ("sessions".to_owned(), count(number(summary, "sessions")?)),
        ("samples per session".to_owned(), format!("{:.1}", number(summary, "samples_per_session")?)),
        ("storage, arrival order".to_owned(), bytes("arrival")?),
        ("storage, clustered".to_owned(), bytes("session")?),
    ];
    let groups = summary["dedupe_factor"].as_object().context("a summary has no dedupe factors")?;
    for (group, factor) in groups {
        rows.push((format!("dedupe factor, {group}"), format!("{:.2}", factor.as_f64().unwrap_or(f64::NAN))));
    }
    rows.extend([
        ("training, dedupe off".to_owned(), format!("{} samples/s", count(rate("off")?))),
        (
            "training, dedupe exact".to_owned(),
            format!("{} samples/s ({:.2} x)", count(rate("exact")?), rate("ratio")?),
        ),
        ("held-out samples".to_owned(), count(number(summary, "held_out_samples")?)),
        ("held-out loss".to_owned(), format!("{:.4}", number(summary, "loss")?)),
        ("held-out NE".to_owned(), format!("{:.4}", number(summary, "ne")?)),
        ("held-out AUC".to_owned(), format!("{:.4}", number(summary, "auc")?)),
        ("whole demo".to_owned(), format!("{:.1} s", number(summary, "wall_seconds")?)),
    ]);
    let mut table = String::from("MovieLens-100K, from ratings to a trained model\n");
    table.push_str(&"─".repeat(48));
    for (name, value) in rows {
        table.push_str(&format!("\n{name:<26} {value:>21}"));
    }
    table.push('\n');
    Ok(table)
}
