#!/usr/bin/env python3
"""Writes the reference pages of the commands, which are what the programs print for `--help`.

    docs/commands.py --binaries target/release            writes docs/src/reference/commands/*.md
    docs/commands.py --binaries target/release --check    fails if a page is not what the program prints
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

PAGES = pathlib.Path(__file__).resolve().parent / "src" / "reference" / "commands"
PROGRAMS = [
    "onefold-data",
    "onefold-ingest",
    "onefold-cluster",
    "onefold-read",
    "onefold-serve",
    "onefold-shard",
    "onefold-train",
]


def help_of(binary, command):
    """Returns the `--help` of a command. The output is not a terminal, whose width would change it."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [binary, *command, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )
    if done.returncode != 0:
        sys.exit(f"error: `{binary.name} {' '.join(command)} --help` failed\n{done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def commands_in(text):
    """The names of the commands that a help text lists, in its order."""
    listed = re.search(r"^Commands:\n((?:  .*\n|\n(?=  ))*)", text + "\n", re.MULTILINE)
    names = re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else []
    return [name for name in names if name != "help"]


def sections_of(binary, command=()):
    """The sections of a page: a heading and the help text of the program, and of its commands in their order."""
    text = help_of(binary, command)
    heading = "##" if command else "#"
    yield f"{heading} `{' '.join([binary.name, *command])}`\n\n```text\n{text}\n```\n"
    for name in commands_in(text):
        yield from sections_of(binary, (*command, name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="the folder of the programs")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    arguments = parser.parse_args()
    stale = []
    for program in PROGRAMS:
        page = PAGES / f"{program}.md"
        text = "\n".join(sections_of(arguments.binaries.absolute() / program))
        if arguments.check:
            stale += [] if page.is_file() and page.read_text() == text else [page.name]
        else:
            page.write_text(text)
    if stale:
        sys.exit(
            f"error: not what the programs print: {', '.join(stale)}\n"
            "  hint: run `docs/commands.py --binaries target/release` after `make build`, and commit the pages"
        )


if __name__ == "__main__":
    main()
