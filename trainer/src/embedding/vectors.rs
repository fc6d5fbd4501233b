//! Vectors of a batch, in this machine's memory or in a device's.

use std::ops::Deref;

use tch::Tensor;

use crate::tensors;

/// 32-bit floats, wherever an implementation of [`Embeddings`](super::Embeddings) computes.
///
/// As a slice they can be seen where they are in this machine's memory.
#[derive(Debug)]
pub enum Vectors {
    /// In memory.
    Host(Vec<f32>),
    /// In libtorch's memory, contiguous, on any device.
    Tensor(Tensor),
}

impl From<Vec<f32>> for Vectors {
    fn from(values: Vec<f32>) -> Self {
        Self::Host(values)
    }
}

impl Deref for Vectors {
    type Target = [f32];

    /// # Panics
    ///
    /// If they are in a device's memory.
    fn deref(&self) -> &[f32] {
        match self {
            Self::Host(values) => values,
            Self::Tensor(tensor) => tensors::as_slice(tensor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_seen_as_a_slice_wherever_they_are_in_memory() {
        let values = [1.0, 2.0, 3.0];
        assert_eq!(*Vectors::from(values.to_vec()), values);
        assert_eq!(*Vectors::Tensor(tensors::from_f32(&values, &[3])), values);
    }
}
