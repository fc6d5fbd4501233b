#!/usr/bin/env python3
"""Compares the held-out NE of the default optimizer settings with the best settings of a random search.

Makes datasets whose later samples are held out (EB-NeRD, MovieLens, and the generated workloads), trains the model of
each dataset's `train.toml` with the defaults and with random settings, and prints a table: per dataset and batch size the
held-out NE of the defaults, the NE of the best setting of the search, and by how many percent the defaults are worse.

    trainer/benches/defaults.py --work DIR [--ebnerd DIR] [--datasets ebnerd,movielens,rm1,rm2,rm3]
        [--batch-sizes 256,1024,2048,8192] [--seeds 1,2,3] [--settings 30] [--bin target/release] [--json]
        [--candidate "dense.kind=adam dense.learning_rate=0.001 tables.warmup_steps=100"]

Every setting is trained with the first seed; in each row of the table, the best `--finalists` settings are then trained
with all seeds, and the best mean counts. `--candidate` adds a setting, which is trained with all seeds in every row and
gets its own table. Keys that it does not name have their defaults, `KEY=null` removes a key, and changing a `kind`
removes the other keys of that part. Another table compares the candidate with the defaults: by how many percent its mean
NE is larger, and the pooled standard deviation of both over seeds. A candidate may have keys of other sections; for
example, this measures the cost of bfloat16:

    trainer/benches/defaults.py --work DIR --ebnerd DIR --datasets ebnerd,movielens --batch-sizes 1024
        --without-search --candidate train.precision=bf16

`--without-search` trains only the defaults and candidates. The table marks rows with a mean NE above 1 (the mean label
predicts better) and rows in which training diverged, and shows how many settings end above 1 with the first seed. The
best of many settings is partly lucky with its seeds: `--fresh-seeds 11,12,13` trains the defaults and the best setting of
each row again, with seeds that were not used for any choice, and adds a table of both. `results.jsonl` in `--work` stores
every finished run, so another call trains only the missing ones.
`--set embedding.pooling=mean`; give each such model a `--work` of its own, or one with links to the datasets.

`--set embedding.pooling=mean`; give each such model its own `--work`, or one with links to the datasets.

  ebnerd, movielens          the models of the imports, with lists pooled by their mean; one epoch, and two
  ebnerd-sum, movielens-sum  the same with lists pooled by their sum
  ebnerd-raw                 the same with dense features as in the logs: rates, hours and counts
  rm1, rm2, rm3              generated workloads with tables of 20,000 hashed rows; the last fifth of the samples is
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import tempfile
import threading

from quality import run, with_key

# The settings of a `train.toml` without `[optimizer]` and `[schedule]`; must equal `trainer/config/src/optimizer.rs`.
DEFAULTS = {
    "tables.kind": "row_wise_adagrad",
    "tables.learning_rate": 0.02,
    "tables.eps": 1e-8,
    "dense.kind": "adagrad",
    "dense.learning_rate": 0.005,
    "dense.eps": 1e-8,
    "dense.max_grad_norm": 0.1,
}
SECTIONS = {"warmup_steps": "schedule"}  # sections of keys outside of `[optimizer.…]`
WORKLOADS = {"rm1": 100_000, "rm2": 100_000, "rm3": 200_000}  # samples
NARROW = {"bottom_mlp": "[128, 32]", "top_mlp": "[128, 64, 1]", "dim": "32"}
HOLDOUT = "CASE WHEN ntile(5) OVER (ORDER BY f.timestamp, f.request_id) < 5 THEN 'train' ELSE 'holdout' END"
RAW = {"10.0 * s.click_rate - 1.0": "s.click_rate", "s.log_age_hours - 2.0": "exp(s.log_age_hours)",
       "10.0 / s.inview_count - 1.0": "1.0 * s.inview_count"}
LOCK = threading.Lock()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for logs, datasets, runs and results")
    parser.add_argument("--ebnerd", type=pathlib.Path, help="folder of EB-NeRD's logs")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"),
                        help="folder of the binaries")
    parser.add_argument("--datasets", default="ebnerd,movielens,rm1,rm2,rm3", help="separated by commas")
    parser.add_argument("--batch-sizes", default="256,1024,2048,8192", help="separated by commas")
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the parameters; the search has the first")
    parser.add_argument("--settings", type=int, default=30, help="settings of the search, with the defaults")
    parser.add_argument("--search-seed", type=int, default=1, help="seed of the settings that are drawn")
    parser.add_argument("--finalists", type=int, default=3, help="settings of a row that get all seeds")
    parser.add_argument("--fresh-seeds", help="seeds for comparing the defaults with each row's best setting")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of the model")
    parser.add_argument("--candidate", action="append", default=[], metavar="SETTING", help="as `KEY=VALUE KEY=VALUE`")
    parser.add_argument("--without-search", action="store_true", help="train the defaults and the candidates alone")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def changed(text, key, value):
    """Returns the configuration with all lines of `key` changed; there must be such a line."""
    text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
    if count == 0:
        raise SystemExit(f"error: there is no `{key}` in the configuration")
    return text


def prepare(options, name):
    """Returns the dataset and the model's configuration without optimizers; creates them unless they exist."""
    source = name.removesuffix("-sum").removesuffix("-raw")
    logs, dataset = options.work / f"{source}-logs", options.work / f"{name.removesuffix('-sum')}-dataset"
    if not (logs / "train.toml").exists():
        if source == "ebnerd":
            if options.ebnerd is None:
                raise SystemExit("error: `ebnerd` needs --ebnerd DIR")
            run(options.bin / "onefold-data", "import", "ebnerd", "--from", options.ebnerd, "--out", logs, "--json")
        elif source == "movielens":
            run(options.bin / "onefold-data", "fetch", "movielens-100k", "--out", logs, "--json")
        elif source in WORKLOADS:
            run(options.bin / "onefold-data", "generate", "--workload", source, "--samples", WORKLOADS[source],
                "--seed", 1, "--out", logs, "--json")
        else:
            raise SystemExit(f"error: there is no dataset `{name}`")
    if not (dataset / "snapshots").is_dir():
        config = logs / "dataset.toml"
        if source in WORKLOADS:
            text = config.read_text().replace("SELECT f.*, e.label\n", f"SELECT f.*, e.label, {HOLDOUT} AS split\n")
            config = logs / "holdout.toml"
            config.write_text(re.sub(r"(?m)^by = .*$", 'columns = ["split"]', text))
        if name.endswith("-raw"):
            text = config.read_text()
            for scaled, raw in RAW.items():
                assert scaled in text, scaled
                text = text.replace(scaled, raw)
            config = logs / "raw.toml"
            config.write_text(text)
        run(options.bin / "onefold-ingest", "build", config, "--out", dataset, "--json")
    text = (logs / "train.toml").read_text()
    if source in WORKLOADS:
        text = changed(changed(text, "rows", "20000"), "ids", '"hashed"')
        text = text.replace("[data]\n", '[data]\ntrain = "split=train"\neval = "split=holdout"\n')
        if source != "rm3":
            for key, value in NARROW.items():
                text = changed(text, key, value)
    if name.endswith("-sum"):
        text = changed(text, "pooling", '"sum"')
    text = re.sub(r"(?ms)^\[(optimizer|schedule)\.[^\]]*\]\n.*?(?=^\[|\Z)", "", text)
    for given in options.set:
        text = with_key(text, *given.split("=", 1))
    return dataset, text


def with_setting(text, setting):
    """Returns the configuration with a setting; the keys of optimizers are in their own sections."""
    sections = {}
    for key, value in setting.items():
        part, name = key.split(".")
        if part not in ("tables", "dense"):
            text = with_key(text, key, json.dumps(value))
            continue
        sections.setdefault(f"{SECTIONS.get(name, 'optimizer')}.{part}", []).append(f"{name} = {json.dumps(value)}")
    added = "".join(f"\n[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())
    return text + added


def drawn(count, seed):
    """Returns the settings of the search: the defaults, then random settings."""
    source = random.Random(seed)
    choose = source.choice

    def rate(low, high):
        return float(f"{math.exp(source.uniform(math.log(low), math.log(high))):.2g}")

    settings = [DEFAULTS]
    while len(settings) < count:
        tables = {"kind": choose(["row_wise_adagrad", "adagrad"]), "learning_rate": rate(0.002, 0.2),
                  "eps": choose([1e-8, 1e-6, 1e-4, 1e-2])}
        dense = {"kind": choose(["adam", "adam", "adamw", "adagrad", "adagrad"])}
        adam, adagrad = rate(0.0003, 0.01), rate(0.002, 0.05)
        dense["learning_rate"] = adagrad if dense["kind"] == "adagrad" else adam
        eps = [1e-8, 1e-6, 1e-4, 1e-2] if dense["kind"] == "adagrad" else [1e-8, 1e-8, 1e-6]
        dense["eps"] = choose(eps)
        betas, decay = choose([[0.9, 0.999], [0.9, 0.99]]), choose([0.001, 0.01, 0.1])
        if dense["kind"] != "adagrad":
            dense["betas"] = betas
        if dense["kind"] == "adamw":
            dense["weight_decay"] = decay
        row_norm, norm = choose([None, None, 1.0, 0.1]), choose([None, None, 1.0, 0.1])
        tables |= {"max_row_grad_norm": row_norm, "warmup_steps": choose([0, 0, 50, 200])}
        dense |= {"max_grad_norm": norm, "warmup_steps": choose([0, 0, 50, 200])}
        both = {"tables": tables, "dense": dense}
        settings.append({f"{part}.{key}": value for part, keys in both.items() for key, value in keys.items()
                         if value not in (None, 0)})
    return settings


def candidate(text):
    """Returns the defaults with the changes of `text`."""
    given = {}
    for part in text.split():
        key, value = part.split("=", 1)
        try:
            given[key] = json.loads(value)
        except json.JSONDecodeError:
            given[key] = value
    setting = dict(DEFAULTS)
    for part in ("tables", "dense"):
        if given.get(f"{part}.kind", DEFAULTS[f"{part}.kind"]) != DEFAULTS[f"{part}.kind"]:
            setting = {key: value for key, value in setting.items() if not key.startswith(f"{part}.")}
    return {key: value for key, value in (setting | given).items() if value is not None}


def key_of(dataset, batch_size, seed, setting):
    return json.dumps([dataset, batch_size, seed, setting], sort_keys=True)


class Results:
    """The finished runs, in memory and in a file."""

    def __init__(self, options):
        self.options, self.file, self.made = options, options.work / "results.jsonl", {}
        self.found = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                result = json.loads(line)
                self.found[key_of(result["dataset"], result["batch_size"], result["seed"], result["setting"])] = result

    def train(self, wanted):
        """Trains the missing runs of `wanted`: dataset, batch size, seed, setting."""
        missing = {key_of(*job): job for job in wanted}
        missing = [job for key, job in missing.items() if key not in self.found]
        for name in {job[0] for job in missing} - self.made.keys():
            self.made[name] = prepare(self.options, name)
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            for _ in pool.map(lambda job: self.one(*job), missing):
                pass

    def one(self, dataset, batch_size, seed, setting):
        data, text = self.made[dataset]
        text = with_setting(changed(changed(text, "batch_size", batch_size), "seed", seed), setting)
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.options.work) as folder:
            config, out = pathlib.Path(folder, "train.toml"), pathlib.Path(folder, "run")
            config.write_text(text)
            command = [self.options.bin / "onefold-train", "run", config, "--data", data, "--out", out,
                       "--dedupe", "window", "--threads", self.options.threads, "--quiet", "--json"]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            diverged = (out / "diverged").exists()
        if done.returncode != 0 and not diverged:
            raise SystemExit(f"error: training {dataset} with {setting} failed:\n{done.stderr}")
        result = {"dataset": dataset, "batch_size": batch_size, "seed": seed, "setting": setting, "diverged": diverged}
        if not diverged:
            summary = json.loads(done.stdout.splitlines()[-1])
            result |= {"steps": summary["steps"], "wall_seconds": summary["wall_seconds"]}
            result |= {figure: summary["eval"][figure] for figure in ("ne", "auc", "loss", "calibration")}
        with LOCK:
            self.found[key_of(dataset, batch_size, seed, setting)] = result
            with self.file.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def figures(self, dataset, batch_size, seeds, setting, figure="ne"):
        """Returns a metric by seed; infinite if training diverged."""
        runs = [self.found[key_of(dataset, batch_size, seed, setting)] for seed in seeds]
        return [math.inf if found["diverged"] else found[figure] for found in runs]


def spread(values):
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def finalists(results, options, dataset, batch_size, seeds, settings):
    """Returns the indices of the settings to train with all seeds, and how many settings end above 1 with the first seed.

    The settings are the defaults, the candidates (after the settings of the search), and the best with the first seed."""
    first = [results.figures(dataset, batch_size, seeds[:1], setting)[0] for setting in settings]
    best = sorted(range(len(settings)), key=first.__getitem__)[:options.finalists]
    candidates = range(len(settings) - options.candidates, len(settings))
    return {0, *candidates, *best}, sum(ne > 1 for ne in first)


def row_of(results, options, dataset, batch_size, seeds, setting, settings):
    """Returns a row of a table: one setting compared with the best of all."""
    nes = results.figures(dataset, batch_size, seeds, setting)
    chosen, above_one = finalists(results, options, dataset, batch_size, seeds, settings)
    means = {number: statistics.mean(results.figures(dataset, batch_size, seeds, settings[number]))
             for number in chosen}
    best = min(means, key=means.get)
    mean = statistics.mean(nes)
    return {"dataset": dataset, "batch_size": batch_size, "ne": mean, "sd": spread(nes), "by_seed": nes,
            "auc": statistics.mean(results.figures(dataset, batch_size, seeds, setting, "auc")),
            "best": means[best], "best_number": best, "percent": 100 * (mean / means[best] - 1), "above_one": above_one}


def compare(results, rows, seeds, known):
    """Trains both settings of every row with fresh seeds; returns by how many percent the defaults are worse."""
    sides = [DEFAULTS, *(known[row["best_number"]] for row in rows)]
    results.train([(row["dataset"], row["batch_size"], seed, setting)
                   for row, best in zip(rows, sides[1:]) for setting in (DEFAULTS, best) for seed in seeds])
    found = []
    for row, best in zip(rows, sides[1:]):
        place = row["dataset"], row["batch_size"]
        nes = [results.figures(*place, seeds, setting) for setting in (DEFAULTS, best)]
        means = [statistics.mean(values) for values in nes]
        found.append({"dataset": place[0], "batch_size": place[1], "best_number": row["best_number"],
                      "ne": means[0], "sd": spread(nes[0]), "best": means[1], "best_sd": spread(nes[1]),
                      "percent": 100 * (means[0] / means[1] - 1)})
    print(f"with fresh seeds\n{'dataset':15}{'batch':>6}{'NE':>10}{'± sd':>9}{'best':>10}{'± sd':>9}{'worse by':>10}")
    for row in found:
        print(f"{row['dataset']:15}{row['batch_size']:6}{row['ne']:10.4f}{row['sd']:9.4f}"
              f"{row['best']:10.4f}{row['best_sd']:9.4f}{row['percent']:8.2f} %  #{row['best_number']}")
    print(f"mean: {statistics.mean(row['percent'] for row in found):.2f} %\n", flush=True)
    return found


def beside(results, rows, seeds, setting):
    """Compares a setting with the defaults in every row: the difference of their means, and the deviation over seeds."""
    found = []
    for place in rows:
        defaults, other = (results.figures(*place, seeds, given) for given in (DEFAULTS, setting))
        ne, mean = statistics.mean(defaults), statistics.mean(other)
        seed = math.sqrt((spread(defaults) ** 2 + spread(other) ** 2) / 2)
        found.append({"dataset": place[0], "batch_size": place[1], "ne": ne, "sd": spread(defaults),
                      "other": mean, "other_sd": spread(other), "percent": 100 * (mean / ne - 1),
                      "seed_percent": 100 * seed / ne, "by_seed": [defaults, other]})
    return found


def show_beside(title, seeds, rows):
    print(f"{title} beside the defaults, seeds {','.join(map(str, seeds))}")
    print(f"{'dataset':15}{'batch':>6}{'NE':>10}{'± sd':>9}{'with it':>10}{'± sd':>9}"
          f"{'difference':>12}{'sd of a seed':>15}")
    for row in rows:
        print(f"{row['dataset']:15}{row['batch_size']:6}{row['ne']:10.4f}{row['sd']:9.4f}{row['other']:10.4f}"
              f"{row['other_sd']:9.4f}{row['percent']:+10.2f} %{row['seed_percent']:13.2f} %")
    print(flush=True)


def finite(value):
    """Returns the value with `null` in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(title, rows):
    print(title)
    print(f"{'dataset':15}{'batch':>6}{'NE':>10}{'± sd':>9}{'AUC':>9}{'best':>10}{'worse by':>10}"
          f"{'NE > 1':>8}  best setting")
    for row in rows:
        note = "  DIVERGED" if math.isinf(row["ne"]) else "  NE > 1" if row["ne"] > 1 else ""
        print(f"{row['dataset']:15}{row['batch_size']:6}{row['ne']:10.4f}{row['sd']:9.4f}{row['auc']:9.4f}"
              f"{row['best']:10.4f}{row['percent']:8.2f} %{row['above_one']:8}  #{row['best_number']}{note}")
    worst = max(rows, key=lambda row: row["percent"])
    print(f"worst: {worst['percent']:.2f} % on {worst['dataset']} in batches of {worst['batch_size']}\n", flush=True)


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    datasets = options.datasets.split(",")
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    settings = [DEFAULTS] if options.without_search else drawn(options.settings, options.search_seed)
    candidates = {text: candidate(text) for text in options.candidate}
    # Candidates are settings too: if one is better than the search, it is the best known setting.
    known = settings + [setting for setting in candidates.values() if setting not in settings]
    options.candidates = len(known) - len(settings)
    results = Results(options)
    rows = [(dataset, size) for dataset in datasets for size in sizes]
    given = [DEFAULTS, *candidates.values()]
    for dataset, size in rows:
        results.train([(dataset, size, seed, setting) for setting in given for seed in seeds])
    for dataset, size in rows:
        results.train([(dataset, size, seeds[0], setting) for setting in known])
        chosen, _ = finalists(results, options, dataset, size, seeds, known)
        results.train([(dataset, size, seed, known[number]) for number in chosen for seed in seeds])
    tables = {}
    for title, setting in {"defaults": DEFAULTS, **candidates}.items():
        tables[title] = [row_of(results, options, dataset, size, seeds, setting, known) for dataset, size in rows]
        show(title, tables[title])
    differences = {title: beside(results, rows, seeds, setting) for title, setting in candidates.items()}
    for title, found in differences.items():
        show_beside(title, seeds, found)
    if options.fresh_seeds:
        fresh = [int(seed) for seed in options.fresh_seeds.split(",")]
        tables["fresh"] = compare(results, tables["defaults"], fresh, known)
    for number in sorted({row["best_number"] for row in tables["defaults"]}):
        print(f"#{number}  " + " ".join(f"{key}={json.dumps(value)}" for key, value in known[number].items()))
    if options.json:
        found = {"seeds": seeds, "settings": known, "tables": tables, "beside": differences}
        print(json.dumps(finite(found)))


if __name__ == "__main__":
    main()
