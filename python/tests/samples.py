"""What batches mean: lists by sample, to compare ways of reading."""

import numpy


def samples_of(batch):
    """The samples of a batch in order: hashable, with dense features, labels and the lists of every feature."""
    batch = batch.numpy()
    columns = [[row.tobytes() for row in batch.dense], [row.tobytes() for row in batch.labels]]
    for group in batch.groups.values():
        rows = range(len(batch)) if group.inverse is None else group.inverse.tolist()
        for feature in group.features.values():
            starts, sizes, ids = feature.offsets.tolist(), feature.sizes.tolist(), feature.values.tobytes()
            lists = [ids[8 * start : 8 * (start + size)] for start, size in zip(starts, sizes, strict=True)]
            columns.append([lists[row] for row in rows])
    return list(zip(*columns, strict=True))


def all_samples(batches):
    """The samples of several batches, in order."""
    return [sample for batch in batches for sample in samples_of(batch)]


def assert_valid(batch):
    """Every offset, size and row is within bounds."""
    for group in batch.groups.values():
        if group.inverse is not None:
            assert group.inverse.min(initial=0) >= 0 and group.inverse.max(initial=-1) < group.rows
        for feature in group.features.values():
            assert (feature.sizes >= 0).all() and (feature.offsets >= 0).all()
            ends = feature.offsets.astype(numpy.int64) + feature.sizes
            assert ends.max(initial=0) <= len(feature.values)
