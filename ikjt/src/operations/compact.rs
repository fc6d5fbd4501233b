//! Rows one after the other, and only those that samples use.

use super::used::{Renumbering, UsedRows};
use crate::builder::check_values;
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

impl Group {
    /// The same samples with only the rows that they use, in the order of first use and one after the other: windows
    /// become whole lists. Buffers that are so already are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`](crate::Error::Invariant) if the rows of a feature have more ids than `i32` counts.
    pub fn compact(&self) -> Result<Self> {
        let mut inverse = self.inverse().map(|_| Vec::with_capacity(self.samples()));
        let used = Renumbering::default().used_rows(self, 0..self.samples(), 0, inverse.as_mut());
        let all = matches!(&used, UsedRows::Range(rows) if *rows == (0..self.rows()));
        let features = self.features().iter().map(|feature| match &used {
            _ if all => feature.compact(),
            UsedRows::Range(rows) => feature.checked_gather(rows.clone()),
            UsedRows::Listed(rows) => feature.checked_gather(rows.iter().map(|&row| row as usize)),
        });
        let features = features.collect::<Result<_>>()?;
        let inverse = if all { self.inverse().cloned() } else { inverse.map(Into::into) };
        Ok(Self::trusted(self.shared_name(), inverse, used.len(), features))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{groups, lists};

    proptest! {
        #[test]
        fn compacting_changes_no_sample_and_leaves_nothing_over(group in groups()) {
            let compact = group.compact().unwrap();
            prop_assert_eq!(lists(&compact), lists(&group));
            prop_assert!(compact.features().iter().all(Feature::is_compact));
            let used: std::collections::BTreeSet<_> = (0..group.samples()).map(|i| group.row_of(i)).collect();
            prop_assert_eq!(compact.rows(), used.len());
            let again = compact.compact().unwrap();
            prop_assert_eq!(again.features()[0].values().as_ptr(), compact.features()[0].values().as_ptr());
            prop_assert_eq!(again, compact);
        }
    }

    #[test]
    fn compacting_what_is_compact_shares_it() {
        let feature = Feature::from_rows("x", &[[1], [2]]).unwrap();
        let group = Group::try_new("g", Some(vec![0, 1, 0].into()), vec![feature]).unwrap();
        let compact = group.compact().unwrap();
        assert_eq!(compact.features()[0].values().as_ptr(), group.features()[0].values().as_ptr());
        assert_eq!(compact.inverse().map(|i| i.as_ptr()), group.inverse().map(|i| i.as_ptr()));
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
