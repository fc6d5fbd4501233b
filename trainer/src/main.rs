//! `onefold-train`: trains and evaluates DLRMs.

mod describe;
mod report_command;
mod trace_command;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use onefold_base::fault::Explainer;
use onefold_base::process::available_threads;
use onefold_base::progress::{Reporter, Silent};
use onefold_base::units::{format_bytes, format_count, parse_bytes, parse_duration_micros};
use onefold_datasets::{PartitionFilter, PartitionKey, Snapshot};
use onefold_ikjt::{Dedupe, stored_at};
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use onefold_trainer::checkpoint::CheckpointChoice;
use onefold_trainer::command::{self, DeviceOption, LaunchArguments, RankOptions, Ranks};
use onefold_trainer::device::Accelerator;
use onefold_trainer::distributed::Collectives;
use onefold_trainer::run::{Run, WarmStarted, absolute};
use onefold_trainer::{
    Error, EvaluateOptions, Existing, Follow, Prepared, Stop, TrainConfig, TrainOptions, WarmStart, evaluate,
    export, predict,
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
    /// Train a model on every new partition of a dataset, as partitions are committed
    ///
    /// It waits for snapshots. For each new partition in the order of time, it evaluates the model on it, trains on it once
    /// and writes a checkpoint; `follow.jsonl` in RUN has a line for each. The same command goes on where a run that was
    /// killed or ended was. A partition that is changed after it was trained on is reported, and not trained on again.
    /// SIGTERM and Ctrl-C end it after the step that it is in, with a checkpoint and exit status 0.
    ///
    /// Example: onefold-train follow logs/train.toml --data dataset --out run --export-every 1
    Follow(FollowArguments),
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
    #[command(flatten)]
    job: JobArguments,
    /// The number of the dataset's snapshot [default: with `--resume` that of the run, otherwise the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// End after this many steps, those before a resumption included
    #[arg(long, value_name = "N")]
    max_steps: Option<u64>,
    /// Replace the run that is at `--out`, once the new one is complete
    #[arg(id = "existing = overwrite", long = "overwrite", conflicts_with = "existing = resume")]
    overwrite: bool,
    /// Go on from the newest checkpoint of the run that is at `--out`, or begin if there is none
    #[arg(id = "existing = resume", long = "resume")]
    resume: bool,
    /// Train on the partitions of one day or hour after the other, and evaluate on them before: the figures of a model
    /// that is trained every day
    #[arg(long)]
    progressive: bool,
}

#[derive(Debug, clap::Args)]
struct FollowArguments {
    #[command(flatten)]
    job: JobArguments,
    /// Begin to train when partitions of so many samples wait
    #[arg(long, value_name = "N", default_value_t = 1)]
    min_samples: u64,
    /// Begin to train when a partition has waited for so long, as `30m`, whatever the samples [default: wait for the
    /// samples]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    max_wait: Option<Duration>,
    /// Begin to train when a dense feature of what waits has this population stability index, as `0.25`, against the
    /// partition before, whatever the samples [default: wait for the samples]
    #[arg(long, value_name = "INDEX")]
    max_drift: Option<f64>,
    /// Train again on a partition whose labels `onefold-ingest relabel` has recomputed after the training on it [default:
    /// report the change]
    #[arg(long)]
    late_labels: bool,
    /// The time between two looks for a new snapshot, at most an hour
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_interval)]
    look_every: Duration,
    /// Export the model after every N partitions, to a folder of its own in RUN/exports, and name the newest one in
    /// RUN/exports/latest [default: no exports]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    export_every: Option<u64>,
    /// End after N partitions, those before a resumption included; partitions of one time count as one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    stop_after: Option<u64>,
    /// End after the partitions of this time, as `date=2024-05-02/hour=03` or, for all hours, `date=2024-05-02`
    #[arg(long, value_name = "PARTITION", value_parser = parse_partition)]
    until: Option<PartitionKey>,
}

/// The arguments of `run` and of `follow`.
#[derive(Debug, clap::Args)]
struct JobArguments {
    /// The configuration: data, model, tables, optimizers
    config: PathBuf,
    /// The dataset: a path or a URL, as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// Directory of the run: checkpoints, metrics, model, summary
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
    /// A folder for the checkpoints and the model that all ranks reach: a path, or a URL as `s3://bucket/folder`
    /// [default: RUN, or that of the run that goes on]
    #[arg(long, value_name = "LOCATION")]
    checkpoints: Option<PathBuf>,
    #[command(flatten)]
    shared: SharedArguments,
    /// A plan of `onefold-shard plan` for as many ranks as there are [default: every table whole, the largest first,
    /// each on the rank that has the fewest bytes]
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// The steps, counted from 1, of which every rank keeps a timeline for `onefold-train trace` [default: 10..20 on
    /// several ranks, none on one]
    #[arg(long, value_name = "FIRST..LAST", value_parser = trace_command::parse_steps)]
    trace_steps: Option<RangeInclusive<u64>>,
    /// Train the model of another run further: its parameters and optimizer state, with this configuration's partitions,
    /// learning rates and batch size, on any number of ranks. RUN is its directory, or the folder or URL of its
    /// checkpoints, and stays there until the new run is complete [default: what a run that goes on was begun with]
    #[arg(long, value_name = "RUN")]
    warm_start: Option<PathBuf>,
    /// A checkpoint of that run in place of its model: `latest`, or a step
    #[arg(long, value_name = "STEP", requires = "warm_start")]
    warm_start_checkpoint: Option<CheckpointChoice>,
    /// Train only on partitions that were committed after the snapshot of the run that `--warm-start` names
    #[arg(long, requires = "warm_start")]
    new_partitions: bool,
    /// Bytes for parameters, optimizer state and reading, as `8GiB`; a batch's activations come on top [default: the
    /// model must fit into the memory that the machine has left, and 1GiB is for reading]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory_limit: Option<u64>,
    #[command(flatten)]
    ranks: RankOptions,
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    parse_duration_micros(text).map(|micros| Duration::from_micros(micros.unsigned_abs()))
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    match interval <= Duration::from_secs(3600) {
        true => Ok(interval),
        false => Err(format!("`{text}` is more than an hour\n  hint: look more often, as every `10s`")),
    }
}

fn parse_partition(text: &str) -> Result<PartitionKey, String> {
    let key = PartitionKey::parse(text).filter(|key| !key.columns().is_empty());
    key.ok_or_else(|| format!("`{text}` is not a partition\n  hint: write it like `date=2024-05-02/hour=03`"))
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
            Command::Follow(arguments) => follow(arguments, printer),
            Command::Launch(arguments) => {
                command::launch(arguments, "`run`, `follow`, `eval` and `predict`", |cli: &Self| {
                    let command = &cli.command;
                    matches!(
                        command,
                        Command::Run(_) | Command::Follow(_) | Command::Eval(_) | Command::Predict(_)
                    )
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
    let RunArguments { job, at, max_steps, overwrite, resume, progressive } = arguments;
    let existing = match (overwrite, resume) {
        (true, _) => Existing::Overwrite,
        (false, true) => Existing::Resume,
        (false, false) => Existing::Refuse,
    };
    job.on_ranks("run", |collectives, device| {
        let resumed = resumed(job, existing, &**collectives)?;
        let options = TrainOptions {
            snapshot: at.or(resumed.snapshot),
            max_steps: *max_steps,
            existing,
            progressive: *progressive || resumed.progressive,
            ..job.options(&resumed, collectives, device)?
        };
        job.train(&options, "`--resume`", printer)
    })
}

fn follow(arguments: &FollowArguments, printer: &Printer) -> anyhow::Result<()> {
    let FollowArguments { job, min_samples, max_wait, max_drift, look_every, .. } = arguments;
    job.on_ranks("follow", |collectives, device| {
        let resumed = resumed(job, Existing::Resume, &**collectives)?;
        let follow = Follow {
            min_samples: *min_samples,
            max_wait: *max_wait,
            max_drift: *max_drift,
            late_labels: arguments.late_labels,
            look_every: *look_every,
            export_every: arguments.export_every,
            stop_after: arguments.stop_after,
            until: arguments.until.clone(),
            begun: resumed.run.clone(),
        };
        let options = TrainOptions {
            // All ranks begin with the same snapshot.
            snapshot: Some(newest_snapshot(job, &**collectives)?),
            existing: Existing::Resume,
            follow: Some(follow),
            ..job.options(&resumed, collectives, device)?
        };
        job.train(&options, "the same command", printer)
    })
}

/// Returns the number of the dataset's newest snapshot, which the lowest rank reads. Every rank must call it.
fn newest_snapshot(job: &JobArguments, collectives: &dyn Collectives) -> onefold_trainer::Result<u64> {
    let newest = collectives.agree_on(|| match collectives.rank() {
        0 => Ok(Snapshot::load_head(&stored_at(&job.data)?)?.snapshot),
        _ => Ok(0),
    })?;
    Ok(collectives.gather(&[newest as f64])?[0][0] as u64)
}

impl JobArguments {
    /// Runs the command `name` on the ranks of the job, of which this process is one.
    fn on_ranks(
        &self,
        name: &str,
        work: impl FnOnce(&Arc<dyn Collectives>, Option<Accelerator>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        Ranks::join(&self.ranks, self.shared.device.device)?.run(name, false, work)
    }

    /// Returns the training options that the commands `run` and `follow` share.
    fn options(
        &self,
        begun: &Begun,
        collectives: &Arc<dyn Collectives>,
        device: Option<Accelerator>,
    ) -> anyhow::Result<TrainOptions> {
        Ok(TrainOptions {
            dedupe: self.shared.dedupe,
            threads: self.shared.threads(),
            snapshot: None,
            streams: begun.streams,
            max_steps: None,
            plan: self.plan.clone(),
            trace_steps: self.trace_steps.clone(),
            collectives: Arc::clone(collectives),
            existing: Existing::Refuse,
            warm_start: begun.warm_start(self),
            progressive: false,
            follow: None,
            checkpoints: begun.checkpoints.clone(),
            memory_limit: self.memory_limit,
            device,
            stop: Stop::on_signals()?,
        })
    }

    /// Trains the model. `resumes_with` tells the user how to resume a run that was stopped.
    fn train(&self, options: &TrainOptions, resumes_with: &str, printer: &Printer) -> anyhow::Result<()> {
        let collectives = &options.collectives;
        let config = collectives.agree_on(|| Ok(TrainConfig::load(&self.config)?))?;
        let prepared = collectives.agree_on(|| Prepared::new(&config, &self.data, options))?;
        if collectives.rank() > 0 {
            prepared.train(&self.out, &Silent)?;
            return Ok(());
        }
        printer.remark(&describe::size(prepared.size(), collectives.size()));
        let summary = prepared.train(&self.out, printer)?;
        Ok(printer.summary(&describe::run(&summary, &self.out, resumes_with), &summary)?)
    }
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
    /// The description of the run.
    run: Option<Run>,
}

impl Begun {
    /// Returns the settings of `run`.
    fn of(run: Run, checkpoints: Option<PathBuf>) -> Self {
        Self {
            snapshot: Some(run.snapshot),
            streams: Some(run.streams),
            checkpoints: checkpoints.or_else(|| run.checkpoints.clone()),
            new_partitions: run.train_partitions.is_some(),
            warm_start: run.warm_start.clone(),
            progressive: run.progressive,
            run: Some(run),
        }
    }

    /// Returns the warm start that the options name, or else the warm start of the resumed run.
    fn warm_start(&self, job: &JobArguments) -> Option<WarmStart> {
        if let Some(run) = &job.warm_start {
            let (checkpoint, new_partitions) = (job.warm_start_checkpoint, job.new_partitions);
            return Some(WarmStart { run: run.clone(), checkpoint, new_partitions });
        }
        let WarmStarted { run, checkpoint, .. } = self.warm_start.clone()?;
        let checkpoint = checkpoint.map(CheckpointChoice::Step);
        Some(WarmStart { run, checkpoint, new_partitions: self.new_partitions })
    }
}

/// Returns the settings of the run that is resumed, as found by the lowest rank, because other machines may lack the
/// run's directory.
fn resumed(
    job: &JobArguments,
    existing: Existing,
    collectives: &dyn Collectives,
) -> onefold_trainer::Result<Begun> {
    let resumes = existing == Existing::Resume;
    let find = || {
        let checkpoints = job.checkpoints.as_deref().map(absolute).transpose()?;
        if collectives.rank() > 0 || !resumes {
            return Ok(Begun { checkpoints, ..Begun::default() });
        }
        // An existing run that cannot be read leads to an error later, when it is resumed.
        let here = Run::load(&job.out).ok();
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
    if !resumes {
        return Ok(own);
    }
    Ok(serde_json::from_slice(&bytes).map_err(std::io::Error::other)?)
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
