//! Checks segments that `shard` wrote, if a build of a part of a dataset reads only some of them: they must contain
//! all sessions of its range of buckets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::Deserialize;

use super::Source;
use super::inspect::SourceFile;
use super::stores::VersionedStore;
use crate::config::{Config, Rows};
use crate::error::{Error, Result};

/// The file that marks a directory of segments. Its name begins with an underscore, so it is not read as data.
pub(crate) const SEGMENTS_FILE: &str = "_segments.json";

/// Segments of one folder.
struct SomeSegments<'a> {
    source: &'a str,
    file: &'a SourceFile,
    /// The total number of segments.
    all: u32,
    numbers: BTreeSet<u32>,
}

/// The content of [`SEGMENTS_FILE`], which describes the segments in the same folder.
#[derive(Deserialize)]
struct SegmentsOf {
    by: Vec<String>,
}

/// Checks the segments that the build of one range of buckets reads. A build that reads all segments of a folder
/// reads the whole log, so it is not checked.
///
/// # Errors
///
/// [`Error::Fault`] if a segment is missing that can have sessions of the range, or the log was divided by columns
/// other than those of sessions.
pub(crate) async fn check_segments(
    config: &Config,
    sources: &[Source],
    (range, ranges): (u32, u32),
) -> Result<()> {
    for some in some_segments(sources) {
        if some.numbers.len() == some.all as usize {
            continue;
        }
        let name = some.file.found.name.clone();
        let refused = |message: String, hint: String| Err(Error::source(some.source, &name, message, hint));
        if let Some(number) = needed(range, ranges, some.all).find(|number| !some.numbers.contains(number)) {
            let given: Vec<String> = some.numbers.iter().map(u32::to_string).collect();
            let message = format!(
                "range {range} of {ranges} can have sessions in segment {number} of {}, and only segment {} is read",
                some.all,
                given.join(", ")
            );
            let hint = format!(
                "give segment {number}, too; with `--segments {ranges}`, segment {range} has exactly the sessions of \
                 range {range}"
            );
            return refused(message, hint);
        }
        // A query may rename the columns. In that case `commit` still compares the counts of samples.
        let (Rows::Source(_), Some(by)) = (&config.samples.rows, divided_by(some.file).await) else {
            continue;
        };
        if by != config.session_columns() {
            let message = format!(
                "the log was divided by `{}`, and sessions are of `{}`: samples of the range are in other segments",
                by.join("`, `"),
                config.session_columns().join("`, `")
            );
            let hint =
                format!("run `onefold-ingest shard --by {}` again", config.session_columns().join(","));
            return refused(message, hint);
        }
    }
    Ok(())
}

/// Returns the segments among the files of the sources, grouped by folder.
fn some_segments(sources: &[Source]) -> Vec<SomeSegments<'_>> {
    let mut folders: BTreeMap<(PathBuf, u32), SomeSegments<'_>> = BTreeMap::new();
    for source in sources {
        for file in &source.files {
            let name = file.found.name.file_name().unwrap_or_default().to_string_lossy();
            let Some((number, all)) = segment_of(&name) else { continue };
            let folder = (file.found.name.parent().map_or_else(PathBuf::new, PathBuf::from), all);
            let some = folders.entry(folder).or_insert_with(|| SomeSegments {
                source: &source.name,
                file,
                all,
                numbers: BTreeSet::new(),
            });
            some.numbers.insert(number);
        }
    }
    folders.into_values().collect()
}

/// Returns the file name of segment `number` of `all`. The numbers are padded with zeros, so that the order of the names
/// is the order of the numbers.
pub(crate) fn segment_name(number: usize, all: usize) -> String {
    format!("segment-{number:05}-of-{all:05}.parquet")
}

/// Parses the index of a segment and the total number of segments from a file name.
pub(crate) fn segment_of(name: &str) -> Option<(u32, u32)> {
    let (number, all) = name.strip_prefix("segment-")?.strip_suffix(".parquet")?.split_once("-of-")?;
    let (number, all) = (number.parse().ok()?, all.parse().ok()?);
    (number < all).then_some((number, all))
}

/// Returns the segments, out of `all`, that can have sessions of a range. Ranges and segments divide the same hash
/// space.
fn needed(range: u32, ranges: u32, all: u32) -> impl Iterator<Item = u32> {
    let [range, ranges, segments] = [range, ranges, all].map(u64::from);
    (0..all).filter(move |number| {
        let number = u64::from(*number);
        number * ranges < (range + 1) * segments && range * segments < (number + 1) * ranges
    })
}

/// Returns the columns by which the segments in the folder of a file were divided, if they can be determined.
async fn divided_by(file: &SourceFile) -> Option<Vec<String>> {
    let location = file.found.meta.location.as_ref();
    let folder = location.rsplit_once('/').map_or("", |(folder, _)| folder);
    let list = Path::parse(format!("{folder}/{SEGMENTS_FILE}").trim_start_matches('/')).ok()?;
    let bytes = VersionedStore::new(&file.store).get(&list).await.ok()?.bytes().await.ok()?;
    let segments: SegmentsOf = serde_json::from_slice(&bytes).ok()?;
    Some(segments.by)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_segments_are_known() {
        assert_eq!(segment_of("segment-00003-of-00016.parquet"), Some((3, 16)));
        for name in [
            "segment-00016-of-00016.parquet",
            "segment-3.parquet",
            "part-0.parquet",
            "segment-a-of-b.parquet",
        ] {
            assert_eq!(segment_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_range_needs_the_segments_that_overlap_it() {
        let numbers = |range, ranges, all| needed(range, ranges, all).collect::<Vec<_>>();
        assert_eq!(numbers(3, 16, 16), [3]);
        assert_eq!(numbers(3, 4, 16), [12, 13, 14, 15]);
        assert_eq!(numbers(7, 16, 4), [1]);
        assert_eq!(numbers(1, 3, 2), [0, 1]);
    }
}
