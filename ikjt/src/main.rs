//! `onefold-read`: looks at a dataset's batches and measures how fast they come.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand, ValueEnum};
use onefold_datasets::console::{self, OutputOptions, Printer, Reporter, available_threads, peak_rss_bytes};
use onefold_datasets::units::{format_bytes, format_count};
use onefold_datasets::{PartitionFilter, Schema};
use onefold_ikjt::{Batch, Dedupe, Group, Reader, ReaderOptions};
use serde::Serialize;

/// Read datasets as deduplicated batches
#[derive(Debug, Parser)]
#[command(name = "onefold-read", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the first samples of the first batch, and how the batch is deduplicated
    ///
    /// Example: onefold-read head dataset --batch-size 512 --samples 5
    Head {
        #[command(flatten)]
        reading: Reading,
        /// Samples to show
        #[arg(long, default_value_t = 5)]
        samples: usize,
    },
    /// Read everything once and report the rate, the dedupe factors and the memory
    ///
    /// Example: onefold-read bench dataset --batch-size 2048 --dedupe exact --threads 2 --json
    Bench {
        #[command(flatten)]
        reading: Reading,
    },
}

#[derive(Debug, clap::Args)]
struct Reading {
    /// Directory of the dataset
    dataset: PathBuf,
    /// Samples per batch
    #[arg(long, default_value_t = 2048)]
    batch_size: usize,
    /// Whether rows are deduplicated
    #[arg(long, value_enum, default_value_t = DedupeArgument::Exact)]
    dedupe: DedupeArgument,
    /// Threads that decode and deduplicate [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Which partitions, as `split=train,date>=2024-05-01` [default: all]
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    partitions: PartitionFilter,
    /// Sparse features to read, joined by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Option<Vec<String>>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DedupeArgument {
    /// Every sample carries its lists
    Off,
    /// Every distinct row of a feature group once per batch
    Exact,
}

impl Reading {
    fn open(&self) -> anyhow::Result<Reader> {
        let options = ReaderOptions {
            batch_size: self.batch_size,
            dedupe: match self.dedupe {
                DedupeArgument::Off => Dedupe::Off,
                DedupeArgument::Exact => Dedupe::Exact,
            },
            threads: self.threads.map_or_else(available_threads, usize::from),
            partitions: self.partitions.clone(),
            features: self.features.clone(),
        };
        Ok(Reader::open(&self.dataset, options)?)
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printer = Printer::new(cli.output);
    console::run(|| match &cli.command {
        Command::Head { reading, samples } => head(reading, *samples, &printer),
        Command::Bench { reading } => bench(reading, &printer),
    })
}

/// How much a group of one or several batches is deduplicated.
#[derive(Debug, Default, Clone, Serialize)]
struct GroupFigures {
    samples: u64,
    rows: u64,
    sample_values: u64,
    row_values: u64,
    dedupe_factor: f64,
}

impl GroupFigures {
    fn add(&mut self, group: &Group) {
        self.samples += group.samples() as u64;
        self.rows += group.rows() as u64;
        self.sample_values += group.sample_values();
        self.row_values += group.row_values();
        self.dedupe_factor =
            if self.row_values == 0 { 1.0 } else { self.sample_values as f64 / self.row_values as f64 };
    }
}

#[derive(Debug, Serialize)]
struct Head {
    samples: usize,
    groups: BTreeMap<String, GroupFigures>,
    shown: Vec<Shown>,
}

/// One sample, by feature name.
#[derive(Debug, Serialize)]
struct Shown {
    labels: BTreeMap<String, f32>,
    dense: BTreeMap<String, f32>,
    rows: BTreeMap<String, usize>,
    sparse: BTreeMap<String, Vec<i64>>,
}

fn head(reading: &Reading, samples: usize, printer: &Printer) -> anyhow::Result<()> {
    let reader = reading.open()?;
    let Some(batch) = reader.batches()?.next().transpose()? else {
        anyhow::bail!("`{}` holds no samples\n  hint: build it from logs that do", reading.dataset.display());
    };
    let mut groups = BTreeMap::new();
    for group in batch.groups() {
        groups.entry(group.name().to_owned()).or_insert_with(GroupFigures::default).add(group);
    }
    let shown = (0..samples.min(batch.size())).map(|sample| show(&batch, reader.schema(), sample)).collect();
    let head = Head { samples: batch.size(), groups, shown };
    Ok(printer.summary(&describe_head(&head, &batch), &head)?)
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
        dense: floats(&schema.dense, batch.dense()),
        rows,
        sparse: lists.collect(),
    }
}

fn describe_head(head: &Head, batch: &Batch) -> String {
    let mut text = format!("batch of {} samples, {} dense features\n", head.samples, batch.dense_width());
    for group in batch.groups() {
        let figures = &head.groups[group.name()];
        let names: Vec<_> = group.features().iter().map(onefold_ikjt::Feature::name).collect();
        let _ = writeln!(
            text,
            "group {:<12} {:>6} rows for {} samples, dedupe factor {:.2}: {}",
            group.name(),
            group.rows(),
            group.samples(),
            figures.dedupe_factor,
            shorten(&names.join(", "), 80)
        );
    }
    for (i, sample) in head.shown.iter().enumerate() {
        let pairs = |map: &BTreeMap<String, f32>| {
            map.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
        };
        let _ = writeln!(text, "\nsample {i}   {}", pairs(&sample.labels));
        if !sample.dense.is_empty() {
            let _ = writeln!(text, "  {:<24} {}", "dense", shorten(&pairs(&sample.dense), 100));
        }
        for group in batch.groups() {
            for feature in group.features() {
                let row = sample.rows[group.name()];
                let ids = &sample.sparse[feature.name()];
                let place = format!("{}[{row}]", group.name());
                let ids = shorten(&format!("{ids:?}"), 80);
                let _ = writeln!(text, "  {:<24} {:<14} {ids}", shorten(feature.name(), 24), place);
            }
        }
    }
    text
}

fn shorten(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[derive(Debug, Serialize)]
struct Bench {
    samples: u64,
    batches: u64,
    batch_size: usize,
    values: u64,
    dedupe_factor: BTreeMap<String, f64>,
    groups: BTreeMap<String, GroupFigures>,
    bytes_on_disk: u64,
    wall_seconds: f64,
    samples_per_second: f64,
    values_per_second: f64,
    threads: usize,
    peak_rss_bytes: Option<u64>,
}

fn bench(reading: &Reading, printer: &Printer) -> anyhow::Result<()> {
    let reader = reading.open()?;
    printer.begin("reading", Some(reader.samples()?), "samples");
    let started = Instant::now();
    let (mut samples, mut batches) = (0, 0);
    let mut groups: BTreeMap<String, GroupFigures> = BTreeMap::new();
    for batch in reader.batches()? {
        let batch = batch?;
        samples += batch.size() as u64;
        batches += 1;
        for group in batch.groups() {
            groups.entry(group.name().to_owned()).or_default().add(group);
        }
        printer.advance(batch.size() as u64);
    }
    let wall_seconds = started.elapsed().as_secs_f64();
    printer.end();
    let values = groups.values().map(|group| group.sample_values).sum();
    let chosen = reader.manifest().select(&reading.partitions)?;
    let bench = Bench {
        samples,
        batches,
        batch_size: reading.batch_size,
        values,
        dedupe_factor: groups.iter().map(|(name, group)| (name.clone(), group.dedupe_factor)).collect(),
        groups,
        bytes_on_disk: chosen
            .iter()
            .flat_map(|partition| &partition.files)
            .map(|file| file.bytes_on_disk)
            .sum(),
        wall_seconds,
        samples_per_second: samples as f64 / wall_seconds,
        values_per_second: values as f64 / wall_seconds,
        threads: reading.threads.map_or_else(available_threads, usize::from),
        peak_rss_bytes: peak_rss_bytes(),
    };
    Ok(printer.summary(&describe_bench(&bench), &bench)?)
}

fn describe_bench(bench: &Bench) -> String {
    let mut text = format!(
        "{} samples in {} batches: {:.2} s, {} samples/s, {} ids/s, {} threads\n",
        format_count(bench.samples),
        format_count(bench.batches),
        bench.wall_seconds,
        format_count(bench.samples_per_second as u64),
        format_count(bench.values_per_second as u64),
        bench.threads,
    );
    for (name, group) in &bench.groups {
        let _ = writeln!(
            text,
            "group {name:<12} {:>12} rows for {} samples, dedupe factor {:.2}",
            format_count(group.rows),
            format_count(group.samples),
            group.dedupe_factor
        );
    }
    let _ = write!(text, "{} on disk", format_bytes(bench.bytes_on_disk));
    if let Some(bytes) = bench.peak_rss_bytes {
        let _ = write!(text, ", peak memory {}", format_bytes(bytes));
    }
    text
}
