#!/usr/bin/env python3
"""Checks the links of all Markdown files: relative targets and their anchors exist, and the book is complete.

    tests/links.py

Links to other sites are not followed. Pages of the book (`docs/src`) link to pages of the book alone, because mdBook
renders nothing else; they name other files of the repository in backticks. `SUMMARY.md` lists every page once.
"""

import os
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
BOOK = REPOSITORY / "docs" / "src"
# Folders that hold no pages of this repository.
SKIPPED = {"target", "shared", "book", "node_modules"}

FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^\s()<>]*)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def pages_below(folder):
    """All Markdown files, without those of hidden and skipped folders."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
        yield from (pathlib.Path(root) / name for name in sorted(files) if name.endswith(".md"))


def anchors_of(page):
    """The anchors of a page's headings, as GitHub and mdBook make them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        anchor = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text))
        number = 0
        while anchor + (f"-{number}" if number else "") in found:
            number += 1
        found.add(anchor + (f"-{number}" if number else ""))
    return found


def links_of(page):
    """The targets of a page's links, and the numbers of their lines."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])  # noqa: E731
    text = FENCE.sub(blank, page.read_text())
    # A link's label may be code; its target is not.
    text = CODE.sub(lambda match: "x" + blank(match)[1:], text)
    for pattern in (LINK, DEFINITION):
        for match in pattern.finditer(text):
            yield match[1], text.count("\n", 0, match.start()) + 1


def problem_with(page, target, anchors):
    """Returns the problem of a link, or None."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    if not found.exists():
        return f"there is no `{path}`"
    if not found.is_relative_to(REPOSITORY):
        return f"`{path}` is outside the repository"
    if page.is_relative_to(BOOK) and not (found.is_relative_to(BOOK) and found.is_file()):
        return f"`{path}` is no page of the book: name the file in backticks"
    if not anchor:
        return None
    if found.suffix != ".md":
        return None if re.fullmatch(r"L\d+(-L\d+)?", anchor) else f"`{path}` has no anchors"
    if found not in anchors:
        anchors[found] = anchors_of(found)
    return None if anchor in anchors[found] else f"`{path or page.name}` has no heading `#{anchor}`"


def problems():
    """All problems, each with its place."""
    anchors = {}
    for page in pages_below(REPOSITORY):
        for target, line in links_of(page):
            if problem := problem_with(page, target, anchors):
                yield f"{page.relative_to(REPOSITORY)}:{line}: {problem}"
    summary = BOOK / "SUMMARY.md"
    listed = [(summary.parent / target).resolve() for target, _ in links_of(summary)]
    for page in pages_below(BOOK):
        times = listed.count(page)
        if page != summary and times != 1:
            yield f"docs/src/SUMMARY.md lists {page.relative_to(BOOK)} {times} times"


def main():
    found = list(problems())
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
