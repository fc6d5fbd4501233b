"""A trained model in torch: the output of `onefold-train export` as an `nn.Module` of torch's own operators."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ._errors import DataError
from ._model_inputs import Feature, tensors_of
from ._optional import optional

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = optional("torch", "torch")

functional = torch.nn.functional

__all__ = ["Core", "Model", "load"]

FORMAT_VERSION = 6
"""The version of `export.json`."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BOTTOM, _TOP = "dense_arch.model._mlp.{}._linear", "over_arch.model.0._mlp.{}._linear"

_Lists: TypeAlias = "tuple[Tensor, Tensor, Tensor]"


class Model(torch.nn.Module):
    """A trained model that computes logits from dense features and ids, including the normalization and hashing.

    It computes in 32-bit floats. The parameters have the same names as in the export. Gradients are disabled; enable
    them with `requires_grad_()`.
    """

    def __init__(self, export: Mapping[str, Any], parameters: Mapping[str, Tensor], preprocess: Path | None) -> None:
        super().__init__()
        self.labels: list[str] = list(export["labels"])
        """The labels that the columns of the result are of."""
        self.dense_features: list[str] = list(export["dense_features"])
        """The columns of dense features."""
        self.features: dict[str, Feature] = {
            own["feature"]: Feature(
                own["feature"], table["rows"], table["ids"] == "hashed", own["pooling"] not in ("sum", "mean")
            )
            for table in export["tables"]
            for own in table["features"]
        }
        """The sparse features that the model looks up, by name."""
        self.preprocess = preprocess
        """The steps that a batch must have been through, for `onefold.Dataset(preprocess=…)`; None if there are none."""
        self.losses: list[str] = list(export["losses"])
        self.core = Core(export, parameters)
        """The computation, of tensors alone."""
        self.requires_grad_(False)
        self.eval()

    def forward(self, inputs: Any, dense: Any = None, *, inverse: Mapping[str, Any] | None = None) -> Tensor:
        """Returns the logits, float32 [B, labels].

        `inputs` is one of these:

        - a `Batch`. Every distinct row is computed once.
        - TorchRec's KeyedJaggedTensor, with or without inverse indices, together with `dense` [B, D].
        - a mapping of features by name. The value of a dense feature is a number per sample. The value of a sparse
          feature is a list of ids per row, or one id per row, or a pair of tensors `(values, lengths)`. `inverse`
          contains the row of every sample for features whose rows are not the samples. A single row or number is used
          for all samples, so that a request can contain its user once.
        """
        return self.core(*self.tensors(inputs, dense, inverse=inverse))

    def predict(self, inputs: Any, dense: Any = None, *, inverse: Mapping[str, Any] | None = None) -> Tensor:
        """Returns predictions, float32 [B, labels], as `onefold-train predict` does: probabilities, numbers or
        counts.

        The arguments are those of `forward`.
        """
        with torch.no_grad():
            return self.predictions(self(inputs, dense, inverse=inverse))

    def predictions(self, logits: Tensor) -> Tensor:
        """Converts logits, [B, labels], into predictions, float32 [B, labels]."""
        of_loss = {"bce": torch.sigmoid, "poisson": torch.exp}
        columns = zip(self.losses, logits.double().unbind(1), strict=True)
        return torch.stack([of_loss.get(loss, torch.clone)(column) for loss, column in columns], 1).float()

    def tensors(
        self, inputs: Any, dense: Any = None, *, inverse: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, _Lists]]:
        """Returns the arguments of `core` and of an exported program.

        These are `dense`, float32 [B, D], and three int64 tensors per feature, all on the device of the model:

        - For features that are pooled by sum or mean: ids [V], list after list; the sizes of the lists [R]; and the
          list of every sample [B].
        - For features that are pooled by a part of the model: ids [R, L], padded with zeros; the sizes of the lists
          [R]; and the list of every sample [B].
        """
        return tensors_of(self.features, self.dense_features, inputs, dense, inverse or {}, self.core.device)

    def export(self) -> torch.export.ExportedProgram:
        """Returns the computation as a program of torch, for any numbers of samples, rows and ids.

        `torch.export.save` writes it. `torch.export.load(path).module()(dense, features)` runs it without Onefold.
        Its arguments are those that `tensors` returns.
        """
        dimension = torch.export.Dim
        samples = dimension("samples", min=1)
        device = self.core.device
        features: dict[str, _Lists] = {}
        shapes: dict[str, Any] = {}
        zeros = torch.zeros(3, dtype=torch.int64, device=device)
        for number, feature in enumerate(self.features.values()):
            rows = dimension(f"rows_{number}", min=1)
            ids = zeros.new_zeros(2, 4) if feature.padded else zeros.new_zeros(7)
            # If a tensor was used twice here, both uses would become one input of the program.
            features[feature.name] = (ids, zeros.new_tensor([4, 3]), zeros.clone())
            if feature.padded:
                of_ids = {0: rows, 1: dimension(f"longest_{number}", min=1)}
            else:
                of_ids = {0: dimension(f"ids_{number}", min=0)}
            shapes[feature.name] = (of_ids, {0: rows}, {0: samples})
        dense = torch.zeros(3, len(self.dense_features), device=device)
        dynamic = {"dense": {0: samples}, "features": shapes}
        with torch.no_grad():
            return torch.export.export(self.core, (dense, features), dynamic_shapes=dynamic)


class Core(torch.nn.Module):
    """The computation of a `Model`, from the tensors that `Model.tensors` returns."""

    def __init__(self, export: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self._place(name, parameter)
        self.normalization = Normalization(export["dense_features"], export.get("normalizers", {}))
        self._vectors: list[str] = export["vectors"]
        self._dot = export["interaction"] == "dot"
        self._tables = {own["feature"]: table for table in export["tables"] for own in table["features"]}
        self._pooling = {own["feature"]: own for table in export["tables"] for own in table["features"]}
        self._heads: dict[str, Any] = {"attention": export.get("attention_heads"), "encoder": export.get("encoder_heads")}
        self._has_dense = bool(export["dense_features"])

    def _place(self, name: str, parameter: Tensor) -> None:
        """Registers `parameter` under this name, in nested modules with the parts of the name."""
        *parts, last = name.split(".")
        module: torch.nn.Module = self
        for part in parts:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(parameter, requires_grad=False))

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.parameters()).device

    def forward(self, dense: Tensor, features: dict[str, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Returns the logits, float32 [B, labels]."""
        pooled = {name: self._pooled(name, features[name]) for name in self._tables}
        vectors, names = [], self._vectors
        if self._has_dense:
            # The first vector belongs to the dense features, even if a sparse feature has the same name.
            vectors.append(self._mlp(_BOTTOM, self.normalization(dense)))
            names = names[1:]
        for name in names:
            if self._pooling[name]["pooling"] == "din":
                vectors.append(self._din(name, features, pooled))
            else:
                vectors.append(pooled[name].index_select(0, features[name][2]))
        return self._over(vectors)

    def _over(self, vectors: list[Tensor]) -> Tensor:
        """Returns the logits for the vectors that interact, [B, D] each."""
        if self._dot:
            stacked = torch.stack(vectors, 1)
            count = len(vectors)
            first, second = torch.triu_indices(count, count, offset=1, device=stacked.device)
            products = (stacked @ stacked.transpose(1, 2))[:, first, second]
            interacted = torch.cat([vectors[0], products], 1) if self._has_dense else products
        else:
            interacted = self._cross(torch.cat(vectors, 1))
        return self._linear("over_arch.model.1", self._mlp(_TOP, interacted))

    def _linear(self, name: str, values: Tensor) -> Tensor:
        return functional.linear(values, self.get_parameter(name + ".weight"), self.get_parameter(name + ".bias"))

    def _layers(self, pattern: str, part: str = "weight") -> Iterator[str]:
        """Yields the names of the existing layers that match a pattern."""
        names = dict(self.named_parameters())
        number = 0
        while f"{pattern.format(number)}.{part}" in names:
            yield pattern.format(number)
            number += 1

    def _mlp(self, pattern: str, values: Tensor) -> Tensor:
        """Runs layers, each followed by ReLU."""
        for name in self._layers(pattern):
            values = torch.relu(self._linear(name, values))
        return values

    def _cross(self, values: Tensor) -> Tensor:
        first = values
        for name in self._layers("cross.{}", "v.weight"):
            low_rank = functional.linear(values, self.get_parameter(name + ".v.weight"))
            values = first * self._linear(name + ".w", low_rank) + values
        return values

    def _embedded(self, name: str, ids: Tensor) -> Tensor:
        """Returns the vectors of ids as 32-bit floats."""
        table = self._tables[name]
        rows = sigrid_hash(ids, table["rows"]) if table["ids"] == "hashed" else ids
        return functional.embedding(rows, self.get_parameter(table["tensor"])).float()

    def _pooled(self, name: str, lists: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Returns the vector of every row, [R, D]. With `din`, returns the vectors of the elements, [R, L, D]."""
        ids, sizes, _ = lists
        vectors = self._embedded(name, ids)
        pooling = self._pooling[name]["pooling"]
        if pooling in ("sum", "mean"):
            places = torch.arange(ids.shape[0], device=ids.device)
            rows = torch.searchsorted(sizes.cumsum(0), places, right=True)
            pooled = vectors.new_zeros(sizes.shape[0], vectors.shape[1]).index_add(0, rows, vectors)
            if pooling == "mean":
                pooled = pooled / sizes.clamp(min=1).unsqueeze(1)
            projection = self._tables[name].get("projection")
            return pooled if projection is None else functional.linear(pooled, self.get_parameter(projection))
        valid = _valid(ids, sizes)
        if pooling == "attention":
            projected = self._linear("attention.qkv", vectors)
            return self._linear("attention.output", _mean(self._attended(projected, sizes, pooling), valid))
        return self._encoded(vectors, sizes, valid) if pooling == "encoder" else vectors

    def _attended(self, projected: Tensor, sizes: Tensor, pooling: str) -> Tensor:
        """Computes self-attention within each list, [R, L, D], from queries, keys and values, [R, L, 3 D]."""
        rows, longest, width = projected.shape
        heads = self._heads[pooling]
        parts = projected.view(rows, longest, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
        # Every row needs at least one key. The results of empty lists are not used.
        seen = _valid(projected[:, :, 0], sizes.clamp(min=1))[:, None, None, :]
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=seen)
        return attended.transpose(1, 2).reshape(rows, longest, width // 3)

    def _encoded(self, vectors: Tensor, sizes: Tensor, valid: Tensor) -> Tensor:
        """Runs a `torch.nn.TransformerEncoderLayer` with `norm_first`, and averages over the valid positions."""
        project = "encoder.self_attn.in_proj_"
        weight, bias = (self.get_parameter(project + part) for part in ("weight", "bias"))
        projected = functional.linear(self._norm("encoder.norm1", vectors), weight, bias)
        attended = self._attended(projected, sizes, "encoder")
        residual = vectors + self._linear("encoder.self_attn.out_proj", attended)
        hidden = torch.relu(self._linear("encoder.linear1", self._norm("encoder.norm2", residual)))
        return _mean(residual + self._linear("encoder.linear2", hidden), valid)

    def _norm(self, name: str, values: Tensor) -> Tensor:
        weight, bias = self.get_parameter(name + ".weight"), self.get_parameter(name + ".bias")
        return functional.layer_norm(values, (values.shape[-1],), weight, bias)

    def _din(self, name: str, features: dict[str, tuple[Tensor, Tensor, Tensor]], pooled: dict[str, Tensor]) -> Tensor:
        """Returns the vector of every sample, [B, D]: the sum of the elements times weights that depend on the
        target.

        The first layer on `[q, k, q - k, q * k]` is linear in each part, so it is applied to queries and keys only
        once.
        """
        target = self._pooling[name]["target"]
        ids, sizes, inverse = features[name]
        keys, queries, of_target = pooled[name], pooled[target], features[target][2]
        weight, bias = self.get_parameter("din.0.weight"), self.get_parameter("din.0.bias")
        of_query, of_key, of_difference, of_product = weight.chunk(4, 1)
        own_queries = functional.linear(queries, of_query + of_difference, bias).index_select(0, of_target)
        own_keys = functional.linear(keys, of_key - of_difference).index_select(0, inverse)
        keys, queries = keys.index_select(0, inverse), queries.index_select(0, of_target)
        hidden = functional.linear(queries.unsqueeze(1) * keys, of_product) + own_queries.unsqueeze(1) + own_keys
        for layer in list(self._layers("din.{}"))[1:]:
            hidden = self._linear(layer, torch.sigmoid(hidden))
        valid = _valid(ids, sizes).index_select(0, inverse)
        return (hidden * valid.unsqueeze(2) * keys).sum(1)


class Normalization(torch.nn.Module):
    """The normalization of a model's dense features, [B, D] to [B, D]."""

    shift: Tensor
    scale: Tensor
    logarithms: Tensor
    quantiles: Tensor
    by_quantiles: Tensor

    def __init__(self, names: Sequence[str], normalizers: Mapping[str, Any]) -> None:
        super().__init__()
        own = [normalizers.get(name, {"normalize": "none"}) for name in names]
        kinds = [normalizer["normalize"] for normalizer in own]
        scale = 1 / torch.tensor([normalizer.get("deviation", 1.0) for normalizer in own], dtype=torch.float32)
        numbers = {
            "shift": torch.tensor([normalizer.get("mean", 0.0) for normalizer in own], dtype=torch.float32),
            "scale": scale,
            "logarithms": torch.tensor([kind == "log1p" for kind in kinds], dtype=torch.bool),
            "by_quantiles": torch.tensor([i for i, kind in enumerate(kinds) if kind == "quantile"], dtype=torch.int64),
            "quantiles": torch.tensor([own[i]["quantiles"] for i, kind in enumerate(kinds) if kind == "quantile"]),
        }
        for name, values in numbers.items():
            self.register_buffer(name, values, persistent=False)
        self._has_logarithms, self._has_quantiles = "log1p" in kinds, "quantile" in kinds

    def forward(self, dense: Tensor) -> Tensor:
        values = dense
        if self._has_logarithms:
            values = torch.where(self.logarithms, torch.copysign(torch.log1p(dense.abs()), dense), dense)
        values = (values - self.shift) * self.scale
        if self._has_quantiles:
            places = self.by_quantiles.expand(dense.shape[0], -1)
            values = values.scatter(1, places, self._shares(dense.index_select(1, self.by_quantiles)))
        return values

    def _shares(self, x: Tensor) -> Tensor:
        """Returns the positions of values among the quantiles, from -√3 to √3.

        Values outside of the quantiles are extrapolated linearly, by at most the range of the quantiles.
        """
        quantiles, pieces = self.quantiles, self.quantiles.shape[1] - 1
        below = (quantiles < x.unsqueeze(2)).sum(2)
        equal = (quantiles == x.unsqueeze(2)).sum(2)
        column = torch.arange(quantiles.shape[0], device=x.device)
        start = quantiles[column, (below - 1).clamp(min=0)]
        width = quantiles[column, below.clamp(max=pieces)] - start
        between = (below - 1) + (x - start) / torch.where(width > 0, width, 1.0)
        smallest, largest = quantiles[:, 0], quantiles[:, -1]
        whole = largest - smallest
        outside = torch.where(below == 0, x - smallest, x - largest)
        outside = pieces * (outside / torch.where(whole > 0, whole, 1.0)).clamp(-1.0, 1.0) * (whole > 0)
        beyond = torch.where(below == 0, 0.0, float(pieces)) + outside
        place = torch.where((below > 0) & (below <= pieces), between, beyond)
        place = torch.where(equal > 0, below + (equal - 1) / 2, place)
        return torch.where(x.isnan(), x, math.sqrt(3.0) * (2.0 * place / pieces - 1.0))


def _valid(ids: Tensor, sizes: Tensor) -> Tensor:
    """Returns which positions of padded lists contain ids, [R, L]."""
    return torch.arange(ids.shape[1], device=ids.device) < sizes.unsqueeze(1)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean over the valid positions, [R, D] from [R, L, D], or zero without valid positions."""
    sums = torch.where(valid.unsqueeze(2), values, 0.0).sum(1)
    return sums / valid.sum(1, keepdim=True).clamp(min=1)


_K = 0x9DDF_EA08_EB38_2D69 - (1 << 64)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifts 64-bit numbers to the right, and fills with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def sigrid_hash(ids: Tensor, rows: int) -> Tensor:
    """Returns the SigridHash of ids with salt 0, modulo `rows`: the rows of a table with `ids = "hashed"`."""
    k = ~ids + (ids << 21)
    k = k ^ _shifted(k, 24)
    k = k + (k << 3) + (k << 8)
    k = k ^ _shifted(k, 14)
    k = k + (k << 2) + (k << 4)
    k = k ^ _shifted(k, 28)
    a = (k + (k << 31)) * _K
    b = (a ^ _shifted(a, 47)) * _K
    return torch.remainder((b ^ _shifted(b, 47)) * _K, rows)


def load(export: str | os.PathLike[str], *, device: Any = "cpu") -> Model:
    """Loads the model that `onefold-train export` wrote to the directory `export`.

    Raises a `DataError` if the directory does not contain an export, or contains one with another format version.
    """
    folder = Path(export)
    try:
        described = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"`{folder}` is no exported model: it has no `export.json`\n"
            f"  hint: make one: onefold-train export RUN --out {folder}"
        ) from error
    if described.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"`{folder}` has an export of version {described.get('format_version')}, and this package reads version "
            f"{FORMAT_VERSION}\n  hint: export the run again with the `onefold-train` of this package's version"
        )
    steps = folder / "preprocess" / "preprocess.toml"
    model = Model(described, read_tensors(folder / "model.safetensors"), steps if described["preprocess"] else None)
    return model.to(device)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name."""
    try:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        length = int.from_bytes(bytes(data[:8].tolist()), "little")
        header = json.loads(bytes(data[8 : 8 + length].tolist()))
        header.pop("__metadata__", None)
        tensors = {}
        for name, tensor in header.items():
            start, end = (8 + length + place for place in tensor["data_offsets"])
            # The copy has the alignment of its type, and does not keep the file mapped.
            own = data[start:end].clone().view(getattr(torch, _DTYPES[tensor["dtype"]]))
            tensors[name] = own.view(tensor["shape"])
        return tensors
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"`{path}` cannot be read as a file of safetensors: {error}\n  hint: export the run again"
        ) from error
