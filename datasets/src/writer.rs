//! The one writer of datasets: Parquet files per partition, row groups that start at session boundaries,
//! checksums, statistics, and the commit.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, ListArray, RecordBatch};
use arrow::datatypes::{DataType, Int64Type, SchemaRef};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use sha2::{Digest, Sha256};

use crate::commit::{CreatedDirectories, DirectoryLock};
use crate::conform::conform;
use crate::{
    DataFile, Error, FeatureStatistics, MANIFEST_FILE, Manifest, Order, Partition, PartitionKey, Result,
    SESSION_COLUMN, Schema, commit,
};

/// How a dataset is written.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// The order in which the samples will arrive at [`DatasetWriter::write`]; recorded in the manifest.
    pub order: Order,
    /// Whether an existing dataset is replaced.
    pub overwrite: bool,
    /// A row group ends at the first session boundary after this many decoded bytes, and at the latest
    /// after twice as many.
    pub row_group_bytes: usize,
    /// A file ends at the first row group end after this many decoded bytes.
    pub file_bytes: usize,
    /// zstd level of the pages.
    pub zstd_level: i32,
}

impl WriterOptions {
    /// The options for samples in this order: row groups of 64 MiB and files of 2 GiB decoded, zstd 3.
    pub fn new(order: Order) -> Self {
        Self { order, overwrite: false, row_group_bytes: 64 << 20, file_bytes: 2 << 30, zstd_level: 3 }
    }
}

/// Writes a dataset into a directory; nothing is visible before [`finish`](Self::finish), and a writer that
/// is dropped before it leaves the directory as it found it.
#[derive(Debug)]
pub struct DatasetWriter {
    root: PathBuf,
    created: CreatedDirectories,
    lock: Option<DirectoryLock>,
    generation: u64,
    schema: Schema,
    arrow_schema: SchemaRef,
    options: WriterOptions,
    partitions: Vec<Partition>,
    seen: HashMap<PartitionKey, usize>,
    open: Option<OpenFile>,
    last_session: Option<i64>,
    features: BTreeMap<String, FeatureStatistics>,
    finished: bool,
}

#[derive(Debug)]
struct OpenFile {
    path: String,
    writer: ArrowWriter<HashingWriter>,
    file_bytes: usize,
    group_bytes: usize,
    samples: u64,
}

impl DatasetWriter {
    /// Starts a dataset in `root`, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if `root` holds a dataset and `overwrite` is false, or holds something that is no
    /// dataset; [`Error::Locked`] if another process writes it; [`Error::Schema`] for a schema that no
    /// dataset can have.
    pub fn create(root: &Path, schema: Schema, options: WriterOptions) -> Result<Self> {
        schema.validate()?;
        old_dataset(root, options.overwrite)?;
        let created = CreatedDirectories::create(root)?;
        let lock = DirectoryLock::take(root)?;
        // Looked at again: another writer may have committed before the lock was this one's.
        let old = old_dataset(root, options.overwrite)?;
        let mut writer = Self {
            root: root.to_owned(),
            created,
            lock: Some(lock),
            generation: 1,
            arrow_schema: schema.to_arrow(),
            features: schema
                .sparse_features()
                .map(|f| (f.name.clone(), FeatureStatistics::default()))
                .collect(),
            schema,
            options,
            partitions: Vec::new(),
            seen: HashMap::new(),
            open: None,
            last_session: None,
            finished: false,
        };
        if let Some(old) = &old {
            writer.generation = old.generation + 1;
        }
        remove_stray_files(root, &old.iter().flat_map(Manifest::file_paths).collect::<Vec<_>>())?;
        Ok(writer)
    }

    /// Appends samples to a partition. Partitions come one after the other, the samples of each in the order
    /// that the options name; `batch` has the columns of [`Schema::to_arrow`].
    ///
    /// # Errors
    ///
    /// [`Error::Column`] if the columns differ or a partition comes back after another one;
    /// [`Error::Parquet`] and [`Error::Io`] if a file cannot be written (a full disk, say).
    pub fn write(&mut self, key: &PartitionKey, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = &conform(batch, &self.arrow_schema)?;
        self.enter_partition(key)?;
        self.count(batch);
        let mut start = 0;
        while start < batch.num_rows() {
            let end = self.next_cut(batch, start);
            self.append(&batch.slice(start, end - start))?;
            start = end;
            if start < batch.num_rows() {
                self.end_row_group()?;
            }
        }
        self.last_session = session_ids(batch).last().copied();
        Ok(())
    }

    /// Closes the files and commits: from the moment the manifest is renamed, readers see the new dataset.
    /// The replaced dataset's files are then removed.
    ///
    /// # Errors
    ///
    /// [`Error::Parquet`] and [`Error::Io`] if a file or the manifest cannot be written; the previous
    /// dataset is then whole.
    pub fn finish(mut self) -> Result<Manifest> {
        self.close_file()?;
        for directory in self.directories() {
            commit::sync_directory(&directory)?;
        }
        let partitions = std::mem::take(&mut self.partitions);
        let features = std::mem::take(&mut self.features);
        let manifest =
            Manifest::new(self.generation, self.options.order, self.schema.clone(), partitions, features);
        manifest.store(&self.root)?;
        self.finished = true;
        let new_files: Vec<PathBuf> = manifest.file_paths().collect();
        remove_stray_files(&self.root, &new_files)?;
        self.created.keep();
        Ok(manifest)
    }

    fn enter_partition(&mut self, key: &PartitionKey) -> Result<()> {
        if self.partitions.last().is_some_and(|partition| partition.key == *key) {
            return Ok(());
        }
        if self.seen.insert(key.clone(), self.partitions.len()).is_some() {
            return Err(Error::Column {
                column: key.to_string(),
                message: "the partition's samples do not come together".to_owned(),
                hint: "sort the samples by partition before writing".to_owned(),
            });
        }
        self.close_file()?;
        self.last_session = None;
        self.partitions.push(Partition { key: key.clone(), samples: 0, sessions: 0, files: Vec::new() });
        Ok(())
    }

    /// Adds `batch` to the statistics of the current partition.
    fn count(&mut self, batch: &RecordBatch) {
        let Some(partition) = self.partitions.last_mut() else { return };
        partition.samples += batch.num_rows() as u64;
        // Sessions are numbered densely from 0, in any order of the samples.
        let highest = session_ids(batch).iter().max().map_or(0, |id| id.saturating_add(1));
        partition.sessions = partition.sessions.max(u64::try_from(highest).unwrap_or(0));
        for (name, statistics) in &mut self.features {
            let Some(column) = batch.column_by_name(name) else { continue };
            count_feature(column.as_list::<i32>(), statistics);
        }
    }

    /// The end of the rows from `start` on that still go into the current row group.
    fn next_cut(&self, batch: &RecordBatch, start: usize) -> usize {
        let sessions = session_ids(batch);
        let target = self.options.row_group_bytes.max(1);
        let mut bytes = self.open.as_ref().map_or(0, |open| open.group_bytes);
        let row_bytes = decoded_row_bytes(batch);
        for row in start..batch.num_rows() {
            let previous = if row == 0 { self.last_session } else { Some(sessions[row - 1]) };
            let boundary = self.options.order == Order::Arrival || previous != Some(sessions[row]);
            if bytes >= target && boundary || bytes >= target.saturating_mul(2) {
                if row > start {
                    return row;
                }
                // `append` ends the full row group first.
                bytes = 0;
            }
            bytes = bytes.saturating_add(row_bytes(row));
        }
        batch.num_rows()
    }

    fn append(&mut self, rows: &RecordBatch) -> Result<()> {
        if self.must_end_row_group(rows) {
            self.end_row_group()?;
        }
        if self.open.is_none() {
            self.open = Some(self.open_file()?);
        }
        let row_bytes = decoded_row_bytes(rows);
        let bytes: usize = (0..rows.num_rows()).map(row_bytes).sum();
        if let Some(open) = &mut self.open {
            open.writer.write(rows).map_err(parquet_error(&self.root.join(&open.path)))?;
            open.samples += rows.num_rows() as u64;
            open.group_bytes += bytes;
            open.file_bytes += bytes;
        }
        Ok(())
    }

    /// Whether the current row group is full and `rows` may start a new one.
    fn must_end_row_group(&self, rows: &RecordBatch) -> bool {
        let filled = self.open.as_ref().map_or(0, |open| open.group_bytes);
        let boundary =
            self.options.order == Order::Arrival || self.last_session != session_ids(rows).first().copied();
        filled >= self.options.row_group_bytes.max(1) && boundary
            || filled >= self.options.row_group_bytes.max(1).saturating_mul(2)
    }

    fn end_row_group(&mut self) -> Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.writer.flush().map_err(parquet_error(&self.root.join(&open.path)))?;
        open.group_bytes = 0;
        if open.file_bytes >= self.options.file_bytes {
            self.close_file()?;
        }
        Ok(())
    }

    fn open_file(&self) -> Result<OpenFile> {
        let (key, number) =
            self.partitions.last().map_or((String::new(), 0), |p| (p.key.to_string(), p.files.len()));
        let name = format!("part-{number:05}-g{}.parquet", self.generation);
        let path = if key.is_empty() { name } else { format!("{key}/{name}") };
        let full = self.root.join(&path);
        if let Some(parent) = full.parent() {
            fs_err::create_dir_all(parent)?;
        }
        let level = ZstdLevel::try_new(self.options.zstd_level).map_err(parquet_error(&full))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(level))
            .set_max_row_group_row_count(None)
            .build();
        let file = HashingWriter { file: fs_err::File::create(&full)?, digest: Sha256::new(), bytes: 0 };
        let writer = ArrowWriter::try_new(file, self.arrow_schema.clone(), Some(properties));
        let writer = writer.map_err(parquet_error(&full))?;
        Ok(OpenFile { path, writer, file_bytes: 0, group_bytes: 0, samples: 0 })
    }

    fn close_file(&mut self) -> Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let path = self.root.join(&open.path);
        let metadata = open.writer.finish().map_err(parquet_error(&path))?;
        let output = open.writer.inner_mut();
        output.file.sync_all()?;
        let file = DataFile {
            path: open.path,
            samples: open.samples,
            row_groups: metadata.num_row_groups() as u64,
            bytes_on_disk: output.bytes,
            sha256: crate::units::format_hex(&output.digest.clone().finalize()),
        };
        if let Some(partition) = self.partitions.last_mut() {
            partition.files.push(file);
        }
        Ok(())
    }

    /// The directories that got new entries.
    fn directories(&self) -> Vec<PathBuf> {
        let mut all = vec![self.root.clone()];
        for partition in &self.partitions {
            let mut directory = self.root.clone();
            for part in partition.key.to_string().split('/').filter(|part| !part.is_empty()) {
                directory.push(part);
                all.push(directory.clone());
            }
        }
        all.sort();
        all.dedup();
        all
    }
}

impl Drop for DatasetWriter {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Cleaning up after an error must not hide it; the next writer clears what is left. What is kept is what
        // the manifest names now: it may be the new one, if only the last sync of a commit failed.
        drop(self.open.take());
        let _ = match Manifest::load(&self.root) {
            Ok(manifest) => remove_stray_files(&self.root, &manifest.file_paths().collect::<Vec<_>>()),
            Err(Error::NotADataset { .. }) => remove_stray_files(&self.root, &[]),
            Err(_) => Ok(()),
        };
        // Before `created` takes the directory away.
        drop(self.lock.take());
    }
}

/// The dataset that is replaced, if there is one and that is allowed.
fn old_dataset(root: &Path, overwrite: bool) -> Result<Option<Manifest>> {
    if root.join(MANIFEST_FILE).exists() {
        let old = Manifest::load(root)?;
        if !overwrite {
            let hint = "choose another directory, or replace the dataset with `--overwrite`".to_owned();
            return Err(Error::Exists { path: root.to_owned(), hint });
        }
        return Ok(Some(old));
    }
    if !root.exists() || commit::is_empty_directory(root)? || DirectoryLock::is_in(root) {
        return Ok(None);
    }
    let hint = "it is not a dataset, so nothing is written into it; choose another directory".to_owned();
    Err(Error::Exists { path: root.to_owned(), hint })
}

/// Removes data files (`part-*.parquet`) of partition folders that are not in `keep`, and folders left empty.
fn remove_stray_files(root: &Path, keep: &[PathBuf]) -> Result<()> {
    let keep: Vec<PathBuf> = keep.iter().map(|path| root.join(path)).collect();
    remove_stray_below(root, &keep)
}

fn remove_stray_below(directory: &Path, keep: &[PathBuf]) -> Result<()> {
    for entry in fs_err::read_dir(directory)? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() && name.contains('=') {
            remove_stray_below(&path, keep)?;
            if commit::is_empty_directory(&path)? {
                fs_err::remove_dir(&path)?;
            }
        } else if name.starts_with("part-") && name.ends_with(".parquet") && !keep.contains(&path) {
            fs_err::remove_file(&path)?;
        }
    }
    Ok(())
}

fn session_ids(batch: &RecordBatch) -> &[i64] {
    batch.column_by_name(SESSION_COLUMN).map_or(&[], |column| column.as_primitive::<Int64Type>().values())
}

/// Decoded bytes of each row of `batch`: 8 for a session id, a time and every id, 4 for every float.
fn decoded_row_bytes(batch: &RecordBatch) -> impl Fn(usize) -> usize {
    let mut fixed = 0;
    let mut offsets = Vec::new();
    for column in batch.columns() {
        match column.data_type() {
            DataType::List(_) => offsets.push(column.as_list::<i32>().offsets().clone()),
            DataType::Float32 => fixed += 4,
            _ => fixed += 8,
        }
    }
    move |row| {
        let lists = offsets.iter().map(|offsets| 8 * (offsets[row + 1] - offsets[row]) as usize);
        fixed + lists.sum::<usize>()
    }
}

fn count_feature(lists: &ListArray, statistics: &mut FeatureStatistics) {
    let offsets = lists.offsets();
    let (start, end) = (offsets[0] as usize, offsets[lists.len()] as usize);
    let ids = &lists.values().as_primitive::<Int64Type>().values()[start..end];
    statistics.values += ids.len() as u64;
    for &id in ids {
        statistics.min_id = Some(statistics.min_id.map_or(id, |min| min.min(id)));
        statistics.max_id = Some(statistics.max_id.map_or(id, |max| max.max(id)));
    }
    let longest = offsets.windows(2).map(|pair| (pair[1] - pair[0]) as u64).max();
    statistics.max_length = statistics.max_length.max(longest.unwrap_or(0));
}

fn parquet_error(path: &Path) -> impl FnOnce(parquet::errors::ParquetError) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::Parquet {
        path,
        source,
        hint: "check the disk's free space and permissions".to_owned(),
    }
}

/// A file that digests what is written to it.
#[derive(Debug)]
struct HashingWriter {
    file: fs_err::File,
    digest: Sha256,
    bytes: u64,
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
