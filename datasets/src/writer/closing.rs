//! Ranges of buckets that are ended while others are written.

use std::collections::VecDeque;
use std::thread::JoinHandle;

use super::{BucketWriter, BucketWriters};
use crate::names::WRITTEN_FOLDERS;
use crate::{Result, WrittenBucket};

/// Ends ranges of buckets on threads of their own, so that the caller does not wait until their last files are encoded
/// and uploaded.
///
/// The files of ranges that were ended and not [taken](Self::take) are removed when this is dropped.
#[derive(Debug)]
pub struct ClosingBuckets {
    writers: BucketWriters,
    closing: VecDeque<JoinHandle<Result<WrittenBucket>>>,
    ended: VecDeque<WrittenBucket>,
}

impl ClosingBuckets {
    /// No ranges yet, of these writers.
    pub fn new(writers: &BucketWriters) -> Self {
        let (closing, ended) = Default::default();
        Self { writers: writers.clone(), closing, ended }
    }

    /// Ends a range. Waits while too many others are being ended, here or by others that share the encoders.
    ///
    /// # Errors
    ///
    /// As [`BucketWriter::finish`], for one of the ranges before; [`Error::Io`](crate::Error::Io) if a thread cannot
    /// be started.
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

    /// Waits until all ranges have ended.
    ///
    /// # Errors
    ///
    /// As [`BucketWriter::finish`].
    pub fn finish(&mut self) -> Result<()> {
        while !self.closing.is_empty() {
            self.end_next()?;
        }
        Ok(())
    }

    /// A range that has ended, in the order in which they were closed.
    pub fn take(&mut self) -> Option<WrittenBucket> {
        self.ended.pop_front()
    }

    /// Waits for the range that was closed first.
    fn end_next(&mut self) -> Result<()> {
        let Some(thread) = self.closing.pop_front() else { return Ok(()) };
        self.ended.push_back(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        Ok(())
    }
}

impl Drop for ClosingBuckets {
    fn drop(&mut self) {
        for thread in self.closing.drain(..) {
            // The error that led here counts.
            self.ended.extend(thread.join().into_iter().flatten());
        }
        let paths: Vec<String> =
            self.ended.iter().flat_map(WrittenBucket::paths).map(str::to_owned).collect();
        if !paths.is_empty() {
            self.writers.storage.clean_up(paths);
            self.writers.storage.remove_empty_folders(&WRITTEN_FOLDERS);
        }
    }
}
