//! Finds and inspects the files of the raw logs, and registers them with DataFusion.
//!
//! ```text
//! [sources] ─▶ find files ─────────▶ footers, first rows ───▶ one schema ─▶ tables of the engine
//!              files, listing, stores  inspect, head, formats   schema        table, naming, text, text_store, csv, exact
//!              delta
//! ```
//!
//! The log of a Delta Lake table lists its files, which are then read like other Parquet files.
//!
//! Before the query runs, each file is checked as far as possible: it must exist, be complete and have the right
//! format. A column whose type does not fit that of other files is an error only if the query reads it. While the
//! query runs, each file is read in the version that was found, and an error names the file in which it occurred.

mod csv;
#[cfg_attr(not(feature = "delta"), path = "no_delta.rs")]
mod delta;
mod exact;
mod files;
mod formats;
mod head;
mod inspect;
mod listing;
mod naming;
mod refused;
mod schema;
mod segments;
mod sent;
mod stores;
mod table;
mod text;
mod text_store;

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::common::ScalarValue;
use datafusion::dataframe::DataFrame;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::parquet::transform_schema_to_view;
use datafusion::datasource::table_schema::TableSchema;
use datafusion::logical_expr::{Expr, cast, lit};
use datafusion::prelude::{SessionContext, ident};
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;
use onefold_base::fault::{Explain as _, Fault, Kind};
use onefold_datasets::TableVersion;
use xxhash_rust::xxh3::xxh3_64;

use self::files::{FileError, FileName, FoundFile};
pub(crate) use self::files::{is_table, local_paths};
use self::formats::{Dialect, endings_of, engine_compression};
use self::head::damaged_hint;
use self::inspect::SourceFile;
use self::refused::refused_column;
pub(crate) use self::refused::{function as refused_function, planned};
use self::schema::{FileColumns, Refused};
pub(crate) use self::segments::{SEGMENTS_FILE, check_segments, segment_name, segment_of};
pub(crate) use self::sent::SentScan;
use self::stores::{SourceStore, Stores, VersionedStore};
use self::table::FileTable;
use self::text::toml_key;
use self::text_store::{SkippedRows, TextStore};
use crate::config::{Compression, Config, Format, ObjectStores, SourceConfig};
use crate::error::{Error, MessageAndHint, Result};
use crate::problems::Problems;

/// The number of files that are inspected at the same time.
const FILES_AT_A_TIME: usize = 16;
/// The maximum number of files for which [`file_hashes`] returns one hash per file.
const MOST_HASHES: usize = 1024;
/// The hint for a path that matches no file.
const PATH_HINT: &str = "correct the path; under `[sources]` it is relative to the configuration file, and a path that is \
                         given in its place is relative to the working directory";

/// One table of raw logs.
#[derive(Debug)]
pub(crate) struct Source {
    name: String,
    files: Vec<SourceFile>,
    /// The merged columns of all files.
    columns: SchemaRef,
    /// The columns that cannot be read from some files.
    refused: Refused,
    /// The columns that are made from the folders and names of the files.
    folders: Fields,
    /// The name of the column with row numbers, if there is one.
    row_number: Option<String>,
    /// The columns of text files whose types are given in the configuration.
    declared: Arc<[String]>,
    /// The counts of CSV rows that were left out.
    skipped: Arc<SkippedRows>,
    /// Collects problems of the source's files.
    problems: Problems,
    /// The version of the table that lists the files, if a table does.
    table: Option<TableVersion>,
}

/// The files of a source before they are inspected, with their stores.
type FoundFiles = Vec<(FoundFile, Arc<SourceStore>)>;

/// A version of a Delta Lake table.
#[derive(Debug)]
#[cfg_attr(not(feature = "delta"), allow(dead_code))]
struct FoundTable {
    version: TableVersion,
    /// The columns whose values the log of the table states, with their types.
    partition_columns: Vec<(String, DataType)>,
    /// The other columns of the table.
    columns: Vec<Field>,
}

impl FoundTable {
    /// Returns the settings for reading the files of the table.
    fn settings(&self, source: &SourceConfig) -> SourceConfig {
        SourceConfig {
            format: Some(Format::Parquet),
            compression: Some(Compression::None),
            partition_columns: self.partition_columns.clone(),
            ..source.clone()
        }
    }
}

/// Finds the files of each source of `config` and reads their footers or first rows. Problems that are found in the
/// files later are added to `problems`, too.
///
/// # Errors
///
/// [`Error::Fault`] if a path matches no file or cannot be read, a file is incomplete or has the wrong format, or a
/// file has two columns with the same name.
pub(crate) async fn find(config: &Config, problems: &Problems) -> Result<Vec<Source>> {
    let base = config.path.parent().unwrap_or(Path::new(""));
    let mut stores = Stores::default();
    let mut sources = Vec::new();
    for (name, source) in &config.sources {
        match find_one(base, name, source, (&mut stores, &config.object_stores)).await {
            Ok(source) => {
                source.check_place(config).or_else(|error| problems.report(error))?;
                sources.push(Source { problems: problems.clone(), ..source });
            }
            Err(errors) => errors.into_iter().try_for_each(|error| problems.report(error))?,
        }
    }
    // A source whose files were not found has no columns, so the following steps cannot run.
    problems.check()?;
    Ok(sources)
}

/// Finds the files at `paths` (files, directories, glob patterns, or URLs of these) and reads their footers or first
/// rows, as the files of a source `name` with default settings.
pub(crate) async fn find_paths(name: &str, paths: &[String]) -> Result<Source> {
    let source = SourceConfig { paths: paths.to_vec(), ..SourceConfig::new("") };
    find_source(Path::new(""), name, &source, Problems::default()).await
}

/// Finds the files of one source, whose relative paths start at `base`, like [`find`].
pub(crate) async fn find_source(
    base: &Path,
    name: &str,
    source: &SourceConfig,
    problems: Problems,
) -> Result<Source> {
    let stores = (&mut Stores::default(), &ObjectStores::default());
    match find_one(base, name, source, stores).await {
        Ok(source) => Ok(Source { problems, ..source }),
        // There is at least one error if the source is not found.
        Err(mut errors) => Err(errors.swap_remove(0)),
    }
}

/// Finds the files of one source, whose relative paths start at `base`, and inspects them. Returns all errors.
async fn find_one(
    base: &Path,
    name: &str,
    source: &SourceConfig,
    (stores, settings): (&mut Stores, &ObjectStores),
) -> Result<Source, Vec<Error>> {
    let found = match &source.delta {
        Some(delta) => {
            let table = delta::find(base, (name, source, delta), (stores, settings)).await;
            table.map(|(files, table)| (files, Some(table)))
        }
        None => expand(base, name, source, (stores, settings)).await.map(|files| (files, None)),
    };
    let (files, table) = found.map_err(|error| vec![error])?;
    let as_files = table.as_ref().map(|table| table.settings(source));
    let error = |(path, (message, hint)): FileError| Error::source(name, &path, message, hint);
    let inspected = inspect_files(base, name, as_files.as_ref().unwrap_or(source), files).await;
    let inspected = inspected.map_err(|wrong| wrong.into_iter().map(error).collect::<Vec<_>>())?;
    Ok(match table {
        Some(table) => inspected.of_table(table),
        None => inspected,
    })
}

/// Returns the files of a source without duplicates, sorted by name.
async fn expand(
    base: &Path,
    name: &str,
    source: &SourceConfig,
    (stores, settings): (&mut Stores, &ObjectStores),
) -> Result<FoundFiles> {
    let wrong = |path: PathBuf, (message, hint): MessageAndHint| Error::source(name, &path, message, hint);
    let mut found: BTreeMap<(String, String), (FoundFile, Arc<SourceStore>)> = BTreeMap::new();
    for path in &source.paths {
        let (files, store, shown) = if path.contains("://") && !path.starts_with("file://") {
            let shown = PathBuf::from(path);
            let (store, pattern) =
                stores.open(path, settings).map_err(|error| wrong(shown.clone(), error))?;
            let objects = listing::expand(&store, pattern).await.map_err(|error| {
                Error::from(Fault { kind: Kind::Storage, ..wrong(shown.clone(), error).fault() })
            })?;
            let files = objects.into_iter().map(|meta| FoundFile {
                name: PathBuf::from(format!("{}/{}", store.url, meta.location)),
                folders: files::folders(meta.location.as_ref()),
                meta,
            });
            (files.collect(), store, shown)
        } else {
            let path = match path.starts_with("file://") {
                true => files::path_of_url(path).map_err(|error| wrong(PathBuf::from(path), error))?,
                false => path.clone(),
            };
            let files = files::local(base, &path).await.map_err(|(place, error)| wrong(place, error))?;
            (files, Arc::clone(&stores.local), base.join(path))
        };
        if files.is_empty() {
            let message = if shown.is_dir() { "the folder has no files" } else { "there is no such file" };
            return Err(wrong(shown, (message.to_owned(), PATH_HINT.to_owned())));
        }
        for file in files {
            store.found(&file.meta);
            let key = (store.engine_url.to_string(), file.meta.location.to_string());
            found.entry(key).or_insert_with(|| (file, Arc::clone(&store)));
        }
    }
    let mut found: Vec<_> = found.into_values().collect();
    found.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    Ok(found)
}

/// Reads the footers or first rows of the files and combines them into one source. The error lists all files that
/// cannot be read.
async fn inspect_files(
    base: &Path,
    name: &str,
    config: &SourceConfig,
    found: FoundFiles,
) -> Result<Source, Vec<FileError>> {
    let inspections = stream::iter(found).map(|(found, store)| async move {
        let path = found.name.clone();
        let file = AssertUnwindSafe(inspect_file(config, found, store)).catch_unwind();
        // Decoders panic on some damaged bytes.
        let file =
            file.await.unwrap_or_else(|_| Err(("its footer cannot be decoded".to_owned(), damaged_hint())));
        file.map_err(|error| (path, error))
    });
    let inspected: Vec<_> = inspections.buffered(FILES_AT_A_TIME).collect().await;
    let (mut files, mut wrong) = (Vec::with_capacity(inspected.len()), Vec::new());
    for file in inspected {
        match file {
            Ok(file) => files.push(file),
            Err(error) => wrong.push(error),
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    if config.delta.is_some() {
        files.iter_mut().for_each(|file| file.leave_out(&config.partition_columns));
    }
    let alone = |error: FileError| vec![error];
    let format = one_format(&files).map_err(alone)?;
    let folders = inspect::folder_columns(name, config, &files).map_err(alone)?;
    for (number, file) in files.iter_mut().enumerate() {
        file.values = inspect::folder_values(&folders, &file.found).map_err(alone)?;
        file.values.extend(inspect::file_values(config, base, &file.found, number));
    }
    let columns: Vec<FileColumns> = files
        .iter()
        .map(|file| FileColumns {
            name: file.found.name.clone(),
            schema: file.inspection.schema.clone(),
            folders: file.found.folders.iter().map(|(name, _)| name.clone()).collect(),
        })
        .collect();
    let (mut columns, refused) = schema::merge(name, config, format, &columns).map_err(alone)?;
    inspect::check_made_columns(name, config, &columns, &folders, &files).map_err(alone)?;
    let folders = folders.iter().cloned().chain(inspect::file_columns(config)).collect();
    let row_number = config.row_number.clone();
    if format == Format::Parquet {
        // Use the types that DataFusion reads from Parquet by default: text views, which are not copied out of
        // their pages.
        columns = Arc::new(transform_schema_to_view(&columns));
    }
    let declared = config.schema.iter().map(|(name, _)| name.clone()).collect();
    let (name, skipped, problems) = (name.to_owned(), Arc::default(), Problems::default());
    Ok(Source {
        name,
        files,
        columns,
        refused,
        folders,
        row_number,
        declared,
        skipped,
        problems,
        table: None,
    })
}

async fn inspect_file(
    config: &SourceConfig,
    found: FoundFile,
    store: Arc<SourceStore>,
) -> Result<SourceFile, MessageAndHint> {
    let endings = endings_of(&found.name);
    let compression = config.compression.or(endings.compression).unwrap_or(Compression::None);
    let dialect = match Dialect::new(config, endings) {
        Some(dialect) => dialect,
        None => inspect::dialect_by_content(config, &found, &store).await?,
    };
    let inspection = inspect::inspect(config, &found, &store, dialect, compression).await?;
    Ok(SourceFile { found, store, dialect, compression, inspection, values: Vec::new() })
}

/// Returns the common format of all files.
fn one_format(files: &[SourceFile]) -> Result<Format, FileError> {
    let first = &files[0];
    match files.iter().find(|file| file.dialect.format != first.dialect.format) {
        None => Ok(first.dialect.format),
        Some(other) => {
            let message = format!(
                "its format is {:?}, that of `{}` is {:?}",
                other.dialect.format,
                first.found.name.display(),
                first.dialect.format
            );
            let hint = "narrow the path to files of one format, or make two sources and `UNION ALL` them in the query";
            Err((other.found.name.clone(), (message, hint.to_owned())))
        }
    }
}

/// Registers each source as a table of the query.
///
/// # Errors
///
/// [`Error::Fault`] if a table cannot have the source's name.
pub(crate) async fn register(context: &SessionContext, sources: &[Source]) -> Result<()> {
    for source in sources {
        let tables = source.tables(&source.files);
        for file in &source.files {
            let store = VersionedStore::new(&file.store);
            context.runtime_env().register_object_store(file.store.engine_url.as_ref(), Arc::new(store));
        }
        let whole = source.schema();
        match <[FileTable; 1]>::try_from(tables) {
            Ok([table]) if *table.schema.table_schema() == whole => {
                context.register_table(&source.name, Arc::new(table))?;
            }
            Ok([table]) => {
                context.register_table(&source.name, source.aligned(context, table)?.into_view())?;
            }
            Err(tables) => {
                let mut tables = tables.into_iter().map(|table| source.aligned(context, table));
                // There are at least two tables.
                let first = tables.next().expect("a source has files")?;
                let all = tables.try_fold(first, |all, table| Ok::<_, Error>(all.union(table?)?))?;
                context.register_table(&source.name, all.into_view())?;
            }
        }
    }
    Ok(())
}

impl Source {
    /// Returns the source of a table's files. Columns of the table that none of its files has are null.
    fn of_table(mut self, table: FoundTable) -> Self {
        let is_missing = |field: &&Field| self.columns.field_with_name(field.name()).is_err();
        let missing = table.columns.iter().filter(is_missing).cloned().map(Arc::new);
        let fields: Vec<_> = self.columns.fields().iter().cloned().chain(missing).collect();
        self.columns = Arc::new(transform_schema_to_view(&Schema::new(fields)));
        self.table = Some(table.version);
        self
    }

    /// Refuses a source of several files whose row numbers are not unique, if row order replaces times.
    fn check_place(&self, config: &Config) -> Result<()> {
        let time = &config.time;
        let is_place = config.samples.by_rows && self.row_number.as_ref() == Some(&time.column);
        match self.files.as_slice() {
            [_, second, ..] if is_place && time.file.is_none() => {
                let message = "it is not the only file, and the numbers of its rows are those of another file's rows, too";
                let hint = format!("add `file_number = \"part\"` to `[sources].{}`", self.name);
                Err(Error::source(&self.name, &second.found.name, message.to_owned(), hint))
            }
            _ => Ok(()),
        }
    }

    /// Returns the fault of a source of text files without rows, whose columns are texts for want of a better type;
    /// `None` if a type is known.
    fn without_rows(&self) -> Option<Fault> {
        let has_rows = |file: &SourceFile| file.inspection.counted_rows > 0;
        if self.format() == Format::Parquet || self.files.iter().any(has_rows) {
            return None;
        }
        let column = self.columns.fields().iter().find(|field| !self.declared.contains(field.name()))?;
        let message =
            "neither it nor another file of the source has rows, so the types of its columns are not known";
        let hint = format!(
            "give the types under `[sources].{}`, as `schema = {{ {} = \"BIGINT\" }}`, or write some rows",
            self.name,
            toml_key(column.name())
        );
        Some(Error::source(&self.name, &self.files[0].found.name, message.to_owned(), hint).fault())
    }

    /// Returns the schema of the source, including the columns that are made for it.
    fn schema(&self) -> SchemaRef {
        let format = self.files[0].dialect.format;
        self.table_schema(self.columns.clone(), format).table_schema().clone()
    }

    /// Returns the schema of a table whose files have the given columns.
    fn table_schema(&self, columns: SchemaRef, format: Format) -> TableSchema {
        FileTable::schema(columns, self.folders.clone(), self.row_number.as_deref(), format)
    }

    /// Returns the name and the columns of each file.
    pub(crate) fn columns_of_files(&self) -> impl Iterator<Item = (&Path, &Schema)> {
        self.files.iter().map(|file| (file.found.name.as_path(), file.inspection.schema.as_ref()))
    }

    /// Returns the format of the files.
    pub(crate) fn format(&self) -> Format {
        self.files[0].dialect.format
    }

    /// Returns the columns that are made from the folders and names of the files.
    pub(crate) fn folder_columns(&self) -> &Fields {
        &self.folders
    }

    /// Groups the files into tables. All files of a table are read in the same way.
    fn tables<'a>(&self, files: impl IntoIterator<Item = &'a SourceFile>) -> Vec<FileTable> {
        let mut tables: BTreeMap<_, FileTable> = BTreeMap::new();
        for file in files {
            let refused = self
                .refused
                .get(&file.found.name)
                .filter(|_| file.inspection.rows.is_none_or(|rows| rows > 0));
            let is_refused = |name: &String| refused.is_some_and(|refused| refused.contains_key(name));
            // CSV assigns values to columns by position only.
            let columns = match file.dialect.format {
                Format::Csv => self.ordered_as(&file.inspection.schema),
                _ if refused.is_none() => self.columns.clone(),
                _ => {
                    let fields = self.columns.fields().iter().filter(|field| !is_refused(field.name()));
                    Arc::new(Schema::new(fields.cloned().collect::<Vec<_>>()))
                }
            };
            let names: Vec<String> = columns.fields().iter().map(|field| field.name().clone()).collect();
            let key = (file.store.engine_url.to_string(), file.compression, file.dialect.delimiter, names);
            let table = tables.entry(key).or_insert_with(|| FileTable {
                source: self.name.clone(),
                store: Arc::clone(&file.store),
                dialect: file.dialect,
                compression: engine_compression(file.compression),
                schema: self.table_schema(columns, file.dialect.format),
                numbered: self.row_number.is_some(),
                files: Vec::new(),
                declared: Arc::clone(&self.declared),
                problems: self.problems.clone(),
                refused: refused.map(|refused| (file.found.name.clone(), refused.clone())),
                skipped: Arc::clone(&self.skipped),
            });
            let named = PartitionedFile::new_from_meta(file.found.meta.clone())
                .with_partition_values(file.values.clone())
                .with_extension(FileName(file.found.name.clone()));
            table.files.push(named);
        }
        tables.into_values().collect()
    }

    /// Returns the source's columns that `file` has, in the order of the file.
    fn ordered_as(&self, file: &Schema) -> SchemaRef {
        let columns =
            file.fields().iter().filter_map(|field| self.columns.field_with_name(field.name()).ok());
        Arc::new(Schema::new(columns.cloned().collect::<Vec<Field>>()))
    }

    /// Reads a CSV file and counts the rows that are left out.
    async fn count_skipped(&self, file: &SourceFile) -> Result<()> {
        let rules = file.dialect.csv_rules(Some(file.inspection.schema.fields().len()));
        let store = TextStore::new(Arc::clone(&file.store), engine_compression(file.compression));
        let store = store.with_csv(rules, Arc::clone(&self.skipped));
        let location = &file.found.meta.location;
        let read = async {
            let mut rows = store.get(location).await?.into_stream();
            while rows.try_next().await?.is_some() {}
            Ok::<_, object_store::Error>(())
        };
        read.await.map_err(|error| {
            let failure = file.store.failure(location).unwrap_or_else(|| file.store.explain(&error));
            Error::source(&self.name, &file.found.name, failure.0, failure.1)
        })
    }

    /// Returns a table with all columns of the source. A column that the files of `table` lack is null, or an error
    /// when it is read.
    fn aligned(&self, context: &SessionContext, table: FileTable) -> Result<DataFrame> {
        let has = table.schema.table_schema().clone();
        let whole = self.schema();
        let refused = |name: &String| {
            let (file, columns) = table.refused.as_ref()?;
            let (message, hint) = columns.get(name)?.clone();
            Some(refused_column(Error::source(&self.name, file, message, hint).fault(), &self.problems))
        };
        let columns = whole.fields().iter().map(|field| -> Expr {
            let value = match has.field_with_name(field.name()) {
                Ok(_) if refused(field.name()).is_none() => return ident(field.name()),
                _ => refused(field.name()).unwrap_or_else(|| lit(ScalarValue::Null)),
            };
            cast(value, field.data_type().clone()).alias(field.name())
        });
        let columns: Vec<Expr> = columns.collect();
        Ok(context.read_table(Arc::new(table))?.select(columns)?)
    }
}

/// Returns the faults of sources without rows. They explain an error of types, because no row has shown the types of
/// their columns.
pub(crate) fn without_rows(sources: &[Source]) -> Vec<Fault> {
    sources.iter().filter_map(Source::without_rows).collect()
}

/// Returns the versions of the tables among the sources, by name of the source.
pub(crate) fn table_versions(sources: &[Source]) -> BTreeMap<String, TableVersion> {
    sources.iter().filter_map(|source| Some((source.name.clone(), source.table.clone()?))).collect()
}

/// Returns the number of rows of all sources together; `None` unless all files state their number of rows.
pub(crate) fn total_rows(sources: &[Source]) -> Option<u64> {
    sources.iter().flat_map(|source| &source.files).map(|file| file.inspection.rows).sum()
}

/// Returns the size of all files of all sources, in bytes.
pub(crate) fn total_bytes(sources: &[Source]) -> u64 {
    sources.iter().flat_map(|source| &source.files).map(|file| file.found.meta.size).sum()
}

/// Returns hashes that identify the files of all sources independently of their folders: one hash per file, of its
/// name and size, in ascending order. If there are more than [`MOST_HASHES`] files, returns a single hash of these.
pub(crate) fn file_hashes(sources: &[Source]) -> Vec<u64> {
    let files = sources.iter().flat_map(|source| &source.files).map(|file| &file.found.meta);
    let hash = |file: &ObjectMeta| {
        xxh3_64(format!("{}/{}", file.size, file.location.filename().unwrap_or_default()).as_bytes())
    };
    let mut hashes: Vec<u64> = files.map(hash).collect();
    hashes.sort_unstable();
    if hashes.len() > MOST_HASHES {
        let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        hashes = vec![xxh3_64(&bytes)];
    }
    hashes
}

/// Counts the CSV rows that other machines have left out. They read files several times, and tasks are retried, so this
/// reads the files that they have read once more. Call it after all plans that read the sources have run.
pub(crate) async fn count_skipped(sources: &[Source]) -> Result<()> {
    let files = sources.iter().flat_map(|source| {
        let files =
            source.files.iter().filter(move |file| source.skipped.is_unknown(&file.found.meta.location));
        files.map(move |file| source.count_skipped(file))
    });
    stream::iter(files).map(Ok).try_for_each_concurrent(FILES_AT_A_TIME, |counted| counted).await
}

/// Returns the number of CSV rows that were left out so far because their number of values differs from the number
/// of columns.
pub(crate) fn ragged_rows_skipped(sources: &[Source]) -> u64 {
    sources.iter().map(|source| source.skipped.total()).sum()
}

/// Returns the decoded size of a row of the widest source in bytes, with 8 bytes for each number in columns and
/// lists.
pub(crate) fn widest_row_bytes(sources: &[Source]) -> u64 {
    let widths = sources.iter().map(|source| {
        let (rows, bytes) = source.files.iter().fold((0, 0), |(rows, bytes), file| {
            (rows + file.inspection.counted_rows, bytes + file.inspection.decoded_bytes)
        });
        bytes / rows.max(1)
    });
    widths.max().unwrap_or(0)
}
