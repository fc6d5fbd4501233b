//! `onefold-shard pretrain`: a cost model from measured costs.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use onefold_datasets::console::Printer;
use onefold_datasets::units::format_count;
use onefold_sharding::{Costs, Fit, ModelFile, PretrainOptions, claim_output, pretrain};
use serde_json::json;

use crate::cli::PretrainArguments;

pub(crate) fn pretrain_command(arguments: &PretrainArguments, printer: &Printer) -> Result<()> {
    let started = Instant::now();
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let costs = Costs::load(&arguments.costs)?;
    let options = PretrainOptions {
        epochs: arguments.epochs,
        seed: arguments.seed,
        features: arguments.features,
        ablation: arguments.ablation,
    };
    let file =
        pretrain(&costs, &options, printer).with_context(|| format!("`{}`", arguments.costs.display()))?;
    file.store(out)?;
    let mut text = table(&file);
    let seconds = started.elapsed().as_secs_f64();
    let _ = write!(text, "\nTrained in {seconds:.1} s, written to `{}`", out.display());
    let json = json!({
        "model": out,
        "machine": file.machine,
        "kernel_version": file.kernel_version,
        "reports": file.reports,
        "wall_seconds": seconds,
    });
    Ok(printer.summary(&text, &json)?)
}

fn table(file: &ModelFile) -> String {
    let mut text = format!("Measured on {}, kernels {}\n\n", file.machine, file.kernel_version);
    let _ = writeln!(
        text,
        "{:<34} {:>8} {:>6} {:>14} {:>8} {:>10}",
        "model", "trained", "tested", "test MSE ms²", "tau", "rel. error"
    );
    for report in &file.reports {
        let samples = (format_count(report.train_samples as u64), format_count(report.test_samples as u64));
        let mut line = |name: String, fit: &Fit| {
            let _ = writeln!(
                text,
                "{name:<34} {:>8} {:>6} {:>14.5} {:>8.4} {:>8.1} %",
                samples.0,
                samples.1,
                fit.mse,
                fit.kendall_tau,
                100.0 * fit.relative_error
            );
        };
        line(report.model.clone(), &report.test);
        if let Some(fit) = &report.neuroshard_features {
            line(format!("{}, NeuroShard's features", report.model), fit);
        }
        line(format!("{}, a line", report.model), &report.linear);
    }
    text
}
