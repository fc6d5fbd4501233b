#!/usr/bin/env python3
"""Looks for paths of this machine in packages, which are of no use on other machines.

    dist/paths.py PACKAGE…          wheels, tarballs or programs; fails if one of them contains such a path

`dist.py` removes the paths when it compiles, and calls this script at the end.
"""

import os
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_folders():
    """Returns the folders from which compilers read files, with replacement names that are equal on all machines.

    A folder inside another one comes later, because compilers use the last prefix that matches.
    """
    home = Path.home()
    named = {
        "/onefold": ROOT,
        "/target": os.environ.get("CARGO_TARGET_DIR", ROOT / "target"),
        "/cargo": os.environ.get("CARGO_HOME", home / ".cargo"),
        "/rust": os.environ.get("RUSTUP_HOME", home / ".rustup"),
        "/libtorch": os.environ.get("LIBTORCH", ROOT / "target" / "libtorch"),
    }
    both = {}
    for name, folder in named.items():
        # Programs may write a path as it was given, or with its links resolved.
        both[os.path.abspath(folder)] = name
        both[os.path.realpath(folder)] = name
    return dict(sorted(both.items()))


def unwanted():
    """Returns the paths that no package may contain: the folders of the build, and everything in the home directory."""
    home = Path.home()
    # The home directory itself is not searched for, because programs may contain its name for other reasons (`/root`).
    there = [] if home == Path("/") or not home.is_dir() else [str(path) for path in home.iterdir()]
    return sorted({*build_folders(), *there})


def compiler_settings():
    """Returns environment variables with which Cargo and C compilers replace the paths of `build_folders`.

    These variables override `rustflags` and `CFLAGS` in `.cargo/config.toml`, so they repeat those flags.
    """
    folders = build_folders()
    for folder in folders:
        if any(character.isspace() or character == "=" for character in folder):
            sys.exit(f"error: `{folder}` contains a space or `=`\n  hint: build in a folder with another path")
    config = tomllib.loads((ROOT / ".cargo" / "config.toml").read_text())
    (target,) = config["target"].values()
    rust = os.environ["RUSTFLAGS"].split() if "RUSTFLAGS" in os.environ else target["rustflags"]
    rust = [*rust, *(f"--remap-path-prefix={folder}={name}" for folder, name in folders.items())]
    maps = [f"-ffile-prefix-map={folder}={name}" for folder, name in folders.items()]
    return {
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(rust),
        "CFLAGS": " ".join([os.environ.get("CFLAGS", config["env"]["CFLAGS"]), *maps]),
        "CXXFLAGS": " ".join([os.environ.get("CXXFLAGS", ""), *maps]).strip(),
    }


def members(package):
    """Yields the names and contents of the files in a package. A program counts as a package with one file."""
    if Path(package).suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            yield from ((name, archive.read(name)) for name in archive.namelist())
    elif Path(package).suffix == ".gz":
        with tarfile.open(package) as archive:
            yield from ((member.name, archive.extractfile(member).read()) for member in archive if member.isfile())
    else:
        yield Path(package).name, Path(package).read_bytes()


def found(package, paths):
    """Yields a line for each file of a package that contains one of the paths."""
    for name, content in members(package):
        for path in paths:
            place = content.find(os.fsencode(path))
            if place >= 0:
                excerpt = content[place : place + 120].split(b"\0")[0].decode(errors="replace")
                yield f"{Path(package).name}: {name} contains {path}: {excerpt!r}"


def check(packages):
    """Ends with an error if a package contains a path of this machine."""
    lines = [line for package in packages for line in found(package, unwanted())]
    if lines:
        hint = "pass the compiler that wrote it `--remap-path-prefix` or `-ffile-prefix-map` (dist/paths.py)"
        sys.exit("error: packages contain paths of this machine\n{}\n  hint: {}".format("\n".join(lines), hint))


if __name__ == "__main__":
    check(sys.argv[1:])
