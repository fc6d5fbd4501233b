"""The page about the daily operation: its commands, run for four days of a clock that the test sets."""

import datetime
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import onefold

PAGE = Path(__file__).parents[2] / "docs" / "src" / "how-to" / "daily-operation.md"
START = datetime.datetime(2024, 6, 1, tzinfo=datetime.timezone.utc)
TICK = datetime.timedelta(hours=6)
TICKS = 16
REQUESTS = 60
FORGOTTEN = [3, 7]


def sections():
    """Returns the blocks of each section of the page, by its heading: pairs of a language and a text."""
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    block = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return {heading: block.findall(text) for heading, text in found}


def blocks(heading, language="sh"):
    return [text for of, text in sections()[heading] if of == language]


class Team:
    """A folder with logs that grow, a dataset, and a trainer."""

    def __init__(self, folder):
        self.folder, self.tick, self.trainer = folder, -1, None
        self.random = random.Random(5)
        self.requests, self.clicks, self.forgotten = [], [], []
        configurations = blocks("The configuration", "toml")
        for name, text in zip(("dataset.toml", "train.toml"), configurations, strict=True):
            (folder / name).write_text(text)

    @property
    def now(self):
        return START + self.tick * TICK

    @property
    def partition(self):
        return f"date={self.now:%Y-%m-%d}/hour={self.now:%H}"

    def advance(self, items):
        """Moves the clock to the next tick, at which an hour is complete. Requests are about the given items."""
        self.tick += 1
        for snapshot in (self.folder / "dataset" / "snapshots").glob("*.json"):
            modified = snapshot.stat().st_mtime - TICK.total_seconds()
            os.utime(snapshot, (modified, modified))
        for number in range(REQUESTS):
            user = number % 12 + 1
            if user in self.forgotten:
                continue
            request = 1000 * self.tick + number
            at = self.now + datetime.timedelta(seconds=15 * number)
            self.requests.append((request, user, at, items[number % len(items)], user % 5, float(user * 3 % 7)))
            for _ in range(self.random.choice([0, 0, 1, 2])):
                seconds = self.random.choice([5, 3600, 20 * 3600, 40 * 3600]) + self.random.randrange(1000)
                self.clicks.append((request, at + datetime.timedelta(seconds=seconds)))
        self.write_logs()

    @property
    def until(self):
        """The time up to which the logs have events: the end of the complete hour."""
        return self.now + datetime.timedelta(hours=1)

    def write_logs(self):
        """Writes the requests and the events that have arrived."""
        times = pyarrow.timestamp("us", tz="UTC")
        names = ["request", "user", "time", "item", "country", "age"]
        types = dict(zip(names, ["int64", "int64", times, "int64", "int64", "float32"], strict=True))
        self.write("requests", types, self.requests)
        events = [(request, at, "click") for request, at in self.clicks if at <= self.until]
        self.write("events", {"request": "int64", "event_time": times, "kind": "string"}, events)

    def write(self, log, types, rows):
        columns = zip(*rows, strict=True) if rows else [()] * len(types)
        arrays = [pyarrow.array(values, kind) for values, kind in zip(columns, types.values(), strict=True)]
        (self.folder / "logs" / log).mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(
            pyarrow.table(arrays, names=list(types)), self.folder / "logs" / log / "log.parquet"
        )

    def environment(self, **variables):
        path = f"{os.environ['ONEFOLD_BINARIES']}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "DATE": f"{self.now:%Y-%m-%d}", "HOUR": f"{self.now:%H}", **variables}

    def run(self, text, **variables):
        """Runs commands of the page."""
        command = ["bash", "-euo", "pipefail", "-c", text]
        environment = self.environment(**variables)
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, line):
        return json.loads(self.run(f"{line} --json").splitlines()[-1])

    def snapshots(self):
        return self.json("onefold-ingest history dataset")["snapshots"]

    def start_trainer(self, text):
        """Starts the page's trainer, which checks often for snapshots."""
        assert text.count(" -- follow ") == 1
        text = text.replace(" -- follow ", " -- follow --timeout 300 --look-every 100ms ")
        with (self.folder / "trainer.log").open("w") as log:
            self.trainer = subprocess.Popen(
                ["bash", "-c", f"exec {text}"], cwd=self.folder, env=self.environment(), stdout=log, stderr=log
            )

    def trainer_log(self):
        return (self.folder / "trainer.log").read_text()

    def lines(self, run):
        path = self.folder / run / "follow.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "partition" in line]

    def wait_for(self, run, partitions, snapshot=0):
        """Waits until the trainer has trained on these partitions of this snapshot or a later one."""
        until = time.monotonic() + 600
        while not set(partitions) <= {line["partition"] for line in self.lines(run) if line["snapshot"] >= snapshot}:
            assert self.trainer.poll() is None and time.monotonic() < until, self.trainer_log()
            time.sleep(0.05)

    def stop_trainer(self):
        self.trainer.terminate()
        assert self.trainer.wait(600) == 0, self.trainer_log()

    def relabel(self, run, since):
        """Runs the commands of every night, and waits for the training on recomputed labels."""
        before = self.snapshots()[-1]["snapshot"]
        self.run(*blocks("Every night"), SINCE=since)
        newest = self.snapshots()[-1]
        if newest["snapshot"] > before:
            assert newest["operation"] == "columns"
            self.wait_for(run, newest["partitions_written"], newest["snapshot"])

    def samples(self, **options):
        """Returns the label, its delay and the country of each sample of the dataset, by request."""
        dataset = onefold.Dataset(self.folder / "dataset", keep=["request"], global_batch_size=64, **options)
        rows = pyarrow.table(dataset.to_arrow()).to_pylist()
        assert len({row["request"] for row in rows}) == len(rows)
        return {row["request"]: (row["clicked"], row["clicked_delay"], row["country"]) for row in rows}

    def expected(self, as_of):
        """Computes the same from the logs, with the events up to a time."""
        clicks = {}
        for request, at in sorted(self.clicks, key=lambda click: click[1]):
            if at <= min(as_of, self.until):
                clicks.setdefault(request, at)
        samples = {}
        for request, _, at, _, country, _ in self.requests:
            first = clicks.get(request)
            label = (0.0, -1.0) if first is None else (1.0, (first - at).total_seconds())
            samples[request] = (*label, [country])
        return samples


@pytest.fixture
def team(tmp_path):
    team = Team(tmp_path)
    yield team
    if team.trainer is not None and team.trainer.poll() is None:
        team.trainer.terminate()
        team.trainer.wait(600)


def test_four_days_of_the_daily_operation(team):
    all_partitions = []
    plan, train = blocks("The trainer")
    change, train_anew = blocks("A new feature")
    run = "run"
    for tick in range(TICKS):
        launched = tick == TICKS - 1
        team.advance(range(1000, 1000 + REQUESTS) if launched else range(20 + tick))
        all_partitions.append(team.partition)
        if tick == 8:
            # On the third day there is a new feature, and a model that uses it.
            (feature,) = blocks("A new feature", "toml")
            with (team.folder / "dataset.toml").open("a") as configuration:
                configuration.write(feature)
            team.run(change)
            team.wait_for(run, all_partitions)
            team.stop_trainer()
            run = "run-2"
            team.start_trainer(train_anew)
        else:
            team.run(*blocks("Every hour"))
        if tick == 0:
            team.run(plan)
            team.start_trainer(train)
        if launched:
            break
        team.wait_for(run, all_partitions)
        if tick in (4, 8, 12):
            since = team.now - datetime.timedelta(days=2)
            team.relabel(run, f"{since:%Y-%m-%d}")
        if tick == 8:
            # Snapshots that were replaced on the first day are removed.
            assert team.snapshots()[0]["snapshot"] > 1
        if tick == 10:
            team.requests = [row for row in team.requests if row[1] not in FORGOTTEN]
            left = {row[0] for row in team.requests}
            team.clicks = [click for click in team.clicks if click[0] in left]
            team.forgotten = FORGOTTEN
            team.write_logs()
            (team.folder / "users.txt").write_text("".join(f"{user}\n" for user in FORGOTTEN))
            team.run(*blocks("Forget users"))
        if tick == 13:
            before = team.json("onefold-ingest verify dataset")["digest"]
            team.run(*blocks("Every week"))
            assert team.json("onefold-ingest verify dataset")["digest"] == before

    # More items than the table has rows end the trainer.
    assert team.trainer.wait(600) != 0
    assert "the table for `item` has" in team.trainer_log() and "continue in another directory" in team.trainer_log()
    prepare, larger = re.fullmatch(r"(.*\n)(onefold-train .*)\n", *blocks("When tables grow"), re.DOTALL).groups()
    team.run(prepare)
    team.start_trainer(larger)
    team.wait_for("larger", all_partitions[-1:])
    team.stop_trainer()

    # Each partition was trained on once, in the order of time, and again only for its labels.
    trained = {"run": all_partitions[:9], "run-2": all_partitions[:-1], "larger": all_partitions[-1:]}
    for of, partitions in trained.items():
        first = [line["partition"] for line in team.lines(of) if not line.get("late_labels")]
        assert first == partitions, of
    assert any(line.get("late_labels") for line in team.lines("run-2"))
    assert all((team.folder / of / "exports" / "latest").is_file() for of in ("run", "run-2"))

    # The labels of each hour are those of the events by then.
    team.run(*blocks("Every night"), SINCE=f"{START:%Y-%m-%d}")
    for hours in range(0, 24 * 4, 5):
        as_of = START + datetime.timedelta(hours=hours)
        assert team.samples(labels_as_of=as_of) == team.expected(as_of), as_of
    assert team.samples() == team.expected(team.until)
