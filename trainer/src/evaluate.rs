//! Evaluation of a trained model.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use onefold_datasets::console::Reporter;
use onefold_datasets::{Manifest, PartitionFilter};
use onefold_ikjt::{Dedupe, Reader, ReaderOptions};
use onefold_sharding::{IdPolicy, TableConfig};
use serde::Serialize;

use crate::checkpoint::Run;
use crate::metrics::BinaryMetrics;
use crate::model::Model;
use crate::{Result, tensors};

/// Figures of a model on samples that it was not trained on.
#[derive(Debug, Clone, Serialize)]
pub struct EvaluationSummary {
    /// Samples evaluated.
    pub samples: u64,
    /// Mean binary cross-entropy, in nats.
    pub loss: Option<f64>,
    /// Normalized entropy.
    pub ne: Option<f64>,
    /// AUC.
    pub auc: Option<f64>,
    /// The mean label.
    pub base_rate: Option<f64>,
    /// Sum of the predictions ÷ sum of the labels.
    pub calibration: Option<f64>,
    /// Time of the evaluation.
    pub wall_seconds: f64,
    /// `samples / wall_seconds`.
    pub samples_per_second: f64,
}

/// Evaluates the run in `run` on the partitions `filter` of `dataset`; on those that the run's configuration names for
/// evaluation if `filter` is `None`, and on all if it names none.
///
/// # Errors
///
/// [`Error::Run`](crate::Error::Run) if the run is missing, damaged, or was trained on another schema;
/// [`Error::Read`](crate::Error::Read) for damaged data.
pub fn evaluate(
    run: &Path,
    dataset: &Path,
    filter: Option<&PartitionFilter>,
    dedupe: Dedupe,
    threads: usize,
    reporter: &dyn Reporter,
) -> Result<EvaluationSummary> {
    let description = Run::load(run)?;
    let partitions = match filter {
        Some(filter) => filter.clone(),
        None => description.config.eval_partitions()?.unwrap_or_default(),
    };
    let manifest = Manifest::load(dataset).map_err(onefold_ikjt::Error::from)?;
    description.check_schema(&manifest.schema, run)?;
    let options = ReaderOptions {
        dedupe,
        threads: threads.div_ceil(2),
        partitions,
        table_rows: checked_rows(&description.tables),
        ..ReaderOptions::new(description.config.train.batch_size)
    };
    let reader = open_for_evaluation(dataset, &manifest, options)?;
    tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
    let model = description.load_model(run, threads)?;
    evaluate_model(&model, &reader, reporter)
}

/// Opens what is evaluated, which may be fewer samples than a batch of training has.
pub(crate) fn open_for_evaluation(
    dataset: &Path,
    manifest: &Manifest,
    options: ReaderOptions,
) -> Result<Reader> {
    let samples = manifest.chosen_samples(&options.partitions).map_err(onefold_ikjt::Error::from)?;
    let batch_size = options.batch_size.min(usize::try_from(samples.max(1)).unwrap_or(usize::MAX));
    Ok(Reader::open(dataset, ReaderOptions { batch_size, ..options })?)
}

/// The rows of the tables whose ids are checked, by feature: the reader says where in the dataset an id is too large.
pub(crate) fn checked_rows(tables: &[TableConfig]) -> BTreeMap<String, u64> {
    let checked = tables.iter().filter(|table| table.ids == IdPolicy::Checked);
    checked.map(|table| (table.feature.clone(), table.rows)).collect()
}

/// Evaluates a model on everything that `reader` reads.
pub(crate) fn evaluate_model(
    model: &Model,
    reader: &Reader,
    reporter: &dyn Reporter,
) -> Result<EvaluationSummary> {
    reporter.begin("evaluating", Some(reader.samples()), "samples");
    let started = Instant::now();
    let mut metrics = BinaryMetrics::new();
    let mut predicted = 0.0;
    for batch in reader.batches()? {
        let batch = batch?;
        let logits = tch::no_grad(|| model.forward(&batch))?.logits;
        model.add_predictions(&mut metrics, &batch, &logits);
        let predictions = logits.sigmoid().contiguous();
        for (i, prediction) in tensors::as_slice(&predictions).iter().enumerate() {
            predicted +=
                f64::from(*prediction) * batch.weights().map_or(1.0, |weights| f64::from(weights[i]));
        }
        reporter.advance(batch.size() as u64);
    }
    reporter.end();
    let wall_seconds = started.elapsed().as_secs_f64();
    let positive = metrics.positive();
    Ok(EvaluationSummary {
        samples: metrics.samples(),
        loss: metrics.log_loss(),
        ne: metrics.ne(),
        auc: metrics.auc(),
        base_rate: metrics.base_rate(),
        calibration: (positive > 0.0).then(|| predicted / positive),
        wall_seconds,
        samples_per_second: metrics.samples() as f64 / wall_seconds,
    })
}
