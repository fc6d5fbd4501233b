//! CUDA graphs: the work that libtorch enqueues is recorded once, and then enqueued as one unit.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library;

use crate::cuda_library;
use crate::shim::said;

/// Recorded work that can be repeated. Its tensors keep their memory.
pub(crate) trait Graph: std::fmt::Debug {
    /// Enqueues the recorded work. `again` does the same and writes its results to the same tensors; it is called
    /// on devices without graphs, in tests.
    fn replay(&self, again: &mut dyn FnMut()) -> Result<(), String>;
}

type Begin = unsafe extern "C" fn(c_int, *mut *mut c_void) -> *mut c_char;
type Act = unsafe extern "C" fn(*mut c_void) -> *mut c_char;
type Free = unsafe extern "C" fn(*mut c_void);

/// The functions of `graph.cpp`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Recorder {
    begin: Begin,
    end: Act,
    replay: Act,
    free: Free,
}

/// A CUDA graph of libtorch.
#[derive(Debug)]
struct Recorded {
    recorder: Recorder,
    /// The handle that `onefold_graph_begin` returned.
    graph: *mut c_void,
}

impl Recorder {
    /// Opens the library's recorder; `None` if the library is not installed.
    pub(super) fn open() -> Result<Option<Self>, String> {
        cuda_library::open()?.map(Self::of).transpose()
    }

    fn of(library: &Library) -> Result<Self, String> {
        let wrong = |error: libloading::Error| format!("`{}`: {error}", cuda_library::NAME);
        // SAFETY: the functions have these types in `graph.cpp`, and the library is never unloaded.
        unsafe {
            Ok(Self {
                begin: *library.get::<Begin>(b"onefold_graph_begin").map_err(wrong)?,
                end: *library.get::<Act>(b"onefold_graph_end").map_err(wrong)?,
                replay: *library.get::<Act>(b"onefold_graph_replay").map_err(wrong)?,
                free: *library.get::<Free>(b"onefold_graph_free").map_err(wrong)?,
            })
        }
    }

    /// Records the work that `work` enqueues through libtorch on GPU `device`, without executing it.
    pub(super) fn record(self, device: usize, work: &mut dyn FnMut()) -> Result<Box<dyn Graph>, String> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the function writes a graph, or returns a message.
        said(unsafe { (self.begin)(device as c_int, &raw mut graph) })?;
        let recorded = Recorded { recorder: self, graph };
        // If the recording were not ended, all later work would fail.
        let worked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: the graph was begun above, and is ended once.
        let ended = said(unsafe { (self.end)(recorded.graph) });
        if let Err(panic) = worked {
            std::panic::resume_unwind(panic);
        }
        ended?;
        Ok(Box::new(recorded))
    }
}

impl Graph for Recorded {
    fn replay(&self, _: &mut dyn FnMut()) -> Result<(), String> {
        // SAFETY: the recording of this graph has ended.
        said(unsafe { (self.recorder.replay)(self.graph) })
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: the graph belongs to `self` and is not used again.
        unsafe { (self.recorder.free)(self.graph) }
    }
}
