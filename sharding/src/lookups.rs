//! How features look up their tables.

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, AccessBins};
use crate::{Error, Pooling, Result};

/// More ids in a sample's list than any log holds; keeps predicted costs finite.
const MAX_POOLING_FACTOR: f64 = 1e12;

/// How a feature looks up a table that it shares: as [`Table`]'s own fields say of the first feature.
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
}

/// How one feature looks up its table.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lookups {
    /// How a list's vectors become one.
    pub pooling: Pooling,
    /// Mean number of ids per sample.
    pub pooling_factor: f64,
    /// Ids of a batch's samples ÷ ids of its distinct lists.
    pub dedupe_factor: f64,
    /// Samples of a batch ÷ its distinct lists that are not empty.
    pub list_dedupe_factor: f64,
    pub(crate) access_bins: Option<AccessBins>,
}

impl Lookups {
    /// The distinct lists of so many samples, and the ids in them.
    pub(crate) fn distinct(&self, samples: f64) -> [f64; 2] {
        [samples / self.list_dedupe_factor, samples * self.pooling_factor / self.dedupe_factor]
    }

    /// How often the rows of a table of `rows` rows are looked up: as given, or as if all were equally likely.
    pub fn accesses(&self, rows: u64) -> AccessBins {
        let looked_up = self.pooling_factor * ACCESS_BATCH as f64 / self.dedupe_factor;
        self.access_bins.unwrap_or_else(|| AccessBins::uniform(rows, looked_up))
    }

    /// Checks that a table can be looked up so; the error names the number.
    pub(crate) fn validate(&self) -> Result<()> {
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
        self.access_bins.map_or(Ok(()), |bins| bins.validate())
    }
}

/// No deduplication.
pub(crate) fn one() -> f64 {
    1.0
}
