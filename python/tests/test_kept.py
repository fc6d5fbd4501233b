"""Kept columns, which batches contain in addition to their features."""

import pickle

import numpy
import pyarrow
import pytest
from samples import samples_of

import onefold

B = 512
COLUMNS = ["request", "country", "number", "session_id"]
QUERY = """SELECT f.*, f.request_id AS request,
    CASE WHEN f.request_id % 3 = 0 THEN NULL ELSE concat('länd ', CAST(f.request_id % 7 AS VARCHAR)) END AS country,
    CASE WHEN f.request_id % 5 = 0 THEN NULL ELSE f.request_id * 1000000000007 END AS number,"""


def country(request):
    return None if request % 3 == 0 else f"länd {request % 7}"


def number(request):
    return None if request % 5 == 0 else request * 1000000000007


@pytest.fixture(scope="module")
def kept_dataset(logs, tmp_path_factory):
    """Returns a dataset of rm1 that keeps an integer, a text with nulls and an integer with nulls."""
    folder = tmp_path_factory.mktemp("kept")
    text = (logs / "dataset.toml").read_text()
    text = text.replace("format_version = 1\n", 'format_version = 1\nkeep = ["request", "country", "number"]\n')
    text = text.replace("SELECT f.*,", QUERY)
    for kind in ("features", "events"):
        (folder / kind).symlink_to(logs / kind)
    (folder / "dataset.toml").write_text(text)
    onefold.build(folder / "dataset.toml", out=folder / "data", buckets=8)
    return folder / "data"


@pytest.fixture(params=["exact", "window", "off"])
def batch(request, kept_dataset):
    with onefold.Dataset(kept_dataset, global_batch_size=B, dedupe=request.param, keep=COLUMNS) as reader:
        return next(iter(reader))


def test_every_sample_has_its_values(kept_dataset, dataset):
    columns = ["country", "request", "number"]
    reader = onefold.Dataset(kept_dataset, global_batch_size=B, keep=columns, shuffle=True, seed=3)
    batches = list(reader)
    requests = [request for batch in batches for request in batch.kept["request"].tolist()]
    assert len(set(requests)) == len(requests) == 6000
    for batch in batches:
        kept = {name: values.tolist() for name, values in batch.kept.items()}
        assert list(kept) == columns
        assert kept["country"] == [country(request) for request in kept["request"]]
        assert kept["number"] == [number(request) for request in kept["request"]]
    # The kept values belong to the samples at the same positions.
    in_order = onefold.Dataset(kept_dataset, global_batch_size=B, keep=["request"])
    plain = onefold.Dataset(dataset, global_batch_size=B)
    by_request = {
        request: sample
        for batch in in_order
        for request, sample in zip(batch.kept["request"].tolist(), samples_of(batch), strict=True)
    }
    assert list(by_request.values()) == [sample for batch in plain for sample in samples_of(batch)]
    for batch in batches[:2]:
        assert samples_of(batch) == [by_request[request] for request in batch.kept["request"].tolist()]


def test_integers_are_masked_and_texts_are_objects(batch):
    kept = batch.kept
    assert kept["request"].dtype == kept["number"].dtype == kept["session_id"].dtype == numpy.int64
    assert not kept["request"].mask.any() and kept["number"].mask.any() and not kept["number"].mask.all()
    assert numpy.shares_memory(kept["number"].data, batch.data)
    assert kept["country"].dtype == object and {type(value) for value in kept["country"]} == {str, type(None)}
    assert all(len(values) == B for values in kept.values())
    # The samples of a session are consecutive.
    changes = numpy.flatnonzero(numpy.diff(kept["session_id"]))
    assert len(set(kept["session_id"].tolist())) == len(changes) + 1


def test_copies_have_them_too(batch):
    before = {name: values.tolist() for name, values in batch.kept.items()}
    unpickled = pickle.loads(pickle.dumps(batch))
    for copy in (unpickled, batch.expand(), batch.numpy(), unpickled.expand()):
        assert {name: values.tolist() for name, values in copy.kept.items()} == before


def test_arrow_has_them_with_nulls(batch):
    for source in (batch, pickle.loads(pickle.dumps(batch))):
        rows = pyarrow.record_batch(source)
        rows.validate(full=True)
        for name, kept in batch.kept.items():
            assert rows.column(name).type == (pyarrow.string() if name == "country" else pyarrow.int64())
            assert rows.column(name).to_pylist() == kept.tolist()


def test_ranks_and_steps_without_samples_have_them(kept_dataset):
    options = {"global_batch_size": 5600, "streams": 8, "world_size": 8, "keep": COLUMNS}
    seen, sizes = [], set()
    for rank in range(8):
        for batch in onefold.Dataset(kept_dataset, rank=rank, **options):
            assert list(batch.kept) == COLUMNS and all(len(values) == len(batch) for values in batch.kept.values())
            seen += batch.kept["request"].tolist()
            sizes.add(len(batch))
    assert len(set(seen)) == len(seen) == 6000 and 0 in sizes


def test_none_are_read_by_default(kept_dataset):
    reader = onefold.Dataset(kept_dataset, global_batch_size=B)
    assert next(iter(reader)).kept == {} and reader.schema.get("kept", []) == []
    reader = onefold.Dataset(kept_dataset, global_batch_size=B, keep=["country"])
    assert reader.schema["kept"] == [{"name": "country", "type": "text"}]
    again = pickle.loads(pickle.dumps(reader))
    assert list(next(iter(again)).kept) == ["country"]


def test_wrong_columns_are_exceptions_with_hints(kept_dataset, dataset):
    with pytest.raises(onefold.OptionsError, match="the dataset keeps no column `contry`") as caught:
        onefold.Dataset(kept_dataset, keep=["contry"])
    assert "did you mean `country`?" in caught.value.hint
    with pytest.raises(ValueError, match="`keep` names the column `country` twice"):
        onefold.Dataset(kept_dataset, keep=["country", "country"])
    with pytest.raises(ValueError, match="`keep` is the text `country`"):
        onefold.Dataset(kept_dataset, keep="country")
    with pytest.raises(onefold.OptionsError, match="keeps no column `user_00`"):
        onefold.Dataset(dataset, keep=["user_00"])


def test_what_python_writes_over_them_is_checked(batch):
    batch = batch.writable()
    (column,) = (column for column in batch._spec["kept"] if column["name"] == "country")
    starts = batch.data[column["values"] :][: 4 * (B + 1)].view("int32")
    starts[3] = 1 << 30
    for work in (batch.expand, lambda: pyarrow.record_batch(batch.to_arrow())):
        with pytest.raises(onefold.DataError, match="kept column `country`"):
            work()
    starts[:] = 0
    starts[-1] = 1 << 30
    with pytest.raises(onefold.DataError, match="kept column `country`"):
        batch.expand()


@pytest.mark.torch
def test_tensors_and_loaders_have_them_as_numpy_arrays(kept_dataset):
    import onefold.torch
    from torch.utils.data import DataLoader

    options = {"global_batch_size": B, "streams": 8, "keep": COLUMNS}
    batch = next(iter(onefold.Dataset(kept_dataset, **options)))
    for tensors in (batch.to_torch(), batch.to("cpu")):
        assert isinstance(tensors.kept["number"], numpy.ma.MaskedArray)
        assert {name: values.tolist() for name, values in tensors.kept.items()} == {
            name: values.tolist() for name, values in batch.kept.items()
        }
    loader = DataLoader(onefold.torch.Dataset(kept_dataset, **options), batch_size=None, num_workers=2)
    requests = [request for batch in loader for request in batch.kept["request"].tolist()]
    assert len(set(requests)) == len(requests) == 6000
