//! Which rows of a shard changed since its table was last stored whole.

/// A set of rows.
#[derive(Debug, Clone)]
pub(super) struct Touched {
    /// A bit per row.
    bits: Vec<u64>,
}

impl Touched {
    /// None of `rows` rows.
    pub(super) fn new(rows: u64) -> Self {
        Self { bits: vec![0; rows.div_ceil(64) as usize] }
    }

    /// Takes all rows out.
    pub(super) fn clear(&mut self) {
        self.bits.fill(0);
    }

    /// Adds rows.
    pub(super) fn add(&mut self, rows: impl IntoIterator<Item = u32>) {
        for row in rows {
            self.bits[row as usize / 64] |= 1 << (row % 64);
        }
    }

    /// The rows, ascending.
    pub(super) fn rows(&self) -> Vec<u32> {
        let rows = self.bits.iter().enumerate().flat_map(|(i, word)| {
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
            let mut touched = Touched::new(300);
            touched.add(rows.iter().copied());
            let expected: Vec<u32> = rows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
            prop_assert_eq!(touched.rows(), expected);
            touched.clear();
            prop_assert_eq!(touched.rows(), Vec::<u32>::new());
        }
    }
}
