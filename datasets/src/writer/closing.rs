//! Closes ranges of buckets while others are being written.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use super::{BucketWriter, BucketWriters, discard};
use crate::{Result, WrittenBucket};

/// Closes ranges of buckets on separate threads, so that the caller does not wait until the last files are
/// encoded and uploaded.
///
/// When this is dropped, the files of closed ranges that were not [taken](Self::take) are removed.
#[derive(Debug)]
pub struct ClosingBuckets {
    writers: BucketWriters,
    closing: VecDeque<JoinHandle<Result<WrittenBucket>>>,
    ended: VecDeque<WrittenBucket>,
}

impl ClosingBuckets {
    /// Creates an empty set of ranges of these writers.
    pub fn new(writers: &BucketWriters) -> Self {
        let (closing, ended) = Default::default();
        Self { writers: writers.clone(), closing, ended }
    }

    /// Starts to close a range. It waits while too many other ranges are being closed by users of the same
    /// encoders.
    ///
    /// # Errors
    ///
    /// The errors of [`BucketWriter::finish`] for an earlier range; [`Error::Io`](crate::Error::Io) if a
    /// thread cannot be started.
    pub fn close(&mut self, range: BucketWriter) -> Result<()> {
        let permit = self.writers.format.encoders.closing()?;
        let end = move || {
            let written = range.finish();
            drop(permit);
            written
        };
        self.closing.push_back(std::thread::Builder::new().name("onefold-close".to_owned()).spawn(end)?);
        while self.closing.front().is_some_and(JoinHandle::is_finished) {
            self.end_next()?;
        }
        Ok(())
    }

    /// Waits until all ranges are closed.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`BucketWriter::finish`].
    pub fn finish(&mut self) -> Result<()> {
        while !self.closing.is_empty() {
            self.end_next()?;
        }
        Ok(())
    }

    /// Removes and returns the next closed range, in the order of [`close`](Self::close).
    pub fn take(&mut self) -> Option<WrittenBucket> {
        self.ended.pop_front()
    }

    /// Waits for the oldest range.
    fn end_next(&mut self) -> Result<()> {
        let Some(thread) = self.closing.pop_front() else { return Ok(()) };
        self.ended.push_back(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        Ok(())
    }
}

impl Drop for ClosingBuckets {
    fn drop(&mut self) {
        for thread in self.closing.drain(..) {
            // Ignores further errors; the caller reports the first one.
            self.ended.extend(thread.join().into_iter().flatten());
        }
        let paths = self.ended.iter().flat_map(WrittenBucket::paths).map(str::to_owned).collect();
        discard(&self.writers.storage, paths);
    }
}
