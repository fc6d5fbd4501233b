//! A row group of a dataset: the memory that its decoding takes, and the reads of its bytes.

use std::sync::Arc;
use std::time::Instant;

use onefold_datasets::footer::decoding_bytes;
use onefold_storage::{RANGE_GAP, Ranges};
use parquet::arrow::ProjectionMask;

use super::file::OpenFiles;
use super::stages::Stages;
use crate::error::{Error, Result};

/// One row group: the unit of decoding.
#[derive(Debug, Clone)]
pub(super) struct RowGroup {
    pub(super) files: Arc<OpenFiles>,
    pub(super) index: usize,
    /// The index of the row group's first sample among the chosen samples of the dataset.
    pub(super) first: u64,
}

impl RowGroup {
    /// Returns an upper bound of the bytes that decoding takes: pages, decoded ids and levels, and the batch made
    /// from them. This is an estimate from the footer; the true size replaces it after decoding.
    pub(super) fn decoding_bytes(&self) -> u64 {
        let natural = |number: i64| u64::try_from(number).unwrap_or(0);
        let (mut bytes, mut compressed, mut all_compressed) = (0_u64, 0_u64, 0_u64);
        let files = self.files.files.iter();
        let columns = files.flat_map(|file| {
            let row_group = file.row_group(self.index);
            let columns = row_group.columns().iter().enumerate();
            columns
                .map(move |(leaf, column)| (row_group.num_rows(), column, file.columns.leaf_included(leaf)))
        });
        for (rows, column, is_read) in columns {
            let rows = natural(rows);
            all_compressed = all_compressed.saturating_add(natural(column.compressed_size()));
            if !is_read {
                continue;
            }
            compressed =
                compressed.saturating_add(natural(column.compressed_size())).saturating_add(RANGE_GAP);
            // Offsets and sizes, or the interleaved floats, take at most 12 bytes per row.
            bytes = bytes.saturating_add(decoding_bytes(column)).saturating_add(rows.saturating_mul(12));
        }
        // Columns that the files lack take no more than that: they become empty lists or floats.
        let lacking = self.files.lacking.len() as u64;
        let rows = self.files.files.first().map_or(0, |file| natural(file.row_group(self.index).num_rows()));
        bytes = bytes.saturating_add(rows.saturating_mul(12).saturating_mul(lacking));
        bytes.saturating_add(compressed.min(all_compressed))
    }

    /// Starts reading the bytes of columns of file `number`. `then` is called with them on a thread that must not be
    /// blocked for long.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the footer's byte ranges lie outside the file.
    pub(super) fn start_reading(
        &self,
        number: usize,
        columns: &ProjectionMask,
        stages: &Arc<Stages>,
        then: impl FnOnce(Result<Ranges>) + Send + 'static,
    ) -> Result<()> {
        let (started, stages) = (Instant::now(), Arc::clone(stages));
        let file = &self.files.files[number];
        let (object, wanted) = (&file.object, file.byte_ranges(self.index, columns)?);
        let came = move |ranges: onefold_storage::Result<Ranges>| {
            stages.read(started, ranges.as_ref().map_or(0, Ranges::bytes));
            then(ranges.map_err(Error::from));
        };
        let storage = &self.files.storage;
        Ok(storage.start_reading(&object.path, object.bytes, wanted, object.e_tag.clone(), came)?)
    }
}
