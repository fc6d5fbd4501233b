//! Finds, inspects and reads the files of a log.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use onefold_base::process::catch_panic;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;

use crate::sources::{folders, int96_as_micros, is_table, local_paths};
use crate::{Error, Result};

/// The target size of a decoded batch, in bytes.
const BATCH_BYTES: u64 = 8 << 20;

/// A log of Parquet files with the same columns.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) files: Vec<LogFile>,
    /// The columns of the first file, nullable if they are nullable in any file, then the columns from `name=value`
    /// folders.
    pub(super) schema: SchemaRef,
    pub(super) rows: u64,
    pub(super) bytes: u64,
    batch_rows: usize,
}

/// A file of a log.
#[derive(Debug)]
pub(super) struct LogFile {
    pub(super) path: PathBuf,
    bytes: u64,
    rows: u64,
    /// The number of values in all columns.
    values: u64,
    schema: SchemaRef,
    /// The values of the columns from folders.
    folder_values: Vec<Option<String>>,
}

impl Log {
    /// Finds the files that `patterns` match, and opens them as a log.
    pub(super) fn find(patterns: &[PathBuf]) -> Result<Self> {
        let (mut files, mut seen) = (Vec::new(), HashSet::new());
        for pattern in patterns {
            for file in expand(pattern)? {
                if !seen.insert(fs_err::canonicalize(&file)?) {
                    let message = "the file is given twice, and so would be its rows".to_owned();
                    return Err(wrong(&file, message, "give patterns that do not overlap"));
                }
                files.push(file);
            }
        }
        let mut log = Self::open(files)?;
        log.add_folder_columns()?;
        Ok(log)
    }

    /// Adds the columns from the files' `name=value` folders, as text. If the files have a column with the same name,
    /// the folder is ignored.
    fn add_folder_columns(&mut self) -> Result<()> {
        let folders_of = |file: &LogFile| -> BTreeMap<String, Option<String>> {
            // The innermost of several folders with one name is used.
            let mut folders: BTreeMap<_, _> = folders(&file.path.to_string_lossy()).into_iter().collect();
            folders.retain(|name, _| self.schema.field_with_name(name).is_err());
            folders
        };
        let values: Vec<_> = self.files.iter().map(folders_of).collect();
        if let Some(other) = values.iter().position(|folders| !folders.keys().eq(values[0].keys())) {
            let shown = |file: usize| match values[file].is_empty() {
                true => "none".to_owned(),
                false => values[file].keys().map(|name| format!("`{name}=`")).collect::<Vec<_>>().join(", "),
            };
            let message = format!(
                "its folders make other columns ({}) than those of `{}` ({})",
                shown(other),
                self.files[0].path.display(),
                shown(0)
            );
            return Err(wrong(&self.files[other].path, message, "give all files folders of the same names"));
        }
        let mut fields = self.schema.fields().to_vec();
        fields.extend(values[0].keys().map(|name| Arc::new(Field::new(name, DataType::Utf8, true))));
        self.schema = Arc::new(Schema::new_with_metadata(fields, self.schema.metadata().clone()));
        for (file, values) in self.files.iter_mut().zip(values) {
            file.folder_values = values.into_values().collect();
        }
        Ok(())
    }

    /// Opens a log of these files. `paths` must not be empty.
    pub(super) fn open(paths: Vec<PathBuf>) -> Result<Self> {
        let files = paths.into_iter().map(LogFile::open).collect::<Result<Vec<_>>>()?;
        let schema = common_schema(&files)?;
        let rows = files.iter().map(|file| file.rows).sum();
        let values: u64 = files.iter().map(|file| file.values).sum();
        let row_bytes = 8 * values / u64::max(rows, 1);
        let batch_rows = (BATCH_BYTES / row_bytes.max(1)).clamp(16, 32 << 10) as usize;
        Ok(Self { bytes: files.iter().map(|file| file.bytes).sum(), files, schema, rows, batch_rows })
    }

    /// Passes the batches of the log to `take`, file by file, until `take` returns `false`. Passes an error as the last
    /// item.
    pub(super) fn read(&self, mut take: impl FnMut(Result<RecordBatch>) -> bool) {
        for file in &self.files {
            match file.read(&self.schema, self.batch_rows, &mut take) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    take(Err(error));
                    return;
                }
            }
        }
    }
}

impl LogFile {
    fn open(path: PathBuf) -> Result<Self> {
        let file = fs_err::File::open(&path)?;
        let bytes = file.metadata()?.len();
        let builder = catch_panic(|| reader(file.into_file()).map_err(|error| error.to_string()));
        let builder = builder.map_err(|error| {
            let hint = "the file is truncated, damaged or of another format; write it again";
            wrong(&path, format!("not a whole Parquet file: {error}"), hint)
        })?;
        let groups = builder.metadata().row_groups();
        let count = |number: i64| u64::try_from(number).unwrap_or(0);
        Ok(Self {
            bytes,
            rows: groups.iter().map(|group| count(group.num_rows())).sum(),
            values: groups.iter().flat_map(|group| group.columns()).map(|c| count(c.num_values())).sum(),
            schema: Arc::clone(builder.schema()),
            folder_values: Vec::new(),
            path,
        })
    }

    /// Passes the batches of the file to `take`. Returns whether all batches were taken.
    fn read(
        &self,
        schema: &SchemaRef,
        batch_rows: usize,
        take: &mut impl FnMut(Result<RecordBatch>) -> bool,
    ) -> Result<bool> {
        let damaged = |error: String| {
            let hint = "the file is damaged or was changed while it was read; write it again";
            wrong(&self.path, format!("it cannot be decoded: {error}"), hint)
        };
        let file = fs_err::File::open(&self.path)?.into_file();
        // Decoders may panic on damaged bytes.
        let batches = catch_panic(|| {
            let batches = reader(file).and_then(|builder| builder.with_batch_size(batch_rows).build());
            batches.map_err(|error| error.to_string())
        });
        let mut batches = batches.map_err(damaged)?;
        loop {
            let batch = catch_panic(|| batches.next().transpose().map_err(|error| error.to_string()));
            match batch.map_err(damaged)? {
                None => return Ok(true),
                Some(batch) => {
                    let batch = with_schema(&batch, schema, &self.folder_values);
                    if !take(Ok(batch.map_err(|error| damaged(error.to_string()))?)) {
                        return Ok(false);
                    }
                }
            }
        }
    }
}

/// Opens a reader of a file. Times of type INT96 are read in microseconds.
fn reader(file: File) -> Result<ParquetRecordBatchReaderBuilder<File>, ParquetError> {
    let metadata = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())?;
    let metadata = match int96_as_micros(metadata.metadata(), metadata.schema()) {
        None => metadata,
        Some(columns) => {
            let options = ArrowReaderOptions::new().with_schema(columns);
            ArrowReaderMetadata::try_new(Arc::clone(metadata.metadata()), options)?
        }
    };
    Ok(ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata))
}

/// Returns `data_type` with 32-bit keys in dictionaries with narrower keys, because several files together can have
/// more values than such keys can number.
fn with_wide_keys(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Dictionary(keys, values) if keys.primitive_width().is_some_and(|bytes| bytes < 4) => {
            DataType::Dictionary(Box::new(DataType::Int32), values.clone())
        }
        DataType::List(item) => {
            let item_type = with_wide_keys(item.data_type());
            DataType::List(Arc::new(Field::clone(item).with_data_type(item_type)))
        }
        other => other.clone(),
    }
}

/// Returns the columns of `batch` in the order and with the nested names of `schema`, followed by columns of these
/// `folder_values`.
fn with_schema(
    batch: &RecordBatch,
    schema: &SchemaRef,
    folder_values: &[Option<String>],
) -> Result<RecordBatch, arrow::error::ArrowError> {
    let column = |field: &Arc<Field>| {
        let column = batch.column(batch.schema_ref().index_of(field.name())?);
        // The cast is free if only nested names differ.
        if column.data_type() == field.data_type() {
            Ok(Arc::clone(column))
        } else {
            cast(column, field.data_type())
        }
    };
    let in_file = &schema.fields()[..schema.fields().len() - folder_values.len()];
    let mut columns = in_file.iter().map(column).collect::<Result<Vec<_>, arrow::error::ArrowError>>()?;
    columns.extend(folder_values.iter().map(|value| -> ArrayRef {
        match value {
            Some(value) => Arc::new(StringArray::from_iter_values(iter::repeat_n(value, batch.num_rows()))),
            None => new_null_array(&DataType::Utf8, batch.num_rows()),
        }
    }));
    RecordBatch::try_new(Arc::clone(schema), columns)
}

/// Returns the columns of all files: those of the first file, nullable if they are nullable in any file.
fn common_schema(files: &[LogFile]) -> Result<SchemaRef> {
    let first = &files[0];
    let wide = |field: &Arc<Field>| Field::clone(field).with_data_type(with_wide_keys(field.data_type()));
    let mut fields: Vec<Field> = first.schema.fields().iter().map(wide).collect();
    if let Some(name) = fields.iter().map(Field::name).find(|name| is_repeated(&first.schema, name)) {
        let hint = "give every column a name of its own";
        return Err(wrong(&first.path, format!("it has two columns `{name}`"), hint));
    }
    for file in &files[1..] {
        if let Some(name) = different_column(&first.schema, &file.schema) {
            let type_in = |file: &LogFile| {
                let field = file.schema.field_with_name(&name);
                field.map_or_else(|_| "missing".to_owned(), |field| field.data_type().to_string())
            };
            let message = format!(
                "its column `{name}` is {}, in `{}` it is {}",
                type_in(file),
                first.path.display(),
                type_in(first)
            );
            let hint = "shard files with other columns by themselves, or write them with the same columns";
            return Err(wrong(&file.path, message, hint));
        }
        for field in &mut fields {
            let other = file.schema.field_with_name(field.name());
            let nullable = field.is_nullable() || other.is_ok_and(Field::is_nullable);
            field.set_nullable(nullable);
        }
    }
    Ok(Arc::new(Schema::new_with_metadata(fields, first.schema.metadata().clone())))
}

fn is_repeated(schema: &Schema, name: &str) -> bool {
    schema.fields().iter().filter(|field| field.name() == name).count() > 1
}

/// Returns the first column that only one of the files has, or that has different types.
fn different_column(first: &Schema, other: &Schema) -> Option<String> {
    let in_both = |field: &&Arc<Field>| match (
        other.field_with_name(field.name()),
        first.field_with_name(field.name()),
    ) {
        (Ok(a), Ok(b)) => {
            with_wide_keys(a.data_type()).equals_datatype(&with_wide_keys(b.data_type()))
                && !is_repeated(other, field.name())
        }
        _ => false,
    };
    let mut fields = first.fields().iter().chain(other.fields());
    fields.find(|field| !in_both(field)).map(|field| field.name().clone())
}

/// Returns the files that `pattern` matches, in the order of their names.
fn expand(pattern: &Path) -> Result<Vec<PathBuf>> {
    if pattern.is_file() {
        return Ok(vec![pattern.to_owned()]);
    }
    if is_table(pattern) {
        let message = "it is a Delta Lake table, of which `shard` cannot tell the files of one version";
        let hint = "build the table without `shard`, as the source `{ delta = … }`, or give the files of one version";
        return Err(wrong(pattern, message.to_owned(), hint));
    }
    let hint = "give Parquet files, folders that hold some, or globs such as `logs/*.parquet`";
    let files = local_paths(Path::new(""), &pattern.to_string_lossy());
    let files = files.map_err(|(path, (message, _))| wrong(&path, message, hint))?;
    if files.is_empty() {
        return Err(wrong(pattern, "there is no such file".to_owned(), hint));
    }
    Ok(files.into_iter().collect())
}

/// Returns the error for a file or pattern.
pub(super) fn wrong(path: &Path, message: String, hint: &str) -> Error {
    Error::data(format!("`{}`", path.display()), message, hint)
}
