//! Optional checks of a dataset while it is read.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use onefold_datasets::{Schema, suggest};

use crate::batch::Batch;
use crate::error::{Error, Origin, Result};

/// Optional checks of a dataset while it is read. They may cause errors, but do not change batches.
///
/// A preprocessing service always verifies the checksums of the bytes that it reads, regardless of `verify`. Tables
/// and labels are checked in the process that requests the check.
#[derive(Debug, Clone)]
pub struct Checks {
    /// Whether the bytes of each column are compared with the checksum that was recorded when they were written.
    pub verify: bool,
    /// The number of rows of the embedding table of each feature. An id that is out of range after preprocessing is
    /// an error, which names its place.
    pub table_rows: BTreeMap<String, u64>,
    /// The valid range of each label. A value outside the range, or a NaN, is an error, which names its place.
    pub label_ranges: BTreeMap<String, RangeInclusive<f32>>,
}

impl Default for Checks {
    /// Verifies checksums; allows any ids and labels.
    fn default() -> Self {
        Self { verify: true, table_rows: BTreeMap::new(), label_ranges: BTreeMap::new() }
    }
}

impl Checks {
    /// Returns an error for a table or label that batches of `schema` do not have.
    pub(super) fn check_names(&self, schema: &Schema) -> Result<()> {
        let features = || schema.sparse_features().map(|feature| feature.name.as_str());
        if let Some(name) = self.table_rows.keys().find(|name| features().all(|known| known != name.as_str()))
        {
            return Err(Error::options(
                format!("a table is given for `{name}`, but the batches have no such sparse feature"),
                suggest(name, features()),
            ));
        }
        match self.label_ranges.keys().find(|name| !schema.labels.contains(name)) {
            None => Ok(()),
            Some(name) => Err(Error::options(
                format!("a range is given for `{name}`, but the dataset has no such label"),
                suggest(name, schema.labels.iter().map(String::as_str)),
            )),
        }
    }

    /// Checks the ids and labels of a batch. `labels` are the names of its labels, and `origin` returns the place of
    /// a sample in the dataset, if it is known.
    pub(super) fn run(
        &self,
        batch: &Batch,
        labels: &[String],
        origin: impl Fn(usize) -> Option<Origin>,
    ) -> Result<()> {
        self.check_labels(batch, labels, &origin)?;
        self.check_ids(batch, &origin)
    }

    fn check_labels(
        &self,
        batch: &Batch,
        labels: &[String],
        origin: &impl Fn(usize) -> Option<Origin>,
    ) -> Result<()> {
        let names = labels.iter().enumerate();
        for (column, range, name) in
            names.filter_map(|(i, name)| Some((i, self.label_ranges.get(name)?, name)))
        {
            let values = batch.labels().chunks_exact(batch.label_width().max(1)).map(|labels| labels[column]);
            if let Some((sample, value)) = values.enumerate().find(|(_, value)| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                let message = format!("the label is {value}, which is not from {least} to {most}");
                return Err(Error::value(
                    (origin(sample), sample),
                    name,
                    &message,
                    "change the label in the dataset's query, as `rating >= 4`, exclude such samples there, or train \
                     with a `loss` that takes them: `mse`, `huber` or `poisson`",
                ));
            }
        }
        Ok(())
    }

    fn check_ids(&self, batch: &Batch, origin: &impl Fn(usize) -> Option<Origin>) -> Result<()> {
        if self.table_rows.is_empty() {
            return Ok(());
        }
        for group in batch.groups() {
            for feature in group.features() {
                let Some(&rows) = self.table_rows.get(feature.name()) else { continue };
                let outside = |id: &i64| u64::try_from(*id).ok().is_none_or(|id| id >= rows);
                if !feature.values().iter().any(outside) {
                    continue;
                }
                let found = (0..group.samples()).find_map(|sample| {
                    let ids = feature.row(group.row_of(sample));
                    ids.iter().copied().find(|id| outside(id)).map(|id| (sample, id))
                });
                if let Some((sample, id)) = found {
                    return Err(Error::value(
                        (origin(sample), sample),
                        feature.name(),
                        &format!("id {id} is outside the table's {rows} rows"),
                        "give the table more rows (a model that is trained already gets them by \
                         `onefold-train run --warm-start`), or hash or clamp the feature's ids",
                    ));
                }
            }
        }
        Ok(())
    }
}
