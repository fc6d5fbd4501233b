#!/usr/bin/env python3
"""Measures data that changes: added features, late labels, forgotten users, and training that follows.

    make build wheel
    python3 -m pip install pandas pyarrow pylance target/wheels/onefold-0*.whl
    python3 ingest/benches/changes.py --binaries target/release --work /tmp/changes
    python3 ingest/benches/changes.py --binaries target/release --work /tmp/changes --only follow --hour-samples 1000

Prints one table a section, with the limits of the manual's promises. Sections, all by default:

  features  rm1 without some of its features (`--features`), to which `add-features` adds each of them alone: bytes written
            relative to the feature's columns in a dataset that was built with it, seconds relative to that build, and the
            rate of reading afterwards relative to it, run by run in turn. Beside it Lance's `add_columns`, which gets the
            column in the order of its rows, and `merge`, which joins it by the key of the samples.
  labels    logs of 7 days with clicks up to 60 hours late. Each day is built from the events by its end; then `relabel`
            computes all labels: bytes written relative to the label columns of a dataset that was built anew. The labels as
            of every hour of the fourth day are compared with those that pandas computes from the events.
  forget    `forget` of `--users` users, `verify --absent`, and the digest of a dataset that was built without them.
  follow    `follow` over `--hours` hourly partitions, each appended when the one before is trained on, with `--kills` kills
            at random moments; then an undisturbed run. Their losses must be equal, and each partition must come once.
            Freshness: from the end of an hour's logs to the export, which is the time of `append` and from its commit to
            the export.

Logs are generated once into `--work` and kept. The last line is one JSON object of all figures. The exit status is 1 if a
command failed or a comparison did not hold; times and ratios are only printed.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import time

from measure import Bench, Failed, data_files, parse_with_common, print_table

SECTIONS = ["features", "labels", "forget", "follow"]
START = datetime.datetime(2024, 6, 1, tzinfo=datetime.timezone.utc)
DAYS = 7
WINDOW_HOURS = 72
ARTICLES = 20_000
HISTORY = 20
SESSION = 11

DATASET = """format_version = 1
keep = ["request"]

[sources]
requests = "requests/*.parquet"
events = "events.parquet"

[samples]
source = "requests"
key = ["request"]

[join]
source = "events"
on = ["request"]
time = "event_time"
window = "3d"
[join.labels]
clicked = { when = "kind = 'click'", delay = true }

[session]
user = "user"
gap = "30m"
time = "time"

[partition]
by = "BY"

[features]
clicked = { kind = "label" }
clicked_delay = { kind = "label" }
age = { kind = "dense" }
user = { kind = "sparse", group = "user" }
segment = { kind = "sparse", group = "user" }
history = { kind = "sequence", group = "history" }
article = { kind = "sparse" }
"""

TRAIN = """format_version = 1

[data]
label = "clicked"

[train]
batch_size = 512
seed = 1

[model]
bottom_mlp = [32, 16]
top_mlp = [32, 1]

[embedding]
dim = 16
rows = 20000
ids = "hashed"
"""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000, help="samples of `features` (default 1000000)")
    parser.add_argument("--features", default="item_00,user_00,sequence_00", help="features of rm1 to add, one by one")
    parser.add_argument("--label-samples", type=int, default=1_000_000, help="samples of `labels` (default 1000000)")
    parser.add_argument("--forget-samples", type=int, default=10_000_000, help="samples of `forget` (default 10000000)")
    parser.add_argument("--users", type=int, default=1000, help="users to forget (default 1000)")
    parser.add_argument("--hour-samples", type=int, default=20_000, help="samples of an hour of `follow` (default 20000)")
    parser.add_argument("--hours", type=int, default=48, help="hours of `follow` (default 48)")
    parser.add_argument("--kills", type=int, default=10, help="kills of `follow` (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of kills")
    parser.add_argument("--memory-limit", default="4GiB", help="of builds (default 4GiB)")
    return parse_with_common(parser, SECTIONS)


def column_bytes(dataset):
    """Returns the compressed bytes of each column of a dataset that was built once."""
    import pyarrow.parquet

    sizes = {}
    for path in data_files(dataset):
        metadata = pyarrow.parquet.read_metadata(path)
        for group in range(metadata.num_row_groups):
            columns = metadata.row_group(group)
            for i in range(columns.num_columns):
                column = columns.column(i)
                name = re.sub(r"\.list\..*", "", column.path_in_schema)
                sizes[name] = sizes.get(name, 0) + column.total_compressed_size
    return sizes


def bytes_of(sizes, names):
    """Returns the bytes of some features or labels, with the lengths of their windows."""
    return sum(size for column, size in sizes.items() if column in names or column.removesuffix(".length") in names)


def folder_bytes(folder):
    return sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())


def linked(dataset, copy):
    """Makes a copy of a dataset whose data files are those of the dataset."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(dataset, copy, copy_function=os.link)
    return copy


def ratio(value, limit, at_least=False):
    """Returns a ratio as a text, with its limit."""
    return f"{value:.3f} ({'>=' if at_least else '<='} {limit})"


def check(bench, holds, message):
    if not holds:
        bench.failed = True
        print(f"  wrong: {message}")


def without_features(config, names, target):
    """Writes a configuration without some features. The samples get a key."""
    text = config.read_text()
    for name in names:
        text, count = re.subn(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
        if count != 1:
            raise Failed(f"`{config}` has no feature `{name}` in a line of its own")
    if "\nkey = [\"request_id\"]\n" not in text:
        text = text.replace("[samples]\n", "[samples]\nkey = [\"request_id\"]\n")
    target.write_text(text)
    return target


def measure_features(bench):
    arguments = bench.arguments
    logs = bench.log(arguments.samples)
    rows = []
    whole_config = without_features(logs / "dataset.toml", [], logs / "whole.toml")
    whole, base, changed = (bench.work / name for name in ("whole", "base", "changed"))
    limits = ["--memory-limit", arguments.memory_limit, "--threads", arguments.threads]

    def timed(*words):
        return [bench.run("onefold-ingest", *words, *limits) for _ in range(arguments.runs)]

    build_seconds = []
    for _ in range(arguments.runs):
        shutil.rmtree(whole, ignore_errors=True)
        build_seconds.append(bench.run("onefold-ingest", "build", whole_config, "--out", whole, *limits)["wall_seconds"])
    build = statistics.median(build_seconds)
    sizes = column_bytes(whole)
    figures = {"samples": arguments.samples, "build_seconds": build}
    for name in arguments.features.split(","):
        shutil.rmtree(base, ignore_errors=True)
        bench.run("onefold-ingest", "build", without_features(logs / "dataset.toml", [name], logs / "base.toml"), "--out", base, *limits)
        seconds = []
        for _ in range(arguments.runs):
            linked(base, changed)
            added = bench.run("onefold-ingest", "add-features", whole_config, "--out", changed, *limits)
            seconds.append(added["wall_seconds"])
        own, written = bytes_of(sizes, {name}), added["bytes_written"]
        digests = [bench.run("onefold-read", "digest", dataset, "--threads", arguments.threads)["digest"] for dataset in (whole, changed)]
        check(bench, digests[0] == digests[1], f"with `{name}` added, the digest is {digests[1]} and not {digests[0]}")
        reading = {whole: [], changed: []}
        for _ in range(arguments.runs):
            for dataset, rates in reading.items():
                rates.append(bench.run("onefold-read", "bench", dataset, "--threads", arguments.threads)["samples_per_second"])
        relative = statistics.median(reading[changed]) / statistics.median(reading[whole])
        took = statistics.median(seconds)
        figures[name] = {"column_bytes": own, "bytes_written": written, "seconds": took, "reading": relative}
        rows.append([f"add-features {name}", f"{written:,}", ratio(written / own, 1.1), f"{took:.2f}",
                     ratio(took / build, 0.15), ratio(relative, 0.95, at_least=True)])
        found = bench.attempt(f"Lance, {name}", lambda name=name: lance_adds(bench, logs, name))
        for how, result in (found or {}).items():
            figures[name][f"lance {how}"] = result
            rows.append([f"Lance, {how} {name}", f"{result['bytes_written']:,}", f"{result['bytes_written'] / result['column_bytes']:.3f}",
                         f"{result['seconds']:.2f}", f"{result['seconds'] / result['write_seconds']:.3f}", ""])
    bench.figures["features"] = figures
    print_table(f"A feature added to {arguments.samples:,} samples of rm1; a build takes {build:.1f} s (Lance: write_dataset)",
                ["", "bytes written", "of own columns", "seconds", "of a build", "reading"], rows)
    for dataset in (whole, base, changed):
        shutil.rmtree(dataset, ignore_errors=True)


def lance_adds(bench, logs, name):
    """Adds a column to a Lance dataset of the feature log's other columns, in two ways. Returns the figures of each."""
    import lance
    import pyarrow
    import pyarrow.parquet

    files = [pyarrow.parquet.ParquetFile(path) for path in sorted((logs / "features").glob("*.parquet"))]

    def reader(columns):
        schema = pyarrow.schema([files[0].schema_arrow.field(column) for column in columns])
        batches = (batch for file in files for batch in file.iter_batches(8192, columns=columns))
        return pyarrow.RecordBatchReader.from_batches(schema, (batch.select(columns) for batch in batches))

    def write(columns, out):
        shutil.rmtree(out, ignore_errors=True)
        started = time.monotonic()
        lance.write_dataset(reader(columns), str(out))
        return time.monotonic() - started

    out, alone = bench.work / "lance", bench.work / "lance-alone"
    others = [column for column in files[0].schema_arrow.names if column != name]
    write([name], alone)
    own = sum(path.stat().st_size for path in (alone / "data").rglob("*.lance"))
    figures = {}
    for how in ("add_columns", "merge"):
        seconds, writes = [], []
        for _ in range(bench.arguments.runs):
            writes.append(write(others, out))
            before, dataset = folder_bytes(out), lance.dataset(str(out))
            started = time.monotonic()
            if how == "merge":
                dataset.merge(reader(["request_id", name]), left_on="request_id")
            else:
                dataset.add_columns(reader([name]))
            seconds.append(time.monotonic() - started)
            written = folder_bytes(out) - before
        figures[how] = {"bytes_written": written, "column_bytes": own, "seconds": statistics.median(seconds), "write_seconds": statistics.median(writes)}
    for folder in (out, alone):
        shutil.rmtree(folder)
    return figures


class Hours:
    """Generates logs hour by hour: sessions of a user, with the articles that the user read before as a history."""

    def __init__(self, folder, samples_of_hour, seed):
        import numpy

        self.numpy, self.folder, self.samples = numpy, folder, samples_of_hour
        self.generator = numpy.random.default_rng(seed)
        self.sessions = max(1, -(-samples_of_hour // SESSION))
        self.users = 20 * self.sessions
        self.read = numpy.zeros(self.users, dtype=numpy.int64)
        self.events, self.first = [], 0
        (folder / "requests").mkdir(parents=True, exist_ok=True)

    def articles(self, users, places):
        """Returns the article that a user read at each place of the user's history."""
        mixed = (users * 1_000_003 + places) * 0x5851_F42D + 11
        # A square prefers articles with low numbers.
        uniform = (mixed % 1_000_003) / 1_000_003
        return (uniform * uniform * ARTICLES).astype(self.numpy.int64)

    def write(self, hour):
        """Writes the requests of an hour, and adds their events."""
        import pyarrow
        import pyarrow.parquet

        numpy, generator = self.numpy, self.generator
        users = generator.choice(self.users, self.sessions, replace=False)
        starts = generator.integers(0, 3000, self.sessions)
        users, starts = numpy.repeat(users, SESSION)[: self.samples], numpy.repeat(starts, SESSION)[: self.samples]
        within = numpy.arange(self.samples) % SESSION
        places = self.read[users] + within
        self.read[users] += SESSION
        offsets = 3600 * hour + starts + 50 * within
        order = numpy.argsort(offsets, kind="stable")
        users, places, offsets = users[order], places[order], offsets[order]
        requests = numpy.arange(self.first, self.first + self.samples)
        self.first += self.samples
        history = self.articles(users[:, None], places[:, None] - numpy.arange(HISTORY, 0, -1)[None, :])
        ends = pyarrow.array(numpy.arange(0, (self.samples + 1) * HISTORY, HISTORY, dtype=numpy.int32))
        times = numpy.datetime64(START.replace(tzinfo=None), "us") + offsets.astype("timedelta64[s]")
        columns = {
            "request": requests,
            "user": users,
            "time": pyarrow.array(times, pyarrow.timestamp("us", tz="UTC")),
            "age": (users % 60 + 18).astype(numpy.float32),
            "segment": users % 30,
            "history": pyarrow.ListArray.from_arrays(ends, pyarrow.array(history.reshape(-1))),
            "article": self.articles(users, places),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), self.folder / "requests" / f"{hour:06}.parquet", compression="zstd")
        # One of eleven requests is clicked: mostly at once, sometimes days later. A few have a second click, or a click
        # after the window.
        clicked = generator.random(self.samples) < 1 / 11
        for times_clicked, share in ((clicked, 1.0), (clicked, 0.1), (generator.random(self.samples) < 0.002, 0.0)):
            chosen = numpy.flatnonzero(times_clicked & (generator.random(self.samples) < (share or 1.0)))
            kinds = generator.random(len(chosen))
            delays = numpy.where(kinds < 0.7, generator.integers(1, 600, len(chosen)), generator.integers(600, 60 * 3600, len(chosen)))
            if share == 0.0:
                delays = generator.integers((WINDOW_HOURS + 4) * 3600, (WINDOW_HOURS + 20) * 3600, len(chosen))
            self.events.append(numpy.stack([requests[chosen], offsets[chosen], offsets[chosen] + delays], axis=1))

    def all_events(self):
        """Returns request, time of the request and time of the click, in seconds from the start, `[events, 3]`."""
        return self.numpy.concatenate(self.events)

    def write_events(self, chosen):
        import pyarrow
        import pyarrow.parquet

        times = self.numpy.datetime64(START.replace(tzinfo=None), "us") + chosen[:, 2].astype("timedelta64[s]")
        columns = {
            "request": chosen[:, 0],
            "event_time": pyarrow.array(times, pyarrow.timestamp("us", tz="UTC")),
            "kind": ["click"] * len(chosen),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), self.folder / "events.parquet")


def generate(bench, name, hours, samples, by):
    """Generates logs of some hours, and their configuration."""
    folder = bench.work / name
    shutil.rmtree(folder, ignore_errors=True)
    logs = Hours(folder, max(1, samples // hours), seed=1)
    for hour in range(hours):
        logs.write(hour)
    (folder / "dataset.toml").write_text(DATASET.replace("BY", by))
    return logs


def measure_labels(bench):
    arguments = bench.arguments
    logs = generate(bench, "labels", 24 * DAYS, arguments.label_samples, "day")
    config, (dataset, anew) = logs.folder / "dataset.toml", (bench.work / name for name in ("dataset", "anew"))
    limits = ["--memory-limit", arguments.memory_limit, "--threads", arguments.threads]
    events = logs.all_events()
    day = 24 * 3600
    # Each day is built when it is over.
    logs.write_events(events[events[:, 2] < (events[:, 1] // day + 1) * day])
    for folder in (dataset, anew):
        shutil.rmtree(folder, ignore_errors=True)
    bench.run("onefold-ingest", "build", config, "--out", dataset, *limits)
    logs.write_events(events)
    relabelled = bench.run("onefold-ingest", "relabel", config, "--out", dataset, *limits)
    built = bench.run("onefold-ingest", "build", config, "--out", anew, *limits)
    own = bytes_of(column_bytes(anew), {"clicked", "clicked_delay"})
    digests = [bench.run("onefold-read", "digest", folder, "--threads", arguments.threads)["digest"] for folder in (anew, dataset)]
    check(bench, digests[0] == digests[1], f"after `relabel`, the digest is {digests[1]} and not {digests[0]}")
    wrong = {}
    for hour in range(3 * 24, 4 * 24 + 1):
        wrong[hour] = wrong_labels(dataset, logs, events, hour)
    check(bench, not any(wrong.values()), f"labels that differ from pandas', by hour: {wrong}")
    written = relabelled["bytes_written"]
    bench.figures["labels"] = {
        "samples": relabelled["samples"], "bytes_written": written, "label_bytes": own, "seconds": relabelled["wall_seconds"],
        "build_seconds": built["wall_seconds"], "changed_by_day": relabelled["samples_changed_by_day"], "wrong": sum(wrong.values()),
    }
    print_table(
        f"`relabel` of {DAYS} days, {relabelled['samples']:,} samples",
        ["", "bytes", "of label columns", "seconds", "of a build", "labels changed, by days of delay", f"labels as of {len(wrong)} hours"],
        [["relabel", f"{written:,}", ratio(written / own, 1.2), f"{relabelled['wall_seconds']:.2f}",
          f"{relabelled['wall_seconds'] / built['wall_seconds']:.3f}",
          ", ".join(f"{of}: {count:,}" for of, count in relabelled["samples_changed_by_day"].items()),
          f"{sum(wrong.values())} differ from pandas"]],
    )
    for folder in (dataset, anew):
        shutil.rmtree(folder)


def wrong_labels(dataset, logs, events, hour):
    """Returns the number of samples whose labels as of an hour differ from those that pandas computes from the events."""
    import onefold
    import pandas
    import pyarrow

    as_of = START + datetime.timedelta(hours=hour)
    read = onefold.Dataset(dataset, keep=["request"], features=[], global_batch_size=8192, labels_as_of=as_of)
    found = pyarrow.table(read.to_arrow()).select(["request", "clicked", "clicked_delay"]).to_pandas().set_index("request").sort_index()
    log = pandas.DataFrame(events, columns=["request", "time", "event"])
    log = log[(log["event"] <= 3600 * hour) & (log["event"] - log["time"] <= 3600 * WINDOW_HOURS)]
    first = (log["event"] - log["time"]).groupby(log["request"]).min().reindex(range(logs.first))
    expected = pandas.DataFrame({"clicked": first.notna().astype("float32"), "clicked_delay": first.fillna(-1).astype("float32")})
    if len(found) != len(expected):
        return max(len(found), len(expected))
    return int((found.to_numpy() != expected.to_numpy()).any(axis=1).sum())


def measure_forget(bench):
    arguments = bench.arguments
    logs = generate(bench, "forget", 24 * DAYS, arguments.forget_samples, "day")
    logs.write_events(logs.all_events())
    config, (dataset, anew) = logs.folder / "dataset.toml", (bench.work / name for name in ("dataset", "anew"))
    limits = ["--memory-limit", arguments.memory_limit, "--threads", arguments.threads]
    for folder in (dataset, anew):
        shutil.rmtree(folder, ignore_errors=True)
    built = bench.run("onefold-ingest", "build", config, "--out", dataset, *limits)
    users = logs.numpy.flatnonzero(logs.read)
    chosen = random.Random(arguments.seed).sample(users.tolist(), min(arguments.users, len(users) // 2))
    listed = bench.work / "users.txt"
    listed.write_text("".join(f"{user}\n" for user in chosen))
    threads = ["--threads", arguments.threads]
    forgotten = bench.run("onefold-ingest", "forget", dataset, "--users", listed, "--purge", *threads)
    absent = bench.run("onefold-ingest", "verify", dataset, "--absent", listed, *threads)
    text = config.read_text().replace('source = "requests"', f'query = "SELECT * FROM requests WHERE user NOT IN ({", ".join(map(str, chosen))})"')
    anew_config = config.with_name("anew.toml")
    anew_config.write_text(text)
    bench.run("onefold-ingest", "build", anew_config, "--out", anew, *limits)
    digests = [bench.run("onefold-read", "digest", folder, *threads)["digest"] for folder in (anew, dataset)]
    check(bench, digests[0] == digests[1], f"after `forget`, the digest is {digests[1]} and not {digests[0]}")
    bench.figures["forget"] = {
        "samples": built["samples"], "users": len(chosen), "build_seconds": built["wall_seconds"], "dataset_bytes": built["bytes_on_disk"],
        "verify_seconds": absent["wall_seconds"], "peak_rss_bytes": forgotten["peak_rss_bytes"],
        **{key: forgotten[key] for key in ("samples_removed", "files_rewritten", "bytes_rewritten", "bytes_written", "wall_seconds")},
    }
    print_table(
        f"`forget --purge` of {len(chosen):,} users of {built['samples']:,} samples",
        ["", "seconds", "of a build", "samples removed", "bytes rewritten", "of the dataset", "peak memory", "verify --absent"],
        [["forget", f"{forgotten['wall_seconds']:.1f}", f"{forgotten['wall_seconds'] / built['wall_seconds']:.3f}",
          f"{forgotten['samples_removed']:,}", f"{forgotten['bytes_rewritten']:,}",
          f"{forgotten['bytes_rewritten'] / built['bytes_on_disk']:.3f}", f"{forgotten['peak_rss_bytes'] >> 20} MiB",
          f"{absent['wall_seconds']:.1f} s"]],
    )
    for folder in (dataset, anew):
        shutil.rmtree(folder)


class Trainer:
    """A trainer that follows a dataset, and that can be killed."""

    def __init__(self, bench, config, dataset, out):
        words = ["onefold-train", "follow", config, "--data", dataset, "--out", out, "--threads", bench.arguments.threads,
                 "--look-every", "100ms", "--export-every", 1, "--json", "--quiet"]
        self.command = [str(bench.binaries / words[0]), *map(str, words[1:])]
        self.out, self.process = out, None

    def start(self, *more):
        self.process = subprocess.Popen([*self.command, *map(str, more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self):
        """Waits for the end of the process, and returns its summary."""
        output, errors = self.process.communicate()
        if self.process.returncode != 0:
            raise Failed(f"follow: {errors.strip().splitlines()[0] if errors.strip() else self.process.returncode}")
        return json.loads(output.strip().splitlines()[-1])

    def lines(self):
        """Returns the lines about partitions."""
        path = self.out / "follow.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "partition" in line]

    def wait_for(self, parts):
        """Waits until the number of lines is `parts`; raises an error if the process ends."""
        while len(self.lines()) < parts:
            if self.process.poll() is not None:
                self.end()
                raise Failed(f"follow ended after {len(self.lines())} partitions")
            time.sleep(0.02)


def measure_follow(bench):
    arguments = bench.arguments
    chance = random.Random(arguments.seed)
    logs = generate(bench, "follow", arguments.hours, arguments.hour_samples * arguments.hours, "hour")
    logs.write_events(logs.all_events())
    config, train = logs.folder / "dataset.toml", logs.folder / "train.toml"
    train.write_text(TRAIN)
    dataset, killed, whole = (bench.work / name for name in ("dataset", "killed", "undisturbed"))
    for folder in (dataset, killed, whole):
        shutil.rmtree(folder, ignore_errors=True)
    keys = [f"date={START + datetime.timedelta(hours=hour):%Y-%m-%d}/hour={hour % 24:02}" for hour in range(arguments.hours)]

    def append(key):
        words = ["append", config, "--out", dataset, "--partition", key.replace("/", ","), "--memory-limit", arguments.memory_limit]
        return bench.run("onefold-ingest", *words, "--threads", arguments.threads)["wall_seconds"]

    appended, usual = [append(keys[0])], 2.0
    trainer = Trainer(bench, train, dataset, killed)
    trainer.start("--stop-after", arguments.hours)
    trainer.wait_for(1)
    kills_of = chance.sample(range(1, arguments.hours), min(arguments.kills, arguments.hours - 1))
    kills, ended = 0, False
    for hour in range(1, arguments.hours):
        appended.append(append(keys[hour]))
        if hour in kills_of:
            time.sleep(chance.random() * usual)
            kills += trainer.process.poll() is None
            trainer.kill()
            trainer.start("--stop-after", arguments.hours)
        started = time.monotonic()
        if hour + 1 < arguments.hours:
            trainer.wait_for(hour + 1)
            # A kill comes at any moment from the commit to the next hour.
            usual = usual if hour in kills_of else time.monotonic() - started
    disturbed = trainer.end()
    undisturbed = Trainer(bench, train, dataset, whole)
    undisturbed.start("--stop-after", arguments.hours)
    summary = undisturbed.end()
    lines, expected = trainer.lines(), undisturbed.lines()
    check(bench, [line["partition"] for line in lines] == keys, f"the partitions are {[line['partition'] for line in lines]}")
    figures = ("partition", "step", "training_loss", "loss", "ne", "auc", "calibration")
    differ = [a["partition"] for a, b in zip(lines, expected) if any(not same(a[key], b[key]) for key in figures)]
    check(bench, not differ and len(expected) == len(keys), f"figures of {differ} differ")
    steps = [(out / "metrics.jsonl").read_bytes() for out in (killed, whole)]
    check(bench, steps[0] == steps[1], "the losses of the steps differ")
    fresh = sorted(seconds + line["commit_to_export_seconds"] for seconds, line in zip(appended, lines) if line.get("export"))
    # Figures of the hours without a kill.
    calm = sorted(seconds + line["commit_to_export_seconds"] for hour, (seconds, line) in enumerate(zip(appended, lines))
                  if line.get("export") and hour not in kills_of)
    bench.figures["follow"] = {
        "hours": arguments.hours, "hour_samples": logs.samples, "kills": kills, "losses_equal": steps[0] == steps[1],
        "freshness_p50": statistics.median(fresh), "freshness_max": fresh[-1], "freshness_p50_without_kill": statistics.median(calm),
        "steps": summary["steps"], "ended": [disturbed["ended"], summary["ended"]],
    }
    print_table(
        f"`follow` over {arguments.hours} hours of {logs.samples:,} samples",
        ["", "kills", "partitions, each once", "losses", "freshness p50", "of hours without a kill", "largest"],
        [["follow", kills, len(lines), "equal" if steps[0] == steps[1] else "differ", f"{statistics.median(fresh):.1f} s (<= 60)",
          f"{statistics.median(calm):.1f} s", f"{fresh[-1]:.1f} s"]],
    )
    shutil.rmtree(dataset)


def same(a, b):
    """Returns whether two figures are equal, except for the rounding of JSON in a checkpoint."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-12 * abs(b))


def main():
    bench = Bench(parse_arguments())
    measures = {"features": measure_features, "labels": measure_labels, "forget": measure_forget, "follow": measure_follow}
    for section in bench.arguments.only.split(","):
        bench.attempt(section, lambda section=section: measures[section](bench))
    print(f"\n{json.dumps(bench.figures)}")
    raise SystemExit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
