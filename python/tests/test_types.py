"""The package and its examples pass a type checker, and the stubs match the compiled module."""

import os
import subprocess
import sys
from pathlib import Path

import onefold

FOLDER = Path(__file__).parents[1]
PACKAGES = Path(onefold.__file__).parents[1]
# `__all__` is added by pyo3. Python 3.11 has no method for buffers.
ALLOWED = r"""
onefold\._onefold\.__all__
onefold\._onefold\.Block\.__buffer__
"""
PROGRAM = '''
import numpy
import onefold
import torch

dataset = onefold.Dataset("dataset", dedupe="exact")
for batch in dataset:
    reveal_type(batch.to_torch())
    reveal_type(batch.numpy().groups["user"].inverse)
summary = onefold.build("dataset.toml", out="dataset")
reveal_type(summary)
reveal_type(onefold.cli.train("train.toml", data="dataset", out="run"))
dataset = onefold.Dataset("dataset", dedupe="all")
dataset = onefold.Dataset("dataset", shuffle=1)
reveal_type([file.path for file in onefold.files("dataset")])
onefold.cli.train("train.toml", data="dataset", out="run", max_step=1)
'''


def mypy(module, *arguments, cwd):
    environment = {**os.environ, "MYPYPATH": str(PACKAGES), "MYPY_CACHE_DIR": str(cwd.parent / "cache")}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_package_and_its_examples_are_well_typed(tmp_path):
    config = ["--config-file", FOLDER / "pyproject.toml"]
    done = mypy("mypy", *config, "--package", "onefold", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mypy("mypy", *config, *sorted((FOLDER / "examples").glob("*.py")), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubs_say_what_the_compiled_half_has(tmp_path):
    (tmp_path / "allowed").write_text(ALLOWED)
    options = ["--allowlist", tmp_path / "allowed", "--ignore-unused-allowlist"]
    done = mypy("mypy.stubtest", *options, "onefold._onefold", "onefold._commands", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_users_program_has_types(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    found = mypy("mypy", "--ignore-missing-imports", "program.py", cwd=tmp_path).stdout
    assert 'Revealed type is "onefold._batch.Batch[' in found
    assert "numpy.ndarray" in found and "| None" in found
    assert found.count('Revealed type is "dict[str, Any]"') == 2
    assert 'Argument "dedupe" to "Dataset" has incompatible type' in found
    assert 'Argument "shuffle" to "Dataset" has incompatible type "int"; expected "bool"' in found
    assert 'Revealed type is "list[str]"' in found
    assert 'Unexpected keyword argument "max_step" for "train"' in found
