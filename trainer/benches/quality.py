#!/usr/bin/env python3
"""Measures the effect of clustering on quality: held-out NE and AUC after one epoch, by the composition of batches.

Imports EB-NeRD's logs, builds a dataset for each order of samples, trains the model of the import's `train.toml` on it
with several seeds, and prints a table (with `--json` one JSON object). Every run sees the same training samples once and
is evaluated on the same held-out samples; only the composition of the batches differs.

    trainer/benches/quality.py --ebnerd DIR --work DIR [--seeds 1,2,3] [--bin target/release]

  shuffled       every sample at a random position, as in training data without sessions
  arrival        samples in the order of the logs
  sessions       whole sessions, in the order of their starts (`build`'s default), read in the order of the files
  sessions-hash  whole sessions, in the order of their keys' hashes (`build --order session-hash`)
  blocks         `sessions`, with row groups and the sessions in them shuffled by the reader (`[data].shuffle`)
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess

ORDERS = {"shuffled": "session-hash", "arrival": "arrival", "sessions": "session", "sessions-hash": "session-hash"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ebnerd", type=pathlib.Path, required=True, help="folder of EB-NeRD's behaviors and history files")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for datasets and runs")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of parameters and shuffling")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--row-groups", type=int, default=4, help="row groups whose sessions `blocks` mixes")
    parser.add_argument("--only", help="compositions, separated by commas")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def run(*command):
    result = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def with_key(text, path, value):
    """Returns the configuration with a key of a section set; a value that is not JSON is a string."""
    section, key = path.rsplit(".", 1)
    try:
        json.loads(value)
    except json.JSONDecodeError:
        value = json.dumps(value)
    head = f"[{section}]\n"
    if head not in text:
        return f"{text}\n{head}{key} = {value}\n"
    before, after = text.split(head, 1)
    own, *rest = re.split(r"(?m)^(?=\[)", after, maxsplit=1)
    own = re.sub(rf"(?m)^{key} = .*\n", "", own)
    return before + head + f"{key} = {value}\n" + own + "".join(rest)


def build(options, order):
    """Builds the dataset of one order, unless it exists."""
    dataset = options.work / f"dataset-{order}"
    if (dataset / "snapshots").is_dir():
        return dataset
    logs = options.work / "logs"
    if not logs.exists():
        run(options.bin / "onefold-data", "import", "ebnerd", "--from", options.ebnerd, "--out", logs, "--json")
    text = (logs / "dataset.toml").read_text()
    if order == "shuffled":
        # Every sample is its own session.
        text = text.replace('key = ["split", "session_id"]', 'key = ["split", "request_id", "article_id"]')
    config = logs / f"{order}.toml"
    config.write_text(text)
    run(options.bin / "onefold-ingest", "build", config, "--out", dataset, "--order", ORDERS[order], "--json")
    return dataset


def train(options, composition, seed):
    dataset = build(options, "sessions" if composition == "blocks" else composition)
    text = (options.work / "logs" / "train.toml").read_text()
    text = re.sub(r"(?m)^seed = .*$", f"seed = {seed}", text)
    text = re.sub(r"(?m)^batch_size = .*$", f"batch_size = {options.batch_size}", text)
    if composition == "blocks":
        text = text.replace("[data]\n", f"[data]\nshuffle = {{ seed = {seed}, row_groups = {options.row_groups} }}\n")
    config = options.work / f"{composition}.toml"
    config.write_text(text)
    out = options.work / f"run-{composition}-{seed}"
    summary = run(options.bin / "onefold-train", "run", config, "--data", dataset, "--out", out, "--overwrite", "--json",
                  "--dedupe", "off" if composition in ("shuffled", "arrival") else "exact")
    return summary


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    compositions = options.only.split(",") if options.only else [*ORDERS, "blocks"]
    results = {}
    for seed in seeds:
        for composition in compositions:
            figures = train(options, composition, seed)["eval"]
            results.setdefault(composition, []).append({"seed": seed, **figures})
    print(f"{'composition':16}{'NE':>10}{'± sd':>9}{'AUC':>10}{'± sd':>9}   NE by seed")
    for composition, runs in results.items():
        row = f"{composition:16}"
        for key in ("ne", "auc"):
            values = [result[key] for result in runs]
            row += f"{statistics.mean(values):10.4f}{statistics.stdev(values) if len(values) > 1 else 0:9.4f}"
        print(row + "   " + " ".join(f"{result['ne']:.4f}" for result in runs))
    if options.json:
        print(json.dumps({"batch_size": options.batch_size, "seeds": seeds, "compositions": results}))


if __name__ == "__main__":
    main()
