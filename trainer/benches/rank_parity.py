#!/usr/bin/env python3
"""Compares the losses of training on several ranks with those of one rank.

Trains one model on the same global batches on one rank and on several, with tables divided in every way, and prints the
largest relative difference of a step's loss to that of one rank. 12 streams serve 1, 2, 3 and 4 ranks (`streams = 12`).

    trainer/benches/rank_parity.py --config rm3/train.toml --data rm3-dataset --work parity [--steps 100] [--bin target/release]
        [--ranks 2,3,4] [--forms off,exact,window] [--divisions even,rows,columns,copies,mixed]
        [--optimizers row_wise_adagrad,adagrad,sgd,adam] [--set tables.eps=1e-1]

With row-wise Adagrad, each column shard has its own accumulators. Therefore `columns` and `mixed` are then compared with
the same plan on two ranks. `--optimizers` are those of the tables (if absent, the configuration's). `--set` changes a
line of the configuration as in `parity.py`. `rounding` repeats the run on one rank with libtorch's plain kernels instead
of vectorized ones, and so shows the effect of rounding alone.
"""

import json
import os
import pathlib
import subprocess

from parity import changed, configured, parser_of

DIVISIONS = ["even", "rows", "columns", "copies", "mixed"]
PLAIN_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}


def arguments():
    parser = parser_of(__doc__, data="its dataset", work="folder for runs and plans")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--forms", default="off,exact,window")
    parser.add_argument("--divisions", default=",".join(DIVISIONS))
    parser.add_argument("--optimizers", help="optimizers of the tables")
    return parser.parse_args()


def shards(kind, number, ranks, rows, dim):
    """Returns the shards of table `number`, divided over the ranks in one way."""
    rank = lambda shard: (number + shard) % ranks
    shard = lambda at, rows, columns: {
        "rank": at,
        "rows": {"start": rows[0], "end": rows[1]},
        "columns": {"start": columns[0], "end": columns[1]},
    }
    if kind == "rows" and rows >= ranks:
        bounds = [rows * part // ranks for part in range(ranks + 1)]
        return "row_wise", [shard(rank(i), bounds[i : i + 2], (0, dim)) for i in range(ranks)]
    if kind == "columns" and dim % 8 == 0:
        return "column_wise", [shard(rank(0), (0, rows), (0, dim // 2)), shard(rank(1), (0, rows), (dim // 2, dim))]
    if kind == "copies":
        return "data_parallel", [shard(i, (0, rows), (0, dim)) for i in range(ranks)]
    return "table_wise", [shard(rank(0), (0, rows), (0, dim))]


def write_plan(options, division, ranks, tables):
    """Writes a plan that divides all tables in one way, or each in a different way, with made-up predictions."""
    kinds = ["rows", "columns", "copies", "even"]
    placed = []
    for number, (name, table) in enumerate(tables.items()):
        kind = kinds[number % len(kinds)] if division == "mixed" else division
        sharding_type, parts = shards(kind, number, ranks, table["rows"], table["dim"])
        placed.append({"name": name, "rows": table["rows"], "dim": table["dim"],
                       "sharding_type": sharding_type, "shards": parts})
    topology = options.work / f"topology-{ranks}.json"
    run(options, "onefold-shard", "topology", "--ranks", ranks, "--memory", "64GiB", "--out", topology, "--overwrite")
    prediction = lambda rank: {"rank": rank, "compute_ms": 1.0, "communication_ms": 0.0, "memory_bytes": 1}
    plan = {"format_version": 2, "search": "rank_parity", "cost_model": "none", "global_batch_size": ranks,
            "topology": json.loads(topology.read_text()), "max_cost_ms": 1.0,
            "ranks": [prediction(rank) for rank in range(ranks)], "tables": placed}
    path = options.work / f"{division}-{ranks}.json"
    path.write_text(json.dumps(plan))
    return path


def run(options, program, *parts, environment=None):
    command = [str(part) for part in (options.bin / program, *parts)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **(environment or {})})
    return result.stdout


def losses(options, config, form, name, ranks=1, plan=None, environment=None):
    train = ["run", config, "--data", options.data, "--out", options.work / name, "--overwrite", "--dedupe", form,
             "--max-steps", options.steps, "--json"]
    train += ["--plan", plan] if plan else []
    launched = ["launch", "--ranks", ranks, "--", *train] if ranks > 1 else train
    summary = run(options, "onefold-train", *launched, environment=environment).splitlines()[-1]
    return json.loads(summary)["losses"]


def difference(found, expected):
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


def compare(options, config, form, row_wise, label):
    """Prints the differences of one form's losses on ranks from those on one rank. Returns the largest one."""
    one = losses(options, config, form, "one")
    features = json.loads((options.work / "one" / "run.json").read_text())["tables"]
    tables = {feature.get("table", feature["feature"]): feature for feature in features}
    rounding = losses(options, config, form, "rounding", environment=PLAIN_KERNELS)
    print(f"{label} loss {one[0]:.4f} to {one[-1]:.4f}; rounding {difference(rounding, one):.1e}", flush=True)
    largest = 0.0
    for division in options.divisions.split(","):
        expected, of = one, "one rank"
        if row_wise and division in ("columns", "mixed"):
            plan = write_plan(options, division, 2, tables)
            expected, of = losses(options, config, form, "reference", 2, plan), "two ranks"
        for ranks in (int(ranks) for ranks in options.ranks.split(",")):
            plan = write_plan(options, division, ranks, tables)
            found = difference(losses(options, config, form, "ranks", ranks, plan), expected)
            print(f"{label} {division:8} {ranks} ranks  {found:.1e} of {of}", flush=True)
            largest = max(largest, found)
    return largest


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    text = configured(options, streams=12)
    print(f"largest relative difference of {options.steps} steps' losses")
    largest = 0.0
    for optimizer in options.optimizers.split(",") if options.optimizers else [None]:
        own = changed(text, f'tables.kind="{optimizer}"') if optimizer else text
        config = options.work / "train.toml"
        config.write_text(own)
        for form in options.forms.split(","):
            label = f"{optimizer or '':16} {form:8}".lstrip()
            largest = max(largest, compare(options, config, form, '"row_wise_adagrad"' in own, label))
    print(f"largest of all {largest:.1e}")


if __name__ == "__main__":
    main()
