//! Statistics of tables from a dataset's batches: ids per sample, dedupe factors, and how often rows are looked up.

use std::path::Path;

use anyhow::Result;
use onefold_base::process::available_threads;
use onefold_base::progress::Reporter;
use onefold_ikjt::hash::SigridHash;
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{Feature, Group, ReadRequest, Reader, Workers};
use onefold_sharding::{AccessBins, FeatureConfig, HASH_SALT, IdPolicy, LookupShares, Lookups};

/// The statistics of all features.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MeasuredFeatures {
    /// The number of samples that were read, in whole batches.
    pub(crate) samples: u64,
    /// The lookups of each feature, in the order of the configurations. A row is looked up once for every distinct
    /// list of a batch. If the model pools sequences, it is looked up once for every element of their timelines.
    pub(crate) features: Vec<Lookups>,
}

/// The counts of a feature while batches are read.
struct Counting<'a> {
    config: &'a FeatureConfig,
    sample_ids: u64,
    /// The number of distinct non-empty lists.
    lists: u64,
    /// The number of ids in distinct lists, and the sum of the squares of the list lengths.
    list_ids: u64,
    squared_sizes: f64,
    /// The number of elements of the lists' timelines. An id that several windows share counts once.
    elements: u64,
    /// The table row of every lookup: for ids of distinct lists, or for elements of sequences' timelines. Rows are
    /// stored modulo 2³².
    rows: Vec<u32>,
}

/// Bytes per id in a vector that has just doubled its capacity.
const BYTES_PER_ID: u64 = 8;

/// Reads batches of `dataset` until `samples` samples are counted, or until its end. `configs` are the configurations
/// of the batches' features, in the same order. Each feature is counted separately, even if features share a table.
/// `request` determines how batches are formed, preprocessed and deduplicated, so the factors are those of a training
/// with these batches. Takes 4 bytes for every looked-up id, in vectors that grow by doubling, and stops when they
/// take `memory_limit` bytes.
///
/// # Errors
///
/// Errors of the reader, including errors for ids without a table row if `request` requests that check.
pub(crate) fn measure_features(
    dataset: &Path,
    configs: &[FeatureConfig],
    request: ReadRequest,
    (samples, memory_limit): (u64, u64),
    reporter: &dyn Reporter,
) -> Result<MeasuredFeatures> {
    let reader = Reader::open(dataset, request, &Workers::new(available_threads(), DEFAULT_MEMORY_LIMIT)?)?;
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
            // Larger row numbers are stored modulo 2³², so their distribution is unknown.
            lookup_shares: (self.config.rows <= 1 << 32)
                .then(|| LookupShares::from_lookups(&self.rows, self.config.rows))
                .flatten(),
        }
    }
}

/// Returns the ids of a feature that are part of a list. An id that several lists share is returned once.
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
    use onefold_sharding::{DataType, Pooling, Shard, ShardLoad, Table, Topology};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Half of the samples share a list of 1,000 ids, and each of the others has one id of its own.
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

        // The plan predicts the actual numbers of lists and ids, and has room for them.
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
        let load = ShardLoad::table_wise(&table, &shard, &topology, 1024);
        let work = load.work();
        for (found, expected) in [(work.lists, 1025.0), (work.ids, 2024.0), (work.vectors, 1025.0)] {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
        // Each of two ranks has half of the samples: one requests, the other serves.
        let buffers = load.buffers();
        let half = ((2024 + 1025) * 8 + 2 * 1025 * 64 * 4) / 2;
        assert!(buffers.serving == 0 && buffers.asking.abs_diff(half) <= 1, "{buffers:?}");
        // If all lists had the same length, 506 times fewer lists would be expected.
        let alike =
            Table { first: Lookups { list_dedupe_factor: None, ..table.first.clone() }, ..table.clone() };
        let load = ShardLoad { table: &alike, ..load };
        assert!(load.work().lists < 5.0);
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
        // The last id of the buffer is not part of a list.
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
        // Five elements are looked up once each; or nine ids, of which two are in two lists and one is in three
        // lists.
        assert_eq!(sequence.access_bins, Some(AccessBins::from_counts([1, 1, 1, 1, 1])));
        assert_eq!(sum.access_bins, Some(AccessBins::from_counts([1, 2, 3, 2, 1])));
        // The vectors of a sequence are those of its elements.
        let table = Table {
            first: Lookups { list_length_deviation: None, ..sequence.clone() },
            ..Table::new("f", 16, 64)
        };
        let (topology, shard) = (Topology::h100(1, 1 << 30).unwrap(), Shard::whole(&table, 0));
        let work = ShardLoad::table_wise(&table, &shard, &topology, 5).work();
        for (found, expected) in [(work.lists, 3.0), (work.ids, 5.0), (work.vectors, 5.0)] {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }

    #[test]
    fn rows_are_counted_where_training_looks_them_up() {
        // Ids are ordered by frequency, in lists of one and of three ids.
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
        // Hashed ids are distributed over all rows, including frequent ones.
        let hashed = found(&config(Pooling::Sum, 10_000, IdPolicy::Hashed), &group);
        let hash = SigridHash::new(HASH_SALT, 10_000);
        let first = rows.iter().flatten().filter(|id| hash.hash(**id) < 2_500).count() as f64 / 40_000.0;
        let share = hashed.lookup_shares.map_or(0.25, |shares| shares.share(&(0..2_500)));
        assert!(first < 0.6 && (share - first).abs() < 0.014, "{share} {first}");
    }
}
