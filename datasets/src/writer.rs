//! The one writer of datasets: Parquet files per partition, row groups that start at session boundaries,
//! checksums, statistics, and the commit.
//!
//! ```text
//!  write ─▶ conform, check the order, cut into row groups            the caller's thread
//!             │ (a row group of rows, views as they came)
//!             ▼
//!           count + digest ─┐   every column: fold or expand, encode    `threads`, one row group at a time
//!             ▼             └──────────▼
//!           partition's figures      file ─▶ SHA-256 ─▶ manifest
//! ```

mod columns;
mod count;
mod data_file;
mod encodings;
mod options;
mod row_group;
mod stray;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::{DataType, Int64Type, SchemaRef, TimestampMicrosecondType};
use parquet::basic::ZstdLevel;

use self::columns::Columns;
pub(crate) use self::count::Counter;
use self::data_file::{OpenFile, Shared};
pub use self::options::{Commit, WriterOptions};
use self::stray::remove_stray_files;
use crate::commit::{CreatedDirectories, DirectoryLock};
use crate::conform::conform;
use crate::digest::Digest;
use crate::lists::Lists;
use crate::{
    Error, MANIFEST_FILE, Manifest, Partition, PartitionKey, Result, SESSION_COLUMN, Schema, TIME_COLUMN,
    Vocabulary, VocabularyFile, commit, partition,
};

/// The folder of the vocabularies in a dataset.
const VOCABULARIES: &str = "vocabularies";

/// A row group's decoded bytes at most: ids of twice as many are addressed by 32-bit offsets.
const MOST_ROW_GROUP_BYTES: usize = 4 << 30;

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
    shared: Arc<Shared>,
    /// What is appended to.
    old: Option<Manifest>,
    partitions: Vec<Partition>,
    seen: HashSet<PartitionKey>,
    vocabularies: BTreeMap<String, VocabularyFile>,
    expected: Option<(u64, Digest)>,
    open: Option<OpenFile>,
    /// Session and time of the partition's last sample.
    last: Option<(i64, i64)>,
    finished: bool,
}

impl DatasetWriter {
    /// Starts a dataset in `root`, which is created if it is missing.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if `root` holds a dataset that may be neither replaced nor appended to, or holds something
    /// that is no dataset; [`Error::Locked`] if another process writes it; [`Error::Schema`] for a schema that no
    /// dataset can have, a column order that names no column, or a dataset of another schema, layout, order or version
    /// to append to.
    pub fn create(root: &Path, schema: Schema, options: WriterOptions) -> Result<Self> {
        schema.validate()?;
        let columns = Columns::new(&schema, &options)?;
        let level =
            ZstdLevel::try_new(options.zstd_level).map_err(|error| Error::write_parquet(root, error))?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(options.threads.max(1));
        let pool =
            pool.thread_name(|i| format!("onefold-write-{i}")).build().map_err(std::io::Error::other)?;
        let shared = Arc::new(Shared { columns, counter: Counter::new(&schema), level, pool });
        old_dataset(root, &schema, &options)?;
        let created = CreatedDirectories::create(root)?;
        let lock = DirectoryLock::take(root)?;
        // Looked at again: another writer may have committed before the lock was this one's.
        let old = old_dataset(root, &schema, &options)?;
        remove_stray_files(root, &old.iter().flat_map(Manifest::file_paths).collect::<Vec<_>>())?;
        Ok(Self {
            root: root.to_owned(),
            created,
            lock: Some(lock),
            generation: old.as_ref().map_or(1, |old| old.generation + 1),
            arrow_schema: schema.to_arrow(),
            schema,
            old: old.filter(|_| options.commit == Commit::Append),
            options,
            shared,
            partitions: Vec::new(),
            seen: HashSet::new(),
            vocabularies: BTreeMap::new(),
            expected: None,
            open: None,
            last: None,
            finished: false,
        })
    }

    /// The schema of what is written.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// The manifest of the dataset that is appended to, if there is one.
    pub fn appended_to(&self) -> Option<&Manifest> {
        self.old.as_ref()
    }

    /// Appends samples to a partition. Partitions come one after the other, the samples of each in the order
    /// that the options name; `batch` has the columns of [`Schema::to_arrow`], but that lists may also be `ListView`s,
    /// which are not expanded before their row group is encoded.
    ///
    /// # Errors
    ///
    /// [`Error::Column`] if the columns differ, samples do not come in their order, or a partition comes back after
    /// another one; [`Error::Schema`] if its columns are not those of the dataset appended to; [`Error::Write`] and
    /// [`Error::Parquet`] if a file cannot be written (a full disk, say), also for one of the row groups before.
    pub fn write(&mut self, key: &PartitionKey, batch: &RecordBatch) -> Result<()> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let batch = &conform(batch, &self.arrow_schema)?;
        self.enter_partition(key)?;
        self.check_order(batch)?;
        let (sessions, row_bytes) = (session_ids(batch), decoded_row_bytes(batch));
        let mut last_session = self.last.map(|(session, _)| session);
        let (mut start, mut bytes) = (0, 0);
        for (row, session) in sessions.iter().enumerate() {
            if self.row_group_is_full(bytes, last_session != Some(*session)) {
                self.append(batch, start..row, bytes)?;
                self.end_row_group()?;
                (start, bytes) = (row, 0);
            }
            bytes += row_bytes[row];
            last_session = Some(*session);
        }
        self.append(batch, start..batch.num_rows(), bytes)?;
        self.last = last_session.zip(times(batch).last().copied());
        Ok(())
    }

    /// Adds the vocabulary `name`, which features of the schema name and whose ids the samples have. Of a dataset that is
    /// appended to, it replaces the vocabulary of that name, which it must extend.
    ///
    /// # Errors
    ///
    /// [`Error::Write`] and [`Error::Parquet`] if its file cannot be written.
    pub fn add_vocabulary(&mut self, name: &str, vocabulary: &Vocabulary) -> Result<()> {
        let path = format!("{VOCABULARIES}/{}-g{}.parquet", partition::encode(name), self.generation);
        let file = vocabulary.write(&self.root, &path)?;
        self.vocabularies.insert(name.to_owned(), file);
        Ok(())
    }

    /// Says which samples are to be written in all; if they are others, [`finish`](Self::finish) does not commit.
    pub fn expect(&mut self, samples: u64, digest: Digest) {
        self.expected = Some((samples, digest));
    }

    /// Closes the files and commits: from the moment the manifest is renamed, readers see the new dataset.
    /// The replaced dataset's files are then removed.
    ///
    /// # Errors
    ///
    /// [`Error::Samples`] if the samples are not those [expected](Self::expect); [`Error::Schema`] if a feature's
    /// vocabulary was not added; [`Error::Write`], [`Error::Parquet`] and [`Error::Io`] if a file or the manifest cannot
    /// be written. The previous dataset is then whole.
    pub fn finish(mut self) -> Result<Manifest> {
        self.close_file()?;
        self.check_expected()?;
        for directory in self.directories() {
            commit::sync_directory(&directory)?;
        }
        let mut partitions = std::mem::take(&mut self.partitions);
        let mut vocabularies = std::mem::take(&mut self.vocabularies);
        if let Some(old) = self.old.take() {
            partitions.extend(old.partitions.into_iter().filter(|old| !self.seen.contains(&old.key)));
            for (name, file) in old.vocabularies {
                vocabularies.entry(name).or_insert(file);
            }
        }
        self.check_vocabularies(&vocabularies)?;
        let (layout, order) = (self.options.layout, self.options.order);
        let manifest =
            Manifest::new(self.generation, layout, order, self.schema.clone(), partitions, vocabularies);
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
        if !self.seen.insert(key.clone()) {
            return Err(Error::Column {
                column: key.to_string(),
                message: "the partition's samples do not come together".to_owned(),
                hint: "sort the samples by partition before writing".to_owned(),
            });
        }
        let names =
            |key: &PartitionKey| key.columns().iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let old = self.old.iter().flat_map(|old| &old.partitions).find(|old| names(&old.key) != names(key));
        if let Some(old) = old {
            let message =
                format!("the partition `{key}` does not fit beside `{}`, which has other columns", old.key);
            let hint = "partition by the same columns as the dataset, or replace it with `--overwrite`";
            return Err(Error::Schema { message, hint: hint.to_owned() });
        }
        self.close_file()?;
        self.last = None;
        let features = self.schema.sparse_features().map(|f| (f.name.clone(), Default::default())).collect();
        let digest = Some(Digest::default());
        self.partitions.push(Partition {
            key: key.clone(),
            samples: 0,
            sessions: 0,
            files: Vec::new(),
            features,
            digest,
        });
        Ok(())
    }

    /// Checks that the samples ascend as the files will say, also from the batch before.
    fn check_order(&self, batch: &RecordBatch) -> Result<()> {
        let places = session_ids(batch).iter().copied().zip(times(batch).iter().copied());
        let mut last = self.last;
        for place in places {
            let ascends = |last: (i64, i64)| match self.options.order.is_clustered() {
                true => last <= place,
                false => last.1 <= place.1,
            };
            if !last.is_none_or(ascends) {
                let (column, by) = match self.options.order.is_clustered() {
                    true => (SESSION_COLUMN, "session and time"),
                    false => (TIME_COLUMN, "time"),
                };
                return Err(Error::Column {
                    column: column.to_owned(),
                    message: format!(
                        "a sample of session {} at {} comes after one that it belongs before",
                        place.0, place.1
                    ),
                    hint: format!("sort the samples of a partition by {by} before writing"),
                });
            }
            last = Some(place);
        }
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
        if let Some(partition) = self.partitions.last_mut() {
            partition.samples += rows.num_rows() as u64;
            // Sessions are numbered densely from 0, in any order of the samples.
            let highest = session_ids(&rows).iter().max().map_or(0, |id| id.saturating_add(1));
            partition.sessions = partition.sessions.max(u64::try_from(highest).unwrap_or(0));
        }
        let open = match &mut self.open {
            Some(open) => open,
            None => {
                let path = self.next_path();
                self.open.insert(OpenFile::create(&self.root, path, &self.shared)?)
            }
        };
        open.append(rows, bytes);
        Ok(())
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
        let (key, number) =
            self.partitions.last().map_or((String::new(), 0), |p| (p.key.to_string(), p.files.len()));
        let name = format!("part-{number:05}-g{}.parquet", self.generation);
        if key.is_empty() { name } else { format!("{key}/{name}") }
    }

    fn close_file(&mut self) -> Result<()> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let (file, counts) = open.finish()?;
        let Some(partition) = self.partitions.last_mut() else { return Ok(()) };
        partition.files.push(file);
        for (feature, figures) in self.schema.sparse_features().zip(&counts.features) {
            partition.features.entry(feature.name.clone()).or_default().merge(figures);
        }
        partition.digest.get_or_insert_default().merge(counts.digest);
        Ok(())
    }

    fn check_expected(&self) -> Result<()> {
        let Some((expected, digest)) = self.expected else { return Ok(()) };
        let written = self.partitions.iter().map(|partition| partition.samples).sum();
        let mut all = Digest::default();
        self.partitions.iter().filter_map(|partition| partition.digest).for_each(|digest| all.merge(digest));
        if (written, all) == (expected, digest) { Ok(()) } else { Err(Error::Samples { expected, written }) }
    }

    fn check_vocabularies(&self, added: &BTreeMap<String, VocabularyFile>) -> Result<()> {
        let of_feature =
            |name: &String| self.schema.sparse_features().any(|f| f.vocabulary.as_ref() == Some(name));
        let mut named = self.schema.sparse_features().filter_map(|feature| feature.vocabulary.as_ref());
        let wrong = named.find(|name| !added.contains_key(*name)).map(|name| (name, "was not added"));
        let wrong = wrong.or_else(|| {
            added.keys().find(|name| !of_feature(name)).map(|name| (name, "belongs to no feature"))
        });
        let Some((name, what)) = wrong else { return Ok(()) };
        let message = format!("the vocabulary `{name}` {what}");
        Err(Error::Schema {
            message,
            hint: "add the vocabularies that features name, and no others".to_owned(),
        })
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

/// The dataset that is replaced or appended to, if there is one and that is allowed.
fn old_dataset(root: &Path, schema: &Schema, options: &WriterOptions) -> Result<Option<Manifest>> {
    if root.join(MANIFEST_FILE).exists() {
        let old = Manifest::load(root)?;
        match options.commit {
            Commit::Create => {
                let hint = "choose another directory, or replace the dataset with `--overwrite`".to_owned();
                return Err(Error::Exists { path: root.to_owned(), hint });
            }
            Commit::Overwrite => {}
            Commit::Append => check_appendable(root, &old, schema, options)?,
        }
        return Ok(Some(old));
    }
    if !root.exists() || commit::is_empty_directory(root)? || DirectoryLock::is_in(root) {
        return Ok(None);
    }
    let hint = "it is not a dataset, so nothing is written into it; choose another directory".to_owned();
    Err(Error::Exists { path: root.to_owned(), hint })
}

/// Checks that partitions written with these options can stand beside those of `old`.
fn check_appendable(root: &Path, old: &Manifest, schema: &Schema, options: &WriterOptions) -> Result<()> {
    let differs = |what: &str| {
        let message = format!("`{}` has another {what} than what is to be appended", root.display());
        let hint =
            "append with the configuration that it was built with, or build it anew with `--overwrite`";
        Err(Error::Schema { message, hint: hint.to_owned() })
    };
    if old.layout != options.layout {
        return differs("layout");
    }
    if old.order != options.order {
        return differs("order");
    }
    if old.schema != *schema {
        return differs("schema");
    }
    let has_figures = |p: &Partition| {
        p.digest.is_some() && schema.sparse_features().all(|f| p.features.contains_key(&f.name))
    };
    if let Some(partition) = old.partitions.iter().find(|partition| !has_figures(partition)) {
        let message = format!(
            "`{}` is of format version {}, whose partitions (`{}`) have no figures of their own to add to",
            root.display(),
            old.format_version,
            partition.key
        );
        let hint = "build the dataset anew with `--overwrite`; from then on it can be appended to";
        return Err(Error::Schema { message, hint: hint.to_owned() });
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

/// Decoded bytes of each row of `batch`: 8 for a session id, a time and every id, 4 for every float.
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
    bytes
}

#[cfg(test)]
mod append_tests;
#[cfg(test)]
mod tests;
