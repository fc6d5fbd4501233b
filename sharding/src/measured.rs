//! What a dataset's batches say about tables: ids per sample, dedupe factors, and how often rows are looked up.

use std::path::Path;

use onefold_datasets::progress::Reporter;
use onefold_ikjt::hash::SigridHash;
use onefold_ikjt::{Feature, Group, Reader, ReaderOptions, Workers};

use crate::tables::HASH_SALT;
use crate::{AccessBins, FeatureConfig, IdPolicy, LookupShares, Result};

/// What was counted for one feature.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredFeature {
    /// Mean number of ids per sample.
    pub pooling_factor: f64,
    /// Ids of all samples ÷ ids of the batches' distinct lists, 1 or more.
    pub dedupe_factor: f64,
    /// Samples ÷ the batches' distinct lists that are not empty, 1 or more.
    pub list_dedupe_factor: f64,
    /// How often the rows were looked up, once for every distinct list of a batch.
    pub access_bins: AccessBins,
    /// Which share of lookups fell on which rows, likewise; `None` if they are even, as far as so many lookups can say.
    pub lookup_shares: Option<LookupShares>,
}

/// What was counted for all features.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredFeatures {
    /// Samples that were read, in whole batches.
    pub samples: u64,
    /// In the order of the configurations.
    pub features: Vec<MeasuredFeature>,
}

/// A feature's counts while batches are read.
struct Counting<'a> {
    config: &'a FeatureConfig,
    sample_ids: u64,
    /// Distinct lists that are not empty.
    lists: u64,
    /// The table row of every id of a distinct list. Rows beyond 2³² are told apart by their lower half.
    rows: Vec<u32>,
}

/// Reads batches of `dataset` until `samples` samples are counted, or all there are; `configs` are those of the
/// batches' features, in the same order; each is counted for itself, also where features share a table. Batches are
/// formed, preprocessed and deduplicated as `options` say, so the factors are those that training with them has. Keeps
/// 4 bytes for every id of a distinct list.
///
/// # Errors
///
/// [`Error::Read`](crate::Error::Read) for what cannot be read, and for ids without a table row that
/// `options` have the reader check.
pub fn measure_features(
    dataset: &Path,
    configs: &[FeatureConfig],
    options: ReaderOptions,
    samples: u64,
    reporter: &dyn Reporter,
) -> Result<MeasuredFeatures> {
    let reader = Reader::open(dataset, options, &Workers::of_machine()?)?;
    let counting = |config| Counting { config, sample_ids: 0, lists: 0, rows: Vec::new() };
    let mut counts: Vec<Counting<'_>> = configs.iter().map(counting).collect();
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
        if read >= samples {
            break;
        }
    }
    reporter.end();
    Ok(MeasuredFeatures {
        samples: read,
        features: counts.into_iter().map(|count| count.finish(read)).collect(),
    })
}

impl Counting<'_> {
    fn add(&mut self, group: &Group, feature: &Feature) {
        let samples = 0..group.samples();
        self.sample_ids += samples.map(|sample| feature.sizes()[group.row_of(sample)] as u64).sum::<u64>();
        self.lists += feature.sizes().iter().filter(|size| **size > 0).count() as u64;
        let ids = (0..feature.rows()).flat_map(|row| feature.row(row));
        match self.config.ids {
            IdPolicy::Checked => self.rows.extend(ids.map(|&id| id as u32)),
            IdPolicy::Hashed => {
                let hash = SigridHash::new(HASH_SALT, self.config.rows.min(i64::MAX as u64) as i64);
                self.rows.extend(ids.map(|&id| hash.hash(id) as u32));
            }
        }
    }

    fn finish(mut self, samples: u64) -> MeasuredFeature {
        let distinct_ids = self.rows.len() as f64;
        self.rows.sort_unstable();
        let counts = self.rows.chunk_by(|a, b| a == b).map(|same| same.len() as u64);
        MeasuredFeature {
            pooling_factor: self.sample_ids as f64 / samples.max(1) as f64,
            dedupe_factor: if distinct_ids > 0.0 { self.sample_ids as f64 / distinct_ids } else { 1.0 }
                .max(1.0),
            list_dedupe_factor: (samples.max(1) as f64 / self.lists.max(1) as f64).max(1.0),
            access_bins: AccessBins::from_counts(counts),
            // Rows beyond 2³² are not told apart.
            lookup_shares: (self.config.rows <= 1 << 32)
                .then(|| LookupShares::from_lookups(&self.rows, self.config.rows))
                .flatten(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, Pooling, Shard, ShardLoad, ShardingType, Table, Topology};

    /// Half of the samples share a list of 1,000 ids, each of the others has one id of its own.
    #[test]
    fn lists_and_ids_have_factors_of_their_own() {
        let single = (0..1024).map(|id| vec![id]);
        let rows: Vec<Vec<i64>> = std::iter::once((0..1000).collect()).chain(single).collect();
        let inverse: Vec<i32> = std::iter::repeat_n(0, 1024).chain(1..=1024).collect();
        let feature = Feature::from_rows("f", &rows).unwrap();
        let group = Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap();
        let config = FeatureConfig {
            feature: "f".into(),
            table: None,
            rows: 1024,
            dim: 64,
            pooling: Pooling::Sum,
            target: None,
            ids: IdPolicy::Checked,
            dtype: DataType::Fp32,
        };
        let mut counting = Counting { config: &config, sample_ids: 0, lists: 0, rows: Vec::new() };
        counting.add(&group, &group.features()[0]);
        let found = counting.finish(2048);
        assert_eq!((found.pooling_factor, found.list_dedupe_factor), (500.5, 2048.0 / 1025.0));
        assert_eq!(found.dedupe_factor, 1_025_024.0 / 2024.0);

        // The plan expects the lists and ids that come, and has room for them.
        let table = Table {
            pooling_factor: found.pooling_factor,
            dedupe_factor: found.dedupe_factor,
            list_dedupe_factor: Some(found.list_dedupe_factor),
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
        let alike = Table { list_dedupe_factor: None, ..table.clone() };
        let load = ShardLoad { table: &alike, ..load };
        assert!(load.work(&topology, 1024).lists < 5.0);
    }
}
