//! Computes the partition of a session.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use datafusion::arrow::compute::partition;
use datafusion::arrow::datatypes::{DataType, Int64Type};
use datafusion::arrow::temporal_conversions::timestamp_us_to_datetime;
use onefold_datasets::PartitionKey;
use serde::{Deserialize, Serialize};

use super::columns::{cast, column, required};
use crate::config::{Config, PartitionBy};
use crate::error::{Error, Result, arrow_bug};
use crate::problems::Problems;
use crate::sessionize::{START, period_micros};

/// The rules that divide sessions into partitions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Partitions {
    /// The partition columns of the samples.
    columns: Vec<String>,
    /// The period, day or hour, whose start names the partition, if partitions are divided by session start.
    by: Option<PartitionBy>,
}

impl Partitions {
    pub(crate) fn of(config: &Config) -> Self {
        Self { columns: config.partition_columns.clone(), by: config.partition_by }
    }

    /// Returns the ranges of rows of a sorted batch that each belong to one partition.
    pub(super) fn runs(&self, records: &RecordBatch) -> Result<Vec<std::ops::Range<usize>>> {
        Ok(partition(&self.columns(records)?).map_err(arrow_bug)?.ranges())
    }

    /// Returns the columns of a sorted batch that identify partitions: the start of the day or hour, then the
    /// columns of the configuration.
    pub(super) fn columns(&self, records: &RecordBatch) -> Result<Vec<ArrayRef>> {
        let starts = column(records, START)?.as_primitive::<Int64Type>().values();
        let periods = starts.iter().map(|start| self.by.map_or(0, |by| start_of_period(*start, by)));
        let mut columns: Vec<ArrayRef> = vec![Arc::new(Int64Array::from_iter_values(periods))];
        for name in &self.columns {
            columns.push(Arc::clone(column(records, name)?));
        }
        Ok(columns)
    }

    /// Returns the partition of a row.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a partition column is null in the row, or the session's start is not a date.
    pub(crate) fn key(&self, records: &RecordBatch, row: usize) -> Result<PartitionKey> {
        let mut key = Vec::new();
        for name in &self.columns {
            let value = records.slice(row, 1);
            let text = cast(name, required(&value, name, name, &Problems::default())?, &DataType::Utf8)?;
            key.push((name.clone(), text.as_string::<i32>().value(0).to_owned()));
        }
        if let Some(by) = self.by {
            let start = column(records, START)?.as_primitive::<Int64Type>().value(row);
            key.extend(date_and_hour(start, by)?);
        }
        Ok(PartitionKey::new(key))
    }

    /// Returns the partition of a session that starts at `micros` and has the other partition columns of `key`.
    /// `None` if partitions are not divided by time, or the time is not a date.
    pub(crate) fn at(&self, key: &PartitionKey, micros: i64) -> Option<PartitionKey> {
        let made = date_and_hour(micros, self.by?).ok()?;
        let mut columns = key.columns()[..self.columns.len()].to_vec();
        columns.extend(made);
        Some(PartitionKey::new(columns))
    }
}

/// Returns the start of the day or hour that contains `micros`, in microseconds.
fn start_of_period(micros: i64, by: PartitionBy) -> i64 {
    micros.div_euclid(period_micros(by)) * period_micros(by)
}

/// Returns the `date` (and `hour`) columns of the partition of a session that starts at `micros`.
fn date_and_hour(micros: i64, by: PartitionBy) -> Result<Vec<(String, String)>> {
    let time = timestamp_us_to_datetime(start_of_period(micros, by)).ok_or_else(|| {
        let message = format!("the time {micros} (microseconds since 1970) is not a date");
        Error::column("time", message, "check the unit of the time column")
    })?;
    let mut columns = vec![("date".to_owned(), time.format("%Y-%m-%d").to_string())];
    if by == PartitionBy::Hour {
        columns.push(("hour".to_owned(), time.format("%H").to_string()));
    }
    Ok(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_named_by_the_session_start() {
        let key = |micros, by| PartitionKey::new(date_and_hour(micros, by).unwrap()).to_string();
        assert_eq!(key(0, PartitionBy::Hour), "date=1970-01-01/hour=00");
        assert_eq!(key(-1, PartitionBy::Hour), "date=1969-12-31/hour=23");
        assert_eq!(key(1_684_703_210_000_000, PartitionBy::Day), "date=2023-05-21");
    }
}
