//! Reads batches from a [`Source`] instead of making them in this process.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::budget::Account;
use super::convert::Pieces;
use super::files::Chosen;
use super::order::{Item, StreamOrder};
use super::output::{Output, Packing};
use super::pipeline::{Batches, Queue, Turns, Waited};
use super::position::{Position, Shuffle};
use super::promise::promise;
use super::recipe::Recipe;
use super::source::{Asked, Source, Wanted};
use super::stages::Stages;
use super::workers::Workers;
use crate::batch::{Batch, PackedBatch};
use crate::error::{Error, Result};

/// The least and the largest number of row groups of a stream that a block covers. At the ends of a block, workers
/// fetch and decode row groups of which they need only a part: with n row groups in a block, one in n is fetched twice.
const ROW_GROUPS_IN_BLOCK: RangeInclusive<usize> = 4..=16;

/// The number of blocks into which a stream is divided at least, if it has enough row groups, so that many workers can
/// compute at the same time.
const LEAST_BLOCKS: usize = 16;

/// Returns the number of row groups of a block of a stream with this many row groups.
fn row_groups_in_block(row_groups: usize) -> usize {
    (row_groups / LEAST_BLOCKS).clamp(*ROW_GROUPS_IN_BLOCK.start(), *ROW_GROUPS_IN_BLOCK.end())
}

/// Returns the number of steps in a block for streams with these orders. `each` contains the samples per step of each
/// stream.
pub(super) fn block_steps(orders: &[StreamOrder], each: &[u64], shuffle: Option<Shuffle>) -> u64 {
    let mixed = shuffle.map_or(0, |shuffle| shuffle.row_groups as u64);
    let of_stream = |(order, each): (&StreamOrder, &u64)| {
        let row_groups = order.items.len();
        let row_group = order.samples().checked_div(row_groups as u64).unwrap_or(0);
        (row_groups_in_block(row_groups) as u64).saturating_add(mixed).saturating_mul(row_group) / each
    };
    orders.iter().zip(each).map(of_stream).max().unwrap_or(0).max(1)
}

/// Divides the row groups of the first stream into runs. Returns the first step of each run, and a name that is equal
/// for all jobs that read these row groups.
pub(super) fn row_groups_by_step(
    chosen: &[Chosen],
    orders: &[StreamOrder],
    each: &[u64],
) -> Vec<(u64, String)> {
    let Some((order, each)) = orders.first().zip(each.first()) else { return Vec::new() };
    let items = order.items.iter().zip(&order.starts).step_by(row_groups_in_block(order.items.len()));
    let named = items.map(|(Item { part, .. }, start)| {
        (start.div_ceil(*each), format!("{}/{}", chosen[part.file].set.path(), part.row_group))
    });
    named.collect()
}

/// The steps of an epoch that a source reads.
pub(super) struct Remote {
    pub(super) source: Arc<dyn Source>,
    pub(super) asked: Arc<Asked>,
    pub(super) wanted: Wanted,
    pub(super) workers: Workers,
    pub(super) recipe: Arc<Recipe>,
    /// The maximal number of samples of a batch.
    pub(super) most_samples: u64,
    pub(super) packing: Packing,
    /// The distance between delivered steps; the first step is delivered.
    pub(super) every: u64,
}

impl Remote {
    /// Starts fetching the batches from `position` on.
    pub(super) fn start<T: Output>(mut self, position: Position, steps: u64) -> Result<Batches<T>> {
        let account = Account::open(&self.workers.budget);
        self.wanted.memory = account.budget().total() / 2;
        let (of_thread, room, every) = (Arc::clone(&account), 2 * self.workers.threads(), self.every);
        let run = move |queue: Queue<T>, waited: Waited| self.run(&of_thread, &queue, &waited);
        Batches::of_thread(
            "onefold-fetch",
            room,
            (account, Arc::new(Stages::default())),
            (position, every),
            steps,
            run,
        )
    }

    fn run<T: Output>(self, account: &Arc<Account>, queue: &Queue<T>, waited: &Waited) {
        let Self { source, asked, wanted, workers, recipe, most_samples, packing, every } = self;
        let turns = Turns { first: wanted.steps.start, every };
        let mut steps = wanted.steps.clone();
        let pool = &workers.pool;
        let is_gone = || account.check_open().is_err();
        let mut deliver = |packed: PackedBatch| {
            if !steps.next().is_some_and(|step| turns.has(step)) {
                return Some(waited.get());
            }
            let reservation = account.reserve_batch(packed.memory().len() as u64)?;
            let recipe = Arc::clone(&recipe);
            let make = move || {
                let batch = recipe.received(&packed, most_samples)?;
                Ok((T::of(batch, Some(packed), packing), Pieces::new(), reservation))
            };
            queue.send(promise(pool, make)).ok().map(|()| waited.get())
        };
        let fetched = source.batches(&asked, wanted, &mut deliver, &is_gone);
        if let Err(error) = fetched {
            let _ = queue.send(promise(pool, move || Err(error)));
        }
    }
}

impl Recipe {
    /// Unpacks and checks a batch from another process. The number of samples must be checked, because a batch without
    /// features can claim any number.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it is not a batch of the schema, or does not pass the checks.
    fn received(&self, packed: &PackedBatch, most_samples: u64) -> Result<Batch> {
        let schema = self.output();
        let check = |batch: Batch| match batch.size() as u64 <= most_samples {
            true => batch.check_schema(schema, schema.weight.is_some()).map(|()| batch),
            false => {
                let size = batch.size();
                let message = format!("it says that it has {size} samples, of at most {most_samples}");
                Err(Error::invariant("batch", message))
            }
        };
        let batch = packed.unpack().and_then(check).map_err(|error| Error::wrong_batch(&error))?;
        self.checks.run(&batch, &schema.labels, |_| None)?;
        Ok(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_streams_have_long_blocks() {
        for (row_groups, in_block) in [(0, 4), (64, 4), (128, 8), (256, 16), (100_000, 16)] {
            assert_eq!(row_groups_in_block(row_groups), in_block, "{row_groups}");
        }
    }
}
