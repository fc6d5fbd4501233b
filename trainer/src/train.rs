//! The training loop.

use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onefold_datasets::Manifest;
use onefold_datasets::commit::StagedDirectory;
use onefold_datasets::console::{Reporter, peak_rss_bytes};
use onefold_ikjt::{Batch, Dedupe, Reader, ReaderOptions};
use onefold_sharding::{Plan, TableConfig};
use serde::Serialize;

use crate::checkpoint::{RUN_FILE, Run};
use crate::config::ParameterCount;
use crate::evaluate::{EvaluationSummary, checked_rows, evaluate_model, open_for_evaluation};
use crate::metrics::BinaryMetrics;
use crate::model::Model;
use crate::optimizer::DenseOptimizer;
use crate::{Error, Result, TrainConfig};

/// Losses of this many steps stand in the summary; all of them stand in `metrics.jsonl`.
const SUMMARY_LOSSES: usize = 10_000;

/// How a model is trained.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Whether batches are deduplicated. The losses are the same up to the order of 32-bit sums.
    pub dedupe: Dedupe,
    /// Threads of libtorch and of the tables; half as many read.
    pub threads: usize,
    /// Ends training after this many steps.
    pub max_steps: Option<u64>,
    /// A plan to execute; all tables are on this rank without one.
    pub plan: Option<PathBuf>,
    /// Whether an existing run is replaced.
    pub overwrite: bool,
}

/// What a training run did.
#[derive(Debug, Clone, Serialize)]
pub struct TrainSummary {
    /// Samples trained on, over all epochs.
    pub samples: u64,
    /// Steps taken.
    pub steps: u64,
    /// Mean loss over the run, in nats.
    pub loss: f64,
    /// Normalized entropy of the predictions made before each step.
    pub ne: Option<f64>,
    /// AUC of the same.
    pub auc: Option<f64>,
    /// The loss of every step, for runs of up to 10,000 steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub losses: Option<Vec<f64>>,
    /// Dedupe factor by group; 1 with deduplication off.
    pub dedupe_factor: BTreeMap<String, f64>,
    /// Size of the model.
    pub parameters: ParameterCount,
    /// Bytes of the parameters and their optimizer state.
    pub parameter_bytes: u64,
    /// Time of the training loop.
    pub wall_seconds: f64,
    /// `samples / wall_seconds`.
    pub samples_per_second: f64,
    /// The share of the loop's time in which it waited for batches.
    pub waiting_share: f64,
    /// Largest resident set of the process, where the kernel tells.
    pub peak_rss_bytes: Option<u64>,
    /// Figures on the evaluation partitions, if the configuration names any.
    pub eval: Option<EvaluationSummary>,
}

/// Trains the model of `config` on `dataset` and leaves the run in `out`, where it appears when it is complete:
/// `model.safetensors`, `run.json`, `train.toml`, `metrics.jsonl`, `summary.json`.
///
/// # Errors
///
/// What [`TrainConfig::tables`] finds wrong, before anything is allocated; [`Error::Sharding`] for a plan that cannot be
/// run here; [`Error::Read`] for damaged data; [`Error::Diverged`] if the loss is not finite. `out` is then untouched.
pub fn train(
    config: &TrainConfig,
    dataset: &Path,
    out: &Path,
    options: &TrainOptions,
    reporter: &dyn Reporter,
) -> Result<TrainSummary> {
    let manifest = Manifest::load(dataset).map_err(onefold_ikjt::Error::from)?;
    let tables = config.tables(&manifest)?;
    let common = ReaderOptions {
        dedupe: options.dedupe,
        threads: options.threads.div_ceil(2),
        table_rows: checked_rows(&tables),
        ..ReaderOptions::new(config.train.batch_size)
    };
    let partitions = config.train_partitions()?;
    let reader = Reader::open(dataset, ReaderOptions { partitions, ..common.clone() })?;
    if let Some(plan) = &options.plan {
        let checked = Plan::load(plan).and_then(|plan| plan.check_single_rank(&tables));
        checked.map_err(|source| Error::Sharding { path: plan.clone(), source })?;
    }
    let schema = &reader.manifest().schema;
    let parameters = config.parameters(&tables, schema.dense.len());
    let staged = StagedDirectory::create(out, RUN_FILE, options.overwrite)?;
    tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
    let model = Model::new(config, schema, &tables, options.threads)?;
    let mut training = Training::new(config, model, staged.path())?;
    training.run(&reader, config.train.epochs, options.max_steps, reporter)?;
    let mut summary = training.summary(parameters);
    if let Some(partitions) = config.eval_partitions()? {
        let reader = open_for_evaluation(dataset, &manifest, ReaderOptions { partitions, ..common })?;
        summary.eval = Some(evaluate_model(&training.model, &reader, reporter)?);
    }
    store(&training, config, &tables, &summary, &reader, staged)?;
    Ok(summary)
}

fn store(
    training: &Training,
    config: &TrainConfig,
    tables: &[TableConfig],
    summary: &TrainSummary,
    reader: &Reader,
    staged: StagedDirectory,
) -> Result<()> {
    let schema = &reader.manifest().schema;
    let directory = staged.path();
    let text = toml::to_string(config).map_err(std::io::Error::other)?;
    fs_err::write(directory.join("train.toml"), text)?;
    let json = serde_json::to_string_pretty(summary).map_err(std::io::Error::other)?;
    fs_err::write(directory.join("summary.json"), json + "\n")?;
    Run::new(config, schema, tables, training.steps).store(&training.model, directory)?;
    Ok(staged.commit()?)
}

/// The state of a training loop.
struct Training {
    model: Model,
    optimizer: DenseOptimizer,
    tables: crate::config::TableOptimizerConfig,
    metrics: BinaryMetrics,
    losses: Vec<f64>,
    loss_sum: f64,
    steps: u64,
    samples: u64,
    values: BTreeMap<String, (u64, u64)>,
    log: BufWriter<fs_err::File>,
    wall: Duration,
    waited: Duration,
}

/// A line of `metrics.jsonl`.
#[derive(Serialize)]
struct LogLine {
    step: u64,
    samples: u64,
    loss: f64,
}

impl Training {
    fn new(config: &TrainConfig, model: Model, directory: &Path) -> Result<Self> {
        let optimizer = DenseOptimizer::new(&config.optimizer.dense, model.dense_parameters());
        Ok(Self {
            model,
            optimizer,
            tables: config.optimizer.tables.clone(),
            metrics: BinaryMetrics::new(),
            losses: Vec::new(),
            loss_sum: 0.0,
            steps: 0,
            samples: 0,
            values: BTreeMap::new(),
            log: BufWriter::new(fs_err::File::create(directory.join("metrics.jsonl"))?),
            wall: Duration::ZERO,
            waited: Duration::ZERO,
        })
    }

    fn run(
        &mut self,
        reader: &Reader,
        epochs: u32,
        max_steps: Option<u64>,
        reporter: &dyn Reporter,
    ) -> Result<()> {
        let total = reader.samples().saturating_mul(u64::from(epochs));
        reporter.begin("training", Some(total), "samples");
        let started = Instant::now();
        'epochs: for _ in 0..epochs {
            let mut batches = reader.batches()?;
            while let Some(batch) = batches.next() {
                if max_steps.is_some_and(|max| self.steps >= max) {
                    self.waited += batches.waited();
                    break 'epochs;
                }
                let batch = batch?;
                let loss = self.step(&batch)?;
                reporter.advance(batch.size() as u64);
                if self.steps.is_multiple_of(20) {
                    let ne = self.metrics.ne().unwrap_or(f64::NAN);
                    reporter.note(&format!("loss {loss:.4}  ne {ne:.4}"));
                }
            }
            self.waited += batches.waited();
        }
        self.wall = started.elapsed();
        self.log.flush()?;
        reporter.end();
        Ok(())
    }

    /// One step: forward, loss, backward, updates.
    fn step(&mut self, batch: &Batch) -> Result<f64> {
        let forward = self.model.forward(batch)?;
        let loss = self.model.loss(&forward.logits, batch);
        let value = loss.double_value(&[]);
        self.steps += 1;
        if !value.is_finite() {
            return Err(Error::Diverged { step: self.steps, loss: value });
        }
        let gradients = self.model.backward(batch, &forward, &loss);
        self.optimizer.step();
        self.model.embeddings.update(&forward.lookups, &gradients, &self.tables);
        self.record(batch, &forward.logits, value)?;
        Ok(value)
    }

    fn record(&mut self, batch: &Batch, logits: &tch::Tensor, loss: f64) -> Result<()> {
        self.samples += batch.size() as u64;
        self.loss_sum += loss * batch.size() as f64;
        if self.losses.len() < SUMMARY_LOSSES {
            self.losses.push(loss);
        }
        self.model.add_predictions(&mut self.metrics, batch, logits);
        for group in batch.groups() {
            let (samples, rows) = self.values.entry(group.name().to_owned()).or_default();
            *samples += group.sample_values();
            *rows += group.row_values();
        }
        serde_json::to_writer(&mut self.log, &LogLine { step: self.steps, samples: self.samples, loss })
            .map_err(std::io::Error::from)?;
        Ok(self.log.write_all(b"\n")?)
    }

    fn summary(&self, parameters: ParameterCount) -> TrainSummary {
        let wall_seconds = self.wall.as_secs_f64();
        let factor = |(name, (samples, rows)): (&String, &(u64, u64))| {
            (name.clone(), if *rows == 0 { 1.0 } else { *samples as f64 / *rows as f64 })
        };
        TrainSummary {
            samples: self.samples,
            steps: self.steps,
            loss: self.loss_sum / self.samples.max(1) as f64,
            ne: self.metrics.ne(),
            auc: self.metrics.auc(),
            losses: (self.steps as usize <= SUMMARY_LOSSES).then(|| self.losses.clone()),
            dedupe_factor: self.values.iter().map(factor).collect(),
            parameters,
            parameter_bytes: parameters.bytes(),
            wall_seconds,
            samples_per_second: self.samples as f64 / wall_seconds,
            waiting_share: self.waited.as_secs_f64() / wall_seconds,
            peak_rss_bytes: peak_rss_bytes(),
            eval: None,
        }
    }
}
