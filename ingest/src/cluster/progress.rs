//! Progress counters of a build.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the samples that were read. Any thread may add to them.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    samples: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    /// Adds samples and the bytes that they take in memory.
    pub(super) fn read(&self, samples: usize, bytes: usize) {
        self.samples.fetch_add(samples as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Samples read so far.
    pub(crate) fn samples(&self) -> u64 {
        self.samples.load(Ordering::Relaxed)
    }

    /// Bytes that they took in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}
