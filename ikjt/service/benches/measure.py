#!/usr/bin/env python3
"""Measures the preprocessing service on this machine; all commands must be built (`make build`).

    measure.py speed --work W [--samples N]     one job through the service against the local reader; bytes by sample
    measure.py shared --work W [--samples N]    processor time of workers for one job, and for two equal ones
    measure.py overlap --work W [--samples N]   processor time of workers for four jobs of other features and splits
    measure.py digests --work W                 digests through the service against the local reader's, in many ways
    measure.py kills --work W [--kills N]       digests while workers and the master are killed or stopped at random

W is a folder for the dataset, which is made once.
"""

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BINARIES = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
STEPS = """format_version = 1
[[step]]
op = "sigrid_hash"
inputs = ["*"]
max = 200_000
[[step]]
op = "firstx"
inputs = ["*"]
count = 50
"""


def run(*arguments):
    """Runs a command, and returns the JSON object that it prints."""
    command = [BINARIES / arguments[0], *map(str, arguments[1:]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def dataset(work, samples, buckets=None, parts=None):
    """Returns a folded dataset with rm1's proportions, divided into `parts` partitions by session, and writes a
    pipeline."""
    name = "-".join(str(part) for part in [samples, buckets, parts] if part)
    options = ["--buckets", buckets] if buckets else []
    data, logs = work / f"rm1-{name}", work / f"logs-{name}"
    if not data.exists():
        run("onefold-data", "generate", "--workload", "rm1", "--samples", samples, "--seed", 1, "--out", logs)
        if parts:
            config = (logs / "dataset.toml").read_text()
            config = config.replace("SELECT f.*,", f"SELECT f.*, f.session_id % {parts} AS part,")
            (logs / "dataset.toml").write_text(config.replace('by = "hour"', 'columns = ["part"]'))
        run("onefold-ingest", "build", logs / "dataset.toml", "--layout", "folded", "--out", data, *options)
    (work / "steps.toml").write_text(STEPS)
    return data


class Service:
    """A master and workers, which end with this object."""

    def __init__(self, workers, threads, memory):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.worker_options = ["--threads", threads, "--memory-limit", memory]
        self.master, self.workers = None, []
        self.start_master()
        for _ in range(workers):
            self.start_worker()
        while len(self.status()["workers"]) < workers:
            time.sleep(0.1)

    def spawn(self, *arguments):
        command = [BINARIES / "onefold-serve", *map(str, arguments), "--quiet"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start_master(self):
        self.master = self.spawn("master", "--listen", self.address)
        host, port = self.address.split(":")
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)

    def start_worker(self):
        self.workers.append(self.spawn("worker", "--master", self.address, *self.worker_options))

    def status(self):
        return run("onefold-serve", "status", "--master", self.address)

    def figure(self, name):
        """Returns the sum of a figure over the workers, after their next report."""
        time.sleep(1)
        return sum(worker[name] for worker in self.status()["workers"])

    def url(self, data):
        return f"grpc://{self.address}/{data.resolve()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.workers, self.master]:
            process.kill()
            process.wait()


def bench(location, work, dedupe, *options):
    steps = work / "steps.toml"
    batches = ["--batch-size", 2048, "--dedupe", dedupe, "--preprocess", steps]
    return run("onefold-read", "bench", location, *batches, *options)


def speed(work, samples, repeats=5):
    data = dataset(work, samples)
    for dedupe in ["off", "exact", "window"]:
        ratios, bytes_per_sample = [], 0.0
        with Service(1, os.cpu_count(), "512MiB") as service:
            # The first job also measures clearing of the worker's memory by the kernel, which happens only once.
            for number in range(repeats + 1):
                # Each repetition reads another job, which cannot reuse results of earlier ones.
                table = ["--table-rows", f"user_{number:02}=200000"]
                local = bench(data, work, dedupe, *table)
                before = service.figure("bytes_sent")
                served = bench(service.url(data), work, dedupe, *table)
                bytes_per_sample = (service.figure("bytes_sent") - before) / samples
                if number > 0:
                    ratios.append(served["samples_per_second"] / local["samples_per_second"])
        print(
            f"{dedupe}: {statistics.median(ratios):.2f} of the local reader ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{bytes_per_sample:,.0f} bytes a sample"
        )


def processor_time(urls, memory="512MiB", first=None):
    """Returns the worker's processor time while it serves jobs at the same time. Each job is given by its options.

    If `first` is given, the worker serves this job before, so that the kernel has already cleared its memory.
    """
    with Service(1, os.cpu_count(), memory) as service:
        if first is not None:
            run("onefold-read", "bench", service.url(first[0]), *first[1])
        before = service.figure("cpu_seconds")
        lines = [[BINARIES / "onefold-read", "bench", service.url(data), *map(str, options)] for data, options in urls]
        readers = [subprocess.Popen(line, stdout=subprocess.DEVNULL) for line in lines]
        assert all([reader.wait() == 0 for reader in readers])
        return service.figure("cpu_seconds") - before


def shared(work, samples):
    data = dataset(work, samples)
    job = (data, ["--batch-size", 2048])
    one, two = processor_time([job]), processor_time([job, job])
    print(f"one job {one:.1f} s, two equal jobs {two:.1f} s of the worker's processor time: {two / one:.2f} x")
    with Service(1, os.cpu_count(), "3GiB") as service:
        epochs = [bench(service.url(data), work, "window")["samples_per_second"] for _ in range(3)]
    print(f"epochs one after the other: {', '.join(f'{rate:,.0f}' for rate in epochs)} samples/s")


def overlap(work, samples):
    data = dataset(work, samples, parts=5)
    names = [name for name in run("onefold-read", "head", data)["shown"][0]["sparse"]]
    # Each job leaves out one of four parts of the features.
    features = [",".join(name for i, name in enumerate(names) if i % 4 != job) for job in range(4)]
    every = [["--batch-size", 2048, "--features", features[job]] for job in range(4)]
    # A job of another dataset, which leaves nothing in the cache that these jobs could use.
    first = (dataset(work, samples), ["--batch-size", 2048])
    for what, few in [("all", lambda _: []), ("half", lambda job: ["--partitions", one_and_first(job + 1)])]:
        jobs = [(data, [*every[job], *few(job)]) for job in range(4)]
        alone = sum(processor_time([job], first=first) for job in jobs)
        together = processor_time(jobs, "1GiB", first=first)
        print(
            f"four jobs of three quarters of the features, which share {what} of their splits: {together:.1f} s of the "
            f"worker's processor time, {alone:.1f} s alone: {together / alone:.2f} x"
        )


def one_and_first(part):
    """Returns a filter for the parts 0 and `part` of five."""
    return ",".join(f"part!={other}" for other in range(1, 5) if other != part)


def digest(location, options):
    """Starts a process that prints the digest of every step into a file, because a pipe could become full."""
    line = [BINARIES / "onefold-read", "digest", location, "--by-step", "--json", *map(str, options)]
    out = tempfile.TemporaryFile("w+")
    return subprocess.Popen(line, stdout=out), out


def digests_of(reader):
    """Returns the digests that a process has printed, or `None` if it failed."""
    process, out = reader
    with out:
        failed = process.wait(timeout=400)
        out.seek(0)
        return None if failed else json.loads(out.read().splitlines()[-1])["step_digests"]


def digests(work):
    data = dataset(work, 60_000, buckets=64)
    pipeline = ["--preprocess", work / "steps.toml"]
    ways = itertools.product(["off", "exact", "window"], [[], ["--shuffle", 3]], [[], pipeline], [1, 2, 4])
    jobs = []
    for dedupe, shuffle, steps, ranks in ways:
        options = ["--global-batch-size", 512, "--dedupe", dedupe, *shuffle, *steps]
        jobs.append([[*options, "--rank", f"{rank}/{ranks}"] for rank in range(ranks)])

    def read(location):
        """Yields the digests of all jobs. The ranks of a job read at the same time, as they do in training."""
        for ranks in jobs:
            for reader in [digest(location, options) for options in ranks]:
                yield digests_of(reader)

    expected = list(read(data))
    assert all(expected)
    equal = steps = reads = 0
    for workers in [1, 2, 4]:
        with Service(workers, 1, "512MiB") as service:
            for options, found, wanted in zip(itertools.chain(*jobs), read(service.url(data)), expected):
                reads, equal, steps = reads + 1, equal + (found == wanted), steps + len(wanted)
                if found != wanted:
                    print(f"not equal with {workers} workers: {' '.join(map(str, options))}")
    print(f"{equal} of {reads} reads gave the digests of the local reader, {steps:,} steps in all")


def restart_master(service):
    service.master.kill()
    service.master.wait()
    service.start_master()


def replace_worker(service):
    worker = service.workers.pop(0)
    worker.kill()
    worker.wait()
    service.start_worker()


def stop(process, draw):
    process.send_signal(signal.SIGSTOP)
    time.sleep(draw.uniform(0.5, 3.0))
    process.send_signal(signal.SIGCONT)


def kills(work, count):
    data = dataset(work, 60_000, buckets=64)
    of_all = ["--global-batch-size", 64]
    kinds = {
        "shuffled": [*of_all, "--shuffle", 3],
        "with a pipeline": [*of_all, "--dedupe", "window", "--preprocess", work / "steps.toml"],
        "rank 0 of 2": [*of_all, "--rank", "0/2"],
        "rank 1 of 2": [*of_all, "--rank", "1/2"],
    }
    faults = {
        "worker killed": lambda: replace_worker(service),
        "master killed": lambda: restart_master(service),
        "worker stopped": lambda: stop(service.workers[0], draw),
        "master stopped": lambda: stop(service.master, draw),
    }
    draw, happened = random.Random(7), dict.fromkeys(faults, 0)
    expected = {kind: digests_of(digest(data, options)) for kind, options in kinds.items()}
    right, reads = dict.fromkeys(kinds, 0), 0
    with Service(2, 1, "512MiB") as service:
        while sum(happened.values()) < count:
            readers = {kind: digest(service.url(data), options) for kind, options in kinds.items()}
            while any(process.poll() is None for process, _ in readers.values()) and sum(happened.values()) < count:
                time.sleep(draw.uniform(0.0, 0.4))
                fault = draw.choices(list(faults), [6, 3, 1, 1])[0]
                happened[fault] += 1
                faults[fault]()
            reads += 1
            for kind, reader in readers.items():
                right[kind] += digests_of(reader) == expected[kind]
    print(f"{happened} during {reads} reads of each kind; with the right digest of every step: {right}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=["speed", "shared", "overlap", "digests", "kills"])
    arguments.add_argument("--work", type=Path, required=True)
    arguments.add_argument("--samples", type=int, default=1_200_000)
    arguments.add_argument("--kills", type=int, default=100)
    given = arguments.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    match given.what:
        case "speed":
            speed(given.work, given.samples)
        case "shared":
            shared(given.work, given.samples)
        case "overlap":
            overlap(given.work, given.samples)
        case "digests":
            digests(given.work)
        case "kills":
            kills(given.work, given.kills)


if __name__ == "__main__":
    main()
