//! The stores that contain the sources: the local disk and buckets of object stores. [`onefold_storage`] provides
//! connections and explanations of failed requests. This module makes sure that every object is read in the version
//! that was found.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::execution::object_store::ObjectStoreUrl;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    OBJECT_STORE_COALESCE_DEFAULT, ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, coalesce_ranges,
};
use onefold_base::sync::locked;
use onefold_storage::{Hints, Patience, RemoteStore, S3Settings, Service};
use serde::{Deserialize, Serialize};

use super::files::is_pattern;
use crate::config::{ObjectStores, credentials_hint};
use crate::error::MessageAndHint;

/// The local disk or a bucket. A [`VersionedStore`] over it returns objects only in the version in which they were
/// [found](Self::found). It records why a request for an object failed, because the engine passes on only the text
/// of the error.
#[derive(Debug)]
pub(super) struct SourceStore {
    /// The URL prefix of the bucket's objects, such as `s3://bucket`. Empty for the local disk.
    pub(super) url: String,
    /// The URL under which the store is registered with the engine.
    pub(super) engine_url: ObjectStoreUrl,
    settings: S3Settings,
    service: Service,
    /// A client for reading data. It retries for three minutes when the store is busy or stalls.
    inner: Arc<dyn ObjectStore>,
    /// A client for the first requests. It gives up within seconds, so that a wrong endpoint is reported early.
    probe: Arc<dyn ObjectStore>,
    objects: Mutex<HashMap<Path, FoundObject>>,
}

/// An object that was found.
#[derive(Debug)]
struct FoundObject {
    meta: ObjectMeta,
    /// The ETag of the first response, which all later requests require. A listing may write it differently.
    e_tag: Option<String>,
    failure: Option<MessageAndHint>,
}

/// The stores of all sources, with one connection per store.
#[derive(Debug)]
pub(super) struct Stores {
    pub(super) local: Arc<SourceStore>,
    /// The buckets by `scheme://bucket`.
    buckets: BTreeMap<String, Arc<SourceStore>>,
}

/// A store in the form that is sent to another machine. The reading machine uses its own credentials.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SentStore {
    /// The URL of the bucket. Empty for the local disk.
    pub(super) url: String,
    pub(super) settings: S3Settings,
}

impl Default for Stores {
    fn default() -> Self {
        let disk: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new());
        let engine_url = ObjectStoreUrl::local_filesystem();
        let service = with_source_hints(Service::local_disk(), LOCAL_HINT.to_owned(), String::new());
        let settings = S3Settings::default();
        let local = SourceStore::new(String::new(), engine_url, settings, service, Arc::clone(&disk), disk);
        Self { local: Arc::new(local), buckets: BTreeMap::new() }
    }
}

impl Stores {
    /// Returns the store of a URL (`s3://`, `gs://` or `az://`), and the rest of the URL.
    ///
    /// # Errors
    ///
    /// A message and a hint if the URL has another scheme or no bucket, or the settings of its store contradict
    /// each other.
    pub(super) fn open<'a>(
        &mut self,
        url: &'a str,
        settings: &ObjectStores,
    ) -> Result<(Arc<SourceStore>, &'a str), MessageAndHint> {
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        if !matches!(scheme, "s3" | "gs" | "az") {
            let hint = "use a path, or a URL such as `s3://bucket/…`, `gs://bucket/…`, `az://container/…` or `file:///…`";
            return Err((format!("sources cannot be read from `{scheme}://`"), hint.to_owned()));
        }
        let (name, pattern) = rest.split_once('/').unwrap_or((rest, ""));
        if name.is_empty() || is_pattern(name) {
            let hint = format!("write `{scheme}://bucket/folder/*.parquet`");
            return Err(("the URL names no bucket".to_owned(), hint));
        }
        let url = format!("{scheme}://{name}");
        if let Some(bucket) = self.buckets.get(&url) {
            return Ok((Arc::clone(bucket), pattern));
        }
        let bucket = Arc::new(SourceStore::connect(&url, settings.of_bucket(name))?);
        self.buckets.insert(url, Arc::clone(&bucket));
        Ok((bucket, pattern))
    }
}

impl Stores {
    /// Connects to a store that another machine sent.
    ///
    /// # Errors
    ///
    /// A message and a hint if its URL or settings are wrong.
    pub(super) fn of_sent(sent: &SentStore) -> Result<Arc<SourceStore>, MessageAndHint> {
        match sent.url.is_empty() {
            true => Ok(Self::default().local),
            false => Ok(Arc::new(SourceStore::connect(&sent.url, sent.settings.clone())?)),
        }
    }
}

impl SourceStore {
    fn new(
        url: String,
        engine_url: ObjectStoreUrl,
        settings: S3Settings,
        service: Service,
        inner: Arc<dyn ObjectStore>,
        probe: Arc<dyn ObjectStore>,
    ) -> Self {
        Self { url, engine_url, settings, service, inner, probe, objects: Mutex::default() }
    }

    /// Connects to the bucket `url`.
    fn connect(url: &str, settings: S3Settings) -> Result<Self, MessageAndHint> {
        let hint = || "correct the URL under `[sources]`".to_owned();
        let engine_url = ObjectStoreUrl::parse(url).map_err(|error| (error.strip_backtrace(), hint()))?;
        let has_endpoint = settings.endpoint.is_some();
        let remote = RemoteStore::of_url(engine_url.as_ref(), settings.clone())
            .map_err(|message| (message, hint()))?;
        let (remote, _) = remote.ok_or_else(|| (format!("sources cannot be read from `{url}`"), hint()))?;
        let mut service = remote.service();
        service = match url.starts_with("s3://") {
            true => with_source_hints(service, s3_settings_hint(has_endpoint), credentials_hint()),
            false => {
                let Hints { settings, credentials, .. } = service.hints.clone();
                with_source_hints(service, settings, credentials)
            }
        };
        let client = |patience| remote.connect(patience).map_err(|error| service.explain(&error));
        let (inner, probe) = (client(Patience::Long)?, client(Patience::Short)?);
        Ok(Self::new(url.to_owned(), engine_url, settings, service, inner, probe))
    }

    /// Returns the form of the store that is sent to another machine.
    pub(super) fn sent(&self) -> SentStore {
        SentStore { url: self.url.clone(), settings: self.settings.clone() }
    }

    /// Creates a store for tests, whose requests do not fail because of the network.
    #[cfg(test)]
    pub(super) fn of_tests(inner: Arc<dyn ObjectStore>) -> Self {
        let engine_url = ObjectStoreUrl::parse("s3://logs").unwrap();
        let service = with_source_hints(Service::s3(None, true), s3_settings_hint(false), credentials_hint());
        let settings = S3Settings::default();
        Self::new("s3://logs".to_owned(), engine_url, settings, service, Arc::clone(&inner), inner)
    }

    /// Returns the client for finding objects.
    pub(super) fn probe(&self) -> &dyn ObjectStore {
        self.probe.as_ref()
    }

    /// Returns the client for reading objects.
    #[cfg(feature = "delta")]
    pub(super) fn client(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.inner)
    }

    /// Whether this is the local disk.
    pub(super) fn is_local(&self) -> bool {
        self.service.is_local()
    }

    /// Records the version of a found object. From then on, the object is read in this version only.
    pub(super) fn found(&self, meta: &ObjectMeta) {
        let object = FoundObject { meta: meta.clone(), e_tag: None, failure: None };
        self.objects().entry(meta.location.clone()).or_insert(object);
    }

    /// Returns why the last request for an object failed, if it did.
    pub(super) fn failure(&self, location: &Path) -> Option<MessageAndHint> {
        self.objects().get(location).and_then(|object| object.failure.clone())
    }

    /// Records why an object cannot be read.
    pub(super) fn fail(&self, location: &Path, failure: MessageAndHint) {
        if let Some(object) = self.objects().get_mut(location) {
            object.failure.get_or_insert(failure);
        }
    }

    /// Checks that a file still has the version that was found.
    ///
    /// # Errors
    ///
    /// [`object_store::Error::Precondition`] if its version differs, and the store's error if it does not exist any
    /// more.
    pub(super) async fn check_unchanged(&self, location: &Path) -> Result<()> {
        let meta = self.inner.head(location).await.map_err(|error| self.remember(location, error))?;
        self.check_version(location, &meta).map_err(|error| self.remember(location, error))
    }

    fn objects(&self) -> MutexGuard<'_, HashMap<Path, FoundObject>> {
        locked(&self.objects)
    }

    /// Records the error of a request for an object.
    fn remember(&self, location: &Path, error: object_store::Error) -> object_store::Error {
        let failure = self.explain(&error);
        self.fail(location, failure);
        error
    }

    /// Compares the object that was found with the object in a response.
    fn check_version(&self, location: &Path, sent: &ObjectMeta) -> Result<()> {
        let mut objects = self.objects();
        let Some(object) = objects.get_mut(location) else { return Ok(()) };
        let same = match (&object.e_tag, &sent.e_tag) {
            (Some(first), Some(tag)) => first == tag,
            _ => is_same(&object.meta, sent),
        };
        if !same {
            return Err(object_store::Error::Precondition {
                path: location.to_string(),
                source: "it is not the object that was found".into(),
            });
        }
        if object.e_tag.is_none() {
            object.e_tag = sent.e_tag.clone();
        }
        Ok(())
    }

    /// Explains why a request failed, with a hint.
    pub(super) fn explain(&self, error: &object_store::Error) -> MessageAndHint {
        let (message, hint) = self.service.explain(error);
        match self.is_local() && !matches!(error, object_store::Error::Precondition { .. }) {
            true => (format!("it cannot be read: {message}"), hint),
            false => (message, hint),
        }
    }
}

/// Whether a response has the object that a listing named: with the same size, and with the same ETag, or the same
/// modification time in seconds if one of them has no ETag.
fn is_same(listed: &ObjectMeta, sent: &ObjectMeta) -> bool {
    // Some stores put quotes around an ETag in only one of the two places.
    let tag = |meta: &ObjectMeta| meta.e_tag.as_ref().map(|tag| tag.trim_matches('"').to_owned());
    let same_version = match (tag(listed), tag(sent)) {
        (Some(listed), Some(sent)) => listed == sent,
        _ => listed.last_modified.timestamp() == sent.last_modified.timestamp(),
    };
    listed.size == sent.size && same_version
}

/// The hint for a local file that cannot be read.
const LOCAL_HINT: &str = "make the file readable for the user that runs this, and let nothing remove it";

/// Returns a service whose hints refer to sources.
fn with_source_hints(mut service: Service, settings: String, credentials: String) -> Service {
    let changed =
        "run this again when nothing writes to the source; write new files instead of changing files";
    service.hints = Hints { settings, credentials, changed: changed.to_owned() };
    service
}

/// The hint for an S3 bucket that does not exist, or whose server does not respond.
fn s3_settings_hint(has_endpoint: bool) -> String {
    let settings = match has_endpoint {
        true => "correct the bucket's name, or `endpoint` and `region`",
        false => "correct the bucket's name or `region`, or give an `endpoint` (without one it is AWS)",
    };
    let section = "under `[object_stores.\"s3://bucket\"]` or `[object_stores.s3]`";
    format!("{settings} {section}; {}", credentials_hint())
}

/// The object store through which the engine reads a [`SourceStore`]. Bodies of responses keep a reference to it.
#[derive(Debug, Clone)]
pub(super) struct VersionedStore {
    store: Arc<SourceStore>,
    /// Whether a remote object is read in several requests.
    divides: bool,
}

/// The size in bytes of the first request for a text, which is enough for the rows from which columns are inferred.
const FIRST_REQUEST: u64 = 256 << 10;
/// The size in bytes of each further request. One request is made ahead of decoding.
const REQUEST: u64 = 4 << 20;

impl VersionedStore {
    pub(super) fn new(store: &Arc<SourceStore>) -> Self {
        Self { store: Arc::clone(store), divides: false }
    }

    /// Returns the store for texts, which reads remote objects in requests of a few MiB.
    ///
    /// Rows are taken from a response only as fast as the query runs, so reading an object of many GiB in one response
    /// could keep that response open for hours. Requests of a few MiB end within their time limit, can be repeated, and
    /// are refused by the store if the object has changed since the first request.
    pub(super) fn of_text(store: &Arc<SourceStore>) -> Self {
        Self { divides: true, ..Self::new(store) }
    }

    /// Returns the response to one request. The object has the version that was found.
    async fn response(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let store = &self.store;
        let first_tag = store.objects().get(location).and_then(|object| object.e_tag.clone());
        let options = GetOptions { if_match: options.if_match.clone().or(first_tag), ..options };
        let result = store.inner.get_opts(location, options).await;
        let mut result = result.map_err(|error| store.remember(location, error))?;
        store.check_version(location, &result.meta).map_err(|error| store.remember(location, error))?;
        if let GetResultPayload::Stream(chunks) = result.payload {
            let (store, location) = (Arc::clone(store), location.clone());
            let chunks = chunks.map_err(move |error| store.remember(&location, error));
            result.payload = GetResultPayload::Stream(chunks.boxed());
        }
        Ok(result)
    }

    /// Opens an object. Remote objects are requested in parts: the first part now, the others as they are read.
    async fn in_parts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (start, end) = match &options.range {
            None => (0, u64::MAX),
            Some(GetRange::Bounded(range)) => (range.start, range.end),
            Some(GetRange::Offset(start)) => (*start, u64::MAX),
            Some(GetRange::Suffix(_)) => return self.response(location, options).await,
        };
        let some = GetRange::Bounded(start..end.min(start.saturating_add(FIRST_REQUEST)));
        let first = self.response(location, GetOptions { range: Some(some), ..options.clone() }).await?;
        if matches!(first.payload, GetResultPayload::File(..)) {
            return self.response(location, options).await;
        }
        let (meta, attributes) = (first.meta.clone(), first.attributes.clone());
        let end = end.min(meta.size);
        let options = GetOptions { if_match: meta.e_tag.clone(), ..options };
        let rest = requests(first.range.end..end).map(move |range| {
            let (store, location) = (self.clone(), location.clone());
            let options = GetOptions { range: Some(GetRange::Bounded(range)), ..options.clone() };
            async move { store.response(&location, options).await?.bytes().await }
        });
        let rest: Vec<_> = rest.collect();
        let payload = stream::once(first.bytes()).chain(stream::iter(rest).buffered(2));
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload.boxed()),
            meta,
            range: start..end,
            attributes,
        })
    }
}

/// Divides `range` into requests.
fn requests(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (range.start..range.end).step_by(REQUEST as usize);
    starts.map(move |start| start..range.end.min(start + REQUEST))
}

impl fmt::Display for VersionedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "source files of {}", self.store.inner)
    }
}

#[async_trait]
impl ObjectStore for VersionedStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        match self.divides && !options.head {
            true => self.in_parts(location, options).await,
            false => self.response(location, options).await,
        }
    }

    /// Uses [`get_opts`](Self::get_opts), which checks the version; the stores' own range requests do not check it.
    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        // Seeking on a disk is free, but a request costs more than the transfer of a MiB.
        let gap = if self.store.is_local() { 0 } else { OBJECT_STORE_COALESCE_DEFAULT };
        coalesce_ranges(ranges, |range| self.get_range(location, range), gap).await
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.store.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.store.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn urls_name_a_store_and_a_bucket() {
        let mut stores = Stores::default();
        for url in ["http://logs/a", "s3:///a", "s3://lo*/a", "gs://?/a"] {
            let (message, hint) = stores.open(url, &ObjectStores::default()).unwrap_err();
            assert!(!message.is_empty() && hint.contains("://bucket/"), "{url}: {message}: {hint}");
        }
        let (bucket, rest) = stores.open("s3://logs/events/*.csv", &ObjectStores::default()).unwrap();
        assert_eq!((bucket.url.as_str(), rest), ("s3://logs", "events/*.csv"));
        let (again, _) = stores.open("s3://logs/other", &ObjectStores::default()).unwrap();
        assert!(Arc::ptr_eq(&bucket, &again));
    }

    /// Reads a found object after `put` replaced it. Returns its bytes and the failure that the store recorded.
    fn read_after(
        listed_tag: bool,
        read_before: bool,
        put: Option<&'static str>,
    ) -> (Result<Bytes>, Option<MessageAndHint>) {
        let (memory, path) = (Arc::new(InMemory::new()), Path::from("a.csv"));
        futures::executor::block_on(async {
            memory.put(&path, "one".into()).await.unwrap();
            let store = VersionedStore::new(&Arc::new(SourceStore::of_tests(memory.clone())));
            let mut meta = memory.head(&path).await.unwrap();
            meta.e_tag = meta.e_tag.filter(|_| listed_tag);
            store.store.found(&meta);
            if read_before {
                assert_eq!(store.get_range(&path, 0..1).await.unwrap(), "o");
            }
            if let Some(text) = put {
                memory.put(&path, text.into()).await.unwrap();
            }
            let wanted = std::slice::from_ref(&(0..3));
            let ranges = store.get_ranges(&path, wanted).await.map(|mut ranges| ranges.remove(0));
            (ranges, store.store.failure(&path))
        })
    }

    #[test]
    fn a_remote_text_is_not_read_whole_for_its_first_rows() {
        let path = Path::from("object");
        let lengths: Vec<usize> = futures::executor::block_on(async {
            let memory = InMemory::new();
            memory.put(&path, vec![7; 5 << 20].into()).await.unwrap();
            let store = VersionedStore::of_text(&Arc::new(SourceStore::of_tests(Arc::new(memory))));
            let chunks = store.get(&path).await.unwrap().into_stream();
            chunks.map(|chunk| chunk.unwrap().len()).collect().await
        });
        assert_eq!(lengths, [FIRST_REQUEST as usize, REQUEST as usize, (1 << 20) - FIRST_REQUEST as usize]);
    }

    #[test]
    fn requests_cover_the_range() {
        let cut: Vec<_> = requests(5..(2 * REQUEST + 6)).collect();
        assert_eq!(cut, [5..REQUEST + 5, REQUEST + 5..2 * REQUEST + 5, 2 * REQUEST + 5..2 * REQUEST + 6]);
        assert_eq!(requests(7..7).count(), 0);
    }

    #[test]
    fn an_object_that_changed_is_not_read() {
        for (listed_tag, read_before) in [(true, true), (true, false), (false, true)] {
            let (read, failure) = read_after(listed_tag, read_before, None);
            assert!(read.unwrap() == "one" && failure.is_none());
            let (read, failure) = read_after(listed_tag, read_before, Some("two"));
            assert!(matches!(read, Err(object_store::Error::Precondition { .. })), "{read:?}");
            let (message, hint) = failure.unwrap();
            assert!(
                message.contains("changed while it was read") && hint.contains("run this again"),
                "{message}"
            );
        }
        // Without any ETag, the size and time identify the version.
        let (read, _) = read_after(false, false, Some("three"));
        assert!(matches!(read, Err(object_store::Error::Precondition { .. })), "{read:?}");
    }
}
