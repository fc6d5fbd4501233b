//! What a rank costs per step: the trait a search asks, and the models behind it.

pub(crate) mod analytic;
pub(crate) mod features;
pub(crate) mod learned;
pub(crate) mod model_file;
pub(crate) mod set_model;
pub(crate) mod several;

use crate::buffers::{exchange_buffers, reserved_buffers, shared_lists};
use crate::table::ACTIVATION_BYTES;
use crate::{BufferBytes, Lookups, Result, Shard, ShardingType, Table, Topology};

/// A shard that stands on a rank, with what its cost depends on.
#[derive(Debug, Clone, Copy)]
pub struct ShardLoad<'a> {
    /// The table.
    pub table: &'a Table,
    /// How the table is sharded.
    pub sharding_type: ShardingType,
    /// The part of it, and its rank, whose speed and hardware it has.
    pub shard: &'a Shard,
    /// Whether all shards of the table stand on one machine.
    pub within_node: bool,
}

/// What a rank's step begins with, and what it gives back; per step, of all samples that the shard sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Distinct lists.
    pub lists: f64,
    /// Ids in them that the shard has rows for; of sequences the elements of their timelines.
    pub ids: f64,
    /// Vectors that come out: one a list, or one an id where the list is pooled elsewhere.
    pub vectors: f64,
}

impl ShardLoad<'_> {
    /// The shard's lists, ids and vectors in a step of `batch_size` samples per rank, over all features of its table.
    ///
    /// A row shard gets the share of ids that its rows have, and gives a partial sum for every list. A
    /// data-parallel table serves its own rank's samples only. One dedupe factor divides samples into
    /// distinct lists, the other their ids.
    pub fn work(&self, topology: &Topology, batch_size: u64) -> Work {
        let mut sum = Work { lists: 0.0, ids: 0.0, vectors: 0.0 };
        for lookups in self.table.lookups() {
            let Work { lists, ids, vectors } = self.work_of(lookups, topology, batch_size);
            sum = Work { lists: sum.lists + lists, ids: sum.ids + ids, vectors: sum.vectors + vectors };
        }
        sum
    }

    /// The samples of a step whose lists the shard sees: those of its rank if every rank has a copy, else all.
    pub(crate) fn samples(&self, topology: &Topology, batch_size: u64) -> f64 {
        let ranks =
            if self.sharding_type == ShardingType::DataParallel { 1.0 } else { f64::from(topology.ranks) };
        batch_size as f64 * ranks
    }

    /// The same of one feature.
    pub(crate) fn work_of(&self, lookups: &Lookups, topology: &Topology, batch_size: u64) -> Work {
        let [lists, ids] = lookups.distinct(self.samples(topology, batch_size));
        let ids = lookups.looked_up(ids * lookups.share_of(&self.shard.rows, self.table.rows));
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        Work { lists, ids, vectors }
    }

    /// What the trainer looks up of one feature: of a row shard, only the lists that have one of its rows.
    pub(crate) fn served_of(&self, lookups: &Lookups, topology: &Topology, batch_size: u64) -> Work {
        let Work { ids, .. } = self.work_of(lookups, topology, batch_size);
        let part = lookups.share_of(&self.shard.rows, self.table.rows);
        let [all_lists, all_ids] = lookups.distinct(self.samples(topology, batch_size));
        let lists = shared_lists(all_lists, all_ids, lookups.deviation(), part);
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        Work { lists, ids, vectors }
    }

    /// Whether it is all of its table.
    pub fn is_whole(&self) -> bool {
        self.shard.row_count() == self.table.rows && self.shard.column_count() == self.table.dim
    }

    /// Bytes of the gradient of all weights.
    pub(crate) fn gradient_bytes(&self) -> f64 {
        self.shard.row_count() as f64 * self.shard.column_count() as f64 * ACTIVATION_BYTES
    }

    /// The buffers in which ranks exchange ids, vectors and gradients of the shard, on average.
    pub fn buffers(&self, topology: &Topology, batch_size: u64) -> BufferBytes {
        exchange_buffers(self.table, self.sharding_type, self.shard, topology, batch_size)
    }

    /// The same with a reserve for batches above the mean.
    pub fn reserved_buffers(&self, topology: &Topology, batch_size: u64) -> BufferBytes {
        reserved_buffers(self.table, self.sharding_type, self.shard, topology, batch_size)
    }

    /// What the shard's rank sends for it in a step of `batch_size` samples per rank.
    ///
    /// The forward pass sends pooled vectors, the backward pass their gradients. The bytes are those of TorchRec's
    /// formulas, which give all of them to the slowest link in use. Ours is the row-wise table on one machine among
    /// several: its partial sums are added up by the links inside, and what goes to the other machines is divided over
    /// the machine's ranks. A data-parallel table all-reduces its gradient on a ring, on which W ranks send
    /// 2 (W - 1) / W times its bytes each (Patarasuk and Yuan 2009).
    pub fn traffic(&self, topology: &Topology, batch_size: u64) -> Traffic {
        if topology.ranks == 1 {
            return Traffic::default();
        }
        let (nodes, ranks) = (topology.nodes(), f64::from(topology.ranks));
        let columns = self.shard.column_count() as f64;
        if self.sharding_type == ShardingType::DataParallel {
            let reduced = self.gradient_bytes() * 2.0 * (ranks - 1.0) / ranks;
            return Traffic { backward: LinkBytes::slowest(topology, reduced), ..Traffic::default() };
        }
        let sent = self.work(topology, batch_size).vectors * columns * ACTIVATION_BYTES;
        let in_node = self.sharding_type == ShardingType::RowWise && self.within_node && nodes > 1;
        let bytes = if in_node {
            LinkBytes { intra: sent, inter: sent / f64::from(topology.ranks_per_node) }
        } else {
            LinkBytes::slowest(topology, sent)
        };
        Traffic { forward: bytes, backward: bytes, gather: LinkBytes::default() }
    }
}

/// Bytes by the kind of link that they take.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkBytes {
    /// Within a machine.
    pub intra: f64,
    /// Between machines.
    pub inter: f64,
}

impl LinkBytes {
    /// All of them by the slowest link in use.
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

    /// By both kinds of links.
    pub fn sum(self) -> f64 {
        self.intra + self.inter
    }
}

/// What a rank sends in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Traffic {
    /// In the forward pass.
    pub forward: LinkBytes,
    /// In the backward pass.
    pub backward: LinkBytes,
    /// After it: sums of gradients that all ranks get, where these are not part of the backward pass.
    pub gather: LinkBytes,
}

impl Traffic {
    /// Adds another shard's.
    pub fn add(&mut self, other: Self) {
        self.forward.add(other.forward);
        self.backward.add(other.backward);
        self.gather.add(other.gather);
    }

    /// Takes a shard's away again.
    pub fn subtract(&mut self, other: Self) {
        self.forward.subtract(other.forward);
        self.backward.subtract(other.backward);
        self.gather.subtract(other.gather);
    }

    /// All of it, by both kinds of links.
    pub fn sum(&self) -> f64 {
        self.forward.sum() + self.backward.sum() + self.gather.sum()
    }
}

/// What a cost model must know of a rank to price its communication.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankLoad {
    /// The rank's predicted computation, in milliseconds per step.
    pub compute_ms: f64,
    /// What the rank sends.
    pub traffic: Traffic,
}

/// What one training step takes on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankCost {
    /// Lookup, pooling and update, forward and backward, in milliseconds.
    pub compute_ms: f64,
    /// Exchange of pooled vectors and their gradients with the other ranks, in milliseconds.
    pub communication_ms: f64,
}

impl RankCost {
    /// Compute and communication one after the other, in milliseconds.
    pub fn total_ms(&self) -> f64 {
        self.compute_ms + self.communication_ms
    }
}

/// Predicts what ranks cost.
///
/// A rank is priced whole, because a fused lookup of several tables is cheaper than their sum, and yet cheaply: every
/// shard has a **contribution**, a vector that depends on it alone, and a rank's computation is a function of the
/// **sum** of its shards' contributions (Zaheer et al., *Deep Sets*, 2017; NeuroShard's model has this form). A search
/// encodes a shard once and then adds and takes away vectors.
pub trait CostModel: Send + Sync {
    /// The name that a plan keeps, with a version: another formula gets another id.
    fn id(&self) -> &str;

    /// Numbers of a contribution.
    fn width(&self) -> usize;

    /// Writes the contribution of a shard to its rank, `[width]`, in a step of `batch_size` samples per rank. Ranks of the
    /// same hardware and memory bandwidth have the same.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) if the shard's features are not finite.
    fn contribution(
        &self,
        load: &ShardLoad<'_>,
        topology: &Topology,
        batch_size: u64,
        out: &mut [f64],
    ) -> Result<()>;

    /// What the shard's rank sends for it in a step of `batch_size` samples per rank.
    fn traffic(&self, load: &ShardLoad<'_>, topology: &Topology, batch_size: u64) -> Traffic {
        load.traffic(topology, batch_size)
    }

    /// The milliseconds that every rank spends in a step to ask for the shard's vectors. What the shard's own rank does
    /// not spend, because it looks up a whole table where it is, is taken off its computation.
    fn asking_ms(&self, _load: &ShardLoad<'_>, _topology: &Topology, _batch_size: u64) -> f64 {
        0.0
    }

    /// The computation of `rank`, whose contributions sum to `sum + added`, both `[width]`, in milliseconds per step.
    fn compute_ms(&self, rank: u32, sum: &[f64], added: &[f64]) -> f64;

    /// The communication of every rank, in milliseconds per step, with the time that it waits for other ranks.
    fn communication_ms(&self, ranks: &[RankLoad], topology: &Topology) -> Vec<f64>;

    /// The same without the time that a rank waits for others. With it an idle rank costs as much as the one that it
    /// waits for; without it, a search sees which rank has most to do, and which have less.
    fn exchange_ms(&self, ranks: &[RankLoad], topology: &Topology) -> Vec<f64> {
        self.communication_ms(ranks, topology)
    }

    /// What one should know of a prediction for these ranks, as that they are unlike all that was measured.
    fn notes(&self, _ranks: &[Vec<ShardLoad<'_>>], _topology: &Topology, _batch_size: u64) -> Vec<String> {
        Vec::new()
    }
}

/// The cost of every rank, from its shards.
pub(crate) fn rank_costs(
    model: &dyn CostModel,
    ranks: &[Vec<ShardLoad<'_>>],
    topology: &Topology,
    batch_size: u64,
) -> Result<Vec<RankCost>> {
    let width = model.width();
    let (zeros, mut contribution) = (vec![0.0; width], vec![0.0; width]);
    let mut loads = Vec::with_capacity(ranks.len());
    let asking = |shard: &ShardLoad<'_>| model.asking_ms(shard, topology, batch_size);
    let asking_ms: f64 = ranks.iter().flatten().map(asking).sum();
    for (rank, shards) in (0..).zip(ranks) {
        let mut sum = vec![0.0; width];
        let mut load = RankLoad::default();
        for shard in shards {
            model.contribution(shard, topology, batch_size, &mut contribution)?;
            sum.iter_mut().zip(&contribution).for_each(|(sum, part)| *sum += part);
            load.traffic.add(model.traffic(shard, topology, batch_size));
        }
        load.compute_ms =
            asking_ms + if shards.is_empty() { 0.0 } else { model.compute_ms(rank, &sum, &zeros) };
        loads.push(load);
    }
    let communication = model.communication_ms(&loads, topology);
    let cost = |(load, communication_ms): (&RankLoad, f64)| RankCost {
        compute_ms: load.compute_ms,
        communication_ms,
    };
    Ok(loads.iter().zip(communication).map(cost).collect())
}
