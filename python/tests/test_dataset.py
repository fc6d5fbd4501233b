"""Reading: epochs, ranks, states, processes, threads, errors."""

import contextlib
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
from collections import Counter

import pytest
from samples import all_samples, assert_valid, samples_of

import onefold

B = 512


def all_threads():
    """The names of this process's threads, except those of the storage: they come and go with its requests."""
    names = Counter()
    for task in os.listdir("/proc/self/task"):
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names[file.read().strip()] += 1
    return Counter({name: names[name] for name in names if not name.startswith("onefold-storage")})


def threads():
    """Those that belong to an epoch, not to the process."""
    names = all_threads()
    return Counter({name: names[name] for name in names if name.startswith(("onefold-feed", "onefold-schedul", "onefold-open"))})


def no_threads():
    """Whether the threads of epochs have ended, or end soon: an end takes a moment where much else runs."""
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
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=7)
    first, second = all_samples(reader), all_samples(reader)
    assert first != second and Counter(first) == Counter(second)
    reader.set_epoch(0)
    assert all_samples(reader) == first
    by_partition = onefold.Dataset(dataset, global_batch_size=B, shuffle=7, shuffle_within="partition")
    assert Counter(all_samples(by_partition)) == Counter(first)


def test_a_projection_reads_the_features_that_are_asked_for(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, features=["user_01", "item_01"], timestamps=True)
    batch = next(iter(reader))
    assert set(batch.features) == {"user_01", "item_01"}
    assert batch.timestamps.shape == (B,) and (batch.timestamps > 0).all()


def test_ranks_share_global_batches_and_take_equal_steps(dataset):
    whole = list(onefold.Dataset(dataset, global_batch_size=B, streams=8, shuffle=1))
    for world in (2, 3, 5, 8):
        ranks = [
            list(onefold.Dataset(dataset, global_batch_size=B, streams=8, rank=r, world_size=world, shuffle=1))
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


def test_a_state_goes_on_with_another_number_of_ranks(dataset):
    options = dict(global_batch_size=B, streams=8, shuffle=5)
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
    # A batch knows its own position.
    assert taken[0][4].state_dict() == states[0]


def test_a_state_of_other_options_is_refused(dataset):
    state = onefold.Dataset(dataset, global_batch_size=B, shuffle=5).state_dict()
    other = onefold.Dataset(dataset, global_batch_size=B)
    with pytest.raises(onefold.OptionsError, match="shuffle") as refused:
        other.load_state_dict(state)
    assert "resume with" in refused.value.hint
    with pytest.raises(ValueError, match="no state of a dataset"):
        other.load_state_dict({})


def test_the_state_between_epochs_is_that_of_the_next(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=5)
    list(reader)
    state = reader.state_dict()
    assert (state["position"]["epoch"], state["position"]["step"]) == (1, 0)
    again = onefold.Dataset(dataset, global_batch_size=B, shuffle=5)
    again.load_state_dict(state)
    assert all_samples(again) == all_samples(reader)


def test_a_dataset_pickles_with_its_state(dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, shuffle=5)
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
    assert threads()["onefold-feed"] == 1
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
    readers = [onefold.Dataset(dataset, global_batch_size=B, shuffle=seed) for seed in range(20)]
    before = all_threads().total()
    iterators = [iter(reader) for reader in readers]
    total = Counter()
    for step in zip(*iterators, strict=True):
        for batch in step:
            total[len(batch)] += 1
        assert all_threads().total() <= before + 2 * 20
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
    # The state is that of the batches that came.
    assert reader.state_dict()["position"]["step"] == taken


def test_wrong_options_are_exceptions_with_hints(dataset, tmp_path):
    with pytest.raises(onefold.OptionsError, match="64 buckets cannot be divided into 65 streams") as refused:
        onefold.Dataset(dataset, global_batch_size=B, streams=65)
    assert "at most 64" in refused.value.hint
    with pytest.raises(ValueError, match="`dedupe` is `some`"):
        onefold.Dataset(dataset, dedupe="some")
    with pytest.raises(ValueError, match="no sparse feature `user_99`"):
        onefold.Dataset(dataset, features=["user_99"])
    with pytest.raises(onefold.OnefoldError, match="is not a dataset"):
        onefold.Dataset(tmp_path)
    with pytest.raises(onefold.DataError, match="outside the table's 1 rows"):
        list(onefold.Dataset(dataset, global_batch_size=B, table_rows={"user_01": 1}))
    with pytest.raises(ValueError, match="a quote too few or too many"):
        onefold.Dataset(dataset, partitions='hour="7')
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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **store}, capture_output=True, text=True)
        server.shutdown()
    assert "AWS_ACCESS_KEY_ID" in done.stdout, done.stderr



def in_child(work):
    """What `work` returns in a forked child; fails if it takes longer than 600 s."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(work()))
    child.start()
    assert receiver.poll(600), "the child hangs"
    result = receiver.recv()
    child.join(600)
    assert child.exitcode == 0
    return result


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
    # The parent goes on as if nothing had happened.
    assert all_samples(batches) == expected[B:]


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
    # A pipe that nobody writes to: whoever opens it waits for ever.
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
