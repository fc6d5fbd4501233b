//! Runs all searches on the same tasks.

use std::time::Instant;

use onefold_base::progress::Reporter;
use onefold_sharding::{CostModel, Error, Plan, Result, Search};

use crate::Task;

/// The results of one search on all tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct MethodFigures {
    /// The name of the search.
    pub search: String,
    /// The predicted cost of every task in milliseconds, in the order of the tasks; `None` if the search found no
    /// plan.
    pub costs_ms: Vec<Option<f64>>,
    /// The planning time of all tasks, in seconds.
    pub plan_seconds: f64,
    /// The longest planning time of a task, in seconds.
    pub max_plan_seconds: f64,
}

impl MethodFigures {
    /// Returns the number of tasks with a plan.
    pub fn valid(&self) -> usize {
        self.costs_ms.iter().flatten().count()
    }

    /// Returns the mean predicted cost over the tasks with a plan, in milliseconds.
    pub fn mean_ms(&self) -> Option<f64> {
        mean(self.costs_ms.iter().flatten().copied())
    }

    /// Returns the mean predicted costs of this and of another search over the tasks for which both found a plan.
    pub fn common_means_ms(&self, other: &Self) -> Option<(f64, f64)> {
        let both = || self.costs_ms.iter().zip(&other.costs_ms).filter_map(|(a, b)| a.zip(*b));
        Some((mean(both().map(|(a, _)| a))?, mean(both().map(|(_, b)| b))?))
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Runs `searches` on `tasks`, checks every plan, and passes it to `keep`. `model` returns the cost model for the
/// topology of a task. Returns the results of each search, in the given order.
///
/// # Errors
///
/// Errors of the cost model and of `keep`, and [`Error::Invalid`] if a search made an invalid plan, which would be a
/// bug in the search. It is not an error if a task has no plan because the tables do not fit into memory.
pub fn compare(
    tasks: &[Task],
    searches: &[Box<dyn Search>],
    model: &dyn Fn(&Task) -> Result<Box<dyn CostModel>>,
    keep: &mut dyn FnMut(&Task, &Plan) -> Result<()>,
    reporter: &dyn Reporter,
) -> Result<Vec<MethodFigures>> {
    let figures = |search: &dyn Search| MethodFigures {
        search: search.id().to_owned(),
        costs_ms: Vec::with_capacity(tasks.len()),
        plan_seconds: 0.0,
        max_plan_seconds: 0.0,
    };
    let mut methods: Vec<MethodFigures> = searches.iter().map(|search| figures(search.as_ref())).collect();
    reporter.begin("Planning", Some(tasks.len() as u64), "tasks");
    for task in tasks {
        let model = model(task)?;
        for (search, figures) in searches.iter().zip(&mut methods) {
            let started = Instant::now();
            let plan = search.plan(
                &task.tables.tables,
                &task.topology,
                model.as_ref(),
                task.tables.global_batch_size,
            );
            let seconds = started.elapsed().as_secs_f64();
            figures.plan_seconds += seconds;
            figures.max_plan_seconds = figures.max_plan_seconds.max(seconds);
            figures.costs_ms.push(match plan {
                Ok(plan) => {
                    plan.check(&task.tables.tables, &task.topology, task.tables.global_batch_size)?;
                    keep(task, &plan)?;
                    Some(plan.max_cost_ms)
                }
                Err(Error::NoRoom(_)) => None,
                Err(error) => return Err(error),
            });
        }
        reporter.advance(1);
        reporter.go_on()?;
    }
    reporter.end();
    Ok(methods)
}

#[cfg(test)]
mod tests {
    use onefold_sharding::{AnalyticCost, Beam, LearnedCosts, ModelFile, searches};

    use super::*;
    use crate::{TaskOptions, tasks};

    #[test]
    fn generated_tasks_all_get_a_plan_below_the_baselines() {
        let options = TaskOptions { max_dim: 128, ..TaskOptions::new(10..=40, 4, 3, 5) };
        let tasks = tasks(&options).unwrap();
        let found = compare(
            &tasks,
            &searches(1),
            &|_| Ok(Box::new(AnalyticCost)),
            &mut |_, _| Ok(()),
            &onefold_base::progress::Silent,
        )
        .unwrap();
        let ours = found.last().unwrap();
        assert_eq!((ours.search.as_str(), ours.valid()), ("beam", 3));
        for method in &found[..7] {
            let (theirs, ours) = method.common_means_ms(ours).unwrap_or((f64::INFINITY, 0.0));
            assert!(ours < theirs, "{} {ours} {theirs}", method.search);
        }
    }

    #[test]
    fn plans_do_not_depend_on_threads() {
        let options = TaskOptions { max_dim: 64, ..TaskOptions::new(40..=40, 8, 1, 11) };
        let task = tasks(&options).unwrap().remove(0);
        let learned =
            LearnedCosts::new(vec![ModelFile::shipped("cpu").unwrap()], &task.topology, true).unwrap();
        for model in [&AnalyticCost as &dyn CostModel, &learned] {
            let planned = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let Task { tables, topology, .. } = &task;
                pool.install(|| Beam::Full.plan(&tables.tables, topology, model, tables.global_batch_size))
                    .unwrap()
            };
            assert_eq!(planned(1), planned(5), "{}", model.id());
        }
    }
}
