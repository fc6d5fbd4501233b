//! All tables whole, in a device's memory.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use onefold_ikjt::Batch;
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use tch::{Device, Kind, Tensor};

use super::shard::{Buffer, RowSet, Shard};
use super::table::{Table, shard_buffers};
use super::touched::Touched;
use super::update::rule;
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, DeviceTables, LookedUp, Staged, Update, guarded};
use crate::kernels::element::step_key;
use crate::{Result, tensors};

/// Bytes of a table that pass through this machine's memory at a time.
const PIECE: usize = 64 << 20;

/// Every table, whole, in a device's memory. A shard's number is its table's.
#[derive(Debug)]
pub(crate) struct DeviceStore {
    tables: DeviceTables,
    state_width: usize,
    /// Of the noise that weights of 16 bits are rounded with.
    seed: u64,
    /// The rows that changed, as far as the device was asked.
    touched: RefCell<Vec<Touched>>,
}

/// A batch on the device, and what was looked up for it.
#[derive(Debug)]
pub(crate) struct DeviceLookup {
    pub(crate) staged: Staged,
    pub(crate) looked_up: LookedUp,
}

/// The gradients of a batch's lookups on the device: of the pooled rows `[bags, D]`, and of the sequences' elements `[T, D]`.
#[derive(Debug)]
pub(crate) struct DeviceGradients {
    pub(crate) pooled: Option<Tensor>,
    pub(crate) sequences: Option<Tensor>,
}

impl DeviceStore {
    /// Tables with the initial weights that they have in this machine's memory; `threads` prepare batches.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device lacks the memory, or the tables differ in their dimension.
    pub(super) fn new(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let mut store = Self::of_zeros(accelerator, features, optimizer, threads)?;
        store.seed = seed;
        for (i, config) in tables_of(features).0.iter().enumerate() {
            // One table at a time is in this machine's memory.
            let table = Table::of_shard(config, seed, &Shard::whole(i, config, 0), 0);
            let [mut weights, _] = store.tables.table(i);
            guarded(accelerator.torch(), || {
                weights.copy_(&of_bytes(table.weights().bytes(), config.rows as i64, &weights));
                Ok(())
            })?;
        }
        Ok(store)
    }

    /// Tables whose weights are all zero.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(crate) fn of_zeros(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        optimizer: &TableOptimizerConfig,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let (configs, _) = tables_of(features);
        let dim = configs.first().map_or(1, |config| config.dim as usize);
        let state_width = rule(optimizer, 1).state_width(dim);
        let weights = |config: &TableConfig| config.rows * config.dim.max(1) * config.dtype.bytes();
        let rows = configs.iter().map(|config| config.rows).sum::<u64>();
        let weights = configs.iter().map(weights).sum::<u64>();
        accelerator.check_memory(weights + rows * (4 * state_width as u64 + 1))?;
        let tables = DeviceTables::new(accelerator, features, state_width, threads)?;
        let touched = configs.iter().map(|config| Touched::new(config.rows)).collect();
        Ok(Self { tables, state_width, seed: 0, touched: RefCell::new(touched) })
    }

    /// The tables.
    pub(crate) fn tables(&self) -> &DeviceTables {
        &self.tables
    }

    /// Looks up a batch, which may have been staged ahead.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for; [`Error::Device`](crate::Error::Device) if the device
    /// fails.
    pub(crate) fn lookup(&self, batch: &Batch) -> Result<DeviceLookup> {
        let staged = self.tables.staged(batch)?;
        let looked_up = self.tables.look_up(&staged)?;
        Ok(DeviceLookup { staged, looked_up })
    }

    /// Updates every row that was looked up, once, in step `step`.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device fails.
    pub(crate) fn update(
        &mut self,
        lookup: &DeviceLookup,
        gradients: &DeviceGradients,
        optimizer: &TableOptimizerConfig,
        step: u64,
    ) -> Result<()> {
        let update = Update {
            rule: rule(optimizer, step),
            rate: optimizer.learning_rate,
            max_norm: optimizer.max_row_grad_norm,
            noise: step_key(self.seed, step),
        };
        let gradients = [gradients.pooled.as_ref(), gradients.sequences.as_ref()];
        let torch = self.tables.accelerator().torch();
        guarded(torch, || self.tables.update(&lookup.staged, &lookup.looked_up, gradients, &update, true))
    }

    /// The rows of a table that changed, ascending.
    pub(super) fn touched(&self, table: usize) -> Vec<u32> {
        let mut touched = self.touched.borrow_mut();
        for (touched, rows) in touched.iter_mut().zip(self.tables.take_touched()) {
            touched.add(rows);
        }
        touched[table].rows()
    }

    pub(super) fn touch(&mut self, table: usize, rows: &[u32]) {
        self.touched.get_mut()[table].add(rows.iter().copied());
    }

    pub(super) fn clear_touched(&mut self) {
        drop(self.tables.take_touched());
        self.touched.get_mut().iter_mut().for_each(Touched::clear);
    }

    /// A buffer of a table, both by number.
    fn buffer(&self, table: usize, buffer: usize) -> Tensor {
        let [weights, state] = self.tables.table(table);
        if buffer == 0 { weights } else { state }
    }

    /// As [`Embeddings::buffers`](super::Embeddings::buffers).
    pub(super) fn buffers(&self, table: usize) -> Vec<Buffer> {
        let config = &self.tables.configs()[table];
        shard_buffers(config, config.dim as usize, self.state_width)
    }

    /// As [`Embeddings::read`](super::Embeddings::read).
    pub(super) fn read(
        &self,
        table: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let values = self.buffer(table, buffer);
        pieces(&values, rows, |piece| {
            let piece = piece.of(&values).to_device(Device::Cpu).contiguous();
            sink(tensors::as_bytes(&piece))
        })
    }

    /// As [`Embeddings::write`](super::Embeddings::write).
    pub(super) fn write(
        &mut self,
        table: usize,
        buffer: usize,
        rows: RowSet<'_>,
        source: &mut dyn FnMut(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut values = self.buffer(table, buffer);
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
    use onefold_ikjt::{BatchParts, Feature, Group};
    use onefold_sharding::{DataType, IdPolicy, Pooling};

    use super::super::{Embeddings, LookupGradients, Placement, Status};
    use super::*;
    use crate::config::TableOptimizerKind;
    use crate::device::host::emulated;

    const ROWS: u64 = 12;
    const DIM: u64 = 8;

    fn configs() -> Vec<FeatureConfig> {
        let dtypes = [DataType::Fp16, DataType::Fp32, DataType::Bf16, DataType::Fp16];
        let config = |(i, dtype)| {
            let (feature, pooling, ids) = (format!("f{i}"), Pooling::Sum, IdPolicy::Checked);
            FeatureConfig { feature, table: None, rows: ROWS, dim: DIM, pooling, target: None, ids, dtype }
        };
        dtypes.into_iter().enumerate().map(config).collect()
    }

    /// Four samples of three ids, so that every row is looked up once.
    fn group(step: i64) -> Group {
        let rows: Vec<Vec<i64>> = (0..4)
            .map(|sample| (0..3).map(|i| (5 * (3 * sample + i) + step) % ROWS as i64).collect())
            .collect();
        let feature = |config: FeatureConfig| Feature::from_rows(config.feature, &rows).unwrap();
        Group::try_new("g", None, configs().into_iter().map(feature).collect()).unwrap()
    }

    /// Powers of two: their squares, sums of these and products with one are exact, whatever instructions compute them.
    fn gradient(step: i64) -> Vec<f32> {
        let value = |i: i64| [1.0, -0.5, 2.0, -1.0, 0.5][((7 * i + 3 * step) % 5) as usize];
        (0..4 * 4 * DIM as i64).map(value).collect()
    }

    fn batch(step: i64) -> Batch {
        let parts = BatchParts {
            size: 4,
            dense: Vec::new().into(),
            labels: Vec::new().into(),
            weights: None,
            timestamps: None,
            groups: vec![group(step)],
        };
        Batch::try_new(parts).unwrap()
    }

    fn stored(embeddings: &Embeddings) -> Vec<Vec<u8>> {
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

    fn train(embeddings: &mut Embeddings, optimizer: &TableOptimizerConfig) -> Vec<Vec<u8>> {
        for step in 0..6 {
            let (batch, pooled) = (batch(step), gradient(step));
            if let Some(store) = embeddings.on_device() {
                let lookup = store.lookup(&batch).unwrap();
                let pooled = Some(tensors::from_f32(&pooled, &[-1, DIM as i64]));
                let gradients = DeviceGradients { pooled, sequences: None };
                embeddings.update_on_device(&lookup, &gradients, optimizer).unwrap();
            } else {
                let request = embeddings.request(batch.groups(), Status::default()).unwrap();
                let lookups = embeddings.lookup(request).unwrap();
                let gradients = [LookupGradients { pooled, sequences: Vec::new() }];
                let sent = embeddings.send_gradients(&lookups, &gradients).unwrap();
                embeddings.update(&lookups, &gradients, sent, optimizer).unwrap();
            }
        }
        stored(embeddings)
    }

    fn on_device(optimizer: &TableOptimizerConfig, seed: u64) -> Embeddings {
        Embeddings::on_accelerator(&emulated(), &configs(), optimizer, seed, 1).unwrap()
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
            let placement = Placement::alone(&configs());
            let mut cpu = Embeddings::new(&configs(), &placement, &optimizer, 9, 1).unwrap();
            let mut device = on_device(&optimizer, 9);
            let before = stored(&cpu);
            assert!(before == stored(&device), "a device's tables begin as the CPU's");
            let (expected, found) = (train(&mut cpu, &optimizer), train(&mut device, &optimizer));
            for table in 0..configs().len() {
                assert!(before[table] != expected[table], "{kind:?} changes nothing");
                assert!(found[table] == expected[table], "{kind:?}, {max_norm:?}, table {table}");
            }
            // Another seed is another noise.
            let mut other = on_device(&optimizer, 9);
            let super::super::Store::Device(store) = &mut other.store else { panic!("it is on a device") };
            store.seed = 10;
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
            let config = FeatureConfig { rows: 2_500_000, dim: 128, dtype, ..configs()[0].clone() };
            let threads = Arc::new(super::super::thread_pool(1).unwrap());
            DeviceStore::of_zeros(&accelerator, &[config], &optimizer, threads)
        };
        let [weights, _] = with(DataType::Bf16).unwrap().tables.table(0);
        assert_eq!(weights.numel() * weights.kind().elt_size_in_bytes(), 640_000_000);
        let error = with(DataType::Fp32).unwrap_err().to_string();
        assert!(error.contains("the model takes 1.2 GiB"), "{error}");
    }
}
