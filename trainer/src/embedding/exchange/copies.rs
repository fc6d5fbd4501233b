//! The gradients of replicated tables, of which every rank has a copy.
//!
//! ```text
//! sums over a rank's batch ═▶ reducers: row r on rank r mod W ─▶ sums over ranks ═▶ all ranks
//! ```
//!
//! These are the two halves of an all-reduce, a reduce-scatter and an all-gather (Rabenseifner 2004), applied to
//! the rows that any rank looks up. If every rank looks up D rows and all ranks together look up U distinct rows, a
//! rank sends D vectors and receives U vectors. The rows are known from the requests, in which every rank sends its
//! rows to all others.

use std::ops::Range;

use rayon::prelude::*;

use crate::embedding::usage::set_bits;

/// Returns the rank that sums the gradients of a row.
pub(super) fn reducer(row: u32, ranks: usize) -> usize {
    row as usize % ranks
}

/// Returns the rows among `rows` whose gradients `rank` sums.
pub(super) fn reduced_by(rank: usize, rows: &[u32], ranks: usize) -> impl Iterator<Item = &u32> {
    rows.iter().filter(move |row| reducer(**row, ranks) == rank)
}

/// The rows of one replicated table that any rank looks up in a step.
#[derive(Debug)]
pub(super) struct CopiedRows {
    /// The index of this rank's copy.
    pub(super) shard: usize,
    /// The number of values per row.
    pub(super) width: usize,
    /// For each reducer, the rows whose gradients it sums, ascending.
    pub(super) rows: Vec<Vec<u32>>,
    /// For each rank, the rows whose gradients it sends to this rank, as indices into this rank's `rows`,
    /// ascending.
    pub(super) arriving: Vec<Vec<u32>>,
}

impl CopiedRows {
    /// Computes the rows from the view of `rank`, for a table of `table_rows` rows. The rows of each rank in
    /// `of_ranks` are ascending.
    pub(super) fn new(
        (shard, width): (usize, usize),
        table_rows: u64,
        of_ranks: &[&[u32]],
        rank: usize,
    ) -> Self {
        let mut bits = vec![0_u64; table_rows.div_ceil(64) as usize];
        of_ranks.iter().copied().flatten().for_each(|row| bits[*row as usize / 64] |= 1 << (row % 64));
        let mut rows = vec![Vec::new(); of_ranks.len()];
        for row in set_bits(&bits, 64) {
            rows[reducer(row, of_ranks.len())].push(row);
        }
        let arriving = of_ranks.iter().map(|of_rank| {
            let mut next = 0;
            let own = reduced_by(rank, of_rank, of_ranks.len()).map(|row| {
                while rows[rank][next] != *row {
                    next += 1;
                }
                next as u32
            });
            own.collect()
        });
        Self { shard, width, arriving: arriving.collect(), rows }
    }

    /// Adds the gradients that ranks sent, `[rows, width]` from each rank, to `sums`, which contains zeros, in the
    /// order of ranks.
    pub(super) fn sum(&self, gradients: &[&[f32]], sums: &mut [f32]) {
        const ROWS: usize = 256;
        let pieces = sums.par_chunks_mut(ROWS * self.width).enumerate();
        pieces.for_each(|(number, piece)| {
            let own = (number * ROWS) as u32..((number + 1) * ROWS) as u32;
            for (places, gradients) in self.arriving.iter().zip(gradients) {
                let Range { start, end } = places.partition_point(|place| *place < own.start)
                    ..places.partition_point(|place| *place < own.end);
                let gradients = gradients[start * self.width..].chunks_exact(self.width);
                for (place, gradient) in places[start..end].iter().zip(gradients) {
                    let sum = &mut piece[(place - own.start) as usize * self.width..][..self.width];
                    sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
                }
            }
        });
    }
}

/// Appends ascending rows of a table of `table_rows` rows to a message: their number, then the rows, or one bit per
/// table row if that takes fewer words.
pub(super) fn encode_rows(rows: &[u32], table_rows: u64, words: &mut Vec<i32>) {
    words.push(rows.len() as i32);
    let Some(length) = bit_words(rows.len(), table_rows) else {
        return words.extend(rows.iter().map(|row| *row as i32));
    };
    let first = words.len();
    words.resize(first + length, 0);
    rows.iter().for_each(|row| words[first + *row as usize / 32] |= 1 << (row % 32));
}

/// Returns the number of words of one bit per table row, or `None` if a list of `rows` rows does not take more
/// words.
fn bit_words(rows: usize, table_rows: u64) -> Option<usize> {
    let words = table_rows.div_ceil(32) as usize;
    (words < rows).then_some(words)
}

/// Reads the result of [`encode_rows`] from the front of `words`. Returns `None` if it is malformed.
pub(super) fn decode_rows(table_rows: u64, words: &mut &[i32]) -> Option<Vec<u32>> {
    let (count, rest) = words.split_first()?;
    let count = usize::try_from(*count).ok()?;
    let bits = bit_words(count, table_rows);
    let (own, rest) = rest.split_at_checked(bits.unwrap_or(count))?;
    *words = rest;
    let rows: Vec<u32> = match bits {
        Some(_) => {
            let words: Vec<u64> = own.iter().map(|word| u64::from(*word as u32)).collect();
            set_bits(&words, 32).collect()
        }
        None => own.iter().map(|word| *word as u32).collect(),
    };
    // As unsigned numbers, negative numbers are larger than all rows.
    let fit = rows.last().is_none_or(|last| u64::from(*last) < table_rows) && rows.is_sorted_by(|a, b| a < b);
    (fit && rows.len() == count).then_some(rows)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_arrive_as_they_were_sent(
            rows in prop::collection::btree_set(0_u32..200, 0..60),
            more in 0_u64..9000,
            rest in prop::collection::vec(any::<i32>(), 0..3),
        ) {
            let rows: Vec<u32> = rows.into_iter().collect();
            let table_rows = 200 + more;
            let mut words = Vec::new();
            encode_rows(&rows, table_rows, &mut words);
            prop_assert!(words.len() as u64 <= 1 + table_rows.div_ceil(32).min(rows.len() as u64));
            words.extend(&rest);
            let mut left = words.as_slice();
            prop_assert_eq!(decode_rows(table_rows, &mut left), Some(rows));
            prop_assert_eq!(left, rest.as_slice());
        }

        #[test]
        fn malformed_rows_are_refused(words in prop::collection::vec(-2_i32..40, 0..12), table_rows in 1_u64..70) {
            let mut left = words.as_slice();
            if let Some(rows) = decode_rows(table_rows, &mut left) {
                prop_assert_eq!(rows.len() as i32, words[0]);
                prop_assert!(rows.iter().all(|row| u64::from(*row) < table_rows));
                prop_assert!(rows.is_sorted_by(|a, b| a < b));
            }
        }

        /// The sums of all ranks together are the sums of all gradients.
        #[test]
        fn every_row_of_any_rank_is_summed_once(
            of_ranks in prop::collection::vec(prop::collection::btree_set(0_u32..900, 0..400), 1..5),
        ) {
            let ranks = of_ranks.len();
            let of_ranks: Vec<Vec<u32>> = of_ranks.into_iter().map(|rows| rows.into_iter().collect()).collect();
            let slices: Vec<&[u32]> = of_ranks.iter().map(Vec::as_slice).collect();
            let gradient = |rank: usize, row: u32| [(rank + 1) as f32 * row as f32, 1.0];
            let mut expected: BTreeMap<u32, [f32; 2]> = BTreeMap::new();
            for (rank, rows) in of_ranks.iter().enumerate() {
                for row in rows {
                    let sum = expected.entry(*row).or_default();
                    let [first, second] = gradient(rank, *row);
                    *sum = [sum[0] + first, sum[1] + second];
                }
            }
            let mut found = BTreeMap::new();
            for rank in 0..ranks {
                let copied = CopiedRows::new((0, 2), 900, &slices, rank);
                let sent = |(from, rows): (usize, &Vec<u32>)| -> Vec<f32> {
                    let own = rows.iter().filter(|row| reducer(**row, ranks) == rank);
                    own.flat_map(|row| gradient(from, *row)).collect()
                };
                let sent: Vec<Vec<f32>> = of_ranks.iter().enumerate().map(sent).collect();
                let sent: Vec<&[f32]> = sent.iter().map(Vec::as_slice).collect();
                let mut sums = vec![0.0; 2 * copied.rows[rank].len()];
                copied.sum(&sent, &mut sums);
                let sums = copied.rows[rank].iter().zip(sums.as_chunks::<2>().0);
                found.extend(sums.map(|(row, sum)| (*row, *sum)));
                let all: BTreeSet<u32> = copied.rows.iter().flatten().copied().collect();
                prop_assert!(all.iter().eq(expected.keys()));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
