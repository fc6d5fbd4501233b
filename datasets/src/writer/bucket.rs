//! Writes the samples of a range of buckets of a partition: cuts them into row groups and files.

use std::collections::VecDeque;
use std::sync::Arc;

use onefold_storage::{Storage, random_name};

use super::columns::FileColumns;
use super::data_file::{DataFileWriter, Decode, Format, Pushed};
use super::encoders::Encoders;
use super::order::SampleOrder;
use super::{WAITING_PART, WriterOptions, discard};
use crate::names::data_file;
use crate::{Buckets, PartitionKey, Result, Schema, WrittenBucket};

/// The largest target size of a row group in decoded bytes. A row group can reach twice this size, for which
/// 32-bit offsets still suffice.
const MOST_ROW_GROUP_BYTES: usize = 4 << 30;

/// Creates the writers of a dataset's ranges of buckets, which can run in parallel.
#[derive(Debug, Clone)]
pub struct BucketWriters {
    pub(super) storage: Storage,
    /// A part of all file names that no other writer uses.
    pub(super) attempt: String,
    pub(super) format: Arc<Format>,
    pub(super) buckets: Buckets,
    /// The number of threads that these writers keep busy. It limits the number of waiting row groups.
    pub(super) threads: usize,
}

impl BucketWriters {
    /// Creates writers of ranges of buckets of the dataset in `storage` with these options and encoders. The
    /// options' number of threads is ignored. Several such writers may write the same range, even at the same
    /// time, as repeated attempts of a task do, because their file names differ. A written range becomes
    /// visible when one of them is [added](super::DatasetWriter::add) and committed.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if no dataset can have the schema or the buckets, or if the column
    /// order contains an unknown column.
    pub fn new(storage: Storage, schema: Schema, options: WriterOptions, encoders: Encoders) -> Result<Self> {
        schema.validate()?;
        options.check_buckets()?;
        let (buckets, threads) = (options.buckets, encoders.threads());
        let storage = storage.with_upload_parts(encoders.upload_parts.clone());
        let columns = FileColumns::new(&schema, &options)?;
        let format = Arc::new(Format::new(&schema, columns, &[], options, encoders));
        Ok(Self { storage, attempt: random_name(), format, buckets, threads })
    }

    /// Returns writers with other file names for one of `parts` parts of the dataset's samples. All parts
    /// share the threads of these writers.
    #[must_use]
    pub fn for_part(&self, parts: usize) -> Self {
        let threads = self.format.encoders.threads().div_ceil(parts.max(1));
        Self { attempt: random_name(), threads, ..self.clone() }
    }

    /// Returns these writers for files without columns of the features `lacks` of the dataset's `schema`. Their values
    /// may be computed later.
    #[must_use]
    pub fn without(&self, schema: &Schema, lacks: &[String]) -> Self {
        match lacks {
            [] => self.clone(),
            _ => Self { format: Arc::new(self.format.without(schema, lacks)), ..self.clone() },
        }
    }

    /// Creates the writer of a range of buckets of a partition. A range must have only one writer.
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

/// Writes the samples of one range of buckets of a partition. Its row groups are decoded and encoded in
/// parallel, and appended to its files in order, so the output depends neither on the number of threads nor
/// on the division into batches.
///
/// Each sample is first announced with [`push`](Self::push), which determines where row groups end. A file
/// appears in the storage when it is full. The files are removed if the writer is dropped before
/// [`finish`](Self::finish).
#[derive(Debug)]
pub struct BucketWriter {
    writers: BucketWriters,
    order: SampleOrder,
    /// The samples that were pushed since the end of the last row group.
    pushed: Pushed,
    /// A row group that has ended but has not been written yet.
    ended: Option<Pushed>,
    open: Option<DataFileWriter>,
    /// Files that get no more row groups.
    ending: VecDeque<DataFileWriter>,
    /// The paths of all started files, for removal if the writer fails.
    started: Vec<String>,
    written: WrittenBucket,
}

impl BucketWriter {
    /// Announces the next sample and its decoded size in bytes. If the result is `true`, a row group ends
    /// before this sample, and the caller must write it with [`write_row_group`](Self::write_row_group)
    /// before it pushes the next sample.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the sample belongs before the previous one.
    pub fn push(&mut self, session: i64, time: i64, bytes: usize) -> Result<bool> {
        let sessions = self.order.sessions;
        let starts_run = self.order.sample(session, time)?;
        let ends = self.row_group_is_full(starts_run);
        if ends {
            self.ended = Some(std::mem::take(&mut self.pushed));
        }
        self.pushed.bytes += bytes;
        self.pushed.sessions += self.order.sessions - sessions;
        Ok(ends)
    }

    /// Returns whether the current row group ends before the next sample.
    fn row_group_is_full(&self, starts_session: bool) -> bool {
        let options = &self.writers.format.options;
        let target = options.row_group_bytes.clamp(1, MOST_ROW_GROUP_BYTES);
        let boundary = starts_session || !options.order.is_clustered();
        self.pushed.bytes >= target && boundary || self.pushed.bytes >= target.saturating_mul(2)
    }

    /// Writes a row group: the samples that were pushed since the previous row group, without the last one if
    /// it begins the next row group. The function returns while the row group is still being decoded and
    /// encoded, but waits if the encoders already work on the maximum number of row groups.
    ///
    /// # Errors
    ///
    /// [`Error::Storage`](crate::Error::Storage) and [`Error::Fault`](crate::Error::Fault) if a file cannot be
    /// written, and the errors of decoding. They may concern an earlier row group.
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

    /// Returns the path of the next data file in the dataset.
    fn next_path(&self) -> String {
        let BucketWriters { attempt, buckets, .. } = &self.writers;
        data_file(&self.written.key, self.written.range, *buckets, self.started.len(), attempt)
    }

    /// Appends the encoded row groups. If too many are waiting, it also waits until the first one is encoded.
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

    /// Completes the files. It must be called after the last row group was written.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`write_row_group`](Self::write_row_group).
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
        // Incomplete files do not exist in the storage yet.
        drop(self.open.take());
        self.ending.clear();
        discard(&self.writers.storage, std::mem::take(&mut self.started));
    }
}
