"""How fast Python gets batches: this package, `onefold-read bench`, and a loader on pyarrow and numpy.

    onefold-data generate --workload rm1 --samples 500000 --seed 1 --out logs
    onefold-ingest build logs/dataset.toml --out folded
    onefold-ingest build logs/dataset.toml --out rows --layout rows
    python python/benches/read.py folded rows --binary target/release/onefold-read

All three read every column, in batches of 2,048 samples, with and without preprocessing: every list truncated to 50
ids, and ids hashed with SigridHash. The first two read the folded dataset. The pyarrow loader reads the dataset in
the layout `rows`, which is the plain Parquet that there would be without Onefold. It is written with care: pyarrow
decodes row groups with all threads (`use_threads`); the next row group is decoded on another thread while one is
cut; columns are cut as numpy views of Arrow's buffers without a copy of ids; dense features are stacked once per
batch; Arrow's own kernel truncates lists, once per row group; and ids are hashed in place, in blocks that stay in a
core's cache. It checks nothing and deduplicates nothing. Before anything is measured, its first batch is compared
with this package's. All are measured `--repeat` times, in turn and in processes of their own, and the medians
count.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy
import pyarrow
import pyarrow.compute as compute
import pyarrow.parquet as parquet

import onefold

BATCH = 2048
FIRST, BUCKETS = 50, 200_000
PREPROCESS = f"""
format_version = 1
step = [
    {{ op = "firstx", inputs = ["*"], count = {FIRST} }},
    {{ op = "sigrid_hash", inputs = ["*"], max = {BUCKETS} }},
]
"""


def row_groups(files):
    """Yields the tables of all row groups. The next row group is decoded in the background."""
    opened = [parquet.ParquetFile(file, memory_map=True) for file in files]
    places = [(file, i) for file in opened for i in range(file.num_row_groups)]
    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for file, i in places:
            coming = pool.submit(file.read_row_group, i, use_threads=True)
            if ahead is not None:
                yield ahead.result()
            ahead = coming
        if ahead is not None:
            yield ahead.result()


def batches_of_pyarrow(dataset, schema, preprocess):
    """Yields batches of a loader on pyarrow and numpy: floats in one matrix, and values and offsets by feature."""
    floats = schema["labels"] + schema["dense"]
    lists = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    rest = None
    for table in row_groups([samples.path for samples in onefold.files(dataset)]):
        table = table.select(floats + lists)
        if preprocess:
            for name in lists:
                first = compute.list_slice(table[name], 0, FIRST)
                table = table.set_column(table.column_names.index(name), name, first)
        if rest is not None and rest.num_rows:
            table = pyarrow.concat_tables([rest, table])
        table = table.combine_chunks()
        whole = table.num_rows - table.num_rows % BATCH
        for start in range(0, whole, BATCH):
            yield cut(table.slice(start, BATCH), floats, lists, preprocess)
        rest = table.slice(whole)
    if rest is not None and rest.num_rows:
        yield cut(rest, floats, lists, preprocess)


def cut(rows, floats, lists, preprocess):
    """Returns a batch of some rows of a table."""
    dense = numpy.stack([rows.column(name).to_numpy() for name in floats], axis=1).astype(numpy.float32, copy=False)
    features = {}
    for name in lists:
        array = rows.column(name).chunk(0)
        offsets = array.offsets.to_numpy()
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy()
        features[name] = (hashed(values) if preprocess else values, offsets - offsets[0])
    return dense, features


def hashed(ids, block=8192):
    """Returns the SigridHash of ids with salt 0."""
    out = numpy.empty(len(ids), dtype=numpy.int64)
    space = numpy.empty(block, dtype=numpy.uint64)
    for start in range(0, len(ids), block):
        k = out[start : start + block].view(numpy.uint64)
        t = space[: len(k)]
        k[:] = ids[start : start + block].view(numpy.uint64)
        numpy.left_shift(k, 21, out=t)
        numpy.invert(k, out=k)
        k += t
        for right, lefts in ((24, (3, 8)), (14, (2, 4)), (28, (31,))):
            numpy.right_shift(k, right, out=t)
            k ^= t
            first = k.copy() if len(lefts) > 1 else k
            for left in lefts:
                numpy.left_shift(first, left, out=t)
                k += t
        for _ in range(2):
            k *= numpy.uint64(0x9DDFEA08EB382D69)
            numpy.right_shift(k, 47, out=t)
            k ^= t
        k *= numpy.uint64(0x9DDFEA08EB382D69)
    return numpy.remainder(out, BUCKETS, out=out)


def with_pyarrow(dataset, schema, preprocess):
    """Returns the number of samples in all batches of the loader on pyarrow and numpy."""
    return sum(len(dense) for dense, _ in batches_of_pyarrow(dataset, schema, preprocess))


def compare(dataset, schema, preprocess):
    """Ends the program if the first batch of the pyarrow loader differs from that of this package."""
    _, features = next(batches_of_pyarrow(dataset, schema, preprocess))
    batch = next(iter(onefold.Dataset(dataset, global_batch_size=BATCH, dedupe="off", preprocess=preprocess)))
    for name, (values, offsets) in features.items():
        feature = batch.features[name]
        if not (numpy.array_equal(values, feature.values) and numpy.array_equal(numpy.diff(offsets), feature.sizes)):
            sys.exit(f"error: the loaders give other lists of `{name}`")


def with_onefold(dataset, dedupe, preprocess):
    """Returns the number of samples in all batches of this package."""
    samples = 0
    for batch in onefold.Dataset(dataset, global_batch_size=BATCH, dedupe=dedupe, preprocess=preprocess):
        samples += len(batch.dense)
        for feature in batch.features.values():
            feature.values, feature.sizes  # noqa: B018: makes the views
    return samples


def with_binary(binary, dataset, dedupe, preprocess):
    """Returns the samples per second of `onefold-read bench`."""
    command = [binary, "bench", dataset, "--global-batch-size", str(BATCH), "--dedupe", dedupe, "--json"]
    command += ["--preprocess", preprocess] if preprocess else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["samples_per_second"]


def rate(read, *arguments):
    """Returns samples per second."""
    # The threads of numpy's OpenBLAS spin for a tenth of a second after the import.
    time.sleep(0.5)
    started = time.perf_counter()
    samples = read(*arguments)
    return samples / (time.perf_counter() - started)


def alone(read, *arguments):
    """Returns the rate in a separate process, like that of the command. The start of the process is not measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(rate, read, *arguments).result()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folded", help="a dataset in the layout `folded`")
    parser.add_argument("rows", help="the same dataset in the layout `rows`")
    parser.add_argument("--binary", required=True, help="the path of `onefold-read`")
    parser.add_argument("--dedupe", choices=["off", "exact", "window"], default="exact", help="of the first two")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    schema = onefold.Dataset(arguments.rows).schema
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(PREPROCESS)
        file.flush()
        for preprocess in (None, file.name):
            compare(arguments.rows, schema, preprocess)
            print(json.dumps(measure(arguments, schema, preprocess)), flush=True)


def measure(arguments, schema, preprocess):
    """Returns the rates of all three loaders, and their ratios."""
    loaders = {
        "onefold": lambda: alone(with_onefold, arguments.folded, arguments.dedupe, preprocess),
        "onefold_read": lambda: with_binary(arguments.binary, arguments.folded, arguments.dedupe, preprocess),
        "pyarrow": lambda: alone(with_pyarrow, arguments.rows, schema, preprocess),
    }
    rates = {name: [] for name in loaders}
    for i in range(arguments.repeat):
        # The order alternates, because the previous measurement has an effect on a shared machine.
        for name in list(loaders)[:: -1 if i % 2 else 1]:
            rates[name].append(loaders[name]())
    median = {name: statistics.median(found) for name, found in rates.items()}
    found = {"preprocess": preprocess is not None, "dedupe": arguments.dedupe}
    found |= {f"{name}_samples_per_second": round(value) for name, value in median.items()}
    return found | {
        "of_binary": round(median["onefold"] / median["onefold_read"], 3),
        "of_pyarrow": round(median["onefold"] / median["pyarrow"], 2),
    }


if __name__ == "__main__":
    main()
