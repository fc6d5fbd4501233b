"""Runs every block of the manual's pages about Python in order, and compares the output with the pages."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest
from scripts import script

import onefold

PROJECT = Path(__file__).parents[2]
PINS = PROJECT / "sharding" / "scripts" / "torchrec.txt"


def blocks_of(page):
    """Returns the blocks of a page: their language, their text, and the output if a block of text follows."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    blocks = []
    for language, text in found:
        if language == "text":
            blocks[-1] = (*blocks[-1][:2], text)
        else:
            blocks.append((language, text, None))
    return blocks


PAGES = ["tutorials/ml-engineer.md", "reference/python.md", "how-to/other-trainers.md"]
BLOCKS = [block for page in PAGES for block in blocks_of(PROJECT / "docs" / "src" / page)]
FIRST_WITH_TORCH = next(i for i, (language, text, _) in enumerate(BLOCKS) if language == "python" and "torch" in text)
LOGS_AND_DATASET = next(i for i, (language, text, _) in enumerate(BLOCKS) if "onefold.build(" in text)


class Reader:
    """A reader who follows the pages from their beginning."""

    def __init__(self, folder):
        self.folder, self.names, self.done = folder, {}, 0

    def follow(self, last):
        """Runs the remaining blocks up to number `last`."""
        while self.done <= last:
            language, text, output = BLOCKS[self.done]
            self.done += 1
            printed = self.run_python(text) if language == "python" else self.run_shell(text)
            if output is not None:
                assert printed == output

    def run_python(self, text):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, "tutorial", "exec"), self.names)
        return printed.getvalue()

    def run_shell(self, text):
        for line in text.splitlines():
            program, *arguments = line.split()
            if program != "pip":
                subprocess.run([sys.executable, script(program), *arguments], check=True)
            elif "==" in line:
                # These are the packages of `make test-torchrec`, but for GPUs. They are too large to install in a
                # test.
                pins = PINS.read_text().replace("fbgemm-gpu-cpu", "fbgemm-gpu").split()
                assert set(arguments[1:]) <= set(pins)
            else:
                self.install(line)
        return ""

    def install(self, line):
        """Runs the page's installation in an environment that has only numpy, and checks that the package works."""
        wheels = Path(os.environ["ONEFOLD_WHEELS"])
        (self.folder / "target").mkdir()
        (self.folder / "target" / "wheels").symlink_to(wheels)
        venv.create(self.folder / "venv", with_pip=True)
        packages = self.folder / "packages"
        packages.mkdir()
        for found in Path(numpy.__file__).parents[1].glob("numpy*"):
            (packages / found.name).symlink_to(found)
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        environment["PATH"] = f"{self.folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = line + " --quiet --disable-pip-version-check && python -c 'import onefold' && onefold-read --version"
        done = subprocess.run(command, shell=True, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"onefold-read {onefold.__version__}\n"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    before = Path.cwd()
    os.chdir(folder)
    yield Reader(folder)
    os.chdir(before)


@pytest.mark.parametrize("block", range(FIRST_WITH_TORCH))
def test_a_block(reader, block):
    reader.follow(block)


def test_the_block_that_trains(reader, trainer):
    reader.follow(LOGS_AND_DATASET)
    (text,) = (text for _, text, _ in BLOCKS if "onefold.cli.train(" in text)
    assert reader.run_python(text).startswith("20,001 samples, normalized entropy 0.")
    assert 0.7 < reader.names["normalized_entropy"] < 0.92
    # A reader of both pages trains into the same folder.
    shutil.rmtree("run")


@pytest.mark.torch
@pytest.mark.parametrize("block", range(FIRST_WITH_TORCH, len(BLOCKS)))
def test_a_block_with_torch(reader, block, trainer):
    reader.follow(block)
    if "normalized_entropy" in BLOCKS[block][1]:
        assert 0.7 < reader.names["normalized_entropy"] < 0.92
