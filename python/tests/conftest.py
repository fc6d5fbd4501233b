"""Datasets that the tests read, made by the project's own commands."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import onefold

SAMPLES = 6000


def command(name, *arguments, cwd=None):
    """Runs a command of the project."""
    folder = os.environ.get("ONEFOLD_BINARIES")
    assert folder, "ONEFOLD_BINARIES must name the folder of the commands, as `python/test.sh` sets it"
    done = subprocess.run([Path(folder) / name, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def run():
    """Runs a command of the project: `run("onefold-ingest", "build", …)`."""
    return command


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """Raw logs of the workload rm1."""
    folder = tmp_path_factory.mktemp("logs")
    command("onefold-data", "generate", "--workload", "rm1", "--samples", SAMPLES, "--seed", 3, "--out", folder / "rm1")
    return folder / "rm1"


@pytest.fixture(scope="session")
def dataset(logs):
    """A folded dataset of 8 buckets."""
    out = logs.parent / "folded"
    command("onefold-ingest", "build", logs / "dataset.toml", "--out", out, "--buckets", 8)
    return out


@pytest.fixture(scope="session")
def rows_dataset(logs):
    """The same dataset in the layout `rows`."""
    out = logs.parent / "rows"
    command("onefold-ingest", "build", logs / "dataset.toml", "--out", out, "--buckets", 8, "--layout", "rows")
    return out


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Ctrl-C interrupts, also where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def process_settings():
    """Every test has two threads and little memory."""
    onefold.configure(threads=2, memory_limit="256MiB")
