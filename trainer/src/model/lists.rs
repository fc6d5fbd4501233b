//! Lists of vectors in the form that libtorch's operators read, on any device.

use tch::{Device, Tensor};

/// The modes of libtorch's `embedding_bag`.
const SUM: i64 = 0;
const MEAN: i64 = 1;

/// Lists over a timeline `[T, D]`: list `i` contains `sizes[i]` elements from `offsets[i]` on. Lists may overlap or
/// be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Lists {
    /// The first element of each list, `[N]`.
    pub(super) offsets: Vec<i64>,
    /// The number of elements of each list, `[N]`.
    pub(super) sizes: Vec<i64>,
}

impl Lists {
    /// Adds lists, with `shift` added to their offsets.
    pub(super) fn extend(&mut self, lists: impl IntoIterator<Item = (i32, i32)>, shift: usize) {
        for (offset, size) in lists {
            self.offsets.push(i64::from(offset) + shift as i64);
            self.sizes.push(i64::from(size));
        }
    }

    /// Returns the element at every position of every list, `[P]`, list after list.
    pub(super) fn elements(&self) -> Vec<i64> {
        self.offsets.iter().zip(&self.sizes).flat_map(|(&offset, &size)| offset..offset + size).collect()
    }

    /// Returns the first position of every list, `[N]`.
    pub(super) fn starts(&self) -> Vec<i64> {
        let start = |next: &mut i64, size: &i64| {
            let start = *next;
            *next += size;
            Some(start)
        };
        self.sizes.iter().scan(0, start).collect()
    }

    /// Returns the lists ordered by size, and the new index of each list, `[N]`.
    pub(super) fn by_size(&self) -> (Self, Vec<i64>) {
        let mut order: Vec<usize> = (0..self.sizes.len()).collect();
        order.sort_by_key(|&list| self.sizes[list]);
        let mut places = vec![0; order.len()];
        for (place, &list) in order.iter().enumerate() {
            places[list] = place as i64;
        }
        let sorted = |values: &[i64]| order.iter().map(|&list| values[list]).collect();
        (Self { offsets: sorted(&self.offsets), sizes: sorted(&self.sizes) }, places)
    }
}

/// Creates a tensor of indices.
pub(super) fn indices(values: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(values).to_device(device)
}

/// Returns rows of `values` by index; indices may repeat. The gradient is summed in the order of the indices, by
/// several threads (unlike that of `index_select`).
pub(super) fn gather(values: &Tensor, indices: &Tensor) -> Tensor {
    Tensor::embedding(values, indices, -1, false, false)
}

/// Computes the mean of every list's positions, `[N, D]` from `[P, D]`; zero for an empty list. `starts` is the
/// result of [`Lists::starts`].
pub(super) fn mean(positions: &Tensor, starts: &Tensor) -> Tensor {
    let all = Tensor::arange(positions.size()[0], (tch::Kind::Int64, positions.device()));
    Tensor::embedding_bag::<Tensor>(positions, &all, starts, false, MEAN, false, None, false).0
}

/// Computes the weighted sum of every list's elements, `[N, D]` from `[T, D]`; zero for an empty list. `weights`
/// and `elements` are `[P]`.
pub(super) fn weighted_sum(vectors: &Tensor, elements: &Tensor, starts: &Tensor, weights: &Tensor) -> Tensor {
    Tensor::embedding_bag(vectors, elements, starts, false, SUM, false, Some(weights), false).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_may_overlap_and_be_empty() {
        let mut lists = Lists::default();
        lists.extend([(0, 3), (1, 3), (4, 0)], 10);
        lists.extend([(0, 1)], 0);
        assert_eq!(lists.elements(), [10, 11, 12, 11, 12, 13, 0]);
        assert_eq!(lists.starts(), [0, 3, 6, 6]);
        let (sorted, places) = lists.by_size();
        assert_eq!((sorted.sizes, places), (vec![0, 1, 3, 3], vec![2, 3, 0, 1]));
        assert_eq!(sorted.offsets, [14, 0, 10, 11]);
    }

    #[test]
    fn sums_and_means_by_list() {
        let lists = Lists { offsets: vec![0, 1, 0], sizes: vec![2, 2, 0] };
        let vectors = Tensor::from_slice(&[1.0_f32, 10.0, 100.0]).reshape([3, 1]);
        let (elements, starts) =
            (indices(&lists.elements(), Device::Cpu), indices(&lists.starts(), Device::Cpu));
        let numbers = |tensor: Tensor| Vec::<f32>::try_from(tensor.reshape([-1])).unwrap();
        let positions = gather(&vectors, &elements);
        assert_eq!(numbers(mean(&positions, &starts)), [5.5, 55.0, 0.0]);
        let weights = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0]);
        assert_eq!(numbers(weighted_sum(&vectors, &elements, &starts, &weights)), [21.0, 430.0, 0.0]);
    }
}
