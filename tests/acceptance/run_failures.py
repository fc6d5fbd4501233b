#!/usr/bin/env python3
"""Lets training runs fail at random moments, and checks that nothing they wrote is lost.

    tests/acceptance/run_failures.py [--bin target/release] [--work FOLDER] [--failures 30] [--ranks 1,3] [--seed 1]

Trains a small model on each number of ranks without a failure. Then a run of the same configuration fails, once per
turn: a rank is killed or crashes, a second signal comes, the disk is full, or memory or files are used up. After each
failure there is a checkpoint as new as the newest one before it, or newer, and `--resume` starts with the newest one and
ends with the losses and the model of the undisturbed run. The numbers of failures and ranks, and the seed, are also
those of the environment variables FAILURES, RANKS and SEED. In tests of `trainer/src/train`, runs panic.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import resource
import shlex
import signal
import subprocess
import tempfile
import time

from environment import number_of

CONFIG = """\
format_version = 1

[data]
label = "label"
streams = 12

[train]
batch_size = 48
epochs = 3

[model]
bottom_mlp = [16, 16]
top_mlp = [16, 1]

[embedding]
dim = 16
rows = 500
ids = "hashed"

[optimizer.tables]
kind = "adagrad"
learning_rate = 0.01
eps = 0.1

[checkpoint]
every_steps = 5
keep = 3
full_every = 3
"""
# Every run ends within this time, also on a busy machine.
LIMIT_SECONDS = 600.0
# Messages that blame the program for the machine's failure.
BLAME = ["panicked", "internal error", "bug in Onefold"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--work", type=pathlib.Path, help="an empty folder, which remains; by default a temporary one")
    parser.add_argument("--failures", type=int, default=number_of("FAILURES", 30))
    parser.add_argument("--ranks", default=os.environ.get("RANKS", "1,3"), help="numbers of ranks, in turn")
    parser.add_argument("--seed", type=int, default=number_of("SEED", 1))
    return parser.parse_args()


def children(process):
    """Returns the running child processes of a process, in ascending order."""
    listed = pathlib.Path(f"/proc/{process}/task/{process}/children")
    with contextlib.suppress(OSError):
        return sorted(int(child) for child in listed.read_text().split())
    return []


def checkpoints(run):
    """Returns the steps of the complete checkpoints of a run, in ascending order."""
    return sorted(int(file.parent.name.removeprefix("step-")) for file in run.glob("checkpoints/step-*/checkpoint.json"))


def kill(ranks, _):
    os.kill(random.choice(ranks), signal.SIGKILL)


def crash(ranks, _):
    """Ends a rank as libraries do that find an error of their own, and as Rust does when an allocation fails."""
    os.kill(random.choice(ranks), signal.SIGABRT)


def terminate_twice(_, job):
    job.send_signal(signal.SIGTERM)
    time.sleep(random.choice([0.0, 0.002, 0.05]))
    job.send_signal(random.choice([signal.SIGTERM, signal.SIGINT]))


def fill_disk(ranks, _):
    """Lets a rank, or all of them, write no file beyond a size; a larger write fails, as on a full disk."""
    size = random.choice([0, 4096, 100_000])
    for rank in random.choice([ranks, [random.choice(ranks)]]):
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (size, size))


def exhaust_memory(ranks, _):
    """Gives a rank no further address space, so allocations and new threads fail."""
    rank = random.choice(ranks)
    pages = int(pathlib.Path(f"/proc/{rank}/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(rank, resource.RLIMIT_AS, (limit, limit))


def exhaust_files(ranks, _):
    """Lets a rank open no further file."""
    resource.prlimit(random.choice(ranks), resource.RLIMIT_NOFILE, (3, 3))


FAILURES = [kill, crash, terminate_twice, fill_disk, exhaust_memory, exhaust_files]


class Runs:
    """Runs of one configuration on one dataset."""

    def __init__(self, options, folder):
        self.programs, self.folder, self.job = options.bin.resolve(), folder, None
        (folder / "train.toml").write_text(CONFIG)
        self.do("onefold-data", f"generate --workload rm3 --samples 3072 --seed 7 --out logs")
        self.do("onefold-ingest", "build logs/dataset.toml --out dataset --buckets 12")

    def start(self, program, line):
        self.job = subprocess.Popen(
            [str(self.programs / program), *shlex.split(line)],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # SIGXFSZ remains ignored, as Python has it. A write that is too large fails, as on a full disk.
            restore_signals=False,
        )
        return self.job

    def end(self):
        """Ends the last process, if an assertion left it running. No rank outlives its launcher."""
        if self.job and self.job.poll() is None:
            self.job.kill()
            self.job.communicate()

    def do(self, program, line):
        """Runs a command, which must succeed, and returns the object that it prints."""
        job = self.start(program, f"{line} --json")
        printed, errors = job.communicate(timeout=LIMIT_SECONDS)
        assert job.returncode == 0, f"{program} {line}: status {job.returncode}\n{errors}"
        return json.loads(printed.splitlines()[-1])

    def training(self, ranks, run, more=""):
        line = f"run train.toml --data dataset --out {run} --threads 1 --timeout 60 -q {more}"
        return line if ranks == 1 else f"launch --ranks {ranks} -- {line}"

    def fail(self, ranks, run, fail, steps):
        """Starts a run, and lets it fail after a number of log lines, or while it begins. Returns the steps of the
        checkpoints that existed before, the exit status and the errors."""
        job = self.start("onefold-train", self.training(ranks, run))
        log, until = self.folder / run / "metrics.jsonl", time.monotonic() + LIMIT_SECONDS
        while steps and job.poll() is None and (not log.exists() or log.read_text().count('"step"') < steps):
            assert time.monotonic() < until, "the run does not begin"
            time.sleep(0.001)
        # The moment within a step, or before the first one, is random, too.
        time.sleep(random.uniform(0.0, 0.01 if steps else 0.5))
        before = checkpoints(self.folder / run)
        there = [job.pid] if ranks == 1 else children(job.pid)
        # A run that has ended cannot fail any more.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if job.poll() is None and len(there) == ranks:
                fail(there, job)
        _, errors = job.communicate(timeout=LIMIT_SECONDS)
        return before, job.returncode, errors

    def check(self, ranks, run, fail, whole):
        """Lets a run fail, resumes it, and compares it with the undisturbed one."""
        # Later, a run of this size needs no more memory.
        steps = 0 if fail is exhaust_memory else random.randrange(1, len(whole["losses"]))
        before, status, errors = self.fail(ranks, run, fail, steps)
        after = checkpoints(self.folder / run)
        told = " | ".join(line for line in errors.splitlines() if line.startswith("error:"))
        found = f"checkpoints {before} then {after}, status {status}"
        print(f"{run}: {fail.__name__} on {ranks} ranks, {found}: {told}", flush=True)
        blamed = [words for words in BLAME if words in errors]
        assert not blamed, errors
        assert not before or after and after[-1] >= before[-1], "the newest checkpoint is lost"
        resumed = self.do("onefold-train", self.training(ranks, run, "--resume"))
        begun = resumed.get("resumed_from_step")
        assert begun == (after[-1] if after else None), f"resumed from {begun}"
        assert resumed["losses"] == whole["losses"], "the losses differ from those of the undisturbed run"
        models = [(self.folder / name / "model.safetensors").read_bytes() for name in (run, f"whole-{ranks}")]
        assert models[0] == models[1], "the model differs from that of the undisturbed run"
        return status != 0


def main():
    options = arguments()
    random.seed(options.seed)
    print(f"{options.failures} failures with SEED={options.seed}", flush=True)
    numbers = [int(ranks) for ranks in options.ranks.split(",")]
    with contextlib.ExitStack() as stack:
        folder = options.work or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(options, folder)
        stack.callback(runs.end)
        wholes = {ranks: runs.do("onefold-train", runs.training(ranks, f"whole-{ranks}")) for ranks in numbers}
        failed = 0
        for turn in range(options.failures):
            ranks = numbers[turn % len(numbers)]
            fail = FAILURES[turn // len(numbers) % len(FAILURES)]
            failed += runs.check(ranks, f"run-{turn}", fail, wholes[ranks])
    print(f"{failed} of {options.failures} runs ended with an error, and all were resumed without a difference")


if __name__ == "__main__":
    main()
