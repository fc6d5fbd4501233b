"""What the package raises. The message says what is wrong and where; its last lines, after `hint:`, say what to do."""

from typing import Any, Self

_HINT = "\n  hint: "


class OnefoldError(Exception):
    """Something that Onefold refuses or cannot do."""

    # torch raises a worker's error anew in the process of the loader, by this keyword if the class has a `message`.

    def __new__(cls, *arguments: Any, message: str | None = None) -> Self:
        return super().__new__(cls, *(arguments if message is None else (message,)))

    def __init__(self, *arguments: Any, message: str | None = None) -> None:
        super().__init__(*(arguments if message is None else (message,)))

    summary: dict[str, Any] | None = None
    """What a command had found before it failed, as a dict: `verify` lists the problems there. None for other errors."""

    @property
    def message(self) -> str:
        """What is wrong and where, without the hint."""
        return str(self).partition(_HINT)[0]

    @property
    def hint(self) -> str | None:
        """What to do, or None if the message has no hint."""
        _, found, hint = str(self).partition(_HINT)
        return hint.replace(_HINT, "\n") if found else None


class OptionsError(OnefoldError, ValueError):
    """Options or a configuration that cannot work, or cannot work with this dataset."""


class DataError(OnefoldError):
    """Data that is damaged or was changed, or that does not have the form or the values that it must have."""


class StorageError(OnefoldError, OSError):
    """The operating system or an object store refuses something."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ProcessError(OnefoldError, RuntimeError):
    """An object of the parent process, used after a fork."""


class MissingPackageError(OnefoldError, ImportError):
    """An optional package that a function needs is not installed."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
