//! Which rows a range of samples uses, and which values some rows use.

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
pub(crate) fn listed<'a>(column: &'a [i32], rows: &'a [i32]) -> impl Iterator<Item = &'a i32> + Clone {
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

/// The values that some rows use, and no other: stretches of the feature's buffer, in its order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum UsedValues {
    /// One stretch: the rows keep their places in it.
    One(Range<usize>),
    /// Several, and each row's offset once they stand one after the other.
    Several { stretches: Vec<Range<usize>>, offsets: Vec<i32> },
}

impl UsedValues {
    /// The values of `rows`.
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

    /// The values of all rows.
    pub(crate) fn of_all(feature: &Feature) -> Self {
        Self::new(feature, &UsedRows::Range(0..feature.rows()))
    }

    /// In one pass where the rows stand in the order of the buffer without gaps, as rows mostly do.
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
            // No more values than the buffer has, whose offsets are `i32`.
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

    /// How many they are.
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
            let used = UsedValues::of_all(&feature);
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
