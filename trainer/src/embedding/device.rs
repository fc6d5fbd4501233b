//! All tables whole, in a device's memory.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use onefold_ikjt::{Batch, BatchParts, Group};
use onefold_sharding::TableConfig;
use tch::{Device, Kind, Tensor};

use super::lookup::{FeatureLookup, Lookup, Steps};
use super::shard::{Buffer, RowSet, Shard};
use super::table::Table;
use super::update::rule;
use super::{Embeddings, LookupGradients, Vectors, thread_pool};
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, DeviceTables, LookedUp, Staged, failed, guarded};
use crate::kernels::attention::Sequence;
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
        let embeddings = Self::of_zeros(accelerator, configs, optimizer, threads)?;
        for (i, config) in configs.iter().enumerate() {
            // One table at a time is in this machine's memory.
            let table = Table::new(config, seed, i as u64, 0);
            let [mut weights, _] = embeddings.tables.table(i);
            guarded(accelerator.torch(), || {
                weights.copy_(&tensors::from_f32(&table.weights().to_f32(), &weights.size()));
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
        if optimizer.max_row_grad_norm.is_some() {
            let message = "`[optimizer.tables].max_row_grad_norm` is for the CPU only".to_owned();
            return Err(failed(accelerator.torch(), message, "leave it out, or train with `--device cpu`"));
        }
        let dim = configs.first().map_or(1, |config| config.dim as usize);
        let state_width = rule(optimizer, 1).state_width(dim);
        let values = configs.iter().map(|config| config.rows * config.dim.max(1)).sum::<u64>();
        let rows = configs.iter().map(|config| config.rows).sum::<u64>();
        accelerator.check_memory(4 * values + rows * (4 * state_width as u64 + 1))?;
        let threads = Arc::new(thread_pool(threads)?);
        let tables = DeviceTables::new(accelerator, configs, state_width, Arc::clone(&threads))?;
        Ok(Self {
            shards: configs.iter().enumerate().map(|(i, config)| Shard::whole(i, config, 0)).collect(),
            tables,
            state_width,
            threads,
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
        let rule = rule(optimizer, self.steps);
        let rate = optimizer.learning_rate;
        for (lookup, gradients) in lookups.iter().zip(gradients) {
            let kept = self.kept(lookup).lock().unwrap_or_else(PoisonError::into_inner);
            let sequences = gradients.sequences.first().and_then(tensor);
            let gradients = [tensor(&gradients.pooled), sequences];
            let (staged, looked_up) = (&kept.staged, &kept.looked_up);
            let torch = self.tables.accelerator().torch();
            guarded(torch, || self.tables.update(staged, looked_up, gradients, (&rule, rate), true))?;
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
        use safetensors::Dtype::F32;
        let dim = self.configs()[self.shards[shard].table].dim as usize;
        vec![
            Buffer { name: "weight", dtype: F32, columns: dim },
            Buffer { name: "accumulator", dtype: F32, columns: self.state_width },
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
            sink(bytemuck::cast_slice(tensors::as_slice(&piece)))
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
            let mut host = vec![0.0_f32; (piece.rows() * target.size()[1]) as usize];
            source(bytemuck::cast_slice_mut(&mut host))?;
            let host = tensors::from_f32(&host, &[piece.rows(), target.size()[1]]).to_device(values.device());
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
    let most = (PIECE / (4 * size[1].max(1) as usize)).max(1);
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
