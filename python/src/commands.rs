//! The commands of the binaries as functions and as console scripts.
//!
//! The command of a function runs on a separate thread, without the interpreter's lock. The calling thread waits,
//! passes the progress to the caller, and checks for signals. An exception in this thread (Ctrl-C, or an exception of
//! the caller) ends the command: it stops at its next check, and leaves no partial output.

use std::ffi::OsString;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onefold_base::progress::Reporter;
use onefold_base::sync::locked;
use onefold_terminal::{Failure, KeywordKind, Program};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::{of_command, wrong_process};

/// The interval at which the progress is reported and signals are checked.
const TICK: Duration = Duration::from_millis(50);

/// A keyword of a command: its name, its kind (`switch`, `one` or `many`), whether it is positional, whether it is
/// required, its default, and its description.
type KeywordTuple = (String, &'static str, bool, bool, Option<String>, String);

fn program(name: &str) -> PyResult<Program> {
    Ok(match name {
        "onefold" => onefold_command::PROGRAM,
        "onefold-data" => onefold_raw_logs::command::PROGRAM,
        "onefold-ingest" => onefold_ingest::command::PROGRAM,
        "onefold-read" => onefold_ikjt::command::PROGRAM,
        "onefold-shard" => onefold_sharding_cli::PROGRAM,
        _ => return Err(PyValueError::new_err(format!("there is no program `{name}`"))),
    })
}

/// Returns the description of a command, and its keywords.
#[pyfunction]
pub(crate) fn describe_command(program_name: &str, command: &str) -> PyResult<(String, Vec<KeywordTuple>)> {
    let program = program(program_name)?;
    let (Some(about), Some(keywords)) = (program.about(command), program.keywords(command)) else {
        return Err(PyValueError::new_err(format!("`{program_name}` has no command `{command}`")));
    };
    let kind = |kind| match kind {
        KeywordKind::Switch => "switch",
        KeywordKind::One => "one",
        KeywordKind::Many => "many",
    };
    let tuples = keywords.into_iter().map(|keyword| {
        (
            keyword.name,
            kind(keyword.kind),
            keyword.positional,
            keyword.required,
            keyword.default,
            keyword.help,
        )
    });
    Ok((about, tuples.collect()))
}

/// Runs a program as its binary does, and returns its exit status. It does not check for signals.
#[pyfunction]
pub(crate) fn run_program(py: Python<'_>, name: &str, arguments: Vec<OsString>) -> PyResult<u8> {
    let program = program(name)?;
    Ok(py.detach(|| program.status(arguments)))
}

/// Runs a command with keywords, and returns the JSON of its summary. `progress` is called with stage, done, total
/// and unit.
#[pyfunction]
#[pyo3(signature = (program_name, command, given, progress=None))]
pub(crate) fn run_command(
    py: Python<'_>,
    program_name: &str,
    command: String,
    given: Vec<(String, Vec<OsString>)>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    refuse_after_fork(py)?;
    let program = program(program_name)?;
    let watched = Arc::new(Watched::default());
    let reporter = Arc::clone(&watched);
    let (sender, receiver) = channel();
    let work = move || {
        // There is no receiver if the wait was interrupted by a second exception.
        let _ = sender.send(program.call(&command, &given, reporter));
    };
    std::thread::Builder::new().name("onefold-command".to_owned()).spawn(work)?;
    let result = wait(py, &Mutex::new(receiver), &watched, progress.as_ref())?;
    result.map_err(|failure| of_command(py, &failure))
}

/// Waits for the command. An exception ends the command, and is raised after its end. A second exception is raised at
/// once.
fn wait(
    py: Python<'_>,
    receiver: &Mutex<Receiver<Result<String, Failure>>>,
    watched: &Watched,
    progress: Option<&Py<PyAny>>,
) -> PyResult<Result<String, Failure>> {
    let mut ending: Option<PyErr> = None;
    loop {
        let result = match py.detach(|| locked(receiver).recv_timeout(TICK)) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the thread of the command ended without a result"));
            }
        };
        let told = py.check_signals().and_then(|()| match (&ending, progress) {
            (None, Some(progress)) => watched.tell(py, progress),
            _ => Ok(()),
        });
        match (told, result, ending.take()) {
            (Ok(()), Some(result), None) => return Ok(result),
            (Ok(()), Some(_), Some(error)) => return Err(error),
            (Ok(()), None, before) => ending = before,
            (Err(error), None, None) => {
                watched.stopped.store(true, Ordering::Relaxed);
                ending = Some(error);
            }
            (Err(error), ..) => return Err(error),
        }
    }
}

/// Raises an error after a fork: the threads of a command's pools do not exist in the child process, so the command
/// would wait for them forever.
fn refuse_after_fork(py: Python<'_>) -> PyResult<()> {
    static USED_BY: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    match USED_BY.compare_exchange(0, process, Ordering::Relaxed, Ordering::Relaxed) {
        Err(other) if other != process => Err(wrong_process(
            py,
            "this process was forked from one that had run commands, and has none of their threads\n  \
             hint: start processes with the method `spawn`, or run commands only after the fork",
        )),
        _ => Ok(()),
    }
}

/// The progress of a command, shared by its threads and the thread that waits.
#[derive(Default)]
struct Watched {
    stages: Mutex<Stages>,
    stopped: AtomicBool,
}

#[derive(Default)]
struct Stages {
    /// The stages that ended since the last report.
    ended: Vec<Stage>,
    running: Option<Stage>,
    /// Whether the running stage has advanced since the last report.
    moved: bool,
}

#[derive(Clone)]
struct Stage {
    name: String,
    done: u64,
    total: Option<u64>,
    unit: String,
}

impl Watched {
    /// Calls `progress` with the stages that have ended, and with the running stage if it has advanced.
    fn tell(&self, py: Python<'_>, progress: &Py<PyAny>) -> PyResult<()> {
        let mut stages = {
            let mut held = locked(&self.stages);
            let mut stages = std::mem::take(&mut held.ended);
            if std::mem::take(&mut held.moved) {
                stages.extend(held.running.clone());
            }
            stages
        };
        stages.drain(..).try_for_each(|stage| {
            progress.call1(py, (stage.name, stage.done, stage.total, stage.unit)).map(drop)
        })
    }
}

impl Reporter for Watched {
    fn begin(&self, stage: &str, total: Option<u64>, unit: &str) {
        let stage = Stage { name: stage.to_owned(), done: 0, total, unit: unit.to_owned() };
        let mut stages = locked(&self.stages);
        (stages.running, stages.moved) = (Some(stage), true);
    }

    fn advance(&self, amount: u64) {
        let mut stages = locked(&self.stages);
        stages.moved = true;
        if let Some(stage) = &mut stages.running {
            stage.done += amount;
        }
    }

    fn note(&self, _: &str) {}

    fn end(&self) {
        let mut stages = locked(&self.stages);
        stages.moved = false;
        if let Some(stage) = stages.running.take() {
            stages.ended.push(stage);
        }
    }

    fn go_on(&self) -> io::Result<()> {
        match self.stopped.load(Ordering::Relaxed) {
            true => Err(io::Error::other("the command was interrupted")),
            false => Ok(()),
        }
    }
}
