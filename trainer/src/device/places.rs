//! Where a feature's rows and values stand in what was staged of a batch.

use std::ops::Range;

use super::jagged::Layout;

/// The elements of one feature, and its bags if it pools by sum or mean.
#[derive(Debug)]
pub(crate) struct FeaturePlace {
    /// The number of its first element: those of sequences count from the first one of all sequences.
    first: usize,
    /// Its values that are elements, and how many of them come before each of these ranges.
    runs: Vec<(Range<usize>, usize)>,
    /// The bag of row 0, and how far it is to the next row's; sequences have none.
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

    /// Whether it is a sequence.
    pub(crate) fn is_sequence(&self) -> bool {
        self.bags.is_none()
    }

    /// The bag of a row; 0 of a sequence, which has none.
    pub(crate) fn bag(&self, row: u32) -> i32 {
        self.bags.map_or(0, |(first, step)| first + row as usize * step) as i32
    }

    /// The element of a value that is in a row.
    pub(crate) fn element(&self, value: u32) -> i32 {
        let value = value as usize;
        let (run, before) = &self.runs[self.runs.partition_point(|(run, _)| run.end <= value)];
        (self.first + before + value - run.start) as i32
    }

    /// All elements.
    pub(crate) fn elements(&self) -> Range<i64> {
        let count: usize = self.runs.iter().map(|(run, _)| run.len()).sum();
        self.first as i64..(self.first + count) as i64
    }
}
