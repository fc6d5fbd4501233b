"""Batches: views of one allocation, in numpy or torch."""

import json
from functools import cached_property

import numpy

from ._onefold import Block
from ._optional import optional


class _Numpy:
    """How parts of a batch become numpy arrays."""

    @staticmethod
    def view(data, start, count, dtype):
        return data[start : start + count * numpy.dtype(dtype).itemsize].view(dtype)

    @staticmethod
    def ramp(length, like):
        return numpy.arange(length, dtype=numpy.int32)

    @staticmethod
    def where(mask, a, b):
        return numpy.where(mask, a, b)


class _Torch:
    """How parts of a batch become torch tensors."""

    @staticmethod
    def view(data, start, count, dtype):
        import torch

        dtype = getattr(torch, dtype)
        return data[start : start + count * dtype.itemsize].view(dtype)

    @staticmethod
    def ramp(length, like):
        import torch

        return torch.arange(length, dtype=torch.int32, device=like.device)

    @staticmethod
    def where(mask, a, b):
        import torch

        return torch.where(mask, a, b)


class _Data:
    """The bytes of a batch, and how parts of them become arrays.

    Groups and features hold it and not their batch, so that a batch that is dropped goes at once, without a garbage collector.
    """

    def __init__(self, data, size):
        self.data, self.size = data, size
        self.kind = _Numpy if isinstance(data, numpy.ndarray) else _Torch

    def view(self, start, count, dtype):
        return self.kind.view(self.data, start, count, dtype)


class Batch:
    """Samples: dense features, labels, and sparse features by group.

    A batch is one allocation, `data`, and all its arrays are views of it, made when they are asked for. They are numpy arrays,
    or torch tensors after `to_torch()`. Each of them keeps the allocation alive. DLPack: `torch.from_dlpack(batch.dense)`.
    """

    def __init__(self, block, data=None, spec=None):
        self._block = block
        self._spec = json.loads(block.spec()) if spec is None else spec
        self.data = numpy.frombuffer(block, dtype=numpy.uint8) if data is None else data
        self._views = _Data(self.data, self._spec["size"])
        self._kind, self._view = self._views.kind, self._views.view

    def _matrix(self, name):
        width = self._spec[name.removesuffix("s") + "_width"]
        return self._view(self._spec[name], len(self) * width, "float32").reshape(len(self), width)

    def __len__(self):
        """The number of samples, B."""
        return self._spec["size"]

    @cached_property
    def dense(self):
        """Dense features, float32 [B, D]."""
        return self._matrix("dense")

    @cached_property
    def labels(self):
        """Labels, float32 [B, L]."""
        return self._matrix("labels")

    @cached_property
    def weights(self):
        """Sample weights, float32 [B], or None."""
        start = self._spec["weights"]
        return None if start is None else self._view(start, len(self), "float32")

    @cached_property
    def timestamps(self):
        """Sample times in microseconds since 1970 UTC, int64 [B], or None if the dataset was not asked for them."""
        start = self._spec["timestamps"]
        return None if start is None else self._view(start, len(self), "int64")

    @cached_property
    def groups(self):
        """The feature groups by name."""
        spec, groups = self._spec, {}
        place = _Place(spec["sizes"], spec["offsets"], spec["values"], spec["value_weights"])
        for group in spec["groups"]:
            groups[group["name"]] = Group(self._views, group, place)
            place = place.after(group)
        return groups

    @cached_property
    def features(self):
        """The features of all groups by name."""
        return {name: feature for group in self.groups.values() for name, feature in group.features.items()}

    @cached_property
    def lengths(self):
        """The sizes of all lists, int32, by group, feature and row."""
        lists = sum(group["rows"] * len(group["features"]) for group in self._spec["groups"])
        return self._view(self._spec["sizes"], lists, "int32")

    @cached_property
    def values(self):
        """The ids of all features, int64, by group, feature and row."""
        count = sum(feature["values"] for group in self._spec["groups"] for feature in group["features"])
        return self._view(self._spec["values"], count, "int64")

    @property
    def nbytes(self):
        """The bytes of the allocation."""
        return self.data.nbytes

    def _block_of_data(self):
        """The block that holds the data on the CPU; a new one for a batch that was unpickled or copied."""
        if self._block is None:
            data = self.data if self._kind is _Numpy else self.data.cpu().numpy()
            self._block = Block(numpy.ascontiguousarray(data), json.dumps(self._spec))
        return self._block

    def expand(self):
        """The batch with every sample's own lists: what the batch means."""
        block = self._block_of_data().expand()
        batch = Batch(block)
        return batch if self._kind is _Numpy else batch.to_torch()

    def to_arrow(self):
        """An object of the Arrow PyCapsule interface, one row per sample, without a copy: `pyarrow.record_batch(it)`.

        A feature is a column of `list_view<int64>`, or `dictionary<int32, list_view<int64>>` where its group has an
        inverse index. The batch itself has the interface too.
        """
        return ArrowBatch(self._block_of_data())

    def __arrow_c_schema__(self):
        return self._block_of_data().__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema=None):
        return self._block_of_data().__arrow_c_array__(requested_schema)

    def to_torch(self, *, pin_memory=False):
        """The batch with torch tensors in the place of numpy arrays: views of the same bytes, or a copy in pinned memory."""
        torch = optional("torch", "torch")
        data = torch.from_numpy(self.data) if self._kind is _Numpy else self.data
        batch = Batch(self._block, data, self._spec)
        return batch.pin_memory() if pin_memory else batch

    def pin_memory(self, device=None):
        """The batch with torch tensors in pinned memory, one copy; what `DataLoader(pin_memory=True)` calls."""
        from ._errors import OptionsError

        torch = optional("torch", "torch")
        if not torch.cuda.is_available():
            raise OptionsError("`pin_memory` needs a GPU, and torch finds none\n  hint: leave it out on this machine")
        data = torch.from_numpy(self.data) if self._kind is _Numpy else self.data
        return Batch(None, data.pin_memory(), self._spec)

    def to(self, device, *, non_blocking=False):
        """The batch with torch tensors on `device`: one copy of one allocation."""
        torch = optional("torch", "torch")
        data = torch.from_numpy(self.data) if self._kind is _Numpy else self.data
        moved = data.to(device, non_blocking=non_blocking)
        return Batch(self._block if moved is data else None, moved, self._spec)

    def numpy(self):
        """The batch with numpy arrays."""
        if self._kind is _Numpy:
            return self
        return Batch(self._block, self.data.cpu().numpy(), self._spec)

    def to_kjt(self, **options):
        """TorchRec's KeyedJaggedTensor of the batch: see `onefold.torchrec.to_kjt`."""
        from .torchrec import to_kjt

        return to_kjt(self, **options)

    def state_dict(self):
        """Where a dataset goes on after this batch, as `Dataset.load_state_dict` takes it; None for an unpickled batch."""
        from ._dataset import STATE_VERSION

        position = None if self._block is None else self._block.position()
        return None if position is None else {"version": STATE_VERSION, "position": json.loads(position)}

    def __reduce__(self):
        return _unpickled, (self.data, self._spec)

    def __repr__(self):
        groups = ", ".join(f"{name}: {group.rows} rows" for name, group in self.groups.items())
        return f"onefold.Batch({len(self)} samples, {groups})"


def _unpickled(data, spec):
    return Batch(None, data, spec)


class ArrowBatch:
    """A batch as Arrow has it: give it to `pyarrow.record_batch`, `polars.from_arrow` or any other library."""

    def __init__(self, block):
        self._block = block

    def __arrow_c_schema__(self):
        return self._block.__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema=None):
        return self._block.__arrow_c_array__(requested_schema)


class _Place:
    """Where a group's parts begin, in bytes."""

    def __init__(self, sizes, offsets, values, weights):
        self.sizes, self.offsets, self.values, self.weights = sizes, offsets, values, weights

    def after(self, group):
        lists = 4 * group["rows"] * len(group["features"])
        values = sum(feature["values"] for feature in group["features"])
        weights = sum(feature["values"] for feature in group["features"] if feature["weighted"])
        return _Place(self.sizes + lists, self.offsets + lists, self.values + 8 * values, self.weights + 4 * weights)


class Group:
    """Features that share one inverse index: sample `i` has row `inverse[i]` of each, or row `i` if there is no index."""

    def __init__(self, views, spec, place):
        self._views, self._spec, self._place = views, spec, place
        self.name = spec["name"]
        self.rows = spec["rows"]

    @cached_property
    def inverse(self):
        """The row of every sample, int32 [B]; None if row and sample are the same."""
        start = self._spec["inverse"]
        return None if start is None else self._views.view(start, self._views.size, "int32")

    @cached_property
    def packed(self):
        """Whether no list shares ids with another: then `values` and `lengths` are a KeyedJaggedTensor's."""
        return all(feature["packed"] for feature in self._spec["features"])

    @cached_property
    def lengths(self):
        """The sizes of all lists, int32 [features × rows]."""
        return self._views.view(self._place.sizes, self.rows * len(self._spec["features"]), "int32")

    @cached_property
    def values(self):
        """The ids of all features, int64, feature by feature."""
        count = sum(feature["values"] for feature in self._spec["features"])
        return self._views.view(self._place.values, count, "int64")

    @cached_property
    def features(self):
        """The features by name."""
        features, place = {}, self._place
        for spec in self._spec["features"]:
            features[spec["name"]] = Feature(self._views, self.rows, spec, place)
            place = place.after({"rows": self.rows, "features": [spec]})
        return features

    def __repr__(self):
        return f"onefold.Group({self.name!r}, {self.rows} rows, {len(self._spec['features'])} features)"


class Feature:
    """Lists of ids, one per row: row `u` is `values[offsets[u] : offsets[u] + sizes[u]]`. With windows rows may overlap."""

    def __init__(self, views, rows, spec, place):
        self._views, self._spec, self._place = views, spec, place
        self.rows = rows
        self.name = spec["name"]

    @cached_property
    def values(self):
        """The ids, int64."""
        return self._views.view(self._place.values, self._spec["values"], "int64")

    @cached_property
    def weights(self):
        """One float32 per id, or None."""
        if not self._spec["weighted"]:
            return None
        return self._views.view(self._place.weights, self._spec["values"], "float32")

    @cached_property
    def sizes(self):
        """The ids of every row, int32 [rows]."""
        return self._views.view(self._place.sizes, self.rows, "int32")

    @cached_property
    def offsets(self):
        """Where every row begins in `values`, int32 [rows]."""
        return self._views.view(self._place.offsets, self.rows, "int32")

    @cached_property
    def packed(self):
        """Whether rows stand one after the other and share no ids."""
        return self._spec["packed"]

    def row(self, row):
        """The ids of a row."""
        start = int(self.offsets[row])
        return self.values[start : start + int(self.sizes[row])]

    def padded(self, length=None, *, value=0):
        """The rows as one array [rows, length] filled up with `value`, and a mask of what is not filled up.

        Of longer lists the last `length` ids are kept, which are a sequence's newest. By default `length` is the longest list's.
        Index both with the group's `inverse` to expand them to samples.
        """
        kind = self._views.kind
        sizes, offsets, values = self.sizes, self.offsets, self.values
        if length is None:
            length = int(sizes.max()) if self.rows else 0
        kept = sizes.clip(0, length)
        ramp = kind.ramp(length, values)
        mask = ramp[None, :] < kept[:, None]
        if len(values) == 0:
            empty = mask * 0
            return (empty + value).astype("int64") if kind is _Numpy else (empty + value).long(), mask
        places = kind.where(mask, (offsets + sizes - kept)[:, None] + ramp[None, :], ramp[:1] * 0)
        return kind.where(mask, values[places], value), mask

    def __repr__(self):
        return f"onefold.Feature({self.name!r}, {self.rows} rows, {self._spec['values']} ids)"
