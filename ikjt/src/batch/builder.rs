//! A feature that grows at its end.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use crate::batch::operations::UsedValues;
use crate::{Error, Feature, Result};

/// The buffers of a feature to be: values are appended, then rows that are slices of them.
///
/// Capacity is given in advance, and [`check_values`] bounds it, so offsets fit 32 bits.
#[derive(Debug)]
pub(crate) struct FeatureBuilder {
    values: Vec<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

/// # Errors
///
/// [`Error::Invariant`] if the `total` values of `place` are more than 32-bit offsets address.
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
    /// An empty feature.
    pub(crate) fn with_capacity(values: usize, rows: usize) -> Self {
        Self {
            values: Vec::with_capacity(values),
            offsets: Vec::with_capacity(rows),
            sizes: Vec::with_capacity(rows),
        }
    }

    /// Appends rows of `source` with these offsets and sizes, which use the values `used`.
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
            // Below the capacity, which `check_values` has bounded.
            UsedValues::Several { offsets, .. } => {
                self.offsets.extend(offsets.iter().map(|offset| base as i32 + offset));
            }
        }
        self.sizes.extend(sizes);
        for stretch in used.stretches() {
            self.values.extend_from_slice(&source.values()[stretch.clone()]);
        }
    }

    /// The feature.
    pub(crate) fn finish(self, name: Arc<str>) -> Feature {
        Feature::trusted(name, self.values.into(), self.offsets.into(), self.sizes.into())
    }
}

/// Offsets into values of which `span` moves to `base`. An empty row may stand outside the span: it moves into it.
pub(crate) fn rebased<'a>(
    offsets: impl Iterator<Item = &'a i32>,
    span: &Range<usize>,
    base: usize,
) -> impl Iterator<Item = i32> {
    // A row's offset is the first value of the span; the last one may be where no offset is.
    let start = span.start as i32;
    let end = i32::try_from(span.end).unwrap_or(i32::MAX);
    offsets.map(move |offset| (*offset).clamp(start, end) - start + base as i32)
}
