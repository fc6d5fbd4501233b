//! Computes samples from logs: the declared steps of `dataset.toml`, as SQL over the sources.
//!
//! ```text
//! rows of the feature log ─▶ checks ─▶ first of every key ─▶ labels from events ─▶ attributes as of the time ─▶ sampling
//! ```
//!
//! Each step makes its decisions in **narrow** tables of keys and times, which spill and are spooled (`spool`). The
//! log with its lists is only streamed past these tables, as the probe side of hash joins. It is not sorted, except
//! for the few rows whose key occurs twice. The log has no row number, so those rows are ranked by time and then by
//! all their columns. Rows that still tie are equal, so the choice does not depend on the order of arrival.
//!
//! [`plan`] returns the samples in two forms: [`Samples::wide`] with all columns that the dataset needs, and
//! [`Samples::narrow`] with only the columns that determine where a sample belongs. Both contain exactly the same
//! samples, in any order. For each timeline `N` of the configuration, both have the columns that
//! [`crate::timeline`] defines.
//!
//! Counts are exact. They are computed before the log's lists are read, so that rows which the configuration
//! refuses are reported early.

mod attributes;
mod check;
mod counts;
mod labels;
mod repeatable;
mod steps;
mod tables;
#[cfg(test)]
mod tests;

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::execution::context::SQLOptions;
use datafusion::prelude::{DataFrame, SessionContext};
use onefold_sql::Query as _;

use self::check::StepColumns;
pub use self::counts::SkipCounts;
use self::counts::{UnfitRows, exactly};
use self::repeatable::why_plan_varies;
use self::steps::StepSql;
use self::tables::RowState::{ClockChange, Future, LeftOut, NoKey, Past, Ragged, Usable};
use self::tables::{
    BASE, CANDIDATES, Dropped, EVENTS, LABELS, LogRows, REPEATED, ROWS, RowState, attributes_in_time_table,
    attributes_table,
};
use crate::config::{AttributesConfig, Config, MissingAttributes, Policy, Rows, TimeConfig};
use crate::error::{Error, Result, advice, engine_message};
use crate::problems::Problems;
use crate::row_counts::{Reason, RowCounts};
use crate::spool::{Spool, counts, example};
use crate::timeline;
use crate::times::{self, TimeLimits, shown};

/// The samples of a configuration, planned but not yet read.
pub(crate) struct Samples {
    /// One row per sample, with all columns that features, session, order and partitions need.
    pub(crate) wide: DataFrame,
    /// The same samples, with only the columns that session, order, partitions and timelines need.
    pub(crate) narrow: DataFrame,
    /// The numbers of rows that were left out or filled up.
    pub(crate) skipped: SkipCounts,
    /// The number of samples. It is unknown for a query without declared steps.
    pub(crate) expected: Option<u64>,
    /// The numbers of rows that the declared steps read and left out. Unknown for a query without declared steps.
    pub(crate) rows: Option<RowCounts>,
    /// The range of allowed times of samples; `None` if the steps have checked it.
    pub(crate) time_limits: Option<TimeLimits>,
    /// The files of the tables that the plans read.
    _spool: Spool,
}

/// Plans the samples of `config` over its sources, which are tables of `context`. If `problems` are collected, rows
/// that the configuration does not allow are reported there and left out.
///
/// Keep the result until its plans have run, because they read temporary files that it owns.
///
/// # Errors
///
/// [`Error::Fault`] for names and types that do not fit, before anything is read, for rows that the configuration
/// does not allow, and if the keys of a join do not fit into memory.
pub(crate) async fn plan(context: &SessionContext, config: &Config, problems: &Problems) -> Result<Samples> {
    context.register_udf(times::function());
    context.register_udf(times::change_function());
    context.register_udf(timeline::class_function());
    let rows = rows(context, config).await?;
    times::check(config, &config.time, rows.clone()).await?;
    let limits = TimeLimits::of_checks(config);
    if !has_steps(config) {
        let (narrow, skipped) = (rows.clone(), SkipCounts::default());
        return Ok(Samples {
            wide: rows,
            narrow,
            skipped,
            expected: None,
            rows: None,
            time_limits: Some(limits.of(&config.time)),
            _spool: Spool::default(),
        });
    }
    let columns: ArrowSchema = rows.schema().as_arrow().clone();
    let columns = StepColumns::check(context, config, columns, problems).await?;
    context.register_table(BASE, rows.into_view())?;
    let steps = StepSql::new(config, &columns, limits)?;
    let (spool, skipped) = (Spool::default(), SkipCounts::default());
    let counted = RowCounts::default();
    let mut planner = Planner { context, config, limits, steps, spool, skipped, counted, problems };
    planner.rows().await?;
    planner.events().await?;
    planner.attributes().await?;
    let expected = planner.choose().await?;
    // With problems, rows may have been left out or be present twice, so the counts are not checked.
    if problems.check().is_ok() {
        RowCounts { written: expected, ..planner.counted.clone() }.check()?;
    }
    for i in 0..config.timelines.len() {
        planner.timeline(i).await?;
    }
    let narrow = context.query(&planner.steps.narrow_samples()).await?;
    let wide = planner.steps.wide_samples(planner.skipped.duplicate_samples > 0)?;
    tracing::debug!("samples: {wide}");
    let wide = context.query(&wide).await?;
    Ok(Samples {
        wide,
        narrow,
        skipped: planner.skipped,
        expected: Some(expected),
        rows: Some(planner.counted),
        time_limits: None,
        _spool: planner.spool,
    })
}

/// Returns the rows that become samples, before the declared steps.
pub(crate) async fn rows(context: &SessionContext, config: &Config) -> Result<DataFrame> {
    match &config.samples.rows {
        Rows::Query(query) => {
            let tables = config.sources.keys().chain(config.source_queries.keys());
            user_query(context, config, "`[samples].query`", query, tables).await
        }
        Rows::Source(source) => Ok(context.table(source.as_str()).await?),
    }
}

/// Whether the configuration declares more than a query.
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
        // Times at clock changes must be counted.
        || config.time.time_zone.is_some()
}

/// Registers every source that is a query as a table of `context`, which has the tables of files.
///
/// # Errors
///
/// [`Error::Fault`] if a query cannot be planned over these tables.
pub(crate) async fn register_queries(context: &SessionContext, config: &Config) -> Result<()> {
    let mut views = Vec::new();
    for (name, query) in &config.source_queries {
        let place = format!("`[sources].{name}.query`");
        let rows = user_query(context, config, &place, query, config.sources.keys()).await?;
        views.push((name, rows.into_view()));
    }
    for (name, view) in views {
        context.register_table(name, view)?;
    }
    Ok(())
}

/// Plans a query of the user over these tables. The query must only read, and must return the same rows each time.
/// `place` is its key.
async fn user_query(
    context: &SessionContext,
    config: &Config,
    place: &str,
    query: &str,
    tables: impl Iterator<Item = &String>,
) -> Result<DataFrame> {
    let read_only =
        SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
    let planned = context.query_with_options(query, read_only).await;
    let planned = planned.map_err(|error| {
        let message = engine_message(&error);
        let hint = advice(&message).map(str::to_owned).unwrap_or_else(|| {
            let tables = tables.map(|name| format!("`{name}`")).collect::<Vec<_>>();
            format!("write one `SELECT` in DataFusion's SQL over the tables {}", tables.join(", "))
        });
        Error::config(&config.path, format!("{place}: {message}"), hint)
    })?;
    match why_plan_varies(planned.logical_plan())? {
        None => Ok(planned),
        Some((message, hint)) => Err(Error::config(&config.path, format!("{place}: {message}"), hint)),
    }
}

/// Runs the narrow queries step by step.
struct Planner<'a> {
    context: &'a SessionContext,
    config: &'a Config,
    limits: TimeLimits,
    steps: StepSql<'a>,
    spool: Spool,
    skipped: SkipCounts,
    /// The counts of rows of `[samples]`, so far without rows that become samples.
    counted: RowCounts,
    problems: &'a Problems,
}

impl Planner<'_> {
    /// Creates the table of narrow rows of the feature log, and counts rows that lack a key, have a time outside of
    /// the limits, or are duplicates.
    async fn rows(&mut self) -> Result<()> {
        self.spool.table(self.context, ROWS, &self.steps.rows()?).await?;
        let count = |state: RowState| format!("count(*) FILTER (WHERE __onefold_state = {state})");
        let sql = format!(
            "SELECT {}, {}, {}, {}, count(*) FILTER (WHERE __onefold_state = {Usable} AND __onefold_row > 1), {}, count(*) \
             FROM {ROWS}",
            count(NoKey),
            count(Future),
            count(Ragged),
            count(Past),
            count(LeftOut),
        );
        let [null_keys, future, ragged, past, duplicates, mut outside, rows] =
            exactly(counts(self.context, &sql).await?)?;
        if self.config.samples.condition.is_some() && self.config.join.is_none() {
            // The table does not have the rows that `where` leaves out.
            let [all] = exactly(counts(self.context, &format!("SELECT count(*) FROM {BASE}")).await?)?;
            outside = all.saturating_sub(rows);
            self.counted.read = outside;
        }
        self.counted.read += rows;
        for (reason, rows) in [
            (Reason::Where, outside),
            (Reason::NullKey, null_keys),
            (Reason::Future, future),
            (Reason::Ragged, ragged),
            (Reason::Past, past),
            (Reason::Duplicate, duplicates),
        ] {
            self.counted.leave_out(reason, rows);
        }
        let checks = self.config.checks.clone().unwrap_or_default();
        let nulls = UnfitRows {
            place: "`[checks].null_keys`",
            policy: checks.null_keys,
            count: null_keys,
            what: "rows have no value in a column that identifies a sample, or no time",
            remedy: "leave them out with `[samples].where`",
        };
        self.refuse(&nulls, &self.steps.example_row(NoKey)).await?;
        for (state, count) in [(Past, past), (Future, future)] {
            let example = self.steps.example_row(state);
            self.outside(state, count, &self.config.time, "rows", &example).await?;
        }
        self.clock_changes().await?;
        let uneven = UnfitRows {
            place: "`[checks].ragged`",
            policy: checks.ragged,
            count: ragged,
            what: "rows have lists of different lengths in `[checks].parallel`",
            remedy: "correct the log",
        };
        self.refuse(&uneven, &self.steps.example_row(Ragged)).await?;
        let twice = UnfitRows {
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
        self.skipped.past_samples = past;
        self.skipped.future_samples = future;
        self.skipped.ragged_samples = ragged;
        self.skipped.duplicate_samples = duplicates;
        Ok(())
    }

    /// Counts rows whose local time is ambiguous or nonexistent because of a clock change, and the rows that are
    /// left out for this reason.
    async fn clock_changes(&mut self) -> Result<()> {
        if self.config.time.time_zone.is_none() {
            return Ok(());
        }
        let count = |change: u8| {
            format!("count(*) FILTER (WHERE __onefold_change = {change} AND __onefold_state <> {LeftOut})")
        };
        let left_out = format!("count(*) FILTER (WHERE __onefold_state = {ClockChange})");
        let sql = format!("SELECT {}, {}, {left_out} FROM {ROWS}", count(1), count(2));
        let [twice, skipped, left_out] = exactly(counts(self.context, &sql).await?)?;
        (self.skipped.repeated_times, self.skipped.skipped_times) = (twice, skipped);
        self.counted.leave_out(Reason::ClockChange, left_out);
        let example = self.steps.example_row(ClockChange);
        self.at_clock_changes("rows", left_out, &example).await
    }

    /// Reports rows whose local time is ambiguous or nonexistent as errors, unless the configuration leaves them
    /// out.
    async fn at_clock_changes(&self, rows: &str, count: u64, which: &str) -> Result<()> {
        let policy = self.config.checks.as_ref().and_then(|checks| checks.clock_changes);
        let what =
            format!("{rows} have a local time that occurs twice or not at all, because clocks were changed");
        let unfit = UnfitRows {
            place: "`[checks].clock_changes`",
            policy: policy.unwrap_or(Policy::Skip),
            count,
            what: &what,
            remedy: "write the log with offsets or in UTC",
        };
        self.refuse(&unfit, which).await
    }

    /// Computes the labels from the event log, and counts its duplicates and the events outside of every window.
    async fn events(&mut self) -> Result<()> {
        let Some(join) = &self.config.join else { return Ok(()) };
        self.spool.table(self.context, EVENTS, &self.steps.events(join)?).await?;
        let log = LogRows {
            table: EVENTS,
            place: "`[join]`",
            source: &join.source,
            on: &join.on,
            time: &join.time,
        };
        self.skipped.duplicate_events += self.log_counts(&log).await?;
        let classes = self.steps.event_classes(join);
        let sql = format!(
            "SELECT sum(__onefold_late), sum(__onefold_early), sum(__onefold_orphans) FROM ({classes})"
        );
        let [late, early, orphans] = exactly(counts(self.context, &sql).await?)?;
        let window = "raise `[join].window` or correct `[join].time`";
        for (class, policy, count, what, remedy) in [
            ("late", join.late, late, "events come after the window of their sample", window),
            ("early", join.early, early, "events come before their sample", "correct `[join].time`"),
            ("orphans", join.orphans, orphans, "events belong to no sample", "check `[join].on`"),
        ] {
            let unfit = UnfitRows { place: &format!("`[join].{class}`"), policy, count, what, remedy };
            self.refuse(&unfit, &self.steps.example_event(join, class)).await?;
        }
        (self.skipped.late_events, self.skipped.early_events, self.skipped.orphan_events) =
            (late, early, orphans);
        self.spool.table(self.context, LABELS, &self.steps.labels(join)?).await
    }

    /// Creates the tables of the attributes, and the tables that say which of them are valid at the samples' times.
    async fn attributes(&mut self) -> Result<()> {
        for (i, attributes) in self.config.attributes.iter().enumerate() {
            let place = format!("`[[attributes]]` {}", i + 1);
            self.attribute_counts(&place, attributes).await?;
            let name = attributes_table(i);
            self.spool.table(self.context, &name, &self.steps.attributes(attributes)?).await?;
            let twice = example(self.context, &self.steps.contradiction(i, attributes)).await?;
            if !twice.is_empty() {
                let (what, remedy) = match attributes.time {
                    Some(_) => ("several rows of one time", "make them one row"),
                    None => (
                        "several rows of one key",
                        "name the `time` from which each holds, or make them one row",
                    ),
                };
                self.problems.report(Error::data(
                    place,
                    format!("`{}` has {what} that differ: {twice}", attributes.source),
                    remedy,
                ))?;
            }
            if attributes.time.is_some() {
                let in_time = self.steps.attributes_in_time(i, attributes);
                self.spool.table(self.context, &attributes_in_time_table(i), &in_time).await?;
            }
        }
        Ok(())
    }

    /// Decides which samples are kept. Counts the samples that the steps drop, and returns the number of remaining
    /// samples.
    async fn choose(&mut self) -> Result<u64> {
        self.spool.table(self.context, CANDIDATES, &self.steps.narrow()).await?;
        let config = self.config;
        let missing: Vec<String> = (0..config.attributes.len())
            .map(|i| format!("count(*) FILTER (WHERE __onefold_missing{i})"))
            .collect();
        let any: Vec<String> =
            (0..config.attributes.len()).map(|i| format!("__onefold_missing{i}")).collect();
        let any = if any.is_empty() { "FALSE".to_owned() } else { any.join(" OR ") };
        let dropped = |dropped: Dropped| format!("count(*) FILTER (WHERE __onefold_dropped = {dropped})");
        let first = [
            dropped(Dropped::Kept),
            dropped(Dropped::SampledOut),
            dropped(Dropped::NoEvent),
            dropped(Dropped::NoAttributes),
            "count(*) FILTER (WHERE __onefold_unlabelled)".to_owned(),
            format!("count(*) FILTER (WHERE ({any}) AND __onefold_dropped <> {})", Dropped::NoEvent),
        ];
        let sql = format!("SELECT {} FROM {CANDIDATES}", [first.to_vec(), missing].concat().join(", "));
        let counted = counts(self.context, &sql).await?;
        let [left, sampled_out, no_event, no_attributes, unlabelled, without] =
            exactly(counted[..6.min(counted.len())].to_vec())?;
        for (i, attributes) in config.attributes.iter().enumerate() {
            if attributes.missing == MissingAttributes::Error && counted[6 + i] > 0 {
                let which = self.steps.example_without(i);
                self.problems.report(Error::data(
                    format!("`[[attributes]]` {}", i + 1),
                    format!(
                        "{} samples have no row of `{}`, the first with {}",
                        counted[6 + i],
                        attributes.source,
                        example(self.context, &which).await?
                    ),
                    "add the rows, or write `missing = \"null\"` or `missing = \"skip\"`",
                ))?;
            }
        }
        self.counted.leave_out(Reason::SampledOut, sampled_out);
        self.counted.leave_out(Reason::NoEvent, no_event);
        self.counted.leave_out(Reason::NoAttributes, no_attributes);
        self.skipped.sampled_out = sampled_out;
        self.skipped.samples_without_events = unlabelled;
        self.skipped.samples_without_attributes = without;
        Ok(left)
    }

    /// Creates timeline `i` as one numbered sequence of rows, and finds the position of every sample in it.
    async fn timeline(&mut self, i: usize) -> Result<()> {
        let timeline = &self.config.timelines[i];
        let log = timeline::log_table(i);
        self.spool.table(self.context, &log, &self.steps.timeline_log(i, timeline)?).await?;
        let place = format!("`[[timelines]]` {}", i + 1);
        let (source, on, time) = (&timeline.source, &timeline.on, &timeline.time);
        let repeated = self.log_counts(&LogRows { table: &log, place: &place, source, on, time }).await?;
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

    /// Counts the rows of a log that cannot be used, and reports them as errors if the policies say so. Returns the
    /// number of duplicates.
    async fn log_counts(&mut self, log: &LogRows<'_>) -> Result<u64> {
        let copies =
            |state: RowState| format!("sum(__onefold_copies) FILTER (WHERE __onefold_state = {state})");
        let sql = format!(
            "SELECT {}, {}, {}, {}, {}, count(*) FILTER (WHERE __onefold_state = {Usable} AND __onefold_row = 1) FROM {}",
            copies(Usable),
            copies(NoKey),
            copies(ClockChange),
            copies(Past),
            copies(Future),
            log.table,
        );
        let [rows, nulls, changes, past, future, distinct] = exactly(counts(self.context, &sql).await?)?;
        self.null_rows(log.place, log.source, nulls)?;
        for (state, count) in [(ClockChange, changes), (Past, past), (Future, future)] {
            let example = self.steps.example_log_row(log, state);
            self.outside_rows(state, count, (log.source, log.time), &example).await?;
        }
        Ok(rows - distinct)
    }

    /// Counts the rows of an `[[attributes]]` section that cannot be used, and reports them as errors if the policies
    /// say so.
    async fn attribute_counts(&mut self, place: &str, attributes: &AttributesConfig) -> Result<()> {
        let sql = self.steps.attribute_counts(attributes)?;
        let [nulls, changes, past, future] = exactly(counts(self.context, &sql).await?)?;
        self.null_rows(place, &attributes.source, nulls)?;
        let Some(time) = &attributes.time else { return Ok(()) };
        for (state, count) in [(ClockChange, changes), (Past, past), (Future, future)] {
            let example = self.steps.example_attribute(attributes, state)?;
            self.outside_rows(state, count, (&attributes.source, time), &example).await?;
        }
        Ok(())
    }

    /// Counts rows of another source that have a time with this state, or reports them as an error.
    async fn outside_rows(
        &mut self,
        state: RowState,
        count: u64,
        (source, time): (&str, &TimeConfig),
        which: &str,
    ) -> Result<()> {
        let rows = format!("rows of `{source}`");
        match state {
            ClockChange => self.at_clock_changes(&rows, count, which).await?,
            _ => self.outside(state, count, time, &rows, which).await?,
        }
        match state {
            ClockChange => self.skipped.clock_change_rows += count,
            Past => self.skipped.past_rows += count,
            _ => self.skipped.future_rows += count,
        }
        Ok(())
    }

    /// Reports `count` rows whose time is before ([`Past`]) or after ([`Future`]) the limits of the time column as
    /// an error, unless the configuration skips them.
    async fn outside(
        &self,
        state: RowState,
        count: u64,
        time: &TimeConfig,
        rows: &str,
        which: &str,
    ) -> Result<()> {
        let checks = self.config.checks.clone().unwrap_or_default();
        let limits = self.limits.of(time);
        let (place, policy, which_side, limit, key) = match state {
            Past => ("`[checks].past`", checks.past, "before", limits.not_before, "not_before"),
            _ => ("`[checks].future`", checks.future, "in the future, after", limits.not_after, "not_after"),
        };
        let what = format!("{rows} have a time ({}) {which_side} {}", time.place, shown(limit));
        let remedy = format!(
            "check the column's unit and the clocks; if such times are right, allow them with `time = {{ column = \"{}\", \
             {key} = \"…\" }}` or `[checks].{key}`",
            time.column
        );
        self.refuse(&UnfitRows { place, policy, count, what: &what, remedy: &remedy }, which).await
    }

    /// Counts rows of another source with a null key, time or value, or reports them as an error.
    fn null_rows(&mut self, place: &str, source: &str, count: u64) -> Result<()> {
        let what = format!("rows of `{source}` have no value in a column that {place} needs");
        let nulls = UnfitRows {
            place: "`[checks].null_keys`",
            policy: self.config.checks.clone().unwrap_or_default().null_keys,
            count,
            what: &what,
            remedy: "fill them in",
        };
        if nulls.refused() {
            self.problems.report(nulls.error(""))?;
        }
        self.skipped.null_key_rows += count;
        Ok(())
    }

    /// Reports `unfit` rows as an error unless they are skipped. The query `which` finds an example row.
    async fn refuse(&self, unfit: &UnfitRows<'_>, which: &str) -> Result<()> {
        if !unfit.refused() {
            return Ok(());
        }
        self.problems.report(unfit.error(&example(self.context, which).await?))
    }
}
