//! One allocation that Python, Arrow and libtorch look into at the same time.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use arrow::buffer::Buffer;

/// Where sections begin: enough for any type here, and for a cache line.
pub(crate) const ALIGNMENT: usize = 64;

/// The next multiple of [`ALIGNMENT`].
pub(crate) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// What the allocator gave, and gets back.
#[derive(Debug)]
struct Allocation {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the bytes belong to the value alone, and nothing about them depends on the thread.
unsafe impl Send for Allocation {}
// SAFETY: `&Allocation` gives out an address; who reads and writes there while Python can is said at `Memory`.
unsafe impl Sync for Allocation {}

impl Allocation {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("fewer bytes than isize::MAX");
        assert!(bytes > 0, "an allocation of no bytes");
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, layout }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Allocations of batches that are gone, for the next batches of the same epoch: pages that are new to the process
/// cost as much as the copy of a batch.
#[derive(Debug, Default)]
pub(crate) struct Spares(Mutex<Vec<Allocation>>);

/// Spare allocations of an epoch: of the batch that Python drops as it takes the next one, and of one more.
const SPARES: usize = 2;

impl Spares {
    /// An allocation of at least so many bytes.
    fn take(&self, bytes: usize) -> Allocation {
        // Batches of an epoch differ a little in size.
        let capacity = bytes.next_multiple_of(aligned(bytes.next_power_of_two() / 16));
        let spare = self.0.try_lock().ok().and_then(|mut spares| {
            let fits = |spare: &Allocation| (bytes..=2 * capacity).contains(&spare.layout.size());
            let found = spares.iter().rposition(fits)?;
            Some(spares.swap_remove(found))
        });
        spare.unwrap_or_else(|| Allocation::new(capacity))
    }

    /// Never waits: in a forked process a thread that is not there may have the lock.
    fn give(&self, allocation: Allocation) {
        if let Ok(mut spares) = self.0.try_lock() {
            if spares.len() == SPARES {
                spares.remove(0);
            }
            spares.push(allocation);
        }
    }
}

/// Bytes at a fixed address, as many as were asked for, never moved and never grown.
///
/// Rust fills them before anybody else sees them. Afterwards Python may write into them, as into any numpy array,
/// so Rust reads them again only through [`Memory::arrow`], and checks what it finds.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Only `drop` takes it.
    allocation: Option<Allocation>,
    bytes: usize,
    spares: Weak<Spares>,
}

impl Memory {
    /// So many bytes, which `fill` writes; at least [`ALIGNMENT`] of them, so that no view is ever of an empty
    /// allocation.
    ///
    /// # Safety
    ///
    /// `fill` must write every byte that it is given: the next multiple of [`ALIGNMENT`] of `bytes`.
    pub(crate) unsafe fn filled_by(
        bytes: usize,
        spares: &Arc<Spares>,
        fill: impl FnOnce(&mut [MaybeUninit<u8>]),
    ) -> Self {
        let bytes = aligned(bytes.max(1));
        let allocation = spares.take(bytes);
        // SAFETY: the allocation has so many bytes, and nobody else knows of it.
        fill(unsafe { std::slice::from_raw_parts_mut(allocation.start.as_ptr().cast(), bytes) });
        Self { allocation: Some(allocation), bytes, spares: Arc::downgrade(spares) }
    }

    /// A copy of `bytes`, and zeros up to the next multiple of [`ALIGNMENT`].
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let fill = |to: &mut [MaybeUninit<u8>]| {
            let (copy, rest) = to.split_at_mut(bytes.len());
            copy.write_copy_of_slice(bytes);
            rest.fill(MaybeUninit::new(0));
        };
        // SAFETY: both parts are written.
        unsafe { Self::filled_by(bytes.len(), &Arc::default(), fill) }
    }

    fn start(&self) -> NonNull<u8> {
        self.allocation.as_ref().expect("it is there until it is dropped").start
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.start().as_ptr()
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes as a buffer of Arrow, which keeps them alive.
    pub(crate) fn arrow(self: &Arc<Self>) -> Buffer {
        // SAFETY: the allocation is valid for its length as long as the `Arc` lives, which the buffer holds.
        unsafe { Buffer::from_custom_allocation(self.start(), self.len(), Arc::clone(self) as _) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(allocation), Some(spares)) = (self.allocation.take(), self.spares.upgrade()) {
            spares.give(allocation);
        }
    }
}
