//! The threads that wait for storage and for services. One small runtime per process serves every dataset and every
//! reader: requests run on it, and decoding does not wait on threads that could compute.

use std::future::Future;
use std::io;
use std::process;
use std::sync::OnceLock;
use std::sync::mpsc::sync_channel;

use tokio::runtime::{Builder, Handle, Runtime};

use crate::parts::UploadParts;

/// Threads that drive requests. They only wait and copy, so two serve many requests at a time.
const THREADS: usize = 2;
/// Local files are read on threads of their own, at most so many at a time.
const BLOCKING_THREADS: usize = 16;

/// A value of each process. A child that was forked has none of its parent's threads, and may find its parent's locks
/// closed: it makes a value of its own, and leaves its parent's alone. Links are only ever added, so no fork finds a
/// lock that nobody opens.
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

    /// The value of this process, which `make` makes if there is none yet.
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

/// A handle to the process's runtime for storage requests.
///
/// # Errors
///
/// The operating system's error if its threads cannot be started.
pub fn handle() -> io::Result<&'static Handle> {
    Ok(of_process()?.0.handle())
}

/// The parts that all uploads of the process may send at a time, if nothing else limits them.
pub(crate) fn upload_parts() -> io::Result<UploadParts> {
    Ok(of_process()?.1.clone())
}

/// The runtime of the process, and the parts of its uploads that have no other ones: those of its parent may never be
/// free again.
fn of_process() -> io::Result<&'static (Runtime, UploadParts)> {
    static OF_PROCESS: PerProcess<(Runtime, UploadParts)> = PerProcess::new();
    OF_PROCESS.get_or_try_init(|| Ok((start()?, UploadParts::of_machine())))
}

fn start() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("onefold-storage")
        .enable_all()
        .build()
}

/// Runs `request` on the storage runtime and waits for its result. Unlike `Runtime::block_on` this also works on a
/// thread of another runtime, which it blocks.
///
/// # Errors
///
/// The operating system's error if the threads cannot be started, or if the request panicked.
pub fn wait<T: Send + 'static>(request: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    let (sender, receiver) = sync_channel(1);
    handle()?.spawn(async move {
        // The caller waits below, so somebody receives.
        let _ = sender.send(request.await);
    });
    receiver.recv().map_err(|_| io::Error::other("a storage request ended without a result"))
}
