//! `[[timelines]]`: sequence features that the ETL computes from events before a sample.

use serde::Deserialize;

use super::columns::{ColumnNames, duration, duration_or_zero, known_source, once, wrong};
use super::rows::needs_times;
use super::{FeatureKind, JoinConfig, TimeConfig};
use crate::error::MessageAndHint;

/// A `[[timelines]]` section: parallel lists of the last rows before a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineConfig {
    /// The source of the rows.
    pub source: String,
    /// Pairs of a column of the samples and the column of the source that must be equal to it.
    pub on: Vec<(String, String)>,
    /// The time of the rows.
    pub time: TimeConfig,
    /// An SQL condition that the rows must satisfy.
    pub condition: Option<String>,
    /// The maximum number of ids of a list. The list contains the latest ids, oldest first.
    pub length: usize,
    /// The delay after which a row becomes visible, in microseconds after its time.
    pub delay_micros: i64,
    /// The maximum age of rows at the sample's time, in microseconds. Older rows are left out.
    pub max_age_micros: Option<i64>,
    /// Columns that order rows with equal times.
    pub order: Vec<String>,
    /// Columns that identify a row. If empty, rows that are equal in all columns are one row.
    pub key: Vec<String>,
    /// Pairs of a feature and the source column whose values its lists contain.
    pub columns: Vec<(String, String)>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TimelineSection {
    source: String,
    on: ColumnNames,
    time: Option<toml::Value>,
    #[serde(rename = "where")]
    condition: Option<String>,
    length: usize,
    delay: Option<String>,
    max_age: Option<String>,
    #[serde(default)]
    order: Vec<String>,
    key: Option<Vec<String>>,
    columns: ColumnNames,
}

impl TimelineSection {
    /// `place` is the name of the section in messages, such as `` `[[timelines]]` 1 `` for the first section.
    /// `kind` returns the kind of a column in `[features]`. The section uses the event key of `[join]` unless it
    /// has its own. `rows` has the columns of the row order, if samples have no times.
    pub(super) fn check(
        self,
        place: &str,
        sources: &[&str],
        join: Option<&JoinConfig>,
        rows: Option<&TimeConfig>,
        kind: impl Fn(&str) -> Option<FeatureKind>,
    ) -> Result<TimelineConfig, MessageAndHint> {
        known_source(&format!("{place}: `source`"), &self.source, sources)?;
        let columns = self.columns.pairs(&format!("{place}: `columns`"))?;
        for (feature, _) in &columns {
            if kind(feature) != Some(FeatureKind::Sequence) {
                let message =
                    format!("{place}: `columns` names `{feature}`, which is not a sequence of `[features]`");
                let hint =
                    format!("add `{feature} = {{ kind = \"sequence\", group = \"…\" }}` to `[features]`");
                return Err(wrong(message, hint));
            }
        }
        if self.length == 0 || self.length > i32::MAX as usize {
            let message = format!("{place}: `length` is {}", self.length);
            return Err(wrong(message, "write how many ids a list has at most, as `length = 100`"));
        }
        let keys = [
            ("time", self.time.is_some()),
            ("delay", self.delay.is_some()),
            ("max_age", self.max_age.is_some()),
        ];
        if let Some((key, _)) = keys.into_iter().find(|(_, given)| rows.is_some() && *given) {
            return Err(needs_times(&format!("{place}: `{key}`")));
        }
        let time_place = format!("{place}: `time`");
        let time = match (rows, self.time) {
            (Some(rows), _) => TimeConfig { place: place.to_owned(), ..rows.clone() },
            (None, Some(time)) => TimeConfig::parse(time_place, time)?,
            (None, None) => {
                let hint = "name the column of its rows' times, as `time = \"event_time\"`";
                return Err(wrong(format!("{time_place} is missing"), hint));
            }
        };
        let delay = self.delay.as_deref().map(|text| duration_or_zero(&format!("{place}: `delay`"), text));
        let delay_micros = delay.transpose()?.unwrap_or(0);
        let max_age = self.max_age.as_deref().map(|text| duration(&format!("{place}: `max_age`"), text));
        let max_age_micros = max_age.transpose()?;
        if max_age_micros.is_some_and(|age| age <= delay_micros) {
            let message =
                format!("{place}: `max_age` is no longer than `delay`, so every list would be empty");
            return Err(wrong(message, "raise `max_age` or lower `delay`"));
        }
        let same_log = join.filter(|join| join.source == self.source);
        let key = self.key.or_else(|| same_log.map(|join| join.key.clone())).unwrap_or_default();
        once(&format!("{place}: `key`"), &key)?;
        Ok(TimelineConfig {
            on: self.on.pairs(&format!("{place}: `on`"))?,
            source: self.source,
            time,
            condition: self.condition,
            length: self.length,
            delay_micros,
            max_age_micros,
            order: self.order,
            key,
            columns,
        })
    }
}
