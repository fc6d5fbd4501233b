#!/usr/bin/env python3
"""Checks that tests and the Python package compile each crate with the same features as the programs.

Otherwise, `make test` would compile a crate with other features, and all crates that depend on it, once more. The exit
status is 1 if there is such a crate.
"""

import os
import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def features(edges, *selection):
    """Returns the sets of features with which each package is compiled, along these edges of the dependency graph.

    The graph begins at the packages of `selection`, which are arguments of Cargo.
    """
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "tree", "--locked", *selection, "--prefix", "none", "--format", "{p}|{f}", "--edges", edges]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout
    packages = {}
    for line in output.splitlines():
        package, _, enabled = line.removesuffix(" (*)").partition("|")
        # Members have their folder behind the version.
        packages.setdefault(re.sub(r" \(.*", "", package), set()).add(enabled)
    return packages


def main():
    """Compares the two graphs; returns the exit status."""
    programs = features("normal,build", "--workspace")
    others = {
        "tests": (features("normal,build,dev", "--workspace"), "tests/features/Cargo.toml"),
        "the Python package": (features("normal,build", "--package", "onefold-python"), "python/Cargo.toml"),
    }
    status = 0
    for name, (packages, manifest) in others.items():
        differing = {
            package: enabled
            for package, enabled in packages.items()
            # The only member with a feature for tests has no dependants but the demo.
            if not enabled <= programs.get(package, enabled) and not package.startswith("onefold-tests ")
        }
        for package, enabled in sorted(differing.items()):
            print(f"error: {package} has the features {sorted(programs[package])} in programs and {sorted(enabled)} in {name}")
        if differing:
            print(f"  hint: name the missing features in {manifest}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
