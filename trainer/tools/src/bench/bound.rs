//! The upper bound of the speedup by deduplication.

use std::collections::BTreeMap;
use std::time::Duration;

use onefold_ikjt::Batch;
use onefold_sharding::TableOverride;

/// The number of ids to process for sparse features.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Work {
    /// The number of ids with pooled lookups.
    pooled: u64,
    /// The number of ids of sequences.
    attended: u64,
}

impl Work {
    /// Adds the values of a batch. A value that several rows share is counted once.
    pub(super) fn add(&mut self, batch: &Batch, tables: &BTreeMap<String, TableOverride>) {
        for feature in batch.groups().iter().flat_map(|group| group.features()) {
            let pooling = tables.get(feature.name()).and_then(|table| table.pooling);
            let values = feature.values().len() as u64;
            match pooling {
                Some(pooling) if pooling.is_sequence() => self.attended += values,
                _ => self.pooled += values,
            }
        }
    }

    /// Returns the speedup bound by Amdahl's law (1967). `stages` are the times for this work. Stages that
    /// process ids are assumed to scale with the amount of work, which `less` reduces; all other stages keep
    /// their times.
    pub(super) fn bound(&self, less: &Self, stages: &[(String, Duration)]) -> f64 {
        let share = |part: u64, whole: u64| if whole == 0 { 1.0 } else { part as f64 / whole as f64 };
        let (mut before, mut after) = (0.0, 0.0);
        for (name, time) in stages {
            let time = time.as_secs_f64();
            before += time;
            after += time
                * match name.as_str() {
                    "lookup" => share(less.pooled, self.pooled),
                    "attention" | "attention_backward" => share(less.attended, self.attended),
                    "table_update" => share(less.pooled + less.attended, self.pooled + self.attended),
                    _ => 1.0,
                };
        }
        if after > 0.0 { before / after } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_reduces_only_work_on_ids() {
        let stages = [("lookup", 30), ("attention", 40), ("mlps", 20)]
            .map(|(name, time)| (name.to_owned(), Duration::from_millis(time)));
        let (off, window) = (Work { pooled: 100, attended: 80 }, Work { pooled: 50, attended: 20 });
        // 30 / 2 + 40 / 4 + 20
        assert!((off.bound(&window, &stages) - 2.0).abs() < 1e-9);
        assert!((off.bound(&off, &stages) - 1.0).abs() < 1e-9);
    }
}
