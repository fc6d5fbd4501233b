//! One embedding table.

use std::io;

use onefold_ikjt::Feature;
use onefold_ikjt::hash::SigridHash;
use onefold_kernels::element::{self, Elements, ElementsMut, Noise, nearest_bf16, nearest_fp16};
use onefold_kernels::update::Rule;
use onefold_sharding::{DataType, FeatureConfig, IdPolicy, TableConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;

use super::shard::{Buffer, RowSet, Shard};
use crate::config::{TableOptimizer, TableOptimizerConfig};
use crate::{Error, Result};

/// The salt of hashed ids.
const HASH_SALT: u64 = onefold_sharding::HASH_SALT;

/// An embedding table, or a shard of a table: `rows × dim` weights, and the optimizer state of every row in single
/// precision.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    config: TableConfig,
    dim: usize,
    weights: Weights,
    state: Vec<f32>,
    /// The seed of its rounding noise; `stream` is the index of the table in the model.
    seed: u64,
    stream: u64,
    /// The first row and column within the whole table.
    origin: (u64, u64),
}

/// Weights in memory, in the table's type.
type Weights = element::Weights<Vec<f32>, Vec<u16>>;

/// Rounds weights to the nearest values of a type.
fn narrowed(dtype: DataType, values: impl Iterator<Item = f32>) -> Weights {
    match dtype {
        DataType::Fp32 => Weights::Fp32(values.collect()),
        DataType::Bf16 => Weights::Bf16(values.map(nearest_bf16).collect()),
        DataType::Fp16 => Weights::Fp16(values.map(nearest_fp16).collect()),
    }
}

/// Returns the update rule of a configuration in step `step`, counted from 1.
pub(super) fn rule(optimizer: &TableOptimizerConfig, step: u64) -> Rule {
    let eps = optimizer.eps;
    match optimizer.kind {
        TableOptimizer::RowWiseAdagrad => Rule::RowWiseAdagrad { eps },
        TableOptimizer::Adagrad => Rule::Adagrad { eps },
        TableOptimizer::Sgd => Rule::Sgd,
        TableOptimizer::Adam => Rule::Adam { beta1: optimizer.beta1, beta2: optimizer.beta2, eps, step },
    }
}

/// Returns the buffers of a shard with `dim` columns whose optimizer keeps `state_width` values per row.
pub(crate) fn shard_buffers(config: &TableConfig, dim: usize, state_width: usize) -> Vec<Buffer> {
    // Row-wise Adagrad keeps one value per row. Other optimizers keep no, one or two values per column.
    let by_column = state_width != 1 || dim == 1;
    vec![
        Buffer { name: "weight", dtype: stored_dtype(config), columns: dim, by_column: true },
        Buffer { name: "accumulator", dtype: Dtype::F32, columns: state_width, by_column },
    ]
}

/// Returns the type of a table's weights in files.
pub(crate) fn stored_dtype(config: &TableConfig) -> Dtype {
    match config.dtype {
        DataType::Fp32 => Dtype::F32,
        DataType::Bf16 => Dtype::BF16,
        DataType::Fp16 => Dtype::F16,
    }
}

impl Table {
    /// Creates a shard with initial weights, uniform in ±1/√rows (TorchRec's default) from `seed`, and with zero
    /// state for `optimizer`. 16-bit weights are rounded to nearest. `config` describes the whole table; the
    /// initial value of a weight does not depend on how the table is divided.
    pub fn initial(config: &TableConfig, optimizer: &TableOptimizerConfig, seed: u64, shard: &Shard) -> Self {
        let width = rule(optimizer, 1).state_width((shard.columns.end - shard.columns.start) as usize);
        Self::of_shard(config, seed, shard, width)
    }

    /// Creates a shard with constant weights.
    pub(super) fn alike(config: &TableConfig, optimizer: &TableOptimizerConfig, shard: &Shard) -> Self {
        const WEIGHT: f32 = 0.01;
        let (rows, dim) = (shard.rows.end - shard.rows.start, shard.columns.end - shard.columns.start);
        let (weights, width) = ((rows * dim) as usize, rule(optimizer, 1).state_width(dim as usize));
        let weights = match config.dtype {
            DataType::Fp32 => Weights::Fp32(vec![WEIGHT; weights]),
            DataType::Bf16 => Weights::Bf16(vec![nearest_bf16(WEIGHT); weights]),
            DataType::Fp16 => Weights::Fp16(vec![nearest_fp16(WEIGHT); weights]),
        };
        // Nonzero values force the memory to be allocated; otherwise, all reads would hit the shared zero page.
        Self::of(config, 0, shard, weights, vec![f32::MIN_POSITIVE; rows as usize * width])
    }

    /// Creates a shard with initial weights and `state_width` zeros of optimizer state per row.
    pub(super) fn of_shard(config: &TableConfig, seed: u64, shard: &Shard, state_width: usize) -> Self {
        let (bound, mut rng) = (initial_bound(config), generator(seed, shard));
        let (rows, dim) = (shard.rows.end - shard.rows.start, shard.columns.end - shard.columns.start);
        let whole_rows = dim == config.dim;
        // A weight takes one word of the generator.
        rng.set_word_pos(u128::from(shard.rows.start) * u128::from(config.dim));
        let values = (0..rows * dim).map(|i| {
            if !whole_rows && i % dim == 0 {
                let row = u128::from(shard.rows.start + i / dim);
                rng.set_word_pos(row * u128::from(config.dim) + u128::from(shard.columns.start));
            }
            rng.random_range(-bound..=bound)
        });
        let weights = narrowed(config.dtype, values);
        Self::of(config, seed, shard, weights, vec![0.0; rows as usize * state_width])
    }

    fn of(config: &TableConfig, seed: u64, shard: &Shard, weights: Weights, state: Vec<f32>) -> Self {
        let (rows, dim) = (shard.rows.end - shard.rows.start, shard.columns.end - shard.columns.start);
        Self {
            config: TableConfig { rows, dim, ..config.clone() },
            dim: dim as usize,
            weights,
            state,
            seed,
            stream: shard.table as u64,
            origin: (shard.rows.start, shard.columns.start),
        }
    }

    /// Returns the table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.config
    }

    /// Returns the weights, `[rows, dim]` row-major.
    pub fn weights(&self) -> Elements<'_> {
        self.weights.elements()
    }

    /// Returns the mutable weights and state.
    pub(super) fn values_mut(&mut self) -> (ElementsMut<'_>, &mut [f32]) {
        (self.weights.elements_mut(), &mut self.state)
    }

    /// Returns the rounding noise of step `step`, which is the same for a whole table and for its shards.
    pub(super) fn noise(&self, step: u64) -> Noise {
        Noise::new(self.seed, step, self.stream).of_shard(self.origin.0, self.origin.1)
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }
}

/// Returns the bytes of the initial weights of some rows of a shard, as created by [`Table::of_shard`]. The rows
/// are relative to the shard's first row.
pub(super) fn initial_rows(config: &TableConfig, seed: u64, shard: &Shard, rows: &[u32]) -> Vec<u8> {
    let (bound, mut rng) = (initial_bound(config), generator(seed, shard));
    let values = rows.iter().flat_map(|row| {
        let row = u128::from(shard.rows.start) + u128::from(*row);
        rng.set_word_pos(row * u128::from(config.dim) + u128::from(shard.columns.start));
        let columns = shard.columns.clone();
        columns.map(|_| rng.random_range(-bound..=bound)).collect::<Vec<f32>>()
    });
    narrowed(config.dtype, values).elements().bytes().to_vec()
}

/// Returns the bound of the uniform distribution of initial weights.
fn initial_bound(config: &TableConfig) -> f32 {
    1.0 / (config.rows as f32).sqrt()
}

/// Returns the random generator of a table's initial weights.
fn generator(seed: u64, shard: &Shard) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(shard.table as u64);
    rng
}

/// Returns the table row of every value of `feature`. Values that several rows of the batch share are computed
/// once.
///
/// # Errors
///
/// [`Error::Fault`] if an id has no row in the table.
pub(super) fn table_rows(config: &FeatureConfig, feature: &Feature) -> Result<Vec<u32>> {
    let rows = config.rows;
    match config.ids {
        IdPolicy::Hashed => {
            let mut ids = feature.values().to_vec();
            SigridHash::new(HASH_SALT, rows as i64).hash_all(&mut ids);
            Ok(ids.into_iter().map(|id| id as u32).collect())
        }
        IdPolicy::Checked => {
            // Compares as unsigned numbers: negative ids are larger than all others.
            let largest = feature.values().iter().fold(0, |largest, &id| (id as u64).max(largest));
            if largest >= rows
                && let Some(&id) = feature.values().iter().find(|&&id| id as u64 >= rows)
            {
                return Err(Error::id(feature.name(), id, rows));
            }
            Ok(feature.values().iter().map(|&id| id as u32).collect())
        }
    }
}

impl Table {
    /// Returns all buffers that a checkpoint contains of the table; the weights are the first.
    pub(super) fn buffers(&self) -> Vec<Buffer> {
        shard_buffers(&self.config, self.dim, self.state_width())
    }

    /// Passes rows of a buffer to `sink`: chosen rows one by one, otherwise all at once.
    pub(super) fn read(
        &self,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let bytes = if buffer == 0 { self.weights().bytes() } else { bytemuck::cast_slice(&self.state) };
        let size = self.buffers()[buffer].row_bytes();
        match rows {
            RowSet::All => sink(bytes),
            RowSet::First(rows) => sink(&bytes[..rows * size]),
            RowSet::Chosen(rows) => {
                rows.iter().try_for_each(|&row| sink(&bytes[row as usize * size..][..size]))
            }
        }
    }

    /// Lets `source` fill rows of a buffer: chosen rows one by one, otherwise all at once.
    pub(super) fn write(
        &mut self,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let size = self.buffers()[buffer].row_bytes();
        let bytes = match buffer {
            0 => self.weights.elements_mut().bytes_mut(),
            _ => bytemuck::cast_slice_mut(&mut self.state),
        };
        match rows {
            RowSet::All => source(bytes),
            RowSet::First(rows) => source(&mut bytes[..rows * size]),
            RowSet::Chosen(rows) => {
                rows.iter().try_for_each(|&row| source(&mut bytes[row as usize * size..][..size]))
            }
        }
    }

    /// Returns the number of values of optimizer state per row.
    fn state_width(&self) -> usize {
        self.state.len() / self.config.rows as usize
    }
}
