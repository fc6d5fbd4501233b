//! Narrow tables that several queries share. They are computed once, and stored in temporary files in the engine's
//! spill folder.
//!
//! The declared steps read keys and times many times (for duplicates, events, attributes, windows, sessions). The logs
//! may be remote, compressed or text files, so their narrow columns are read only once. All queries also see the same
//! rows.

use std::sync::Arc;

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::{Int64Type, SchemaRef};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::common::runtime::JoinSet;
use datafusion::datasource::empty::EmptyTable;
use datafusion::error::DataFusionError;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::spill_file::{SpillFile, SpillWriter};
use datafusion::physical_plan::ExecutionPlanProperties;
use datafusion::prelude::{ParquetReadOptions, SessionContext};
use futures::StreamExt;
use onefold_sql::Query as _;
use parquet::arrow::ArrowWriter;

use crate::error::Result;
use crate::remote::{OnCluster, ROW_GROUP_BYTES, WrittenRows, cluster_of, properties, unwritten, write_rows};

/// The spooled tables of one plan. Their files are deleted when this is dropped.
#[derive(Default)]
pub(crate) struct Spool {
    files: Vec<Arc<dyn SpillFile>>,
    /// The rows that a cluster has written.
    on_cluster: Vec<WrittenRows>,
}

impl Spool {
    /// Runs `sql`, and registers its rows as the table `name`. A task per partition of the result writes a file, so the
    /// table has no order.
    pub(crate) async fn table(&mut self, context: &SessionContext, name: &str, sql: &str) -> Result<()> {
        tracing::debug!("{name}: {sql}");
        let rows = context.query(sql).await?;
        let schema = Arc::new(rows.schema().as_arrow().clone());
        let plan = rows.create_physical_plan().await?;
        if let Some(cluster) = cluster_of(&context.copied_config()) {
            let written = write_rows(&cluster, context, name, OnCluster::inner(plan)).await?;
            let locations = written.locations();
            self.on_cluster.push(written);
            if !locations.is_empty() {
                return read(context, name, locations).await;
            }
            context.register_table(name, Arc::new(EmptyTable::new(schema)))?;
            return Ok(());
        }
        let task = context.task_ctx();
        let parts = plan.output_partitioning().partition_count();
        let (mut paths, mut writers) = (Vec::with_capacity(parts), JoinSet::new());
        for part in 0..parts {
            let written = SpooledRows::new(context, name, Arc::clone(&schema), ROW_GROUP_BYTES / parts)?;
            paths.push(self.hold(&written)?);
            writers.spawn(written.write_all(plan.execute(part, Arc::clone(&task))?));
        }
        while let Some(written) = writers.join_next().await {
            written.unwrap_or_else(|error| match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(DataFusionError::ExecutionJoin(Box::new(error)).into()),
            })?;
        }
        read(context, name, paths).await
    }

    /// Makes the rows that were written in this process the table `name`.
    pub(crate) async fn add(
        &mut self,
        context: &SessionContext,
        name: &str,
        rows: SpooledRows,
    ) -> Result<()> {
        let path = self.hold(&rows)?;
        rows.finish()?;
        read(context, name, vec![path]).await
    }

    /// Keeps the file of some rows, and returns its path.
    fn hold(&mut self, rows: &SpooledRows) -> Result<String> {
        self.files.push(Arc::clone(&rows.file));
        let path = rows.file.path().map(|path| path.to_string_lossy().into_owned());
        Ok(path.ok_or_else(|| DataFusionError::Internal("temporary files are not local".to_owned()))?)
    }
}

/// Rows that are written to a temporary file batch by batch, to become a [table](Spool::add).
pub(crate) struct SpooledRows {
    file: Arc<dyn SpillFile>,
    writer: ArrowWriter<Box<dyn SpillWriter>>,
    /// The approximate number of bytes of a row group.
    row_group_bytes: usize,
}

impl SpooledRows {
    /// Creates an empty file for a table that will be called `name`, with row groups of about `row_group_bytes` bytes.
    pub(crate) fn new(
        context: &SessionContext,
        name: &str,
        schema: SchemaRef,
        row_group_bytes: usize,
    ) -> Result<Self> {
        let file = context.runtime_env().disk_manager.create_tmp_file(name)?;
        let writer =
            ArrowWriter::try_new(file.open_writer()?, schema, Some(properties())).map_err(unwritten)?;
        Ok(Self { file, writer, row_group_bytes })
    }

    /// Adds rows.
    pub(crate) fn write(&mut self, rows: &RecordBatch) -> Result<()> {
        self.writer.write(rows).map_err(unwritten)?;
        if self.writer.memory_size() >= self.row_group_bytes {
            self.writer.flush().map_err(unwritten)?;
        }
        Ok(())
    }

    async fn write_all(mut self, mut rows: SendableRecordBatchStream) -> Result<()> {
        while let Some(batch) = rows.next().await {
            self.write(&batch?)?;
        }
        self.finish()
    }

    fn finish(self) -> Result<()> {
        self.writer.into_inner().map_err(unwritten)?.finish()?;
        Ok(())
    }
}

/// Registers the rows of files as the table `name`.
async fn read(context: &SessionContext, name: &str, paths: Vec<String>) -> Result<()> {
    let options = ParquetReadOptions { file_extension: "", ..ParquetReadOptions::default() };
    let table = context.read_parquet(paths, options).await?;
    context.register_table(name, table.into_view())?;
    Ok(())
}

/// Returns the numbers in the only row of the result of `sql`. Nulls, such as sums over no rows, become 0.
pub(crate) async fn counts(context: &SessionContext, sql: &str) -> Result<Vec<u64>> {
    let mut counts = Vec::new();
    for batch in context.query(sql).await?.collect().await? {
        for column in batch.columns() {
            let column = column.as_primitive::<Int64Type>();
            counts.extend(column.iter().map(|count| u64::try_from(count.unwrap_or(0)).unwrap_or(0)));
        }
    }
    Ok(counts)
}

/// Returns the first row of the result of `sql` as `column = value` pairs, for a message; empty if there are no rows.
pub(crate) async fn example(context: &SessionContext, sql: &str) -> Result<String> {
    for batch in context.query(sql).await?.collect().await? {
        if batch.num_rows() == 0 {
            continue;
        }
        let options = FormatOptions::default().with_null("null");
        let mut pairs = Vec::new();
        for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
            let text = ArrayFormatter::try_new(column, &options).map_err(DataFusionError::from)?;
            // A calendar does not have all times.
            let text = text.value(0).try_to_string().unwrap_or_else(|_| "no date".to_owned());
            pairs.push(format!("{} = {text}", field.name()));
        }
        return Ok(pairs.join(", "));
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_time_without_a_date_is_an_example_too() {
        let sql = "SELECT 7 AS n, arrow_cast(9000000000000000000, 'Timestamp(Microsecond, None)') AS t";
        let shown = example(&SessionContext::new(), sql).await.unwrap();
        assert_eq!(shown, "n = 7, t = no date");
    }
}
