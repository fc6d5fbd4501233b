//! The time of the reader's stages, summed over its threads.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use onefold_base::sync::locked;
use serde::{Deserialize, Serialize};

/// Figures that the reader's threads update.
#[derive(Debug, Default)]
pub(super) struct Stages(Mutex<StageFigures>);

/// The time of each stage, summed over the reader's threads, and numbers of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct StageFigures {
    /// The time of comparing the bytes of columns with their checksums.
    pub verify_seconds: f64,
    /// The time of reading byte ranges.
    pub read_seconds: f64,
    /// The time of decompressing and decoding Parquet.
    pub decode_seconds: f64,
    /// The time of making tensors from decoded columns: offsets, inverse indices from nulls, interleaved floats.
    pub arrange_seconds: f64,
    /// The time of cutting batches of exact size out of row groups.
    pub cut_seconds: f64,
    /// The time of finding duplicates or windows, or of expanding rows.
    pub deduplicate_seconds: f64,
    /// The time of preprocessing, and of checking ids.
    pub preprocess_seconds: f64,
    /// The number of bytes that were compared with their checksums.
    pub bytes_verified: u64,
    /// The number of bytes that were read from storage, including bytes between columns that one request covers.
    pub bytes_read: u64,
}

impl StageFigures {
    /// Returns the seconds of each stage, with its name.
    pub fn by_stage(&self) -> [(&'static str, f64); 7] {
        [
            ("verify", self.verify_seconds),
            ("read", self.read_seconds),
            ("decode", self.decode_seconds),
            ("arrange", self.arrange_seconds),
            ("cut", self.cut_seconds),
            ("deduplicate", self.deduplicate_seconds),
            ("preprocess", self.preprocess_seconds),
        ]
    }

    /// Returns the total time of all stages.
    pub fn seconds(&self) -> Duration {
        let all = self.by_stage().iter().map(|(_, seconds)| seconds).sum();
        Duration::try_from_secs_f64(all).unwrap_or_default()
    }

    /// Returns the difference between these figures and the figures `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, |now, then| now - then, u64::saturating_sub)
    }

    /// Returns the sum of both figures.
    pub fn and(&self, other: &Self) -> Self {
        self.with(other, |a, b| a + b, u64::saturating_add)
    }

    /// Returns the figures multiplied by `factor`.
    pub fn scaled(&self, factor: f64) -> Self {
        self.with(self, |seconds, _| seconds * factor, |bytes, _| (bytes as f64 * factor) as u64)
    }

    fn with(&self, other: &Self, seconds: impl Fn(f64, f64) -> f64, bytes: impl Fn(u64, u64) -> u64) -> Self {
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
        self.add(|figures| &mut figures.verify_seconds, started);
        locked(&self.0).bytes_verified += bytes;
    }

    pub(super) fn read(&self, started: Instant, bytes: u64) {
        self.add(|figures| &mut figures.read_seconds, started);
        locked(&self.0).bytes_read += bytes;
    }

    /// Adds the time since `started` to a stage.
    pub(super) fn add(&self, stage: fn(&mut StageFigures) -> &mut f64, started: Instant) {
        *stage(&mut locked(&self.0)) += started.elapsed().as_secs_f64();
    }

    pub(super) fn figures(&self) -> StageFigures {
        *locked(&self.0)
    }
}
