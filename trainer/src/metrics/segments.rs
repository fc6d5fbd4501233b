//! Metrics of samples by segment, that is, by the value of a feature.

use std::collections::BTreeMap;

use onefold_ikjt::Batch;
use serde::Serialize;

use super::{Figures, Task, TaskMetrics};

/// A segment of samples, defined by the list of a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Segment {
    /// Samples whose list is exactly this id.
    Id(i64),
    /// Samples whose list is empty.
    Empty,
    /// Samples whose list has several ids.
    Several,
    /// Samples whose id is not among the smallest ids that have their own segments.
    Other,
}

impl Segment {
    /// The length of the result of [`to_bytes`](Self::to_bytes).
    pub(super) const BYTES: usize = 9;

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let (kind, id) = match self {
            Self::Id(id) => (0, id),
            Self::Empty => (1, 0),
            Self::Several => (2, 0),
            Self::Other => (3, 0),
        };
        let mut bytes = [kind; Self::BYTES];
        bytes[1..].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    /// Inverts [`to_bytes`](Self::to_bytes).
    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let (kind, id) = bytes.split_first().expect("nine bytes");
        match kind {
            0 => Self::Id(i64::from_le_bytes(id.try_into().expect("eight bytes"))),
            1 => Self::Empty,
            2 => Self::Several,
            _ => Self::Other,
        }
    }

    /// Returns the segments of all samples of a batch by a sparse feature; `None` if the batch lacks the
    /// feature.
    pub(crate) fn of_samples(batch: &Batch, feature: &str) -> Option<Vec<Self>> {
        let (group, feature) = batch.groups().iter().find_map(|group| {
            Some((group, group.features().iter().find(|found| found.name() == feature)?))
        })?;
        let of = |sample| match *feature.row(group.row_of(sample)) {
            [] => Self::Empty,
            [id] => Self::Id(id),
            _ => Self::Several,
        };
        Some((0..batch.size()).map(of).collect())
    }
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
    /// Creates metrics without samples. The smallest `max_segments` ids that occur have their own segments,
    /// independent of the order in which they occur.
    pub fn new(feature: &str, tasks: &[Task], max_segments: usize) -> Self {
        let (feature, tasks, segments) = (feature.to_owned(), tasks.to_vec(), BTreeMap::new());
        Self { feature, tasks, max_segments, segments }
    }

    /// Returns the name of the feature.
    pub fn feature(&self) -> &str {
        &self.feature
    }

    /// Adds all samples of a batch, with their segments. `logits` has the shape `[B, tasks]`, row-major.
    pub fn add(&mut self, batch: &Batch, segments: &[Segment], logits: &[f32]) {
        for (sample, segment) in segments.iter().enumerate() {
            self.change(*segment, |metrics| metrics.add_sample(batch, logits, sample));
        }
    }

    /// Returns the current segments.
    pub(crate) fn kept(&self) -> Vec<Segment> {
        self.segments.keys().copied().collect()
    }

    /// Changes the metrics of a segment, or of [`Segment::Other`] if its id has no own segment.
    fn change(&mut self, segment: Segment, change: impl FnOnce(&mut TaskMetrics)) {
        let metrics = self.segments.entry(segment).or_insert_with(|| TaskMetrics::small(&self.tasks));
        change(metrics);
        // In the order of segments, ids come first.
        let is_id = |segment: &Segment| matches!(segment, Segment::Id(_));
        let largest =
            self.segments.keys().take_while(|segment| is_id(segment)).nth(self.max_segments).copied();
        if let Some(metrics) = largest.and_then(|largest| self.segments.remove(&largest)) {
            let other = self.segments.entry(Segment::Other);
            other.or_insert_with(|| TaskMetrics::small(&self.tasks)).merge(&metrics);
        }
    }

    /// Encodes the metrics for [`merge_bytes`](Self::merge_bytes) on another rank.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (segment, metrics) in &self.segments {
            bytes.extend(segment.to_bytes());
            bytes.extend(metrics.to_bytes());
        }
        bytes
    }

    /// Adds the samples of encoded metrics; returns `None` if the bytes are malformed.
    pub(crate) fn merge_bytes(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let (segment, rest) = bytes.split_first_chunk()?;
            let segment = Segment::from_bytes(segment);
            bytes = rest;
            let mut metrics = TaskMetrics::small(&self.tasks);
            metrics.merge_bytes(&mut bytes)?;
            self.change(segment, |own| own.merge(&metrics));
        }
        Some(())
    }

    /// Returns the metrics by segment and task, with ascending ids and up to `bins` calibration bins.
    pub fn figures(&self, bins: usize) -> BTreeMap<Segment, BTreeMap<String, Figures>> {
        let tasks = |metrics: &TaskMetrics| {
            metrics.iter().map(|(name, metrics)| (name.to_owned(), metrics.figures_with_bins(bins))).collect()
        };
        self.segments.iter().map(|(segment, metrics)| (*segment, tasks(metrics))).collect()
    }
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::{BatchParts, Feature, Group};

    use super::*;

    /// Returns seven samples, deduplicated, with two labels.
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
            kept: Vec::new(),
            groups: vec![Group::try_new("g", Some(inverse.into()), vec![feature]).unwrap()],
        })
        .unwrap()
    }

    #[test]
    fn every_sample_counts_in_its_segment_for_every_task() {
        let batch = batch();
        let tasks = [("a", 1), ("b", 0)].map(|(name, column)| Task {
            name: name.into(),
            column,
            loss: super::super::Loss::default(),
        });
        let logits: Vec<f32> = (0..14).map(|i| i as f32 / 10.0 - 0.5).collect();
        let mut metrics = SegmentMetrics::new("country", &tasks, 2);
        metrics.add(&batch, &Segment::of_samples(&batch, "country").unwrap(), &logits);
        assert!(Segment::of_samples(&batch, "city").is_none());
        let figures = metrics.figures(0);
        let counts: Vec<_> =
            figures.iter().map(|(segment, tasks)| (segment.to_string(), tasks["a"].samples)).collect();
        let expected = [("5", 3), ("7", 1), ("empty", 1), ("several", 1), ("other", 1)];
        assert_eq!(counts, expected.map(|(segment, samples)| (segment.to_owned(), samples)));
        // Segment 5 has the samples 0, 1 and 6; computes its metrics directly.
        let (mut a, mut b) = (super::super::BinaryMetrics::small(), super::super::BinaryMetrics::small());
        for (sample, weight) in [(0, 1.0), (1, 2.0), (6, 1.0)] {
            a.add(logits[2 * sample], batch.labels()[2 * sample + 1], weight);
            b.add(logits[2 * sample + 1], batch.labels()[2 * sample], weight);
        }
        assert_eq!(figures[&Segment::Id(5)]["a"], a.figures());
        assert_eq!(figures[&Segment::Id(5)]["b"], b.figures());
        // A segment with one sample has one class, so it has a loss, but no metric that compares classes.
        let one = &figures[&Segment::Id(7)]["a"];
        assert_eq!((one.samples, one.loss.is_some(), one.ne, one.auc), (1, true, None, None));
    }
}
