"""Runs TorchRec's own EmbeddingShardingPlanner on the tables of `tables.json`, and writes its placement.

    export PYTHONPATH=$(sharding/torchrec.sh)                     # installs TorchRec 1.6.1 the first time
    python torchrec_planner.py tables.json topology.json --out placed.json

The planner is called as a user of the library calls it: with an EmbeddingBagCollection, its default sharder, proposers
and partitioner, the pooling factors of every table, and the ranks, memory and bandwidths of the topology. Two settings
make its plan comparable with others: tables are placed only in the memory of GPUs (the kernels `fused` and `dense`),
and no further memory is reserved, because the memory in a topology is what remains for tables.

The output contains the `tables` of a `plan.json`, and the planner's own estimate of the most expensive rank in
milliseconds, by its default formulas without Onefold's dedupe factors: {"max_cost_ms": …, "tables": […]}.
"""

import argparse
import json

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, PoolingType

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
# Onefold's names of TorchRec's sharding types, if they differ.
SHARDING_TYPES = {"table_row_wise": "row_wise", "table_column_wise": "column_wise"}


def lookups_of(table):
    """Returns a table's features, each with its pooling and ids per sample, in the order of `feature_names`."""
    first = {"feature": table["name"], **table}
    return [first, *table.get("further_features", [])]


def collection(tables):
    """Returns the tables as an EmbeddingBagCollection."""
    bags = [
        EmbeddingBagConfig(
            name=table["name"],
            num_embeddings=table["rows"],
            embedding_dim=table["dim"],
            feature_names=[lookups["feature"] for lookups in lookups_of(table)],
            data_type=DTYPES[table.get("dtype", "fp32")],
            pooling=POOLINGS[table.get("pooling", "sum")],
        )
        for table in tables
    ]
    return EmbeddingBagCollection(tables=bags, device=torch.device("meta"))


def plan(tables, batch_size, topology):
    """Returns TorchRec's plan, and the planner that made it."""
    constraints = {
        table["name"]: ParameterConstraints(
            compute_kernels=["fused", "dense"],
            pooling_factors=[lookups["pooling_factor"] for lookups in lookups_of(table)],
        )
        for table in tables
    }
    # TorchRec uses bytes per millisecond.
    bandwidth = {
        "hbm_mem_bw": topology["memory_bandwidth_bytes_per_second"] / 1000,
        "intra_host_bw": topology["intra_node_bandwidth_bytes_per_second"] / 1000,
        "inter_host_bw": topology["inter_node_bandwidth_bytes_per_second"] / 1000,
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=topology["ranks"],
            local_world_size=topology["ranks_per_node"],
            compute_device="cuda",
            hbm_cap=topology["memory_bytes"],
            **bandwidth,
        ),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        debug=False,
    )
    (optimizer,) = {table.get("optimizer", "row_wise_adagrad") for table in tables}
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": OPTIMIZERS[optimizer]})
    return planner.plan(collection(tables), [sharder]), planner


def placed(table, sharding):
    """Converts a table of TorchRec's plan into a table of Onefold's plan."""
    if sharding.sharding_spec is None:
        rows, columns = {"start": 0, "end": table["rows"]}, {"start": 0, "end": table["dim"]}
        shards = [{"rank": rank, "rows": rows, "columns": columns} for rank in sharding.ranks]
    else:
        shards = []
        for shard in sharding.sharding_spec.shards:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            # With equal blocks of rows, the last ranks may have no rows.
            if rows > 0:
                shards.append(
                    {
                        "rank": shard.placement.rank(),
                        "rows": {"start": row, "end": row + rows},
                        "columns": {"start": column, "end": column + columns},
                    }
                )
    kind = SHARDING_TYPES.get(sharding.sharding_type, sharding.sharding_type)
    return {"name": table["name"], "rows": table["rows"], "dim": table["dim"], "sharding_type": kind, "shards": shards}


def most_expensive_rank(planner, ranks):
    """Returns the planner's estimate for the most expensive rank of its best plan, in milliseconds."""
    costs = [0.0] * ranks
    for option in planner._best_plan:
        for shard in option.shards:
            costs[shard.rank] += shard.perf.total
    return max(costs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", help="`tables.json`")
    parser.add_argument("topology", help="`topology.json`")
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write the placed tables")
    arguments = parser.parse_args()
    with open(arguments.tables) as file:
        given = json.load(file)
    with open(arguments.topology) as file:
        topology = json.load(file)
    found, planner = plan(given["tables"], -(-given["global_batch_size"] // topology["ranks"]), topology)
    ((_, module),) = found.plan.items()
    tables = [placed(table, module[table["name"]]) for table in given["tables"]]
    with open(arguments.out, "w") as file:
        json.dump({"max_cost_ms": most_expensive_rank(planner, topology["ranks"]), "tables": tables}, file, indent=1)


if __name__ == "__main__":
    main()
