//! Collectives of ranks that are threads of one process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onefold_base::sync::locked;
use tch::Tensor;

use super::{Collectives, Operation, Pending, misused};
use crate::{Error, Result};

/// Creates the `size` ranks of a job whose ranks are threads of this process; each thread takes one. For tests.
///
/// An operation that takes longer than `timeout` fails. A rank that is dropped, or whose thread panics, is
/// lost.
pub fn threads(size: u32, timeout: Duration) -> Vec<ThreadCollectives> {
    let ranks = (0..size).map(|_| Rank::default()).collect();
    let state = Mutex::new(State { ranks, open: HashMap::new() });
    let meeting = Arc::new(Meeting { size, timeout, state, changed: Condvar::new() });
    let of_rank =
        |rank| ThreadCollectives { rank, meeting: Arc::clone(&meeting), started: AtomicU64::new(0) };
    (0..size).map(of_rank).collect()
}

/// A rank that is a thread. Sent tensors are copied at the start, and received in [`Pending::wait`].
#[derive(Debug)]
pub struct ThreadCollectives {
    rank: u32,
    meeting: Arc<Meeting>,
    /// The number of operations that this rank has started, which is also the index of the next one.
    started: AtomicU64,
}

/// The state that the ranks share.
#[derive(Debug)]
struct Meeting {
    size: u32,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Rank>,
    /// The open operations by index: at least one rank has started it, and not all ranks have ended it.
    open: HashMap<u64, Open>,
}

#[derive(Debug, Default)]
struct Rank {
    step: u64,
    ended: Option<Ended>,
}

/// The end of a rank.
#[derive(Debug)]
enum Ended {
    Dropped,
    Panicked,
    Aborted(String),
}

#[derive(Debug)]
struct Open {
    /// The deposit of every rank.
    deposits: Vec<Option<Deposit>>,
    /// The number of ranks that have taken the deposits.
    taken: u32,
}

/// The contribution of a rank to an operation.
#[derive(Debug)]
struct Deposit {
    /// The operation's name, and the arguments that must be the same on all ranks.
    call: String,
    /// A copy of the sent tensor, in one dimension, which is not written.
    sent: Tensor,
    /// The number of elements for each rank, in [`Collectives::all_to_all`].
    splits: Vec<i64>,
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Waits for all deposits of an operation.
    fn take(&self, number: u64, operation: &'static str) -> Result<Vec<Deposit>> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.lock();
        loop {
            let open = state.open.get_mut(&number).expect("an operation is open until every rank took it");
            let Some(missing) = open.deposits.iter().position(Option::is_none) else {
                open.taken += 1;
                let deposits: Vec<Deposit> =
                    open.deposits.iter().flatten().map(Deposit::shallow_clone).collect();
                if open.taken == self.size {
                    state.open.remove(&number);
                }
                return same_call(operation, deposits);
            };
            // A rank that aborts is the cause if other ranks are lost.
            let ended = state.ranks.iter().position(|rank| matches!(rank.ended, Some(Ended::Aborted(_))));
            let rank = ended.unwrap_or(missing);
            if let Some(ended) = &state.ranks[rank].ended {
                return Err(ended_error(rank as u32, state.ranks[rank].step, ended));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let cause = format!("it did not come to `{operation}` within {:?}", self.timeout);
                let step = state.ranks[missing].step;
                return Err(Error::rank_lost(&[missing as u32], step, &cause));
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn end(&self, rank: u32, ended: Ended) {
        self.lock().ranks[rank as usize].ended.get_or_insert(ended);
        self.changed.notify_all();
    }
}

fn ended_error(rank: u32, step: u64, ended: &Ended) -> Error {
    let cause = match ended {
        Ended::Aborted(message) => return Error::rank_ended(rank, step, message),
        Ended::Dropped => "its thread has ended",
        Ended::Panicked => "its thread panicked",
    };
    Error::rank_lost(&[rank], step, cause)
}

/// Checks that all ranks called the same operation.
fn same_call(operation: &'static str, deposits: Vec<Deposit>) -> Result<Vec<Deposit>> {
    let first = &deposits[0].call;
    match deposits.iter().position(|deposit| deposit.call != *first) {
        None => Ok(deposits),
        Some(rank) => {
            let message = format!("rank {rank} called {}, and rank 0 called {first}", deposits[rank].call);
            Err(misused(operation, message))
        }
    }
}

fn copied(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

impl Deposit {
    /// Returns the elements that `rank` sends to the rank `own`, which expects `length` elements.
    fn part_for(&self, own: usize, length: i64, rank: usize) -> Result<Tensor> {
        let theirs = self.splits[own];
        if theirs != length {
            let message =
                format!("rank {rank} sends {theirs} elements to rank {own}, which expects {length}");
            return Err(misused("all_to_all", message));
        }
        Ok(self.sent.f_narrow(0, self.splits[..own].iter().sum(), length)?)
    }

    fn shallow_clone(&self) -> Self {
        Self { call: self.call.clone(), sent: self.sent.shallow_clone(), splits: self.splits.clone() }
    }
}

impl ThreadCollectives {
    /// Deposits this rank's contribution; `finish` gets the deposits of all ranks, in the order of ranks.
    fn deposit(
        &self,
        operation: &'static str,
        arguments: String,
        (sent, splits): (&Tensor, Vec<i64>),
        finish: impl FnOnce(Vec<Deposit>) -> Result<()> + 'static,
    ) -> Result<Pending> {
        let sent = tch::no_grad(|| copied(sent))?;
        let deposit = Deposit { call: format!("`{operation}` {arguments}"), sent, splits };
        let mut state = self.meeting.lock();
        // Under the lock, so that indices are in the order of deposits.
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let size = self.meeting.size as usize;
        let open = state
            .open
            .entry(number)
            .or_insert_with(|| Open { deposits: (0..size).map(|_| None).collect(), taken: 0 });
        open.deposits[self.rank as usize] = Some(deposit);
        drop(state);
        self.meeting.changed.notify_all();
        let meeting = Arc::clone(&self.meeting);
        Ok(Pending::new(move || {
            let deposits = meeting.take(number, operation)?;
            tch::no_grad(|| finish(deposits))
        }))
    }
}

impl Collectives for ThreadCollectives {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.meeting.size
    }

    fn start(&self, operation: Operation) -> Result<Pending> {
        let (name, own) = (operation.name(), self.rank as usize);
        match operation {
            Operation::AllToAll { received, received_splits, sent, sent_splits } => {
                let call = format!("of {:?}", sent.kind());
                self.deposit(name, call, (&sent, sent_splits), move |deposits| {
                    let mut start = 0;
                    for (rank, (deposit, length)) in deposits.iter().zip(received_splits).enumerate() {
                        let part = deposit.part_for(own, length, rank)?;
                        received.f_narrow(0, start, length)?.f_copy_(&part)?;
                        start += length;
                    }
                    Ok(())
                })
            }
            Operation::AllReduce { mut tensor } => {
                let call = format!("of {:?} {:?}", tensor.kind(), tensor.size());
                self.deposit(name, call, (&tensor.shallow_clone(), Vec::new()), move |deposits| {
                    // In the order of ranks, so that the result is bit-identical on all ranks.
                    let mut reduced = copied(&deposits[0].sent)?;
                    for deposit in &deposits[1..] {
                        reduced.f_copy_(&reduced.f_add(&deposit.sent)?)?;
                    }
                    tensor.f_copy_(&reduced)?;
                    Ok(())
                })
            }
            Operation::AllGather { gathered, tensor } => {
                let call = format!("of {:?} {:?}", tensor.kind(), tensor.size());
                self.deposit(name, call, (&tensor, Vec::new()), move |deposits| {
                    let length = deposits[0].sent.numel() as i64;
                    for (rank, deposit) in (0..).zip(&deposits) {
                        gathered.f_narrow(0, rank * length, length)?.f_copy_(&deposit.sent)?;
                    }
                    Ok(())
                })
            }
            Operation::Barrier => {
                let nothing = Tensor::from_slice::<u8>(&[]);
                self.deposit(name, String::new(), (&nothing, Vec::new()), |_| Ok(()))
            }
        }
    }

    fn set_step(&self, step: u64) {
        self.meeting.lock().ranks[self.rank as usize].step = step;
    }

    fn abort(&self, message: &str) {
        self.meeting.end(self.rank, Ended::Aborted(message.to_owned()));
    }
}

impl Drop for ThreadCollectives {
    fn drop(&mut self) {
        let ended = if std::thread::panicking() { Ended::Panicked } else { Ended::Dropped };
        self.meeting.end(self.rank, ended);
    }
}
