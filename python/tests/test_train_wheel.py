"""The wheel `onefold-train`: the trainer, with the libtorch of an installed torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILDER = Path(__file__).parents[1] / "train" / "wheel.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which pip installed the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    program = Path(os.environ["ONEFOLD_BINARIES"]) / "onefold-train"
    command = [sys.executable, BUILDER, "--program", program, "--out", folder]
    wheel = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder / "packages", wheel], check=True)
    return folder / "packages"


@pytest.fixture
def torch(tmp_path):
    """A folder as an installed torch has it, with the libraries that the tests were built with."""
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('torch must not be imported')\n")
    (folder / "version.py").write_text("from typing import Optional\n\n__version__ = '2.11.0+cu130'\n")
    (folder / "lib").symlink_to(Path(os.environ["LIBTORCH"]) / "lib")
    return folder


def start(installed, *arguments, packages=None):
    path = os.pathsep.join(map(str, filter(None, [installed, packages])))
    # Without the site packages of the tests, which may have a torch.
    environment = {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-S", "-P", installed / "bin" / "onefold-train", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_program_runs_with_the_libraries_of_torch(installed, torch):
    shown = start(installed, "--help", packages=torch.parent)
    assert shown.returncode == 0 and shown.stdout.startswith("Train DLRMs"), shown.stderr
    wrong = start(installed, "run", "none.toml", "--data", "none", "--out", "none", packages=torch.parent)
    assert wrong.returncode == 1 and "none.toml" in wrong.stderr


def test_the_program_knows_no_folder_of_the_machine_that_built_it(installed):
    program = (installed / "onefold_train" / "onefold-train").read_bytes()
    assert b"\0" + os.fsencode(os.environ["LIBTORCH"]) + b"/lib\0" not in program


def test_another_torch_or_none_is_refused(installed, torch):
    def refused(packages):
        done = start(installed, "--help", packages=packages)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.endswith("\n  hint: install it with `pip install torch==2.11.0`\n")
        return done.stderr

    assert "torch is not installed for " in refused(None)
    (torch / "version.py").write_text("__version__ = '2.10.0'\n")
    assert f"`{torch}` is torch 2.10.0" in refused(torch.parent)
    (torch / "version.py").write_text("__version__ = '2.11.0'\n")
    (torch / "lib").unlink()
    assert "has no `libtorch_cpu.so`" in refused(torch.parent)
    (torch / "version.py").unlink()
    assert "does not say its version" in refused(torch.parent)
