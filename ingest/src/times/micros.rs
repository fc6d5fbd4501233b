//! The SQL function `__onefold_micros(column, settings)`: a time column as microseconds since 1970-01-01T00:00 UTC.
//!
//! | column | possible settings | meaning of a value |
//! |---|---|---|
//! | timestamp with a time zone | none | an instant |
//! | timestamp, date | `time_zone` | a local time (a date: its midnight), of UTC without a zone |
//! | integer | `unit` | a count since 1970 |
//! | integer, text | `format`, `time_zone` | digits or text in the notation of `strftime` |
//! | 64-bit float | `unit` | a count since 1970 with a fraction |
//! | text | none, `time_zone` | ISO 8601 |
//! | text | `unit` | the digits of a count since 1970 |
//!
//! The settings are a [`TimeConfig`] as JSON. Nulls stay nulls. If a clock is set back and shows a local time twice, the
//! first instant is taken. If a clock is set forward and skips a local time, the time is read as if the clock had not
//! been set. The function `__onefold_clock_change(column, settings)` returns 1 for a time that is shown twice, 2 for a
//! time that is skipped, and 0 for others. Integers and timestamps that are finer than a microsecond are rounded down.

use std::sync::Arc;

use chrono::format::StrftimeItems;
use chrono::{DateTime, FixedOffset, Utc};
use datafusion::arrow::array::{Array, ArrayRef, AsArray, Int64Array};
use datafusion::arrow::compute::cast;
use datafusion::arrow::compute::kernels::cast_utils::string_to_datetime;
use datafusion::arrow::datatypes::{DataType, Float64Type, Int64Type, TimeUnit, UInt64Type};
use datafusion::arrow::util::display::array_value_to_string;
use datafusion::common::Result as EngineResult;
use datafusion::error::DataFusionError;
use datafusion::logical_expr::{ColumnarValue, ScalarUDF, Signature, SimpleScalarUDF, Volatility};

use crate::clock::{ClockChange, Instant, Zone, local_instant, local_midnight, parse_with_format};
use crate::config::{EpochUnit, TimeConfig};
use crate::error::{Error, external};

/// The name of the function.
pub(super) const NAME: &str = "__onefold_micros";
/// The name of the function that detects clock changes.
pub(super) const CHANGE_NAME: &str = "__onefold_clock_change";

/// The way to read the values of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// Counts since 1970 in UTC, with this number of counts per second.
    Count(i64),
    /// Counts since 1970 on a local clock, with this number of counts per second.
    LocalCount(i64),
    /// Days since 1970.
    Days,
    /// Counts since 1970 with a fraction, with this number of counts per second.
    Fraction(i64),
    /// The digits of a count since 1970, with this number of counts per second.
    Digits(i64),
    /// Texts, or the digits of a number, in a format.
    Formatted,
    /// Texts in ISO 8601.
    Iso,
}

/// The reason why a time column cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unclear {
    /// Its values are numbers without a unit.
    NoUnit,
    /// Another reason: a message that follows the column and its type, and a hint.
    Wrong(String, String),
}

impl Reading {
    /// Returns how to read a column of `data_type`, or the reason why its type and the configuration do not define its
    /// values.
    pub(super) fn of(time: &TimeConfig, data_type: &DataType) -> Result<Self, Unclear> {
        let wrong = |message: &str, hint: &str| Err(Unclear::Wrong(message.to_owned(), hint.to_owned()));
        let needless =
            |key: &str| wrong(&format!("`{key}` does not apply to that type"), &format!("remove `{key}`"));
        match data_type {
            DataType::Dictionary(_, value) => return Self::of(time, value),
            DataType::Timestamp(..) | DataType::Date32 | DataType::Date64 if time.unit.is_some() => {
                return needless("unit");
            }
            DataType::Timestamp(..) | DataType::Date32 | DataType::Date64 if time.format.is_some() => {
                return needless("format");
            }
            DataType::Timestamp(_, Some(_)) if time.time_zone.is_some() => return needless("time_zone"),
            DataType::Float64 if time.format.is_some() => return needless("format"),
            _ => {}
        }
        let per_second = time.unit.map(EpochUnit::per_second);
        Ok(match data_type {
            DataType::Timestamp(unit, zone) => {
                let per_second = match unit {
                    TimeUnit::Second => 1,
                    TimeUnit::Millisecond => 1_000,
                    TimeUnit::Microsecond => 1_000_000,
                    TimeUnit::Nanosecond => 1_000_000_000,
                };
                let is_local = zone.is_none() && time.time_zone.is_some();
                if is_local { Self::LocalCount(per_second) } else { Self::Count(per_second) }
            }
            DataType::Date32 => Self::Days,
            DataType::Date64 if time.time_zone.is_some() => Self::LocalCount(1_000),
            DataType::Date64 => Self::Count(1_000),
            integer if integer.is_integer() => match (per_second, &time.format) {
                (Some(per_second), _) => Self::Count(per_second),
                (None, Some(_)) => Self::Formatted,
                (None, None) => return Err(Unclear::NoUnit),
            },
            DataType::Float64 => Self::Fraction(per_second.ok_or(Unclear::NoUnit)?),
            DataType::Float16 | DataType::Float32 => {
                return wrong(
                    "numbers of that type hold seconds since 1970 only to about two minutes",
                    "write the log with 64-bit integers, 64-bit floats or timestamps",
                );
            }
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => match (per_second, &time.format) {
                (Some(per_second), _) => Self::Digits(per_second),
                (None, Some(_)) => Self::Formatted,
                (None, None) => Self::Iso,
            },
            _ => {
                return wrong(
                    "that type is not a time",
                    "a time is a timestamp, a date, a text, or a number with a `unit`; convert the column in a query",
                );
            }
        })
    }
}

/// Returns the function, to be registered with the engine.
pub(crate) fn function() -> ScalarUDF {
    of_column(NAME, to_micros)
}

/// Returns the function that detects clock changes.
pub(crate) fn change_function() -> ScalarUDF {
    of_column(CHANGE_NAME, to_changes)
}

/// Makes an SQL function that computes integers from a time column and its settings.
fn of_column(
    name: &'static str,
    compute: fn(&TimeConfig, &ArrayRef) -> EngineResult<Int64Array>,
) -> ScalarUDF {
    let invoke = move |arguments: &[ColumnarValue]| -> EngineResult<ColumnarValue> {
        let [values, ColumnarValue::Scalar(time)] = arguments else {
            return Err(DataFusionError::Execution(format!("{name} takes a column and a literal")));
        };
        let time = time.try_as_str().flatten().unwrap_or_default();
        let time: TimeConfig =
            serde_json::from_str(time).map_err(|error| DataFusionError::External(Box::new(error)))?;
        Ok(ColumnarValue::Array(Arc::new(compute(&time, &values.to_array(1)?)?)))
    };
    let signature = Signature::any(2, Volatility::Immutable);
    ScalarUDF::from(SimpleScalarUDF::new_with_signature(name, signature, DataType::Int64, Arc::new(invoke)))
}

/// Returns the values of a column in microseconds since 1970.
fn to_micros(time: &TimeConfig, values: &ArrayRef) -> EngineResult<Int64Array> {
    Ok(instants(time, values)?.into_iter().map(|instant| instant.map(|instant| instant.micros)).collect())
}

/// Returns whether a clock change affects each value of a column.
fn to_changes(time: &TimeConfig, values: &ArrayRef) -> EngineResult<Int64Array> {
    let change = |instant: Instant| match instant.change {
        ClockChange::None => 0,
        ClockChange::Twice => 1,
        ClockChange::Skipped => 2,
    };
    Ok(instants(time, values)?.into_iter().map(|instant| instant.map(change)).collect())
}

/// Returns the instants that the values of a column denote.
fn instants(time: &TimeConfig, values: &ArrayRef) -> EngineResult<Vec<Option<Instant>>> {
    if let DataType::Dictionary(_, value) = values.data_type() {
        return instants(time, &cast(values, value)?);
    }
    let reading = Reading::of(time, values.data_type())
        .map_err(|unclear| DataFusionError::Execution(format!("{NAME} was not checked: {unclear:?}")))?;
    let zone: Option<Zone> = time.time_zone.as_deref().map(str::parse).transpose()?;
    match reading {
        Reading::Count(per_second) => {
            each_count(time, values, |count| micros_of(count, per_second).map(Instant::plain))
        }
        Reading::LocalCount(per_second) => each_count(time, values, |count| {
            local_instant(DateTime::from_timestamp_micros(micros_of(count, per_second)?)?.naive_utc(), zone)
        }),
        Reading::Days => each_count(time, values, |days| match zone {
            None => days.checked_mul(86_400_000_000).map(Instant::plain),
            Some(_) => {
                local_midnight(DateTime::from_timestamp(days.checked_mul(86_400)?, 0)?.date_naive(), zone)
            }
        }),
        Reading::Fraction(per_second) => each(time, values, values.as_primitive::<Float64Type>(), |value| {
            let micros = (value / per_second as f64 * 1e6).round();
            (micros.abs() < 9e18).then_some(Instant::plain(micros as i64))
        }),
        Reading::Digits(per_second) => {
            each_text(time, values, |text| micros_of(text.parse().ok()?, per_second).map(Instant::plain))
        }
        Reading::Formatted => {
            let items = StrftimeItems::new(time.format.as_deref().unwrap_or_default()).parse();
            let items = items.map_err(|error| DataFusionError::External(Box::new(error)))?;
            each_text(time, values, |text| parse_with_format(text, &items, zone))
        }
        Reading::Iso => each_text(time, values, |text| parse_iso(text, zone)),
    }
}

/// Applies `instant` to each number of a column of integers, timestamps or dates.
fn each_count(
    time: &TimeConfig,
    values: &ArrayRef,
    instant: impl Fn(i64) -> Option<Instant>,
) -> EngineResult<Vec<Option<Instant>>> {
    let counts = match values.data_type() {
        DataType::UInt64 => {
            let counts = values.as_primitive::<UInt64Type>();
            return each(time, values, counts, |count| instant(i64::try_from(count).ok()?));
        }
        DataType::Date32 => cast(&cast(values, &DataType::Int32)?, &DataType::Int64)?,
        _ => cast(values, &DataType::Int64)?,
    };
    each(time, values, counts.as_primitive::<Int64Type>(), instant)
}

/// Applies `instant` to each trimmed text of a column, or to the digits of each integer.
fn each_text(
    time: &TimeConfig,
    values: &ArrayRef,
    instant: impl Fn(&str) -> Option<Instant>,
) -> EngineResult<Vec<Option<Instant>>> {
    let texts = cast(values, &DataType::Utf8)?;
    each(time, values, texts.as_string::<i32>(), |text| instant(text.trim()))
}

/// Applies `instant` to each of `items`, which are the values of a column. Fails at the first value for which it
/// returns `None`.
fn each<T>(
    time: &TimeConfig,
    values: &ArrayRef,
    items: impl IntoIterator<Item = Option<T>>,
    instant: impl Fn(T) -> Option<Instant>,
) -> EngineResult<Vec<Option<Instant>>> {
    let instant = |(row, item): (usize, Option<T>)| match item {
        None => Ok(None),
        Some(item) => match instant(item) {
            Some(instant) => Ok(Some(instant)),
            None => Err(refused(time, &array_value_to_string(values, row)?)),
        },
    };
    items.into_iter().enumerate().map(instant).collect()
}

/// Returns the microseconds of a count since 1970, rounded down; `None` if they exceed 64 bits.
fn micros_of(count: i64, per_second: i64) -> Option<i64> {
    if per_second <= 1_000_000 {
        count.checked_mul(1_000_000 / per_second)
    } else {
        Some(count.div_euclid(per_second / 1_000_000))
    }
}

/// Parses a time in ISO 8601. A text without a zone is in `zone`, or in UTC if that is `None`. Returns `None` for other
/// texts.
fn parse_iso(text: &str, zone: Option<Zone>) -> Option<Instant> {
    let as_utc = string_to_datetime(&Utc, text).ok()?;
    let plain = Instant::plain(as_utc.timestamp_micros());
    if zone.is_none() {
        return Some(plain);
    }
    // A text with a zone denotes the same instant for every default zone.
    let elsewhere = FixedOffset::east_opt(3600)?;
    if string_to_datetime(&elsewhere, text).ok()? == as_utc {
        return Some(plain);
    }
    if text.len() == 10 {
        local_midnight(as_utc.date_naive(), zone)
    } else {
        local_instant(as_utc.naive_utc(), zone)
    }
}

/// Returns the error for a value that is not a time.
fn refused(time: &TimeConfig, value: &str) -> DataFusionError {
    let zone = time.time_zone.as_deref().map(|zone| format!(" of {zone}")).unwrap_or_default();
    let (message, hint) = match (&time.unit, &time.format) {
        (Some(unit), _) => (
            format!("`{value}` is not a time in `{unit}` since 1970"),
            "correct the unit or the value, or leave such rows out in a query",
        ),
        (None, Some(format)) => (
            format!("`{value}` is not a time{zone} in the format `{format}`"),
            "correct `format` or the value, or leave such rows out in a query",
        ),
        (None, None) => (
            format!("`{value}` is not a time{zone}"),
            "times in texts look like `2024-06-01T12:00:00Z`; for others write `format = \"…\"`, for digits since 1970 \
             `unit = \"s\"`, or leave such rows out in a query",
        ),
    };
    let message = format!("{}: {message}", time.place);
    external(Error::column(&time.column, message, hint))
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{
        Date32Array, DictionaryArray, Float64Array, Int32Array, StringArray, StringViewArray,
        TimestampMillisecondArray, TimestampNanosecondArray, UInt32Array, UInt64Array,
    };
    use datafusion::arrow::datatypes::Int32Type;

    use super::*;

    /// 2024-06-01T00:00Z in seconds since 1970.
    const JUNE: i64 = 1_717_200_000;
    const MICROS: i64 = 1_000_000;

    fn settings(unit: Option<EpochUnit>, format: Option<&str>, time_zone: Option<&str>) -> TimeConfig {
        TimeConfig {
            place: "`[session].time`".to_owned(),
            column: "ts".to_owned(),
            unit,
            format: format.map(str::to_owned),
            time_zone: time_zone.map(str::to_owned),
            ..TimeConfig::default()
        }
    }

    fn micros(settings: &TimeConfig, values: impl Array + 'static) -> Vec<Option<i64>> {
        to_micros(settings, &(Arc::new(values) as ArrayRef)).unwrap().iter().collect()
    }

    fn error(settings: &TimeConfig, values: impl Array + 'static) -> String {
        Error::from(to_micros(settings, &(Arc::new(values) as ArrayRef)).unwrap_err()).to_string()
    }

    fn texts(texts: &[&str]) -> StringArray {
        StringArray::from_iter_values(texts)
    }

    #[test]
    fn counts_of_every_unit_and_width_are_one_instant() {
        let expected = [Some(JUNE * MICROS), None];
        let unit = |unit| settings(Some(unit), None, None);
        for (n, per_second) in EpochUnit::ALL.map(|unit| (unit, unit.per_second())) {
            let counts = Int64Array::from(vec![Some(JUNE * per_second), None]);
            assert_eq!(micros(&unit(n), counts), expected);
            let counts = UInt64Array::from(vec![Some((JUNE * per_second) as u64), None]);
            assert_eq!(micros(&unit(n), counts), expected);
            let digits = StringViewArray::from(vec![Some((JUNE * per_second).to_string()), None]);
            assert_eq!(micros(&unit(n), digits), expected);
        }
        let seconds = unit(EpochUnit::Second);
        assert_eq!(micros(&seconds, Int32Array::from(vec![Some(JUNE as i32), None])), expected);
        assert_eq!(micros(&seconds, UInt32Array::from(vec![Some(JUNE as u32), None])), expected);
        let fraction = Float64Array::from(vec![JUNE as f64 + 0.25, -1.5]);
        assert_eq!(micros(&seconds, fraction), [Some(JUNE * MICROS + 250_000), Some(-1_500_000)]);
        let early = Int64Array::from(vec![-1]);
        assert_eq!(micros(&unit(EpochUnit::Nanosecond), early), [Some(-1)], "not later than it is");
    }

    #[test]
    fn timestamps_and_dates_need_no_unit() {
        let plain = settings(None, None, None);
        let ms = || TimestampMillisecondArray::from(vec![JUNE * 1000 + 7]);
        assert_eq!(micros(&plain, ms()), [Some(JUNE * MICROS + 7000)]);
        assert_eq!(micros(&plain, ms().with_timezone("America/New_York")), [Some(JUNE * MICROS + 7000)]);
        let ns = TimestampNanosecondArray::from(vec![JUNE * 1_000_000_000 + 7999]);
        assert_eq!(micros(&plain, ns), [Some(JUNE * MICROS + 7)]);
        let days = || Date32Array::from(vec![Some((JUNE / 86_400) as i32), None]);
        assert_eq!(micros(&plain, days()), [Some(JUNE * MICROS), None]);
        let copenhagen = settings(None, None, Some("Europe/Copenhagen"));
        assert_eq!(micros(&copenhagen, days()), [Some((JUNE - 7200) * MICROS), None]);
        assert_eq!(micros(&copenhagen, ms()), [Some((JUNE - 7200) * MICROS + 7000)]);
    }

    #[test]
    fn texts_are_iso_or_have_a_format() {
        let expected = [Some(JUNE * MICROS); 3];
        let iso = ["2024-06-01", "2024-06-01T00:00:00", " 2024-06-01 02:00:00+02:00"];
        assert_eq!(micros(&settings(None, None, None), texts(&iso)), expected);
        let local = ["2024-06-01T02:00:00", "2024-06-01T00:00:00Z", "2024-05-31 20:00:00-04:00"];
        assert_eq!(micros(&settings(None, None, Some("Europe/Copenhagen")), texts(&local)), expected);
        let dictionary: DictionaryArray<Int32Type> = iso.into_iter().collect();
        assert_eq!(micros(&settings(None, None, None), dictionary), expected);
        let formatted =
            |format: &str, zone, text: &str| micros(&settings(None, Some(format), zone), texts(&[text]))[0];
        let june = expected[0];
        assert_eq!(formatted("%m/%d/%Y %H:%M", None, "6/1/2024 0:00"), june);
        assert_eq!(formatted("%m/%d/%Y %I:%M %p", Some("America/New_York"), "05/31/2024 08:00 PM"), june);
        assert_eq!(
            formatted("%d.%m.%Y", Some("+02:00"), "01.06.2024"),
            june.map(|june| june - 7200 * MICROS)
        );
        assert_eq!(formatted("%Y%m%d%H", None, "2024060100"), june);
        assert_eq!(formatted("%d/%b/%Y:%H:%M:%S %z", Some("Asia/Tokyo"), "01/Jun/2024:02:00:00 +0200"), june);
        let digits = Int32Array::from(vec![20_240_601]);
        assert_eq!(micros(&settings(None, Some("%Y%m%d"), None), digits), [june]);
    }

    #[test]
    fn clocks_that_are_set_skip_and_repeat_an_hour() {
        let copenhagen = settings(None, None, Some("Europe/Copenhagen"));
        // 2023-10-29 02:30 occurs first in summer time, at 00:30 UTC.
        assert_eq!(micros(&copenhagen, texts(&["2023-10-29 02:30:00"])), [Some(1_698_539_400 * MICROS)]);
        // 2023-03-26 02:30 is skipped. A clock that had not been set would show it at 01:30 UTC.
        let spring = ["2023-03-26 01:30:00", "2023-03-26 02:30:00", "2023-03-26 03:00:00"];
        let expected = [1_679_790_600, 1_679_794_200, 1_679_792_400].map(|second| Some(second * MICROS));
        assert_eq!(micros(&copenhagen, texts(&spring)), expected);
        let changes = |values: &[&str]| -> Vec<Option<i64>> {
            to_changes(&copenhagen, &(Arc::new(texts(values)) as ArrayRef)).unwrap().iter().collect()
        };
        assert_eq!(changes(&spring), [Some(0), Some(2), Some(0)]);
        assert_eq!(changes(&["2023-10-29 02:30:00", "2023-10-29 02:30:00Z"]), [Some(1), Some(0)]);
        // In Samoa, 2011-12-30 was skipped.
        let samoa = settings(None, None, Some("Pacific/Apia"));
        assert!(micros(&samoa, texts(&["2011-12-30 12:00:00"]))[0].is_some());
        // Midnight of 2018-11-04 was skipped in São Paulo: that day began at 01:00, which is 03:00 UTC.
        let day = micros(&settings(None, None, Some("America/Sao_Paulo")), texts(&["2018-11-04"]));
        assert_eq!(day, [Some(1_541_300_400 * MICROS)]);
    }

    #[test]
    fn values_that_are_not_times_are_named() {
        let refused = |settings: &TimeConfig, values: ArrayRef, parts: &[&str]| {
            let error = error(settings, values);
            for part in parts {
                assert!(error.contains(part), "{error}\nlacks {part}");
            }
        };
        let seconds = settings(Some(EpochUnit::Second), None, None);
        let huge = i64::MAX / 1000;
        refused(
            &seconds,
            Arc::new(Int64Array::from(vec![JUNE, huge])),
            &["column `ts`", &huge.to_string(), "`s`"],
        );
        refused(&seconds, Arc::new(UInt64Array::from(vec![u64::MAX])), &["`18446744073709551615`"]);
        refused(&seconds, Arc::new(Float64Array::from(vec![f64::NAN])), &["`NaN` is not a time"]);
        refused(&seconds, Arc::new(texts(&["12", "noon"])), &["`noon` is not a time", "unit"]);
        refused(
            &settings(None, None, None),
            Arc::new(texts(&["1717200000"])),
            &["`1717200000`", "unit = \"s\""],
        );
        let format = settings(None, Some("%m/%d/%Y"), None);
        refused(&format, Arc::new(texts(&["13/01/2024"])), &["`13/01/2024`", "`%m/%d/%Y`", "hint: "]);
    }
}
