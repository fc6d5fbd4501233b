//! The command `onefold-train-tools check-device`.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, bail};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_raw_logs::generate::Workload;
use onefold_terminal::Printer;
use onefold_trainer::command::{RankOptions, Ranks};
use onefold_trainer::device::{Accelerator, DeviceName, KernelCheck, check_kernels};
use onefold_trainer::distributed::{Collectives, Environment, check_collectives};
use onefold_trainer::name_of;
use serde::Serialize;

use crate::bench::compare::{Comparison, compare};

/// The largest tolerated error of a kernel, relative to its largest value. Kernels sum in 32-bit floats.
const KERNEL_BOUND: f64 = 1e-4;
/// The largest tolerated relative difference of losses.
const LOSS_BOUND: f64 = 1e-4;

#[derive(Debug, clap::Args)]
pub(crate) struct CheckArguments {
    /// The GPU to check
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cuda(None))]
    device: DeviceName,
    /// The number of seeds of random numbers with which every kernel is checked
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    seeds: u16,
    /// The workload whose reference model is trained on both devices
    #[arg(long, value_enum, requires = "data")]
    workload: Option<Workload>,
    /// The directory of a dataset of this workload
    #[arg(long, value_name = "DATASET", requires = "workload")]
    data: Option<PathBuf>,
    /// The number of steps for each kind of deduplication
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// The number of threads [default: all threads of the machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    #[command(flatten)]
    ranks: RankOptions,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    kernels: Vec<KernelCheck>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    losses: Vec<Comparison>,
    /// The number of ranks whose exchange between GPUs was checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<u32>,
}

pub(crate) fn run(arguments: &CheckArguments, printer: &Printer) -> anyhow::Result<()> {
    if arguments.device == DeviceName::Cpu {
        let message = text![option("device").set_to("cpu"), " is what others are checked against"];
        bail!(Fault::new(Kind::Options, message).hint("name a GPU, as `cuda:0`"));
    }
    let ranks = Ranks::join(&arguments.ranks, arguments.device)?;
    ranks.run("check-device", true, |collectives, device| {
        let device = device.context("a GPU was opened")?;
        check(arguments, &**collectives, &device, printer)
    })
}

fn check(
    arguments: &CheckArguments,
    collectives: &dyn Collectives,
    accelerator: &Accelerator,
    printer: &Printer,
) -> anyhow::Result<()> {
    let ranks = Environment::read()?.is_job().then(|| collectives.size());
    if ranks.is_some() {
        (0..5).try_for_each(|seed| check_collectives(collectives, accelerator.torch(), seed))?;
    }
    let mut kernels: Vec<KernelCheck> = Vec::new();
    for seed in 0..u64::from(arguments.seeds) {
        for check in check_kernels(accelerator, seed)? {
            match kernels.iter_mut().find(|worst| worst.kernel == check.kernel) {
                Some(worst) => worst.relative_error = worst.relative_error.max(check.relative_error),
                None => kernels.push(check),
            }
        }
    }
    let mut losses = Vec::new();
    if let (Some(workload), Some(data)) = (arguments.workload, &arguments.data) {
        let sizes = (crate::threads(arguments.threads), usize::from(arguments.steps));
        losses = compare((workload, data), sizes, accelerator, printer)?;
    }
    let report = Report { device: accelerator.describe(), kernels, losses, ranks };
    if collectives.rank() == 0 {
        printer.summary(&describe(&report), &report)?;
    }
    let wrong = report.kernels.iter().any(|check| check.relative_error > KERNEL_BOUND)
        || report.losses.iter().any(|comparison| comparison.relative_error > LOSS_BOUND);
    if wrong {
        let bounds = format!("{KERNEL_BOUND} (kernels) or {LOSS_BOUND} (losses)");
        bail!(
            Fault::new(Kind::Failed, format!("{} differs from the CPU", arguments.device))
                .hint(format!("what is above {bounds} is wrong; please report it"))
        );
    }
    Ok(())
}

fn describe(report: &Report) -> String {
    let mut text = format!("{}\n", report.device);
    for check in &report.kernels {
        let _ = writeln!(text, "{:<40} relative error {:.1e}", check.kernel, check.relative_error);
    }
    for comparison in &report.losses {
        let _ = writeln!(
            text,
            "losses, {:<32} relative error {:.1e} over {} steps, the last {:.5} and {:.5}",
            name_of(&comparison.dedupe),
            comparison.relative_error,
            comparison.cpu.len(),
            comparison.cpu.last().copied().unwrap_or(f64::NAN),
            comparison.device.last().copied().unwrap_or(f64::NAN),
        );
    }
    if let Some(ranks) = report.ranks {
        let _ = writeln!(text, "{ranks} ranks exchange through NCCL what they should");
    }
    text
}
