//! Collectives of ranks that are processes with one GPU each. Tensors in main memory are exchanged through
//! Gloo, tensors on the GPU through c10d's NCCL.
//!
//! An operation on the GPU is enqueued on a stream of NCCL, and begins after all operations that were enqueued
//! before it on libtorch's stream. [`Pending::wait`] makes libtorch's stream wait for it, not the host.
//! Therefore a thread monitors the pending operations: if one takes too long, or another rank has failed, the
//! thread aborts all of them, so that nothing waits for the GPU forever, and the next operation returns the
//! job's error.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onefold_base::sync::locked;
use tch::Device;

use super::c10d::{Group, Shim, Work};
use super::gloo::{Gloo, Job};
use super::{Collectives, Operation, Pending};
use crate::{Error, Result, cuda_library};

/// The interval at which the pending operations are polled.
const POLL: Duration = Duration::from_millis(20);

/// The collectives of processes with one GPU each. The device of a tensor selects c10d's `ProcessGroupGloo` or
/// `ProcessGroupNCCL`.
///
/// Created by [`Joined::on_device`](super::Joined::on_device).
#[derive(Debug)]
pub struct Nccl {
    gloo: Arc<Gloo>,
    device: Device,
    shared: Arc<Shared>,
    /// The thread that monitors the pending operations.
    watcher: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// The process group; present until drop.
    group: Option<Group>,
    job: Arc<Job>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    under_way: Vec<UnderWay>,
    dropped: bool,
}

/// An operation that may not have ended.
#[derive(Debug, Clone)]
struct UnderWay {
    operation: &'static str,
    work: Arc<Work>,
    started: Instant,
}

/// Loads the constructor of NCCL process groups. libtorch's CUDA part must be loaded already.
///
/// # Errors
///
/// [`Error::Fault`] if the library is missing, or was built for another libtorch.
pub(super) fn load() -> Result<Shim> {
    let wrong = |message: String| Error::ranks(message, cuda_library::HINT);
    let library = cuda_library::open().map_err(wrong)?;
    let library = library.ok_or_else(|| {
        wrong(format!("ranks on GPUs need `{}`, which is not beside the program", cuda_library::NAME))
    })?;
    Shim::of(library).map_err(|message| wrong(format!("`{}`: {message}", cuda_library::NAME)))
}

impl Nccl {
    /// Creates the collectives of a group on `device` with the ranks of `gloo`.
    pub(super) fn new(gloo: Arc<Gloo>, group: Group, device: Device) -> Result<Self> {
        let shared = Arc::new(Shared {
            group: Some(group),
            job: Arc::clone(&gloo.job),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let watcher =
            std::thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || watched.watch())?;
        Ok(Self { gloo, device, shared, watcher: Some(watcher) })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.shared.lock().dropped = true;
        self.shared.changed.notify_all();
        // After the loss of a rank, joining can take long, and this process ends anyway.
        if !self.shared.job.watch.has_failed()
            && let Some(watcher) = self.watcher.take()
        {
            let _ = watcher.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Monitors the pending operations until all have ended and no other can begin, or one has failed.
    fn watch(&self) {
        loop {
            let mut state = self.lock();
            while state.under_way.is_empty() {
                if state.dropped {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let under_way = state.under_way.clone();
            drop(state);
            let mut ended = Vec::new();
            for own in &under_way {
                match self.has_ended(own) {
                    Ok(false) => {}
                    Ok(true) => ended.push(Arc::clone(&own.work)),
                    Err(_) => {
                        // Threads that wait for the GPU continue, and get the error from the next operation.
                        if let Some(group) = &self.group {
                            group.abort();
                        }
                        self.lock().under_way.clear();
                        return;
                    }
                }
            }
            let is_left = |own: &UnderWay| !ended.iter().any(|work| Arc::ptr_eq(work, &own.work));
            self.lock().under_way.retain(is_left);
            std::thread::sleep(POLL);
        }
    }

    fn has_ended(&self, own: &UnderWay) -> Result<bool> {
        if own.work.has_ended().map_err(|message| self.job.failed(own.operation, &message))? {
            return Ok(true);
        }
        if let Some(error) = self.job.watch.overdue() {
            return Err(error);
        }
        if own.started.elapsed() > self.job.timeout {
            return Err(self.job.late(own.operation));
        }
        Ok(false)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        match self.group.take() {
            Some(group) if !self.job.watch.has_failed() => group.shut_down(),
            group => std::mem::forget(group),
        }
    }
}

impl Collectives for Nccl {
    fn rank(&self) -> u32 {
        self.gloo.rank()
    }

    fn size(&self) -> u32 {
        self.gloo.size()
    }

    fn device_of(&self, device: Device) -> Device {
        if device == self.device { device } else { Device::Cpu }
    }

    fn start(&self, operation: Operation) -> Result<Pending> {
        if operation.device() != Some(self.device) {
            return self.gloo.start(operation);
        }
        let (shared, name, operation) = (Arc::clone(&self.shared), operation.name(), operation.in_bytes()?);
        shared.job.watch.count_operation()?;
        let group = shared.group.as_ref().expect("the group is there until it is dropped");
        let work = group.start(&operation, shared.job.timeout);
        let work = Arc::new(work.map_err(|message| shared.job.failed(name, &message))?);
        let own = UnderWay { operation: name, work: Arc::clone(&work), started: Instant::now() };
        shared.lock().under_way.push(own);
        shared.changed.notify_all();
        Ok(Pending::new(move || {
            let ordered = work.order().map_err(|message| shared.job.failed(name, &message));
            // Tensors are kept alive until the operation has ended.
            drop(operation);
            ordered
        }))
    }

    fn set_step(&self, step: u64) {
        self.gloo.set_step(step);
    }

    fn abort(&self, message: &str) {
        self.gloo.abort(message);
    }
}

/// These tests use Gloo in place of NCCL, so they cover all code except NCCL itself.
#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tch::Tensor;

    use super::super::c10d::{Interface, Store};
    use super::super::check_collectives;
    use super::super::loss::Watch;
    use super::*;

    /// The time limit for connecting, long enough for a busy machine.
    const CONNECT: Duration = Duration::from_secs(60);

    /// Runs `work` on each of two ranks, which are threads.
    fn on_two_ranks<T: Send>(timeout: Duration, work: impl Fn(Nccl) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut listener = Some(listener);
        let connect = |rank: u32, mut listener: Option<TcpListener>| {
            let mut open =
                |prefix: &str| Store::open("127.0.0.1", port, listener.take(), prefix, CONNECT).unwrap();
            let stores = ["host", "device", "watch"].map(&mut open);
            let group = |store: &Store| {
                let interface = Interface::Address("127.0.0.1".to_owned());
                Group::gloo(store, (rank, 2), &interface, 2, CONNECT).unwrap()
            };
            let (on_host, on_device) = (group(&stores[0]), group(&stores[1]));
            let [_, _, store] = stores;
            let watch = Watch::start(store, (rank, 2), true).unwrap();
            let gloo = Gloo::new(on_host, watch, (rank, 2), timeout);
            Nccl::new(Arc::new(gloo), on_device, Device::Cpu).unwrap()
        };
        std::thread::scope(|scope| {
            let (connect, work) = (&connect, &work);
            let ranks = (0..2).map(|rank| {
                let listener = listener.take();
                scope.spawn(move || work(connect(rank, listener)))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn tensors_on_the_device_are_exchanged() {
        for outcome in on_two_ranks(Duration::from_secs(300), |ranks| {
            check_collectives(&ranks, Device::Cpu, 3)?;
            Ok::<_, Error>(())
        }) {
            outcome.unwrap();
        }
    }

    /// No thread waits for the operation; the monitor aborts it, and the next operation returns the job's
    /// error.
    #[test]
    fn an_operation_that_another_rank_does_not_come_to_is_ended() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let receiver = Mutex::new(receiver);
        let outcomes = on_two_ranks(Duration::from_secs(2), |ranks| {
            ranks.set_step(7);
            let sum = Tensor::from_slice(&[1_i64]);
            if ranks.rank() == 1 {
                // The rank is alive, but does not call the operation.
                receiver.lock().unwrap().recv().unwrap();
                return None;
            }
            let pending = ranks.all_reduce(&sum).unwrap();
            let deadline = Instant::now() + Duration::from_secs(120);
            while !ranks.shared.job.watch.has_failed() || !ranks.shared.lock().under_way.is_empty() {
                assert!(Instant::now() < deadline, "nobody looks after the operation");
                std::thread::sleep(POLL);
            }
            let error = ranks.all_reduce(&sum).unwrap_err();
            drop(pending);
            sender.send(()).unwrap();
            Some(error.to_string())
        });
        let error = outcomes[0].as_ref().unwrap();
        assert!(
            error.starts_with("rank 1 was lost at step 7: `all_reduce` had no answer within 2s"),
            "{error}"
        );
    }
}
