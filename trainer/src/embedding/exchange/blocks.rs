//! The encoding of a request from one rank to another: 32-bit words, one or more blocks per shard.
//!
//! ```text
//! pooled rows   values, rows, flags │ table rows [values] │ sizes [rows] │ offsets [rows], if rows overlap
//! sequence      values              │ table rows [values]
//! replica       rows                │ table rows that will be updated [rows], or a bit for every table row
//! ```
//!
//! Table rows are relative to the shard's first row. Rows without a value in the shard are left out.

use std::ops::Range;

use super::super::lookup::{FeatureLookup, Rows};
use super::super::shard::Shard;
use super::copies::{decode_rows, encode_rows, reduced_by};

/// The flag of a block that contains offsets because its rows overlap.
const OVERLAP: i32 = 1;

/// A part of a request: one shard, for one feature or for a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    /// The index of the shard.
    pub(super) shard: usize,
    pub(super) table: usize,
    pub(super) kind: Kind,
    /// The shard's first column.
    pub(super) column: usize,
    /// The number of the shard's columns, and of values per vector.
    pub(super) width: usize,
}

/// The kind of answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The sum of the vectors of every row of the feature with this index.
    Pooled(usize),
    /// The vector of every value of the feature with this index.
    Sequence(usize),
    /// No answer, because the requesting rank has a replica. The block contains the table rows that its batch looks
    /// up, once for all features.
    Replica,
}

impl Kind {
    /// Returns the position of the kind in the order of messages.
    pub(super) fn place(self) -> usize {
        match self {
            Self::Pooled(_) => 0,
            Self::Sequence(_) => 1,
            Self::Replica => 2,
        }
    }
}

/// The vectors that were requested in one block.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// The row or value of the feature that each vector of the answer belongs to. For a replica, the table rows
    /// whose gradients the owner sums.
    pub(super) vectors: Vec<u32>,
}

/// A requested block, as decoded by its owner.
#[derive(Debug)]
pub(super) enum Served {
    /// Lists over the shard; `true` for a sequence.
    Lookup(FeatureLookup, bool),
    /// The table rows of a replica that the requesting rank looks up, and how many of their gradients this rank
    /// sums.
    Replica(Vec<u32>, usize),
}

impl Served {
    /// Returns the number of vectors of the answer.
    pub(super) fn answers(&self) -> usize {
        match self {
            Self::Lookup(lookup, true) => lookup.table_rows.len(),
            Self::Lookup(lookup, false) => lookup.rows.sizes.len(),
            Self::Replica(..) => 0,
        }
    }

    /// Returns the number of vectors of the gradient.
    pub(super) fn gradients(&self) -> usize {
        match self {
            Self::Replica(_, summed) => *summed,
            Self::Lookup(..) => self.answers(),
        }
    }
}

impl Asked {
    /// Returns the number of vectors of the answer.
    pub(super) fn answers(&self, kind: Kind) -> usize {
        if kind == Kind::Replica { 0 } else { self.vectors.len() }
    }
}

/// Returns the rows of a replicated table that a batch's `features` look up, ascending.
pub(super) fn rows_of_replica(table: usize, features: &[&FeatureLookup]) -> Vec<u32> {
    let own = features.iter().filter(|feature| feature.table == table);
    let covered =
        own.flat_map(|feature| feature.table_rows.iter().zip(feature.rows.covered(feature.table_rows.len())));
    let mut rows: Vec<u32> = covered.filter(|(_, covered)| *covered).map(|(row, _)| *row).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Appends the request of a batch's `features` for a block to `words`. `features` is indexed by feature; `replicas`
/// contains the [rows](rows_of_replica) of the replicas, by table.
pub(super) fn encode(
    block: &Block,
    (shard, ranks): (&Shard, usize),
    (features, replicas): (&[&FeatureLookup], &[Vec<u32>]),
    words: &mut Vec<i32>,
) -> Asked {
    match block.kind {
        Kind::Pooled(feature) => encode_pooled(&shard.rows, features[feature], words),
        Kind::Sequence(feature) => encode_sequence(&shard.rows, features[feature], words),
        Kind::Replica => {
            let rows = &replicas[block.table];
            encode_rows(rows, shard.rows.end, words);
            Asked { vectors: reduced_by(shard.rank as usize, rows, ranks).copied().collect() }
        }
    }
}

fn encode_sequence(rows: &Range<u64>, feature: &FeatureLookup, words: &mut Vec<i32>) -> Asked {
    // Values that are in no row are not looked up.
    let covered = (0_u32..).zip(&feature.table_rows).zip(feature.rows.covered(feature.table_rows.len()));
    let chosen = covered.filter(|((_, row), covered)| *covered && rows.contains(&u64::from(**row)));
    let vectors: Vec<u32> = chosen.map(|((value, _), _)| value).collect();
    words.push(vectors.len() as i32);
    words
        .extend(vectors.iter().map(|&value| (feature.table_rows[value as usize] - rows.start as u32) as i32));
    Asked { vectors }
}

fn encode_pooled(rows: &Range<u64>, feature: &FeatureLookup, words: &mut Vec<i32>) -> Asked {
    let chosen = |row: u32| rows.contains(&u64::from(row));
    let header = words.len();
    words.extend([0; 3]);
    // The number of chosen values before each value.
    let before: Vec<i32> = if feature.table_rows.iter().all(|&row| chosen(row)) {
        words.extend(feature.table_rows.iter().map(|&row| (row - rows.start as u32) as i32));
        (0..=feature.table_rows.len() as i32).collect()
    } else {
        let mut before = Vec::with_capacity(feature.table_rows.len() + 1);
        before.push(0_i32);
        for &row in &feature.table_rows {
            let is_chosen = chosen(row);
            if is_chosen {
                words.push((row - rows.start as u32) as i32);
            }
            before.push(before[before.len() - 1] + i32::from(is_chosen));
        }
        before
    };
    let bounds = feature.rows.offsets.iter().zip(&feature.rows.sizes);
    let bounds = bounds.map(|(&offset, &size)| (before[offset as usize], before[(offset + size) as usize]));
    let bounds: Vec<(i32, i32)> = bounds.collect();
    let vectors: Vec<u32> =
        (0..bounds.len() as u32).filter(|&row| bounds[row as usize].0 < bounds[row as usize].1).collect();
    let own = || vectors.iter().map(|&row| bounds[row as usize]);
    words.extend(own().map(|(start, end)| end - start));
    let mut next = 0;
    let follows = own().all(|(start, end)| std::mem::replace(&mut next, end) == start);
    if !follows {
        words.extend(own().map(|(start, _)| start));
    }
    let flags = if follows { 0 } else { OVERLAP };
    words[header..header + 3].copy_from_slice(&[before[before.len() - 1], vectors.len() as i32, flags]);
    Asked { vectors }
}

/// Reads a block from the front of `words`, in which one of `ranks` ranks requests a shard of this rank. Returns
/// `None` if it is malformed.
pub(super) fn decode(block: &Block, (shard, ranks): (&Shard, usize), words: &mut &[i32]) -> Option<Served> {
    let rows = shard.rows.end - shard.rows.start;
    let feature = match block.kind {
        Kind::Pooled(feature) => return decode_pooled(block, feature, rows, words),
        Kind::Sequence(feature) => feature,
        Kind::Replica => {
            let rows = decode_rows(rows, words)?;
            let summed = reduced_by(shard.rank as usize, &rows, ranks).count();
            return Some(Served::Replica(rows, summed));
        }
    };
    let count = count(words)?;
    let table_rows = table_rows(take(words, count)?, rows)?;
    // Every value is a row, so that the gradient of each value counts.
    let rows = Rows { offsets: (0..count as i32).collect(), sizes: vec![1; count] };
    Some(Served::Lookup(lookup(block, feature, table_rows, rows), true))
}

fn decode_pooled(block: &Block, feature: usize, rows: u64, words: &mut &[i32]) -> Option<Served> {
    let (values, lists) = (count(words)?, count(words)?);
    let flags = *take(words, 1)?.first()?;
    let table_rows = table_rows(take(words, values)?, rows)?;
    let sizes = take(words, lists)?.to_vec();
    let offsets = if flags & OVERLAP != 0 {
        take(words, lists)?.to_vec()
    } else {
        let start = |next: &mut i32, size: &i32| Some(std::mem::replace(next, next.checked_add(*size)?));
        sizes.iter().scan(0, start).collect()
    };
    let within = |(&offset, &size): (&i32, &i32)| {
        let end = offset.checked_add(size);
        offset >= 0 && size >= 0 && end.is_some_and(|end| end as usize <= values)
    };
    if offsets.len() != lists || !offsets.iter().zip(&sizes).all(within) {
        return None;
    }
    Some(Served::Lookup(lookup(block, feature, table_rows, Rows { offsets, sizes }), false))
}

fn lookup(block: &Block, feature: usize, table_rows: Vec<u32>, rows: Rows) -> FeatureLookup {
    // The requesting rank divides by the number of values, which this shard may not know.
    FeatureLookup { feature, table: block.table, table_rows, rows, mean: false, received: None }
}

fn take<'a>(words: &mut &'a [i32], count: usize) -> Option<&'a [i32]> {
    let (taken, rest) = words.split_at_checked(count)?;
    *words = rest;
    Some(taken)
}

fn count(words: &mut &[i32]) -> Option<usize> {
    usize::try_from(*take(words, 1)?.first()?).ok()
}

fn table_rows(words: &[i32], rows: u64) -> Option<Vec<u32>> {
    // As unsigned numbers, negative numbers are larger than all rows.
    let fit = words.iter().all(|&row| u64::from(row as u32) < rows);
    fit.then(|| words.iter().map(|&row| row as u32).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn feature() -> impl Strategy<Value = FeatureLookup> {
        let values = prop::collection::vec(0_u32..20, 0..30);
        values
            .prop_flat_map(|table_rows| {
                let count = table_rows.len();
                let row = (0..=count).prop_flat_map(move |start| (Just(start), 0..=count - start));
                (Just(table_rows), prop::collection::vec(row, 0..8))
            })
            .prop_map(|(table_rows, rows)| FeatureLookup {
                feature: 0,
                table: 0,
                rows: Rows {
                    offsets: rows.iter().map(|(start, _)| *start as i32).collect(),
                    sizes: rows.iter().map(|(_, size)| *size as i32).collect(),
                },
                table_rows,
                mean: true,
                received: None,
            })
    }

    fn block(kind: Kind) -> Block {
        Block { shard: 0, table: 0, kind, column: 0, width: 4 }
    }

    proptest! {
        #[test]
        fn the_owner_gets_every_rows_values_in_its_shard(
            feature in feature(), start in 0_u64..20, rest in prop::collection::vec(any::<i32>(), 0..3),
        ) {
            let shard = Shard { table: 0, rank: 1, rows: start..20, columns: 0..4 };
            let mut words = Vec::new();
            let asked = encode(&block(Kind::Pooled(0)), (&shard, 2), (&[&feature], &[]), &mut words);
            words.extend(&rest);
            let mut left = words.as_slice();
            let served = decode(&block(Kind::Pooled(0)), (&shard, 2), &mut left);
            prop_assert_eq!(left, rest.as_slice());
            let Some(Served::Lookup(lookup, false)) = served else { panic!("{served:?}") };
            let mut answered = asked.vectors.iter().zip(lookup.rows.offsets.iter().zip(&lookup.rows.sizes)).peekable();
            for (row, (&offset, &size)) in feature.rows.offsets.iter().zip(&feature.rows.sizes).enumerate() {
                let own = offset as usize..(offset + size) as usize;
                let rows = feature.table_rows[own].iter().filter(|row| u64::from(**row) >= start);
                let expected: Vec<u32> = rows.map(|row| row - start as u32).collect();
                if expected.is_empty() {
                    continue;
                }
                let (asked_row, (&offset, &size)) = answered.next().expect("a row with values is asked for");
                prop_assert_eq!(*asked_row as usize, row);
                prop_assert_eq!(&lookup.table_rows[offset as usize..(offset + size) as usize], &expected[..]);
            }
            prop_assert!(answered.next().is_none());
        }

        /// A message is either decoded completely or refused; its numbers are never trusted.
        #[test]
        fn malformed_blocks_are_refused(words in prop::collection::vec(-3_i32..9, 0..24), kind in 0..3) {
            let kind = [Kind::Pooled(0), Kind::Sequence(0), Kind::Replica][kind as usize];
            let mut left = words.as_slice();
            let shard = Shard { table: 0, rank: 0, rows: 0..5, columns: 0..4 };
            if let Some(Served::Lookup(lookup, _)) = decode(&block(kind), (&shard, 2), &mut left) {
                prop_assert!(lookup.table_rows.iter().all(|row| *row < 5));
                for (&offset, &size) in lookup.rows.offsets.iter().zip(&lookup.rows.sizes) {
                    prop_assert!(offset >= 0 && size >= 0 && (offset + size) as usize <= lookup.table_rows.len());
                }
            }
        }
    }
}
