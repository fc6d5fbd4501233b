//! The data files that the readers of a process have opened: their storage objects and their footers.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use onefold_base::sync::locked;
use onefold_datasets::DataFile;
use onefold_datasets::footer::{self, Footer};
use onefold_storage::{Object, Storage};

use crate::error::{Error, Result};

/// The data files of a dataset. All readers that share their workers share them.
#[derive(Debug)]
pub(super) struct KnownFiles {
    state: Mutex<Known>,
    /// The limit on the bytes of the footers of all datasets, and their present number.
    limit: usize,
    used: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct Known {
    /// The storage objects in the versions that were found first, by path. Every request names this version, so that a
    /// later change of the file is detected.
    objects: HashMap<String, Object>,
    /// Footers by path, and the paths from the oldest footer to the newest.
    footers: HashMap<String, Arc<Footer>>,
    oldest: VecDeque<String>,
}

fn bytes_of(footer: &Footer) -> usize {
    footer.metadata.metadata().memory_size()
}

impl KnownFiles {
    /// Creates the files of a dataset. `limit` is in bytes; `used` counts the bytes of the footers of all datasets.
    pub(super) fn new(limit: u64, used: &Arc<AtomicUsize>) -> Self {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Self { state: Mutex::default(), limit, used: Arc::clone(used) }
    }

    /// Returns whether the footer of the file at `path` is in memory.
    pub(super) fn has_footer(&self, path: &str) -> bool {
        locked(&self.state).footers.contains_key(path)
    }

    /// Returns the object and the footer of a data file, which are read from storage if they are not in memory.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing or has another size than the snapshot records, [`Error::Corrupt`] if its
    /// footer differs from the one that was written.
    pub(super) fn open(&self, storage: &Storage, file: &DataFile) -> Result<(Object, Arc<Footer>)> {
        let object = self.find(storage, file)?;
        if let Some(footer) = locked(&self.state).footers.get(&file.path) {
            return Ok((object, Arc::clone(footer)));
        }
        let footer = Footer::read(storage, file, object.e_tag.clone())?;
        let footer = footer.map_err(|message| Error::corrupt(&storage.shown(&file.path), None, message))?;
        Ok((object, self.keep(&file.path, Arc::new(footer))))
    }

    /// Returns the object of a data file, which must have the size that the snapshot records.
    fn find(&self, storage: &Storage, file: &DataFile) -> Result<Object> {
        if let Some(object) = locked(&self.state).objects.get(&file.path) {
            return Ok(object.clone());
        }
        let mismatch = |message: String| Error::mismatch(storage.shown(&file.path), message);
        let object = footer::find(storage, file)?.map_err(mismatch)?;
        Ok(locked(&self.state).objects.entry(file.path.clone()).or_insert(object).clone())
    }

    /// Keeps a footer. Drops the oldest footers of this dataset while those of all datasets exceed the limit.
    fn keep(&self, path: &str, footer: Arc<Footer>) -> Arc<Footer> {
        let mut state = locked(&self.state);
        if let Some(same) = state.footers.get(path) {
            return Arc::clone(same);
        }
        self.used.fetch_add(bytes_of(&footer), Relaxed);
        state.footers.insert(path.to_owned(), Arc::clone(&footer));
        state.oldest.push_back(path.to_owned());
        while self.used.load(Relaxed) > self.limit && state.oldest.len() > 1 {
            let oldest = state.oldest.pop_front().and_then(|oldest| state.footers.remove(&oldest));
            self.used.fetch_sub(oldest.map_or(0, |footer| bytes_of(&footer)), Relaxed);
        }
        footer
    }
}

impl Drop for KnownFiles {
    fn drop(&mut self) {
        let footers = locked(&self.state).footers.values().map(|footer| bytes_of(footer)).sum();
        self.used.fetch_sub(footers, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use onefold_datasets::Snapshot;

    use super::*;

    #[test]
    fn footers_are_read_once_and_stay_within_the_limit() {
        let storage =
            Storage::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/v6"))).unwrap();
        let snapshot = Snapshot::load_from(&storage, None).unwrap();
        let files = snapshot.partitions.iter().flat_map(|partition| &partition.files);
        let files: Vec<&DataFile> = files.flat_map(|set| &set.files).collect();
        assert!(files.len() > 1);
        let used = Arc::new(AtomicUsize::new(0));
        let read = |known: &KnownFiles| -> Vec<Arc<Footer>> {
            files.iter().map(|file| known.open(&storage, file).unwrap().1).collect()
        };
        let many = KnownFiles::new(1 << 30, &used);
        let footers = read(&many);
        assert!(read(&many).iter().zip(&footers).all(|(again, first)| Arc::ptr_eq(again, first)));
        let all: usize = footers.iter().map(|footer| bytes_of(footer)).sum();
        assert_eq!(used.load(Relaxed), all);
        // Another dataset has no room for more than one footer, which it needs.
        let few = KnownFiles::new(1, &used);
        read(&few);
        let last = files[files.len() - 1];
        assert_eq!(used.load(Relaxed), all + bytes_of(&few.open(&storage, last).unwrap().1));
        assert!(few.has_footer(&last.path) && !few.has_footer(&files[0].path));
        drop((few, many));
        assert_eq!(used.load(Relaxed), 0);
    }
}
