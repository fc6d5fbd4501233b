import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

_Path: TypeAlias = str | os.PathLike[str]
"""A path, or the URL of an object store where a command takes one."""
_Size: TypeAlias = int | str
"""A number of bytes, or text such as `"512MiB"`."""
class _Stream(Protocol):
    """An Arrow stream: a table or a reader of pyarrow, Polars, pandas, DuckDB, pyiceberg, deltalake or another library."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...

_Progress: TypeAlias = Callable[[str, int, int | None, str], object] | Literal[False] | None
"""Called with stage, done, total and unit. None: a line on stderr, if that is a terminal. False: nothing."""
_Summary: TypeAlias = dict[str, Any]
"""The object that the command prints with `--json`."""

COMMANDS: dict[str, tuple[str, str]]
"""By the name of the function: the program and its command."""

def fetch(
    source: Literal["movielens-100k"],
    *,
    out: _Path,
    overwrite: bool = False,
    cache: _Path | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Fetch a public data set from the network, once, and write it as raw logs."""

def import_logs(
    source: Literal["ebnerd"],
    *,
    from_: _Path,
    out: _Path,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Convert public logs on this machine to raw logs."""

def generate(
    *,
    workload: Literal["rm1", "rm2", "rm3"],
    samples: int,
    seed: int,
    out: _Path,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Generate the raw logs of a benchmark workload from a seed."""

def build(
    config: _Path,
    *,
    out: _Path,
    sources: Mapping[str, _Path | _Stream] | None = None,
    groups: Literal["given", "auto"] = "given",
    profile: _Path | None = None,
    layout: Literal["rows", "folded"] | None = None,
    order: Literal["session", "session-hash", "arrival"] | None = None,
    popularity: _Path | None = None,
    partition: str | None = None,
    memory_limit: _Size = "4GiB",
    spill_directory: _Path | None = None,
    spill_limit: _Size | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    buckets: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Build a dataset from the raw logs that a `dataset.toml` names."""

def append(
    config: _Path,
    *,
    out: _Path,
    sources: Mapping[str, _Path | _Stream] | None = None,
    groups: Literal["given", "auto"] = "given",
    profile: _Path | None = None,
    layout: Literal["rows", "folded"] | None = None,
    order: Literal["session", "session-hash", "arrival"] | None = None,
    popularity: _Path | None = None,
    partition: str | None = None,
    memory_limit: _Size = "4GiB",
    spill_directory: _Path | None = None,
    spill_limit: _Size | None = None,
    threads: int | None = None,
    replace: bool = False,
    merge: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Add partitions to a dataset, or build some of its partitions again; with `merge=True` add late samples."""

def verify(
    dataset: _Path,
    *,
    at: int | None = None,
    against: _Path | None = None,
    partition: str | None = None,
    absent: _Path | None = None,
    column: str | None = None,
    memory_limit: _Size = "4GiB",
    spill_directory: _Path | None = None,
    spill_limit: _Size | None = None,
    threads: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Read a whole dataset; raise an `OnefoldError` whose `summary` lists everything that is wrong with it."""

def history(dataset: _Path, *, limit: int | None = None, progress: _Progress = None) -> _Summary:
    """List the snapshots of a dataset: when each was committed, and what it changed."""

def vacuum(
    dataset: _Path,
    *,
    keep: int = 10,
    older_than: str = "1d",
    dry_run: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Remove old snapshots, and files that no other snapshot names."""

def report(
    dataset: _Path | None = None,
    *,
    at: int | None = None,
    from_logs: _Path | None = None,
    samples: int = 200000,
    html: _Path | None = None,
    memory_limit: _Size = "256MiB",
    encode_samples: int = 100000,
    scratch_directory: _Path | None = None,
    threads: int | None = None,
    progress: _Progress = None,
) -> _Summary:
    """Measure how much repeats in a dataset, its size on disk in each layout, and how much training can gain."""

def digest(
    dataset: _Path,
    *,
    at: int | None = None,
    global_batch_size: int | None = None,
    rank: str | None = None,
    streams: int | None = None,
    tail: Literal["drop", "short"] = "short",
    dedupe: Literal["off", "exact", "window"] = "window",
    preprocess: _Path | None = None,
    threads: int | None = None,
    memory_limit: _Size = "1GiB",
    partitions: str | None = None,
    features: Iterable[str] | None = None,
    labels_as_of: str | None = None,
    shuffle: int | None = None,
    shuffle_row_groups: int = 4,
    within: Literal["epoch", "partition"] = "epoch",
    table_rows: Mapping[str, int] | None = None,
    no_verify: bool = False,
    by_step: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Read everything once and digest the samples, which does not depend on the way they are read."""

def tables(
    config: _Path | None = None,
    *,
    out: _Path,
    data: _Path | None = None,
    torchrec: _Path | None = None,
    at: int | None = None,
    warm_start: _Path | None = None,
    resume: _Path | None = None,
    dedupe_factor: Mapping[str, float] | None = None,
    dedupe: Literal["off", "exact", "window"] = "window",
    samples: int = 65536,
    memory_limit: _Size = "1GiB",
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Describe the tables of a model, from its training configuration and dataset."""

def topology(
    *,
    ranks: int,
    memory: _Size,
    out: _Path,
    measure: bool = False,
    ranks_per_node: int | None = None,
    memory_bandwidth: float | str | None = None,
    intra_node_bandwidth: float | str | None = None,
    inter_node_bandwidth: float | str | None = None,
    hardware: str | None = None,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Describe the ranks that train together."""

def plan(
    *,
    tables: _Path,
    topology: _Path,
    out: _Path,
    model: _Path | Iterable[_Path] | None = None,
    any_hardware: bool = False,
    search: str = "beam",
    seed: int = 1,
    explain: Iterable[str] | None = None,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Place tables on the ranks of a topology."""

def replan(
    *,
    plan: _Path,
    tables: _Path,
    budget: _Size,
    out: _Path,
    topology: _Path | None = None,
    model: _Path | Iterable[_Path] | None = None,
    any_hardware: bool = False,
    overwrite: bool = False,
    progress: _Progress = None,
) -> _Summary:
    """Change the plan of a running job, with few moves."""
