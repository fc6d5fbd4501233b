#!/usr/bin/env python3
"""Checks that a job can be resumed after any of its ranks was killed at any time.

Trains on the first number of `--ranks` without interruption. Then trains again, and repeatedly kills a rank with SIGKILL
at a random moment; each time, the job is resumed with the next number of ranks. Prints how long the other ranks continued,
the error that they reported, and the difference of the logged losses from those of the uninterrupted run. With a single
number of ranks, losses and the model must be bit-identical. With `--stop`, the first signal is SIGSTOP, after which a rank hangs.

    trainer/benches/rank_kills.py --config rm3/train.toml --data rm3-dataset --work kills [--bin target/release] [--steps 1500]
        [--kills 20] [--ranks 2,3,4] [--within SECONDS] [--stop] [--seed 1] [--set tables.eps=1e-1]
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import time

from parity import configured, parser_of

LIMIT_SECONDS = 30.0


def arguments():
    parser = parser_of(__doc__, data="its dataset")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks, in turn")
    parser.add_argument("--within", type=float, default=6.0, help="a rank dies within this time after its start, in seconds")
    parser.add_argument("--stop", action="store_true", help="stop a rank before the others are killed")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def start(options, config, out, ranks, *more):
    command = [options.bin / "onefold-train", "launch", "--ranks", ranks, "--", "run", config, "--data", options.data,
               "--out", out, "--max-steps", options.steps, "--threads", 1, "-q", *more]
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def running(parent):
    """Returns the running ranks of a launcher, in ascending order."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def interrupted(options, config, out, ranks, sent, seconds):
    """Sends a signal to a rank after `seconds`, and prints the outcome. Returns whether the job had ended before."""
    job = start(options, config, out, ranks, "--resume")
    while len(running(job.pid)) < ranks and job.poll() is None:
        pass
    time.sleep(seconds)
    ranks_there = running(job.pid)
    if len(ranks_there) < ranks:
        assert job.wait() == 0, job.stderr.read()
        return True
    rank = random.randrange(len(ranks_there))
    os.kill(ranks_there[rank], sent)
    killed = time.monotonic()
    while set(running(job.pid)) - {ranks_there[rank]} and time.monotonic() < killed + 2 * LIMIT_SECONDS:
        time.sleep(0.05)
    took = time.monotonic() - killed
    # The launcher waits before it kills a rank that hangs.
    _, text = job.communicate(timeout=2 * LIMIT_SECONDS)
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    print(f"{sent.name} of rank {rank} of {ranks} after {seconds:.1f} s: the others ended {took:.1f} s later with status {job.returncode}; "
          + " | ".join(errors), flush=True)
    assert job.returncode == 1 and len(errors) == 1, text
    assert took < LIMIT_SECONDS, f"the others went on for {took:.1f} s"
    left = [pid for pid in ranks_there if pathlib.Path(f"/proc/{pid}").exists()]
    assert not left, f"ranks outlive their job: {left}"
    return False


def logged(out):
    """Returns the training metrics in `metrics.jsonl` by step, without times."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    random.seed(options.seed)
    text = configured(options, streams=12)
    text += "\n[checkpoint]\nevery_steps = 20\nkeep = 2\nfull_every = 4\n"
    config = options.work / "train.toml"
    config.write_text(text)
    numbers = [int(ranks) for ranks in options.ranks.split(",")]
    whole, run = options.work / "whole", options.work / "run"
    job = start(options, config, whole, numbers[0], "--overwrite")
    _, errors = job.communicate()
    assert job.returncode == 0, errors
    assert not run.exists(), f"remove {run} first"
    turns = [signal.SIGSTOP] * options.stop + [signal.SIGKILL] * options.kills
    for turn, sent in enumerate(turns):
        seconds = 2.0 if sent == signal.SIGSTOP else random.uniform(0.0, options.within)
        if interrupted(options, config, run, numbers[turn % len(numbers)], sent, seconds):
            raise SystemExit(f"the job had ended after {turn} signals: give more --steps, or fewer seconds --within")
    job = start(options, config, run, numbers[len(turns) % len(numbers)], "--resume")
    _, errors = job.communicate()
    assert job.returncode == 0, errors
    expected, found = logged(whole), logged(run)
    assert expected.keys() == found.keys(), "other steps are logged"
    largest = max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())
    same = (whole / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    print(f"{len(expected)} losses of {options.steps} steps differ by at most {largest:.1e}; the models are {'the same' if same else 'not the same'}")
    if len(numbers) == 1:
        assert largest == 0.0 and same


if __name__ == "__main__":
    main()
