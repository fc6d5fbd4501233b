"""The wheel `onefold-train`: the trainer, with the libtorch of an installed torch or of a package of its own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path


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
        assert done.stderr.endswith("`pip install onefold-train-libtorch==2.11.0`; or `pip install torch==2.11.0`\n")
        return done.stderr

    assert refused(None).startswith("error: onefold-train needs libtorch 2.11.0; torch is not installed for ")
    (torch_libraries / "version.py").write_text("__version__ = '2.10.0'\n")
    assert f"`{torch_libraries}` is torch 2.10.0" in refused(torch_libraries.parent)
    (torch_libraries / "version.py").write_text("__version__ = '2.11.0'\n")
    (torch_libraries / "lib").unlink()
    assert "has no `libtorch_cpu.so`" in refused(torch_libraries.parent)
    (torch_libraries / "version.py").unlink()
    assert "does not say its version" in refused(torch_libraries.parent)


def test_libtorch_comes_from_torch_or_else_from_its_own_package(train_wheel, torch_libraries, tmp_path):
    own = tmp_path / "own" / "onefold_train_libtorch"
    (own / "libtorch").mkdir(parents=True)
    (own / "__init__.py").touch()
    (own / "version.py").write_text('__version__ = "2.11.0+cu130"\n')
    (own / "libtorch" / "lib").symlink_to(torch_libraries / "lib")
    packages = os.pathsep.join(map(str, [torch_libraries.parent, own.parent]))

    def used():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(train_wheel), packages])}
        command = [sys.executable, "-S", "-P", "-m", "onefold_train"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert used() == f"libtorch 2.11.0+cu130 of torch, in {torch_libraries / 'lib'}\n"
    (torch_libraries / "version.py").write_text("__version__ = '2.14.1'\n")
    assert used() == f"libtorch 2.11.0+cu130 of onefold-train-libtorch, in {own / 'libtorch' / 'lib'}\n"
    shown = start(train_wheel, "--version", packages=packages)
    assert shown.returncode == 0 and shown.stdout.startswith("onefold-train "), shown.stderr


def test_the_wheel_of_libtorch_contains_its_libraries_without_links(tmp_path):
    home = tmp_path / "libtorch"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libtorch_cpu.so").write_text("library")
    (home / "lib" / "libtorch.so").symlink_to("libtorch_cpu.so")
    (home / "build-version").write_text("2.11.0+cu130\n")
    builder = Path(__file__).parents[1] / "train" / "wheel.py"

    def build():
        command = [sys.executable, builder, "--libtorch", "--out", tmp_path / "wheels"]
        return subprocess.run(command, env={**os.environ, "LIBTORCH": str(home)}, capture_output=True, text=True)

    with zipfile.ZipFile(build().stdout.strip()) as wheel:
        names = [name.removeprefix("onefold_train_libtorch/") for name in wheel.namelist() if ".dist-info/" not in name]
        assert names == ["__init__.py", "version.py", "libtorch/lib/libtorch_cpu.so"]
        assert wheel.read("onefold_train_libtorch/version.py") == b'__version__ = "2.11.0+cu130"\n'
    (home / "build-version").write_text("2.10.0\n")
    assert "is no libtorch 2.11.0" in build().stderr
