"""The samples of batches, to compare different ways of reading."""

import numpy

from onefold import Batch


def samples_of(batch):
    """Returns the samples of a batch in order, as hashable values with dense features, labels and all lists."""
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
    """Returns the samples of several batches, in order."""
    return [sample for batch in batches for sample in samples_of(batch)]


def assert_valid(batch):
    """Checks that every offset, size and row is within bounds."""
    for group in batch.groups.values():
        if group.inverse is not None:
            assert group.inverse.min(initial=0) >= 0 and group.inverse.max(initial=-1) < group.rows
        for feature in group.features.values():
            assert (feature.sizes >= 0).all() and (feature.offsets >= 0).all()
            ends = feature.offsets.astype(numpy.int64) + feature.sizes
            assert ends.max(initial=0) <= len(feature.values)


def full_batch(first):
    """Returns a batch of two samples with one row and all kinds of sections, filled with numbers from `first`."""
    feature = {"name": "ids", "values": 3, "packed": True}
    spec = {
        **{"size": 2, "dense_width": 1, "dense": 0, "label_width": 1, "labels": 64, "weights": 128, "timestamps": 192},
        "kept": [
            {"name": "request", "validity": None, "values": 256, "texts": None},
            {"name": "country", "validity": 320, "values": 384, "texts": [448, 4]},
        ],
        **{"sizes": 512, "offsets": 576, "values": 640},
        "groups": [{"name": "group", "rows": 1, "inverse": 704, "features": [feature]}],
    }
    data = numpy.zeros(768, numpy.uint8)
    for start, kind, values in [
        (0, "float32", [first, first + 1]),
        (64, "float32", [0, 1]),
        (128, "float32", [first + 2, first + 3]),
        (192, "int64", [first + 4, first + 5]),
        (256, "int64", [first + 6, first + 7]),
        (320, "uint8", [0b10]),
        (384, "int32", [0, 0, 4]),
        (448, "uint8", list(f"{first:04}".encode())),
        (512, "int32", [3]),
        (640, "int64", [first + 8, first + 9, first + 10]),
    ]:
        bytes_of = numpy.array(values, kind).view(numpy.uint8)
        data[start : start + len(bytes_of)] = bytes_of
    return Batch(None, data, spec, None)
