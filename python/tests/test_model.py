"""A trained model as an `nn.Module` predicts the same as `onefold-train predict`, from all kinds of inputs."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy
import parquet_log
import pyarrow
import pyarrow.parquet
import pytest

import onefold

pytestmark = pytest.mark.torch

SAMPLES = 600
FEATURES = """\
clicked = { kind = "label" }
seconds = { kind = "label" }
purchases = { kind = "label" }
age = { kind = "dense" }
price = { kind = "dense" }
visits = { kind = "dense" }
user_id = { kind = "sparse", group = "user" }
city = { kind = "sparse", group = "user" }
history = { kind = "sequence", group = "timeline" }
read = { kind = "sequence", group = "timeline" }
liked = { kind = "sequence", group = "timeline" }
item_id = { kind = "sparse" }
tags = { kind = "sparse" }
"""

CONFIG = """\
format_version = 1

[data]
{data}

[train]
batch_size = 100
epochs = 1
seed = 5

[model]
{model}

[embedding]
dim = 8
rows = 300
{embedding}
{tables}
"""

MLP = "bottom_mlp = [12, 8]\ntop_mlp = [16, 1]\n"
CLICKED = 'label = "clicked"'
STEPS = """\
format_version = 1

[[step]]
op = "clamp"
inputs = ["age"]
min = 20.0
max = 60.0

[[step]]
op = "sigrid_hash"
inputs = ["tags"]
max = 100
salt = 3
"""


def tables(**poolings):
    """Returns a section `[tables.…]` for every feature."""
    return "\n".join(f"[tables.{feature}]\n{text}\n" for feature, text in poolings.items())


ITEMS = '\ntable = "items"'
DIN = 'pooling = "din"\ntarget = "item_id"'
KINDS = {
    "sum": {},
    "mean": {"embedding": 'pooling = "mean"'},
    "hashed": {"embedding": 'ids = "hashed"', "tables": tables(item_id="rows = 7")},
    "attention": {"tables": tables(history='pooling = "attention"', read='pooling = "attention"')},
    "din": {"tables": tables(history=DIN, liked=DIN + ITEMS, item_id=ITEMS), "model": MLP + "din_hidden = [6, 4]"},
    "encoder": {"tables": tables(history='pooling = "encoder"'), "model": MLP + "encoder_heads = 4"},
    "all poolings": {
        "tables": tables(history='pooling = "attention"', read='pooling = "encoder"', liked=DIN, tags='pooling = "mean"')
    },
    "shared tables": {
        "tables": tables(
            history='pooling = "attention"' + ITEMS,
            liked=ITEMS,
            item_id=ITEMS,
            user_id='table = "my.table"',
            city='table = "my.table"',
        )
    },
    "narrow tables": {
        "tables": tables(
            user_id="dim = 3",
            city='dim = 5\ntable = "my.places"',
            tags='pooling = "mean"\ntable = "my.places"',
            history='pooling = "attention"',
        )
    },
    "dcn": {"model": MLP + 'interaction = "dcn"\ndcn_num_layers = 2\ndcn_low_rank_dim = 5'},
    "half precision": {"embedding": 'dtype = "fp16"'},
    "bfloat16 tables": {"embedding": 'dtype = "bf16"'},
    "standard": {"data": CLICKED + '\n[dense]\nnormalize = "standard"'},
    "log1p": {"data": CLICKED + '\n[dense]\nnormalize = "log1p"'},
    "no normalization": {"data": CLICKED + '\n[dense]\nnormalize = "none"'},
    "several tasks": {
        "data": '[[tasks]]\nlabel = "purchases"\nloss = "poisson"\n[[tasks]]\nlabel = "clicked"\n'
        '[[tasks]]\nlabel = "seconds"\nloss = "huber"',
        "model": MLP.replace("1]", "3]"),
    },
    "preprocessed": {"data": CLICKED + '\npreprocess = "steps.toml"', "embedding": 'ids = "hashed"'},
}


@dataclass
class Trained:
    """A dataset, the export of a model that was trained on it, and the rows that `predict` has written."""

    data: Path
    exported: Path
    predicted: dict
    losses: list

    def batches(self, model, **options):
        """Returns the batches of the dataset with the options that the model needs."""
        options = {"global_batch_size": 128, "keep": ["request_id"], "preprocess": model.preprocess, **options}
        return onefold.Dataset(self.data, **options)

    def expected(self, batch, what="logit"):
        """Returns the predictions for the samples of a batch, [B, labels]."""
        rows = [self.predicted["row"][request] for request in batch.kept["request_id"].tolist()]
        columns = [name for name in self.predicted if name == what or name.startswith(what + "_")]
        return numpy.array([[self.predicted[name][row] for name in columns] for row in rows])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns a dataset with empty lists, overlapping lists, and dense features of several kinds."""
    folder = tmp_path_factory.mktemp("model")
    random = numpy.random.default_rng(7)
    user = numpy.sort(random.integers(0, 40, SAMPLES))
    timelines = [random.integers(0, 300, 60).tolist() for _ in range(120)]

    def windows(kind):
        """Returns lists that are windows of the user's timeline. Every seventh list is empty."""
        starts = numpy.arange(SAMPLES) % 15
        rows = zip(user, starts, strict=True)
        return [[] if i % 7 == 3 * kind else timelines[40 * kind + u][s : s + 9] for i, (u, s) in enumerate(rows)]

    log = {
        "request_id": numpy.arange(SAMPLES),
        "time": numpy.arange(SAMPLES) + 1_700_000_000,
        "clicked": random.integers(0, 2, SAMPLES).astype("float32"),
        "seconds": random.normal(0, 3, SAMPLES).astype("float32"),
        "purchases": random.poisson(1.5, SAMPLES).astype("float32"),
        "age": random.integers(18, 70, SAMPLES).astype("float32"),
        "price": random.exponential(30, SAMPLES).astype("float32") - 10,
        "visits": (random.integers(0, 3, SAMPLES) // 2).astype("float32"),
        "user_id": user,
        "city": (user * 7) % 23,
        "history": windows(0),
        "read": windows(1),
        "liked": windows(2),
        "item_id": random.integers(0, 300, SAMPLES),
        "tags": [random.integers(0, 300, size).tolist() for size in random.integers(0, 5, SAMPLES)],
    }
    (folder / "steps.toml").write_text(STEPS)
    parquet_log.build(folder, pyarrow.table(log), FEATURES, ["request_id"])
    return folder


@pytest.fixture(scope="module")
def models():
    """Returns the trained models by kind."""
    return {}


@pytest.fixture
def trained(data, models, trainer):
    """Returns a function that trains a model of each kind once."""

    def train(kind):
        if kind not in models:
            folder = data / kind.replace(" ", "_")
            folder.mkdir()
            parts = {"data": CLICKED, "model": MLP, "embedding": "", "tables": "", **KINDS[kind]}
            config = data / f"{folder.name}.toml"
            config.write_text(CONFIG.format(**parts))
            onefold.cli.train(config, data=data / "data", out=folder / "run", threads=2)
            onefold.cli.export(folder / "run", out=folder / "exported")
            onefold.cli.predict(folder / "run", data=data / "data", out=folder / "predicted.parquet")
            predicted = pyarrow.parquet.read_table(folder / "predicted.parquet").to_pydict()
            predicted["row"] = {request: row for row, request in enumerate(predicted["request_id"])}
            losses = json.loads((folder / "exported" / "export.json").read_text())["losses"]
            models[kind] = Trained(data / "data", folder / "exported", predicted, losses)
        return models[kind]

    return train


def assert_near(found, expected):
    numpy.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_the_trainer(trained, kind):
    import onefold.torch

    own = trained(kind)
    model = onefold.torch.load(own.exported)
    assert (model.preprocess is not None) == (kind == "preprocessed")
    for dedupe in ("exact", "window", "off"):
        samples = 0
        for batch in own.batches(model, dedupe=dedupe):
            logits = model(batch)
            assert not logits.requires_grad and logits.shape == (len(batch), len(model.labels))
            assert_near(logits, own.expected(batch))
            assert_near(model.predict(batch.to_torch()), own.expected(batch, "prediction"))
            samples += len(batch)
        assert samples == SAMPLES


@pytest.mark.parametrize("kind", ["all poolings", "hashed", "dcn", "half precision", "log1p"])
def test_a_program_of_torch_needs_no_onefold(trained, kind, tmp_path):
    import torch

    import onefold.torch

    own, server = trained(kind), tmp_path / "server"
    server.mkdir()
    model = onefold.torch.load(own.exported)
    torch.export.save(model.export(), server / "model.pt2")
    batches = [*own.batches(model, dedupe="exact"), *own.batches(model, dedupe="off", global_batch_size=7)]
    # One sample, one row and empty lists are special cases for `torch.export`.
    dense = torch.tensor([[30.0, 1.0, 0.0]])
    nothing = {name: [[]] for name in model.features} | ({"item_id": [[1]]} if "din" in kind else {})
    given = [model.tensors(batch) for batch in batches] + [model.tensors(nothing, dense)]
    # torch cannot save tensors of several types that are views of the same bytes.
    given = [
        (dense.clone(), {name: tuple(tensor.clone() for tensor in own) for name, own in features.items()})
        for dense, features in given
    ]
    torch.save({"given": given, "expected": [model.core(*tensors) for tensors in given]}, server / "cases.pt")
    program = """
        import sys
        import torch
        sys.modules["onefold"] = None
        model, cases = torch.export.load("model.pt2").module(), torch.load("cases.pt")
        with torch.no_grad():
            for given, expected in zip(cases["given"], cases["expected"], strict=True):
                torch.testing.assert_close(model(*given), expected, rtol=1e-6, atol=1e-6)
    """
    (server / "serve.py").write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, "serve.py"], cwd=server, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def lists_of(batch):
    """Returns the lists of every sample by feature."""
    batch = batch.expand()
    return {name: [feature.row(row).tolist() for row in range(len(batch))] for name, feature in batch.features.items()}


@pytest.mark.parametrize("kind", ["all poolings", "hashed"])
def test_lists_by_name_are_a_batch(trained, kind):
    import torch

    import onefold.torch

    own = trained(kind)
    model = onefold.torch.load(own.exported)
    batch = next(iter(own.batches(model)))
    lists, expected = lists_of(batch), own.expected(batch)
    assert_near(model(lists, batch.dense), expected)
    dense = {name: batch.dense[:, column].tolist() for column, name in enumerate(model.dense_features)}
    assert_near(model(lists | dense), expected)
    # The values are tensors: one id per row, and ids with lengths.
    tags = torch.tensor([id for row in lists["tags"] for id in row]), torch.tensor([len(row) for row in lists["tags"]])
    items = torch.tensor([row[0] for row in lists["item_id"]])
    assert_near(model(lists | dense | {"tags": tags, "item_id": items}), expected)


@pytest.mark.parametrize("kind", ["all poolings", "din"])
def test_a_request_computes_its_user_once(trained, kind):
    import onefold.torch

    own = trained(kind)
    model = onefold.torch.load(own.exported)
    user = {"age": 31.0, "price": 9.0, "visits": 1.0, "user_id": [[7]], "city": [[3]]}
    user |= {"history": [[5, 6, 7, 8]], "read": [[1, 2]], "liked": [[9, 4, 9]]}
    items = {"item_id": list(range(200)), "tags": [[i % 300, i % 11] for i in range(200)]}
    dense, features = model.tensors(user | items)
    rows = {name: len(sizes) for name, (_, sizes, _) in features.items()}
    assert {rows[name] for name in user if name in rows} == {1} and rows["item_id"] == rows["tags"] == 200
    found = model(user | items)
    assert found.shape == (200, 1) and dense.shape == (200, 3)
    repeated = {name: value * 200 if isinstance(value, list) else [value] * 200 for name, value in user.items()}
    assert_near(found, model(repeated | items).numpy())
    # One request has two users, assigned to samples by their rows.
    two = {name: value + value for name, value in user.items() if isinstance(value, list)}
    inverse = {name: [0, 1] * 100 for name in two}
    assert_near(model(user | two | items, inverse=inverse), found.numpy())


@pytest.mark.parametrize("kind", ["all poolings", "several tasks"])
def test_a_kjt_is_a_batch(trained, kind):
    pytest.importorskip("torchrec")
    import onefold.torch
    from onefold.torchrec import to_kjt

    own = trained(kind)
    model = onefold.torch.load(own.exported)
    for dedupe in ("exact", "off"):
        for batch in own.batches(model, dedupe=dedupe):
            assert_near(model(to_kjt(batch), batch.dense), own.expected(batch))
            assert_near(model(to_kjt(batch, deduplicated=False), batch.dense), own.expected(batch))


def test_parameters_have_the_names_of_the_export(trained):
    import onefold.torch

    own = trained("all poolings")
    model = onefold.torch.load(own.exported)
    names = set(onefold.torch.load(own.exported).core.state_dict())
    assert "dense_arch.model._mlp.0._linear.weight" in names and "encoder.self_attn.in_proj_weight" in names
    assert "sparse_arch.embedding_bag_collection.embedding_bags.t_item_id.weight" in names
    # The model can be trained further.
    batch = next(iter(own.batches(model)))
    model.requires_grad_()
    model(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_inputs_that_do_not_fit_are_refused(trained, tmp_path):
    import torch

    import onefold.torch
    from onefold._model_inputs import _columns

    own = trained("sum")
    model = onefold.torch.load(own.exported)
    lists = {name: [[1], [2]] for name in model.features}
    dense = torch.zeros(2, 3)
    model(lists, dense)
    with pytest.raises(onefold.DataError, match="feature `city` has the id 300, and there are 300 rows"):
        model(lists | {"city": [[1], [300]]}, dense)
    with pytest.raises(onefold.DataError, match="feature `city` has the row 2, and there are 2 rows"):
        model(lists, dense, inverse={"city": [0, 2]})
    with pytest.raises(onefold.OptionsError, match="no feature `cities`"):
        model(lists | {"cities": [[1], [2]]}, dense)
    with pytest.raises(onefold.OptionsError, match="needs the features `tags`"):
        model({name: value for name, value in lists.items() if name != "tags"}, dense)
    with pytest.raises(onefold.OptionsError, match="needs the dense feature `age`"):
        model(lists)
    with pytest.raises(onefold.OptionsError, match=r"shape \[2, 2\], and the model needs \[B, 3\]"):
        model(lists, dense[:, :2])
    with pytest.raises(onefold.OptionsError, match="feature `city` has 3 lists for 2 samples"):
        model(lists | {"city": [[1], [2], [3]]}, dense)
    with pytest.raises(onefold.OptionsError, match="ids and rows are integers"):
        model(lists | {"city": [[1.5], [2.0]]}, dense)
    for wrong in ([["a"], ["b"]], [[None], [1]], [[1], [1 << 64]], [[1, [2]], [3]]):
        with pytest.raises(onefold.OptionsError, match="^feature `city`: .*\n  hint: give numbers"):
            model(lists | {"city": wrong}, dense)
    with pytest.raises(onefold.OptionsError, match="^feature `city`: "):
        model(lists, dense, inverse={"city": "x"})
    with pytest.raises(onefold.OptionsError, match="no feature `age` of this kind"):
        model(lists, dense, inverse={"age": [0, 1]})
    columns = {"age": [1.0, 2.0], "price": 3, "visits": torch.tensor([[4.0], [5.0]])}
    expected = model(lists, torch.tensor([[1.0, 3.0, 4.0], [2.0, 3.0, 5.0]]))
    assert torch.equal(model(lists | columns), expected)
    assert _columns({"age": torch.zeros(0, 1), "price": 3}).shape == (0, 2)
    for wrong in (None, "x", [1.0, None]):
        with pytest.raises(onefold.OptionsError, match="^dense feature `price`: "):
            model(lists | columns | {"price": wrong})
        with pytest.raises(onefold.OptionsError, match="dense"):
            model(lists, wrong)
    for wrong in ([1.0, 2.0, 3.0], [[1.0, 2.0], [3.0, 4.0]], [1.0] * 3):
        with pytest.raises(onefold.OptionsError, match="^dense feature `(price|visits)` has the shape"):
            model(lists | columns | {"price": wrong})
    with pytest.raises(onefold.OptionsError, match="a model takes no int"):
        model(3)
    with pytest.raises(onefold.DataError, match="no `export.json`"):
        onefold.torch.load(tmp_path)
    (tmp_path / "export.json").write_text('{"format_version": 4}')
    with pytest.raises(onefold.DataError, match="version 4, and this package reads version 6"):
        onefold.torch.load(tmp_path)
