"""Batches in the structures of other trainers, compared with structures that are made from the log's samples."""

import itertools
from dataclasses import dataclass, field

import numpy
import pandas
import polars
import pyarrow.parquet
import pytest
import shop

import onefold
from onefold.adapters import dlrm_v3, fuxictr_frame, hstu_batch, recbole_frame, sequence_rows

B = 128
LOG = shop.samples()
CONTEXTUAL = {"uid": "user_id", "place": "city"}
HISTORY = {"video": "items", "weight": "actions"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shop.build(tmp_path_factory.mktemp("shop"))


def batches_of(data, dedupe, **options):
    options = {"global_batch_size": B, "keep": ["impression", "country"], "timestamps": True, **options}
    return list(onefold.Dataset(data, dedupe=dedupe, **options))


def samples_of(batch):
    """Returns the samples of the log that are in a batch, in its order."""
    return [LOG[impression] for impression in batch.kept["impression"].tolist()]


def requests_of(batch, dedupe, most=None):
    """Returns the samples of the log that are in a batch, by request."""
    names = ["impression"] if dedupe == "off" else ["user_id", "visit"]
    groups = itertools.groupby(samples_of(batch), key=lambda sample: [sample[name] for name in names])
    requests = [list(group) for _, group in groups]
    step = most or B
    return [request[start : start + step] for request in requests for start in range(0, len(request), step)]


def bits(sample):
    return int(sample["clicked"]) + 2 * int(sample["bought"])


def candidates_of(batch):
    """Returns the candidates of a batch: a feature, the times, and the labels as bits."""
    labels = batch.numpy().labels
    times = batch.numpy().timestamps // 1_000_000
    return {"item_video": "item_id", "query_time": times, "action": labels[:, 0] + 2 * labels[:, 1]}


def user_of(request, length=None):
    """Returns the features of the user of a request as lists, by the names of the trainer."""
    sample = request[0]
    newest = slice(None if length is None else -length, None)
    return {
        "uid": [sample["user_id"]],
        "place": [sample["city"]],
        "video": sample["items"][newest],
        "weight": sample["actions"][newest],
    }


def shown_in(request):
    """Returns the candidates of a request as lists, by the names of the trainer."""
    return {
        "item_video": [sample["item_id"] for sample in request],
        "query_time": [sample["time"] for sample in request],
        "action": [bits(sample) for sample in request],
    }


def kjt_of(rows):
    """Returns rows, each a dict of lists, as TorchRec's KeyedJaggedTensor, as a trainer collates its samples."""
    import torch
    from torchrec import KeyedJaggedTensor

    keys = list(rows[0])
    values = [id for key in keys for row in rows for id in row[key]]
    lengths = [len(row[key]) for key in keys for row in rows]
    return KeyedJaggedTensor(keys=keys, values=torch.tensor(values).long(), lengths=torch.tensor(lengths).long())


def assert_same_kjt(found, expected):
    import torch

    assert found.keys() == expected.keys() and found.stride() == expected.stride()
    for a, b in ((found.values(), expected.values()), (found.lengths(), expected.lengths())):
        assert a.dtype == b.dtype == torch.int64 and torch.equal(a, b)


@pytest.mark.torch
@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_dlrm_v3_has_the_samples_of_its_own_loader(data, dedupe, most):
    for batch in batches_of(data, dedupe):
        requests = requests_of(batch, dedupe, most)
        assert (len(requests) < len(batch)) == (dedupe != "off")
        options = dict(contextual=CONTEXTUAL, history=HISTORY, candidates=candidates_of(batch), max_candidates=most)
        for source in (batch, batch.to_torch()):
            user, candidates = dlrm_v3(source, **options)
            assert_same_kjt(user, kjt_of([user_of(request) for request in requests]))
            assert_same_kjt(candidates, kjt_of([shown_in(request) for request in requests]))
        short, _ = dlrm_v3(batch, max_history=3, **options)
        assert_same_kjt(short, kjt_of([user_of(request, 3) for request in requests]))


@dataclass
class HSTUBatch:
    """The fields of `HSTUBatch` and of its base class in NVIDIA's recsys-examples."""

    features: object
    batch_size: int
    feature_to_max_seqlen: dict
    contextual_feature_names: list = field(default_factory=list)
    labels: object = None
    actual_batch_size: int | None = None
    item_feature_name: str = "item_id"
    action_feature_name: str | None = None
    max_num_candidates: int = 0
    num_candidates: object = None


@pytest.mark.torch
@pytest.mark.parametrize("with_actions", [True, False])
@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_an_hstu_batch_is_that_of_its_own_loader(data, dedupe, with_actions):
    import torch

    for batch in batches_of(data, dedupe):
        requests = requests_of(batch, dedupe, 4)
        action = candidates_of(batch)["action"]
        candidates = {"video": "item_id"} | ({"weight": action} if with_actions else {})
        options = dict(contextual=CONTEXTUAL, history=HISTORY, candidates=candidates, labels=action)
        found = HSTUBatch(**hstu_batch(batch, max_history=6, max_candidates=4, batch_size=B, **options))
        rows = []
        for request in requests:
            user, shown = user_of(request, 6), shown_in(request)
            user["video"] = user["video"] + shown["item_video"]
            user["weight"] = user["weight"] + (shown["action"] if with_actions else [])
            rows.append(user)
        padding = [dict.fromkeys(rows[0], [])] * (B - len(rows))
        assert_same_kjt(found.features, kjt_of(rows + padding))
        labels = [{"label": shown_in(request)["action"]} for request in requests]
        assert_same_kjt(found.labels, kjt_of(labels + [{"label": []}] * len(padding)))
        counts = [len(request) for request in requests] + [0] * len(padding)
        assert torch.equal(found.num_candidates, torch.tensor(counts))
        assert (found.batch_size, found.actual_batch_size, found.max_num_candidates) == (B, len(requests), 4)
        assert found.feature_to_max_seqlen == {"uid": 1, "place": 1, "video": 10, "weight": 10}
        assert found.contextual_feature_names == ["uid", "place"]
        assert (found.item_feature_name, found.action_feature_name) == ("video", "weight")


@pytest.mark.torch
def test_an_hstu_batch_without_actions_and_labels(data):
    batch = batches_of(data, "exact")[0]
    found = hstu_batch(
        batch, history={"video": "items"}, candidates={"video": "item_id"}, max_history=8, max_candidates=9
    )
    assert found["action_feature_name"] is None and found["labels"] is None and found["contextual_feature_names"] == []
    assert found["batch_size"] == found["actual_batch_size"] == found["features"].stride()
    for given, message in [
        (dict(history=HISTORY, candidates={"other": "item_id"}), "one item feature"),
        (dict(history=HISTORY, candidates={"weight": "item_id"}), "one item feature"),
        (dict(history=HISTORY, candidates={"video": "item_id"}, batch_size=3), "requests"),
    ]:
        with pytest.raises(onefold.OptionsError, match=message):
            hstu_batch(batch, max_history=8, max_candidates=9, **given)
    with pytest.raises(TypeError, match="'history' takes a dict .*, not list"):
        hstu_batch(batch, history=["items"], candidates={"video": "item_id"}, max_history=8, max_candidates=9)


@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_sequence_rows_are_those_of_torcheasyrec(data, dedupe, tmp_path):
    names = {"uid": "user_id", "place": "city", "video": "uih_seq__video_id", "weight": "uih_seq__action_weight"}
    names |= {key: f"cand_seq__{key}" for key in ("item_video", "query_time", "action")}
    for batch in batches_of(data, dedupe):
        rows = sequence_rows(
            batch,
            contextual={names[key]: name for key, name in CONTEXTUAL.items()},
            history={names[key]: name for key, name in HISTORY.items()},
            candidates={names[key]: source for key, source in candidates_of(batch).items()},
        )
        requests = requests_of(batch, dedupe)
        expected = [{names[key]: ids for key, ids in (user_of(r) | shown_in(r)).items()} for r in requests]
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows.parquet")
        read = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
        assert read.to_pylist() == expected
        for name, column in zip(read.column_names, read.columns, strict=True):
            # Its parser takes the values and the differences of the offsets of a column `list<int64>`.
            (chunk,) = column.chunks
            assert chunk.type == pyarrow.list_(pyarrow.int64())
            assert chunk.values.to_numpy().tolist() == [id for row in expected for id in row[name]]
            assert numpy.diff(chunk.offsets.to_numpy()).tolist() == [len(row[name]) for row in expected]


def test_rows_of_a_batch_without_samples(data):
    options = {"global_batch_size": 64, "streams": 8, "world_size": 8}
    batches = [batch for rank in range(8) for batch in batches_of(data, "exact", rank=rank, **options)]
    empty = next(batch for batch in batches if not len(batch))
    schema = onefold.Dataset(data, keep=["impression", "country"]).schema
    for batch, requests in ((empty, 0), (batches[0], len(requests_of(batches[0], "exact")))):
        rows = sequence_rows(batch, history={"video": "items"}, candidates={"item": "item_id"}, max_candidates=9)
        assert rows.schema.names == ["video", "item"] and rows.num_rows == requests
        frame = recbole_frame(batch, schema, sequences=SEQUENCES)
        assert len(frame) == len(batch) and "items:token_seq" in frame


def test_wrong_features_are_exceptions_with_hints(data):
    batch = batches_of(data, "exact")[0]
    clicks = batch.labels[:, 0]
    good = dict(history={"video": "items"}, candidates={"item": "item_id"})
    kept = numpy.ma.MaskedArray(numpy.zeros(B, int), mask=numpy.arange(B) == 3)
    for change, kind, message in [
        (dict(history={}), onefold.OptionsError, "`history` is empty"),
        (dict(history={"video": "none"}), onefold.OptionsError, "no feature `none`"),
        (dict(history={"video": "items", "tags": "tags"}), onefold.DataError, "ids of `items` and . of `tags`"),
        (dict(candidates={}), onefold.OptionsError, "`candidates` is empty"),
        (dict(candidates={"tags": "tags"}), onefold.DataError, "ids of `tags`, and a candidate has one"),
        (dict(candidates={"video": "item_id"}), onefold.OptionsError, "`video` is the name of two columns"),
        (dict(contextual={"video": "city"}), onefold.OptionsError, "`video` is the name of two columns"),
        (dict(candidates={"click": clicks[:5]}), onefold.OptionsError, r"the shape \[5\]"),
        (dict(candidates={"click": clicks + 0.5}), onefold.DataError, "no integers"),
        (dict(candidates={"click": clicks + numpy.nan}), onefold.DataError, "no integers"),
        (dict(candidates={"kept": kept}), onefold.DataError, "`kept` is null"),
        (dict(candidates={"country": batch.kept["country"]}), onefold.OptionsError, "the type object"),
        (dict(max_candidates=0), onefold.OptionsError, "`max_candidates` is 0"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            sequence_rows(batch, **{**good, **change})
        assert caught.value.hint


SEQUENCES = ["items", "actions", "tags"]


def rows_of(frames):
    """Returns the rows of data frames as dicts, with None for nulls."""
    rows = pandas.concat(frames, ignore_index=True).to_dict("records")
    return [{name: None if pandas.isna(value) else value for name, value in row.items()} for row in rows]


def expected_rows(separator):
    """Returns the rows of a data frame of the log by impression."""
    features = ["user_id", "city", "items", "actions", "item_id", "color", "tags"]
    rows = {}
    for sample in LOG:
        row = {name: sample[name] for name in ("clicked", "bought", "price")}
        row |= {"timestamp": float(sample["time"]), "impression": sample["impression"], "country": sample["country"]}
        for name in features:
            given = sample[name] if isinstance(sample[name], list) else [sample[name]]
            row[name] = separator.join(map(str, given)) if name in SEQUENCES else (given or [None])[0]
        rows[sample["impression"]] = row
    return rows


@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_frames_have_a_row_for_every_sample(data, dedupe):
    schema = onefold.Dataset(data, keep=["impression", "country"]).schema
    batches = batches_of(data, dedupe)
    frames = [fuxictr_frame(batch, schema, sequences=SEQUENCES) for batch in batches]
    found, expected = rows_of(frames), expected_rows("^")
    assert len(found) == len(LOG) and found == [expected[row["impression"]] for row in found]
    frames = [recbole_frame(batch, schema, sequences=SEQUENCES) for batch in batches]
    kinds = {name.partition(":")[0]: name.partition(":")[2] for name in frames[0]}
    assert {name for name, kind in kinds.items() if kind == "token_seq"} == set(SEQUENCES)
    assert {name for name, kind in kinds.items() if kind == "float"} == {"clicked", "bought", "price", "timestamp"}
    found = [{name.partition(":")[0]: value for name, value in row.items()} for row in rows_of(frames)]
    expected = expected_rows(" ")
    assert found == [expected[row["impression"]] for row in found]


def test_trainers_read_the_files_of_frames(data, tmp_path):
    schema = onefold.Dataset(data, keep=["impression", "country"]).schema
    batches = batches_of(data, "window")
    samples = [sample for batch in batches for sample in samples_of(batch)]
    fuxictr = pandas.concat([fuxictr_frame(batch, schema, sequences=SEQUENCES) for batch in batches])
    fuxictr.to_csv(tmp_path / "train.csv", index=False)
    # FuxiCTR reads a file with Polars, replaces nulls, and divides a sequence at its separator.
    table = polars.scan_csv(tmp_path / "train.csv", schema_overrides={"items": polars.String}).collect()
    items = [list(map(int, filter(None, text.split("^")))) for text in table["items"].fill_null("")]
    assert items == [sample["items"] for sample in samples]
    assert table["clicked"].to_list() == [sample["clicked"] for sample in samples]
    recbole = pandas.concat([recbole_frame(batch, schema, sequences=SEQUENCES) for batch in batches])
    recbole.to_csv(tmp_path / "shop.inter", sep="\t", index=False)
    # RecBole reads tokens as texts with pandas' engine of Python, and divides a sequence at spaces.
    types = {name: float if name.endswith(":float") else str for name in recbole}
    read = pandas.read_csv(tmp_path / "shop.inter", delimiter="\t", dtype=types, engine="python")
    tags = [list(map(int, filter(None, text.split(" ")))) for text in read["tags:token_seq"].fillna("")]
    assert tags == [sample["tags"] for sample in samples]
    assert read["item_id:token"].tolist() == [str(sample["item_id"]) for sample in samples]


def test_frames_refuse_lists_and_equal_names(data):
    schema = onefold.Dataset(data).schema
    batch = batches_of(data, "exact")[0]
    with pytest.raises(onefold.DataError, match="ids of `items`") as caught:
        fuxictr_frame(batch, schema)
    assert "`sequences`" in caught.value.hint
    with pytest.raises(onefold.OptionsError, match="no feature `none`"):
        fuxictr_frame(batch, schema, sequences=["none"])
    with pytest.raises(onefold.OptionsError, match="`sequences` is the text `items`"):
        fuxictr_frame(batch, schema, sequences="items")
    with pytest.raises(onefold.OptionsError, match="two columns"):
        fuxictr_frame(batch, {**schema, "dense": ["clicked"]}, sequences=SEQUENCES)


@pytest.mark.torch
@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_torchs_own_modules_take_the_lists_of_a_feature(data, dedupe):
    import torch

    from onefold.torch import bag_inputs, nested

    torch.manual_seed(1)
    bags = torch.nn.EmbeddingBag(300, 4, mode="sum")
    for batch in batches_of(data, dedupe):
        lists = [sample["items"] for sample in samples_of(batch)]
        tensors = batch.to_torch()
        group = tensors.groups["timeline"]
        rows = torch.arange(len(batch)) if group.inverse is None else group.inverse.long()
        feature = group.features["items"]
        offsets = [0, *itertools.accumulate(map(len, lists))][:-1]
        ids = torch.tensor([id for ids in lists for id in ids])
        assert torch.allclose(bags(*bag_inputs(feature))[rows], bags(ids, torch.tensor(offsets)), atol=1e-6)
        found = nested(feature)
        row_lists = [lists[rows.tolist().index(row)] for row in range(feature.rows)]
        expected = torch.nested.nested_tensor(
            [torch.tensor(ids, dtype=torch.int64) for ids in row_lists], layout=torch.jagged
        )
        assert found.layout == torch.jagged and found.dtype == torch.int64
        assert torch.equal(found.values(), expected.values()) and torch.equal(found.offsets(), expected.offsets())
        vectors = torch.nn.functional.embedding(found, bags.weight).sum(dim=1)
        assert torch.allclose(vectors[rows], bags(ids, torch.tensor(offsets)), atol=1e-6)
