//! The stores that sources are in: the local disk and buckets of object stores. Every object is read in the version that
//! was found, and a failed request is explained.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::execution::object_store::ObjectStoreUrl;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    ClientConfigKey, ClientOptions, CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, OBJECT_STORE_COALESCE_DEFAULT, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, RetryConfig, coalesce_ranges,
};

use super::files::is_pattern;
use super::head::Wrong;
use crate::config::{ObjectStoreConfig, ObjectStores, credentials_hint};

/// The local disk or a bucket. Through a [`VersionedStore`] it gives objects only in the version in which they were
/// [found](Self::found). It remembers why a request for one failed, since the engine passes on only a text of it.
#[derive(Debug)]
pub(super) struct SourceStore {
    /// Stands before the keys of a bucket's objects: `s3://bucket`. Empty for the local disk.
    pub(super) url: String,
    /// The URL under which the engine has the store.
    pub(super) engine_url: ObjectStoreUrl,
    kind: Kind,
    /// For reading: it goes on for a minute when the store is busy.
    inner: Arc<dyn ObjectStore>,
    /// For the first requests: it gives up in seconds, so that a wrong endpoint is noticed.
    probe: Arc<dyn ObjectStore>,
    objects: Mutex<HashMap<Path, FoundObject>>,
}

/// An object that was found.
#[derive(Debug)]
struct FoundObject {
    meta: ObjectMeta,
    /// The ETag of the first answer, which all later requests ask for. That of a listing may be written differently.
    e_tag: Option<String>,
    failure: Option<Wrong>,
}

/// What a store is.
#[derive(Debug, Clone)]
enum Kind {
    Local,
    S3 {
        config: ObjectStoreConfig,
        /// Whether the environment has credentials, or none are needed. If not, the cloud machine's own are asked for.
        has_credentials: bool,
    },
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
}

/// The stores of all sources, each connected to once.
#[derive(Debug)]
pub(super) struct Stores {
    pub(super) local: Arc<SourceStore>,
    /// By `scheme://bucket`.
    buckets: BTreeMap<String, Arc<SourceStore>>,
}

impl Default for Stores {
    fn default() -> Self {
        let disk: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new());
        let engine_url = ObjectStoreUrl::local_filesystem();
        let local = SourceStore::new(String::new(), engine_url, Kind::Local, Arc::clone(&disk), disk);
        Self { local: Arc::new(local), buckets: BTreeMap::new() }
    }
}

impl Stores {
    /// The bucket of a URL (`s3://`, `gs://` or `az://`), and the rest of the URL.
    ///
    /// # Errors
    ///
    /// If the URL is of another scheme or names no bucket, or the settings of its store contradict each other.
    pub(super) fn open<'a>(
        &mut self,
        url: &'a str,
        configs: &ObjectStores,
    ) -> Result<(Arc<SourceStore>, &'a str), Wrong> {
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
        let bucket = Arc::new(SourceStore::connect(scheme, name, configs)?);
        self.buckets.insert(url, Arc::clone(&bucket));
        Ok((bucket, pattern))
    }
}

impl SourceStore {
    fn new(
        url: String,
        engine_url: ObjectStoreUrl,
        kind: Kind,
        inner: Arc<dyn ObjectStore>,
        probe: Arc<dyn ObjectStore>,
    ) -> Self {
        Self { url, engine_url, kind, inner, probe, objects: Mutex::default() }
    }

    fn connect(scheme: &str, name: &str, configs: &ObjectStores) -> Result<Self, Wrong> {
        let kind = match scheme {
            "s3" => {
                let config = configs.of_bucket(name);
                let has_credentials = config.anonymous || has_credentials(&s3_builder(name, &config));
                Kind::S3 { config, has_credentials }
            }
            "gs" => Kind::Google,
            _ => Kind::Azure,
        };
        let url = format!("{scheme}://{name}");
        let wrong = |error: &dyn fmt::Display| (error.to_string(), kind.settings_hint());
        let engine_url = ObjectStoreUrl::parse(&url).map_err(|error| wrong(&error.strip_backtrace()))?;
        let store = |seconds, retries| {
            build_store(&kind, name, seconds, retries).map_err(|error| wrong(&root_cause(&error)))
        };
        Ok(Self::new(url, engine_url, kind.clone(), store(120, 10)?, store(10, 3)?))
    }

    /// A store for tests, of which no request fails for reasons of the network.
    #[cfg(test)]
    pub(super) fn of_tests(inner: Arc<dyn ObjectStore>) -> Self {
        let config = ObjectStoreConfig::default();
        let kind = Kind::S3 { config, has_credentials: true };
        let engine_url = ObjectStoreUrl::parse("s3://logs").unwrap();
        Self::new("s3://logs".to_owned(), engine_url, kind, Arc::clone(&inner), inner)
    }

    /// The store with which objects are found.
    pub(super) fn probe(&self) -> &dyn ObjectStore {
        self.probe.as_ref()
    }

    /// Whether this is the local disk.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.kind, Kind::Local)
    }

    /// From now on the object is read in this version only.
    pub(super) fn found(&self, meta: &ObjectMeta) {
        let object = FoundObject { meta: meta.clone(), e_tag: None, failure: None };
        self.objects().entry(meta.location.clone()).or_insert(object);
    }

    /// Why the last request for an object failed, if one did.
    pub(super) fn failure(&self, location: &Path) -> Option<Wrong> {
        self.objects().get(location).and_then(|object| object.failure.clone())
    }

    /// Remembers why an object cannot be read.
    pub(super) fn fail(&self, location: &Path, failure: Wrong) {
        if let Some(object) = self.objects().get_mut(location) {
            object.failure.get_or_insert(failure);
        }
    }

    /// Checks that a file is still the one that was found.
    ///
    /// # Errors
    ///
    /// [`object_store::Error::Precondition`] if it is not, and the store's if it is gone.
    pub(super) async fn check_unchanged(&self, location: &Path) -> Result<()> {
        self.head(location).await.map(|_| ())
    }

    fn objects(&self) -> MutexGuard<'_, HashMap<Path, FoundObject>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the error of a request for an object.
    fn remember(&self, location: &Path, error: object_store::Error) -> object_store::Error {
        let failure = self.explain(&error);
        self.fail(location, failure);
        error
    }

    /// Compares what was found with what came.
    fn check_version(&self, location: &Path, came: &ObjectMeta) -> Result<()> {
        let mut objects = self.objects();
        let Some(object) = objects.get_mut(location) else { return Ok(()) };
        let same = match (&object.e_tag, &came.e_tag) {
            (Some(first), Some(tag)) => first == tag,
            _ => is_same(&object.meta, came),
        };
        if !same {
            return Err(object_store::Error::Precondition {
                path: location.to_string(),
                source: "it is not the object that was found".into(),
            });
        }
        if object.e_tag.is_none() {
            object.e_tag = came.e_tag.clone();
        }
        Ok(())
    }

    /// What a failed request means, and what to do about it.
    pub(super) fn explain(&self, error: &object_store::Error) -> Wrong {
        let cause = root_cause(error);
        if matches!(error, object_store::Error::Precondition { .. })
            || cause.contains("412 Precondition Failed")
        {
            let hint =
                "run this again when nothing writes to the source; write new files instead of changing files";
            return ("it was changed while it was read".to_owned(), hint.to_owned());
        }
        match &self.kind {
            Kind::Local => {
                let cause = std::error::Error::source(error).map_or(error.to_string(), ToString::to_string);
                let hint = "make the file readable for the user that runs this, and let nothing remove it";
                (format!("it cannot be read: {cause}"), hint.to_owned())
            }
            kind => self.explain_request(kind, error, cause),
        }
    }

    fn explain_request(&self, kind: &Kind, error: &object_store::Error, cause: String) -> Wrong {
        let code = between(&cause, "<Code>", "</Code>");
        let told = match (code, between(&cause, "<Message>", "</Message>")) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            _ => cause.clone(),
        };
        let server = kind.server();
        match error {
            _ if matches!(code, Some("NoSuchBucket" | "ContainerNotFound")) => {
                (format!("there is no such bucket at {server}"), kind.settings_hint())
            }
            // Listing has no variant of its own for these.
            _ if is_denied(&cause) => {
                let hint =
                    format!("{}; they must be allowed to list and read the bucket", kind.credentials_hint());
                (format!("{server} denied the request: {told}"), hint)
            }
            object_store::Error::NotFound { .. } => {
                (format!("{server} has no such object or bucket: {told}"), kind.settings_hint())
            }
            _ if matches!(kind, Kind::S3 { has_credentials: false, .. }) => {
                let message =
                    "there are no credentials in the environment, and this machine has none of its own";
                (format!("{message}: {told}"), kind.credentials_hint())
            }
            _ => {
                let message = format!("{server} cannot be reached or does not answer as it should: {told}");
                (message, kind.settings_hint())
            }
        }
    }
}

/// Whether an answer is about the object that a listing named: of the same size, with the same ETag where both have
/// one, and otherwise of the same second.
fn is_same(found: &ObjectMeta, came: &ObjectMeta) -> bool {
    // Some stores put quotes around an ETag in one of the two places only.
    let tag = |meta: &ObjectMeta| meta.e_tag.as_ref().map(|tag| tag.trim_matches('"').to_owned());
    let same_version = match (tag(found), tag(came)) {
        (Some(found), Some(came)) => found == came,
        _ => found.last_modified.timestamp() == came.last_modified.timestamp(),
    };
    found.size == came.size && same_version
}

impl Kind {
    fn server(&self) -> &str {
        match self {
            Self::Local => "the disk",
            Self::S3 { config, .. } => config.endpoint.as_deref().unwrap_or("AWS"),
            Self::Google => "Google Cloud Storage",
            Self::Azure => "Azure",
        }
    }

    fn settings_hint(&self) -> String {
        match self {
            Self::Local => "correct the path".to_owned(),
            Self::S3 { config, .. } => {
                let given = match &config.endpoint {
                    Some(_) => "correct the bucket's name, or `endpoint` and `region`",
                    None => {
                        "correct the bucket's name or `region`, or give an `endpoint` (without one it is AWS)"
                    }
                };
                let place = "under `[object_stores.\"s3://bucket\"]` or `[object_stores.s3]`";
                format!("{given} {place}; {}", credentials_hint())
            }
            Self::Google | Self::Azure => format!("correct the bucket's name; {}", self.credentials_hint()),
        }
    }

    fn credentials_hint(&self) -> String {
        match self {
            Self::Google => {
                "set GOOGLE_APPLICATION_CREDENTIALS in the environment to the path of a key file".to_owned()
            }
            Self::Azure => {
                "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or a SAS token or service principal) in \
                 the environment"
                    .to_owned()
            }
            Self::Local | Self::S3 { .. } => credentials_hint(),
        }
    }
}

/// A client of a bucket that gives up a request after `seconds`, and a busy store after half of them.
fn build_store(kind: &Kind, name: &str, seconds: u64, retries: usize) -> Result<Arc<dyn ObjectStore>> {
    let retry = RetryConfig {
        max_retries: retries,
        retry_timeout: Duration::from_secs(seconds / 2),
        ..RetryConfig::default()
    };
    let options = |allow_http: bool| {
        ClientOptions::new()
            .with_allow_http(allow_http)
            .with_connect_timeout(Duration::from_secs(3))
            .with_timeout(Duration::from_secs(seconds))
    };
    let allows = |variable: &str| std::env::var(variable).is_ok_and(|allowed| allowed == "true");
    Ok(match kind {
        Kind::Local => Arc::new(LocalFileSystem::new()),
        Kind::S3 { config, .. } => {
            let of_environment = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
            let of_environment = s3_builder(name, config).get_config_value(&of_environment);
            let allow_http = config.allow_http || of_environment.is_some_and(|allowed| allowed == "true");
            let builder = s3_builder(name, config).with_client_options(options(allow_http));
            Arc::new(builder.with_retry(retry).build()?)
        }
        Kind::Google => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(name);
            let builder = builder.with_client_options(options(allows("GOOGLE_ALLOW_HTTP")));
            Arc::new(builder.with_retry(retry).build()?)
        }
        Kind::Azure => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(name);
            let builder = builder.with_client_options(options(allows("AZURE_ALLOW_HTTP")));
            Arc::new(builder.with_retry(retry).build()?)
        }
    })
}

/// The builder for an S3 bucket: the settings of the environment, with those of the configuration before them.
fn s3_builder(name: &str, config: &ObjectStoreConfig) -> AmazonS3Builder {
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(name);
    let of_environment = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let of_environment = of_environment.iter().find_map(|key| builder.get_config_value(key));
    let endpoint = config.endpoint.clone().or(of_environment);
    let path_style = config.path_style.unwrap_or(endpoint.is_some());
    builder = builder.with_virtual_hosted_style_request(!path_style);
    if let Some(endpoint) = endpoint {
        let endpoint = endpoint.trim_end_matches('/');
        let of_bucket = match endpoint.split_once("://") {
            Some((scheme, host)) if !path_style => format!("{scheme}://{name}.{host}"),
            _ => endpoint.to_owned(),
        };
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, of_bucket);
    }
    if let Some(region) = &config.region {
        builder = builder.with_region(region);
    }
    if config.anonymous { builder.with_skip_signature(true) } else { builder }
}

fn has_credentials(builder: &AmazonS3Builder) -> bool {
    let keys = [
        AmazonS3ConfigKey::AccessKeyId,
        AmazonS3ConfigKey::WebIdentityTokenFile,
        AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
        AmazonS3ConfigKey::ContainerCredentialsFullUri,
    ];
    keys.iter().any(|key| builder.get_config_value(key).is_some())
}

/// The innermost cause that says something.
fn root_cause(error: &object_store::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    let mut told = error.to_string();
    while let Some(source) = cause.source() {
        cause = source;
        let text = cause.to_string();
        // An answer's body has the store's own words; what is below it has only the status.
        if told.contains("<Code>") || text.is_empty() {
            break;
        }
        told = text;
    }
    told
}

/// Whether a store refuses to answer this user.
fn is_denied(answer: &str) -> bool {
    let codes = [
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
    ];
    let codes = codes.iter().any(|code| answer.contains(&format!("<Code>{code}</Code>")));
    codes || answer.contains("403 Forbidden") || answer.contains("401 Unauthorized")
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split_once(end)?.0)
}

/// A [`SourceStore`] as the engine reads it. Bodies of answers hold on to it.
#[derive(Debug, Clone)]
pub(super) struct VersionedStore(pub(super) Arc<SourceStore>);

impl fmt::Display for SourceStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "source files of {}", self.inner)
    }
}

impl fmt::Display for VersionedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl SourceStore {
    async fn head(&self, location: &Path) -> Result<ObjectMeta> {
        let meta = self.inner.head(location).await.map_err(|error| self.remember(location, error))?;
        self.check_version(location, &meta).map_err(|error| self.remember(location, error))?;
        Ok(meta)
    }
}

#[async_trait]
impl ObjectStore for VersionedStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let store = &self.0;
        let first_tag = store.objects().get(location).and_then(|object| object.e_tag.clone());
        let options = GetOptions { if_match: options.if_match.clone().or(first_tag), ..options };
        let came = store.inner.get_opts(location, options).await;
        let mut came = came.map_err(|error| store.remember(location, error))?;
        store.check_version(location, &came.meta).map_err(|error| store.remember(location, error))?;
        if let GetResultPayload::Stream(chunks) = came.payload {
            let (store, location) = (Arc::clone(store), location.clone());
            let chunks = chunks.map_err(move |error| store.remember(&location, error));
            came.payload = GetResultPayload::Stream(chunks.boxed());
        }
        Ok(came)
    }

    /// Through [`get_opts`](Self::get_opts), which checks the version; stores' own ways to get ranges do not.
    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        // Seeking costs a disk nothing, a request costs more than a MiB.
        let gap = if self.0.is_local() { 0 } else { OBJECT_STORE_COALESCE_DEFAULT };
        coalesce_ranges(ranges, |range| self.get_range(location, range), gap).await
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.0.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.inner.copy_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[test]
    fn errors_of_the_store_are_in_words() {
        let store = SourceStore::of_tests(Arc::new(InMemory::new()));
        let body = "<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>";
        let missing = object_store::Error::NotFound { path: "p".to_owned(), source: body.into() };
        assert!(store.explain(&missing).0.contains("no such bucket at AWS"));
        let body = "<Error><Code>SignatureDoesNotMatch</Code><Message>wrong key</Message></Error>";
        let denied = object_store::Error::PermissionDenied { path: "p".to_owned(), source: body.into() };
        let (message, hint) = store.explain(&denied);
        assert!(message.ends_with("denied the request: SignatureDoesNotMatch: wrong key"), "{message}");
        assert!(hint.contains("AWS_SECRET_ACCESS_KEY"));
        let down = object_store::Error::Generic { store: "S3", source: "connection refused".into() };
        assert!(store.explain(&down).0.ends_with("connection refused"));
    }

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

    /// The bytes of an object that was found, after `put` replaced it, and what the store remembers of the failure.
    fn read_after(
        listed_tag: bool,
        read_before: bool,
        put: Option<&'static str>,
    ) -> (Result<Bytes>, Option<Wrong>) {
        let (memory, path) = (Arc::new(InMemory::new()), Path::from("a.csv"));
        futures::executor::block_on(async {
            memory.put(&path, "one".into()).await.unwrap();
            let store = VersionedStore(Arc::new(SourceStore::of_tests(memory.clone())));
            let mut meta = memory.head(&path).await.unwrap();
            meta.e_tag = meta.e_tag.filter(|_| listed_tag);
            store.0.found(&meta);
            if read_before {
                assert_eq!(store.get_range(&path, 0..1).await.unwrap(), "o");
            }
            if let Some(text) = put {
                memory.put(&path, text.into()).await.unwrap();
            }
            let wanted = std::slice::from_ref(&(0..3));
            let ranges = store.get_ranges(&path, wanted).await.map(|mut ranges| ranges.remove(0));
            (ranges, store.0.failure(&path))
        })
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
        // Without any ETag, the size and time tell.
        let (read, _) = read_after(false, false, Some("three"));
        assert!(matches!(read, Err(object_store::Error::Precondition { .. })), "{read:?}");
    }
}
