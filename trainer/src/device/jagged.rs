//! Rows that may overlap, in the form that kernels expect.

use std::ops::Range;

use onefold_ikjt::Feature;
use tch::{Kind, Tensor};

use super::Jagged;
use super::parcel::{Parcel, view};
use super::samples_of_rows::SamplesOfRows;

/// The layout of one feature.
pub(super) struct Layout {
    /// The values that belong to rows, as disjoint ranges.
    pub(super) runs: Vec<Range<usize>>,
    /// The offset of each row within these values.
    pub(super) offsets: Vec<i32>,
    /// The rows that are not empty, ordered by offset.
    order: Vec<u32>,
    /// For each row of `order`, the largest end of the rows up to it.
    reach: Vec<i32>,
    longest: i32,
    pub(super) elements: usize,
}

impl Layout {
    /// Computes the layout of rows with these offsets and sizes.
    pub(super) fn new(offsets: &[i32], sizes: &[i32]) -> Self {
        let mut order: Vec<u32> = (0..sizes.len() as u32).filter(|&row| sizes[row as usize] > 0).collect();
        // Most rows are already in order, which the sort detects in one pass.
        order.sort_by_key(|&row| offsets[row as usize]);
        let mut new_offsets = vec![0; sizes.len()];
        let (mut runs, mut reach): (Vec<Range<usize>>, _) = (Vec::new(), Vec::with_capacity(order.len()));
        let (mut end, mut skipped, mut longest) = (0, 0, 0);
        for &row in &order {
            let (offset, size) = (offsets[row as usize], sizes[row as usize]);
            match runs.last_mut() {
                Some(run) if offset <= end => run.end = run.end.max((offset + size) as usize),
                _ => {
                    skipped += offset - end;
                    runs.push(offset as usize..(offset + size) as usize);
                }
            }
            end = end.max(offset + size);
            new_offsets[row as usize] = offset - skipped;
            reach.push(end - skipped);
            longest = longest.max(size);
        }
        let elements = runs.iter().map(ExactSizeIterator::len).sum();
        Self { runs, offsets: new_offsets, order, reach, longest, elements }
    }

    /// Returns the layout of `rows` rows without elements.
    pub(super) fn empty(rows: usize) -> Self {
        Self::new(&vec![0; rows], &vec![0; rows])
    }
}

/// Jagged rows under construction.
#[derive(Default)]
pub(super) struct JaggedParts {
    pub(super) offsets: Vec<i32>,
    pub(super) sizes: Vec<i32>,
    order: Vec<i32>,
    reach: Vec<i32>,
    longest: i32,
}

impl JaggedParts {
    /// Adds the order of a feature's rows. Row r has the index `number(r)`; the feature's elements begin at
    /// `first`.
    pub(super) fn add_order(&mut self, layout: &Layout, first: usize, number: impl Fn(u32) -> usize) {
        self.order.extend(layout.order.iter().map(|&row| number(row) as i32));
        self.reach.extend(layout.reach.iter().map(|end| end + first as i32));
        self.longest = self.longest.max(layout.longest);
    }

    /// Adds the rows of a feature, with these sizes.
    pub(super) fn add_rows(&mut self, sizes: &[i32], layout: &Layout, first: usize) {
        let first_row = self.offsets.len();
        self.offsets.extend(layout.offsets.iter().map(|offset| offset + first as i32));
        self.sizes.extend_from_slice(sizes);
        self.add_order(layout, first, |row| first_row + row as usize);
    }

    /// Adds one row per sample: the feature's row that the sample refers to.
    pub(super) fn add_samples(
        &mut self,
        feature: &Feature,
        layout: &Layout,
        first: usize,
        inverse: &[i32],
        samples: &SamplesOfRows,
    ) {
        let first_row = self.offsets.len();
        let rows = inverse.iter().map(|&row| row as usize);
        self.offsets.extend(rows.clone().map(|row| layout.offsets[row] + first as i32));
        self.sizes.extend(rows.map(|row| feature.sizes()[row]));
        for (&row, &reach) in layout.order.iter().zip(&layout.reach) {
            for &sample in samples.of(row as usize) {
                self.order.push(first_row as i32 + sample);
                self.reach.push(reach + first as i32);
            }
        }
        self.longest = self.longest.max(layout.longest);
    }

    /// Adds the rows to a parcel. Returns a function of the parcel's memory on the device that returns the rows.
    pub(super) fn pack(self, parcel: &mut Parcel<'_>) -> impl Fn(&Tensor) -> Jagged + use<> {
        let (rows, longest) = (self.offsets.len() as i64, i64::from(self.longest.max(1)));
        let sections = [self.offsets, self.sizes, self.order, self.reach].map(|values| parcel.ints(values));
        move |device: &Tensor| {
            let [offsets, sizes, order, reach] = sections.map(|section| view(device, section, Kind::Int));
            Jagged { rows, offsets, sizes, order, reach, longest }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows 2..4, empty, 1..3, 6..7, empty. The values 0, 4, 5 and 7 (of eight) are in no row.
    fn feature() -> Feature {
        Feature::try_new("x", (0..8).collect::<Vec<_>>(), vec![2, 5, 1, 6, 0], vec![2, 0, 2, 1, 0]).unwrap()
    }

    #[test]
    fn only_values_in_rows_are_laid_out() {
        let feature = feature();
        let layout = Layout::new(feature.offsets(), feature.sizes());
        assert_eq!(layout.runs, [1..4, 6..7]);
        assert_eq!(layout.order, [2, 0, 3]);
        assert_eq!([0, 2, 3].map(|row| layout.offsets[row]), [1, 0, 3]);
        assert_eq!((layout.reach, layout.longest, layout.elements), (vec![2, 3, 4], 2, 4));
    }

    #[test]
    fn samples_are_found_by_row() {
        let samples = SamplesOfRows::new(&[2, 0, 2, 2], 4);
        assert_eq!((&samples.order, &samples.ends), (&vec![1, 0, 2, 3], &vec![1, 1, 4, 4]));
        assert_eq!([0, 1, 2, 3].map(|row| samples.of(row).len()), [1, 0, 3, 0]);
    }

    #[test]
    fn rows_by_sample_are_those_that_samples_have() {
        let (feature, inverse) = (feature(), [3, 0, 1, 2, 0]);
        let mut parts = JaggedParts::default();
        let layout = Layout::new(feature.offsets(), feature.sizes());
        let samples = SamplesOfRows::new(&inverse, 5);
        parts.add_rows(feature.sizes(), &layout, 10);
        parts.add_samples(&feature, &layout, 20, &inverse, &samples);
        assert_eq!(parts.sizes, [2, 0, 2, 1, 0, 1, 2, 0, 2, 2]);
        assert_eq!([0, 2, 3].map(|row| parts.offsets[row]), [11, 10, 13]);
        assert_eq!([5, 6, 8, 9].map(|row| parts.offsets[row]), [23, 21, 20, 21]);
        // Ordered by offset; the second five rows are samples.
        assert_eq!(parts.order, [2, 0, 3, 8, 6, 9, 5]);
        assert_eq!((parts.reach, parts.longest), (vec![12, 13, 14, 22, 23, 23, 24], 2));
    }
}
