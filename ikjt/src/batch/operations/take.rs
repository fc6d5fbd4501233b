//! Selection of samples of a batch.

use arrow::array::UInt32Array;
use arrow::buffer::ScalarBuffer;
use arrow::datatypes::ArrowNativeType;

use crate::batch::{Batch, BatchParts, Group, KeptValues};

impl Batch {
    /// Returns the given samples, in the given order. Each group with an inverse index keeps all its rows, including
    /// rows that no sample uses any more; [`slice`](Self::slice) drops them.
    ///
    /// # Panics
    ///
    /// If there is no such sample.
    pub fn take(&self, samples: &[u32]) -> Self {
        Self::trusted(BatchParts {
            size: samples.len(),
            dense: take_rows(self.dense(), samples, self.dense_width()),
            labels: take_rows(self.labels(), samples, self.label_width()),
            weights: self.weights().map(|weights| take_rows(weights, samples, 1)),
            timestamps: self.timestamps().map(|timestamps| take_rows(timestamps, samples, 1)),
            kept: self.take_kept(samples),
            groups: self.groups().iter().map(|group| group.take(samples)).collect(),
        })
    }

    fn take_kept(&self, samples: &[u32]) -> Vec<KeptValues> {
        if self.kept().is_empty() {
            return Vec::new();
        }
        let samples = UInt32Array::from(samples.to_vec());
        self.kept().iter().map(|column| column.take(&samples)).collect()
    }
}

impl Group {
    fn take(&self, samples: &[u32]) -> Self {
        match self.inverse() {
            Some(inverse) => {
                let inverse = take_rows(inverse, samples, 1);
                Self::trusted(self.shared_name(), Some(inverse), self.rows(), self.features().to_vec())
            }
            None => {
                let rows = samples.iter().map(|sample| *sample as usize);
                let features = self.features().iter().map(|feature| feature.gather(rows.clone())).collect();
                Self::trusted(self.shared_name(), None, samples.len(), features)
            }
        }
    }
}

/// Copies rows of a `[B, width]` matrix.
fn take_rows<T: ArrowNativeType>(matrix: &ScalarBuffer<T>, rows: &[u32], width: usize) -> ScalarBuffer<T> {
    rows.iter().flat_map(|row| &matrix[*row as usize * width..][..width]).copied().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::batch::arbitrary::{batches, samples};

    proptest! {
        #[test]
        fn the_result_has_the_requested_samples(batch in batches(), chosen in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
            prop_assume!(batch.size() > 0);
            let chosen: Vec<u32> = chosen.iter().map(|index| index.index(batch.size()) as u32).collect();
            let all = samples(&batch);
            let expected: Vec<_> = chosen.iter().map(|sample| all[*sample as usize].clone()).collect();
            prop_assert_eq!(samples(&batch.take(&chosen)), expected);
        }
    }
}
