"""Onefold for PyTorch: an IterableDataset for `DataLoader` and torchdata's `StatefulDataLoader`, and trained models.

    import onefold.torch
    from torch.utils.data import DataLoader

    dataset = onefold.torch.Dataset("dataset", global_batch_size=4096, streams=8, shuffle=True)
    loader = DataLoader(dataset, batch_size=None)          # the dataset gives batches: nothing is collated
    for batch in loader:
        batch.dense                                        # a torch tensor

The threads are inside, so `num_workers=0` is the fastest. `num_workers=N` gives the same batches in the same order.

`load` has a model that `onefold-train export` wrote as an `nn.Module`; see `Model`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from ._batch import Batch
from ._dataset import BatchIterator
from ._dataset import Dataset as _Dataset
from ._errors import OptionsError
from ._model import Model, load
from ._optional import optional
from ._turns import Own, Turns

if TYPE_CHECKING:
    import torch as _torch
else:
    _torch = optional("torch", "torch")

__all__ = ["Dataset", "Model", "load"]


class Dataset(_torch.utils.data.IterableDataset["Batch[_torch.Tensor]"]):
    """Batches of torch tensors, with the options of `onefold.Dataset`. Give it to `DataLoader` with `batch_size=None`.

    Workers of a loader take turns: of N workers each makes every N-th batch, whole, and the loader puts them into the
    order that one process has. `len()` is the steps of an epoch. Every worker decodes the row groups of the rank, with as
    many threads and as much memory as `onefold.configure` says. An epoch is over once its workers have given their last
    batches, which a loader may have asked for before it hands them out (`prefetch_factor`).

    The state is that of the batches that were taken. With workers, the loader has taken the batches: save the state of
    a `StatefulDataLoader`, or that of the last batch (`Batch.state_dict`). `load_state_dict` takes each of these, so
    that a loader with another number of workers can go on. The state of a `StatefulDataLoader` can also be loaded into
    one with the same number of workers.
    """

    def __init__(self, location: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._dataset = _Dataset(location, **options)
        # Where `_dataset` begins, and where the next iteration does.
        self._start = self._dataset.epoch, 0
        self._turns = Turns(*self._start)
        # In a loader's worker: what it gives, and where it was told to go on.
        self._share: _Share | None = None
        self._own: Own | None = None

    @property
    def dataset(self) -> _Dataset:
        """The `onefold.Dataset` of this process, at the epoch that comes next."""
        start = self._own_turns.next()
        # The workers of a loader have moved on, or this process has come to the end of an epoch.
        if start != self._start:
            self._go_to(*start)
        return self._dataset

    @property
    def _own_turns(self) -> Turns:
        """Those that this process shares with its loaders' workers, and with no process that it was forked from."""
        if _torch.utils.data.get_worker_info() is None and not self._turns.is_own:
            self._turns = Turns(*self._turns.next())
        return self._turns

    def _go_to(self, epoch: int, step: int) -> None:
        self._dataset.load_state_dict(self._dataset._state_at(epoch, step))
        self._start = epoch, step

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the batches, as `onefold.Dataset.schema`."""
        return self._dataset.schema

    def __iter__(self) -> Iterator[Batch[_torch.Tensor]]:
        worker = _torch.utils.data.get_worker_info()
        if worker is None:
            return _Batches(iter(self.dataset), self._own_turns)
        # All workers that a loader starts together have seeds that follow each other.
        token = worker.seed - worker.id
        own, self._own = self._own, None
        epoch, step = self._turns.begin(token, worker.id, worker.num_workers, own)
        # A worker that has no batch left in the epoch is at its end.
        step = min(step, self._dataset._steps_of(epoch))
        self._go_to(epoch, step)
        batches = self._dataset._iterate(worker.num_workers)
        ended = own is not None and own.ended
        self._share = _Share(batches, self._turns, token, worker.id, worker.num_workers, Own(epoch, step, ended))
        return self._share

    def __len__(self) -> int:
        """The steps of an epoch."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration be of epoch `epoch`, from its first step; also that of workers which run already."""
        self._dataset.set_epoch(epoch)
        self._start = self._dataset.epoch, 0
        self._own_turns.go_to(*self._start)

    def state_dict(self) -> dict[str, Any]:
        """As `onefold.Dataset.state_dict`. In a loader's worker it is that of the worker."""
        share = self._share
        if share is None or _torch.utils.data.get_worker_info() is None:
            return self.dataset.state_dict()
        own = share.own
        return {**self._dataset._state_at(own.epoch, own.step), "worker": {"of": share.workers, "ended": own.ended}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken: by this dataset, a batch, or a `StatefulDataLoader` with any number of workers."""
        state = _of_loader(state)
        of_worker = state.get("worker")
        self._dataset.load_state_dict({name: value for name, value in state.items() if name != "worker"})
        position = state["position"]
        self._start = position["epoch"], position["step"]
        worker = _torch.utils.data.get_worker_info()
        if of_worker is None:
            self._own_turns.go_to(*self._start)
        elif worker is not None and worker.num_workers == of_worker["of"]:
            self._own = Own(*self._start, of_worker["ended"])
        else:
            raise OptionsError(
                f"this is the state of one of {of_worker['of']} workers of a loader\n"
                "  hint: give what the `state_dict()` of the loader returned"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A process that is being started is a loader's worker, or opens the file of this one as a fork does.
        turns = self._own_turns if get_spawning_popen() is not None else None
        return {"dataset": self.dataset, "turns": turns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._dataset, self._share, self._own = state["dataset"], None, None
        position = self._dataset.state_dict()["position"]
        self._start = position["epoch"], position["step"]
        self._turns = state["turns"] or Turns(*self._start)


class _Batches:
    """The batches of an iteration in this process. Dropping it ends the iteration's threads."""

    def __init__(self, batches: BatchIterator, turns: Turns) -> None:
        self._batches, self._turns = batches, turns

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch[_torch.Tensor]:
        try:
            return next(self._batches).to_torch()
        except StopIteration:
            self._at_end()
            raise

    def _at_end(self) -> None:
        dataset = self._batches._dataset
        if self._batches._progress.exhausted and dataset.epoch == self._batches.epoch + 1:
            self._turns.go_to(dataset.epoch, 0)


class _Share(_Batches):
    """The batches of one of a loader's workers."""

    def __init__(
        self, batches: BatchIterator, turns: Turns, token: int, worker: int, workers: int, own: Own
    ) -> None:
        super().__init__(batches, turns)
        self._token, self._worker, self.workers, self.own = token, worker, workers, own

    def __next__(self) -> Batch[_torch.Tensor]:
        batch = super().__next__()
        self.own.step = min(self.own.step + self.workers, len(self._batches))
        return batch

    def _at_end(self) -> None:
        if self._batches._progress.exhausted:
            self.own.ended = True
            self._turns.end(self._token, self._worker, self.own.epoch)


def _of_loader(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a dataset: `state`, or that which one of torchdata's loaders has, whose workers take turns."""
    try:
        if "_snapshot" in state:
            workers = [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
            return _of_workers(workers, state["_steps_since_snapshot"])
        return dict(state["dataset_state"] if "dataset_state" in state else state)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise OptionsError(
            "this is no state of a dataset\n  hint: give what the `state_dict()` of a dataset or of its loader returned"
        ) from None


def _of_workers(workers: list[dict[str, Any]], more: int) -> dict[str, Any]:
    """The state of a dataset whose batches workers have given in turns, and after which `more` were taken."""
    positions = [worker["position"] for worker in workers]
    first = min(positions, key=lambda position: position["step"])
    if all(worker["worker"]["ended"] for worker in workers):
        first = {**first, "epoch": first["epoch"] + 1, "step": 0}
    else:
        first = {**first, "step": first["step"] + more}
    return {"version": workers[0]["version"], "position": first}
