//! One allocation that Python, Arrow and libtorch look into at the same time.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

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

/// Bytes at a fixed address, as many as were asked for, never moved and never grown.
///
/// Rust fills them before anybody else sees them. Afterwards Python may write into them, as into any numpy array,
/// so Rust reads them again only through [`Memory::arrow`], and checks what it finds.
#[derive(Debug)]
pub(crate) struct Memory {
    allocation: Allocation,
}

impl Memory {
    /// So many bytes, which `fill` writes; at least [`ALIGNMENT`] of them, so that no view is ever of an empty
    /// allocation.
    ///
    /// # Safety
    ///
    /// `fill` must write every byte that it is given: the next multiple of [`ALIGNMENT`] of `bytes`.
    pub(crate) unsafe fn filled_by(bytes: usize, fill: impl FnOnce(&mut [MaybeUninit<u8>])) -> Self {
        let bytes = aligned(bytes.max(1));
        let allocation = Allocation::new(bytes);
        // SAFETY: the allocation has so many bytes, and nobody else knows of it.
        fill(unsafe { std::slice::from_raw_parts_mut(allocation.start.as_ptr().cast(), bytes) });
        Self { allocation }
    }

    /// A copy of `bytes`, and zeros up to the next multiple of [`ALIGNMENT`].
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let fill = |to: &mut [MaybeUninit<u8>]| {
            let (copy, rest) = to.split_at_mut(bytes.len());
            copy.write_copy_of_slice(bytes);
            rest.fill(MaybeUninit::new(0));
        };
        // SAFETY: both parts are written.
        unsafe { Self::filled_by(bytes.len(), fill) }
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.allocation.start.as_ptr()
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.allocation.layout.size()
    }

    /// The bytes as a buffer of Arrow, which keeps them alive.
    pub(crate) fn arrow(self: &Arc<Self>) -> Buffer {
        // SAFETY: the allocation is valid for its length as long as the `Arc` lives, which the buffer holds.
        unsafe { Buffer::from_custom_allocation(self.allocation.start, self.len(), Arc::clone(self) as _) }
    }
}
