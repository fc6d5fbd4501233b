"""The console scripts, which behave like the programs: the same arguments, exit statuses and signals."""

import os
import signal
import sys

from . import _onefold


def _main(program: str) -> None:
    # Ctrl-C ends the process at once, as it ends the binary. A killed program leaves no partial output.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_onefold.run_program(program, [program, *sys.argv[1:]]))


def onefold() -> None:
    """Runs `onefold`, which finds the other scripts in the directory of its own script."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    _main("onefold")


def data() -> None:
    """Runs `onefold-data`."""
    _main("onefold-data")


def ingest() -> None:
    """Runs `onefold-ingest`."""
    _main("onefold-ingest")


def read() -> None:
    """Runs `onefold-read`."""
    _main("onefold-read")


def shard() -> None:
    """Runs `onefold-shard`."""
    _main("onefold-shard")
