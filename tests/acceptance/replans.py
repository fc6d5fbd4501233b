#!/usr/bin/env python3
"""Changes random jobs, and compares `onefold-shard replan` without a budget with a new plan.

    tests/acceptance/replans.py [--bin target/release] [--replans 200] [--seed 1]

Each task draws tables and ranks, plans them, and changes both: tables grow, come and go, and the job gets other ranks,
of which some have less memory. If the budget is unlimited, the new plan of `replan` is at most 1 % more expensive than
the plan of `plan`, and a job that did not change moves nothing unless that makes it cheaper. Where no plan is found,
`replan` finds none either. The number of tasks and the seed are also those of the variables REPLANS and SEED.
"""

import argparse
import json
import pathlib
import random
import subprocess
import tempfile

from environment import number_of

# How much more expensive a changed plan may be.
BOUND = 1.01
# The cost models in turn, with their options.
MODELS = ["--model analytic", "--model cpu --any-hardware"]
GLOBAL_BATCH = 4096
UNLIMITED = "1000TiB"
# Bytes of a weight and of its share of a row's accumulator, for the memory of a topology.
BYTES_PER_WEIGHT = 5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--replans", type=int, default=number_of("REPLANS", 200))
    parser.add_argument("--seed", type=int, default=number_of("SEED", 1))
    return parser.parse_args()


def table(number):
    return {
        "name": f"table_{number}",
        "num_embeddings": int(10 ** random.uniform(2, 7)),
        "embedding_dim": 2 ** random.randrange(2, 8),
        "feature_names": [f"feature_{number}"],
        "pooling_factors": [round(10 ** random.uniform(0, 1.5), 2)],
        "dedupe_factor": round(random.uniform(1, 6), 2),
    }


def changed(tables):
    """Returns tables of which some have more rows, some are gone and some are new."""
    kept = [one for one in tables if random.random() > 0.1] or tables
    grown = [{**one, "num_embeddings": int(one["num_embeddings"] * random.choice([1, 1, 1.05, 2]))} for one in kept]
    return grown + [table(len(tables) + number) for number in range(random.choice([0, 0, 1, len(tables) // 2]))]


def topology(ranks, tables):
    """Returns ranks whose memory is a few times what tables and buffers take; in some, a part has only half."""
    weights = sum(one["num_embeddings"] * one["embedding_dim"] for one in tables)
    vectors = GLOBAL_BATCH // ranks * sum(one["embedding_dim"] for one in tables)
    memory = int(random.uniform(1.1, 4.0) * BYTES_PER_WEIGHT * weights / ranks + 16 * vectors)
    whole = {
        "format_version": 1,
        "ranks": ranks,
        "ranks_per_node": random.choice([one for one in range(1, ranks + 1) if ranks % one == 0]),
        "memory_bytes": memory,
        "memory_bandwidth_bytes_per_second": 3.35e12,
        "intra_node_bandwidth_bytes_per_second": 4.5e11,
        "inter_node_bandwidth_bytes_per_second": 5e10,
    }
    if ranks > 1 and random.random() < 0.3:
        less = random.randrange(1, ranks)
        whole["groups"] = [{"ranks": less, "memory_bytes": memory // 2}, {"ranks": ranks - less}]
    return whole


class Planner:
    """Calls of `onefold-shard` in a folder."""

    def __init__(self, programs, folder):
        self.program, self.folder = programs.resolve() / "onefold-shard", folder

    def do(self, line):
        """Runs a command. Returns the object that it prints, or its error."""
        command = [str(self.program), *line.split(), "--overwrite", "--json", "-q"]
        done = subprocess.run(command, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            assert done.returncode == 1 and "\n  hint: " in done.stderr, f"{line}: {done.returncode} {done.stderr}"
            return None, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), ""

    def write(self, name, tables, ranks):
        (self.folder / "torchrec.json").write_text(json.dumps({"global_batch_size": GLOBAL_BATCH, "tables": tables}))
        printed, error = self.do(f"tables --torchrec torchrec.json --out {name}-tables.json")
        assert printed, error
        (self.folder / f"{name}-topology.json").write_text(json.dumps(topology(ranks, tables)))

    def plan(self, name, model):
        return self.do(f"plan --tables {name}-tables.json --topology {name}-topology.json {model} --out {name}-plan.json")

    def replan(self, name, model):
        """Changes the first plan for the tables and the topology `name`, without a budget."""
        files = f"--plan old-plan.json --tables {name}-tables.json --topology {name}-topology.json"
        return self.do(f"replan {files} --budget {UNLIMITED} {model} --out {name}-replan.json")


def check(planner, number):
    """Makes, changes and compares one job. Returns the ratio of costs, or None where nothing fits."""
    model = MODELS[number % len(MODELS)]
    ranks, tables = random.randrange(1, 17), [table(one) for one in range(random.randrange(1, 61))]
    planner.write("old", tables, ranks)
    planner.write("new", changed(tables), random.choice([ranks, max(1, ranks // 2), 2 * ranks, ranks + 1]))
    old, _ = planner.plan("old", model)
    if not old:
        return None
    same, error = planner.replan("old", model)
    assert same, error
    is_better = same["max_cost_ms"] < old["max_cost_ms"]
    needless = same["required_bytes"] or same["moved_bytes"] and not is_better
    assert not needless, f"task {number}: needless moves {same}"
    fresh, error = planner.plan("new", model)
    found, other = planner.replan("new", model)
    if not fresh:
        assert not found, f"task {number}: `replan` finds a plan, but {error}"
        return None
    assert found, f"task {number}: there is a plan, but {other}"
    ratio = found["max_cost_ms"] / fresh["max_cost_ms"] if fresh["max_cost_ms"] else 1.0
    assert ratio <= BOUND, f"task {number} ({model}): {ratio} times the cost of a new plan"
    plan_file, files = "new-replan.json", "--tables new-tables.json --topology new-topology.json"
    valid = subprocess.run(
        [str(planner.program), "check", plan_file, *files.split()], cwd=planner.folder, capture_output=True, text=True
    )
    assert valid.returncode == 0, valid.stderr
    return ratio


def main():
    options = arguments()
    random.seed(options.seed)
    print(f"{options.replans} changed jobs with SEED={options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        planner = Planner(options.bin, pathlib.Path(folder))
        ratios, refused = [], 0
        while len(ratios) < options.replans:
            ratio = check(planner, len(ratios) + refused)
            ratios, refused = (ratios, refused + 1) if ratio is None else ([*ratios, ratio], refused)
            assert refused <= options.replans, "most tasks do not fit"
    costs = f"{min(ratios):.4f} to {max(ratios):.4f}"
    print(f"a changed plan costs {costs} of a new one; {refused} further tasks did not fit")


if __name__ == "__main__":
    main()
