//! How features look up their tables.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, AccessBins};
use crate::{Error, LookupShares, Pooling, Result};

/// More ids in a sample's list than any log holds; keeps predicted costs finite.
const MAX_POOLING_FACTOR: f64 = 1e12;

/// How one feature looks up its table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lookups {
    /// How a list's vectors become one. Sum and mean send one vector a list, attention one an id.
    #[serde(default)]
    pub pooling: Pooling,
    /// Mean number of ids per sample, 0 or more.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists, 1 or more; 1 means no deduplication.
    #[serde(default = "one")]
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty, 1 or more; absent, it is taken to be `dedupe_factor`,
    /// as it is where all lists are of one length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_dedupe_factor: Option<f64>,
    /// How often rows are looked up; absent, all rows are taken as equally likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bins: Option<AccessBins>,
    /// Standard deviation of the number of ids of distinct lists that are not empty, 0 or more; absent, all
    /// have as many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_length_deviation: Option<f64>,
    /// Ids of a batch's distinct lists ÷ elements of the timelines that they are windows of, 1 or more; 1
    /// means that no lists overlap, as they do with `--dedupe window` only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub window_factor: f64,
    /// Which share of lookups falls on which rows; absent, they are taken to be spread evenly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookup_shares: Option<LookupShares>,
}

/// A feature that shares a table with another one, and how it looks it up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureLookups {
    /// The feature.
    pub feature: String,
    /// Its lookups.
    #[serde(flatten)]
    pub lookups: Lookups,
}

impl Default for Lookups {
    /// Sum pooling, one id per sample and no deduplication.
    fn default() -> Self {
        Self::of(1.0)
    }
}

impl Lookups {
    /// Sum pooling of `pooling_factor` ids per sample, without deduplication.
    pub fn of(pooling_factor: f64) -> Self {
        Self {
            pooling: Pooling::default(),
            pooling_factor,
            dedupe_factor: 1.0,
            list_dedupe_factor: None,
            access_bins: None,
            list_length_deviation: None,
            window_factor: 1.0,
            lookup_shares: None,
        }
    }

    /// The same, with no list deduplicated.
    pub(crate) fn without_deduplication(self) -> Self {
        Self { dedupe_factor: 1.0, list_dedupe_factor: None, window_factor: 1.0, ..self }
    }

    /// Samples of a batch ÷ its distinct lists that are not empty.
    fn samples_per_list(&self) -> f64 {
        self.list_dedupe_factor.unwrap_or(self.dedupe_factor)
    }

    /// Standard deviation of the number of ids of distinct lists that are not empty.
    pub(crate) fn deviation(&self) -> f64 {
        self.list_length_deviation.unwrap_or(0.0)
    }

    /// The distinct lists of so many samples, and the ids in them.
    pub fn distinct(&self, samples: f64) -> [f64; 2] {
        [samples / self.samples_per_list(), samples * self.pooling_factor / self.dedupe_factor]
    }

    /// The same, `deviations` standard deviations above the mean: whether a sample's list is one of the distinct ones is
    /// taken to be independent of the other samples, as is its length.
    pub(crate) fn distinct_above(&self, samples: f64, deviations: f64) -> [f64; 2] {
        let [lists, ids] = self.distinct(samples);
        if lists <= 0.0 {
            return [lists, ids];
        }
        let (mean, list_variance) = (ids / lists, lists * (1.0 - lists / samples).max(0.0));
        let id_variance = list_variance * mean * mean + lists * self.deviation().powi(2);
        [(lists + deviations * list_variance.sqrt()).min(samples), ids + deviations * id_variance.sqrt()]
    }

    /// What is looked up of so many ids of distinct lists. A sequence's vectors are those of its timeline's
    /// elements, which windows share; a pooled list is the sum of all its ids' vectors.
    pub(crate) fn looked_up(&self, ids: f64) -> f64 {
        if self.pooling.is_sequence() { self.elements(ids) } else { ids }
    }

    /// The elements of timelines for so many ids of distinct lists: what ranks send each other to ask for
    /// them.
    pub(crate) fn elements(&self, ids: f64) -> f64 {
        ids / self.window_factor
    }

    /// The share of lookups that falls on some of a table's `all` rows, 0 to 1: as given, or in proportion.
    pub fn share_of(&self, rows: &Range<u64>, all: u64) -> f64 {
        match &self.lookup_shares {
            Some(shares) => shares.share(rows),
            None => rows.end.saturating_sub(rows.start) as f64 / all.max(1) as f64,
        }
    }

    /// How often the rows of a table of `rows` rows are looked up: as given, or as if all were equally
    /// likely.
    pub fn accesses(&self, rows: u64) -> AccessBins {
        let looked_up = self.looked_up(self.distinct(ACCESS_BATCH as f64)[1]);
        self.access_bins.unwrap_or_else(|| AccessBins::uniform(rows, looked_up))
    }

    /// Checks that a table of so many rows can be looked up like this; the error names the number.
    pub(crate) fn validate(&self, rows: u64) -> Result<()> {
        if !(0.0..=MAX_POOLING_FACTOR).contains(&self.pooling_factor) {
            let message = format!("`pooling_factor` is {}", self.pooling_factor);
            return Err(Error::invalid(message, "give the mean number of ids per sample, 0 or more"));
        }
        for (name, factor, of) in [
            ("dedupe_factor", self.dedupe_factor, "ids of a batch ÷ those"),
            ("list_dedupe_factor", self.samples_per_list(), "samples of a batch ÷ the number"),
        ] {
            if !factor.is_finite() || factor < 1.0 {
                let hint = format!("give the {of} of its distinct lists; 1 is no deduplication");
                return Err(Error::invalid(format!("`{name}` is {factor}"), hint));
            }
        }
        let (factor, deviation) = (self.window_factor, self.deviation());
        if !factor.is_finite() || factor < 1.0 {
            let hint = "give the ids of a batch's distinct lists ÷ the elements of their timelines; 1 is without windows";
            return Err(Error::invalid(format!("`window_factor` is {factor}"), hint));
        }
        if !(0.0..=MAX_POOLING_FACTOR).contains(&deviation) {
            let hint = "give the standard deviation of the number of ids of distinct lists, 0 or more";
            return Err(Error::invalid(format!("`list_length_deviation` is {deviation}"), hint));
        }
        self.access_bins.map_or(Ok(()), |bins| bins.validate())?;
        self.lookup_shares.as_ref().map_or(Ok(()), |shares| shares.validate(rows))
    }
}

/// Whether a factor divides nothing, and need not be written.
fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

/// No deduplication.
fn one() -> f64 {
    1.0
}
