"""Onefold for PyTorch: an IterableDataset for `DataLoader` and torchdata's `StatefulDataLoader`, and trained models.

    import onefold.torch
    from torch.utils.data import DataLoader

    dataset = onefold.torch.Dataset("dataset", global_batch_size=4096, streams=8, shuffle=True)
    loader = DataLoader(dataset, batch_size=None)          # the dataset gives batches: nothing is collated
    for batch in loader:
        batch.dense                                        # a torch tensor

The threads are inside, so `num_workers=0` is the fastest. With `num_workers=N` every worker process reads a part of
the rank's streams, and the loader takes batches from workers in turn; see `Dataset`.

`load` has a model that `onefold-train export` wrote as an `nn.Module`; see `Model`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from ._batch import Batch
from ._dataset import Dataset as _Dataset
from ._errors import OptionsError
from ._model import Model, load
from ._optional import optional

if TYPE_CHECKING:
    import torch as _torch
else:
    _torch = optional("torch", "torch")

__all__ = ["Dataset", "Model", "collate_parts", "load"]


def _distributed() -> tuple[int, int]:
    """The rank and the world size of torch.distributed if it is initialised, otherwise (0, 1)."""
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class Dataset(_torch.utils.data.IterableDataset["Batch[_torch.Tensor]"]):
    """Batches of torch tensors, with the options of `onefold.Dataset`.

    `rank` and `world_size` are those of torch.distributed if it is initialised. Give `DataLoader` this dataset with
    `batch_size=None`.

    Workers of a loader. With `num_workers=N` worker n of rank r reads as rank r + W n of W N, so there must be W N
    `streams` or more: together the workers read exactly the streams of their rank, and step k of the epoch is what the N
    workers give as their batch k. The loader hands these N parts out one after the other: N items of the loader are
    one step, and hold the samples of the rank's part of one global batch, whatever N is. `len()` counts steps. To
    train on whole steps put N items together with `collate_parts`, or use `num_workers=0`. Every worker has as many
    threads, and as much memory, as `onefold.configure` says. Workers that are started anew know of no epoch: call
    `set_epoch` before each.

    The state is that of the batches that were taken, and with workers that of a worker; `StatefulDataLoader` keeps
    both. A state of a loader with workers cannot be loaded with another number of workers (torchdata refuses it),
    that of this dataset can.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        of_group = _distributed()
        self._location = os.fspath(location)
        self._rank = of_group[0] if rank is None else rank
        self._world_size = of_group[1] if world_size is None else world_size
        self._options = options
        self._dataset = _Dataset(self._location, rank=self._rank, world_size=self._world_size, **options)
        # All workers read the snapshot that this process found.
        self._options["snapshot"] = self._dataset.snapshot
        self._options["streams"] = self._options.get("streams") or self._world_size
        self._worker: _Dataset | None = None

    @property
    def dataset(self) -> _Dataset:
        """The `onefold.Dataset` of this process: of the rank, or of its part in a loader's worker."""
        worker = _torch.utils.data.get_worker_info()
        if worker is None or worker.num_workers == 1:
            return self._dataset
        if self._worker is None:
            self._worker = self._open_part(worker.id, worker.num_workers)
        return self._worker

    def _open_part(self, worker: int, workers: int) -> _Dataset:
        streams, parts = self._options["streams"], self._world_size * workers
        if streams < parts:
            raise OptionsError(
                f"{streams} streams cannot be divided among {self._world_size} ranks of {workers} workers\n"
                "  hint: the threads are inside: take `num_workers=0`, or at least as many `streams` as the ranks times "
                "the workers"
            )
        part = _Dataset(
            self._location, rank=self._rank + self._world_size * worker, world_size=parts, **self._options
        )
        part.load_state_dict(self._dataset.state_dict())
        return part

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the batches, as `onefold.Dataset.schema`."""
        return self._dataset.schema

    def __iter__(self) -> Iterator[Batch[_torch.Tensor]]:
        for batch in self.dataset:
            yield batch.to_torch()

    def __len__(self) -> int:
        """The steps of an epoch."""
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next iteration be of epoch `epoch`; with workers, before the loader starts them."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As `onefold.Dataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `onefold.Dataset.load_state_dict`."""
        self.dataset.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_worker": None}


def collate_parts(parts: Sequence[Batch[Any]]) -> dict[str, Any]:
    """The parts of a step that a loader's workers gave, as one plain batch of torch tensors in a dict.

    - `dense`, `labels`: as those of a batch.
    - `weights`, `timestamps`: of the samples, or None.
    - `kept`: numpy arrays by name, as `Batch.kept`.
    - `features`: `(values, lengths)` by name, with every sample's own lists.
    """
    if not parts or not all(isinstance(part, Batch) for part in parts):
        raise OptionsError("there are no batches to put together\n  hint: give the batches of one step")
    expanded = [part.expand().to_torch() for part in parts]
    first = expanded[0]

    def cat(array: Callable[[Batch[Any]], Any]) -> Any:
        """One array of all parts; None if they do not have it."""
        arrays = [array(part) for part in expanded]
        return None if arrays[0] is None else _torch.cat(arrays)

    return {
        "dense": cat(lambda part: part.dense),
        "labels": cat(lambda part: part.labels),
        "weights": cat(lambda part: part.weights),
        "timestamps": cat(lambda part: part.timestamps),
        "kept": {name: _kept([part.kept[name] for part in expanded]) for name in first.kept},
        "features": {
            name: (cat(lambda part: part.features[name].values), cat(lambda part: part.features[name].sizes))
            for name in first.features
        },
    }


def _kept(columns: list[numpy.ndarray]) -> numpy.ndarray:
    """The values of a kept column of all parts: integers are masked arrays, texts are not."""
    concatenate = numpy.ma.concatenate if isinstance(columns[0], numpy.ma.MaskedArray) else numpy.concatenate
    return concatenate(columns)
