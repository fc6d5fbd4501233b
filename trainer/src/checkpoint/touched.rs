//! Which rows of the tables changed since the tables were last stored whole.

use crate::embedding::Lookup;

/// A set of rows for every table.
#[derive(Debug, Clone)]
pub(crate) struct Touched {
    /// A bit per row.
    tables: Vec<Vec<u64>>,
}

impl Touched {
    /// No rows of tables of so many rows each.
    pub(crate) fn new(rows: impl IntoIterator<Item = u64>) -> Self {
        Self { tables: rows.into_iter().map(|rows| vec![0; rows.div_ceil(64) as usize]).collect() }
    }

    /// Takes all rows out.
    pub(crate) fn clear(&mut self) {
        self.tables.iter_mut().for_each(|bits| bits.fill(0));
    }

    /// Adds the rows that a batch looked up: others have no gradient, and no optimizer changes them.
    pub(crate) fn add_lookups(&mut self, lookups: &[Lookup]) {
        for (table, rows) in lookups.iter().flat_map(Lookup::rows_by_table) {
            self.add(table, rows);
        }
    }

    /// Adds rows of one table.
    pub(crate) fn add(&mut self, table: usize, rows: &[u32]) {
        let bits = &mut self.tables[table];
        for &row in rows {
            bits[row as usize / 64] |= 1 << (row % 64);
        }
    }

    /// The rows of one table, ascending.
    pub(crate) fn rows(&self, table: usize) -> Vec<u32> {
        let words = self.tables[table].iter().enumerate();
        let rows = words.flat_map(|(i, word)| {
            let mut word = *word;
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros())?;
                word &= word - 1;
                Some(i as u32 * 64 + bit)
            })
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(rows in prop::collection::vec(0_u32..300, 0..200)) {
            let mut touched = Touched::new([10, 300]);
            touched.add(1, &rows);
            let expected: Vec<u32> = rows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
            prop_assert_eq!(touched.rows(1), expected);
            prop_assert_eq!(touched.rows(0), Vec::<u32>::new());
            touched.clear();
            prop_assert_eq!(touched.rows(1), Vec::<u32>::new());
        }
    }
}
