//! The shards of one rank in host memory.

use std::io;

use onefold_sharding::TableConfig;
use rayon::prelude::*;

use super::shard::{Buffer, RowSet, Shard};
use super::table::Table;
use super::update::{self, Contribution};
use super::usage::Usage;
use crate::config::TableOptimizerConfig;

/// A rank's shards, each stored as a table.
#[derive(Debug)]
pub(super) struct HostStore {
    /// For each shard of the plan, its index in `tables` if it is on this rank.
    places: Vec<Option<usize>>,
    tables: Vec<Table>,
    usage: Vec<Usage>,
}

impl HostStore {
    /// Creates the shards of `rank` with their initial weights.
    pub(super) fn new(
        configs: &[TableConfig],
        shards: &[Shard],
        rank: u32,
        optimizer: &TableOptimizerConfig,
        seed: u64,
    ) -> Self {
        Self::made(shards, rank, |shard| Table::initial(&configs[shard.table], optimizer, seed, shard))
    }

    /// Creates the shards of `rank` with constant weights, which are faster to create: for measurements.
    pub(super) fn alike(
        configs: &[TableConfig],
        shards: &[Shard],
        rank: u32,
        optimizer: &TableOptimizerConfig,
    ) -> Self {
        Self::made(shards, rank, |shard| Table::alike(&configs[shard.table], optimizer, shard))
    }

    fn made(shards: &[Shard], rank: u32, table: impl Fn(&Shard) -> Table + Send + Sync) -> Self {
        let held: Vec<&Shard> = shards.iter().filter(|shard| shard.rank == rank).collect();
        let tables = held.into_par_iter().with_max_len(1);
        let mut next = 0..;
        let place = |shard: &Shard| if shard.rank == rank { next.next() } else { None };
        let places = shards.iter().map(place).collect();
        let tables: Vec<Table> = tables.map(table).collect();
        let usage = tables.iter().map(|table| Usage::new(table.config().rows)).collect();
        Self { places, tables, usage }
    }

    /// Returns a shard by its index in the plan, if it is on this rank.
    pub(super) fn table(&self, shard: usize) -> Option<&Table> {
        self.places[shard].map(|place| &self.tables[place])
    }

    fn held(&self, shard: usize) -> usize {
        self.places[shard].expect("the shard is one that this rank holds")
    }

    /// Updates shards on the caller's threads in step `step`. Each row that was looked up is updated once, with the
    /// sum of its gradients over all contributions to its shard, in order. `work` contains shards by their index in
    /// the plan.
    pub(super) fn update(
        &mut self,
        work: Vec<(usize, Contribution<'_>)>,
        optimizer: &TableOptimizerConfig,
        step: u64,
    ) {
        let mut by_table: Vec<Vec<Contribution<'_>>> = self.tables.iter().map(|_| Vec::new()).collect();
        work.into_iter().for_each(|(shard, contribution)| by_table[self.held(shard)].push(contribution));
        let tables = self.tables.par_iter_mut().zip(&mut self.usage).zip(by_table).with_max_len(1);
        tables.for_each(|((table, usage), contributions)| {
            update::update(table, usage, contributions, optimizer, step);
        });
    }

    /// Returns the usage of a shard's rows.
    pub(super) fn usage(&self, shard: usize) -> &Usage {
        &self.usage[self.held(shard)]
    }

    /// Returns the mutable usage of a shard's rows.
    pub(super) fn usage_mut(&mut self, shard: usize) -> &mut Usage {
        let place = self.held(shard);
        &mut self.usage[place]
    }

    /// See [`Embeddings::read`](super::Embeddings::read).
    pub(super) fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.tables[self.held(shard)].read(buffer, rows, sink)
    }

    /// See [`Embeddings::write`](super::Embeddings::write).
    pub(super) fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let place = self.held(shard);
        self.tables[place].write(buffer, rows, source)
    }

    /// See [`Embeddings::buffers`](super::Embeddings::buffers).
    pub(super) fn buffers(&self, shard: usize) -> Vec<Buffer> {
        self.tables[self.held(shard)].buffers()
    }
}
