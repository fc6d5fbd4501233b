//! Explains failed requests in plain words.

use std::error::Error;
use std::{io, iter};

use onefold_base::fault::{Fault, Kind};

/// The reason why a request failed, and a hint.
pub type Explanation = (String, String);

/// The hints of a [`Service`]'s explanations. Callers with their own settings replace them.
#[derive(Debug, Clone)]
pub struct Hints {
    /// The hint if the bucket does not exist or the store does not answer.
    pub settings: String,
    /// The hint if the store denies a request.
    pub credentials: String,
    /// The hint if an object is not the requested version.
    pub changed: String,
}

/// The local disk or the service that stores files. It explains failed requests.
#[derive(Debug, Clone)]
pub struct Service {
    /// The name in messages.
    name: String,
    is_local: bool,
    /// Whether credentials are configured or not needed. Otherwise, the machine's own credentials are used,
    /// if it has any.
    has_credentials: bool,
    /// The hints of the explanations.
    pub hints: Hints,
}

/// The hint if a file of a dataset has changed.
pub(crate) const CHANGED: &str =
    "files of a dataset never change; find out what else writes there, and build the dataset again";

impl Service {
    /// Creates the service of the local disk.
    pub fn local_disk() -> Self {
        let readable = "check that the file exists and that this user may read it";
        Self { is_local: true, ..Self::new("the disk".to_owned(), readable, "") }
    }

    /// Creates the service S3 at `endpoint`, or AWS.
    pub fn s3(endpoint: Option<String>, has_credentials: bool) -> Self {
        let settings = "check the bucket's name and the settings in the environment (`AWS_ENDPOINT_URL`, \
                        `AWS_REGION`, `AWS_ALLOW_HTTP`), then run this again";
        let credentials = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) in the environment, \
                           or AWS_PROFILE to the name of a profile";
        let name = endpoint.unwrap_or_else(|| "AWS".to_owned());
        Self { has_credentials, ..Self::new(name, settings, credentials) }
    }

    /// Creates the service Google Cloud Storage.
    pub fn google_cloud(has_credentials: bool) -> Self {
        let settings = "check the bucket's name, then run this again";
        let credentials = "set GOOGLE_APPLICATION_CREDENTIALS in the environment to the path of a key file";
        let name = "Google Cloud Storage".to_owned();
        Self { has_credentials, ..Self::new(name, settings, credentials) }
    }

    /// Creates the service Azure Blob Storage.
    pub fn azure(has_credentials: bool) -> Self {
        let settings = "check the container's name and AZURE_STORAGE_ACCOUNT_NAME, then run this again";
        let credentials = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or a SAS token or service \
                           principal) in the environment";
        Self { has_credentials, ..Self::new("Azure".to_owned(), settings, credentials) }
    }

    fn new(name: String, settings: &str, credentials: &str) -> Self {
        let hints = Hints {
            settings: settings.to_owned(),
            credentials: credentials.to_owned(),
            changed: CHANGED.to_owned(),
        };
        Self { name, is_local: false, has_credentials: true, hints }
    }

    /// Returns whether this is the local disk.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// Explains why a request failed. The message can follow "the file cannot be read: ".
    pub fn explain(&self, error: &object_store::Error) -> Explanation {
        if let Some(fault) = fault_of(error) {
            return explained(fault);
        }
        let explanation = |message: String, hint: &str| (message, hint.to_owned());
        let cause = root_cause(error);
        if matches!(error, object_store::Error::Precondition { .. })
            || cause.contains("412 Precondition Failed")
        {
            return explanation("it was changed while it was read".to_owned(), &self.hints.changed);
        }
        if self.is_local {
            let cause = Error::source(error).map_or(error.to_string(), ToString::to_string);
            return explanation(cause, &self.hints.settings);
        }
        let code = between(&cause, "<Code>", "</Code>");
        let answer = match (code, between(&cause, "<Message>", "</Message>")) {
            (Some(code), Some(message)) => format!("{code}: {message}"),
            (Some(code), None) => code.to_owned(),
            _ => cause.clone(),
        };
        let (name, Hints { settings, credentials, .. }) = (&self.name, &self.hints);
        match error {
            _ if matches!(code, Some("NoSuchBucket" | "ContainerNotFound")) => {
                explanation(format!("there is no such bucket at {name}"), settings)
            }
            _ if is_of_another_region(&cause) => {
                let region = between(&cause, "<Region>", "</Region>");
                let region = region.map_or(String::new(), |region| format!("it is in `{region}`; "));
                let message = format!("the bucket is in another region of {name}: {answer}");
                explanation(message, &format!("{region}{settings}"))
            }
            // Listing has no error variants for these failures.
            _ if is_denied(&cause) => {
                let hint =
                    format!("{credentials}; they must allow listing, reading and, for output, writing");
                explanation(format!("{name} denied the request: {answer}"), &hint)
            }
            object_store::Error::NotFound { .. } => {
                explanation(format!("{name} has no such object or bucket: {answer}"), settings)
            }
            object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
                let message = format!("{name} does not support a request that datasets need: {answer}");
                explanation(message, "use a store with conditional writes (`If-None-Match`)")
            }
            _ if !self.has_credentials => {
                let message =
                    "there are no credentials in the environment, and this machine has none of its own";
                explanation(format!("{message}: {answer}"), credentials)
            }
            _ => {
                let message = format!("{name} cannot be reached or does not answer as it should: {answer}");
                explanation(message, settings)
            }
        }
    }

    /// Explains why a client could not be created, which happens before any request.
    pub(crate) fn explain_settings(&self, error: &object_store::Error) -> Explanation {
        if let Some(fault) = fault_of(error) {
            return explained(fault);
        }
        let cause = Error::source(error).map_or(error.to_string(), ToString::to_string);
        let message = format!("the settings in the environment cannot be used: {cause}");
        (message, self.hints.credentials.clone())
    }

    /// Converts a failed request to an I/O error: the operating system's own error on a local disk, otherwise
    /// the explanation as a [`Fault`].
    pub(crate) fn io_error(&self, error: &object_store::Error) -> io::Error {
        match (self.is_local, fault_of(error)) {
            (true, _) => operating_system_error(error),
            (_, Some(fault)) => io::Error::other(fault.clone()),
            _ => {
                let (message, hint) = self.explain(error);
                io::Error::other(Fault::new(Kind::Storage, message).hint(hint))
            }
        }
    }
}

/// Returns the [`Fault`] among the causes of `error`. A fault comes from this project's code in a client, for
/// example if a profile gives no credentials.
pub(crate) fn fault_of(error: &object_store::Error) -> Option<&Fault> {
    find_cause(error)
}

/// Returns the first error of a type among `error` and its causes.
pub(crate) fn find_cause<E: Error + 'static>(error: &object_store::Error) -> Option<&E> {
    let first: &(dyn Error + 'static) = error;
    iter::successors(Some(first), |error| Error::source(*error)).find_map(|error| error.downcast_ref())
}

fn explained(fault: &Fault) -> Explanation {
    let hints: Vec<_> = fault.hints.iter().map(ToString::to_string).collect();
    (fault.message.to_string(), hints.join("; "))
}

/// Returns the operating system's error that caused `error`.
fn operating_system_error(error: &object_store::Error) -> io::Error {
    match find_cause::<io::Error>(error) {
        Some(system) => io::Error::new(system.kind(), system.to_string()),
        None => io::Error::other(error.to_string()),
    }
}

/// Returns the innermost cause that has a text.
fn root_cause(error: &object_store::Error) -> String {
    let mut cause: &dyn Error = error;
    let mut text = error.to_string();
    while let Some(source) = cause.source() {
        cause = source;
        let inner = cause.to_string();
        // The body of an answer contains the store's message. The causes below it contain only the status.
        if text.contains("<Code>") || inner.is_empty() {
            break;
        }
        text = inner;
    }
    text
}

/// Returns whether the store denied access.
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
    has_code(answer, &codes) || answer.contains("403 Forbidden") || answer.contains("401 Unauthorized")
}

/// Returns whether the store reports that the bucket is in another region than the one in the request.
fn is_of_another_region(answer: &str) -> bool {
    let codes = [
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "IncorrectEndpoint",
        "PermanentRedirect",
        "TemporaryRedirect",
    ];
    // This is the error text of `object_store` for a response with status 301, which has no body if an
    // object was requested.
    has_code(answer, &codes) || answer.contains("incorrectly configured region")
}

fn has_code(answer: &str, codes: &[&str]) -> bool {
    between(answer, "<Code>", "</Code>").is_some_and(|code| codes.contains(&code))
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split_once(end)?.0)
}

#[cfg(test)]
mod tests {
    use object_store::Error;
    use onefold_base::fault::Explain;

    use super::*;

    #[test]
    fn answers_of_a_store_are_explained() {
        let store = Service::s3(None, true);
        let body = "<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>";
        let missing = Error::NotFound { path: "p".to_owned(), source: body.into() };
        assert!(store.explain(&missing).0.contains("no such bucket at AWS"));
        for (code, variable) in [
            ("SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
            ("AuthenticationFailed", "AWS_ACCESS_KEY_ID"),
            ("ExpiredToken", "AWS_SESSION_TOKEN"),
        ] {
            let body = format!("<Error><Code>{code}</Code><Message>wrong key</Message></Error>");
            let denied = Error::PermissionDenied { path: "p".to_owned(), source: body.into() };
            let (message, hint) = store.explain(&denied);
            assert!(message.ends_with(&format!("denied the request: {code}: wrong key")), "{message}");
            assert!(hint.contains(variable), "{hint}");
        }
        let malformed = "<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong</Message>\
                         <Region>eu-west-1</Region></Error>";
        let bare =
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region";
        let redirect = "<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>";
        for (answer, region) in [(malformed, "it is in `eu-west-1`; "), (bare, ""), (redirect, "")] {
            let elsewhere = Error::Generic { store: "S3", source: answer.into() };
            let (message, hint) = store.explain(&elsewhere);
            assert!(message.starts_with("the bucket is in another region of AWS: "), "{message}");
            assert!(hint.starts_with(region) && hint.contains("AWS_REGION"), "{hint}");
        }
        let down = || Error::Generic { store: "S3", source: "connection refused".into() };
        assert!(store.explain(&down()).0.ends_with("connection refused"));
        let bare = Service::s3(Some("http://minio".to_owned()), false).explain(&down());
        assert!(bare.0.starts_with("there are no credentials"), "{bare:?}");
    }

    #[test]
    fn errors_of_the_disk_stay_those_of_the_operating_system() {
        let full = || Error::Generic {
            store: "disk",
            source: Box::new(io::Error::new(io::ErrorKind::StorageFull, "no space left")),
        };
        assert_eq!(Service::local_disk().io_error(&full()).kind(), io::ErrorKind::StorageFull);
        let explained = Service::azure(true).io_error(&full());
        let explained = explained.get_ref().unwrap().downcast_ref::<Fault>().unwrap();
        assert!(explained.message.to_string().starts_with("Azure cannot be reached"), "{explained}");
    }

    /// The hint must not advise to free space on a disk.
    #[test]
    fn a_store_that_refuses_to_write_is_explained() {
        let body = "<Error><Code>AccessDenied</Code></Error>";
        let denied = Error::PermissionDenied { path: "p".to_owned(), source: body.into() };
        let error =
            crate::Error::write("s3://bucket/part.parquet", Service::s3(None, true).io_error(&denied));
        assert_eq!(error.fault().kind, Kind::Storage);
        let text = error.to_string();
        assert!(text.starts_with("`s3://bucket/part.parquet` cannot be written: AWS denied"), "{text}");
        assert!(text.contains("hint: set AWS_ACCESS_KEY_ID"), "{text}");
    }
}
