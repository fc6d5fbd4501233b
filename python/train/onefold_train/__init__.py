"""The program `onefold-train`, with the libtorch of an installed torch."""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

TORCH = "2.11.0"
"""The version of torch whose libtorch the program was built with; other versions have another binary interface."""

HINT = f"install it with `pip install torch=={TORCH}`"
"""The hint for an error of `program`."""


def main():
    """Replaces this process with the program."""
    try:
        path, libraries = program()
    except RuntimeError as error:
        sys.exit(f"error: {error}\n  hint: {HINT}")
    os.environ["LD_LIBRARY_PATH"] = libraries
    os.execv(path, ["onefold-train", *sys.argv[1:]])


def program():
    """Returns the path of the program, and the LD_LIBRARY_PATH with which it finds the libraries of torch."""
    places = [str(libtorch()), os.environ.get("LD_LIBRARY_PATH")]
    return str(Path(__file__).with_name("onefold-train")), ":".join(place for place in places if place)


def libtorch():
    """Returns the directory of libtorch's libraries. torch is not imported, because that takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"onefold-train needs torch {TORCH}, and torch is not installed for {sys.executable}")
    torch = Path(spec.submodule_search_locations[0])
    version = _version(torch)
    # The part after the plus is the build: for the CPU, or for a version of CUDA.
    if version.split("+")[0] != TORCH:
        raise RuntimeError(f"onefold-train needs torch {TORCH}, and `{torch}` is torch {version}")
    libraries = torch / "lib"
    if not (libraries / "libtorch_cpu.so").is_file():
        raise RuntimeError(f"onefold-train needs torch {TORCH}, and `{libraries}` has no `libtorch_cpu.so`")
    return libraries


def _version(torch):
    path = torch / "version.py"
    try:
        found = re.search(r"""^__version__ = ['"]([^'"]+)""", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise RuntimeError(f"onefold-train needs torch {TORCH}, and `{path}` does not say its version")
    return found[1]
