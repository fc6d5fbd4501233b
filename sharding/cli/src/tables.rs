//! `onefold-shard tables`: describes the tables to place.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use onefold_base::fault::{Fault, Kind, Text, option, text};
use onefold_base::units::{abridged, count_of, format_bytes, format_count};
use onefold_datasets::{FeatureGroup, PartitionFilter, Schema, Snapshot, suggest};
use onefold_ikjt::preprocess::{PreprocessConfig, Preprocessor};
use onefold_ikjt::{Checks, Rank, ReadRequest, ReaderOptions, load_snapshot, load_statistics};
use onefold_sharding::{
    ACCESS_BATCH, Error, FeatureConfig, FeatureLookups, IdPolicy, Lookups, Table, TableFile, claim_output,
    tables_of, torchrec,
};
use onefold_terminal::Printer;
use onefold_train_config::TrainConfig;
use serde_json::json;

use crate::cli::{GroupFactor, TablesArguments};
use crate::earlier::EarlierRun;
use crate::measured::measure_features;

/// The reason why the predicted cost of a table is too low.
const SEQUENCE_NOTE: &str = "one vector per id is priced, the model's block that pools them is not";

pub(crate) fn tables(arguments: &TablesArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let file = match (&arguments.torchrec, &arguments.config, &arguments.data) {
        (Some(path), ..) => torchrec::load_tables(path)?,
        (None, Some(config), Some(data)) => of_dataset(config, data, arguments, printer)?,
        // The command line requires one or the other.
        _ => {
            let message = text!["give a `train.toml` and ", option("data"), ", or ", option("torchrec")];
            bail!(Fault::new(Kind::Options, message));
        }
    };
    file.store(out)?;
    summarize_tables(&file, arguments, printer)
}

/// A training configuration and its dataset.
struct Training<'a> {
    config_path: &'a Path,
    data: &'a Path,
    config: TrainConfig,
    snapshot: Snapshot,
    filter: PartitionFilter,
    steps: Option<PreprocessConfig>,
    /// The schema of the batches after the preprocessing steps.
    schema: Schema,
    configs: Vec<FeatureConfig>,
}

/// Returns the tables of a training configuration, with the lookups of the partitions on which it trains.
fn of_dataset(
    config_path: &Path,
    data: &Path,
    arguments: &TablesArguments,
    printer: &Printer,
) -> Result<TableFile> {
    let training = Training::load(config_path, data, arguments)?;
    let factors = dedupe_factors(&arguments.dedupe_factor, &training.schema.groups)?;
    let mut tables = training.tables(arguments.samples)?;
    if arguments.samples > 0 {
        training.count(&mut tables, arguments, printer)?;
    }
    for table in &mut tables {
        table.optimizer = training.config.optimizer.tables.kind;
        if let Some(factor) = factor_of(&table.name, &factors) {
            let counted = table.first.clone();
            table.first = Lookups {
                dedupe_factor: factor,
                list_dedupe_factor: None,
                list_length_deviation: None,
                ..counted
            };
        }
    }
    let mut tables = shared(tables, &training.configs);
    for table in &mut tables {
        table.torchrec_name = Some(torchrec::table_name(&table.name));
    }
    TableFile::new(training.config.train.batch_size as u64, tables)
        .with_context(|| format!("`{}`", config_path.display()))
}

/// Merges one table per feature into the actual tables: features that share a table become one table with the lookups
/// of all of them.
fn shared(of_features: Vec<Table>, configs: &[FeatureConfig]) -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    let (shared, numbers) = tables_of(configs);
    for (own, number) in of_features.into_iter().zip(numbers) {
        let name = shared[number].name.clone();
        match tables.get_mut(number) {
            None if name == own.name => tables.push(own),
            None => tables.push(Table { feature: Some(own.name), name, ..own }),
            Some(table) => {
                table.further_features.push(FeatureLookups { feature: own.name, lookups: own.first });
            }
        }
    }
    tables
}

impl<'a> Training<'a> {
    fn load(config_path: &'a Path, data: &'a Path, arguments: &TablesArguments) -> Result<Self> {
        let config = TrainConfig::load(config_path)?;
        let earlier = arguments.warm_start.as_deref().or(arguments.resume.as_deref());
        let earlier = earlier.map(EarlierRun::load).transpose()?;
        let resumed = earlier.as_ref().filter(|_| arguments.resume.is_some()).map(|run| run.snapshot);
        let snapshot = load_snapshot(data, arguments.at.or(resumed))?;
        let in_config = || format!("`{}`", config_path.display());
        let steps = config.data.preprocess.as_ref();
        let steps = steps.map(|path| PreprocessConfig::load(&config.directory().join(path)));
        let steps = steps.transpose()?;
        let preprocessor = steps.as_ref().map(|steps| Preprocessor::try_new(steps, &snapshot.schema));
        let preprocessor = preprocessor.transpose()?;
        let schema = preprocessor.as_ref().map_or(&snapshot.schema, Preprocessor::schema).clone();
        let before = earlier.as_ref().map_or(&[][..], |run| &run.tables);
        let configs = config.features(&snapshot, preprocessor.as_ref(), before)?;
        let filter = config.train_partitions(&snapshot).with_context(in_config)?;
        Ok(Self { config_path, data, config, snapshot, filter, steps, schema, configs })
    }

    /// Returns one table per feature, with the dataset's statistics. If batches are preprocessed, the statistics do
    /// not apply, and the lists have to be counted.
    fn tables(&self, samples: u64) -> Result<Vec<Table>> {
        if self.steps.is_some() {
            if samples == 0 {
                let message = format!(
                    "`{}`: batches are preprocessed, so the dataset's statistics are not those of the tables",
                    self.config_path.display()
                );
                return Err(
                    Error::invalid(message, text!["leave ", option("samples").set_to(0), " out"]).into()
                );
            }
            return Ok(self.configs.iter().map(table_of).collect());
        }
        let in_config = || format!("`{}`", self.config_path.display());
        let samples = self.snapshot.chosen_samples(&self.filter).with_context(in_config)?;
        let (data, all) = (self.data, &self.snapshot.statistics);
        if samples == 0 {
            let message = format!("`{}` has no samples, so the ids per sample are not known", data.display());
            return Err(Error::invalid(message, "build it from logs that have some").into());
        }
        let features = match samples == all.samples {
            true => all.features.clone(),
            false => load_statistics(data, &self.snapshot, &self.filter)?.features,
        };
        let table = |config: &FeatureConfig| {
            let name = &config.feature;
            let Some(found) = features.get(name) else {
                let message = format!("the statistics of `{}` lack the feature `{name}`", data.display());
                return Err(Error::invalid(message, "build the dataset again with `onefold-ingest build`"));
            };
            let mut table = table_of(config);
            table.first.pooling_factor = found.values as f64 / samples as f64;
            Ok(table)
        };
        Ok(self.configs.iter().map(table).collect::<Result<_, _>>()?)
    }

    /// Reads batches as the training does, and counts the values that the statistics do not contain.
    fn count(&self, tables: &mut [Table], arguments: &TablesArguments, printer: &Printer) -> Result<()> {
        let samples = arguments.samples;
        let checked = self.configs.iter().filter(|config| config.ids == IdPolicy::Checked);
        let batch_size = self.config.train.batch_size;
        let options = ReaderOptions {
            partitions: self.filter.clone(),
            // A later commit does not change the counted samples.
            snapshot: Some(self.snapshot.snapshot),
            shuffle: self.config.data.shuffle,
            streams: self.config.data.streams,
            dedupe: arguments.dedupe,
            preprocess: self.steps.clone(),
            ..ReaderOptions::new(batch_size)
        };
        let table_rows = checked.map(|config| (config.feature.clone(), config.rows)).collect();
        let checks = Checks { table_rows, ..Checks::default() };
        let request = ReadRequest { options, checks, rank: Rank::default() };
        let measured =
            measure_features(self.data, &self.configs, request, (samples, arguments.memory_limit), printer)?;
        for (table, found) in tables.iter_mut().zip(measured.features) {
            // Statistics cover all samples.
            let pooling_factor =
                if self.steps.is_some() { found.pooling_factor } else { table.first.pooling_factor };
            table.first = Lookups { pooling_factor, ..found };
        }
        if measured.samples < ACCESS_BATCH.min(samples) {
            printer.remark(&format!(
                "lookups were counted in {} samples, of the {} that reuse is defined over: reuse is underestimated",
                format_count(measured.samples),
                format_count(ACCESS_BATCH)
            ));
        }
        Ok(())
    }
}

/// Returns a table of the configured size for a feature.
fn table_of(config: &FeatureConfig) -> Table {
    let (pooling, dtype) = (config.pooling, config.dtype);
    Table {
        dtype,
        first: Lookups { pooling, ..Lookups::default() },
        ..Table::new(&config.feature, config.rows, config.dim)
    }
}

/// Returns the feature groups for which a factor is given.
fn dedupe_factors<'a>(
    given: &[GroupFactor],
    groups: &'a [FeatureGroup],
) -> Result<Vec<(&'a FeatureGroup, f64)>, Error> {
    let mut factors: Vec<(&FeatureGroup, f64)> = Vec::with_capacity(given.len());
    for GroupFactor { group: name, factor } in given {
        let given = option("dedupe_factor");
        let wrong = |message: Text, hint: String| Err(Error::invalid(message, hint));
        let Some(group) = groups.iter().find(|group| group.name == *name) else {
            let hint = suggest(name, groups.iter().map(|group| group.name.as_str()));
            let given = given.set_to(format!("{name}={factor}"));
            return wrong(text![given, format!(": the dataset has no feature group `{name}`")], hint);
        };
        if !group.deduplicated {
            let given = given.set_to(format!("{name}={factor}"));
            let message = text![given, format!(": the group `{name}` is never deduplicated")];
            return wrong(message, "leave it out; its factor is 1".to_owned());
        }
        if factors.iter().any(|(other, _)| other.name == *name) {
            let message = text![given, format!(" is given twice for the group `{name}`")];
            return wrong(message, "give it once".to_owned());
        }
        factors.push((group, *factor));
    }
    Ok(factors)
}

fn factor_of(feature: &str, factors: &[(&FeatureGroup, f64)]) -> Option<f64> {
    let holds = |group: &FeatureGroup| group.features.iter().any(|member| member.name == feature);
    factors.iter().find(|(group, _)| holds(group)).map(|(_, factor)| *factor)
}

/// Lists the tables in which one of four equal blocks of rows has more than half of a feature's lookups.
fn uneven_lookups(tables: &[Table]) -> Option<String> {
    let mut uneven = Vec::new();
    for table in tables {
        let block = table.rows.div_ceil(4);
        let quarters = (0..4).map(|i| (i * block).min(table.rows)..((i + 1) * block).min(table.rows));
        let share =
            |rows| table.lookups().map(|lookups| lookups.share_of(&rows, table.rows)).fold(0.0, f64::max);
        let most = quarters.map(share).fold(0.0, f64::max);
        if table.rows >= 4 && most > 0.5 {
            uneven.push(format!("{} ({:.0} %)", table.name, most * 100.0));
        }
    }
    let listed = abridged(&uneven).join(", ");
    (!uneven.is_empty()).then(|| {
        format!(
            "A quarter of the rows has most of the lookups: {listed}; a row-wise shard of them is as busy"
        )
    })
}

/// Lists the features whose lists are windows that share elements of their timelines.
fn shared_elements(tables: &[Table]) -> Option<String> {
    let features = tables.iter().flat_map(|table| table.feature_names().zip(table.lookups()));
    let windows = features.filter(|(_, lookups)| lookups.window_factor >= 1.01);
    let windows: Vec<String> =
        windows.map(|(feature, lookups)| format!("{feature} ({:.2})", lookups.window_factor)).collect();
    (!windows.is_empty())
        .then(|| format!("Windows share elements, ids an element: {}", abridged(&windows).join(", ")))
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
        count_of(count as u64, "table"),
        out.display()
    );
    let sequences: Vec<&str> = file
        .tables
        .iter()
        .filter(|table| table.lookups().any(|lookups| lookups.pooling.is_sequence()))
        .map(|table| table.name.as_str())
        .collect();
    if !sequences.is_empty() {
        let _ = write!(text, "\nPooled by the model: {} ({SEQUENCE_NOTE})", sequences.join(", "));
    }
    if file.tables.iter().flat_map(Table::lookups).all(|lookups| lookups.dedupe_factor == 1.0) {
        text.push_str(
            "\nEvery dedupe factor is 1: nothing is deduplicated, or nothing was read (`--samples 0`)",
        );
    }
    for line in [uneven_lookups(&file.tables), shared_elements(&file.tables)].into_iter().flatten() {
        let _ = write!(text, "\n{line}");
    }
    let json = json!({
        "table_file": out,
        "tables": count,
        "global_batch_size": file.global_batch_size,
        "memory_bytes": bytes,
        "sequence_tables": sequences,
    });
    Ok(printer.summary(&text, &json)?)
}
