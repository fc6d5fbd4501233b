//! Implements `onefold-train-tools bench`: measures how fast a workload's reference model trains on batches in
//! memory, with deduplication off and on, and the time of each stage.
//!
//! One model takes all steps, since deduplication does not change the results. Batches are stored as plain
//! samples, so that finding duplicates is part of the measured step. Variants alternate, with different
//! batches, so that a slowdown of the machine affects all of them.

mod bound;
mod compare;
mod reference;

use std::path::Path;
use std::time::{Duration, Instant};

use onefold_base::fault::{option, text};
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_datasets::Schema;
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{
    Batch, BatchParts, Dedupe, Reader, ReaderOptions, Workers, deduplicate, fold_windows, load_snapshot,
};
use onefold_raw_logs::generate::Workload;
use onefold_sharding::FeatureConfig;
use rayon::prelude::*;
use serde::Serialize;

use self::bound::Work;
pub use self::compare::{CompareOptions, Comparison, compare};
use self::reference::reference_model;
use crate::device::Accelerator;
use crate::embedding::{Embeddings, Placement, Status};
use crate::model::{Model, Stage};
use crate::optimizer::DenseOptimizer;
use crate::processor::check_precision;
use crate::{Error, Precision, Result, TrainConfig};

/// The options of a benchmark.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// The workload whose reference model is trained.
    pub workload: Workload,
    /// The kinds of deduplication to measure. They alternate, with two steps per turn, of which the second
    /// counts.
    pub dedupe: Vec<Dedupe>,
    /// The number of threads of libtorch and of the tables.
    pub threads: usize,
    /// The precision of the dense part's matrix products.
    pub precision: Precision,
    /// The GPU to measure; the processor if `None`.
    pub device: Option<Accelerator>,
    /// The number of batches of 2,048 samples that are read in advance.
    pub batches: usize,
    /// The number of measured turns per variant, after two warm-up turns.
    pub rounds: usize,
}

/// The results of a benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// The workload.
    pub workload: Workload,
    /// The number of samples per batch.
    pub batch_size: usize,
    /// The number of threads.
    pub threads: usize,
    /// The kernels that compute the dense part's matrix products.
    pub kernels: String,
    /// The GPU, if one was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The number of measured steps per variant.
    pub rounds: usize,
    /// The results of the variants, in the order of measurement.
    pub variants: Vec<VariantReport>,
    /// The peak resident set size of the process, if the kernel reports it.
    pub peak_rss_bytes: Option<u64>,
}

/// The results of one variant.
#[derive(Debug, Clone, Serialize)]
pub struct VariantReport {
    /// The kind of deduplication: `off`, `exact` or `window`.
    pub name: String,
    /// The median time of a step in milliseconds. On the CPU it includes deduplication; with a GPU, the
    /// reader's threads deduplicate in advance.
    pub step_ms: f64,
    /// The 10th and 90th percentiles of the step time in milliseconds.
    pub step_ms_p10_p90: [f64; 2],
    /// The batch size divided by the median step time.
    pub samples_per_second: f64,
    /// `samples_per_second` relative to `off`, if `off` was measured.
    pub speedup: Option<f64>,
    /// The speedup bound by Amdahl's law: the stages of `off`, each scaled by the reduction of its work.
    pub bound: Option<f64>,
    /// The mean milliseconds per step and stage. With a GPU, which computes asynchronously, only stages on the
    /// host are included.
    pub stages_ms: Vec<(String, f64)>,
    /// The mean loss over the measured steps.
    pub loss: f64,
}

/// The measurements of a variant.
#[derive(Debug, Default)]
struct Measured {
    times: Vec<Duration>,
    stages: Vec<(String, Duration)>,
    loss: f64,
    work: Work,
}

/// Measures training steps on the first batches of `dataset`.
///
/// # Errors
///
/// [`Error::Fault`] if the dataset does not belong to the workload or has too few samples, or for a precision
/// that brings no benefit on the device; [`Error::Read`] for damaged data.
pub fn bench(dataset: &Path, options: &BenchOptions, reporter: &dyn Reporter) -> Result<BenchReport> {
    let snapshot = load_snapshot(dataset, None)?;
    let mut config = reference_model(options.workload, &snapshot.schema, dataset)?;
    config.train.precision = options.precision;
    let torch_device = options.device.as_ref().map_or(tch::Device::Cpu, Accelerator::torch);
    check_precision(&config, torch_device)?;
    let tables = config.tables(&snapshot, None, &[])?;
    let batches = read(dataset, &config, options)?;
    tch::set_num_threads(i32::try_from(options.threads).unwrap_or(i32::MAX));
    let embeddings = embeddings(&config, &tables, options.threads, options.device.as_ref())?;
    let mut model = Model::new(&config, &snapshot.schema, embeddings)?;
    let mut optimizer = DenseOptimizer::of(&model, &config.optimizer.dense, options.threads)?;
    let mut measured: Vec<Measured> = options.dedupe.iter().map(|_| Measured::default()).collect();
    let warm_up = 2;
    let rounds = options.rounds + warm_up;
    reporter.begin("measuring", Some((rounds * options.dedupe.len()) as u64), "steps");
    for round in 0..rounds {
        for (number, (dedupe, measured)) in options.dedupe.iter().zip(&mut measured).enumerate() {
            if round == warm_up {
                *measured = Measured::default();
            }
            let mut take = |batch: usize, measured: &mut Measured| {
                let batch = &batches[(round + 3 * number + batch) % batches.len()];
                step(&config, &snapshot.schema, &mut model, &mut optimizer, *dedupe, batch, measured)
            };
            // Real training takes steps of one kind. The first step of a turn runs with caches and free memory
            // of another kind.
            take(0, &mut Measured::default())?;
            take(1, measured)?;
            reporter.advance(1);
        }
    }
    reporter.end();
    Ok(report(options, &config, model.kernels(), &measured))
}

/// Reads the batches without deduplication.
fn read(dataset: &Path, config: &TrainConfig, options: &BenchOptions) -> Result<Vec<Batch>> {
    let reader_options = ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(config.train.batch_size) };
    let workers = Workers::new(options.threads, DEFAULT_MEMORY_LIMIT)?;
    let reader = Reader::open(dataset, reader_options, &workers)?;
    let steps = reader.batches()?.take(options.batches);
    let batches = steps.map(|step| step.map(|step| step.batch)).collect::<Result<Vec<_>, _>>()?;
    if batches.len() < options.batches || batches.iter().any(|b| b.size() < config.train.batch_size) {
        return Err(Error::config(
            dataset,
            format!(
                "the dataset has {} samples, too few for {} batches of {}",
                reader.samples(),
                options.batches,
                config.train.batch_size
            ),
            text!["generate more samples, or lower ", option("batches")],
        ));
    }
    Ok(batches)
}

fn name(dedupe: Dedupe) -> &'static str {
    match dedupe {
        Dedupe::Off => "off",
        Dedupe::Exact => "exact",
        Dedupe::Window => "window",
    }
}

/// Creates the model's tables, on the processor or on a device.
fn embeddings(
    config: &TrainConfig,
    features: &[FeatureConfig],
    threads: usize,
    device: Option<&Accelerator>,
) -> Result<Embeddings> {
    let (optimizer, seed) = (&config.optimizer.tables, config.train.seed);
    let placement = Placement::alone(features);
    match device {
        None => Embeddings::new(features, &placement, optimizer, seed, threads),
        Some(device) => Embeddings::on_accelerator(device, features, &placement, optimizer, seed, threads),
    }
}

/// Returns the batch as the reader would deduplicate it. Groups are processed in parallel on the current thread
/// pool.
fn deduplicated(batch: &Batch, schema: &Schema, dedupe: Dedupe) -> Result<Batch> {
    let groups = batch.groups().par_iter().zip(&schema.groups).with_max_len(1);
    let groups = groups.map(|(group, declared)| match dedupe {
        Dedupe::Exact if declared.deduplicated => deduplicate(group),
        Dedupe::Window if declared.deduplicated => fold_windows(&deduplicate(group)),
        _ => group.clone(),
    });
    Ok(Batch::try_new(BatchParts { groups: groups.collect::<Vec<_>>(), ..batch.clone().into_parts() })?)
}

fn step(
    config: &TrainConfig,
    schema: &Schema,
    model: &mut Model,
    optimizer: &mut DenseOptimizer,
    dedupe: Dedupe,
    batch: &Batch,
    measured: &mut Measured,
) -> Result<()> {
    let mut started = Instant::now();
    let batch = model.embeddings.install(|| deduplicated(batch, schema, dedupe))?;
    let searched = started.elapsed();
    let accelerator = model.embeddings.on_device().map(|embeddings| embeddings.store.accelerator().clone());
    if accelerator.is_some() {
        started = Instant::now();
    }
    let input = model.request(Some(&batch), Status::default())?;
    let (mut forward, loss) = model.learn(&batch, input, Model::weight(&batch))?;
    model.backward(&batch, &mut forward, &loss, || Ok(()))?;
    model.profile.measure(Stage::DenseUpdate, || {
        let norm = optimizer.gradient_norm()?;
        optimizer.step(config.optimizer.dense.learning_rate, &norm)
    })?;
    let updating = Instant::now();
    model.update(forward, &config.optimizer.tables)?;
    let mut updated = Some(updating.elapsed());
    let mut stages = model.profile.take();
    if let Some(accelerator) = accelerator {
        accelerator.synchronize()?;
        // The measured times are only those to enqueue the work.
        (stages, updated) = (Vec::new(), None);
    }
    measured.times.push(started.elapsed());
    measured.loss += loss.double_value(&[]);
    if !loss.double_value(&[]).is_finite() {
        let (step, loss) = (model.embeddings.steps(), loss.double_value(&[]));
        return Err(
            std::io::Error::other(format!("the loss is {loss} at step {step} of the measurement")).into()
        );
    }
    measured.work.add(&batch, &config.tables);
    let named = stages.into_iter().map(|(stage, time)| (stage_name(stage), time));
    let whole = [("deduplicate".to_owned(), searched)].into_iter().chain(named);
    let update = updated.map(|updated| (stage_name(Stage::TableUpdate), updated));
    for (name, time) in whole.chain(update) {
        match measured.stages.iter_mut().find(|(other, _)| *other == name) {
            Some((_, total)) => *total += time,
            None => measured.stages.push((name, time)),
        }
    }
    Ok(())
}

fn stage_name(stage: Stage) -> String {
    serde_json::to_value(stage).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

fn report(
    options: &BenchOptions,
    config: &TrainConfig,
    kernels: String,
    measured: &[Measured],
) -> BenchReport {
    let milliseconds = |time: Duration| 1e3 * time.as_secs_f64();
    let quantile = |measured: &Measured, q: f64| {
        let mut times = measured.times.clone();
        times.sort_unstable();
        milliseconds(times[((times.len() - 1) as f64 * q).round() as usize])
    };
    let off = options.dedupe.iter().position(|dedupe| *dedupe == Dedupe::Off).map(|i| &measured[i]);
    let report = |(dedupe, measured): (&Dedupe, &Measured)| {
        let step_ms = quantile(measured, 0.5);
        let steps = measured.times.len() as u32;
        VariantReport {
            name: name(*dedupe).to_owned(),
            step_ms,
            step_ms_p10_p90: [quantile(measured, 0.1), quantile(measured, 0.9)],
            samples_per_second: 1e3 * config.train.batch_size as f64 / step_ms,
            speedup: off.map(|off| quantile(off, 0.5) / step_ms),
            // The bound depends on the times of stages, which are not measured on a GPU.
            bound: off
                .filter(|_| options.device.is_none())
                .map(|off| off.work.bound(&measured.work, &off.stages)),
            stages_ms: measured
                .stages
                .iter()
                .map(|(name, time)| (name.clone(), milliseconds(*time / steps)))
                .collect(),
            loss: measured.loss / f64::from(steps),
        }
    };
    BenchReport {
        workload: options.workload,
        batch_size: config.train.batch_size,
        threads: options.threads,
        kernels,
        device: options.device.as_ref().map(Accelerator::describe),
        rounds: options.rounds,
        variants: options.dedupe.iter().zip(measured).map(report).collect(),
        peak_rss_bytes: peak_rss_bytes(),
    }
}
