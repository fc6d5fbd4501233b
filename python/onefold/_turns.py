"""The start of iterations, shared by a process and the workers of its loaders.

A loader does not call the dataset in its own process, and it starts workers for each epoch or keeps them. So the
workers must determine the next epoch themselves. They share a small in-memory file with the process that created the
dataset. Each process opens the file separately, because its lock belongs to the open file. The workers of one
iteration of a loader have the same token. An epoch is over when all of them have reached its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from typing import Any


class Turns:
    """The next epoch and step of a dataset, and the workers that have started and ended the current iteration."""

    def __init__(self, epoch: int, step: int) -> None:
        file = os.memfd_create("onefold-turns", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        self._process = os.getpid()
        weakref.finalize(self, _close, file, os.getpid())
        self.go_to(epoch, step)

    @property
    def is_own(self) -> bool:
        """Whether this process created this object."""
        return self._process == os.getpid()

    def go_to(self, epoch: int, step: int) -> None:
        """Makes the next iteration start at this epoch and step."""
        with self._changed() as state:
            state.update(next=[epoch, step], run=None)

    def next(self) -> tuple[int, int]:
        """Returns the epoch and step at which the next iteration starts."""
        with self._changed() as state:
            epoch, step = state["next"]
        return epoch, step

    def begin(self, token: int, worker: int, workers: int, own: Own | None) -> tuple[int, int]:
        """Starts the worker `worker` of `workers` with this token, at `own` if given. Returns its epoch and step."""
        with self._changed() as state:
            run = state["run"]
            # A worker that starts a second time starts another iteration.
            if run is None or run["token"] != token or str(worker) in run["began"] or run["workers"] != workers:
                # An iteration that continues from its workers' states starts at the first of their steps.
                run = dict(token=token, workers=workers, begin=None if own else state["next"], began={}, ended=[])
                state["run"] = run
            if own is None:
                epoch, step = run["begin"] or state["next"]
                run["began"][str(worker)] = step + worker
                return epoch, step + worker
            run["began"][str(worker)] = own.step
            state["next"] = [own.epoch, min(run["began"].values())]
            if own.ended:
                _end(state, worker, own.epoch)
            return own.epoch, own.step

    def end(self, token: int, worker: int, epoch: int) -> None:
        """Records that the worker `worker` has returned its last batch of the epoch."""
        with self._changed() as state:
            if state["run"] is not None and state["run"]["token"] == token and state["next"][0] == epoch:
                _end(state, worker, epoch)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        with open(self._path, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            state = json.loads(text) if text else {}
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)


class Own:
    """The position of a loader's worker: its next step in an epoch, and whether it has reached the epoch's end."""

    def __init__(self, epoch: int, step: int, ended: bool) -> None:
        self.epoch, self.step, self.ended = epoch, step, ended


def _end(state: dict[str, Any], worker: int, epoch: int) -> None:
    run = state["run"]
    run["ended"] = sorted({*run["ended"], worker})
    if len(run["ended"]) == run["workers"]:
        state["next"] = [epoch + 1, 0]


def _close(file: int, process: int) -> None:
    """Closes the file in the process that opened it. In a forked process, the number may belong to another file."""
    if os.getpid() == process:
        os.close(file)
