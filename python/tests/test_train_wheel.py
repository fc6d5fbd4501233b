"""The wheel `onefold-train`: the trainer, with the libtorch of an installed torch."""

import os
import subprocess
import sys


def start(installed, *arguments, packages=None):
    path = os.pathsep.join(map(str, filter(None, [installed, packages])))
    # The site packages of the tests, which may contain torch, are not used.
    environment = {**os.environ, "PYTHONPATH": path, "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-S", "-P", installed / "bin" / "onefold-train", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_program_runs_with_the_libraries_of_torch(train_wheel, torch_libraries):
    shown = start(train_wheel, "--help", packages=torch_libraries.parent)
    assert shown.returncode == 0 and shown.stdout.startswith("Train DLRMs"), shown.stderr
    wrong = start(train_wheel, "run", "none.toml", "--data", "none", "--out", "none", packages=torch_libraries.parent)
    assert wrong.returncode == 1 and "none.toml" in wrong.stderr


def test_the_program_knows_no_folder_of_the_machine_that_built_it(train_wheel):
    program = (train_wheel / "onefold_train" / "onefold-train").read_bytes()
    assert b"\0" + os.fsencode(os.environ["LIBTORCH"]) + b"/lib\0" not in program


def test_another_torch_or_none_is_refused(train_wheel, torch_libraries):
    def refused(packages):
        done = start(train_wheel, "--help", packages=packages)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.endswith("\n  hint: install it with `pip install torch==2.11.0`\n")
        return done.stderr

    assert "torch is not installed for " in refused(None)
    (torch_libraries / "version.py").write_text("__version__ = '2.10.0'\n")
    assert f"`{torch_libraries}` is torch 2.10.0" in refused(torch_libraries.parent)
    (torch_libraries / "version.py").write_text("__version__ = '2.11.0'\n")
    (torch_libraries / "lib").unlink()
    assert "has no `libtorch_cpu.so`" in refused(torch_libraries.parent)
    (torch_libraries / "version.py").unlink()
    assert "does not say its version" in refused(torch_libraries.parent)
