//! The command `onefold-train-tools products`.

use std::fmt::Write as _;

use onefold_terminal::Printer;
use onefold_trainer::products::{ProductsReport, measure_products};

#[derive(Debug, clap::Args)]
pub(crate) struct ProductsArguments {
    /// The number of threads [default: all threads of the machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// The number of repetitions of each product, of which the fastest counts
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

pub(crate) fn run(arguments: &ProductsArguments, printer: &Printer) -> anyhow::Result<()> {
    let threads = crate::threads(arguments.threads);
    let report = measure_products(threads, usize::from(arguments.rounds))?;
    Ok(printer.summary(&describe(&report), &report)?)
}

fn describe(report: &ProductsReport) -> String {
    let mut text = String::from("GFLOP/s, forward / gradient of the input / gradient of the weights\n");
    for peak in &report.peaks {
        let _ = writeln!(text, "peak of registers, {}: {:.0}", peak.precision.name(), peak.gflops);
    }
    let _ = writeln!(
        text,
        "{:<22} {:>4}  {:>17}  {:>17}  {:>17}  {:>14}",
        "samples, in, out", "", "ours", "libtorch", "with the rest", "used, of peak"
    );
    for product in &report.products {
        let [samples, inputs, outputs] = product.size;
        let three = |values: [f64; 3]| values.map(|value| format!("{value:.0}")).join(" / ");
        let peak = report.peaks.iter().find(|peak| peak.precision == product.precision);
        let share = |value: f64| 100.0 * value / peak.map_or(f64::NAN, |peak| peak.gflops);
        let shares = product.used.map(|value| format!("{:.0}", share(value))).join(" / ") + " %";
        let size = format!("{samples} x {inputs} x {outputs}");
        let [ours, libtorch, layer] = [product.ours, product.libtorch, product.libtorch_layer].map(three);
        let _ = writeln!(
            text,
            "{size:<22} {:>4}  {ours:>17}  {libtorch:>17}  {layer:>17}  {shares:>14}",
            product.precision.name()
        );
    }
    let _ = writeln!(text, "{}, {} threads", report.processor, report.threads);
    text
}
