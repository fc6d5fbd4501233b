//! The operator that puts records aside until all samples are folded: records and totals in, rows with the totals and
//! the records' files out.
//!
//! ```text
//! records, then totals ─▶ files of the work folder
//!                     └─▶ rows: parts of totals, then the file
//! ```
//!
//! What is learned of all samples, such as vocabularies, is known before any record is written to the dataset.

use std::fmt;
use std::sync::{Arc, LazyLock};

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, RecordBatch, StringArray, UInt64Array,
};
use datafusion::arrow::compute::{filter_record_batch, not};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, UInt64Type};
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchReceiverStream;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};
use futures::StreamExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use super::columns::column;
use super::totals::totals_before;
use crate::error::external;
use crate::operator::{only, operator_methods, plan_properties};
use crate::remote::{WorkFile, WorkRowsSpec};
use crate::sessionize::TOTALS;

/// Rows that wait for whoever reads them.
const WAITING: usize = 2;

/// A row has a part of a worker's totals, or a file.
static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    Arc::new(ArrowSchema::new(vec![
        Field::new("worker", DataType::UInt64, false),
        Field::new("part", DataType::Binary, true),
        Field::new("file", DataType::Utf8, true),
    ]))
});

/// What a row says.
pub(super) enum Staged {
    /// A worker, and a part of its totals.
    Totals(u64, Vec<u8>),
    /// A file of records.
    File(String),
}

impl Staged {
    /// Rows with parts of totals.
    fn totals(parts: &[(u64, Vec<u8>)]) -> Result<RecordBatch> {
        let workers = UInt64Array::from_iter_values(parts.iter().map(|(worker, _)| *worker));
        let files = StringArray::new_null(parts.len());
        let parts = BinaryArray::from_iter_values(parts.iter().map(|(_, part)| part));
        let columns: Vec<ArrayRef> = vec![Arc::new(workers), Arc::new(parts), Arc::new(files)];
        Ok(RecordBatch::try_new(Arc::clone(&SCHEMA), columns)?)
    }

    /// The row with a file.
    fn file(name: &str) -> Result<RecordBatch> {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt64Array::from(vec![0])),
            Arc::new(BinaryArray::new_null(1)),
            Arc::new(StringArray::from(vec![name])),
        ];
        Ok(RecordBatch::try_new(Arc::clone(&SCHEMA), columns)?)
    }

    /// What the rows of a batch say.
    pub(super) fn read(rows: &RecordBatch) -> Vec<Self> {
        let workers = rows.column(0).as_primitive::<UInt64Type>();
        let (parts, files) = (rows.column(1).as_binary::<i32>(), rows.column(2).as_string::<i32>());
        let row = |row| match files.is_valid(row) {
            true => Self::File(files.value(row).to_owned()),
            false => Self::Totals(workers.value(row), parts.value(row).to_vec()),
        };
        (0..rows.num_rows()).map(row).collect()
    }
}

/// Writes the records of every partition of its input to a file of the work folder.
#[derive(Debug)]
pub(crate) struct StageExec {
    spec: WorkRowsSpec,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl StageExec {
    /// Writes the records of `input`, each partition of which has its totals behind them.
    pub(crate) fn new(spec: WorkRowsSpec, input: Arc<dyn ExecutionPlan>) -> Self {
        let properties = plan_properties(&SCHEMA, input.output_partitioning().partition_count());
        Self { spec, input, properties }
    }

    /// Where it writes.
    pub(crate) fn spec(&self) -> &WorkRowsSpec {
        &self.spec
    }
}

impl DisplayAs for StageExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StageExec: name={}", self.spec.name)
    }
}

impl ExecutionPlan for StageExec {
    operator_methods!("StageExec", |operator| vec![&operator.input]);

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(Arc::new(Self::new(self.spec.clone(), only(children)?)))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let records = self.input.execute(partition, context)?;
        let mut rows = RecordBatchReceiverStream::builder(Arc::clone(&SCHEMA), WAITING);
        let (spec, output, runtime) = (self.spec.clone(), rows.tx(), Handle::current());
        // The storage makes its callers wait.
        rows.spawn_blocking(move || stage(&spec, records, &output, &runtime));
        Ok(rows.build())
    }
}

/// Writes records to a file that no other run writes, and gives the totals behind them and the file to `output`.
fn stage(
    spec: &WorkRowsSpec,
    mut records: SendableRecordBatchStream,
    output: &Sender<Result<RecordBatch>>,
    runtime: &Handle,
) -> Result<()> {
    let mut file = WorkFile::create(spec, records.schema())?;
    while let Some(batch) = runtime.block_on(records.next()).transpose()? {
        let flags = column(&batch, TOTALS).map_err(external)?.as_boolean();
        if flags.has_true() {
            let (parts, _) = totals_before(&filter_record_batch(&batch, flags)?).map_err(external)?;
            if output.blocking_send(Staged::totals(&parts)).is_err() {
                return Ok(());
            }
        }
        let kept = filter_record_batch(&batch, &not(flags)?)?;
        if kept.num_rows() > 0 {
            file.write(&kept)?;
        }
    }
    let (name, rows) = file.finish()?;
    if rows > 0 {
        // Nobody reads any more if this fails.
        let _ = output.blocking_send(Staged::file(&name));
    }
    Ok(())
}
