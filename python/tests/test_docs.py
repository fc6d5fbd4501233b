"""The manual: its links, configurations, options and keys, and the tours of README and the tutorials."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
BOOK = PROJECT / "docs" / "src"
PAGES = [PROJECT / "README.md", *sorted(BOOK.rglob("*.md"))]
COMMANDS = BOOK / "reference" / "commands"


def name_of(page):
    return str(page.relative_to(PROJECT))


def program(name):
    return Path(os.environ["ONEFOLD_BINARIES"]) / name


def test_all_links_lead_somewhere():
    done = subprocess.run([sys.executable, PROJECT / "tests" / "links.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_contributing_names_the_libraries_with_unsafe_code():
    text = (PROJECT / "CONTRIBUTING.md").read_text()
    (listed,) = re.findall(r"\*\*Unsafe code\*\* only in the libraries (.*?);", text, re.DOTALL)
    members = tomllib.loads((PROJECT / "Cargo.toml").read_text())["workspace"]["members"]
    libraries = {member: PROJECT / member / "src" / "lib.rs" for member in members}
    libraries = {member: path.read_text() for member, path in libraries.items() if path.is_file()}
    allowed = {member for member, text in libraries.items() if "#![forbid(unsafe_code)]" not in text}
    assert set(re.findall(r"`([^`]+)`", listed)) == allowed


def test_documents_name_the_version_of_datasets():
    source = (PROJECT / "datasets" / "src" / "snapshot" / "mod.rs").read_text()
    (version,) = re.findall(r"^pub\(crate\) const FORMAT_VERSION: u32 = (\d+);", source, re.MULTILINE)
    assert f"| datasets | `format_version` {version} |" in (BOOK / "limits.md").read_text()
    assert f"`tests/data/v{version}` contains" in (PROJECT / "CONTRIBUTING.md").read_text()
    assert (PROJECT / "tests" / "data" / f"v{version}").is_dir()


def test_the_reference_of_json_output_is_what_the_commands_print():
    script = [sys.executable, PROJECT / "docs" / "json_output.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*script, "--binaries", os.environ["ONEFOLD_BINARIES"], "--check"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# Blocks of pages


def blocks_of(page, *languages):
    """The blocks in these languages of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configurations_can_be_parsed(page):
    for text in blocks_of(page, "toml"):
        tomllib.loads(text)


def command_lines(page):
    """The commands of the console and shell blocks of a page, as lists of words from a program of the project on."""
    for text in blocks_of(page, "console", "sh"):
        lines = text.replace("\\\n", " ").splitlines()
        prompts = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
        for line in prompts or lines:
            words = shlex.split(line, comments=True)
            starts = [place for place, word in enumerate(words) if (COMMANDS / f"{word}.md").is_file()]
            if starts:
                yield words[starts[0] :]


def options_of(name, command):
    """The help text of a command of a program, from its reference page."""
    page = (COMMANDS / f"{name}.md").read_text()
    _, _, section = page.partition(f"\n## `{name} {command}`\n")
    assert section, f"{name}.md has no command `{command}`"
    return section.partition("\n## ")[0]


def unknown_options(words):
    """Options of a command line that its program does not have; the command after `--` of `launch` is looked at too."""
    name, command, *rest = words
    if command.startswith("-"):
        return []
    ours, inner = (rest[: rest.index("--")], rest[rest.index("--") + 1 :]) if "--" in rest else (rest, [])
    text = options_of(name, command)
    given = [word.partition("=")[0] for word in ours if re.match(r"--[a-z]", word)]
    found = [option for option in given if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)]
    return found + (unknown_options([name, *inner]) if inner else [])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_have_the_options_that_pages_give_them(page):
    for words in command_lines(page):
        assert not unknown_options(words), " ".join(words)


# Options of programs without a page: onefold-train-tools, a script of the planner, TensorBoard.
OTHERS = {"--collectives", "--most-bytes", "--seeds", "--train", "--logdir"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "benchmarks"], ids=name_of)
def test_options_in_the_text_exist(page):
    option = r"(?<![\w-])--[a-z][a-z0-9-]*"
    known = {name for reference in COMMANDS.glob("onefold-*.md") for name in re.findall(option, reference.read_text())}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    given = {name for code in re.findall(r"`([^`]+)`", text) for name in re.findall(option, code)}
    assert not given - known - OTHERS


# Keys of configurations. Each section is made wrong by an unknown key, and the error lists the known ones.

DATASET = """\
format_version = 1
{top}
[sources]
log = {source}
[samples]
{samples}
[session]
key = ["s"]
{session}
[features]
label = {label}
item = {{ kind = "sparse" }}
{more}
"""
DATASET_DEFAULTS = {
    "top": "",
    "source": '"log.csv"',
    "samples": 'source = "log"',
    "session": 'time = "t"',
    "label": '{ kind = "label" }',
    "more": "",
}
JOIN = '[join]\nsource = "log"\non = ["s"]\ntime = "t"\nwindow = "1m"\n'
DATASET_SECTIONS = {
    "The file": {"top": "unknown_setting = 1"},
    "`[sources]`": {"source": '{ path = "log.csv", unknown_setting = 1 }'},
    "Delta Lake tables": {"source": '{ delta = "log", unknown_setting = 1 }'},
    "`[object_stores]`": {"more": "[object_stores.s3]\nunknown_setting = 1"},
    "`[samples]`": {"samples": "unknown_setting = 1"},
    "`[join]`": {"more": "[join]\nunknown_setting = 1"},
    "`[join.labels]`": {"more": f"{JOIN}[join.labels]\nclicked = {{ unknown_setting = 1 }}"},
    "`[[attributes]]`": {"more": "[[attributes]]\nunknown_setting = 1"},
    "`[sampling]`": {"more": "[sampling]\nunknown_setting = 1"},
    "`[[timelines]]`": {"more": "[[timelines]]\nunknown_setting = 1"},
    "`[checks]`": {"more": "[checks]\nunknown_setting = 1"},
    "`[session]`": {"session": "unknown_setting = 1"},
    "`[partition]`": {"more": "[partition]\nunknown_setting = 1"},
    "`[dataset]`": {"more": "[dataset]\nunknown_setting = 1"},
    "`[features]`": {"label": "{ unknown_setting = 1 }"},
    "`[vocabularies]`": {"more": "[vocabularies.items]\nunknown_setting = 1"},
    "Times": {"session": "time = { unknown_setting = 1 }"},
}

TRAIN = 'format_version = 1\n{top}\n[data]\nlabel = "l"\n{data}\n[model]\nbottom_mlp = [4]\n{model}\n{more}\n'
TRAIN_DEFAULTS = {"top": "", "data": "", "model": "top_mlp = [1]", "more": ""}
TRAIN_SECTIONS = {
    "The file": {"top": "unknown_setting = 1"},
    "`[data]`": {"data": "unknown_setting = 1"},
    "`[data.shuffle]`": {"data": "shuffle = { unknown_setting = 1 }"},
    "`[[tasks]]`": {"more": "[[tasks]]\nunknown_setting = 1"},
    "`[model]`": {"model": "unknown_setting = 1"},
    "`[tables.FEATURE]`": {"more": "[tables.f]\nunknown_setting = 1"},
    **{
        f"`[{name}]`": {"more": f"[{name}]\nunknown_setting = 1"}
        for name in [
            "train",
            "dense",
            "embedding",
            "optimizer",
            "optimizer.tables",
            "optimizer.dense",
            "schedule",
            "schedule.dense",
            "evaluation",
            "early_stopping",
            "checkpoint",
            "exchange",
        ]
    },
}


def keys_on(page, heading):
    """The keys that the tables under a heading of a page list in their first column."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found, f"{page.name} has no heading `{heading}`"
    rows = re.findall(r"^\| (`[^|]*`) \|", found[1], re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def keys_of(*command):
    """The keys that a program lists in its error of an unknown one."""
    done = subprocess.run([program(command[0]), *command[1:]], capture_output=True, text=True)
    found = re.search(r"unknown field `unknown_setting`, expected (.*)", done.stderr)
    assert done.returncode == 1 and found, done.stderr
    return set(re.findall(r"`(\w+)`", found[1]))


@pytest.mark.parametrize("heading", DATASET_SECTIONS)
def test_dataset_toml_lists_every_key(heading, tmp_path):
    path = tmp_path / "dataset.toml"
    path.write_text(DATASET.format(**{**DATASET_DEFAULTS, **DATASET_SECTIONS[heading]}))
    # A source that is a query has this key alone, and is read elsewhere.
    queries = {"query"} if heading == "`[sources]`" else set()
    listed = keys_on(BOOK / "reference" / "dataset-toml.md", heading)
    assert listed == keys_of("onefold-ingest", "check", path) | queries


@pytest.mark.parametrize("heading", TRAIN_SECTIONS)
def test_train_toml_lists_every_key(heading, tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(TRAIN.format(**{**TRAIN_DEFAULTS, **TRAIN_SECTIONS[heading]}))
    command = ["onefold-shard", "tables", path, "--data", tmp_path, "--out", tmp_path / "tables.json"]
    assert keys_on(BOOK / "reference" / "train-toml.md", heading) == keys_of(*command)


# Tours: pages whose commands are run in order, and whose output is compared without figures.


def without_figures(line):
    """A line without its figures, their units and its white space: what is the same on every machine."""
    line = re.sub(r"[-~]?\d[\d,.]*", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"\b[KMGT]iB\b", "B", line)).strip()


def is_printed(expected, printed):
    """Whether all lines are printed in this order. `…` is any number of lines, and at the end of a line its rest."""
    if not expected:
        return not printed
    first, rest = expected[0], expected[1:]
    if first == "…":
        return any(is_printed(rest, printed[start:]) for start in range(len(printed) + 1))
    same = printed and (printed[0].startswith(first[:-1]) if first.endswith("…") else printed[0] == first)
    return bool(same) and is_printed(rest, printed[1:])


def test_lines_are_compared_without_figures():
    lines = lambda text: [without_figures(line) for line in text.splitlines()]  # noqa: E731
    assert lines("rate  1,234.5 samples/s, 2.0 MiB") == lines("rate 7 samples/s, 13.5 KiB")
    assert is_printed(lines("a 1\n…\nb"), lines("a 2\nx\ny\nb"))
    assert is_printed(lines("ids [1, …\nb"), lines("ids [7, 8, 9]\nb"))
    assert not is_printed(lines("a\nb"), lines("a\nx\nb"))
    assert not is_printed(lines("a"), lines("a\nb"))


FIRST_STEPS = "```console\n$ onefold-data fetch movielens-100k --out logs\n…\n```\n"
FIRST_STEPS += "```console\n$ onefold-ingest build logs/dataset.toml --out dataset\n…\n```\n"
# A page, what comes before the part that is run, what comes after it, and what must have been done.
TOURS = [
    ("README.md", "## Five minutes\n", "\n## Results\n", ""),
    ("docs/src/tutorials/data-engineer.md", "## 1. ", "\n## 4. ", ""),
    ("docs/src/tutorials/platform-engineer.md", "## 1. ", "\n## 5. ", FIRST_STEPS),
]


def steps_of(text):
    """The commands of the console blocks of a text, each with the lines that it prints."""
    steps = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
    return steps


@pytest.mark.parametrize("name, begin, end, before", TOURS, ids=[name for name, *_ in TOURS])
def test_a_tour_prints_what_its_page_says(name, begin, end, before, tmp_path):
    text = (PROJECT / name).read_text()
    assert text.count(begin) == 1 and text.count(end) == 1
    steps = steps_of(before + text[text.index(begin) : text.index(end)])
    assert len(steps) >= 4
    for line, expected in steps:
        words = shlex.split(line)
        done = subprocess.run(
            [program(words[0]), *words[1:]], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        printed = [without_figures(line) for line in done.stdout.splitlines()]
        assert is_printed([without_figures(line) for line in expected], printed), f"{line}\n{done.stdout}"


def test_the_readme_is_short():
    text = (PROJECT / "README.md").read_text()
    assert len(text.splitlines()) <= 180 and len(text.split()) <= 1500
