//! Decides how long a worker holds the state of a session that is not seen: as long as sessions typically return.
//!
//! Holding a session that does not return wastes memory, and displaces sessions that do return from the processor's
//! caches. So a worker counts the distances, in samples, after which sessions return. Forgotten sessions are
//! included: a hash of each is kept, as ARC keeps entries of evicted pages (Megiddo and Modha 2003), so a horizon
//! that is too short is noticed.

use std::collections::HashMap;
use std::mem;

use xxhash_rust::xxh3::xxh3_64;

/// Sessions are held long enough that at most one in 64 samples finds its session forgotten.
const FORGOTTEN_PART: u64 = 64;
/// The number of samples after which the horizon is recomputed.
const PERIOD: u64 = 1 << 12;
/// When this number of samples is counted, all counts are halved, so that recent samples weigh more.
const MEMORY: u64 = 1 << 17;
/// The memory of a forgotten session in bytes.
const FORGOTTEN_BYTES: usize = 40;

/// Counts the distances, in samples, after which sessions return.
#[derive(Debug)]
pub(super) struct Reuse {
    /// The number of the current sample.
    now: u64,
    /// The number of the first sample of the current generation.
    begun: u64,
    /// The number of samples of a generation. A session is held for at least one and at most two generations.
    horizon: u64,
    /// The number of counted samples, and by `i` the number of samples whose session returned after more than
    /// `2^(i-1)` and at most `2^i` samples.
    counted: u64,
    distances: [u64; 64],
    /// For forgotten sessions, the number of the last sample by a hash of the session's identity, in two
    /// generations.
    forgotten: [HashMap<u64, u64>; 2],
    /// The maximum number of sessions in each of these maps.
    most_forgotten: usize,
}

impl Reuse {
    /// Creates empty counts. The hashes of forgotten sessions may take `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self {
            now: 0,
            begun: 0,
            horizon: u64::MAX,
            counted: 0,
            distances: [0; 64],
            forgotten: Default::default(),
            most_forgotten: bytes / FORGOTTEN_BYTES / 2,
        }
    }

    /// Whether a new generation should begin before the next sample.
    pub(super) fn is_over(&self) -> bool {
        self.now - self.begun >= self.horizon
    }

    /// Begins a generation.
    pub(super) fn begin(&mut self) {
        self.begun = self.now;
    }

    /// Counts the next sample and returns its number. `last` is the number of the session's previous sample, or
    /// `None` if the session is not held.
    pub(super) fn see(&mut self, identity: &[u8], last: Option<u64>) -> u64 {
        self.now += 1;
        self.counted += 1;
        if let Some(last) = last.or_else(|| self.take_forgotten(identity)) {
            // A distance is at least 1.
            self.distances[64 - (self.now - last - 1).leading_zeros() as usize] += 1;
        }
        if self.now.is_multiple_of(PERIOD) {
            self.set_horizon();
        }
        self.now
    }

    /// Records that a session is forgotten. Its last sample had the number `last`.
    pub(super) fn forget(&mut self, identity: &[u8], last: u64) {
        if self.forgotten[0].len() >= self.most_forgotten {
            self.forgotten[1] = mem::take(&mut self.forgotten[0]);
        }
        self.forgotten[0].insert(xxh3_64(identity), last);
    }

    fn take_forgotten(&mut self, identity: &[u8]) -> Option<u64> {
        if self.forgotten.iter().all(HashMap::is_empty) {
            return None;
        }
        let hash = xxh3_64(identity);
        self.forgotten.iter_mut().find_map(|forgotten| forgotten.remove(&hash))
    }

    /// Sets the horizon to the smallest power of two that is long enough.
    fn set_horizon(&mut self) {
        let mut beyond = 0;
        let too_many = self.distances.iter().rposition(|sessions| {
            beyond += sessions;
            beyond > self.counted / FORGOTTEN_PART
        });
        self.horizon = too_many.map_or(1, |bits| 1 << bits);
        if self.counted >= MEMORY {
            self.counted /= 2;
            self.distances.iter_mut().for_each(|sessions| *sessions /= 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Returns the horizon after samples of these sessions. Sessions that are not seen for a horizon are forgotten
    /// at once.
    fn horizon(sessions: impl Iterator<Item = u64>, bytes: usize) -> u64 {
        let mut reuse = Reuse::new(bytes);
        let mut seen: HashMap<u64, u64> = HashMap::new();
        for session in sessions {
            if reuse.is_over() {
                let (now, horizon) = (reuse.now, reuse.horizon);
                for (session, last) in seen.extract_if(|_, last| now - *last > horizon) {
                    reuse.forget(&session.to_le_bytes(), last);
                }
                reuse.begin();
            }
            let last = seen.get(&session).copied();
            seen.insert(session, reuse.see(&session.to_le_bytes(), last));
        }
        reuse.horizon
    }

    #[test]
    fn the_horizon_is_as_long_as_sessions_need() {
        // Cycles through a thousand sessions, then through another thousand.
        let near = |sample: u64| sample / 100_000 * 1000 + sample % 1000;
        assert_eq!(horizon((0..400_000).map(near), 1 << 30), 1024);
        // One of `part` samples belongs to a session that returns after 50,000 samples.
        let far = |part: u64| {
            move |sample: u64| match sample.is_multiple_of(part) {
                true => u64::MAX - sample % 50_000,
                false => near(sample),
            }
        };
        // One sample in a hundred returns late: too few to hold all sessions that long.
        assert_eq!(horizon((0..400_000).map(far(100)), 1 << 30), 1024);
        // One sample in ten returns late: their sessions are forgotten at first.
        assert_eq!(horizon((0..400_000).map(far(10)), 1 << 30), 1 << 16);
        // Without room for hashes, late returns are not noticed.
        assert_eq!(horizon((0..400_000).map(far(10)), 0), 1024);
    }

    #[test]
    fn sessions_of_one_sample_are_not_held() {
        assert_eq!(horizon(0..PERIOD - 1, 1 << 20), u64::MAX);
        assert_eq!(horizon(0..10_000, 1 << 20), 1);
    }
}
