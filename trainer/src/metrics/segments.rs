//! Metrics of the samples that have one value of a feature.

use std::collections::BTreeMap;

use onefold_ikjt::Batch;
use serde::Serialize;

use super::{Figures, Task, TaskMetrics};

/// Samples that are told apart by a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Segment {
    /// Those whose list is this one id.
    Id(i64),
    /// Those whose list is empty.
    Empty,
    /// Those whose list has several ids.
    Several,
    /// Those whose id is none of the smallest ones, as many as are kept.
    Other,
}

impl std::fmt::Display for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Empty => f.write_str("empty"),
            Self::Several => f.write_str("several"),
            Self::Other => f.write_str("other"),
        }
    }
}

impl Serialize for Segment {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// [`TaskMetrics`] by segment of one feature.
#[derive(Debug)]
pub struct SegmentMetrics {
    feature: String,
    tasks: Vec<Task>,
    max_segments: usize,
    segments: BTreeMap<Segment, TaskMetrics>,
}

impl SegmentMetrics {
    /// Metrics of no samples. The smallest `max_segments` ids that occur have a segment each, in whatever order they
    /// occur.
    pub fn new(feature: &str, tasks: &[Task], max_segments: usize) -> Self {
        let (feature, tasks, segments) = (feature.to_owned(), tasks.to_vec(), BTreeMap::new());
        Self { feature, tasks, max_segments, segments }
    }

    /// The feature.
    pub fn feature(&self) -> &str {
        &self.feature
    }

    /// Adds all samples of a batch, which has the feature. `logits` are `[B, tasks]`, row-major.
    pub fn add(&mut self, batch: &Batch, logits: &[f32]) {
        let found = batch.groups().iter().find_map(|group| {
            Some((group, group.features().iter().find(|feature| feature.name() == self.feature)?))
        });
        let Some((group, feature)) = found else { return };
        for sample in 0..batch.size() {
            let segment = match *feature.row(group.row_of(sample)) {
                [] => Segment::Empty,
                [id] => Segment::Id(id),
                _ => Segment::Several,
            };
            self.change(segment, |metrics| metrics.add_sample(batch, logits, sample));
        }
    }

    /// Changes the metrics of a segment, or those of [`Segment::Other`] if its id is not kept.
    fn change(&mut self, segment: Segment, change: impl FnOnce(&mut TaskMetrics)) {
        let metrics = self.segments.entry(segment).or_insert_with(|| TaskMetrics::small(&self.tasks));
        change(metrics);
        // Ids stand before all other segments.
        let is_id = |segment: &Segment| matches!(segment, Segment::Id(_));
        let largest =
            self.segments.keys().take_while(|segment| is_id(segment)).nth(self.max_segments).copied();
        if let Some(metrics) = largest.and_then(|largest| self.segments.remove(&largest)) {
            let other = self.segments.entry(Segment::Other);
            other.or_insert_with(|| TaskMetrics::small(&self.tasks)).merge(&metrics);
        }
    }

    /// The metrics for another rank's [`merge_bytes`](Self::merge_bytes).
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (segment, metrics) in &self.segments {
            let (kind, id) = match segment {
                Segment::Id(id) => (0_u8, *id),
                Segment::Empty => (1, 0),
                Segment::Several => (2, 0),
                Segment::Other => (3, 0),
            };
            bytes.push(kind);
            bytes.extend(id.to_le_bytes());
            bytes.extend(metrics.to_bytes());
        }
        bytes
    }

    /// Adds the samples of metrics that were made as these were; `None` if the bytes are malformed.
    pub(crate) fn merge_bytes(&mut self, mut bytes: &[u8]) -> Option<()> {
        while let Some((kind, rest)) = bytes.split_first() {
            let (id, rest) = rest.split_first_chunk()?;
            bytes = rest;
            let segment = match kind {
                0 => Segment::Id(i64::from_le_bytes(*id)),
                1 => Segment::Empty,
                2 => Segment::Several,
                3 => Segment::Other,
                _ => return None,
            };
            let mut metrics = TaskMetrics::small(&self.tasks);
            metrics.merge_bytes(&mut bytes)?;
            self.change(segment, |own| own.merge(&metrics));
        }
        Some(())
    }

    /// The figures by segment and task, ids ascending.
    pub fn figures(&self) -> BTreeMap<Segment, BTreeMap<String, Figures>> {
        let tasks = |metrics: &TaskMetrics| {
            metrics.iter().map(|(name, metrics)| (name.to_owned(), metrics.figures())).collect()
        };
        self.segments.iter().map(|(segment, metrics)| (*segment, tasks(metrics))).collect()
    }
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::{BatchParts, Feature, Group};

    use super::*;

    /// Seven samples, deduplicated, with two labels.
    fn batch() -> Batch {
        let lists: &[&[i64]] = &[&[5], &[7], &[], &[5, 7], &[9]];
        let feature = Feature::from_rows("country", lists).unwrap();
        let inverse = vec![0, 0, 1, 2, 3, 4, 0];
        Batch::try_new(BatchParts {
            size: 7,
            dense: Vec::new().into(),
            labels: (0..14).map(|i| f32::from(u8::from(i % 3 == 0))).collect::<Vec<_>>().into(),
            weights: Some(vec![1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0].into()),
            timestamps: None,
            groups: vec![Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap()],
        })
        .unwrap()
    }

    #[test]
    fn every_sample_counts_in_its_segment_for_every_task() {
        let batch = batch();
        let tasks = [("a", 1), ("b", 0)].map(|(name, column)| Task { name: name.into(), column });
        let logits: Vec<f32> = (0..14).map(|i| i as f32 / 10.0 - 0.5).collect();
        let mut metrics = SegmentMetrics::new("country", &tasks, 2);
        metrics.add(&batch, &logits);
        let figures = metrics.figures();
        let counts: Vec<_> =
            figures.iter().map(|(segment, tasks)| (segment.to_string(), tasks["a"].samples)).collect();
        let expected = [("5", 3), ("7", 1), ("empty", 1), ("several", 1), ("other", 1)];
        assert_eq!(counts, expected.map(|(segment, samples)| (segment.to_owned(), samples)));
        // Segment 5 is samples 0, 1 and 6, by hand.
        let (mut a, mut b) = (super::super::BinaryMetrics::small(), super::super::BinaryMetrics::small());
        for (sample, weight) in [(0, 1.0), (1, 2.0), (6, 1.0)] {
            a.add(logits[2 * sample], batch.labels()[2 * sample + 1], weight);
            b.add(logits[2 * sample + 1], batch.labels()[2 * sample], weight);
        }
        assert_eq!(figures[&Segment::Id(5)]["a"], a.figures());
        assert_eq!(figures[&Segment::Id(5)]["b"], b.figures());
        // A segment of one sample has one class, so it has a loss but nothing that compares classes.
        let one = &figures[&Segment::Id(7)]["a"];
        assert_eq!((one.samples, one.loss.is_some(), one.ne, one.auc), (1, true, None, None));
    }
}
