//! Clustering on several machines: one job, whose rows say what was written.
//!
//! ```text
//! samples, part by part ─▶ FoldExec ─▶ exchange by bucket ─▶ sessions, sort ─▶ WriteExec ─▶ outcomes
//!         slices of timelines, in no order ─▶ exchange by bucket ─▶ sort ─┘
//! ```
//!
//! Each machine folds its parts of the log for itself. After the exchange, all records of a user are in one partition,
//! so sessions are found from the records; here, where one process has all samples, that is done beside. The slices of
//! timelines go through an exchange of the same kind, so that whoever writes a bucket has its slices.
//!
//! Where something has to be learned of all samples before any is written, there are two jobs:
//!
//! ```text
//! samples, part by part ─▶ FoldExec ─▶ StageExec ─▶ totals
//!                                         └▶ files ─▶ exchange by bucket ─▶ sessions, sort ─▶ WriteExec ─▶ outcomes
//! ```

use std::fmt;
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{Schema as ArrowSchema, SchemaRef};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::error::{DataFusionError, Result as EngineResult};
use datafusion::execution::{SendableRecordBatchStream, SessionStateBuilder, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use datafusion::physical_plan::windows::BoundedWindowAggExec;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, execute_stream};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use onefold_datasets::WrittenBucket;
use onefold_datasets::progress::Reporter;

use super::cut::CutSpec;
use super::decode::{DecodedTotals, ListColumn};
use super::encode::{EncoderOptions, SampleTotals};
use super::fold::DIGEST;
use super::slices::SliceQueries;
use super::stage::{StageExec, Staged};
use super::totals::TotalsReader;
use super::write::{Outcome, WriteExec, WriteSpec};
use super::written_lists::{SentLists, WrittenLists};
use super::{
    ClusterOptions, LeftOut, RECORDS_TABLE, SampleStatistics, TICK, bug, compared, cut_spec, fold_samples,
    statistics_options,
};
use crate::remote::{Cluster, Groups, OnCluster, WorkRowsSpec, WrittenRows, checked_exchange};
use crate::sessionize::{self, BUCKET};
use crate::{Config, Result};

/// What records that are put aside are called.
const STAGED: &str = "records";

/// Sorts the samples of a query into the order of a dataset, on a cluster.
pub(crate) struct RemoteClustering<'a> {
    config: &'a Config,
    cluster: Arc<dyn Cluster>,
    context: SessionContext,
    /// The records: those that the samples are folded to, or those that are put aside.
    exchanged: ExchangedRecords,
    /// The slices of every timeline, in no order.
    slices: Vec<Arc<dyn ExecutionPlan>>,
    /// The tables that the slices are read from.
    slice_tables: SliceQueries,
    cut: CutSpec,
    totals: TotalsReader,
    /// The totals of the samples that are folded already.
    folded: Option<SampleTotals>,
    /// The files of records that are put aside.
    _files: Option<WrittenRows>,
}

/// Records, and the queries over [`RECORDS_TABLE`] that give them their buckets before the exchange by bucket, and sort
/// them behind it.
pub(super) struct ExchangedRecords {
    pub(super) records: Arc<dyn ExecutionPlan>,
    pub(super) with_buckets: String,
    pub(super) ordered: String,
}

/// What a cluster wrote.
pub(crate) struct WrittenSamples {
    /// The samples that were folded, and their digest.
    pub(crate) samples: u64,
    pub(crate) digest: onefold_datasets::digest::Digest,
    pub(crate) statistics: SampleStatistics,
    pub(crate) left_out: LeftOut,
}

impl<'a> RemoteClustering<'a> {
    /// Plans the clustering of the samples of [`sessionize::SAMPLES_VIEW`], which has these `columns`. Reads nothing but
    /// what says where slices of timelines lie.
    ///
    /// # Errors
    ///
    /// As [`Clustering::plan`](super::Clustering::plan).
    pub(crate) async fn plan(
        config: &'a Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        cluster: &Arc<dyn Cluster>,
    ) -> Result<Self> {
        let encoder = super::encoder_options(config, options);
        let exchanged = ExchangedRecords {
            records: fold_samples(config, context, columns, options, encoder, None).await?,
            with_buckets: sessionize::with_buckets(config, options.order.buckets, RECORDS_TABLE),
            ordered: sessionize::ordered_with_sessions(config, options.order, RECORDS_TABLE, &DIGEST),
        };
        let sessions = sessionize::sessions(config, columns)?;
        Self::of_records(config, context, columns, options, (cluster, &sessions), exchanged).await
    }

    /// Plans the clustering of records. `sessions` is the query of the sessions of samples that have lists of timelines.
    ///
    /// # Errors
    ///
    /// Those of the engine.
    pub(super) async fn of_records(
        config: &'a Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        (cluster, sessions): (&Arc<dyn Cluster>, &str),
        exchanged: ExchangedRecords,
    ) -> Result<Self> {
        let totals = TotalsReader::new(&statistics_options(config, options), &options.budget);
        let texts = config.vocabularies.keys().map(|name| options.ids.shared_texts(name));
        let slice_tables = SliceQueries::new(config, context, columns, options, sessions).await?;
        let mut slices = Vec::new();
        for query in &slice_tables.queries {
            slices.push(OnCluster::inner(context.sql(query).await?.create_physical_plan().await?));
        }
        Ok(Self {
            config,
            cluster: Arc::clone(cluster),
            context: context.clone(),
            exchanged,
            slices,
            slice_tables,
            cut: cut_spec(config, columns, options),
            totals: totals.with_texts(texts.collect()),
            folded: None,
            _files: None,
        })
    }

    /// Says how records of late samples and of a dataset were encoded, and gives the totals of the late ones.
    pub(super) fn set_merged(&mut self, encoded: EncoderOptions, late: SampleTotals) {
        self.cut.encoded = encoded;
        self.folded = Some(late);
    }

    /// How what is sorted is cut into row groups.
    pub(crate) fn cut(&self) -> CutSpec {
        self.cut.clone()
    }

    /// Folds all samples, and puts their records aside. Returns their totals, or `None` if there are no samples.
    ///
    /// # Errors
    ///
    /// As [`Clustering::encode`](super::Clustering::encode).
    pub(crate) async fn fold(&mut self, reporter: &dyn Reporter) -> Result<Option<&mut SampleTotals>> {
        let folder = self.cluster.work_folder();
        let mut files = WrittenRows::none_in(folder)?;
        let spec = WorkRowsSpec { folder: folder.to_owned(), name: STAGED.to_owned() };
        let records = &mut self.exchanged.records;
        let schema = records.schema();
        let stage = Arc::new(StageExec::new(spec, Arc::clone(records)));
        let plan = Arc::new(OnCluster::new(Arc::clone(&self.cluster), stage));
        reporter.begin("reading on the cluster", None, "samples");
        let mut rows = execute_stream(plan, self.context.task_ctx())?;
        while let Some(rows) = next_of_job(&mut rows, reporter).await? {
            for staged in Staged::read(&rows) {
                match staged {
                    Staged::Totals(worker, part) => self.totals.part(worker, &part)?,
                    Staged::File(name) => files.add(name),
                }
            }
        }
        reporter.end();
        let Some(totals) = self.totals.finish()?.filter(|totals| totals.samples > 0) else { return Ok(None) };
        *records = files.scan(&self.context, &schema).await?;
        self._files = Some(files);
        Ok(Some(self.folded.insert(totals)))
    }

    /// Writes the samples, and gives the buckets to `add` when all files are complete. `lists` are the list columns. The
    /// samples are folded on the way if they are not folded yet. Gives `None` if nothing is known of any samples.
    ///
    /// # Errors
    ///
    /// As [`Clustering::write`](super::Clustering::write).
    pub(crate) async fn write(
        mut self,
        spec: WriteSpec,
        lists: &[ListColumn],
        reporter: &dyn Reporter,
        add: &mut (dyn FnMut(WrittenBucket) -> Result<()> + Send),
    ) -> Result<Option<WrittenSamples>> {
        let digested = spec.cut.digested;
        let partitions = self.cluster.partitions();
        // They live until all is read.
        let _tables = self.slice_tables;
        let mut inputs = vec![sorted(&self.context, self.exchanged, partitions).await?];
        for slices in self.slices {
            inputs.push(slices_in_order(self.config, &self.context, slices, partitions).await?);
        }
        // The files live until the job has ended.
        let (lists, _vocabularies) = SentLists::write(self.cluster.work_folder(), lists)?;
        let lists = WrittenLists::InFiles(lists, Arc::default());
        let write = Arc::new(WriteExec::new(Arc::new(spec), lists, inputs));
        let plan = Arc::new(OnCluster::new(self.cluster, write));
        let known = self.folded.as_ref().map(|totals| totals.samples);
        let what = if known.is_some() { "writing on the cluster" } else { "building on the cluster" };
        reporter.begin(what, known, "samples");
        let mut rows = execute_stream(plan, self.context.task_ctx())?;
        let (mut decoded, mut left_out) = (DecodedTotals::default(), LeftOut::default());
        while let Some(rows) = next_of_job(&mut rows, reporter).await? {
            for outcome in Outcome::read(&rows)? {
                match outcome {
                    Outcome::Bucket(bucket) => {
                        reporter.advance(bucket.bucket.samples);
                        add(bucket)?;
                    }
                    Outcome::LeftOut(others) => left_out.merge(others),
                    Outcome::Decoded(others) => decoded.merge(&others),
                    Outcome::Folded(worker, part) => self.totals.part(worker, &part)?,
                }
            }
        }
        reporter.end();
        let totals = match (self.folded, self.totals.finish()?) {
            (Some(mut all), Some(others)) => {
                all.merge(others)?;
                Some(all)
            }
            (one, other) => one.or(other),
        };
        let Some(totals) = totals else { return Ok(None) };
        let SampleTotals { samples, digest, .. } = totals;
        let statistics = compared(totals, &decoded, digested)?;
        Ok(Some(WrittenSamples { samples, digest, statistics, left_out }))
    }
}

/// The next rows of a job; `None` behind the last.
async fn next_of_job(
    rows: &mut SendableRecordBatchStream,
    reporter: &dyn Reporter,
) -> Result<Option<RecordBatch>> {
    loop {
        let next = tokio::time::timeout(TICK, rows.next()).await;
        reporter.go_on()?;
        if let Ok(next) = next {
            return Ok(next.transpose()?);
        }
    }
}

/// Records, exchanged by bucket and sorted.
async fn sorted(
    context: &SessionContext,
    exchanged: ExchangedRecords,
    partitions: usize,
) -> Result<Arc<dyn ExecutionPlan>> {
    let context = for_one_partition(context);
    let records = over_partitions(&context, &exchanged.with_buckets, exchanged.records).await?;
    let records = exchanged_by_bucket(records, partitions)?;
    over_partitions(&context, &exchanged.ordered, records).await
}

/// The slices of a timeline, exchanged by bucket as the records are, and sorted.
async fn slices_in_order(
    config: &Config,
    context: &SessionContext,
    slices: Arc<dyn ExecutionPlan>,
    partitions: usize,
) -> Result<Arc<dyn ExecutionPlan>> {
    let slices = exchanged_by_bucket(slices, partitions)?;
    let ordered = sessionize::slices_in_order(config, RECORDS_TABLE);
    over_partitions(&for_one_partition(context), &ordered, slices).await
}

/// Exchanges rows by their [`BUCKET`]. Rows of one bucket are in one partition, which is the same for all rows.
fn exchanged_by_bucket(rows: Arc<dyn ExecutionPlan>, partitions: usize) -> Result<Arc<dyn ExecutionPlan>> {
    let column = rows.schema().index_of(BUCKET).map_err(DataFusionError::from)?;
    let key = Arc::new(Column::new(BUCKET, column));
    let exchange = RepartitionExec::try_new(rows, Partitioning::Hash(vec![key], partitions))?;
    let groups = Groups { column, name: "bucket".to_owned() };
    Ok(checked_exchange(Arc::new(exchange), Some(groups))?)
}

/// A session like `context` that plans for one partition, in this process.
fn for_one_partition(context: &SessionContext) -> SessionContext {
    let config =
        context.copied_config().with_target_partitions(1).with_create_default_catalog_and_schema(false);
    let state = SessionStateBuilder::new_from_existing(context.state())
        .with_config(config)
        .with_physical_optimizer_rules(PhysicalOptimizer::new().rules)
        .build();
    SessionContext::new_with_state(state)
}

/// The plan of `sql`, a query over [`RECORDS_TABLE`], which is applied to each partition of `input`.
async fn over_partitions(
    context: &SessionContext,
    sql: &str,
    input: Arc<dyn ExecutionPlan>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let table = Placeholder(input.schema());
    let table = StreamingTable::try_new(input.schema(), vec![Arc::new(table)])?;
    context.register_table(RECORDS_TABLE, Arc::new(table))?;
    let plan = context.sql(sql).await?.create_physical_plan().await;
    context.deregister_table(RECORDS_TABLE)?;
    let apply = |plan: Arc<dyn ExecutionPlan>| -> EngineResult<Transformed<Arc<dyn ExecutionPlan>>> {
        let applied: Arc<dyn ExecutionPlan> = if let Some(leaf) = plan.downcast_ref::<StreamingTableExec>() {
            of_columns(&input, &leaf.schema())?
        } else if let Some(sort) = plan.downcast_ref::<SortExec>() {
            let sorted = SortExec::new(sort.expr().clone(), Arc::clone(sort.input()));
            Arc::new(sorted.with_fetch(sort.fetch()).with_preserve_partitioning(true))
        } else if let Some(window) = plan.downcast_ref::<BoundedWindowAggExec>() {
            let (exprs, order) = (window.window_expr().to_vec(), window.input_order_mode.clone());
            Arc::new(BoundedWindowAggExec::try_new(exprs, Arc::clone(window.input()), order, true)?)
        } else {
            return Ok(Transformed::no(plan));
        };
        Ok(Transformed::yes(applied))
    };
    Ok(plan?.transform_up(apply).data()?)
}

/// The columns of `plan` that `schema` has.
fn of_columns(plan: &Arc<dyn ExecutionPlan>, schema: &SchemaRef) -> EngineResult<Arc<dyn ExecutionPlan>> {
    if plan.schema().fields() == schema.fields() {
        return Ok(Arc::clone(plan));
    }
    let column = |name: &String| -> EngineResult<_> {
        let column = Column::new_with_schema(name, &plan.schema())?;
        Ok((Arc::new(column) as Arc<dyn datafusion::physical_expr::PhysicalExpr>, name.clone()))
    };
    let columns = schema.fields().iter().map(|field| column(field.name()));
    let columns = columns.collect::<EngineResult<Vec<_>>>()?;
    Ok(Arc::new(ProjectionExec::try_new(columns, Arc::clone(plan))?))
}

/// Rows that stand for others while a plan is made.
#[derive(Debug)]
struct Placeholder(SchemaRef);

impl fmt::Display for Placeholder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Placeholder")
    }
}

impl PartitionStream for Placeholder {
    fn schema(&self) -> &SchemaRef {
        &self.0
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let error = DataFusionError::External(Box::new(bug("a plan was executed before it had its input")));
        let rows = futures::stream::iter([Err(error)]);
        Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.0), rows))
    }
}
