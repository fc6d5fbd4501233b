//! Labels as they were known at an earlier time.

use onefold_datasets::{NO_DELAY, Schema, delay_label};

use crate::error::{Error, Result};

/// Replaces labels that were not final at some time by the values that they had then.
#[derive(Debug, Clone)]
pub(super) struct KnownLabels {
    /// The time, in microseconds since 1970.
    at: i64,
    /// The number of labels of the schema.
    width: usize,
    /// The indices of labels with a delay, and of their delays.
    delays: Vec<(usize, usize)>,
}

impl KnownLabels {
    /// Creates the replacement of the labels of `schema` that have a [delay](delay_label).
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if no label has one.
    pub(super) fn new(schema: &Schema, at: i64) -> Result<Self> {
        let place = |name: &str| schema.labels.iter().position(|label| label == name);
        let labels = schema.labels.iter().enumerate();
        let delays: Vec<_> =
            labels.filter_map(|(label, name)| Some((label, place(&delay_label(name))?))).collect();
        if delays.is_empty() {
            return Err(Error::options(
                "the labels of an earlier time cannot be read, because the dataset has no delays of labels",
                "build it anew, with `delay = true` under `[join.labels]`, and the delay as a label, such as \
                 `clicked_delay`",
            ));
        }
        Ok(Self { at, width: schema.labels.len(), delays })
    }

    /// Replaces the labels, `[samples, labels]`, and the delays, of samples with these times in microseconds since 1970.
    pub(super) fn apply(&self, labels: &mut [f32], times: &[i64]) {
        for (labels, time) in labels.chunks_exact_mut(self.width).zip(times) {
            for &(label, delay) in &self.delays {
                // Delays are whole seconds. Negative ones belong to labels that are 0.
                let seconds = labels[delay];
                if seconds >= 0.0 && time.saturating_add((f64::from(seconds) * 1e6) as i64) > self.at {
                    (labels[label], labels[delay]) = (0.0, NO_DELAY);
                }
            }
        }
    }
}
