#!/usr/bin/env python3
"""Compares a model that is trained further every day with models that are trained anew, by quality and training time.

Imports EB-NeRD's logs, builds a dataset with a partition per day, and compares on each day from the second on

  warm     the model of the day before, trained further: one run with `--progressive`
  anew     a model trained from the beginning on all earlier days, and evaluated on the day

by the NE and AUC of the day's samples before they are trained on, and by training time. Prints a table, and with `--json`
one JSON object.

    trainer/benches/daily.py --ebnerd DIR --work DIR [--seeds 1,2,3] [--bin target/release]
"""

import argparse
import json
import pathlib
import re
import statistics

from quality import run


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ebnerd", type=pathlib.Path, required=True, help="folder of EB-NeRD's behaviors and history files")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for datasets and runs")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of parameters")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def build(options):
    """Builds the dataset with a partition per day, unless it exists."""
    dataset = options.work / "dataset"
    logs = options.work / "logs"
    if not logs.exists():
        run(options.bin / "onefold-data", "import", "ebnerd", "--from", options.ebnerd, "--out", logs, "--json")
    if not (dataset / "snapshots").is_dir():
        text = (logs / "dataset.toml").read_text()
        text, count = re.subn(r"\[partition\]\ncolumns = .*\n", '[partition]\nby = "day"\n', text)
        if count != 1:
            raise SystemExit("error: the import's dataset.toml has no [partition]")
        config = logs / "daily.toml"
        config.write_text(text)
        run(options.bin / "onefold-ingest", "build", config, "--out", dataset, "--json")
    return dataset, logs / "train.toml"


def days(dataset):
    """Returns the days of the dataset and their numbers of samples."""
    import pyarrow.parquet

    samples = {}
    for manifest in (dataset / "manifests").glob("*.parquet"):
        table = pyarrow.parquet.read_table(manifest, columns=["partition", "samples"])
        for row in table.to_pylist():
            day = row["partition"].removeprefix("date=")
            samples[day] = samples.get(day, 0) + row["samples"]
    return sorted(samples.items())


def train(options, dataset, config, name, seed, train, evaluated=None, extra=()):
    """Trains on the partitions that `train` selects; returns the command's summary."""
    text = config.read_text()
    evaluation = f'eval = "{evaluated}"\n' if evaluated else ""
    text = re.sub(r'^train = .*\n', f'train = "{train}"\n', text, flags=re.M)
    text = re.sub(r'^eval = .*\n', evaluation, text, flags=re.M)
    text = re.sub(r"^seed = .*$", f"seed = {seed}", text, flags=re.M)
    text = re.sub(r"^batch_size = .*$", f"batch_size = {options.batch_size}", text, flags=re.M)
    path = options.work / f"{name}.toml"
    path.write_text(text)
    return run(options.bin / "onefold-train", "run", path, "--data", dataset, "--out", options.work / name, "--overwrite",
               "--threads", options.threads, "--json", *extra)


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    dataset, config = build(options)
    known = days(dataset)
    rows = {day: {"samples": samples, "warm": [], "anew": []} for day, samples in known[1:]}
    seconds = {"warm": [], "anew": []}
    for seed in options.seeds.split(","):
        warm = train(options, dataset, config, "warm", seed, "", extra=["--progressive"])
        seconds["warm"].append(warm["wall_seconds"])
        for part in warm["progressive"]["partitions"]:
            rows[part["partition"].removeprefix("date=")]["warm"].append((part["ne"], part["auc"]))
        total = 0.0
        for day in rows:
            anew = train(options, dataset, config, "anew", seed, f"date<{day}", f"date={day}")
            rows[day]["anew"].append((anew["eval"]["ne"], anew["eval"]["auc"]))
            total += anew["wall_seconds"]
        seconds["anew"].append(total)
    mean = lambda pairs, place: statistics.mean(pair[place] for pair in pairs)
    table = [{"day": day, "samples": row["samples"], **{f"{figure}_{kind}": mean(row[kind], place)
              for kind in ("warm", "anew") for place, figure in enumerate(("ne", "auc"))}} for day, row in rows.items()]
    weights = [row["samples"] for row in table]
    overall = {key: sum(row[key] * weight for row, weight in zip(table, weights)) / sum(weights)
               for key in ("ne_warm", "ne_anew", "auc_warm", "auc_anew")}
    result = {"days": table, "mean": overall, "seconds": {kind: statistics.mean(all) for kind, all in seconds.items()}}
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'day':<12}{'samples':>9}{'NE warm':>10}{'anew':>9}{'AUC warm':>11}{'anew':>9}")
    for row in table + [{"day": "mean", "samples": sum(weights), **overall}]:
        print(f"{row['day']:<12}{row['samples']:>9,}{row['ne_warm']:>10.4f}{row['ne_anew']:>9.4f}"
              f"{row['auc_warm']:>11.4f}{row['auc_anew']:>9.4f}")
    print(f"seconds of training, all days: warm {result['seconds']['warm']:.1f}, anew {result['seconds']['anew']:.1f}")


if __name__ == "__main__":
    main()
