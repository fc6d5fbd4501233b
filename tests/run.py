#!/usr/bin/env python3
"""Runs the tests of Rust, of Python, or both, and prints at the end which tests ran and how long each binary took.

    tests/run.py [rust] [python] [-- ARGUMENTS OF CARGO TEST]

All test binaries run, also after one has failed. Three of them run at the same time, because many tests wait for
programs; the output of each one is printed when it ends. `make test` calls this script, with LIBTORCH and ONEFOLD_NVRTC
set. The exit status is 1 if a test failed or a binary did not finish.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# The number of test binaries that run at the same time.
AT_A_TIME = 3
# The binaries that take longest. They start first, so that the others run beside them.
LONGEST = ["e2e", "it", "onefold_trainer", "cluster", "service"]
# The environment that onefold-train gives itself by a restart. With it, a start takes 0.3 s less, and the threads of
# libtorch in unit tests do not wait in a busy loop.
LIBTORCH_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "20000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# Text of the summary about tests that need more than `make test` installs.
FURTHER_TARGETS = """\
Further targets:
  make test-torchrec   Rust and Python tests with torch, torchdata and TorchRec (installs 2.3 GB the first time)
  make test-delta      Delta Lake tables as sources (compiles deltalake-core the first time)
  make test-browser    the status page of a preprocessing service in Chromium
  make test-failures   the preprocessing service with 300 kills, 60 stops, 100 jobs and an object store
  make acceptance      runs that fail at random moments, and plans of jobs that changed
  make test-random     property tests with new seeds and 100 times as many cases (hours)"""

STYLE = re.compile(r"\x1b\[[0-9;]*m")
BINARY = re.compile(r"^\s+Running (?P<source>.*) \((?P<path>.*)\)$")
DOC_TESTS = re.compile(r"^\s+Doc-tests (?P<package>\S+)$")
FAILED = re.compile(r"^test (?P<name>.*) \.\.\. FAILED$")
RESULT = re.compile(
    r"^test result: \S+ (?P<passed>\d+) passed; (?P<failed>\d+) failed; (?P<ignored>\d+) ignored; .*"
    r"finished in (?P<seconds>[\d.]+)s$"
)
PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (?P<name>\S+)")
PYTEST_RESULT = re.compile(r"^=+ (?P<counts>.*) in (?P<seconds>[\d.]+)s.* =+$")


@dataclasses.dataclass
class Binary:
    """One test binary, the doc tests of one package, or the tests of the Python package."""

    name: str
    passed: int = 0
    failed: int = 0
    ignored: int = 0
    seconds: float = 0.0
    # The processor time of the binary and of the programs that it started and waited for.
    processor_seconds: float | None = None
    # Remains False until the line with the result is read. A binary that crashes prints no such line.
    finished: bool = False
    failures: list = dataclasses.field(default_factory=list)


printing = threading.Lock()


def output_of(command, cwd=REPOSITORY, at_once=True):
    """Runs a command. Yields the lines of its output without colours, then its exit status and processor seconds.

    With `at_once`, each line is printed at once. Otherwise, all lines are printed when the command ends, so that several
    commands can run at the same time.
    """
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    kept = []

    def print_kept():
        with printing:
            sys.stdout.writelines(kept)
            sys.stdout.flush()
        kept.clear()

    for line in process.stdout:
        kept.append(line)
        if at_once:
            print_kept()
        yield STYLE.sub("", line.rstrip("\n"))
    print_kept()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    yield process.returncode, usage.ru_utime + usage.ru_stime


def name_of(source, path):
    """Returns `it (tests/it/main.rs)` for Cargo's `tests/it/main.rs (target/release/deps/it-0123456789abcdef)`."""
    binary = re.sub(r"-[0-9a-f]{16}$", "", pathlib.PurePath(path).name)
    return f"{binary} ({source.removeprefix('unittests ')})"


def cargo(*arguments):
    """Returns the command that runs a subcommand of Cargo."""
    return [os.environ.get("CARGO", "cargo"), *arguments]


def read_result(binary, line):
    """Adds what a line of the output of libtest says about a binary."""
    if found := FAILED.match(line):
        binary.failures.append(found["name"])
    elif found := RESULT.match(line):
        # Cargo prints separate results for doc tests that cannot be compiled together.
        binary.passed += int(found["passed"])
        binary.failed += int(found["failed"])
        binary.ignored += int(found["ignored"])
        binary.seconds += float(found["seconds"])
        binary.finished = True


def cargo_test(arguments):
    """Runs `cargo test` on the workspace; returns the binaries and whether Cargo succeeded."""
    binaries, status = [], 1
    command = cargo("test", "--locked", "--release", "--workspace", "--no-fail-fast", *arguments)
    for line in output_of(command):
        if isinstance(line, tuple):
            status = line[0]
        elif found := BINARY.match(line):
            binaries.append(Binary(name_of(found["source"], found["path"])))
        elif found := DOC_TESTS.match(line):
            binaries.append(Binary(f"{found['package']} (documentation)"))
        elif binaries:
            read_result(binaries[-1], line)
    return binaries, status == 0


def compiled_tests():
    """Compiles the test binaries of the workspace; returns Cargo's descriptions of them, or None if this fails."""
    arguments = ["--locked", "--release", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]
    done = subprocess.run(cargo("test", *arguments), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return None
    artifacts = map(json.loads, done.stdout.splitlines())
    tests = [artifact for artifact in artifacts if artifact.get("executable") and artifact["profile"]["test"]]
    order = {name: place for place, name in enumerate(LONGEST)}
    return sorted(tests, key=lambda test: order.get(test["target"]["name"], len(order)))


def run_binary(test):
    """Runs a test binary in the folder of its package, as Cargo does; returns it in a list, and whether it succeeded."""
    folder = pathlib.Path(test["manifest_path"]).parent
    source = pathlib.Path(test["target"]["src_path"]).relative_to(folder)
    binary = Binary(name_of(str(source), test["executable"]))
    library_path = [f"{os.environ['LIBTORCH']}/lib", *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = [f"CARGO_MANIFEST_DIR={folder}", f"LD_LIBRARY_PATH={':'.join(library_path)}"]
    status = 1
    for line in output_of(["env", *variables, test["executable"]], folder, at_once=False):
        if isinstance(line, tuple):
            status, binary.processor_seconds = line
        else:
            read_result(binary, line)
    return [binary], status == 0


def run_python():
    """Runs the tests of the Python package; returns them as one binary, and whether they succeeded."""
    binary, status = Binary("python/tests"), 1
    for line in output_of(["python/test.sh", "-rfE"]):
        if isinstance(line, tuple):
            status, binary.processor_seconds = line
        elif found := PYTEST_FAILED.match(line):
            binary.failures.append(found["name"])
        elif found := PYTEST_RESULT.match(line):
            counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", found["counts"])}
            binary.passed = counts.get("passed", 0)
            binary.failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
            binary.ignored = counts.get("skipped", 0) + counts.get("deselected", 0)
            binary.seconds, binary.finished = float(found["seconds"]), True
    return [binary], status == 0


def summarize(binaries, wall_seconds):
    """Prints a line for every binary that has tests, the failures, and the further targets."""
    shown = [binary for binary in binaries if not binary.finished or binary.passed + binary.failed + binary.ignored]
    width = max([len(binary.name) for binary in shown], default=0)
    print(f"\n{'tests':<{width}}  passed  failed  not run  seconds  of processors")
    for binary in shown:
        counts = f"{binary.passed:>6}  {binary.failed:>6}  {binary.ignored:>7}  {binary.seconds:>7.1f}"
        if binary.processor_seconds is not None:
            counts += f"  {binary.processor_seconds:>13.1f}"
        print(f"{binary.name:<{width}}  {counts if binary.finished else 'did not finish; its error is above'}")
    total = [sum(getattr(binary, count) for binary in shown) for count in ("passed", "failed", "ignored")]
    print(f"{'all':<{width}}  {total[0]:>6}  {total[1]:>6}  {total[2]:>7}  {wall_seconds:>7.1f}  (with compilation)")
    for binary in shown:
        for failure in binary.failures:
            print(f"FAILED  {binary.name}: {failure}")
    print(FURTHER_TARGETS, flush=True)


def main(arguments):
    """Runs the named suites; returns the exit status."""
    rest = arguments.index("--") if "--" in arguments else len(arguments)
    suites, cargo_arguments = arguments[:rest], arguments[rest + 1 :]
    if unknown := sorted(set(suites) - {"rust", "python"}):
        print(f"error: unknown suite {', '.join(unknown)}\n  hint: the suites are rust and python", file=sys.stderr)
        return 2
    os.environ.update(LIBTORCH_ENVIRONMENT)
    started, binaries, succeeded = time.monotonic(), [], True
    suites = suites or ["rust", "python"]
    if "rust" in suites and cargo_arguments:
        binaries, succeeded = cargo_test(cargo_arguments)
        suites.remove("rust")
    tests = compiled_tests() if "rust" in suites else []
    if tests is None:
        return 1
    jobs = [functools.partial(run_binary, test) for test in tests]
    if "python" in suites:
        # After the longest binary.
        jobs.insert(1, run_python)
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as executor:
        results = list(executor.map(lambda job: job(), jobs))
    if "rust" in suites:
        results.append(cargo_test(["--doc"]))
    for found, done in results:
        binaries, succeeded = binaries + found, succeeded and done
    summarize(binaries, time.monotonic() - started)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
