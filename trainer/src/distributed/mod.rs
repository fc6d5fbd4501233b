//! Collective operations of a job's ranks ([`Collectives`]), and the start and end of jobs.
//!
//! ```text
//! onefold-train launch ─▶ RANK, WORLD_SIZE, … ─▶ Environment ─▶ join ─▶ Alone (one rank)
//! torchrun ─────────────▲                                           ├─▶ Gloo (c10d, between processes)
//!                                                                   └─▶ Nccl (between processes with a GPU each)
//!                                        threads(n) ──────────────────▶ ThreadCollectives (tests)
//! ```
//!
//! Every rank calls the same operations in the same order. An operation starts with its call and ends with
//! [`Pending::wait`], so that other operations can start in between.

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

/// A collective operation whose arguments have been checked. Its tensors are flat views of those of the caller.
#[derive(Debug)]
pub enum Operation {
    /// [`Collectives::all_to_all`]; the splits count elements.
    AllToAll {
        /// The tensor that is filled.
        received: Tensor,
        /// The number of elements from each rank.
        received_splits: Vec<i64>,
        /// The tensor that is sent.
        sent: Tensor,
        /// The number of elements for each rank.
        sent_splits: Vec<i64>,
    },
    /// [`Collectives::all_reduce`].
    AllReduce {
        /// The tensor that is replaced.
        tensor: Tensor,
    },
    /// [`Collectives::all_gather`].
    AllGather {
        /// The tensor that is filled.
        gathered: Tensor,
        /// The tensor that is sent.
        tensor: Tensor,
    },
    /// [`Collectives::barrier`].
    Barrier,
}

impl Operation {
    /// Returns the name, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllToAll { .. } => "all_to_all",
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::Barrier => "barrier",
        }
    }

    /// Returns the device of the tensors; `None` without tensors.
    fn device(&self) -> Option<Device> {
        match self {
            Self::AllToAll { sent: tensor, .. }
            | Self::AllReduce { tensor }
            | Self::AllGather { tensor, .. } => Some(tensor.device()),
            Self::Barrier => None,
        }
    }

    /// Returns the same operation on the bytes of the tensors, whatever their types are, if it does not compute.
    fn in_bytes(self) -> Result<Self> {
        let bytes = |tensor: &Tensor| tensor.f_view_dtype(Kind::Uint8);
        Ok(match self {
            Self::AllToAll { received, received_splits, sent, sent_splits } => {
                let width = sent.kind().elt_size_in_bytes() as i64;
                let [received_splits, sent_splits] = [received_splits, sent_splits]
                    .map(|splits| splits.into_iter().map(|split| split * width).collect());
                let (received, sent) = (bytes(&received)?, bytes(&sent)?);
                Self::AllToAll { received, received_splits, sent, sent_splits }
            }
            Self::AllGather { gathered, tensor } => {
                Self::AllGather { gathered: bytes(&gathered)?, tensor: bytes(&tensor)? }
            }
            other => other,
        })
    }
}

/// The collective operations of a job's ranks. Every rank must call the same operations in the same order.
///
/// Tensors must be contiguous and own their memory, in main memory or on the rank's GPU. Between the start and
/// the end of an operation, a sent tensor must not be written, and a received tensor must not be read or
/// written. On a GPU, the end of an operation is a point in libtorch's stream.
///
/// Each operation fails with [`Error::Collective`] if its arguments are invalid. It fails with
/// [`Error::RankLost`], [`Error::RankEnded`] or [`Error::ReportedElsewhere`] if ranks are no longer alive, and
/// with [`Error::Fault`] for problems of the network or of the job's store.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// Returns this process's rank, from 0 to [`size`](Self::size) - 1.
    fn rank(&self) -> u32;

    /// Returns the number of ranks, W.
    fn size(&self) -> u32;

    /// Returns the device on which all tensors of an operation must be whose first tensor is on `device`.
    fn device_of(&self, _device: Device) -> Device {
        Device::Cpu
    }

    /// Starts an operation. Callers use the methods below, which check the arguments.
    fn start(&self, operation: Operation) -> Result<Pending>;

    /// Sends rows (along the first dimension) of `sent` to the ranks: the first `sent_splits[0]` rows to rank
    /// 0, the next `sent_splits[1]` rows to rank 1, and so on. Receives `received_splits[r]` rows from rank r
    /// into `received`, in the order of ranks. Tensors may have any type. The splits have W elements, and their
    /// sums are the numbers of rows.
    fn all_to_all(
        &self,
        received: &Tensor,
        received_splits: &[i64],
        sent: &Tensor,
        sent_splits: &[i64],
    ) -> Result<Pending> {
        const NAME: &str = "all_to_all";
        if received.kind() != sent.kind() {
            let message = format!("`received` is of {:?}, and `sent` of {:?}", received.kind(), sent.kind());
            return Err(misused(NAME, message));
        }
        let device = self.device_of(sent.device());
        let in_elements = |name: &str, tensor: &Tensor, splits: &[i64]| {
            check_tensor(NAME, name, tensor, device)?;
            let shape = tensor.size();
            let sum = splits.iter().try_fold(0_i64, |sum, split| sum.checked_add(*split));
            let fits = splits.len() == self.size() as usize && splits.iter().all(|split| *split >= 0);
            if !fits || shape.is_empty() || sum != Some(shape[0]) {
                let message = format!("`{name}` has the shape {shape:?}, and its splits are {splits:?}");
                return Err(misused(NAME, message));
            }
            let width: i64 = shape[1..].iter().product();
            Ok(splits.iter().map(|split| split * width).collect())
        };
        self.start(Operation::AllToAll {
            received_splits: in_elements("received", received, received_splits)?,
            sent_splits: in_elements("sent", sent, sent_splits)?,
            received: flat(received)?,
            sent: flat(sent)?,
        })
    }

    /// Replaces every rank's `tensor` by the sum over the ranks. The result is bit-identical on all ranks.
    fn all_reduce(&self, tensor: &Tensor) -> Result<Pending> {
        check_tensor("all_reduce", "tensor", tensor, self.device_of(tensor.device()))?;
        self.start(Operation::AllReduce { tensor: flat(tensor)? })
    }

    /// Fills `gathered` (W·n elements) with every rank's `tensor` (n elements), in the order of ranks.
    fn all_gather(&self, gathered: &Tensor, tensor: &Tensor) -> Result<Pending> {
        const NAME: &str = "all_gather";
        let (size, device) = (self.size(), self.device_of(tensor.device()));
        check_tensor(NAME, "gathered", gathered, device)?;
        check_tensor(NAME, "tensor", tensor, device)?;
        let fits = gathered.numel() == size as usize * tensor.numel();
        if !fits || gathered.kind() != tensor.kind() {
            let describe = |tensor: &Tensor| format!("{:?} {:?}", tensor.kind(), tensor.size());
            let (tensor, gathered) = (describe(tensor), describe(gathered));
            let message = format!("`tensor` is {tensor}, and `gathered` of {size} ranks is {gathered}");
            return Err(misused(NAME, message));
        }
        self.start(Operation::AllGather { gathered: flat(gathered)?, tensor: flat(tensor)? })
    }

    /// Waits until every rank has called it.
    fn barrier(&self) -> Result<()> {
        self.start(Operation::Barrier)?.wait()
    }

    /// Sets the training step of this rank, for the errors of all ranks.
    fn set_step(&self, _step: u64) {}

    /// Tells the other ranks that this rank ends with its own error, so that they end with
    /// [`Error::RankEnded`]. Returns when they know, or after a few seconds. No operation may follow.
    fn abort(&self, _message: &str) {}

    /// Returns every rank's bytes, in the order of ranks. For small messages, which may have different lengths.
    fn gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let length = Tensor::f_from_slice(&[bytes.len() as i64])?;
        let lengths = Tensor::f_zeros([i64::from(self.size())], (Kind::Int64, Device::Cpu))?;
        self.all_gather(&lengths, &length)?.wait()?;
        let lengths = Vec::<i64>::try_from(&lengths)?;
        let longest = lengths.iter().copied().max().unwrap_or(0);

        let mut padded = bytes.to_vec();
        padded.resize(longest as usize, 0);
        let padded = Tensor::f_from_slice(&padded)?;
        let total = longest * i64::from(self.size());
        let gathered = Tensor::f_zeros([total], (Kind::Uint8, Device::Cpu))?;
        self.all_gather(&gathered, &padded)?.wait()?;
        let gathered = Vec::<u8>::try_from(&gathered)?;
        let of_rank = |(rank, length): (usize, &i64)| {
            let start = rank * longest as usize;
            gathered[start..start + *length as usize].to_vec()
        };
        Ok(lengths.iter().enumerate().map(of_rank).collect())
    }
}

/// A pending operation, which [`wait`](Self::wait) ends. It keeps the operation's tensors alive.
///
/// Dropping it also waits for the operation, but ignores an error.
#[must_use = "an operation ends at `wait`"]
pub struct Pending(Option<Box<dyn FnOnce() -> Result<()>>>);

impl Pending {
    /// Creates an operation that `finish` ends. The values that `finish` owns stay alive until then.
    pub fn new(finish: impl FnOnce() -> Result<()> + 'static) -> Self {
        Self(Some(Box::new(finish)))
    }

    /// Returns an operation that has ended.
    pub fn done() -> Self {
        Self(None)
    }

    /// Waits until sent tensors may be changed and received tensors are complete.
    ///
    /// # Errors
    ///
    /// The errors of the operation.
    pub fn wait(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), |finish| finish())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // After a panic, do not wait for other ranks; the running operation owns its tensors.
        if let Some(finish) = self.0.take()
            && !std::thread::panicking()
        {
            // An error can be ignored, because the next operation fails as well.
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

/// Returns the error of an operation with invalid arguments.
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

/// Returns a flat view of a contiguous tensor.
fn flat(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view([-1_i64].as_slice())?)
}
