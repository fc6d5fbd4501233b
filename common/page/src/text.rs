//! Formatting of numbers and names for a page.

use onefold_base::units::format_count;

/// Escapes text for HTML, both between tags and in attributes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // HTML allows no control characters, but names of columns may contain them.
            c if c.is_control() => escaped.push('\u{FFFD}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Shortens a name to `length` characters and escapes it.
pub fn short(name: &str, length: usize) -> String {
    match name.char_indices().nth(length) {
        None => escape(name),
        Some(_) => escape(&name.chars().take(length.saturating_sub(1)).chain(['…']).collect::<String>()),
    }
}

/// Formats a number with about three significant digits: `0.012`, `1.23`, `12.3`, `123`, `12,345`.
pub fn number(value: f64) -> String {
    match value.abs() {
        x if !x.is_finite() => "–".to_owned(),
        x if x >= 999.5 => format_count(value.round() as u64),
        x if x >= 99.95 => format!("{value:.0}"),
        x if x >= 9.995 => format!("{value:.1}"),
        x if x >= 0.0995 || x == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Formats a metric of a model with four decimal places: `0.8123`. Formats a value that is not finite as `–`.
pub fn precise(value: f64) -> String {
    if value.is_finite() { format!("{value:.4}") } else { "–".to_owned() }
}

/// Formats a factor: `3.94 ×`.
pub fn times(value: f64) -> String {
    format!("{}\u{202F}×", number(value))
}

/// Formats the number n for which `share` is one in n: `4`, `33.3`.
pub fn one_in(share: f64) -> String {
    let many = 1.0 / share;
    match (many - many.round()).abs() < 0.01 * many {
        true => format_count(many.round() as u64),
        false => number(many),
    }
}

/// Formats a share from 0 to 1 as a percentage: `93 %`, `99.7 %`.
pub fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    let digits = usize::from((percent > 0.0 && percent < 9.95) || (percent > 99.0 && percent < 100.0));
    format!("{percent:.digits$}\u{202F}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_and_shortened() {
        assert_eq!(escape("<b a='1' c=\"2\">&\u{7}"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;\u{FFFD}");
        assert_eq!(short("a<b", 3), "a&lt;b");
        assert_eq!(short("häufig", 4), "häu…");
    }

    #[test]
    fn numbers_have_the_digits_that_matter() {
        let shown = [0.0, 0.0123, 0.5, 3.944, 12.34, 99.96, 123.4, 999.7, 12_345.6].map(number);
        assert_eq!(shown, ["0.00", "0.012", "0.50", "3.94", "12.3", "100", "123", "1,000", "12,346"]);
        assert_eq!(number(f64::NAN), "–");
        let shares = [0.0, 0.012, 0.93, 0.997, 1.0].map(percent);
        assert_eq!(
            shares.map(|share| share.replace('\u{202F}', " ")),
            ["0 %", "1.2 %", "93 %", "99.7 %", "100 %"]
        );
        assert_eq!([0.25, 0.1, 0.4, 1e-4].map(one_in), ["4", "10", "2.50", "10,000"]);
    }
}
