//! A builder of features that appends rows.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crate::batch::Feature;
use crate::batch::operations::{UsedRows, UsedValues, listed};
use crate::error::{Error, Result};

/// The buffers of a feature under construction: values, and rows that are slices of the values.
///
/// The capacity is given in advance and checked with [`check_values`], so offsets fit 32 bits.
#[derive(Debug)]
pub(crate) struct FeatureBuilder {
    values: Vec<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

/// Returns `total`, the number of values of `place`, as `usize`.
///
/// # Errors
///
/// [`Error::Invariant`] if there are more values than 32-bit offsets can address.
pub(crate) fn check_values(place: impl Display, total: u64) -> Result<usize> {
    match i32::try_from(total) {
        Ok(total) => Ok(total as usize),
        Err(_) => {
            let message = format!(
                "{total} ids are more than 32-bit offsets address\n  hint: make batches of fewer samples"
            );
            Err(Error::invariant(place, message))
        }
    }
}

impl FeatureBuilder {
    /// Creates an empty builder for `values` values and `rows` rows.
    pub(crate) fn with_capacity(values: usize, rows: usize) -> Self {
        Self {
            values: Vec::with_capacity(values),
            offsets: Vec::with_capacity(rows),
            sizes: Vec::with_capacity(rows),
        }
    }

    /// Appends `rows` of `source`, which use the values `used`.
    pub(crate) fn append(&mut self, source: &Feature, rows: &UsedRows, used: &UsedValues) {
        let base = self.values.len();
        let (offsets, sizes) = (source.offsets(), source.sizes());
        match (used, rows) {
            // The sums are below the capacity, which `check_values` has limited to `i32`.
            (UsedValues::Several { offsets, .. }, _) => {
                self.offsets.extend(offsets.iter().map(|offset| base as i32 + offset));
            }
            (UsedValues::One(span), UsedRows::Range(rows)) => {
                self.offsets.extend(rebased(offsets[rows.clone()].iter(), span, base));
            }
            (UsedValues::One(span), UsedRows::Listed(rows)) => {
                self.offsets.extend(rebased(listed(offsets, rows), span, base));
            }
        }
        match rows {
            UsedRows::Range(rows) => self.sizes.extend(&sizes[rows.clone()]),
            UsedRows::Listed(rows) => self.sizes.extend(listed(sizes, rows)),
        }
        for stretch in used.stretches() {
            self.values.extend_from_slice(&source.values()[stretch.clone()]);
        }
    }

    /// Returns the finished feature.
    pub(crate) fn finish(self, name: Arc<str>) -> Feature {
        Feature::trusted(name, self.values.into(), self.offsets.into(), self.sizes.into())
    }
}

/// Maps offsets into the values `span` to offsets into a buffer in which `span` begins at `base`. An empty row may
/// have an offset outside the span; its offset is clamped to the span.
pub(crate) fn rebased<'a>(
    offsets: impl Iterator<Item = &'a i32>,
    span: &Range<usize>,
    base: usize,
) -> impl Iterator<Item = i32> {
    // `start` fits `i32`, because it is the offset of a row. `end` may exceed `i32::MAX`.
    let start = span.start as i32;
    let end = i32::try_from(span.end).unwrap_or(i32::MAX);
    offsets.map(move |offset| (*offset).clamp(start, end) - start + base as i32)
}
