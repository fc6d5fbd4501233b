"""Onefold: training data for recommendation models, in which every distinct value is stored and computed once.

    import onefold

    dataset = onefold.Dataset("dataset", global_batch_size=4096, shuffle=True, seed=1)
    for batch in dataset:
        batch.dense                                   # float32 [B, D], a numpy view of the batch's one allocation
        batch.groups["user"].inverse                  # int32 [B]: the row of every sample
        batch.groups["user"].features["history"].row(0)

`onefold.build` and `onefold.append` make datasets from files or Arrow streams. `onefold.cli` contains all commands as
functions, including those of the wheel `onefold-train`. `onefold.torch` contains the dataset for PyTorch's loaders.
`onefold.torchrec` converts batches into TorchRec's KeyedJaggedTensor, and `onefold.adapters` into the structures of
other trainers. `onefold.files` lists the Parquet files of a dataset for other engines.
"""

from . import _processor

_processor.check()

from . import cli
from ._arrow import ArrowStream
from ._batch import Batch, Feature, Group
from ._commands import append, build
from ._dataset import BatchIterator, Dataset, configure
from ._errors import DataError, MissingPackageError, OnefoldError, OptionsError, ProcessError, StorageError
from ._files import FileSet, files
from ._onefold import __version__

__all__ = [
    "ArrowStream",
    "Batch",
    "BatchIterator",
    "DataError",
    "Dataset",
    "Feature",
    "FileSet",
    "Group",
    "MissingPackageError",
    "OnefoldError",
    "OptionsError",
    "ProcessError",
    "StorageError",
    "__version__",
    "append",
    "build",
    "cli",
    "configure",
    "files",
]
