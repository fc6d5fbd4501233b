//! Functions for local disks only: left-over files of killed writers, empty folders, and syncing.

use std::io;
use std::path::Path;

use crate::{Object, Result, Storage, commit};

impl Storage {
    /// Finds files below the given `folders` of a local disk that a killed writer left incomplete. The store
    /// does not list them.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if a folder cannot be listed.
    pub fn left_over_files(&self, folders: &[&str]) -> Result<Vec<Object>> {
        let mut found = Vec::new();
        if let Some(local) = &self.local {
            for folder in folders {
                left_over_below(local, folder, &mut found)?;
            }
        }
        Ok(found)
    }

    /// Removes empty local folders below the given `folders`, these folders if they are empty, and then the
    /// storage's own folder if it is empty. Errors are ignored. If the location is a symbolic link, the
    /// storage's own folder is kept, because the link would be broken without it.
    pub fn remove_empty_folders(&self, folders: &[&str]) {
        let Some(local) = &self.local else { return };
        for folder in folders {
            remove_empty_below(&local.join(folder));
        }
        if !self.is_link {
            let _ = fs_err::remove_dir(local);
        }
    }

    /// Makes a local file and its entry in the folder durable. Object stores do this themselves.
    pub(super) fn sync(&self, path: &str) -> io::Result<()> {
        let Some(local) = &self.local else { return Ok(()) };
        let path = local.join(path);
        fs_err::File::open(&path)?.sync_all()?;
        let inside = path.ancestors().skip(1).take_while(|folder| folder.starts_with(local));
        inside.take(16).try_for_each(commit::sync_directory)
    }
}

/// Collects incomplete files: `NAME#1` of an upload, and `.NAME.tmp` of a file to be created or of a claim to
/// a name.
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
    // This fails if the folder is not empty, as intended.
    let _ = fs_err::remove_dir(folder);
}
