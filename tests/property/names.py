#!/usr/bin/env python3
"""Prints the names of all property tests of the workspace, as filters for `cargo test`."""

import pathlib
import re
import subprocess

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# A block starts with `proptest! {` and ends with a closing brace on a line at the same indentation.
BLOCK = re.compile(r"^(?P<indentation> *)proptest! \{$(?P<body>.*?)^(?P=indentation)\}$", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"#\[test\]\s+fn (\w+)")


def main():
    """Prints the names on one line."""
    files = subprocess.run(["git", "ls-files", "*.rs"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    names = set()
    for name in files.stdout.split():
        for block in BLOCK.finditer((REPOSITORY / name).read_text()):
            names.update(TEST.findall(block["body"]))
    print(" ".join(sorted(names)))


if __name__ == "__main__":
    main()
