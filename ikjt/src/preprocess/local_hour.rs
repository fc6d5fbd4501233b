//! `get_local_hour`: the hour of the day of a sample in a time zone.

use chrono::{DateTime, Timelike};
use chrono_tz::{TZ_VARIANTS, Tz};
use onefold_datasets::suggest;

use super::arguments::Arguments;
use super::problem::{Checked, Problem};

/// Parses the time zone from the key `zone`.
pub(super) fn zone(arguments: &mut Arguments) -> Checked<Tz> {
    let name: String = arguments.required("zone")?;
    name.parse().map_err(|_| Problem::new(format!("there is no time zone `{name}`"), hint(&name)))
}

/// Suggests zones whose city begins with the same three letters as `name`, because there are too many zones to list
/// all.
fn hint(name: &str) -> String {
    let city = |name: &str| name.rsplit('/').next().unwrap_or_default().to_lowercase();
    let beginning: String = city(name).chars().take(3).collect();
    let like: Vec<&str> = TZ_VARIANTS
        .iter()
        .map(|zone| zone.name())
        .filter(|zone| city(zone).starts_with(&beginning))
        .collect();
    match like.len() {
        1..=20 => suggest(name, like),
        _ => "write a name of the IANA time zone database, as `Europe/Copenhagen` or `UTC`".to_owned(),
    }
}

/// Returns the local hour, 0 to 23, of every time. Times are in microseconds since 1970, UTC.
pub(super) fn local_hours(zone: Tz, timestamps: &[i64]) -> Checked<Vec<i64>> {
    let hour = |(sample, &micros): (usize, &i64)| {
        let time = DateTime::from_timestamp_micros(micros).ok_or_else(|| {
            Problem::new(
                format!(
                    "sample {sample} of the batch has the time {micros} µs, which is outside the calendar"
                ),
                "times are microseconds since 1970; correct the time column and build the dataset again",
            )
        })?;
        Ok(i64::from(time.with_timezone(&zone).hour()))
    };
    timestamps.iter().enumerate().map(hour).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hour(zone: &str, micros: i64) -> i64 {
        local_hours(zone.parse().unwrap(), &[micros]).unwrap()[0]
    }

    #[test]
    fn summer_time_begins_and_ends() {
        // Sunday 2023-03-26 01:00 UTC: clocks in Copenhagen go forward from 02:00 to 03:00.
        let spring = 1_679_792_400_000_000;
        assert_eq!(hour("Europe/Copenhagen", spring - 1), 1);
        assert_eq!(hour("Europe/Copenhagen", spring), 3);
        // Sunday 2023-10-29 01:00 UTC: clocks go back from 03:00 to 02:00.
        let autumn = 1_698_541_200_000_000;
        assert_eq!(hour("Europe/Copenhagen", autumn - 1), 2);
        assert_eq!(hour("Europe/Copenhagen", autumn), 2);
        assert_eq!(hour("Asia/Kolkata", 0), 5);
        assert_eq!(hour("UTC", -1), 23);
        // 2000-01-01 10:00 UTC; the zone is 14 hours ahead of UTC.
        assert_eq!(hour("Pacific/Kiritimati", 946_720_800_000_000), 0);
    }

    #[test]
    fn a_time_that_is_no_date_names_its_sample() {
        let error = local_hours(Tz::UTC, &[0, i64::MAX]).map(drop);
        assert!(format!("{error:?}").contains("sample 1 of the batch has the time 9223372036854775807"));
    }

    /// Tests the first and the last time that is a date, in zones whose offset leads beyond the calendar.
    #[test]
    fn extreme_times_do_not_panic() {
        for zone in ["Pacific/Kiritimati", "Pacific/Pago_Pago"] {
            for end in [DateTime::<chrono::Utc>::MIN_UTC, DateTime::<chrono::Utc>::MAX_UTC] {
                assert!((0..24).contains(&hour(zone, end.timestamp_micros())));
            }
        }
    }
}
