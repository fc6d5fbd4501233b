//! Compares the same training steps on the CPU and on a device.

use std::path::Path;

use onefold_base::progress::Reporter;
use onefold_ikjt::{Dedupe, load_snapshot};
use onefold_raw_logs::generate::Workload;
use onefold_trainer::Result;
use onefold_trainer::device::Accelerator;
use serde::Serialize;

use super::{Trainee, read, reference_model};

/// The factor on the learning rates.
const GENTLE: f64 = 0.1;

/// The losses of the same steps on the CPU and on a device.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    /// The deduplication on both.
    pub(crate) dedupe: Dedupe,
    /// The maximum relative difference of losses: |CPU - device| / |CPU|.
    pub(crate) relative_error: f64,
    pub(crate) cpu: Vec<f64>,
    pub(crate) device: Vec<f64>,
}

/// Trains the workload's reference model with low learning rates on the first `steps` batches of `dataset`, on
/// the CPU with `threads` threads and on the device, with every kind of deduplication.
pub(crate) fn compare(
    (workload, dataset): (Workload, &Path),
    (threads, steps): (usize, usize),
    device: &Accelerator,
    reporter: &dyn Reporter,
) -> Result<Vec<Comparison>> {
    let snapshot = load_snapshot(dataset, None)?;
    let mut config = reference_model(workload, &snapshot.schema, dataset)?;
    // At the full rates the first steps overshoot, and rounding errors grow to 0.1 % within ten steps, even on
    // one device.
    config.optimizer.dense.learning_rate *= GENTLE;
    config.optimizer.tables.learning_rate *= GENTLE as f32;
    let batches = read(dataset, &config, threads, steps)?;
    let forms = [Dedupe::Off, Dedupe::Exact, Dedupe::Window];
    reporter.begin("comparing", Some((2 * forms.len() * steps) as u64), "steps");
    let losses = |dedupe: Dedupe, device: Option<&Accelerator>| -> Result<Vec<f64>> {
        let mut trainee = Trainee::new(&config, &snapshot, threads, device)?;
        let mut losses = Vec::with_capacity(batches.len());
        for batch in &batches {
            let batch = trainee.deduplicated(batch, dedupe)?;
            losses.push(trainee.step(&batch)?.0.double_value(&[]));
            reporter.advance(1);
        }
        Ok(losses)
    };
    let compared = forms.into_iter().map(|dedupe| {
        let (cpu, device) = (losses(dedupe, None)?, losses(dedupe, Some(device))?);
        let errors = cpu.iter().zip(&device).map(|(cpu, device)| (cpu - device).abs() / cpu.abs());
        // A NaN loss counts as an infinite difference.
        let errors = errors.map(|error| if error.is_nan() { f64::INFINITY } else { error });
        Ok(Comparison { dedupe, relative_error: errors.fold(0.0, f64::max), cpu, device })
    });
    let compared = compared.collect();
    reporter.end();
    compared
}
