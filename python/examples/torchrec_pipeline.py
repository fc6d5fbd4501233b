"""TorchRec's DLRM on several processes, with sharded tables and TorchRec's training pipeline.

    torchrun --nproc-per-node 2 python/examples/torchrec_pipeline.py dataset --table-rows 200000
"""

import argparse

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import onefold
from onefold.torchrec import to_train_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--table-rows", type=int, required=True, help="rows of every table: more than the largest id")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16)
    arguments = parser.parse_args()
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    device, rate = torch.device("cpu"), 0.05
    # The rank and the number of ranks are those of the process group. Only complete batches are read.
    dataset = onefold.Dataset(
        arguments.dataset, global_batch_size=arguments.global_batch_size, streams=8, shuffle=True, seed=1, tail="drop"
    )
    names = [feature["name"] for group in dataset.schema["groups"] for feature in group["features"]]
    sizes = dict(num_embeddings=arguments.table_rows, embedding_dim=arguments.dim)
    tables = [EmbeddingBagConfig(name=f"t_{name}", feature_names=[name], **sizes) for name in names]
    bags = EmbeddingBagCollection(tables=tables)
    _apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": rate})
    model = DLRMTrain(DLRM(bags, len(dataset.schema["dense"]), [64, arguments.dim], [64, 1]))
    # Copied tables (`data_parallel`) cannot look up deduplicated KeyedJaggedTensors.
    whole = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    planner = EmbeddingShardingPlanner(Topology(torch.distributed.get_world_size(), "cpu"), constraints=whole)
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, torch.distributed.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=rate))
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, optimizer]), device)
    batches = map(to_train_batch, dataset)
    for step in range(1, len(dataset) + 1):
        loss, _, _ = pipeline.progress(batches)
        torch.distributed.all_reduce(loss)
        if dataset.rank == 0:
            print(f"step {step}: loss {loss / dataset.world_size:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
