//! The ranks of a job, of which this process is one.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_trainer::Error;
use onefold_trainer::device::{Accelerator, DeviceName};
use onefold_trainer::distributed::{Collectives, Environment, Joined, PATIENCE, Timeouts};

use crate::{Cli, Command};

/// Options of commands that run on several ranks.
#[derive(Debug, clap::Args)]
pub(crate) struct RankOptions {
    /// Seconds that a rank waits for the others in one operation before the job ends; a rank that reads, allocates or
    /// writes a checkpoint says so meanwhile, and is waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
}

/// The ranks of a job: those that `torchrun` or `onefold-train launch` has started, or this process alone.
pub(crate) struct Ranks {
    joined: Joined,
    /// This rank's GPU, if it is to have one.
    device: onefold_trainer::Result<Option<Accelerator>>,
}

/// The ranks on this machine.
pub(crate) fn on_this_machine() -> usize {
    Environment::read().map_or(1, |environment| environment.local_world_size as usize)
}

/// Whether this process is one of several ranks.
pub(crate) fn are_several() -> onefold_trainer::Result<bool> {
    Ok(Environment::read()?.world_size > 1)
}

impl Ranks {
    /// Joins the other ranks, each with a device of this name. Ends with status 1 in silence if another rank, or what
    /// started the ranks, says why they do not join.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the environment is not that of a rank, or the ranks do not find each other.
    pub(crate) fn join(options: &RankOptions, device: DeviceName) -> onefold_trainer::Result<Self> {
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
    pub(crate) fn run(
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

#[derive(Debug, clap::Args)]
pub(crate) struct LaunchArguments {
    /// How many ranks to start
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// `run`, `eval`, `predict`, `measure-plans`, `profile --collectives` or `check-device`, with its options
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs a command on ranks of this machine, and ends with status 1 if one of them has failed.
pub(crate) fn launch(arguments: &LaunchArguments) -> anyhow::Result<()> {
    // Here, so that one error is printed and not that of every rank.
    let words = std::iter::once("onefold-train".into()).chain(arguments.command.iter().cloned());
    match Cli::try_parse_from(words) {
        Err(error) => return Err(error.into()),
        Ok(Cli {
            command:
                Command::Run(_)
                | Command::Eval(_)
                | Command::Predict(_)
                | Command::MeasurePlans(_)
                | Command::CheckDevice(_),
            ..
        }) => {}
        Ok(Cli { command: Command::Profile(arguments), .. }) if arguments.is_of_ranks() => {}
        Ok(_) => {
            let message = "only `run`, `eval`, `predict`, `measure-plans`, `profile --collectives` and `check-device` work on several ranks";
            anyhow::bail!(Fault::new(Kind::Options, message).hint("start the command without `launch`"))
        }
    }
    let program = std::env::current_exe()?;
    let exits =
        onefold_trainer::distributed::launch(arguments.ranks, &program, &arguments.command, PATIENCE)?;
    if exits.iter().all(|exit| exit.status.success()) {
        return Ok(());
    }
    // A rank has said why.
    std::process::exit(1)
}
