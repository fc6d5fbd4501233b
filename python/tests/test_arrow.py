"""Datasets as Arrow streams, which other engines read without knowledge of the layout; and output in notebooks."""

import duckdb
import numpy
import polars
import pyarrow
import pytest
from test_dataset import no_threads

import onefold

B = 512


def lists(dataset, name, **options):
    """Returns the lists of a feature, one per sample."""
    batches = [batch.expand() for batch in onefold.Dataset(dataset, global_batch_size=B, **options)]
    return [batch.features[name].row(row).tolist() for batch in batches for row in range(len(batch))]


@pytest.mark.parametrize("dedupe", ["off", "exact", "window"])
def test_a_stream_has_a_row_with_plain_lists_for_every_sample(dataset, rows_dataset, dedupe):
    options = dict(timestamps=True, keep=["session_id"], dedupe=dedupe)
    reader = onefold.Dataset(dataset, global_batch_size=B, **options)
    stream = reader.to_arrow()
    table = pyarrow.table(stream)
    table.validate(full=True)
    assert table.schema == stream.schema and table.num_rows == 6000
    batches = [batch.expand() for batch in onefold.Dataset(dataset, global_batch_size=B, **options)]
    schema = reader.schema
    for matrix, names in (("dense", schema["dense"]), ("labels", schema["labels"])):
        expected = numpy.concatenate([getattr(batch, matrix) for batch in batches])
        found = numpy.stack([table[name].to_numpy() for name in names], axis=1)
        assert found.tobytes() == expected.tobytes()
    features = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    for name in features:
        assert table[name].type == pyarrow.list_(pyarrow.field("item", pyarrow.int64(), nullable=False))
        assert table[name].to_pylist() == lists(dataset, name)
    assert table["timestamp"].type == pyarrow.timestamp("us", tz="UTC")
    times = table["timestamp"].cast(pyarrow.int64()).to_numpy()
    assert (times == numpy.concatenate([batch.timestamps for batch in batches])).all()
    sessions = [session for batch in batches for session in batch.kept["session_id"].tolist()]
    assert table["session_id"].to_pylist() == sessions
    assert pyarrow.table(onefold.Dataset(rows_dataset, global_batch_size=B, **options).to_arrow()) == table


def test_engines_read_a_folded_dataset(dataset):
    stream = onefold.Dataset(dataset, global_batch_size=B, features=["user_01", "sequence_00"]).to_arrow()
    for name in ("user_01", "sequence_00"):
        expected = lists(dataset, name)
        assert polars.DataFrame(stream)[name].to_list() == expected
        assert [row[0] for row in duckdb.sql(f'SELECT "{name}" FROM stream').fetchall()] == expected
    # A second reader starts from the beginning, and a reader that is dropped ends its threads.
    reader = pyarrow.RecordBatchReader.from_stream(stream)
    assert reader.read_next_batch().num_rows == B
    reader.close()
    del reader
    assert no_threads()


def test_a_stream_consumes_no_epoch_and_has_the_ranks_part(dataset):
    options = dict(global_batch_size=B, streams=2, shuffle=True, seed=3, features=["user_01"])
    reader = onefold.Dataset(dataset, **options)
    reader.set_epoch(1)
    column = pyarrow.table(reader.to_arrow())["user_01"].to_pylist()
    assert reader.epoch == 1
    again = onefold.Dataset(dataset, **options)
    again.set_epoch(1)
    batches = [batch.expand() for batch in again]
    assert column == [batch.features["user_01"].row(row).tolist() for batch in batches for row in range(len(batch))]
    ranks = [onefold.Dataset(dataset, rank=rank, world_size=2, **options) for rank in range(2)]
    counts = [pyarrow.table(rank.to_arrow()).num_rows for rank in ranks]
    assert counts == [rank.samples for rank in ranks] and sum(counts) == 6000


def test_two_columns_of_one_name_are_refused(dataset, monkeypatch):
    reader = onefold.Dataset(dataset, timestamps=True)
    schema = {**reader.schema, "dense": ["timestamp", "other"]}
    monkeypatch.setattr(onefold.Dataset, "schema", schema)
    with pytest.raises(onefold.OptionsError, match="two columns would have the name `timestamp`") as refused:
        reader.to_arrow()
    assert "timestamps" in refused.value.hint


def test_notebooks_show_tables(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, keep=["session_id"])
    page = reader._repr_html_()
    assert page.startswith("<table><caption>") and "snapshot 1: 6,000 samples of rank 0 of 1" in page
    for name in ("user_01", "session_id", reader.schema["labels"][0], reader.schema["dense"][0]):
        assert f"<td>{name}</td>" in page
    batch = next(iter(reader))
    assert f"{B} samples, 13 dense features, 1 labels" in batch._repr_html_() and "<td>user_01</td>" in batch._repr_html_()
    assert repr(reader).startswith("onefold.Dataset(") and repr(batch).startswith("onefold.Batch(512 samples")
    reader._location = "<script>"
    assert "<script>" not in reader._repr_html_() and "&lt;script&gt;" in reader._repr_html_()
    reader.close()
    assert "closed" in reader._repr_html_()


def test_a_rank_without_samples_has_the_columns_of_others(dataset):
    options = dict(global_batch_size=B, streams=8, shuffle=True, seed=1, world_size=8)
    ranks = [list(onefold.Dataset(dataset, rank=rank, **options)) for rank in range(8)]
    schema = pyarrow.record_batch(ranks[0][0]).schema
    empty = [batch for rank in ranks for batch in rank if len(batch) == 0]
    assert empty and all(pyarrow.record_batch(batch).schema.equals(schema) for batch in empty)
