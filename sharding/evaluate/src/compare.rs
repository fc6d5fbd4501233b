//! `compare`: runs every search on the same tasks.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Result;
use onefold_base::progress::Reporter;
use onefold_base::units::count_of;
use onefold_sharding::{CostModel, Error, Search, searches};
use onefold_sharding_benchmark::Task;
use onefold_sharding_cli::cost_model;
use onefold_terminal::Printer;
use serde_json::{Value, json};

use crate::cli::CompareArguments;
use crate::tasks::new_directory;

pub(crate) fn compare_command(arguments: &CompareArguments, printer: &Printer) -> Result<()> {
    let tasks = Task::load_all(&arguments.tasks)?;
    let searches = searches(arguments.seed);
    let plans = arguments.plans.as_deref().map(new_directory).transpose()?;
    let mut methods: Vec<Method> = searches.iter().map(|search| Method::new(search.id())).collect();
    printer.begin("Planning", Some(tasks.len() as u64), "tasks");
    for task in &tasks {
        let model = cost_model(&arguments.model, &task.topology)?;
        let folder: Option<PathBuf> = plans.as_ref().map(|plans| plans.path().join(&task.name));
        for (search, method) in searches.iter().zip(&mut methods) {
            method.run(search.as_ref(), task, model.as_ref(), folder.as_deref())?;
        }
        printer.advance(1);
        printer.go_on().map_err(Error::from)?;
    }
    printer.end();
    let mut json = json!({
        "tasks": tasks.len(),
        "methods": methods.iter().map(|method| method.figures(tasks.len())).collect::<Vec<_>>(),
    });
    let mut text = table(&methods, tasks.len());
    if let (Some(plans), Some(out)) = (plans, &arguments.plans) {
        plans.commit().map_err(Error::from)?;
        let _ = write!(text, "\n\nPlans written to `{}`", out.display());
        json["plans"] = json!(out);
    }
    Ok(printer.summary(&text, &json)?)
}

/// The results of one search on all tasks.
struct Method {
    search: &'static str,
    /// The predicted cost of every task in milliseconds, in the order of the tasks; `None` if the search found no
    /// plan.
    costs_ms: Vec<Option<f64>>,
    /// The planning time of all tasks, in seconds.
    plan_seconds: f64,
    /// The longest planning time of a task, in seconds.
    max_plan_seconds: f64,
}

impl Method {
    fn new(search: &'static str) -> Self {
        Self { search, costs_ms: Vec::new(), plan_seconds: 0.0, max_plan_seconds: 0.0 }
    }

    /// Plans a task, checks the plan, and writes it to `folder` if one is given. It is not an error if the tables do
    /// not fit into memory.
    fn run(
        &mut self,
        search: &dyn Search,
        task: &Task,
        model: &dyn CostModel,
        folder: Option<&Path>,
    ) -> Result<(), Error> {
        let Task { tables, topology, .. } = task;
        let started = Instant::now();
        let plan = search.plan(&tables.tables, topology, model, tables.global_batch_size);
        let seconds = started.elapsed().as_secs_f64();
        self.plan_seconds += seconds;
        self.max_plan_seconds = self.max_plan_seconds.max(seconds);
        let plan = match plan {
            Err(Error::NoRoom(_)) => {
                self.costs_ms.push(None);
                return Ok(());
            }
            other => other?,
        };
        plan.check(&tables.tables, topology, tables.global_batch_size)?;
        if let Some(folder) = folder {
            fs_err::create_dir_all(folder)?;
            plan.store(&folder.join(format!("{}.json", plan.search)))?;
        }
        self.costs_ms.push(Some(plan.max_cost_ms));
        Ok(())
    }

    /// Returns the number of tasks with a plan.
    fn valid(&self) -> usize {
        self.costs_ms.iter().flatten().count()
    }

    /// Returns the mean predicted cost over the tasks with a plan, in milliseconds.
    fn mean_ms(&self) -> Option<f64> {
        mean(self.costs_ms.iter().flatten().copied())
    }

    /// Returns the mean predicted costs of this and of another search over the tasks for which both found a plan.
    fn common_means_ms(&self, other: &Self) -> Option<(f64, f64)> {
        let both = || self.costs_ms.iter().zip(&other.costs_ms).filter_map(|(a, b)| a.zip(*b));
        Some((mean(both().map(|(a, _)| a))?, mean(both().map(|(_, b)| b))?))
    }

    fn figures(&self, tasks: usize) -> Value {
        json!({
            "search": self.search,
            "valid": self.valid(),
            "mean_max_cost_ms": self.mean_ms(),
            "max_cost_ms": self.costs_ms,
            "plan_seconds": self.plan_seconds / tasks.max(1) as f64,
            "max_plan_seconds": self.max_plan_seconds,
        })
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Returns a text with one line per search. If a search has no plan for some tasks, its mean covers fewer tasks, so
/// each line also compares it with the last search over the tasks for which both have plans.
fn table(methods: &[Method], tasks: usize) -> String {
    let mut text = format!("{}\n\n", count_of(tasks as u64, "task"));
    let Some(ours) = methods.last() else { return text };
    let _ = writeln!(
        text,
        "{:<30} {:>6} {:>12} {:>16} {:>10} {:>10}",
        "search", "valid", "cost ms", "same tasks, ours", "seconds", "at most"
    );
    for method in methods {
        let mean = method.mean_ms().map_or("-".to_owned(), |ms| format!("{ms:.4}"));
        let common = method.common_means_ms(ours).map_or("-".to_owned(), |(theirs, ours)| {
            format!("{ours:.4} ({:+.1} %)", 100.0 * (ours / theirs - 1.0))
        });
        let _ = writeln!(
            text,
            "{:<30} {:>6} {mean:>12} {common:>18} {:>8.4} {:>10.4}",
            method.search,
            method.valid(),
            method.plan_seconds / tasks.max(1) as f64,
            method.max_plan_seconds
        );
    }
    text.push_str(
        "\nCost: the most expensive rank's predicted time per step, the mean over tasks with a valid plan",
    );
    text
}

#[cfg(test)]
mod tests {
    use onefold_sharding::AnalyticCost;
    use onefold_sharding_benchmark::{TaskOptions, tasks};

    use super::*;

    #[test]
    fn generated_tasks_all_get_a_plan_below_the_baselines() {
        let options = TaskOptions { max_dim: 128, ..TaskOptions::new(10..=40, 4, 3, 5) };
        let tasks = tasks(&options).unwrap();
        let run = |search: &dyn Search| {
            let mut method = Method::new(search.id());
            tasks.iter().for_each(|task| method.run(search, task, &AnalyticCost, None).unwrap());
            method
        };
        let found: Vec<Method> = searches(1).iter().map(|search| run(search.as_ref())).collect();
        let ours = found.last().unwrap();
        assert_eq!((ours.search, ours.valid()), ("beam", 3));
        for method in &found[..7] {
            let (theirs, ours) = method.common_means_ms(ours).unwrap_or((f64::INFINITY, 0.0));
            assert!(ours < theirs, "{} {ours} {theirs}", method.search);
        }
    }
}
