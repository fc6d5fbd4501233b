//! Rows to samples and back, where that is not left to the interaction.

use rayon::prelude::*;

/// The samples of every row of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SamplesOfRows {
    /// Samples by row.
    pub(crate) order: Vec<i32>,
    /// Where those of each row end.
    pub(crate) ends: Vec<i32>,
}

impl SamplesOfRows {
    /// Those of `rows` rows, by a counting sort.
    pub(crate) fn new(inverse: &[i32], rows: usize) -> Self {
        let mut next = vec![0_i32; rows + 1];
        inverse.iter().for_each(|&row| next[row as usize + 1] += 1);
        for row in 0..rows {
            next[row + 1] += next[row];
        }
        let mut order = vec![0; inverse.len()];
        for (sample, &row) in inverse.iter().enumerate() {
            let place = &mut next[row as usize];
            order[*place as usize] = sample as i32;
            *place += 1;
        }
        // Each row's next place is where it ends.
        next.truncate(rows);
        Self { order, ends: next }
    }

    /// Those of a row, in their order.
    pub(crate) fn of(&self, row: usize) -> &[i32] {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.order[start as usize..self.ends[row] as usize]
    }
}

/// Rows of `size` values by sample.
pub(super) fn expand(rows: &[f32], size: usize, inverse: &[i32], samples: &mut [f32]) {
    samples.par_chunks_mut(size.max(1)).zip(inverse).with_min_len(16).for_each(|(sample, &row)| {
        sample.copy_from_slice(&rows[row as usize * size..][..size]);
    });
}

/// Adds every row's samples to it, in their order.
pub(super) fn fold(samples: &[f32], size: usize, inverse: &[i32], folded: &mut [f32]) {
    let of_rows = SamplesOfRows::new(inverse, folded.len().checked_div(size).unwrap_or(0));
    folded.par_chunks_mut(size.max(1)).enumerate().with_min_len(16).for_each(|(row, total)| {
        for &sample in of_rows.of(row) {
            let values = &samples[sample as usize * size..][..size];
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
