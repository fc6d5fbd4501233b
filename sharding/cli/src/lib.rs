//! The commands of `onefold-shard`, one function each.
#![forbid(unsafe_code)]

mod cli;
mod earlier;
mod machine;
mod measured;
mod page;
mod pretrain;
mod show;
mod tables;

use std::ffi::OsString;
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use onefold_base::fault::{Explainer, explained, option, text};
use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_sharding::{
    Alternative, AnalyticCost, CostModel, Error, LearnedCosts, ModelFile, Plan, Replanned, TableFile,
    Topology, claim_output, replan, searches,
};
use onefold_terminal::{CommandLine, OutputOptions, Printer, Program};
use serde_json::{Value, json};

use cli::{CheckArguments, Cli, Command, ModelChoice, PlanArguments, ReplanArguments, TopologyArguments};

pub use cli::{ModelOptions, parse_count};

/// The program, for calls from the process of another program.
pub const PROGRAM: Program = Program::of::<Cli>();

/// Runs the program. `arguments` begin with the program's name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    PROGRAM.main(arguments)
}

impl CommandLine for Cli {
    const ERRORS: &'static [Explainer] = &[
        explained::<Error>,
        explained::<onefold_train_config::Error>,
        explained::<onefold_ikjt::Error>,
        explained::<onefold_datasets::Error>,
    ];

    fn output(&self) -> OutputOptions {
        self.output
    }

    fn run(&self, printer: &Printer) -> Result<()> {
        match &self.command {
            Command::Plan(arguments) => plan(arguments, printer),
            Command::Replan(arguments) => replan_command(arguments, printer),
            Command::Tables(arguments) => tables::tables(arguments, printer),
            Command::Pretrain(arguments) => pretrain::pretrain_command(arguments, printer),
            Command::Show(arguments) => show::show(arguments, printer),
            Command::Diff(arguments) => show::diff_command(arguments, printer),
            Command::Export(arguments) => show::export(arguments, printer),
            Command::Topology(arguments) => topology(arguments, printer),
            Command::Check(arguments) => check(arguments, printer),
        }
    }
}

/// Returns the requested cost model. By default, these are the models of the program that fit the hardware of the
/// topology.
///
/// # Errors
///
/// [`Error::Fault`] or [`Error::Invalid`] for a file that is missing or invalid, and for models that do not fit the
/// topology.
pub fn cost_model(options: &ModelOptions, topology: &Topology) -> Result<Box<dyn CostModel>, Error> {
    let mut files = Vec::new();
    for choice in &options.model {
        match choice {
            ModelChoice::Analytic if options.model.len() == 1 => {}
            ModelChoice::Analytic => {
                return Err(Error::invalid(
                    text![option("model").set_to("analytic"), " is given with other models"],
                    "give it alone: the formulas price ranks of every kind, by their memory bandwidths",
                ));
            }
            ModelChoice::Shipped(name) => files.push(ModelFile::shipped(name)?),
            ModelChoice::File(path) => files.push(ModelFile::load(path)?),
        }
    }
    if options.model.is_empty() {
        files = shipped_for(topology)?;
    }
    Ok(match files.is_empty() {
        true => Box::new(AnalyticCost),
        false => Box::new(LearnedCosts::new(files, topology, options.any_hardware)?),
    })
}

/// Returns the models of the program for the hardware of all ranks, or an empty list if one of
/// the ranks has no model.
fn shipped_for(topology: &Topology) -> Result<Vec<ModelFile>, Error> {
    let mut files = ModelFile::SHIPPED.into_iter().map(ModelFile::shipped).collect::<Result<Vec<_>, _>>()?;
    let hardware: Vec<Option<&str>> = (0..topology.ranks).map(|rank| topology.hardware_of(rank)).collect();
    files.retain(|file| hardware.contains(&Some(file.machine.as_str())));
    let is_known =
        |hardware: &Option<&str>| files.iter().any(|file| *hardware == Some(file.machine.as_str()));
    Ok(if hardware.iter().all(is_known) { files } else { Vec::new() })
}

pub(crate) fn plan(arguments: &PlanArguments, printer: &Printer) -> Result<()> {
    let started = Instant::now();
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let tables = TableFile::load(&arguments.inputs.tables)?;
    let topology = Topology::load(&arguments.inputs.topology)?;
    let model = cost_model(&arguments.model, &topology)?;
    let planning = Instant::now();
    let search = searches(arguments.seed).into_iter().find(|search| search.id() == arguments.search);
    let search = search.with_context(|| format!("there is no search `{}`", arguments.search))?;
    let plan = search.plan(&tables.tables, &topology, model.as_ref(), tables.global_batch_size)?;
    let plan_seconds = planning.elapsed().as_secs_f64();
    plan.check(&tables.tables, &topology, tables.global_batch_size)?;
    let mut explained = Vec::new();
    for name in &arguments.explain {
        explained.push((name.as_str(), plan.alternatives(name, &tables.tables, model.as_ref())?));
    }
    plan.store(out)?;

    let mut text = rank_table(&plan);
    explained.iter().for_each(|(name, alternatives)| text.push_str(&explanation(&plan, name, alternatives)));
    let _ =
        writeln!(text, "\nPlanned in {plan_seconds:.3} s by {}, written to `{}`", plan.search, out.display());
    let mut json = plan_figures(&plan);
    json["plan"] = json!(out);
    json["plan_seconds"] = json!(plan_seconds);
    if !explained.is_empty() {
        let figures = explained.iter().map(|(name, alternatives)| explanation_figures(name, alternatives));
        json["explained"] = figures.collect();
    }
    json["wall_seconds"] = json!(started.elapsed().as_secs_f64());
    Ok(printer.summary(&text, &json)?)
}

pub(crate) fn replan_command(arguments: &ReplanArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let before = Plan::load(&arguments.plan)?;
    let tables = TableFile::load(&arguments.tables)?;
    let topology = match &arguments.topology {
        Some(path) => Topology::load(path)?,
        None => before.topology.clone(),
    };
    let model = cost_model(&arguments.model, &topology)?;
    let batch = tables.global_batch_size;
    let found = replan(&before, &tables.tables, &topology, model.as_ref(), batch, arguments.budget)?;
    let Replanned { plan, kept_cost_ms, moved_bytes, required_bytes } = &found;
    plan.check(&tables.tables, &topology, batch)?;
    plan.store(out)?;

    let mut text = rank_table(plan);
    let (moved, budget) = (format_bytes(*moved_bytes), format_bytes(arguments.budget));
    let _ = writeln!(
        text,
        "\n{moved} of {budget} move to other ranks, of which {} must; without the rest a step would take {kept_cost_ms:.4} ms, \
         {:.1} % more",
        format_bytes(*required_bytes),
        100.0 * (kept_cost_ms / plan.max_cost_ms - 1.0)
    );
    let _ = writeln!(text, "Written to `{}`", out.display());
    let mut json = plan_figures(plan);
    json["plan"] = json!(out);
    json["kept_cost_ms"] = json!(kept_cost_ms);
    json["moved_bytes"] = json!(moved_bytes);
    json["required_bytes"] = json!(required_bytes);
    json["budget_bytes"] = json!(arguments.budget);
    Ok(printer.summary(&text, &json)?)
}

/// The number of a table's alternatives that are printed.
const PRINTED: usize = 8;

/// Explains the placement of a table by the cost of the plan with other placements.
fn explanation(plan: &Plan, name: &str, alternatives: &[Alternative]) -> String {
    let Some(table) = plan.tables.iter().find(|table| table.name == name) else { return String::new() };
    let mut text = format!("\n\nTable `{name}` is {}", table.described());
    if let Some(reason) = &table.reason {
        let _ = write!(text, " ({reason})");
    }
    let _ = write!(text, "; the plan costs {:.4} ms. It would cost", plan.max_cost_ms);
    for alternative in alternatives.iter().take(PRINTED) {
        let (placed, cost) = (alternative.placed.described(), alternative.max_cost_ms);
        let _ = write!(text, "\n  {cost:>10.4} ms  {placed}");
        if alternative.missing_bytes > 0 {
            let _ = write!(text, ", for which {} are missing", format_bytes(alternative.missing_bytes));
        }
    }
    match alternatives.len().checked_sub(PRINTED) {
        Some(more) if more > 0 => {
            let _ = write!(text, "\n  and as much or more in {} ways", format_count(more as u64));
        }
        _ if alternatives.is_empty() => text.push_str(" nothing else: there is one rank"),
        _ => {}
    }
    text.push('\n');
    text
}

fn explanation_figures(name: &str, alternatives: &[Alternative]) -> Value {
    let figures = |alternative: &Alternative| {
        json!({
            "sharding_type": alternative.placed.sharding_type,
            "ranks": alternative.placed.shards.iter().map(|shard| shard.rank).collect::<Vec<_>>(),
            "max_cost_ms": alternative.max_cost_ms,
            "missing_bytes": alternative.missing_bytes,
        })
    };
    json!({ "table": name, "alternatives": alternatives.iter().map(figures).collect::<Vec<_>>() })
}

/// Returns the JSON of a plan for `--json`.
pub(crate) fn plan_figures(plan: &Plan) -> Value {
    json!({
        "tables": plan.tables.len(),
        "ranks": plan.topology.ranks,
        "global_batch_size": plan.global_batch_size,
        "samples_per_rank": plan.samples_per_rank(),
        "search": plan.search,
        "cost_model": plan.cost_model,
        "max_cost_ms": plan.max_cost_ms,
        "notes": plan.notes,
        "bottleneck_rank": plan.bottleneck().map(|rank| rank.rank),
        "max_memory_bytes": fullest(plan)[0],
        "memory_limit_bytes": fullest(plan)[1],
    })
}

/// Returns the bytes that are used on the fullest rank, and the memory of that rank in bytes.
fn fullest(plan: &Plan) -> [u64; 2] {
    plan.fullest().map_or([0, 0], |rank| [rank.total_bytes(), plan.topology.memory_of(rank.rank)])
}

/// Returns a text with one line per rank, and the slowest rank.
pub(crate) fn rank_table(plan: &Plan) -> String {
    let mut shards = vec![0usize; plan.ranks.len()];
    for shard in plan.tables.iter().flat_map(|table| &table.shards) {
        if let Some(count) = shards.get_mut(shard.rank as usize) {
            *count += 1;
        }
    }
    let mut text = "rank  shards      memory   compute ms   communication ms      cost ms\n".to_owned();
    for (rank, shards) in plan.ranks.iter().zip(shards) {
        let (memory, cost) = (format_bytes(rank.total_bytes()), rank.cost_ms());
        let (index, compute, communication) = (rank.rank, rank.compute_ms, rank.communication_ms);
        let _ = writeln!(
            text,
            "{index:>4}  {shards:>6}  {memory:>10}  {compute:>11.4}  {communication:>17.4}  {cost:>11.4}"
        );
    }
    let bottleneck = plan.bottleneck().map_or(0, |rank| rank.rank);
    let _ = writeln!(
        text,
        "\nBottleneck: rank {bottleneck} with {:.4} ms per step of {} samples, {} per rank, by {}",
        plan.max_cost_ms,
        format_count(plan.global_batch_size),
        format_count(plan.samples_per_rank()),
        plan.cost_model
    );
    let [fullest, limit] = fullest(plan).map(format_bytes);
    let _ = write!(text, "Memory: the fullest rank holds {fullest} of {limit}");
    for note in &plan.notes {
        let _ = write!(text, "\n{note}");
    }
    text
}

pub(crate) fn check(arguments: &CheckArguments, printer: &Printer) -> Result<()> {
    let mut plan = Plan::load(&arguments.plan)?;
    let tables = TableFile::load(&arguments.inputs.tables)?;
    let topology = Topology::load(&arguments.inputs.topology)?;
    plan.check(&tables.tables, &topology, tables.global_batch_size)
        .with_context(|| format!("`{}`", arguments.plan.display()))?;

    let (path, count, ranks) = (arguments.plan.display(), plan.tables.len(), topology.ranks);
    let current = predictions_are_for(&plan, &topology, tables.global_batch_size);
    // The memory of ranks is the memory in this topology.
    plan.topology = topology.clone();
    let [fullest, limit] = fullest(&plan).map(format_bytes);
    let mut text = format!(
        "`{path}` is valid: {} on {}, the fullest rank holds {fullest} of {limit}",
        count_of(count as u64, "table"),
        count_of(u64::from(ranks), "rank"),
    );
    if !current {
        text.push_str(
            "\nIts predicted times are for other bandwidths or another batch size; plan again to renew them",
        );
    }
    let mut json = plan_figures(&plan);
    json["plan"] = json!(arguments.plan);
    json["valid"] = json!(true);
    json["predictions_current"] = json!(current);
    Ok(printer.summary(&text, &json)?)
}

/// Returns whether the plan's times were predicted for this topology and batch size.
fn predictions_are_for(plan: &Plan, topology: &Topology, global_batch_size: u64) -> bool {
    let bandwidths = |topology: &Topology| {
        [topology.intra_node_bandwidth_bytes_per_second, topology.inter_node_bandwidth_bytes_per_second]
    };
    // A number may have a different last bit after it was written to a JSON file and read again.
    let close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-9 * b;
    plan.global_batch_size == global_batch_size
        && bandwidths(&plan.topology).into_iter().zip(bandwidths(topology)).all(close)
        && (0..topology.ranks).all(|rank| {
            let of = |topology: &Topology| topology.memory_bandwidth_of(rank);
            close((of(&plan.topology), of(topology)))
        })
}

pub(crate) fn topology(arguments: &TopologyArguments, printer: &Printer) -> Result<()> {
    let out = &arguments.output.out;
    claim_output(out, arguments.output.overwrite)?;
    let topology = topology_of(arguments)?;
    topology.store(out)?;

    let text = format!(
        "{} of {} each, {} per machine, {}, written to `{}`",
        count_of(u64::from(topology.ranks), "rank"),
        format_bytes(topology.memory_bytes),
        topology.ranks_per_node,
        described_machine(arguments, &topology),
        out.display()
    );
    let json = json!({
        "topology": out,
        "ranks": topology.ranks,
        "ranks_per_node": topology.ranks_per_node,
        "memory_limit_bytes": topology.memory_bytes,
        "memory_bandwidth_bytes_per_second": topology.memory_bandwidth_bytes_per_second,
        "intra_node_bandwidth_bytes_per_second": topology.intra_node_bandwidth_bytes_per_second,
        "inter_node_bandwidth_bytes_per_second": topology.inter_node_bandwidth_bytes_per_second,
        "hardware": topology.hardware,
    });
    Ok(printer.summary(&text, &json)?)
}

/// Describes the machine whose bandwidths the topology has.
fn described_machine(arguments: &TopologyArguments, topology: &Topology) -> String {
    let given = [arguments.memory_bandwidth, arguments.intra_node_bandwidth, arguments.inter_node_bandwidth];
    match &topology.hardware {
        Some(hardware) if arguments.measure => format!("measured on {hardware}"),
        _ if given.iter().all(Option::is_none) => "with the bandwidths of H100 GPUs".to_owned(),
        _ => "with the bandwidths that were given".to_owned(),
    }
}

fn topology_of(arguments: &TopologyArguments) -> Result<Topology, Error> {
    let TopologyArguments { ranks, memory, .. } = *arguments;
    let machine = match arguments.measure {
        true => machine::measured(ranks, memory)?,
        false => Topology {
            ranks_per_node: ranks.min(Topology::H100_RANKS_PER_NODE),
            ..Topology::h100(1, memory)?
        },
    };
    let per_node = (1..=machine.ranks_per_node).rev().find(|per_node| ranks.is_multiple_of(*per_node));
    let topology = Topology {
        ranks,
        ranks_per_node: arguments.ranks_per_node.or(per_node).unwrap_or(1),
        memory_bandwidth_bytes_per_second: arguments
            .memory_bandwidth
            .unwrap_or(machine.memory_bandwidth_bytes_per_second),
        intra_node_bandwidth_bytes_per_second: arguments
            .intra_node_bandwidth
            .unwrap_or(machine.intra_node_bandwidth_bytes_per_second),
        inter_node_bandwidth_bytes_per_second: arguments
            .inter_node_bandwidth
            .unwrap_or(machine.inter_node_bandwidth_bytes_per_second),
        hardware: arguments.hardware.clone().or(machine.hardware),
        ..machine
    };
    topology.validate()?;
    Ok(topology)
}
