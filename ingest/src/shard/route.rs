//! Determines the segment of a row.

use std::path::Path;

use arrow::array::{Array, AsArray, RecordBatch, StringArray, UInt32Array};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Schema};
use onefold_datasets::{IDENTITY_SEPARATOR, MOST_BUCKETS, bucket_of_identity, suggest};

use crate::error::{Error, Result};

/// Divides rows among segments by their key, as a dataset divides its sessions among buckets. The number of the segment
/// is the bucket of the key's [identity](onefold_datasets::bucket_of_identity), which consists of the texts of the key
/// columns in the given order. All rows with a null in a key column go to the segment of the empty identity.
#[derive(Debug)]
pub(super) struct Router {
    columns: Vec<usize>,
    segments: u32,
}

/// The rows of a batch, divided among the segments.
#[derive(Debug)]
pub(super) struct Routes {
    /// The row numbers of each segment, in ascending order.
    pub(super) rows_by_segment: Vec<UInt32Array>,
    /// The number of rows with a null in a key column.
    pub(super) null_key_rows: u64,
}

impl Router {
    /// Makes a router of rows with these `columns` by the key columns `by`. Errors name `file`, a file of the log.
    pub(super) fn new(columns: &Schema, file: &Path, by: &[String], segments: usize) -> Result<Self> {
        let wrong =
            |message: String, hint: &str| Err(Error::data(format!("`{}`", file.display()), message, hint));
        let names = || columns.fields().iter().map(|field| field.name().as_str());
        let column = |name: &String| {
            let Ok(column) = columns.index_of(name) else {
                let message = format!("there is no column `{name}` to shard by");
                return wrong(message, &suggest(name, names()));
            };
            let data_type = columns.field(column).data_type();
            if !is_key(data_type) {
                let message =
                    format!("the column `{name}` is {data_type}, and a key is an integer or a text");
                return wrong(message, "shard by a column that identifies the session or the user");
            }
            Ok(column)
        };
        let columns = by.iter().map(column).collect::<Result<Vec<_>>>()?;
        let segments = u32::try_from(segments).unwrap_or(MOST_BUCKETS).clamp(1, MOST_BUCKETS);
        Ok(Self { columns, segments })
    }

    /// Divides the rows of `batch`, which has the columns of the log, among the segments.
    pub(super) fn route(&self, batch: &RecordBatch) -> Result<Routes> {
        let texts = self.columns.iter().map(|column| texts(batch, *column)).collect::<Result<Vec<_>>>()?;
        let mut rows = vec![Vec::new(); self.segments as usize];
        let (mut identity, mut null_key_rows) = (String::new(), 0);
        for row in 0..batch.num_rows() {
            identity.clear();
            if texts.iter().any(|texts| texts.is_null(row)) {
                null_key_rows += 1;
            } else {
                for (place, texts) in texts.iter().enumerate() {
                    identity.extend((place > 0).then_some(IDENTITY_SEPARATOR));
                    identity.push_str(texts.value(row));
                }
            }
            // A batch has far fewer than 2^32 rows.
            rows[bucket_of_identity(&identity, self.segments) as usize].push(row as u32);
        }
        let rows_by_segment = rows.into_iter().map(UInt32Array::from).collect();
        Ok(Routes { rows_by_segment, null_key_rows })
    }
}

fn is_key(data_type: &DataType) -> bool {
    match data_type {
        DataType::Boolean | DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => is_key(values),
        other => other.is_integer(),
    }
}

/// Returns the values of a column as texts. The conversion is that of `CAST(column AS VARCHAR)` in SQL, which the
/// identities of sessions are made with.
fn texts(batch: &RecordBatch, column: usize) -> Result<StringArray> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let texts = cast_with_options(batch.column(column), &DataType::Utf8, &options);
    let texts = texts.map_err(|error| Error::Dataset(onefold_datasets::Error::Internal(error)))?;
    Ok(texts.as_string::<i32>().clone())
}
