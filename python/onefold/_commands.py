"""The commands of the binaries as functions.

Each function has the arguments of its command, which are taken from the command's own definition: `--memory-limit
4GiB` is `memory_limit="4GiB"`. It returns the output of the command with `--json`, as a dict, and raises an
`OnefoldError` with the message and the hint of the command. `_commands.pyi` contains the signatures for type
checkers, and a test compares it with the functions.
"""

import contextlib
import inspect
import json
import sys
import time

from . import _onefold
from ._arguments import refuse_unknown, texts
from ._sources import as_files

COMMANDS = {
    "fetch": ("onefold-data", "fetch"),
    "import_logs": ("onefold-data", "import"),
    "generate": ("onefold-data", "generate"),
    "build": ("onefold-ingest", "build"),
    "append": ("onefold-ingest", "append"),
    "verify": ("onefold-ingest", "verify"),
    "history": ("onefold-ingest", "history"),
    "vacuum": ("onefold-ingest", "vacuum"),
    "report": ("onefold-ingest", "report"),
    "digest": ("onefold-read", "digest"),
    "tables": ("onefold-shard", "tables"),
    "topology": ("onefold-shard", "topology"),
    "plan": ("onefold-shard", "plan"),
    "replan": ("onefold-shard", "replan"),
}
"""By the name of the function: the program and its command."""

_PROGRESS = (
    "progress: a function of (stage, done, total, unit), where total may be None; by default a line on stderr, "
    "if that is a terminal; False for none"
)


def _function(name, program, command):
    about, keywords = _onefold.describe_command(program, command)
    kinds = {keyword: kind for keyword, kind, *_ in keywords}
    signature = _signature(keywords)

    def function(*args, **kwargs):
        refuse_unknown(name, signature, kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        progress = given.pop("progress", None)
        with contextlib.ExitStack() as files:
            if given.get("sources") is not None:
                given["sources"] = files.enter_context(as_files(given["sources"], given.get("spill_directory")))
            words = [(keyword, texts(keyword, kinds[keyword], value)) for keyword, value in given.items()]
            given = [(keyword, values) for keyword, values in words if values is not None]
            return json.loads(_run(program, command, given, progress))

    function.__name__ = function.__qualname__ = name
    function.__module__ = "onefold.cli"
    function.__signature__ = signature
    described = [f"{keyword}: {text}" for keyword, *_, text in keywords] + [_PROGRESS]
    arguments = "\n    ".join(described)
    function.__doc__ = f"{about}\n\nThe command `{program} {command}`.\n\nArguments:\n    {arguments}\n"
    return function


def _signature(keywords):
    parameters = []
    for keyword, kind, positional, required, default, _ in keywords:
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD if positional else inspect.Parameter.KEYWORD_ONLY
        if required:
            default = inspect.Parameter.empty
        elif kind == "switch":
            default = False
        elif default is not None and default.isdigit():
            default = int(default)
        parameters.append(inspect.Parameter(keyword, place, default=default))
    parameters.append(inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=None))
    # Positional parameters come first, then required ones.
    parameters.sort(key=lambda parameter: (parameter.kind, parameter.default is not inspect.Parameter.empty))
    return inspect.Signature(parameters)


def _run(program, command, given, progress):
    if progress is None and sys.stderr is not None and sys.stderr.isatty():
        with _Line() as line:
            return _onefold.run_command(program, command, given, line)
    return _onefold.run_command(program, command, given, progress or None)


class _Line:
    """Shows progress on one line of stderr."""

    def __init__(self):
        self._stage, self._began = None, 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._stage is not None:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, stage, done, total, unit):
        if stage != self._stage:
            self._stage, self._began = stage, time.monotonic()
        seconds = time.monotonic() - self._began
        share = f" {100 * done // total:3} %" if total else ""
        of = f"/{total:,}" if total else ""
        rate = f"  {done / seconds:,.0f}/s" if seconds >= 1 else ""
        print(f"\r\x1b[K{stage:<12}{share}  {done:,}{of} {unit}{rate}", end="", file=sys.stderr, flush=True)


globals().update({name: _function(name, *command) for name, command in COMMANDS.items()})
