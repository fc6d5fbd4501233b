"""TorchRec's DLRM on a Onefold dataset: the embedding bags look up and pool every distinct row once.

    python python/examples/torchrec_dlrm.py dataset --table-rows 200000
"""

import argparse

import torch
import torchrec
from torchrec.models.dlrm import DLRM

import onefold
from onefold.torchrec import to_kjt


def make_model(schema, table_rows, dim):
    """A DLRM with a table for every sparse feature of a dataset."""
    names = [feature["name"] for group in schema["groups"] for feature in group["features"]]
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=table_rows, embedding_dim=dim, feature_names=[name]
        )
        for name in names
    ]
    return DLRM(
        torchrec.EmbeddingBagCollection(tables=tables),
        dense_in_features=len(schema["dense"]),
        dense_arch_layer_sizes=[64, dim],
        over_arch_layer_sizes=[64, 1],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--table-rows", type=int, required=True, help="rows of every table: more than the largest id")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--plain", action="store_true", help="give every sample its own lists, to compare")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    dataset = onefold.Dataset(arguments.dataset, global_batch_size=arguments.global_batch_size, shuffle=1)
    model = make_model(dataset.schema, arguments.table_rows, arguments.dim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(dataset, 1):
        tensors = batch.to_torch()
        logits = model(tensors.dense, to_kjt(tensors, deduplicated=not arguments.plain))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, tensors.labels[:, :1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}, {len(batch)} samples: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
