//! Cut samples to a finished [`Batch`]: deduplicated as asked, preprocessed, ids checked.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::new_empty_array;
use onefold_datasets::{FeatureGroup, KeptColumn, Layout, Schema};

use super::checks::Checks;
use super::decode::{Decoded, Ids};
use super::options::Dedupe;
use super::stages::Stages;
use crate::batch::{deduplicate_shared, deduplicate_windows};
use crate::error::Origin;
use crate::preprocess::Preprocessor;
use crate::{Batch, BatchParts, Feature, Group, KeptValues, Result, fold_windows};

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
    pub(super) checks: Arc<Checks>,
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
        // As cut, as deduplicated, and as preprocessed.
        let deduplicates = u64::from(self.dedupe != Dedupe::Off);
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
        self.checks.run(&batch, &self.schema.labels, |sample| origin_of(sample, pieces))?;
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
            // Rows of the folded layout share ids already; to compare them again would cost more than it finds.
            Dedupe::Window if is_folded => deduplicate_windows(group),
            Dedupe::Window if deduplicated => fold_windows(&deduplicate_shared(group)?),
            _ => group.clone(),
        })
    }
}

/// A kept column of no samples.
fn empty_column(column: &KeptColumn) -> KeptValues {
    KeptValues::new(column.name.as_str(), new_empty_array(&column.kind.data_type()))
}

/// Where in the dataset sample `sample` of a batch is.
fn origin_of(sample: usize, pieces: &Pieces) -> Option<Origin> {
    let mut before = sample;
    for (decoded, rows) in pieces {
        if before < rows.len() {
            let row_group = &decoded.origin;
            let row = decoded.row_of(rows.start + before);
            return Some(Origin {
                path: row_group.files.path.to_path_buf(),
                row_group: row_group.index,
                row,
            });
        }
        before -= rows.len();
    }
    None
}
