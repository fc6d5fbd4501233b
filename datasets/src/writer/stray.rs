//! Data files and vocabularies that no manifest names: left by a killed writer, or replaced.

use std::path::{Path, PathBuf};

use super::VOCABULARIES;
use crate::{Result, commit};

/// Removes data files (`part-*.parquet`) of partition folders and vocabularies that are not in `keep`, and folders left
/// empty.
pub(super) fn remove_stray_files(root: &Path, keep: &[PathBuf]) -> Result<()> {
    let keep: Vec<PathBuf> = keep.iter().map(|path| root.join(path)).collect();
    remove_stray_below(root, &keep)?;
    let vocabularies = root.join(VOCABULARIES);
    if !vocabularies.is_dir() {
        return Ok(());
    }
    for entry in fs_err::read_dir(&vocabularies)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "parquet") && !keep.contains(&path) {
            fs_err::remove_file(&path)?;
        }
    }
    if commit::is_empty_directory(&vocabularies)? {
        fs_err::remove_dir(&vocabularies)?;
    }
    Ok(())
}

fn remove_stray_below(directory: &Path, keep: &[PathBuf]) -> Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() && name.contains('=') {
            remove_stray_below(&path, keep)?;
            if commit::is_empty_directory(&path)? {
                fs_err::remove_dir(&path)?;
            }
        } else if name.starts_with("part-") && name.ends_with(".parquet") && !keep.contains(&path) {
            fs_err::remove_file(&path)?;
        }
    }
    Ok(())
}
