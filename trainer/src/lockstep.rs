//! Synchronization of ranks: all ranks continue or all end, and exactly one rank reports an error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use onefold_base::fault::{Fault, Text, text};
use onefold_base::sync::locked;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use crate::distributed::{Collectives, Pending};
use crate::embedding::Status;
use crate::{Error, Result, shim};

/// The flag of a rank that requests the end of training after its current step.
pub(crate) const STOP: i64 = 1;
/// The flag of a rank that requests a checkpoint after its current step.
pub(crate) const CHECKPOINT: i64 = 4;

/// The states of a rank's work.
const WORKING: f64 = 0.0;
const SUCCEEDED: f64 = 1.0;
const BROKEN: f64 = 2.0;
/// The interval at which ranks exchange their states while at least one of them is working.
pub(crate) const BEAT: Duration = Duration::from_millis(500);

impl dyn Collectives + '_ {
    /// Returns `result` if every rank has succeeded. Otherwise returns an error on all ranks: the lowest failed
    /// rank returns its own error, the others return [`Error::ReportedElsewhere`]. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors above, and those of all collective operations.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return result;
        }
        let all = self.gather(&[f64::from(result.is_err())])?;
        self.reported(all.iter().position(|failed| failed[0] != 0.0), result)
    }

    /// Returns `result` if no rank has failed; otherwise the error of this rank if it is the one that `failed`, or
    /// the error that another rank reports it.
    fn reported<T>(&self, failed: Option<usize>, result: Result<T>) -> Result<T> {
        match (failed, result) {
            (Some(rank), Err(error)) if rank as u32 == self.rank() => Err(error),
            (Some(rank), _) => Err(reported_by(rank)),
            (None, result) => result,
        }
    }

    /// Runs `work`, and agrees on its result as `agree` does. `work` may take longer than the
    /// timeout of an operation, because the ranks exchange their states meanwhile. `work` must not call
    /// collective operations. With several ranks, a panic of `work` becomes an error.
    ///
    /// # Errors
    ///
    /// The errors of `agree`; [`Error::Io`] if a thread cannot be started.
    pub fn agree_on<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.size() == 1 {
            return work();
        }
        let state = (Mutex::new(WORKING), Condvar::new());
        let (result, failed) = std::thread::scope(|scope| {
            let watching = Builder::new().spawn_scoped(scope, || self.watch(&state))?;
            // Without this, the other ranks would wait forever for a rank that panics, because its second
            // thread would continue to report that it is working.
            let result = catch_unwind(AssertUnwindSafe(work));
            let result = result.unwrap_or_else(|panic| Err(Fault::of_panic(&*panic).into()));
            *locked(&state.0) = if result.is_ok() { SUCCEEDED } else { BROKEN };
            state.1.notify_all();
            std::io::Result::Ok((result, watching.join()))
        })?;
        let failed = failed.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        self.reported(failed, result)
    }

    /// Sends this rank's state to the other ranks until all are done. Returns the lowest rank that failed, if
    /// any.
    fn watch(&self, (state, changed): &(Mutex<f64>, Condvar)) -> Result<Option<usize>> {
        loop {
            let own = {
                let state = locked(state);
                let wait = changed.wait_timeout_while(state, BEAT, |state| *state == WORKING);
                *wait.unwrap_or_else(PoisonError::into_inner).0
            };
            let states = self.gather(&[own])?;
            if states.iter().all(|state| state[0] != WORKING) {
                return Ok(states.iter().position(|state| state[0] == BROKEN));
            }
        }
    }

    /// Returns every rank's value, by rank. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for a value that cannot be encoded or decoded; the errors of all collective operations.
    pub fn gather_json<T: Serialize + ?Sized, U: DeserializeOwned>(&self, own: &T) -> Result<Vec<U>> {
        let all = self.gather_bytes(&serde_json::to_vec(own).map_err(std::io::Error::other)?)?;
        let values = all.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(values.collect::<serde_json::Result<_>>().map_err(std::io::Error::other)?)
    }

    /// Returns the result of `work` on the lowest rank, which all other ranks receive. Every rank must call it. `work`
    /// must not call collective operations.
    ///
    /// # Errors
    ///
    /// The errors of `agree_on`; [`Error::Io`] for a value that cannot be encoded or decoded.
    pub fn of_lowest<T: Serialize + DeserializeOwned>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let own = self.agree_on(|| if self.rank() == 0 { work().map(Some) } else { Ok(None) })?;
        let bytes = serde_json::to_vec(&own).map_err(std::io::Error::other)?;
        let of_lowest = self.gather_bytes(&bytes)?.swap_remove(0);
        Ok(serde_json::from_slice(&of_lowest).map_err(std::io::Error::other)?)
    }

    /// Checks that every rank has the same values, such as options, by name; the lowest rank reports a
    /// difference. Every rank must call it with the same names.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] on the lowest rank, [`Error::ReportedElsewhere`] on the others; those of all collective
    /// operations.
    pub fn check_same(&self, own: &[(Text, String)]) -> Result<()> {
        let all: Vec<Vec<(Text, String)>> = self.gather_json(own)?;
        for (rank, other) in all.iter().enumerate() {
            let differs = all[0].iter().zip(other).find(|(first, other)| first != other);
            let Some(((what, _), _)) = differs else { continue };
            return Err(match self.rank() {
                0 => Error::ranks(
                    text![format!("rank {rank} differs from rank 0 in "), what.clone()],
                    "start all ranks with the same program, files and options",
                ),
                _ => reported_by(0),
            });
        }
        Ok(())
    }

    /// Returns every rank's `values`, by rank.
    ///
    /// # Errors
    ///
    /// The errors of all collective operations.
    pub fn gather(&self, values: &[f64]) -> Result<Vec<Vec<f64>>> {
        if self.size() == 1 {
            return Ok(vec![values.to_vec()]);
        }
        let own = Tensor::f_from_slice(values)?;
        let count = i64::from(self.size()) * values.len() as i64;
        let all = Tensor::f_zeros([count], (Kind::Double, tch::Device::Cpu))?;
        self.all_gather(&all, &own)?.wait()?;
        Ok(Vec::<f64>::try_from(&all)?.chunks(values.len().max(1)).map(<[f64]>::to_vec).collect())
    }

    /// Returns the sum of `count` over all ranks.
    ///
    /// # Errors
    ///
    /// The errors of all collective operations.
    pub fn sum(&self, count: u64) -> Result<u64> {
        // Doubles represent integers exactly up to 2^53.
        Ok(self.gather(&[count as f64])?.iter().map(|of_rank| of_rank[0] as u64).sum())
    }
}

/// Returns the error of a rank that ends because `rank` failed and reports its error.
pub(crate) fn reported_by(rank: usize) -> Error {
    Error::ReportedElsewhere { rank: rank as u32, reporter: rank as u32 }
}

/// Returns whether all ranks continue with the batches that they announced.
///
/// # Errors
///
/// [`Error::ReportedElsewhere`] if a rank has failed.
pub(crate) fn go_on(statuses: &[Status]) -> Result<bool> {
    match statuses.iter().position(|status| status.flags & Status::FAILED != 0) {
        Some(rank) => Err(reported_by(rank)),
        None => Ok(statuses.iter().all(|status| status.flags & STOP == 0)),
    }
}

/// Parameters whose gradients are summed over all ranks, flattened into one tensor. With one rank, this does
/// nothing.
#[derive(Debug)]
pub(crate) struct Bucket {
    parameters: Vec<Tensor>,
    under_way: Option<(Pending, Tensor)>,
    /// The bytes that this rank has sent. A ring all-reduce over W ranks sends `2 (W - 1) / W` times the bytes
    /// of its tensor.
    pub(crate) sent_bytes: u64,
}

impl Bucket {
    /// Creates a bucket of these parameters, which must have the same order on all ranks.
    pub(crate) fn new(parameters: Vec<Tensor>) -> Self {
        Self { parameters, under_way: None, sent_bytes: 0 }
    }

    /// Starts the summation of the current gradients.
    pub(crate) fn start(&mut self, collectives: &dyn Collectives) -> Result<()> {
        if collectives.size() == 1 || self.parameters.is_empty() {
            return Ok(());
        }
        let gradients = self.parameters.iter().map(|parameter| {
            let gradient = parameter.grad();
            // A rank without samples has no gradient.
            let gradient = if gradient.defined() { gradient } else { parameter.detach().f_zeros_like()? };
            gradient.f_reshape([-1])
        });
        let flat = Tensor::f_cat(&gradients.collect::<Result<Vec<_>, _>>()?, 0)?;
        let ranks = u64::from(collectives.size());
        self.sent_bytes += 2 * (ranks - 1) * 4 * flat.numel() as u64 / ranks;
        self.under_way = Some((collectives.all_reduce(&flat)?, flat));
        Ok(())
    }

    /// Waits for the sums, and replaces the gradients by them.
    pub(crate) fn finish(&mut self) -> Result<()> {
        let Some((pending, flat)) = self.under_way.take() else { return Ok(()) };
        pending.wait()?;
        let mut first = 0;
        for parameter in &self.parameters {
            let length = parameter.numel() as i64;
            let sum = flat.narrow(0, first, length).view(parameter.size().as_slice());
            shim::set_gradient(parameter, Some(&sum));
            first += length;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::threads;

    /// Otherwise the other ranks would wait forever, because the failed rank's second thread reports that it is
    /// working.
    #[test]
    fn a_panic_of_one_rank_is_an_error_of_all() {
        let work = |rank: &dyn Collectives| {
            rank.agree_on(|| if rank.rank() == 1 { panic!("out of range") } else { Ok(rank.rank()) })
        };
        let results: Vec<Result<u32>> = std::thread::scope(|scope| {
            let ranks = threads(3, Duration::from_secs(300)).into_iter();
            let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || work(&rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let own = results[1].as_ref().unwrap_err().to_string();
        assert!(own.starts_with("internal error: out of range\n  hint: this is a bug"), "{own}");
        for other in [&results[0], &results[2]] {
            assert!(matches!(other, Err(Error::ReportedElsewhere { rank: 1, .. })), "{other:?}");
        }
    }
}
