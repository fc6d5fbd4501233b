"""The console scripts: the programs themselves, with their arguments, exit statuses and signals."""

import signal
import sys

from . import _onefold


def _main(program: str) -> None:
    # Ctrl-C ends the process at once, as it ends the binary. A program that is killed leaves nothing half-written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_onefold.run_program(program, [program, *sys.argv[1:]]))


def data() -> None:
    """`onefold-data`."""
    _main("onefold-data")


def ingest() -> None:
    """`onefold-ingest`."""
    _main("onefold-ingest")


def read() -> None:
    """`onefold-read`."""
    _main("onefold-read")


def shard() -> None:
    """`onefold-shard`."""
    _main("onefold-shard")
