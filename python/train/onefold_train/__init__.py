"""The program `onefold-train`, with the libtorch of an installed torch, or of the package `onefold-train-libtorch`.

`python3 -m onefold_train` prints which one the program uses.
"""

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TORCH = "2.11.0"
"""The version of libtorch that the program was built with; other versions have another binary interface."""

HINT = (
    f"install libtorch alone, beside any torch: `pip install onefold-train-libtorch=={TORCH}`; "
    f"or `pip install torch=={TORCH}`"
)
"""The hint for an error of `program`."""


class Libtorch(NamedTuple):
    """The libtorch that the program uses."""

    package: str
    """`torch` or `onefold-train-libtorch`."""
    version: str
    """The version, with the build after a plus: for the CPU, or for a version of CUDA."""
    libraries: Path
    """The directory of the libraries."""


def main():
    """Replaces this process with the program."""
    try:
        path, libraries = program()
    except RuntimeError as error:
        sys.exit(f"error: {error}\n  hint: {HINT}")
    os.environ["LD_LIBRARY_PATH"] = libraries
    os.execv(path, ["onefold-train", *sys.argv[1:]])


def program():
    """Returns the path of the program, and the LD_LIBRARY_PATH with which it finds the libraries of libtorch."""
    places = [str(libtorch().libraries), os.environ.get("LD_LIBRARY_PATH")]
    return str(Path(__file__).with_name("onefold-train")), ":".join(place for place in places if place)


def libtorch():
    """Returns the first libtorch of the right version. torch is first, because it may contain the part for GPUs."""
    refused = []
    for package, folder in (("torch", "lib"), ("onefold-train-libtorch", "libtorch/lib")):
        try:
            return _of_package(package, folder)
        except RuntimeError as error:
            refused.append(str(error))
    raise RuntimeError(f"onefold-train needs libtorch {TORCH}; {', and '.join(refused)}")


def _of_package(package, folder):
    """Returns the libtorch in an installed package. The package is not imported, because torch takes seconds."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{package} is not installed for {sys.executable}")
    home = Path(spec.submodule_search_locations[0])
    version = _version(home)
    if version.split("+")[0] != TORCH:
        raise RuntimeError(f"`{home}` is {package} {version}")
    libraries = home / folder
    if not (libraries / "libtorch_cpu.so").is_file():
        raise RuntimeError(f"`{libraries}` has no `libtorch_cpu.so`")
    return Libtorch(package, version, libraries)


def _version(home):
    path = home / "version.py"
    try:
        found = re.search(r"""^__version__ = ['"]([^'"]+)""", path.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise RuntimeError(f"`{path}` does not say its version")
    return found[1]
