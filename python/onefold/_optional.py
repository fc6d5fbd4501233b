"""Optional packages, which are imported when they are used."""

import importlib
from typing import Any

from ._errors import MissingPackageError


def optional(package: str, extra: str) -> Any:
    """Imports the module `package`. Raises an error that says how to install it if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"this needs the package `{package}`, which cannot be imported: {error}\n"
            f"  hint: install it: pip install 'onefold[{extra}]'"
        ) from error
