#!/usr/bin/env python3
"""Measures onefold-ingest: sizes against the unclustered baseline, speed against DuckDB, memory, and growth.

    make build
    python3 -m pip install duckdb            # for `duckdb`, `entropy` and the baseline's footers; nothing else is needed
    python3 ingest/benches/measure.py --binaries target/release --work /tmp/measure
    python3 ingest/benches/measure.py --binaries target/release --work /tmp/measure --only duckdb --samples 200000 --runs 5

Prints one table a section; every figure is one of this machine and this run. Sections, all by default:

  size      rm1 (and EB-NeRD, with `--ebnerd DIR`): bytes per sample of the dataset in arrival order, clustered `rows`,
            `folded`, and `folded` with vocabularies. The baseline is arrival order at zstd level 3 where each column counts
            with its smaller size of two writers: `build --order arrival --layout rows`, and, for the columns that the dataset
            takes from the feature log unchanged, `shard --segments 1 --page-size 1MiB`, which takes the smallest of plain,
            dictionary and packed differences for each column, in pages of Parquet's usual size.
  entropy   by column of `folded` and its vocabulary variant: ids stored, bytes for each, and their order-0 entropy in bytes:
            the least that a code of one id at a time could take.
  duckdb    clustering and writing `rows` beside DuckDB's COPY (SELECT ... JOIN ... ORDER BY session_id, timestamp) to zstd
            Parquet: the same log, the same columns, the same threads and memory limit, run by run in turn; the median
            of each, without the start of the process. Then `folded` beside `rows`. For each of `--workloads`; with
            `--wide` also from one log that has the labels already, without a join.
  memory    peak resident memory of building `folded` and `rows` under `--limit` (512MiB): as the kernel counts it for
            the process (getrusage), beside the decoded size of the samples.
  scaling   seconds and processor time by number of samples (`--scaling`, 0.5 to 4 million): 1.00 as growth is linear.

Logs are generated once into `--work` and kept; datasets are removed as soon as they are measured. Two GiB of disk for
each million samples suffice, and as much again while sorts spill.

The last line is one JSON object of all figures. The exit status is 1 if a command failed; its message is in the table.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
import tomllib

MIB = 1 << 20
SECTIONS = ["size", "entropy", "duckdb", "memory", "scaling"]


class Failed(Exception):
    """A command failed. The message is the first line of its error output."""


def parse_with_common(parser, sections):
    """Adds the arguments that all scripts of measurements have, parses the command line, and checks the sections."""
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="folder of Onefold's programs")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for logs, datasets and runs")
    parser.add_argument("--only", default=",".join(sections), help="sections, separated by commas")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the median counts (default 3)")
    parser.add_argument("--threads", type=int, default=2, help="threads of everything (default 2)")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(sections)
    if unknown:
        parser.error(f"no section `{unknown.pop()}`; there are {', '.join(sections)}")
    return arguments


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of rm1 (default 1000000)")
    parser.add_argument("--scaling", default="500000,1000000,2000000,4000000", help="numbers of samples, by commas")
    parser.add_argument("--ebnerd", type=pathlib.Path, help="folder of EB-NeRD's behaviors and history files")
    parser.add_argument("--workloads", default="rm1", help="workloads of `duckdb`, separated by commas (default rm1)")
    parser.add_argument("--wide", action="store_true", help="`duckdb` also from one wide log (needs pyarrow)")
    parser.add_argument("--layouts", default="folded,rows", help="layouts of `scaling`, separated by commas")
    parser.add_argument("--memory-limit", default="4GiB", help="of builds and of DuckDB (default 4GiB)")
    parser.add_argument("--limit", default="512MiB", help="the memory limit of `memory` (default 512MiB)")
    return parse_with_common(parser, SECTIONS)


class Bench:
    """Runs the commands, and collects their figures."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.binaries = arguments.binaries.resolve()
        self.work = arguments.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.figures = {"threads": arguments.threads, "memory_limit": arguments.memory_limit}
        self.failed = False

    def run(self, program, *words):
        """Runs a binary with --json. Returns its object, with the peak resident memory of the process."""
        command = [str(self.binaries / program), *map(str, words), "--json", "--quiet"]
        return run_json(command)

    def log(self, samples, workload="rm1"):
        """Returns the folder of a workload's logs, and generates them if necessary."""
        folder = self.work / f"{workload}-{samples}"
        if not (folder / "dataset.toml").exists():
            self.run("onefold-data", "generate", "--workload", workload, "--samples", samples, "--seed", 1, "--out", folder)
        return folder

    def wide_log(self, samples, workload):
        """Returns the folder of a workload's wide log: each feature file also has the labels of its rows."""
        logs = self.log(samples, workload)
        folder = self.work / f"{workload}-{samples}-wide"
        if not (folder / "dataset.toml").exists():
            # Runs in another process: the kernel would count the peak memory of this process for the commands that it starts.
            writer = multiprocessing.Process(target=write_wide_log, args=(logs, folder))
            writer.start()
            writer.join()
            if writer.exitcode != 0:
                raise Failed("the wide log could not be written")
        return folder

    def build(self, config, *words, limit=None):
        """Builds a dataset. Returns its summary and its folder, which the next build replaces."""
        out = self.work / "dataset"
        shutil.rmtree(out, ignore_errors=True)
        limits = ["--memory-limit", limit or self.arguments.memory_limit, "--threads", self.arguments.threads]
        return self.run("onefold-ingest", "build", config, "--out", out, *limits, *words), out

    def attempt(self, label, work):
        """Returns the result of `work`. If it fails, prints the error and returns None."""
        try:
            return work()
        except Failed as error:
            self.failed = True
            print(f"  {label}: failed: {error}")
            return None


def run_json(command):
    """Runs a command, and returns the JSON object in the last line of its output, with memory and processor time."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process.stdout, process.stderr:
        # stderr has only the few lines of an error, so reading the streams one after the other cannot block.
        output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        raise Failed(f"{os.path.basename(command[0])} {command[1][:20].strip()}: {lines[-1] if command[1] == '-c' else lines[0]}")
    result = json.loads(output.strip().splitlines()[-1])
    # The kernel reports KiB.
    result["peak_rss_bytes"] = usage.ru_maxrss * 1024
    result["processor_seconds"] = usage.ru_utime + usage.ru_stime
    return result


def write_wide_log(logs, folder):
    """Writes the feature files of `logs` with their labels, row group by row group, and a configuration for them."""
    import pyarrow.compute
    import pyarrow.parquet

    shutil.rmtree(folder, ignore_errors=True)
    (folder / "log").mkdir(parents=True)
    events = pyarrow.parquet.read_table(logs / "events", columns=["request_id", "label"])
    ids, labels = events["request_id"].combine_chunks(), events["label"]
    for path in sorted((logs / "features").glob("*.parquet")):
        file = pyarrow.parquet.ParquetFile(path)
        schema = file.schema_arrow.append(events.schema.field("label"))
        with pyarrow.parquet.ParquetWriter(folder / "log" / path.name, schema, compression="zstd") as writer:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                found = labels.take(pyarrow.compute.index_in(rows["request_id"], value_set=ids))
                writer.write_table(rows.append_column(schema.field("label"), found))
    config = (logs / "dataset.toml").read_text()
    config = re.sub(r'features = "[^"]*"\nevents = "[^"]*"', 'log = "log/*.parquet"', config)
    config = re.sub(r'query = """.*?"""', 'query = "SELECT * FROM log"', config, flags=re.DOTALL)
    (folder / "dataset.toml").write_text(config)


def print_table(title, head, rows):
    """Prints a table with its numbers aligned on the right."""
    print(f"\n{title}\n")
    cells = [head, *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for number, row in enumerate(cells):
        first = row[0].ljust(widths[0])
        print("  " + "  ".join([first, *[cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]]).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def parquet_files(folder):
    return [str(path) for path in sorted(pathlib.Path(folder).rglob("*.parquet"))]


def newest_snapshot(dataset):
    return json.loads(max((dataset / "snapshots").glob("*.json")).read_text())


def data_files(dataset):
    """Returns the data files of a dataset that was built once."""
    return parquet_files(dataset / "data")


# Runs in another process: the kernel would count the peak memory of this process for the commands that it starts.
DUCKDB_QUERY = """
import json, sys
import duckdb
print(json.dumps({"rows": [list(map(str, row)) for row in duckdb.execute(sys.argv[1]).fetchall()]}))
"""


def query_duckdb(query):
    """Returns the rows of a query, as texts."""
    return run_json([sys.executable, "-c", DUCKDB_QUERY, query])["rows"]


def column_bytes(files):
    """Returns the compressed bytes of each column, from the footers."""
    query = f"SELECT path_in_schema, sum(total_compressed_size)::BIGINT FROM parquet_metadata({files!r}) GROUP BY ALL"
    sums = {}
    for path, size in query_duckdb(query):
        name = re.split(r", ?list|\.list", path)[0]
        sums[name] = sums.get(name, 0) + int(size)
    return sums


def feature_kinds(config):
    """Returns the kind of each feature, in the order of a dataset.toml."""
    features = tomllib.loads(config.read_text())["features"]
    return {name: feature["kind"] for name, feature in features.items()}


def vocabulary_config(config):
    """Copies a dataset.toml to the same folder, and gives each sparse feature a vocabulary. Returns the path of the copy."""
    pattern = re.compile(r'^(\w+\s*=\s*\{.*kind\s*=\s*"(?:sparse|sequence)".*?)\s*\}', re.MULTILINE)
    text, count = pattern.subn(r'\1, vocabulary = "frequency" }', config.read_text())
    if count == 0:
        raise Failed(f"`{config.name}` has no sparse feature in a line of its own")
    copy = config.with_name("dataset-vocabulary.toml")
    copy.write_text(text)
    return copy


def variants(config):
    """Returns the datasets to compare: label, configuration, options."""
    return [
        ("rows, clustered", lambda: config, ["--layout", "rows"]),
        ("folded", lambda: config, ["--layout", "folded"]),
        ("rows + vocabulary", lambda: vocabulary_config(config), ["--layout", "rows"]),
        ("folded + vocabulary", lambda: vocabulary_config(config), ["--layout", "folded"]),
    ]


def baseline(bench, config, logs):
    """Returns the bytes of the samples in arrival order, with the smaller size of two writers for each column, and the
    summary of the build."""
    summary, out = bench.build(config, "--layout", "rows", "--order", "arrival")
    sizes = column_bytes(data_files(out))
    # Footers and page indexes count with their written size.
    rest = summary["bytes_on_disk"] - sum(sizes.values())
    if logs is not None:
        whole = bench.work / "whole"
        words = ["--by", "session_id", "--segments", 1, "--page-size", "1MiB", "--threads", bench.arguments.threads, "--overwrite"]
        bench.run("onefold-ingest", "shard", logs, *words, "--out", whole)
        again = column_bytes(parquet_files(whole))
        shutil.rmtree(whole)
        lists = [name for name, kind in feature_kinds(config).items() if kind in ("sparse", "sequence", "dense")]
        sizes.update({name: min(sizes[name], again[name]) for name in lists if name in again})
    return sum(sizes.values()) + rest, summary


def measure_size(bench):
    logs = bench.log(bench.arguments.samples)
    inputs = [("rm1", logs / "dataset.toml", logs / "features")]
    if bench.arguments.ebnerd:
        news = bench.work / "ebnerd"
        bench.run("onefold-data", "import", "ebnerd", "--from", bench.arguments.ebnerd, "--out", news, "--overwrite")
        # A query makes its samples, so there is no log with the same columns.
        inputs.append(("ebnerd", news / "dataset.toml", None))
    for name, config, log in inputs:
        found = bench.attempt(name, lambda: baseline(bench, config, log))
        if found is None:
            continue
        base, summary = found
        samples = summary["samples"]
        figures = {"arrival_as_built_bytes": summary["bytes_on_disk"], "baseline_bytes": base}
        rows = [
            ["arrival, as built", f"{summary['bytes_on_disk'] / samples:.1f}", f"{base / summary['bytes_on_disk']:.2f}", ""],
            ["arrival, best of columns", f"{base / samples:.1f}", "1.00", "the baseline"],
        ]
        for label, chosen, words in variants(config):
            def build():
                return bench.build(chosen(), *words)[0]

            built = bench.attempt(f"{name}, {label}", build)
            if built is None:
                rows.append([label, "-", "-", "failed, see above"])
                continue
            if built["samples"] != samples:
                raise Failed(f"{label} has {built['samples']} samples, not {samples}")
            size = built["bytes_on_disk"]
            figures[f"{label} bytes"] = size
            rows.append([label, f"{size / samples:.1f}", f"{base / size:.2f}", ""])
        bench.figures.setdefault("size", {})[name] = {"samples": samples, **figures}
        print_table(
            f"Size of {name}: {samples:,} samples, {summary['samples_per_session']:.2f} per session",
            ["dataset", "bytes/sample", "times smaller", ""],
            rows,
        )
    shutil.rmtree(bench.work / "dataset", ignore_errors=True)


def entropy_bytes(files, column):
    """Returns the number of stored ids of a column, the number of distinct ids, and the order-0 entropy in bytes per id."""
    query = f"""
        WITH ids AS (SELECT unnest("{column}") AS id FROM read_parquet({files!r})),
             counts AS (SELECT count(*) AS n FROM ids GROUP BY id)
        SELECT coalesce(sum(n), 0)::BIGINT, count(*), coalesce(sum(n * (ln(t) - ln(n))) / ln(2) / 8 / any_value(t), 0)
        FROM counts, (SELECT sum(n) AS t FROM counts)
    """
    [(stored, distinct, entropy)] = query_duckdb(query)
    return int(stored), int(distinct), float(entropy)


def measure_entropy(bench):
    config = bench.log(bench.arguments.samples) / "dataset.toml"
    columns = [name for name, kind in feature_kinds(config).items() if kind in ("sparse", "sequence")]
    for label, chosen, words in variants(config):
        if not label.startswith("folded"):
            continue
        built = bench.attempt(label, lambda: bench.build(chosen(), *words))
        if built is None:
            continue
        files = data_files(built[1])
        sizes = column_bytes(files)
        rows, total = [], [0, 0, 0.0]
        for column in columns:
            stored, distinct, entropy = entropy_bytes(files, column)
            size = sizes.get(column, 0)
            rows.append([column, f"{stored:,}", f"{distinct:,}", f"{size / max(stored, 1):.3f}", f"{entropy:.3f}"])
            total = [total[0] + stored, total[1] + size, total[2] + stored * entropy]
        stored = max(total[0], 1)
        rows.append(["all", f"{total[0]:,}", "", f"{total[1] / stored:.3f}", f"{total[2] / stored:.3f}"])
        bench.figures.setdefault("entropy", {})[label] = {
            "ids": total[0], "bytes_per_id": total[1] / stored, "entropy_bytes_per_id": total[2] / stored,
        }
        head = ["column", "ids stored", "distinct", "bytes/id", "entropy/id"]
        print_table(f"Ids of {label}, in bytes", head, rows)
    shutil.rmtree(bench.work / "dataset", ignore_errors=True)


# Runs in another process, so that its memory is measured separately. Only the COPY is timed.
DUCKDB_COPY = """
import json, sys, time
import duckdb
threads, limit, spill, query = sys.argv[1:]
connection = duckdb.connect(config={"threads": int(threads), "memory_limit": limit, "temp_directory": spill})
started = time.monotonic()
rows = connection.execute(query).fetchone()[0]
print(json.dumps({"samples": rows, "wall_seconds": time.monotonic() - started}))
"""


def duckdb_copy(bench, logs, out):
    """Lets DuckDB write the columns that `build` writes, in the order of its samples. Returns the time and the size."""
    kinds = feature_kinds(logs / "dataset.toml")
    if (logs / "log").exists():
        columns = ", ".join(f'"{name}"' for name in kinds)
        samples = f"""SELECT session_id, "timestamp", {columns} FROM read_parquet('{logs}/log/*.parquet')
                      ORDER BY session_id, "timestamp\""""
    else:
        columns = ", ".join(f'e."{name}"' if kind == "label" else f'f."{name}"' for name, kind in kinds.items())
        samples = f"""SELECT f.session_id, f."timestamp", {columns}
                      FROM read_parquet('{logs}/features/*.parquet') f
                      JOIN read_parquet('{logs}/events/*.parquet') e ON e.request_id = f.request_id
                      ORDER BY f.session_id, f."timestamp\""""
    query = f"COPY ({samples}) TO '{out}' (FORMAT parquet, COMPRESSION zstd)"
    spill = bench.work / "duckdb-spill"
    words = [bench.arguments.threads, bench.arguments.memory_limit, spill, query]
    result = run_json([sys.executable, "-c", DUCKDB_COPY, *map(str, words)])
    result["bytes_on_disk"] = out.stat().st_size
    out.unlink()
    shutil.rmtree(spill, ignore_errors=True)
    return result


def measure_duckdb(bench):
    samples = bench.arguments.samples
    for workload in bench.arguments.workloads.split(","):
        beside_duckdb(bench, workload, "Join, cluster and write", bench.log(samples, workload))
        if bench.arguments.wide:
            beside_duckdb(bench, f"{workload}, wide", "Cluster and write", bench.wide_log(samples, workload))


def beside_duckdb(bench, name, what, logs):
    samples = bench.arguments.samples
    config = logs / "dataset.toml"
    works = {
        "DuckDB": lambda: duckdb_copy(bench, logs, bench.work / "duckdb.parquet"),
        "onefold rows": lambda: bench.build(config, "--layout", "rows")[0],
        "onefold folded": lambda: bench.build(config, "--layout", "folded")[0],
    }
    results = {label: [] for label in works}
    # Runs alternate, so that other load on the machine affects all of them.
    for _ in range(bench.arguments.runs):
        for label, work in works.items():
            result = bench.attempt(label, work)
            if result is not None:
                if result["samples"] != samples:
                    raise Failed(f"{label} wrote {result['samples']} samples, not {samples}")
                results[label].append(result)
    shutil.rmtree(bench.work / "dataset", ignore_errors=True)
    medians = {label: median(of, "wall_seconds") for label, of in results.items() if of}
    rows = []
    for label, seconds in medians.items():
        beside = f"{medians['DuckDB'] / seconds:.2f}" if "DuckDB" in medians else "-"
        runs = " ".join(f"{result['wall_seconds']:.2f}" for result in results[label])
        size = results[label][0]["bytes_on_disk"] / samples
        peak = max(result["peak_rss_bytes"] for result in results[label])
        rows.append([label, f"{seconds:.2f}", f"{samples / seconds:,.0f}", beside, f"{size:.1f}", f"{peak / MIB:.0f}", runs])
    bench.figures.setdefault("duckdb", {})[name] = {"samples": samples, "median_seconds": medians}
    print_table(
        f"{what} {name}, {samples:,} samples: {bench.arguments.threads} threads, {bench.arguments.memory_limit}",
        ["", "median s", "samples/s", "times DuckDB", "bytes/sample", "peak MiB", "runs, s"],
        rows,
    )


def measure_memory(bench):
    samples = bench.arguments.samples
    config = bench.log(samples) / "dataset.toml"
    rows = []
    for layout in ["folded", "rows"]:
        def build():
            return bench.build(config, "--layout", layout, limit=bench.arguments.limit)

        built = bench.attempt(layout, build)
        if built is None:
            continue
        summary, out = built
        statistics = newest_snapshot(out)["statistics"]
        ids = sum(feature["values"] for feature in statistics["features"].values())
        floats = sum(kind in ("label", "weight", "dense") for kind in feature_kinds(config).values())
        decoded = 8 * ids + (16 + 4 * floats) * samples
        bench.figures.setdefault("memory", {})[layout] = {
            "samples": samples, "decoded_bytes": decoded, "limit": bench.arguments.limit,
            "peak_rss_bytes": summary["peak_rss_bytes"], "wall_seconds": summary["wall_seconds"],
        }
        rows.append([
            layout, f"{decoded / MIB:,.0f}", f"{summary['peak_rss_bytes'] / MIB:.0f}", f"{summary['wall_seconds']:.1f}",
        ])
    shutil.rmtree(bench.work / "dataset", ignore_errors=True)
    head = ["layout", "decoded MiB", "peak MiB", "s"]
    print_table(f"Memory of building rm1, {samples:,} samples, --memory-limit {bench.arguments.limit}", head, rows)


def measure_scaling(bench):
    layouts, rows, first = bench.arguments.layouts.split(","), [], {}
    for samples in [int(count) for count in bench.arguments.scaling.split(",")]:
        config = bench.log(samples) / "dataset.toml"
        row = [f"{samples:,}"]
        for layout in layouts:
            def build():
                return bench.build(config, "--layout", layout)[0]

            runs = [bench.attempt(layout, build) for _ in range(bench.arguments.runs)]
            runs = [run for run in runs if run is not None]
            if not runs:
                row += ["-"] * 5
                continue
            row += [f"{samples / median(runs, 'wall_seconds'):,.0f}"]
            for key in ["wall_seconds", "processor_seconds"]:
                seconds = median(runs, key)
                bench.figures.setdefault("scaling", {}).setdefault(layout, {}).setdefault(key, {})[samples] = seconds
                beside = seconds / samples / first.setdefault((layout, key), seconds / samples)
                row += [f"{seconds:.2f}", f"{beside:.2f}"]
        rows.append(row)
    shutil.rmtree(bench.work / "dataset", ignore_errors=True)
    head = ["samples"]
    for layout in layouts:
        head += [f"{layout}: samples/s", "s", "per sample", "processor s", "per sample"]
    print_table("Time by number of samples; `per sample` beside the first line", head, rows)


def median(results, key):
    return statistics.median(result[key] for result in results)


def main():
    arguments = parse_arguments()
    bench = Bench(arguments)
    measures = {
        "size": measure_size,
        "entropy": measure_entropy,
        "duckdb": measure_duckdb,
        "memory": measure_memory,
        "scaling": measure_scaling,
    }
    started = time.monotonic()
    for section in arguments.only.split(","):
        try:
            measures[section](bench)
        except Failed as error:
            bench.failed = True
            print(f"\n{section} failed: {error}")
        sys.stdout.flush()
    bench.figures["measured_seconds"] = time.monotonic() - started
    bench.figures["peak_rss_of_all_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print()
    print(json.dumps(bench.figures))
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
