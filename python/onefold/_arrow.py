"""Datasets as Arrow streams, with one row per sample and plain lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy

from ._batch import Batch
from ._errors import OptionsError
from ._optional import optional


class ArrowStream:
    """The samples of a dataset as an Arrow stream, which DuckDB, Polars, pandas, pyarrow and others read.

    It implements the interface `__arrow_c_stream__`. Each use reads the epoch from its start, one batch at a time, so
    it takes the memory of a few batches, plus the memory that the using library keeps. `schema` is a schema of
    pyarrow.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        options: Mapping[str, Any],
        read: Callable[[], AbstractContextManager[Iterable[Batch[Any]]]],
    ) -> None:
        self._arrow = optional("pyarrow", "arrow")
        self._timestamps = options["timestamps"]
        self._columns = _columns(self._arrow, schema, options)
        self._read = read

    @property
    def schema(self) -> Any:
        """The columns as a `pyarrow.Schema`."""
        return self._arrow.schema(self._columns)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._reader().__arrow_c_stream__(requested_schema)

    def _reader(self) -> Any:
        schema = self.schema
        return self._arrow.RecordBatchReader.from_batches(schema, self._batches(schema))

    def _batches(self, schema: Any) -> Iterator[Any]:
        with self._read() as batches:
            for batch in batches:
                if len(batch):
                    yield self._arrow.record_batch(list(self._values(batch)), schema=schema)

    def _values(self, batch: Batch[numpy.ndarray]) -> Iterator[Any]:
        """Yields the columns of a batch, in the order of the schema."""
        arrow = self._arrow
        for matrix in (batch.labels, batch.dense):
            for column in range(matrix.shape[1]):
                yield arrow.array(numpy.ascontiguousarray(matrix[:, column]))
        if batch.weights is not None:
            yield arrow.array(batch.weights)
        if self._timestamps:
            yield arrow.array(batch.timestamps).cast(_time(arrow))
        for values in batch.kept.values():
            if isinstance(values, numpy.ma.MaskedArray):
                yield arrow.array(values.data, mask=numpy.ma.getmaskarray(values))
            else:
                yield arrow.array(values, arrow.string())
        for feature in batch.features.values():
            offsets = numpy.append(feature.offsets, numpy.int32(len(feature.values)))
            yield arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(feature.values))


def _time(arrow: Any) -> Any:
    return arrow.timestamp("us", tz="UTC")


def _columns(arrow: Any, schema: Mapping[str, Any], options: Mapping[str, Any]) -> list[Any]:
    """Returns the fields of the stream: labels, dense features, weight, time, kept columns, sparse features."""
    floats = [*schema["labels"], *schema["dense"], *([schema["weight"]] if schema.get("weight") else [])]
    fields = [arrow.field(name, arrow.float32(), nullable=False) for name in floats]
    if options["timestamps"]:
        fields.append(arrow.field("timestamp", _time(arrow), nullable=False))
    texts = {column["name"] for column in schema.get("kept", []) if column["type"] == "text"}
    fields += [arrow.field(name, arrow.string() if name in texts else arrow.int64()) for name in options["keep"] or []]
    ids = arrow.list_(arrow.field("item", arrow.int64(), nullable=False))
    names = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    fields += [arrow.field(name, ids, nullable=False) for name in names]
    twice = {field.name for field in fields if sum(other.name == field.name for other in fields) > 1}
    if twice:
        raise OptionsError(
            f"two columns would have the name {', '.join(f'`{name}`' for name in sorted(twice))}\n"
            "  hint: leave one of them out, with `features`, `keep` or `timestamps`"
        )
    return fields
