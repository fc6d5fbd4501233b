//! The features of a shard that a learned cost model uses.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::access::{ACCESS_BATCH, ACCESS_BINS, AccessBins};
use crate::cost::ShardLoad;
use crate::error::{Error, Result};
use crate::plan::ShardingType;
use crate::table::ACTIVATION_BYTES;

/// A shard and its work in a step, as `onefold-train-tools profile` measures it and a learned model takes it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShardFeatures {
    /// The number of rows of the shard.
    pub rows: f64,
    /// The number of columns of the shard.
    pub columns: f64,
    /// Bytes per weight.
    pub weight_bytes: f64,
    /// Bytes of optimizer state per row.
    pub state_bytes: f64,
    /// The mean number of ids, of those that the shard has rows for, per list of `lists`.
    pub pooling_factor: f64,
    /// The number of samples ÷ `lists`.
    pub dedupe_factor: f64,
    /// The number of distinct lists per step with at least one id that the shard has rows for.
    pub lists: f64,
    /// The number of vectors per step that the shard returns.
    pub vectors: f64,
    /// The number of these vectors that are copied to be sent to the ranks that requested them. Their gradients are
    /// sent back.
    pub sent_vectors: f64,
    /// The number of ranks that request these vectors.
    pub askers: f64,
    /// The number of copies of the shard. Each rank with a copy looks up its own samples in it, and applies the
    /// gradients of all ranks. It is 1 unless the table is data-parallel.
    pub copies: f64,
    /// How often the rows of the table are looked up.
    pub access_bins: AccessBins,
}

/// The work of a rank in a step to request vectors from shards, on any rank, for its own samples. It excludes tables
/// that the rank looks up locally. All ranks have the same amount of work, apart from these tables.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct AskedFeatures {
    /// The number of ids to process, counted once for every shard of their table.
    pub ids: f64,
    /// The number of lists to process, counted once for every shard of their table.
    pub lists: f64,
    /// Bytes of the vectors that are received, and of the gradients that are sent for them.
    pub bytes: f64,
    /// The number of requests: one for every feature and shard.
    pub requests: f64,
}

impl ShardFeatures {
    /// Returns the features of a shard on a rank, once for every feature of its table, as if each feature had a table
    /// of its own.
    pub fn of<'a>(load: &'a ShardLoad<'a>) -> impl Iterator<Item = Self> + 'a {
        let ShardLoad { table, shard, topology, .. } = *load;
        let ranks = f64::from(topology.ranks);
        let copies = if load.sharding_type == ShardingType::DataParallel { ranks } else { 1.0 };
        // The owner of a whole table looks it up locally. If a table is divided, a rank also sends requests to its
        // own shard.
        let askers = match copies > 1.0 || ranks == 1.0 {
            true => 0.0,
            false if load.is_whole() => ranks - 1.0,
            false => ranks,
        };
        let samples = load.samples();
        table.lookups().map(move |lookups| {
            let served = load.served_of(lookups);
            Self {
                rows: shard.row_count() as f64,
                columns: shard.column_count() as f64,
                weight_bytes: table.dtype.bytes() as f64,
                state_bytes: table.state_bytes(shard.column_count()),
                pooling_factor: if served.lists > 0.0 { served.ids / served.lists } else { 0.0 },
                dedupe_factor: if served.lists > 0.0 { samples / served.lists } else { 1.0 },
                lists: served.lists,
                vectors: served.vectors,
                sent_vectors: askers / ranks * served.vectors,
                askers,
                copies,
                access_bins: lookups.accesses(table.rows),
            }
        })
    }

    /// Returns the number of distinct rows that the shard's rank looks up in a step.
    pub(crate) fn distinct_rows(&self) -> f64 {
        self.distinct_rows_of(1.0)
    }

    /// Returns the number of distinct rows that are updated in a step. For a copy, these are the rows that any rank
    /// looks up.
    pub(crate) fn updated_rows(&self) -> f64 {
        self.distinct_rows_of(self.copies)
    }

    /// Returns the number of distinct rows in the lookups of `ranks` ranks like this one.
    fn distinct_rows_of(&self, ranks: f64) -> f64 {
        let ids = ranks * self.lists * self.pooling_factor;
        self.access_bins.expected_rows(ids, self.counted_accesses()).min(self.rows).min(ids)
    }

    /// Checks that every feature is a finite number of at least 0.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] that names the feature.
    pub fn validate(&self) -> Result<()> {
        let hint = "features must be finite numbers of 0 or more; measure or describe the table again";
        let values = [
            ("rows", self.rows),
            ("columns", self.columns),
            ("weight_bytes", self.weight_bytes),
            ("state_bytes", self.state_bytes),
            ("pooling_factor", self.pooling_factor),
            ("dedupe_factor", self.dedupe_factor),
            ("lists", self.lists),
            ("vectors", self.vectors),
            ("sent_vectors", self.sent_vectors),
            ("askers", self.askers),
            ("copies", self.copies),
        ];
        match values.into_iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            Some((name, value)) => Err(Error::invalid(format!("the feature `{name}` is {value}"), hint)),
            None => self.access_bins.validate(),
        }
    }
}

impl AskedFeatures {
    /// The number of features.
    pub(crate) const COUNT: usize = 4;

    /// Returns the requests of one rank to one shard.
    pub fn of(load: &ShardLoad<'_>) -> Self {
        let topology = load.topology;
        if topology.ranks == 1 || load.sharding_type == ShardingType::DataParallel {
            return Self::default();
        }
        let ranks = f64::from(topology.ranks);
        let mut sum = Self::default();
        for lookups in load.table.lookups() {
            let [lists, ids] = lookups.distinct(load.batch_size as f64);
            let ids = lookups.elements(ids);
            let vectors = load.served_of(lookups).vectors / ranks;
            let bytes = vectors * load.shard.column_count() as f64 * ACTIVATION_BYTES;
            sum.add(&Self { ids, lists, bytes, requests: 1.0 });
        }
        sum
    }

    /// Returns the requests of each rank to all shards. `loads` are ordered by rank. A rank does not request from
    /// tables that it holds whole, because it looks them up locally.
    pub fn by_rank(loads: &[Vec<ShardLoad<'_>>]) -> Vec<Self> {
        let mut of_parts = Self::default();
        let mut of_whole = vec![Self::default(); loads.len()];
        for (loads, of_whole) in loads.iter().zip(&mut of_whole) {
            for load in loads {
                let sum = if load.is_whole() { &mut *of_whole } else { &mut of_parts };
                sum.add(&Self::of(load));
            }
        }
        let asked_by = |rank: usize| {
            let mut sum = of_parts;
            let others = of_whole.iter().enumerate().filter(|(owner, _)| *owner != rank);
            others.for_each(|(_, whole)| sum.add(whole));
            sum
        };
        (0..loads.len()).map(asked_by).collect()
    }

    fn add(&mut self, other: &Self) {
        self.ids += other.ids;
        self.lists += other.lists;
        self.bytes += other.bytes;
        self.requests += other.requests;
    }

    /// Returns the values, in the order of the fields.
    pub(crate) fn values(&self) -> [f64; Self::COUNT] {
        [self.ids, self.lists, self.bytes, self.requests]
    }
}

/// The indices in [`OURS`] of the features to which the time of a shard is proportional.
const WORK: Range<usize> = 1..14;
/// The number of features at the start of [`OURS`] that are amounts, which differ by orders of magnitude.
const AMOUNTS: usize = 18;
const NEUROSHARD: [&str; 4] = ["dim", "pooling_factor", "row", "samples"];
const OURS: [&str; 22] = [
    "dedupe_factor",
    "lists",
    "ids",
    "read_bytes",
    "written_bytes",
    "distinct_rows",
    "distinct_bytes",
    "state_bytes",
    "sent_vectors",
    "sent_bytes",
    "own_rows",
    "told_rows",
    "copied_bytes",
    "askers",
    "vectors",
    "shard_bytes",
    "row_state_bytes",
    "copies",
    "hot_share",
    "sent_share",
    "is_narrow",
    "is_copied",
];

impl ShardFeatures {
    /// Returns the names of a learned model's inputs for a shard, in order: NeuroShard's features (the access bins,
    /// dimension, pooling factor, rows and samples), and features that are derived from them, the dedupe factor and
    /// the batch size.
    pub fn names() -> Vec<String> {
        let bins = (0..ACCESS_BINS).map(|k| format!("bin_{k}"));
        bins.chain(NEUROSHARD.iter().chain(&OURS).map(|name| (*name).to_owned())).collect()
    }

    /// Returns the indices of the features to which the time of a shard is proportional.
    pub(crate) fn work() -> Vec<usize> {
        let before = ACCESS_BINS + NEUROSHARD.len();
        WORK.map(|place| before + place).collect()
    }

    /// Returns the indices of the amounts. The encoder sees their logarithms, because the amounts determine which
    /// level of the cache hierarchy is used.
    pub(crate) fn amounts() -> Range<usize> {
        ACCESS_BINS..ACCESS_BINS + NEUROSHARD.len() + AMOUNTS
    }

    /// Returns the inputs of a learned model, before normalisation.
    pub fn encoded(&self) -> Vec<f64> {
        let mut values = self.access_bins.0.to_vec();
        values.extend([self.columns, self.pooling_factor, self.rows, self.lists * self.dedupe_factor]);
        values.extend(self.derived());
        values
    }

    /// Returns the number of lookups over which the access bins are counted.
    fn counted_accesses(&self) -> f64 {
        self.pooling_factor * ACCESS_BATCH as f64 / self.dedupe_factor
    }

    /// Returns the derived features, in the order of [`OURS`].
    fn derived(&self) -> [f64; OURS.len()] {
        let ids = self.lists * self.pooling_factor;
        let (row_bytes, vector_bytes) = (self.columns * self.weight_bytes, self.columns * ACTIVATION_BYTES);
        // A copy is updated with the rows of all ranks. Each rank tells all others which rows its batch uses, sends
        // the rows' gradients to the ranks that sum them, and receives the sums.
        let (own, distinct) = (self.distinct_rows(), self.updated_rows());
        let (sent_rows, told, copied) = match self.copies > 1.0 {
            true => (own, (self.copies - 1.0) * own, own + distinct),
            false => (0.0, 0.0, 0.0),
        };
        let share = |part: f64, of: f64| if of > 0.0 { part / of } else { 0.0 };
        let flag = |is: bool| f64::from(u8::from(is));
        [
            self.dedupe_factor,
            self.lists,
            ids,
            ids * row_bytes,
            self.vectors * vector_bytes,
            distinct,
            distinct * row_bytes,
            distinct * self.state_bytes,
            self.sent_vectors,
            self.sent_vectors * vector_bytes,
            sent_rows,
            told,
            copied * vector_bytes,
            self.askers,
            self.vectors,
            self.rows * row_bytes,
            self.state_bytes,
            self.copies,
            // The share of lookups whose row was already looked up in the same step.
            if ids > 0.0 { 1.0 - own / ids } else { 0.0 },
            share(self.sent_vectors, self.vectors),
            flag(self.weight_bytes < ACTIVATION_BYTES),
            flag(self.copies > 1.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Shard, ShardingType};
    use crate::table::Table;
    use crate::topology::Topology;
    use crate::{DataType, TableOptimizer};

    #[test]
    fn features_are_named_and_follow_from_the_shard() {
        let table = Table {
            first: crate::Lookups {
                pooling_factor: 6.0,
                dedupe_factor: 4.0,
                ..crate::lookups::Lookups::default()
            },
            ..Table::new("t", 1000, 32)
        };
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let shard = Shard { rank: 0, rows: 0..500, columns: 0..32 };
        let whole = ShardLoad::table_wise(&table, &shard, &topology, 100);
        let load = ShardLoad { sharding_type: ShardingType::RowWise, ..whole };
        let features = ShardFeatures::of(&load).next().unwrap();
        let encoded = features.encoded();
        let value =
            |name: &str| encoded[ShardFeatures::names().iter().position(|other| other == name).unwrap()];
        assert_eq!(encoded.len(), ShardFeatures::names().len());
        // A list of six ids has an id in the first half of the rows, except for one list in 64; there are 50 lists.
        let lists = 50.0 * (1.0 - 0.5f64.powi(6));
        assert_eq!((value("lists"), value("ids")), (lists, 150.0));
        assert_eq!((value("read_bytes"), value("written_bytes")), (150.0 * 128.0, lists * 128.0));
        assert_eq!((value("row"), value("dim"), value("dedupe_factor")), (500.0, 32.0, 200.0 / lists));
        assert_eq!((value("state_bytes"), value("is_copied")), (4.0 * value("distinct_rows"), 0.0));
        // A rank sends requests to itself and to the other rank.
        assert_eq!((value("sent_vectors"), value("sent_share")), (lists, 1.0));
        // 150 lookups of 500 equally likely rows.
        let distinct = 500.0 * (1.0 - (-150.0f64 / 500.0).exp());
        assert!(
            (value("distinct_rows") / distinct - 1.0).abs() < 0.05,
            "{} {distinct}",
            value("distinct_rows")
        );
        assert_eq!(encoded[20], 200.0);
        let (names, work) = (ShardFeatures::names(), ShardFeatures::work());
        assert_eq!(work.len(), 13);
        assert_eq!([work[0], work[12]].map(|place| names[place].as_str()), ["lists", "askers"]);
        let amounts = ShardFeatures::amounts();
        assert_eq!([names[amounts.start].as_str(), names[amounts.end - 1].as_str()], ["dim", "copies"]);
        let asked = AskedFeatures::of(&load);
        assert_eq!(asked.values(), [150.0, 25.0, lists / 2.0 * 128.0, 1.0]);
        assert_eq!(value("askers"), 2.0);
    }

    /// Data types, optimizer states and copies change the model's inputs.
    #[test]
    fn a_copy_is_updated_with_the_rows_of_all_ranks() {
        let adam = TableOptimizer::Adam;
        let table = Table { dtype: DataType::Bf16, optimizer: adam, ..Table::new("t", 100, 32) };
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let features = |sharding_type| {
            let shard = Shard::whole(&table, 0);
            let whole = ShardLoad::table_wise(&table, &shard, &topology, 50);
            ShardFeatures::of(&ShardLoad { sharding_type, ..whole }).next().unwrap()
        };
        let value = |features: &ShardFeatures, name: &str| {
            features.encoded()[ShardFeatures::names().iter().position(|other| other == name).unwrap()]
        };
        let (whole, copy) = (features(ShardingType::TableWise), features(ShardingType::DataParallel));
        for features in [&whole, &copy] {
            assert_eq!((features.weight_bytes, features.state_bytes), (2.0, 2.0 * 32.0 * 4.0));
            assert_eq!(value(features, "is_narrow"), 1.0);
        }
        assert_eq!((whole.lists, whole.sent_vectors, whole.askers, whole.copies), (200.0, 150.0, 3.0, 1.0));
        assert_eq!((copy.lists, copy.sent_vectors, copy.askers, copy.copies), (50.0, 0.0, 0.0, 4.0));
        // Both update the rows of 200 samples.
        let own = value(&copy, "own_rows");
        assert!((value(&whole, "distinct_rows") - value(&copy, "distinct_rows")).abs() < 1e-9);
        assert_eq!((value(&copy, "told_rows"), value(&whole, "told_rows")), (3.0 * own, 0.0));
        let sums = value(&copy, "distinct_rows");
        assert_eq!(value(&copy, "copied_bytes"), (own + sums) * 128.0);
        assert!((own / (100.0 * (1.0 - (-0.5f64).exp())) - 1.0).abs() < 0.05, "{own}");
    }

    #[test]
    fn features_that_are_no_numbers_are_refused_by_name() {
        let fine = ShardFeatures {
            rows: 1.0,
            columns: 4.0,
            weight_bytes: 4.0,
            state_bytes: 4.0,
            pooling_factor: 1.0,
            dedupe_factor: 1.0,
            lists: 1.0,
            vectors: 1.0,
            sent_vectors: 0.0,
            askers: 0.0,
            copies: 1.0,
            access_bins: AccessBins([0.0; ACCESS_BINS]),
        };
        assert!(fine.validate().is_ok());
        let error = ShardFeatures { lists: f64::NAN, ..fine }.validate().unwrap_err().to_string();
        assert!(error.starts_with("the feature `lists` is NaN\n  hint: "), "{error}");
        assert!(ShardFeatures { rows: f64::INFINITY, ..fine }.validate().is_err());
        assert!(ShardFeatures { access_bins: AccessBins([f64::NAN; 17]), ..fine }.validate().is_err());
    }
}
