#!/usr/bin/env python3
"""Builds the packages for this machine's glibc and newer ones: three wheels, and a tarball of the programs.

    LIBTORCH=$(trainer/libtorch.sh) dist/dist.py --build target/dist --out target/packages

Everything is compiled in the folder `--build`, with options that keep the paths of this machine out of the programs.
"""

import argparse
import gzip
import io
import os
import platform
import runpy
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import licences
import paths

ROOT = paths.ROOT
PROGRAMS = [
    "onefold",
    "onefold-data",
    "onefold-ingest",
    "onefold-cluster",
    "onefold-read",
    "onefold-serve",
    "onefold-shard",
    "onefold-train",
]
# The folder in which each shell looks for completions, and the name of the file for a program.
COMPLETIONS = {
    "bash": "share/bash-completion/completions/{}",
    "zsh": "share/zsh/site-functions/_{}",
    "fish": "share/fish/vendor_completions.d/{}.fish",
}
# The folder in which the program that is linked with libtorch looks for it.
RUN_PATH = "$ORIGIN/../lib"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="the folder in which the programs are compiled")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the packages to")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    os.environ["CARGO_TARGET_DIR"] = str(arguments.build.absolute())
    os.environ.update(paths.compiler_settings())
    build(PROGRAMS)
    programs = arguments.build.absolute() / "release"
    # Packages of other versions would be taken for these ones by the patterns of names in the manual.
    for old in [*out.glob("onefold-[0-9]*.tar.gz"), *out.glob("onefold_train-[0-9]*.whl")]:
        old.unlink()
    wheels = [
        printed(ROOT / "python" / "wheel.sh", out, "--features", "delta"),
        printed(ROOT / "python" / "train" / "wheel.py", "--program", programs / "onefold-train", "--out", out),
        printed(ROOT / "python" / "train" / "wheel.py", "--libtorch", "--out", out),
    ]
    packages = [*map(Path, wheels), tarball(programs, PROGRAMS, out)]
    paths.check(packages)
    print("\n".join(map(str, packages)))


def build(programs):
    """Compiles the programs. `--workspace` gives dependencies the same features as in the wheel."""
    command = [os.environ.get("CARGO", "cargo"), "build", "--locked", "--release", "--workspace"]
    command += ["--features", "onefold-ingest/delta"]
    subprocess.run([*command, *(f"--bin={program}" for program in programs)], cwd=ROOT, check=True)


def printed(*command):
    """Returns the output of a command, which is one line."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def package_name():
    """Returns the name of the tarball and of the folder in it, without an extension."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    libc, release = platform.libc_ver()
    if libc != "glibc":
        sys.exit("error: packages are built on Linux with glibc\n  hint: build them on such a machine, or in a container")
    return f"onefold-{version}-{platform.machine()}-linux-gnu{release}"


def contents(programs, names):
    """Yields the files of the tarball as name, bytes and mode, and its links as name and target.

    `programs` is the folder of the compiled programs. `names` are the programs that the tarball contains.
    """
    with_run_path = runpy.run_path(str(ROOT / "python" / "train" / "wheel.py"))["with_run_path"]
    for name in names:
        program = (programs / name).read_bytes()
        yield f"bin/{name}", with_run_path(program, RUN_PATH) if name == "onefold-train" else program, 0o755
    # With the manual, because README.md links to its pages.
    for path in [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs" / "src").rglob("*.md"))]:
        yield str(path.relative_to(ROOT)), path.read_bytes(), 0o644
    yield "THIRD-PARTY.txt", licences.text().encode(), 0o644
    yield "share/onefold/libtorch.sh", (ROOT / "trainer" / "libtorch.sh").read_bytes(), 0o755
    for folder in ("systemd", "kubernetes"):
        for path in sorted((ROOT / "dist" / folder).iterdir()):
            yield f"share/onefold/{folder}/{path.name}", path.read_bytes(), 0o644
    for shell, place in COMPLETIONS.items():
        script = subprocess.run([programs / "onefold", "completions", shell], stdout=subprocess.PIPE, check=True)
        yield place.format("onefold"), script.stdout, 0o644
        # bash and fish load the file that has the name of the program. zsh reads the names of programs from the file.
        for name in names if shell != "zsh" else []:
            if name != "onefold":
                yield place.format(name), place.format("onefold").rpartition("/")[2]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([programs / "onefold", "man", folder], check=True)
        for path in sorted(Path(folder).iterdir()):
            yield f"share/man/man1/{path.name}", path.read_bytes(), 0o644


def tarball(programs, names, out, level=9):
    """Writes the tarball, and returns its path. Equal files give equal tarballs. A rename creates it atomically."""
    out.mkdir(parents=True, exist_ok=True)
    top = package_name()
    path = out / f"{top}.tar.gz"
    partial = path.with_suffix(".partial")
    with (
        open(partial, "wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=level, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content, *mode in contents(programs, names):
            entry = tarfile.TarInfo(f"{top}/{name}")
            if mode:
                entry.size, entry.mode = len(content), mode[0]
                archive.addfile(entry, io.BytesIO(content))
            else:
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
    partial.replace(path)
    return path


if __name__ == "__main__":
    main()
