//! Embedding tables: lookup and pooling, the exchange between ranks, and the exact update.
//!
//! A table is divided into [`Shard`]s, each of which is on a **rank**. Every rank has its own batches. In a step, a
//! rank requests the vectors of its batch from the ranks that own them, and returns their gradients. Then every
//! shard is updated once:
//!
//! ```text
//! groups of a batch ─▶ request ⇄ owners ─▶ lookup ─▶ Lookups: vectors by distinct row ─▶ model
//!                                  update ◀── send_gradients ◀────── LookupGradients ◀─────┘
//! ```
//!
//! A rank's shards are in a store, in host memory or on a device. The exchange moves distinct rows between the
//! ranks that need them and the ranks that own them. Tables that are whole on this rank are looked up in place, so
//! a single rank copies nothing.
//!
//! All work is done per **row** of a group, so once per distinct row if the batch is deduplicated, and per element
//! of a timeline if rows are overlapping windows. Results do not depend on the number of threads: each row is
//! written by one thread, and the gradient of a table row is summed by one thread, in the order of ranks and their
//! batches.

mod device;
mod exchange;
mod lookup;
mod sent;
mod shard;
mod store;
mod stored;
mod table;
mod update;
mod usage;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use onefold_ikjt::{Batch, Group};
use onefold_kernels::attention::Sequence;
use onefold_sharding::{DataType, FeatureConfig, TableConfig, tables_of};
use rayon::prelude::*;
use tch::Tensor;

pub(crate) use self::device::{DeviceGradients, DeviceStore};
use self::exchange::{Arriving, Destinations, Exchange, Exchanged, Travelled};
use self::lookup::GroupLookup;
pub use self::lookup::{FeatureLookup, Lookup};
pub use self::sent::SentBytes;
pub use self::shard::{Buffer, RowSet, Shard};
use self::store::HostStore;
pub(crate) use self::stored::whole_buffers;
pub use self::table::Table;
pub(crate) use self::table::stored_dtype;
pub(crate) use self::usage::{EARLIER, usage_bytes};
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, LookedUp, Staged, guarded};
use crate::distributed::{Alone, Collectives};
use crate::trace::Recorder;
use crate::{Error, Result};

/// The status that a rank sends to all other ranks with every request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Status {
    /// [`FAILED`](Self::FAILED), [`WAITING`](Self::WAITING), and bits that the training loop defines.
    pub flags: i64,
    /// The sum of the weights of the batch's samples.
    pub weight: f64,
}

impl Status {
    /// The rank has failed and takes no further steps: nothing is exchanged.
    pub const FAILED: i64 = 2;
    /// The rank has no batch yet: all ranks announce their requests again.
    pub const WAITING: i64 = 8;
}

/// The gradients of one group's lookup.
#[derive(Debug)]
pub struct LookupGradients {
    /// The gradients of the pooled vectors, `[U, W]`, where W is the sum of the features' dimensions.
    pub pooled: Vec<f32>,
    /// The gradients of all elements of every sequence's timeline, `[T, D]` per sequence.
    pub sequences: Vec<Vec<f32>>,
}

/// The lookups of a batch that are requested but not answered yet.
#[derive(Debug)]
pub struct Request {
    exchange: exchange::Request,
    /// On a device: the staged batch, and the destinations of other ranks' answers.
    staged: Option<(Staged, Option<Destinations>)>,
}

/// The results of a batch's lookups, by group.
#[derive(Debug)]
pub struct Lookups {
    /// The results of the groups, in the batch's order.
    pub groups: Vec<Lookup>,
    exchanged: Exchanged,
}

/// Gradients that are being sent to the ranks that own the tables.
#[derive(Debug)]
pub struct SentGradients(Arriving);

/// A batch on the device, and the results of its lookups.
#[derive(Debug)]
pub(crate) struct DeviceLookup {
    pub(crate) staged: Staged,
    pub(crate) looked_up: LookedUp,
    /// The exchange with other ranks; `None` if no other rank takes part.
    travelled: Option<Travelled>,
}

/// Gradients of a device that are being sent to the ranks that own the tables.
#[derive(Debug)]
pub(crate) struct DeviceSentGradients(Option<exchange::DeviceGradients>);

/// The division of tables into shards, and the ranks that have them.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Every table's shards, in the order of tables.
    pub shards: Vec<Shard>,
    /// The ranks, including this process.
    pub collectives: Arc<dyn Collectives>,
    /// The type of vectors and gradients in messages.
    pub dtype: DataType,
}

impl Placement {
    /// Places every table of `features` as a whole on one rank: the largest first, each on the rank with the fewest
    /// bytes.
    pub fn even(features: &[FeatureConfig], collectives: Arc<dyn Collectives>) -> Self {
        let (tables, _) = tables_of(features);
        let bytes = |table: usize| tables[table].rows * tables[table].dim * tables[table].dtype.bytes();
        let mut order: Vec<usize> = (0..tables.len()).collect();
        order.sort_by_key(|&table| std::cmp::Reverse(bytes(table)));
        let mut loads = vec![0; collectives.size() as usize];
        let mut ranks = vec![0; tables.len()];
        for table in order {
            let rank = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
            loads[rank] += bytes(table);
            ranks[table] = rank as u32;
        }
        let shard = |(table, rank)| Shard::whole(table, &tables[table], rank);
        let shards = ranks.into_iter().enumerate().map(shard).collect();
        Self { shards, collectives, dtype: DataType::Fp32 }
    }

    /// Places all tables of `features` as a whole on the only rank.
    pub fn alone(features: &[FeatureConfig]) -> Self {
        let (tables, _) = tables_of(features);
        let shards = tables.iter().enumerate().map(|(i, config)| Shard::whole(i, config, 0)).collect();
        Self { shards, collectives: Arc::new(Alone), dtype: DataType::Fp32 }
    }
}

/// The features and tables of a model, in the schema's order.
#[derive(Debug)]
struct Layout {
    features: Vec<FeatureConfig>,
    /// Each table once, in the order of the first feature that looks it up.
    tables: Vec<TableConfig>,
    /// The index of the table of each feature.
    table_of: Vec<usize>,
}

impl Layout {
    fn new(features: &[FeatureConfig]) -> Self {
        let (tables, table_of) = tables_of(features);
        Self { features: features.to_vec(), tables, table_of }
    }

    /// Returns the features that look up a table, by index.
    fn features_of(&self, table: usize) -> impl Iterator<Item = usize> {
        (0..self.features.len()).filter(move |&feature| self.table_of[feature] == table)
    }
}

/// All tables of a model, as seen by one rank of a job. Several features may share a table; each of its rows is
/// still updated only once per step.
///
/// [`request`](Self::request), [`lookup`](HostEmbeddings::lookup),
/// [`send_gradients`](HostEmbeddings::send_gradients) and [`update`](Self::update) are collective operations: every
/// rank calls them once per step, in the same order, with its own batch.
#[derive(Debug)]
pub struct Embeddings {
    layout: Layout,
    shards: Vec<Shard>,
    store: Store,
    exchange: Exchange,
    threads: Arc<rayon::ThreadPool>,
    /// The number of updates so far, on which Adam's bias correction depends.
    steps: u64,
    /// Whether checkpoints contain the usage of rows.
    stores_usage: bool,
}

/// [`Embeddings`] with shards in host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostEmbeddings<'a> {
    pub(crate) all: &'a Embeddings,
    store: &'a HostStore,
}

/// [`Embeddings`] with shards in a device's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceEmbeddings<'a> {
    all: &'a Embeddings,
    pub(crate) store: &'a DeviceStore,
}

/// The store of this rank's shards.
#[derive(Debug)]
enum Store {
    Host(HostStore),
    Device(Box<DeviceStore>),
}

impl Embeddings {
    /// Creates this rank's shards with initial weights from `seed` and the state that `optimizer` needs. `threads`
    /// is the number of threads for lookups and updates.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the threads cannot be started.
    pub fn new(
        features: &[FeatureConfig],
        placement: &Placement,
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: usize,
    ) -> Result<Self> {
        let threads = thread_pool(threads)?;
        let rank = placement.collectives.rank();
        let layout = Layout::new(features);
        let store =
            threads.install(|| HostStore::new(&layout.tables, &placement.shards, rank, optimizer, seed));
        Ok(Self::of(layout, Store::Host(store), placement, Arc::new(threads)))
    }

    /// Does the same as [`new`](Self::new), but with constant weights, which are faster to create, and with a
    /// shared thread pool: for measurements.
    pub(crate) fn alike(
        features: &[FeatureConfig],
        placement: &Placement,
        optimizer: &TableOptimizerConfig,
        threads: Arc<rayon::ThreadPool>,
    ) -> Self {
        let (layout, rank) = (Layout::new(features), placement.collectives.rank());
        let store = threads.install(|| HostStore::alike(&layout.tables, &placement.shards, rank, optimizer));
        Self::of(layout, Store::Host(store), placement, threads)
    }

    /// Creates this rank's shards in a device's memory, with the same initial weights as in host memory.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the device lacks memory, or the tables differ in their dimension; [`Error::Io`] if the
    /// threads cannot be started.
    pub fn on_accelerator(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        placement: &Placement,
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: usize,
    ) -> Result<Self> {
        let threads = Arc::new(thread_pool(threads)?);
        let shards = (&placement.shards[..], placement.collectives.rank());
        let store = DeviceStore::new(accelerator, features, shards, optimizer, seed, &threads)?;
        Ok(Self::of(Layout::new(features), Store::Device(Box::new(store)), placement, threads))
    }

    fn of(layout: Layout, store: Store, placement: &Placement, threads: Arc<rayon::ThreadPool>) -> Self {
        let Placement { shards, collectives, dtype } = placement;
        let exchange = Exchange::new(&layout, shards, Arc::clone(collectives), *dtype);
        Self { layout, shards: shards.clone(), store, exchange, threads, steps: 0, stores_usage: false }
    }

    /// Returns the configuration of every feature, in the schema's order.
    pub fn features(&self) -> &[FeatureConfig] {
        &self.layout.features
    }

    /// Returns the configurations of the whole tables, in the order of the first feature that looks up each of
    /// them.
    pub fn tables(&self) -> &[TableConfig] {
        &self.layout.tables
    }

    /// Returns the dimension of the widest table; 1 without tables. In a model, all sequences have it.
    pub fn dim(&self) -> usize {
        self.layout.tables.iter().map(|config| config.dim as usize).max().unwrap_or(1)
    }

    /// Returns the shards of all tables on all ranks, in the order of tables.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns the collective operations of the ranks.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        self.exchange.collectives()
    }

    /// Returns whether this rank holds the shard with this index, and therefore reads and writes its values.
    pub fn holds(&self, shard: usize) -> bool {
        self.shards[shard].rank == self.collectives().rank()
    }

    /// Returns the number of updates so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets the number of updates so far, to continue a run.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Runs `work` on the threads of lookups and updates.
    pub fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.threads.install(work)
    }

    /// Returns the bytes that were sent to other ranks so far for the tables.
    pub fn sent_bytes(&self) -> SentBytes {
        let sent = &self.exchange.sent;
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let (requests, answers) = (load(&sent.requests), load(&sent.answers));
        SentBytes { requests, answers, gradients: load(&sent.gradients), dense: 0 }
    }

    /// Returns the recorder of this rank's activities and waiting times.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.exchange.recorder
    }

    /// Starts requesting the rows of every group of a batch from their owners, and sending this rank's `status` to
    /// all ranks. The features of `groups` are in the schema's order. Without groups, nothing is requested.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if an id has no row in its table; nothing was sent then. [`Error::RankLost`] if another
    /// rank fails.
    pub fn request(&self, groups: &[Group], status: Status) -> Result<Request> {
        let encoded = self.exchange.encode(self.lookups(groups)?, &self.threads);
        Ok(Request { exchange: self.exchange.request(encoded, status)?, staged: None })
    }

    /// Does the same as [`request`](Self::request) for a batch. If the tables are on a device, also starts copying
    /// the batch to it.
    ///
    /// # Errors
    ///
    /// See [`request`](Self::request); also [`Error::Fault`] if the device fails.
    pub(crate) fn request_batch(&self, batch: Option<&Batch>, status: Status) -> Result<Request> {
        let groups = batch.map_or(&[][..], Batch::groups);
        let Store::Device(store) = &self.store else { return self.request(groups, status) };
        let alone = self.exchange.is_alone();
        let encoded =
            self.exchange.encode(if alone { Vec::new() } else { self.lookups(groups)? }, &self.threads);
        let stage = |batch: &Batch| {
            let staged = store.whole().stage(batch)?;
            let destinations = (!alone).then(|| self.exchange.destinations(&encoded, &staged, store));
            Ok((staged, destinations.transpose()?))
        };
        let staged = batch.map(|batch| guarded(store.accelerator().torch(), || stage(batch))).transpose()?;
        Ok(Request { exchange: self.exchange.request(encoded, status)?, staged })
    }

    /// Returns the lookups of a batch.
    fn lookups(&self, groups: &[Group]) -> Result<Vec<GroupLookup>> {
        let next_feature = |next: &mut usize, group: &Group| {
            *next += group.features().len();
            Some(*next - group.features().len())
        };
        let first_features: Vec<usize> = groups.iter().scan(0, next_feature).collect();
        let layout = &self.layout;
        self.threads.install(|| {
            let groups = groups.par_iter().zip(first_features).with_max_len(1);
            let lookups: Vec<_> =
                groups.map(|(group, first)| GroupLookup::new(group, first, layout)).collect();
            // If several groups have errors, the error of the first group is returned.
            lookups.into_iter().collect()
        })
    }

    /// Tells all ranks, instead of sending a request, that this rank has no batch yet. Returns the statuses of all
    /// ranks, by rank. The next call must be a request or this function again, unless a rank has failed.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn say_waiting(&self) -> Result<Vec<Status>> {
        self.exchange.say_waiting()
    }

    /// Waits until all ranks have made their requests. Returns their statuses, by rank.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn statuses<'a>(&self, request: &'a mut Request) -> Result<&'a [Status]> {
        self.exchange.announce(&mut request.exchange)
    }

    /// Returns the tables in host memory.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] if they are on a device.
    pub fn host(&self) -> Result<HostEmbeddings<'_>> {
        match &self.store {
            Store::Host(store) => Ok(HostEmbeddings { all: self, store }),
            Store::Device(_) => Err(elsewhere(ON_DEVICE)),
        }
    }

    /// Returns the tables on a device, or `None` if they are in host memory.
    pub(crate) fn on_device(&self) -> Option<DeviceEmbeddings<'_>> {
        match &self.store {
            Store::Host(_) => None,
            Store::Device(store) => Some(DeviceEmbeddings { all: self, store }),
        }
    }

    /// Returns the tables on a device.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] if they are in host memory.
    pub(crate) fn device(&self) -> Result<DeviceEmbeddings<'_>> {
        self.on_device().ok_or_else(|| elsewhere(IN_MEMORY))
    }

    /// Updates every shard of this rank: the gradients of an id are summed over all its lookups on all ranks, then
    /// its row is updated once. `sent` is the result of [`send_gradients`](HostEmbeddings::send_gradients) for the
    /// same gradients.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails, [`Error::Collective`] if the tables are on a device.
    ///
    /// # Panics
    ///
    /// If the gradients do not belong to `lookups`, or the tables' state belongs to another optimizer.
    pub fn update(
        &mut self,
        lookups: &Lookups,
        gradients: &[LookupGradients],
        sent: SentGradients,
        optimizer: &TableOptimizerConfig,
    ) -> Result<()> {
        let Self { store: Store::Host(store), exchange, threads, steps, .. } = self else {
            return Err(elsewhere(ON_DEVICE));
        };
        let step = *steps + 1;
        exchange.update(&lookups.groups, &lookups.exchanged, gradients, sent.0, threads, |work| {
            threads.install(|| store.update(work, optimizer, step));
        })?;
        self.steps = step;
        Ok(())
    }

    /// Updates every shard of this rank on a device, as [`update`](Self::update) does. If `permit` (one `int` on
    /// the device) is 0, nothing changes.
    ///
    /// # Errors
    ///
    /// See [`update`](Self::update); also [`Error::Fault`] if the device fails.
    pub(crate) fn update_on_device(
        &mut self,
        lookup: &DeviceLookup,
        gradients: &DeviceGradients,
        sent: DeviceSentGradients,
        (optimizer, permit): (&TableOptimizerConfig, Option<&Tensor>),
    ) -> Result<()> {
        let Self { store: Store::Device(store), exchange, steps, .. } = self else {
            return Err(elsewhere(IN_MEMORY));
        };
        let (step, batch) = (*steps + 1, (&lookup.staged, &lookup.looked_up));
        let update = store.step(optimizer, step, permit);
        match (&lookup.travelled, sent.0) {
            (Some(travelled), Some(sent)) => {
                exchange.update_on_device(travelled, batch, gradients, sent, store, &update)?;
            }
            _ => store.update_own(batch, gradients, &update)?,
        }
        self.steps = step;
        Ok(())
    }
}

impl<'a> HostEmbeddings<'a> {
    /// Looks up the requests of all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn lookup(self, request: Request) -> Result<Lookups> {
        let Embeddings { exchange, layout, threads, .. } = self.all;
        let (groups, exchanged) = exchange.lookup(request.exchange, self.store, &layout.tables, threads)?;
        Ok(Lookups { groups, exchanged })
    }

    /// Returns a sequence feature's vectors in the form that the attention kernel reads.
    pub(crate) fn sequence(self, feature: &'a FeatureLookup) -> Sequence<'a> {
        feature.sequence(self.all.exchange.whole(feature.table).and_then(|shard| self.store.table(shard)))
    }

    /// Starts sending the gradients of `lookups` to the owners.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn send_gradients(self, lookups: &Lookups, gradients: &[LookupGradients]) -> Result<SentGradients> {
        let Lookups { groups, exchanged } = lookups;
        let Embeddings { exchange, threads, .. } = self.all;
        Ok(SentGradients(exchange.send_gradients(groups, exchanged, gradients, self.store, threads)?))
    }
}

impl DeviceEmbeddings<'_> {
    /// Looks up the requests of all ranks, on a device.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails, [`Error::Fault`] if the device fails.
    pub(crate) fn lookup(self, request: Request) -> Result<DeviceLookup> {
        let Request { exchange, staged } = request;
        let (mut staged, destinations) = staged.expect("what is looked up has a batch");
        staged.arrive()?;
        let Some(destinations) = destinations else {
            let looked_up = self.store.lookup(&staged)?;
            return Ok(DeviceLookup { staged, looked_up, travelled: None });
        };
        let (looked_up, travelled) =
            self.all.exchange.lookup_on_device(exchange, destinations, &staged, self.store)?;
        Ok(DeviceLookup { staged, looked_up, travelled: Some(travelled) })
    }

    /// Starts sending the gradients of a device's lookups to the owners.
    ///
    /// # Errors
    ///
    /// See [`lookup`](Self::lookup).
    pub(crate) fn send_gradients(
        self,
        lookup: &DeviceLookup,
        gradients: &DeviceGradients,
    ) -> Result<DeviceSentGradients> {
        let Self { all, store } = self;
        let send =
            |travelled| all.exchange.send_gradients_on_device(travelled, &lookup.staged, gradients, store);
        Ok(DeviceSentGradients(lookup.travelled.as_ref().map(send).transpose()?))
    }
}

const IN_MEMORY: &str = "the tables are in memory";
const ON_DEVICE: &str = "the tables are on a device";

/// Returns the error of a step for tables in another kind of memory.
fn elsewhere(message: &str) -> Error {
    Error::collective("step of tables", message)
}

/// Creates a pool of `threads` threads for lookups and updates.
///
/// # Errors
///
/// [`Error::Io`] if the threads cannot be started.
pub fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests;
