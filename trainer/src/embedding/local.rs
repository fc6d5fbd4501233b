//! All tables whole, in this process's memory.

use std::io;

use onefold_ikjt::Group;
use onefold_sharding::TableConfig;
use rayon::prelude::*;

use super::lookup::{FeatureLookup, Lookup, Steps, by_group};
use super::shard::{Buffer, RowSet, Shard};
use super::table::Table;
use super::update::{self, Upstream};
use super::{Embeddings, LookupGradients, thread_pool};
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::kernels::attention::Sequence;

/// The only rank, which holds every table whole.
#[derive(Debug)]
pub struct LocalEmbeddings {
    configs: Vec<TableConfig>,
    shards: Vec<Shard>,
    tables: Vec<Table>,
    threads: rayon::ThreadPool,
    steps: u64,
}

impl LocalEmbeddings {
    /// Tables with initial weights from `seed` and the state that `optimizer` needs, and threads for lookups and
    /// updates.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    pub fn new(
        configs: &[TableConfig],
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: usize,
    ) -> Result<Self> {
        let pool = thread_pool(threads)?;
        let table = |(i, config): (usize, &TableConfig)| Table::initial(config, optimizer, seed, i);
        let tables = pool.install(|| configs.par_iter().enumerate().map(table).collect());
        Ok(Self::with_threads(tables, pool))
    }

    /// Given tables, in the schema's order of features.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    pub fn from_tables(tables: Vec<Table>, threads: usize) -> Result<Self> {
        Ok(Self::with_threads(tables, thread_pool(threads)?))
    }

    fn with_threads(tables: Vec<Table>, threads: rayon::ThreadPool) -> Self {
        let configs: Vec<TableConfig> = tables.iter().map(|table| table.config().clone()).collect();
        let shards = configs.iter().enumerate().map(|(i, config)| Shard::whole(i, config, 0)).collect();
        Self { configs, shards, tables, threads, steps: 0 }
    }

    /// The tables.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }
}

impl Embeddings for LocalEmbeddings {
    fn configs(&self) -> &[TableConfig] {
        &self.configs
    }

    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        1
    }

    fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn threads(&self) -> &rayon::ThreadPool {
        &self.threads
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn lookup(&self, groups: &[Group], steps: Steps) -> Result<Vec<Lookup>> {
        by_group(&self.threads, groups, |group, first_table| {
            Lookup::new(group, &self.tables, first_table, steps)
        })
    }

    fn sequence<'a>(&'a self, feature: &'a FeatureLookup) -> Sequence<'a> {
        feature.sequence(&self.tables[feature.table])
    }

    fn update(
        &mut self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) {
        self.steps += 1;
        let mut work: Vec<(&FeatureLookup, Upstream<'_>)> = Vec::new();
        for (lookup, gradients) in lookups.iter().zip(gradients) {
            let pooled: &[f32] = &gradients.pooled;
            for (i, feature) in lookup.pooled_features.iter().enumerate() {
                work.push((feature, Upstream::Pooled(pooled, i, lookup.pooled_features.len())));
            }
            for (feature, gradient) in lookup.sequences.iter().zip(&gradients.sequences) {
                work.push((feature, Upstream::Values(gradient)));
            }
        }
        let Self { tables, threads, steps, .. } = self;
        threads.install(|| update::update(tables, &work, optimizer, *steps));
    }

    fn buffers(&self, shard: usize) -> Vec<Buffer> {
        self.tables[shard].buffers()
    }

    fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.tables[shard].read(buffer, rows, sink)
    }

    fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.tables[shard].write(buffer, rows, source)
    }
}
