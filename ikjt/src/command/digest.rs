//! `onefold-read digest`: prints a digest of the samples that does not depend on the way they are read.

use std::fmt::Write as _;
use std::time::Instant;

use crate::batch::digest;
use onefold_base::progress::Reporter;
use onefold_base::units::count_of;
use onefold_datasets::digest::Digest;
use onefold_terminal::Printer;
use serde::Serialize;

use super::cli::Reading;

#[derive(Debug, Serialize)]
struct Digests {
    digest: Digest,
    samples: u64,
    steps: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_digests: Option<Vec<Digest>>,
    wall_seconds: f64,
}

pub(crate) fn print_digests(reading: &Reading, by_step: bool, printer: &Printer) -> anyhow::Result<()> {
    let started = Instant::now();
    let reader = reading.open_with_kept(true)?;
    printer.begin("reading", Some(reader.samples()), "samples");
    let mut all = Digest::default();
    let mut of_steps = by_step.then(Vec::new);
    let (mut samples, mut steps) = (0, 0);
    for batch in reader.batches()? {
        let batch = batch?.batch;
        let of_batch = digest(&batch, reader.schema());
        all.merge(of_batch);
        of_steps.iter_mut().for_each(|digests| digests.push(of_batch));
        samples += batch.size() as u64;
        steps += 1;
        printer.advance(batch.size() as u64);
        printer.go_on()?;
    }
    printer.end();
    let wall_seconds = started.elapsed().as_secs_f64();
    let digests = Digests { digest: all, samples, steps, step_digests: of_steps, wall_seconds };
    Ok(printer.summary(&describe(&digests), &digests)?)
}

fn describe(digests: &Digests) -> String {
    let mut text = String::new();
    for (step, digest) in digests.step_digests.iter().flatten().enumerate() {
        let _ = writeln!(text, "step {step:<9} {digest}");
    }
    let Digests { digest, samples, steps, .. } = digests;
    let _ = write!(
        text,
        "digest         {digest}\n{} in {}",
        count_of(*samples, "sample"),
        count_of(*steps, "step")
    );
    text
}
