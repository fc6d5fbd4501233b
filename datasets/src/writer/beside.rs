//! Writes columns for existing samples into new files beside the files of their row groups. The columns
//! belong to new features, or replace the values of existing columns.
//!
//! ```text
//! new columns of a row group ───┬─▶ encode ─▶ new file
//! other columns of the group ───┴─▶ count, digest ─▶ statistics
//! ```
//!
//! The digest of a row group covers all of its columns, so the other columns are read, but they are not
//! rewritten.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use onefold_storage::random_name;

use super::bucket::BucketWriters;
use super::data_file::{DataFileWriter, Pushed};
use super::{DatasetWriter, WAITING_PART, discard};
use crate::names::data_file;
use crate::scan::OpenFiles;
use crate::snapshot::not_a_dataset;
use crate::{ColumnChanges, DataFile, Error, FileSet, PartitionKey, Result, Schema, Snapshot, WrittenBucket};

/// Writes columns of the row groups of a range of buckets. The written files are removed if it is dropped
/// before [`DatasetWriter::add_columns`].
#[derive(Debug)]
pub struct ColumnsWriter {
    writers: BucketWriters,
    schema: Arc<Schema>,
    /// The head of the snapshot with the row groups.
    base: Arc<Snapshot>,
    /// The names of the columns to write.
    columns: Vec<String>,
    /// The file sets whose columns have not been started yet.
    waiting: VecDeque<FileSet>,
    open: Option<OpenSet>,
    written: WrittenBucket,
    /// The completed files.
    files: Vec<DataFile>,
}

/// A file that is being written beside the files of a set.
#[derive(Debug)]
struct OpenSet {
    set: FileSet,
    /// The names of the schema columns in the new file.
    columns: Vec<String>,
    /// The differences from the schema that the set will have with the new file.
    changes: ColumnChanges,
    files: Arc<OpenFiles>,
    beside: DataFileWriter,
    /// The number of row groups written so far.
    row_groups: usize,
}

impl DatasetWriter {
    /// Starts to write `columns` of the row groups of `sets`, which belong to a range of buckets of a
    /// partition, in this order. Columns of features that only some sets lack are written only for these
    /// sets. The sets belong to the snapshot that this writer [appends to](Self::appended_to) with
    /// [`Commit::Columns`](crate::Commit::Columns).
    ///
    /// # Errors
    ///
    /// [`Error::NotADataset`] if there is no dataset.
    pub fn columns(
        &self,
        key: &PartitionKey,
        range: u32,
        sets: Vec<FileSet>,
        columns: &[String],
    ) -> Result<ColumnsWriter> {
        let base = self.appended_to().ok_or_else(|| not_a_dataset(&self.writers.storage))?;
        Ok(ColumnsWriter {
            writers: self.writers.clone(),
            schema: Arc::new(self.schema.clone()),
            base: Arc::new(base.clone()),
            columns: columns.to_vec(),
            waiting: sets.into(),
            open: None,
            written: WrittenBucket::empty(key.clone(), range),
            files: Vec::new(),
        })
    }

    /// Adds the columns to the commit. The columns of all row groups must have been written. Returns the
    /// number of new files and their size in bytes.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`ColumnsWriter::write_row_group`] and [`add`](Self::add).
    pub fn add_columns(&mut self, mut columns: ColumnsWriter) -> Result<(usize, u64)> {
        columns.end_set()?;
        if let Some(left) = columns.waiting.front() {
            return Err(out_of_step(left));
        }
        let written = WrittenBucket::empty(columns.written.key.clone(), columns.written.range);
        let written = std::mem::replace(&mut columns.written, written);
        let files = std::mem::take(&mut columns.files);
        let bytes = files.iter().map(|file| file.bytes_on_disk).sum();
        let count = files.len();
        // Only the new files are recorded as files of this writer.
        self.paths.extend(files.into_iter().map(|file| file.path));
        self.add_part(written)?;
        Ok((count, bytes))
    }
}

impl ColumnsWriter {
    /// Writes the columns of the next row group. `columns` must contain the written columns for all of its
    /// samples, and may contain other columns.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the files of the row group differ from the snapshot, [`Error::Storage`] and
    /// [`Error::Fault`] if a file cannot be read or written (the error may concern an earlier row group),
    /// and [`Error::Fault`] if there is no such row group.
    pub fn write_row_group(&mut self, columns: Vec<RecordBatch>) -> Result<()> {
        if self.open.as_ref().is_some_and(|open| open.row_groups == open.set.row_groups.len()) {
            self.end_set()?;
        }
        if self.open.is_none() {
            self.open = self.waiting.pop_front().map(|set| self.begin(set)).transpose()?;
        }
        let Some(open) = &mut self.open else { return Err(no_row_group()) };
        let (files, index) = (Arc::clone(&open.files), open.row_groups);
        let (schema, base) = (Arc::clone(&self.schema), Arc::clone(&self.base));
        let pool = Arc::clone(&self.writers.format.encoders.pool);
        let (samples, wanted) = (open.set.row_groups[index].samples, open.columns.clone());
        let decode = move || -> Result<Vec<RecordBatch>, Box<dyn std::error::Error + Send + Sync>> {
            let given = some_columns(&columns, &wanted)?;
            if given.num_rows() as u64 != samples {
                return Err(no_row_group().into());
            }
            let how = (&*schema, base.layout, base.sample_keys);
            Ok(vec![pool.install(|| files.samples(index, how, Some(&given)))?])
        };
        let sessions = open.set.row_groups[index].sessions;
        open.beside.write_row_group(Pushed { bytes: 0, sessions }, Box::new(decode))?;
        open.row_groups += 1;
        open.beside.append_encoded()?;
        while open.beside.encoding() >= WAITING_PART * self.writers.threads {
            open.beside.append_next()?;
        }
        Ok(())
    }

    /// Starts the file beside the files of a set.
    fn begin(&self, set: FileSet) -> Result<OpenSet> {
        let BucketWriters { storage, format, buckets, .. } = &self.writers;
        let further = self.schema.further_features(&self.base.schema);
        // Files may lack columns of features, but not other columns.
        let is_written = |name: &&String| {
            let is_feature = self.schema.feature_names().any(|feature| feature == name.as_str());
            !is_feature || further.contains(name) || set.changes.lacks(name)
        };
        let columns: Vec<String> = self.columns.iter().filter(is_written).cloned().collect();
        let mut changes = set.changes.clone();
        changes.lacks.retain(|feature| !columns.contains(feature));
        let files = Arc::new(OpenFiles::open(storage, &self.base, &set)?);
        files.check_columns(&self.base.columns_of(&set))?;
        let some = format.columns.some(&columns, |stored| changes.write_beside(stored, &set.files));
        let format = Arc::new(format.of_some(&self.schema, some, &changes.lacks));
        let path = data_file(&self.written.key, self.written.range, *buckets, 0, &random_name());
        let beside = DataFileWriter::create(storage, path, &format, *buckets)?;
        Ok(OpenSet { set, columns, changes, files, beside, row_groups: 0 })
    }

    /// Completes the open file.
    fn end_set(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let OpenSet { set, mut changes, beside, row_groups, .. } = open;
        if row_groups != set.row_groups.len() {
            return Err(out_of_step(&set));
        }
        let (written, statistics) = beside.finish()?;
        self.files.extend(written.files.iter().cloned());
        let mut files = changes.used_files(&set.files);
        files.extend(written.files);
        let mut row_groups = written.row_groups;
        for (index, row_group) in row_groups.iter_mut().enumerate() {
            let bytes = files.iter().filter_map(|file| file.row_group_bytes.get(index));
            row_group.bytes_on_disk = bytes.fold(0, |sum, bytes| sum.saturating_add(*bytes));
        }
        let FileSet { bucket, samples, .. } = set;
        self.written.files.push(FileSet { bucket, samples, row_groups, files, changes });
        self.written.statistics.extend(statistics);
        Ok(())
    }
}

impl Drop for ColumnsWriter {
    fn drop(&mut self) {
        // An incomplete file does not exist in the storage yet.
        drop(self.open.take());
        let paths = std::mem::take(&mut self.files).into_iter().map(|file| file.path);
        discard(&self.writers.storage, paths.collect());
    }
}

/// Returns the `wanted` columns of batches as one batch.
fn some_columns(batches: &[RecordBatch], wanted: &[String]) -> Result<RecordBatch> {
    let Some(first) = batches.first() else { return Err(no_row_group()) };
    let places =
        wanted.iter().map(|name| first.schema_ref().index_of(name)).collect::<Result<Vec<_>, _>>()?;
    let parts = batches.iter().map(|batch| batch.project(&places)).collect::<Result<Vec<_>, _>>()?;
    Ok(concat_batches(parts[0].schema_ref(), &parts)?)
}

fn no_row_group() -> Error {
    Error::schema(
        "columns do not belong to a row group",
        "write the columns of all samples of each row group",
    )
}

fn out_of_step(set: &FileSet) -> Error {
    let message = format!("columns of row groups of `{}` were not written", set.path());
    Error::schema(message, "write the columns of all row groups")
}
