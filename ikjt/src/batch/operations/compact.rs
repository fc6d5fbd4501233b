//! Compaction: rows stored contiguously.

use crate::batch::builder::check_values;
use crate::batch::{Feature, Group};
use crate::error::Result;

impl Feature {
    /// Returns the feature with its rows stored contiguously, without overlaps or gaps. Copies nothing if they
    /// already are.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the rows have more than `i32::MAX` ids in total.
    pub fn compact(&self) -> Result<Self> {
        if self.is_compact() {
            return Ok(self.clone());
        }
        self.check_gather(0..self.rows())?;
        Ok(self.gather(0..self.rows()))
    }

    /// Returns whether the rows are contiguous and cover all values.
    fn is_compact(&self) -> bool {
        let mut end = 0;
        let one_after_the_other = (0..self.rows()).all(|row| {
            let span = self.span(row);
            let follows = span.start == end;
            end = span.end;
            follows
        });
        one_after_the_other && end == self.values().len()
    }

    /// Counts the ids of these rows, and checks that 32-bit offsets can address them.
    fn check_gather(&self, rows: impl IntoIterator<Item = usize>) -> Result<usize> {
        let ids = rows.into_iter().map(|row| self.sizes()[row] as u64).sum();
        check_values(format_args!("feature `{}`", self.name()), ids)
    }

    /// Selects rows without [compacting](Self::compact) them. The ids are copied only if the copies are fewer than
    /// the current values. Otherwise the rows keep sharing ids, so that an operation on every id has fewer ids to
    /// process.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the compacted rows would have more than `i32::MAX` ids.
    pub(crate) fn select(&self, rows: impl IntoIterator<Item = usize> + Clone) -> Result<Self> {
        if self.check_gather(rows.clone())? < self.values().len() {
            return Ok(self.gather(rows));
        }
        let of_rows = |column: &[i32]| rows.clone().into_iter().map(|row| column[row]).collect();
        let (offsets, sizes) = (of_rows(self.offsets()), of_rows(self.sizes()));
        Ok(Self::trusted(self.shared_name(), self.values().clone(), offsets, sizes))
    }
}

impl Group {
    /// Returns the same rows, [compacted](Feature::compact) in every feature.
    ///
    /// # Errors
    ///
    /// See [`Feature::compact`].
    pub(crate) fn compact(self) -> Result<Self> {
        let (name, inverse, rows, features) = self.into_parts();
        let features = features.iter().map(Feature::compact).collect::<Result<_>>()?;
        Ok(Self::trusted(name, inverse, rows, features))
    }

    /// Does the same as [`expand`](Self::expand), but defers the compaction; see [`Feature::select`].
    pub(crate) fn expand_shared(&self) -> Result<Self> {
        let rows = (0..self.samples()).map(|sample| self.row_of(sample));
        let features = self.features().iter().map(|feature| feature.select(rows.clone()));
        Ok(Self::trusted(self.shared_name(), None, self.samples(), features.collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::groups;

    proptest! {
        #[test]
        fn compacting_changes_no_row_and_leaves_nothing_over(group in groups()) {
            for feature in group.features() {
                let compact = feature.compact().unwrap();
                prop_assert!(compact.is_compact());
                prop_assert_eq!(compact.rows(), feature.rows());
                for row in 0..feature.rows() {
                    prop_assert_eq!(compact.row(row), feature.row(row));
                }
                prop_assert_eq!(compact.compact().unwrap().values().as_ptr(), compact.values().as_ptr());
            }
        }

        #[test]
        fn an_expansion_that_shares_ids_is_the_expansion(group in groups()) {
            let shared = group.expand_shared().unwrap();
            prop_assert_eq!(&shared, &group.expand());
            for (feature, given) in shared.features().iter().zip(group.features()) {
                prop_assert!(feature.values().len() <= given.values().len());
            }
            for feature in shared.compact().unwrap().features() {
                prop_assert!(feature.is_compact());
            }
        }
    }

    #[test]
    fn copies_that_cannot_be_addressed_are_refused() {
        let feature = Feature::try_new("x", vec![0; 1 << 24], vec![0], vec![1 << 24]).unwrap();
        let refused = feature.select([0; 128]).unwrap_err().to_string();
        assert!(refused.starts_with("feature `x`: 2147483648 ids are more than"), "{refused}");
        let rows = Feature::try_new("x", vec![0; 1 << 24], vec![0; 128], vec![1 << 24; 128]).unwrap();
        assert!(rows.compact().is_err());
    }
}
