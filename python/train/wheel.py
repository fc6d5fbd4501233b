#!/usr/bin/env python3
"""Writes the wheel `onefold-train`: the program as package data, and a console script that starts it.

    python/train/wheel.py --program target/release/onefold-train --out target/wheels

The wheel is written to a temporary file and renamed. Equal files give equal wheels.
"""

import argparse
import base64
import hashlib
import os
import platform
import runpy
import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = "onefold_train"
PROGRAM = "onefold-train"
TORCH = "2.11.0"
SUMMARY = "Train DLRMs that compute every distinct row once"
README = f"""# {PROGRAM}

The program `{PROGRAM}` trains deep learning recommendation models on the datasets of the package `onefold`. It uses
the libtorch of torch {TORCH}, which pip installs with it:

    {PROGRAM} run train.toml --data DATASET --out RUN

`{PROGRAM} --help` lists its commands. With `onefold` installed, `onefold.cli.train` does the same from Python.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True, help="the compiled program")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the wheel to")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    program = with_run_path(arguments.program.read_bytes(), "$ORIGIN")
    tag = f"py3-none-{platform_tag()}"
    info = f"{PACKAGE}-{version}.dist-info"
    third_party = runpy.run_path(str(ROOT / "dist" / "licences.py"))["text"]()
    files = {
        f"{PACKAGE}/__init__.py": ((HERE / PACKAGE / "__init__.py").read_bytes(), 0o644),
        f"{PACKAGE}/{PROGRAM}": (program, 0o755),
        f"{info}/METADATA": (metadata(version), 0o644),
        f"{info}/WHEEL": (f"Wheel-Version: 1.0\nGenerator: onefold\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), 0o644),
        f"{info}/entry_points.txt": (f"[console_scripts]\n{PROGRAM} = {PACKAGE}:main\n".encode(), 0o644),
        f"{info}/licenses/LICENSE": ((ROOT / "LICENSE").read_bytes(), 0o644),
        f"{info}/licenses/THIRD-PARTY.txt": (third_party.encode(), 0o644),
    }
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, (data, _) in files.items())
    files[f"{info}/RECORD"] = (f"{record}{info}/RECORD,,\n".encode(), 0o644)
    arguments.out.mkdir(parents=True, exist_ok=True)
    wheel = arguments.out / f"{PACKAGE}-{version}-{tag}.whl"
    write(wheel, files)
    print(wheel)


def platform_tag():
    """Returns the tag of this machine's glibc, because the program may need functions that older versions lack."""
    libc, version = platform.libc_ver()
    if libc != "glibc":
        sys.exit("error: wheels are built on Linux with glibc\n  hint: build them on such a machine, or in a container")
    return f"manylinux_{version.replace('.', '_')}_{platform.machine()}"


def with_run_path(program, run_path):
    """Returns the program with this run path in place of the folder of the libtorch that it was linked with.

    Other machines do not have that folder. The run path is a zero-terminated text, which is replaced by a text of the
    same length.
    """
    libtorch = os.environ.get("LIBTORCH", "")
    folder = os.fsencode(libtorch) + b"/lib"
    if b"\0" + folder + b"\0" not in program:
        sys.exit(
            f"error: the program was not linked with the libtorch of LIBTORCH={libtorch}\n"
            "  hint: build it with this LIBTORCH (`make wheel` does)"
        )
    if len(run_path) > len(folder):
        sys.exit(f"error: {libtorch} is shorter than {run_path}\n  hint: move libtorch to a folder with a longer path")
    return program.replace(b"\0" + folder + b"\0", b"\0" + run_path.encode().ljust(len(folder), b"\0") + b"\0")


def metadata(version):
    return (
        f"Metadata-Version: 2.4\nName: {PROGRAM}\nVersion: {version}\nSummary: {SUMMARY}\n"
        f"License-Expression: Apache-2.0\nLicense-File: LICENSE\nLicense-File: THIRD-PARTY.txt\n"
        f"Requires-Python: >=3.11\nRequires-Dist: torch=={TORCH}\nDescription-Content-Type: text/markdown\n\n{README}"
    ).encode()


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write(wheel, files):
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (data, mode) in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # pip makes a file executable if it is executable in the wheel.
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, data)
    partial.replace(wheel)


if __name__ == "__main__":
    main()
