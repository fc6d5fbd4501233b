//! Finds the files of EB-NeRD, and converts their columns into `Int64` ids with strict checks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::compute::{CastOptions, cast_with_options};
use arrow::datatypes::{DataType, Int64Type, SchemaRef};
use arrow::error::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;

use onefold_base::fault::{option, text};
use onefold_datasets::suggest;

use crate::raw_log::{self, TIME};
use crate::{Error, Result, error};

/// The names of the splits that contain clicks, in the order of their numbers.
pub(super) const SPLITS: [&str; 2] = ["train", "validation"];
/// The largest id of a user attribute.
pub(super) const LAST_ATTRIBUTE_ID: i64 = 128;

/// The number of rows that are decoded at once.
const BATCH_ROWS: usize = 8192;

/// The type of a column, and its conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A number from 0, never null → `Int64`.
    Id,
    /// A number from 0 → `Int64`, null → 0.
    OptionalId,
    /// A boolean or a number from 0 to 127 → `Int64` id: 0 = unknown (null), else 1 + the value.
    Attribute,
    /// A timestamp, never null → `Timestamp` in microseconds.
    Time,
    /// A list of numbers from 0, never null → list of `Int64`.
    Ids,
}

/// The name of a column to read, and its type.
pub(super) type Column = (&'static str, Kind);

impl Kind {
    fn accepts(self, found: &DataType) -> bool {
        match self {
            Self::Id | Self::OptionalId => found.is_integer(),
            Self::Attribute => found.is_integer() || *found == DataType::Boolean,
            Self::Time => matches!(found, DataType::Timestamp(_, _)),
            Self::Ids => match found {
                DataType::List(item) | DataType::LargeList(item) => item.data_type().is_integer(),
                _ => false,
            },
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Self::Id | Self::OptionalId => "an integer",
            Self::Attribute => "an integer or a boolean",
            Self::Time => "a timestamp",
            Self::Ids => "a list of integers",
        }
    }

    fn output(self) -> DataType {
        match self {
            Self::Id | Self::OptionalId | Self::Attribute => DataType::Int64,
            Self::Time => TIME,
            Self::Ids => DataType::new_list(DataType::Int64, true),
        }
    }
}

/// The two files of a split.
#[derive(Debug, Clone)]
pub(super) struct SplitFiles {
    pub(super) behaviors: PathBuf,
    pub(super) history: PathBuf,
}

/// Finds the files of [`SPLITS`] in `from`: `train/behaviors.parquet` and so on, as published, or
/// `train_behaviors.parquet` and so on.
///
/// # Errors
///
/// [`Error::Fault`] if a file is missing.
pub(super) fn find(from: &Path) -> Result<Vec<SplitFiles>> {
    let file = |split: &str, name: &str| {
        let places = [from.join(split).join(name), from.join(format!("{split}_{name}"))];
        places.into_iter().find(|place| place.is_file()).ok_or_else(|| {
            error::source(
                from,
                format!("it holds neither `{split}/{name}` nor `{split}_{name}`"),
                text![
                    "point ",
                    option("from"),
                    " at an unpacked EB-NeRD (ebnerd_demo, ebnerd_small or ebnerd_large)"
                ],
            )
        })
    };
    let files = SPLITS.map(|split| {
        Ok(SplitFiles {
            behaviors: file(split, "behaviors.parquet")?,
            history: file(split, "history.parquet")?,
        })
    });
    files.into_iter().collect()
}

/// An iterator over batches of a file's rows, with some of its columns.
#[derive(Debug)]
pub(super) struct Rows {
    path: PathBuf,
    reader: ParquetRecordBatchReader,
    columns: &'static [Column],
    schema: SchemaRef,
    first_row: usize,
}

/// Opens a file and checks that it has `columns`.
///
/// # Errors
///
/// [`Error::Io`] or [`Error::Fault`] if the file cannot be read, or if a column is missing or has another type.
pub(super) fn open(path: &Path, columns: &'static [Column]) -> Result<Rows> {
    let damaged = |error: ParquetError| parquet_error(path, &error);
    let file = fs_err::File::open(path)?.into_parts().0;
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(damaged)?;
    let found = builder.schema().clone();
    let mut roots = Vec::new();
    for (name, kind) in columns {
        let Some((index, field)) = found.column_with_name(name) else {
            let hint = suggest(name, found.fields().iter().map(|field| field.name().as_str()));
            return Err(error::source(path, format!("it has no column `{name}`"), hint));
        };
        if !kind.accepts(field.data_type()) {
            let (found, expected) = (field.data_type(), kind.expected());
            let message = format!("column `{name}` is of type {found}, not {expected}");
            return Err(error::source(path, message, "write it as EB-NeRD publishes it"));
        }
        roots.push(index);
    }
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
    let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(damaged)?;
    Ok(Rows { path: path.to_owned(), reader, columns, schema: schema(columns), first_row: 0 })
}

/// Returns the column `name`, which must be one of the columns that were read.
pub(super) fn column<'a>(rows: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef> {
    let missing = || Error::Internal(ArrowError::SchemaError(format!("no column `{name}`")));
    rows.column_by_name(name).ok_or_else(missing)
}

/// Returns the schema of [`Rows`] with these columns.
pub(super) fn schema(columns: &[Column]) -> SchemaRef {
    raw_log::schema(columns.iter().map(|(name, kind)| (*name, kind.output())))
}

impl Iterator for Rows {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.reader.next()?;
        Some(
            batch
                .map_err(|error| parquet_error(&self.path, &ParquetError::from(error)))
                .and_then(|batch| self.convert(&batch)),
        )
    }
}

impl Rows {
    fn convert(&mut self, batch: &RecordBatch) -> Result<RecordBatch> {
        let convert = |of: &Column| self.convert_column(*of, column(batch, of.0)?);
        let columns = self.columns.iter().map(convert).collect::<Result<Vec<ArrayRef>>>()?;
        self.first_row += batch.num_rows();
        Ok(RecordBatch::try_new(self.schema.clone(), columns)?)
    }

    fn convert_column(&self, (name, kind): Column, values: &ArrayRef) -> Result<ArrayRef> {
        // An overflow is an error, not a null.
        let options = CastOptions { safe: false, ..CastOptions::default() };
        let cast = cast_with_options(values, &kind.output(), &options)
            .map_err(|error| error::source(&self.path, format!("column `{name}`: {error}"), DAMAGED))?;
        self.check((name, kind), &cast)?;
        Ok(match kind {
            Kind::Id | Kind::Time | Kind::Ids => cast,
            Kind::OptionalId => {
                let ids = cast.as_primitive::<Int64Type>();
                Arc::new(Int64Array::from_iter_values(ids.iter().map(Option::unwrap_or_default)))
            }
            Kind::Attribute => {
                let ids = cast.as_primitive::<Int64Type>().iter();
                Arc::new(Int64Array::from_iter_values(ids.map(|id| id.map_or(0, |id| id + 1))))
            }
        })
    }

    /// Checks the values of a converted column: nulls only if they are allowed, and numbers within their range.
    fn check(&self, (name, kind): Column, cast: &ArrayRef) -> Result<()> {
        let wrong = |row: usize, message: &str| Err(self.wrong_value(name, row, message));
        let first_null = |values: &ArrayRef| (0..values.len()).find(|row| values.is_null(*row));
        let may_be_null = matches!(kind, Kind::OptionalId | Kind::Attribute);
        if let Some(row) = first_null(cast).filter(|_| !may_be_null) {
            return wrong(row, "it is null");
        }
        let lists = cast.as_list_opt::<i32>();
        let items = lists.map_or(cast, |lists| lists.values());
        let row_of = |item: usize| match lists {
            Some(lists) => lists.value_offsets().partition_point(|offset| *offset as usize <= item) - 1,
            None => item,
        };
        if let Some(item) = first_null(items).filter(|_| lists.is_some()) {
            return wrong(row_of(item), "an id in the list is null");
        }
        let Some(ids) = items.as_primitive_opt::<Int64Type>() else { return Ok(()) };
        let is_high = |id: i64| kind == Kind::Attribute && id >= LAST_ATTRIBUTE_ID;
        match ids.iter().position(|id| id.is_some_and(|id| id < 0 || is_high(id))) {
            None => Ok(()),
            Some(at) if ids.value(at) < 0 => wrong(row_of(at), &format!("{} is negative", ids.value(at))),
            Some(at) => wrong(row_of(at), &format!("{} is not below {LAST_ATTRIBUTE_ID}", ids.value(at))),
        }
    }

    /// Returns an error about a row of the current batch. Rows are counted from 1.
    fn wrong_value(&self, column: &str, row: usize, message: &str) -> Error {
        let message = format!("row {}, column `{column}`: {message}", self.first_row + row + 1);
        error::source(&self.path, message, DAMAGED)
    }
}

const DAMAGED: &str = "the file is damaged or not one of EB-NeRD's; download it again";

fn parquet_error(path: &Path, source: &ParquetError) -> Error {
    error::parquet(path, source, "the file is damaged or incomplete; download it again")
}
