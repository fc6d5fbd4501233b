//! Ranks in lockstep: all go on, or all end, and of an error one rank speaks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use onefold_base::fault::{Fault, Text, text};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Kind, Tensor};

use crate::distributed::{Collectives, Pending, Reduce};
use crate::embedding::Status;
use crate::{Error, Result, shim};

/// A rank wishes that training ends after the step that it is in.
pub(crate) const STOP: i64 = 1;
/// A rank wishes for a checkpoint after the step that it is in.
pub(crate) const CHECKPOINT: i64 = 4;

/// States of a rank's work.
const WORKING: i64 = 0;
const SUCCEEDED: i64 = 1;
const BROKEN: i64 = 2;
/// How long ranks that wait for another's work say nothing.
pub(crate) const BEAT: Duration = Duration::from_millis(500);

impl dyn Collectives + '_ {
    /// `result`, if every rank has succeeded; otherwise an error on all ranks: its own on the lowest rank that failed,
    /// [`Error::ReportedElsewhere`] on the others. Every rank calls it.
    ///
    /// # Errors
    ///
    /// As said, and those of all operations.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        if self.size() == 1 {
            return result;
        }
        let failed = Tensor::f_from_slice(&[i64::from(result.is_err())])?;
        let all = Tensor::f_zeros([i64::from(self.size())], (Kind::Int64, tch::Device::Cpu))?;
        self.all_gather(&all, &failed)?.wait()?;
        let failed = Vec::<i64>::try_from(&all)?.into_iter().position(|failed| failed != 0);
        match (failed, result) {
            (Some(rank), Err(error)) if rank as u32 == self.rank() => Err(error),
            (Some(rank), _) => Err(reported_by(rank)),
            (None, result) => result,
        }
    }

    /// As `agree` on the result of `work`, which may take longer than an operation may: meanwhile the ranks see that
    /// all of them are there. `work` does nothing that is collective. Of several ranks its panic is an error.
    ///
    /// # Errors
    ///
    /// As `agree`; [`Error::Io`] if a thread cannot be started.
    pub fn agree_on<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.size() == 1 {
            return work();
        }
        let state = (Mutex::new(WORKING), Condvar::new());
        let (result, failed) = std::thread::scope(|scope| {
            let watching = Builder::new().spawn_scoped(scope, || self.watch(&state))?;
            // The other ranks would wait for a rank that panics for ever, because its thread goes on to say that it works.
            let result = catch_unwind(AssertUnwindSafe(work));
            let result = result.unwrap_or_else(|panic| Err(Fault::of_panic(&*panic).into()));
            *state.0.lock().unwrap_or_else(PoisonError::into_inner) =
                if result.is_ok() { SUCCEEDED } else { BROKEN };
            state.1.notify_all();
            std::io::Result::Ok((result, watching.join()))
        })?;
        let failed = failed.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        match (failed, result) {
            (Some(rank), Err(error)) if rank as u32 == self.rank() => Err(error),
            (Some(rank), _) => Err(reported_by(rank)),
            (None, result) => result,
        }
    }

    /// Tells the other ranks this one's state until all are done. Returns the lowest one that failed.
    fn watch(&self, (state, changed): &(Mutex<i64>, Condvar)) -> Result<Option<usize>> {
        loop {
            let own = {
                let state = state.lock().unwrap_or_else(PoisonError::into_inner);
                let wait = changed.wait_timeout_while(state, BEAT, |state| *state == WORKING);
                *wait.unwrap_or_else(PoisonError::into_inner).0
            };
            let all = Tensor::f_zeros([i64::from(self.size())], (Kind::Int64, tch::Device::Cpu))?;
            self.all_gather(&all, &Tensor::f_from_slice(&[own])?)?.wait()?;
            let states = Vec::<i64>::try_from(&all)?;
            if states.iter().all(|state| *state != WORKING) {
                return Ok(states.iter().position(|state| *state == BROKEN));
            }
        }
    }

    /// Every rank's value, by rank. Every rank calls it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for a value that is not read as it was written; those of all operations.
    pub(crate) fn gather_json<T: Serialize + ?Sized, U: DeserializeOwned>(&self, own: &T) -> Result<Vec<U>> {
        let all = self.gather_bytes(&serde_json::to_vec(own).map_err(std::io::Error::other)?)?;
        let values = all.iter().map(|bytes| serde_json::from_slice(bytes));
        Ok(values.collect::<serde_json::Result<_>>().map_err(std::io::Error::other)?)
    }

    /// Refuses ranks that are not the same in all that is named, as by an option; the lowest rank reports it.
    /// Every rank calls it with the same names.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] on the lowest rank, [`Error::ReportedElsewhere`] on the others; those of all operations.
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

    /// Every rank's `values`, by rank.
    ///
    /// # Errors
    ///
    /// Those of all operations.
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

    /// The sum of every rank's `count`.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    pub fn sum(&self, count: u64) -> Result<u64> {
        // Doubles are exact up to 2^53.
        Ok(self.gather(&[count as f64])?.iter().map(|of_rank| of_rank[0] as u64).sum())
    }
}

/// What a rank returns whose end another rank reports.
pub(crate) fn reported_by(rank: usize) -> Error {
    Error::ReportedElsewhere { rank: rank as u32, reporter: rank as u32 }
}

/// Whether all ranks go on with the batches that they announced.
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

/// Parameters whose gradients are summed over the ranks, flattened into one tensor. One rank has nothing to do.
#[derive(Debug)]
pub(crate) struct Bucket {
    parameters: Vec<Tensor>,
    under_way: Option<(Pending, Tensor)>,
    /// Bytes that this rank has sent: an all-reduce on a ring sends `2 (W - 1) / W` times its tensor's.
    pub(crate) sent_bytes: u64,
}

impl Bucket {
    /// A bucket of these parameters, in one order on all ranks.
    pub(crate) fn new(parameters: Vec<Tensor>) -> Self {
        Self { parameters, under_way: None, sent_bytes: 0 }
    }

    /// Begins to sum up the gradients as they are.
    ///
    /// # Errors
    ///
    /// Those of all operations.
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
        self.under_way = Some((collectives.all_reduce(&flat, Reduce::Sum)?, flat));
        Ok(())
    }

    /// Waits for the sums, which take the gradients' places.
    ///
    /// # Errors
    ///
    /// Those of all operations.
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

    /// The others would hear for ever that it works.
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
