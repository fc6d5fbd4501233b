"""Converts batches into TorchRec's tensors, and plans into its sharding plans. For TorchRec 1.6.

    from onefold.torchrec import to_kjt

    for batch in dataset:
        logits = dlrm(batch.to_torch().dense, to_kjt(batch))
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ._arguments import names
from ._batch import Batch, Feature, Group
from ._errors import OptionsError
from ._optional import optional
from .torch import bag_inputs

if TYPE_CHECKING:
    import torch as _torch
    import torchrec as _torchrec
    from torchrec import KeyedJaggedTensor, KeyedTensor
    from torchrec.distributed.types import ShardingPlan
    from torchrec.streamable import Pipelineable as _Pipelineable

    _Tensor: TypeAlias = _torch.Tensor
    _Pairs: TypeAlias = list[tuple[Group[_Tensor], Feature[_Tensor]]]
else:
    _torch = optional("torch", "torchrec")
    _torchrec = optional("torchrec", "torchrec")
    _Pipelineable = optional("torchrec.streamable", "torchrec").Pipelineable

__all__ = [
    "EmbeddingBagCollection",
    "Sequences",
    "TrainBatch",
    "sharding_plan",
    "to_kjt",
    "to_sequences",
    "to_train_batch",
]


def _chosen(batch: Batch[_Tensor], features: Iterable[str] | None) -> _Pairs:
    """Returns the requested features with their groups, in the order of the batch."""
    pairs = [(group, feature) for group in batch.groups.values() for feature in group.features.values()]
    if features is None:
        return pairs
    wanted, known = set(names("features", features)), {feature.name for _, feature in pairs}
    if not wanted <= known:
        missing = ", ".join(f"`{name}`" for name in sorted(wanted - known))
        raise OptionsError(f"the batch has no feature {missing}\n  hint: it has {', '.join(sorted(known))}")
    return [(group, feature) for group, feature in pairs if feature.name in wanted]


def _is_run(batch: Batch[_Tensor], pairs: _Pairs) -> bool:
    """Returns whether these are all features of the batch. Values and lengths are then single views."""
    return len(pairs) == len(batch.features)


def _values(batch: Batch[_Tensor], pairs: _Pairs) -> tuple[_Tensor, _Tensor]:
    """Returns the values and lengths of features, ordered by feature. They are views if the batch has this order."""
    if _is_run(batch, pairs) and all(group.packed for group in batch.groups.values()):
        return batch.values, batch.lengths
    values = _torch.cat([bag_inputs(feature)[0] for _, feature in pairs])
    lengths = _torch.cat([feature.sizes for _, feature in pairs])
    return values, lengths


def to_kjt(
    batch: Batch[Any], *, features: Iterable[str] | None = None, deduplicated: bool | None = None
) -> KeyedJaggedTensor:
    """Returns the sparse features of a batch as TorchRec's KeyedJaggedTensor.

    If it is deduplicated, every key has the rows of its group (`stride_per_key_per_rank`), and `inverse_indices`
    contain the row of every sample. An EmbeddingBagCollection, sharded or not, pools every row once and expands the
    result. Otherwise every sample has its own lists. By default, it is deduplicated if the batch is. The values and
    lengths of a batch without windows are views if all features are converted.

    An unsharded EmbeddingCollection ignores inverse indices; use `to_sequences` for sequence features.
    """
    batch = batch.to_torch()
    has_index = any(group.inverse is not None for group in batch.groups.values())
    deduplicated = has_index if deduplicated is None else deduplicated
    if has_index and not deduplicated:
        batch = batch.expand()
    pairs = _chosen(batch, features)
    keys = [feature.name for _, feature in pairs]
    values, lengths = _values(batch, pairs)
    options: dict[str, Any] = {}
    if deduplicated:
        options["stride_per_key_per_rank"] = [[group.rows] for group, _ in pairs]
        options["inverse_indices"] = (keys, _inverse_indices(batch, pairs))
    return _torchrec.KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, **options)


def _inverse_indices(batch: Batch[_Tensor], pairs: _Pairs) -> _Tensor:
    """Returns the row of every sample for each key, int64 [keys, B]."""
    samples = _torch.arange(len(batch), dtype=_torch.int64, device=batch.values.device)
    by_group: dict[str, _Tensor] = {}
    for group, _ in pairs:
        if group.name not in by_group:
            by_group[group.name] = samples if group.inverse is None else group.inverse.long()
    indices = [by_group[group.name] for group, _ in pairs]
    return _torch.stack(indices) if indices else samples.new_empty((0, len(batch)))


@dataclass
class TrainBatch(_Pipelineable):
    """A batch for TorchRec's training pipelines, such as `TrainPipelineSparseDist`, and for its `DLRMTrain`.

    A pipeline starts the lookups of the next batch before the model runs on it. For this, the KeyedJaggedTensor must
    be an attribute of the batch, which `forward` passes on: a call of `to_kjt` in the model prevents it.
    """

    dense_features: _Tensor
    """float32 [B, D]."""
    sparse_features: KeyedJaggedTensor
    """The sparse features, as `to_kjt` returns them."""
    labels: _Tensor
    """float32 [B], or [B, L] if the dataset has several labels."""
    weights: _Tensor | None = None
    """Sample weights, float32 [B], or None."""

    def to(self, device: _torch.device, non_blocking: bool = False) -> TrainBatch:
        """Returns the batch on a device."""
        moved = (part if part is None else part.to(device, non_blocking=non_blocking) for part in self._parts)
        return TrainBatch(*moved)

    def pin_memory(self) -> TrainBatch:
        """Returns the batch in pinned memory."""
        return TrainBatch(*(part if part is None else part.pin_memory() for part in self._parts))

    def record_stream(self, stream: _torch.Stream) -> None:
        """Keeps the memory of all tensors until the work on a stream that was queued so far is done."""
        index = self.sparse_features.inverse_indices_or_none()
        for part in (*self._parts, None if index is None else index[1]):
            if part is not None:
                part.record_stream(stream)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.dense_features, self.sparse_features, self.labels, self.weights


def to_train_batch(
    batch: Batch[Any], *, features: Iterable[str] | None = None, deduplicated: bool | None = None
) -> TrainBatch:
    """Returns a batch for TorchRec's training pipelines. The options are those of `to_kjt`."""
    batch = batch.to_torch()
    labels = batch.labels.squeeze(1) if batch.labels.shape[1] == 1 else batch.labels
    return TrainBatch(batch.dense, to_kjt(batch, features=features, deduplicated=deduplicated), labels, batch.weights)


class EmbeddingBagCollection(_torchrec.EmbeddingBagCollection):
    """TorchRec's EmbeddingBagCollection for models that train on the CPU, with the same results and a faster
    gradient.

    TorchRec expands pooled rows with an operator of FBGEMM, whose gradient on the CPU adds one row at a time. This
    class uses torch's `index_select`. On a GPU, and for a sharded model, use TorchRec's own class.
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        index = features.inverse_indices_or_none()
        if index is None:
            return super().forward(features)
        inverse = dict(zip(index[0], index[1].unbind(), strict=True))
        rows = features.to_dict()
        pooled, lengths = [], []
        for config in self.embedding_bag_configs():
            for name in config.feature_names:
                weights = rows[name].weights() if self.is_weighted() else None
                vectors = self.embedding_bags[config.name](rows[name].values(), rows[name].offsets(), weights)
                pooled.append(vectors.float().index_select(0, inverse[name]))
                lengths.append(config.embedding_dim)
        return _torchrec.KeyedTensor(self._embedding_names, lengths, _torch.cat(pooled, dim=1))


@dataclass
class Sequences:
    """Sequence features of one group for an EmbeddingCollection, and the expansion of its results to samples.

    `kjt` has one key per feature, with the distinct rows of the group. The EmbeddingCollection and the following part
    of the model (attention, a recurrent network, a mean) compute one vector per row, and `expand` makes one per
    sample.
    """

    kjt: KeyedJaggedTensor
    """KeyedJaggedTensor of the rows."""
    inverse: _Tensor
    """int64 [B], the row of every sample."""

    def expand(self, rows: _Tensor) -> _Tensor:
        """Converts a tensor with one entry per row into one with one entry per sample."""
        return rows.index_select(0, self.inverse)


def to_sequences(batch: Batch[Any], group: str) -> Sequences:
    """Returns the features of a group as `Sequences`, whose inverse index the model must apply itself."""
    batch = batch.to_torch()
    if group not in batch.groups:
        raise OptionsError(f"the batch has no group `{group}`\n  hint: it has {', '.join(batch.groups)}")
    features = batch.groups[group].features
    pairs = [(batch.groups[group], feature) for feature in features.values()]
    values, lengths = _values(batch, pairs)
    kjt = _torchrec.KeyedJaggedTensor(keys=list(features), values=values, lengths=lengths)
    return Sequences(kjt, _inverse_indices(batch, pairs)[0])


def sharding_plan(path: str | os.PathLike[str]) -> ShardingPlan:
    """Builds TorchRec's ShardingPlan from an exported plan.

    `path` is the output of `onefold-shard export plan.json --torchrec --module MODULE --device DEVICE --out FILE`.
    Pass the result to `DistributedModelParallel(model, plan=…)`.
    """
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

    with open(path, encoding="utf-8") as file:
        exported = json.load(file)
    if exported.get("format_version") != 1 or not isinstance(exported.get("plan"), dict):
        raise OptionsError(
            f"`{path}` is no plan for TorchRec\n  hint: make one: onefold-shard export plan.json --torchrec --module ebc"
        )
    plan: dict[str, Any] = {}
    for module, tables in exported["plan"].items():
        plan[module] = EmbeddingModuleShardingPlan()
        for name, table in tables.items():
            spec = table["sharding_spec"]
            plan[module][name] = ParameterSharding(
                sharding_type=table["sharding_type"],
                compute_kernel=table["compute_kernel"],
                ranks=table["ranks"],
                sharding_spec=None if spec is None else EnumerableShardingSpec([ShardMetadata(**shard) for shard in spec]),
            )
    return ShardingPlan(plan)
