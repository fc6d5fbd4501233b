//! What only a local disk needs: files that a killed writer left, empty folders, and syncing.

use std::io;
use std::path::Path;

use crate::{Object, Result, Storage, commit};

impl Storage {
    /// Files below the given `folders` of a local disk that a killed writer left half-written; the store does not list
    /// them.
    ///
    /// # Errors
    ///
    /// The operating system's error if a folder cannot be listed.
    pub fn left_over_files(&self, folders: &[&str]) -> Result<Vec<Object>> {
        let mut found = Vec::new();
        if let Some(local) = &self.local {
            for folder in folders {
                left_over_below(local, folder, &mut found)?;
            }
        }
        Ok(found)
    }

    /// Removes the local folders below the given `folders` that hold nothing, these themselves, and the folder of the
    /// storage if nothing else is in it, as far as that is possible. A folder that the location names by a symbolic link
    /// stays: without it, the link would name nothing.
    pub fn remove_empty_folders(&self, folders: &[&str]) {
        let Some(local) = &self.local else { return };
        for folder in folders {
            remove_empty_below(&local.join(folder));
        }
        if !self.is_link {
            let _ = fs_err::remove_dir(local);
        }
    }

    /// Makes a local file and the entry in its folder survive a power cut; stores do that by themselves.
    pub(super) fn sync(&self, path: &str) -> io::Result<()> {
        let Some(local) = &self.local else { return Ok(()) };
        let path = local.join(path);
        fs_err::File::open(&path)?.sync_all()?;
        let inside = path.ancestors().skip(1).take_while(|folder| folder.starts_with(local));
        inside.take(16).try_for_each(commit::sync_directory)
    }
}

/// Collects half-written files: `NAME#1` of an upload, `.NAME.tmp` of a file that was to be created or of a claim to a
/// name.
fn left_over_below(root: &Path, folder: &str, found: &mut Vec<Object>) -> io::Result<()> {
    let path = root.join(folder);
    if !path.is_dir() {
        return Ok(());
    }
    for entry in fs_err::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{folder}/{name}");
        let metadata = entry.metadata()?;
        let is_upload = name.rsplit_once('#').is_some_and(|(_, digits)| digits.parse::<u32>().is_ok());
        if metadata.is_dir() {
            left_over_below(root, &path, found)?;
        } else if is_upload || name.starts_with('.') && name.ends_with(".tmp") {
            found.push(Object { path, bytes: metadata.len(), modified: metadata.modified()?, e_tag: None });
        }
    }
    Ok(())
}

fn remove_empty_below(folder: &Path) {
    let Ok(entries) = fs_err::read_dir(folder) else { return };
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        remove_empty_below(&entry.path());
    }
    // It fails if something is in there, which is as well.
    let _ = fs_err::remove_dir(folder);
}
