"""Arrow streams as sources of a build. They are written to Parquet files, which the build reads."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from ._errors import DataError, OnefoldError, StorageError
from ._optional import optional

_ROW_GROUP_BYTES = 64 << 20
_ROW_GROUP_ROWS = 1 << 17


@contextlib.contextmanager
def as_files(sources: Mapping[str, Any], folder: str | os.PathLike[str] | None) -> Iterator[dict[str, Any]]:
    """Yields the sources as paths. Streams become files in a temporary directory in `folder`, removed at the end."""
    if not isinstance(sources, Mapping):
        raise TypeError(f"'sources' takes paths or Arrow streams by name, not {type(sources).__name__}")
    with contextlib.ExitStack() as stack:
        paths, directory = dict(sources), None
        for number, (name, source) in enumerate(sources.items()):
            if not hasattr(source, "__arrow_c_stream__"):
                continue
            if directory is None:
                with _storage_errors():
                    temporary = tempfile.TemporaryDirectory(prefix="onefold-sources-", dir=folder)
                directory = stack.enter_context(temporary)
            paths[name] = os.path.join(directory, f"{number}.parquet")
            with _storage_errors():
                _write(name, source, paths[name])
        yield paths


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Converts an error of the operating system into one of this package."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"an Arrow stream cannot be written to a file: {error}\n"
            "  hint: `spill_directory` must be a folder that exists and has room for it"
        ) from error


@contextlib.contextmanager
def _stream_errors(name: str) -> Iterator[None]:
    """Converts an error of a stream, which may be any exception, into one of this package."""
    try:
        yield
    except (OnefoldError, MemoryError):
        raise
    except Exception as error:
        kind = StorageError if isinstance(error, OSError) else DataError
        raise kind(
            f"the Arrow stream of the source `{name}` cannot be read: {error}\n"
            "  hint: give a stream that was not read before, and that can be read to its end"
        ) from error


def _batches(name: str, reader: Any) -> Iterator[Any]:
    """Yields the batches of a stream. Errors of the caller are not converted."""
    with _stream_errors(name):
        yield from reader


def _write(name: str, source: Any, path: str) -> None:
    """Writes a stream to a Parquet file, one row group at a time."""
    arrow, parquet = optional("pyarrow", "arrow"), optional("pyarrow.parquet", "arrow")
    with _stream_errors(name):
        reader = arrow.RecordBatchReader.from_stream(source)
        schema = arrow.schema([field.with_type(_plain(arrow, field.type)) for field in reader.schema])
    try:
        with reader, parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            held, rows, size = [], 0, 0
            for batch in _batches(name, reader):
                held.append(_as_plain(arrow, batch, schema))
                rows, size = rows + batch.num_rows, size + batch.nbytes
                if rows >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
                    writer.write_table(arrow.Table.from_batches(held, schema), row_group_size=2 * _ROW_GROUP_ROWS)
                    held, rows, size = [], 0, 0
            writer.write_table(arrow.Table.from_batches(held, schema))
    except arrow.ArrowException as error:
        raise DataError(
            f"the Arrow stream of the source `{name}` cannot be stored: {error}\n"
            "  hint: give a stream whose columns Parquet can store"
        ) from error


def _plain(arrow: Any, kind: Any) -> Any:
    """Returns the type with the same values but without views, which some Parquet readers do not support."""
    types = arrow.types
    if types.is_string_view(kind):
        return arrow.large_string()
    if types.is_binary_view(kind):
        return arrow.large_binary()
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _plain(arrow, kind.value_type), kind.ordered)
    if types.is_list(kind):
        return arrow.list_(_plain_field(arrow, kind.value_field))
    if types.is_large_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return arrow.large_list(_plain_field(arrow, kind.value_field))
    if types.is_struct(kind):
        return arrow.struct([_plain_field(arrow, field) for field in kind])
    return kind


def _plain_field(arrow: Any, field: Any) -> Any:
    return field.with_type(_plain(arrow, field.type))


def _as_plain(arrow: Any, batch: Any, schema: Any) -> Any:
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        if arrow.types.is_dictionary(column.type):
            values = column.dictionary.cast(field.type.value_type)
            columns.append(arrow.DictionaryArray.from_arrays(column.indices, values, ordered=field.type.ordered))
        else:
            columns.append(column.cast(field.type))
    return arrow.record_batch(columns, schema=schema)
