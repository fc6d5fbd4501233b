//! Conversion between numbers and the sizes, durations and counts that people read and write.

/// Parses a number of bytes: `4096`, `512MiB`, `2GB`, `1.5 GiB`. Decimal units are powers of 1,000, binary
/// ones (`Ki`, `Mi`, `Gi`, `Ti`, and a bare `K`, `M`, `G`, `T`) powers of 1,024.
///
/// # Errors
///
/// A sentence for the author of `text`, if `text` is not a size or is zero.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "k" | "ki" | "kib" => 1024.0,
        "m" | "mi" | "mib" => 1024f64.powi(2),
        "g" | "gi" | "gib" => 1024f64.powi(3),
        "t" | "ti" | "tib" => 1024f64.powi(4),
        _ => return Err(format!("`{text}` is not a size; write it like `512MiB` or `4GB`")),
    };
    match number.parse::<f64>() {
        Ok(number) if number * factor >= 1.0 && number * factor < 2f64.powi(63) => {
            Ok((number * factor) as u64)
        }
        _ => Err(format!("`{text}` is not a size of at least one byte; write it like `512MiB` or `4GB`")),
    }
}

/// Parses a duration into microseconds: `30m`, `45s`, `6h`, `2d`, `500ms`.
///
/// # Errors
///
/// A sentence for the author of `text`, if `text` is not a duration or is zero.
pub fn parse_duration_micros(text: &str) -> Result<i64, String> {
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let factor: i64 = match unit.trim() {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" | "min" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => return Err(format!("`{text}` is not a duration; write it like `30m`, `45s` or `6h`")),
    };
    let micros = number.parse::<i64>().ok().and_then(|number| number.checked_mul(factor));
    micros
        .filter(|micros| *micros > 0)
        .ok_or_else(|| format!("`{text}` is not a positive duration; write it like `30m`"))
}

/// Formats a number of bytes for a person: `1.5 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// Formats the smallest sufficient number of bytes in a form that [`parse_bytes`] reads: `13MiB`. The result is never
/// below `bytes`, and at most a tenth above.
pub fn format_least_bytes(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| bytes >= 10 << bits) {
        Some((unit, bits)) => format!("{}{unit}", bytes.div_ceil(1 << bits)),
        None => format!("{bytes}"),
    }
}

/// Formats bytes as lower-case hexadecimal digits, as in checksums.
pub fn format_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Formats a count for a person: `1,234,567`.
pub fn format_count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count of things for a person, given the singular name: `1 file`, `1,234 files`, `2 batches`.
pub fn count_of(count: u64, name: &str) -> String {
    let ending = match count {
        1 => "",
        _ if name.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {name}{ending}", format_count(count))
}

/// Returns the first few texts and the number of the others, so that a list of a thousand names remains readable.
pub fn abridged(texts: &[String]) -> Vec<String> {
    const SHOWN: usize = 8;
    let mut shown: Vec<String> = texts.iter().take(SHOWN).cloned().collect();
    shown.extend((texts.len() > SHOWN).then(|| format!("… ({} more)", texts.len() - SHOWN)));
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_end_with_the_number_of_the_others() {
        let names: Vec<String> = (0..10).map(|name| name.to_string()).collect();
        assert_eq!(abridged(&names).join(", "), "0, 1, 2, 3, 4, 5, 6, 7, … (2 more)");
        assert_eq!(abridged(&names[..8]), names[..8]);
    }

    #[test]
    fn sizes_parse_in_decimal_and_binary_units() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes("2GB"), Ok(2_000_000_000));
        for bad in ["", "GiB", "0", "-1", "1e400GB", "12 parsecs", "1.2.3K"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_parse_into_microseconds() {
        assert_eq!(parse_duration_micros("30m"), Ok(1_800_000_000));
        assert_eq!(parse_duration_micros("500ms"), Ok(500_000));
        for bad in ["", "30", "0s", "m", "9223372036854775807d", "-5m"] {
            assert!(parse_duration_micros(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_are_printed_with_units_and_separators() {
        assert_eq!(format_bytes(1_572_864), "1.5 MiB");
        assert_eq!(format_bytes(12), "12 B");
        assert_eq!(format_least_bytes(12), "12");
        assert_eq!(format_least_bytes((10 << 20) + 1), "11MiB");
        assert_eq!(format_least_bytes(10 << 20), "10MiB");
        for bytes in [1, 10_239, 10_240, 10_241, 123_456_789, 10 << 30, (99 << 40) + 1] {
            let read = parse_bytes(&format_least_bytes(bytes)).unwrap();
            assert!((bytes..=bytes + bytes / 10).contains(&read), "{bytes}: {read}");
        }
        assert_eq!(format_count(1_234_567), "1,234,567");
        assert_eq!(format_count(12), "12");
        assert_eq!(format_hex(&[0, 10, 255]), "000aff");
    }

    #[test]
    fn counts_have_singular_and_plural() {
        let counted = [0, 1, 2, 1000].map(|count| count_of(count, "file"));
        assert_eq!(counted, ["0 files", "1 file", "2 files", "1,000 files"]);
        assert_eq!([1, 2].map(|count| count_of(count, "batch")), ["1 batch", "2 batches"]);
    }
}
