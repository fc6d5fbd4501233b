//! Embedding tables: lookup and pooling, expansion, and the exact update, wherever the tables are.
//!
//! [`Embeddings`] is what a model knows of its tables. A table is divided into [`Shard`]s, each on a **rank**; every rank has
//! batches of its own. A step asks for the vectors of this rank's batch, whichever ranks have them, and gives their
//! gradients back, after which every shard is updated once:
//!
//! ```text
//! groups of a batch ─▶ lookup ─▶ Lookup: vectors by distinct row ─▶ expand ─▶ vectors by sample
//!                        ⇅ shards                                                  │ model
//!                      update ◀── LookupGradients ◀────────────────────── fold ◀──┘
//! ```
//!
//! What is looked up is described by table rows, offsets and sizes, and what is found are [`Vectors`], in memory or on a
//! device. There are three implementations: [`LocalEmbeddings`], all tables whole in this process, which copies nothing;
//! [`DeviceEmbeddings`], the same in a GPU's memory; and
//! [`ShardedEmbeddings`], a plan's shards on the ranks that it names, all of them in this process. Between processes the same
//! requests and answers would go through collectives.
//!
//! Everything here runs per **row** of a group, so once per distinct row when the batch is deduplicated, and per element of a
//! timeline where rows are windows that overlap. Results do not depend on the number of threads: rows are
//! written by one thread each, and a table row's gradient is summed in the order of the batch, by one thread.

mod device;
mod expand;
mod local;
mod lookup;
mod shard;
mod sharded;
mod table;
mod update;
mod vectors;

use std::io;

use onefold_ikjt::Group;
use onefold_sharding::TableConfig;

pub use self::device::DeviceEmbeddings;
pub use self::local::LocalEmbeddings;
pub(crate) use self::lookup::FeatureLookup;
pub use self::lookup::{Lookup, Steps};
pub use self::shard::{Buffer, RowSet, Shard};
pub use self::sharded::ShardedEmbeddings;
pub use self::table::Table;
pub use self::vectors::Vectors;
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::kernels::attention::Sequence;

/// The gradients of what was looked up for one group.
#[derive(Debug)]
pub struct LookupGradients {
    /// `[U, F, D]`, as the lookup's pooled vectors.
    pub pooled: Vectors,
    /// Of every element of every sequence's timeline, `[T, D]`.
    pub sequences: Vec<Vectors>,
}

/// All tables of a model, in the schema's order of features, as one rank of a job sees them.
///
/// [`lookup`](Self::lookup) and [`update`](Self::update) are collective: every rank calls them once a step, in this order, with
/// its own batch.
pub trait Embeddings: std::fmt::Debug + Send {
    /// The whole tables.
    fn configs(&self) -> &[TableConfig];

    /// Which rank this is.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn ranks(&self) -> u32;

    /// The shards of all tables on all ranks, in the order of tables.
    fn shards(&self) -> &[Shard];

    /// Whether this process holds the values of a shard, by its number, so that it reads and writes them.
    fn holds(&self, shard: usize) -> bool {
        self.shards()[shard].rank == self.rank()
    }

    /// The threads of this rank's lookups and updates.
    fn threads(&self) -> &rayon::ThreadPool;

    /// Updates so far, which Adam's correction of its moments depends on.
    fn steps(&self) -> u64;

    /// Continues after `steps` updates.
    fn set_steps(&mut self, steps: u64);

    /// Looks up the rows of every group of a batch, whose features are in the order of the tables.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for.
    fn lookup(&self, groups: &[Group], steps: Steps) -> Result<Vec<Lookup>>;

    /// A sequence feature's vectors as the attention kernel reads them, on the CPU.
    fn sequence<'a>(&'a self, feature: &'a FeatureLookup) -> Sequence<'a>;

    /// Rows of `width` values by sample.
    fn expand(&self, rows: &[f32], width: usize, inverse: &[i32]) -> Vec<f32> {
        self.threads().install(|| expand::expand(rows, width, inverse))
    }

    /// The sum of the samples of each of so many rows, in their order: the gradient of [`expand`](Self::expand).
    fn fold(&self, samples: &[f32], width: usize, inverse: &[i32], rows: usize) -> Vec<f32> {
        self.threads().install(|| expand::fold(samples, width, inverse, rows))
    }

    /// Updates every table: the gradient of an id is summed over all places where it was looked up, then its row is updated
    /// once.
    ///
    /// # Panics
    ///
    /// If the gradients are not those of `lookups`, or the tables' state is that of another optimizer.
    fn update(&mut self, lookups: &[Lookup], gradients: &[LookupGradients], optimizer: &TableOptimizerConfig);

    /// These tables, if they are on a device: the model takes another way there.
    fn on_device(&self) -> Option<&DeviceEmbeddings> {
        None
    }

    /// The same, to be updated.
    fn on_device_mut(&mut self) -> Option<&mut DeviceEmbeddings> {
        None
    }

    /// All that a checkpoint holds of a shard, by its number, the weights first.
    fn buffers(&self, shard: usize) -> Vec<Buffer>;

    /// Reads rows of a shard's buffer, both by number; the shard is one that this process [holds](Self::holds). `sink`
    /// gets the rows in order, as many at a time as stand together in memory.
    ///
    /// # Errors
    ///
    /// The first error of `sink`, or what reading from a device meets.
    fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()>;

    /// Writes rows of a shard's buffer: `source` fills the rows in order, as many at a time as stand together in memory.
    ///
    /// # Errors
    ///
    /// The first error of `source`, or what writing to a device meets.
    fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()>;
}

impl dyn Embeddings + '_ {
    /// The dimension of all vectors; 1 without tables.
    pub fn dim(&self) -> usize {
        self.configs().first().map_or(1, |config| config.dim as usize)
    }

    /// Runs `work` on the threads of lookups and updates.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.threads().install(work)
    }

    /// The weights of a table whose shards this process holds, `[rows, dim]`: they are put together from its shards.
    ///
    /// # Errors
    ///
    /// What reading from a device meets.
    pub fn weights(&self, table: usize) -> io::Result<Vec<f32>> {
        let config = &self.configs()[table];
        let dim = config.dim as usize;
        let mut weights = vec![0.0; config.rows as usize * dim];
        for (number, shard) in self.shards().iter().enumerate() {
            if shard.table != table || !self.holds(number) {
                continue;
            }
            let columns = shard.columns.start as usize..shard.columns.end as usize;
            let mut row = shard.rows.start as usize;
            self.read(number, 0, RowSet::All, &mut |bytes| {
                for values in bytes.chunks_exact(size_of::<f32>() * columns.len()) {
                    let values = values.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                    let own = &mut weights[row * dim..][..dim][columns.clone()];
                    own.iter_mut().zip(values).for_each(|(weight, value)| *weight = value);
                    row += 1;
                }
                Ok(())
            })?;
        }
        Ok(weights)
    }
}

fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests;
