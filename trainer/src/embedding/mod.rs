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
use onefold_sharding::{DataType, TableConfig};

pub use self::device::DeviceEmbeddings;
pub(crate) use self::expand::SamplesOfRows;
pub use self::local::LocalEmbeddings;
pub use self::lookup::{FeatureLookup, Lookup, Steps};
pub use self::shard::{Buffer, RowSet, Shard};
pub use self::sharded::ShardedEmbeddings;
pub use self::table::Table;
pub(crate) use self::table::stored_dtype;
pub use self::vectors::Vectors;
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::kernels::attention::Sequence;
use crate::kernels::element::Elements;

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

    /// Writes rows of `width` values, `[U, width]`, by sample, `[B, width]`.
    fn expand(&self, rows: &[f32], width: usize, inverse: &[i32], samples: &mut [f32]) {
        self.threads().install(|| expand::expand(rows, width, inverse, samples));
    }

    /// Adds the samples of each row to it, in their order: the gradient of [`expand`](Self::expand), into rows of zeros.
    fn fold(&self, samples: &[f32], width: usize, inverse: &[i32], rows: &mut [f32]) {
        self.threads().install(|| expand::fold(samples, width, inverse, rows));
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

    /// The shards of a table that this process holds, by number, from the first row and column on; of replicas the first.
    pub(crate) fn held_parts(&self, table: usize) -> Vec<(usize, &Shard)> {
        let shards = self.shards();
        let held = shards.iter().enumerate().filter(|(i, shard)| shard.table == table && self.holds(*i));
        let mut parts: Vec<_> =
            held.filter(|(i, shard)| !shards[..*i].iter().any(|other| shard.is_replica_of(other))).collect();
        parts.sort_by_key(|(_, shard)| (shard.rows.start, shard.columns.start));
        parts
    }

    /// Reads a buffer of a table whose shards this process holds, row by row: a row's parts stand side by side. What rows
    /// have once for each column shard, such as an accumulator, stands there as often.
    ///
    /// # Errors
    ///
    /// The first error of `sink`, or what reading from a device meets.
    pub(crate) fn read_table(
        &self,
        table: usize,
        buffer: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        for parts in self.held_parts(table).chunk_by(|(_, a), (_, b)| a.rows == b.rows) {
            if let [(shard, _)] = parts {
                self.read(*shard, buffer, RowSet::All, sink)?;
                continue;
            }
            let mut columns = Vec::with_capacity(parts.len());
            for (shard, _) in parts {
                let mut bytes = Vec::new();
                self.read(*shard, buffer, RowSet::All, &mut |part| {
                    bytes.extend_from_slice(part);
                    Ok(())
                })?;
                columns.push((self.buffers(*shard)[buffer].row_bytes(), bytes));
            }
            let rows = parts.first().map_or(0, |(_, shard)| shard.rows.end - shard.rows.start);
            for row in 0..rows as usize {
                columns.iter().try_for_each(|(size, bytes)| sink(&bytes[row * size..][..*size]))?;
            }
        }
        Ok(())
    }

    /// The weights of a table whose shards this process holds, `[rows, dim]`.
    ///
    /// # Errors
    ///
    /// What reading from a device meets.
    pub fn weights(&self, table: usize) -> io::Result<Vec<f32>> {
        let mut bytes = Vec::new();
        self.read_table(table, 0, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(widened(self.configs()[table].dtype, &bytes))
    }
}

/// Stored weights as floats.
fn widened(dtype: DataType, bytes: &[u8]) -> Vec<f32> {
    // The bytes may stand anywhere in a buffer.
    let halves = || bytes.as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect::<Vec<_>>();
    match dtype {
        DataType::Fp32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        DataType::Bf16 => Elements::Bf16(&halves()).to_f32(),
        DataType::Fp16 => Elements::Fp16(&halves()).to_f32(),
    }
}

fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests;
