//! All tables whole, in a device's memory.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use onefold_ikjt::{Batch, BatchParts, Group};
use onefold_sharding::TableConfig;
use safetensors::Dtype;
use tch::{Device, Kind, Tensor};

use super::lookup::{FeatureLookup, Lookup, Steps};
use super::shard::{Buffer, RowSet, Shard};
use super::table::{Table, stored_dtype};
use super::update::rule;
use super::{Embeddings, LookupGradients, Vectors, thread_pool};
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, DeviceTables, LookedUp, Staged, Update, guarded};
use crate::kernels::attention::Sequence;
use crate::kernels::element::step_key;
use crate::{Result, tensors};

/// Bytes of a table that pass through this machine's memory at a time.
const PIECE: usize = 64 << 20;

/// The only rank, which holds every table whole in a device's memory.
///
/// A lookup is one [`Lookup`] with the vectors of all groups, which stay on the device. Every step runs once per distinct row.
#[derive(Debug)]
pub struct DeviceEmbeddings {
    tables: DeviceTables,
    shards: Vec<Shard>,
    state_width: usize,
    threads: Arc<rayon::ThreadPool>,
    /// Of the noise that weights of 16 bits are rounded with.
    seed: u64,
    steps: u64,
}

/// What a lookup keeps for its update.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) staged: Staged,
    pub(crate) looked_up: LookedUp,
}

impl DeviceEmbeddings {
    /// Tables with the initial weights that [`LocalEmbeddings`](super::LocalEmbeddings) have, and threads that prepare batches.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device lacks the memory, or the tables differ in their dimension;
    /// [`Error::Io`](crate::Error::Io) if the threads cannot be started.
    pub fn new(
        accelerator: &Accelerator,
        configs: &[TableConfig],
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: usize,
    ) -> Result<Self> {
        let mut embeddings = Self::of_zeros(accelerator, configs, optimizer, threads)?;
        embeddings.seed = seed;
        for (i, config) in configs.iter().enumerate() {
            // One table at a time is in this machine's memory.
            let table = Table::new(config, seed, i as u64, 0);
            let [mut weights, _] = embeddings.tables.table(i);
            guarded(accelerator.torch(), || {
                weights.copy_(&of_bytes(table.weights().bytes(), config.rows as i64, &weights));
                Ok(())
            })?;
        }
        Ok(embeddings)
    }

    /// Tables whose weights are all zero.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(crate) fn of_zeros(
        accelerator: &Accelerator,
        configs: &[TableConfig],
        optimizer: &TableOptimizerConfig,
        threads: usize,
    ) -> Result<Self> {
        let dim = configs.first().map_or(1, |config| config.dim as usize);
        let state_width = rule(optimizer, 1).state_width(dim);
        let weights = |config: &TableConfig| config.rows * config.dim.max(1) * config.dtype.bytes();
        let rows = configs.iter().map(|config| config.rows).sum::<u64>();
        let weights = configs.iter().map(weights).sum::<u64>();
        accelerator.check_memory(weights + rows * (4 * state_width as u64 + 1))?;
        let threads = Arc::new(thread_pool(threads)?);
        let tables = DeviceTables::new(accelerator, configs, state_width, Arc::clone(&threads))?;
        Ok(Self {
            shards: configs.iter().enumerate().map(|(i, config)| Shard::whole(i, config, 0)).collect(),
            tables,
            state_width,
            threads,
            seed: 0,
            steps: 0,
        })
    }

    /// The tables.
    pub(crate) fn tables(&self) -> &DeviceTables {
        &self.tables
    }

    /// The tables.
    pub(crate) fn tables_mut(&mut self) -> &mut DeviceTables {
        &mut self.tables
    }

    /// Looks up a batch, which may have been staged ahead.
    ///
    /// # Errors
    ///
    /// As [`lookup`](Embeddings::lookup).
    pub(crate) fn look_up(&self, batch: &Batch) -> Result<Lookup> {
        let staged = self.tables.staged(batch)?;
        let looked_up = self.tables.look_up(&staged)?;
        let vectors = looked_up.pooled.as_ref().map(|pooled| Vectors::Tensor(pooled.shallow_clone()));
        Ok(Lookup {
            pooled: vectors.unwrap_or_else(|| Vec::new().into()),
            pooled_by_sample: false,
            pooled_features: Vec::new(),
            sequences: Vec::new(),
            sequences_by_sample: false,
            kept: Some(Box::new(Mutex::new(Kept { staged, looked_up }))),
        })
    }

    /// What a lookup of these tables has kept.
    ///
    /// # Panics
    ///
    /// If it is of others.
    pub(crate) fn kept<'a>(&self, lookup: &'a Lookup) -> &'a Mutex<Kept> {
        let kept = lookup.kept.as_ref().and_then(|kept| kept.downcast_ref());
        kept.expect("the lookup is one of these tables")
    }

    /// Updates every row that was looked up, once, as [`update`](Embeddings::update).
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device fails.
    pub(crate) fn apply(
        &mut self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) -> Result<()> {
        self.steps += 1;
        let update = Update {
            rule: rule(optimizer, self.steps),
            rate: optimizer.learning_rate,
            max_norm: optimizer.max_row_grad_norm,
            noise: step_key(self.seed, self.steps),
        };
        for (lookup, gradients) in lookups.iter().zip(gradients) {
            let kept = self.kept(lookup).lock().unwrap_or_else(PoisonError::into_inner);
            let sequences = gradients.sequences.first().and_then(tensor);
            let gradients = [tensor(&gradients.pooled), sequences];
            let (staged, looked_up) = (&kept.staged, &kept.looked_up);
            let torch = self.tables.accelerator().torch();
            guarded(torch, || self.tables.update(staged, looked_up, gradients, &update, true))?;
        }
        Ok(())
    }

    /// A buffer of a table, by number.
    fn buffer(&self, shard: usize, buffer: usize) -> Tensor {
        let [weights, state] = self.tables.table(self.shards[shard].table);
        if buffer == 0 { weights } else { state }
    }
}

impl Embeddings for DeviceEmbeddings {
    fn on_device(&self) -> Option<&DeviceEmbeddings> {
        Some(self)
    }

    fn on_device_mut(&mut self) -> Option<&mut DeviceEmbeddings> {
        Some(self)
    }

    fn configs(&self) -> &[TableConfig] {
        self.tables.configs()
    }

    fn rank(&self) -> u32 {
        0
    }

    fn ranks(&self) -> u32 {
        1
    }

    fn shards(&self) -> &[Shard] {
        &self.shards
    }

    fn threads(&self) -> &rayon::ThreadPool {
        &self.threads
    }

    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn lookup(&self, groups: &[Group], _steps: Steps) -> Result<Vec<Lookup>> {
        let size = groups.first().map_or(0, Group::samples);
        let batch = Batch::try_new(BatchParts {
            size,
            dense: Vec::new().into(),
            labels: Vec::new().into(),
            weights: None,
            timestamps: None,
            groups: groups.to_vec(),
        })?;
        Ok(vec![self.look_up(&batch)?])
    }

    /// # Panics
    ///
    /// Always: the CPU's attention kernel reads no device's memory.
    fn sequence<'a>(&'a self, _feature: &'a FeatureLookup) -> Sequence<'a> {
        panic!("the vectors of sequences are on a device")
    }

    /// # Panics
    ///
    /// If the device fails; [`Model::update`](crate::model::Model::update) gives an error.
    fn update(
        &mut self,
        lookups: &[Lookup],
        gradients: &[LookupGradients],
        optimizer: &TableOptimizerConfig,
    ) {
        if let Err(error) = self.apply(lookups, gradients, optimizer) {
            panic!("{error}");
        }
    }

    fn buffers(&self, shard: usize) -> Vec<Buffer> {
        let config = &self.configs()[self.shards[shard].table];
        vec![
            Buffer { name: "weight", dtype: stored_dtype(config), columns: config.dim as usize },
            Buffer { name: "accumulator", dtype: Dtype::F32, columns: self.state_width },
        ]
    }

    fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let values = self.buffer(shard, buffer);
        pieces(&values, rows, |piece| {
            let piece = piece.of(&values).to_device(Device::Cpu).contiguous();
            sink(tensors::as_bytes(&piece))
        })
    }

    fn write(
        &mut self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut values = self.buffer(shard, buffer);
        let target = values.shallow_clone();
        pieces(&target, rows, |piece| {
            let mut host = vec![0; piece.rows() as usize * row_bytes(&target)];
            source(&mut host)?;
            let host = of_bytes(&host, piece.rows(), &target).to_device(values.device());
            match piece {
                Piece::Range(first, rows) => values.narrow(0, first, rows).copy_(&host),
                Piece::Chosen(rows) => drop(values.index_copy_(0, &index(rows, &target), &host)),
            }
            Ok(())
        })
    }
}

/// Vectors that are on a device.
fn tensor(vectors: &Vectors) -> Option<&Tensor> {
    match vectors {
        Vectors::Tensor(tensor) => Some(tensor),
        Vectors::Host(_) => None,
    }
}

/// Bytes of a row of a matrix.
fn row_bytes(matrix: &Tensor) -> usize {
    matrix.size()[1] as usize * matrix.kind().elt_size_in_bytes()
}

/// So many rows as those of `matrix`, from their bytes.
fn of_bytes(bytes: &[u8], rows: i64, matrix: &Tensor) -> Tensor {
    Tensor::from_slice(bytes).view_dtype(matrix.kind()).view([rows, matrix.size()[1]])
}

/// Rows that pass through this machine's memory at once.
#[derive(Clone, Copy)]
enum Piece<'a> {
    Range(i64, i64),
    Chosen(&'a [u32]),
}

impl Piece<'_> {
    fn rows(&self) -> i64 {
        match self {
            Self::Range(_, rows) => *rows,
            Self::Chosen(rows) => rows.len() as i64,
        }
    }

    fn of(&self, values: &Tensor) -> Tensor {
        match self {
            Self::Range(first, rows) => values.narrow(0, *first, *rows),
            Self::Chosen(rows) => values.index_select(0, &index(rows, values)),
        }
    }
}

fn index(rows: &[u32], values: &Tensor) -> Tensor {
    let rows: Vec<i64> = rows.iter().map(|row| i64::from(*row)).collect();
    Tensor::from_slice(&rows).to_kind(Kind::Int64).to_device(values.device())
}

/// Cuts rows of `values` into pieces for `work`.
fn pieces(
    values: &Tensor,
    rows: RowSet<'_>,
    mut work: impl FnMut(Piece<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let size = values.size();
    let most = (PIECE / row_bytes(values).max(1)).max(1);
    match rows {
        RowSet::All => {
            let mut first = 0;
            while first < size[0] {
                let rows = (size[0] - first).min(most as i64);
                work(Piece::Range(first, rows))?;
                first += rows;
            }
            Ok(())
        }
        RowSet::Chosen(rows) => rows.chunks(most).try_for_each(|rows| work(Piece::Chosen(rows))),
    }
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::Feature;
    use onefold_sharding::{DataType, IdPolicy, Pooling};

    use super::super::LocalEmbeddings;
    use super::*;
    use crate::config::TableOptimizerKind;
    use crate::device::host::emulated;

    const ROWS: u64 = 12;
    const DIM: u64 = 8;

    fn configs() -> Vec<TableConfig> {
        let dtypes = [DataType::Fp16, DataType::Fp32, DataType::Bf16, DataType::Fp16];
        let config = |(i, dtype)| {
            let (feature, pooling, ids) = (format!("f{i}"), Pooling::Sum, IdPolicy::Checked);
            TableConfig { feature, rows: ROWS, dim: DIM, pooling, target: None, ids, dtype }
        };
        dtypes.into_iter().enumerate().map(config).collect()
    }

    /// Four samples of three ids, so that every row is looked up once.
    fn group(step: i64) -> Group {
        let rows: Vec<Vec<i64>> = (0..4)
            .map(|sample| (0..3).map(|i| (5 * (3 * sample + i) + step) % ROWS as i64).collect())
            .collect();
        let feature = |config: TableConfig| Feature::from_rows(config.feature, &rows).unwrap();
        Group::try_new("g", None, configs().into_iter().map(feature).collect()).unwrap()
    }

    /// Powers of two: their squares, sums of these and products with one are exact, whatever instructions compute them.
    fn gradient(step: i64) -> Vec<f32> {
        let value = |i: i64| [1.0, -0.5, 2.0, -1.0, 0.5][((7 * i + 3 * step) % 5) as usize];
        (0..4 * 4 * DIM as i64).map(value).collect()
    }

    fn stored(embeddings: &dyn Embeddings) -> Vec<Vec<u8>> {
        let weights = |table| {
            let mut bytes = Vec::new();
            let mut sink = |part: &[u8]| {
                bytes.extend_from_slice(part);
                Ok(())
            };
            embeddings.read(table, 0, RowSet::All, &mut sink).unwrap();
            bytes
        };
        (0..configs().len()).map(weights).collect()
    }

    fn train(embeddings: &mut dyn Embeddings, optimizer: &TableOptimizerConfig) -> Vec<Vec<u8>> {
        for step in 0..6 {
            let lookups = embeddings.lookup(&[group(step)], Steps::default()).unwrap();
            let pooled = gradient(step);
            let pooled = match embeddings.on_device() {
                Some(_) => Vectors::Tensor(tensors::from_f32(&pooled, &[-1, DIM as i64])),
                None => pooled.into(),
            };
            let gradients = LookupGradients { pooled, sequences: Vec::new() };
            embeddings.update(&lookups, &[gradients], optimizer);
        }
        stored(embeddings)
    }

    /// Where the updates before rounding are the same, so is every bit of what is stored.
    #[test]
    fn weights_are_rounded_as_on_the_cpu() {
        use TableOptimizerKind::{Adagrad, Adam, RowWiseAdagrad, Sgd};
        // Clipped gradients are no powers of two, and the mean of their squares depends on the order.
        let cases = [(Sgd, None), (Adagrad, None), (Adam, None), (RowWiseAdagrad, None)];
        for (kind, max_norm) in cases.into_iter().chain([Sgd, Adagrad, Adam].map(|kind| (kind, Some(0.7)))) {
            let optimizer = TableOptimizerConfig {
                max_row_grad_norm: max_norm,
                ..TableOptimizerConfig::new(kind, 0.0625)
            };
            let mut cpu = LocalEmbeddings::new(&configs(), &optimizer, 9, 1).unwrap();
            let mut device = DeviceEmbeddings::new(&emulated(), &configs(), &optimizer, 9, 1).unwrap();
            let before = stored(&cpu);
            assert!(before == stored(&device), "a device's tables begin as the CPU's");
            let (expected, found) = (train(&mut cpu, &optimizer), train(&mut device, &optimizer));
            for table in 0..configs().len() {
                assert!(before[table] != expected[table], "{kind:?} changes nothing");
                assert!(found[table] == expected[table], "{kind:?}, {max_norm:?}, table {table}");
            }
            // Another seed is another noise.
            let mut other = DeviceEmbeddings::new(&emulated(), &configs(), &optimizer, 9, 1).unwrap();
            other.seed = 10;
            let other = train(&mut other, &optimizer);
            assert!(other[0] != expected[0] && other[1] == expected[1] && other[2] != expected[2]);
        }
    }

    #[test]
    fn weights_take_the_memory_of_their_type() {
        let optimizer = TableOptimizerConfig::new(TableOptimizerKind::Sgd, 0.1);
        let accelerator = emulated();
        // The emulated device has 1 GiB: room for so many weights of 16 bits, and not of 32.
        let with = |dtype| {
            let config = TableConfig { rows: 2_500_000, dim: 128, dtype, ..configs()[0].clone() };
            DeviceEmbeddings::of_zeros(&accelerator, &[config], &optimizer, 1)
        };
        let [weights, _] = with(DataType::Bf16).unwrap().tables.table(0);
        assert_eq!(weights.numel() * weights.kind().elt_size_in_bytes(), 640_000_000);
        let error = with(DataType::Fp32).unwrap_err().to_string();
        assert!(error.contains("the model takes 1.2 GiB"), "{error}");
    }
}
