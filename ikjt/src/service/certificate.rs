//! Checks that a file contains a certificate, and that it is valid now.
//!
//! A process checks its own certificate, because TLS reports an expired certificate only to the other side, whose
//! operator cannot replace it.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use chrono::{DateTime, NaiveDateTime, Utc};

/// Returns the first and the last second in which the first certificate of a PEM file is valid, or `None` if the bytes
/// are not a certificate.
pub(super) fn period(pem: &[u8]) -> Option<[DateTime<Utc>; 2]> {
    validity(&der(pem)?)
}

/// Returns why a certificate with this period is not valid now, or `None` if it is.
pub(super) fn not_valid_now(period: [DateTime<Utc>; 2]) -> Option<String> {
    not_valid_at(period, Utc::now())
}

fn not_valid_at([first, last]: [DateTime<Utc>; 2], now: DateTime<Utc>) -> Option<String> {
    // The last second belongs to the period.
    if now.timestamp() > last.timestamp() {
        Some(format!("expired at {last}"))
    } else if now < first {
        Some(format!("is valid only from {first} on"))
    } else {
        None
    }
}

/// Returns the bytes of the first certificate of a PEM file.
fn der(pem: &[u8]) -> Option<Vec<u8>> {
    // Text outside of the certificates may have any encoding.
    let text = String::from_utf8_lossy(pem);
    let (_, rest) = text.split_once("-----BEGIN CERTIFICATE-----")?;
    let (base64, _) = rest.split_once("-----END CERTIFICATE-----")?;
    BASE64_STANDARD.decode(base64.split_ascii_whitespace().collect::<String>()).ok()
}

/// An element of DER: its tag and its content.
type Element<'a> = (u8, &'a [u8]);

/// Returns the first element of DER bytes, and the bytes after it.
fn element(bytes: &[u8]) -> Option<(Element<'_>, &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    let (length, rest) = rest.split_first()?;
    let (length, rest) = match length {
        0..0x80 => (usize::from(*length), rest),
        // The length follows in this number of bytes.
        _ => {
            let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            let add = |length: usize, digit: &u8| length.checked_mul(256)?.checked_add(usize::from(*digit));
            (digits.iter().try_fold(0, add)?, rest)
        }
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some(((*tag, content), rest))
}

/// Returns the first and the last second in which a certificate (RFC 5280) is valid.
fn validity(certificate: &[u8]) -> Option<[DateTime<Utc>; 2]> {
    let ((_, certificate), _) = element(certificate)?;
    let ((_, mut rest), _) = element(certificate)?;
    // The version, which may be missing, is followed by the serial number, the algorithm and the issuer.
    let before = if rest.first() == Some(&0xa0) { 4 } else { 3 };
    for _ in 0..before {
        rest = element(rest)?.1;
    }
    let ((_, period), _) = element(rest)?;
    let (first, rest) = element(period)?;
    let (last, _) = element(rest)?;
    Some([time(first)?, time(last)?])
}

fn time((tag, text): Element<'_>) -> Option<DateTime<Utc>> {
    const UTC_TIME: u8 = 0x17;
    let text = str::from_utf8(text).ok()?;
    // This type has two digits of the year, 1950 to 2049; the other one has four.
    let century = match tag {
        UTC_TIME if text < "50" => "20",
        UTC_TIME => "19",
        _ => "",
    };
    let time = NaiveDateTime::parse_from_str(&format!("{century}{text}"), "%Y%m%d%H%M%SZ");
    Some(time.ok()?.and_utc())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate of `openssl req -x509` that is valid from 2026-11-30 18:34:05 to 2026-12-02 18:34:05.
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\n\
        MIIBdDCCARmgAwIBAgIUZetT0J9NqX14uMNZRqwlI3rmsLMwCgYIKoZIzj0EAwIw\n\
        DzENMAsGA1UEAwwEdGVzdDAeFw0yNjExMzAxODM0MDVaFw0yNjEyMDIxODM0MDVa\n\
        MA8xDTALBgNVBAMMBHRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAR6Zrge\n\
        BFv1Y86D8HRxrkFnrll2C0G3qYFvY3OTqlenRayi2yIBiETZAGdnLQlVOYYAIXYd\n\
        prHSbcwdi77pPdMAo1MwUTAdBgNVHQ4EFgQUtNso5FXn4KHDqWYyad75LhaqrL4w\n\
        HwYDVR0jBBgwFoAUtNso5FXn4KHDqWYyad75LhaqrL4wDwYDVR0TAQH/BAUwAwEB\n\
        /zAKBggqhkjOPQQDAgNJADBGAiEA6WuNkfPDoPQc0W9qW5wYSWaibthVkhlszyMU\n\
        Ve+RHCkCIQD0QNMZlSkfBcTYEHxUZSLHo3tmR24XELJSBIJmT173NQ==\n\
        -----END CERTIFICATE-----\n";

    fn at(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    #[test]
    fn certificates_have_a_first_and_a_last_second() {
        // The comment before the certificate is not UTF-8.
        let period = period(&[b"caf\xe9\n".as_slice(), CERTIFICATE.as_bytes()].concat()).unwrap();
        let reason = |time: &str| not_valid_at(period, at(time)).unwrap_or_default();
        assert_eq!(reason("2026-11-30T18:34:04Z"), "is valid only from 2026-11-30 18:34:05 UTC on");
        assert_eq!(reason("2026-11-30T18:34:05Z"), "");
        assert_eq!(reason("2026-12-02T18:34:05.9Z"), "");
        assert_eq!(reason("2026-12-02T18:34:06Z"), "expired at 2026-12-02 18:34:05 UTC");
    }

    #[test]
    fn damaged_certificates_have_no_period() {
        let text = CERTIFICATE.replace("MII", "!!!");
        for wrong in ["", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", text.as_str()] {
            assert_eq!(period(wrong.as_bytes()), None, "{wrong}");
        }
        let bytes = der(CERTIFICATE.as_bytes()).unwrap();
        assert!(validity(&bytes).is_some());
        for end in 0..bytes.len() {
            assert_eq!(validity(&bytes[..end]), None, "{end}");
        }
    }

    #[test]
    fn times_have_two_or_four_digits_of_the_year() {
        assert_eq!(time((0x17, b"491231235959Z")), Some(at("2049-12-31T23:59:59Z")));
        assert_eq!(time((0x17, b"500101000000Z")), Some(at("1950-01-01T00:00:00Z")));
        assert_eq!(time((0x18, b"20500101000000Z")), Some(at("2050-01-01T00:00:00Z")));
        assert_eq!(time((0x17, b"soon")), None);
    }
}
