"""Tests that builds from Arrow streams give the same datasets as builds from files."""

import duckdb
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

import onefold

TABLES = ("features", "events")


def digest(dataset, **options):
    return onefold.cli.digest(dataset, progress=False, **options)["digest"]


def reader(folder):
    """Returns a stream that can be read once, one row group at a time."""
    scanner = pyarrow.dataset.dataset(folder, format="parquet").scanner(batch_size=1000)
    return scanner.to_reader()


READERS = {
    "pyarrow": lambda folder: pyarrow.parquet.read_table(folder),
    "a stream": reader,
    "duckdb": lambda folder: duckdb.sql(f"SELECT * FROM read_parquet('{folder}/*.parquet')"),
    "polars": lambda folder: polars.read_parquet(folder / "*.parquet"),
    "pandas-like": lambda folder: Wrapped(pyarrow.parquet.read_table(folder)),
}


class Wrapped:
    """Wraps a table in an object that has only the Arrow stream interface."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.fixture(scope="module")
def from_files(logs, tmp_path_factory):
    out = tmp_path_factory.mktemp("files") / "data"
    return onefold.build(logs / "dataset.toml", out=out), digest(out)


@pytest.mark.parametrize("library", READERS)
def test_a_build_from_streams_is_that_from_files(logs, from_files, tmp_path, library):
    sources = {table: READERS[library](logs / table) for table in TABLES}
    built = onefold.build(logs / "dataset.toml", out=tmp_path / "data", sources=sources, spill_directory=tmp_path)
    assert built["samples"] == from_files[0]["samples"] == 6000
    assert digest(tmp_path / "data") == from_files[1]
    # No temporary files are left.
    assert not list(tmp_path.glob("onefold-sources-*"))


def test_streams_and_files_go_together_and_append_too(logs, from_files, tmp_path):
    sources = {"events": polars.read_parquet(logs / "events" / "*.parquet"), "features": logs / "features" / "*.parquet"}
    onefold.build(logs / "dataset.toml", out=tmp_path / "data", sources=sources)
    assert digest(tmp_path / "data") == from_files[1]
    assert not onefold.append(logs / "dataset.toml", out=tmp_path / "data", sources=sources)["changed"]


def test_the_checks_are_those_of_files(logs, tmp_path):
    def refused(sources, kind, message):
        with pytest.raises(kind, match=message) as error:
            onefold.build(logs / "dataset.toml", out=tmp_path / "data", sources=sources, spill_directory=tmp_path)
        assert not list(tmp_path.glob("onefold-sources-*"))
        return error.value

    events = pyarrow.parquet.read_table(logs / "events")
    error = refused({"event": events}, onefold.OptionsError, "names no files `event`")
    assert "did you mean `events`?" in error.hint
    # A column that the query reads is missing.
    refused({"events": events.drop_columns(["label"])}, onefold.OnefoldError, "label")

    def failing():
        yield events.to_batches()[0]
        raise RuntimeError("the connection is lost")

    stream = pyarrow.RecordBatchReader.from_batches(events.schema, failing())
    refused({"events": stream}, onefold.DataError, "stream of the source `events` cannot be read.*connection is lost")
    with pytest.raises(onefold.StorageError, match="no-folder"):
        onefold.build(
            logs / "dataset.toml", out=tmp_path / "data", sources={"events": events}, spill_directory=tmp_path / "no-folder"
        )
    for wrong in (events, "events.parquet", [("events", events)]):
        with pytest.raises(TypeError, match="'sources' takes paths or Arrow streams by name"):
            onefold.build(logs / "dataset.toml", out=tmp_path / "data", sources=wrong)


@pytest.mark.parametrize(
    ("failure", "kind"), [(OSError("the disk is gone"), onefold.StorageError), (ValueError("a bad row"), onefold.DataError)]
)
def test_an_error_of_a_stream_is_not_one_of_the_file(tmp_path, failure, kind):
    from onefold._sources import as_files

    class Failing:
        def __arrow_c_stream__(self, requested_schema=None):
            raise failure

    schema = pyarrow.schema([("x", pyarrow.int64())])

    def batches():
        yield pyarrow.record_batch([pyarrow.array([1])], schema=schema)
        raise failure

    for source in (Failing(), pyarrow.RecordBatchReader.from_batches(schema, batches())):
        with pytest.raises(onefold.OnefoldError, match=f"of the source `x` cannot be read: .*{failure}") as caught:
            with as_files({"x": source}, tmp_path):
                pass
        assert "spill_directory" not in str(caught.value)
        assert isinstance(caught.value, kind) or not isinstance(source, Failing)
    assert list(tmp_path.iterdir()) == []


def test_types_that_files_lack_keep_their_values(tmp_path):
    """Tests views and categories, which Polars returns."""
    log = polars.DataFrame(
        {
            "user": polars.Series(["a", "a", "b"], dtype=polars.Categorical),
            "kind": ["x", None, "long enough for a view's own buffer"],
            "ids": [[1], [1, 2], []],
            "at": polars.Series([1, 2, 3]).cast(polars.Datetime("us", "UTC")).dt.offset_by("20000d"),
            "clicked": [0, 1, 1],
        }
    )
    (tmp_path / "dataset.toml").write_text(
        """format_version = 1
keep = ["kind"]
[sources]
log = "log.parquet"
[samples]
query = "SELECT * FROM log"
[session]
key = ["user"]
time = "at"
[features]
clicked = { kind = "label" }
ids = { kind = "sparse" }
"""
    )
    onefold.build(tmp_path / "dataset.toml", out=tmp_path / "data", sources={"log": log})
    # The same data as plain Parquet.
    plain = log.with_columns(polars.col("user").cast(polars.String)).to_arrow()
    pyarrow.parquet.write_table(plain, tmp_path / "log.parquet")
    onefold.build(tmp_path / "dataset.toml", out=tmp_path / "files")
    data, files = (digest(tmp_path / name, global_batch_size=3) for name in ("data", "files"))
    assert data == files
    batch = next(iter(onefold.Dataset(tmp_path / "data", global_batch_size=3, keep=["kind"])))
    assert sorted(map(str, batch.kept["kind"])) == sorted(map(str, log["kind"].to_list()))


def test_memory_does_not_grow_with_the_stream(tmp_path):
    from onefold._sources import as_files

    schema, largest = pyarrow.schema([("x", pyarrow.int64())]), 0

    def batches():
        nonlocal largest
        for first in range(0, 200 * 50_000, 50_000):
            yield pyarrow.record_batch([pyarrow.array(range(first, first + 50_000))], schema=schema)
            largest = max(largest, pyarrow.total_allocated_bytes() - before)

    before = pyarrow.total_allocated_bytes()
    with as_files({"x": pyarrow.RecordBatchReader.from_batches(schema, batches())}, tmp_path) as paths:
        metadata = pyarrow.parquet.read_metadata(paths["x"])
        assert metadata.num_rows == 10_000_000 and metadata.num_row_groups > 50
    # The stream contains 80 MB.
    assert largest < 20_000_000
