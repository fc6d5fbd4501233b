//! The positions of a feature's rows and values in a staged batch.

use std::ops::Range;

use super::jagged::Layout;

/// The positions of one feature's elements, and of its bags if it is pooled by sum or mean.
#[derive(Debug)]
pub(crate) struct FeaturePlace {
    /// The index of its first element. Elements of sequences are counted from the first element of all sequences.
    first: usize,
    /// The ranges of its values that are staged as elements, each with the number of elements before it.
    runs: Vec<(Range<usize>, usize)>,
    /// The bag of row 0, and the distance between the bags of neighbouring rows; `None` for sequences.
    bags: Option<(usize, usize)>,
}

impl FeaturePlace {
    pub(super) fn new(layout: &Layout, first: usize, bags: Option<(usize, usize)>) -> Self {
        let before = |next: &mut usize, run: &Range<usize>| {
            let before = *next;
            *next += run.len();
            Some((run.clone(), before))
        };
        Self { first, runs: layout.runs.iter().scan(0, before).collect(), bags }
    }

    /// Returns whether the feature is a sequence.
    pub(crate) fn is_sequence(&self) -> bool {
        self.bags.is_none()
    }

    /// Returns the index of a row's bag; 0 for a sequence, which has no bags.
    pub(crate) fn bag(&self, row: u32) -> i32 {
        self.bags.map_or(0, |(first, step)| first + row as usize * step) as i32
    }

    /// Returns the index of the element of a value. The value must be in a row.
    pub(crate) fn element(&self, value: u32) -> i32 {
        let value = value as usize;
        let (run, before) = &self.runs[self.runs.partition_point(|(run, _)| run.end <= value)];
        (self.first + before + value - run.start) as i32
    }

    /// Returns the range of the feature's elements.
    pub(crate) fn elements(&self) -> Range<i64> {
        let count: usize = self.runs.iter().map(|(run, _)| run.len()).sum();
        self.first as i64..(self.first + count) as i64
    }
}
