//! The SQL of the declared steps. Generated columns have names that begin with `__onefold_`; the columns of a
//! join's key are numbered.

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use onefold_datasets::{NO_DELAY, SparseFeature};

use super::check::StepColumns;
use super::tables::RowState::{self, ClockChange, Future, LeftOut, NoKey, Past, Ragged, Usable};
use super::tables::{
    BASE, CANDIDATES, Dropped, LABELS, LogRows, REPEATED, ROWS, attributes_in_time_table, attributes_table,
};
use crate::config::{
    Config, JoinConfig, LabelConfig, MissingAttributes, MissingEvents, SamplingConfig, TimeConfig,
    TimelineConfig,
};
use crate::error::Result;
use crate::ids::IdType;
use crate::ids::functions::timeline_function_name;
use crate::sessionize::{EVENT_TIME, position_columns};
use crate::sql::{
    all, enclosed, equal, first_of_each, is_sortable, key_kind, list, numbered, quote, same_keys, table,
};
use crate::timeline;
use crate::times::{self, TimeLimits};

/// Builds the SQL of one configuration. Methods that return rows, conditions or expressions return their SQL.
pub(super) struct StepSql<'a> {
    pub(super) config: &'a Config,
    pub(super) columns: &'a StepColumns<'a>,
    /// The limits of times in `[checks]`.
    limits: TimeLimits,
    /// The columns of the rows that the narrow tables have.
    narrow: Vec<String>,
    /// The columns of the rows that the dataset needs.
    wide: Vec<String>,
    /// Columns that the steps produce and that sessions, order or partitions use.
    made_narrow: Vec<String>,
}

/// A log of events as a step reads it.
struct Log<'a> {
    source: &'a str,
    key: &'a [String],
    on: &'a [(String, String)],
    time: &'a TimeConfig,
    condition: Option<&'a str>,
    /// The columns that the step needs, as pairs of an expression and a name.
    columns: Vec<(String, String)>,
    /// The names of those `columns` that must not be null.
    required: Vec<String>,
    /// The names of those `columns` that order rows of one event.
    ordered: Vec<String>,
}

impl<'a> StepSql<'a> {
    pub(super) fn new(config: &'a Config, columns: &'a StepColumns<'a>, limits: TimeLimits) -> Result<Self> {
        let field = |name: &str| columns.rows.field_with_name(name).ok();
        let session = config.session_columns().into_iter().map(str::to_owned).collect::<Vec<_>>();
        let places = [session, config.partition_columns.clone(), config.order.clone()].concat();
        let ours =
            |pairs: &[(String, String)]| pairs.iter().map(|(ours, _)| ours.clone()).collect::<Vec<_>>();
        let mut keys = config.samples.key.clone();
        keys.extend(config.time.columns().map(str::to_owned));
        keys.extend(config.join.iter().flat_map(|join| ours(&join.on)));
        keys.extend(config.attributes.iter().flat_map(|attributes| ours(&attributes.on)));
        keys.extend(config.timelines.iter().flat_map(|timeline| ours(&timeline.on)));
        keys.extend(config.sampling.iter().map(|sampling| sampling.label.clone()));
        let is_narrow = |name: &String| field(name).is_some_and(|field| !field.data_type().is_nested());
        let narrow: Vec<String> = first_of_each(places.iter().chain(&keys).filter(|name| is_narrow(name)));
        let features: Vec<String> = config.feature_columns().map(|(name, _)| name.to_owned()).collect();
        let wide = narrow.iter().chain(&places).chain(&features).chain(&config.keep);
        let wide = first_of_each(wide.filter(|name| field(name).is_some()));
        let made_narrow = first_of_each(places.iter().filter(|name| field(name).is_none()));
        Ok(Self { config, columns, limits, narrow, wide, made_narrow })
    }

    /// Returns the narrow rows of the log, each with its [`RowState`].
    pub(super) fn rows(&self) -> Result<String> {
        let condition = self.config.samples.condition.as_deref().map(enclosed);
        // Rows that `where` leaves out must be kept here if there is a join, because events may belong to them.
        let (inside, filter) = match (&condition, &self.config.join) {
            (Some(condition), Some(_)) => (format!("{condition} IS TRUE"), String::new()),
            (Some(condition), None) => ("TRUE".to_owned(), format!(" WHERE {condition}")),
            (None, _) => ("TRUE".to_owned(), String::new()),
        };
        let narrow = list(&self.narrow);
        let time = self.columns.time(&self.columns.rows, &self.config.time)?;
        let change = times::clock_change_sql(&self.config.time)?;
        let changed = change.map_or_else(String::new, |change| format!(", {change} AS __onefold_change"));
        let inner = format!(
            "SELECT {narrow}, {time} AS __onefold_time, {inside} AS __onefold_in, {} AS __onefold_ragged{changed} \
             FROM {BASE}{filter}",
            self.is_ragged(),
        );
        let change = if changed.is_empty() { "" } else { ", __onefold_change" };
        let states = format!(
            "SELECT {narrow}, __onefold_time{change}, CASE WHEN NOT __onefold_in THEN {LeftOut} WHEN {} THEN {NoKey} \
             {}WHEN __onefold_ragged THEN {Ragged} ELSE {Usable} END AS __onefold_state FROM ({inner})",
            self.is_null(),
            self.at_wrong_times(&self.config.time, "__onefold_time"),
        );
        let key = &self.config.samples.key;
        if key.is_empty() {
            return Ok(format!("SELECT *, CAST(1 AS BIGINT) AS __onefold_row FROM ({states})"));
        }
        Ok(format!(
            "SELECT *, CAST(row_number() OVER (PARTITION BY {} ORDER BY __onefold_state, {}) AS BIGINT) AS __onefold_row \
             FROM ({states})",
            list(key),
            self.first_by(),
        ))
    }

    /// Returns the `WHEN` branches of times that are not allowed in the `CASE` expression of a row state. `column` has
    /// the time in microseconds, `__onefold_change` is the [`change_to_leave_out`](Self::change_to_leave_out).
    pub(super) fn at_wrong_times(&self, time: &TimeConfig, column: &str) -> String {
        let limits = self.limits.of(time);
        let (past, future) = (limits.is_past(column), limits.is_future(column));
        let change = match self.leaves_out_changes(time) {
            true => format!("WHEN __onefold_change > 0 THEN {ClockChange} "),
            false => String::new(),
        };
        format!("WHEN {past} THEN {Past} WHEN {future} THEN {Future} {change}")
    }

    /// Returns whether rows with times at clock changes do not become samples.
    fn leaves_out_changes(&self, time: &TimeConfig) -> bool {
        let policy = self.config.checks.as_ref().and_then(|checks| checks.clock_changes);
        policy.is_some() && time.time_zone.is_some()
    }

    /// Returns the expression that is positive for times at a clock change; `None` if such rows are kept.
    pub(super) fn change_to_leave_out(&self, time: &TimeConfig) -> Result<Option<String>> {
        if self.leaves_out_changes(time) { times::clock_change_sql(time) } else { Ok(None) }
    }

    /// Returns the columns that order the rows of a key in the narrow tables. The first row becomes the sample.
    fn first_by(&self) -> String {
        let rest =
            self.narrow.iter().filter(|name| !self.config.samples.key.contains(name)).map(|name| quote(name));
        std::iter::once("__onefold_time".to_owned()).chain(rest).collect::<Vec<_>>().join(", ")
    }

    /// Returns the condition that a column that identifies a row, or its time, is null.
    fn is_null(&self) -> String {
        let nulls: Vec<String> =
            self.identifying().iter().map(|name| format!("{} IS NULL", quote(name))).collect();
        format!("({})", nulls.join(" OR "))
    }

    /// Returns the condition that lists which should be parallel have different lengths. A null list counts as
    /// empty.
    fn is_ragged(&self) -> String {
        let length = |name: &String| format!("coalesce(array_length({}), 0)", quote(name));
        let sets = self.config.checks.iter().flat_map(|checks| &checks.parallel);
        let pairs = sets.flat_map(|columns| columns.windows(2));
        let unequal: Vec<String> =
            pairs.map(|pair| format!("{} <> {}", length(&pair[0]), length(&pair[1]))).collect();
        if unequal.is_empty() { "FALSE".to_owned() } else { format!("({})", unequal.join(" OR ")) }
    }

    /// Returns the columns of the log that must not be null: key, session and time.
    pub(super) fn identifying(&self) -> Vec<String> {
        let session = self.config.session_columns().into_iter().map(str::to_owned).collect::<Vec<_>>();
        let time: Vec<String> = self.config.time.columns().map(str::to_owned).collect();
        let all = self.config.samples.key.iter().chain(&session).chain(&time);
        first_of_each(all.filter(|name| self.narrow.contains(name)))
    }

    /// Returns the first row with a state, for a message.
    pub(super) fn example_row(&self, state: RowState) -> String {
        let columns = list(self.identifying());
        format!("SELECT {columns} FROM {ROWS} WHERE __onefold_state = {state} ORDER BY {columns} LIMIT 1")
    }

    /// Returns the first key that occurs twice, for a message.
    pub(super) fn example_duplicate(&self) -> String {
        let key = if self.config.samples.key.is_empty() {
            self.identifying()
        } else {
            self.config.samples.key.clone()
        };
        format!(
            "SELECT {0} FROM {ROWS} WHERE __onefold_state = {Usable} AND __onefold_row = 2 ORDER BY {0} LIMIT 1",
            list(key)
        )
    }

    /// Returns the keys that several samples have.
    pub(super) fn repeated(&self) -> String {
        let key = self.config.samples.key.iter().enumerate();
        let key: Vec<String> = key.map(|(i, name)| format!("{} AS __onefold_k{i}", quote(name))).collect();
        format!(
            "SELECT {}, CAST(1 AS BIGINT) AS __onefold_twice FROM {ROWS} WHERE __onefold_state = {Usable} AND __onefold_row = 2",
            key.join(", ")
        )
    }

    /// Returns the narrow rows of the samples without duplicates.
    pub(super) fn distinct(&self) -> String {
        format!("SELECT * FROM {ROWS} WHERE __onefold_state = {Usable} AND __onefold_row = 1")
    }

    /// Returns the events that `[join]` reads.
    pub(super) fn events(&self, join: &JoinConfig) -> Result<String> {
        let schema = self.columns.of(&join.source);
        let read = self.read_by_labels(join)?;
        let sortable =
            |name: &&String| schema.field_with_name(name).is_ok_and(|field| is_sortable(field.data_type()));
        self.log(&Log {
            source: &join.source,
            key: &join.key,
            on: &join.on,
            time: &join.time,
            condition: None,
            ordered: read.iter().filter(sortable).cloned().collect(),
            columns: read.into_iter().map(|name| (quote(&name), name)).collect(),
            required: Vec::new(),
        })
    }

    /// Returns the expression of a timeline's id (BIGINT) from its column number `place`. Integers are unchanged;
    /// the function of [`FeatureIds`](crate::ids::FeatureIds) converts other values.
    fn timeline_id(
        &self,
        schema: &ArrowSchema,
        timeline: usize,
        place: usize,
        feature: &str,
        column: &str,
    ) -> String {
        let made = |f: &SparseFeature| f.name == feature && (f.ids.is_some() || f.vocabulary.is_some());
        let data_type = schema.field_with_name(column).map(|field| field.data_type());
        let is_integer = data_type.is_ok_and(|data_type| IdType::of(data_type) == Some(IdType::Integer));
        let column = quote(column);
        if is_integer && !self.config.schema.sparse_features().any(made) {
            format!("CAST({column} AS BIGINT)")
        } else {
            format!("{}({column})", timeline_function_name(timeline, place))
        }
    }

    /// Returns the rows that `[[timelines]]` section `number`, counted from 0, reads.
    pub(super) fn timeline_log(&self, number: usize, timeline: &TimelineConfig) -> Result<String> {
        let order = timeline.order.iter().enumerate();
        let order = order.map(|(i, name)| (quote(name), format!("{}{i}", timeline::ORDER)));
        let schema = self.columns.of(&timeline.source);
        let values = timeline.columns.iter().enumerate();
        let values = values.map(|(i, (feature, column))| {
            let id = self.timeline_id(schema, number, i, feature, column);
            (id, format!("{}{i}", timeline::VALUE))
        });
        let columns: Vec<(String, String)> = order.chain(values).collect();
        self.log(&Log {
            source: &timeline.source,
            key: &timeline.key,
            on: &timeline.on,
            time: &timeline.time,
            condition: timeline.condition.as_deref(),
            ordered: columns.iter().map(|(_, name)| name.clone()).collect(),
            columns,
            required: numbered(timeline::VALUE, timeline.columns.len()),
        })
    }

    /// Returns the rows of a log with its join key, its time, the columns that the step reads, and these columns:
    /// `__onefold_state`, the [`RowState`]; `__onefold_unusable`, whether the row cannot be used; `__onefold_row`,
    /// the rank among the rows of one event; `__onefold_copies`, the number of equal rows that were merged into
    /// this one.
    fn log(&self, log: &Log<'_>) -> Result<String> {
        let schema = self.columns.of(log.source);
        let on = log.on.iter().enumerate().map(|(i, (_, theirs))| (quote(theirs), format!("__onefold_k{i}")));
        let time = (self.columns.time(schema, log.time)?, "__onefold_time".to_owned());
        let change = self.change_to_leave_out(log.time)?;
        let change = change.map(|change| (change, "__onefold_change".to_owned()));
        let read = on.chain([time]).chain(change).chain(log.columns.iter().cloned());
        let read: Vec<(String, String)> = read.collect();
        let named: Vec<String> = read.iter().map(|(sql, name)| format!("{sql} AS {}", quote(name))).collect();
        let joined = numbered("__onefold_k", log.on.len());
        let required = joined.iter().chain(&log.required).map(|name| quote(name));
        let key = log.key.iter().map(|name| quote(name));
        let nulls: Vec<String> = required
            .chain(["__onefold_time".to_owned()])
            .chain((0..log.key.len()).map(|i| format!("__onefold_i{i}")))
            .map(|name| format!("{name} IS NULL"))
            .collect();
        let filter = log.condition.map(|sql| format!(" WHERE {}", enclosed(sql))).unwrap_or_default();
        let source = table(log.source);
        let state = format!(
            "CASE WHEN {} THEN {NoKey} {}ELSE {Usable} END AS __onefold_state",
            nulls.join(" OR "),
            self.at_wrong_times(log.time, "__onefold_time"),
        );
        let states = |rows: &str| {
            format!(
                "SELECT *, __onefold_state <> {Usable} AS __onefold_unusable FROM (SELECT *, {state} FROM ({rows}))"
            )
        };
        if log.key.is_empty() {
            let whole = list(schema.fields().iter().map(|field| field.name()));
            let distinct = format!(
                "SELECT {whole}, count(*) AS __onefold_copies FROM {source}{filter} GROUP BY {whole}"
            );
            let read = format!("SELECT {}, __onefold_copies FROM ({distinct})", named.join(", "));
            return Ok(format!("SELECT *, CAST(1 AS BIGINT) AS __onefold_row FROM ({})", states(&read)));
        }
        let key: Vec<String> = key.enumerate().map(|(i, name)| format!("{name} AS __onefold_i{i}")).collect();
        let read = format!("SELECT {}, {} FROM {source}{filter}", named.join(", "), key.join(", "));
        let first_by = joined.iter().chain(&log.ordered).map(|name| quote(name)).collect::<Vec<_>>();
        Ok(format!(
            "SELECT *, CAST(1 AS BIGINT) AS __onefold_copies, CAST(row_number() OVER (PARTITION BY __onefold_unusable, {} \
             ORDER BY __onefold_time, {}) AS BIGINT) AS __onefold_row FROM ({})",
            list(numbered("__onefold_i", log.key.len())),
            first_by.join(", "),
            states(&read),
        ))
    }

    /// Returns the first row with a state in the table of a [`log`](Self::log), for a message.
    pub(super) fn example_log_row(&self, log: &LogRows<'_>, state: RowState) -> String {
        let keys = log.on.iter().enumerate().filter(|(_, (_, theirs))| *theirs != log.time.column);
        let keys = keys.map(|(i, (_, theirs))| format!("__onefold_k{i} AS {}", quote(theirs)));
        format!(
            "SELECT {}, {} AS {} FROM {} WHERE __onefold_state = {state} ORDER BY 1, __onefold_time LIMIT 1",
            keys.collect::<Vec<_>>().join(", "),
            timestamp("__onefold_time"),
            quote(&log.time.column),
            log.table,
        )
    }

    /// Joins labels, attributes and `__onefold_kept` to `rows`. Each join builds its hash table from the left,
    /// narrow side and streams the samples.
    fn joined(&self, rows: &str) -> String {
        let mut sql = rows.to_owned();
        if let Some(join) = &self.config.join {
            let labels: Vec<String> = join
                .labels
                .iter()
                .map(|(name, label)| {
                    let missing = match label {
                        LabelConfig::When(_) => "0".to_owned(),
                        LabelConfig::Value { missing, .. } => format!("{missing:?}"),
                        LabelConfig::Delay(_) => format!("{NO_DELAY:?}"),
                    };
                    format!("COALESCE(n.{0}, {missing}) AS {0}", quote(name))
                })
                .collect();
            let event_time =
                if self.keeps_event_times() { format!(", n.{EVENT_TIME}") } else { String::new() };
            sql = format!(
                "SELECT s.*, {}, n.__onefold_events{event_time} FROM {LABELS} n RIGHT JOIN ({sql}) s ON {} AND n.__onefold_at = s.__onefold_time",
                labels.join(", "),
                same_keys(&join.on)
            );
        }
        for (i, attributes) in self.config.attributes.iter().enumerate() {
            let default = |name: &String| attributes.default.iter().find(|(column, _)| column == name);
            let columns: Vec<String> = attributes
                .columns
                .iter()
                .map(|(name, _)| match default(name) {
                    Some((_, value)) => format!("COALESCE(n.{0}, {value}) AS {0}", quote(name)),
                    None => format!("n.{0} AS {0}", quote(name)),
                })
                .collect();
            let (table, pairs) = (attributes_table(i), same_keys(&attributes.on));
            let columns = columns.join(", ");
            sql = match attributes.time {
                Some(_) => {
                    let dated = format!(
                        "SELECT s.*, n.__onefold_latest AS __onefold_from{i} FROM {} n RIGHT JOIN ({sql}) s \
                         ON {pairs} AND n.__onefold_at = s.__onefold_time",
                        attributes_in_time_table(i)
                    );
                    format!(
                        "SELECT s.*, {columns} FROM {table} n RIGHT JOIN ({dated}) s \
                         ON {pairs} AND n.__onefold_from = s.__onefold_from{i}"
                    )
                }
                None => format!(
                    "SELECT s.*, {columns}, n.__onefold_from AS __onefold_from{i} FROM {table} n RIGHT JOIN ({sql}) s ON {pairs}"
                ),
            };
        }
        match &self.config.sampling {
            Some(sampling) => format!("SELECT *, {} AS __onefold_kept FROM ({sql})", self.kept(sampling)),
            None => sql,
        }
    }

    /// Returns whether samples have the time of the latest event from which their labels are computed.
    pub(super) fn keeps_event_times(&self) -> bool {
        self.config.join.is_some() && self.config.keep.iter().any(|name| name == EVENT_TIME)
    }

    /// Returns the conditions that drop a sample.
    fn drops(&self) -> Vec<(String, Dropped)> {
        let mut drops = Vec::new();
        if self.config.join.as_ref().is_some_and(|join| join.missing == MissingEvents::Skip) {
            drops.push(("__onefold_events IS NULL".to_owned(), Dropped::NoEvent));
        }
        for (i, attributes) in self.config.attributes.iter().enumerate() {
            if attributes.missing == MissingAttributes::Skip {
                drops.push((format!("__onefold_from{i} IS NULL"), Dropped::NoAttributes));
            }
        }
        if self.config.sampling.is_some() {
            drops.push(("NOT __onefold_kept".to_owned(), Dropped::SampledOut));
        }
        drops
    }

    /// Returns the condition that a sample is kept. It compares the first 64 bits of a hash of its key, so the
    /// result is the same on every run.
    fn kept(&self, sampling: &SamplingConfig) -> String {
        let key = self.config.samples.key.iter().map(|name| format!(", CAST({} AS VARCHAR)", quote(name)));
        let hash = format!("left(md5(concat_ws('|', '{}'{})), 16)", sampling.seed, key.collect::<String>());
        self.by_value(sampling, "TRUE", |probability| {
            if probability >= 1.0 {
                return "TRUE".to_owned();
            }
            format!("{hash} < '{:016x}'", (probability * 2f64.powi(64)) as u64)
        })
    }

    /// Returns the weight that compensates for the samples that are not kept.
    fn weight(&self, sampling: &SamplingConfig) -> String {
        let factor =
            self.by_value(sampling, "1.0", |probability| format!("CAST('{}' AS DOUBLE)", 1.0 / probability));
        let name = quote(&sampling.weight);
        if self.wide.contains(&sampling.weight) {
            format!("({factor}) * CAST({name} AS DOUBLE) AS {name}")
        } else {
            format!("({factor}) AS {name}")
        }
    }

    /// Returns an expression that depends on the value of the label.
    fn by_value(&self, sampling: &SamplingConfig, otherwise: &str, then: impl Fn(f64) -> String) -> String {
        let data_type = self.columns.sampling_type(sampling);
        let is_text = !data_type.is_numeric() && !data_type.is_null() && key_kind(&data_type) == Some("text");
        let label = quote(&sampling.label);
        let cases = sampling.keep.iter().map(|(value, probability)| {
            let when = if is_text {
                format!("{label} = '{}'", value.replace('\'', "''"))
            } else {
                format!("CAST({label} AS DOUBLE) = CAST('{value}' AS DOUBLE)")
            };
            format!("WHEN {when} THEN {} ", then(*probability))
        });
        format!("CASE {}ELSE {otherwise} END", cases.collect::<String>())
    }

    /// Returns the narrow rows of the distinct samples, with flags for missing data and the reason to drop them.
    pub(super) fn narrow(&self) -> String {
        let unlabelled = if self.config.join.is_some() { "__onefold_events IS NULL" } else { "FALSE" };
        let missing: Vec<String> = (0..self.config.attributes.len())
            .map(|i| format!(", __onefold_from{i} IS NULL AS __onefold_missing{i}"))
            .collect();
        let drops = self.drops();
        let kept = Dropped::Kept;
        let dropped = if drops.is_empty() {
            kept.to_string()
        } else {
            let cases = drops.iter().map(|(drop, reason)| format!("WHEN {drop} THEN {reason} "));
            format!("CASE {}ELSE {kept} END", cases.collect::<String>())
        };
        format!(
            "SELECT {}, __onefold_time, {unlabelled} AS __onefold_unlabelled{}, {dropped} AS __onefold_dropped FROM ({})",
            list(self.narrow.iter().chain(&self.made_narrow)),
            missing.concat(),
            self.joined(&self.distinct())
        )
    }

    /// Returns the narrow rows of the remaining samples.
    pub(super) fn chosen(&self) -> String {
        format!(
            "SELECT {}, __onefold_time FROM {CANDIDATES} WHERE __onefold_dropped = {}",
            list(self.narrow.iter().chain(&self.made_narrow)),
            Dropped::Kept
        )
    }

    /// Returns the query of [`Samples::narrow`](super::Samples::narrow).
    pub(super) fn narrow_samples(&self) -> String {
        let columns = self.narrow.iter().chain(&self.made_narrow).map(|name| quote(name)).collect();
        self.placed(&self.chosen(), columns)
    }

    /// Returns the query of [`Samples::wide`](super::Samples::wide). `repeated` says whether several rows have the
    /// same key.
    pub(super) fn wide_samples(&self, repeated: bool) -> Result<String> {
        let usable = self.usable_rows()?;
        let rows = if repeated { self.first_rows(&usable) } else { usable };
        let kept: Vec<String> = self.drops().into_iter().map(|(drop, _)| format!("NOT ({drop})")).collect();
        let joined = format!("SELECT * FROM ({}) WHERE {}", self.joined(&rows), all(&kept));
        let sampling = self.config.sampling.as_ref();
        let is_weight = |name: &&String| sampling.is_some_and(|sampling| sampling.weight == **name);
        let rows = self.wide.iter().filter(|name| !is_weight(name));
        let event_time = self.keeps_event_times().then(|| EVENT_TIME.to_owned());
        let made = self.config.joined_columns().chain(&event_time);
        let columns = rows.chain(made).map(|name| quote(name));
        Ok(self.placed(&joined, columns.chain(sampling.map(|sampling| self.weight(sampling))).collect()))
    }

    /// Returns the rows of the log that are samples, with all columns that are needed.
    fn usable_rows(&self) -> Result<String> {
        let time = self.columns.time(&self.columns.rows, &self.config.time)?;
        let limits = self.limits.of(&self.config.time);
        let mut conditions: Vec<String> =
            self.identifying().iter().map(|name| format!("{} IS NOT NULL", quote(name))).collect();
        conditions.push(format!("NOT ({})", limits.is_past(&time)));
        conditions.push(format!("NOT ({})", limits.is_future(&time)));
        let change = self.change_to_leave_out(&self.config.time)?;
        conditions.extend(change.map(|change| format!("{change} = 0")));
        conditions.push(format!("NOT {}", self.is_ragged()));
        conditions.extend(self.config.samples.condition.as_deref().map(enclosed));
        Ok(format!(
            "SELECT {}, {time} AS __onefold_time FROM {BASE} WHERE {}",
            list(&self.wide),
            all(&conditions)
        ))
    }

    /// Returns the first of the `rows` of every key. Nearly all keys occur once; their rows are only streamed.
    fn first_rows(&self, rows: &str) -> String {
        let columns = format!("{}, __onefold_time", list(&self.wide));
        let key = self.config.samples.key.iter().enumerate();
        let on = equal(key.map(|(i, name)| (format!("n.__onefold_k{i}"), format!("s.{}", quote(name)))));
        let marked = format!("SELECT s.*, n.__onefold_twice FROM {REPEATED} n RIGHT JOIN ({rows}) s ON {on}");
        let several = format!("SELECT s.* FROM {REPEATED} n JOIN ({rows}) s ON {on}");
        let sortable = |name: &&String| {
            self.columns.rows.field_with_name(name).is_ok_and(|field| is_sortable(field.data_type()))
        };
        let rest = self.wide.iter().filter(|name| !self.narrow.contains(name)).filter(sortable);
        let order: Vec<String> =
            std::iter::once(self.first_by()).chain(rest.map(|name| quote(name))).collect();
        let ranked = format!(
            "SELECT *, row_number() OVER (PARTITION BY {} ORDER BY {}) AS __onefold_row FROM ({several})",
            list(&self.config.samples.key),
            order.join(", ")
        );
        format!(
            "SELECT {columns} FROM ({marked}) WHERE __onefold_twice IS NULL UNION ALL \
             SELECT {columns} FROM ({ranked}) WHERE __onefold_row = 1"
        )
    }

    /// Returns `columns` of `samples` and the positions of the samples in the timelines.
    fn placed(&self, samples: &str, columns: Vec<String>) -> String {
        let mut sql = samples.to_owned();
        for (i, timeline) in self.config.timelines.iter().enumerate() {
            sql = timeline::placed_sql(i, timeline, &sql);
        }
        let columns = [columns, position_columns(self.config)].concat();
        format!("SELECT {} FROM ({sql})", columns.join(", "))
    }
}

/// Converts microseconds since 1970 to a timestamp, for a message.
pub(super) fn timestamp(micros: &str) -> String {
    format!("arrow_cast({micros}, 'Timestamp(Microsecond, None)')")
}
