"""Arguments of functions as those of a command line."""

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy


def refuse_unknown(name: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raises a TypeError for a keyword that the function `name` does not have."""
    for keyword in given:
        if keyword not in signature.parameters:
            near = difflib.get_close_matches(keyword, signature.parameters, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{name}() has no argument '{keyword}'{hint}")


def texts(keyword: str, kind: Literal["switch", "one", "many"], value: Any) -> list[str] | None:
    """The value as the command line's texts; None if it says nothing."""
    if value is None:
        return None
    if kind == "switch":
        if not isinstance(value, (bool, numpy.bool_)):
            raise TypeError(f"'{keyword}' takes True or False, not {type(value).__name__}")
        return [""] if value else None
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
    if isinstance(value, bool) or not hasattr(value, "__index__") and not hasattr(value, "__float__"):
        raise TypeError(f"'{keyword}' takes text, a path or a number, not {type(value).__name__}")
    return str(value)
