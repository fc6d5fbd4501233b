"""The data files of a dataset, for engines that read Parquet themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _onefold
from ._arguments import integer
from ._errors import OptionsError


@dataclass(frozen=True)
class FileSet:
    """Samples of one partition, and the Parquet files that have their columns.

    It is mostly one file. Columns that were added or computed anew later are in a file of their own: then Parquet row k of
    each file is the same sample, and the files are joined by the position of their rows.
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
        """The only file. If there are several, an `OptionsError`: each of them lacks columns."""
        if len(self.files) != 1:
            raise OptionsError(
                f"the columns of {self.samples} samples are in several files: {', '.join(self.files)}\n"
                "  hint: read each of `files`, and join their columns by the position of the rows"
            )
        return next(iter(self.files))


def files(dataset: str | os.PathLike[str], partitions: str | None = None, at: int | None = None) -> list[FileSet]:
    """The data files of a dataset's snapshot, in the order of its samples.

    Other files in the dataset's folder belong to older snapshots, or to none. With the layout `folded`, a null list
    means "as in the Parquet row above", and the first row of each row group has no null: `examples/dataframes.py`
    restores all lists.

    Arguments:
        dataset: a path or a URL
        partitions: a filter, as `"split=train,date>=2024-05-01"`; by default all
        at: the number of the snapshot; by default the newest
    """
    number = None if at is None else integer("at", at)
    found = _onefold.list_files(os.fspath(dataset), partitions or "", number)
    return [FileSet(dict(key), samples, dict(columns), dict(names)) for key, samples, columns, names in found]
