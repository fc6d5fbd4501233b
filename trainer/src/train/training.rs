//! The training loop.

mod begin;
mod finish;
mod follow;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use onefold_base::fault::{Fault, Kind};
use onefold_base::progress::Reporter;
use onefold_ikjt::{Batches, Reader};

use self::begin::begin;
use super::clock::Clock;
use super::early_stopping::Seen;
use super::follow::Follower;
use super::log::{Line, Log, METRICS_FILE, Window, tagged, tagged_by_task};
use super::model_state::{optimizer_entries, restore, take_over};
use super::parts::Parts;
use super::progress::PartitionFigures;
use super::state::Sums;
use super::step::{Stepper, Taken};
use super::{Ending, Prepared, Progress};
use crate::checkpoint::{CheckpointParts, Checkpoints, dense_entries};
use crate::device::guarded;
use crate::distributed::Collectives;
use crate::evaluate::{Evaluated, Evaluation, EvaluationSummary, by_task, merged};
use crate::metrics::{Figures, Metrics, TaskMetrics};
use crate::model::Model;
use crate::optimizer::DenseOptimizer;
use crate::run::Run;
use crate::stop::Stop;
use crate::trace::{Activity, RankFigures, Watch};
use crate::{Error, Result, TrainConfig};

/// The maximum number of losses in the summary; `metrics.jsonl` has all losses.
const SUMMARY_LOSSES: usize = 10_000;
/// The interval at which the note next to the progress bar is updated.
const NOTE_EVERY: Duration = Duration::from_millis(200);

/// A training loop on one of its ranks.
pub(super) struct Training<'a> {
    config: &'a TrainConfig,
    evaluation: &'a Evaluation<'a>,
    stop: &'a Stop,
    max_steps: Option<u64>,
    stepper: Stepper<'a>,
    progress: Progress,
    parts: Parts<'a>,
    /// The reader of the current part.
    reader: Arc<Reader>,
    /// The follower, which finds new parts, if the run follows its dataset.
    follower: Option<Follower<'a>>,
    /// The batches from the first position on, which are read ahead.
    ahead: Option<Batches>,
    sums: Sums,
    /// The logs; only on the lowest rank.
    log: Option<Log>,
    checkpoints: Checkpoints<Progress>,
    /// The path of the metrics log, if checkpoints must contain a copy of it for other machines.
    carried_metrics: Option<PathBuf>,
    /// The step of the newest checkpoint.
    checkpointed: Option<u64>,
    last_evaluation: Option<EvaluationSummary>,
    /// The best evaluation of this process according to early stopping.
    best_evaluation: Option<EvaluationSummary>,
    /// The step and the number of training samples of the model that early stopping has restored.
    put_back: Option<(u64, u64)>,
    clock: Clock,
    watch: Watch,
}

impl<'a> Training<'a> {
    /// Creates a loop before its first step, or restores it from the newest checkpoint of the run in
    /// `directory`.
    pub(super) fn new(
        prepared: &'a Prepared<'_>,
        evaluation: &'a Evaluation<'a>,
        run: &Run,
        directory: &Path,
    ) -> Result<Self> {
        let (config, options) = (prepared.config, prepared.options);
        let kept = &config.checkpoint;
        let files = run.files(directory)?;
        let mut checkpoints = Checkpoints::new(files, run.identity(), kept.keep, kept.full_every);
        let newest = checkpoints.newest(&*options.collectives)?;
        let earlier = prepared.earlier.as_ref().filter(|_| newest.is_none());
        let earlier = earlier.map(|earlier| earlier.stored(&*options.collectives)).transpose()?;
        let trained = earlier.as_ref().map(|(_, stored)| stored.trained).unwrap_or_default();
        let mut parts = Parts::of(prepared);
        let (progress, reader) =
            options.collectives.agree_on(|| begin(prepared, &mut parts, newest.as_ref(), trained))?;
        let follower =
            options.collectives.agree_on(|| Follower::of(prepared, run, directory, &progress.followed))?;
        // The reader reads ahead while the tables are initialized.
        let has_part = match &follower {
            Some(_) => progress.followed.current.is_some(),
            None => progress.partition < parts.len(),
        };
        let unfinished = has_part && progress.position.epoch < u64::from(config.train.epochs);
        let resume =
            || unfinished.then(|| reader.resume(&progress.position)).transpose().map_err(Error::from);
        let ahead = options.collectives.agree_on(resume)?;
        let (placement, device) = (&prepared.placement, options.device.as_ref());
        let mut model =
            options.collectives.agree_on(|| run.initial_model(placement, options.threads, device))?;
        let optimizer = || DenseOptimizer::of(&model, &config.optimizer.dense, options.threads);
        let mut optimizer = guarded(model.device(), optimizer)?;
        let mut sums = Sums::new(&evaluation.tasks);
        if let Some(checkpoint) = &newest {
            let restore = || restore(checkpoint, &mut model, &mut optimizer, &mut sums);
            options.collectives.agree_on(restore)?;
        }
        if let Some((location, stored)) = &earlier {
            let take_over = || take_over(location, stored, &mut model, &mut optimizer, &mut sums);
            options.collectives.agree_on(take_over)?;
        }
        let checkpointed = newest.is_some().then_some(progress.steps);
        let first_step = progress.steps + u64::from(newest.is_some());
        let open_log = || {
            newest.iter().try_for_each(|checkpoint| checkpoint.restore_metrics(directory))?;
            Log::open(directory, progress.metrics_bytes, first_step)
        };
        let log =
            options.collectives.agree_on(|| (options.collectives.rank() == 0).then(open_log).transpose())?;
        let stepper = Stepper::new(prepared, evaluation, directory, model, optimizer);
        Ok(Self {
            config,
            evaluation,
            stop: &options.stop,
            max_steps: options.max_steps,
            stepper,
            progress,
            parts,
            reader,
            follower,
            ahead,
            sums,
            log,
            checkpoints,
            carried_metrics: run.checkpoints.is_some().then(|| directory.join(METRICS_FILE)),
            checkpointed,
            last_evaluation: None,
            best_evaluation: None,
            put_back: None,
            clock: Clock { resumed_from_step: checkpointed, ..Clock::default() },
            watch: Watch::new(directory, options.trace_steps.clone(), &*options.collectives),
        })
    }

    /// Returns whether this process or an earlier one has taken steps.
    pub(super) fn has_begun(&self) -> bool {
        self.progress.steps > 0 || self.checkpointed.is_some()
    }

    /// Returns the current model.
    pub(super) fn model(&self) -> &Model {
        &self.stepper.model
    }

    fn collectives(&self) -> &dyn Collectives {
        &**self.stepper.model.embeddings.collectives()
    }

    /// Takes steps until training ends, for any reason. Afterwards `metrics.jsonl` is complete and a checkpoint
    /// exists, so the steps need not be repeated if a later operation fails.
    pub(super) fn run(
        &mut self,
        samples: u64,
        held_out: Option<&Reader>,
        reporter: &dyn Reporter,
    ) -> Result<Ending> {
        let ended = match self.follower {
            Some(_) => self.follow(reporter)?,
            None => self.train_on_parts(samples, held_out, reporter)?,
        };
        if ended == Ending::Completed && self.progress.samples == 0 {
            let message = "there was no sample to train on";
            let hint = "choose partitions with samples by `[data].train`, and see what `sampling` leaves of them in \
                        `preprocess.toml`";
            return Err(Fault::new(Kind::Data, message).hint(hint).into());
        }
        self.checkpoint()?;
        self.log.as_mut().map_or(Ok(()), Log::flush)?;
        reporter.end();
        Ok(ended)
    }

    /// Takes steps until all parts are done, or training ends.
    fn train_on_parts(
        &mut self,
        samples: u64,
        held_out: Option<&Reader>,
        reporter: &dyn Reporter,
    ) -> Result<Ending> {
        let epochs = u64::from(self.config.train.epochs);
        let total = samples.saturating_mul(epochs * u64::from(self.collectives().size()));
        self.show(total, reporter);
        let mut ended = self.settle(held_out, total, reporter)?;
        while ended.is_none() && self.progress.partition < self.parts.len() {
            ended = self.evaluate_ahead(total, reporter)?;
            if ended.is_none() {
                ended = self.train_on_part(held_out, total, reporter)?;
            }
            if ended.is_none() {
                self.next_part()?;
            }
        }
        Ok(ended.unwrap_or(Ending::Completed))
    }

    /// Takes steps until all epochs of a part are complete, or training ends.
    fn train_on_part(
        &mut self,
        held_out: Option<&Reader>,
        total: u64,
        reporter: &dyn Reporter,
    ) -> Result<Option<Ending>> {
        let (reader, epochs) = (Arc::clone(&self.reader), u64::from(self.config.train.epochs));
        while self.progress.position.epoch < epochs {
            let (ahead, position) = (self.ahead.take(), &self.progress.position);
            let resume = || ahead.map_or_else(|| reader.resume(position).map_err(Error::from), Ok);
            let mut batches = self.collectives().agree_on(resume)?;
            self.stepper.begin(&mut batches, self.stop)?;
            loop {
                if self.stepper.stops {
                    return Ok(Some(Ending::Stopped));
                }
                if !self.next_step(&mut batches, reporter)? {
                    break;
                }
                let ended = self.settle(held_out, total, reporter)?;
                if ended.is_some() {
                    return Ok(ended);
                }
            }
            self.progress.position = reader.position(self.progress.position.epoch + 1);
        }
        Ok(None)
    }

    /// Continues with the next part, if there is one.
    fn next_part(&mut self) -> Result<()> {
        self.progress.partition += 1;
        if self.progress.partition < self.parts.len() {
            let open = || self.parts.open(self.progress.partition);
            self.reader = self.collectives().agree_on(open)?;
            self.progress.position = self.reader.position(0);
        }
        Ok(())
    }

    /// Evaluates on a part before training on it, unless the model has not been trained yet.
    fn evaluate_ahead(&mut self, total: u64, reporter: &dyn Reporter) -> Result<Option<Ending>> {
        let progress = &self.progress;
        let learned = progress.steps > 0 || progress.samples_before > 0;
        let begun = (progress.position.epoch, progress.position.step) != (0, 0);
        let Some(name) = self.parts.name(progress.partition).filter(|_| learned && !begun) else {
            return Ok(None);
        };
        let is_of_part = |last: &PartitionFigures| last.partition == name && last.steps == progress.steps;
        if progress.progressive.last().is_some_and(is_of_part) {
            return Ok(None);
        }
        let name = name.to_owned();
        let started = Instant::now();
        let reader = self.collectives().agree_on(|| self.parts.open_ahead(progress.partition))?;
        let evaluated = self.evaluation.run(&self.stepper.model, &reader, self.stop, reporter)?;
        let Some(Evaluated { summary, metrics }) = evaluated else { return Ok(Some(Ending::Stopped)) };
        self.clock.evaluation += started.elapsed();
        self.show(total, reporter);
        self.sums.progressive.merge(&metrics);
        let Figures { samples, loss, ne, auc, calibration, rmse, .. } = summary.figures;
        let (step, trained) = (self.progress.steps, self.progress.samples);
        let (steps, partition) = (step, name.clone());
        let figures = PartitionFigures { partition, steps, samples, loss, ne, auc, calibration, rmse };
        self.progress.progressive.push(figures);
        let Some(log) = &mut self.log else { return Ok(None) };
        let figures = summary.without_times();
        let (partition, progressive) = (Some(name.as_str()), Some(&figures));
        log.line(&Line { step, samples: trained, partition, progressive, ..Line::default() })?;
        let scalars = tagged_by_task("progressive", &summary.figures, &summary.tasks);
        log.scalars(step, scalars.iter().map(|(name, value)| (name.as_str(), *value)))?;
        Ok(None)
    }

    /// Starts the progress bar again.
    fn show(&self, total: u64, reporter: &dyn Reporter) {
        reporter.begin("training", Some(total), "samples");
        reporter.advance(self.progress.samples);
    }

    /// Performs the work that is due between two steps: an evaluation, a checkpoint, or the end of training.
    fn settle(
        &mut self,
        held_out: Option<&Reader>,
        total: u64,
        reporter: &dyn Reporter,
    ) -> Result<Option<Ending>> {
        let mut is_best = false;
        if self.progress.evaluation_due
            && let Some(held_out) = held_out
        {
            let Some(summary) = self.evaluate(held_out, true, reporter)? else {
                return Ok(Some(Ending::Stopped));
            };
            self.show(total, reporter);
            is_best = self.see(&summary);
            let ends = |config| self.progress.early_stopping.should_stop(config);
            self.progress.stopped_early = self.config.early_stopping.as_ref().is_some_and(ends);
            self.last_evaluation = Some(summary);
            self.progress.evaluation_due = false;
        }
        let by_steps = is_due(self.config.checkpoint.every_steps, self.progress.steps);
        // If the run follows its dataset, `end_part` writes the checkpoint after the last step of a part.
        let ends_part = self.follower.is_some() && !self.stepper.has_next();
        if (is_best || by_steps || self.stepper.checkpoint_due) && !ends_part {
            self.checkpoint()?;
        }
        if self.progress.stopped_early {
            return Ok(Some(Ending::EarlyStopping));
        }
        Ok(self.max_steps.is_some_and(|max| self.progress.steps >= max).then_some(Ending::MaxSteps))
    }

    /// Takes a step with the next batch; returns whether there was one.
    fn next_step(&mut self, batches: &mut Batches, reporter: &dyn Reporter) -> Result<bool> {
        let (started, waited) = (Instant::now(), batches.waited());
        let sent = self.stepper.sent_bytes();
        let Some(taken) = self.stepper.next(batches, &self.progress, self.stop)? else { return Ok(false) };
        self.progress.position = taken.position.clone();
        self.progress.optimizer_steps = self.stepper.optimizer.steps();
        self.stepper.recorder().turn_to(Activity::Record);
        self.record(&taken)?;
        let sent = self.stepper.sent_bytes() - sent;
        self.watch.end_step(self.progress.steps, self.stepper.recorder(), sent)?;
        self.progress.evaluation_due = is_due(self.config.evaluation.every_steps, self.progress.steps);
        self.clock.samples += taken.samples;
        self.clock.waited += batches.waited() - waited;
        self.clock.training += started.elapsed();
        reporter.advance(taken.samples);
        if self.config.train.logs_at(self.progress.steps) {
            self.log_window()?;
        }
        self.note(taken.loss, reporter);
        Ok(true)
    }

    fn record(&mut self, taken: &Taken) -> Result<()> {
        let (progress, sums) = (&mut self.progress, &mut self.sums);
        progress.steps += 1;
        progress.samples += taken.samples;
        sums.loss_watch.add(progress.steps, taken.loss);
        sums.loss_sum += taken.loss * taken.samples as f64;
        if sums.losses.len() < SUMMARY_LOSSES {
            sums.losses.push(taken.loss);
        }
        sums.window.add(&taken.batch, &taken.logits);
        for (group, (of_samples, of_rows)) in taken.batch.groups().iter().zip(&taken.values) {
            let (samples, rows) = progress.values.entry(group.name().to_owned()).or_default();
            *samples += of_samples;
            *rows += of_rows;
        }
        let (step, samples) = (progress.steps, progress.samples);
        let (loss, grad_norm) = (Some(taken.loss), Some(taken.norm));
        let evicted_rows = taken.evicted_rows;
        progress.evicted_rows += evicted_rows.unwrap_or(0);
        let Some(log) = &mut self.log else { return Ok(()) };
        log.line(&Line { step, samples, loss, grad_norm, evicted_rows, ..Line::default() })?;
        match evicted_rows {
            Some(rows) => log.scalars(step, [("tables/evicted_rows", rows as f64)]),
            None => Ok(()),
        }
    }

    /// Logs the metrics since the last window.
    fn log_window(&mut self) -> Result<()> {
        let (dense, table_rate) = self.stepper.learning_rates;
        let window = merged(&self.sums.window, &self.evaluation.tasks, self.collectives())?;
        let (figures, tasks) = (window.first(), by_task(&window));
        self.sums.before.merge(&window);
        self.sums.window = TaskMetrics::new(&self.evaluation.tasks);
        let (step, samples) = (self.progress.steps, self.progress.samples);
        let rates = self.clock.end_window();
        let ranks = self.watch.end_window(&**self.stepper.model.embeddings.collectives())?;
        let mut scalars = tagged_by_task("train", &figures, &tasks);
        for (name, value) in [
            ("train/samples_per_second", rates.samples_per_second),
            ("train/waiting_share", rates.waiting_share),
            ("learning_rate/dense", dense),
            ("learning_rate/tables", f64::from(table_rate)),
        ] {
            scalars.push((name.to_owned(), value));
        }
        scalars.extend(ranks.iter().flat_map(RankFigures::scalars));
        let (learning_rate_dense, learning_rate_tables) = (dense, f64::from(table_rate));
        let kernels = self.stepper.model.kernels();
        let train = Window { figures, tasks, learning_rate_dense, learning_rate_tables, kernels };
        let Some(log) = &mut self.log else { return Ok(()) };
        log.line(&Line { step, samples, train: Some(train), ranks, ..Line::default() })?;
        log.scalars(step, scalars.iter().map(|(name, value)| (name.as_str(), *value)))
    }

    fn note(&mut self, loss: f64, reporter: &dyn Reporter) {
        if self.clock.noted.is_some_and(|noted| noted.elapsed() < NOTE_EVERY) {
            return;
        }
        self.clock.noted = Some(Instant::now());
        let rates = self.clock.rates.unwrap_or_else(|| self.clock.rates_since_window());
        reporter.note(&format!(
            "loss {loss:.4}  {}  {:.0} samples/s  {:.1} % waiting",
            headlines(&self.sums.window),
            rates.samples_per_second,
            100.0 * rates.waiting_share
        ));
    }

    /// Evaluates the model, and logs the metrics if `logged`; returns `None` if it was stopped.
    fn evaluate(
        &mut self,
        held_out: &Reader,
        logged: bool,
        reporter: &dyn Reporter,
    ) -> Result<Option<EvaluationSummary>> {
        let started = Instant::now();
        let evaluated = self.evaluation.run(&self.stepper.model, held_out, self.stop, reporter)?;
        let Some(Evaluated { summary, .. }) = evaluated else { return Ok(None) };
        self.clock.evaluation += started.elapsed();
        let (step, samples) = (self.progress.steps, self.progress.samples);
        if logged {
            self.progress.evaluated_at = Some(step);
        }
        if let Some(log) = self.log.as_mut().filter(|_| logged) {
            let eval = summary.without_times();
            log.line(&Line { step, samples, eval: Some(&eval), ..Line::default() })?;
            let mut scalars = tagged_by_task("eval", &summary.figures, &summary.tasks);
            for (feature, segments) in &summary.segments {
                for (segment, tasks) in segments {
                    for (task, figures) in tasks {
                        scalars.extend(tagged(&format!("eval/{feature}/{segment}/{task}"), figures));
                    }
                }
            }
            log.scalars(step, scalars.iter().map(|(name, value)| (name.as_str(), *value)))?;
        }
        Ok(Some(summary))
    }

    /// Passes an evaluation of the current model to early stopping; returns whether it is the best one so far.
    fn see(&mut self, summary: &EvaluationSummary) -> bool {
        let Some(config) = &self.config.early_stopping else { return false };
        let (figures, step) = (summary.of_task(config.task.as_deref()), self.progress.steps);
        let seen = self.progress.early_stopping.see(config, figures, step);
        if seen == Seen::Undefined && self.log.is_some() {
            let metric = format!("{:?}", config.metric).to_lowercase();
            tracing::warn!(
                "early stopping does not count the evaluation after step {step}, because its samples have no `{metric}`: \
                 where all labels are equal, there is neither `auc` nor `ne`"
            );
        }
        if seen == Seen::Best {
            self.best_evaluation = Some(summary.clone());
        }
        seen == Seen::Best
    }

    /// Returns the step of the best evaluation, if early stopping is enabled.
    fn best_step(&self) -> Option<u64> {
        self.config.early_stopping.as_ref().and(self.progress.early_stopping.best_step)
    }

    /// Writes a checkpoint of this step, unless there is one.
    fn checkpoint(&mut self) -> Result<()> {
        self.stepper.begin_checkpoint_interval();
        if self.checkpointed == Some(self.progress.steps) {
            return Ok(());
        }
        let started = Instant::now();
        let collectives = Arc::clone(self.stepper.model.embeddings.collectives());
        let sync = || self.log.as_mut().map_or(Ok(0), Log::sync);
        self.progress.metrics_bytes = collectives.agree_on(sync)?;
        let kept_step = self.best_step();
        let Stepper { model, optimizer, .. } = &self.stepper;
        let mut dense = dense_entries(model);
        dense.extend(optimizer_entries(optimizer));
        let full = self.checkpoints.write(CheckpointParts {
            step: self.progress.steps,
            kept_step,
            embeddings: &model.embeddings,
            dense,
            state: self.sums.entries(&**model.embeddings.collectives())?,
            metrics: self.carried_metrics.as_deref(),
            progress: self.progress.clone(),
        })?;
        if full {
            self.stepper.model.embeddings.clear_touched();
        }
        self.checkpointed = Some(self.progress.steps);
        self.clock.checkpoint += started.elapsed();
        self.clock.checkpoints += 1;
        Ok(())
    }
}

/// Returns the most important metric of every task, with the task's label if there are several.
fn headlines(metrics: &TaskMetrics) -> String {
    let single = metrics.iter().count() == 1;
    let of_task = |(task, metrics): (&str, &Metrics)| {
        let (name, value) = metrics.headline();
        let value = value.map_or_else(|| "n/a".to_owned(), |value| format!("{value:.4}"));
        if single { format!("{name} {value}") } else { format!("{task} {name} {value}") }
    };
    metrics.iter().map(of_task).collect::<Vec<_>>().join(", ")
}

fn is_due(every: Option<u64>, steps: u64) -> bool {
    steps > 0 && every.is_some_and(|every| steps.is_multiple_of(every))
}
