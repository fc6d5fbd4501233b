//! The reader's memory budget: bytes are reserved before they are used and given back by dropping.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};

/// So many bytes, shared by everything the reader holds.
#[derive(Debug)]
pub(super) struct Budget {
    limit: u64,
    total: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    /// Reservations of batches under way or queued: those that come free without the scheduler doing anything.
    batches: usize,
    closed: bool,
}

/// What became of a request for memory.
#[derive(Debug)]
pub(super) enum Granted {
    /// The bytes are the caller's until the reservation is dropped.
    Yes(Reservation),
    /// There is no room, and nothing more will be released: the budget would have to be `total` bytes.
    Never { total: u64 },
    /// The reader is being dropped.
    Closed,
}

/// Bytes taken from a budget.
#[derive(Debug)]
pub(super) struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
    batch: bool,
}

impl Budget {
    /// A budget of three quarters of `limit`. The rest is left to what cannot be counted: the allocator's slack, the state
    /// of decompression, the program itself.
    pub(super) fn within(limit: u64) -> Arc<Self> {
        let total = limit - limit / 4;
        Arc::new(Self { limit, total, state: Mutex::default(), changed: Condvar::new() })
    }

    /// What the user asked for.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// A limit whose budget has at least `total` bytes.
    pub(super) fn limit_for(total: u64) -> u64 {
        total.saturating_add(total.div_ceil(3))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grant(self: &Arc<Self>, state: &mut State, bytes: u64, batch: bool) -> Reservation {
        state.used += bytes;
        state.batches += usize::from(batch);
        Reservation { budget: Arc::clone(self), bytes, batch }
    }

    /// Bytes for a row group, if `headroom` bytes stay free beside them.
    pub(super) fn try_reserve(self: &Arc<Self>, bytes: u64, headroom: u64) -> Option<Reservation> {
        let mut state = self.state();
        let fits = state.used.saturating_add(bytes).saturating_add(headroom) <= self.total;
        fits.then(|| self.grant(&mut state, bytes, false))
    }

    /// Whether so many bytes are free now.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.state().used.saturating_add(bytes) <= self.total
    }

    /// Bytes for a row group that must come next: waits as long as batches are under way that will give theirs back.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Granted {
        self.wait_for(bytes, false)
    }

    /// Bytes for a batch. It is what frees row groups, so it is granted even where it does not fit once nothing
    /// else will come free.
    pub(super) fn reserve_batch(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        match self.wait_for(bytes, true) {
            Granted::Yes(reservation) => Some(reservation),
            Granted::Never { .. } => Some(self.grant(&mut self.state(), bytes, true)),
            Granted::Closed => None,
        }
    }

    fn wait_for(self: &Arc<Self>, bytes: u64, batch: bool) -> Granted {
        let mut state = self.state();
        loop {
            if state.closed {
                return Granted::Closed;
            }
            if state.used.saturating_add(bytes) <= self.total {
                return Granted::Yes(self.grant(&mut state, bytes, batch));
            }
            if state.batches == 0 {
                return Granted::Never { total: state.used.saturating_add(bytes) };
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// An error once nobody will take batches any more: work that has not begun then is not worth beginning.
    pub(super) fn check_open(&self) -> Result<()> {
        if self.state().closed { Err(Error::invariant("reader", "it was dropped")) } else { Ok(()) }
    }

    /// Wakes whoever waits: nobody will take batches any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.changed.notify_all();
    }
}

impl Reservation {
    /// Makes the reservation what was really used, which may be more than was asked for.
    pub(super) fn resize(&mut self, bytes: u64) {
        let mut state = self.budget.state();
        state.used = state.used - self.bytes + bytes;
        self.bytes = bytes;
        self.budget.changed.notify_all();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.state();
        state.used -= self.bytes;
        state.batches -= usize::from(self.batch);
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_comes_free() {
        let budget = Budget::within(13);
        assert_eq!((budget.limit(), budget.total()), (13, 10));
        let first = budget.try_reserve(6, 4).unwrap();
        assert!(budget.try_reserve(5, 0).is_none());
        assert!(budget.try_reserve(3, 2).is_none(), "the headroom counts");
        drop(first);
        let mut second = budget.try_reserve(10, 0).unwrap();
        second.resize(1);
        assert!(budget.try_reserve(9, 0).is_some());
    }

    #[test]
    fn a_limit_suffices_for_its_budget() {
        for total in [0, 1, 2, 3, 4, 5, 10, 1 << 30, (1 << 40) + 1] {
            let budget = Budget::within(Budget::limit_for(total));
            assert!((total..=total + 1).contains(&budget.total()), "{total}: {}", budget.total());
        }
    }

    #[test]
    fn only_batches_are_waited_for() {
        let budget = Budget::within(13);
        let row_group = budget.try_reserve(8, 0).unwrap();
        assert!(matches!(budget.reserve(4), Granted::Never { total: 12 }));
        // A batch gets its bytes all the same: it is what frees the row group.
        let batch = budget.reserve_batch(4).unwrap();
        let waiting = {
            let budget = Arc::clone(&budget);
            std::thread::spawn(move || matches!(budget.reserve(10), Granted::Yes(_)))
        };
        drop(row_group);
        drop(batch);
        assert!(waiting.join().unwrap());
        budget.close();
        assert!(matches!(budget.reserve(1), Granted::Closed));
    }
}
