//! The commands of `onefold-shard`, one function each.

use std::fmt::Write;
use std::time::Instant;

use anyhow::{Context, Result};
use onefold_datasets::console::Printer;
use onefold_datasets::units::{format_bytes, format_count};
use onefold_datasets::{FeatureGroup, Manifest, suggest};
use onefold_sharding::{
    AnalyticCost, Error, GreedyBySize, Plan, Pooling, Search, Table, TableConfig, TableFile, Topology,
    check_ids, claim_output, resolve_tables,
};
use serde_json::{Value, json};

use crate::cli::{CheckArguments, GroupFactor, PlanArguments, TablesArguments, TopologyArguments};
use crate::train_config::TrainConfig;

/// Why a cost is lower than what training will take.
const ATTENTION_NOTE: &str = "one vector per id is priced, the attention block itself is not";

pub(crate) fn plan(arguments: &PlanArguments, printer: &Printer) -> Result<()> {
    let started = Instant::now();
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let tables = TableFile::load(&arguments.inputs.tables)?;
    let topology = Topology::load(&arguments.inputs.topology)?;
    let planning = Instant::now();
    let plan = GreedyBySize.plan(&tables.tables, &topology, &AnalyticCost, tables.batch_size)?;
    let plan_seconds = planning.elapsed().as_secs_f64();
    plan.check(&tables.tables, &topology)?;
    plan.store(out)?;

    let mut text = rank_table(&plan);
    let _ =
        writeln!(text, "\nPlanned in {plan_seconds:.3} s by {}, written to `{}`", plan.search, out.display());
    let mut json = plan_figures(&plan);
    json["plan"] = json!(out);
    json["plan_seconds"] = json!(plan_seconds);
    json["wall_seconds"] = json!(started.elapsed().as_secs_f64());
    Ok(printer.summary(&text, &json)?)
}

/// What `--json` says about a plan.
fn plan_figures(plan: &Plan) -> Value {
    json!({
        "tables": plan.tables.len(),
        "ranks": plan.topology.ranks,
        "batch_size": plan.batch_size,
        "search": plan.search,
        "cost_model": plan.cost_model,
        "max_cost_ms": plan.max_cost_ms,
        "bottleneck_rank": plan.bottleneck().map(|rank| rank.rank),
        "max_memory_bytes": fullest_bytes(plan),
        "memory_limit_bytes": plan.topology.memory_bytes,
    })
}

/// The memory of the fullest rank.
fn fullest_bytes(plan: &Plan) -> u64 {
    plan.ranks.iter().map(|rank| rank.memory_bytes).max().unwrap_or(0)
}

/// One line per rank, and which is the slowest.
fn rank_table(plan: &Plan) -> String {
    let mut shards = vec![0usize; plan.ranks.len()];
    for shard in plan.tables.iter().flat_map(|table| &table.shards) {
        if let Some(count) = shards.get_mut(shard.rank as usize) {
            *count += 1;
        }
    }
    let mut text = "rank  tables      memory   compute ms   communication ms      cost ms\n".to_owned();
    for (rank, shards) in plan.ranks.iter().zip(shards) {
        let (memory, cost) = (format_bytes(rank.memory_bytes), rank.cost_ms());
        let (index, compute, communication) = (rank.rank, rank.compute_ms, rank.communication_ms);
        let _ = writeln!(
            text,
            "{index:>4}  {shards:>6}  {memory:>10}  {compute:>11.4}  {communication:>17.4}  {cost:>11.4}"
        );
    }
    let bottleneck = plan.bottleneck().map_or(0, |rank| rank.rank);
    let _ = writeln!(
        text,
        "\nBottleneck: rank {bottleneck} with {:.4} ms per step of {} samples per rank, by {}",
        plan.max_cost_ms,
        format_count(plan.batch_size),
        plan.cost_model
    );
    let (fullest, limit) = (format_bytes(fullest_bytes(plan)), format_bytes(plan.topology.memory_bytes));
    let _ = write!(text, "Memory: the fullest rank holds {fullest} of {limit}");
    text
}

pub(crate) fn check(arguments: &CheckArguments, printer: &Printer) -> Result<()> {
    let plan = Plan::load(&arguments.plan)?;
    let tables = TableFile::load(&arguments.inputs.tables)?;
    let topology = Topology::load(&arguments.inputs.topology)?;
    plan.check(&tables.tables, &topology).with_context(|| format!("`{}`", arguments.plan.display()))?;

    let (path, count, ranks) = (arguments.plan.display(), plan.tables.len(), topology.ranks);
    let (fullest, limit) = (format_bytes(fullest_bytes(&plan)), format_bytes(topology.memory_bytes));
    let mut text = format!(
        "`{path}` is valid: {} on {}, the fullest rank holds {fullest} of {limit}",
        counted(count as u64, "table"),
        counted(u64::from(ranks), "rank"),
    );
    let current = predictions_are_for(&plan, &topology, tables.batch_size);
    if !current {
        text.push_str(
            "\nIts predicted times are for other bandwidths or another batch size; plan again to renew them",
        );
    }
    let mut json = plan_figures(&plan);
    json["plan"] = json!(arguments.plan);
    json["valid"] = json!(true);
    json["predictions_current"] = json!(current);
    json["memory_limit_bytes"] = json!(topology.memory_bytes);
    Ok(printer.summary(&text, &json)?)
}

/// Whether the plan's times were predicted for this topology and batch size.
fn predictions_are_for(plan: &Plan, topology: &Topology, batch_size: u64) -> bool {
    let bandwidths = |topology: &Topology| {
        [
            topology.memory_bandwidth_bytes_per_second,
            topology.intra_node_bandwidth_bytes_per_second,
            topology.inter_node_bandwidth_bytes_per_second,
        ]
    };
    // A number that went through a JSON file may come back with another last bit.
    let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-9 * b;
    plan.batch_size == batch_size
        && bandwidths(&plan.topology).into_iter().zip(bandwidths(topology)).all(close)
}

pub(crate) fn topology(arguments: &TopologyArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let topology = topology_of(arguments)?;
    topology.store(out)?;

    let text = format!(
        "{} of {} each, {} a machine, written to `{}`",
        counted(u64::from(topology.ranks), "rank"),
        format_bytes(topology.memory_bytes),
        topology.ranks_per_node,
        out.display()
    );
    let json = json!({
        "topology": out,
        "ranks": topology.ranks,
        "ranks_per_node": topology.ranks_per_node,
        "memory_limit_bytes": topology.memory_bytes,
    });
    Ok(printer.summary(&text, &json)?)
}

fn topology_of(arguments: &TopologyArguments) -> Result<Topology, Error> {
    let ranks_per_node =
        arguments.ranks_per_node.unwrap_or(arguments.ranks.min(Topology::H100_RANKS_PER_NODE));
    let topology = Topology {
        ranks: arguments.ranks,
        ranks_per_node,
        memory_bandwidth_bytes_per_second: arguments.memory_bandwidth,
        intra_node_bandwidth_bytes_per_second: arguments.intra_node_bandwidth,
        inter_node_bandwidth_bytes_per_second: arguments.inter_node_bandwidth,
        ..Topology::h100(1, arguments.memory)?
    };
    topology.validate()?;
    Ok(topology)
}

pub(crate) fn tables(arguments: &TablesArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let config = TrainConfig::load(&arguments.config)?;
    let manifest = Manifest::load(&arguments.data)?;
    let in_config = || format!("`{}`", arguments.config.display());
    let configs =
        resolve_tables(&config.embedding, &config.tables, &manifest.schema).with_context(in_config)?;
    check_ids(&configs, &manifest.statistics.features).with_context(in_config)?;
    let factors = dedupe_factors(&arguments.dedupe_factor, &manifest.schema.groups)?;
    let mut tables = Vec::with_capacity(configs.len());
    for config_of_table in &configs {
        let mut table = measured_table(config_of_table, &manifest)
            .with_context(|| format!("`{}`", arguments.data.display()))?;
        table.optimizer = config.optimizer.tables.kind;
        table.dedupe_factor = factor_of(&table.name, &factors);
        tables.push(table);
    }
    let file = TableFile::new(config.train.batch_size, tables).with_context(in_config)?;
    file.store(out)?;
    summarize_tables(&file, arguments, printer)
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

/// A table of the configured size, looked up as often as the dataset's statistics say.
fn measured_table(config: &TableConfig, manifest: &Manifest) -> Result<Table, Error> {
    let name = &config.feature;
    let statistics = &manifest.statistics;
    if statistics.samples == 0 {
        let message = "the dataset has no samples, so the ids per sample are not known".to_owned();
        return Err(Error::Invalid { message, hint: "build it from logs that have some".to_owned() });
    }
    let Some(feature) = statistics.features.get(name) else {
        let message = format!("the dataset's statistics lack the feature `{name}`");
        return Err(Error::Invalid {
            message,
            hint: "build the dataset again with `onefold-ingest build`".to_owned(),
        });
    };
    let pooling_factor = feature.values as f64 / statistics.samples as f64;
    Ok(Table { pooling: config.pooling, pooling_factor, ..Table::new(name, config.rows, config.dim) })
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
        .filter(|table| table.pooling == Pooling::Attention)
        .map(|table| table.name.as_str())
        .collect();
    if !attention.is_empty() {
        let _ = write!(text, "\nPooled by attention: {} ({ATTENTION_NOTE})", attention.join(", "));
    }
    if arguments.dedupe_factor.is_empty() {
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

/// `1 table`, `2 tables`, `1,234 tables`.
fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", format_count(count), if count == 1 { "" } else { "s" })
}
