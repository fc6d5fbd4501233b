//! Files that were just verified, kept for decoding: from an object store, their bytes need not come twice.
//!
//! What is kept counts in the memory budget. It is reserved by the scheduler before a file is verified, if at least
//! half of the budget stays free beside it, and released when the file's row groups are on their way, or as soon as the
//! scheduler needs the memory. What is not kept any more is requested again.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use onefold_storage::Ranges;

use super::budget::{Account, Reservation};

/// The bytes of a file, as long as they are kept.
#[derive(Debug, Clone, Default)]
pub(super) struct KeptFile(Arc<Mutex<Option<Kept>>>);

#[derive(Debug)]
struct Kept {
    /// From the first byte of the file on.
    ranges: Ranges,
    _reservation: Reservation,
}

impl KeptFile {
    /// Room for a file of `bytes`, if at least half of the budget stays free.
    pub(super) fn reserve(account: &Arc<Account>, bytes: u64) -> Option<Self> {
        let reservation = account.try_reserve(bytes, account.budget().total() / 2)?;
        let kept = Kept { ranges: Ranges::empty(bytes), _reservation: reservation };
        Some(Self(Arc::new(Mutex::new(Some(kept)))))
    }

    fn kept(&self) -> MutexGuard<'_, Option<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is room for the file's bytes.
    pub(super) fn is_kept(&self) -> bool {
        self.kept().is_some()
    }

    /// Keeps the next bytes.
    pub(super) fn add(&self, ranges: Ranges) {
        if let Some(kept) = &mut *self.kept() {
            kept.ranges.append(ranges);
        }
    }

    /// A copy of some ranges of the file; `None` if they are not kept.
    pub(super) fn copy(&self, wanted: Vec<Range<u64>>) -> Option<Ranges> {
        self.kept().as_ref()?.ranges.copy(wanted)
    }

    /// Gives the memory back.
    pub(super) fn release(&self) {
        *self.kept() = None;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use onefold_storage::Storage;

    use super::super::budget::Budget;
    use super::*;

    #[test]
    fn a_file_is_kept_until_it_is_released() {
        let budget = Account::open(&Budget::within(400));
        assert!(KeptFile::reserve(&budget, 151).is_none(), "half of 300 bytes stays free");
        let kept = KeptFile::reserve(&budget, 100).unwrap();
        assert!(KeptFile::reserve(&budget, 100).is_none());
        let decoded = kept.clone();
        for part in [0..60, 60..100] {
            kept.add(read(part));
        }
        let wanted = || vec![50..70, 90..100];
        let copied = decoded.copy(wanted()).unwrap();
        assert_eq!(copied.bytes(), 30);
        assert!(budget.try_reserve(201, 0).is_none());
        kept.release();
        assert!(budget.try_reserve(300, 0).is_some(), "what is released is free, whoever still refers to it");
        kept.add(read(0..100));
        assert!(decoded.copy(wanted()).is_none());
    }

    /// A range of a file of 100 bytes.
    fn read(range: Range<u64>) -> Ranges {
        let directory = tempfile::tempdir().unwrap();
        fs_err::write(directory.path().join("file"), [7; 100]).unwrap();
        let storage = Storage::open(Path::new(directory.path())).unwrap();
        storage.read_ranges("file", 100, std::iter::once(range).collect(), None).unwrap()
    }
}
