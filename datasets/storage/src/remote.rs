//! Connections to object stores: S3 and compatible stores, Google Cloud Storage, and Azure Blob Storage.

use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreScheme};
use onefold_base::fault::{self, Fault};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::Service;
use crate::aws::{self, Profile};
use crate::retry::{LARGEST_REQUEST, Patience};

/// Settings for an S3 bucket that take precedence over those in the environment and in AWS profiles. They
/// contain no credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct S3Settings {
    /// The server's URL. If `None`, the endpoint in the environment, or AWS.
    pub endpoint: Option<String>,
    /// The bucket's region. If `None`, the region in the environment or the AWS profile, or `us-east-1`.
    pub region: Option<String>,
    /// Whether the endpoint may use plain HTTP. The environment can allow it too.
    #[serde(default)]
    pub allow_http: bool,
    /// Whether the bucket's name is in the path of request URLs rather than in the host. If `None`, it is in
    /// the path if there is an endpoint.
    pub path_style: Option<bool>,
    /// Whether requests are sent without a signature, which public buckets allow.
    #[serde(default)]
    pub anonymous: bool,
}

/// The hint on how to write a location.
const WRITE_URL: &str = "write a local path, or a URL such as `s3://bucket/folder`, `gs://bucket/folder`, \
                         `az://container/folder` or `file:///folder`";

/// The timeout for connecting to a store.
const CONNECT_TIMEOUT: &str = "3 seconds";

#[derive(Debug, Clone)]
enum Kind {
    S3 {
        settings: S3Settings,
        /// The AWS profile in use, or the reason why it cannot be used.
        profile: Result<Option<Arc<Profile>>, Fault>,
    },
    GoogleCloud,
    Azure,
}

/// Parses the URL `text`. As in other programs for object stores, `#`, `?` and spaces are part of names.
/// They are encoded as `%23`, `%3F` and `%20` before parsing, because a URL parser would end the path at
/// `#` or `?`.
///
/// # Errors
///
/// Returns a message and a hint if `text` is not a URL.
fn parse_url(text: &str) -> Result<Url, (String, String)> {
    let host = text.find("://").map_or(0, |at| at + 3);
    let (server, path) = text.split_at(text[host..].find('/').map_or(text.len(), |at| host + at));
    if server.contains(['#', '?']) || text.contains(char::is_control) {
        let message = "the bucket's name has `#` or `?` in it, or a name has a control character";
        return Err((message.to_owned(), WRITE_URL.to_owned()));
    }
    // HTTP URLs may have a query, for example signed URLs.
    if server.to_ascii_lowercase().starts_with("http") && path.contains(['#', '?']) {
        let hint = "leave it out, because credentials come from the environment, or write `%3F` for a question mark and \
                    `%23` for a number sign in a name";
        return Err(("the URL has a query or a fragment".to_owned(), hint.to_owned()));
    }
    let escaped = path.replace('#', "%23").replace('?', "%3F").replace(' ', "%20");
    Url::parse(&format!("{server}{escaped}")).map_err(|error| (error.to_string(), WRITE_URL.to_owned()))
}

/// A bucket (on Azure, a container) of an object store.
#[derive(Debug, Clone)]
pub struct RemoteStore {
    url: Url,
    kind: Kind,
}

impl RemoteStore {
    /// Returns the bucket of the location `text`, and the folder within it. Sends no request.
    ///
    /// # Errors
    ///
    /// Returns a message and a hint if `text` is not the URL of an object store.
    pub(crate) fn of_location(text: &str) -> Result<(Self, Path), (String, String)> {
        let url = parse_url(text)?;
        let found = Self::of_url(&url, S3Settings::default());
        let found = found.map_err(|message| (message, WRITE_URL.to_owned()))?;
        let unknown = || (format!("the scheme `{}` is not supported", url.scheme()), WRITE_URL.to_owned());
        found.ok_or_else(unknown)
    }

    /// Returns the bucket that `url` names, and the path within it; `None` if there is no client for the
    /// URL's scheme. Sends no request, but may read the files of AWS profiles. `settings` apply only to S3.
    ///
    /// # Errors
    ///
    /// Returns a message if the URL is not the URL of an object.
    pub fn of_url(url: &Url, settings: S3Settings) -> Result<Option<(Self, Path)>, String> {
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|error| error.to_string())?;
        let kind = match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let profile = profile(&settings);
                Kind::S3 { settings, profile }
            }
            ObjectStoreScheme::GoogleCloudStorage => Kind::GoogleCloud,
            ObjectStoreScheme::MicrosoftAzure => Kind::Azure,
            _ => return Ok(None),
        };
        Ok(Some((Self { url: url.clone(), kind }, path)))
    }

    /// Returns the service that hosts the bucket, which explains failed requests.
    pub fn service(&self) -> Service {
        match &self.kind {
            Kind::S3 { settings, profile } => {
                let builder = self.s3_builder(settings);
                let endpoint = settings.endpoint.clone().or_else(|| s3_endpoint(&builder));
                let of_profile = profile.as_ref().is_ok_and(|profile| {
                    profile.as_ref().is_some_and(|profile| profile.credentials().is_some())
                });
                Service::s3(endpoint, settings.anonymous || of_profile || has_credentials(&builder))
            }
            Kind::GoogleCloud => Service::google_cloud(has_google_credentials()),
            Kind::Azure => Service::azure(has_azure_credentials()),
        }
    }

    /// Creates a client of the bucket for requests of up to 8 MiB. If a timeout interrupts a longer answer,
    /// the client requests the rest. Sends no request.
    ///
    /// # Errors
    ///
    /// Returns an error if the settings contradict each other, the profile in AWS_PROFILE does not exist, or
    /// the endpoint uses plain HTTP without permission.
    pub fn connect(&self, patience: Patience) -> object_store::Result<Arc<dyn ObjectStore>> {
        self.connect_with(patience, LARGEST_REQUEST)
    }

    /// Creates a client of the bucket for requests of up to `bytes` bytes. Sends no request.
    pub(crate) fn connect_with(
        &self,
        patience: Patience,
        bytes: u64,
    ) -> object_store::Result<Arc<dyn ObjectStore>> {
        use ClientConfigKey::{AllowHttp, ConnectTimeout, Timeout};
        let retries = patience.retries();
        // A timeout in the environment takes precedence.
        let timeout = |variable: &str| match std::env::var_os(variable) {
            Some(_) => None,
            None => Some(format!("{} seconds", patience.try_timeout(bytes).as_secs())),
        };
        // The client's other settings, such as a proxy, come from the environment.
        Ok(match &self.kind {
            Kind::S3 { settings, profile } => {
                let mut builder = self
                    .s3_builder(settings)
                    .with_config(AmazonS3ConfigKey::Client(ConnectTimeout), CONNECT_TIMEOUT)
                    .with_retry(retries);
                let allowed = builder.get_config_value(&AmazonS3ConfigKey::Client(AllowHttp));
                check_scheme(s3_endpoint(&builder), allowed, "AWS_ALLOW_HTTP")?;
                if let Some(profile) = profile.as_ref().map_err(aws::error)? {
                    builder = profile.apply(builder);
                }
                if let Some(timeout) = timeout("AWS_TIMEOUT") {
                    builder = builder.with_config(AmazonS3ConfigKey::Client(Timeout), timeout);
                }
                Arc::new(builder.build()?)
            }
            Kind::GoogleCloud => {
                let mut builder = GoogleCloudStorageBuilder::from_env()
                    .with_url(self.url.as_str())
                    .with_config(GoogleConfigKey::Client(ConnectTimeout), CONNECT_TIMEOUT)
                    .with_retry(retries);
                if let Some(timeout) = timeout("GOOGLE_TIMEOUT") {
                    builder = builder.with_config(GoogleConfigKey::Client(Timeout), timeout);
                }
                Arc::new(builder.build()?)
            }
            Kind::Azure => {
                let mut builder = MicrosoftAzureBuilder::from_env()
                    .with_url(self.url.as_str())
                    .with_config(AzureConfigKey::Client(ConnectTimeout), CONNECT_TIMEOUT)
                    .with_retry(retries);
                let setting = |key| builder.get_config_value(&key);
                // The emulator has its own endpoint.
                if !setting(AzureConfigKey::UseEmulator).is_some_and(|emulator| is_true(&emulator)) {
                    let allowed = setting(AzureConfigKey::Client(AllowHttp));
                    check_scheme(setting(AzureConfigKey::Endpoint), allowed, "AZURE_ALLOW_HTTP")?;
                }
                if let Some(timeout) = timeout("AZURE_TIMEOUT") {
                    builder = builder.with_config(AzureConfigKey::Client(Timeout), timeout);
                }
                Arc::new(builder.build()?)
            }
        })
    }

    /// Creates the builder of a client of an S3 bucket from the environment. `settings` take precedence.
    fn s3_builder(&self, settings: &S3Settings) -> AmazonS3Builder {
        let mut builder = AmazonS3Builder::from_env().with_url(self.url.as_str());
        let endpoint = settings.endpoint.clone().or_else(|| s3_endpoint(&builder));
        // A URL such as `https://bucket.s3.region.amazonaws.com` itself determines where the bucket's name
        // is.
        let bucket = self.url.host_str().filter(|_| !matches!(self.url.scheme(), "http" | "https"));
        if let Some(bucket) = bucket {
            let in_host = builder.get_config_value(&AmazonS3ConfigKey::VirtualHostedStyleRequest);
            let host_by_environment = in_host.is_some_and(|in_host| is_true(&in_host));
            // The certificates of AWS do not cover bucket names with dots.
            let path_style = settings.path_style.unwrap_or(endpoint.is_some() || bucket.contains('.'));
            if settings.path_style.is_some() || !host_by_environment {
                builder = builder.with_virtual_hosted_style_request(!path_style);
                let of_bucket = match endpoint.as_deref().map(|endpoint| endpoint.trim_end_matches('/')) {
                    Some(endpoint) if path_style => Some(endpoint.to_owned()),
                    Some(endpoint) => endpoint
                        .split_once("://")
                        .map(|(scheme, host)| format!("{scheme}://{bucket}.{host}"))
                        .or_else(|| Some(endpoint.to_owned())),
                    None => None,
                };
                if let Some(endpoint) = of_bucket {
                    builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
                }
            }
        }
        if let Some(region) = &settings.region {
            builder = builder.with_region(region);
        }
        if settings.allow_http {
            builder = builder.with_allow_http(true);
        }
        if settings.anonymous { builder.with_skip_signature(true) } else { builder }
    }
}

/// Returns the AWS profile with the region and credentials for a client; `None` if there is no profile. If
/// the environment has keys, or requests are not signed, no profile is needed, and no file is read.
fn profile(settings: &S3Settings) -> Result<Option<Arc<Profile>>, Fault> {
    let builder = AmazonS3Builder::from_env();
    let keys = [AmazonS3ConfigKey::AccessKeyId, AmazonS3ConfigKey::SecretAccessKey];
    let has_keys = keys.iter().any(|key| builder.get_config_value(key).is_some());
    if has_keys || settings.anonymous || is_unsigned(&builder) {
        return Ok(None);
    }
    let region = settings.region.clone().or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Region));
    Ok(Profile::of_environment(region)?.map(Arc::new))
}

/// Returns the endpoint in the environment.
fn s3_endpoint(builder: &AmazonS3Builder) -> Option<String> {
    let keys = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    keys.iter().find_map(|key| builder.get_config_value(key))
}

/// Rejects an endpoint with plain HTTP that is not allowed. The client would also reject it, but only with
/// each request, and its error looks like a transient one.
fn check_scheme(
    endpoint: Option<String>,
    allowed: Option<String>,
    variable: &str,
) -> object_store::Result<()> {
    let is_plain = |endpoint: &String| endpoint.to_ascii_lowercase().starts_with("http://");
    let is_allowed = allowed.is_some_and(|allowed| is_true(&allowed));
    let Some(endpoint) = endpoint.filter(is_plain).filter(|_| !is_allowed) else { return Ok(()) };
    let message = format!("the endpoint `{endpoint}` uses plain HTTP, which is not encrypted");
    let hint =
        format!("use https, or set {variable}=true in the environment if the network may see the data");
    let source = Fault::new(fault::Kind::Options, message).hint(hint).into();
    Err(object_store::Error::Generic { store: "settings", source })
}

/// Returns whether the environment has credentials, or disables signatures. Otherwise, the credentials of the
/// cloud machine are used.
fn has_credentials(builder: &AmazonS3Builder) -> bool {
    let keys = [
        AmazonS3ConfigKey::AccessKeyId,
        AmazonS3ConfigKey::WebIdentityTokenFile,
        AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
        AmazonS3ConfigKey::ContainerCredentialsFullUri,
    ];
    keys.iter().any(|key| builder.get_config_value(key).is_some()) || is_unsigned(builder)
}

/// Returns whether the environment disables signatures.
fn is_unsigned(builder: &AmazonS3Builder) -> bool {
    let unsigned = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
    unsigned.is_some_and(|unsigned| is_true(&unsigned))
}

/// Returns whether the environment or the files of `gcloud` have credentials. Otherwise, the credentials of
/// the cloud machine are used.
fn has_google_credentials() -> bool {
    use GoogleConfigKey::{ApplicationCredentials, ServiceAccount, ServiceAccountKey, SkipSignature};
    let builder = GoogleCloudStorageBuilder::from_env();
    let keys = [ApplicationCredentials, ServiceAccount, ServiceAccountKey, SkipSignature];
    let of_gcloud =
        std::env::home_dir().map(|home| home.join(".config/gcloud/application_default_credentials.json"));
    keys.iter().any(|key| builder.get_config_value(key).is_some_and(|value| value != "false"))
        || of_gcloud.is_some_and(|file| file.exists())
}

/// Returns whether the environment has credentials. Otherwise, the credentials of the cloud machine are used.
fn has_azure_credentials() -> bool {
    use AzureConfigKey::{AccessKey, ClientId, SasKey, SkipSignature, Token, UseAzureCli, UseEmulator};
    let builder = MicrosoftAzureBuilder::from_env();
    let keys = [AccessKey, ClientId, SasKey, SkipSignature, Token, UseAzureCli, UseEmulator];
    keys.iter().any(|key| builder.get_config_value(key).is_some_and(|value| value != "false"))
}

/// Returns whether a setting in the environment is switched on, by the rules of [`object_store`].
fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "on" | "yes" | "y")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_needs_permission() {
        let connect = |endpoint: &str, allow_http| {
            let settings =
                S3Settings { endpoint: Some(endpoint.to_owned()), allow_http, ..Default::default() };
            let url = Url::parse("s3://bucket/folder").unwrap();
            let (remote, _) = RemoteStore::of_url(&url, settings).unwrap().unwrap();
            let service = remote.service();
            let connected = remote.connect(Patience::Short);
            connected.map_err(|error| [service.explain(&error), service.explain_settings(&error)])
        };
        for (message, hint) in connect("HTTP://127.0.0.1:1", false).unwrap_err() {
            assert!(message.starts_with("the endpoint `HTTP://127.0.0.1:1` uses plain HTTP"), "{message}");
            assert!(hint.contains("AWS_ALLOW_HTTP=true"), "{hint}");
        }
        connect("http://127.0.0.1:1", true).unwrap();
        connect("https://127.0.0.1:1", false).unwrap();
    }

    #[test]
    fn every_character_of_a_path_is_a_part_of_the_key() {
        let key = |text: &str| RemoteStore::of_location(text).unwrap().1.to_string();
        for (url, expected) in [
            ("s3://bucket/exp#1", "exp#1"),
            ("gs://bucket/exp%231/ds", "exp#1/ds"),
            ("az://container/exp?v=1&w=2#3", "exp?v=1&w=2#3"),
            ("s3://bucket/exp%3Fv=1", "exp?v=1"),
            ("s3://bucket/a b ", "a b "),
            ("s3://bucket/a%20b", "a b"),
            ("s3://bucket/100%25/ä", "100%/ä"),
            ("s3://bucket/", ""),
            ("s3://bucket", ""),
            ("https://bucket.s3.eu-west-1.amazonaws.com/a%23b", "a#b"),
        ] {
            assert_eq!(key(url), expected, "{url}");
        }
        for (url, message) in [
            ("s3://bucket#1", "the bucket's name has `#`"),
            ("s3://bucket?a/b", "the bucket's name has `#`"),
            ("s3://bucket/a\tb", "control character"),
            ("https://account.blob.core.windows.net/container/folder?sv=1", "a query or a fragment"),
            ("https://bucket.s3.eu-west-1.amazonaws.com/a#b", "a query or a fragment"),
        ] {
            let (found, hint) = RemoteStore::of_location(url).unwrap_err();
            assert!(found.contains(message) && !hint.is_empty(), "{url}: {found}");
        }
    }

    #[test]
    fn only_plain_http_is_checked() {
        let check = |endpoint: Option<&str>, allowed: &str| {
            check_scheme(endpoint.map(str::to_owned), Some(allowed.to_owned()), "AZURE_ALLOW_HTTP").is_ok()
        };
        assert!(check(None, "false") && check(Some("https://host"), "false"));
        assert!(check(Some("http://host"), "true") && !check(Some("http://host"), "false"));
        assert!(check_scheme(Some("http://host".to_owned()), None, "AZURE_ALLOW_HTTP").is_err());
    }
}
