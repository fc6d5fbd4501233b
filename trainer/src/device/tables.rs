//! Tables and shards of tables of one width in a device's memory.

use std::sync::Arc;

use onefold_ikjt::Batch;
use onefold_sharding::{DataType, FeatureConfig};
use tch::{Kind, Tensor};

use super::stage::Stage;
use super::update::Update;
use super::weights::{Stored, Weights};
use super::{Accelerator, ServedRows, Staged};
use crate::Result;

/// A table, or a rectangle of one, that is on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    /// The table's number in its model.
    pub(crate) table: usize,
    /// Rows that are here.
    pub(crate) rows: u64,
    pub(crate) dtype: DataType,
    /// The first row and column of the whole table.
    pub(crate) origin: [u64; 2],
}

impl Held {
    /// All of a table.
    #[cfg(test)]
    pub(crate) fn whole(table: usize, config: &FeatureConfig) -> Self {
        Self { table, rows: config.rows, dtype: config.dtype, origin: [0, 0] }
    }
}

/// Tables of one width and their optimizer's state.
#[derive(Debug)]
pub(crate) struct DeviceTables {
    accelerator: Accelerator,
    weights: Weights,
    /// `[R, state width]`, R being the rows of all tables.
    state: Tensor,
    /// A byte for every row: whether it was updated since that was last asked.
    marks: Tensor,
    /// What is here, by number.
    held: Vec<Held>,
    /// The features of batches, in their order.
    features: Vec<FeatureConfig>,
    /// By feature: the first row of its table, if all of it is here.
    first_rows: Vec<Option<i64>>,
    stage: Stage,
}

/// What was looked up for a batch.
#[derive(Debug)]
pub(crate) struct LookedUp {
    /// The row of every element; -1 where other ranks have it.
    pub(crate) rows: Tensor,
    /// `[bags, D]`; zeros where other ranks have the table.
    pub(crate) pooled: Option<Tensor>,
    /// The vectors of every sequence's elements, `[T, D]`; zeros where other ranks have the table.
    pub(crate) sequences: Option<Tensor>,
}

impl DeviceTables {
    /// Memory for what is held, `width` columns of each, with weights and state of zero. Batches have these `features`,
    /// and `local` says for each which of the held tables it looks up, if all of its table is here. `threads` put
    /// batches together.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device lacks the memory, or the tables have 2^31 rows.
    pub(crate) fn new(
        accelerator: &Accelerator,
        (held, width): (&[Held], usize),
        (features, local): (&[FeatureConfig], &[Option<usize>]),
        state_width: usize,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let stored = held.iter().map(|held| Stored {
            rows: held.rows as i64,
            dtype: held.dtype,
            table: held.table as i64,
            origin: held.origin.map(|first| first as i64),
        });
        let weights = Weights::zeros(accelerator, &stored.collect::<Vec<_>>(), width as i64)?;
        let first_row = |place: &Option<usize>| place.map(|place| weights.rows_of(place).start);
        Ok(Self {
            state: accelerator.zeros(&[weights.rows(), state_width as i64], Kind::Float)?,
            marks: accelerator.zeros(&[weights.rows()], Kind::Uint8)?,
            first_rows: local.iter().map(first_row).collect(),
            weights,
            held: held.to_vec(),
            stage: Stage::new(accelerator, threads),
            accelerator: accelerator.clone(),
            features: features.to_vec(),
        })
    }

    /// Columns.
    pub(crate) fn width(&self) -> usize {
        self.weights.dim() as usize
    }

    /// The first row of a table, by its number, among those of all.
    pub(crate) fn first_row(&self, table: usize) -> i64 {
        self.weights.rows_of(table).start
    }

    /// A table's weights, `[rows, D]` of its type, and state, `[rows, width]`, which share the memory of all tables.
    pub(crate) fn table(&self, table: usize) -> [Tensor; 2] {
        let rows = self.weights.rows_of(table);
        [self.weights.table(table), self.state.narrow(0, rows.start, rows.end - rows.start)]
    }

    /// The rows of a table that were updated since the last call for it, ascending.
    pub(crate) fn take_touched(&self, table: usize) -> Vec<u32> {
        // Another handle of the same memory.
        let mut marks = self.marks.narrow(0, self.first_row(table), self.held[table].rows as i64);
        // Rows that were not told would be missing in the next checkpoint.
        let rows = Vec::<i64>::try_from(marks.nonzero().view(-1)).expect("a vector of 64-bit integers");
        let _ = marks.zero_();
        rows.into_iter().map(|row| row as u32).collect()
    }

    /// Begins to copy a batch to the device, which may be looked up later.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) for an id that its table has no row for, and if memory cannot be
    /// had.
    pub(crate) fn stage(&self, batch: &Batch) -> Result<Staged> {
        self.stage.stage(batch, &self.features, &self.first_rows)
    }

    /// Looks up and pools a batch that has [arrived](Staged::arrive).
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had or a kernel not be launched.
    pub(crate) fn look_up(&self, batch: &Staged) -> Result<LookedUp> {
        let rows = self.accelerator.table_rows(&batch.ids, &batch.starts, &batch.tables)?;
        let pooled = batch.bags.as_ref().map(|bags| self.accelerator.pool(&self.weights, &rows, bags));
        let sequences = (!batch.sequences.is_empty()).then(|| {
            let count = rows.numel() as i64 - batch.pooled_elements;
            self.accelerator.gather(&self.weights, &rows.narrow(0, batch.pooled_elements, count))
        });
        Ok(LookedUp { pooled: pooled.transpose()?, sequences: sequences.transpose()?, rows })
    }

    /// What others asked for: pooled lists, `[bags, width]`, and the vectors of single rows, `[n, width]`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had or a kernel not be launched.
    pub(crate) fn serve(&self, served: &ServedRows) -> Result<[Tensor; 2]> {
        let [pooled, sequences] = &served.rows;
        let pooled = match &served.bags {
            Some(bags) => self.accelerator.pool(&self.weights, pooled, bags)?,
            None => self.accelerator.empty(&[0, self.weights.dim()], Kind::Float)?,
        };
        Ok([pooled, self.accelerator.gather(&self.weights, sequences)?])
    }

    /// The gradient of every element of pooled rows, `[elements, D]`, from that of the rows, `[bags, D]`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had or a kernel not be launched.
    pub(crate) fn unpooled(&self, batch: &Staged, gradient: Option<&Tensor>) -> Result<Tensor> {
        match (&batch.bags, gradient) {
            (Some(bags), Some(gradient)) => self.accelerator.unpool(gradient, bags, batch.pooled_elements),
            _ => self.accelerator.empty(&[0, self.weights.dim()], Kind::Float),
        }
    }

    /// The rows that others looked up, with their gradients, from those of what [`serve`](Self::serve) gave.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had or a kernel not be launched.
    pub(crate) fn gradients_of(
        &self,
        served: &ServedRows,
        [pooled, sequences]: [Tensor; 2],
    ) -> Result<(Tensor, Tensor)> {
        let accelerator = &self.accelerator;
        let pooled = match &served.bags {
            Some(bags) => accelerator.unpool(&pooled, bags, served.rows[0].numel() as i64)?,
            None => pooled,
        };
        Ok((Tensor::cat(&served.rows, 0), Tensor::cat(&[pooled, sequences], 0)))
    }

    /// Updates every row that was looked up, once: `rows` are those of all elements, whose gradients are those of
    /// `gradients[0]` first, then those of `gradients[1]`. `marked` rows are found by
    /// [`take_touched`](Self::take_touched).
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had or a kernel not be launched.
    pub(crate) fn update(
        &mut self,
        rows: &Tensor,
        gradients: [&Tensor; 2],
        update: &Update<'_>,
        marked: bool,
    ) -> Result<()> {
        let places = Accelerator::places(rows);
        let marks = marked.then_some(&self.marks);
        self.accelerator.update(&places, gradients, update, &self.weights, &self.state, marks)
    }
}

/// Matrices of `width` columns below each other; one of them needs no copy.
pub(crate) fn concatenated(accelerator: &Accelerator, parts: &[Tensor], width: i64) -> Result<Tensor> {
    match parts {
        [] => accelerator.empty(&[0, width], Kind::Float),
        [only] => Ok(only.shallow_clone()),
        parts => Ok(Tensor::cat(parts, 0)),
    }
}
