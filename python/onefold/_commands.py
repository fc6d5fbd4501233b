"""The commands of the binaries as functions.

Each function has the arguments of its command, as the command's own definition says: `--memory-limit 4GiB` is
`memory_limit="4GiB"`. It returns what the command prints with `--json`, as a dict, and raises an `OnefoldError`
with the message and the hint that the command prints. `_commands.pyi` says the same to type checkers; a test holds
it to this.
"""

import difflib
import inspect
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping

from . import _onefold

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
        for keyword in kwargs:
            if keyword not in signature.parameters:
                near = difflib.get_close_matches(keyword, signature.parameters, 1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise TypeError(f"{name}() has no argument '{keyword}'{hint}")
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}(): {error}") from None
        progress = given.pop("progress", None)
        values = [(keyword, _texts(keyword, kinds[keyword], value)) for keyword, value in given.items()]
        given = [(keyword, texts) for keyword, texts in values if texts is not None]
        return json.loads(_run(program, command, given, progress))

    function.__name__ = function.__qualname__ = name
    function.__module__ = "onefold"
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
    # By place first, and among the others those that must be given.
    parameters.sort(key=lambda parameter: (parameter.kind, parameter.default is not inspect.Parameter.empty))
    return inspect.Signature(parameters)


def _texts(keyword, kind, value):
    """The value as the command line's texts; None if it says nothing."""
    if value is None:
        return None
    if kind == "switch":
        return [""] if value else None
    if isinstance(value, Mapping):
        texts = [f"{key}={_text(keyword, one)}" for key, one in value.items()]
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, os.PathLike)):
        texts = [_text(keyword, one) for one in value]
    else:
        return [_text(keyword, value)]
    if kind == "one":
        raise TypeError(f"'{keyword}' takes one value, not {type(value).__name__}")
    return texts


def _text(keyword, value):
    if isinstance(value, (str, bytes, os.PathLike)):
        return os.fsdecode(value)
    if isinstance(value, bool) or not hasattr(value, "__index__") and not hasattr(value, "__float__"):
        raise TypeError(f"'{keyword}' takes text, a path or a number, not {type(value).__name__}")
    return str(value)


def _run(program, command, given, progress):
    if progress is None and sys.stderr is not None and sys.stderr.isatty():
        with _Line() as line:
            return _onefold.run_command(program, command, given, line)
    return _onefold.run_command(program, command, given, progress or None)


class _Line:
    """Progress on one line of stderr."""

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
