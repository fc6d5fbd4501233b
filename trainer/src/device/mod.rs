//! Training on a GPU: the tables and their optimizer state are in GPU memory; our kernels and libtorch run on one
//! stream.
//!
//! ```text
//!            stage (host)                 copy stream              libtorch's stream
//! Batch ─▶ pinned host memory ═════════▶ device memory ─▶ table_rows ─▶ pool ─▶ … ─▶ sum, update
//! ```
//!
//! [`Accelerator`] is an opened GPU: the libtorch device, and a `Driver`, which launches the kernels of
//! `kernels.cu` and copies batches. The modules are:
//!
//! - `cuda`: the driver for GPUs, based on `cudarc`. Tests use a driver that runs the same kernels, compiled as
//!   C++, on the CPU (`tests/host.cpp`; `tests/replay.rs` runs them again under sanitizers), and a fake CUDA driver
//!   library for `cuda` (`tests/fake_driver.cpp`).
//! - `kernels`: launches kernels after checking their arguments; `update` launches the kernels of the exact update.
//! - `weights`: the arrays that contain the tables. `dense`: the decision whether a step is taken.
//! - `stage`: copies a batch to the device while the previous batch is computed. `tables`: looks up and updates.
//! - `travel`: the vectors that ranks exchange for lookups and updates.
//! - `graph`: records the work that libtorch enqueues for the dense part, which is in [`crate::model`].
//!
//! libtorch allocates all device memory, so there is one allocator. The device memory of batches is reused in
//! turns.

/// Returns the arguments of a kernel, each of the type of its value.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        [$($crate::device::Argument::from($value)),*]
    };
}

mod check;
mod cuda;
mod dense;
mod graph;
mod jagged;
mod kernels;
mod libtorch;
mod parcel;
mod places;
mod samples_of_rows;
mod slots;
mod stage;
mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod travel;
mod update;
mod weights;

use std::ffi::c_void;
use std::str::FromStr;
use std::sync::Arc;

use onefold_base::fault::{Fault, Text, exhausted, option, text};
use onefold_base::process::panic_text;
use onefold_sharding::FeatureConfig;
use tch::{Device, Kind, Tensor};

pub use self::check::{KernelCheck, check_kernels};
pub(crate) use self::dense::{Learned, Verdict};
pub(crate) use self::graph::Graph;
pub(crate) use self::kernels::{Bags, Jagged, Sums};
pub(crate) use self::slots::Slots;
pub(crate) use self::stage::{Staged, StagedSequences, Target};
pub(crate) use self::tables::{DeviceTables, LookedUp, concatenated};
pub(crate) use self::travel::{Merged, ReducedRows, Routes, RoutesParts, ServedParts, ServedRows};
pub(crate) use self::update::Update;
pub(crate) use self::weights::Stored;
use crate::{Error, Result, TrainConfig};

/// The source code of the kernels.
const KERNELS: &str = include_str!("kernels.cu");

/// A device as written in a configuration: `cpu`, `cuda` or `cuda:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// A GPU by its index among the GPUs that CUDA shows; `None` for the GPU whose index is the rank's local rank.
    Cuda(Option<usize>),
}

impl DeviceName {
    /// Returns the device of the rank with this local rank, out of `local_ranks` ranks on its host.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if several ranks would share a GPU.
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
    /// The address of a tensor's elements on the device; a null pointer for `None`.
    Pointer(Option<&'a Tensor>),
    /// `int`.
    Int(i32),
    /// `i64`.
    Long(i64),
    /// `float`.
    Float(f32),
}

impl<'a> From<&'a Tensor> for Argument<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Pointer(Some(tensor))
    }
}

impl<'a> From<Option<&'a Tensor>> for Argument<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        Self::Pointer(tensor)
    }
}

macro_rules! argument_of {
    ($($number:ty => $variant:ident),*) => {
        $(impl From<$number> for Argument<'_> {
            fn from(value: $number) -> Self {
                Self::$variant(value)
            }
        })*
    };
}
argument_of!(i32 => Int, i64 => Long, f32 => Float);

impl Argument<'_> {
    /// Returns the value in the first bytes, as many as its type has.
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

/// A driver that launches kernels and copies batches.
trait Driver: std::fmt::Debug + Send + Sync {
    /// Returns the libtorch device of the tensors that kernels work on.
    fn torch(&self) -> Device;

    /// Returns the device's name and memory, for logs.
    fn describe(&self) -> String;

    /// Enqueues a kernel on libtorch's stream, with at least `threads` threads.
    ///
    /// # Safety
    ///
    /// The arguments have the types of the kernel's parameters, in their order, and no thread accesses memory
    /// outside the tensors.
    unsafe fn launch(&self, kernel: &'static str, threads: i64, arguments: &[Argument<'_>]) -> Result<()>;

    /// Allocates memory for batches of up to `words` words of eight bytes.
    fn slot(&self, words: usize) -> Result<Box<dyn Slot>>;

    /// Waits until all enqueued work is done.
    fn synchronize(&self) -> Result<()>;

    /// Returns the free and the total memory of the device, in bytes.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Returns whether [`record`](Self::record) can be called.
    fn records(&self) -> bool;

    /// Records the work that `work` enqueues through libtorch; a GPU executes it only when the graph is replayed.
    fn record(&self, work: &mut dyn FnMut()) -> Result<Box<dyn Graph>>;
}

/// Memory for a batch on the host and on the device. Events order copies and computations: the host waits until the
/// last copy has read the host memory, a copy waits until the device no longer needs the last batch, and
/// computations wait for the copy.
trait Slot: std::fmt::Debug + Send {
    /// Returns the capacity in words.
    fn capacity(&self) -> usize;

    /// Returns the host memory, after waiting for the last copy.
    fn host(&mut self) -> Result<&mut [u64]>;

    /// Starts copying the first `words` words to the device.
    fn copy(&mut self, words: usize) -> Result<()>;

    /// Makes all work that is enqueued on libtorch's stream from now on wait for the copy.
    fn arrive(&mut self) -> Result<()>;

    /// Declares that no more work that reads this batch will be enqueued. The next copy waits for the work enqueued
    /// so far.
    fn release(&mut self) -> Result<()>;

    /// Returns the device memory as bytes.
    fn device(&self) -> &Tensor;
}

/// An opened GPU.
#[derive(Debug, Clone)]
pub struct Accelerator {
    driver: Arc<dyn Driver>,
}

impl Accelerator {
    /// Opens the device of this name: loads CUDA and libtorch's CUDA part, and compiles the kernels. Returns `None`
    /// for the CPU. Must be called before any other use of libtorch, because libtorch looks for its CUDA part only
    /// once.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a driver, library or GPU is missing, or if the kernels cannot be compiled.
    pub fn open(name: DeviceName) -> Result<Option<Self>> {
        match name {
            DeviceName::Cpu => Ok(None),
            DeviceName::Cuda(number) => {
                Ok(Some(Self { driver: Arc::new(cuda::Cuda::open(number.unwrap_or(0))?) }))
            }
        }
    }

    /// Returns the device's name and memory, for logs.
    pub fn describe(&self) -> String {
        self.driver.describe()
    }

    /// Returns the libtorch device of this GPU's tensors.
    pub fn torch(&self) -> Device {
        self.driver.torch()
    }

    /// Waits until all enqueued work is done.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if enqueued work has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.synchronize()
    }

    /// Returns whether work can be recorded as a graph.
    pub(crate) fn records(&self) -> bool {
        self.driver.records()
    }

    /// Records the work that `work` enqueues through libtorch, and returns the graph with the result of `work`. A
    /// GPU executes the work only when the graph is replayed.
    pub(crate) fn record<T>(&self, mut work: impl FnMut() -> T) -> Result<(Box<dyn Graph>, T)> {
        let mut returned = None;
        let graph = self.driver.record(&mut || returned = Some(work()))?;
        Ok((graph, returned.expect("work was called")))
    }

    /// Enqueues the recorded work. `again` does the same work on a device without graphs.
    pub(crate) fn replay(&self, graph: &dyn Graph, mut again: impl FnMut()) -> Result<()> {
        graph.replay(&mut again).map_err(|message| graph_failed(self.torch(), &message))
    }

    /// Checks that a model of `needed` bytes fits in the free memory.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] with the needed and the free memory if it does not fit.
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

    /// Creates a tensor with unspecified elements.
    pub(crate) fn empty(&self, shape: &[i64], kind: Kind) -> Result<Tensor> {
        Tensor::f_empty(shape, (kind, self.torch())).map_err(|error| self.refused(shape, kind, &error))
    }

    /// Creates a tensor of zeros.
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

/// Checks that all tables have the common dimension: a device has no projections of narrow tables.
///
/// # Errors
///
/// [`Error::Fault`] that names the first narrow table.
pub(crate) fn check_dims(
    config: &TrainConfig,
    features: &[FeatureConfig],
    accelerator: &Accelerator,
) -> Result<()> {
    let common = config.embedding.dim;
    let Some(narrow) = features.iter().find(|feature| feature.dim != common) else { return Ok(()) };
    let FeatureConfig { feature, dim, .. } = narrow;
    let message = format!(
        "`[tables.{feature}].dim` is {dim}, and on a GPU all tables need `[embedding].dim`, which is {common}"
    );
    let hint = text!["leave out `dim` under `[tables.…]`, or choose ", option("device").set_to("cpu")];
    Err(failed(accelerator.torch(), message, hint))
}

/// Returns an error about a device.
pub(crate) fn failed(device: Device, message: impl Into<Text>, hint: impl Into<Text>) -> Error {
    let device = match device {
        Device::Cuda(number) => format!("cuda:{number}"),
        other => format!("{other:?}").to_lowercase(),
    };
    Error::device(device, message, hint)
}

/// Runs `work` and converts panics of libtorch operations to errors that a user can act on, such as a failed GPU or
/// exhausted memory. Other panics continue.
pub(crate) fn guarded<T>(device: Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let panic = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => return result,
        Err(panic) => panic,
    };
    let text = panic_text(&*panic);
    let Some(at) = text.find("CUDA") else {
        // Unwrapped libtorch exceptions become errors too; other panics continue.
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
