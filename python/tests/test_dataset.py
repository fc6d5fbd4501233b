"""Reading: epochs, ranks, states, processes, threads, errors."""

import contextlib
import datetime
import http.server
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import numpy
import pytest
from forks import in_child
from samples import all_samples, assert_valid, samples_of
from store import store

import onefold

B = 512


def all_threads():
    """Returns the names of this process's threads, except for storage threads, which depend on requests."""
    names = Counter()
    for task in os.listdir("/proc/self/task"):
        # A thread may end in the meantime.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names[file.read().strip()] += 1
    return Counter({name: names[name] for name in names if not name.startswith("onefold-storage")})


def threads():
    """Returns the names of the threads that belong to an epoch and not to the process."""
    names = all_threads()
    return Counter({name: names[name] for name in names if name.startswith(("onefold-end", "onefold-schedul", "onefold-open"))})


def no_threads():
    """Returns whether the threads of epochs have ended, or end soon, which may take a moment on a busy machine."""
    until = time.monotonic() + 30
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not threads()


def test_an_epoch_has_every_sample_once_in_the_steps_that_len_says(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    batches = list(reader)
    assert len(batches) == len(reader) == reader.plan(0)["steps"] == 12
    assert [len(batch) for batch in batches] == [B] * 11 + [6000 - 11 * B]
    assert reader.samples == 6000
    assert batches[0].dense.shape == (B, 13) and batches[0].labels.shape == (B, 1)
    assert set(batches[0].groups) == {group["name"] for group in reader.schema["groups"]}
    for batch in batches:
        assert_valid(batch)


@pytest.mark.parametrize("dedupe", ["exact", "window"])
def test_deduplication_and_layout_change_no_sample(dataset, rows_dataset, dedupe):
    plain = all_samples(onefold.Dataset(dataset, global_batch_size=B, dedupe="off"))
    for location in (dataset, rows_dataset):
        reader = onefold.Dataset(location, global_batch_size=B, dedupe=dedupe)
        batches = list(reader)
        assert all_samples(batches) == plain
        assert sum(group.rows for batch in batches for group in batch.groups.values()) < 7 * 6000 // 2


def test_shuffled_epochs_differ_and_repeat(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=7)
    first, second = all_samples(reader), all_samples(reader)
    assert first != second and Counter(first) == Counter(second)
    reader.set_epoch(0)
    assert all_samples(reader) == first
    by_partition = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=7, shuffle_within="partition")
    assert Counter(all_samples(by_partition)) == Counter(first)


def test_an_order_of_the_files_is_not_a_seed(dataset):
    in_order = all_samples(onefold.Dataset(dataset, global_batch_size=B))
    assert all_samples(onefold.Dataset(dataset, global_batch_size=B, shuffle=False, seed=7)) == in_order
    orders = [
        all_samples(onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=seed)) for seed in (0, numpy.int64(1))
    ]
    assert in_order != orders[0] != orders[1] != in_order
    with pytest.raises(TypeError, match="'shuffle' takes True or False, not int; a seed is given as `shuffle=True, seed=1`"):
        onefold.Dataset(dataset, shuffle=7)


INTEGERS = ["global_batch_size", "rank", "world_size", "streams", "seed", "shuffle_row_groups", "snapshot"]


@pytest.mark.parametrize("boolean", [True, False, numpy.True_])
def test_a_bool_is_no_integer(dataset, boolean):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    calls = [lambda name=name: onefold.Dataset(dataset, **{name: boolean}) for name in INTEGERS]
    calls += [
        lambda: onefold.Dataset(dataset, table_rows={"user_01": boolean}),
        lambda: reader.set_epoch(boolean),
        lambda: reader.plan(boolean),
        lambda: onefold.files(dataset, at=boolean),
        lambda: onefold.configure(threads=boolean),
        lambda: onefold.configure(memory_limit=boolean),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="takes an integer, not bool"):
            call()
    for command in (onefold.cli.digest, onefold.cli.verify):
        with pytest.raises(TypeError, match="not bool"):
            command(dataset, threads=boolean)


def test_wrong_integers_and_switches_are_refused(dataset):
    for name in INTEGERS:
        with pytest.raises(TypeError, match=f"'{name}' takes an integer, not str"):
            onefold.Dataset(dataset, **{name: "1"})
        with pytest.raises(onefold.OptionsError, match=f"`{name}` is -1"):
            onefold.Dataset(dataset, **{name: -1})
    for name in ("shuffle", "verify", "timestamps", "pin_memory"):
        with pytest.raises(TypeError, match=f"'{name}' takes True or False, not int"):
            onefold.Dataset(dataset, **{name: 1})


def test_wrong_texts_are_refused_by_their_name(dataset):
    for name in ("dedupe", "tail", "partitions", "shuffle_within", "labels_as_of"):
        with pytest.raises(TypeError, match=f"'{name}' takes a text.*, not int"):
            onefold.Dataset(dataset, **{name: 1})
    for name in ("features", "keep"):
        for wrong in ([1], 1, {"user_01": 1}):
            with pytest.raises(TypeError, match=f"'{name}' takes a list"):
                onefold.Dataset(dataset, **{name: wrong})
        with pytest.raises(onefold.OptionsError, match=f"`{name}` is the text `user_01`"):
            onefold.Dataset(dataset, **{name: "user_01"})
    for wrong in (["user_01"], [], 0, {1: 5}):
        with pytest.raises(TypeError, match="'table_rows' takes a dict"):
            onefold.Dataset(dataset, table_rows=wrong)
    for wrong in ({"hour": 7}, {}, 0):
        with pytest.raises(TypeError, match="'partitions' takes a text, not"):
            onefold.files(dataset, partitions=wrong)


def test_a_location_is_a_path_or_a_url(dataset, tmp_path, monkeypatch):
    for wrong in (None, 5, [dataset]):
        with pytest.raises(TypeError, match="'location' takes a path or a URL, not"):
            onefold.Dataset(wrong)
        with pytest.raises(TypeError, match="'dataset' takes a path or a URL, not"):
            onefold.files(wrong)
    for wrong, message in (("", "the path is empty"), ("~/data", "expand `~`"), (Path("s3://b/data"), "two slashes")):
        with pytest.raises(onefold.OptionsError, match=message):
            onefold.Dataset(wrong)
    monkeypatch.chdir(dataset.parent)
    reader = onefold.Dataset(os.fsencode(dataset.name), global_batch_size=B, partitions=None)
    expected = all_samples(reader)
    # What is opened again is the same dataset, although the working directory is another one.
    monkeypatch.chdir(tmp_path)
    copy = pickle.loads(pickle.dumps(reader))
    copy.set_epoch(0)
    assert all_samples(copy) == expected and copy.location == str(dataset)


def test_a_sample_has_no_index(dataset):
    with pytest.raises(TypeError, match="use `onefold.torch.Dataset` and `batch_size=None`"):
        onefold.Dataset(dataset)[0]


def test_labels_of_an_earlier_time_need_an_offset_and_delays(dataset):
    for given in ("2026-03-02", datetime.datetime(2026, 3, 2)):
        with pytest.raises(onefold.OptionsError, match="`labels_as_of`: .* is not a time with an offset"):
            onefold.Dataset(dataset, labels_as_of=given)
    with pytest.raises(onefold.OptionsError, match="the dataset has no delays of labels"):
        onefold.Dataset(dataset, labels_as_of=datetime.datetime(2026, 3, 2, tzinfo=datetime.timezone.utc))


def test_a_projection_reads_the_features_that_are_asked_for(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, features=["user_01", "item_01"], timestamps=True)
    batch = next(iter(reader))
    assert set(batch.features) == {"user_01", "item_01"}
    assert batch.timestamps.shape == (B,) and (batch.timestamps > 0).all()


def test_ranks_share_global_batches_and_take_equal_steps(dataset):
    whole = list(onefold.Dataset(dataset, global_batch_size=B, streams=8, shuffle=True, seed=1))
    for world in (2, 3, 5, 8):
        ranks = [
            list(onefold.Dataset(dataset, global_batch_size=B, streams=8, rank=r, world_size=world, shuffle=True, seed=1))
            for r in range(world)
        ]
        assert {len(rank) for rank in ranks} == {len(whole)}
        for step, batch in enumerate(whole):
            parts = [sample for rank in ranks for sample in samples_of(rank[step])]
            assert Counter(parts) == Counter(samples_of(batch))
    assert any(len(batch) == 0 for rank in ranks for batch in rank), "no rank has an empty batch at the end"
    for empty in (batch for rank in ranks for batch in rank if len(batch) == 0):
        assert empty.dense.shape == (0, 13) and empty.labels.shape == (0, 1)
        assert set(empty.groups) == set(whole[0].groups)
    dropped = onefold.Dataset(dataset, global_batch_size=B, streams=8, tail="drop")
    assert {len(batch) for batch in dropped} == {B} and len(dropped) < len(whole)


def test_a_state_with_default_streams_resumes_with_more_ranks(dataset):
    ranks = [onefold.Dataset(dataset, global_batch_size=B, rank=rank, world_size=2) for rank in range(2)]
    begun = [iter(reader) for reader in ranks]
    for batches in begun:
        next(batches)
    state = ranks[0].state_dict()
    expected = [sample for batches in begun for sample in samples_of(next(batches))]
    found = []
    for rank in range(3):
        reader = onefold.Dataset(dataset, global_batch_size=B, rank=rank, world_size=3)
        reader.load_state_dict(state)
        copy = pickle.loads(pickle.dumps(reader))
        batches = list(reader)
        assert len(batches) == len(reader) - 1 == len(ranks[0]) - 1
        assert samples_of(next(iter(copy))) == samples_of(batches[0])
        found += samples_of(batches[0])
    assert Counter(found) == Counter(expected)
    with pytest.raises(onefold.OptionsError, match="streams"):
        onefold.Dataset(dataset, global_batch_size=B, streams=3, rank=0, world_size=3).load_state_dict(state)


def distributed(rank, world_size, initialized=True):
    """Returns a replacement for `torch.distributed` with this rank and size."""
    return types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        get_rank=lambda: rank,
        get_world_size=lambda: world_size,
    )


@pytest.fixture
def no_ranks(monkeypatch):
    """Removes all settings of this process's rank."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(0, 1, initialized=False))


def test_ranks_come_from_the_launcher_when_an_iteration_starts(dataset, monkeypatch, no_ranks):
    options = dict(global_batch_size=B, streams=4)
    reader = onefold.Dataset(dataset, **options)
    given = onefold.Dataset(dataset, rank=1, world_size=2, **options)
    assert (reader.rank, reader.world_size, reader.samples) == (0, 1, 6000)
    parts = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        reader.set_epoch(0)
        parts += all_samples(reader)
        assert (reader.rank, reader.world_size) == (rank, 4) and (given.rank, given.world_size) == (1, 2)
    assert Counter(parts) == Counter(all_samples(onefold.Dataset(dataset, world_size=1, **options)))
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(3, 4))
    assert reader.rank == 3
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(2, 3))
    assert (reader.rank, reader.world_size) == (2, 3)


def test_a_rank_that_contradicts_another_is_refused(dataset, monkeypatch, no_ranks):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    for rank, world_size, message in [
        ("1", "", "variable WORLD_SIZE is missing, and RANK is set"),
        ("", "4", "RANK is missing"),
        ("one", "4", "RANK is `one`, which is not a number"),
        ("-1", "4", "RANK is `-1`, which is not a number"),
        ("4", "4", "RANK=4 and WORLD_SIZE=4 name a rank that does not exist"),
    ]:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(onefold.OptionsError, match=message) as refused:
            iter(reader)
        assert "give `rank` and `world_size`" in refused.value.hint
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed(0, 1))
    with pytest.raises(onefold.OptionsError, match="rank 0 of 1, and the environment variables RANK=1 and WORLD_SIZE=4"):
        iter(reader)
    assert onefold.Dataset(dataset, rank=0, world_size=1, global_batch_size=B).world_size == 1
    for given, missing in [("rank", "world_size"), ("world_size", "rank")]:
        with pytest.raises(onefold.OptionsError, match=f"`{given}` is given without `{missing}`"):
            onefold.Dataset(dataset, **{given: 2})


def test_an_iterator_that_is_not_exhausted_does_not_consume_the_epoch(dataset):
    options = dict(global_batch_size=B, shuffle=True, seed=5)
    expected = onefold.Dataset(dataset, **options)
    epochs = [all_samples(expected) for _ in range(3)]
    reader = onefold.Dataset(dataset, **options)
    iter(reader)
    assert samples_of(next(iter(reader))) == epochs[0][:B]
    for batch in reader:
        break
    assert reader.epoch == 0 and len(reader) == 12
    assert all_samples(reader) == epochs[0] and reader.epoch == 1
    # Two iterators of the same epoch advance the epoch once. An iterator of another epoch does not advance it.
    first, second = iter(reader), iter(reader)
    assert all_samples(first) == all_samples(second) == epochs[1] and reader.epoch == 2
    left = iter(reader)
    reader.set_epoch(0)
    assert all_samples(left) == epochs[2] and reader.epoch == 0
    # It does not consume the rest of the epoch either.
    reader.load_state_dict(batch.state_dict())
    next(iter(reader))
    assert all_samples(reader) == epochs[0][B:] and reader.epoch == 1


def test_a_state_is_unchanged_after_it_is_loaded(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5)
    states = [reader.state_dict()]
    for _ in range(2):
        for _ in reader:
            states.append(reader.state_dict())
        states.append(reader.state_dict())
    again = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5)
    for state in states:
        again.load_state_dict(state)
        assert again.state_dict() == state
        batches = iter(again)
        assert again.state_dict() == state
        assert pickle.loads(pickle.dumps(again)).state_dict() == state
        # An iterator returns the remaining batches of its epoch, and none after the last batch.
        position = state["position"]
        assert len(list(batches)) == 12 - position["step"] and again.epoch == position["epoch"] + 1


def test_a_state_goes_on_with_another_number_of_ranks(dataset):
    options = dict(global_batch_size=B, streams=8, shuffle=True, seed=5)
    whole = list(onefold.Dataset(dataset, **options))
    ranks = [onefold.Dataset(dataset, rank=r, world_size=2, **options) for r in range(2)]
    taken = []
    for reader in ranks:
        batches = iter(reader)
        taken.append([next(batches) for _ in range(5)])
        time.sleep(0.05)  # It reads ahead; the state must not.
    states = [json.loads(json.dumps(reader.state_dict())) for reader in ranks]
    assert states[0] == states[1]
    for world in (1, 3, 4, 8):
        resumed = [onefold.Dataset(dataset, rank=r, world_size=world, **options) for r in range(world)]
        for reader in resumed:
            reader.load_state_dict(states[0])
        rest = [list(reader) for reader in resumed]
        assert {len(batches) for batches in rest} == {len(whole) - 5}
        for step, batch in enumerate(whole[5:]):
            assert Counter(all_samples(batches[step] for batches in rest)) == Counter(samples_of(batch))
        assert {reader.epoch for reader in resumed} == {1}
    # A batch contains its own position.
    assert taken[0][4].state_dict() == states[0]


def test_a_state_of_other_options_is_refused(dataset):
    state = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5).state_dict()
    other = onefold.Dataset(dataset, global_batch_size=B)
    with pytest.raises(onefold.OptionsError, match="shuffle") as refused:
        other.load_state_dict(state)
    assert "resume with" in refused.value.hint
    for wrong in ({}, None, [], {"version": 1}):
        with pytest.raises(ValueError, match="no state of a dataset"):
            other.load_state_dict(wrong)
    position = other.state_dict()["position"]
    with pytest.raises(onefold.OptionsError, match="no position of a dataset"):
        other.load_state_dict({"version": 1, "position": {**position, "step": numpy.int64(3)}})
    # The end of an epoch of 12 steps is a position.
    other.load_state_dict({"version": 1, "position": {**position, "step": 12}})
    with pytest.raises(onefold.OptionsError, match="at step 13 of an epoch of 12 steps"):
        other.load_state_dict({"version": 1, "position": {**position, "step": 13}})
    assert other.state_dict()["position"]["step"] == 12 and list(other) == []


def test_the_state_between_epochs_is_that_of_the_next(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5)
    list(reader)
    state = reader.state_dict()
    assert (state["position"]["epoch"], state["position"]["step"]) == (1, 0)
    again = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5)
    again.load_state_dict(state)
    assert all_samples(again) == all_samples(reader)


def test_a_dataset_pickles_with_its_state(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=5)
    batches = iter(reader)
    for _ in range(3):
        next(batches)
    copy = pickle.loads(pickle.dumps(reader))
    assert all_samples(copy) == all_samples(batches)


def test_iterators_over_one_dataset_do_not_disturb_each_other(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    expected = all_samples(reader)
    first, second = iter(reader), iter(reader)
    pairs = list(zip(first, second, strict=True))
    assert all_samples(pair[0] for pair in pairs) == all_samples(pair[1] for pair in pairs) == expected


def test_an_iterator_dropped_half_way_leaves_no_thread(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=64)
    assert no_threads()
    batches = iter(reader)
    next(batches)
    assert threads()["onefold-schedul"] == 1
    del batches
    reader.set_epoch(0)
    assert no_threads()
    for _ in reader:
        break
    assert no_threads()
    with onefold.Dataset(dataset, global_batch_size=64) as reader:
        batches = iter(reader)
        next(batches)
        assert threads()
    assert no_threads()
    with pytest.raises(onefold.OptionsError, match="closed"):
        iter(reader)


def test_twenty_datasets_at_once_share_threads(dataset):
    readers = [onefold.Dataset(dataset, global_batch_size=B, shuffle=True, seed=seed) for seed in range(20)]
    before = all_threads().total()
    iterators = [iter(reader) for reader in readers]
    total = Counter()
    for step in zip(*iterators, strict=True):
        for batch in step:
            total[len(batch)] += 1
        assert all_threads().total() <= before + 20
    assert sum(size * count for size, count in total.items()) == 20 * 6000


def test_an_error_in_mid_epoch_says_where_and_ends_the_epoch(dataset, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(dataset, copy)
    last = onefold.Dataset(copy, global_batch_size=64).plan(0)["streams"][0]["splits"][-1]["path"]
    with open(copy / last, "r+b") as file:
        file.truncate(os.path.getsize(copy / last) // 2)
    reader = onefold.Dataset(copy, global_batch_size=64)
    batches, taken = iter(reader), 0
    with pytest.raises(onefold.OnefoldError) as raised:
        for _ in batches:
            taken += 1
    assert taken > 0 and last.rpartition("/")[2] in str(raised.value) and raised.value.hint
    assert next(batches, None) is None
    assert no_threads()
    # The state is the one after the batches that were returned.
    assert reader.state_dict()["position"]["step"] == taken


def test_a_dataset_may_have_fewer_samples_than_a_batch(tmp_path):
    onefold.cli.generate(workload="rm3", samples=300, seed=5, out=tmp_path / "logs")
    onefold.build(tmp_path / "logs" / "dataset.toml", out=tmp_path / "data")
    for options in ({}, {"global_batch_size": 4096}, {"streams": 3}):
        batches = list(onefold.Dataset(tmp_path / "data", **options))
        assert sum(len(batch.labels) for batch in batches) == 300
        assert len(batches) == 1 or "streams" in options
    # As with `drop_last` of a loader, there is no batch.
    incomplete = onefold.Dataset(tmp_path / "data", tail="drop")
    assert len(incomplete) == 0 and list(incomplete) == [] and incomplete.epoch == 1


def test_wrong_options_are_exceptions_with_hints(dataset, tmp_path):
    with pytest.raises(onefold.OptionsError, match="64 buckets cannot be divided into 65 streams") as refused:
        onefold.Dataset(dataset, global_batch_size=B, streams=65)
    assert "must be 1 to 64" in refused.value.hint
    with pytest.raises(ValueError, match="`dedupe` is `some`"):
        onefold.Dataset(dataset, dedupe="some")
    with pytest.raises(ValueError, match="no sparse feature `user_99`"):
        onefold.Dataset(dataset, features=["user_99"])
    with pytest.raises(onefold.OnefoldError, match="is not a dataset"):
        onefold.Dataset(tmp_path)
    with pytest.raises(onefold.DataError, match="outside the table's 1 rows"):
        list(onefold.Dataset(dataset, global_batch_size=B, table_rows={"user_01": 1}))
    with pytest.raises(ValueError, match="a quote too few or too many") as refused:
        onefold.Dataset(dataset, partitions='hour="7')
    # The error has one message and one hint.
    assert str(refused.value).count("hour") == 2 and str(refused.value).count("hint:") == 1
    with pytest.raises(ValueError, match="memory_limit"):
        onefold.configure(memory_limit="lots")


def test_partitions_are_chosen_by_values_in_quotes(dataset):
    samples = [
        onefold.Dataset(dataset, global_batch_size=B, partitions=partitions).samples
        for partitions in ('hour>="0"', 'date>="2000-01-01",hour>=0')
    ]
    assert samples == [6000, 6000]


def test_the_class_says_who_can_do_something_about_an_error(dataset, tmp_path):
    with pytest.raises(onefold.OptionsError, match="partition filter `nosuch=1`"):
        onefold.Dataset(dataset, partitions="nosuch=1")
    shutil.copytree(dataset, tmp_path / "data")
    for snapshot in (tmp_path / "data" / "snapshots").iterdir():
        snapshot.write_bytes(snapshot.read_bytes()[:-10])
    with pytest.raises(onefold.DataError, match="the dataset is damaged"):
        onefold.Dataset(tmp_path / "data")


def test_a_store_that_denies_is_a_storage_error():
    class Denying(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    code = f"import sys; sys.path[:0] = {sys.path!r}; import onefold\n"
    code += "try:\n    onefold.Dataset('s3://bucket/data')\nexcept onefold.StorageError as error:\n    print(error.hint)"
    with store(Denying) as settings:
        environment = {**os.environ, **settings}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "AWS_ACCESS_KEY_ID" in done.stdout, done.stderr


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_with_threads_of_its_own(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    expected = all_samples(reader)
    reader.set_epoch(0)
    batches = iter(reader)
    next(batches)

    def use_iterator():
        try:
            next(batches)
        except onefold.ProcessError as error:
            return str(error)

    assert "before a fork" in in_child(use_iterator)

    def read():
        reader.set_epoch(0)
        return all_samples(reader)

    assert in_child(read) == expected
    # The parent continues unaffected.
    assert all_samples(batches) == expected[B:]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_read_right_after_their_parent(dataset):
    """Traces of the parent's threads in the memory of a child, such as lists of idle threads, must not harm it."""
    expected = all_samples(onefold.Dataset(dataset, global_batch_size=B))
    for _ in range(20):
        reader = onefold.Dataset(dataset, global_batch_size=B, features=["user_01"])
        list(reader)
        assert in_child(lambda: len(list(reader))) == len(expected) // B + 1
    assert all_samples(onefold.Dataset(dataset, global_batch_size=B)) == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_from_a_store(dataset, stored):
    expected = all_samples(onefold.Dataset(dataset, global_batch_size=B))
    reader = onefold.Dataset(stored, global_batch_size=B)
    batches = iter(reader)
    # Connections of this process are open, and some of its requests are in progress.
    next(batches)

    def read():
        reader.set_epoch(0)
        return all_samples(reader)

    assert in_child(read) == expected
    assert in_child(lambda: all_samples(onefold.Dataset(stored, global_batch_size=B))) == expected
    assert all_samples(batches) == expected[B:]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_the_url_of_a_local_folder(dataset):
    reader = onefold.Dataset(dataset.as_uri(), global_batch_size=B)
    expected = all_samples(reader)
    assert expected == all_samples(onefold.Dataset(dataset, global_batch_size=B))

    def read():
        reader.set_epoch(0)
        return all_samples(reader)

    assert in_child(read) == expected


def spawned(reader, queue):
    queue.put(all_samples(reader))


def test_a_spawned_child_goes_on_where_the_parent_is(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B)
    batches = iter(reader)
    next(batches)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=spawned, args=(reader, queue))
    child.start()
    found = queue.get(timeout=600)
    child.join(600)
    assert found == all_samples(batches)


def pinning_threads():
    """Returns the threads that copy batches to pinned memory, after waiting for their end for up to 30 s."""
    until = time.monotonic() + 30
    while True:
        found = [thread for thread in threading.enumerate() if thread.name.startswith("onefold-pin")]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.01)


def test_another_thread_pins_batches(dataset, monkeypatch):
    pinned_by = set()

    def pin_memory(batch):
        pinned_by.add(threading.get_ident())
        return batch._moved(batch.data.copy())

    # This replaces a GPU and torch.
    monkeypatch.setattr(onefold.Batch, "pin_memory", pin_memory)
    expected = all_samples(onefold.Dataset(dataset, global_batch_size=B))
    reader = onefold.Dataset(dataset, global_batch_size=B, pin_memory=True)
    batches = iter(reader)
    first = next(batches)
    # The state is that of the batch that was taken, whatever is copied ahead.
    assert reader.state_dict() == first.state_dict() and first.state_dict()["position"]["step"] == 1
    assert samples_of(first) + all_samples(batches) == expected
    assert len(pinned_by) == 1 and threading.get_ident() not in pinned_by
    assert reader.state_dict()["position"]["epoch"] == 1
    batches = iter(reader)
    next(batches)
    batches.close()
    assert next(batches, None) is None
    batches = iter(reader)
    next(batches)
    del batches
    assert pinning_threads() == [] and no_threads()


def test_an_error_while_a_batch_is_pinned_ends_the_epoch(dataset, monkeypatch):
    def pin_memory(_):
        raise MemoryError("no pages")

    monkeypatch.setattr(onefold.Batch, "pin_memory", pin_memory)
    reader = onefold.Dataset(dataset, global_batch_size=B, pin_memory=True)
    batches = iter(reader)
    with pytest.raises(MemoryError, match="no pages"):
        next(batches)
    assert next(batches, None) is None and pinning_threads() == [] and no_threads()
    reader.set_epoch(0)
    assert reader.state_dict()["position"]["step"] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_an_iterator_that_pins_may_not_be_used_after_a_fork(dataset, monkeypatch):
    monkeypatch.setattr(onefold.Batch, "pin_memory", lambda batch: batch)
    batches = iter(onefold.Dataset(dataset, global_batch_size=B, pin_memory=True))
    first = samples_of(next(batches))

    def use_iterator():
        try:
            next(batches)
        except onefold.ProcessError as error:
            return str(error)

    assert "before a fork" in in_child(use_iterator)
    assert first + all_samples(batches) == all_samples(onefold.Dataset(dataset, global_batch_size=B))


WAIT = """
import sys
import onefold
reader = onefold.Dataset(sys.argv[1], global_batch_size=64, verify=False)
print("ready", flush=True)
for batch in reader:
    pass
"""


def test_an_interrupt_ends_a_wait(dataset, tmp_path):
    copy = tmp_path / "dataset"
    shutil.copytree(dataset, copy)
    last = copy / onefold.Dataset(copy, global_batch_size=64).plan(0)["streams"][0]["splits"][-1]["path"]
    # Opening a pipe without a writer waits forever.
    last.unlink()
    os.mkfifo(last)
    command = [sys.executable, "-c", WAIT, copy]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(1)
        assert child.poll() is None, child.stderr.read()
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
