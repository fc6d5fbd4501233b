//! Where the reader's time goes, summed over its threads.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StageFigures {
    /// Comparing the bytes of columns with their checksums.
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
    /// Bytes that were compared with their checksums.
    pub bytes_verified: u64,
    /// Bytes of columns that came from the storage, with those between them that one request covers.
    pub bytes_read: u64,
}

impl StageFigures {
    /// The time of all stages together.
    pub fn seconds(&self) -> Duration {
        let all = self.verify_seconds
            + self.read_seconds
            + self.decode_seconds
            + self.arrange_seconds
            + self.cut_seconds
            + self.deduplicate_seconds
            + self.preprocess_seconds;
        Duration::try_from_secs_f64(all).unwrap_or_default()
    }

    /// What was done since `earlier`, after what these figures say was done.
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, |now, then| now - then, u64::saturating_sub)
    }

    /// Both together.
    pub fn and(&self, other: &Self) -> Self {
        self.with(other, |a, b| a + b, u64::saturating_add)
    }

    /// So many times as much.
    pub fn scaled(&self, factor: f64) -> Self {
        Self {
            verify_seconds: self.verify_seconds * factor,
            read_seconds: self.read_seconds * factor,
            decode_seconds: self.decode_seconds * factor,
            arrange_seconds: self.arrange_seconds * factor,
            cut_seconds: self.cut_seconds * factor,
            deduplicate_seconds: self.deduplicate_seconds * factor,
            preprocess_seconds: self.preprocess_seconds * factor,
            bytes_verified: (self.bytes_verified as f64 * factor) as u64,
            bytes_read: (self.bytes_read as f64 * factor) as u64,
        }
    }

    fn with(&self, other: &Self, seconds: fn(f64, f64) -> f64, bytes: fn(u64, u64) -> u64) -> Self {
        Self {
            verify_seconds: seconds(self.verify_seconds, other.verify_seconds),
            read_seconds: seconds(self.read_seconds, other.read_seconds),
            decode_seconds: seconds(self.decode_seconds, other.decode_seconds),
            arrange_seconds: seconds(self.arrange_seconds, other.arrange_seconds),
            cut_seconds: seconds(self.cut_seconds, other.cut_seconds),
            deduplicate_seconds: seconds(self.deduplicate_seconds, other.deduplicate_seconds),
            preprocess_seconds: seconds(self.preprocess_seconds, other.preprocess_seconds),
            bytes_verified: bytes(self.bytes_verified, other.bytes_verified),
            bytes_read: bytes(self.bytes_read, other.bytes_read),
        }
    }
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
