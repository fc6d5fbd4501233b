"""A plain PyTorch model on a Onefold dataset: every distinct row is looked up and pooled once, then expanded by an index.

    python python/examples/pytorch.py dataset --table-rows 200000
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import onefold.torch
from onefold import Batch
from onefold.torch import bag_inputs


class Model(nn.Module):
    """An embedding bag per sparse feature, and a perceptron over their vectors and the dense features."""

    def __init__(self, schema: dict[str, Any], table_rows: int, dim: int) -> None:
        super().__init__()
        names = [feature["name"] for group in schema["groups"] for feature in group["features"]]
        self.bags = nn.ModuleDict({name: nn.EmbeddingBag(table_rows, dim, mode="sum", sparse=True) for name in names})
        width = len(schema["dense"]) + dim * len(names)
        self.over = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch[torch.Tensor]) -> torch.Tensor:
        vectors = [batch.dense]
        for group in batch.groups.values():
            # One vector per distinct row, which concatenates all features of the group.
            rows = torch.cat([self.bags[name](*bag_inputs(feature)) for name, feature in group.features.items()], dim=1)
            vectors.append(rows if group.inverse is None else rows[group.inverse.long()])
        return self.over(torch.cat(vectors, dim=1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--table-rows", type=int, required=True, help="rows of every table: more than the largest id")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, help="the number of steps to stop after")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    # The rows of "exact" batches share no ids, so their ids are not copied for EmbeddingBag.
    dataset = onefold.torch.Dataset(
        arguments.dataset, global_batch_size=arguments.global_batch_size, shuffle=True, seed=1, dedupe="exact"
    )
    model = Model(dataset.schema, arguments.table_rows, arguments.dim)
    tables = torch.optim.SparseAdam(model.bags.parameters(), lr=0.01)
    dense = torch.optim.Adam(model.over.parameters(), lr=0.001)
    for step, batch in enumerate(DataLoader(dataset, batch_size=None), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels[:, 0])
        for optimizer in (tables, dense):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (tables, dense):
            optimizer.step()
        print(f"step {step}, {len(batch)} samples: loss {loss.item():.6f}")
        if step == arguments.steps:
            break


if __name__ == "__main__":
    main()
