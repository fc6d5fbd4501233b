//! The memory allocator of the compiled part of the package: large blocks are mapped, and all others come from the
//! process's `malloc`.
//!
//! glibc's `malloc` keeps memory that a thread frees for this thread, in fragments that fit no other request, and
//! memory limits do not account for it. The process belongs to the interpreter, so this package cannot replace or
//! configure its `malloc`. Batches and large decoded columns are therefore mapped individually. Freed blocks are
//! reused, because new pages cost as much as copying a batch.
//!
//! With a limit of 320 MiB, reading rm1 in the layout `rows` makes a process grow by 255 MiB to 279 MiB, instead of
//! 526 MiB to 592 MiB with glibc's `malloc`. With mimalloc it was 455 MiB. jemalloc would need features that would
//! also change the binaries.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The least size in bytes of a block that is mapped. With a limit of 512 KiB, there are too many blocks, and reading
/// took 1.04 times as long.
const LARGE: usize = 2 << 20;

/// The alignment of a mapped block. All page sizes are multiples of it.
const PAGE: usize = 4096;

/// The allocator of the extension module.
pub(crate) struct Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

static KEPT: Mutex<Kept> = Mutex::new(Kept { blocks: [None; Kept::MOST], next: 0, bytes: 0 });

/// The largest total size of the blocks in [`KEPT`], in bytes.
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Sets how many bytes of unused memory are kept at most.
pub(crate) fn keep_at_most(bytes: usize) {
    MOST_BYTES.store(bytes, Relaxed);
}

/// Freed blocks, which are reused.
struct Kept {
    blocks: [Option<Block>; Self::MOST],
    /// The index of the oldest block.
    next: usize,
    bytes: usize,
}

/// A mapped block. Its size is the [`capacity`] for its contents.
#[derive(Clone, Copy)]
struct Block {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a kept block has no other owner.
unsafe impl Send for Block {}

impl Kept {
    const MOST: usize = 64;

    fn take(&mut self, bytes: usize) -> Option<Block> {
        let found = self.blocks.iter().position(|kept| kept.is_some_and(|kept| kept.bytes == bytes))?;
        self.bytes -= bytes;
        self.blocks[found].take()
    }

    /// Keeps `block`. Returns the blocks that no longer fit and have to be unmapped.
    fn give(&mut self, block: Block) -> impl Iterator<Item = Block> + use<> {
        let mut dropped = [None; Self::MOST];
        self.bytes += block.bytes;
        let place = self.blocks.iter().position(Option::is_none).unwrap_or(self.next);
        dropped[0] = self.blocks[place].replace(block);
        self.bytes -= dropped[0].map_or(0, |block| block.bytes);
        for dropped in &mut dropped[1..] {
            if self.bytes <= MOST_BYTES.load(Relaxed) {
                break;
            }
            *dropped = self.blocks[self.next].take();
            self.bytes -= dropped.map_or(0, |block| block.bytes);
            self.next = (self.next + 1) % Self::MOST;
        }
        dropped.into_iter().flatten()
    }
}

impl Block {
    /// Maps new pages, which are zero. Returns `None` if the kernel has no memory.
    fn map(bytes: usize) -> Option<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: without an address, the kernel chooses an unused one.
        let start = unsafe { libc::mmap(null_mut(), bytes, access, kind, -1, 0) };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        start.map(|start| Self { start, bytes })
    }

    /// # Safety
    ///
    /// The block must no longer be in use.
    unsafe fn unmap(self) {
        // SAFETY: the block was mapped with this size.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Returns the size of the block for `bytes` bytes. Sizes differ between batches, and blocks are reused more often if
/// there are few different capacities: with sixteen capacities between two powers of two, reading rm1 touched 1.8
/// times as many new pages. Pages that are never touched cost nothing.
fn capacity(bytes: usize) -> usize {
    bytes.next_power_of_two()
}

/// Returns whether memory with this layout is mapped.
fn is_mapped(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE && layout.size() <= isize::MAX as usize / 2
}

fn mapped(bytes: usize, zeroed: bool) -> *mut u8 {
    let bytes = capacity(bytes);
    // This never waits for the lock: in a forked process, a thread that no longer exists may hold it.
    let kept = KEPT.try_lock().ok().and_then(|mut kept| kept.take(bytes));
    match kept {
        Some(block) => {
            if zeroed {
                // SAFETY: the block belongs to this function and has `bytes` bytes.
                unsafe { block.start.write_bytes(0, bytes) };
            }
            block.start.as_ptr()
        }
        None => Block::map(bytes).map_or(null_mut(), |block| block.start.as_ptr()),
    }
}

/// # Safety
///
/// `block` must come from [`mapped`], and must no longer be in use.
unsafe fn give_back(block: Block) {
    match KEPT.try_lock() {
        Ok(mut kept) => {
            let dropped = kept.give(block);
            drop(kept);
            // SAFETY: these blocks were kept, and are not kept any more.
            dropped.for_each(|block| unsafe { block.unmap() });
        }
        // SAFETY: the caller guarantees it.
        Err(_) => unsafe { block.unmap() },
    }
}

// SAFETY: a block has the requested size and alignment. The layout, which the caller passes again when it frees the
// block, determines whether the block is mapped, and its capacity. This code neither panics nor allocates.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_mapped(layout) {
            true => mapped(layout.size(), false),
            // SAFETY: the caller guarantees it.
            false => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_mapped(layout) {
            true => mapped(layout.size(), true),
            // SAFETY: the caller guarantees it.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match NonNull::new(start) {
            // SAFETY: the caller guarantees it.
            Some(start) if is_mapped(layout) => unsafe {
                give_back(Block { start, bytes: capacity(layout.size()) })
            },
            // SAFETY: the caller guarantees it.
            _ => unsafe { System.dealloc(start, layout) },
        }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that the new size does not overflow with this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (is_mapped(layout), is_mapped(new)) {
            // SAFETY: the caller guarantees it.
            (false, false) => unsafe { System.realloc(start, layout, size) },
            (true, true) => {
                let (before, after) = (capacity(layout.size()), capacity(size));
                if before == after {
                    return start;
                }
                // SAFETY: the block was mapped with this capacity.
                let moved = unsafe { libc::mremap(start.cast(), before, after, libc::MREMAP_MAYMOVE) };
                if moved == libc::MAP_FAILED { null_mut() } else { moved.cast() }
            }
            _ => {
                // SAFETY: the size of the new layout is not zero, and the old block is freed only after it was
                // copied.
                unsafe {
                    let moved = self.alloc(new);
                    if !moved.is_null() {
                        moved.copy_from_nonoverlapping(start, layout.size().min(size));
                        self.dealloc(start, layout);
                    }
                    moved
                }
            }
        }
    }
}
