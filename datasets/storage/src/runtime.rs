//! The threads that wait for storage and services. All datasets and readers of a process share them: requests
//! run on these threads, so that threads for computation, such as decoding, do not wait for requests.
//!
//! Threads with a tokio runtime drive requests to object stores and services. Requests for files on a local
//! disk run on a fixed number of separate threads without a runtime, where the client of [`object_store`]
//! works on the calling thread. (In a runtime it would pass each piece of work to tokio's pool of blocking
//! threads.)
//!
//! A process may be forked, for example by Python, and the child has none of its parent's threads. It starts
//! its own threads and does not touch its parent's. However, both share the global state of libraries: tokio
//! parks idle threads in a global table (of the crate `parking_lot`), and after a fork this table points to
//! the memory of threads that no longer exist, which the child frees. Therefore no thread of this module ever
//! parks there: each thread that drives requests has its own runtime and waits in the operating system's
//! event queue, and the threads for local files wait on the standard library's channel.

use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use onefold_base::process::available_threads;
use onefold_base::sync::locked;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::parts::UploadParts;

/// The number of threads that drive requests. They only wait and copy, so two serve many requests at a time.
const THREADS: usize = 2;
/// The number of threads for local files, which is the largest number of concurrent requests to the disk.
const DISK_THREADS: usize = 16;
/// The number of threads per driver for blocking calls of a client: resolving host names, or running a
/// program for credentials.
const BLOCKING_THREADS: usize = 8;
/// The time limit for removing the objects of a failed writer from a store.
const CLEAN_UP_LIMIT: Duration = Duration::from_secs(10);
/// The name of all these threads.
const NAME: &str = "onefold-storage";

/// A value per process. A forked child has none of its parent's threads, and its parent's locks may be held
/// forever. It therefore creates its own value and does not use its parent's. The list of values has no lock:
/// links are only added.
#[derive(Debug)]
pub(crate) struct PerProcess<T>(OnceLock<Box<Link<T>>>);

#[derive(Debug)]
struct Link<T> {
    process: u32,
    value: T,
    child: PerProcess<T>,
}

impl<T> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the value of this process. The first call creates it with `make`.
    pub(crate) fn get_or_try_init<E>(&self, make: impl Fn() -> Result<T, E>) -> Result<&T, E> {
        let (process, mut link) = (process::id(), &self.0);
        loop {
            match link.get() {
                Some(of) if of.process == process => return Ok(&of.value),
                Some(of) => link = &of.child.0,
                None => {
                    let value = make()?;
                    link.get_or_init(|| Box::new(Link { process, value, child: Self::new() }));
                }
            }
        }
    }
}

/// The threads of a process, and the default limit of its upload parts. A child has its own limit, because
/// permits that its parent took would never be released in the child.
struct OfProcess {
    threads: Vec<Driver>,
    /// The number of requests that have started, which are distributed over the threads in turn.
    requests: AtomicUsize,
    upload_parts: UploadParts,
}

/// A thread that drives requests as long as this exists.
struct Driver {
    handle: Handle,
    _running: oneshot::Sender<()>,
}

impl Driver {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .max_blocking_threads(BLOCKING_THREADS)
            // Blocking calls are rare, and an idle thread would wait in the table that a fork breaks.
            .thread_keep_alive(Duration::ZERO)
            .thread_name(NAME)
            .enable_all()
            .build()?;
        let handle = runtime.handle().clone();
        let (running, ended) = oneshot::channel();
        let drive = move || {
            // An error means that the other end was dropped, which also ends this thread.
            let _ = runtime.block_on(ended);
        };
        thread::Builder::new().name(NAME.to_owned()).spawn(drive)?;
        Ok(Self { handle, _running: running })
    }
}

/// Returns a handle to a runtime of this process for storage requests.
///
/// # Errors
///
/// Returns the operating system's error if its threads cannot be started.
pub fn handle() -> io::Result<&'static Handle> {
    let of = of_process()?;
    let request = of.requests.fetch_add(1, Ordering::Relaxed);
    Ok(&of.threads[request % THREADS].handle)
}

/// Returns the limit of the parts that all uploads of the process may send at a time by default.
pub(crate) fn upload_parts() -> io::Result<UploadParts> {
    Ok(of_process()?.upload_parts.clone())
}

fn of_process() -> io::Result<&'static OfProcess> {
    static OF_PROCESS: PerProcess<OfProcess> = PerProcess::new();
    OF_PROCESS.get_or_try_init(|| {
        let threads = (0..THREADS).map(|_| Driver::start()).collect::<io::Result<_>>()?;
        let upload_parts = UploadParts::of_writers(available_threads());
        Ok(OfProcess { threads, requests: AtomicUsize::new(0), upload_parts })
    })
}

/// The threads for local files. A thread takes the next request when it has finished one.
struct DiskThreads(Sender<BoxFuture<'static, ()>>);

impl DiskThreads {
    fn start() -> io::Result<Self> {
        let (sender, requests) = channel();
        let requests = Arc::new(Mutex::new(requests));
        for _ in 0..DISK_THREADS {
            let requests = Arc::clone(&requests);
            thread::Builder::new().name(NAME.to_owned()).spawn(move || answer_requests(&requests))?;
        }
        Ok(Self(sender))
    }
}

/// Runs requests until the process ends. If a request panics, its result is missing, and the thread
/// continues.
fn answer_requests(requests: &Mutex<Receiver<BoxFuture<'static, ()>>>) {
    let next = || locked(requests).recv();
    while let Ok(request) = next() {
        let _ = catch_unwind(AssertUnwindSafe(|| futures::executor::block_on(request)));
    }
}

/// The kind of threads on which the requests of a storage run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The threads for object stores, with timers and connections.
    Network,
    /// The threads for local files. A request may block, but must not use tokio's timers.
    Disk,
}

impl Threads {
    /// Starts `request`.
    pub(crate) fn start(self, request: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
        static DISK: PerProcess<DiskThreads> = PerProcess::new();
        match self {
            Self::Network => drop(handle()?.spawn(request)),
            Self::Disk => {
                let DiskThreads(sender) = DISK.get_or_try_init(DiskThreads::start)?;
                sender
                    .send(Box::pin(request))
                    .map_err(|_| io::Error::other("the threads for files ended"))?;
            }
        }
        Ok(())
    }

    /// Runs `request` and waits for its result. If it is called on a thread of a runtime, it blocks that
    /// thread.
    pub(crate) fn wait<T: Send + 'static>(
        self,
        request: impl Future<Output = T> + Send + 'static,
    ) -> io::Result<T> {
        let (sender, receiver) = sync_channel(1);
        self.start(async move {
            // The caller waits below, so the receiver exists.
            let _ = sender.send(request.await);
        })?;
        receiver.recv().map_err(|_| io::Error::other("a storage request ended without a result"))
    }

    /// Runs a request that removes what a failed writer wrote, on the network within a time limit. Errors are
    /// ignored, because the writer's own error is reported, and should be reported soon.
    pub(crate) fn clean_up(self, request: impl Future<Output: Send> + Send + 'static) {
        let _ = match self {
            Self::Network => {
                self.wait(async move { drop(tokio::time::timeout(CLEAN_UP_LIMIT, request).await) })
            }
            Self::Disk => self.wait(request.map(drop)),
        };
    }
}

/// Runs `request` on the threads for object stores and waits for its result. Unlike `Runtime::block_on`, it
/// also works on a thread of another runtime, which it blocks.
///
/// # Errors
///
/// Returns the operating system's error if the threads cannot be started, or an error if the request
/// panicked.
pub fn wait<T: Send + 'static>(request: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    Threads::Network.wait(request)
}

/// Runs `work` on the current thread and blocks it. Timers, connections and spawned tasks belong to a storage
/// runtime.
///
/// # Errors
///
/// Returns the operating system's error if the threads cannot be started.
pub fn block_on<T>(work: impl Future<Output = T>) -> io::Result<T> {
    let _entered = handle()?.enter();
    // `Handle::block_on` would park this thread in the table that a fork breaks.
    Ok(futures::executor::block_on(work))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::Storage;

    /// Returns the ids of the threads of this process with the name [`NAME`].
    fn storage_threads() -> BTreeSet<String> {
        let threads = fs_err::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap());
        // A thread may end while it is being inspected.
        let is_named =
            |path: &std::path::Path| fs_err::read_to_string(path).is_ok_and(|name| name.trim_end() == NAME);
        threads
            .filter(|thread| is_named(&thread.path().join("comm")))
            .map(|thread| thread.file_name().to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn reads_of_local_files_start_no_threads() {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("file"), [7; 100]).unwrap();
        let storage = Storage::open(folder.path()).unwrap();
        let mut seen = BTreeSet::new();
        for _ in 0..300 {
            storage.read_ranges("file", 100, vec![0..10, 20..30], None).unwrap();
            seen.extend(storage_threads());
        }
        // Other tests of this process use the threads for object stores.
        let most = DISK_THREADS + THREADS + THREADS * BLOCKING_THREADS;
        assert!((DISK_THREADS..=most).contains(&seen.len()), "{}", seen.len());
    }
}
