//! Measures plans by whole steps of their ranks: requests, lookups, answers, gradients and updates, between processes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use onefold_datasets::progress::Reporter;
use onefold_ikjt::Group;
use onefold_sharding::{FeatureConfig, Plan, RankPrediction, ShardLoad, ShardingType, TableFile};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::draw::fill;
use super::machine::{GRADIENT, Schedule, optimizer};
use super::plans::{MeasuredPlan, MeasuredRank, PlanSet, check_memory, drawn};
use crate::distributed::Collectives;
use crate::embedding::{Embeddings, Lookup, LookupGradients, Placement, Shard, Status};
use crate::{Error, Result};

/// How plans are measured on ranks.
#[derive(Debug, Clone, Copy)]
pub struct StepOptions {
    /// Threads of a rank.
    pub threads: usize,
    /// Ranks that share this machine's memory.
    pub local_ranks: usize,
    /// Steps that are timed, at least 1; two more warm up.
    pub steps: u32,
    /// Another seed draws other ids.
    pub seed: u64,
}

const WARM_UP: u32 = 2;

/// Measures steps of plans for as many ranks as `collectives` has. Every rank calls it, and all get the same result.
///
/// A rank has a batch of its own, drawn as by [`measure_plans`](super::plans::measure_plans). A step is what training
/// does with the tables: it looks up its rows where they are, requests those of the next step meanwhile, sends the
/// gradients to the owners, and updates. The dense part is left out, as it is the same in all plans. `step_ms` is the
/// mean over the steps, which end together on all ranks; a rank's `measured_ms` is the time that its threads had a
/// processor.
///
/// # Errors
///
/// [`Error::Config`] if a plan is for another number of ranks, or takes more memory than is available;
/// [`Error::Sharding`] if a plan does not fit its tables; those of [`Collectives`].
pub fn measure_on_ranks(
    sets: &[PlanSet],
    collectives: &Arc<dyn Collectives>,
    options: &StepOptions,
    reporter: &dyn Reporter,
) -> Result<Vec<MeasuredPlan>> {
    let plans = || sets.iter().flat_map(|set| set.plans.iter().map(move |(name, plan)| (set, name, plan)));
    collectives.agree(
        plans().try_for_each(|(set, name, plan)| {
            check(set, name, plan, collectives.size(), options.local_ranks)
        }),
    )?;
    reporter.begin("Measuring plans", Some(plans().count() as u64), "plans");
    let mut measured = Vec::new();
    for (set, name, plan) in plans() {
        let (step_ms, busy_ms) = collectives
            .agree(RankOfPlan::new(&set.tables, plan, collectives, options))?
            .measure(options.steps)?;
        let rank = |(prediction, busy_ms): (&RankPrediction, f64)| MeasuredRank {
            rank: prediction.rank,
            predicted_ms: prediction.compute_ms,
            measured_ms: busy_ms,
            communication_ms: prediction.communication_ms,
        };
        measured.push(MeasuredPlan {
            task: set.name.clone(),
            plan: name.clone(),
            cost_model: plan.cost_model.clone(),
            step_ms: Some(step_ms),
            ranks: plan.ranks.iter().zip(busy_ms).map(rank).collect(),
        });
        reporter.advance(1);
    }
    reporter.end();
    Ok(measured)
}

fn check(set: &PlanSet, name: &str, plan: &Plan, ranks: u32, local_ranks: usize) -> Result<()> {
    let planned = plan.ranks.len();
    if planned != ranks as usize {
        return Err(Error::Config {
            path: PathBuf::from(name),
            message: format!("this plan for `{}` is for {planned} ranks, and there are {ranks}", set.name),
            hint: format!("start as many: `onefold-train launch --ranks {planned} -- measure-plans …`"),
        });
    }
    check_memory(&set.name, name, plan, local_ranks)
}

/// One rank's shards, and the batch that its steps look up.
struct RankOfPlan {
    embeddings: Embeddings,
    groups: Vec<Group>,
}

impl RankOfPlan {
    fn new(
        tables: &TableFile,
        plan: &Plan,
        collectives: &Arc<dyn Collectives>,
        options: &StepOptions,
    ) -> Result<Self> {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(collectives.rank().into());
        let (mut features, mut groups) = (Vec::new(), Vec::new());
        for table in &tables.tables {
            // A rank's own samples look up whole tables.
            let load = ShardLoad {
                table,
                sharding_type: ShardingType::DataParallel,
                shard: &onefold_sharding::Shard::whole(table, 0),
                within_node: true,
            };
            for drawn in drawn(&load, plan) {
                let filled = fill(&mut rng, features.len(), &drawn)?;
                features.push(FeatureConfig { table: Some(table.name.clone()), ..filled.config });
                groups.push(filled.group);
            }
        }
        let wrong = |source| Error::Sharding { path: PathBuf::from(&plan.search), source };
        let placement = Placement {
            shards: Shard::of_plan(plan, &features).map_err(wrong)?,
            collectives: Arc::clone(collectives),
            ..Placement::alone(&features)
        };
        let embeddings = Embeddings::new(&features, &placement, &optimizer(), 0, options.threads)?;
        Ok(Self { embeddings, groups })
    }

    /// The milliseconds of a step, and how long each rank's threads had a processor.
    fn measure(mut self, steps: u32) -> Result<(f64, Vec<f64>)> {
        let collectives = Arc::clone(self.embeddings.collectives());
        let mut request = self.embeddings.request(&self.groups, Status::default())?;
        let (mut started, mut before) = (Instant::now(), Schedule::now());
        for step in 0..WARM_UP + steps {
            if step == WARM_UP {
                collectives.barrier()?;
                (started, before) = (Instant::now(), Schedule::now());
            }
            let lookups = self.embeddings.host()?.lookup(request)?;
            request = self.embeddings.request(&self.groups, Status::default())?;
            let gradients: Vec<_> = lookups.groups.iter().map(gradient).collect();
            self.embeddings.statuses(&mut request)?;
            let sent = self.embeddings.host()?.send_gradients(&lookups, &gradients)?;
            self.embeddings.update(&lookups, &gradients, sent, &optimizer())?;
        }
        let busy_ms = before.elapsed().running_ms / f64::from(steps);
        collectives.barrier()?;
        let step_ms = 1e3 * started.elapsed().as_secs_f64() / f64::from(steps);
        let all = collectives.gather(&[step_ms, busy_ms])?;
        let slowest = all.iter().map(|of_rank| of_rank[0]).fold(0.0, f64::max);
        Ok((slowest, all.iter().map(|of_rank| of_rank[1]).collect()))
    }
}

fn gradient(lookup: &Lookup) -> LookupGradients {
    LookupGradients { pooled: vec![GRADIENT; lookup.pooled.len()], sequences: Vec::new() }
}
