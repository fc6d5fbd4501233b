//! Measures the ranks of plans, to see whether predicted costs rank them as the machine does.
//!
//! ```text
//! tables.json + plan.json ──▶ every rank's shards ──draw ids, look up, update──▶ ms beside the predicted ms
//! ```

use std::path::{Path, PathBuf};

use onefold_datasets::progress::Reporter;
use onefold_sharding::{ACCESS_BATCH, Plan, ShardFeatures, ShardLoad, TableFile, kendall_tau};
use onefold_sharding_benchmark::TABLES_FILE;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::{Drawn, Machine, measure};
use crate::{Error, Result};

/// Plans for the same tables.
#[derive(Debug, Clone)]
pub struct PlanSet {
    /// The task's folder, or the file of the tables.
    pub name: String,
    /// The tables.
    pub tables: TableFile,
    /// Plans, by the names of their files.
    pub plans: Vec<(String, Plan)>,
}

impl PlanSet {
    /// The plans in `files` for the tables in `tables`.
    ///
    /// # Errors
    ///
    /// [`Error::Sharding`] for a file that is missing or wrong, and for a plan of other tables.
    pub fn load(name: String, tables: &Path, files: &[PathBuf]) -> Result<Self> {
        let of = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Sharding { path, source }
        };
        let table_file = TableFile::load(tables).map_err(of(tables))?;
        let mut plans = Vec::with_capacity(files.len());
        for file in files {
            let plan = Plan::load(file).map_err(of(file))?;
            plan.check(&table_file.tables, &plan.topology).map_err(of(file))?;
            let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            plans.push((name, plan));
        }
        Ok(Self { name, tables: table_file, plans })
    }

    /// The plans of the first `count` tasks in `tasks`, as `onefold-shard compare --plans` writes them: a folder of the
    /// task's name in `plans`, with a file per search.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load); [`Error::Config`] if a task has no plans.
    pub fn load_tasks(tasks: &Path, plans: &Path, count: usize) -> Result<Vec<Self>> {
        let hint = || {
            format!(
                "make tasks with `onefold-shard tasks`, and plans with `onefold-shard compare --tasks {} --plans DIR`",
                tasks.display()
            )
        };
        let wrong = |path: &Path, message: &str| Error::Config {
            path: path.to_owned(),
            message: message.to_owned(),
            hint: hint(),
        };
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

/// A rank's computation, predicted and measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MeasuredRank {
    /// The rank.
    pub rank: u32,
    /// What the plan predicts, in milliseconds per step.
    pub predicted_ms: f64,
    /// What was measured, in milliseconds per step. Of ranks that ran together: how long their threads had a processor,
    /// for the exchange too.
    pub measured_ms: f64,
    /// What the plan predicts for the exchange with other ranks.
    pub communication_ms: f64,
}

/// A plan whose ranks were measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeasuredPlan {
    /// The plans' common tables.
    pub task: String,
    /// The plan.
    pub plan: String,
    /// The cost model behind its predictions.
    pub cost_model: String,
    /// On ranks that ran together: the milliseconds of a whole step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<f64>,
    /// Its ranks.
    pub ranks: Vec<MeasuredRank>,
}

impl MeasuredPlan {
    /// The predicted computation of the rank for which that is highest.
    pub fn predicted_ms(&self) -> f64 {
        self.most(|rank| rank.predicted_ms)
    }

    /// The measured computation of the rank for which that is highest.
    pub fn measured_ms(&self) -> f64 {
        self.most(|rank| rank.measured_ms)
    }

    /// The predicted cost: computation and exchange of the most expensive rank.
    pub fn predicted_cost_ms(&self) -> f64 {
        self.most(|rank| rank.predicted_ms + rank.communication_ms)
    }

    /// The whole step, if it was measured; otherwise the cost with the computation as it was measured, and the exchange
    /// as it is predicted.
    pub fn measured_cost_ms(&self) -> f64 {
        self.step_ms.unwrap_or_else(|| self.most(|rank| rank.measured_ms + rank.communication_ms))
    }

    fn most(&self, of: impl Fn(&MeasuredRank) -> f64) -> f64 {
        self.ranks.iter().map(of).fold(0.0, f64::max)
    }
}

/// Measures every rank of every plan on `machine`, one after the other: the rank's shards are
/// filled, ids are drawn by the tables' pooling factors, dedupe factors and the Zipf law nearest to their accesses, and
/// steps are timed as by [`profile`](fn@super::profile). The exchange between ranks is not measured. Lists that pool by
/// attention are summed here.
///
/// Ranks with the same shards get the same ids, so plans are compared on the same work.
///
/// # Errors
///
/// [`Error::Config`] if a rank's tables are larger than the memory that is available; [`Error::Sharding`] if a
/// plan does not fit its tables.
pub fn measure_plans(
    sets: &[PlanSet],
    machine: &Machine,
    seed: u64,
    reporter: &dyn Reporter,
) -> Result<Vec<MeasuredPlan>> {
    if machine.device.is_none() {
        for set in sets {
            set.plans.iter().try_for_each(|(name, plan)| check_memory(&set.name, name, plan, 1))?;
        }
    }
    let ms = |drawn: &[Drawn]| Ok(measure(&mut ChaCha8Rng::seed_from_u64(seed), drawn, machine)?.ms);
    ranks_by(sets, ms, reporter)
}

/// The ranks of plans; `ms` is the time of a rank's shards, and an idle rank's is none.
fn ranks_by(
    sets: &[PlanSet],
    ms: impl Fn(&[Drawn]) -> Result<f64>,
    reporter: &dyn Reporter,
) -> Result<Vec<MeasuredPlan>> {
    let ranks = |set: &PlanSet| set.plans.iter().map(|(_, plan)| plan.ranks.len() as u64).sum::<u64>();
    reporter.begin("Measuring ranks", Some(sets.iter().map(ranks).sum()), "ranks");
    let mut measured = Vec::new();
    for set in sets {
        for (name, plan) in &set.plans {
            let wrong = |source| Error::Sharding { path: PathBuf::from(name), source };
            let loads = plan.loads(&set.tables.tables).map_err(wrong)?;
            let mut found = Vec::with_capacity(loads.len());
            for (prediction, shards) in plan.ranks.iter().zip(&loads) {
                let drawn: Vec<Drawn> = shards.iter().flat_map(|load| drawn(load, plan)).collect();
                found.push(MeasuredRank {
                    rank: prediction.rank,
                    predicted_ms: prediction.compute_ms,
                    measured_ms: if drawn.is_empty() { 0.0 } else { ms(&drawn)? },
                    communication_ms: prediction.communication_ms,
                });
                reporter.advance(1);
            }
            let (task, plan_name) = (set.name.clone(), name.clone());
            measured.push(MeasuredPlan {
                task,
                plan: plan_name,
                cost_model: plan.cost_model.clone(),
                step_ms: None,
                ranks: found,
            });
        }
    }
    reporter.end();
    Ok(measured)
}

/// A shard's work, and the law by which its ids are drawn: the whole table's. Features that share the table are
/// measured as the model prices them, each with a table of its own.
pub(super) fn drawn<'a>(load: &'a ShardLoad<'a>, plan: &'a Plan) -> impl Iterator<Item = Drawn> + 'a {
    let features = ShardFeatures::of(load, &plan.topology, plan.batch_size);
    features.zip(load.table.lookups()).map(|(features, lookups)| {
        let accesses = lookups.pooling_factor * ACCESS_BATCH as f64 / lookups.dedupe_factor;
        Drawn { exponent: features.access_bins.nearest_zipf(load.table.rows, accesses), features }
    })
}

/// Refuses what would not end well: tables that are larger than the memory that is left, of a plan of which `together`
/// ranks are measured at a time on this machine.
pub(super) fn check_memory(task: &str, name: &str, plan: &Plan, together: usize) -> Result<()> {
    let Some(available) = available_bytes() else { return Ok(()) };
    // Lookups, their gradients and sorted places take about as much as the plan's buffers, twice.
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
    Err(Error::Config {
        path: PathBuf::from(name),
        message: format!(
            "to measure {who} of this plan for `{task}` takes {}, and {} are available",
            onefold_datasets::units::format_bytes(needed),
            onefold_datasets::units::format_bytes(available)
        ),
        hint: "measure plans of smaller tables, as `onefold-shard tasks --memory 512MiB` draws them"
            .to_owned(),
    })
}

/// What the kernel says is available, where it says so.
fn available_bytes() -> Option<u64> {
    let known = fs_err::read_to_string("/proc/meminfo").ok()?;
    let line = known.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// One search's plans, over the tasks that every search has a plan for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SearchFigures {
    /// The name of the plans.
    pub plan: String,
    /// Mean predicted computation of the busiest rank.
    pub predicted_compute_ms: f64,
    /// The same as measured.
    pub measured_compute_ms: f64,
    /// Mean predicted cost: computation and exchange.
    pub predicted_cost_ms: f64,
    /// The same with measured computation.
    pub measured_cost_ms: f64,
    /// Tasks for which no other plan's measured cost was lower.
    pub cheapest: usize,
}

/// How predictions agree with measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agreement {
    /// Tasks that all searches have a plan for.
    pub tasks: usize,
    /// Ranks that were measured, of all tasks.
    pub ranks: usize,
    /// Kendall's tau of predicted and measured computation, over ranks.
    pub rank_tau: f64,
    /// Mean of |predicted - measured| ÷ measured computation, over ranks with any.
    pub relative_error: f64,
    /// Kendall's tau of predicted and measured cost of a task's plans, the mean over tasks.
    pub plan_tau: f64,
    /// Tasks whose plan with the lowest predicted cost has the lowest measured one too, of equal ones any.
    pub best_stays_best: usize,
    /// How much more than the cheapest plan, as measured, the one that is predicted to be the cheapest costs: the
    /// mean over tasks, 0.01 is one per cent.
    pub mean_regret: f64,
    /// By search, in the order of their measured costs.
    pub searches: Vec<SearchFigures>,
}

/// Compares what was predicted with what was measured.
pub fn agreement(measured: &[MeasuredPlan]) -> Agreement {
    let ranks: Vec<&MeasuredRank> = measured.iter().flat_map(|plan| &plan.ranks).collect();
    let column = |of: fn(&MeasuredRank) -> f64| ranks.iter().map(|rank| of(rank)).collect::<Vec<f64>>();
    let errors: Vec<f64> = ranks
        .iter()
        .filter(|rank| rank.measured_ms > 0.0)
        .map(|rank| (rank.predicted_ms - rank.measured_ms).abs() / rank.measured_ms)
        .collect();
    let tasks = common_tasks(measured);
    let by_task: Vec<Vec<&MeasuredPlan>> =
        tasks.iter().map(|task| measured.iter().filter(|plan| plan.task == **task).collect()).collect();
    let mut searches = figures(&by_task);
    searches.sort_by(|a, b| a.measured_cost_ms.total_cmp(&b.measured_cost_ms));
    let per_task: Vec<(f64, f64)> = by_task.iter().map(|plans| tau_and_regret(plans)).collect();
    Agreement {
        tasks: tasks.len(),
        ranks: ranks.len(),
        rank_tau: kendall_tau(&column(|rank| rank.predicted_ms), &column(|rank| rank.measured_ms)),
        relative_error: mean(&errors),
        plan_tau: mean(&per_task.iter().map(|(tau, _)| *tau).collect::<Vec<_>>()),
        best_stays_best: per_task.iter().filter(|(_, regret)| *regret <= 0.0).count(),
        mean_regret: mean(&per_task.iter().map(|(_, regret)| *regret).collect::<Vec<_>>()),
        searches,
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The tasks that have as many plans as any.
fn common_tasks(measured: &[MeasuredPlan]) -> Vec<&str> {
    let mut tasks: Vec<(&str, usize)> = Vec::new();
    for plan in measured {
        match tasks.iter_mut().find(|(task, _)| *task == plan.task) {
            Some((_, count)) => *count += 1,
            None => tasks.push((&plan.task, 1)),
        }
    }
    let most = tasks.iter().map(|(_, count)| *count).max().unwrap_or(0);
    tasks.into_iter().filter(|(_, count)| *count == most).map(|(task, _)| task).collect()
}

fn figures(by_task: &[Vec<&MeasuredPlan>]) -> Vec<SearchFigures> {
    let names = by_task.first().map_or(&[][..], Vec::as_slice).iter().map(|plan| &plan.plan);
    let of_name = |name: &String| {
        let own: Vec<&MeasuredPlan> =
            by_task.iter().flatten().copied().filter(|plan| plan.plan == *name).collect();
        let over = |of: fn(&MeasuredPlan) -> f64| mean(&own.iter().map(|plan| of(plan)).collect::<Vec<_>>());
        let is_cheapest = |plans: &&Vec<&MeasuredPlan>| {
            let least = plans.iter().map(|plan| plan.measured_cost_ms()).fold(f64::INFINITY, f64::min);
            plans.iter().any(|plan| plan.plan == *name && plan.measured_cost_ms() <= least)
        };
        SearchFigures {
            plan: name.clone(),
            predicted_compute_ms: over(MeasuredPlan::predicted_ms),
            measured_compute_ms: over(MeasuredPlan::measured_ms),
            predicted_cost_ms: over(MeasuredPlan::predicted_cost_ms),
            measured_cost_ms: over(MeasuredPlan::measured_cost_ms),
            cheapest: by_task.iter().filter(is_cheapest).count(),
        }
    };
    names.map(of_name).collect()
}

/// Kendall's tau of a task's plans, and what is lost by trusting the prediction.
fn tau_and_regret(plans: &[&MeasuredPlan]) -> (f64, f64) {
    let predicted: Vec<f64> = plans.iter().map(|plan| plan.predicted_cost_ms()).collect();
    let measured: Vec<f64> = plans.iter().map(|plan| plan.measured_cost_ms()).collect();
    let least = predicted.iter().copied().fold(f64::INFINITY, f64::min);
    let chosen = predicted.iter().zip(&measured).filter(|(predicted, _)| **predicted <= least);
    let chosen = chosen.map(|(_, measured)| *measured).fold(f64::INFINITY, f64::min);
    let cheapest = measured.iter().copied().fold(f64::INFINITY, f64::min);
    let regret = if cheapest > 0.0 { chosen / cheapest - 1.0 } else { 0.0 };
    (kendall_tau(&predicted, &measured), regret)
}

#[cfg(test)]
mod tests {
    use onefold_datasets::progress::Silent;
    use onefold_sharding::{AnalyticCost, Beam, Greedy, Search, Table, Topology};

    use super::*;

    fn plan_of(name: &str, task: &str, ranks: &[(f64, f64, f64)]) -> MeasuredPlan {
        let rank =
            |(i, (predicted_ms, measured_ms, communication_ms)): (u32, &(f64, f64, f64))| MeasuredRank {
                rank: i,
                predicted_ms: *predicted_ms,
                measured_ms: *measured_ms,
                communication_ms: *communication_ms,
            };
        MeasuredPlan {
            task: task.to_owned(),
            plan: name.to_owned(),
            cost_model: "m".to_owned(),
            step_ms: None,
            ranks: (0..).zip(ranks).map(rank).collect(),
        }
    }

    #[test]
    fn agreement_is_of_busiest_ranks_and_common_tasks() {
        let measured = [
            plan_of("a", "one", &[(1.0, 2.0, 0.5), (3.0, 4.0, 0.0)]),
            plan_of("b", "one", &[(4.0, 6.0, 1.0), (1.0, 1.0, 0.0)]),
            plan_of("a", "two", &[(2.0, 3.0, 0.0)]),
            plan_of("b", "two", &[(2.5, 2.0, 0.0)]),
            // Only one search has a plan for this.
            plan_of("a", "three", &[(9.0, 9.0, 0.0)]),
        ];
        let found = agreement(&measured);
        assert_eq!((found.tasks, found.ranks, found.best_stays_best), (2, 7, 1));
        assert_eq!(found.mean_regret, 0.25);
        assert_eq!(found.plan_tau, 0.0);
        let names: Vec<&str> = found.searches.iter().map(|search| search.plan.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let a = &found.searches[0];
        assert_eq!((a.predicted_compute_ms, a.measured_compute_ms, a.cheapest), (2.5, 3.5, 1));
        assert_eq!((found.searches[1].predicted_cost_ms, found.searches[1].measured_cost_ms), (3.75, 4.5));
        assert!(found.rank_tau > 0.6 && found.relative_error > 0.1, "{found:?}");
        assert_eq!(agreement(&[]).tasks, 0);
    }

    /// A rank's time is that of the shards that stand on it, and an idle rank takes none.
    #[test]
    fn ranks_are_measured_by_what_stands_on_them() {
        let tables: Vec<Table> = (0..4)
            .map(|i| Table { pooling_factor: 30.0, ..Table::new(format!("t{i}"), 2_000, 32) })
            .collect();
        let file = TableFile::new(256, tables.clone()).unwrap();
        let one = Topology::h100(1, 1 << 30).unwrap();
        let five = Topology::h100(5, 1 << 30).unwrap();
        let whole = Beam::Full.plan(&tables, &one, &AnalyticCost, 1280).unwrap();
        let spread = Greedy::BySize.plan(&tables, &five, &AnalyticCost, 256).unwrap();
        let set = PlanSet {
            name: "task".into(),
            tables: file,
            plans: vec![("whole".into(), whole), ("spread".into(), spread)],
        };
        let sets = [set];
        // Times would be other tests' too, which share the processor; lookups are as many wherever they are counted.
        let lookups = |drawn: &Drawn| drawn.features.lists * drawn.features.pooling_factor;
        let counted = ranks_by(&sets, |drawn| Ok(drawn.iter().map(lookups).sum()), &Silent).unwrap();
        let of = |plan: &MeasuredPlan| plan.ranks.iter().map(|rank| rank.measured_ms).collect::<Vec<_>>();
        let table = 1280.0 * 30.0;
        assert_eq!(of(&counted[0]), [4.0 * table]);
        assert_eq!(of(&counted[1]), [table, table, table, table, 0.0]);

        let found = measure_plans(&sets, &Machine { threads: 1, device: None }, 1, &Silent).unwrap();
        let names: Vec<_> = found.iter().map(|plan| (plan.task.as_str(), plan.plan.as_str())).collect();
        assert_eq!(names, [("task", "whole"), ("task", "spread")]);
        for (found, counted) in found.iter().zip(&counted) {
            let busy = |plan: &MeasuredPlan| of(plan).iter().map(|ms| *ms > 0.0).collect::<Vec<_>>();
            assert_eq!(busy(found), busy(counted), "{found:?}");
        }
    }
}
