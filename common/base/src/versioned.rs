//! Files that state the version of their format. The version is checked before the rest, so that the error for a file
//! of another version is not about unknown keys.

use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Deserialize)]
struct Versioned {
    format_version: u32,
}

/// Parses the bytes of a JSON file whose `format_version` must be `version`.
///
/// # Errors
///
/// A description of the problem.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8], version: u32) -> Result<T, String> {
    let Versioned { format_version } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if format_version != version {
        return Err(format!("format version {format_version}, this program reads {version}"));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// Parses the text of a TOML file whose `format_version` must be `version`.
///
/// # Errors
///
/// A message with line and column, and a hint. The hint is `hint` if the text is not TOML or does not fit `T`.
pub fn parse_toml<T: DeserializeOwned>(text: &str, version: u32, hint: &str) -> Result<T, (String, String)> {
    let wrong = |error: toml::de::Error| (error.to_string().trim_end().to_owned(), hint.to_owned());
    let found = toml::from_str::<Versioned>(text).map_err(wrong)?.format_version;
    if found != version {
        let message = format!("`format_version` is {found}, this program reads {version}");
        return Err((
            message,
            "write the file anew for this version, or use the program that it is for".to_owned(),
        ));
    }
    toml::from_str(text).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        #[serde(rename = "format_version")]
        _version: u32,
        size: u32,
    }

    #[test]
    fn another_version_is_named_before_its_unknown_keys() {
        let parse = |text: &str| parse_toml::<File>(text, 1, "see the manual");
        assert_eq!(parse("format_version = 1\nsize = 3").unwrap().size, 3);
        assert_eq!(
            parse("format_version = 2\ncolour = 3").unwrap_err().0,
            "`format_version` is 2, this program reads 1"
        );
        let (message, hint) = parse("format_version = 1\nsize = 3\ncolour = 3").unwrap_err();
        assert!(message.contains("line 3") && message.contains("colour"), "{message}");
        assert_eq!(hint, "see the manual");
        assert!(parse("size = 3").unwrap_err().0.contains("missing field `format_version`"));
    }
}
