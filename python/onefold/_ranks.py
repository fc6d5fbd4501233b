"""The rank of this process in a training job."""

from __future__ import annotations

import os
import sys

from ._errors import OptionsError

_GIVE = "give `rank` and `world_size`, which win"


def current(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns the rank of this process and the number of processes.

    They are the two arguments if given, else those of `torch.distributed` if it is initialised, else the environment
    variables `RANK` and `WORLD_SIZE`, which torchrun sets, else 0 and 1. Raises an `OptionsError` if
    only one of the arguments is given, or if `torch.distributed` and the variables contradict each other.
    """
    if rank is not None and world_size is not None:
        return rank, world_size
    if world_size == 1:
        return 0, 1
    if rank is not None or world_size is not None:
        given, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise OptionsError(f"`{given}` is given without `{missing}`\n  hint: give both, or none of them")
    group, variables = _of_group(), _of_variables()
    if group is not None and variables is not None and group != variables:
        raise OptionsError(
            f"torch.distributed says that this is rank {group[0]} of {group[1]}, and the environment variables "
            f"RANK={variables[0]} and WORLD_SIZE={variables[1]} say otherwise\n  hint: {_GIVE}"
        )
    return group or variables or (0, 1)


def _of_group() -> tuple[int, int] | None:
    """Returns rank and size of torch.distributed. It cannot be initialised unless it is imported."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _of_variables() -> tuple[int, int] | None:
    """Returns rank and size from the environment variables."""
    texts = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if not any(texts.values()):
        return None
    for name, text in texts.items():
        if not (text.isascii() and text.isdigit()):
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            found = f"is `{text}`, which is not a number" if text else f"is missing, and {other} is set"
            raise OptionsError(f"the environment variable {name} {found}\n  hint: {_GIVE}")
    rank, world_size = int(texts["RANK"]), int(texts["WORLD_SIZE"])
    if rank >= world_size:
        raise OptionsError(
            f"the environment variables RANK={rank} and WORLD_SIZE={world_size} name a rank that does not exist\n"
            f"  hint: ranks count from 0; {_GIVE}"
        )
    return rank, world_size
