#!/usr/bin/env python3
"""Runs the tests of Rust, of Python, or both, and prints at the end which tests ran and how long each binary took.

    tests/run.py [rust] [python] [-- ARGUMENTS OF CARGO TEST]

All test binaries run, also after one has failed. Binaries that mostly wait for programs, the other binaries and the
tests of Python run at the same time. The output of each binary is printed when it ends. `make test` calls this script,
with LIBTORCH and ONEFOLD_NVRTC set. The exit status is 1 if a test failed or a binary did not finish.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# Integration tests that start programs and wait for them most of the time.
WAITING = {"cluster", "distributed", "e2e", "service"}
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
    # Remains False until the line with the result is read. A binary that crashes prints no such line.
    finished: bool = False
    failures: list = dataclasses.field(default_factory=list)


printing = threading.Lock()


def output_of(command, begins=None):
    """Runs a command in the repository and prints its output. Yields its lines without colours, then the exit status.

    Without `begins`, each line is printed at once. Otherwise, a line for which `begins` returns true begins a block of
    lines, and each block is printed as a whole, so that several commands can run at the same time.
    """
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    block = []

    def print_block():
        with printing:
            sys.stdout.writelines(block)
            sys.stdout.flush()
        block.clear()

    for line in process.stdout:
        plain = STYLE.sub("", line.rstrip("\n"))
        if begins and begins(plain):
            print_block()
        block.append(line)
        if not begins:
            print_block()
        yield plain
    print_block()
    yield process.wait()


def name_of(source, path):
    """Returns `it (tests/it/main.rs)` for Cargo's `tests/it/main.rs (target/release/deps/it-0123456789abcdef)`."""
    binary = re.sub(r"-[0-9a-f]{16}$", "", pathlib.PurePath(path).name)
    return f"{binary} ({source.removeprefix('unittests ')})"


def cargo(*arguments):
    """Returns the command that runs a subcommand of Cargo."""
    return [os.environ.get("CARGO", "cargo"), *arguments]


def cargo_test(arguments, begins=None):
    """Runs `cargo test` on the workspace; returns the binaries and whether Cargo succeeded."""
    binaries, status = [], 1
    command = cargo("test", "--locked", "--release", "--workspace", "--no-fail-fast", *arguments)
    for line in output_of(command, begins):
        if isinstance(line, int):
            status = line
        elif found := BINARY.match(line):
            binaries.append(Binary(name_of(found["source"], found["path"])))
        elif found := DOC_TESTS.match(line):
            binaries.append(Binary(f"{found['package']} (documentation)"))
        elif binaries and (found := FAILED.match(line)):
            binaries[-1].failures.append(found["name"])
        elif binaries and (found := RESULT.match(line)):
            binary = binaries[-1]
            # Cargo prints separate results for doc tests that cannot be compiled together.
            binary.passed += int(found["passed"])
            binary.failed += int(found["failed"])
            binary.ignored += int(found["ignored"])
            binary.seconds += float(found["seconds"])
            binary.finished = True
    return binaries, status == 0


def integration_tests():
    """Returns the names of the integration tests of all packages."""
    command = cargo("metadata", "--locked", "--no-deps", "--format-version", "1")
    metadata = json.loads(subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout)
    targets = [target for package in metadata["packages"] for target in package["targets"]]
    return {target["name"] for target in targets if "test" in target["kind"] and target["test"]}


def rust_lanes(arguments):
    """Compiles the tests of the workspace. Returns functions that run them, and that can run at the same time.

    With arguments of `cargo test`, one function runs the tests that they choose. Each function returns the binaries
    that ran and whether all succeeded.
    """
    if arguments:
        return [lambda: cargo_test(arguments)]
    # Compiles everything at once, because Cargo's lock would let one of the commands below wait for the other.
    if not cargo_test(["--no-run"])[1]:
        return [lambda: ([], False)]

    def choose(names):
        return [argument for name in sorted(names) for argument in ("--test", name)]

    def run(*commands):
        results = [cargo_test(command, re.compile(r"\s+Running ").match) for command in commands]
        return [binary for binaries, _ in results for binary in binaries], all(done for _, done in results)

    beside = ["--lib", "--bins", *choose(integration_tests() - WAITING)]
    return [lambda: run(beside, ["--doc"]), lambda: run(choose(WAITING))]


def run_python():
    """Runs the tests of the Python package; returns them as one binary, and whether they succeeded."""
    binary, status = Binary("python/tests"), 1
    for line in output_of(["python/test.sh", "-rfE"]):
        if isinstance(line, int):
            status = line
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
    print(f"\n{'tests':<{width}}  passed  failed  not run  seconds")
    for binary in shown:
        counts = f"{binary.passed:>6}  {binary.failed:>6}  {binary.ignored:>7}  {binary.seconds:>7.1f}"
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
    lanes = rust_lanes(cargo_arguments) if "rust" in suites else []
    lanes += [run_python] if "python" in suites else []
    with concurrent.futures.ThreadPoolExecutor() as executor:
        for found, done in executor.map(lambda lane: lane(), lanes):
            binaries, succeeded = binaries + found, succeeded and done
    summarize(binaries, time.monotonic() - started)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
