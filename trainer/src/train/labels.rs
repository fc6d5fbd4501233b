//! Reads labels before the first step.

use std::path::Path;

use onefold_datasets::PartitionFilter;
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Workers};

use crate::Result;
use crate::metrics::Task;
use crate::preprocess::Preprocessing;

/// The request for the labels that a new model is trained on.
#[derive(Debug)]
pub(super) struct LabelReading {
    request: ReadRequest,
    workers: Workers,
}

impl LabelReading {
    /// Creates a request for the labels of `partitions`, after the `sampling` steps of `preprocessing`.
    pub(super) fn new(
        training: &ReadRequest,
        partitions: PartitionFilter,
        preprocessing: Option<&Preprocessing>,
        workers: &Workers,
    ) -> Self {
        let request = of_labels(training, preprocessing.map(Preprocessing::of_labels));
        // One rank reads the labels, in an order that does not depend on the number of ranks.
        let request = ReadRequest { rank: Rank::default(), ..request }.with(|options| ReaderOptions {
            partitions,
            shuffle: None,
            streams: None,
            ..options
        });
        Self { request, workers: workers.clone() }
    }

    /// Returns for each task the logit that predicts the weighted mean of its labels; `None` if the weights are
    /// all zero, or a logit is not finite.
    ///
    /// # Errors
    ///
    /// [`Error::Read`](crate::Error::Read) for damaged data, and for a label that is invalid for the loss.
    pub(super) fn logits(&self, dataset: &Path, tasks: &[Task]) -> Result<Option<Vec<f32>>> {
        let (mut sums, mut weight, mut samples) = (vec![0.0; tasks.len()], 0.0, 0);
        for step in Reader::open(dataset, self.request.clone(), &self.workers)?.batches()? {
            let batch = step?.batch;
            samples += batch.size() as u64;
            for (sample, labels) in batch.labels().chunks_exact(batch.label_width().max(1)).enumerate() {
                let of_sample = batch.weights().map_or(1.0, |weights| f64::from(weights[sample]));
                weight += of_sample;
                for (sum, task) in sums.iter_mut().zip(tasks) {
                    *sum += of_sample * f64::from(labels[task.column]);
                }
            }
        }
        let logit = |(sum, task): (&f64, &Task)| task.loss.logit_of(sum / weight, samples);
        let logits: Vec<f32> = sums.iter().zip(tasks).map(logit).collect();
        Ok((weight > 0.0 && logits.iter().all(|logit| logit.is_finite())).then_some(logits))
    }
}

/// Reads the labels of the evaluation samples once, so that invalid labels and damaged files are reported before the
/// first step.
pub(super) fn check_labels(dataset: &Path, evaluation: &ReadRequest, workers: &Workers) -> Result<()> {
    let request = of_labels(evaluation, None);
    for step in Reader::open(dataset, request, workers)?.batches()? {
        step?;
    }
    Ok(())
}

/// Returns a request like `request`, but only for labels and weights, after the steps of `preprocess`.
fn of_labels(request: &ReadRequest, preprocess: Option<PreprocessConfig>) -> ReadRequest {
    let mut request = request.clone().with(|options| ReaderOptions {
        features: Some(Vec::new()),
        kept: Vec::new(),
        preprocess,
        dedupe: Dedupe::Off,
        ..options
    });
    request.checks.table_rows.clear();
    request
}
