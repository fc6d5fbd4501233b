//! Times that users write in options and configurations.

use chrono::DateTime;

/// Parses a time with an offset, such as `2026-03-02T00:00:00Z`, into microseconds since 1970.
///
/// # Errors
///
/// A sentence for the author of `text`, if `text` is not such a time.
pub fn parse_time(text: &str) -> Result<i64, String> {
    let time = DateTime::parse_from_rfc3339(text.trim()).map(|time| time.timestamp_micros());
    time.map_err(|_| format!("`{text}` is not a time with an offset; write it like `2026-03-02T00:00:00Z`"))
}
