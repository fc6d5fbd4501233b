//! The drift of features between parts, as population stability indexes.
//!
//! The distributions of dense features come from the statistics of the dataset. The dataset has no distributions of
//! ids, so some samples of each part are read: all sessions have the same chance to be among them.

use std::collections::BTreeMap;
use std::path::Path;

use onefold_datasets::digest::Digest;
use onefold_datasets::{DenseStatistics, PartitionFilter, PartitionKey, Snapshot, hash_id};
use onefold_ikjt::{
    Checks, Feature, Group, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Within, Workers,
    load_statistics,
};

use super::LabelFiles;
use crate::Result;

/// The number of samples of a part from which the distributions of ids are computed.
const MOST_SAMPLES: usize = 1 << 14;
/// The number of ids of a feature that are counted at once.
const CHUNK: usize = 1 << 16;

/// Returns the population stability index of each dense feature: the distribution in the partitions `now`
/// relative to the partitions `before`. The map is empty if `before` is empty or the snapshot lacks one of the
/// partitions.
pub(super) fn dense_stability(
    (dataset, snapshot): (&Path, &Snapshot),
    now: &[PartitionKey],
    before: &[PartitionKey],
) -> Result<BTreeMap<String, f64>> {
    let is_there = |key: &PartitionKey| snapshot.partitions.iter().any(|partition| partition.key == *key);
    if before.is_empty() || !now.iter().chain(before).all(is_there) {
        return Ok(BTreeMap::new());
    }
    let of = |keys: &[PartitionKey]| {
        load_statistics(dataset, snapshot, &PartitionFilter::of_keys(keys.iter().cloned()))
    };
    Ok(compare(&of(now)?.dense, &of(before)?.dense))
}

/// Returns the population stability index of each feature that both sides have.
fn compare(now: &Distributions, before: &Distributions) -> BTreeMap<String, f64> {
    let index = |(name, now): (&String, &DenseStatistics)| {
        Some((name.clone(), now.stability_index(before.get(name)?)?))
    };
    now.iter().filter_map(index).collect()
}

/// The distributions of features, by name.
type Distributions = BTreeMap<String, DenseStatistics>;

/// The content of a partition: its key, digest and files.
type Content = (PartitionKey, Digest, LabelFiles);

/// Computes the population stability indexes of sparse features.
#[derive(Debug)]
pub(super) struct SparseDrift<'a> {
    dataset: &'a Path,
    request: ReadRequest,
    workers: &'a Workers,
    /// The distributions in the parts that were compared last.
    known: Vec<(Vec<Content>, Distributions)>,
}

impl<'a> SparseDrift<'a> {
    /// Creates the drift of the sparse features that `evaluation` reads, as they are before preprocessing.
    pub(super) fn new(dataset: &'a Path, evaluation: &'a (ReadRequest, Workers)) -> Self {
        let (request, workers) = evaluation;
        let checks = Checks { verify: request.checks.verify, ..Checks::default() };
        let request = ReadRequest { checks, rank: Rank::default(), ..request.clone() };
        let request = request.with(|options| ReaderOptions {
            // More row groups could need more memory than an evaluation, for which `workers` have enough.
            shuffle: Some(Shuffle { seed: 0, row_groups: 1, within: Within::Epoch }),
            preprocess: None,
            kept: Vec::new(),
            ..options
        });
        Self { dataset, request, workers, known: Vec::new() }
    }

    /// Returns the population stability index of each sparse feature: the distribution of its ids in the partitions
    /// `now` relative to the partitions `before`. The map is empty if `before` is empty or the snapshot lacks one of
    /// the partitions.
    pub(super) fn stability(
        &mut self,
        snapshot: &Snapshot,
        now: &[PartitionKey],
        before: &[PartitionKey],
    ) -> Result<BTreeMap<String, f64>> {
        let (Some(now), Some(before)) = (contents(snapshot, now), contents(snapshot, before)) else {
            return Ok(BTreeMap::new());
        };
        let (ids_now, ids_before) = (self.ids(snapshot, &now)?, self.ids(snapshot, &before)?);
        let indexes = compare(&ids_now, &ids_before);
        // The present part is the earlier one of the next part.
        self.known = vec![(now, ids_now), (before, ids_before)];
        Ok(indexes)
    }

    /// Returns the distributions of the ids in some samples of partitions of `snapshot`.
    fn ids(&self, snapshot: &Snapshot, contents: &[Content]) -> Result<Distributions> {
        if let Some((_, known)) = self.known.iter().find(|(known, _)| known.as_slice() == contents) {
            return Ok(known.clone());
        }
        let keys = contents.iter().map(|(key, ..)| key.clone());
        let request = self.request.clone().with(|options| ReaderOptions {
            snapshot: Some(snapshot.snapshot),
            partitions: PartitionFilter::of_keys(keys),
            ..options
        });
        let (mut features, mut samples): (BTreeMap<String, Ids>, usize) = (BTreeMap::new(), 0);
        for step in Reader::open(self.dataset, request, self.workers)?.batches()? {
            let batch = step?.batch;
            for group in batch.groups() {
                for feature in group.features() {
                    features.entry(feature.name().to_owned()).or_default().add(group, feature);
                }
            }
            samples += batch.size();
            if samples >= MOST_SAMPLES {
                break;
            }
        }
        Ok(features.into_iter().map(|(name, ids)| (name, ids.counted())).collect())
    }
}

/// Returns the contents of partitions; `None` if there are no keys or the snapshot lacks one of the partitions.
fn contents(snapshot: &Snapshot, keys: &[PartitionKey]) -> Option<Vec<Content>> {
    if keys.is_empty() {
        return None;
    }
    let content = |key: &PartitionKey| {
        let partition = snapshot.partitions.iter().find(|partition| partition.key == *key)?;
        Some((key.clone(), partition.digest, LabelFiles::of(snapshot, partition)))
    };
    keys.iter().map(content).collect()
}

/// The ids of a feature. They are counted as [places](place), and samples without ids as NaNs.
#[derive(Debug, Default)]
struct Ids {
    counted: DenseStatistics,
    waiting: Vec<f32>,
}

impl Ids {
    /// Adds the lists of the samples of a batch.
    fn add(&mut self, group: &Group, feature: &Feature) {
        for sample in 0..group.samples() {
            match feature.row(group.row_of(sample)) {
                [] => self.waiting.push(f32::NAN),
                ids => self.waiting.extend(ids.iter().map(|id| place(*id))),
            }
            if self.waiting.len() >= CHUNK {
                self.count();
            }
        }
    }

    fn count(&mut self) {
        self.counted.merge(&DenseStatistics::of([&self.waiting[..]]));
        self.waiting.clear();
    }

    /// Returns the distribution of the places of all ids.
    fn counted(mut self) -> DenseStatistics {
        self.count();
        self.counted
    }
}

/// Returns the place of an id among 1,024 by its hash, as a float from 1 up to, but not including, 256. Each place has a
/// bin of its own in the [statistics](DenseStatistics), so they count places exactly.
fn place(id: i64) -> f32 {
    // 10 of 63 bits: 3 for the octave, and 7 for the bin in the octave.
    let hash = hash_id(&id.to_le_bytes()).unsigned_abs() >> (63 - 10);
    f32::from_bits(1.0_f32.to_bits() + ((hash as u32) << 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the distribution of lists, which come in two batches.
    fn of(lists: &[Vec<i64>]) -> DenseStatistics {
        let mut ids = Ids::default();
        for rows in [&lists[..lists.len() / 2], &lists[lists.len() / 2..]] {
            let feature = Feature::from_rows("item", rows).unwrap();
            ids.add(&Group::try_new("item", None, vec![feature.clone()]).unwrap(), &feature);
        }
        ids.counted()
    }

    #[test]
    fn hashed_ids_are_spread_between_1_and_256() {
        let places: Vec<f32> = (-50_000..50_000).map(place).collect();
        assert!(places.iter().all(|place| (1.0..256.0).contains(place)));
        // The octaves have equal shares.
        for octave in 0..8 {
            let ends = 2.0_f32.powi(octave)..2.0_f32.powi(octave + 1);
            let share = places.iter().filter(|place| ends.contains(*place)).count() as f64 / 1e5;
            assert!((share - 0.125).abs() < 0.01, "{octave}: {share}");
        }
    }

    #[test]
    fn the_index_of_ids_tells_how_far_their_distribution_has_moved() {
        let lists = |list: &dyn Fn(i64) -> Vec<i64>| -> Vec<Vec<i64>> { (0..20_000).map(list).collect() };
        let before = of(&lists(&|i| vec![i % 1000, 7]));
        let index = |list: &dyn Fn(i64) -> Vec<i64>| of(&lists(list)).stability_index(&before).unwrap();
        // The order of samples and ids does not matter.
        assert!(index(&|i| vec![7, (19_999 - i) % 1000]) == 0.0);
        // Other ids, equally many for each sample.
        assert!(index(&|i| vec![5_000 + i % 1000, 7]) < 0.05);
        // One id becomes much more frequent, another one comes in its place, or many samples have no ids.
        assert!(index(&|i| vec![i % 1000, 7, 7, 7, 7, 7, 7, 7]) > 0.25);
        assert!(index(&|i| vec![i % 1000, 8]) > 0.25);
        assert!(index(&|i| if i % 3 == 0 { vec![] } else { vec![i % 1000, 7] }) > 0.25);
    }
}
