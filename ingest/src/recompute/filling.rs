//! Divides the computed columns, which are sorted in the dataset's order, into the dataset's row groups.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{Field, Int64Type, Schema as ArrowSchema};
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use onefold_datasets::missing_column;

use super::Task;
use super::changes::LabelChanges;
use super::computing::column_type;
use super::sql::computed_column;
use crate::cluster::SEQUENCE;
use crate::config::Config;
use crate::error::{Error, Result, arrow_bug, bug};

/// Divides sorted rows into row groups.
pub(super) struct Filling {
    task: Task,
    /// The columns that are written to row groups.
    fields: Vec<Field>,
    /// The names of the columns. The first `labels` of them are labels.
    columns: Vec<String>,
    labels: usize,
    rows: SendableRecordBatchStream,
    /// The rows of the last batch that are not used yet.
    rest: Option<RecordBatch>,
    /// The index of the next sample among all samples that get columns.
    next: i64,
    pub(super) changes: LabelChanges,
}

impl Filling {
    /// Starts to divide `rows`. `config` is the configuration reduced to `columns`.
    pub(super) fn new(
        task: Task,
        config: &Config,
        columns: &[String],
        rows: SendableRecordBatchStream,
    ) -> Self {
        let field = |name: &String| Field::new(name, column_type(config, name), false);
        Self {
            task,
            fields: columns.iter().map(field).collect(),
            columns: columns.to_vec(),
            labels: config.schema.labels.len(),
            rows,
            rest: None,
            next: 0,
            changes: if task == Task::Labels { LabelChanges::of(columns) } else { LabelChanges::default() },
        }
    }

    /// Returns the columns of the next row group, which has `samples` samples, and whether they differ from the columns
    /// in the dataset.
    ///
    /// # Errors
    ///
    /// The errors of the engine, and [`Error::Fault`] if several samples of the logs match one sample of the dataset.
    pub(super) async fn row_group(&mut self, samples: u64) -> Result<(Vec<RecordBatch>, bool)> {
        let end = self.next.saturating_add(i64::try_from(samples).unwrap_or(i64::MAX));
        let (mut filled, mut differs) = (Vec::new(), self.task == Task::Features);
        while self.next < end {
            let Some(rows) = self.next_rows().await? else {
                filled.push(self.missing(end)?);
                break;
            };
            let first = sequence(&rows)?.first().copied().unwrap_or(end);
            if first > self.next {
                filled.push(self.missing(first.min(end))?);
                self.rest = Some(rows);
                continue;
            }
            let follows = sequence(&rows)?.iter().zip(self.next..end);
            let run = follows.take_while(|(found, expected)| *found == expected).count();
            if run == 0 {
                return Err(several());
            }
            let taken = rows.slice(0, run);
            if self.task == Task::Labels {
                differs |= self.changes.count(&taken, &self.columns, self.labels);
            }
            filled.push(self.columns_of(&taken)?);
            self.next += run as i64;
            self.rest = (run < rows.num_rows()).then(|| rows.slice(run, rows.num_rows() - run));
        }
        Ok((filled, differs))
    }

    /// Checks that no rows are left.
    pub(super) async fn end(&mut self) -> Result<()> {
        match self.next_rows().await? {
            None => Ok(()),
            Some(_) => Err(several()),
        }
    }

    /// Returns the next batch that has rows.
    async fn next_rows(&mut self) -> Result<Option<RecordBatch>> {
        if let Some(rest) = self.rest.take() {
            return Ok(Some(rest));
        }
        while let Some(rows) = self.rows.next().await.transpose()? {
            if rows.num_rows() > 0 {
                return Ok(Some(rows));
            }
        }
        Ok(None)
    }

    /// Returns missing values for the samples before index `end`, which the logs do not have.
    fn missing(&mut self, end: i64) -> Result<RecordBatch> {
        if self.task == Task::Labels {
            return Err(bug("a sample of the dataset has no labels"));
        }
        let rows = usize::try_from(end - self.next).unwrap_or(0);
        self.next = end;
        self.batch(|_, field| Ok(missing_column(field, rows)))
    }

    /// Returns the computed columns of rows under their names in the dataset.
    fn columns_of(&self, rows: &RecordBatch) -> Result<RecordBatch> {
        self.batch(|number, field| {
            let column = rows.column_by_name(&computed_column(number));
            let column = column.ok_or_else(|| bug("a column was not computed"))?;
            cast(column, field.data_type()).map_err(arrow_bug)
        })
    }

    fn batch(&self, column: impl Fn(usize, &Field) -> Result<ArrayRef>) -> Result<RecordBatch> {
        let columns = self.fields.iter().enumerate().map(|(number, field)| column(number, field));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let schema = Arc::new(ArrowSchema::new(self.fields.clone()));
        RecordBatch::try_new(schema, columns).map_err(arrow_bug)
    }
}

/// Returns the sample indexes of rows.
fn sequence(rows: &RecordBatch) -> Result<&[i64]> {
    let places = rows.column_by_name(SEQUENCE).and_then(|places| places.as_primitive_opt::<Int64Type>());
    Ok(&places.ok_or_else(|| bug("rows have no places"))?.values()[..])
}

fn several() -> Error {
    Error::data(
        "`[samples].key`",
        "several samples of the logs have the key and the time of one of the dataset",
        "make `[samples].key` name all that identifies a sample",
    )
}
