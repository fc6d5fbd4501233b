//! Filters that choose partitions by conditions on their columns, such as `split=train,date<2024-06-01`.
//!
//! A partition key holds texts. The types of the partition columns, which the snapshot stores
//! ([`PartitionColumn`]), determine how these texts compare. [`PartitionFilter::choice`] therefore takes the
//! columns, and the resulting [`PartitionChoice`] tests keys.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Error, PartitionColumn, PartitionKey, PartitionType, Result};

/// Chooses partitions by their columns: conditions `column=value`, `!=`, `<`, `<=`, `>`, `>=`, joined by
/// commas, all of which must hold. Values compare by the type that the dataset stores for the column:
/// `hour=7` chooses `hour=07` if `hour` is an integer.
///
/// A value or column name must be in quotes if it is empty, or contains a comma, an operator, a quote, or
/// spaces at its ends. A quote inside quotes is doubled: `city="Paris, TX"`, `size="5"" x 7"""`, `note=""`.
///
/// On a text column, `<`, `<=`, `>` and `>=` compare character by character, so `10` comes before `9`. A
/// number after one of these operators is therefore an error unless it is in quotes: `zip<"9"`.
///
/// ```
/// # use onefold_datasets::{PartitionColumn, PartitionFilter, PartitionKey, PartitionType};
/// let columns = [
///     PartitionColumn::new("city", PartitionType::Text),
///     PartitionColumn::new("week", PartitionType::Integer),
/// ];
/// let key = |city: &str, week: &str| {
///     PartitionKey::new(vec![("city".to_owned(), city.to_owned()), ("week".to_owned(), week.to_owned())])
/// };
/// let filter = PartitionFilter::parse("city=\"Paris, TX\",week<=12").unwrap();
/// let choice = filter.choice(&columns).unwrap();
/// assert!(choice.matches(&key("Paris, TX", "9")).unwrap() && choice.matches(&key("Paris, TX", "12")).unwrap());
/// assert!(!choice.matches(&key("Paris", "9")).unwrap() && !choice.matches(&key("Paris, TX", "13")).unwrap());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct PartitionFilter {
    text: String,
    conditions: Vec<Condition>,
    /// If present, the filter chooses exactly these partitions.
    keys: Option<BTreeSet<PartitionKey>>,
}

/// The stored form of a filter: its text, or the keys of the partitions.
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
    /// Whether the value was written in quotes.
    quoted: bool,
}

/// The operators; `<=` comes before its prefix `<`.
const OPERATORS: [&str; 6] = ["<=", ">=", "!=", "<", ">", "="];
/// The characters with which operators begin.
const OPERATOR_CHARACTERS: [char; 4] = ['<', '>', '=', '!'];
/// Characters that are quotes elsewhere.
const OTHER_QUOTES: [char; 6] = ['\'', '`', '‘', '’', '“', '”'];

impl PartitionFilter {
    /// Parses a filter; an empty text chooses all partitions.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a condition without an operator, a column or a value, and for unbalanced quotes.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = text.split(outside_quotes(|c| c == ',')).map(str::trim).filter(|part| !part.is_empty());
        let conditions = parts.map(|part| Condition::parse(text, part)).collect::<Result<_>>()?;
        Ok(Self { text: text.to_owned(), conditions, keys: None })
    }

    /// Creates a filter that chooses these partitions.
    pub fn of_keys(keys: impl IntoIterator<Item = PartitionKey>) -> Self {
        let keys: BTreeSet<_> = keys.into_iter().collect();
        let text = keys.iter().map(|key| format!("`{}`", filter_of(key))).collect::<Vec<_>>().join(", ");
        Self { text, conditions: Vec::new(), keys: Some(keys) }
    }

    /// Resolves the conditions with the types of a dataset's partition columns.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a condition names an unknown column, compares numbers or dates with a value of
    /// another type, or orders texts by a number without quotes.
    pub fn choice(&self, columns: &[PartitionColumn]) -> Result<PartitionChoice<'_>> {
        let mut conditions = Vec::with_capacity(self.conditions.len());
        for condition in &self.conditions {
            let Some(column) = columns.iter().find(|column| column.name == condition.column) else {
                return Err(self.unknown_column(condition, columns.iter().map(|column| &column.name)));
            };
            if let Some((message, hint)) = condition.misfit(column.kind) {
                return Err(self.error(message, hint));
            }
            conditions.push((condition, column.kind));
        }
        Ok(PartitionChoice { filter: self, conditions })
    }

    /// Returns the same filter in a canonical form. Filters with equal conditions have equal forms,
    /// regardless of order, spaces and redundant quotes.
    pub fn normalized(&self) -> Self {
        if self.keys.is_some() {
            return self.clone();
        }
        let conditions: BTreeMap<String, &Condition> =
            self.conditions.iter().map(|condition| (condition.normalized(), condition)).collect();
        let text = conditions.keys().map(String::as_str).collect::<Vec<_>>().join(",");
        Self { text, conditions: conditions.into_values().cloned().collect(), keys: None }
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
        Error::partition_filter(&self.text, message, hint)
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
    /// Returns whether the filter chooses the partition with this key.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the key lacks a column of the filter, or if its value of that column does not have
    /// the column's type.
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
                let message =
                    format!("the value `{value}` of `{}` is not {}", condition.column, kind.described());
                self.filter.error(message, "give the column values of one type in the query".to_owned())
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
        let at = part.find(outside_quotes(|c| OPERATOR_CHARACTERS.contains(&c))).unwrap_or(part.len());
        let (column, rest) = part.split_at(at);
        let value = |operator: &'static str| Some((operator, rest.strip_prefix(operator)?.trim()));
        let found = OPERATORS.into_iter().find_map(value).filter(|(_, value)| !value.is_empty());
        let column = column.trim();
        let Some((operator, value)) = found.filter(|_| !column.is_empty()) else {
            return Err(Error::partition_filter(
                filter,
                format!("`{part}` is not a condition"),
                "write conditions like `split=train` or `date>=2024-05-01`, joined by commas",
            ));
        };
        let (Some((column, _)), Some((value, quoted))) = (unquoted(column), unquoted(value)) else {
            return Err(Error::partition_filter(
                filter,
                format!("`{part}` has a quote too few or too many"),
                "put quotes around a whole value, as `city=\"Paris, TX\"`, and write a quote in it twice",
            ));
        };
        let condition = Self { column, operator, value, quoted };
        match condition.mistake(part) {
            None => Ok(condition),
            Some((message, hint)) => Err(Error::partition_filter(filter, message, hint)),
        }
    }

    /// Returns whether the operator depends on the order of values.
    fn is_order(&self) -> bool {
        !matches!(self.operator, "=" | "!=")
    }

    /// Returns the canonical text of the condition. Redundant quotes are kept only for order comparisons of
    /// texts, where they allow numbers as values.
    fn normalized(&self) -> String {
        let Self { column, operator, value, quoted } = self;
        let value = if *quoted && self.is_order() { in_quotes(value) } else { written(value) };
        format!("{}{operator}{value}", written(column))
    }

    /// Returns the error message and a hint for an unquoted value that is probably a mistake. With `!=`,
    /// such a value would choose every partition.
    fn mistake(&self, part: &str) -> Option<(String, String)> {
        let Self { column, operator, value, quoted } = self;
        if *quoted || is_plain(value) {
            return None;
        }
        let start = format!("{}{operator}", written(column));
        let inner = value.trim_matches(OTHER_QUOTES);
        if inner != value && !inner.contains(OTHER_QUOTES) {
            let message = format!("`{part}` has quotes that are not double quotes");
            let value = if inner.is_empty() { "holdout" } else { inner };
            let hint = format!(
                "write `{start}{}`, and a value with a comma or a quote in double quotes, as `city=\"Paris, TX\"`",
                written(value)
            );
            return Some((message, hint));
        }
        let message = format!("the value `{value}` in `{part}` has an operator, quotes, `and` or `or` in it");
        let hint = format!(
            "join conditions by commas, as `split=train,hour<9`; if all of it is the value, write `{start}{}`",
            written(value)
        );
        Some((message, hint))
    }

    /// Returns the reason why the condition's value cannot be compared with values of type `kind`, and a
    /// hint; `None` if it can.
    fn misfit(&self, kind: PartitionType) -> Option<(String, String)> {
        let Self { column, operator, value, quoted } = self;
        let not_a =
            |what: &str| format!("`{value}` is not a {what}, and the values of `{column}` are {what}s");
        let is_order = self.is_order();
        let (name, is_number) = (written(column), PartitionType::Number.allows(value));
        match kind {
            PartitionType::Date if !kind.allows(value) => {
                let date = suggested_date(value).unwrap_or_else(|| "2024-06-01".to_owned());
                Some((not_a("date"), format!("write `{name}{operator}{date}`")))
            }
            PartitionType::Integer | PartitionType::Number if !is_number => {
                Some((not_a("number"), format!("write a number, as `{name}{operator}7`")))
            }
            PartitionType::Text if is_order && !quoted && is_number => Some((
                format!("the values of `{column}` are texts, and as a text `10` comes before `9`"),
                format!(
                    "compare texts with `{name}{operator}\"{value}\"`; for numbers, make the column an integer \
                     (`CAST({column} AS BIGINT)` in the query of `dataset.toml`) and build the dataset anew"
                ),
            )),
            PartitionType::Text if is_order && !quoted && !PartitionType::Date.allows(value) => {
                let date = suggested_date(value)?;
                let message =
                    format!("`{value}` is not written as dates are, and the values of `{column}` are texts");
                let texts = format!("or compare texts with `{name}{operator}\"{value}\"`");
                Some((message, format!("write `{name}{operator}{date}`, {texts}")))
            }
            _ => None,
        }
    }

    /// Returns whether a partition's value satisfies the condition; `None` if the value does not have the
    /// column's type.
    fn holds(&self, value: &str, kind: PartitionType) -> Option<bool> {
        let ordering = kind.compare(value, &self.value)?;
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

/// Returns the text of the filter that chooses the partition with this key: one condition per column.
pub(crate) fn filter_of(key: &PartitionKey) -> String {
    let conditions =
        key.columns().iter().map(|(name, value)| format!("{}={}", written(name), written(value)));
    conditions.collect::<Vec<_>>().join(",")
}

/// Writes a column name or value for a filter, in quotes where they are needed.
fn written(text: &str) -> String {
    if is_plain(text) { text.to_owned() } else { in_quotes(text) }
}

fn in_quotes(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}

/// Returns whether a name or value needs no quotes.
fn is_plain(text: &str) -> bool {
    let joins = |word: &str| word.eq_ignore_ascii_case("and") || word.eq_ignore_ascii_case("or");
    // A single word may be the abbreviation of Oregon.
    let is_word = !text.contains(char::is_whitespace);
    !text.is_empty()
        && text.trim() == text
        && !text.contains([',', '"'])
        && !text.contains(OPERATOR_CHARACTERS)
        && !text.starts_with(OTHER_QUOTES)
        && !text.ends_with(OTHER_QUOTES)
        && !text.contains("&&")
        && !text.contains("||")
        && (is_word || !text.split_whitespace().any(joins))
}

/// Reverses [`written`]: returns the name or value, and whether it was in quotes; `None` if its quotes are
/// unbalanced.
fn unquoted(written: &str) -> Option<(String, bool)> {
    let Some(inner) = written.strip_prefix('"') else {
        return (!written.contains('"')).then(|| (written.to_owned(), false));
    };
    let pieces: Vec<&str> = inner.strip_suffix('"')?.split("\"\"").collect();
    pieces.iter().all(|piece| !piece.contains('"')).then(|| (pieces.join("\""), true))
}

/// Returns a predicate that finds characters outside quotes; it must see each character of the text, from the
/// start. A doubled quote ends the quoted part and starts it again.
fn outside_quotes(wanted: impl Fn(char) -> bool) -> impl FnMut(char) -> bool {
    let mut in_quotes = false;
    move |c| {
        in_quotes ^= c == '"';
        !in_quotes && wanted(c)
    }
}

/// Returns the date that a text in another format means, such as `2024-6-3` or `20240603`.
fn suggested_date(text: &str) -> Option<String> {
    let parts: Vec<&str> = match text.split(['-', '/', '.']).collect::<Vec<_>>() {
        parts if parts.len() == 3 && parts[0].len() == 4 => parts,
        _ if text.len() == 8 && text.is_ascii() => vec![&text[..4], &text[4..6], &text[6..]],
        _ => return None,
    };
    let date = format!("{}-{:0>2}-{:0>2}", parts[0], parts[1], parts[2]);
    PartitionType::Date.allows(&date).then_some(date)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(column: &str, values: &[&str]) -> Vec<PartitionKey> {
        let key = |value: &&str| PartitionKey::new(vec![(column.to_owned(), (*value).to_owned())]);
        values.iter().map(key).collect()
    }

    /// Returns the values that the filter chooses if they are the values of the only column `x`, of type
    /// `kind`.
    fn chosen<'v>(kind: PartitionType, values: &[&'v str], filter: &str) -> Result<Vec<&'v str>> {
        chosen_by(&PartitionFilter::parse(filter)?, kind, values)
    }

    fn chosen_by<'v>(
        filter: &PartitionFilter,
        kind: PartitionType,
        values: &[&'v str],
    ) -> Result<Vec<&'v str>> {
        let columns = [PartitionColumn::new("x", kind)];
        let choice = filter.choice(&columns)?;
        let mut chosen = Vec::new();
        for (value, key) in values.iter().zip(keys("x", values)) {
            if choice.matches(&key)? {
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
        let weeks = |filter: &str| chosen(PartitionType::Integer, &WEEKS, filter);
        assert_eq!(weeks("x<=12").unwrap().len(), 13);
        assert_eq!(weeks("x<3").unwrap(), ["0", "1", "2"]);
        assert_eq!(weeks("x>=2,x!=3,x<4.5").unwrap(), ["2", "4"]);
        assert_eq!(weeks("x=\"7\"").unwrap(), ["7"]);
        refused(weeks("x<twelve"), &["`twelve` is not a number", "`x` are numbers", "x<7"]);
        let hours = |filter: &str| {
            chosen(PartitionType::Integer, &["00", "07", "08", "09", "10", "23"], filter).unwrap()
        };
        assert_eq!(hours("x<9"), ["00", "07", "08"]);
        assert_eq!(hours("x=7"), ["07"]);
        let numbers = chosen(PartitionType::Number, &["-0.0", "1.5", "-2", "1e3"], "x>=0");
        assert_eq!(numbers.unwrap(), ["-0.0", "1.5", "1e3"]);
        let large = ["170141183460469231731687303715884105726", "9"];
        assert_eq!(chosen(PartitionType::Integer, &large, "x>9").unwrap(), &large[..1]);
    }

    #[test]
    fn dates_are_written_as_dates() {
        let values = ["2024-06-01", "2024-06-02", "2024-06-03", "2024-06-10"];
        let days = |filter: &str| chosen(PartitionType::Date, &values, filter);
        assert_eq!(days("x<2024-06-03").unwrap(), &values[..2]);
        let mistake = ["`2024-6-3` is not a date", "values of `x` are dates", "write `x<2024-06-03`"];
        refused(days("x<2024-6-3"), &mistake);
        refused(days("x=20240603"), &["write `x=2024-06-03`"]);
        refused(days("x>2024-02-30"), &["`2024-02-30` is not a date"]);
        refused(days("x>June"), &["write `x>2024-06-01`"]);
    }

    #[test]
    fn order_comparisons_of_texts_with_numbers_and_dates_need_quotes() {
        let texts = |filter: &str| chosen(PartitionType::Text, &["07", "10", "7", "US", "a<b"], filter);
        assert_eq!(texts("x=7").unwrap(), ["7"]);
        assert_eq!(texts("x!=07").unwrap(), ["10", "7", "US", "a<b"]);
        assert_eq!(texts("x<UT").unwrap(), ["07", "10", "7", "US"]);
        assert_eq!(texts("x=\"a<b\"").unwrap(), ["a<b"]);
        refused(texts("x<9"), &["the values of `x` are texts", "`x<\"9\"`", "CAST(x AS BIGINT)"]);
        assert_eq!(texts("x<\"7\"").unwrap(), ["07", "10"]);
        let values = ["2024-06-01", "2024-06-10", "unknown"];
        let days = |filter: &str| chosen(PartitionType::Text, &values, filter);
        assert_eq!(days("x<2024-06-03").unwrap(), &values[..1]);
        refused(days("x<2024-6-3"), &["`2024-6-3` is not written as dates are", "write `x<2024-06-03`"]);
        refused(days("x<20240603"), &["the values of `x` are texts"]);
        assert_eq!(days("x<\"2024-6-3\"").unwrap(), &values[..2]);
    }

    /// A new value must not change the meaning of a filter.
    #[test]
    fn a_value_of_another_type_is_an_error() {
        let hours = ["0", "1", "10", "2", "unknown"];
        refused(
            chosen(PartitionType::Integer, &hours, "x<9"),
            &["the value `unknown` of `x` is not an integer", "one type"],
        );
        assert_eq!(chosen(PartitionType::Integer, &hours[..4], "x<9").unwrap(), ["0", "1", "2"]);
    }

    #[test]
    fn all_conditions_hold() {
        let key = PartitionKey::parse("date=2024-05-02/hour=07").unwrap();
        let columns = [
            PartitionColumn::new("date", PartitionType::Date),
            PartitionColumn::new("hour", PartitionType::Integer),
        ];
        let matches = |text: &str| {
            PartitionFilter::parse(text).unwrap().choice(&columns).unwrap().matches(&key).unwrap()
        };
        assert!(matches(""));
        assert!(matches("date>=2024-05-02, hour<08"));
        assert!(!matches("date>2024-05-02"));
        assert!(!matches("date=2024-05-02,hour=8"));
    }

    #[test]
    fn a_filter_made_of_keys_selects_these_keys() {
        let values = ["1", "10", "a,b"];
        let keys = keys("x", &values);
        let filter = PartitionFilter::of_keys([keys[2].clone(), keys[0].clone()]);
        assert_eq!(filter.to_string(), "`x=1`, `x=\"a,b\"`");
        let chosen = |filter: &PartitionFilter| chosen_by(filter, PartitionType::Text, &values).unwrap();
        assert_eq!(chosen(&filter), ["1", "a,b"]);
        assert!(chosen(&PartitionFilter::of_keys([])).is_empty());
    }

    #[test]
    fn a_wrong_filter_says_what_to_write() {
        for wrong in ["train", "split!train", "=train", "split=", "split= ,day=1"] {
            refused(PartitionFilter::parse(wrong), &["is not a condition", "split=train"]);
        }
        for wrong in
            ["x=\"Paris, TX", "x=Paris\", TX", "x=a\"b", "x=\"a\"b", "x=\"a\"b\"", "x=\"\"\"", "x\"=a"]
        {
            let error = PartitionFilter::parse(wrong).unwrap_err().to_string();
            assert!(error.contains("hint: "), "{error}");
        }
        refused(
            PartitionFilter::parse("x=a\"b"),
            &["`x=a\"b` has a quote too few or too many", "\"Paris, TX\""],
        );
        let unknown = chosen(PartitionType::Text, &["train"], "date=1");
        refused(unknown, &["no partition column `date`", "partitioned by `x`"]);
        let filter = PartitionFilter::parse("date=1").unwrap();
        refused(filter.choice(&[]), &["no partition columns", "leave the filter out"]);
    }

    /// Each of these would choose every partition.
    #[test]
    fn values_with_stray_quotes_and_operators_are_refused() {
        for (wrong, hint) in [
            ("split!='holdout'", "write `split!=holdout`"),
            ("split!=`holdout`", "write `split!=holdout`"),
            ("split!=“holdout”", "write `split!=holdout`"),
            ("split!=''", "write `split!=holdout`"),
            ("city!='Paris, TX'", "write `city!=Paris`, and a value with a comma"),
            ("split!='a' and b<'c'", "as `split=train,hour<9`"),
            ("split!==holdout", "write `split!=\"=holdout\"`"),
            ("split!=holdout!", "write `split!=\"holdout!\"`"),
            ("split!=holdout and hour<9", "as `split=train,hour<9`"),
            ("split!=train OR test", "as `split=train,hour<9`"),
            ("split!=train||test", "as `split=train,hour<9`"),
            ("split!=a && b", "write `split!=\"a && b\"`"),
            ("a b!=c<d", "write `a b!=\"c<d\"`"),
        ] {
            refused(PartitionFilter::parse(wrong), &["partition filter `", hint]);
        }
        refused(PartitionFilter::parse("x='a',y=2"), &["`x='a'` has quotes that are not double quotes"]);
        refused(PartitionFilter::parse("x==1"), &["the value `=1` in `x==1` has an operator"]);
        let values = ["OR", "O'Hare", "R&B", "Trinidad and Tobago", "'t", "brand new", "a|b"];
        let texts = |filter: &str| chosen(PartitionType::Text, &values, filter).unwrap();
        for plain in ["OR", "O'Hare", "R&B", "brand new", "a|b"] {
            assert_eq!(texts(&format!("x={plain}")), [plain]);
        }
        assert_eq!(texts("x=\"Trinidad and Tobago\""), ["Trinidad and Tobago"]);
        assert_eq!(texts("x=\"'t\""), ["'t"]);
    }

    #[test]
    fn equal_filters_are_written_in_one_way() {
        let normalized = |text: &str| PartitionFilter::parse(text).unwrap().normalized().to_string();
        for text in ["b=2,a=1", "a=1,b=2", " a = 1 , b=2,", "\"b\"=2,a=\"1\"", "a=1,b=2,a=1"] {
            assert_eq!(normalized(text), "a=1,b=2", "{text}");
        }
        for text in ["", "zip<\"9\"", "zip<9", "city=\"Paris, TX\"", "a!=1"] {
            assert_eq!(normalized(text), text);
        }
        let keys = PartitionFilter::of_keys(keys("x", &["2", "1"]));
        assert_eq!(keys.normalized(), keys);
    }

    #[test]
    fn a_filter_survives_serialization() {
        for text in ["", "city=\"Paris, \"\"TX\"\"\",hour<7"] {
            let filter = PartitionFilter::parse(text).unwrap();
            let json = serde_json::to_string(&filter).unwrap();
            assert_eq!(serde_json::from_str::<PartitionFilter>(&json).unwrap(), filter);
        }
    }

    /// Generates texts of characters that filters treat differently.
    fn texts(most: usize) -> impl Strategy<Value = String> {
        let characters: Vec<char> = "ab12,,\"\"<>=! \t\n\\é日/%'`-".chars().collect();
        prop::collection::vec(prop::sample::select(characters), 0..most)
            .prop_map(|characters| characters.into_iter().collect())
    }

    /// Parses a filter character by character, as a simple reference; `None` for a text that is not a filter.
    fn reference(text: &str) -> Option<Vec<(String, &'static str, String)>> {
        let mut conditions = Vec::new();
        let mut rest: Vec<char> = text.chars().rev().collect();
        loop {
            skip_space(&mut rest);
            match rest.last().copied() {
                None => return Some(conditions),
                Some(',') => _ = rest.pop(),
                Some(_) => {
                    let column = operand(&mut rest, "<>=!,")?;
                    let operator = OPERATORS.into_iter().find(|operator| {
                        operator.chars().enumerate().all(|(i, c)| rest.iter().rev().nth(i) == Some(&c))
                    })?;
                    rest.truncate(rest.len() - operator.len());
                    skip_space(&mut rest);
                    let is_quoted = rest.last() == Some(&'"');
                    let value = operand(&mut rest, ",")?;
                    if !is_quoted && !is_plain(&value) {
                        return None;
                    }
                    conditions.push((column, operator, value));
                    if rest.last().is_some_and(|c| *c != ',') {
                        return None;
                    }
                }
            }
        }
    }

    fn skip_space(rest: &mut Vec<char>) {
        while rest.last().is_some_and(|c| c.is_whitespace()) {
            rest.pop();
        }
    }

    /// Reads a name or value up to one of the characters in `end`.
    fn operand(rest: &mut Vec<char>, end: &str) -> Option<String> {
        skip_space(rest);
        let mut text = String::new();
        if rest.last() == Some(&'"') {
            rest.pop();
            loop {
                match (rest.pop()?, rest.last().copied()) {
                    ('"', Some('"')) => text.extend(rest.pop()),
                    ('"', _) => break,
                    (c, _) => text.push(c),
                }
            }
            skip_space(rest);
            return Some(text);
        }
        while rest.last().is_some_and(|c| !end.contains(*c)) {
            text.extend(rest.pop());
        }
        let text = text.trim();
        (!text.is_empty() && !text.contains('"')).then(|| text.to_owned())
    }

    proptest! {
        #[test]
        fn filters_are_parsed_as_by_the_reference(
            text in texts(14),
            names in prop::collection::vec(texts(3), 0..3),
        ) {
            // Few random texts are valid filters, so some cases consist of valid parts.
            let condition = |name: &String| format!("{}<={}", written(name), written(&text));
            let made: Vec<String> = names.iter().map(condition).collect();
            for text in [text.clone(), format!("a={text}"), format!("{},b!={text}", made.join(","))] {
                let parsed = PartitionFilter::parse(&text).ok().map(|filter| {
                    let condition = |c: Condition| (c.column, c.operator, c.value);
                    filter.conditions.into_iter().map(condition).collect::<Vec<_>>()
                });
                prop_assert_eq!(parsed, reference(&text), "{:?}", text);
            }
        }

        #[test]
        fn the_filter_of_a_key_selects_only_its_partition(
            name in texts(4),
            values in prop::collection::vec((texts(8), "\\PC{0,4}"), 1..6),
        ) {
            let names = [format!("n{name}"), format!("{name}m")];
            let columns = names.clone().map(|name| PartitionColumn::new(name, PartitionType::Text));
            let key = |(a, b): (String, String)| {
                PartitionKey::new(names.clone().into_iter().zip([a, b]).collect::<Vec<_>>())
            };
            let keys: Vec<PartitionKey> = values.into_iter().map(key).collect();
            for key in &keys {
                let filter = PartitionFilter::parse(&filter_of(key)).unwrap();
                let choice = filter.choice(&columns).unwrap();
                for other in &keys {
                    prop_assert_eq!(choice.matches(other).unwrap(), other == key, "{} and {}", filter, other);
                }
            }
        }
    }
}
