//! Measures the ranks of plans, to check whether predicted costs order plans as measurements do.
//!
//! ```text
//! tables.json + plan.json ──▶ every rank's shards ──draw ids, whole steps in turns──▶ ms beside the predicted ms
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use onefold_base::progress::Reporter;
use onefold_sharding::{ACCESS_BATCH, Lookups, Plan, RankPrediction, Table, TableFile};
use onefold_sharding_benchmark::TABLES_FILE;
use onefold_trainer::distributed::Collectives;
use onefold_trainer::embedding::thread_pool;
use onefold_trainer::{Error, Result, available_memory};
use serde::Serialize;

use super::ranks::{Limits, Workload};
use super::turns::Step;
use super::{Machine, median, on_threads, steps};
use crate::wrong_file;

/// Plans for the same tables.
#[derive(Debug, Clone)]
pub(crate) struct PlanSet {
    /// The name of the task's folder, or of the file of the tables.
    pub(crate) name: String,
    /// The tables.
    pub(crate) tables: TableFile,
    /// The plans, with the names of their files.
    pub(crate) plans: Vec<(String, Plan)>,
}

impl PlanSet {
    /// Loads the plans in `files` for the tables in `tables`.
    ///
    /// # Errors
    ///
    /// [`Error::Sharding`] for a file that is missing or invalid, and for a plan of other tables.
    pub(crate) fn load(name: String, tables: &Path, files: &[PathBuf]) -> Result<Self> {
        let of = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Sharding { path, source }
        };
        let table_file = TableFile::load(tables).map_err(of(tables))?;
        let mut plans = Vec::with_capacity(files.len());
        for file in files {
            let plan = Plan::load(file).map_err(of(file))?;
            plan.check(&table_file.tables, &plan.topology, plan.global_batch_size).map_err(of(file))?;
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            plans.push((name, plan));
        }
        Ok(Self { name, tables: table_file, plans })
    }

    /// Loads the plans of the first `count` tasks in `tasks`, as written by
    /// `onefold-evaluate-plans compare --plans`: `plans` has a folder per task, with a file per search.
    ///
    /// # Errors
    ///
    /// The errors of [`load`](Self::load); [`Error::Fault`] if a task has no plans.
    pub(crate) fn load_tasks(tasks: &Path, plans: &Path, count: usize) -> Result<Vec<Self>> {
        let hint = || {
            format!(
                "make tasks with `onefold-evaluate-plans tasks`, and plans with `onefold-evaluate-plans compare --tasks {} --plans DIR`",
                tasks.display()
            )
        };
        let wrong = |path: &Path, message: &str| wrong_file(path, message.to_owned(), hint());
        let folders = |directory: &Path| -> Result<Vec<PathBuf>> {
            if !directory.is_dir() {
                return Err(wrong(directory, "there is no such directory"));
            }
            let entries = fs_err::read_dir(directory)?.collect::<std::io::Result<Vec<_>>>()?;
            let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
            paths.sort();
            Ok(paths)
        };
        let mut sets = Vec::new();
        for task in folders(tasks)?.into_iter().filter(|path| path.join(TABLES_FILE).is_file()).take(count) {
            let name = task.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let of_task = plans.join(&name);
            let mut files = folders(&of_task)?;
            files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
            if files.is_empty() {
                return Err(wrong(&of_task, "there is no plan"));
            }
            sets.push(Self::load(name, &task.join(TABLES_FILE), &files)?);
        }
        if sets.is_empty() {
            return Err(wrong(tasks, "there is no task"));
        }
        Ok(sets)
    }
}

/// The predicted and measured times of a rank in a step, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MeasuredRank {
    /// The rank.
    pub(crate) rank: u32,
    /// The predicted computation time.
    pub(crate) predicted_ms: f64,
    /// The measured computation time.
    pub(crate) measured_ms: f64,
    /// The measured time of each part of the step, in the order of [`PARTS`].
    pub(crate) parts_ms: Vec<f64>,
    /// The predicted time of exchanging with other ranks and of waiting for them.
    pub(crate) communication_ms: f64,
    /// The time of each exchange, from the moment when all ranks were ready, in the order of [`EXCHANGES`].
    /// Empty if the ranks were threads of one process.
    pub(crate) exchanges_ms: Vec<f64>,
}

/// The names of the parts of a step's computation.
pub(crate) const PARTS: [&str; 4] = ["look up for others", "assemble, ask", "gradients", "update"];
/// The names of the exchanges between ranks. Requests are for the next step; sums are of the gradients of
/// data-parallel tables.
pub(crate) const EXCHANGES: [&str; 4] = ["answers", "requests", "gradients", "sums"];

/// A plan whose ranks were measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MeasuredPlan {
    /// The name of the task, which the plans share.
    pub(crate) task: String,
    /// The name of the plan.
    pub(crate) plan: String,
    /// The cost model that made the predictions.
    pub(crate) cost_model: String,
    /// The milliseconds of a whole step, in which ranks wait for the slowest rank before every exchange. Only
    /// for ranks that were processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) step_ms: Option<f64>,
    /// The ranks of the plan.
    pub(crate) ranks: Vec<MeasuredRank>,
}

impl MeasuredPlan {
    /// Returns the highest predicted computation time of a rank.
    pub(crate) fn predicted_ms(&self) -> f64 {
        self.most(|rank| rank.predicted_ms)
    }

    /// Returns the highest measured computation time of a rank.
    pub(crate) fn measured_ms(&self) -> f64 {
        self.most(|rank| rank.measured_ms)
    }

    /// Returns the predicted cost: computation and exchange of the most expensive rank.
    pub(crate) fn predicted_cost_ms(&self) -> f64 {
        self.most(|rank| rank.predicted_ms + rank.communication_ms)
    }

    /// Returns the measured time of a whole step. If that was not measured, returns the cost from measured
    /// computation and predicted exchange.
    pub(crate) fn measured_cost_ms(&self) -> f64 {
        self.step_ms.unwrap_or_else(|| self.most(|rank| rank.measured_ms + rank.communication_ms))
    }

    fn most(&self, of: impl Fn(&MeasuredRank) -> f64) -> f64 {
        self.ranks.iter().map(of).fold(0.0, f64::max)
    }
}

/// The options of measuring plans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepOptions {
    /// The number of ranks that share this machine's memory; all ranks of a plan if they are threads.
    pub(crate) local_ranks: usize,
    /// The number of timed steps, at least 1; two warm-up steps precede them.
    pub(crate) steps: u32,
    /// The seed of the random ids.
    pub(crate) seed: u64,
}

/// Measures the ranks of every plan on `machine`. The ranks fill their shards, and each draws its own batch
/// according to the tables' pooling factors, dedupe factors, and the Zipf distribution nearest to their
/// accesses. They take whole steps in turns, as in [`profile`](fn@super::profile). Plans of a set with
/// identical placements are measured once.
///
/// With one rank in `collectives`, the ranks of a plan are threads of this process: their computation is
/// measured, and the exchange is predicted. Otherwise `collectives` must have as many ranks as the plans, each
/// of them a process; every rank calls this and gets the same result, and steps are measured including their
/// exchanges.
///
/// # Errors
///
/// [`Error::Fault`] if a plan is for a different number of ranks, if a plan for several ranks is to be measured
/// on a GPU, or if tables do not fit into the available memory; [`Error::Sharding`] if a plan does not fit its
/// tables; the errors of [`Collectives`].
pub(crate) fn measure_plans(
    sets: &[PlanSet],
    machine: &Machine,
    collectives: &Arc<dyn Collectives>,
    options: &StepOptions,
    reporter: &dyn Reporter,
) -> Result<Vec<MeasuredPlan>> {
    let plans = || sets.iter().flat_map(|set| set.plans.iter().map(move |(name, plan)| (set, name, plan)));
    let checked =
        plans().try_for_each(|plan| check(plan, machine.device.is_some(), collectives.size(), options));
    collectives.agree(checked)?;
    reporter.begin("Measuring plans", Some(plans().count() as u64), "plans");
    let threads = Arc::new(thread_pool(machine.threads)?);
    let mut measured = Vec::new();
    for (number, set) in sets.iter().enumerate() {
        let exponents = exponents(&set.tables.tables);
        let (different, place_of) = different_plans(&set.plans);
        let mut steps_of = vec![Vec::new(); different.len()];
        // The first measurement is a little slower, so each set starts with a different plan.
        for i in (0..different.len()).map(|i| (i + number) % different.len()) {
            let workload = Workload { tables: &set.tables.tables, plan: different[i], exponents: &exponents };
            steps_of[i] = times(&workload, (machine, &threads), collectives, options)?;
            reporter.advance(place_of.iter().filter(|place| **place == i).count() as u64);
        }
        for ((name, plan), place) in set.plans.iter().zip(place_of) {
            measured.push(measured_plan((set, name, plan), &steps_of[place], collectives.size() > 1));
        }
    }
    reporter.end();
    Ok(measured)
}

/// Returns the plans with different placements, and for every plan the index of the one with its placement.
fn different_plans(plans: &[(String, Plan)]) -> (Vec<&Plan>, Vec<usize>) {
    let mut different: Vec<&Plan> = Vec::new();
    let is_like = |plan: &Plan, other: &Plan| {
        let mut tables = plan.tables.iter().zip(&other.tables);
        plan.ranks.len() == other.ranks.len()
            && tables.all(|(a, b)| (a.sharding_type, &a.shards) == (b.sharding_type, &b.shards))
    };
    let mut place = |plan| {
        let known = different.iter().position(|other| is_like(other, plan));
        known.unwrap_or_else(|| {
            different.push(plan);
            different.len() - 1
        })
    };
    let place_of = plans.iter().map(|(_, plan)| place(plan)).collect();
    (different, place_of)
}

/// Returns the timed steps of every rank.
fn times(
    workload: &Workload<'_>,
    (machine, threads): (&Machine, &Arc<rayon::ThreadPool>),
    collectives: &Arc<dyn Collectives>,
    options: &StepOptions,
) -> Result<Vec<Vec<Step>>> {
    let count = options.steps as usize;
    let limits = Limits { most: count, least: count, enough: Duration::ZERO };
    let work = |collectives: &Arc<dyn Collectives>| {
        steps(workload, collectives, (machine, threads), options.seed, limits)
    };
    if collectives.size() == 1 {
        return on_threads(workload.plan.topology.ranks, |collectives| work(&collectives));
    }
    collectives.gather_json(&work(collectives)?)
}

/// Returns the exponent of the Zipf distribution nearest to the accesses, by table and feature.
fn exponents(tables: &[Table]) -> Vec<Vec<f64>> {
    let of_feature = |table: &Table, lookups: &Lookups| {
        let [_, accesses] = lookups.distinct(ACCESS_BATCH as f64);
        lookups.accesses(table.rows).nearest_zipf(table.rows, accesses)
    };
    tables.iter().map(|table| table.lookups().map(|lookups| of_feature(table, lookups)).collect()).collect()
}

/// Summarizes the timed steps of a plan's ranks. In a step, all ranks wait for the slowest one before each
/// exchange.
fn measured_plan(
    (set, name, plan): (&PlanSet, &String, &Plan),
    times: &[Vec<Step>],
    exchanged: bool,
) -> MeasuredPlan {
    let steps = times.first().map_or(0, Vec::len);
    let of_step = |number: usize| {
        let slowest = |of: fn(&Step) -> &[f64]| {
            let count = times.first().map_or(0, |steps| of(&steps[number]).len());
            let most = |part: usize| times.iter().map(|steps| of(&steps[number])[part]).fold(0.0, f64::max);
            (0..count).map(most).sum::<f64>()
        };
        slowest(|step| &step.turns_ms) + slowest(|step| &step.exchanges_ms)
    };
    let rank = |(prediction, steps): (&RankPrediction, &Vec<Step>)| {
        let part =
            |of: fn(&Step) -> &[f64], part: usize| median(steps.iter().map(|step| of(step)[part]).collect());
        let parts = steps.first().map_or(0, |step| step.turns_ms.len());
        let turns: Vec<f64> = (0..parts).map(|i| part(|step| &step.turns_ms, i)).collect();
        let exchanges = steps.first().map_or(0, |step| step.exchanges_ms.len());
        let exchanges: Vec<f64> = (0..exchanges).map(|i| part(|step| &step.exchanges_ms, i)).collect();
        MeasuredRank {
            rank: prediction.rank,
            predicted_ms: prediction.compute_ms,
            measured_ms: median(steps.iter().map(Step::work_ms).collect()),
            parts_ms: joined(&turns, &PART_OF_TURN, PARTS.len()),
            communication_ms: prediction.communication_ms,
            exchanges_ms: if exchanged {
                joined(&exchanges, &EXCHANGE_OF, EXCHANGES.len())
            } else {
                Vec::new()
            },
        }
    };
    MeasuredPlan {
        task: set.name.clone(),
        plan: name.clone(),
        cost_model: plan.cost_model.clone(),
        step_ms: exchanged.then(|| median((0..steps).map(of_step).collect())),
        ranks: plan.ranks.iter().zip(times).map(rank).collect(),
    }
}

/// The index in [`PARTS`] of each turn. Turn 2 follows the header of the requests, and computes nothing.
/// For a plan without data-parallel tables, the update is one turn.
const PART_OF_TURN: [usize; 6] = [0, 1, 1, 2, 3, 3];
/// The index in [`EXCHANGES`] of each exchange: requests have a header. Sums exist only for data-parallel
/// tables.
const EXCHANGE_OF: [usize; 5] = [0, 1, 1, 2, 3];

/// Sums the values of each group.
fn joined(values: &[f64], group_of: &[usize], groups: usize) -> Vec<f64> {
    let mut sums = vec![0.0; groups];
    values.iter().zip(group_of).for_each(|(value, group)| sums[*group] += value);
    sums
}

/// Rejects a plan that these ranks cannot measure.
fn check(
    (set, name, plan): (&PlanSet, &String, &Plan),
    on_gpu: bool,
    ranks: u32,
    options: &StepOptions,
) -> Result<()> {
    let planned = plan.ranks.len();
    let wrong = |message: String, hint: String| Err(wrong_file(Path::new(name), message, hint));
    if ranks > 1 && planned != ranks as usize {
        return wrong(
            format!("this plan for `{}` is for {planned} ranks, and there are {ranks}", set.name),
            format!("start as many: `onefold-train-tools launch --ranks {planned} -- measure-plans …`"),
        );
    }
    if on_gpu {
        let hint = "measure it without `--device`, on the processor".to_owned();
        return match planned {
            1 => Ok(()),
            _ => wrong(
                format!("this plan for `{}` is for {planned} ranks, and a GPU measures one", set.name),
                hint,
            ),
        };
    }
    let together = if ranks == 1 { planned } else { options.local_ranks };
    check_memory(&set.name, name, plan, together)
}

/// Rejects a plan whose tables exceed the available memory, if `together` of its ranks are measured at a time
/// on this machine.
fn check_memory(task: &str, name: &str, plan: &Plan, together: usize) -> Result<()> {
    let available = available_memory();
    // Lookups, their gradients and sorted positions need about twice the plan's buffers.
    let needed = |rank: &onefold_sharding::RankPrediction| {
        rank.memory_bytes.saturating_add(rank.buffer_bytes.saturating_mul(2))
    };
    let mut by_rank: Vec<(u64, u32)> = plan.ranks.iter().map(|rank| (needed(rank), rank.rank)).collect();
    by_rank.sort_unstable_by(|a, b| b.cmp(a));
    by_rank.truncate(together);
    let needed = by_rank.iter().map(|(bytes, _)| *bytes).fold(0, u64::saturating_add);
    let who = match by_rank.as_slice() {
        [(_, rank)] => format!("rank {rank}"),
        ranks => format!("{} ranks", ranks.len()),
    };
    if needed <= available {
        return Ok(());
    }
    Err(wrong_file(
        Path::new(name),
        format!(
            "to measure {who} of this plan for `{task}` takes {}, and {} are available",
            onefold_base::units::format_bytes(needed),
            onefold_base::units::format_bytes(available)
        ),
        "measure plans of smaller tables, as `onefold-evaluate-plans tasks --memory 512MiB` draws them",
    ))
}

#[cfg(test)]
mod tests {
    use onefold_base::progress::Silent;
    use onefold_sharding::{AnalyticCost, Beam, Greedy, Search, TablePlan, Topology};
    use onefold_trainer::distributed::Alone;

    use super::*;

    fn sets() -> Vec<PlanSet> {
        let table = |i| Table { first: Lookups::of(30.0), ..Table::new(format!("t{i}"), 2_000, 32) };
        let tables: Vec<Table> = (0..4).map(table).collect();
        let file = TableFile::new(1280, tables.clone()).unwrap();
        let [one, five] = [1, 5].map(|ranks| Topology::h100(ranks, 1 << 30).unwrap());
        let whole = Beam::Full.plan(&tables, &one, &AnalyticCost, 1280).unwrap();
        let spread = Greedy::BySize.plan(&tables, &five, &AnalyticCost, five.global_batch_size(256)).unwrap();
        let copied = tables.iter().map(|table| TablePlan::data_parallel(table, 5)).collect();
        let copied =
            Plan::predict("copied", &tables, copied, &five, &AnalyticCost, five.global_batch_size(256))
                .unwrap();
        let again = Plan { search: "another".into(), ..spread.clone() };
        let plans = [("whole", whole), ("spread", spread), ("copied", copied), ("again", again)]
            .map(|(name, plan)| (name.into(), plan));
        let plans = plans.into();
        vec![PlanSet { name: "task".into(), tables: file, plans }]
    }

    #[test]
    fn every_rank_of_a_plan_is_measured() {
        let machine = Machine { threads: 1, device: None };
        let options = StepOptions { local_ranks: 1, steps: 2, seed: 1 };
        let alone = Arc::new(Alone) as Arc<dyn Collectives>;
        let found = measure_plans(&sets(), &machine, &alone, &options, &Silent).unwrap();
        let names: Vec<_> = found.iter().map(|plan| (plan.task.as_str(), plan.plan.as_str())).collect();
        assert_eq!(names, ["whole", "spread", "copied", "again"].map(|name| ("task", name)));
        // The plan has the same placement as another one, and was not measured again.
        assert_eq!(found[3].ranks, found[1].ranks);
        assert_eq!((found[0].ranks.len(), found[1].ranks.len()), (1, 5));
        for rank in found.iter().flat_map(|plan| &plan.ranks) {
            assert_eq!((rank.parts_ms.len(), rank.exchanges_ms.len()), (PARTS.len(), 0));
            assert!(rank.measured_ms > 0.0 && rank.parts_ms.iter().all(|ms| *ms > 0.0), "{rank:?}");
        }
    }

    #[test]
    fn ranks_measure_whole_steps_together() {
        let mut sets = sets();
        sets[0].plans.remove(0);
        let sets = &sets;
        let work = |collectives: Arc<dyn Collectives>| {
            let options = StepOptions { local_ranks: 5, steps: 2, seed: 1 };
            measure_plans(sets, &Machine { threads: 1, device: None }, &collectives, &options, &Silent)
        };
        let of_ranks = on_threads(5, work).unwrap();
        assert!(of_ranks.iter().all(|measured| *measured == of_ranks[0]));
        for plan in &of_ranks[0] {
            let slowest = plan.ranks.iter().map(|rank| rank.measured_ms).fold(0.0, f64::max);
            assert!(plan.step_ms.unwrap() > 0.5 * slowest, "{plan:?}");
            for rank in &plan.ranks {
                assert_eq!(rank.exchanges_ms.len(), EXCHANGES.len());
                // The gradients of replicas are summed, and the sums are exchanged.
                assert_eq!(rank.exchanges_ms[3] > 0.0, plan.plan == "copied", "{rank:?}");
            }
        }
        // The plan is for five ranks.
        let error = on_threads(2, work).unwrap_err().to_string();
        assert!(error.contains("this plan for `task` is for 5 ranks, and there are 2"), "{error}");
    }

    #[test]
    fn a_gpu_measures_plans_for_one_rank() {
        let (sets, options) = (sets(), StepOptions { local_ranks: 1, steps: 1, seed: 1 });
        let [one, five] = [0, 1].map(|plan| {
            let (name, plan) = &sets[0].plans[plan];
            check((&sets[0], name, plan), true, 1, &options)
        });
        one.unwrap();
        let error = five.unwrap_err().to_string();
        assert!(error.contains("is for 5 ranks, and a GPU measures one"), "{error}");
    }
}
