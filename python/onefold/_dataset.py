"""Datasets as iterables of batches."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, NoReturn

from . import _onefold, _ranks
from ._arguments import absolute, integer, names, switch, text
from ._arrow import ArrowStream
from ._batch import STATE_VERSION, Batch
from ._errors import OnefoldError, OptionsError
from ._html import table
from ._onefold import Reader


class Dataset:
    """A dataset as an iterable of batches.

    An iteration returns the batches of an epoch, and the next iteration returns those of the next epoch.

    `location` is a path or a URL (`s3://…`, or `grpc://HOST:PORT/…` of a preprocessing service). The dataset is read
    by threads of this process, so worker processes bring no advantage.

    - `global_batch_size`: the number of samples of a step over all ranks, at most all samples.
    - `rank`, `world_size`: the index of this process and the number of processes that read the dataset together. By
      default they are taken from `torch.distributed` if it is initialised when an iteration starts, or else from the
      environment variables `RANK` and `WORLD_SIZE`, which torchrun sets.
    - `streams`: the number of parts into which the dataset's buckets are divided, at most the number of buckets (64
      or more). The steps and the state depend on it and not on `world_size`. By default it is `world_size`, or the
      number in a state that is loaded. If there are more ranks than streams, ranks share streams: each of them
      decodes the stream and takes a part of its samples.
    - `shuffle`: whether each epoch has a different order, which `seed` determines, or the order of the files.
      `shuffle_within="partition"` shuffles only within partitions, which are read one after the other. Sessions are
      spread over `shuffle_row_groups` row groups.
    - `dedupe`: "window" (distinct rows, and overlapping lists share ids), "exact" (distinct rows without shared ids)
      or "off".
    - `preprocess`: the path of a `preprocess.toml` with which every batch is preprocessed.
    - `features`: the sparse features to read, or None for all.
    - `keep`: the additional columns of batches, as `batch.kept`: columns that `keep` in the dataset's `dataset.toml`
      names, or "session_id". By default there are none.
    - `tail`: "short" delivers every sample, "drop" delivers only complete global batches. As with `drop_last` of a
      `DataLoader`, an epoch of too few samples then has no batch, and `len()` is 0.
    - `partitions`: a filter such as `"split=train,date>=2024-05-01"`, or None for all partitions. A value with a comma
      or an operator is quoted, as in `'city="Paris, TX"'`.
    - `snapshot`: the number of the snapshot, or None for the newest.
    - `verify`: whether the bytes of each column that is read are compared with their checksum.
    - `table_rows`: the number of rows of embedding tables by feature. An id outside of them raises a DataError that
      names its place.
    - `timestamps`: whether batches contain the times of their samples.
    - `labels_as_of`: the time as of which labels with a delay are known, as a text such as "2026-03-02T00:00:00Z" or
      a datetime with an offset. Labels that were final only later are 0. Batches then have `timestamps`.
    - `pin_memory`: whether batches are torch tensors in pinned memory, for asynchronous copies to a GPU. A separate
      thread copies the next batch to pinned memory.

    The state depends on the batches taken, and not on batches that were read ahead. It is valid for every
    `world_size`. A dataset can be pickled, and used after a fork: each process opens it again. Its
    iterators cannot.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        global_batch_size: int = 2048,
        rank: int | None = None,
        world_size: int | None = None,
        streams: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_row_groups: int = 4,
        shuffle_within: Literal["epoch", "partition"] = "epoch",
        dedupe: Literal["off", "exact", "window"] = "window",
        preprocess: str | os.PathLike[str] | None = None,
        features: Iterable[str] | None = None,
        keep: Iterable[str] | None = None,
        tail: Literal["drop", "short"] = "short",
        partitions: str | None = None,
        snapshot: int | None = None,
        verify: bool = True,
        table_rows: Mapping[str, int] | None = None,
        timestamps: bool = False,
        labels_as_of: str | datetime.datetime | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._location = absolute("location", location)
        self._options: dict[str, Any] = dict(
            global_batch_size=integer("global_batch_size", global_batch_size),
            rank=None if rank is None else integer("rank", rank),
            world_size=None if world_size is None else integer("world_size", world_size),
            streams=None if streams is None else integer("streams", streams),
            shuffle=switch("shuffle", shuffle, "; a seed is given as `shuffle=True, seed=1`"),
            seed=integer("seed", seed),
            shuffle_row_groups=integer("shuffle_row_groups", shuffle_row_groups),
            shuffle_within=text("shuffle_within", shuffle_within),
            dedupe=text("dedupe", dedupe),
            preprocess=None if preprocess is None else absolute("preprocess", preprocess),
            features=None if features is None else names("features", features),
            keep=None if keep is None else names("keep", keep),
            tail=text("tail", tail),
            partitions="" if partitions is None else text("partitions", partitions),
            snapshot=None if snapshot is None else integer("snapshot", snapshot),
            verify=switch("verify", verify),
            table_rows=_rows({} if table_rows is None else table_rows),
            timestamps=switch("timestamps", timestamps),
            labels_as_of=_time(labels_as_of),
            pin_memory=switch("pin_memory", pin_memory),
        )
        # By default, the streams are those of the state that was loaded last.
        self._streams: int | None = self._options["streams"]
        self._reader_of: Reader | None = None
        # The process that opened the reader, and its rank and streams at that time.
        self._opened_by: tuple[int, tuple[int, int], int | None] | None = None
        self._closed = False
        self._steps: dict[int, int] = {}
        self._next = _Start(0)
        # The progress of the iterator from which the last batch was taken.
        self._current: _Progress | None = None
        self._iterators: list[weakref.ref[BatchIterator]] = []
        # The snapshot is determined once, whatever is committed later.
        self._options["snapshot"] = self._reader.snapshot()[0]

    @property
    def _reader(self) -> Reader:
        """The reader of this process and its rank. It is opened again after a fork, or when the rank has changed."""
        if self._closed:
            raise OptionsError("the dataset is closed\n  hint: open it again")
        rank, world_size = self._rank
        opened_by = os.getpid(), (rank, world_size), self._streams
        if self._reader_of is None or self._opened_by != opened_by:
            options = {**self._options, "rank": rank, "world_size": world_size, "streams": self._streams}
            del options["pin_memory"]
            seed = options.pop("seed")
            options["shuffle"] = seed if options["shuffle"] else None
            self._reader_of, self._opened_by, self._steps = Reader(self._location, **options), opened_by, {}
        return self._reader_of

    @property
    def _rank(self) -> tuple[int, int]:
        return _ranks.current(self._options["rank"], self._options["world_size"])

    @property
    def location(self) -> str:
        """The path or URL of the dataset."""
        return self._location

    @property
    def snapshot(self) -> int:
        """The number of the snapshot that is read."""
        return self._options["snapshot"]

    @property
    def rank(self) -> int:
        """The index of this process, from 0."""
        return self._rank[0]

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._rank[1]

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the batches as a dict: `labels`, `dense`, and `groups` with their `features`."""
        return json.loads(self._reader.schema())

    @property
    def samples(self) -> int:
        """The number of samples that this rank reads in an epoch, including those that sampling or the tail drops."""
        return self._reader.samples()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration. It increases when all batches of an iteration were taken."""
        return self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration start at the first step of epoch `epoch`."""
        self._next, self._current = _Start(integer("epoch", epoch)), None

    def plan(self, epoch: int | None = None) -> dict[str, Any]:
        """Returns the plan of an epoch as a dict: `steps`, and the `samples` and `splits` of each stream."""
        return json.loads(self._reader.plan(self.epoch if epoch is None else integer("epoch", epoch)))

    def __len__(self) -> int:
        """The number of steps of the next epoch, which is the same on all ranks."""
        return self._steps_of(self.epoch)

    def _steps_of(self, epoch: int) -> int:
        reader = self._reader
        if epoch not in self._steps:
            self._steps = {epoch: reader.steps(epoch)}
        return self._steps[epoch]

    def _position(self, start: _Start) -> str:
        return start.position or self._reader.position(start.epoch)

    def __iter__(self) -> BatchIterator:
        return self._iterate(1)

    def __getitem__(self, index: object) -> NoReturn:
        # PyTorch's `DataLoader` takes an object with `__len__` that is no `IterableDataset` for a list of samples.
        raise TypeError(
            "a dataset is iterated, and its samples have no indices; for a `DataLoader` use `onefold.torch.Dataset` "
            "and `batch_size=None`"
        )

    def _iterate(self, every: int) -> BatchIterator:
        """Returns an iterator over the next batch, and every `every`-th batch after it."""
        position = self._position(self._next)
        iterator = BatchIterator(self, self._reader.resume(position, every), position)
        self._current = iterator._progress
        self._iterators = [held for held in self._iterators if held() is not None] + [weakref.ref(iterator)]
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the batches that were taken, as a dict that can be written as JSON.

        It is valid for every `world_size`. If several iterators are used at once, it is the state of
        the one that was started, or from which a batch was taken, last.
        """
        current = self._current
        if current is not None and not current.exhausted:
            position = current.position
        else:
            position = self._position(self._next)
        return {"version": STATE_VERSION, "position": json.loads(position)}

    def _state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Returns the state before a step."""
        position = json.loads(self._reader.position(epoch))
        return {"version": STATE_VERSION, "position": {**position, "step": step}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iterations continue from `state`, until one of them has taken the rest of the epoch."""
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or "position" not in state:
            raise OptionsError("this is no state of a dataset\n  hint: give what `state_dict()` returned")
        try:
            position = json.dumps(state["position"])
        except (TypeError, ValueError) as error:
            raise OptionsError(
                f"this is no position of a dataset: {error}\n  hint: give what `state_dict()` returned"
            ) from None
        before = self._streams
        given = state["position"].get("streams") if isinstance(state["position"], Mapping) else None
        if self._options["streams"] is None and type(given) is int and given >= 0:
            self._streams = given
        try:
            self._reader.check(position)
        except BaseException:
            self._streams = before
            raise
        self._next, self._current = _Start(state["position"]["epoch"], position), None

    def to_arrow(self) -> ArrowStream:
        """Returns the samples of the next epoch as an Arrow stream, for `duckdb.sql`, `polars.DataFrame` and others.

        The stream has one row per sample. Labels, dense features, the weight and kept columns are columns with their
        names. Sparse features are columns of `list<int64>`, whatever the layout of the dataset is. There is a column
        `timestamp` if the dataset has `timestamps`. The stream contains the samples of this rank, and reading it does
        not advance the epoch. It needs pyarrow.
        """
        return ArrowStream(self.schema, self._options, self._plain)

    def _plain(self) -> Dataset:
        """Returns the dataset with plain lists, at the next epoch."""
        plain = Dataset(self._location, **{**self._options, "dedupe": "off", "pin_memory": False})
        plain.set_epoch(self.epoch)
        return plain

    def close(self) -> None:
        """Ends all iterations and closes the dataset."""
        for held in self._iterators:
            iterator = held()
            if iterator is not None and iterator._process == os.getpid():
                iterator.close()
        self._closed, self._reader_of, self._current = True, None, None

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        options = self._options
        if get_spawning_popen() is not None:
            # A child process that is being started has the rank of this process, but perhaps no process group.
            options = {**options, **dict(zip(("rank", "world_size"), self._rank, strict=True))}
        return {"location": self._location, "options": options, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Dataset.__init__(self, state["location"], **state["options"])
        self.load_state_dict(state["state"])

    def __repr__(self) -> str:
        options = {key: value for key, value in self._options.items() if value not in (None, {}, "")}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        return f"onefold.Dataset({self._location!r}, {given})"

    def _repr_html_(self) -> str:
        if self._closed:
            return table(repr(self), ["closed"], [])
        rank, world_size = self._rank
        title = f"{self._location}, snapshot {self.snapshot}: {self.samples:,} samples of rank {rank} of {world_size}"
        schema = self.schema
        rows = [("label", name, "") for name in schema["labels"]]
        rows += [("weight", schema["weight"], "")] if schema.get("weight") else []
        rows += [("dense", name, "") for name in schema["dense"]]
        rows += [("kept", name, "") for name in self._options["keep"] or []]
        for group in schema["groups"]:
            rows += [("sparse", feature["name"], group["name"]) for feature in group["features"]]
        return table(title, ["column", "name", "group"], rows)


def configure(threads: int | None = None, memory_limit: int | str | None = None) -> None:
    """Sets the number of threads and the memory limit of datasets that are opened later in this process.

    All datasets share them. By default they are all threads of the machine and 1 GiB. `memory_limit` is a number of
    bytes or a text such as `"512MiB"`. It excludes the batch that the caller uses, and one or two batches that are
    ready.
    """
    if memory_limit is not None and not isinstance(memory_limit, str):
        memory_limit = integer("memory_limit", memory_limit)
    _onefold.configure(None if threads is None else integer("threads", threads), memory_limit)


def _rows(tables: Mapping[str, int]) -> dict[str, int]:
    """Returns the rows of tables by feature."""
    if not isinstance(tables, Mapping):
        raise TypeError(f"'table_rows' takes a dict, not {type(tables).__name__}")
    for name in tables:
        if not isinstance(name, str):
            raise TypeError(f"'table_rows' takes a dict by the names of features, and {name!r} is not a text")
    return {name: integer("table_rows", rows) for name, rows in tables.items()}


def _time(value: str | datetime.datetime | None) -> str | None:
    """Returns the time `labels_as_of` as a text."""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if value is not None and not isinstance(value, str):
        raise TypeError(f"'labels_as_of' takes a text or a datetime with an offset, not {type(value).__name__}")
    return value


class _Start:
    """The start of the next iteration: the first step of an epoch, or a position."""

    def __init__(self, epoch: int, position: str | None = None) -> None:
        self.epoch = epoch
        self.position = position
        """The position as JSON."""


class _Progress:
    """The progress of an iterator. The dataset refers to it, and so does not keep the iterator alive."""

    def __init__(self, position: str) -> None:
        self.position = position
        """The position after the batches taken so far, as JSON."""
        self.exhausted = False
        """Whether every batch was taken: after an error they were not."""


class BatchIterator:
    """An iterator over the batches of an epoch. Its threads end when it is dropped, or with `close()`."""

    def __init__(self, dataset: Dataset, blocks: _onefold.BatchIterator, position: str) -> None:
        self._dataset = dataset
        self._blocks = blocks
        self._pins: bool = dataset._options["pin_memory"]
        self._batches: Iterator[Batch[Any]] = _pinned(blocks) if self._pins else map(Batch.of, blocks)
        self._failed = False
        self._progress = _Progress(position)
        self._start = dataset._next
        self._process = os.getpid()
        self.epoch: int = self._start.epoch

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch[Any]:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.exhausted = not self._failed
            # Another iterator, `set_epoch` or `load_state_dict` may already have set the start of the next iteration.
            if self._progress.exhausted and self._dataset._next is self._start:
                self._dataset._next = _Start(self.epoch + 1)
            raise
        except BaseException as error:
            # An interrupt such as Ctrl-C also ends `_pinned`.
            self._failed = self._failed or self._pins or isinstance(error, OnefoldError)
            raise
        self._progress.position = batch._position or self._progress.position
        self._dataset._current = self._progress
        return batch

    def __len__(self) -> int:
        """The number of steps of the epoch, including those before the iterator's first step."""
        return self._blocks.steps

    def close(self) -> None:
        """Ends the iteration and its threads."""
        self._failed = True
        self._blocks.close()
        # At most one batch is being copied to pinned memory. A thread that waits for it notices the end by itself.
        with contextlib.suppress(OnefoldError, ValueError):
            for _ in self._batches:
                pass


def _pinned(blocks: _onefold.BatchIterator) -> Iterator[Batch[Any]]:
    """Yields the batches in pinned memory. A thread copies each batch while the caller uses the previous one."""

    def take() -> Batch[Any] | None:
        block = next(blocks, None)
        return None if block is None else Batch.of(block).pin_memory()

    process = os.getpid()
    with ThreadPoolExecutor(1, "onefold-pin") as pool:
        ahead = pool.submit(take)
        try:
            while (batch := ahead.result()) is not None:
                ahead = pool.submit(take)
                yield batch
                del batch
                if os.getpid() != process:
                    # This process was forked and does not have the thread. This call raises the error for that.
                    next(blocks)
        finally:
            if os.getpid() == process:
                blocks.close()
