//! Removal of values that no row uses, as canonical batches require.

use arrow::buffer::ScalarBuffer;

use super::concat::slice_feature;
use super::used::UsedRows;
use crate::{Feature, Group};

impl Feature {
    /// Returns the same rows without unused values. Copies values only if unused values lie between used ones.
    pub fn trim(&self) -> Self {
        slice_feature(self, &UsedRows::Range(0..self.rows()))
    }
}

impl Group {
    /// Returns the same rows without unused values.
    pub fn trim(&self) -> Self {
        let features = self.features().iter().map(Feature::trim).collect();
        Self::trusted(self.shared_name(), self.inverse().cloned(), self.rows(), features)
    }

    /// Returns a group of the given rows with the inverse index `inverse`, without the values that these rows do not
    /// use. Rows that share values keep sharing them.
    pub(crate) fn of_rows(&self, inverse: ScalarBuffer<i32>, rows: Vec<i32>) -> Self {
        let rows = UsedRows::Listed(rows);
        let features = self.features().iter().map(|feature| slice_feature(feature, &rows)).collect();
        Self::trusted(self.shared_name(), Some(inverse), rows.len(), features)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::arbitrary::groups;

    proptest! {
        #[test]
        fn trimming_changes_no_row_and_leaves_no_unused_value(group in groups()) {
            let trimmed = group.trim();
            prop_assert_eq!(&trimmed, &group);
            for feature in trimmed.features() {
                let mut used = vec![false; feature.values().len()];
                (0..feature.rows()).for_each(|row| used[feature.span(row)].fill(true));
                prop_assert!(used.into_iter().all(|used| used));
            }
        }
    }

    #[test]
    fn what_is_trimmed_is_shared() {
        let feature = Feature::try_new("x", vec![9, 1, 2, 3, 9], vec![1, 2], vec![2, 2]).unwrap();
        let trimmed = feature.trim();
        assert_eq!(trimmed.values().as_ptr(), feature.values()[1..].as_ptr());
        assert_eq!(trimmed.offsets()[..], [0, 1]);
        assert_eq!(trimmed.trim().offsets().as_ptr(), trimmed.offsets().as_ptr());
    }
}
