//! One allocation that Python, Arrow and libtorch look into at the same time.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

use arrow::buffer::Buffer;

/// Where sections begin: enough for any type here, and for a cache line.
pub(crate) const ALIGNMENT: usize = 64;

/// The next multiple of [`ALIGNMENT`].
pub(crate) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Bytes at a fixed address, as many as were asked for, never moved and never grown.
///
/// Rust fills them before anybody else sees them. Afterwards Python may write into them, as into any numpy array, so Rust
/// reads them again only through [`Memory::arrow`], and checks what it finds.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the bytes belong to the value alone, and nothing about them depends on the thread.
unsafe impl Send for Memory {}
// SAFETY: `&Memory` gives out an address; who reads and writes there while Python can is said above.
unsafe impl Sync for Memory {}

impl Memory {
    /// So many zero bytes, at least [`ALIGNMENT`] of them: no view is ever of an empty allocation.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(aligned(bytes.max(1)), ALIGNMENT).expect("fewer bytes than isize::MAX");
        // SAFETY: the layout has at least `ALIGNMENT` bytes.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, layout }
    }

    /// A copy of `bytes`.
    pub(crate) fn copy_of(bytes: &[u8]) -> Self {
        let mut memory = Self::zeroed(bytes.len());
        memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        memory
    }

    /// The bytes while nobody else has them.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the allocation has this length and is initialised; `&mut self` excludes other users.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// The bytes as a buffer of Arrow, which keeps them alive.
    pub(crate) fn arrow(self: &Arc<Self>) -> Buffer {
        // SAFETY: the allocation is valid for its length as long as the `Arc` lives, which the buffer holds.
        unsafe { Buffer::from_custom_allocation(self.start, self.len(), Arc::clone(self) as _) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `zeroed` allocated it with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
