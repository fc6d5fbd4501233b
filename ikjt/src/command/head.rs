//! `onefold-read head`: shows samples of a batch.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::batch::{Batch, Feature, Figures, Statistics};
use crate::reader::{Position, Step};
use anyhow::bail;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_datasets::Schema;
use onefold_terminal::Printer;
use serde::Serialize;

use super::cli::Reading;

#[derive(Debug, Serialize)]
struct Head {
    samples: usize,
    groups: Statistics,
    shown: Vec<Shown>,
}

/// One sample. Values are by feature name, rows by group name.
#[derive(Debug, Serialize)]
struct Shown {
    labels: BTreeMap<String, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<f32>,
    dense: BTreeMap<String, f32>,
    /// The kept columns; a null is `None`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    kept: BTreeMap<String, Option<String>>,
    rows: BTreeMap<String, usize>,
    sparse: BTreeMap<String, Vec<i64>>,
}

pub(crate) fn head(reading: &Reading, samples: usize, number: u64, printer: &Printer) -> anyhow::Result<()> {
    let reader = reading.open_with_kept(false)?;
    if reader.samples() == 0 {
        let message = format!("`{}` holds no samples", reading.dataset.display());
        bail!(Fault::new(Kind::Failed, message).hint("build it from logs that do"));
    }
    let first = reader.position(0);
    let steps = reader.steps(first.epoch)?;
    if number >= steps {
        let size = first.global_batch_size;
        let hint = match steps.checked_sub(1) {
            Some(last) => text![format!("with {size} samples each, the last one is {last}")],
            None => text![format!("no batch has {size} samples: give `short` as "), option("tail")],
        };
        bail!(Fault::new(Kind::Options, format!("there is no batch {number}")).hint(hint));
    }
    let Some(Step { batch, .. }) = reader.resume(&Position { step: number, ..first })?.next().transpose()?
    else {
        bail!("there is no batch {number}");
    };
    let mut groups = Statistics::default();
    groups.add(&batch);
    let shown = (0..samples.min(batch.size())).map(|sample| show(&batch, reader.schema(), sample)).collect();
    let head = Head { samples: batch.size(), groups, shown };
    Ok(printer.summary(&describe(&head, &batch, number), &head)?)
}

fn show(batch: &Batch, schema: &Schema, sample: usize) -> Shown {
    let floats = |names: &[String], matrix: &[f32]| {
        let row = matrix.iter().skip(sample * names.len()).copied();
        names.iter().cloned().zip(row).collect()
    };
    let rows = batch.groups().iter().map(|group| (group.name().to_owned(), group.row_of(sample))).collect();
    let lists = batch.groups().iter().flat_map(|group| {
        let row = group.row_of(sample);
        group.features().iter().map(move |feature| (feature.name().to_owned(), feature.row(row).to_vec()))
    });
    Shown {
        labels: floats(&schema.labels, batch.labels()),
        weight: batch.weights().map(|weights| weights[sample]),
        dense: floats(&schema.dense, batch.dense()),
        kept: batch.kept().iter().map(|column| (column.name.to_string(), column.shown(sample))).collect(),
        rows,
        sparse: lists.collect(),
    }
}

fn describe(head: &Head, batch: &Batch, number: u64) -> String {
    let mut text =
        format!("batch {number} of {} samples, {} dense features\n", head.samples, batch.dense_width());
    for group in batch.groups() {
        let figures = &head.groups.groups()[group.name()].figures;
        let names: Vec<_> = group.features().iter().map(Feature::name).collect();
        let _ = writeln!(
            text,
            "group {:<12} {:>6} rows for {} samples, {}: {}",
            group.name(),
            group.rows(),
            group.samples(),
            describe_factors(figures),
            shorten(&names.join(", "), 80)
        );
    }
    for (i, sample) in head.shown.iter().enumerate() {
        describe_sample(&mut text, batch, head, i, sample);
    }
    text
}

/// Describes one sample. If a group has the same row as the sample above, its lists are not repeated.
fn describe_sample(text: &mut String, batch: &Batch, head: &Head, i: usize, sample: &Shown) {
    let pairs = |map: &BTreeMap<String, f32>| {
        map.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
    };
    let weight = sample.weight.map(|weight| format!(" weight={weight}")).unwrap_or_default();
    let _ = writeln!(text, "\nsample {i}   {}{weight}", pairs(&sample.labels));
    if !sample.dense.is_empty() {
        let _ = writeln!(text, "  {:<24} {}", "dense", shorten(&pairs(&sample.dense), 100));
    }
    if !sample.kept.is_empty() {
        let shown = |(name, value): (&String, &Option<String>)| {
            format!("{name}={}", value.as_deref().unwrap_or("null"))
        };
        let kept = sample.kept.iter().map(shown).collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "  {:<24} {}", "kept", shorten(&kept, 100));
    }
    for group in batch.groups() {
        let row = sample.rows[group.name()];
        let above = i.checked_sub(1).map(|above| head.shown[above].rows[group.name()]);
        if group.inverse().is_some() && above == Some(row) {
            let place = format!("{}[{row}]", group.name());
            let _ = writeln!(text, "  {:<24} {place:<14} as in the sample above", "″");
            continue;
        }
        for feature in group.features() {
            let ids = &sample.sparse[feature.name()];
            let place = format!("{}[{row}]", group.name());
            let ids = shorten(&format!("{ids:?}"), 80);
            let _ = writeln!(text, "  {:<24} {place:<14} {ids}", shorten(feature.name(), 24));
        }
    }
}

/// Describes the dedupe factor, and the factor with windows if it is different.
pub(crate) fn describe_factors(figures: &Figures) -> String {
    let mut text = format!("dedupe factor {:.2}", figures.dedupe_factor());
    if figures.stored_values < figures.row_values {
        let _ = write!(text, " ({:.2} with windows)", figures.partial_dedupe_factor());
    }
    text
}

fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}
