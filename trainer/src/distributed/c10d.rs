//! Bindings of torch's c10d through `c10d.cpp`: a store, a process group, and its asynchronous works.
//!
//! Errors are c10d's own messages; the callers explain them.

use std::ffi::{CString, c_char, c_int, c_void};
use std::net::TcpListener;
use std::os::fd::IntoRawFd;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Mutex;
use std::time::Duration;

use super::Operation;
use crate::shim::said;
use libloading::os::unix::Library;
use onefold_base::sync::locked;

/// A result with an error message of c10d.
pub(super) type Said<T> = Result<T, String>;

/// A pointer to a tensor, as `c10d.cpp` expects it.
type TensorPointer = *const torch_sys::C_tensor;

unsafe extern "C" {
    fn onefold_text_free(message: *mut c_char);
    fn onefold_store_open(
        host: *const c_char,
        port: u16,
        listener: c_int,
        prefix: *const c_char,
        timeout: i64,
        store: *mut *mut c_void,
    ) -> *mut c_char;
    fn onefold_store_free(store: *mut c_void);
    fn onefold_store_set(
        store: *mut c_void,
        key: *const c_char,
        value: *const u8,
        length: usize,
    ) -> *mut c_char;
    fn onefold_store_add(store: *mut c_void, key: *const c_char, amount: i64, sum: *mut i64) -> *mut c_char;
    fn onefold_store_check(store: *mut c_void, key: *const c_char, found: *mut c_int) -> *mut c_char;
    fn onefold_store_get(
        store: *mut c_void,
        key: *const c_char,
        value: *mut *mut c_char,
        length: *mut usize,
    ) -> *mut c_char;
    fn onefold_gloo_open(
        store: *mut c_void,
        rank: c_int,
        size: c_int,
        address: *const c_char,
        interfaces: *const c_char,
        threads: c_int,
        timeout: i64,
        group: *mut *mut c_void,
    ) -> *mut c_char;
    fn onefold_group_abort(group: *mut c_void);
    fn onefold_group_shut_down(group: *mut c_void);
    fn onefold_group_free(group: *mut c_void);
    fn onefold_group_all_to_all(
        group: *mut c_void,
        received: TensorPointer,
        received_splits: *const i64,
        sent: TensorPointer,
        sent_splits: *const i64,
        ranks: usize,
        timeout: i64,
        work: *mut *mut c_void,
    ) -> *mut c_char;
    fn onefold_group_all_reduce(
        group: *mut c_void,
        tensor: TensorPointer,
        timeout: i64,
        work: *mut *mut c_void,
    ) -> *mut c_char;
    fn onefold_group_all_gather(
        group: *mut c_void,
        gathered: TensorPointer,
        tensor: TensorPointer,
        timeout: i64,
        work: *mut *mut c_void,
    ) -> *mut c_char;
    fn onefold_group_barrier(group: *mut c_void, timeout: i64, work: *mut *mut c_void) -> *mut c_char;
    fn onefold_work_wait(work: *mut c_void, patience: i64, ended: *mut c_int) -> *mut c_char;
    fn onefold_work_order(work: *mut c_void) -> *mut c_char;
    fn onefold_work_check(work: *mut c_void, ended: *mut c_int) -> *mut c_char;
    fn onefold_work_free(work: *mut c_void);
}

/// Calls a function that creates an object, and takes ownership of the object.
fn made(make: impl FnOnce(*mut *mut c_void) -> *mut c_char) -> Said<NonNull<c_void>> {
    let mut object = null_mut();
    said(make(&mut object))?;
    Ok(NonNull::new(object).expect("c10d.cpp makes an object or says an error"))
}

fn c_string(text: &str) -> Said<CString> {
    CString::new(text).map_err(|_| format!("{text:?} contains a zero byte"))
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// A client of a TCPStore, which in one process is also the server. Its keys have a prefix.
///
/// A call waits for the server's answer without a time limit, so callers use threads that may hang.
#[derive(Debug)]
pub(super) struct Store(NonNull<c_void>);

// SAFETY: the pointer is an `intrusive_ptr<c10d::Store>`, whose count is atomic, to a PrefixStore over a
// TCPStore, which takes a lock in every call; `Drop` frees the object once.
unsafe impl Send for Store {}
// SAFETY: as above; no call changes the pointer itself.
unsafe impl Sync for Store {}

impl Store {
    /// Hosts a store on `listener`, or without one connects to the store at `host` and `port` within `timeout`.
    pub(super) fn open(
        host: &str,
        port: u16,
        listener: Option<TcpListener>,
        prefix: &str,
        timeout: Duration,
    ) -> Said<Self> {
        let (host, prefix) = (c_string(host)?, c_string(prefix)?);
        // The server takes ownership of the socket.
        let listener = listener.map_or(-1, IntoRawFd::into_raw_fd);
        let timeout = milliseconds(timeout);
        // SAFETY: both strings live during the call; the socket is open and has no other owner.
        let store = made(|store| unsafe {
            onefold_store_open(host.as_ptr(), port, listener, prefix.as_ptr(), timeout, store)
        })?;
        Ok(Self(store))
    }

    /// Sets the value of a key.
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Said<()> {
        let key = c_string(key)?;
        // SAFETY: the store is alive; key and value live during the call, and the length is that of `value`.
        said(unsafe { onefold_store_set(self.0.as_ptr(), key.as_ptr(), value.as_ptr(), value.len()) })
    }

    /// Adds to the number of a key, which starts at 0. Returns the sum.
    pub(super) fn add(&self, key: &str, amount: i64) -> Said<i64> {
        let (key, mut sum) = (c_string(key)?, 0);
        // SAFETY: the store is alive; key and sum live during the call.
        said(unsafe { onefold_store_add(self.0.as_ptr(), key.as_ptr(), amount, &mut sum) })?;
        Ok(sum)
    }

    /// Returns whether a key has a value.
    pub(super) fn has(&self, key: &str) -> Said<bool> {
        let (key, mut found) = (c_string(key)?, 0);
        // SAFETY: the store is alive; key and found live during the call.
        said(unsafe { onefold_store_check(self.0.as_ptr(), key.as_ptr(), &mut found) })?;
        Ok(found != 0)
    }

    /// Returns the value of a key, if it has one.
    pub(super) fn get(&self, key: &str) -> Said<Option<Vec<u8>>> {
        if !self.has(key)? {
            return Ok(None);
        }
        let (key, mut value, mut length) = (c_string(key)?, null_mut(), 0);
        // SAFETY: the store is alive; the pointers are valid during the call.
        said(unsafe { onefold_store_get(self.0.as_ptr(), key.as_ptr(), &mut value, &mut length) })?;
        // SAFETY: after a successful call, `value` points to `length` bytes that the caller owns, and that are
        // freed once, here.
        unsafe {
            let bytes = std::slice::from_raw_parts(value.cast::<u8>(), length).to_vec();
            onefold_text_free(value);
            Ok(Some(bytes))
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the object is freed once and not used afterwards.
        unsafe { onefold_store_free(self.0.as_ptr()) }
    }
}

/// The network interface that a process group listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Interface {
    /// The interface with this address.
    Address(String),
    /// The interfaces with these names, separated by commas.
    Names(String),
    /// The interface that the host's name resolves to.
    OfHost,
}

/// A process group of c10d. Dropping it waits for the pending works.
#[derive(Debug)]
pub(super) struct Group {
    handle: Handle,
    /// Serializes the starts of works.
    starting: Mutex<()>,
}

#[derive(Debug)]
struct Handle(NonNull<c_void>);

// SAFETY: the pointer is an `intrusive_ptr<c10d::Backend>`, whose count is atomic; a process group may be used
// on any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; the mutex next to the handle serializes the starts of works, and `abort` may be called
// concurrently, as c10d's own watchdog does.
unsafe impl Sync for Handle {}

/// The type of `onefold_nccl_open` in `nccl.cpp`.
type OpenNccl = unsafe extern "C" fn(
    store: *mut c_void,
    rank: c_int,
    size: c_int,
    device: c_int,
    timeout: i64,
    group: *mut *mut c_void,
) -> *mut c_char;

/// The constructor of NCCL process groups, from the separate library of `nccl.cpp`.
#[derive(Debug)]
pub(super) struct Shim(OpenNccl);

impl Shim {
    /// Looks up the constructor in the library.
    pub(super) fn of(library: &Library) -> Said<Self> {
        // SAFETY: the function has this type in `nccl.cpp`.
        let open = unsafe { library.get::<OpenNccl>(b"onefold_nccl_open") };
        Ok(Self(*open.map_err(|error| error.to_string())?))
    }
}

impl Group {
    /// Connects the ranks of a job through Gloo, with `threads` threads for its works. Waits for all ranks, at
    /// most `timeout`.
    pub(super) fn gloo(
        store: &Store,
        (rank, size): (u32, u32),
        interface: &Interface,
        threads: u32,
        timeout: Duration,
    ) -> Said<Self> {
        let (address, names) = match interface {
            Interface::Address(address) => (Some(c_string(address)?), None),
            Interface::Names(names) => (None, Some(c_string(names)?)),
            Interface::OfHost => (None, None),
        };
        let pointer = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        // SAFETY: the store is alive, and the strings live during the call; null is allowed for both.
        let group = made(|group| unsafe {
            onefold_gloo_open(
                store.0.as_ptr(),
                rank as c_int,
                size as c_int,
                pointer(&address),
                pointer(&names),
                threads as c_int,
                milliseconds(timeout),
                group,
            )
        })?;
        Ok(Self::of(group))
    }

    /// Connects the ranks of a job through NCCL, each with GPU `device`. Waits for all ranks.
    pub(super) fn nccl(
        shim: &Shim,
        store: &Store,
        (rank, size): (u32, u32),
        device: usize,
        timeout: Duration,
    ) -> Said<Self> {
        let device = c_int::try_from(device).map_err(|_| format!("there is no GPU {device}"))?;
        // SAFETY: the function comes from `nccl.cpp`, and the store is alive.
        let group = made(|group| unsafe {
            shim.0(store.0.as_ptr(), rank as c_int, size as c_int, device, milliseconds(timeout), group)
        })?;
        Ok(Self::of(group))
    }

    fn of(group: NonNull<c_void>) -> Self {
        Self { handle: Handle(group), starting: Mutex::default() }
    }

    /// Aborts all works on a device. Other threads may wait for them or start a work concurrently.
    pub(super) fn abort(&self) {
        // SAFETY: the group is alive.
        unsafe { onefold_group_abort(self.handle.0.as_ptr()) }
    }

    /// Shuts the group down; its works must have ended.
    pub(super) fn shut_down(self) {
        // SAFETY: the group is alive and has no other user.
        unsafe { onefold_group_shut_down(self.handle.0.as_ptr()) }
    }

    /// Starts a work.
    ///
    /// # Panics
    ///
    /// Panics if the splits have different lengths.
    pub(super) fn start(&self, operation: &Operation, timeout: Duration) -> Said<Work> {
        let (group, timeout) = (self.handle.0.as_ptr(), milliseconds(timeout));
        let _starting = locked(&self.starting);
        // SAFETY: the group and the tensors are alive, and c10d takes its own references. Both splits have `ranks`
        // numbers, which are copied.
        let work = made(|work| unsafe {
            match operation {
                Operation::AllToAll { received, received_splits, sent, sent_splits } => {
                    let ranks = sent_splits.len();
                    assert_eq!(received_splits.len(), ranks, "splits of different lengths");
                    let (from, to) = (received_splits.as_ptr(), sent_splits.as_ptr());
                    let (received, sent) = (received.as_ptr(), sent.as_ptr());
                    onefold_group_all_to_all(group, received, from, sent, to, ranks, timeout, work)
                }
                Operation::AllReduce { tensor } => {
                    onefold_group_all_reduce(group, tensor.as_ptr(), timeout, work)
                }
                Operation::AllGather { gathered, tensor } => {
                    onefold_group_all_gather(group, gathered.as_ptr(), tensor.as_ptr(), timeout, work)
                }
                Operation::Barrier => onefold_group_barrier(group, timeout, work),
            }
        })?;
        Ok(Work(work))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the object is freed once and not used afterwards.
        unsafe { onefold_group_free(self.0.as_ptr()) }
    }
}

/// An asynchronous operation of a process group. c10d keeps its tensors alive until it has ended, even if
/// nothing waits for it.
#[derive(Debug)]
pub(super) struct Work(NonNull<c_void>);

// SAFETY: the pointer is an `intrusive_ptr<c10d::Work>`, whose count is atomic; c10d's own threads access works
// while other threads wait for them.
unsafe impl Send for Work {}
// SAFETY: as above; no call changes the pointer itself.
unsafe impl Sync for Work {}

impl Work {
    /// On a device, makes all subsequently enqueued operations wait for the work; in main memory, waits for the
    /// work.
    pub(super) fn order(&self) -> Said<()> {
        // SAFETY: the work is alive.
        said(unsafe { onefold_work_order(self.0.as_ptr()) })
    }

    /// Returns whether the work has ended. The error is the work's own.
    pub(super) fn has_ended(&self) -> Said<bool> {
        let mut ended = 0;
        // SAFETY: the work is alive, and so is `ended`.
        said(unsafe { onefold_work_check(self.0.as_ptr(), &mut ended) })?;
        Ok(ended != 0)
    }

    /// Waits for at most `patience`. Returns whether the work has ended. The error is the work's own.
    pub(super) fn wait(&self, patience: Duration) -> Said<bool> {
        let mut ended = 0;
        // SAFETY: the work is alive, and so is `ended`.
        said(unsafe { onefold_work_wait(self.0.as_ptr(), milliseconds(patience), &mut ended) })?;
        Ok(ended != 0)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: the object is freed once and not used afterwards.
        unsafe { onefold_work_free(self.0.as_ptr()) }
    }
}
