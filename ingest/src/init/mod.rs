//! Writes a `dataset.toml` for logs without a configuration.
//!
//! ```text
//! paths ─▶ logs ─────────────────▶ columns ─▶ roles ─────────────────────────▶ text
//!          files of the same        evidence   time, session, label, features   dataset.toml, with the
//!          columns, as `sources`    of the     (times, lists)                   evidence in comments
//!          reads them               first rows
//! ```
//!
//! Each choice is based on column names and on the values of the first rows; a comment shows both. If they are not
//! sufficient, the file has a default that builds, marked with `CHECK`.

mod columns;
mod file;
mod lists;
mod logs;
mod roles;
#[cfg(test)]
mod tests;
mod times;

use std::path::Path;

use onefold_base::fault::{Fault, Kind, option, text};
use onefold_storage::commit::{check_output, write_atomically};
use serde::Serialize;

use crate::config::Config;
use crate::engine::EngineOptions;
use crate::error::{Result, bug};

/// The result of [`init`].
#[derive(Debug, Clone, Serialize)]
pub struct InitSummary {
    /// The sources of the configuration, in the order in which they were given.
    pub sources: Vec<InitSource>,
    /// The source whose rows become samples.
    pub samples: String,
    /// The decisions that names and values did not determine, each as a sentence. The file marks them with `CHECK`.
    pub to_check: Vec<String>,
}

/// A source of a new configuration.
#[derive(Debug, Clone, Serialize)]
pub struct InitSource {
    /// The name of the source.
    pub name: String,
    /// The number of its files.
    pub files: usize,
    /// The number of its columns, including columns from folder names.
    pub columns: usize,
    /// The number of rows whose values were examined.
    pub rows_seen: usize,
}

/// Examines the first rows of logs, and writes a configuration to the file `out`. `paths` are files, folders, globs and
/// URLs; relative paths start at the working directory. The configuration has paths relative to its own folder.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if `out` exists and `overwrite` is false, a path has no files, a file cannot
/// be read, or files have no rows; [`Error::Io`](crate::Error::Io) if the configuration cannot be written.
pub async fn init(
    paths: &[String],
    out: &Path,
    overwrite: bool,
    options: &EngineOptions,
) -> Result<InitSummary> {
    check_free(out, overwrite)?;
    // With one thread, files are read in order, so the first rows are always the same.
    let options = EngineOptions { threads: 1, ..options.clone() };
    let logs = logs::read(paths, out, &options).await?;
    let (main, plan) = roles::decide(&logs);
    let text = file::written(&logs, main, &plan, out);
    Config::parse(out, &text)
        .map_err(|error| bug(&format!("the written configuration is invalid: {error}")))?;
    check_free(out, overwrite)?;
    write_atomically(out, text.as_bytes())?;
    let source = |log: &logs::Log| InitSource {
        name: log.name.clone(),
        files: log.files,
        columns: log.columns.len(),
        rows_seen: log.rows,
    };
    Ok(InitSummary {
        sources: logs.iter().map(source).collect(),
        samples: logs[main].name.clone(),
        to_check: plan.to_check(),
    })
}

/// Checks that the configuration can be written to `out`.
fn check_free(out: &Path, overwrite: bool) -> Result<()> {
    check_output(out)?;
    if !overwrite && out.symlink_metadata().is_ok() {
        let hint = text!["choose another name, or replace the file with ", option("overwrite")];
        return Err(Fault::of_file(Kind::Options, out, "it exists").hint(hint).into());
    }
    Ok(())
}
