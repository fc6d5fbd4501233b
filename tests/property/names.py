#!/usr/bin/env python3
"""Prints the names of the property tests in some folders of the workspace, as filters for `cargo test`.

    tests/property/names.py [FOLDER …]

Without folders, prints the names of all property tests. The exit status is 1 if there are none.
"""

import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# A block starts with `proptest! {` and ends with a closing brace on a line at the same indentation.
BLOCK = re.compile(r"^(?P<indentation> *)proptest! \{$(?P<body>.*?)^(?P=indentation)\}$", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"#\[test\]\s+fn (\w+)")


def main(folders):
    """Prints the names on one line; returns the exit status."""
    patterns = [f"{folder.rstrip('/')}/*.rs" for folder in folders] or ["*.rs"]
    command = ["git", "ls-files", "--", *patterns]
    files = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    names = set()
    for name in files.stdout.split():
        for block in BLOCK.finditer((REPOSITORY / name).read_text()):
            names.update(TEST.findall(block["body"]))
    if not names:
        # Without a filter, `cargo test` would run all tests.
        print(f"error: no property test in {', '.join(patterns)}\n  hint: name folders, as `ingest`", file=sys.stderr)
        return 1
    print(" ".join(sorted(names)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
