"""The memory of a process that reads a dataset."""

import os
import subprocess
import sys

LIMIT = 96 << 20

READS = """
import sys, onefold

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

onefold.configure(threads=2, memory_limit=int(sys.argv[2]))
before, batches = status("VmRSS"), 0
for batch in onefold.Dataset(sys.argv[1], global_batch_size=2048, dedupe="off"):
    batches = max(batches, batch.nbytes)
print(status("VmHWM") - before, batches)
"""


def test_memory_stays_within_the_limit(run, tmp_path):
    """With a limit of 1 GiB, the same epoch takes 138 MiB for batches and row groups that are read ahead."""
    logs, dataset = tmp_path / "logs", tmp_path / "dataset"
    run("onefold-data", "generate", "--workload", "rm1", "--samples", 60_000, "--seed", 1, "--out", logs)
    run("onefold-ingest", "build", logs / "dataset.toml", "--out", dataset)
    command = [sys.executable, "-c", READS, dataset, str(LIMIT)]
    # If all heaps of malloc are in use, a thread gets another heap, which keeps freed memory. The number of heaps
    # would depend on the load of the machine.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    growth, batch = map(int, done.stdout.split())
    # Python gets the next batch before it drops the previous one.
    assert growth <= LIMIT + 2 * batch
