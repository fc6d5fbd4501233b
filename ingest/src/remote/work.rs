//! Stores rows that several queries share in files of the cluster's work folder.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema as ArrowSchema, SchemaRef};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties, PlanProperties, collect};
use datafusion::prelude::{DataFrame, ParquetReadOptions, SessionContext};
use futures::StreamExt;
use onefold_datasets::work_file_name;
use onefold_storage::{Storage, Upload};
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::{Cluster, OnCluster};
use crate::error::{Error, external};
use crate::operator::{operator_methods, plan_properties, shown_as};

/// The largest number of rows of a row group of a spooled table, and the approximate total bytes of the row groups that
/// are being written. Both are small, because these row groups are in memory.
const ROW_GROUP_ROWS: usize = 1 << 17;
pub(crate) const ROW_GROUP_BYTES: usize = 16 << 20;

static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    let column = |name, data_type| Field::new(name, data_type, false);
    Arc::new(ArrowSchema::new(vec![column("file", DataType::Utf8), column("rows", DataType::Int64)]))
});

/// The place for rows that are written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkRowsSpec {
    /// The work folder.
    pub(crate) folder: PathBuf,
    /// A name for the rows, which file names begin with.
    pub(crate) name: String,
}

/// Files in the work folder that a cluster has written. They are deleted when this is dropped.
#[derive(Debug)]
pub(crate) struct WrittenRows {
    storage: Storage,
    files: Vec<String>,
}

impl WrittenRows {
    /// Makes an empty list of files in the work folder.
    pub(crate) fn none_in(folder: &Path) -> crate::error::Result<Self> {
        Ok(Self { storage: Storage::open(folder)?, files: Vec::new() })
    }

    /// Adds a file.
    pub(crate) fn add(&mut self, file: String) {
        self.files.push(file);
    }

    /// Returns a scan of the rows of the files, in no order, to be executed on the cluster. The rows have the columns
    /// of `schema`.
    pub(crate) async fn scan(
        &self,
        context: &SessionContext,
        schema: &ArrowSchema,
    ) -> crate::error::Result<Arc<dyn ExecutionPlan>> {
        Ok(OnCluster::inner(self.rows(context, schema).await?.create_physical_plan().await?))
    }

    /// Returns the rows of the files, in no order, with the columns of `schema`.
    pub(crate) async fn rows(
        &self,
        context: &SessionContext,
        schema: &ArrowSchema,
    ) -> crate::error::Result<DataFrame> {
        let options = ParquetReadOptions { file_extension: "", ..ParquetReadOptions::default() };
        Ok(context.read_parquet(self.locations(), options.schema(schema)).await?)
    }

    /// Returns the paths or URLs of the files.
    pub(crate) fn locations(&self) -> Vec<String> {
        self.files.iter().map(|file| self.storage.shown(file).to_string_lossy().into_owned()).collect()
    }
}

impl Drop for WrittenRows {
    fn drop(&mut self) {
        // A vacuum deletes the files that cannot be deleted now.
        let _ = self.storage.delete(std::mem::take(&mut self.files));
        self.storage.remove_empty_folders(&[]);
    }
}

/// Writes the rows of `plan` to files in the work folder, one file per partition.
pub(crate) async fn write_rows(
    cluster: &Arc<dyn Cluster>,
    context: &SessionContext,
    name: &str,
    plan: Arc<dyn ExecutionPlan>,
) -> crate::error::Result<WrittenRows> {
    let folder = cluster.work_folder();
    let mut files = WrittenRows::none_in(folder)?;
    let spec = WorkRowsSpec { folder: folder.to_owned(), name: name.to_owned() };
    let written = Arc::new(WorkRowsExec::new(spec, plan));
    let on_cluster = Arc::new(OnCluster::new(Arc::clone(cluster), written));
    for batch in collect(on_cluster, context.task_ctx()).await? {
        let (paths, rows) = (batch.column(0).as_string::<i32>(), batch.column(1).as_primitive::<Int64Type>());
        let full = paths.iter().flatten().zip(rows.values()).filter(|(_, rows)| **rows > 0);
        full.for_each(|(path, _)| files.add(path.to_owned()));
    }
    Ok(files)
}

/// Writes the partitions of its input to files in the work folder, and returns a row about each file.
#[derive(Debug)]
pub(crate) struct WorkRowsExec {
    pub(crate) spec: WorkRowsSpec,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl WorkRowsExec {
    pub(crate) fn new(spec: WorkRowsSpec, input: Arc<dyn ExecutionPlan>) -> Self {
        let properties = plan_properties(&SCHEMA, input.output_partitioning().partition_count());
        Self { spec, input, properties }
    }
}

shown_as!(WorkRowsExec, |operator| ": name={}", operator.spec.name);

impl ExecutionPlan for WorkRowsExec {
    operator_methods!("WorkRowsExec", |operator| vec![&operator.input], |input| Ok(Arc::new(Self::new(
        operator.spec.clone(),
        input
    ))));

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let rows = self.input.execute(partition, context)?;
        let mut written = RecordBatchReceiverStream::builder(Arc::clone(&SCHEMA), 1);
        let (spec, output, runtime) = (self.spec.clone(), written.tx(), Handle::current());
        // The storage blocks its callers.
        written.spawn_blocking(move || {
            let row = write(&spec, rows, &runtime)?;
            // This fails only if the rows are no longer read.
            let _ = output.blocking_send(Ok(row));
            Ok(())
        });
        Ok(written.build())
    }
}

/// Writes rows to a new file with a unique name.
fn write(spec: &WorkRowsSpec, mut rows: SendableRecordBatchStream, runtime: &Handle) -> Result<RecordBatch> {
    let mut file = WorkFile::create(spec, rows.schema())?;
    while let Some(batch) = runtime.block_on(rows.next()).transpose()? {
        file.write(&batch)?;
    }
    let (file, count) = file.finish()?;
    let columns = (Arc::new(StringArray::from(vec![file])), Arc::new(Int64Array::from(vec![count])));
    Ok(RecordBatch::try_new(Arc::clone(&SCHEMA), vec![columns.0, columns.1])?)
}

/// Returns the Parquet settings of the files.
pub(crate) fn properties() -> WriterProperties {
    WriterProperties::builder().set_max_row_group_row_count(Some(ROW_GROUP_ROWS)).build()
}

/// Returns the error for rows that cannot be written.
pub(crate) fn unwritten(error: ParquetError) -> Error {
    let message = format!("a temporary file could not be written: {error}");
    match Error::from(DataFusionError::ParquetError(Box::new(error))) {
        full @ Error::Spill(_) => full,
        _ => Error::engine(message, "check the disk of the spill directory"),
    }
}

/// A file of rows in the work folder during writing. It becomes visible when it is complete.
pub(crate) struct WorkFile {
    name: String,
    writer: ArrowWriter<Upload>,
    rows: usize,
}

impl WorkFile {
    /// Creates a file with a unique name for rows of `schema`.
    pub(crate) fn create(spec: &WorkRowsSpec, schema: SchemaRef) -> Result<Self> {
        let failed = |error: onefold_storage::Error| external(error.into());
        let storage = Storage::open(&spec.folder).map_err(failed)?;
        let name = work_file_name(&spec.name);
        let upload = storage.upload(&name).map_err(failed)?;
        let writer = ArrowWriter::try_new(upload, schema, Some(properties()))
            .map_err(|error| external(unwritten(error)))?;
        Ok(Self { name, writer, rows: 0 })
    }

    /// Writes rows.
    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        self.rows += batch.num_rows();
        self.writer.write(batch).map_err(|error| external(unwritten(error)))?;
        if self.writer.memory_size() >= ROW_GROUP_BYTES {
            self.writer.flush().map_err(|error| external(unwritten(error)))?;
        }
        Ok(())
    }

    /// Completes the file, and returns its name and the number of its rows. A file without rows is not created.
    pub(crate) fn finish(self) -> Result<(String, i64)> {
        let upload = self.writer.into_inner().map_err(|error| external(unwritten(error)))?;
        if self.rows > 0 {
            upload.finish().map_err(|error| external(error.into()))?;
        }
        let rows = i64::try_from(self.rows).map_err(|error| DataFusionError::External(error.into()))?;
        Ok((self.name, rows))
    }
}
