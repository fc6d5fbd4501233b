//! Converts times of every type to microseconds since 1970-01-01T00:00 UTC.
//!
//! [`micros_sql`] makes the SQL expression for each time column of sessions, joins, attributes and timelines. The
//! expression calls the function `__onefold_micros` ([`micros`]), which converts a column according to its type and its
//! configuration, and fails on a value that it cannot read. [`check`] refuses a column before rows are read if its type
//! and configuration do not determine the meaning of its values.

mod micros;

use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, NaiveDate};
use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema};
use datafusion::common::ScalarValue;
use datafusion::functions_aggregate::expr_fn::{max, min};
use datafusion::prelude::{DataFrame, ident};
use serde::{Deserialize, Serialize};

use self::micros::{Reading, Unclear};
pub(crate) use self::micros::{change_function, function};
use crate::config::{Config, EpochUnit, TimeConfig};
use crate::error::{Error, Result};
use crate::sql::quote;

/// 1990-01-01T00:00 UTC. Earlier times are refused unless the configuration allows them.
pub(crate) const FIRST_PLAUSIBLE: i64 = 7_305 * 86_400 * 1_000_000;
/// A number larger than the number of rows of any file. If rows have no times, the time of a row is this number of
/// microseconds for each file before its own, plus one microsecond for each row before it.
const ROWS_OF_FILE: i64 = 1 << 40;
/// The number of rows whose values an error about a missing unit takes into account.
const ROWS_SHOWN: usize = 1000;

/// The range of accepted times, in microseconds since 1970. Both ends are inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeLimits {
    /// The first accepted time.
    pub not_before: i64,
    /// The last accepted time.
    pub not_after: i64,
}

impl TimeLimits {
    /// Returns the limits of `[checks]`: from 1990 until now by default.
    pub(crate) fn of_checks(config: &Config) -> Self {
        let checks = config.checks.as_ref();
        let not_before = checks.and_then(|checks| checks.not_before).unwrap_or(FIRST_PLAUSIBLE);
        let not_after = checks.and_then(|checks| checks.not_after).unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
        });
        Self { not_before, not_after }
    }

    /// Returns the limits of a time column: its own limits, or else these.
    pub(crate) fn of(self, time: &TimeConfig) -> Self {
        Self {
            not_before: time.not_before.unwrap_or(self.not_before),
            not_after: time.not_after.unwrap_or(self.not_after),
        }
    }

    /// Returns the SQL condition that the time `micros` is before the limits.
    pub(crate) fn is_past(self, micros: &str) -> String {
        format!("{micros} < {}", self.not_before)
    }

    /// Returns the SQL condition that the time `micros` is after the limits.
    pub(crate) fn is_future(self, micros: &str) -> String {
        format!("{micros} > {}", self.not_after)
    }
}

/// Formats microseconds since 1970 for messages.
pub(crate) fn shown(micros: i64) -> String {
    DateTime::from_timestamp_micros(micros).map_or_else(
        || format!("{micros} µs since 1970"),
        |time| time.format("%Y-%m-%dT%H:%M:%S%.fZ").to_string(),
    )
}

/// Returns the SQL expression for the time column of a table with the columns of `schema`, in microseconds since 1970.
///
/// # Errors
///
/// [`Error::Fault`] if the column is missing, or its type and the configuration do not determine the meaning of its
/// values.
pub(crate) fn micros_sql(config: &Config, time: &TimeConfig, schema: &ArrowSchema) -> Result<String> {
    let data_type = schema.field_with_name(&time.column).map_or(&DataType::Null, |field| field.data_type());
    Reading::of(time, data_type).map_err(|unclear| unclear.error(config, time, data_type, None))?;
    let micros = call(micros::NAME, time)?;
    Ok(match &time.file {
        Some(file) => format!("({} * {ROWS_OF_FILE} + {micros})", quote(file)),
        None => micros,
    })
}

/// Returns the SQL expression that detects clock changes in a checked time column: 1 for a time that the clocks of its
/// zone show twice, 2 for a time that they skip. Returns `None` if the configuration does not name a zone.
///
/// # Errors
///
/// None for a checked column.
pub(crate) fn clock_change_sql(time: &TimeConfig) -> Result<Option<String>> {
    time.time_zone.is_some().then(|| call(micros::CHANGE_NAME, time)).transpose()
}

fn call(function: &str, time: &TimeConfig) -> Result<String> {
    let settings = serde_json::to_string(time).map_err(std::io::Error::from)?;
    Ok(format!("{function}({}, '{}')", quote(&time.column), settings.replace('\'', "''")))
}

/// Checks that the type of the time column of `rows`, if it exists, and the configuration determine the meaning of its
/// values.
///
/// # Errors
///
/// [`Error::Fault`] if they do not. For numbers without a unit, the error shows the meaning of some values in each
/// unit.
pub(crate) async fn check(config: &Config, time: &TimeConfig, rows: DataFrame) -> Result<()> {
    let Ok(field) = rows.schema().as_arrow().field_with_name(&time.column) else { return Ok(()) };
    let data_type = field.data_type().clone();
    match Reading::of(time, &data_type) {
        Ok(_) => Ok(()),
        Err(Unclear::NoUnit) => {
            let values = some_values(rows, &time.column).await?;
            Err(Unclear::NoUnit.error(config, time, &data_type, values))
        }
        Err(unclear) => Err(unclear.error(config, time, &data_type, None)),
    }
}

/// Returns the smallest and the largest of some values of a column; `None` if all are null.
async fn some_values(rows: DataFrame, column: &str) -> Result<Option<[ScalarValue; 2]>> {
    let some =
        rows.filter(ident(column).is_not_null())?.select(vec![ident(column)])?.limit(0, Some(ROWS_SHOWN))?;
    let batches = some.aggregate(Vec::new(), vec![min(ident(column)), max(ident(column))])?.collect().await?;
    let Some(batch) = batches.iter().find(|batch| batch.num_rows() > 0) else { return Ok(None) };
    let value = |i: usize| ScalarValue::try_from_array(batch.column(i), 0);
    let values = [value(0)?, value(1)?];
    Ok(if values.iter().any(ScalarValue::is_null) { None } else { Some(values) })
}

impl Unclear {
    fn error(
        self,
        config: &Config,
        time: &TimeConfig,
        data_type: &DataType,
        values: Option<[ScalarValue; 2]>,
    ) -> Error {
        let (message, hint) = match self {
            Self::Wrong(message, hint) => (message, hint),
            Self::NoUnit => {
                let message = "the configuration does not say which unit its numbers have".to_owned();
                match values {
                    None => (message, unit_hint(time, "s")),
                    Some(values) => {
                        let (meaning, hint) = meanings(config, time, &values);
                        (format!("{message}: {meaning}"), hint)
                    }
                }
            }
        };
        let message = format!("{}: `{}` is {data_type}, and {message}", time.place, time.column);
        Error::config(&config.path, message, hint)
    }
}

fn unit_hint(time: &TimeConfig, unit: &str) -> String {
    format!(
        "write `time = {{ column = \"{}\", unit = \"{unit}\" }}`; units are `s`, `ms`, `us` and `ns`",
        time.column
    )
}

/// Describes the meaning of the values in each unit, and returns a hint too.
fn meanings(config: &Config, time: &TimeConfig, values: &[ScalarValue; 2]) -> (String, String) {
    let limits = TimeLimits::of_checks(config).of(time);
    let numbers = values.each_ref().map(|value| value.to_string().parse::<f64>().unwrap_or(f64::NAN));
    let mut lines = Vec::new();
    let mut plausible = Vec::new();
    for unit in EpochUnit::ALL {
        let micros = numbers.map(|number| (number * 1e6 / unit.per_second() as f64) as i64);
        if micros.iter().all(|micros| (limits.not_before..=limits.not_after).contains(micros)) {
            plausible.push(unit);
        }
        lines.push(format!("{} to {} in `{unit}`", shown(micros[0]), shown(micros[1])));
    }
    let meaning = format!("{} to {} would be {}", values[0], values[1], lines.join(", "));
    let hint = match plausible.as_slice() {
        [unit] => format!("only `{unit}` is plausible: {}", unit_hint(time, &unit.to_string())),
        _ if values.iter().all(spells_a_date) => format!(
            "their digits look like dates: write `time = {{ column = \"{}\", format = \"%Y%m%d\" }}`",
            time.column
        ),
        [] => format!(
            "none of them is plausible: check that the column is a time, then {}",
            unit_hint(time, "s")
        ),
        [first, ..] => unit_hint(time, &first.to_string()),
    };
    (meaning, hint)
}

/// Returns whether a number has the digits of a date, such as 20240601.
fn spells_a_date(value: &ScalarValue) -> bool {
    let text = value.to_string();
    text.len() == 8
        && (1900..2100).contains(&text[..4].parse().unwrap_or(0))
        && NaiveDate::parse_from_str(&text, "%Y%m%d").is_ok()
}
