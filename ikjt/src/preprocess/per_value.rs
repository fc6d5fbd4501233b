//! List operators that map single ids, and the execution of a chain of them on a feature.
//!
//! They run once per *value* of the feature's buffer, not once per row that uses it: where rows overlap, as windows
//! do, each id is mapped once, and the rows remain slices of the buffer.

use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use super::arguments::Arguments;
use super::lists::Cut;
use super::problem::{Checked, Problem};
use crate::batch::{Feature, UsedRows, UsedValues, rebased};
use crate::hash::{Modulus, SigridHash};

/// The number of ids that a chain takes through all its operators at a time: 8 KiB, a quarter of a small L1 cache.
const BLOCK: usize = 1024;

/// An operator that maps an id to an id.
#[derive(Debug, Clone)]
pub(super) enum ValueOp {
    SigridHash(SigridHash),
    PositiveModulus(Modulus),
    Clamp { min: i64, max: i64 },
    MapId(MapId),
}

/// A table from ids to ids; see [`map_id`].
#[derive(Debug, Clone)]
pub(super) struct MapId {
    table: Arc<[i64]>,
    length: Modulus,
}

impl MapId {
    fn map(&self, id: i64) -> i64 {
        if id < 0 { 0 } else { self.table[self.length.of(id) as usize] }
    }
}

impl ValueOp {
    fn apply(&self, ids: &mut [i64]) {
        match self {
            Self::SigridHash(hash) => hash.hash_all(ids),
            Self::PositiveModulus(modulus) => modulus.of_all(ids),
            Self::Clamp { min, max } => ids.iter_mut().for_each(|id| *id = (*id).clamp(*min, *max)),
            Self::MapId(map) => ids.iter_mut().for_each(|id| *id = map.map(*id)),
        }
    }
}

pub(super) fn sigrid_hash(arguments: &mut Arguments) -> Checked<ValueOp> {
    let salt = arguments.optional::<u64>("salt")?.unwrap_or(0);
    Ok(ValueOp::SigridHash(SigridHash::new(salt, arguments.integer("max", None, (1, i64::MAX))?)))
}

pub(super) fn positive_modulus(arguments: &mut Arguments) -> Checked<ValueOp> {
    let modulus = arguments.integer("modulus", None, (1, i64::MAX))?;
    Ok(ValueOp::PositiveModulus(Modulus::new(modulus)))
}

pub(super) fn map_id(arguments: &mut Arguments) -> Checked<ValueOp> {
    let inline: Option<Vec<i64>> = arguments.optional("table")?;
    let file: Option<String> = arguments.optional("table_file")?;
    let table = match (inline, file) {
        (Some(table), None) => table,
        (None, Some(file)) => read_table(arguments, &file)?,
        _ => {
            let hint = "write `table = [7, 8, 9]`, or `table_file = \"ids.txt\"` with one integer a line";
            return Err(Problem::new("one of `table` and `table_file` must be given", hint));
        }
    };
    if table.is_empty() {
        return Err(Problem::new("the table is empty", "give it at least one id"));
    }
    let length = Modulus::new(table.len() as i64);
    Ok(ValueOp::MapId(MapId { table: table.into(), length }))
}

fn read_table(arguments: &mut Arguments, file: &str) -> Checked<Vec<i64>> {
    let id = |(number, line): (usize, &str)| {
        line.trim().parse().map_err(|_| {
            let message = format!("`{file}`, line {}: `{line}` is not a 64-bit integer", number + 1);
            Problem::new(message, "write one integer a line and nothing else")
        })
    };
    arguments.files().text(file)?.lines().enumerate().map(id).collect()
}

/// Consecutive steps on one feature that run in one pass: first the `firstx` and `lastx` steps, then the operators on
/// single ids.
///
/// This order is equivalent to any other: an operator on single ids does not depend on their positions, and `firstx`
/// and `lastx` depend only on positions.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain {
    cuts: Vec<Cut>,
    ops: Vec<ValueOp>,
}

impl Chain {
    pub(super) fn cut(&mut self, cut: Cut) {
        let before = self.cuts.pop();
        match before.and_then(|before| before.and(cut)) {
            Some(both) => self.cuts.push(both),
            None => self.cuts.extend(before.into_iter().chain([cut])),
        }
    }

    pub(super) fn push(&mut self, op: ValueOp) {
        self.ops.push(op);
    }

    /// Applies the steps to a feature.
    pub(super) fn run(&self, feature: Feature) -> Checked<Feature> {
        let feature = self.cuts.iter().try_fold(feature, |feature, cut| cut.run(feature))?;
        if self.ops.is_empty() {
            return Ok(feature);
        }
        let used = UsedValues::new(&feature, &UsedRows::Range(0..feature.rows()));
        let (name, values, offsets, sizes) = feature.into_parts();
        let all = used == UsedValues::One(0..values.len());
        let values = self.values(values, &used);
        let offsets = match used {
            UsedValues::One(_) if all => offsets,
            UsedValues::One(span) => rebased(offsets.iter(), &span, 0).collect(),
            UsedValues::Several { offsets, .. } => offsets.into(),
        };
        Ok(Feature::try_new(name, values, offsets, sizes)?)
    }

    fn apply(&self, ids: &mut [i64]) {
        for block in ids.chunks_mut(BLOCK) {
            for op in &self.ops {
                op.apply(block);
            }
        }
    }

    /// Applies the operators to the values `used`. Reuses the memory of `values` if it has no other owner and at
    /// least half of it is used.
    fn values(&self, values: ScalarBuffer<i64>, used: &UsedValues) -> Vec<i64> {
        let total = used.len();
        let owned = match 2 * total >= values.len() {
            true => values.into_inner().into_vec::<i64>().map_err(ScalarBuffer::from),
            false => Err(values),
        };
        match owned {
            Ok(ids) => self.in_place(ids, used.stretches()),
            Err(shared) => self.copied(&shared, used.stretches(), total),
        }
    }

    fn in_place(&self, mut ids: Vec<i64>, slices: &[Range<usize>]) -> Vec<i64> {
        let (mut done, mut end) = (0, 0);
        for slice in slices {
            let length = slice.len();
            // Each slice moves towards the start or stays, so later slices are not overwritten.
            if slice.start != end {
                ids.copy_within(slice.clone(), end);
            }
            end += length;
            if end - done >= BLOCK {
                self.apply(&mut ids[done..end]);
                done = end;
            }
        }
        self.apply(&mut ids[done..end]);
        ids.truncate(end);
        ids
    }

    fn copied(&self, values: &[i64], slices: &[Range<usize>], total: usize) -> Vec<i64> {
        let mut ids = Vec::with_capacity(total);
        let mut done = 0;
        for slice in slices {
            for piece in values[slice.clone()].chunks(BLOCK) {
                ids.extend_from_slice(piece);
                if ids.len() - done >= BLOCK {
                    self.apply(&mut ids[done..]);
                    done = ids.len();
                }
            }
        }
        self.apply(&mut ids[done..]);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a chain that increments every id, so that a second application to the same id is detected.
    fn add_one() -> Chain {
        let mut chain = Chain::default();
        let table: Arc<[i64]> = (1..=5000).collect();
        chain.push(ValueOp::MapId(MapId { table, length: Modulus::new(5000) }));
        chain
    }

    fn feature(values: i64, offsets: Vec<i32>, sizes: Vec<i32>) -> Feature {
        Feature::try_new("x", (0..values).collect::<Vec<_>>(), offsets, sizes).unwrap()
    }

    #[test]
    fn windows_stay_windows_and_each_id_is_computed_once() {
        let windows = feature(4000, vec![0, 1000, 1500], vec![2000, 2000, 2500]);
        let done = add_one().run(windows.clone()).unwrap();
        assert_eq!(done.values()[..], (1..=4000).collect::<Vec<_>>()[..]);
        assert_eq!(done.offsets().as_ptr(), windows.offsets().as_ptr());
        assert_eq!(done.sizes().as_ptr(), windows.sizes().as_ptr());
    }

    #[test]
    fn a_buffer_that_nobody_else_holds_is_changed_in_place() {
        let alone = feature(3000, vec![0], vec![3000]);
        let place = alone.values().as_ptr();
        assert_eq!(add_one().run(alone).unwrap().values().as_ptr(), place);
        let gaps = || feature(3000, vec![10, 1400, 1500], vec![1400, 50, 1500]);
        let alone = gaps();
        let place = alone.values().as_ptr();
        let (alone, shared) = (add_one().run(alone).unwrap(), gaps());
        assert_eq!((alone.values().as_ptr(), alone.values().len()), (place, 2940));
        let copied = add_one().run(shared.clone()).unwrap();
        assert_eq!((&copied, shared), (&alone, gaps()));
    }

    #[test]
    fn what_no_row_uses_is_left_out() {
        // Two windows that overlap, an empty row, a gap, and a row within the previous row.
        let gaps = feature(4000, vec![10, 12, 9, 2000, 2010], vec![4, 4, 0, 1500, 5]);
        let done = add_one().run(gaps.clone()).unwrap();
        assert_eq!(done.values().len(), 1506);
        for row in 0..gaps.rows() {
            assert_eq!(done.row(row), gaps.row(row).iter().map(|id| id + 1).collect::<Vec<_>>());
        }
        let unordered = feature(100, vec![90, 3], vec![2, 4]);
        let done = add_one().run(unordered).unwrap();
        assert_eq!((&done.values()[..], &done.offsets()[..]), (&[4, 5, 6, 7, 91, 92][..], &[4, 0][..]));
    }

    #[test]
    fn the_smaller_of_two_counts_holds() {
        let mut chain = add_one();
        chain.cut(Cut::First(3));
        chain.push(ValueOp::Clamp { min: 2, max: 2 });
        chain.cut(Cut::First(2));
        chain.cut(Cut::First(5));
        assert_eq!(chain.cuts, [Cut::First(2)]);
        assert_eq!(chain.run(feature(9, vec![4], vec![5])).unwrap().row(0), [2, 2]);
    }
}
