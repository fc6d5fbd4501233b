//! Counts the rows and ids that remain after deduplication, over consecutive batches.

use std::collections::HashSet;

use foldhash::fast::FixedState;
use xxhash_rust::xxh3::xxh3_64;

use onefold_datasets::overlap;
use onefold_datasets::scan::SampleLists;

/// Keys of the lists of a feature, or of all lists of a group, over consecutive samples. A key is a 64-bit hash. The
/// probability that two different lists in a batch of 8,192 samples have the same hash is 2^-39.
#[derive(Debug, Default)]
pub(super) struct Keys {
    pub(super) keys: Vec<u64>,
    /// The number of ids of each sample.
    pub(super) sizes: Vec<u32>,
    /// The number of ids that each sample adds to a window which contains the list of the previous sample.
    pub(super) appended: Vec<u32>,
}

/// Computes the [`Keys`] of a feature for successive runs of samples.
#[derive(Debug)]
pub(super) struct KeyMaker {
    /// Whether a list may continue the previous one. Otherwise a changed list is added as a whole.
    window: bool,
    last: Vec<i64>,
    last_key: Option<u64>,
}

impl KeyMaker {
    pub(super) fn new(window: bool) -> Self {
        Self { window, last: Vec::new(), last_key: None }
    }

    /// Returns the keys of the next samples.
    pub(super) fn keys(&mut self, lists: &SampleLists) -> Keys {
        let samples = lists.len();
        let mut made = Keys { keys: Vec::with_capacity(samples), ..Keys::default() };
        made.sizes = lists.sizes().iter().map(|size| *size as u32).collect();
        made.appended = Vec::with_capacity(samples);
        for sample in 0..samples {
            let before = self.last_key.filter(|_| lists.repeats(sample));
            let key = before.unwrap_or_else(|| xxh3_64(bytemuck::cast_slice(lists.list(sample))));
            let kept = match self.last_key {
                Some(last) if last == key => made.sizes[sample],
                Some(_) if self.window => {
                    let previous = if sample > 0 { lists.list(sample - 1) } else { &self.last };
                    overlap(previous, lists.list(sample)) as u32
                }
                _ => 0,
            };
            made.appended.push(made.sizes[sample] - kept);
            made.keys.push(key);
            self.last_key = Some(key);
        }
        if samples > 0 {
            self.last.clear();
            self.last.extend_from_slice(lists.list(samples - 1));
        }
        made
    }
}

impl Keys {
    /// Returns the combined keys of several features: samples have equal keys if their lists of each feature are
    /// equal. The ids that a group adds to windows are not computed, because every feature has a separate window.
    pub(super) fn together(features: &[Keys]) -> Self {
        const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
        let samples = features.first().map_or(0, |feature| feature.keys.len());
        let mut keys = vec![0_u64; samples];
        let mut sizes = vec![0_u32; samples];
        for feature in features {
            for (key, own) in keys.iter_mut().zip(&feature.keys) {
                *key = (key.rotate_left(5) ^ own).wrapping_mul(ODD);
                *key ^= *key >> 32;
            }
            sizes.iter_mut().zip(&feature.sizes).for_each(|(size, own)| *size += own);
        }
        Self { appended: sizes.clone(), keys, sizes }
    }
}

/// Counts the rows and ids that remain in batches of one size.
#[derive(Debug)]
pub(super) struct BatchCounter {
    /// The batch size, or `None` if nothing is counted.
    batch_size: Option<usize>,
    /// The number of samples that may still be counted. In a stretch, only samples that fill whole batches are
    /// counted.
    remaining: usize,
    filled: usize,
    seen: HashSet<u64, FixedState>,
    last: u64,
    pub(super) counted: Counted,
}

/// Sums over batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) samples: u64,
    /// The number of ids of all samples.
    pub(super) ids: u64,
    /// The number of distinct rows.
    pub(super) rows: u64,
    /// The number of ids of the distinct rows.
    pub(super) row_ids: u64,
    /// The number of ids of T, to which every sample adds the ids that its list has in addition to the previous
    /// sample's list: none if the lists are equal; the whole list if they differ and the feature is not a window.
    pub(super) window_ids: u64,
}

impl BatchCounter {
    /// Returns a counter for batches of `batch_size`, or one that counts nothing if `batch_size` is 0.
    pub(super) fn new(batch_size: usize) -> Self {
        Self {
            batch_size: Some(batch_size).filter(|size| *size > 0),
            remaining: usize::MAX,
            filled: 0,
            seen: HashSet::default(),
            last: 0,
            counted: Counted::default(),
        }
    }

    /// Starts a stretch of `samples` samples that do not follow the previous samples. Samples that do not fill a
    /// batch are not counted.
    pub(super) fn start_stretch(&mut self, samples: usize) {
        self.remaining = samples - samples % self.batch_size.unwrap_or(1);
        self.filled = 0;
    }

    /// Counts the next samples.
    pub(super) fn add(&mut self, keys: &Keys) {
        let Some(batch_size) = self.batch_size else { return };
        let samples = keys.keys.len().min(self.remaining);
        if self.remaining != usize::MAX {
            self.remaining -= samples;
        }
        for sample in 0..samples {
            if self.filled == batch_size {
                self.filled = 0;
            }
            let (key, size, starts) = (keys.keys[sample], u64::from(keys.sizes[sample]), self.filled == 0);
            if starts {
                self.seen.clear();
            }
            self.filled += 1;
            self.counted.samples += 1;
            self.counted.ids += size;
            if starts || self.last != key {
                self.counted.window_ids += if starts { size } else { u64::from(keys.appended[sample]) };
                if self.seen.insert(key) {
                    self.counted.rows += 1;
                    self.counted.row_ids += size;
                }
            }
            self.last = key;
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::ListArray;
    use proptest::prelude::*;

    use super::*;

    fn lists(samples: &[Vec<i64>]) -> SampleLists {
        let lists = samples.iter().map(|list| Some(list.iter().copied().map(Some)));
        let lists = ListArray::from_iter_primitive::<arrow::datatypes::Int64Type, _, _>(lists);
        SampleLists::new(&lists).unwrap()
    }

    /// Counts the same values by their definition.
    fn naive(samples: &[Vec<i64>], batch_size: usize, window: bool) -> Counted {
        let mut counted = Counted::default();
        for batch in samples.chunks(batch_size) {
            let mut rows: Vec<&Vec<i64>> = Vec::new();
            for (i, list) in batch.iter().enumerate() {
                counted.samples += 1;
                counted.ids += list.len() as u64;
                let kept = match i.checked_sub(1).map(|before| &batch[before]) {
                    Some(before) if before == list => list.len(),
                    Some(before) if window => overlap(before, list),
                    _ => 0,
                };
                counted.window_ids += (list.len() - kept) as u64;
                if !rows.contains(&list) {
                    counted.rows += 1;
                    counted.row_ids += list.len() as u64;
                    rows.push(list);
                }
            }
        }
        counted
    }

    proptest! {
        #[test]
        fn batches_count_what_their_definition_says(
            samples in prop::collection::vec(prop::collection::vec(0_i64..3, 0..4), 0..60),
            batch_size in 1_usize..20,
            cut in 0_usize..60,
            window in any::<bool>(),
        ) {
            let (mut maker, mut counter) = (KeyMaker::new(window), BatchCounter::new(batch_size));
            let (head, tail) = samples.split_at(cut.min(samples.len()));
            counter.add(&maker.keys(&lists(head)));
            counter.add(&maker.keys(&lists(tail)));
            prop_assert_eq!(counter.counted, naive(&samples, batch_size, window));
        }

        #[test]
        fn keys_of_groups_differ_where_a_feature_does(
            a in prop::collection::vec(prop::collection::vec(0_i64..2, 0..3), 10),
            b in prop::collection::vec(prop::collection::vec(0_i64..2, 0..3), 10),
        ) {
            let keys = [&a, &b].map(|feature| KeyMaker::new(false).keys(&lists(feature)));
            let group = Keys::together(&keys);
            for i in 0..10 {
                prop_assert_eq!(group.sizes[i] as usize, a[i].len() + b[i].len());
                for j in 0..10 {
                    prop_assert_eq!(group.keys[i] == group.keys[j], a[i] == a[j] && b[i] == b[j]);
                }
            }
        }
    }

    #[test]
    fn only_whole_batches_of_a_stretch_are_counted() {
        let samples: Vec<Vec<i64>> = (0..10).map(|i| vec![i / 2]).collect();
        let mut counter = BatchCounter::new(4);
        for stretch in [&samples[..], &samples[..3]] {
            counter.start_stretch(stretch.len());
            counter.add(&KeyMaker::new(false).keys(&lists(stretch)));
        }
        assert_eq!((counter.counted.samples, counter.counted.rows), (8, 4));
    }
}
