//! The cost of a rank per step: the trait that searches use, and the models that implement it.

pub(crate) mod analytic;
pub(crate) mod features;
pub(crate) mod learned;
pub(crate) mod linear;
pub(crate) mod model_file;
pub(crate) mod network;
pub(crate) mod several;

use crate::error::Result;
use crate::lookups::{Lookups, shared_lists};
use crate::plan::{Shard, ShardingType};
use crate::table::{ACTIVATION_BYTES, Table};
use crate::topology::Topology;

/// A shard on a rank, with all properties on which its cost depends.
#[derive(Debug, Clone, Copy)]
pub struct ShardLoad<'a> {
    /// The table.
    pub table: &'a Table,
    /// How the table is sharded.
    pub sharding_type: ShardingType,
    /// The part of the table, and its rank, which determines the speed and hardware.
    pub shard: &'a Shard,
    /// The ranks.
    pub topology: &'a Topology,
    /// The number of samples per rank and step.
    pub batch_size: u64,
    /// Whether all shards of the table are on one machine.
    pub within_node: bool,
}

/// The input and output of a shard's lookup in a step, over all samples that the shard serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// The number of distinct lists.
    pub lists: f64,
    /// The number of ids in them that the shard has rows for. For sequences, it is the number of elements of their
    /// timelines.
    pub ids: f64,
    /// The number of vectors that the shard returns: one per list, or one per id if the list is pooled elsewhere.
    pub vectors: f64,
}

impl<'a> ShardLoad<'a> {
    /// Returns a table that is whole on one rank.
    pub fn table_wise(table: &'a Table, shard: &'a Shard, topology: &'a Topology, batch_size: u64) -> Self {
        let sharding_type = ShardingType::TableWise;
        Self { table, sharding_type, shard, topology, batch_size, within_node: true }
    }

    /// Returns the numbers of lists, ids and vectors of the shard in a step, summed over all features of its table.
    ///
    /// A row shard receives the share of ids that fall on its rows, and returns a partial sum for every list. A
    /// data-parallel table serves only the samples of its own rank. One dedupe factor gives the number of distinct
    /// lists, the other one the number of their ids.
    pub fn work(&self) -> Work {
        let mut sum = Work { lists: 0.0, ids: 0.0, vectors: 0.0 };
        for lookups in self.table.lookups() {
            let Work { lists, ids, vectors } = self.work_of(lookups);
            sum = Work { lists: sum.lists + lists, ids: sum.ids + ids, vectors: sum.vectors + vectors };
        }
        sum
    }

    /// Returns the number of samples in a step whose lists the shard serves: the samples of its rank if every rank
    /// has a copy, else all samples.
    pub(crate) fn samples(&self) -> f64 {
        let ranks = if self.sharding_type == ShardingType::DataParallel { 1 } else { self.topology.ranks };
        self.batch_size as f64 * f64::from(ranks)
    }

    /// Returns the [`work`](Self::work) for one feature.
    pub(crate) fn work_of(&self, lookups: &Lookups) -> Work {
        let [lists, ids] = lookups.distinct(self.samples());
        let ids = lookups.looked_up(ids * lookups.share_of(&self.shard.rows, self.table.rows));
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        Work { lists, ids, vectors }
    }

    /// Returns the lookups of the trainer for one feature. Unlike [`work_of`](Self::work_of), it counts only lists
    /// with at least one row in the shard.
    pub(crate) fn served_of(&self, lookups: &Lookups) -> Work {
        let Work { ids, .. } = self.work_of(lookups);
        let part = lookups.share_of(&self.shard.rows, self.table.rows);
        let [all_lists, all_ids] = lookups.distinct(self.samples());
        let lists = shared_lists(all_lists, all_ids, lookups.deviation(), part);
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        Work { lists, ids, vectors }
    }

    /// Returns whether the shard is the whole table.
    pub fn is_whole(&self) -> bool {
        self.shard.row_count() == self.table.rows && self.shard.column_count() == self.table.dim
    }

    /// Returns the bytes of the gradient of all weights.
    pub(crate) fn gradient_bytes(&self) -> f64 {
        self.shard.row_count() as f64 * self.shard.column_count() as f64 * ACTIVATION_BYTES
    }

    /// Returns the bytes that the shard's rank sends for it in a step.
    ///
    /// The forward pass sends pooled vectors, the backward pass their gradients. The bytes follow TorchRec's
    /// formulas, which assign all of them to the slowest link in use, with one difference: the partial sums of a
    /// row-wise table on one of several machines are added over the links within the machine, and the bytes for other
    /// machines are divided among the ranks of the machine. A data-parallel table all-reduces its gradient on a ring,
    /// in which each of W ranks sends 2 (W - 1) / W times the gradient's bytes (Patarasuk and Yuan 2009).
    pub fn traffic(&self) -> Traffic {
        let topology = self.topology;
        if topology.ranks == 1 {
            return Traffic::default();
        }
        let (nodes, ranks) = (topology.nodes(), f64::from(topology.ranks));
        let columns = self.shard.column_count() as f64;
        if self.sharding_type == ShardingType::DataParallel {
            let reduced = self.gradient_bytes() * 2.0 * (ranks - 1.0) / ranks;
            return Traffic { backward: LinkBytes::slowest(topology, reduced), ..Traffic::default() };
        }
        let sent = self.work().vectors * columns * ACTIVATION_BYTES;
        let in_node = self.sharding_type == ShardingType::RowWise && self.within_node && nodes > 1;
        let bytes = if in_node {
            LinkBytes { intra: sent, inter: sent / f64::from(topology.ranks_per_node) }
        } else {
            LinkBytes::slowest(topology, sent)
        };
        Traffic { forward: bytes, backward: bytes, gather: LinkBytes::default() }
    }
}

/// Bytes per kind of link.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkBytes {
    /// Bytes within a machine.
    pub intra: f64,
    /// Bytes between machines.
    pub inter: f64,
}

impl LinkBytes {
    /// Assigns all bytes to the slowest kind of link in use.
    pub(crate) fn slowest(topology: &Topology, bytes: f64) -> Self {
        if topology.nodes() > 1 {
            Self { intra: 0.0, inter: bytes }
        } else {
            Self { intra: bytes, inter: 0.0 }
        }
    }

    fn add(&mut self, other: Self) {
        self.intra += other.intra;
        self.inter += other.inter;
    }

    fn subtract(&mut self, other: Self) {
        self.intra -= other.intra;
        self.inter -= other.inter;
    }

    /// Returns the bytes over both kinds of links.
    pub fn sum(self) -> f64 {
        self.intra + self.inter
    }
}

/// The bytes that a rank sends in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of the forward pass.
    pub forward: LinkBytes,
    /// Bytes of the backward pass.
    pub backward: LinkBytes,
    /// Bytes after the backward pass: sums of gradients that are sent to all ranks, if they are not part of
    /// `backward`.
    pub gather: LinkBytes,
}

impl Traffic {
    /// Adds the traffic of another shard.
    pub fn add(&mut self, other: Self) {
        self.forward.add(other.forward);
        self.backward.add(other.backward);
        self.gather.add(other.gather);
    }

    /// Subtracts the traffic of a shard.
    pub fn subtract(&mut self, other: Self) {
        self.forward.subtract(other.forward);
        self.backward.subtract(other.backward);
        self.gather.subtract(other.gather);
    }

    /// Returns all bytes over both kinds of links.
    pub fn sum(&self) -> f64 {
        self.forward.sum() + self.backward.sum() + self.gather.sum()
    }
}

/// The properties of a rank from which a cost model predicts its communication.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankLoad {
    /// The rank's predicted computation, in milliseconds per step.
    pub compute_ms: f64,
    /// The bytes that the rank sends.
    pub traffic: Traffic,
}

/// The cost of one training step on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankCost {
    /// Time of lookup, pooling and update, forward and backward, in milliseconds.
    pub compute_ms: f64,
    /// Time of the exchange of pooled vectors and their gradients with the other ranks, in milliseconds.
    pub communication_ms: f64,
}

/// A model that predicts the cost of ranks.
///
/// The computation of a rank is that of a rank without shards, and the sum over its shards. A search computes the
/// time of a shard once, and then only adds and subtracts. A model may correct the sum for a rank as a whole; the
/// correction is used to choose among the plans that a search has found.
pub trait CostModel: Send + Sync {
    /// Returns the name of the model, which is stored in plans. The name contains a version, which changes with the
    /// formulas.
    fn id(&self) -> &str;

    /// Returns the computation that a shard adds to its rank, in milliseconds per step. It is the same on all ranks
    /// with the same hardware and memory bandwidth.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) if the shard's features are not finite.
    fn shard_ms(&self, load: &ShardLoad<'_>) -> Result<f64>;

    /// Returns the computation of a rank without shards, in milliseconds per step.
    fn idle_ms(&self, _rank: u32) -> f64 {
        0.0
    }

    /// Returns the correction of the computation of a rank with these shards, in milliseconds per step.
    fn correction_ms(&self, _rank: u32, _shards: &[ShardLoad<'_>]) -> f64 {
        0.0
    }

    /// Returns the bytes that the shard's rank sends for it in a step.
    fn traffic(&self, load: &ShardLoad<'_>) -> Traffic {
        load.traffic()
    }

    /// Returns the milliseconds that every rank spends in a step on requests for the shard's vectors. If a rank holds
    /// a whole table, it looks it up locally, and the table's [`shard_ms`](Self::shard_ms) is reduced by this time.
    fn asking_ms(&self, _load: &ShardLoad<'_>) -> f64 {
        0.0
    }

    /// Returns the communication of every rank, in milliseconds per step. If `waits`, it includes the time that a rank
    /// waits for other ranks; then an idle rank costs as much as the rank for which it waits. Otherwise a search sees
    /// which ranks are busy.
    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology, waits: bool) -> Vec<f64>;

    /// Returns caveats about a prediction for these ranks, for example that they are outside of the measured range.
    fn notes(&self, _ranks: &[Vec<ShardLoad<'_>>]) -> Vec<String> {
        Vec::new()
    }
}

/// Returns the cost of every rank, given its shards.
pub(crate) fn rank_costs(
    model: &dyn CostModel,
    ranks: &[Vec<ShardLoad<'_>>],
    topology: &Topology,
) -> Result<Vec<RankCost>> {
    let asking_ms: f64 = ranks.iter().flatten().map(|shard| model.asking_ms(shard)).sum();
    let mut loads = Vec::with_capacity(ranks.len());
    for (rank, shards) in (0..).zip(ranks) {
        let compute_ms = asking_ms + model.idle_ms(rank) + model.correction_ms(rank, shards);
        let mut load = RankLoad { compute_ms, ..RankLoad::default() };
        for shard in shards {
            load.compute_ms += model.shard_ms(shard)?;
            load.traffic.add(model.traffic(shard));
        }
        loads.push(load);
    }
    let communication = model.communication_ms(&loads, topology, true);
    let cost = |(load, communication_ms): (&RankLoad, f64)| RankCost {
        compute_ms: load.compute_ms,
        communication_ms,
    };
    Ok(loads.iter().zip(communication).map(cost).collect())
}
