//! One training step, on one of its ranks.
//!
//! ```text
//! answers of this batch ─▶ request of the next one ─▶ forward, loss ─▶ backward ═▶ sums of the dense gradient
//!                                                                          └─────▶ gradients to the owners ─▶ updates
//! ```
//!
//! Information that other ranks need before any update, for example that a loss is not finite, is exchanged
//! together with the loss.
//!
//! On a device, a whole step is enqueued before the host reads its results at once: loss, norm and logits. If
//! one of them is not finite, nothing is updated, because the device checks it before the update
//! ([`Norm`](crate::optimizer::Norm)). The next batch is requested while the device computes. With several
//! ranks, the host waits once more, after the backward pass, because every rank must know all losses before it
//! updates, and losses are exchanged through main memory. The sums of the gradients are computed meanwhile.

use std::path::{Path, PathBuf};
use std::time::Instant;

use onefold_base::fault::{Fault, Kind};
use onefold_datasets::Schema;
use onefold_ikjt::{Batch, Batches, Position, Step};
use tch::Tensor;

use super::{Prepared, Progress, diverged};
use crate::config::TableOptimizerConfig;
use crate::device::{Learned, guarded};
use crate::embedding::SentBytes;
use crate::evaluate::Evaluation;
use crate::lockstep::{self, Bucket, CHECKPOINT, STOP};
use crate::model::{Forward, Input, Model};
use crate::optimizer::DenseOptimizer;
use crate::stop::Stop;
use crate::trace::{Activity, Recorder};
use crate::{Error, Result, TrainConfig, tensors};

/// The state of the training steps.
pub(super) struct Stepper<'a> {
    config: &'a TrainConfig,
    schema: &'a Schema,
    evaluation: &'a Evaluation<'a>,
    directory: PathBuf,
    pub(super) model: Model,
    pub(super) optimizer: DenseOptimizer,
    /// The gradients of the layers after the interaction, and of the layers before it.
    buckets: [Bucket; 2],
    /// The next batch and its request, which is processed while the current batch is computed.
    upcoming: Option<(Step, Input)>,
    /// Whether a rank has requested to end before the next batch.
    pub(super) stops: bool,
    /// The time at which this rank requests a checkpoint, if checkpoints by time are enabled.
    checkpoint_at: Option<Instant>,
    /// Whether a rank has requested a checkpoint before the next batch. The ranks have different clocks, so
    /// they agree on it.
    pub(super) checkpoint_due: bool,
    /// The learning rates of the dense part and of the tables in the last step.
    pub(super) learning_rates: (f64, f32),
}

/// The results of a step, over all ranks unless noted otherwise.
pub(super) struct Taken {
    /// This rank's part of the batch.
    pub(super) batch: Batch,
    /// The logits of this rank's part, `[B, tasks]`.
    pub(super) logits: Vec<f32>,
    pub(super) loss: f64,
    /// The L2 norm of the dense part's gradient, before clipping.
    pub(super) norm: f64,
    pub(super) samples: u64,
    pub(super) values: ValuesByGroup,
    /// The number of table rows evicted after the step; `None` without an eviction.
    pub(super) evicted_rows: Option<u64>,
    /// The position of the reader after the step.
    pub(super) position: Position,
}

/// The numbers of ids in samples and in distinct rows, by group.
type ValuesByGroup = Vec<(u64, u64)>;

/// The results of an update.
struct Updated {
    told: Vec<Told>,
    values: ValuesByGroup,
    norm: f64,
    logits: Vec<f32>,
}

/// The information that ranks exchange about a step, besides the values by group.
struct Told {
    loss: f64,
    finite: bool,
    samples: u64,
}

impl<'a> Stepper<'a> {
    pub(super) fn new(
        prepared: &'a Prepared<'_>,
        evaluation: &'a Evaluation<'a>,
        directory: &Path,
        model: Model,
        optimizer: DenseOptimizer,
    ) -> Self {
        let (top, rest): (Vec<_>, Vec<_>) = model
            .named_dense_parameters()
            .into_iter()
            .partition(|(name, _)| name.starts_with("top.") || name.starts_with("cross."));
        let bucket = |named: Vec<(String, Tensor)>| {
            Bucket::new(named.into_iter().map(|(_, parameter)| parameter).collect())
        };
        let mut stepper = Self {
            config: prepared.config,
            schema: &prepared.schema,
            evaluation,
            directory: directory.to_owned(),
            buckets: [bucket(top), bucket(rest)],
            model,
            optimizer,
            upcoming: None,
            stops: false,
            checkpoint_at: None,
            checkpoint_due: false,
            learning_rates: (0.0, 0.0),
        };
        stepper.begin_checkpoint_interval();
        stepper
    }

    /// Schedules the next checkpoint by time one interval from now.
    pub(super) fn begin_checkpoint_interval(&mut self) {
        let interval = self.config.checkpoint.interval();
        self.checkpoint_at = interval.and_then(|interval| Instant::now().checked_add(interval));
        self.checkpoint_due = false;
    }

    /// Requests the first batch of `batches`.
    pub(super) fn begin(&mut self, batches: &mut Batches, stop: &Stop) -> Result<()> {
        self.upcoming = self.request(batches, stop)?;
        self.hear()
    }

    /// Returns whether another batch of the epoch was requested.
    pub(super) fn has_next(&self) -> bool {
        self.upcoming.is_some()
    }

    /// Fetches a batch, and starts the request of its inputs.
    fn request(&self, batches: &mut Batches, stop: &Stop) -> Result<Option<(Step, Input)>> {
        self.model.wait_for_batch(|limit| self.recorder().during(Activity::Input, || batches.wait(limit)))?;
        let step = match self.recorder().during(Activity::Input, || batches.next()) {
            None => return Ok(None),
            Some(step) => step.map_err(Error::from),
        };
        let mut flags = if stop.is_raised() { STOP } else { 0 };
        if self.checkpoint_at.is_some_and(|at| Instant::now() >= at) {
            flags |= CHECKPOINT;
        }
        let (batch, position) = match step {
            Ok(Step { batch, position }) => (Ok(batch), Some(position)),
            Err(error) => (Err(error), None),
        };
        let (batch, input) = self.model.request_or_fail(batch, flags)?;
        Ok(position.map(|position| (Step { batch, position }, input)))
    }

    /// Waits for the other ranks' requests, and learns whether all ranks continue, and whether one requests a
    /// checkpoint.
    fn hear(&mut self) -> Result<()> {
        if let Some((_, input)) = &mut self.upcoming {
            let statuses = self.model.statuses(input)?;
            self.stops = !lockstep::go_on(statuses)?;
            self.checkpoint_due = statuses.iter().any(|status| status.flags & CHECKPOINT != 0);
        }
        Ok(())
    }

    /// Takes a step with the requested batch: forward, loss, backward, updates. Requests the next batch
    /// meanwhile. Returns `None` if there is no batch.
    pub(super) fn next(
        &mut self,
        batches: &mut Batches,
        progress: &Progress,
        stop: &Stop,
    ) -> Result<Option<Taken>> {
        let Some((Step { batch, position }, mut input)) = self.upcoming.take() else { return Ok(None) };
        let device = self.model.device();
        self.model.embeddings.collectives().set_step(progress.steps + 1);
        self.recorder().begin(Activity::Forward);
        let weight = self.model.statuses(&mut input)?.iter().map(|status| status.weight).sum();
        let (mut forward, loss) = self.model.learn(&batch, input, weight)?;
        let waits = forward.waits(&self.model);
        if waits {
            self.recorder().turn_to(Activity::Request);
            self.upcoming = self.request(batches, stop)?;
        }
        self.recorder().turn_to(Activity::Backward);
        let [top, rest] = &mut self.buckets;
        let model = &self.model;
        let upcoming = &mut self.upcoming;
        model.backward(&batch, &mut forward, &loss, || {
            if let Some((_, input)) = upcoming {
                model.statuses(input)?;
            }
            top.start(&**model.embeddings.collectives())
        })?;
        rest.start(&**model.embeddings.collectives())?;
        model.embeddings.recorder().turn_to(Activity::SendGradients);
        guarded(model.device(), || model.send_gradients(&mut forward))?;
        // The memory of this batch must stay in use until the next batch is in memory.
        let next = (!waits).then_some((batches, stop));
        let update = || self.update(&batch, (&mut forward, &loss), progress.steps, next);
        let Updated { told, values, norm, logits } = guarded(device, update)?;
        let evicted_rows = self.evict()?;
        self.hear()?;
        let (loss, samples) =
            (told.iter().map(|told| told.loss).sum(), told.iter().map(|told| told.samples).sum());
        Ok(Some(Taken { batch, logits, loss, norm, samples, values, evicted_rows, position }))
    }

    /// Updates the dense part and the tables with the gradients of `forward`, in the step after `steps`, unless
    /// a value is not finite. If `next` is given, its next batch is requested while a device computes;
    /// otherwise the ranks exchange their losses first.
    fn update(
        &mut self,
        batch: &Batch,
        (forward, loss): (&mut Forward, &Tensor),
        steps: u64,
        next: Option<(&mut Batches, &Stop)>,
    ) -> Result<Updated> {
        let (finite, logits) = (forward.finite(&self.model)?, forward.logits.detach());
        let told = next.is_none().then(|| self.tell(batch, finite.read(loss))).transpose()?;
        let recorder = self.model.embeddings.recorder();
        recorder.during(Activity::DenseGradient, || self.buckets.iter_mut().try_for_each(Bucket::finish))?;
        recorder.turn_to(Activity::Update);
        let norm = self.optimizer.judge(Some(loss), finite.squares())?;
        if let Some((told, _)) = &told {
            self.check(told, norm.known(), steps + 1, batch, &logits)?;
        }
        self.learning_rates = self.next_learning_rates(steps);
        let (dense, tables) = self.learning_rates;
        self.optimizer.step(dense, &norm)?;
        let optimizer =
            TableOptimizerConfig { learning_rate: tables, ..self.config.optimizer.tables.clone() };
        self.model.update_if(forward, &optimizer, norm.permit())?;
        if let Some((batches, stop)) = next {
            self.recorder().turn_to(Activity::Request);
            self.upcoming = self.request(batches, stop)?;
            self.recorder().turn_to(Activity::Update);
        }
        let Learned { norm, logits: learned, outcome } = norm.learn(&logits);
        let (told, values) = match (told, outcome) {
            (Some(told), _) => told,
            (None, outcome) => self.tell(batch, outcome.expect("a device that is alone has decided"))?,
        };
        self.check(&told, Some(norm), steps + 1, batch, &logits)?;
        Ok(Updated { told, values, norm, logits: learned })
    }

    /// Evicts, every `evict_after` steps, the table rows that were not looked up since the last eviction.
    /// Returns the number of evicted rows over all ranks, or `None` without an eviction.
    fn evict(&mut self) -> Result<Option<u64>> {
        let after = self.config.embedding.evict_after;
        if !after.is_some_and(|steps| self.optimizer.steps().is_multiple_of(steps)) {
            return Ok(None);
        }
        let seed = self.config.train.seed;
        let evicted = self.model.embeddings.evict(seed);
        let collectives = self.model.embeddings.collectives();
        let own = collectives.agree(evicted.map_err(Error::from))?;
        Ok(Some(collectives.sum(own)?))
    }

    /// Sends this rank's samples, loss and whether the tables' gradients are finite to all ranks. Returns the
    /// information of all ranks, by rank, and the sums of the values by group.
    fn tell(&self, batch: &Batch, (loss, finite): (f64, bool)) -> Result<(Vec<Told>, ValuesByGroup)> {
        // Counts stay far below 2^53, up to which doubles are exact.
        let mut own = vec![loss, f64::from(u8::from(finite)), batch.size() as f64];
        let groups = batch.groups();
        own.extend(groups.iter().flat_map(|group| [group.sample_values() as f64, group.row_values() as f64]));
        let collectives = self.model.embeddings.collectives();
        let all = self.recorder().during(Activity::Losses, || collectives.gather(&own))?;
        let told = |of_rank: &Vec<f64>| Told {
            loss: of_rank[0],
            finite: of_rank[1] != 0.0,
            samples: of_rank[2] as u64,
        };
        let sum = |place: usize| all.iter().map(|of_rank| of_rank[place] as u64).sum::<u64>();
        let values = (0..groups.len()).map(|group| (sum(3 + 2 * group), sum(4 + 2 * group)));
        Ok((all.iter().map(told).collect(), values.collect()))
    }

    /// Checks that the losses and gradients of a step are finite; `norm` is the norm of the gradient, if it is
    /// known. The lowest rank with an invalid value reports it.
    fn check(
        &self,
        told: &[Told],
        norm: Option<f64>,
        step: u64,
        batch: &Batch,
        logits: &Tensor,
    ) -> Result<()> {
        let bad = told.iter().position(|told| !told.loss.is_finite() || !told.finite);
        let wrong_norm = norm.is_some_and(|norm| !norm.is_finite());
        let Some(rank) = bad.or(wrong_norm.then_some(0)) else { return Ok(()) };
        let collectives = self.model.embeddings.collectives();
        collectives.agree_on(|| {
            if rank != collectives.rank() as usize {
                return Ok(());
            }
            let logits = tensors::to_vec(logits);
            let cause = diverged::cause(batch, self.schema, &logits);
            let path = diverged::save(&self.directory, batch, self.schema, &self.evaluation.tasks, &logits)?;
            let loss: f64 = told.iter().map(|told| told.loss).sum();
            let hint = format!(
                "the batch is saved: look at it with `pyarrow.ipc.open_file(\"{}\").read_pandas()`; lower the learning \
                 rates under `[optimizer]`, set `max_grad_norm` under `[optimizer.dense]`, or clean the feature",
                path.display()
            );
            Err(Fault::new(Kind::Failed, format!("the loss is {loss} at step {step}: {cause}")).hint(hint).into())
        })
    }

    /// Returns the learning rates of the dense part and of the tables in the step after `steps`.
    fn next_learning_rates(&self, steps: u64) -> (f64, f32) {
        let (optimizer, schedule) = (&self.config.optimizer, &self.config.schedule);
        let factors = [&schedule.dense, &schedule.tables].map(|schedule| schedule.factor(steps));
        let tables = f64::from(optimizer.tables.learning_rate) * factors[1];
        (optimizer.dense.learning_rate * factors[0], tables as f32)
    }

    /// Returns the recorder of this rank's activities in a step, which [`Watch`](crate::trace::Watch) ends.
    pub(super) fn recorder(&self) -> &Recorder {
        self.model.embeddings.recorder()
    }

    /// Returns the bytes that this rank has sent to other ranks so far.
    pub(super) fn sent_bytes(&self) -> SentBytes {
        let dense = self.buckets.iter().map(|bucket| bucket.sent_bytes).sum();
        SentBytes { dense, ..self.model.embeddings.sent_bytes() }
    }

    /// Returns the bytes that all ranks have sent to other ranks so far. Every rank must call it.
    pub(super) fn all_sent_bytes(&self) -> Result<SentBytes> {
        let own = self.sent_bytes().named().map(|(_, bytes)| bytes as f64);
        let all = self.model.embeddings.collectives().gather(&own)?;
        let sum = |kind: usize| all.iter().map(|of_rank| of_rank[kind] as u64).sum();
        Ok(SentBytes::from(std::array::from_fn(sum)))
    }
}
