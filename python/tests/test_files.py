"""Tests the list of a snapshot's data files, which other engines can read."""

from functools import partial
from pathlib import Path

import polars
import pyarrow.parquet as parquet
import pytest

import onefold


@pytest.fixture
def halves(tmp_path):
    """Returns logs, and a dataset whose sessions are in two partitions."""
    logs, data = tmp_path / "logs", tmp_path / "data"
    onefold.cli.generate(workload="rm3", samples=400, seed=5, out=logs)
    text = (logs / "dataset.toml").read_text()
    assert "SELECT f.*," in text and 'by = "hour"' in text
    text = text.replace("SELECT f.*,", "SELECT f.*, CAST(f.session_id % 2 AS VARCHAR) AS half,")
    (logs / "dataset.toml").write_text(text.replace('by = "hour"', 'columns = ["half"]'))
    onefold.build(logs / "dataset.toml", out=data, buckets=2)
    return logs, data


def test_a_snapshots_files_have_its_samples_once(halves):
    logs, data = halves
    first = onefold.files(data)
    assert {frozenset(files.partition.items()) for files in first} == {
        frozenset({("half", "0")}),
        frozenset({("half", "1")}),
    }
    for files in first:
        opened = parquet.ParquetFile(files.path)
        assert opened.metadata.num_rows == files.samples
        assert list(files.files.values()) == [opened.schema_arrow.names]
        assert Path(files.path).is_absolute() and Path(files.path).is_relative_to(data)
    # When a dataset is replaced, the files of the previous snapshot remain in the directory.
    onefold.build(logs / "dataset.toml", out=data, buckets=2, overwrite=True)
    second = onefold.files(data)
    assert onefold.files(data, at=1) == first
    assert not {files.path for files in first} & {files.path for files in second}
    assert sum(files.samples for files in second) == onefold.Dataset(data, global_batch_size=64).samples == 400
    assert {files.path for files in first} | {files.path for files in second} == set(map(str, data.rglob("part-*.parquet")))
    frame = polars.scan_parquet([files.path for files in second])
    assert frame.select(polars.len()).collect().item() == 400


def test_a_filter_chooses_partitions(halves):
    _, data = halves
    chosen = onefold.files(data, partitions="half=1")
    assert chosen == [files for files in onefold.files(data) if files.partition == {"half": "1"}] != []
    with pytest.raises(onefold.OptionsError, match="no partition matches"):
        onefold.files(data, partitions="half=2")
    with pytest.raises(onefold.OnefoldError, match="is not a dataset"):
        onefold.files(data.parent)
    with pytest.raises(onefold.OnefoldError, match="snapshot"):
        onefold.files(data, at=7)


@pytest.mark.parametrize("url", ["s3://bucket/ds", "gs://bucket/ds", "grpc://host:7070/ds"])
def test_a_path_of_a_url_is_refused(url, tmp_path, monkeypatch):
    """Tests that a URL given as a `Path`, which merges its two slashes into one, does not become a local folder."""
    monkeypatch.chdir(tmp_path)
    generate = partial(onefold.cli.generate, workload="rm3", samples=10, seed=1)
    for use in (onefold.files, onefold.Dataset, lambda path: generate(out=path)):
        with pytest.raises(onefold.OptionsError) as refused:
            use(Path(url))
        assert url in refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_files_are_in_the_order_of_the_samples(dataset):
    labels = [label for batch in onefold.Dataset(dataset) for label in batch.labels[:, 0].tolist()]
    (name,) = onefold.Dataset(dataset).schema["labels"]
    found = polars.scan_parquet([files.path for files in onefold.files(dataset)]).select(name).collect()
    assert found[name].to_list() == labels


def test_files_of_a_store_are_urls_and_those_of_a_local_url_are_paths(dataset, stored):
    paths = [files.path for files in onefold.files(dataset)]
    assert [files.path for files in onefold.files(dataset.as_uri())] == paths
    urls = [files.path for files in onefold.files(stored)]
    assert urls == [f"{stored}/{Path(path).relative_to(dataset).as_posix()}" for path in paths]


def test_columns_in_several_files_are_not_one_file():
    both = onefold.FileSet({}, 10, {"a.parquet": ["user"], "b.parquet": ["label"]})
    with pytest.raises(onefold.OptionsError, match="several files: a.parquet, b.parquet") as refused:
        both.path
    assert "position of the rows" in refused.value.hint
