//! `time = …`: the time column of a source. All sections use the same syntax.

use std::fmt::{self, Write};

use chrono::format::{Fixed, Item, StrftimeItems};
use chrono::{TimeZone, Utc};
use datafusion::arrow::compute::kernels::cast_utils::string_to_datetime;
use serde::{Deserialize, Serialize};

use super::columns::wrong;
use crate::clock::{Zone, parse_with_format};
use crate::error::MessageAndHint;

/// A time column: its name, and how to interpret values whose type does not define it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeConfig {
    /// The configuration key that names the column, such as `` `[session].time` ``, for messages.
    pub place: String,
    /// The name of the column.
    pub column: String,
    /// The column with the number of a row's file, if [`column`](Self::column) has the number of the row within its
    /// file.
    pub file: Option<String>,
    /// The unit of numeric values, which count from 1970-01-01T00:00 UTC.
    pub unit: Option<EpochUnit>,
    /// The format of text values in `strftime` notation; ISO 8601 if `None`.
    pub format: Option<String>,
    /// The time zone of values without a zone or offset; UTC if `None`.
    pub time_zone: Option<String>,
    /// The earliest accepted time, in microseconds since 1970; the limit of `[checks]` if `None`.
    pub not_before: Option<i64>,
    /// The latest accepted time, in microseconds since 1970; the limit of `[checks]` if `None`.
    pub not_after: Option<i64>,
}

/// The unit of a number that counts from 1970-01-01T00:00 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EpochUnit {
    /// Seconds.
    #[serde(rename = "s")]
    Second,
    /// Milliseconds.
    #[serde(rename = "ms")]
    Millisecond,
    /// Microseconds.
    #[serde(rename = "us")]
    Microsecond,
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanosecond,
}

impl EpochUnit {
    /// All units, longest first.
    pub const ALL: [Self; 4] = [Self::Second, Self::Millisecond, Self::Microsecond, Self::Nanosecond];

    /// Returns the number of units per second.
    pub fn per_second(self) -> i64 {
        match self {
            Self::Second => 1,
            Self::Millisecond => 1_000,
            Self::Microsecond => 1_000_000,
            Self::Nanosecond => 1_000_000_000,
        }
    }
}

impl fmt::Display for EpochUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Second => "s",
            Self::Millisecond => "ms",
            Self::Microsecond => "us",
            Self::Nanosecond => "ns",
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeTable {
    column: String,
    unit: Option<EpochUnit>,
    format: Option<String>,
    time_zone: Option<String>,
    not_before: Option<toml::Value>,
    not_after: Option<toml::Value>,
}

impl TimeConfig {
    /// Returns the columns that determine the time.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        self.file.as_deref().into_iter().chain([self.column.as_str()])
    }

    /// Parses the value of the key `place`: `"column"`, or a table of keys.
    pub(super) fn parse(place: impl Into<String>, value: toml::Value) -> Result<Self, MessageAndHint> {
        let place = place.into();
        let hint = "write `time = \"column\"`, or `time = { column = \"column\", unit = \"s\" }`";
        let table: TimeTable = match value {
            toml::Value::String(column) => return Ok(Self { place, column, ..Self::default() }),
            table => table.try_into().map_err(|error: toml::de::Error| {
                let message = error.message();
                let units =
                    if message.contains("`ms`") { "; units are `s`, `ms`, `us` and `ns`" } else { "" };
                wrong(format!("{place}: {message}"), format!("{hint}{units}"))
            })?,
        };
        if table.unit.is_some() && table.format.is_some() {
            let message = format!("{place} has both `unit` and `format`");
            return Err(wrong(message, "keep `unit` for numbers since 1970, or `format` for texts"));
        }
        if table.unit.is_some() && table.time_zone.is_some() {
            let message = format!("{place} has both `unit` and `time_zone`");
            return Err(wrong(message, "numbers since 1970 are counted in UTC: remove `time_zone`"));
        }
        if let Some(format) = &table.format {
            check_format(&place, format, table.time_zone.as_deref())?;
        }
        if let Some(zone) = &table.time_zone {
            zone.parse::<Zone>().map_err(|_| {
                let hint = "write a name of the IANA time zone database, as `Europe/Copenhagen`, or an offset, as `+02:00`";
                wrong(format!("{place}: there is no time zone `{zone}`"), hint)
            })?;
        }
        let limit = |key: &str, value: Option<toml::Value>| {
            value.map(|value| instant(&format!("{place}: `{key}`"), &value)).transpose()
        };
        let not_before = limit("not_before", table.not_before)?;
        let not_after = limit("not_after", table.not_after)?;
        Ok(Self {
            column: table.column,
            file: None,
            unit: table.unit,
            format: table.format,
            time_zone: table.time_zone,
            not_before,
            not_after,
            place,
        })
    }
}

/// Refuses a format that defines no date or that is ambiguous.
fn check_format(place: &str, format: &str, time_zone: Option<&str>) -> Result<(), MessageAndHint> {
    let hint = "write how the column's texts look, as `\"%m/%d/%Y %H:%M\"`: `%Y` year, `%m` month, `%d` day, `%H` hour, \
                `%M` minute, `%S` second, `%.f` fraction, `%z` offset from UTC";
    let Ok(items) = StrftimeItems::new(format).parse() else {
        return Err(wrong(format!("{place}: `format` is `{format}`, which is not a format of times"), hint));
    };
    if items.contains(&Item::Fixed(Fixed::TimezoneName)) && time_zone.is_none() {
        let message = format!("{place}: `format` has `%Z`, and the names of zones in texts are ambiguous");
        return Err(wrong(message, "say the zone of all texts, as `time_zone = \"Europe/Copenhagen\"`"));
    }
    let example = Utc.with_ymd_and_hms(2024, 2, 29, 13, 5, 7).single().unwrap_or_default().fixed_offset();
    let mut text = String::new();
    let written = write!(text, "{}", example.format_with_items(items.iter()));
    if written.is_err() || parse_with_format(&text, &items, None).is_none() {
        return Err(wrong(
            format!("{place}: `format` is `{format}`, which does not give a whole date"),
            hint,
        ));
    }
    Ok(())
}

/// Parses a time of the configuration, in microseconds since 1970. `place` is its key.
pub(super) fn instant(place: &str, value: &toml::Value) -> Result<i64, MessageAndHint> {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let time = string_to_datetime(&Utc, &text).map_err(|_| {
        let hint = "write it as `2024-06-01` or `2024-06-01T12:00:00Z`; without a zone it is UTC";
        wrong(format!("{place}: `{text}` is not a time"), hint)
    })?;
    Ok(time.timestamp_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<TimeConfig, MessageAndHint> {
        #[derive(Deserialize)]
        struct File {
            time: toml::Value,
        }
        TimeConfig::parse("`[session].time`", toml::from_str::<File>(text).unwrap().time)
    }

    #[test]
    fn a_time_is_a_column_or_a_table() {
        let short = parse("time = \"ts\"").unwrap();
        assert_eq!((short.column.as_str(), short.unit, short.format), ("ts", None, None));
        let seconds = parse("time = { column = \"ts\", unit = \"s\", not_before = 1900-01-01 }").unwrap();
        assert_eq!(seconds.unit, Some(EpochUnit::Second));
        assert_eq!(seconds.not_before, Some(-25_567 * 86_400 * 1_000_000));
        let first = parse("time = { column = \"ts\", not_before = \"0001-01-01\" }").unwrap();
        assert_eq!(first.not_before, Some(-719_162 * 86_400 * 1_000_000));
        let local = parse(
            "time = { column = \"t\", format = \"%m/%d/%Y %H:%M\", time_zone = \"Europe/Copenhagen\" }",
        );
        assert_eq!(local.unwrap().time_zone.as_deref(), Some("Europe/Copenhagen"));
        for unit in EpochUnit::ALL {
            let text = format!("time = {{ column = \"ts\", unit = \"{unit}\" }}");
            assert_eq!(parse(&text).unwrap().unit, Some(unit));
        }
    }

    #[test]
    fn a_wrong_table_says_what_to_write() {
        let refused = |keys: &str, parts: &[&str]| {
            let (message, hint) = parse(&format!("time = {keys}")).unwrap_err();
            for part in parts {
                assert!(format!("{message}\n{hint}").contains(part), "{message}\n{hint}\nlacks {part}");
            }
        };
        refused("3", &["`[session].time`", "time = \"column\""]);
        refused("{ unit = \"s\" }", &["`[session].time`", "`column`"]);
        refused("{ column = \"t\", unit = \"sec\" }", &["sec", "`s`, `ms`, `us` and `ns`"]);
        refused("{ column = \"t\", zone = \"UTC\" }", &["zone", "time_zone"]);
        refused("{ column = \"t\", unit = \"s\", format = \"%Y\" }", &["both `unit` and `format`"]);
        refused("{ column = \"t\", unit = \"s\", time_zone = \"UTC\" }", &["both `unit` and `time_zone`"]);
        refused("{ column = \"t\", time_zone = \"Europe/Kopenhagen\" }", &["Europe/Kopenhagen", "IANA"]);
        refused("{ column = \"t\", format = \"%Q\" }", &["`%Q`", "not a format", "%m/%d/%Y"]);
        refused("{ column = \"t\", format = \"%Y-%m-%d %Z\" }", &["`%Z`", "time_zone"]);
        refused("{ column = \"t\", format = \"%H:%M\" }", &["does not give a whole date"]);
        refused("{ column = \"t\", not_before = \"soon\" }", &["`not_before`", "soon", "2024-06-01"]);
    }
}
