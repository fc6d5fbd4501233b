#!/usr/bin/env python3
"""Compares the reference of the JSON output with what the commands print, or adds to it what it lacks.

    docs/json_output.py --binaries target/release            adds keys to docs/src/reference/json.md
    docs/json_output.py --binaries target/release --check    fails if the page is not true

Every command runs on a small dataset. The page has a row for each key that a command prints, with the kinds of its
values and its meaning. Meanings are written by hand, and so are kinds that do not occur with this dataset: the kinds of
a row must include those that are printed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

import commands

PAGE = pathlib.Path(__file__).resolve().parent / "src" / "reference" / "json.md"

DATASET_CONFIG = """\
format_version = 1
keep = ["request"]
[sources]
requests = { path = "requests*.jsonl", schema = { time = "TIMESTAMP" } }
events = { path = "events*.jsonl", schema = { event_time = "TIMESTAMP" } }
[samples]
source = "requests"
key = ["request"]
[join]
source = "events"
on = ["request"]
time = "event_time"
window = "3d"
[join.labels]
clicked = { when = "kind = 'click'" }
[session]
user = "user"
gap = "30m"
time = "time"
[partition]
by = "day"
[features]
clicked = { kind = "label" }
liked = { kind = "label" }
age = { kind = "dense" }
user = { kind = "sparse", group = "user" }
place = { kind = "sparse", ids = "hash" }
history = { kind = "sequence", group = "user" }
item = { kind = "sparse", vocabulary = "frequency" }
"""
PARTS_CONFIG = """\
format_version = 1
[sources]
log = { path = "requests.jsonl", schema = { time = "TIMESTAMP" } }
[samples]
source = "log"
[session]
user = "user"
gap = "30m"
time = "time"
[features]
liked = { kind = "label" }
age = { kind = "dense" }
user = { kind = "sparse" }
"""
TRAIN_CONFIG = """\
format_version = 1
[data]
label = "clicked"
train = "date=2024-06-01"
eval = "date=2024-06-02"
[train]
batch_size = 32
[model]
bottom_mlp = [8, 4]
top_mlp = [8, 1]
[embedding]
dim = 4
rows = 1000
evict_after = 1
[tables.place]
ids = "hashed"
[optimizer.tables]
learning_rate = 0.1
"""
TASKS = """\
[evaluation]
segments = ["user"]
group = "user"
[[tasks]]
label = "clicked"
[[tasks]]
label = "liked"
loss = "mse"
"""

# The commands in the order in which they run. `&` starts a process that runs until all commands have run,
# and `!` marks a command that fails and prints an object nevertheless.
LINES = """\
onefold-data fetch movielens-100k --out movielens
onefold-data import ebnerd --from ebnerd --out news
onefold-data generate --workload rm3 --samples 500 --seed 1 --out generated
onefold-ingest init requests.jsonl --out first.toml
onefold-ingest check dataset.toml
! onefold-ingest check wrong.toml
onefold-ingest build dataset.toml --out whole
onefold-ingest build dataset.toml --out dataset --partition date=2024-06-01
onefold-ingest build dataset.toml --out grouped --groups auto
onefold-ingest append dataset.toml --out dataset
onefold-ingest append dataset.toml --out dataset --merge
onefold-ingest add-features more.toml --out dataset
onefold-ingest relabel late.toml --out dataset
onefold-ingest shard requests.jsonl --by user --segments 2 --out segments
onefold-ingest write parts.toml --dataset parted --bucket 0/1 --out parts/0.json
onefold-ingest commit parted parts
onefold-ingest rename-feature dataset city town
onefold-ingest history dataset
onefold-ingest verify dataset
onefold-ingest verify whole --against dataset.toml
! onefold-ingest verify whole --absent users.txt
onefold-ingest report dataset
onefold-ingest report dataset --samples 100
onefold-ingest report --from-logs dataset.toml
onefold-ingest compact dataset
onefold-ingest vacuum dataset --keep 1 --older-than 0s --dry-run
onefold-ingest vacuum dataset --keep 1 --older-than 0s
onefold-ingest forget dataset --users users.txt --dry-run
onefold-ingest forget dataset --users users.txt
onefold-ingest forget dataset --users users.txt --purge
onefold-ingest drop-features dataset town
onefold-ingest vacuum dataset
onefold-read head dataset
onefold-read bench dataset
onefold-read bench dataset --dedupe off
onefold-read digest dataset
onefold-read digest dataset --by-step
onefold-shard topology --ranks 2 --memory 1GiB --out topology.json
onefold-shard topology --ranks 2 --memory 1GiB --measure --out measured.json
onefold-shard tables train.toml --data dataset --out tables.json
onefold-shard plan --tables tables.json --topology topology.json --out plan.json
onefold-shard plan --tables tables.json --topology topology.json --out explained.json --explain item
onefold-shard topology --ranks 4 --memory 1GiB --out larger.json
onefold-shard plan --tables tables.json --topology larger.json --out plan-4.json
onefold-shard replan --plan plan.json --tables tables.json --budget 1GiB --out plan-2.json
onefold-shard show plan.json
onefold-shard show plan.json --html plan.html
onefold-shard diff plan.json plan-4.json
onefold-shard check plan.json --tables tables.json --topology topology.json
onefold-shard export plan.json --torchrec --out torchrec.json
onefold-train-tools profile --samples 1024 --memory 16MiB --threads 1 --sets 16 --out costs.parquet
onefold-shard pretrain costs.parquet --repeated costs.parquet --folds 2 --out model.json
onefold-train run train.toml --data dataset --out run
onefold-train run days.toml --data dataset --out progressive --progressive
onefold-train run tasks.toml --data dataset --out tasks
onefold-train eval tasks --data dataset
onefold-train run days.toml --data dataset --out cut --max-steps 2
onefold-train run days.toml --data dataset --out cut --resume
onefold-train run days.toml --data dataset --out warm --warm-start run
onefold-train launch --ranks 2 -- run train.toml --data dataset --out ranks --plan plan.json --trace-steps 1..2
onefold-train follow days.toml --data dataset --out followed --stop-after 1
onefold-train eval run --data dataset
onefold-train predict run --data dataset --out predictions.parquet
onefold-train export run --out export
onefold-train report run --html report.html
onefold-train trace ranks --chrome trace.json --html trace.html
onefold-serve master --listen 127.0.0.1:0 --dataset clicks=FOLDER/dataset &
onefold-serve worker --master MASTER --listen 127.0.0.1:0 &
onefold-serve local --listen 127.0.0.1:0 &
onefold-train run served.toml --data grpc://MASTER/clicks --out served &
onefold-serve status --master MASTER
onefold-serve jobs --master MASTER
onefold-serve worker --master MASTER --listen 127.0.0.1:0 &
onefold-serve drain WORKER --master MASTER
onefold-cluster scheduler --port 0 &
onefold-cluster executor --scheduler SCHEDULER --port 0 --work-dir work &
onefold-cluster build dataset.toml --out clustered --scheduler SCHEDULER --partition date=2024-06-01
onefold-cluster append dataset.toml --out clustered --scheduler SCHEDULER
"""
# Processes that print their address, which replaces these names in later lines.
LISTENS = {"MASTER", "WORKER", "LOCAL", "SCHEDULER", "EXECUTOR"}
# Commands that are repeated until they succeed and print a value for these keys, because processes have just started.
AWAITED = {"onefold-serve status": "clients", "onefold-serve jobs": "jobs", "onefold-serve drain": "address"}
AWAITED_SECONDS = 300
# The command prints the object of the command that it starts.
PRINT_NO_OBJECT = {"onefold-train launch"}
# Described keys that no command prints here.
RARE = {
    ("onefold-ingest build", "samples_of_earlier_sessions.<partition>"),
    ("onefold-read head", "shown[].weight"),
    ("onefold-train run", "loss_jump"),
    ("onefold-train run", "grown_tables"),
    ("Figures", "r2"),
    ("Figures", "deviance"),
}


class Failed(Exception):
    """The message of an error."""


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_inputs(folder):
    """Writes the logs, configurations and other files that the commands read."""
    requests = [
        {
            "request": number,
            "user": number * 7 % 23,
            "time": f"2024-06-0{1 + number % 2}T{number // 2 % 4:02}:{number % 60:02}:00",
            "age": 20.5 + number % 40,
            "city": number * 7 % 23 % 5,
            "place": ["north", "south"][number % 2],
            "history": list(range(number % 9, number % 9 + 4)),
            "item": number * number % 31,
            "liked": float(number % 2),
        }
        for number in range(400)
    ]
    clicks = [
        {"request": row["request"], "event_time": row["time"][:14] + "59:30", "kind": "click"}
        for row in requests
        if row["request"] % 3 == 0
    ]
    write_lines(folder / "requests.jsonl", requests)
    write_lines(folder / "events.jsonl", clicks)
    write_lines(folder / "late.jsonl", clicks + [{**clicks[1], "request": number} for number in (1, 2, 4)])
    configs = {
        "dataset.toml": DATASET_CONFIG,
        "more.toml": DATASET_CONFIG + 'city = { kind = "sparse" }\n',
        "late.toml": DATASET_CONFIG.replace("events*", "late*") + 'city = { kind = "sparse" }\n',
        "parts.toml": PARTS_CONFIG,
        "train.toml": TRAIN_CONFIG,
        "wrong.toml": DATASET_CONFIG.replace("age =", "height ="),
        "tasks.toml": TRAIN_CONFIG.replace('label = "clicked"\n', "").replace("[8, 1]", "[8, 2]") + TASKS,
        "days.toml": "".join(line for line in TRAIN_CONFIG.splitlines(True) if "date=" not in line),
        "served.toml": TRAIN_CONFIG.replace("[train]", "[train]\nepochs = 1000000"),
        "users.txt": "7\n",
    }
    for name, text in configs.items():
        (folder / name).write_text(text)
    write_ebnerd(folder / "ebnerd")


def write_ebnerd(folder):
    """Writes files with the columns of EB-NeRD that `onefold-data import` reads."""
    import pyarrow
    import pyarrow.parquet

    whole = pyarrow.int64()
    attributes = ["device_type", "is_sso_user", "gender", "postcode", "age", "is_subscriber", "article_id"]
    columns = {name: pyarrow.array([1, 2], whole) for name in ["impression_id", "session_id", "user_id", *attributes]}
    columns["impression_time"] = pyarrow.array([1_684_400_000_000_000, 1_684_400_060_000_000], pyarrow.timestamp("us"))
    columns["article_ids_inview"] = pyarrow.array([[11, 12], [12, 13]])
    columns["article_ids_clicked"] = pyarrow.array([[11], [13]])
    history = {"user_id": pyarrow.array([1, 2], whole), "article_id_fixed": pyarrow.array([[10], [10, 11]])}
    for split in ["train", "validation"]:
        (folder / split).mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / split / "behaviors.parquet")
        pyarrow.parquet.write_table(pyarrow.table(history), folder / split / "history.parquet")


def replace_costs(path):
    """Replaces the times in a file of measured costs with times that grow with the work.

    On a busy machine, measured times of such small jobs are noise, from which no cost model can be learned.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        if compute := row["compute"]:
            ids = (shard["lists"] * shard["pooling_factor"] * shard["columns"] for shard in compute["shards"])
            compute["ms"] = 1.0 + 1e-5 * sum(ids)
        for rank in row["ranks"]:
            rank |= {"start_ms": 0.0, "ms": 1.0 + 1e-5 * rank["bytes"]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, table.schema), path)


class Commands:
    """Runs commands in a folder, and keeps the objects that they print, by command."""

    def __init__(self, binaries, folder, processes):
        self.binaries, self.folder, self.processes = binaries, folder, processes
        self.objects, self.addresses = {}, {"FOLDER": str(folder)}
        self.environment = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}

    def run(self, line):
        """Runs the command of a line, or starts its process."""
        for name, address in self.addresses.items():
            line = line.replace(name, address)
        fails = line.startswith("! ")
        words = shlex.split(line.removeprefix("! ").removesuffix("&"))
        first = words.index("--") if words[1] == "launch" else 0
        command = f"{words[0]} {words[first + 1]}"
        words[2:2] = ["--json", "--quiet"]
        if line.endswith("&"):
            self.start(command, words)
        else:
            value = self.finish(command, words, fails)
            if command == "onefold-train-tools profile":
                replace_costs(self.folder / words[words.index("--out") + 1])
            if words[0] in commands.PROGRAMS:
                self.objects.setdefault(command, []).append(value)

    def start(self, command, words):
        """Starts a process that ends with the others, and keeps the address that it prints."""
        process = subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.processes.callback(end, process)
        name = command.split()[1].upper()
        if name in LISTENS:
            value = json.loads(process.stdout.readline())
            self.objects.setdefault(command, []).append(value)
            self.addresses[name] = value["address"]

    def finish(self, command, words, fails):
        """Runs a command to its end, and returns the object that it prints."""
        until = time.monotonic() + AWAITED_SECONDS
        while True:
            done = subprocess.run(
                words, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            expected = (done.returncode != 0) == fails
            value = json.loads(done.stdout.splitlines()[-1]) if expected else {}
            if expected and (command not in AWAITED or value[AWAITED[command]]):
                return value
            if command not in AWAITED or time.monotonic() > until:
                raise Failed(f"`{shlex.join(words)}` ended with status {done.returncode}\n{done.stdout}{done.stderr}")


def end(process):
    process.terminate()
    process.communicate()


# A description of values: kinds, of which "list" has the kinds of its elements.

ANY = "any"
SCALARS = {bool: "boolean", int: "integer", float: "number", str: "text", type(None): "null", dict: "object"}


def kinds_of(values):
    kinds = {SCALARS[type(value)]: None for value in values if not isinstance(value, list)}
    if lists := [value for value in values if isinstance(value, list)]:
        kinds["list"] = kinds_of([element for value in lists for element in value])
    return kinds


def covers(kinds, others):
    """Returns whether a description includes all kinds of another one."""
    return ANY in kinds or all(
        kind in kinds and (kind != "list" or covers(kinds["list"], elements)) for kind, elements in others.items()
    )


def text_of(kinds):
    """Returns the text of a description, such as `(integer or null)[] or null`."""
    texts = []
    for kind, elements in kinds.items():
        if kind == "list":
            inner = text_of(elements) or ANY
            kind = f"({inner})[]" if " or " in inner else f"{inner}[]"
        texts.append(kind)
    return " or ".join(sorted(texts, key=lambda text: (text == "absent", text == "null")))


def kinds_in(text):
    """Returns the description that a text gives."""
    kinds = {}
    for kind in filter(None, re.split(r" or (?![^()]*\))", text)):
        if kind.endswith("[]"):
            inner = kind.removesuffix("[]").removeprefix("(").removesuffix(")")
            kinds["list"] = {} if inner == ANY else kinds_in(inner)
        else:
            kinds[kind] = None
    return kinds


def merged(kinds, others):
    """Returns a description of the kinds of both."""
    result = {**others, **kinds}
    if "list" in kinds and "list" in others:
        result["list"] = merged(kinds["list"], others["list"])
    return result


def renamed(kinds, name):
    """Returns a description in which objects, also in lists, are the shared object `name`."""
    return {
        name if kind == "object" else kind: elements and renamed(elements, name) for kind, elements in kinds.items()
    }


def without_lists(values):
    """Returns the objects among values and in lists of values."""
    for value in values:
        if isinstance(value, list):
            yield from without_lists(value)
        elif isinstance(value, dict):
            yield value


class Describer:
    """Describes the values of sections, and collects the values of shared objects, which have sections of their own."""

    def __init__(self):
        self.shared = {}

    def describe(self, rows, path, values, known):
        """Adds rows for the keys of the objects among `values` to `rows`: the kinds of their values, by path.

        `known` has the texts of the kinds on the page, by path. A path that ends with a name in angle brackets, as
        `groups.<group>`, has the values of all keys that have no path of their own there. A kind that begins with an
        upper-case letter names a shared object. A path with the kind `any` has no rows for what is in it.
        """
        while values and all(isinstance(value, list) for value in values):
            values, path = [element for value in values for element in value], path + "[]"
        objects = [value for value in values if isinstance(value, dict)]
        prefix = f"{path}." if path else ""
        varying = next((one for one in known if re.fullmatch(re.escape(prefix) + "<[^.]*>", one)), None)
        paths = {}
        for key in dict.fromkeys(key for value in objects for key in value):
            own = prefix + key
            paths.setdefault(own if own in known or not varying else varying, []).append(key)
        for own, keys in paths.items():
            if known.get(own) == ANY:
                rows[own] = {ANY: None}
                continue
            found = [value[key] for value in objects for key in keys if key in value]
            kinds = kinds_of(found)
            if own != varying and len(found) < len(objects):
                kinds["absent"] = None
            name = re.search(r"[A-Z]\w*", known.get(own, ""))
            rows[own] = renamed(kinds, name[0]) if name else kinds
            if name:
                self.shared.setdefault(name[0], []).extend(without_lists(found))
            else:
                self.describe(rows, own, [value for value in found if value is not None], known)


HEADER = "| key | kind | meaning |\n|---|---|---|\n"
SECTION = re.compile(r"^## (`[^\n]*`)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(.*?)` \| (.*?) *\| (.*?) *\|\n", re.MULTILINE)


def problems_of(name, rows, page):
    """Returns what is wrong with the rows of a section. `page` has the kinds and the meaning of each of its paths."""
    for path, kinds in rows.items():
        if path not in page:
            yield f"{name}: `{path}` ({text_of(kinds)}) is printed, but not described"
        elif not covers(kinds_in(page[path][0]), kinds):
            yield f"{name}: `{path}` is {text_of(kinds)}, but described as {page[path][0]}"
    for path, (_, meaning) in page.items():
        if path not in rows and (name, path) not in RARE:
            yield f"{name}: `{path}` is described, but not printed"
        if not meaning:
            yield f"{name}: `{path}` has no meaning"


def completed(name, rows, page):
    """Returns the rows of a section, with what it lacks."""
    rare = {path: {} for path in page if (name, path) in RARE and path not in rows}
    lines = []
    for path, kinds in (rows | rare).items():
        known, meaning = page.get(path, ("", ""))
        lines.append(f"| `{path}` | {text_of(merged(kinds_in(known), kinds))} | {meaning} |\n")
    return "".join(lines)


def described_commands(binaries):
    """Returns all commands that the programs list and that print an object."""
    for program in commands.PROGRAMS:
        for name in commands.commands_in(commands.help_of(binaries / program, [])):
            if f"{program} {name}" not in PRINT_NO_OBJECT:
                yield f"{program} {name}"


def objects_of(binaries):
    """Returns the objects that all commands print, by command."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        folder = pathlib.Path(folder)
        write_inputs(folder)
        runs = Commands(binaries, folder, processes)
        for line in LINES.splitlines():
            runs.run(line)
        return runs.objects


def compare(text, objects):
    """Returns what is wrong with the page `text`, and the page with what it lacks."""
    problems, described, describer = [], set(), Describer()

    def section(match):
        names = re.findall(r"`(.*?)`", match[1])
        described.update(names)
        page = {path: (kinds, meaning) for path, kinds, meaning in ROW.findall(match[2])}
        rows = {}
        known = {path: kinds for path, (kinds, _) in page.items()}
        found = [value for name in names for value in objects.get(name, describer.shared.get(name, []))]
        describer.describe(rows, "", found, known)
        problems.extend(problems_of(names[0], rows, page))
        before, _, after = match[2].partition(HEADER)
        return f"## {match[1]}\n{before}{HEADER}{completed(names[0], rows, page)}{ROW.sub('', after)}"

    result = SECTION.sub(section, text)
    problems += [f"{name}: it has no section" for name in [*objects, *describer.shared] if name not in described]
    return problems, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binaries", type=pathlib.Path, required=True, help="the folder of the programs")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not true")
    arguments = parser.parse_args()
    binaries = arguments.binaries.absolute()
    try:
        objects = objects_of(binaries)
    except Failed as error:
        sys.exit(f"error: {error}")
    problems = [f"{name}: it is not run" for name in described_commands(binaries) if name not in objects]
    found, text = compare(PAGE.read_text(), objects)
    problems += found
    if not arguments.check:
        PAGE.write_text(text)
    if problems:
        sys.exit("\n".join(["error: the page is not what the commands print", *problems]))


if __name__ == "__main__":
    main()
