//! The contents of the tables in checkpoints: reading and writing them, and which rows are in use.

use std::io;

use onefold_sharding::TableConfig;

use super::shard::{Buffer, RowSet, Shard};
use super::usage::Usage;
use super::{Embeddings, Store, table};
use crate::config::TableOptimizerConfig;

/// The indices of a shard's buffers.
const WEIGHTS: usize = 0;
const STATE: usize = 1;
const USAGE: usize = 2;
/// The maximum number of evicted rows whose initial values are in memory at a time.
const EVICTED_AT_ONCE: usize = 1 << 16;

impl Embeddings {
    /// Returns the same tables, but with the usage of rows in their checkpoints, so that [`evict`](Self::evict) can
    /// continue from a checkpoint.
    #[must_use]
    pub(crate) fn storing_usage(self) -> Self {
        Self { stores_usage: true, ..self }
    }

    /// Evicts the rows of this rank that were not looked up since the last eviction: resets their weights to the
    /// initial values from `seed` and their optimizer state to zero. Returns the number of evicted rows. Shards
    /// with the same rows are counted once over all ranks. The next eviction considers lookups from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if writing to a device fails.
    pub(crate) fn evict(&mut self, seed: u64) -> io::Result<u64> {
        let mut count = 0;
        for number in (0..self.shards.len()).filter(|number| self.holds(*number)).collect::<Vec<_>>() {
            let rows = self.usage_mut(number).evict();
            count += if self.counts_rows_of(number) { rows.len() as u64 } else { 0 };
            let shard = self.shards[number].clone();
            let config = self.layout.tables[shard.table].clone();
            let state = self.buffers(number)[STATE].row_bytes();
            for rows in rows.chunks(EVICTED_AT_ONCE) {
                let mut values = &table::initial_rows(&config, seed, &shard, rows)[..];
                self.write(number, WEIGHTS, RowSet::Chosen(rows), &mut |target| {
                    let (first, rest) = values.split_at(target.len());
                    target.copy_from_slice(first);
                    values = rest;
                    Ok(())
                })?;
                if state > 0 {
                    self.write(number, STATE, RowSet::Chosen(rows), &mut |target| {
                        target.fill(0);
                        Ok(())
                    })?;
                }
            }
        }
        Ok(count)
    }

    /// Returns the number of rows of this rank that were looked up and not evicted since. Shards with the same rows
    /// are counted once over all ranks.
    pub(crate) fn rows_in_use(&self) -> u64 {
        let own = (0..self.shards.len()).filter(|number| self.holds(*number) && self.counts_rows_of(*number));
        own.map(|number| self.usage(number, Usage::in_use)).sum()
    }

    /// Returns whether this shard is the first of all shards with the same rows (replicas and column shards).
    fn counts_rows_of(&self, number: usize) -> bool {
        let same_rows = |a: &Shard, b: &Shard| (a.table, &a.rows) == (b.table, &b.rows);
        !self.shards[..number].iter().any(|other| same_rows(other, &self.shards[number]))
    }

    fn usage<T>(&self, shard: usize, look: impl FnOnce(&Usage) -> T) -> T {
        match &self.store {
            Store::Host(store) => look(store.usage(shard)),
            Store::Device(store) => look(&store.usage(shard)),
        }
    }

    fn usage_mut(&mut self, shard: usize) -> &mut Usage {
        match &mut self.store {
            Store::Host(store) => store.usage_mut(shard),
            Store::Device(store) => store.usage_mut(shard),
        }
    }

    /// Returns the rows of a shard that changed since [`clear_touched`](Self::clear_touched), ascending. This rank
    /// must [hold](Self::holds) the shard.
    pub(crate) fn touched(&self, shard: usize) -> Vec<u32> {
        self.usage(shard, Usage::touched)
    }

    /// Marks rows of a shard as changed.
    pub(crate) fn touch(&mut self, shard: usize, rows: &[u32]) {
        self.usage_mut(shard).touch(rows);
    }

    /// Clears the sets of changed rows.
    pub(crate) fn clear_touched(&mut self) {
        for number in 0..self.shards.len() {
            if self.holds(number) {
                self.usage_mut(number).clear_touched();
            }
        }
    }

    /// Returns all buffers of a shard that a checkpoint contains; the weights are the first.
    pub fn buffers(&self, shard: usize) -> Vec<Buffer> {
        let mut buffers = match &self.store {
            Store::Host(store) => store.buffers(shard),
            Store::Device(store) => store.buffers(shard),
        };
        buffers.extend(self.stores_usage.then_some(Buffer::USAGE));
        buffers
    }

    /// Reads rows of a buffer of a shard. This rank must [hold](Self::holds) the shard. `sink` receives the rows in
    /// order, as many per call as are contiguous in memory.
    ///
    /// # Errors
    ///
    /// Returns the first error of `sink`, or of reading from a device.
    pub fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if buffer == USAGE {
            return sink(&self.usage(shard, |usage| usage.bytes(self.numbers(shard, rows))));
        }
        match &self.store {
            Store::Host(store) => store.read(shard, buffer, rows, sink),
            Store::Device(store) => store.read(shard, buffer, rows, sink),
        }
    }

    /// Writes rows of a shard's buffer. `source` fills the rows in order, as many per call as are contiguous in
    /// memory.
    ///
    /// # Errors
    ///
    /// Returns the first error of `source`, or of writing to a device.
    pub fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if buffer == USAGE {
            let rows = self.numbers(shard, rows);
            let mut bytes = vec![0; rows.len()];
            source(&mut bytes)?;
            self.usage_mut(shard).set_bytes(rows, &bytes);
            return Ok(());
        }
        match &mut self.store {
            Store::Host(store) => store.write(shard, buffer, rows, source),
            Store::Device(store) => store.write(shard, buffer, rows, source),
        }
    }

    /// Returns the indices of rows of a shard.
    fn numbers(&self, shard: usize, rows: RowSet<'_>) -> Vec<u32> {
        let all = &self.shards[shard].rows;
        match rows {
            RowSet::All => (0..(all.end - all.start) as u32).collect(),
            RowSet::First(rows) => (0..rows as u32).collect(),
            RowSet::Chosen(rows) => rows.to_vec(),
        }
    }
}

/// Returns the buffers that a file contains of a whole table, optionally with the usage of rows.
pub(crate) fn whole_buffers(
    config: &TableConfig,
    optimizer: &TableOptimizerConfig,
    with_usage: bool,
) -> Vec<Buffer> {
    let dim = config.dim as usize;
    let mut buffers = table::shard_buffers(config, dim, table::rule(optimizer, 1).state_width(dim));
    buffers.extend(with_usage.then_some(Buffer::USAGE));
    buffers
}
