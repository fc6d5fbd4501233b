//! The memory budget of readers. Bytes are reserved before they are used, and released by dropping the reservation.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use onefold_base::sync::locked;

use crate::error::{Error, Result};

/// A limit in bytes for all memory that the epochs of some readers hold together.
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
    /// The number of epochs that are being read.
    epochs: u64,
}

/// The part of a budget that one epoch uses.
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    // These fields change only while the budget's state is locked.
    used: AtomicU64,
    /// The number of reservations that change without any action of the scheduler: those for row groups that are being
    /// decoded, whose true size replaces the estimate, and those for batches that are under way or queued.
    pending: AtomicUsize,
    closed: AtomicBool,
}

/// The result of a request for memory.
#[derive(Debug)]
pub(super) enum Granted {
    /// The bytes belong to the caller until the reservation is dropped.
    Yes(Reservation),
    /// There is not enough memory, and no pending release can change that: the budget would have to be `total` bytes.
    Never { total: u64 },
    /// The epoch is being dropped.
    Closed,
}

/// Bytes reserved from a budget.
#[derive(Debug)]
pub(super) struct Reservation {
    account: Arc<Account>,
    bytes: u64,
    batch: bool,
    /// Whether the account counts it as pending.
    pending: bool,
}

impl Budget {
    /// Creates a budget of three quarters of `limit`. The rest is for memory that is not counted: the allocator's
    /// overhead, the state of decompressors, and the program itself.
    pub(super) fn within(limit: u64) -> Arc<Self> {
        let total = limit - limit / 4;
        Arc::new(Self { limit, total, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Returns the limit that the user set, in bytes.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Returns a limit whose budget has at least `total` bytes.
    pub(super) fn limit_for(total: u64) -> u64 {
        total.saturating_add(total.div_ceil(3))
    }
}

impl Account {
    /// Opens the account of an epoch that is about to be read.
    pub(super) fn open(budget: &Arc<Budget>) -> Arc<Self> {
        locked(&budget.state).epochs += 1;
        Arc::new(Self {
            budget: Arc::clone(budget),
            used: AtomicU64::new(0),
            pending: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        })
    }

    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    fn grant(self: &Arc<Self>, state: &mut State, bytes: u64, batch: bool) -> Reservation {
        state.used += bytes;
        self.used.fetch_add(bytes, Relaxed);
        self.pending.fetch_add(1, Relaxed);
        Reservation { account: Arc::clone(self), bytes, batch, pending: true }
    }

    /// Reserves bytes for reading ahead. Succeeds if `headroom` bytes remain free, and the epoch does not exceed its
    /// share of the budget.
    pub(super) fn try_reserve(self: &Arc<Self>, bytes: u64, headroom: u64) -> Option<Reservation> {
        let mut state = locked(&self.budget.state);
        let fits = |used: u64, total: u64| used.saturating_add(bytes).saturating_add(headroom) <= total;
        let fits = fits(state.used, self.budget.total)
            && fits(self.used.load(Relaxed), self.budget.total / state.epochs.max(1));
        fits.then(|| self.grant(&mut state, bytes, false))
    }

    /// Reserves bytes for the row group that is needed next. Waits while batches of this epoch are under way and row
    /// groups are being decoded, because they will release bytes.
    ///
    /// It does not wait for other epochs, because the thread that consumes their batches may be the one that waits
    /// for this epoch. So an epoch always gets the memory that it needs to proceed if its own use stays within the
    /// budget.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Granted {
        self.wait_for(bytes, false)
    }

    /// Reserves bytes for a batch. If nothing else will be released, the reservation is granted even if it exceeds
    /// the budget, because finishing batches is what releases row groups.
    pub(super) fn reserve_batch(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        match self.wait_for(bytes, true) {
            Granted::Yes(reservation) => Some(reservation),
            Granted::Never { .. } => Some(self.grant(&mut locked(&self.budget.state), bytes, true)),
            Granted::Closed => None,
        }
    }

    fn wait_for(self: &Arc<Self>, bytes: u64, batch: bool) -> Granted {
        let mut state = locked(&self.budget.state);
        loop {
            if self.closed.load(Relaxed) {
                return Granted::Closed;
            }
            if state.used.saturating_add(bytes) <= self.budget.total {
                return Granted::Yes(self.grant(&mut state, bytes, batch));
            }
            if self.pending.load(Relaxed) == 0 {
                let total = self.used.load(Relaxed).saturating_add(bytes);
                return match total <= self.budget.total {
                    true => Granted::Yes(self.grant(&mut state, bytes, batch)),
                    false => Granted::Never { total },
                };
            }
            state = self.budget.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns an error if the epoch was dropped, so that queued work is skipped.
    pub(super) fn check_open(&self) -> Result<()> {
        match self.closed.load(Relaxed) {
            true => Err(Error::invariant("reader", "it was dropped")),
            false => Ok(()),
        }
    }

    /// Marks the epoch as dropped, and wakes all waiting threads.
    pub(super) fn close(&self) {
        let _state = locked(&self.budget.state);
        self.closed.store(true, Relaxed);
        self.budget.changed.notify_all();
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        locked(&self.budget.state).epochs -= 1;
    }
}

impl Reservation {
    /// Changes the reservation to the bytes that are really used, which may be more than the requested bytes.
    pub(super) fn resize(&mut self, bytes: u64) {
        let Account { budget, used, pending, .. } = &*self.account;
        let mut state = locked(&budget.state);
        state.used = state.used - self.bytes + bytes;
        used.store(used.load(Relaxed) - self.bytes + bytes, Relaxed);
        self.bytes = bytes;
        // A row group keeps its bytes until batches have taken its samples.
        if !self.batch && std::mem::take(&mut self.pending) {
            pending.fetch_sub(1, Relaxed);
        }
        budget.changed.notify_all();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let Account { budget, used, pending, .. } = &*self.account;
        let mut state = locked(&budget.state);
        state.used -= self.bytes;
        used.fetch_sub(self.bytes, Relaxed);
        pending.fetch_sub(usize::from(self.pending), Relaxed);
        budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(limit: u64) -> Arc<Account> {
        Account::open(&Budget::within(limit))
    }

    #[test]
    fn dropped_reservations_are_returned_to_the_budget() {
        let account = account(13);
        assert_eq!((account.budget().limit(), account.budget().total()), (13, 10));
        let first = account.try_reserve(6, 4).unwrap();
        assert!(account.try_reserve(5, 0).is_none());
        assert!(account.try_reserve(3, 2).is_none(), "the headroom counts");
        drop(first);
        let mut second = account.try_reserve(10, 0).unwrap();
        second.resize(1);
        assert!(account.try_reserve(9, 0).is_some());
    }

    #[test]
    fn a_limit_suffices_for_its_budget() {
        for total in [0, 1, 2, 3, 4, 5, 10, 1 << 30, (1 << 40) + 1] {
            let budget = Budget::within(Budget::limit_for(total));
            assert!((total..=total + 1).contains(&budget.total()), "{total}: {}", budget.total());
        }
    }

    #[test]
    fn batches_and_estimates_are_waited_for() {
        let account = account(13);
        let mut row_group = account.try_reserve(9, 0).unwrap();
        let (sender, begun) = std::sync::mpsc::channel();
        let waiting = {
            let account = Arc::clone(&account);
            std::thread::spawn(move || {
                sender.send(()).unwrap();
                matches!(account.reserve(2), Granted::Yes(_))
            })
        };
        begun.recv().unwrap();
        (0..1000).for_each(|_| std::thread::yield_now());
        row_group.resize(8);
        assert!(waiting.join().unwrap(), "the row group takes less memory than was estimated");
        assert!(matches!(account.reserve(4), Granted::Never { total: 12 }));
        // A batch gets its bytes although they exceed the budget, because it releases the row group.
        let batch = account.reserve_batch(4).unwrap();
        let waiting = {
            let account = Arc::clone(&account);
            std::thread::spawn(move || matches!(account.reserve(10), Granted::Yes(_)))
        };
        drop(row_group);
        drop(batch);
        assert!(waiting.join().unwrap());
        account.close();
        assert!(matches!(account.reserve(1), Granted::Closed));
    }

    #[test]
    fn epochs_that_share_a_budget_all_make_progress() {
        let budget = Budget::within(133);
        let first = Account::open(&budget);
        let all = first.try_reserve(90, 0).unwrap();
        let second = Account::open(&budget);
        assert!(second.try_reserve(20, 0).is_none(), "nothing is free");
        let Granted::Yes(mut needed) = second.reserve(50) else {
            panic!("the first epoch's batches may wait for the same caller");
        };
        needed.resize(50);
        assert!(matches!(second.reserve(51), Granted::Never { total: 101 }));
        drop((all, needed));
        assert!(first.try_reserve(51, 0).is_none(), "more than its share");
        assert!(first.try_reserve(50, 0).is_some());
        drop(second);
        assert!(first.try_reserve(51, 0).is_some());
    }
}
