//! The keys of a source that is a version of a Delta Lake table.

use chrono::{DateTime, Utc};
use onefold_datasets::{TableVersion, parse_time};
use serde::Deserialize;

use crate::error::MessageAndHint;

/// The rows of a Delta Lake table that are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaConfig {
    /// The version of the table.
    pub version: DeltaVersion,
    /// The files that an append reads. If `None`, the role of the source determines it.
    pub append: Option<DeltaAppend>,
    /// The version whose rows the dataset has. Only files that were added since are read. Only an append sets it.
    pub(crate) since: Option<TableVersion>,
}

/// A version of a Delta Lake table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaVersion {
    /// The newest version.
    Newest,
    /// The version with this number.
    Number(u64),
    /// The last version that was committed at or before this time.
    At(DateTime<Utc>),
}

/// The files of a Delta Lake table that an append reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeltaAppend {
    /// The files that were added after the version whose rows the dataset already has.
    Added,
    /// All files of the version.
    All,
}

/// The keys of a source that is a Delta Lake table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DeltaKeys {
    pub(super) delta: String,
    version: Option<u64>,
    timestamp: Option<toml::Value>,
    append: Option<DeltaAppend>,
    pub(super) row_number: Option<String>,
    pub(super) file_name: Option<String>,
    pub(super) file_number: Option<String>,
}

impl DeltaKeys {
    /// Reads the keys of a source.
    ///
    /// # Errors
    ///
    /// A message that names the key, and a hint.
    pub(super) fn parse(value: &toml::Value) -> Result<Self, MessageAndHint> {
        Self::deserialize(value.clone()).map_err(|error| {
            let hint = "write `{ delta = \"s3://bucket/table\", version = 12 }`; the log of the table says the rest, and \
                        the manual's page `dataset.toml` lists all keys";
            (error.message().to_owned(), hint.to_owned())
        })
    }

    /// Returns the rows that are read.
    ///
    /// # Errors
    ///
    /// A message and a hint if the keys choose no version, or two.
    pub(super) fn config(&self) -> Result<DeltaConfig, MessageAndHint> {
        let version = match (self.version, &self.timestamp) {
            (Some(_), Some(_)) => {
                let hint = "remove one of them: each chooses a version";
                return Err(("it has a `version` and also a `timestamp`".to_owned(), hint.to_owned()));
            }
            (Some(version), None) => DeltaVersion::Number(version),
            (None, Some(time)) => DeltaVersion::At(instant(time)?),
            (None, None) => DeltaVersion::Newest,
        };
        Ok(DeltaConfig { version, append: self.append, since: None })
    }
}

/// Parses the `timestamp` of a table: a text, or a time of TOML.
fn instant(time: &toml::Value) -> Result<DateTime<Utc>, MessageAndHint> {
    let text = time.as_str().map_or_else(|| time.to_string(), str::to_owned);
    let parsed = parse_time(&text).ok().and_then(DateTime::from_timestamp_micros);
    parsed.ok_or_else(|| {
        let hint = "write it with its offset, as `timestamp = \"2024-06-01T00:00:00Z\"`";
        (format!("`timestamp` is {time}, which is not a time with an offset"), hint.to_owned())
    })
}
