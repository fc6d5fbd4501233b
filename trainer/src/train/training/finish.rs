//! The end of training: the model that is written, its metrics, and the summary.

use std::sync::Arc;

use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_ikjt::Reader;

use super::{SUMMARY_LOSSES, Training};
use crate::Result;
use crate::checkpoint::tensor_file::Entry;
use crate::config::ParameterCount;
use crate::evaluate::{EvaluationSummary, by_task, merged};
use crate::metrics::{Figures, TaskMetrics};
use crate::run::Trained;
use crate::stop::Stop;
use crate::train::log::Log;
use crate::train::model_state::{optimizer_entries, restore_model};
use crate::train::state::Sums;
use crate::train::step::Stepper;
use crate::train::{Ending, Progress, ProgressiveSummary, RowCounts, TrainSummary};

impl Training<'_> {
    /// Returns the metrics of the final model; `None` if the evaluation was stopped. Logs them unless they were
    /// logged before.
    pub(in crate::train) fn final_evaluation(
        &mut self,
        held_out: &Reader,
        reporter: &dyn Reporter,
    ) -> Result<Option<EvaluationSummary>> {
        let logged = self.progress.evaluated_at == Some(self.progress.steps);
        if let Some(summary) = self.last_evaluation.take().filter(|_| logged) {
            return Ok(Some(summary));
        }
        let before = self.progress.evaluated_at;
        let summary = self.evaluate(held_out, !logged, reporter);
        self.log.as_mut().map_or(Ok(()), Log::flush)?;
        // A resumed run must write this line again only if it takes no further steps.
        self.progress.evaluated_at = before;
        if let Ok(Some(summary)) = &summary
            && !logged
        {
            self.see(summary);
        }
        summary
    }

    /// Restores the best model according to early stopping, unless it is the current one; returns whether it
    /// did. Every rank must call it.
    pub(in crate::train) fn put_back_best(&mut self) -> Result<bool> {
        let best = self.best_step().filter(|step| *step != self.progress.steps);
        let Some(step) = best else { return Ok(false) };
        let collectives = Arc::clone(self.stepper.model.embeddings.collectives());
        let Some(checkpoint) = self.checkpoints.of_step(step, &*collectives)? else {
            tracing::warn!(
                "the checkpoint of step {step}, which early stopping found best, was removed: the model is that of the \
                 last step"
            );
            return Ok(false);
        };
        let Stepper { model, optimizer, .. } = &mut self.stepper;
        collectives.agree_on(|| restore_model(&checkpoint, model, optimizer))?;
        self.put_back = Some((step, checkpoint.progress().samples));
        Ok(true)
    }

    /// Returns the metrics of the restored model. Every rank must call it.
    pub(in crate::train) fn best_evaluation(
        &mut self,
        held_out: &Reader,
        reporter: &dyn Reporter,
    ) -> Result<EvaluationSummary> {
        if let Some(summary) = self.best_evaluation.take() {
            return Ok(summary);
        }
        // A resumed run does not know these metrics. This is the last operation, so it cannot be stopped.
        let evaluated = self.evaluation.run(&self.stepper.model, held_out, &Stop::new(), reporter)?;
        let summary = evaluated.map(|evaluated| evaluated.summary);
        summary.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::Interrupted).into())
    }

    /// Returns the step of the current model: the last step, unless early stopping has restored an earlier
    /// model.
    pub(in crate::train) fn model_step(&self) -> u64 {
        self.put_back.map_or(self.progress.steps, |(step, _)| step)
    }

    /// Returns the metrics of this run's training over all ranks. Every rank must call it.
    fn metrics(&self) -> Result<TaskMetrics> {
        let mut metrics = self.sums.before.clone();
        metrics.merge(&merged(&self.sums.window, &self.evaluation.tasks, self.collectives())?);
        Ok(metrics)
    }

    /// Returns the amount of training, and the entries of the model's file besides the parameters: the dense
    /// optimizer's state and the metrics of the model's whole training. Every rank must call it.
    pub(in crate::train) fn to_complete(&self) -> Result<(Trained, Vec<Entry<'static>>)> {
        let Progress { samples_before, samples, .. } = self.progress;
        let samples = samples_before + self.put_back.map_or(samples, |(_, samples)| samples);
        let trained = Trained { optimizer_steps: self.stepper.optimizer.steps(), samples };
        let mut entries = optimizer_entries(&self.stepper.optimizer);
        entries.extend(Sums::lifetime_entries(&self.sums.lifetime(&self.metrics()?)));
        Ok((trained, entries))
    }

    /// Returns the numbers of used and evicted table rows, if eviction is enabled. Every rank must call it.
    fn row_counts(&self) -> Result<Option<RowCounts>> {
        if self.config.embedding.evict_after.is_none() {
            return Ok(None);
        }
        let in_use = self.collectives().sum(self.stepper.model.embeddings.rows_in_use())?;
        Ok(Some(RowCounts { in_use, evicted: self.progress.evicted_rows }))
    }

    /// Returns the summary of the run.
    pub(in crate::train) fn summary(
        &self,
        ended: Ending,
        parameters: ParameterCount,
        eval: Option<EvaluationSummary>,
    ) -> Result<TrainSummary> {
        let (progress, sums, clock) = (&self.progress, &self.sums, &self.clock);
        let metrics = self.metrics()?;
        let lifetime = (progress.samples_before > 0).then(|| sums.lifetime(&metrics).first());
        let progressive = (!progress.progressive.is_empty()).then(|| ProgressiveSummary {
            figures: sums.progressive.first(),
            partitions: progress.progressive.clone(),
        });
        let wall_seconds = clock.training.as_secs_f64();
        let share = |part: f64| if wall_seconds > 0.0 { part / wall_seconds } else { 0.0 };
        Ok(TrainSummary {
            ended,
            resumed_from_step: clock.resumed_from_step,
            figures: Figures {
                samples: progress.samples,
                loss: (progress.samples > 0).then(|| sums.loss_sum / progress.samples as f64),
                ..metrics.first()
            },
            steps: progress.steps,
            model_step: (ended != Ending::Stopped).then(|| self.model_step()),
            tasks: by_task(&metrics),
            losses: (progress.steps as usize <= SUMMARY_LOSSES).then(|| sums.losses.clone()),
            loss_jump: sums.loss_watch.jump,
            rows: self.row_counts()?,
            dedupe_factor: progress.dedupe_factor(),
            parameters,
            parameter_bytes: parameters.bytes(),
            wall_seconds,
            samples_per_second: share(clock.samples as f64),
            waiting_share: share(clock.waited.as_secs_f64()),
            evaluation_seconds: clock.evaluation.as_secs_f64(),
            checkpoint_seconds: clock.checkpoint.as_secs_f64(),
            checkpoints: clock.checkpoints,
            lifetime,
            progressive,
            grown_tables: Vec::new(),
            peak_rss_bytes: peak_rss_bytes(),
            ranks: self.collectives().size(),
            sent_bytes: self.stepper.all_sent_bytes()?,
            rank_times: self.watch.totals(self.collectives())?,
            eval,
        })
    }
}
