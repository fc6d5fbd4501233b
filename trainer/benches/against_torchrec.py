"""The reference models of rm1, rm2 and rm3 in TorchRec on the CPU: what `onefold-train bench` is compared with.

    python3 -m venv venv && . venv/bin/activate
    pip install torch==2.11.0 numpy pyarrow iopath torchmetrics tqdm tensordict psutil pyre-extensions
    pip install --no-deps fbgemm-gpu-cpu==1.6.0 torchrec==1.6.1
    onefold-ingest build rm1/dataset.toml --out rm1-rows --layout rows
    LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=narenas:2,thp:always python trainer/benches/against_torchrec.py \
        --workload rm1 --data rm1-rows --threads 2

`plain` gives every sample its own lists. `deduplicated` is what a TorchRec user can write by hand: rows of user
features that repeat are looked up, pooled and attended to once, and an index select expands them; finding them counts.
Both train the same batches: fused table-batched embeddings with row-wise Adagrad, TorchRec's DLRM modules, fused
Adagrad, float32. Prints one JSON object: median milliseconds of a step and samples per second of each.
"""

import argparse
import json
import logging
import statistics
import time
from pathlib import Path

logging.disable(logging.WARNING)

import numpy
import pyarrow.parquet
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

BATCH, ROWS, DIM, HEADS = 2048, 200_000, 64, 2


class Attention(torch.nn.Module):
    """QKV projection, self-attention, mean over the valid positions, output projection."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(DIM, 3 * DIM)
        self.output = torch.nn.Linear(DIM, DIM)

    def forward(self, vectors, offsets):
        lengths = offsets[1:] - offsets[:-1]
        longest = int(lengths.max())
        rows = len(lengths)
        projected = self.qkv(vectors)
        full = int(lengths.min()) == longest
        if full:
            padded = projected
        else:
            padded = torch.ops.fbgemm.jagged_to_padded_dense(projected, [offsets], [longest], 0.0)
        heads = padded.view(rows, longest, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        # Rows of full length need no mask, which saves the plain and the deduplicated variant the same.
        mask = None if full else (torch.arange(longest) < lengths.clamp(min=1).unsqueeze(1)).view(rows, 1, 1, longest)
        attended = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(rows, longest, DIM)
        if not full:
            attended = attended * (torch.arange(longest) < lengths.unsqueeze(1)).unsqueeze(2)
        return self.output(attended.sum(1) / lengths.clamp(min=1).unsqueeze(1))


def tables(count):
    """`count` fused tables; lists of length one make it a lookup without pooling."""
    specs = [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * count
    fused = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.005, eps=1e-8,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    for weights in fused.split_embedding_weights():
        weights.uniform_(-(ROWS**-0.5), ROWS**-0.5)
    return fused


class Model(torch.nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.tables = torch.nn.ModuleList()
        features = 0
        for group in groups:
            features += len(group["features"])
            if group["sequence"]:
                self.tables.append(torch.nn.ModuleList(tables(1) for _ in group["features"]))
            else:
                self.tables.append(tables(len(group["features"])))
        self.attention = Attention()
        self.bottom = DenseArch(13, [512, 256, DIM])
        self.interaction = InteractionArch(features)
        width = DIM + (features + 1) * features // 2
        self.top = OverArch(width, [512, 256, 1])

    def forward(self, dense, groups):
        vectors = []
        for tables_, group, (values, offsets, inverse) in zip(self.tables, self.groups, groups):
            count = len(group["features"])
            rows = (len(offsets) - 1) // count
            if group["sequence"]:
                pooled = []
                for f, table in enumerate(tables_):
                    bounds = offsets[f * rows : (f + 1) * rows + 1]
                    own = values[bounds[0] : bounds[-1]]
                    looked_up = table(own, torch.arange(len(own) + 1))
                    pooled.append(self.attention(looked_up, bounds - bounds[0]))
                pooled = torch.cat(pooled, 1)
            else:
                pooled = tables_(values, offsets)
            if inverse is not None:
                pooled = pooled.index_select(0, inverse)
            vectors.append(pooled)
        sparse = torch.cat(vectors, 1).view(dense.shape[0], -1, DIM)
        return self.top(self.interaction(self.bottom(dense), sparse)).squeeze(1)


def read(directory, batches):
    """The first batches: dense features, labels, and per group the lists of its features, `[F, B]`."""
    manifest = json.loads((directory / "manifest.json").read_text())
    schema = manifest["schema"]
    file = next(iter(sorted(directory.glob("**/*.parquet"))))
    table = pyarrow.parquet.ParquetFile(file)
    rows = next(table.iter_batches(batch_size=batches * BATCH))
    rows = pyarrow.Table.from_batches([rows]).slice(0, batches * BATCH)
    if rows.num_rows < batches * BATCH:
        raise SystemExit(f"{file}: {rows.num_rows} samples, too few for {batches} batches of {BATCH}")
    groups = []
    for group in schema["groups"]:
        features = [feature["name"] for feature in group["features"]]
        sequence = group["features"][0]["kind"] == "sequence"
        groups.append({"features": features, "sequence": sequence, "deduplicated": group["deduplicated"]})
    result = []
    for start in range(0, batches * BATCH, BATCH):
        part = rows.slice(start, BATCH)
        column = lambda name: part.column(name).combine_chunks()
        dense = numpy.stack([column(name).to_numpy() for name in schema["dense"]], 1)
        labels = column(schema["labels"][0]).to_numpy()
        lists = []
        for group in groups:
            values, lengths = [], []
            for name in group["features"]:
                array = column(name)
                values.append(array.flatten().to_numpy())
                lengths.append(array.value_lengths().to_numpy())
            lists.append((numpy.concatenate(values), numpy.concatenate(lengths)))
        result.append((torch.from_numpy(dense.copy()), torch.from_numpy(labels.copy()), lists))
    return groups, result


def offsets_of(lengths):
    offsets = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=offsets[1:])
    return offsets


def deduplicate(group, values, lengths):
    """Rows of a group that differ from the sample before, by hand: sessions stand together, so that finds nearly all."""
    count = len(group["features"])
    per_feature = lengths.reshape(count, BATCH)
    offsets = offsets_of(lengths)
    starts = offsets[:-1].reshape(count, BATCH)
    same = (per_feature[:, 1:] == per_feature[:, :-1]).all(0)
    # Lists of equal length as the one before: compare value by value where all features agree in length.
    length = numpy.where(same, per_feature[:, 1:], 0)
    total = length.sum()
    flat = length.reshape(-1)
    owner = numpy.repeat(numpy.arange(flat.size), flat)
    position = numpy.arange(total) - numpy.repeat(numpy.cumsum(flat) - flat, flat)
    now = values[numpy.repeat(starts[:, 1:].reshape(-1), flat) + position]
    before = values[numpy.repeat(starts[:, :-1].reshape(-1), flat) + position]
    different = numpy.bincount(owner[now != before] % (BATCH - 1), minlength=BATCH - 1) > 0
    new = numpy.concatenate([[True], ~same | different])
    inverse = numpy.cumsum(new) - 1
    kept = per_feature[:, new].reshape(-1)
    first = starts[:, new].reshape(-1)
    kept_offsets = offsets_of(kept)
    index = numpy.repeat(first - kept_offsets[:-1], kept) + numpy.arange(kept_offsets[-1])
    return torch.from_numpy(values[index]), torch.from_numpy(kept_offsets), torch.from_numpy(inverse)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=["rm1", "rm2", "rm3"])
    parser.add_argument("--data", required=True, type=Path, help="a dataset in the `rows` layout")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    groups, batches = read(arguments.data, arguments.batches)
    model = Model(groups)
    optimizer = torch.optim.Adagrad(
        [parameter for name, parameter in model.named_parameters() if not name.startswith("tables")],
        lr=0.001, eps=1e-8, fused=True,
    )
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step(batch, folds):
        dense, labels, lists = batch
        inputs = []
        for group, (values, lengths) in zip(groups, lists):
            if folds and group["deduplicated"]:
                inputs.append(deduplicate(group, values, lengths))
            else:
                inputs.append((torch.from_numpy(values), torch.from_numpy(offsets_of(lengths)), None))
        optimizer.zero_grad()
        loss = loss_of(model(dense, inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    times = {"plain": [], "deduplicated": []}
    losses = {"plain": [], "deduplicated": []}
    for turn in range(arguments.rounds + 2):
        for number, name in enumerate(times):
            started = time.perf_counter()
            loss = step(batches[(turn + 3 * number) % len(batches)], name == "deduplicated")
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
                losses[name].append(loss)
    report = {"workload": arguments.workload, "batch_size": BATCH, "threads": arguments.threads}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        report[name] = {
            "step_ms": 1e3 * median, "samples_per_second": BATCH / median, "loss": statistics.mean(losses[name]),
        }
    print(json.dumps(report))


main()
