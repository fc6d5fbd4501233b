//! Clusters samples, in this process or on several machines.
//!
//! ```text
//! samples ─▶ FoldExec ─▶ sessions ─▶ exchange by bucket ─▶ sort ─▶ WriteExec ─▶ outcomes
//!            slices of timelines ─▶ exchange by bucket ─▶ sort ─┘
//! ```
//!
//! One process computes the sessions separately from the records. On a cluster, each machine folds its parts of the
//! log independently. After the exchange, all records of a user are in one partition, so sessions are computed from
//! the records. The slices of timelines go through the same kind of exchange, so that the task that writes a range
//! has its slices. A cluster does all of this in one job. If statistics of all samples must be known before any
//! sample is written, it needs two jobs:
//!
//! ```text
//! samples, part by part ─▶ FoldExec ─▶ files of the work folder: records and totals
//! files ─▶ exchange by bucket ─▶ sessions, sort ─▶ WriteExec ─▶ outcomes
//! ```

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::physical_plan::common::spawn_buffered;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, displayable, execute_stream, execute_stream_partitioned};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use futures::future::try_join_all;
use onefold_base::progress::Reporter;
use onefold_base::sync::locked;
use onefold_base::units::format_bytes;
use onefold_datasets::digest::Digest;
use onefold_datasets::{Encoders, WrittenBucket};
use onefold_sql::Query as _;

use super::bucket_files::{LeftOut, WriteSpec};
use super::by_bucket::{BucketExchange, ExchangedRecords, ROWS, slices_in_order};
use super::convert::{ColumnNames, check_types};
use super::cut::Cutter;
use super::decode::{DecodedTotals, ListColumn};
use super::encode::{EncoderOptions, SampleTotals};
use super::fold::{DIGEST, FoldExec, FoldSpec};
use super::options::{ClusterOptions, column_names, cut_spec, encoder_options, statistics_options};
use super::slices::SliceQueries;
use super::statistics::SampleStatistics;
use super::totals::TotalsReader;
use super::unfold::{CutSpec, RowGroups};
use super::write::{Outcome, WriteExec};
use super::written_lists::{SentLists, WrittenLists};
use crate::config::Config;
use crate::error::{Error, Result, bug};
use crate::profile::stage;
use crate::remote::{Cluster, OnCluster, WrittenRows, cluster_of, write_rows};
use crate::spilling_join::once_each;
use crate::{sessionize, sources};

/// The name of the table of records.
pub(super) const RECORDS_TABLE: &str = "__onefold_records";
/// The name of the files with records between the two jobs.
const STAGED: &str = "records";
/// The interval between progress reports.
const TICK: Duration = Duration::from_millis(200);
/// The number of sorted batches of a partition that may wait to be written.
const WAITING: usize = 2;

/// Sorts the samples of a query into the order of a dataset.
pub(crate) struct Clustering<'a> {
    config: &'a Config,
    context: SessionContext,
    /// How sorted records are cut into row groups.
    cut: CutSpec,
    totals: TotalsReader,
    /// The totals of the samples that have been folded.
    folded: Option<SampleTotals>,
    records: Records,
    /// For each timeline, the plan of its slices. In this process, its partitions have the same ranges of buckets
    /// as the sorted records; on a cluster, the slices are in no particular order.
    slices: Vec<Arc<dyn ExecutionPlan>>,
    /// The tables that the plans of the slices read. They must outlive the plans.
    slice_tables: SliceQueries,
}

/// The records of the samples.
enum Records {
    Here(Sorting),
    OnCluster(Exchanging),
}

/// Records that this process sorts.
struct Sorting {
    /// The operator that folds the samples, if they are not folded yet. The sort reads its output.
    fold: Option<Arc<FoldExec>>,
    /// The number of threads of the writer.
    threads: usize,
    /// The number of row groups that are written at the same time.
    row_groups: usize,
    /// The sorted records. Each partition contains whole ranges of buckets.
    sorted: Vec<SendableRecordBatchStream>,
    /// The first sorted batch of each partition. Set when all samples are encoded.
    first: Option<Vec<Option<RecordBatch>>>,
}

/// Records that the machines of a cluster exchange and sort. They come from the folding of the samples, or from
/// files.
struct Exchanging {
    cluster: Arc<dyn Cluster>,
    exchanged: ExchangedRecords,
    /// The files with the records, if the records were stored.
    files: Vec<WrittenRows>,
}

/// The result of writing samples.
pub(crate) struct WrittenSamples {
    /// The number of folded samples.
    pub(crate) samples: u64,
    pub(crate) digest: Digest,
    pub(crate) statistics: SampleStatistics,
    pub(crate) left_out: LeftOut,
}

impl<'a> Clustering<'a> {
    /// Plans the clustering of the samples of [`sessionize::SAMPLES_VIEW`], which has these `columns`. Reads only
    /// the data that is needed to find the slices of timelines.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for columns that are missing or have a type that does not fit.
    pub(crate) async fn plan(
        config: &'a Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
    ) -> Result<Self> {
        let is_here = cluster_of(&context.copied_config()).is_none();
        let (encoder, workers) = (encoder_options(config, options), is_here.then_some(options.threads));
        let fold = fold_samples(config, context, columns, options, encoder, workers).await?;
        let sessions = sessionize::sessions(config, columns)?;
        if !is_here {
            let records = ExchangedRecords {
                records: fold,
                with_buckets: sessionize::with_buckets(config, options.order.buckets.number, ROWS),
                ordered: sessionize::ordered_with_sessions(config, options.order, ROWS, &DIGEST),
            };
            return Self::of_records(config, context, columns, options, &sessions, records).await;
        }
        context.register_table(RECORDS_TABLE, Arc::new(fold.table()))?;
        let records = sessionize::with_sessions(config, &sessions, RECORDS_TABLE);
        let records = ExchangedRecords::with_sessions(config, context, options.order, &records, None).await?;
        let mut planned = Self::of_records(config, context, columns, options, &sessions, records).await?;
        if let Records::Here(sorting) = &mut planned.records {
            sorting.fold = Some(fold);
        }
        Ok(planned)
    }

    /// Creates the clustering of samples from their `records`. `sessions` is the query of their sessions.
    pub(super) async fn of_records(
        config: &'a Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        sessions: &str,
        records: ExchangedRecords,
    ) -> Result<Self> {
        let (records, exchange) = match cluster_of(&context.copied_config()) {
            Some(cluster) => {
                (Records::OnCluster(Exchanging { cluster, exchanged: records, files: Vec::new() }), None)
            }
            None => {
                let exchange = BucketExchange::here(context, options.threads, options.order.buckets);
                (Records::Here(Sorting::start(context, options, records, exchange).await?), Some(exchange))
            }
        };
        let slice_tables = SliceQueries::new(config, context, columns, options, sessions).await?;
        let mut slices = Vec::new();
        for query in &slice_tables.queries {
            let rows = context.query(query).await?.create_physical_plan().await?;
            slices.push(match exchange {
                Some(exchange) => slices_in_order(config, context, rows, exchange).await?,
                None => OnCluster::inner(rows),
            });
        }
        let totals = TotalsReader::new(&statistics_options(config, options), &options.budget);
        let texts = config.vocabularies.keys().map(|name| options.ids.shared_texts(name));
        Ok(Self {
            config,
            context: context.clone(),
            cut: cut_spec(config, columns, options),
            totals: totals.with_texts(texts.collect()),
            folded: None,
            records,
            slices,
            slice_tables,
        })
    }

    /// Adapts the clustering to a merge of late samples with those of a dataset. The records were encoded with the
    /// options `encoded`. `late` has the totals of the late samples.
    pub(super) fn of_merged(self, encoded: EncoderOptions, late: SampleTotals) -> Self {
        Self { cut: CutSpec { encoded, ..self.cut }, folded: Some(late), ..self }
    }

    /// Folds all samples: encodes and sorts them here, or stores their records in files on a cluster. Returns their
    /// totals, or `None` if there are no samples.
    ///
    /// # Errors
    ///
    /// The errors of the query, and [`Error::Fault`] for a value that a sample must not have.
    pub(crate) async fn fold(&mut self, reporter: &dyn Reporter) -> Result<Option<&mut SampleTotals>> {
        let some = match &mut self.records {
            Records::Here(sorting) => sorting.encode(&mut self.totals, reporter).await?,
            Records::OnCluster(exchanging) => {
                exchanging.put_aside(&self.context, &mut self.totals, reporter).await?;
                true
            }
        };
        add_totals(&mut self.folded, &mut self.totals)?;
        Ok(self.folded.as_mut().filter(|totals| some && totals.samples > 0))
    }

    /// Returns how sorted records are cut into row groups. If `digested` is `false`, the caller computes the digest
    /// of the decoded samples.
    pub(crate) fn cut(&self, digested: bool) -> CutSpec {
        CutSpec { digested, ..self.cut.clone() }
    }

    /// Writes the samples and passes each range of buckets to `add` when its files are complete. `lists` has the
    /// list columns. Folds the samples first if they are not folded yet. Returns `None` if there are no totals of
    /// any samples.
    ///
    /// # Errors
    ///
    /// The errors of the engine and of writing; [`Error::Fault`] if the decoded samples differ from the encoded
    /// ones.
    pub(crate) async fn write(
        mut self,
        spec: WriteSpec,
        lists: Vec<ListColumn>,
        reporter: &dyn Reporter,
        add: &mut (dyn FnMut(WrittenBucket) -> Result<()> + Send),
    ) -> Result<Option<WrittenSamples>> {
        if matches!(&self.records, Records::Here(sorting) if sorting.first.is_none()) {
            self.fold(reporter).await?;
        }
        let (digested, spec) = (spec.cut.digested, Arc::new(spec));
        // Keep the tables until all rows are read.
        let Self { config, context, mut totals, mut folded, records, slices, slice_tables: _tables, .. } =
            self;
        let known = folded.as_ref().map(|totals| totals.samples);
        // Keep the files until the job has ended.
        let mut files_of_job: Vec<WrittenRows> = Vec::new();
        let (what, cluster, write) = match records {
            Records::Here(sorting) => {
                let encoders = Encoders::new(sorting.threads, sorting.row_groups)?;
                let records = sorting.records();
                let Some(schema) = records.first().map(|records| records.schema()) else {
                    return Err(bug("records are sorted in no partition"));
                };
                let inputs = [once_each(&schema, records)?].into_iter().chain(slices).collect();
                let write = WriteExec::new(spec, WrittenLists::Here(lists), inputs, Some(encoders));
                ("writing", None, write)
            }
            Records::OnCluster(Exchanging { cluster, exchanged, files }) => {
                let exchange = BucketExchange::Checked(cluster.partitions(), spec.cut.buckets);
                let mut inputs = vec![exchanged.sorted(&context, exchange).await?];
                for slices in slices {
                    inputs.push(slices_in_order(config, &context, slices, exchange).await?);
                }
                let (lists, vocabularies) = SentLists::write(cluster.work_folder(), &lists)?;
                let lists = WrittenLists::InFiles(lists, Arc::default());
                let write = WriteExec::new(spec, lists, inputs, None);
                let what = if known.is_some() { "writing on the cluster" } else { "building on the cluster" };
                files_of_job.extend(files.into_iter().chain([vocabularies]));
                (what, Some(cluster), write)
            }
        };
        let (write, is_here) = (Arc::new(write), cluster.is_none());
        let plan: Arc<dyn ExecutionPlan> = match cluster {
            None => Arc::clone(&write) as _,
            Some(cluster) => Arc::new(OnCluster::new(cluster, Arc::clone(&write) as _)),
        };
        reporter.begin(what, known, "samples");
        let mut rows = execute_stream(plan, context.task_ctx())?;
        let (mut decoded, mut left_out, mut seen) = (DecodedTotals::default(), LeftOut::default(), 0);
        loop {
            let next = tokio::time::timeout(TICK, rows.next()).await;
            // Samples that other machines write are counted when a range of buckets is complete.
            let samples = write.samples();
            reporter.advance(samples - seen);
            reporter.go_on()?;
            seen = samples;
            let Ok(next) = next else { continue };
            let Some(rows) = next.transpose()? else { break };
            for outcome in Outcome::read(&rows)? {
                match outcome {
                    Outcome::Range(range) => {
                        reporter.advance(if is_here { 0 } else { range.samples() });
                        add(range)?;
                    }
                    Outcome::LeftOut(others) => left_out.merge(others),
                    Outcome::Decoded(others) => decoded.merge(&others),
                    Outcome::Folded(worker, part) => totals.part(worker, &part)?,
                }
            }
        }
        reporter.end();
        add_totals(&mut folded, &mut totals)?;
        let Some(totals) = folded else { return Ok(None) };
        let SampleTotals { samples, digest, .. } = totals;
        let statistics = compared(totals, &decoded, digested)?;
        Ok(Some(WrittenSamples { samples, digest, statistics, left_out }))
    }

    /// Passes the samples to `output` in the order in which [`write`](Self::write) writes them to files. Works in
    /// one process only. Call it after [`fold`](Self::fold) has returned totals. `what` is the name of the stage.
    pub(crate) async fn decode(
        self,
        what: &'static str,
        lists: Vec<ListColumn>,
        reporter: &dyn Reporter,
        output: &mut dyn RowGroups,
    ) -> Result<()> {
        let Self { context, cut, folded, records, slices, slice_tables: _tables, .. } = self;
        let (Some(totals), Records::Here(sorting)) = (folded, records) else {
            return Err(bug("samples are decoded before they are encoded here"));
        };
        let context = context.task_ctx();
        let held = MemoryConsumer::new("decoding of samples").register(context.memory_pool());
        reporter.begin(what, Some(totals.samples), "samples");
        let mut decoded = DecodedTotals::default();
        for (partition, mut sorted) in sorting.records().into_iter().enumerate() {
            let slices = slices.iter().map(|plan| plan.execute(partition, Arc::clone(&context)));
            let mut cutter = Cutter::new(&cut, lists.clone(), slices.collect::<Result<Vec<_>, _>>()?);
            while let Some(records) = sorted.next().await.transpose()? {
                cutter.cut(&records, output).await?;
                held.resize(cutter.held_bytes());
                reporter.advance(records.num_rows() as u64);
                reporter.go_on()?;
            }
            cutter.leave(output)?;
            decoded.merge(&cutter.totals());
        }
        reporter.end();
        compared(totals, &decoded, true).map(drop)
    }
}

impl Sorting {
    /// Starts to sort records.
    async fn start(
        context: &SessionContext,
        options: &ClusterOptions,
        records: ExchangedRecords,
        exchange: BucketExchange,
    ) -> Result<Self> {
        let plan = records.sorted(context, exchange).await?;
        tracing::debug!("clustering:\n{}", displayable(plan.as_ref()).indent(false));
        // Each sort runs on a separate thread.
        let sorted = execute_stream_partitioned(plan, context.task_ctx())?;
        let sorted = sorted.into_iter().map(|rows| stage("sort", || spawn_buffered(rows, WAITING))).collect();
        let ClusterOptions { threads, row_groups, .. } = *options;
        Ok(Self { fold: None, threads, row_groups, sorted, first: None })
    }

    /// Encodes and sorts all samples, and reads their totals. Returns whether there are any samples.
    async fn encode(&mut self, totals: &mut TotalsReader, reporter: &dyn Reporter) -> Result<bool> {
        reporter.begin("reading", None, "samples");
        let first = {
            let totals = Mutex::new(totals);
            let first = self.sorted.iter_mut().map(|sorted| first_records(sorted, &totals));
            let mut seen = 0;
            let progress = || -> Result<()> {
                let (samples, bytes) = self.fold.as_ref().map_or((0, 0), |fold| fold.read());
                reporter.advance(samples - seen);
                seen = samples;
                reporter.note(&format!("{} decoded", format_bytes(bytes)));
                Ok(())
            };
            ticking(try_join_all(first), progress).await??
        };
        reporter.end();
        let some = first.iter().any(Option::is_some);
        self.first = Some(first);
        Ok(some)
    }

    /// Returns the sorted records of each partition.
    fn records(self) -> Vec<SendableRecordBatchStream> {
        let whole = |(first, rest): (Option<RecordBatch>, SendableRecordBatchStream)| {
            let schema = rest.schema();
            let records = futures::stream::iter(first.map(Ok)).chain(rest);
            Box::pin(RecordBatchStreamAdapter::new(schema, records)) as SendableRecordBatchStream
        };
        self.first.into_iter().flatten().zip(self.sorted).map(whole).collect()
    }
}

impl Exchanging {
    /// Folds all samples, reads their totals, and stores their records in files.
    async fn put_aside(
        &mut self,
        context: &SessionContext,
        totals: &mut TotalsReader,
        reporter: &dyn Reporter,
    ) -> Result<()> {
        let folded = Arc::clone(&self.exchanged.records);
        let schema = folded.schema();
        reporter.begin("reading on the cluster", None, "samples");
        let written = write_rows(&self.cluster, context, STAGED, folded);
        let files = ticking(written, || Ok(reporter.go_on()?)).await??;
        reporter.end();
        let records = totals.read_table(files.rows(context, &schema).await?).await?;
        let records = records.create_physical_plan().await?;
        self.exchanged.records = OnCluster::inner(records);
        self.files.push(files);
        Ok(())
    }
}

/// Waits for `work` and calls `tick` at each [`TICK`], and once at the end.
pub(super) async fn ticking<T>(
    work: impl Future<Output = T>,
    mut tick: impl FnMut() -> Result<()>,
) -> Result<T> {
    let mut work = pin!(work);
    loop {
        let done = tokio::time::timeout(TICK, &mut work).await;
        tick()?;
        if let Ok(done) = done {
            return Ok(done);
        }
    }
}

/// Adds the totals that were read to the totals `folded`.
fn add_totals(folded: &mut Option<SampleTotals>, totals: &mut TotalsReader) -> Result<()> {
    match (folded, totals.finish()?) {
        (Some(all), Some(totals)) => all.merge(totals)?,
        (all, totals) => *all = all.take().or(totals),
    }
    Ok(())
}

/// Reads the totals at the start of sorted records and returns the first batch of records after them; `None` if
/// there are no records.
async fn first_records(
    sorted: &mut SendableRecordBatchStream,
    totals: &Mutex<&mut TotalsReader>,
) -> Result<Option<RecordBatch>> {
    while let Some(batch) = sorted.next().await.transpose()? {
        let records = locked(totals).read(&batch)?;
        if records.num_rows() > 0 {
            return Ok(Some(records));
        }
    }
    Ok(None)
}

/// Returns the statistics of the samples after a comparison of the samples `read` with those `decoded`.
///
/// # Errors
///
/// [`Error::Fault`] if their numbers or their digests differ.
fn compared(mut read: SampleTotals, decoded: &DecodedTotals, digested: bool) -> Result<SampleStatistics> {
    if decoded.samples != read.samples || digested && decoded.digest != read.digest {
        return Err(Error::engine(
            format!(
                "{} samples with digest {} were read, {} with digest {} came out of the sort",
                read.samples, read.digest, decoded.samples, decoded.digest,
            ),
            "the query must give the same rows each time it is evaluated; if it does, check the disk of \
             the spill directory",
        ));
    }
    read.statistics.timeline_ids(&decoded.timeline_ids);
    Ok(read.statistics)
}

/// Plans the folding of the samples of [`sessionize::SAMPLES_VIEW`]. All parts of the samples share `workers`
/// workers; if it is `None`, each part is folded independently.
pub(super) async fn fold_samples(
    config: &Config,
    context: &SessionContext,
    columns: &ArrowSchema,
    options: &ClusterOptions,
    encoder: EncoderOptions,
    workers: Option<usize>,
) -> Result<Arc<FoldExec>> {
    check_types(config, columns, &options.problems)?;
    let samples = context.query(&sessionize::samples(config, columns)?).await?;
    let input = OnCluster::inner(sources::planned(samples, &options.problems).await?);
    tracing::debug!("samples:\n{}", displayable(input.as_ref()).indent(false));
    let spec = FoldSpec {
        names: ColumnNames { time_limits: options.time_limits, ..column_names(config, options) },
        encoder,
        statistics: statistics_options(config, options),
        workers: workers.map(|workers| workers.max(1)),
        row_bytes: options.row_bytes,
    };
    Ok(Arc::new(FoldExec::new(spec, options.budget.clone(), input)?))
}
