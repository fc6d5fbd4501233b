//! Counts the CSV rows that other machines leave out.
//!
//! A reader counts the rows of a file that it leaves out, but files are read several times, and tasks are retried.
//! So a separate job reads the files that other machines have read once more, and returns the counts as rows.

use std::sync::{Arc, LazyLock};

use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema as ArrowSchema, SchemaRef};
use datafusion::datasource::TableProvider;
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties, collect};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use object_store::path::Path;

use super::Source;
use super::naming::NamingSource;
use super::text_store::SkippedRows;
use crate::operator::{operator_methods, plan_properties, shown_as};
use crate::remote::{OnCluster, cluster_of};

static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    let column = |name, data_type| Field::new(name, data_type, false);
    Arc::new(ArrowSchema::new(vec![column("file", DataType::Utf8), column("rows", DataType::Int64)]))
});

/// Counts the rows that the machines of a cluster have left out of the files of `sources`. Does nothing if
/// `context` has no cluster. Call it after all plans that read the sources have run.
///
/// # Errors
///
/// The errors of reading the files.
pub(crate) async fn count_skipped(context: &SessionContext, sources: &[Source]) -> crate::Result<()> {
    let Some(cluster) = cluster_of(&context.copied_config()) else { return Ok(()) };
    for source in sources {
        let read = source.skipped.read_elsewhere();
        let files = source.files.iter().filter(|file| read.contains(&file.found.meta.location));
        for table in source.tables(files) {
            let scan = table.scan(&context.state(), Some(&Vec::new()), &[], None).await?;
            let counted =
                Arc::new(OnCluster::new(Arc::clone(&cluster), Arc::new(SkippedRowsExec::new(scan))));
            for batch in collect(counted, context.task_ctx()).await? {
                let (files, rows) =
                    (batch.column(0).as_string::<i32>(), batch.column(1).as_primitive::<Int64Type>());
                for (file, rows) in files.iter().flatten().zip(rows.values()) {
                    let file = Path::parse(file).map_err(|error| DataFusionError::External(error.into()))?;
                    source.skipped.set(&file, rows.unsigned_abs());
                }
            }
        }
    }
    Ok(())
}

/// Reads the files of a scan and returns the number of rows left out for each file.
#[derive(Debug)]
pub(crate) struct SkippedRowsExec {
    scan: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl SkippedRowsExec {
    /// Creates an operator that counts rows of the files of `scan`.
    pub(crate) fn new(scan: Arc<dyn ExecutionPlan>) -> Self {
        let properties = plan_properties(&SCHEMA, scan.output_partitioning().partition_count());
        Self { scan, properties }
    }
}

/// Returns the counts of rows that a scan leaves out; `None` if it is not a scan of CSV files.
fn skipped_of(scan: &Arc<dyn ExecutionPlan>) -> Option<Arc<SkippedRows>> {
    let (_, naming) = scan.downcast_ref::<DataSourceExec>()?.downcast_to_file_source::<NamingSource>()?;
    let (_, skipped) = naming.text.as_ref()?.csv.as_ref()?;
    Some(Arc::clone(skipped))
}

/// Returns a row for each file.
fn counts(skipped: &SkippedRows) -> Result<RecordBatch> {
    let files = skipped.by_file();
    let names = StringArray::from_iter_values(files.keys().map(Path::as_ref));
    let rows = Int64Array::from_iter_values(files.values().map(|rows| *rows as i64));
    Ok(RecordBatch::try_new(Arc::clone(&SCHEMA), vec![Arc::new(names), Arc::new(rows)])?)
}

shown_as!(SkippedRowsExec, |_operator| "");

impl ExecutionPlan for SkippedRowsExec {
    operator_methods!("SkippedRowsExec", |operator| vec![&operator.scan], |scan| Ok(Arc::new(Self::new(
        scan
    ))));

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(skipped) = skipped_of(&self.scan) else {
            return datafusion::common::internal_err!("rows of files that are not CSV are to be counted");
        };
        let mut rows = self.scan.execute(partition, context)?;
        let counted = futures::stream::once(async move {
            while rows.next().await.transpose()?.is_some() {}
            // Other partitions may still be reading, so a file can have several rows: the largest is the count of
            // the whole file.
            counts(&skipped)
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&SCHEMA), counted)))
    }
}
