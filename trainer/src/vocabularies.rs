//! The vocabularies that define the ids of a model's features.
//!
//! A table row is trained for an id, and the dataset's vocabulary defines what the id means. Therefore a model
//! stores a digest of every vocabulary, and accepts only vocabularies that extend the stored ones: `append` may
//! have added ids and `forget` may have removed originals, but no id may have changed its meaning.

use std::collections::BTreeMap;
use std::path::Path;

use onefold_datasets::Snapshot;
use onefold_datasets::vocabulary::{FormerOriginals, Vocabulary};
use onefold_ikjt::stored_at;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The identity of a vocabulary, as stored with a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabularyIdentity {
    /// The number of entries, which is the largest id.
    pub entries: u64,
    /// The SHA-256 of the file, in hexadecimal. A file with the same hash is not read again.
    pub file: String,
    /// The [digest](Vocabulary::digest) of the original values of all ids.
    pub originals: String,
}

/// Returns the vocabularies of a snapshot of `dataset`, by name.
pub(crate) fn of_snapshot(
    dataset: &Path,
    snapshot: &Snapshot,
) -> Result<BTreeMap<String, VocabularyIdentity>> {
    if snapshot.vocabularies.is_empty() {
        return Ok(BTreeMap::new());
    }
    let dataset = &stored_at(dataset)?;
    let identity = |(name, file): (&String, &onefold_datasets::vocabulary::VocabularyFile)| {
        let digest = Vocabulary::load(dataset, snapshot, name)?.digest(file.entries);
        let originals = digest.expect("a vocabulary has as many entries as its file");
        let identity = VocabularyIdentity { entries: file.entries, file: file.sha256.clone(), originals };
        Ok((name.clone(), identity))
    };
    snapshot.vocabularies.iter().map(identity).collect()
}

/// Checks that every id has the same meaning in `dataset` as in the vocabularies that the model of `run` was
/// trained with.
///
/// # Errors
///
/// [`Error::Run`] that names the vocabulary; [`Error::Dataset`] if it cannot be read.
pub(crate) fn check_continued(
    known: &BTreeMap<String, VocabularyIdentity>,
    dataset: &Path,
    snapshot: &Snapshot,
    run: &Path,
) -> Result<()> {
    for (name, identity) in known {
        let goes_on = snapshot.vocabularies.get(name).is_some_and(|file| {
            let former = FormerOriginals { entries: identity.entries, digest: identity.originals.clone() };
            file.sha256 == identity.file || file.former.contains(&former)
        });
        if goes_on {
            continue;
        }
        let digest = Vocabulary::load(&stored_at(dataset)?, snapshot, name)?.digest(identity.entries);
        if digest.as_ref() != Some(&identity.originals) {
            return Err(Error::run(
                run,
                format!(
                    "the model was trained with another vocabulary `{name}` than that of the dataset, so the same ids mean other \
                     things"
                ),
                "give the dataset that the model was trained on, or one whose vocabularies go on from that one's, as after \
                 `onefold-ingest append`",
            ));
        }
    }
    Ok(())
}
