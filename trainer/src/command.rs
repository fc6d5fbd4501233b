//! Code that the command lines of the trainer's programs share: the ranks of a job, common options, and the
//! environment variables that libtorch needs.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use onefold_base::fault::{Explainer, Fault, Kind, explained, option, text};
use onefold_terminal::{CommandLine, OutputOptions, Program};

use crate::Error;
use crate::device::{Accelerator, DeviceName};
use crate::distributed::{self, Collectives, Environment, Joined, PATIENCE, Timeouts};

/// Options of commands that run on several ranks.
#[derive(Debug, clap::Args)]
pub struct RankOptions {
    /// The seconds that a rank waits for the others in one operation before the job ends. While a rank reads, allocates
    /// memory or writes a checkpoint, the others wait longer
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
}

/// The ranks of a job, started by `torchrun` or `onefold-train launch`, or this process alone.
pub struct Ranks {
    joined: Joined,
    /// The GPU of this rank; `None` to compute on the processor.
    device: crate::Result<Option<Accelerator>>,
}

/// Returns the number of ranks on this machine.
pub fn ranks_here() -> usize {
    Environment::read().map_or(1, |environment| environment.local_world_size as usize)
}

/// Returns whether this process is one of several ranks.
///
/// # Errors
///
/// [`Error::Fault`] if the environment variables of a rank are incomplete or invalid.
pub fn are_several() -> crate::Result<bool> {
    Ok(Environment::read()?.world_size > 1)
}

impl Ranks {
    /// Joins the other ranks and opens this rank's device, after [`set_environment`]. Exits with status 1 and without
    /// a message if the ranks cannot join and another rank or the launcher reports why.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the environment variables of a rank are incomplete or invalid, or the ranks cannot
    /// connect.
    pub fn join(options: &RankOptions, device: DeviceName) -> crate::Result<Self> {
        set_environment();
        let environment = Environment::read()?;
        // The device must be opened before any other use of libtorch. An error is reported after all ranks have
        // joined.
        let device =
            device.of_rank(environment.local_rank, environment.local_world_size).and_then(Accelerator::open);
        let operation = Duration::from_secs(options.timeout.into());
        match environment.join(Timeouts { operation, ..Timeouts::default() }) {
            Err(Error::ReportedElsewhere { .. }) => std::process::exit(1),
            joined => Ok(Self { joined: joined?, device }),
        }
    }

    /// Runs `work` on this rank's device. `name` is the name of the command, which must be the same on all
    /// ranks. After an error, one rank reports it, and the other ranks exit with status 1 and without a
    /// message. With `alone_too`, or if the variable `ONEFOLD_CUDA` is set, a job of a single rank also
    /// exchanges through NCCL.
    ///
    /// # Errors
    ///
    /// The error of `work`, if this rank reports it.
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
            // Ranks with and without a device use different backends, and would wait for each other.
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
        // A panic becomes an error of this rank, so that the other ranks learn of it immediately.
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

/// The command to start, and the number of ranks.
#[derive(Debug, clap::Args)]
pub struct LaunchArguments {
    /// The number of ranks to start
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// A command that can run on several ranks, with its options
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs a command of this program on several ranks of this machine, and exits with status 1 if a rank has
/// failed. `C` is the program's command line. The command's output has the options `output`, and its own ones.
/// `works_on_ranks` returns whether a command is one of `commands`.
///
/// # Errors
///
/// The error of the command line; a [`Fault`] of [`Kind::Options`] for a command that does not run on ranks;
/// [`Error::Io`] if the ranks cannot be started.
pub fn launch<C: CommandLine>(
    arguments: &LaunchArguments,
    output: OutputOptions,
    commands: &str,
    works_on_ranks: impl FnOnce(&C) -> bool,
) -> anyhow::Result<()> {
    // Parsed here, so that an error is printed once and not by every rank.
    let name = C::command().get_name().to_owned();
    let words = std::iter::once(name.into()).chain(arguments.command.iter().cloned());
    let cli = C::try_parse_from(words)?;
    if !works_on_ranks(&cli) {
        let message = format!("only {commands} work on several ranks");
        anyhow::bail!(Fault::new(Kind::Options, message).hint("start the command without `launch`"));
    }
    let program = std::env::current_exe()?;
    // An option may not be given twice.
    let own = cli.output();
    let added = [("--json", output.json && !own.json), ("--quiet", output.quiet && !own.quiet)];
    let added = added.into_iter().filter(|(_, is_added)| *is_added).map(|(flag, _)| OsString::from(flag));
    let command: Vec<OsString> = added.chain(arguments.command.iter().cloned()).collect();
    // The ranks get these variables here, so that they need not restart, which takes the time of loading libtorch again.
    let variables = missing_variables(|variable| std::env::var_os(variable).is_some());
    let rank = || {
        let mut rank = std::process::Command::new(&program);
        rank.args(&command).envs(variables.iter().copied());
        rank
    };
    let exits = distributed::launch(arguments.ranks, rank, PATIENCE)?;
    if exits.iter().all(|exit| exit.status.success()) {
        return Ok(());
    }
    // The failed rank has reported the cause.
    std::process::exit(1)
}

/// The option that selects the device.
#[derive(Debug, clap::Args)]
pub struct DeviceOption {
    /// The device: `cpu`, or a GPU such as `cuda:0`, which needs libtorch's CUDA part (`pip install torch==2.11.0`, or
    /// ONEFOLD_LIBTORCH_CUDA=FOLDER). With `cuda`, each of several ranks uses the GPU with the number of its local rank
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
}

impl DeviceOption {
    /// Opens the device; returns `None` for the processor.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the device cannot be opened.
    pub fn open(&self) -> crate::Result<Option<Accelerator>> {
        Accelerator::open(self.device)
    }
}

/// The error types of the libraries, for [`CommandLine::ERRORS`].
pub const ERRORS: &[Explainer] = &[
    explained::<Error>,
    explained::<onefold_train_config::Error>,
    explained::<onefold_sharding::Error>,
    explained::<onefold_ikjt::Error>,
    explained::<onefold_datasets::Error>,
];

/// Runs a program of libtorch as its binary does, and ends the process.
pub fn main(program: Program) -> ! {
    let status = program.status(std::env::args_os());
    // An error is ignored: the pipe may be closed.
    let _ = io::stdout().flush();
    // libtorch's destructors unregister thousands of operators, which takes a fifth of the processor time of a short
    // command. The system frees all resources anyway, so the process ends without running destructors.
    // SAFETY: `_exit` takes a number and does not return.
    unsafe { libc::_exit(status.into()) }
}

/// The environment variables that libtorch's threads and NCCL need. If the user has set a variable of a group, the
/// group stays as it is.
const ENVIRONMENT: [&[(&str, &str)]; 2] = [
    // By default, libtorch's OpenMP threads wait in a busy loop. This takes processor time from the threads
    // that read and look up, and makes training many times slower on a machine with other load. Sleeping
    // immediately would cost a wake-up per operation, so GNU's OpenMP spins about as long as the time between
    // two operations.
    &[("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "20000")],
    // The ranks monitor NCCL themselves; c10d must not abort the process.
    &[
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
    ],
];

/// Returns the variables of the groups of [`ENVIRONMENT`] of which none `is_set`.
fn missing_variables(is_set: impl Fn(&str) -> bool) -> Vec<(&'static str, &'static str)> {
    let is_missing = |group: &&[(&str, &str)]| !group.iter().any(|(variable, _)| is_set(variable));
    ENVIRONMENT.into_iter().filter(is_missing).flatten().copied().collect()
}

/// Restarts the program with the environment variables that libtorch's threads and NCCL need, unless they are
/// set. Programs call it before they compute with libtorch.
pub fn set_environment() {
    onefold_terminal::restart_with(&missing_variables(|variable| std::env::var_os(variable).is_some()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_the_user_has_set_stay_with_their_group() {
        let missing = |set: &[&str]| {
            let missing = missing_variables(|variable| set.contains(&variable));
            missing.into_iter().map(|(variable, _)| variable).collect::<Vec<_>>()
        };
        let all = missing(&[]);
        assert_eq!(all.len(), 5);
        assert_eq!(missing(&["GOMP_SPINCOUNT"]), all[2..]);
        assert_eq!(missing(&["TORCH_NCCL_ENABLE_MONITORING"]), all[..2]);
        assert!(missing(&all).is_empty());
    }
}
