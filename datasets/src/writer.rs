//! The one writer of datasets: Parquet files per partition, row groups that start at session boundaries,
//! checksums, statistics, and the commit.

mod data_file;
mod stray;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use arrow::array::{Array, AsArray, ListArray, RecordBatch};
use arrow::datatypes::{DataType, Int64Type, SchemaRef};

use self::data_file::OpenFile;
use self::stray::remove_stray_files;
use crate::commit::{CreatedDirectories, DirectoryLock};
use crate::conform::conform;
use crate::{
    Error, FeatureStatistics, Layout, MANIFEST_FILE, Manifest, Order, Partition, PartitionKey, Result,
    SESSION_COLUMN, Schema, commit,
};

/// How a dataset is written.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// How sparse features are stored. What is written to the [`DatasetWriter`] does not depend on it.
    pub layout: Layout,
    /// The order in which the samples will arrive at [`DatasetWriter::write`]; recorded in the manifest.
    pub order: Order,
    /// Whether an existing dataset is replaced.
    pub overwrite: bool,
    /// A row group ends at the first session boundary after this many decoded bytes, and at the latest
    /// after twice as many. Decoded, every sample carries every list, in any layout.
    pub row_group_bytes: usize,
    /// A file ends at the first row group end after this many decoded bytes.
    pub file_bytes: usize,
    /// zstd level of the pages.
    pub zstd_level: i32,
}

impl WriterOptions {
    /// The options for samples in this order: layout `rows`, row groups of 64 MiB and files of 2 GiB decoded, zstd 3.
    pub fn new(order: Order) -> Self {
        Self {
            layout: Layout::Rows,
            order,
            overwrite: false,
            row_group_bytes: 64 << 20,
            file_bytes: 2 << 30,
            zstd_level: 3,
        }
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
        let (sessions, row_bytes) = (session_ids(batch), decoded_row_bytes(batch));
        let (mut start, mut bytes) = (0, 0);
        for (row, session) in sessions.iter().enumerate() {
            if self.row_group_is_full(bytes, self.last_session != Some(*session)) {
                self.append(&batch.slice(start, row - start), bytes)?;
                self.end_row_group()?;
                (start, bytes) = (row, 0);
            }
            bytes += row_bytes(row);
            self.last_session = Some(*session);
        }
        self.append(&batch.slice(start, batch.num_rows() - start), bytes)
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
        let WriterOptions { layout, order, .. } = self.options;
        let manifest =
            Manifest::new(self.generation, layout, order, self.schema.clone(), partitions, features);
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

    /// Whether the current row group, with `bytes` more in it, ends before a sample that starts a session or not.
    fn row_group_is_full(&self, bytes: usize, starts_session: bool) -> bool {
        let bytes = bytes.saturating_add(self.open.as_ref().map_or(0, |open| open.group_bytes));
        let target = self.options.row_group_bytes.max(1);
        let boundary = starts_session || self.options.order == Order::Arrival;
        bytes >= target && boundary || bytes >= target.saturating_mul(2)
    }

    /// Appends rows with `bytes` decoded bytes to the current row group.
    fn append(&mut self, rows: &RecordBatch, bytes: usize) -> Result<()> {
        if rows.num_rows() == 0 {
            return Ok(());
        }
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                let path = self.next_path();
                OpenFile::create(&self.root, path, &self.schema, &self.features, &self.options)?
            }
        };
        let appended = open.append(rows, bytes);
        self.open = Some(open);
        appended
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
        let file = open.finish()?;
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::Int64Array;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
    use parquet::basic::Encoding;

    use super::*;
    use crate::folded::samples::{Sample, rows, schema};
    use crate::folded::{UnfoldedGroup, unfold_group};

    /// Sessions of 1 to 13 samples: `city` changes with the session, `tags` never, `history` slides, `item` is the
    /// sample's number.
    fn samples() -> RecordBatch {
        let sizes = (0..60).map(|session| 1 + session * 5 % 13);
        let sessions: Vec<i64> = (0..).zip(sizes).flat_map(|(session, size)| vec![session; size]).collect();
        let sample = |(i, session): (i64, &i64)| -> Sample {
            [vec![*session, 1], vec![7, 7, 7], (i / 2..i / 2 + 5).collect(), vec![i]]
        };
        let samples: Vec<Sample> = (0..).zip(&sessions).map(sample).collect();
        let rows = rows(&samples);
        let mut columns = rows.columns().to_vec();
        columns[0] = Arc::new(Int64Array::from(sessions));
        RecordBatch::try_new(rows.schema(), columns).unwrap()
    }

    /// The row groups of a dataset of [`samples`], written in batches of 7 with small limits.
    fn written_row_groups(layout: Layout) -> (Manifest, Vec<RecordBatch>) {
        let directory = tempfile::tempdir().unwrap();
        let limits =
            WriterOptions { row_group_bytes: 2_000, file_bytes: 9_000, ..WriterOptions::new(Order::Session) };
        let mut writer =
            DatasetWriter::create(directory.path(), schema(), WriterOptions { layout, ..limits }).unwrap();
        let samples = samples();
        for start in (0..samples.num_rows()).step_by(7) {
            let rows = samples.slice(start, 7.min(samples.num_rows() - start));
            writer.write(&PartitionKey::default(), &rows).unwrap();
        }
        let manifest = writer.finish().unwrap();
        assert_eq!(Manifest::load(directory.path()).unwrap(), manifest);
        let mut groups = Vec::new();
        for file in &manifest.partitions[0].files {
            let path = directory.path().join(&file.path);
            for group in 0..file.row_groups as usize {
                let file = fs_err::File::open(&path).unwrap().into_file();
                let reader =
                    ParquetRecordBatchReaderBuilder::try_new(file).unwrap().with_row_groups(vec![group]);
                let batches: Vec<_> = reader.build().unwrap().map(Result::unwrap).collect();
                assert_eq!(batches.len(), 1);
                groups.extend(batches);
            }
        }
        (manifest, groups)
    }

    fn lists(group: &UnfoldedGroup, feature: usize) -> Vec<Vec<i64>> {
        let feature = &group.features[feature];
        let row = |row: usize| {
            feature.values[feature.offsets[row] as usize..][..feature.sizes[row] as usize].to_vec()
        };
        group.inverse.iter().map(|distinct| row(*distinct as usize)).collect()
    }

    #[test]
    fn folded_row_groups_hold_the_samples_of_plain_ones() {
        let (rows, row_groups) = written_row_groups(Layout::Rows);
        let (folded, folded_groups) = written_row_groups(Layout::Folded);
        assert_eq!((rows.layout, folded.layout), (Layout::Rows, Layout::Folded));
        assert_eq!(rows.statistics.features, folded.statistics.features);
        assert!(rows.partitions[0].files.len() > 3 && row_groups.len() > 15, "{}", row_groups.len());
        assert_eq!(row_groups.len(), folded_groups.len());
        for (plain, folded) in row_groups.iter().zip(&folded_groups) {
            assert_eq!(plain.columns()[..3], folded.columns()[..3]);
            for group in &schema().groups {
                let unfolded = unfold_group(folded, group).unwrap();
                for (i, feature) in group.features.iter().enumerate() {
                    let expected = plain.column_by_name(&feature.name).unwrap().as_list::<i32>();
                    let expected = expected
                        .iter()
                        .map(|list| list.unwrap().as_primitive::<Int64Type>().values().to_vec());
                    assert_eq!(lists(&unfolded, i), expected.collect::<Vec<_>>(), "{}", feature.name);
                }
            }
            assert_eq!(folded.column_by_name("tags").unwrap().null_count(), folded.num_rows() - 1);
            let history = folded.column_by_name("history").unwrap().as_list::<i32>();
            assert!(history.values().len() <= folded.num_rows() / 2 + 6, "{} ids", history.values().len());
        }
    }

    #[test]
    fn folded_ids_are_packed_unless_they_are_far_apart() {
        let directory = tempfile::tempdir().unwrap();
        let hash = |id: i64| id.wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64);
        let samples = (0..100).map(|id| [vec![id], vec![hash(id)], vec![id], vec![-id]]);
        let options = WriterOptions { layout: Layout::Folded, ..WriterOptions::new(Order::Arrival) };
        let mut writer = DatasetWriter::create(directory.path(), schema(), options).unwrap();
        writer.write(&PartitionKey::default(), &rows(&samples.collect::<Vec<_>>())).unwrap();
        let path = directory.path().join(&writer.finish().unwrap().partitions[0].files[0].path);
        let file = fs_err::File::open(path).unwrap().into_file();
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
        let columns = builder.metadata().row_group(0).columns().iter();
        let encodings = columns.map(|column| {
            let dictionary = column.dictionary_page_offset().is_some();
            let packed = column.encodings().any(|encoding| encoding == Encoding::DELTA_BINARY_PACKED);
            (column.column_path().parts()[0].clone(), dictionary, packed)
        });
        let found: Vec<_> = encodings.collect();
        let expected = [
            ("session_id", false, true),
            ("timestamp", false, true),
            ("clicked", false, false),
            ("city", false, true),
            ("tags", true, false),
            ("history", false, true),
            ("history.length", false, true),
            ("item", false, true),
        ];
        assert_eq!(found, expected.map(|(name, dictionary, packed)| (name.to_owned(), dictionary, packed)));
    }

    #[test]
    fn row_groups_end_at_the_first_session_after_the_limit() {
        let (_, groups) = written_row_groups(Layout::Rows);
        let samples = samples();
        let row_bytes = decoded_row_bytes(&samples);
        let mut row = 0;
        for group in groups.iter().take(groups.len() - 1) {
            let start = row;
            row += group.num_rows();
            assert_ne!(session_ids(&samples)[row - 1], session_ids(&samples)[row]);
            let last_session = session_ids(&samples)[row - 1];
            let before = (start..row).filter(|row| session_ids(&samples)[*row] != last_session);
            assert!((start..row).map(&row_bytes).sum::<usize>() >= 2_000);
            assert!(before.map(&row_bytes).sum::<usize>() < 2_000);
        }
    }
}
