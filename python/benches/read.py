"""How fast Python gets batches: this package, `onefold-read bench`, and a loader on pyarrow and numpy.

    onefold-data generate --workload rm1 --samples 500000 --seed 1 --out logs
    onefold-ingest build logs/dataset.toml --out folded
    onefold-ingest build logs/dataset.toml --out rows --layout rows
    python python/benches/read.py folded rows --binary target/release/onefold-read

All three read every column, in batches of 2,048 samples, and touch every batch. The first two read the folded dataset. The pyarrow
loader reads the dataset in the layout `rows`, which is the plain Parquet that it would have without Onefold. It is written with
care: pyarrow decodes row groups with all threads (`use_threads`), the next row group is decoded on another thread while one is
cut (`prefetch`), columns are cut as numpy views of Arrow's buffers without a copy of ids, and dense features are stacked once per
batch. It checks nothing and deduplicates nothing. Each is measured `--repeat` times, in turn, and its best run counts.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet as parquet

import onefold

BATCH = 2048


def row_groups(files):
    """The tables of all row groups, of which the next one is decoded meanwhile."""
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


def with_pyarrow(dataset, schema):
    """Samples of all batches of a loader on pyarrow and numpy."""
    floats = schema["labels"] + schema["dense"]
    lists = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    files = sorted(Path(dataset).glob("data/**/*.parquet"))
    samples, rest = 0, None
    for table in row_groups(files):
        table = table.select(floats + lists)
        if rest is not None and rest.num_rows:
            table = pyarrow.concat_tables([rest, table]).combine_chunks()
        whole = table.num_rows - table.num_rows % BATCH
        for start in range(0, whole, BATCH):
            samples += take(table.slice(start, BATCH), floats, lists)
        rest = table.slice(whole)
    return samples + (take(rest, floats, lists) if rest is not None and rest.num_rows else 0)


def take(rows, floats, lists):
    """A batch: dense features in one matrix, and values with offsets by feature."""
    dense = numpy.stack([rows.column(name).to_numpy() for name in floats], axis=1).astype(numpy.float32, copy=False)
    batch = {}
    for name in lists:
        column = rows.column(name)
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        offsets = array.offsets.to_numpy()
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy()
        batch[name] = (values, offsets - offsets[0])
    return len(dense)


def with_onefold(dataset):
    """Samples of all batches of this package."""
    samples = 0
    for batch in onefold.Dataset(dataset, global_batch_size=BATCH):
        samples += len(batch.dense)
        for feature in batch.features.values():
            feature.values, feature.sizes  # noqa: B018: makes the views
    return samples


def with_binary(binary, dataset):
    """Samples per second of `onefold-read bench`."""
    command = [binary, "bench", dataset, "--global-batch-size", str(BATCH), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["samples_per_second"]


def rate(read, *arguments):
    """Samples per second."""
    started = time.perf_counter()
    samples = read(*arguments)
    return samples / (time.perf_counter() - started)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folded", help="a dataset in the layout `folded`")
    parser.add_argument("rows", help="the same dataset in the layout `rows`")
    parser.add_argument("--binary", required=True, help="the path of `onefold-read`")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    schema = onefold.Dataset(arguments.rows).schema
    best = {"onefold": 0.0, "onefold_read": 0.0, "pyarrow": 0.0}
    for _ in range(arguments.repeat):
        found = {
            "onefold": rate(with_onefold, arguments.folded),
            "onefold_read": with_binary(arguments.binary, arguments.folded),
            "pyarrow": rate(with_pyarrow, arguments.rows, schema),
        }
        best = {name: max(best[name], found[name]) for name in best}
    ratios = {"of_binary": best["onefold"] / best["onefold_read"], "of_pyarrow": best["onefold"] / best["pyarrow"]}
    json.dump({f"{name}_samples_per_second": value for name, value in best.items()} | ratios, sys.stdout)
    print()


if __name__ == "__main__":
    main()
