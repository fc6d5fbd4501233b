//! Columns that a batch carries besides its features, for example to join predictions back or to group by.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, UInt32Array};
use arrow::compute::{concat, take};
use arrow::datatypes::{DataType, Int64Type};

use crate::error::{Error, Result};

/// One column that a batch carries besides its features: a [kept column](onefold_datasets::Schema::kept) of the
/// dataset, or its `session_id`.
#[derive(Debug, Clone)]
pub struct KeptValues {
    /// The column's name.
    pub name: Arc<str>,
    /// A value for every sample, `[B]`, of type `Int64` or `Utf8`. Nulls are allowed.
    pub values: ArrayRef,
}

impl PartialEq for KeptValues {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && *self.values == *other.values
    }
}

impl KeptValues {
    /// Creates a column from its name and values.
    pub fn new(name: impl Into<Arc<str>>, values: ArrayRef) -> Self {
        Self { name: name.into(), values }
    }

    /// Checks that the column can belong to a batch of `samples` samples.
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

    /// Returns the value of a sample as text, or `None` for a null.
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

    /// Returns the size of the samples `start..end` in bytes: 8 per value, plus the text bytes.
    pub(crate) fn bytes(&self, start: usize, end: usize) -> u64 {
        let texts = self.values.as_string_opt::<i32>().map_or(0, |texts| {
            let ends = texts.value_offsets();
            (ends[end] - ends[start]) as u64
        });
        8 * (end - start) as u64 + texts
    }

    /// Returns the values of the given samples, in the given order.
    ///
    /// # Panics
    ///
    /// If there is no such sample, or repeated samples have more bytes of texts than 32-bit offsets can address.
    pub(crate) fn take(&self, samples: &UInt32Array) -> Self {
        let taken = take(&self.values, samples, None);
        let values = taken.unwrap_or_else(|error| panic!("kept column `{}`: {error}", self.name));
        Self { name: Arc::clone(&self.name), values }
    }

    /// Returns the values of `count` samples from `start` on. The result shares the buffers.
    ///
    /// # Panics
    ///
    /// If there are fewer samples.
    pub(crate) fn slice(&self, start: usize, count: usize) -> Self {
        Self { name: Arc::clone(&self.name), values: self.values.slice(start, count) }
    }

    /// Concatenates pieces of the column `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if 32-bit offsets cannot address the texts.
    pub(crate) fn concat(name: &Arc<str>, pieces: &[ArrayRef]) -> Result<Self> {
        let pieces: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
        let values = concat(&pieces).map_err(|error| {
            let message = format!("{error}\n  hint: make batches of fewer samples");
            Error::invariant(format!("kept column `{name}`"), message)
        })?;
        Ok(Self { name: Arc::clone(name), values })
    }
}
