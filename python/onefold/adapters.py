"""Batches in the structures that other trainers take.

    from onefold.adapters import dlrm_v3

    user, candidates = dlrm_v3(batch, history={"movie_id": "history_items"}, candidates={"item_movie_id": "item_id"})

`dlrm_v3`, `hstu_batch` and `sequence_rows` are for trainers whose sample is a user's history with several candidates.
Such a sample is made from a request: all samples of a batch that have the same rows of the history and the other
features of the user. A history is therefore stored and computed once for all candidates, as it is in the batch. In a
batch without deduplication, every sample is a request. Requests are in the order of their first samples, and
candidates in the order of the samples.

Their arguments are dicts from names of the trainer to names of sparse features:

- `contextual`: features of the user without an order, such as ids of the user and the country.
- `history`: sequence features. All of them must have the same number of ids in a request.
- `candidates`: features with one id per sample, or arrays with one integer per sample [B], such as labels and times.
- `max_history`: longer histories are truncated to their newest ids.
- `max_candidates`: a request with more samples is divided into several, which repeat the history.

The results are on the CPU, and do not share the memory of the batch.

`fuxictr_frame` and `recbole_frame` are for trainers that read tables with one row per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from ._arguments import integer
from ._arguments import names as named
from ._batch import Batch, Feature, Group
from ._errors import DataError, OptionsError
from ._optional import optional

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow import RecordBatch
    from torchrec import KeyedJaggedTensor

__all__ = ["dlrm_v3", "fuxictr_frame", "hstu_batch", "recbole_frame", "sequence_rows"]

_Lists: TypeAlias = tuple[numpy.ndarray, numpy.ndarray]
"""The ids of lists one after the other, int64, and the sizes of the lists, int64."""
_Source: TypeAlias = Any
"""The name of a feature, or an array with one integer per sample [B]."""


def _group(batch: Batch[numpy.ndarray], name: str) -> Group[numpy.ndarray]:
    """Returns the group of a feature."""
    for group in batch.groups.values():
        if name in group.features:
            return group
    raise OptionsError(f"the batch has no feature `{name}`\n  hint: it has {', '.join(sorted(batch.features))}")


def _feature(batch: Batch[numpy.ndarray], name: str) -> tuple[numpy.ndarray, Feature[numpy.ndarray]]:
    """Returns the row of every sample [B] and a feature."""
    group = _group(batch, name)
    return _rows(batch, group), group.features[name]


def _rows(batch: Batch[numpy.ndarray], group: Group[numpy.ndarray]) -> numpy.ndarray:
    """Returns the row of every sample [B]."""
    return numpy.arange(len(batch)) if group.inverse is None else group.inverse


def _places(starts: numpy.ndarray, sizes: numpy.ndarray) -> numpy.ndarray:
    """Returns the places of the elements of lists, which begin at `starts`, list after list."""
    return numpy.repeat(starts - (sizes.cumsum() - sizes), sizes) + numpy.arange(sizes.sum())


class _Requests:
    """The samples of a batch by request."""

    def __init__(
        self,
        batch: Batch[Any],
        contextual: Mapping[str, str] | None,
        history: Mapping[str, str],
        candidates: Mapping[str, _Source],
        max_history: int | None,
        max_candidates: int | None,
    ) -> None:
        contextual = {} if contextual is None else contextual
        for option, given in (("contextual", contextual), ("history", history), ("candidates", candidates)):
            if not isinstance(given, Mapping):
                found = type(given).__name__
                raise TypeError(f"'{option}' takes a dict from names of the trainer to features, not {found}")
            if not given and option != "contextual":
                raise OptionsError(f"`{option}` is empty\n  hint: name at least one feature")
        self._batch = batch = batch.numpy()
        self._order, starts = self._grouped([*contextual.values(), *history.values()], max_candidates)
        self._first = self._order[starts]
        self.counts = numpy.diff(starts, append=len(batch))
        """The number of candidates of every request, int64."""
        self.contextual = {key: self._lists(name) for key, name in contextual.items()}
        """The lists of every request by the trainer's name."""
        self.history = {key: self._lists(name) for key, name in history.items()}
        """The histories of every request by the trainer's name."""
        self._check_history(history)
        if max_history is not None:
            limit = integer("max_history", max_history)
            self.history = {key: _newest(*lists, limit) for key, lists in self.history.items()}
        self.candidates = {key: (self.per_sample(key, source), self.counts) for key, source in candidates.items()}
        """The candidates of every request by the trainer's name."""

    def _grouped(self, names: list[str], max_candidates: int | None) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the samples ordered by request, and the place of the first sample of every request in this order."""
        batch, size = self._batch, len(self._batch)
        key = numpy.zeros(size, numpy.int64)
        for group in (group for group in batch.groups.values() if not group.features.keys().isdisjoint(names)):
            # Numbers of the combinations of rows so far, which are less than `size`.
            key = numpy.unique(key * group.rows + _rows(batch, group), return_inverse=True)[1]
        _, first, number = numpy.unique(key, return_index=True, return_inverse=True)
        order = numpy.argsort(first[number], kind="stable")
        counts = numpy.bincount(number, minlength=len(first))[numpy.argsort(first)]
        limit = max(size, 1) if max_candidates is None else integer("max_candidates", max_candidates)
        if limit == 0:
            raise OptionsError("`max_candidates` is 0\n  hint: give the number of candidates of the trainer's samples")
        places = _places(numpy.zeros_like(counts), counts)
        return order, numpy.flatnonzero(places % limit == 0)

    def _lists(self, name: str) -> _Lists:
        rows, feature = _feature(self._batch, name)
        rows = rows[self._first]
        sizes = feature.sizes[rows].astype(numpy.int64)
        return feature.values[_places(feature.offsets[rows], sizes)], sizes

    def _check_history(self, history: Mapping[str, str]) -> None:
        (name, (_, expected)), *others = zip(history.values(), self.history.values(), strict=True)
        for other, (_, sizes) in others:
            different = numpy.flatnonzero(sizes != expected)
            if len(different):
                at = different[0]
                raise DataError(
                    f"sample {self._first[at]} of the batch has {expected[at]} ids of `{name}` and {sizes[at]} of "
                    f"`{other}`\n  hint: features in `history` must describe the same elements"
                )

    def per_sample(self, key: str, source: _Source) -> numpy.ndarray:
        """Returns one integer per sample, request after request, int64 [B]."""
        is_feature = isinstance(source, str)
        values = _single(self._batch, source) if is_feature else _integers(key, source, len(self._batch))
        return values[self._order]


def _newest(values: numpy.ndarray, sizes: numpy.ndarray, limit: int) -> _Lists:
    """Returns the last `limit` ids of every list."""
    kept = numpy.minimum(sizes, limit)
    return values[_places(sizes.cumsum() - kept, kept)], kept


def _single(batch: Batch[numpy.ndarray], name: str) -> numpy.ndarray:
    """Returns the only id of every sample, int64 [B]."""
    rows, feature = _feature(batch, name)
    sizes = feature.sizes[rows]
    others = numpy.flatnonzero(sizes != 1)
    if len(others):
        raise DataError(
            f"sample {others[0]} of the batch has {sizes[others[0]]} ids of `{name}`, and a candidate has one\n"
            "  hint: leave the feature out of `candidates`, or keep its first id by a step `firstx` of preprocess.toml"
        )
    return feature.values[feature.offsets[rows]]


def _integers(key: str, source: Any, size: int) -> numpy.ndarray:
    """Returns an array as int64 [B]."""
    if numpy.ma.is_masked(source):
        raise DataError(f"`{key}` is null in some samples\n  hint: replace nulls: `column.filled(0)`")
    given = numpy.asarray(source)
    if given.shape != (size,):
        shape = list(given.shape)
        raise OptionsError(f"`{key}` has the shape {shape}\n  hint: give one integer per sample, the shape [{size}]")
    if given.dtype.kind not in "biuf":
        raise OptionsError(f"`{key}` has the type {given.dtype}\n  hint: give integers")
    with numpy.errstate(invalid="ignore"):
        integers = given.astype(numpy.int64)
    if (integers != given).any():
        raise DataError(f"`{key}` contains numbers that are no integers\n  hint: multiply and round them")
    return integers


def _merged(*parts: Mapping[str, _Lists]) -> dict[str, _Lists]:
    """Returns lists by key of several dicts."""
    merged: dict[str, _Lists] = {}
    for part in parts:
        twice = sorted(merged.keys() & part.keys())
        if twice:
            raise OptionsError(f"`{twice[0]}` is the name of two columns\n  hint: give each column its own name")
        merged |= part
    return merged


def _kjt(*parts: Mapping[str, _Lists]) -> KeyedJaggedTensor:
    """Returns lists by key as a KeyedJaggedTensor of int64."""
    lists = _merged(*parts)
    torch, torchrec = optional("torch", "torchrec"), optional("torchrec", "torchrec")
    values, lengths = (torch.from_numpy(numpy.concatenate(parts)) for parts in zip(*lists.values(), strict=True))
    return torchrec.KeyedJaggedTensor(keys=list(lists), values=values, lengths=lengths)


def dlrm_v3(
    batch: Batch[Any],
    *,
    contextual: Mapping[str, str] | None = None,
    history: Mapping[str, str],
    candidates: Mapping[str, _Source],
    max_history: int | None = None,
    max_candidates: int | None = None,
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Returns the samples of Meta's DLRMv3 (`generative-recommenders`): the KeyedJaggedTensors of users' features and
    of candidates, with one entry per request.

    They are the two arguments of its model and of its class `Samples`. The keys are the names in
    `hstu_uih_feature_names` (`contextual`, then `history`) and `hstu_candidate_feature_names`. Values and lengths are
    int64. Every key of the candidates has the same lengths.
    """
    requests = _Requests(batch, contextual, history, candidates, max_history, max_candidates)
    return _kjt(requests.contextual, requests.history), _kjt(requests.candidates)


def hstu_batch(
    batch: Batch[Any],
    *,
    contextual: Mapping[str, str] | None = None,
    history: Mapping[str, str],
    candidates: Mapping[str, _Source],
    labels: _Source = None,
    max_history: int,
    max_candidates: int,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Returns the arguments of `HSTUBatch` of NVIDIA's `recsys-examples`, for ranking: `HSTUBatch(**hstu_batch(…))`.

    The first key of `history` is its item feature, and the second one, if any, its action feature. A key that is also
    in `candidates` has the history and then the candidates of a request in one list, and another key the history
    alone. A contextual feature has one id. `labels` is an array with the bits of the tasks for every sample [B].
    Requests without samples are appended up to `batch_size`, which is the number of requests by default.
    """
    max_history, max_candidates = integer("max_history", max_history), integer("max_candidates", max_candidates)
    requests = _Requests(batch, contextual, history, candidates, max_history, max_candidates)
    keys, counts = list(history), requests.counts
    if len(keys) > 2 or not set(candidates) <= set(keys) or keys[0] not in candidates:
        raise OptionsError(
            "`HSTUBatch` has one item feature and one action feature\n"
            "  hint: give these two in `history`, and the item feature and perhaps the action feature in `candidates`"
        )
    for key, (_, sizes) in requests.contextual.items():
        if (sizes != 1).any():
            raise DataError(
                f"a request has more or fewer than one id of `{key}`, and a contextual feature of `HSTUBatch` has one\n"
                "  hint: leave it out of `contextual`, or keep its first id by a step `firstx` of preprocess.toml"
            )
    requested, size = len(counts), len(counts) if batch_size is None else integer("batch_size", batch_size)
    if requested > size:
        raise OptionsError(f"the batch has {requested} requests\n  hint: give a `batch_size` of at least {requested}")

    def padded(lists: Mapping[str, _Lists]) -> dict[str, _Lists]:
        return {key: (values, numpy.pad(sizes, (0, size - requested))) for key, (values, sizes) in lists.items()}

    shown = requests.candidates
    sequences = {key: _joined(lists, shown[key]) if key in shown else lists for key, lists in requests.history.items()}
    label = None if labels is None else padded({"label": (requests.per_sample("labels", labels), counts)})
    longest = max_history + max_candidates
    return {
        "features": _kjt(padded(requests.contextual), padded(sequences)),
        "batch_size": size,
        "actual_batch_size": requested,
        "feature_to_max_seqlen": {**dict.fromkeys(requests.contextual, 1), **dict.fromkeys(keys, longest)},
        "contextual_feature_names": list(requests.contextual),
        "item_feature_name": keys[0],
        "action_feature_name": keys[1] if len(keys) == 2 else None,
        "max_num_candidates": max_candidates,
        "num_candidates": optional("torch", "torch").from_numpy(numpy.pad(counts, (0, size - requested))),
        "labels": None if label is None else _kjt(label),
    }


def _joined(first: _Lists, second: _Lists) -> _Lists:
    """Returns lists that contain those of `first` and then those of `second`."""
    sizes = first[1] + second[1]
    starts = sizes.cumsum() - sizes
    values = numpy.empty(sizes.sum(), numpy.int64)
    values[_places(starts, first[1])] = first[0]
    values[_places(starts + first[1], second[1])] = second[0]
    return values, sizes


def sequence_rows(
    batch: Batch[Any],
    *,
    contextual: Mapping[str, str] | None = None,
    history: Mapping[str, str],
    candidates: Mapping[str, _Source],
    max_history: int | None = None,
    max_candidates: int | None = None,
) -> RecordBatch:
    """Returns rows for the groups `JAGGED_SEQUENCE` of TorchEasyRec, one per request: a `pyarrow.RecordBatch` whose
    columns are `list<int64>`.

    The columns are named `SEQUENCE__FEATURE`, such as `uih_seq__video_id`. Labels are columns of the candidates. Write
    the rows to Parquet files, and read these with `ParquetDataset` and `fg_mode: FG_NONE`. It needs pyarrow.
    """
    requests = _Requests(batch, contextual, history, candidates, max_history, max_candidates)
    lists = _merged(requests.contextual, requests.history, requests.candidates)
    arrow = optional("pyarrow", "arrow")

    def column(values: numpy.ndarray, sizes: numpy.ndarray) -> Any:
        offsets = numpy.concatenate([[0], sizes.cumsum()]).astype(numpy.int32)
        return arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(values))

    return arrow.RecordBatch.from_arrays([column(*given) for given in lists.values()], names=list(lists))


def fuxictr_frame(batch: Batch[Any], schema: Mapping[str, Any], *, sequences: Iterable[str] = ()) -> DataFrame:
    """Returns the samples of a batch as a `pandas.DataFrame` for FuxiCTR, with one row per sample.

    `schema` is `Dataset.schema`. The columns are labels, dense features, the sample weight, `timestamp` in seconds, the
    kept columns and the sparse features. Features in `sequences` are texts such as `"3^14^15"`, for a column of the
    type `sequence`. Another feature is an integer, or null if its list is empty. It needs pandas.
    """
    return _frame(batch, schema, sequences, "^", typed=False)


def recbole_frame(batch: Batch[Any], schema: Mapping[str, Any], *, sequences: Iterable[str] = ()) -> DataFrame:
    """Returns the samples of a batch as a `pandas.DataFrame` for RecBole's file `.inter`, with one row per sample.

    It is like `fuxictr_frame`, but ids of sequences are separated by spaces, and columns are named with their type:
    `label:float`, `item_id:token`, `history:token_seq`. Write it with `to_csv(path, sep="\\t", index=False)`.
    """
    return _frame(batch, schema, sequences, " ", typed=True)


def _frame(
    batch: Batch[Any], schema: Mapping[str, Any], sequences: Iterable[str], separator: str, typed: bool
) -> DataFrame:
    pandas = optional("pandas", "pandas")
    batch, lists = batch.numpy(), set(named("sequences", sequences))
    for name in lists:
        _group(batch, name)
    columns: list[tuple[str, str, Any]] = []
    for names, matrix in ((schema["labels"], batch.labels), (schema["dense"], batch.dense)):
        columns += [(name, "float", matrix[:, place]) for place, name in enumerate(names)]
    if batch.weights is not None:
        columns.append((schema["weight"], "float", batch.weights))
    if batch.timestamps is not None:
        columns.append(("timestamp", "float", batch.timestamps / 1e6))
    for name, values in batch.kept.items():
        is_text = not isinstance(values, numpy.ma.MaskedArray)
        columns.append((name, "token", pandas.array(values.tolist(), dtype="string" if is_text else "Int64")))
    for name in batch.features:
        if name in lists:
            columns.append((name, "token_seq", _texts(batch, name, separator)))
        else:
            columns.append((name, "token", pandas.arrays.IntegerArray(*_ids_or_null(batch, name))))
    frame = {f"{name}:{kind}" if typed else name: values for name, kind, values in columns}
    if len(frame) < len(columns):
        raise OptionsError(
            "two columns would have the same name\n  hint: leave one of them out, with `features` or `keep`"
        )
    return pandas.DataFrame(frame)


def _texts(batch: Batch[numpy.ndarray], name: str, separator: str) -> numpy.ndarray:
    """Returns the list of every sample as a text. The text of a row is made once."""
    rows, feature = _feature(batch, name)
    texts = [separator.join(map(str, feature.row(row).tolist())) for row in range(feature.rows)]
    return numpy.array(texts, dtype=object)[rows]


def _ids_or_null(batch: Batch[numpy.ndarray], name: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns the id of every sample, int64 [B], and a mask that is true for samples with an empty list."""
    rows, feature = _feature(batch, name)
    longest = feature.sizes.max(initial=0)
    if longest > 1:
        raise DataError(f"a sample has {longest} ids of `{name}`\n  hint: name the feature in `sequences`")
    given = feature.sizes == 1
    ids = numpy.zeros(feature.rows, numpy.int64)
    ids[given] = feature.values[feature.offsets[given]]
    return ids[rows], ~given[rows]
