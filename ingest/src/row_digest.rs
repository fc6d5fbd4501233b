//! Digests rows with any columns.

use arrow::array::{Array, ArrayRef, AsArray, GenericListArray, OffsetSizeTrait, RecordBatch};
use arrow::datatypes::{DataType, SchemaRef};
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use onefold_datasets::digest::{ColumnSeed, Digest, SampleDigest};
use rayon::prelude::*;

use crate::error::Result;

/// Digests rows, independent of their order and of their division into batches.
#[derive(Debug)]
pub(crate) struct RowDigester {
    columns: Vec<Column>,
}

#[derive(Debug)]
struct Column {
    seed: ColumnSeed,
    /// Converts values to Arrow's row format, in which equal values have equal bytes; `None` for lists of numbers.
    rows: Option<RowConverter>,
}

impl RowDigester {
    /// Makes a digester of rows with these columns.
    pub(crate) fn new(schema: &SchemaRef) -> Result<Self> {
        let column = |data_type: &DataType, name: &str| {
            let rows = match data_type {
                DataType::List(item) | DataType::LargeList(item) if item.data_type().is_primitive() => None,
                other => Some(RowConverter::new(vec![SortField::new(other.clone())])?),
            };
            Ok(Column { seed: ColumnSeed::new(name), rows })
        };
        let columns = schema.fields().iter().map(|field| {
            column(field.data_type(), field.name()).map_err(|error: ArrowError| {
                crate::error::Error::column(
                    field.name(),
                    format!("its type cannot be digested: {error}"),
                    "leave the column out of the log",
                )
            })
        });
        Ok(Self { columns: columns.collect::<Result<_>>()? })
    }

    /// Returns the digest of the rows of `batch`.
    pub(crate) fn digest(&self, batch: &RecordBatch) -> Result<Digest> {
        let mut digest = Digest::default();
        self.rows(batch)?.into_iter().for_each(|row| digest.add(row));
        Ok(digest)
    }

    /// Returns the digest of each row of `batch`.
    pub(crate) fn rows(&self, batch: &RecordBatch) -> Result<Vec<SampleDigest>> {
        let columns = self.columns.par_iter().zip(batch.columns());
        let parts: Result<Vec<Vec<u128>>, ArrowError> =
            columns.map(|(column, values)| column.parts(values)).collect();
        let mut samples = vec![SampleDigest::default(); batch.num_rows()];
        for column in parts.map_err(onefold_datasets::Error::Internal)? {
            samples.iter_mut().zip(column).for_each(|(sample, part)| sample.add(part));
        }
        Ok(samples)
    }
}

impl Column {
    /// Returns the contribution of this column to the digest of each row.
    fn parts(&self, values: &ArrayRef) -> Result<Vec<u128>, ArrowError> {
        let Some(converter) = &self.rows else {
            return Ok(match values.data_type() {
                DataType::LargeList(_) => self.parts_of_lists(values.as_list::<i64>()),
                _ => self.parts_of_lists(values.as_list::<i32>()),
            });
        };
        let rows = converter.convert_columns(&[std::sync::Arc::clone(values)])?;
        Ok(rows.iter().map(|row| self.seed.bytes(row.as_ref())).collect())
    }

    /// Returns the contributions of lists of numbers. They are computed from the lists' bytes in place, because lists
    /// are most of the bytes of a log.
    fn parts_of_lists<O: OffsetSizeTrait>(&self, lists: &GenericListArray<O>) -> Vec<u128> {
        let items = lists.values().to_data();
        let width = items.data_type().primitive_width().unwrap_or(1);
        let bytes =
            items.buffers().first().map_or(&[][..], |buffer| &buffer.as_slice()[items.offset() * width..]);
        let part = |row: usize| {
            let (start, end) = (lists.offsets()[row].as_usize(), lists.offsets()[row + 1].as_usize());
            if lists.is_null(row) {
                return self.seed.number(u64::MAX);
            }
            match items.nulls().map(|nulls| nulls.slice(start, end - start)) {
                Some(nulls) if nulls.null_count() > 0 => {
                    let item = |at: usize| &bytes[width * (start + at)..width * (start + at + 1)];
                    let valid = (0..end - start).filter(|at| nulls.is_valid(*at)).flat_map(item);
                    let marks = (0..end - start).map(|at| u8::from(nulls.is_valid(at)));
                    let known: Vec<u8> = marks.chain(valid.copied()).collect();
                    self.seed.bytes(&known).wrapping_add(1)
                }
                _ => self.seed.bytes(&bytes[width * start..width * end]),
            }
        };
        (0..lists.len()).map(part).collect()
    }
}
