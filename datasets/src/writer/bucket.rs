//! Writes the samples of a range of buckets of a partition: cuts them into row groups and files.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use onefold_storage::{Storage, random_name};
use parquet::basic::ZstdLevel;

use super::columns::FileColumns;
use super::count::Counter;
use super::data_file::DataFileWriter;
use super::encoders::Encoders;
use super::order::SampleOrder;
use super::{WAITING_PART, WriterOptions};
use crate::names::{WRITTEN_FOLDERS, data_file};
use crate::schema::with_sample_keys;
use crate::{Buckets, Error, PartitionKey, Result, Schema, WrittenBucket};

/// A row group has at most so many decoded bytes: ids of twice as many are addressed by 32-bit offsets.
const MOST_ROW_GROUP_BYTES: usize = 4 << 30;

/// Gives the samples of a row group, in batches with the columns of [`Schema::to_arrow`] and, where the dataset has it,
/// [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN); lists may be `ListView`s.
pub type Decode = Box<
    dyn FnOnce() -> std::result::Result<Vec<RecordBatch>, Box<dyn std::error::Error + Send + Sync>> + Send,
>;

/// What all files of a dataset have in common, and the threads that encode them.
#[derive(Debug)]
pub(super) struct Format {
    pub(super) columns_of_samples: SchemaRef,
    options: WriterOptions,
    pub(super) columns: FileColumns,
    pub(super) counter: Counter,
    /// The samples' columns of dense features.
    pub(super) dense: Vec<usize>,
    pub(super) level: ZstdLevel,
    pub(super) encoders: Encoders,
}

impl Format {
    /// The format of the files of a dataset at `location`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a column order that names no column.
    pub(super) fn new(
        location: &Path,
        schema: &Schema,
        options: WriterOptions,
        encoders: Encoders,
    ) -> Result<Self> {
        let columns = FileColumns::new(schema, &options)?;
        let level =
            ZstdLevel::try_new(options.zstd_level).map_err(|error| Error::write_parquet(location, error))?;
        Ok(Self {
            columns_of_samples: with_sample_keys(schema.to_arrow(), options.sample_keys),
            columns,
            counter: Counter::new(schema),
            dense: dense_columns(schema),
            level,
            encoders,
            options,
        })
    }
}

impl Format {
    /// The same for files that have only these `columns` of samples. Features that are lacking then, beside all files, are
    /// not counted.
    pub(super) fn of_some(&self, schema: &Schema, columns: FileColumns, lacks: &[String]) -> Self {
        let counted = self
            .dense
            .iter()
            .filter(|place| !lacks.iter().any(|name| name == self.columns_of_samples.field(**place).name()));
        Self {
            columns_of_samples: Arc::clone(&self.columns_of_samples),
            columns,
            counter: Counter::without(schema, lacks),
            dense: counted.copied().collect(),
            level: self.level,
            encoders: self.encoders.clone(),
            options: self.options.clone(),
        }
    }
}

/// Where the dense features stand among the columns of [`Schema::to_arrow`].
fn dense_columns(schema: &Schema) -> Vec<usize> {
    let columns = schema.to_arrow();
    schema.dense.iter().filter_map(|name| columns.index_of(name).ok()).collect()
}

/// Makes the writers of a dataset's ranges of buckets, which may be at work at the same time.
#[derive(Debug, Clone)]
pub struct BucketWriters {
    pub(super) storage: Storage,
    /// A part of the names of all files, which no other writer uses.
    pub(super) attempt: String,
    pub(super) format: Arc<Format>,
    pub(super) buckets: Buckets,
    /// The part of the threads that these writers keep busy: what waits for them is bounded by it.
    pub(super) threads: usize,
}

impl BucketWriters {
    /// Writers of ranges of buckets of the dataset in `storage`, as the options say, with these encoders; the options'
    /// threads are not used. Several may write the same range in turns or at the same time, as tasks that are tried
    /// again do: the names of their files differ. What they have written becomes visible when one of them is
    /// [added](super::DatasetWriter::add) and committed.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a schema or buckets that no dataset can have, or a column order that names no column.
    pub fn new(storage: Storage, schema: Schema, options: WriterOptions, encoders: Encoders) -> Result<Self> {
        schema.validate()?;
        options.check_buckets()?;
        let (buckets, threads) = (options.buckets, encoders.threads());
        let storage = storage.with_upload_parts(encoders.upload_parts.clone());
        let format = Arc::new(Format::new(storage.location(), &schema, options, encoders)?);
        Ok(Self { storage, attempt: random_name(), format, buckets, threads })
    }

    /// Writers for one of so many `parts` of the dataset's samples, whose files have other names. All parts share the
    /// threads of these writers.
    #[must_use]
    pub fn for_part(&self, parts: usize) -> Self {
        let threads = self.format.encoders.threads().div_ceil(parts.max(1));
        Self { attempt: random_name(), threads, ..self.clone() }
    }

    /// The writer of a range of buckets of a partition. A range has one writer.
    pub fn range(&self, key: &PartitionKey, range: u32) -> BucketWriter {
        BucketWriter {
            order: SampleOrder::new(self.format.options.order, self.buckets),
            written: WrittenBucket::empty(key.clone(), range),
            writers: self.clone(),
            pushed: Pushed::default(),
            ended: None,
            open: None,
            ending: VecDeque::new(),
            started: Vec::new(),
        }
    }
}

/// Writes the samples of one range of buckets of a partition. Its row groups are decoded and encoded in parallel, and
/// appended to its files in their order: what is written depends neither on the number of threads nor on the batches.
///
/// The samples are announced one by one with [`push`](Self::push), which says where row groups end. The files appear in
/// the storage as they become full; they are removed again if the writer is dropped before [`finish`](Self::finish).
#[derive(Debug)]
pub struct BucketWriter {
    writers: BucketWriters,
    order: SampleOrder,
    /// The samples that were pushed since the last row group ended.
    pushed: Pushed,
    /// The row group that has ended and is still to be written.
    ended: Option<Pushed>,
    open: Option<DataFileWriter>,
    /// Files that get no more row groups.
    ending: VecDeque<DataFileWriter>,
    /// The paths of all files that were started, for the case that the writer fails.
    started: Vec<String>,
    written: WrittenBucket,
}

/// The samples of a row group that were pushed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pushed {
    /// Their decoded bytes.
    pub(super) bytes: usize,
    /// Sessions that begin with one of them.
    pub(super) sessions: u64,
}

impl BucketWriter {
    /// Announces the next sample, which has so many decoded bytes. If this gives `true`, a row group ends before the
    /// sample, and has to be written with [`write_row_group`](Self::write_row_group) before the next one is pushed.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a sample that belongs before the one that came before it.
    pub fn push(&mut self, session: i64, time: i64, bytes: usize) -> Result<bool> {
        let sessions = self.order.sessions();
        let starts_run = self.order.sample(session, time)?;
        let ends = self.row_group_is_full(starts_run);
        if ends {
            self.ended = Some(std::mem::take(&mut self.pushed));
        }
        self.pushed.bytes += bytes;
        self.pushed.sessions += self.order.sessions() - sessions;
        Ok(ends)
    }

    /// Whether the current row group ends before a sample that starts a session or not.
    fn row_group_is_full(&self, starts_session: bool) -> bool {
        let options = &self.writers.format.options;
        let target = options.row_group_bytes.clamp(1, MOST_ROW_GROUP_BYTES);
        let boundary = starts_session || !options.order.is_clustered();
        self.pushed.bytes >= target && boundary || self.pushed.bytes >= target.saturating_mul(2)
    }

    /// Writes a row group: the samples that were pushed since the row group before it; without the last one if that
    /// begins the next row group. Returns while it is decoded and encoded, but waits while the encoders work at as many
    /// row groups as they may.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`] and [`Error::Fault`] if a file cannot be written, and the errors of decoding, also for one
    /// of the row groups before.
    pub fn write_row_group(&mut self, decode: Decode) -> Result<()> {
        let pushed = self.ended.take().unwrap_or_else(|| std::mem::take(&mut self.pushed));
        self.append_encoded()?;
        if self.open.is_none() {
            let path = self.next_path();
            self.started.push(path.clone());
            let BucketWriters { storage, format, buckets, .. } = &self.writers;
            self.open = Some(DataFileWriter::create(storage, path, format, *buckets)?);
        }
        if let Some(open) = &mut self.open {
            open.write_row_group(pushed, decode)?;
            if open.bytes >= self.writers.format.options.file_bytes {
                self.ending.extend(self.open.take());
            }
        }
        Ok(())
    }

    /// The next data file's path in the dataset.
    fn next_path(&self) -> String {
        let BucketWriters { attempt, buckets, .. } = &self.writers;
        data_file(&self.written.key, self.written.range, *buckets, self.started.len(), attempt)
    }

    /// Appends what is encoded; waits for the first row group if too many wait for it.
    fn append_encoded(&mut self) -> Result<()> {
        let most = WAITING_PART * self.writers.threads;
        while let Some(mut first) = self.ending.pop_front() {
            first.append_encoded()?;
            if first.encoding() > 0 && self.waiting() + first.encoding() < most {
                self.ending.push_front(first);
                return Ok(());
            }
            self.close(first)?;
        }
        let Some(open) = &mut self.open else { return Ok(()) };
        open.append_encoded()?;
        while open.encoding() >= most {
            open.append_next()?;
        }
        Ok(())
    }

    fn waiting(&self) -> usize {
        self.ending.iter().chain(&self.open).map(DataFileWriter::encoding).sum()
    }

    fn close(&mut self, file: DataFileWriter) -> Result<()> {
        let (set, statistics) = file.finish()?;
        self.written.files.push(set);
        self.written.statistics.extend(statistics);
        Ok(())
    }

    /// Ends the files, after the last row group was written.
    ///
    /// # Errors
    ///
    /// As [`write_row_group`](Self::write_row_group).
    pub fn finish(mut self) -> Result<WrittenBucket> {
        self.ending.extend(self.open.take());
        while let Some(file) = self.ending.pop_front() {
            self.close(file)?;
        }
        self.started.clear();
        let (key, range) = (self.written.key.clone(), self.written.range);
        Ok(std::mem::replace(&mut self.written, WrittenBucket::empty(key, range)))
    }
}

impl Drop for BucketWriter {
    fn drop(&mut self) {
        // A file that is being written is not there yet.
        drop(self.open.take());
        self.ending.clear();
        if !self.started.is_empty() {
            self.writers.storage.clean_up(std::mem::take(&mut self.started));
            self.writers.storage.remove_empty_folders(&WRITTEN_FOLDERS);
        }
    }
}
