//! Filters that choose partitions by conditions on their columns, as `split=train,date<2024-06-01`.
//!
//! A partition key holds texts, and texts compare wrongly as numbers (`"9" > "12"`). So a filter is first given the
//! types of the columns ([`PartitionTypes`]), which come from the values of all partitions of a dataset, or, while a
//! dataset is built, from the types of the query's columns. Only the [`PartitionChoice`] that results can be asked for
//! a key.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;

use arrow::compute::kernels::cast_utils::Parser;
use arrow::datatypes::Date32Type;
use serde::{Deserialize, Serialize};

use crate::{Error, PartitionKey, Result};

/// How the values of a partition column compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartitionType {
    /// As numbers: `07` equals `7`.
    Number,
    /// As numbers, but texts are equal only if they are the same: some numbers are written in several ways, as `7` and
    /// `07`.
    Digits,
    /// As dates, `2024-06-01`.
    Date,
    /// As text.
    Text,
    /// As the two values that are compared: as numbers or dates if both are. An order between a number or date and
    /// another text is an error. For texts whose values are not known yet.
    Unknown,
}

/// The partition columns of a dataset, in order, and how their values compare.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PartitionTypes(Vec<(String, PartitionType)>);

impl PartitionTypes {
    /// Types that are known.
    pub fn new(columns: impl IntoIterator<Item = (String, PartitionType)>) -> Self {
        Self(columns.into_iter().collect())
    }

    /// The types that the values of all partitions of a dataset have: numbers or dates where all values of a column
    /// are.
    pub fn of_keys<'k>(keys: impl IntoIterator<Item = &'k PartitionKey>) -> Self {
        let mut columns: Vec<(&str, BTreeSet<&str>)> = Vec::new();
        for (name, value) in keys.into_iter().flat_map(PartitionKey::columns) {
            match columns.iter_mut().find(|(known, _)| *known == name.as_str()) {
                Some((_, values)) => _ = values.insert(value.as_str()),
                None => columns.push((name, BTreeSet::from([value.as_str()]))),
            }
        }
        Self(columns.into_iter().map(|(name, values)| (name.to_owned(), type_of(&values))).collect())
    }
}

fn type_of(values: &BTreeSet<&str>) -> PartitionType {
    if values.iter().all(|value| is_date(value)) {
        return PartitionType::Date;
    }
    let Some(mut numbers) = values.iter().map(|value| Number::parse(value)).collect::<Option<Vec<_>>>()
    else {
        return PartitionType::Text;
    };
    numbers.sort_by(Number::compare);
    let repeated = numbers.windows(2).any(|pair| pair[0].compare(&pair[1]).is_eq());
    if repeated { PartitionType::Digits } else { PartitionType::Number }
}

/// Chooses partitions by their columns: conditions `column=value`, `!=`, `<`, `<=`, `>`, `>=` joined by commas, all of
/// which must hold. Numbers compare as numbers and dates as dates where all values of a column are; else as text.
///
/// ```
/// # use onefold_datasets::{PartitionFilter, PartitionKey, PartitionTypes};
/// let key = |path| PartitionKey::parse(path).unwrap();
/// let keys = [key("split=train/week=9"), key("split=train/week=12"), key("split=holdout/week=13")];
/// let filter = PartitionFilter::parse("split=train,week<=12").unwrap();
/// let choice = filter.choice(&PartitionTypes::of_keys(&keys)).unwrap();
/// assert!(choice.matches(&keys[0]).unwrap() && choice.matches(&keys[1]).unwrap());
/// assert!(!choice.matches(&keys[2]).unwrap());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct PartitionFilter {
    text: String,
    conditions: Vec<Condition>,
    /// If there are any, only these partitions.
    keys: Option<BTreeSet<PartitionKey>>,
}

/// A filter as it is stored: its text, or the partitions.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Written {
    Conditions(String),
    Keys(BTreeSet<PartitionKey>),
}

impl From<PartitionFilter> for Written {
    fn from(filter: PartitionFilter) -> Self {
        filter.keys.map_or(Self::Conditions(filter.text), Self::Keys)
    }
}

impl TryFrom<Written> for PartitionFilter {
    type Error = Error;

    fn try_from(written: Written) -> Result<Self> {
        match written {
            Written::Conditions(text) => Self::parse(&text),
            Written::Keys(keys) => Ok(Self::of_keys(keys)),
        }
    }
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
        Ok(Self { text: text.to_owned(), conditions, keys: None })
    }

    /// A filter that chooses these partitions.
    pub fn of_keys(keys: impl IntoIterator<Item = PartitionKey>) -> Self {
        let keys: BTreeSet<_> = keys.into_iter().collect();
        let text = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        Self { text, conditions: Vec::new(), keys: Some(keys) }
    }

    /// The choice that this filter makes among partitions whose columns have these types.
    ///
    /// # Errors
    ///
    /// [`Error::PartitionFilter`] if a condition names a column that there is not, or compares numbers or dates with
    /// a value of another kind.
    pub fn choice(&self, types: &PartitionTypes) -> Result<PartitionChoice<'_>> {
        let mut conditions = Vec::with_capacity(self.conditions.len());
        for condition in &self.conditions {
            let Some((_, kind)) = types.0.iter().find(|(name, _)| *name == condition.column) else {
                return Err(self.unknown_column(condition, types.0.iter().map(|(name, _)| name)));
            };
            if let Some((wanted, hint)) = condition.misfit(*kind) {
                let Condition { column, value, .. } = condition;
                let message =
                    format!("`{value}` is not a {wanted}, and the values of `{column}` are {wanted}s");
                return Err(self.error(message, hint));
            }
            conditions.push((condition, *kind));
        }
        Ok(PartitionChoice { filter: self, conditions })
    }

    fn unknown_column<'n>(&self, condition: &Condition, known: impl Iterator<Item = &'n String>) -> Error {
        let known: Vec<_> = known.map(|name| format!("`{name}`")).collect();
        let hint = if known.is_empty() {
            "this dataset has no partition columns; leave the filter out".to_owned()
        } else {
            format!("the dataset is partitioned by {}", known.join(", "))
        };
        self.error(format!("there is no partition column `{}`", condition.column), hint)
    }

    fn error(&self, message: String, hint: String) -> Error {
        Error::PartitionFilter { filter: self.text.clone(), message, hint }
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

/// A [`PartitionFilter`] whose conditions have types.
#[derive(Debug, Clone)]
pub struct PartitionChoice<'f> {
    filter: &'f PartitionFilter,
    conditions: Vec<(&'f Condition, PartitionType)>,
}

impl PartitionChoice<'_> {
    /// Whether the partition with this key is chosen.
    ///
    /// # Errors
    ///
    /// [`Error::PartitionFilter`] if the key lacks a column of the filter, or has a value that cannot be compared with
    /// the filter's.
    pub fn matches(&self, key: &PartitionKey) -> Result<bool> {
        if let Some(keys) = &self.filter.keys {
            return Ok(keys.contains(key));
        }
        for (condition, kind) in &self.conditions {
            let Some(value) = key.get(&condition.column) else {
                return Err(self
                    .filter
                    .unknown_column(condition, key.columns().iter().map(|(name, _)| name)));
            };
            let holds = condition.holds(value, *kind).ok_or_else(|| {
                let Condition { column, value: wanted, .. } = condition;
                let message = format!("`{wanted}` cannot be compared with the value `{value}` of `{column}`");
                let hint =
                    suggested_date(wanted).map(|date| format!("write `{date}`")).unwrap_or_else(|| {
                        "compare numbers with numbers and dates, as `2024-06-01`, with dates".to_owned()
                    });
                self.filter.error(message, hint)
            })?;
            if !holds {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Condition {
    fn parse(filter: &str, part: &str) -> Result<Self> {
        let at = part.find(['<', '>', '=', '!']).unwrap_or(part.len());
        for operator in ["<=", ">=", "!=", "<", ">", "="] {
            if let Some(value) = part[at..].strip_prefix(operator) {
                let (column, value) = (part[..at].trim().to_owned(), value.trim().to_owned());
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

    /// What the value is not although the column's values are, and what to write; `None` if it can be compared with
    /// them.
    fn misfit(&self, kind: PartitionType) -> Option<(&'static str, String)> {
        let Self { column, operator, value } = self;
        match kind {
            PartitionType::Date if !is_date(value) => {
                let date = suggested_date(value).unwrap_or_else(|| "2024-06-01".to_owned());
                Some(("date", format!("write `{column}{operator}{date}`")))
            }
            PartitionType::Number | PartitionType::Digits if Number::parse(value).is_none() => {
                Some(("number", format!("write a number, as `{column}{operator}7`")))
            }
            _ => None,
        }
    }

    /// Whether a partition's value fulfils the condition; `None` if the two cannot be compared.
    fn holds(&self, value: &str, kind: PartitionType) -> Option<bool> {
        let as_numbers = || Some(Number::parse(value)?.compare(&Number::parse(&self.value)?));
        let as_text = || value.cmp(self.value.as_str());
        let is_equality = matches!(self.operator, "=" | "!=");
        let ordering = match kind {
            PartitionType::Number => as_numbers()?,
            PartitionType::Digits if is_equality => as_text(),
            PartitionType::Digits => as_numbers()?,
            PartitionType::Date if is_date(value) => as_text(),
            PartitionType::Date => return None,
            PartitionType::Text => as_text(),
            PartitionType::Unknown => {
                let plain = |text: &str| !is_date(text) && Number::parse(text).is_none();
                let comparable = is_date(value) && is_date(&self.value) || plain(value) && plain(&self.value);
                match as_numbers() {
                    Some(ordering) => ordering,
                    None if comparable || is_equality => as_text(),
                    None => return None,
                }
            }
        };
        Some(match self.operator {
            "<=" => ordering.is_le(),
            ">=" => ordering.is_ge(),
            "<" => ordering.is_lt(),
            ">" => ordering.is_gt(),
            "!=" => ordering.is_ne(),
            _ => ordering.is_eq(),
        })
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

    /// Zero has one sign, so that `total_cmp` compares numbers.
    fn to_f64(self) -> f64 {
        match self {
            Self::Integer(integer) => integer as f64,
            Self::Float(number) => number + 0.0,
        }
    }
}

/// Whether a text is a day of the calendar, written as `2024-06-01`. Such texts are in the order of the days.
fn is_date(text: &str) -> bool {
    let is_shaped = text.len() == 10
        && text.bytes().enumerate().all(|(i, byte)| match i {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
    is_shaped && Date32Type::parse(text).is_some()
}

/// The date that a text means which is written in another way, as `2024-6-3` or `20240603`.
fn suggested_date(text: &str) -> Option<String> {
    let parts: Vec<&str> = match text.split(['-', '/', '.']).collect::<Vec<_>>() {
        parts if parts.len() == 3 && parts[0].len() == 4 => parts,
        _ if text.len() == 8 && text.is_ascii() => vec![&text[..4], &text[4..6], &text[6..]],
        _ => return None,
    };
    let date = format!("{}-{:0>2}-{:0>2}", parts[0], parts[1], parts[2]);
    is_date(&date).then_some(date)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(column: &str, values: &[&str]) -> Vec<PartitionKey> {
        let key = |value: &&str| PartitionKey::new(vec![(column.to_owned(), (*value).to_owned())]);
        values.iter().map(key).collect()
    }

    /// The values of the only column that the filter chooses.
    fn chosen<'v>(column: &str, values: &[&'v str], filter: &str) -> Result<Vec<&'v str>> {
        let keys = keys(column, values);
        let filter = PartitionFilter::parse(filter)?;
        chosen_of(values, &keys, &filter, &PartitionTypes::of_keys(&keys))
    }

    fn chosen_of<'v>(
        values: &[&'v str],
        keys: &[PartitionKey],
        filter: &PartitionFilter,
        types: &PartitionTypes,
    ) -> Result<Vec<&'v str>> {
        let choice = filter.choice(types)?;
        let mut chosen = Vec::new();
        for (value, key) in values.iter().zip(keys) {
            if choice.matches(key)? {
                chosen.push(*value);
            }
        }
        Ok(chosen)
    }

    #[track_caller]
    fn refused<T: fmt::Debug>(result: Result<T>, parts: &[&str]) {
        let error = result.unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{error}\nlacks {part}");
        }
    }

    const WEEKS: [&str; 13] = ["0", "1", "10", "11", "12", "2", "3", "4", "5", "6", "7", "8", "9"];

    #[test]
    fn numbers_compare_as_numbers() {
        assert_eq!(chosen("wk", &WEEKS, "wk<=12").unwrap().len(), 13);
        assert_eq!(chosen("wk", &WEEKS, "wk<3").unwrap(), ["0", "1", "2"]);
        assert_eq!(chosen("wk", &WEEKS, "wk>=2,wk!=3,wk<5").unwrap(), ["2", "4"]);
        let hours = ["00", "07", "08", "09", "10", "23"];
        assert_eq!(chosen("hour", &hours, "hour<9").unwrap(), ["00", "07", "08"]);
        assert_eq!(chosen("hour", &hours, "hour=7").unwrap(), ["07"]);
        assert_eq!(chosen("x", &["-0.0", "1.5", "-2", "1e3"], "x>=0").unwrap(), ["-0.0", "1.5", "1e3"]);
        let large = ["170141183460469231731687303715884105726", "9"];
        assert_eq!(chosen("id", &large, "id>9").unwrap(), &large[..1]);
        refused(chosen("wk", &WEEKS, "wk<twelve"), &["`twelve` is not a number", "`wk` are numbers", "wk<7"]);
    }

    #[test]
    fn numbers_that_are_written_in_several_ways_are_equal_only_as_text() {
        let codes = ["7", "07", "8"];
        assert_eq!(chosen("code", &codes, "code=7").unwrap(), ["7"]);
        assert_eq!(chosen("code", &codes, "code!=07").unwrap(), ["7", "8"]);
        assert_eq!(chosen("code", &codes, "code<8").unwrap(), ["7", "07"]);
    }

    #[test]
    fn dates_are_written_as_dates() {
        let days = ["2024-06-01", "2024-06-02", "2024-06-03", "2024-06-10"];
        assert_eq!(chosen("date", &days, "date<2024-06-03").unwrap(), &days[..2]);
        let mistake = ["`2024-6-3` is not a date", "values of `date` are dates", "write `date<2024-06-03`"];
        refused(chosen("date", &days, "date<2024-6-3"), &mistake);
        refused(chosen("date", &days, "date=20240603"), &["write `date=2024-06-03`"]);
        refused(chosen("date", &days, "date>2024-02-30"), &["`2024-02-30` is not a date"]);
        refused(chosen("date", &days, "date>June"), &["write `date>2024-06-01`"]);
    }

    #[test]
    fn other_values_compare_as_text() {
        let splits = ["holdout", "train", "9"];
        assert_eq!(chosen("split", &splits, "split=train").unwrap(), ["train"]);
        assert_eq!(chosen("split", &splits, "split!=train").unwrap(), ["holdout", "9"]);
        assert_eq!(chosen("split", &["a<b", "a"], "split=a<b").unwrap(), ["a<b"]);
    }

    #[test]
    fn values_that_come_one_by_one_compare_by_what_they_are() {
        let types = PartitionTypes::new([("x".to_owned(), PartitionType::Unknown)]);
        let chosen = |values: &[&'static str], filter: &str| {
            chosen_of(values, &keys("x", values), &PartitionFilter::parse(filter)?, &types)
        };
        assert_eq!(chosen(&WEEKS, "x<=12").unwrap().len(), 13);
        assert_eq!(chosen(&["US", "7", "07"], "x=US").unwrap(), ["US"]);
        assert_eq!(chosen(&["b", "c"], "x<c").unwrap(), ["b"]);
        let mistake = ["`2024-6-3` cannot be compared with the value `2024-06-01`", "write `2024-06-03`"];
        refused(chosen(&["2024-06-01"], "x<2024-6-3"), &mistake);
        refused(chosen(&["7", "US"], "x<9"), &["`9` cannot be compared with the value `US`"]);
    }

    #[test]
    fn all_conditions_hold() {
        let key = PartitionKey::parse("date=2024-05-02/hour=07").unwrap();
        let types = PartitionTypes::of_keys([&key]);
        let matches =
            |text: &str| PartitionFilter::parse(text).unwrap().choice(&types).unwrap().matches(&key).unwrap();
        assert!(matches(""));
        assert!(matches("date>=2024-05-02, hour<08"));
        assert!(!matches("date>2024-05-02"));
        assert!(!matches("date=2024-05-02,hour=8"));
    }

    #[test]
    fn keys_choose_themselves() {
        let keys = keys("day", &["1", "2", "10"]);
        let filter = PartitionFilter::of_keys([keys[2].clone(), keys[0].clone()]);
        assert_eq!(filter.to_string(), "`day=1`, `day=10`");
        let values = ["1", "2", "10"];
        let types = PartitionTypes::of_keys(&keys);
        assert_eq!(chosen_of(&values, &keys, &filter, &types).unwrap(), ["1", "10"]);
        assert!(chosen_of(&values, &keys, &PartitionFilter::of_keys([]), &types).unwrap().is_empty());
    }

    #[test]
    fn a_wrong_filter_says_what_to_write() {
        refused(PartitionFilter::parse("train"), &["`train` is not a condition", "split=train"]);
        refused(PartitionFilter::parse("split!train"), &["is not a condition"]);
        refused(
            chosen("split", &["train"], "date=1"),
            &["no partition column `date`", "partitioned by `split`"],
        );
        let none = PartitionTypes::of_keys([&PartitionKey::default()]);
        let filter = PartitionFilter::parse("date=1").unwrap();
        refused(filter.choice(&none), &["no partition columns", "leave the filter out"]);
    }
}
