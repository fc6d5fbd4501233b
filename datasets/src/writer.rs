//! The writer of datasets: Parquet files by partition and range of buckets, row groups that start at session
//! boundaries, checksums, statistics, and the commit.
//!
//! ```text
//!  write ─▶ conform, check the order, cut into row groups            the caller's thread
//!             │ (the samples of a row group; views are kept)
//!             ▼
//!           count + digest ─┐   every column: fold or expand, encode    `threads` row groups at a time
//!             ▼             └──────────▼
//!           statistics              upload, checksums ─▶ manifest ─▶ snapshot
//! ```
//!
//! A [`BucketWriter`] writes one range of buckets of a partition. Several can run in parallel.
//! [`DatasetWriter::write`] takes samples bucket by bucket and uses one bucket writer after the other.
//! [`DatasetWriter::add`] takes ranges that [`BucketWriters`] wrote elsewhere, possibly in other processes.
//!
//! No two writers use the same file name, so writers disturb neither each other nor readers. A killed writer
//! leaves files that no snapshot lists; [`vacuum`](crate::vacuum) removes them.

mod beside;
mod bucket;
mod checksums;
mod closing;
mod columns;
mod count;
mod data_file;
mod encoders;
mod encodings;
mod finish;
mod location;
mod options;
mod order;
mod row_group;
mod samples;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use onefold_base::fault::{option, text};
use onefold_storage::Storage;

pub use self::beside::ColumnsWriter;
pub use self::bucket::{BucketWriter, BucketWriters};
pub use self::closing::ClosingBuckets;
pub(crate) use self::count::{Counter, count_lists};
pub use self::data_file::Decode;
pub use self::encoders::Encoders;
pub use self::finish::Written;
pub use self::location::check_new_location;
pub use self::options::WriterOptions;
pub(crate) use self::samples::SampleWriter;
use crate::conform::conform;
use crate::digest::Digest;
use crate::extension::{SAME_CONFIGURATION, misfit as misfit_of_schemas};
use crate::names::{WRITTEN_FOLDERS, vocabulary_file};
use crate::partition_column::misfit;
use crate::snapshot::{Snapshot, TableVersion, WrittenBucket, latest_head, not_a_dataset};
use crate::vocabulary::FormerOriginals;
use crate::{
    Buckets, Commit, Error, FileSet, PartitionColumn, PartitionKey, Result, SESSION_COLUMN, Schema,
    TIME_COLUMN, Vocabulary, VocabularyFile,
};

/// The number of encoded row groups, per thread, that may wait for an earlier one.
const WAITING_PART: usize = 2;

/// Writes a dataset, or partitions of one. Nothing becomes visible before [`finish`](Self::finish). A writer
/// that is dropped earlier removes its files.
#[derive(Debug)]
pub struct DatasetWriter {
    writers: BucketWriters,
    schema: Schema,
    options: WriterOptions,
    /// The newest snapshot when the writer was created, without its partitions.
    base: Option<Snapshot>,
    partition_columns: Vec<PartitionColumn>,
    /// The complete files, by partition and range of buckets.
    written: BTreeMap<PartitionKey, BTreeMap<u32, WrittenBucket>>,
    /// The first files of row groups that are rewritten.
    replaced: BTreeSet<String>,
    vocabularies: BTreeMap<String, VocabularyFile>,
    /// The versions of the tables that were read, by source.
    table_versions: BTreeMap<String, TableVersion>,
    /// Whether partitions that exist keep their samples.
    only_new: bool,
    /// The paths of all complete files, for removal if the writer fails.
    paths: Vec<String>,
    expected: Option<(u64, Digest)>,
    /// The ranges for which samples have arrived.
    entered: BTreeSet<(PartitionKey, u32)>,
    open: Option<OpenRange>,
    closing: ClosingBuckets,
    finished: bool,
}

/// A range of buckets to which samples are being written, and its samples that are not in a row group yet.
#[derive(Debug)]
struct OpenRange {
    place: (PartitionKey, u32),
    samples: SampleWriter,
}

impl DatasetWriter {
    /// Starts writing to the dataset at `location`, a local path or a URL. Appended samples may have
    /// additional features; existing samples then have the missing values of these features.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] if `location` cannot be reached, contains a dataset that the options do not allow
    /// to replace or extend, or contains no dataset but files that no dataset writer creates.
    /// [`Error::Fault`] if no dataset can have the schema or the buckets, if the column order contains an
    /// unknown column, or if the existing dataset has another schema, layout, order, definition of sessions
    /// or version.
    pub fn create(location: &Path, schema: Schema, options: WriterOptions) -> Result<Self> {
        Self::create_in(Storage::open(location)?, schema, options)
    }

    /// Works like [`create`](Self::create) in an open storage.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`create`](Self::create).
    pub fn create_in(storage: Storage, schema: Schema, mut options: WriterOptions) -> Result<Self> {
        schema.validate()?;
        let base = base(&storage, &schema, &options)?;
        let appended_to = base.as_ref().filter(|_| options.commit.keeps_others());
        options.buckets = appended_to.map_or(options.buckets, Snapshot::division);
        options.sample_keys = appended_to.map_or(options.sample_keys, |base| base.sample_keys);
        let partition_columns = appended_to.map(|base| base.partition_columns.clone()).unwrap_or_default();
        let encoders = Encoders::new(options.threads, options.threads)?;
        let writers = BucketWriters::new(storage, schema.clone(), options.clone(), encoders)?;
        Ok(Self {
            closing: ClosingBuckets::new(&writers),
            writers,
            schema,
            options,
            base,
            partition_columns,
            written: BTreeMap::new(),
            replaced: BTreeSet::new(),
            vocabularies: BTreeMap::new(),
            table_versions: BTreeMap::new(),
            only_new: false,
            paths: Vec::new(),
            expected: None,
            entered: BTreeSet::new(),
            open: None,
            finished: false,
        })
    }

    /// Returns the schema of the written samples.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Returns the [head](Snapshot::load_head) of the snapshot to which the writer appends.
    pub fn appended_to(&self) -> Option<&Snapshot> {
        self.base.as_ref().filter(|_| self.options.commit.keeps_others())
    }

    /// Returns the writer's options. If it appends, the buckets and sample keys are those of the existing
    /// dataset.
    pub fn options(&self) -> &WriterOptions {
        &self.options
    }

    /// Returns the number of samples in complete ranges that were written or added so far, and the number of
    /// their partitions.
    pub fn added(&self) -> (u64, usize) {
        let samples = |ranges: &BTreeMap<u32, WrittenBucket>| -> u64 {
            ranges.values().map(WrittenBucket::samples).sum()
        };
        let all = self.written.values().map(samples).filter(|samples| *samples > 0);
        all.fold((0, 0), |(all, partitions), samples| (all + samples, partitions + 1))
    }

    /// Returns the dataset's partition columns.
    pub fn partition_columns(&self) -> &[PartitionColumn] {
        &self.partition_columns
    }

    /// Sets the partition columns and the types of their values. It must be called before samples are
    /// written. A new dataset has no partition columns by default. An existing dataset keeps its own.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the existing dataset has other partition columns.
    pub fn set_partition_columns(&mut self, columns: Vec<PartitionColumn>) -> Result<()> {
        if let Some(base) = self.appended_to() {
            base.check_partition_columns(&columns)?;
        }
        self.partition_columns = columns;
        Ok(())
    }

    /// Sets the buckets of a new dataset. It must be called before samples are written. An existing dataset
    /// keeps its own.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a dataset cannot have these buckets.
    pub fn set_buckets(&mut self, buckets: Buckets) -> Result<()> {
        if !self.options.commit.keeps_others() || self.base.is_none() {
            self.options.buckets = buckets;
            self.options.check_buckets()?;
            self.writers.buckets = buckets;
        }
        Ok(())
    }

    /// Sets the versions of the tables whose rows the dataset has after the commit, by the names of their sources. The
    /// snapshot records them, and keeps those of other sources of an existing dataset.
    pub fn set_table_versions(&mut self, versions: BTreeMap<String, TableVersion>) {
        self.table_versions = versions;
    }

    /// Declares that the samples come from rows that were added to the logs, without the rows of the dataset's samples.
    /// An append then must not replace other samples of an existing partition; a merge may add to them.
    pub fn write_only_new(&mut self) {
        self.only_new = true;
    }

    /// Writes samples of a partition. Samples must arrive partition by partition, within a partition in the
    /// order of their sessions' [buckets](crate::bucket_of_session), and within a bucket in the order given
    /// by the options. `batch` has the columns of [`Schema::to_arrow`] and, if the dataset has sample keys,
    /// [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN). Lists may also be `ListView`s, which are expanded
    /// only when their row group is encoded.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the columns differ, if the samples are not in order, if samples of an earlier
    /// range arrive after another range, or if the key does not fit the dataset's partition columns and
    /// types. [`Error::Storage`] and [`Error::Fault`] if a file cannot be written (for example, because a
    /// disk is full). Such an error may concern an earlier row group.
    pub fn write(&mut self, key: &PartitionKey, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = conform(batch, &self.writers.format.columns_of_samples)?;
        let buckets = self.options.buckets;
        let range = |session: &i64| buckets.range_of(buckets.bucket_of(*session));
        let mut start = 0;
        for run in session_ids(&batch).chunk_by(|a, b| range(a) == range(b)) {
            self.enter(key, range(&run[0]))?;
            if let Some(open) = &mut self.open {
                open.samples.append(&batch.slice(start, run.len()))?;
            }
            start += run.len();
        }
        Ok(())
    }

    /// Declares that this range of buckets of this partition is replaced even if no samples are written to
    /// it. Only [`Commit::Merge`] needs this, because it keeps ranges that are neither written nor declared.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`write`](Self::write) for the partition and the range.
    pub fn replaces(&mut self, key: &PartitionKey, range: u32) -> Result<()> {
        self.check_place(key, range)?;
        let in_partition = self.written.entry(key.clone()).or_default();
        in_partition.entry(range).or_insert_with(|| WrittenBucket::empty(key.clone(), range));
        Ok(())
    }

    /// Adds the vocabulary `name`, which features of the schema refer to and which assigned the ids of the
    /// samples. In an existing dataset it replaces the vocabulary with this name, which it must extend. A
    /// vocabulary with the same content changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] and [`Error::Fault`] if its file cannot be written.
    pub fn add_vocabulary(&mut self, name: &str, vocabulary: &Vocabulary) -> Result<()> {
        let known = self.appended_to().and_then(|base| base.vocabularies.get(name));
        let former = known.map(|file| file.former.clone()).unwrap_or_default();
        self.add_vocabulary_of(name, vocabulary, former)
    }

    /// Adds a vocabulary of which originals were removed. `former` describes the originals before each removal.
    pub(crate) fn add_vocabulary_of(
        &mut self,
        name: &str,
        vocabulary: &Vocabulary,
        former: Vec<FormerOriginals>,
    ) -> Result<()> {
        let BucketWriters { storage, attempt, .. } = &self.writers;
        let path = vocabulary_file(name, attempt);
        self.paths.push(path.clone());
        let file = VocabularyFile { former, ..vocabulary.write(storage, &path)? };
        self.vocabularies.insert(name.to_owned(), file);
        Ok(())
    }

    /// Sets the expected number and digest of all samples. If the written samples differ,
    /// [`finish`](Self::finish) does not commit.
    pub fn expect(&mut self, samples: u64, digest: Digest) {
        self.expected = Some((samples, digest));
    }

    fn check_place(&self, key: &PartitionKey, range: u32) -> Result<()> {
        let ranges = self.options.buckets.ranges();
        if range >= ranges {
            let message = format!("there is no range {range} of buckets, only {ranges}");
            return Err(Error::schema(message, "write to the range of the session's hash"));
        }
        let Some(message) = misfit(&self.partition_columns, key) else { return Ok(()) };
        let message = format!("the partition `{key}` does not fit: {message}");
        let hint = "partition by the columns of the dataset, with values of their types, or replace the whole dataset";
        Err(Error::schema(message, hint))
    }

    /// Begins a range of buckets of a partition.
    fn enter(&mut self, key: &PartitionKey, range: u32) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| open.place.0 == *key && open.place.1 == range) {
            return Ok(());
        }
        self.close_range()?;
        self.check_place(key, range)?;
        let place = (key.clone(), range);
        if !self.entered.insert(place.clone()) {
            return Err(Error::column(
                &key.to_string(),
                "the samples of the partition or of one of its buckets do not come together",
                "sort the samples by partition and bucket before writing",
            ));
        }
        let samples = SampleWriter::new(self.writers.range(key, range));
        self.open = Some(OpenRange { place, samples });
        Ok(())
    }

    /// Adds a range of buckets that was written by [`BucketWriters`] with the same location, schema and
    /// options. Its files are removed if this writer is dropped before it commits.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the range does not exist, was already added or written, or has a key that does not
    /// fit (see [`write`](Self::write)).
    pub fn add(&mut self, range: WrittenBucket) -> Result<()> {
        self.owns(&range);
        self.add_part(range)
    }

    /// Works like [`add`](Self::add), but the files are kept if this writer is dropped, so that another
    /// writer can commit them.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`add`](Self::add).
    pub fn add_part(&mut self, range: WrittenBucket) -> Result<()> {
        self.check_place(&range.key, range.range)?;
        if !self.entered.insert((range.key.clone(), range.range)) {
            let (key, number) = (&range.key, range.range);
            let partition = if key.columns().is_empty() { String::new() } else { format!(" of `{key}`") };
            let message = format!("the range {number} of buckets{partition} was written twice");
            let hint = "commit what one writer has written of each range, and not of another one too";
            return Err(Error::schema(message, hint));
        }
        self.put(range);
        Ok(())
    }

    /// Registers the files of the range for removal if this writer is dropped.
    pub(crate) fn owns(&mut self, range: &WrittenBucket) {
        self.paths.extend(range.paths().map(str::to_owned));
    }

    /// Adds a range of buckets whose files are written in place of the sets `replaced` of the range. The other sets
    /// stay. Only [`Commit::Forget`] and [`Commit::Compact`] need this.
    pub(crate) fn add_rewritten<'s>(
        &mut self,
        range: WrittenBucket,
        replaced: impl Iterator<Item = &'s FileSet>,
    ) -> Result<()> {
        self.replaced.extend(replaced.map(|set| set.path().to_owned()));
        self.add_part(range)
    }

    /// Returns a writer for some samples of a range of buckets. Its files have unique names, and no columns of the
    /// features `lacks`.
    pub(crate) fn some_of_range(&self, key: &PartitionKey, range: u32, lacks: &[String]) -> SampleWriter {
        let writers = self.writers.for_part(1).without(&self.schema, lacks);
        SampleWriter::new(writers.range(key, range))
    }

    fn put(&mut self, range: WrittenBucket) {
        self.written.entry(range.key.clone()).or_default().insert(range.range, range);
    }

    /// Waits until all samples are in complete files.
    fn complete(&mut self) -> Result<()> {
        self.close_range()?;
        let ended = self.closing.finish();
        self.add_closed();
        ended
    }

    /// Ends the open range. A separate thread completes its files.
    fn close_range(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        self.closing.close(open.samples.end()?)?;
        self.add_closed();
        Ok(())
    }

    /// Adds the ranges whose files are complete.
    fn add_closed(&mut self) {
        while let Some(written) = self.closing.take() {
            self.owns(&written);
            self.put(written);
        }
    }
}

impl Drop for DatasetWriter {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Removes its files, including those of ranges that are still being closed.
        drop(self.open.take());
        let _ = self.closing.finish();
        self.add_closed();
        self.writers.storage.clean_up(std::mem::take(&mut self.paths));
        self.writers.storage.remove_empty_folders(&WRITTEN_FOLDERS);
    }
}

/// Removes the files of a failed writer of some ranges or columns, and then empty folders.
fn discard(storage: &Storage, paths: Vec<String>) {
    if !paths.is_empty() {
        storage.clean_up(paths);
        storage.remove_empty_folders(&WRITTEN_FOLDERS);
    }
}

/// Returns the newest snapshot if there is one, after checking that the options allow to replace or extend
/// it.
fn base(storage: &Storage, schema: &Schema, options: &WriterOptions) -> Result<Option<Snapshot>> {
    match (latest_head(storage)?, options.commit) {
        (Some(_), Commit::Create) => {
            let overwrite = option("commit").set_to("overwrite");
            let hint = text!["it is a dataset; choose another location, or replace it with ", overwrite];
            Err(onefold_storage::Error::exists(storage.location(), hint).into())
        }
        (Some(base), Commit::Overwrite) => Ok(Some(base)),
        (Some(_), Commit::Alter) => {
            let hint = "use `append`, `replace` or `merge`";
            Err(Error::schema("a writer of samples does not alter features", hint))
        }
        (Some(base), _) => {
            check_appendable(storage, &base, schema, options)?;
            Ok(Some(base))
        }
        (None, Commit::Columns | Commit::Forget | Commit::Compact) => Err(not_a_dataset(storage)),
        (None, _) => check_new_location(storage).map(|()| None),
    }
}

/// Checks that partitions written with these options can be added to `base`.
fn check_appendable(
    storage: &Storage,
    base: &Snapshot,
    schema: &Schema,
    options: &WriterOptions,
) -> Result<()> {
    let location = storage.location().display();
    let refused = |what: &str, hint: String| {
        let message = format!("`{location}` has another {what}");
        Err(Error::schema(message, hint))
    };
    let differs = |what: &str| {
        let what = format!("{what} than the samples to append");
        refused(&what, SAME_CONFIGURATION.to_owned())
    };
    if base.layout != options.layout {
        return differs("layout");
    }
    if base.order != options.order {
        return differs("order");
    }
    if let (Some(old), Some(new)) = (&base.sessions, &options.sessions)
        && old != new
    {
        return differs("`[session]` (key, or user and gap)");
    }
    if let Some((difference, hint)) = misfit_of_schemas(&base.schema, schema) {
        return refused(&format!("schema than the samples to append: {difference}"), hint);
    }
    let added = schema.further_features(&base.schema);
    if options.commit == Commit::Merge && !added.is_empty() {
        let difference = format!("the samples have the further features `{}`", added.join("`, `"));
        let hint =
            "a merge adds no features: append a partition that has them first, or merge samples without them";
        return refused(&format!("schema than the samples to merge: {difference}"), hint.to_owned());
    }
    Ok(())
}

pub(crate) fn session_ids(batch: &RecordBatch) -> &[i64] {
    batch.column_by_name(SESSION_COLUMN).map_or(&[], |column| column.as_primitive::<Int64Type>().values())
}

fn times(batch: &RecordBatch) -> &[i64] {
    let column = batch.column_by_name(TIME_COLUMN);
    column.map_or(&[], |column| column.as_primitive::<TimestampMicrosecondType>().values())
}

#[cfg(test)]
mod append_tests;
#[cfg(test)]
mod column_tests;
#[cfg(test)]
mod tests;
