//! Reads the impressions of all splits in the order of their arrival.
//!
//! The files are unordered and too large for memory. A first pass reads the sort keys (24 bytes per impression) and
//! computes the rank of every row (4 bytes). Then each [`Arrival::chunk`] reads all files that contain rows with its
//! ranks, and sorts these rows. Memory is thus bounded by the size of a chunk, and the files of `ebnerd_large` are
//! read about a dozen times.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::{concat_batches, filter_record_batch, sort_to_indices, take_record_batch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, TimestampMicrosecondType};

use super::source::{self, Column, Kind, SplitFiles};
use crate::{Error, Result, error};

/// The column of a chunk with the number of the split.
pub(super) const SPLIT_COLUMN: &str = "split";

/// The columns by which impressions are sorted.
const KEYS: [Column; 2] = [("impression_time", Kind::Time), ("impression_id", Kind::Id)];

/// The columns of an impression to read. `read_time`, `scroll_percentage` and `next_*` are known only after the click
/// and would leak the label, so they are not read.
pub(super) const BEHAVIORS: [Column; 13] = [
    ("impression_id", Kind::Id),
    ("impression_time", Kind::Time),
    ("session_id", Kind::Id),
    ("user_id", Kind::Id),
    ("device_type", Kind::Attribute),
    ("is_sso_user", Kind::Attribute),
    ("gender", Kind::Attribute),
    ("postcode", Kind::Attribute),
    ("age", Kind::Attribute),
    ("is_subscriber", Kind::Attribute),
    ("article_id", Kind::OptionalId),
    ("article_ids_inview", Kind::Ids),
    ("article_ids_clicked", Kind::Ids),
];

/// The rank of every impression by time, impression id, split and row.
#[derive(Debug)]
pub(super) struct Arrival<'a> {
    splits: &'a [SplitFiles],
    /// The rank of every row of each split.
    ranks: Vec<Vec<u32>>,
    /// The number of impressions.
    pub(super) count: u32,
}

impl<'a> Arrival<'a> {
    /// Reads the keys of all impressions and sorts them.
    ///
    /// # Errors
    ///
    /// The errors of [`source::open`], and [`Error::Fault`] for a split without impressions.
    pub(super) fn read(splits: &'a [SplitFiles]) -> Result<Self> {
        let mut keys: Vec<(i64, i64, u32, u32)> = Vec::new();
        let mut ranks = Vec::new();
        for (split, files) in (0..).zip(splits) {
            let before = keys.len();
            let mut row = 0;
            for batch in source::open(&files.behaviors, &KEYS)? {
                let batch = batch?;
                let times = batch.column(0).as_primitive::<TimestampMicrosecondType>().values();
                let impressions = batch.column(1).as_primitive::<Int64Type>().values();
                for (time, impression) in times.iter().zip(impressions) {
                    keys.push((*time, *impression, split, row));
                    row += 1;
                }
                if u32::try_from(keys.len()).is_err() {
                    let hint = "import the splits' files in parts";
                    return Err(error::source(&files.behaviors, "more than 2^32 impressions", hint));
                }
            }
            if keys.len() == before {
                return Err(error::source(&files.behaviors, "it holds no impressions", "download it again"));
            }
            ranks.push(vec![0; keys.len() - before]);
        }
        keys.sort_unstable();
        for (rank, (_, _, split, row)) in (0..).zip(&keys) {
            ranks[*split as usize][*row as usize] = rank;
        }
        Ok(Self { splits, ranks, count: keys.len() as u32 })
    }

    /// Returns the impressions with these ranks, in order, with the columns of [`BEHAVIORS`] and [`SPLIT_COLUMN`].
    ///
    /// # Errors
    ///
    /// The errors of [`source::open`] and of its rows, and [`Error::Fault`] if a file changed after the first pass.
    pub(super) fn chunk(&self, range: Range<u32>) -> Result<RecordBatch> {
        let (mut kept, mut kept_ranks) = (Vec::new(), Vec::<u32>::with_capacity(range.len()));
        for ((split, files), ranks) in (0..).zip(self.splits).zip(&self.ranks) {
            if !ranks.iter().any(|rank| range.contains(rank)) {
                continue;
            }
            let mut row = 0;
            for batch in source::open(&files.behaviors, &BEHAVIORS)? {
                let batch = batch?;
                let end = row + batch.num_rows();
                let ranks = ranks.get(row..end).ok_or_else(|| changed(files))?;
                row = end;
                let mask: BooleanArray = ranks.iter().map(|rank| Some(range.contains(rank))).collect();
                kept.push(with_split(&filter_record_batch(&batch, &mask)?, split)?);
                kept_ranks.extend(ranks.iter().filter(|rank| range.contains(rank)));
            }
            if row != ranks.len() {
                return Err(changed(files));
            }
        }
        let kept = concat_batches(&chunk_schema(), &kept)?;
        let order = sort_to_indices(&UInt32Array::from(kept_ranks), None, None)?;
        Ok(take_record_batch(&kept, &order)?)
    }
}

fn with_split(batch: &RecordBatch, split: i64) -> Result<RecordBatch> {
    let mut columns = batch.columns().to_vec();
    let splits: ArrayRef = Arc::new(Int64Array::from_value(split, batch.num_rows()));
    columns.push(splits);
    Ok(RecordBatch::try_new(chunk_schema(), columns)?)
}

fn chunk_schema() -> SchemaRef {
    let mut fields = source::schema(&BEHAVIORS).fields().to_vec();
    fields.push(Arc::new(Field::new(SPLIT_COLUMN, DataType::Int64, false)));
    Arc::new(Schema::new(fields))
}

fn changed(files: &SplitFiles) -> Error {
    let hint = "run this again when nothing writes it";
    error::source(&files.behaviors, "it changed while it was read", hint)
}
