//! Access to folders with datasets and checkpoints, on a local disk or in an object store, through one
//! interface.
//!
//! A **location** is a local path or a URL: `file://`, `s3://`, `gs://` or `az://` (and the other forms that
//! [`object_store`] parses). Credentials and endpoints come from the environment (`AWS_…`, `GOOGLE_…`,
//! `AZURE_…`), and for S3 also from AWS profiles. Requests run on a few threads of the process. The functions
//! of this crate block the calling thread, and may be called from any thread, including a thread of another
//! runtime.
//!
//! Transient failures (a busy store, a reset connection, an interrupted answer) and stalled requests are
//! retried with exponential backoff for three minutes. Only the failed request is repeated, not earlier ones.
//! Objects of a dataset never change: requests for an object with a known ETag require this ETag, and a
//! changed object is an error.
//!
//! The module [`commit`] writes files and directories of a local disk atomically.
#![forbid(unsafe_code)]

mod aws;
pub mod commit;
mod error;
mod folder;
mod local;
mod parts;
mod ranges;
mod remote;
mod retry;
pub mod runtime;
mod service;
mod upload;

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt};
use onefold_base::fault::{Fault, Kind};
use onefold_base::location::{check_scheme, is_url};
use onefold_base::percent;
use onefold_base::sync::locked;

pub use self::error::{Error, Result, write_hint};
use self::folder::{Folder, wrong_location};
pub use self::folder::{absolute, absolute_pattern, path_on_disk};
pub use self::local::FolderOnDisk;
pub use self::parts::UploadParts;
pub use self::ranges::{RANGE_GAP, Ranges};
pub use self::remote::{RemoteStore, S3Settings};
use self::retry::LARGEST_REQUEST;
pub use self::retry::Patience;
use self::runtime::Threads;
use self::service::CHANGED;
pub use self::service::{Explanation, Hints, Service};
pub use self::upload::{HashingWriter, Upload};

/// The size in bytes of the requests that read a whole object in order.
const STREAMED_REQUEST: u64 = 4 << 20;
/// The number of these requests in flight for an object: their answers take 16 MiB.
const STREAMED_REQUESTS: usize = 4;

/// An object, as listed by the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// The path relative to the folder of the storage, separated by `/`.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The time at which it was written.
    pub modified: SystemTime,
    /// The ETag of this version of the object, if the store has one.
    pub e_tag: Option<String>,
}

/// The result of creating an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The object was created.
    Yes,
    /// The object already existed and is unchanged.
    Exists,
}

/// A folder on a local disk or in an object store.
#[derive(Clone)]
pub struct Storage {
    location: PathBuf,
    service: Service,
    store: Arc<dyn ObjectStore>,
    /// The bucket of the store, for creating clients with other timeouts.
    remote: Option<RemoteStore>,
    /// A client with short timeouts for the first request. `None` once the store has answered.
    probe: Arc<Mutex<Option<Arc<dyn ObjectStore>>>>,
    /// The limit of parts that uploads send at a time; `None` for the limit of the process.
    upload_parts: Option<UploadParts>,
    /// The folder within the store.
    prefix: ObjectPath,
    /// The resolved folder, if it is on a local disk.
    local: Option<PathBuf>,
    /// Whether the location is a symbolic link to the folder.
    is_link: bool,
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Storage").field(&self.location).finish()
    }
}

/// Whether a location is the URL of a local path.
fn is_file_url(location: &str) -> bool {
    location.split_once("://").is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("file"))
}

impl Storage {
    /// Opens the storage at `location`, a local path or a URL. Sends no request.
    ///
    /// A local path is resolved immediately, in the same way as by the kernel. The storage refers to the same
    /// folder even if the working directory or a symbolic link changes later.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the URL is malformed or has an unknown scheme, if the environment's settings for
    /// its store contradict each other, if a local path is not valid (see [`absolute`]), or if it is a file or
    /// the root of the file system.
    pub fn open(location: &Path) -> Result<Self> {
        let Some(text) = location.to_str().filter(|_| is_url(location)) else {
            return Self::of_disk(Folder::resolve(location, location)?, location);
        };
        if is_file_url(text) {
            return Self::of_disk(Folder::of_url(text, location)?, location);
        }
        let (remote, prefix) =
            RemoteStore::of_location(text).map_err(|problem| wrong_location(location, problem))?;
        let service = remote.service();
        let connect = |patience| {
            remote.connect(patience).map_err(|error| {
                let (message, hint) = service.explain_settings(&error);
                Error::location(text, message, hint)
            })
        };
        let (store, probe) = (connect(Patience::Long)?, connect(Patience::Short)?);
        let probe = Arc::new(Mutex::new(Some(probe)));
        let storage = Self::of_store(location.to_owned(), service, store, prefix);
        Ok(Self { remote: Some(remote), probe, ..storage })
    }

    /// Opens the storage of the folder that contains the file `location`, and returns the file's name in it.
    /// If `location` ends with a slash, `.` or `..`, or is the URL of a bucket, the name is empty and the
    /// storage is that folder itself. Sends no request.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`open`](Self::open), but the file may be directly in the root of the file
    /// system.
    pub fn of_file(location: &Path) -> Result<(Self, String)> {
        let text = location.to_str().ok_or_else(|| {
            Error::location(location.display(), "the path is not UTF-8 text", "choose another name")
        })?;
        check_scheme(location).map_err(|problem| wrong_location(location, problem))?;
        if is_file_url(text) {
            // The name is decoded too.
            let path = folder::path_of_url(text).map_err(|problem| wrong_location(location, problem))?;
            return Self::of_file(&path);
        }
        // The slashes of `s3://` do not separate folders.
        let scheme = if is_url(location) { text.find("://").map_or(0, |at| at + 3) } else { 0 };
        let (folder, name) = match text[scheme..].rsplit_once('/') {
            Some((folder, name)) => (&text[..scheme + folder.len()], name),
            None if scheme > 0 => (text, ""),
            None => (".", text),
        };
        if matches!(name, "" | "." | "..") {
            return Ok((Self::open(location)?, String::new()));
        }
        // The folder is empty only if the path's single slash is its first character.
        let storage = match folder {
            "" => Self::of_resolved(Folder::resolve(Path::new("/"), location)?, Path::new("/")),
            folder => Self::open(Path::new(folder))?,
        };
        let name = if scheme > 0 { percent::decode_leniently(name) } else { name.to_owned() };
        Ok((storage, name))
    }

    /// Returns the storage of a folder on a local disk, which must not be a file or the root of the file system.
    fn of_disk(folder: Folder, location: &Path) -> Result<Self> {
        let problem = if folder.is_root() {
            Some(("this is the root of the file system", "choose a folder in it"))
        } else if folder.path.is_file() {
            Some(("this is a file, not a folder", "give the path of a folder"))
        } else {
            None
        };
        if let Some((message, hint)) = problem {
            return Err(Error::location(location.display(), message, hint));
        }
        Ok(Self::of_resolved(folder, location))
    }

    fn of_resolved(folder: Folder, location: &Path) -> Self {
        let Folder { path, prefix, is_link } = folder;
        let store = Arc::new(LocalFileSystem::new());
        let storage = Self::of_store(location.to_owned(), Service::local_disk(), store, prefix);
        Self { local: Some(path), is_link, ..storage }
    }

    fn of_store(
        location: PathBuf,
        service: Service,
        store: Arc<dyn ObjectStore>,
        prefix: ObjectPath,
    ) -> Self {
        Self {
            location,
            service,
            store,
            remote: None,
            probe: Arc::default(),
            upload_parts: None,
            prefix,
            local: None,
            is_link: false,
        }
    }

    /// Creates a storage in any store, for tests.
    #[doc(hidden)]
    pub fn over(store: Arc<dyn ObjectStore>, prefix: &str) -> Self {
        let location = format!("memory:///{prefix}").into();
        Self::of_store(location, Service::s3(None, true), store, ObjectPath::from(prefix))
    }

    /// Returns the same storage with uploads that share the limit `parts`. By default, all uploads of the
    /// process share one limit.
    #[must_use]
    pub fn with_upload_parts(self, parts: UploadParts) -> Self {
        Self { upload_parts: Some(parts), ..self }
    }

    /// Returns the path or URL of the folder.
    pub fn location(&self) -> &Path {
        &self.location
    }

    /// Returns the full path or URL of the object `path`, for messages.
    pub fn shown(&self, path: &str) -> PathBuf {
        let base = self.location.to_string_lossy();
        format!("{}/{path}", base.trim_end_matches('/')).into()
    }

    /// Returns the full path or URL of the object `path`, for other programs: a local path is absolute and has
    /// no symbolic links.
    pub fn full_path(&self, path: &str) -> PathBuf {
        self.local.as_ref().map_or_else(|| self.shown(path), |local| local.join(path))
    }

    /// Returns whether requests wait for a network. If so, it pays to send several at a time, to fetch more
    /// bytes with each, and to keep what they return.
    pub fn has_latency(&self) -> bool {
        self.local.is_none()
    }

    /// Reads a whole object; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot deliver it.
    pub fn read(&self, path: &str) -> Result<Option<Bytes>> {
        let (key, is_local) = (self.key(path)?, self.local.is_some());
        let found = self.ask(path, move |store| {
            let key = key.clone();
            async move {
                match store.get(&key).await {
                    // A single request for this object could exceed its timeout.
                    Ok(object) if !is_local && object.meta.size > LARGEST_REQUEST => {
                        Ok(Some(Err(object.meta)))
                    }
                    Ok(object) => object.bytes().await.map(|bytes| Some(Ok(bytes))),
                    Err(object_store::Error::NotFound { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        })?;
        let meta: ObjectMeta = match found {
            None => return Ok(None),
            Some(Ok(bytes)) => return Ok(Some(bytes)),
            Some(Err(meta)) => meta,
        };
        let object = object_of(path.to_owned(), meta);
        let mut bytes = Vec::with_capacity(usize::try_from(object.bytes).unwrap_or(0));
        self.read_through(path, &object, |ranges| {
            ranges.parts().for_each(|(_, part)| bytes.extend_from_slice(part));
            Ok(())
        })?;
        Ok(Some(bytes.into()))
    }

    /// Returns the size, time and ETag of an object; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store does not answer.
    pub fn head(&self, path: &str) -> Result<Option<Object>> {
        let key = self.key(path)?;
        let found = self.ask(path, move |store| {
            let key = key.clone();
            async move {
                match store.head(&key).await {
                    Ok(found) => Ok(Some(found)),
                    Err(object_store::Error::NotFound { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        })?;
        Ok(found.map(|found| object_of(path.to_owned(), found)))
    }

    /// Reads byte ranges of an object of `length` bytes with few large requests, several at a time. With an
    /// `e_tag`, another version of the object is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot deliver them, or the object has another ETag.
    pub fn read_ranges(
        &self,
        path: &str,
        length: u64,
        wanted: Vec<Range<u64>>,
        e_tag: Option<String>,
    ) -> Result<Ranges> {
        let request = self.request_ranges(path, length, wanted, e_tag)?;
        self.wait(path, request)
    }

    /// Works like [`read_ranges`](Self::read_ranges) without waiting. `then` is called with the result, on a
    /// thread that must not be blocked for long.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if threads cannot be started.
    pub fn start_reading(
        &self,
        path: &str,
        length: u64,
        wanted: Vec<Range<u64>>,
        e_tag: Option<String>,
        then: impl FnOnce(Result<Ranges>) + Send + 'static,
    ) -> Result<()> {
        let request = self.request_ranges(path, length, wanted, e_tag)?;
        let (storage, path) = (self.clone(), path.to_owned());
        let reading = async move {
            let ranges = request.await;
            then(ranges.map_err(|error| storage.read_error(&path, error)));
        };
        Ok(self.threads().start(reading)?)
    }

    /// Fills `output` with the bytes of an object from offset `first` on.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`read_ranges`](Self::read_ranges).
    pub fn read_at(&self, path: &str, object: &Object, first: u64, output: &mut [u8]) -> Result<()> {
        let wanted = std::iter::once(first..first + output.len() as u64).collect();
        let (store, key) = (Arc::clone(&self.store), self.key(path)?);
        let parts = self.wait(path, ranges::fetch_parts(store, key, wanted, object.e_tag.clone()))?;
        for (start, bytes) in parts {
            output[(start - first) as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn request_ranges(
        &self,
        path: &str,
        length: u64,
        wanted: Vec<Range<u64>>,
        e_tag: Option<String>,
    ) -> Result<impl Future<Output = object_store::Result<Ranges>> + Send + 'static> {
        Ok(ranges::fetch(Arc::clone(&self.store), self.key(path)?, length, wanted, e_tag))
    }

    /// Reads an object from start to end. `read` receives the bytes in order; its first error stops the
    /// function. Up to four requests of 4 MiB are in flight.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`read_ranges`](Self::read_ranges) and of `read`.
    pub fn read_through(
        &self,
        path: &str,
        object: &Object,
        mut read: impl FnMut(Ranges) -> io::Result<()>,
    ) -> Result<()> {
        let request = |start: u64| {
            let (sender, answer) = sync_channel(1);
            let wanted = std::iter::once(start..object.bytes.min(start + STREAMED_REQUEST)).collect();
            let then = move |ranges| drop(sender.send(ranges));
            self.start_reading(path, object.bytes, wanted, object.e_tag.clone(), then)?;
            Ok::<_, Error>(answer)
        };
        let mut starts = (0..object.bytes).step_by(STREAMED_REQUEST as usize);
        let mut on_their_way = VecDeque::new();
        loop {
            while on_their_way.len() < STREAMED_REQUESTS
                && let Some(start) = starts.next()
            {
                on_their_way.push_back(request(start)?);
            }
            let Some(answer) = on_their_way.pop_front() else { return Ok(()) };
            read(answer.recv().map_err(|_| io::Error::other("a request ended without a result"))??)?;
        }
    }

    /// Lists the objects below `folder` (all objects if it is empty), in no particular order. With `after`,
    /// only objects with greater paths. On a local disk, links to folders below `folder` are not followed, and in a
    /// path that is not UTF-8, other characters take the place of the invalid bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot list them.
    pub fn list(&self, folder: &str, after: Option<&str>) -> Result<Vec<Object>> {
        let key = self.key(folder)?;
        if let Some(local) = &self.local {
            return self.list_local(local, folder, after);
        }
        let after = after.map(|after| self.key(after)).transpose()?;
        let found: Vec<_> = self.ask(folder, move |store| {
            let (key, after) = (key.clone(), after.clone());
            async move {
                let listed = match &after {
                    Some(after) => store.list_with_offset(Some(&key), after),
                    None => store.list(Some(&key)),
                };
                listed.try_collect().await
            }
        })?;
        let object = |meta: ObjectMeta| object_of(path_in(&self.prefix, &meta.location), meta);
        Ok(found.into_iter().map(object).collect())
    }

    /// Creates an object that must not exist yet. Only one of several concurrent writers creates it. On a
    /// local disk, the file and its folder are synced.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store refuses it for another reason than that the object exists.
    pub fn create(&self, path: &str, bytes: Vec<u8>) -> Result<Created> {
        if let Some(local) = &self.local {
            let created = commit::create_file(&local.join(path), &bytes);
            return created.map_err(|error| Error::write(self.shown(path), error));
        }
        let store = self.store_for(bytes.len() as u64).map_err(|error| self.write_error(path, &error))?;
        let key = self.key(path)?;
        let created = runtime::wait(retry::create(store, key, bytes.into()))?;
        created.map_err(|error| self.write_error(path, &error))
    }

    /// Writes an object atomically, and replaces an existing one. On a local disk, the file and its folder
    /// are synced.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store refuses it.
    pub fn replace(&self, path: &str, bytes: Vec<u8>) -> Result<()> {
        if let Some(local) = &self.local {
            let file = local.join(path);
            let write = || commit::write_atomically(&file, &bytes);
            let written = commit::in_folder(file.parent().unwrap_or(local), write);
            return written.map_err(|error| Error::write(self.shown(path), error));
        }
        let store = self.store_for(bytes.len() as u64).map_err(|error| self.write_error(path, &error))?;
        let (key, bytes) = (self.key(path)?, Bytes::from(bytes));
        let put = async move { retry::repeat(|| store.put(&key, bytes.clone().into())).await };
        runtime::wait(put)?.map(|_| ()).map_err(|error| self.write_error(path, &error))
    }

    /// Starts an object that is written as a stream. No other writer may use its name. Requests are sent only
    /// when there are enough bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a local file cannot be created, or if a folder, a device or a pipe has its name.
    pub fn upload(&self, path: &str) -> Result<Upload> {
        self.upload_of(path, 0)
    }

    /// Works like [`upload`](Self::upload) for an object of up to `bytes` bytes. Its parts are large enough
    /// for the store's limit of the number of parts. Up to four of them are in memory: one that is being
    /// filled, and others that are being sent, which [`UploadParts`] limits over all uploads.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`upload`](Self::upload).
    pub fn upload_of(&self, path: &str, bytes: u64) -> Result<Upload> {
        self.key(path)?;
        let multipart = match self.local.as_ref().map(|local| local.join(path)) {
            // The upload starts by creating a file in this folder.
            Some(file) => {
                // The complete upload is renamed, which would replace a device.
                if file.is_dir() || commit::is_special(&file) {
                    let message = "this is a folder, a device or a pipe, not a file";
                    return Err(Error::location(self.shown(path).display(), message, "give another file"));
                }
                let start = || self.start_multipart(path, 0);
                let started = commit::in_folder(file.parent().unwrap_or(&file), start);
                Some(started.map_err(|error| Error::write(self.shown(path), error))?)
            }
            None => None,
        };
        Ok(Upload::new(self.clone(), path.to_owned(), multipart, bytes))
    }

    /// Starts the upload of an object in parts of `part_bytes` bytes.
    fn start_multipart(&self, path: &str, part_bytes: u64) -> io::Result<Box<dyn MultipartUpload>> {
        let store = self.store_for(part_bytes).map_err(|error| self.service.io_error(&error))?;
        let key = self.key(path).map_err(io::Error::other)?;
        let started = self.threads().wait(async move { store.put_multipart(&key).await })?;
        started.map_err(|error| self.service.io_error(&error))
    }

    /// Returns a client with a timeout for requests of up to `bytes` bytes.
    fn store_for(&self, bytes: u64) -> object_store::Result<Arc<dyn ObjectStore>> {
        match &self.remote {
            Some(remote) if bytes > LARGEST_REQUEST => remote.connect_with(Patience::Long, bytes),
            _ => Ok(Arc::clone(&self.store)),
        }
    }

    /// Removes objects. Objects that do not exist are ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store refuses to remove one.
    pub fn delete(&self, paths: Vec<String>) -> Result<()> {
        if let Some(local) = &self.local {
            for path in paths {
                match fs_err::remove_file(local.join(&path)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(Error::write(self.shown(&path), error));
                    }
                    _ => {}
                }
            }
            return Ok(());
        }
        let deleted = runtime::wait(self.deletion(&paths)?)?;
        deleted.map_err(|error| self.write_error(&paths.join("`, `"), &error))
    }

    /// Removes the files of a failed writer, within a time limit. Errors are ignored, because the writer's
    /// own error is reported. A vacuum removes the rest.
    pub fn clean_up(&self, paths: Vec<String>) {
        if self.local.is_some() {
            let _ = self.delete(paths);
        } else if let Ok(deletion) = self.deletion(&paths) {
            Threads::Network.clean_up(deletion);
        }
    }

    /// Returns the requests that remove objects of a store.
    fn deletion(
        &self,
        paths: &[String],
    ) -> Result<impl Future<Output = object_store::Result<()>> + Send + 'static> {
        let keys = paths.iter().map(|path| self.key(path)).collect::<Result<Vec<_>>>()?;
        let store = Arc::clone(&self.store);
        let delete = move || {
            let mut deleted = store.delete_stream(stream::iter(keys.clone().into_iter().map(Ok)).boxed());
            async move {
                while let Some(result) = deleted.next().await {
                    match result {
                        Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            }
        };
        Ok(async move { retry::repeat(delete).await })
    }

    /// Removes a folder and its contents, starting with the object `first` in it, so a partly removed folder
    /// does not have this object. A folder that does not exist is ignored.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot list the folder, or refuses to remove an object.
    pub fn remove_folder(&self, folder: &str, first: Option<&str>) -> Result<()> {
        if let Some(first) = first {
            self.delete(vec![format!("{folder}/{first}")])?;
        }
        let Some(local) = &self.local else {
            let objects = self.list(folder, None)?.into_iter().map(|object| object.path).collect();
            return self.delete(objects);
        };
        let path = local.join(folder);
        let removed = match path.exists() {
            true => commit::sync_directory(&path).and_then(|()| fs_err::remove_dir_all(&path)),
            false => Ok(()),
        };
        removed.map_err(|error| Error::write(self.shown(folder), error))
    }

    /// Returns the names of files and folders directly in `folder`, or in the storage's own folder if it is
    /// empty.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store cannot list them.
    pub fn entries(&self, folder: &str) -> Result<Vec<String>> {
        if let Some(local) = &self.local {
            let path = local.join(folder);
            if !path.exists() {
                return Ok(Vec::new());
            }
            let names =
                fs_err::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            return Ok(names.collect::<io::Result<_>>()?);
        }
        let key = self.key(folder)?;
        let listed = self.ask(folder, move |store| {
            let key = key.clone();
            async move { store.list_with_delimiter(Some(&key)).await }
        })?;
        let paths =
            listed.common_prefixes.into_iter().chain(listed.objects.into_iter().map(|meta| meta.location));
        Ok(paths.filter_map(|path| path.filename().map(str::to_owned)).collect())
    }

    fn key(&self, path: &str) -> Result<ObjectPath> {
        let key = match (self.prefix.as_ref(), path) {
            ("", path) => path.to_owned(),
            (prefix, "") => prefix.to_owned(),
            (prefix, path) => format!("{prefix}/{path}"),
        };
        ObjectPath::parse(&key).map_err(|error| {
            Error::location(self.shown(path).display(), error.to_string(), "use another name")
        })
    }

    /// Sends a read-only request and waits for the answer. The first request to an unreachable store fails
    /// within about ten seconds.
    fn ask<T, R>(
        &self,
        path: &str,
        request: impl Fn(Arc<dyn ObjectStore>) -> R + Send + Sync + 'static,
    ) -> Result<T>
    where
        T: Send + 'static,
        R: Future<Output = object_store::Result<T>> + Send + 'static,
    {
        let probe = || locked(&self.probe);
        let (store, first) = (Arc::clone(&self.store), probe().clone());
        let answer = self.wait(path, async move {
            let Some(first) = first else {
                return retry::repeat(|| request(Arc::clone(&store))).await;
            };
            let ask_first = || request(Arc::clone(&first));
            match retry::repeat_within(retry::FIRST_REQUEST_BUDGET, ask_first).await {
                // The store is reachable, but busy.
                Err(error) if !retry::is_unreachable(&error) && service::fault_of(&error).is_none() => {
                    retry::repeat(|| request(Arc::clone(&store))).await
                }
                answered => answered,
            }
        })?;
        *probe() = None;
        Ok(answer)
    }

    fn wait<T: Send + 'static>(
        &self,
        path: &str,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.threads().wait(request)?.map_err(|error| self.read_error(path, error))
    }

    /// Returns the threads on which requests of this storage run.
    fn threads(&self) -> Threads {
        if self.local.is_some() { Threads::Disk } else { Threads::Network }
    }

    fn read_error(&self, path: &str, error: object_store::Error) -> Error {
        let path = self.shown(path);
        let path = path.display();
        let fault = match error {
            object_store::Error::Precondition { .. } => {
                Fault::new(Kind::Data, format!("`{path}` was changed while it was read")).hint(CHANGED)
            }
            error => {
                let (message, hint) = self.service.explain(&error);
                let kind = service::fault_of(&error).map_or(Kind::Storage, |fault| fault.kind);
                Fault::new(kind, format!("`{path}` cannot be read: {message}")).hint(hint)
            }
        };
        fault.into()
    }

    fn write_error(&self, path: &str, error: &object_store::Error) -> Error {
        Error::write(self.shown(path), self.service.io_error(error))
    }
}

/// Returns the path of a listed object in the folder `prefix`.
fn path_in(prefix: &ObjectPath, object: &ObjectPath) -> String {
    let key = object.as_ref();
    key.strip_prefix(prefix.as_ref()).unwrap_or(key).trim_start_matches('/').to_owned()
}

/// Creates an object with the path `path` from the store's description.
fn object_of(path: String, meta: ObjectMeta) -> Object {
    Object { path, bytes: meta.size, modified: meta.last_modified.into(), e_tag: meta.e_tag }
}

/// Returns a random name of 16 hexadecimal digits, for files that must not be written by two writers.
pub fn random_name() -> String {
    // The version and the variant are in different positions of the two halves, so all bits of the name are
    // random.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    format!("{:016x}", high ^ low)
}

#[cfg(test)]
mod tests;
