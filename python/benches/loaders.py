"""Compares this package with other loaders on the same logs: sizes, rates, memory, and resuming.

    onefold-data generate --workload rm1 --samples 500000 --seed 1 --out logs
    onefold-ingest build logs/dataset.toml --out rm1
    onefold-data import ebnerd --from ebnerd_demo --out news
    onefold-ingest build news/dataset.toml --out ebnerd
    python/benches/loaders.sh --work work rm1 ebnerd

`loaders.sh` installs the other packages. Each loader stores the samples of a dataset in its own format, with zstd
where it can, and reads them in batches of `--batch` samples without worker processes; `stores.py` has the loaders.
The sum of a hash of all samples must be equal for all of them. Figures:

- bytes per sample: all files that the loader stores.
- samples/s: samples of an epoch in file order, divided by the time from opening to the last batch. `rows/s` counts
  the lists that the batches contain, divided by the number of features: fewer than samples if batches are
  deduplicated. Figures are medians of `--repeat` rounds; a round reads with every loader once, and every second round
  in the opposite order.
- samples per core second: the same samples, divided by the processor time of all threads. It depends less on other
  work on the machine, and does not favour loaders that use several cores.
- first batch: from opening to the first batch, after the imports.
- memory: the growth of the resident memory at its peak, from the end of the imports on.
- killed: a training writes a checkpoint, the loader's state and the samples it has seen, every `--every` steps, and
  kills itself with SIGKILL half-way between two of them, in a shuffled epoch if the loader shuffles. A second process
  continues from the checkpoint to the end of the epoch. Then samples are counted: seen 0 times, once, again. A
  loader without a state starts from the beginning.
- ranks: the same, from two ranks to one, without the kill. Only loaders that promise it.

Measurements run in processes of their own, forked from one that has imported the packages of the loader. A loader
whose package cannot be imported, or that fails, is a line of the table that says so.
"""

import argparse
import json
import os
import pickle
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy

from stores import LOADERS, Source

MULTIPLIER = numpy.uint64(0x9E3779B97F4A7C15)


def mixed(values):
    """Returns hashes of unsigned integers of 64 bits."""
    values = values * MULTIPLIER
    values ^= values >> numpy.uint64(32)
    return values * MULTIPLIER


def hashes(batch):
    """Returns a hash of every sample of a batch, uint64 [B]."""
    floats, lists = batch
    found = numpy.zeros(len(floats), numpy.uint64)
    for column in range(floats.shape[1]):
        bits = numpy.ascontiguousarray(floats[:, column], numpy.float32).view(numpy.uint32)
        found = mixed(found + bits.astype(numpy.uint64) + numpy.uint64(column + 1))
    for name in sorted(lists):
        values, lengths = lists[name]
        lengths = lengths.astype(numpy.int64)
        ends = lengths.cumsum()
        places = numpy.arange(len(values)) - numpy.repeat(ends - lengths, lengths)
        ids = mixed(values.astype(numpy.int64).view(numpy.uint64) + mixed(places.astype(numpy.uint64)))
        sums = numpy.concatenate([numpy.zeros(1, numpy.uint64), ids.cumsum(dtype=numpy.uint64)])
        found = mixed(found + sums[ends] - sums[ends - lengths] + lengths.astype(numpy.uint64))
    return found


def resident(field):
    """Returns the bytes of `VmRSS` or `VmHWM`, which is the peak, of this process."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])


def write(kind, task):
    """Stores the samples. Returns the version of the loader, and the bytes of all files."""
    kind.write(Source(task["dataset"]), Path(task["folder"]))
    size = sum(path.stat().st_size for path in Path(task["folder"]).rglob("*") if path.is_file())
    return {"version": kind.version(), "bytes": size}


def read(kind, task):
    """Reads an epoch in file order. Returns the number of rows, the seconds, the seconds of processors, and the growth of the memory."""
    source = Source(task["dataset"])
    # The peak starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    processor, started, first, samples, rows = time.process_time(), time.perf_counter(), None, 0, 0
    for batch in kind(source, Path(task["folder"]), task["batch"], shuffle=False):
        if first is None:
            first = time.perf_counter() - started
        plain = isinstance(batch, tuple)
        own = len(batch[0]) if plain else len(batch)
        samples += own
        rows += own if plain else statistics.mean(feature.rows for feature in batch.features.values())
    seconds = time.perf_counter() - started
    processor, memory = time.process_time() - processor, resident("VmHWM") - before
    return {"rows": rows, "first": first, "seconds": seconds, "processor": processor, "memory": memory}


def train(kind, task):
    """Takes batches until the end of the epoch or `stop`, with checkpoints. Ends with SIGKILL if `kill`."""
    path = Path(task["checkpoint"])
    start = Path(task["start"]) if task["start"] else path
    state, seen = pickle.loads(start.read_bytes()) if start.exists() else (None, [])
    rank, world = task["rank"], task["world"]
    if world > 1:
        import torch

        torch.distributed.init_process_group("gloo")
    loader = kind(Source(task["dataset"]), Path(task["folder"]), task["batch"], kind.shuffles, rank, world, state)
    for step, batch in enumerate(loader, 1):
        seen.append(hashes(batch if isinstance(batch, tuple) else loader.plain(batch)))
        if step == task["stop"] and task["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % task["every"] == 0:
            save(path, loader.state(), seen)
        if step == task["stop"]:
            # Other threads and processes of the loader end with this process.
            return {}
    save(path, None, seen)
    return {}


def save(path, state, seen):
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps((state, seen)))
    partial.replace(path)


def check(kind, task):
    """Returns the sum of the hashes of all samples, in file order, and their number."""
    loader = kind(Source(task["dataset"]), Path(task["folder"]), task["batch"], shuffle=False)
    parts = [hashes(batch if isinstance(batch, tuple) else loader.plain(batch)) for batch in loader]
    found = numpy.concatenate(parts)
    if task.get("out"):
        numpy.save(task["out"], found)
    return {"samples": len(found), "sum": int(found.sum(dtype=numpy.uint64))}


ACTIONS = {action.__name__: action for action in (write, read, train, check)}


class Failed(Exception):
    """A loader failed; the message is the last line that it printed."""


SERVERS = {}
"""By the name of a loader: the process that forks the processes of its actions."""


def serve(name):
    """Imports the packages of a loader, once where it can, and forks a process for every request in stdin.

    A request is the arguments of `act` after the first one, and the answer is the process id; or it is a process id,
    and the answer is the exit status.
    """
    if LOADERS[name].forks:
        LOADERS[name].version()
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            print(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]), flush=True)
            continue
        process = os.fork()
        if process == 0:
            act(LOADERS[name], *request)
        print(process, flush=True)


def act(kind, action, task, environment, printed):
    """Does an action of a loader, whose result and errors are written to the file `printed`, and ends the process."""
    for target, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT)):
        os.dup2(os.open(printed if target else os.devnull, mode), target)
    os.dup2(1, 2)
    os.environ.update(environment)
    tempfile.tempdir = task["temporary"]
    try:
        kind.version()
        print(json.dumps(ACTIONS[action](kind, task)), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Without waiting for threads of a loader that was left within an epoch.
    os._exit(0)


def ask(name, request):
    """Returns the answer of the server of a loader, which is started first if there is none."""
    if name not in SERVERS:
        # No loader may see a GPU or a network.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        SERVERS[name] = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], env=os.environ | environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
    server = SERVERS[name]
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
    except BrokenPipeError:
        pass
    answer = server.stdout.readline()
    if not answer:
        raise Failed("its packages cannot be imported; stderr says why")
    return int(answer)


def start(action, name, task, ranks=None):
    """Starts an action of a loader in a process of its own. Returns what `finish` takes."""
    # Loaders empty the temporary folder.
    printed = Path(task["work"], f"printed-{task.get('rank', 0)}")
    printed.unlink(missing_ok=True)
    environment = {"TMPDIR": task["temporary"], "DATA_OPTIMIZER_CACHE_FOLDER": task["temporary"], **(ranks or {})}
    return name, ask(name, [action, task, environment, str(printed)]), printed


def finish(started, kill=False):
    """Waits for an action, and returns its result."""
    name, process, printed = started
    status, lines = ask(name, process), printed.read_text().splitlines()
    if kill and status == -signal.SIGKILL:
        return {}
    if status != 0:
        raise Failed(lines[-1] if lines else f"ended with status {status}")
    return json.loads(lines[-1])


def run(action, name, task, kill=False):
    with tempfile.TemporaryDirectory(dir=task["work"]) as temporary:
        return finish(start(action, name, task | {"temporary": temporary}), kill)


def counts(expected, checkpoints):
    """Returns how many samples were seen 0 times, once, and again."""
    seen = [part for path in checkpoints for part in pickle.loads(path.read_bytes())[1]]
    both = numpy.unique(numpy.concatenate([expected, *seen]))
    known, found = (numpy.zeros(len(both), numpy.int64) for _ in range(2))
    for into, hashed in ((known, expected), (found, numpy.concatenate(seen))):
        values, times = numpy.unique(hashed, return_counts=True)
        into[numpy.searchsorted(both, values)] = times
    if (known == 0).any():
        raise Failed("the training saw samples that the log does not have")
    # Samples that are equal are counted together.
    missed = int(numpy.maximum(known - found, 0).sum())
    again = int(numpy.minimum(numpy.maximum(found - known, 0), known).sum())
    return [missed, len(expected) - missed - again, again]


def killed(name, task, expected):
    """Returns the counts of a training that is killed between two checkpoints."""
    checkpoint = Path(task["work"], "checkpoint")
    checkpoint.unlink(missing_ok=True)
    task = task | {"checkpoint": str(checkpoint), "start": None, "rank": 0, "world": 1}
    run("train", name, task | {"kill": True, "stop": 2 * task["every"] + task["every"] // 2}, kill=True)
    run("train", name, task | {"kill": False, "stop": None})
    return counts(expected, [checkpoint])


def other_ranks(name, task, expected):
    """Returns the counts of a training that two ranks begin and one continues."""
    paths = [Path(task["work"], f"checkpoint-{rank}") for rank in range(2)]
    last = Path(task["work"], "checkpoint-last")
    for path in (*paths, last):
        path.unlink(missing_ok=True)
    with socket.socket() as free, tempfile.TemporaryDirectory(dir=task["work"]) as temporary:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        two = task | {"temporary": temporary, "start": None, "world": 2, "kill": False, "stop": 2 * task["every"]}
        processes = []
        for rank in range(2):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(start("train", name, two | {"rank": rank, "checkpoint": str(paths[rank])}, ranks))
        try:
            while processes:
                finish(processes[0])
                del processes[0]
        finally:
            # After a failure of one rank the other one may wait for it.
            for _, process, _ in processes[1:]:
                os.kill(process, signal.SIGKILL)
    one = task | {"start": str(paths[0]), "checkpoint": str(last), "rank": 0, "world": 1, "kill": False, "stop": None}
    run("train", name, one)
    # The last checkpoint contains what rank 0 had seen.
    return counts(expected, [last, paths[1]])


def task_of(name, dataset, options):
    """Returns the task of a loader. Its folder is within `options.work`."""
    folder = options.work / f"{Path(dataset).name}-{name.replace(' ', '').replace(',', '-')}"
    task = {"dataset": dataset, "folder": str(folder), "batch": options.batch, "every": options.every}
    return task | {"work": str(options.work)}


def prepare(name, task, expected):
    """Stores the samples, and checks that the loader yields them. `expected` is the file of their hashes."""
    shutil.rmtree(task["folder"], ignore_errors=True)
    found = run("write", name, task)
    return found | run("check", name, task | ({} if expected.exists() else {"out": str(expected)}))


def rates(tasks, repeat):
    """Returns the medians of `repeat` rounds for each loader, or the error of a loader that failed."""
    times, found = {name: [] for name in tasks}, {}
    for i in range(repeat):
        # The order alternates, because the previous measurement has an effect on a shared machine.
        for name in [name for name in tasks if name not in found][:: -1 if i % 2 else 1]:
            try:
                times[name].append(run("read", name, tasks[name]))
            except Failed as error:
                found[name] = {"error": str(error)}
    fields = ("first", "seconds", "processor", "memory", "rows")
    for name, own in times.items():
        if name not in found:
            found[name] = {field: statistics.median(one[field] for one in own) for field in fields}
    return found


def resumed(name, task, expected):
    """Returns the counts of the trainings that continue."""
    found = {}
    for field, of in (("killed", killed), ("ranks", other_ranks)):
        if field == "ranks" and not LOADERS[name].ranks:
            continue
        try:
            found[field] = of(name, task, expected)
        except Failed as error:
            found[field] = str(error)
    return found


def measure(dataset, options):
    """Returns the figures of all loaders. Ends the program if the samples of a loader differ from those of the first one."""
    expected = options.work / f"{Path(dataset).name}.npy"
    expected.unlink(missing_ok=True)
    figures, tasks = {}, {}
    for name in options.loaders.split(";"):
        task = task_of(name, dataset, options)
        try:
            figures[name] = prepare(name, task, expected)
            tasks[name] = task
        except Failed as error:
            figures[name] = {"error": str(error)}
        print(f"stored: {name}", file=sys.stderr)
    sums = {name: (figures[name]["samples"], figures[name]["sum"]) for name in tasks}
    if len(set(sums.values())) > 1:
        sys.exit(f"error: the loaders yield different samples: {sums}")
    for name, found in rates(tasks, options.repeat).items():
        figures[name] |= found
        print(f"read: {name}: {json.dumps(figures[name])}", file=sys.stderr)
    for name, task in tasks.items():
        counted = resumed(name, task, numpy.load(expected))
        print(f"continued: {name}: {json.dumps(counted)}", file=sys.stderr)
        figures[name] |= counted
        shutil.rmtree(task["folder"])
    return figures


def row(name, found):
    """Returns a line of the table."""
    if "error" in found:
        return f"| {name} | not measured: {found['error']} | | | | | | | | |"
    samples, shown = found["samples"], lambda value: " / ".join(f"{v:,}" for v in value)
    counted = [found.get(field) or "not offered" for field in ("killed", "ranks")]
    cells = [
        f"{name} {found['version']}",
        f"{found['bytes'] / samples:,.1f}",
        f"{samples / found['seconds']:,.0f}",
        f"{found['rows'] / found['seconds']:,.0f}",
        f"{samples / found['processor']:,.0f}",
        f"{1000 * found['first']:,.0f} ms",
        f"{found['memory'] / 2**20:,.0f} MiB",
        *(shown(one) if isinstance(one, list) else one for one in counted),
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """| loader | bytes per sample | samples/s | rows/s | samples per core second | first batch | memory | killed: seen 0 / 1 / again | ranks 2 to 1: seen 0 / 1 / again |
|---|---|---|---|---|---|---|---|---|"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", help="datasets of this project")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the stored samples, and for figures.json")
    parser.add_argument("--loaders", default=";".join(LOADERS), help="names, separated by semicolons [default: all]")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a step")
    parser.add_argument("--every", type=int, default=4, help="steps from a checkpoint to the next")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.work = options.work.resolve()
    figures = {}
    for dataset in map(os.path.abspath, options.datasets):
        found = figures[Path(dataset).name] = measure(dataset, options)
        (options.work / "figures.json").write_text(json.dumps(figures, indent=1))
        print(f"\n{Path(dataset).name}, batches of {options.batch:,} samples:\n\n{HEADER}")
        print("\n".join(row(name, own) for name, own in found.items()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
