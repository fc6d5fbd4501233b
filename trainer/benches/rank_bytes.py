#!/usr/bin/env python3
"""Checks that deduplication reduces the bytes that ranks send as much as it reduces lookups.

Trains some steps on several ranks with deduplication off, exact, and with windows, and prints the bytes that the ranks
send to each other in a step, as counted by the collectives. `expected` is the reduction of the vectors of answers and
gradients: pooled features have one vector per row, sequences one per id, and `onefold-read bench` counts how many of
these are distinct in the same batches.

    trainer/benches/rank_bytes.py --config rm1/train.toml --data rm1-dataset --work bytes [--bin target/release]
        [--ranks 4] [--steps 20] [--set rows=20000] [--set 'ids="hashed"']
"""

import json
import pathlib
import re
import subprocess

from parity import configured, parser_of

SEQUENCES = ("attention", "din", "encoder")


def arguments():
    parser = parser_of(__doc__, data="its dataset, whose buckets the ranks share")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def run(options, program, *parts):
    command = [str(part) for part in (options.bin / program, *parts)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def vectors(tables, groups, form):
    """Returns the number of vectors that are looked up in an epoch, on any rank."""
    total = 0
    for table in tables:
        group = next(group for group in groups.values() if table["name"] in group["features"])
        if table.get("pooling") in SEQUENCES:
            values = {"off": "sample_values", "exact": "row_values", "window": "stored_values"}[form]
            total += group["features"][table["name"]][values]
        else:
            total += group["samples"] if form == "off" else group["rows"]
    return total


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    text = configured(options, streams=options.ranks)
    config = options.work / "train.toml"
    config.write_text(text)
    run(options, "onefold-shard", "tables", config, "--data", options.data, "--samples", 0, "--out", options.work / "tables.json", "--overwrite")
    tables = json.loads((options.work / "tables.json").read_text())["tables"]
    batch_size = re.search(r"(?m)^batch_size = (\d+)", text)[1]
    counted = run(options, "onefold-read", "bench", options.data, "--dedupe", "window", "--batch-size", batch_size,
                  "--streams", options.ranks, "--json")
    groups = json.loads(counted.splitlines()[-1])["groups"]
    print(f"{options.config}, {options.ranks} ranks: megabytes that all ranks send in a step")
    print("| | requests | answers | gradients | dense | off ÷ it | expected |\n|---|---|---|---|---|---|---|")
    off = None
    for form in ("off", "exact", "window"):
        output = run(options, "onefold-train", "launch", "--ranks", options.ranks, "--", "run", config, "--data", options.data,
                     "--out", options.work / form, "--overwrite", "--dedupe", form, "--max-steps", options.steps, "--json")
        summary = json.loads(output.splitlines()[-1])
        sent = {kind: count / summary["steps"] / 1e6 for kind, count in summary["sent_bytes"].items()}
        found = (sent["answers"] + sent["gradients"], vectors(tables, groups, form))
        off = off or found
        columns = [f"{sent[kind]:.2f}" for kind in ("requests", "answers", "gradients", "dense")]
        print(f"| `{form}` | {' | '.join(columns)} | {off[0] / found[0]:.2f} | {off[1] / found[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
