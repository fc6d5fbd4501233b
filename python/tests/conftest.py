"""Fixtures with the datasets that the tests read, built by the project's commands."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store import BUCKET, store_of

import onefold

SAMPLES = 6000


def command(name, *arguments, cwd=None):
    """Runs a command of the project, and returns its stdout."""
    folder = os.environ.get("ONEFOLD_BINARIES")
    assert folder, "ONEFOLD_BINARIES must name the folder of the commands, as `python/test.sh` sets it"
    done = subprocess.run([Path(folder) / name, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def run():
    """Returns a function that runs a command of the project: `run("onefold-ingest", "build", …)`."""
    return command


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    """Returns the directory of raw logs of the workload rm1."""
    folder = tmp_path_factory.mktemp("logs")
    command("onefold-data", "generate", "--workload", "rm1", "--samples", SAMPLES, "--seed", 3, "--out", folder / "rm1")
    return folder / "rm1"


@pytest.fixture(scope="session")
def dataset(logs):
    """Returns a folded dataset with 64 buckets, in 8 ranges with separate files."""
    out = logs.parent / "folded"
    command("onefold-ingest", "build", logs / "dataset.toml", "--out", out, "--buckets", 8)
    return out


@pytest.fixture(scope="session")
def rows_dataset(logs):
    """Returns the same dataset in the layout `rows`."""
    out = logs.parent / "rows"
    command("onefold-ingest", "build", logs / "dataset.toml", "--out", out, "--buckets", 8, "--layout", "rows")
    return out


@pytest.fixture
def stored(dataset, monkeypatch):
    """Yields the URL of the folded dataset in an object store."""
    with store_of(dataset.parent) as settings:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/{dataset.name}"


@pytest.fixture(scope="session")
def train_wheel(tmp_path_factory):
    """Returns a directory into which pip has installed the wheel `onefold-train`."""
    folder = tmp_path_factory.mktemp("wheel")
    program = Path(os.environ["ONEFOLD_BINARIES"]) / "onefold-train"
    builder = Path(__file__).parents[1] / "train" / "wheel.py"
    command = [sys.executable, builder, "--program", program, "--out", folder]
    wheel = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder / "packages", wheel], check=True)
    return folder / "packages"


@pytest.fixture
def torch_libraries(tmp_path):
    """Returns a directory `torch` like that of an installed torch, with the libraries of the tests' build."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('torch must not be imported')\n")
    (folder / "version.py").write_text("from typing import Optional\n\n__version__ = '2.11.0+cu130'\n")
    (folder / "lib").symlink_to(Path(os.environ["LIBTORCH"]) / "lib")
    return folder


@pytest.fixture
def trainer(train_wheel, torch_libraries, monkeypatch):
    """Installs the wheel `onefold-train`, and the part of torch that the wheel needs."""
    monkeypatch.syspath_prepend(train_wheel)
    if importlib.util.find_spec("torch") is None:
        monkeypatch.syspath_prepend(torch_libraries.parent)
    yield
    sys.modules.pop("onefold_train", None)


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """Enables Ctrl-C, which is ignored if the tests run in the background of a shell."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def process_settings():
    """Gives every test two threads and little memory."""
    onefold.configure(threads=2, memory_limit="256MiB")
