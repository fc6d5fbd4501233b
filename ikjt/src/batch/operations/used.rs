//! The rows that a range of samples uses, and the values that a set of rows uses.

use std::ops::Range;

use crate::batch::{Feature, Group};

/// The rows that a range of samples uses, in the order of their first use.
#[derive(Debug)]
pub(crate) enum UsedRows {
    /// All rows of the range.
    Range(Range<usize>),
    /// The listed rows.
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

/// Returns the entries of `column` for the given rows.
pub(crate) fn listed<'a>(column: &'a [i32], rows: &'a [i32]) -> impl Iterator<Item = &'a i32> + Clone {
    rows.iter().map(move |&row| &column[row as usize])
}

/// Numbers rows in the order of their first use. The lookup table is reused between calls.
#[derive(Debug, Default)]
pub(crate) struct Renumbering {
    /// For each row, counted from the lowest used row: 1 + its new number, or 0 if it is not used. All entries are
    /// 0 between calls.
    numbers: Vec<u32>,
}

impl Renumbering {
    /// Returns the rows that `samples` of `group` use. Appends the new row number of every sample, counted from
    /// `first`, to `inverse` if it is given. The caller ensures that the numbers fit `i32`.
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
        // If row numbers increase by at most 1 per sample, the new numbers are the old ones shifted by a constant.
        // Deduplication that only compares neighbours produces this order.
        if index.windows(2).all(|pair| (pair[1] - pair[0]) as u32 <= 1) {
            inverse.extend(index.iter().map(|row| row - start + first as i32));
            return UsedRows::Range(start as usize..end as usize + 1);
        }
        let (lowest, highest) = index.iter().fold((start, start), |(a, b), &row| (a.min(row), b.max(row)));
        let width = (highest - lowest) as usize + 1;
        if self.numbers.len() < width {
            // Allocates zeroed memory. The operating system does not back pages that are never written.
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
        // If the first uses are in ascending order without gaps, the rows are a range although rows recur later.
        // Deduplication by hashing produces this order.
        if rows.len() == width && rows.is_sorted() {
            return UsedRows::Range(lowest as usize..highest as usize + 1);
        }
        UsedRows::Listed(rows)
    }
}

/// The values that a set of rows uses: disjoint ranges of the feature's buffer, in the order of the buffer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum UsedValues {
    /// One range; the rows keep their relative places in it.
    One(Range<usize>),
    /// Several ranges, and the offset of each row after the ranges are copied one after the other.
    Several { stretches: Vec<Range<usize>>, offsets: Vec<i32> },
}

impl UsedValues {
    /// Returns the values that `rows` use.
    pub(crate) fn new(feature: &Feature, rows: &UsedRows) -> Self {
        let (offsets, sizes) = (feature.offsets(), feature.sizes());
        match rows {
            UsedRows::Range(rows) => {
                Self::of_spans(offsets[rows.clone()].iter().zip(&sizes[rows.clone()]).map(span))
            }
            UsedRows::Listed(rows) => {
                Self::of_spans(listed(offsets, rows).zip(listed(sizes, rows)).map(span))
            }
        }
    }

    /// Takes one pass if the spans are in the order of the buffer without gaps, which is the most common case.
    fn of_spans(spans: impl Iterator<Item = Range<usize>> + Clone) -> Self {
        let mut filled = spans.clone().filter(|span| !span.is_empty());
        let Some(mut all) = filled.next() else { return Self::One(0..0) };
        let (mut start, mut in_order, mut has_gap) = (all.start, true, false);
        for span in filled {
            in_order &= start <= span.start;
            has_gap |= all.end < span.start;
            (start, all.end) = (span.start, all.end.max(span.end));
        }
        if in_order && !has_gap { Self::One(all) } else { Self::of_scattered(spans.collect(), in_order) }
    }

    fn of_scattered(spans: Vec<Range<usize>>, in_order: bool) -> Self {
        let mut rows: Vec<usize> = (0..spans.len()).filter(|row| !spans[*row].is_empty()).collect();
        if !in_order {
            rows.sort_unstable_by_key(|row| spans[*row].start);
        }
        let mut stretches: Vec<Range<usize>> = Vec::new();
        let (mut offsets, mut total) = (vec![0; spans.len()], 0);
        for row in rows {
            let span = &spans[row];
            let end = match stretches.last_mut() {
                Some(last) if span.start <= last.end => {
                    total += span.end.saturating_sub(last.end);
                    last.end = last.end.max(span.end);
                    last.end
                }
                _ => {
                    total += span.len();
                    stretches.push(span.clone());
                    span.end
                }
            };
            // The total is at most the length of the buffer, so it fits `i32`.
            offsets[row] = (total - (end - span.start)) as i32;
        }
        match &stretches[..] {
            [only] => Self::One(only.clone()),
            _ => Self::Several { stretches, offsets },
        }
    }

    pub(crate) fn stretches(&self) -> &[Range<usize>] {
        match self {
            Self::One(span) => std::slice::from_ref(span),
            Self::Several { stretches, .. } => stretches,
        }
    }

    /// Returns the total number of values.
    pub(crate) fn len(&self) -> usize {
        self.stretches().iter().map(Range::len).sum()
    }
}

fn span((&offset, &size): (&i32, &i32)) -> Range<usize> {
    offset as usize..offset as usize + size as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_used_value_is_there_once_and_no_other(
            rows in prop::collection::vec((0_i32..40, 0_i32..8), 0..12)
        ) {
            let (offsets, sizes): (Vec<i32>, Vec<i32>) = rows.iter().copied().unzip();
            let feature = Feature::try_new("x", (0..48).collect::<Vec<_>>(), offsets, sizes).unwrap();
            let used = UsedValues::new(&feature, &UsedRows::Range(0..feature.rows()));
            let kept: Vec<i64> = used.stretches().iter().flat_map(|s| &feature.values()[s.clone()]).copied().collect();
            let expected: std::collections::BTreeSet<i64> =
                (0..feature.rows()).flat_map(|row| feature.row(row)).copied().collect();
            prop_assert_eq!(&kept, &expected.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(used.len(), kept.len());
            if let UsedValues::Several { offsets, stretches } = used {
                prop_assert!(stretches.len() > 1);
                for row in 0..feature.rows() {
                    prop_assert_eq!(&kept[offsets[row] as usize..][..feature.row(row).len()], feature.row(row));
                }
            }
        }
    }
}
