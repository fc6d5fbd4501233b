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

use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use onefold_base::progress::Reporter;
use onefold_datasets::WrittenBucket;
use onefold_sql::Query as _;

use super::by_bucket::{BucketExchange, ExchangedRecords, ROWS, slices_in_order};
use super::cut::CutSpec;
use super::decode::{DecodedTotals, ListColumn};
use super::encode::{EncoderOptions, SampleTotals};
use super::fold::DIGEST;
use super::slices::SliceQueries;
use super::stage::{StageExec, Staged};
use super::totals::TotalsReader;
use super::write::{Outcome, WriteExec};
use super::written_lists::{SentLists, WrittenLists};
use super::{
    ClusterOptions, LeftOut, SampleStatistics, TICK, WriteSpec, compared, cut_spec, fold_samples,
    statistics_options,
};
use crate::remote::{Cluster, OnCluster, WorkRowsSpec, WrittenRows};
use crate::sessionize;
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
            with_buckets: sessionize::with_buckets(config, options.order.buckets, ROWS),
            ordered: sessionize::ordered_with_sessions(config, options.order, ROWS, &DIGEST),
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
            slices.push(OnCluster::inner(context.query(query).await?.create_physical_plan().await?));
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
        let exchange = BucketExchange::Checked(self.cluster.partitions());
        // They live until all is read.
        let _tables = self.slice_tables;
        let mut inputs = vec![self.exchanged.sorted(&self.context, exchange).await?];
        for slices in self.slices {
            inputs.push(slices_in_order(self.config, &self.context, slices, exchange).await?);
        }
        // The files live until the job has ended.
        let (lists, _vocabularies) = SentLists::write(self.cluster.work_folder(), lists)?;
        let lists = WrittenLists::InFiles(lists, Arc::default());
        let write = Arc::new(WriteExec::new(Arc::new(spec), lists, inputs, None));
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
                        reporter.advance(bucket.samples());
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
