"""The exceptions of the package. The message says what is wrong and where; the lines after `hint:` say what to do."""

from typing import Any, Self

_HINT = "\n  hint: "


class OnefoldError(Exception):
    """The base class of the exceptions, and the class of errors without a more specific one."""

    # torch raises a worker's error again in the process of the loader. If the class has a `message`, it uses this
    # keyword.

    def __new__(cls, *arguments: Any, message: str | None = None) -> Self:
        return super().__new__(cls, *(arguments if message is None else (message,)))

    def __init__(self, *arguments: Any, message: str | None = None) -> None:
        super().__init__(*(arguments if message is None else (message,)))

    summary: dict[str, Any] | None = None
    """The findings of a command before it failed, as a dict: `verify` lists problems. None for other errors."""

    @property
    def message(self) -> str:
        """The problem and its place, without the hint."""
        return str(self).partition(_HINT)[0]

    @property
    def hint(self) -> str | None:
        """The hint, or None if the message has none."""
        _, found, hint = str(self).partition(_HINT)
        return hint.replace(_HINT, "\n") if found else None


class OptionsError(OnefoldError, ValueError):
    """Options or a configuration that are invalid, or that do not fit this dataset."""


class DataError(OnefoldError):
    """Data that is damaged or was changed, or that has an invalid form or invalid values."""


class StorageError(OnefoldError, OSError):
    """An error of the operating system or of an object store."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ProcessError(OnefoldError, RuntimeError):
    """The use of an object of the parent process after a fork."""


class MissingPackageError(OnefoldError, ImportError):
    """An optional package that a function needs is not installed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
