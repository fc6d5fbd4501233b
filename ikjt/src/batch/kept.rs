//! Columns that a batch carries beside its features: to join predictions back, or to group by.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, UInt32Array};
use arrow::compute::{concat, take};
use arrow::datatypes::{DataType, Int64Type};

use crate::{Error, Result};

/// One column that a batch carries beside its features: a [kept column](onefold_datasets::Schema::kept) of the dataset,
/// or its `session_id`.
#[derive(Debug, Clone)]
pub struct KeptValues {
    /// The column's name.
    pub name: Arc<str>,
    /// A value for every sample, `[B]`: `Int64` or `Utf8`, where nulls are allowed.
    pub values: ArrayRef,
}

impl PartialEq for KeptValues {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && *self.values == *other.values
    }
}

impl KeptValues {
    /// A column of these values.
    pub fn new(name: impl Into<Arc<str>>, values: ArrayRef) -> Self {
        Self { name: name.into(), values }
    }

    /// That the column can belong to a batch of `samples` samples.
    pub(crate) fn check(&self, samples: usize) -> Result<()> {
        let wrong = |message: String| Err(Error::invariant(format!("kept column `{}`", self.name), message));
        if self.values.len() != samples {
            return wrong(format!("{} values for {samples} samples", self.values.len()));
        }
        match self.values.data_type() {
            DataType::Int64 | DataType::Utf8 => Ok(()),
            other => wrong(format!("its type is {other}, expected Int64 or Utf8")),
        }
    }

    /// The value of a sample as text; `None` for a null.
    ///
    /// # Panics
    ///
    /// If there is no such sample.
    pub fn shown(&self, sample: usize) -> Option<String> {
        let values = &self.values;
        values.is_valid(sample).then(|| match values.as_string_opt::<i32>() {
            Some(texts) => texts.value(sample).to_owned(),
            None => values.as_primitive::<Int64Type>().value(sample).to_string(),
        })
    }

    /// The bytes of the samples `start..end`: 8 for each value, and those of texts.
    pub(crate) fn bytes(&self, start: usize, end: usize) -> u64 {
        let texts = self.values.as_string_opt::<i32>().map_or(0, |texts| {
            let ends = texts.value_offsets();
            (ends[end] - ends[start]) as u64
        });
        8 * (end - start) as u64 + texts
    }

    /// The values of some samples, in this order.
    ///
    /// # Panics
    ///
    /// If there is no such sample.
    pub(crate) fn take(&self, samples: &UInt32Array) -> Self {
        let taken = take(&self.values, samples, None);
        // Fewer or as many texts as there are, so offsets fit.
        let values = taken.unwrap_or_else(|error| panic!("kept column `{}`: {error}", self.name));
        Self { name: Arc::clone(&self.name), values }
    }

    /// The values of `count` samples from `start` on, shared.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub(crate) fn slice(&self, start: usize, count: usize) -> Self {
        Self { name: Arc::clone(&self.name), values: self.values.slice(start, count) }
    }

    /// The values of all pieces of this column, one piece after the other.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the types differ, or 32-bit offsets do not address the texts.
    pub(crate) fn concat(name: &Arc<str>, pieces: &[ArrayRef]) -> Result<Self> {
        let pieces: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
        let values = concat(&pieces).map_err(|error| {
            let message = format!("{error}\n  hint: make batches of fewer samples");
            Error::invariant(format!("kept column `{name}`"), message)
        })?;
        Ok(Self { name: Arc::clone(name), values })
    }
}
