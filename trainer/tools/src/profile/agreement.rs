//! Compares the predicted costs of plans with the measured ones.

use onefold_sharding::kendall_tau;
use serde::Serialize;

use super::plans::{MeasuredPlan, MeasuredRank};

/// The results of one search's plans, over the tasks for which every search has a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct SearchFigures {
    /// The name of the plans.
    pub(crate) plan: String,
    /// The mean predicted computation time of the busiest rank.
    pub(crate) predicted_compute_ms: f64,
    /// The mean measured computation time of the busiest rank.
    pub(crate) measured_compute_ms: f64,
    /// The mean predicted cost: computation and exchange.
    pub(crate) predicted_cost_ms: f64,
    /// The mean cost with measured computation.
    pub(crate) measured_cost_ms: f64,
    /// The number of tasks for which no other plan had a lower measured cost.
    pub(crate) cheapest: usize,
}

/// The agreement between predictions and measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Agreement {
    /// The number of tasks for which all searches have a plan.
    pub(crate) tasks: usize,
    /// The number of measured ranks over all tasks.
    pub(crate) ranks: usize,
    /// Kendall's tau of predicted and measured computation, over ranks.
    pub(crate) rank_tau: f64,
    /// The mean of |predicted - measured| / measured computation, over ranks with any computation.
    pub(crate) relative_error: f64,
    /// Kendall's tau of predicted and measured cost, over all plans.
    pub(crate) cost_tau: f64,
    /// Kendall's tau of predicted and measured cost over the plans of a task, averaged over tasks.
    pub(crate) plan_tau: f64,
    /// The number of tasks for which a plan with the lowest predicted cost also has the lowest measured cost.
    pub(crate) best_stays_best: usize,
    /// The relative excess of the measured cost of the predicted best plan over the cheapest plan, averaged
    /// over tasks; 0.01 is one per cent.
    pub(crate) mean_regret: f64,
    /// The results by search, in the order of measured costs.
    pub(crate) searches: Vec<SearchFigures>,
}

/// Compares predictions with measurements.
pub(crate) fn agreement(measured: &[MeasuredPlan]) -> Agreement {
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
        cost_tau: kendall_tau(
            &measured.iter().map(MeasuredPlan::predicted_cost_ms).collect::<Vec<_>>(),
            &measured.iter().map(MeasuredPlan::measured_cost_ms).collect::<Vec<_>>(),
        ),
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

/// Returns the tasks with the maximum number of plans.
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

/// Returns Kendall's tau of a task's plans, and the relative loss from choosing the plan by prediction.
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
    use super::*;

    fn plan_of(name: &str, task: &str, ranks: &[(f64, f64, f64)]) -> MeasuredPlan {
        let rank =
            |(i, (predicted_ms, measured_ms, communication_ms)): (u32, &(f64, f64, f64))| MeasuredRank {
                rank: i,
                predicted_ms: *predicted_ms,
                measured_ms: *measured_ms,
                parts_ms: Vec::new(),
                communication_ms: *communication_ms,
                exchanges_ms: Vec::new(),
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
    fn agreement_compares_the_busiest_ranks_on_common_tasks() {
        let measured = [
            plan_of("a", "one", &[(1.0, 2.0, 0.5), (3.0, 4.0, 0.0)]),
            plan_of("b", "one", &[(4.0, 6.0, 1.0), (1.0, 1.0, 0.0)]),
            plan_of("a", "two", &[(2.0, 3.0, 0.0)]),
            plan_of("b", "two", &[(2.5, 2.0, 0.0)]),
            // Only one search has a plan for this task.
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
        // Ordered by measured cost 9, 7, 4, 3, 2; the predicted costs are 9, 5, 3, 2, 2.5.
        assert!((found.cost_tau - 0.8).abs() < 1e-9, "{found:?}");
        assert!(found.rank_tau > 0.6 && found.relative_error > 0.1, "{found:?}");
        assert_eq!(agreement(&[]).tasks, 0);
    }
}
