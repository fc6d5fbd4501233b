//! The statistics that manifests have of the row groups of sets of files.

use std::collections::HashMap;
use std::sync::Arc;

use onefold_storage::Storage;

use super::manifests::{RowStatistics, rows_of_sets};
use super::{FeatureStatistics, FileSet, RowGroupStatistics, Snapshot};
use crate::{Error, Result};

/// The manifests' statistics of the samples of row groups, and their sums.
pub(crate) struct SetStatistics<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    /// By the path of a set: its manifest, and the row of its first row group there.
    rows: HashMap<String, (Arc<str>, usize)>,
    /// The manifest that was asked for last. Adjacent partitions are mostly in the same manifest.
    open: Option<RowStatistics<'a>>,
    path: Arc<str>,
    sum: RowGroupStatistics,
}

impl<'a> SetStatistics<'a> {
    /// Reads which manifest describes which row group. The statistics are read later.
    ///
    /// # Errors
    ///
    /// [`Error::Snapshot`] if a manifest is damaged, [`Error::Storage`] if the storage does not give it.
    pub(crate) fn new(storage: &'a Storage, snapshot: &'a Snapshot) -> Result<Self> {
        let rows = rows_of_sets(storage, &snapshot.manifests)?;
        let sum = RowGroupStatistics::default();
        Ok(Self { storage, snapshot, rows, open: None, path: "".into(), sum })
    }

    /// The statistics of the row groups of a set.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(crate) fn of(&mut self, set: &FileSet) -> Result<Vec<RowGroupStatistics>> {
        let missing = || Error::snapshot(self.storage.shown(set.path()), "no manifest names it any more");
        let (path, first) = self.rows.get(set.path()).cloned().ok_or_else(missing)?;
        let open = match self.open.take().filter(|_| self.path == path) {
            Some(open) => open,
            None => {
                let entry = self.snapshot.manifests.iter().find(|entry| *entry.path == *path);
                RowStatistics::open(self.storage, entry.ok_or_else(missing)?, &self.snapshot.schema)?
            }
        };
        self.path = path;
        let open = self.open.insert(open);
        let mut statistics = Vec::with_capacity(set.row_groups.len());
        for row in first..first + set.row_groups.len() {
            let of_row = open.get(row, true)?;
            self.sum.merge(RowGroupStatistics { features: of_row.features.clone(), dense: Vec::new() });
            statistics.push(of_row);
        }
        Ok(statistics)
    }

    /// The statistics of the sparse features of all row groups that were asked for, in the schema's order.
    pub(crate) fn features(&self) -> &[FeatureStatistics] {
        &self.sum.features
    }
}
