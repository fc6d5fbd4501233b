//! The command `onefold-train-tools bench`: measures how fast a workload's reference model trains on batches in
//! memory, with deduplication off and on, and the time of each stage.
//!
//! One model takes all steps, since deduplication does not change the results. Batches are stored as plain
//! samples, so that finding duplicates is part of the measured step. Variants alternate, with different
//! batches, so that a slowdown of the machine affects all of them.

mod bound;
pub(crate) mod compare;
mod reference;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use onefold_base::fault::{option, text};
use onefold_base::process::peak_rss_bytes;
use onefold_base::progress::Reporter;
use onefold_base::units::{format_bytes, format_count};
use onefold_datasets::{Schema, Snapshot};
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_ikjt::{
    Batch, BatchParts, Dedupe, Reader, ReaderOptions, Workers, deduplicate, fold_windows, load_snapshot,
};
use onefold_raw_logs::generate::Workload;
use onefold_terminal::Printer;
use onefold_trainer::command::DeviceOption;
use onefold_trainer::device::Accelerator;
use onefold_trainer::embedding::{Embeddings, Placement, Status};
use onefold_trainer::model::{Model, Stage};
use onefold_trainer::optimizer::DenseOptimizer;
use onefold_trainer::{Precision, Result, TrainConfig, check_precision, name_of};
use rayon::prelude::*;
use serde::Serialize;

use self::bound::Work;
use self::reference::reference_model;
use crate::wrong_file;

#[derive(Debug, clap::Args)]
pub(crate) struct BenchArguments {
    /// The workload whose reference model is trained
    #[arg(long, value_enum)]
    workload: Workload,
    /// The directory of a dataset of this workload
    #[arg(long, value_name = "DATASET")]
    data: PathBuf,
    /// The kinds of deduplication; several are measured in turns of two steps, of which the second counts
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["off", "exact", "window"])]
    dedupe: Vec<Dedupe>,
    /// The precision of the dense part's matrix products
    #[arg(long, value_enum, default_value = "fp32")]
    precision: Precision,
    #[command(flatten)]
    device: DeviceOption,
    /// The number of threads [default: all threads of the machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// The number of batches of 2,048 samples, which are read in advance
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    batches: u16,
    /// The number of measured steps of each variant
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

/// The results of a benchmark.
#[derive(Debug, Serialize)]
struct BenchReport {
    workload: Workload,
    batch_size: usize,
    threads: usize,
    /// The kernels that compute the dense part's matrix products.
    kernels: String,
    /// The GPU, if one was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// The number of measured steps per variant.
    rounds: usize,
    /// The results of the variants, in the order of measurement.
    variants: Vec<VariantReport>,
    /// The peak resident set size of the process, if the kernel reports it.
    peak_rss_bytes: Option<u64>,
}

/// The results of one variant.
#[derive(Debug, Serialize)]
struct VariantReport {
    name: Dedupe,
    /// The median time of a step in milliseconds. On the CPU it includes deduplication; with a GPU, the
    /// reader's threads deduplicate in advance.
    step_ms: f64,
    /// The 10th and 90th percentiles of the step time in milliseconds.
    step_ms_p10_p90: [f64; 2],
    /// The batch size divided by the median step time.
    samples_per_second: f64,
    /// `samples_per_second` relative to `off`, if `off` was measured.
    speedup: Option<f64>,
    /// The speedup bound by Amdahl's law: the stages of `off`, each scaled by the reduction of its work.
    bound: Option<f64>,
    /// The mean milliseconds per step and stage. With a GPU, which computes asynchronously, only stages on the
    /// host are included.
    stages_ms: Vec<(String, f64)>,
    /// The mean loss over the measured steps.
    loss: f64,
}

/// The measurements of a variant.
#[derive(Debug, Default)]
struct Measured {
    times: Vec<Duration>,
    stages: Vec<(String, Duration)>,
    loss: f64,
    work: Work,
}

pub(crate) fn run(arguments: &BenchArguments, printer: &Printer) -> anyhow::Result<()> {
    let report = bench(arguments, printer)?;
    Ok(printer.summary(&describe(&report), &report)?)
}

/// Measures training steps on the first batches of the dataset.
fn bench(arguments: &BenchArguments, reporter: &dyn Reporter) -> Result<BenchReport> {
    let BenchArguments { workload, data, dedupe, .. } = arguments;
    let (threads, device) = (crate::threads(arguments.threads), arguments.device.open()?);
    let snapshot = load_snapshot(data, None)?;
    let mut config = reference_model(*workload, &snapshot.schema, data)?;
    config.train.precision = arguments.precision;
    check_precision(&config, device.as_ref().map_or(tch::Device::Cpu, Accelerator::torch))?;
    let batches = read(data, &config, threads, usize::from(arguments.batches))?;
    let mut trainee = Trainee::new(&config, &snapshot, threads, device.as_ref())?;
    let mut measured: Vec<Measured> = dedupe.iter().map(|_| Measured::default()).collect();
    let warm_up = 2;
    let rounds = usize::from(arguments.rounds) + warm_up;
    reporter.begin("measuring", Some((rounds * dedupe.len()) as u64), "steps");
    for round in 0..rounds {
        for (number, (dedupe, measured)) in dedupe.iter().zip(&mut measured).enumerate() {
            if round == warm_up {
                *measured = Measured::default();
            }
            let mut take = |batch: usize, measured: &mut Measured| {
                let batch = &batches[(round + 3 * number + batch) % batches.len()];
                trainee.measured_step(batch, *dedupe, measured)
            };
            // Real training takes steps of one kind. The first step of a turn runs with caches and free memory
            // of another kind.
            take(0, &mut Measured::default())?;
            take(1, measured)?;
            reporter.advance(1);
        }
    }
    reporter.end();
    let batch_size = config.train.batch_size;
    Ok(BenchReport {
        workload: *workload,
        batch_size,
        threads,
        kernels: trainee.model.kernels(),
        device: device.as_ref().map(Accelerator::describe),
        rounds: usize::from(arguments.rounds),
        variants: variants(dedupe, &measured, batch_size, device.is_some()),
        peak_rss_bytes: peak_rss_bytes(),
    })
}

/// Reads `count` batches without deduplication.
fn read(dataset: &Path, config: &TrainConfig, threads: usize, count: usize) -> Result<Vec<Batch>> {
    let batch_size = config.train.batch_size;
    let options = ReaderOptions { dedupe: Dedupe::Off, ..ReaderOptions::new(batch_size) };
    let reader = Reader::open(dataset, options, &Workers::new(threads, DEFAULT_MEMORY_LIMIT)?)?;
    let steps = reader.batches()?.take(count);
    let batches = steps.map(|step| step.map(|step| step.batch)).collect::<Result<Vec<_>, _>>()?;
    if batches.len() < count || batches.iter().any(|batch| batch.size() < batch_size) {
        let samples = reader.samples();
        return Err(wrong_file(
            dataset,
            format!("the dataset has {samples} samples, too few for {count} batches of {batch_size}"),
            text!["generate more samples, or lower ", option("batches")],
        ));
    }
    Ok(batches)
}

/// A reference model that is trained on batches in memory.
struct Trainee<'a> {
    config: &'a TrainConfig,
    schema: &'a Schema,
    model: Model,
    optimizer: DenseOptimizer,
    device: Option<&'a Accelerator>,
}

impl<'a> Trainee<'a> {
    fn new(
        config: &'a TrainConfig,
        snapshot: &'a Snapshot,
        threads: usize,
        device: Option<&'a Accelerator>,
    ) -> Result<Self> {
        tch::set_num_threads(i32::try_from(threads).unwrap_or(i32::MAX));
        let features = &config.tables(snapshot, None, &[])?;
        let (placement, optimizer) = (&Placement::alone(features), &config.optimizer);
        let (rule, seed) = (&optimizer.tables, config.train.seed);
        let embeddings = match device {
            None => Embeddings::new(features, placement, rule, seed, threads)?,
            Some(device) => Embeddings::on_accelerator(device, features, placement, rule, seed, threads)?,
        };
        let model = Model::new(config, &snapshot.schema, embeddings)?;
        let optimizer = DenseOptimizer::of(&model, &optimizer.dense, threads)?;
        Ok(Self { config, schema: &snapshot.schema, model, optimizer, device })
    }

    /// Returns the batch as the reader would deduplicate it. Groups are processed in parallel on the threads of
    /// the tables.
    fn deduplicated(&self, batch: &Batch, dedupe: Dedupe) -> Result<Batch> {
        let work = || {
            let groups = batch.groups().par_iter().zip(&self.schema.groups).with_max_len(1);
            let groups = groups.map(|(group, declared)| match dedupe {
                Dedupe::Exact if declared.deduplicated => deduplicate(group),
                Dedupe::Window if declared.deduplicated => fold_windows(&deduplicate(group)),
                _ => group.clone(),
            });
            Batch::try_new(BatchParts { groups: groups.collect::<Vec<_>>(), ..batch.clone().into_parts() })
        };
        Ok(self.model.embeddings.install(work)?)
    }

    /// Takes a step; returns its loss and the time that the update of the tables took.
    fn step(&mut self, batch: &Batch) -> Result<(tch::Tensor, Duration)> {
        let Self { config, model, optimizer, .. } = self;
        let input = model.request(Some(batch), Status::default())?;
        let (mut forward, loss) = model.learn(batch, input, Model::weight(batch))?;
        model.backward(batch, &mut forward, &loss, || Ok(()))?;
        model
            .profile
            .measure(Stage::DenseUpdate, || optimizer.apply(config.optimizer.dense.learning_rate))?;
        let updating = Instant::now();
        model.update(forward, &config.optimizer.tables)?;
        Ok((loss, updating.elapsed()))
    }

    /// Takes a step with a deduplicated batch, and adds its times.
    fn measured_step(&mut self, batch: &Batch, dedupe: Dedupe, measured: &mut Measured) -> Result<()> {
        let mut started = Instant::now();
        let batch = self.deduplicated(batch, dedupe)?;
        let searched = started.elapsed();
        if self.device.is_some() {
            started = Instant::now();
        }
        let (loss, updated) = self.step(&batch)?;
        let mut stages = vec![("deduplicate".to_owned(), searched)];
        let of_model = self.model.profile.take();
        match self.device {
            // The measured times are only those to enqueue the work.
            Some(device) => device.synchronize()?,
            None => {
                stages.extend(of_model.into_iter().map(|(stage, time)| (name_of(&stage), time)));
                stages.push((name_of(&Stage::TableUpdate), updated));
            }
        }
        measured.times.push(started.elapsed());
        let loss = loss.double_value(&[]);
        measured.loss += loss;
        if !loss.is_finite() {
            let step = self.model.embeddings.steps();
            let message = format!("the loss is {loss} at step {step} of the measurement");
            return Err(std::io::Error::other(message).into());
        }
        measured.work.add(&batch, &self.config.tables);
        for (name, time) in stages {
            match measured.stages.iter_mut().find(|(other, _)| *other == name) {
                Some((_, total)) => *total += time,
                None => measured.stages.push((name, time)),
            }
        }
        Ok(())
    }
}

/// Returns the results of the variants, which were measured on batches of `batch_size` samples.
fn variants(all: &[Dedupe], measured: &[Measured], batch_size: usize, on_device: bool) -> Vec<VariantReport> {
    let milliseconds = |time: Duration| 1e3 * time.as_secs_f64();
    let quantile = |measured: &Measured, q: f64| {
        let mut times = measured.times.clone();
        times.sort_unstable();
        milliseconds(times[((times.len() - 1) as f64 * q).round() as usize])
    };
    let off = all.iter().position(|dedupe| *dedupe == Dedupe::Off).map(|i| &measured[i]);
    let report = |(dedupe, measured): (&Dedupe, &Measured)| {
        let (step_ms, steps) = (quantile(measured, 0.5), measured.times.len() as u32);
        let stages = measured.stages.iter();
        // The bound depends on the times of stages, which are not measured on a GPU.
        let bound = off.filter(|_| !on_device).map(|off| off.work.bound(&measured.work, &off.stages));
        VariantReport {
            name: *dedupe,
            step_ms,
            step_ms_p10_p90: [quantile(measured, 0.1), quantile(measured, 0.9)],
            samples_per_second: 1e3 * batch_size as f64 / step_ms,
            speedup: off.map(|off| quantile(off, 0.5) / step_ms),
            bound,
            stages_ms: stages.map(|(name, time)| (name.clone(), milliseconds(*time / steps))).collect(),
            loss: measured.loss / f64::from(steps),
        }
    };
    all.iter().zip(measured).map(report).collect()
}

fn describe(report: &BenchReport) -> String {
    let figure = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2} x"));
    let mut text = format!("{:<34}  step ms  samples/s  speedup    bound\n", "");
    for variant in &report.variants {
        let _ = writeln!(
            text,
            "{:<34} {:>8.1}  {:>9}  {:>7}  {:>7}",
            name_of(&variant.name),
            variant.step_ms,
            format_count(variant.samples_per_second as u64),
            figure(variant.speedup),
            figure(variant.bound),
        );
    }
    for variant in &report.variants {
        let stages = variant.stages_ms.iter().map(|(name, time)| format!("{name} {time:.1}"));
        let stages = stages.collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "{}, ms: {stages}", name_of(&variant.name));
    }
    let memory =
        report.peak_rss_bytes.map_or_else(String::new, |b| format!(", peak memory {}", format_bytes(b)));
    let _ = writeln!(
        text,
        "{} steps each, {}, batches of {}, {} threads{}{memory}",
        report.rounds,
        report.kernels,
        report.batch_size,
        report.threads,
        report.device.as_ref().map_or_else(String::new, |device| format!(", {device}")),
    );
    text
}
