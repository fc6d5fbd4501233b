"""Batches: views of one allocation, as numpy arrays or torch tensors."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy

from ._arguments import integer
from ._errors import OptionsError
from ._html import table
from ._onefold import Block
from ._optional import optional

if TYPE_CHECKING:
    import torch
    from torchrec import KeyedJaggedTensor

STATE_VERSION = 1
"""The version of the states of datasets."""

Array = TypeVar("Array")
"""The type of the arrays of a batch: numpy.ndarray or torch.Tensor."""


class _Numpy:
    """Operations on the bytes of a batch with numpy arrays."""

    @staticmethod
    def all_as(data: Any, dtype: str) -> Any:
        return data.view(dtype)

    @staticmethod
    def ramp(length: int, like: Any) -> Any:
        return numpy.arange(length, dtype=numpy.int32)

    @staticmethod
    def where(mask: Any, a: Any, b: Any) -> Any:
        return numpy.where(mask, a, b)


class _Torch:
    """Operations on the bytes of a batch with torch tensors."""

    @staticmethod
    def all_as(data: Any, dtype: str) -> Any:
        import torch

        return data.view(getattr(torch, dtype))

    @staticmethod
    def ramp(length: int, like: Any) -> Any:
        import torch

        return torch.arange(length, dtype=torch.int32, device=like.device)

    @staticmethod
    def where(mask: Any, a: Any, b: Any) -> Any:
        import torch

        return torch.where(mask, a, b)


class _Data(Generic[Array]):
    """The bytes of a batch as arrays of several types.

    Groups and features refer to this object and not to their batch, so there are no reference cycles, and a batch is
    freed at once when it is dropped.
    """

    def __init__(self, data: Array, size: int) -> None:
        self.size = size
        self.kind: type[_Numpy] | type[_Torch] = _Numpy if isinstance(data, numpy.ndarray) else _Torch
        # All bytes as one array of each type. The number of bytes is a multiple of 64.
        self.float32 = self.kind.all_as(data, "float32")
        self.int32 = self.kind.all_as(data, "int32")
        self.int64 = self.kind.all_as(data, "int64")


class Batch(Generic[Array]):
    """Samples: dense features, labels, and sparse features by group.

    A batch is one allocation, `data`, and all its arrays are views of it, which are created on access. They are numpy
    arrays, or torch tensors after `to_torch()`. Each of them keeps the allocation alive.

    The numpy arrays are read-only; `writable()` returns a copy that can be changed. torch has no read-only tensors. A
    change of a tensor on the CPU is visible in all other views of the batch, except for those of Arrow.
    """

    def __init__(self, block: Block | None, data: Array, spec: dict[str, Any], position: str | None) -> None:
        # The block shares its memory with `data`. It is None if the bytes are a copy, or on a device.
        self._block, self._spec, self.data = block, spec, data
        self._position = position
        self._views = _Data(data, spec["size"])
        self._kind = self._views.kind

    @staticmethod
    def of(block: Block, position: str | None = None) -> Batch[numpy.ndarray]:
        """Returns the batch in a block, as numpy arrays. `position` is for a copied block, which has no position."""
        # A memoryview requests a read-only buffer.
        data = numpy.frombuffer(memoryview(block), dtype=numpy.uint8)
        return Batch(block, data, json.loads(block.spec()), position or block.position())

    def _matrix(self, name: str) -> Array:
        width, start = self._spec[name.removesuffix("s") + "_width"], self._spec[name] // 4
        return self._views.float32[start : start + len(self) * width].reshape(len(self), width)

    def __len__(self) -> int:
        """The number of samples, B."""
        return self._spec["size"]

    @property
    def dense(self) -> Array:
        """Dense features, float32 [B, D]."""
        return self._matrix("dense")

    @property
    def labels(self) -> Array:
        """Labels, float32 [B, L]."""
        return self._matrix("labels")

    @property
    def weights(self) -> Array | None:
        """Sample weights, float32 [B], or None."""
        start = self._spec["weights"]
        return None if start is None else self._views.float32[start // 4 :][: len(self)]

    @property
    def timestamps(self) -> Array | None:
        """Sample times in microseconds since 1970 UTC, int64 [B], or None unless the dataset has `timestamps`."""
        start = self._spec["timestamps"]
        return None if start is None else self._views.int64[start // 8 :][: len(self)]

    @cached_property
    def kept(self) -> dict[str, numpy.ndarray]:
        """The columns in the dataset's `keep`, by name, with one value per sample, as numpy arrays on the CPU.

        Integers are a `numpy.ma.MaskedArray` of int64, in which nulls are masked. Its `data` is a view of the batch's
        bytes, unless they are on a device. Texts are an array of str, with None for nulls.
        """
        return {column["name"]: self._kept_column(column) for column in self._spec["kept"]}

    def _kept_column(self, spec: dict[str, Any]) -> numpy.ndarray:
        size = len(self)
        valid = numpy.ones(size, dtype=bool)
        if spec["validity"] is not None:
            bits = self._bytes(spec["validity"], -(-size // 8))
            valid = numpy.unpackbits(bits, count=size, bitorder="little").astype(bool)
        if spec["texts"] is None:
            return numpy.ma.MaskedArray(self._bytes(spec["values"], 8 * size).view("int64"), mask=~valid)
        starts = self._bytes(spec["values"], 4 * (size + 1)).view("int32").tolist()
        texts = self._bytes(*spec["texts"]).tobytes()
        values = numpy.full(size, None, dtype=object)
        for sample in numpy.flatnonzero(valid):
            values[sample] = texts[starts[sample] : starts[sample + 1]].decode()
        return values

    def _bytes(self, start: int, length: int) -> numpy.ndarray:
        """Returns some bytes of the batch as a numpy array, which is a view if the bytes are on the CPU."""
        data: Any = self.data
        part = data[start : start + length]
        return part if self._kind is _Numpy else part.cpu().numpy()

    @cached_property
    def groups(self) -> dict[str, Group[Array]]:
        """The feature groups by name."""
        spec, groups = self._spec, {}
        # The start of the next feature's sizes, offsets and values in the arrays of their types.
        places = spec["sizes"] // 4, spec["offsets"] // 4, spec["values"] // 8
        for group in spec["groups"]:
            groups[group["name"]] = made = Group(self._views, group, places)
            places = made.end
        return groups

    @cached_property
    def features(self) -> dict[str, Feature[Array]]:
        """The features of all groups by name."""
        return {name: feature for group in self.groups.values() for name, feature in group.features.items()}

    @property
    def lengths(self) -> Array:
        """The sizes of all lists, int32, ordered by group, feature and row."""
        lists = sum(group["rows"] * len(group["features"]) for group in self._spec["groups"])
        return self._views.int32[self._spec["sizes"] // 4 :][:lists]

    @property
    def values(self) -> Array:
        """The ids of all features, int64, ordered by group, feature and row."""
        count = sum(feature["values"] for group in self._spec["groups"] for feature in group["features"])
        return self._views.int64[self._spec["values"] // 8 :][:count]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the allocation."""
        data: Any = self.data
        return data.nbytes

    def _block_of_data(self) -> Block:
        """Returns a block with the bytes: the block that shares its memory, or a copy."""
        if self._block is not None:
            return self._block
        return Block(numpy.ascontiguousarray(self.numpy().data), json.dumps(self._spec))

    def expand(self) -> Batch[Array]:
        """Returns the batch with separate lists for every sample, on the same device or in pinned memory."""
        expanded: Batch[Any] = Batch.of(self._block_of_data().expand(), self._position)
        if self._kind is _Numpy:
            return expanded
        data: Any = self.data
        if data.device.type == "cpu" and data.is_pinned():
            return expanded.pin_memory()
        return expanded.to(data.device)

    def writable(self) -> Batch[Array]:
        """Returns a copy whose arrays can be changed. Its memory is not shared."""
        data: Any = self.data
        return Batch(None, data.copy() if self._kind is _Numpy else data.clone(), self._spec, self._position)

    def to_arrow(self) -> ArrowBatch:
        """Returns an object with the Arrow PyCapsule interface, one row per sample: `pyarrow.record_batch(it)`.

        It shares the bytes of the batch. It copies them only if torch tensors share them, because these can be
        changed at any time. A feature is a column of `list_view<int64>`, or of `dictionary<int32, list_view<int64>>`
        if its group has an inverse index. A kept column is `int64` or `string`. The batch itself also implements the
        interface.
        """
        return ArrowBatch(self._block_of_data())

    def __arrow_c_schema__(self) -> Any:
        return self._block_of_data().__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return self._block_of_data().__arrow_c_array__(requested_schema)

    def to_torch(self, *, pin_memory: bool = False) -> Batch[torch.Tensor]:
        """Returns the batch with torch tensors instead of numpy arrays.

        The tensors are views of the same bytes. They are a copy if `pin_memory`, or if the bytes must not change
        because Arrow shares them or the batch was unpickled.
        """
        torch = optional("torch", "torch")
        if self._kind is _Torch:
            batch: Batch[Any] = self
        else:
            data: Any = self.data
            if self._block is not None:
                # A block gives numpy a writable buffer, unless Arrow shares its memory.
                buffer: Any = self._block
                data = numpy.frombuffer(buffer, dtype=numpy.uint8)
            shares = data.flags.writeable
            tensor = torch.from_numpy(data if shares else data.copy())
            batch = Batch(self._block if shares else None, tensor, self._spec, self._position)
        return batch.pin_memory() if pin_memory else batch

    def pin_memory(self, device: Any = None) -> Batch[torch.Tensor]:
        """Copies the batch to torch tensors in pinned memory. `DataLoader(pin_memory=True)` calls it."""
        torch = optional("torch", "torch")
        if not torch.cuda.is_available():
            raise OptionsError("`pin_memory` needs a GPU, and torch finds none\n  hint: leave it out on this machine")
        batch = self.to_torch()
        return batch._moved(batch.data.pin_memory())

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch[torch.Tensor]:
        """Returns the batch with torch tensors on `device`, by one copy of one allocation."""
        batch = self.to_torch()
        return batch._moved(batch.data.to(device, non_blocking=non_blocking))

    def _moved(self, data: Any) -> Batch[Any]:
        """Returns the batch with these bytes, which are its own bytes or a copy of them."""
        return self if data is self.data else Batch(None, data, self._spec, self._position)

    def numpy(self) -> Batch[numpy.ndarray]:
        """Returns the batch with numpy arrays."""
        data: Any = self.data
        if self._kind is _Numpy:
            return Batch(self._block, data, self._spec, self._position)
        if self._block is not None:
            return Batch.of(self._block, self._position)
        return Batch(None, data.cpu().numpy(), self._spec, self._position)

    def to_kjt(self, **options: Any) -> KeyedJaggedTensor:
        """Returns the batch as TorchRec's KeyedJaggedTensor: see `onefold.torchrec.to_kjt`."""
        from .torchrec import to_kjt

        return to_kjt(self, **options)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the dataset after this batch, for `Dataset.load_state_dict`. Copies also have it.

        It is None if the batch has no position.
        """
        if self._position is None:
            return None
        return {"version": STATE_VERSION, "position": json.loads(self._position)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.data, self._spec, self._position)

    def __repr__(self) -> str:
        groups = ", ".join(f"{name}: {group.rows} rows" for name, group in self.groups.items())
        return f"onefold.Batch({len(self)} samples, {groups})"

    def _repr_html_(self) -> str:
        widths = f"{self._spec['dense_width']} dense features, {self._spec['label_width']} labels"
        rows = [
            (name, group.name, feature.rows, feature._spec["values"], "yes" if group.inverse is not None else "no")
            for group in self.groups.values()
            for name, feature in group.features.items()
        ]
        title = f"{len(self):,} samples, {widths}, {self.nbytes:,} bytes"
        return table(title, ["feature", "group", "rows", "ids", "deduplicated"], rows)


def _unpickled(data: Any, spec: dict[str, Any], position: str | None) -> Batch[Any]:
    if isinstance(data, numpy.ndarray):
        # The array is read-only, as in other batches. Whether pickle restores that depends on its protocol. The array
        # of a shallow copy belongs to another batch, too.
        data = data.view()
        data.flags.writeable = False
    return Batch(None, data, spec, position)


class ArrowBatch:
    """A batch with the Arrow interface, for `pyarrow.record_batch`, `polars.from_arrow` or any other library."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __arrow_c_schema__(self) -> Any:
        return self._block.__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: Any = None) -> tuple[Any, Any]:
        return self._block.__arrow_c_array__(requested_schema)


class Group(Generic[Array]):
    """Features that share one inverse index: sample `i` has row `inverse[i]` of each, or row `i` without an index."""

    def __init__(self, views: _Data[Array], spec: dict[str, Any], places: tuple[int, int, int]) -> None:
        self._views, self._spec, self._places = views, spec, places
        self.name: str = spec["name"]
        self.rows: int = spec["rows"]
        self.features: dict[str, Feature[Array]] = {}
        """The features by name."""
        sizes, offsets, values = places
        rows = self.rows
        for feature in spec["features"]:
            self.features[feature["name"]] = Feature(views, rows, feature, (sizes, offsets, values))
            sizes += rows
            offsets += rows
            values += feature["values"]
        self.end = sizes, offsets, values

    @property
    def inverse(self) -> Array | None:
        """The row of every sample, int32 [B]; None if every sample is a row."""
        start = self._spec["inverse"]
        return None if start is None else self._views.int32[start // 4 :][: self._views.size]

    @property
    def packed(self) -> bool:
        """Whether no lists share ids. `values` and `lengths` are then those of a KeyedJaggedTensor."""
        return all(feature["packed"] for feature in self._spec["features"])

    @property
    def lengths(self) -> Array:
        """The sizes of all lists, int32 [features × rows]."""
        return self._views.int32[self._places[0] :][: self.rows * len(self._spec["features"])]

    @property
    def values(self) -> Array:
        """The ids of all features, int64, ordered by feature."""
        count = sum(feature["values"] for feature in self._spec["features"])
        return self._views.int64[self._places[2] :][:count]

    def __repr__(self) -> str:
        return f"onefold.Group({self.name!r}, {self.rows} rows, {len(self._spec['features'])} features)"


class Feature(Generic[Array]):
    """Lists of ids: row `u` is `values[offsets[u] : offsets[u] + sizes[u]]`. With windows, rows may overlap."""

    def __init__(self, views: _Data[Array], rows: int, spec: dict[str, Any], places: tuple[int, int, int]) -> None:
        self._views, self._spec = views, spec
        self._sizes, self._offsets, self._values = places
        self.rows = rows
        self.name = spec["name"]

    @property
    def values(self) -> Array:
        """The ids, int64."""
        return self._views.int64[self._values : self._values + self._spec["values"]]

    @property
    def sizes(self) -> Array:
        """The number of ids of every row, int32 [rows]."""
        return self._views.int32[self._sizes : self._sizes + self.rows]

    @property
    def offsets(self) -> Array:
        """The start of every row in `values`, int32 [rows]."""
        return self._views.int32[self._offsets : self._offsets + self.rows]

    @property
    def packed(self) -> bool:
        """Whether rows are consecutive and share no ids."""
        return self._spec["packed"]

    def row(self, row: int) -> Array:
        """Returns the ids of a row."""
        sizes, offsets, values = self._rows()
        row = integer("row", row, signed=True)
        start = int(offsets[row])
        return values[start : start + int(sizes[row])]

    def _rows(self) -> tuple[Any, Any, Any]:
        """Returns sizes, offsets and values, as numpy arrays or torch tensors."""
        return self.sizes, self.offsets, self.values

    def padded(self, length: int | None = None, *, value: int = 0) -> tuple[Array, Array]:
        """Returns the rows as one array [rows, length], padded with `value`, and a mask that is true for ids.

        Longer lists are truncated to their last `length` ids, which are the newest ones of a sequence. By default
        `length` is that of the longest list. Index both arrays with the group's `inverse` to expand them to samples.
        """
        kind = self._views.kind
        sizes, offsets, values = self._rows()
        value = integer("value", value, signed=True)
        if length is not None:
            length = integer("length", length)
        else:
            length = int(sizes.max()) if self.rows else 0
        kept = sizes.clip(0, length)
        ramp = kind.ramp(length, values)
        mask = ramp[None, :] < kept[:, None]
        if len(values) == 0:
            empty = mask * 0
            return (empty + value).astype("int64") if kind is _Numpy else (empty + value).long(), mask
        places = kind.where(mask, (offsets + sizes - kept)[:, None] + ramp[None, :], ramp[:1] * 0)
        return kind.where(mask, values[places], value), mask

    def __repr__(self) -> str:
        return f"onefold.Feature({self.name!r}, {self.rows} rows, {self._spec['values']} ids)"
