//! Partition keys (`split=train/date=2024-05-01`).

use std::fmt;

use onefold_base::percent::{decode, encode};
use serde::{Deserialize, Serialize};

/// The values of a dataset's partition columns, in column order; empty if the dataset has no partition
/// columns.
///
/// Its text is a relative path: `split=train/date=2024-05-01`. Characters with a meaning in paths or in other
/// tools are percent-encoded in the same way as by Hive.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PartitionKey(Vec<(String, String)>);

impl PartitionKey {
    /// The largest number of bytes in the name of a folder on a local disk.
    pub const LONGEST_FOLDER_NAME: usize = 255;

    /// Creates a key from `(column, value)` pairs.
    pub fn new(columns: Vec<(String, String)>) -> Self {
        Self(columns)
    }

    /// Returns the `(column, value)` pairs.
    pub fn columns(&self) -> &[(String, String)] {
        &self.0
    }

    /// Returns the names of the columns.
    pub fn column_names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    /// Returns the value of `column`, if the key has this column.
    pub fn get(&self, column: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == column).map(|(_, value)| value.as_str())
    }

    /// Returns the number of bytes of the name of a value's folder, which file systems limit to
    /// [`LONGEST_FOLDER_NAME`](Self::LONGEST_FOLDER_NAME).
    pub fn folder_name_bytes(column: &str, value: &str) -> usize {
        folder_name(column, value).len()
    }

    /// Parses the output of [`Display`](fmt::Display); `None` for any other text.
    pub fn parse(path: &str) -> Option<Self> {
        if path.is_empty() {
            return Some(Self::default());
        }
        let column = |part: &str| {
            let (name, value) = part.split_once('=')?;
            Some((decode(name)?, decode(value)?)).filter(|(name, _)| !name.is_empty())
        };
        path.split('/').map(column).collect::<Option<_>>().map(Self)
    }
}

/// Returns the name of the folder of a value of a partition column.
fn folder_name(column: &str, value: &str) -> String {
    format!("{}={}", encode(column), encode(value))
}

impl fmt::Display for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.0.iter().map(|(name, value)| folder_name(name, value));
        f.write_str(&parts.collect::<Vec<_>>().join("/"))
    }
}

impl Serialize for PartitionKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PartitionKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is not a partition key")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parsing_the_path_of_a_key_restores_the_key(columns in prop::collection::vec(("[a-z]{1,4}", ".{0,8}"), 0..4)) {
            let key = PartitionKey::new(columns);
            let path = key.to_string();
            prop_assert!(path.split('/').all(|part| part != "." && part != ".."));
            prop_assert_eq!(PartitionKey::parse(&path), Some(key));
        }
    }
}
