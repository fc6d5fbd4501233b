//! How long a worker holds a session that is not seen: as long as sessions come back.
//!
//! A session that does not come back is held for nothing. It takes memory, and those that do come back are no longer in
//! the processor's caches. So the distances are counted after which sessions come back, in samples. They are counted
//! for forgotten sessions too, of which a hash is kept, as ARC keeps some of pages (Megiddo and Modha 2003): whoever
//! forgets too early learns of it.

use std::collections::HashMap;
use std::mem;

use xxhash_rust::xxh3::xxh3_64;

/// Sessions are held so long that at most one in so many samples finds its session forgotten.
const FORGOTTEN_PART: u64 = 64;
/// The horizon is set anew after so many samples.
const PERIOD: u64 = 1 << 12;
/// When so many samples are counted, all counts are halved, so that later samples weigh more.
const MEMORY: u64 = 1 << 17;
/// Bytes that a forgotten session takes.
const FORGOTTEN_BYTES: usize = 40;

/// Counts after how many samples sessions come back.
#[derive(Debug)]
pub(super) struct Reuse {
    /// The number of the current sample.
    now: u64,
    /// The first sample of the current generation.
    begun: u64,
    /// The samples of a generation. A session is held for one generation at least, and for two at most.
    horizon: u64,
    /// The samples that are counted, and by `i` those whose session came back after more than `2^(i-1)` samples and at
    /// most `2^i`.
    counted: u64,
    distances: [u64; 64],
    /// By a hash of their identity, when forgotten sessions were seen last, in two generations.
    forgotten: [HashMap<u64, u64>; 2],
    /// The most sessions of each of these.
    most_forgotten: usize,
}

impl Reuse {
    /// No samples yet. The hashes of forgotten sessions may take so many bytes.
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

    /// Whether the sessions seen in this generation should become the older ones, before the next sample.
    pub(super) fn is_over(&self) -> bool {
        self.now - self.begun >= self.horizon
    }

    /// Begins a generation.
    pub(super) fn begin(&mut self) {
        self.begun = self.now;
    }

    /// Counts the next sample and returns its number. `last` is the number of the session's last sample, or `None` if
    /// the session is not held.
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

    /// Notes that a session is forgotten, which was last seen at sample `last`.
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

    /// Sets the smallest power of two as the horizon that is long enough.
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

    /// The horizon after samples of these sessions, of which those not seen for a horizon are forgotten at once.
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
        // Each of a thousand sessions in turn, then a thousand others.
        let near = |sample: u64| sample / 100_000 * 1000 + sample % 1000;
        assert_eq!(horizon((0..400_000).map(near), 1 << 30), 1024);
        // Among them, one sample in so many is of a session that comes back after 50,000 samples.
        let far = |part: u64| {
            move |sample: u64| match sample.is_multiple_of(part) {
                true => u64::MAX - sample % 50_000,
                false => near(sample),
            }
        };
        // One in a hundred: too few to hold all sessions so long.
        assert_eq!(horizon((0..400_000).map(far(100)), 1 << 30), 1024);
        // One in ten: they are forgotten at first.
        assert_eq!(horizon((0..400_000).map(far(10)), 1 << 30), 1 << 16);
        // Nothing is known of sessions for whose hashes there is no room.
        assert_eq!(horizon((0..400_000).map(far(10)), 0), 1024);
    }

    #[test]
    fn sessions_of_one_sample_are_not_held() {
        assert_eq!(horizon(0..PERIOD - 1, 1 << 20), u64::MAX);
        assert_eq!(horizon(0..10_000, 1 << 20), 1);
    }
}
