//! Converts cut samples to a finished [`Batch`]: deduplicates, preprocesses and checks them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::new_empty_array;
use onefold_datasets::{FeatureGroup, KeptColumn, Layout};

use super::decode::{Decoded, Ids};
use super::options::Dedupe;
use super::recipe::{Epoch, Recipe};
use super::stages::Stages;
use crate::batch::{
    Batch, BatchParts, Feature, Group, KeptValues, deduplicate_shared, deduplicate_windows, fold_windows,
};
use crate::error::{Origin, Result};

/// Ranges of samples of decoded row groups, in order.
pub(super) type Pieces = Vec<(Arc<Decoded>, Range<usize>)>;

impl Epoch {
    /// Returns an upper bound of the bytes of a batch of `pieces` and of `copies` copies of it, before preprocessing
    /// changes its size.
    pub(super) fn batch_bytes(&self, pieces: &Pieces, copies: u64) -> u64 {
        let (recipe, mut samples, mut kept, mut all) = (&*self.recipe, 0, 0, Ids::default());
        for (decoded, rows) in pieces {
            let ids = decoded.ids_in(rows);
            samples += rows.len() as u64;
            kept += decoded.batch.kept().iter().map(|column| column.bytes(rows.start, rows.end)).sum::<u64>();
            all.expanded += ids.expanded;
            all.distinct += ids.distinct;
            all.stored += ids.stored;
        }
        // One copy each for the cut, the deduplicated and the preprocessed batch.
        let deduplicates = u64::from(recipe.options.dedupe != Dedupe::Off);
        let copies = copies + 1 + deduplicates + u64::from(recipe.preprocessor.is_some());
        let ids = match (recipe.layout, recipe.options.dedupe) {
            (_, Dedupe::Off) => all.expanded,
            (Layout::Folded, Dedupe::Window) => all.stored,
            (Layout::Rows, Dedupe::Window) | (_, Dedupe::Exact) => all.distinct,
        };
        copies * (8 * ids + recipe.sample_bytes() * samples + kept)
    }

    /// Converts `pieces` to a batch. Without pieces the batch has no samples.
    pub(super) fn run(&self, pieces: &Pieces, stages: &Stages) -> Result<Batch> {
        let batch = self.run_shared(pieces, stages)?;
        if self.recipe.options.dedupe == Dedupe::Window {
            return Ok(batch);
        }
        let started = Instant::now();
        let mut parts = batch.into_parts();
        parts.groups = parts.groups.into_iter().map(Group::compact).collect::<Result<_>>()?;
        stages.add(|figures| &mut figures.deduplicate_seconds, started);
        Ok(Batch::trusted(parts))
    }

    /// Does the same as [`run`](Self::run), but skips the final compaction, so that lists may share ids with every
    /// kind of deduplication.
    pub(super) fn run_shared(&self, pieces: &Pieces, stages: &Stages) -> Result<Batch> {
        let started = Instant::now();
        let borrowed: Vec<_> = pieces.iter().map(|(decoded, rows)| (&decoded.batch, rows.clone())).collect();
        let cut = if pieces.is_empty() { self.empty()? } else { Batch::concat(&borrowed)? };
        stages.add(|figures| &mut figures.cut_seconds, started);
        let started = Instant::now();
        let groups = cut.groups().iter().zip(&self.recipe.schema.groups);
        let groups = groups
            .map(|(group, of_schema)| self.group(group, of_schema.deduplicated))
            .collect::<Result<_>>()?;
        let mut batch = Batch::try_new(BatchParts { groups, ..cut.into_parts() })?;
        stages.add(|figures| &mut figures.deduplicate_seconds, started);
        let started = Instant::now();
        if let Some(preprocessor) = &self.recipe.preprocessor {
            batch = preprocessor.run(batch)?;
        }
        self.recipe.checks.run(&batch, &self.recipe.schema.labels, |sample| origin_of(sample, pieces))?;
        stages.add(|figures| &mut figures.preprocess_seconds, started);
        Ok(batch)
    }

    /// Returns a batch without samples.
    fn empty(&self) -> Result<Batch> {
        let Recipe { layout, schema, kept, options, .. } = &*self.recipe;
        let group = |group: &FeatureGroup| {
            let features =
                group.features.iter().map(|f| Feature::from_rows(f.name.as_str(), &[] as &[[i64; 0]]));
            let inverse = (*layout == Layout::Folded && group.deduplicated).then(|| Vec::new().into());
            Group::try_new(group.name.as_str(), inverse, features.collect::<Result<_>>()?)
        };
        Batch::try_new(BatchParts {
            size: 0,
            dense: Vec::new().into(),
            labels: Vec::new().into(),
            // Preprocessing expects the weights that sampling adds.
            weights: self.recipe.output().weight.as_ref().map(|_| Vec::new().into()),
            timestamps: options.timestamps.then(|| Vec::new().into()),
            kept: kept.iter().map(empty_column).collect(),
            groups: schema.groups.iter().map(group).collect::<Result<_>>()?,
        })
    }

    fn group(&self, group: &Group, deduplicated: bool) -> Result<Group> {
        let is_folded = deduplicated && self.recipe.layout == Layout::Folded;
        Ok(match self.recipe.options.dedupe {
            Dedupe::Off if is_folded => group.expand_shared()?,
            Dedupe::Exact if deduplicated => deduplicate_shared(group)?,
            // Rows of the folded layout share ids already. Searching for further overlaps would cost more than it
            // saves.
            Dedupe::Window if is_folded => deduplicate_windows(group),
            Dedupe::Window if deduplicated => fold_windows(&deduplicate_shared(group)?),
            _ => group.clone(),
        })
    }
}

/// Returns a kept column without samples.
fn empty_column(column: &KeptColumn) -> KeptValues {
    KeptValues::new(column.name.as_str(), new_empty_array(&column.kind.data_type()))
}

/// Returns the place in the dataset of a sample of a batch.
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
