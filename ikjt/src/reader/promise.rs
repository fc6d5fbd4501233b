//! Promises: results that other threads will send.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, sync_channel};

use onefold_base::fault::Fault;

use crate::error::{Error, Result};

/// The receiver of a result that another thread will send.
pub(super) type Promise<T> = Receiver<Result<T>>;

/// Runs `work` on a thread of the pool, and returns a promise of its result.
pub(super) fn promise<T: Send + 'static>(
    pool: &rayon::ThreadPool,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Promise<T> {
    let (task, promise) = promised(work);
    pool.spawn(task);
    promise
}

/// Runs `work` on a new thread, and returns a promise of its result. It is for work that mostly waits for an object
/// store, which must not occupy a thread of the pool.
///
/// # Errors
///
/// The operating system's error if the thread cannot be started.
pub(super) fn promise_beside<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Promise<T>> {
    let (task, promise) = promised(work);
    std::thread::Builder::new().name("onefold-open".to_owned()).spawn(task)?;
    Ok(promise)
}

/// Returns a task that runs `work` and sends its result, and the promise of the result.
fn promised<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> (impl FnOnce() + Send + 'static, Promise<T>) {
    let (sender, promise) = sync_channel(1);
    let task = move || {
        // Running out of memory or threads is not a bug, so the caller gets an error instead of a panic.
        let result = catch_unwind(AssertUnwindSafe(work));
        let result = result.unwrap_or_else(|panic| Err(Fault::of_panic(&*panic).into()));
        // Sending fails if the caller no longer waits.
        let _ = sender.send(result);
    };
    (task, promise)
}

/// Waits for the result of another thread.
pub(super) fn fulfilled<T>(promise: &Promise<T>) -> Result<T> {
    promise.recv().unwrap_or_else(|_| Err(ended()))
}

/// Returns the error for a thread that ended without sending its result.
pub(super) fn ended() -> Error {
    Error::invariant("reader", "a reader thread ended without a result")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_task_is_its_result() {
        let (task, promise) =
            promised::<()>(|| panic!("failed to spawn thread: Resource temporarily unavailable"));
        task();
        let error = fulfilled(&promise).unwrap_err().to_string();
        assert!(error.contains("pids.max") && !error.contains("bug"), "{error}");
    }
}
