//! What is measured: this machine's processor, or a GPU of it.

use std::time::Instant;

use onefold_base::process::hardware_name;
use onefold_sharding::Costs;

use crate::device::Accelerator;

/// The processor's kernels. Raise it with any change that makes them faster or slower: models keep it.
const CPU_KERNELS: &str = "cpu-5";
/// The GPU's.
const GPU_KERNELS: &str = "gpu-1";

/// Where sets of tables are measured.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Threads of lookups and updates; beside a GPU, of what puts batches together.
    pub threads: usize,
    /// The GPU, if it is not the processor that is measured.
    pub device: Option<Accelerator>,
}

impl Machine {
    /// The hardware's name, as a topology names it: `AMD EPYC, 2 threads`, or a GPU's.
    pub fn name(&self) -> String {
        if let Some(device) = &self.device {
            return device.describe();
        }
        hardware_name(self.threads)
    }

    /// Costs of this machine, of which none are measured yet.
    pub fn no_costs(&self) -> Costs {
        Costs {
            machine: self.name(),
            kernel_version: self.kernel_version().to_owned(),
            sets: 0,
            compute: Vec::new(),
            exchanges: Vec::new(),
        }
    }

    /// The kernels that are measured.
    pub fn kernel_version(&self) -> &'static str {
        if self.device.is_some() { GPU_KERNELS } else { CPU_KERNELS }
    }
}

/// The time since a moment, less what other processes took of it: on a machine that does something else too, threads
/// wait for a processor, and the kernel counts how long.
#[derive(Debug)]
pub(super) struct Clock {
    before: Schedule,
    started: Instant,
    threads: usize,
}

impl Clock {
    pub(super) fn start(threads: usize) -> Self {
        Self { before: Schedule::now(), started: Instant::now(), threads }
    }

    /// Work is shared by all threads, so each one's waiting delays the end by its part.
    pub(super) fn ms(&self) -> f64 {
        let ms = self.started.elapsed().as_secs_f64() * 1e3;
        (ms - self.before.elapsed().waiting_ms / self.threads as f64).max(ms / 8.0)
    }
}

/// How long this process's threads have been running, and waiting for a processor; 0 where the kernel does not tell.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Schedule {
    pub(super) running_ms: f64,
    pub(super) waiting_ms: f64,
}

impl Schedule {
    /// Since the process began.
    pub(super) fn now() -> Self {
        let mut all = Self::default();
        let Ok(threads) = fs_err::read_dir("/proc/self/task") else { return all };
        for thread in threads.flatten() {
            // Nanoseconds on a processor, nanoseconds waiting for one, and how often.
            let counts = fs_err::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            let mut ms =
                counts.split_whitespace().map(|count| count.parse::<u64>().unwrap_or(0) as f64 / 1e6);
            all.running_ms += ms.next().unwrap_or(0.0);
            all.waiting_ms += ms.next().unwrap_or(0.0);
        }
        all
    }

    /// Between `self` and now.
    pub(super) fn elapsed(&self) -> Self {
        let now = Self::now();
        let since = |now: f64, before: f64| (now - before).max(0.0);
        Self {
            running_ms: since(now.running_ms, self.running_ms),
            waiting_ms: since(now.waiting_ms, self.waiting_ms),
        }
    }
}
