//! Estimates the memory for reading an epoch.

use super::row_group::RowGroup;
use super::{Input, Reader};
use crate::error::Result;

/// The assumed bytes of a value of a kept column, because the snapshot does not record the lengths of texts.
const KEPT_BYTES: u64 = 32;

/// The number of batches in memory at the same time: one is made, one waits, and the caller holds one.
const BATCHES: u64 = 3;

impl Reader {
    /// Returns an estimate of the bytes of memory with which an epoch can be read: two row groups of every stream of
    /// this rank, the row groups that a shuffle mixes, and a few batches. The estimate uses the footer of the file
    /// with the largest row group. Returns 0 if other processes read the dataset.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`](crate::Error::Dataset), [`Error::Corrupt`](crate::Error::Corrupt) or
    /// [`Error::Fault`](crate::Error::Fault) if that file cannot be opened.
    pub fn least_memory(&self) -> Result<u64> {
        let Input::Files(files) = &self.input else { return Ok(0) };
        let row_groups = self.chosen.iter().enumerate().flat_map(|(file, chosen)| {
            let sizes = chosen.set.row_groups.iter().map(|row_group| row_group.bytes_on_disk);
            sizes.enumerate().map(move |(index, bytes)| (bytes, file, index))
        });
        let Some((_, file, index)) = row_groups.max() else { return Ok(0) };
        let row_group = RowGroup { files: files.open(file)?, index, first: 0 };
        let mixed = self.recipe.options.shuffle.map_or(0, |shuffle| shuffle.row_groups as u64);
        let of_stream = mixed.saturating_add(2);
        let row_groups = (self.own_streams().count() as u64).saturating_mul(of_stream);
        let decoded = row_group.decoding_bytes().saturating_mul(row_groups);
        Ok(decoded.saturating_add(self.expected_batch_bytes().saturating_mul(BATCHES)))
    }

    /// Returns the bytes that reading ahead leaves free for batches.
    pub(super) fn headroom(&self) -> u64 {
        let batches = self.workers.threads() as u64 + 1;
        self.expected_batch_bytes().saturating_mul(batches).min(self.workers.memory_limit() / 3)
    }

    /// Returns the bytes of an average batch of this rank in which every sample stores its own lists.
    pub(super) fn expected_batch_bytes(&self) -> u64 {
        let statistics = &self.snapshot.statistics;
        let values = |name: &str| statistics.features.get(name).map_or(0, |feature| feature.values);
        let names = self.recipe.schema.sparse_features().map(|feature| values(&feature.name));
        let values = names.fold(0, u64::saturating_add).checked_div(statistics.samples).unwrap_or(0);
        let kept = KEPT_BYTES * self.recipe.kept.len() as u64;
        let sample = values.saturating_mul(8).saturating_add(self.recipe.sample_bytes() + kept);
        let batch: u64 = self.own_streams().map(|stream| self.samples_of_step(stream)).sum();
        sample.saturating_mul(batch)
    }
}
