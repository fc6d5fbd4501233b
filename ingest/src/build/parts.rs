//! Builds a dataset in parts, one per range of buckets. Any engine or scheduler that can run programs can write the
//! parts on any number of machines. One program then commits them.
//!
//! ```text
//! samples of range 0 ─▶ write ─▶ data files, part ─┐
//! samples of range 1 ─▶ write ─▶ data files, part ─┼─▶ commit ─▶ snapshot
//! samples of range 2 ─▶ write ─▶ data files, part ─┘
//! ```
//!
//! A part describes the files that were written for one range. Nothing is visible in the dataset before the commit. A
//! part that is written again has other files. [`vacuum`](onefold_datasets::vacuum) removes the files of parts that
//! were not committed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_base::progress::Reporter;
use onefold_datasets::{
    Buckets, Commit, DatasetWriter, Layout, Order, PartitionColumn, Schema, Sessions, TableVersion,
    WriterOptions, Written, WrittenBucket, check_new_location,
};
use onefold_storage::Storage;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::cluster::WriteSpec;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::pipeline::{BuildOptions, Pipeline, Target};
use crate::row_counts::{Reason, RowCounts};
use crate::sources;

/// The version of the file format of parts that this program writes and reads.
const FORMAT_VERSION: u32 = 2;
/// The number of files whose existence is checked at the same time.
const FILES_AT_A_TIME: usize = 32;

/// The description of the files that were written for one range of buckets. It contains all that a commit needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The version of this format.
    pub format_version: u32,
    /// The number of the range, from 0.
    pub range: u32,
    /// The division of the dataset into buckets.
    pub buckets: Buckets,
    /// The schema of the samples.
    pub schema: Schema,
    /// How sparse features are stored.
    pub layout: Layout,
    /// The order of the samples within a partition.
    pub order: Order,
    /// The definition of sessions.
    pub sessions: Sessions,
    /// The partition columns, with their types in the samples.
    pub partition_columns: Vec<PartitionColumn>,
    /// Whether samples have keys.
    pub sample_keys: bool,
    /// A hash of the configuration and of the program's version.
    pub configuration: String,
    /// The partitions that were written, as a filter; empty for all partitions.
    pub filter: String,
    /// Hashes that identify the input files.
    pub input: Vec<u64>,
    /// The versions of the Delta Lake tables that were read, by source.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub table_versions: BTreeMap<String, TableVersion>,
    /// The number of samples that were written.
    pub samples: u64,
    /// The number of rows of `[samples]`: how many were written, and how many were left out for each reason.
    pub rows: RowCounts,
    /// The number of CSV rows that were left out, because they have fewer or more values than there are columns.
    pub ragged_rows_skipped: u64,
    /// The files that were written, per partition.
    pub written: Vec<WrittenBucket>,
}

/// Writes the samples of `config` in range `place.0` of `place.1` ranges of buckets to the dataset at `out`, and
/// returns the part for [`commit_parts`]. Samples of other ranges are left out and counted. The buckets, groups, commit
/// and share of `options` are ignored.
///
/// # Errors
///
/// The errors of [`build`](crate::build()); [`Error::Fault`] if `config` has vocabularies (they need the samples of all
/// ranges) or reads the newest version of a table, the dataset has another number of ranges, or an input file is the
/// segment of another range; [`Error::Dataset`] if `out` is not a dataset and contains other files. Files that were
/// written are removed after an error.
pub async fn write_part(
    config: &Config,
    out: &Path,
    place: (u32, u32),
    options: &BuildOptions,
    reporter: &dyn Reporter,
) -> Result<Part> {
    // An existing dataset determines the layout and the order.
    let options = BuildOptions { commit: Commit::Append, ..options.clone() };
    let mut written = Vec::new();
    let pipeline = Pipeline { config, out, options: &options, reporter };
    let part = pipeline.part(place, &mut written).await;
    match part {
        Ok(part) => Ok(Part { written, ..part }),
        Err(error) => {
            let paths: Vec<String> =
                written.iter().flat_map(WrittenBucket::paths).map(str::to_owned).collect();
            // Report the first error, even if the files cannot be deleted.
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
    /// Writes the samples of range `place.0` of `place.1` ranges, and adds the files to `written`. Returns the part
    /// without the files.
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
        if let Some(name) = config.newest_table() {
            let message = format!(
                "the source `{name}` is the newest version of a table, which can be another one for each part"
            );
            return refused(message, "choose the version that all parts read, as `version = 12`");
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
        let found = self.find(target).await?;
        sources::check_segments(config, &found.0, place).await?;
        let reading = self.plan(found, target, old.as_ref()).await?;
        let partition_columns = reading.partition_columns();
        if let Some(old) = &old {
            old.check_partition_columns(&partition_columns)?;
        }
        options.partitions.choice(&partition_columns)?;
        let mut part = Part {
            format_version: FORMAT_VERSION,
            range,
            buckets: reading.buckets(),
            schema: Schema { kept: reading.kept.clone(), ..config.schema.clone() },
            layout,
            order,
            sessions: config.session.clone(),
            partition_columns,
            sample_keys: old.map_or(!config.samples.key.is_empty(), |old| old.sample_keys),
            configuration: config.hash(),
            filter: options.partitions.to_string(),
            input: sources::file_hashes(&reading.sources),
            table_versions: sources::table_versions(&reading.sources),
            samples: 0,
            rows: RowCounts::default(),
            ragged_rows_skipped: 0,
            written: Vec::new(),
        };
        let mut read = None;
        if let Some((clustering, decided)) = self.decide(&reading, None).await? {
            let column_order = options.column_order.clone();
            let spec = WriteSpec {
                location: self.out.to_owned(),
                schema: part.schema.clone(),
                options: WriterOptions { column_order, ..part.options(Commit::Append) },
                filter: options.partitions.clone(),
                partition_columns: part.partition_columns.clone(),
                lacks: Vec::new(),
                cut: clustering.cut(true),
            };
            let mut add = |range: WrittenBucket| {
                part.samples += range.samples();
                written.push(range);
                Ok(())
            };
            read = clustering.write(spec, decided.lists, reporter, &mut add).await?;
        }
        let (samples, others) = read.map_or((0, 0), |read| (read.samples, read.left_out.samples));
        part.rows = RowCounts { written: part.samples, ..reading.row_counts(samples, others)? };
        part.rows.check()?;
        part.ragged_rows_skipped = sources::ragged_rows_skipped(&reading.sources);
        Ok(part)
    }
}

impl Part {
    /// Reads the parts at `location`: a file, or a folder that contains only part files.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a file that is not a part; [`Error::Dataset`] if the location cannot be read.
    pub fn read(location: &Path) -> Result<Vec<(PathBuf, Self)>> {
        let (folder, name) = Storage::of_file(location)?;
        // If the name is empty, the location is a folder.
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

    /// Writes the part to a file, and replaces an existing file.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the file cannot be written.
    pub fn store(&self, location: &Path) -> Result<()> {
        let (folder, name) = Self::place(location)?;
        let text = serde_json::to_vec(self).map_err(|error| Error::Io(error.into()))?;
        Ok(folder.replace(&name, text)?)
    }

    /// Checks, before any work begins, that [`store`](Self::store) can be called with this location.
    ///
    /// # Errors
    ///
    /// [`Error::Dataset`] if the location is not valid or names a folder.
    pub fn check_place(location: &Path) -> Result<()> {
        Self::place(location).map(drop)
    }

    fn place(location: &Path) -> Result<(Storage, String)> {
        let (folder, name) = Storage::of_file(location)?;
        if name.is_empty() || location.is_dir() {
            let error = onefold_storage::Error::location(
                location.display(),
                "the location names a folder, not a file",
                "add the name of the file",
            );
            return Err(error.into());
        }
        Ok((folder, name))
    }

    /// Returns the options of a writer for the dataset of the part.
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

/// Commits parts, one per range of buckets, to the dataset at `out`. The parts must have been written to this dataset.
///
/// # Errors
///
/// [`Error::Fault`] if `parts` is empty, a range is missing or occurs twice, the parts differ in their settings or lack
/// samples that they have read, or a file of a part is missing; [`Error::Dataset`] as for [`DatasetWriter::create`] and
/// [`DatasetWriter::finish`]. After an error the dataset is unchanged, and the parts can be committed later.
pub fn commit_parts(out: &Path, parts: Vec<(PathBuf, Part)>, commit: Commit) -> Result<Written> {
    let Some((first_path, first)) = parts.first() else {
        return Err(no_part(out, "there are no parts to commit"));
    };
    check_parts(first_path, first, &parts)?;
    check_rows(&parts)?;
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
    check_files(&storage, &parts)?;
    if first.filter.is_empty() {
        writer.set_table_versions(first.table_versions.clone());
    }
    for range in parts.into_iter().flat_map(|(_, part)| part.written) {
        writer.add_part(range)?;
    }
    Ok(writer.finish()?)
}

/// Checks that all files of the parts exist and have their recorded sizes.
fn check_files(storage: &Storage, parts: &[(PathBuf, Part)]) -> Result<()> {
    let files = parts.iter().flat_map(|(path, part)| {
        let sets = part.written.iter().flat_map(|range| &range.files);
        sets.flat_map(|set| &set.files).map(move |file| (path, file))
    });
    let files: Vec<_> = files.collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(FILES_AT_A_TIME).build();
    let pool = pool.map_err(std::io::Error::other)?;
    pool.install(|| {
        files.par_iter().try_for_each(|(path, file)| {
            let bytes = storage.head(&file.path)?.map(|object| object.bytes);
            if bytes == Some(file.bytes_on_disk) {
                return Ok(());
            }
            let what = bytes.map_or("is not there".to_owned(), |bytes| {
                format!("has {bytes} bytes in place of {}", file.bytes_on_disk)
            });
            let message = format!("its file `{}` {what}", storage.shown(&file.path).display());
            Err(no_part(path, &message))
        })
    })
}

/// Checks that each sample that a part has read is in the part of its range.
///
/// Parts that read the same files leave out each other's samples. Parts that read different files must not have left
/// out any sample. If the input files of two parts overlap only partially, this cannot be checked.
fn check_rows(parts: &[(PathBuf, Part)]) -> Result<()> {
    let mut inputs: BTreeMap<&[u64], (&Path, u64)> = BTreeMap::new();
    let mut in_ranges = 0;
    for (path, part) in parts {
        let rows = &part.rows;
        if !rows.is_complete() || rows.written != part.samples {
            return Err(no_part(
                path,
                &format!("not all of its rows are accounted for: {}", rows.described()),
            ));
        }
        let (first, samples) = *inputs.entry(&part.input).or_insert((path.as_path(), rows.samples()));
        if samples != rows.samples() {
            let message = format!(
                "it found {} samples in the files in which `{}` found {samples}",
                rows.samples(),
                first.display()
            );
            return Err(no_part(path, &message));
        }
        in_ranges += samples - rows.left_out_for(Reason::OtherRange);
    }
    let mut owners = BTreeMap::new();
    for (input, hashes) in inputs.keys().enumerate() {
        for hash in *hashes {
            if *owners.entry(hash).or_insert(input) != input {
                return Ok(());
            }
        }
    }
    let read: u64 = inputs.values().map(|(_, samples)| samples).sum();
    if in_ranges == read {
        return Ok(());
    }
    let message = format!(
        "{read} samples were read, but {in_ranges} belong to the range of a part that read them; the others would be \
         lost, or there twice"
    );
    let hint = "each part must read all samples of its range: shard the log by the columns that `[session]` names, in their \
                order, and give each range its segment, or let every part read the whole log; then write the parts again";
    Err(Error::data("the parts", message, hint))
}

/// Checks that there is one part for each range, and that the parts agree in their settings.
fn check_parts(first_path: &Path, first: &Part, parts: &[(PathBuf, Part)]) -> Result<()> {
    if !first.buckets.is_valid() {
        let Buckets { number, in_range } = first.buckets;
        let message = format!("a dataset does not have {number} buckets in ranges of {in_range}");
        return Err(no_part(first_path, &message));
    }
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
            ("version of a table", part.table_versions == first.table_versions),
            ("filter of partitions", part.filter == first.filter),
            ("configuration or version of the program", part.configuration == first.configuration),
        ];
        if let Some((what, _)) = what.iter().find(|(_, same)| !same) {
            return Err(no_part(path, &format!("it has another {what} than `{}`", first_path.display())));
        }
        if part.range >= part.buckets.ranges() {
            let message = format!("there is no range {} of {}", part.range, part.buckets.ranges());
            return Err(no_part(path, &message));
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
