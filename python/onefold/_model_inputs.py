"""Converts the inputs of a model into tensors: from a batch, a KeyedJaggedTensor, or lists by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from ._batch import Batch
from ._errors import DataError, OptionsError
from ._optional import optional

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = optional("torch", "torch")


@dataclass(frozen=True)
class Feature:
    """A sparse feature of a model."""

    name: str
    rows: int
    """Rows of its table."""
    hashed: bool
    """Whether any id has a row. If not, ids are rows."""
    padded: bool
    """Whether a part of the model pools it."""


@dataclass
class _Lists:
    """Consecutive lists: their ids, their lengths, and the list of every sample, unless every sample is a list."""

    values: Tensor
    lengths: Tensor
    inverse: Tensor | None


def tensors_of(
    features: Mapping[str, Feature],
    dense_features: list[str],
    inputs: Any,
    dense: Any,
    inverse: Mapping[str, Any],
    device: torch.device,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """See `Model.tensors`. `features` and `dense_features` are those of the model."""
    if inverse and not isinstance(inputs, Mapping):
        raise OptionsError("`inverse` is for features by name\n  hint: a batch and a KeyedJaggedTensor have their own")
    size: int | None = None
    if isinstance(inputs, Batch):
        batch = inputs.to(device)
        lists, dense, size = _of_batch(batch), batch.dense if dense is None else dense, len(batch)
    elif isinstance(inputs, Mapping):
        lists, dense = _of_mapping(features, dense_features, inputs, dense, inverse)
    elif hasattr(inputs, "inverse_indices_or_none"):
        lists = _of_kjt(inputs)
    else:
        raise OptionsError(
            f"a model takes no {type(inputs).__name__}\n"
            "  hint: give a batch, a KeyedJaggedTensor, or a dict of lists by feature"
        )
    missing = [name for name in features if name not in lists]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        known = ", ".join([*dense_features, *features])
        raise OptionsError(f"the model needs the features {names}, which are not given\n  hint: it has {known}")
    lists = {name: lists[name] for name in features}
    matrix = _dense(dense_features, dense)
    size = _size(matrix, lists) if size is None else size
    if len(matrix) != size:
        if len(matrix) != 1:
            raise OptionsError(
                f"there are {len(matrix)} rows of dense features for {size} samples\n  hint: give one for each"
            )
        matrix = matrix.expand(size, -1)
    tensors = {name: _tensors(features[name], own, size, device) for name, own in lists.items()}
    return matrix.to(device).contiguous(), tensors


def _of_batch(batch: Batch[Tensor]) -> dict[str, _Lists]:
    lists = {}
    for group in batch.groups.values():
        for feature in group.features.values():
            values, lengths = feature.values, feature.sizes.long()
            if not feature.packed:
                # Rows may share ids.
                starts = torch.repeat_interleave(feature.offsets.long() - (lengths.cumsum(0) - lengths), lengths)
                values = values[starts + torch.arange(len(starts), device=starts.device)]
            lists[feature.name] = _Lists(values, lengths, group.inverse)
    return lists


def _of_kjt(kjt: Any) -> dict[str, _Lists]:
    index = kjt.inverse_indices_or_none()
    inverse = {} if index is None else dict(zip(index[0], index[1].unbind(), strict=True))
    by_key = {key: kjt[key] for key in kjt.keys()}
    return {key: _Lists(own.values(), own.lengths().long(), inverse.get(key)) for key, own in by_key.items()}


def _of_mapping(
    features: Mapping[str, Feature],
    dense_features: list[str],
    inputs: Mapping[str, Any],
    dense: Any,
    inverse: Mapping[str, Any],
) -> tuple[dict[str, _Lists], Any]:
    known = dict.fromkeys([*dense_features, *features])
    unknown = [name for name in inputs if name not in known]
    unknown += [name for name in inverse if name not in features]
    if unknown:
        raise OptionsError(f"the model has no feature `{unknown[0]}` of this kind\n  hint: it has {', '.join(known)}")
    sparse = {name: value for name, value in inputs.items() if name in features}
    lists = {}
    for name, value in sparse.items():
        values, lengths = _ids(name, value)
        rows = inverse.get(name)
        lists[name] = _Lists(values, lengths, None if rows is None else _integers(name, rows))
    columns = [name for name in dense_features if name in inputs]
    if dense is None and columns != dense_features:
        missing = next(name for name in dense_features if name not in inputs)
        raise OptionsError(
            f"the model needs the dense feature `{missing}`, which is not given\n  hint: it has {', '.join(known)}"
        )
    if dense is None and columns:
        dense = _columns({name: inputs[name] for name in columns})
    return lists, dense


def _columns(columns: Mapping[str, Any]) -> Tensor:
    """Returns dense features as a matrix, float32 [B, D]. A single number counts for all samples."""
    parts = {name: _tensor(f"dense feature `{name}`", values).float() for name, values in columns.items()}
    size = next((part.numel() for part in parts.values() if part.numel() != 1), 1)
    for name, part in parts.items():
        if part.numel() not in (1, size) or sum(length != 1 for length in part.shape) > 1:
            raise OptionsError(
                f"dense feature `{name}` has the shape {list(part.shape)} for {size} samples\n"
                "  hint: give one number for each, or one for all"
            )
    return torch.stack([part.reshape(-1).expand(size) for part in parts.values()], 1)


def _tensor(what: str, values: Any) -> Tensor:
    """Returns values as a tensor. numpy arrays are copied, because torch has no read-only tensors."""
    try:
        return torch.tensor(values) if isinstance(values, numpy.ndarray) else torch.as_tensor(values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise OptionsError(f"{what}: {error}\n  hint: give numbers, in lists or in a tensor") from None


def _integers(name: str, values: Any) -> Tensor:
    """Returns values as a vector of integers."""
    tensor = _tensor(f"feature `{name}`", values)
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool or tensor.dim() != 1:
        raise OptionsError(f"feature `{name}`: ids and rows are integers in lists\n  hint: give one list for every row")
    return tensor.long()


def _ids(name: str, value: Any) -> tuple[Tensor, Tensor]:
    """Returns the ids and lengths of a feature's lists."""
    if isinstance(value, tuple) and len(value) == 2 and all(torch.is_tensor(part) for part in value):
        return _integers(name, value[0]), _integers(name, value[1])
    if torch.is_tensor(value) or isinstance(value, numpy.ndarray):
        matrix = _tensor(f"feature `{name}`", value)
        matrix = matrix.unsqueeze(1) if matrix.dim() == 1 else matrix
        lengths = torch.full((len(matrix),), matrix.shape[1], dtype=torch.int64)
        return _integers(name, matrix.reshape(-1)), lengths
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise OptionsError(f"feature `{name}` is a {type(value).__name__}\n  hint: give one list of ids for every row")
    rows = [list(row) if isinstance(row, Iterable) and not isinstance(row, str) else [row] for row in value]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return _integers(name, [value for row in rows for value in row]), lengths


def _dense(dense_features: list[str], dense: Any) -> Tensor:
    """Returns the dense features, float32 [B, D], or [1, 0] for a model without dense features."""
    width = len(dense_features)
    if width == 0:
        return torch.zeros(1, 0)
    if dense is None:
        raise OptionsError(
            f"the model needs {width} dense features, which are not given\n  hint: give `dense`, [B, {width}]"
        )
    matrix = _tensor("`dense`", dense).float()
    if matrix.dim() != 2 or matrix.shape[1] != width:
        raise OptionsError(
            f"dense features have the shape {list(matrix.shape)}, and the model needs [B, {width}]\n"
            f"  hint: the columns are {', '.join(dense_features)}"
        )
    return matrix


def _size(dense: Tensor, lists: Mapping[str, _Lists]) -> int:
    """Returns the number of samples: the first length that is not 1, or 1."""
    counts = [len(dense)]
    counts += [len(own.lengths if own.inverse is None else own.inverse) for own in lists.values()]
    others = [count for count in counts if count != 1]
    return others[0] if others else 1


def _tensors(feature: Feature, own: _Lists, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the three tensors of a feature."""
    values, lengths = own.values.to(device).long(), own.lengths.to(device)
    rows, name = len(lengths), feature.name
    if int(lengths.sum()) != len(values) or (rows and int(lengths.min()) < 0):
        raise DataError(
            f"feature `{name}` has {len(values)} ids, and its lengths do not sum up to them\n  hint: check the lengths"
        )
    if own.inverse is not None:
        inverse = own.inverse.to(device).long()
    elif rows == 1:
        inverse = torch.zeros(size, dtype=torch.int64, device=device)
    else:
        inverse = torch.arange(rows, device=device)
    if len(inverse) != size:
        raise OptionsError(
            f"feature `{name}` has {len(inverse)} lists for {size} samples\n  hint: give one for each, or rows in `inverse`"
        )
    _check(name, "row", inverse, rows)
    if not feature.hashed:
        _check(name, "id", values, feature.rows)
    return _padded(values, lengths) if feature.padded else values, lengths, inverse


def _check(name: str, what: str, values: Tensor, rows: int) -> None:
    """Raises an error if a value is not a row."""
    if len(values) == 0:
        return
    low, high = (int(bound) for bound in values.aminmax())
    if low < 0 or high >= rows:
        wrong = low if low < 0 else high
        raise DataError(
            f"feature `{name}` has the {what} {wrong}, and there are {rows} rows\n"
            "  hint: give what the dataset of the model had, whose vocabularies number ids"
        )


def _padded(values: Tensor, lengths: Tensor) -> Tensor:
    """Returns lists as a matrix padded with zeros, with at least one column."""
    longest = max(int(lengths.max()), 1) if len(lengths) else 1
    mask = torch.arange(longest, device=values.device) < lengths.unsqueeze(1)
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=values.device)
    ids[mask] = values
    return ids
