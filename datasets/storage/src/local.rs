//! Files on local disks: left-over files of killed writers, files of others, empty folders, copies, and syncing.

use std::io;
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;

use crate::{Error, Object, Result, Storage, commit, path_in};

/// A folder on a local disk with the objects of a folder of a storage. Copies of objects are removed when it is
/// dropped.
#[derive(Debug)]
pub struct FolderOnDisk {
    path: PathBuf,
    _copies: Option<tempfile::TempDir>,
}

impl FolderOnDisk {
    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

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

    /// Returns the first files whose paths are wanted, at most `most`. The result is in order if the store lists
    /// objects in order. Files and folders of operating systems are left out, and objects without content that
    /// represent folders. In a path that is not UTF-8, other characters take the place of the invalid bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot list the folder, [`Error::Io`] if a local folder cannot be listed.
    pub fn find_files(&self, most: usize, is_wanted: fn(&str) -> bool) -> Result<Vec<String>> {
        let mut found = Vec::new();
        if let Some(local) = &self.local {
            if local.exists() {
                find_below(local, "", most, is_wanted, &mut found)?;
            }
            return Ok(found);
        }
        let (key, prefix) = (self.key("")?, self.prefix.clone());
        self.ask("", move |store| {
            let (key, prefix) = (key.clone(), prefix.clone());
            async move {
                let listed = store.list(Some(&key)).try_filter_map(|object| {
                    let (store, path) = (store.clone(), path_in(&prefix, &object.location));
                    async move {
                        let is_file = object.size > 0 || store.head(&object.location).await.is_ok();
                        Ok((is_file && is_wanted(&path)).then_some(path))
                    }
                });
                listed.take(most).try_collect().await
            }
        })
    }

    /// Returns a local folder with the objects below `folder`: the folder itself, or a temporary copy.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if an object cannot be read, [`Error::Io`] if it cannot be copied.
    pub fn on_disk(&self, folder: &str) -> Result<FolderOnDisk> {
        if let Some(local) = &self.local {
            return Ok(FolderOnDisk { path: local.join(folder), _copies: None });
        }
        let copies = tempfile::tempdir()?;
        for object in self.list(folder, None)? {
            let bytes = self.read(&object.path)?.ok_or_else(|| {
                let message =
                    format!("`{}` was removed while it was read", self.shown(&object.path).display());
                Error::from(io::Error::new(io::ErrorKind::NotFound, message))
            })?;
            let path = copies.path().join(&object.path);
            path.parent().map_or(Ok(()), fs_err::create_dir_all)?;
            fs_err::write(path, bytes)?;
        }
        Ok(FolderOnDisk { path: copies.path().join(folder), _copies: Some(copies) })
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

/// Collects files in order. Folders that operating systems create may be unreadable, so they are not opened.
fn find_below(
    root: &Path,
    folder: &str,
    most: usize,
    is_wanted: fn(&str) -> bool,
    found: &mut Vec<String>,
) -> io::Result<()> {
    let mut names = Vec::new();
    for entry in fs_err::read_dir(root.join(folder))? {
        names.push(entry?.file_name());
    }
    names.sort();
    for name in names {
        if found.len() >= most {
            return Ok(());
        }
        let shown = name.to_string_lossy();
        if is_of_system(&shown) {
            continue;
        }
        let path = if folder.is_empty() { shown.into_owned() } else { format!("{folder}/{shown}") };
        // A link to a folder counts as a folder. Everything else counts as a file, including a broken link.
        if !fs_err::metadata(root.join(folder).join(&name)).is_ok_and(|metadata| metadata.is_dir()) {
            found.extend(Some(path).filter(|path| is_wanted(path)));
        } else if name.to_str().is_some() {
            find_below(root, &path, most, is_wanted, found)?;
        } else {
            found.push(path);
        }
    }
    Ok(())
}

/// Returns whether operating systems create files or folders with this name. Some of them are unreadable
/// for most users.
fn is_of_system(name: &str) -> bool {
    let names = [
        "lost+found",
        "System Volume Information",
        "$RECYCLE.BIN",
        ".DS_Store",
        ".Spotlight-V100",
        ".Trashes",
        ".fseventsd",
        ".snapshot",
    ];
    // These are a user's trash, and files that an NFS client keeps until they are closed.
    names.contains(&name) || name.starts_with(".Trash-") || name.starts_with(".nfs")
}

fn remove_empty_below(folder: &Path) {
    let Ok(entries) = fs_err::read_dir(folder) else { return };
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        remove_empty_below(&entry.path());
    }
    // This fails if the folder is not empty, as intended.
    let _ = fs_err::remove_dir(folder);
}
