//! The allocator of the binaries that move much memory: jemalloc, which C libraries in the process use too.
//!
//! It is a crate of its own, which no library names: linked into a shared library, such as Python's extension module,
//! its `free` would be handed what glibc's `malloc` gave.
//!
//! glibc's gives freed batches and activations back to the kernel at once and takes as many pages from it anew, or
//! keeps them for the thread that freed them, which no memory limit knows of. Building rm1 (1 million samples, 512 MiB)
//! with jemalloc took 0.62 times as long (40.6 s to 65.2 s) and 0.84 times as much memory (874 MiB to 1,042 MiB).
//! mimalloc compiles 95 s faster, but keeps more than memory limits allow (`docs/src/benchmarks/build-time.md`).

#![forbid(unsafe_code)]

/// jemalloc, for [`use_jemalloc`].
pub use tikv_jemallocator::Jemalloc;

/// How jemalloc is set up for a program that makes batch after batch within a memory limit. What it gives back, large
/// allocations included, it takes again at once; what nobody takes for three seconds goes back to the kernel. Giving it
/// back after one second cost rm3 1.05 times the processor time.
///
/// Four processors share an arena, because the limit does not know of what arenas keep. On two processors, rm1's samples
/// in one session (1 million, 512 MiB) took 698 MiB with one arena and 930 MiB with two, in the same time. One arena for
/// all would be too few for many processors: a build spends 3 % of its processor time with an arena locked.
///
/// Threads of jemalloc's own give pages back. Otherwise the thread that happens to free something when it is time does so
/// for its whole arena: 0.2 s at a stretch where 8 GiB are in use, during which the others wait for what it does.
///
/// Huge pages are not asked for: where much memory is taken once, clearing them costs more than they save (rm1 with
/// 4 GiB on a virtual machine: 59 s of processor time with them, 53 s without). The environment's `MALLOC_CONF` has the
/// last word.
pub const MALLOC_CONF: &[u8; 118] = b"narenas_ratio:0.25,background_thread:true,metadata_thp:auto,\
    oversize_threshold:0,dirty_decay_ms:3000,muzzy_decay_ms:0\0";

/// For a trainer, which takes as much memory again at every step as it has just given back: four arenas, and the kernel
/// gets nothing back before the program ends. Steps of rm1's reference model took 0.79 times as long (1.28 s to 1.60 s),
/// those of deduplicated rows 0.63 times (0.45 s to 0.71 s), with the same largest resident set.
pub const KEEPING: &[u8; 75] =
    b"narenas:4,thp:always,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1\0";

/// For a reader, which promises to stay within a memory limit that does not know of what arenas keep: one arena, and
/// what is not used for ten seconds goes back to the kernel. Reading rm1's folded dataset (500,000 samples) with a limit
/// of 128 MiB took 94 MiB, and 162 MiB with four arenas; two threads read at 1.04 times the rate.
pub const ONE_ARENA: &[u8; 39] = b"narenas:1,thp:always,metadata_thp:auto\0";

/// [`MALLOC_CONF`] with one arena and the usual caches, for a preprocessing worker, which spent a fifth of its processor
/// time on the clearing of pages.
pub const ONE_ARENA_KEEPING: &[u8; 96] =
    b"narenas:1,thp:always,metadata_thp:auto,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1\0";

/// Makes jemalloc the allocator of a binary, set up by `MALLOC_CONF` or a given text. To be called once, in `main.rs`.
#[macro_export]
macro_rules! use_jemalloc {
    () => {
        $crate::use_jemalloc!($crate::MALLOC_CONF);
    };
    ($conf:expr) => {
        #[global_allocator]
        static ALLOCATOR: $crate::Jemalloc = $crate::Jemalloc;

        // SAFETY: jemalloc looks for a symbol of this name and type, a pointer to a text that ends with a zero, before
        // the first allocation. Nothing else in the program has the name.
        #[unsafe(export_name = "malloc_conf")]
        static MALLOC_CONF: &[u8; $conf.len()] = $conf;
    };
}
