//! Training on a GPU: the tables and their optimizer's state are in its memory, our kernels and libtorch run on one
//! stream.
//!
//! ```text
//!            stage (host)                 copy stream              libtorch's stream
//! Batch ─▶ pinned host memory ═════════▶ device memory ─▶ table_rows ─▶ pool ─▶ … ─▶ sum, update
//! ```
//!
//! [`Accelerator`] is an opened GPU: where libtorch allocates, and a `Driver`, which launches the kernels of
//! `kernels.cu` and copies batches. `cuda` is the real one, on `cudarc`; tests have one that runs the same source,
//! compiled as C++, on the processor (`host.cpp`; `replay` runs it again under sanitizers), and a driver for the real
//! one to call (`fake_driver.cpp`). `kernels` is what may be launched, with its arguments checked, `update` those of the
//! exact update, and `weights` the arrays that the tables are in, `dense` decides whether a step is taken. `stage` puts a batch where it can be copied while the one before it is computed; `tables` looks up and
//! updates, and `travel` is what both need of the vectors that other ranks ask for and answer. The dense part on a device
//! is [`crate::model`]'s, and `graph` records what libtorch enqueues for it.
//!
//! All memory on the device is libtorch's, so that there is one allocator; a batch's own part of it is used by turns.

mod check;
mod cuda;
mod dense;
mod graph;
#[cfg(test)]
pub(crate) mod host;
mod jagged;
mod kernels;
mod libtorch;
mod parcel;
mod places;
#[cfg(test)]
mod replay;
mod samples_of_rows;
mod slots;
mod stage;
mod tables;
#[cfg(test)]
mod tests;
mod travel;
mod update;
mod weights;

use std::ffi::c_void;
use std::str::FromStr;
use std::sync::Arc;

use onefold_base::fault::{Fault, Text, exhausted, option, text};
use onefold_base::process::panic_text;
use tch::{Device, Kind, Tensor};

pub use self::check::{KernelCheck, check_kernels};
pub(crate) use self::dense::{Learned, Verdict};
pub(crate) use self::graph::Graph;
pub(crate) use self::kernels::{Bags, Jagged, Sums};
pub(crate) use self::slots::Slots;
pub(crate) use self::stage::{Staged, StagedSequences, Target};
pub(crate) use self::tables::{DeviceTables, Held, LookedUp, concatenated};
pub(crate) use self::travel::{Merged, ReducedRows, Routes, RoutesParts, ServedParts, ServedRows};
pub(crate) use self::update::Update;
use crate::{Error, Result};

/// The source of the kernels.
const KERNELS: &str = include_str!("kernels.cu");

/// A device as a person names it: `cpu`, or `cuda:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The processor.
    #[default]
    Cpu,
    /// A GPU, by its number among those that CUDA shows; without one that of this rank's number on its host.
    Cuda(Option<usize>),
}

impl DeviceName {
    /// The device of the rank of this number, among so many on its host.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if ranks are to share a GPU.
    pub fn of_rank(self, local_rank: u32, local_ranks: u32) -> Result<Self> {
        match self {
            Self::Cpu => Ok(self),
            Self::Cuda(Some(_)) if local_ranks > 1 => Err(Error::device(
                self,
                format!("{local_ranks} ranks on this host cannot share a GPU"),
                text!["give each the GPU of its number with ", option("device").set_to("cuda")],
            )),
            Self::Cuda(number) => Ok(Self::Cuda(number.or(Some(local_rank as usize)))),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text.split_once(':') {
            None if text == "cpu" => return Ok(Self::Cpu),
            None if text == "cuda" => Some(None),
            Some(("cuda", number)) => number.parse().ok().map(Some),
            _ => None,
        };
        number.map(Self::Cuda).ok_or_else(|| format!("`{text}` is no device: `cpu`, or a GPU as `cuda:0`"))
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
enum Argument<'a> {
    /// The elements of a tensor on the device; a null pointer without one.
    Pointer(Option<&'a Tensor>),
    /// `int`.
    Int(i32),
    /// `i64`.
    Long(i64),
    /// `float`.
    Float(f32),
}

impl Argument<'_> {
    /// The value in as many of the first bytes as its type has.
    fn bytes(&self) -> [u8; 8] {
        let mut bytes = [0; 8];
        match *self {
            Self::Pointer(tensor) => {
                let pointer = tensor.map_or(std::ptr::null_mut::<c_void>(), Tensor::data_ptr);
                bytes = (pointer as u64).to_ne_bytes();
            }
            Self::Int(value) => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
            Self::Long(value) => bytes = value.to_ne_bytes(),
            Self::Float(value) => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
        }
        bytes
    }
}

/// What launches kernels and copies batches.
trait Driver: std::fmt::Debug + Send + Sync {
    /// Where libtorch has the tensors that kernels work on.
    fn torch(&self) -> Device;

    /// The device's name and memory, for people.
    fn describe(&self) -> String;

    /// Enqueues a kernel on libtorch's stream, in `threads` threads or more.
    ///
    /// # Safety
    ///
    /// The arguments are of the kernel's types, in its order, and no thread may reach outside the tensors.
    unsafe fn launch(&self, kernel: &'static str, threads: i64, arguments: &[Argument<'_>]) -> Result<()>;

    /// New memory for batches of up to `words` eight bytes.
    fn slot(&self, words: usize) -> Result<Box<dyn Slot>>;

    /// Waits until everything that was enqueued is done.
    fn synchronize(&self) -> Result<()>;

    /// Free bytes of the device's memory, and all of them.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Whether [`record`](Self::record) can be called.
    fn records(&self) -> bool;

    /// Records what `work` enqueues through libtorch; nothing of it is done before the graph is replayed.
    fn record(&self, work: &mut dyn FnMut()) -> Result<Box<dyn Graph>>;
}

/// Memory that a batch passes through, on the host and on the device. Its copies are ordered with what is computed by
/// events: the host waits until the last copy has left, a copy waits until the device needs the last batch no longer,
/// and computing waits for the copy.
trait Slot: std::fmt::Debug + Send {
    /// Words that it has room for.
    fn capacity(&self) -> usize;

    /// The host's memory, once the last copy has left it.
    fn host(&mut self) -> Result<&mut [u64]>;

    /// Begins to copy the first `words` to the device.
    fn copy(&mut self, words: usize) -> Result<()>;

    /// Makes what is enqueued on libtorch's stream from now on wait for the copy.
    fn arrive(&mut self) -> Result<()>;

    /// Says that nothing will be enqueued that reads this batch: the next copy waits for what is.
    fn release(&mut self) -> Result<()>;

    /// The device's memory, bytes.
    fn device(&self) -> &Tensor;
}

/// An opened GPU.
#[derive(Debug, Clone)]
pub struct Accelerator {
    driver: Arc<dyn Driver>,
}

impl Accelerator {
    /// Opens the device of this name: loads CUDA and libtorch's part of it, and compiles the kernels. `None` for the
    /// processor. To be called before anything else of libtorch: it looks for its CUDA part once.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], with what is missing.
    pub fn open(name: DeviceName) -> Result<Option<Self>> {
        match name {
            DeviceName::Cpu => Ok(None),
            DeviceName::Cuda(number) => {
                Ok(Some(Self { driver: Arc::new(cuda::Cuda::open(number.unwrap_or(0))?) }))
            }
        }
    }

    /// The device's name and memory, for people.
    pub fn describe(&self) -> String {
        self.driver.describe()
    }

    /// Where libtorch has this device's tensors.
    pub fn torch(&self) -> Device {
        self.driver.torch()
    }

    /// Waits until everything that was enqueued is done.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for what has failed meanwhile.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize()
    }

    /// Whether work can be recorded as a graph.
    pub(crate) fn records(&self) -> bool {
        self.driver.records()
    }

    /// Records what `work` enqueues through libtorch, and what it returns; nothing of it is done before the graph is
    /// replayed.
    pub(crate) fn record<T>(&self, mut work: impl FnMut() -> T) -> Result<(Box<dyn Graph>, T)> {
        let mut returned = None;
        let graph = self.driver.record(&mut || returned = Some(work()))?;
        Ok((graph, returned.expect("work was called")))
    }

    /// Enqueues what was recorded; `again` does the same where a device has no graphs.
    pub(crate) fn replay(&self, graph: &dyn Graph, mut again: impl FnMut()) -> Result<()> {
        graph.replay(&mut again).map_err(|message| graph_failed(self.torch(), &message))
    }

    /// Refuses a model that does not fit.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] with what is needed and what is free.
    pub(crate) fn check_memory(&self, needed: u64) -> Result<()> {
        use onefold_base::units::format_bytes;
        let (free, total) = self.driver.memory()?;
        if needed <= free {
            return Ok(());
        }
        let (needed, free, total) = (format_bytes(needed), format_bytes(free), format_bytes(total));
        Err(failed(
            self.torch(),
            format!("the model takes {needed}, and {free} of {total} are free"),
            "end what else uses the GPU, or give the tables fewer rows or a smaller `dim`",
        ))
    }

    /// A new tensor, whose elements are whatever was there.
    pub(crate) fn empty(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        Tensor::f_empty(shape, (kind, self.torch())).map_err(|error| self.refused(shape, kind, &error))
    }

    /// A new tensor of zeros.
    pub(crate) fn zeros(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        Tensor::f_zeros(shape, (kind, self.torch())).map_err(|error| self.refused(shape, kind, &error))
    }

    fn refused(&self, shape: &[i64], kind: Kind, error: &tch::TchError) -> Error {
        let bytes = shape.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
        let bytes = onefold_base::units::format_bytes(bytes);
        let error = error.to_string();
        let reason = error.lines().next().unwrap_or_default();
        failed(
            self.torch(),
            format!("{bytes} for {shape:?} values cannot be had: {reason}"),
            "end what else uses the GPU, or lower `[train].batch_size` or the tables' rows",
        )
    }
}

fn graph_failed(device: Device, message: &str) -> Error {
    let message = message.lines().next().unwrap_or_default();
    failed(
        device,
        format!("a CUDA graph: {message}"),
        "unset ONEFOLD_CUDA to train without graphs, and report this",
    )
}

/// What a device could not do.
pub(crate) fn failed(device: Device, message: impl Into<Text>, hint: impl Into<Text>) -> Error {
    let device = match device {
        Device::Cuda(number) => format!("cuda:{number}"),
        other => format!("{other:?}").to_lowercase(),
    };
    Error::device(device, message, hint)
}

/// Runs `work`, whose operations of libtorch panic where they fail: a full device, or memory that is used up, is an error
/// that a person can act on.
pub(crate) fn guarded<T>(device: Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let panic = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => return result,
        Err(panic) => panic,
    };
    let text = panic_text(&*panic);
    let Some(at) = text.find("CUDA") else {
        // An exception of libtorch that was unwrapped is an error too, but no other panic.
        if exhausted(text).is_some() || text.contains("Torch(\"") {
            return Err(Fault::of_panic(&*panic).into());
        }
        std::panic::resume_unwind(panic);
    };
    let message = text[at..].split(['\n', '"']).next().unwrap_or_default();
    let message = message.split("\\n").next().unwrap_or_default();
    let hint = if message.contains("out of memory") {
        "lower `[train].batch_size`, or end what else uses the GPU"
    } else {
        "run again with CUDA_LAUNCH_BLOCKING=1 to see which operation failed, and report it"
    };
    Err(failed(device, message, hint))
}
