//! Local times of a time zone, and times in texts, as microseconds since 1970-01-01T00:00 UTC.

use chrono::format::{Item, Parsed, parse};
use chrono::{MappedLocalTime, NaiveDate, NaiveDateTime, NaiveTime, TimeDelta, TimeZone, Utc};

/// A time zone by name, or by its offset from UTC.
pub(crate) type Zone = datafusion::arrow::array::timezone::Tz;

/// The instant of a local time, the first where there are two; `None` if the clock skips it. Without a zone it is UTC.
pub(crate) fn local_micros(local: NaiveDateTime, zone: Option<Zone>) -> Option<i64> {
    let Some(zone) = zone else { return Some(local.and_utc().timestamp_micros()) };
    match zone.from_local_datetime(&local) {
        MappedLocalTime::Single(time) | MappedLocalTime::Ambiguous(time, _) => Some(time.timestamp_micros()),
        MappedLocalTime::None => None,
    }
}

/// The instant in which a local day begins; it begins later than at midnight where the clock skips midnight.
pub(crate) fn local_midnight(date: NaiveDate, zone: Option<Zone>) -> Option<i64> {
    let midnight = date.and_time(NaiveTime::MIN);
    (0..8).find_map(|quarters| local_micros(midnight + TimeDelta::minutes(15 * quarters), zone))
}

/// The time of a text in a format; a text without a time of day means midnight. `None` if the text does not match.
pub(crate) fn parse_with_format(text: &str, items: &[Item<'_>], zone: Option<Zone>) -> Option<i64> {
    let mut parsed = Parsed::new();
    parse(&mut parsed, text, items.iter()).ok()?;
    if parsed.offset().is_some() || parsed.timestamp().is_some() {
        let utc = parsed.to_datetime_with_timezone(&Utc);
        return parsed
            .to_datetime()
            .map(|time| time.to_utc())
            .or(utc)
            .ok()
            .map(|time| time.timestamp_micros());
    }
    let date = parsed.to_naive_date().ok()?;
    if parsed.hour_div_12().is_none() && parsed.hour_mod_12().is_none() && parsed.minute().is_none() {
        return local_midnight(date, zone);
    }
    if parsed.minute().is_none() {
        parsed.set_minute(0).ok()?;
    }
    local_micros(date.and_time(parsed.to_naive_time().ok()?), zone)
}
