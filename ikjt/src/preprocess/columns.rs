//! The dense features of a batch. Features that steps read or change are stored as columns.

use arrow::buffer::ScalarBuffer;

/// Dense features: the row-major input matrix, and columns for the features that steps changed or added.
#[derive(Debug)]
pub(super) struct DenseColumns {
    matrix: ScalarBuffer<f32>,
    width: usize,
    /// The column of each feature; `None` if the feature is unchanged.
    columns: Vec<Option<Vec<f32>>>,
}

impl DenseColumns {
    /// Creates the columns of `matrix`, which is `[B, width]` row-major.
    pub(super) fn new(matrix: ScalarBuffer<f32>, width: usize) -> Self {
        Self { matrix, width, columns: vec![None; width] }
    }

    /// Returns a copy of a feature, one value for each of `samples` samples.
    pub(super) fn copy(&self, feature: usize, samples: usize) -> Vec<f32> {
        match &self.columns[feature] {
            Some(column) => column.clone(),
            None => (0..samples).map(|sample| self.matrix[sample * self.width + feature]).collect(),
        }
    }

    /// Replaces a feature, or appends it if `feature` is the number of features.
    pub(super) fn set(&mut self, feature: usize, column: Vec<f32>) {
        if feature == self.columns.len() {
            self.columns.push(None);
        }
        self.columns[feature] = Some(column);
    }

    /// Returns the `[size, D]` matrix, row-major.
    pub(super) fn into_matrix(self, size: usize) -> ScalarBuffer<f32> {
        if self.columns.iter().all(Option::is_none) {
            return self.matrix;
        }
        let mut matrix = Vec::with_capacity(size * self.columns.len());
        for row in 0..size {
            matrix.extend_from_slice(&self.matrix[row * self.width..][..self.width]);
            let first = matrix.len() - self.width;
            matrix.resize(first + self.columns.len(), 0.0);
            for (cell, column) in matrix[first..].iter_mut().zip(&self.columns) {
                if let Some(column) = column {
                    *cell = column[row];
                }
            }
        }
        matrix.into()
    }
}
