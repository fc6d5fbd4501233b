//! `[join]` and `[[attributes]]`: columns that other sources add to a sample.

use onefold_datasets::{delay_label, suggest};
use serde::Deserialize;

use super::TimeConfig;
use super::columns::{ColumnNames, Policy, duration, known_source, once, wrong};
use crate::error::MessageAndHint;

/// `[join]`: the event log, and the labels that it yields.
#[derive(Debug, Clone, PartialEq)]
pub struct JoinConfig {
    /// The source with the events.
    pub source: String,
    /// Pairs of a column of the samples and the column of the events that must be equal to it.
    pub on: Vec<(String, String)>,
    /// The time of the events.
    pub time: TimeConfig,
    /// An event counts if it is at or after its sample and at most this much later, in microseconds.
    pub window_micros: i64,
    /// Columns that identify an event. If empty, rows that are equal in all columns are one event.
    pub key: Vec<String>,
    /// The choice of samples to which an event belongs, among the samples with its key whose window contains it.
    pub credit: Credit,
    /// The policy for samples without an event.
    pub missing: MissingEvents,
    /// The policy for events after the windows of all samples with their key.
    pub late: Policy,
    /// The policy for events before all samples with their key.
    pub early: Policy,
    /// The policy for events whose key occurs in no row that could become a sample.
    pub orphans: Policy,
    /// Pairs of a label column and the way in which events determine it.
    pub labels: Vec<(String, LabelConfig)>,
}

/// The choice among several samples to which an event may belong. Samples with the same key and time are treated
/// alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Credit {
    /// All of these samples.
    #[default]
    Every,
    /// The last sample before the event.
    Last,
    /// The first sample whose window contains the event.
    First,
}

/// The policy for samples without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingEvents {
    /// Their labels get the default value.
    Negative,
    /// They are left out and counted.
    Skip,
}

/// The computation of a label from the events of a sample.
#[derive(Debug, Clone, PartialEq)]
pub enum LabelConfig {
    /// 1 if an event satisfies this SQL condition, else 0.
    When(String),
    /// An SQL aggregate over the events.
    Value {
        /// The aggregate, for example `max(seconds)`.
        aggregate: String,
        /// The label if there is no event or the aggregate is null.
        missing: f64,
    },
    /// The seconds from the sample to the event from which another label is final, rounded up: the first event that
    /// satisfies this SQL condition, or without a condition the last event. [`NO_DELAY`](onefold_datasets::NO_DELAY) without such an event.
    Delay(Option<String>),
}

/// An `[[attributes]]` section: columns of the latest row at or before a sample's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttributesConfig {
    /// The source with the attributes.
    pub source: String,
    /// Pairs of a column of the samples and the column of the source that must be equal to it.
    pub on: Vec<(String, String)>,
    /// The time from which a row is valid; without it, the source has one row per key.
    pub time: Option<TimeConfig>,
    /// Pairs of the column's name in the samples and its name in the source.
    pub columns: Vec<(String, String)>,
    /// The policy for samples without a row.
    pub missing: MissingAttributes,
    /// Pairs of a column of the samples and the SQL literal that replaces null.
    pub default: Vec<(String, String)>,
}

/// The policy for samples without a row of attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingAttributes {
    /// Their attributes are null, or have the default value.
    Null,
    /// They are left out and counted.
    Skip,
    /// Fail, and build nothing.
    Error,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct JoinSection {
    source: String,
    on: ColumnNames,
    time: toml::Value,
    window: String,
    #[serde(default)]
    key: Vec<String>,
    #[serde(default)]
    credit: Credit,
    missing: Option<MissingEvents>,
    late: Option<Policy>,
    early: Option<Policy>,
    orphans: Option<Policy>,
    labels: toml::Table,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LabelSection {
    when: Option<String>,
    value: Option<String>,
    missing: Option<f64>,
    #[serde(default)]
    delay: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AttributesSection {
    source: String,
    on: ColumnNames,
    time: Option<toml::Value>,
    columns: ColumnNames,
    missing: Option<MissingAttributes>,
    #[serde(default)]
    default: toml::Table,
}

impl JoinSection {
    pub(super) fn check(self, sources: &[&str]) -> Result<JoinConfig, MessageAndHint> {
        known_source("`[join].source`", &self.source, sources)?;
        once("`[join].key`", &self.key)?;
        if self.labels.is_empty() {
            let hint = "name a label, as `clicked = { when = \"kind = 'click'\" }`";
            return Err(wrong("`[join.labels]` is empty", hint));
        }
        let mut labels = Vec::with_capacity(self.labels.len());
        for (name, value) in &self.labels {
            let (label, delay) = label(name, value)?;
            labels.push((name.clone(), label));
            labels.extend(delay.map(|delay| (delay_label(name), delay)));
        }
        Ok(JoinConfig {
            on: self.on.pairs("`[join].on`")?,
            window_micros: duration("`[join].window`", &self.window)?,
            labels,
            source: self.source,
            time: TimeConfig::parse("`[join].time`", self.time)?,
            key: self.key,
            credit: self.credit,
            missing: self.missing.unwrap_or(MissingEvents::Negative),
            late: self.late.unwrap_or(Policy::Skip),
            early: self.early.unwrap_or(Policy::Skip),
            orphans: self.orphans.unwrap_or(Policy::Skip),
        })
    }
}

/// Returns a label, and its delay if that is a label, too.
fn label(name: &str, value: &toml::Value) -> Result<(LabelConfig, Option<LabelConfig>), MessageAndHint> {
    let hint = "write `{ when = \"kind = 'click'\" }`, or `{ value = \"max(seconds)\", missing = 0 }`";
    let section: LabelSection = value.clone().try_into().map_err(|error: toml::de::Error| {
        wrong(format!("`[join.labels].{name}`: {}", error.message()), hint)
    })?;
    let label = match (section.when, section.value) {
        (Some(_), None) if section.missing.is_some() => {
            let message =
                format!("`[join.labels].{name}`: `when` is 0 without an event, so `missing` has no effect");
            Err(wrong(message, "remove `missing`, or write `value` instead of `when`"))
        }
        (Some(when), None) => Ok(LabelConfig::When(when)),
        (None, Some(aggregate)) => {
            Ok(LabelConfig::Value { aggregate, missing: section.missing.unwrap_or(0.0) })
        }
        _ => Err(wrong(format!("`[join.labels].{name}` needs one of `when` and `value`"), hint)),
    }?;
    let delay = match &label {
        _ if !section.delay => None,
        LabelConfig::When(condition) => Some(LabelConfig::Delay(Some(condition.clone()))),
        LabelConfig::Value { missing, .. } if *missing != 0.0 => {
            let message = format!("`[join.labels].{name}`: a label with a `delay` is 0 until it is final");
            return Err(wrong(message, "remove `missing`, or `delay`"));
        }
        LabelConfig::Value { .. } | LabelConfig::Delay(_) => Some(LabelConfig::Delay(None)),
    };
    Ok((label, delay))
}

impl AttributesSection {
    /// `place` is the name of the section in messages, such as `` `[[attributes]]` 1 `` for the first section.
    pub(super) fn check(self, place: &str, sources: &[&str]) -> Result<AttributesConfig, MessageAndHint> {
        known_source(&format!("{place}: `source`"), &self.source, sources)?;
        let columns = self.columns.pairs(&format!("{place}: `columns`"))?;
        let mut default = Vec::new();
        for (name, value) in &self.default {
            if !columns.iter().any(|(column, _)| column == name) {
                let message = format!("{place}: `default` names `{name}`, which is not one of its `columns`");
                return Err(wrong(message, suggest(name, columns.iter().map(|(column, _)| column.as_str()))));
            }
            default.push((name.clone(), literal(place, name, value)?));
        }
        if !default.is_empty() && self.missing.is_some_and(|missing| missing != MissingAttributes::Null) {
            let message =
                format!("{place}: `default` is for samples without a row, which `missing` leaves out");
            return Err(wrong(message, "remove `default`, or write `missing = \"null\"`"));
        }
        let time = self.time.map(|time| TimeConfig::parse(format!("{place}: `time`"), time)).transpose()?;
        Ok(AttributesConfig {
            on: self.on.pairs(&format!("{place}: `on`"))?,
            source: self.source,
            time,
            columns,
            missing: self.missing.unwrap_or(MissingAttributes::Null),
            default,
        })
    }
}

/// Converts a number, text or boolean of TOML to an SQL literal.
fn literal(place: &str, name: &str, value: &toml::Value) -> Result<String, MessageAndHint> {
    match value {
        toml::Value::String(text) => Ok(format!("'{}'", text.replace('\'', "''"))),
        toml::Value::Integer(number) => Ok(number.to_string()),
        toml::Value::Float(number) if number.is_finite() => Ok(format!("CAST('{number}' AS DOUBLE)")),
        toml::Value::Boolean(value) => Ok(value.to_string()),
        _ => {
            let message = format!("{place}: `default`.{name} is not a number, text or boolean");
            Err(wrong(message, format!("write a plain value, as `default = {{ {name} = 0 }}`")))
        }
    }
}
