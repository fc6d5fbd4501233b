"""Trains the reference models of rm1, rm2 and rm3 in TorchRec on the CPU, to compare with `onefold-train-tools bench`.

    export PYTHONPATH=$(sharding/torchrec.sh)       # installs TorchRec 1.6.1 once; pyarrow is needed too
    onefold-ingest build rm1/dataset.toml --out rm1-rows --layout rows
    export LD_PRELOAD=libjemalloc.so.2 MALLOC_CONF=narenas:2,thp:always
    python trainer/benches/against_torchrec.py --workload rm1 --data rm1-rows --threads 2
    python trainer/benches/against_torchrec.py --workload rm1 --data rm1-rows --precision fp32,bf16
    python trainer/benches/against_torchrec.py --workload rm1 --data rm1-rows --ranks 2 --plan plan.json

`plain` gives every sample its own lists. `deduplicated` is the deduplication that a TorchRec user can write by hand:
repeated rows of user features are looked up, pooled and attended to once, and an index select expands them; the time
includes finding the duplicates. Both variants train the same batches of 2,048 samples, alternately and with one set of
weights: fused table-batched embeddings with row-wise Adagrad, TorchRec's DLRM modules, fused Adagrad, float32.
`plain_bf16` and `deduplicated_bf16` compute the same under `torch.autocast("cpu", dtype=torch.bfloat16)`:
matrix products and attention are in bfloat16, forward and backward; the backward pass itself runs outside
of autocast. Parameters, tables, optimizers and the loss stay float32. Variants of all precisions take turns.

Without `--ranks`, one process calls FBGEMM's tables itself. With it, the script starts that many processes, and
Without `--ranks`, one process calls FBGEMM's tables directly. With it, the script starts that many processes, which train
with TorchRec's DistributedModelParallel on Gloo: every table on one rank, everything else on all ranks with DDP. Rank r
of N takes the r-th of N equal parts of every batch, and deduplicates it before ids and vectors are exchanged. With
`--plan`, a table is on the rank that the plan of `onefold-shard plan` assigns; otherwise tables are assigned round robin.

Prints one JSON object. Each variant has the median milliseconds of a step (of its slowest rank), the samples per second
of all ranks, the mean loss, and `first_losses`: the losses of its first steps, including the warm-up. The initial weights
do not depend on the number of ranks, so in float32 these losses agree to about 1e-6.
"""

import argparse
import functools
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore", module="torchrec")

import numpy
import pyarrow.parquet
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, ComputeDevice, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

BATCH, ROWS, DIM, HEADS = 2048, 200_000, 64, 2
WARM_UP, FIRST_LOSSES = 2, 8
PRECISIONS = {"fp32": "", "bf16": "_bf16"}  # and the suffixes of the variants
TABLE_OPTIMIZER = {
    "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.005, "eps": 1e-8,
    "bounds_check_mode": BoundsCheckMode.NONE,
}


class Attention(torch.nn.Module):
    """QKV projection, self-attention, mean over the valid positions, and output projection."""

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
        # Rows of full length need no mask, which saves the same time in the plain and the deduplicated variant.
        mask = None
        if not full:
            mask = (torch.arange(longest) < lengths.clamp(min=1).unsqueeze(1)).view(rows, 1, 1, longest)
        attended = torch.nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(rows, longest, DIM)
        if not full:
            attended = attended * (torch.arange(longest) < lengths.unsqueeze(1)).unsqueeze(2)
        return self.output(attended.sum(1) / lengths.clamp(min=1).unsqueeze(1))


def initialize(number, weights):
    """Initializes table `number` of the schema, with weights that do not depend on its rank."""
    if not weights.is_meta:
        with torch.no_grad():
            weights.uniform_(-(ROWS**-0.5), ROWS**-0.5, generator=torch.Generator().manual_seed(number))


def all_features(groups):
    return [name for group in groups for name in group["features"]]


def bounds_per_feature(group, offsets):
    """Returns the offsets of each feature's rows in the ids of its group: `R + 1` offsets per feature."""
    count = len(group["features"])
    rows = (len(offsets) - 1) // count
    return [offsets[f * rows : (f + 1) * rows + 1] for f in range(count)]


class FusedTables(torch.nn.Module):
    """The tables of one process: FBGEMM's, without TorchRec's collections.

    The output is the same as that of `Collections`.
    """

    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        self.tables = torch.nn.ModuleList()
        number = 0
        for group in groups:
            # A sequence has its own table; lists of length one make it a lookup without pooling.
            counts = [1] * len(group["features"]) if group["sequence"] else [len(group["features"])]
            self.tables.append(torch.nn.ModuleList())
            for count in counts:
                specs = [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * count
                fused = SplitTableBatchedEmbeddingBagsCodegen(specs, **TABLE_OPTIMIZER)
                for weights in fused.split_embedding_weights():
                    initialize(number, weights)
                    number += 1
                self.tables[-1].append(fused)

    def forward(self, inputs):
        result = []
        for tables, group, (values, offsets, _) in zip(self.tables, self.groups, inputs):
            if group["sequence"]:
                ids = [values[bounds[0] : bounds[-1]] for bounds in bounds_per_feature(group, offsets)]
                result.append([table(own, torch.arange(len(own) + 1)) for table, own in zip(tables, ids)])
            else:
                result.append(tables[0](values, offsets))
        return result


class Collections(torch.nn.Module):
    """The tables as TorchRec's collections, which DistributedModelParallel shards.

    The output has per group the pooled vectors, `[R, F * D]`; for sequences, a vector per id: `[ids, D]` per feature.
    """

    def __init__(self, groups):
        super().__init__()
        self.groups = groups
        # Each collection has its own exchange, so there are few: pooled or not, deduplicated by hand or not.
        self.members = {}
        for number, group in enumerate(groups):
            kind = "sequences" if group["sequence"] else "pooled"
            kind += "_deduplicated" if group["deduplicated"] else ""
            self.members.setdefault(kind, []).append(number)
        numbers = {name: number for number, name in enumerate(all_features(groups))}
        self.collections = torch.nn.ModuleDict()
        for kind, members in self.members.items():
            config, collection = EmbeddingBagConfig, EmbeddingBagCollection
            if kind.startswith("sequences"):
                config, collection = EmbeddingConfig, EmbeddingCollection
            tables = []
            for name in all_features(groups[n] for n in members):
                fill = functools.partial(initialize, numbers[name])
                tables.append(config(ROWS, DIM, name, feature_names=[name], init_fn=fill))
            self.collections[kind] = collection(tables, device=torch.device("meta"))

    def keyed(self, members, inputs):
        """Returns the ids of several groups as one KeyedJaggedTensor.

        Deduplicated groups have slightly different numbers of rows. Empty rows at the end make the numbers equal.
        """
        names = [self.groups[n]["features"] for n in members]
        # The shape is `[F, R]` per group.
        lengths = [inputs[n][1].diff().view(len(own), -1) for own, n in zip(names, members)]
        rows = max(own.shape[1] for own in lengths)
        lengths = [torch.nn.functional.pad(own, (0, rows - own.shape[1])) for own in lengths]
        values = torch.cat([inputs[n][0] for n in members])
        return KeyedJaggedTensor(sum(names, []), values, lengths=torch.cat(lengths).view(-1))

    def forward(self, inputs):
        # All exchanges are started before waiting for the first one.
        started = {
            kind: self.collections[kind](self.keyed(members, inputs)) for kind, members in self.members.items()
        }
        result = [None] * len(inputs)
        for kind, members in self.members.items():
            looked_up = started[kind].wait()
            names = [self.groups[n]["features"] for n in members]
            if kind.startswith("sequences"):
                vectors = [[looked_up[name].values() for name in own] for own in names]
            else:
                vectors = KeyedTensor.regroup([looked_up], names)
            for n, own in zip(members, vectors):
                result[n] = own
        return result


class Model(torch.nn.Module):
    """The DLRM of a workload. `tables` looks up rows, locally or on all ranks; everything else is the same."""

    def __init__(self, groups, tables):
        super().__init__()
        self.groups = groups
        self.tables = tables
        torch.manual_seed(0)
        features = len(all_features(groups))
        self.attention = Attention()
        self.bottom = DenseArch(13, [512, 256, DIM])
        self.interaction = InteractionArch(features)
        width = DIM + (features + 1) * features // 2
        self.top = OverArch(width, [512, 256, 1])

    def forward(self, dense, inputs):
        """Returns the logits `[B]` for dense features `[B, 13]` and the output of `inputs_of`."""
        vectors = []
        for group, pooled, (_, offsets, inverse) in zip(self.groups, self.tables(inputs), inputs):
            if group["sequence"]:
                bounds = bounds_per_feature(group, offsets)
                pooled = torch.cat([self.attention(own, b - b[0]) for own, b in zip(pooled, bounds)], 1)
            if inverse is not None:
                pooled = pooled.index_select(0, inverse)
            vectors.append(pooled)
        sparse = torch.cat(vectors, 1).view(dense.shape[0], -1, DIM)
        return self.top(self.interaction(self.bottom(dense), sparse)).squeeze(1)


def owners(features, ranks, plan):
    """Returns the rank of every table: from Onefold's `plan.json`, or round robin in the order of the schema."""
    if plan is None:
        return {name: number % ranks for number, name in enumerate(features)}
    content = json.loads(plan.read_text())
    if content["topology"]["ranks"] != ranks:
        raise SystemExit(f"{plan}: the plan is for {content['topology']['ranks']} ranks, --ranks is {ranks}")
    tables = {table["name"]: table for table in content["tables"]}
    if sorted(tables) != sorted(features):
        raise SystemExit(f"{plan}: its tables are not the {len(features)} features of the data")
    for name, table in tables.items():
        if table["sharding_type"] != "table_wise":
            raise SystemExit(
                f"{plan}: table `{name}` is {table['sharding_type']}, and only whole tables are compared\n"
                "  hint: `onefold-shard plan --search greedy_by_lookups` does not divide tables"
            )
    return {name: tables[name]["shards"][0]["rank"] for name in features}


def distribute(model, rank_of, ranks):
    """Returns the model on `ranks` ranks: every table on the rank in `rank_of`, everything else on all ranks."""
    modules = {}
    for kind, collection in model.tables.collections.items():
        tables = {
            name: table_wise(rank_of[name], compute_kernel="fused")
            for n in model.tables.members[kind] for name in model.groups[n]["features"]
        }
        modules[f"tables.collections.{kind}"] = construct_module_sharding_plan(
            collection, tables, local_size=ranks, world_size=ranks, device_type="cpu"
        )
    sharders = [EmbeddingBagCollectionSharder(TABLE_OPTIMIZER), EmbeddingCollectionSharder(TABLE_OPTIMIZER)]
    plan = ShardingPlan(modules)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def groups_of(directory):
    """Returns the feature groups of a dataset, in the order of its schema, and the whole schema."""
    schema = json.loads(max(directory.glob("snapshots/*.json")).read_text())["schema"]
    groups = []
    for group in schema["groups"]:
        features = [feature["name"] for feature in group["features"]]
        sequence = group["features"][0]["kind"] == "sequence"
        groups.append({"features": features, "sequence": sequence, "deduplicated": group["deduplicated"]})
    return groups, schema


def read(directory, batches, rank, ranks):
    """Returns the groups, and the part of `rank` in the first batches: dense features, labels, `[F, B]` lists per group."""
    groups, schema = groups_of(directory)
    file = min(directory.glob("data/**/*.parquet"))
    rows = next(pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=batches * BATCH))
    rows = pyarrow.Table.from_batches([rows])
    if rows.num_rows < batches * BATCH:
        raise SystemExit(f"{file}: {rows.num_rows} samples, too few for {batches} batches of {BATCH}")
    result = []
    share = BATCH // ranks
    for start in range(rank * share, batches * BATCH, BATCH):
        part = rows.slice(start, share)
        column = lambda name: part.column(name).combine_chunks()
        dense = numpy.stack([column(name).to_numpy() for name in schema["dense"]], 1)
        labels = column(schema["labels"][0]).to_numpy()
        lists = []
        for group in groups:
            arrays = [column(name) for name in group["features"]]
            values = numpy.concatenate([array.flatten().to_numpy() for array in arrays])
            lengths = numpy.concatenate([array.value_lengths().to_numpy() for array in arrays])
            lists.append((values, lengths))
        result.append((torch.from_numpy(dense.copy()), torch.from_numpy(labels.copy()), lists))
    return groups, result


def offsets_of(lengths):
    offsets = numpy.zeros(len(lengths) + 1, numpy.int64)
    numpy.cumsum(lengths, out=offsets[1:])
    return offsets


def deduplicate(group, values, lengths):
    """Returns the ids, offsets and inverse index of the rows of a group that differ from the previous sample.

    The samples of a session are adjacent, so this finds nearly all duplicates.
    """
    per_feature = lengths.reshape(len(group["features"]), -1)
    samples = per_feature.shape[1]
    offsets = offsets_of(lengths)
    starts = offsets[:-1].reshape(per_feature.shape)
    same = (per_feature[:, 1:] == per_feature[:, :-1]).all(0)
    # Where all features have lists of the same lengths as before, compare their values.
    length = numpy.where(same, per_feature[:, 1:], 0)
    total = length.sum()
    flat = length.reshape(-1)
    owner = numpy.repeat(numpy.arange(flat.size), flat)
    position = numpy.arange(total) - numpy.repeat(numpy.cumsum(flat) - flat, flat)
    now = values[numpy.repeat(starts[:, 1:].reshape(-1), flat) + position]
    before = values[numpy.repeat(starts[:, :-1].reshape(-1), flat) + position]
    different = numpy.bincount(owner[now != before] % (samples - 1), minlength=samples - 1) > 0
    new = numpy.concatenate([[True], ~same | different])
    inverse = numpy.cumsum(new) - 1
    kept = per_feature[:, new].reshape(-1)
    first = starts[:, new].reshape(-1)
    kept_offsets = offsets_of(kept)
    index = numpy.repeat(first - kept_offsets[:-1], kept) + numpy.arange(kept_offsets[-1])
    return torch.from_numpy(values[index]), torch.from_numpy(kept_offsets), torch.from_numpy(inverse)


def inputs_of(groups, lists, by_hand):
    """Returns per group its ids, offsets, and the row of every sample; None if every sample has its own row."""
    inputs = []
    for group, (values, lengths) in zip(groups, lists):
        if by_hand and group["deduplicated"]:
            inputs.append(deduplicate(group, values, lengths))
        else:
            inputs.append((torch.from_numpy(values), torch.from_numpy(offsets_of(lengths)), None))
    return inputs


def over_ranks(numbers, operation):
    """Returns the sums or maxima of the ranks' numbers."""
    numbers = torch.tensor(numbers, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(numbers, operation)
    return numbers.tolist()


def variants_of(precisions):
    """Returns the variants by name: whether rows are deduplicated by hand, and whether autocast is on."""
    return {
        form + PRECISIONS[precision]: (form == "deduplicated", precision == "bf16")
        for precision in precisions for form in ("plain", "deduplicated")
    }


def measure(model, groups, batches, rounds, variants):
    """Trains all variants alternately. Returns for each the seconds of every step, of the slowest rank, and the loss."""
    dense_parameters = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizer = torch.optim.Adagrad(dense_parameters, lr=0.001, eps=1e-8, fused=True)
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step(batch, by_hand, autocast):
        dense, labels, lists = batch
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(model(dense, inputs_of(groups, lists, by_hand)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    times = {name: [] for name in variants}
    losses = {name: [] for name in variants}
    for turn in range(rounds + WARM_UP):
        for number, (name, settings) in enumerate(variants.items()):
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            started = time.perf_counter()
            loss = step(batches[(turn + 3 * number) % len(batches)], *settings)
            times[name].append(time.perf_counter() - started)
            losses[name].append(loss)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for name in times:
        times[name] = over_ranks(times[name], torch.distributed.ReduceOp.MAX)
        losses[name] = [loss / ranks for loss in over_ranks(losses[name], torch.distributed.ReduceOp.SUM)]
    return times, losses


def report(arguments, rank=0, rank_of=None):
    """Trains in this process, or with the tables on the ranks in `rank_of`. Returns the report."""
    torch.set_num_threads(arguments.threads)
    groups, batches = read(arguments.data, arguments.batches, rank, arguments.ranks or 1)
    if rank_of is None:
        model = Model(groups, FusedTables(groups))
    else:
        model = distribute(Model(groups, Collections(groups)), rank_of, arguments.ranks)
    times, losses = measure(model, groups, batches, arguments.rounds, variants_of(arguments.precision))
    result = {
        "workload": arguments.workload, "batch_size": BATCH,
        "ranks": arguments.ranks, "threads": arguments.threads,
        "plan": None if arguments.plan is None else str(arguments.plan),
    }
    for name in times:
        median = statistics.median(times[name][WARM_UP:])
        result[name] = {
            "step_ms": 1e3 * median, "samples_per_second": BATCH / median,
            "loss": statistics.mean(losses[name][WARM_UP:]), "first_losses": losses[name][:FIRST_LOSSES],
        }
    return result


def run_rank(rank, arguments, rank_of, store):
    """Runs one of several processes, which connect through the file `store`. Rank 0 prints the report."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks
    )
    result = report(arguments, rank, rank_of)
    if rank == 0:
        print(json.dumps(result))
    # A model that still refers to the process group keeps Gloo's threads alive, which abort the process at its end.
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def precisions(text):
    """Parses several precisions, separated by commas."""
    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"`{unknown[0]}` is not one of {', '.join(PRECISIONS)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, choices=["rm1", "rm2", "rm3"])
    parser.add_argument("--data", required=True, type=Path, help="a dataset in the `rows` layout")
    parser.add_argument(
        "--precision", type=precisions, default=["fp32"], metavar="NAMES", help="fp32, bf16, or fp32,bf16"
    )
    parser.add_argument("--ranks", type=int, help="train with DistributedModelParallel on this many processes")
    parser.add_argument("--plan", type=Path, help="Onefold's plan.json for these ranks, table-wise")
    parser.add_argument("--threads", type=int, help="threads of a process [default: 2, with --ranks 1]")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.threads is None:
        arguments.threads = 2 if arguments.ranks is None else 1
    if arguments.ranks is None:
        if arguments.plan is not None:
            parser.error("--plan needs --ranks")
        print(json.dumps(report(arguments)))
        return
    if arguments.ranks < 1 or BATCH % arguments.ranks != 0:
        parser.error(f"--ranks must divide the {BATCH} samples of a batch")
    rank_of = owners(all_features(groups_of(arguments.data)[0]), arguments.ranks, arguments.plan)
    with tempfile.TemporaryDirectory() as folder:
        rest = (arguments, rank_of, f"{folder}/store")
        torch.multiprocessing.spawn(run_rank, args=rest, nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
