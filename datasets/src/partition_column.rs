//! The partition columns of a dataset and the types of their values.
//!
//! A partition key holds texts, and texts compare incorrectly as numbers (`"9" > "12"`). A snapshot therefore
//! stores the type of each partition column, and a writer rejects values of other types, so a new value never
//! changes how existing values compare.

use std::cmp::Ordering;
use std::fmt;

use arrow::compute::kernels::cast_utils::Parser;
use arrow::datatypes::Date32Type;
use serde::{Deserialize, Serialize};

use crate::PartitionKey;

/// A partition column of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionColumn {
    /// The column's name.
    pub name: String,
    /// The type of its values.
    #[serde(rename = "type")]
    pub kind: PartitionType,
}

/// The type of a partition column's values, which determines how they compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartitionType {
    /// Integers: `07` equals `7`.
    Integer,
    /// Finite decimal numbers, such as `0.5` and `1e20`.
    Number,
    /// Days, such as `2024-06-01`.
    Date,
    /// Texts, which compare character by character: `10` comes before `9`.
    Text,
}

impl PartitionColumn {
    /// Creates a column with values of type `kind`.
    pub fn new(name: impl Into<String>, kind: PartitionType) -> Self {
        Self { name: name.into(), kind }
    }
}

impl fmt::Display for PartitionColumn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            PartitionType::Integer => "integer",
            PartitionType::Number => "number",
            PartitionType::Date => "date",
            PartitionType::Text => "text",
        };
        write!(f, "`{}` ({kind})", self.name)
    }
}

impl PartitionType {
    /// Returns whether a text is a value of this type.
    pub(crate) fn allows(self, text: &str) -> bool {
        match self {
            Self::Integer => text.parse::<i128>().is_ok(),
            Self::Number => Number::parse(text).is_some(),
            Self::Date => is_date(text),
            Self::Text => true,
        }
    }

    /// Compares two texts as values of this type; `None` if one of them is not such a value. For an integer
    /// column, the texts may also be other numbers.
    pub(crate) fn compare(self, a: &str, b: &str) -> Option<Ordering> {
        match self {
            Self::Integer | Self::Number => Some(Number::parse(a)?.compare(&Number::parse(b)?)),
            Self::Date => (is_date(a) && is_date(b)).then(|| a.cmp(b)),
            Self::Text => Some(a.cmp(b)),
        }
    }

    /// Describes a value of this type, for messages.
    pub(crate) fn described(self) -> &'static str {
        match self {
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Date => "a date as `2024-06-01`",
            Self::Text => "a text",
        }
    }
}

/// Returns the reason why `key` cannot be a partition of a dataset with these columns; `None` if it can.
pub(crate) fn misfit(columns: &[PartitionColumn], key: &PartitionKey) -> Option<String> {
    if !key.column_names().eq(columns.iter().map(|column| column.name.as_str())) {
        return Some(format!("the dataset is {}", described(columns)));
    }
    let wrong = |(column, (_, value)): (&PartitionColumn, &(String, String))| {
        let PartitionColumn { name, kind } = column;
        let message = || format!("the value `{value}` of `{name}` is not {}", kind.described());
        (!kind.allows(value)).then(message)
    };
    columns.iter().zip(key.columns()).find_map(wrong)
}

/// Describes the partitioning of a dataset, for messages.
pub(crate) fn described(columns: &[PartitionColumn]) -> String {
    let columns: Vec<String> = columns.iter().map(ToString::to_string).collect();
    if columns.is_empty() {
        "not partitioned".to_owned()
    } else {
        format!("partitioned by {}", columns.join(", "))
    }
}

/// A number, exact if it is an integer.
#[derive(Debug, Clone, Copy)]
enum Number {
    Integer(i128),
    Float(f64),
}

impl Number {
    fn parse(text: &str) -> Option<Self> {
        if let Ok(integer) = text.parse() {
            return Some(Self::Integer(integer));
        }
        let is_decimal = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
        let number: f64 = if is_decimal { text.parse().ok()? } else { return None };
        number.is_finite().then_some(Self::Float(number))
    }

    fn compare(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Integer(a), Self::Integer(b)) => a.cmp(b),
            (a, b) => a.to_f64().total_cmp(&b.to_f64()),
        }
    }

    /// Converts the number; -0.0 becomes 0.0, so that `total_cmp` treats them as equal.
    fn to_f64(self) -> f64 {
        match self {
            Self::Integer(integer) => integer as f64,
            Self::Float(number) => number + 0.0,
        }
    }
}

/// Returns whether a text is a calendar day such as `2024-06-01`. The text order of such days is their order
/// in time.
fn is_date(text: &str) -> bool {
    let is_shaped = text.len() == 10
        && text.bytes().enumerate().all(|(i, byte)| match i {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    is_shaped && Date32Type::parse(text).is_some()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the columns of a key, with the type text.
    pub(crate) fn of_texts(key: &PartitionKey) -> Vec<PartitionColumn> {
        key.column_names().map(|name| PartitionColumn::new(name, PartitionType::Text)).collect()
    }

    #[test]
    fn types_allow_their_values() {
        let texts = [
            "7",
            "07",
            "-3",
            "1.5",
            "1e3",
            "2024-06-01",
            "2024-6-1",
            "2024-02-30",
            "",
            " 7",
            "NaN",
            "unknown",
        ];
        let allowed = |kind: PartitionType| -> Vec<&str> {
            texts.into_iter().filter(|text| kind.allows(text)).collect()
        };
        assert_eq!(allowed(PartitionType::Integer), ["7", "07", "-3"]);
        assert_eq!(allowed(PartitionType::Number), ["7", "07", "-3", "1.5", "1e3"]);
        assert_eq!(allowed(PartitionType::Date), ["2024-06-01"]);
        assert_eq!(allowed(PartitionType::Text), texts);
    }

    #[test]
    fn keys_with_other_columns_or_types_are_explained() {
        let columns = [
            PartitionColumn::new("date", PartitionType::Date),
            PartitionColumn::new("hour", PartitionType::Integer),
        ];
        let misfit = |path: &str| misfit(&columns, &PartitionKey::parse(path).unwrap());
        assert_eq!(misfit("date=2024-06-01/hour=07"), None);
        for path in ["", "date=2024-06-01", "hour=07/date=2024-06-01", "date=2024-06-01/hour=7/split=a"] {
            let expected = "the dataset is partitioned by `date` (date), `hour` (integer)";
            assert_eq!(misfit(path).as_deref(), Some(expected), "{path}");
        }
        let expected = "the value `unknown` of `hour` is not an integer";
        assert_eq!(misfit("date=2024-06-01/hour=unknown").as_deref(), Some(expected));
        let unpartitioned = super::misfit(&[], &PartitionKey::parse("day=1").unwrap());
        assert_eq!(unpartitioned.as_deref(), Some("the dataset is not partitioned"));
    }

    #[test]
    fn columns_are_stored_with_their_types() {
        let columns = [
            PartitionColumn::new("date", PartitionType::Date),
            PartitionColumn::new("hour", PartitionType::Integer),
        ];
        let text = r#"[{"name":"date","type":"date"},{"name":"hour","type":"integer"}]"#;
        assert_eq!(serde_json::to_string(&columns).unwrap(), text);
        assert_eq!(serde_json::from_str::<Vec<PartitionColumn>>(text).unwrap(), columns);
    }
}
