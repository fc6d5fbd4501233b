//! A builder of features that appends rows.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crate::batch::operations::UsedValues;
use crate::{Error, Feature, Result};

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

    /// Appends rows of `source`, given by their offsets and sizes. `used` lists the values that these rows use.
    pub(crate) fn append<'a>(
        &mut self,
        source: &Feature,
        offsets: impl Iterator<Item = &'a i32>,
        sizes: impl Iterator<Item = &'a i32>,
        used: &UsedValues,
    ) {
        let base = self.values.len();
        match used {
            UsedValues::One(span) => self.offsets.extend(rebased(offsets, span, base)),
            // The sums are below the capacity, which `check_values` has limited to `i32`.
            UsedValues::Several { offsets, .. } => {
                self.offsets.extend(offsets.iter().map(|offset| base as i32 + offset));
            }
        }
        self.sizes.extend(sizes);
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
