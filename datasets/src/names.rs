//! Names of the files in a dataset's folder. Writers create names with this module; the vacuum and the check
//! of a new location recognise them with it.
//!
//! ```text
//! data/date=2024-06-01/bucket=003/part-00000-0123456789abcdef.parquet    data files
//! vocabularies/items-0123456789abcdef.parquet                            vocabularies
//! work/records-0123456789abcdef.parquet                                  temporary rows of a build on a cluster
//! manifests/0123456789abcdef.parquet                                     manifests
//! snapshots/00000012.json                                                snapshots
//! snapshots/latest                                                       the number of a recent snapshot
//! ```
//!
//! On a local disk, `onefold-storage` first writes a file under a temporary name: `NAME#1` for an upload,
//! `.NAME.0123456789abcdef.tmp` for a file that must not exist yet, `.NAME.tmp` for a file that is replaced.

use onefold_base::percent;
use onefold_storage::random_name;

use crate::{Buckets, PartitionKey};

/// The folder of the data files in a dataset.
pub(crate) const DATA: &str = "data";
/// The folder of the vocabularies in a dataset.
pub(crate) const VOCABULARIES: &str = "vocabularies";
/// The folder in a dataset where a build on a cluster keeps its temporary files.
pub const WORK: &str = "work";
/// The folder of the manifests.
pub(crate) const MANIFESTS: &str = "manifests";
/// The folder of the snapshots.
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// The file with the number of a recent snapshot, from which readers begin to list snapshots. It is written
/// after a commit and may be missing or out of date.
pub(crate) const HINT: &str = "snapshots/latest";
/// The folders of a dataset into which writers write.
pub(crate) const WRITTEN_FOLDERS: [&str; 5] = [DATA, VOCABULARIES, WORK, MANIFESTS, SNAPSHOTS];

const PARQUET: &str = ".parquet";
const JSON: &str = ".json";
/// The prefix of a data file's name.
const PART: &str = "part-";

/// Returns the path of data file `number` of a range of buckets in the partition `key`. `attempt` is the
/// [random name](random_name) of the writer.
pub(crate) fn data_file(
    key: &PartitionKey,
    range: u32,
    buckets: Buckets,
    number: usize,
    attempt: &str,
) -> String {
    let mut folders = vec![DATA.to_owned()];
    folders.extend(Some(key.to_string()).filter(|key| !key.is_empty()));
    folders.extend(range_folder(range, buckets));
    format!("{}/{PART}{number:05}-{attempt}{PARQUET}", folders.join("/"))
}

/// Returns the folder of a range of buckets within its partition, named after the first bucket; `None` if
/// there is only one range.
fn range_folder(range: u32, buckets: Buckets) -> Option<String> {
    let digits = buckets.number.saturating_sub(1).to_string().len().max(3);
    (buckets.ranges() > 1).then(|| format!("bucket={:0digits$}", buckets.of_range(range).start))
}

/// Returns the path of the vocabulary `name`. `attempt` is the [random name](random_name) of the writer.
pub(crate) fn vocabulary_file(name: &str, attempt: &str) -> String {
    format!("{VOCABULARIES}/{}-{attempt}{PARQUET}", percent::encode(name))
}

/// Returns the path of a new manifest.
pub(crate) fn manifest_file() -> String {
    format!("{MANIFESTS}/{}{PARQUET}", random_name())
}

/// Returns the path of snapshot `number`.
pub(crate) fn snapshot_path(number: u64) -> String {
    format!("{SNAPSHOTS}/{number:08}{JSON}")
}

/// Returns the number of the snapshot at `path`, or `None` if `path` is not the path of a snapshot.
pub(crate) fn snapshot_number(path: &str) -> Option<u64> {
    let digits = path.strip_prefix(SNAPSHOTS)?.strip_prefix('/')?.strip_suffix(JSON)?;
    let number = is_number(digits).then(|| digits.parse().ok()).flatten();
    number.filter(|number| snapshot_path(*number) == path)
}

/// Returns a new file name for the folder [`WORK`], made of `name` and a random part. Each call returns a
/// different name.
pub fn work_file_name(name: &str) -> String {
    format!("{name}-{}{PARQUET}", random_name())
}

/// Returns whether `path`, relative to the dataset's folder, is a name that a writer creates, temporary names
/// included.
pub(crate) fn is_written(path: &str) -> bool {
    is_complete(path) || complete_name(path).is_some_and(|path| is_complete(&path))
}

/// Returns whether `path` is the name of a complete file of a dataset.
fn is_complete(path: &str) -> bool {
    let Some((folder, name)) = path.split_once('/') else { return false };
    match folder {
        DATA => is_data_file(name),
        VOCABULARIES => before_random_name(name, PARQUET).is_some_and(|name| {
            percent::decode(name).is_some_and(|decoded| percent::encode(&decoded) == name)
        }),
        WORK => !name.contains('/') && before_random_name(name, PARQUET).is_some(),
        MANIFESTS => name.strip_suffix(PARQUET).is_some_and(is_random_name),
        SNAPSHOTS => path == HINT || snapshot_number(path).is_some(),
        _ => false,
    }
}

/// Returns whether `path`, relative to the folder [`DATA`], is the name of a data file.
fn is_data_file(path: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    let number = before_random_name(name, PARQUET).and_then(|name| name.strip_prefix(PART));
    number.is_some_and(|number| number.len() >= 5 && is_number(number))
        && PartitionKey::parse(folders).is_some_and(|key| key.to_string() == folders)
}

/// Returns the path of the file whose temporary name is `path`; `None` if `path` is not a temporary name.
fn complete_name(path: &str) -> Option<String> {
    if let Some((complete, number)) = path.rsplit_once('#') {
        return is_number(number).then(|| complete.to_owned());
    }
    let (folder, name) = path.rsplit_once('/')?;
    let name = name.strip_prefix('.')?.strip_suffix(".tmp")?;
    let complete = name.rsplit_once('.').filter(|(_, random)| is_random_name(random));
    Some(format!("{folder}/{}", complete.map_or(name, |(complete, _)| complete)))
}

/// Returns `NAME` if `name` is `NAME-0123456789abcdef` followed by `ending`.
fn before_random_name<'n>(name: &'n str, ending: &str) -> Option<&'n str> {
    let (name, random) = name.strip_suffix(ending)?.rsplit_once('-')?;
    is_random_name(random).then_some(name)
}

/// Returns whether `text` has the form of a [`random_name`].
fn is_random_name(text: &str) -> bool {
    text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use onefold_storage::Storage;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_of_writers_are_recognised(
            columns in prop::collection::vec(("[a-z]{1,4}", ".{0,8}"), 0..4),
            vocabulary in ".{0,8}",
            bucket in 0..300_u32,
            number in 0..200_000_usize,
            snapshot in any::<u64>(),
        ) {
            let (key, random) = (PartitionKey::new(columns), random_name());
            let paths = [
                data_file(&key, bucket, Buckets::with_own_files(300), number, &random),
                data_file(&key, bucket % 4, Buckets::of_ranges(4), number, &random),
                data_file(&key, 0, Buckets::of_ranges(1), number, &random),
                vocabulary_file(&vocabulary, &random),
                format!("{WORK}/{}", work_file_name("records")),
                manifest_file(),
                snapshot_path(snapshot),
                HINT.to_owned(),
            ];
            for path in paths {
                prop_assert!(is_written(&path), "{}", path);
                let (folder, name) = path.rsplit_once('/').unwrap();
                for temporary in
                    [format!("{path}#1"), format!("{folder}/.{name}.{random}.tmp"), format!("{folder}/.{name}.tmp")]
                {
                    prop_assert!(is_written(&temporary), "{}", temporary);
                }
            }
            prop_assert_eq!(snapshot_number(&snapshot_path(snapshot)), Some(snapshot));
        }
    }

    #[test]
    fn other_names_are_not_recognised() {
        for path in [
            "part-00000-0123456789abcdef.parquet",
            "data",
            "data/train.toml",
            "data/part-00000.parquet",
            "data/part-00000-0.parquet",
            "data/part-00000-0123456789ABCDEF.parquet",
            "data/part-00000-0123456789abcdef.parquet.bak",
            "data/part-00000-0123456789abcdef.parquet#",
            "data/part-00000-0123456789abcdef.parquet#1x",
            "data/part-1-0123456789abcdef.parquet",
            "data/events/part-00000-0123456789abcdef.parquet",
            "data/.notes.txt.tmp",
            "data/notes.txt#1",
            "events/part-00000-0123456789abcdef.parquet",
            "vocabularies/words.parquet",
            "vocabularies/my words-0123456789abcdef.parquet",
            "vocabularies/more/words-0123456789abcdef.parquet",
            "work/thesis.tex",
            "work/more/records-0123456789abcdef.parquet",
            "snapshots/photo.json",
            "snapshots/1.json",
            "snapshots/000000001.json",
            "snapshots/partitions-0123456789abcdef.json",
            "manifests/0123456789abcdef.json",
            "manifests/more/0123456789abcdef.parquet",
            "manifests/first.parquet",
            "snapshots/latest.txt",
        ] {
            assert!(!is_written(path), "{path}");
        }
    }

    /// `onefold-storage` creates temporary names itself.
    #[test]
    fn temporary_names_of_the_storage_are_recognised() {
        let directory = tempfile::tempdir().unwrap();
        let storage = Storage::open(directory.path()).unwrap();
        let path = vocabulary_file("items", &random_name());
        let mut upload = storage.upload(&path).unwrap();
        upload.write_all(b"half a file").unwrap();
        let found = storage.left_over_files(&WRITTEN_FOLDERS).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].path != path && is_written(&found[0].path), "{found:?}");
    }
}
