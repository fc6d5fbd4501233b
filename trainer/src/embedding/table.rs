//! One embedding table.

use onefold_ikjt::Feature;
use onefold_ikjt::hash::SigridHash;
use onefold_sharding::{IdPolicy, TableConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;

use crate::{Error, Result};

/// The salt of hashed ids.
const HASH_SALT: u64 = onefold_sharding::HASH_SALT;

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

    /// The table row of every id of `feature`, each computed once however many rows of the batch share it.
    pub(super) fn table_rows(&self, feature: &Feature) -> Result<Vec<u32>> {
        let rows = self.config.rows;
        match self.config.ids {
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
}

/// One of a table's buffers as a checkpoint holds it: `[rows, columns]`, row-major.
#[derive(Debug)]
pub struct Buffer<'a> {
    /// `weight`, or the name of the optimizer's state.
    pub name: &'static str,
    /// Type of a value.
    pub dtype: Dtype,
    /// Values per row.
    pub columns: usize,
    /// The values.
    pub bytes: &'a [u8],
}

/// The same, to be written to.
#[derive(Debug)]
pub struct BufferMut<'a> {
    /// `weight`, or the name of the optimizer's state.
    pub name: &'static str,
    /// Type of a value.
    pub dtype: Dtype,
    /// Values per row.
    pub columns: usize,
    /// The values.
    pub bytes: &'a mut [u8],
}

impl Table {
    /// All that a checkpoint holds of the table, the weights first.
    pub fn buffers(&self) -> Vec<Buffer<'_>> {
        let buffer = |name, columns, values| Buffer {
            name,
            dtype: Dtype::F32,
            columns,
            bytes: bytemuck::cast_slice(values),
        };
        let width = self.state_width();
        vec![buffer("weight", self.dim, &self.weights), buffer("accumulator", width, &self.state)]
    }

    /// The same, to be written to.
    pub fn buffers_mut(&mut self) -> Vec<BufferMut<'_>> {
        let buffer = |name, columns, values| BufferMut {
            name,
            dtype: Dtype::F32,
            columns,
            bytes: bytemuck::cast_slice_mut(values),
        };
        let width = self.state_width();
        let weights: &mut [f32] = &mut self.weights;
        vec![buffer("weight", self.dim, weights), buffer("accumulator", width, &mut self.state)]
    }

    /// Values of optimizer state per row.
    fn state_width(&self) -> usize {
        self.state.len() / self.config.rows as usize
    }
}
