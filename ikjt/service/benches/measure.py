#!/usr/bin/env python3
"""Measures the preprocessing service on this machine; all commands must be built (`make build`).

    measure.py speed --work W [--samples N]     one job through the service against the local reader; bytes by sample
    measure.py shared --work W [--samples N]    processor time of workers for one job, and for two equal ones
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
    """The JSON object that a command prints."""
    command = [BINARIES / arguments[0], *map(str, arguments[1:]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def dataset(work, samples, buckets=None):
    """A folded dataset of rm1's proportions, and a pipeline beside it."""
    name = f"{samples}-{buckets}" if buckets else str(samples)
    options = ["--buckets", buckets] if buckets else []
    data, logs = work / f"rm1-{name}", work / f"logs-{name}"
    if not data.exists():
        run("onefold-data", "generate", "--workload", "rm1", "--samples", samples, "--seed", 1, "--out", logs)
        run("onefold-ingest", "build", logs / "dataset.toml", "--layout", "folded", "--out", data, *options)
    (work / "steps.toml").write_text(STEPS)
    return data


class Service:
    """A master and workers, which end with it."""

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

    def url(self, data):
        return f"grpc://{self.address}/{data.resolve()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.workers, self.master]:
            process.kill()
            process.wait()


def bench(location, work, dedupe):
    steps = work / "steps.toml"
    return run("onefold-read", "bench", location, "--batch-size", 2048, "--dedupe", dedupe, "--preprocess", steps)


def speed(work, samples, repeats=3):
    data = dataset(work, samples)
    for dedupe in ["off", "exact", "window"]:
        ratios, bytes_per_sample = [], 0.0
        for _ in range(repeats):
            local = bench(data, work, dedupe)
            with Service(1, os.cpu_count(), "512MiB") as service:
                served = bench(service.url(data), work, dedupe)
                time.sleep(1)
                bytes_per_sample = service.status()["workers"][0]["bytes_sent"] / samples
            ratios.append(served["samples_per_second"] / local["samples_per_second"])
        print(
            f"{dedupe}: {statistics.median(ratios):.2f} of the local reader ({min(ratios):.2f} to {max(ratios):.2f}), "
            f"{bytes_per_sample:,.0f} bytes a sample"
        )


def shared(work, samples):
    data = dataset(work, samples)
    used = {}
    for jobs in [1, 2]:
        with Service(1, os.cpu_count(), "512MiB") as service:
            line = [BINARIES / "onefold-read", "bench", service.url(data), "--batch-size", "2048"]
            readers = [subprocess.Popen(line, stdout=subprocess.DEVNULL) for _ in range(jobs)]
            assert all(reader.wait() == 0 for reader in readers)
            time.sleep(1)
            used[jobs] = service.status()["workers"][0]["cpu_seconds"]
    print(
        f"one job {used[1]:.1f} s, two equal jobs {used[2]:.1f} s of the worker's processor time: "
        f"{used[2] / used[1]:.2f} x"
    )
    with Service(1, os.cpu_count(), "3GiB") as service:
        epochs = [bench(service.url(data), work, "window")["samples_per_second"] for _ in range(3)]
    print(f"epochs one after the other: {', '.join(f'{rate:,.0f}' for rate in epochs)} samples/s")


def digest(location, options):
    """A process that prints the digest of every step, and the file that it prints into: a pipe could be full."""
    line = [BINARIES / "onefold-read", "digest", location, "--by-step", "--json", *map(str, options)]
    out = tempfile.TemporaryFile("w+")
    return subprocess.Popen(line, stdout=out), out


def digests_of(reader):
    """What a process that prints digests has found; `None` if it failed."""
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
        """The digests of all jobs, whose ranks read at the same time, as they do when they train."""
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
    arguments.add_argument("what", choices=["speed", "shared", "digests", "kills"])
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
        case "digests":
            digests(given.work)
        case "kills":
            kills(given.work, given.kills)


if __name__ == "__main__":
    main()
