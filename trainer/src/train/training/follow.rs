//! The training loop of a run that follows its dataset.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use onefold_base::progress::Reporter;
use onefold_datasets::PartitionKey;
use onefold_datasets::digest::Digest;
use onefold_ikjt::load_snapshot;

use super::Training;
use crate::Result;
use crate::train::Ending;
use crate::train::follow::{Current, Found};
use crate::train::parts::Day;

/// The pause between two checks of waiting ranks for a signal to stop and for a new part.
const PAUSE: Duration = Duration::from_millis(100);

impl Training<'_> {
    /// Trains on one part after the other, as partitions are committed, until the run ends or is stopped. Every
    /// rank must call it.
    pub(super) fn follow(&mut self, reporter: &dyn Reporter) -> Result<Ending> {
        loop {
            if self.progress.followed.current.is_none()
                && let Some(ended) = self.wait_for_part(reporter)?
            {
                return Ok(ended);
            }
            let ranks = u64::from(self.collectives().size());
            let total = self.progress.samples + self.reader.samples().saturating_mul(ranks);
            self.show(total, reporter);
            if let Some(ended) = self.evaluate_ahead(total, reporter)? {
                return Ok(ended);
            }
            if let Some(ended) = self.train_on_part(None, total, reporter)? {
                return Ok(ended);
            }
            self.end_part()?;
        }
    }

    /// Returns the digests of the partitions that were trained on or are left out, by key; `None` if the run does not
    /// follow its dataset.
    pub(in crate::train) fn known_partitions(&self) -> Option<BTreeMap<String, Digest>> {
        self.follower.as_ref().map(|_| self.progress.followed.trained.clone())
    }

    /// Waits for the next part, and makes it the current one. Returns the reason if the run ends instead.
    fn wait_for_part(&mut self, reporter: &dyn Reporter) -> Result<Option<Ending>> {
        let collectives = Arc::clone(self.stepper.model.embeddings.collectives());
        reporter.begin("waiting for partitions", None, "partitions");
        loop {
            // The signal may reach only one rank.
            if collectives.sum(u64::from(self.stop.is_raised()))? > 0 {
                return Ok(Some(Ending::Stopped));
            }
            let (follower, progress) = (&mut self.follower, &mut self.progress);
            let found = collectives.of_lowest(|| match follower {
                Some(follower) => follower.look(&mut progress.followed, progress.partition as u64),
                None => Ok(Found::End),
            })?;
            match found {
                Found::Nothing => std::thread::sleep(PAUSE),
                Found::End => return Ok(Some(Ending::Partitions)),
                Found::Part { snapshot, partitions } => {
                    self.turn_to(snapshot, partitions)?;
                    return Ok(None);
                }
            }
        }
    }

    /// Makes a new part the current one, and opens its reader.
    fn turn_to(&mut self, snapshot: u64, partitions: Vec<PartitionKey>) -> Result<()> {
        let collectives = Arc::clone(self.stepper.model.embeddings.collectives());
        let known = self.follower.as_ref().and_then(|follower| follower.known(snapshot));
        let dataset = self.parts.dataset;
        let loaded = collectives.agree_on(|| match known {
            Some(known) => Ok(known),
            None => Ok(Arc::new(load_snapshot(dataset, Some(snapshot))?)),
        })?;
        let current = Current::of(&loaded, &partitions, (self.progress.samples, self.sums.loss_sum));
        self.parts.turn_to(loaded, Day::of_keys(partitions));
        let number = self.progress.partition;
        self.reader = collectives.agree_on(|| self.parts.open(number))?;
        self.ahead = None;
        self.progress.position = self.reader.position(0);
        self.progress.followed.current = Some(current);
        Ok(())
    }

    /// Writes a checkpoint after a part, publishes its results, and marks it as done.
    fn end_part(&mut self) -> Result<()> {
        self.checkpoint()?;
        let collectives = Arc::clone(self.stepper.model.embeddings.collectives());
        let (follower, progress, loss_sum) = (&mut self.follower, &mut self.progress, self.sums.loss_sum);
        let part = self.parts.followed();
        collectives.agree_on(|| match (follower, part) {
            (Some(follower), Some(part)) if collectives.rank() == 0 => {
                follower.publish(part, progress, loss_sum)
            }
            _ => Ok(()),
        })?;
        self.progress.followed.end_part();
        self.progress.partition += 1;
        Ok(())
    }
}
