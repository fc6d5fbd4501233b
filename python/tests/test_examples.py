"""Runs the examples as a person does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import onefold

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name, *arguments):
    """Runs an example and returns its stdout."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


def test_dataframes_restore_every_list(dataset, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import dataframes

    # One stream reads the files of the bucket ranges one after the other.
    files = [samples.path for samples in onefold.files(dataset)]
    batches = [batch.expand() for batch in onefold.Dataset(dataset)]
    samples = sum(map(len, batches))

    def lists(name):
        return [batch.features[name].row(row).tolist() for batch in batches for row in range(len(batch))]

    assert dataframes.with_polars(files, "user_01").to_list() == lists("user_01")
    assert dataframes.with_duckdb(files, "user_01").to_list() == lists("user_01")
    assert list(dataframes.windows(files, "sequence_00")) == lists("sequence_00")
    printed = example("dataframes.py", dataset, "--feature", "user_01", "--window", "sequence_00")
    assert f"user_01: {samples} lists" in printed and f"sequence_00: {samples} lists" in printed


@pytest.mark.torch
def test_torchrecs_dlrm_learns(dataset):
    arguments = [dataset, "--table-rows", 200_000, "--steps", 6, "--dim", 4]
    found = losses(example("torchrec_dlrm.py", *arguments))
    plain = losses(example("torchrec_dlrm.py", *arguments, "--plain"))
    assert len(found) == 6 and found[-1] < found[0]
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) < 1e-5


@pytest.mark.torch
def test_a_plain_model_learns(dataset):
    # The losses of single batches differ by more than what the model learns, so means of four batches are compared.
    found = losses(example("pytorch.py", dataset, "--table-rows", 200_000, "--dim", 4))
    assert len(found) == 12 and sum(found[-4:]) < sum(found[:4]) - 0.2
