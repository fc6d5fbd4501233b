//! What a job's ranks do together: [`Collectives`], and how a job is formed and ends.
//!
//! ```text
//! onefold-train launch ─▶ RANK, WORLD_SIZE, … ─▶ Environment ─▶ join ─▶ Alone (one rank)
//! torchrun ─────────────▲                                           ├─▶ Gloo (c10d, between processes)
//!                                                                   └─▶ Nccl (between processes with a GPU each)
//!                                        threads(n) ──────────────────▶ ThreadCollectives (tests)
//! ```
//!
//! Every rank calls the same operations in the same order. An operation starts at its call and ends at
//! [`Pending::wait`], so others can start in between.

mod alone;
mod c10d;
mod check;
mod environment;
mod gloo;
mod launch;
mod loss;
mod nccl;
mod threads;

use std::fmt;

use tch::{Device, Kind, Tensor};

pub use alone::Alone;
pub use check::check_collectives;
pub use environment::{Environment, Joined, Timeouts};
pub use gloo::Gloo;
pub use launch::{Exit, PATIENCE, launch};
pub use nccl::Nccl;
pub use threads::{ThreadCollectives, threads};

use crate::{Error, Result};

/// How [`Collectives::all_reduce`] makes one element of the ranks' elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The largest of them.
    Max,
}

/// What a job's ranks do together. Every rank calls the same operations in the same order.
///
/// Tensors are contiguous, in main memory or on the GPU of a rank that has one, and own their memory. Between the start
/// of an operation and its end, nobody may write to a tensor that it sends, nor look at one that it receives into. On a
/// GPU, "its end" is a place in libtorch's stream.
///
/// Each operation fails with [`Error::Collective`] if its arguments do not fit, and with [`Error::RankLost`],
/// [`Error::RankEnded`], [`Error::ReportedElsewhere`] or (the network, or the job's store) [`Error::Fault`] if not
/// all ranks are there any more.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// This process's rank, 0 to [`size`](Self::size) - 1.
    fn rank(&self) -> u32;

    /// The number of ranks, W.
    fn size(&self) -> u32;

    /// The device that small messages' tensors are on.
    fn device(&self) -> Device {
        Device::Cpu
    }

    /// Sends rows (of the first dimension) of `sent` to the ranks: the first `sent_splits[0]` to rank 0, the next
    /// `sent_splits[1]` to rank 1, and so on; receives `received_splits[r]` rows from rank r into `received`, in
    /// the order of ranks. Tensors of any kind; the splits have W elements and sum up to the tensors' rows.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn all_to_all(
        &self,
        received: &Tensor,
        received_splits: &[i64],
        sent: &Tensor,
        sent_splits: &[i64],
    ) -> Result<Pending>;

    /// Replaces every rank's `tensor` by the sum or the maximum over the ranks. All ranks get the same bits.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn all_reduce(&self, tensor: &Tensor, operation: Reduce) -> Result<Pending>;

    /// Fills `gathered` (W·n elements) with every rank's `tensor` (n elements), in the order of ranks.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn all_gather(&self, gathered: &Tensor, tensor: &Tensor) -> Result<Pending>;

    /// Replaces every rank's `tensor` by that of rank `root`.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn broadcast(&self, tensor: &Tensor, root: u32) -> Result<Pending>;

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn barrier(&self) -> Result<()>;

    /// Says which training step this rank is in, for the errors of all ranks.
    fn set_step(&self, _step: u64) {}

    /// Tells the others that this rank ends with an error of its own, so that they end with [`Error::RankEnded`].
    /// Returns when they know, or after a few seconds. No operation may follow.
    fn abort(&self, _message: &str) {}

    /// Gives every rank's bytes to every rank, in the order of ranks. For small messages of different lengths.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?.f_to_device(self.device())?;
        let lengths = Tensor::f_zeros([i64::from(self.size())], (Kind::Int64, self.device()))?;
        self.all_gather(&lengths, &length)?.wait()?;
        let lengths = Vec::<i64>::try_from(&lengths)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);

        let mut padded = bytes.to_vec();
        padded.resize(longest as usize, 0);
        let padded = Tensor::f_from_slice(&padded)?.f_to_device(self.device())?;
        let total = longest * i64::from(self.size());
        let gathered = Tensor::f_zeros([total], (Kind::Uint8, self.device()))?;
        self.all_gather(&gathered, &padded)?.wait()?;
        let gathered = Vec::<u8>::try_from(&gathered)?;
        let of_rank = |(rank, length): (usize, &i64)| {
            let start = rank * longest as usize;
            gathered[start..start + *length as usize].to_vec()
        };
        Ok(lengths.iter().enumerate().map(of_rank).collect())
    }

    /// Gives the bytes of rank `root` to every rank; those of the others are not looked at. For small messages.
    ///
    /// # Errors
    ///
    /// Those of all operations.
    fn broadcast_bytes(&self, bytes: &[u8], root: u32) -> Result<Vec<u8>> {
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?.f_to_device(self.device())?;
        self.broadcast(&length, root)?.wait()?;
        let mut message = if self.rank() == root { bytes.to_vec() } else { Vec::new() };
        message.resize(i64::try_from(&length)? as usize, 0);
        let message = Tensor::f_from_slice(&message)?.f_to_device(self.device())?;
        self.broadcast(&message, root)?.wait()?;
        Ok(Vec::<u8>::try_from(&message)?)
    }
}

/// An operation that is under way; [`wait`](Self::wait) ends it. It keeps the operation's tensors alive.
///
/// One that is dropped ends as well: its results are there, but its error is lost.
#[must_use = "an operation ends at `wait`"]
pub struct Pending(Option<Box<dyn FnOnce() -> Result<()>>>);

impl Pending {
    /// An operation that `finish` ends. What `finish` owns lives until then.
    pub fn new(finish: impl FnOnce() -> Result<()> + 'static) -> Self {
        Self(Some(Box::new(finish)))
    }

    /// An operation that has ended.
    pub fn done() -> Self {
        Self(None)
    }

    /// Waits until the tensors that were sent may be changed and those that are received are there.
    ///
    /// # Errors
    ///
    /// The operation's.
    pub fn wait(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |finish| finish())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // A panic must not wait for other ranks; whoever works on the tensors owns them too.
        if let Some(finish) = self.0.take()
            && !std::thread::panicking()
        {
            // The next operation fails as well.
            let _ = finish();
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.0.is_some() { "under way" } else { "done" };
        formatter.debug_tuple("Pending").field(&state).finish()
    }
}

/// The error of an operation whose arguments do not fit.
fn misused(operation: &'static str, message: String) -> Error {
    Error::collective(operation, message)
}

/// Checks a tensor of an operation.
fn check_tensor(operation: &'static str, name: &str, tensor: &Tensor, device: Device) -> Result<()> {
    if !tensor.is_contiguous() {
        return Err(misused(operation, format!("`{name}` is not contiguous")));
    }
    if tensor.device() != device {
        let message = format!("`{name}` is on {:?}, and the ranks exchange on {device:?}", tensor.device());
        return Err(misused(operation, message));
    }
    Ok(())
}

/// Checks the tensors and splits of [`Collectives::all_to_all`]. Returns the splits in elements: (received, sent).
fn check_all_to_all(
    (size, device): (u32, Device),
    (received, received_splits): (&Tensor, &[i64]),
    (sent, sent_splits): (&Tensor, &[i64]),
) -> Result<(Vec<i64>, Vec<i64>)> {
    const NAME: &str = "all_to_all";
    if received.kind() != sent.kind() {
        let message = format!("`received` is of {:?}, and `sent` of {:?}", received.kind(), sent.kind());
        return Err(misused(NAME, message));
    }
    let in_elements = |name: &str, tensor: &Tensor, splits: &[i64]| {
        check_tensor(NAME, name, tensor, device)?;
        let shape = tensor.size();
        let sum = splits.iter().try_fold(0_i64, |sum, split| sum.checked_add(*split));
        let fits = splits.len() == size as usize && splits.iter().all(|split| *split >= 0);
        if !fits || shape.is_empty() || sum != Some(shape[0]) {
            let message = format!("`{name}` has the shape {shape:?}, and its splits are {splits:?}");
            return Err(misused(NAME, message));
        }
        let width: i64 = shape[1..].iter().product();
        Ok(splits.iter().map(|split| split * width).collect())
    };
    Ok((in_elements("received", received, received_splits)?, in_elements("sent", sent, sent_splits)?))
}

/// Checks the tensors of [`Collectives::all_gather`].
fn check_all_gather((size, device): (u32, Device), gathered: &Tensor, tensor: &Tensor) -> Result<()> {
    const NAME: &str = "all_gather";
    check_tensor(NAME, "gathered", gathered, device)?;
    check_tensor(NAME, "tensor", tensor, device)?;
    let fits = gathered.numel() == size as usize * tensor.numel();
    if !fits || gathered.kind() != tensor.kind() {
        let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
        let (tensor, gathered) = (describe(tensor), describe(gathered));
        let message = format!("`tensor` is {tensor}, and `gathered` of {size} ranks is {gathered}");
        return Err(misused(NAME, message));
    }
    Ok(())
}

/// Checks the arguments of [`Collectives::broadcast`].
fn check_broadcast((size, device): (u32, Device), tensor: &Tensor, root: u32) -> Result<()> {
    check_tensor("broadcast", "tensor", tensor, device)?;
    if root >= size {
        let message = format!("there is no rank {root} among {size} ranks");
        return Err(misused("broadcast", message));
    }
    Ok(())
}

/// A contiguous tensor's elements in one dimension, in the same memory.
fn flat(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view([-1_i64].as_slice())?)
}
