//! One embedding table.

use std::io;

use onefold_ikjt::Feature;
use onefold_ikjt::hash::SigridHash;
use onefold_kernels::element::{Elements, ElementsMut, Noise, nearest_bf16, nearest_fp16};
use onefold_sharding::{DataType, FeatureConfig, IdPolicy, TableConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::Dtype;

use super::shard::{Buffer, RowSet, Shard};
use super::update::rule;
use crate::config::TableOptimizerConfig;
use crate::{Error, Result};

/// The salt of hashed ids.
const HASH_SALT: u64 = onefold_sharding::HASH_SALT;

/// An embedding table, or a shard of one: `rows × dim` weights, and what its optimizer keeps for every row, in single
/// precision.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    config: TableConfig,
    dim: usize,
    weights: Weights,
    state: Vec<f32>,
    /// Which table of which model it is, for the noise of its rounding.
    seed: u64,
    stream: u64,
    /// The first row and column of the whole table that it has.
    origin: (u64, u64),
}

/// Weights in memory.
#[derive(Debug, Clone, PartialEq)]
enum Weights {
    Fp32(Vec<f32>),
    Bf16(Vec<u16>),
    Fp16(Vec<u16>),
}

impl Weights {
    fn new(dtype: DataType, values: impl Iterator<Item = f32>) -> Self {
        match dtype {
            DataType::Fp32 => Self::Fp32(values.collect()),
            DataType::Bf16 => Self::Bf16(values.map(nearest_bf16).collect()),
            DataType::Fp16 => Self::Fp16(values.map(nearest_fp16).collect()),
        }
    }

    fn elements(&self) -> Elements<'_> {
        match self {
            Self::Fp32(values) => Elements::Fp32(values),
            Self::Bf16(values) => Elements::Bf16(values),
            Self::Fp16(values) => Elements::Fp16(values),
        }
    }

    fn elements_mut(&mut self) -> ElementsMut<'_> {
        match self {
            Self::Fp32(values) => ElementsMut::Fp32(values),
            Self::Bf16(values) => ElementsMut::Bf16(values),
            Self::Fp16(values) => ElementsMut::Fp16(values),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Fp32(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) | Self::Fp16(values) => bytemuck::cast_slice_mut(values),
        }
    }
}

/// What a checkpoint holds of a shard of `dim` columns, whose optimizer keeps `state_width` values a row.
pub(crate) fn shard_buffers(config: &TableConfig, dim: usize, state_width: usize) -> Vec<Buffer> {
    // Row-wise Adagrad keeps one value a row; the others keep none, or as many as there are columns, or twice that.
    let by_column = state_width != 1 || dim == 1;
    vec![
        Buffer { name: "weight", dtype: stored_dtype(config), columns: dim, by_column: true },
        Buffer { name: "accumulator", dtype: Dtype::F32, columns: state_width, by_column },
    ]
}

/// What the files call the type of a table's weights.
pub(crate) fn stored_dtype(config: &TableConfig) -> Dtype {
    match config.dtype {
        DataType::Fp32 => Dtype::F32,
        DataType::Bf16 => Dtype::BF16,
        DataType::Fp16 => Dtype::F16,
    }
}

impl Table {
    /// A shard of table `number` of a model, with weights uniform in ±1/√rows (TorchRec's default) from `seed` and the
    /// state that `optimizer` needs, zero. Weights of 16 bits are the nearest ones. `config` is that of the whole
    /// table; every weight has the same initial value however the table is divided.
    pub fn initial(config: &TableConfig, optimizer: &TableOptimizerConfig, seed: u64, shard: &Shard) -> Self {
        let width = rule(optimizer, 1).state_width((shard.columns.end - shard.columns.start) as usize);
        Self::of_shard(config, seed, shard, width)
    }

    /// A shard all of whose weights are one value.
    pub(super) fn alike(config: &TableConfig, optimizer: &TableOptimizerConfig, shard: &Shard) -> Self {
        const WEIGHT: f32 = 0.01;
        let (rows, dim) = (shard.rows.end - shard.rows.start, shard.columns.end - shard.columns.start);
        let width = rule(optimizer, 1).state_width(dim as usize);
        let weights = (rows * dim) as usize;
        Self {
            weights: match config.dtype {
                DataType::Fp32 => Weights::Fp32(vec![WEIGHT; weights]),
                DataType::Bf16 => Weights::Bf16(vec![nearest_bf16(WEIGHT); weights]),
                DataType::Fp16 => Weights::Fp16(vec![nearest_fp16(WEIGHT); weights]),
            },
            config: TableConfig { rows, dim, ..config.clone() },
            dim: dim as usize,
            // Written, so that reads do not all find the one page of zeros that memory begins as.
            state: vec![f32::MIN_POSITIVE; rows as usize * width],
            seed: 0,
            stream: shard.table as u64,
            origin: (shard.rows.start, shard.columns.start),
        }
    }

    /// The same with `state_width` zeros of optimizer state for every row.
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
        Self {
            weights: Weights::new(config.dtype, values),
            config: TableConfig { rows, dim, ..config.clone() },
            dim: dim as usize,
            state: vec![0.0; rows as usize * state_width],
            seed,
            stream: shard.table as u64,
            origin: (shard.rows.start, shard.columns.start),
        }
    }

    /// A table of given weights, `[rows, dim]` row-major, which become the nearest ones of the table's type, and
    /// optimizer state, `[rows, width]`; `None` if their sizes differ from the configuration's.
    pub fn from_parts(config: &TableConfig, weights: Vec<f32>, state: Vec<f32>) -> Option<Self> {
        let (rows, size) = (config.rows as usize, (config.rows * config.dim) as usize);
        let fits = weights.len() == size && state.len().is_multiple_of(rows);
        fits.then(|| Self {
            config: config.clone(),
            dim: config.dim as usize,
            weights: match config.dtype {
                DataType::Fp32 => Weights::Fp32(weights),
                narrow => Weights::new(narrow, weights.into_iter()),
            },
            state,
            seed: 0,
            stream: 0,
            origin: (0, 0),
        })
    }

    /// The table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.config
    }

    /// The weights, `[rows, dim]` row-major.
    pub fn weights(&self) -> Elements<'_> {
        self.weights.elements()
    }

    /// Weights and state, to be updated.
    pub(super) fn values_mut(&mut self) -> (ElementsMut<'_>, &mut [f32]) {
        (self.weights.elements_mut(), &mut self.state)
    }

    /// The noise with which step `step` is rounded, the same for a whole table and for its shards.
    pub(super) fn noise(&self, step: u64) -> Noise {
        Noise::new(self.seed, step, self.stream).of_shard(self.origin.0, self.origin.1)
    }

    /// The optimizer's state, `[rows, width]`: one accumulator a row for row-wise Adagrad.
    pub fn accumulators(&self) -> &[f32] {
        &self.state
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }
}

/// The bytes of initial weights of some rows of a shard, counted from its first one: those that
/// [`Table::of_shard`] gives them.
pub(super) fn initial_rows(config: &TableConfig, seed: u64, shard: &Shard, rows: &[u32]) -> Vec<u8> {
    let (bound, mut rng) = (initial_bound(config), generator(seed, shard));
    let values = rows.iter().flat_map(|row| {
        let row = u128::from(shard.rows.start) + u128::from(*row);
        rng.set_word_pos(row * u128::from(config.dim) + u128::from(shard.columns.start));
        let columns = shard.columns.clone();
        columns.map(|_| rng.random_range(-bound..=bound)).collect::<Vec<f32>>()
    });
    Weights::new(config.dtype, values).elements().bytes().to_vec()
}

/// Initial weights are uniform in ± this.
fn initial_bound(config: &TableConfig) -> f32 {
    1.0 / (config.rows as f32).sqrt()
}

/// What gives the initial weights of a table.
fn generator(seed: u64, shard: &Shard) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(shard.table as u64);
    rng
}

/// The table row of every id of `feature`, each computed once however many rows of the batch share it.
///
/// # Errors
///
/// [`Error::Fault`] for an id that the table has no row for.
pub(super) fn table_rows(config: &FeatureConfig, feature: &Feature) -> Result<Vec<u32>> {
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
                return Err(Error::id(feature.name(), id, rows));
            }
            Ok(feature.values().iter().map(|&id| id as u32).collect())
        }
    }
}

impl Table {
    /// All that a checkpoint holds of the table, the weights first.
    pub(super) fn buffers(&self) -> Vec<Buffer> {
        shard_buffers(&self.config, self.dim, self.state_width())
    }

    /// Gives rows of a buffer to `sink`, all of them at once or one by one.
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

    /// Lets `source` fill rows of a buffer, all of them at once or one by one.
    pub(super) fn write(
        &mut self,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let size = self.buffers()[buffer].row_bytes();
        let bytes = match buffer {
            0 => self.weights.bytes_mut(),
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

    /// Values of optimizer state per row.
    fn state_width(&self) -> usize {
        self.state.len() / self.config.rows as usize
    }
}
