"""Checks of arguments, and conversion of a function's arguments into those of a command line.

In Python, a bool is an integer, and almost every value is true or false. But `shuffle=False` must not become the seed
0, nor `streams=True` one stream. So every integer and every switch of this package is checked by `integer` or
`switch`. `text`, `path` and `names` check texts, because the compiled module would not say which argument is wrong.
"""

import difflib
import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy

from ._errors import OptionsError

_END = 1 << 64


def integer(keyword: str, value: Any, *, signed: bool = False) -> int:
    """Returns the value of an argument that is an integer of Python, numpy or torch, but not a bool.

    Raises a TypeError for other types, and an OptionsError for a number outside of 0 to 2^64 - 1, unless `signed`.
    """
    if isinstance(value, (bool, numpy.bool_)):
        raise TypeError(f"'{keyword}' takes an integer, not {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"'{keyword}' takes an integer, not {type(value).__name__}") from None
    if not (signed or 0 <= number < _END):
        raise OptionsError(f"`{keyword}` is {number}\n  hint: give an integer from 0 to 2^64 - 1")
    return number


def switch(keyword: str, value: Any, otherwise: str = "") -> bool:
    """Returns the value of an argument that is True or False.

    Raises a TypeError for other types, whose message ends with `otherwise`.
    """
    if not isinstance(value, (bool, numpy.bool_)):
        raise TypeError(f"'{keyword}' takes True or False, not {type(value).__name__}{otherwise}")
    return bool(value)


def text(keyword: str, value: Any) -> str:
    """Returns the value of an argument that is a text. Raises a TypeError for other types."""
    if not isinstance(value, str):
        raise TypeError(f"'{keyword}' takes a text, not {type(value).__name__}")
    return value


def path(keyword: str, value: Any) -> str:
    """Returns the value of an argument that is a path or a URL as a text. Raises a TypeError for other types."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(f"'{keyword}' takes a path or a URL, not {type(value).__name__}") from None


def absolute(keyword: str, value: Any) -> str:
    """Does the same as `path`, but a relative path becomes an absolute one.

    A file that is opened again later is then the same one, even if the working directory has changed.
    """
    given = path(keyword, value)
    # The compiled module refuses an empty path, a `~`, and `s3:/bucket`, which a `Path` makes of a URL.
    is_url = given.partition("/")[0].endswith(":")
    is_relative = given and not (is_url or given.startswith("~") or os.path.isabs(given))
    return os.path.join(os.getcwd(), given) if is_relative else given


def names(keyword: str, value: Any) -> list[str]:
    """Returns the value of an argument that is a list of names.

    Raises a TypeError for other types, and an OptionsError for one text, which would be taken as a list of its
    characters.
    """
    if isinstance(value, str):
        raise OptionsError(f"`{keyword}` is the text `{value}`\n  hint: give a list of names, as [\"{value}\"]")
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"'{keyword}' takes a list of names, not {type(value).__name__}")
    found = list(value)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"'{keyword}' takes a list of names, and {name!r} is not a text")
    return found


def refuse_unknown(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raises a TypeError for a keyword that the function `name` does not have."""
    for keyword in given:
        if keyword not in signature.parameters:
            near = difflib.get_close_matches(keyword, signature.parameters, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{name}() has no argument '{keyword}'{hint}")


def texts(keyword: str, kind: Literal["switch", "one", "many"], value: Any) -> list[str] | None:
    """Returns the value as texts for the command line, or None if the argument is not set."""
    if value is None:
        return None
    if kind == "switch":
        return [""] if switch(keyword, value) else None
    if isinstance(value, Mapping):
        given = [f"{key}={_text(keyword, one)}" for key, one in value.items()]
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, os.PathLike)):
        given = [_text(keyword, one) for one in value]
    else:
        return [_text(keyword, value)]
    if kind == "one":
        raise TypeError(f"'{keyword}' takes one value, not {type(value).__name__}")
    return given


def _text(keyword: str, value: Any) -> str:
    if isinstance(value, (str, bytes, os.PathLike)):
        return os.fsdecode(value)
    is_number = hasattr(value, "__index__") or hasattr(value, "__float__")
    if isinstance(value, (bool, numpy.bool_)) or not is_number:
        raise TypeError(f"'{keyword}' takes text, a path or a number, not {type(value).__name__}")
    return str(value)
