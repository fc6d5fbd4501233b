//! Reads all samples of a configuration, for builds and comparisons: the engine, its plan, and its errors.

use std::collections::BTreeMap;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use datafusion::prelude::SessionContext;
use onefold_base::progress::Reporter;
use onefold_datasets::{Buckets, CountBudget, KeptColumn, Order, OriginalKind, PartitionColumn};
use onefold_sql::Query as _;

use crate::cluster::{ClusterOptions, Clustering, SampleTotals, kept_columns};
use crate::config::Config;
use crate::engine::{self, EngineOptions};
use crate::error::{Error, Result};
use crate::ids::FeatureIds;
use crate::problems::Problems;
use crate::row_counts::{Reason, RowCounts};
use crate::samples::{self, Samples};
use crate::sessionize::{self, NARROW_VIEW, SAMPLES_VIEW, SampleOrder};
use crate::sources::{self, Source};

/// The samples to read, and their order.
#[derive(Debug, Clone)]
pub(crate) struct ReadingOptions {
    pub(crate) order: Order,
    /// The buckets; chosen by the number of samples if `None`.
    pub(crate) buckets: Option<Buckets>,
    /// Whether to observe which lists change together.
    pub(crate) observe_changes: bool,
    /// The range of buckets whose samples are read; all buckets if `None`.
    pub(crate) only_range: Option<u32>,
    /// The approximate number of samples to take, in whole sessions; all if `None`.
    pub(crate) about_samples: Option<u64>,
    /// The kinds of the vocabularies of the dataset that is appended to or compared with, if there is one.
    pub(crate) vocabularies: BTreeMap<String, OriginalKind>,
}

/// The planned samples of a configuration.
pub(crate) struct Reading<'a> {
    config: &'a Config,
    options: &'a EngineOptions,
    wanted: ReadingOptions,
    pub(crate) sources: Vec<Source>,
    /// The destination of problems.
    problems: Problems,
    pub(crate) context: SessionContext,
    pub(crate) planned: Samples,
    /// The number of samples from which a range or some sessions are taken; `None` if all are taken and no step has
    /// counted them.
    pub(crate) candidates: Option<u64>,
    /// The fraction of the sessions that is taken.
    pub(crate) share: f64,
    /// The memory budget for the counts and texts of vocabularies.
    pub(crate) budget: CountBudget,
    /// The forms of the ids of features, and the texts that were collected.
    pub(crate) ids: FeatureIds,
    /// The columns that the dataset keeps besides the features.
    pub(crate) kept: Vec<KeptColumn>,
}

impl<'a> Reading<'a> {
    /// Plans the samples of `sources`, and runs the queries that the declared steps need first.
    ///
    /// # Errors
    ///
    /// The errors of [`samples::plan`], and [`Error::Fault`] for a kept column with an unsupported type.
    pub(crate) async fn plan(
        config: &'a Config,
        (sources, problems): (Vec<Source>, Problems),
        options: &'a EngineOptions,
        wanted: ReadingOptions,
    ) -> Result<Self> {
        let context = engine::context(options, !config.vocabularies.is_empty())?;
        sources::register(&context, &sources).await?;
        samples::register_queries(&context, config).await?;
        let budget = CountBudget::new(engine::state_bytes(options.memory_limit) as u64);
        let rows = samples::rows(&context, config).await?;
        let ids = FeatureIds::plan(config, &context, rows.schema().as_arrow(), &wanted.vocabularies, &budget);
        let ids = ids.await?;
        let mut planned = samples::plan(&context, config, &problems).await?;
        let takes_some = wanted.only_range.is_some() || wanted.about_samples.is_some();
        let candidates = match planned.expected {
            None if takes_some => Some(planned.narrow.clone().count().await? as u64),
            expected => expected,
        };
        if wanted.only_range.is_some() {
            // No step has counted the samples of a range.
            planned.expected = None;
        }
        let share = register_samples(config, &context, &planned, (&wanted, candidates)).await?;
        let kept = kept_columns(config, planned.wide.schema().as_arrow())?;
        Ok(Self {
            config,
            options,
            wanted,
            sources,
            problems,
            context,
            planned,
            candidates,
            share,
            budget,
            ids,
            kept,
        })
    }

    /// Returns the partition columns of the dataset, with their types in the samples.
    pub(crate) fn partition_columns(&self) -> Vec<PartitionColumn> {
        sessionize::partition_columns(self.config, self.planned.wide.schema().as_arrow())
    }

    /// Returns the buckets that sessions are divided into.
    pub(crate) fn buckets(&self) -> Buckets {
        let samples = || self.planned.expected.or_else(|| sources::total_rows(&self.sources)).unwrap_or(0);
        let by_size = || buckets_of_ranges(self.wanted.order, Buckets::of_samples(samples()).ranges());
        self.wanted.buckets.unwrap_or_else(by_size)
    }

    /// Returns the number of sessions that partition columns cut into several.
    pub(crate) async fn cut_sessions(&self) -> Result<u64> {
        let columns = self.planned.wide.schema().as_arrow();
        let Some(sql) = sessionize::cut_sessions(self.config, columns)? else { return Ok(0) };
        let batches = self.context.query(&sql).await?.collect().await?;
        let counts = batches.iter().flat_map(|batch| batch.column(0).as_primitive::<Int64Type>().values());
        Ok(counts.sum::<i64>().unsigned_abs())
    }

    /// Plans the clustering of the samples.
    pub(crate) async fn clustering(&self) -> Result<Clustering<'a>> {
        let columns = self.planned.wide.schema().as_arrow();
        let planned = Clustering::plan(self.config, &self.context, columns, &self.cluster_options()).await;
        planned.map_err(|error| error.explained(sources::without_rows(&self.sources)))
    }

    /// Returns whether a cluster reads the samples.
    pub(crate) fn is_on_cluster(&self) -> bool {
        self.options.cluster.is_some()
    }

    /// Returns the options for clustering the samples.
    pub(crate) fn cluster_options(&self) -> ClusterOptions {
        ClusterOptions {
            order: SampleOrder { order: self.wanted.order, buckets: self.buckets() },
            state_bytes: engine::state_bytes(self.options.memory_limit),
            budget: self.budget.clone(),
            threads: self.options.threads,
            row_groups: engine::row_groups(self.options.memory_limit, self.options.threads),
            row_bytes: sources::widest_row_bytes(&self.sources),
            observe_changes: self.wanted.observe_changes,
            time_limits: self.planned.time_limits,
            ids: self.ids.clone(),
            kept: self.kept.clone(),
            problems: self.problems.clone(),
        }
    }

    /// Folds the samples. Returns their totals, or `None` if there are no samples.
    ///
    /// # Errors
    ///
    /// The errors of [`Clustering::fold`], all problems that were collected, and [`Error::Fault`] if the declared steps
    /// counted another number of samples.
    pub(crate) async fn fold<'c>(
        &self,
        clustering: &'c mut Clustering<'_>,
        reporter: &dyn Reporter,
    ) -> Result<Option<&'c mut SampleTotals>> {
        let totals = clustering.fold(reporter).await.map_err(|error| self.problems.and(error))?;
        // All input has been read.
        self.problems.check()?;
        self.check_count(totals.as_ref().map_or(0, |totals| totals.samples), None)?;
        Ok(totals)
    }

    /// Checks that the number of samples that were read equals the number that the declared steps counted. `found`
    /// samples were read, and a merge has left out `known` samples before.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the numbers differ.
    pub(crate) fn check_count(&self, found: u64, known: Option<u64>) -> Result<()> {
        let read = found + known.unwrap_or(0);
        // If only some sessions are taken, no step has counted their samples.
        let Some(expected) = self.planned.expected.filter(|expected| *expected != read && self.share == 1.0)
        else {
            return Ok(());
        };
        let existing = known.map_or_else(String::new, |known| format!(", besides {known} existing ones"));
        Err(Error::engine(
            format!(
                "the declared steps counted {expected} samples, but {found} were read afterwards{existing}"
            ),
            "the query and the conditions must give the same rows each time they are evaluated: remove `random()` and \
             the like, and check that no source changed meanwhile",
        ))
    }

    /// Returns the counts for the rows of `[samples]`. `samples` were read; `others` of them belong to partitions that
    /// are not written.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a row is not accounted for.
    pub(crate) fn row_counts(&self, samples: u64, others: u64) -> Result<RowCounts> {
        let mut rows = self.rows_of(samples);
        let reason = if self.wanted.only_range.is_some() { Reason::OtherRange } else { Reason::OtherSession };
        if self.wanted.only_range.is_some() || self.share < 1.0 {
            rows.leave_out(reason, self.candidates.unwrap_or(samples).saturating_sub(samples));
        }
        rows.leave_out(Reason::OtherPartition, others);
        rows.written = samples.saturating_sub(others);
        rows.check()?;
        Ok(rows)
    }

    /// Returns the numbers of rows that the declared steps read and left out. Without steps, each row is one of the
    /// `samples`, or of the samples from which they were taken.
    pub(crate) fn rows_of(&self, samples: u64) -> RowCounts {
        let read = self.candidates.unwrap_or(samples);
        self.planned.rows.clone().unwrap_or(RowCounts { read, ..RowCounts::default() })
    }

    /// Returns the error for a query without samples.
    pub(crate) fn no_samples(&self) -> Error {
        let hint = "check that the logs are not empty, that the join's keys match, and the query's `WHERE`";
        Error::no_samples(&self.config.path, hint)
    }
}

/// Returns the buckets of a new dataset with `ranges` ranges. In arrival order a range is one bucket, because sorting
/// by smaller buckets would change the order in which a service logs samples.
pub(crate) fn buckets_of_ranges(order: Order, ranges: u32) -> Buckets {
    match order {
        Order::Session | Order::SessionHash => Buckets::of_ranges(ranges),
        Order::Arrival => Buckets::with_own_files(ranges),
    }
}

/// Registers the views of the samples: all of them, those of the sessions that are taken, or those of the range.
/// Returns the fraction of the sessions that is taken.
async fn register_samples(
    config: &Config,
    context: &SessionContext,
    planned: &Samples,
    (wanted, candidates): (&ReadingOptions, Option<u64>),
) -> Result<f64> {
    let all = candidates.filter(|_| wanted.about_samples.is_some()).unwrap_or(0);
    let (share, taken) = sessionize::taken(config, wanted.about_samples.unwrap_or(0), all);
    let of_range = wanted.buckets.zip(wanted.only_range);
    let of_range = of_range.map(|(buckets, range)| sessionize::in_range(config, buckets, range));
    for (view, samples) in [(SAMPLES_VIEW, &planned.wide), (NARROW_VIEW, &planned.narrow)] {
        let mut samples = samples.clone();
        for condition in taken.iter().chain(&of_range) {
            samples = samples.clone().filter(samples.parse_sql_expr(condition)?)?;
        }
        context.register_table(view, samples.into_view())?;
    }
    Ok(share)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use datafusion::arrow::array::{Int64Array, RecordBatch};
    use onefold_base::progress::Silent;
    use parquet::arrow::ArrowWriter;

    use super::*;

    const CONFIG: &str = "format_version = 1\n[sources]\nlog = \"log.parquet\"\n[samples]\nsource = \"log\"\n\
         [session]\nkey = [\"id\"]\ntime = { column = \"id\", unit = \"s\" }\n\
         [checks]\nnot_before = 1970-01-01\n[features]\nid = { kind = \"label\" }\nx = { kind = \"dense\" }\n";

    /// Reads three samples, after the steps are made to report that they counted `counted` samples.
    fn read(folder: &Path, counted: Option<u64>) -> Result<u64> {
        let config = Config::parse(&folder.join("dataset.toml"), CONFIG).unwrap();
        let options = EngineOptions {
            memory_limit: 1 << 28,
            threads: 1,
            spill_directory: None,
            spill_limit: None,
            cluster: None,
        };
        let wanted = ReadingOptions {
            order: Order::Session,
            buckets: None,
            observe_changes: false,
            only_range: None,
            about_samples: None,
            vocabularies: BTreeMap::new(),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let problems = Problems::default();
            let sources = sources::find(&config, &problems).await?;
            let mut reading = Reading::plan(&config, (sources, problems), &options, wanted).await?;
            assert_eq!(reading.planned.expected, Some(3));
            reading.planned.expected = counted;
            let mut clustering = reading.clustering().await?;
            Ok(reading.fold(&mut clustering, &Silent).await?.map_or(0, |totals| totals.samples))
        })
    }

    #[test]
    fn samples_that_were_counted_and_not_read_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let ids = Int64Array::from(vec![1, 2, 3]);
        let batch =
            RecordBatch::try_from_iter([("id", Arc::new(ids.clone()) as _), ("x", Arc::new(ids) as _)])
                .unwrap();
        let file = fs_err::File::create(folder.path().join("log.parquet")).unwrap();
        let mut writer = ArrowWriter::try_new(file.into_file(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        assert_eq!(read(folder.path(), Some(3)).unwrap(), 3);
        assert_eq!(read(folder.path(), None).unwrap(), 3);
        for counted in [2, 4] {
            let error = read(folder.path(), Some(counted)).unwrap_err().to_string();
            let message = format!("counted {counted} samples, but 3 were read");
            assert!(error.contains(&message) && error.contains("random()"), "{error}");
        }
    }
}
