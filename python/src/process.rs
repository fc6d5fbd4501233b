//! Objects that belong to one process: its workers, and values that a forked process must not touch.
//!
//! `fork` copies the memory of a process but none of its threads. So a child has pools without threads, and possibly
//! locks that are never released. The objects in this module know their process: a child creates its own workers, and
//! never uses or drops those of its parent.

use std::mem::ManuallyDrop;
use std::process;
use std::sync::Mutex;

use onefold_base::process::available_threads;
use onefold_base::sync::locked;
use onefold_base::units::parse_bytes;
use onefold_ikjt::Workers;
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use pyo3::prelude::*;

use crate::allocator::keep_at_most;
use crate::errors::{of_library, wrong_option};

/// The memory limit is divided by this number to get the limit for unused memory that is kept. The reader reserves a
/// quarter of the memory limit for memory that it does not count.
const KEPT_SHARE: u64 = 8;

/// A value that only the process that created it uses and drops.
#[derive(Debug)]
pub(crate) struct OfProcess<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: process::id(), value: ManuallyDrop::new(value) }
    }

    /// Returns the value, if this process created it.
    pub(crate) fn get(&self) -> Option<&T> {
        (self.process == process::id()).then_some(&self.value)
    }
}

impl OfProcess<Workers> {
    /// Returns the number of threads and the memory limit, with which a child creates its own workers.
    fn settings(&self) -> (usize, u64) {
        (self.value.threads(), self.value.memory_limit())
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.process == process::id() {
            // SAFETY: the value is dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

/// The workers of this process. The lock is only held while the thread is attached to the interpreter, as it is for
/// `os.fork`. So the lock is never held during a fork.
static WORKERS: Mutex<Option<OfProcess<Workers>>> = Mutex::new(None);

/// Returns the workers of this process, which start at their first use.
pub(crate) fn workers(py: Python<'_>) -> PyResult<Workers> {
    let mut shared = locked(&WORKERS);
    if let Some(workers) = shared.as_ref().and_then(OfProcess::get) {
        return Ok(workers.clone());
    }
    let settings = shared.as_ref().map(OfProcess::settings);
    let (threads, memory_limit) = settings.unwrap_or_else(|| (available_threads(), DEFAULT_MEMORY_LIMIT));
    let workers = start(py, threads, memory_limit)?;
    *shared = Some(OfProcess::new(workers.clone()));
    Ok(workers)
}

fn start(py: Python<'_>, threads: usize, memory_limit: u64) -> PyResult<Workers> {
    let workers = Workers::new(threads, memory_limit).map_err(|error| of_library(py, &error))?;
    keep_at_most(usize::try_from(memory_limit / KEPT_SHARE).unwrap_or(usize::MAX));
    Ok(workers)
}

/// Sets the number of threads and the memory limit of readers that are opened later in this process.
#[pyfunction]
#[pyo3(signature = (threads=None, memory_limit=None))]
pub(crate) fn configure(
    py: Python<'_>,
    threads: Option<usize>,
    memory_limit: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let memory_limit = match memory_limit {
        None => DEFAULT_MEMORY_LIMIT,
        Some(limit) => bytes(&limit)?,
    };
    let threads = threads.unwrap_or_else(available_threads);
    let workers = start(py, threads, memory_limit)?;
    *locked(&WORKERS) = Some(OfProcess::new(workers));
    Ok(())
}

/// Parses a number of bytes, given as a number or as text such as `512MiB`.
fn bytes(limit: &Bound<'_, PyAny>) -> PyResult<u64> {
    let given = limit.extract::<u64>().ok().filter(|bytes| *bytes > 0).map(|bytes| bytes.to_string());
    let text = match given {
        Some(text) => text,
        None => limit.str()?.to_string(),
    };
    let hint = "give a positive number of bytes, or a text as `512MiB`";
    parse_bytes(&text).map_err(|_| wrong_option(limit.py(), &format!("`memory_limit` is {text}"), hint))
}
