//! Limits the memory of the row groups that are checked in parallel.

use futures::executor::block_on;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::units::{format_bytes, format_least_bytes};
use tokio::sync::{Semaphore, SemaphorePermit};

/// The unit in which memory is counted, in bytes.
const UNIT: u64 = 1 << 10;

/// An amount of memory that threads share.
#[derive(Debug)]
pub(super) struct Memory {
    limit: u64,
    /// The bytes that are in use already.
    held: u64,
    /// The free memory, in units.
    free: Semaphore,
}

impl Memory {
    /// Creates a memory of `limit` bytes, of which `held` bytes are in use.
    pub(super) fn new(limit: u64, held: u64) -> Self {
        Self { limit, held, free: Semaphore::new(in_units(limit.saturating_sub(held)) as usize) }
    }

    /// Waits until `bytes` bytes are free, and takes them until the returned permit is dropped. A thread that
    /// holds a permit must not wait for another one.
    ///
    /// # Errors
    ///
    /// Returns an error if the limit does not allow `bytes` beside the bytes that are in use already.
    pub(super) fn wait_for(&self, bytes: u64) -> Result<SemaphorePermit<'_>, Fault> {
        let needed = bytes.saturating_add(self.held);
        if needed > self.limit {
            let sessions = match self.held {
                0 => String::new(),
                held => format!(" with the {} of the sessions around it", format_bytes(held)),
            };
            let (total, limit) = (format_bytes(needed), format_bytes(self.limit));
            let message =
                format!("checking it takes up to {total}{sessions}, and the memory limit is {limit}");
            let hint = format!("; it must be at least {}", format_least_bytes(needed));
            return Err(Fault::new(Kind::Options, message).hint(text![
                "raise ",
                option("memory_limit"),
                hint
            ]));
        }
        let permit = block_on(self.free.acquire_many(in_units(bytes)));
        permit.map_err(|closed| Fault::new(Kind::Failed, closed.to_string()))
    }
}

fn in_units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn threads_together_stay_within_the_limit() {
        let (memory, taken) = (Memory::new(107 * UNIT, 7 * UNIT), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (memory, taken) = (&memory, &taken);
                scope.spawn(move || {
                    for turn in 0..200 {
                        let bytes = ((thread * 13 + turn * 7) % 101) * UNIT;
                        let room = memory.wait_for(bytes).unwrap();
                        assert!(taken.fetch_add(bytes, Ordering::SeqCst) + bytes <= 100 * UNIT);
                        std::thread::yield_now();
                        taken.fetch_sub(bytes, Ordering::SeqCst);
                        drop(room);
                    }
                });
            }
        });
        assert_eq!(memory.free.available_permits(), 100);
    }

    #[test]
    fn requests_above_the_limit_are_refused() {
        for limit in [1, 1000, 5 << 20] {
            for held in [0, limit / 2] {
                let memory = Memory::new(limit, held);
                assert!(memory.wait_for(limit - held).is_ok());
                let error = memory.wait_for(limit - held + 1).unwrap_err();
                assert_eq!(error.kind, Kind::Options);
            }
        }
    }
}
