//! Tables and shards of tables, all with the same number of columns, in a device's memory.

use std::sync::Arc;

use onefold_ikjt::Batch;
use onefold_sharding::FeatureConfig;
use tch::{Kind, Tensor};

use super::stage::Stage;
use super::update::Update;
use super::weights::{Stored, Weights};
use super::{Accelerator, ServedRows, Staged};
use crate::Result;

/// Tables with the same number of columns, and their optimizer state.
#[derive(Debug)]
pub(crate) struct DeviceTables {
    accelerator: Accelerator,
    weights: Weights,
    /// The optimizer state, `[R, state width]`, where R is the number of rows of all tables.
    state: Tensor,
    /// A byte per row: whether it was updated since the last call of `take_touched`.
    marks: Tensor,
    /// The features of batches, in order.
    features: Vec<FeatureConfig>,
    /// The first row of each feature's table, if the whole table is here.
    first_rows: Vec<Option<i64>>,
    stage: Stage,
}

/// The result of a batch's lookup.
#[derive(Debug)]
pub(crate) struct LookedUp {
    /// The table row of every element; -1 if the table is on other ranks.
    pub(crate) rows: Tensor,
    /// The pooled vectors, `[bags, D]`; zeros if the table is on other ranks.
    pub(crate) pooled: Option<Tensor>,
    /// The vectors of the sequences' elements, `[T, D]`; zeros if the table is on other ranks.
    pub(crate) sequences: Option<Tensor>,
}

impl DeviceTables {
    /// Allocates zero weights and state for `stored`, with `width` columns. `features` are the features of batches;
    /// `local` contains for each feature the index in `stored` of its table, if the whole table is here. `threads`
    /// stage batches.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device lacks memory, or the tables together have 2^31 rows or
    /// more.
    pub(crate) fn new(
        accelerator: &Accelerator,
        (stored, width): (&[Stored], usize),
        (features, local): (&[FeatureConfig], &[Option<usize>]),
        state_width: usize,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let weights = Weights::zeros(accelerator, stored, width as i64)?;
        let first_row = |place: &Option<usize>| place.map(|place| weights.rows_of(place).start);
        Ok(Self {
            state: accelerator.zeros(&[weights.rows(), state_width as i64], Kind::Float)?,
            marks: accelerator.zeros(&[weights.rows()], Kind::Uint8)?,
            first_rows: local.iter().map(first_row).collect(),
            weights,
            stage: Stage::new(accelerator, threads),
            accelerator: accelerator.clone(),
            features: features.to_vec(),
        })
    }

    /// Returns the number of columns.
    pub(crate) fn width(&self) -> usize {
        self.weights.dim as usize
    }

    /// Returns the first row of a table (an index in `stored`) in the array of all local tables.
    pub(crate) fn first_row(&self, table: usize) -> i64 {
        self.weights.rows_of(table).start
    }

    /// Returns views of a table's weights, `[rows, D]` in its type, and of its state, `[rows, width]`.
    pub(crate) fn table(&self, table: usize) -> [Tensor; 2] {
        let rows = self.weights.rows_of(table);
        [self.weights.table(table), self.state.narrow(0, rows.start, rows.end - rows.start)]
    }

    /// Returns the rows of a table that were updated since the previous call, ascending, and resets the marks.
    pub(crate) fn take_touched(&self, table: usize) -> Vec<u32> {
        let rows = self.weights.rows_of(table);
        // A view of the same memory.
        let mut marks = self.marks.narrow(0, rows.start, rows.end - rows.start);
        // A failure here must not be ignored: rows that are not returned would be missing in the next checkpoint.
        let rows = Vec::<i64>::try_from(marks.nonzero().view(-1)).expect("a vector of 64-bit integers");
        let _ = marks.zero_();
        rows.into_iter().map(|row| row as u32).collect()
    }

    /// Starts copying a batch to the device, to be looked up later.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if an id has no row in its table, or if memory cannot be allocated.
    pub(crate) fn stage(&self, batch: &Batch) -> Result<Staged> {
        self.stage.stage(batch, &self.features, &self.first_rows)
    }

    /// Looks up and pools a batch that has [arrived](Staged::arrive).
    pub(crate) fn look_up(&self, batch: &Staged) -> Result<LookedUp> {
        let rows = self.accelerator.table_rows(&batch.ids, &batch.starts, &batch.tables)?;
        let pooled = batch.bags.as_ref().map(|bags| self.accelerator.pool(&self.weights, &rows, bags));
        let sequences = (!batch.sequences.is_empty()).then(|| {
            let count = rows.numel() as i64 - batch.pooled_elements;
            self.accelerator.gather(&self.weights, &rows.narrow(0, batch.pooled_elements, count))
        });
        Ok(LookedUp { pooled: pooled.transpose()?, sequences: sequences.transpose()?, rows })
    }

    /// Computes the answers to the requests of other ranks: pooled lists, `[bags, width]`, and the vectors of
    /// single rows, `[n, width]`.
    pub(crate) fn serve(&self, served: &ServedRows) -> Result<[Tensor; 2]> {
        let [pooled, sequences] = &served.rows;
        let pooled = match &served.bags {
            Some(bags) => self.accelerator.pool(&self.weights, pooled, bags)?,
            None => self.accelerator.empty(&[0, self.weights.dim], Kind::Float)?,
        };
        Ok([pooled, self.accelerator.gather(&self.weights, sequences)?])
    }

    /// Returns the gradient of every element of pooled rows, `[elements, D]`, given the gradient of the rows,
    /// `[bags, D]`.
    pub(crate) fn unpooled(&self, batch: &Staged, gradient: Option<&Tensor>) -> Result<Tensor> {
        match (&batch.bags, gradient) {
            (Some(bags), Some(gradient)) => self.accelerator.unpool(gradient, bags, batch.pooled_elements),
            _ => self.accelerator.empty(&[0, self.weights.dim], Kind::Float),
        }
    }

    /// Returns the rows that other ranks looked up, and their gradients, given the gradients of the results of
    /// [`serve`](Self::serve).
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

    /// Updates every row that was looked up, once. `rows` contains the table row of every element; `gradients[0]`
    /// contains the gradients of the first elements, `gradients[1]` those of the rest. If `marked`,
    /// [`take_touched`](Self::take_touched) will return the updated rows.
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

/// Concatenates matrices of `width` columns vertically. A single matrix is not copied.
pub(crate) fn concatenated(accelerator: &Accelerator, parts: &[Tensor], width: i64) -> Result<Tensor> {
    match parts {
        [] => accelerator.empty(&[0, width], Kind::Float),
        [only] => Ok(only.shallow_clone()),
        parts => Ok(Tensor::cat(parts, 0)),
    }
}
