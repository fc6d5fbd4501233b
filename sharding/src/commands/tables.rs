//! `onefold-shard tables` and `tasks`: what there is to place.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use onefold_datasets::console::Printer;
use onefold_datasets::units::format_bytes;
use onefold_datasets::{FeatureGroup, Manifest, Partition, PartitionFilter, suggest};
use onefold_sharding::{
    Error, Table, TableConfig, TableFile, TaskOptions, check_ids, claim_output, resolve_tables, tasks,
    torchrec,
};
use serde_json::json;

use crate::cli::{GroupFactor, TablesArguments, TasksArguments};
use crate::commands::counted;
use crate::train_config::TrainConfig;

/// Why a cost is lower than what training will take.
const ATTENTION_NOTE: &str = "one vector per id is priced, the attention block itself is not";

pub(crate) fn tables(arguments: &TablesArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let file = match (&arguments.torchrec, &arguments.config, &arguments.data) {
        (Some(path), ..) => torchrec::load_tables(path)?,
        (None, Some(config), Some(data)) => of_dataset(config, data, &arguments.dedupe_factor)?,
        // The command line asks for one or the other.
        _ => bail!("give a `train.toml` and `--data`, or `--torchrec`"),
    };
    file.store(out)?;
    summarize_tables(&file, arguments, printer)
}

/// The tables of a training configuration, with the ids per sample of the partitions that it trains on.
fn of_dataset(config_path: &Path, data: &Path, given: &[GroupFactor]) -> Result<TableFile> {
    let config = TrainConfig::load(config_path)?;
    let manifest = Manifest::load(data)?;
    let in_config = || format!("`{}`", config_path.display());
    let configs =
        resolve_tables(&config.embedding, &config.tables, &manifest.schema).with_context(in_config)?;
    check_ids(&configs, &manifest.statistics.features).with_context(in_config)?;
    let filter = PartitionFilter::parse(&config.data.train).with_context(in_config)?;
    let counts = Counts::of(&manifest, &filter).with_context(|| format!("`{}`", data.display()))?;
    let factors = dedupe_factors(given, &manifest.schema.groups)?;
    let mut tables = Vec::with_capacity(configs.len());
    for config_of_table in &configs {
        let mut table = counts.table(config_of_table).with_context(|| format!("`{}`", data.display()))?;
        table.optimizer = config.optimizer.tables.kind;
        table.dedupe_factor = factor_of(&table.name, &factors);
        tables.push(table);
    }
    TableFile::new(config.train.batch_size, tables).with_context(in_config)
}

/// The groups that were given a factor.
fn dedupe_factors<'a>(
    given: &[GroupFactor],
    groups: &'a [FeatureGroup],
) -> Result<Vec<(&'a FeatureGroup, f64)>, Error> {
    let mut factors: Vec<(&FeatureGroup, f64)> = Vec::with_capacity(given.len());
    for GroupFactor { group: name, factor } in given {
        let wrong = |message: String, hint: String| Err(Error::Invalid { message, hint });
        let Some(group) = groups.iter().find(|group| group.name == *name) else {
            let hint = suggest(name, groups.iter().map(|group| group.name.as_str()));
            return wrong(
                format!("`--dedupe-factor {name}={factor}`: the dataset has no feature group `{name}`"),
                hint,
            );
        };
        if !group.deduplicated {
            let message =
                format!("`--dedupe-factor {name}={factor}`: the group `{name}` is never deduplicated");
            return wrong(message, "leave it out; its factor is 1".to_owned());
        }
        if factors.iter().any(|(other, _)| other.name == *name) {
            let message = format!("`--dedupe-factor` is given twice for the group `{name}`");
            return wrong(message, "give it once".to_owned());
        }
        factors.push((group, *factor));
    }
    Ok(factors)
}

fn factor_of(feature: &str, factors: &[(&FeatureGroup, f64)]) -> f64 {
    let holds = |group: &FeatureGroup| group.features.iter().any(|member| member.name == feature);
    factors.iter().find(|(group, _)| holds(group)).map_or(1.0, |(_, factor)| *factor)
}

/// Samples and ids of the partitions that are trained on.
struct Counts<'a> {
    samples: u64,
    values: Vec<(&'a str, u64)>,
}

impl<'a> Counts<'a> {
    fn of(manifest: &'a Manifest, filter: &PartitionFilter) -> Result<Self, Error> {
        let wrong = |message: String, hint: &str| Error::Invalid { message, hint: hint.to_owned() };
        let mut chosen: Vec<&Partition> = Vec::new();
        for partition in &manifest.partitions {
            if filter.matches(&partition.key)? {
                chosen.push(partition);
            }
        }
        let all = chosen.len() == manifest.partitions.len();
        let statistics = &manifest.statistics;
        let samples = if all { statistics.samples } else { chosen.iter().map(|part| part.samples).sum() };
        if samples == 0 {
            let (message, hint) = if filter.to_string().is_empty() {
                ("the dataset has no samples".to_owned(), "build it from logs that have some")
            } else {
                (
                    format!("no partition with samples fits `train = \"{filter}\"`"),
                    "correct `train` under `[data]`, or build the dataset with such partitions",
                )
            };
            return Err(wrong(format!("{message}, so the ids per sample are not known"), hint));
        }
        let values = if all {
            statistics.features.iter().map(|(name, found)| (name.as_str(), found.values)).collect()
        } else {
            if let Some(partition) = chosen.iter().find(|part| part.samples > 0 && part.features.is_empty()) {
                return Err(wrong(
                    format!("the partition `{}` has no figures of its own", partition.key),
                    "build the dataset again with `onefold-ingest build`, or leave `train` under `[data]` out",
                ));
            }
            let of_feature = |name: &'a String| {
                let of_partition =
                    |part: &&Partition| part.features.get(name).map_or(0, |found| found.values);
                (name.as_str(), chosen.iter().map(of_partition).sum())
            };
            statistics.features.keys().map(of_feature).collect()
        };
        Ok(Self { samples, values })
    }

    /// A table of the configured size, looked up as often as was counted.
    fn table(&self, config: &TableConfig) -> Result<Table, Error> {
        let name = &config.feature;
        let Some((_, values)) = self.values.iter().find(|(other, _)| other == name) else {
            let message = format!("the dataset's statistics lack the feature `{name}`");
            let hint = "build the dataset again with `onefold-ingest build`".to_owned();
            return Err(Error::Invalid { message, hint });
        };
        let pooling_factor = *values as f64 / self.samples as f64;
        Ok(Table { pooling: config.pooling, pooling_factor, ..Table::new(name, config.rows, config.dim) })
    }
}

fn summarize_tables(file: &TableFile, arguments: &TablesArguments, printer: &Printer) -> Result<()> {
    let mut bytes = 0u64;
    for table in &file.tables {
        bytes = bytes.saturating_add(table.memory_bytes()?);
    }
    let out = &arguments.output.out;
    let count = file.tables.len();
    let memory = format_bytes(bytes);
    let mut text = format!(
        "{} of {memory} with optimizer state, written to `{}`",
        counted(count as u64, "table"),
        out.display()
    );
    let attention: Vec<&str> = file
        .tables
        .iter()
        .filter(|table| table.pooling.is_sequence())
        .map(|table| table.name.as_str())
        .collect();
    if !attention.is_empty() {
        let _ = write!(text, "\nPooled by attention: {} ({ATTENTION_NOTE})", attention.join(", "));
    }
    if file.tables.iter().all(|table| table.dedupe_factor == 1.0) {
        text.push_str("\nEvery dedupe factor is 1; give those that `onefold-read bench` measures with `--dedupe-factor`");
    }
    let json = json!({
        "table_file": out,
        "tables": count,
        "batch_size": file.batch_size,
        "memory_bytes": bytes,
        "attention_tables": attention,
    });
    Ok(printer.summary(&text, &json)?)
}

pub(crate) fn tasks_command(arguments: &TasksArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.out;
    if out.exists() {
        let message = format!("`{}` already exists", out.display());
        return Err(Error::Invalid { message, hint: "choose another directory".to_owned() }.into());
    }
    let options = TaskOptions {
        max_dim: arguments.max_dim,
        memory_bytes: arguments.memory,
        samples: arguments.samples,
        ..TaskOptions::new(arguments.tables.clone(), arguments.ranks, arguments.count, arguments.seed)
    };
    let drawn = tasks(&options)?;
    // Written beside, so that the directory appears whole.
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside = tempfile::Builder::new().prefix(".tasks").tempdir_in(parent);
    let beside = beside.with_context(|| format!("`{}` cannot be written into", parent.display()))?;
    for task in &drawn {
        task.store(beside.path())?;
    }
    fs_err::rename(beside.path(), out)?;
    // It is elsewhere by now.
    let _ = beside.keep();
    let count: usize = drawn.iter().map(|task| task.tables.tables.len()).sum();
    let text = format!(
        "{} of {:.1} tables on average for {}, written to `{}`",
        counted(drawn.len() as u64, "task"),
        count as f64 / drawn.len().max(1) as f64,
        counted(u64::from(options.ranks), "rank"),
        out.display()
    );
    let json = json!({ "tasks": out, "count": drawn.len(), "ranks": options.ranks, "tables": count });
    Ok(printer.summary(&text, &json)?)
}
