//! A sparse feature of a batch: rows that are slices of one buffer of ids.

use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use crate::error::{Error, Result};

/// The lists of one sparse feature, one per row of its group.
///
/// Row `u` is `values[offsets[u] .. offsets[u] + sizes[u]]`. Rows may overlap and may be in any order, so a sliding
/// window stores only its new items. Cloning shares the buffers.
#[derive(Debug, Clone)]
pub struct Feature {
    name: Arc<str>,
    values: ScalarBuffer<i64>,
    offsets: ScalarBuffer<i32>,
    sizes: ScalarBuffer<i32>,
}

/// Name, values, offsets and sizes of a [`Feature`].
pub(crate) type FeatureParts = (Arc<str>, ScalarBuffer<i64>, ScalarBuffer<i32>, ScalarBuffer<i32>);

impl Feature {
    /// Creates a feature from its buffers.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if
    /// - `offsets` and `sizes` differ in length, or there are more than `i32::MAX` rows,
    /// - an offset or a size is negative, or a row ends after the last value.
    pub fn try_new(
        name: impl Into<Arc<str>>,
        values: impl Into<ScalarBuffer<i64>>,
        offsets: impl Into<ScalarBuffer<i32>>,
        sizes: impl Into<ScalarBuffer<i32>>,
    ) -> Result<Self> {
        let feature =
            Self { name: name.into(), values: values.into(), offsets: offsets.into(), sizes: sizes.into() };
        feature.check()?;
        Ok(feature)
    }

    /// Creates a feature from buffers whose invariants the caller guarantees. Only unit tests check them.
    pub(crate) fn trusted(
        name: Arc<str>,
        values: ScalarBuffer<i64>,
        offsets: ScalarBuffer<i32>,
        sizes: ScalarBuffer<i32>,
    ) -> Self {
        let feature = Self { name, values, offsets, sizes };
        #[cfg(test)]
        feature.check().unwrap();
        feature
    }

    /// Creates a feature whose row `u` is a copy of `rows[u]`.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there are more than `i32::MAX` ids or rows.
    pub fn from_rows(name: impl Into<Arc<str>>, rows: &[impl AsRef<[i64]>]) -> Result<Self> {
        let values: Vec<i64> = rows.iter().flat_map(|row| row.as_ref()).copied().collect();
        Self::from_lengths(name, values, rows.iter().map(|row| row.as_ref().len()))
    }

    /// Creates a feature whose rows are contiguous in `values` (the values and lengths of a KJT).
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there are more than `i32::MAX` ids or rows, or the lengths do not sum to the number of
    /// values.
    pub fn from_lengths(
        name: impl Into<Arc<str>>,
        values: impl Into<ScalarBuffer<i64>>,
        lengths: impl IntoIterator<Item = usize>,
    ) -> Result<Self> {
        let (name, values) = (name.into(), values.into());
        let (mut offsets, mut sizes, mut end) = (Vec::new(), Vec::new(), 0_usize);
        for length in lengths {
            let fits = i32::try_from(end).ok().zip(i32::try_from(length).ok());
            let (offset, size) = fits.ok_or_else(|| {
                let message = format!(
                    "row {} starts at value {end} with {length} ids, which 32-bit offsets cannot address",
                    sizes.len()
                );
                Error::invariant(format!("feature `{name}`"), message)
            })?;
            offsets.push(offset);
            sizes.push(size);
            end = end.saturating_add(length);
        }
        if end != values.len() {
            let message = format!("the lengths sum to {end}, but there are {} values", values.len());
            return Err(Error::invariant(format!("feature `{name}`"), message));
        }
        Self::try_new(name, values, offsets, sizes)
    }

    fn check(&self) -> Result<()> {
        let wrong = |message: String| Err(Error::invariant(format!("feature `{}`", self.name), message));
        if self.offsets.len() != self.sizes.len() || i32::try_from(self.sizes.len()).is_err() {
            return wrong(format!("{} offsets for {} sizes", self.offsets.len(), self.sizes.len()));
        }
        for (row, (&offset, &size)) in self.offsets.iter().zip(&*self.sizes).enumerate() {
            let end = usize::try_from(offset)
                .ok()
                .zip(usize::try_from(size).ok())
                .map(|(offset, size)| offset + size);
            if end.is_none_or(|end| end > self.values.len()) {
                let bound = self.values.len();
                return wrong(format!(
                    "row {row} has offset {offset} and size {size}, but there are {bound} values"
                ));
            }
        }
        Ok(())
    }

    /// Returns the feature's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name as a shared pointer.
    pub(crate) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Returns the same lists under another name.
    pub(crate) fn with_name(self, name: Arc<str>) -> Self {
        Self { name, ..self }
    }

    /// Returns the name, values, offsets and sizes.
    pub(crate) fn into_parts(self) -> FeatureParts {
        (self.name, self.values, self.offsets, self.sizes)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the range of row `row` in [`values`](Self::values).
    pub(crate) fn span(&self, row: usize) -> Range<usize> {
        let offset = self.offsets[row] as usize;
        offset..offset + self.sizes[row] as usize
    }

    /// Returns the ids of row `row`.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    #[inline]
    pub fn row(&self, row: usize) -> &[i64] {
        &self.values[self.offsets[row] as usize..][..self.sizes[row] as usize]
    }

    /// Returns the buffer of all ids; rows are slices of it.
    pub fn values(&self) -> &ScalarBuffer<i64> {
        &self.values
    }

    /// Returns the start of each row in [`values`](Self::values), `[rows]`.
    pub fn offsets(&self) -> &ScalarBuffer<i32> {
        &self.offsets
    }

    /// Returns the number of ids of each row, `[rows]`.
    pub fn sizes(&self) -> &ScalarBuffer<i32> {
        &self.sizes
    }

    /// Returns the size of the feature's buffers in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        8 * (self.values.len() + self.sizes.len()) as u64
    }

    /// Returns the sum of the row sizes. An id that several rows share counts once per row.
    pub fn total_size(&self) -> u64 {
        self.sizes.iter().map(|&size| size as u64).sum()
    }

    /// Returns a feature of copies of `rows`, stored contiguously.
    ///
    /// # Panics
    ///
    /// If a row is out of range, or the copy would have more than `i32::MAX` ids.
    pub fn gather(&self, rows: impl IntoIterator<Item = usize> + Clone) -> Self {
        let sizes: Vec<i32> = rows.clone().into_iter().map(|row| self.sizes[row]).collect();
        let total: usize = sizes.iter().map(|&size| size as usize).sum();
        assert!(
            i32::try_from(total).is_ok(),
            "feature `{}`: {total} ids are more than 32-bit offsets address",
            self.name
        );
        let mut values = Vec::with_capacity(total);
        for row in rows {
            values.extend_from_slice(self.row(row));
        }
        Self {
            name: self.shared_name(),
            values: values.into(),
            offsets: starts(&sizes).into(),
            sizes: sizes.into(),
        }
    }
}

/// Returns the offset of each row if rows of these sizes are stored contiguously.
pub(crate) fn starts(sizes: &[i32]) -> Vec<i32> {
    let starts = sizes.iter().scan(0, |end, &size| {
        *end += size;
        Some(*end - size)
    });
    starts.collect()
}

/// Features are equal if their names and rows are equal, independent of where the rows lie in the buffers.
impl PartialEq for Feature {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && self.rows() == other.rows()
            && (0..self.rows()).all(|u| self.row(u) == other.row(u))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_broken_invariant_is_named() {
        let refused = |values: Vec<i64>, offsets: Vec<i32>, sizes: Vec<i32>| {
            Feature::try_new("x", values, offsets, sizes).unwrap_err().to_string()
        };
        assert_eq!(
            refused(vec![1], vec![0], vec![2]),
            "feature `x`: row 0 has offset 0 and size 2, but there are 1 values"
        );
        assert_eq!(
            refused(vec![1], vec![-1], vec![1]),
            "feature `x`: row 0 has offset -1 and size 1, but there are 1 values"
        );
        assert_eq!(
            refused(vec![1], vec![0], vec![-1]),
            "feature `x`: row 0 has offset 0 and size -1, but there are 1 values"
        );
        assert!(refused(vec![], vec![i32::MAX], vec![i32::MAX]).contains("row 0"));
        assert_eq!(refused(vec![], vec![0], vec![]), "feature `x`: 1 offsets for 0 sizes");
        assert!(Feature::from_lengths("x", vec![1_i64, 2], [1]).is_err());
    }

    #[test]
    fn rows_may_overlap() {
        let window = Feature::try_new("w", vec![1_i64, 2, 3, 4], vec![0, 1], vec![3, 3]).unwrap();
        assert_eq!(window.row(0), [1, 2, 3]);
        assert_eq!(window.row(1), [2, 3, 4]);
        assert_eq!(window.total_size(), 6);
        assert_eq!(window.gather([1, 0]), Feature::from_rows("w", &[[2, 3, 4], [1, 2, 3]]).unwrap());
    }
}
