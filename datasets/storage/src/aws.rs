//! AWS profiles: finds regions and credentials in the same way as the AWS CLI. Credentials may come from keys
//! in files, roles, SSO, processes that print credentials, and web identities. AWS's own crates read the
//! files and send requests to AWS's services, through the HTTP client of [`object_store`].

use std::convert::Infallible;
use std::env;
use std::error::Error;
use std::iter;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use aws_config::Region;
use aws_config::profile::{self, ProfileFileCredentialsProvider, ProfileSet};
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials;
use aws_credential_types::provider::error::{CredentialsError, TokenError};
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_types::body::SdkBody;
use bytes::Bytes;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use object_store::client::{
    HttpClient, HttpConnector as _, HttpErrorKind, HttpRequestBody, ReqwestConnector,
};
use object_store::{ClientOptions, CredentialProvider};
use onefold_base::fault::{Fault, Kind};
use tokio::sync::Mutex;

use crate::runtime::{self, PerProcess};

/// The profile that is used if AWS_PROFILE is not set. It need not exist.
const DEFAULT: &str = "default";
/// The region of AWS's services if none is configured, as for S3.
const DEFAULT_REGION: &str = "us-east-1";
/// The time before their expiry at which credentials are renewed. A request is repeated for up to three
/// minutes with the credentials of its first attempt.
const RENEWED_BEFORE: Duration = Duration::from_secs(300);
/// The time limit for getting credentials. A process may ask a person for a code.
const LIMIT: Duration = Duration::from_secs(60);
/// The time limit for connecting to one of AWS's services.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The time limit for an answer from one of AWS's services.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The keys of a profile any of which shows that the profile has credentials.
const CREDENTIALS: [&str; 8] = [
    "aws_access_key_id",
    "aws_secret_access_key",
    "role_arn",
    "credential_source",
    "credential_process",
    "web_identity_token_file",
    SSO[0],
    SSO[1],
];
/// The keys of a profile with credentials from SSO.
const SSO: [&str; 2] = ["sso_account_id", "sso_role_name"];
/// The largest number of profiles that are read of a chain of source profiles. A chain may be a loop.
const LONGEST_CHAIN: usize = 10;

/// A profile in AWS's files.
#[derive(Debug)]
pub(crate) struct Profile {
    /// The region of the profile, if neither the environment nor the settings have one.
    region: Option<String>,
    credentials: Option<Arc<ProfileCredentials>>,
}

impl Profile {
    /// Returns the profile that AWS_PROFILE names, or the default profile; `None` if AWS_PROFILE is not set
    /// and there is no default profile. `region` takes precedence over the profile's region. It reads AWS's
    /// files, but sends no request.
    ///
    /// # Errors
    ///
    /// Returns an error if the profile in AWS_PROFILE does not exist, the files are malformed, or the
    /// profile's credentials come from `aws login`.
    pub(crate) fn of_environment(region: Option<String>) -> Result<Option<Self>, Fault> {
        let named = env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
        let name = named.clone().unwrap_or_else(|| DEFAULT.to_owned());
        let load = {
            let name = name.clone();
            async move {
                // The defaults use the real disk, environment, and the files that the environment names.
                let (disk, environment, files) = Default::default();
                profile::load(&disk, &environment, &files, Some(name.into())).await
            }
        };
        let loaded = runtime::wait(load).map_err(|error| Fault::new(Kind::Storage, error.to_string()))?;
        let profiles = loaded.map_err(|error| {
            let message = format!("the profiles of AWS cannot be read: {}", causes(&error));
            Fault::new(Kind::Options, message).hint("correct the file; `aws configure list` reads it, too")
        })?;
        let Some(profile) = profiles.get_profile(&name) else {
            return if named.is_some() { Err(missing(&name, &profiles)) } else { Ok(None) };
        };
        if let Some(login) = chain(&profiles, &name).find(|profile| profile.get("login_session").is_some()) {
            return Err(of_login(login.name()));
        }
        let of_profile = profile.get("region").map(str::to_owned).filter(|_| region.is_none());
        let region = region.or_else(|| of_profile.clone()).unwrap_or_else(|| DEFAULT_REGION.to_owned());
        let has_credentials = CREDENTIALS.iter().any(|key| profile.get(key).is_some());
        let credentials = has_credentials.then(|| {
            let (hint, of_process) = (hint(&profiles, &name), PerProcess::new());
            Arc::new(ProfileCredentials { name, region, hint, of_process })
        });
        Ok(Some(Self { region: of_profile, credentials }))
    }

    /// Returns the credentials of the profile, if it has any.
    pub(crate) fn credentials(&self) -> Option<&Arc<ProfileCredentials>> {
        self.credentials.as_ref()
    }

    /// Adds the region and the credentials of the profile to a client, if it has them.
    pub(crate) fn apply(&self, mut builder: AmazonS3Builder) -> AmazonS3Builder {
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        match &self.credentials {
            Some(credentials) => builder.with_credentials(Arc::clone(credentials) as _),
            None => builder,
        }
    }
}

/// Returns the error for a profile that does not exist.
fn missing(name: &str, profiles: &ProfileSet) -> Fault {
    let file = |variable, default: &str| env::var(variable).unwrap_or_else(|_| default.to_owned());
    let config = file("AWS_CONFIG_FILE", "~/.aws/config");
    let keys = file("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials");
    let message = format!("AWS_PROFILE is `{name}`, and neither `{config}` nor `{keys}` has this profile");
    let mut names: Vec<_> = profiles.profiles().collect();
    names.sort_unstable();
    let hint = match names.is_empty() {
        true => format!("create it with `aws configure --profile {name}`"),
        false => format!(
            "set AWS_PROFILE to one of `{}`, or write the profile as `[profile {name}]` into `{config}`",
            names.join("`, `")
        ),
    };
    Fault::new(Kind::Options, message).hint(hint)
}

/// Returns the profile and its chain of source profiles.
fn chain<'a>(profiles: &'a ProfileSet, name: &'a str) -> impl Iterator<Item = &'a profile::Profile> {
    let next = |profile: &&'a profile::Profile| profiles.get_profile(profile.get("source_profile")?);
    iter::successors(profiles.get_profile(name), next).take(LONGEST_CHAIN)
}

/// Returns the hint for a profile that gives no credentials. It names the first profile of the chain that
/// uses SSO or a process.
fn hint(profiles: &ProfileSet, name: &str) -> String {
    let hint = chain(profiles, name).find_map(|profile| {
        let name = profile.name();
        if SSO.iter().any(|key| profile.get(key).is_some()) {
            return Some(format!("run `aws sso login --profile {name}`, then run this again"));
        }
        profile.get("credential_process").map(|_| {
            format!(
                "run the `credential_process` of the profile `{name}` in a shell: it must print credentials as JSON"
            )
        })
    });
    hint.unwrap_or_else(|| format!("see what `aws sts get-caller-identity --profile {name}` says"))
}

/// Returns the error for a profile with credentials from `aws login`. Support for it would add another
/// cryptography library to the build.
fn of_login(name: &str) -> Fault {
    let message = format!("the AWS profile `{name}` has a `login_session`, which is not supported");
    Fault::new(Kind::Options, message).hint(format!(
        "add `[profile {name}-process]` with `credential_process = aws configure export-credentials --profile {name}` \
         to AWS's files, and set AWS_PROFILE to `{name}-process`"
    ))
}

/// The credentials of a profile. All clients of a bucket share them.
#[derive(Debug)]
pub(crate) struct ProfileCredentials {
    name: String,
    /// The region in which roles are assumed.
    region: String,
    hint: String,
    of_process: PerProcess<Mutex<Cache>>,
}

#[derive(Debug)]
struct Cache {
    provider: ProfileFileCredentialsProvider,
    last: Option<Last>,
}

/// The last credentials that the profile gave.
#[derive(Debug)]
struct Last {
    credential: Arc<AwsCredential>,
    expiry: Option<SystemTime>,
    renewal: Option<SystemTime>,
}

impl Last {
    fn new(credentials: &Credentials, now: SystemTime) -> Self {
        let credential = AwsCredential {
            key_id: credentials.access_key_id().to_owned(),
            secret_key: credentials.secret_access_key().to_owned(),
            token: credentials.session_token().map(str::to_owned),
        };
        let expiry = credentials.expiry();
        let renewal = expiry.map(|expiry| renewal(now, expiry));
        Self { credential: Arc::new(credential), expiry, renewal }
    }
}

/// Returns the time at which credentials that expire at `expiry` are renewed: [`RENEWED_BEFORE`] their
/// expiry, or after half of the remaining time if that is later.
fn renewal(now: SystemTime, expiry: SystemTime) -> SystemTime {
    let left = expiry.duration_since(now).unwrap_or_default();
    now + left.saturating_sub(RENEWED_BEFORE).max(left / 2)
}

impl ProfileCredentials {
    fn provider(&self) -> ProfileFileCredentialsProvider {
        let config = ProviderConfig::without_region()
            .with_region(Some(Region::new(self.region.clone())))
            .with_http_client(http_client_fn(|settings, _| connector(settings)));
        ProfileFileCredentialsProvider::builder().configure(&config).profile_name(&self.name).build()
    }

    fn failure(&self, kind: Kind, cause: &str) -> object_store::Error {
        let message = format!("the AWS profile `{}` gives no credentials: {cause}", self.name);
        error(&Fault::new(kind, message).hint(&self.hint))
    }
}

#[async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let new = || Ok::<_, Infallible>(Mutex::new(Cache { provider: self.provider(), last: None }));
        let Ok(cache) = self.of_process.get_or_try_init(new);
        let mut cache = cache.lock().await;
        let now = SystemTime::now();
        if let Some(last) = &cache.last
            && last.renewal.is_none_or(|renewal| now < renewal)
        {
            return Ok(Arc::clone(&last.credential));
        }
        let failure = match tokio::time::timeout(LIMIT, cache.provider.provide_credentials()).await {
            Ok(Ok(credentials)) => {
                let last = cache.last.insert(Last::new(&credentials, now));
                return Ok(Arc::clone(&last.credential));
            }
            Ok(Err(error)) => {
                let of_files = matches!(error, CredentialsError::InvalidConfiguration(_));
                self.failure(if of_files { Kind::Options } else { Kind::Storage }, &causes(&error))
            }
            Err(_) => {
                self.failure(Kind::Storage, &format!("it took longer than {} seconds", LIMIT.as_secs()))
            }
        };
        // A provider remembers a failure of its construction, but not the cause.
        cache.provider = self.provider();
        match &mut cache.last {
            Some(Last { credential, expiry: Some(expiry), renewal: next }) if now < *expiry => {
                *next = Some(renewal(now, *expiry));
                Ok(Arc::clone(credential))
            }
            _ => Err(failure),
        }
    }
}

/// Converts a fault to an error of a client.
pub(crate) fn error(fault: &Fault) -> object_store::Error {
    object_store::Error::Generic { store: "S3", source: Box::new(fault.clone()) }
}

/// Returns the text of an error and its causes, without causes that only report missing credentials.
fn causes(error: &(dyn Error + 'static)) -> String {
    let (mut text, mut cause) = (String::new(), Some(error));
    while let Some(error) = cause {
        let words = error.to_string();
        let is_frame = error.is::<CredentialsError>() || error.is::<TokenError>();
        if !(text.contains(words.trim()) || is_frame && error.source().is_some()) {
            text += if text.is_empty() { "" } else { ": " };
            text += words.trim();
        }
        cause = error.source();
    }
    text
}

/// The HTTP client of [`object_store`] for AWS's crates, or the message why it could not be created.
#[derive(Debug)]
struct Connector(Result<HttpClient, String>);

/// Creates a client with the timeouts that AWS's crates request. The environment sets a proxy and
/// certificates as for object stores.
fn connector(settings: &HttpConnectorSettings) -> SharedHttpConnector {
    let mut options = ClientOptions::new()
        .with_connect_timeout(settings.connect_timeout().unwrap_or(CONNECT_TIMEOUT))
        .with_timeout(settings.read_timeout().unwrap_or(TIMEOUT));
    for (name, value) in env::vars_os() {
        if let (Some(name), Some(value)) = (name.to_str(), value.to_str())
            && name.starts_with("AWS_")
            && let Ok(AmazonS3ConfigKey::Client(key)) = name.to_ascii_lowercase().parse()
        {
            options = options.with_config(key, value);
        }
    }
    // AWS's crates use plain HTTP only for services on the same machine, and for explicitly configured URLs.
    let client = ReqwestConnector::default().connect(&options.with_allow_http(true));
    SharedHttpConnector::new(Connector(client.map_err(|error| error.to_string())))
}

impl HttpConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let client = self.0.clone();
        let server = request.uri().split('?').next().unwrap_or_default().to_owned();
        HttpConnectorFuture::new(async move {
            let client = client.map_err(|problem| ConnectorError::user(problem.into()))?;
            let request = request.try_into_http1x().map_err(|error| ConnectorError::user(error.into()))?;
            let request = request
                .map(|body| HttpRequestBody::from(Bytes::copy_from_slice(body.bytes().unwrap_or_default())));
            let response = client.execute(request).await.map_err(|error| {
                let message = format!("{server} does not answer: {}", causes(&error)).into();
                match error.kind() {
                    HttpErrorKind::Timeout => ConnectorError::timeout(message),
                    _ => ConnectorError::io(message),
                }
            })?;
            HttpResponse::try_from(response.map(SdkBody::from_body_1_x))
                .map_err(|error| ConnectorError::other(error.into(), None))
        })
    }
}

#[cfg(test)]
mod tests;
