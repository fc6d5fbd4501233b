"""Datasets that a preprocessing service reads."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from forks import in_child
from ports import free_port
from samples import all_samples

import onefold

PATIENCE = 600.0


@contextlib.contextmanager
def service(dataset: Path) -> Iterator[str]:
    """Yields the URL of a dataset that a service on this machine reads."""
    port = free_port()
    program = Path(os.environ["ONEFOLD_BINARIES"]) / "onefold-serve"
    options = ["--workers", "2", "--threads", "2", "--dataset", f"logged={dataset}", "--quiet"]
    running = subprocess.Popen([program, "local", "--listen", f"127.0.0.1:{port}", *options], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < until, "the service does not listen"
            time.sleep(0.02)
        yield f"grpc://127.0.0.1:{port}/logged"
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True, "seed": 3, "dedupe": "exact"}, {"dedupe": "off", "timestamps": True}]
)
def test_batches_by_url_are_those_of_the_files(dataset: Path, options: dict) -> None:
    with service(dataset) as url:
        local = onefold.Dataset(dataset, global_batch_size=32, **options)
        served = onefold.Dataset(url, global_batch_size=32, **options)
        assert len(served) == len(local)
        batches = 0
        for ours, theirs in zip(served, local, strict=True):
            assert numpy.array_equal(ours.data, theirs.data)
            batches += 1
        assert batches == len(local)


def test_a_position_is_that_of_the_files(dataset: Path) -> None:
    with service(dataset) as url:
        local = onefold.Dataset(dataset, global_batch_size=32)
        batches = iter(local)
        next(batches), next(batches)
        served = onefold.Dataset(url, global_batch_size=32)
        served.load_state_dict(local.state_dict())
        assert numpy.array_equal(next(iter(served)).data, next(batches).data)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_by_url(dataset: Path) -> None:
    with service(dataset) as url:
        expected = all_samples(onefold.Dataset(dataset, global_batch_size=32))
        reader = onefold.Dataset(url, global_batch_size=32)
        batches = iter(reader)
        next(batches)

        def read() -> list:
            reader.set_epoch(0)
            return all_samples(reader)

        assert in_child(read) == expected
        assert all_samples(batches) == expected[32:]


def test_what_is_wrong_is_said(dataset: Path) -> None:
    with service(dataset) as url:
        with pytest.raises(onefold.OptionsError, match="no dataset `views`"):
            onefold.Dataset(url.replace("logged", "views"), global_batch_size=32)
        with pytest.raises(onefold.OptionsError, match="snapshot 7"):
            onefold.Dataset(url, global_batch_size=32, snapshot=7)
