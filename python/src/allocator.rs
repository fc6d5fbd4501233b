//! Where the compiled half of the package takes memory from: large blocks are mapped, the rest is the process's
//! `malloc`.
//!
//! glibc's `malloc` keeps what one thread frees for that thread, in pieces that fit nothing else, and no memory limit
//! knows of it. The process belongs to the interpreter, so its `malloc` is not ours to replace or to set up. Batches
//! and large decoded columns are therefore mapped one by one. Blocks that were given back are used again, because pages
//! that are new to the process cost as much as the copy of a batch.
//!
//! With a limit of 320 MiB, reading rm1 in the layout `rows` made a process grow by 255 MiB to 279 MiB, and by 526 MiB
//! to 592 MiB before. mimalloc in the place of glibc's made it 455 MiB; jemalloc would need features that change the
//! binaries'.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Blocks of at least so many bytes are mapped. Smaller blocks are too many: with 512 KiB in its place, reading took
/// 1.04 times as long.
const LARGE: usize = 2 << 20;

/// The alignment of a mapped block; the size of every page there is is a multiple of it.
const PAGE: usize = 4096;

/// The allocator of the extension module.
pub(crate) struct Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

static KEPT: Mutex<Kept> = Mutex::new(Kept { blocks: [None; Kept::MOST], next: 0, bytes: 0 });

/// The most bytes of [`KEPT`].
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Sets how much memory is kept that nobody uses.
pub(crate) fn keep_at_most(bytes: usize) {
    MOST_BYTES.store(bytes, Relaxed);
}

/// Blocks that were given back, to be used again.
struct Kept {
    blocks: [Option<Block>; Self::MOST],
    /// The place of the oldest block.
    next: usize,
    bytes: usize,
}

/// A mapped block, with the [`capacity`] of what was in it.
#[derive(Clone, Copy)]
struct Block {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a block that is kept belongs to nobody else.
unsafe impl Send for Block {}

impl Kept {
    const MOST: usize = 64;

    fn take(&mut self, bytes: usize) -> Option<Block> {
        let found = self.blocks.iter().position(|kept| kept.is_some_and(|kept| kept.bytes == bytes))?;
        self.bytes -= bytes;
        self.blocks[found].take()
    }

    /// Keeps `block`. What there is no room for any more comes back, to be unmapped.
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
    /// New pages, all zero; `None` if the kernel has none.
    fn map(bytes: usize) -> Option<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: without an address the kernel chooses one where nothing else is.
        let start = unsafe { libc::mmap(null_mut(), bytes, access, kind, -1, 0) };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        start.map(|start| Self { start, bytes })
    }

    /// # Safety
    ///
    /// Nobody may use the block any more.
    unsafe fn unmap(self) {
        // SAFETY: the block was mapped with this size.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// The bytes of the block for so many. Sizes differ from batch to batch, and few capacities are used again more often
/// than many: with sixteen between two powers of two, reading rm1 touched 1.8 times as many new pages. Pages that
/// nobody touched cost nothing.
fn capacity(bytes: usize) -> usize {
    bytes.next_power_of_two()
}

/// Whether such memory is mapped.
fn is_mapped(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE && layout.size() <= isize::MAX as usize / 2
}

fn mapped(bytes: usize, zeroed: bool) -> *mut u8 {
    let bytes = capacity(bytes);
    // Never waits: in a forked process a thread that is not there may have the lock.
    let kept = KEPT.try_lock().ok().and_then(|mut kept| kept.take(bytes));
    match kept {
        Some(block) => {
            if zeroed {
                // SAFETY: the block is ours and has so many bytes.
                unsafe { block.start.write_bytes(0, bytes) };
            }
            block.start.as_ptr()
        }
        None => Block::map(bytes).map_or(null_mut(), |block| block.start.as_ptr()),
    }
}

/// # Safety
///
/// `block` must be of [`mapped`], and nobody may use it any more.
unsafe fn give_back(block: Block) {
    match KEPT.try_lock() {
        Ok(mut kept) => {
            let dropped = kept.give(block);
            drop(kept);
            // SAFETY: they were kept, and are not any more.
            dropped.for_each(|block| unsafe { block.unmap() });
        }
        // SAFETY: the caller's promise.
        Err(_) => unsafe { block.unmap() },
    }
}

// SAFETY: a block has the size and the alignment that it was asked for with. Whether it is mapped, and its capacity,
// follow from the layout, which the caller gives again when the block comes back. Nothing here panics or allocates.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match is_mapped(layout) {
            true => mapped(layout.size(), false),
            // SAFETY: the caller's promise.
            false => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match is_mapped(layout) {
            true => mapped(layout.size(), true),
            // SAFETY: the caller's promise.
            false => unsafe { System.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        match NonNull::new(start) {
            // SAFETY: the caller's promise.
            Some(start) if is_mapped(layout) => unsafe {
                give_back(Block { start, bytes: capacity(layout.size()) })
            },
            // SAFETY: the caller's promise.
            _ => unsafe { System.dealloc(start, layout) },
        }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the new size does not overflow with this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (is_mapped(layout), is_mapped(new)) {
            // SAFETY: the caller's promise.
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
                // SAFETY: the new layout has a size, and the old block is given back only once it is copied.
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
