"""The commands as functions and as console scripts."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripts import script

import onefold
from onefold import _commands, _onefold, _trainer

# Figures that differ between equal runs.
OF_THE_RUN = {"wall_seconds", "samples_per_second", "plan_seconds", "peak_rss_bytes", "committed", "id"}


def alike(summary):
    """Returns the summary without the figures that differ between two runs."""
    if isinstance(summary, dict):
        return {key: alike(value) for key, value in summary.items() if key not in OF_THE_RUN}
    return [alike(one) for one in summary] if isinstance(summary, list) else summary


@pytest.fixture
def small(tmp_path):
    """Returns the directory of raw logs with few samples."""
    onefold.cli.generate(workload="rm3", samples=500, seed=5, out=tmp_path / "logs")
    return tmp_path / "logs"


def call_script(name, *arguments, **options):
    command = [sys.executable, script(name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


# Functions and their commands


def test_all_commands_are_exported_and_described():
    assert {*_commands.COMMANDS, *_trainer.COMMANDS} == set(onefold.cli.__all__)
    # The package itself contains only the commands that make datasets, and a star import shadows no other package.
    assert set(onefold.cli.__all__) & set(onefold.__all__) == {"build", "append"}
    assert onefold.build is onefold.cli.build and onefold.build.__module__ == "onefold.cli"
    assert not {"torch", "torchrec"} & set(onefold.__all__)
    assert "memory_limit: " in onefold.build.__doc__ and "`onefold-ingest build`" in onefold.build.__doc__


def test_summaries_are_those_of_the_commands(run, tmp_path, monkeypatch):
    def both(function, given, program, *arguments):
        """Returns the function's summary, which must equal that of the command in a separate directory."""
        for folder in ("function", "command"):
            (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "function")
        summary = function(**given)
        printed = json.loads(run(program, *arguments, "--json", cwd=tmp_path / "command").splitlines()[-1])
        assert alike(summary) == alike(printed)
        return summary

    given = {"workload": "rm1", "samples": 5000, "seed": 1, "out": Path("logs")}
    generated = both(
        onefold.cli.generate, given,
        "onefold-data", "generate", "--workload", "rm1", "--samples", 5000, "--seed", 1, "--out", "logs",
    )  # fmt: skip
    assert generated["samples"] == 5000
    given = {"config": "logs/dataset.toml", "out": "data", "layout": "folded", "memory_limit": 1 << 30, "threads": 2}
    built = both(
        onefold.build, given,
        "onefold-ingest", "build", "logs/dataset.toml", "--out", "data", "--layout", "folded", "--memory-limit", "1GiB",
        "--threads", 2,
    )  # fmt: skip
    assert built["samples"] == 5000 and built["changed"]
    given = {"config": "logs/dataset.toml", "out": "data"}
    appended = both(onefold.append, given, "onefold-ingest", "append", "logs/dataset.toml", "--out", "data")
    assert not appended["changed"]
    verified = both(onefold.cli.verify, {"dataset": "data"}, "onefold-ingest", "verify", "data")
    assert verified["samples"] == 5000 and not verified["problems"]
    digested = both(
        onefold.cli.digest, {"dataset": "data", "features": ["user_00", "item_00"], "by_step": True, "global_batch_size": 512},
        "onefold-read", "digest", "data", "--features", "user_00,item_00", "--by-step", "--global-batch-size", 512,
    )  # fmt: skip
    assert len(digested["step_digests"]) == digested["steps"] == 10
    given = {"dataset": "data", "html": "report.html"}
    both(onefold.cli.report, given, "onefold-ingest", "report", "data", "--html", "report.html")
    assert (tmp_path / "function/report.html").is_file()
    both(
        onefold.cli.tables,
        {"config": "logs/train.toml", "data": "data", "out": "tables.json", "dedupe_factor": {"user_a": 4.5}},
        "onefold-shard", "tables", "logs/train.toml", "--data", "data", "--out", "tables.json",
        "--dedupe-factor", "user_a=4.5",
    )  # fmt: skip
    both(
        onefold.cli.topology, {"ranks": 2, "memory": "4GiB", "out": "topology.json"},
        "onefold-shard", "topology", "--ranks", 2, "--memory", "4GiB", "--out", "topology.json",
    )  # fmt: skip
    planned = both(
        onefold.cli.plan, {"tables": "tables.json", "topology": "topology.json", "out": "plan.json"},
        "onefold-shard", "plan", "--tables", "tables.json", "--topology", "topology.json", "--out", "plan.json",
    )  # fmt: skip
    assert planned["ranks"] == 2 and planned["max_cost_ms"] > 0
    again = both(
        onefold.cli.replan, {"plan": "plan.json", "tables": "tables.json", "budget": "1GiB", "out": "again.json"},
        "onefold-shard", "replan", "--plan", "plan.json", "--tables", "tables.json", "--budget", "1GiB",
        "--out", "again.json",
    )  # fmt: skip
    assert again["max_cost_ms"] <= planned["max_cost_ms"] * (1 + 1e-9)
    history = both(onefold.cli.history, {"dataset": "data"}, "onefold-ingest", "history", "data")
    assert len(history["snapshots"]) == 1
    assert both(onefold.cli.vacuum, {"dataset": "data"}, "onefold-ingest", "vacuum", "data")["files_removed"] == 0


# Errors


def test_an_error_has_the_message_and_the_hint_of_the_command(small, tmp_path):
    given = ["build", small / "dataset.toml", "--out", tmp_path / "data"]
    assert call_script("onefold-ingest", *given).returncode == 0
    printed = call_script("onefold-ingest", *given)
    assert printed.returncode == 1
    with pytest.raises(onefold.OnefoldError) as caught:
        onefold.build(small / "dataset.toml", out=tmp_path / "data")
    error = caught.value
    # The command names a flag, and the function names the keyword.
    assert printed.stderr == f"error: {error}\n".replace("`overwrite=True`", "`--overwrite`")
    assert "overwrite=True" in error.hint and "--" not in error.hint
    assert str(error) == f"{error.message}\n  hint: {error.hint}"


def test_errors_can_be_made_anew_as_other_processes_do():
    kinds = onefold.OptionsError, onefold.DataError, onefold.StorageError, onefold.ProcessError, onefold.OnefoldError
    for kind in kinds:
        error = kind("no\n  hint: yes")
        for other in (kind(message="no\n  hint: yes"), pickle.loads(pickle.dumps(error))):
            assert (type(other), str(other)) == (kind, str(error))
            assert (other.message, other.hint) == ("no", "yes")


def test_a_damaged_dataset_raises_with_what_was_found(small, tmp_path):
    onefold.build(small / "dataset.toml", out=tmp_path / "data")
    damaged = next((tmp_path / "data").rglob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(onefold.OnefoldError, match="has a problem") as caught:
        onefold.cli.verify(tmp_path / "data")
    assert "onefold-ingest build" in caught.value.hint
    (problem,) = caught.value.summary["problems"]
    assert damaged.name in json.dumps(problem)


def test_what_the_operating_system_refuses_is_a_storage_error(tmp_path):
    with pytest.raises(onefold.StorageError) as caught:
        onefold.build(tmp_path / "none.toml", out=tmp_path / "data")
    assert "none.toml" in caught.value.message and "check the path" in caught.value.hint
    assert isinstance(caught.value, OSError)


def test_wrong_values_are_refused_with_the_names_of_keywords(tmp_path):
    with pytest.raises(onefold.OptionsError) as caught:
        onefold.build("dataset.toml", out=tmp_path / "data", memory_limit="much")
    assert "`memory_limit`" in caught.value.message and "--memory-limit" not in str(caught.value)
    with pytest.raises(onefold.OptionsError, match="`layout`.*\n.*possible values: rows, folded"):
        onefold.build("dataset.toml", out=tmp_path / "data", layout="row")
    with pytest.raises(onefold.OptionsError, match="`replace`|`merge`"):
        onefold.append("dataset.toml", out=tmp_path / "data", merge=True, replace=True)
    with pytest.raises(onefold.OptionsError, match="`half` is not a condition") as caught:
        onefold.cli.verify(tmp_path, partition="half")
    assert str(caught.value).count("hint: ") == 1 and "split=train" in caught.value.hint
    with pytest.raises(onefold.OnefoldError, match="`from_logs=") as caught:
        onefold.cli.report()
    assert "--" not in str(caught.value)


def test_wrong_keywords_are_type_errors(tmp_path):
    with pytest.raises(TypeError, match="build.. has no argument 'memory_limt'; did you mean 'memory_limit'"):
        onefold.build("dataset.toml", out=tmp_path, memory_limt=1)
    with pytest.raises(TypeError, match=r"build\(\): missing a required"):
        onefold.build("dataset.toml")
    with pytest.raises(TypeError, match="'out' takes one value, not list"):
        onefold.build("dataset.toml", out=["a", "b"])
    with pytest.raises(TypeError, match="'threads' takes text, a path or a number, not bool"):
        onefold.build("dataset.toml", out="data", threads=True)
    with pytest.raises(TypeError, match="'overwrite' takes True or False, not str"):
        onefold.build("dataset.toml", out="data", overwrite="yes")


# Progress and interruption


def test_progress_is_told(small, tmp_path, capfd):
    told = []
    onefold.build(small / "dataset.toml", out=tmp_path / "data", progress=lambda *stage: told.append(stage))
    assert ("writing", 500, 500, "samples") in told
    assert all(isinstance(done, int) and unit for _, done, _, unit in told)
    assert capfd.readouterr() == ("", "")


def test_an_exception_of_the_progress_ends_the_command(tmp_path):
    calls = []

    def progress(*stage):
        calls.append(stage)
        raise LookupError("enough")

    began = time.monotonic()
    with pytest.raises(LookupError, match="enough"):
        onefold.cli.generate(workload="rm1", samples=10_000_000, seed=1, out=tmp_path / "logs", progress=progress)
    # With all 10,000,000 samples, there would be a directory.
    assert time.monotonic() - began < 600
    assert len(calls) == 1
    assert not (tmp_path / "logs").exists() and not list(tmp_path.iterdir())


def interrupt_at_first_progress():
    """Returns a progress function that sends Ctrl-C, and a list for the time at which it did so."""
    at = []

    def progress(*_):
        if not at:
            at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    return progress, at


def test_an_interrupt_ends_generating(tmp_path):
    progress, at = interrupt_at_first_progress()
    with pytest.raises(KeyboardInterrupt):
        onefold.cli.generate(workload="rm1", samples=10_000_000, seed=1, out=tmp_path / "logs", progress=progress)
    assert time.monotonic() - at[0] < 300
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_a_build_and_the_next_one_succeeds(tmp_path):
    onefold.cli.generate(workload="rm1", samples=40_000, seed=1, out=tmp_path / "logs")
    given = {"config": tmp_path / "logs" / "dataset.toml", "out": tmp_path / "data", "threads": 2}
    progress, at = interrupt_at_first_progress()
    with pytest.raises(KeyboardInterrupt):
        onefold.build(**given, progress=progress)
    assert time.monotonic() - at[0] < 300
    # Without a snapshot, there is no dataset.
    assert not list(tmp_path.glob("data/snapshots/*"))
    assert onefold.build(**given)["samples"] == 40_000
    assert onefold.cli.verify(tmp_path / "data")["samples"] == 40_000


def test_other_threads_run_while_a_command_does(tmp_path):
    turns = 0
    ended = threading.Event()

    def work():
        onefold.cli.generate(workload="rm1", samples=20_000, seed=1, out=tmp_path / "logs")
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def in_child(results):
    try:
        onefold.cli.generate(workload="rm3", samples=100, seed=1, out="unused")
        results.put("no error")
    except onefold.ProcessError as error:
        results.put(str(error))


def test_a_forked_process_says_that_it_has_no_threads(small):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=in_child, args=(results,))
    child.start()
    text = results.get(timeout=600)
    child.join()
    assert "forked" in text and "hint: start processes with the method `spawn`" in text


# Console scripts


@pytest.mark.parametrize("name", ["onefold", "onefold-data", "onefold-ingest", "onefold-read", "onefold-shard"])
def test_scripts_are_the_programs(name, run):
    for arguments in (["--help"], ["--version"]):
        shown = call_script(name, *arguments)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout == run(name, *arguments)
    wrong = call_script(name, "--no-such-option")
    assert wrong.returncode == 2 and "--no-such-option" in wrong.stderr


def test_one_script_starts_the_others(run):
    shown = call_script("onefold", "ingest", "build", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run("onefold-ingest", "build", "--help")
    assert "\n  ingest " in call_script("onefold").stdout
    wrong = call_script("onefold", "ingest", "verify", "none")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ")
    completions = call_script("onefold", "completions", "bash").stdout
    assert "_onefold__ingest()" in completions and "--memory-limit" in completions


def test_scripts_print_and_fail_as_the_programs_do(run, dataset, tmp_path):
    shown = call_script("onefold-ingest", "history", dataset, "--json")
    assert shown.returncode == 0
    assert shown.stdout == run("onefold-ingest", "history", dataset, "--json")
    wrong = call_script("onefold-ingest", "verify", tmp_path / "none")
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert wrong.stderr.startswith("error: ") and "hint: " in wrong.stderr


def test_a_closed_pipe_is_a_success(dataset):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, script("onefold-read"), "head", dataset, "--samples", "100"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_a_script_as_it_ends_the_program(tmp_path):
    given = ["generate", "--workload", "rm1", "--samples", "10000000", "--seed", "1", "--out", tmp_path / "logs"]
    process = subprocess.Popen([sys.executable, script("onefold-data"), *map(str, given)])
    # The directory of the writer appears when the program has started.
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert not (tmp_path / "logs").exists()


def test_jemalloc_is_not_in_the_process():
    # The allocator of the binaries would free memory that another allocator allocated.
    symbols = Path(_onefold.__file__).read_bytes()
    assert b"malloc_conf" not in symbols and b"<jemalloc>" not in symbols
