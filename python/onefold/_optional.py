"""Packages that only some functions need: imported when they are used."""

import importlib
from typing import Any

from ._errors import MissingPackageError


def optional(package: str, extra: str) -> Any:
    """The module `package`, or an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"this needs the package `{package}`, which cannot be imported: {error}\n"
            f"  hint: install it: pip install 'onefold[{extra}]'"
        ) from error
