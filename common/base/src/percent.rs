//! Percent-encoding of names and values that are parts of paths, as Hive writes them.

/// Encodes `text` as one part of a path: bytes that have a meaning in paths or in other tools become `%` and two
/// digits.
pub fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'+' | b',') {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    // In a path `.` and `..` are directories.
    if encoded.chars().all(|c| c == '.') { encoded.replace('.', "%2E") } else { encoded }
}

/// Decodes what [`encode`] writes. `None` if a `%` is not followed by two hexadecimal digits, or the bytes are not
/// UTF-8.
pub fn decode(text: &str) -> Option<String> {
    let (bytes, is_clean) = decode_bytes(text);
    String::from_utf8(bytes).ok().filter(|_| is_clean)
}

/// Decodes a name of another program: a `%` that is not followed by two hexadecimal digits stays as it is, and so does
/// `text` if the bytes are not UTF-8.
pub fn decode_leniently(text: &str) -> String {
    String::from_utf8(decode_bytes(text).0).unwrap_or_else(|_| text.to_owned())
}

/// The bytes of `text`, and whether every `%` in it is followed by two hexadecimal digits.
fn decode_bytes(text: &str) -> (Vec<u8>, bool) {
    let (mut bytes, mut is_clean) = (Vec::with_capacity(text.len()), true);
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = if first == b'%' { byte_of_digits(tail) } else { None };
        is_clean &= first != b'%' || escaped.is_some();
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    (bytes, is_clean)
}

/// The byte that the first two hexadecimal digits of `text` are.
fn byte_of_digits(text: &[u8]) -> Option<u8> {
    let digit = |place: usize| char::from(*text.get(place)?).to_digit(16);
    u8::try_from(digit(0)? << 4 | digit(1)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn texts_survive(text: String) {
            let encoded = encode(&text);
            prop_assert!(!encoded.contains('/'));
            prop_assert_eq!(decode(&encoded), Some(text.clone()));
            prop_assert_eq!(decode_leniently(&encoded), text);
        }
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
