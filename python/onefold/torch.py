"""Onefold for PyTorch: an IterableDataset for `DataLoader` and torchdata's `StatefulDataLoader`, and trained models.

    import onefold.torch
    from torch.utils.data import DataLoader

    dataset = onefold.torch.Dataset("dataset", global_batch_size=4096, streams=8, shuffle=True)
    loader = DataLoader(dataset, batch_size=None)          # the dataset returns batches, so nothing is collated
    for batch in loader:
        batch.dense                                        # a torch tensor

The dataset has its own threads, so `num_workers=0` is the fastest. `num_workers=N` gives the same batches in the same
order.

`bag_inputs` and `nested` are the lists of a feature for torch's own modules. `load` loads a model that
`onefold-train export` wrote as an `nn.Module`; see `Model`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from ._arguments import refuse_unknown
from ._batch import Batch, Feature
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

__all__ = ["Dataset", "Model", "bag_inputs", "load", "nested"]


def _refuse(batch: Any, **_: Any) -> Any:
    raise TypeError(
        "the dataset returns whole batches, which a `DataLoader` cannot collate: give the loader `batch_size=None`, and "
        "the dataset `global_batch_size`"
    )


# A `DataLoader` collates one element into a batch unless it has `batch_size=None`.
_torch.utils.data._utils.collate.default_collate_fn_map[Batch] = _refuse


class Dataset(_torch.utils.data.IterableDataset["Batch[_torch.Tensor]"]):
    """Batches of torch tensors, with the options of `onefold.Dataset`. Use it in a `DataLoader` with
    `batch_size=None`.

    The workers of a loader take turns: each of N workers makes every N-th batch as a whole, and the loader returns
    the batches in the same order as a single process. `len()` is the number of steps of an epoch. Every worker
    decodes the row groups of the rank, with the number of threads and the memory limit of `onefold.configure`. An
    epoch is over when its workers have returned their last batches, which a loader may request before it returns them
    (`prefetch_factor`).

    The state depends on the batches that were taken. With workers, the loader has taken the batches: save the state
    of the `StatefulDataLoader`, or that of the last batch (`Batch.state_dict`). `load_state_dict` takes each of
    these, so a loader with another number of workers can continue. The state of a `StatefulDataLoader` can also be
    loaded into a `StatefulDataLoader` with the same number of workers.
    """

    def __init__(self, location: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        refuse_unknown("Dataset", inspect.signature(_Dataset), options)
        self._dataset = _Dataset(location, **options)
        # The start of `_dataset`, and of the next iteration.
        self._start = self._dataset.epoch, 0
        self._turns = Turns(*self._start)
        # In a worker of a loader: its batches, and the position from which it continues.
        self._share: _Share | None = None
        self._own: Own | None = None

    @property
    def dataset(self) -> _Dataset:
        """The `onefold.Dataset` of this process, at the next epoch."""
        start = self._own_turns.next()
        # The workers of a loader may have advanced, or this process may have reached the end of an epoch.
        if start != self._start:
            self._go_to(*start)
        return self._dataset

    @property
    def _own_turns(self) -> Turns:
        """The turns that this process shares with its loaders' workers, but not with the process that forked it."""
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
        # The workers that a loader starts together have consecutive seeds.
        token = worker.seed - worker.id
        own, self._own = self._own, None
        epoch, step = self._turns.begin(token, worker.id, worker.num_workers, own)
        # A worker without remaining batches is at the end of the epoch.
        step = min(step, self._dataset._steps_of(epoch))
        self._go_to(epoch, step)
        batches = self._dataset._iterate(worker.num_workers)
        ended = own is not None and own.ended
        self._share = _Share(batches, self._turns, token, worker.id, worker.num_workers, Own(epoch, step, ended))
        return self._share

    def __len__(self) -> int:
        """The number of steps of an epoch."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration start at the first step of epoch `epoch`, also in running workers."""
        self._dataset.set_epoch(epoch)
        self._start = self._dataset.epoch, 0
        self._own_turns.go_to(*self._start)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state like `onefold.Dataset.state_dict`. In a loader's worker, it is that of the worker."""
        share = self._share
        if share is None or _torch.utils.data.get_worker_info() is None:
            return self.dataset.state_dict()
        own = share.own
        return {**self._dataset._state_at(own.epoch, own.step), "worker": {"of": share.workers, "ended": own.ended}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of this dataset, a batch, or a `StatefulDataLoader` with any number of workers."""
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

    def __repr__(self) -> str:
        return repr(self._dataset).replace("onefold.Dataset", "onefold.torch.Dataset", 1)

    def __getstate__(self) -> dict[str, Any]:
        # A process that is being started is a worker of a loader, or opens the file of this process as a fork does.
        turns = self._own_turns if get_spawning_popen() is not None else None
        return {"dataset": self.dataset, "turns": turns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._dataset, self._share, self._own = state["dataset"], None, None
        position = self._dataset.state_dict()["position"]
        self._start = position["epoch"], position["step"]
        self._turns = state["turns"] or Turns(*self._start)


class _Batches:
    """An iterator over batches in this process. The threads of the iteration end when it is dropped."""

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
    """An iterator over the batches of one worker of a loader."""

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
    """Returns the state of a dataset: `state` itself, or the one in the state of a loader of torchdata."""
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
    """Returns the state of a dataset from the states of a loader's workers, after `more` further batches."""
    positions = [worker["position"] for worker in workers]
    first = min(positions, key=lambda position: position["step"])
    if all(worker["worker"]["ended"] for worker in workers):
        first = {**first, "epoch": first["epoch"] + 1, "step": 0}
    else:
        first = {**first, "step": first["step"] + more}
    return {"version": workers[0]["version"], "position": first}


def bag_inputs(feature: Feature[_torch.Tensor]) -> tuple[_torch.Tensor, _torch.Tensor]:
    """Returns the arguments `input` and `offsets` of an `nn.EmbeddingBag`, int64, with one bag per row of the feature.

    The feature is one of a batch of torch tensors. Index the result with the group's `inverse` to expand it to samples.
    The ids are copied only if rows share them.
    """
    if not _torch.is_tensor(feature.sizes):
        raise TypeError("this is a feature of numpy arrays; take that of `batch.to_torch()`")
    sizes = feature.sizes.long()
    offsets = sizes.cumsum(0) - sizes
    if feature.packed:
        return feature.values, offsets
    starts = _torch.repeat_interleave(feature.offsets.long() - offsets, sizes)
    return feature.values[starts + _torch.arange(len(starts), device=starts.device)], offsets


def nested(feature: Feature[_torch.Tensor]) -> _torch.Tensor:
    """Returns the lists of a feature as a nested tensor, int64 [rows, ids], with the layout `torch.jagged`.

    The feature is one of a batch of torch tensors. Like `bag_inputs`, it has the distinct rows.
    """
    values, offsets = bag_inputs(feature)
    end = offsets.new_tensor([len(values)])
    return _torch.nested.nested_tensor_from_jagged(values, _torch.cat([offsets, end]))
