#!/usr/bin/env python3
"""Compares held-out quality and training time of `onefold-train`, FuxiCTR and RecBole on the same samples and features.

    export PYTHONPATH=$(trainer/benches/rankers.sh)     # installs both libraries once
    trainer/benches/against_rankers.py --data movielens --work DIR [--bin target/release]
    trainer/benches/against_rankers.py --data ebnerd --ebnerd DIR --work DIR [--seeds 1,2,3] [--threads 2]

  onefold-dlrm     the model of the import's `train.toml`
  onefold-din      the same model, but the history is pooled by `din`, with the shown item as its target
  onefold-dcnv2    the model of the import's `train.toml` with three cross layers in place of dot products. Their rank is
                   half the width of all vectors, so that they have as many weights as RecBole's
  fuxictr-dlrm     a DLRM composed of FuxiCTR's layers, because its package on PyPI has no DLRM
  fuxictr-din      the DIN in FuxiCTR's package
  recbole-pnn      RecBole's PNN with inner products, its most similar model to a DLRM, because it has no DLRM
  recbole-dcnv2    RecBole's DCNV2, with three cross layers (its default)
  recbole-din      RecBole's DIN

These properties are the same for all systems: a dataset that `onefold-ingest build --layout rows` builds from the
imported logs, with a vocabulary for every sparse feature (the libraries get the samples from its Parquet files); the
import's split by time; vectors of 32 dimensions; hidden layers of 128 and 64, and of 64 and 32 for dense features if they
have their own layers; batches as in `train.toml`; float32; the number of threads. There is no dropout and no
regularization. Every feature has its own table, except that DIN models look up the history and the shown item in one.

Tuning: the end of the training part (`--tune-share`, by time) is set aside. Each system is trained on the rest with
every setting of a grid, learning rates times epochs, with the first seed; the grids have equal sizes. The setting with
the lowest log loss on the part set aside is then trained on the whole training part, once per seed, and evaluated on
the holdout, which is not used for any choice. Learning rates are those of Adam for the libraries (`--rates`), and factors
on both default rates for `onefold-train` (`--factors`). Optimizers, initial parameters and the order of samples are the
defaults of each system: the libraries shuffle all samples, `onefold-train` reads sessions in the order of time.

`seconds` is the wall time of the training loop with its loader. For `onefold-train` (`--dedupe exact`) this includes
reading the dataset from disk, while the libraries read tensors in memory. Imports, the creation of these tensors and
evaluations are excluded. `cpu s` is the processor time, which depends less on other programs of the machine; for
`onefold-train` it includes the start and the evaluation. On a busy machine, both allow only a rough comparison.

AUC, log loss and NE (log loss divided by the entropy of the evaluated samples' mean label) are computed from predictions
by one function. `onefold-train` reports metrics, not predictions: its NE is computed from its log loss, and its AUC
has the reported error bound `auc_error` (below 1e-4).

Differences that the libraries require:

  FuxiCTR   A feature without an id looks up row 0, which is trained; in Onefold it is a vector of zeros. DIN gives every
            dense feature a trained vector. FuxiCTR's own loader for DIN requires that the history of a sample is the
            beginning of one list per user, but the histories in the logs are windows. Therefore a loader in this script
            makes the batches, and cuts lists to the longest list of a batch. It does less work than FuxiCTR's loader.
            Gradients with a norm above 10 are clipped (its default). Its attention uses Dice, Onefold's uses sigmoids.
  RecBole   Its datasets get tensors instead of text files, and keep the ids of the vocabulary. PNN and DCNV2 get lists as
            `token_seq`, which they pool by the mean and always pad to the longest list of the dataset, and dense features
            as trained vectors. DIN has only the history and the shown item as inputs, both with the item's own features
            if there are any (MovieLens: genres and year), but no dense features and no features of the user or the
            request. Its attention has the widths of its hidden layers, the other systems have 80 and 40. DCNV2 and DIN
            use batch normalization. DCNV2's penalty on its cross layers is off (`reg_weight`), as is dropout.

All systems are tuned first, then all are trained with one seed after another. Every finished run is stored as a line of
`DATA.jsonl` in `--work`, and is not repeated. All other files are written to `--work` too. Prints a table, and with
`--json` one JSON object.
"""

import argparse
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings

warnings.filterwarnings("ignore")
# As in `onefold-train`: threads do not wait in a busy loop for longer than the time between two operations.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy
import pyarrow.parquet

from defaults import DEFAULTS

DIM, HIDDEN, BOTTOM, ATTENTION = 32, [128, 64], [64, 32], [80, 40]
SYSTEMS = [
    "onefold-dlrm", "onefold-din", "onefold-dcnv2", "fuxictr-dlrm", "fuxictr-din", "recbole-pnn", "recbole-dcnv2",
    "recbole-din",
]
# For each data set: the holdout's partition, the shown item, the history of items, the features of the item itself, the
# vocabularies that features share, and the numbers of epochs to choose from.
DATA = {
    "ebnerd": {
        "holdout": "validation", "item": "article_id", "history": "history", "attributes": [],
        "vocabularies": {"article_id": "articles", "history": "articles", "page_article_id": "articles"},
        "epochs": "1",
    },
    "movielens": {
        "holdout": "holdout", "item": "item_id", "history": "history_items",
        "attributes": ["genres", "release_year"],
        "vocabularies": {"item_id": "items", "history_items": "items", "liked_items": "items"},
        "epochs": "1,2",
    },
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, choices=list(DATA))
    add("--ebnerd", type=pathlib.Path, help="folder of EB-NeRD's behaviors and history files")
    add("--work", type=pathlib.Path, required=True, help="folder for datasets, runs and results")
    add("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    add("--seeds", default="1,2,3", help="seeds of parameters and shuffling; the first one is tuned with")
    add("--rates", default="0.001,0.003,0.01,0.03,0.1", help="the libraries' learning rates")
    add("--factors", default="0.25,0.5,1,2,4", help="on the learning rates of `train.toml`; as many as --rates")
    add("--epochs", help="epochs to choose from [default: 1 for ebnerd, 1,2 for movielens]")
    add("--tune-share", type=float, default=0.1, help="share of the training part that settings are chosen on")
    add("--threads", type=int, default=2)
    add("--only", help="systems, separated by commas")
    add("--finished", action="store_true", help="train nothing, and print the runs that are there")
    add("--json", action="store_true")
    options = parser.parse_args()
    if options.data == "ebnerd" and options.ebnerd is None:
        parser.error("--data ebnerd needs --ebnerd")
    numbers = lambda text, kind: [kind(part) for part in text.split(",")]
    options.rates, options.factors = numbers(options.rates, float), numbers(options.factors, float)
    if len(options.rates) != len(options.factors):
        parser.error("--rates and --factors need the same number of settings")
    options.epochs = numbers(options.epochs or DATA[options.data]["epochs"], int)
    options.seeds = numbers(options.seeds, int)
    options.systems = options.only.split(",") if options.only else SYSTEMS
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"--only: no system {', '.join(unknown)}")
    options.work, options.bin = options.work.resolve(), options.bin.resolve()
    return options


def run(*command):
    """Returns the JSON that a command of Onefold prints. LIBTORCH, if set, is the folder of the command's libtorch."""
    # Python's folders are for Python only, and so is its libtorch.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if "LIBTORCH" in environment:
        environment["LD_LIBRARY_PATH"] = f"{environment['LIBTORCH']}/lib"
    command = [str(part) for part in command]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def figures(labels, predictions):
    """Returns AUC, log loss and NE of probabilities."""
    labels = numpy.asarray(labels, numpy.float64)
    # Single precision has no values between 1 - 6e-8 and 1.
    predictions = numpy.clip(numpy.asarray(predictions, numpy.float64), 1e-7, 1 - 1e-7)
    loss = -numpy.mean(labels * numpy.log(predictions) + (1 - labels) * numpy.log1p(-predictions))
    # Equal predictions get their mean rank.
    _, inverse, counts = numpy.unique(predictions, return_inverse=True, return_counts=True)
    ranks = (numpy.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = labels.sum()
    negative = len(labels) - positive
    auc = (ranks[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * negative)
    return {"auc": float(auc), "loss": float(loss), "ne": ne_of(float(loss), float(labels.mean()))}


def ne_of(loss, mean):
    return loss / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))


def to_toml(table, path=()):
    """Returns a configuration as TOML, with keys before tables."""
    lines = [f"[{'.'.join(path)}]"] if path else []
    lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    inner = [to_toml(value, (*path, key)) for key, value in table.items() if isinstance(value, dict)]
    return "\n".join(["\n".join(lines) + "\n", *inner])


def build(options):
    """Builds the logs and the dataset of all systems, unless they exist. The partitions are `train`, `tune` and the holdout."""
    logs, dataset = options.work / f"{options.data}-logs", options.work / f"{options.data}-dataset"
    if not logs.exists():
        if options.data == "ebnerd":
            run(options.bin / "onefold-data", "import", "ebnerd", "--from", options.ebnerd, "--out", logs, "--json")
        else:
            run(options.bin / "onefold-data", "fetch", "movielens-100k", "--out", logs, "--json")
    if (dataset / "snapshots").is_dir():
        return logs, dataset
    text = (logs / "dataset.toml").read_text()
    shared = DATA[options.data]["vocabularies"]
    text = re.sub(
        r'(?m)^(\w+)( = \{ kind = "(?:sparse|sequence)".*?) \}',
        lambda match: f'{match[1]}{match[2]}, vocabulary = "{shared.get(match[1], "frequency")}" }}', text,
    )
    text += "".join(f"\n[vocabularies.{name}]\n" for name in sorted(set(shared.values())))

    def build_to(out, query):
        config = logs / "rankers.toml"
        config.write_text(text.replace(before, query))
        run(options.bin / "onefold-ingest", "build", config, "--out", out, "--layout", "rows",
            "--threads", options.threads, "--json")

    before = re.search(r'(?s)query = """(.*?)"""', text)[1]
    first = options.work / f"{options.data}-whole"
    if not (first / "snapshots").is_dir():
        build_to(first, before)
    files = pyarrow.parquet.ParquetDataset(first / "data" / "split=train")
    times = numpy.sort(files.read(["timestamp"])[0].to_numpy())
    boundary = str(times[int(len(times) * (1 - options.tune_share))]).replace("T", " ")
    build_to(dataset, f"""
SELECT whole.* EXCEPT (split),
    CASE WHEN split = 'train' AND timestamp >= TIMESTAMP '{boundary}' THEN 'tune' ELSE split END AS split
FROM ({before}) AS whole
""")
    return logs, dataset


class Samples:
    """The samples of a dataset in memory, by part: `train`, `tune`, `holdout`.

    `features` has for each sparse feature the number of table rows, and whether samples have lists. Ids are those of the
    dataset, 1 or above. A list is a row of ids, padded with zeros; a missing single id is 0.
    """

    def __init__(self, dataset, data):
        schema = json.loads(max(dataset.glob("snapshots/*.json")).read_text())["schema"]
        self.dense, self.label = schema["dense"], schema["labels"][0]
        names = [feature["name"] for group in schema["groups"] for feature in group["features"]]
        self.item, self.history, self.attributes = data["item"], data["history"], data["attributes"]
        partitions = {"train": "train", "tune": "tune", "holdout": data["holdout"]}
        tables = {}
        for part, partition in partitions.items():
            files = sorted((dataset / "data" / f"split={partition}").glob("*.parquet"))
            columns = [self.label, *self.dense, *names]
            tables[part] = pyarrow.concat_tables(pyarrow.parquet.ParquetFile(file).read(columns) for file in files)
        self.features, self.parts = {}, {part: {} for part in partitions}
        for part, table in tables.items():
            for name in [self.label, *self.dense]:
                self.parts[part][name] = table[name].to_numpy().astype(numpy.float32)
        for name in names:
            lists = {part: table[name].combine_chunks() for part, table in tables.items()}
            lengths = {
                part: array.value_lengths().fill_null(0).to_numpy().astype(numpy.int64) for part, array in lists.items()
            }
            longest = max(int(own.max()) for own in lengths.values())
            rows = 1
            for part, array in lists.items():
                ids = numpy.zeros((len(array), longest), numpy.int64)
                ids[numpy.arange(longest) < lengths[part][:, None]] = array.flatten().to_numpy()
                rows = max(rows, int(ids.max()) + 1)
                self.parts[part][name] = ids if longest > 1 else ids[:, 0]
                if name == self.history:
                    self.parts[part]["history_length"] = lengths[part]
            self.features[name] = {"rows": rows, "list": longest > 1}
        # Features with the same vocabulary share the ids of one table.
        for name, vocabulary in data["vocabularies"].items():
            alike = [other for other, own in data["vocabularies"].items() if own == vocabulary]
            self.features[name]["rows"] = max(self.features[other]["rows"] for other in alike)

    def columns(self, parts):
        """Returns the concatenated columns of several parts as tensors."""
        import torch

        return {
            name: torch.from_numpy(numpy.concatenate([self.parts[part][name] for part in parts]))
            for name in self.parts[parts[0]]
        }


def adopt_seed(seed):
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def processor_seconds(whose):
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def timed(train):
    """Returns the wall and processor seconds of a library's training."""
    busy, started = processor_seconds(resource.RUSAGE_SELF), time.perf_counter()
    train()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": processor_seconds(resource.RUSAGE_SELF) - busy}


class Onefold:
    def __init__(self, options, samples, logs, dataset, model):
        self.options, self.samples, self.model = options, samples, model
        self.logs, self.dataset = logs, dataset

    def settings(self):
        return self.options.factors

    def train(self, parts, evaluated, factor, epochs, seed):
        config = tomllib.loads((self.logs / "train.toml").read_text())
        holdout = DATA[self.options.data]["holdout"]
        config["data"]["train"] = "split=train" if parts == ["train"] else f"split!={holdout}"
        config["data"]["eval"] = "split=tune" if evaluated == "tune" else f"split={holdout}"
        config["train"] |= {"epochs": epochs, "seed": seed}
        config["tables"] = {
            name: {"rows": own["rows"], "ids": "checked"} for name, own in self.samples.features.items()
        }
        if self.model == "din":
            config["tables"][self.samples.item]["table"] = "items"
            config["tables"][self.samples.history] |= {"table": "items", "pooling": "din", "target": self.samples.item}
            config["model"]["din_hidden"] = ATTENTION
        if self.model == "dcnv2":
            rank = DIM * (len(self.samples.features) + 1) // 2
            config["model"] |= {"interaction": "dcn", "dcn_num_layers": 3, "dcn_low_rank_dim": rank}
        config["optimizer"] = {
            "tables": {"learning_rate": factor * DEFAULTS["tables.learning_rate"]},
            "dense": {name: DEFAULTS[f"dense.{name}"] for name in ("learning_rate", "max_grad_norm")},
        }
        config["optimizer"]["dense"]["learning_rate"] *= factor
        with tempfile.TemporaryDirectory(dir=self.options.work) as folder:
            file = pathlib.Path(folder) / "train.toml"
            file.write_text(to_toml(config))
            busy = processor_seconds(resource.RUSAGE_CHILDREN)
            summary = run(self.options.bin / "onefold-train", "run", file, "--data", self.dataset,
                          "--out", file.parent / "run", "--threads", self.options.threads, "--dedupe", "exact", "--quiet",
                          "--json")
            busy = processor_seconds(resource.RUSAGE_CHILDREN) - busy
        own = summary["eval"]
        result = {"auc": own["auc"], "loss": own["loss"], "ne": ne_of(own["loss"], own["base_rate"])}
        labels = self.samples.parts[evaluated][self.samples.label]
        if own["samples"] != len(labels) or abs(own["base_rate"] - labels.mean(dtype=numpy.float64)) > 1e-6:
            raise SystemExit(f"onefold-train evaluated on other samples: {own}")
        return result | {
            "seconds": summary["wall_seconds"], "cpu_seconds": busy,
            "auc_error": own["auc_error"], "samples": summary["samples"],
            "parameters": sum(summary["parameters"].values()),
        }


class Batches:
    """Batches for FuxiCTR's models, shuffled in every epoch if they are for training.

    `make` converts the columns of a batch. Lists are cut to the longest list of the batch.
    """

    def __init__(self, columns, lists, size, shuffled, make):
        self.columns, self.lists, self.size = columns, lists, size
        self.shuffled, self.make = shuffled, make
        self.samples = len(next(iter(columns.values())))

    def __len__(self):
        return -(-self.samples // self.size)

    def __iter__(self):
        import torch

        order = torch.randperm(self.samples) if self.shuffled else torch.arange(self.samples)
        for chosen in order.split(self.size):
            batch = {name: column[chosen] for name, column in self.columns.items()}
            for name in self.lists:
                longest = int((batch[name] != 0).sum(1).max())
                batch[name] = batch[name][:, : max(longest, 1)]
            yield self.make(batch)


class FuxiCTR:
    def __init__(self, options, samples, batch_size, model):
        self.options, self.samples, self.batch_size, self.model = options, samples, batch_size, model

    def settings(self):
        return self.options.rates

    def feature_map(self):
        from fuxictr.features import FeatureMap

        samples = self.samples
        result = FeatureMap(self.options.data, str(self.options.work))
        for name in samples.dense:
            result.features[name] = {"type": "numeric", "source": ""}
        for name, own in samples.features.items():
            if self.model == "din" and name == samples.history:
                continue
            spec = {"type": "categorical", "source": "", "vocab_size": own["rows"]}
            if own["list"]:
                spec |= {"type": "sequence", "padding_idx": 0, "feature_encoder": "layers.MaskedAveragePooling()"}
            if self.model == "din" and name == samples.item:
                spec |= {"source": "item", "padding_idx": 0}
            result.features[name] = spec
        result.labels = [samples.label]
        result.num_fields = result.get_num_fields()
        result.default_emb_dim = DIM
        return result

    def new_model(self, rate):
        import torch
        from fuxictr.pytorch.layers import FeatureEmbedding, InnerProductInteraction, MLP_Block
        from fuxictr.pytorch.models import BaseModel
        from model_zoo.LongCTR.DIN import DIN

        class FixedEpochs:
            """Trains a fixed number of epochs, without evaluations in between; the last parameters are the result."""

            def eval_step(self):
                pass

            def load_weights(self, checkpoint):
                pass

        class DLRM(FixedEpochs, BaseModel):
            def __init__(self, feature_map, learning_rate, **rest):
                super().__init__(feature_map, model_id="DLRM", **rest)
                self.dense = [name for name, spec in feature_map.features.items() if spec["type"] == "numeric"]
                vectors = feature_map.num_fields - len(self.dense) + 1
                self.vectors = FeatureEmbedding(feature_map, DIM, not_required_feature_columns=self.dense)
                self.bottom = MLP_Block(len(self.dense), hidden_units=BOTTOM, hidden_activations="ReLU")
                self.products = InnerProductInteraction(vectors, output="inner_product")
                self.top = MLP_Block(DIM + vectors * (vectors - 1) // 2, output_dim=1, hidden_units=HIDDEN,
                                     hidden_activations="ReLU", output_activation=self.output_activation)
                self.compile(rest["optimizer"], rest["loss"], learning_rate)
                self.reset_parameters()
                self.model_to_device()

            def forward(self, inputs):
                features = self.get_inputs(inputs)
                bottom = self.bottom(torch.stack([features[name] for name in self.dense], 1))
                vectors = torch.cat([bottom.unsqueeze(1), self.vectors(features)], 1)
                return {"y_pred": self.top(torch.cat([bottom, self.products(vectors)], 1))}

        class FixedDIN(FixedEpochs, DIN):
            pass

        rest = {
            "optimizer": "adam", "loss": "binary_crossentropy", "learning_rate": rate, "verbose": 0,
            "metrics": ["AUC", "logloss"], "model_root": str(self.options.work / "fuxictr"),
        }
        if self.model == "dlrm":
            return DLRM(self.feature_map(), **rest)
        return FixedDIN(self.feature_map(), embedding_dim=DIM, dnn_hidden_units=HIDDEN,
                        attention_hidden_units=ATTENTION, **rest)

    def batches(self, parts, shuffled):
        import torch

        samples = self.samples
        columns = samples.columns(parts)
        del columns["history_length"]
        lists = [name for name, own in samples.features.items() if own["list"]]

        def with_history(batch):
            history, item = batch.pop(samples.history), batch.pop(samples.item)
            return batch, {samples.item: torch.cat([history, item.unsqueeze(1)], 1)}, (history != 0).float()

        make = with_history if self.model == "din" else lambda batch: batch
        return Batches(columns, lists, self.batch_size if shuffled else 4096, shuffled, make)

    def train(self, parts, evaluated, rate, epochs, seed):
        batches = self.batches(parts, True)
        adopt_seed(seed)
        model = self.new_model(rate)
        times = timed(lambda: model.fit(batches, epochs=epochs))
        predictions = model.predict(self.batches([evaluated], False))
        return figures(self.samples.parts[evaluated][self.samples.label], predictions) | times | {
            "samples": batches.samples * epochs,
            "parameters": sum(own.numel() for own in model.parameters() if own.requires_grad),
        }


class RecBole:
    def __init__(self, options, samples, batch_size, model):
        self.options, self.samples, self.batch_size, self.model = options, samples, batch_size, model

    def settings(self):
        return self.options.rates

    def config(self, rate, epochs, seed):
        from recbole.config import Config

        settings = {
            "USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": self.samples.item, "LABEL_FIELD": self.samples.label,
            "TIME_FIELD": None, "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "item_length",
            "MAX_ITEM_LIST_LENGTH": self.samples.parts["train"][self.samples.history].shape[1],
            "numerical_features": self.samples.dense, "train_neg_sample_args": None,
            "eval_args": {"split": {"RS": [1, 0, 0]}, "order": "RO", "group_by": "none", "mode": "labeled"},
            "metrics": ["AUC", "LogLoss"], "valid_metric": "AUC",
            "use_gpu": False, "show_progress": False, "state": "ERROR", "seed": seed,
            "epochs": epochs, "learner": "adam", "learning_rate": rate, "train_batch_size": self.batch_size,
            "embedding_size": DIM, "mlp_hidden_size": HIDDEN, "dropout_prob": 0.0, "pooling_mode": "mean",
        }
        if self.model in ("pnn", "dcnv2"):
            settings["reg_weight"] = 0.0
        # RecBole also parses the command line.
        given, sys.argv = sys.argv, sys.argv[:1]
        try:
            return Config(model=self.model.upper(), dataset="samples", config_dict=settings)
        finally:
            sys.argv = given

    def dataset(self, config, parts):
        import torch
        from recbole.data.dataset import Dataset
        from recbole.data.interaction import Interaction
        from recbole.utils import FeatureSource, FeatureType

        samples = self.samples
        columns = samples.columns(parts)
        history_length = columns.pop("history_length")
        # DIN has only the history and the item with its own features as inputs.
        if self.model == "din":
            names = ["user_id", samples.item]
            inputs = {name: columns[name] for name in [samples.label, *names]}
            inputs[f"{samples.item}_list"], inputs["item_length"] = columns[samples.history], history_length
            dense, names = [], names + samples.attributes
        else:
            inputs, dense, names = columns, samples.dense, list(samples.features)
        items = None
        if self.model == "din" and samples.attributes:
            every = samples.columns(["train", "tune", "holdout"])
            items = {samples.item: torch.arange(samples.features[samples.item]["rows"])}
            for name in samples.attributes:
                own = torch.zeros((len(items[samples.item]), *every[name].shape[1:]), dtype=torch.int64)
                own[every[samples.item]] = every[name]
                items[name] = own

        class InMemory(Dataset):
            """RecBole's dataset with tensors instead of files, and with the ids of the vocabulary."""

            def _from_scratch(self):
                self._get_preset()
                self._get_field_from_config()
                self.user_feat, self.feat_name_list = None, ["inter_feat"]
                sources = {"user_id": FeatureSource.USER_ID, samples.item: FeatureSource.ITEM_ID}
                self.set_field_property(samples.label, FeatureType.FLOAT, FeatureSource.INTERACTION, 1)
                for name in dense:
                    self.set_field_property(name, FeatureType.FLOAT, FeatureSource.INTERACTION, 1)
                    # A number is stored as a pair of its value and the row of its vector, as in RecBole's own preparation.
                    self.field2bucketnum[name] = 2
                    inputs[name] = torch.stack([inputs[name], torch.ones_like(inputs[name])], 1)
                for name in names:
                    own = samples.features[name]
                    kind = FeatureType.TOKEN_SEQ if own["list"] else FeatureType.TOKEN
                    length = samples.parts["train"][name].shape[1] if own["list"] else 1
                    self.set_field_property(name, kind, sources.get(name, FeatureSource.INTERACTION), length)
                    self.field2id_token[name] = range(own["rows"])
                self.inter_feat = Interaction(inputs)
                self.item_feat = Interaction(items) if items else None

        return InMemory(config)

    def train(self, parts, evaluated, rate, epochs, seed):
        import torch
        from recbole.data.dataloader import TrainDataLoader
        from recbole.trainer import Trainer
        from recbole.utils import get_model, init_seed

        config = self.config(rate, epochs, seed)
        init_seed(seed, config["reproducibility"])
        dataset = self.dataset(config, parts)
        loader = TrainDataLoader(config, dataset, None, shuffle=True)
        init_seed(seed, config["reproducibility"])
        model = get_model(config["model"])(config, dataset)
        trainer = Trainer(config, model)
        times = timed(lambda: trainer.fit(loader, verbose=False, saved=False))
        model.eval()
        held_out = self.dataset(config, [evaluated]).inter_feat
        with torch.no_grad():
            predictions = [model.predict(held_out[start : start + 4096]) for start in range(0, len(held_out), 4096)]
        return figures(self.samples.parts[evaluated][self.samples.label], torch.cat(predictions).numpy()) | times | {
            "samples": len(dataset) * epochs,
            "parameters": sum(own.numel() for own in model.parameters() if own.requires_grad),
        }


class Results:
    """The finished runs, stored as lines of a file."""

    def __init__(self, file):
        self.file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self.known = {self.key(line["run"]): line for line in map(json.loads, lines)}

    @staticmethod
    def key(described):
        return json.dumps(described, sort_keys=True)

    def get(self, described, train):
        """Returns the line of a run. A missing run is trained; without `train`, returns None."""
        key = self.key(described)
        if key not in self.known:
            if train is None:
                return None
            began = time.perf_counter()
            self.known[key] = {"run": described} | train()
            with self.file.open("a") as file:
                file.write(json.dumps(self.known[key]) + "\n")
            line = self.known[key]
            print(f"{' '.join(f'{name}={value}' for name, value in described.items())}: "
                  f"loss {line['loss']:.4f} auc {line['auc']:.4f} {line['seconds']:.1f} s "
                  f"({time.perf_counter() - began:.0f} s)", file=sys.stderr)
        return self.known[key]


class Competitor:
    """A system, its grid, and its runs on the whole training part."""

    def __init__(self, options, name, system, results):
        self.options, self.name, self.system, self.results = options, name, system, results
        self.runs, self.grid, self.chosen = [], [], None

    def one(self, parts, evaluated, setting, epochs, seed):
        described = {
            "system": self.name, "evaluated": evaluated, "setting": setting, "epochs": epochs, "seed": seed,
            "threads": self.options.threads, "tune_share": self.options.tune_share,
        }
        train = lambda: self.system.train(parts, evaluated, setting, epochs, seed)
        return self.results.get(described, None if self.options.finished else train)

    def tune(self):
        grid = [
            self.one(["train"], "tune", setting, epochs, self.options.seeds[0])
            for epochs in self.options.epochs for setting in self.system.settings()
        ]
        if all(grid):
            self.grid = grid
            self.chosen = min(grid, key=lambda line: line["loss"])["run"]

    def hold_out(self, seed):
        if self.chosen is None:
            return
        line = self.one(["train", "tune"], "holdout", self.chosen["setting"], self.chosen["epochs"], seed)
        if line:
            self.runs.append(line)


def main():
    options = arguments()
    logging.disable(logging.WARNING)
    options.work.mkdir(parents=True, exist_ok=True)
    logs, dataset = build(options)
    samples = Samples(dataset, DATA[options.data])
    batch_size = tomllib.loads((logs / "train.toml").read_text())["train"]["batch_size"]
    # The libraries write files to the current directory.
    scratch = options.work / "scratch"
    scratch.mkdir(exist_ok=True)
    os.chdir(scratch)
    if any(not name.startswith("onefold") for name in options.systems):
        import torch

        torch.set_num_threads(options.threads)
    results = Results(options.work / f"{options.data}.jsonl")
    competitors = []
    for name in options.systems:
        library, model = name.split("-")
        if library == "onefold":
            system = Onefold(options, samples, logs, dataset, model)
        else:
            system = {"fuxictr": FuxiCTR, "recbole": RecBole}[library](options, samples, batch_size, model)
        competitors.append(Competitor(options, name, system, results))
    for competitor in competitors:
        competitor.tune()
    for seed in options.seeds:
        for competitor in competitors:
            competitor.hold_out(seed)
    counts = {part: len(columns[samples.label]) for part, columns in samples.parts.items()}
    print(f"{options.data}: " + ", ".join(f"{count:,} samples in {part}" for part, count in counts.items()))
    print(f"{'system':15}{'setting':>9}{'epochs':>7}{'seeds':>6}{'AUC':>9}{'± sd':>8}{'NE':>9}{'± sd':>8}"
          f"{'log loss':>10}{'seconds':>9}{'cpu s':>8}")
    for competitor in competitors:
        runs = competitor.runs
        if not runs:
            continue
        chosen = competitor.chosen
        row = f"{competitor.name:15}{chosen['setting']:>9}{chosen['epochs']:>7}{len(runs):>6}"
        for key in ("auc", "ne"):
            values = [line[key] for line in runs]
            row += f"{statistics.mean(values):9.4f}{statistics.stdev(values) if len(values) > 1 else 0:8.4f}"
        mean = lambda key: statistics.mean(line[key] for line in runs)
        print(row + f"{mean('loss'):10.4f}{mean('seconds'):9.1f}{mean('cpu_seconds'):8.1f}")
    if options.json:
        packages = ("fuxictr", "recbole", "torch", "numpy")
        print(json.dumps({
            "data": options.data, "samples": counts, "batch_size": batch_size, "threads": options.threads,
            "seeds": options.seeds, "versions": {name: importlib.metadata.version(name) for name in packages},
            "systems": {own.name: {"chosen": own.chosen, "grid": own.grid, "runs": own.runs} for own in competitors},
        }))


if __name__ == "__main__":
    main()
