//! The samples of every row of a group: the inverse of the inverse index.

/// The samples of every row of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SamplesOfRows {
    /// The samples, ordered by row.
    pub(crate) order: Vec<i32>,
    /// The end of each row's samples in `order`.
    pub(crate) ends: Vec<i32>,
}

impl SamplesOfRows {
    /// Computes the samples of `rows` rows by a counting sort.
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
        // After the loop, each row's next position is its end.
        next.truncate(rows);
        Self { order, ends: next }
    }

    /// Returns the samples of a row, ascending.
    pub(crate) fn of(&self, row: usize) -> &[i32] {
        let start = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.order[start as usize..self.ends[row] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_its_samples_in_order() {
        let samples = SamplesOfRows::new(&[2, 0, 2, 2], 4);
        assert_eq!((samples.of(0), samples.of(1), samples.of(2)), (&[1][..], &[][..], &[0, 2, 3][..]));
        assert!(samples.of(3).is_empty());
    }
}
