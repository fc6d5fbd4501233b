#!/usr/bin/env python3
"""Compares the metrics of `onefold-train eval` with scikit-learn's, computed from the output of `onefold-train predict`.

    trainer/benches/sklearn_rankings.py [--bin target/release] [--samples 6000] [--seed 1] [--ranks 1] [--json]

Makes logs, builds datasets from them, trains models with a click (`bce`) and a count (`poisson`) for a few steps, and
compares every metric with the one computed from the file of predictions, joined to the labels by key. The groups are
defined by kept columns that cover all cases:

  shown      1 to 12 random samples; some groups have one sample, some only clicks, some no clicks
  single     every sample is a group
  classes    each group has only one class: half of the groups have only clicks, half have none
  tied       all samples of a group have the same features, so all its scores are equal
  some       as `shown`, but a third of the samples have no group
  whole      one group of all samples
  weighted   as `shown`, in a dataset with sample weights, which affect losses and AUC, but not rankings

A third of all samples repeat the features of another sample, so that other groups have equal scores too.

The reference values come from scikit-learn's `log_loss`, `roc_auc_score`, `ndcg_score`, `mean_poisson_deviance`,
`mean_squared_error`, `mean_absolute_error` and `r2_score`, for rankings group by group. It has no `mrr` and no
`hit_rate_at_K`, rejects the nDCG of a group of one sample, and lacks PyTorch's loss of counts; these are computed below
by their definitions. Scores are the 32-bit logits, which the file stores exactly; all else is computed in 64 bits on both
sides.

Prints a table of all metrics and one of the largest differences, or with `--json` one JSON object.

Metrics may differ by TOLERANCE, and counts must be equal. Sums of some thousand 64-bit numbers of about 1 differ by
about 1e-13 if the order of summation changes; a log loss from probabilities, as scikit-learn computes it, has errors of up
to 1e-11 for logits of about 10. A group, a tie or a rank that is treated differently changes a mean over some thousand
groups by 1e-6 or more. The exit status is 1 if a difference is larger.

scikit-learn and its dependencies (0.4 GB) are installed once, into a folder in
${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}; ONEFOLD_SKLEARN may name another folder with them.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = """\
scikit-learn==1.9.1
numpy==2.4.6
scipy==1.17.1
joblib==1.6.0
threadpoolctl==3.8.0
narwhals==2.29.0
pyarrow==26.0.1
"""
TOLERANCE = 1e-9
TOP = [1, 3, 10]
COLUMNS = ["shown", "single", "classes", "tied", "some", "whole"]

DATASET = """\
format_version = 1
keep = ["request", {columns}]

[sources]
log = "log.parquet"

[samples]
source = "log"

[session]
user = "user"
gap = "30m"
time = "time"
order = ["request"]

[features]
clicked = {{ kind = "label" }}
count = {{ kind = "label" }}
price = {{ kind = "dense" }}
user = {{ kind = "sparse", group = "user" }}
history = {{ kind = "sequence", group = "history" }}
item = {{ kind = "sparse" }}
"""
TRAIN = """\
format_version = 1

[data]

[[tasks]]
label = "clicked"

[[tasks]]
label = "count"
loss = "poisson"

[train]
batch_size = 256
epochs = 1
seed = {seed}

[evaluation]
group = "{column}"
top = {top}

[model]
bottom_mlp = [8, 8]
top_mlp = [16, 2]
interaction = "dot"

[embedding]
dim = 8
rows = 1000
pooling = "mean"
ids = "checked"

[optimizer.tables]
kind = "row_wise_adagrad"
learning_rate = 0.1
eps = 1e-8

[optimizer.dense]
kind = "adagrad"
learning_rate = 0.05
eps = 1e-8
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bin", type=pathlib.Path, default=ROOT / "target" / "release", help="folder of the binaries")
    add("--samples", type=int, default=6000)
    add("--seed", type=int, default=1, help="of the logs and the models")
    add("--ranks", type=int, default=1, help="that evaluate and predict together")
    add("--json", action="store_true", help="print one object in place of the table")
    return parser.parse_args()


def sklearn():
    """Returns the folder of scikit-learn and its dependencies; installs them unless they exist."""
    with tempfile.NamedTemporaryFile("w", prefix="sklearn", suffix=".txt") as requirements:
        requirements.write(REQUIREMENTS)
        requirements.flush()
        script = ROOT / "tests" / "python_packages.sh"
        package = ["ONEFOLD_SKLEARN", "sklearn", "1.9.1", "scikit-learn", "0.4 GB"]
        line = [script, *package, requirements.name, "Python 3.11 to 3.14"]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.strip()


def run(*words):
    """Returns the JSON object that a command prints with `--json`."""
    done = subprocess.run([*map(str, words), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def logs(samples, seed):
    """Returns the columns of the log: samples, their labels, and their groups."""
    random = numpy.random.default_rng(seed)
    number = numpy.arange(samples)
    user, item = random.integers(0, 50, samples), random.integers(0, 200, samples)
    price = random.integers(0, 20, samples) / 10
    histories = [random.integers(0, 200, size).tolist() for size in random.integers(0, 6, 100)]
    history = random.integers(0, len(histories), samples)
    copied = numpy.where(random.random(samples) < 1 / 3, random.integers(0, samples, samples), number)
    # A copy has the same features, but its own labels.
    features = numpy.stack([user, item, number, history])[:, copied]
    user, item, price, history = features[0], features[1], price[features[2]], features[3]
    chance = 1 / (1 + numpy.exp(1.5 - (item % 7) / 3 - (user % 5) / 4))
    clicked = random.random(samples) < chance
    count = random.poisson(2 * chance) * (random.random(samples) < 0.6)
    # The sizes of groups, whose samples are far apart in the log.
    sizes = random.integers(1, 13, samples)
    shown = numpy.repeat(number, sizes)[random.permutation(samples)]
    return {
        "request": number,
        "time": 1_714_521_600_000_000 + 60_000_000 * number,
        "user": user,
        "item": item,
        "price": price,
        "history": [histories[own] for own in history],
        "clicked": clicked.astype(float),
        "count": count.astype(float),
        "weight": random.integers(1, 5, samples) / 2,
        "shown": shown,
        "single": number,
        "classes": [f"{own // 7}-{label}" for own, label in zip(shown, clicked, strict=True)],
        "tied": copied,
        "some": [None if own % 3 == 0 else f"group {own}" for own in shown],
        "whole": numpy.zeros(samples, dtype=int),
    }


def write(folder, columns):
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    time = table.schema.get_field_index("time")
    table = table.set_column(time, "time", table["time"].cast(pyarrow.timestamp("us")))
    pyarrow.parquet.write_table(table, folder / "log.parquet")


def group_figures(labels, scores, groups):
    """Returns the counts and the ranking metrics, computed group by group."""
    by_group = {}
    for number, group in enumerate(groups):
        if group is not None:
            by_group.setdefault(group, []).append(number)
    sums = {}
    counts = {"groups": len(by_group), "groups_with_hits": 0, "groups_with_both": 0}
    counts["samples_without_group"] = sum(group is None for group in groups)

    def add(name, value, weight=1):
        total, weights = sums.get(name, (0.0, 0))
        sums[name] = total + weight * value, weights + weight

    for numbers in by_group.values():
        label, score = labels[numbers], scores[numbers]
        hits = label > 0
        if not hits.any():
            continue
        counts["groups_with_hits"] += 1
        if not hits.all():
            counts["groups_with_both"] += 1
            auc = metrics.roc_auc_score(hits, score)
            add("gauc", auc, len(numbers))
            add("group_auc", auc)
        best = score[hits].max()
        above, equal = int((score > best).sum()), score == best
        # The mean rank of all samples with the score of the best hit.
        add("mrr", 1 / (above + (equal.sum() + 1) / 2))
        for top in TOP:
            alone = len(numbers) == 1
            add(f"ndcg_at_{top}", 1.0 if alone else metrics.ndcg_score([label], [score], k=top))
            add(f"hit_rate_at_{top}", hit_chance(top - above, int(equal.sum()), int(hits[equal].sum())))
    return counts, {name: total / weights for name, (total, weights) in sums.items()}


def hit_chance(places, samples, hits):
    """Returns the probability that one of the first `places` samples is a hit, over all orders of the samples."""
    if places <= 0:
        return 0.0
    places = min(places, samples)
    return 1 - math.comb(samples - hits, places) / math.comb(samples, places)


def clicked_figures(labels, logits, weights):
    probability = 1 / (1 + numpy.exp(-logits))
    return {
        "loss": metrics.log_loss(labels, probability, sample_weight=weights),
        "auc": metrics.roc_auc_score(labels, logits, sample_weight=weights),
    }


def count_figures(labels, logits, weights):
    count = numpy.exp(logits)
    of = {"sample_weight": weights}
    return {
        "loss": numpy.average(count - labels * logits, weights=weights),
        "deviance": metrics.mean_poisson_deviance(labels, count, **of),
        "rmse": math.sqrt(metrics.mean_squared_error(labels, count, **of)),
        "mae": metrics.mean_absolute_error(labels, count, **of),
        "r2": metrics.r2_score(labels, count, **of),
    }


def compared(work, options, columns, column, weighted):
    """Returns lines of the table for the groups of a column: task, metric, both values."""
    dataset = work / ("weighted" if weighted else "plain")
    train = dataset / f"{column}.toml"
    train.write_text(TRAIN.format(seed=options.seed, column=column, top=TOP))
    trainer, on_data = options.bin / "onefold-train", ["--data", dataset / "data"]
    model = dataset / f"run-{column}"
    run(trainer, "run", train, *on_data, "--out", model, "--max-steps", 10, "--threads", 2)
    launched = [trainer, "launch", "--ranks", options.ranks, "--"] if options.ranks > 1 else [trainer]
    found = run(*launched, "eval", model, *on_data)
    run(*launched, "predict", model, *on_data, "--out", dataset / "predictions.parquet", "--overwrite")
    rows = pyarrow.parquet.read_table(dataset / "predictions.parquet").to_pydict()
    request = numpy.array(rows["request"])
    assert sorted(request) == list(range(options.samples)), "a prediction is missing or there twice"
    assert rows[column] == [plain(columns[column][own]) for own in request], "a kept column is not the log's"
    weights = columns["weight"][request] if weighted else None
    lines = []
    for task, figures_of in (("clicked", clicked_figures), ("count", count_figures)):
        labels, logits = columns[task][request], numpy.array(rows[f"logit_{task}"], dtype=float)
        ours = found["tasks"][task]
        counts, ranking = group_figures(labels, logits, rows[column])
        # Metrics that do not depend on groups are compared once per dataset.
        if column == "shown":
            lines += [(task, name, ours[name], value) for name, value in figures_of(labels, logits, weights).items()]
        lines += [(task, name, ours["ranking"][name], value) for name, value in counts.items()]
        names = ["gauc", "group_auc", "mrr", *(f"{name}_at_{top}" for name in ("ndcg", "hit_rate") for top in TOP)]
        lines += [(task, name, ours["ranking"].get(name), ranking.get(name)) for name in names]
    return lines


def plain(value):
    return value.item() if isinstance(value, numpy.generic) else value


def difference(ours, theirs):
    """Returns the difference of two values; infinite if only one exists."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return abs(ours - theirs)


def shown(value):
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.12f}"


def main():
    options = arguments()
    folder = sklearn()
    sys.path.insert(0, folder)
    global metrics, numpy, pyarrow
    import numpy
    import pyarrow
    import pyarrow.parquet
    import sklearn as library
    from sklearn import metrics

    columns = logs(options.samples, options.seed)
    found = []
    with tempfile.TemporaryDirectory(prefix="sklearn-rankings-") as work:
        work = pathlib.Path(work)
        for name in ("plain", "weighted"):
            write(work / name, columns)
            config = DATASET.format(columns=", ".join(f'"{column}"' for column in COLUMNS))
            config += 'weight = { kind = "weight" }\n' if name == "weighted" else ""
            (work / name / "dataset.toml").write_text(config)
            build = [options.bin / "onefold-ingest", "build", work / name / "dataset.toml"]
            run(*build, "--out", work / name / "data", "--buckets", 4)
        for column in COLUMNS:
            found += [(column, *line) for line in compared(work, options, columns, column, False)]
        found += [("weighted", *line) for line in compared(work, options, columns, "shown", True)]
    wrong = [line for line in found if difference(*line[3:]) > (0 if isinstance(line[3], int) else TOLERANCE)]
    if options.json:
        keys = ["group", "task", "figure", "onefold", "reference"]
        rows = [dict(zip(keys, line, strict=True)) | {"difference": difference(*line[3:])} for line in found]
        said = {"scikit_learn": library.__version__, "tolerance": TOLERANCE, "wrong": len(wrong), "figures": rows}
        print(json.dumps(said))
    else:
        reference = f"scikit-learn {library.__version__} or definition"
        print(f"| groups | task | figure | onefold-train eval | {reference} | difference |")
        print("|---|---|---|---|---|---|")
        for line in found:
            mark = " **wrong**" if line in wrong else ""
            values = f"{shown(line[3])} | {shown(line[4])} | {difference(*line[3:]):.1e}{mark}"
            print(f"| {' | '.join(line[:3])} | {values} |")
        print("\n| figure | compared | largest difference |\n|---|---|---|")
        for name in dict.fromkeys(line[2] for line in found):
            of_name = [difference(*line[3:]) for line in found if line[2] == name]
            print(f"| {name} | {len(of_name)} | {max(of_name):.1e} |")
        print(f"\n{len(found)} figures, {len(wrong)} differ by more than {TOLERANCE:.0e}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
