//! `onefold-train`: trains and evaluates DLRMs.

mod describe;
mod report_command;
mod trace_command;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use onefold_base::fault::Explainer;
use onefold_base::process::available_threads;
use onefold_base::progress::{Reporter, Silent};
use onefold_base::units::{format_bytes, format_count, parse_bytes};
use onefold_datasets::PartitionFilter;
use onefold_ikjt::Dedupe;
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use onefold_trainer::checkpoint::CheckpointChoice;
use onefold_trainer::command::{self, DeviceOption, LaunchArguments, RankOptions, Ranks};
use onefold_trainer::device::Accelerator;
use onefold_trainer::distributed::Collectives;
use onefold_trainer::run::{Run, WarmStarted, absolute};
use onefold_trainer::{
    Error, EvaluateOptions, Existing, Prepared, Stop, TrainConfig, TrainOptions, WarmStart, evaluate, export,
    predict,
};
use serde::{Deserialize, Serialize};

onefold_allocator::use_jemalloc!(onefold_allocator::KEEPING);

/// Train DLRMs that compute every distinct row once
#[derive(Debug, Parser)]
#[command(name = "onefold-train", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train the model of a `train.toml` on a dataset
    ///
    /// SIGTERM and Ctrl-C end it after the step that it is in, with a checkpoint and exit status 0; the same command
    /// with `--resume` goes on from there. TensorBoard reads the run while it is trained.
    ///
    /// Example: onefold-train run logs/train.toml --data dataset --out run
    ///
    /// Example: onefold-train run logs/train.toml --data dataset --out tuesday --warm-start monday --new-partitions
    Run(RunArguments),
    /// Start a command on several ranks of this machine, without Python
    ///
    /// Each rank is a process with its share of the machine's threads, and the environment that `torchrun` would give
    /// it. SIGTERM and Ctrl-C reach all of them. If a rank fails, the others end within 30 seconds. Over several
    /// machines start the ranks with `torchrun --no-python`.
    ///
    /// Example: onefold-train launch --ranks 4 -- run logs/train.toml --data dataset --out run --plan plan.json
    Launch(LaunchArguments),
    /// Evaluate a trained model on a dataset's held-out partitions
    ///
    /// Example: onefold-train eval run --data dataset --partitions split=holdout
    Eval(EvalArguments),
    /// Write a trained model's predictions to a Parquet file, with the columns that join them to the logs
    ///
    /// A row a sample: the columns that `keep` in `dataset.toml` names, then `prediction` and `logit`.
    ///
    /// Example: onefold-train predict run --data dataset --partitions split=holdout --out predictions.parquet
    Predict(PredictArguments),
    /// Write a trained model as PyTorch and TorchRec load it
    ///
    /// `model.safetensors` has the names of TorchRec's `DLRM`, and `export.json` says how ids, features and vectors are
    /// ordered.
    ///
    /// Example: onefold-train export run --out exported
    Export(ExportArguments),
    /// Draw what runs came to, side by side: curves, calibration, days, segments
    ///
    /// A run may go on meanwhile.
    ///
    /// Example: onefold-train report run other-run --html report.html
    Report(report_command::ReportArguments),
    /// Draw what the ranks of a run did in some of its steps: a page, and a trace for Perfetto
    ///
    /// `run --trace-steps FIRST..LAST` says which steps; on several ranks 10 to 20 are traced by default.
    ///
    /// Example: onefold-train trace run --html timeline.html --chrome timeline.json
    Trace(trace_command::TraceArguments),
}

#[derive(Debug, clap::Args)]
struct RunArguments {
    /// The configuration: data, model, tables, optimizers
    config: PathBuf,
    /// The dataset: a path or a URL, as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// The number of the dataset's snapshot [default: with `--resume` that of the run, otherwise the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// Directory of the run: checkpoints, metrics, model, summary
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
    /// A folder for the checkpoints and the model that all ranks reach: a path, or a URL as `s3://bucket/folder`
    /// [default: RUN; with `--resume` that of the run]
    #[arg(long, value_name = "LOCATION")]
    checkpoints: Option<PathBuf>,
    #[command(flatten)]
    shared: SharedArguments,
    /// End after this many steps, those before a resumption included
    #[arg(long, value_name = "N")]
    max_steps: Option<u64>,
    /// A plan of `onefold-shard plan` for as many ranks as there are [default: every table whole, the largest first,
    /// each on the rank that has the fewest bytes]
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// The steps, counted from 1, of which every rank keeps a timeline for `onefold-train trace` [default: 10..20 on
    /// several ranks, none on one]
    #[arg(long, value_name = "FIRST..LAST", value_parser = trace_command::parse_steps)]
    trace_steps: Option<RangeInclusive<u64>>,
    /// Replace the run that is at `--out`, once the new one is complete
    #[arg(id = "existing = overwrite", long = "overwrite", conflicts_with = "existing = resume")]
    overwrite: bool,
    /// Go on from the newest checkpoint of the run that is at `--out`, or begin if there is none
    #[arg(id = "existing = resume", long = "resume")]
    resume: bool,
    /// Train the model of another run further: its parameters and optimizer state, with this configuration's partitions,
    /// learning rates and batch size, on any number of ranks. RUN is its directory, or the folder or URL of its
    /// checkpoints, and stays there until the new run is complete [default: with `--resume` what the run was begun with]
    #[arg(long, value_name = "RUN")]
    warm_start: Option<PathBuf>,
    /// A checkpoint of that run in place of its model: `latest`, or a step
    #[arg(long, value_name = "STEP", requires = "warm_start")]
    warm_start_checkpoint: Option<CheckpointChoice>,
    /// Train only on partitions that were committed after the snapshot of the run that `--warm-start` names
    #[arg(long, requires = "warm_start")]
    new_partitions: bool,
    /// Train on the partitions of one day or hour after the other, and evaluate on them before: the figures of a model
    /// that is trained every day
    #[arg(long)]
    progressive: bool,
    /// Bytes for parameters, optimizer state and reading, as `8GiB`; a batch's activations come on top [default: the
    /// model must fit into the memory that the machine has left, and 1GiB is for reading]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory_limit: Option<u64>,
    #[command(flatten)]
    ranks: RankOptions,
}

#[derive(Debug, clap::Args)]
struct EvalArguments {
    /// Directory of the run, or the folder that its `--checkpoints` named: a path or a URL
    run: PathBuf,
    /// The dataset: a path or a URL, as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// The number of the dataset's snapshot [default: the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// Which partitions, as `split=holdout` or `city="Paris, TX"` [default: those that the run's configuration names]
    #[arg(long, value_name = "FILTER")]
    partitions: Option<PartitionFilter>,
    /// A checkpoint in place of the run's model: `latest`, or a step [default: the model of the completed run]
    #[arg(long, value_name = "STEP")]
    checkpoint: Option<CheckpointChoice>,
    #[command(flatten)]
    shared: SharedArguments,
    #[command(flatten)]
    ranks: RankOptions,
}

#[derive(Debug, clap::Args)]
struct PredictArguments {
    #[command(flatten)]
    eval: EvalArguments,
    /// The file to write: a path or a URL, as `s3://bucket/folder/predictions.parquet`
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace the file that is at `--out`
    #[arg(long)]
    overwrite: bool,
    /// Columns of the dataset beside the predictions, separated by commas: kept ones, or `session_id` [default: all kept
    /// ones]
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',')]
    keep: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct ExportArguments {
    /// Directory of the run, or the folder that its `--checkpoints` named: a path or a URL
    run: PathBuf,
    /// A checkpoint in place of the run's model: `latest`, or a step [default: the model of the completed run]
    #[arg(long, value_name = "STEP")]
    checkpoint: Option<CheckpointChoice>,
    /// Directory of the exported model
    #[arg(long, value_name = "EXPORT")]
    out: PathBuf,
    /// Replace the exported model that is at `--out`
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, clap::Args)]
struct SharedArguments {
    /// Whether batches are deduplicated; the losses are the same
    #[arg(long, value_enum, default_value_t = Dedupe::Window)]
    dedupe: Dedupe,
    #[command(flatten)]
    device: DeviceOption,
    /// Threads [default: all that the machine has, divided by the ranks on it]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl SharedArguments {
    fn threads(&self) -> usize {
        let own = || (available_threads() / command::ranks_here()).max(1);
        self.threads.map_or_else(own, usize::from)
    }
}

fn main() -> ExitCode {
    command::set_environment();
    Program::of::<Cli>().main(std::env::args_os())
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = command::ERRORS;

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> anyhow::Result<()> {
        match &self.command {
            Command::Run(arguments) => run(arguments, printer),
            Command::Launch(arguments) => {
                command::launch(arguments, "`run`, `eval` and `predict`", |cli: &Self| {
                    matches!(cli.command, Command::Run(_) | Command::Eval(_) | Command::Predict(_))
                })
            }
            Command::Eval(arguments) => eval(arguments, printer),
            Command::Predict(arguments) => predictions(arguments, printer),
            Command::Export(arguments) => {
                let summary =
                    export(&arguments.run, arguments.checkpoint, &arguments.out, arguments.overwrite)?;
                let text = format!(
                    "exported the model of step {}: {} tensors, {} parameters, {}, to {}",
                    format_count(summary.steps),
                    summary.tensors,
                    format_count(summary.parameters),
                    format_bytes(summary.bytes_on_disk),
                    arguments.out.display()
                );
                Ok(printer.summary(&text, &summary)?)
            }
            Command::Report(arguments) => report_command::run(arguments, printer),
            Command::Trace(arguments) => trace_command::run(arguments, printer),
        }
    }
}

fn run(arguments: &RunArguments, printer: &Printer) -> anyhow::Result<()> {
    let ranks = Ranks::join(&arguments.ranks, arguments.shared.device.device)?;
    ranks.run("run", false, |collectives, device| train(arguments, collectives, device, printer))
}

/// The settings that a resumed run takes from its first start, if the options do not set them.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Begun {
    snapshot: Option<u64>,
    streams: Option<usize>,
    checkpoints: Option<PathBuf>,
    warm_start: Option<WarmStarted>,
    new_partitions: bool,
    progressive: bool,
}

impl Begun {
    /// Returns the settings of `run`.
    fn of(run: Run, checkpoints: Option<PathBuf>) -> Self {
        Self {
            snapshot: Some(run.snapshot),
            streams: Some(run.streams),
            checkpoints: checkpoints.or(run.checkpoints),
            new_partitions: run.train_partitions.is_some(),
            warm_start: run.warm_start,
            progressive: run.progressive,
        }
    }

    /// Returns the warm start that the options name, or else the warm start of the resumed run.
    fn warm_start(&self, arguments: &RunArguments) -> Option<WarmStart> {
        if let Some(run) = &arguments.warm_start {
            let (checkpoint, new_partitions) = (arguments.warm_start_checkpoint, arguments.new_partitions);
            return Some(WarmStart { run: run.clone(), checkpoint, new_partitions });
        }
        let WarmStarted { run, checkpoint, .. } = self.warm_start.clone()?;
        let checkpoint = checkpoint.map(CheckpointChoice::Step);
        Some(WarmStart { run, checkpoint, new_partitions: self.new_partitions })
    }
}

/// Returns the settings of the run that is resumed, as found by the lowest rank, because other machines may
/// lack the run's directory.
fn resumed(arguments: &RunArguments, collectives: &dyn Collectives) -> onefold_trainer::Result<Begun> {
    let find = || {
        let checkpoints = arguments.checkpoints.as_deref().map(absolute).transpose()?;
        if collectives.rank() > 0 || !arguments.resume {
            return Ok(Begun { checkpoints, ..Begun::default() });
        }
        // An existing run that cannot be read leads to an error later, when it is resumed.
        let here = Run::load(&arguments.out).ok();
        let run = match (here, &checkpoints) {
            (None, Some(there)) => match Run::load(there) {
                Err(Error::Run(_)) => None,
                run => Some(run?),
            },
            (here, _) => here,
        };
        let Some(run) = run else { return Ok(Begun { checkpoints, ..Begun::default() }) };
        Ok(Begun::of(run, checkpoints))
    };
    let own = collectives.agree_on(find)?;
    let bytes = serde_json::to_vec(&own).map_err(std::io::Error::other)?;
    let bytes = collectives.broadcast_bytes(&bytes, 0)?;
    if !arguments.resume {
        return Ok(own);
    }
    Ok(serde_json::from_slice(&bytes).map_err(std::io::Error::other)?)
}

fn train(
    arguments: &RunArguments,
    collectives: &Arc<dyn Collectives>,
    device: Option<Accelerator>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let config = collectives.agree_on(|| Ok(TrainConfig::load(&arguments.config)?))?;
    let existing = match (arguments.overwrite, arguments.resume) {
        (true, _) => Existing::Overwrite,
        (false, true) => Existing::Resume,
        (false, false) => Existing::Refuse,
    };
    let resumed = resumed(arguments, &**collectives)?;
    let options = TrainOptions {
        dedupe: arguments.shared.dedupe,
        threads: arguments.shared.threads(),
        snapshot: arguments.at.or(resumed.snapshot),
        streams: resumed.streams,
        max_steps: arguments.max_steps,
        plan: arguments.plan.clone(),
        trace_steps: arguments.trace_steps.clone(),
        collectives: Arc::clone(collectives),
        existing,
        warm_start: resumed.warm_start(arguments),
        progressive: arguments.progressive || resumed.progressive,
        checkpoints: resumed.checkpoints,
        memory_limit: arguments.memory_limit,
        device,
        stop: Stop::on_signals()?,
    };
    let prepared = collectives.agree_on(|| Prepared::new(&config, &arguments.data, &options))?;
    if collectives.rank() > 0 {
        prepared.train(&arguments.out, &Silent)?;
        return Ok(());
    }
    printer.remark(&describe::size(prepared.size(), collectives.size()));
    let summary = prepared.train(&arguments.out, printer)?;
    Ok(printer.summary(&describe::run(&summary, &arguments.out), &summary)?)
}

fn eval(arguments: &EvalArguments, printer: &Printer) -> anyhow::Result<()> {
    let ranks = Ranks::join(&arguments.ranks, arguments.shared.device.device)?;
    ranks.run("eval", false, |collectives, device| evaluate_run(arguments, collectives, device, printer))
}

impl EvalArguments {
    fn options(&self, collectives: &Arc<dyn Collectives>, device: Option<Accelerator>) -> EvaluateOptions {
        EvaluateOptions {
            dedupe: self.shared.dedupe,
            threads: self.shared.threads(),
            checkpoint: self.checkpoint,
            collectives: Arc::clone(collectives),
            snapshot: self.at,
            device,
            partitions: self.partitions.clone(),
        }
    }
}

fn evaluate_run(
    arguments: &EvalArguments,
    collectives: &Arc<dyn Collectives>,
    device: Option<Accelerator>,
    printer: &Printer,
) -> anyhow::Result<()> {
    let options = arguments.options(collectives, device);
    if collectives.rank() > 0 {
        evaluate(&arguments.run, &arguments.data, &options, &Silent)?;
        return Ok(());
    }
    let summary = evaluate(&arguments.run, &arguments.data, &options, printer)?;
    Ok(printer.summary(&describe::evaluation(&summary), &summary)?)
}

fn predictions(arguments: &PredictArguments, printer: &Printer) -> anyhow::Result<()> {
    let PredictArguments { eval, out, overwrite, keep } = arguments;
    let ranks = Ranks::join(&eval.ranks, eval.shared.device.device)?;
    ranks.run("predict", false, |collectives, device| {
        let options = eval.options(collectives, device);
        let reporter: &dyn Reporter = if collectives.rank() > 0 { &Silent } else { printer };
        let summary = predict(&eval.run, &eval.data, (out, *overwrite), keep, &options, reporter)?;
        if collectives.rank() > 0 {
            return Ok(());
        }
        let text = format!(
            "predicted {} samples, {} samples/s: {}, {}, in {}",
            format_count(summary.samples),
            format_count(summary.samples_per_second as u64),
            summary.columns.join(", "),
            format_bytes(summary.bytes_on_disk),
            out.display()
        );
        Ok(printer.summary(&text, &summary)?)
    })
}
