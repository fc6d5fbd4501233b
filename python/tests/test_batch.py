"""Batches: views of one allocation, Arrow, copies."""

import copy
import gc
import pickle
import weakref

import numpy
import pyarrow
import pytest
from samples import assert_valid, full_batch, samples_of

import onefold

B = 512


@pytest.fixture(params=["exact", "window", "off"])
def batch(request, dataset):
    reader = onefold.Dataset(dataset, global_batch_size=B, dedupe=request.param, timestamps=True)
    with reader:
        return next(iter(reader))


def arrays_of(batch):
    yield from (batch.dense, batch.labels, batch.timestamps, batch.lengths, batch.values)
    for group in batch.groups.values():
        yield from (group.lengths, group.values)
        if group.inverse is not None:
            yield group.inverse
        for feature in group.features.values():
            yield from (feature.values, feature.sizes, feature.offsets)


def address(array):
    return array.__array_interface__["data"][0]


def test_every_array_is_a_view_of_one_allocation(batch):
    start, end = address(batch.data), address(batch.data) + batch.nbytes
    assert start % 64 == 0
    for array in arrays_of(batch):
        if array.size:
            assert start <= address(array) and address(array) + array.nbytes <= end
            assert numpy.shares_memory(array, batch.data)


def test_views_are_read_only_and_a_copy_may_be_written(batch):
    assert not any(array.flags.writeable for array in arrays_of(batch))
    with pytest.raises(ValueError, match="read-only"):
        batch.dense[0, 0] = 42
    before, own = samples_of(batch), batch.writable()
    assert all(array.flags.writeable for array in arrays_of(own)) and samples_of(own) == before
    own.dense[0, 0] = 42
    assert numpy.frombuffer(own.data, numpy.float32)[own._spec["dense"] // 4] == 42
    # Later results from the copy contain the change, but the original batch does not.
    for other in (own.expand(), own.expand()):
        assert other.dense[0, 0] == 42
    assert samples_of(batch) == before and own.state_dict() == batch.state_dict()
    assert not pickle.loads(pickle.dumps(own, protocol=4)).dense.flags.writeable


def test_a_shallow_copy_is_read_only_and_its_original_stays_writable(batch):
    original = batch.writable()
    shallow = copy.copy(original)
    original.dense[0, 0] = 42
    assert not shallow.dense.flags.writeable and shallow.dense[0, 0] == 42


def test_memory_that_arrow_has_is_not_written(batch):
    rows = pyarrow.record_batch(batch)
    # torch tensors, which are writable, are made like this.
    assert not numpy.frombuffer(batch._block, numpy.uint8).flags.writeable
    assert rows.num_rows == B


def test_arrow_does_not_have_memory_that_may_be_written(batch):
    before = samples_of(batch)
    written = numpy.frombuffer(batch._block, numpy.uint8)
    assert written.flags.writeable and address(written) == address(batch.data)
    rows = pyarrow.record_batch(batch)
    plain = rows.to_pylist()
    assert samples_of(batch.expand()) == before
    written.view(numpy.int32)[batch._spec["sizes"] // 4] = 1 << 30
    for group in batch.groups.values():
        if group.inverse is not None:
            written.view(numpy.int32)[group._spec["inverse"] // 4] = 1 << 30
    rows.validate(full=True)
    assert rows.to_pylist() == plain
    with pytest.raises(onefold.DataError):
        batch.expand()
    with pytest.raises(onefold.DataError):
        pyarrow.record_batch(batch)


def test_a_group_is_a_kjt_without_a_copy(batch):
    for group in batch.groups.values():
        features = group.features.values()
        assert numpy.array_equal(group.lengths, numpy.concatenate([feature.sizes for feature in features]))
        assert numpy.array_equal(group.values, numpy.concatenate([feature.values for feature in features]))
        if group.packed:
            assert group.lengths.sum() == len(group.values)
            for feature in features:
                assert numpy.array_equal(feature.offsets, numpy.cumsum(feature.sizes) - feature.sizes)


def test_an_array_outlives_its_batch_and_nothing_else_keeps_it(dataset):
    batch = next(iter(onefold.Dataset(dataset, global_batch_size=B)))
    block = weakref.ref(batch.data)
    values, copy = batch.values, batch.values.copy()
    batch.groups["user_a"].features  # noqa: B018: makes what could hold the batch
    gc.disable()
    try:
        del batch
        assert numpy.array_equal(values, copy)
        del values
        assert block() is None, "a cycle keeps the batch until a garbage collection"
    finally:
        gc.enable()


def test_dlpack_shares_the_bytes(batch):
    assert address(numpy.from_dlpack(batch.dense)) == address(batch.dense)
    assert address(numpy.from_dlpack(batch.values)) == address(batch.values)


def test_arrow_has_the_samples_and_keeps_dictionaries(batch):
    for source in (batch.to_arrow(), batch):
        rows = pyarrow.record_batch(source)
        rows.validate(full=True)
        assert rows.num_rows == B
        for group in batch.groups.values():
            for feature in group.features.values():
                column = rows.column(feature.name)
                if group.inverse is None:
                    assert column.type == pyarrow.list_view(pyarrow.field("item", pyarrow.int64(), nullable=False))
                    lists, keys = column, range(B)
                else:
                    assert pyarrow.types.is_dictionary(column.type) and len(column.dictionary) == group.rows
                    assert numpy.array_equal(column.indices.to_numpy(), group.inverse)
                    lists, keys = column.dictionary, group.inverse.tolist()
                if feature.values.size:
                    assert lists.values.buffers()[1].address == address(feature.values), "Arrow has a copy"
                ids = lists.to_pylist()
                assert [ids[key] for key in keys[:50]] == [feature.row(key).tolist() for key in keys[:50]]


def test_expanding_changes_no_sample(batch):
    expanded = batch.expand()
    assert samples_of(expanded) == samples_of(batch)
    assert all(group.inverse is None and group.rows == B and group.packed for group in expanded.groups.values())


def test_expanding_keeps_all_columns():
    batch = full_batch(10)
    expanded = batch.expand()
    (feature,) = expanded.features.values()
    assert feature.rows == 2 and feature.values.tolist() == [18, 19, 20] * 2 and feature.sizes.tolist() == [3, 3]
    for name in ("dense", "labels", "weights", "timestamps"):
        assert numpy.array_equal(getattr(expanded, name), getattr(batch, name))
    assert {name: values.tolist() for name, values in expanded.kept.items()} == {
        "request": [16, 17],
        "country": [None, "0010"],
    }


def test_a_batch_survives_pickling(batch):
    copy = pickle.loads(pickle.dumps(batch))
    assert samples_of(copy) == samples_of(batch)
    assert batch.state_dict()["position"]["step"] == 1
    for other in (copy, copy.expand(), copy.expand().numpy(), batch.expand()):
        assert other.state_dict() == batch.state_dict()
    assert numpy.array_equal(copy.timestamps, batch.timestamps)
    assert pyarrow.record_batch(copy.to_arrow()).equals(pyarrow.record_batch(batch.to_arrow()))
    assert samples_of(copy.expand()) == samples_of(batch)


def test_what_python_writes_over_a_batch_is_checked(batch):
    batch = batch.writable()
    batch.lengths[0] = 1 << 30
    with pytest.raises(onefold.DataError, match="row 0"):
        batch.expand()
    with pytest.raises(onefold.DataError, match="row 0"):
        pyarrow.record_batch(batch.to_arrow())


def test_padding_keeps_the_newest_ids(batch):
    for group in batch.groups.values():
        for feature in group.features.values():
            for length in (None, 3, 0):
                ids, mask = feature.padded(length, value=-1)
                assert ids.dtype == numpy.int64 and ids.shape == mask.shape
                for row in range(0, group.rows, 37):
                    expected = feature.row(row).tolist()
                    expected = expected if length is None else expected[max(0, len(expected) - length) :]
                    assert ids[row][mask[row]].tolist() == expected
                    assert (ids[row][~mask[row]] == -1).all()


def test_a_bool_is_no_row_and_no_length(batch):
    feature = batch.features["user_00"]
    for call in (lambda: feature.row(True), lambda: feature.padded(True), lambda: feature.padded(3, value=False)):
        with pytest.raises(TypeError, match="takes an integer, not bool"):
            call()
    assert feature.row(numpy.int32(0)).tolist() == feature.row(0).tolist()


def test_without_torch_the_error_says_what_to_install(batch):
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'onefold\[torch\]'"):
            batch.to_torch()
    else:
        tensor = batch.to_torch().values
        assert tensor.data_ptr() == address(batch.values)


def test_a_batch_is_valid_and_describes_itself(batch):
    assert_valid(batch)
    assert "512 samples" in repr(batch)


def test_what_is_kept_of_a_batch_stays_when_its_successors_come(dataset):
    batches = onefold.Dataset(dataset, global_batch_size=B)
    kept = [(batch.dense, batch.features["user_00"].values) for batch in batches]
    copies = [(batch.dense.copy(), batch.features["user_00"].values.copy()) for batch in batches]
    # Without shuffling, the second epoch equals the first one.
    assert len(kept) > 3
    for (dense, values), (of_dense, of_values) in zip(kept, copies, strict=True):
        assert numpy.array_equal(dense, of_dense) and numpy.array_equal(values, of_values)
