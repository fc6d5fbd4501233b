//! The parts of timelines that sessions look at, read beside the records in the same order of sessions.

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::Int64Type;
use datafusion::execution::SendableRecordBatchStream;
use futures::StreamExt;
use onefold_datasets::PartitionKey;

use super::convert::column;
use super::place;
use crate::sessionize::SESSION;
use crate::timeline::POSITION;
use crate::{Config, Result};

/// What the samples of one session see of a timeline: rows in the order of their positions, column by column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Slice {
    /// Positions of the rows in the timeline, rising.
    pub(super) positions: Vec<i64>,
    /// The rows' values, once for each list that the timeline makes.
    pub(super) columns: Vec<Vec<i64>>,
}

/// The slices of one timeline, session by session.
pub(super) struct Slices {
    rows: SendableRecordBatchStream,
    /// The names of the lists that the timeline makes.
    lists: Vec<String>,
    /// The batch being read, and its runs of rows of one session that are left, the next one last.
    batch: Option<(RecordBatch, Vec<std::ops::Range<usize>>)>,
}

impl Slices {
    /// The slices in `rows`, the rows of [`sessionize::slices`](crate::sessionize::slices).
    pub(super) fn new(rows: SendableRecordBatchStream, lists: Vec<String>) -> Self {
        Self { rows, lists, batch: None }
    }

    /// The slice of a session. Sessions must be asked for in order; one that is not there needs nothing.
    pub(super) async fn of(
        &mut self,
        config: &Config,
        partition: &PartitionKey,
        session: i64,
    ) -> Result<Slice> {
        let columns = self.lists.iter().map(|_| Vec::new()).collect();
        let mut slice = Slice { positions: Vec::new(), columns };
        while self.advance(config).await? {
            let Some((batch, runs)) = &mut self.batch else { break };
            let Some(rows) = runs.last().cloned() else { break };
            let is_its = column(batch, SESSION)?.as_primitive::<Int64Type>().value(rows.start) == session
                && place::partition_key(config, batch, rows.start)? == *partition;
            if !is_its {
                break;
            }
            let values = |name: &str| -> Result<&[i64]> {
                Ok(&column(batch, name)?.as_primitive::<Int64Type>().values()[rows.clone()])
            };
            slice.positions.extend_from_slice(values(POSITION)?);
            for (ids, name) in slice.columns.iter_mut().zip(&self.lists) {
                ids.extend_from_slice(values(name)?);
            }
            runs.pop();
        }
        Ok(slice)
    }

    /// Sees to it that there is a run of rows; `false` at the end.
    async fn advance(&mut self, config: &Config) -> Result<bool> {
        while self.batch.as_ref().is_none_or(|(_, runs)| runs.is_empty()) {
            let Some(batch) = self.rows.next().await.transpose()? else { return Ok(false) };
            let mut runs = place::session_runs(config, &batch)?;
            runs.reverse();
            self.batch = Some((batch, runs));
        }
        Ok(true)
    }
}
