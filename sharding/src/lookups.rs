//! How features look up their tables.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Pooling;
use crate::access::{ACCESS_BATCH, AccessBins};
use crate::error::{Error, Result};
use crate::shares::LookupShares;

/// An upper limit for the mean number of ids per sample. It is far above any real value, and keeps predicted costs
/// finite.
const MAX_POOLING_FACTOR: f64 = 1e12;

/// How one feature looks up its table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lookups {
    /// The pooling of a list's vectors. Sum and mean pooling send one vector per list, attention sends one per id.
    #[serde(default)]
    pub pooling: Pooling,
    /// The mean number of ids per sample, 0 or more.
    pub pooling_factor: f64,
    /// The number of ids in a batch's samples ÷ the number of ids in its distinct lists, 1 or more. 1 means no
    /// deduplication.
    #[serde(default = "one")]
    pub dedupe_factor: f64,
    /// The number of samples of a batch ÷ the number of its distinct non-empty lists, 1 or more. If absent,
    /// `dedupe_factor` is used, which is correct if all lists have the same length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_dedupe_factor: Option<f64>,
    /// How often rows are looked up. If absent, all rows are taken as equally likely.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_bins: Option<AccessBins>,
    /// The standard deviation of the length of distinct non-empty lists, 0 or more. If absent, all lists are taken to
    /// have the same length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub list_length_deviation: Option<f64>,
    /// The number of ids in a batch's distinct lists ÷ the number of elements of the timelines of which these lists
    /// are windows, 1 or more. 1 means that no lists overlap. Lists overlap only with `--dedupe window`.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub window_factor: f64,
    /// The distribution of lookups over the rows. If absent, lookups are taken to be distributed evenly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookup_shares: Option<LookupShares>,
}

/// A further feature of a shared table, and how it looks up the table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureLookups {
    /// The name of the feature.
    pub feature: String,
    /// The lookups of the feature.
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
    /// Returns sum pooling of `pooling_factor` ids per sample, without deduplication.
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

    /// Returns the same lookups without deduplication of lists.
    pub(crate) fn without_deduplication(self) -> Self {
        Self { dedupe_factor: 1.0, list_dedupe_factor: None, window_factor: 1.0, ..self }
    }

    /// Returns the number of samples of a batch ÷ the number of its distinct non-empty lists.
    fn samples_per_list(&self) -> f64 {
        self.list_dedupe_factor.unwrap_or(self.dedupe_factor)
    }

    /// Returns the standard deviation of the length of distinct non-empty lists.
    pub(crate) fn deviation(&self) -> f64 {
        self.list_length_deviation.unwrap_or(0.0)
    }

    /// Returns the expected numbers of distinct lists, and of ids in them, for `samples` samples.
    pub fn distinct(&self, samples: f64) -> [f64; 2] {
        [samples / self.samples_per_list(), samples * self.pooling_factor / self.dedupe_factor]
    }

    /// Returns the numbers of [`distinct`](Self::distinct) at `deviations` standard deviations above the mean.
    /// Whether a sample's list is one of the distinct ones, and its length, are taken to be independent of the other
    /// samples.
    pub(crate) fn distinct_above(&self, samples: f64, deviations: f64) -> [f64; 2] {
        let [lists, ids] = self.distinct(samples);
        if lists <= 0.0 {
            return [lists, ids];
        }
        let (mean, list_variance) = (ids / lists, lists * (1.0 - lists / samples).max(0.0));
        let id_variance = list_variance * mean * mean + lists * self.deviation().powi(2);
        [(lists + deviations * list_variance.sqrt()).min(samples), ids + deviations * id_variance.sqrt()]
    }

    /// Returns the number of lookups for `ids` ids of distinct lists. A sequence needs the vectors of its timeline's
    /// elements, which overlapping windows share. A pooled list is the sum of the vectors of all its ids.
    pub(crate) fn looked_up(&self, ids: f64) -> f64 {
        if self.pooling.is_sequence() { self.elements(ids) } else { ids }
    }

    /// Returns the number of timeline elements for `ids` ids of distinct lists. Ranks send these elements in their
    /// requests.
    pub(crate) fn elements(&self, ids: f64) -> f64 {
        ids / self.window_factor
    }

    /// Returns the share of lookups, 0 to 1, that falls on `rows` of a table with `all` rows: from `lookup_shares` if
    /// given, else in proportion to the number of rows.
    pub fn share_of(&self, rows: &Range<u64>, all: u64) -> f64 {
        match &self.lookup_shares {
            Some(shares) => shares.share(rows),
            None => rows.end.saturating_sub(rows.start) as f64 / all.max(1) as f64,
        }
    }

    /// Returns how often the rows of a table with `rows` rows are looked up: `access_bins` if given, else the
    /// expectation for equally likely rows.
    pub fn accesses(&self, rows: u64) -> AccessBins {
        let looked_up = self.looked_up(self.distinct(ACCESS_BATCH as f64)[1]);
        self.access_bins.unwrap_or_else(|| AccessBins::uniform(rows, looked_up))
    }

    /// Checks that these lookups are possible for a table with `rows` rows. The error names the invalid value.
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

/// Returns whether a factor is 1 and need not be written.
fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

/// The default factor: no deduplication.
fn one() -> f64 {
    1.0
}

/// Returns the expected number of lists, among `lists` lists with `ids` ids in total, that have at least one id in a
/// given part of the rows. `part` is the probability, 0 to 1, that an id is in it.
///
/// A list of k ids has no id in the part with probability (1 - part)^k. If there are fewer ids than lists, each id
/// counts as a list of its own. Otherwise a list has one id plus a number of further ids that follows a negative
/// binomial distribution with the mean and deviation of the list lengths. For z = 1 - part, and m further ids on
/// average, the expectation of z^k is z (1 + (1 - z) s)^(-m / s), where s is the variance of their number ÷ m, less
/// one. Without a deviation, s is -1 and all lists have the same length. For variances below m, the same formula is
/// that of the binomial distribution.
pub(crate) fn shared_lists(lists: f64, ids: f64, deviation: f64, part: f64) -> f64 {
    if ids <= lists {
        return ids * part;
    }
    let further = ids / lists - 1.0;
    let spread = deviation * deviation / further - 1.0;
    // The limit for s → 0 is the Poisson distribution.
    let rate = if spread.abs() < 1e-9 { part } else { (part * spread).ln_1p() / spread };
    lists * (1.0 - (1.0 - part) * (-further * rate).exp())
}
