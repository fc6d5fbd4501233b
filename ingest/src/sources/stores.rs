//! S3-compatible stores: connected to as the configuration says, and their errors in words.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use datafusion::execution::object_store::ObjectStoreUrl;
use futures::TryStreamExt;
use glob::Pattern;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::{ClientConfigKey, ClientOptions, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};

use super::files::{is_folder_marker, is_hidden, is_pattern, matches_below};
use super::head::Wrong;
use crate::config::{ObjectStoreConfig, ObjectStores, credentials_hint};

/// A bucket that sources are in.
#[derive(Debug, Clone)]
pub(super) struct Bucket {
    /// `s3://bucket`, which stands before the keys of its objects.
    pub(super) url: String,
    /// Under what the engine finds the store.
    pub(super) engine_url: ObjectStoreUrl,
    /// For reading: it goes on for a minute when the store is busy.
    pub(super) store: Arc<dyn ObjectStore>,
    /// For the first requests: it gives up in seconds, so that a wrong endpoint is noticed.
    probe: Arc<dyn ObjectStore>,
    config: ObjectStoreConfig,
    /// Whether the environment has credentials, or none are needed. If not, the cloud machine's own are asked for.
    has_credentials: bool,
}

/// The buckets that were connected to, by name.
#[derive(Debug, Default)]
pub(super) struct Buckets(BTreeMap<String, Bucket>);

impl Buckets {
    /// The bucket of an `s3://` URL, and the rest of the URL.
    ///
    /// # Errors
    ///
    /// If the URL is of another scheme or names no bucket, or its store's settings contradict each other.
    pub(super) fn open<'a>(
        &mut self,
        url: &'a str,
        stores: &ObjectStores,
    ) -> Result<(Bucket, &'a str), Wrong> {
        let Some(rest) = url.strip_prefix("s3://") else {
            let hint =
                "use a path or an `s3://bucket/…` URL; for other stores, copy the files or mount the store";
            return Err(("stores of this kind cannot be read".to_owned(), hint.to_owned()));
        };
        let (name, pattern) = rest.split_once('/').unwrap_or((rest, ""));
        if name.is_empty() || is_pattern(name) {
            return Err(("it names no bucket".to_owned(), "write `s3://bucket/folder/*.parquet`".to_owned()));
        }
        if let Some(bucket) = self.0.get(name) {
            return Ok((bucket.clone(), pattern));
        }
        let bucket = Bucket::connect(name, stores.of_bucket(name))?;
        self.0.insert(name.to_owned(), bucket.clone());
        Ok((bucket, pattern))
    }
}

impl Bucket {
    fn connect(name: &str, config: ObjectStoreConfig) -> Result<Self, Wrong> {
        let url = format!("s3://{name}");
        let wrong = |error: &dyn std::fmt::Display| {
            (error.to_string(), format!("{}; {}", store_hint(&config), credentials_hint()))
        };
        let engine_url = ObjectStoreUrl::parse(&url).map_err(|error| wrong(&error.strip_backtrace()))?;
        let of_environment = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
        let of_environment = builder(name, &config).get_config_value(&of_environment);
        let allow_http = config.allow_http || of_environment.is_some_and(|allowed| allowed == "true");
        let store = |seconds, retries| {
            let options = ClientOptions::new()
                .with_allow_http(allow_http)
                .with_connect_timeout(Duration::from_secs(3))
                .with_timeout(Duration::from_secs(seconds));
            let retry = RetryConfig {
                max_retries: retries,
                retry_timeout: Duration::from_secs(seconds / 2),
                ..RetryConfig::default()
            };
            builder(name, &config).with_client_options(options).with_retry(retry).build()
        };
        let probe = Arc::new(store(10, 3).map_err(|error| wrong(&root_cause(&error)))?);
        let patient = Arc::new(store(120, 10).map_err(|error| wrong(&root_cause(&error)))?);
        let has_credentials = config.anonymous || has_credentials(&builder(name, &config));
        Ok(Self { url, engine_url, store: patient, probe, config, has_credentials })
    }

    /// The objects whose keys match `pattern`, or that are in folders whose keys do.
    ///
    /// # Errors
    ///
    /// What the store answered, in words. No match is none.
    pub(super) async fn expand(&self, pattern: &str) -> Result<Vec<ObjectMeta>, Wrong> {
        let parts: Vec<&str> = pattern.split('/').filter(|part| !part.is_empty()).collect();
        self.walk(&parts).await.map_err(|error| self.explain(&error))
    }

    /// Goes down the folders that `parts` name, listing one level where a part is a pattern.
    async fn walk(&self, parts: &[&str]) -> object_store::Result<Vec<ObjectMeta>> {
        let hidden_wanted = parts.iter().any(|part| is_hidden(part));
        let mut found = Vec::new();
        // Folders, with the number of parts that they match.
        let mut folders = vec![(String::new(), 0)];
        while let Some((folder, matched)) = folders.pop() {
            let literal = parts[matched..].iter().take_while(|part| !is_pattern(part));
            let fixed = literal.clone().count();
            let folder = literal.fold(folder, |folder, part| join(&folder, part));
            let rest = &parts[matched + fixed..];
            let keep = |name: &str| hidden_wanted || !name.split('/').any(is_hidden);
            match rest {
                [] => {
                    let below = self.below(&folder).await?;
                    if below.is_empty() && !folder.is_empty() {
                        found.extend(self.object(&folder).await?);
                    }
                    found.extend(below.into_iter().filter(|meta| keep(relative(meta, &folder))));
                }
                ["**", ..] => {
                    let matching = |meta: &ObjectMeta| {
                        let key = relative(meta, &folder);
                        keep(key) && matches_below(key, rest)
                    };
                    found.extend(self.below(&folder).await?.into_iter().filter(matching));
                }
                [part, after @ ..] => {
                    let pattern = Pattern::new(part).map_err(|error| object_store::Error::Generic {
                        store: "S3",
                        source: Box::new(error),
                    })?;
                    let listed = self.probe.list_with_delimiter(prefix(&folder)?.as_ref()).await?;
                    let matching =
                        |path: &Path| path.filename().is_some_and(|name| keep(name) && pattern.matches(name));
                    let deeper = listed.common_prefixes.into_iter().filter(|path| matching(path));
                    folders.extend(deeper.map(|path| (path.to_string(), matched + fixed + 1)));
                    if after.is_empty() {
                        found.extend(listed.objects.into_iter().filter(|meta| matching(&meta.location)));
                    }
                }
            }
        }
        found.retain(|meta| !is_folder_marker(meta));
        Ok(found)
    }

    async fn below(&self, folder: &str) -> object_store::Result<Vec<ObjectMeta>> {
        self.probe.list(prefix(folder)?.as_ref()).try_collect().await
    }

    async fn object(&self, key: &str) -> object_store::Result<Option<ObjectMeta>> {
        match self.probe.head(&Path::parse(key)?).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a failed request means, and what to do.
    pub(super) fn explain(&self, error: &object_store::Error) -> Wrong {
        let cause = root_cause(error);
        let code = between(&cause, "<Code>", "</Code>");
        let told = match (code, between(&cause, "<Message>", "</Message>")) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            _ => cause.clone(),
        };
        let endpoint = self.config.endpoint.as_deref().unwrap_or("AWS");
        match error {
            _ if code == Some("NoSuchBucket") => {
                (format!("there is no such bucket at {endpoint}"), store_hint(&self.config))
            }
            // Listing has no variant of its own for these.
            _ if is_denied(&cause) => {
                let hint =
                    format!("{}; they must be allowed to list and read the bucket", credentials_hint());
                (format!("{endpoint} denied the request: {told}"), hint)
            }
            object_store::Error::NotFound { .. } => {
                (format!("{endpoint} has no such object or bucket: {told}"), store_hint(&self.config))
            }
            object_store::Error::Precondition { .. } => {
                let hint = "run again when nothing writes to the source";
                ("it was changed while it was read".to_owned(), hint.to_owned())
            }
            _ if !self.has_credentials => {
                let message =
                    "there are no credentials in the environment, and this machine has none of its own";
                (format!("{message}: {told}"), credentials_hint())
            }
            _ => {
                let message = format!("{endpoint} cannot be reached or does not answer as it should: {told}");
                (message, store_hint(&self.config))
            }
        }
    }
}

/// The builder for a bucket: the environment's settings, those of the configuration before them.
fn builder(name: &str, config: &ObjectStoreConfig) -> AmazonS3Builder {
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

fn store_hint(config: &ObjectStoreConfig) -> String {
    let given = match &config.endpoint {
        Some(_) => "correct the bucket's name, or `endpoint` and `region`",
        None => "correct the bucket's name or `region`, or give an `endpoint` (without one it is AWS)",
    };
    format!("{given} under `[object_stores.\"s3://bucket\"]` or `[object_stores.s3]`")
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

/// Whether a store's answer is that it may not be asked.
fn is_denied(answer: &str) -> bool {
    let codes =
        ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"];
    let codes = codes.iter().any(|code| answer.contains(&format!("<Code>{code}</Code>")));
    codes || answer.contains("403 Forbidden") || answer.contains("401 Unauthorized")
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split_once(end)?.0)
}

fn join(folder: &str, part: &str) -> String {
    if folder.is_empty() { part.to_owned() } else { format!("{folder}/{part}") }
}

fn prefix(folder: &str) -> object_store::Result<Option<Path>> {
    if folder.is_empty() { Ok(None) } else { Ok(Some(Path::parse(folder)?)) }
}

/// An object's key below `folder`.
fn relative<'a>(meta: &'a ObjectMeta, folder: &str) -> &'a str {
    let key = meta.location.as_ref();
    key.strip_prefix(folder).unwrap_or(key).trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    fn bucket(store: InMemory) -> Bucket {
        let store: Arc<dyn ObjectStore> = Arc::new(store);
        Bucket {
            url: "s3://logs".to_owned(),
            engine_url: ObjectStoreUrl::parse("s3://logs").unwrap(),
            store: store.clone(),
            probe: store,
            config: ObjectStoreConfig::default(),
            has_credentials: true,
        }
    }

    #[test]
    fn patterns_go_down_the_folders() {
        let store = InMemory::new();
        futures::executor::block_on(async {
            for key in [
                "events/date=1/a.parquet",
                "events/date=1/b.json",
                "events/date=2/hour=3/a.parquet",
                "events/date=2/_temporary/a.parquet",
                "events/_SUCCESS",
                "events/top.parquet",
                "other/date=1/a.parquet",
            ] {
                store.put(&Path::from(key), b"x".to_vec().into()).await.unwrap();
            }
            store.put(&Path::from("events/date=9"), Vec::new().into()).await.unwrap();
        });
        let bucket = bucket(store);
        let expand = |pattern: &str| {
            let found = futures::executor::block_on(bucket.expand(pattern)).unwrap();
            let mut keys: Vec<String> = found.iter().map(|meta| meta.location.to_string()).collect();
            keys.sort();
            keys.join(" ")
        };
        let (one, two) = ("events/date=1/a.parquet", "events/date=2/hour=3/a.parquet");
        assert_eq!(expand("events/date=1/a.parquet"), one);
        assert_eq!(expand("events/date=1"), format!("{one} events/date=1/b.json"));
        assert_eq!(expand("events/date=*/"), format!("{one} events/date=1/b.json {two}"));
        assert_eq!(expand("events/date=*/*.parquet"), one);
        assert_eq!(expand("*/date=?/*.parquet"), format!("{one} other/date=1/a.parquet"));
        assert_eq!(expand("events/**/*.parquet"), format!("{one} {two} events/top.parquet"));
        assert_eq!(expand("events/**/hour=*"), two);
        assert_eq!(expand("events/date=2/_temporary"), "events/date=2/_temporary/a.parquet");
        assert_eq!(expand("nothing"), "");
        assert_eq!(expand("events/date=7*"), "");
        assert_eq!(expand("").split(' ').count(), 5);
    }

    #[test]
    fn errors_of_the_store_are_in_words() {
        let bucket = bucket(InMemory::new());
        let body = "<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>";
        let missing = object_store::Error::NotFound { path: "p".to_owned(), source: body.into() };
        assert!(bucket.explain(&missing).0.contains("no such bucket at AWS"));
        let body = "<Error><Code>SignatureDoesNotMatch</Code><Message>wrong key</Message></Error>";
        let denied = object_store::Error::PermissionDenied { path: "p".to_owned(), source: body.into() };
        let (message, hint) = bucket.explain(&denied);
        assert!(message.ends_with("denied the request: SignatureDoesNotMatch: wrong key"), "{message}");
        assert!(hint.contains("AWS_SECRET_ACCESS_KEY"));
        let down = object_store::Error::Generic { store: "S3", source: "connection refused".into() };
        assert!(bucket.explain(&down).0.ends_with("connection refused"));
    }

    #[test]
    fn other_stores_and_no_bucket_are_refused() {
        let mut buckets = Buckets::default();
        for url in ["gs://logs/a", "s3:///a", "s3://lo*/a"] {
            assert!(buckets.open(url, &ObjectStores::default()).is_err(), "{url}");
        }
        let (bucket, rest) = buckets.open("s3://logs/events/*.csv", &ObjectStores::default()).unwrap();
        assert_eq!((bucket.url.as_str(), rest), ("s3://logs", "events/*.csv"));
    }
}
