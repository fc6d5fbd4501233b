//! The raw logs' files: found, looked at and registered with DataFusion.

use std::path::{Path, PathBuf};

use datafusion::prelude::{ParquetReadOptions, SessionContext};
use parquet::file::reader::{FileReader, SerializedFileReader};

use crate::{Config, Error, Result};

/// Registers every source of `config` as a table; gives the number of rows of all their files.
///
/// # Errors
///
/// [`Error::Source`] if a pattern matches no file, or a file's Parquet footer cannot be read.
pub(crate) async fn register(context: &SessionContext, config: &Config) -> Result<u64> {
    let base = config.path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut rows = 0;
    for (name, pattern) in &config.sources {
        let files = expand(name, &base.join(pattern))?;
        for file in &files {
            rows += check_footer(name, file)?;
        }
        let paths: Vec<String> = files.iter().map(|file| file.to_string_lossy().into_owned()).collect();
        let table = context.read_parquet(paths, ParquetReadOptions::default()).await?;
        context.register_table(name, table.into_view())?;
    }
    Ok(rows)
}

/// The files that `pattern` matches, sorted.
fn expand(name: &str, pattern: &Path) -> Result<Vec<PathBuf>> {
    let wrong = |message: String| Error::Source {
        source_name: name.to_owned(),
        path: pattern.to_owned(),
        message,
        hint: "correct the path under `[sources]`; it is relative to the configuration file".to_owned(),
    };
    let matches = glob::glob(&pattern.to_string_lossy()).map_err(|error| wrong(format!("bad pattern: {error}")))?;
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

/// Reads a file's footer, so that a damaged file is named before any work is done; gives its row count.
fn check_footer(name: &str, path: &Path) -> Result<u64> {
    let reader = SerializedFileReader::new(fs_err::File::open(path)?.into_file());
    let reader = reader.map_err(|error| Error::Source {
        source_name: name.to_owned(),
        path: path.to_owned(),
        message: format!("not a whole Parquet file: {error}"),
        hint: "the file is truncated, damaged or of another format; write it again".to_owned(),
    })?;
    Ok(u64::try_from(reader.metadata().file_metadata().num_rows()).unwrap_or(0))
}
