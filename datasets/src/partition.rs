//! Partition keys (`split=train/date=2024-05-01`) and the filters that choose among them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The values of a dataset's partition columns, in column order; empty when it has none.
///
/// Written as a relative path: `split=train/date=2024-05-01`. Characters that a path or another tool would
/// trip over stand percent-encoded, as Hive does it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PartitionKey(Vec<(String, String)>);

impl PartitionKey {
    /// A key of `(column, value)` pairs.
    pub fn new(columns: Vec<(String, String)>) -> Self {
        Self(columns)
    }

    /// The `(column, value)` pairs.
    pub fn columns(&self) -> &[(String, String)] {
        &self.0
    }

    /// The value of `column`, if the key has it.
    pub fn get(&self, column: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == column).map(|(_, value)| value.as_str())
    }

    /// Parses what [`Display`](fmt::Display) writes; `None` for anything else.
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

impl fmt::Display for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.0.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value)));
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

/// `text` as a part of a path.
pub(crate) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'+' | b',') {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    // `.` and `..` alone would be a step in the directory tree.
    if encoded.chars().all(|c| c == '.') { encoded.replace('.', "%2E") } else { encoded }
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

/// Chooses partitions by their columns: conditions `column=value`, `<`, `<=`, `>`, `>=` joined by commas,
/// all of which must hold. Values compare as text, which is their order for dates and hours.
///
/// ```
/// # use onefold_datasets::{PartitionFilter, PartitionKey};
/// let key = PartitionKey::parse("split=train/date=2024-05-01").unwrap();
/// assert!(PartitionFilter::parse("split=train,date<2024-06-01").unwrap().matches(&key).unwrap());
/// assert!(!PartitionFilter::parse("split=holdout").unwrap().matches(&key).unwrap());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartitionFilter {
    text: String,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Condition {
    column: String,
    operator: &'static str,
    value: String,
}

impl PartitionFilter {
    /// Parses a filter; the empty text chooses everything.
    ///
    /// # Errors
    ///
    /// [`Error::PartitionFilter`] for a condition without an operator, a column or a value.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let conditions = parts.map(|part| Condition::parse(text, part)).collect::<Result<_>>()?;
        Ok(Self { text: text.to_owned(), conditions })
    }

    /// Whether the partition with this key is chosen.
    ///
    /// # Errors
    ///
    /// [`Error::PartitionFilter`] if a condition names a column that the key does not have.
    pub fn matches(&self, key: &PartitionKey) -> Result<bool> {
        for condition in &self.conditions {
            let Some(value) = key.get(&condition.column) else {
                let known: Vec<_> = key.columns().iter().map(|(name, _)| format!("`{name}`")).collect();
                let hint = if known.is_empty() {
                    "this dataset has no partition columns; leave the filter out".to_owned()
                } else {
                    format!("the dataset is partitioned by {}", known.join(", "))
                };
                let message = format!("there is no partition column `{}`", condition.column);
                return Err(Error::PartitionFilter { filter: self.text.clone(), message, hint });
            };
            if !condition.holds(value) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl fmt::Display for PartitionFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for PartitionFilter {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

impl Condition {
    fn parse(filter: &str, part: &str) -> Result<Self> {
        for operator in ["<=", ">=", "<", ">", "="] {
            if let Some((column, value)) = part.split_once(operator) {
                let (column, value) = (column.trim().to_owned(), value.trim().to_owned());
                if !column.is_empty() && !value.is_empty() {
                    return Ok(Self { column, operator, value });
                }
            }
        }
        Err(Error::PartitionFilter {
            filter: filter.to_owned(),
            message: format!("`{part}` is not a condition"),
            hint: "write conditions like `split=train` or `date>=2024-05-01`, joined by commas".to_owned(),
        })
    }

    fn holds(&self, value: &str) -> bool {
        let ordering = value.cmp(self.value.as_str());
        match self.operator {
            "<=" => ordering.is_le(),
            ">=" => ordering.is_ge(),
            "<" => ordering.is_lt(),
            ">" => ordering.is_gt(),
            _ => ordering.is_eq(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keys_survive_the_path(columns in prop::collection::vec(("[a-z]{1,4}", ".{0,8}"), 0..4)) {
            let key = PartitionKey::new(columns);
            let path = key.to_string();
            prop_assert!(path.split('/').all(|part| part != "." && part != ".."));
            prop_assert_eq!(PartitionKey::parse(&path), Some(key));
        }
    }

    #[test]
    fn filters_compare_as_text_and_all_conditions_hold() {
        let key = PartitionKey::parse("date=2024-05-02/hour=07").unwrap();
        let matches = |text: &str| PartitionFilter::parse(text).unwrap().matches(&key).unwrap();
        assert!(matches(""));
        assert!(matches("date>=2024-05-02, hour<08"));
        assert!(!matches("date>2024-05-02"));
        assert!(matches("date<=2024-05-02"));
    }

    #[test]
    fn a_wrong_filter_says_what_to_write() {
        let error = PartitionFilter::parse("train").unwrap_err().to_string();
        assert!(error.contains("`train` is not a condition") && error.contains("split=train"), "{error}");
        let key = PartitionKey::parse("split=train").unwrap();
        let error = PartitionFilter::parse("date=1").unwrap().matches(&key).unwrap_err().to_string();
        assert!(
            error.contains("no partition column `date`") && error.contains("partitioned by `split`"),
            "{error}"
        );
    }
}
