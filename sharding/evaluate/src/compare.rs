//! `compare`: runs every search on the same tasks.

use std::fmt::Write;

use anyhow::Result;
use onefold_base::units::count_of;
use onefold_sharding::{Error, Plan, searches};
use onefold_sharding_benchmark::{MethodFigures, Task, compare};
use onefold_sharding_cli::cost_model;
use onefold_terminal::Printer;
use serde_json::{Value, json};

use crate::cli::CompareArguments;
use crate::tasks::new_directory;

pub(crate) fn compare_command(arguments: &CompareArguments, printer: &Printer) -> Result<()> {
    let tasks = Task::load_all(&arguments.tasks)?;
    let model = |task: &Task| cost_model(&arguments.model, &task.topology);
    let searches = searches(arguments.seed);
    let plans = arguments.plans.as_deref().map(new_directory).transpose()?;
    let mut keep = |task: &Task, plan: &Plan| match &plans {
        None => Ok(()),
        Some(plans) => {
            let folder = plans.path().join(&task.name);
            fs_err::create_dir_all(&folder)?;
            plan.store(&folder.join(format!("{}.json", plan.search)))
        }
    };
    let methods = compare(&tasks, &searches, &model, &mut keep, printer)?;
    let mut json = json!({
        "tasks": tasks.len(),
        "methods": methods.iter().map(|method| figures(method, tasks.len())).collect::<Vec<_>>(),
    });
    let mut text = table(&methods, tasks.len());
    if let (Some(plans), Some(out)) = (plans, &arguments.plans) {
        plans.commit().map_err(Error::from)?;
        let _ = write!(text, "\n\nPlans written to `{}`", out.display());
        json["plans"] = json!(out);
    }
    Ok(printer.summary(&text, &json)?)
}

fn figures(method: &MethodFigures, tasks: usize) -> Value {
    json!({
        "search": method.search,
        "valid": method.valid(),
        "mean_max_cost_ms": method.mean_ms(),
        "max_cost_ms": method.costs_ms,
        "plan_seconds": method.plan_seconds / tasks.max(1) as f64,
        "max_plan_seconds": method.max_plan_seconds,
    })
}

/// Returns a text with one line per search. If a search has no plan for some tasks, its mean covers fewer tasks, so
/// each line also compares it with the last search over the tasks for which both have plans.
fn table(methods: &[MethodFigures], tasks: usize) -> String {
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
