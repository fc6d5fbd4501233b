//! Stores maps from ids to their numbers in a vocabulary as files of the work folder. One process writes a map. Each
//! process that needs the map reads it once for all of its tasks.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use datafusion::arrow::array::{AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema as ArrowSchema, SchemaRef};
use datafusion::error::Result;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use onefold_base::sync::locked;
use onefold_datasets::IdMap;
use onefold_storage::Storage;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::work::{WorkFile, WorkRowsSpec};
use crate::error::{Error, external};

/// The number of pairs that are encoded at once.
const BATCH_PAIRS: usize = 64 << 10;
/// The largest number of bytes that a pair takes while a map is loaded.
const PAIR_BYTES: usize = 64;

static SCHEMA: LazyLock<SchemaRef> = LazyLock::new(|| {
    let column = |name| Field::new(name, DataType::Int64, false);
    Arc::new(ArrowSchema::new(vec![column("original"), column("id")]))
});

/// A map in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct IdMapFile {
    /// The work folder.
    folder: PathBuf,
    file: String,
    contents: Contents,
}

/// A summary of the pairs of a map, independent of their order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    pairs: usize,
    /// The sum of the hashes of the pairs.
    hash: u64,
}

impl Contents {
    fn add(&mut self, original: i64, id: i64) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&original.to_le_bytes());
        bytes[8..].copy_from_slice(&id.to_le_bytes());
        self.pairs += 1;
        self.hash = self.hash.wrapping_add(xxh3_64(&bytes));
    }
}

impl IdMapFile {
    /// Writes a map to the work folder. A map without ids has no file.
    pub(crate) fn write(folder: &Path, map: &IdMap) -> Result<Self> {
        let spec = WorkRowsSpec { folder: folder.to_owned(), name: "vocabulary".to_owned() };
        let mut file = WorkFile::create(&spec, Arc::clone(&SCHEMA))?;
        let (mut contents, mut pairs) = (Contents::default(), map.pairs());
        loop {
            let (originals, ids): (Vec<i64>, Vec<i64>) = pairs.by_ref().take(BATCH_PAIRS).unzip();
            if originals.is_empty() {
                break;
            }
            originals.iter().zip(&ids).for_each(|(original, id)| contents.add(*original, *id));
            let columns = (Arc::new(Int64Array::from(originals)), Arc::new(Int64Array::from(ids)));
            file.write(&RecordBatch::try_new(Arc::clone(&SCHEMA), vec![columns.0, columns.1])?)?;
        }
        let (file, _) = file.finish()?;
        Ok(Self { folder: folder.to_owned(), file, contents })
    }

    /// Returns the name of the file, if there is one.
    pub(crate) fn file(&self) -> Option<&str> {
        (self.contents.pairs > 0).then_some(&self.file)
    }

    /// Reads the map, and compares it with its summary.
    fn read(&self) -> Result<IdMap> {
        let Some(file) = self.file() else { return Ok(IdMap::default()) };
        let storage = Storage::open(&self.folder).map_err(|error| external(error.into()))?;
        let bytes = storage.read(file).map_err(|error| external(error.into()))?;
        let bytes = bytes.ok_or_else(|| self.damaged("it is gone"))?;
        let damaged = |error: &dyn std::fmt::Display| self.damaged(&error.to_string());
        let batches = ParquetRecordBatchReaderBuilder::try_new(bytes).map_err(|error| damaged(&error))?;
        let mut batches = batches.build().map_err(|error| damaged(&error))?;
        let (mut contents, mut failed) = (Contents::default(), None);
        let pairs = std::iter::from_fn(|| match batches.next()? {
            Ok(batch) if batch.schema().fields() == SCHEMA.fields() => Some(batch),
            Ok(_) => {
                failed = Some(self.damaged("it has other columns"));
                None
            }
            Err(error) => {
                failed = Some(damaged(&error));
                None
            }
        });
        let pairs = pairs.flat_map(|batch| {
            let [originals, ids] =
                [0, 1].map(|i| batch.column(i).as_primitive::<Int64Type>().values().clone());
            (0..batch.num_rows()).map(move |row| (originals[row], ids[row]))
        });
        let map = IdMap::of_pairs(pairs.inspect(|(original, id)| contents.add(*original, *id)));
        match failed {
            Some(error) => Err(error),
            None if contents != self.contents => {
                Err(self.damaged("its rows are not those that were written"))
            }
            None => Ok(map),
        }
    }

    fn damaged(&self, message: &str) -> datafusion::error::DataFusionError {
        external(Error::engine(
            format!(
                "the numbers of a vocabulary in `{}` cannot be read: {message}",
                self.folder.join(&self.file).display()
            ),
            "run it again, and keep the folder `work` of the dataset while it is built",
        ))
    }
}

/// A map in memory.
#[derive(Debug)]
pub(crate) struct LoadedIdMap {
    pub(crate) map: Arc<IdMap>,
    _held: MemoryReservation,
}

/// The maps in the memory of a process, by file. A map stays in memory as long as a task uses it.
#[derive(Debug, Default)]
pub(crate) struct IdMaps(Mutex<HashMap<(PathBuf, String), Weak<LoadedIdMap>>>);

impl IdMaps {
    /// Returns the map of a file. Its memory comes from `pool`. Blocks while the storage is read.
    ///
    /// # Errors
    ///
    /// If the map does not fit into memory, or its file cannot be read or has changed since it was written.
    pub(crate) fn load(&self, file: &IdMapFile, pool: &Arc<dyn MemoryPool>) -> Result<Arc<LoadedIdMap>> {
        // Other tasks that need a map wait here, so that it is read only once.
        let mut maps = locked(&self.0);
        maps.retain(|_, map| map.strong_count() > 0);
        let key = (file.folder.clone(), file.file.clone());
        if let Some(map) = maps.get(&key).and_then(Weak::upgrade) {
            return Ok(map);
        }
        let held = MemoryConsumer::new("numbers of a vocabulary").register(pool);
        held.try_grow(PAIR_BYTES * file.contents.pairs)?;
        let map = file.read()?;
        held.resize(map.memory_bytes());
        let loaded = Arc::new(LoadedIdMap { map: Arc::new(map), _held: held });
        maps.insert(key, Arc::downgrade(&loaded));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use datafusion::execution::memory_pool::{GreedyMemoryPool, UnboundedMemoryPool};
    use onefold_datasets::Vocabulary;

    use super::*;

    fn map(ids: i64) -> Arc<IdMap> {
        map_of((0..ids).map(|id| id * 7_000_000_001))
    }

    fn map_of(originals: impl Iterator<Item = i64>) -> Arc<IdMap> {
        Vocabulary::from_counts(originals.map(|original| (original, 1)), 1).id_map(None)
    }

    #[test]
    fn a_map_is_read_once_and_is_the_one_that_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let (map, maps) = (map(200_000), IdMaps::default());
        let file = IdMapFile::write(folder.path(), &map).unwrap();
        let text = serde_json::to_string(&file).unwrap();
        assert!(text.len() < 1000, "the map travels in the plan");
        let file: IdMapFile = serde_json::from_str(&text).unwrap();
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let loaded = maps.load(&file, &pool).unwrap();
        let sorted = |map: &IdMap| {
            let mut pairs: Vec<_> = map.pairs().collect();
            pairs.sort_unstable();
            pairs
        };
        assert_eq!(sorted(&loaded.map), sorted(&map));
        assert_eq!(pool.reserved(), loaded.map.memory_bytes());
        assert!(Arc::ptr_eq(&loaded, &maps.load(&file, &pool).unwrap()));
        drop(loaded);
        assert_eq!(pool.reserved(), 0);
        assert_eq!(maps.load(&file, &pool).unwrap().map.pairs().count(), 200_000);
    }

    #[test]
    fn a_map_of_ids_that_lie_close_together_is_the_same_when_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = IdMapFile::write(folder.path(), &map_of((0..1000).map(|id| 3 * id - 500))).unwrap();
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let loaded = IdMaps::default().load(&file, &pool).unwrap();
        let ids = [-501, -500, -499, 0, 1, 2497, 2498].map(|original| loaded.map.get(original));
        assert_eq!(ids, [0, 1, 0, 0, 168, 1000, 0]);
    }

    #[test]
    fn a_map_without_ids_has_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = IdMapFile::write(folder.path(), &IdMap::default()).unwrap();
        assert_eq!((file.file(), fs_err::read_dir(folder.path()).unwrap().count()), (None, 0));
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        assert_eq!(IdMaps::default().load(&file, &pool).unwrap().map.get(7), 0);
    }

    #[test]
    fn maps_that_do_not_fit_or_are_damaged_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let file = IdMapFile::write(folder.path(), &map(1000)).unwrap();
        let small: Arc<dyn MemoryPool> = Arc::new(GreedyMemoryPool::new(1000));
        let error = IdMaps::default().load(&file, &small).unwrap_err().to_string();
        assert!(error.contains("numbers of a vocabulary"), "{error}");
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        let load = || IdMaps::default().load(&file, &pool).unwrap_err().to_string();
        let path = folder.path().join(file.file().unwrap());
        let other = IdMapFile::write(folder.path(), &map(999)).unwrap();
        fs_err::copy(folder.path().join(other.file().unwrap()), &path).unwrap();
        assert!(load().contains("not those that were written"));
        fs_err::write(&path, "nonsense").unwrap();
        assert!(load().contains("cannot be read"));
        fs_err::remove_file(&path).unwrap();
        assert!(load().contains("it is gone"));
    }
}
