#!/usr/bin/env python3
"""Prints the licences of the crates in the programs, which packages must contain.

    dist/licences.py > THIRD-PARTY.txt
"""

import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "The programs of Onefold contain the following crates, whose licences are below.\n"
# Names of files such as `LICENSE-MIT`, `license.txt`, `COPYING` and `NOTICE.txt`, but not of source files.
NAME = re.compile(r"(licen[cs]es?|copying|copyright|notices?|unlicense)([-_.][\w.-]+)?", re.IGNORECASE)
SOURCE = {".rs", ".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".toml", ".yml", ".yaml", ".json", ".html", ".hbs"}


def crates():
    """Returns the crates of others that the workspace is linked with, as Cargo describes them."""
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--locked", "--format-version=1"]
    command.append("--filter-platform=x86_64-unknown-linux-gnu")
    read = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    nodes = {node["id"]: node for node in read["resolve"]["nodes"]}
    waiting, linked = list(read["workspace_members"]), set()
    while waiting:
        crate = waiting.pop()
        if crate not in linked:
            linked.add(crate)
            # The kind is null for what is linked, and "dev" or "build" for what is not.
            waiting += [
                found["pkg"]
                for found in nodes[crate]["deps"]
                if any(kind["kind"] is None for kind in found["dep_kinds"])
            ]
    others = [package for package in read["packages"] if package["id"] in linked and package["source"]]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def texts_of(folder):
    """Returns the different texts of the licence files in a crate, also of C libraries that it contains."""
    files = sorted(path for path in folder.rglob("*") if NAME.fullmatch(path.name) and path.suffix not in SOURCE)
    return list(dict.fromkeys(path.read_text(errors="replace").strip() for path in files if path.is_file()))


def text():
    """Returns a list of the crates, and behind it each text with the crates that have it."""
    found = crates()
    owners = {}
    for crate in found:
        for licence in texts_of(Path(crate["manifest_path"]).parent):
            # Many copies of a licence differ only in spaces and line ends.
            _, names = owners.setdefault(" ".join(licence.split()), (licence, {}))
            names[f"{crate['name']} {crate['version']}"] = None
    listed = (f"{crate['name']} {crate['version']}: {crate['license'] or 'see below'}" for crate in found)
    parts = [HEADER, *listed]
    for licence, names in owners.values():
        parts += ["", "-" * 80, ", ".join(names), "-" * 80, "", licence]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(text(), end="")
