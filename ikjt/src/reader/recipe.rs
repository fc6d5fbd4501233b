//! How batches are made from data files: all that a reader's epochs share, and an epoch.

use std::sync::Arc;

use onefold_datasets::{KeptColumn, Layout, Schema};

use super::checks::Checks;
use super::columns::Cached;
use super::known_labels::KnownLabels;
use super::options::ReaderOptions;
use crate::preprocess::{Preprocessor, Sampler};

/// How a reader makes batches from data files.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) layout: Layout,
    /// The schema of the columns that are read.
    pub(super) schema: Schema,
    /// The kept columns of batches.
    pub(super) kept: Vec<KeptColumn>,
    /// The labels of an earlier time, if these are read. They need timestamps.
    pub(super) known_labels: Option<KnownLabels>,
    /// The preprocessing steps, some of which may drop samples.
    pub(super) preprocessor: Option<Preprocessor>,
    pub(super) options: ReaderOptions,
    pub(super) checks: Checks,
}

/// An epoch of a reader.
#[derive(Debug)]
pub(super) struct Epoch {
    pub(super) recipe: Arc<Recipe>,
    pub(super) number: u64,
    /// The cache, if there is one, which also coordinates decoding with other readers.
    pub(super) cached: Option<Cached>,
}

impl Recipe {
    /// Returns the schema of the batches.
    pub(super) fn output(&self) -> &Schema {
        self.preprocessor.as_ref().map_or(&self.schema, Preprocessor::schema)
    }

    /// Returns the sampler, if samples are dropped.
    pub(super) fn sampler(&self) -> Option<&Sampler> {
        self.preprocessor.as_ref().and_then(Preprocessor::sampler)
    }

    /// Returns the bytes of a sample without its ids and kept values: an offset and a size per feature, an entry of an
    /// inverse index per group, the floats and the time.
    pub(super) fn sample_bytes(&self) -> u64 {
        let (features, floats) = (self.schema.sparse_features().count(), self.schema.float_columns().count());
        (8 * features + 4 * self.schema.groups.len() + 4 * floats + 8) as u64
    }
}
