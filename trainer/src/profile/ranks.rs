//! A rank of a plan: its shards, its batch, and the steps that it takes with them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use onefold_ikjt::{Batch, BatchParts, Group};
use onefold_sharding::{FeatureConfig, Plan, Table};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use tch::Tensor;

use super::draw::fill;
use super::turns::{Step, Turns};
use super::{Machine, WARM_UP};
use crate::config::TableOptimizerConfig;
use crate::device::Accelerator;
use crate::distributed::Collectives;
use crate::embedding::{
    DeviceGradients, DeviceLookup, Embeddings, FeatureLookup, Lookup, LookupGradients, Lookups, Placement,
    Request, Shard, Status,
};
use crate::{Error, Result};

/// Tables, a plan for them, and the Zipf exponents of the ids by table and feature.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workload<'a> {
    pub(super) tables: &'a [Table],
    pub(super) plan: &'a Plan,
    pub(super) exponents: &'a [Vec<f64>],
}

impl Workload<'_> {
    /// Returns the error of a plan that does not fit the tables.
    pub(super) fn wrong(&self, source: onefold_sharding::Error) -> Error {
        Error::Sharding { path: PathBuf::from(&self.plan.search), source }
    }
}

/// The number of steps to time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) most: usize,
    /// The minimum number of timed steps. After it, timing ends once the ranks have worked for `enough` time.
    pub(super) least: usize,
    pub(super) enough: Duration,
}

/// The value of all gradients. They would come from the dense model, which is not measured.
const GRADIENT: f32 = 0.001;

/// A rank of a plan.
pub(super) struct PlanRank {
    turns: Arc<Turns>,
    optimizer: TableOptimizerConfig,
    tables: Tables,
}

/// The rank's tables, and the batch that its steps look up.
enum Tables {
    Processor { embeddings: Box<Embeddings>, groups: Vec<Group>, gradients: Vec<LookupGradients> },
    Device { accelerator: Accelerator, parts: Vec<Part> },
}

/// The tables of one dimension on a device, which has one array per dimension.
struct Part {
    embeddings: Embeddings,
    batch: Batch,
}

impl PlanRank {
    /// Creates the rank of `turns`: fills its shards and draws its lists. `threads` is the thread pool of
    /// `machine`, and may be shared with ranks that work at other times. A device has all tables of a plan for
    /// one rank.
    pub(super) fn new(
        workload: &Workload<'_>,
        turns: Arc<Turns>,
        (machine, threads): (&Machine, &Arc<rayon::ThreadPool>),
        seed: u64,
    ) -> Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(turns.rank().into());
        let (mut features, mut groups) = (Vec::new(), Vec::new());
        for (table, exponents) in workload.tables.iter().zip(workload.exponents) {
            let looked_up = table.feature_names().zip(table.lookups()).zip(exponents);
            for ((name, lookups), exponent) in looked_up {
                let laws = (lookups, *exponent);
                let (config, group) = fill(&mut rng, (name, table), laws, workload.plan.samples_per_rank())?;
                features.push(config);
                groups.push(group);
            }
        }
        let kind = workload.tables.first().map(|table| table.optimizer).unwrap_or_default();
        let optimizer = TableOptimizerConfig::new(kind, 0.01);
        let tables = match &machine.device {
            None => {
                let shards =
                    Shard::of_plan(workload.plan, &features).map_err(|source| workload.wrong(source))?;
                let collectives = Arc::clone(&turns) as Arc<dyn Collectives>;
                let placement = Placement { shards, collectives, ..Placement::alone(&features) };
                let embeddings = Embeddings::alike(&features, &placement, &optimizer, Arc::clone(threads));
                Tables::Processor { embeddings: Box::new(embeddings), groups, gradients: Vec::new() }
            }
            Some(device) => Tables::on_device(device, &features, &groups, (&optimizer, machine.threads))?,
        };
        Ok(Self { turns, optimizer, tables })
    }

    /// Takes timed steps, after some warm-up steps.
    pub(super) fn steps(mut self, Limits { most, least, enough }: Limits) -> Result<Vec<Step>> {
        let mut request = match &self.tables {
            Tables::Processor { embeddings, groups, .. } => {
                self.turns.begin()?;
                let request = embeddings.request(groups, Status::default())?;
                self.turns.end()?;
                Some(request)
            }
            Tables::Device { .. } => None,
        };
        let (mut taken, mut worked) = (Vec::new(), 0.0);
        for number in 0..WARM_UP + most {
            let step = match request.take() {
                Some(asked) => {
                    let (step, next) = self.step(asked)?;
                    request = Some(next);
                    step
                }
                None => self.device_step()?,
            };
            // All ranks see the same times, so they stop together.
            let all = self.turns.inner().gather(&[step.work_ms()])?;
            if number < WARM_UP {
                continue;
            }
            taken.push(step);
            worked += all.iter().flatten().sum::<f64>();
            if taken.len() >= least && worked >= enough.as_secs_f64() * 1e3 {
                break;
            }
        }
        Ok(taken)
    }

    /// Takes one step: answers requests, sends requests for the next step, sends gradients, and updates. The
    /// dense part is left out, because it is the same for all plans.
    fn step(&mut self, request: Request) -> Result<(Step, Request)> {
        let Self { turns, optimizer, tables: Tables::Processor { embeddings, groups, gradients } } = self
        else {
            unreachable!("only tables in memory have requests")
        };
        turns.begin()?;
        let lookups = embeddings.host()?.lookup(request)?;
        let mut next = embeddings.request(groups, Status::default())?;
        embeddings.statuses(&mut next)?;
        if gradients.is_empty() {
            *gradients = all_gradients(&lookups, embeddings.features());
        }
        let sent = embeddings.host()?.send_gradients(&lookups, gradients)?;
        embeddings.update(&lookups, gradients, sent, optimizer)?;
        Ok((turns.end()?, next))
    }

    /// Takes one step on the device. The batch is copied before, since training overlaps the copy with the
    /// previous step.
    fn device_step(&mut self) -> Result<Step> {
        let Self { turns, optimizer, tables: Tables::Device { accelerator, parts } } = self else {
            unreachable!("only tables on a device have no requests")
        };
        let request = |part: &Part| part.embeddings.request_batch(Some(&part.batch), Status::default());
        let requests = parts.iter().map(request).collect::<Result<Vec<_>>>()?;
        accelerator.synchronize()?;
        turns.begin()?;
        let lookup = |(part, request): (&Part, Request)| part.embeddings.device()?.lookup(request);
        let lookups = parts.iter().zip(requests).map(lookup).collect::<Result<Vec<_>>>()?;
        accelerator.synchronize()?;
        let forward = turns.end()?;
        let gradients: Vec<_> = lookups.iter().map(device_gradients).collect();
        accelerator.synchronize()?;
        turns.begin()?;
        for ((part, lookup), gradients) in parts.iter_mut().zip(&lookups).zip(&gradients) {
            let sent = part.embeddings.device()?.send_gradients(lookup, gradients)?;
            part.embeddings.update_on_device(lookup, gradients, sent, (optimizer, None))?;
        }
        accelerator.synchronize()?;
        let mut step = turns.end()?;
        step.turns_ms.extend(forward.turns_ms);
        Ok(step)
    }
}

impl Tables {
    fn on_device(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        groups: &[Group],
        (optimizer, threads): (&TableOptimizerConfig, usize),
    ) -> Result<Self> {
        let mut dims: Vec<u64> = features.iter().map(|feature| feature.dim).collect();
        dims.sort_unstable();
        dims.dedup();
        let part = |dim: &u64| {
            let of_dim = features.iter().zip(groups).filter(|(feature, _)| feature.dim == *dim);
            let (configs, groups): (Vec<_>, Vec<_>) =
                of_dim.map(|(config, group)| (config.clone(), group.clone())).unzip();
            let placement = Placement::alone(&configs);
            let embeddings =
                Embeddings::on_accelerator(accelerator, &configs, &placement, optimizer, 0, threads)?;
            // Only the looked-up rows matter, not how many samples share them.
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
            Ok(Part { embeddings, batch: Batch::try_new(parts)? })
        };
        let parts = dims.iter().map(part).collect::<Result<_>>()?;
        Ok(Self::Device { accelerator: accelerator.clone(), parts })
    }
}

/// Returns the group with `samples` samples, like the other groups of the batch; its rows do not change.
fn for_samples(group: Group, samples: usize) -> Result<Group> {
    let rows = group.rows();
    if rows == samples {
        return Ok(group);
    }
    let inverse: Vec<i32> = (0..samples).map(|sample| (sample % rows.max(1)) as i32).collect();
    let name = group.name().to_owned();
    Ok(Group::try_new(name, Some(inverse.into()), group.features().to_vec())?)
}

fn all_gradients(lookups: &Lookups, features: &[FeatureConfig]) -> Vec<LookupGradients> {
    let of_values = |sequence: &FeatureLookup| {
        vec![GRADIENT; sequence.table_rows.len() * features[sequence.feature].dim as usize]
    };
    let gradient = |lookup: &Lookup| LookupGradients {
        pooled: vec![GRADIENT; lookup.pooled.len()],
        sequences: lookup.sequences.iter().map(of_values).collect(),
    };
    lookups.groups.iter().map(gradient).collect()
}

fn device_gradients(lookup: &DeviceLookup) -> DeviceGradients {
    let filled = |tensor: &Tensor| Tensor::full_like(tensor, f64::from(GRADIENT));
    let looked_up = &lookup.looked_up;
    DeviceGradients {
        pooled: looked_up.pooled.as_ref().map(filled),
        sequences: looked_up.sequences.as_ref().map(filled),
    }
}
