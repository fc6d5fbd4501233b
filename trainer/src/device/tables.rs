//! All tables of a model in a device's memory, one array of their rows after each other.

use std::cell::RefCell;
use std::sync::Arc;

use onefold_ikjt::Batch;
use onefold_sharding::{DataType, Pooling, TableConfig};
use tch::{Kind, Tensor};

use super::stage::Stage;
use super::{Accelerator, Staged, failed};
use crate::Result;
use crate::kernels::update::Rule;

/// Batches that are staged ahead of the one that is computed.
const AHEAD: usize = 2;

/// The tables and their optimizer's state.
#[derive(Debug)]
pub(crate) struct DeviceTables {
    accelerator: Accelerator,
    configs: Vec<TableConfig>,
    /// `[R, D]`, R being the rows of all tables.
    weights: Tensor,
    /// `[R, state width]`.
    state: Tensor,
    /// A byte for every row: whether it was updated since that was last asked.
    marks: Tensor,
    /// Where each table's rows begin.
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
    /// Memory for these tables, with weights and state of zero; `threads` put batches together.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the device lacks the memory, the tables differ in their dimension, or
    /// one pools in another way.
    pub(crate) fn new(
        accelerator: &Accelerator,
        configs: &[TableConfig],
        state_width: usize,
        threads: Arc<rayon::ThreadPool>,
    ) -> Result<Self> {
        let device = accelerator.torch();
        let dim = configs.first().map_or(1, |config| config.dim);
        if let Some(other) = configs.iter().find(|config| config.dim != dim) {
            let message = format!("`{}` has dimension {}, other tables {dim}", other.feature, other.dim);
            return Err(failed(device, message, "give all tables one `dim`, or train with `--device cpu`"));
        }
        let unknown = |config: &&TableConfig| {
            !matches!(config.pooling, Pooling::Sum | Pooling::Mean | Pooling::Attention)
        };
        if let Some(other) = configs.iter().find(unknown) {
            let message =
                format!("`{}` pools by `{:?}`, which runs on the CPU only", other.feature, other.pooling);
            let hint = "pool by `sum`, `mean` or `attention` under `[tables]`, or train with `--device cpu`";
            return Err(failed(device, message, hint));
        }
        if let Some(other) = configs.iter().find(|config| config.dtype != DataType::Fp32) {
            let message =
                format!("`{}` is stored as {:?}, which is for the CPU only", other.feature, other.dtype);
            return Err(failed(device, message, "set `dtype = \"fp32\"`, or train with `--device cpu`"));
        }
        let mut first_rows = Vec::with_capacity(configs.len());
        let mut rows = 0_i64;
        for config in configs {
            first_rows.push(rows);
            rows += config.rows as i64;
        }
        if i32::try_from(rows).is_err() {
            let message = format!("the tables have {rows} rows, more than 2^31");
            return Err(failed(device, message, "give the tables fewer rows, or train with `--device cpu`"));
        }
        Ok(Self {
            weights: accelerator.zeros(&[rows, dim as i64], Kind::Float)?,
            state: accelerator.zeros(&[rows, state_width as i64], Kind::Float)?,
            marks: accelerator.zeros(&[rows], Kind::Uint8)?,
            stage: Stage::new(accelerator, threads),
            accelerator: accelerator.clone(),
            configs: configs.to_vec(),
            first_rows,
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

    /// A table's weights, `[rows, D]`, and state, `[rows, width]`, which share the memory of all tables.
    pub(crate) fn table(&self, table: usize) -> [Tensor; 2] {
        let (first, rows) = (self.first_rows[table], self.configs[table].rows as i64);
        [&self.weights, &self.state].map(|tensor| tensor.narrow(0, first, rows))
    }

    /// The rows of each table that were updated since the last call, ascending.
    pub(crate) fn take_touched(&mut self) -> Vec<Vec<u32>> {
        let touched = |(table, config): (usize, &TableConfig)| {
            let marks = self.marks.narrow(0, self.first_rows[table], config.rows as i64);
            let rows = Vec::<i64>::try_from(marks.nonzero().view(-1)).unwrap_or_default();
            rows.into_iter().map(|row| row as u32).collect()
        };
        let touched = self.configs.iter().enumerate().map(touched).collect();
        let _ = self.marks.zero_();
        touched
    }

    /// Begins to copy a batch that will be looked up later.
    ///
    /// # Errors
    ///
    /// As [`staged`](Self::staged).
    pub(crate) fn stage_ahead(&self, batch: &Batch) -> Result<()> {
        if self.ahead.borrow().len() < AHEAD {
            let staged = self.stage.stage(batch, &self.configs, &self.first_rows)?;
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
            staged = Some(self.stage.stage(batch, &self.configs, &self.first_rows)?);
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
        let sequences = batch.sequences.as_ref().map(|_| -> Result<Tensor> {
            let count = rows.numel() as i64 - batch.pooled_elements;
            let index = rows.narrow(0, batch.pooled_elements, count);
            let output = self.accelerator.empty(&[count, self.weights.size()[1]], Kind::Float)?;
            self.accelerator.expand(&self.weights, Some(&index), &output)?;
            Ok(output)
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
        (rule, rate): (&Rule, f32),
        marked: bool,
    ) -> Result<()> {
        let (accelerator, dim) = (&self.accelerator, self.weights.size()[1]);
        let none = accelerator.empty(&[0, dim], Kind::Float)?;
        let unpooled = match (&batch.bags, pooled) {
            (Some(bags), Some(gradient)) => accelerator.unpool(gradient, bags, batch.pooled_elements)?,
            _ => none.shallow_clone(),
        };
        let places = Accelerator::places(&looked_up.rows);
        let gradients = [&unpooled, sequences.unwrap_or(&none)];
        let marks = marked.then_some(&self.marks);
        accelerator.update(&places, gradients, (rule, rate), &self.weights, &self.state, marks)
    }
}
