//! Inspects a file before the query runs: its columns, its number of rows, and the columns made from its folders.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::datasource::physical_plan::parquet::Int96Coercer;
use datafusion::datasource::physical_plan::parquet::metadata::DFParquetMetadata;
use datafusion::error::DataFusionError;
use object_store::{ObjectStoreExt, path::Path};
use onefold_datasets::suggest;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::file::metadata::ParquetMetaData;

use super::files::{FileError, FoundFile};
use super::formats;
use super::formats::{Dialect, engine_compression};
use super::head::read_head;
use super::stores::{SourceStore, VersionedStore};
use super::text_store::TextStore;
use crate::config::{Compression, Format, Ragged, SourceConfig};
use crate::error::MessageAndHint;

/// The number of bytes that are requested at the end of a Parquet file. Most footers fit, so one request is usually
/// enough.
const FOOTER_BYTES: usize = 64 << 10;

/// The result of reading a file's footer or first rows.
#[derive(Debug)]
pub(super) struct Inspection {
    pub(super) schema: SchemaRef,
    /// The number of rows in the file, if its footer states it.
    pub(super) rows: Option<u64>,
    /// The number of rows to which [`decoded_bytes`](Self::decoded_bytes) refers.
    pub(super) counted_rows: u64,
    /// The decoded size of the counted rows in bytes, with 8 bytes for each number in columns and lists.
    pub(super) decoded_bytes: u64,
}

/// A file that was found and inspected.
#[derive(Debug)]
pub(super) struct SourceFile {
    pub(super) found: FoundFile,
    pub(super) store: Arc<SourceStore>,
    pub(super) dialect: Dialect,
    pub(super) compression: Compression,
    pub(super) inspection: Inspection,
    /// The values of the columns that are made from the folders of the source.
    pub(super) values: Vec<ScalarValue>,
}

impl SourceFile {
    /// Leaves out columns of the file, whose values are known from elsewhere.
    pub(super) fn leave_out(&mut self, columns: &[(String, DataType)]) {
        let is_known = |field: &&Arc<Field>| columns.iter().any(|(name, _)| name == field.name());
        let fields = self.inspection.schema.fields().iter().filter(|field| !is_known(field));
        self.inspection.schema = Arc::new(Schema::new(fields.cloned().collect::<Vec<_>>()));
    }
}

/// Reads a file's footer or first rows.
///
/// # Errors
///
/// A message and a hint if the file cannot be read, is empty or incomplete, or has another format.
pub(super) async fn inspect(
    config: &SourceConfig,
    found: &FoundFile,
    source_store: &Arc<SourceStore>,
    dialect: Dialect,
    compression: Compression,
) -> Result<Inspection, MessageAndHint> {
    if dialect.format == Format::Parquet {
        if compression != Compression::None {
            let hint = "unpack the file, or set `compression = \"none\"` if only its name says so";
            return Err((
                "a Parquet file is not read from within another compression".to_owned(),
                hint.to_owned(),
            ));
        }
        if !config.schema.is_empty() {
            let hint = "remove `schema`; use `CAST` in the query for another type";
            return Err((
                "a Parquet file has its own types, and `schema` gives others".to_owned(),
                hint.to_owned(),
            ));
        }
        return read_footer(found, source_store, config.row_number.is_some()).await;
    }
    let list = config.schema.iter().find(|(_, data_type)| data_type.is_nested());
    if let (Format::Csv, Some((column, _))) = (dialect.format, list) {
        let hint = format!(
            "give it as \"VARCHAR\" and split it in the query: `CAST(string_to_array({column}, ' ') AS BIGINT[])`"
        );
        return Err((format!("`schema` makes the column `{column}` a list, which CSV does not have"), hint));
    }
    if found.meta.size == 0 {
        let hint = "it was not written, or not yet; write it, or delete it if it has no rows";
        return Err(("the file is empty".to_owned(), hint.to_owned()));
    }
    let store = TextStore::new(Arc::clone(source_store), engine_compression(compression));
    let opened = store.get(&found.meta.location).await.map_err(|error| source_store.explain(&error))?;
    // Without a header, `schema` defines which rows are ragged. If ragged rows are an error, the first row is
    // compared with `schema` below.
    let declared = !dialect.header && !config.schema.is_empty() && dialect.ragged != Ragged::Error;
    let columns = declared.then_some(config.schema.len());
    let head = read_head(opened.into_stream(), dialect, columns).await;
    let head = head.map_err(|error| source_store.failure(&found.meta.location).unwrap_or(error))?;
    let schema = head.infer(dialect)?;
    let schema =
        if dialect.format == Format::Csv && !dialect.header { named(config, schema)? } else { schema };
    Ok(Inspection {
        schema: Arc::new(schema),
        rows: None,
        counted_rows: head.data_rows(dialect),
        decoded_bytes: head.decoded_bytes(dialect),
    })
}

/// Names the columns of a CSV file without a header as in `schema`, by position.
fn named(config: &SourceConfig, inferred: Schema) -> Result<Schema, MessageAndHint> {
    if config.schema.is_empty() {
        return Ok(inferred);
    }
    let (given, found) = (config.schema.len(), inferred.fields().len());
    if given != found {
        let message = format!("it has {found} columns without a header, and `schema` has {given}");
        return Err((message, "give every column of the file, in its order, under `schema`".to_owned()));
    }
    let fields = config.schema.iter().map(|(name, data_type)| Field::new(name, data_type.clone(), true));
    Ok(Schema::new(fields.collect::<Vec<_>>()))
}

/// Reads a Parquet file's footer, so that a damaged file is reported before any work is done. If rows are
/// `numbered`, the ordinals of the row groups must match their positions, because the reader relies on them.
async fn read_footer(
    found: &FoundFile,
    source_store: &Arc<SourceStore>,
    numbered: bool,
) -> Result<Inspection, MessageAndHint> {
    let not_whole = |error: &dyn std::fmt::Display| {
        let hint = "the file is truncated, damaged or of another format; write it again";
        (format!("not a whole Parquet file: {error}"), hint.to_owned())
    };
    let store = VersionedStore::new(source_store);
    let metadata = DFParquetMetadata::new(&store, &found.meta).with_metadata_size_hint(Some(FOOTER_BYTES));
    let metadata = metadata.fetch_metadata().await.map_err(|error| match error.find_root() {
        DataFusionError::ObjectStore(cause) => source_store.explain(cause),
        DataFusionError::ParquetError(cause) => not_whole(cause),
        _ => not_whole(&error.strip_backtrace()),
    })?;
    let mut groups = metadata.row_groups().iter().enumerate();
    if numbered
        && !groups.all(|(place, group)| group.ordinal().is_some_and(|n| usize::try_from(n) == Ok(place)))
    {
        let message =
            "its row groups have numbers that are not those of their order, so its rows cannot be numbered";
        return Err((message.to_owned(), "write the file again, or remove `row_number`".to_owned()));
    }
    let footer = ArrowReaderMetadata::try_new(metadata.clone(), ArrowReaderOptions::new());
    let footer = footer.map_err(|error| not_whole(&error))?;
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    let values: i64 = columns.map(|column| column.num_values().max(0)).fold(0, i64::saturating_add);
    let rows = u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0);
    let schema = int96_as_micros(&metadata, footer.schema());
    let fields = schema.as_ref().unwrap_or(footer.schema()).fields().iter();
    let schema =
        Schema::new(fields.map(|field| field.as_ref().clone().with_metadata([].into())).collect::<Vec<_>>());
    Ok(Inspection {
        schema: Arc::new(schema),
        rows: Some(rows),
        counted_rows: rows,
        decoded_bytes: 8 * u64::try_from(values).unwrap_or(0),
    })
}

/// Returns the columns of a Parquet file with INT96 times, read in microseconds instead of nanoseconds, which
/// cannot represent times after 2262; `None` for files without INT96 columns.
fn int96_as_micros(metadata: &ParquetMetaData, columns: &SchemaRef) -> Option<SchemaRef> {
    let file = metadata.file_metadata().schema_descr();
    Int96Coercer::new(file, columns, &TimeUnit::Microsecond).coerce().map(Arc::new)
}

/// Determines the dialect of a file whose name does not define its format. The file must be Parquet, which its
/// first bytes show.
///
/// # Errors
///
/// A message and a hint if the file is not Parquet or cannot be read.
pub(super) async fn dialect_by_content(
    config: &SourceConfig,
    found: &FoundFile,
    source_store: &Arc<SourceStore>,
) -> Result<Dialect, MessageAndHint> {
    if first_bytes(source_store, &found.meta.location, found.meta.size).await? == *b"PAR1" {
        return Ok(Dialect::of_format(Format::Parquet, config, formats::NameEndings::default()));
    }
    let hint = "set the source's `format` to \"parquet\", \"csv\" or \"json\", or name files `.parquet`, `.csv`, `.tsv`, \
                `.json`, `.jsonl` or `.ndjson`";
    Err(("its name does not say its format, and it is not a whole Parquet file".to_owned(), hint.to_owned()))
}

async fn first_bytes(
    source_store: &Arc<SourceStore>,
    location: &Path,
    size: u64,
) -> Result<Vec<u8>, MessageAndHint> {
    if size == 0 {
        return Ok(Vec::new());
    }
    let bytes = VersionedStore::new(source_store).get_range(location, 0..size.min(4)).await;
    bytes.map(|bytes| bytes.to_vec()).map_err(|error| source_store.explain(&error))
}

/// Returns the columns that are made from the `name=value` folders of the files. A column of that name in the files
/// takes precedence.
///
/// # Errors
///
/// The first file, by name, whose folders have other names than those of the first file; a declared column without
/// a folder, or with a column of its name in the files.
pub(super) fn folder_columns(
    source: &str,
    config: &SourceConfig,
    files: &[SourceFile],
) -> Result<Fields, FileError> {
    let names = |file: &SourceFile| -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (name, _) in &file.found.folders {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    };
    let first = &files[0];
    let mut columns = names(first);
    if let Some(other) = files.iter().find(|file| names(file) != columns) {
        let shown = |names: Vec<String>| match names.is_empty() {
            true => "none".to_owned(),
            false => names.iter().map(|name| format!("`{name}=`")).collect::<Vec<_>>().join(", "),
        };
        let message = format!(
            "its folders make other columns ({}) than those of `{}` ({})",
            shown(names(other)),
            first.found.name.display(),
            shown(columns)
        );
        let hint = "narrow the path, or give all files folders of the same names";
        return Err((other.found.name.clone(), (message, hint.to_owned())));
    }
    for (declared, _) in &config.partition_columns {
        let wrong = |message| {
            let hint = suggest(declared, columns.iter().map(String::as_str));
            let hint = format!("correct `partition_columns` under `[sources].{source}`: {hint}");
            (first.found.name.clone(), (message, hint))
        };
        if !columns.contains(declared) {
            return Err(wrong(format!("it is in no folder `{declared}=…`")));
        }
        if files.iter().any(|file| file.inspection.schema.field_with_name(declared).is_ok()) {
            return Err(wrong(format!("the column `{declared}` is in the files and in their folders")));
        }
    }
    columns.retain(|name| files.iter().all(|file| file.inspection.schema.field_with_name(name).is_err()));
    let field = |name: String| {
        let declared = config.partition_columns.iter().find(|(declared, _)| *declared == name);
        Field::new(name, declared.map_or(DataType::Utf8, |(_, data_type)| data_type.clone()), true)
    };
    Ok(columns.into_iter().map(field).collect())
}

/// Returns the columns of file names and file numbers that the configuration requests.
pub(super) fn file_columns(config: &SourceConfig) -> impl Iterator<Item = Arc<Field>> {
    let name = config.file_name.as_ref().map(|name| Field::new(name, DataType::Utf8, false));
    let number = config.file_number.as_ref().map(|name| Field::new(name, DataType::Int64, false));
    name.into_iter().chain(number).map(Arc::new)
}

/// Returns the values of the [`file_columns`] of file number `number`. `base` is the folder of the configuration.
pub(super) fn file_values(
    config: &SourceConfig,
    base: &std::path::Path,
    file: &FoundFile,
    number: usize,
) -> impl Iterator<Item = ScalarValue> {
    let name = file.name.to_string_lossy();
    let name = match file.name.strip_prefix(base) {
        Ok(below) if !name.contains("://") => below.to_string_lossy(),
        _ => name,
    };
    let name = config.file_name.as_ref().map(|_| ScalarValue::from(&*name));
    let number = config.file_number.as_ref().map(|_| ScalarValue::from(number as i64));
    name.into_iter().chain(number)
}

/// Checks that no file or folder has a column with the name of a made column.
///
/// # Errors
///
/// The first file, by name, with such a column.
pub(super) fn check_made_columns(
    source: &str,
    config: &SourceConfig,
    columns: &Schema,
    folders: &Fields,
    files: &[SourceFile],
) -> Result<(), FileError> {
    for (key, made) in config.made_columns() {
        if columns.field_with_name(made).is_err() && !folders.iter().any(|folder| folder.name() == made) {
            continue;
        }
        let has = |file: &&SourceFile| file.inspection.schema.field_with_name(made).is_ok();
        let file = files.iter().find(has).unwrap_or(&files[0]);
        let message = format!("it has a column `{made}` of its own, and `{key}` gives that name to another");
        let hint = format!("give `{key}` under `[sources].{source}` a name that no column has");
        return Err((file.found.name.clone(), (message, hint)));
    }
    Ok(())
}

/// Returns the values of a file's folders, with the types of their columns.
///
/// # Errors
///
/// An error if a value does not have the declared type.
pub(super) fn folder_values(columns: &Fields, file: &FoundFile) -> Result<Vec<ScalarValue>, FileError> {
    let value = |column: &Arc<Field>| {
        // If several folders have the same name, the innermost one counts.
        let text = file.folders.iter().rev().find(|(name, _)| name == column.name());
        let text = text.and_then(|(_, value)| value.clone());
        ScalarValue::Utf8(text.clone()).cast_to(column.data_type()).map_err(|_| {
            let folder = format!("{}={}", column.name(), text.unwrap_or_default());
            let message =
                format!("the value of its folder `{folder}` cannot be read as {}", column.data_type());
            let hint = "correct `partition_columns`, or rename the folder";
            (file.name.clone(), (message, hint.to_owned()))
        })
    };
    columns.iter().map(value).collect()
}
