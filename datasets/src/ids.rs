//! 63-bit ids of texts and other values: the definition of `ids = "hash"`.
//!
//! An id is a hash of bytes: of a text's UTF-8 bytes, of an integer's decimal text (`17`, `-17`: no leading
//! zeros, no plus sign, the same for all integer widths), of `true` or `false` for a boolean, and of the
//! bytes of a binary value. The text `17` of one log and the integer 17 of another therefore have the same
//! id.
//!
//! The definition never changes, so existing datasets and models stay valid.

use xxhash_rust::xxh3::xxh3_64;

/// Returns the id of a value with these bytes: XXH3 (Collet) with 64 bits and seed 0, with the highest bit
/// cleared. It is never negative.
#[inline]
pub fn hash_id(bytes: &[u8]) -> i64 {
    (xxh3_64(bytes) & i64::MAX as u64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with the C library of XXH3 0.8: `XXH3_64bits(bytes) & 0x7fffffffffffffff`.
    #[test]
    fn hashes_never_change() {
        let golden: [(&[u8], i64); 11] = [
            (b"", 3_244_421_341_483_603_138),
            (b"17", 2_471_101_067_911_095_003),
            (b"-17", 745_329_282_863_897_325),
            (b"N55689", 2_767_284_040_330_994_559),
            (b"true", 4_664_556_114_322_093_609),
            (b"false", 4_892_910_023_070_901_890),
            ("Zürich".as_bytes(), 838_883_168_505_079_630),
            (b"18446744073709551615", 1_238_959_881_147_528_055),
            (b"-9223372036854775808", 7_892_131_320_478_909_585),
            (&[0xff, 0x00], 794_437_103_675_513_319),
            (&[b'a'; 300], 4_742_701_083_148_385_825),
        ];
        for (bytes, id) in golden {
            assert_eq!(hash_id(bytes), id, "{}", bytes.escape_ascii());
        }
    }
}
