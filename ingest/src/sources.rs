//! The raw logs' files: found, looked at and registered with DataFusion.

use std::path::{Path, PathBuf};

use datafusion::prelude::{ParquetReadOptions, SessionContext};
use onefold_datasets::console::catch_panic;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::{Config, Error, Result};

/// One table of raw logs.
#[derive(Debug)]
pub(crate) struct Source {
    name: String,
    files: Vec<PathBuf>,
    rows: u64,
    values: u64,
}

/// Finds the files of every source of `config` and reads their footers.
///
/// # Errors
///
/// [`Error::Source`] if a pattern matches no file, or a file's Parquet footer cannot be read.
pub(crate) fn find(config: &Config) -> Result<Vec<Source>> {
    let base = config.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut sources = Vec::new();
    for (name, pattern) in &config.sources {
        let mut source =
            Source { name: name.clone(), files: expand(name, &base.join(pattern))?, rows: 0, values: 0 };
        for file in &source.files {
            let (rows, values) = read_footer(name, file)?;
            source.rows += rows;
            source.values += values;
        }
        sources.push(source);
    }
    Ok(sources)
}

/// Makes every source a table of the query.
///
/// # Errors
///
/// [`Error::Engine`] if the files of a source have schemas that do not go together.
pub(crate) async fn register(context: &SessionContext, sources: &[Source]) -> Result<()> {
    for source in sources {
        let paths: Vec<String> =
            source.files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
        let table = context.read_parquet(paths, ParquetReadOptions::default()).await?;
        context.register_table(&source.name, table.into_view())?;
    }
    Ok(())
}

/// Rows of all sources together.
pub(crate) fn total_rows(sources: &[Source]) -> u64 {
    sources.iter().map(|source| source.rows).sum()
}

/// Decoded bytes of a row of the widest source, counting 8 for every number of every column and list.
pub(crate) fn widest_row_bytes(sources: &[Source]) -> u64 {
    sources.iter().map(|source| 8 * source.values / source.rows.max(1)).max().unwrap_or(0)
}

/// The error that names the first source file that cannot be decoded, if there is one.
pub(crate) fn find_unreadable(config: &Config) -> Option<Error> {
    let sources = match find(config) {
        Ok(sources) => sources,
        Err(error) => return Some(error),
    };
    let mut files = sources.iter().flat_map(|source| source.files.iter().map(|file| (&source.name, file)));
    files.find_map(|(name, file)| {
        // Decoders panic on some damaged bytes.
        let decoded = catch_panic(|| decode(file));
        Some(Error::Source {
            source_name: name.clone(),
            path: file.clone(),
            message: format!("it cannot be decoded: {}", decoded.err()?),
            hint: "the file is damaged or was changed while it was read; write it again".to_owned(),
        })
    })
}

/// Decodes a file and keeps nothing.
fn decode(path: &Path) -> Result<(), String> {
    let file = fs_err::File::open(path).map_err(|error| error.to_string())?.into_file();
    let rows = ParquetRecordBatchReaderBuilder::try_new(file).and_then(|builder| builder.build());
    for batch in rows.map_err(|error| error.to_string())? {
        batch.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The files that `pattern` matches, sorted.
fn expand(name: &str, pattern: &Path) -> Result<Vec<PathBuf>> {
    let wrong = |message: String| Error::Source {
        source_name: name.to_owned(),
        path: pattern.to_owned(),
        message,
        hint: "correct the path under `[sources]`; it is relative to the configuration file".to_owned(),
    };
    let matches =
        glob::glob(&pattern.to_string_lossy()).map_err(|error| wrong(format!("bad pattern: {error}")))?;
    let mut files = Vec::new();
    for path in matches {
        let path = path.map_err(|error| wrong(error.to_string()))?;
        if path.is_file() {
            files.push(fs_err::canonicalize(path)?);
        }
    }
    if files.is_empty() {
        return Err(wrong("there is no such file".to_owned()));
    }
    files.sort();
    Ok(files)
}

/// Reads a file's footer, so that a damaged file is named before any work is done; gives its rows and the values of
/// all its columns.
fn read_footer(name: &str, path: &Path) -> Result<(u64, u64)> {
    let reader = SerializedFileReader::new(fs_err::File::open(path)?.into_file());
    let reader = reader.map_err(|error| Error::Source {
        source_name: name.to_owned(),
        path: path.to_owned(),
        message: format!("not a whole Parquet file: {error}"),
        hint: "the file is truncated, damaged or of another format; write it again".to_owned(),
    })?;
    let metadata = reader.metadata();
    let columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    let values: i64 = columns.map(|column| column.num_values().max(0)).fold(0, i64::saturating_add);
    let rows = metadata.file_metadata().num_rows();
    Ok((u64::try_from(rows).unwrap_or(0), u64::try_from(values).unwrap_or(0)))
}
