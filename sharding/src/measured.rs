//! What a dataset's batches say about tables: ids per sample, dedupe factors, and how often rows are looked up.

use std::path::Path;

use onefold_datasets::progress::Reporter;
use onefold_ikjt::hash::SigridHash;
use onefold_ikjt::{Feature, Group, Reader, ReaderOptions, Workers};

use crate::tables::HASH_SALT;
use crate::{AccessBins, FeatureConfig, IdPolicy, Result};

/// What was counted for one feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeasuredFeature {
    /// Mean number of ids per sample.
    pub pooling_factor: f64,
    /// Ids of all samples ÷ ids of the batches' distinct lists, 1 or more.
    pub dedupe_factor: f64,
    /// How often the rows were looked up, once for every distinct list of a batch.
    pub access_bins: AccessBins,
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
    let counting = |config| Counting { config, sample_ids: 0, rows: Vec::new() };
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
            access_bins: AccessBins::from_counts(counts),
        }
    }
}
