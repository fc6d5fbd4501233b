#!/usr/bin/env python3
"""Checks that the tests compile dependencies with the same features as the programs.

Where a dependency of tests enables a further feature of a crate, `make test` would compile this crate and all crates
that depend on it once more. The exit status is 1 if there is such a crate.
"""

import os
import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def features(edges):
    """Returns the sets of features with which each package is compiled, along these edges of the dependency graph."""
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "tree", "--locked", "--workspace", "--prefix", "none", "--format", "{p}|{f}", "--edges", edges]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout
    packages = {}
    for line in output.splitlines():
        package, _, enabled = line.removesuffix(" (*)").partition("|")
        # Members have their folder behind the version.
        packages.setdefault(re.sub(r" \(.*", "", package), set()).add(enabled)
    return packages


def main():
    """Compares the two graphs; returns the exit status."""
    programs, tests = features("normal,build"), features("normal,build,dev")
    differing = {
        package: (enabled, tests[package])
        for package, enabled in programs.items()
        # The only member with a feature for tests has no dependants but the demo.
        if enabled != tests[package] and not package.startswith("onefold-tests ")
    }
    for package, (enabled, for_tests) in sorted(differing.items()):
        print(f"error: {package} has the features {sorted(enabled)} in programs and {sorted(for_tests)} in tests")
    if differing:
        print("  hint: name the features of the tests in tests/features/Cargo.toml")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
