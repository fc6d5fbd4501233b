//! Starts the ranks of a job on this host, like `torchrun --nproc-per-node`.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::c10d::Store;
use super::{environment, loss};
use crate::{Error, Result};

/// The time that the other ranks have to end after one has failed, before they are killed.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The interval at which the ranks and the signals are polled.
const POLL: Duration = Duration::from_millis(20);

/// The end of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The rank.
    pub rank: u32,
    /// The exit status.
    pub status: ExitStatus,
    /// Whether the rank was killed because it did not end after another rank had failed, or because of a second
    /// signal.
    pub killed: bool,
}

/// Runs the command that `program` returns once per rank, with the variables of [`Environment`](super::Environment)
/// in addition, and waits until all have ended. Returns their exits, in the order of ranks.
///
/// The ranks have an empty stdin, and inherit stdout and stderr. The first SIGTERM or SIGINT is passed on to the
/// ranks; the second one kills them. When a rank fails, the others have `patience` to end. No rank outlives this
/// process or the calling thread.
///
/// # Errors
///
/// [`Error::Fault`] or [`Error::Io`] if not all ranks could be started; the started ones are killed.
/// [`Error::Fault`] also if a second signal killed a rank, and if a signal, other than one that this process
/// passed on, ended a rank before all had joined, because no rank can report that.
pub fn launch(ranks: u32, program: impl Fn() -> Command, patience: Duration) -> Result<Vec<Exit>> {
    let failed = |message: String| {
        Error::ranks(
            format!("the ranks' store could not be started: {message}"),
            "see whether the loopback interface works (`ping 127.0.0.1`)",
        )
    };
    // The store is in this process, so that it survives the death of any rank.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| failed(error.to_string()))?;
    let port = listener.local_addr()?.port();
    let timeout = Duration::from_secs(10);
    let store =
        Store::open("127.0.0.1", port, Some(listener), &environment::prefix(0), timeout).map_err(failed)?;
    let signals = Signals::catch()?;
    let mut running = Running { ranks: Vec::new(), signals: 0 };
    for rank in 0..ranks {
        let mut command = as_rank(program(), (rank, ranks), port);
        let child = command.spawn().map_err(|error| {
            let name = Path::new(command.get_program()).display();
            Error::ranks(
                format!("rank {rank} could not be started: `{name}`: {error}"),
                "name a program that can be run",
            )
        })?;
        running.ranks.push((rank, child));
    }
    // An error is ignored: a store that does not answer is no worse than a store without the note.
    let failed = |rank: u32| drop(store.set(loss::ENDED, rank.to_string().as_bytes()));
    let exits = running.wait(&signals, patience, failed)?;
    if running.signals > 1 && exits.iter().any(|exit| exit.killed && !exit.status.success()) {
        return Err(Error::ranks(
            "the ranks were killed, because a second signal came before they had ended",
            "the checkpoints that they had written are complete: `run --resume` continues from the newest one",
        ));
    }
    let joined = || (0..ranks).all(|rank| store.has(&environment::joined_key(rank)).unwrap_or(true));
    let ended = exits.iter().filter(|exit| !exit.killed).find_map(|exit| Some((exit, exit.status.signal()?)));
    match ended {
        Some((exit, signal)) if running.signals == 0 && !joined() => Err(Error::ranks(
            format!("signal {signal} ended rank {} before all ranks had joined", exit.rank),
            "look for what sent it (the system, where memory is short), and run the command again",
        )),
        _ => Ok(exits),
    }
}

/// Returns the command that starts a rank.
fn as_rank(mut command: Command, (rank, ranks): (u32, u32), port: u16) -> Command {
    command.stdin(Stdio::null());
    for (name, value) in
        [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)]
    {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("TORCHELASTIC_RESTART_COUNT", "0");
    // With its own process group, a rank receives a terminal's Ctrl-C only once, through this process.
    command.process_group(0);
    let parent = std::process::id();
    // SAFETY: between fork and exec the closure only calls `prctl` and `getppid`, which are plain system calls,
    // and creating the errors does not allocate.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before the call of `prctl`.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command
}

/// A handler of SIGTERM and SIGINT, registered until it is dropped.
struct Signals {
    /// The number of received signals, and the last one.
    received: Arc<(AtomicUsize, AtomicI32)>,
    registered: Vec<SigId>,
}

impl Signals {
    fn catch() -> Result<Self> {
        let mut signals = Self { received: Arc::default(), registered: Vec::new() };
        for signal in [SIGTERM, SIGINT] {
            let received = Arc::clone(&signals.received);
            let handle = move || {
                received.1.store(signal, Ordering::Relaxed);
                received.0.fetch_add(1, Ordering::Release);
            };
            // SAFETY: the handler only changes atomic numbers, which a signal handler may do.
            signals.registered.push(unsafe { signal_hook::low_level::register(signal, handle) }?);
        }
        Ok(signals)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.registered.drain(..).for_each(|id| {
            signal_hook::low_level::unregister(id);
        });
    }
}

/// Ranks that may still be running. Dropping this kills them.
struct Running {
    ranks: Vec<(u32, Child)>,
    /// The number of signals that this process has received.
    signals: usize,
}

impl Running {
    /// Waits for all ranks, passes the first signal on, and kills ranks after the second one, and those that do
    /// not end after another has failed. Calls `failed` with the first rank that fails.
    fn wait(&mut self, signals: &Signals, patience: Duration, failed: impl Fn(u32)) -> Result<Vec<Exit>> {
        let mut exits: Vec<Exit> = Vec::new();
        let mut deadline: Option<Instant> = None;
        let mut killed = false;
        loop {
            let mut index = 0;
            while let Some((rank, child)) = self.ranks.get_mut(index) {
                let Some(status) = child.try_wait()? else {
                    index += 1;
                    continue;
                };
                exits.push(Exit { rank: *rank, status, killed });
                if !status.success() && deadline.is_none() {
                    deadline = Some(Instant::now() + patience);
                    failed(*rank);
                }
                self.ranks.remove(index);
            }
            if self.ranks.is_empty() {
                exits.sort_by_key(|exit| exit.rank);
                return Ok(exits);
            }
            let before = std::mem::replace(&mut self.signals, signals.received.0.load(Ordering::Acquire));
            if before == 0 && self.signals > 0 {
                self.signal(signals.received.1.load(Ordering::Relaxed));
            }
            let is_due = self.signals > 1 || deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if !killed && is_due {
                killed = true;
                self.signal(libc::SIGKILL);
            }
            std::thread::sleep(POLL);
        }
    }

    fn signal(&self, signal: libc::c_int) {
        for (_, child) in &self.ranks {
            // SAFETY: this is a system call. The child has not been waited for, so its id cannot belong to
            // another process.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        for (_, child) in &mut self.ranks {
            // The rank was killed, so this returns soon.
            let _ = child.wait();
        }
    }
}
