//! How features look up their tables.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, AccessBins};
use crate::{Error, LookupShares, Pooling, Result};

/// More ids in a sample's list than any log holds; keeps predicted costs finite.
const MAX_POOLING_FACTOR: f64 = 1e12;

/// How a feature looks up a table that it shares: as [`Table`](crate::Table)'s own fields say of the first feature.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FurtherFeature {
    /// The feature.
    pub feature: String,
    /// How a list's vectors become one.
    #[serde(default)]
    pub pooling: Pooling,
    /// Mean number of ids per sample, 0 or more.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists, 1 or more.
    #[serde(default = "one")]
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty, 1 or more; absent, it is taken to be `dedupe_factor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_dedupe_factor: Option<f64>,
    /// How often the feature looks up rows; absent, all rows are taken as equally likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bins: Option<AccessBins>,
    /// Which share of lookups falls on which rows; absent, they are taken to be spread evenly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookup_shares: Option<LookupShares>,
}

impl FurtherFeature {
    /// A feature of sum pooling, one id per sample and no deduplication.
    pub fn new(feature: impl Into<String>) -> Self {
        Self {
            feature: feature.into(),
            pooling: Pooling::default(),
            pooling_factor: 1.0,
            dedupe_factor: 1.0,
            list_dedupe_factor: None,
            access_bins: None,
            lookup_shares: None,
        }
    }

    pub(crate) fn lookups(&self) -> Lookups<'_> {
        let Self { pooling, pooling_factor, dedupe_factor, access_bins, .. } = *self;
        Lookups {
            pooling,
            pooling_factor,
            dedupe_factor,
            list_dedupe_factor: self.list_dedupe_factor.unwrap_or(dedupe_factor),
            access_bins,
            shares: self.lookup_shares.as_ref(),
        }
    }
}

/// How one feature looks up its table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lookups<'a> {
    /// How a list's vectors become one.
    pub pooling: Pooling,
    /// Mean number of ids per sample.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists.
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty.
    pub list_dedupe_factor: f64,
    pub(crate) access_bins: Option<AccessBins>,
    pub(crate) shares: Option<&'a LookupShares>,
}

impl Lookups<'_> {
    /// The distinct lists of so many samples, and the ids in them.
    pub(crate) fn distinct(&self, samples: f64) -> [f64; 2] {
        [samples / self.list_dedupe_factor, samples * self.pooling_factor / self.dedupe_factor]
    }

    /// The share of lookups that falls on some of a table's `all` rows, 0 to 1: as given, or in proportion.
    pub fn share_of(&self, rows: &Range<u64>, all: u64) -> f64 {
        match self.shares {
            Some(shares) => shares.share(rows),
            None => rows.end.saturating_sub(rows.start) as f64 / all.max(1) as f64,
        }
    }

    /// How often the rows of a table of `rows` rows are looked up: as given, or as if all were equally likely.
    pub fn accesses(&self, rows: u64) -> AccessBins {
        let looked_up = self.pooling_factor * ACCESS_BATCH as f64 / self.dedupe_factor;
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
            ("list_dedupe_factor", self.list_dedupe_factor, "samples of a batch ÷ the number"),
        ] {
            if !factor.is_finite() || factor < 1.0 {
                let hint = format!("give the {of} of its distinct lists; 1 is no deduplication");
                return Err(Error::invalid(format!("`{name}` is {factor}"), hint));
            }
        }
        self.access_bins.map_or(Ok(()), |bins| bins.validate())?;
        self.shares.map_or(Ok(()), |shares| shares.validate(rows))
    }
}

/// No deduplication.
pub(crate) fn one() -> f64 {
    1.0
}
