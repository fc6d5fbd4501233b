#!/usr/bin/env python3
"""Writes the wheel `onefold-train`: the program as package data, and a console script that starts it.

    python/train/wheel.py --program target/release/onefold-train --out target/wheels
    python/train/wheel.py --libtorch --out target/wheels

The second line writes the wheel `onefold-train-libtorch` instead: the libraries in the folder LIBTORCH, for
environments whose torch has another version. It has the version of libtorch and not that of this project.

A wheel is written to a temporary file and renamed. Equal files give equal wheels.
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
LIBTORCH = "onefold_train_libtorch"
TORCH = "2.11.0"
SUMMARY = "Train DLRMs that compute every distinct row once"
README = f"""# {PROGRAM}

The program `{PROGRAM}` trains deep learning recommendation models on the datasets of the package `onefold`. It uses
the libtorch of torch {TORCH}, or that of the package `onefold-train-libtorch`, beside any torch. Install it with one of
the extras `{PROGRAM}[torch]` and `{PROGRAM}[libtorch]`:

    {PROGRAM} run train.toml --data DATASET --out RUN

`{PROGRAM} --help` lists its commands. With `onefold` installed, `onefold.cli.train` does the same from Python.
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--program", type=Path, help="the compiled program")
    which.add_argument("--libtorch", action="store_true", help="write the wheel of libtorch")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the wheel to")
    arguments = parser.parse_args()
    print(libtorch_wheel(arguments.out) if arguments.libtorch else program_wheel(arguments.program, arguments.out))


def program_wheel(path, out):
    """Writes the wheel of the program, and returns its path."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    program = with_run_path(path.read_bytes(), "$ORIGIN")
    third_party = runpy.run_path(str(ROOT / "dist" / "licences.py"))["text"]()
    files = {f"{PACKAGE}/{path.name}": path.read_bytes() for path in sorted((HERE / PACKAGE).glob("*.py"))}
    files[f"{PACKAGE}/{PROGRAM}"] = program
    information = {
        "METADATA": metadata(version),
        "entry_points.txt": f"[console_scripts]\n{PROGRAM} = {PACKAGE}:main\n".encode(),
        "licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        "licenses/THIRD-PARTY.txt": third_party.encode(),
    }
    return write(out, PACKAGE, version, files, information)


def libtorch_wheel(out):
    """Writes the wheel of libtorch, and returns its path."""
    home = Path(os.environ.get("LIBTORCH", ""))
    version = home / "build-version"
    if not version.is_file() or version.read_text().split("+")[0] != TORCH:
        sys.exit(f"error: LIBTORCH={home} is no libtorch {TORCH}\n  hint: take `LIBTORCH=$(trainer/libtorch.sh)`")
    files = {
        f"{LIBTORCH}/__init__.py": b'"""The libraries of libtorch for `onefold-train`."""\n',
        f"{LIBTORCH}/version.py": f'__version__ = "{version.read_text().strip()}"\n'.encode(),
    }
    # `libtorch.so` is a link, which a wheel cannot contain and the program does not need. Two folders deep,
    # libtorch_cpu.so does not find the libraries of CUDA that another torch has installed.
    for path in sorted((home / "lib").iterdir()):
        if not path.is_symlink():
            files[f"{LIBTORCH}/libtorch/lib/{path.name}"] = path.read_bytes()
    described = (
        f"Metadata-Version: 2.4\nName: {LIBTORCH.replace('_', '-')}\nVersion: {TORCH}\n"
        f"Summary: libtorch for onefold-train, beside any torch\nLicense-Expression: BSD-3-Clause\n"
    )
    return write(out, LIBTORCH, TORCH, files, {"METADATA": described.encode()})


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
        f"Requires-Python: >=3.11\n"
        f"Provides-Extra: torch\nRequires-Dist: torch=={TORCH}; extra == 'torch'\n"
        f"Provides-Extra: libtorch\nRequires-Dist: {LIBTORCH.replace('_', '-')}=={TORCH}; extra == 'libtorch'\n"
        f"Description-Content-Type: text/markdown\n\n{README}"
    ).encode()


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write(out, package, version, files, information):
    """Writes a wheel of files and of those that describe it, by name, and returns its path."""
    tag, info = f"py3-none-{platform_tag()}", f"{package}-{version}.dist-info"
    described = f"Wheel-Version: 1.0\nGenerator: onefold\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = files | {f"{info}/{name}": data for name, data in (information | {"WHEEL": described.encode()}).items()}
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{package}-{version}-{tag}.whl"
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # pip makes a file executable if it is executable in the wheel.
            entry.external_attr = (0o100000 | (0o755 if name.endswith(f"/{PROGRAM}") else 0o644)) << 16
            archive.writestr(entry, data)
    partial.replace(wheel)
    return wheel


if __name__ == "__main__":
    main()
