//! Writes the computed columns of the logs' samples to a temporary file.

use std::ops::RangeInclusive;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{
    DataType, Field, Int64Type, Schema as ArrowSchema, SchemaRef, TimestampMicrosecondType,
};
use datafusion::prelude::SessionContext;
use onefold_datasets::{SAMPLE_KEY_COLUMN, SESSION_COLUMN, TIME_COLUMN};

use super::plan::Plan;
use super::sql::{COMPUTED, HIGH, LOW_BITS, computed_column};
use crate::config::Config;
use crate::error::{Result, arrow_bug, bug};
use crate::remote::ROW_GROUP_BYTES;
use crate::sessionize::{EVENT_TIME, KEY, TIME};
use crate::spool::SpooledRows;

/// Writes the computed columns of the samples of a clustering.
pub(super) struct Computing {
    /// The columns that are written after the key, the time and the high bits of the session's id.
    columns: Vec<String>,
    /// The range of times of the samples that get columns. Batches without such a time are not written.
    times: RangeInclusive<i64>,
    schema: SchemaRef,
    rows: SpooledRows,
    samples: u64,
}

/// Returns the type that a column of the samples has in data files.
pub(super) fn column_type(config: &Config, name: &str) -> DataType {
    let is_list = config.schema.sparse_features().any(|feature| feature.name == name);
    match is_list {
        true => DataType::List(Arc::new(Field::new("element", DataType::Int64, false))),
        false => DataType::Float32,
    }
}

impl Computing {
    /// Creates the empty temporary file. `config` is the configuration reduced to the columns of the plan.
    pub(super) fn new(context: &SessionContext, config: &Config, plan: &Plan<'_>) -> Result<Self> {
        let integer = |name: &str| Field::new(name, DataType::Int64, false);
        let mut fields: Vec<Field> = [KEY, TIME, HIGH].map(integer).into();
        let mut columns = plan.columns.clone();
        for (i, name) in columns.iter().enumerate() {
            fields.push(Field::new(computed_column(i), column_type(config, name), false));
        }
        for kept in config.keep.iter().filter(|kept| *kept == EVENT_TIME) {
            fields.push(Field::new(kept, DataType::Int64, true));
            columns.push(kept.clone());
        }
        let schema = Arc::new(ArrowSchema::new(fields));
        let rows = SpooledRows::new(context, COMPUTED, Arc::clone(&schema), ROW_GROUP_BYTES)?;
        let (first, last) = plan.times();
        Ok(Self { columns, times: first..=last, schema, rows, samples: 0 })
    }

    /// Returns the number of all samples, and the written rows.
    pub(super) fn finish(self) -> (u64, SpooledRows) {
        (self.samples, self.rows)
    }

    /// Writes the computed columns of decoded samples.
    pub(super) fn add(&mut self, samples: &RecordBatch) -> Result<()> {
        self.samples += samples.num_rows() as u64;
        let times = column(samples, TIME_COLUMN)?.as_primitive::<TimestampMicrosecondType>().values();
        if !times.iter().any(|time| self.times.contains(time)) {
            return Ok(());
        }
        let sessions = column(samples, SESSION_COLUMN)?.as_primitive::<Int64Type>().values();
        let high = Int64Array::from_iter_values(sessions.iter().map(|session| session >> LOW_BITS));
        let mut columns: Vec<ArrayRef> = vec![
            Arc::clone(column(samples, SAMPLE_KEY_COLUMN)?),
            Arc::new(Int64Array::new(times.clone(), None)),
            Arc::new(high),
        ];
        for (name, field) in self.columns.iter().zip(self.schema.fields().iter().skip(3)) {
            columns.push(cast(column(samples, name)?, field.data_type()).map_err(arrow_bug)?);
        }
        let rows = RecordBatch::try_new(Arc::clone(&self.schema), columns).map_err(arrow_bug)?;
        self.rows.write(&rows)
    }
}

fn column<'s>(samples: &'s RecordBatch, name: &str) -> Result<&'s ArrayRef> {
    samples.column_by_name(name).ok_or_else(|| bug(&format!("samples were decoded without `{name}`")))
}
