//! Compares the same training steps on the CPU and on a device.

use std::path::Path;

use onefold_base::progress::Reporter;
use onefold_ikjt::Dedupe;
use onefold_ikjt::load_snapshot;
use onefold_raw_logs::generate::Workload;
use serde::Serialize;

use super::{BenchOptions, deduplicated, embeddings, name, read, reference_model};
use crate::device::Accelerator;
use crate::embedding::Status;
use crate::model::Model;
use crate::optimizer::DenseOptimizer;
use crate::{Precision, Result};

/// The factor on the learning rates.
const GENTLE: f64 = 0.1;

/// The options of a comparison.
#[derive(Debug, Clone)]
pub struct CompareOptions {
    /// The workload whose reference model is trained.
    pub workload: Workload,
    /// The number of threads of libtorch and of the tables.
    pub threads: usize,
    /// The number of steps, each with a different batch.
    pub steps: usize,
    /// The device.
    pub device: Accelerator,
}

/// The losses of the same steps on the CPU and on a device.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// The deduplication on both: `off`, `exact` or `window`.
    pub dedupe: &'static str,
    /// The maximum relative difference of losses: |CPU - device| / |CPU|.
    pub relative_error: f64,
    /// The losses on the CPU.
    pub cpu: Vec<f64>,
    /// The losses on the device.
    pub device: Vec<f64>,
}

/// Trains the workload's reference model with low learning rates on the first batches of `dataset`, on the CPU
/// and on the device, with every kind of deduplication.
///
/// # Errors
///
/// The errors of [`bench`](super::bench()); [`Error::Fault`](crate::Error::Fault) if the device fails.
pub fn compare(dataset: &Path, options: &CompareOptions, reporter: &dyn Reporter) -> Result<Vec<Comparison>> {
    let snapshot = load_snapshot(dataset, None)?;
    let mut config = reference_model(options.workload, &snapshot.schema, dataset)?;
    // At the full rates the first steps overshoot, and rounding errors grow to 0.1 % within ten steps, even on
    // one device.
    config.optimizer.dense.learning_rate *= GENTLE;
    config.optimizer.tables.learning_rate *= GENTLE as f32;
    let tables = config.tables(&snapshot, None, &[])?;
    let batches = read(
        dataset,
        &config,
        &BenchOptions {
            workload: options.workload,
            dedupe: Vec::new(),
            threads: options.threads,
            precision: Precision::Fp32,
            device: None,
            batches: options.steps,
            rounds: 0,
        },
    )?;
    tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
    let forms = [Dedupe::Off, Dedupe::Exact, Dedupe::Window];
    reporter.begin("comparing", Some((2 * forms.len() * options.steps) as u64), "steps");
    let losses = |dedupe: Dedupe, device: Option<&Accelerator>| -> Result<Vec<f64>> {
        let embeddings = embeddings(&config, &tables, options.threads, device)?;
        let mut model = Model::new(&config, &snapshot.schema, embeddings)?;
        let mut optimizer = DenseOptimizer::of(&model, &config.optimizer.dense, options.threads)?;
        let mut losses = Vec::with_capacity(batches.len());
        for batch in &batches {
            let batch = deduplicated(batch, &snapshot.schema, dedupe)?;
            let input = model.request(Some(&batch), Status::default())?;
            let (mut forward, loss) = model.learn(&batch, input, Model::weight(&batch))?;
            model.backward(&batch, &mut forward, &loss, || Ok(()))?;
            let norm = optimizer.gradient_norm()?;
            optimizer.step(config.optimizer.dense.learning_rate, &norm)?;
            model.update(forward, &config.optimizer.tables)?;
            losses.push(loss.double_value(&[]));
            reporter.advance(1);
        }
        Ok(losses)
    };
    let compared = forms.iter().map(|&dedupe| {
        let (cpu, device) = (losses(dedupe, None)?, losses(dedupe, Some(&options.device))?);
        let errors = cpu.iter().zip(&device).map(|(cpu, device)| (cpu - device).abs() / cpu.abs());
        // A NaN loss counts as an infinite difference.
        let errors = errors.map(|error| if error.is_nan() { f64::INFINITY } else { error });
        Ok(Comparison { dedupe: name(dedupe), relative_error: errors.fold(0.0, f64::max), cpu, device })
    });
    let compared = compared.collect();
    reporter.end();
    compared
}
