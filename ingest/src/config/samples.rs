//! `[samples]`, `[sampling]` and `[checks]`: the rows that become samples, the samples that are kept, and the rows
//! that are refused.

use serde::Deserialize;

use super::columns::{Policy, known_source, once, wrong};
use super::times::instant;
use crate::error::MessageAndHint;

/// `[samples]`: the source of the samples.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplesConfig {
    /// The rows that become samples.
    pub rows: Rows,
    /// Columns that identify a sample, by which rows that were delivered twice are found. It may be empty.
    pub key: Vec<String>,
    /// An SQL condition that samples must satisfy.
    pub condition: Option<String>,
    /// The policy for rows with the key of an earlier row.
    pub duplicates: Policy,
    /// Whether the order of rows replaces times, for logs without times.
    pub by_rows: bool,
}

/// The rows that become samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rows {
    /// The rows of an SQL query over the sources.
    Query(String),
    /// The rows of one source.
    Source(String),
}

/// `[sampling]`: negative down-sampling.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingConfig {
    /// The column whose value determines the probability.
    pub label: String,
    /// Pairs of a label value and the probability, in (0, 1], that a sample with this value is kept. Samples with
    /// other values are kept.
    pub keep: Vec<(String, f64)>,
    /// The seed of the hash of a sample's key, which decides whether the sample is kept.
    pub seed: u64,
    /// The weight column: `1 / probability`, multiplied by the input column of that name if there is one.
    pub weight: String,
}

/// `[checks]`: the rows that are refused, or skipped and counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChecksConfig {
    /// The policy for rows of any source with a time before `not_before`.
    pub past: Policy,
    /// The earliest accepted time, in microseconds since 1970; the beginning of 1990 if `None`.
    pub not_before: Option<i64>,
    /// The policy for rows of any source with a time after `not_after`.
    pub future: Policy,
    /// The latest accepted time, in microseconds since 1970; the start of the build if `None`.
    pub not_after: Option<i64>,
    /// The policy for rows of any source whose local time is ambiguous or nonexistent because of a clock change;
    /// such rows are kept if `None`.
    pub clock_changes: Option<Policy>,
    /// The policy for rows with a null in their time column or in a column that identifies them.
    pub null_keys: Policy,
    /// Sets of list columns whose lists must have equal lengths in every row, such as ids and their weights.
    pub parallel: Vec<Vec<String>>,
    /// The policy for rows in which these lengths differ.
    pub ragged: Policy,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SamplesSection {
    query: Option<String>,
    source: Option<String>,
    #[serde(default)]
    key: Vec<String>,
    #[serde(rename = "where")]
    condition: Option<String>,
    duplicates: Option<Policy>,
    order: Option<SamplesOrder>,
}

/// The order of the samples of a session, if it is not the order of their times.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SamplesOrder {
    Rows,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SamplingSection {
    label: String,
    keep: toml::Table,
    #[serde(default)]
    seed: u64,
    weight: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ChecksSection {
    past: Policy,
    not_before: Option<toml::Value>,
    future: Policy,
    not_after: Option<toml::Value>,
    clock_changes: Option<Policy>,
    null_keys: Policy,
    parallel: Vec<Vec<String>>,
    ragged: Option<Policy>,
}

impl SamplesSection {
    pub(super) fn check(self, sources: &[&str]) -> Result<SamplesConfig, MessageAndHint> {
        let rows = match (self.query, self.source) {
            (Some(query), None) => Rows::Query(query),
            (None, Some(source)) => {
                known_source("`[samples].source`", &source, sources)?;
                Rows::Source(source)
            }
            (None, None) => {
                let hint = "write `source = \"features\"`, or `query = \"SELECT …\"` over the sources";
                return Err(wrong("`[samples]` has neither `source` nor `query`", hint));
            }
            _ => {
                let hint = "keep `query` for free SQL, or `source` with the declared steps";
                return Err(wrong("`[samples]` has both `source` and `query`", hint));
            }
        };
        once("`[samples].key`", &self.key)?;
        if self.key.is_empty() && self.duplicates.is_some() {
            let hint = "name the columns that identify a sample, as `key = [\"request_id\"]`";
            return Err(wrong("`[samples].duplicates` needs `[samples].key`", hint));
        }
        let duplicates = self.duplicates.unwrap_or(Policy::Skip);
        let by_rows = matches!(self.order, Some(SamplesOrder::Rows));
        Ok(SamplesConfig { rows, key: self.key, condition: self.condition, duplicates, by_rows })
    }
}

impl SamplingSection {
    /// `weight` is the dataset's weight column.
    pub(super) fn check(
        self,
        samples: &SamplesConfig,
        weight: Option<&str>,
    ) -> Result<SamplingConfig, MessageAndHint> {
        if samples.key.is_empty() {
            let hint = "name the columns that identify a sample, as `key = [\"request_id\"]`";
            return Err(wrong("`[sampling]` goes by a hash of `[samples].key`, which is missing", hint));
        }
        if weight != Some(self.weight.as_str()) {
            let message =
                format!("`[sampling].weight` is `{}`, which is not the weight of the dataset", self.weight);
            let hint = format!(
                "without it the samples are biased: add `{} = {{ kind = \"weight\" }}` to `[features]`",
                self.weight
            );
            return Err(wrong(message, hint));
        }
        let mut keep = Vec::new();
        for (value, probability) in &self.keep {
            let number = probability.as_float().or(probability.as_integer().map(|number| number as f64));
            match number {
                Some(number) if number > 0.0 && number <= 1.0 => keep.push((value.clone(), number)),
                _ => {
                    let message =
                        format!("`[sampling].keep`: `{probability}` for {value} is not a probability");
                    let hint = "write a number above 0 and at most 1; leave all such samples out with `[samples].where`";
                    return Err(wrong(message, hint));
                }
            }
        }
        if keep.is_empty() {
            let hint = "give a probability for a value of the label, as `keep = { \"0\" = 0.1 }`";
            return Err(wrong("`[sampling].keep` is empty", hint));
        }
        Ok(SamplingConfig { label: self.label, keep, seed: self.seed, weight: self.weight })
    }
}

impl ChecksSection {
    pub(super) fn check(self) -> Result<ChecksConfig, MessageAndHint> {
        let limit = |key: &str, value: Option<toml::Value>| {
            value.map(|value| instant(&format!("`[checks].{key}`"), &value)).transpose()
        };
        let not_before = limit("not_before", self.not_before)?;
        let not_after = limit("not_after", self.not_after)?;
        for columns in &self.parallel {
            once("`[checks].parallel`", columns)?;
            if columns.len() < 2 {
                let message = format!("`[checks].parallel` compares {columns:?} with nothing");
                let hint = "name two or more columns of lists, as `parallel = [[\"ids\", \"weights\"]]`";
                return Err(wrong(message, hint));
            }
        }
        if self.parallel.is_empty() && self.ragged.is_some() {
            let hint =
                "name the columns whose lists have equal lengths, as `parallel = [[\"ids\", \"weights\"]]`";
            return Err(wrong("`[checks].ragged` needs `[checks].parallel`", hint));
        }
        Ok(ChecksConfig {
            past: self.past,
            not_before,
            future: self.future,
            not_after,
            clock_changes: self.clock_changes,
            null_keys: self.null_keys,
            parallel: self.parallel,
            ragged: self.ragged.unwrap_or_default(),
        })
    }
}
