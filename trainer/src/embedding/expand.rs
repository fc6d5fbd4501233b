//! Rows to samples and back, where that is not left to the interaction.

use rayon::prelude::*;

/// Rows of `size` values by sample.
pub(super) fn expand(rows: &[f32], size: usize, inverse: &[i32]) -> Vec<f32> {
    let mut samples = vec![0.0; inverse.len() * size];
    samples.par_chunks_mut(size.max(1)).zip(inverse).with_min_len(16).for_each(|(sample, &row)| {
        sample.copy_from_slice(&rows[row as usize * size..][..size]);
    });
    samples
}

/// The sum of every row's samples, in their order.
pub(super) fn fold(samples: &[f32], size: usize, inverse: &[i32], rows: usize) -> Vec<f32> {
    // Samples by row: a counting sort.
    let mut ends = vec![0_usize; rows + 1];
    inverse.iter().for_each(|&row| ends[row as usize + 1] += 1);
    for row in 0..rows {
        ends[row + 1] += ends[row];
    }
    let mut next = ends.clone();
    let mut order = vec![0_usize; inverse.len()];
    for (sample, &row) in inverse.iter().enumerate() {
        order[next[row as usize]] = sample;
        next[row as usize] += 1;
    }
    let mut folded = vec![0.0; rows * size];
    folded.par_chunks_mut(size.max(1)).enumerate().with_min_len(16).for_each(|(row, total)| {
        for &sample in &order[ends[row]..ends[row + 1]] {
            let values = &samples[sample * size..][..size];
            total.iter_mut().zip(values).for_each(|(total, value)| *total += value);
        }
    });
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_sums_what_expansion_copied() {
        let inverse = [2, 0, 2, 2];
        let rows = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        assert_eq!(expand(&rows, 2, &inverse), [100.0, 200.0, 1.0, 2.0, 100.0, 200.0, 100.0, 200.0]);
        let samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        assert_eq!(fold(&samples, 2, &inverse, 3), [3.0, 4.0, 0.0, 0.0, 13.0, 16.0]);
    }
}
