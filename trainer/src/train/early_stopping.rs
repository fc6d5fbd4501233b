//! Early stopping: ends training when held-out metrics no longer improve.

use serde::{Deserialize, Serialize};

use crate::config::{EarlyStoppingConfig, WatchedMetric};
use crate::metrics::Figures;

/// The state of early stopping.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EarlyStopping {
    /// The bits of the best value; JSON would round the value.
    best_bits: Option<u64>,
    /// The step of the best value.
    #[serde(default)]
    pub(super) best_step: Option<u64>,
    /// The number of evaluations since the best value.
    without_improvement: u32,
}

/// The result of an evaluation for early stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The value is the best so far.
    Best,
    /// The value is not better than the best one.
    NotBetter,
    /// The metric is not defined.
    Undefined,
}

impl EarlyStopping {
    /// Records the evaluation after `step`. An evaluation whose metric is not defined does not count.
    pub(super) fn see(&mut self, config: &EarlyStoppingConfig, figures: &Figures, step: u64) -> Seen {
        let figure = match config.metric {
            WatchedMetric::Ne => figures.ne,
            WatchedMetric::Loss => figures.loss,
            WatchedMetric::Auc => figures.auc.map(|auc| -auc),
        };
        let Some(figure) = figure.filter(|figure| !figure.is_nan()) else { return Seen::Undefined };
        let best = self.best_bits.map(f64::from_bits);
        if best.is_none_or(|best| figure < best - config.min_delta) {
            *self = Self { best_bits: Some(figure.to_bits()), best_step: Some(step), without_improvement: 0 };
            return Seen::Best;
        }
        self.without_improvement = self.without_improvement.saturating_add(1);
        Seen::NotBetter
    }

    /// Returns whether training should end.
    pub(super) fn should_stop(&self, config: &EarlyStoppingConfig) -> bool {
        self.without_improvement >= config.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(metric: WatchedMetric, min_delta: f64, figures: &[f64]) -> Option<usize> {
        let config = EarlyStoppingConfig { metric, task: None, patience: 2, min_delta };
        let mut stopping = EarlyStopping::default();
        (0..).zip(figures).position(|(step, figure)| {
            let (loss, ne, auc) = (Some(*figure), Some(*figure), Some(*figure));
            let figures = Figures { samples: 1, loss, ne, auc, ..Figures::default() };
            stopping.see(&config, &figures, step);
            stopping.should_stop(&config)
        })
    }

    #[test]
    fn patience_counts_evaluations_in_a_row() {
        assert_eq!(stops(WatchedMetric::Ne, 0.0, &[0.9, 0.8, 0.85, 0.79, 0.81, 0.8]), Some(5));
        assert_eq!(stops(WatchedMetric::Ne, 0.0, &[0.9, 0.8, 0.7]), None);
        // Equal values, and improvements of at most `min_delta`, do not count as better.
        assert_eq!(stops(WatchedMetric::Loss, 0.0, &[0.9, 0.9, 0.9]), Some(2));
        assert_eq!(stops(WatchedMetric::Loss, 0.05, &[0.9, 0.87, 0.86]), Some(2));
        assert_eq!(stops(WatchedMetric::Auc, 0.0, &[0.7, 0.75, 0.74, 0.73]), Some(3));
    }

    #[test]
    fn a_figure_that_does_not_exist_is_not_counted() {
        assert_eq!(stops(WatchedMetric::Auc, 0.0, &[f64::NAN; 9]), None);
        assert_eq!(stops(WatchedMetric::Auc, 0.0, &[0.7, f64::NAN, 0.6, f64::NAN, 0.5]), Some(4));
        let config =
            EarlyStoppingConfig { metric: WatchedMetric::Auc, task: None, patience: 1, min_delta: 0.0 };
        let mut stopping = EarlyStopping::default();
        assert_eq!(stopping.see(&config, &Figures::default(), 5), Seen::Undefined);
        assert!(!stopping.should_stop(&config) && stopping.best_step.is_none());
        let figures = Figures { auc: Some(0.5), ..Figures::default() };
        assert_eq!(stopping.see(&config, &figures, 10), Seen::Best);
        assert_eq!(stopping.see(&config, &figures, 15), Seen::NotBetter);
        assert_eq!((stopping.should_stop(&config), stopping.best_step), (true, Some(10)));
    }
}
