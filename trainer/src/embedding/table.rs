//! One embedding table.

use std::io;

use onefold_ikjt::Feature;
use onefold_ikjt::hash::SigridHash;
use onefold_sharding::{IdPolicy, Pooling, TableConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use safetensors::Dtype;

use super::shard::{Buffer, RowSet, Shard};
use super::update::rule;
use crate::config::TableOptimizerConfig;
use crate::{Error, Result};

/// The salt of hashed ids.
const HASH_SALT: u64 = 0;

/// One embedding table: `rows × dim` weights, and what its optimizer keeps for every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    config: TableConfig,
    dim: usize,
    pub(super) weights: Vec<f32>,
    pub(super) state: Vec<f32>,
}

impl Table {
    /// A table with weights uniform in ±1/√rows (TorchRec's default), from `seed`, and `state_width` zeros of optimizer
    /// state for every row.
    pub fn new(config: &TableConfig, seed: u64, stream: u64, state_width: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        let bound = 1.0 / (config.rows as f32).sqrt();
        let size = (config.rows * config.dim) as usize;
        Self {
            config: config.clone(),
            dim: config.dim as usize,
            weights: (0..size).map(|_| rng.random_range(-bound..=bound)).collect(),
            state: vec![0.0; config.rows as usize * state_width],
        }
    }

    /// Tables with initial weights from `seed` and the state that `optimizer` needs.
    pub(super) fn all(configs: &[TableConfig], optimizer: &TableOptimizerConfig, seed: u64) -> Vec<Self> {
        let table = |(i, config): (usize, &TableConfig)| {
            Self::new(config, seed, i as u64, rule(optimizer, 1).state_width(config.dim as usize))
        };
        configs.par_iter().enumerate().map(table).collect()
    }

    /// A table of given weights, `[rows, dim]` row-major, and optimizer state, `[rows, width]`; `None` if their sizes
    /// differ from the configuration's.
    pub fn from_parts(config: &TableConfig, weights: Vec<f32>, state: Vec<f32>) -> Option<Self> {
        let (rows, size) = (config.rows as usize, (config.rows * config.dim) as usize);
        let fits = weights.len() == size && state.len().is_multiple_of(rows);
        fits.then(|| Self { config: config.clone(), dim: config.dim as usize, weights, state })
    }

    /// The table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.config
    }

    /// The weights, `[rows, dim]` row-major.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The optimizer's state, `[rows, width]`: one accumulator a row for row-wise Adagrad.
    pub fn accumulators(&self) -> &[f32] {
        &self.state
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }

    /// A shard of this table that is kept by itself: some of its rows, and some of its columns.
    ///
    /// State of one value per row is copied; where a row has state for every weight, the columns' own are taken.
    pub(super) fn part(&self, shard: &Shard) -> Self {
        let (dim, width) = (self.dim, self.state_width());
        let columns = shard.columns.start as usize..shard.columns.end as usize;
        let rows = shard.rows.start as usize..shard.rows.end as usize;
        let weights = rows.clone().flat_map(|row| &self.weights[row * dim..][columns.clone()]);
        let state: Vec<f32> = if width > 0 && width.is_multiple_of(dim) {
            let parts = rows.clone().flat_map(|row| self.state[row * width..][..width].chunks_exact(dim));
            parts.flat_map(|part| &part[columns.clone()]).copied().collect()
        } else {
            self.state[rows.start * width..rows.end * width].to_vec()
        };
        // A mean is taken where all parts of a row's sum are.
        let pooling = if self.config.pooling == Pooling::Mean { Pooling::Sum } else { self.config.pooling };
        let config = TableConfig {
            rows: rows.len() as u64,
            dim: columns.len() as u64,
            pooling,
            ..self.config.clone()
        };
        Self { config, dim: columns.len(), weights: weights.copied().collect(), state }
    }
}

/// The table row of every id of `feature`, each computed once however many rows of the batch share it.
///
/// # Errors
///
/// [`Error::Id`] for an id that the table has no row for.
pub(super) fn table_rows(config: &TableConfig, feature: &Feature) -> Result<Vec<u32>> {
    let rows = config.rows;
    match config.ids {
        IdPolicy::Hashed => {
            let mut ids = feature.values().to_vec();
            SigridHash::new(HASH_SALT, rows as i64).hash_all(&mut ids);
            Ok(ids.into_iter().map(|id| id as u32).collect())
        }
        IdPolicy::Checked => {
            // The largest as an unsigned number: negative ids are larger than all others.
            let largest = feature.values().iter().fold(0, |largest, &id| (id as u64).max(largest));
            if largest >= rows
                && let Some(&id) = feature.values().iter().find(|&&id| id as u64 >= rows)
            {
                return Err(Error::Id { feature: feature.name().to_owned(), id, rows });
            }
            Ok(feature.values().iter().map(|&id| id as u32).collect())
        }
    }
}

impl Table {
    /// All that a checkpoint holds of the table, the weights first.
    pub(super) fn buffers(&self) -> Vec<Buffer> {
        let buffer = |name, columns| Buffer { name, dtype: Dtype::F32, columns };
        vec![buffer("weight", self.dim), buffer("accumulator", self.state_width())]
    }

    /// Gives rows of a buffer to `sink`, all of them at once or one by one.
    pub(super) fn read(
        &self,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(if buffer == 0 { &self.weights } else { &self.state });
        let size = self.buffers()[buffer].row_bytes();
        match rows {
            RowSet::All => sink(bytes),
            RowSet::Chosen(rows) => {
                rows.iter().try_for_each(|&row| sink(&bytes[row as usize * size..][..size]))
            }
        }
    }

    /// Lets `source` fill rows of a buffer, all of them at once or one by one.
    pub(super) fn write(
        &mut self,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let size = self.buffers()[buffer].row_bytes();
        let values = if buffer == 0 { &mut self.weights } else { &mut self.state };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        match rows {
            RowSet::All => source(bytes),
            RowSet::Chosen(rows) => {
                rows.iter().try_for_each(|&row| source(&mut bytes[row as usize * size..][..size]))
            }
        }
    }

    /// Values of optimizer state per row.
    fn state_width(&self) -> usize {
        self.state.len() / self.config.rows as usize
    }
}
