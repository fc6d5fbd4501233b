//! What everything that reads all samples of a configuration has in common: the engine, its plan, and what happens when it
//! cannot go on.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use datafusion::prelude::SessionContext;
use onefold_datasets::progress::Reporter;
use onefold_datasets::{CountBudget, Order};
use tokio::runtime::Runtime;

use crate::cluster::{ClusterOptions, Clustering, Folded};
use crate::engine::{self, EngineOptions, Joins};
use crate::samples::{self, Samples};
use crate::sessionize::{self, NARROW_VIEW, SAMPLES_VIEW};
use crate::sources::{self, Source};
use crate::{Config, Error, Result};

/// Runs `work` on an engine's runtime. If a join's held side does not fit into memory, it is run again with sorted joins.
/// Where the engine cannot read a source, the error names it.
///
/// # Errors
///
/// Those of `work`.
pub(crate) fn run<T>(
    config: &Config,
    threads: usize,
    reporter: &dyn Reporter,
    work: impl AsyncFn(Joins) -> Result<T>,
) -> Result<T> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(threads.max(1)).enable_all().build()?;
    let once = |joins| name_unreadable(config, &runtime, || runtime.block_on(work(joins)));
    match once(Joins::Hash) {
        // The held side of a hash join cannot spill. Nothing was written yet, or it was removed again.
        Err(Error::Memory { message }) => {
            tracing::info!("again, with sorted joins: {message}");
            reporter.end();
            once(Joins::Sorted)
        }
        other => other,
    }
}

/// Runs the engine. Where it cannot read a source, which decoders of damaged bytes say by an error or a panic, the
/// source is named; other panics go on.
fn name_unreadable<T>(config: &Config, runtime: &Runtime, engine: impl FnOnce() -> Result<T>) -> Result<T> {
    let find_unreadable = || runtime.block_on(sources::find_unreadable(config));
    match catch_unwind(AssertUnwindSafe(engine)) {
        Ok(Err(error @ Error::Unreadable { .. })) => Err(find_unreadable().unwrap_or(error)),
        Ok(result) => result,
        Err(panic) => match find_unreadable() {
            Some(error) => Err(error),
            None => resume_unwind(panic),
        },
    }
}

/// What is wanted of the samples.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) order: Order,
    /// Whether to observe which lists change together.
    pub(crate) observe_changes: bool,
    /// About how many samples, in whole sessions; all if `None`.
    pub(crate) about_samples: Option<u64>,
}

/// The samples of a configuration, planned.
pub(crate) struct Reading<'a> {
    config: &'a Config,
    options: &'a EngineOptions,
    pub(crate) sources: Vec<Source>,
    pub(crate) context: SessionContext,
    pub(crate) planned: Samples,
    /// The share of the sessions that is taken.
    pub(crate) share: f64,
    /// For the counts of vocabularies.
    pub(crate) budget: CountBudget,
}

impl<'a> Reading<'a> {
    /// Plans the samples over `sources`, and runs what the declared steps need to know first.
    ///
    /// # Errors
    ///
    /// As [`samples::plan`].
    pub(crate) async fn plan(
        config: &'a Config,
        sources: Vec<Source>,
        options: &'a EngineOptions,
        joins: Joins,
        wanted: &Wanted,
    ) -> Result<Self> {
        let context = engine::context(config, options, joins)?;
        sources::register(&context, &sources).await?;
        let planned = samples::plan(&context, config).await?;
        let share = register_samples(config, &context, &planned, wanted.about_samples).await?;
        let budget = CountBudget::new(engine::state_bytes(options.memory_limit) as u64);
        Ok(Self { config, options, sources, context, planned, share, budget })
    }

    /// Plans their clustering.
    ///
    /// # Errors
    ///
    /// As [`Clustering::plan`].
    pub(crate) async fn clustering(&self, wanted: &Wanted) -> Result<Clustering<'a>> {
        let rows = engine::batch_rows(sources::widest_row_bytes(&self.sources));
        let options = ClusterOptions {
            order: wanted.order,
            state_bytes: engine::state_bytes(self.options.memory_limit),
            budget: self.budget.clone(),
            threads: self.options.threads,
            query_batch_rows: rows.min(self.context.copied_config().batch_size()),
            observe_changes: wanted.observe_changes,
            not_after: self.planned.not_after,
        };
        let columns = self.planned.wide.schema().as_arrow();
        Clustering::plan(self.config, &self.context, columns, &options).await
    }

    /// Folds and sorts them; gives what is known then.
    ///
    /// # Errors
    ///
    /// As [`Clustering::fold`], and [`Error::NoSamples`] if there are none.
    pub(crate) async fn fold<'c>(
        &self,
        clustering: &'c mut Clustering<'_>,
        reporter: &dyn Reporter,
    ) -> Result<&'c Folded> {
        clustering.fold(reporter).await?.ok_or_else(|| {
            let hint =
                "check that the logs are not empty, that the join's keys match, and the query's `WHERE`";
            Error::NoSamples { path: self.config.path.clone(), hint: hint.to_owned() }
        })
    }
}

/// Makes the samples views of the query, or those of the sessions that are taken; gives the share of these.
async fn register_samples(
    config: &Config,
    context: &SessionContext,
    planned: &Samples,
    about: Option<u64>,
) -> Result<f64> {
    let all = match (about, planned.expected) {
        (None, _) => 0,
        (Some(_), Some(expected)) => expected,
        (Some(_), None) => planned.narrow.clone().count().await? as u64,
    };
    let (share, taken) = sessionize::taken(config, about.unwrap_or(0), all);
    for (view, samples) in [(SAMPLES_VIEW, &planned.wide), (NARROW_VIEW, &planned.narrow)] {
        let samples = match &taken {
            None => samples.clone(),
            Some(condition) => samples.clone().filter(samples.parse_sql_expr(condition)?)?,
        };
        context.register_table(view, samples.into_view())?;
    }
    Ok(share)
}
