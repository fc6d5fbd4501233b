//! Narrow tables that several queries share: computed once, kept in temporary files where the engine spills.
//!
//! The declared steps look at keys and times many times (for duplicates, events, attributes, windows, sessions). The
//! logs may be remote, compressed or text, so their narrow columns are read once and then come from here, and what is
//! counted is what is later joined.

use std::fmt;
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

use crate::Result;
use crate::remote::{OnCluster, ROW_GROUP_BYTES, WrittenRows, cluster_of, properties, unwritten, write_rows};

/// The spooled tables of one plan. Their files live as long as this does.
#[derive(Default)]
pub(crate) struct Spool {
    files: Vec<Arc<dyn SpillFile>>,
    /// What a cluster has written.
    on_cluster: Vec<WrittenRows>,
}

impl fmt::Debug for Spool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spool")
            .field("files", &self.files.len())
            .field("on_cluster", &self.on_cluster)
            .finish()
    }
}

impl Spool {
    /// Runs `sql` and makes its rows the table `name`. Every partition of the result is written by a task of its own into
    /// a file of its own, so the table has the rows in no order.
    ///
    /// # Errors
    ///
    /// The errors of the query; [`Error::Fault`](crate::Error::Fault) if the rows cannot be written.
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
            let file = context.runtime_env().disk_manager.create_tmp_file(name)?;
            paths.push(path_of(&*file)?);
            let rows = plan.execute(part, Arc::clone(&task))?;
            writers.spawn(write(rows, Arc::clone(&schema), Arc::clone(&file), ROW_GROUP_BYTES / parts));
            self.files.push(file);
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
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the rows cannot be written.
    pub(crate) async fn add(
        &mut self,
        context: &SessionContext,
        name: &str,
        SpooledRows { file, writer }: SpooledRows,
    ) -> Result<()> {
        writer.into_inner().map_err(unwritten)?.finish()?;
        let path = path_of(&*file)?;
        self.files.push(file);
        read(context, name, vec![path]).await
    }
}

/// Rows that are written to a temporary file batch by batch, to become a [table](Spool::add).
pub(crate) struct SpooledRows {
    file: Arc<dyn SpillFile>,
    writer: ArrowWriter<Box<dyn SpillWriter>>,
}

impl SpooledRows {
    /// No rows yet, of a table that will be called `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if there can be no such file.
    pub(crate) fn new(context: &SessionContext, name: &str, schema: SchemaRef) -> Result<Self> {
        let file = context.runtime_env().disk_manager.create_tmp_file(name)?;
        let writer =
            ArrowWriter::try_new(file.open_writer()?, schema, Some(properties())).map_err(unwritten)?;
        Ok(Self { file, writer })
    }

    /// Adds rows.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if they cannot be written.
    pub(crate) fn write(&mut self, rows: &RecordBatch) -> Result<()> {
        self.writer.write(rows).map_err(unwritten)?;
        if self.writer.memory_size() >= ROW_GROUP_BYTES {
            self.writer.flush().map_err(unwritten)?;
        }
        Ok(())
    }
}

/// The path of a temporary file.
fn path_of(file: &dyn SpillFile) -> Result<String> {
    let path = file.path().map(|path| path.to_string_lossy().into_owned());
    Ok(path.ok_or_else(|| DataFusionError::Internal("temporary files are not local".to_owned()))?)
}

/// Makes the rows of files the table `name`.
async fn read(context: &SessionContext, name: &str, paths: Vec<String>) -> Result<()> {
    let options = ParquetReadOptions { file_extension: "", ..ParquetReadOptions::default() };
    let table = context.read_parquet(paths, options).await?;
    context.register_table(name, table.into_view())?;
    Ok(())
}

/// Writes rows to a file, in row groups of about so many bytes.
async fn write(
    mut rows: SendableRecordBatchStream,
    schema: SchemaRef,
    file: Arc<dyn SpillFile>,
    row_group_bytes: usize,
) -> Result<()> {
    let mut writer =
        ArrowWriter::try_new(file.open_writer()?, schema, Some(properties())).map_err(unwritten)?;
    while let Some(batch) = rows.next().await {
        writer.write(&batch?).map_err(unwritten)?;
        if writer.memory_size() >= row_group_bytes {
            writer.flush().map_err(unwritten)?;
        }
    }
    writer.into_inner().map_err(unwritten)?.finish()?;
    Ok(())
}

/// The numbers of the only row of `sql`; nulls, as sums over nothing give, are 0.
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

/// The first row of `sql` as `column = value` pairs, for a message; empty if there is none.
pub(crate) async fn example(context: &SessionContext, sql: &str) -> Result<String> {
    for batch in context.query(sql).await?.collect().await? {
        if batch.num_rows() == 0 {
            continue;
        }
        let options = FormatOptions::default().with_null("null");
        let mut pairs = Vec::new();
        for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
            let text = ArrayFormatter::try_new(column, &options).map_err(DataFusionError::from)?;
            pairs.push(format!("{} = {}", field.name(), text.value(0)));
        }
        return Ok(pairs.join(", "));
    }
    Ok(String::new())
}
