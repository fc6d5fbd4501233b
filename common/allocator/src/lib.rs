//! The jemalloc allocator for the binaries that allocate much memory. C libraries in the process use it too.
//!
//! This is a separate crate, and no library depends on it. If jemalloc were linked into a shared library, such as
//! Python's extension module, its `free` would receive memory that glibc's `malloc` allocated.
//!
//! glibc's allocator either returns freed batches and activations to the kernel at once and requests the same number
//! of pages again, or it keeps them for the thread that freed them. Memory limits do not account for these kept
//! pages. Building rm1 (1 million samples, 512 MiB) with jemalloc took 0.62 times as long (40.6 s instead of 65.2 s)
//! and 0.84 times as much memory (874 MiB instead of 1,042 MiB). mimalloc compiles 95 s faster, but keeps more memory
//! than the limits allow (`docs/src/benchmarks/build-time.md`).

#![forbid(unsafe_code)]

/// The jemalloc allocator, which [`use_jemalloc`] installs.
pub use tikv_jemallocator::Jemalloc;

/// The default configuration of jemalloc, for programs that process batches within a memory limit. Freed memory,
/// large allocations included, is reused at once. Pages that are unused for three seconds return to the kernel. With
/// one second instead, building rm3 took 1.05 times the processor time.
///
/// Four processors share an arena, because the memory limit does not account for memory that arenas keep. On two
/// processors, building rm1 in one session (1 million samples, 512 MiB) took 698 MiB with one arena and 930 MiB with
/// two, in the same time. A single arena would be too few for many processors: a build spends 3 % of its processor
/// time with an arena locked.
///
/// Background threads of jemalloc return pages to the kernel. Without them, the thread that happens to free memory
/// when the decay time is over returns the pages of its whole arena. That takes 0.2 s at a time when 8 GiB are in use,
/// and other threads wait for its results.
///
/// Transparent huge pages are not requested. If a program allocates much memory only once, clearing huge pages costs
/// more than they save (rm1 with 4 GiB on a virtual machine: 59 s of processor time with them, 53 s without). The
/// environment variable `MALLOC_CONF` overrides this configuration.
pub const MALLOC_CONF: &[u8; 118] = b"narenas_ratio:0.25,background_thread:true,metadata_thp:auto,\
    oversize_threshold:0,dirty_decay_ms:3000,muzzy_decay_ms:0\0";

/// The configuration for a trainer, which allocates at every step the amount of memory that it has just freed: four
/// arenas, and no memory returns to the kernel before the program ends. Steps of rm1's reference model took 0.79
/// times as long (1.28 s instead of 1.60 s), steps with deduplicated rows 0.63 times (0.45 s instead of 0.71 s), with
/// the same largest resident set.
pub const KEEPING: &[u8; 75] =
    b"narenas:4,thp:always,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1\0";

/// The configuration for a reader, whose memory limit does not account for memory that arenas keep: one arena, and
/// pages that are unused for ten seconds return to the kernel. Reading rm1's folded dataset (500,000 samples) with a
/// limit of 128 MiB took 94 MiB with this configuration and 162 MiB with four arenas, and two threads read 1.04 times
/// as fast.
pub const ONE_ARENA: &[u8; 39] = b"narenas:1,thp:always,metadata_thp:auto\0";

/// The configuration for a preprocessing worker: one arena, which never returns memory to the kernel. Without it, the
/// worker spent a fifth of its processor time on clearing pages.
pub const ONE_ARENA_KEEPING: &[u8; 96] =
    b"narenas:1,thp:always,metadata_thp:auto,oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1\0";

/// Makes jemalloc the allocator of a binary, with the configuration [`MALLOC_CONF`] or another one. Call it once, in
/// `main.rs`.
#[macro_export]
macro_rules! use_jemalloc {
    () => {
        $crate::use_jemalloc!($crate::MALLOC_CONF);
    };
    ($conf:expr) => {
        #[global_allocator]
        static ALLOCATOR: $crate::Jemalloc = $crate::Jemalloc;

        // SAFETY: before the first allocation, jemalloc looks up a symbol with this name and type: a pointer to a
        // text that ends with a zero byte. No other symbol of the program has this name.
        #[unsafe(export_name = "malloc_conf")]
        static MALLOC_CONF: &[u8; $conf.len()] = $conf;
    };
}
