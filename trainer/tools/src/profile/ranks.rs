//! A rank of a plan: its shards, its batch, and the steps that it takes with them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use onefold_sharding::{Plan, Table};
use onefold_trainer::distributed::Collectives;
use onefold_trainer::embedding::{Placement, Request, Shard};
use onefold_trainer::table_steps::{DeviceTableSteps, TableSteps};
use onefold_trainer::{Error, Result, TableOptimizerConfig};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::draw::fill;
use super::turns::{Step, Turns};
use super::{Machine, WARM_UP};

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

/// A rank of a plan.
pub(super) struct PlanRank {
    turns: Arc<Turns>,
    tables: Tables,
}

/// The rank's tables, and the batch that its steps look up.
enum Tables {
    /// In main memory, with the request of the next step.
    Processor(Box<(TableSteps, Option<Request>)>),
    Device(DeviceTableSteps),
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
                let steps = TableSteps::new(&features, groups, &placement, optimizer, Arc::clone(threads));
                Tables::Processor(Box::new((steps, None)))
            }
            Some(device) => {
                Tables::Device(DeviceTableSteps::new(device, &features, &groups, optimizer, machine.threads)?)
            }
        };
        Ok(Self { turns, tables })
    }

    /// Takes timed steps, after some warm-up steps.
    pub(super) fn steps(mut self, Limits { most, least, enough }: Limits) -> Result<Vec<Step>> {
        if let Tables::Processor(tables) = &mut self.tables {
            let (steps, request) = &mut **tables;
            self.turns.begin()?;
            *request = Some(steps.request()?);
            self.turns.end()?;
        }
        let (mut taken, mut worked) = (Vec::new(), 0.0);
        for number in 0..WARM_UP + most {
            let step = self.step()?;
            // All ranks see the same times, so they stop together.
            let all = self.turns.inner.gather(&[step.work_ms()])?;
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

    /// Takes one step. The dense part is left out, because it is the same for all plans.
    fn step(&mut self) -> Result<Step> {
        let Self { turns, tables } = self;
        match tables {
            Tables::Processor(tables) => {
                let (steps, request) = &mut **tables;
                turns.begin()?;
                *request = request.take().map(|request| steps.step(request)).transpose()?;
                turns.end()
            }
            Tables::Device(steps) => {
                let mut turns_ms = Vec::new();
                steps.step(|part| {
                    turns.begin()?;
                    part()?;
                    turns_ms.extend(turns.end()?.turns_ms);
                    Ok(())
                })?;
                Ok(Step { turns_ms, exchanges_ms: Vec::new() })
            }
        }
    }
}
