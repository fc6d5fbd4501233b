//! A digest of the originals of the first ids of a vocabulary.

use onefold_base::units;
use sha2::{Digest, Sha256};

use super::Vocabulary;
use super::originals::Originals;

impl Vocabulary {
    /// Returns the SHA-256, in hexadecimal, of the originals of ids 1 to `entries`. In vocabularies with the
    /// same digest, these ids have the same originals. Returns `None` if there are fewer ids.
    pub fn digest(&self, entries: u64) -> Option<String> {
        let entries = usize::try_from(entries).ok().filter(|entries| *entries <= self.len())?;
        let mut digest = Sha256::new();
        match &self.originals {
            Originals::Integers(integers) => {
                digest.update(b"integers");
                integers[..entries].iter().for_each(|original| digest.update(original.to_le_bytes()));
            }
            Originals::Texts(texts) => {
                digest.update(b"texts");
                for text in texts.iter().take(entries) {
                    digest.update((text.len() as u64).to_le_bytes());
                    digest.update(text);
                }
            }
        }
        Some(units::format_hex(&digest.finalize()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_covers_the_originals_of_the_first_ids() {
        let mut integers = Vocabulary::from_counts([(7, 3), (9, 2)], 1);
        let before = integers.digest(2).unwrap();
        assert_eq!(integers.digest(3), None);
        integers.extend([(1, 100), (7, 1)], 1);
        assert_eq!(integers.digest(2).unwrap(), before);
        assert_ne!(integers.digest(3).unwrap(), before);
        assert_ne!(Vocabulary::from_counts([(7, 2), (9, 3)], 1).digest(2).unwrap(), before);
        // The digest depends on the ends of texts and on the kind of the originals.
        let texts = |first: &str, second: &str| Vocabulary::from_text_counts([(first, 2), (second, 1)], 1);
        assert_ne!(texts("ab", "c").digest(2), texts("a", "bc").digest(2));
        assert_eq!(texts("ab", "c").digest(1), texts("ab", "d").digest(1));
        assert_ne!(texts("ab", "c").digest(0), integers.digest(0));
    }
}
