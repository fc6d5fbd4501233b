//! Cut samples to a finished [`Batch`]: deduplicated as asked, preprocessed, ids checked.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::new_empty_array;
use onefold_datasets::{FeatureGroup, KeptColumn, Layout, Schema};

use super::Dedupe;
use super::decode::{Decoded, Ids};
use super::stages::Stages;
use crate::dedupe::deduplicate_shared;
use crate::preprocess::Preprocessor;
use crate::{Batch, BatchParts, Error, Feature, Group, KeptValues, Result, fold_windows};

/// Samples of decoded row groups, in order.
pub(super) type Pieces = Vec<(Arc<Decoded>, Range<usize>)>;

/// What a batch goes through.
#[derive(Debug)]
pub(super) struct Conversion {
    pub(super) layout: Layout,
    pub(super) dedupe: Dedupe,
    /// What is read.
    pub(super) schema: Schema,
    pub(super) timestamps: bool,
    /// The columns that batches carry beside their features.
    pub(super) kept: Vec<KeptColumn>,
    /// What a sample takes besides its ids and its kept values.
    pub(super) sample_bytes: u64,
    pub(super) preprocessor: Option<Arc<Preprocessor>>,
    /// Rows of the tables that ids must be in, by feature.
    pub(super) table_rows: BTreeMap<String, u64>,
    /// Values that labels may have, by label.
    pub(super) label_ranges: BTreeMap<String, RangeInclusive<f32>>,
}

impl Conversion {
    /// The bytes of a batch of `pieces` and of `copies` of it, at most, before preprocessing.
    pub(super) fn batch_bytes(&self, pieces: &Pieces, copies: u64) -> u64 {
        let (mut samples, mut kept, mut all) = (0, 0, Ids::default());
        for (decoded, rows) in pieces {
            let ids = decoded.ids_in(rows);
            samples += rows.len() as u64;
            kept += decoded.batch.kept().iter().map(|column| column.bytes(rows.start, rows.end)).sum::<u64>();
            all.expanded += ids.expanded;
            all.distinct += ids.distinct;
            all.stored += ids.stored;
        }
        let deduplicates = match (self.layout, self.dedupe) {
            (Layout::Rows, Dedupe::Exact | Dedupe::Window) | (Layout::Folded, Dedupe::Exact) => 1,
            (Layout::Rows, Dedupe::Off) | (Layout::Folded, Dedupe::Off | Dedupe::Window) => 0,
        };
        // As cut, as deduplicated, and as preprocessed.
        let copies = copies + 1 + deduplicates + u64::from(self.preprocessor.is_some());
        let ids = match (self.layout, self.dedupe) {
            (_, Dedupe::Off) => all.expanded,
            (Layout::Folded, Dedupe::Window) => all.stored,
            (Layout::Rows, Dedupe::Window) | (_, Dedupe::Exact) => all.distinct,
        };
        copies * (8 * ids + self.sample_bytes * samples + kept)
    }

    /// The batch of `pieces`; without any, a batch of no samples.
    pub(super) fn run(&self, pieces: &Pieces, stages: &Stages) -> Result<Batch> {
        let batch = self.run_shared(pieces, stages)?;
        if self.dedupe == Dedupe::Window {
            return Ok(batch);
        }
        let started = Instant::now();
        let mut parts = batch.into_parts();
        parts.groups = parts.groups.into_iter().map(Group::compact).collect::<Result<_>>()?;
        stages.deduplicated(started);
        Ok(Batch::trusted(parts))
    }

    /// [`run`](Self::run), where lists may share ids however they are deduplicated: what is left to do is to compact
    /// them, unless windows are asked for.
    pub(super) fn run_shared(&self, pieces: &Pieces, stages: &Stages) -> Result<Batch> {
        let started = Instant::now();
        let borrowed: Vec<_> = pieces.iter().map(|(decoded, rows)| (&decoded.batch, rows.clone())).collect();
        let cut = if pieces.is_empty() { self.empty()? } else { Batch::concat(&borrowed)? };
        stages.cut(started);
        let started = Instant::now();
        let groups = cut.groups().iter().zip(&self.schema.groups);
        let groups = groups
            .map(|(group, of_schema)| self.group(group, of_schema.deduplicated))
            .collect::<Result<_>>()?;
        let mut batch = Batch::try_new(BatchParts { groups, ..cut.into_parts() })?;
        stages.deduplicated(started);
        let started = Instant::now();
        if let Some(preprocessor) = &self.preprocessor {
            batch = preprocessor.run(batch)?;
        }
        self.check_labels(&batch, pieces)?;
        self.check_ids(&batch, pieces)?;
        stages.preprocessed(started);
        Ok(batch)
    }

    /// A batch of no samples.
    fn empty(&self) -> Result<Batch> {
        let group = |group: &FeatureGroup| {
            let features =
                group.features.iter().map(|f| Feature::from_rows(f.name.as_str(), &[] as &[[i64; 0]]));
            let inverse = (self.layout == Layout::Folded && group.deduplicated).then(|| Vec::new().into());
            Group::try_new(group.name.as_str(), inverse, features.collect::<Result<_>>()?)
        };
        // Preprocessing expects the weights that sampling makes.
        let schema = self.preprocessor.as_ref().map_or(&self.schema, |preprocessor| preprocessor.schema());
        Batch::try_new(BatchParts {
            size: 0,
            dense: Vec::new().into(),
            labels: Vec::new().into(),
            weights: schema.weight.as_ref().map(|_| Vec::new().into()),
            timestamps: self.timestamps.then(|| Vec::new().into()),
            kept: self.kept.iter().map(empty_column).collect(),
            groups: self.schema.groups.iter().map(group).collect::<Result<_>>()?,
        })
    }

    fn group(&self, group: &Group, deduplicated: bool) -> Result<Group> {
        let is_folded = deduplicated && self.layout == Layout::Folded;
        Ok(match self.dedupe {
            Dedupe::Off if is_folded => group.expand_shared()?,
            Dedupe::Exact if deduplicated => deduplicate_shared(group)?,
            Dedupe::Window if deduplicated && !is_folded => fold_windows(&deduplicate_shared(group)?),
            _ => group.clone(),
        })
    }

    fn check_labels(&self, batch: &Batch, pieces: &Pieces) -> Result<()> {
        let names = self.schema.labels.iter().enumerate();
        for (column, range, name) in
            names.filter_map(|(i, name)| Some((i, self.label_ranges.get(name)?, name)))
        {
            let values = batch.labels().chunks_exact(batch.label_width().max(1)).map(|labels| labels[column]);
            if let Some((sample, value)) = values.enumerate().find(|(_, value)| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                let message = format!("the label is {value}, which is not from {least} to {most}");
                return Err(Error::value(
                    place_of(sample, pieces),
                    name,
                    &message,
                    "change the label in the dataset's query, as `rating >= 4`, exclude such samples there, or train \
                     with a `loss` that takes them: `mse`, `huber` or `poisson`",
                ));
            }
        }
        Ok(())
    }

    fn check_ids(&self, batch: &Batch, pieces: &Pieces) -> Result<()> {
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
                        place_of(sample, pieces),
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

/// A kept column of no samples.
fn empty_column(column: &KeptColumn) -> KeptValues {
    KeptValues::new(column.name.as_str(), new_empty_array(&column.kind.data_type()))
}

/// The place in the dataset that sample `sample` of a batch comes from: file, row group and row.
fn place_of(sample: usize, pieces: &Pieces) -> (PathBuf, usize, Option<usize>) {
    let mut before = sample;
    for (decoded, rows) in pieces {
        if before < rows.len() {
            let (origin, row) = (&decoded.origin, decoded.row_of(rows.start + before));
            return (origin.files.path.to_path_buf(), origin.index, Some(row));
        }
        before -= rows.len();
    }
    (PathBuf::new(), 0, None)
}
