//! Times as a page shows them.

/// A day and minute of universal time.
pub(super) fn instant(micros: i64) -> String {
    let time = arrow::temporal_conversions::timestamp_us_to_datetime(micros);
    time.map_or_else(|| format!("{micros} µs"), |time| time.to_string().chars().take(16).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_day_and_a_minute() {
        assert_eq!(instant(1_684_703_210_000_000), "2023-05-21 21:06");
    }
}
