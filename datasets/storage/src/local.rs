//! Files on local disks: left-over files of killed writers, files of others, empty folders, copies, and syncing.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;

use crate::{Error, Object, Result, Storage, commit, path_in};

/// A folder on a local disk with the objects of a folder of a storage. Copies of objects are removed when it is
/// dropped.
#[derive(Debug)]
pub struct FolderOnDisk {
    /// The path of the folder.
    pub path: PathBuf,
    _copies: Option<tempfile::TempDir>,
}

impl Storage {
    /// Lists the files of a local folder, as [`list`](Self::list). A link to a folder is not followed, because it may
    /// lead to files of others.
    pub(super) fn list_local(&self, local: &Path, folder: &str, after: Option<&str>) -> Result<Vec<Object>> {
        let is_wanted = |path: &str, metadata: &Metadata| {
            metadata.is_file() && !is_upload(path) && after.is_none_or(|after| path > after)
        };
        let (mut walk, place) = (Walk::new(usize::MAX, false, &is_wanted), local.join(folder));
        if place.is_dir() {
            walk.add(&place, folder)?;
        }
        Ok(walk.found)
    }

    /// Finds files below the given `folders` of a local disk that a killed writer left incomplete: `NAME#1` of an
    /// upload, and `.NAME.tmp` of a file to be created or of a claim to a name.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if a folder cannot be listed.
    pub fn left_over_files(&self, folders: &[&str]) -> Result<Vec<Object>> {
        let Some(local) = &self.local else { return Ok(Vec::new()) };
        let is_wanted = |path: &str, _: &Metadata| {
            let name = name_of(path);
            is_upload(path) || name.starts_with('.') && name.ends_with(".tmp")
        };
        let mut walk = Walk::new(usize::MAX, false, &is_wanted);
        let folders = folders.iter().map(|folder| (local.join(folder), folder));
        folders
            .filter(|(place, _)| place.is_dir())
            .try_for_each(|(place, folder)| walk.add(&place, folder))?;
        Ok(walk.found)
    }

    /// Returns the first files whose paths are wanted, at most `most`. The result is in order if the store lists
    /// objects in order. Files and folders of operating systems are left out, and objects without content that
    /// represent folders.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot list the folder, [`Error::Io`] if a local folder cannot be listed.
    pub fn find_files(&self, most: usize, is_wanted: fn(&str) -> bool) -> Result<Vec<String>> {
        if let Some(local) = &self.local {
            let is_wanted = |path: &str, _: &Metadata| !is_of_system(name_of(path)) && is_wanted(path);
            let mut walk = Walk::new(most, true, &is_wanted);
            walk.add(local, "")?;
            return Ok(walk.found.into_iter().map(|object| object.path).collect());
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

/// Collects files below a local folder, in order.
struct Walk<'a> {
    /// Whether links to folders below the first one are followed.
    follows_links: bool,
    /// The largest number of files.
    most: usize,
    /// Returns whether to collect the file with a path and its metadata, which are those of a link only if the link
    /// is broken.
    is_wanted: &'a dyn Fn(&str, &Metadata) -> bool,
    /// The targets of links that were followed. Links may form loops.
    followed: HashSet<PathBuf>,
    found: Vec<Object>,
}

impl<'a> Walk<'a> {
    fn new(most: usize, follows_links: bool, is_wanted: &'a dyn Fn(&str, &Metadata) -> bool) -> Self {
        Self { follows_links, most, is_wanted, followed: HashSet::new(), found: Vec::new() }
    }

    /// Adds the files below the folder `place`, whose path in the storage is `folder`. In a path that is not UTF-8,
    /// other characters take the place of the invalid bytes. What is removed meanwhile is left out.
    fn add(&mut self, place: &Path, folder: &str) -> io::Result<()> {
        let Some(entries) = if_there(fs_err::read_dir(place))? else { return Ok(()) };
        let names = entries.map(|entry| Ok(entry?.file_name()));
        let mut names: Vec<OsString> = names.collect::<io::Result<_>>()?;
        names.sort();
        for name in names {
            if self.found.len() >= self.most {
                return Ok(());
            }
            let (place, shown) = (place.join(&name), name.to_string_lossy());
            let path = if folder.is_empty() { shown.to_string() } else { format!("{folder}/{shown}") };
            let Some(own) = if_there(fs_err::symlink_metadata(&place))? else { continue };
            let is_link = own.is_symlink();
            let metadata = if is_link { fs_err::metadata(&place).unwrap_or(own) } else { own };
            if !metadata.is_dir() {
                if (self.is_wanted)(&path, &metadata) {
                    let (bytes, modified) = (metadata.len(), metadata.modified()?);
                    self.found.push(Object { path, bytes, modified, e_tag: None });
                }
            } else if !is_of_system(&shown)
                && (!is_link || self.follows_links && self.followed.insert(fs_err::canonicalize(&place)?))
            {
                self.add(&place, &path)?;
            }
        }
        Ok(())
    }
}

/// Returns `None` if the file or folder does not exist.
fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Returns whether `path` is that of an incomplete upload, `NAME#1`.
fn is_upload(path: &str) -> bool {
    path.rsplit_once('#').is_some_and(|(_, digits)| digits.parse::<u32>().is_ok())
}

/// Returns the last part of a path.
fn name_of(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
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
    // A link may lead to a folder of others.
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_empty_below(&entry.path());
    }
    // This fails if the folder is not empty, as intended.
    let _ = fs_err::remove_dir(folder);
}
