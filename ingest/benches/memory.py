#!/usr/bin/env python3
"""Measures the memory of builds whose logs are hard to keep in a limit, and checks what they write.

    make build
    python3 -m pip install pyarrow
    python3 ingest/benches/memory.py --binaries target/release --work /tmp/memory

Builds rm1 under `--limit` (512MiB) in each order (session, session-hash, arrival) from each of these logs, which have the
same samples but for their session ids:

  as logged       in order of time, sessions interleaved as a service logs them
  newest first    the same rows from the last to the first
  one session     all samples in one session
  half            every second sample in one session, the others in their own

After each build, `verify --against` reads the log again under the same limit and compares its samples with the dataset's. The
digest of a dataset covers neither session ids nor the order of samples, so all datasets must also have the same digest.

Prints a table: seconds and peak resident memory, as the kernel counts it, of the build and of `verify --against`, and the
bytes of a sample. The last line is one JSON object of all figures. The exit status is 1 if a command failed, a digest
differs, or a peak is over twice the limit.

Takes about 2 GiB of disk for each million samples, as much again for a changed log, and up to 8 GiB while sorts spill.
"""

import argparse
import json
import multiprocessing
import pathlib
import shutil
import sys

from measure import MIB, Bench, Failed, newest_snapshot, print_table

ORDERS = ["session", "session-hash", "arrival"]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="folder of onefold-data and onefold-ingest")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for logs and datasets")
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of rm1 (default 1000000)")
    parser.add_argument("--logs", default=",".join(LOGS), help="logs, separated by commas")
    parser.add_argument("--orders", default=",".join(ORDERS), help="orders, separated by commas")
    parser.add_argument("--threads", type=int, default=2, help="threads of everything (default 2)")
    parser.add_argument("--limit", default="512MiB", help="the memory limit (default 512MiB)")
    arguments = parser.parse_args()
    arguments.memory_limit = arguments.limit
    for name in arguments.logs.split(","):
        if name not in LOGS:
            parser.error(f"no log `{name}`; there are {', '.join(LOGS)}")
    return arguments


def limit_bytes(text):
    """Returns the bytes of a limit such as 512MiB."""
    return int(text[:-3]) * UNITS[text[-3:]]


def newest_first(batch):
    """Returns the rows of a batch from the last to the first."""
    import pyarrow

    return batch.take(pyarrow.array(range(batch.num_rows - 1, -1, -1), pyarrow.int64()))


def with_sessions(batch, change):
    """Returns a batch with changed session ids."""
    import pyarrow
    import pyarrow.compute

    ids = change(pyarrow.compute, batch.column("session_id"), batch.column("request_id"))
    return batch.set_column(batch.schema.get_field_index("session_id"), "session_id", ids)


def one_session(batch):
    return with_sessions(batch, lambda compute, sessions, _: compute.multiply(sessions, 0))


def half(batch):
    def change(compute, sessions, requests):
        is_odd = compute.equal(compute.bit_wise_and(requests, 1), 1)
        return compute.if_else(is_odd, sessions, -1)

    return with_sessions(batch, change)


# The change of each log, and whether the log is reversed.
LOGS = {
    "as logged": (lambda batch: batch, False),
    "newest first": (newest_first, True),
    "one session": (one_session, False),
    "half": (half, False),
}


def write_log(logs, name, out):
    """Writes a copy of rm1's logs with a change."""
    import pyarrow.parquet

    change, from_end = LOGS[name]
    shutil.rmtree(out, ignore_errors=True)
    (out / "features").mkdir(parents=True)
    shutil.copytree(logs / "events", out / "events")
    shutil.copy(logs / "dataset.toml", out / "dataset.toml")
    files = sorted((logs / "features").glob("*.parquet"))
    writer = None
    for file in reversed(files) if from_end else files:
        groups = range(pyarrow.parquet.ParquetFile(file).num_row_groups)
        for group in reversed(groups) if from_end else groups:
            # A new reader per row group, because a reader keeps the data that it has decoded.
            table = change(pyarrow.parquet.ParquetFile(file).read_row_group(group))
            writer = writer or pyarrow.parquet.ParquetWriter(
                out / "features" / "part-00000.parquet", table.schema, compression="zstd"
            )
            writer.write_table(table, row_group_size=20_000)
    writer.close()


def dataset_digest(dataset):
    """Returns the digest of all samples: the 128-bit sum of the digests of the row groups."""
    import pyarrow.parquet

    manifests = [dataset / manifest["path"] for manifest in newest_snapshot(dataset)["manifests"]]
    tables = [pyarrow.parquet.read_table(manifest, columns=["digest"]) for manifest in manifests]
    total = sum(int(digest, 16) for table in tables for digest in table["digest"].to_pylist())
    return f"{total % (1 << 128):032x}"


def measure(bench, config, order):
    """Builds and verifies a dataset, and returns the figures of both."""
    built, out = bench.build(config, "--order", order)
    limits = ["--memory-limit", bench.arguments.limit, "--threads", bench.arguments.threads]
    verified = bench.run("onefold-ingest", "verify", out, "--against", config, *limits)
    figures = {
        "samples": built["samples"],
        "sessions": built["sessions"],
        "digest": dataset_digest(out),
        "sound": verified["problems_found"] == 0 and not verified["against"]["problems"],
        "sorted_joins": built["sorted_joins"],
        "bytes_on_disk": built["bytes_on_disk"],
        "build_seconds": built["wall_seconds"],
        "build_peak_rss_bytes": built["peak_rss_bytes"],
        "verify_seconds": verified["wall_seconds"] + verified["against"]["wall_seconds"],
        "verify_peak_rss_bytes": verified["peak_rss_bytes"],
    }
    shutil.rmtree(out)
    return figures


def row(name, order, figures, most):
    """Returns a line of the table."""
    peaks = [figures["build_peak_rss_bytes"], figures["verify_peak_rss_bytes"]]
    return [
        f"{name}, {order}",
        f"{figures['sessions']:,}",
        f"{figures['build_seconds']:.0f}",
        f"{peaks[0] / MIB:.0f}",
        f"{figures['verify_seconds']:.0f}",
        f"{peaks[1] / MIB:.0f}",
        f"{figures['bytes_on_disk'] / figures['samples']:.0f}",
        "yes" if figures["sound"] else "NO",
        "yes" if max(peaks) <= most else "NO",
    ]


def main():
    arguments = parse_arguments()
    bench = Bench(arguments)
    logs = bench.log(arguments.samples)
    most = 2 * limit_bytes(arguments.limit)
    rows, results = [], {}
    for name in arguments.logs.split(","):
        changed = bench.work / "changed"
        # Runs in another process: the kernel would count the peak memory of this process for the commands that it starts.
        writing = multiprocessing.Process(target=write_log, args=(logs, name, changed))
        writing.start()
        writing.join()
        if writing.exitcode != 0:
            raise Failed(f"the log `{name}` could not be written")
        for order in arguments.orders.split(","):
            label = f"{name}, {order}"
            figures = bench.attempt(label, lambda: measure(bench, changed / "dataset.toml", order))
            if figures is not None:
                results[label] = figures
                rows.append(row(name, order, figures, most))
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
        shutil.rmtree(changed)
    head = ["log, order", "sessions", "build s", "peak MiB", "verify s", "peak MiB", "bytes/sample", "agrees", "within 2x"]
    print_table(f"rm1, {arguments.samples:,} samples, --memory-limit {arguments.limit}", head, rows)
    digests = {figures["digest"] for figures in results.values()}
    if len(digests) > 1:
        print(f"\nthe datasets have {len(digests)} different digests")
    failed = bench.failed or len(digests) > 1 or any("NO" in line for line in rows)
    print()
    print(json.dumps({"limit": arguments.limit, "threads": arguments.threads, "results": results}))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"failed: {error}")
