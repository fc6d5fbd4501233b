//! Embedding tables: lookup and pooling, the exchange between ranks, and the exact update.
//!
//! A table is divided into [`Shard`]s, each on a **rank**; every rank has batches of its own. A step asks for the
//! vectors of this rank's batch, whichever ranks have them, and gives their gradients back, after which every shard is
//! updated once:
//!
//! ```text
//! groups of a batch ─▶ request ⇄ owners ─▶ lookup ─▶ Lookups: vectors by distinct row ─▶ model
//!                                  update ◀── send_gradients ◀────── LookupGradients ◀─────┘
//! ```
//!
//! A rank's shards are in a store, in memory or on a device; the exchange moves distinct rows between the ranks that
//! need them and those that own them. Tables that are whole on this rank are looked up where they are, so that one rank
//! copies nothing.
//!
//! Everything here runs per **row** of a group, so once per distinct row when the batch is deduplicated, and per
//! element of a timeline where rows are windows that overlap. Results do not depend on the number of threads: rows are
//! written by one thread each, and a table row's gradient is summed in the order of the ranks and their batches, by one
//! thread.

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

pub(crate) use self::device::{DeviceGradients, DeviceStore, TableStep};
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

/// What a rank tells the others with every request.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Status {
    /// [`FAILED`](Self::FAILED), [`WAITING`](Self::WAITING), and bits whose meaning the training loop knows.
    pub flags: i64,
    /// The sum of the weights of the batch's samples.
    pub weight: f64,
}

impl Status {
    /// The rank has failed, and makes no further steps: nothing is exchanged.
    pub const FAILED: i64 = 2;
    /// The rank has no batch yet: all ranks announce their requests once more.
    pub const WAITING: i64 = 8;
}

/// The gradients of what was looked up for one group.
#[derive(Debug)]
pub struct LookupGradients {
    /// `[U, F, D]`, as the lookup's pooled vectors.
    pub pooled: Vec<f32>,
    /// Of every element of every sequence's timeline, `[T, D]`.
    pub sequences: Vec<Vec<f32>>,
}

/// The lookups of a batch, asked for and not answered yet.
#[derive(Debug)]
pub struct Request {
    exchange: exchange::Request,
    /// On a device: the batch, and where answers of other ranks go.
    staged: Option<(Staged, Option<Destinations>)>,
}

/// What the lookups of a batch gave, by group.
#[derive(Debug)]
pub struct Lookups {
    /// In the order of the batch's groups.
    pub groups: Vec<Lookup>,
    exchanged: Exchanged,
}

/// Gradients on their way to the ranks that own the tables.
#[derive(Debug)]
pub struct SentGradients(Arriving);

/// A batch on the device, and what was looked up for it.
#[derive(Debug)]
pub(crate) struct DeviceLookup {
    pub(crate) staged: Staged,
    pub(crate) looked_up: LookedUp,
    /// `None` if no other rank has a part in it.
    travelled: Option<Travelled>,
}

/// The gradients of a device on their way to the ranks that own the tables.
#[derive(Debug)]
pub(crate) struct DeviceSentGradients(Option<exchange::DeviceGradients>);

/// How tables are divided, and the ranks that have them.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Every table's shards, in the order of tables.
    pub shards: Vec<Shard>,
    /// The ranks, of which this process is one.
    pub collectives: Arc<dyn Collectives>,
    /// The type in which vectors and gradients are sent.
    pub dtype: DataType,
}

impl Placement {
    /// Every table of `features` whole on one rank: the largest first, each on the rank that has the fewest bytes.
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

    /// All tables of `features` whole on the only rank.
    pub fn alone(features: &[FeatureConfig]) -> Self {
        let (tables, _) = tables_of(features);
        let shards = tables.iter().enumerate().map(|(i, config)| Shard::whole(i, config, 0)).collect();
        Self { shards, collectives: Arc::new(Alone), dtype: DataType::Fp32 }
    }
}

/// What the features of a model look up, in the schema's order.
#[derive(Debug)]
struct Layout {
    features: Vec<FeatureConfig>,
    /// Each once, in the order of the first feature that looks it up.
    tables: Vec<TableConfig>,
    /// By feature: the number of its table.
    table_of: Vec<usize>,
}

impl Layout {
    fn new(features: &[FeatureConfig]) -> Self {
        let (tables, table_of) = tables_of(features);
        Self { features: features.to_vec(), tables, table_of }
    }

    /// The features that look up a table, by number.
    fn features_of(&self, table: usize) -> impl Iterator<Item = usize> {
        (0..self.features.len()).filter(move |&feature| self.table_of[feature] == table)
    }
}

/// All tables of a model as one rank of a job sees them. Several features may look up one table; each of its rows is
/// updated once a step all the same.
///
/// [`request`](Self::request), [`lookup`](HostEmbeddings::lookup), [`send_gradients`](HostEmbeddings::send_gradients)
/// and [`update`](Self::update) are collective: every rank calls them once a step, in one order, with its own batch.
#[derive(Debug)]
pub struct Embeddings {
    layout: Layout,
    shards: Vec<Shard>,
    store: Store,
    exchange: Exchange,
    threads: Arc<rayon::ThreadPool>,
    /// Updates so far, which Adam's correction of its moments depends on.
    steps: u64,
    /// Whether checkpoints hold how rows are used.
    stores_usage: bool,
}

/// [`Embeddings`] whose shards are in this machine's memory.
#[derive(Debug, Clone, Copy)]
pub struct HostEmbeddings<'a> {
    pub(crate) all: &'a Embeddings,
    store: &'a HostStore,
}

/// [`Embeddings`] whose shards are in a device's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceEmbeddings<'a> {
    all: &'a Embeddings,
    pub(crate) store: &'a DeviceStore,
}

/// Where this rank's shards are.
#[derive(Debug)]
enum Store {
    Host(HostStore),
    Device(Box<DeviceStore>),
}

impl Embeddings {
    /// This rank's shards with initial weights from `seed` and the state that `optimizer` needs, and threads for
    /// lookups and updates.
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

    /// As [`new`](Self::new) with weights that are all alike, which are quicker to make, and threads that others may
    /// use: for measurements.
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

    /// Given tables, those [of](tables_of) the features, on the only rank.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the threads cannot be started.
    pub fn from_tables(features: &[FeatureConfig], tables: Vec<Table>, threads: usize) -> Result<Self> {
        let store = Store::Host(HostStore::of_whole(tables));
        let threads = Arc::new(thread_pool(threads)?);
        Ok(Self::of(Layout::new(features), store, &Placement::alone(features), threads))
    }

    /// This rank's shards in a device's memory, with the initial weights that they have in this machine's.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the device lacks the memory, or the tables differ in their dimension; [`Error::Io`] if the
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

    /// What every feature looks up, in the schema's order.
    pub fn features(&self) -> &[FeatureConfig] {
        &self.layout.features
    }

    /// The whole tables, in the order of the first feature that looks each up.
    pub fn tables(&self) -> &[TableConfig] {
        &self.layout.tables
    }

    /// The dimension of all vectors; 1 without tables.
    pub fn dim(&self) -> usize {
        self.layout.tables.first().map_or(1, |config| config.dim as usize)
    }

    /// The shards of all tables on all ranks, in the order of tables.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// What the ranks do together.
    pub fn collectives(&self) -> &Arc<dyn Collectives> {
        self.exchange.collectives()
    }

    /// Whether this rank has a shard, by its number, so that it reads and writes its values.
    pub fn holds(&self, shard: usize) -> bool {
        self.shards[shard].rank == self.collectives().rank()
    }

    /// Updates so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues after `steps` updates.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// The threads of lookups and updates.
    pub(crate) fn threads(&self) -> Arc<rayon::ThreadPool> {
        Arc::clone(&self.threads)
    }

    /// Runs `work` on the threads of lookups and updates.
    pub(crate) fn install<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.threads.install(work)
    }

    /// Bytes sent to other ranks so far, for the tables.
    pub fn sent_bytes(&self) -> SentBytes {
        let sent = &self.exchange.sent;
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let (requests, answers) = (load(&sent.requests), load(&sent.answers));
        SentBytes { requests, answers, gradients: load(&sent.gradients), dense: 0 }
    }

    /// What this rank does in a step, and how long it waits for others.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.exchange.recorder
    }

    /// Begins to ask the owners for the rows of every group of a batch, whose features are in the schema's order, and
    /// to tell all ranks this one's `status`. Without groups nothing is asked for.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for an id that its table has no row for; nothing was sent then. [`Error::RankLost`] if another
    /// rank fails.
    pub fn request(&self, groups: &[Group], status: Status) -> Result<Request> {
        let encoded = self.exchange.encode(self.lookups(groups)?, &self.threads);
        Ok(Request { exchange: self.exchange.request(encoded, status)?, staged: None })
    }

    /// As [`request`](Self::request) for a batch, which begins to be copied where the tables are.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request); [`Error::Fault`] if the device fails.
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

    /// What a batch looks up.
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
            // Of several errors the first group's.
            lookups.into_iter().collect()
        })
    }

    /// Tells all ranks, in place of a request, that this one has no batch yet. Returns their statuses, by rank. A request
    /// follows, or this once more, unless a rank has failed.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn say_waiting(&self) -> Result<Vec<Status>> {
        self.exchange.say_waiting()
    }

    /// Waits until all ranks have made their requests. Returns their statuses.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn statuses<'a>(&self, request: &'a mut Request) -> Result<&'a [Status]> {
        self.exchange.announce(&mut request.exchange)
    }

    /// The tables in memory.
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

    /// The tables on a device, if they are there: the model takes another way then.
    pub(crate) fn on_device(&self) -> Option<DeviceEmbeddings<'_>> {
        match &self.store {
            Store::Host(_) => None,
            Store::Device(store) => Some(DeviceEmbeddings { all: self, store }),
        }
    }

    /// The tables on a device.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] if they are in memory.
    pub(crate) fn device(&self) -> Result<DeviceEmbeddings<'_>> {
        self.on_device().ok_or_else(|| elsewhere(IN_MEMORY))
    }

    /// Updates every shard of this rank: the gradient of an id is summed over all places of all ranks where it was
    /// looked up, then its row is updated once. `sent` is what [`send_gradients`](HostEmbeddings::send_gradients) gave
    /// for the same gradients.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails, [`Error::Collective`] if the tables are on a device.
    ///
    /// # Panics
    ///
    /// If the gradients are not those of `lookups`, or the tables' state is that of another optimizer.
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

    /// Updates every shard of this rank that is on a device, as [`update`](Self::update) does; where `permit`, one `int`
    /// on the device, is 0, nothing changes.
    ///
    /// # Errors
    ///
    /// As [`update`](Self::update); [`Error::Fault`] if the device fails.
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
        let own = TableStep { optimizer, number: step, permit };
        match (&lookup.travelled, sent.0) {
            (Some(travelled), Some(sent)) => {
                exchange.update_on_device(travelled, batch, gradients, sent, store, own)?;
            }
            _ => store.update_own(batch, gradients, own)?,
        }
        self.steps = step;
        Ok(())
    }
}

impl<'a> HostEmbeddings<'a> {
    /// Looks up what all ranks asked for.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails.
    pub fn lookup(self, request: Request) -> Result<Lookups> {
        let Embeddings { exchange, layout, threads, .. } = self.all;
        let (groups, exchanged) = exchange.lookup(request.exchange, self.store, &layout.tables, threads)?;
        Ok(Lookups { groups, exchanged })
    }

    /// A sequence feature's vectors as the attention kernel reads them.
    pub(crate) fn sequence(self, feature: &'a FeatureLookup) -> Sequence<'a> {
        feature.sequence(self.all.exchange.whole(feature.table).and_then(|shard| self.store.table(shard)))
    }

    /// Begins to send the gradients of `lookups` to the owners.
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
    /// Looks up what all ranks asked for, on a device.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`] if another rank fails, [`Error::Fault`] if the device does.
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

    /// Begins to send the gradients of a device's lookups to the owners.
    ///
    /// # Errors
    ///
    /// As [`lookup`](Self::lookup).
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

/// A step was taken with tables that are elsewhere.
fn elsewhere(message: &str) -> Error {
    Error::collective("step of tables", message)
}

pub(crate) fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests;
