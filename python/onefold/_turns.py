"""Where iterations begin, as a process and the workers of its loaders agree on it.

A loader calls nothing of a dataset in its own process, and starts workers for each epoch or keeps them. So the workers
themselves must find out which epoch comes next. They share a small file in memory with the process that made the
dataset, which each of them opens anew, since its lock belongs to who opened it. The workers of one iteration of a loader
have one token. The epoch is over once all of them have come to its end.
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
    """The next epoch and step of a dataset, and the workers that have begun and ended the current iteration."""

    def __init__(self, epoch: int, step: int) -> None:
        file = os.memfd_create("onefold-turns", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        self._process = os.getpid()
        weakref.finalize(self, _close, file, os.getpid())
        self.go_to(epoch, step)

    @property
    def is_own(self) -> bool:
        """Whether this process has made it."""
        return self._process == os.getpid()

    def go_to(self, epoch: int, step: int) -> None:
        """Lets the next iteration begin there."""
        with self._changed() as state:
            state.update(next=[epoch, step], run=None)

    def next(self) -> tuple[int, int]:
        """Where the next iteration begins: an epoch and a step."""
        with self._changed() as state:
            epoch, step = state["next"]
        return epoch, step

    def begin(self, token: int, worker: int, workers: int, own: Own | None) -> tuple[int, int]:
        """Where worker number `worker` begins, of `workers` with this token; with `own` it goes on there."""
        with self._changed() as state:
            run = state["run"]
            # A worker that begins a second time begins another iteration.
            if run is None or run["token"] != token or str(worker) in run["began"] or run["workers"] != workers:
                # The iteration that goes on from its workers' states begins where the first of them does.
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
        """Worker number `worker` has given its last batch of the epoch."""
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
    """Where a worker of a loader is: its next step of an epoch, and whether it has come to the end of it."""

    def __init__(self, epoch: int, step: int, ended: bool) -> None:
        self.epoch, self.step, self.ended = epoch, step, ended


def _end(state: dict[str, Any], worker: int, epoch: int) -> None:
    run = state["run"]
    run["ended"] = sorted({*run["ended"], worker})
    if len(run["ended"]) == run["workers"]:
        state["next"] = [epoch + 1, 0]


def _close(file: int, process: int) -> None:
    """Closes the file of this process; that of a forked one may be another by now, and ends with it."""
    if os.getpid() == process:
        os.close(file)
