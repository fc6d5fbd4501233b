//! Features that share one inverse index.

use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use crate::batch::Feature;
use crate::error::{Error, Result};

/// Sparse features that are deduplicated together: an IKJT, or a plain KJT if there is no inverse index.
///
/// Sample `i` has row `inverse[i]` of every feature, or row `i` if the inverse index is `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    name: Arc<str>,
    inverse: Option<ScalarBuffer<i32>>,
    rows: usize,
    features: Vec<Feature>,
}

impl Group {
    /// Creates a group of these features.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there is no feature, the features differ in their number of rows, or an entry of
    /// `inverse` is not a valid row number.
    pub fn try_new(
        name: impl Into<Arc<str>>,
        inverse: Option<ScalarBuffer<i32>>,
        features: Vec<Feature>,
    ) -> Result<Self> {
        let name = name.into();
        let wrong = |message: String| Error::invariant(format!("group `{name}`"), message);
        let rows = features.first().ok_or_else(|| wrong("it has no features".to_owned()))?.rows();
        for feature in &features {
            if feature.rows() != rows {
                let (first, other) = (features[0].name(), feature.name());
                return Err(wrong(format!(
                    "feature `{first}` has {rows} rows, `{other}` has {}",
                    feature.rows()
                )));
            }
        }
        for (sample, &row) in inverse.iter().flat_map(|inverse| inverse.iter()).enumerate() {
            if usize::try_from(row).ok().is_none_or(|row| row >= rows) {
                return Err(wrong(format!("the inverse index leads sample {sample} to row {row} of {rows}")));
            }
        }
        Ok(Self { name, inverse, rows, features })
    }

    /// Creates a group from parts whose invariants the caller guarantees. Only unit tests check them.
    pub(crate) fn trusted(
        name: Arc<str>,
        inverse: Option<ScalarBuffer<i32>>,
        rows: usize,
        features: Vec<Feature>,
    ) -> Self {
        let group = Self { name, inverse, rows, features };
        #[cfg(test)]
        assert_eq!(
            group,
            Self::try_new(group.shared_name(), group.inverse.clone(), group.features.clone()).unwrap()
        );
        group
    }

    /// Returns the name, inverse index, number of rows and features.
    pub(crate) fn into_parts(self) -> (Arc<str>, Option<ScalarBuffer<i32>>, usize, Vec<Feature>) {
        (self.name, self.inverse, self.rows, self.features)
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name as a shared pointer.
    pub(crate) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    /// Returns the inverse index, one row number per sample, or `None` if sample `i` has row `i`.
    pub fn inverse(&self) -> Option<&ScalarBuffer<i32>> {
        self.inverse.as_ref()
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> usize {
        self.inverse.as_ref().map_or(self.rows, |inverse| inverse.len())
    }

    /// Returns the row of sample `sample`.
    ///
    /// # Panics
    ///
    /// If there is no such sample.
    pub fn row_of(&self, sample: usize) -> usize {
        match &self.inverse {
            None => sample,
            Some(inverse) => inverse[sample] as usize,
        }
    }

    /// Returns the features, in the schema's order.
    pub fn features(&self) -> &[Feature] {
        &self.features
    }

    /// Returns the total number of ids over all samples, as if every sample stored its own lists.
    pub fn sample_values(&self) -> u64 {
        self.features.iter().map(|feature| self.sample_values_of(feature)).sum()
    }

    /// Returns the total number of ids over all samples for `feature`, which must belong to this group.
    pub(crate) fn sample_values_of(&self, feature: &Feature) -> u64 {
        match &self.inverse {
            None => feature.total_size(),
            Some(inverse) => inverse.iter().map(|&row| feature.sizes()[row as usize] as u64).sum(),
        }
    }

    /// Returns the total number of ids over all rows.
    pub fn row_values(&self) -> u64 {
        self.features.iter().map(Feature::total_size).sum()
    }

    /// Returns the size of the group's buffers in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let inverse = self.inverse.as_ref().map_or(0, |inverse| inverse.len());
        4 * inverse as u64 + self.features.iter().map(Feature::bytes).sum::<u64>()
    }

    /// Returns the group as a plain KJT, in which every sample has its own copy of its lists.
    pub fn expand(&self) -> Self {
        let samples = (0..self.samples()).map(|sample| self.row_of(sample));
        let features = self.features.iter().map(|feature| feature.gather(samples.clone())).collect();
        Self { name: Arc::clone(&self.name), inverse: None, rows: self.samples(), features }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feature(name: &str, rows: &[&[i64]]) -> Feature {
        Feature::from_rows(name, rows).unwrap()
    }

    #[test]
    fn every_broken_invariant_is_named() {
        let refused = |inverse: Option<Vec<i32>>, features| {
            Group::try_new("g", inverse.map(Into::into), features).unwrap_err().to_string()
        };
        assert_eq!(refused(None, vec![]), "group `g`: it has no features");
        let uneven = vec![feature("a", &[&[1]]), feature("b", &[&[1], &[2]])];
        assert_eq!(refused(None, uneven), "group `g`: feature `a` has 1 rows, `b` has 2");
        let one = vec![feature("a", &[&[1]])];
        assert_eq!(
            refused(Some(vec![0, 1]), one.clone()),
            "group `g`: the inverse index leads sample 1 to row 1 of 1"
        );
        assert_eq!(
            refused(Some(vec![-1]), one),
            "group `g`: the inverse index leads sample 0 to row -1 of 1"
        );
    }

    #[test]
    fn expansion_copies_rows_to_samples() {
        let group =
            Group::try_new("g", Some(vec![1, 0, 1].into()), vec![feature("a", &[&[1], &[2, 3]])]).unwrap();
        assert_eq!((group.samples(), group.rows()), (3, 2));
        assert_eq!((group.sample_values(), group.row_values()), (5, 3));
        assert_eq!(group.expand().features()[0], feature("a", &[&[2, 3], &[1], &[2, 3]]));
    }
}
