#!/usr/bin/env python3
"""Measures builds on a cluster of processes of this machine.

    ingest/cluster/benches/measure.py speed --work W [--workload rm1] [--samples 1000000] [--executors 1] [--threads 2]
    ingest/cluster/benches/measure.py kills --work W [--samples 60000] [--kills 20] [--seed 1]

`speed` builds the same logs in one process and on executors, in turns, and compares the datasets' files. `kills` builds with two
executors, and kills one of them at a random moment of each build. Both print one JSON object.
"""

import argparse
import hashlib
import json
import pathlib
import random
import shutil
import socket
import statistics
import subprocess
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "kills"])
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for logs and datasets; logs that are there are kept")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--workload", default="rm1")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--executors", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory-limit", default="2GiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    speed = options.what == "speed"
    options.samples = options.samples or (1_000_000 if speed else 60_000)
    options.executors = options.executors or (1 if speed else 2)
    options.threads = options.threads or (2 if speed else 1)
    options.bin = options.bin.resolve()
    options.work = options.work.resolve()
    return options


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """A scheduler and executors. They are killed when the context ends."""

    def __init__(self, options):
        self.options, self.port, self.number = options, free_port(), 0
        self.log = open(options.work / "cluster.log", "w")
        self.scheduler = self.start("scheduler", "--port", self.port, "--executor-timeout", 8)
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.05)
        self.executors = []
        for _ in range(options.executors):
            self.start_executor()

    def start(self, *parts):
        return subprocess.Popen([str(part) for part in (self.options.bin / "onefold-cluster", *parts)], stdout=self.log, stderr=self.log)

    def start_executor(self):
        self.number += 1
        work = self.options.work / f"executor{self.number}"
        limits = ["--threads", self.options.threads, "--memory-limit", self.options.memory_limit]
        address = ["--scheduler", f"127.0.0.1:{self.port}", "--port", 0]
        self.executors.append(self.start("executor", *address, *limits, "--work-dir", work))

    def kill_executor(self, which):
        executor = self.executors.pop(which)
        executor.kill()
        executor.wait()

    def peak_bytes(self):
        """Returns the largest resident set of an executor, in bytes."""
        peaks = []
        for executor in self.executors:
            status = pathlib.Path(f"/proc/{executor.pid}/status").read_text()
            peaks += [1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
        return max(peaks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.executors, self.scheduler]:
            process.kill()
            process.wait()
        for number in range(1, self.number + 1):
            shutil.rmtree(self.options.work / f"executor{number}", ignore_errors=True)


def command(options, program, *parts):
    return [str(part) for part in (options.bin / program, *parts)]


def build(options, out, scheduler=None):
    shutil.rmtree(out, ignore_errors=True)
    common = ["build", options.work / "logs/dataset.toml", "--buckets", options.buckets, "--out", out, "--json"]
    if scheduler is None:
        return command(options, "onefold-ingest", *common, "--threads", options.threads, "--memory-limit", options.memory_limit)
    return command(options, "onefold-cluster", *common, "--scheduler", f"127.0.0.1:{scheduler}", "--partitions", options.partitions)


def timed(parts):
    started = time.monotonic()
    result = subprocess.run(parts, stdout=subprocess.PIPE, text=True, check=True)
    return time.monotonic() - started, json.loads(result.stdout.splitlines()[-1])


def contents(options, dataset):
    """Returns the names and checksums of a dataset's data files, after a vacuum."""
    subprocess.run(command(options, "onefold-ingest", "vacuum", dataset, "--older-than", "0s"), stdout=subprocess.DEVNULL, check=True)
    files = sorted(path for path in (dataset / "data").rglob("*") if path.is_file())
    name = lambda path: str(path.relative_to(dataset)).rpartition("-")[0]
    return [(name(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


def speed(options):
    here, there = options.work / "here", options.work / "there"
    seconds = {"here": [], "there": []}
    with Cluster(options) as cluster:
        for run in range(options.runs):
            took, summary = timed(build(options, here))
            seconds["here"].append(took)
            took, _ = timed(build(options, there, cluster.port))
            seconds["there"].append(took)
            if contents(options, here) != contents(options, there):
                raise SystemExit("the datasets differ")
        peak = cluster.peak_bytes()
    medians = {place: statistics.median(times) for place, times in seconds.items()}
    return {
        "samples": summary["samples"],
        "seconds": seconds,
        "samples_per_second": {place: round(summary["samples"] / took) for place, took in medians.items()},
        "speed_of_one_process": round(medians["here"] / medians["there"], 3),
        "executor_peak_bytes": peak,
    }


def kills(options):
    here, there = options.work / "here", options.work / "there"
    whole, _ = timed(build(options, here))
    expected = contents(options, here)
    draw, ended = random.Random(options.seed), {"whole": 0, "failed": 0, "wrong": 0}
    with Cluster(options) as cluster:
        whole, _ = timed(build(options, there, cluster.port))
        for _ in range(options.kills):
            client = subprocess.Popen(build(options, there, cluster.port), stdout=subprocess.DEVNULL, stderr=cluster.log)
            time.sleep(draw.uniform(0, whole))
            cluster.kill_executor(draw.randrange(len(cluster.executors)))
            cluster.start_executor()
            failed = client.wait(timeout=300) != 0
            visible = (there / "snapshots").exists()
            right = not visible if failed else contents(options, there) == expected
            ended["wrong" if not right else "failed" if failed else "whole"] += 1
    return {"build_seconds": whole, "builds": ended}


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "logs").exists():
        parts = ["generate", "--workload", options.workload, "--samples", options.samples, "--seed", 3, "--out", options.work / "logs"]
        subprocess.run(command(options, "onefold-data", *parts), stdout=subprocess.DEVNULL, check=True)
    print(json.dumps(speed(options) if options.what == "speed" else kills(options), indent=2))


if __name__ == "__main__":
    main()
