//! Clusters late samples together with those of a dataset. Both are encoded as delta records of the same shape,
//! then sorted and decoded together.
//!
//! The lists of a late sample are those of its log, then those that timelines produce. The latter are empty in its
//! record and filled when it is decoded. The record of a sample of a dataset contains all of its lists.

use std::sync::Arc;

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::physical_plan::displayable;
use datafusion::prelude::SessionContext;
use onefold_base::progress::Reporter;
use onefold_datasets::{KeptColumn, SparseKind};

use super::by_bucket::ExchangedRecords;
use super::clustering::{Clustering, RECORDS_TABLE, fold_samples, ticking};
use super::convert::ColumnNames;
use super::encode::{EncoderOptions, SampleTotals};
use super::fold::{FoldExec, FoldSpec};
use super::options::{ClusterOptions, encoder_options, list_names, statistics_options};
use super::origin::{self, OLD_SESSION, PARTITION, SEQUENCE};
use super::statistics::StatisticsOptions;
use super::totals::TotalsReader;
use crate::config::Config;
use crate::error::{Result, bug};
use crate::ids::IdForm;
use crate::remote::{OnCluster, cluster_of};
use crate::sessionize::{self, TIME};
use crate::spool::Spool;

/// Late samples whose records are stored in a table.
#[derive(Debug)]
pub(crate) struct LateSamples {
    pub(crate) totals: SampleTotals,
}

/// The queries of a merge.
#[derive(Debug)]
pub(crate) struct MergedQueries {
    /// The query of the late samples' sessions.
    pub(crate) sessions: String,
    /// The query of the records of all samples with their sessions, in no particular order.
    pub(crate) records: String,
    /// A column that orders samples with equal times before the order columns of the configuration.
    pub(crate) first: Option<&'static str>,
}

impl LateSamples {
    /// The name of the table of the records, which the query given to [`encode`](Self::encode) reads.
    pub(crate) const RECORDS: &str = RECORDS_TABLE;

    /// Encodes the samples of [`sessionize::SAMPLES_VIEW`], which has these `columns`. Evaluates the query `sql`
    /// over the records and stores the result as the table `table`. The table has the columns of
    /// [`sessionize::record_columns`], time, digest, record, and the columns that the query adds.
    pub(crate) async fn encode(
        config: &Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        (spool, table, sql): (&mut Spool, &str, &str),
        reporter: &dyn Reporter,
    ) -> Result<Self> {
        let encoder = merged_options(config, options);
        let workers = workers(context, options);
        let fold = fold_samples(config, context, columns, options, encoder, workers).await?;
        context.register_table(RECORDS_TABLE, Arc::new(fold.table()))?;
        let folded = format!("{table}_and_totals");
        reporter.begin("reading", None, "samples");
        let mut seen = 0;
        let progress = || -> Result<()> {
            let (samples, _) = fold.read();
            reporter.advance(samples - seen);
            seen = samples;
            Ok(reporter.go_on()?)
        };
        ticking(spool.table(context, &folded, sql), progress).await??;
        context.deregister_table(RECORDS_TABLE)?;
        reporter.end();
        let texts = config.vocabularies.keys().map(|name| options.ids.shared_texts(name)).collect();
        let mut totals =
            TotalsReader::new(&statistics_options(config, options), &options.budget).with_texts(texts);
        let records = totals.read_table(context.table(&folded).await?).await?;
        context.register_table(table, records.into_view())?;
        let totals = totals.finish()?.ok_or_else(|| bug("the samples have no totals"))?;
        Ok(Self { totals })
    }
}

/// Plans the folding of the samples of the table `samples`, which has the columns of [`origin`]. Registers the
/// result as the table `records`, which can be read once. Its columns are those of [`origin::record_columns`],
/// time, digest, record, and a flag that marks parts of the totals.
pub(crate) async fn fold_old_samples(
    config: &Config,
    context: &SessionContext,
    options: &ClusterOptions,
    samples: &str,
    records: &str,
) -> Result<()> {
    let input = OnCluster::inner(context.table(samples).await?.create_physical_plan().await?);
    tracing::debug!("samples of the dataset:\n{}", displayable(input.as_ref()).indent(false));
    let encoder = EncoderOptions {
        gap_micros: None,
        first_worker: options.threads.max(1),
        ..merged_options(config, options)
    };
    let lists = encoder.lists.len();
    let kept = encoder.kept.iter().enumerate();
    let kept = kept.map(|(i, column)| KeptColumn { name: origin::kept_column(i), kind: column.kind });
    let weight = config.schema.float_columns().position(|name| Some(name) == config.schema.weight.as_deref());
    let names = ColumnNames {
        keys: origin::record_columns(config),
        identity: vec![PARTITION.to_owned(), OLD_SESSION.to_owned()],
        // Partitions of the dataset have folders already.
        partition: Vec::new(),
        order: if config.order.is_empty() { Vec::new() } else { vec![SEQUENCE.to_owned()] },
        floats: (0..encoder.floats.len()).map(origin::float_column).collect(),
        weight: weight.map(origin::float_column),
        lists: (0..lists).map(|list| (origin::list_column(list), IdForm::Integers)).collect(),
        positions: sessionize::position_columns(config),
        kept: kept.collect(),
        time: TIME.to_owned(),
        time_limits: None,
        problems: options.problems.clone(),
    };
    let statistics = StatisticsOptions {
        vocabularies: Vec::new(),
        vocabulary_of: vec![None; lists],
        timelines: config.timelines.iter().map(|timeline| timeline.columns.len()).collect(),
        changes: false,
        values: false,
    };
    let spec = FoldSpec {
        names,
        encoder,
        statistics,
        workers: workers(context, options),
        row_bytes: options.row_bytes,
    };
    let fold = Arc::new(FoldExec::new(spec, options.budget.clone(), input)?);
    context.deregister_table(records)?;
    context.register_table(records, Arc::new(fold.table()))?;
    Ok(())
}

/// Returns the number of workers that fold samples together; `None` on a cluster, where each part is folded
/// independently.
fn workers(context: &SessionContext, options: &ClusterOptions) -> Option<usize> {
    cluster_of(&context.copied_config()).is_none().then(|| options.threads.max(1))
}

impl<'a> Clustering<'a> {
    /// Creates the clustering of late samples and samples of a dataset.
    pub(crate) async fn merged(
        config: &'a Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        late: LateSamples,
        queries: &MergedQueries,
    ) -> Result<Self> {
        let MergedQueries { sessions, records, first } = queries;
        let records =
            ExchangedRecords::with_sessions(config, context, options.order, records, *first).await?;
        let planned = Self::of_records(config, context, columns, options, sessions, records).await?;
        Ok(planned.of_merged(merged_options(config, options), late.totals))
    }
}

/// Returns the encoder options of late samples and of samples of the dataset.
fn merged_options(config: &Config, options: &ClusterOptions) -> EncoderOptions {
    let is_sequence = |name: &str| {
        config.schema.sparse_features().any(|list| list.name == name && list.kind == SparseKind::Sequence)
    };
    let lists = list_names(config).map(|name| (name.to_owned(), is_sequence(name))).collect();
    EncoderOptions { lists, ..encoder_options(config, options) }
}
