//! Errors of object stores, in words.

use std::io;

/// An error of the store as an error of input and output: the operating system's own where there is one.
pub(crate) fn io_error(error: object_store::Error) -> io::Error {
    super::io_error_of(&error)
}

/// What a failed request means, and what to do about it.
pub fn explain(error: &object_store::Error) -> (String, String) {
    let cause = root_cause(error);
    let code = between(&cause, "<Code>", "</Code>");
    let told = match (code, between(&cause, "<Message>", "</Message>")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => cause.clone(),
    };
    let (message, hint) = match error {
        _ if code == Some("NoSuchBucket") => (
            "the store has no such bucket".to_owned(),
            "correct the bucket's name, or the endpoint and region in the environment",
        ),
        _ if is_denied(&cause) => (
            format!("the store denied the request: {told}"),
            "check the credentials in the environment (`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, \
             `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` and `AZURE_STORAGE_ACCOUNT_KEY`), and what \
             they are allowed to do",
        ),
        object_store::Error::NotFound { .. } => ("it does not exist".to_owned(), "check the path"),
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => (
            format!("the store does not support a request that datasets need: {told}"),
            "use a store with conditional writes (`If-None-Match`)",
        ),
        _ => (
            format!("the store does not answer as it should: {told}"),
            "check that the store can be reached (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ALLOW_HTTP` for S3), then run \
             this again",
        ),
    };
    (message, hint.to_owned())
}

/// The innermost cause that says something.
fn root_cause(error: &object_store::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    let mut told = error.to_string();
    while let Some(source) = cause.source() {
        cause = source;
        let text = cause.to_string();
        // An answer's body has the store's own words; the causes below it have only the status.
        if told.contains("<Code>") || text.is_empty() {
            break;
        }
        told = text;
    }
    told
}

/// Whether the store refuses to answer this user.
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
