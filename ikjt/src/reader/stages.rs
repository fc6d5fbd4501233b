//! Where the reader's time goes, summed over its threads.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Counters that the reader's threads add to.
#[derive(Debug, Default)]
pub(super) struct Stages {
    verify_nanos: AtomicU64,
    read_nanos: AtomicU64,
    decode_nanos: AtomicU64,
    arrange_nanos: AtomicU64,
    cut_nanos: AtomicU64,
    deduplicate_nanos: AtomicU64,
    preprocess_nanos: AtomicU64,
    bytes_verified: AtomicU64,
    bytes_read: AtomicU64,
}

/// Time by stage, summed over the reader's threads, and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StageFigures {
    /// Checksums of files that were read for the first time.
    pub verify_seconds: f64,
    /// Reading byte ranges.
    pub read_seconds: f64,
    /// Decompressing and decoding Parquet.
    pub decode_seconds: f64,
    /// Making tensors of decoded columns: offsets, inverse indices from nulls, interleaved floats.
    pub arrange_seconds: f64,
    /// Cutting batches of exact size out of row groups.
    pub cut_seconds: f64,
    /// Finding duplicates or windows, or expanding.
    pub deduplicate_seconds: f64,
    /// The preprocessing pipeline, and the check of ids.
    pub preprocess_seconds: f64,
    /// Bytes read for checksums.
    pub bytes_verified: u64,
    /// Bytes read to decode, without those that were still in memory after they were read for a checksum.
    pub bytes_read: u64,
}

impl Stages {
    pub(super) fn verified(&self, started: Instant, bytes: u64) {
        add(&self.verify_nanos, started);
        self.bytes_verified.fetch_add(bytes, Relaxed);
    }

    pub(super) fn read(&self, started: Instant, bytes: u64) {
        add(&self.read_nanos, started);
        self.bytes_read.fetch_add(bytes, Relaxed);
    }

    pub(super) fn decoded(&self, started: Instant) {
        add(&self.decode_nanos, started);
    }

    pub(super) fn arranged(&self, started: Instant) {
        add(&self.arrange_nanos, started);
    }

    pub(super) fn cut(&self, started: Instant) {
        add(&self.cut_nanos, started);
    }

    pub(super) fn deduplicated(&self, started: Instant) {
        add(&self.deduplicate_nanos, started);
    }

    pub(super) fn preprocessed(&self, started: Instant) {
        add(&self.preprocess_nanos, started);
    }

    pub(super) fn figures(&self) -> StageFigures {
        let seconds = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed)).as_secs_f64();
        StageFigures {
            verify_seconds: seconds(&self.verify_nanos),
            read_seconds: seconds(&self.read_nanos),
            decode_seconds: seconds(&self.decode_nanos),
            arrange_seconds: seconds(&self.arrange_nanos),
            cut_seconds: seconds(&self.cut_nanos),
            deduplicate_seconds: seconds(&self.deduplicate_nanos),
            preprocess_seconds: seconds(&self.preprocess_nanos),
            bytes_verified: self.bytes_verified.load(Relaxed),
            bytes_read: self.bytes_read.load(Relaxed),
        }
    }
}

fn add(nanos: &AtomicU64, started: Instant) {
    nanos.fetch_add(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
}
