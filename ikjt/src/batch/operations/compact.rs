//! Rows one after the other.

use crate::batch::builder::check_values;
use crate::{Feature, Group, Result};

impl Feature {
    /// The rows one after the other in the values, without overlaps or gaps. Costs nothing where they stand so.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the rows have more ids than `i32` counts.
    pub fn compact(&self) -> Result<Self> {
        if self.is_compact() { Ok(self.clone()) } else { self.checked_gather(0..self.rows()) }
    }

    /// Whether the rows stand one after the other, and nothing beside them.
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

    /// [`gather`](Self::gather) of rows in range, if their ids can be addressed.
    fn checked_gather(&self, rows: impl IntoIterator<Item = usize> + Clone) -> Result<Self> {
        self.check_gather(rows.clone())?;
        Ok(self.gather(rows))
    }

    /// Checks that the ids of these rows can be addressed, and counts them.
    fn check_gather(&self, rows: impl IntoIterator<Item = usize>) -> Result<usize> {
        let ids = rows.into_iter().map(|row| self.sizes()[row] as u64).sum();
        check_values(format_args!("feature `{}`", self.name()), ids)
    }

    /// These rows, to be [compacted](Self::compact) later: they are copied only if that makes the ids fewer, and
    /// otherwise share ids where rows of this feature do, so that what is done to every id is done to fewer of them.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the compacted rows would have more ids than `i32` counts.
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
    /// The same rows, [compact](Feature::compact) in every feature.
    ///
    /// # Errors
    ///
    /// As [`Feature::compact`].
    pub(crate) fn compact(self) -> Result<Self> {
        let (name, inverse, rows, features) = self.into_parts();
        let features = features.iter().map(Feature::compact).collect::<Result<_>>()?;
        Ok(Self::trusted(name, inverse, rows, features))
    }

    /// [`expand`](Self::expand), to be compacted later: see [`Feature::select`].
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
        let refused = feature.checked_gather([0; 128]).unwrap_err().to_string();
        assert!(refused.starts_with("feature `x`: 2147483648 ids are more than"), "{refused}");
        let rows = Feature::try_new("x", vec![0; 1 << 24], vec![0; 128], vec![1 << 24; 128]).unwrap();
        assert!(rows.compact().is_err());
    }
}
