"""Training: the commands of `onefold-train` as functions.

The program runs as a separate process, with the libtorch that the wheel `onefold-train` finds. Each function has the
arguments of its command: `--warm-start monday` is `warm_start="monday"`. It returns the output of the command with
`--json`, as a dict, and raises an `OnefoldError` with the message and the hint of the command. A test compares the
arguments with those of the program.
"""

import codecs
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import termios
import tty
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias

from . import _onefold
from ._arguments import refuse_unknown, texts
from ._errors import MissingPackageError, OnefoldError

_Path: TypeAlias = str | os.PathLike[str]
_Size: TypeAlias = int | str
_Checkpoint: TypeAlias = int | Literal["latest"]
_Dedupe: TypeAlias = Literal["off", "exact", "window"]
_Progress: TypeAlias = Literal[False] | None
_Summary: TypeAlias = dict[str, Any]
_Parameters = ParamSpec("_Parameters")

PROGRAM = "onefold-train"
COMMANDS = {
    "train": "run",
    "follow": "follow",
    "evaluate": "eval",
    "predict": "predict",
    "export": "export",
    "report_runs": "report",
}
"""By the name of the function: the command."""

# Keywords that take several values, and keywords that are positional arguments of the command.
_SEVERAL = {"keep", "runs"}
_BY_PLACE = {"config", "run", "runs"}

# The interval at which signals are checked while the program runs, in milliseconds.
_TICK = 50


def _command(function: Callable[_Parameters, _Summary]) -> Callable[_Parameters, _Summary]:
    """Returns a function that runs its command with the arguments that `function` returns."""
    name, signature = function.__name__, inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Summary:
        refuse_unknown(name, signature, kwargs)
        return _run(COMMANDS[name], signature, function(*args, **kwargs))

    call.__module__ = "onefold.cli"
    return call


@_command
def train(
    config: _Path,
    *,
    data: _Path,
    out: _Path,
    at: int | None = None,
    checkpoints: _Path | None = None,
    dedupe: _Dedupe = "window",
    device: str = "cpu",
    threads: int | None = None,
    max_steps: int | None = None,
    plan: _Path | None = None,
    trace_steps: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    warm_start: _Path | None = None,
    warm_start_checkpoint: _Checkpoint | None = None,
    new_partitions: bool = False,
    progressive: bool = False,
    memory_limit: _Size | None = None,
    timeout: int = 20,
    ranks: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Train the model of a `train.toml` on a dataset.

    Ctrl-C ends the training after the current step, with a checkpoint. The same call with `resume=True` continues
    from there. A second Ctrl-C ends the training at once. TensorBoard can read the run during the training.

    The command `onefold-train run`.

    Arguments:
        config: the configuration file: data, model, tables, optimizers
        data: the dataset: a path or a URL such as `s3://bucket/folder`
        out: the directory of the run: checkpoints, metrics, model, summary
        at: the number of the dataset's snapshot; by default the newest, or with `resume` that of the run
        checkpoints: a directory or URL for the checkpoints and the model that all ranks can access; by default `out`
        dedupe: how batches are deduplicated; the losses do not depend on it
        device: the device for the computation: "cpu", or a GPU such as "cuda:0"
        threads: the number of threads; by default all threads of the machine, divided by the ranks on it
        max_steps: end after this number of steps, including those before a resumption
        plan: a plan of `onefold.cli.plan` for the same number of ranks
        trace_steps: the steps, counted from 1, for which every rank records a timeline, such as "10..20"
        overwrite: replace an existing run at `out`, once the new one is complete
        resume: continue from the newest checkpoint of the run at `out`, or start a new run
        warm_start: a run, or the directory or URL of its checkpoints, whose model is trained further
        warm_start_checkpoint: a checkpoint of that run to use instead of its model: "latest", or a step
        new_partitions: train only on partitions that were committed after the snapshot of that run
        progressive: train on one day or hour after the other, and evaluate on each before training on it
        memory_limit: bytes for parameters, optimizer state and reading, as a number or as "8GiB"
        timeout: seconds that a rank waits for the others in one operation before the job ends
        ranks: the number of processes on this machine that train together; by default one. If torchrun started this
            process, omit it and call the function on every rank: rank 0 gets the summary, the others an empty dict
        progress: by default the program shows its progress on stderr, if that is a terminal; False for no progress
    """
    return locals()


@_command
def follow(
    config: _Path,
    *,
    data: _Path,
    out: _Path,
    checkpoints: _Path | None = None,
    dedupe: _Dedupe = "window",
    device: str = "cpu",
    threads: int | None = None,
    plan: _Path | None = None,
    trace_steps: str | None = None,
    warm_start: _Path | None = None,
    warm_start_checkpoint: _Checkpoint | None = None,
    new_partitions: bool = False,
    memory_limit: _Size | None = None,
    timeout: int = 20,
    min_samples: int = 1,
    max_wait: str | None = None,
    max_drift: float | None = None,
    late_labels: bool = False,
    look_every: str = "10s",
    export_every: int | None = None,
    stop_after: int | None = None,
    until: str | None = None,
    ranks: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Train a model on every new partition of a dataset, as partitions are committed.

    The function returns when `until` or `stop_after` is reached. Ctrl-C ends the training after the current step, with
    a checkpoint. The same call continues from there, also after a failure.

    The command `onefold-train follow`.

    Arguments:
        config, data, out, checkpoints, dedupe, device, threads, plan, trace_steps: as for `onefold.cli.train`
        warm_start, warm_start_checkpoint, new_partitions, memory_limit, timeout: as for `onefold.cli.train`
        min_samples: begin to train when waiting partitions have this number of samples
        max_wait: begin to train when a partition has waited for this time, such as "30m"
        max_drift: begin to train when a dense feature of the waiting partitions reaches this population stability index
        late_labels: train again on partitions whose labels were recomputed after the training on them
        look_every: the time between two checks for a new snapshot, at most an hour
        export_every: export the model after this number of partitions
        stop_after: end after this number of partitions, including those before a resumption
        until: end after the partitions of this time, such as "date=2024-05-02/hour=03" or "date=2024-05-02"
        ranks, progress: as for `onefold.cli.train`
    """
    return locals()


@_command
def evaluate(
    run: _Path,
    *,
    data: _Path,
    at: int | None = None,
    partitions: str | None = None,
    checkpoint: _Checkpoint | None = None,
    dedupe: _Dedupe = "window",
    device: str = "cpu",
    threads: int | None = None,
    timeout: int = 20,
    ranks: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Evaluate a trained model on a dataset's held-out partitions.

    The command `onefold-train eval`.

    Arguments:
        run: the directory of the run, or the directory or URL of its checkpoints
        data: the dataset: a path or a URL such as `s3://bucket/folder`
        at: the number of the dataset's snapshot; by default the newest
        partitions: a filter of partitions such as "split=holdout"; by default that in the run's configuration
        checkpoint: a checkpoint to use instead of the run's model: "latest", or a step
        dedupe, device, threads, timeout, ranks, progress: as for `onefold.cli.train`
    """
    return locals()


@_command
def predict(
    run: _Path,
    *,
    data: _Path,
    out: _Path,
    overwrite: bool = False,
    keep: Iterable[str] | None = None,
    at: int | None = None,
    partitions: str | None = None,
    checkpoint: _Checkpoint | None = None,
    dedupe: _Dedupe = "window",
    device: str = "cpu",
    threads: int | None = None,
    timeout: int = 20,
    ranks: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Write a trained model's predictions to a Parquet file, with the columns that join them to the logs.

    The file has one row per sample: the columns that `keep` in `dataset.toml` names, then `prediction` and `logit`.

    The command `onefold-train predict`.

    Arguments:
        out: the file to write: a path or a URL
        overwrite: replace an existing file at `out`
        keep: additional columns: kept columns of the dataset, or "session_id"; by default all kept columns
        run, data, at, partitions, checkpoint: as for `onefold.cli.evaluate`
        dedupe, device, threads, timeout, ranks, progress: as for `onefold.cli.train`
    """
    return locals()


@_command
def export(
    run: _Path,
    *,
    out: _Path,
    checkpoint: _Checkpoint | None = None,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Write a trained model for PyTorch and TorchRec: `model.safetensors`, and `export.json`, which describes it.

    The command `onefold-train export`.

    Arguments:
        run: the directory of the run, or the directory or URL of its checkpoints
        out: the directory of the exported model
        checkpoint: a checkpoint to use instead of the run's model: "latest", or a step
        overwrite: replace an existing exported model at `out`
        progress: as for `onefold.cli.train`
    """
    return locals()


@_command
def report_runs(runs: _Path | Iterable[_Path], *, html: _Path, progress: _Progress = None) -> _Summary:
    """Draw the results of runs side by side: curves, calibration, days, segments. Runs may still be in progress.

    The command `onefold-train report`; `onefold.cli.report` is about a dataset.

    Arguments:
        runs: the directory of a run, complete or not, or the directories of several runs
        html: the HTML page to write
        progress: as for `onefold.cli.train`
    """
    return locals()


def _run(command: str, signature: inspect.Signature, given: _Summary) -> _Summary:
    """Runs a command with the arguments `given`, and returns its summary."""
    ranks, progress = given.pop("ranks", None), given.pop("progress")
    if progress is not None and progress is not False:
        raise TypeError(f"'progress' takes None or False, not {type(progress).__name__}: the program draws it")
    flags, places = [], []
    for keyword, value in given.items():
        switch = isinstance(signature.parameters[keyword].default, bool)
        kind: Any = "switch" if switch else "many" if keyword in _SEVERAL else "one"
        words = texts(keyword, kind, value) or []
        flag = f"--{keyword.replace('_', '-')}"
        if keyword in _BY_PLACE:
            # A name that begins with a dash must not be taken as a flag.
            places += [os.path.join(".", word) if word.startswith("-") else word for word in words]
        else:
            flags += [flag] if switch and words else [f"{flag}={word}" for word in words]
    line = [command, "--json", *(["--quiet"] if progress is False else []), *flags, *places]
    if ranks is not None:
        line = ["launch", *(f"--ranks={word}" for word in texts("ranks", "one", ranks) or []), "--", *line]
    path, libraries = _program()
    start = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_start.py")), str(os.getpid()), libraries, path]
    with tempfile.TemporaryDirectory() as folder:
        summary, failure = Path(folder, "summary"), Path(folder, "failure")
        status = _call([*start, *line], summary, failure, progress is None)
        if status != 0:
            # If several ranks failed, the error of the first one is raised.
            for said in failure.read_text().splitlines() if failure.exists() else []:
                _onefold.raise_failure(said)
            raise _ended(command, status)
        printed = summary.read_bytes().splitlines()
    # Only the first rank prints a summary.
    return json.loads(printed[-1]) if printed else {}


def _program() -> tuple[str, str]:
    """Returns the path of the program, and the LD_LIBRARY_PATH that it needs."""
    try:
        import onefold_train
    except ImportError as error:
        raise MissingPackageError(
            "this needs the program `onefold-train`, which is a package of its own and is not installed for "
            f"{sys.executable}\n  hint: install it: pip install onefold-train"
        ) from error
    try:
        return onefold_train.program()
    except RuntimeError as error:
        raise MissingPackageError(f"{error}\n  hint: {onefold_train.HINT}") from error


def _call(line: list[str], summary: Path, failure: Path, draws: bool) -> int:
    """Runs a program that prints to the file `summary` and writes errors to `failure`, and returns its exit status.

    An exception in this process, such as Ctrl-C, ends the program, and is raised after the program has ended. A
    second exception ends the program at once.
    """
    with _stderr(draws) as (ours, theirs), summary.open("wb") as stdout:
        # The program has a separate process group, so that Ctrl-C in a terminal reaches it once, through this
        # process.
        try:
            program = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=theirs,
                process_group=0,
                env={**os.environ, "ONEFOLD_FAILURE_FILE": str(failure)},
            )
        finally:
            os.close(theirs)
        try:
            _pass_on(program, ours)
        except BaseException:
            program.terminate()
            try:
                _pass_on(program, ours)
            finally:
                program.kill()
                program.wait()
            raise
    return program.returncode


@contextlib.contextmanager
def _stderr(draws: bool) -> Iterator[tuple[int, int]]:
    """Yields our and the program's end of the program's stderr. Our end is closed at the end; the caller closes the
    other.

    It is a terminal if `draws` and this process's stderr is one, because the program shows progress only on a
    terminal.
    """
    if draws and sys.stderr is not None and sys.stderr.isatty():
        ours, theirs = os.openpty()
        # Bytes are passed unchanged, and the width of the terminal is known.
        tty.setraw(theirs)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetwinsize(theirs, termios.tcgetwinsize(sys.stderr.fileno()))
    else:
        ours, theirs = os.pipe()
    try:
        yield ours, theirs
    finally:
        os.close(ours)


def _pass_on(program: subprocess.Popen[bytes], ours: int) -> None:
    """Waits for the program, and meanwhile copies its output to stderr."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    while True:
        # This is checked before reading, so that all output up to the end is read.
        ended = program.poll() is not None
        ready = poll.poll(0 if ended else _TICK)
        said = _read(ours) if ready else b""
        text = decoder.decode(said)
        if text and sys.stderr is not None:
            print(text, end="", file=sys.stderr, flush=True)
        if not said and (ready or ended):
            break
    program.wait()


def _read(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except OSError:
        # The other end of the terminal is closed.
        return b""


def _ended(command: str, status: int) -> OnefoldError:
    """Returns the error for a program that ended without an error message."""
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
        hint = "look for what sent it: the system, if memory is short"
    else:
        how = f"ended with status {status}"
        hint = "see what it said on stderr; on several ranks another one may say why"
    return OnefoldError(f"`{PROGRAM} {command}` {how}\n  hint: {hint}")
