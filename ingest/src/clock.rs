//! Converts local times of a time zone, and times in texts, to microseconds since 1970-01-01T00:00 UTC.

use chrono::format::{Item, Parsed, parse};
use chrono::{MappedLocalTime, NaiveDate, NaiveDateTime, NaiveTime, TimeDelta, TimeZone, Utc};

/// A time zone, given by name or by its offset from UTC.
pub(crate) type Zone = datafusion::arrow::array::timezone::Tz;

/// The instant that a time denotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Instant {
    /// Microseconds since 1970-01-01T00:00 UTC.
    pub(crate) micros: i64,
    pub(crate) change: ClockChange,
}

/// Whether a local time denotes exactly one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClockChange {
    /// The local time denotes one instant.
    None,
    /// The clock was set back and shows the local time twice. The first instant is taken.
    Twice,
    /// The clock was set forward and skips the local time. The time is read as if the clock had not been set.
    Skipped,
}

impl Instant {
    pub(crate) fn plain(micros: i64) -> Self {
        Self { micros, change: ClockChange::None }
    }
}

/// The largest number of hours by which a clock is set forward. A place that moves across the date line skips a day.
const LONGEST_SKIP: i64 = 48;

/// Returns the instant of a local time, or `None` if it is out of range. Without a zone the time is in UTC.
pub(crate) fn local_instant(local: NaiveDateTime, zone: Option<Zone>) -> Option<Instant> {
    let Some(zone) = zone else { return Some(Instant::plain(local.and_utc().timestamp_micros())) };
    match zone.from_local_datetime(&local) {
        MappedLocalTime::Single(time) => Some(Instant::plain(time.timestamp_micros())),
        MappedLocalTime::Ambiguous(first, _) => {
            Some(Instant { micros: first.timestamp_micros(), change: ClockChange::Twice })
        }
        MappedLocalTime::None => (1..=LONGEST_SKIP).find_map(|hours| {
            let hours = TimeDelta::hours(hours);
            let before = zone.from_local_datetime(&local.checked_sub_signed(hours)?).latest()?;
            let micros = before.checked_add_signed(hours)?.timestamp_micros();
            Some(Instant { micros, change: ClockChange::Skipped })
        }),
    }
}

/// Returns the first instant of a local day. If the clock skips midnight, the day begins later.
pub(crate) fn local_midnight(date: NaiveDate, zone: Option<Zone>) -> Option<Instant> {
    let midnight = date.and_time(NaiveTime::MIN);
    let quarters = (0..8).map(|quarters| midnight + TimeDelta::minutes(15 * quarters));
    let mut shown = quarters.filter_map(|local| local_instant(local, zone));
    shown.find(|instant| instant.change != ClockChange::Skipped).map(|first| Instant::plain(first.micros))
}

/// Parses a text in a format; a text without a time of day denotes midnight. Returns `None` if the text does not match.
pub(crate) fn parse_with_format(text: &str, items: &[Item<'_>], zone: Option<Zone>) -> Option<Instant> {
    let mut parsed = Parsed::new();
    parse(&mut parsed, text, items.iter()).ok()?;
    if parsed.offset().is_some() || parsed.timestamp().is_some() {
        let utc = parsed.to_datetime_with_timezone(&Utc);
        return parsed
            .to_datetime()
            .map(|time| time.to_utc())
            .or(utc)
            .ok()
            .map(|time| Instant::plain(time.timestamp_micros()));
    }
    let date = parsed.to_naive_date().ok()?;
    if parsed.hour_div_12().is_none() && parsed.hour_mod_12().is_none() && parsed.minute().is_none() {
        return local_midnight(date, zone);
    }
    if parsed.minute().is_none() {
        parsed.set_minute(0).ok()?;
    }
    local_instant(date.and_time(parsed.to_naive_time().ok()?), zone)
}
