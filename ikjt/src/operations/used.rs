//! Which rows, and which values, a range of samples uses.

use std::ops::Range;

use crate::{Feature, Group};

/// The rows that a range of samples uses, in the order of their first use.
#[derive(Debug)]
pub(crate) enum UsedRows {
    /// These rows, every one.
    Range(Range<usize>),
    /// These rows.
    Listed(Vec<i32>),
}

impl UsedRows {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Range(rows) => rows.len(),
            Self::Listed(rows) => rows.len(),
        }
    }
}

/// The entries of `column` for the rows `rows`.
pub(crate) fn listed<'a>(column: &'a [i32], rows: &'a [i32]) -> impl Iterator<Item = &'a i32> {
    rows.iter().map(move |&row| &column[row as usize])
}

/// Numbers rows in the order of their first use. It keeps its table from one range of samples to the next.
#[derive(Debug, Default)]
pub(crate) struct Renumbering {
    /// By row, counted from the lowest one: 1 + its new number, 0 if it has none. All 0 between calls.
    numbers: Vec<u32>,
}

impl Renumbering {
    /// The rows that `samples` of `group` use. The new row number of every sample, counted from `first`, goes
    /// to `inverse`, if there is one; the caller keeps the numbers within `i32`.
    pub(crate) fn used_rows(
        &mut self,
        group: &Group,
        samples: Range<usize>,
        first: usize,
        inverse: Option<&mut Vec<i32>>,
    ) -> UsedRows {
        match (group.inverse(), inverse) {
            (None, None) => UsedRows::Range(samples),
            (None, Some(inverse)) => {
                inverse.extend((first..first + samples.len()).map(|row| row as i32));
                UsedRows::Range(samples)
            }
            (Some(index), inverse) => {
                let mut unused = Vec::new();
                self.renumber(&index[samples], first, inverse.unwrap_or(&mut unused))
            }
        }
    }

    fn renumber(&mut self, index: &[i32], first: usize, inverse: &mut Vec<i32>) -> UsedRows {
        let (Some(&start), Some(&end)) = (index.first(), index.last()) else { return UsedRows::Range(0..0) };
        // Consecutive rows keep their distance: so it is in what was deduplicated by comparing neighbours.
        if index.windows(2).all(|pair| (pair[1] - pair[0]) as u32 <= 1) {
            inverse.extend(index.iter().map(|row| row - start + first as i32));
            return UsedRows::Range(start as usize..end as usize + 1);
        }
        let (lowest, highest) = index.iter().fold((start, start), |(a, b), &row| (a.min(row), b.max(row)));
        let width = (highest - lowest) as usize + 1;
        if self.numbers.len() < width {
            // Fresh zeroed memory: pages without a used row are never touched.
            self.numbers = vec![0; width];
        }
        let mut rows = Vec::new();
        for &row in index {
            let number = &mut self.numbers[(row - lowest) as usize];
            if *number == 0 {
                rows.push(row);
                *number = (first + rows.len()) as u32;
            }
            inverse.push((*number - 1) as i32);
        }
        for row in &rows {
            self.numbers[(row - lowest) as usize] = 0;
        }
        // First used one by one, some of them again later: so it is in what was deduplicated by hashing.
        if rows.len() == width && rows.is_sorted() {
            return UsedRows::Range(lowest as usize..highest as usize + 1);
        }
        UsedRows::Listed(rows)
    }
}

/// Where the values of some rows stand.
#[derive(Debug, Clone)]
pub(crate) struct UsedValues {
    /// From the first value to the last one; empty rows do not count.
    pub(crate) span: Range<usize>,
    /// The rows' ids together.
    pub(crate) total: u64,
}

impl UsedValues {
    /// The values of `rows`, in one pass over their offsets and sizes.
    pub(crate) fn new(feature: &Feature, rows: &UsedRows) -> Self {
        match rows {
            UsedRows::Range(rows) => {
                let offsets = &feature.offsets()[rows.clone()];
                Self::of_slices(offsets.iter().zip(&feature.sizes()[rows.clone()]))
            }
            UsedRows::Listed(rows) => {
                Self::of_slices(listed(feature.offsets(), rows).zip(listed(feature.sizes(), rows)))
            }
        }
    }

    fn of_slices<'a>(slices: impl Iterator<Item = (&'a i32, &'a i32)>) -> Self {
        let (mut start, mut end, mut total) = (u32::MAX, 0, 0);
        for (&offset, &size) in slices {
            let (offset, size) = (offset as u32, size as u32);
            start = start.min(if size == 0 { u32::MAX } else { offset });
            end = end.max(if size == 0 { 0 } else { offset + size });
            total += u64::from(size);
        }
        Self { span: start.min(end) as usize..end as usize, total }
    }

    /// Whether taking the span whole takes no more values than the rows have.
    pub(crate) fn is_dense(&self) -> bool {
        self.span.len() as u64 <= self.total
    }
}
