"""TorchRec's DLRM on a Onefold dataset: the embedding bags look up and pool every distinct row once.

    python python/examples/torchrec_dlrm.py dataset --table-rows 200000
"""

import argparse
from typing import Any

import torch
import torchrec
from torchrec.models.dlrm import DLRM

import onefold
from onefold.torchrec import EmbeddingBagCollection, to_kjt


def make_model(schema: dict[str, Any], table_rows: int, dim: int) -> DLRM:
    """Returns a DLRM with one table per sparse feature of a dataset."""
    names = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=table_rows, embedding_dim=dim, feature_names=[name]
        )
        for name in names
    ]
    bags = EmbeddingBagCollection(tables=tables)
    for bag in bags.embedding_bags.values():
        # Gradients contain only the rows that a batch looks up, instead of whole tables.
        bag.sparse = True
    return DLRM(
        bags, dense_in_features=len(schema["dense"]), dense_arch_layer_sizes=[64, dim], over_arch_layer_sizes=[64, 1]
    )


class Trainer:
    """A model and its optimizer."""

    def __init__(self, model: DLRM) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(self, dense: torch.Tensor, kjt: torchrec.KeyedJaggedTensor, labels: torch.Tensor) -> float:
        """Takes a step and returns its loss."""
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(dense, kjt), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--table-rows", type=int, required=True, help="rows of every table: more than the largest id")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, help="the number of steps to stop after")
    parser.add_argument("--plain", action="store_true", help="give every sample its own lists, to compare")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    # The rows of "exact" batches are consecutive, so `to_kjt` needs no copy.
    dataset = onefold.Dataset(
        arguments.dataset, global_batch_size=arguments.global_batch_size, shuffle=True, seed=1, dedupe="exact"
    )
    trainer = Trainer(make_model(dataset.schema, arguments.table_rows, arguments.dim))
    for step, batch in enumerate(dataset, 1):
        tensors = batch.to_torch()
        kjt = to_kjt(tensors, deduplicated=not arguments.plain)
        loss = trainer.step(tensors.dense, kjt, tensors.labels[:, :1])
        print(f"step {step}, {len(batch)} samples: loss {loss:.6f}")
        if step == arguments.steps:
            break


if __name__ == "__main__":
    main()
