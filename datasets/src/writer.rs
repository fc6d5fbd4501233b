//! The writer of datasets: Parquet files by partition and bucket, row groups that start at session boundaries,
//! checksums, statistics, and the commit.
//!
//! ```text
//!  write ─▶ conform, check the order, cut into row groups            the caller's thread
//!             │ (a row group of rows, views as they came)
//!             ▼
//!           count + digest ─┐   every column: fold or expand, encode    `threads`, one row group at a time
//!             ▼             └──────────▼
//!           statistics by bucket     upload ─▶ SHA-256 ─▶ snapshot
//! ```
//!
//! Files have names that no other writer uses, so writers never disturb each other, nor readers. A killed writer leaves
//! files that no snapshot names; [`vacuum`](crate::vacuum) removes them.

mod columns;
mod count;
mod data_file;
mod encodings;
mod finish;
mod options;
mod order;
mod row_group;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, Int64Type, SchemaRef, TimestampMicrosecondType};
use parquet::basic::ZstdLevel;

use self::columns::FileColumns;
pub(crate) use self::count::Counter;
use self::data_file::{DataFileWriter, Shared};
pub use self::finish::Written;
pub use self::options::{Commit, WriterOptions};
use self::order::SampleOrder;
use crate::conform::conform;
use crate::digest::Digest;
use crate::lists::Lists;
use crate::schema::with_sample_keys;
use crate::snapshot::{Bucket, Snapshot, latest_head};
use crate::storage::Storage;
use crate::{
    Error, MOST_BUCKETS, PartitionKey, Result, SESSION_COLUMN, Schema, TIME_COLUMN, Vocabulary,
    VocabularyFile, bucket_of_session, percent, random_name,
};

/// The folder of the data files in a dataset.
pub(crate) const DATA: &str = "data";
/// The folder of the vocabularies in a dataset.
pub(crate) const VOCABULARIES: &str = "vocabularies";

/// A row group has at most so many decoded bytes: ids of twice as many are addressed by 32-bit offsets.
const MOST_ROW_GROUP_BYTES: usize = 4 << 30;

/// Writes a dataset, or partitions of one. Nothing is visible before [`finish`](Self::finish); a writer that is dropped
/// before it removes the files it wrote.
#[derive(Debug)]
pub struct DatasetWriter {
    storage: Storage,
    /// A part of the names of all files that this writer writes, and no other.
    attempt: String,
    schema: Schema,
    arrow_schema: SchemaRef,
    options: WriterOptions,
    shared: Arc<Shared>,
    /// The newest snapshot when the writer was created, without its lists.
    base: Option<Snapshot>,
    /// What is written, by partition and bucket.
    written: BTreeMap<PartitionKey, BTreeMap<u32, WrittenBucket>>,
    vocabularies: BTreeMap<String, VocabularyFile>,
    /// Paths of all files that were started, for the case that the writer fails.
    paths: Vec<String>,
    expected: Option<(u64, Digest)>,
    /// The partition and bucket that are being written, and the order of their samples so far.
    place: Option<(PartitionKey, u32)>,
    order: SampleOrder,
    open: Option<DataFileWriter>,
    finished: bool,
}

/// One bucket of a partition: its statistics and files.
#[derive(Debug)]
struct WrittenBucket {
    bucket: Bucket,
    files: Vec<crate::DataFile>,
}

impl DatasetWriter {
    /// Starts writing to the dataset at `location`, a local path or a URL.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if `location` holds a dataset that may be neither replaced nor appended to, or holds something
    /// that is no dataset; [`Error::Schema`] for a schema that no dataset can have, a column order that names no
    /// column, or a dataset of another schema, layout, order, definition of sessions or version to append to;
    /// [`Error::Location`] and [`Error::Read`] if the storage cannot be reached.
    pub fn create(location: &Path, schema: Schema, options: WriterOptions) -> Result<Self> {
        Self::create_in(Storage::open(location)?, schema, options)
    }

    /// As [`create`](Self::create), in an open storage.
    ///
    /// # Errors
    ///
    /// As [`create`](Self::create).
    pub fn create_in(storage: Storage, schema: Schema, mut options: WriterOptions) -> Result<Self> {
        schema.validate()?;
        let base = base(&storage, &schema, &options)?;
        let appended_to = base.as_ref().filter(|_| options.commit.keeps_others());
        options.buckets = appended_to.map_or(options.buckets, |base| base.buckets).clamp(1, MOST_BUCKETS);
        options.sample_keys = appended_to.map_or(options.sample_keys, |base| base.sample_keys);
        let columns = FileColumns::new(&schema, &options)?;
        let level = ZstdLevel::try_new(options.zstd_level)
            .map_err(|error| Error::write_parquet(storage.location(), error))?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1));
        let pool =
            pool.thread_name(|i| format!("onefold-write-{i}")).build().map_err(std::io::Error::other)?;
        let dense = dense_columns(&schema);
        let shared = Arc::new(Shared { columns, counter: Counter::new(&schema), dense, level, pool });
        Ok(Self {
            storage,
            attempt: random_name(),
            arrow_schema: with_sample_keys(schema.to_arrow(), options.sample_keys),
            schema,
            order: SampleOrder::new(options.order),
            options,
            shared,
            base,
            written: BTreeMap::new(),
            vocabularies: BTreeMap::new(),
            paths: Vec::new(),
            expected: None,
            place: None,
            open: None,
            finished: false,
        })
    }

    /// The schema of what is written.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The snapshot that is appended to, without the partitions in its lists.
    pub fn appended_to(&self) -> Option<&Snapshot> {
        self.base.as_ref().filter(|_| self.options.commit.keeps_others())
    }

    /// The number of buckets: that of the dataset that is appended to, or else that of the options.
    pub fn buckets(&self) -> u32 {
        self.options.buckets
    }

    /// The dataset's partition columns, also if nothing is written.
    fn partition_columns(&self) -> Vec<&str> {
        let old = self.base.as_ref().filter(|_| self.options.commit.keeps_others());
        match (old, self.written.keys().next()) {
            (Some(old), _) if !old.partition_columns.is_empty() || old.statistics.samples > 0 => {
                old.partition_columns.iter().map(String::as_str).collect()
            }
            (_, Some(key)) => key.column_names().collect(),
            _ => Vec::new(),
        }
    }

    /// Sets the number of buckets of a new dataset, before anything is written. A dataset that is appended to keeps its
    /// own.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`] if it is 0 or more than [`MOST_BUCKETS`].
    pub fn set_buckets(&mut self, buckets: u32) -> Result<()> {
        if !(1..=MOST_BUCKETS).contains(&buckets) {
            let message = format!("a dataset cannot have {buckets} buckets");
            return Err(Error::Schema { message, hint: format!("choose 1 to {MOST_BUCKETS}") });
        }
        if !self.options.commit.keeps_others() || self.base.is_none() {
            self.options.buckets = buckets;
        }
        Ok(())
    }

    /// Appends samples of a partition. Partitions come one after the other, in each of them the
    /// [buckets](crate::bucket_of_session) of the sessions, and in each of those the samples in the order that the
    /// options name. `batch` has the columns of [`Schema::to_arrow`] and, where the dataset has it,
    /// [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN); lists may also be `ListView`s, which are not expanded before
    /// their row group is encoded.
    ///
    /// # Errors
    ///
    /// [`Error::Column`] if the columns differ, samples do not come in their order, or a bucket comes back after
    /// another one; [`Error::Schema`] if the partition columns are not those of the dataset that is appended to;
    /// [`Error::Write`], [`Error::Store`] and [`Error::Parquet`] if a file cannot be written (a full disk, say), also
    /// for one of the row groups before.
    pub fn write(&mut self, key: &PartitionKey, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = conform(batch, &self.arrow_schema)?;
        let buckets = self.options.buckets;
        let bucket = |session: &i64| bucket_of_session(*session, buckets);
        let mut start = 0;
        for run in session_ids(&batch).chunk_by(|a, b| bucket(a) == bucket(b)) {
            self.write_bucket(key, bucket(&run[0]), &batch.slice(start, run.len()))?;
            start += run.len();
        }
        Ok(())
    }

    fn write_bucket(&mut self, key: &PartitionKey, bucket: u32, batch: &RecordBatch) -> Result<()> {
        self.enter(key, bucket)?;
        let (sessions, row_bytes) = (session_ids(batch), decoded_row_bytes(batch));
        let starts = self.order.push(sessions, times(batch))?;
        let (mut start, mut bytes) = (0, 0);
        for row in 0..batch.num_rows() {
            if self.row_group_is_full(bytes, starts[row]) {
                self.append(batch, start..row, bytes)?;
                self.end_row_group()?;
                (start, bytes) = (row, 0);
            }
            bytes += row_bytes[row];
        }
        self.append(batch, start..batch.num_rows(), bytes)
    }

    /// Declares that what is written replaces this bucket of this partition, even if nothing is written to it. Needed
    /// for [`Commit::Merge`] alone, where buckets that are neither written nor declared are kept.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write) for the partition and the bucket.
    pub fn replaces(&mut self, key: &PartitionKey, bucket: u32) -> Result<()> {
        self.check_place(key, bucket)?;
        self.written
            .entry(key.clone())
            .or_default()
            .entry(bucket)
            .or_insert_with(|| WrittenBucket::new(bucket));
        Ok(())
    }

    /// Adds the vocabulary `name`, which features of the schema name and whose ids the samples have. Of a dataset that
    /// is appended to, it replaces the vocabulary of that name, which it must extend.
    ///
    /// # Errors
    ///
    /// [`Error::Write`], [`Error::Store`] and [`Error::Parquet`] if its file cannot be written.
    pub fn add_vocabulary(&mut self, name: &str, vocabulary: &Vocabulary) -> Result<()> {
        let path = format!("{VOCABULARIES}/{}-{}.parquet", percent::encode(name), self.attempt);
        self.paths.push(path.clone());
        let file = vocabulary.write(&self.storage, &path)?;
        self.vocabularies.insert(name.to_owned(), file);
        Ok(())
    }

    /// Says which samples are to be written in all; if they are others, [`finish`](Self::finish) does not commit.
    pub fn expect(&mut self, samples: u64, digest: Digest) {
        self.expected = Some((samples, digest));
    }

    fn check_place(&self, key: &PartitionKey, bucket: u32) -> Result<()> {
        if bucket >= self.options.buckets {
            let message = format!("there is no bucket {bucket}, only {}", self.options.buckets);
            return Err(Error::Schema {
                message,
                hint: "write to the bucket of the session's hash".to_owned(),
            });
        }
        let columns = self.partition_columns();
        if key.column_names().eq(columns.iter().copied())
            || columns.is_empty() && self.written.is_empty() && !self.appends_to_samples()
        {
            return Ok(());
        }
        let columns = match columns.as_slice() {
            [] => "not partitioned".to_owned(),
            columns => format!("partitioned by `{}`", columns.join("`, `")),
        };
        let message = format!("the partition `{key}` does not fit: the dataset is {columns}");
        let hint = "partition by the same columns as the dataset, or replace the whole dataset";
        Err(Error::Schema { message, hint: hint.to_owned() })
    }

    fn appends_to_samples(&self) -> bool {
        self.options.commit.keeps_others()
            && self.base.as_ref().is_some_and(|base| base.statistics.samples > 0)
    }

    fn enter(&mut self, key: &PartitionKey, bucket: u32) -> Result<()> {
        if self.place.as_ref().is_some_and(|(entered, number)| entered == key && *number == bucket) {
            return Ok(());
        }
        self.check_place(key, bucket)?;
        let in_partition = self.written.entry(key.clone()).or_default();
        let entered = in_partition.entry(bucket).or_insert_with(|| WrittenBucket::new(bucket));
        if entered.bucket.samples > 0 {
            return Err(Error::Column {
                column: key.to_string(),
                message: "the samples of the partition or of one of its buckets do not come together"
                    .to_owned(),
                hint: "sort the samples by partition and bucket before writing".to_owned(),
            });
        }
        self.close_file()?;
        self.place = Some((key.clone(), bucket));
        self.order = SampleOrder::new(self.options.order);
        Ok(())
    }

    /// Whether the current row group, with `bytes` more in it, ends before a sample that starts a session or not.
    fn row_group_is_full(&self, bytes: usize, starts_session: bool) -> bool {
        let bytes = bytes.saturating_add(self.open.as_ref().map_or(0, |open| open.group_bytes));
        let target = self.options.row_group_bytes.clamp(1, MOST_ROW_GROUP_BYTES);
        let boundary = starts_session || !self.options.order.is_clustered();
        bytes >= target && boundary || bytes >= target.saturating_mul(2)
    }

    /// Appends rows of `batch` with `bytes` decoded bytes to the current row group.
    fn append(&mut self, batch: &RecordBatch, rows: std::ops::Range<usize>, bytes: usize) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let rows = batch.slice(rows.start, rows.len());
        let sessions = self.order.sessions();
        let Some(written) = self.entered() else { return Ok(()) };
        written.bucket.samples += rows.num_rows() as u64;
        written.bucket.sessions = sessions;
        if self.open.is_none() {
            let path = self.next_path();
            self.paths.push(path.clone());
            self.open = Some(DataFileWriter::create(&self.storage, path, &self.shared)?);
        }
        if let Some(open) = &mut self.open {
            open.append(rows, bytes);
        }
        Ok(())
    }

    fn entered(&mut self) -> Option<&mut WrittenBucket> {
        let (key, bucket) = self.place.as_ref()?;
        self.written.get_mut(key)?.get_mut(bucket)
    }

    fn end_row_group(&mut self) -> Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.end_row_group()?;
        if open.file_bytes >= self.options.file_bytes {
            self.close_file()?;
        }
        Ok(())
    }

    /// The next data file's path in the dataset.
    fn next_path(&self) -> String {
        let Some((key, bucket)) = &self.place else { return String::new() };
        let number =
            self.written.get(key).and_then(|of| of.get(bucket)).map_or(0, |written| written.files.len());
        let mut folders = vec![DATA.to_owned()];
        folders.extend(Some(key.to_string()).filter(|key| !key.is_empty()));
        folders.extend(bucket_folder(*bucket, self.options.buckets));
        format!("{}/part-{number:05}-{}.parquet", folders.join("/"), self.attempt)
    }

    fn close_file(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let (mut file, counts, dense) = open.finish()?;
        let dense_names = self.schema.dense.clone();
        let names: Vec<String> = self.schema.sparse_features().map(|feature| feature.name.clone()).collect();
        let Some(written) = self.entered() else { return Ok(()) };
        file.bucket = written.bucket.bucket;
        let last_time =
            file.row_groups.listed().into_iter().flatten().map(|row_group| row_group.last_time).max();
        written.bucket.last_time = written.bucket.last_time.max(last_time);
        written.files.push(file);
        for (name, figures) in names.into_iter().zip(&counts.features) {
            written.bucket.features.entry(name).or_default().merge(figures);
        }
        for (name, statistics) in dense_names.into_iter().zip(dense) {
            match written.bucket.dense.entry(name) {
                Entry::Vacant(first) => drop(first.insert(statistics)),
                Entry::Occupied(mut before) => before.get_mut().merge(&statistics),
            }
        }
        written.bucket.digest.merge(counts.digest);
        Ok(())
    }
}

impl WrittenBucket {
    fn new(bucket: u32) -> Self {
        let (features, dense, digest) = (BTreeMap::new(), BTreeMap::new(), Digest::default());
        let bucket = Bucket { bucket, samples: 0, sessions: 0, features, dense, digest, last_time: None };
        Self { bucket, files: Vec::new() }
    }
}

impl Drop for DatasetWriter {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // A file that is being written is not there yet.
        drop(self.open.take());
        self.storage.clean_up(std::mem::take(&mut self.paths));
        self.storage.remove_empty_folders();
    }
}

/// Where the dense features stand among the columns of [`Schema::to_arrow`].
fn dense_columns(schema: &Schema) -> Vec<usize> {
    let columns = schema.to_arrow();
    schema.dense.iter().filter_map(|name| columns.index_of(name).ok()).collect()
}

/// The folder of a bucket in its partition; none where there is one bucket.
fn bucket_folder(bucket: u32, buckets: u32) -> Option<String> {
    let digits = (buckets - 1).to_string().len().max(3);
    (buckets > 1).then(|| format!("bucket={bucket:0digits$}"))
}

/// The newest snapshot, if there is one and it may be replaced or appended to.
fn base(storage: &Storage, schema: &Schema, options: &WriterOptions) -> Result<Option<Snapshot>> {
    let exists = |hint: &str| Error::Exists { path: storage.location().to_owned(), hint: hint.to_owned() };
    match (latest_head(storage)?, options.commit) {
        (Some(_), Commit::Create) => Err(exists(
            "it is a dataset; choose another location, or replace it with the option `commit = overwrite`",
        )),
        (Some(base), Commit::Overwrite) => Ok(Some(base)),
        (Some(base), Commit::Append | Commit::Replace | Commit::Merge) => {
            check_appendable(storage, &base, schema, options)?;
            Ok(Some(base))
        }
        (None, _) => {
            let ours: BTreeSet<&str> = [DATA, VOCABULARIES, crate::snapshot::SNAPSHOTS].into();
            let foreign = storage.entries("")?.into_iter().find(|name| !ours.contains(name.as_str()));
            match foreign {
                None => Ok(None),
                Some(name) => Err(exists(&format!(
                    "it is not a dataset (it holds `{name}`), so nothing is written into it; choose another location"
                ))),
            }
        }
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
    let differs = |what: &str| {
        let message = format!("`{location}` has another {what} than the samples to append");
        let hint = "append with the configuration that the dataset was built with, or build the dataset anew";
        Err(Error::Schema { message, hint: hint.to_owned() })
    };
    if base.snapshot == 0 {
        let message =
            format!("`{location}` is of format version {}, which cannot be appended to", base.format_version);
        let hint = "build the dataset anew; from then on it can be appended to".to_owned();
        return Err(Error::Schema { message, hint });
    }
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
    if base.schema != *schema {
        return differs("schema");
    }
    Ok(())
}

fn session_ids(batch: &RecordBatch) -> &[i64] {
    batch.column_by_name(SESSION_COLUMN).map_or(&[], |column| column.as_primitive::<Int64Type>().values())
}

fn times(batch: &RecordBatch) -> &[i64] {
    let column = batch.column_by_name(TIME_COLUMN);
    column.map_or(&[], |column| column.as_primitive::<TimestampMicrosecondType>().values())
}

/// Decoded bytes of each row of `batch`: 8 for a session id, a time, a kept value and every id, 4 for every float, and
/// those of kept texts.
fn decoded_row_bytes(batch: &RecordBatch) -> Vec<usize> {
    let floats = batch.columns().iter().filter(|column| *column.data_type() == DataType::Float32).count();
    let lists: Vec<Lists> = batch.columns().iter().filter_map(Lists::of).collect();
    let numbers = batch.num_columns() - floats - lists.len();
    let mut bytes = vec![4 * floats + 8 * numbers; batch.num_rows()];
    for column in lists {
        for (row, bytes) in bytes.iter_mut().enumerate() {
            *bytes += 8 * column.size(row);
        }
    }
    for texts in batch.columns().iter().filter_map(|column| column.as_string_opt::<i32>()) {
        let lengths = texts.offsets().windows(2).map(|pair| (pair[1] - pair[0]) as usize);
        bytes.iter_mut().zip(lengths).for_each(|(bytes, length)| *bytes += length);
    }
    bytes
}

#[cfg(test)]
mod append_tests;
#[cfg(test)]
mod column_tests;
#[cfg(test)]
mod tests;
