//! A feature that grows at its end.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use crate::operations::UsedValues;
use crate::{Error, Feature, Result};

/// The buffers of a feature to be: values are appended, then rows that are slices of them.
///
/// Capacity is given in advance, and [`check_values`] bounds it, so offsets fit 32 bits.
#[derive(Debug)]
pub(crate) struct FeatureBuilder {
    values: Vec<i64>,
    weights: Option<Vec<f32>>,
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
    /// An empty feature, with weights if `weighted`.
    pub(crate) fn with_capacity(weighted: bool, values: usize, rows: usize) -> Self {
        Self {
            values: Vec::with_capacity(values),
            weights: weighted.then(|| Vec::with_capacity(values)),
            offsets: Vec::with_capacity(rows),
            sizes: Vec::with_capacity(rows),
        }
    }

    /// The number of values so far: where the next one will stand.
    fn end(&self) -> usize {
        self.values.len()
    }

    /// Appends the values `span` of `source`, with their weights.
    fn append_values(&mut self, source: &Feature, span: Range<usize>) {
        if let (Some(weights), Some(source)) = (&mut self.weights, source.weights()) {
            weights.extend_from_slice(&source[span.clone()]);
        }
        self.values.extend_from_slice(&source.values()[span]);
    }

    /// Appends the row `offset .. offset + size` of the values.
    fn append_row(&mut self, offset: usize, size: usize) {
        // Both are below the capacity, which `check_values` has bounded.
        self.offsets.push(offset as i32);
        self.sizes.push(size as i32);
    }

    /// Appends rows of `source` with these offsets and sizes, whose values stand in `span`, taking the span whole.
    pub(crate) fn append_span<'a>(
        &mut self,
        source: &Feature,
        offsets: impl Iterator<Item = &'a i32>,
        sizes: impl Iterator<Item = &'a i32>,
        span: Range<usize>,
    ) {
        self.offsets.extend(rebased(offsets, &span, self.values.len()));
        self.sizes.extend(sizes);
        self.append_values(source, span);
    }

    /// Appends rows of `source` with these sizes, which use the values `used`.
    pub(crate) fn append_used<'a>(
        &mut self,
        source: &Feature,
        offsets: impl Iterator<Item = &'a i32>,
        sizes: impl Iterator<Item = &'a i32>,
        used: &UsedValues,
    ) {
        match used {
            UsedValues::One(span) => self.append_span(source, offsets, sizes, span.clone()),
            UsedValues::Several { stretches, offsets } => {
                // Below the capacity, which `check_values` has bounded.
                let base = self.end() as i32;
                self.offsets.extend(offsets.iter().map(|offset| base + offset));
                self.sizes.extend(sizes);
                stretches.iter().for_each(|stretch| self.append_values(source, stretch.clone()));
            }
        }
    }

    /// Appends `rows` of `source` one after the other, without sharing.
    pub(crate) fn append_copies(&mut self, source: &Feature, rows: impl IntoIterator<Item = usize>) {
        for row in rows {
            let span = source.span(row);
            self.append_row(self.end(), span.len());
            self.append_values(source, span);
        }
    }

    /// The feature.
    pub(crate) fn finish(self, name: Arc<str>) -> Feature {
        let weights = self.weights.map(ScalarBuffer::from);
        Feature::trusted(name, self.values.into(), weights, self.offsets.into(), self.sizes.into())
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
