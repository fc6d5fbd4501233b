"""How fast TorchRec's DLRM trains on the CPU: deduplicated by this package, plain, and fed by pyarrow.

    onefold-data generate --workload rm1 --samples 500000 --seed 1 --out logs
    onefold-ingest build logs/dataset.toml --out folded
    onefold-ingest build logs/dataset.toml --out rows --layout rows
    PYTHONPATH=$(sharding/torchrec.sh) python python/benches/train.py folded rows

All train the model of `examples/torchrec_dlrm.py`, with an unsharded EmbeddingBagCollection, from the same weights
on the same samples in file order, in batches of 2,048. Two read the folded dataset: deduplicated and plain. The
first trains once with the collection of `onefold.torchrec`, and once with TorchRec's own, whose gradient is slow on
the CPU. The last is fed by the loader of `read.py` on the layout `rows`. Losses must be equal to 1e-5 in every
step. Rates are of `--steps` steps, reading included, after one that is not counted.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy
import torch
import torchrec

import onefold
from onefold.torchrec import to_kjt

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "examples")]

from read import BATCH, batches_of_pyarrow  # noqa: E402
from torchrec_dlrm import Trainer, make_model  # noqa: E402


def with_onefold(dataset, deduplicated):
    """Yields dense features, sparse features and labels of all batches of this package."""
    for batch in onefold.Dataset(dataset, global_batch_size=BATCH, dedupe="exact"):
        batch = batch.to_torch()
        yield batch.dense, to_kjt(batch, deduplicated=deduplicated), batch.labels[:, :1]


def with_pyarrow(dataset, schema):
    """Yields dense features, sparse features and labels of all batches of the loader on pyarrow and numpy."""
    labels = len(schema["labels"])
    for floats, features in batches_of_pyarrow(dataset, schema, None):
        floats = torch.from_numpy(floats)
        values = torch.from_numpy(numpy.concatenate([values for values, _ in features.values()]))
        lengths = torch.cat([torch.from_numpy(offsets).diff() for _, offsets in features.values()])
        kjt = torchrec.KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths)
        yield floats[:, labels:].contiguous(), kjt, floats[:, :1].contiguous()


def train(batches, schema, arguments, of_torchrec=False):
    """Returns samples per second, and the losses."""
    torch.manual_seed(1)
    model = make_model(schema, arguments.table_rows, arguments.dim)
    if of_torchrec:
        model.sparse_arch.embedding_bag_collection.__class__ = torchrec.EmbeddingBagCollection
    trainer = Trainer(model)
    losses, samples, started = [], 0, 0.0
    for step, (dense, kjt, labels) in enumerate(itertools.islice(batches, arguments.steps + 1)):
        losses.append(trainer.step(dense, kjt, labels))
        if step == 0:
            started = time.perf_counter()
        else:
            samples += len(dense)
    return samples / (time.perf_counter() - started), losses


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folded", help="a dataset in the layout `folded`")
    parser.add_argument("rows", help="the same dataset in the layout `rows`")
    parser.add_argument("--table-rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    schema = onefold.Dataset(arguments.rows).schema
    found = {
        "deduplicated": train(with_onefold(arguments.folded, True), schema, arguments),
        "of_torchrec": train(with_onefold(arguments.folded, True), schema, arguments, of_torchrec=True),
        "plain": train(with_onefold(arguments.folded, False), schema, arguments),
        "pyarrow": train(with_pyarrow(arguments.rows, schema), schema, arguments),
    }
    rates = {name: round(rate) for name, (rate, _) in found.items()}
    first = found["deduplicated"][1]
    difference = max(abs(a - b) for _, losses in found.values() for a, b in zip(first, losses, strict=True))
    ratios = {name: round(found["deduplicated"][0] / found[name][0], 2) for name in ("plain", "pyarrow")}
    figures = {"samples_per_second": rates, "deduplicated_to": ratios, "steps": len(first)}
    print(json.dumps(figures | {"largest_difference_of_losses": difference}))
    if difference >= 1e-5:
        sys.exit("error: the losses differ")


if __name__ == "__main__":
    main()
