//! Percent-encoding of names and values in paths, as Hive writes them.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Bytes that have a special meaning in paths or in other tools.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'+').remove(b',');

/// Encodes `text` as one component of a path: each byte that has a special meaning in paths or in other tools becomes
/// `%` and two hexadecimal digits.
pub fn encode(text: &str) -> String {
    let encoded = utf8_percent_encode(text, ESCAPED).to_string();
    // In a path, `.` and `..` are directories.
    if encoded.chars().all(|c| c == '.') { encoded.replace('.', "%2E") } else { encoded }
}

/// Decodes the output of [`encode`]. Returns `None` if a `%` is not followed by two hexadecimal digits, or if the
/// decoded bytes are not UTF-8.
pub fn decode(text: &str) -> Option<String> {
    let is_escape = |after: &str| after.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if !text.split('%').skip(1).all(is_escape) {
        return None;
    }
    percent_decode_str(text).decode_utf8().ok().map(Cow::into_owned)
}

/// Decodes a name that another program wrote. A `%` that is not followed by two hexadecimal digits remains. If the
/// decoded bytes are not UTF-8, `text` is returned unchanged.
pub fn decode_leniently(text: &str) -> String {
    percent_decode_str(text).decode_utf8().map_or_else(|_| text.to_owned(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn decoding_restores_encoded_texts(text: String) {
            let encoded = encode(&text);
            prop_assert!(!encoded.contains('/'));
            prop_assert_eq!(decode(&encoded), Some(text.clone()));
            prop_assert_eq!(decode_leniently(&encoded), text);
        }
    }

    #[test]
    fn letters_digits_and_five_signs_are_not_encoded() {
        let plain: String =
            (0..128_u8).map(char::from).filter(|c| encode(&format!("a{c}")).len() == 2).collect();
        assert_eq!(plain, "+,-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz");
        assert_eq!(encode("\0 /:=%~\u{7f}é"), "%00%20%2F%3A%3D%25%7E%7F%C3%A9");
        assert_eq!([".", "..", "a.", ""].map(encode), ["%2E", "%2E%2E", "a.", ""]);
    }

    #[test]
    fn malformed_escapes_are_refused_or_kept() {
        for (text, lenient) in
            [("10%3A00 %20%", "10:00  %"), ("%zz%+1é", "%zz%+1é"), ("%ff", "%ff"), ("%é1", "%é1")]
        {
            assert_eq!(decode(text), None);
            assert_eq!(decode_leniently(text), lenient);
        }
    }
}
