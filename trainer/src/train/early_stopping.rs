//! Early stopping: ends training when held-out figures no longer improve.

use serde::{Deserialize, Serialize};

use crate::config::{EarlyStoppingConfig, WatchedMetric};
use crate::metrics::Figures;

/// State of early stopping.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EarlyStopping {
    /// Bits of the best figure: JSON would round it.
    best_bits: Option<u64>,
    /// Evaluations since it.
    without_improvement: u32,
}

impl EarlyStopping {
    /// Records an evaluation, and says whether training should end. A figure that cannot be computed is no
    /// improvement.
    pub(crate) fn should_stop(&mut self, config: &EarlyStoppingConfig, figures: &Figures) -> bool {
        let figure = match config.metric {
            WatchedMetric::Ne => figures.ne,
            WatchedMetric::Loss => figures.loss,
            WatchedMetric::Auc => figures.auc.map(|auc| -auc),
        };
        let better = figure.filter(|figure| {
            let best = self.best_bits.map(f64::from_bits);
            !figure.is_nan() && best.is_none_or(|best| *figure < best - config.min_delta)
        });
        match better {
            Some(figure) => {
                self.best_bits = Some(figure.to_bits());
                self.without_improvement = 0;
            }
            None => self.without_improvement = self.without_improvement.saturating_add(1),
        }
        self.without_improvement >= config.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(metric: WatchedMetric, min_delta: f64, figures: &[f64]) -> Option<usize> {
        let config = EarlyStoppingConfig { metric, task: None, patience: 2, min_delta };
        let mut stopping = EarlyStopping::default();
        figures.iter().position(|figure| {
            let (loss, ne, auc) = (Some(*figure), Some(*figure), Some(*figure));
            let figures = Figures { samples: 1, loss, ne, auc, ..Figures::default() };
            stopping.should_stop(&config, &figures)
        })
    }

    #[test]
    fn patience_counts_evaluations_in_a_row() {
        assert_eq!(stops(WatchedMetric::Ne, 0.0, &[0.9, 0.8, 0.85, 0.79, 0.81, 0.8]), Some(5));
        assert_eq!(stops(WatchedMetric::Ne, 0.0, &[0.9, 0.8, 0.7]), None);
        // Equal is not better, and neither is better by less than asked for.
        assert_eq!(stops(WatchedMetric::Loss, 0.0, &[0.9, 0.9, 0.9]), Some(2));
        assert_eq!(stops(WatchedMetric::Loss, 0.05, &[0.9, 0.87, 0.86]), Some(2));
        assert_eq!(stops(WatchedMetric::Auc, 0.0, &[0.7, 0.75, 0.74, 0.73]), Some(3));
        assert_eq!(stops(WatchedMetric::Auc, 0.0, &[f64::NAN; 3]), Some(1));
    }
}
