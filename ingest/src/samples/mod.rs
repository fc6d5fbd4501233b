//! From logs to samples: the declared steps of `dataset.toml`, as SQL over the sources.
//!
//! ```text
//! rows of the feature log ─▶ checks ─▶ first of every key ─▶ labels from events ─▶ attributes as of the time ─▶ sampling
//! ```
//!
//! Every step is decided in **narrow** tables of keys and times, which spill and are spooled (`spool`). The
//! log with its lists is only streamed past them: as the probe side of hash joins against tables without lists, and
//! through no sort, except for the few rows whose key occurs twice. Since the log has no row number, those rows are
//! ranked by time and then by all their columns, so that the rows which tie are equal and the choice does not depend on
//! how they arrived.
//!
//! [`plan`] gives the samples twice: [`Samples::wide`] with all columns that the dataset needs and [`Samples::narrow`]
//! with those alone that say where a sample belongs. Both have exactly the same samples, in any order. Each has, for
//! the timeline `N` of the configuration, the columns that [`crate::timeline`] defines.
//!
//! What is counted is exact, and counted before the log's lists are read, so that what is an error by configuration
//! costs little time.

mod check;
mod counts;
pub(crate) mod sql;
mod steps;
#[cfg(test)]
mod tests;

use std::time::{SystemTime, UNIX_EPOCH};

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::execution::context::SQLOptions;
use datafusion::prelude::{DataFrame, SessionContext};

use self::check::Columns;
pub use self::counts::SkipCounts;
use self::counts::{Misfits, exactly};
use self::steps::{BASE, CANDIDATES, EVENTS, LABELS, REPEATED, ROWS, Steps};
use crate::config::{MissingAttributes, Rows};
use crate::spool::{Spool, counts, example};
use crate::{Config, Error, Result, timeline};

/// The samples of a configuration, planned but not yet read.
#[derive(Debug)]
pub struct Samples {
    /// One row per sample with every column that features, session, order and partitions need.
    pub wide: DataFrame,
    /// The same samples with the columns alone that session, order, partitions and timelines need.
    pub narrow: DataFrame,
    /// What was left out or filled up.
    pub skipped: SkipCounts,
    /// How many samples there are; unknown for a query without declared steps.
    pub expected: Option<u64>,
    /// The last time, in microseconds since 1970, that is not in the future: `None` where the steps have looked for those.
    pub not_after: Option<i64>,
    /// The files of the tables that the plans read.
    _spool: Spool,
}

/// Plans the samples of `config` over its sources, which are tables of `context`.
///
/// Keep the result until its plans have run: they read temporary files that it owns.
///
/// # Errors
///
/// [`Error::Config`] and [`Error::Column`] for names and types that do not fit, before anything is read;
/// [`Error::Rows`] for rows that the configuration does not allow; [`Error::Memory`] if a join's keys do not fit.
pub async fn plan(context: &SessionContext, config: &Config) -> Result<Samples> {
    let rows = match &config.samples.rows {
        Rows::Query(query) => user_query(context, config, query).await?,
        Rows::Source(source) => context.table(source.as_str()).await?,
    };
    if !has_steps(config) {
        let (narrow, skipped) = (rows.clone(), SkipCounts::default());
        return Ok(Samples {
            wide: rows,
            narrow,
            skipped,
            expected: None,
            not_after: Some(not_after(config)),
            _spool: Spool::default(),
        });
    }
    let columns: ArrowSchema = rows.schema().as_arrow().clone();
    let columns = Columns::check(context, config, columns).await?;
    context.register_table(BASE, rows.into_view())?;
    let steps = Steps::new(config, &columns, not_after(config))?;
    let mut planner =
        Planner { context, config, steps, spool: Spool::default(), skipped: SkipCounts::default() };
    planner.rows().await?;
    planner.events().await?;
    planner.attributes().await?;
    let expected = planner.choose().await?;
    for i in 0..config.timelines.len() {
        planner.timeline(i).await?;
    }
    let narrow = context.sql(&planner.steps.narrow_samples()).await?;
    let wide = planner.steps.wide_samples(planner.skipped.duplicate_samples > 0);
    tracing::debug!("samples: {wide}");
    let wide = context.sql(&wide).await?;
    Ok(Samples {
        wide,
        narrow,
        skipped: planner.skipped,
        expected: Some(expected),
        not_after: None,
        _spool: planner.spool,
    })
}

/// Whether anything is declared beyond a query.
fn has_steps(config: &Config) -> bool {
    let samples = &config.samples;
    matches!(samples.rows, Rows::Source(_))
        || !samples.key.is_empty()
        || samples.condition.is_some()
        || config.join.is_some()
        || !config.attributes.is_empty()
        || config.sampling.is_some()
        || !config.timelines.is_empty()
        || config.checks.is_some()
}

/// Plans the user's query, which may only read.
async fn user_query(context: &SessionContext, config: &Config, query: &str) -> Result<DataFrame> {
    let read_only =
        SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let planned = context.sql_with_options(query, read_only).await;
    planned.map_err(|error| Error::Config {
        path: config.path.clone(),
        message: format!("`[samples].query`: {}", error.strip_backtrace()),
        hint: format!(
            "write one `SELECT` in DataFusion's SQL over the tables {}",
            config.sources.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
        ),
    })
}

/// The last time, in microseconds since 1970, that is not in the future.
fn not_after(config: &Config) -> i64 {
    config.checks.as_ref().and_then(|checks| checks.not_after).unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
    })
}

/// Runs the narrow queries, one step after the other.
struct Planner<'a> {
    context: &'a SessionContext,
    config: &'a Config,
    steps: Steps<'a>,
    spool: Spool,
    skipped: SkipCounts,
}

impl Planner<'_> {
    /// The feature log's narrow rows: which are null, from the future or duplicates.
    async fn rows(&mut self) -> Result<()> {
        self.spool.table(self.context, ROWS, &self.steps.rows()).await?;
        let sql = format!(
            "SELECT count(*) FILTER (WHERE __onefold_state = 2), count(*) FILTER (WHERE __onefold_state = 3), \
             count(*) FILTER (WHERE __onefold_state = 4), \
             count(*) FILTER (WHERE __onefold_state = 0 AND __onefold_row > 1) FROM {ROWS}"
        );
        let [null_keys, future, ragged, duplicates] = exactly(counts(self.context, &sql).await?)?;
        let checks = self.config.checks.clone().unwrap_or_default();
        let nulls = Misfits {
            place: "`[checks].null_keys`",
            policy: checks.null_keys,
            count: null_keys,
            what: "rows have no value in what identifies or places a sample",
            remedy: "leave them out with `[samples].where`",
        };
        self.refuse(&nulls, &self.steps.example_row(2)).await?;
        let late = Misfits {
            place: "`[checks].future`",
            policy: checks.future,
            count: future,
            what: "rows have a time in the future",
            remedy: "check the unit of the time column and the clocks, set `[checks].not_after`",
        };
        self.refuse(&late, &self.steps.example_row(3)).await?;
        let uneven = Misfits {
            place: "`[checks].ragged`",
            policy: checks.ragged,
            count: ragged,
            what: "rows have lists of different lengths in `[checks].parallel`",
            remedy: "correct the log",
        };
        self.refuse(&uneven, &self.steps.example_row(4)).await?;
        let twice = Misfits {
            place: "`[samples].duplicates`",
            policy: self.config.samples.duplicates,
            count: duplicates,
            what: "rows have the key of an earlier row",
            remedy: "make `[samples].key` name all that identifies a sample",
        };
        self.refuse(&twice, &self.steps.example_duplicate()).await?;
        if duplicates > 0 {
            self.spool.table(self.context, REPEATED, &self.steps.repeated()).await?;
        }
        self.skipped.null_key_samples = null_keys;
        self.skipped.future_samples = future;
        self.skipped.ragged_samples = ragged;
        self.skipped.duplicate_samples = duplicates;
        Ok(())
    }

    /// The event log: its duplicates, what falls outside of every window, and the labels.
    async fn events(&mut self) -> Result<()> {
        let Some(join) = &self.config.join else { return Ok(()) };
        self.spool.table(self.context, EVENTS, &self.steps.events(join)?).await?;
        self.skipped.duplicate_events += self.log_counts(EVENTS, "`[join]`", &join.source).await?;
        let classes = self.steps.event_classes(join);
        let sql = format!("SELECT sum(late), sum(early), sum(orphans) FROM ({classes})");
        let [late, early, orphans] = exactly(counts(self.context, &sql).await?)?;
        let remedy = "raise `[join].window` or correct `[join].time`";
        for (place, class, policy, count, what, remedy) in [
            (
                "`[join].late`",
                "late",
                join.late,
                late,
                "events come after the window of their sample",
                remedy,
            ),
            (
                "`[join].early`",
                "early",
                join.early,
                early,
                "events come before their sample",
                "correct `[join].time`",
            ),
            (
                "`[join].orphans`",
                "orphans",
                join.orphans,
                orphans,
                "events belong to no sample",
                "check `[join].on`",
            ),
        ] {
            let misfits = Misfits { place, policy, count, what, remedy };
            self.refuse(&misfits, &self.steps.example_event(join, class)).await?;
        }
        (self.skipped.late_events, self.skipped.early_events, self.skipped.orphan_events) =
            (late, early, orphans);
        self.spool.table(self.context, LABELS, &self.steps.labels(join)).await
    }

    /// The attributes, each with the time until which it holds.
    async fn attributes(&mut self) -> Result<()> {
        for (i, attributes) in self.config.attributes.iter().enumerate() {
            let place = format!("`[[attributes]]` {}", i + 1);
            let unusable = self.steps.unusable_attributes(attributes);
            let [nulls] =
                exactly(counts(self.context, &format!("SELECT count(*) FROM ({unusable})")).await?)?;
            self.null_rows(&place, &attributes.source, nulls).await?;
            let name = steps::attributes_table(i);
            self.spool.table(self.context, &name, &self.steps.attributes(attributes)).await?;
            let twice = example(self.context, &self.steps.contradiction(i, attributes)).await?;
            if !twice.is_empty() {
                let (what, remedy) = match attributes.time {
                    Some(_) => ("several rows of one time", "make them one row"),
                    None => (
                        "several rows of one key",
                        "name the `time` from which each holds, or make them one row",
                    ),
                };
                return Err(Error::Rows {
                    place,
                    message: format!("`{}` has {what} that differ: {twice}", attributes.source),
                    hint: remedy.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Which of the samples stay: counts those that the steps drop, gives the number of those that are left.
    async fn choose(&mut self) -> Result<u64> {
        self.spool.table(self.context, CANDIDATES, &self.steps.narrow()).await?;
        let config = self.config;
        let missing: Vec<String> = (0..config.attributes.len())
            .map(|i| format!("count(*) FILTER (WHERE __onefold_missing{i})"))
            .collect();
        let any: Vec<String> =
            (0..config.attributes.len()).map(|i| format!("__onefold_missing{i}")).collect();
        let any = if any.is_empty() { "FALSE".to_owned() } else { any.join(" OR ") };
        let first = [
            "count(*) FILTER (WHERE __onefold_dropped = 0)".to_owned(),
            "count(*) FILTER (WHERE __onefold_dropped = 3)".to_owned(),
            "count(*) FILTER (WHERE __onefold_unlabelled)".to_owned(),
            format!("count(*) FILTER (WHERE ({any}) AND __onefold_dropped <> 1)"),
        ];
        let sql = format!("SELECT {} FROM {CANDIDATES}", [first.to_vec(), missing].concat().join(", "));
        let counted = counts(self.context, &sql).await?;
        let [left, sampled_out, unlabelled, without] = exactly(counted[..4.min(counted.len())].to_vec())?;
        for (i, attributes) in config.attributes.iter().enumerate() {
            if attributes.missing == MissingAttributes::Error && counted[4 + i] > 0 {
                let which = self.steps.example_without(i);
                return Err(Error::Rows {
                    place: format!("`[[attributes]]` {}", i + 1),
                    message: format!(
                        "{} samples have no row of `{}`, the first with {}",
                        counted[4 + i],
                        attributes.source,
                        example(self.context, &which).await?
                    ),
                    hint: "add the rows, or write `missing = \"null\"` or `missing = \"skip\"`".to_owned(),
                });
            }
        }
        self.skipped.sampled_out = sampled_out;
        self.skipped.samples_without_events = unlabelled;
        self.skipped.samples_without_attributes = without;
        Ok(left)
    }

    /// The rows of timeline `i` in one numbered sequence, and every sample's place in it.
    async fn timeline(&mut self, i: usize) -> Result<()> {
        let timeline = &self.config.timelines[i];
        let log = timeline::log_table(i);
        self.spool.table(self.context, &log, &self.steps.timeline_log(timeline)?).await?;
        let repeated = self.log_counts(&log, &format!("`[[timelines]]` {}", i + 1), &timeline.source).await?;
        let earlier = &self.config.timelines[..i];
        let mut counted = self.config.join.iter().map(|join| &join.source);
        if !counted.any(|source| *source == timeline.source)
            && !earlier.iter().any(|earlier| earlier.source == timeline.source)
        {
            self.skipped.duplicate_events += repeated;
        }
        self.spool.table(self.context, &timeline::table(i), &timeline::numbered_sql(i, timeline)).await?;
        let samples = self.steps.chosen();
        let positions = timeline::positions_sql(i, timeline, &samples);
        self.spool.table(self.context, &timeline::positions_table(i), &positions).await
    }

    /// Counts the rows of a log that cannot be used, which may be an error, and gives the number of duplicates.
    async fn log_counts(&mut self, table: &str, place: &str, source: &str) -> Result<u64> {
        let sql = format!(
            "SELECT sum(__onefold_copies) FILTER (WHERE __onefold_unusable), \
             sum(__onefold_copies) FILTER (WHERE NOT __onefold_unusable), \
             count(*) FILTER (WHERE NOT __onefold_unusable AND __onefold_row = 1) FROM {table}"
        );
        let [nulls, rows, distinct] = exactly(counts(self.context, &sql).await?)?;
        self.null_rows(place, source, nulls).await?;
        Ok(rows - distinct)
    }

    /// Counts rows of another source without a key, time or value, or refuses them.
    async fn null_rows(&mut self, place: &str, source: &str, count: u64) -> Result<()> {
        let what = format!("rows of `{source}` have no value in a column that {place} needs");
        let nulls = Misfits {
            place: "`[checks].null_keys`",
            policy: self.config.checks.clone().unwrap_or_default().null_keys,
            count,
            what: &what,
            remedy: "fill them in",
        };
        if nulls.refused() {
            return Err(nulls.error(""));
        }
        self.skipped.null_key_rows += count;
        Ok(())
    }

    /// The error for `misfits` if they are one, with the row that `which` finds.
    async fn refuse(&self, misfits: &Misfits<'_>, which: &str) -> Result<()> {
        if !misfits.refused() {
            return Ok(());
        }
        Err(misfits.error(&example(self.context, which).await?))
    }
}
