//! What the command lines of the trainer's programs share: the ranks of a job, of which this process is one, options, and
//! the environment that libtorch needs.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use onefold_base::fault::{Explainer, Fault, Kind, explained, option, text};

use crate::Error;
use crate::device::{Accelerator, DeviceName};
use crate::distributed::{self, Collectives, Environment, Joined, PATIENCE, Timeouts};

/// Options of commands that run on several ranks.
#[derive(Debug, clap::Args)]
pub struct RankOptions {
    /// Seconds that a rank waits for the others in one operation before the job ends; a rank that reads, allocates or
    /// writes a checkpoint says so meanwhile, and is waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
}

/// The ranks of a job: those that `torchrun` or `onefold-train launch` has started, or this process alone.
pub struct Ranks {
    joined: Joined,
    /// This rank's GPU, if it is to have one.
    device: crate::Result<Option<Accelerator>>,
}

/// The ranks on this machine.
pub fn ranks_here() -> usize {
    Environment::read().map_or(1, |environment| environment.local_world_size as usize)
}

/// Whether this process is one of several ranks.
///
/// # Errors
///
/// [`Error::Fault`] if the environment is not that of a rank.
pub fn are_several() -> crate::Result<bool> {
    Ok(Environment::read()?.world_size > 1)
}

impl Ranks {
    /// Joins the other ranks, each with a device of this name. Ends with status 1 in silence if another rank, or what
    /// started the ranks, says why they do not join.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the environment is not that of a rank, or the ranks do not find each other.
    pub fn join(options: &RankOptions, device: DeviceName) -> crate::Result<Self> {
        let environment = Environment::read()?;
        // Before anything else of libtorch. The others hear of an error once all have joined.
        let device =
            device.of_rank(environment.local_rank, environment.local_world_size).and_then(Accelerator::open);
        let operation = Duration::from_secs(options.timeout.into());
        match environment.join(Timeouts { operation, ..Timeouts::default() }) {
            Err(Error::ReportedElsewhere { .. }) => std::process::exit(1),
            joined => Ok(Self { joined: joined?, device }),
        }
    }

    /// Runs `work` of the command `name`, which is that of all ranks, on this rank's device, and ends with the other
    /// ranks. Of an error one rank speaks, and the others end with status 1 in silence. With `alone_too` the only rank
    /// of a job exchanges through NCCL as well, and so it does where NCCL's library is named.
    ///
    /// # Errors
    ///
    /// That of `work`, if it is this rank's to report.
    pub fn run(
        self,
        name: &str,
        alone_too: bool,
        work: impl FnOnce(&Arc<dyn Collectives>, Option<Accelerator>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Self { joined, device } = self;
        let on_host = joined.collectives();
        let alone_too = alone_too || std::env::var_os("ONEFOLD_CUDA").is_some();
        let run = || {
            on_host.check_same(&[(text!["the command"], name.to_owned())])?;
            let device = on_host.agree(device)?;
            // Ranks with and without a device exchange in different ways, and would wait for each other.
            let kind = if device.is_some() { "cuda" } else { "cpu" };
            on_host.check_same(&[(text![option("device")], kind.to_owned())])?;
            let collectives = match &device {
                Some(device) if on_host.size() > 1 || alone_too && joined.environment().is_job() => {
                    joined.on_device(device.torch())?
                }
                _ => Arc::clone(&on_host),
            };
            work(&collectives, device)
        };
        // A panic is this rank's error, so that the other ranks hear of it at once.
        let outcome = catch_unwind(AssertUnwindSafe(run));
        let outcome = outcome.unwrap_or_else(|panic| Err(Fault::of_panic(&*panic).into()));
        let Err(error) = outcome else { return Ok(()) };
        match error.downcast_ref() {
            Some(Error::ReportedElsewhere { .. } | Error::RankEnded(_)) => std::process::exit(1),
            Some(Error::RankLost(_)) => {}
            _ => on_host.abort(&error.to_string()),
        }
        Err(error)
    }
}

/// What to start, and how often.
#[derive(Debug, clap::Args)]
pub struct LaunchArguments {
    /// How many ranks to start
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// A command that works on several ranks, with its options
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs a command of this program, whose command line is `C`, on ranks of this machine, and ends with status 1 if one of
/// them has failed. `works_on_ranks` says whether it is one of `commands`.
///
/// # Errors
///
/// That of the command line; a [`Fault`] of [`Kind::Options`] for another command; [`Error::Io`] if ranks cannot be
/// started.
pub fn launch<C: Parser>(
    arguments: &LaunchArguments,
    commands: &str,
    works_on_ranks: impl FnOnce(&C) -> bool,
) -> anyhow::Result<()> {
    // Here, so that one error is printed and not that of every rank.
    let name = C::command().get_name().to_owned();
    let words = std::iter::once(name.into()).chain(arguments.command.iter().cloned());
    if !works_on_ranks(&C::try_parse_from(words)?) {
        let message = format!("only {commands} work on several ranks");
        anyhow::bail!(Fault::new(Kind::Options, message).hint("start the command without `launch`"));
    }
    let program = std::env::current_exe()?;
    let exits = distributed::launch(arguments.ranks, &program, &arguments.command, PATIENCE)?;
    if exits.iter().all(|exit| exit.status.success()) {
        return Ok(());
    }
    // A rank has said why.
    std::process::exit(1)
}

/// Where a model computes.
#[derive(Debug, clap::Args)]
pub struct DeviceOption {
    /// Where to compute: `cpu`, or a GPU as `cuda:0`, which needs libtorch's CUDA part (`pip install torch==2.11.0`, or
    /// ONEFOLD_LIBTORCH_CUDA=FOLDER). With `cuda` each of several ranks takes the GPU of its number on its host
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
}

impl DeviceOption {
    /// Opens the device, unless it is the processor.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it cannot be opened.
    pub fn open(&self) -> crate::Result<Option<Accelerator>> {
        Accelerator::open(self.device)
    }
}

/// The libraries' errors, for [`CommandLine::ERRORS`](onefold_terminal::CommandLine::ERRORS).
pub const ERRORS: &[Explainer] = &[
    explained::<Error>,
    explained::<onefold_train_config::Error>,
    explained::<onefold_sharding::Error>,
    explained::<onefold_ikjt::Error>,
    explained::<onefold_datasets::Error>,
];

/// Starts the program again with the environment that libtorch's threads and NCCL need, unless that is set.
pub fn set_environment() {
    // libtorch's OpenMP threads spin while they wait for each other, which takes the processor from the threads that
    // read and look up, and makes training many times slower on a machine that does anything else. To sleep at once
    // costs a wake-up at every operation: GNU's spin for as long as there is between two.
    let passive = [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "20000")];
    // The ranks look after NCCL themselves: c10d must not end the process.
    let nccl =
        ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"]
            .map(|variable| (variable, "0"));
    onefold_terminal::restart_with(&[&passive[..], &nccl[..]].concat());
    // Somebody else has set the first ones.
    onefold_terminal::restart_with(&nccl);
}
