//! The hardware to measure: the processor of this machine, or a GPU.

use std::time::Instant;

use onefold_base::process::hardware_name;
use onefold_sharding::Costs;
use onefold_trainer::device::Accelerator;

/// The version of the processor's kernels, which cost models record. Increase it with every change that affects
/// their speed.
const CPU_KERNELS: &str = "cpu-5";
/// The version of the GPU's kernels.
const GPU_KERNELS: &str = "gpu-1";

/// The hardware on which sets of tables are measured.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// The number of threads for lookups and updates; with a GPU, for assembling batches.
    pub(crate) threads: usize,
    /// The GPU to measure; the processor if `None`.
    pub(crate) device: Option<Accelerator>,
}

impl Machine {
    /// Returns the name of the hardware as in topologies: for example `AMD EPYC, 2 threads`, or the name of a
    /// GPU.
    pub(crate) fn name(&self) -> String {
        if let Some(device) = &self.device {
            return device.describe();
        }
        hardware_name(self.threads)
    }

    /// Returns costs of this machine without measurements.
    pub(crate) fn no_costs(&self) -> Costs {
        Costs {
            machine: self.name(),
            kernel_version: self.kernel_version().to_owned(),
            sets: 0,
            compute: Vec::new(),
            exchanges: Vec::new(),
        }
    }

    /// Returns the version of the measured kernels.
    pub(crate) fn kernel_version(&self) -> &'static str {
        if self.device.is_some() { GPU_KERNELS } else { CPU_KERNELS }
    }
}

/// A clock that subtracts time taken by other processes. On a busy machine, threads wait for a processor, and
/// the kernel records these waiting times.
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

    /// Returns the milliseconds since the start. All threads share the work, so the waiting time of one delays
    /// the end by its share.
    pub(super) fn ms(&self) -> f64 {
        let ms = self.started.elapsed().as_secs_f64() * 1e3;
        (ms - self.before.elapsed().waiting_ms / self.threads as f64).max(ms / 8.0)
    }
}

/// The times that this process's threads have run and have waited for a processor; 0 if the kernel does not
/// report them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Schedule {
    pub(super) running_ms: f64,
    pub(super) waiting_ms: f64,
}

impl Schedule {
    /// Returns the times since the process started.
    pub(super) fn now() -> Self {
        let mut all = Self::default();
        let Ok(threads) = fs_err::read_dir("/proc/self/task") else { return all };
        for thread in threads.flatten() {
            // The file has the nanoseconds of running, the nanoseconds of waiting, and the number of time
            // slices.
            let counts = fs_err::read_to_string(thread.path().join("schedstat")).unwrap_or_default();
            let mut ms =
                counts.split_whitespace().map(|count| count.parse::<u64>().unwrap_or(0) as f64 / 1e6);
            all.running_ms += ms.next().unwrap_or(0.0);
            all.waiting_ms += ms.next().unwrap_or(0.0);
        }
        all
    }

    /// Returns the times since `self` was taken.
    pub(super) fn elapsed(&self) -> Self {
        let now = Self::now();
        let since = |now: f64, before: f64| (now - before).max(0.0);
        Self {
            running_ms: since(now.running_ms, self.running_ms),
            waiting_ms: since(now.waiting_ms, self.waiting_ms),
        }
    }
}
