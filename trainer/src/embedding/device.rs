//! The shards of one rank in a device's memory.

use std::cell::{Ref, RefCell};
use std::io;
use std::sync::Arc;

use onefold_base::fault::{option, text};
use onefold_kernels::element::step_key;
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use tch::{Kind, Tensor};

use super::shard::{Buffer, RowSet, Shard};
use super::table::{Table, rule, shard_buffers};
use super::usage::Usage;
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, DeviceTables, LookedUp, Slots, Staged, Stored, Update, failed, guarded};
use crate::{Result, tensors};

/// The maximum number of bytes of a table that are copied through host memory at a time.
const PIECE: usize = 64 << 20;

const HELD: &str = "the shard is one that this rank holds";

/// A rank's shards in a device's memory.
#[derive(Debug)]
pub(crate) struct DeviceStore {
    accelerator: Accelerator,
    /// The configurations of the whole tables.
    configs: Vec<TableConfig>,
    /// The plan's shards.
    shards: Vec<Shard>,
    /// For each shard of the plan: the index in `tables`, and its index there, if it is on this rank.
    places: Vec<Option<(usize, usize)>>,
    /// The tables by width; the last ones are as wide as the model's vectors.
    tables: Vec<DeviceTables>,
    /// The number of values of optimizer state per row, by width.
    state_widths: Vec<usize>,
    /// The slots for requests of other ranks, by width.
    served: Vec<Slots>,
    /// The slots for the positions of the vectors that other ranks look up for this rank.
    routes: Slots,
    /// The slots for the rows of replicated tables whose gradients are summed.
    copies: Slots,
    /// The seed of the rounding noise of 16-bit weights.
    seed: u64,
    /// For each shard of the plan, the usage of its rows, as of the last time it was read from the device.
    usage: RefCell<Vec<Option<Usage>>>,
}

/// The gradients of a batch's lookups on the device: `[bags, D]` for the pooled rows, and `[T, D]` for the
/// sequences' elements.
#[derive(Debug)]
pub(crate) struct DeviceGradients {
    pub(crate) pooled: Option<Tensor>,
    pub(crate) sequences: Option<Tensor>,
}

impl DeviceStore {
    /// Creates the shards of `rank` with the same initial weights as in host memory; `threads` stage batches.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device lacks memory, or the tables differ in their dimension.
    pub(super) fn new(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        (shards, rank): (&[Shard], u32),
        optimizer: &TableOptimizerConfig,
        seed: u64,
        threads: &Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let mut store = Self::of_zeros(accelerator, features, (shards, rank), optimizer, threads)?;
        store.seed = seed;
        let tables = store.configs.clone();
        for (number, shard) in shards.iter().enumerate().filter(|(_, shard)| shard.rank == rank) {
            // Only one shard at a time is in host memory.
            let table = threads.install(|| Table::of_shard(&tables[shard.table], seed, shard, 0));
            let mut weights = store.buffer(number, 0);
            guarded(accelerator.torch(), || {
                weights.copy_(&of_bytes(table.weights().bytes(), weights.size()[0], &weights));
                Ok(())
            })?;
        }
        Ok(store)
    }

    /// Creates the same shards with zero weights.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    fn of_zeros(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        (shards, rank): (&[Shard], u32),
        optimizer: &TableOptimizerConfig,
        threads: &Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let (configs, table_of) = tables_of(features);
        let dim = configs.first().map_or(1, |config| config.dim);
        if let Some(other) = configs.iter().find(|config| config.dim != dim) {
            let message = format!("`{}` has dimension {}, other tables {dim}", other.name, other.dim);
            let hint = text!["give all tables one `dim`, or train with ", option("device").set_to("cpu")];
            return Err(failed(accelerator.torch(), message, hint));
        }
        let width = |shard: &Shard| (shard.columns.end - shard.columns.start) as usize;
        let own = || shards.iter().filter(|shard| shard.rank == rank);
        let mut widths: Vec<usize> = own().map(width).chain([dim as usize]).collect();
        widths.sort_unstable();
        widths.dedup();
        let state_widths: Vec<usize> =
            widths.iter().map(|width| rule(optimizer, 1).state_width(*width)).collect();
        let mut held: Vec<Vec<Stored>> = widths.iter().map(|_| Vec::new()).collect();
        let mut places = vec![None; shards.len()];
        let mut bytes = 0;
        for (number, shard) in shards.iter().enumerate().filter(|(_, shard)| shard.rank == rank) {
            let (class, dtype) = (widths.partition_point(|w| *w < width(shard)), configs[shard.table].dtype);
            let rows = shard.rows.end - shard.rows.start;
            bytes += rows * (width(shard) as u64 * dtype.bytes() + 4 * state_widths[class] as u64 + 1);
            places[number] = Some((class, held[class].len()));
            let origin = [shard.rows.start as i64, shard.columns.start as i64];
            held[class].push(Stored { table: shard.table as i64, rows: rows as i64, dtype, origin });
        }
        accelerator.check_memory(bytes)?;
        let place = |table: usize| {
            let whole = |(shard, _): &(&Shard, _)| shard.table == table && shard.is_whole(&configs[table]);
            shards.iter().zip(&places).filter(whole).find_map(|(_, place)| Some((*place)?.1))
        };
        let local: Vec<Option<usize>> = table_of.into_iter().map(place).collect();
        let tables = widths.iter().zip(&held).zip(&state_widths).map(|((&width, held), &state_width)| {
            // Batches are looked up in the tables of the model's width, which include all whole tables.
            let looked_up = if width == dim as usize { (features, &local[..]) } else { (&[][..], &[][..]) };
            DeviceTables::new(accelerator, (held, width), looked_up, state_width, Arc::clone(threads))
        });
        let usage =
            |shard: &Shard| (shard.rank == rank).then(|| Usage::new(shard.rows.end - shard.rows.start));
        Ok(Self {
            tables: tables.collect::<Result<_>>()?,
            configs,
            usage: RefCell::new(shards.iter().map(usage).collect()),
            shards: shards.to_vec(),
            places,
            served: widths.iter().map(|_| Slots::new(accelerator)).collect(),
            state_widths,
            routes: Slots::new(accelerator),
            copies: Slots::new(accelerator),
            accelerator: accelerator.clone(),
            seed: 0,
        })
    }

    /// Returns the device.
    pub(crate) fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Returns the tables of the model's width, in which batches are looked up.
    pub(crate) fn whole(&self) -> &DeviceTables {
        self.tables.last().expect("there are tables of the model's width")
    }

    /// Returns the shards of this rank, by width, with the slots for requests of other ranks.
    pub(super) fn by_width(&self) -> impl Iterator<Item = (&DeviceTables, &Slots)> {
        self.tables.iter().zip(&self.served)
    }

    /// Returns the slots for [`Routes`](crate::device::Routes).
    pub(super) fn routes(&self) -> &Slots {
        &self.routes
    }

    /// Returns the slots for [`ReducedRows`](crate::device::ReducedRows).
    pub(super) fn copies(&self) -> &Slots {
        &self.copies
    }

    /// Returns the index of a shard's width in [`by_width`](Self::by_width), and its first row there.
    pub(super) fn place(&self, shard: usize) -> (usize, i64) {
        let (class, number) = self.held(shard);
        (class, self.tables[class].first_row(number))
    }

    fn held(&self, shard: usize) -> (usize, usize) {
        self.places[shard].expect(HELD)
    }

    /// Looks up the parts of a batch that are on this rank.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub(crate) fn lookup(&self, staged: &Staged) -> Result<LookedUp> {
        self.whole().look_up(staged)
    }

    /// Returns step `number` of the tables' optimizer, counted from 1. If `permit`, one `int` on the device, is 0, the
    /// step changes nothing.
    pub(super) fn step<'a>(
        &self,
        optimizer: &TableOptimizerConfig,
        number: u64,
        permit: Option<&'a Tensor>,
    ) -> Update<'a> {
        Update {
            rule: rule(optimizer, number),
            rate: optimizer.learning_rate,
            max_norm: optimizer.max_row_grad_norm,
            noise: step_key(self.seed, number),
            permit,
        }
    }

    /// Updates each of `rows` of one width once. `class` is the index of the width; `gradients` are in two parts.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub(crate) fn update(
        &mut self,
        class: usize,
        rows: &Tensor,
        gradients: [&Tensor; 2],
        update: &Update<'_>,
    ) -> Result<()> {
        let (torch, tables) = (self.accelerator.torch(), &mut self.tables[class]);
        guarded(torch, || tables.update(rows, gradients, update, true))
    }

    /// Updates the rows that a batch looked up in whole tables, if no other rank takes part.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub(crate) fn update_own(
        &mut self,
        (staged, looked_up): (&Staged, &LookedUp),
        gradients: &DeviceGradients,
        update: &Update<'_>,
    ) -> Result<()> {
        let torch = self.accelerator.torch();
        let unpooled = guarded(torch, || self.whole().unpooled(staged, gradients.pooled.as_ref()))?;
        let none = Tensor::empty([0, self.whole().width() as i64], (Kind::Float, torch));
        let sequences = gradients.sequences.as_ref().unwrap_or(&none);
        self.update(self.tables.len() - 1, &looked_up.rows, [&unpooled, sequences], update)
    }

    /// Reads from the device which rows of a shard were updated since the last call.
    fn gather_usage(&self, shard: usize) {
        let (class, number) = self.held(shard);
        let rows = self.tables[class].take_touched(number);
        self.usage.borrow_mut()[shard].as_mut().expect(HELD).look_up(rows);
    }

    /// Returns the usage of a shard's rows.
    pub(super) fn usage(&self, shard: usize) -> Ref<'_, Usage> {
        self.gather_usage(shard);
        Ref::map(self.usage.borrow(), |usage| usage[shard].as_ref().expect(HELD))
    }

    /// Returns the mutable usage of a shard's rows.
    pub(super) fn usage_mut(&mut self, shard: usize) -> &mut Usage {
        self.gather_usage(shard);
        self.usage.get_mut()[shard].as_mut().expect(HELD)
    }

    /// Returns a buffer of a shard.
    fn buffer(&self, shard: usize, buffer: usize) -> Tensor {
        let (class, number) = self.held(shard);
        let [weights, state] = self.tables[class].table(number);
        if buffer == 0 { weights } else { state }
    }

    /// See [`Embeddings::buffers`](super::Embeddings::buffers).
    pub(super) fn buffers(&self, shard: usize) -> Vec<Buffer> {
        let (class, _) = self.held(shard);
        let config = &self.configs[self.shards[shard].table];
        shard_buffers(config, self.tables[class].width(), self.state_widths[class])
    }

    /// See [`Embeddings::read`](super::Embeddings::read).
    pub(super) fn read(
        &self,
        shard: usize,
        buffer: usize,
        rows: RowSet<'_>,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let values = self.buffer(shard, buffer);
        pieces(&values, rows, |piece| sink(&tensors::to_bytes(&piece.of(&values))))
    }

    /// See [`Embeddings::write`](super::Embeddings::write).
    pub(super) fn write(
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

/// Returns the number of bytes per row of a matrix.
fn row_bytes(matrix: &Tensor) -> usize {
    matrix.size()[1] as usize * matrix.kind().elt_size_in_bytes()
}

/// Creates a matrix of `rows` rows from bytes, with the type and the columns of `matrix`.
fn of_bytes(bytes: &[u8], rows: i64, matrix: &Tensor) -> Tensor {
    Tensor::from_slice(bytes).view_dtype(matrix.kind()).view([rows, matrix.size()[1]])
}

/// Rows that are copied through host memory at once.
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

/// Cuts rows of `values` into pieces, and calls `work` with each of them.
fn pieces(
    values: &Tensor,
    rows: RowSet<'_>,
    mut work: impl FnMut(Piece<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let most = (PIECE / row_bytes(values).max(1)).max(1);
    let end = match rows {
        RowSet::All => values.size()[0],
        RowSet::First(rows) => rows as i64,
        RowSet::Chosen(rows) => {
            return rows.chunks(most).try_for_each(|rows| work(Piece::Chosen(rows)));
        }
    };
    let mut first = 0;
    while first < end {
        let rows = (end - first).min(most as i64);
        work(Piece::Range(first, rows))?;
        first += rows;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::{Batch, BatchParts, Feature, Group};
    use onefold_sharding::{DataType, IdPolicy, Pooling};

    use super::super::{Embeddings, LookupGradients, Placement, Status};
    use super::*;
    use crate::config::TableOptimizer;
    use crate::device::tests::host::emulated;

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

    /// Powers of two: their squares, the sums of the squares, and products with a power of two are exact with any
    /// instructions.
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
            kept: Vec::new(),
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
            let request = embeddings.request_batch(Some(&batch), Status::default()).unwrap();
            if embeddings.on_device().is_some() {
                let lookup = embeddings.device().unwrap().lookup(request).unwrap();
                let pooled = Some(tensors::from_f32(&pooled, &[-1, DIM as i64]));
                let gradients = DeviceGradients { pooled, sequences: None };
                let sent = embeddings.device().unwrap().send_gradients(&lookup, &gradients).unwrap();
                embeddings.update_on_device(&lookup, &gradients, sent, (optimizer, None)).unwrap();
            } else {
                let lookups = embeddings.host().unwrap().lookup(request).unwrap();
                let gradients = [LookupGradients { pooled, sequences: Vec::new() }];
                let sent = embeddings.host().unwrap().send_gradients(&lookups, &gradients).unwrap();
                embeddings.update(&lookups, &gradients, sent, optimizer).unwrap();
            }
        }
        stored(embeddings)
    }

    fn on_device(optimizer: &TableOptimizerConfig, seed: u64) -> Embeddings {
        let (configs, placement) = (configs(), Placement::alone(&configs()));
        Embeddings::on_accelerator(&emulated(), &configs, &placement, optimizer, seed, 1).unwrap()
    }

    /// If the updates before rounding are equal, the stored bits are equal.
    #[test]
    fn weights_are_rounded_as_on_the_cpu() {
        use TableOptimizer::{Adagrad, Adam, RowWiseAdagrad, Sgd};
        // Clipped gradients are not powers of two, and the mean of their squares depends on the order of summation.
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
            // Another seed gives other noise.
            let mut other = on_device(&optimizer, 9);
            let super::super::Store::Device(store) = &mut other.store else { panic!("it is on a device") };
            store.seed = 10;
            let other = train(&mut other, &optimizer);
            assert!(other[0] != expected[0] && other[1] == expected[1] && other[2] != expected[2]);
        }
    }

    #[test]
    fn weights_take_the_memory_of_their_type() {
        let optimizer = TableOptimizerConfig::new(TableOptimizer::Sgd, 0.1);
        let accelerator = emulated();
        // The emulated device has 1 GiB, which is enough for these weights in 16 bits, but not in 32 bits.
        let with = |dtype| {
            let config = FeatureConfig { rows: 2_500_000, dim: 128, dtype, ..configs()[0].clone() };
            let threads = Arc::new(super::super::thread_pool(1).unwrap());
            let shards = Placement::alone(std::slice::from_ref(&config)).shards;
            DeviceStore::of_zeros(&accelerator, &[config], (&shards, 0), &optimizer, &threads)
        };
        let weights = with(DataType::Bf16).unwrap().buffer(0, 0);
        assert_eq!(weights.numel() * weights.kind().elt_size_in_bytes(), 640_000_000);
        let error = with(DataType::Fp32).unwrap_err().to_string();
        assert!(error.contains("the model takes 1.2 GiB"), "{error}");
        let mixed = [configs()[0].clone(), FeatureConfig { dim: 4, ..configs()[1].clone() }];
        let placement = Placement::alone(&mixed);
        let error = Embeddings::on_accelerator(&accelerator, &mixed, &placement, &optimizer, 1, 1);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("`f1` has dimension 4, other tables 8"), "{error}");
    }
}
