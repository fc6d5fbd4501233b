"""Training: the commands of the wheel `onefold-train` as functions."""

import inspect
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest

import onefold
from onefold import _trainer

# Options for the output of a command, and options that only functions have.
OF_TERMINALS = {"help", "json", "quiet", "version"}
OF_FUNCTIONS = {"ranks", "progress"}

CONFIG = """\
format_version = 1

[data]
label = "label"

[train]
batch_size = 256
epochs = 1
seed = 1

[model]
bottom_mlp = [16, 8]
top_mlp = [16, 1]
interaction = "dot"

[embedding]
dim = 8
rows = 1000
pooling = "sum"
ids = "hashed"
"""


@pytest.fixture(scope="session")
def examples(tmp_path_factory):
    """Returns a directory with logs of rm3, a dataset of them that keeps the request, and a small model."""
    folder = tmp_path_factory.mktemp("training")
    onefold.cli.generate(workload="rm3", samples=3000, seed=5, out=folder / "logs")
    (folder / "train.toml").write_text(CONFIG)
    config = folder / "logs/dataset.toml"
    config.write_text('keep = ["request_id"]\n' + config.read_text())
    onefold.build(config, out=folder / "data", buckets=4)
    return folder


@pytest.fixture
def given(examples, trainer):
    """Returns the common arguments of all trainings, except for the directory of the run."""
    return {"config": examples / "train.toml", "data": examples / "data", "threads": 2}


# Functions and their commands


def test_functions_name_their_command():
    assert onefold.cli.train.__module__ == "onefold.cli" and "`onefold-train run`" in onefold.cli.train.__doc__


@pytest.mark.parametrize("name", _trainer.COMMANDS)
def test_arguments_are_those_of_the_command(name, run):
    shown = run("onefold-train", _trainer.COMMANDS[name], "--help")
    flags = dict(re.findall(r"^ +(?:-\w, |    )?--([a-z-]+)( <[^>]+>)?", shown, re.MULTILINE))
    places = re.findall(r"^  [<\[]([A-Z]+)[>\]]", shown, re.MULTILINE)
    parameters = inspect.signature(getattr(onefold.cli, name)).parameters
    expected = {flag.replace("-", "_") for flag in flags.keys() - OF_TERMINALS}
    expected |= {"runs" if name == "report_runs" else place.lower() for place in places}
    assert parameters.keys() - OF_FUNCTIONS == expected
    assert ("ranks" in parameters) == ("timeout" in parameters)
    for flag, value in flags.items():
        if flag not in OF_TERMINALS:
            assert isinstance(parameters[flag.replace("-", "_")].default, bool) == (not value), flag
    # Every argument is described.
    for keyword in parameters:
        assert re.search(rf"^        .*\b{keyword}\b.*: ", getattr(onefold.cli, name).__doc__, re.MULTILINE), keyword
    # The defaults equal those of the command.
    for flag, default in re.findall(r"--([a-z-]+) <[^>]+>(?:(?!\n\n|--).)*?\[default: (\w+)\]", shown, re.DOTALL):
        assert str(parameters[flag.replace("-", "_")].default) == default


def test_a_model_is_trained_evaluated_and_used(given, examples, tmp_path):
    trained = onefold.cli.train(**given, out=tmp_path / "monday")
    assert trained["samples"] == 3000 and trained["steps"] == 12
    assert (tmp_path / "monday/run.json").is_file()

    evaluated = onefold.cli.evaluate(tmp_path / "monday", data=given["data"], threads=2)
    assert evaluated["samples"] == 3000 and evaluated["loss"] < trained["loss"]
    given_too = {"data": given["data"], "out": tmp_path / "all.parquet", "keep": ["request_id"]}
    predicted = onefold.cli.predict(tmp_path / "monday", **given_too)
    assert predicted["columns"] == ["request_id", "prediction", "logit"] and predicted["samples"] == 3000
    # The labels are read from the dataset, and joined by the key that it keeps.
    labels = {}
    for batch in onefold.Dataset(given["data"], keep=["request_id"]):
        labels.update(zip(batch.kept["request_id"].tolist(), batch.labels[:, 0].tolist(), strict=True))
    rows = pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pydict()
    label = numpy.array([labels[request] for request in rows["request_id"]])
    logit = numpy.array(rows["logit"])
    loss = numpy.maximum(logit, 0) - logit * label + numpy.log1p(numpy.exp(-abs(logit)))
    assert math.isclose(loss.mean(), evaluated["loss"], abs_tol=1e-9)

    further = onefold.cli.train(**given, out=tmp_path / "tuesday", warm_start=tmp_path / "monday")
    assert further["loss"] < trained["loss"] and further["steps"] == 12
    exported = onefold.cli.export(tmp_path / "tuesday", out=tmp_path / "exported")
    assert exported["steps"] > 0 and (tmp_path / "exported/model.safetensors").is_file()
    runs = [tmp_path / "monday", tmp_path / "tuesday"]
    drawn = onefold.cli.report_runs(runs, html=tmp_path / "runs.html")
    assert len(drawn["runs"]) == 2 and "tuesday" in (tmp_path / "runs.html").read_text()


def test_a_dataset_is_followed(given, tmp_path):
    followed = onefold.cli.follow(**given, out=tmp_path / "run", stop_after=1, look_every="1s")
    assert followed["ended"] == "partitions" and followed["samples"] == 3000
    (line,) = (tmp_path / "run/follow.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == followed["steps"] == 12
    # The same call continues, and finds that all is done.
    again = onefold.cli.follow(**given, out=tmp_path / "run", stop_after=1, look_every="1s")
    assert again["steps"] == 12


def test_the_summary_is_that_of_the_command(given, run, tmp_path):
    trained = onefold.cli.train(**given, out=tmp_path / "run", max_steps=3, memory_limit=1 << 30)
    line = ["run", given["config"], "--data", given["data"], "--out", tmp_path / "other", "--threads", 2]
    printed = json.loads(run("onefold-train", *line, "--max-steps", 3, "--json").splitlines()[-1])
    assert trained.keys() == printed.keys()
    assert trained["losses"] == printed["losses"] and len(trained["losses"]) == 3


def test_several_ranks_train_together(given, run, tmp_path):
    given.pop("threads")
    together = onefold.cli.train(**given, out=tmp_path / "together", ranks=2, threads=1, timeout=300)
    line = ["launch", "--ranks", 2, "--", "run", given["config"], "--data", given["data"], "--out", tmp_path / "other"]
    printed = json.loads(run("onefold-train", *line, "--threads", 1, "--timeout", 300, "--json").splitlines()[-1])
    assert together["ranks"] == 2 and together["losses"] == printed["losses"]
    evaluated = onefold.cli.evaluate(tmp_path / "together", data=given["data"], ranks=2, threads=1, timeout=300)
    assert evaluated["samples"] == 3000
    with pytest.raises(onefold.OnefoldError, match="already exists") as caught:
        onefold.cli.train(**given, out=tmp_path / "together", ranks=2, threads=1)
    assert "`overwrite=True`" in caught.value.hint


# Errors


def test_errors_are_those_of_the_command_with_the_names_of_keywords(given, tmp_path, capfd):
    onefold.cli.train(**given, out=tmp_path / "run", max_steps=1)
    with pytest.raises(onefold.OnefoldError, match="already exists") as caught:
        onefold.cli.train(**given, out=tmp_path / "run")
    assert "`overwrite=True`" in caught.value.hint and "--" not in str(caught.value)
    with pytest.raises(onefold.StorageError, match=r"none\.toml") as caught:
        onefold.cli.train(tmp_path / "none.toml", data=given["data"], out=tmp_path / "other")
    assert "check the path" in caught.value.hint and isinstance(caught.value, OSError)
    with pytest.raises(onefold.OnefoldError, match="not a run"):
        onefold.cli.evaluate(tmp_path, data=given["data"])
    with pytest.raises(onefold.OnefoldError, match="no checkpoints|checkpoint"):
        onefold.cli.predict(tmp_path / "run", data=given["data"], out=tmp_path / "predictions", checkpoint=7)
    assert not (tmp_path / "predictions").exists()
    # An error is raised and not printed.
    assert capfd.readouterr() == ("", "")


def test_wrong_values_are_refused_with_the_names_of_keywords(given, tmp_path):
    with pytest.raises(onefold.OptionsError, match="for `dedupe`") as caught:
        onefold.cli.train(**given, out=tmp_path / "run", dedupe="exactly")
    assert isinstance(caught.value, ValueError) and "'exact'" in caught.value.hint
    with pytest.raises(onefold.OptionsError, match="`overwrite` cannot be used with `resume`"):
        onefold.cli.train(**given, out=tmp_path / "run", overwrite=True, resume=True)
    with pytest.raises(onefold.OptionsError, match="`max_steps`.*invalid digit"):
        onefold.cli.train(**given, out=tmp_path / "run", max_steps="many")
    with pytest.raises(onefold.OptionsError, match="`warm_start`"):
        onefold.cli.train(**given, out=tmp_path / "run", new_partitions=True)
    with pytest.raises(onefold.OptionsError, match="`ranks`"):
        onefold.cli.train(**given, out=tmp_path / "run", ranks=0)
    assert not list(tmp_path.glob("run*"))


def test_wrong_arguments_are_type_errors(tmp_path):
    with pytest.raises(TypeError, match="train.. has no argument 'max_step'; did you mean 'max_steps'"):
        onefold.cli.train("train.toml", data="data", out=tmp_path, max_step=1)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'out'"):
        onefold.cli.train("train.toml", data="data")
    with pytest.raises(TypeError, match="'threads' takes text, a path or a number, not bool"):
        onefold.cli.train("train.toml", data="data", out=tmp_path, threads=True)
    with pytest.raises(TypeError, match="'out' takes one value, not list"):
        onefold.cli.train("train.toml", data="data", out=["a", "b"])
    with pytest.raises(TypeError, match="'resume' takes True or False, not str"):
        onefold.cli.train("train.toml", data="data", out=tmp_path, resume="yes")
    with pytest.raises(TypeError, match="'progress' takes None or False, not function"):
        onefold.cli.train("train.toml", data="data", out=tmp_path, progress=lambda *_: None)


def test_without_the_program_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onefold_train", None)
    with pytest.raises(onefold.MissingPackageError, match="onefold-train") as caught:
        onefold.cli.train("train.toml", data="data", out=tmp_path)
    assert caught.value.hint == "install it: pip install onefold-train" and isinstance(caught.value, ImportError)


def test_without_torch_the_error_says_what_to_install(train_wheel, torch_libraries, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(train_wheel)
    (torch_libraries / "version.py").write_text("__version__ = '2.10.0'\n")
    monkeypatch.syspath_prepend(torch_libraries.parent)
    with pytest.raises(onefold.MissingPackageError, match="is torch 2.10.0, and onefold-train-libtorch is not") as caught:
        onefold.cli.train("train.toml", data="data", out=tmp_path / "run")
    assert "onefold-train-libtorch==2.11.0`; or `pip install torch==2.11.0`" in caught.value.hint


# Interruption and progress


@pytest.fixture
def endless(given, tmp_path):
    """Returns the arguments of a training that runs until it is stopped."""
    config = tmp_path / "endless.toml"
    config.write_text(CONFIG.replace("epochs = 1", "epochs = 100000"))
    return {**given, "config": config}


def wait_for(found, seconds=600):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def trains(folder):
    """Returns whether a training in this directory has taken steps."""
    return any(file.stat().st_size > 0 for file in folder.glob("**/metrics.jsonl"))


def programs(folder):
    """Returns the processes of the trainer that use this directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"onefold-train" in line and os.fsencode(folder) in line:
            found.append(process.name)
    return found


@pytest.mark.parametrize("ranks", [None, 2])
def test_an_interrupt_ends_the_training_with_a_checkpoint(endless, ranks, tmp_path):
    out = tmp_path / "run"
    options = {**endless, "out": out, "ranks": ranks, "threads": 1, "timeout": 300}

    def interrupt():
        try:
            wait_for(lambda: trains(out))
        finally:
            # Without the signal, the training would not end.
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        onefold.cli.train(**options)
    thread.join()
    assert not programs(out)
    resumed = onefold.cli.train(**options, resume=True, max_steps=1)
    assert resumed["resumed_from_step"] > 0


def test_the_training_ends_with_the_process_that_called_it(endless, tmp_path):
    out = tmp_path / "run"
    call = f"import sys; sys.path[:0] = {sys.path!r}; import onefold; onefold.cli.train({str(endless['config'])!r}, "
    call += f"data={str(endless['data'])!r}, out={str(out)!r}, threads=1)"
    process = subprocess.Popen([sys.executable, "-c", call])
    try:
        wait_for(lambda: trains(out))
        assert programs(out)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not programs(out))
    assert onefold.cli.train(**{**endless, "threads": 1}, out=out, resume=True, max_steps=1)["resumed_from_step"] > 0


@pytest.mark.parametrize("progress", ["None", "False"])
def test_progress_is_shown_on_a_terminal(given, progress, tmp_path):
    call = f"import sys; sys.path[:0] = {sys.path!r}; import onefold\n"
    call += f"for _ in range(2): onefold.cli.train({str(given['config'])!r}, data={str(given['data'])!r}, "
    call += f"out={str(tmp_path / 'run')!r}, progress={progress})"
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", call], stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 600)[0]:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:
            break
    os.close(ours)
    assert process.communicate()[0] == b"" and process.returncode == 1
    shown = shown.decode()
    assert ("training " in shown) == (progress == "None"), shown
    # The second training finds the run of the first one. Python shows the error exactly once.
    assert shown.count("already exists") == 1 and "error: " not in shown
