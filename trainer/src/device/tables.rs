//! All tables of a model in a device's memory.

use std::cell::RefCell;
use std::sync::Arc;

use onefold_ikjt::Batch;
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use tch::{Kind, Tensor};

use super::stage::Stage;
use super::update::Update;
use super::weights::Weights;
use super::{Accelerator, Staged, failed};
use crate::Result;

/// Batches that are staged ahead of the one that is computed.
const AHEAD: usize = 2;

/// The tables and their optimizer's state.
#[derive(Debug)]
pub(crate) struct DeviceTables {
    accelerator: Accelerator,
    features: Vec<FeatureConfig>,
    configs: Vec<TableConfig>,
    weights: Weights,
    /// `[R, state width]`, R being the rows of all tables.
    state: Tensor,
    /// A byte for every row: whether it was updated since that was last asked.
    marks: Tensor,
    /// By feature: where its table's rows begin.
    first_rows: Vec<i64>,
    stage: Stage,
    /// Batches that were staged ahead, the next one first.
    ahead: RefCell<Vec<Staged>>,
}

/// What was looked up for a batch.
#[derive(Debug)]
pub(crate) struct LookedUp {
    /// The row of every element.
    rows: Tensor,
    /// `[bags, D]`.
    pub(crate) pooled: Option<Tensor>,
    /// The vectors of every sequence's elements, `[T, D]`.
    pub(crate) sequences: Option<Tensor>,
}

impl DeviceTables {
    /// Memory for the tables of these features, with weights and state of zero; `threads` put batches together.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device lacks the memory, or the tables differ in their dimension or have
    /// 2^31 rows.
    pub(crate) fn new(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        state_width: usize,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let (configs, table_of) = tables_of(features);
        let device = accelerator.torch();
        let dim = configs.first().map_or(1, |config| config.dim);
        if let Some(other) = configs.iter().find(|config| config.dim != dim) {
            let message = format!("`{}` has dimension {}, other tables {dim}", other.name, other.dim);
            return Err(failed(
                device,
                message,
                "give all tables one `dim`, or train with the option `device = cpu`",
            ));
        }
        let sizes: Vec<_> = configs.iter().map(|config| (config.rows as i64, config.dtype)).collect();
        let weights = Weights::zeros(accelerator, &sizes, dim as i64)?;
        Ok(Self {
            state: accelerator.zeros(&[weights.rows(), state_width as i64], Kind::Float)?,
            marks: accelerator.zeros(&[weights.rows()], Kind::Uint8)?,
            first_rows: table_of.into_iter().map(|table| weights.rows_of(table).start).collect(),
            weights,
            stage: Stage::new(accelerator, threads),
            accelerator: accelerator.clone(),
            features: features.to_vec(),
            configs,
            ahead: RefCell::new(Vec::new()),
        })
    }

    /// The device.
    pub(crate) fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// The tables' configurations.
    pub(crate) fn configs(&self) -> &[TableConfig] {
        &self.configs
    }

    /// A table's weights, `[rows, D]` of its type, and state, `[rows, width]`, which share the memory of all tables.
    pub(crate) fn table(&self, table: usize) -> [Tensor; 2] {
        let rows = self.weights.rows_of(table);
        [self.weights.table(table), self.state.narrow(0, rows.start, rows.end - rows.start)]
    }

    /// The rows of each table that were updated since the last call, ascending.
    pub(crate) fn take_touched(&self) -> Vec<Vec<u32>> {
        let touched = |(table, config): (usize, &TableConfig)| {
            let marks = self.marks.narrow(0, self.weights.rows_of(table).start, config.rows as i64);
            let rows = Vec::<i64>::try_from(marks.nonzero().view(-1)).unwrap_or_default();
            rows.into_iter().map(|row| row as u32).collect()
        };
        let touched = self.configs.iter().enumerate().map(touched).collect();
        // Another handle of the same memory.
        let _ = self.marks.shallow_clone().zero_();
        touched
    }

    /// Begins to copy a batch that will be looked up later.
    ///
    /// # Errors
    ///
    /// As [`staged`](Self::staged).
    pub(crate) fn stage_ahead(&self, batch: &Batch) -> Result<()> {
        if self.ahead.borrow().len() < AHEAD {
            let staged = self.stage.stage(batch, &self.features, &self.first_rows)?;
            self.ahead.borrow_mut().push(staged);
        }
        Ok(())
    }

    /// A batch on the device: it was staged ahead, or is now.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for, [`Error::Device`](crate::Error::Device) if
    /// memory cannot be had.
    pub(crate) fn staged(&self, batch: &Batch) -> Result<Staged> {
        let position = self.ahead.borrow().iter().position(|staged| staged.is(batch));
        let mut staged = match position {
            // Those before it were not asked for, and will not be.
            Some(position) => self.ahead.borrow_mut().drain(..=position).next_back(),
            None => None,
        };
        if staged.is_none() {
            staged = Some(self.stage.stage(batch, &self.features, &self.first_rows)?);
        }
        let mut staged = staged.expect("it was staged just now");
        staged.arrive()?;
        Ok(staged)
    }

    /// Looks up and pools.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if memory cannot be had or a kernel not be launched.
    pub(crate) fn look_up(&self, batch: &Staged) -> Result<LookedUp> {
        let rows = self.accelerator.table_rows(&batch.ids, &batch.starts, &batch.tables)?;
        let pooled = batch.bags.as_ref().map(|bags| self.accelerator.pool(&self.weights, &rows, bags));
        let sequences = (!batch.sequences.is_empty()).then(|| {
            let count = rows.numel() as i64 - batch.pooled_elements;
            self.accelerator.gather(&self.weights, &rows.narrow(0, batch.pooled_elements, count))
        });
        Ok(LookedUp { pooled: pooled.transpose()?, sequences: sequences.transpose()?, rows })
    }

    /// Updates every row that was looked up, once, with the gradients of what [`look_up`](Self::look_up) gave. `marked` rows are
    /// found by [`take_touched`](Self::take_touched).
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if memory cannot be had or a kernel not be launched.
    pub(crate) fn update(
        &mut self,
        batch: &Staged,
        looked_up: &LookedUp,
        [pooled, sequences]: [Option<&Tensor>; 2],
        update: &Update,
        marked: bool,
    ) -> Result<()> {
        let (accelerator, dim) = (&self.accelerator, self.weights.dim());
        let none = accelerator.empty(&[0, dim], Kind::Float)?;
        let unpooled = match (&batch.bags, pooled) {
            (Some(bags), Some(gradient)) => accelerator.unpool(gradient, bags, batch.pooled_elements)?,
            _ => none.shallow_clone(),
        };
        let places = Accelerator::places(&looked_up.rows);
        let gradients = [&unpooled, sequences.unwrap_or(&none)];
        let marks = marked.then_some(&self.marks);
        accelerator.update(&places, gradients, update, &self.weights, &self.state, marks)
    }
}
