//! Clustering: sorts samples from the order of a log into sessions, one after the other.
//!
//! ```text
//! query ──convert──▶ delta-encode by session ──records──▶ join with sessions, ──▶ cut, decode, encode ──▶ buckets
//!   (lists)            (encode, statistics)               divide by bucket, sort   (WriteExec, by row group)
//!                                                         (the engine, spills)
//! ```
//!
//! A log repeats a user's lists in every sample, and a sort would move, spill and merge every copy. So the samples are
//! delta-encoded *before* the sort: each is compared with the last sample of its session, wherever that stood in the
//! log, and becomes a record of what changed ([`record`]). The engine sorts records. After the sort the samples of a
//! session are together, and their lists are decoded as slices of shared ids ([`decode`]). A sample of a session that
//! was not seen for long, or one far out of time order ([`chains`]), is stored whole.
//!
//! The encoder sees every sample once, before anything is written. So it also computes the digests, counts ids for
//! vocabularies, and counts which lists change together ([`statistics`], [`history`]).

mod bucket_files;
mod by_bucket;
mod chains;
mod columns;
mod convert;
mod counts;
mod cut;
mod decode;
mod distinct;
mod encode;
mod fold;
mod generations;
mod history;
mod kept;
mod last_lists;
mod merging;
mod on_cluster;
mod origin;
mod partitions;
mod record;
mod record_batches;
mod reuse;
mod slices;
mod stage;
mod statistics;
#[cfg(test)]
mod tests;
mod timelines;
mod totals;
mod unfold;
mod write;
mod written_lists;

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::execution::memory_pool::MemoryConsumer;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::common::spawn_buffered;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{ExecutionPlan, displayable, execute_stream, execute_stream_partitioned};
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use futures::future::try_join_all;
use onefold_base::progress::Reporter;
use onefold_base::units::format_bytes;
use onefold_datasets::{
    CountBudget, Encoders, KeptColumn, Sessions, SparseFeature, SparseKind, WrittenBucket,
};
use onefold_sql::Query as _;

use self::by_bucket::{BucketExchange, ExchangedRecords, slices_in_order};
use self::convert::ColumnNames;
use self::cut::Cutter;
use self::decode::DecodedTotals;
use self::encode::EncoderOptions;
use self::slices::SliceQueries;
use self::statistics::StatisticsOptions;
use self::totals::TotalsReader;
use self::write::Outcome;
use crate::config::TimelineConfig;
use crate::error::bug;
use crate::ids::FeatureIds;
use crate::profile::stage;
use crate::remote::OnCluster;
use crate::sessionize::{self, SampleOrder};
use crate::spilling_join::once_each;
use crate::times::TimeLimits;
use crate::{Config, Error, Result};

pub(crate) use self::bucket_files::{LeftOut, WriteSpec};
use self::convert::check_types;
pub(crate) use self::counts::{ListCounts, NumberCounts};
pub(crate) use self::cut::CutSpec;
pub(crate) use self::decode::ListColumn;
pub(crate) use self::encode::SampleTotals;
pub(crate) use self::fold::{DIGEST, RECORD};
pub(crate) use self::fold::{FoldExec, FoldSpec};
pub(crate) use self::kept::kept_columns;
pub(crate) use self::merging::{LateSamples, MergedQueries, fold_old_samples};
pub(crate) use self::on_cluster::{RemoteClustering, WrittenSamples};
pub(crate) use self::origin::{
    OLD_SESSION, ORIGIN, Origin, PARTITION, SEQUENCE, float_column, kept_column, list_column,
    partition_column,
};
pub(crate) use self::partitions::Partitions;
pub(crate) use self::stage::StageExec;
pub(crate) use self::statistics::SampleStatistics;
pub(crate) use self::totals::same_hash;
pub(crate) use self::unfold::RowGroups;
pub(crate) use self::write::WriteExec;
pub(crate) use self::written_lists::{SentLists, WrittenLists};

/// The name of the table of records.
const RECORDS_TABLE: &str = "__onefold_records";
/// How often progress is reported.
const TICK: Duration = Duration::from_millis(200);
/// Sorted batches of a partition that wait to be written.
const WAITING: usize = 2;

/// How samples are clustered, in addition to the configuration.
#[derive(Debug, Clone)]
pub(crate) struct ClusterOptions {
    pub(crate) order: SampleOrder,
    /// Bytes for the last samples of sessions.
    pub(crate) state_bytes: usize,
    /// Bytes for the counts of vocabularies.
    pub(crate) budget: CountBudget,
    pub(crate) threads: usize,
    /// Row groups that are written at a time.
    pub(crate) row_groups: usize,
    /// Bytes of a row of the query.
    pub(crate) row_bytes: u64,
    /// Whether to observe which lists change together.
    pub(crate) observe_changes: bool,
    /// The times that samples may have, if nothing has checked them yet.
    pub(crate) time_limits: Option<TimeLimits>,
    /// The forms of the features' ids.
    pub(crate) ids: FeatureIds,
    /// The kept columns.
    pub(crate) kept: Vec<KeptColumn>,
}

/// Sorts the samples of a query into the order of a dataset.
pub(crate) struct Clustering {
    /// How what is sorted is cut into row groups.
    cut: CutSpec,
    /// What folds the samples, if they are not folded yet. The sort reads its records.
    fold: Option<Arc<FoldExec>>,
    totals_of_records: TotalsReader,
    /// Threads of the writer …
    threads: usize,
    /// … and row groups that they work at, at a time.
    row_groups: usize,
    context: Arc<TaskContext>,
    /// The sorted records: each partition has whole buckets.
    sorted: Vec<SendableRecordBatchStream>,
    /// The slices of every timeline, in partitions of the same buckets.
    slices: Vec<Arc<dyn ExecutionPlan>>,
    /// The tables that the slices are read from.
    slice_tables: SliceQueries,
    /// The first sorted batch of every partition, which is there when all samples are encoded.
    first: Vec<Option<RecordBatch>>,
    /// The totals of all samples, once they are encoded.
    totals: Option<SampleTotals>,
}

impl Clustering {
    /// Plans the clustering of the samples of [`sessionize::SAMPLES_VIEW`], which has these `columns`. Reads nothing but
    /// what says where slices of timelines lie.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for columns that are missing or have a type that does not fit.
    pub(crate) async fn plan(
        config: &Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
    ) -> Result<Self> {
        let encoder = encoder_options(config, options);
        let fold = fold_samples(config, context, columns, options, encoder, Some(options.threads)).await?;
        context.register_table(RECORDS_TABLE, Arc::new(fold.table()))?;
        let sessions = sessionize::sessions(config, columns)?;
        let records = sessionize::with_sessions(config, &sessions, RECORDS_TABLE);
        let records = ExchangedRecords::with_sessions(config, context, options.order, &records, None).await?;
        let mut planned = Self::of_records(config, context, columns, options, &sessions, records).await?;
        planned.fold = Some(fold);
        Ok(planned)
    }

    /// The clustering of samples that have these `records`. `sessions` is the query of their sessions.
    async fn of_records(
        config: &Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        sessions: &str,
        records: ExchangedRecords,
    ) -> Result<Self> {
        let exchange = BucketExchange::here(context, options.threads, options.order.buckets);
        let plan = records.sorted(context, exchange).await?;
        tracing::debug!("clustering:\n{}", displayable(plan.as_ref()).indent(false));
        // Every sort runs on a thread of its own.
        let sorted = execute_stream_partitioned(plan, context.task_ctx())?;
        let sorted = sorted.into_iter().map(|rows| stage("sort", || spawn_buffered(rows, WAITING))).collect();
        let queries = SliceQueries::new(config, context, columns, options, sessions).await?;
        let mut slices = Vec::new();
        for query in &queries.queries {
            let rows = context.query(query).await?.create_physical_plan().await?;
            slices.push(slices_in_order(config, context, rows, exchange).await?);
        }
        Ok(Self {
            cut: cut_spec(config, columns, options),
            fold: None,
            totals_of_records: TotalsReader::new(&statistics_options(config, options), &options.budget),
            threads: options.threads,
            row_groups: options.row_groups,
            context: context.task_ctx(),
            sorted,
            slices,
            slice_tables: queries,
            first: Vec::new(),
            totals: None,
        })
    }

    /// Encodes and sorts all samples. Returns their totals, or `None` if there are no samples.
    ///
    /// # Errors
    ///
    /// Those of the query, and [`Error::Fault`] for a value that no sample can have.
    pub(crate) async fn encode(&mut self, reporter: &dyn Reporter) -> Result<Option<&mut SampleTotals>> {
        reporter.begin("reading", None, "samples");
        self.first = {
            let totals = Mutex::new(&mut self.totals_of_records);
            let first = self.sorted.iter_mut().map(|sorted| first_records(sorted, &totals));
            let (mut first, mut seen) = (pin!(try_join_all(first)), 0);
            loop {
                if let Ok(first) = tokio::time::timeout(TICK, &mut first).await {
                    break first?;
                }
                let (samples, bytes) = self.fold.as_ref().map_or((0, 0), |fold| fold.read());
                reporter.advance(samples - seen);
                seen = samples;
                reporter.note(&format!("{} decoded", format_bytes(bytes)));
            }
        };
        reporter.end();
        match (&mut self.totals, self.totals_of_records.finish()?) {
            (Some(all), Some(totals)) => all.merge(totals)?,
            (all, totals) => *all = all.take().or(totals),
        }
        Ok(self.totals.as_mut().filter(|_| self.first.iter().any(Option::is_some)))
    }

    /// How what is sorted is cut into row groups. Without `digested`, somebody else digests what is decoded.
    pub(crate) fn cut(&self, digested: bool) -> CutSpec {
        CutSpec { digested, ..self.cut.clone() }
    }

    /// Writes the samples, and gives the buckets to `add` when their files are complete. `lists` are the list columns. To
    /// be called after [`encode`](Self::encode), which must have given samples. Gives their statistics and what was not
    /// written.
    ///
    /// # Errors
    ///
    /// Those of the engine and of writing; [`Error::Fault`] if the samples that come out are not those that went in.
    pub(crate) async fn write(
        mut self,
        spec: WriteSpec,
        lists: Vec<ListColumn>,
        reporter: &dyn Reporter,
        add: &mut (dyn FnMut(WrittenBucket) -> Result<()> + Send),
    ) -> Result<(SampleStatistics, LeftOut)> {
        let (totals, digested) = (self.take_totals()?, spec.cut.digested);
        let encoders = Encoders::new(self.threads, self.row_groups)?;
        let (slices, context) = (std::mem::take(&mut self.slices), Arc::clone(&self.context));
        // They live until all is read.
        let _tables = std::mem::take(&mut self.slice_tables);
        let records = self.records();
        let Some(schema) = records.first().map(|records| records.schema()) else {
            return Err(bug("records are sorted in no partition"));
        };
        let inputs = [once_each(&schema, records)?].into_iter().chain(slices).collect();
        let lists = WrittenLists::Here(lists);
        let plan = Arc::new(WriteExec::new(Arc::new(spec), lists, inputs, Some(encoders)));
        reporter.begin("writing", Some(totals.samples), "samples");
        let mut rows = execute_stream(Arc::clone(&plan) as _, context)?;
        let (mut decoded, mut left_out, mut seen) = (DecodedTotals::default(), LeftOut::default(), 0);
        loop {
            let next = tokio::time::timeout(TICK, rows.next()).await;
            let samples = plan.samples();
            reporter.advance(samples - seen);
            reporter.go_on()?;
            seen = samples;
            let Ok(next) = next else { continue };
            let Some(rows) = next.transpose()? else { break };
            for outcome in Outcome::read(&rows)? {
                match outcome {
                    Outcome::Bucket(bucket) => add(bucket)?,
                    Outcome::LeftOut(others) => left_out.merge(others),
                    Outcome::Decoded(others) => decoded.merge(&others),
                    Outcome::Folded(..) => return Err(bug("totals were read before")),
                }
            }
        }
        reporter.end();
        Ok((compared(totals, &decoded, digested)?, left_out))
    }

    /// Passes the samples to `output`, as [`write`](Self::write) passes them to files.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write), and those of `output`.
    pub(crate) async fn decode(
        mut self,
        lists: Vec<ListColumn>,
        reporter: &dyn Reporter,
        output: &mut dyn RowGroups,
    ) -> Result<()> {
        let totals = self.take_totals()?;
        let _tables = std::mem::take(&mut self.slice_tables);
        let (plans, context, cut) =
            (std::mem::take(&mut self.slices), Arc::clone(&self.context), self.cut.clone());
        let held = MemoryConsumer::new("decoding of samples").register(context.memory_pool());
        reporter.begin("comparing", Some(totals.samples), "samples");
        let mut decoded = DecodedTotals::default();
        for (partition, mut sorted) in self.records().into_iter().enumerate() {
            let slices = plans.iter().map(|plan| plan.execute(partition, Arc::clone(&context)));
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

    fn take_totals(&mut self) -> Result<SampleTotals> {
        self.totals.take().ok_or_else(|| bug("samples are written before they are encoded"))
    }

    /// The sorted records, partition by partition.
    fn records(self) -> Vec<SendableRecordBatchStream> {
        let whole = |(first, rest): (Option<RecordBatch>, SendableRecordBatchStream)| {
            let schema = rest.schema();
            let records = futures::stream::iter(first.map(Ok)).chain(rest);
            Box::pin(RecordBatchStreamAdapter::new(schema, records)) as SendableRecordBatchStream
        };
        self.first.into_iter().zip(self.sorted).map(whole).collect()
    }
}

/// Reads the totals at the beginning of sorted records, and gives the first batch behind them; `None` if there is none.
async fn first_records(
    sorted: &mut SendableRecordBatchStream,
    totals: &Mutex<&mut TotalsReader>,
) -> Result<Option<RecordBatch>> {
    while let Some(batch) = sorted.next().await.transpose()? {
        let records = totals.lock().unwrap_or_else(PoisonError::into_inner).read(&batch)?;
        if records.num_rows() > 0 {
            return Ok(Some(records));
        }
    }
    Ok(None)
}

/// The statistics of samples of which those were `decoded`.
///
/// # Errors
///
/// [`Error::Fault`] if these are others.
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

/// How sorted records are cut into row groups.
fn cut_spec(config: &Config, columns: &ArrowSchema, options: &ClusterOptions) -> CutSpec {
    let lists_of =
        |timeline: &TimelineConfig| timeline.columns.iter().map(|(list, _)| list.clone()).collect();
    CutSpec {
        partitions: Partitions::of(config),
        encoded: encoder_options(config, options),
        digested: true,
        buckets: options.order.buckets,
        timelines: config.timelines.iter().map(lists_of).collect(),
        place_of_slices: sessionize::place_of_slices(config),
        numbered_by: sessionize::numbered_by(config, columns, options.order),
    }
}

/// Plans the folding of the samples of [`sessionize::SAMPLES_VIEW`] by so many workers together, or of each part of the
/// samples for itself.
async fn fold_samples(
    config: &Config,
    context: &SessionContext,
    columns: &ArrowSchema,
    options: &ClusterOptions,
    encoder: EncoderOptions,
    workers: Option<usize>,
) -> Result<Arc<FoldExec>> {
    check_types(config, columns)?;
    let samples = context.query(&sessionize::samples(config, columns)?).await?;
    let input = OnCluster::inner(samples.create_physical_plan().await?);
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

/// The columns of the samples' query by their use.
fn column_names(config: &Config, options: &ClusterOptions) -> ColumnNames {
    let ids = &options.ids;
    ColumnNames {
        keys: sessionize::record_columns(config),
        identity: sessionize::identity_columns(config),
        order: config.order.clone(),
        floats: config.schema.float_columns().map(str::to_owned).collect(),
        lists: logged_lists(config).map(|feature| (feature.name.clone(), ids.of(&feature.name))).collect(),
        positions: sessionize::position_columns(config),
        kept: options.kept.clone(),
        time_limits: None,
    }
}

/// The list columns of the samples: those of the log, then those that timelines make.
pub(crate) fn list_names(config: &Config) -> impl Iterator<Item = &str> {
    let made = config.timelines.iter().flat_map(|timeline| &timeline.columns);
    logged_lists(config).map(|list| list.name.as_str()).chain(made.map(|(feature, _)| feature.as_str()))
}

/// The lists that the log has: not those that timelines make.
fn logged_lists(config: &Config) -> impl Iterator<Item = &SparseFeature> {
    config.schema.sparse_features().filter(|feature| config.timeline_of(&feature.name).is_none())
}

fn encoder_options(config: &Config, options: &ClusterOptions) -> EncoderOptions {
    let lists = logged_lists(config);
    EncoderOptions {
        floats: config.schema.float_columns().map(str::to_owned).collect(),
        lists: lists.map(|list| (list.name.clone(), list.kind == SparseKind::Sequence)).collect(),
        kept: options.kept.clone(),
        digested: logged_lists(config).count(),
        first_worker: 0,
        timelines: config.timelines.iter().map(|timeline| timeline.columns.len()).collect(),
        keyed: !config.samples.key.is_empty(),
        gap_micros: match config.session {
            Sessions::Key(_) => None,
            Sessions::Gap { gap_micros, .. } => Some(gap_micros),
        },
        chained: options.order.order.is_clustered(),
        state_bytes: options.state_bytes / options.threads.max(1),
    }
}

fn statistics_options(config: &Config, options: &ClusterOptions) -> StatisticsOptions {
    let place = |name: &String| config.vocabularies.keys().position(|known| known == name);
    let vocabulary_of = logged_lists(config).map(|feature| feature.vocabulary.as_ref().and_then(place));
    StatisticsOptions {
        vocabularies: config.vocabularies.keys().cloned().collect(),
        vocabulary_of: vocabulary_of.collect(),
        timelines: config.timelines.iter().map(|timeline| timeline.columns.len()).collect(),
        changes: options.observe_changes,
        values: true,
    }
}
