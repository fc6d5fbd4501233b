//! Rows to samples and back, where that is not left to the interaction.

use rayon::prelude::*;

/// Rows of `size` values by sample.
pub(super) fn expand(rows: &[f32], size: usize, inverse: &[i32], samples: &mut [f32]) {
    samples.par_chunks_mut(size.max(1)).zip(inverse).with_min_len(16).for_each(|(sample, &row)| {
        sample.copy_from_slice(&rows[row as usize * size..][..size]);
    });
}

/// Adds every row's samples to it, in their order.
pub(super) fn fold(samples: &[f32], size: usize, inverse: &[i32], folded: &mut [f32]) {
    let rows = folded.len().checked_div(size).unwrap_or(0);
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
    folded.par_chunks_mut(size.max(1)).enumerate().with_min_len(16).for_each(|(row, total)| {
        for &sample in &order[ends[row]..ends[row + 1]] {
            let values = &samples[sample * size..][..size];
            total.iter_mut().zip(values).for_each(|(total, value)| *total += value);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_sums_what_expansion_copied() {
        let inverse = [2, 0, 2, 2];
        let rows = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0];
        let mut expanded = [0.0; 8];
        expand(&rows, 2, &inverse, &mut expanded);
        assert_eq!(expanded, [100.0, 200.0, 1.0, 2.0, 100.0, 200.0, 100.0, 200.0]);
        let samples = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let mut folded = [0.0; 6];
        fold(&samples, 2, &inverse, &mut folded);
        assert_eq!(folded, [3.0, 4.0, 0.0, 0.0, 13.0, 16.0]);
    }
}
