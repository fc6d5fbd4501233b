//! The weights of all tables in a device's memory, each table in its own type.

use std::ops::Range;

use onefold_base::fault::{option, text};
use onefold_sharding::DataType;
use tch::{Kind, Tensor};

use super::{Accelerator, Argument, failed};
use crate::Result;

/// The storage types, in the order in which table rows are numbered.
const TYPES: [DataType; 3] = [DataType::Fp32, DataType::Bf16, DataType::Fp16];

/// Three arrays, one per type. Table rows are numbered across the arrays, one array after the other. The rows of a
/// table are contiguous.
#[derive(Debug)]
pub(super) struct Weights {
    /// The number of columns, D.
    pub(super) dim: i64,
    /// One array `[rows, D]` for each of [`TYPES`].
    arrays: [Tensor; 3],
    /// The first row of each type, and the end.
    starts: [i64; 4],
    /// The range of rows of each table.
    tables: Vec<Range<i64>>,
    /// Four numbers per table, ordered by first row, as the kernel `update` expects them.
    numbers: Tensor,
}

/// A stored table, or a stored rectangle of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    /// The number of stored rows.
    pub(crate) rows: i64,
    pub(crate) dtype: DataType,
    /// The index of the table in the model.
    pub(crate) table: i64,
    /// The first row and column within the whole table.
    pub(crate) origin: [i64; 2],
}

impl Stored {
    /// Returns whole tables with these row counts and types.
    pub(super) fn whole(tables: &[(i64, DataType)]) -> Vec<Self> {
        let stored = |(table, &(rows, dtype)): (i64, &_)| Self { rows, dtype, table, origin: [0, 0] };
        (0..).zip(tables).map(stored).collect()
    }
}

fn kind(dtype: DataType) -> Kind {
    match dtype {
        DataType::Fp32 => Kind::Float,
        DataType::Bf16 => Kind::BFloat16,
        DataType::Fp16 => Kind::Half,
    }
}

impl Weights {
    /// Allocates zeros for these tables, which have `dim` columns.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device lacks memory, or the tables together have 2^31 rows or
    /// more.
    pub(super) fn zeros(accelerator: &Accelerator, tables: &[Stored], dim: i64) -> Result<Self> {
        let (mut starts, mut ranges, mut numbers) = ([0; 4], vec![0..0; tables.len()], Vec::new());
        let mut end = 0_i64;
        for (i, dtype) in TYPES.iter().enumerate() {
            for (place, stored) in tables.iter().enumerate().filter(|(_, stored)| stored.dtype == *dtype) {
                ranges[place] = end..end + stored.rows;
                numbers.extend([end, stored.table, stored.origin[0], stored.origin[1]]);
                end += stored.rows;
            }
            starts[i + 1] = end;
        }
        if i32::try_from(end).is_err() {
            let message = format!("the tables have {end} rows, more than 2^31");
            let hint = text!["give the tables fewer rows, or train with ", option("device").set_to("cpu")];
            return Err(failed(accelerator.torch(), message, hint));
        }
        let array = |i: usize| accelerator.zeros(&[starts[i + 1] - starts[i], dim], kind(TYPES[i]));
        Ok(Self {
            dim,
            arrays: [array(0)?, array(1)?, array(2)?],
            starts,
            tables: ranges,
            numbers: Tensor::from_slice(&numbers).to_device(accelerator.torch()),
        })
    }

    /// Returns the number of rows of all tables.
    pub(super) fn rows(&self) -> i64 {
        self.starts[3]
    }

    /// Returns the range of rows of a table.
    pub(super) fn rows_of(&self, table: usize) -> Range<i64> {
        self.tables[table].clone()
    }

    /// Returns a view of a table's weights, `[rows, D]`, in its type.
    pub(super) fn table(&self, table: usize) -> Tensor {
        let rows = self.rows_of(table);
        let dtype = (1..3).rev().find(|&i| self.starts[i] <= rows.start).unwrap_or(0);
        self.arrays[dtype].narrow(0, rows.start - self.starts[dtype], rows.end - rows.start)
    }

    /// Returns the arrays and their first rows, as kernels expect them.
    pub(super) fn arguments(&self) -> [Argument<'_>; 5] {
        let [fp32, bf16, fp16] = &self.arrays;
        // `zeros` has checked that row numbers fit.
        let [_, bf16_row, fp16_row, _] = self.starts.map(|row| row as i32);
        arguments![fp32, bf16, fp16, bf16_row, fp16_row]
    }

    /// Returns the four numbers per table that the kernel `update` expects: the array, and the number of tables.
    pub(super) fn numbers(&self) -> [Argument<'_>; 2] {
        arguments![&self.numbers, self.tables.len() as i32]
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::host::emulated;
    use super::*;

    #[test]
    fn tables_are_ordered_by_type_and_use_the_memory_of_their_type() {
        use DataType::{Bf16, Fp16, Fp32};
        let tables = [(5, Fp16), (2, Fp32), (3, Bf16), (4, Fp32), (1, Fp16)];
        let weights = Weights::zeros(&emulated(), &Stored::whole(&tables), 6).unwrap();
        let rows: Vec<_> = (0..5).map(|table| weights.rows_of(table)).collect();
        assert_eq!(rows, [9..14, 0..2, 6..9, 2..6, 14..15]);
        assert_eq!(weights.rows(), 15);
        for (table, (rows, dtype)) in tables.into_iter().enumerate() {
            let found = weights.table(table);
            assert_eq!((found.size(), found.kind()), (vec![rows, 6], kind(dtype)));
            assert_eq!(found.kind().elt_size_in_bytes() as u64, dtype.bytes());
            // Each table has its own memory.
            let _ = found.shallow_clone().fill_(table as f64 + 1.0);
        }
        for table in 0..5 {
            let found = weights.table(table).to_kind(Kind::Double);
            assert_eq!(
                (found.min().double_value(&[]), found.max().double_value(&[])),
                (table as f64 + 1.0, table as f64 + 1.0)
            );
        }
        let none = Weights::zeros(&emulated(), &Stored::whole(&[(2, Bf16)]), 3).unwrap();
        assert_eq!((none.table(0).kind(), none.table(0).size()), (Kind::BFloat16, vec![2, 3]));
        let error = Weights::zeros(&emulated(), &Stored::whole(&[(1 << 30, Fp32), (1 << 30, Bf16)]), 1 << 20)
            .unwrap_err()
            .to_string();
        assert!(error.contains("the tables have 2147483648 rows"), "{error}");
    }
}
