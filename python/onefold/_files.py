"""The data files of a dataset, for engines that read Parquet themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _onefold
from ._arguments import integer, path, text
from ._errors import OptionsError


@dataclass(frozen=True)
class FileSet:
    """Samples of one partition, and the Parquet files with their columns.

    Nearly always there is one file. A column that was added or computed again later is in a separate file. Row k of
    each Parquet file then belongs to the same sample, so the files are joined by the position of their rows.
    """

    partition: Mapping[str, str]
    """The values of the partition columns."""
    samples: int
    """The number of samples, which is the number of Parquet rows in each file."""
    files: Mapping[str, list[str]]
    """The columns of each file, by its path: an absolute one on a local disk, otherwise a URL.

    A file may have further columns, of features that were dropped or of labels that were computed anew since.
    """
    names: Mapping[str, str] = field(default_factory=dict)
    """By the name of a column in the files, its name in the dataset, of columns that have another one there."""

    @property
    def path(self) -> str:
        """The path of the only file. Raises an `OptionsError` if there are several, because each lacks columns."""
        if len(self.files) != 1:
            raise OptionsError(
                f"the columns of {self.samples} samples are in several files: {', '.join(self.files)}\n"
                "  hint: read each of `files`, and join their columns by the position of the rows"
            )
        return next(iter(self.files))


def files(dataset: str | os.PathLike[str], partitions: str | None = None, at: int | None = None) -> list[FileSet]:
    """Returns the data files of a dataset's snapshot, in the order of its samples.

    Other files in the directory of the dataset belong to other snapshots, or to no snapshot. In the layout `folded`,
    a null list means "as in the previous Parquet row", and the first row of each row group has no nulls:
    `examples/dataframes.py` restores all lists.

    Arguments:
        dataset: a path or a URL
        partitions: a filter such as `"split=train,date>=2024-05-01"`; by default all partitions
        at: the number of the snapshot; by default the newest
    """
    number = None if at is None else integer("at", at)
    wanted = "" if partitions is None else text("partitions", partitions)
    found = _onefold.list_files(path("dataset", dataset), wanted, number)
    return [FileSet(dict(key), samples, dict(columns), dict(names)) for key, samples, columns, names in found]
