//! The commands `onefold-train-tools profile`, which measures the cost of tables on this machine, and
//! `onefold-train-tools measure-plans`, which measures plans.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::progress::{Reporter, Silent};
use onefold_base::units::{format_count, parse_bytes};
use onefold_sharding::{Costs, claim_output};
use onefold_terminal::Printer;
use onefold_trainer::command::{self, DeviceOption, RankOptions, Ranks};
use onefold_trainer::device::{Accelerator, DeviceName};
use onefold_trainer::distributed::Collectives;
use serde_json::json;

use crate::profile::agreement::{Agreement, agreement};
use crate::profile::collectives::{ExchangeOptions, profile_collectives};
use crate::profile::plans::{
    EXCHANGES, MeasuredPlan, MeasuredRank, PARTS, PlanSet, StepOptions, measure_plans,
};
use crate::profile::{Machine, ProfileOptions, profile};

#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArguments {
    /// The number of sets of tables to measure, which takes about two seconds per set
    #[arg(long, value_name = "N", default_value_t = 500)]
    sets: usize,
    /// Measure the exchange between the ranks that were started, instead of sets of tables
    #[arg(long, conflicts_with_all = ["sets", "samples", "memory", "device"])]
    collectives: bool,
    /// With `--collectives`: the number of exchanges to measure
    #[arg(long, value_name = "N", default_value_t = 400, requires = "collectives")]
    exchanges: usize,
    /// With `--collectives`: the maximum bytes per rank, on average, in one exchange
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "64MiB", requires = "collectives")]
    most_bytes: u64,
    /// The maximum number of samples per step, over all ranks and before deduplication. A set has at least 1,024
    /// samples per rank
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..))]
    samples: u32,
    /// The maximum memory of the tables of a set
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "2GiB")]
    memory: u64,
    /// The seed of the random sets and exchanges
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    device: DeviceOption,
    /// The number of threads [default: all threads of the machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// The output file
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Append to the file. Sets are numbered consecutively, so that several runs give the same sets as one long run
    #[arg(long, conflicts_with = "overwrite")]
    append: bool,
    /// Replace the file if it exists
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    ranks: RankOptions,
}

/// The numbers of ranks that a set of tables is divided among; each set draws one of these at random.
const RANKS_OF_SETS: [u32; 5] = [1, 2, 4, 4, 8];

impl ProfileArguments {
    /// Returns whether the command runs on several ranks.
    pub(crate) fn is_of_ranks(&self) -> bool {
        self.collectives
    }

    /// Returns the measurements that the output file already has; none if the file is new or is overwritten.
    fn before(&self, machine: &Machine) -> Result<Costs> {
        if !self.append || !self.out.exists() {
            claim_output(&self.out, self.overwrite)?;
            return Ok(machine.no_costs());
        }
        let before = Costs::load(&self.out)?;
        let (machine, kernels) = (machine.name(), machine.kernel_version());
        let place = format!("`{}` was measured on {}", self.out.display(), before.machine);
        let message =
            format!("{place}, kernels {}, and this is {machine}, kernels {kernels}", before.kernel_version);
        anyhow::ensure!(
            before.machine == machine && before.kernel_version == kernels,
            Fault::new(Kind::Options, message).hint("write another file")
        );
        Ok(before)
    }
}

pub(crate) fn profile_machine(arguments: &ProfileArguments, printer: &Printer) -> Result<()> {
    if arguments.collectives {
        let ranks = Ranks::join(&arguments.ranks, DeviceName::Cpu)?;
        return ranks
            .run("profile", false, |collectives, _| profile_exchanges(arguments, collectives, printer));
    }
    let hint = text!["start it without ranks, or give ", option("collectives")];
    anyhow::ensure!(
        !command::are_several()?,
        Fault::new(Kind::Options, "sets of tables are measured by one process").hint(hint)
    );
    profile_tables(arguments, printer)
}

/// Measures exchanges on all ranks; rank 0 writes the results.
fn profile_exchanges(
    arguments: &ProfileArguments,
    collectives: &Arc<dyn Collectives>,
    printer: &Printer,
) -> Result<()> {
    let started = Instant::now();
    let machine = opened(&arguments.device, arguments.threads)?;
    let is_first = collectives.rank() == 0;
    // If rank 0 returns an error here, the other ranks end too.
    let mut costs = if is_first { arguments.before(&machine)? } else { machine.no_costs() };
    let options = ExchangeOptions {
        exchanges: arguments.exchanges,
        most_bytes: arguments.most_bytes,
        seed: arguments.seed,
    };
    collectives.check_same(&[(text!["the options"], format!("{options:?}"))])?;
    let reporter: &dyn Reporter = if is_first { printer } else { &Silent };
    let measured = profile_collectives(&options, collectives, reporter)?;
    if !is_first {
        return Ok(());
    }
    costs.exchanges.extend(measured);
    costs.store(&arguments.out)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = format!(
        "{} exchanges between {} ranks measured on {} in {seconds:.1} s; `{}` has {}",
        format_count(options.exchanges as u64),
        collectives.size(),
        costs.machine,
        arguments.out.display(),
        format_count(costs.exchanges.len() as u64),
    );
    let json = json!({
        "costs": arguments.out,
        "ranks": collectives.size(),
        "exchanges": costs.exchanges.len(),
        "machine": costs.machine,
        "wall_seconds": seconds,
    });
    Ok(printer.summary(&text, &json)?)
}

fn profile_tables(arguments: &ProfileArguments, printer: &Printer) -> Result<()> {
    let machine = opened(&arguments.device, arguments.threads)?;
    let mut costs = arguments.before(&machine)?;
    let options = ProfileOptions {
        sets: arguments.sets,
        first_set: costs.sets as usize,
        samples: arguments.samples as usize,
        memory_bytes: arguments.memory,
        ranks: if machine.device.is_some() { vec![1] } else { RANKS_OF_SETS.to_vec() },
        seed: arguments.seed,
    };
    let started = Instant::now();
    let measured = profile(&options, &machine, printer)?;
    costs.sets += measured.sets;
    costs.compute.extend(measured.compute);
    costs.store(&arguments.out)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = format!(
        "{} sets of tables measured on {}, kernels {}, in {seconds:.1} s; `{}` has {} and {} samples",
        format_count(options.sets as u64),
        costs.machine,
        costs.kernel_version,
        arguments.out.display(),
        format_count(costs.sets),
        format_count(costs.compute.len() as u64),
    );
    let json = json!({
        "costs": arguments.out,
        "sets": costs.sets,
        "samples": costs.compute.len(),
        "machine": costs.machine,
        "kernel_version": costs.kernel_version,
        "wall_seconds": seconds,
    });
    Ok(printer.summary(&text, &json)?)
}

fn opened(device: &DeviceOption, threads: Option<u16>) -> Result<Machine> {
    Ok(Machine { threads: crate::threads(threads), device: device.open()? })
}

#[derive(Debug, clap::Args)]
pub(crate) struct MeasurePlansArguments {
    /// Plans for the tables of `--tables`
    #[arg(required_unless_present = "tasks", conflicts_with = "tasks", requires = "tables")]
    plan: Vec<PathBuf>,
    /// The tables, as written by `onefold-shard tables`
    #[arg(long, value_name = "FILE")]
    tables: Option<PathBuf>,
    /// The directory of tasks, instead of single plans
    #[arg(long, value_name = "DIR", requires = "plans")]
    tasks: Option<PathBuf>,
    /// The directory of the tasks' plans, as written by `onefold-evaluate-plans compare --plans`
    #[arg(long, value_name = "DIR", requires = "tasks")]
    plans: Option<PathBuf>,
    /// The number of tasks to measure, from the first one on
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// The seed of the random ids
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of timed steps per plan
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    #[command(flatten)]
    device: DeviceOption,
    /// The number of threads of a rank, which works while the others wait [default: all threads of the machine]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    #[command(flatten)]
    ranks: RankOptions,
}

pub(crate) fn measure(arguments: &MeasurePlansArguments, printer: &Printer) -> Result<()> {
    // Several ranks are measured without a device. If the option names one, a rank reports the error.
    let device = if command::are_several()? { DeviceName::Cpu } else { arguments.device.device };
    let ranks = Ranks::join(&arguments.ranks, device)?;
    ranks.run("measure-plans", false, |collectives, device| {
        measure_with(arguments, collectives, device, printer)
    })
}

impl MeasurePlansArguments {
    fn sets(&self) -> onefold_trainer::Result<Vec<PlanSet>> {
        match (&self.tables, &self.tasks, &self.plans) {
            (Some(tables), ..) => Ok(vec![PlanSet::load(tables.display().to_string(), tables, &self.plan)?]),
            (None, Some(tasks), Some(plans)) => PlanSet::load_tasks(tasks, plans, self.count as usize),
            _ => unreachable!("the command line asks for `--tables`, or for `--tasks` and `--plans`"),
        }
    }
}

fn measure_with(
    arguments: &MeasurePlansArguments,
    collectives: &Arc<dyn Collectives>,
    device: Option<Accelerator>,
    printer: &Printer,
) -> Result<()> {
    let started = Instant::now();
    let sets = collectives.agree(arguments.sets())?;
    let ranks = collectives.size();
    let threads = crate::threads(arguments.threads);
    let machine = Machine { threads, device };
    anyhow::ensure!(
        ranks == 1 || arguments.device.device == DeviceName::Cpu,
        Fault::new(Kind::Options, text![option("device"), format!(" is given on {ranks} ranks")])
            .hint("plans are measured on the processors of several ranks, or without ranks on a GPU")
    );
    let options =
        StepOptions { local_ranks: command::ranks_here(), steps: arguments.steps, seed: arguments.seed };
    if ranks > 1 {
        collectives.check_same(&[
            (text!["the tables and plans"], format!("{sets:?}")),
            (text!["the options"], format!("{:?}", (arguments.steps, arguments.seed, threads))),
        ])?;
    }
    let reporter: &dyn Reporter = if collectives.rank() == 0 { printer } else { &Silent };
    let measured = measure_plans(&sets, &machine, collectives, &options, reporter)?;
    if collectives.rank() > 0 {
        return Ok(());
    }
    let found = agreement(&measured);
    let on = if ranks == 1 { String::new() } else { format!("{ranks} ranks, each on ") };
    let mut text = format!("Measured on {on}{}, kernels {}\n", machine.name(), machine.kernel_version());
    if arguments.tables.is_some() {
        measured.iter().for_each(|plan| describe_ranks(&mut text, plan));
    }
    describe_agreement(&mut text, &found, &measured);
    let json = json!({
        "machine": machine.name(),
        "kernel_version": machine.kernel_version(),
        "agreement": found,
        "plans": measured,
        "wall_seconds": started.elapsed().as_secs_f64(),
    });
    Ok(printer.summary(&text, &json)?)
}

/// Writes the times of a plan's ranks, by part. Ranks wait for the slowest rank before every exchange.
fn describe_ranks(text: &mut String, plan: &MeasuredPlan) {
    let exchanges = if plan.step_ms.is_some() { &EXCHANGES[..] } else { &[] };
    let _ = write!(
        text,
        "\n{} by {}\n{:<6}{:>12}{:>12}",
        plan.plan, plan.cost_model, "ms", "predicted", "measured"
    );
    PARTS.iter().for_each(|name| _ = write!(text, "{name:>20}"));
    let _ = write!(text, "{:>16}", "exchange");
    exchanges.iter().for_each(|name| _ = write!(text, "{name:>12}"));
    let _ = writeln!(text);
    for rank in &plan.ranks {
        let MeasuredRank { predicted_ms, measured_ms, parts_ms, communication_ms, exchanges_ms, .. } = rank;
        let _ = write!(text, "{:<6}{predicted_ms:>12.3}{measured_ms:>12.3}", rank.rank);
        parts_ms.iter().for_each(|ms| _ = write!(text, "{ms:>20.3}"));
        let _ = write!(text, "{communication_ms:>16.3}");
        exchanges_ms.iter().for_each(|ms| _ = write!(text, "{ms:>12.3}"));
        let _ = writeln!(text);
    }
    if let Some(step_ms) = plan.step_ms {
        let _ = writeln!(text, "{:<6}{:>12.3}{step_ms:>12.3}", "step", plan.predicted_cost_ms());
    }
}

fn describe_agreement(text: &mut String, found: &Agreement, measured: &[MeasuredPlan]) {
    let _ = writeln!(
        text,
        "\n{:<30} {:>11} {:>11} {:>11} {:>11} {:>9}\n{:<30} {:>11} {:>11} {:>11} {:>11}",
        "computation and cost in ms",
        "predicted",
        "measured",
        "predicted",
        "measured",
        "cheapest",
        "",
        "compute",
        "compute",
        "cost",
        "cost"
    );
    for search in &found.searches {
        let _ = writeln!(
            text,
            "{:<30} {:>11.3} {:>11.3} {:>11.3} {:>11.3} {:>9}",
            search.plan,
            search.predicted_compute_ms,
            search.measured_compute_ms,
            search.predicted_cost_ms,
            search.measured_cost_ms,
            search.cheapest
        );
    }
    let model = measured.first().map_or("", |plan| plan.cost_model.as_str());
    let cost = if measured.iter().any(|plan| plan.step_ms.is_some()) {
        "a whole step as\nthe cost, which is predicted to be that of the most expensive rank"
    } else {
        "of the most expensive rank's cost, whose exchange is\npredicted in both"
    };
    let _ = write!(
        text,
        "\nMeans over {} tasks of the busiest rank's computation, and {cost} ({model})\n\
         Computation of {} ranks, predicted and measured: tau {:.3}, relative error {:.1} %\n\
         Costs of all plans: tau {:.3}; of a task's plans: tau {:.3}; the cheapest by prediction is the cheapest as measured in {} of {} tasks, and\n\
         costs {:.1} % more than that on average",
        found.tasks,
        found.ranks,
        found.rank_tau,
        100.0 * found.relative_error,
        found.cost_tau,
        found.plan_tau,
        found.best_stays_best,
        found.tasks,
        100.0 * found.mean_regret
    );
}
