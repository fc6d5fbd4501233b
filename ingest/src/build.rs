//! Runs a configuration: raw logs to a committed dataset.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use datafusion::execution::SessionStateBuilder;
use datafusion::execution::context::SQLOptions;
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::physical_plan::{displayable, execute_stream};
use datafusion::prelude::{DataFrame, SessionConfig, SessionContext};
use futures::StreamExt;
use onefold_datasets::console::{Reporter, peak_rss_bytes};
use onefold_datasets::{DatasetWriter, Layout, Manifest, Order, WriterOptions};
use serde::Serialize;

use crate::assemble::{Assembler, check_types};
use crate::probe_lists::physical_rules;
use crate::sessionize::{SAMPLES_VIEW, ordered_samples};
use crate::{Config, Error, Result, sources};

/// Bytes that a batch between two of the engine's operators should have. A merge of spilled runs holds a batch of
/// every run, and one row can hold thousands of ids, so the rows of a batch follow from their width.
const ENGINE_BATCH_BYTES: u64 = 1 << 20;

/// How a dataset is built.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// Bytes that DataFusion's sorts, joins, aggregations and windows may hold together. Sorts and aggregations spill
    /// beyond it; a join holds its side without lists and fails with [`Error::Memory`] if that does not fit. Its scans
    /// and the row group being written (64 MiB decoded) come on top.
    pub memory_limit: u64,
    /// Threads of the engine.
    pub threads: usize,
    /// Whether an existing dataset is replaced.
    pub overwrite: bool,
    /// Where operators spill; the system's temporary directory if `None`.
    pub spill_directory: Option<PathBuf>,
}

/// What a build did.
#[derive(Debug, Clone, Serialize)]
pub struct BuildSummary {
    /// Samples written.
    pub samples: u64,
    /// Sessions they belong to.
    pub sessions: u64,
    /// `samples / sessions`.
    pub samples_per_session: f64,
    /// Partitions written.
    pub partitions: usize,
    /// Files written.
    pub files: usize,
    /// Size of the files.
    pub bytes_on_disk: u64,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// Rows of the sources, all together.
    pub source_rows: u64,
    /// Time from start to commit.
    pub wall_seconds: f64,
    /// `samples / wall_seconds`.
    pub samples_per_second: f64,
    /// Largest resident set of the process, where the kernel tells.
    pub peak_rss_bytes: Option<u64>,
}

/// Builds the dataset of `config` in the directory `out`. Nothing of it is visible before it is complete.
///
/// # Errors
///
/// [`Error::Source`], [`Error::Config`] and [`Error::Column`] for what is found wrong before or while the
/// query runs, [`Error::NoSamples`] if it gives none, [`Error::Memory`] if an operator that cannot spill
/// needs more than the limit, [`Error::Dataset`] if `out` may not be or cannot be written. After any error
/// `out` is as it was.
pub fn build(
    config: &Config,
    out: &Path,
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<BuildSummary> {
    let started = Instant::now();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(options.threads.max(1)).build()?;
    let (manifest, source_rows) =
        name_unreadable(config, || runtime.block_on(run(config, out, options, reporter)))?;
    let wall_seconds = started.elapsed().as_secs_f64();
    let statistics = &manifest.statistics;
    Ok(BuildSummary {
        samples: statistics.samples,
        sessions: statistics.sessions,
        samples_per_session: statistics.samples as f64 / statistics.sessions.max(1) as f64,
        partitions: manifest.partitions.len(),
        files: manifest.partitions.iter().map(|partition| partition.files.len()).sum(),
        bytes_on_disk: statistics.bytes_on_disk,
        layout: manifest.layout,
        order: manifest.order,
        source_rows,
        wall_seconds,
        samples_per_second: statistics.samples as f64 / wall_seconds,
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// Runs the engine. Where it cannot read a source, which decoders of damaged bytes say by an error or a panic, the
/// source is named; other panics go on.
fn name_unreadable<T>(config: &Config, engine: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(engine)) {
        Ok(Err(error @ Error::Unreadable { .. })) => Err(sources::find_unreadable(config).unwrap_or(error)),
        Ok(result) => result,
        Err(panic) => match sources::find_unreadable(config) {
            Some(error) => Err(error),
            None => resume_unwind(panic),
        },
    }
}

async fn run(
    config: &Config,
    out: &Path,
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<(Manifest, u64)> {
    let sources = sources::find(config)?;
    let context = context(options, sources::widest_row_bytes(&sources))?;
    sources::register(&context, &sources).await?;
    let samples = user_query(&context, config).await?;
    let columns = samples.schema().as_arrow().clone();
    let sql = ordered_samples(config, &columns, options.order)?;
    check_types(config, &columns)?;
    context.register_table(SAMPLES_VIEW, samples.into_view())?;
    let ordered = context.sql(&sql).await?;
    let assembler = Assembler::new(config);

    let writer_options = WriterOptions {
        layout: options.layout,
        overwrite: options.overwrite,
        ..WriterOptions::new(options.order)
    };
    let mut writer = DatasetWriter::create(out, config.schema.clone(), writer_options)?;
    reporter.begin("building", None, "samples");
    let plan = ordered.create_physical_plan().await?;
    tracing::debug!("plan:\n{}", displayable(plan.as_ref()).indent(false));
    let mut stream = execute_stream(plan, context.task_ctx())?;
    let mut samples = 0;
    while let Some(rows) = stream.next().await {
        for (key, batch) in assembler.assemble(&rows?)? {
            writer.write(&key, &batch)?;
            samples += batch.num_rows() as u64;
            reporter.advance(batch.num_rows() as u64);
        }
    }
    reporter.end();
    if samples == 0 {
        let hint = "check that the logs are not empty, that the join's keys match, and the query's `WHERE`"
            .to_owned();
        return Err(Error::NoSamples { path: config.path.clone(), hint });
    }
    Ok((writer.finish()?, sources::total_rows(&sources)))
}

fn context(options: &BuildOptions, row_bytes: u64) -> Result<SessionContext> {
    let limit = usize::try_from(options.memory_limit).unwrap_or(usize::MAX);
    let mut runtime = RuntimeEnvBuilder::new().with_memory_pool(Arc::new(FairSpillPool::new(limit)));
    if let Some(directory) = &options.spill_directory {
        runtime = runtime.with_temp_file_path(directory);
    }
    let runtime: Arc<RuntimeEnv> = runtime.build_arc()?;
    let batch_rows = (ENGINE_BATCH_BYTES / row_bytes.max(1)).clamp(16, 8192) as usize;
    // What every sort sets aside for merging its runs: DataFusion's 10 MiB, less where that would use up the limit.
    let merge_bytes = (limit / (8 * options.threads.max(1))).min(10 << 20);
    let session = SessionConfig::new()
        .with_target_partitions(options.threads.max(1))
        .with_batch_size(batch_rows)
        .with_sort_spill_reservation_bytes(merge_bytes)
        // One last sort, not one a thread and a merge of them: the sorts would use up the limit before the merge asks
        // for its share, which cannot spill.
        .with_repartition_sorts(false)
        // DataFusion 55 takes a float column whose statistics show one value for constant, and loses its NaNs.
        .with_collect_statistics(false)
        .with_information_schema(false);
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(session)
        .with_runtime_env(runtime)
        .with_physical_optimizer_rules(physical_rules())
        .build();
    Ok(SessionContext::new_with_state(state))
}

/// Plans the user's query, which may only read.
async fn user_query(context: &SessionContext, config: &Config) -> Result<DataFrame> {
    let read_only =
        SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let planned = context.sql_with_options(&config.query, read_only).await;
    planned.map_err(|error| Error::Config {
        path: config.path.clone(),
        message: format!("`[samples].query`: {}", error.strip_backtrace()),
        hint: format!(
            "write one `SELECT` in DataFusion's SQL over the tables {}",
            config.sources.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        ),
    })
}
