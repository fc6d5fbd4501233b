//! Builds a dataset range by range of its buckets: any engine or scheduler that can run programs builds the parts, on
//! as many machines as it likes, and one program commits them.
//!
//! ```text
//! samples of range 0 ─▶ write ─▶ data files, part ─┐
//! samples of range 1 ─▶ write ─▶ data files, part ─┼─▶ commit ─▶ snapshot
//! samples of range 2 ─▶ write ─▶ data files, part ─┘
//! ```
//!
//! A part says what was written of one range. Nothing is visible in the dataset before the commit. A part that is
//! written again has other files; those of the part that is not committed go with
//! [`vacuum`](onefold_datasets::vacuum).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_base::progress::Reporter;
use onefold_datasets::{
    Buckets, Commit, DatasetWriter, Layout, Order, PartitionColumn, Schema, Sessions, WriterOptions, Written,
    WrittenBucket, check_new_location,
};
use onefold_storage::Storage;
use serde::{Deserialize, Serialize};

use crate::cluster::WriteSpec;
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::{Config, Error, Result, sources};

/// The version of the format of parts that this program writes and reads.
const FORMAT_VERSION: u32 = 2;

/// What was written of one range of buckets: everything that a commit needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The version of this format.
    pub format_version: u32,
    /// The range.
    pub range: u32,
    /// The buckets of the dataset.
    pub buckets: Buckets,
    /// The schema of the samples.
    pub schema: Schema,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples.
    pub order: Order,
    /// What makes a session.
    pub sessions: Sessions,
    /// The partition columns, with the types that they have in the samples.
    pub partition_columns: Vec<PartitionColumn>,
    /// Whether samples have keys.
    pub sample_keys: bool,
    /// The samples that were written.
    pub samples: u64,
    /// What was written, by partition.
    pub written: Vec<WrittenBucket>,
}

/// Writes the samples of `config` that are in `range` of so many ranges of buckets to the dataset at `out`, and gives
/// the part that [`commit_parts`] needs. Samples of other ranges are left out. What `options` says of buckets, groups,
/// commits and shares does not count.
///
/// # Errors
///
/// As [`build`](crate::build()); [`Error::Fault`] if `config` has vocabularies, because these are made of the samples
/// of all ranges, or the dataset has another number of ranges; [`Error::Dataset`] if `out` is no dataset and holds a
/// file that belongs to none. Files that were written are removed.
pub async fn write_part(
    config: &Config,
    out: &Path,
    place: (u32, u32),
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<Part> {
    // The layout and the order are those of a dataset that is there.
    let options = BuildOptions { commit: Commit::Append, ..options.clone() };
    let mut written = Vec::new();
    let pipeline = Pipeline { config, out, options: &options, reporter };
    let part = pipeline.part(place, &mut written).await;
    match part {
        Ok(part) => Ok(Part { written, ..part }),
        Err(error) => {
            let paths: Vec<String> =
                written.iter().flat_map(WrittenBucket::paths).map(str::to_owned).collect();
            // The error that led here counts.
            if !paths.is_empty()
                && let Ok(storage) = Storage::open(out)
            {
                let _ = storage.delete(paths);
            }
            Err(error)
        }
    }
}

impl Pipeline<'_> {
    /// Writes the samples of a range of so many, which is `written` then. Gives the part without it.
    async fn part(&self, place: (u32, u32), written: &mut Vec<WrittenBucket>) -> Result<Part> {
        let Self { config, options, reporter, .. } = *self;
        let (range, ranges) = place;
        let refused = |message: String, hint: &str| Err(Error::config(&config.path, message, hint));
        if let Some(name) = config.vocabularies.keys().next() {
            let message = format!("the vocabulary `{name}` is made of the samples of all buckets");
            return refused(
                message,
                "give features without a vocabulary, as `ids = \"hash\"`, or use `build`",
            );
        }
        let old = self.old_snapshot()?;
        let known = old.as_ref().map(|old| old.division().ranges());
        if let Some(known) = known.filter(|known| *known != ranges) {
            let message = format!("the dataset has {known} ranges of buckets, not {ranges}");
            return refused(message, "write the ranges that the dataset has");
        }
        if old.is_none() {
            check_new_location(&Storage::open(self.out)?)?;
        }
        let (layout, order) = self.layout_and_order(old.as_ref());
        let target = Target::Part { range, ranges };
        let reading = self.plan(sources::find(config).await?, target, old.as_ref()).await?;
        let partition_columns = reading.partition_columns();
        if let Some(old) = &old {
            old.check_partition_columns(&partition_columns)?;
        }
        options.partitions.choice(&partition_columns)?;
        let sample_keys = old.map_or(!config.samples.key.is_empty(), |old| old.sample_keys);
        let mut part = Part {
            format_version: FORMAT_VERSION,
            range,
            buckets: reading.buckets(),
            schema: Schema { kept: reading.kept.clone(), ..config.schema.clone() },
            layout,
            order,
            sessions: config.session.clone(),
            partition_columns,
            sample_keys,
            samples: 0,
            written: Vec::new(),
        };
        let Some((clustering, decided)) = self.decide(&reading, None).await? else { return Ok(part) };
        let spec = WriteSpec {
            location: self.out.to_owned(),
            schema: part.schema.clone(),
            options: WriterOptions {
                column_order: options.column_order.clone(),
                ..part.options(Commit::Append)
            },
            filter: options.partitions.clone(),
            partition_columns: part.partition_columns.clone(),
            cut: clustering.cut(true),
        };
        let mut add = |range: WrittenBucket| {
            part.samples += range.samples();
            written.push(range);
            Ok(())
        };
        clustering.write(spec, decided.lists, reporter, &mut add).await?;
        Ok(part)
    }
}

impl Part {
    /// Reads the parts at `location`: a file, or a folder whose files are parts.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for what is no part; [`Error::Dataset`] if the location cannot be read.
    pub fn read(location: &Path) -> Result<Vec<(PathBuf, Self)>> {
        let (folder, name) = Storage::of_file(location)?;
        // Without a name, the location is a folder.
        if !name.is_empty()
            && let Some(bytes) = folder.read(&name)?
        {
            return Ok(vec![(location.to_owned(), Self::parse(location, &bytes)?)]);
        }
        let folder = Storage::open(location)?;
        let mut paths: Vec<String> = folder.list("", None)?.into_iter().map(|object| object.path).collect();
        paths.sort();
        if paths.is_empty() {
            return Err(no_part(location, "it does not exist or is an empty folder"));
        }
        let mut parts = Vec::with_capacity(paths.len());
        for path in paths {
            let (shown, bytes) = (folder.shown(&path), folder.read(&path)?);
            let bytes = bytes.ok_or_else(|| no_part(&shown, "it is gone"))?;
            parts.push((shown.clone(), Self::parse(&shown, &bytes)?));
        }
        Ok(parts)
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let wrong = |error: serde_json::Error| no_part(path, &error.to_string());
        let part: Self = serde_json::from_slice(bytes).map_err(wrong)?;
        if part.format_version != FORMAT_VERSION {
            let message = format!(
                "its `format_version` is {}, this program reads {FORMAT_VERSION}",
                part.format_version
            );
            return Err(no_part(path, &message));
        }
        Ok(part)
    }

    /// Writes the part to a file, also over one that is there.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if it cannot be written.
    pub fn store(&self, location: &Path) -> Result<()> {
        let (folder, name) = Storage::of_file(location)?;
        if name.is_empty() {
            let error = onefold_storage::Error::location(
                location.display(),
                "the location names a folder, not a file",
                "add the name of the file",
            );
            return Err(error.into());
        }
        let text = serde_json::to_vec(self).map_err(|error| Error::Io(error.into()))?;
        Ok(folder.replace(&name, text)?)
    }

    /// How the dataset of the part is written.
    fn options(&self, commit: Commit) -> WriterOptions {
        WriterOptions {
            layout: self.layout,
            commit,
            sample_keys: self.sample_keys,
            buckets: self.buckets,
            sessions: Some(self.sessions.clone()),
            ..WriterOptions::new(self.order)
        }
    }
}

/// Commits parts, one of each range of buckets, to the dataset at `out`, to which they were written.
///
/// # Errors
///
/// [`Error::Fault`] if there are none, ranges are missing or there twice, parts do not fit together, or a file of one
/// is not there; [`Error::Dataset`] as for [`DatasetWriter::create`] and [`DatasetWriter::finish`]. The dataset is then
/// as it was, and the parts can be committed later.
pub fn commit_parts(out: &Path, parts: Vec<(PathBuf, Part)>, commit: Commit) -> Result<Written> {
    let Some((first_path, first)) = parts.first() else {
        return Err(no_part(out, "there are no parts to commit"));
    };
    check_parts(first_path, first, &parts)?;
    let storage = Storage::open(out)?;
    let mut writer = DatasetWriter::create_in(storage.clone(), first.schema.clone(), first.options(commit))?;
    writer.set_partition_columns(first.partition_columns.clone())?;
    if writer.options().buckets != first.buckets {
        let [part, dataset] = [first.buckets, writer.options().buckets];
        let message = format!(
            "it is of {} ranges of {} buckets, the dataset has {} of {}",
            part.ranges(),
            part.in_range,
            dataset.ranges(),
            dataset.in_range,
        );
        return Err(no_part(first_path, &message));
    }
    for (path, part) in parts {
        for range in part.written {
            for file in range.files.iter().flat_map(|set| &set.files) {
                let bytes = storage.head(&file.path)?.map(|object| object.bytes);
                if bytes != Some(file.bytes_on_disk) {
                    let what = bytes.map_or("is not there".to_owned(), |bytes| {
                        format!("has {bytes} bytes in place of {}", file.bytes_on_disk)
                    });
                    let message = format!("its file `{}` {what}", storage.shown(&file.path).display());
                    return Err(no_part(&path, &message));
                }
            }
            writer.add_part(range)?;
        }
    }
    Ok(writer.finish()?)
}

/// Checks that the parts are one of each range, and fit together.
fn check_parts(first_path: &Path, first: &Part, parts: &[(PathBuf, Part)]) -> Result<()> {
    let mut by_range: BTreeMap<u32, &Path> = BTreeMap::new();
    for (path, part) in parts {
        let what = [
            ("division into buckets", part.buckets == first.buckets),
            ("schema", part.schema == first.schema),
            ("layout", part.layout == first.layout),
            ("order", part.order == first.order),
            ("definition of sessions", part.sessions == first.sessions),
            ("definition of partition columns", part.partition_columns == first.partition_columns),
            ("use of sample keys", part.sample_keys == first.sample_keys),
        ];
        if let Some((what, _)) = what.iter().find(|(_, same)| !same) {
            return Err(no_part(path, &format!("it has another {what} than `{}`", first_path.display())));
        }
        if let Some(other) = by_range.insert(part.range, path) {
            let message = format!("range {} is also in `{}`", part.range, other.display());
            return Err(no_part(path, &message));
        }
    }
    let ranges = first.buckets.ranges();
    let missing: Vec<u32> = (0..ranges).filter(|range| !by_range.contains_key(range)).collect();
    let Some(range) = missing.first() else { return Ok(()) };
    let message = format!(
        "no part has range {range} of {ranges}; {} of them {} missing",
        missing.len(),
        if missing.len() == 1 { "is" } else { "are" },
    );
    Err(no_part(first_path, &message))
}

fn no_part(path: &Path, message: &str) -> Error {
    let hint = "write ranges with `onefold-ingest write`, all alike, and commit one part of each";
    Error::data(format!("part `{}`", path.display()), message, hint)
}
