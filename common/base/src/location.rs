//! Checks of paths that need no access to an object store: URLs, and paths that the shell or a caller left incomplete.

use std::path::{Component, Path};

/// A message and a hint.
pub type Problem = (String, String);

/// Returns whether a location is a URL rather than a local path.
pub fn is_url(location: &Path) -> bool {
    location.to_str().is_some_and(|text| {
        text.split_once("://").is_some_and(|(scheme, _)| {
            scheme.len() > 1
                && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
        })
    })
}

/// Checks that a location can name a folder on a local disk.
///
/// # Errors
///
/// The problem, if the location is a URL, or begins with the scheme of a URL or with a `~` that the shell did not
/// expand.
pub fn check_local(location: &Path) -> Result<(), Problem> {
    if is_url(location) {
        return Err(("this folder is written to a local disk".to_owned(), "give a local path".to_owned()));
    }
    check_tilde(location)?;
    check_scheme(location)
}

/// Rejects a `~` that the shell should have expanded, unless a folder with this name exists.
///
/// # Errors
///
/// The problem, if the path begins with such a `~`.
pub fn check_tilde(folder: &Path) -> Result<(), Problem> {
    let Some(Component::Normal(first)) = folder.components().next() else { return Ok(()) };
    if !first.to_string_lossy().starts_with('~') || Path::new(first).is_dir() {
        return Ok(());
    }
    let first = first.to_string_lossy();
    let message = format!("the shell did not expand `{first}`, and the working directory has no such folder");
    let hint = format!(
        "write `$HOME/…` or remove the quotes around the path; `./{first}` names a folder of that name"
    );
    Err((message, hint))
}

/// The schemes of URLs that locations may have.
const SCHEMES: [&str; 13] =
    ["file", "s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "grpc", "grpcs"];

/// Rejects a path that begins with the scheme of a URL, such as `s3:/bucket/folder`, which results from
/// converting a URL to a `pathlib.Path`.
///
/// # Errors
///
/// The problem, if the path begins with a scheme.
pub fn check_scheme(location: &Path) -> Result<(), Problem> {
    let Some(Component::Normal(first)) = location.components().next() else { return Ok(()) };
    let text = location.to_string_lossy();
    let first = first.to_string_lossy();
    let known = |scheme: &str| SCHEMES.iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let Some((scheme, rest)) = text.split_once(':').filter(|(scheme, _)| known(scheme)) else {
        return Ok(());
    };
    if is_url(location) {
        return Ok(());
    }
    let slashes = if scheme.eq_ignore_ascii_case("file") { "///" } else { "//" };
    let hint = format!(
        "write `{scheme}:{slashes}{}`, in Python as text, because a `Path` leaves one slash of two; `./{first}` names a \
         local folder",
        rest.trim_start_matches('/')
    );
    Err((format!("a URL needs two slashes after `{scheme}:`"), hint))
}
