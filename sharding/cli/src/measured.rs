//! What a dataset's batches say about tables: ids per sample, dedupe factors, and how often rows are looked up.

use std::path::Path;

use anyhow::Result;
use onefold_base::progress::Reporter;
use onefold_ikjt::hash::SigridHash;
use onefold_ikjt::{Feature, Group, ReadRequest, Reader, Workers};
use onefold_sharding::{AccessBins, FeatureConfig, HASH_SALT, IdPolicy, LookupShares, Lookups};

/// What was counted for all features.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MeasuredFeatures {
    /// Samples that were read, in whole batches.
    pub(crate) samples: u64,
    /// In the order of the configurations. Rows are looked up once for every distinct list of a batch; where the model
    /// pools sequences, once for every element of their timelines.
    pub(crate) features: Vec<Lookups>,
}

/// A feature's counts while batches are read.
struct Counting<'a> {
    config: &'a FeatureConfig,
    sample_ids: u64,
    /// Distinct lists that are not empty.
    lists: u64,
    /// Ids of distinct lists, and the sum of the squares of their numbers.
    list_ids: u64,
    squared_sizes: f64,
    /// Elements of the lists' timelines: ids that windows share once.
    elements: u64,
    /// The table row of everything that is looked up: ids of distinct lists, or elements of sequences'
    /// timelines. Rows beyond 2³² are told apart by their lower half.
    rows: Vec<u32>,
}

/// Bytes of an id in a vector that has just grown to twice its size.
const BYTES_PER_ID: u64 = 8;

/// Reads batches of `dataset` until `samples` samples are counted, or all there are; `configs` are those of the
/// batches' features, in the same order; each is counted for itself, also where features share a table. Batches are
/// formed, preprocessed and deduplicated as `request` says, so the factors are those that training with them has. Keeps
/// 4 bytes for every id that is looked up, in vectors that grow by doubling, and ends once they take `memory_limit` bytes.
///
/// # Errors
///
/// The reader's errors, also for ids without a table row that `request` has it check.
pub(crate) fn measure_features(
    dataset: &Path,
    configs: &[FeatureConfig],
    request: ReadRequest,
    (samples, memory_limit): (u64, u64),
    reporter: &dyn Reporter,
) -> Result<MeasuredFeatures> {
    let reader = Reader::open(dataset, request, &Workers::of_machine()?)?;
    let mut counts: Vec<Counting<'_>> = configs.iter().map(Counting::new).collect();
    let mut read = 0;
    reporter.begin("Counting lookups", Some(samples.min(reader.samples())), "samples");
    for batch in reader.batches()? {
        let batch = batch?.batch;
        let features =
            batch.groups().iter().flat_map(|group| group.features().iter().map(move |f| (group, f)));
        for (count, (group, feature)) in counts.iter_mut().zip(features) {
            count.add(group, feature);
        }
        read += batch.size() as u64;
        reporter.advance(batch.size() as u64);
        reporter.go_on()?;
        let ids: usize = counts.iter().map(|count| count.rows.len()).sum();
        if read >= samples || ids as u64 * BYTES_PER_ID >= memory_limit {
            break;
        }
    }
    reporter.end();
    Ok(MeasuredFeatures {
        samples: read,
        features: counts.into_iter().map(|count| count.finish(read)).collect(),
    })
}

impl<'a> Counting<'a> {
    fn new(config: &'a FeatureConfig) -> Self {
        let rows = Vec::new();
        Self { config, sample_ids: 0, lists: 0, list_ids: 0, squared_sizes: 0.0, elements: 0, rows }
    }

    fn add(&mut self, group: &Group, feature: &Feature) {
        let samples = 0..group.samples();
        self.sample_ids += samples.map(|sample| feature.sizes()[group.row_of(sample)] as u64).sum::<u64>();
        self.lists += feature.sizes().iter().filter(|size| **size > 0).count() as u64;
        self.list_ids += feature.total_size();
        self.squared_sizes += feature.sizes().iter().map(|size| f64::from(*size).powi(2)).sum::<f64>();
        let elements = elements(feature);
        self.elements += elements.clone().count() as u64;
        if self.config.pooling.is_sequence() {
            self.look_up(elements);
        } else {
            self.look_up((0..feature.rows()).flat_map(|row| feature.row(row)).copied());
        }
    }

    fn look_up(&mut self, ids: impl Iterator<Item = i64>) {
        match self.config.ids {
            IdPolicy::Checked => self.rows.extend(ids.map(|id| id as u32)),
            IdPolicy::Hashed => {
                let hash = SigridHash::new(HASH_SALT, self.config.rows.min(i64::MAX as u64) as i64);
                self.rows.extend(ids.map(|id| hash.hash(id) as u32));
            }
        }
    }

    fn finish(mut self, samples: u64) -> Lookups {
        let (distinct_ids, lists) = (self.list_ids as f64, self.lists.max(1) as f64);
        let mean = distinct_ids / lists;
        self.rows.sort_unstable();
        let counts = self.rows.chunk_by(|a, b| a == b).map(|same| same.len() as u64);
        Lookups {
            pooling: self.config.pooling,
            pooling_factor: self.sample_ids as f64 / samples.max(1) as f64,
            dedupe_factor: if distinct_ids > 0.0 { self.sample_ids as f64 / distinct_ids } else { 1.0 }
                .max(1.0),
            list_dedupe_factor: Some((samples.max(1) as f64 / lists).max(1.0)),
            access_bins: Some(AccessBins::from_counts(counts)),
            list_length_deviation: Some((self.squared_sizes / lists - mean * mean).max(0.0).sqrt()),
            window_factor: (distinct_ids / self.elements.max(1) as f64).max(1.0),
            // Rows beyond 2³² are not told apart.
            lookup_shares: (self.config.rows <= 1 << 32)
                .then(|| LookupShares::from_lookups(&self.rows, self.config.rows))
                .flatten(),
        }
    }
}

/// The ids of a feature that are in a row, those that rows share once.
fn elements(feature: &Feature) -> impl Iterator<Item = i64> + Clone {
    let mut begins = vec![0_i32; feature.values().len() + 1];
    for (&offset, &size) in feature.offsets().iter().zip(feature.sizes().iter()) {
        begins[offset as usize] += 1;
        begins[(offset + size) as usize] -= 1;
    }
    let rows = begins.into_iter().scan(0, |rows, begins| {
        *rows += begins;
        Some(*rows)
    });
    feature.values().iter().copied().zip(rows).filter(|(_, rows)| *rows > 0).map(|(id, _)| id)
}

#[cfg(test)]
mod tests {
    use onefold_sharding::{DataType, Pooling, Shard, ShardLoad, ShardingType, Table, Topology};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Half of the samples share a list of 1,000 ids, each of the others has one id of its own.
    #[test]
    fn lists_and_ids_have_factors_of_their_own() {
        let single = (0..1024).map(|id| vec![id]);
        let rows: Vec<Vec<i64>> = std::iter::once((0..1000).collect()).chain(single).collect();
        let inverse: Vec<i32> = std::iter::repeat_n(0, 1024).chain(1..=1024).collect();
        let feature = Feature::from_rows("f", &rows).unwrap();
        let group = Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap();
        let found = found(&config(Pooling::Sum, 1024, IdPolicy::Checked), &group);
        assert_eq!((found.pooling_factor, found.list_dedupe_factor), (500.5, Some(2048.0 / 1025.0)));
        assert_eq!(found.dedupe_factor, 1_025_024.0 / 2024.0);

        // The plan expects the lists and ids that come, and has room for them.
        let table = Table {
            first: Lookups {
                pooling_factor: found.pooling_factor,
                dedupe_factor: found.dedupe_factor,
                list_dedupe_factor: found.list_dedupe_factor,
                ..Lookups::default()
            },
            ..Table::new("f", 1024, 64)
        };
        let (topology, shard) = (Topology::h100(2, 1 << 30).unwrap(), Shard::whole(&table, 0));
        let sharding_type = ShardingType::TableWise;
        let load = ShardLoad { table: &table, sharding_type, shard: &shard, within_node: true };
        let work = load.work(&topology, 1024);
        for (found, expected) in [(work.lists, 1025.0), (work.ids, 2024.0), (work.vectors, 1025.0)] {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
        // Each of two ranks has half of them: one asks, the other serves.
        let buffers = load.buffers(&topology, 1024);
        let half = ((2024 + 1025) * 8 + 2 * 1025 * 64 * 4) / 2;
        assert!(buffers.serving == 0 && buffers.asking.abs_diff(half) <= 1, "{buffers:?}");
        // As if all lists had one length, 506 times fewer would be expected.
        let alike =
            Table { first: Lookups { list_dedupe_factor: None, ..table.first.clone() }, ..table.clone() };
        let load = ShardLoad { table: &alike, ..load };
        assert!(load.work(&topology, 1024).lists < 5.0);
    }

    fn config(pooling: Pooling, rows: u64, ids: IdPolicy) -> FeatureConfig {
        let (table, target) = (None, None);
        FeatureConfig {
            feature: "f".into(),
            table,
            rows,
            dim: 64,
            pooling,
            target,
            ids,
            dtype: DataType::Fp32,
        }
    }

    fn found(config: &FeatureConfig, group: &Group) -> Lookups {
        let mut counting = Counting::new(config);
        counting.add(group, &group.features()[0]);
        counting.finish(group.samples() as u64)
    }

    #[test]
    fn windows_share_the_elements_of_a_timeline() {
        // The last id of the buffer is in no row.
        let (values, offsets, sizes) = (vec![1_i64, 2, 3, 4, 5, 9], vec![0, 1, 2, 3], vec![3, 3, 3, 0]);
        let feature = Feature::try_new("f", values, offsets, sizes).unwrap();
        let inverse: Vec<i32> = vec![0, 0, 1, 2, 3];
        let group = Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap();
        let [sequence, sum] = [Pooling::Attention, Pooling::Sum]
            .map(|pooling| found(&config(pooling, 16, IdPolicy::Checked), &group));
        for measured in [&sequence, &sum] {
            assert_eq!((measured.window_factor, measured.list_length_deviation), (9.0 / 5.0, Some(0.0)));
            assert_eq!((measured.dedupe_factor, measured.list_dedupe_factor), (12.0 / 9.0, Some(5.0 / 3.0)));
        }
        // Five elements are looked up once each; or nine ids, of which two are in two lists and one in three.
        assert_eq!(sequence.access_bins, Some(AccessBins::from_counts([1, 1, 1, 1, 1])));
        assert_eq!(sum.access_bins, Some(AccessBins::from_counts([1, 2, 3, 2, 1])));
        // Vectors of a sequence are those of its elements.
        let table = Table {
            first: Lookups { list_length_deviation: None, ..sequence.clone() },
            ..Table::new("f", 16, 64)
        };
        let (topology, shard) = (Topology::h100(1, 1 << 30).unwrap(), Shard::whole(&table, 0));
        let sharding_type = ShardingType::TableWise;
        let work =
            ShardLoad { table: &table, sharding_type, shard: &shard, within_node: true }.work(&topology, 5);
        for (found, expected) in [(work.lists, 3.0), (work.ids, 5.0), (work.vectors, 5.0)] {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }

    #[test]
    fn rows_are_counted_where_training_looks_them_up() {
        // Ids by frequency, in lists of one and of three.
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut id = || (10_000f64.powf(rng.random_range(0.0..1.0)) - 1.0) as i64;
        let rows: Vec<Vec<i64>> = (0..20_000).map(|i| (0..1 + 2 * (i % 2)).map(|_| id()).collect()).collect();
        let group = Group::try_new("g", None, vec![Feature::from_rows("f", &rows).unwrap()]).unwrap();
        let checked = found(&config(Pooling::Sum, 10_000, IdPolicy::Checked), &group);
        assert_eq!(
            (checked.pooling_factor, checked.list_length_deviation, checked.window_factor),
            (2.0, Some(1.0), 1.0)
        );
        let first = rows.iter().flatten().filter(|id| **id < 2_500).count() as f64 / 40_000.0;
        let share = checked.lookup_shares.unwrap().share(&(0..2_500));
        assert!(first > 0.8 && (share / first - 1.0).abs() < 0.02, "{share} {first}");
        // Hashed, frequent ids are anywhere.
        let hashed = found(&config(Pooling::Sum, 10_000, IdPolicy::Hashed), &group);
        let hash = SigridHash::new(HASH_SALT, 10_000);
        let first = rows.iter().flatten().filter(|id| hash.hash(**id) < 2_500).count() as f64 / 40_000.0;
        let share = hashed.lookup_shares.map_or(0.25, |shares| shares.share(&(0..2_500)));
        assert!(first < 0.6 && (share - first).abs() < 0.014, "{share} {first}");
    }
}
