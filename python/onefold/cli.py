"""The commands of `onefold-data`, `onefold-ingest`, `onefold-read`, `onefold-shard` and `onefold-train` as functions.

    from onefold import cli

    cli.fetch("movielens-100k", out="logs")
    cli.build("logs/dataset.toml", out="dataset")
    cli.verify("dataset")

Each function has the options of its command as keywords. It returns the output of the command with `--json`, as a
dict, and raises an `OnefoldError` with the command's message and hint. `build` and `append` are also in `onefold`.
"""

from ._commands import (
    append,
    build,
    digest,
    fetch,
    generate,
    history,
    import_logs,
    plan,
    replan,
    report,
    tables,
    topology,
    vacuum,
    verify,
)
from ._trainer import evaluate, export, follow, predict, report_runs, train

__all__ = [
    "append",
    "build",
    "digest",
    "evaluate",
    "export",
    "fetch",
    "follow",
    "generate",
    "history",
    "import_logs",
    "plan",
    "predict",
    "replan",
    "report",
    "report_runs",
    "tables",
    "topology",
    "train",
    "vacuum",
    "verify",
]
