//! Rows one after the other.

use crate::builder::check_values;
use crate::{Feature, Result};

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
    pub(crate) fn is_compact(&self) -> bool {
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
    pub(crate) fn checked_gather(&self, rows: impl IntoIterator<Item = usize> + Clone) -> Result<Self> {
        let sizes = self.sizes();
        check_values(
            format_args!("feature `{}`", self.name()),
            rows.clone().into_iter().map(|row| sizes[row] as u64).sum(),
        )?;
        Ok(self.gather(rows))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::groups;

    proptest! {
        #[test]
        fn compacting_changes_no_row_and_leaves_nothing_over(group in groups()) {
            for feature in group.features() {
                let compact = feature.compact().unwrap();
                prop_assert!(compact.is_compact());
                prop_assert_eq!(compact.rows(), feature.rows());
                for row in 0..feature.rows() {
                    prop_assert_eq!(compact.row(row), feature.row(row));
                    prop_assert_eq!(compact.row_weights(row), feature.row_weights(row));
                }
                prop_assert_eq!(compact.compact().unwrap().values().as_ptr(), compact.values().as_ptr());
            }
        }
    }

    #[test]
    fn copies_that_cannot_be_addressed_are_refused() {
        let feature = Feature::try_new("x", vec![0; 1 << 24], None, vec![0], vec![1 << 24]).unwrap();
        let refused = feature.checked_gather([0; 128]).unwrap_err().to_string();
        assert!(refused.starts_with("feature `x`: 2147483648 ids are more than"), "{refused}");
        let rows = Feature::try_new("x", vec![0; 1 << 24], None, vec![0; 128], vec![1 << 24; 128]).unwrap();
        assert!(rows.compact().is_err());
    }
}
