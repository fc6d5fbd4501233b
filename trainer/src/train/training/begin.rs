//! The initial state of training, new or from a checkpoint.

use std::path::Path;
use std::sync::Arc;

use onefold_datasets::Snapshot;
use onefold_ikjt::{Reader, load_snapshot};

use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::run::Trained;
use crate::train::follow::{Current, Followed};
use crate::train::parts::{Day, Parts};
use crate::train::{Prepared, Progress};

/// Returns the progress at which training begins, either the start or the checkpoint `newest`, and the reader
/// of the first part.
pub(super) fn begin(
    prepared: &Prepared<'_>,
    parts: &mut Parts<'_>,
    newest: Option<&Checkpoint<Progress>>,
    trained: Trained,
) -> Result<(Progress, Arc<Reader>)> {
    let options = prepared.options;
    let known = newest.map(Checkpoint::progress);
    // A part whose epoch is complete is done, and no more samples are read from it.
    let current = known.and_then(|known| Some((known.followed.current.as_ref()?, known.position.epoch > 0)));
    if let Some((current, is_done)) = current {
        let snapshot = snapshot_of(&prepared.dataset, current, is_done)?;
        parts.turn_to(Arc::new(snapshot), Day::of_keys(current.keys()));
    }
    let reads = options.follow.is_none() || current.is_some_and(|(_, is_done)| !is_done);
    let part = known.map_or(0, |known| known.partition);
    let reader = match reads {
        // If all parts are done, no samples are read, so any valid part suffices.
        true => parts.open(part.min(parts.len().saturating_sub(1)))?,
        false => Arc::clone(&prepared.reader),
    };
    let dedupe = format!("{:?}", options.dedupe).to_lowercase();
    let Trained { optimizer_steps, samples } = trained;
    let fresh = Progress::new(reader.position(0), dedupe, options.threads);
    let followed = Followed::leaving_out(prepared.known.clone());
    let fresh = Progress { optimizer_steps, samples_before: samples, followed, ..fresh };
    let Some(known) = known else { return Ok((fresh, reader)) };
    if reads {
        reader.check(&known.position)?;
    }
    warn_of_changes(&fresh, known);
    Ok((Progress { dedupe: fresh.dedupe, threads: fresh.threads, ..known.clone() }, reader))
}

/// Loads the snapshot that the current part is read from. If the part is done and its snapshot was removed,
/// loads the newest snapshot instead.
fn snapshot_of(dataset: &Path, current: &Current, is_done: bool) -> Result<Snapshot> {
    use onefold_datasets::Error::NoSnapshot;
    match load_snapshot(dataset, Some(current.snapshot)) {
        Err(onefold_ikjt::Error::Dataset(NoSnapshot(fault))) if !is_done => Err(fault
            .hint(
                "a part of this snapshot was trained on; remove the newest folders of the run's `checkpoints` to go on \
                 from the end of the part before, and keep snapshots for longer (`vacuum --older-than`)",
            )
            .into()),
        Err(onefold_ikjt::Error::Dataset(NoSnapshot(_))) => Ok(load_snapshot(dataset, None)?),
        snapshot => Ok(snapshot?),
    }
}

/// Warns if changed settings make the losses of the resumed run differ in the last bits from an uninterrupted run.
fn warn_of_changes(now: &Progress, before: &Progress) {
    if now.dedupe != before.dedupe || now.threads != before.threads {
        tracing::warn!(
            "the run was trained with deduplication `{}` on {} threads and continues with `{}` on {} threads: sums have another order, so losses differ in their last bits",
            before.dedupe,
            before.threads,
            now.dedupe,
            now.threads
        );
    }
}
