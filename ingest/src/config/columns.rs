//! Types that several sections share: lists of columns with optional new names, and policies for invalid rows.

use crate::error::MessageAndHint;
use onefold_base::units::parse_duration_micros;
use onefold_datasets::suggest;
use serde::Deserialize;

/// The policy for rows that do not meet a requirement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Leave them out and count them.
    Skip,
    /// Fail, and build nothing.
    #[default]
    Error,
}

/// Columns of a source with their names in the samples: `["a"]`, or `{ a = "b" }` if the name in the source is `b`.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a list of columns, as [\"a\"], or a table of new names, as { a = \"b\" }"
)]
pub(super) enum ColumnNames {
    List(Vec<String>),
    Renamed(toml::Table),
}

impl ColumnNames {
    /// Returns pairs of the name in the samples and the name in the source, in the order written.
    ///
    /// # Errors
    ///
    /// A message and a hint if there is no column, a column is listed twice, or a name in the source is not text.
    /// `place` is the key of the list.
    pub(super) fn pairs(&self, place: &str) -> Result<Vec<(String, String)>, MessageAndHint> {
        let pairs: Vec<(String, String)> = match self {
            Self::List(names) => names.iter().map(|name| (name.clone(), name.clone())).collect(),
            Self::Renamed(table) => {
                let pair = |(name, column): (&String, &toml::Value)| match column.as_str() {
                    Some(column) => Ok((name.clone(), column.to_owned())),
                    None => Err(wrong(
                        format!("{place}.{name} is not the name of a column"),
                        format!("write `{name} = \"…\"` with the column's name in the source"),
                    )),
                };
                table.iter().map(pair).collect::<Result<_, _>>()?
            }
        };
        if pairs.is_empty() {
            return Err(wrong(format!("{place} names no column"), "name at least one, as `[\"user_id\"]`"));
        }
        once(place, pairs.iter().map(|(name, _)| name))?;
        Ok(pairs)
    }
}

/// Combines a message and a hint.
pub(super) fn wrong(message: impl Into<String>, hint: impl Into<String>) -> MessageAndHint {
    (message.into(), hint.into())
}

/// Refuses a name that is listed twice in the key `place`.
pub(super) fn once<'a>(
    place: &str,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), MessageAndHint> {
    let mut seen = Vec::new();
    for name in names {
        if seen.contains(&name) {
            return Err(wrong(format!("{place} has `{name}` twice"), "name every column once"));
        }
        seen.push(name);
    }
    Ok(())
}

/// Refuses a source that is not in `[sources]`.
pub(super) fn known_source(place: &str, source: &str, sources: &[&str]) -> Result<(), MessageAndHint> {
    if sources.contains(&source) {
        return Ok(());
    }
    let message = format!("{place} is `{source}`, which `[sources]` does not name");
    Err(wrong(message, suggest(source, sources.iter().copied())))
}

/// Parses a positive duration and returns it in microseconds. `place` is its key.
pub(super) fn duration(place: &str, text: &str) -> Result<i64, MessageAndHint> {
    parse_duration_micros(text)
        .map_err(|error| wrong(format!("{place}: {error}"), "units are `us`, `ms`, `s`, `m`, `h` and `d`"))
}

/// Parses a duration that may be zero (`0s`) and returns it in microseconds.
pub(super) fn duration_or_zero(place: &str, text: &str) -> Result<i64, MessageAndHint> {
    match text.trim().strip_prefix('0') {
        Some(unit) if unit.starts_with(char::is_alphabetic) => {
            duration(place, &format!("1{unit}")).map(|_| 0)
        }
        _ => duration(place, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_listed_or_renamed() {
        #[derive(Deserialize)]
        struct File {
            on: ColumnNames,
        }
        let pairs = |text: &str| toml::from_str::<File>(text).unwrap().on.pairs("`on`");
        assert_eq!(
            pairs("on = [\"b\", \"a\"]").unwrap(),
            [("b".into(), "b".into()), ("a".into(), "a".into())]
        );
        assert_eq!(pairs("on = { b = \"x\", a = \"y\" }").unwrap()[0], ("b".into(), "x".into()));
        assert!(pairs("on = []").unwrap_err().0.contains("`on` names no column"));
        assert!(pairs("on = [\"a\", \"a\"]").unwrap_err().0.contains("`a` twice"));
        assert!(pairs("on = { a = 1 }").unwrap_err().0.contains("`on`.a is not the name"));
        let error = toml::from_str::<File>("on = 3").err().unwrap().to_string();
        assert!(error.contains("expected a list of columns"), "{error}");
    }

    #[test]
    fn a_duration_may_be_zero_where_that_means_something() {
        assert_eq!(duration_or_zero("`delay`", "0s").unwrap(), 0);
        assert_eq!(duration_or_zero("`delay`", "05s").unwrap(), 5_000_000);
        assert!(duration_or_zero("`delay`", "0 parsecs").unwrap_err().0.contains("`delay`"));
        assert!(duration("`window`", "0s").is_err());
    }
}
