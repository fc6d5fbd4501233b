//! Inference over all batches of a reader.

use onefold_base::fault::{Fault, Kind};
use onefold_base::progress::Reporter;
use onefold_ikjt::{Batch, Reader};

use crate::device::guarded;
use crate::lockstep::{self, STOP};
use crate::metrics::Task;
use crate::model::Model;
use crate::stop::Stop;
use crate::{Error, Result, tensors};

/// Calls `take` with every batch of this rank and its logits, `[B, tasks]`. Returns `false` if it was stopped.
/// Every rank must call it; all ranks process the same number of batches, so `take` may call collective
/// operations.
///
/// # Errors
///
/// [`Error::Read`] for damaged data; [`Error::Fault`] for a logit that is not finite; errors of `take`.
pub(crate) fn infer(
    model: &Model,
    reader: &Reader,
    tasks: &[Task],
    stop: &Stop,
    reporter: &dyn Reporter,
    mut take: impl FnMut(&Batch, &[f32]) -> Result<()>,
) -> Result<bool> {
    let (mut read, collectives) = (0, model.embeddings.collectives());
    let mut batches = collectives.agree_on(|| reader.batches().map_err(Error::from))?;
    loop {
        model.wait_for_batch(|limit| batches.wait(limit))?;
        let Some(step) = batches.next() else { break };
        let batch = step.map(|step| step.batch).map_err(Error::from);
        let flags = if stop.is_raised() { STOP } else { 0 };
        let (batch, mut input) = model.request_or_fail(batch, flags)?;
        if !lockstep::go_on(model.statuses(&mut input)?)? {
            reporter.end();
            return Ok(false);
        }
        let logits = guarded(model.device(), || {
            Ok(tensors::to_vec(&tch::no_grad(|| model.forward(&batch, input))?.logits))
        })?;
        collectives.agree(check_finite(&logits, tasks, read))?;
        read += batch.size() as u64;
        take(&batch, &logits)?;
        reporter.advance(batch.size() as u64 * u64::from(collectives.size()));
    }
    reporter.end();
    Ok(true)
}

/// Checks that all logits (`[B, tasks]`, after `read` samples) are finite. Early stopping could not compare the
/// metrics of a model with other predictions.
fn check_finite(logits: &[f32], tasks: &[Task], read: u64) -> Result<()> {
    let Some(place) = logits.iter().position(|logit| !logit.is_finite()) else { return Ok(()) };
    let (label, sample) = (&tasks[place % tasks.len()].name, read + (place / tasks.len()) as u64);
    let message = format!(
        "the logit of `{label}` is {} in sample {sample} of the evaluation, counted from 0",
        logits[place]
    );
    let hint = "clean the dense features if some are no finite numbers; if all are, the model has diverged: lower the \
                learning rates under `[optimizer]`, or evaluate an earlier checkpoint";
    Err(Fault::new(Kind::Failed, message).hint(hint).into())
}
