//! `onefold-train`: trains and evaluates DLRMs.

mod describe;
mod report_command;
mod trace_command;

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use onefold_base::fault::Explainer;
use onefold_base::process::available_threads;
use onefold_base::progress::{Reporter, Silent};
use onefold_base::units::{format_bytes, format_count, parse_bytes};
use onefold_datasets::{PartitionFilter, Snapshot};
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

/// Train DLRMs, with lookups and sequence layers computed once per distinct row
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
    /// SIGTERM and Ctrl-C end training after the current step, with a checkpoint and exit status 0. The same command
    /// with `--resume` continues from this checkpoint. TensorBoard can read the run during training.
    ///
    /// Example: onefold-train run logs/train.toml --data dataset --out run
    ///
    /// Example: onefold-train run logs/train.toml --data dataset --out tuesday --warm-start monday --new-partitions
    Run(RunArguments),
    /// Train a model on every new partition of a dataset, as partitions are committed
    ///
    /// The command waits for new snapshots. For each new partition, in the order of time, it evaluates the model,
    /// trains on the partition once, writes a checkpoint, and adds a line to `follow.jsonl` in RUN. The same command
    /// continues a run that was killed or has ended. A partition that is changed after training is reported, and not
    /// trained on again. SIGTERM and Ctrl-C end training after the current step, with a checkpoint and exit status 0.
    ///
    /// Example: onefold-train follow logs/train.toml --data dataset --out run --export-every 1
    Follow(Box<FollowArguments>),
    /// Start a command on several ranks of this machine, without Python
    ///
    /// Each rank is a process with its share of the machine's threads, and the environment that `torchrun` would give
    /// it. The first SIGTERM or Ctrl-C is passed on to all of them; the second one kills them. If a rank fails, the
    /// others end within 30 seconds. To use several machines, start the ranks with `torchrun --no-python`.
    ///
    /// Example: onefold-train launch --ranks 4 -- run logs/train.toml --data dataset --out run --plan plan.json
    Launch(LaunchArguments),
    /// Evaluate a trained model on a dataset's held-out partitions
    ///
    /// Example: onefold-train eval run --data dataset --partitions split=holdout
    Eval(EvalArguments),
    /// Write a trained model's predictions to a Parquet file, with the columns that join them to the logs
    ///
    /// The file has a row for each sample: the columns that `keep` in `dataset.toml` names, then `prediction` and
    /// `logit`.
    ///
    /// Example: onefold-train predict run --data dataset --partitions split=holdout --out predictions.parquet
    Predict(PredictArguments),
    /// Write a trained model in a form that PyTorch and TorchRec load
    ///
    /// The tensors in `model.safetensors` have the names of TorchRec's `DLRM`. `export.json` describes the order of
    /// ids, features and vectors.
    ///
    /// Example: onefold-train export run --out exported
    Export(ExportArguments),
    /// Draw the results of runs on one page: learning curves, calibration, metrics by day and by segment
    ///
    /// A run may still be training.
    ///
    /// Example: onefold-train report run other-run --html report.html
    Report(report_command::ReportArguments),
    /// Draw a timeline of the ranks in some steps of a run, as a page or as a trace for Perfetto
    ///
    /// `run --trace-steps FIRST..LAST` selects the steps. By default, several ranks trace steps 10 to 20.
    ///
    /// Example: onefold-train trace run --html timeline.html --chrome timeline.json
    Trace(trace_command::TraceArguments),
}

#[derive(Debug, clap::Args)]
struct RunArguments {
    #[command(flatten)]
    job: JobArguments,
    /// The number of the dataset's snapshot [default: with `--resume` the snapshot of the run, otherwise the newest
    /// one]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// End after this many steps, including those before a resumption
    #[arg(long, value_name = "N")]
    max_steps: Option<u64>,
    /// Replace the run in `--out` when the new run is complete
    #[arg(id = "existing = overwrite", long = "overwrite", conflicts_with = "existing = resume")]
    overwrite: bool,
    /// Continue from the newest checkpoint of the run in `--out`, or start from the beginning if it has no checkpoint
    #[arg(id = "existing = resume", long = "resume")]
    resume: bool,
    /// Train on the partitions of one day or hour after another, and evaluate on each day before training on it. This
    /// gives the metrics of a model that is trained daily
    #[arg(long)]
    progressive: bool,
}

#[derive(Debug, clap::Args)]
struct FollowArguments {
    #[command(flatten)]
    job: JobArguments,
    #[command(flatten)]
    follow: Follow,
}

/// The arguments of `run` and of `follow`.
#[derive(Debug, clap::Args)]
struct JobArguments {
    /// The configuration file `train.toml`
    config: PathBuf,
    /// The dataset: a path, or a URL such as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// The directory of the run: checkpoints, metrics, model and summary
    #[arg(long, value_name = "RUN")]
    out: PathBuf,
    /// A folder for the checkpoints and the model that all ranks can access: a path, or a URL such as
    /// `s3://bucket/folder` [default: RUN, or the folder of the resumed run]
    #[arg(long, value_name = "LOCATION")]
    checkpoints: Option<PathBuf>,
    #[command(flatten)]
    shared: SharedArguments,
    /// A plan from `onefold-shard plan` for this number of ranks [default: each table on one rank; tables are placed in
    /// descending order of size, each on the rank with the fewest bytes]
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,
    /// The steps, counted from 1, for which every rank writes a timeline for `onefold-train trace` [default: 10..20 on
    /// several ranks, none on one rank]
    #[arg(long, value_name = "FIRST..LAST", value_parser = trace_command::parse_steps)]
    trace_steps: Option<RangeInclusive<u64>>,
    /// Continue training the model of another run: its parameters and optimizer state, with the partitions, learning
    /// rates and batch size of this configuration, on any number of ranks. RUN is the run's directory, or the folder or
    /// URL of its checkpoints, and must exist until the new run is complete [default: the value with which a resumed
    /// run was started]
    #[arg(long, value_name = "RUN")]
    warm_start: Option<PathBuf>,
    /// Use a checkpoint of that run instead of its final model: `latest`, or a step
    #[arg(long, value_name = "STEP", requires = "warm_start")]
    warm_start_checkpoint: Option<CheckpointChoice>,
    /// Train only on partitions that were committed after the snapshot of the run in `--warm-start`
    #[arg(long, requires = "warm_start")]
    new_partitions: bool,
    /// The memory limit for parameters, optimizer state and the reader, such as `8GiB`. The activations of a batch are
    /// not included [default: the available memory for the model, and 1GiB for the reader]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    memory_limit: Option<u64>,
    #[command(flatten)]
    ranks: RankOptions,
}

#[derive(Debug, clap::Args)]
struct EvalArguments {
    /// The directory of the run, or the folder of its `--checkpoints`: a path or a URL
    run: PathBuf,
    /// The dataset: a path, or a URL such as `s3://bucket/folder`
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// The number of the dataset's snapshot [default: the newest one]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// A filter for the partitions, such as `split=holdout` or `city="Paris, TX"` [default: `eval` of the run's
    /// configuration]
    #[arg(long, value_name = "FILTER")]
    partitions: Option<PartitionFilter>,
    /// Use a checkpoint instead of the final model: `latest`, or a step [default: the model of the completed run]
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
    /// The output file: a path, or a URL such as `s3://bucket/folder/predictions.parquet`
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Replace the file in `--out` if it exists
    #[arg(long)]
    overwrite: bool,
    /// The columns of the dataset to add to the predictions, separated by commas: kept columns, or `session_id`
    /// [default: all kept columns]
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',')]
    keep: Vec<String>,
}

#[derive(Debug, clap::Args)]
struct ExportArguments {
    /// The directory of the run, or the folder of its `--checkpoints`: a path or a URL
    run: PathBuf,
    /// Use a checkpoint instead of the final model: `latest`, or a step [default: the model of the completed run]
    #[arg(long, value_name = "STEP")]
    checkpoint: Option<CheckpointChoice>,
    /// The directory of the exported model
    #[arg(long, value_name = "EXPORT")]
    out: PathBuf,
    /// Replace the exported model in `--out` if it exists
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, clap::Args)]
struct SharedArguments {
    /// How batches are deduplicated; the losses do not depend on it
    #[arg(long, value_enum, default_value_t = Dedupe::Window)]
    dedupe: Dedupe,
    #[command(flatten)]
    device: DeviceOption,
    /// The number of threads [default: the threads of the machine divided by the number of ranks on it]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl SharedArguments {
    fn threads(&self) -> usize {
        let own = || (available_threads() / command::ranks_here()).max(1);
        self.threads.map_or_else(own, usize::from)
    }
}

fn main() {
    command::main(Program::of::<Cli>())
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
                let commands = "`run`, `follow`, `eval` and `predict`";
                command::launch(arguments, self.output, commands, |cli: &Self| {
                    use Command::{Eval, Follow, Predict, Run};
                    matches!(cli.command, Run(_) | Follow(_) | Eval(_) | Predict(_))
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
    let FollowArguments { job, follow } = arguments;
    job.on_ranks("follow", |collectives, device| {
        let resumed = resumed(job, Existing::Resume, &**collectives)?;
        let follow = Follow { begun: resumed.run.clone(), ..follow.clone() };
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
    collectives.of_lowest(|| Ok(Snapshot::load_head(&stored_at(&job.data)?)?.snapshot))
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
        let is_first = collectives.rank() == 0;
        if is_first {
            printer.remark(&describe::size(prepared.size(), collectives.size()));
        }
        let summary = prepared.train(&self.out, if is_first { printer } else { &Silent })?;
        if !is_first {
            return Ok(());
        }
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
    let checkpoints = collectives.agree(job.checkpoints.as_deref().map(absolute).transpose())?;
    if existing != Existing::Resume {
        return Ok(Begun { checkpoints, ..Begun::default() });
    }
    collectives.of_lowest(|| {
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
    })
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
    let reporter: &dyn Reporter = if collectives.rank() > 0 { &Silent } else { printer };
    let summary = evaluate(&arguments.run, &arguments.data, &options, reporter)?;
    if collectives.rank() > 0 {
        return Ok(());
    }
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
