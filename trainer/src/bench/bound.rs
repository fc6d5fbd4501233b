//! What deduplication can gain at most.

use std::collections::BTreeMap;
use std::time::Duration;

use onefold_ikjt::Batch;
use onefold_sharding::TableOverride;

/// How much there is to do for sparse features.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Work {
    /// Ids that are pooled.
    pooled: u64,
    /// Ids that go through attention.
    attended: u64,
}

impl Work {
    /// Adds the values of a batch, each counted once however many rows share it.
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

    /// Amdahl's law (1967): the time of `stages`, which did this work, over what it would be if stages that work on ids
    /// took time in proportion to `less`, and all others stayed.
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
    fn only_work_on_ids_shrinks() {
        let stages = [("lookup", 30), ("attention", 40), ("mlps", 20)]
            .map(|(name, time)| (name.to_owned(), Duration::from_millis(time)));
        let (off, window) = (Work { pooled: 100, attended: 80 }, Work { pooled: 50, attended: 20 });
        // 30 / 2 + 40 / 4 + 20
        assert!((off.bound(&window, &stages) - 2.0).abs() < 1e-9);
        assert!((off.bound(&off, &stages) - 1.0).abs() < 1e-9);
    }
}
