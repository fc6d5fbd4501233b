"""PyTorch's and torchdata's loaders."""

import json
from collections import Counter

import numpy
import pytest
from samples import all_samples, full_batch, samples_of

import onefold

pytestmark = pytest.mark.torch
B = 512
OPTIONS = dict(global_batch_size=B, streams=8, shuffle=True, seed=3)


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


def parts(batches, workers):
    """Steps from the parts of a loader's workers."""
    batches = list(batches)
    return [batches[i : i + workers] for i in range(0, len(batches), workers)]


def test_tensors_are_views(dataset, torch):
    import onefold.torch

    batch = next(iter(onefold.Dataset(dataset, **OPTIONS)))
    tensors = batch.to_torch()
    for name, feature in batch.features.items():
        tensor = tensors.features[name].values
        assert tensor.dtype == torch.int64
        if len(tensor):
            assert tensor.data_ptr() == feature.values.__array_interface__["data"][0]
    assert tensors.dense.data_ptr() == batch.dense.__array_interface__["data"][0]
    assert samples_of(tensors.expand()) == samples_of(batch)
    ids, mask = tensors.features["user_01"].padded(5)
    assert ids.shape == mask.shape and ids.dtype == torch.int64
    assert samples_of(tensors.to("cpu")) == samples_of(batch)


def test_tensors_and_arrow_do_not_share_memory(dataset, torch):
    import pyarrow

    batch = next(iter(onefold.Dataset(dataset, **OPTIONS)))
    before, rows = samples_of(batch), pyarrow.record_batch(batch)
    plain = rows.to_pylist()
    tensors = batch.to_torch()
    assert tensors.dense.data_ptr() != batch.dense.__array_interface__["data"][0]
    for tensor in (tensors, tensors.writable()):
        tensor.dense[:], tensor.values[:], tensor.lengths[:] = 0, 7, 1 << 30
        with pytest.raises(onefold.DataError):
            tensor.expand()
    assert rows.to_pylist() == plain and samples_of(batch) == before


def test_what_is_written_into_a_tensor_is_expanded(dataset, torch):
    batch = next(iter(onefold.Dataset(dataset, **OPTIONS)))
    tensors = batch.to_torch()
    tensors.dense[:] = 3
    assert (tensors.expand().dense == 3).all() and (batch.dense == 3).all()


def test_a_batch_is_expanded_on_its_device_and_keeps_its_position(dataset, torch, monkeypatch):
    import onefold.torch

    batch = next(iter(onefold.Dataset(dataset, **OPTIONS)))
    moved = batch.to("meta")
    # This device has no bytes; those of the CPU take their place where they are expanded.
    monkeypatch.setattr(onefold.Batch, "numpy", lambda _: batch)
    expanded = moved.expand()
    assert {tensor.device.type for tensor in (expanded.data, expanded.dense, expanded.values)} == {"meta"}
    assert {group.inverse for group in expanded.groups.values()} == {None}
    for other in (moved, expanded, moved.writable(), batch.to_torch().expand()):
        assert other.state_dict() == batch.state_dict()
    assert onefold.torch.collate_parts([moved])["dense"].device.type == "meta"


def test_parts_are_put_together_with_all_that_they_have(torch):
    import onefold.torch

    parts = [full_batch(10), full_batch(20).to_torch()]
    whole = onefold.torch.collate_parts(parts)
    assert whole["dense"].tolist() == [[10], [11], [20], [21]] and whole["labels"].tolist() == [[0], [1]] * 2
    assert whole["weights"].tolist() == [12, 13, 22, 23] and whole["timestamps"].tolist() == [14, 15, 24, 25]
    values, lengths = whole["features"]["ids"]
    assert values.tolist() == [18, 19, 20] * 2 + [28, 29, 30] * 2 and lengths.tolist() == [3] * 4
    assert isinstance(whole["kept"]["request"], numpy.ma.MaskedArray)
    assert {name: values.tolist() for name, values in whole["kept"].items()} == {
        "request": [16, 17, 26, 27],
        "country": [None, "0010", None, "0020"],
    }
    with pytest.raises(onefold.OptionsError, match="no batches to put together"):
        onefold.torch.collate_parts([{"dense": 1}])


def test_pinned_memory_needs_a_gpu_and_says_so(dataset, torch):
    batches = iter(onefold.Dataset(dataset, pin_memory=True, **OPTIONS))
    if torch.cuda.is_available():
        batch = next(batches)
        assert batch.dense.is_pinned() and batch.expand().dense.is_pinned()
        assert batch.state_dict()["position"]["step"] == batch.expand().state_dict()["position"]["step"] == 1
    else:
        with pytest.raises(onefold.OptionsError, match="needs a GPU"):
            next(batches)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
def test_a_loader_gives_the_global_batches_whatever_its_workers(dataset, torch, workers):
    import onefold.torch

    expected = list(onefold.Dataset(dataset, **OPTIONS))
    loader = torch.utils.data.DataLoader(
        onefold.torch.Dataset(dataset, **OPTIONS), batch_size=None, num_workers=workers
    )
    steps = parts(loader, max(workers, 1))
    assert len(steps) == len(expected)
    for step, batch in zip(steps, expected, strict=True):
        assert Counter(all_samples(step)) == Counter(samples_of(batch))
    whole = onefold.torch.collate_parts(steps[0])
    assert whole["dense"].shape == (B, 13) and len(whole["features"]["user_01"][1]) == B
    assert whole["weights"] is None and whole["timestamps"] is None
    assert whole["kept"] == {}


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_read_from_a_store(dataset, stored, torch, method):
    import onefold.torch

    loader = torch.utils.data.DataLoader(
        onefold.torch.Dataset(stored, **OPTIONS), batch_size=None, num_workers=2, multiprocessing_context=method
    )
    expected = all_samples(onefold.Dataset(dataset, **OPTIONS))
    assert Counter(all_samples(loader)) == Counter(expected)


def test_spawned_workers_read_too(dataset, torch):
    import onefold.torch

    reader = onefold.torch.Dataset(dataset, **OPTIONS)
    loader = torch.utils.data.DataLoader(
        reader, batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    expected = all_samples(onefold.Dataset(dataset, **OPTIONS))
    assert Counter(all_samples(loader)) == Counter(expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_cannot_share_the_streams_are_refused(dataset, torch):
    import onefold.torch

    loader = torch.utils.data.DataLoader(
        onefold.torch.Dataset(dataset, **OPTIONS | {"streams": 2}), batch_size=None, num_workers=3
    )
    with pytest.raises(Exception, match="2 streams cannot be divided among 1 ranks of 3 workers"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
def test_a_stateful_loader_goes_on_where_it_was(dataset, torch, workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    import onefold.torch

    def loader():
        return StatefulDataLoader(
            onefold.torch.Dataset(dataset, **OPTIONS), batch_size=None, num_workers=workers
        )

    whole = [samples_of(batch) for batch in loader()]
    first = loader()
    batches = iter(first)
    taken = [samples_of(next(batches)) for _ in range(5)]
    state = first.state_dict()
    if workers == 0:
        state = json.loads(json.dumps(state))
    del batches
    again = loader()
    again.load_state_dict(state)
    assert taken + [samples_of(batch) for batch in again] == whole


def test_ranks_come_from_torch_distributed(dataset, torch, tmp_path):
    import onefold.torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        reader = onefold.torch.Dataset(dataset, global_batch_size=B)
        assert (reader.dataset.rank, reader.dataset.world_size) == (0, 1)
        assert len(reader) == 12
    finally:
        torch.distributed.destroy_process_group()
    assert onefold.torch.Dataset(dataset, global_batch_size=B, rank=3, world_size=4).dataset.rank == 3
