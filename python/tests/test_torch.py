"""PyTorch's and torchdata's loaders."""

import contextlib
import os
import subprocess
import sys
import warnings

import pytest
from samples import all_samples, samples_of

import onefold

pytestmark = pytest.mark.torch
B = 512
OPTIONS = dict(global_batch_size=B, streams=8, shuffle=True, seed=3)


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


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
    batch = next(iter(onefold.Dataset(dataset, **OPTIONS)))
    moved = batch.to("meta")
    # This device has no bytes, so the bytes on the CPU are expanded instead.
    monkeypatch.setattr(onefold.Batch, "numpy", lambda _: batch)
    expanded = moved.expand()
    assert {tensor.device.type for tensor in (expanded.data, expanded.dense, expanded.values)} == {"meta"}
    assert {group.inverse for group in expanded.groups.values()} == {None}
    for other in (moved, expanded, moved.writable(), batch.to_torch().expand()):
        assert other.state_dict() == batch.state_dict()


def test_pinned_memory_needs_a_gpu_and_says_so(dataset, torch):
    batches = iter(onefold.Dataset(dataset, pin_memory=True, **OPTIONS))
    if torch.cuda.is_available():
        batch = next(batches)
        assert batch.dense.is_pinned() and batch.expand().dense.is_pinned()
        assert batch.state_dict()["position"]["step"] == batch.expand().state_dict()["position"]["step"] == 1
    else:
        with pytest.raises(onefold.OptionsError, match="needs a GPU"):
            next(batches)


def test_what_a_user_of_pytorch_writes_first_is_explained(dataset, torch):
    import onefold.torch

    with pytest.raises(TypeError, match="no argument 'batch_size'; did you mean 'global_batch_size'?"):
        onefold.torch.Dataset(dataset, batch_size=B)
    reader = onefold.torch.Dataset(dataset, **OPTIONS)
    assert repr(reader).startswith(f"onefold.torch.Dataset('{dataset}', global_batch_size=512")
    feature = next(iter(reader.dataset)).features["user_01"]
    with pytest.raises(TypeError, match="take that of `batch.to_torch\\(\\)`"):
        onefold.torch.bag_inputs(feature)


def loader_of(location, torch, workers, **options):
    """Returns PyTorch's loader of a dataset, and the dataset."""
    import onefold.torch

    reader = onefold.torch.Dataset(location, **OPTIONS)
    return torch.utils.data.DataLoader(reader, batch_size=None, num_workers=workers, **options), reader


@contextlib.contextmanager
def no_warnings():
    """Makes warnings of a loader errors, except for the one about more workers than processors, which tests use."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        yield


def epochs_of(location, count):
    """Returns the samples of the first epochs, by epoch and step."""
    reader = onefold.Dataset(location, **OPTIONS)
    return [[samples_of(batch) for batch in reader] for _ in range(count)]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_give_the_batches_of_every_epoch_in_their_order(dataset, torch, method, persistent):
    # A worker of the methods other than fork takes seconds to import torch.
    epochs = epochs_of(dataset, 3 if method == "fork" else 2)
    assert epochs[0] != epochs[1]
    # There are 16 steps: four workers take four each, and three workers take different numbers.
    options = dict(multiprocessing_context=method, persistent_workers=persistent)
    for workers in (4, 3) if method == "fork" else (3,):
        with no_warnings():
            loader, _ = loader_of(dataset, torch, workers, **options)
            assert len(loader) == len(epochs[0]) == 16
            for epoch in epochs:
                assert [samples_of(batch) for batch in loader] == epoch


def test_a_loader_that_would_collate_batches_says_how_not_to(dataset, torch):
    import onefold.torch

    for batch_size in (1, 4):
        with pytest.raises(TypeError, match="give the loader `batch_size=None`"):
            next(iter(torch.utils.data.DataLoader(onefold.torch.Dataset(dataset), batch_size=batch_size)))


@pytest.mark.parametrize("workers", [0, 1, 17])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_any_number_of_workers_gives_the_same(dataset, torch, workers):
    epochs = epochs_of(dataset, 3)
    with no_warnings():
        loader, reader = loader_of(dataset, torch, workers)
        for epoch in epochs[:2]:
            assert [samples_of(batch) for batch in loader] == epoch
    # The third epoch is next, also for the dataset itself, whichever processes have read the others.
    assert [samples_of(batch) for batch in reader] == epochs[2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_are_kept_hear_of_an_epoch_that_is_set(dataset, torch):
    epochs = epochs_of(dataset, 3)
    loader, reader = loader_of(dataset, torch, 2, persistent_workers=True)
    for epoch in (0, 2, 1):
        reader.set_epoch(epoch)
        assert [samples_of(batch) for batch in loader] == epochs[epoch]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_that_is_left_does_not_consume_the_epoch(dataset, torch, workers):
    epochs = epochs_of(dataset, 2)
    loader, reader = loader_of(dataset, torch, workers)
    for _ in range(2):
        assert samples_of(next(iter(loader))) == epochs[0][0]
    for epoch in epochs:
        assert [samples_of(batch) for batch in loader] == epoch
    assert reader.state_dict()["position"]["epoch"] == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_batch_of_a_worker_says_where_to_go_on(dataset, torch):
    epochs = epochs_of(dataset, 1)
    loader, _ = loader_of(dataset, torch, 3)
    for batch, _ in zip(loader, range(5), strict=False):
        state = batch.state_dict()
    for workers in (0, 2):
        again, reader = loader_of(dataset, torch, workers)
        reader.load_state_dict(state)
        assert [samples_of(batch) for batch in again] == epochs[0][state["position"]["step"] :]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_read_from_a_store(dataset, stored, torch, method):
    loader, _ = loader_of(stored, torch, 2, multiprocessing_context=method)
    assert [samples_of(batch) for batch in loader] == epochs_of(dataset, 1)[0]


def stateful(location, workers, persistent=False):
    """Returns torchdata's loader of a dataset, and the dataset."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    import onefold.torch

    reader = onefold.torch.Dataset(location, **OPTIONS)
    options = dict(batch_size=None, num_workers=workers, persistent_workers=persistent)
    return StatefulDataLoader(reader, **options), reader


def take(loader, count):
    """Returns the samples of `count` batches, over as many epochs as necessary. The last epoch is not restarted."""
    taken = []
    while len(taken) < count:
        for batch in loader:
            taken.append(samples_of(batch))
            if len(taken) == count:
                break
    return taken


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True), (5, False)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stateful_loader_goes_on_where_it_was(dataset, torch, workers, persistent):
    whole = [batch for epoch in epochs_of(dataset, 3) for batch in epoch]
    # The state is taken before the first batch, within an epoch, after its last batch, and within the next epoch.
    for first, second in [(0, 3), (5, 4), (5, 11), (16, 1), (17, 2)]:
        loader, _ = stateful(dataset, workers, persistent)
        taken = take(loader, first)
        for count in (second, len(whole) - first - second):
            # The state belongs to the only epoch of this loader.
            state = loader.state_dict()
            loader, _ = stateful(dataset, workers, persistent)
            loader.load_state_dict(state)
            taken += take(loader, count)
        assert taken == whole, (first, second)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stateful_loader_goes_on_between_epochs(dataset, torch, workers):
    epochs = epochs_of(dataset, 3)
    loader, _ = stateful(dataset, workers)
    assert [samples_of(batch) for batch in loader] == epochs[0]
    state = loader.state_dict()
    loader, _ = stateful(dataset, workers)
    loader.load_state_dict(state)
    for epoch in epochs[1:]:
        assert [samples_of(batch) for batch in loader] == epoch


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_state_of_a_loader_goes_on_with_other_numbers_of_workers(dataset, torch):
    whole = [batch for epoch in epochs_of(dataset, 2) for batch in epoch]
    for before, after, count in [(3, 2, 5), (2, 0, 7), (0, 3, 4), (5, 2, 11), (2, 3, 12)]:
        loader, _ = stateful(dataset, before)
        taken = take(loader, count)
        state = loader.state_dict()
        loader, reader = stateful(dataset, after)
        reader.load_state_dict(state)
        assert taken + take(loader, len(whole) - count) == whole, (before, after)
    for wrong in ({}, {"_snapshot": None}, {"_snapshot": {"_worker_snapshots": {}}, "_steps_since_snapshot": 0}):
        with pytest.raises(onefold.OptionsError, match="no state of a dataset"):
            reader.load_state_dict(wrong)


RANK = """
import sys
sys.path[:0] = {path!r}
import torch
import onefold.torch

def whole(reader):
    return sum(len(batch) for batch in reader)

if __name__ == "__main__":
    early = onefold.torch.Dataset(sys.argv[1], global_batch_size=64, streams=2)
    rank = int(sys.argv[2])
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
    loader = torch.utils.data.DataLoader(early, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    counts = [whole(early), whole(loader), whole(onefold.Dataset(sys.argv[1], global_batch_size=64))]
    assert (early.dataset.rank, early.dataset.world_size) == (rank, 2)
    print(*counts)
"""


def test_a_dataset_that_was_opened_before_the_process_group_reads_its_ranks_part(dataset, torch, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(path=sys.path))
    command = [sys.executable, script, dataset]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "store"], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=600)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    # Each rank has a part, and together they have every sample once.
    assert [sum(map(int, counts)) for counts in zip(*printed, strict=True)] == [6000] * 3
    assert all(0 < int(count) < 6000 for counts in printed for count in counts)
