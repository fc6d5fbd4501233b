//! What is measured: this machine's processor, or a GPU of it, with one rank's tables.

use std::sync::Arc;
use std::time::Instant;

use onefold_ikjt::{Batch, BatchParts, Group};
use onefold_sharding::{ShardFeatures, tables_of};
use rand_chacha::ChaCha8Rng;
use tch::Tensor;

use super::Drawn;
use super::draw::{Filled, fill};
use crate::Result;
use crate::config::{TableOptimizer, TableOptimizerConfig};
use crate::device::{Accelerator, LookedUp, Staged};
use crate::embedding::{
    DeviceGradients, DeviceStore, Embeddings, Lookup, LookupGradients, Placement, Shard, Status, Table,
    TableStep, thread_pool,
};
use crate::kernels::processor;

/// The processor's kernels. Raise it with any change that makes them faster or slower: models keep it.
const CPU_KERNELS: &str = "cpu-3";
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
        let model = processor::name().unwrap_or_else(|| "unknown processor".to_owned());
        let threads = self.threads;
        format!("{model}, {threads} thread{}", if threads == 1 { "" } else { "s" })
    }

    /// The kernels that are measured.
    pub fn kernel_version(&self) -> &'static str {
        if self.device.is_some() { GPU_KERNELS } else { CPU_KERNELS }
    }

    /// Fills a rank's shards and draws a batch of ids for them; the features come back as they were drawn.
    pub(super) fn rank(&self, rng: &mut ChaCha8Rng, set: &[Drawn]) -> Result<(Rank, Vec<ShardFeatures>)> {
        let fill = |(i, drawn)| fill(rng, i, drawn);
        let filled = set.iter().enumerate().map(fill).collect::<Result<Vec<_>>>()?;
        let features = filled.iter().map(|filled| filled.features).collect();
        let rank = match &self.device {
            None => Rank::on_processor(filled, self.threads),
            Some(device) => Rank::on_device(&filled, device, self.threads),
        };
        Ok((rank?, features))
    }
}

/// The optimizer that is measured.
pub(super) fn optimizer() -> TableOptimizerConfig {
    TableOptimizerConfig::new(TableOptimizer::RowWiseAdagrad, 0.01)
}

/// The value of all gradients: they come from the dense model, which is not measured.
pub(super) const GRADIENT: f32 = 0.001;

/// A rank's tables, and the batch that its steps look up.
pub(super) enum Rank {
    Processor { embeddings: Box<Embeddings>, groups: Vec<Group>, threads: usize },
    Device { accelerator: Accelerator, parts: Vec<Part> },
}

/// A device's tables of one dimension: it has an array for each.
pub(super) struct Part {
    tables: DeviceStore,
    batch: Batch,
}

impl Rank {
    fn on_processor(filled: Vec<Filled>, threads: usize) -> Result<Self> {
        let (features, groups): (Vec<_>, Vec<_>) =
            filled.into_iter().map(|filled| (filled.config, filled.group)).unzip();
        let mut tables = Vec::with_capacity(features.len());
        for config in tables_of(&features).0 {
            // Pages that were never written would be read from one and the same.
            let weights = vec![0.01; (config.rows * config.dim) as usize];
            let accumulators = vec![0.0; config.rows as usize];
            let table = Table::from_parts(&config, weights, accumulators);
            // The sizes are the configuration's own.
            let initial = || Table::initial(&config, &optimizer(), 0, &Shard::whole(0, &config, 0));
            tables.push(table.unwrap_or_else(initial));
        }
        Ok(Self::Processor {
            embeddings: Box::new(Embeddings::from_tables(&features, tables, threads)?),
            groups,
            threads,
        })
    }

    fn on_device(filled: &[Filled], accelerator: &Accelerator, threads: usize) -> Result<Self> {
        let mut dims: Vec<u64> = filled.iter().map(|filled| filled.config.dim).collect();
        dims.sort_unstable();
        dims.dedup();
        let threads = Arc::new(thread_pool(threads)?);
        let part = |dim: &u64| {
            let of_dim = filled.iter().filter(|filled| filled.config.dim == *dim);
            let (configs, groups): (Vec<_>, Vec<_>) =
                of_dim.map(|filled| (filled.config.clone(), filled.group.clone())).unzip();
            let shards = Placement::alone(&configs).shards;
            let tables = DeviceStore::of_zeros(accelerator, &configs, (&shards, 0), &optimizer(), &threads)?;
            // What is looked up are rows; how many samples share them is not seen here.
            let size = groups.iter().map(Group::samples).max().unwrap_or(0);
            let parts = BatchParts {
                size,
                dense: Vec::new().into(),
                labels: Vec::new().into(),
                weights: None,
                timestamps: None,
                kept: Vec::new(),
                groups: groups.into_iter().map(|group| for_samples(group, size)).collect::<Result<_>>()?,
            };
            Ok(Part { tables, batch: Batch::try_new(parts)? })
        };
        Ok(Self::Device {
            accelerator: accelerator.clone(),
            parts: dims.iter().map(part).collect::<Result<_>>()?,
        })
    }

    /// The milliseconds of one step: lookup and pooling, then backward and update.
    pub(super) fn step_ms(&mut self) -> Result<f64> {
        match self {
            Self::Processor { embeddings, groups, threads } => {
                processor_step_ms(embeddings, groups, *threads)
            }
            Self::Device { accelerator, parts } => device_step_ms(accelerator, parts),
        }
    }
}

/// The group with as many samples as the others of a batch have; its rows stay what they are.
fn for_samples(group: Group, samples: usize) -> Result<Group> {
    let rows = group.rows();
    if rows == samples {
        return Ok(group);
    }
    let inverse: Vec<i32> = (0..samples).map(|sample| (sample % rows.max(1)) as i32).collect();
    let name = group.name().to_owned();
    Ok(Group::try_new(name, Some(inverse.into()), group.features().to_vec())?)
}

fn processor_step_ms(embeddings: &mut Embeddings, groups: &[Group], threads: usize) -> Result<f64> {
    let forward = Clock::start(threads);
    let request = embeddings.request(groups, Status::default())?;
    let lookups = embeddings.host()?.lookup(request)?;
    let forward_ms = forward.ms();
    let gradient = |lookup: &Lookup| LookupGradients {
        pooled: vec![GRADIENT; lookup.pooled.len()],
        sequences: Vec::new(),
    };
    let gradients: Vec<_> = lookups.groups.iter().map(gradient).collect();
    let update = Clock::start(threads);
    let sent = embeddings.host()?.send_gradients(&lookups, &gradients)?;
    embeddings.update(&lookups, &gradients, sent, &optimizer())?;
    Ok(forward_ms + update.ms())
}

/// The batch's copy is made before, as training does it beside the step before.
fn device_step_ms(accelerator: &Accelerator, parts: &mut [Part]) -> Result<f64> {
    let staged = parts.iter().map(|part| part.tables.whole().stage(&part.batch));
    let staged = staged.collect::<Result<Vec<Staged>>>()?;
    accelerator.synchronize()?;
    let started = Instant::now();
    let lookup = |(part, mut staged): (&Part, Staged)| {
        staged.arrive()?;
        Ok((part.tables.lookup(&staged)?, staged))
    };
    let lookups = parts.iter().zip(staged).map(lookup).collect::<Result<Vec<_>>>()?;
    accelerator.synchronize()?;
    let forward = started.elapsed();
    let gradient = |(looked_up, _): &(LookedUp, Staged)| {
        let pooled = looked_up.pooled.as_ref();
        let pooled = pooled.map(|pooled| Tensor::full_like(pooled, f64::from(GRADIENT)));
        DeviceGradients { pooled, sequences: None }
    };
    let gradients: Vec<_> = lookups.iter().map(gradient).collect();
    accelerator.synchronize()?;
    let optimizer = optimizer();
    let step = TableStep { optimizer: &optimizer, number: 1, permit: None };
    let started = Instant::now();
    for ((part, (looked_up, staged)), gradient) in parts.iter_mut().zip(lookups).zip(gradients) {
        part.tables.update_own((&staged, &looked_up), &gradient, step)?;
    }
    accelerator.synchronize()?;
    Ok(1e3 * (forward + started.elapsed()).as_secs_f64())
}

/// The time since a moment, less what other processes took of it: on a machine that does something else too, threads
/// wait for a processor, and the kernel counts how long.
struct Clock {
    before: Schedule,
    started: Instant,
    threads: usize,
}

impl Clock {
    fn start(threads: usize) -> Self {
        Self { before: Schedule::now(), started: Instant::now(), threads }
    }

    /// Work is shared by all threads, so each one's waiting delays the end by its part.
    fn ms(&self) -> f64 {
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

#[cfg(test)]
mod tests {
    use onefold_datasets::progress::Silent;
    use rand::SeedableRng;

    use super::super::{ProfileOptions, draw, profile};
    use super::*;
    use crate::device::host::emulated;

    /// The same sets, whatever measures them, in steps that change the tables of every dimension.
    #[test]
    fn a_device_is_measured_on_the_same_sets() {
        let options = ProfileOptions { sets: 3, first_set: 0, samples: 32, memory_bytes: 1 << 20, seed: 3 };
        let [processor, device] = [None, Some(emulated())].map(|device| Machine { threads: 1, device });
        let costs = [&processor, &device].map(|machine| profile(&options, machine, &Silent).unwrap());
        assert_eq!(costs[1].compute.len(), 3);
        for (processor, device) in costs[0].compute.iter().zip(&costs[1].compute) {
            assert_eq!(processor.shards, device.shards);
            assert!(device.ms > 0.0);
        }
        assert_eq!([costs[0].kernel_version.as_str(), &costs[1].kernel_version], [CPU_KERNELS, GPU_KERNELS]);
        assert_ne!(costs[0].machine, costs[1].machine);
    }

    #[test]
    fn a_step_on_a_device_updates_what_it_looks_up() {
        let set = draw::tests::set(&[(100, 8, 3.0), (50, 4, 2.0), (70, 8, 1.0)], 16.0);
        let machine = Machine { threads: 1, device: Some(emulated()) };
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut rank, _) = machine.rank(&mut rng, &set).unwrap();
        assert!(rank.step_ms().unwrap() > 0.0);
        let Rank::Device { parts, .. } = &mut rank else { panic!("it is on a device") };
        assert_eq!(parts.len(), 2);
        for part in parts {
            for (table, group) in part.batch.groups().iter().enumerate() {
                let touched = part.tables.whole().take_touched(table);
                let mut ids: Vec<u32> = group.features()[0].values().iter().map(|id| *id as u32).collect();
                ids.sort_unstable();
                ids.dedup();
                assert_eq!(touched, ids);
            }
        }
    }
}
