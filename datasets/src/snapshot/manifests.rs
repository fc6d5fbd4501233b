//! Reads the manifests that a snapshot lists, and combines their row groups.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use onefold_base::sync::locked;
use onefold_storage::Storage;
use parquet::file::reader::ChunkReader;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{ManifestFile, Parts, Row, StatisticsRow};
use super::{
    ColumnChanges, DataFile, FileSet, MISSING_DENSE, Order, Partition, RowGroup, RowGroupStatistics,
    SampleStatistics,
};
use crate::digest::Digest;
use crate::{DenseStatistics, Error, PartitionKey, Result, Schema, thread_pool};

/// The largest number of manifests that are read in parallel.
const MOST_THREADS: usize = 16;

/// A manifest, and the row groups in it that belong to the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestEntry {
    /// The path relative to the dataset's folder.
    pub path: String,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The number of bytes at the start of the file that contain statistics of samples.
    pub statistics_bytes: u64,
    /// The 64-bit XXH3 of the statistics bytes, in hexadecimal.
    pub statistics_checksum: String,
    /// The 64-bit XXH3 of the remaining bytes, in hexadecimal.
    pub checksum: String,
    /// The smallest partition key of row groups that belong to the snapshot.
    pub first: PartitionKey,
    /// The largest partition key of row groups that belong to the snapshot.
    pub last: PartitionKey,
    /// The manifest rows of these row groups: start and end of each range, in ascending order.
    pub rows: Vec<(u32, u32)>,
    /// The differences between the columns of these row groups' files and the schema.
    #[serde(default, skip_serializing_if = "ColumnChanges::is_none")]
    pub changes: ColumnChanges,
}

/// Consecutive row groups of a manifest that are in the same files.
#[derive(Debug)]
pub(crate) struct Listed {
    /// The key of their partition.
    pub(crate) key: PartitionKey,
    /// The manifest row of the first row group.
    pub(crate) row: usize,
    pub(crate) set: FileSet,
}

impl Listed {
    /// Returns the manifest rows of the row groups.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.row..self.row + self.set.row_groups.len()
    }
}

/// Returns the checksum of `bytes` in the form that snapshots store.
pub(super) fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

impl ManifestEntry {
    fn wrong(&self, storage: &Storage, message: String) -> Error {
        Error::snapshot(storage.shown(&self.path), message)
    }

    /// Returns whether row groups of these partitions may belong to the snapshot.
    pub(super) fn may_have(&self, keys: &BTreeSet<PartitionKey>) -> bool {
        self.first <= self.last && keys.range(&self.first..=&self.last).next().is_some()
    }

    /// Reads the file, with or without statistics, and verifies its checksums.
    pub(super) fn open(&self, storage: &Storage, with_statistics: bool) -> Result<ManifestFile> {
        let wrong = |message: String| self.wrong(storage, message);
        let start = if with_statistics { 0 } else { self.statistics_bytes.min(self.bytes) };
        let wanted = std::iter::once(start..self.bytes).collect();
        let ranges = match storage.read_ranges(&self.path, self.bytes, wanted, None) {
            Ok(ranges) => ranges,
            Err(error) => {
                return Err(match storage.head(&self.path)?.map(|found| found.bytes) {
                    None => wrong("it is missing, a snapshot names it".to_owned()),
                    Some(bytes) if bytes != self.bytes => {
                        wrong(format!("it has {bytes} bytes, the snapshot says {}", self.bytes))
                    }
                    Some(_) => error.into(),
                });
            }
        };
        let statistics = (0..self.statistics_bytes, &self.statistics_checksum);
        let rest = (self.statistics_bytes..self.bytes, &self.checksum);
        for (range, expected) in [statistics, rest].into_iter().skip(usize::from(!with_statistics)) {
            let length = range.end.saturating_sub(range.start) as usize;
            let bytes = ranges.get_bytes(range.start, length).map_err(|error| wrong(error.to_string()))?;
            if checksum(&bytes) != *expected {
                return Err(wrong("its bytes do not have the checksum that the snapshot says".to_owned()));
            }
        }
        ManifestFile::open(ranges).map_err(wrong)
    }

    /// Returns the row groups that belong to the snapshot, in manifest order.
    ///
    /// # Errors
    ///
    /// [`Error::Snapshot`] if the manifest is missing, damaged or contradicts itself; [`Error::Storage`] if
    /// the storage cannot be read.
    pub(crate) fn listed(&self, storage: &Storage) -> Result<Vec<Listed>> {
        self.list(&self.open(storage, false)?).map_err(|message| self.wrong(storage, message))
    }

    fn list(&self, file: &ManifestFile) -> Result<Vec<Listed>, String> {
        let columns: Vec<Arc<[String]>> =
            file.names.columns.iter().map(|names| Arc::from(names.as_slice())).collect();
        let (all, mut listed, mut end) = (file.rows()?, Vec::new(), 0);
        for (first, next) in &self.rows {
            let range = *first as usize..*next as usize;
            let rows = all.get(range.clone()).filter(|rows| !rows.is_empty() && range.start >= end);
            let rows = rows.ok_or_else(|| {
                format!(
                    "it has {} row groups, the snapshot names {} to {}",
                    all.len(),
                    range.start,
                    range.end
                )
            })?;
            end = range.end;
            for (number, row) in range.zip(rows) {
                add(&mut listed, number, row, (&columns[..], &self.changes))?;
            }
        }
        Ok(listed)
    }
}

/// Adds the row group of manifest row `number` to the last set if it is in the same files, otherwise to a new
/// set.
fn add(
    listed: &mut Vec<Listed>,
    number: usize,
    row: &Row,
    (columns, changes): (&[Arc<[String]>], &ColumnChanges),
) -> Result<(), String> {
    let paths = || row.files.iter().map(|file| file.path.as_str());
    let follows = |last: &Listed| {
        let known = last.set.files.iter().map(|file| file.path.as_str());
        last.rows().end == number && known.eq(paths())
    };
    if !listed.last().is_some_and(follows) {
        let key = PartitionKey::parse(&row.partition)
            .ok_or_else(|| format!("`{}` is not a partition key", row.partition))?;
        let files = row.files.iter().map(|file| {
            let columns = columns.get(file.columns as usize);
            Ok(DataFile {
                path: file.path.clone(),
                bytes_on_disk: file.bytes,
                footer_bytes: file.footer_bytes,
                footer_checksum: file.footer_checksum,
                columns: Arc::clone(columns.ok_or("a file has unknown columns")?),
                row_group_bytes: Vec::new(),
            })
        });
        let files = files.collect::<Result<Vec<_>, String>>()?;
        let (row_groups, changes) = (Vec::new(), changes.clone());
        let set = FileSet { bucket: row.bucket, samples: 0, row_groups, files, changes };
        listed.push(Listed { key, row: number, set });
    }
    let Some(Listed { set, .. }) = listed.last_mut() else { return Ok(()) };
    let index = set.row_groups.len();
    let row_group = row_group(row)?;
    if set.row_groups.last().is_some_and(|last| last.last_bucket() > row_group.bucket) {
        let path = row.files.first().map_or("", |file| &file.path);
        return Err(format!(
            "row group {index} of `{path}` begins with bucket {}, which is past",
            row.bucket
        ));
    }
    set.row_groups.push(row_group);
    set.samples = set.samples.saturating_add(row.samples);
    for (file, of_row) in set.files.iter_mut().zip(&row.files) {
        if of_row.row_group as usize != index {
            return Err(format!("row group {} of `{}` follows {index} others", of_row.row_group, file.path));
        }
        file.row_group_bytes.push(of_row.row_group_bytes);
    }
    Ok(())
}

fn row_group(row: &Row) -> Result<RowGroup, String> {
    if row.files.is_empty() || row.samples == 0 {
        return Err("a row group has no files or no samples".to_owned());
    }
    let starts = &row.bucket_starts;
    let inside = |start: &u32| *start > 0 && u64::from(*start) < row.samples;
    if !starts.is_sorted() || !starts.iter().all(inside) {
        return Err(format!("{starts:?} are not the rows at which buckets of {} rows begin", row.samples));
    }
    let digest = Digest::parse(&row.digest).ok_or_else(|| format!("`{}` is not a digest", row.digest))?;
    Ok(RowGroup {
        bucket: row.bucket,
        bucket_starts: starts.clone(),
        samples: row.samples,
        sessions: row.sessions,
        runs: row.runs,
        first_session: row.first_session,
        last_session: row.last_session,
        first_time: row.first_time,
        last_time: row.last_time,
        values: row.values,
        bytes_on_disk: row.files.iter().fold(0, |sum, file| sum.saturating_add(file.row_group_bytes)),
        digest,
    })
}

/// Calls `read` for each manifest and returns the results in order. Manifests are read in parallel because
/// requests to a store have a high latency.
fn of_each<T: Send>(
    entries: &[ManifestEntry],
    read: impl Fn(&ManifestEntry) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let pool = thread_pool(entries.len().min(MOST_THREADS))?;
    pool.install(|| entries.par_iter().map(&read).collect())
}

/// Returns the partitions of all manifests, by key.
pub(super) fn partitions(
    storage: &Storage,
    entries: &[ManifestEntry],
    order: Order,
) -> Result<BTreeMap<PartitionKey, Partition>> {
    let mut sets: BTreeMap<PartitionKey, Vec<(usize, FileSet)>> = BTreeMap::new();
    let listed = of_each(entries, |entry| entry.listed(storage))?;
    for (number, listed) in listed.into_iter().enumerate() {
        for Listed { key, set, .. } in listed {
            sets.entry(key).or_default().push((number, set));
        }
    }
    let partition = |(key, sets): (PartitionKey, Vec<(usize, FileSet)>)| {
        let mut partition = Partition::empty(key.clone());
        in_order(sets, order).into_iter().for_each(|set| partition.add(set));
        (key, partition)
    };
    Ok(sets.into_iter().map(partition).collect())
}

/// Returns the file sets of a partition in the order of their samples. Each input set comes with the index
/// of its manifest.
///
/// A manifest lists the sets of a range of buckets in order. If some files of a range were rewritten, the
/// range has sets in several manifests. These sets are ordered by their first bucket, and then by their
/// first sample.
pub(super) fn in_order(mut sets: Vec<(usize, FileSet)>, order: Order) -> Vec<FileSet> {
    sets.sort_by_key(|(_, set)| set.bucket);
    if sets.windows(2).all(|pair| pair[0].0 == pair[1].0) || has_divided_sessions(&sets) {
        return sets.into_iter().map(|(_, set)| set).collect();
    }
    for of_bucket in sets.chunk_by_mut(|(_, a), (_, b)| a.bucket == b.bucket) {
        let is_of_one = of_bucket.windows(2).all(|pair| pair[0].0 == pair[1].0);
        if !is_of_one {
            of_bucket.sort_by_key(|(_, set)| place(set, order));
        }
    }
    sets.into_iter().map(|(_, set)| set).collect()
}

/// Returns whether a session continues in another set. In this case, the first samples do not determine the
/// order of the sets. The sets of such a range are in one manifest, because it is always rewritten as a whole.
fn has_divided_sessions(sets: &[(usize, FileSet)]) -> bool {
    let ends =
        |set: &FileSet| Some((set.row_groups.first()?.first_session, set.row_groups.last()?.last_session));
    let ends: Vec<(i64, i64)> = sets.iter().filter_map(|(_, set)| ends(set)).collect();
    let mut firsts: HashMap<i64, usize> = HashMap::new();
    ends.iter().for_each(|(first, _)| *firsts.entry(*first).or_default() += 1);
    ends.iter().any(|(first, last)| firsts.get(last).copied().unwrap_or(0) > usize::from(first == last))
}

/// Returns the sort key of a set among the sets that begin with the same bucket. Only the last of them can
/// contain samples of other buckets. In all others, the earliest time of the first row group is the time of
/// their first sample.
fn place(set: &FileSet, order: Order) -> (bool, i64, i64) {
    let (Some(first), Some(last)) = (set.row_groups.first(), set.row_groups.last()) else {
        return (false, i64::MIN, i64::MIN);
    };
    let is_last = last.last_bucket() > set.bucket;
    match order {
        Order::Session => (is_last, first.first_time, first.first_session),
        Order::SessionHash => (is_last, first.first_session, first.first_time),
        Order::Arrival => (is_last, first.first_time, last.last_time),
    }
}

/// Returns the manifest path and the row of the first row group of each file set, by the set's path.
pub(crate) fn rows_of_sets(
    storage: &Storage,
    entries: &[ManifestEntry],
) -> Result<HashMap<String, (Arc<str>, usize)>> {
    let listed = of_each(entries, |entry| entry.listed(storage))?;
    let rows = entries.iter().zip(listed).flat_map(|(entry, listed)| {
        let path: Arc<str> = entry.path.as_str().into();
        listed.into_iter().map(move |listed| (listed.set.path().to_owned(), (Arc::clone(&path), listed.row)))
    });
    Ok(rows.collect())
}

/// Reads the statistics of the samples of row groups, in ascending order of manifest rows.
pub(crate) struct RowStatistics<'a> {
    entry: &'a ManifestEntry,
    storage: &'a Storage,
    schema: &'a Schema,
    /// The indices of the schema's sparse features in the manifest; `None` for features that the files lack.
    sparse: Vec<Option<usize>>,
    /// The indices of the schema's dense features, likewise.
    dense: Vec<Option<usize>>,
    file: ManifestFile,
    parts: Parts<StatisticsRow>,
    /// The decoded rows, and their numbers in the next field.
    rows: Vec<StatisticsRow>,
    numbers: Range<usize>,
}

impl<'a> RowStatistics<'a> {
    /// Opens a manifest of a snapshot with this schema.
    ///
    /// # Errors
    ///
    /// The errors of [`ManifestEntry::listed`], and [`Error::Snapshot`] if the statistics belong to other
    /// features.
    pub(crate) fn open(storage: &'a Storage, entry: &'a ManifestEntry, schema: &'a Schema) -> Result<Self> {
        let wrong = |message: String| entry.wrong(storage, message);
        let file = entry.open(storage, true)?;
        let parts = file.statistics().map_err(wrong)?;
        let sparse = schema.sparse_features().map(|feature| feature.name.as_str());
        let sparse = places(sparse, &file.names.features, &entry.changes).map_err(wrong)?;
        let dense = schema.dense.iter().map(String::as_str);
        let dense = places(dense, &file.names.dense, &entry.changes).map_err(wrong)?;
        Ok(Self { entry, storage, schema, sparse, dense, file, parts, rows: Vec::new(), numbers: 0..0 })
    }

    /// Returns the number of row groups in the manifest, including those that do not belong to the
    /// snapshot.
    pub(crate) fn len(&self) -> usize {
        self.file.len()
    }

    /// Returns the statistics of the row group in row `number`, in schema order; statistics of dense features
    /// only if `dense` is true. Statistics of features that the files lack are empty.
    pub(crate) fn get(&mut self, number: usize, dense: bool) -> Result<RowGroupStatistics> {
        let (entry, storage) = (self.entry, self.storage);
        self.decode(number, dense).map_err(|message| entry.wrong(storage, message))
    }

    /// Returns the statistics of the row group in row `number` as a manifest stores them: without those of
    /// features that the files lack.
    pub(super) fn stored(&mut self, number: usize) -> Result<RowGroupStatistics> {
        let RowGroupStatistics { mut features, mut dense } = self.get(number, true)?;
        let (mut sparse_places, mut dense_places) = (self.sparse.iter(), self.dense.iter());
        features.retain(|_| sparse_places.next().is_some_and(Option::is_some));
        dense.retain(|_| dense_places.next().is_some_and(Option::is_some));
        Ok(RowGroupStatistics { features, dense })
    }

    /// Returns the row groups that belong to the snapshot, as [`ManifestEntry::listed`].
    pub(super) fn listed(&self) -> Result<Vec<Listed>> {
        self.entry.list(&self.file).map_err(|message| self.entry.wrong(self.storage, message))
    }

    fn decode(&mut self, number: usize, dense: bool) -> Result<RowGroupStatistics, String> {
        if number < self.numbers.start {
            (self.parts, self.rows, self.numbers) = (self.file.statistics()?, Vec::new(), 0..0);
        }
        while number >= self.numbers.end {
            let rows =
                self.parts.next()?.ok_or_else(|| format!("it has no statistics of row group {number}"))?;
            self.numbers = self.numbers.end..self.numbers.end + rows.len();
            self.rows = rows;
        }
        let row = &self.rows[number - self.numbers.start];
        let names = &self.file.names;
        if (row.features.len(), row.dense.len()) != (names.features.len(), names.dense.len()) {
            return Err(OTHER_FEATURES.to_owned());
        }
        let sparse = self.sparse.iter();
        let sparse = sparse.map(|place| place.map_or_else(Default::default, |place| row.features[place]));
        let of_dense = |place: &Option<usize>| match place {
            Some(place) => DenseStatistics::try_from(row.dense[*place].clone()),
            None => Ok(DenseStatistics::default()),
        };
        let of_dense = self.dense.iter().filter(|_| dense).map(of_dense);
        Ok(RowGroupStatistics { features: sparse.collect(), dense: of_dense.collect::<Result<_, _>>()? })
    }

    /// Returns the sum over all row groups of these sets.
    pub(super) fn sum<'l>(
        &mut self,
        listed: impl IntoIterator<Item = &'l Listed>,
        dense: bool,
    ) -> Result<SampleStatistics> {
        let (mut sum, mut samples) = (RowGroupStatistics::default(), 0_u64);
        for set in listed {
            samples = samples.saturating_add(set.set.samples);
            for number in set.rows() {
                sum.merge(self.get(number, dense)?);
            }
        }
        for (statistics, place) in sum.dense.iter_mut().zip(&self.dense) {
            if place.is_none() {
                *statistics = DenseStatistics::repeated(MISSING_DENSE, samples);
            }
        }
        let sparse = self.schema.sparse_features().map(|feature| feature.name.clone());
        Ok(SampleStatistics {
            features: sparse.zip(sum.features).collect(),
            dense: self.schema.dense.iter().cloned().zip(sum.dense).collect(),
        })
    }
}

const OTHER_FEATURES: &str = "it has statistics of other features";

/// Returns the index of each feature in `known`; `None` for features that the files lack.
fn places<'f>(
    features: impl Iterator<Item = &'f str>,
    known: &[String],
    changes: &ColumnChanges,
) -> Result<Vec<Option<usize>>, String> {
    let place = |feature: &str| match changes.lacks(feature) {
        true => Some(None),
        false => known.iter().position(|name| name == changes.in_files(feature)).map(Some),
    };
    let places: Option<Vec<_>> = features.map(place).collect();
    let used = known.iter().filter(|name| changes.in_schema(name).is_some()).count();
    let places = places.filter(|places| places.iter().flatten().count() == used);
    places.ok_or_else(|| OTHER_FEATURES.to_owned())
}

/// Returns the statistics of all samples in the partitions that `is_wanted` chooses; statistics of dense
/// features only if `dense` is true.
pub(super) fn statistics(
    storage: &Storage,
    schema: &Schema,
    entries: &[ManifestEntry],
    is_wanted: impl Fn(&PartitionKey) -> bool + Sync,
    dense: bool,
) -> Result<SampleStatistics> {
    let all = Mutex::new(SampleStatistics::none(schema));
    of_each(entries, |entry| {
        let mut statistics = RowStatistics::open(storage, entry, schema)?;
        let listed = statistics.listed()?;
        let mut wanted = listed.iter().filter(|listed| is_wanted(&listed.key)).peekable();
        if wanted.peek().is_some() {
            let sum = statistics.sum(wanted, dense)?;
            locked(&all).merge(&sum);
        }
        Ok(())
    })?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Finds the files that snapshots list. Each manifest is decoded only once.
pub(crate) struct NamedFiles<'a> {
    pub(super) storage: &'a Storage,
    /// The paths of the files of each manifest row, by the path of the manifest.
    manifests: HashMap<String, Vec<Vec<String>>>,
}

impl<'a> NamedFiles<'a> {
    /// Creates an empty cache, without reading anything.
    pub(crate) fn new(storage: &'a Storage) -> Self {
        Self { storage, manifests: HashMap::new() }
    }

    /// Returns the path of the manifest and the paths of the data files of its row groups.
    pub(super) fn of_entry(&mut self, entry: &ManifestEntry) -> Result<Vec<&String>> {
        let wrong = |message: String| entry.wrong(self.storage, message);
        if !self.manifests.contains_key(&entry.path) {
            let rows = entry.open(self.storage, false)?.rows().map_err(wrong)?;
            let paths = |row: Row| row.files.into_iter().map(|file| file.path).collect();
            self.manifests.insert(entry.path.clone(), rows.into_iter().map(paths).collect());
        }
        let Some((path, rows)) = self.manifests.get_key_value(&entry.path) else { return Ok(Vec::new()) };
        let mut named = vec![path];
        for (first, next) in &entry.rows {
            let live = rows.get(*first as usize..*next as usize);
            let live = live.ok_or_else(|| wrong(format!("it has no row groups {first} to {next}")))?;
            named.extend(live.iter().flatten());
        }
        Ok(named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::manifest::RowFile;

    fn row(path: &str, row_group: u32) -> Row {
        let file = RowFile {
            path: path.to_owned(),
            bytes: 100,
            footer_bytes: 10,
            footer_checksum: 7,
            columns: 0,
            row_group,
            row_group_bytes: 50,
        };
        Row {
            partition: "day=1".to_owned(),
            bucket: 0,
            bucket_starts: Vec::new(),
            samples: 3,
            sessions: 2,
            runs: 2,
            first_session: 1,
            last_session: 2,
            first_time: 5,
            last_time: 6,
            values: 9,
            digest: "0".repeat(32),
            files: vec![file],
        }
    }

    fn list(rows: &[Row]) -> Result<Vec<Listed>, String> {
        let columns: [Arc<[String]>; 1] = [Arc::from(["a".to_owned()])];
        let mut listed = Vec::new();
        for (number, row) in rows.iter().enumerate() {
            add(&mut listed, number, row, (&columns, &ColumnChanges::default()))?;
        }
        Ok(listed)
    }

    #[test]
    fn row_groups_of_the_same_files_are_a_set() {
        let listed = list(&[row("x", 0), row("x", 1), row("y", 0)]).unwrap();
        let sets: Vec<_> = listed.iter().map(|listed| (listed.set.path(), listed.rows())).collect();
        assert_eq!(sets, [("x", 0..2), ("y", 2..3)]);
        assert_eq!((listed[0].set.samples, listed[0].set.sessions()), (6, 4));
        assert_eq!(listed[0].set.files[0].row_group_bytes, [50, 50]);
    }

    #[test]
    fn sets_of_several_manifests_are_in_the_order_of_their_samples() {
        let set = |path: &str, (first, last): (i64, i64), time: i64, starts: &[u32]| {
            let (first_session, last_session, first_time) = (first, last, time);
            let row = Row {
                first_session,
                last_session,
                first_time,
                bucket_starts: starts.to_vec(),
                ..row(path, 0)
            };
            list(&[row]).unwrap().remove(0).set
        };
        let ordered = |sets: &[(usize, FileSet)], order: Order| -> Vec<String> {
            in_order(sets.to_vec(), order).iter().map(|set| set.path().to_owned()).collect()
        };
        // The set `d` continues with the next bucket, whose sessions begin earlier.
        let sets = [
            (0, set("b", (40, 30), 7, &[])),
            (0, set("d", (60, 90), 1, &[1])),
            (1, set("a", (50, 20), 5, &[])),
            (1, set("c", (10, 70), 8, &[])),
        ];
        assert_eq!(ordered(&sets, Order::Session), ["a", "b", "c", "d"]);
        assert_eq!(ordered(&sets, Order::SessionHash), ["c", "b", "a", "d"]);
        // The sets of one manifest keep their order, and so do sets of several manifests if a session is in
        // two sets.
        assert_eq!(ordered(&sets.clone().map(|(_, set)| (0, set)), Order::Session), ["b", "d", "a", "c"]);
        let divided = [(0, set("b", (40, 50), 7, &[])), (1, set("a", (50, 50), 5, &[]))];
        assert_eq!(ordered(&divided, Order::Session), ["b", "a"]);
    }

    #[test]
    fn rows_that_contradict_each_other_are_refused() {
        let changed = |change: fn(&mut Row)| {
            let mut row = row("x", 0);
            change(&mut row);
            list(&[row]).unwrap_err()
        };
        assert!(
            list(&[row("x", 0), row("x", 2)]).unwrap_err().contains("row group 2 of `x` follows 1 others")
        );
        assert!(list(&[row("x", 1)]).unwrap_err().contains("row group 1"));
        assert!(changed(|row| row.files.clear()).contains("no files"));
        assert!(changed(|row| row.samples = 0).contains("no samples"));
        assert!(changed(|row| row.digest.clear()).contains("not a digest"));
        assert!(changed(|row| row.partition = "day".to_owned()).contains("`day` is not a partition key"));
        for starts in [vec![0], vec![3], vec![2, 1], vec![1, 7]] {
            let mut row = row("x", 0);
            row.bucket_starts = starts;
            assert!(list(&[row]).unwrap_err().contains("at which buckets of 3 rows begin"));
        }
        let (first, mut second) = (Row { bucket_starts: vec![1, 2], ..row("x", 0) }, row("x", 1));
        assert!(list(&[first.clone(), second.clone()]).unwrap_err().contains("begins with bucket 0"));
        second.bucket = 2;
        let listed = list(&[first, second]).unwrap();
        assert_eq!(listed[0].set.row_groups[0].bucket_starts, [1, 2]);
        assert!(changed(|row| row.files[0].columns = 1).contains("unknown columns"));
    }
}
