//! Embedding tables on the CPU: fused lookup and pooling, and the fused, exact backward and update.
//!
//! Everything here runs per **row** of a group, so once per distinct row when the batch is deduplicated; samples never
//! appear. Results do not depend on the number of threads: rows are written by one thread each, and a
//! table's gradients are summed in the order of rows, by one thread.

use onefold_ikjt::hash::sigrid_hash;
use onefold_ikjt::{Feature, Group};
use onefold_sharding::{IdPolicy, Pooling, TableConfig};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use safetensors::Dtype;
use tch::Tensor;

use crate::config::TableOptimizerConfig;
use crate::{Error, Result, tensors};

/// The salt of hashed ids.
const HASH_SALT: u64 = 0;

/// One embedding table: `rows × dim` weights and one Adagrad accumulator per row.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    config: TableConfig,
    dim: usize,
    weights: Vec<f32>,
    accumulators: Vec<f32>,
}

impl Table {
    /// A table with weights uniform in ±1/√rows (TorchRec's default), from `seed`, and accumulators of zero.
    pub fn new(config: &TableConfig, seed: u64, stream: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        let bound = 1.0 / (config.rows as f32).sqrt();
        let size = (config.rows * config.dim) as usize;
        Self {
            config: config.clone(),
            dim: config.dim as usize,
            weights: (0..size).map(|_| rng.random_range(-bound..=bound)).collect(),
            accumulators: vec![0.0; config.rows as usize],
        }
    }

    /// A table of given weights, `[rows, dim]` row-major, and accumulators, `[rows]`; `None` if their sizes differ
    /// from the configuration's.
    pub fn from_parts(config: &TableConfig, weights: Vec<f32>, accumulators: Vec<f32>) -> Option<Self> {
        let fits =
            weights.len() as u64 == config.rows * config.dim && accumulators.len() as u64 == config.rows;
        fits.then(|| Self { config: config.clone(), dim: config.dim as usize, weights, accumulators })
    }

    /// The table's configuration.
    pub fn config(&self) -> &TableConfig {
        &self.config
    }

    /// The weights, `[rows, dim]` row-major.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The optimizer's accumulators, `[rows]`.
    pub fn accumulators(&self) -> &[f32] {
        &self.accumulators
    }

    fn vector(&self, row: u32) -> &[f32] {
        &self.weights[row as usize * self.dim..][..self.dim]
    }

    /// The table row of every id of `feature`, each computed once however many rows of the batch share it.
    fn table_rows(&self, feature: &Feature) -> Result<Vec<u32>> {
        let rows = self.config.rows;
        let row = |&id: &i64| match self.config.ids {
            IdPolicy::Hashed => Ok(sigrid_hash(id, HASH_SALT, rows as i64) as u32),
            IdPolicy::Checked => u64::try_from(id)
                .ok()
                .filter(|row| *row < rows)
                .map(|row| row as u32)
                .ok_or_else(|| Error::Id { feature: feature.name().to_owned(), id, rows }),
        };
        feature.values().iter().map(row).collect()
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
        vec![buffer("weight", self.dim, &self.weights), buffer("accumulator", 1, &self.accumulators)]
    }

    /// The same, to be written to.
    pub fn buffers_mut(&mut self) -> Vec<BufferMut<'_>> {
        let buffer = |name, columns, values| BufferMut {
            name,
            dtype: Dtype::F32,
            columns,
            bytes: bytemuck::cast_slice_mut(values),
        };
        let weights: &mut [f32] = &mut self.weights;
        vec![buffer("weight", self.dim, weights), buffer("accumulator", 1, &mut self.accumulators)]
    }
}

/// All tables of a model, in the schema's order of features.
#[derive(Debug)]
pub struct Embeddings {
    tables: Vec<Table>,
    threads: rayon::ThreadPool,
}

/// What the features of one group gave: leaves of the autograd graph.
#[derive(Debug)]
pub struct Lookup {
    /// `[U, F, D]`, the features that pool by sum or mean; `None` if the group has none.
    pub pooled: Option<Tensor>,
    /// The features that pool by attention.
    pub sequences: Vec<Sequence>,
    first_table: usize,
    table_rows: Vec<Vec<u32>>,
}

/// The vectors of a sequence feature, before attention.
#[derive(Debug)]
pub struct Sequence {
    /// `[U, L, D]`, zeros behind the end of a row.
    pub vectors: Tensor,
    /// `[U]`, the rows' lengths as floats.
    pub lengths: Tensor,
    /// L, the longest row's length, at least 1.
    pub longest: usize,
    feature: usize,
}

impl Lookup {
    /// The table rows that were looked up, each as often as it stands in the batch's buffers, by number of the table.
    pub fn rows_by_table(&self) -> impl Iterator<Item = (usize, &[u32])> {
        self.table_rows.iter().enumerate().map(|(i, rows)| (self.first_table + i, rows.as_slice()))
    }
}

impl Embeddings {
    /// Tables with initial weights from `seed`, and threads for lookups and updates.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the threads cannot be started.
    pub fn new(configs: &[TableConfig], seed: u64, threads: usize) -> Result<Self> {
        let pool = thread_pool(threads)?;
        let table = |(i, config)| Table::new(config, seed, i as u64);
        let tables = pool.install(|| configs.par_iter().enumerate().map(table).collect());
        Ok(Self { tables, threads: pool })
    }

    /// Given tables, in the schema's order of features.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the threads cannot be started.
    pub fn from_tables(tables: Vec<Table>, threads: usize) -> Result<Self> {
        Ok(Self { tables, threads: thread_pool(threads)? })
    }

    /// The tables.
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// The tables, to be filled from a checkpoint.
    pub fn tables_mut(&mut self) -> &mut [Table] {
        &mut self.tables
    }

    /// Looks up the rows of every group of a batch, whose features are in the order of the tables.
    ///
    /// # Errors
    ///
    /// [`Error::Id`] for an id that its table has no row for.
    pub fn forward(&self, groups: &[Group]) -> Result<Vec<Lookup>> {
        let mut first_table = 0;
        let mut lookups = Vec::with_capacity(groups.len());
        for group in groups {
            lookups.push(self.threads.install(|| self.forward_group(group, first_table))?);
            first_table += group.features().len();
        }
        Ok(lookups)
    }

    fn forward_group(&self, group: &Group, first_table: usize) -> Result<Lookup> {
        let features = group.features();
        let tables = &self.tables[first_table..first_table + features.len()];
        let table_rows = features.par_iter().zip(tables).map(|(feature, table)| table.table_rows(feature));
        let table_rows = table_rows.collect::<Result<Vec<_>>>()?;
        let (sequences, pooled): (Vec<usize>, Vec<usize>) =
            (0..features.len()).partition(|i| tables[*i].config.pooling == Pooling::Attention);
        let pooled = (!pooled.is_empty()).then(|| pool(group, tables, &table_rows, &pooled));
        let sequence = |i: usize| gather_sequence(&features[i], &tables[i], &table_rows[i], i);
        let sequences = sequences.into_iter().map(sequence).collect();
        Ok(Lookup { pooled, sequences, first_table, table_rows })
    }

    /// Updates every table from the gradients that `backward` left at the leaves of `lookups`: the gradient of an id
    /// is summed over all places where it was looked up, then the row is updated once (FBGEMM's exact row-wise
    /// Adagrad: the accumulator grows by the mean of the squared gradient before it divides).
    pub fn backward_and_update(
        &mut self,
        groups: &[Group],
        lookups: &[Lookup],
        optimizer: &TableOptimizerConfig,
    ) {
        let Self { tables, threads } = self;
        let mut work = Vec::new();
        for (group, lookup) in groups.iter().zip(lookups) {
            let mut pooled = 0;
            for (i, feature) in group.features().iter().enumerate() {
                let sequence = lookup.sequences.iter().find(|sequence| sequence.feature == i);
                let gradient = match sequence {
                    Some(sequence) => Gradient::of_sequence(sequence),
                    None => {
                        pooled += 1;
                        lookup.pooled.as_ref().and_then(|leaf| Gradient::of_pooled(leaf, pooled - 1))
                    }
                };
                work.push((lookup.first_table + i, feature, &lookup.table_rows[i], gradient));
            }
        }
        threads.install(|| {
            tables.par_iter_mut().zip(work).for_each(|(table, (number, feature, rows, gradient))| {
                debug_assert_eq!(table.config.feature, feature.name(), "table {number}");
                if let Some(gradient) = gradient {
                    update_table(table, feature, rows, &gradient, optimizer);
                }
            });
        });
    }
}

fn thread_pool(threads: usize) -> Result<rayon::ThreadPool> {
    let builder =
        rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("onefold-tables-{i}"));
    Ok(builder.build().map_err(std::io::Error::other)?)
}

/// Looks up and pools the features `chosen` of a group: `[U, F, D]`.
fn pool(group: &Group, tables: &[Table], table_rows: &[Vec<u32>], chosen: &[usize]) -> Tensor {
    let dim = tables.first().map_or(1, |table| table.dim);
    let shape = [group.rows() as i64, chosen.len() as i64, dim as i64];
    let leaf = tensors::filled(&shape, |output| {
        output.par_chunks_mut(chosen.len() * dim).enumerate().for_each(|(row, output)| {
            for (&i, output) in chosen.iter().zip(output.chunks_exact_mut(dim)) {
                pool_row(&tables[i], row_slice(&group.features()[i], &table_rows[i], row), output);
            }
        });
    });
    leaf.set_requires_grad(true)
}

fn pool_row(table: &Table, rows: &[u32], output: &mut [f32]) {
    for &row in rows {
        for (sum, weight) in output.iter_mut().zip(table.vector(row)) {
            *sum += weight;
        }
    }
    if table.config.pooling == Pooling::Mean && rows.len() > 1 {
        let scale = 1.0 / rows.len() as f32;
        output.iter_mut().for_each(|sum| *sum *= scale);
    }
}

/// Looks up a sequence feature without pooling it: `[U, L, D]`.
fn gather_sequence(feature: &Feature, table: &Table, table_rows: &[u32], i: usize) -> Sequence {
    let longest = feature.sizes().iter().max().map_or(1, |&size| size.max(1) as usize);
    let dim = table.dim;
    let vectors = tensors::filled(&[feature.rows() as i64, longest as i64, dim as i64], |output| {
        output.par_chunks_mut(longest * dim).enumerate().for_each(|(row, output)| {
            for (&row, output) in row_slice(feature, table_rows, row).iter().zip(output.chunks_exact_mut(dim))
            {
                output.copy_from_slice(table.vector(row));
            }
        });
    });
    let lengths: Vec<f32> = feature.sizes().iter().map(|&size| size as f32).collect();
    let lengths = tensors::from_f32(&lengths, &[feature.rows() as i64]);
    Sequence { vectors: vectors.set_requires_grad(true), lengths, longest, feature: i }
}

/// The table rows of one row of a feature.
fn row_slice<'a>(feature: &Feature, table_rows: &'a [u32], row: usize) -> &'a [u32] {
    &table_rows[feature.offsets()[row] as usize..][..feature.sizes()[row] as usize]
}

/// Where the gradients of one feature's lookups stand: vector `source` begins at `source * stride + offset`.
struct Gradient {
    tensor: Tensor,
    stride: usize,
    offset: usize,
    /// Positions per row: 1 if the row was pooled, L if every position has its own gradient.
    positions: usize,
}

impl Gradient {
    fn of_pooled(leaf: &Tensor, feature: usize) -> Option<Self> {
        let shape = leaf.size();
        let (features, dim) = (shape[1] as usize, shape[2] as usize);
        Self::of(leaf, features * dim, feature * dim, 1)
    }

    fn of_sequence(sequence: &Sequence) -> Option<Self> {
        Self::of(&sequence.vectors, sequence.vectors.size()[2] as usize, 0, sequence.longest)
    }

    /// `None` if `backward` did not reach the leaf.
    fn of(leaf: &Tensor, stride: usize, offset: usize, positions: usize) -> Option<Self> {
        let gradient = leaf.grad();
        gradient.defined().then(|| Self { tensor: gradient.contiguous(), stride, offset, positions })
    }
}

fn update_table(
    table: &mut Table,
    feature: &Feature,
    table_rows: &[u32],
    gradient: &Gradient,
    optimizer: &TableOptimizerConfig,
) {
    let values = tensors::as_slice(&gradient.tensor);
    let dim = table.dim;
    let mut sum = vec![0.0_f32; dim];
    let occurrences = occurrences(feature, table_rows, gradient.positions);
    for occurrences in occurrences.chunk_by(|a, b| a >> 32 == b >> 32) {
        sum.fill(0.0);
        for &occurrence in occurrences {
            let source = occurrence as u32 as usize;
            let vector = &values[source * gradient.stride + gradient.offset..][..dim];
            let scale = match table.config.pooling {
                Pooling::Mean => 1.0 / feature.sizes()[source] as f32,
                Pooling::Sum | Pooling::Attention => 1.0,
            };
            for (sum, value) in sum.iter_mut().zip(vector) {
                *sum += scale * value;
            }
        }
        let row = (occurrences[0] >> 32) as usize;
        let squares: f32 = sum.iter().map(|value| value * value).sum();
        table.accumulators[row] += squares / dim as f32;
        let rate = optimizer.learning_rate / (table.accumulators[row].sqrt() + optimizer.eps);
        for (weight, value) in table.weights[row * dim..][..dim].iter_mut().zip(&sum) {
            *weight -= rate * value;
        }
    }
}

/// Every place where an id was looked up, as `table row << 32 | source of its gradient`, sorted: the places of a
/// table row stand together, in the order of the batch.
fn occurrences(feature: &Feature, table_rows: &[u32], positions: usize) -> Vec<u64> {
    let total = usize::try_from(feature.total_size()).unwrap_or(0);
    let sources = feature.rows().saturating_mul(positions);
    assert!(u32::try_from(sources).is_ok(), "feature `{}`: {sources} gradients in one batch", feature.name());
    let mut occurrences = Vec::with_capacity(total);
    for row in 0..feature.rows() {
        for (position, &table_row) in row_slice(feature, table_rows, row).iter().enumerate() {
            let source = row * positions + if positions > 1 { position } else { 0 };
            occurrences.push(u64::from(table_row) << 32 | source as u64);
        }
    }
    occurrences.sort_unstable();
    occurrences
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::TableOptimizerKind;

    const OPTIMIZER: TableOptimizerConfig =
        TableOptimizerConfig { kind: TableOptimizerKind::RowWiseAdagrad, learning_rate: 0.1, eps: 1e-8 };

    fn config(feature: &str, pooling: Pooling) -> TableConfig {
        TableConfig { feature: feature.into(), rows: 10, dim: 3, pooling, ids: IdPolicy::Checked }
    }

    fn groups() -> impl Strategy<Value = Group> {
        let lists = || prop::collection::vec(prop::collection::vec(0_i64..10, 0..6), 7);
        (lists(), lists(), lists()).prop_map(|(a, b, c)| {
            let feature = |name: &str, rows: &[Vec<i64>]| Feature::from_rows(name, rows).unwrap();
            Group::try_new("g", None, vec![feature("a", &a), feature("b", &b), feature("c", &c)]).unwrap()
        })
    }

    /// The definition in double precision: pooled vectors, then the update from a gradient of ones times `row + 1`.
    fn naive(group: &Group, tables: &[Table]) -> Vec<Vec<f64>> {
        let mut updated = Vec::new();
        for (feature, table) in group.features().iter().zip(tables) {
            let mut gradient = vec![[0.0_f64; 3]; 10];
            for row in 0..group.rows() {
                let ids = feature.row(row);
                let scale = if table.config.pooling == Pooling::Mean { 1.0 / ids.len() as f64 } else { 1.0 };
                for (position, id) in ids.iter().enumerate() {
                    let upstream = match table.config.pooling {
                        Pooling::Attention => (row * 10 + position + 1) as f64,
                        _ => (row + 1) as f64,
                    };
                    gradient[*id as usize].iter_mut().for_each(|g| *g += scale * upstream);
                }
            }
            let mut weights: Vec<f64> = table.weights.iter().map(|w| f64::from(*w)).collect();
            for (row, gradient) in gradient.iter().enumerate() {
                let accumulator = gradient.iter().map(|g| g * g).sum::<f64>() / 3.0;
                for (weight, g) in weights[row * 3..][..3].iter_mut().zip(gradient) {
                    *weight -= 0.1 * g / (accumulator.sqrt() + 1e-8);
                }
            }
            updated.push(weights);
        }
        updated
    }

    proptest! {
        #[test]
        fn lookups_and_updates_equal_the_definition(group in groups()) {
            let configs = [config("a", Pooling::Sum), config("b", Pooling::Attention), config("c", Pooling::Mean)];
            let mut embeddings = Embeddings::new(&configs, 7, 2).unwrap();
            let before = embeddings.tables.clone();
            let lookups = embeddings.forward(std::slice::from_ref(&group)).unwrap();
            let pooled = lookups[0].pooled.as_ref().unwrap();
            let sequence = &lookups[0].sequences[0];
            for row in 0..group.rows() {
                for (slot, i) in [(0, 0), (1, 2)] {
                    let ids = group.features()[i].row(row);
                    for d in 0..3 {
                        let total: f64 = ids.iter().map(|id| f64::from(before[i].weights[*id as usize * 3 + d])).sum();
                        let expected = if i == 2 { total / ids.len().max(1) as f64 } else { total };
                        let found = pooled.double_value(&[row as i64, slot, d as i64]);
                        prop_assert!((found - expected).abs() < 1e-5);
                    }
                }
                for (position, id) in group.features()[1].row(row).iter().enumerate() {
                    let found = sequence.vectors.double_value(&[row as i64, position as i64, 1]);
                    prop_assert_eq!(found as f32, before[1].weights[*id as usize * 3 + 1]);
                }
            }
            // A loss whose gradient at vector (row, …) is row + 1, and at (row, position) row * 10 + position + 1.
            let rows = Tensor::arange(7, (tch::Kind::Float, tch::Device::Cpu));
            let positions = Tensor::arange(sequence.longest as i64, (tch::Kind::Float, tch::Device::Cpu));
            let at_sequence = (&rows * 10.0).unsqueeze(1) + positions + 1.0;
            let loss = (pooled * (&rows + 1.0).reshape([7, 1, 1])).sum(tch::Kind::Float)
                + (&sequence.vectors * at_sequence.unsqueeze(2)).sum(tch::Kind::Float);
            loss.backward();
            embeddings.backward_and_update(std::slice::from_ref(&group), &lookups, &OPTIMIZER);
            for (table, expected) in embeddings.tables.iter().zip(naive(&group, &before)) {
                for (weight, expected) in table.weights.iter().zip(expected) {
                    prop_assert!((f64::from(*weight) - expected).abs() < 1e-4, "{weight} {expected}");
                }
            }
        }
    }

    #[test]
    fn ids_without_a_row_are_named_or_hashed() {
        let group =
            Group::try_new("g", None, vec![Feature::from_rows("a", &[[3_i64], [10]]).unwrap()]).unwrap();
        let checked = Embeddings::new(&[config("a", Pooling::Sum)], 1, 1).unwrap();
        let error = checked.forward(std::slice::from_ref(&group)).unwrap_err().to_string();
        assert!(error.starts_with("feature `a`: id 10 is outside the table's rows 0..10"), "{error}");
        let hashed = TableConfig { ids: IdPolicy::Hashed, ..config("a", Pooling::Sum) };
        assert!(Embeddings::new(&[hashed], 1, 1).unwrap().forward(&[group]).is_ok());
    }

    #[test]
    fn threads_change_nothing() {
        let configs: Vec<_> = (0..5).map(|i| config(&format!("f{i}"), Pooling::Sum)).collect();
        assert_eq!(
            Embeddings::new(&configs, 3, 1).unwrap().tables,
            Embeddings::new(&configs, 3, 4).unwrap().tables
        );
        assert_ne!(Table::new(&configs[0], 3, 0).weights, Table::new(&configs[0], 4, 0).weights);
        assert_ne!(Table::new(&configs[0], 3, 0).weights, Table::new(&configs[0], 3, 1).weights);
    }
}
