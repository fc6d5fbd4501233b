"""TorchRec: KeyedJaggedTensors, sequences, plans, and a DLRM that learns the same with and without deduplication."""

import json

import pytest
from samples import full_batch

import onefold

pytestmark = pytest.mark.torch
B = 256


@pytest.fixture(scope="module")
def torchrec():
    import torchrec

    return torchrec


def lists(feature, samples):
    """Returns the lists in a JaggedTensor of the rows `samples`."""
    rows = [row.tolist() for row in feature.to_dense()]
    return [rows[row] for row in samples]


@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_a_kjt_has_the_samples(dataset, torchrec, dedupe):
    from onefold.torchrec import to_kjt

    batch = next(iter(onefold.Dataset(dataset, global_batch_size=B, dedupe=dedupe)))
    kjt = to_kjt(batch)
    plain = to_kjt(batch, deduplicated=False)
    assert kjt.keys() == plain.keys() == list(batch.features)
    assert plain.inverse_indices_or_none() is None and plain.stride() == B
    index = kjt.inverse_indices_or_none()
    assert (index is None) == (dedupe == "off")
    for i, name in enumerate(kjt.keys()):
        samples = range(B) if index is None else index[1][i].tolist()
        assert lists(kjt[name], samples) == lists(plain[name], range(B))
    if dedupe == "exact":
        assert kjt.values().data_ptr() == batch.values.__array_interface__["data"][0], "the values were copied"
        assert len(kjt.values()) < len(plain.values()) // 2
    some = to_kjt(batch, features=["item_01", "user_02"])
    assert sorted(some.keys()) == ["item_01", "user_02"]
    with pytest.raises(onefold.OptionsError, match="no feature `none`"):
        to_kjt(batch, features=["none"])
    with pytest.raises(onefold.OptionsError, match="`features` is the text `item_01`"):
        to_kjt(batch, features="item_01")


@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_sequences_go_through_an_embedding_collection(dataset, torchrec, dedupe):
    import torch

    from onefold.torchrec import to_sequences

    batch = next(iter(onefold.Dataset(dataset, global_batch_size=B, dedupe=dedupe)))
    plain = batch.expand()
    (group,) = [name for name in batch.groups if name == "timeline_a"]
    names = list(batch.groups[group].features)
    tables = [
        torchrec.EmbeddingConfig(name=name, num_embeddings=200_000, embedding_dim=4, feature_names=[name])
        for name in names
    ]
    collection = torchrec.EmbeddingCollection(tables=tables)

    def means(sequences):
        embedded = collection(sequences.kjt)[names[0]]
        padded = embedded.to_padded_dense(100)
        return sequences.expand(padded.sum(1) / embedded.lengths().clamp(min=1)[:, None])

    found, expected = means(to_sequences(batch, group)), means(to_sequences(plain, group))
    assert found.shape == (B, 4)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dedupe", ["exact", "window", "off"])
def test_the_collection_for_the_cpu_is_torchrecs(dataset, torchrec, dedupe):
    import torch

    from onefold.torchrec import EmbeddingBagCollection, to_kjt

    kjt = to_kjt(next(iter(onefold.Dataset(dataset, global_batch_size=B, dedupe=dedupe))))
    # One table has two features, and the order differs from that of the batch.
    tables = [
        torchrec.EmbeddingBagConfig(name=name, num_embeddings=200_000, embedding_dim=dim, feature_names=features)
        for name, dim, features in [("b", 8, ["item_03", "sequence_00"]), ("a", 4, ["user_00"])]
    ]
    ours, theirs = EmbeddingBagCollection(tables=tables), torchrec.EmbeddingBagCollection(tables=tables)
    theirs.load_state_dict(ours.state_dict())
    found, expected = ours(kjt), theirs(kjt)
    assert found.keys() == expected.keys() and found.length_per_key() == expected.length_per_key()
    assert torch.equal(found.values(), expected.values())
    weights = torch.randn(found.values().shape, generator=torch.Generator().manual_seed(1))
    for collection in (found, expected):
        (collection.values() * weights).sum().backward()
    for name in ("a", "b"):
        gradients = [bags.embedding_bags[name].weight.grad for bags in (ours, theirs)]
        assert torch.allclose(*gradients, atol=1e-5)


def dlrm(torchrec, batch, seed):
    """Returns a small DLRM over all features of a batch."""
    import torch
    from torchrec.models.dlrm import DLRM

    torch.manual_seed(seed)
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t_{name}", num_embeddings=200_000, embedding_dim=8, feature_names=[name])
        for name in list(batch.features)[:12]
    ]
    bags = torchrec.EmbeddingBagCollection(tables=tables)
    return DLRM(bags, dense_in_features=batch.dense.shape[1], dense_arch_layer_sizes=[32, 8], over_arch_layer_sizes=[32, 1])


def losses_of(torchrec, location, deduplicated, steps=100):
    """Returns the losses of `steps` training steps."""
    import torch

    from onefold.torchrec import to_kjt

    dataset = onefold.Dataset(location, global_batch_size=64, shuffle=True, seed=1)
    model = optimizer = None
    losses = []
    while len(losses) < steps:
        for batch in dataset:
            names = list(batch.features)[:12]
            if model is None:
                model = dlrm(torchrec, batch, seed=1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            kjt = to_kjt(batch, features=names, deduplicated=deduplicated)
            tensors = batch.to_torch()
            logits = model(tensors.dense, kjt)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, tensors.labels[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if len(losses) == steps:
                break
    return losses


def test_a_dlrm_learns_the_same_deduplicated_and_plain(dataset, torchrec):
    folded = losses_of(torchrec, dataset, deduplicated=True)
    plain = losses_of(torchrec, dataset, deduplicated=False)
    assert len(folded) == 100 and folded[0] != folded[-1]
    assert max(abs(a - b) for a, b in zip(folded, plain, strict=True)) < 1e-5


@pytest.fixture
def process_group(tmp_path):
    """Makes this process the only one of a job."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_training_pipeline_takes_batches(dataset, torchrec, process_group):
    """Checks that TorchRec starts the lookups of the next batch early, and learns the same as without deduplication."""
    import torch
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.models.dlrm import DLRM, DLRMTrain

    from onefold.torchrec import to_train_batch

    names = ["user_01", "item_01", "sequence_00"]
    reader = onefold.Dataset(dataset, global_batch_size=1024, tail="drop", features=names)
    whole = {f"t_{name}": ParameterConstraints(sharding_types=["table_wise"]) for name in names}

    def losses(deduplicated):
        torch.manual_seed(1)
        bags = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t_{name}",
                    num_embeddings=200_000,
                    embedding_dim=4,
                    feature_names=[name],
                    init_fn=lambda weights: torch.nn.init.constant_(weights, 0.1),
                )
                for name in names
            ]
        )
        model, sharders = DLRMTrain(DLRM(bags, 13, [8, 4], [8, 1])), [EmbeddingBagCollectionSharder()]
        plan = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=whole).plan(model, sharders)
        model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        reader.set_epoch(0)
        batches = (to_train_batch(batch, deduplicated=deduplicated) for batch in reader)
        found = [pipeline.progress(batches)[0].item() for _ in range(len(reader))]
        assert len(pipeline._pipelined_modules) == 1, "the lookups are not pipelined"
        return found

    folded = losses(True)
    assert len(folded) == 5 and folded[-1] < folded[0]
    assert max(abs(a - b) for a, b in zip(folded, losses(False), strict=True)) < 1e-5


def test_a_batch_for_training_moves_as_a_whole(torchrec):
    import torch
    from torchrec.streamable import Pipelineable

    from onefold.torchrec import to_train_batch

    batch = to_train_batch(full_batch(1))
    assert isinstance(batch, Pipelineable) and batch.labels.shape == (2,)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    kjt = moved.sparse_features
    parts = [moved.dense_features, moved.labels, moved.weights, kjt.values(), kjt.lengths(), kjt.inverse_indices()[1]]
    assert {part.device.type for part in parts} == {"meta"}
    # All tensors are kept for the stream, also the indices, which TorchRec's own method leaves out.
    recorded = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "record_stream", lambda tensor, _: recorded.append(tensor.data_ptr()))
        batch.record_stream(None)
    kjt = batch.sparse_features
    parts = [batch.dense_features, batch.labels, batch.weights, kjt.values(), kjt.lengths(), kjt.inverse_indices()[1]]
    assert {part.data_ptr() for part in parts} <= set(recorded)


def test_a_plan_becomes_a_sharding_plan(torchrec, run, tmp_path):
    from onefold.torchrec import sharding_plan

    tables = [{"name": name, "rows": 100, "dim": 16, "pooling_factor": 2.0} for name in ("a", "b", "c")]
    (tmp_path / "tables.json").write_text(json.dumps({"format_version": 2, "global_batch_size": 16, "tables": tables}))
    run("onefold-shard", "topology", "--ranks", 2, "--memory", "1MiB", "--out", "topology.json", cwd=tmp_path)
    plan = ["--tables", "tables.json", "--topology", "topology.json", "--out", "plan.json"]
    run("onefold-shard", "plan", *plan, cwd=tmp_path)
    export = ["plan.json", "--torchrec", "--module", "ebc", "--device", "cpu", "--out", "torchrec.json"]
    run("onefold-shard", "export", *export, cwd=tmp_path)
    found = sharding_plan(tmp_path / "torchrec.json")
    assert set(found.get_plan_for_module("ebc")) == {"t_a", "t_b", "t_c"}
    with pytest.raises(onefold.OptionsError, match="no plan for TorchRec"):
        sharding_plan(tmp_path / "plan.json")
