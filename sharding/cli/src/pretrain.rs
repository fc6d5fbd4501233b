//! `onefold-shard pretrain`: trains a cost model on measured costs.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use onefold_base::fault::{Fault, Kind};
use onefold_base::units::format_count;
use onefold_sharding::{Costs, Fit, ModelFile, PretrainOptions, claim_output, pretrain, repeatability};
use onefold_terminal::Printer;
use serde_json::json;

use crate::cli::PretrainArguments;

pub(crate) fn pretrain_command(arguments: &PretrainArguments, printer: &Printer) -> Result<()> {
    let started = Instant::now();
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let costs = Costs::load(&arguments.costs)?;
    let PretrainArguments { network, epochs, seed, folds, .. } = *arguments;
    let options = PretrainOptions { network, epochs, seed, folds };
    let repeated = match &arguments.repeated {
        None => None,
        Some(path) => Some(repeatability(&costs, &Costs::load(path)?).ok_or_else(|| {
            let message = format!("`{}` has no set of `{}`", path.display(), arguments.costs.display());
            Fault::new(Kind::Options, message)
                .hint("measure again with the same `--seed`, `--samples` and `--memory`")
        })?),
    };
    let mut file =
        pretrain(&costs, &options, printer).with_context(|| format!("`{}`", arguments.costs.display()))?;
    if let Some(report) = file.reports.first_mut() {
        report.repeated = repeated;
    }
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
    let mut text = format!(
        "Measured on {}, kernels {}; every sample is predicted by models that were not fitted to it\n\n",
        file.machine, file.kernel_version
    );
    let _ = writeln!(
        text,
        "{:<36} {:>8} {:>6} {:>14} {:>8} {:>10}",
        "model", "trained", "tested", "test MSE ms²", "tau", "rel. error"
    );
    for report in &file.reports {
        let mut line = |name: &str, trained: usize, tested: Option<usize>, fit: &Fit| {
            let _ = writeln!(
                text,
                "{:<36} {:>8} {:>6} {:>14.5} {:>8.4} {:>8.1} %",
                format!("{}{name}", report.model),
                format_count(trained as u64),
                tested.map_or(String::new(), |tested| format_count(tested as u64)),
                fit.mse,
                fit.kendall_tau,
                100.0 * fit.relative_error
            );
        };
        let (trained, tested) = (report.train_samples, Some(report.test_samples));
        line("", trained, tested, &report.test);
        if let Some(linear) = &report.linear {
            line(", without the network", trained, tested, linear);
        }
        if let Some(deduplicated) = &report.deduplicated {
            line(" of deduplicated sets", trained, None, deduplicated);
        }
        if let Some(repeated) = &report.repeated {
            line(", measured again", 0, Some(repeated.samples), &repeated.fit);
        }
    }
    text
}
