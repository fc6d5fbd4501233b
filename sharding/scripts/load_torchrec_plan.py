"""Builds TorchRec's ShardingPlan from `onefold-shard export --torchrec`, and checks it with TorchRec's own classes.

    export PYTHONPATH=$(sharding/torchrec.sh)                     # installs TorchRec 1.6.1 the first time
    onefold-shard export plan.json --torchrec --module ebc --device cpu --out torchrec.json
    python load_torchrec_plan.py torchrec.json                    # builds and prints the plan
    python load_torchrec_plan.py torchrec.json --train tables.json  # also trains a step with it, one process per rank
"""

import argparse
import json
import os
import socket

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan


def load_plan(path):
    """Returns the ShardingPlan of an exported file."""
    with open(path) as file:
        exported = json.load(file)
    if exported["format_version"] != 1:
        raise ValueError(f"{path}: format version {exported['format_version']}, this reads 1")
    plan = {}
    for module, tables in exported["plan"].items():
        plan[module] = EmbeddingModuleShardingPlan()
        for name, table in tables.items():
            spec = table["sharding_spec"]
            plan[module][name] = ParameterSharding(
                sharding_type=table["sharding_type"],
                compute_kernel=table["compute_kernel"],
                ranks=table["ranks"],
                sharding_spec=None if spec is None else EnumerableShardingSpec([ShardMetadata(**s) for s in spec]),
            )
    return ShardingPlan(plan), exported


def free_port():
    """Returns a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_step(rank, world_size, port, plan_path, tables_path, losses):
    """Runs one forward and backward pass of an EmbeddingBagCollection that is sharded by the plan, on Gloo."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.model_parallel import DistributedModelParallel

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo")
    with open(tables_path) as file:
        tables = json.load(file)["tables"]
    plan, exported = load_plan(plan_path)
    (module,) = exported["plan"]

    def features_of(table):
        """Returns a table's features, in the order of `feature_names`."""
        return [table.get("feature", table["name"]), *(f["feature"] for f in table.get("further_features", []))]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            bags = [
                EmbeddingBagConfig(
                    name=t.get("torchrec_name", "t_" + t["name"].replace(".", "_")),
                    num_embeddings=t["rows"],
                    embedding_dim=t["dim"],
                    feature_names=features_of(t),
                )
                for t in tables
            ]
            setattr(self, module, EmbeddingBagCollection(tables=bags, device=torch.device("meta")))

        def forward(self, features):
            return getattr(self, module)(features).values()

    model = DistributedModelParallel(Model(), plan=plan, device=torch.device("cpu"), init_data_parallel=True)
    torch.manual_seed(rank)
    batch = 8
    lookups = [(feature, t) for t in tables for feature in features_of(t)]
    lengths = torch.randint(1, 5, (len(lookups) * batch,))
    ids = [
        torch.randint(0, t["rows"], (int(lengths[i * batch : (i + 1) * batch].sum()),))
        for i, (_, t) in enumerate(lookups)
    ]
    features = KeyedJaggedTensor(keys=[f for f, _ in lookups], values=torch.cat(ids), lengths=lengths)
    pooled = model(features)
    assert pooled.shape == (batch, sum(t["dim"] for _, t in lookups)), pooled.shape
    pooled.square().mean().backward()
    losses.put((rank, float(pooled.detach().abs().sum())))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="what `onefold-shard export --torchrec` wrote")
    parser.add_argument("--train", metavar="TABLES", help="`tables.json`: also train a step on the CPU")
    arguments = parser.parse_args()
    plan, exported = load_plan(arguments.plan)
    print(plan)
    if arguments.train:
        context = torch.multiprocessing.get_context("spawn")
        losses = context.SimpleQueue()
        world = exported["world_size"]
        torch.multiprocessing.spawn(train_step, args=(world, free_port(), arguments.plan, arguments.train, losses), nprocs=world)
        for _ in range(world):
            rank, total = losses.get()
            print(f"rank {rank}: a step was trained, sum of |pooled| {total:.4f}")


if __name__ == "__main__":
    main()
