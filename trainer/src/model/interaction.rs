//! The dot interaction.

use tch::{Device, Kind, Tensor};

/// Dot products of all pairs of vectors.
#[derive(Debug)]
pub(super) struct DotInteraction {
    vectors: i64,
    /// Places of the strict lower triangle in the flattened `[N, N]` matrix.
    pairs: Tensor,
}

impl DotInteraction {
    pub(super) fn new(vectors: i64) -> Self {
        let triangle = Tensor::tril_indices(vectors, vectors, -1, (Kind::Int64, Device::Cpu));
        let pairs = triangle.select(0, 0) * vectors + triangle.select(0, 1);
        Self { vectors, pairs }
    }

    /// The number of pairs.
    pub(super) fn width(&self) -> i64 {
        self.vectors * (self.vectors - 1) / 2
    }

    /// `[B, N, D]` to `[B, N (N - 1) / 2]`.
    pub(super) fn forward(&self, vectors: &Tensor) -> Tensor {
        let products = vectors.bmm(&vectors.transpose(1, 2));
        products.flatten(1, 2).index_select(1, &self.pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_stand_in_row_order() {
        let vectors = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]).reshape([1, 3, 2]);
        let products = DotInteraction::new(3).forward(&vectors);
        // 1·0, 2·0, 2·1
        assert_eq!(Vec::<f32>::try_from(products.reshape([-1])).unwrap(), [11.0, 17.0, 39.0]);
    }
}
