//! Which segment a row belongs to.

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt32Array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type, UInt64Type};
use onefold_datasets::digest::ColumnSeed;
use onefold_datasets::suggest;

use super::log::{Log, wrong};
use crate::Result;

/// Brings rows into segments by the hash of their keys.
///
/// The hash is XXH3 of a text's bytes and a bijection of 64 bits for an integer, whatever its width, with the place of the
/// column among the keys, but not its name; those of several columns are added. A key with a null is nothing but null.
/// This must not change: logs that were sharded by other versions are to match.
#[derive(Debug)]
pub(super) struct Router {
    columns: Vec<usize>,
    segments: usize,
}

/// Where the rows of a batch go.
#[derive(Debug)]
pub(super) struct Routes {
    /// By segment, rising.
    pub(super) rows_by_segment: Vec<UInt32Array>,
    /// Rows with a null in a key column.
    pub(super) null_key_rows: u64,
}

impl Router {
    /// A router of the rows of `log` by the columns `by`.
    pub(super) fn new(log: &Log, by: &[String], segments: usize) -> Result<Self> {
        let names = || log.schema.fields().iter().map(|field| field.name().as_str());
        let column = |name: &String| {
            let Ok(column) = log.schema.index_of(name) else {
                return Err(wrong(
                    &log.files[0].path,
                    format!("there is no column `{name}` to shard by"),
                    &suggest(name, names()),
                ));
            };
            let data_type = log.schema.field(column).data_type();
            if !is_key(data_type) {
                return Err(wrong(
                    &log.files[0].path,
                    format!("the column `{name}` is {data_type}, and a key is an integer or a text"),
                    "shard by a column that identifies the session or the user",
                ));
            }
            Ok(column)
        };
        let columns = by.iter().map(column).collect::<Result<Vec<_>>>()?;
        Ok(Self { columns, segments: segments.max(1) })
    }

    /// Where the rows of `batch` go, whose columns are those of the log.
    pub(super) fn route(&self, batch: &RecordBatch) -> Result<Routes> {
        let mut hashes = vec![Some(0_u128); batch.num_rows()];
        for (place, column) in self.columns.iter().enumerate() {
            let seed = ColumnSeed::new(&format!("key {place}"));
            add_hashes(batch.column(*column), seed, &mut hashes)
                .map_err(onefold_datasets::Error::Internal)?;
        }
        let of_null = ColumnSeed::new("null").bytes(&[]);
        let mut rows = vec![Vec::new(); self.segments];
        for (row, hash) in (0_u32..).zip(&hashes) {
            // The high part of the product is uniform in 0..segments.
            let bits = u128::from(hash.unwrap_or(of_null) as u64);
            rows[((bits * self.segments as u128) >> 64) as usize].push(row);
        }
        Ok(Routes {
            rows_by_segment: rows.into_iter().map(UInt32Array::from).collect(),
            null_key_rows: hashes.iter().filter(|hash| hash.is_none()).count() as u64,
        })
    }
}

fn is_key(data_type: &DataType) -> bool {
    match data_type {
        DataType::Boolean
        | DataType::Utf8
        | DataType::LargeUtf8
        | DataType::Utf8View
        | DataType::Binary
        | DataType::LargeBinary
        | DataType::BinaryView
        | DataType::FixedSizeBinary(_) => true,
        DataType::Dictionary(_, values) => is_key(values),
        other => other.is_integer(),
    }
}

/// Adds the hash of every value to that of its row; that of a null takes it away.
fn add_hashes(
    column: &ArrayRef,
    seed: ColumnSeed,
    hashes: &mut [Option<u128>],
) -> Result<(), arrow::error::ArrowError> {
    let bytes = |value: &[u8]| seed.bytes(value);
    match column.data_type() {
        DataType::Dictionary(_, values) => return add_hashes(&cast(column, values)?, seed, hashes),
        DataType::Utf8 => add(hashes, column.as_string::<i32>().iter(), |v| bytes(v.as_bytes())),
        DataType::LargeUtf8 => add(hashes, column.as_string::<i64>().iter(), |v| bytes(v.as_bytes())),
        DataType::Utf8View => add(hashes, column.as_string_view().iter(), |v| bytes(v.as_bytes())),
        DataType::Binary => add(hashes, column.as_binary::<i32>().iter(), bytes),
        DataType::LargeBinary => add(hashes, column.as_binary::<i64>().iter(), bytes),
        DataType::BinaryView => add(hashes, column.as_binary_view().iter(), bytes),
        DataType::FixedSizeBinary(_) => add(hashes, column.as_fixed_size_binary().iter(), bytes),
        DataType::UInt64 => {
            add(hashes, column.as_primitive::<UInt64Type>().iter(), |v| seed.number(v));
        }
        _ => {
            let numbers = cast(column, &DataType::Int64)?;
            add(hashes, numbers.as_primitive::<Int64Type>().iter(), |v| seed.number(v as u64));
        }
    }
    Ok(())
}

fn add<V>(hashes: &mut [Option<u128>], values: impl Iterator<Item = Option<V>>, hash: impl Fn(V) -> u128) {
    for (sum, value) in hashes.iter_mut().zip(values) {
        *sum = sum.zip(value).map(|(sum, value)| sum.wrapping_add(hash(value)));
    }
}
