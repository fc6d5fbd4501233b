//! What a learned cost model sees of a shard.

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, ACCESS_BINS, AccessBins};
use crate::table::ACTIVATION_BYTES;
use crate::{Error, Result, ShardLoad, Topology};

/// A shard and its work in a step: what is measured by `onefold-train profile` and given to a learned model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShardFeatures {
    /// Rows of the shard.
    pub rows: f64,
    /// Columns of the shard.
    pub columns: f64,
    /// Mean number of ids per distinct list that the shard has rows for.
    pub pooling_factor: f64,
    /// Samples ÷ distinct lists.
    pub dedupe_factor: f64,
    /// Distinct lists per step.
    pub lists: f64,
    /// Vectors that come out per step.
    pub vectors: f64,
    /// How often the table's rows are looked up.
    pub access_bins: AccessBins,
}

impl ShardFeatures {
    /// Of a shard that stands on a rank: one for every feature of its table, as if each had a table of its own.
    pub fn of<'a>(
        load: &'a ShardLoad<'a>,
        topology: &'a Topology,
        batch_size: u64,
    ) -> impl Iterator<Item = Self> + 'a {
        load.table.lookups().map(move |lookups| {
            let work = load.work_of(&lookups, topology, batch_size);
            Self {
                rows: load.shard.row_count() as f64,
                columns: load.shard.column_count() as f64,
                pooling_factor: if work.lists > 0.0 { work.ids / work.lists } else { 0.0 },
                dedupe_factor: lookups.list_dedupe_factor,
                lists: work.lists,
                vectors: work.vectors,
                access_bins: lookups.accesses(load.table.rows),
            }
        })
    }

    /// Checks that every feature is a number that can be.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] naming the feature.
    pub fn validate(&self) -> Result<()> {
        let hint = "features must be finite numbers of 0 or more; measure or describe the table again";
        let values = [
            ("rows", self.rows),
            ("columns", self.columns),
            ("pooling_factor", self.pooling_factor),
            ("dedupe_factor", self.dedupe_factor),
            ("lists", self.lists),
            ("vectors", self.vectors),
        ];
        match values.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            Some((name, value)) => Err(Error::invalid(format!("the feature `{name}` is {value}"), hint)),
            None => self.access_bins.validate(),
        }
    }
}

/// Which features a learned model has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureSet {
    /// NeuroShard's 20: the access bins, dimension, pooling factor and rows, as they are; and the samples of a step,
    /// which there are always as many.
    Neuroshard,
    /// Those, and what follows from them with the dedupe factor and the batch: lists, ids, distinct rows, bytes read
    /// and written, and logarithms, on which the place in the cache hierarchy depends.
    #[default]
    Full,
    /// `Full` without reuse: all rows are taken as equally likely.
    WithoutReuse,
    /// `Full` without deduplication: every sample is taken to have a list of its own.
    WithoutDedupe,
}

const NEUROSHARD: [&str; 4] = ["dim", "pooling_factor", "row", "samples"];
const OURS: [&str; 14] = [
    "dedupe_factor",
    "lists",
    "ids",
    "read_bytes",
    "written_bytes",
    "distinct_rows",
    "distinct_bytes",
    "hot_share",
    "log_rows",
    "log_ids",
    "log_shard_bytes",
    "log_distinct_bytes",
    "log_pooling_factor",
    "log_dim",
];

impl FeatureSet {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Full, Self::Neuroshard, Self::WithoutReuse, Self::WithoutDedupe];

    /// Its name, as in a model's file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Neuroshard => "neuroshard",
            Self::Full => "full",
            Self::WithoutReuse => "without_reuse",
            Self::WithoutDedupe => "without_dedupe",
        }
    }

    /// The features' names, in their order.
    pub fn names(self) -> Vec<String> {
        let bins = (0..ACCESS_BINS).map(|k| format!("bin_{k}"));
        let ours = if self == Self::Neuroshard { &[][..] } else { &OURS[..] };
        bins.chain(NEUROSHARD.iter().chain(ours).map(|name| (*name).to_owned())).collect()
    }

    /// The places of what a shard's time grows with in proportion: the more of it, the longer. None for NeuroShard's
    /// features, which are not of that kind.
    pub(crate) fn work(self) -> Vec<usize> {
        const WORK: [&str; 6] =
            ["lists", "ids", "read_bytes", "written_bytes", "distinct_rows", "distinct_bytes"];
        let names = self.names();
        (0..names.len()).filter(|i| WORK.contains(&names[*i].as_str())).collect()
    }

    /// The features of a shard, not yet normalised.
    pub fn encode(self, shard: &ShardFeatures) -> Vec<f64> {
        let shard = &match self {
            Self::Neuroshard | Self::Full => *shard,
            Self::WithoutReuse => ShardFeatures {
                access_bins: AccessBins::uniform(shard.rows.max(1.0) as u64, shard.counted_accesses()),
                ..*shard
            },
            Self::WithoutDedupe => ShardFeatures {
                dedupe_factor: 1.0,
                lists: shard.lists * shard.dedupe_factor,
                vectors: shard.vectors * shard.dedupe_factor,
                ..*shard
            },
        };
        let mut values = shard.access_bins.0.to_vec();
        values.extend([shard.columns, shard.pooling_factor, shard.rows, shard.lists * shard.dedupe_factor]);
        if self != Self::Neuroshard {
            values.extend(shard.derived());
        }
        values
    }
}

impl ShardFeatures {
    /// The lookups that the access bins are counted over.
    fn counted_accesses(&self) -> f64 {
        self.pooling_factor * ACCESS_BATCH as f64 / self.dedupe_factor
    }

    /// What follows from the features, in the order of [`OURS`].
    fn derived(&self) -> [f64; 14] {
        let ids = self.lists * self.pooling_factor;
        let row_bytes = self.columns * ACTIVATION_BYTES;
        let distinct_rows =
            self.access_bins.expected_rows(ids, self.counted_accesses()).min(self.rows).min(ids);
        let log = |x: f64| x.max(1.0).ln();
        [
            self.dedupe_factor,
            self.lists,
            ids,
            ids * row_bytes,
            self.vectors * row_bytes,
            distinct_rows,
            distinct_rows * row_bytes,
            // The part of lookups that finds a row looked up before in the step.
            if ids > 0.0 { 1.0 - distinct_rows / ids } else { 0.0 },
            log(self.rows),
            log(ids),
            log(self.rows * row_bytes),
            log(distinct_rows * row_bytes),
            (1.0 + self.pooling_factor).ln(),
            log(self.columns),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Shard, ShardingType, Table};

    #[test]
    fn features_are_named_and_follow_from_the_shard() {
        let table = Table { pooling_factor: 6.0, dedupe_factor: 4.0, ..Table::new("t", 1000, 32) };
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let shard = Shard { rank: 0, rows: 0..500, columns: 0..32 };
        let load = ShardLoad {
            table: &table,
            sharding_type: ShardingType::RowWise,
            shard: &shard,
            within_node: true,
        };
        let features = ShardFeatures::of(&load, &topology, 100).next().unwrap();
        let encoded = FeatureSet::Full.encode(&features);
        let value =
            |name: &str| encoded[FeatureSet::Full.names().iter().position(|other| other == name).unwrap()];
        assert_eq!(encoded.len(), FeatureSet::Full.names().len());
        assert_eq!((value("lists"), value("pooling_factor"), value("ids")), (50.0, 3.0, 150.0));
        assert_eq!((value("read_bytes"), value("written_bytes")), (150.0 * 128.0, 50.0 * 128.0));
        assert_eq!((value("row"), value("dim"), value("dedupe_factor")), (500.0, 32.0, 4.0));
        // 150 lookups of 500 equally likely rows.
        let distinct = 500.0 * (1.0 - (-150.0f64 / 500.0).exp());
        assert!(
            (value("distinct_rows") / distinct - 1.0).abs() < 0.05,
            "{} {distinct}",
            value("distinct_rows")
        );
        let neuroshard = FeatureSet::Neuroshard;
        assert_eq!(neuroshard.encode(&features)[..], encoded[..21]);
        assert_eq!((neuroshard.names().len(), encoded[20]), (21, 200.0));
        let plain = FeatureSet::WithoutDedupe.encode(&features);
        assert_eq!((plain[20], plain[21], plain[22]), (200.0, 1.0, 200.0));
        let hot = ShardFeatures { access_bins: AccessBins::zipf(500, 49_152.0, 1.2), ..features };
        assert_eq!(FeatureSet::WithoutReuse.encode(&hot), FeatureSet::WithoutReuse.encode(&features));
        assert!(FeatureSet::ALL.iter().all(|set| set.encode(&hot).len() == set.names().len()));
    }

    #[test]
    fn features_that_are_no_numbers_are_refused_by_name() {
        let fine = ShardFeatures {
            rows: 1.0,
            columns: 4.0,
            pooling_factor: 1.0,
            dedupe_factor: 1.0,
            lists: 1.0,
            vectors: 1.0,
            access_bins: AccessBins([0.0; ACCESS_BINS]),
        };
        assert!(fine.validate().is_ok());
        let error = ShardFeatures { lists: f64::NAN, ..fine }.validate().unwrap_err().to_string();
        assert!(error.starts_with("the feature `lists` is NaN\n  hint: "), "{error}");
        assert!(ShardFeatures { rows: f64::INFINITY, ..fine }.validate().is_err());
        assert!(ShardFeatures { access_bins: AccessBins([f64::NAN; 17]), ..fine }.validate().is_err());
    }
}
